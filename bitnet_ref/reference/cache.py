"""The keys and values of past tokens, and the description of the tokens of one call.

A *slot* holds one sequence. `TokenBatch` lays the tokens of any number of sequences end to end and says, for each,
its slot and its position there. Nothing else in the model knows that there are sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..backends.cache_dtypes import narrow, widen
from ..errors import OutOfMemory, ShapeError
from .config import ModelConfig

TokenIds = Sequence[int] | NDArray[np.int64]
NO_PAGE = -1


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """N tokens of any number of sequences. `wanted` lists the tokens whose logits are needed (None: all)."""

    tokens: NDArray[np.int64]  # (N,)
    positions: NDArray[np.int64]  # (N,)
    slots: NDArray[np.int64]  # (N,)
    wanted: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def extent(self) -> tuple[int, int]:
        """(largest slot, largest position), looked up once for all layers; (-1, -1) when there are no tokens."""
        return (int(self.slots.max()), int(self.positions.max())) if len(self) else (-1, -1)

    @property
    def all_wanted(self) -> bool:
        """Whether the logits of every token are wanted, in order."""
        return self.wanted is None or np.array_equal(self.wanted, np.arange(len(self)))

    @classmethod
    def of(cls, parts: Sequence[tuple[int, int, TokenIds]], logits_of_last: Sequence[int] | None = None) -> TokenBatch:
        """From (slot, first position, token ids) of each sequence.

        logits_of_last: indices of the parts whose last token's logits are wanted; None wants those of all tokens.

        >>> TokenBatch.of([(0, 0, [7, 8]), (1, 5, [9])]).positions.tolist()
        [0, 1, 5]
        """
        lengths = [len(ids) for _, _, ids in parts]
        if logits_of_last is not None and all(length == 1 for length in lengths):  # decoding: a token of each
            rows = [[ids[0] for _, _, ids in parts], [start for _, start, _ in parts], [slot for slot, _, _ in parts]]
            tokens, positions, slots = np.array(rows, dtype=np.int64)
            every = list(logits_of_last) == list(range(len(parts)))
            return cls(tokens, positions, slots, None if every else np.array(logits_of_last, dtype=np.int64))
        ends = np.cumsum(lengths)
        tokens = np.concatenate([ids for _, _, ids in parts]).astype(np.int64, copy=False)
        positions = np.arange(len(tokens)) + np.repeat([start for _, start, _ in parts] - (ends - lengths), lengths)
        slots = np.repeat([slot for slot, _, _ in parts], lengths)
        wanted = None if logits_of_last is None else ends[list(logits_of_last)] - 1
        return cls(tokens, positions, slots, wanted)


class KVCache:
    """Keys and values of every layer, in pages: a pool of them, and a table that says which page holds what.

    keys, values: (L, pages, page_size, G, d), the pool. float32 is the contract (float64 its yardstick); float16 and
        int8 keep less of each number (`kv_dtypes`).
    key_scales, value_scales: (L, pages, page_size, G) float32, what int8 is multiplied by; None of the other dtypes.
    page_table: (slots, pages_per_slot) int32. page_table[s, i] is the page that holds positions i * page_size to
        (i + 1) * page_size - 1 of slot s; NO_PAGE (-1) where there is none.

    By default every slot owns one page of `capacity` tokens, and the table is fixed. With `page_size` and `pages` the
    cache is a pool (PagedAttention, Kwon et al. 2023): all of the table is NO_PAGE, and the owner of the pool writes
    into it which pages a slot has, between two forward passes. Slots may share the pages that none of them writes to.
    With `page_size` alone every slot owns as many pages as its capacity takes. What is computed from a cache does not
    depend on how its pages lie: the same keys, in the same order, give the same bits.

    The memory is reserved at once and touched by the system only when a token is written, so a generous capacity
    costs nothing until it is used.
    """

    def __init__(
        self,
        config: ModelConfig,
        slots: int,
        capacity: int,
        dtype: DTypeLike = np.float32,
        *,
        page_size: int | None = None,
        pages: int | None = None,
    ) -> None:
        if (page_size is None and pages is not None) or (page_size is not None and page_size < 1):
            got = f"page_size {page_size}, pages {pages}"
            raise ShapeError("KVCache", expected="page_size >= 1, and one with pages", got=got)
        self.slots, self.capacity = slots, capacity
        self.page_size = max(1, capacity) if page_size is None else page_size
        pages_per_slot = max(1, -(-capacity // self.page_size))
        self.pages = slots * pages_per_slot if pages is None else pages
        shape = (config.num_hidden_layers, self.pages, self.page_size, config.num_key_value_heads, config.head_dim)
        try:
            self.keys, self.values = (self._empty(shape, np.dtype(dtype)) for _ in range(2))
            self.key_scales: NDArray[np.float32] | None = None
            self.value_scales: NDArray[np.float32] | None = None
            if np.dtype(dtype) == np.int8:
                self.key_scales, self.value_scales = (self._empty(shape[:-1], np.dtype(np.float32)) for _ in range(2))
            self.page_table: NDArray[np.int32] = np.full((slots, pages_per_slot), NO_PAGE, dtype=np.int32)
        except (MemoryError, ValueError) as error:
            what = (
                f"{slots} sequences of {capacity} tokens" if pages is None else f"{pages} pages of {page_size} tokens"
            )
            raise OutOfMemory(
                f"the KV cache of {what} does not fit in memory; ask for fewer tokens or fewer prompts at a time"
            ) from error
        self._fixed = pages is None  # each page belongs to one slot, for good
        self.kernel_layers: tuple[NDArray, NDArray, list[Any]] | None = None  # what a compiled backend made of them
        self._slots_are_pages = self._fixed and pages_per_slot == 1
        self._keeps_floats = np.dtype(dtype).itemsize > 2
        if self._fixed:
            self.page_table[:] = np.arange(self.pages, dtype=np.int32).reshape(slots, pages_per_slot)
            self.page_table.flags.writeable = False

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype) -> NDArray:
        """An array of the pool, not touched yet; a device's cache reserves it there."""
        return np.empty(shape, dtype=dtype)

    @property
    def dtype(self) -> np.dtype:
        """What keys and values are kept in."""
        return self.keys.dtype

    @property
    def layers(self) -> int:
        return len(self.keys)

    @property
    def _pools(self) -> list[NDArray]:
        """All that is kept, each array (L, pages, page_size, ...)."""
        return [a for a in (self.keys, self.values, self.key_scales, self.value_scales) if a is not None]

    @property
    def nbytes(self) -> int:
        """Bytes reserved, used or not."""
        return sum(pool.nbytes for pool in self._pools)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a token takes, of all layers."""
        return self.nbytes // max(1, self.pages * self.page_size)

    def pages_of(self, slots: Any, first: int, stop: int) -> NDArray[np.int32]:
        """The pages of positions `first` to `stop` - 1 of a slot, or of several.   -> (..., pages)

        Raises ShapeError where there is no page.
        """
        columns = slice(first // self.page_size, -(-stop // self.page_size))
        pages = self.page_table[slots, columns]
        if stop > self.capacity or (not self._fixed and ((pages < 0) | (pages >= self.pages)).any()):
            for slot in np.atleast_1d(slots):
                self._check_page(int(slot), first, stop)
        return pages

    def _check_page(self, slot: int, first: int, stop: int) -> None:
        """Raises the ShapeError that names the first position without a page, if there is one."""
        for position in range(first, stop):
            index = position // self.page_size
            page = self.page_table[slot, index] if position < self.capacity else NO_PAGE
            if not 0 <= page < self.pages:
                raise ShapeError(
                    "KVCache",
                    expected=f"a page for position {position} of slot {slot}, one of {self.pages}",
                    got=f"page_table[{slot}, {index}] = {page}"
                    if position < self.capacity
                    else f"a capacity of {self.capacity} tokens",
                )

    def _places(self, slots: NDArray, positions: NDArray) -> tuple[NDArray, NDArray]:
        """(page, place in it) of tokens at those slots and positions (N,)."""
        if self._slots_are_pages:
            return slots, positions
        indices = positions // self.page_size
        pages = self.page_table[slots, indices]
        if len(pages) and not 0 <= pages.min() <= pages.max() < self.pages:
            i = int(np.flatnonzero((pages < 0) | (pages >= self.pages))[0])
            self._check_page(int(slots[i]), int(positions[i]), int(positions[i]) + 1)
        return pages, positions - indices * self.page_size

    def check_extent(self, batch: TokenBatch) -> None:
        """Raises ShapeError where the batch has a slot or a position beyond the cache's."""
        last_slot, last_position = batch.extent
        if last_slot >= self.slots or last_position >= self.capacity:
            raise ShapeError(
                "KVCache.append",
                expected=f"positions < {self.capacity} and slots < {self.slots}",
                got=f"position {last_position}, slot {last_slot}",
            )

    def append(self, layer: int, batch: TokenBatch, k: NDArray, v: NDArray) -> None:
        """Write k and v (N, G, d) of the batch's tokens at their slots and positions."""
        expected = (len(batch), *self.keys.shape[-2:])
        if k.shape != expected or v.shape != expected:
            raise ShapeError("KVCache.append", expected=f"k and v {expected}", got=f"k {k.shape}, v {v.shape}")
        self.check_extent(batch)
        places = self._places(batch.slots, batch.positions)
        where = (layer, *places)
        if self._keeps_floats:
            self.keys[where], self.values[where] = k, v
            return
        self.keys[where], key_scales = narrow(k, self.dtype)
        self.values[where], value_scales = narrow(v, self.dtype)
        if self.key_scales is not None and self.value_scales is not None:
            self.key_scales[where], self.value_scales[where] = key_scales, value_scales

    def stored(self, layer: int, batch: TokenBatch) -> tuple[NDArray, NDArray]:
        """Keys and values (N, G, d) of the batch's tokens, as attention sees what `append` kept of them."""
        places = self._places(batch.slots, batch.positions)
        return self._read((layer, *places))

    def _read(self, where: tuple, inside: slice | None = None) -> tuple[NDArray, NDArray]:
        """Keys and values there, as floats. inside: of whole pages end to end, only these rows."""

        def rows(pool: NDArray) -> NDArray:
            there = pool[where]
            # cut before it is widened: the other rows may never have been written
            return there if inside is None else there.reshape(-1, *there.shape[2:])[inside]

        key_scales, value_scales = (None if a is None else rows(a) for a in (self.key_scales, self.value_scales))
        return widen(rows(self.keys), key_scales), widen(rows(self.values), value_scales)

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Give each target slot the first `length` tokens of its source slot, all at the same time."""
        moves = [(source, target) for source, target in zip(sources, targets, strict=True) if source != target]
        if moves and length > 0:
            froms, to = (self.pages_of(list(slots), 0, length) for slots in zip(*moves, strict=True))
            for i in range(froms.shape[1]):
                here = slice(0, min(self.page_size, length - i * self.page_size))
                for pool in self._pools:
                    pool[:, to[:, i], here] = pool[:, froms[:, i], here]

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Make each target page what its source page is, one after the other."""
        for source, target in zip(sources, targets, strict=True):
            for pool in self._pools:
                pool[:, target] = pool[:, source]

    def take_over(self, other: KVCache, length: int) -> None:
        """Give each slot the first `length` tokens of the same slot of another cache, of the same dtype."""
        slots, positions = np.divmod(np.arange(self.slots * length), max(1, length))
        here, there = self._places(slots, positions), other._places(slots, positions)
        for mine, theirs in zip(self._pools, other._pools, strict=True):
            for layer in range(len(mine)):
                mine[layer, *here] = theirs[layer, *there]

    def fill_with_zeros(self) -> None:
        """Make zeros of all keys and values, so that positions that are never written hold some."""
        for pool in self._pools:
            pool.fill(0)

    def visible(self, layer: int, slot: int, position: int, window: int | None) -> tuple[NDArray, NDArray]:
        """Keys and values (S, G, d) that the token at `position` sees: itself, and those before it in its window."""
        start = 0 if window is None else max(0, position - window + 1)
        here = slice(start, position + 1)
        pages = self.pages_of(slot, here.start, here.stop)
        first = here.start // self.page_size * self.page_size
        inside = slice(here.start - first, here.stop - first)
        if len(pages) == 1:
            return self._read((layer, pages[0], inside))
        return self._read((layer, pages), inside)
