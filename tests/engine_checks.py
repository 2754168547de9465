"""Checks of an engine: nothing is left after the last request, and results equal those of single runs."""

import threading
import time
from collections import Counter
from linecache import getline

from bitnet_ref.errors import GenerationError, RequestCancelled, RequestTimeout
from bitnet_ref.generation.drafts import StepTimes

PROMPTS = ["Once upon a time", "Alice", "The old man of the sea", "It was a dark and stormy night, and the wind"]


def check_pool(pool, leases):
    """The books of a page pool balance. leases: all that are open."""
    held = Counter(page for lease in leases for page in lease.pages)
    assert pool._holders == [held[page] for page in range(pool.pages)]
    blank, idle = set(pool._blank), set(pool._idle)
    assert len(blank) == len(pool._blank), "a page is blank twice"
    assert blank | idle | set(held) == set(range(pool.pages)), "a page is lost"
    assert not blank & idle | blank & set(held) | idle & set(held), "a page is in two places"
    indexed = {page: key for page, key in enumerate(pool._keys) if key is not None}
    assert {page: key for key, page in pool.index.items()} == indexed, "the index and the pages disagree"
    assert idle <= set(indexed) <= idle | set(held), "an idle page without a key, or a blank one with it"


def check(engine):
    """The engine holds nothing when all requests have ended."""
    pool = engine._worker.pool
    check_pool(pool, [])
    assert pool.in_use == 0
    worker, scheduler = engine._worker, engine._worker._scheduler
    assert (scheduler.running, scheduler.waiting, scheduler.held, scheduler.parked) == ([], [], {}, {})
    assert (worker._alive, worker._in_queue, worker._rows_in_queue) == ({}, 0, 0)
    now = engine.metrics.snapshot()
    assert (now["num_requests_running"], now["num_requests_waiting"]) == (0, 0)


def until(condition, timeout_s=20.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "timeout"
        time.sleep(0.002)


def gist(out):
    return out.token_ids, out.text, out.logprobs, out.finish_reason, out.stop_reason, out.top_logprobs


class FreeGuesses(StepTimes):
    """Guesses are made at any speed of the model and the machine."""

    def learn(self, rows, drafted, seconds):
        return 0.0


class LineFault:
    """Traces a thread and raises MemoryError at the `number`-th line of `serving` and the stepper that it runs."""

    SPARED = ("_run", "_start_over")  # what handles the fault
    DESTRUCTORS = ("close", "cancel", "done")  # with all that they call; the thread runs those of older engines too

    def __init__(self, number):
        self.number, self.lines = number, 0

    def __call__(self, frame, event, arg):
        name = frame.f_code.co_filename
        if not ("/bitnet_ref/serving/" in name or name.endswith("/stepper.py")) or frame.f_code.co_name in self.SPARED:
            return None
        callers = frame
        while callers is not None:
            if callers.f_code.co_name in self.DESTRUCTORS:
                return None
            callers = callers.f_back
        return self.trace if self.lines < self.number else None

    def trace(self, frame, event, arg):
        # Not at `with`: Python comes there again when it leaves, and would then not release the lock.
        if event == "line" and not getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
            self.lines += 1
            if self.lines == self.number:
                raise MemoryError(f"line {frame.f_lineno} of {frame.f_code.co_filename}")
        return self.trace


def check_fault(model, number):
    """Requests whose engine's thread meets a MemoryError at that line. -> (lines that it ran, requests that failed)

    Each request ends, with its own text or with the error; the next is right; no page is lost.
    """
    prompt, params, fault, failed = [5, 6, 7, 8], {"max_tokens": 4, "temperature": 1.0, "seed": 1}, LineFault(number), 0
    expected = gist(model.generate(prompt, **params))
    with model.engine(max_batch=2, max_batch_tokens=8, page_size=2, cache_tokens=24, max_unread=2) as engine:
        before = threading.gettrace()
        threading.settrace(fault)
        handles = [engine.submit(prompt, **params)]
        threading.settrace(before)
        handles += [engine.submit(prompt, n=2, **params), engine.stream(prompt, **params)]
        late, cancelled = engine.submit(prompt, timeout_s=1e-6, **params), engine.submit(prompt, **params)
        cancelled.cancel()
        for handle in (*handles, late, cancelled):
            try:
                outs = handle.result(timeout_s=20)
                assert gist(outs[0] if isinstance(outs, list) else outs) == expected
            except (RequestTimeout, RequestCancelled):
                pass
            except GenerationError as error:
                if not isinstance(error.__cause__, MemoryError):
                    raise
                failed += 1
        if fault.lines >= number:
            assert [chunk.token_id for chunk in engine.stream(prompt, **params)] == expected[0]
    check(engine)
    return fault.lines, failed
