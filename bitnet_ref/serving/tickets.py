"""A request in the engine, from both sides: the engine works on a `Ticket`, the user holds a `RequestHandle`.

The ticket has no reference to the handle, so dropping the handle destroys it, which cancels the request.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from ..errors import EngineClosed, GenerationError, count_of
from ..generation.results import GenerationStats, StreamChunk
from ..generation.search import BeamSearch
from ..generation.sequence import Request
from ..system.options import LARGEST, LONGEST_S, Number
from .records import RequestProgress
from .scheduler import Job

NEWEST_CHUNKS = 16
WAIT = Number(0, LONGEST_S, optional=True)
SUBJECT = "this request belongs to the engine"  # of `check_process`


class Latch:
    """An event that one thread sets, once. It is a single lock: when memory runs out inside `threading.Event.set`, the
    lock of its Condition may stay held, and every later call waits for ever."""

    def __init__(self) -> None:
        self._closed, self._set = threading.Lock(), False
        self._closed.acquire()

    def set(self) -> None:
        if not self._set:
            self._set = True
            self._closed.release()

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it was set within that time."""
        if not self._set and self._closed.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
            self._closed.release()
        return self._set


class Outbox:
    """Chunks on their way to the reader. The engine's thread puts, any thread or event loop takes."""

    def __init__(self) -> None:
        self.chunks: SimpleQueue[StreamChunk | None] = SimpleQueue()  # None: the end
        self.error: GenerationError | None = None
        self.done = Latch()
        self.loop: asyncio.AbstractEventLoop | None = None  # of an asyncio reader
        self.news = asyncio.Event()

    def subscribe(self) -> asyncio.Event:
        """The event of news for this event loop, cleared. Call it before looking for chunks, to miss none."""
        loop = asyncio.get_running_loop()
        if self.loop is not loop:
            self.loop, self.news = loop, asyncio.Event()
        self.news.clear()
        return self.news


def wake_readers(outboxes: Sequence[Outbox]) -> None:
    """Wake the asyncio readers of these, with one call for each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Outbox]] = {}
    for outbox in outboxes:
        if outbox.loop is not None:
            by_loop.setdefault(outbox.loop, []).append(outbox)
    for loop, of_loop in by_loop.items():
        with suppress(Exception):  # the loop was closed, or is one of its own kind
            loop.call_soon_threadsafe(_wake, of_loop)


def _wake(outboxes: Sequence[Outbox]) -> None:
    for outbox in outboxes:
        outbox.news.set()


@dataclass(frozen=True)
class RequestStory:
    """What has happened to a request, without any of its text. Times are of `time.perf_counter`; None: not yet."""

    request_id: int
    state: str  # "waiting", "running", "paused", or why it ended, as in `EngineMetrics.finished`
    priority: int
    arrival_s: float
    start_s: float | None  # of its first step
    first_token_s: float | None
    end_s: float | None
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int  # of all its texts
    screened_tokens: int
    drafted_tokens: int  # guessed, with `speculate`
    accepted_tokens: int  # of them, those that became text
    pages: tuple[tuple[int, ...], ...]  # of the cache, in order, that each of its texts holds


class Ticket:
    """One request in the engine and its n rows. The user's thread creates it; then only the engine's thread uses it."""

    def __init__(
        self,
        number: int,
        request: Request,
        priority: int,
        timeout_s: float | None,
        backend: str,
        max_unread: int,
        choice: int | None = None,
    ) -> None:
        """choice: which one of the request's n continuations this ticket is for; None: all of them, or all beams."""
        self.number, self.request, self.timeout_s, self.max_unread = number, request, timeout_s, max_unread
        self.arrival_s = time.perf_counter()
        self.deadline_s = None if timeout_s is None else self.arrival_s + timeout_s
        self.choice, beams = choice, request.params.num_beams
        choices = range(max(request.params.n, beams)) if choice is None else (choice,)
        self.stats, self.ended = GenerationStats(backend), False
        ranks = [(self.arrival_s, (number, index)) for index in range(len(choices))]
        self.rows = [Job(self, choice, rank, priority) for choice, rank in zip(choices, ranks, strict=True)]
        self.search = BeamSearch(self.rows) if beams > 1 else None
        self.rows[0].scores = request.params.prompt_logprobs is not None
        self.stats.prompt_tokens = self.rows[0].context_tokens
        self.stats.dropped_tokens = len(request.given) - self.stats.prompt_tokens
        self.outbox = Outbox()
        self.start_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s, self.submitted = 0.0, False
        self.wanted: str | None = None  # "chunks" or "all", once a reader has shown which
        self.held = False  # its reader is behind

    @property
    def streams(self) -> bool:
        return len(self.rows) == 1

    def result(self) -> Any:
        """A `Generation`, or a list of them with n > 1."""
        results = self.search.results if self.search is not None else [row.result() for row in self.rows]
        return results if self.request.params.n > 1 and self.choice is None else results[0]

    @property
    def room(self) -> int:
        """How many chunks its reader may still leave unread."""
        return self.max_unread - self.outbox.chunks.qsize() if self.wanted == "chunks" else LARGEST

    @property
    def has_caught_up(self) -> bool:
        return self.wanted != "chunks" or self.outbox.chunks.qsize() <= self.max_unread // 2

    @property
    def state_name(self) -> str:
        return "waiting" if self.start_s is None else "paused" if self.held else "running"

    def state(self, now_s: float) -> RequestProgress:
        """Its progress; any thread may ask."""
        return RequestProgress(
            request_id=self.number,
            state=self.state_name,
            prompt_tokens=self.stats.prompt_tokens,
            generated_tokens=self.stats.generated_tokens,
            age_s=now_s - self.arrival_s,
            newest_text="".join(chunk.text for chunk in self.rows[0].chunks[-NEWEST_CHUNKS:]),
        )

    def story(self, reason: str | None = None, end_s: float | None = None) -> RequestStory:
        """Its story until now, or until its end for this reason; any thread may ask."""
        stats, leases = self.stats, [row.lease for row in self.rows]
        return RequestStory(
            request_id=self.number,
            state=reason or self.state_name,
            priority=self.rows[0].priority,
            arrival_s=self.arrival_s,
            start_s=self.start_s,
            first_token_s=self.first_token_s,
            end_s=end_s,
            prompt_tokens=stats.prompt_tokens,
            cached_tokens=stats.cached_tokens,
            generated_tokens=stats.generated_tokens,
            screened_tokens=stats.screened_tokens,
            drafted_tokens=stats.drafted_tokens,
            accepted_tokens=stats.accepted_tokens,
            pages=tuple(tuple(lease.pages) for lease in leases if lease is not None),
        )


Delivery = tuple[Ticket, StreamChunk | None]  # a chunk, or the end, on its way to an outbox after the step


class Driver(Protocol):
    """What a handle asks of the worker. The first two take no lock, since a destructor may call them anywhere."""

    def cancel(self, ticket: Ticket) -> None: ...

    def resume(self, ticket: Ticket) -> None: ...

    def check_may_wait(self) -> None: ...


class RequestHandle(Iterator[StreamChunk], AsyncIterator[StreamChunk]):
    """One request: its chunks as they come, by `for` or `async for`, or its whole result.

    `close()`, leaving a `with`, or dropping the handle cancels the request and frees its part of the cache within one
    step. So does an interrupt (Ctrl-C) or the cancellation of a task that waits for it. `stats` is live. Several
    threads, or several tasks of one event loop, may use it; each chunk goes to the first that asks. A reader that takes
    chunks too slowly pauses the request (`EngineConfig.max_unread`); one that waits for the result does not.
    """

    def __init__(self, ticket: Ticket, worker: Driver, engine: object) -> None:
        """engine: kept alive as long as the handle."""
        self._ticket, self._worker, self._engine, self._outbox = ticket, worker, engine, ticket.outbox
        self._closed, self._process = False, os.getpid()

    def __repr__(self) -> str:
        state = "ended" if self.done else self._ticket.state_name
        return f"<request {self.request_id}: {state}, {count_of(self.stats.generated_tokens, 'token')}>"

    @property
    def request_id(self) -> int:
        """Its number in the engine's timeline."""
        return self._ticket.number

    @property
    def stats(self) -> GenerationStats:
        """Counts and times of this request so far."""
        return self._ticket.stats

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt, as in `Generation`."""
        ids: list[int] = self._ticket.request.given.tolist()
        return ids

    @property
    def echo(self) -> str:
        """What the text begins with, by the parameter `echo`: the prompt."""
        return self._ticket.rows[0].echo

    @property
    def prompt_logprobs(self) -> list[dict[int, float] | None] | None:
        """As in `Generation`; complete when the first chunk is there."""
        return self._ticket.rows[0].prompt_logprobs

    @property
    def story(self) -> RequestStory:
        """What has happened to it so far."""
        return self._ticket.story()

    @property
    def done(self) -> bool:
        """Whether the request has ended, successfully or not."""
        return self._outbox.done.is_set()

    def cancel(self) -> None:
        """End it. The chunks generated so far can still be read, followed by RequestCancelled."""
        if self._ticket.submitted and not self.done:
            self._worker.cancel(self._ticket)

    def close(self) -> None:
        """End it and give no further chunk."""
        self._closed = True
        self.cancel()

    async def aclose(self) -> None:
        """`close`, for asyncio."""
        self.close()

    __del__ = cancel

    def __next__(self) -> StreamChunk:
        self._check_readable()
        if self._closed:
            raise StopIteration
        try:
            chunk = self._outbox.chunks.get_nowait()
        except Empty:
            self._worker.check_may_wait()
            try:
                chunk = self._outbox.chunks.get()
            except BaseException:  # Ctrl-C
                self.close()
                raise
        if chunk is None:
            self._end()
            raise StopIteration
        self._let_go_on()
        return chunk

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the end. -> `Generation`, or a list of them with n > 1

        Raises the error that ended the request, or TimeoutError after `timeout_s` (the request goes on).
        """
        timeout_s = WAIT.read(timeout_s, "timeout_s")
        self._want_all()
        try:
            ended = self._outbox.done.wait(timeout_s)
        except BaseException:  # Ctrl-C
            self.close()
            raise
        if not ended:
            raise TimeoutError(f"request {self.request_id} is not finished after {timeout_s} s")
        return self._result()

    def __enter__(self) -> RequestHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __anext__(self) -> StreamChunk:
        self._check_readable()
        while not self._closed:
            news = self._outbox.subscribe()
            try:
                chunk = self._outbox.chunks.get_nowait()
            except Empty:
                await self._wait(news)
                continue
            if chunk is not None:
                self._let_go_on()
                return chunk
            self._end()
        raise StopAsyncIteration

    async def aresult(self) -> Any:
        """`result`, for asyncio."""
        self._want_all()
        while True:
            news = self._outbox.subscribe()
            if self.done:
                return self._result()
            await self._wait(news)

    async def __aenter__(self) -> RequestHandle:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def _wait(self, news: asyncio.Event) -> None:
        self._worker.check_may_wait()
        try:
            await news.wait()
        except BaseException:  # the task was cancelled
            self.close()
            raise

    def _end(self) -> None:
        """After the last chunk: raise the request's error, if it has one."""
        self._outbox.chunks.put(None)  # for other readers
        if self._outbox.error is not None and not self._closed:
            raise self._outbox.error
        self._closed = True

    def _result(self) -> Any:
        if self._outbox.error is not None:
            raise self._outbox.error
        return self._ticket.result()

    def _check_readable(self) -> None:
        check_process(self._process, SUBJECT)
        if not self._ticket.streams:
            name = "n" if self._ticket.search is None else "num_beams"
            message = f"a stream is one continuation, got {len(self._ticket.rows)}; use result()"
            raise GenerationError(message, field=name)
        self._ticket.wanted = self._ticket.wanted or "chunks"

    def _want_all(self) -> None:
        """A caller waits for the result: from now on the request does not pause for its reader."""
        check_process(self._process, SUBJECT)
        if not self.done:
            self._worker.check_may_wait()
        self._ticket.wanted = "all"
        self._let_go_on()

    def _let_go_on(self) -> None:
        if self._ticket.held and self._ticket.has_caught_up:
            self._worker.resume(self._ticket)


def check_process(process: int, subject: str = "this engine belongs") -> None:
    """Raise EngineClosed in a child process: the engine's thread exists only in the process that started it."""
    if process != os.getpid():
        raise EngineClosed(
            f"{subject} of process {process}, and this is process {os.getpid()}; make an engine after the fork"
        )
