"""One step of the engine: run the model on the planned pieces, then choose a token for each row that is ready.

An error of the model ends all requests of the step, unless the engine can go on with another backend. NaN, Inf or a
number too large for the cache's dtype ends only the requests whose tokens have it. Whatever a request's own functions
raise ends that request, SystemExit and KeyboardInterrupt included: Python delivers a real Ctrl-C to the main thread,
never to the engine's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from traceback import walk_tb

from ..backends import Backend
from ..backends.backend import Ids
from ..backends.loaded import LoadedModel
from ..backends.paged_cache import NO_PAGE, PagedKVCache
from ..backends.run import TokenLogits
from ..errors import DeviceError, GenerationError, NumericsError, describe_error
from ..generation.sequence import Piece, run_pieces
from ..notebook.figures import StepPart
from .metrics import EngineMetrics
from .pages import PagePool
from .scheduler import Job, PlannedPiece, Scheduler, StepPlan
from .tickets import Delivery, Ticket


@dataclass
class Stepper:
    """Computes the steps. end: ends a request. deliveries: chunks for readers, to which a step adds its own.

    recover: goes on with another backend after a DeviceError, with all sequences waiting; False if it cannot.
    """

    model: LoadedModel
    cache: PagedKVCache
    pool: PagePool
    scheduler: Scheduler
    metrics: EngineMetrics
    end: Callable[[Ticket, GenerationError | None, str], None]
    recover: Callable[[DeviceError], bool]
    deliveries: list[Delivery]
    is_sound: bool = True  # whether a step has succeeded on this backend, or none has been tried

    def run(self, plan: StepPlan) -> None:
        """Compute the pieces, and one more token for each row whose context is then complete."""
        asked = {piece.job: self._ask(piece.job) for piece in plan.pieces if piece.ends}
        self._compute([piece for piece in plan.pieces if not piece.job.ticket.ended], asked, plan.copies)

    def _compute(
        self,
        pieces: Sequence[PlannedPiece],
        asked: Mapping[Job, tuple[int | None, Ids] | None],
        copies: Sequence[tuple[int, int]],
    ) -> bool:
        """Compute these pieces in one pass. False: all sequences were stopped.

        asked: what each job needs of the logits. copies: pages to copy first, (source, target).
        """
        if not pieces:
            return True
        try:
            logits = self._forward(copies, pieces, asked)
        except BaseException as error:
            if isinstance(error, DeviceError) and self.recover(error):
                return False
            of_ticket: dict[Ticket, list[PlannedPiece]] = {}
            for piece in pieces:
                of_ticket.setdefault(piece.job.ticket, []).append(piece)
            if isinstance(error, NumericsError) and len(of_ticket) > 1:  # of the tokens of some request: of which?
                return all(self._compute(own, asked, ()) for own in of_ticket.values())
            self._fail(list(of_ticket), error)
            return True
        self.is_sound = True
        for job, _, start, count, _ in pieces:
            job.row.computed = start + count
            assert job.lease is not None
            if start // self.pool.page_size != (start + count) // self.pool.page_size:  # a page is full
                job.lease.commit(job.row.context, job.row.computed)
        ends = [piece.job for piece in pieces if piece.ends]
        for job, token_logits in zip(ends, logits, strict=True):
            self._accept(job, token_logits)
        return True

    def _ask(self, job: Job) -> tuple[int | None, Ids] | None:
        """The logits that the row needs; None when its own rules fail, which ends the request."""
        try:
            return job.row.needs()
        except BaseException as error:
            self.end(job.ticket, _own_error(job.ticket, error), "error")
            return None

    def _forward(
        self,
        copies: Sequence[tuple[int, int]],
        pieces: Sequence[PlannedPiece],
        asked: Mapping[Job, tuple[int | None, Ids] | None],
    ) -> list[TokenLogits]:
        """Run the model on the pieces, with logits at the last tokens of those that end a context."""
        cache = self.cache
        cache.copy_pages([source for source, _ in copies], [target for _, target in copies])
        parts: list[Piece] = []
        for job, slot, start, count, ends in pieces:
            lease = job.lease
            assert lease is not None
            if lease.changed:
                cache.page_table[slot, : len(lease.pages)] = lease.pages
                cache.page_table[slot, len(lease.pages) :] = NO_PAGE
                lease.changed = False
            need = asked[job] if ends else None
            parts.append(Piece(job.row, slot, start, job.row.context[start : start + count], need))
        return run_pieces(self.model, cache, parts)

    def _accept(self, job: Job, logits: TokenLogits) -> None:
        ticket: Ticket = job.ticket
        row = job.row
        if ticket.ended:  # by an error of another of its n rows
            return
        if not row.chunks and job is ticket.jobs[0]:
            self._fork(ticket)
        try:
            chunk = row.accept(logits, ticket.stats)
        except BaseException as error:
            self.end(ticket, _own_error(ticket, error), "error")
            return
        now = time.perf_counter()
        if ticket.first_token_s is None:
            assert ticket.start_s is not None
            ticket.first_token_s = now
            ticket.stats.prefill_s = now - ticket.start_s
            self.metrics.observe("time_to_first_token_seconds", now - ticket.arrival_s)
        elif ticket.streams:
            self.metrics.observe("inter_token_latency_seconds", now - ticket.last_token_s)
        if len(row.chunks) > 1:
            ticket.stats.decode_tokens += 1
        ticket.last_token_s = now
        ticket.stats.decode_s = now - ticket.first_token_s
        if ticket.streams:
            self.deliveries.append((ticket, chunk))
        if row.computed == 0:  # `overflow` dropped tokens
            self.scheduler.restart(job)
        if chunk.finish_reason is not None:
            self.scheduler.remove(job)
            if all(each.finished for each in ticket.rows):
                self.end(ticket, None, chunk.finish_reason)

    def _fork(self, ticket: Ticket) -> None:
        """Start the other n - 1 rows from the pages of the computed prompt. They compute its last token again, for its
        logits."""
        lease = ticket.jobs[0].lease
        assert lease is not None
        for job in ticket.jobs[1:]:
            if self.pool.complete:
                job.lease = lease.fork()
                job.row.computed = job.row.context_tokens - 1
            self.scheduler.add(job)

    def _fail(self, tickets: Sequence[Ticket], error: BaseException) -> None:
        """End all requests of a pass in which the model raised."""
        self.metrics.add("engine_faults")
        op = _failed_op(error)
        for ticket in tickets:
            message = (
                f"request {ticket.number} failed with the {len(tickets)} requests of its step, after "
                f"{ticket.stats.generated_tokens} tokens{op}"
            )
            self.end(ticket, wrap(message, error), "error")


def part_of(piece: PlannedPiece) -> StepPart:
    """The timeline's entry for a computed piece."""
    decodes = piece.tokens == 1 and len(piece.job.row.chunks) > 1  # the newest chunk is of this step
    return StepPart(piece.job.ticket.number, piece.slot, "decode" if decodes else "prefill", piece.tokens)


def _own_error(ticket: Ticket, error: BaseException) -> GenerationError:
    """For an error of the request's own functions, rules or grammar."""
    token = ticket.stats.generated_tokens + 1
    return wrap(f"request {ticket.number} failed in choosing token {token}, by its own parameters", error)


def wrap(message: str, error: BaseException) -> GenerationError:
    """A request's error with its cause."""
    failure = GenerationError(f"{message}: {describe_error(error)}")
    failure.__cause__ = error
    return failure


def _failed_op(error: BaseException) -> str:
    """ ", in attention": the backend's method in which the error was raised, if it was in one."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    ops = [f for f in frames if isinstance(f.f_locals.get("self", f.f_locals.get("be")), Backend)]
    return f", in {ops[-1].f_code.co_name}" if ops else ""
