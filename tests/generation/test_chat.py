"""A conversation that keeps its cache says what one without says, and computes less."""

import os
import signal

import pytest
from helpers import chat_folder

import bitnet_ref
from bitnet_ref.errors import GenerationError
from bitnet_ref.generation import TokenStream

MESSAGES = ["Hello", "Who are you?", "Tell me more"]


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """Storyteller with a chat template: a model that chats, whatever it answers."""
    folder = chat_folder(tmp_path_factory.mktemp("models"))
    return bitnet_ref.load(folder)


def prompt_of(model, history, message):
    return model.tokenizer.apply_chat_template([*history, {"role": "user", "content": message}], tokenize=True)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 2, "top_k": 30}])
def test_replies_are_those_of_the_whole_conversation_and_shared_tokens_are_not_computed(talker, params, monkeypatch):
    computed = []
    run, run_greedy = bitnet_ref.Model.run, bitnet_ref.Model.run_greedy

    def watched(self, batch, *rest, **options):
        computed.append(len(batch))
        return run(self, batch, *rest, **options)

    def watched_steps(self, batch, *rest):
        for step in run_greedy(self, batch, *rest):
            computed.append(len(batch))
            yield step

    monkeypatch.setattr(bitnet_ref.Model, "run", watched)
    monkeypatch.setattr(bitnet_ref.Model, "run_greedy", watched_steps)
    session, history = (
        talker.chat(system="Be kind.", max_tokens=8, **params),
        [{"role": "system", "content": "Be kind."}],
    )
    known = []
    for message in MESSAGES:
        ids = prompt_of(talker, history, message)
        computed.clear()
        reply = session.send(message)
        same = next((i for i, (a, b) in enumerate(zip(known, ids, strict=False)) if a != b), min(len(known), len(ids)))
        assert reply.stats.cached_tokens == same
        assert computed == [len(ids) - same] + [1] * (len(reply.token_ids) - 1)
        assert reply.prompt_token_ids == ids
        alone = talker.generate(ids, max_tokens=8, **params)
        assert (reply.token_ids, reply.text, reply.logprobs) == (alone.token_ids, alone.text, alone.logprobs)
        known = ids + reply.token_ids[:-1]
        history += [{"role": "user", "content": message}, {"role": "assistant", "content": reply.text}]
        assert session.messages == history
    assert reply.stats.cached_tokens > 20  # that there was something to share
    session.reset()
    computed.clear()
    again = session.send(MESSAGES[0])
    assert again.stats.cached_tokens == 0
    assert computed[0] == len(again.prompt_token_ids)


def test_a_closed_stream_keeps_what_was_said(talker):
    session = talker.chat(max_tokens=20)
    with session.stream("Hello") as stream:
        said = "".join(next(stream).text for _ in range(5))
    assert said
    assert session.messages[-1] == {"role": "assistant", "content": said}
    history = list(session.messages)
    reply = session.send("Go on")
    alone = talker.generate(prompt_of(talker, history, "Go on"), max_tokens=20)
    assert reply.token_ids == alone.token_ids
    assert reply.stats.cached_tokens > 5


def test_an_unread_stream_and_an_error_leave_the_history_as_it_was(talker):
    session = talker.chat(max_tokens=6)
    session.send("Hello")
    history = list(session.messages)
    session.stream("Not read")
    assert session.messages == history

    def failing(ids, logits):
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        session.send("Fails", processors=[failing])
    assert session.messages == history
    alone = talker.generate(prompt_of(talker, history, "Again"), max_tokens=6)
    assert session.send("Again").token_ids == alone.token_ids


def test_the_next_message_closes_an_open_stream(talker):
    session = talker.chat(max_tokens=30)
    stream = session.stream("Hello")
    said = next(stream).text + next(stream).text
    reply = session.send("Go on")
    assert list(stream) == []
    assert session.messages[1] == {"role": "assistant", "content": said}
    assert reply.token_ids == talker.generate(reply.prompt_token_ids, max_tokens=30).token_ids


def test_the_echo_of_the_prompt_is_no_part_of_the_history(talker):
    plain, echoing = talker.chat(max_tokens=6), talker.chat(max_tokens=6, echo=True)
    for message in MESSAGES[:2]:
        text = plain.send(message).text
        assert echoing.send(message).text.endswith(text)
        assert echoing.messages == plain.messages


def test_an_edited_history_is_followed(talker):
    session = talker.chat(max_tokens=6)
    session.send("Hello")
    session.messages[0]["content"] = "Good day"
    reply = session.send("And now?")
    assert reply.token_ids == talker.generate(reply.prompt_token_ids, max_tokens=6).token_ids


def test_what_a_session_refuses(talker):
    with pytest.raises(GenerationError, match="no chat template"):
        bitnet_ref.load("storyteller").chat()
    with pytest.raises(GenerationError, match="a stream is one continuation"):
        talker.chat(n=2)
    with pytest.raises(GenerationError, match="temperature"):
        talker.chat(temprature=1)
    session = talker.chat()
    with pytest.raises(GenerationError, match="shorten the message"):
        session.send("word " * 300)
    session.send("Hello", max_tokens=3)
    with pytest.raises(GenerationError, match=r"reset\(\) starts a new one"):
        session.send("word " * 300)
    assert not session.full


# -- what is left of a generation that was broken off ------------------------------------------------------------------


def test_a_closed_generator_frees_its_cache_at_once(caches):
    story = bitnet_ref.load()
    stream = story.stream("Alice", max_tokens=50)
    next(stream)
    assert caches[0]() is not None
    stream.close()
    assert caches[0]() is None  # without a garbage collection
    abandoned = story.stream("Alice", max_tokens=50)
    next(abandoned)
    del abandoned
    assert caches[1]() is None


@pytest.mark.parametrize("params", [{}, {"num_beams": 3}, {"temperature": 1.0, "n": 3, "seed": 1}])
def test_ctrl_c_leaves_the_model_usable(params):
    story = bitnet_ref.load()
    expected = story.generate("Alice", max_tokens=8, **params)
    calls = []

    def interrupting(ids, logits):
        calls.append(len(ids))
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return logits

    with pytest.raises(KeyboardInterrupt):
        story.generate("Alice", max_tokens=8, processors=[interrupting], **params)
    assert len(calls) >= 4
    again = story.generate("Alice", max_tokens=8, **params)
    assert as_tokens(again) == as_tokens(expected)


def as_tokens(found):
    return [out.token_ids for out in found] if isinstance(found, list) else found.token_ids


def test_ctrl_c_leaves_the_session_usable(talker):
    session = talker.chat(max_tokens=10)

    def interrupting(ids, logits):
        if len(seen) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        seen.append(len(ids))
        return logits

    seen = []
    with pytest.raises(KeyboardInterrupt):
        session.send("Hello", processors=[interrupting])
    reply = session.send("Once more")
    assert reply.token_ids == talker.generate(reply.prompt_token_ids, max_tokens=10).token_ids


def test_ctrl_c_between_two_tokens_keeps_what_was_said(talker, monkeypatch):
    session, said, following = talker.chat(max_tokens=10), [], TokenStream.__next__

    def interrupted(stream):
        if len(said) == 4:
            raise KeyboardInterrupt
        said.append(following(stream).text)

    monkeypatch.setattr(TokenStream, "__next__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.send("Hello")
    assert session.messages[-1] == {"role": "assistant", "content": "".join(said)}
