"""How requests end: cancelled, late, failed, refused."""

import re
import threading
import time
from inspect import Parameter, signature
from queue import Empty
from types import SimpleNamespace

import numpy as np
import pytest
from engine_checks import PROMPTS, check, gist, until
from helpers import model

from bitnet_ref.errors import (
    EngineClosed,
    GenerationError,
    OutOfMemory,
    QueueFull,
    RequestCancelled,
    RequestTimeout,
)
from bitnet_ref.serving.engine import Engine
from bitnet_ref.serving.replicas import Replicas
from bitnet_ref.serving.tickets import Latch, RequestStory

# -- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "with", "del", "cancel"])
def test_a_stream_that_ends_early_frees_its_pages_within_a_step(engine, how):
    stream = engine.stream("Alice", max_tokens=200)
    next(stream)
    other = engine.stream("The old man", max_tokens=200)
    next(other)
    if how == "close":
        stream.close()
        assert list(stream) == []
    elif how == "with":
        with stream:
            pass
    elif how == "cancel":
        stream.cancel()
        with pytest.raises(RequestCancelled, match="request 0 was cancelled"):
            list(stream)
    number = 0
    if how == "del":
        del stream
    steps = len(engine.timeline)
    next(other)
    until(lambda: engine.metrics.finished["abort"] == 1)
    after = [step for step in list(engine.timeline)[steps + 2 :] if number in [part.request_id for part in step.parts]]
    assert after == []
    other.close()
    until(lambda: engine._worker.pool.in_use == 0)


def test_cancelled_in_the_moment_of_its_arrival(engine, monkeypatch):
    """After the thread has let requests in, and before it looks for those to cancel."""
    worker, handles = engine._worker, []
    take_in = worker._admit_arrivals

    def and_cancel():
        goes_on = take_in()
        if goes_on and len(handles) < 3:
            handles.append(engine.submit("Alice", max_tokens=200))
            handles[-1].cancel()
        return goes_on

    monkeypatch.setattr(worker, "_admit_arrivals", and_cancel)
    assert engine.generate("Alice", max_tokens=5).text
    for handle in handles:
        with pytest.raises(RequestCancelled, match="after 0 tokens"):
            handle.result()
    assert engine.metrics.counters["generation_tokens"] == 5


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_the_engine_itself_ends_all_requests(story, monkeypatch):
    engine = story.engine()
    stream = engine.stream("Alice", max_tokens=200)
    next(stream)
    monkeypatch.setattr(engine._worker._scheduler, "plan", lambda: 1 / 0)
    with pytest.raises(EngineClosed, match="by a fault of its own: ZeroDivisionError"):
        list(stream)
    engine._worker._thread.join()
    with pytest.raises(EngineClosed, match="by a fault of its own"):
        engine.submit("Alice")
    check(engine)


def test_the_result_of_a_cancelled_request_is_an_error(engine):
    handle = engine.submit("Alice", max_tokens=200)
    handle.cancel()
    with pytest.raises(RequestCancelled):
        handle.result()
    handle.cancel()


def test_a_timeout_ends_a_request_that_waits_and_one_that_runs(engine):
    slow = engine.submit(
        "Alice", max_tokens=200, timeout_s=0.05, processors=[lambda ids, logits: time.sleep(0.01) or logits]
    )
    with pytest.raises(RequestTimeout, match=r"request 0 was not finished within 0\.05 s; it had [1-9]\d* new tokens?"):
        slow.result()
    with pytest.raises(RequestTimeout, match="; it had 0 new tokens"):
        engine.submit("Alice", timeout_s=1e-9).result()
    assert engine.metrics.finished["timeout"] == 2
    with pytest.raises(TimeoutError):
        engine.submit("Alice", max_tokens=200).result(timeout_s=1e-6)


def test_a_full_queue_refuses_and_recovers():
    with model("storyteller", "auto").engine(max_batch=1, max_queue=2) as engine:
        streams = [engine.stream("Alice", max_tokens=200)]
        next(streams[0])
        streams += [engine.stream("Alice", max_tokens=3) for _ in range(2)]
        with pytest.raises(QueueFull, match="2 requests wait and 1 run"):
            engine.submit("Alice")
        now = engine.metrics.snapshot()
        assert (now["num_requests_running"], now["num_requests_waiting"], now["requests_refused"]) == (1, 2, 1)
        streams[0].close()
        assert [len(list(stream)) for stream in streams[1:]] == [3, 3]
        assert len(engine.generate(PROMPTS * 3, max_tokens=2)) == 12  # more than the queue: they come by and by


def test_an_interrupt_while_a_chunk_is_waited_for_cancels(engine):
    stream = engine.stream("Alice", max_tokens=200)
    next(stream)

    def nothing():
        raise Empty

    def interrupt():
        raise KeyboardInterrupt

    stream._outbox.chunks = SimpleNamespace(get_nowait=nothing, get=interrupt, put=lambda _: None, qsize=lambda: 0)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    until(lambda: engine.metrics.finished["abort"] == 1)


def test_the_story_of_a_request(engine):
    tokens = len(engine.model.tokenizer.encode("Once upon a time"))
    one = engine.submit("Once upon a time", max_tokens=3, priority=2)
    one.result()
    assert repr(one) == "<request 0: ended, 3 tokens>"
    until(lambda: not engine.requests)
    (story,) = engine.stories
    assert story == RequestStory(
        request_id=0,
        state="length",
        priority=2,
        arrival_s=story.arrival_s,
        start_s=story.start_s,
        first_token_s=story.first_token_s,
        end_s=story.end_s,
        prompt_tokens=tokens,
        cached_tokens=0,
        generated_tokens=3,
        screened_tokens=one.stats.screened_tokens,
        drafted_tokens=0,
        accepted_tokens=0,
        pages=(),
    )
    assert story.arrival_s <= story.start_s < story.first_token_s <= story.end_s
    stream = engine.stream("Once upon a time", max_tokens=200)
    for _ in range(20):
        next(stream)
    first, second = engine.stories
    (state,) = engine.requests
    assert first == story
    assert (second.request_id, second.state, second.priority, second.end_s) == (1, state.state, 0, None)
    assert (second.prompt_tokens, state.prompt_tokens, state.request_id) == (tokens, tokens, 1)
    assert len(second.pages) == 1
    assert len(second.pages[0]) >= (tokens + 20) // engine.cache.page_size
    assert 0 < state.age_s < 60
    assert re.fullmatch(r"<request 1: (running|paused), \d+ tokens>", repr(stream))
    stream.close()


def test_all_ways_to_ask_have_the_same_defaults(engine):
    for kind in (Engine, Replicas):
        for name in ("submit", "stream", "streams", "chat", "generate", "agenerate"):
            parameters = signature(getattr(kind, name)).parameters
            assert (parameters["priority"].default, parameters["timeout_s"].default) == (0, None)
            assert {parameters[each].kind for each in ("priority", "timeout_s")} == {Parameter.KEYWORD_ONLY}


def test_a_latch_is_waited_for_until_it_is_set():
    latch, limits = Latch(), []
    closed, latch._closed = latch._closed, SimpleNamespace(acquire=lambda timeout: limits.append(timeout))
    assert [latch.wait(limit) for limit in (None, 0.5, -3.0)] == [False] * 3
    assert limits == [-1, 0.5, 0.0]  # -1: for ever
    steps = []
    latch._closed = SimpleNamespace(acquire=lambda timeout: True, release=lambda: steps.append("for the next"))
    latch.wait()
    assert steps == ["for the next"]  # threads wait one behind the other
    latch._closed = closed
    assert not latch.wait(0.01)
    threading.Timer(0.01, latch.set).start()
    assert latch.wait()
    latch.set()
    assert latch.wait(0)
    assert latch.is_set()


def test_priority_goes_first(engine):
    order = []
    blocker = [engine.stream("Alice", max_tokens=30) for _ in range(4)]
    for stream in blocker:
        next(stream)
    handles = {name: engine.submit("Alice", max_tokens=1, priority=p) for name, p in (("low", -1), ("usual", 0))}
    handles["high"] = engine.submit("Alice", max_tokens=1, priority=1)
    for stream in blocker:
        list(stream)
    for handle in handles.values():
        handle.result()
    first = {
        name: next(s.number for s in engine.timeline if h.request_id in [p.request_id for p in s.parts])
        for name, h in handles.items()
    }
    order = sorted(first, key=first.get)
    assert order[0] == "high"
    assert first["usual"] <= first["low"]


def test_company_is_waited_for():
    with model("storyteller", "auto").engine(max_batch=4, max_wait_s=5.0) as engine:
        start = time.perf_counter()
        outs = [engine.submit(prompt, max_tokens=2) for prompt in PROMPTS]
        for out in outs:
            out.result()
        assert time.perf_counter() - start < 4.0  # the batch was full, so no request waited longer
        assert len(engine.timeline[0].parts) == 4


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize("op", ["embed", "rms_norm", "linears", "rope", "attention", "gated", "head_rows", "append"])
def test_a_fault_in_an_op_fails_its_step_only(story, monkeypatch, op):
    monkeypatch.setattr(story, "backend", story.backend.op_by_op())  # replayed steps and fused blocks call few ops
    owner = type(story.backend)
    right, fail = getattr(owner, op), threading.Event()

    def faulty(self, *args, **kwargs):
        if fail.is_set():
            fail.clear()
            raise OutOfMemory("the device is gone")
        return right(self, *args, **kwargs)

    faulty.__code__ = faulty.__code__.replace(co_name=op)  # by which the message names it
    expected = [gist(out) for out in story.generate(PROMPTS, max_tokens=8)]
    monkeypatch.setattr(owner, op, faulty)
    with story.engine(max_batch=2, max_queue=8, page_size=4) as engine:
        running = [engine.stream(prompt, max_tokens=200) for prompt in PROMPTS[:2]]
        for stream in running:
            next(stream)
        waiting = [engine.submit(prompt, max_tokens=8) for prompt in PROMPTS]
        fail.set()
        for stream in running:
            with pytest.raises(
                GenerationError, match=rf"failed with the 2 requests of its step.*, in {op}: .*the device is gone"
            ) as error:
                list(stream)
            assert isinstance(error.value.__cause__, OutOfMemory)
        assert [gist(handle.result()) for handle in waiting] == expected
        now = engine.metrics.snapshot()
        assert (now["engine_faults"], now["request_success"]["error"]) == (1, 2)
    check(engine)


def test_a_numerics_error_names_the_tensor(monkeypatch):
    story = model("storyteller", "numpy")
    right = type(story.backend).attention

    def poisoned(self, q, *args):
        z = right(self, q, *args)
        z[0] = np.nan
        return z

    with story.engine() as engine:
        with monkeypatch.context() as patch:
            patch.setattr(type(story.backend), "attention", poisoned)
            with pytest.raises(GenerationError, match=r"blocks\.0\.attn"):
                engine.generate("Alice", max_tokens=2)
        assert engine.generate("Alice", max_tokens=2).text == story.generate("Alice", max_tokens=2).text


def bad(*_):
    raise ZeroDivisionError("my own fault")


@pytest.mark.parametrize(
    "params", [{"processors": [bad]}, {"strategy": bad}, {"filter": bad}, {"strategy": lambda *_: -1}]
)
def test_a_fault_of_a_requests_own_fails_that_request_only(engine, params):
    good = [engine.submit(prompt, max_tokens=8) for prompt in PROMPTS[:2]]
    wrong = engine.submit("Alice", max_tokens=8, **params)
    with pytest.raises(GenerationError, match="by its own parameters"):
        wrong.result()
    expected = engine.model.generate(PROMPTS[:2], max_tokens=8)
    assert [gist(handle.result()) for handle in good] == [gist(out) for out in expected]


def third(ids, logits, *_):
    """Fails where it would choose the third token after "Alice", which is two."""
    return bad() if len(ids) == 4 else logits


@pytest.mark.parametrize(
    ("params", "token"),
    [
        ({"processors": [third]}, 3),
        ({"processors": [third], "n": 3, "temperature": 1.0, "seed": 1}, 3),  # not of all its texts
        ({"processors": [third], "num_beams": 2}, 3),
        ({"strategy": bad}, 1),
        ({"filter": bad}, 1),  # which has seen it
    ],
)
def test_an_error_of_a_requests_own_names_the_token(engine, params, token):
    with pytest.raises(GenerationError, match=f"request 0 failed in choosing token {token}, by its own parameters"):
        engine.generate("Alice", max_tokens=8, **params)


def test_a_call_that_fails_ends_its_other_requests(engine):
    with pytest.raises(GenerationError) as error:
        engine.generate(["Alice", "Alice " * 400], max_tokens=200)
    until(lambda: engine.metrics.finished["abort"] == 1)  # though the error is kept, and so what its call held
    assert "context" in str(error.value)


def test_one_of_n_rows_fails_its_request(engine):
    def sometimes(ids, logits):
        if len(ids) > 4 and ids[-1] % 2:
            bad()
        return logits

    with pytest.raises(GenerationError, match="my own fault"):
        engine.generate("Alice", n=4, temperature=1.5, seed=1, max_tokens=30, processors=[sometimes])
    assert engine.generate("Alice", max_tokens=3).text


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("Alice", {"num_beams": 2}, "use generate"),
        ("Alice", {"tempature": 1}, "temperature"),
        ("Alice", {"priority": 1.5}, "priority"),
        ("Alice", {"timeout_s": 0}, "timeout_s"),
        ("Alice", {"n": 2}, "a stream is one continuation"),
        ("Alice", {"max_tokens": 400}, "context"),
        (["a", "b"], {}, "expected one prompt"),
        ([4096], {}, "vocabulary"),
    ],
)
def test_what_cannot_be_is_refused_at_once(engine, prompt, params, message):
    with pytest.raises(GenerationError, match=message):
        engine.stream(prompt, **params)


def test_iterating_over_several_texts_is_refused(engine):
    with pytest.raises(GenerationError, match=r"use result\(\)"):
        next(engine.submit("Alice", n=2, temperature=1.0, max_tokens=2))


def test_a_request_larger_than_the_cache_is_refused():
    with (
        model("storyteller", "auto").engine(cache_tokens=32) as engine,
        pytest.raises(GenerationError, match="the engine's cache holds 32"),
    ):
        engine.submit("Alice", max_tokens=40)


def test_sampling_defaults_are_the_configs():
    story = model("storyteller", "auto")
    with story.engine(sampling={"max_tokens": 3, "stop": ["x"]}) as engine:
        assert len(engine.generate("Alice").token_ids) == 3
        assert len(engine.generate("Alice", max_new_tokens=2).token_ids) == 2
