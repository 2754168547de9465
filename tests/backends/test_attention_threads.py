"""Attention split over threads, and tokens that are computed together: neither changes a bit."""

import numpy as np
import pytest
from helpers import of_one_layer, rng
from hypothesis import given, settings
from hypothesis import strategies as st

from bitnet_ref.backends.cpu.backend import CythonBackend
from bitnet_ref.backends.cpu.extension import simd_variants, why_unavailable
from bitnet_ref.backends.paged_cache import CacheSpec
from bitnet_ref.reference.cache import KVCache, TokenBatch

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))


@pytest.mark.sample(4)
@pytest.mark.parametrize("simd", [name for name, lacks in simd_variants().items() if lacks is None])
@pytest.mark.parametrize(("kv_heads", "group"), [(5, 4), (1, 7), (3, 2), (2, 1), (1, 5)])
@pytest.mark.parametrize("n_keys", [1, 31, 129, 700])
def test_the_number_of_threads_changes_nothing(simd, kv_heads, group, n_keys):
    """The keys of heads that do not go into the threads are divided; 700 keys are work for several threads."""
    heads, d = kv_heads * group, 40  # 40: no whole number of vector pairs
    cache = KVCache(of_one_layer(kv_heads, group, d), slots=1, capacity=n_keys)
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


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(
    simd=st.sampled_from([name for name, lacks in simd_variants().items() if lacks is None]),
    parts=st.lists(st.tuples(st.integers(0, 60) | st.integers(100, 270), st.integers(0, 30)), min_size=1, max_size=3),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 5, 33]),
    head_dim=st.sampled_from([8, 20, 64]),
    window=st.sampled_from([None, 1, 7, 40, 150]),
    dtype=st.sampled_from(["float32", "float16", "int8"]),
    page_size=st.sampled_from([1, 5, 16, 300]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_prompt_gives_what_its_tokens_give_one_by_one(
    simd, parts, kv_heads, group, head_dim, window, dtype, page_size, seed
):
    """`parts`: of each sequence, the first position and how many tokens of it are in the batch."""
    heads = kv_heads * group
    config = of_one_layer(kv_heads, group, head_dim)
    be = CythonBackend(threads=2, simd=simd)
    cache = be.new_cache(config, CacheSpec(len(parts), 300, dtype, page_size))
    generator = np.random.default_rng(seed)
    for slot in range(len(parts)):
        keys, values = (generator.standard_normal((300, kv_heads, head_dim), dtype=np.float32) for _ in range(2))
        cache.append(0, TokenBatch.of([(slot, 0, range(300))]), keys, values)
    batch = TokenBatch.of([(slot, first, range(count)) for slot, (first, count) in enumerate(parts)])
    q = generator.standard_normal((len(batch), heads, head_dim), dtype=np.float32) * 3
    together = be.attention(q, cache, batch, 0, window)
    for i in range(len(batch)):
        alone = TokenBatch(*(array[i : i + 1] for array in (batch.tokens, batch.positions, batch.slots)))
        np.testing.assert_array_equal(be.attention(q[i : i + 1], cache, alone, 0, window)[0], together[i])


@pytest.mark.skipif(simd_variants().get("amx", "unknown here") is not None, reason="no AMX")
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "parts", "window", "dtype"),
    [
        (5, 4, 128, [(0, 300)], None, "float32"),  # 2B-4T's heads
        (1, 3, 64, [(0, 260)], None, "float16"),  # SmolLM2's
        (2, 2, 256, [(70, 200)], None, "int8"),
        (2, 5, 80, [(40, 1), (0, 200), (3, 2), (100, 190)], None, "float32"),  # prompts between single tokens
        (1, 4, 96, [(200, 300)], 170, "float32"),
    ],
)
@pytest.mark.parametrize("scale", [1, 6])
@pytest.mark.parametrize("threads", [1, 2])
def test_tiles_give_the_bits_of_avx512(kv_heads, group, head_dim, parts, window, dtype, scale, threads):
    """Prompts long enough to be computed from slices on AMX's tiles (attention_amx.h)."""
    generator = rng(kv_heads, group, head_dim, scale)
    length = max(first + count for first, count in parts)
    shape = (length, kv_heads, head_dim)
    batch = TokenBatch.of([(slot, first, range(count)) for slot, (first, count) in enumerate(parts)])
    rows = [[generator.standard_normal(shape, dtype=np.float32) for _ in range(2)] for _ in parts]
    q = generator.standard_normal((len(batch), kv_heads * group, head_dim), dtype=np.float32) * np.float32(scale)
    outputs = []
    for simd in ("amx", "avx512"):
        be = CythonBackend(threads=threads, simd=simd)
        cache = be.new_cache(of_one_layer(kv_heads, group, head_dim), CacheSpec(len(parts), length, dtype, 16))
        for slot, (keys, values) in enumerate(rows):
            cache.append(0, TokenBatch.of([(slot, 0, range(length))]), keys, values)
        outputs.append(be.attention(q, cache, batch, 0, window))
    np.testing.assert_array_equal(outputs[0], outputs[1])
