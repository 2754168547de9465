"""Host side of `kernels/cuda/attention.cu`: attention over the pages of a cache; and the tables of RoPE."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...reference.config import RopeConfig
from .cache import DeviceBatch, DeviceKVCache
from .device import DeviceArray
from .rows import take_rows_of_two
from .workspace import Workspace

FILE = "attention.cu"
BLOCK = 128  # attention.cu: the threads of a block
WARPS = 4  # and its warps
CHUNK, STEP, TILE = 128, 16, 8  # attention.cu: keys of a block; elements that a product sums over; its rows
MAX_TILES = 4  # attention.cu: tiles of rows at once
SHARED_BYTES = 48 << 10  # of a block
PITCH = CHUNK + 4  # attention.cu: of the pattern
SCORES_BYTES = 256 << 20  # of one call: a long prompt is taken in parts
PARTS_BYTES = 64 << 20  # of a prompt's z: beyond it a block takes all chunks
ENOUGH_BLOCKS = 128  # keep a GPU busy without cutting keys into chunks: it has about as many multiprocessors
MIN_TABLE = 256  # positions of a RoPE table


def chunks_seen(keys: int, window: int | None) -> int:
    """The max number of chunks that a token sees among so many keys; a window begins anywhere in its first chunk."""
    return -(-(keys if window is None else min(keys, window + CHUNK - 1)) // CHUNK)


def pitch_of(head_dim: int) -> int:
    """Doubles from one query to the next in shared memory."""
    return -(-head_dim // STEP) * STEP + 2


@dataclass(frozen=True, eq=False)
class Queries:
    """Some tokens of a call, and where their keys are: parameters of all kernels."""

    part: slice  # of the call's tokens
    kind: str  # the cache's dtype
    slots: DeviceArray
    positions: DeviceArray
    count: int
    each: int  # tokens of a block
    window: int  # 0: none
    heads: int
    pages: tuple[Any, ...]  # the fields of Pages, of which the last two are kv heads and head_dim

    @property
    def tiles(self) -> int:
        """Tiles of rows that a block takes at once: one while decoding."""
        return 1 if self.each * (self.heads // self.pages[-2]) <= TILE else MAX_TILES

    @property
    def tokens(self) -> tuple[Any, ...]:
        return self.slots, self.positions, self.count, self.each

    def grid(self, chunks: int) -> tuple[int, int, int]:
        return chunks, self.pages[-2], -(-self.count // self.each)


class Attention:
    """The attention kernels on a device."""

    def __init__(self, ws: Workspace) -> None:
        self._ws = ws

    def __call__(
        self,
        q: DeviceArray,
        cache: DeviceKVCache,
        batch: DeviceBatch,
        layer: int,
        window: int | None,
        longest: int,
        new: tuple[Any, Any, Any, Any] | None = None,
    ) -> DeviceArray:
        """q (N, H, d) -> z (N, H, d). longest: max keys that a token may see.

        new: k and v (N, G, d), cos and sin (N, d/2) of tokens of as many sequences, where q is not rotated yet: RoPE
        and the append are done too. Not for an int8 cache.
        """
        ws, (_, heads, head_dim), kv_heads = self._ws, q.shape, cache.keys.shape[-2]
        z = ws.empty(q.shape, np.float32)
        each = max(1, MAX_TILES * TILE // (heads // kv_heads)) if batch.has_runs and new is None else 1
        chunks = chunks_seen(longest, window)
        stride = chunks * CHUNK
        chunks += window is not None and each > 1  # the windows of a run may begin in two chunks
        (keys, values), (key_scales, value_scales) = cache.pools_of(layer), cache.scales_of(layer)
        for some in self._parts(cache, batch, heads, each, window, stride):
            scores = ws.scratch((some.count, heads, stride), np.float32)
            if new is not None:
                self._append_scores(some, q, new, (keys, values), scores, chunks)
            else:
                self._scores(some, q[some.part], keys, key_scales, scores, chunks)
            parts_bytes = chunks * some.count * heads * head_dim * 8
            norms, blocks = None, chunks
            if batch.has_runs and (math.prod(some.grid(1)) >= ENOUGH_BLOCKS or parts_bytes > PARTS_BYTES):
                norms, blocks = ws.scratch((some.count * heads, 2), np.float64), 1
                sizes = scores, stride, some.positions, some.count, some.window, heads, norms
                ws.launch(FILE, "attention_normalisers", (-(-some.count * heads // WARPS),), BLOCK, *sizes)
            self._values(some, scores, values, value_scales, z[some.part], blocks, norms)
        return z

    def _parts(
        self, cache: DeviceKVCache, batch: DeviceBatch, heads: int, each: int, window: int | None, stride: int
    ) -> Iterator[Queries]:
        """The tokens of the batch, as many at a time as SCORES_BYTES has room for."""
        step = max(1, SCORES_BYTES // (4 * heads * stride) // each) * each
        window = min(window or 0, 2**31 - 1)  # the kernels' integers
        for start in range(0, len(batch), step):
            part = slice(start, start + step)
            slots, positions, pages = batch.slots[part], batch.positions[part], cache.page_arguments()
            yield Queries(part, cache.kind, slots, positions, len(slots), each, window, heads, pages)

    def _scores(
        self, some: Queries, q: DeviceArray, keys: DeviceArray, scales: Any, scores: DeviceArray, chunks: int
    ) -> None:
        """q (N, H, d) -> scores (N, H, stride)"""
        pitch = pitch_of(q.shape[-1])
        rows = max(TILE, min(some.tiles * TILE, SHARED_BYTES // (8 * pitch) // TILE * TILE))
        sizes = rows, some.window, some.heads, q.shape[-1] ** -0.5
        self._ws.launch(
            *(FILE, f"attention_scores_{some.tiles}_{some.kind}", some.grid(chunks), BLOCK),
            *(q, keys, scales, *some.tokens, *sizes, *some.pages, scores, scores.shape[-1]),
            shared=rows * pitch * 8,
        )

    def _append_scores(
        self, some: Queries, q: DeviceArray, new: tuple[Any, ...], to: tuple[Any, Any], scores: DeviceArray, chunks: int
    ) -> None:
        """`_scores` of q before RoPE; the tokens' keys and values go `to` the cache."""
        tokens = (array[some.part] for array in (q, *new))
        sizes = TILE, some.window, some.heads, q.shape[-1] ** -0.5
        self._ws.launch(
            *(FILE, f"attention_append_scores_{some.kind}", some.grid(chunks), BLOCK),
            *(*tokens, *to, some.slots, some.positions, some.count, *sizes, *some.pages, scores, scores.shape[-1]),
            self._ws.trouble,
            shared=TILE * pitch_of(q.shape[-1]) * 8,
        )

    def _values(
        self,
        some: Queries,
        scores: DeviceArray,
        values: DeviceArray,
        scales: Any,
        z: DeviceArray,
        chunks: int,
        norms: Any,
    ) -> None:
        """scores (N, H, stride) -> z (N, H, d).  chunks: 1 where a block takes all chunks."""
        self._ws.launch(
            *(FILE, f"attention_values_{some.tiles}_{some.kind}", some.grid(chunks), BLOCK),
            *(scores, scores.shape[-1], norms, values, scales, *some.tokens, some.window, some.heads, *some.pages),
            *(*self._room_for_parts(some, chunks, z.shape[-1]), z),
            shared=some.tiles * TILE * PITCH * 8,
        )

    def _room_for_parts(
        self, some: Queries, chunks: int, head_dim: int
    ) -> tuple[DeviceArray | None, DeviceArray | None]:
        """`parts` and `done` of the kernels that compute z from so many chunks."""
        if chunks == 1:
            return None, None
        parts = self._ws.scratch((some.count, some.heads, chunks, head_dim), np.float64)
        return parts, self._ws.counters("attention", some.count * some.pages[-2])


class PositionTables:
    """cos and sin of every position up to `reach`, computed by NumPy and uploaded; a batch gathers its rows."""

    def __init__(self, ws: Workspace) -> None:
        self._ws = ws
        self._tables: dict[tuple[RopeConfig, int], tuple[Any, Any, int]] = {}
        self._outgrown: list[Any] = []  # smaller tables, which recorded steps of shorter caches read
        self.reach = 0  # the largest position so far
        self._placed: DeviceArray | None = None  # positions whose largest is counted in `reach`

    def place(self, batch: DeviceBatch) -> None:
        """Cover the positions of a batch."""
        self.reach, self._placed = max(self.reach, batch.extent[1]), batch.positions

    def of(self, positions: DeviceArray, rope: RopeConfig, head_dim: int) -> tuple[DeviceArray, DeviceArray]:
        """cos and sin (N, d/2) of positions (N,) on the device. Waits for positions of no batch that was placed."""
        if positions is not self._placed and not self._ws.recording:
            self.reach = max(self.reach, int(self._ws.device.to_host(positions).max(initial=0)))
        cos, sin, covered = self._tables.get((rope, head_dim), (None, None, 0))
        if covered <= self.reach:
            self._outgrown += [] if cos is None else [cos, sin]
            covered = max(MIN_TABLE, 1 << self.reach.bit_length())
            cos, sin = (self._ws.upload(table) for table in rope.tables(np.arange(covered), head_dim, np.float32))
            self._tables[rope, head_dim] = cos, sin, covered
        return take_rows_of_two(self._ws, cos, sin, positions)

    def close(self) -> None:
        self._tables.clear()
        self._outgrown.clear()
        self._placed = None
