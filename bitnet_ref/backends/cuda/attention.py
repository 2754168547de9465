"""Host side of `kernels/cuda/attention.cu`: attention over the pages of a cache; and the tables of RoPE."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...config import RopeConfig
from ...layers import rope_tables
from .cache import DeviceBatch, DeviceKVCache
from .rows import take_both
from .workspace import Workspace

FILE = "attention.cu"
CHUNK = 128  # attention.cu: keys a block
BLOCK = 128
SCORES_BYTES = 256 << 20  # of one call: a long prompt is taken in parts
TOKENS_IN_TURN = 8  # of a block, in prompts of at least so many tokens times 4
LEAST_TABLE = 256  # positions of a RoPE table


class Attention:
    """The attention kernels on a device, with the counters that they leave as zeros."""

    def __init__(self, ws: Workspace) -> None:
        self._ws = ws
        self._done = [ws.zeros((4096,), np.int32)]

    def __call__(
        self, q: Any, cache: DeviceKVCache, batch: DeviceBatch, layer: int, window: int | None, longest: int
    ) -> Any:
        """q (N, H, d) -> z (N, H, d). longest: keys that a token may see, at most."""
        ws, (n, heads, _), (kv_heads, head_dim) = self._ws, q.shape, cache.keys.shape[-2:]
        stride = -(-(longest if window is None else min(longest, window)) // CHUNK) * CHUNK
        table = cache.table, cache.table.shape[1], cache.page_size, kv_heads, head_dim
        z = ws.empty(q.shape, np.float32)
        step = max(1, SCORES_BYTES // max(1, heads * stride * 4))
        for start in range(0, n, step):
            part = slice(start, start + step)
            some, here = q[part], (batch.slots[part], batch.positions[part])
            each = TOKENS_IN_TURN if len(some) >= 4 * TOKENS_IN_TURN else 1
            sizes = len(some), each, window or 0, heads
            grid = (stride // CHUNK, kv_heads, -(-len(some) // each))
            scores = ws.scratch((len(some), heads, stride), np.float32)
            arguments = (
                some,
                cache.keys[layer],
                cache.scales_of(layer)[0],
                *here,
                *sizes,
                head_dim**-0.5,
                *table,
                scores,
                stride,
            )
            shared = heads // kv_heads * head_dim * 8
            ws.launch(FILE, f"attention_scores_{cache.kind}", grid, BLOCK, *arguments, shared=shared)
            parts = ws.scratch((len(some), heads, stride // CHUNK, head_dim), np.float64)
            done = self._counters(len(some) * kv_heads)
            last = (
                scores,
                stride,
                0,
                cache.values[layer],
                cache.scales_of(layer)[1],
                *here,
                *sizes,
                *table,
                parts,
                done,
                z[part],
            )
            shared = heads // kv_heads * CHUNK * 4
            ws.launch(FILE, f"attention_values_{cache.kind}", grid, BLOCK, *last, shared=shared)
        return z

    # -- one token, its keys side by side: the primitives --------------------------------------------------------------

    def scores(self, q: Any, keys: Any) -> Any:
        """q (H, d), keys (S, G, d) float32 -> (H, S)"""
        (heads, _), (count, kv_heads, head_dim) = q.shape, keys.shape
        stride = -(-count // CHUNK) * CHUNK
        scores = self._ws.empty((heads, stride), np.float32)
        slot, position, page = self._one_page(count)
        self._ws.launch(
            *(FILE, "attention_scores_float32", (stride // CHUNK, kv_heads, 1), BLOCK, q, keys, None, slot, position),
            *(1, 1, 0, heads, head_dim**-0.5, page, 1, count, kv_heads, head_dim, scores, stride),
            shared=heads // kv_heads * head_dim * 8,
        )
        with self._ws.device.use():
            return scores[:, :count].copy()

    def softmax(self, scores: Any) -> Any:
        """(H, S) -> (H, S)"""
        pattern = self._ws.empty(scores.shape, np.float32)
        self._ws.launch(FILE, "softmax", (len(scores),), BLOCK, scores, scores.shape[1], pattern)
        return pattern

    def values(self, pattern: Any, values: Any) -> Any:
        """pattern (H, S), values (S, G, d) float32 -> (H, d)"""
        (heads, count), (_, kv_heads, head_dim) = pattern.shape, values.shape
        chunks, (slot, position, page) = -(-count // CHUNK), self._one_page(count)
        z = self._ws.empty((heads, head_dim), np.float32)
        parts = self._ws.empty((chunks, heads, head_dim), np.float64)
        self._ws.launch(
            *(FILE, "attention_values_float32", (chunks, kv_heads, 1), BLOCK, pattern, count, 1, values, None),
            *(slot, position, 1, 1, 0, heads, page, 1, count, kv_heads, head_dim),
            *(parts, self._counters(kv_heads), z),
            shared=heads // kv_heads * CHUNK * 4,
        )
        return z

    def _one_page(self, count: int) -> tuple[Any, Any, Any]:
        """Slot 0, its last position, and a table of one page."""
        slot, position, page = np.array([0]), np.array([count - 1]), np.zeros(1, dtype=np.int32)
        return self._ws.upload(slot), self._ws.upload(position), self._ws.upload(page)

    def _counters(self, count: int) -> Any:
        """At least so many. Larger ones do not replace the smaller, which recorded steps have."""
        large = next((done for done in self._done if len(done) >= count), None)
        if large is None:
            large = self._ws.zeros((2 * count,), np.int32)
            self._done.append(large)
        return large


class RopeTables:
    """cos and sin of every position up to `reach`, computed by NumPy and uploaded; a batch gathers its own."""

    def __init__(self, ws: Workspace) -> None:
        self._ws = ws
        self._tables: dict[tuple[RopeConfig, int], tuple[Any, Any, int]] = {}
        self._outgrown: list[Any] = []  # recorded steps of shorter caches read them; together less than the last
        self.reach = 0  # the largest position that was placed; it only grows

    def of(self, positions: Any, rope: RopeConfig, head_dim: int) -> tuple[Any, Any]:
        """cos and sin (N, d/2) of positions (N,) on the device, none beyond `reach`"""
        cos, sin, covered = self._tables.get((rope, head_dim), (None, None, 0))
        if covered <= self.reach:
            self._outgrown += [] if cos is None else [cos, sin]
            covered = max(LEAST_TABLE, 1 << self.reach.bit_length())
            cos, sin = (self._ws.upload(t) for t in rope_tables(np.arange(covered), rope, head_dim, np.float32))
            self._tables[rope, head_dim] = cos, sin, covered
        return take_both(self._ws, cos, sin, head_dim // 2, positions)

    def close(self) -> None:
        self._tables.clear()
        self._outgrown.clear()
