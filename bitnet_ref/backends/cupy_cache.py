"""The KV cache on a card: the same pages and tables; a batch beside it, whose arrays are device arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..config import ModelConfig
from ..errors import ShapeError
from ..kv_cache import KVCache, TokenBatch

if TYPE_CHECKING:
    from .cupy_backend import CupyBackend

CACHE_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}  # bfloat16 as its bits
ROUND_CAPACITY_TO = 256  # tokens: caches of about the same length then have the same shape, and share recorded steps


@dataclass(frozen=True, eq=False)
class DeviceBatch(TokenBatch):
    """A batch whose arrays are on the device. `host` is what it was made of."""

    host: TokenBatch | None = None

    @property
    def extent(self) -> tuple[int, int]:  # type: ignore[override]
        assert self.host is not None
        return self.host.extent


class DeviceKVCache(KVCache):
    """`keys` and `values` are device arrays; `page_table` stays with its owner on the host and is copied when it has
    changed. `visible` and `stored`, which recorders ask, give NumPy arrays."""

    def __init__(
        self,
        be: CupyBackend,
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
        self._be, self.kind = be, dtype
        if page_size is None and pages is None:
            page_size = max(1, -(-capacity // ROUND_CAPACITY_TO)) * ROUND_CAPACITY_TO  # one page a slot
        super().__init__(config, slots, capacity, CACHE_DTYPES[dtype], page_size=page_size, pages=pages)
        self.table = be.upload(self.page_table)
        self._copied = self.page_table.copy()
        self.steps: dict[Any, Any] = {}  # recorded decoding steps over these very arrays, see cupy_graph.py

    @classmethod
    def of(cls, be: CupyBackend, host: KVCache, config: ModelConfig | None = None) -> DeviceKVCache:
        """A copy of a cache in the host's memory."""
        self = cls.__new__(cls)
        self._be, self.kind = be, host.keys.dtype.name
        self.slots, self.capacity, self.page_size, self.pages = host.slots, host.capacity, host.page_size, host.pages
        self._fixed, self.page_table = host._fixed, host.page_table
        self.keys, self.values = be.upload(host.keys), be.upload(host.values)
        self.table, self._copied, self.steps = be.upload(host.page_table), host.page_table.copy(), {}
        return self

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype) -> NDArray:
        return self._be.make(shape, dtype)

    def copy_table(self) -> None:
        """Bring the device's copy of the page table up to date. Its place in memory stays."""
        if not self._fixed and not np.array_equal(self._copied, self.page_table):
            self._copied[:] = self.page_table
            self._be.device.copy(self.table, self._copied)

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
        batch = self._be.place(batch)
        if layer == 0 and not self._be.recording:
            self.check(batch)
            self.copy_table()
        self._be.write_cache(self, layer, batch, k, v)

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
            raw = self._be.device.to_host(pool[int(page)])
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
        held = [pool[:, old, :end].copy() for pool, old, _, end in pieces]  # all at the same time: read, then write
        for (pool, _, new, end), rows in zip(pieces, held, strict=True):
            pool[:, new, :end] = rows

    def take_over(self, other: KVCache, length: int) -> None:
        assert isinstance(other, DeviceKVCache)
        for slot in range(self.slots):
            position = 0
            while position < length:  # the longest piece that lies in one page here and there
                (to,), (at,) = self._places(np.array([slot]), np.array([position]))
                (page,), (start,) = other._places(np.array([slot]), np.array([position]))
                n = min(length - position, self.page_size - int(at), other.page_size - int(start))
                for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
                    mine[:, int(to), int(at) : int(at) + n] = theirs[:, int(page), int(start) : int(start) + n]
                position += n
