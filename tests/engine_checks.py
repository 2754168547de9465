"""Checks of an engine: nothing is left after the last request, and results equal those of single runs."""

import time
from collections import Counter

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
    scheduler = engine._worker._scheduler
    assert (scheduler.running, scheduler.waiting, engine._worker._alive) == ([], [], {})
    now = engine.metrics.snapshot()
    assert (now["num_requests_running"], now["num_requests_waiting"]) == (0, 0)


def until(condition, timeout_s=20.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "timeout"
        time.sleep(0.002)


def gist(out):
    return out.token_ids, out.text, out.logprobs, out.finish_reason, out.stop_reason, out.top_logprobs
