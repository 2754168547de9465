"""One step of the engine: the planned pieces through the model, then a token for each request that waits for one.

A failure of the model fails the requests of that step; one in a request's own functions fails that request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from numpy.typing import NDArray

from ..backends import Backend, HeadCandidates, HeadNeed
from ..errors import GenerationError
from ..generation.results import StreamChunk
from ..generation.sequence import Continuation
from ..reference.cache import NO_PAGE, KVCache, TokenBatch, TokenIds
from .metrics import EngineMetrics
from .pages import PagePool
from .scheduler import Job, Piece, Plan, Scheduler
from .tickets import Outbox, Ticket

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


class Stepper:
    """What steps work on. `end` ends a request, `tell` leaves something for its reader."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        pool: PagePool,
        scheduler: Scheduler,
        metrics: EngineMetrics,
        end: Callable[[Ticket, GenerationError | None, str], None],
        tell: Callable[[Outbox, StreamChunk | None], None],
    ) -> None:
        self._model, self._cache, self._pool = model, cache, pool
        self._scheduler, self._metrics = scheduler, metrics
        self._end, self._tell = end, tell

    def run(self, plan: Plan) -> None:
        """Compute the pieces; a token more for each request that has one at its end."""
        asked = {piece.job: self._ask(piece.job) for piece in plan.pieces if piece.ends}
        pieces = [piece for piece in plan.pieces if not ticket_of(piece.job).ended]
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
            if start // self._pool.page_size != (start + count) // self._pool.page_size:  # a page is full
                job.lease.commit(job.row.context, job.row.computed)
        ends = [piece.job for piece in pieces if piece.ends]
        for job, x, candidates in zip(ends, hidden, found, strict=True):
            self._accept(job, x, candidates)

    def _ask(self, job: Job) -> HeadNeed | None:
        """What the row needs of the head. None, and the request has failed, where its own rules do."""
        try:
            return _row(job).needs()
        except Exception as error:
            self._end(ticket_of(job), _own_fault(ticket_of(job), error), "error")
            return None

    def _forward(
        self,
        copies: Sequence[tuple[int, int]],
        pieces: Sequence[Piece],
        needs: Sequence[HeadNeed],
    ) -> tuple[NDArray, list[HeadCandidates]]:
        """The pieces through the model; the last tokens of those that end, through the head."""
        cache = self._cache
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
        return self._model.candidates(TokenBatch.of(parts, logits_of_last=wanted), cache, needs)

    def _accept(self, job: Job, x: NDArray, candidates: HeadCandidates) -> None:
        """One more token of a job, if its request is still wanted."""
        ticket, row = ticket_of(job), _row(job)
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
            self._metrics.observe("time_to_first_token_seconds", now - ticket.arrival_s)
        elif ticket.streams:
            self._metrics.observe("inter_token_latency_seconds", now - ticket.last_token_s)
        if len(row.chunks) > 1:
            ticket.stats.decode_tokens += 1
        ticket.last_token_s = now
        ticket.stats.decode_s = now - ticket.first_token_s
        if ticket.streams:
            self._tell(ticket.outbox, chunk)
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

    def _fail(self, pieces: Sequence[Piece], error: Exception) -> None:
        """The model failed in a step."""
        self._metrics.add("engine_faults")
        tickets = {ticket_of(piece.job): None for piece in pieces}
        where = _failed_op(error)
        for ticket in tickets:
            message = (
                f"request {ticket.number} failed with the {len(tickets)} requests of its step, after "
                f"{ticket.stats.generated_tokens} tokens{where}: {type(error).__name__}: {error}"
            )
            failure = GenerationError(message)
            failure.__cause__ = error
            self._end(ticket, failure, "error")


def part_of(piece: Piece) -> Part:
    """What the timeline shows of a piece that was computed."""
    decodes = piece.tokens == 1 and len(_row(piece.job).chunks) > 1  # the newest is of this step
    return Part(ticket_of(piece.job).number, piece.slot, "decode" if decodes else "prefill", piece.tokens)


def ticket_of(job: Job) -> Ticket:
    """The request that the job is of."""
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
