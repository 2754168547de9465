"""KV caches whose sequences can be copied; one in pages (PagedAttention, Kwon et al. 2023); dtypes at rest.

float32 is the contract: it stores what was computed. With a narrow dtype the model is, strictly, another one, so it is
never a default; `bitnet-ref bench cache` measures its effect on a text.

float16: the nearest half: 11 bits of every number, for half the bytes.
int8: for each token and kv head, x_q = round(x / scale) with scale = max|x| / 127, half to even; back as x_q * scale.
    The error is at most half a step, max|x| / 254, for a quarter of the bytes and one float32 per head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..errors import NumericsError, OutOfMemory, ShapeError
from ..families import family_of
from ..reference.cache import KVCache, TokenBatch
from ..reference.config import ModelConfig
from ..reference.layers import Array, Floats

NO_PAGE = -1
CACHE_DTYPES = ("float32", "float16", "int8")
MIN_ABSMAX = np.float32(1e-30)  # for a row of zeros, whose scale is a divisor


@dataclass(frozen=True)
class CacheSpec:
    """The cache to make: `slots` sequences of `capacity` tokens.

    dtype: float32, float16 or int8 (numpy also float64); None: the backend's own.
    page_size, pages: with both, a pool whose page table the caller fills; with page_size alone, every slot owns as many
        pages as its capacity takes; with neither, one page per slot.
    """

    slots: int
    capacity: int
    dtype: str | None = None
    page_size: int | None = None
    pages: int | None = None


class EngineKVCache(KVCache):
    """The reference's cache, with copies of sequences, and with what some families keep beside keys and values."""

    def __init__(self, config: ModelConfig, slots: int, capacity: int, dtype: DTypeLike = np.float32) -> None:
        """Raises OutOfMemory."""
        try:
            super().__init__(config, slots, capacity, dtype)
            self.states = family_of(config).new_states(config, slots, np.dtype(dtype))
        except (MemoryError, ValueError) as error:
            message = f"the KV cache of {slots} sequences of {capacity} tokens does not fit in memory"
            raise OutOfMemory(f"{message}; ask for fewer tokens or fewer prompts at a time") from error

    @property
    def dtype(self) -> np.dtype:
        """The dtype of keys and values at rest."""
        return self.keys.dtype

    @property
    def layers(self) -> int:
        return len(self.keys)

    @property
    def rows_per_token(self) -> int:
        """How many layers keep keys and values of a token."""
        return len(self.keys)

    @property
    def nbytes(self) -> int:
        """Bytes reserved, used or not."""
        return self.keys.nbytes + self.values.nbytes + self.state_bytes

    @property
    def state_bytes(self) -> int:
        """Those of them that slots have beside their keys and values, however many tokens they hold."""
        return 0 if self.states is None else self.states.nbytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token, all layers together."""
        return (self.nbytes - self.state_bytes) // max(1, self.slots * self.capacity)

    @property
    def has_states(self) -> bool:
        """Whether slots have states beside their keys and values."""
        return self.states is not None

    def stored(self, layer: int, batch: TokenBatch) -> tuple[Floats, Floats]:
        """Keys and values (N, G, d) of the batch's tokens, as attention reads them after `append`."""
        return self.keys[layer, batch.slots, batch.positions], self.values[layer, batch.slots, batch.positions]

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Give each target slot the first `length` tokens of its source slot, all at the same time."""
        for pool in (self.keys, self.values):
            pool[:, list(targets), :length] = pool[:, list(sources), :length]
        if self.states is not None:
            self.states.copy(sources, targets)

    def take_over(self, other: EngineKVCache, length: int) -> None:
        """Give each slot the first `length` tokens of the same slot of another cache of the same kind."""
        self.keys[:, :, :length] = other.keys[:, :, :length]
        self.values[:, :, :length] = other.values[:, :, :length]
        if self.states is not None:
            self.states.take_over(other.states)

    def resumable(self, slot: int, length: int) -> int:
        """How many of the first `length` tokens of a slot a later pass can build on."""
        return length if self.states is None else int(self.states.resumable(slot, length))


class PagedKVCache(EngineKVCache):
    """A pool of pages, and a table that says which page holds which positions of a slot.

    keys, values: (rows, pages, page_size, G, d), the pool. row_of: layer -> its row; a layer with states has none.
    key_scales, value_scales: (rows, pages, page_size, G) float32, the dequantisation scales of int8; None for other
    dtypes. page_table: (slots, pages_per_slot) int32. page_table[s, i] is the page with positions i * page_size to
        (i + 1) * page_size - 1 of slot s, or NO_PAGE (-1). In a pool it starts as NO_PAGE, and its owner writes it
        between two passes; slots may share pages that none of them writes to. Otherwise it is fixed and read-only.

    The order of the pages does not change results: the same keys in the same order give the same bits.
    """

    def __init__(self, config: ModelConfig, spec: CacheSpec, dtype: np.dtype) -> None:
        """dtype: of the stored numbers, which the backend derived from spec.dtype. Raises ShapeError, OutOfMemory."""
        if (spec.page_size is None and spec.pages is not None) or (spec.page_size is not None and spec.page_size < 1):
            got = f"page_size {spec.page_size}, pages {spec.pages}"
            raise ShapeError("KVCache", expected="page_size >= 1 wherever there are pages", got=got)
        self.slots, self.capacity = spec.slots, spec.capacity
        self._layers = config.num_hidden_layers
        self.row_of = {layer: row for row, layer in enumerate(layers_with_keys(config))}
        self.page_size = spec.page_size or max(1, spec.capacity)
        pages_per_slot = max(1, -(-spec.capacity // self.page_size))
        self.is_fixed = spec.pages is None  # each page belongs to one slot, permanently
        self.pages = spec.slots * pages_per_slot if spec.pages is None else spec.pages
        shape = (len(self.row_of), self.pages, self.page_size, config.num_key_value_heads, config.head_dim)
        try:
            self.keys, self.values = self._empty(shape, dtype), self._empty(shape, dtype)
            self.key_scales: NDArray[np.float32] | None = None
            self.value_scales: NDArray[np.float32] | None = None
            if dtype == np.int8:
                self.key_scales, self.value_scales = (self._empty(shape[:-1], np.dtype(np.float32)) for _ in range(2))
            self.page_table: NDArray[np.int32] = np.full((spec.slots, pages_per_slot), NO_PAGE, dtype=np.int32)
            self.states = family_of(config).new_states(config, spec.slots, dtype)
        except (MemoryError, ValueError) as error:
            size = f"{spec.slots} sequences of {spec.capacity} tokens"
            if not self.is_fixed:
                size = f"{self.pages} pages of {self.page_size} tokens"
            raise OutOfMemory(
                f"the KV cache of {size} does not fit in memory; ask for fewer tokens or fewer prompts at a time"
            ) from error
        if self.is_fixed:
            self.page_table[:] = np.arange(self.pages, dtype=np.int32).reshape(self.page_table.shape)
            self.page_table.flags.writeable = False

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """An uninitialised array of the pool. A device's cache reserves it there."""
        return np.empty(shape, dtype=dtype)

    @property
    def layers(self) -> int:
        return self._layers

    @property
    def pools(self) -> list[Array]:
        """Every array with a page axis, each (rows, pages, page_size, ...)."""
        return [a for a in (self.keys, self.values, self.key_scales, self.value_scales) if a is not None]

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools) + self.state_bytes

    @property
    def bytes_per_token(self) -> int:
        return (self.nbytes - self.state_bytes) // max(1, self.pages * self.page_size)

    # -- pages ---------------------------------------------------------------------------------------------------------

    def pages_of(self, slots: Any, first: int, stop: int) -> NDArray[np.int32]:
        """The pages of positions `first` to `stop` - 1 of a slot, or of several.   -> (..., pages)

        Raises ShapeError where the table has no page.
        """
        pages = self.page_table[slots, first // self.page_size : -(-stop // self.page_size)]
        if stop > self.capacity or (not self.is_fixed and ((pages < 0) | (pages >= self.pages)).any()):
            for slot in np.atleast_1d(slots):
                self._check_pages(int(slot), first, stop)
        return pages

    def _check_pages(self, slot: int, first: int, stop: int) -> None:
        """Raises the ShapeError that names the first position without a page, if there is one."""
        for position in range(first, stop):
            index = position // self.page_size
            if position >= self.capacity:
                got = f"a capacity of {self.capacity} tokens"
            elif not 0 <= (page := self.page_table[slot, index]) < self.pages:
                got = f"page_table[{slot}, {index}] = {page}"
            else:
                continue
            expected = f"a page for position {position} of slot {slot}, one of {self.pages}"
            raise ShapeError("KVCache", expected=expected, got=got)

    def places_of(
        self, slots: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """(page, offset in it) of the tokens at those slots and positions (N,). Raises ShapeError."""
        indices = positions // self.page_size
        pages = self.page_table[slots, indices]
        if len(pages) and not 0 <= pages.min() <= pages.max() < self.pages:
            i = int(np.flatnonzero((pages < 0) | (pages >= self.pages))[0])
            self._check_pages(int(slots[i]), int(positions[i]), int(positions[i]) + 1)
        return pages, positions - indices * self.page_size

    # -- writing -------------------------------------------------------------------------------------------------------

    def append(self, layer: int, batch: TokenBatch, k: Floats, v: Floats) -> None:
        self.check_append(batch, k, v)
        index = (self.row_of[layer], *self.places_of(batch.slots, batch.positions))
        self.keys[index], key_scales = narrow(k, self.dtype)
        self.values[index], value_scales = narrow(v, self.dtype)
        if self.key_scales is not None and self.value_scales is not None:
            self.key_scales[index], self.value_scales[index] = key_scales, value_scales

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        moves = [(source, target) for source, target in zip(sources, targets, strict=True) if source != target]
        if moves and length > 0:
            old, new = (self.pages_of(list(slots), 0, length) for slots in zip(*moves, strict=True))
            for i in range(old.shape[1]):
                inside = slice(0, min(self.page_size, length - i * self.page_size))
                for pool in self.pools:
                    pool[:, new[:, i], inside] = pool[:, old[:, i], inside]
        if self.states is not None:
            self.states.copy(sources, targets)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy each source page to its target page, in order."""
        for source, target in zip(sources, targets, strict=True):
            for pool in self.pools:
                pool[:, target] = pool[:, source]

    def take_over(self, other: EngineKVCache, length: int) -> None:
        assert isinstance(other, PagedKVCache)
        slots, positions = np.divmod(np.arange(self.slots * length), max(1, length))
        to, source = self.places_of(slots, positions), other.places_of(slots, positions)
        for mine, theirs in zip(self.pools, other.pools, strict=True):
            for row in range(len(mine)):
                mine[row, *to] = theirs[row, *source]
        if self.states is not None:
            self.states.take_over(other.states)

    def fill_with_zeros(self) -> None:
        """Write zeros everywhere, for benchmarks that attend to positions which were never written."""
        for pool in self.pools:
            pool.fill(0)

    # -- reading -------------------------------------------------------------------------------------------------------

    def stored(self, layer: int, batch: TokenBatch) -> tuple[Floats, Floats]:
        index = (self.row_of[layer], *self.places_of(batch.slots, batch.positions))
        return self._read(index, slice(None))

    def visible(self, layer: int, slot: int, position: int, window: int | None) -> tuple[Floats, Floats]:
        start = 0 if window is None else max(0, position - window + 1)
        pages = self.pages_of(slot, start, position + 1)
        first = start // self.page_size * self.page_size
        inside = slice(start - first, position + 1 - first)
        if len(pages) == 1:
            return self._read((self.row_of[layer], pages[0], inside), slice(None))
        return self._read((self.row_of[layer], pages), inside)

    def _read(self, index: tuple[Any, ...], inside: slice) -> tuple[Floats, Floats]:
        """Keys and values at the index as floats. inside: rows of several pages laid end to end."""

        def rows(pool: Array) -> Array:
            part: Array = pool[index]
            if inside == slice(None):
                return part
            return part.reshape(-1, *part.shape[2:])[inside]  # cut before widening: other rows may be uninitialised

        key_scales, value_scales = (None if a is None else rows(a) for a in (self.key_scales, self.value_scales))
        return widen(rows(self.keys), key_scales), widen(rows(self.values), value_scales)


def layers_with_keys(config: ModelConfig) -> list[int]:
    """The layers that keep keys and values; the others have states."""
    state_size = family_of(config).state_size
    return [layer for layer in range(config.num_hidden_layers) if not state_size(config, layer)]


# -- dtypes at rest ----------------------------------------------------------------------------------------------------


def narrow(x: Floats, dtype: np.dtype) -> tuple[Array, NDArray[np.float32] | None]:
    """x (..., G, d) -> the same in that dtype, and for int8 its scales (..., G), else None.

    Raises NumericsError when the dtype cannot hold x: NaN or Inf, or in float16 a number beyond 65504.
    """
    if dtype.itemsize > 2:
        return x, None
    if dtype == np.int8:
        return quantize_rows(x)
    with np.errstate(over="ignore"):
        half = x.astype(np.float16)
    if not np.isfinite(half).all():
        largest = float(np.abs(x).max())
        raise NumericsError(f"KVCache.append: float16 cannot hold {largest:g}; keep the cache in float32")
    return half, None


def quantize_rows(x: Floats) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """x (..., d) -> x_q int8 (..., d), x_dequant_scale float32 (...)

    >>> quantize_rows(np.array([[0.5, -2.0, 1.0]], dtype=np.float32))[0].tolist()
    [[32, -127, 64]]
    """
    x = x.astype(np.float32, copy=False)
    absmax = np.abs(x).max(axis=-1)
    if not np.isfinite(absmax).all():
        raise NumericsError("KVCache.append: NaN or Inf cannot be kept in int8")
    x_dequant_scale = np.maximum(absmax, MIN_ABSMAX) / np.float32(127)
    x_q = np.clip(np.rint(x / x_dequant_scale[..., None]), -127, 127).astype(np.int8)
    return x_q, x_dequant_scale


def widen(stored: Array, scales: NDArray[np.float32] | None) -> Floats:
    """The stored numbers as floats: float32 and float64 unchanged, the others as float32.

    >>> widen(np.array([[32, -127]], dtype=np.int8), np.array([1 / 127], dtype=np.float32))[0, 1].item()
    -1.0
    """
    if scales is not None:
        return stored.astype(np.float32) * scales[..., None]
    return stored.astype(np.float32) if stored.dtype == np.float16 else stored
