"""The KV cache on a device: the same pages and tables, in the device's memory; and a batch whose arrays are there."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ...errors import ShapeError
from ...reference.cache import KVCache, TokenBatch
from ...reference.config import ModelConfig
from ...reference.layers import Array, Floats
from ...system.lazy import lazy_property
from ..paged_cache import CacheSpec, EngineKVCache, PagedKVCache, layers_with_keys, widen
from .device import DeviceArray
from .rows import threads_of
from .workspace import Workspace

STORED_AS = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "int8": np.int8}  # bfloat16: its bits
BLOCK = 128
ROUND_CAPACITY_TO = 256  # tokens: caches of about the same length then have the same shape, and share recorded steps


@dataclass(frozen=True, eq=False)
class DeviceBatch(TokenBatch):
    """A batch whose arrays are on the device.

    host: the batch it was made from; None in a recorded step, which serves many.
    decodes: whether each token belongs to another sequence.
    """

    host: TokenBatch | None = None
    decodes: bool = False

    @property
    def extent(self) -> tuple[int, int]:
        return self.on_host.extent

    @property
    def on_host(self) -> TokenBatch:
        assert self.host is not None
        return self.host

    @lazy_property
    def has_runs(self) -> bool:
        """Whether tokens of one sequence follow each other, as in a prompt. False in a recorded step."""
        if self.host is None:
            return False
        slots, positions = self.host.slots, self.host.positions
        return bool(np.any((slots[1:] == slots[:-1]) & (positions[1:] == positions[:-1] + 1)))

    @classmethod
    def place(cls, ws: Workspace, batch: TokenBatch) -> DeviceBatch:
        """The batch on the device."""
        if isinstance(batch, DeviceBatch):
            return batch
        sheet = ws.upload(np.stack([batch.tokens, batch.positions, batch.slots]).astype(np.int64))
        rows = None if batch.wanted is None else ws.upload(np.asarray(batch.wanted, dtype=np.int64))
        return cls(sheet[0], sheet[1], sheet[2], rows, batch, decodes(batch))


def decodes(batch: TokenBatch) -> bool:
    """Whether each of its tokens belongs to another sequence."""
    return len(set(batch.slots.tolist())) == len(batch)


@dataclass(eq=False)
class Storage:
    """The device arrays of a cache, and the decoding steps that were recorded over these arrays (steps.py)."""

    arrays: list[Any] = field(default_factory=list)
    steps: dict[Any, Any] = field(default_factory=dict)


class DeviceKVCache(PagedKVCache):
    """`keys` and `values` are device arrays. `page_table` stays on the host with its owner and is copied when it has
    changed. `visible` and `stored`, for recorders, return NumPy arrays.

    The arrays and recorded steps of a dropped cache are taken over by the next one of the same shape: a new text of
    about the same length then needs no new recording.
    """

    def __init__(self, ws: Workspace, config: ModelConfig, spec: CacheSpec, dtype: str) -> None:
        self._ws, self.kind = ws, dtype
        if spec.page_size is None:  # one page per slot
            spec = replace(spec, page_size=max(1, -(-spec.capacity // ROUND_CAPACITY_TO)) * ROUND_CAPACITY_TO)
        assert spec.page_size is not None
        sizes = len(layers_with_keys(config)), config.num_key_value_heads, config.head_dim
        shape = *sizes, spec.slots, spec.page_size, spec.pages, -(-spec.capacity // spec.page_size), dtype
        storage = ws.shelf.take(shape)
        if storage is None:
            ws.device.trim()  # as before a step is recorded
            storage = Storage()
        self._reused = list(storage.arrays)
        super().__init__(config, spec, np.dtype(STORED_AS[dtype]))
        self.table = self._empty(self.page_table.shape, self.page_table.dtype)
        ws.device.copy(self.table, np.ascontiguousarray(self.page_table))
        self._copied_table = self.page_table.copy()
        storage.arrays = [*self.pools, self.table]
        self.steps = storage.steps
        weakref.finalize(self, ws.shelf.put, shape, storage)

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        return self._reused.pop(0) if self._reused else self._ws.make(shape, dtype)

    @property
    def reach(self) -> int:
        """Positions that the tables have room for: at least the capacity, and the same for all caches of this shape."""
        pages: int = self.page_table.shape[1]
        return pages * self.page_size

    def pools_of(self, layer: int) -> tuple[DeviceArray, DeviceArray]:
        """Its keys and values."""
        return self.keys[self.row_of[layer]], self.values[self.row_of[layer]]

    def scales_of(self, layer: int) -> tuple[DeviceArray | None, DeviceArray | None]:
        """The scales of keys and of values of an int8 cache; else None."""
        if self.key_scales is None or self.value_scales is None:
            return None, None
        return self.key_scales[self.row_of[layer]], self.value_scales[self.row_of[layer]]

    def page_arguments(self) -> tuple[Any, ...]:
        """The kernels' parameters for `Pages` (rope.cuh)."""
        return self.table, self.table.shape[1], self.page_size, *self.keys.shape[-2:]

    # -- checks before a launch: a kernel would write and read anywhere ------------------------------------------------

    def copy_table(self) -> None:
        """Bring the device's copy of the page table up to date. Its place in memory stays."""
        if not self.is_fixed and not np.array_equal(self._copied_table, self.page_table):
            self._copied_table[:] = self.page_table
            self._ws.device.copy(self.table, self._copied_table)

    def check_writes(self, batch: TokenBatch) -> None:
        """Raises ShapeError unless every token of the batch has a place here; then copies the page table."""
        self.check_extent(batch)
        if not self.is_fixed:
            self.places_of(batch.on_host.slots, batch.on_host.positions)
            self.copy_table()

    def check_reads(self, batch: TokenBatch, window: int | None) -> None:
        """Raises ShapeError unless there is a page for every key that the batch's tokens see."""
        self.check_extent(batch)
        host = batch.on_host
        first = np.zeros_like(host.positions) if window is None else np.maximum(0, host.positions - window + 1)
        if self.is_fixed or self._has_pages(host, first):
            return
        for slot in np.unique(host.slots):  # one by one: `pages_of` names the place that is missing
            mine = host.slots == slot
            self.pages_of(int(slot), int(first[mine].min()), int(host.positions[mine].max()) + 1)

    def check_steps(self, batch: TokenBatch, steps: int, left: NDArray[np.int64], window: int | None) -> int:
        """How many of so many steps in a row have a page for each of their tokens; then copies the page table.

        left (N,): a sequence stands still after so many. Raises ShapeError as `check_reads`, and beyond the capacity.
        """
        self.check_reads(batch, window)
        positions = batch.positions + np.minimum(np.arange(steps)[:, None], left - 1)  # (steps, N)
        self.check_extent(TokenBatch(batch.tokens, positions[-1], batch.slots))
        if self.is_fixed:
            return steps
        self.copy_table()
        pages = self.page_table[batch.slots, positions // self.page_size]
        has_pages = ((pages >= 0) & (pages < self.pages)).all(axis=1)
        return steps if has_pages.all() else int(has_pages.argmin())

    def _has_pages(self, batch: TokenBatch, first: NDArray[np.int64]) -> bool:
        """Whether there is a page for all positions from `first` to the token's own."""
        begin, last = first // self.page_size, batch.positions // self.page_size
        pages = self.page_table[batch.slots, : int(last.max(initial=-1)) + 1]
        index = np.arange(pages.shape[1])
        unread = (index < begin[:, None]) | (index > last[:, None])
        return bool((unread | ((pages >= 0) & (pages < self.pages))).all())

    # -- writing -------------------------------------------------------------------------------------------------------

    def append(self, layer: int, batch: TokenBatch, k: Floats, v: Floats) -> None:
        """Write k and v (N, G, d) of the batch's tokens. All are device arrays."""
        ws, n, (kv_heads, head_dim) = self._ws, len(batch), self.keys.shape[-2:]
        self.begin_append(batch, k, v)
        arguments = k, v, batch.slots, batch.positions, *self.page_arguments(), *self.pools_of(layer)
        if self.kind == "int8":
            arguments = *arguments, *self.scales_of(layer)
            ws.launch("rope.cu", "append_int8", (kv_heads, n, 2), threads_of(head_dim), *arguments, ws.trouble)
        else:
            grid = -(-kv_heads * head_dim // BLOCK), n
            ws.launch("rope.cu", f"append_{self.kind}", grid, BLOCK, *arguments, ws.trouble)

    def rope_append(
        self,
        layer: int,
        batch: DeviceBatch,
        q: DeviceArray,
        k: DeviceArray,
        v: DeviceArray,
        rope: tuple[DeviceArray, DeviceArray],
    ) -> DeviceArray:
        """Rotate q and k, and write k and v, in one launch.   q (N, H, d) -> q (N, H, d). Not for int8."""
        ws, n, heads, (kv_heads, head_dim) = self._ws, len(batch), q.shape[1], self.keys.shape[-2:]
        self.begin_append(batch, k, v)
        rotated = ws.empty(q.shape, np.float32)
        grid = (-(-(heads + kv_heads) * (head_dim // 2) // BLOCK), n)
        arguments = q, k, v, *rope, batch.slots, batch.positions, heads, *self.page_arguments()
        to = rotated, *self.pools_of(layer), ws.trouble
        ws.launch("rope.cu", f"rope_append_{self.kind}", grid, BLOCK, *arguments, *to)
        return rotated

    def begin_append(self, batch: TokenBatch, k: DeviceArray, v: DeviceArray) -> None:
        """Raises ShapeError unless k and v (N, G, d) fit and, outside a recorded step, the tokens have places."""
        expected = (len(batch), *self.keys.shape[-2:])
        if k.shape != expected or v.shape != expected:
            raise ShapeError("KVCache.append", expected=f"k and v {expected}", got=f"k {k.shape}, v {v.shape}")
        if not self._ws.recording:
            self.check_writes(batch)

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        moves = [(source, target) for source, target in zip(sources, targets, strict=True) if source != target]
        if not moves or length <= 0:
            return
        pieces = []
        for source, target in moves:
            for index, (old, new) in enumerate(
                zip(self.pages_of(source, 0, length), self.pages_of(target, 0, length), strict=True)
            ):
                end = min(self.page_size, length - index * self.page_size)
                pieces += [(pool, int(old), int(new), end) for pool in self.pools]
        with self._ws.device.use():
            rows = [pool[:, old, :end].copy() for pool, old, _, end in pieces]  # all are read before any is written
            for (pool, _, new, end), copied in zip(pieces, rows, strict=True):
                pool[:, new, :end] = copied

    def fill_with_zeros(self) -> None:
        for pool in self.pools:
            self._ws.device.fill(pool, 0)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        with self._ws.device.use():
            super().copy_pages(sources, targets)

    def take_over(self, other: EngineKVCache, length: int) -> None:
        assert isinstance(other, DeviceKVCache)
        for slot in range(self.slots):
            position = 0
            while position < length:  # the longest piece that lies in one page of both caches
                (to,), (at,) = self.places_of(np.array([slot]), np.array([position]))
                (page,), (start,) = other.places_of(np.array([slot]), np.array([position]))
                n = min(length - position, self.page_size - int(at), other.page_size - int(start))
                with self._ws.device.use():
                    for mine, theirs in zip(self.pools, other.pools, strict=True):
                        mine[:, int(to), int(at) : int(at) + n] = theirs[:, int(page), int(start) : int(start) + n]
                position += n

    # -- reading, for recorders: whole pages are copied to the host ----------------------------------------------------

    def stored(self, layer: int, batch: TokenBatch) -> tuple[Floats, Floats]:
        return self._rows(layer, batch.on_host.slots, batch.on_host.positions)

    def visible(self, layer: int, slot: int, position: int, window: int | None) -> tuple[Floats, Floats]:
        positions = np.arange(0 if window is None else max(0, position - window + 1), position + 1)
        return self._rows(layer, np.full(len(positions), slot), positions)

    def _rows(self, layer: int, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Keys and values of those tokens.   -> (n, G, d) float32 on the host, both"""
        pages, offsets = self.places_of(slots, positions)
        results = []
        for pool, scales in zip(self.pools_of(layer), self.scales_of(layer), strict=True):
            out = np.empty((len(pages), *pool.shape[-2:]), dtype=np.float32)
            for page in np.unique(pages):
                here = pages == page
                rows = self._ws.device.to_host(pool[int(page)])[offsets[here]]
                rows = rows.view(ml_dtypes.bfloat16).astype(np.float32) if self.kind == "bfloat16" else rows
                scale = None if scales is None else self._ws.device.to_host(scales[int(page)])[offsets[here]]
                out[here] = widen(rows, scale)
            results.append(out)
        return results[0], results[1]


def on_device(cache: KVCache, batch: TokenBatch) -> tuple[DeviceKVCache, DeviceBatch]:
    """The cache and the batch of a pass on a card: the backend made both."""
    assert isinstance(cache, DeviceKVCache)
    assert isinstance(batch, DeviceBatch)
    return cache, batch
