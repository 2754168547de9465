"""The scheduler by itself, with rows that are lists of tokens: who runs, with how much, and whether all finish."""

import numpy as np
from engine_checks import check_pool
from hypothesis import given, settings
from hypothesis import strategies as st

from bitnet_ref.serving.pages import PagePool
from bitnet_ref.serving.scheduler import NO_SLOT, Job, Scheduler

SIZE = 4


class Row(Job):
    """A job that has so many tokens to generate; the next is a function of those so far, as a model's is.

    guesses: how many tokens it guesses at a time, and how many of them are right."""

    def __init__(self, tokens, to_come, guesses, is_greedy, rank, priority):
        self.tokens, self.to_come, self.guesses, self.is_greedy = tokens, to_come, guesses, is_greedy
        self.rank, self.arrival_s, self.priority, self.ticket = rank, rank[0], priority, Reader()
        self.slot, self.computed, self.cached, self.generated = NO_SLOT, 0, 0, 0

    adapter_digest = ""

    @property
    def may_guess(self):
        return self.guesses[0] > 0

    @property
    def decodes_plainly(self):
        return self.is_greedy and self.generated > 0 and len(self.tokens) - self.computed == 1

    @property
    def tokens_left(self):
        return self.to_come

    def guess(self, limit, times):
        draft, (count, right) = [], self.guesses
        if self.generated and len(self.tokens) - self.computed == 1:
            for index in range(min(count, limit, self.to_come - 1)):
                draft.append((sum(self.tokens) + sum(draft) + (index >= right)) % 2)
        return np.array(draft, dtype=np.int64)

    def to_score(self, start, count):
        return 0

    @property
    def behind(self):
        return len(self.tokens) - self.computed

    @property
    def context_tokens(self):
        return len(self.tokens)

    @property
    def context(self):
        return np.array(self.tokens, dtype=np.int64)


class Cache:
    """What a cache holds and a step does with it: each position its token and all before it."""

    def __init__(self, scheduler, pages):
        self.scheduler, self.pages = scheduler, {page: [None] * SIZE for page in range(pages)}
        self.accepted = self.groups = 0

    def step(self):
        plan = self.scheduler.plan()
        assert all(piece.tokens for piece in plan.pieces)
        assert sum(piece.tokens + len(piece.draft) for piece in plan.pieces) <= self.scheduler.max_batch_tokens
        assert not (self.scheduler.waiting and any(len(piece.draft) for piece in plan.pieces))
        slots = [piece.row.slot for piece in plan.pieces]
        assert len(set(slots)) == len(slots) <= self.scheduler.max_batch
        for source, target in plan.copies:
            self.pages[target] = list(self.pages[source])
        if plan.steps > 1:
            self.steps_in_a_row(plan)
        else:
            self.one_step(plan)
        jobs = [*self.scheduler.running, *self.scheduler.waiting]
        check_pool(self.scheduler.pool, [job.lease for job in jobs if job.lease is not None])
        return plan

    def one_step(self, plan):
        for row, slot, start, count, ends, draft in plan.pieces:
            text = [*row.tokens, *draft.tolist()]
            assert (row.slot, row.running) == (slot, True)
            assert start == row.computed
            for at in range(start, start + count + len(draft)):
                self.pages[row.lease.pages[at // SIZE]][at % SIZE] = tuple(text[: at + 1])
            for at in range(start + count + len(draft)):
                assert self.pages[row.lease.pages[at // SIZE]][at % SIZE] == tuple(text[: at + 1])
            row.computed += count
            row.lease.commit(row.context, row.computed)
            assert ends == (row.computed == len(row.tokens))
            for guess in (None, *draft.tolist()) if ends else ():
                if guess is not None:
                    if row.tokens[-1] != guess:
                        break
                    row.computed += 1
                    self.accepted += 1
                row.tokens.append(sum(row.tokens) % 2)
                row.generated, row.to_come = row.generated + 1, row.to_come - 1
            if row.to_come == 0:
                self.scheduler.remove(row)
            elif ends:
                row.lease.commit(row.context, row.computed)
                row.lease.trim(row.context_tokens)

    def steps_in_a_row(self, plan):
        """All are computed first, and those of ended rows again and again, as `_cpu.greedy_steps` does."""
        assert not (self.scheduler.waiting and self.scheduler._slots)
        self.groups += 1
        steps = 1 + self.groups % plan.steps  # the bell may ring after any of them
        for row, *_ in plan.pieces:
            text = list(row.tokens)
            assert row.decodes_plainly
            for at in range(row.computed, row.computed + min(steps, row.to_come)):
                self.pages[row.lease.pages[at // SIZE]][at % SIZE] = tuple(text)
                text.append(sum(text) % 2)
        for _ in range(steps):
            for row, *_ in plan.pieces:
                if row.to_come:
                    for at in range(row.computed + 1):
                        assert self.pages[row.lease.pages[at // SIZE]][at % SIZE] == tuple(row.tokens[: at + 1])
                    row.computed += 1
                    row.lease.commit(row.context, row.computed)
                    row.tokens.append(sum(row.tokens) % 2)
                    row.generated, row.to_come = row.generated + 1, row.to_come - 1
                    if row.to_come == 0:
                        self.scheduler.remove(row)


def engine(pages=16, max_batch=4, max_batch_tokens=12, priority_wait_s=10.0):
    scheduler = Scheduler(PagePool(pages, SIZE), max_batch, max_batch_tokens, priority_wait_s)
    return scheduler, Cache(scheduler, pages)


class Reader:
    room = 100


def job(number, prompt, new=3, priority=0, arrival_s=None, guesses=(0, 0), greedy=False):
    tokens = [number % 2] * prompt if isinstance(prompt, int) else list(prompt)
    rank = float(number) if arrival_s is None else arrival_s, (number, 0)
    return Row(tokens, new, guesses, greedy, rank, priority)


def test_a_long_prompt_does_not_delay_decoding():
    scheduler, cache = engine(pages=40)
    short, long = job(0, [0, 1], new=20), job(1, list(range(60)), new=2)
    scheduler.add(short)
    cache.step()
    scheduler.add(long)
    for step in range(6):
        plan = cache.step()
        assert [(p.row, p.tokens) for p in plan.pieces] == [(short, 1), (long, 11 if step < 5 else 5)]


def test_a_short_prompt_does_not_wait_for_a_long_one():
    scheduler, cache = engine(pages=40, max_batch_tokens=16)
    long, short = job(0, list(range(60))), job(1, [0, 1, 0])
    scheduler.add(long)
    scheduler.add(short)
    plan = cache.step()
    assert [(p.row, p.tokens, p.ends) for p in plan.pieces] == [(long, 13, False), (short, 3, True)]


def test_half_of_a_step_is_shared_evenly():
    scheduler, cache = engine(pages=80, max_batch_tokens=60)
    for number in range(3):
        scheduler.add(job(number, range(number, 60 + number)))
    assert [piece.tokens for piece in cache.step().pieces] == [30 + 10, 10, 10]


def test_arrival_decides_and_priority_is_worth_some_seconds():
    scheduler, _ = engine(priority_wait_s=10)
    jobs = [job(0, 2, arrival_s=0), job(1, 2, arrival_s=5, priority=1), job(2, 2, arrival_s=11, priority=1)]
    for each in jobs:
        scheduler.add(each)
    assert scheduler.waiting == [jobs[1], jobs[0], jobs[2]]


def test_more_important_work_takes_a_slot_and_the_other_keeps_its_pages():
    scheduler, cache = engine(max_batch=1)
    usual, urgent = job(0, 3, new=4), job(1, 3, new=2, priority=1)
    scheduler.add(usual)
    cache.step()
    scheduler.add(urgent)
    assert [p.row for p in cache.step().pieces] == [urgent]
    assert usual.lease is not None
    cache.step()
    assert [(p.row, p.tokens) for p in cache.step().pieces] == [(usual, 1)]


def test_the_last_of_the_less_important_is_paused():
    for arrival_s in (1.0, 0.0):  # of one moment, the request that was numbered last
        scheduler, cache = engine(max_batch=2)
        first, last, urgent = (
            job(0, 3, new=4, arrival_s=0.0),
            job(1, 3, new=4, arrival_s=arrival_s),
            job(2, 3, priority=1),
        )
        for each in (first, last):
            scheduler.add(each)
        cache.step()
        scheduler.add(urgent)
        assert [piece.row for piece in cache.step().pieces] == [urgent, first]


def test_equal_beginnings_are_computed_once():
    scheduler, cache = engine(pages=40, max_batch_tokens=32)
    prompts = [[*range(16), number] for number in range(4)]
    for number, prompt in enumerate(prompts):
        scheduler.add(job(number, prompt))
    assert sum(piece.tokens for piece in cache.step().pieces) == 17
    assert sum(piece.tokens for piece in cache.step().pieces) == 1 + 3  # the first decodes, the others' last tokens
    assert scheduler.cached_tokens == 3 * 16


def test_equal_importance_takes_no_pages_of_a_running_one():
    """An earlier sequence that was on hold waits, unless it is more important."""
    for priority, runs in ((0, [0, 1]), (1, [1, 0])):
        scheduler, cache = engine(pages=4, max_batch=2)
        early, late = job(0, 7, new=9, arrival_s=0.0, priority=priority), job(1, 7, new=9, arrival_s=1.0)
        scheduler.add(early)
        cache.step()
        scheduler.hold(early)
        scheduler.add(late)
        for _ in range(3):
            cache.one_step(scheduler.plan())
        scheduler.resume(early)
        cache.step()
        assert [int(each.running) for each in (early, late)] == runs


def test_when_pages_run_out_the_last_stops_and_still_finishes():
    scheduler, cache = engine(pages=6)
    jobs = [job(0, [0, 1, 1], new=14), job(1, [1, 1, 1], new=14)]
    for each in jobs:
        scheduler.add(each)
    stopped = [victim for _ in range(60) for victim in cache.step().stopped]
    assert set(stopped) == {jobs[1]}
    assert [each.to_come for each in jobs] == [0, 0]


def test_removing_frees_at_once():
    scheduler, cache = engine()
    one, two = job(0, 9), job(1, 3)
    scheduler.add(one)
    scheduler.add(two)
    cache.step()
    scheduler.remove(one)
    scheduler.remove(one)
    scheduler.remove(two)
    assert scheduler.pool.in_use == 0
    for cost in (scheduler.times.cost, 1.0):
        scheduler.times.cost = cost
        assert cache.step().pieces == []


def test_the_last_job_waits_for_a_page():
    """Both need a third page in the same step, and there is one: the first job takes it."""
    scheduler, cache = engine(pages=5)
    one, two = job(0, [0, 1, 0, 1], new=8), job(1, [1, 1, 0, 0], new=8)
    scheduler.add(one)
    scheduler.add(two)
    rows = [[piece.row for piece in cache.step().pieces] for _ in range(12)]
    assert rows == [[one, two]] * 5 + [[one]] * 3 + [[two]] * 3 + [[]]
    assert scheduler.stops == 0


def test_a_piece_is_as_long_as_its_pages_allow():
    """The first job, which is decoding, needs a page in the same step."""
    scheduler, cache = engine(pages=9, max_batch=2, max_batch_tokens=5)
    first, last = job(0, range(13), new=7), job(1, range(20, 37), new=6)
    scheduler.add(first)
    cache.step()
    cache.step()
    scheduler.add(last)
    tokens = [[piece.tokens for piece in cache.step().pieces] for _ in range(7)]
    assert tokens == [[3, 2], [1, 4], [1, 4], [1, 4], [1, 2], [1], [1]]


def test_drafts_take_only_what_nobody_else_needs():
    scheduler, cache = engine(pages=20, max_batch=2, max_batch_tokens=20)
    scheduler.add(quick := job(0, [0, 1], new=40, guesses=(6, 6)))

    def drafted(steps):
        return [len(piece.draft) for _ in range(steps) for piece in cache.step().pieces if piece.row is quick]

    assert drafted(3) == [0, 6, 6]  # after the prompt, alone: all that are right
    quick.ticket.room = 4
    assert drafted(1) == [3]  # and the next token, for which the reader has room too
    quick.ticket.room = 100
    scheduler.add(job(1, [1, 1, 1], new=40))
    assert drafted(5) == [4, 0, 0, 1, 0]  # what the other one lends: 4 tokens at once, then 5% of its time
    scheduler.add(waiting := job(2, [1, 1, 0], new=2))
    assert drafted(3) == [0] * 3  # a sequence waits
    scheduler.remove(waiting)
    assert drafted(1) == [1]


def test_drafts_take_no_page_that_another_needs():
    scheduler, cache = engine(pages=5, max_batch=2, max_batch_tokens=20)
    scheduler.add(quick := job(0, [0, 1, 0], new=12, guesses=(9, 0)))
    assert [len(piece.draft) for _ in range(3) for piece in cache.step().pieces] == [0, 9, 9]
    assert len(quick.lease.pages) == 2  # five tokens and the next one
    scheduler.add(job(1, [0] * 9, new=4))
    assert [len(piece.draft) for _ in range(2) for piece in cache.step().pieces] == [2, 0, 1, 0]  # in its own page
    while cache.step().pieces:
        pass
    assert (scheduler.stops, scheduler.pool.in_use) == (1, 0)  # as without drafts


def test_drafts_of_two_share_the_pages_that_are_left():
    _, cache = engine(pages=8, max_batch=2, max_batch_tokens=40)
    for number in range(2):
        cache.scheduler.add(job(number, [0, 1, 0], new=12, guesses=(9, 0)))
    assert [[len(piece.draft) for piece in cache.step().pieces] for _ in range(2)] == [[0, 0], [9, 4]]


def test_greedy_jobs_take_steps_in_a_row_within_pages_and_room():
    scheduler, cache = engine(pages=6, max_batch=2)
    scheduler.add(one := job(0, [0, 1, 0], new=20, greedy=True))

    def steps(count):
        return [cache.step().steps for _ in range(count)]

    assert steps(3) == [1, 4, 4]  # the prompt by itself
    one.ticket.room = 2  # its reader is behind
    assert steps(1) == [2]
    one.ticket.room, scheduler.step_s = 100, 0.007
    assert steps(1) == [2]  # of 20 ms
    scheduler.step_s = 0.011
    assert steps(1) == [1]
    scheduler.step_s = 0.0
    scheduler.add(two := job(1, [1, 1], new=20))
    assert steps(3) == [1] * 3  # the other one is not greedy
    scheduler.remove(two)
    scheduler.add(waiting := job(2, [1] * 30, new=2, greedy=True))  # for pages, since it has a slot
    assert steps(1) == [1]
    scheduler.remove(waiting)
    assert steps(1) == [4]


def test_a_step_with_drafts_is_one():
    _, cache = engine(pages=20)
    cache.scheduler.add(job(0, [0, 1, 0], new=20, guesses=(6, 6), greedy=True))
    plans = [cache.step() for _ in range(2)]
    assert [(plan.steps, len(plan.pieces[0].draft)) for plan in plans] == [(1, 0), (1, 6)]


def test_steps_in_a_row_take_the_last_page():
    scheduler, cache = engine(pages=2)
    scheduler.add(job(0, [0, 1, 0], new=5, greedy=True))
    assert [cache.step().steps for _ in range(2)] == [1, 4]


def test_jobs_that_wait_for_a_slot_do_not_end_the_steps_in_a_row():
    scheduler, cache = engine(max_batch=1)
    scheduler.add(job(0, [0, 1, 0], new=9, greedy=True))
    scheduler.add(job(1, [0, 1, 0], new=9, greedy=True))
    assert [cache.step().steps for _ in range(3)] == [1, 4, 4]


jobs_and_times = st.lists(
    st.tuples(
        st.integers(0, 12),  # the step of its arrival
        st.lists(st.integers(0, 1), min_size=1, max_size=14),
        st.integers(1, 9),
        st.integers(-1, 2),  # priority
        st.none() | st.integers(1, 15),  # cancelled so many steps later
        st.integers(0, 2),  # forks
        st.tuples(st.sampled_from([0, 0, 2, 9]), st.integers(0, 9)),  # guesses
    ),
    min_size=1,
    max_size=9,
)


@settings(max_examples=60)
@given(jobs_and_times, st.integers(6, 14), st.integers(1, 4), st.integers(5, 20), st.booleans())
def test_everything_finishes_with_its_own_tokens(arrivals, pages, max_batch, max_batch_tokens, greedy):
    scheduler, cache = engine(pages, max_batch, max_batch_tokens, priority_wait_s=3)
    expected, cancelled, all_jobs = {}, {}, []

    def start(number, step, prompt, new, priority, cancel, guesses):
        guesses = (0, 0) if greedy else guesses
        each = job(number, prompt, new, priority, arrival_s=float(step), guesses=guesses, greedy=greedy)
        tokens = list(prompt)
        for _ in range(new):
            tokens.append(sum(tokens) % 2)
        expected[each] = tokens
        all_jobs.append(each)
        if cancel is not None:
            cancelled.setdefault(step + cancel, []).append(each)
        return each

    for step in range(600):
        for number, (at, prompt, new, priority, cancel, forks, guesses) in enumerate(arrivals):
            if at == step:
                scheduler.add(leader := start(number * 10, step, prompt, new, priority, cancel, guesses))
                for fork in range(forks):
                    child = start(number * 10 + fork + 1, step, prompt, new, priority, cancel, guesses)
                    if leader.lease is not None:
                        child.lease = leader.lease.fork()
                        child.computed = leader.computed
                    scheduler.add(child)
        for each in cancelled.pop(step, []):
            scheduler.remove(each)
            expected.pop(each)
        plan = cache.step()
        if not plan.pieces and step > 30:
            break
    assert not scheduler.running
    assert not scheduler.waiting
    assert scheduler.pool.in_use == 0
    for each, tokens in expected.items():
        assert each.tokens == tokens
