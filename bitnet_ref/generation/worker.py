"""The engine's thread: takes requests in, plans a step, computes it, hands out the tokens, again and again.

It alone touches the cache, the scheduler and the rows. Other threads leave requests and wishes to cancel, and take
chunks out. A failure of the model fails the requests of that step; one in a request's own functions fails that request.
"""

from __future__ import annotations

import heapq
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Condition, Thread, current_thread
from typing import TYPE_CHECKING, NamedTuple

from numpy.typing import NDArray

from ..backends import Backend, HeadCandidates, HeadNeed
from ..errors import EngineClosed, GenerationError, QueueFull, RequestTimeout
from ..kv_cache import NO_PAGE, KVCache, TokenBatch, TokenIds
from .engine_config import EngineConfig
from .metrics import EngineMetrics
from .pages import PagePool
from .results import StreamChunk
from .scheduler import Job, Piece, Plan, Scheduler
from .sequence import Continuation
from .tickets import Outbox, RequestState, Ticket, cancelled, wake_all

if TYPE_CHECKING:
    from ..api import Model


class Part(NamedTuple):
    """What one request did in a step: its number, its slot, "prefill" or "decode", and how many tokens."""

    request_id: int
    slot: int
    kind: str
    tokens: int


@dataclass(frozen=True)
class StepRecord:
    """One step of the engine. `start_s` on the clock of `time.perf_counter`."""

    number: int
    start_s: float
    seconds: float
    parts: tuple[Part, ...]
    waiting: int  # requests that had no place


class Worker:
    """The thread and what it works on. `Engine` is its face."""

    def __init__(self, model: Model, config: EngineConfig, cache: KVCache) -> None:
        self.model, self.config, self.cache = model, config, cache
        self.pool = PagePool(cache.pages, cache.page_size, config.prefix_sharing)
        self.metrics = EngineMetrics(self._gauges, model.path.name if model.path is not None else "")
        self.timeline: deque[StepRecord] = deque(maxlen=config.timeline_steps)
        self._scheduler = Scheduler(self.pool, config.max_batch, config.max_batch_tokens, config.priority_wait_s)
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
            self._step(plan)
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
            ticket = _ticket(piece.job)
            if ticket.began_s is None:
                ticket.began_s = now
                with self._changed:
                    self._in_queue -= 1
                self.metrics.add("prompt_tokens", ticket.stats.prompt_tokens)
                self.metrics.observe("request_queue_time_seconds", now - ticket.arrival_s)
                ticket.stats.cached_tokens = piece.job.cached

    def _step(self, plan: Plan) -> None:
        asked = {piece.job: self._ask(piece.job) for piece in plan.pieces if piece.ends}
        pieces = [piece for piece in plan.pieces if not _ticket(piece.job).ended]
        needs = [need for piece in pieces if piece.ends and (need := asked[piece.job]) is not None]
        if not pieces:
            return
        try:
            hidden, found = self._forward(plan.copies, pieces, needs)
        except Exception as error:
            self._fail(pieces, error)
            return
        for job, _, start, count, _ in pieces:
            job.row.computed = start + count
            assert job.lease is not None
            if start // self.pool.page_size != (start + count) // self.pool.page_size:  # a page is full
                job.lease.commit(job.row.context, job.row.computed)
        ends = [piece.job for piece in pieces if piece.ends]
        for job, x, candidates in zip(ends, hidden, found, strict=True):
            self._accept(job, x, candidates)

    def _ask(self, job: Job) -> HeadNeed | None:
        """What the row needs of the head. None, and the request has failed, where its own rules do."""
        try:
            return _row(job).needs()
        except Exception as error:
            self._end(_ticket(job), _own_fault(_ticket(job), error), "error")
            return None

    def _forward(
        self,
        copies: Sequence[tuple[int, int]],
        pieces: Sequence[Piece],
        needs: Sequence[HeadNeed],
    ) -> tuple[NDArray, list[HeadCandidates]]:
        """The pieces through the model; the last tokens of those that end, through the head."""
        cache = self.cache
        cache.copy_pages([source for source, _ in copies], [target for _, target in copies])
        parts: list[tuple[int, int, TokenIds]] = []
        for job, slot, start, count, _ in pieces:
            lease = job.lease
            assert lease is not None
            if lease.changed:
                cache.page_table[slot, : len(lease.pages)] = lease.pages
                cache.page_table[slot, len(lease.pages) :] = NO_PAGE
                lease.changed = False
            parts.append((slot, start, job.row.context[start : start + count]))
        wanted = [index for index, piece in enumerate(pieces) if piece.ends]
        return self.model.candidates(TokenBatch.of(parts, logits_of_last=wanted), cache, needs)

    def _accept(self, job: Job, x: NDArray, candidates: HeadCandidates) -> None:
        """One more token of a job, if its request is still wanted."""
        ticket, row = _ticket(job), _row(job)
        if ticket.ended:  # by a fault of another of its n rows
            return
        if not row.chunks and job is ticket.jobs[0]:
            self._fork(ticket)
        try:
            chunk = row.accept(x, candidates, ticket.stats)
        except Exception as error:
            self._end(ticket, _own_fault(ticket, error), "error")
            return
        now = time.perf_counter()
        if ticket.first_token_s is None:
            assert ticket.began_s is not None
            ticket.first_token_s = now
            ticket.stats.prefill_s = now - ticket.began_s
            self.metrics.observe("time_to_first_token_seconds", now - ticket.arrival_s)
        elif ticket.streams:
            self.metrics.observe("inter_token_latency_seconds", now - ticket.last_token_s)
        if len(row.chunks) > 1:
            ticket.stats.decode_tokens += 1
        ticket.last_token_s = now
        ticket.stats.decode_s = now - ticket.first_token_s
        if ticket.streams:
            self._news.append((ticket.outbox, chunk))
        if row.computed == 0:  # tokens were dropped, by its `overflow`
            self._scheduler.restart(job)
        if chunk.finish_reason is not None:
            self._scheduler.remove(job)
            if all(each.finished for each in ticket.rows):
                self._end(ticket, None, chunk.finish_reason)

    def _fork(self, ticket: Ticket) -> None:
        """The prompt is computed: the other n - 1 rows go on from the same pages. They compute its last token again,
        for its logits."""
        lease = ticket.jobs[0].lease
        assert lease is not None
        for job in ticket.jobs[1:]:
            job.lease = lease.fork()
            job.row.computed = job.row.context_tokens - 1
            self._scheduler.add(job)

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
        self._news.append((ticket.outbox, None))

    def _fail(self, pieces: Sequence[Piece], error: Exception) -> None:
        """The model failed in a step."""
        self.metrics.add("engine_faults")
        tickets = {_ticket(piece.job): None for piece in pieces}
        where = _failed_op(error)
        for ticket in tickets:
            message = (
                f"request {ticket.number} failed with the {len(tickets)} requests of its step, after "
                f"{ticket.stats.generated_tokens} tokens{where}: {type(error).__name__}: {error}"
            )
            failure = GenerationError(message)
            failure.__cause__ = error
            self._end(ticket, failure, "error")

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
            parts = tuple(_part(piece) for piece in plan.pieces)
            self.timeline.append(StepRecord(metrics.counters["engine_steps"], start, seconds, parts, self._in_queue))


def _part(piece: Piece) -> Part:
    decodes = piece.tokens == 1 and len(_row(piece.job).chunks) > 1  # the newest is of this step
    return Part(_ticket(piece.job).number, piece.slot, "decode" if decodes else "prefill", piece.tokens)


def _ticket(job: Job) -> Ticket:
    assert isinstance(job.owner, Ticket)
    return job.owner


def _row(job: Job) -> Continuation:
    assert isinstance(job.row, Continuation)
    return job.row


def _own_fault(ticket: Ticket, error: Exception) -> GenerationError:
    """What the request's own functions, rules or grammar raised."""
    failure = GenerationError(
        f"request {ticket.number} failed in choosing token {ticket.stats.generated_tokens + 1}, by its own "
        f"parameters: {type(error).__name__}: {error}"
    )
    failure.__cause__ = error
    return failure


def _failed_op(error: BaseException) -> str:
    """ " in attention", by the backend's method that the exception left last."""
    op, traceback = "", error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        if isinstance(frame.f_locals.get("self", frame.f_locals.get("be")), Backend):
            op = f", in {frame.f_code.co_name}"
        traceback = traceback.tb_next
    return op
