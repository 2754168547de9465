"""A Hypothesis state machine of the engine.

Whatever its users do in whatever order, no page is lost, no request suffers for another, every text is the text alone.
"""

import asyncio
import os
import warnings
from collections import Counter
from contextlib import closing
from functools import cache

from engine_checks import check, gist, until
from helpers import GOLDEN, model
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bitnet_ref.backends.backend import Backend
from bitnet_ref.errors import (
    DeviceError,
    EngineClosed,
    GenerationError,
    RequestCancelled,
    RequestTimeout,
)

TINY = GOLDEN / "bitnet-packed-offline"
PARAMS = [
    {},
    {"temperature": 0.8, "top_k": 5, "seed": 1},
    {"temperature": 1.0, "seed": 2, "logprobs": 2},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.5},
    {"n": 3, "temperature": 1.0, "seed": 3},
    {"overflow": "sliding", "window": 9},
    {"overflow": "sinks", "window": 11, "sink_tokens": 3, "temperature": 0.9, "seed": 4},
    {"speculate": "lookup"},
    {"speculate": "lookup", "logit_bias": {5: 100.0}, "logprobs": 1},  # every guess is right
    {"speculate": "lookup", "logit_bias": {5: 100.0, 6: 100.0}, "temperature": 1.0, "seed": 5},  # some are
    {"speculate": "lookup", "n": 2, "top_k": 2, "temperature": 1.0, "seed": 6, "repetition_penalty": 0.7},
]
RAISED = [
    SystemExit,
    KeyboardInterrupt,
    GeneratorExit,
    asyncio.CancelledError,
    ZeroDivisionError,
    MemoryError,
    EngineClosed,
]
REFUSED = [
    {"priority": 10**400},
    {"n": 10**9},
    {"n": 5},
    {"temperature": 1e-320},
    {"timeout_s": 1e30},
]
COUNTS = Counter()  # what the runs of this process did


@cache
def alone(prompt, which, max_tokens, backend="numpy"):
    tiny = model(TINY, backend, threads=1)
    params = {name: value for name, value in PARAMS[which].items() if name != "speculate"}
    outs = tiny.generate(list(prompt), max_tokens=max_tokens, ignore_eos=True, **params)
    return [gist(out) for out in outs] if isinstance(outs, list) else gist(outs)


prompts = st.tuples(st.sampled_from([5, 6]), st.lists(st.integers(3, 8), min_size=1, max_size=5)).map(
    lambda pair: (*[pair[0]] * 4, *pair[1])
)
requests = st.tuples(prompts, st.integers(0, len(PARAMS) - 1), st.integers(1, 12))
any_number = st.integers(0, 2**16)


class EngineMachine(RuleBasedStateMachine):
    """`live`: (handle, request, tokens that were read as chunks) of every request that should end well."""

    @initialize(
        batch=st.integers(3, 4),
        more=st.integers(1, 12),
        pool=st.sampled_from([(1, 26), (3, 10), (4, 8)]),
        unread=st.integers(1, 4),
        sharing=st.booleans(),
    )
    def start(self, batch, more, pool, unread, sharing):
        page_size, pages = pool
        self.failures = 0
        self.model = model(TINY, threads=1)
        settings = {"max_batch": batch, "max_batch_tokens": batch + more, "prefix_sharing": sharing}
        settings |= {"page_size": page_size, "cache_tokens": page_size * pages, "priority_wait_s": 0.01}
        self.engine = self.model.engine(**settings, max_unread=unread, max_queue=10**6, timeline_steps=20)
        self.live, self.streams, self.unread = [], [], unread
        self.right = Backend.head_rows
        Backend.head_rows = self.head_rows = lambda be, *args: self.fail_or(be, args)

    def fail_or(self, be, args):
        if self.failures:
            self.failures -= 1
            raise DeviceError("the device fell off the bus")
        return self.right(be, *args)

    def submit(self, request, how="submit", **more):
        prompt, which, max_tokens = request
        how = "submit" if "n" in PARAMS[which] else how
        COUNTS["requests"] += 1
        params = {"max_tokens": max_tokens, "ignore_eos": True, **PARAMS[which], **more}
        return getattr(self.engine, how)(list(prompt), **params)

    def pick(self, number):
        return self.live[number % len(self.live)]

    @rule(
        several=st.lists(requests, min_size=1, max_size=4),
        priority=st.integers(-2, 2),
        how=st.sampled_from(["submit", "stream"]),
    )
    def ask(self, several, priority, how):
        for request in several:
            self.live.append((self.submit(request, how, priority=priority), request, []))
            self.streams += [self.live[-1][0]] if how == "stream" else []

    @rule(
        request=requests,
        raised=st.sampled_from(RAISED),
        at=st.integers(0, 5),
        place=st.sampled_from(["processors", "strategy"]),
    )
    def ask_badly(self, request, raised, at, place):
        """Its own function raises, whatever it may be."""
        COUNTS[raised.__name__] += 1

        def bad(ids, *_):
            if len(ids) >= len(request[0]) + at:
                raise raised("mine")
            return _[0] if place == "processors" else 5

        def result():
            handle = self.submit(request, **{place: [bad] if place == "processors" else bad})
            outs = handle.result()
            assert request[2] <= at, outs

        self.expect(result, GenerationError)

    @rule(request=requests)
    def ask_from_within(self, request):
        """Its own function waits for the engine."""

        def wait(ids, logits):
            return self.engine.generate([5, 6], max_tokens=1) and logits

        self.expect(lambda: self.submit(request, processors=[wait]).result() and 1 / 0, GenerationError)

    @rule(request=requests, more=st.sampled_from(REFUSED))
    def ask_what_cannot_be(self, request, more):
        self.expect(lambda: self.submit(request, **more) and 1 / 0, GenerationError)

    @rule(request=requests, timeout_s=st.sampled_from([1e-9, 0.001, 0.01]), how=st.sampled_from(["submit", "stream"]))
    def ask_for_too_much(self, request, timeout_s, how):
        def result():
            handle = self.submit(request, how, timeout_s=timeout_s)
            until(lambda: handle.done or handle._ticket.held)
            until(lambda: handle.done)  # a slow reader is late as well
            outs = handle.result()
            self.check_result((handle, request), outs)

        self.expect(result, RequestTimeout)

    def expect(self, use, *errors):
        try:
            use()
        except errors as error:
            COUNTS[type(error).__name__] += 1

    @precondition(lambda self: self.live)
    @rule(number=any_number, chunks=st.integers(1, 4), is_async=st.booleans())
    def read_some(self, number, chunks, is_async):
        handle, request, read = self.pick(number)
        if "n" in PARAMS[request[1]]:
            self.expect(lambda: next(handle) and 1 / 0, GenerationError)
            return

        async def some():
            return [chunk.token_id async for _, chunk in azip(range(chunks), handle)]

        before = len(read)
        read += (
            asyncio.run(some())
            if is_async
            else [chunk.token_id for _, chunk in zip(range(chunks), handle, strict=False)]
        )
        expected = alone(*request)[0]
        assert read == expected[: len(read)]
        assert len(read) == min(len(expected), before + chunks)
        COUNTS["chunks"] += len(read) - before

    @precondition(lambda self: self.live)
    @rule(number=any_number, is_async=st.booleans())
    def finish(self, number, is_async):
        entry = self.pick(number)
        self.live.remove(entry)
        self.check_result(entry, asyncio.run(entry[0].aresult()) if is_async else entry[0].result())

    def check_result(self, entry, outs):
        assert ([*map(gist, outs)] if isinstance(outs, list) else gist(outs)) == alone(*entry[1])
        COUNTS["texts"] += 1

    @precondition(lambda self: self.live)
    @rule(number=any_number, how=st.sampled_from(["cancel", "close", "drop", "task"]))
    def break_off(self, number, how):
        entry = self.pick(number)
        self.live.remove(entry)
        handle = entry[0]
        COUNTS[how] += 1
        if how == "close":
            handle.close()
        elif how == "cancel":
            handle.cancel()
            self.expect(handle.result, RequestCancelled)
        elif how == "task":

            async def cancelled():
                task = asyncio.create_task(handle.aresult())
                await asyncio.sleep(0)
                task.cancel()
                return await asyncio.gather(task, return_exceptions=True)

            asyncio.run(cancelled())

    @rule(request=requests, chance=st.integers(0, 3))
    def lose_the_device(self, request, chance):
        if chance:
            return
        COUNTS["device"] += 1
        self.failures = 1
        self.check_result((None, request), self.submit(request).result())
        assert self.failures == 0

    @rule(chance=st.integers(0, 3))
    def fork(self, chance):
        if chance:
            return
        COUNTS["fork"] += 1
        handle = self.live[0][0] if self.live else None
        uses = [lambda: self.engine.submit([5]), lambda: self.engine.generate([5]), lambda: self.engine.requests]
        uses += [] if handle is None else [handle.result, lambda: next(handle), lambda: asyncio.run(handle.aresult())]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            told = 0
            try:
                for use in uses:
                    try:
                        use()
                    except EngineClosed as error:
                        told += "make an engine after the fork" in str(error)
                self.engine.close()
            finally:
                os._exit(told)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(uses)

    @invariant()
    def it_lives(self):
        if hasattr(self, "engine"):
            assert not self.engine.closed, self.engine._worker._closing
            assert all(handle._ticket.outbox.error is None for handle, _, _ in self.live)
            behind = [handle._ticket for handle in self.streams if handle._ticket.wanted == "chunks"]
            assert all(ticket.outbox.chunks.qsize() <= self.unread + 1 for ticket in behind)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        try:
            drains = len(self.live) % 2 == 0
            self.engine.close(drain=drains)
            for entry in self.live:
                with closing(entry[0]):
                    if drains:
                        self.check_result(entry, entry[0].result())
                    else:
                        self.expect(lambda entry=entry: self.check_result(entry, entry[0].result()), EngineClosed)
            check(self.engine)
            COUNTS["engines"] += 1
            now = self.engine.metrics.snapshot()
            for name in ("draft", "accepted"):
                COUNTS[f"{name} tokens"] += now[f"spec_decode_num_{name}_tokens"]
        finally:
            Backend.head_rows = self.right


async def azip(numbers, stream):
    """Pairs, as zip makes them; nothing more is read than is given."""
    for number in numbers:
        try:
            yield number, await anext(stream)
        except StopAsyncIteration:
            return
