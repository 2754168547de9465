"""The engine's thread: takes requests in, plans a step, computes it, hands out the tokens, again and again.

It alone touches the cache, the scheduler and the rows. Other threads leave requests and wishes to cancel, and take
chunks out. What a step computes is in `step.py`.
"""

from __future__ import annotations

import heapq
import os
import time
from collections import deque
from threading import Condition, Thread, current_thread
from typing import TYPE_CHECKING

from ..errors import EngineClosed, GenerationError, QueueFull, RequestTimeout
from ..generation.results import StreamChunk
from ..reference.cache import KVCache
from .engine_config import EngineConfig
from .metrics import EngineMetrics
from .pages import PagePool
from .scheduler import Plan, Scheduler
from .step import Stepper, StepRecord, part_of, ticket_of
from .tickets import Outbox, RequestState, Ticket, cancelled, wake_all

if TYPE_CHECKING:
    from ..api import Model


class Worker:
    """The thread and what it works on. `Engine` is its face."""

    def __init__(self, model: Model, config: EngineConfig, cache: KVCache) -> None:
        self.model, self.config, self.cache = model, config, cache
        self.pool = PagePool(cache.pages, cache.page_size, config.prefix_sharing)
        self.metrics = EngineMetrics(self._gauges, model.path.name if model.path is not None else "")
        self.timeline: deque[StepRecord] = deque(maxlen=config.timeline_steps)
        self._scheduler = Scheduler(self.pool, config.max_batch, config.max_batch_tokens, config.priority_wait_s)
        self._stepper = Stepper(model, cache, self.pool, self._scheduler, self.metrics, self._end, self._tell)
        self._process = os.getpid()
        self._changed = Condition()  # guards what follows
        self._arrived: list[Ticket] = []
        self._in_queue = 0  # requests that have not begun
        self._alive: dict[int, Ticket] = {}
        self._thread: Thread | None = None
        self._closing: str | None = None  # why
        self._draining = False
        # The rest only its thread touches, but for the left end of the first.
        self._to_cancel: deque[Ticket] = deque()
        self._deadlines: list[tuple[float, int]] = []  # (when, whose): a ticket that ended is not kept for its time
        self._news: list[tuple[Outbox, StreamChunk | None]] = []

    # -- called by other threads ---------------------------------------------------------------------------------------

    def submit(self, ticket: Ticket) -> None:
        """Queue it. Raises QueueFull, EngineClosed."""
        self.check_process()
        with self._changed:
            self._check_open()
            if self._in_queue >= self.config.max_queue:
                self.metrics.add("requests_refused")
                running = len(self._alive) - self._in_queue
                raise QueueFull(
                    f"the engine's queue is full: {self._in_queue} requests wait and {running} run; try again later, "
                    f"or raise max_queue, {self.config.max_queue}"
                )
            self._in_queue += 1
            self._alive[ticket.number] = ticket
            self._arrived.append(ticket)
            ticket.submitted = True
            if self._thread is None:
                self._thread = Thread(target=self._run, name="bitnet_ref engine", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def cancel(self, ticket: Ticket) -> None:
        """Takes no lock: it may be called while an object is being destroyed, wherever that is. The thread looks here
        before each step; and while it sleeps there is nothing to cancel."""
        self._to_cancel.append(ticket)

    def close(self, drain: bool, why: str = "the engine was closed") -> None:
        """Take no more requests; finish those there are, or end them. Returns when the thread is gone."""
        if self._process != os.getpid():
            return  # the thread is the other process's
        with self._changed:
            self._closing, self._draining = self._closing or why, drain
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not current_thread():
            thread.join()

    @property
    def closed(self) -> bool:
        return self._closing is not None

    def requests(self) -> list[RequestState]:
        """Those that are not finished, in the order of their arrival."""
        now_s = time.perf_counter()
        with self._changed:
            alive = list(self._alive.values())
        return [ticket.state(now_s) for ticket in alive]

    def check_process(self) -> None:
        if self._process != os.getpid():
            raise EngineClosed(
                f"this engine belongs to process {self._process}, and this is process {os.getpid()}; "
                "make an engine after the fork"
            )

    def _check_open(self) -> None:
        if self._closing is not None:
            raise EngineClosed(f"{self._closing}; make another one")

    def _gauges(self) -> dict[str, float]:
        return {
            "num_requests_running": len(self._alive) - self._in_queue,
            "num_requests_waiting": self._in_queue,
            "kv_cache_usage_perc": self.pool.in_use / self.pool.pages,
        }

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_in():
                self._turn()
        except BaseException as error:
            self._closing = f"the engine stopped by a fault of its own: {type(error).__name__}: {error}"
            raise
        finally:
            with self._changed:
                self._closing = self._closing or "the engine was closed"
                alive = list(self._alive.values())
            for ticket in alive:
                self._end(ticket, EngineClosed(f"{self._closing} before request {ticket.number} was finished"), "abort")
            self._hand_out()
            self.pool.forget_kept()

    def _take_in(self) -> bool:
        """Wait for something to do and let new requests in. False: it is time to stop."""
        with self._changed:
            if not (self._scheduler.running or self._scheduler.waiting):
                while not self._alive and self._closing is None:
                    self._changed.wait()
                self._wait_for_company()
            if self._closing is not None and not (self._draining and self._alive):
                return False
            arrived, self._arrived = self._arrived, []
        for ticket in arrived:
            if ticket.ended:  # cancelled in the moment before
                continue
            self._scheduler.add(ticket.jobs[0])
            if ticket.deadline_s is not None:
                heapq.heappush(self._deadlines, (ticket.deadline_s, ticket.number))
        return True

    def _wait_for_company(self) -> None:
        """Dynamic batching: the first request after a pause waits a little, so that more can begin with it."""
        until = time.perf_counter() + self.config.max_wait_s
        while self._closing is None and len(self._arrived) < self.config.max_batch:
            if (left := until - time.perf_counter()) <= 0:
                return
            self._changed.wait(left)

    def _turn(self) -> None:
        """One step: drop what is not wanted any more, plan, compute, hand out."""
        while self._to_cancel:
            ticket = self._to_cancel.popleft()
            self._end(ticket, cancelled(ticket), "abort")
        self._expire()
        plan = self._scheduler.plan()
        if plan.stopped:
            self.metrics.add("num_preemptions", len(plan.stopped))
        if plan.pieces:
            start = time.perf_counter()
            self._begin(plan, start)
            self._stepper.run(plan)
            self._record(plan, start)
        elif jobs := len(self._scheduler.running) + len(self._scheduler.waiting):
            raise RuntimeError(f"there are {jobs} sequences to run, and none of them can")
        self._hand_out()

    def _expire(self) -> None:
        now = time.perf_counter()
        while self._deadlines and (self._deadlines[0][0] < now or self._deadlines[0][1] not in self._alive):
            _, number = heapq.heappop(self._deadlines)
            if (ticket := self._alive.get(number)) is not None:
                done = f"{ticket.stats.generated_tokens} tokens were generated"
                error = RequestTimeout(f"request {number} was not finished within {ticket.timeout_s} s; {done}")
                self._end(ticket, error, "timeout")

    def _begin(self, plan: Plan, now: float) -> None:
        """Note the first step of each request."""
        for piece in plan.pieces:
            ticket = ticket_of(piece.job)
            if ticket.began_s is None:
                ticket.began_s = now
                with self._changed:
                    self._in_queue -= 1
                self.metrics.add("prompt_tokens", ticket.stats.prompt_tokens)
                self.metrics.observe("request_queue_time_seconds", now - ticket.arrival_s)
                ticket.stats.cached_tokens = piece.job.cached

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _end(self, ticket: Ticket, error: GenerationError | None, reason: str) -> None:
        """Free what the request holds, and tell its reader. Harmless when it has ended."""
        if ticket.ended:
            return
        ticket.ended = True
        for job in ticket.jobs:
            self._scheduler.remove(job)
        with self._changed:
            del self._alive[ticket.number]
            self._in_queue -= ticket.began_s is None
        self.metrics.end(reason)
        self.metrics.observe("e2e_request_latency_seconds", time.perf_counter() - ticket.arrival_s)
        if error is not None:
            ticket.outbox.error = error
        self._tell(ticket.outbox, None)

    def _tell(self, outbox: Outbox, chunk: StreamChunk | None) -> None:
        """Something for a reader, which gets it when the step is over; None: that is all."""
        self._news.append((outbox, chunk))

    def _hand_out(self) -> None:
        """Give the readers their chunks and ends, all at once: a reader that wakes takes the interpreter's lock."""
        news, self._news = self._news, []
        for outbox, chunk in news:
            if chunk is None:
                outbox.end(outbox.error)
            else:
                outbox.chunks.put(chunk)
        wake_all([outbox for outbox, _ in news])

    def _record(self, plan: Plan, start: float) -> None:
        seconds, metrics, scheduler = time.perf_counter() - start, self.metrics, self._scheduler
        metrics.observe("engine_step_seconds", seconds)
        metrics.add("engine_steps")
        metrics.add("generation_tokens", sum(piece.ends for piece in plan.pieces))
        metrics.counters["prefix_cache_queries"] = scheduler.asked_tokens
        metrics.counters["prefix_cache_hits"] = scheduler.cached_tokens
        if self.config.timeline_steps:
            parts = tuple(part_of(piece) for piece in plan.pieces)
            self.timeline.append(StepRecord(metrics.counters["engine_steps"], start, seconds, parts, self._in_queue))
