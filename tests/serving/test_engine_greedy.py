"""Greedy requests, whose steps the engine takes several at a time: the texts, chunks and ends of plain decoding."""

import time

import pytest
from engine_checks import check, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import bitnet_ref
from bitnet_ref.backends.cpu.extension import why_unavailable
from bitnet_ref.errors import RequestCancelled, RequestTimeout
from bitnet_ref.generation import greedy, stepper
from bitnet_ref.generation.generate import generate_chunks
from bitnet_ref.generation.params import SamplingParams
from bitnet_ref.generation.sequence import Continuation, Request

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
TEXTS = ["Once upon a time", "Alice", "The old man of the sea", "It was a dark and stormy night, and the wind", "I"]


@pytest.fixture(scope="module")
def story():
    return bitnet_ref.load("storyteller", backend="cython", threads=2)


@pytest.fixture
def groups(monkeypatch):
    """How many steps each run in a row took."""
    taken, run = [], greedy.run_steps

    def watched(*args):
        steps = list(run(*args))
        taken.append(len(steps))
        return iter(steps)

    monkeypatch.setattr(greedy, "MOST_S", 1e9)  # a busy machine takes fewer in a row
    monkeypatch.setattr(stepper, "run_steps", watched)
    return taken


def gist(out):
    return out.token_ids, out.text, out.logprobs, out.finish_reason, out.stop_reason


def single_steps(model, prompt, **params):
    """Plain decoding: one pass at a time."""
    row = Continuation(Request(model, prompt, SamplingParams.of(**params)), slot=0)
    row._is_plain = False
    for _ in generate_chunks(model, [[row]], row.stats):
        pass
    return row.result()


@pytest.mark.thorough
def test_generate_and_stream_take_steps_in_a_row(story, groups):
    expected = [single_steps(story, prompt, max_tokens=30) for prompt in TEXTS]
    assert groups == []
    outs = story.generate(TEXTS, max_tokens=30)
    assert [gist(out) for out in outs] == [gist(out) for out in expected]
    assert sum(groups) > 20
    groups.clear()
    chunks = list(story.stream(TEXTS[0], max_tokens=30))
    assert [chunk.token_id for chunk in chunks] == expected[0].token_ids
    assert [chunk.logprob for chunk in chunks] == expected[0].logprobs
    assert sum(groups) > 20
    stats = outs[0].stats
    assert (stats.generated_tokens, stats.decode_tokens) == (150, 145)
    assert (stats.screened_tokens, stats.head_rows) == (0, 150 * story.config.vocab_size)


def test_a_stream_that_is_closed_has_only_what_was_read(story):
    with story.stream(TEXTS[0], max_tokens=60) as stream:
        read = [next(stream).token_id for _ in range(10)]
        assert stream.stats.generated_tokens == 10
    assert read == single_steps(story, TEXTS[0], max_tokens=10).token_ids


@pytest.mark.thorough
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_requests_get_what_plain_decoding_gives(story, data):
    """Batches, pages, lengths, stops, filters, cancellations, deadlines and company that is not greedy."""
    settings = {
        "max_batch": data.draw(st.integers(1, 9), "max_batch"),
        "max_batch_tokens": data.draw(st.sampled_from([12, 64]), "max_batch_tokens"),
        "page_size": data.draw(st.sampled_from([1, 3, 4, 16]), "page_size"),
        "cache_tokens": data.draw(st.sampled_from([64, 200, 1000]), "cache_tokens"),
        "max_unread": data.draw(st.sampled_from([1, 3, 32]), "max_unread"),
    }
    company = st.sampled_from(
        [{}, {}, {}, {"temperature": 0.9, "seed": 3}, {"repetition_penalty": 1.3}, {"logprobs": 1}]
    )
    stops = st.sampled_from([{}, {}, {"stop": ["the", "."]}, {"stop_token_ids": [270, 300, 13]}, {"filter": ["and"]}])
    requests = st.tuples(st.sampled_from(TEXTS), st.integers(1, 40), stops, company)
    fates = st.sampled_from(["result", "result", "stream", "cancel", "late", "n"])
    wanted = data.draw(st.lists(st.tuples(requests, fates), min_size=1, max_size=9), "requests")
    with story.engine(**settings) as engine:
        handles = []
        for (prompt, new, stop, others), fate in wanted:
            params = {"max_tokens": new, **stop, **others}
            late = 0.004 if fate == "late" else None
            submit = engine.stream if fate == "stream" else engine.submit
            texts = {"n": 2} if fate == "n" and settings["max_batch"] > 1 else {}
            handles.append((submit(prompt, timeout_s=late, **params, **texts), prompt, params, fate))
        for handle, *_, fate in handles:
            if fate == "cancel":
                handle.cancel()
        for handle, prompt, params, fate in handles:
            expected = gist(single_steps(story, prompt, **params))
            try:
                if fate == "stream":
                    assert [chunk.token_id for chunk in handle] == expected[0]
                else:
                    out = handle.result()
                    assert gist(out[0] if isinstance(out, list) else out) == expected
            except (RequestCancelled, RequestTimeout):
                assert fate in ("cancel", "late")
        generated = engine.metrics.snapshot()["generation_tokens"]
        assert generated == sum(handle.stats.generated_tokens for handle, *_ in handles)
        assert sum(len(step.parts) for step in engine.timeline) >= generated
    check(engine)


def test_a_newcomer_starts_after_the_present_step(story, groups):
    """The bell ends a run, so a request does not wait for more than a step of the others."""
    with story.engine(max_batch=4) as engine:
        first = engine.submit(TEXTS[0], max_tokens=200)
        until(lambda: sum(groups) > 20)
        assert (
            engine.submit(TEXTS[1], max_tokens=5).result().token_ids
            == single_steps(story, TEXTS[1], max_tokens=5).token_ids
        )
        assert gist(first.result()) == gist(single_steps(story, TEXTS[0], max_tokens=200))
        assert max(groups) == greedy.MOST_STEPS
    check(engine)


def test_the_bell_ends_the_steps(story):
    """Rung before: one step."""
    with story.engine(max_batch=2) as engine:
        engine.generate(TEXTS[0], max_tokens=4)
        stepper = engine._worker._stepper
        assert stepper.bell is engine._worker._has_rung
        engine._worker._ring()
        assert stepper.bell[0] == 1
        engine.generate(TEXTS[0], max_tokens=4)
        until(lambda: stepper.bell[0] == 0)
    check(engine)


def test_a_slow_reader_gets_no_more_than_it_has_room_for(story, groups):
    with story.engine(max_unread=2) as engine, engine.stream(TEXTS[0], max_tokens=30) as stream:
        tokens = []
        for chunk in stream:
            tokens.append(chunk.token_id)
            if len(tokens) in (5, 6, 12):
                time.sleep(0.02)
            assert stream._outbox.chunks.qsize() <= 2
    assert tokens == single_steps(story, TEXTS[0], max_tokens=30).token_ids
    assert max(groups, default=0) <= 2
    check(engine)


def test_an_error_of_its_own_ends_a_request_within_the_steps(story):
    """A filter that raises at the sixth word: the others of the same steps go on."""

    def refuses(text):
        if len(text.split()) > 5:
            raise RuntimeError("a filter of one's own")
        return False

    prompts = ["Once upon a time there was a", TEXTS[1], TEXTS[2]]
    with story.engine() as engine:
        handles = [
            engine.submit(prompt, max_tokens=30, filter=refuses if i == 0 else ()) for i, prompt in enumerate(prompts)
        ]
        texts = []
        for handle in handles:
            try:
                texts.append(handle.result().text)
            except bitnet_ref.errors.GenerationError as error:
                texts.append(str(error))
    plain = [single_steps(story, prompt, max_tokens=30).text for prompt in prompts]
    assert texts[1:] == plain[1:]
    assert "a filter of one's own" in texts[0]
    check(engine)


def test_sampled_requests_take_steps_in_a_row(story, groups):
    """Their numbers are drawn beforehand: the texts of single steps, also where a request ends within a run."""
    rules = [{}, {"top_p": 0.9}, {"top_k": 30, "min_p": 0.02}, {"typical_p": 0.8}, {"temperature": 0.0}]
    options = [{"temperature": 0.9, "seed": i, "max_tokens": 14 + 5 * i, **rule} for i, rule in enumerate(rules)]
    expected = [single_steps(story, text, **each) for text, each in zip(TEXTS, options, strict=True)]
    assert groups == []
    with story.engine(max_batch=4) as engine:
        tickets = [engine.submit(text, **each) for text, each in zip(TEXTS, options, strict=True)]
        outs = [ticket.result() for ticket in tickets]
    assert [gist(out) for out in outs] == [gist(out) for out in expected]
    assert sum(groups) > 10
    pair = story.generate(TEXTS[0], temperature=0.9, seed=0, n=2, max_tokens=14)
    assert pair[0].token_ids == expected[0].token_ids != pair[1].token_ids


def test_slow_steps_are_taken_one_by_one(story):
    with story.engine() as engine:
        engine._worker._scheduler.step_s = 1.0
        choose = greedy.choose_steps
        assert choose([], 1.0) == 1
        engine.generate(TEXTS[0], max_tokens=3)
    assert greedy.choose_steps([], 0.0) == 1
    row = Continuation(Request(story, TEXTS[0], SamplingParams.of(max_tokens=9)), slot=0)
    assert not row.decodes_plainly
    row.chunks, row.computed = [None], row.length - 1
    assert [greedy.choose_steps([row], step_s) for step_s in (0.0, 0.004, 0.007, 0.011, 1.0)] == [4, 4, 2, 1, 1]
    row.chunks = [None] * 7
    assert greedy.choose_steps([row], 0.0) == 2  # as many as it may still get
