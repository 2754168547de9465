"""Attention of decoded tokens on the CuPy backend, with RoPE and the append in its kernels, or op by op."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from cupy_runs import kernels_asked_for
from helpers import call, of_one_layer, rng

from bitnet_ref.backends.cuda.cache import DeviceBatch, DeviceKVCache
from bitnet_ref.backends.paged_cache import CacheSpec
from bitnet_ref.reference.cache import TokenBatch
from bitnet_ref.reference.config import RopeConfig
from bitnet_ref.reference.model import BlockPlace


@dataclass
class Decoding:
    """Tokens of several sequences of these lengths, each the last of its own, in a cache whose pages lie anyhow."""

    kv_heads: int
    group: int
    head_dim: int
    kind: str
    window: int | None
    page_size: int | None
    lengths: list[int]
    padding: int = 0  # how often the last one is there again, as in a recorded step
    scale: float = 1.0  # of q, k and v

    def run(self, be, fused=True):
        """-> z, keys and values in the cache, the kernels of attention that it took. Not fused: op by op."""
        config, count, capacity = of_one_layer(self.kv_heads, self.group, self.head_dim), len(self.lengths), 300
        dice, sizes = rng(self.head_dim, *self.lengths), (self.kv_heads, self.head_dim)
        pages = None if self.page_size is None else count * -(-capacity // self.page_size)
        spec = CacheSpec(count, capacity, page_size=self.page_size, pages=pages)
        cache = DeviceKVCache(be.ws, config, spec, self.kind)
        for pool in cache.pools:
            be.ws.device.fill(pool, 0xFF)  # what was never written is no number
        if pages is not None:
            cache.page_table[:] = dice.permutation(pages).reshape(cache.page_table.shape)
        for slot, length in enumerate(self.lengths):
            k, v = (dice.standard_normal((length - 1, *sizes)).astype(np.float32) for _ in range(2))
            call(be, "append", cache, 0, TokenBatch.of([(slot, 0, [0] * (length - 1))]), k, v)
        order = dice.permutation(count)
        host = TokenBatch.of([(int(slot), self.lengths[slot] - 1, [0]) for slot in order])
        rows = np.minimum(np.arange(count + self.padding), count - 1)
        sheet = be.ws.upload(np.stack([host.tokens, host.positions, host.slots])[:, rows])
        batch = DeviceBatch(sheet[0], sheet[1], sheet[2], None, host, decodes=True)
        heads = self.kv_heads * self.group, self.kv_heads, self.kv_heads
        shapes = [(count, n, self.head_dim) for n in heads]
        q, k, v = (be.ws.upload((self.scale * dice.standard_normal(s)).astype(np.float32)[rows]) for s in shapes)
        with pytest.MonkeyPatch.context() as patch:
            names = kernels_asked_for(patch, be.ws.device)
            rope = be.rope_tables(batch.positions, RopeConfig(), self.head_dim)
            if fused:
                z = be._attend_new(q, k, v, BlockPlace(rope, batch, cache, 0), self.window)
            else:
                q, k = be.rope(q, k, *rope)
                be.append(cache, 0, batch, k, v)
                z = be.attention(q, cache, batch, 0, self.window)
            z = be.to_host(z)
        return z, cache.stored(0, host), [name for name in names if name.startswith("attention")]


def fused_kernels(kind, group=1):
    return [f"attention_append_scores_{kind}", f"attention_values_{1 if group <= 8 else 4}_{kind}"]


def same_bits(found, expected):
    for mine, theirs in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        np.testing.assert_array_equal(mine.view(np.uint32), theirs.view(np.uint32))
