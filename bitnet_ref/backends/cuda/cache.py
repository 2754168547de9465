"""The KV cache on a card: the same pages and tables; a batch beside it, whose arrays are device arrays."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ...errors import ShapeError
from ...reference.cache import KVCache, TokenBatch
from ...reference.config import ModelConfig
from ..cache_dtypes import widen
from ..cpu.deferred import Rotation, Turned
from .rows import threads_of, value
from .workspace import Workspace

KEPT_AS = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "int8": np.int8}  # bfloat16: its bits
BLOCK = 128
ROUND_CAPACITY_TO = 256  # tokens: caches of about the same length then have the same shape, and share recorded steps


@dataclass(frozen=True, eq=False)
class DeviceBatch(TokenBatch):
    """A batch whose arrays are on the device. `host` is what it was made of."""

    host: TokenBatch | None = None

    @property
    def extent(self) -> tuple[int, int]:
        assert self.host is not None
        return self.host.extent

    @cached_property
    def has_runs(self) -> bool:
        """Whether tokens of one sequence follow each other, as in a prompt. Of a recorded step nobody can say: no."""
        if self.host is None:
            return False
        slots, positions = self.host.slots, self.host.positions
        return bool(np.any((slots[1:] == slots[:-1]) & (positions[1:] == positions[:-1] + 1)))

    @classmethod
    def placed(cls, ws: Workspace, batch: TokenBatch) -> DeviceBatch:
        """The batch on the device, if it is not there yet. Wanting every token, in order, is wanting no choice."""
        if isinstance(batch, DeviceBatch):
            return batch
        sheet = ws.upload(np.stack([batch.tokens, batch.positions, batch.slots]).astype(np.int64))
        rows = None if batch.all_wanted else ws.upload(np.asarray(batch.wanted, dtype=np.int64))
        return cls(sheet[0], sheet[1], sheet[2], rows, batch)


def decodes(batch: TokenBatch) -> bool:
    """Whether each of its tokens is of another sequence."""
    return len(set(batch.slots.tolist())) == len(batch)


@dataclass(eq=False)
class Storage:
    """The device arrays of a cache, and the decoding steps that were recorded over these very arrays (steps.py)."""

    arrays: list[Any] = field(default_factory=list)
    steps: dict[Any, Any] = field(default_factory=dict)


class DeviceKVCache(KVCache):
    """`keys` and `values` are device arrays; `page_table` stays with its owner on the host and is copied when it has
    changed. `visible` and `stored`, which recorders ask, give NumPy arrays.

    What a dropped cache leaves, its arrays and recorded steps, the next one of the same shape takes over: a new text of
    about the same length then needs no new record. What lies behind a token that was decoded is nobody's: a step that
    the device begins by itself (steps.py) may write there.
    """

    changes: int  # how often anything but a step that went ahead (steps.py) may have written to it
    _puts_off: bool
    _waiting: tuple[int, DeviceBatch, Any, Any] | None  # what `append` was told of a token: layer, batch, k, v

    def __init__(
        self,
        ws: Workspace,
        config: ModelConfig,
        slots: int,
        capacity: int,
        dtype: str = "float32",
        *,
        page_size: int | None = None,
        pages: int | None = None,
    ) -> None:
        self._ws, self.kind = ws, dtype
        if page_size is None and pages is None:
            page_size = max(1, -(-capacity // ROUND_CAPACITY_TO)) * ROUND_CAPACITY_TO  # one page a slot
        sizes = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        shape = *sizes, slots, page_size, pages, -(-capacity // (page_size or 1)), dtype
        storage = ws.shelf.take(shape)
        if storage is None:
            ws.device.trim()  # as before a step is recorded
            storage = Storage()
        self._left = list(storage.arrays)
        super().__init__(config, slots, capacity, KEPT_AS[dtype], page_size=page_size, pages=pages)
        self.table = self._empty(self.page_table.shape, self.page_table.dtype)
        ws.device.copy(self.table, np.ascontiguousarray(self.page_table))
        self._copied = self.page_table.copy()
        storage.arrays = [*self._pools, self.table]
        self.steps = storage.steps
        self.changes, self._puts_off, self._waiting = 0, False, None
        weakref.finalize(self, ws.shelf.put, shape, storage)

    @classmethod
    def of(cls, ws: Workspace, host: KVCache) -> DeviceKVCache:
        """A copy of a cache in the host's memory."""
        self = cls.__new__(cls)
        self._ws, self.kind = ws, host.keys.dtype.name
        self.slots, self.capacity, self.page_size, self.pages = host.slots, host.capacity, host.page_size, host.pages
        self._fixed, self.page_table = host._fixed, host.page_table
        self.keys, self.values = ws.upload(host.keys), ws.upload(host.values)
        self.key_scales, self.value_scales = ws.upload(host.key_scales), ws.upload(host.value_scales)
        self.table, self._copied, self.steps = ws.upload(host.page_table), host.page_table.copy(), {}
        self.changes, self._puts_off, self._waiting = 0, False, None
        return self

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype) -> NDArray:
        return self._left.pop(0) if self._left else self._ws.make(shape, dtype)

    @property
    def reach(self) -> int:
        """Positions that the tables have room for: at least the capacity, and of all caches of this shape the same."""
        return self.page_table.shape[1] * self.page_size

    def copy_table(self) -> None:
        """Bring the device's copy of the page table up to date. Its place in memory stays."""
        if not self._fixed and not np.array_equal(self._copied, self.page_table):
            self.changes += 1
            self._copied[:] = self.page_table
            self._ws.device.copy(self.table, self._copied)

    def has_room(self, slots: NDArray, positions: NDArray) -> bool:
        """Whether there is a place for each of these tokens, by the device's copy of the page table."""
        if int(positions.max()) >= self.reach:
            return False
        return bool((self._copied[slots, positions // self.page_size] >= 0).all())

    def check(self, batch: TokenBatch, window: int | None = None, reading: bool = False) -> None:
        """Raises ShapeError unless every token of the batch has a place here, and every one that it reads: a kernel
        would write and read anywhere."""
        self.check_extent(batch)
        host = batch.host if isinstance(batch, DeviceBatch) else batch
        assert host is not None
        if self._fixed:
            return
        self._places(host.slots, host.positions)
        if not reading or self._reads_pages_only(host, window):
            return
        for slot in np.unique(host.slots):  # one by one, which names the place that is missing
            mine = host.positions[host.slots == slot]
            first = 0 if window is None else max(0, int(mine.min()) - window + 1)
            self.pages_of(int(slot), first, int(mine.max()) + 1)

    def _reads_pages_only(self, batch: TokenBatch, window: int | None) -> bool:
        """Whether there is a page for all that the tokens read."""
        first = np.zeros_like(batch.positions) if window is None else np.maximum(0, batch.positions - window + 1)
        begin, last = first // self.page_size, batch.positions // self.page_size
        pages = self.page_table[batch.slots, : int(last.max(initial=-1)) + 1]
        index = np.arange(pages.shape[1])
        unread = (index < begin[:, None]) | (index > last[:, None])
        return bool((unread | ((pages >= 0) & (pages < self.pages))).all())

    @contextmanager
    def putting_off(self, batch: TokenBatch) -> Iterator[None]:
        """In the pass of a batch of decoded tokens, each of another sequence, their keys and values wait for the
        attention that reads them: its kernel turns them and takes them in (`taken_in`). Whoever else asks for them
        finds them in the cache. Of one sequence, a token would read what another block has yet to write."""
        self._puts_off = self.kind != "int8" and decodes(batch)
        try:
            yield
            self.settle()
        finally:
            self._puts_off, self._waiting = False, None

    def settle(self) -> None:
        """What waits goes into the cache now."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._append(*waiting)

    def taken_in(self, layer: int, rotation: Rotation) -> NDArray | None:
        """v, if these are the key and value that wait, which the caller is to take in. Else None: what waits stays."""
        if self._waiting is not None and self._waiting[0] == layer and self._waiting[2].rotation is rotation:
            v, self._waiting = self._waiting[3], None
            return v
        return None

    def append(self, layer: int, batch: TokenBatch, k: NDArray, v: NDArray) -> None:
        self.changes += 1
        self.settle()
        expected = (len(batch), *self.keys.shape[-2:])
        if k.shape != expected or v.shape != expected:
            raise ShapeError("KVCache.append", expected=f"k and v {expected}", got=f"k {k.shape}, v {v.shape}")
        ws, batch, v = self._ws, DeviceBatch.placed(self._ws, batch), value(self._ws, self._ws.upload(v))
        if not ws.recording and (layer == 0 or not self._fixed):
            self.check(batch)
            self.copy_table()
        unturned = isinstance(k, Turned) and k.rotation.q_turned is None
        if self._puts_off and unturned:
            self._waiting = layer, batch, k, v
            return
        self._append(layer, batch, k, v)

    def _append(self, layer: int, batch: DeviceBatch, k: Any, v: Any) -> None:
        ws, n, (kv_heads, head_dim) = self._ws, len(batch), self.keys.shape[-2:]
        table = self.table, self.table.shape[1], self.page_size, kv_heads, head_dim
        to = self.keys[layer], self.values[layer]
        if self.kind == "int8":
            rows = value(ws, ws.upload(k)), v, batch.slots, batch.positions, *table, *to, *self.scales_of(layer)
            ws.launch("rope.cu", "append_int8", (kv_heads, n, 2), threads_of(head_dim), *rows, ws.trouble)
            return
        if isinstance(k, Turned) and k.rotation.q_turned is None:  # turned on its way in, and the q beside it
            r, heads = k.rotation, k.rotation.q.shape[1]
            r.q_turned = ws.empty(r.q.shape, np.float32)
            grid = (-(-(heads + kv_heads) * (head_dim // 2) // BLOCK), n)
            arguments = r.q, r.k, v, r.cos, r.sin, batch.slots, batch.positions, heads, *table, r.q_turned, *to
            ws.launch("rope.cu", f"rope_append_{self.kind}", grid, BLOCK, *arguments, ws.trouble)
            return
        grid = (-(-kv_heads * head_dim // BLOCK), n)
        flat = value(ws, ws.upload(k)), v, batch.slots, batch.positions, *table, *to
        ws.launch("rope.cu", f"append_{self.kind}", grid, BLOCK, *flat, ws.trouble)

    def scales_of(self, layer: int) -> tuple[Any, Any]:
        """Of keys and of values, where the cache is int8; else None."""
        if self.key_scales is None or self.value_scales is None:
            return None, None
        return self.key_scales[layer], self.value_scales[layer]

    def stored(self, layer: int, batch: TokenBatch) -> tuple[NDArray, NDArray]:
        self.settle()
        return self._rows(layer, batch.slots, batch.positions)

    def visible(self, layer: int, slot: int, position: int, window: int | None) -> tuple[NDArray, NDArray]:
        self.settle()
        positions = np.arange(0 if window is None else max(0, position - window + 1), position + 1)
        return self._rows(layer, np.full(len(positions), slot), positions)

    def _rows(self, layer: int, slots: NDArray, positions: NDArray) -> tuple[NDArray, NDArray]:
        """Keys and values there, (n, G, d) float32 on the host: whole pages cross the bus, for recorders only."""
        pages, offsets = self._places(slots, positions)
        found = []
        for pool, scales in zip((self.keys[layer], self.values[layer]), self.scales_of(layer), strict=True):
            out = np.empty((len(pages), *pool.shape[-2:]), dtype=np.float32)
            for page in np.unique(pages):
                here = pages == page
                kept = self._ws.device.to_host(pool[int(page)])[offsets[here]]
                kept = kept.view(ml_dtypes.bfloat16).astype(np.float32) if self.kind == "bfloat16" else kept
                scale = None if scales is None else self._ws.device.to_host(scales[int(page)])[offsets[here]]
                out[here] = widen(kept, scale)
            found.append(out)
        return found[0], found[1]

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        self.changes += 1
        moves = [(source, target) for source, target in zip(sources, targets, strict=True) if source != target]
        if not moves or length <= 0:
            return
        pieces = []
        for source, target in moves:
            for index, (old, new) in enumerate(
                zip(self.pages_of(source, 0, length), self.pages_of(target, 0, length), strict=True)
            ):
                end = min(self.page_size, length - index * self.page_size)
                pieces += [(pool, int(old), int(new), end) for pool in self._pools]
        with self._ws.device.use():
            held = [pool[:, old, :end].copy() for pool, old, _, end in pieces]  # all at the same time: read, then write
            for (pool, _, new, end), rows in zip(pieces, held, strict=True):
                pool[:, new, :end] = rows

    def fill_with_zeros(self) -> None:
        self.changes += 1
        for pool in self._pools:
            self._ws.device.fill(pool, 0)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.changes += 1
        with self._ws.device.use():
            super().copy_pages(sources, targets)

    def take_over(self, other: KVCache, length: int) -> None:
        assert isinstance(other, DeviceKVCache)
        self.changes += 1
        for slot in range(self.slots):
            position = 0
            while position < length:  # the longest piece that lies in one page here and there
                (to,), (at,) = self._places(np.array([slot]), np.array([position]))
                (page,), (start,) = other._places(np.array([slot]), np.array([position]))
                n = min(length - position, self.page_size - int(at), other.page_size - int(start))
                with self._ws.device.use():
                    for mine, theirs in zip(self._pools, other._pools, strict=True):
                        mine[:, int(to), int(at) : int(at) + n] = theirs[:, int(page), int(start) : int(start) + n]
                position += n
