"""bitnet_ref.reference.cache: tokens of several sequences end to end, and what each of them sees."""

import numpy as np
import pytest
from helpers import GOLDEN, model, rng

from bitnet_ref.backends.paged_cache import EngineKVCache
from bitnet_ref.errors import OutOfMemory, ShapeError
from bitnet_ref.reference.cache import KVCache, TokenBatch

pytestmark = pytest.mark.quick_emulated

CONFIG = model(GOLDEN / "llama-dense").config  # 2 layers, 2 kv heads of 32


def test_token_batch():
    batch = TokenBatch.of([(0, 0, [7, 8, 9]), (3, 5, [1]), (1, 2, [4, 5])])
    assert len(batch) == 6
    assert batch.tokens.tolist() == [7, 8, 9, 1, 4, 5]
    assert batch.positions.tolist() == [0, 1, 2, 5, 2, 3]
    assert batch.slots.tolist() == [0, 0, 0, 3, 1, 1]
    assert batch.wanted is None
    assert {a.dtype for a in (batch.tokens, batch.positions, batch.slots)} == {np.dtype(np.int64)}


def test_logits_of_last():
    parts = [(0, 0, [7, 8, 9]), (3, 5, [1]), (1, 2, [4, 5])]
    assert TokenBatch.of(parts, logits_of_last=[0, 1, 2]).wanted.tolist() == [2, 3, 5]
    assert TokenBatch.of(parts, logits_of_last=[2, 0]).wanted.tolist() == [5, 2]
    assert TokenBatch.of(parts, logits_of_last=[]).wanted.tolist() == []
    ends = [(3, 5, [1]), (1, 2, [4])]
    assert TokenBatch.of(ends, logits_of_last=[0, 1]).wanted is None
    assert TokenBatch.of(ends, logits_of_last=[1, 0]).wanted.tolist() == [1, 0]


def filled(batch, slots=2, capacity=8):
    cache = EngineKVCache(CONFIG, slots, capacity)
    k, v = (rng(i).standard_normal((len(batch), 2, 32)).astype(np.float32) for i in (1, 2))
    for layer in range(2):
        cache.append(layer, batch, k + layer, v - layer)
    return cache, k, v


def test_what_a_token_sees():
    batch = TokenBatch.of([(1, 0, [0] * 5), (0, 0, [0] * 3)])
    cache, k, v = filled(batch)
    for window, first in ((None, 0), (1, 4), (3, 2), (5, 0), (50, 0)):
        keys, values = cache.visible(1, 1, 4, window)
        np.testing.assert_array_equal(keys, k[first:5] + 1)
        np.testing.assert_array_equal(values, v[first:5] - 1)
    keys, _ = cache.visible(0, 0, 1, None)
    np.testing.assert_array_equal(keys, k[5:7])


def test_dtype_and_size():
    cache = EngineKVCache(CONFIG, slots=3, capacity=10)
    assert cache.keys.dtype == cache.values.dtype == np.float32
    assert cache.nbytes == 2 * 2 * 3 * 10 * 2 * 32 * 4
    assert KVCache(CONFIG, 1, 1, np.float64).keys.dtype == np.float64


@pytest.mark.parametrize("part", [(0, 7, [1, 2]), (0, 8, [1]), (2, 0, [1])])
def test_beyond_the_capacity(part):
    batch = TokenBatch.of([part])
    with pytest.raises(ShapeError, match=r"KVCache.append: expected positions < 8 and slots < 2, got position"):
        filled(batch)


@pytest.mark.parametrize("shape", [(1, 2, 32), (3, 1, 32), (3, 2, 16), (3, 64), (2, 32)])
def test_keys_of_another_shape_are_not_broadcast(shape):
    cache, good = KVCache(CONFIG, 1, 4), np.ones((3, 2, 32), np.float32)
    batch = TokenBatch.of([(0, 0, [1, 2, 3])])
    for k, v in ((np.ones(shape, np.float32), good), (good, np.ones(shape, np.float32))):
        with pytest.raises(ShapeError, match=r"KVCache\.append"):
            cache.append(0, batch, k, v)


@pytest.mark.parametrize("capacity", [10**15, 10**30])
def test_a_cache_that_does_not_fit_in_memory(capacity):
    with pytest.raises(OutOfMemory, match="KV cache"):
        EngineKVCache(CONFIG, 10, capacity)


def test_what_attention_reads_back():
    batch = TokenBatch.of([(1, 0, [0] * 5), (0, 0, [0] * 3)])
    cache, k, v = filled(batch)
    some = TokenBatch.of([(0, 1, [0]), (1, 4, [0])])
    for stored, written in zip(cache.stored(1, some), (k + 1, v - 1), strict=True):
        np.testing.assert_array_equal(stored, written[[6, 4]])


def test_a_larger_cache_takes_over():
    batch = TokenBatch.of([(0, 0, [0] * 8), (1, 0, [0] * 8)])
    small, _, _ = filled(batch)
    large = EngineKVCache(CONFIG, 2, 20)
    large.take_over(small, 6)
    for slot in (0, 1):
        for mine, theirs in zip(large.visible(1, slot, 5, None), small.visible(1, slot, 5, None), strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_bytes_per_token():
    assert EngineKVCache(CONFIG, 3, 10).bytes_per_token == 2 * 2 * 2 * 32 * 4


def test_slots_are_copied_all_at_the_same_time():
    """A beam may continue another one, which moves as well: what a slot gets is what its source held before."""
    cache = EngineKVCache(CONFIG, slots=3, capacity=4)
    cache.keys[:] = cache.values[:] = np.arange(3, dtype=np.float32)[None, :, None, None, None]
    cache.copy([1, 0, 1], [0, 1, 2], 2)
    for held in (cache.keys, cache.values):
        assert held[0, :, 0, 0, 0].tolist() == held[-1, :, 1, -1, -1].tolist() == [1, 0, 1]
        assert held[0, :, 2, 0, 0].tolist() == [0, 1, 2]  # beyond the length
