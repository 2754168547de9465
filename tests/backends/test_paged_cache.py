"""bitnet_ref.backends.paged_cache: pages, their table and their owners. No page table changes a bit of a result."""

import numpy as np
import pytest
from helpers import GOLDEN, call, model, rng
from hypothesis import given, settings
from hypothesis import strategies as st

from bitnet_ref.backends.paged_cache import CACHE_DTYPES, NO_PAGE, CacheSpec, PagedKVCache, narrow, widen
from bitnet_ref.errors import OutOfMemory, ShapeError
from bitnet_ref.reference.cache import TokenBatch

CONFIG = model(GOLDEN / "llama-dense").config  # 2 layers, 2 kv heads of 32


def paged_cache(slots, capacity, dtype="float32", **pages):
    return PagedKVCache(CONFIG, CacheSpec(slots, capacity, dtype, **pages), np.dtype(dtype))


def filled(batch, slots=2, capacity=8):
    """A cache with one page per slot that holds these tokens, and their random keys and values."""
    cache = paged_cache(slots, capacity)
    k, v = (rng(i).standard_normal((len(batch), 2, 32)).astype(np.float32) for i in (1, 2))
    for layer in range(2):
        cache.append(layer, batch, k, v)
    return cache, k, v


def test_a_pool_that_does_not_fit_in_memory():
    with pytest.raises(OutOfMemory, match=f"the KV cache of {10**15} pages of 4 tokens does not fit"):
        paged_cache(1, 10, page_size=4, pages=10**15)
    with pytest.raises(OutOfMemory, match="10 sequences of"):
        paged_cache(10, 10**15)


def give_pages(cache, slots_and_lengths, generator):
    """The owner of the pool: pages for so many tokens of each slot, in no order."""
    free = generator.permutation(cache.pages).tolist()
    for slot, length in slots_and_lengths:
        for index in range(-(-length // cache.page_size)):
            cache.page_table[slot, index] = free.pop()


def test_every_slot_owns_one_page_by_default():
    cache = paged_cache(3, 10)
    assert (cache.page_size, cache.pages, cache.keys.shape) == (10, 3, (2, 3, 10, 2, 32))
    assert cache.page_table.tolist() == [[0], [1], [2]]
    with pytest.raises(ValueError, match="read-only"):
        cache.page_table[0, 0] = 1


def test_a_pool_has_no_owners_and_a_page_size_alone_gives_each_slot_its_pages():
    pool = paged_cache(3, 10, page_size=4, pages=5)
    assert pool.keys.shape == (2, 5, 4, 2, 32)
    assert pool.page_table.dtype == np.int32
    assert pool.page_table.tolist() == [[NO_PAGE] * 3] * 3
    owned = paged_cache(2, 10, page_size=4)
    assert owned.page_table.tolist() == [[0, 1, 2], [3, 4, 5]]
    for wrong in ({"pages": 3}, {"page_size": 0}):
        with pytest.raises(ShapeError, match="page_size"):
            paged_cache(1, 1, **wrong)


def test_a_position_without_a_page():
    cache = paged_cache(2, 12, page_size=4, pages=5)
    cache.page_table[1] = [4, 2, NO_PAGE]
    batch = TokenBatch.of([(1, 6, [1, 2, 3])])
    k = np.ones((3, 2, 32), np.float32)
    with pytest.raises(ShapeError, match=r"a page for position 8 of slot 1, one of 5, got page_table\[1, 2\] = -1"):
        cache.append(0, batch, k, k)
    with pytest.raises(ShapeError, match=r"position 0 of slot 0"):
        cache.visible(0, 0, 3, None)
    with pytest.raises(ShapeError, match=r"position 8 of slot 1"):
        cache.copy([1], [0], 9)
    cache.page_table[1, 0] = 5  # beyond the pool
    with pytest.raises(ShapeError, match=r"position 0 of slot 1, one of 5, got page_table\[1, 0\] = 5"):
        cache.visible(0, 1, 7, None)
    assert cache.visible(0, 1, 7, 4)[0].shape == (4, 2, 32)  # its page is not looked at
    with pytest.raises(ShapeError, match="a capacity of 12"):
        cache.visible(0, 1, 12, 1)


def test_attention_over_a_position_without_a_page(be):
    """A backend may not read what is not there: the one that goes before the window may be gone."""
    cache = be.new_cache(CONFIG, CacheSpec(1, 12, page_size=4, pages=3))
    cache.page_table[0] = [2, 1, 0]
    batch = TokenBatch.of([(0, 0, [0] * 9)])
    generator = rng(7)
    k, v = (generator.standard_normal((9, 2, 32)).astype(np.float32) for _ in range(2))
    q = generator.standard_normal((9, 4, 32)).astype(np.float32)
    call(be, "append", cache, 0, batch, k, v)
    last = TokenBatch(batch.tokens[8:], batch.positions[8:], batch.slots[8:])
    expected = call(be, "attention", q[8:], cache, last, 0, 4)
    cache.page_table[0, 0] = NO_PAGE
    np.testing.assert_array_equal(call(be, "attention", q[8:], cache, last, 0, 4), expected)
    with pytest.raises(ShapeError, match="a page for position 0 of slot 0"):
        call(be, "attention", q[8:], cache, last, 0, None)


@st.composite
def interleavings(draw):
    """(page_size, dtype, lengths of the sequences, order in which pieces of them go into the cache, window)"""
    lengths = draw(st.lists(st.integers(1, 23), min_size=1, max_size=4))
    pieces, left = [], list(lengths)
    while any(left):
        calls = []
        for slot in draw(st.sets(st.sampled_from([i for i, n in enumerate(left) if n]), min_size=1)):
            count = draw(st.integers(1, left[slot]))
            calls.append((slot, lengths[slot] - left[slot], count))
            left[slot] -= count
        pieces.append(calls)
    page_size, dtype = draw(st.integers(1, 9)), draw(st.sampled_from(CACHE_DTYPES))
    return page_size, dtype, lengths, pieces, draw(st.sampled_from([None, 1, 5]))


@pytest.mark.sample(6)
@settings(max_examples=15)  # on every backend
@given(case=interleavings(), seed=st.integers(0, 2**32 - 1))
def test_pages_change_no_bit(be, case, seed):
    """Any page table, any order of sequences: what a paged cache gives is what the slots' own pages give."""
    page_size, dtype, lengths, pieces, window = case
    generator = rng(seed)
    needed = sum(-(-length // page_size) for length in lengths)
    plain = be.new_cache(CONFIG, CacheSpec(len(lengths), 23, dtype))
    paged = be.new_cache(CONFIG, CacheSpec(len(lengths), 23, dtype, page_size, needed + 2))
    give_pages(paged, enumerate(lengths), generator)
    for calls in pieces:
        batch = TokenBatch.of([(slot, start, [0] * count) for slot, start, count in calls])
        k, v = (generator.standard_normal((len(batch), 2, 32)).astype(np.float32) for _ in range(2))
        q = 3 * generator.standard_normal((len(batch), 4, 32)).astype(np.float32)
        for cache in (plain, paged):
            call(be, "append", cache, 1, batch, k, v)
        expected, got = (call(be, "attention", q, cache, batch, 1, window) for cache in (plain, paged))
        np.testing.assert_array_equal(got, expected)
        for mine, theirs, x in zip(paged.stored(1, batch), plain.stored(1, batch), (k, v), strict=True):
            np.testing.assert_array_equal(mine, theirs)
            np.testing.assert_array_equal(mine, widen(*narrow(x, np.dtype(dtype))))
        for slot, start, count in calls:
            got, expected = (cache.visible(1, slot, start + count - 1, window) for cache in (paged, plain))
            for a, b in zip(got, expected, strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_pages_are_copied_with_all_that_belongs_to_them(dtype):
    """One sequence goes its own way from a page that another keeps: it is copied, then the table changes."""
    cache = paged_cache(2, 8, dtype, page_size=4, pages=4)
    cache.page_table[:] = [[1, 3], [1, 2]]
    batch = TokenBatch.of([(0, 0, [0] * 8)])
    k, v = (rng(i).standard_normal((8, 2, 32)).astype(np.float32) for i in (1, 2))
    cache.append(1, batch, k, v)
    expected = cache.stored(1, batch)
    cache.copy_pages([1, 3], [0, 2])
    cache.page_table[1, 0] = 0
    for a, b in zip(cache.visible(1, 1, 7, None), expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("page_size", [1, 3, 4, 8])
def test_copies_over_pages(page_size):
    """`copy` and `take_over` move tokens, wherever their pages lie."""
    batch = TokenBatch.of([(0, 0, [0] * 8), (1, 0, [0] * 8)])
    plain, k, v = filled(batch)
    paged = paged_cache(2, 8, page_size=page_size, pages=20)
    give_pages(paged, [(0, 8), (1, 8)], rng(page_size))
    paged.fill_with_zeros()
    paged.take_over(plain, 6)
    for cache in (plain, paged):
        cache.copy([1, 0], [0, 1], 5)
    for slot in (0, 1):
        for layer in (0, 1):
            got, expected = paged.visible(layer, slot, 7, None), plain.visible(layer, slot, 7, None)
            for a, b in zip(got, expected, strict=True):
                np.testing.assert_array_equal(a[:6], b[:6])
                assert not a[6:].any()
    np.testing.assert_array_equal(plain.visible(0, 0, 4, None)[0], k[8:13])
    np.testing.assert_array_equal(plain.visible(0, 1, 4, None)[1], v[:5])


def test_a_model_over_pages(backend_name):
    """The forward pass over a pool equals the one over slots, to the bit; two sequences share their first pages."""
    m = model("storyteller", backend_name)
    tokens = rng(3).integers(3, m.config.vocab_size, 15)
    whole = m.logits(tokens)
    cache = m.new_cache(2, 18, page_size=3, pages=9)
    cache.page_table[0] = [8, 1, 6, 3, 0, 7]
    np.testing.assert_array_equal(m.run(TokenBatch.of([(0, 0, tokens[:13])]), cache).all(), whole[:13])
    cache.page_table[1, :4] = cache.page_table[0, :4]  # 12 tokens
    cache.page_table[1, 4:] = [2, 5]
    both = m.run(TokenBatch.of([(1, 12, tokens[12:]), (0, 13, tokens[13:])]), cache).all()
    np.testing.assert_array_equal(both, np.concatenate([whole[12:], whole[13:]]))
