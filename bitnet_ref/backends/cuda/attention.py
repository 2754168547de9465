"""Host side of `kernels/cuda/attention.cu` and `attention_decode.cu`: attention over the pages of a cache; and the
tables of RoPE."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...reference.config import RopeConfig
from ...reference.layers import rope_tables
from ..cpu.deferred import Turned
from .cache import DeviceBatch, DeviceKVCache
from .rows import take_both, value
from .workspace import Workspace

FILE, DECODE_FILE = "attention.cu", "attention_decode.cu"
BLOCK = 128  # attention.cu: the threads of a block, whose warps
WARPS = 4
CHUNK, STEP, TILE = 128, 16, 8  # attention.cu: keys a block; what a product sums over; its rows
MOST_TILES = 4  # attention.cu: of rows, at once
SHARED_BYTES = 48 << 10  # of a block
PITCH = CHUNK + 4  # attention.cu: of the pattern
BYTES_DECODED = {"float32": 4, "float16": 2, "bfloat16": 2}  # attention_decode.cu: of a number, by the cache
MOST_DECODED_DIM = 128  # attention_decode.cu
SCORES_BYTES = 256 << 20  # of one call: a long prompt is taken in parts
PARTS_BYTES = 64 << 20  # of a prompt's z: more, and a block takes all chunks
ENOUGH_BLOCKS = 128  # to keep a card busy without cutting keys into chunks: it has about as many multiprocessors
LEAST_TABLE = 256  # positions of a RoPE table


def chunks_seen(keys: int, window: int | None) -> int:
    """Of the most keys that a token may see, at most; a window begins anywhere in its first chunk."""
    return -(-(keys if window is None else min(keys, window + CHUNK - 1)) // CHUNK)


def pitch_of(head_dim: int) -> int:
    """Doubles from one query to the next in shared memory."""
    return -(-head_dim // STEP) * STEP + 2


def has_decode_kernels(kind: str, head_dim: int) -> bool:
    """Whether attention_decode.cu covers a cache of that kind, in any pages, and heads of that size, at most TILE of
    them a kv head: of tokens whose keys wait to be taken in (`DeviceKVCache.putting_off`), with any window.

    Only of such: of tokens of one sequence it would read a key before the kernel before has written it."""
    return kind in BYTES_DECODED and head_dim % STEP == 0 and head_dim <= MOST_DECODED_DIM


def decode_shared_bytes(kind: str, head_dim: int) -> int:
    """What attention_decode.cu keeps a chunk of keys or values in: `kept_at` there says where."""
    return CHUNK * (head_dim + STEP) * BYTES_DECODED[kind] + CHUNK // 4 * 32


@dataclass(frozen=True, eq=False)
class Reading:
    """The tokens of a call and where their keys lie: what both kernels are told."""

    kind: str  # what the cache keeps
    slots: Any
    positions: Any
    count: int
    each: int  # tokens of a block
    window: int  # 0: none
    heads: int
    pages: tuple[Any, ...]  # attention.cu: the fields of Pages, of which the last two are kv heads and head_dim

    @property
    def tiles(self) -> int:
        """Of rows that a block takes at once: one while decoding."""
        return 1 if self.each * (self.heads // self.pages[-2]) <= TILE else MOST_TILES

    @property
    def tokens(self) -> tuple[Any, ...]:
        return self.slots, self.positions, self.count, self.each

    def grid(self, chunks: int) -> tuple[int, int, int]:
        return chunks, self.pages[-2], -(-self.count // self.each)


class Attention:
    """The attention kernels on a device, with the counters that they leave as zeros."""

    def __init__(self, ws: Workspace, decode_kernels: bool = True) -> None:
        """decode_kernels: take those of attention_decode.cu where they cover what is asked; no bit depends on it."""
        self._ws, self._decode_kernels = ws, decode_kernels
        self._done = [ws.zeros((4096,), np.int32)]

    def __call__(
        self, q: Any, cache: DeviceKVCache, batch: DeviceBatch, layer: int, window: int | None, longest: int
    ) -> Any:
        """q (N, H, d), turned or not -> z (N, H, d). longest: keys that a token may see, at most."""
        ws, (n, heads, head_dim), kv_heads = self._ws, q.shape, cache.keys.shape[-2]
        unturned = None
        if isinstance(q, Turned) and heads // kv_heads <= TILE:
            v, r = cache.taken_in(layer, q.rotation), q.rotation
            unturned = None if v is None else (r.k, v, r.cos, r.sin)
        cache.settle()
        q = q.rotation.q if unturned is not None else value(ws, q)
        z = ws.empty(q.shape, np.float32)
        each = max(1, MOST_TILES * TILE // (heads // kv_heads)) if batch.has_runs else 1
        chunks = chunks_seen(longest, window)
        chunks_of_run = chunks + (window is not None and each > 1)
        pages = cache.table, cache.table.shape[1], cache.page_size, kv_heads, head_dim
        key_scales, value_scales = cache.scales_of(layer)
        step = max(1, SCORES_BYTES // (4 * heads * chunks * CHUNK) // each) * each
        for start in range(0, n, step):
            part = slice(start, start + step)
            slots, positions = batch.slots[part], batch.positions[part]
            some = Reading(cache.kind, slots, positions, len(slots), each, window or 0, heads, pages)
            scores = ws.scratch((some.count, heads, chunks * CHUNK), np.float32)
            if unturned is not None:
                of_part, to = [array[part] for array in (q, *unturned)], (cache.keys[layer], cache.values[layer])
                if self._decode_kernels and has_decode_kernels(cache.kind, head_dim):
                    self._decode(some, of_part, to, scores, z[part], chunks)
                    continue
                self._scores_unturned(some, of_part, to, scores, chunks)
            else:
                self._scores(some, q[part], cache.keys[layer], key_scales, scores, chunks_of_run)
            parts_bytes = chunks_of_run * some.count * heads * head_dim * 8
            if batch.has_runs and (math.prod(some.grid(1)) >= ENOUGH_BLOCKS or parts_bytes > PARTS_BYTES):
                norms = ws.scratch((some.count * heads, 2), np.float64)
                sizes = scores, scores.shape[-1], some.positions, some.count, some.window, heads, norms
                ws.launch(FILE, "attention_normalisers", (-(-some.count * heads // WARPS),), BLOCK, *sizes)
                self._values(some, scores, cache.values[layer], value_scales, z[part], 1, norms=norms)
            else:
                self._values(some, scores, cache.values[layer], value_scales, z[part], chunks_of_run)
        return z

    def _scores(self, some: Reading, q: Any, keys: Any, scales: Any, scores: Any, chunks: int) -> None:
        """q (N, H, d) -> scores (N, H, stride)"""
        pitch = pitch_of(q.shape[-1])
        rows = max(TILE, min(some.tiles * TILE, SHARED_BYTES // (8 * pitch) // TILE * TILE))
        sizes = rows, some.window, some.heads, q.shape[-1] ** -0.5
        self._ws.launch(
            *(FILE, f"attention_scores_{some.tiles}_{some.kind}", some.grid(chunks), BLOCK),
            *(q, keys, scales, *some.tokens, *sizes, *some.pages, scores, scores.shape[-1]),
            shared=rows * pitch * 8,
        )

    def _scores_unturned(
        self, some: Reading, unturned: Sequence[Any], to: tuple[Any, Any], scores: Any, chunks: int
    ) -> None:
        """q (N, H, d), k and v (N, G, d) as they come from their products, cos and sin -> scores (N, H, stride)"""
        head_dim = unturned[0].shape[-1]
        sizes = TILE, some.window, some.heads, head_dim**-0.5
        self._ws.launch(
            *(FILE, f"attention_scores_unturned_{some.kind}", some.grid(chunks), BLOCK),
            *(*unturned, *to, some.slots, some.positions, some.count, *sizes, *some.pages, scores, scores.shape[-1]),
            self._ws.trouble,
            shared=TILE * pitch_of(head_dim) * 8,
        )

    def _decode(
        self, some: Reading, unturned: Sequence[Any], to: tuple[Any, Any], scores: Any, z: Any, chunks: int
    ) -> None:
        """Both kernels, of what `_scores_unturned` is told -> scores (N, H, stride) and z (N, H, d)"""
        head_dim, values = z.shape[-1], to[1]
        grid, shared = some.grid(chunks), decode_shared_bytes(some.kind, head_dim)
        group = some.heads // some.pages[-2]
        places, row = (some.slots, some.positions, some.window, group), (scores, scores.shape[-1])
        self._ws.launch(
            *(DECODE_FILE, f"attention_scores_decode_{some.kind}", grid, BLOCK),
            *(*unturned, *to, *places, head_dim**-0.5, *some.pages, *row, self._ws.trouble),
            shared=shared,
        )
        self._ws.launch(
            *(DECODE_FILE, f"attention_values_decode_{some.kind}", grid, BLOCK),
            *(*row, values, *places, *some.pages, *self._room_for_parts(some, chunks, head_dim), z),
            shared=shared,
        )

    def _room_for_parts(self, some: Reading, chunks: int, head_dim: int) -> tuple[Any, Any]:
        """`parts` and `done` of the kernels that make z, where keys may lie in so many chunks."""
        if chunks == 1:
            return None, None
        parts = self._ws.scratch((some.count, some.heads, chunks, head_dim), np.float64)
        return parts, self._counters(some.count * some.pages[-2])

    def _values(
        self,
        some: Reading,
        scores: Any,
        values: Any,
        scales: Any,
        z: Any,
        chunks: int,
        *,
        norms: Any = None,
        is_pattern: bool = False,
    ) -> None:
        """scores (N, H, stride) -> z (N, H, d).  chunks: 1 where a block takes all that there are."""
        self._ws.launch(
            *(FILE, f"attention_values_{some.tiles}_{some.kind}", some.grid(chunks), BLOCK),
            *(scores, scores.shape[-1], int(is_pattern), norms, values, scales, *some.tokens, some.window, some.heads),
            *(*some.pages, *self._room_for_parts(some, chunks, z.shape[-1]), z),
            shared=some.tiles * TILE * PITCH * 8,
        )

    # -- one token, its keys side by side: the primitives --------------------------------------------------------------

    def scores(self, q: Any, keys: Any) -> Any:
        """q (H, d), keys (S, G, d) float32 -> (H, S)"""
        count, chunks = len(keys), chunks_seen(len(keys), None)
        scores = self._ws.empty((1, len(q), chunks * CHUNK), np.float32)
        self._scores(self._one_token(len(q), *keys.shape), q[None], keys, None, scores, chunks)
        with self._ws.device.use():
            return scores[0, :, :count].copy()

    def softmax(self, scores: Any) -> Any:
        """(H, S) -> (H, S)"""
        pattern = self._ws.empty(scores.shape, np.float32)
        self._ws.launch(FILE, "softmax", (-(-len(scores) // WARPS),), BLOCK, scores, *scores.shape, pattern)
        return pattern

    def values(self, pattern: Any, values: Any) -> Any:
        """pattern (H, S), values (S, G, d) float32 -> (H, d)"""
        heads, count = pattern.shape
        z = self._ws.empty((1, heads, values.shape[-1]), np.float32)
        some = self._one_token(heads, *values.shape)
        self._values(some, pattern, values, None, z, chunks_seen(count, None), is_pattern=True)
        return z[0]

    def _one_token(self, heads: int, count: int, kv_heads: int, head_dim: int) -> Reading:
        """The last of `count` tokens that lie in one page."""
        slot, position, table = np.array([0]), np.array([count - 1]), np.zeros(1, dtype=np.int32)
        pages = self._ws.upload(table), 1, count, kv_heads, head_dim
        return Reading("float32", self._ws.upload(slot), self._ws.upload(position), 1, 1, 0, heads, pages)

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
