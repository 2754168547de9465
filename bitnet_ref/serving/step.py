"""One step of the engine: run the model on the planned pieces, then choose a token for each row that is ready.

An error of the model ends all requests of the step, unless the engine can go on with another backend. NaN, Inf or a
number too large for the cache's dtype ends only the requests whose tokens have it. Whatever a request's own functions
raise ends that request, SystemExit and KeyboardInterrupt included: Python delivers a real Ctrl-C to the main thread,
never to the engine's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from traceback import walk_tb

import numpy as np
from numpy.typing import NDArray

from ..backends import Backend
from ..backends.loaded import LoadedModel
from ..backends.paged_cache import NO_PAGE, PagedKVCache
from ..backends.run import TokenLogits
from ..errors import DeviceError, GenerationError, NumericsError, describe_error
from ..generation.generate import VerifiedDraft, accept_drafts, pieces_of_draft
from ..generation.greedy import run_steps
from ..generation.sequence import Piece, run_pieces
from .metrics import EngineMetrics
from .pages import PagePool
from .records import StepPart
from .scheduler import Job, PlannedPiece, Scheduler, StepPlan
from .tickets import Delivery, Ticket


@dataclass
class Stepper:
    """Computes the steps. end: ends a request. deliveries: chunks for readers, to which a step adds its own.

    recover: goes on with another backend after a DeviceError, with all sequences waiting; False if it cannot.
    verified: the drafts of the last call of `run`, if each row took part in it with one token and drafts; else None.
    """

    model: LoadedModel
    cache: PagedKVCache
    pool: PagePool
    scheduler: Scheduler
    metrics: EngineMetrics
    end: Callable[[Ticket, GenerationError | None, str], None]
    recover: Callable[[DeviceError], bool]
    deliveries: list[Delivery]
    bell: NDArray[np.uint8]  # (1,): 1 ends several steps in a row after the present one
    is_sound: bool = True  # whether a step has succeeded on this backend, or none has been tried
    verified: list[VerifiedDraft] | None = None

    def run(self, plan: StepPlan) -> list[list[PlannedPiece]]:
        """Compute the pieces, and one more token for each row whose context is then complete.

        -> the pieces of each step
        """
        self.verified = None
        if plan.steps > 1 and (steps := self._run_steps(plan)):
            self.verified = []
            return steps
        parts = {piece.job: self._parts(piece) for piece in plan.pieces}
        self._compute([piece for piece in plan.pieces if not piece.job.ticket.ended], parts, plan.copies)
        return [plan.pieces]

    def _run_steps(self, plan: StepPlan) -> list[list[PlannedPiece]]:
        """Several steps in a row; none where they must be computed one by one."""
        self._place(plan.pieces, plan.copies)
        plan.copies.clear()
        rows, steps = [piece.job.row for piece in plan.pieces], list[list[PlannedPiece]]()
        try:
            computed = run_steps(self.model, self.cache, rows, plan.steps, self.bell)
        except Exception:
            return []  # a single step raises it again
        for number, logits in enumerate(computed):
            steps.append([])
            for piece, token_logits in zip(plan.pieces, logits, strict=True):
                if not (piece.job.row.finished or piece.job.ticket.ended):
                    steps[-1].append(piece)
                    self._note_computed(piece.job, piece.start + number, 1)
                    self._accept(piece.job, token_logits)
        return [pieces for pieces in steps if pieces]

    def _compute(
        self,
        pieces: Sequence[PlannedPiece],
        parts: Mapping[Job, list[Piece]],
        copies: Sequence[tuple[int, int]],
    ) -> bool:
        """Compute these pieces in one pass. False: all sequences were stopped.

        parts: of each job, as of `_parts`. copies: pages to copy first, (source, target).
        """
        if not pieces:
            return True
        try:
            logits = iter(self._forward(copies, pieces, parts))
        except BaseException as error:
            if isinstance(error, DeviceError) and self.recover(error):
                return False
            if isinstance(error, NumericsError) and any(len(own) > 1 for own in parts.values()):  # perhaps of a guess
                return self._compute(pieces, {job: own[:1] for job, own in parts.items()}, ())
            of_ticket: dict[Ticket, list[PlannedPiece]] = {}
            for piece in pieces:
                of_ticket.setdefault(piece.job.ticket, []).append(piece)
            if isinstance(error, NumericsError) and len(of_ticket) > 1:  # of the tokens of some request: of which?
                return all(self._compute(own, parts, ()) for own in of_ticket.values())
            self._fail(list(of_ticket), error)
            return True
        self.is_sound, verified = True, list[VerifiedDraft]()
        for job, _, start, count, *_ in pieces:
            self._note_computed(job, start, count)
        for job in [piece.job for piece in pieces if piece.ends]:
            self._accept(job, next(logits))
            if draft := [int(part.ids[0]) for part in parts[job][1:]]:
                right = self._accept_drafts(job, draft, [next(logits) for _ in draft])
                verified.append(VerifiedDraft(job.row, len(draft), right))
        if all(piece.ends and piece.tokens == 1 for piece in pieces):
            self.verified = verified
        return True

    def _parts(self, piece: PlannedPiece) -> list[Piece]:
        """Its tokens and each guessed one, with the logits that the choices after them need.

        Empty when the request's own rules fail, which ends it.
        """
        job, slot, start, count, ends, draft = piece
        row = job.row
        try:
            parts = [Piece(row, slot, start, row.context[start : start + count], row.needs() if ends else None)]
        except BaseException as error:
            self.end(job.ticket, _own_error(job.ticket, error), "error")
            return []
        if len(draft):
            with suppress(BaseException):  # they may fail on a text that will not come
                parts += pieces_of_draft(row, start + count, draft)
        return parts

    def _forward(
        self,
        copies: Sequence[tuple[int, int]],
        pieces: Sequence[PlannedPiece],
        parts: Mapping[Job, list[Piece]],
    ) -> list[TokenLogits]:
        """Run the model on the pieces, with logits at the last tokens of those that end a context."""
        self._place(pieces, copies)
        return run_pieces(self.model, self.cache, [part for piece in pieces for part in parts[piece.job]])

    def _place(self, pieces: Sequence[PlannedPiece], copies: Sequence[tuple[int, int]]) -> None:
        """Copy pages, and write those of each piece's sequence into the page table."""
        cache = self.cache
        cache.copy_pages([source for source, _ in copies], [target for _, target in copies])
        for job, slot, *_ in pieces:
            lease = job.held
            if lease.changed:
                cache.page_table[slot, : len(lease.pages)] = lease.pages
                cache.page_table[slot, len(lease.pages) :] = NO_PAGE
                lease.changed = False

    def _note_computed(self, job: Job, start: int, count: int) -> None:
        """Its tokens from `start` on are in the cache."""
        job.row.computed = start + count
        if start // self.pool.page_size != (start + count) // self.pool.page_size:  # a page is full
            job.held.commit(job.row.context, job.row.computed)

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

    def _accept_drafts(self, job: Job, draft: Sequence[int], logits: Sequence[TokenLogits]) -> int:
        """Go on after each guess that is right, and return the pages of the others.   -> how many are right

        logits: after each guess.
        """
        row = job.row
        chunks = accept_drafts(row, draft, logits, job.ticket.stats, partial(self._accept, job))
        self.metrics.add("spec_decode_num_draft_tokens", len(draft))
        for name in ("spec_decode_num_accepted_tokens", "generation_tokens"):
            self.metrics.add(name, len(chunks))
        if job.lease is not None:  # it goes on
            job.lease.commit(row.context, row.computed)
            job.lease.trim(row.context_tokens)
        return len(chunks)

    def _fork(self, ticket: Ticket) -> None:
        """Start the other n - 1 rows from the pages of the computed prompt. They compute its last token again, for its
        logits."""
        lease = ticket.jobs[0].held
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
    tokens = piece.tokens + len(piece.draft)
    return StepPart(piece.job.ticket.number, piece.slot, "decode" if decodes else "prefill", tokens)


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
