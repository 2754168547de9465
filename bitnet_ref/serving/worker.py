"""The engine's thread: it repeatedly takes in requests, plans a step, computes it and delivers the tokens.

Only this thread uses the cache, the scheduler and the rows. Other threads add requests and cancellations, and read
chunks. `step.py` computes a step.
"""

from __future__ import annotations

import heapq
import os
import time
from collections import deque
from threading import Condition, Thread, current_thread

from ..backends.loaded import LoadedModel
from ..backends.paged_cache import PagedKVCache
from ..errors import EngineClosed, GenerationError, QueueFull, RequestCancelled, RequestTimeout
from ..notebook.figures import StepRecord
from ..notebook.widgets.live import RequestProgress
from .engine_config import EngineConfig
from .metrics import EngineMetrics
from .pages import PagePool
from .scheduler import Scheduler, StepPlan
from .step import Stepper, part_of
from .tickets import Delivery, Ticket, check_process, wake_readers


class Worker:
    """The thread and its state, behind `Engine`."""

    def __init__(self, model: LoadedModel, config: EngineConfig, cache: PagedKVCache) -> None:
        self.model, self.config, self.cache = model, config, cache
        self.pool = PagePool(cache.pages, cache.page_size, config.prefix_sharing)
        self.metrics = EngineMetrics(self._gauges, model.path.name if model.path is not None else "")
        self.timeline: deque[StepRecord] = deque(maxlen=config.timeline_steps)
        self._scheduler = Scheduler(self.pool, config.max_batch, config.max_batch_tokens, config.priority_wait_s)
        self.process = os.getpid()
        self._changed = Condition()  # guards the following
        self._arrived: list[Ticket] = []
        self._in_queue = 0  # requests that have not started
        self._alive: dict[int, Ticket] = {}
        self._thread: Thread | None = None
        self._closing: str | None = None  # the reason
        self._draining = False
        # Used by the thread only, except that others append to the first.
        self._to_cancel: deque[Ticket] = deque()
        self._deadlines: list[tuple[float, int]] = []  # (time, number of the request)
        self._deliveries: list[Delivery] = []
        self._stepper = Stepper(model, cache, self.pool, self._scheduler, self.metrics, self._end, self._deliveries)

    def submit(self, ticket: Ticket) -> None:
        """Queue it. Raises QueueFull, EngineClosed."""
        check_process(self.process)
        with self._changed:
            if self._closing is not None:
                raise EngineClosed(f"{self._closing}; make another one")
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
        """Takes no lock, because a destructor may call it anywhere. The thread reads the list before each step; while
        it sleeps there is nothing to cancel."""
        self._to_cancel.append(ticket)

    def close(self, drain: bool) -> None:
        """Refuse new requests; finish the present ones, or end them. Returns when the thread has ended."""
        if self.process != os.getpid():
            return  # the thread is in another process
        with self._changed:
            self._closing, self._draining = self._closing or "the engine was closed", drain
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not current_thread():
            thread.join()

    @property
    def closed(self) -> bool:
        return self._closing is not None

    def requests(self) -> list[RequestProgress]:
        """The unfinished requests, in the order of their arrival."""
        now_s = time.perf_counter()
        with self._changed:
            alive = list(self._alive.values())
        return [ticket.state(now_s) for ticket in alive]

    def _gauges(self) -> dict[str, float]:
        return {
            "num_requests_running": len(self._alive) - self._in_queue,
            "num_requests_waiting": self._in_queue,
            "kv_cache_usage_perc": self.pool.in_use / self.pool.pages,
        }

    def _run(self) -> None:
        try:
            while self._admit_arrivals():
                self._run_step()
        except BaseException as error:
            self._closing = f"the engine stopped by a fault of its own: {type(error).__name__}: {error}"
            raise
        finally:
            with self._changed:
                self._closing = self._closing or "the engine was closed"
                alive = list(self._alive.values())
            for ticket in alive:
                self._end(ticket, EngineClosed(f"{self._closing} before request {ticket.number} was finished"), "abort")
            self._deliver()
            self.pool.clear_idle()

    def _admit_arrivals(self) -> bool:
        """Wait for work and pass new requests to the scheduler. False: the thread should end."""
        with self._changed:
            if not (self._scheduler.running or self._scheduler.waiting):
                while not self._alive and self._closing is None:
                    self._changed.wait()
                self._wait_for_more()
            if self._closing is not None and not (self._draining and self._alive):
                return False
            arrived, self._arrived = self._arrived, []
        for ticket in arrived:
            if ticket.ended:  # cancelled already
                continue
            self._scheduler.add(ticket.jobs[0])
            if ticket.deadline_s is not None:
                heapq.heappush(self._deadlines, (ticket.deadline_s, ticket.number))
        return True

    def _wait_for_more(self) -> None:
        """Dynamic batching: the first request after a pause waits a little for others to start with it."""
        until = time.perf_counter() + self.config.max_wait_s
        while self._closing is None and len(self._arrived) < self.config.max_batch:
            if (left := until - time.perf_counter()) <= 0:
                return
            self._changed.wait(left)

    def _run_step(self) -> None:
        while self._to_cancel:
            ticket = self._to_cancel.popleft()
            message = f"request {ticket.number} was cancelled after {ticket.stats.generated_tokens} tokens"
            self._end(ticket, RequestCancelled(message), "abort")
        self._expire()
        plan = self._scheduler.plan()
        self.metrics.add("num_preemptions", len(plan.stopped))
        if plan.pieces:
            start = time.perf_counter()
            self._note_starts(plan, start)
            self._stepper.run(plan)
            self._record(plan, start)
        elif jobs := len(self._scheduler.running) + len(self._scheduler.waiting):
            raise RuntimeError(f"none of {jobs} sequences can run")
        self._deliver()

    def _expire(self) -> None:
        now = time.perf_counter()
        while self._deadlines and (self._deadlines[0][0] < now or self._deadlines[0][1] not in self._alive):
            _, number = heapq.heappop(self._deadlines)
            if (ticket := self._alive.get(number)) is not None:
                error = RequestTimeout(
                    f"request {number} was not finished within {ticket.timeout_s} s; "
                    f"{ticket.stats.generated_tokens} tokens were generated"
                )
                self._end(ticket, error, "timeout")

    def _note_starts(self, plan: StepPlan, now: float) -> None:
        for piece in plan.pieces:
            ticket: Ticket = piece.job.ticket
            if ticket.start_s is None:
                ticket.start_s = now
                with self._changed:
                    self._in_queue -= 1
                self.metrics.add("prompt_tokens", ticket.stats.prompt_tokens)
                self.metrics.observe("request_queue_time_seconds", now - ticket.arrival_s)
                ticket.stats.cached_tokens = piece.job.cached

    def _end(self, ticket: Ticket, error: GenerationError | None, reason: str) -> None:
        """Free what the request holds and tell its reader. No effect on one that has ended."""
        if ticket.ended:
            return
        ticket.ended = True
        for job in ticket.jobs:
            self._scheduler.remove(job)
        with self._changed:
            del self._alive[ticket.number]
            self._in_queue -= ticket.start_s is None
        self.metrics.end(reason)
        self.metrics.observe("e2e_request_latency_seconds", time.perf_counter() - ticket.arrival_s)
        ticket.outbox.error = error
        self._deliveries.append((ticket.outbox, None))

    def _deliver(self) -> None:
        """Give all readers their chunks at once, because each reader that wakes takes the interpreter's lock."""
        deliveries = self._deliveries.copy()
        self._deliveries.clear()
        for outbox, chunk in deliveries:
            outbox.chunks.put(chunk)
            if chunk is None:
                outbox.done.set()
        wake_readers([outbox for outbox, _ in deliveries])

    def _record(self, plan: StepPlan, start: float) -> None:
        seconds, metrics, scheduler = time.perf_counter() - start, self.metrics, self._scheduler
        metrics.observe("engine_step_seconds", seconds)
        metrics.add("engine_steps")
        metrics.add("generation_tokens", sum(piece.ends for piece in plan.pieces))
        metrics.counters["prefix_cache_queries"] = scheduler.asked_tokens
        metrics.counters["prefix_cache_hits"] = scheduler.cached_tokens
        if self.config.timeline_steps:
            parts = tuple(part_of(piece) for piece in plan.pieces)
            self.timeline.append(StepRecord(metrics.counters["engine_steps"], start, seconds, parts, self._in_queue))
