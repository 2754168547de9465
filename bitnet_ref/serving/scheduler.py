"""`Scheduler`: which sequences take part in the next step of a running batch, and with how many tokens.

Decode and prefill share a step. Every decoding sequence is in every step; the remaining tokens of the step go to
prompts, in pieces, so a long prompt delays the others by at most one step.

The order of sequences is fixed on arrival: by time, where one level of `priority` counts for `priority_wait_s` seconds.
So more important requests overtake a waiting one only for a while.

Pages are taken when tokens need them, not reserved for the longest possible text. When they run out, the last sequence
in the order gives its pages back and waits. Later it computes its tokens again, to the bit, by batch invariance. The
first in the order is never stopped, so all finish.

A sequence on hold, whose reader is behind, has no slot. It keeps its pages until any other sequence needs them. So does
a beam that waits for the next tokens of the other beams of its search.

With `speculate` a decoding sequence also verifies draft tokens in its step. Drafts get only what is left over: none
while a sequence waits, the tokens of `max_batch_tokens` that prompts do not use, and pages beyond those that the
running sequences need for their present tokens. Drafts also make the step longer for the sequences that have none. On
average these lose at most the share LENT of their time, and in one step at most the time of MOST_LENT tokens.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..generation.drafts import StepTimes
from ..generation.greedy import choose_steps
from ..generation.sequence import Continuation
from ..generation.stepper import PlannedPiece, StepPlan
from .pages import Lease, PagePool

NO_SLOT = -1
LENT, MOST_LENT = 0.05, 4.0  # what drafts may cost sequences without one: share of their time; tokens in one step


class Job(Continuation):
    """A continuation in the engine: its request's `Ticket`, its rank in the order, its pages and slot."""

    lease: Lease | None = None
    running = False

    def __init__(self, ticket: Any, choice: int, rank: tuple[float, tuple[int, int]], priority: int = 0) -> None:
        """rank: (time of arrival, (number of the request, number of the row)): smaller goes first. `Scheduler.add`
        changes it by the priority."""
        super().__init__(ticket.request, NO_SLOT, choice, ticket.stats)
        self.ticket, self.priority, self.rank, self.arrival_s = ticket, priority, rank, rank[0]

    @property
    def finished(self) -> bool:
        return self.ticket.ended or super().finished

    @property
    def held(self) -> Lease:
        """The lease of a job that has begun."""
        assert self.lease is not None
        return self.lease

    def forget(self) -> None:
        """Leave the scheduler that it was in."""
        self.lease, self.running = None, False
        self.slot, self.computed = NO_SLOT, 0

    def __lt__(self, other: Job) -> bool:
        return self.rank < other.rank


@dataclass
class PagedPlan(StepPlan[Job]):
    """copies: (source page, target page), to copy first. stopped: jobs that lost their slot and pages."""

    copies: list[tuple[int, int]] = field(default_factory=list)
    stopped: list[Job] = field(default_factory=list)


class Scheduler:
    """max_batch: jobs that run at a time. max_batch_tokens: tokens per step, more than max_batch."""

    def __init__(self, pool: PagePool, max_batch: int, max_batch_tokens: int, priority_wait_s: float) -> None:
        assert max_batch_tokens > max_batch
        self.pool, self.max_batch, self.max_batch_tokens = pool, max_batch, max_batch_tokens
        self.priority_wait_s = priority_wait_s
        self.running: list[Job] = []  # both in the order of rank
        self.waiting: list[Job] = []
        self.held: dict[Job, None] = {}
        self.parked: dict[Job, None] = {}  # beams that wait for those beside them
        self.stops = 0
        self.cached_tokens = self.asked_tokens = 0  # of admitted sequences: found in the cache, and all
        self._slots = list(range(max_batch))  # a heap: the lowest free slot is taken first
        self.times, self._lent = StepTimes(), MOST_LENT  # _lent: draft tokens that the next step may verify
        self.step_s = 0.0  # the time of the last step

    def add(self, job: Job) -> None:
        job.rank = (job.arrival_s - job.priority * self.priority_wait_s, job.rank[1])
        insort(self.waiting, job)

    def remove(self, job: Job) -> None:
        """Free the slot and pages of a job that is finished or cancelled. No effect on one that was removed."""
        self._take_out(job)
        self._close(job)

    def hold(self, job: Job) -> None:
        """Let it compute nothing until `resume`."""
        self._take_out(job)
        self.held[job] = None

    def park(self, job: Job) -> None:
        """Let it compute nothing until it is removed, or added again: a beam that waits for those beside it."""
        self._take_out(job)
        self.parked[job] = None

    def branch(self, jobs: Sequence[Job], parents: Sequence[int]) -> None:
        """Let the first of these jobs go on from the pages of others. parents: the index of the other, for each."""
        branches: list[tuple[Lease | None, int]] = []
        for index in parents:
            lease = jobs[index].lease if self.pool.complete else None
            branches.append((None if lease is None else lease.fork(), jobs[index].computed))
        for job in jobs:
            self.remove(job)
        for job, (lease, computed) in zip(jobs, branches, strict=False):
            job.lease, job.computed = lease, computed
            self.add(job)

    def resume(self, job: Job) -> None:
        """Let a job on hold wait for its turn again. No effect on others."""
        if job in self.held:
            del self.held[job]
            insort(self.waiting, job)

    def start_again(self, pool: PagePool, max_batch: int) -> None:
        """Take all slots and pages: `pool` is that of a new, empty cache."""
        for job in list(self.running):
            self._pause(job)
            insort(self.waiting, job)
        for job in self._idle():
            self._close(job)
        self.pool, self.max_batch, self._slots = pool, max_batch, list(range(max_batch))

    def restart(self, job: Job) -> None:
        """Free the pages of a running job whose context has changed."""
        job.held.close()
        job.computed = job.held.adopt(job.context)

    def plan(self) -> PagedPlan:
        """The next step. It is empty only when there are no jobs."""
        plan = PagedPlan()
        self._free_slot()
        self._admit(plan)
        shares = self._shares()
        for job in list(self.running):
            if job.running and (count := shares.get(job, 0)):  # unless it was stopped for an earlier one
                self._add_piece(job, count, plan)
        self._add_drafts(plan)
        self._add_steps(plan)
        return plan

    def _free_slot(self) -> None:
        """Pause a less important job for the first waiting one. It keeps its pages for now."""
        while self.waiting and not self._slots:
            lowest = min(self.running, key=lambda job: (job.priority, -job.rank[0], -job.rank[1][0]))
            if lowest.priority >= self.waiting[0].priority or lowest < self.waiting[0]:
                return
            self._pause(lowest)
            insort(self.waiting, lowest)

    def _admit(self, plan: PagedPlan) -> None:
        """Start waiting jobs in the order of rank, while there are slots, and pages for all their tokens."""
        while self.waiting and self._slots:
            job = self.waiting[0]
            ids, is_new = job.context, job.lease is None
            scores = job.to_score(0, len(ids)) > 0  # only tokens that it computes itself
            lease = job.lease = job.lease or self.pool.open(ids, scores, job.adapter_digest)
            if is_new:
                job.computed = len(lease.pages) * self.pool.page_size
            # Pages for its tokens and one more, besides those that running jobs need
            while self.running and self.pool.available < sum(map(_pages_needed, (*self.running, job))):
                victim = self._less_important(job)
                if victim is None:
                    if is_new:
                        self._close(job)
                    return
                self._stop(victim, plan)
            self._take_out(job)
            if is_new:
                self.asked_tokens += len(ids)
                self._count_cached(job, job.computed)
            job.slot, job.running = heapq.heappop(self._slots), True
            lease.changed = True
            insort(self.running, job)

    def _count_cached(self, job: Job, tokens: int) -> None:
        job.cached += tokens
        self.cached_tokens += tokens

    def _shares(self) -> dict[Job, int]:
        """Tokens of each job in this step. Half of what decoding leaves goes to the first prompt; the other half is
        divided evenly, so that short prompts need not wait for long ones."""
        shares = {job: 1 for job in self.running if job.behind == 1}
        room = self.max_batch_tokens - len(shares)
        prompts = self._prompts()
        even_share = max(self.pool.page_size, room // (2 * max(1, len(prompts))))
        for limit in (even_share, room):
            for job in prompts:
                share = shares.get(job, 0)
                extra = min(job.behind - share, limit, room)
                shares[job], room = share + extra, room - extra
        return shares

    def _prompts(self) -> list[Job]:
        """The jobs with several tokens to compute, after they have adopted the pages that others computed meanwhile."""
        prompts, planned = [], set()
        for job in self.running:
            if job.behind == 1:
                continue
            lease, ids = job.held, job.context
            computed = lease.adopt(ids, job.computed)
            self._count_cached(job, computed - job.computed)
            job.computed = computed
            key = lease.next_key(ids, computed)
            if key is None or key not in planned:  # otherwise another job computes the same page in this step
                planned.add(key)
                prompts.append(job)
        return prompts

    def _add_piece(self, job: Job, count: int, plan: PagedPlan) -> None:
        """Add the job's next tokens to the plan, if there are pages for them."""
        lease, start = job.held, job.computed
        while (copies := lease.reserve(start, start + count)) is None:
            if (victim := self._last_after(job)) is not None:
                self._stop(victim, plan)
                continue
            while count and lease.missing(start, start + count) > self.pool.available:
                count -= 1
            if count == 0:
                return  # earlier jobs go on and will free pages
        plan.copies += copies
        plan.pieces.append(PlannedPiece.of(job, count))

    def _add_drafts(self, plan: PagedPlan) -> None:
        """Add draft tokens of decoding jobs to the plan, within the tokens and pages that are left."""
        self._lent = min(MOST_LENT, self._lent + LENT / self.times.share)
        asking = [index for index, piece in enumerate(plan.pieces) if piece.row.may_guess]
        if self.waiting or not asking:
            return
        drafts, room = {}, self.max_batch_tokens - sum(piece.tokens for piece in plan.pieces)
        for index in asking:
            piece = plan.pieces[index]
            draft = piece.row.guess(min(room, piece.row.ticket.room - 1), self.times)
            if len(draft):
                drafts[index], room = draft, room - len(draft)
        lends = len(drafts) < len(plan.pieces)
        if not drafts or (lends and self._lent < 1):  # a job without one has lost all the time that drafts may cost it
            return
        spare = self.pool.available - sum(map(_pages_needed, self.running))
        for index, draft in drafts.items():
            piece, count = plan.pieces[index], len(draft)
            lease = piece.row.held
            count, start = min(count, int(self._lent)) if lends else count, piece.start + piece.tokens
            while count and 0 < lease.missing(start, start + count) > spare:
                count -= 1
            if count == 0:
                continue
            spare -= lease.missing(start, start + count)
            plan.copies += lease.reserve(start, start + count) or ()
            plan.pieces[index] = piece._replace(draft=draft[:count])
            self._lent -= count if lends else 0

    def _add_steps(self, plan: PagedPlan) -> None:
        """Let more steps follow in a row, if all of its jobs decode greedily, within pages and their readers' room.

        None with drafts, and none while a job waits that could start now.
        """
        if (self.waiting and self._slots) or any(len(piece.draft) or not piece.ends for piece in plan.pieces):
            return
        jobs = [piece.row for piece in plan.pieces]
        steps = choose_steps(jobs, self.step_s)
        if steps < 2 or (steps := min(steps, *(job.ticket.room for job in jobs))) < 2:
            return
        missing, short = 0, []  # pages still to allocate; the leases that need them
        for job in jobs:
            start, stop = job.computed, job.computed + min(steps, job.tokens_left)
            if count := job.held.missing(start, stop):
                missing += count
                short.append((job.held, start, stop))
        if missing <= self.pool.available:
            for lease, start, stop in short:
                plan.copies += lease.reserve(start, stop) or ()
            plan.steps = steps

    def _last_after(self, job: Job) -> Job | None:
        """A job on hold or the last waiting one, if it holds pages, else the last running one after this job."""
        last = self.running[-1] if self.running[-1] is not job else None
        return next((other for other in self._idle() if other.lease is not None), last)

    def _idle(self) -> Iterator[Job]:
        """The jobs without a slot; those that give their pages first come first."""
        yield from self.held
        yield from reversed(self.parked)
        yield from reversed(self.waiting)

    def _less_important(self, job: Job) -> Job | None:
        """The last job that should give its pages to this waiting one: it is idle too, or has a lower priority."""
        waiting = (other for other in self._idle() if other.lease is not None and other is not job)
        running = (other for other in reversed(self.running) if other.priority < job.priority and job < other)
        return next(waiting, None) or next(running, None)

    def _stop(self, job: Job, plan: PagedPlan) -> None:
        """Take its pages and slot; it will compute its tokens again."""
        self.stops += 1
        if job.running:
            plan.stopped.append(job)
            self._pause(job)
            insort(self.waiting, job)
        self._close(job)

    def _take_out(self, job: Job) -> None:
        """Remove it from the jobs that run, wait or are on hold, by bisection: a request may have many rows."""
        if job.running:
            self._pause(job)
        elif job in self.held:
            del self.held[job]
        elif job in self.parked:
            del self.parked[job]
        elif (index := bisect_left(self.waiting, job)) < len(self.waiting) and self.waiting[index] is job:
            del self.waiting[index]

    def _pause(self, job: Job) -> None:
        del self.running[bisect_left(self.running, job)]
        heapq.heappush(self._slots, job.slot)
        job.slot, job.running = NO_SLOT, False
        if not self.pool.complete:
            self._close(job)

    def _close(self, job: Job) -> None:
        if job.lease is not None:
            job.lease.close()
        job.lease, job.computed = None, 0


def _pages_needed(job: Job) -> int:
    """Pages that it has yet to take for its tokens and one more."""
    return job.held.missing(job.computed, job.context_tokens + 1)
