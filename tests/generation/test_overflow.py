"""Texts longer than the context: every token is what the model says of the tokens that it is reported to have seen."""

import json
from itertools import pairwise

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import GOLDEN, chat_folder, model
from hypothesis import given
from hypothesis import strategies as st

import bitnet_ref
from bitnet_ref.cli import cli
from bitnet_ref.errors import GenerationError
from bitnet_ref.generation import SamplingParams
from bitnet_ref.generation.overflow import keep_after_overflow, take
from bitnet_ref.generation.sequence import Continuation, Request
from bitnet_ref.reference.cache import TokenBatch
from bitnet_ref.serving.engine import Engine

PROMPT = "Once upon a time there was a king who had three sons"
FAST = "cython" if bitnet_ref.available_backends()["cython"] is None else "numpy"
MOVING = [("sliding", {}), ("sinks", {}), ("sinks", {"sink_tokens": 1})]


def seen_at(out, overflow):
    """The tokens that the model saw when it chose new token `overflow.at`."""
    return take(np.array([*out.prompt_token_ids, *out.token_ids]), overflow.kept).tolist()


def replay(m, out):
    """The tokens of each stretch between two overflows, generated from what was kept."""
    starts = [overflow.at for overflow in out.overflows]
    for overflow, stop in zip(out.overflows, [*starts[1:], len(out.token_ids)], strict=True):
        again = m.generate(seen_at(out, overflow), max_tokens=stop - overflow.at, ignore_eos=True)
        assert again.token_ids == out.token_ids[overflow.at : stop]
        assert again.logprobs == out.logprobs[overflow.at : stop]


@given(length=st.integers(1, 300), window=st.integers(2, 100), sinks=st.integers(0, 98))
def test_what_is_kept(length, window, sinks):
    sinks = min(sinks, window - 2)
    for policy, first in (("sliding", 0), ("sinks", sinks)):
        spans = keep_after_overflow(length, window, policy, sinks)
        kept = take(np.arange(length), spans).tolist()
        assert kept == sorted(set(kept))
        assert kept[-1] == length - 1
        assert all(a[1] < b[0] for a, b in pairwise(spans))
        if length <= window:
            assert kept == list(range(length))
        else:
            assert kept[:first] == list(range(first))
            assert first < len(kept) < window  # the newest, and room for more
            assert len(kept) == first + (window - first) // 2


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("backend", "policy", "more", "words", "new"),
    [("numpy", "sinks", {}, 20, 24), *((FAST, *case, words, 50) for case in MOVING for words in (4, 40))],
)
def test_every_stretch_is_what_the_model_says_of_the_tokens_it_kept(backend, policy, more, words, new):
    """20 and 40 words of prompt do not fit the window themselves."""
    m, window = model("storyteller", backend), 18
    prompt = " ".join((PROMPT.split() * 4)[:words])
    out = m.generate(prompt, max_tokens=new, overflow=policy, window=window, ignore_eos=True, **more)
    assert out.prompt_token_ids == m.tokenizer.encode(prompt)
    assert len(out.token_ids) == new
    assert len(out.overflows) >= 3
    assert (out.overflows[0].at == 0) == (len(out.prompt_token_ids) > window)
    replay(m, out)
    if out.overflows[0].at:
        before = m.generate(prompt, max_tokens=out.overflows[0].at, ignore_eos=True)
        assert out.token_ids[: out.overflows[0].at] == before.token_ids
    sinks = 0 if policy == "sliding" else more.get("sink_tokens", 4)
    for overflow in out.overflows:
        kept = seen_at(out, overflow)
        assert kept[:sinks] == out.prompt_token_ids[:sinks]
        assert overflow.kept[-1][1] == len(out.prompt_token_ids) + overflow.at
    # the amortised cost: about a token computed again for each new one
    assert out.stats.recomputed_tokens <= new + sinks * len(out.overflows)
    assert out.stats.dropped_tokens == out.dropped_tokens > 0


def test_past_the_context_of_the_model():
    m = model("storyteller", FAST)
    assert m.config.context_length == 256
    out = m.generate(PROMPT, max_tokens=300, overflow="sinks", ignore_eos=True)
    (overflow,) = out.overflows
    assert len(out.prompt_token_ids) + overflow.at == 257  # the newest of them did not fit
    assert len(seen_at(out, overflow)) == 4 + 126
    replay(m, out)


@pytest.mark.thorough
def test_rows_of_a_batch_drop_each_by_itself():
    m = model("storyteller", FAST)
    prompts = [PROMPT, "Alice", " ".join([PROMPT] * 4)]
    params = {"max_tokens": 40, "overflow": "sinks", "window": 20, "ignore_eos": True}
    for more in ({}, {"temperature": 1.0, "seed": 4}):
        batch = m.generate(prompts, **params, **more)
        for prompt, row in zip(prompts, batch, strict=True):
            alone = m.generate(prompt, **params, **more)
            assert (row.token_ids, row.logprobs, row.overflows) == (alone.token_ids, alone.logprobs, alone.overflows)
    two = m.generate(PROMPT, n=2, temperature=1.0, seed=4, **params)
    assert two[0].token_ids == m.generate(PROMPT, temperature=1.0, seed=4, **params).token_ids
    assert all(len(out.overflows) > 1 for out in two)


def test_a_stream_tells_of_it_as_it_happens():
    m = model("storyteller", FAST)
    params = {"max_tokens": 40, "overflow": "sliding", "window": 20, "ignore_eos": True}
    out = m.generate(PROMPT, **params)
    with m.stream(PROMPT, **params) as stream:
        chunks = list(stream)
    assert [chunk.token_id for chunk in chunks] == out.token_ids
    assert [(i, chunk.kept) for i, chunk in enumerate(chunks) if chunk.kept] == [
        (overflow.at, overflow.kept) for overflow in out.overflows
    ]
    for i, chunk in enumerate(chunks):
        before = [overflow for overflow in out.overflows if overflow.at <= i]
        length = len(out.prompt_token_ids) + (before[-1].at if before else 0)
        assert chunk.dropped_tokens == (length - len(seen_at(out, before[-1])) if before else 0)
    assert chunks[-1].dropped_tokens == out.dropped_tokens == stream.stats.dropped_tokens


@pytest.mark.parametrize("piece", [1, 3, 100])
def test_a_continuation_can_be_fed_in_pieces(piece):
    """As an engine does: pages of a pool, a piece at a time, all pages given back where it begins anew."""
    m = model("storyteller", FAST)
    params = SamplingParams(max_tokens=30, overflow="sinks", window=20, ignore_eos=True)
    row = Continuation(Request(m, PROMPT, params), slot=0)
    cache = m.new_cache(1, row.request.capacity, page_size=4, pages=5)
    begun = 0
    while not row.finished:
        if row.computed == 0:
            cache.page_table[0] = np.random.default_rng(begun).permutation(5)
            begun += 1
        start = row.computed
        ids = row.context[start : start + piece]
        ends = start + len(ids) == len(row.context)
        logits = m.run(TokenBatch.of([(0, start, ids)], [0]), cache, [row.needs()]).tokens[0]
        row.computed += len(ids)
        if ends:
            row.accept(logits)
    expected = m.generate(PROMPT, max_tokens=30, overflow="sinks", window=20, ignore_eos=True)
    assert [chunk.token_id for chunk in row.chunks] == expected.token_ids
    assert begun == len(expected.overflows) + 1


def test_truncate_cuts_the_prompt_and_keeps_its_bos():
    m = model("storyteller", FAST)
    prompt = " ".join([PROMPT] * 30)
    ids = m.tokenizer.encode(prompt)
    assert len(ids) > 256
    assert ids[0] == m.tokenizer.bos_id
    out = m.generate(prompt, max_tokens=20, overflow="truncate")
    cut = [ids[0], *ids[-(256 - 20 - 1) :]]
    assert seen_at(out, out.overflows[0]) == cut
    expected = m.generate(cut, max_tokens=20)
    assert (out.token_ids, out.logprobs) == (expected.token_ids, expected.logprobs)
    assert out.prompt_token_ids == ids
    assert out.dropped_tokens == out.stats.dropped_tokens == len(ids) - len(cut)
    without_bos = m.generate(ids[1:], max_tokens=20, overflow="truncate")
    assert seen_at(without_bos, without_bos.overflows[0]) == ids[-236:]
    assert m.generate(prompt, overflow="truncate", echo=True, max_tokens=1).text.startswith(PROMPT)
    assert len(m.generate(ids, overflow="truncate", ignore_eos=True).token_ids) == 64
    beams = m.generate(prompt, max_tokens=4, num_beams=2, overflow="truncate")
    assert beams.token_ids == m.generate([ids[0], *ids[-251:]], max_tokens=4, num_beams=2).token_ids
    assert seen_at(beams, beams.overflows[0]) == [ids[0], *ids[-251:]]


def test_nothing_changes_for_what_fits():
    m = model("storyteller", FAST)
    expected = m.generate(PROMPT, max_tokens=8)
    for policy in ("truncate", "sliding", "sinks"):
        out = m.generate(PROMPT, max_tokens=8, overflow=policy)
        assert (out.token_ids, out.overflows, out.dropped_tokens) == (expected.token_ids, [], 0)
    room = 256 - len(expected.prompt_token_ids)
    assert m.generate(PROMPT, max_tokens=room, ignore_eos=True).overflows == []
    with pytest.raises(GenerationError, match=f"context is 256; lower max_tokens to {room}, .*truncate"):
        m.generate(PROMPT, max_tokens=room + 1)
    with pytest.raises(GenerationError, match="window's context is 16; lower max_tokens to"):
        m.generate(PROMPT, max_tokens=room, window=16)


def test_what_is_refused():
    m = model("storyteller", FAST)
    for params, message in (
        ({"overflow": "forget"}, "overflow: expected one of error, truncate, sliding, sinks, got 'forget'"),
        ({"window": 300, "overflow": "sliding"}, "window: the model's context is 256 tokens, got 300"),
        ({"window": 1}, "window: expected a whole number from 2 to"),
        ({"window": 8, "overflow": "sinks", "sink_tokens": 7}, "sink_tokens: 7 leave no room"),
        ({"sink_tokens": -1}, "sink_tokens: expected"),
        ({"overflow": "sinks", "num_beams": 2}, "overflow: beam search .* takes no overflow, got 'sinks'"),
        ({"overflow": "truncate", "max_tokens": 256}, "max_tokens: 256 of the 256 tokens .* leave no room"),
    ):
        with pytest.raises(GenerationError, match=message):
            m.generate(" ".join([PROMPT] * 30), **params)
    small = model(GOLDEN / "llama-dense", FAST)
    with pytest.raises(GenerationError, match="not in the vocabulary"):
        small.generate([10**6] * 5000, overflow="sliding")


# -- chat --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    folder = chat_folder(tmp_path_factory.mktemp("models"))
    return bitnet_ref.load(folder, backend=FAST, threads=2)


@pytest.mark.thorough
def test_a_chat_drops_its_oldest_turns_and_keeps_the_system_text(talker):
    system = {"role": "system", "content": "Be kind."}
    session = talker.chat(system="Be kind.", overflow="truncate", window=120, max_tokens=20, ignore_eos=True)
    said = []
    for number in range(8):
        message = f"Tell me about the king, for the {number}th time"
        ids = session.prompt(message)
        reply = session.send(message)
        said += [{"role": "user", "content": message}, {"role": "assistant", "content": reply.text}]
        assert reply.prompt_token_ids == ids
        assert len(ids) + 20 <= 120
        assert session.messages == [system, *said[session.dropped :]]
        assert session.messages[1]["role"] == "user"
        expected = talker.tokenizer.apply_chat_template(session.messages[:-1], tokenize=True)
        assert reply.token_ids == talker.generate(expected, max_tokens=20, ignore_eos=True).token_ids
        assert not session.full
    assert session.dropped == len(said) - len(session.messages) + 1 > 4  # the system text is not among what was said
    assert reply.stats.dropped_messages in (0, 2)
    history = list(session.messages)
    with pytest.raises(GenerationError, match="shorten the message"):
        session.send("word " * 200)
    assert session.messages == history
    session.reset()
    assert session.dropped == 0


@pytest.mark.thorough
def test_a_chat_that_slides(talker):
    session = talker.chat(overflow="sinks", window=60, max_tokens=50, ignore_eos=True)
    session.send("Hello")
    reply = session.send("Tell me about the king")
    assert len(reply.prompt_token_ids) > 60
    alone = talker.generate(reply.prompt_token_ids, overflow="sinks", window=60, max_tokens=50, ignore_eos=True)
    assert (reply.token_ids, reply.overflows) == (alone.token_ids, alone.overflows)
    third = session.send("And the queen?")  # the cache holds what was kept, and is asked for something else
    alone = talker.generate(third.prompt_token_ids, overflow="sinks", window=60, max_tokens=50, ignore_eos=True)
    assert third.token_ids == alone.token_ids


# -- the shell ---------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_the_shell_says_what_was_dropped(talker):
    arguments = [
        "generate",
        PROMPT,
        "--max-tokens",
        "30",
        "--overflow",
        "sinks",
        "--window",
        "20",
        "--sink-tokens",
        "2",
        "--temperature",
        "0",
    ]
    arguments += ["--ignore-eos", "--backend", FAST]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    facts = json.loads(CliRunner().invoke(cli, [*arguments, "--json"]).stdout)
    dropped, again = facts["stats"]["dropped_tokens"], facts["stats"]["recomputed_tokens"]
    assert dropped > 10
    assert f"{dropped} oldest tokens dropped, {again} computed again" in result.stderr
    out = model("storyteller", FAST).generate(
        PROMPT, max_tokens=30, overflow="sinks", window=20, sink_tokens=2, ignore_eos=True
    )
    assert facts["token_ids"] == out.token_ids
    assert [overflow["at"] for overflow in facts["overflows"]] == [overflow.at for overflow in out.overflows]
    several = json.loads(CliRunner().invoke(cli, [*arguments, "--n", "2", "--json"]).stdout)
    assert several["choices"][0]["overflows"] == facts["overflows"]
    lines = "Tell me about the king, for a long time\n" * 4
    chat = ["chat", "--model", str(talker.path), "--overflow", "truncate", "--window", "90", "--max-tokens", "20"]
    result = CliRunner().invoke(cli, [*chat, "--backend", FAST, "--ignore-eos"], input=lines)
    assert result.exit_code == 0, result.output
    assert "[the oldest 2 messages dropped: the context is full]" in result.stderr


# -- the engine --------------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("cache_dtype", [None, "int8"])
def test_an_engine_gives_what_generate_gives(cache_dtype):
    """Texts that drop tokens run beside others that do not, in pages of which there are few."""
    m = model("storyteller", FAST)
    alone = bitnet_ref.load("storyteller", backend=FAST, threads=2, cache_dtype=cache_dtype)
    common = {"max_tokens": 40, "window": 20, "ignore_eos": True}
    asked = [
        (PROMPT, {**common, "overflow": "sinks"}),
        (" ".join([PROMPT] * 4), {**common, "overflow": "sliding"}),
        ("Alice", {"max_tokens": 30, "ignore_eos": True}),
        (PROMPT, {**common, "overflow": "sinks", "n": 2, "temperature": 1.0, "seed": 3}),
        (" ".join([PROMPT] * 30), {"max_tokens": 5, "overflow": "truncate"}),
    ]
    more = {} if cache_dtype is None else {"cache_dtype": cache_dtype}
    with Engine(m, max_batch=3, max_batch_tokens=24, page_size=4, cache_tokens=280, **more) as engine:
        handles = [engine.submit(prompt, **params) for prompt, params in asked]
        for handle, (prompt, params) in zip(handles, asked, strict=True):
            expected, got = alone.generate(prompt, **params), handle.result()
            for a, b in zip(*(x if isinstance(x, list) else [x] for x in (expected, got)), strict=True):
                assert (b.token_ids, b.overflows) == (a.token_ids, a.overflows)
                assert b.dropped_tokens == a.dropped_tokens
