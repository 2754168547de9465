"""What tests of the engine ask of it: that nothing is left, that what comes is what comes alone."""

import time

PROMPTS = ["Once upon a time", "Alice", "The old man of the sea", "It was a dark and stormy night, and the wind"]


def check(engine):
    """Nothing is left when nobody is there."""
    pool = engine._worker.pool
    pool.check([])
    assert pool.in_use == 0
    scheduler = engine._worker._scheduler
    assert (scheduler.running, scheduler.waiting, engine._worker._alive) == ([], [], {})
    now = engine.metrics.snapshot()
    assert (now["num_requests_running"], now["num_requests_waiting"]) == (0, 0)


def until(condition, timeout_s=20.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it does not come about"
        time.sleep(0.002)


def gist(out):
    return out.token_ids, out.text, out.logprobs, out.finish_reason, out.stop_reason, out.top_logprobs
