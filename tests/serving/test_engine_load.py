"""The engine under load: random arrivals, cancellations, priorities and small pools, and a soak of many streams.

Whatever happens around it, a request that finishes gives what it gives alone: tokens, text, chunks, log probabilities.
"""

import asyncio
import gc
import os
import random
import threading
import time
import tracemalloc
from functools import cache

import pytest
from engine_checks import check_pool
from helpers import GOLDEN, model
from hypothesis import given, settings
from hypothesis import strategies as st

from bitnet_ref.errors import RequestCancelled
from bitnet_ref.system.memory import memory_bytes

TINY = GOLDEN / "bitnet-packed-offline"


@cache
def alone(path, backend, prompt, params):
    """What a request gives by itself, and in which chunks."""
    whole = model(path, backend, threads=1)
    given = dict(params)
    if given.get("n", 1) > 1:
        return [gist(out) for out in whole.generate(list(prompt), **given)], None
    chunks = list(whole.stream(list(prompt), **given))
    return gist(whole.generate(list(prompt), **given)), [chunk.text for chunk in chunks]


def gist(out):
    return out.token_ids, out.text, out.logprobs, out.finish_reason, out.top_logprobs, out.overflows


PARAMS = [
    {},
    {"temperature": 0.8, "top_k": 5, "seed": 1},
    {"temperature": 1.0, "seed": 2, "logprobs": 2},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.5},
    {"n": 3, "temperature": 1.0, "seed": 3},
    {"overflow": "sliding", "window": 9},
    {"overflow": "sinks", "window": 11, "sink_tokens": 3, "temperature": 0.9, "seed": 4},
    {"overflow": "truncate", "window": 12, "n": 2, "temperature": 1.0, "seed": 5},
]

requests = st.lists(
    st.tuples(
        st.integers(0, 2),  # which beginning
        st.lists(st.integers(3, 20), min_size=1, max_size=6),
        st.integers(0, len(PARAMS) - 1),
        st.integers(1, 9),  # max_tokens
        st.integers(-1, 2),  # priority
        st.sampled_from(["read", "read", "read", "cancel", "abandon"]),
        st.integers(0, 4),  # chunks before that
        st.integers(0, 6),  # steps before the next one comes
    ),
    min_size=1,
    max_size=10,
)


loads = given(
    requests,
    st.integers(1, 4),
    st.integers(1, 12),
    st.sampled_from([(1, 24), (3, 9), (4, 7), (16, 3)]),
    st.booleans(),
)


@pytest.mark.thorough
@settings(max_examples=40)
@loads
def test_whatever_comes_every_request_gives_what_it_gives_alone(arrivals, batch, more, pool, sharing):
    check_load("auto", arrivals, batch, more, pool, sharing)


@pytest.mark.thorough
@settings(max_examples=8)
@loads
def test_so_in_plain_numpy(arrivals, batch, more, pool, sharing):
    check_load("numpy", arrivals, batch, more, pool, sharing)


def check_load(backend, arrivals, batch, more, pool, sharing):
    page_size, pages = pool
    tiny = model(TINY, backend, threads=1)
    settings = {"max_batch": batch, "max_batch_tokens": batch + more, "prefix_sharing": sharing}
    settings |= {"page_size": page_size, "cache_tokens": page_size * pages, "priority_wait_s": 0.01}
    with tiny.engine(**settings) as engine:
        kept = []
        for beginning, rest, which, max_tokens, priority, what, after, steps in arrivals:
            prompt, params = [5 + beginning] * 4 + rest, {**PARAMS[which], "max_tokens": max_tokens, "ignore_eos": True}
            params["n"] = min(params.get("n", 1), batch)
            handle = engine.submit(prompt, priority=priority, **params)
            if what != "read" and params.get("n", 1) == 1:
                for _ in range(min(after, max_tokens)):
                    next(handle)
            if what == "cancel":
                handle.cancel()
            elif what == "read":
                kept.append((handle, prompt, params))
            del handle
            until = engine.metrics.counters["engine_steps"] + steps
            while engine.metrics.counters["engine_steps"] < until and engine._worker._alive:
                time.sleep(0)
        for handle, prompt, params in kept:
            expected, texts = alone(TINY, backend, tuple(prompt), tuple(params.items()))
            if texts is not None:
                assert [chunk.text for chunk in handle] == texts
                assert gist(handle.result()) == expected
            else:
                assert [gist(out) for out in handle.result()] == expected
    check_pool(engine._worker.pool, [])
    assert engine._worker.pool.in_use == 0


@pytest.mark.thorough
def test_many_asyncio_streams_with_cancellations():
    """A short form of the soak below."""
    soak(streams=16, count=60, max_tokens=12)


@pytest.mark.slow
def test_soak():
    """64 streams, 500 requests: pytest -m slow tests/serving/test_engine_load.py -n0 -s -k soak"""
    soak(streams=64, count=500, max_tokens=64)


def soak(streams, count, max_tokens):
    """20% are cancelled, 10% read slowly, 5% are abandoned, the rest are read as they come; half by threads."""
    story = model("storyteller", "auto")
    dice = random.Random(7)
    openings = ["Once upon a time", "Alice", "The old man of the sea", "It was a dark and stormy night, and the wind"]
    jobs = []
    for number in range(count):
        prompt = f"{dice.choice(openings)} {dice.choice(['had', 'saw', 'and the', number])}"
        params = dict(dice.choice(PARAMS[:4])) | {"max_tokens": dice.randint(2, max_tokens)}
        kind = (
            "cancel" if number % 5 == 0 else "slow" if number % 10 == 1 else "abandon" if number % 20 == 2 else "read"
        )
        jobs.append((prompt, params, kind, dice.random()))
    found: dict[int, tuple] = {}
    threads_before, files_before = threading.active_count(), open_files()
    start = time.perf_counter()
    with story.engine(max_batch=streams, cache_tokens=streams * (max_tokens // 3 + 8), page_size=8) as engine:
        todo = iter(enumerate(jobs))
        lock = threading.Lock()

        def more():
            with lock:
                return next(todo, None)

        def by_thread():
            while (job := more()) is not None:
                number, (prompt, params, kind, share) = job
                stream, chunks = engine.stream(prompt, **params), []
                for chunk in stream:
                    chunks.append(chunk)
                    if kind == "slow":
                        time.sleep(0.002)
                    if kind in ("cancel", "abandon") and len(chunks) > share * params["max_tokens"]:
                        break
                if kind == "cancel":
                    stream.close()
                    assert list(stream) == []
                elif kind != "abandon":
                    found[number] = ([chunk.text for chunk in chunks], gist(stream.result()))
                del stream

        async def by_task():
            while (job := more()) is not None:
                number, (prompt, params, kind, share) = job
                stream, chunks = engine.stream(prompt, **params), []
                try:
                    async for chunk in stream:
                        chunks.append(chunk)
                        if kind == "slow":
                            await asyncio.sleep(0.002)
                        if kind in ("cancel", "abandon") and len(chunks) > share * params["max_tokens"]:
                            if kind == "abandon":
                                break
                            stream.cancel()
                except RequestCancelled:
                    assert kind == "cancel"
                if kind not in ("cancel", "abandon"):
                    found[number] = ([chunk.text for chunk in chunks], gist(await stream.aresult()))
                del stream

        async def tasks():
            await asyncio.gather(*[by_task() for _ in range(streams // 2)])

        readers = [threading.Thread(target=by_thread) for _ in range(streams // 2)]
        for reader in readers:
            reader.start()
        asyncio.run(tasks())
        for reader in readers:
            reader.join()
        gc.collect()
    took = time.perf_counter() - start
    now = engine.metrics.snapshot()
    assert now["engine_faults"] == now["request_success"]["error"] == 0
    assert sum(now["request_success"].values()) == count
    check_pool(engine._worker.pool, [])
    assert engine._worker.pool.in_use == 0
    assert (threading.active_count(), open_files()) == (threads_before, files_before)
    assert set(found) == {number for number, job in enumerate(jobs) if job[2] in ("read", "slow")}
    for number, (texts, out) in found.items():
        prompt, params, *_ = jobs[number]
        expected, pieces = alone("storyteller", "auto", tuple(story.tokenizer.encode(prompt)), tuple(params.items()))
        assert out == expected
        assert texts == pieces
    ends, speed = now["request_success"], now["generation_tokens"] / took
    print(f"\n{count} requests on {streams} streams in {took:.1f} s: {speed:.0f} tok/s, {ends}")
    print({name: now[name] for name in ("num_preemptions", "prefix_cache_hits", "prefix_cache_queries")})
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds"):
        print(name, {q: round(now[name][q], 4) for q in ("p50", "p95", "p99")})


def open_files():
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


@pytest.mark.slow
def test_memory_is_flat():
    """Less than 1 MiB in 10,000 requests: pytest -m slow tests/serving/test_engine_load.py -n0 -s -k flat"""
    tiny = model(TINY, "auto")
    with tiny.engine(max_batch=32, max_batch_tokens=256, cache_tokens=2048, timeline_steps=100) as engine:

        def serve(count):
            for start in range(0, count, 100):
                streams = [engine.stream([5, start % 97 + 3, n % 50 + 3], max_tokens=4) for n in range(100)]
                for number, stream in enumerate(streams):
                    if number % 5 == 0:
                        stream.close()
                    elif number % 20 != 2:
                        list(stream)
            del streams, stream
            gc.collect()

        serve(10_000)  # the pool, the index and the timeline are as full as they get
        before = memory_bytes()
        serve(10_000)
        resident = memory_bytes() - before
        tracemalloc.start()
        serve(1000)
        traced = tracemalloc.get_traced_memory()[0]
        serve(10_000)
        grown = tracemalloc.get_traced_memory()[0] - traced
        tracemalloc.stop()
    print(f"\n10,000 requests: {grown:,} bytes more in Python objects, {resident:,} more held by the process")
    assert grown < 1 << 20
    assert resident < 1 << 20
