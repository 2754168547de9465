"""The engine's thread: it repeatedly takes in requests, plans a step, computes it and delivers the tokens.

Only this thread uses the cache, the scheduler and the rows. Other threads add requests, cancellations and news of their
readers, ring the bell, and read chunks. `step.py` computes a step.
"""

from __future__ import annotations

import heapq
import logging
import math
import os
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import RLock, Thread, current_thread

import numpy as np

from ..backends.loaded import LoadedModel
from ..errors import (
    DeviceError,
    EngineClosed,
    GenerationError,
    QueueFull,
    RequestCancelled,
    RequestTimeout,
    count_of,
    describe_error,
)
from ..generation.stepper import PlannedPiece
from .cache_memory import new_cache, new_pool
from .engine_config import EngineConfig
from .metrics import EngineMetrics
from .records import RequestProgress, StepPart, StepRecord
from .scheduler import Job, PagedPlan, Scheduler
from .step import PagedStepper, part_of, wrap
from .tickets import Delivery, RequestStory, Ticket, wake_readers

ENDED_STORIES = 64
STALE_DEADLINES = 1024  # of requests that have ended; more are dropped at once

log = logging.getLogger(__name__)


class Worker:
    """The thread and its state, behind `Engine`."""

    def __init__(self, model: LoadedModel, config: EngineConfig) -> None:
        self.model, self.config, self.cache = model, config, (cache := new_cache(model, config))
        self.pool = new_pool(cache, config)
        name = model.backend.name
        tried = config.fallback.index(name) + 1 if name in config.fallback else 0
        self._fallback = list(config.fallback[tried:])  # backends that have not been tried
        self.metrics = EngineMetrics(self._gauges, model.path.name if model.path is not None else "")
        self.timeline: deque[StepRecord] = deque(maxlen=config.timeline_steps)
        self._ended: deque[RequestStory] = deque(maxlen=ENDED_STORIES)
        self._scheduler = self._new_scheduler()
        self.process = os.getpid()
        self._lock = RLock()  # guards the following
        self._arrived: list[Ticket] = []
        self._in_queue = self._rows_in_queue = 0  # requests that have not started, and their rows
        self._alive: dict[int, Ticket] = {}
        self._thread: Thread | None = None
        self._closing: str | None = None  # the reason
        self._draining = False
        # Used by the thread only, except that others put into the first three.
        self._bell: SimpleQueue[None] = SimpleQueue()  # rings when there is something to do
        self._has_rung = np.zeros(1, dtype=np.uint8)  # since the last step
        self._to_cancel: deque[Ticket] = deque()
        self._to_resume: deque[Ticket] = deque()
        self._deadlines: list[tuple[float, int]] = []  # (time, number of the request)
        self._deliveries: list[Delivery] = []
        end, recover = self._end, self._recover
        self._stepper = PagedStepper(
            *(model, cache, self.pool, self._scheduler, self.metrics, end, recover, self._deliveries, self._has_rung)
        )

    def submit(self, ticket: Ticket) -> None:
        """Queue it. Raises QueueFull, EngineClosed."""
        with self._lock:
            if self._closing is not None:
                raise EngineClosed(f"{self._closing}; make another one")
            rows = len(ticket.rows)
            if self._rows_in_queue + rows > self.config.max_queue:
                self.metrics.add("requests_refused")
                running, texts = len(self._alive) - self._in_queue, f", for {self._rows_in_queue} texts,"
                raise QueueFull(
                    f"the engine's queue is full: {self._in_queue} requests"
                    f"{texts if self._rows_in_queue > self._in_queue else ''} wait and {running} run; try again later, "
                    f"or raise max_queue, {self.config.max_queue}"
                )
            if self._thread is None:
                self._thread = Thread(target=self._run, name="bitnet_ref engine", daemon=True)
            if self._thread.ident is None:
                self._thread.start()
            in_queue, rows_in_queue = self._in_queue + 1, self._rows_in_queue + rows
            self._arrived.append(ticket)  # Ctrl-C may interrupt after this call, but not between the next lines
            self._alive[ticket.number] = ticket
            self._in_queue, self._rows_in_queue, ticket.submitted = in_queue, rows_in_queue, True
        self._ring()

    def cancel(self, ticket: Ticket) -> None:
        """End it before the next step. Takes no lock, because a destructor may call it anywhere."""
        self._to_cancel.append(ticket)
        self._ring()

    def resume(self, ticket: Ticket) -> None:
        """Its reader has caught up. Takes no lock."""
        self._to_resume.append(ticket)
        self._ring()

    def _ring(self) -> None:
        self._has_rung[0] = 1
        self._bell.put(None)

    def check_may_wait(self) -> None:
        """Raises GenerationError in the engine's own thread, which computes nothing while it waits."""
        if current_thread() is self._thread:
            raise GenerationError(
                "a function of a request waits for another request of the same engine, in the engine's own thread: "
                "neither would go on; call model.generate there, or wait in another thread"
            )

    def close(self, drain: bool) -> None:
        """Refuse new requests; finish the present ones, or end them. Returns when the thread has ended."""
        if self.process != os.getpid():
            return  # the thread is in another process
        with self._lock:
            self._closing, self._draining = self._closing or "the engine was closed", drain
            thread = self._thread
        self._ring()
        if thread is not None and thread is not current_thread():
            thread.join()

    @property
    def unfinished(self) -> int:
        """How many requests wait, run or are paused."""
        return len(self._alive)

    @property
    def closed(self) -> bool:
        return self._closing is not None

    def requests(self) -> list[RequestProgress]:
        """The unfinished requests, in the order of their arrival."""
        now_s = time.perf_counter()
        with self._lock:
            alive = list(self._alive.values())
        return [ticket.state(now_s) for ticket in alive]

    def stories(self) -> list[RequestStory]:
        """Of the last requests that ended, in that order, then of the unfinished ones in the order of their arrival."""
        with self._lock:
            alive = list(self._alive.values())
        return [*self._ended, *(ticket.story() for ticket in alive if not ticket.ended)]

    def _gauges(self) -> dict[str, float]:
        is_closed, backend = self.model.is_closed, self.model.backend
        used, free = (None, None) if is_closed else backend.memory()
        busy = None if is_closed else backend.utilization()
        return {
            "num_requests_running": len(self._alive) - self._in_queue - len(self._scheduler.held),
            "num_requests_waiting": self._in_queue,
            "num_requests_paused": len(self._scheduler.held),
            "kv_cache_usage_perc": self.pool.in_use / self.pool.pages,
            "memory_used_bytes": used or math.nan,
            "memory_free_bytes": math.nan if free is None else free,
            "device_utilization": math.nan if busy is None else busy,
        }

    def _run(self) -> None:
        try:
            while True:
                try:
                    if not self._admit_arrivals():
                        break
                    self._run_step()
                except MemoryError as error:
                    self._start_over(error)
        except BaseException as error:
            self._closing = f"the engine stopped by a fault of its own: {describe_error(error)}"
            raise
        finally:
            try:
                self._end_all()
            except MemoryError as error:
                self._start_over(error)
                self._end_all()

    def _end_all(self) -> None:
        """End all requests, since the engine closes."""
        with self._lock:
            self._closing = self._closing or "the engine was closed"
            alive = list(self._alive.values())
        for ticket in alive:
            self._end(ticket, EngineClosed(f"{self._closing} before request {ticket.number} was finished"), "abort")
        self._deliver()
        self.pool.clear_idle()

    def _new_scheduler(self) -> Scheduler:
        config = self.config
        return Scheduler(self.pool, self.cache.slots, config.max_batch_tokens, config.priority_wait_s)

    def _start_over(self, error: MemoryError) -> None:
        """Go on after a lack of memory outside of a pass, which may have left anything half done.

        The requests that have started or have chunks on their way fail, and the others wait in a new scheduler.
        """
        log.warning("the engine ran out of memory and starts over: %s", describe_error(error))
        asked, cached = self._scheduler.asked_tokens, self._scheduler.cached_tokens
        self.pool = new_pool(self.cache, self.config)
        self._scheduler = self._new_scheduler()
        self._scheduler.asked_tokens, self._scheduler.cached_tokens = asked, cached
        self._stepper.pool, self._stepper.scheduler = self.pool, self._scheduler
        with self._lock:
            alive, self._arrived = list(self._alive.values()), []
            undelivered = [ticket for ticket, _ in self._deliveries]
            fresh = [ticket for ticket in alive if ticket.start_s is None and not ticket.ended]
            self._alive = {ticket.number: ticket for ticket in fresh}
            self._in_queue, self._rows_in_queue = len(fresh), sum(len(ticket.rows) for ticket in fresh)
        self._deliveries.clear()
        for ticket in fresh:
            ticket.rows[0].forget()
            self._admit(ticket)
        for ticket in dict.fromkeys((*alive, *undelivered)):
            if ticket.number not in self._alive:
                if not ticket.ended:
                    self.metrics.end("error")
                message = f"request {ticket.number} ended since the engine ran out of memory"
                ticket.ended, ticket.outbox.error = True, ticket.outbox.error or wrap(message, error)
                self._deliveries.append((ticket, None))
        self._deliver()

    def _admit_arrivals(self) -> bool:
        """Wait for work and pass new requests to the scheduler. False: the thread should end."""
        self._silence_bell()
        if not (self._scheduler.running or self._scheduler.waiting):
            self._sleep()
        with self._lock:
            if self._closing is not None and not (self._draining and self._alive):
                return False
            arrived, self._arrived = self._arrived, []
        while self._to_resume:
            self._release(self._to_resume.popleft())
        if self._draining:
            for job in list(self._scheduler.held):
                self._release(job.ticket)
        for ticket in arrived:
            if ticket.submitted and not ticket.ended:  # neither interrupted nor cancelled
                self._admit(ticket)
        return True

    def _admit(self, ticket: Ticket) -> None:
        self._scheduler.add(ticket.rows[0])
        if ticket.deadline_s is not None:
            heapq.heappush(self._deadlines, (ticket.deadline_s, ticket.number))

    def _sleep(self) -> None:
        """Wait until a request arrives, goes on, is cancelled or late, or the engine closes."""
        while not (self._arrived or self._to_cancel or self._to_resume or self._closing is not None):
            self._drop_stale_deadlines()
            left = self._deadlines[0][0] - time.perf_counter() if self._deadlines else None
            if left is not None and left <= 0:
                return
            self._wait(left)
        # Dynamic batching: the first request after a pause waits a little for others to start with it.
        until = time.perf_counter() + self.config.max_wait_s
        while self._closing is None and 0 < len(self._arrived) < self.config.max_batch and not self._to_resume:
            if (left := until - time.perf_counter()) <= 0:
                return
            self._wait(left)

    def _wait(self, timeout_s: float | None) -> None:
        with suppress(Empty):
            self._bell.get(timeout=timeout_s)
        self._silence_bell()

    def _silence_bell(self) -> None:
        self._has_rung[0] = 0
        with suppress(Empty):
            while True:
                self._bell.get_nowait()

    def _hold(self, ticket: Ticket) -> None:
        """Let it compute nothing until its reader catches up."""
        self._scheduler.hold(ticket.rows[0])
        ticket.held = True
        if ticket.has_caught_up:  # just now, so that the reader may not have seen that it is held
            self._release(ticket)

    def _release(self, ticket: Ticket) -> None:
        ticket.held = False
        self._scheduler.resume(ticket.rows[0])

    def _run_step(self) -> None:
        while self._to_cancel:
            ticket = self._to_cancel.popleft()
            message = f"request {ticket.number} was cancelled after {count_of(ticket.stats.generated_tokens, 'token')}"
            self._end(ticket, RequestCancelled(message), "abort")
        self._expire()
        begin, steps = time.perf_counter(), 0
        plan = self._scheduler.plan()
        if plan.pieces:
            start = time.perf_counter()
            self._note_starts(plan, start)
            computed = list(self._stepper.run(plan))
            steps = len(computed)
            self._record(computed, start)
        elif jobs := len(self._scheduler.running) + len(self._scheduler.waiting):
            raise RuntimeError(f"none of {jobs} sequences can run")
        self._deliver()
        if steps:
            # From the time of a whole step: the pass, and Python before and after it.
            self._stepper.learn_drafts(plan, self._scheduler.times, (time.perf_counter() - begin) / steps)

    def _drop_stale_deadlines(self) -> None:
        """Of requests that have ended: those on top, and all of them when they are many."""
        if len(self._deadlines) > 2 * len(self._alive) + STALE_DEADLINES:
            self._deadlines = [each for each in self._deadlines if each[1] in self._alive]
            heapq.heapify(self._deadlines)
        while self._deadlines and self._deadlines[0][1] not in self._alive:
            heapq.heappop(self._deadlines)

    def _expire(self) -> None:
        now = time.perf_counter()
        self._drop_stale_deadlines()
        while self._deadlines and self._deadlines[0][0] < now:
            _, number = heapq.heappop(self._deadlines)
            if (ticket := self._alive.get(number)) is not None:
                error = RequestTimeout(
                    f"request {number} was not finished within {ticket.timeout_s} s; "
                    f"it had {count_of(ticket.stats.generated_tokens, 'new token')}"
                )
                self._end(ticket, error, "timeout")

    def _note_starts(self, plan: PagedPlan, now: float) -> None:
        for piece in plan.pieces:
            ticket: Ticket = piece.row.ticket
            if ticket.start_s is None:
                ticket.start_s = now
                with self._lock:
                    self._in_queue -= 1
                    self._rows_in_queue -= len(ticket.rows)
                self.metrics.add("prompt_tokens", ticket.stats.prompt_tokens)
                self.metrics.observe("request_queue_time_seconds", now - ticket.arrival_s)
                ticket.stats.cached_tokens = piece.row.cached

    def _end(self, ticket: Ticket, error: GenerationError | None, reason: str) -> None:
        """Free what the request holds and tell its reader. No effect on one that has ended."""
        if ticket.ended:
            return
        for row in ticket.rows:
            self._scheduler.remove(row)
        ticket.outbox.error = error
        self._deliveries.append((ticket, None))
        ticket.ended = True
        self.metrics.end(reason)
        now, stats, first_s = time.perf_counter(), ticket.stats, None
        seconds = now - ticket.arrival_s
        self._ended.append(ticket.story(reason, now))
        self.metrics.add("screened_tokens", stats.screened_tokens)
        self.metrics.observe("e2e_request_latency_seconds", seconds)
        if ticket.first_token_s is not None and ticket.start_s is not None:
            first_s = round(ticket.first_token_s - ticket.arrival_s, 4)
            self.metrics.observe("request_prefill_time_seconds", ticket.first_token_s - ticket.start_s)
            self.metrics.observe("request_decode_time_seconds", now - ticket.first_token_s)
            self.metrics.observe("request_prompt_tokens", stats.prompt_tokens)
            self.metrics.observe("request_generation_tokens", stats.generated_tokens)
        log.info(
            "request %d ended (%s) after %.3f s: %d prompt tokens, %d of them cached, %d new; first token after %s s",
            *(ticket.number, reason, seconds, stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens),
            first_s,
        )
        with self._lock:
            del self._alive[ticket.number]
            if ticket.start_s is None:
                self._in_queue -= 1
                self._rows_in_queue -= len(ticket.rows)

    def _recover(self, error: DeviceError) -> bool:
        """After a failure of the device, go on with a new backend: of the same kind if that has computed a step, else
        the next of `fallback`. False: there is none.

        All sequences compute their tokens again. On the same kind of backend that gives the same bits; on another one,
        requests that have tokens already fail.
        """
        kinds: list[str | None] = [None] if self._stepper.is_sound else []
        while kinds or self._fallback:
            kind = kinds.pop() if kinds else self._fallback.pop(0)
            try:
                model = self.model.renew(kind)
                cache = new_cache(model, self.config)
            except Exception as problem:  # the files may be gone too
                log.warning("backend %s cannot be opened: %s", kind or self.model.backend.name, problem)
                continue
            break
        else:
            return False
        is_same = model.backend.summary == self.model.backend.summary
        log.warning("the device failed (%s): backend %s goes on", error, model.backend.name)
        self.metrics.add("backend_restarts")
        self.model, self.cache = model, cache
        self.pool = new_pool(cache, self.config)
        self._scheduler.start_again(self.pool, cache.slots)
        stepper = self._stepper
        stepper.model, stepper.cache, stepper.pool, stepper.is_sound = model, cache, self.pool, False
        with self._lock:
            alive = list(self._alive.values())
        for ticket in alive:
            ticket.stats.backend = model.backend.name
            has_room = ticket.request.capacity <= cache.capacity
            if not has_room or not (is_same or ticket.rows[0].new_tokens == 0):
                why = "has no room for it" if not has_room else "would go on with other rounding"
                message = f"request {ticket.number} ended when the device failed: backend {model.backend.name} {why}"
                self._end(ticket, wrap(message, error), "error")
        return True

    def _deliver(self) -> None:
        """Give all readers their chunks at once, because each reader that wakes takes the interpreter's lock."""
        for ticket, chunk in self._deliveries:
            ticket.outbox.chunks.put(chunk)
            if chunk is None:
                ticket.outbox.done.set()
            elif ticket.room < 1 and not (ticket.ended or self._draining):
                self._hold(ticket)
        wake_readers([ticket.outbox for ticket, _ in self._deliveries])
        self._deliveries.clear()

    def _record(self, steps: Sequence[list[PlannedPiece[Job]]], start: float) -> None:
        """Note the steps, each by its pieces, that have been computed since `start`."""
        seconds, metrics, scheduler = (time.perf_counter() - start) / len(steps), self.metrics, self._scheduler
        scheduler.step_s, parts = seconds, tuple[StepPart, ...]()
        metrics.counters["prefix_cache_queries"] = scheduler.asked_tokens
        metrics.counters["prefix_cache_hits"] = scheduler.cached_tokens
        metrics.counters["num_preemptions"] = scheduler.stops
        for index, pieces in enumerate(steps):
            metrics.observe("engine_step_seconds", seconds)
            metrics.add("engine_steps")
            metrics.add("generation_tokens", sum(piece.ends for piece in pieces))
            number = metrics.counters["engine_steps"]
            if log.isEnabledFor(logging.DEBUG):
                tokens = [(piece.row.ticket.number, piece.tokens) for piece in pieces]
                log.debug("step %d, %.4f s: requests and tokens %s; %d wait", number, seconds, tokens, self._in_queue)
            if self.config.timeline_steps:
                if len(parts) != len(pieces):  # of steps in a row, each has the pieces of the one before, or fewer
                    parts = tuple(part_of(piece) for piece in pieces)
                self.timeline.append(StepRecord(number, start + index * seconds, seconds, parts, self._in_queue))
