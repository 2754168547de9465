"""One step of the engine: run the model on the planned pieces, then choose a token for each row that is ready.

An error of the model ends all requests of the step, unless the engine can go on with another backend. NaN, Inf or a
number too large for the cache's dtype ends only the requests whose tokens have it. Whatever a request's own functions
raise ends that request, SystemExit and KeyboardInterrupt included: Python delivers a real Ctrl-C to the main thread,
never to the engine's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from traceback import walk_tb

import numpy as np
from numpy.typing import NDArray

from ..backends import Backend
from ..backends.loaded import LoadedModel
from ..backends.paged_cache import NO_PAGE, PagedKVCache
from ..backends.run import TokenLogits
from ..errors import DeviceError, GenerationError, NumericsError, count_of, describe_error
from ..generation.search import BeamSearch
from ..generation.stepper import Piece, PlannedPiece, Stepper, StepPlan, Work
from .metrics import EngineMetrics
from .pages import PagePool
from .records import StepPart
from .scheduler import Job, PagedPlan, Scheduler
from .tickets import Delivery, Ticket


class PagedStepper(Stepper[Job]):
    """Computes the steps of many requests over pages."""

    def __init__(
        self,
        model: LoadedModel,
        cache: PagedKVCache,
        pool: PagePool,
        scheduler: Scheduler,
        metrics: EngineMetrics,
        end: Callable[[Ticket, GenerationError | None, str], None],
        recover: Callable[[DeviceError], bool],
        deliveries: list[Delivery],
        bell: NDArray[np.uint8],
    ) -> None:
        """end: ends a request. deliveries: chunks for readers, to which a step adds its own.
        recover: goes on with another backend after a DeviceError, with all sequences waiting; False if it cannot."""
        super().__init__(model, cache, bell)
        self.cache: PagedKVCache = cache
        self.pool, self.scheduler, self.metrics = pool, scheduler, metrics
        self.end, self.recover, self.deliveries = end, recover, deliveries
        self._latency = metrics.histograms["inter_token_latency_seconds"]
        self.is_sound = True  # whether a step has succeeded on this backend, or none has been tried
        self._copies: list[tuple[int, int]] = []  # pages to copy before the next pass, (source, target)

    def run(self, plan: StepPlan[Job]) -> Iterator[list[PlannedPiece[Job]]]:
        assert isinstance(plan, PagedPlan)
        self._copies = plan.copies
        return super().run(plan)

    def prepare(self, pieces: Sequence[PlannedPiece[Job]]) -> None:
        """Copy pages, and write those of each piece's sequence into the page table."""
        cache = self.cache
        cache.copy_pages([source for source, _ in self._copies], [target for _, target in self._copies])
        self._copies = []
        for piece in pieces:
            lease = piece.row.held
            if lease.changed:
                cache.page_table[piece.slot, : len(lease.pages)] = lease.pages
                cache.page_table[piece.slot, len(lease.pages) :] = NO_PAGE
                lease.changed = False

    def parts(self, piece: PlannedPiece[Job]) -> list[Piece]:
        """Empty when the request's own rules fail, which ends it."""
        try:
            return super().parts(piece)
        except BaseException as error:
            self.end(piece.row.ticket, _own_error(piece.row, error), "error")
            return []

    def compute(self, work: Work[Job]) -> None:
        self._compute([(piece, parts) for piece, parts in work if not piece.row.ticket.ended])

    def _compute(self, work: Work[Job]) -> bool:
        """Compute these pieces in one pass. False: all sequences were stopped."""
        if not work:
            return True
        try:
            logits = self.run_pass(work)
        except BaseException as error:
            if isinstance(error, DeviceError) and self.recover(error):
                return False
            if isinstance(error, NumericsError) and any(len(parts) > 1 for _, parts in work):  # perhaps of a guess
                return self._compute([(piece, parts[:1]) for piece, parts in work])
            of_ticket: dict[Ticket, list[tuple[PlannedPiece[Job], list[Piece]]]] = {}
            for piece, parts in work:
                of_ticket.setdefault(piece.row.ticket, []).append((piece, parts))
            if isinstance(error, NumericsError) and len(of_ticket) > 1:  # of the tokens of some request: of which?
                return all(self._compute(own) for own in of_ticket.values())
            self._fail(list(of_ticket), error)
            return True
        self.is_sound = True
        self.accept_all(work, logits)
        return True

    def note_computed(self, row: Job, tokens: int) -> None:
        is_page_full = row.computed // self.pool.page_size != tokens // self.pool.page_size
        row.computed = tokens
        if is_page_full:
            row.held.commit(row.context, tokens)

    def accept(self, row: Job, logits: TokenLogits) -> None:
        ticket: Ticket = row.ticket
        if ticket.ended:  # by an error of another of its n rows
            return
        if row.search is not None:
            self._accept_beam(row, row.search, logits)
            return
        if not row.chunks and row is ticket.rows[0]:
            self._fork(ticket)
        try:
            chunk = row.accept(logits)
        except BaseException as error:
            self.end(ticket, _own_error(row, error), "error")
            return
        self._note_token(ticket)
        if len(row.chunks) > 1:
            ticket.stats.decode_tokens += 1
        if ticket.streams:
            self.deliveries.append((ticket, chunk))
        if row.computed == 0:  # `overflow` dropped tokens
            self.scheduler.restart(row)
        if chunk.finish_reason is not None:
            self.scheduler.remove(row)
            if all(each.finished for each in ticket.rows):
                self.end(ticket, None, chunk.finish_reason)

    def _note_token(self, ticket: Ticket) -> None:
        """Note the time of a new token."""
        now, first_s = time.perf_counter(), ticket.first_token_s
        if first_s is None:
            assert ticket.start_s is not None
            ticket.first_token_s = first_s = now
            ticket.stats.prefill_s = now - ticket.start_s
            self.metrics.observe("time_to_first_token_seconds", now - ticket.arrival_s)
        elif ticket.streams:
            self._latency.observe(now - ticket.last_token_s)
        ticket.last_token_s = now
        ticket.stats.decode_s = now - first_s

    def _accept_beam(self, row: Job, search: BeamSearch, logits: TokenLogits) -> None:
        """Take the logits of a beam. The last one of its search moves all of them on."""
        ticket: Ticket = row.ticket
        try:
            parents = search.accept(row, logits)
        except BaseException as error:
            self.end(ticket, _own_error(row, error), "error")
            return
        if parents is None:
            self.scheduler.park(row)
            return
        self._note_token(ticket)
        if parents:
            self.scheduler.branch(ticket.rows, parents)
        else:
            self.end(ticket, None, search.results[0].finish_reason if search.results else "length")

    def accept_drafts(self, row: Job, draft: Sequence[int], logits: Sequence[TokenLogits]) -> int:
        """Also returns the pages of the wrong guesses."""
        before = len(row.chunks)
        right = super().accept_drafts(row, draft, logits)
        self.metrics.add("spec_decode_num_draft_tokens", len(draft))
        for name in ("spec_decode_num_accepted_tokens", "generation_tokens"):
            self.metrics.add(name, len(row.chunks) - before)
        if row.lease is not None:  # it goes on
            row.lease.commit(row.context, row.computed)
            row.lease.trim(row.context_tokens)
        return right

    def _fork(self, ticket: Ticket) -> None:
        """Start the other n - 1 rows from the pages of the computed prompt. They compute its last token again, for its
        logits."""
        lease = ticket.rows[0].held
        for row in ticket.rows[1:]:
            if self.pool.complete:
                row.lease = lease.fork()
                row.computed = row.context_tokens - 1
            self.scheduler.add(row)

    def _fail(self, tickets: Sequence[Ticket], error: BaseException) -> None:
        """End all requests of a pass in which the model raised."""
        self.metrics.add("engine_faults")
        op = _failed_op(error)
        for ticket in tickets:
            message = (
                f"request {ticket.number} failed with the {len(tickets)} requests of its step, after "
                f"{count_of(ticket.stats.generated_tokens, 'token')}{op}"
            )
            self.end(ticket, wrap(message, error), "error")


def part_of(piece: PlannedPiece[Job]) -> StepPart:
    """The timeline's entry for a computed piece."""
    decodes = piece.tokens == 1 and piece.row.new_tokens > 1  # the newest token is of this step
    tokens = piece.tokens + len(piece.draft)
    return StepPart(piece.row.ticket.number, piece.slot, "decode" if decodes else "prefill", tokens)


def _own_error(row: Job, error: BaseException) -> GenerationError:
    """For an error of the request's own functions, rules or grammar."""
    token = row.new_tokens + 1
    return wrap(f"request {row.ticket.number} failed in choosing token {token}, by its own parameters", error)


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
