"""The engine by a clock of the test's own, in the test's thread: every time, count and line that it notes, exactly.

A pass of the model takes half a second.
"""

import asyncio
import os
from dataclasses import replace
from queue import Empty
from types import SimpleNamespace

import pytest
from cli_runs import BACKEND
from engine_checks import check
from helpers import model

from bitnet_ref.errors import EngineClosed, QueueFull, RequestCancelled, RequestTimeout
from bitnet_ref.serving import step, tickets, worker
from bitnet_ref.serving.metrics import COUNTERS, HISTOGRAMS
from bitnet_ref.serving.records import RequestProgress, StepPart, StepRecord
from bitnet_ref.serving.scheduler import PagedPlan
from bitnet_ref.serving.tickets import RequestStory

PASS_S = 0.5
LONGER = "Once upon a time"  # of more tokens than "Alice"


class Driven:
    """An engine whose thread never runs: `step` does what the thread would do next."""

    def __init__(self, patch, **settings):
        self.now_s = 100.0
        clock = SimpleNamespace(perf_counter=lambda: self.now_s)
        for module in (step, tickets, worker):
            patch.setattr(module, "time", clock)
        thread = SimpleNamespace(ident=1, start=lambda: None, join=lambda: None)
        patch.setattr(worker, "Thread", lambda **_: thread)
        self.engine = model("storyteller", BACKEND, threads=1).engine(**settings)
        self.worker = self.engine._worker
        stepper = self.worker._stepper
        run_pass = stepper.run_pass

        def timed_pass(work):
            self.now_s += PASS_S
            return run_pass(work)

        patch.setattr(stepper, "run_pass", timed_pass)

    def step(self, count=1):
        for _ in range(count):
            assert self.worker._admit_arrivals()
            self.worker._run_step()

    def gauges(self):
        names = ("running", "waiting", "paused")
        return tuple(self.engine.metrics.snapshot()[f"num_requests_{name}"] for name in names)


@pytest.fixture
def drive(monkeypatch):
    driven = []

    def make(**settings):
        driven.append(Driven(monkeypatch, page_size=4, **settings))
        return driven[-1]

    yield make
    for each in driven:
        each.worker._end_all()
        check(each.engine)


def lengths(engine, *texts):
    return [len(engine.model.tokenizer.encode(text)) for text in texts]


def test_the_times_of_two_requests_one_after_the_other(drive, caplog):
    caplog.set_level("INFO", "bitnet_ref.serving")
    driven = drive(max_batch=1)
    engine = driven.engine
    short, long = lengths(engine, "Alice", LONGER)
    one = engine.submit("Alice", max_tokens=3, priority=1)
    driven.now_s = 101.0
    two = engine.submit(LONGER, max_tokens=2, ignore_eos=True)
    assert driven.gauges() == (0, 2, 0)
    assert engine.requests == [
        RequestProgress(0, "waiting", short, 0, 1.0, ""),
        RequestProgress(1, "waiting", long, 0, 0.0, ""),
    ]
    driven.step()
    assert driven.gauges() == (1, 1, 0)
    assert engine.requests[0] == RequestProgress(0, "running", short, 1, 1.5, one._ticket.rows[0].chunks[0].text)
    assert (one.stats.prefill_s, one.stats.decode_s, one.stats.decode_tokens) == (PASS_S, 0.0, 0)
    driven.step(2)
    assert (one.stats.prefill_s, one.stats.decode_s, one.stats.decode_tokens) == (PASS_S, 1.0, 2)
    assert (one.done, two.done) == (True, False)
    assert driven.gauges() == (0, 1, 0)
    driven.step(2)
    assert driven.gauges() == (0, 0, 0)
    pages = {"screened_tokens": 0, "drafted_tokens": 0, "accepted_tokens": 0, "pages": ()}
    times = {"arrival_s": 100.0, "start_s": 101.0, "first_token_s": 101.5, "end_s": 102.5}
    first = RequestStory(0, "length", 1, **times, prompt_tokens=short, cached_tokens=0, generated_tokens=3, **pages)
    times = {"arrival_s": 101.0, "start_s": 102.5, "first_token_s": 103.0, "end_s": 103.5}
    second = RequestStory(1, "length", 0, **times, prompt_tokens=long, cached_tokens=0, generated_tokens=2, **pages)
    assert [replace(story, screened_tokens=0) for story in engine.stories] == [first, second]
    assert list(engine.timeline) == [
        StepRecord(1, 101.0, PASS_S, (StepPart(0, 0, "prefill", short),), 1),
        StepRecord(2, 101.5, PASS_S, (StepPart(0, 0, "decode", 1),), 1),
        StepRecord(3, 102.0, PASS_S, (StepPart(0, 0, "decode", 1),), 1),
        StepRecord(4, 102.5, PASS_S, (StepPart(1, 0, "prefill", long),), 0),
        StepRecord(5, 103.0, PASS_S, (StepPart(1, 0, "decode", 1),), 0),
    ]
    now = engine.metrics.snapshot()
    counts = {"prompt_tokens": short + long, "generation_tokens": 5, "engine_steps": 5}
    counts |= {"prefix_cache_queries": short + long}
    counts["screened_tokens"] = one.stats.screened_tokens + two.stats.screened_tokens
    assert {name: now[name] for name in COUNTERS} == {**dict.fromkeys(COUNTERS, 0), **counts}
    assert now["request_success"] == {**dict.fromkeys(now["request_success"], 0), "length": 2}
    assert {name: (now[name]["count"], now[name]["sum"]) for name in HISTOGRAMS} == {
        "time_to_first_token_seconds": (2, 1.5 + 2.0),
        "inter_token_latency_seconds": (3, 3 * PASS_S),
        "e2e_request_latency_seconds": (2, 2.5 + 2.5),
        "request_queue_time_seconds": (2, 1.0 + 1.5),
        "request_prefill_time_seconds": (2, 2 * PASS_S),
        "request_decode_time_seconds": (2, 1.0 + 0.5),
        "request_prompt_tokens": (2, short + long),
        "request_generation_tokens": (2, 5),
        "engine_step_seconds": (5, 5 * PASS_S),
    }
    assert [record.getMessage() for record in caplog.records] == [
        f"request 0 ended (length) after 2.500 s: {short} prompt tokens, 0 of them cached, 3 new; "
        "first token after 1.5 s",
        f"request 1 ended (length) after 2.500 s: {long} prompt tokens, 0 of them cached, 2 new; "
        "first token after 2.0 s",
    ]


def test_a_request_is_late_after_its_time_and_not_in_it(drive):
    driven = drive(max_batch=1, request_timeout_s=2.0)
    running = driven.engine.submit("Alice", max_tokens=9, ignore_eos=True)
    waiting = driven.engine.submit("Alice", timeout_s=1.0)
    last = driven.engine.submit("Alice", timeout_s=1.5)
    driven.step(2)
    assert driven.now_s == 101.0  # in which it is due
    driven.step()
    assert not waiting.done
    driven.step()
    assert [each.done for each in (running, waiting, last)] == [False, True, False]
    with pytest.raises(RequestTimeout, match=r"^request 1 was not finished within 1\.0 s; it had 0 new tokens$"):
        waiting.result()
    driven.step()
    with pytest.raises(RequestTimeout, match=r"^request 2 was not finished within 1\.5 s; it had 0 new tokens"):
        last.result()
    driven.now_s += 0.001
    driven.step()
    with pytest.raises(RequestTimeout, match=r"^request 0 was not finished within 2\.0 s; it had 5 new tokens$"):
        running.result()
    assert driven.engine.metrics.finished["timeout"] == 3
    assert driven.gauges() == (0, 0, 0)
    assert driven.worker._deadlines == []


def test_deadlines_of_requests_that_have_ended_are_dropped(drive, monkeypatch):
    """Those that come first at once, the others when they are many."""
    monkeypatch.setattr(worker, "STALE_DEADLINES", 2)
    driven = drive(max_batch=1)
    handles = [driven.engine.submit("Alice", timeout_s=10.0 + n, max_tokens=50) for n in range(6)]
    driven.step()
    assert len(driven.worker._deadlines) == 6
    for number in (3, 4):
        handles[number].cancel()
    driven.step()
    assert len(driven.worker._deadlines) == 6
    for number in (0, 2):
        handles[number].cancel()
    driven.step()
    assert sorted(number for _, number in driven.worker._deadlines) == [1, 2, 3, 4, 5]  # the first one is gone
    handles[5].cancel()
    driven.step()
    driven.step()
    assert [number for _, number in driven.worker._deadlines] == [1]  # five are more than two for each and two


def test_a_reader_that_is_behind_pauses_its_request(drive):
    driven = drive(max_unread=4)
    stream = driven.engine.stream("Alice", max_tokens=20, ignore_eos=True)
    driven.step(4)
    assert driven.gauges() == (0, 0, 1)
    assert [each.state for each in driven.engine.requests] == ["paused"]
    assert repr(stream) == "<request 0: paused, 4 tokens>"
    next(stream)
    assert not driven.worker._to_resume
    next(stream)  # half of them are read
    driven.step()
    assert repr(stream) == "<request 0: running, 5 tokens>"
    assert driven.gauges() == (1, 0, 0)
    driven.step()
    assert driven.gauges() == (0, 0, 1)
    stream._want_all()  # what `result` calls first: its caller reads no chunks, so the engine must not wait for that
    driven.step(14)
    assert stream.done
    assert stream.result().stats.generated_tokens == 20


def test_whoever_reads_chunks_of_a_submitted_request_is_its_reader(drive):
    driven = drive(max_unread=4)
    handle = driven.engine.submit("Alice", max_tokens=20, ignore_eos=True)
    driven.step(6)
    assert driven.gauges() == (1, 0, 0)  # until then only its result may be wanted
    next(handle)
    driven.step()
    assert driven.gauges() == (0, 0, 1)


def test_the_texts_of_one_request_count_as_one(drive):
    driven = drive(max_batch=4, max_queue=5)
    (long,) = lengths(driven.engine, LONGER)
    many = driven.engine.submit(LONGER, n=3, temperature=1.0, seed=1, max_tokens=4, ignore_eos=True)
    message = (
        "^the engine's queue is full: 1 requests, for 3 texts, wait and 0 run; try again later, or raise max_queue, 5$"
    )
    with pytest.raises(QueueFull, match=message):
        driven.engine.submit("Alice", n=3, temperature=1.0)
    other = driven.engine.submit("Alice", n=2, temperature=1.0, max_tokens=1)
    assert (driven.gauges(), driven.worker._rows_in_queue) == ((0, 2, 0), 5)
    driven.step()
    assert (driven.gauges(), driven.worker._rows_in_queue) == ((2, 0, 0), 0)
    assert [len(pages) for story in driven.engine.stories for pages in story.pages[:1]] == [-(-(long + 1) // 4), 1]
    driven.step(4)
    assert many.done
    assert other.done
    assert (many.stats.generated_tokens, many.stats.decode_tokens) == (12, 9)
    assert driven.engine.metrics.snapshot()["inter_token_latency_seconds"]["count"] == 0  # of streams alone
    assert driven.engine.metrics.counters["requests_refused"] == 1
    assert driven.engine.metrics.counters["generation_tokens"] == 14


def test_a_cached_beginning_is_counted(drive):
    driven = drive(max_batch=2)
    text = "Once upon a time there was a little girl"
    (count,) = lengths(driven.engine, text)
    for _ in range(2):
        handle = driven.engine.submit(text, max_tokens=1)
        driven.step()
        assert handle.done
    cached = (count - 1) // 4 * 4
    assert [story.cached_tokens for story in driven.engine.stories] == [0, cached]
    now = driven.engine.metrics.snapshot()
    assert (now["prefix_cache_queries"], now["prefix_cache_hits"]) == (2 * count, cached)
    assert driven.engine.timeline[-1].parts == (StepPart(1, 0, "prefill", count - cached),)
    assert now["kv_cache_usage_perc"] == 0.0


def test_a_call_submits_no_more_than_run(drive):
    driven, counts = drive(max_batch=2), []
    for _ in driven.engine._submit_all(["Alice"] * 5, 0, None, {"max_tokens": 1}):
        counts.append(driven.engine.unfinished)
        driven.step(min(1, counts[-1]))  # without any it would sleep
    assert counts == [2, 2, 1, 0, 0]


def test_what_is_cancelled_says_how_far_it_came(drive):
    driven = drive(max_batch=1)
    one, two = (driven.engine.submit("Alice", max_tokens=50, ignore_eos=True) for _ in range(2))
    driven.step(3)
    one.cancel()
    two.cancel()
    driven.step()
    for handle, count in ((one, 3), (two, 0)):
        with pytest.raises(RequestCancelled, match=f"^request {handle.request_id} was cancelled after {count} tokens$"):
            handle.result()
    assert [story.state for story in driven.engine.stories] == ["abort", "abort"]
    assert [story.start_s for story in driven.engine.stories] == [100.0, None]
    assert driven.engine.metrics.histograms["request_prompt_tokens"].count == 1  # the second request never began
    assert driven.engine.metrics.histograms["e2e_request_latency_seconds"].count == 2
    assert driven.gauges() == (0, 0, 0)


def test_a_closed_engine_says_so(drive):
    driven = drive()
    left = driven.engine.submit("Alice")
    driven.engine.close(drain=False)
    assert not driven.worker._admit_arrivals()
    driven.worker._end_all()
    with pytest.raises(EngineClosed, match=r"^the engine was closed before request 0 was finished$"):
        left.result()
    with pytest.raises(EngineClosed, match=r"^the engine was closed; make another one$"):
        driven.engine.submit("Alice")
    assert driven.engine.metrics.finished["abort"] == 1


def test_a_plan_without_any_of_its_sequences_is_a_fault(drive, monkeypatch):
    driven = drive(max_batch=1)
    handles = [driven.engine.submit("Alice") for _ in range(3)]
    driven.step()
    monkeypatch.setattr(driven.worker._scheduler, "plan", PagedPlan)
    with pytest.raises(RuntimeError, match=r"^none of 3 sequences can run$"):
        driven.step()
    assert not any(handle.done for handle in handles)


def test_a_draining_engine_ends_what_it_has(drive):
    driven = drive(max_unread=1)
    stream = driven.engine.stream("Alice", max_tokens=3, ignore_eos=True)
    driven.step()
    assert driven.gauges() == (0, 0, 1)
    driven.engine.close(drain=True)
    driven.step(2)  # a draining engine does not wait for the reader of a stream
    assert stream.done
    assert not driven.worker._admit_arrivals()
    assert len(list(stream)) == 3


def test_company_is_waited_for_to_the_moment(drive, monkeypatch):
    driven = drive(max_batch=3, max_wait_s=2.0)
    waits, handles = [], []

    def submit():
        handles.append(driven.engine.submit("Alice", max_tokens=1))

    def wait(timeout_s):
        waits.append(timeout_s)
        driven.now_s += 1.0
        if len(waits) == 2:
            submit()

    monkeypatch.setattr(driven.worker, "_wait", wait)
    submit()
    driven.step()
    assert waits == [2.0, 1.0]
    assert [len(record.parts) for record in driven.engine.timeline] == [2]
    waits.clear()
    for _ in range(3):
        submit()
    driven.step()
    assert waits == []  # the batch is full
    assert len(driven.engine.timeline[-1].parts) == 3


def test_the_bell_is_waited_for_as_long_as_it_is_said(drive, monkeypatch):
    """Then all that rang is heard, and none of it twice."""
    driven, waits, rings = drive(), [], [None] * 3

    def get(timeout=-1):
        waits.append(timeout)
        raise Empty

    def get_nowait():
        if not rings:
            raise Empty
        rings.pop()

    monkeypatch.setattr(driven.worker, "_bell", SimpleNamespace(get=get, get_nowait=get_nowait, put=rings.append))
    driven.worker._has_rung[0] = 1
    driven.worker._wait(0.25)
    driven.worker._wait(None)
    assert waits == [0.25, None]
    assert (rings, driven.worker._has_rung[0]) == ([], 0)
    driven.worker._ring()
    assert (rings, driven.worker._has_rung[0]) == ([None], 1)


def test_an_idle_engine_sleeps_until_a_paused_request_is_late(drive, monkeypatch):
    """And not until one is late that has ended."""
    driven, waits = drive(max_unread=1), []
    ended = driven.engine.submit("Alice", max_tokens=1, timeout_s=1.0)
    stream = driven.engine.stream("Alice", max_tokens=20, ignore_eos=True, timeout_s=3.0)
    driven.step()
    assert ended.done
    assert driven.gauges() == (0, 0, 1)

    def wait(timeout_s):
        waits.append(timeout_s)
        driven.now_s += min(2.0, timeout_s)
        assert len(waits) < 3

    monkeypatch.setattr(driven.worker, "_wait", wait)
    driven.step()
    assert waits == [2.5, 0.5]
    assert not stream.done  # it is the last moment
    driven.now_s += 0.001
    driven.step()
    assert stream.done
    assert driven.engine.metrics.finished["timeout"] == 1


def test_steps_in_a_row_share_their_time(drive):
    """Each has the pieces of the one before, or fewer."""
    driven = drive(max_batch=2)
    handles = [driven.engine.submit("Alice", max_tokens=9) for _ in range(2)]
    assert driven.worker._admit_arrivals()
    pieces = driven.worker._scheduler.plan().pieces
    driven.now_s = 101.5
    driven.worker._record([pieces, pieces, pieces[:1]], 100.0)
    assert driven.worker._scheduler.step_s == 0.5
    records = list(driven.engine.timeline)
    assert [(each.number, each.start_s, each.seconds) for each in records] == [
        (1, 100.0, 0.5),
        (2, 100.5, 0.5),
        (3, 101.0, 0.5),
    ]
    numbers = [handle.request_id for handle in handles]
    assert [[part.request_id for part in each.parts] for each in records] == [numbers, numbers, numbers[:1]]
    now = driven.engine.metrics.snapshot()
    assert (now["engine_step_seconds"]["count"], now["engine_step_seconds"]["sum"]) == (3, 1.5)
    assert (now["engine_steps"], now["generation_tokens"]) == (3, 5)


def test_a_latch_waits_as_long_as_it_is_told():
    latch, asked = tickets.Latch(), []
    lock = {"acquire": lambda timeout: asked.append(timeout), "release": lambda: asked.append("released")}
    latch._closed = SimpleNamespace(**lock)
    assert [latch.wait(timeout_s) for timeout_s in (None, 2.5, 0, -3.0)] == [False] * 4
    assert asked == [-1, 2.5, 0.0, 0.0]
    for _ in range(2):
        latch.set()
    assert latch.wait(1.0)
    assert asked[4:] == ["released"]


def test_the_last_steps_and_stories_are_kept(drive, monkeypatch):
    monkeypatch.setattr(worker, "ENDED_STORIES", 2)
    driven = drive(timeline_steps=3)
    for _ in range(4):
        handle = driven.engine.submit("Alice", max_tokens=1)
        driven.step()
        assert handle.done
    assert [record.number for record in driven.engine.timeline] == [2, 3, 4]
    assert [story.request_id for story in driven.engine.stories] == [2, 3]
    assert driven.engine.metrics.labels == {"model_name": driven.engine.model.path.name}


@pytest.mark.parametrize(
    ("fallback", "left"),
    [((), []), (("numpy",), ["numpy"]), ((BACKEND, "numpy"), ["numpy"]), (("cupy", BACKEND, "numpy"), ["numpy"])],
)
def test_backends_before_the_one_in_use_were_tried(drive, fallback, left):
    assert drive(fallback=fallback).worker._fallback == left


def test_another_process_is_told_by_every_use(drive, monkeypatch):
    """An engine's thread does not exist in a child process."""
    driven = drive()
    engine, own = driven.engine, os.getpid()
    stream, handle = engine.stream("Alice", max_tokens=2), engine.submit("Alice", max_tokens=2)
    uses = {
        "this engine belongs": (
            lambda: engine.submit("Alice"),
            lambda: engine.generate("Alice"),
            lambda: engine.requests,
            lambda: engine.stories,
        ),
        "this request belongs to the engine": (
            lambda: next(stream),
            lambda: handle.result(timeout_s=0),
            lambda: asyncio.run(handle.aresult()),
            lambda: asyncio.run(anext(stream)),
        ),
    }
    with monkeypatch.context() as patch:
        patch.setattr(tickets, "os", SimpleNamespace(getpid=lambda: own + 1))
        for subject, calls in uses.items():
            message = f"{subject} of process {own}, and this is process {own + 1}; make an engine after the fork"
            for use in calls:
                with pytest.raises(EngineClosed) as caught:
                    use()
                assert str(caught.value) == message
    driven.step(2)
    assert (stream.done, handle.done) == (True, True)
