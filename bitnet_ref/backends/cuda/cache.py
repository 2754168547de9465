"""The KV cache on a card: the same pages and tables; a batch beside it, whose arrays are device arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ...config import ModelConfig
from ...errors import ShapeError
from ...kv_cache import KVCache, TokenBatch
from .rows import Turned, value
from .workspace import Workspace

CACHE_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}  # bfloat16 as its bits
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

    @classmethod
    def placed(cls, ws: Workspace, batch: TokenBatch) -> DeviceBatch:
        """The batch on the device, if it is not there yet. Wanting every token, in order, is wanting no choice."""
        if isinstance(batch, DeviceBatch):
            return batch
        sheet = ws.upload(np.stack([batch.tokens, batch.positions, batch.slots]).astype(np.int64))
        all_wanted = batch.wanted is None or np.array_equal(batch.wanted, np.arange(len(batch)))
        rows = None if all_wanted else ws.upload(np.asarray(batch.wanted, dtype=np.int64))
        return cls(sheet[0], sheet[1], sheet[2], rows, batch)


class DeviceKVCache(KVCache):
    """`keys` and `values` are device arrays; `page_table` stays with its owner on the host and is copied when it has
    changed. `visible` and `stored`, which recorders ask, give NumPy arrays."""

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
        if dtype not in CACHE_DTYPES:
            raise ShapeError("KV cache on cupy", expected=f"dtype {', '.join(CACHE_DTYPES)}", got=dtype)
        self._ws, self.kind = ws, dtype
        if page_size is None and pages is None:
            page_size = max(1, -(-capacity // ROUND_CAPACITY_TO)) * ROUND_CAPACITY_TO  # one page a slot
        super().__init__(config, slots, capacity, CACHE_DTYPES[dtype], page_size=page_size, pages=pages)
        self.table = ws.upload(self.page_table)
        self._copied = self.page_table.copy()
        self.steps: dict[Any, Any] = {}  # recorded decoding steps over these very arrays, see steps.py

    @classmethod
    def of(cls, ws: Workspace, host: KVCache) -> DeviceKVCache:
        """A copy of a cache in the host's memory."""
        self = cls.__new__(cls)
        self._ws, self.kind = ws, host.keys.dtype.name
        self.slots, self.capacity, self.page_size, self.pages = host.slots, host.capacity, host.page_size, host.pages
        self._fixed, self.page_table = host._fixed, host.page_table
        self.keys, self.values = ws.upload(host.keys), ws.upload(host.values)
        self.table, self._copied, self.steps = ws.upload(host.page_table), host.page_table.copy(), {}
        return self

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype) -> NDArray:
        return self._ws.make(shape, dtype)

    def copy_table(self) -> None:
        """Bring the device's copy of the page table up to date. Its place in memory stays."""
        if not self._fixed and not np.array_equal(self._copied, self.page_table):
            self._copied[:] = self.page_table
            self._ws.device.copy(self.table, self._copied)

    def check(self, batch: TokenBatch, window: int | None = None, reading: bool = False) -> None:
        """Raises ShapeError unless every token of the batch has a place here, and every one that it reads: a kernel
        would write and read anywhere."""
        last_slot, last_position = batch.extent
        if last_slot >= self.slots or last_position >= self.capacity:
            raise ShapeError(
                "KVCache.append",
                expected=f"positions < {self.capacity} and slots < {self.slots}",
                got=f"position {last_position}, slot {last_slot}",
            )
        host = batch.host if isinstance(batch, DeviceBatch) else batch
        assert host is not None
        if self._fixed:
            return
        self._places(host.slots, host.positions)
        for slot in np.unique(host.slots) if reading else ():
            mine = host.positions[host.slots == slot]
            first = 0 if window is None else max(0, int(mine.min()) - window + 1)
            self.pages_of(int(slot), first, int(mine.max()) + 1)

    def append(self, layer: int, batch: TokenBatch, k: NDArray, v: NDArray) -> None:
        expected = (len(batch), *self.keys.shape[-2:])
        if k.shape != expected or v.shape != expected:
            raise ShapeError("KVCache.append", expected=f"k and v {expected}", got=f"k {k.shape}, v {v.shape}")
        ws, batch, v = self._ws, DeviceBatch.placed(self._ws, batch), value(self._ws, self._ws.upload(v))
        if not ws.recording and (layer == 0 or not self._fixed):
            self.check(batch)
            self.copy_table()
        n, (kv_heads, head_dim) = len(batch), self.keys.shape[-2:]
        table = self.table, self.table.shape[1], self.page_size, kv_heads, head_dim
        to = self.keys[layer], self.values[layer]
        if isinstance(k, Turned) and k.rotation.q_turned is None:  # turned on its way in, and the q beside it
            r, heads = k.rotation, k.rotation.q.shape[1]
            r.q_turned = ws.empty(r.q.shape, np.float32)
            grid = (-(-(heads + kv_heads) * (head_dim // 2) // BLOCK), n)
            arguments = r.q, r.k, v, r.cos, r.sin, batch.slots, batch.positions, heads, *table, r.q_turned, *to
            ws.launch("rope.cu", f"rope_append_{self.kind}", grid, BLOCK, *arguments)
            return
        grid = (-(-kv_heads * head_dim // BLOCK), n)
        flat = value(ws, ws.upload(k)), v, batch.slots, batch.positions, *table, *to
        ws.launch("rope.cu", f"append_{self.kind}", grid, BLOCK, *flat)

    def stored(self, layer: int, batch: TokenBatch) -> tuple[NDArray, NDArray]:
        pages, offsets = self._places(batch.slots, batch.positions)
        return self._rows(self.keys[layer], pages, offsets), self._rows(self.values[layer], pages, offsets)

    def visible(self, layer: int, slot: int, position: int, window: int | None) -> tuple[NDArray, NDArray]:
        start = 0 if window is None else max(0, position - window + 1)
        positions = np.arange(start, position + 1)
        pages, offsets = self._places(np.full(len(positions), slot), positions)
        return self._rows(self.keys[layer], pages, offsets), self._rows(self.values[layer], pages, offsets)

    def _rows(self, pool: Any, pages: NDArray, offsets: NDArray) -> NDArray:
        """(n, G, d) float32 on the host: whole pages cross the bus, which only recorders ask for."""
        out = np.empty((len(pages), *pool.shape[-2:]), dtype=np.float32)
        for page in np.unique(pages):
            here = pages == page
            raw = self._ws.device.to_host(pool[int(page)])
            wide = raw.view(ml_dtypes.bfloat16) if self.kind == "bfloat16" else raw
            out[here] = wide[offsets[here]]
        return out

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
                pieces += [(pool, int(old), int(new), end) for pool in (self.keys, self.values)]
        with self._ws.device.use():
            held = [pool[:, old, :end].copy() for pool, old, _, end in pieces]  # all at the same time: read, then write
            for (pool, _, new, end), rows in zip(pieces, held, strict=True):
                pool[:, new, :end] = rows

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        with self._ws.device.use():
            for source, target in zip(sources, targets, strict=True):
                for pool in (self.keys, self.values):
                    pool[:, int(target)] = pool[:, int(source)]

    def fill_with_zeros(self) -> None:
        for pool in (self.keys, self.values):
            self._ws.device.fill(pool, 0)

    def take_over(self, other: KVCache, length: int) -> None:
        assert isinstance(other, DeviceKVCache)
        for slot in range(self.slots):
            position = 0
            while position < length:  # the longest piece that lies in one page here and there
                (to,), (at,) = self._places(np.array([slot]), np.array([position]))
                (page,), (start,) = other._places(np.array([slot]), np.array([position]))
                n = min(length - position, self.page_size - int(at), other.page_size - int(start))
                with self._ws.device.use():
                    for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
                        mine[:, int(to), int(at) : int(at) + n] = theirs[:, int(page), int(start) : int(start) + n]
                position += n
