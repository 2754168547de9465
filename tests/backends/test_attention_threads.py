"""Attention split over threads: which thread computes which heads does not change a bit."""

from dataclasses import replace

import numpy as np
import pytest
from helpers import model, rng

from bitnet_ref.backends.cython_backend import CythonBackend, simd_variants, why_unavailable
from bitnet_ref.kv_cache import KVCache, TokenBatch

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))


@pytest.mark.parametrize("simd", [name for name, lacks in simd_variants().items() if lacks is None])
@pytest.mark.parametrize(("kv_heads", "group"), [(5, 4), (1, 7), (3, 2), (2, 1), (1, 5)])
@pytest.mark.parametrize("n_keys", [1, 31, 33, 700])
def test_the_number_of_threads_changes_nothing(simd, kv_heads, group, n_keys):
    """Groups that do not go into the threads are split by heads; 700 keys are work for several threads."""
    heads, d = kv_heads * group, 40  # 40: no whole number of vector pairs
    config = replace(
        model("storyteller").config,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=d,
    )
    cache = KVCache(config, slots=1, capacity=n_keys)
    generator = rng(kv_heads, group, n_keys)
    cache.keys[:] = generator.standard_normal(cache.keys.shape, dtype=np.float32)
    cache.values[:] = generator.standard_normal(cache.values.shape, dtype=np.float32)
    q = generator.standard_normal((1, heads, d), dtype=np.float32) * 3
    batch = TokenBatch(np.zeros(1, np.int64), np.array([n_keys - 1]), np.zeros(1, np.int64))
    one = CythonBackend(threads=1, simd=simd).attention(q, cache, batch, 0, None)
    for threads in (2, 3, 4, 16):
        np.testing.assert_array_equal(
            CythonBackend(threads=threads, simd=simd).attention(q, cache, batch, 0, None), one
        )
    scores = np.einsum("rd,sd->rs", q[0, -group:].astype(np.float64), cache.keys[0, 0, :, -1]) * d**-0.5
    pattern = np.exp(scores - scores.max(axis=1, keepdims=True))
    exact = pattern / pattern.sum(axis=1, keepdims=True) @ cache.values[0, 0, :, -1]
    np.testing.assert_allclose(one[0, -group:], exact, rtol=1e-4, atol=1e-5)
