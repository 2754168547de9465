"""`Scheduler`: which sequences take part in the next step of a running batch, and with how many tokens.

Decoding and prefill share a step. Every running sequence that decodes is in every step; what is left of the step's
tokens goes to prompts, a piece at a time, so a long prompt delays nobody by more than one step.

Who comes first is settled on arrival and never changes: by time of arrival, where one level of `priority` counts for
`priority_wait_s` seconds. So whoever waits is overtaken by more important work for a while, but not forever.

Pages are taken when tokens need them, not reserved for the longest possible answer. When they run out, the last in that
order gives its pages back and waits; later it computes its tokens again, and by batch invariance they are the same
bits. The first in the order is never stopped, so all come to their end.
"""

from __future__ import annotations

import heapq
from bisect import insort
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .pages import Lease, PagePool


class Row(Protocol):
    """What the scheduler knows of a sequence; `sequence.Continuation` is one."""

    slot: int
    computed: int  # tokens of its context that are in the cache

    @property
    def context(self) -> NDArray[np.int64]: ...  # the tokens that the model is to see, so far

    @property
    def context_tokens(self) -> int: ...


NO_SLOT = -1


class Job:
    """One sequence in the engine: its row, its place in the order, and the pages and slot it holds now."""

    __slots__ = ("arrival_s", "cached", "lease", "owner", "priority", "rank", "row", "running", "times_stopped")

    def __init__(self, row: Row, arrival_s: float, number: tuple[int, int], priority: int = 0, owner: object = None):
        self.row, self.owner, self.priority, self.arrival_s = row, owner, priority, arrival_s
        self.rank: tuple[float, tuple[int, int]] = (arrival_s, number)  # smaller goes first; `Scheduler.add` sets it
        self.lease: Lease | None = None
        self.running = False
        self.cached = 0  # tokens that were found in the cache when it was let in
        self.times_stopped = 0

    def __lt__(self, other: Job) -> bool:
        return self.rank < other.rank

    @property
    def behind(self) -> int:
        """Tokens that the model has to see before the next one can be chosen: 1 while decoding."""
        return self.row.context_tokens - self.row.computed


class Piece(NamedTuple):
    """So many tokens of a job from `start` on, in its slot. `ends`: the next one can be chosen after them."""

    job: Job
    slot: int
    start: int
    tokens: int
    ends: bool


@dataclass
class Plan:
    """One step. copies: (page, the page that must become equal to it), before it. stopped: who lost their place."""

    pieces: list[Piece] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    stopped: list[Job] = field(default_factory=list)


class Scheduler:
    """max_batch: jobs that run at a time. max_batch_tokens: tokens in a step, more than max_batch."""

    def __init__(self, pool: PagePool, max_batch: int, max_batch_tokens: int, priority_wait_s: float = 10.0) -> None:
        assert max_batch_tokens > max_batch
        self.pool, self.max_batch, self.max_batch_tokens = pool, max_batch, max_batch_tokens
        self.priority_wait_s = priority_wait_s
        self.running: list[Job] = []  # both in the order of rank
        self.waiting: list[Job] = []
        self.stops = 0
        self.cached_tokens = self.asked_tokens = 0  # of sequences that were let in: found in the cache, and all
        self._slots = list(range(max_batch))  # a heap: the lowest free one is taken

    def add(self, job: Job) -> None:
        """Let it wait for its turn."""
        job.rank = (job.arrival_s - job.priority * self.priority_wait_s, job.rank[1])
        insort(self.waiting, job)

    def remove(self, job: Job) -> None:
        """It is finished, or not wanted any more: its slot and pages are free now. Harmless for one that is gone."""
        if job.running:
            self._pause(job)
        elif job in self.waiting:
            self.waiting.remove(job)
        self._close(job)

    def restart(self, job: Job) -> None:
        """Its context is another one now: a running job's pages hold what it does not see any more."""
        assert job.lease is not None
        job.lease.close()
        job.row.computed = job.lease.adopt(job.row.context)

    def plan(self) -> Plan:
        """The next step. It is empty only when there are no jobs."""
        plan = Plan()
        self._make_way()
        self._admit(plan)
        shares = self._shares()
        for job in list(self.running):
            if job.running and (count := shares.get(job, 0)):  # not stopped for one before it
                self._take_part(job, count, plan)
        return plan

    # -- who runs ------------------------------------------------------------------------------------------------------

    def _make_way(self) -> None:
        """The most urgent waiting job takes the slot of a less important one, whose pages stay for now."""
        while self.waiting and not self._slots:
            least = min(self.running, key=lambda job: (job.priority, -job.rank[0], -job.rank[1][0]))
            if least.priority >= self.waiting[0].priority or least < self.waiting[0]:
                return
            self._pause(least)
            insort(self.waiting, least)

    def _admit(self, plan: Plan) -> None:
        """In the order of rank, as long as there are slots, and pages for all tokens that are known."""
        while self.waiting and self._slots:
            job = self.waiting[0]
            ids, fresh = job.row.context, job.lease is None
            lease = job.lease = job.lease or self.pool.open(ids)
            if fresh:
                job.row.computed = len(lease.pages) * self.pool.page_size
            while self.running and not self._has_room_for(job):
                victim = self._less_important(job)
                if victim is None:
                    if fresh:
                        self._close(job)
                    return
                self._stop(victim, plan)
            self.waiting.remove(job)  # the first, but for one that was stopped for it
            if fresh:
                self.asked_tokens += len(ids)
                self._found(job, job.row.computed)
            job.row.slot, job.running = heapq.heappop(self._slots), True
            lease.changed = True
            insort(self.running, job)

    def _has_room_for(self, job: Job) -> bool:
        """Whether there are pages for all its known tokens and one more, besides those the running ones will need."""
        return self.pool.available >= sum(map(_pages_to_come, self.running)) + _pages_to_come(job)

    def _found(self, job: Job, tokens: int) -> None:
        job.cached += tokens
        self.cached_tokens += tokens

    def _shares(self) -> dict[Job, int]:
        """Tokens of each job in this step. Of what decoding leaves, half goes to the prompt that came first, and the
        other half is dealt out evenly, so that short prompts need not wait for long ones."""
        shares = {job: 1 for job in self.running if job.behind == 1}
        room = self.max_batch_tokens - len(shares)
        prompts = self._prompts()
        deal = max(self.pool.page_size, room // (2 * max(1, len(prompts))))
        for most in (deal, room):
            for job in prompts:
                given = shares.get(job, 0)
                more = min(job.behind - given, most, room)
                shares[job], room = given + more, room - more
        return shares

    def _prompts(self) -> list[Job]:
        """The jobs with several tokens to compute. What others have computed of those in the meantime, they take."""
        prompts, planned = [], set()
        for job in self.running:
            if job.behind == 1:
                continue
            row, lease = job.row, job.lease
            assert lease is not None
            ids = row.context
            found = lease.adopt(ids, row.computed)
            self._found(job, found - row.computed)
            row.computed = found
            key = lease.next_key(ids, found)
            if key is None or key not in planned:  # else the page will be there after this step, by another's work
                planned.add(key)
                prompts.append(job)
        return prompts

    def _take_part(self, job: Job, count: int, plan: Plan) -> None:
        """Add the job's next tokens to the plan, if there are pages for them."""
        row, lease = job.row, job.lease
        assert lease is not None
        start = row.computed
        while (copies := lease.reserve(start, start + count)) is None:
            victim = self._last_after(job)
            if victim is not None:
                self._stop(victim, plan)
            elif (count := _affordable(lease, start, count)) == 0:
                return  # those before it go on, and will leave pages
        plan.copies += copies
        plan.pieces.append(Piece(job, row.slot, start, count, ends=start + count == row.context_tokens))

    # -- who has to stop -----------------------------------------------------------------------------------------------

    def _last_after(self, job: Job) -> Job | None:
        """The last of those that hold pages while they wait for a slot, else the last that runs, if after this one."""
        holding = next((other for other in reversed(self.waiting) if other.lease is not None), None)
        if holding is not None:
            return holding
        return self.running[-1] if self.running[-1] is not job else None

    def _less_important(self, job: Job) -> Job | None:
        """One that should leave its pages to this waiting job: one that waits too, or runs with a lower priority."""
        for other in reversed(self.waiting):
            if other.lease is not None and other is not job:
                return other
        return next((r for r in reversed(self.running) if r.priority < job.priority and job < r), None)

    def _stop(self, job: Job, plan: Plan) -> None:
        """Take its pages; it will compute its tokens again."""
        self.stops += 1
        job.times_stopped += 1
        if job.running:
            plan.stopped.append(job)
            self._pause(job)
            insort(self.waiting, job)
        self._close(job)

    def _pause(self, job: Job) -> None:
        """Take its slot."""
        self.running.remove(job)
        heapq.heappush(self._slots, job.row.slot)
        job.row.slot, job.running = NO_SLOT, False

    def _close(self, job: Job) -> None:
        if job.lease is not None:
            job.lease.close()
        job.lease, job.row.computed = None, 0


def _pages_to_come(job: Job) -> int:
    """Pages that it has yet to take for the tokens that are known, and one more."""
    assert job.lease is not None
    return job.lease.missing(job.row.computed, job.row.context_tokens + 1)


def _affordable(lease: Lease, start: int, count: int) -> int:
    """How many of these tokens there are pages for."""
    while count and lease.missing(start, start + count) > lease.pool.available:
        count -= 1
    return count
