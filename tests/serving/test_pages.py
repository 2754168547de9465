"""The page pool: whatever is opened, written, shared, forked and closed, every sequence finds its own tokens."""

import numpy as np
import pytest
from engine_checks import check_pool
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from bitnet_ref.serving.pages import PagePool

SIZE = 4


def ids(*tokens):
    return np.array(tokens, dtype=np.int64)


def fill(lease, tokens):
    """Reserve for all of the tokens and say that they are computed."""
    start = lease.adopt(tokens)
    copies = lease.reserve(start, len(tokens))
    lease.commit(tokens, len(tokens))
    return copies


def test_the_same_beginning_is_found_again_in_full_pages():
    pool = PagePool(8, SIZE)
    first = pool.open(ids(*range(10)))
    assert first.pages == []
    fill(first, ids(*range(10)))
    second = pool.open(ids(*range(9), 99))
    assert second.pages == first.pages[:2]
    assert second.adopt(ids(*range(9), 99)) == 8
    third = pool.open(ids(*range(8)))  # its last token is left to compute
    assert third.pages == first.pages[:1]
    other = pool.open(ids(7, *range(1, 9)))  # the second page's tokens after others
    assert other.pages == []
    check_pool(pool, [first, second, third, other])


def test_pages_are_kept_until_their_room_is_needed_and_the_end_of_a_sequence_goes_first():
    pool = PagePool(4, SIZE)
    tokens = ids(*range(13))
    lease = pool.open(tokens)
    fill(lease, tokens)
    pages = list(lease.pages)
    lease.close()
    assert (pool.in_use, len(pool._idle), pool.available) == (0, 3, 4)
    taken = pool.open(ids(50))
    assert taken.reserve(0, 2 * SIZE) == []  # the blank one, and one of the three kept
    again = pool.open(tokens)
    assert again.pages == pages[:2]
    check_pool(pool, [taken, again])


def test_a_content_that_is_gone_is_not_mistaken_for_the_next_one_in_its_page():
    pool = PagePool(2, SIZE)
    lease = pool.open(ids(*range(9)))
    lease.reserve(0, 8)
    lease.commit(ids(*range(9)), 8)
    lease.close()
    other = pool.open(ids(9, 9, 9, 9))
    other.reserve(0, 8)  # both pages
    other.commit(ids(9, 9, 9, 9, 4, 5, 6, 0), 4)
    third = pool.open(ids(9, 9, 9, 9, 4, 5, 6, 7, 0))
    assert third.pages == other.pages[:1]  # and not the page that once held 4, 5, 6, 7 after 0, 1, 2, 3
    check_pool(pool, [other, third])


def test_equal_pages_become_one():
    pool = PagePool(8, SIZE)
    tokens = ids(*range(8), 1)
    one, two = pool.open(tokens), pool.open(tokens)
    for lease in (one, two):
        lease.reserve(0, 9)
    assert pool.in_use == 6
    one.commit(tokens, 9)
    two.changed = False
    two.commit(tokens, 9)
    assert two.changed
    assert one.pages[:2] == two.pages[:2]
    assert one.pages[2] != two.pages[2]
    assert pool.in_use == 4
    check_pool(pool, [one, two])


def forked(tokens):
    """(pool, a lease with all the tokens, its fork)"""
    pool = PagePool(8, SIZE)
    lease = pool.open(tokens)
    fill(lease, tokens)
    return pool, lease, lease.fork()


def test_writing_to_a_shared_page_copies_it_first():
    pool, lease, child = forked(ids(*range(6)))
    assert pool.in_use == 2
    assert [child.missing(start, 6) for start in (0, 4, 5)] == [2, 1, 1]
    (source, copy), *more = child.reserve(5, 6)
    assert (source, more) == (lease.pages[1], [])
    assert child.pages == [lease.pages[0], copy]
    assert lease.reserve(6, 7) == []  # the page is its own again
    check_pool(pool, [lease, child])


def test_a_full_page_is_copied_too_and_found_equal_afterwards():
    tokens = ids(*range(8))
    pool, lease, child = forked(tokens)
    assert len(child.reserve(7, 8)) == 1
    child.commit(tokens, 8)
    assert child.pages == lease.pages
    check_pool(pool, [lease, child])


def test_too_few_pages_change_nothing():
    pool = PagePool(2, SIZE)
    one, two = pool.open(ids(1)), pool.open(ids(1))
    assert one.reserve(0, 5) == []
    assert two.reserve(0, 1) is None
    assert two.pages == []
    one.close()
    one.close()
    assert two.reserve(0, 8) == []
    check_pool(pool, [one, two])


def test_without_pages_for_all_copies_nothing_changes():
    pool = PagePool(3, SIZE)
    tokens = ids(*range(6))
    lease = pool.open(tokens)
    fill(lease, tokens)
    child = lease.fork()
    assert child.reserve(3, 6) is None  # two copies, and there is one page
    assert child.pages == lease.pages


def test_pages_of_an_adapter_are_for_its_own_sequences():
    pool, tokens = PagePool(8, SIZE), ids(*range(9))
    leases = {name: pool.open(ids(1), adapter=name) for name in ("a", "")}
    leases["b"] = pool.open(ids(1), adapter="b").fork()
    for lease in leases.values():
        fill(lease, tokens[:5])
    for name, lease in leases.items():
        assert pool.open(tokens, adapter=name).pages == lease.pages[:1]
    assert len({lease.pages[0] for lease in leases.values()}) == 3


@pytest.mark.parametrize("kind", [{"share": False}, {"complete": False}], ids=str)
def test_without_sharing_nothing_is_found(kind):
    pool = PagePool(8, SIZE, **kind)
    tokens = ids(*range(9))
    fill(pool.open(tokens), tokens)
    assert pool.open(tokens).pages == []


@pytest.mark.parametrize("page", [0, 1])
def test_the_check_can_fail(page):
    pool = PagePool(4, SIZE)
    lease = pool.open(ids(1))
    lease.reserve(0, 8)
    pool.drop(lease.pages[page])
    with pytest.raises(AssertionError):
        check_pool(pool, [lease])


class Sequences(RuleBasedStateMachine):
    """Any order of what an engine does. `written` is what a cache would hold: for each page, its tokens and all before
    them, for that is what keys and values are computed from."""

    leases = Bundle("leases")

    def __init__(self):
        super().__init__()
        self.pool = PagePool(7, SIZE)
        self.written = {page: [None] * SIZE for page in range(7)}
        self.open = {}  # lease -> [tokens, how many are computed]

    def compute(self, lease, upto):
        tokens, computed = self.open[lease]
        computed = max(computed, lease.adopt(tokens, computed))
        self.open[lease][1] = computed
        upto = max(computed + 1, min(upto, len(tokens)))
        missing, pages = lease.missing(computed, upto), len(lease.pages)
        copies = lease.reserve(computed, upto)
        if copies is None:
            assert missing > self.pool.available
            return
        assert missing == len(copies) + len(lease.pages) - pages
        for source, target in copies:
            self.written[target] = list(self.written[source])
        for position in range(computed, upto):
            page = lease.pages[position // SIZE]
            assert sum(page in other.pages for other in self.open) == 1, "written to while another holds it"
            self.written[page][position % SIZE] = tuple(tokens[: position + 1].tolist())
        lease.commit(tokens, upto)
        self.open[lease][1] = upto

    @rule(target=leases, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14), share=st.booleans())
    def begin(self, tokens, share):
        tokens = ids(*([0] * 4 if share else []), *tokens)
        lease = self.pool.open(tokens)
        self.open[lease] = [tokens, len(lease.pages) * SIZE]
        return lease

    @rule(lease=leases, count=st.integers(1, 9))
    def prefill(self, lease, count):
        if self.open[lease][1] < len(self.open[lease][0]):
            self.compute(lease, self.open[lease][1] + count)

    @rule(lease=leases, token=st.integers(0, 1))
    def decode(self, lease, token):
        tokens, computed = self.open[lease]
        if computed == len(tokens) < 6 * SIZE:
            self.open[lease][0] = np.append(tokens, token)
            self.compute(lease, len(tokens) + 1)

    @rule(target=leases, lease=leases)
    def fork(self, lease):
        tokens, computed = self.open[lease]
        child = lease.fork()
        self.open[child] = [tokens, max(0, computed - 1)]
        return child

    @rule(lease=consumes(leases))
    def close(self, lease):
        lease.close()
        del self.open[lease]

    @rule()
    def forget(self):
        self.pool.clear_idle()
        assert len(self.pool._idle) == 0

    @invariant()
    def every_sequence_finds_its_tokens(self):
        for lease, (tokens, computed) in self.open.items():
            for position in range(computed):
                found = self.written[lease.pages[position // SIZE]][position % SIZE]
                assert found == tuple(tokens[: position + 1].tolist())

    @invariant()
    def the_books_balance(self):
        check_pool(self.pool, self.open)


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=25, stateful_step_count=30)
