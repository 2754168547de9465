"""The kernels read a cache by tokens or by heads: the same bits, and what is appended is where NumPy looks for it."""

import numpy as np
import pytest
from helpers import of_one_layer, rng

from bitnet_ref.backends.cpu.backend import CythonBackend
from bitnet_ref.backends.cpu.extension import _cpu, simd_variants, why_unavailable
from bitnet_ref.backends.cpu.replay import KernelKVCache
from bitnet_ref.backends.paged_cache import CacheSpec, PagedKVCache
from bitnet_ref.reference.cache import TokenBatch

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))


@pytest.mark.parametrize("simd", [name for name, lacks in simd_variants().items() if lacks is None])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_by_heads_and_by_tokens(dtype, simd):
    config, spec, dice = of_one_layer(3, 2, 20), CacheSpec(2, 40, dtype, 16, 6), rng(5)
    be = CythonBackend(threads=2, simd=simd)
    by_heads, by_tokens = (kind(config, spec, np.dtype(dtype)) for kind in (KernelKVCache, PagedKVCache))
    assert not by_heads.keys.flags.c_contiguous
    assert by_tokens.keys.flags.c_contiguous
    batch, z = TokenBatch.of([(0, 0, [0] * 37), (1, 0, [0] * 20)]), []
    k, v = (dice.standard_normal((57, 3, 20), dtype=np.float32) for _ in range(2))
    q = dice.standard_normal((57, 6, 20), dtype=np.float32)
    for cache in (by_heads, by_tokens):
        cache.page_table[:] = [[4, 0, 3], [2, 5, -1]]
        cache.fill_with_zeros()
        if cache is by_heads:
            be.append(cache, 0, batch, k, v)  # by the kernel; the other by NumPy
        else:
            cache.append(0, batch, k, v)
        z.append(be.attention(q, cache, batch, 0, None))
    for mine, theirs in zip(by_heads.pools, by_tokens.pools, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(*z)


def test_layouts_that_are_neither_are_refused():
    by_heads = np.moveaxis(np.zeros((2, 3, 4, 8), dtype=np.float32), 0, 2)
    _cpu.KVLayer(by_heads, by_heads.copy("K"))
    for keys, values in ((by_heads, by_heads.copy("C")), (by_heads[:, ::2], by_heads[:, ::2])):
        with pytest.raises(ValueError, match=r"KVLayer|contiguous"):
            _cpu.KVLayer(keys, values)
