"""The plans of the scheduler for drawn requests, step by step, whole, as recorded.

Each request has a length, a priority and perhaps guesses; some are cancelled, put on hold, parked, forked or branched.
When a change is meant, running this file records it.
"""

import json
import random

import pytest
from helpers import DATA
from test_scheduler import SIZE, Cache, job

from bitnet_ref.serving.pages import PagePool
from bitnet_ref.serving.scheduler import NO_SLOT, Scheduler

RECORDED = DATA / "serving" / "schedules.json"
SEEDS = range(20)
STEPS = 40


class Drawn:
    """One scheduler, its requests and what happens to them, all drawn by a seed."""

    def __init__(self, seed):
        self.dice = random.Random(seed)
        self.complete, self.greedy = seed % 4 != 3, seed % 3 == 2
        pages, max_batch = self.dice.randint(7, 16), self.dice.randint(1, 4)
        self.load = self.dice.choice([0.2, 0.5, 0.9])  # of arrivals
        pool = PagePool(pages, SIZE, share=seed % 8 != 5, complete=self.complete)
        self.scheduler = Scheduler(pool, max_batch, max_batch + self.dice.choice([1, 5, 12, 30]), priority_wait_s=3.0)
        self.scheduler.step_s = self.dice.choice([0.0, 0.007])
        self.cache = Cache(self.scheduler, pages)
        self.jobs, self.later, self.table = [], {}, {}

    def draw(self, step, arrival_s=None):
        guesses = (0, 0) if self.greedy else self.dice.choice([(0, 0), (2, 1), (9, 9), (9, 0)])
        prompt = [0, 1] * self.dice.choice([0, 0, 2, 4, 5])  # what several begin with
        prompt += [self.dice.randrange(2) for _ in range(self.dice.randint(1, 9))]
        new, priority = self.dice.randint(1, 20), self.dice.choice([0, 0, 0, 1, -1])
        arrival_s = step if arrival_s is None else arrival_s
        made = job(len(self.jobs), prompt, new, priority, arrival_s, guesses, self.greedy)
        self.jobs.append(made)
        return made

    def alive(self):
        """Those that can be held, parked or branched."""
        return [each for each in self.jobs if each.to_come and (each.running or each in self.scheduler.waiting)]

    def happen(self, step):
        """The events before a step, by name and the number of the request."""
        names = [f"{event.__name__} {each.rank[1][0]}" for event, each in self.later.get(step, [])]
        for event, each in self.later.pop(step, []):
            event(each)
        if step < 14 and self.dice.random() < self.load:
            self.scheduler.add(made := self.draw(float(step)))
            names.append(f"add {made.rank[1][0]}")
        alive = self.alive()
        if not alive or self.dice.random() < 0.8:
            return names
        each = self.dice.choice(alive)
        rare = self.again if self.dice.random() < 0.2 else self.hold
        event = self.dice.choice([self.cancel, rare, self.park, self.fork, self.branch, self.restart])
        event(each, step)
        return [*names, f"{event.__name__} {each.rank[1][0]}"]

    def cancel(self, each, step):
        each.to_come = 0
        self.scheduler.remove(each)

    def hold(self, each, step):
        self.scheduler.hold(each)
        self.later.setdefault(step + self.dice.randint(1, 5), []).append((self.scheduler.resume, each))

    def park(self, each, step):
        self.scheduler.park(each)
        self.later.setdefault(step + self.dice.randint(1, 5), []).append((self.unpark, each))

    def unpark(self, each):
        self.scheduler.branch([each], [0])

    def fork(self, each, step):
        child = self.draw(float(step), each.arrival_s)
        child.tokens, child.priority = list(each.tokens), each.priority
        if each.lease is not None and self.complete:
            child.lease, child.computed = each.lease.fork(), min(each.computed, len(each.tokens) - 1)
        self.scheduler.add(child)

    def branch(self, each, step):
        """Two go on from one of them, and a third, if there is one, ends."""
        beams = [each, *(other for other in self.alive() if other is not each)][:3]
        tokens = list(each.tokens)
        self.scheduler.branch(beams, [0] * min(2, len(beams)))
        for beam in beams[:2]:
            beam.tokens = list(tokens)
        for beam in beams[2:]:
            beam.to_come = 0

    def restart(self, each, step):
        """Its oldest tokens were dropped."""
        if each.running and len(each.tokens) > 3:
            each.tokens = each.tokens[2:]
            self.scheduler.restart(each)

    def again(self, each, step):
        """The device failed: another cache, with other slots."""
        pages = self.scheduler.pool.pages
        pool = PagePool(pages, SIZE, self.scheduler.pool.share, complete=self.complete)
        self.scheduler.start_again(pool, max(1, self.scheduler.max_batch - 1))
        self.cache.pages = {page: [None] * SIZE for page in range(pages)}
        self.table.clear()

    def step(self):
        """One step, in words: request@slot:start+tokens, then drafts, steps in a row, copies and stopped ones."""
        plan = self.scheduler.plan()
        words = [
            f"{p.row.rank[1][0]}@{p.slot}:{p.start}+{p.tokens}" + f"+{len(p.draft)}" * bool(len(p.draft))
            for p in plan.pieces
        ]
        words += [f"x{plan.steps}"] * (plan.steps > 1) + [f"{source}>{target}" for source, target in plan.copies]
        words += [f"stop {each.rank[1][0]}" for each in plan.stopped]
        for piece in plan.pieces:  # as the page table of a cache is kept
            lease = piece.row.held
            if lease.changed:
                self.table[piece.slot], lease.changed = list(lease.pages), False
            assert self.table[piece.slot] == lease.pages
        for source, target in plan.copies:
            self.cache.pages[target] = list(self.cache.pages[source])
        (self.cache.steps_in_a_row if plan.steps > 1 else self.cache.one_step)(plan)
        return words

    def state(self):
        """Who waits, and how many hold each page; * marks one that is found by its tokens."""
        pool, waiting = self.scheduler.pool, [each.rank[1][0] for each in self.scheduler.waiting]
        pages = [f"{count}{'*' * (key is not None)}" for count, key in zip(pool._holders, pool._keys, strict=True)]
        return f"{waiting} {' '.join(pages)}"


def record(seed):
    drawn = Drawn(seed)
    lines = []
    for step in range(STEPS):
        events = drawn.happen(step)
        lines.append(" ".join([*events, "|", *drawn.step(), "|", drawn.state()]))
    scheduler = drawn.scheduler
    assert all(each.slot == NO_SLOT for each in drawn.jobs if not each.running)
    return [*lines, f"{scheduler.stops} stops, {scheduler.cached_tokens} of {scheduler.asked_tokens} cached"]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_plans_of_a_workload(seed):
    assert record(seed) == json.loads(RECORDED.read_text())[str(seed)]


if __name__ == "__main__":
    RECORDED.write_text(json.dumps({seed: record(seed) for seed in SEEDS}, indent=0) + "\n")
