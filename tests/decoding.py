"""Attention of tokens that are decoded on the CuPy backend, by the kernels for them or by the general ones."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import pytest
from cupy_runs import kernels_asked_for
from helpers import of_one_layer, rng

from bitnet_ref.backends.cuda.attention import Attention
from bitnet_ref.backends.cuda.cache import DeviceBatch, DeviceKVCache
from bitnet_ref.reference.cache import TokenBatch
from bitnet_ref.reference.config import RopeConfig


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

    def run(self, be, decode_kernels=True, put_off=True):
        """-> z, keys and values kept, the kernels of attention that it took"""
        config, count, capacity = of_one_layer(self.kv_heads, self.group, self.head_dim), len(self.lengths), 300
        dice, sizes = rng(self.head_dim, *self.lengths), (self.kv_heads, self.head_dim)
        pages = None if self.page_size is None else count * -(-capacity // self.page_size)
        cache = DeviceKVCache(be.ws, config, count, capacity, self.kind, page_size=self.page_size, pages=pages)
        for pool in cache._pools:
            be.ws.device.fill(pool, 0xFF)  # what was never written is no number
        if pages is not None:
            cache.page_table[:] = dice.permutation(pages).reshape(cache.page_table.shape)
        for slot, length in enumerate(self.lengths):
            k, v = (dice.standard_normal((length - 1, *sizes)).astype(np.float32) for _ in range(2))
            cache.append(0, TokenBatch.of([(slot, 0, [0] * (length - 1))]), k, v)
        order = dice.permutation(count)
        host = TokenBatch.of([(int(slot), self.lengths[slot] - 1, [0]) for slot in order])
        be.place(host)  # which sees to it that the tables of RoPE reach so far
        rows = np.minimum(np.arange(count + self.padding), count - 1)
        sheet = be.ws.upload(np.stack([host.tokens, host.positions, host.slots])[:, rows])
        batch = DeviceBatch(sheet[0], sheet[1], sheet[2], None, host)
        heads = self.kv_heads * self.group, self.kv_heads, self.kv_heads
        shapes = [(count, n, self.head_dim) for n in heads]
        q, k, v = (be.ws.upload((self.scale * dice.standard_normal(s)).astype(np.float32)[rows]) for s in shapes)
        with pytest.MonkeyPatch.context() as patch, cache.putting_off(host) if put_off else nullcontext():
            patch.setattr(be, "_attention", Attention(be.ws, decode_kernels))
            names = kernels_asked_for(patch, be.ws.device)
            turned = be.rope(q, k, *be.rope_tables(batch.positions, RopeConfig(), self.head_dim))
            cache.append(0, batch, turned[1], v)
            z = be.to_host(be.attention(turned[0], cache, batch, 0, self.window))
        return z, cache.stored(0, host), [name for name in names if name.startswith("attention")]


def decode_kernels_of(kind):
    return [f"attention_scores_decode_{kind}", f"attention_values_decode_{kind}"]


def same_bits(found, expected):
    for mine, theirs in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        np.testing.assert_array_equal(mine.view(np.uint32), theirs.view(np.uint32))
