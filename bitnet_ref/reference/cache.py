"""The tokens of one call, and the keys and values of the tokens before them.

A *slot* holds one sequence. A `TokenBatch` has tokens of any number of them, each with its slot and its position there.
Nothing else in the model knows that there are sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ..errors import ShapeError
from .config import ModelConfig
from .layers import Floats, Ints

TokenIds = Sequence[int] | Ints


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """N tokens of any number of sequences, laid end to end."""

    tokens: Ints  # (N,)
    positions: Ints  # (N,), of each token in its sequence
    slots: Ints  # (N,), of each token's sequence in the cache
    wanted: Ints | None = None  # indices of the tokens whose logits are needed; None: all, in order

    @classmethod
    def of(cls, parts: Sequence[tuple[int, int, TokenIds]], logits_of_last: Sequence[int] | None = None) -> TokenBatch:
        """From (slot, first position, token ids) of each part.

        logits_of_last: indices of the parts whose last token's logits are wanted; None: those of all tokens.

        >>> TokenBatch.of([(0, 0, [7, 8]), (1, 5, [9])]).positions.tolist()
        [0, 1, 5]
        """
        tokens = np.concatenate([ids for _, _, ids in parts]).astype(np.int64, copy=False)
        positions = np.array([start + i for _, start, ids in parts for i in range(len(ids))], dtype=np.int64)
        slots = np.array([slot for slot, _, ids in parts for _ in ids], dtype=np.int64)
        if logits_of_last is None or list(logits_of_last) == list(range(len(tokens))):
            return cls(tokens, positions, slots)
        ends = np.cumsum([len(ids) for _, _, ids in parts])
        return cls(tokens, positions, slots, ends[list(logits_of_last)] - 1)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def extent(self) -> tuple[int, int]:
        """(largest slot, largest position), computed once for all layers; (-1, -1) without tokens."""
        known: tuple[int, int] | None = self.__dict__.get("_extent")  # not functools.cached_property: it has a lock
        if known is None:
            known = (int(self.slots.max()), int(self.positions.max())) if len(self) else (-1, -1)
            self.__dict__["_extent"] = known
        return known

    @property
    def on_host(self) -> TokenBatch:
        """This batch with NumPy arrays; a device's batch returns the one it was made from."""
        return self


class KVCache:
    """Keys and values of every layer, contiguous: `capacity` tokens for each slot.

    keys, values: (L, slots, capacity, G, d). Memory is committed as tokens are written, so a generous capacity costs
    nothing. `backends/paged_cache.py` has what engines add: copies, pages, dtypes.
    """

    states: Any = None  # what layers without keys keep of each sequence, in some families

    def __init__(self, config: ModelConfig, slots: int, capacity: int, dtype: DTypeLike = np.float32) -> None:
        self.slots, self.capacity = slots, capacity
        shape = (config.num_hidden_layers, slots, capacity, config.num_key_value_heads, config.head_dim)
        self.keys, self.values = np.empty(shape, dtype=dtype), np.empty(shape, dtype=dtype)

    def append(self, layer: int, batch: TokenBatch, k: Floats, v: Floats) -> None:
        """Write k and v (N, G, d) of the batch's tokens at their slots and positions. Raises ShapeError."""
        self.check_append(batch, k, v)
        self.keys[layer, batch.slots, batch.positions] = k
        self.values[layer, batch.slots, batch.positions] = v

    def check_append(self, batch: TokenBatch, k: Floats, v: Floats) -> None:
        """Raises ShapeError unless k and v are (N, G, d), and the cache has the batch's slots and positions."""
        expected = (len(batch), *self.keys.shape[-2:])
        if k.shape != expected or v.shape != expected:
            raise ShapeError("KVCache.append", expected=f"k and v {expected}", got=f"k {k.shape}, v {v.shape}")
        self.check_extent(batch)

    def check_extent(self, batch: TokenBatch) -> None:
        """Raises ShapeError where the batch has a slot or a position beyond the cache's."""
        slot, position = batch.extent
        if slot >= self.slots or position >= self.capacity:
            expected = f"positions < {self.capacity} and slots < {self.slots}"
            raise ShapeError("KVCache.append", expected=expected, got=f"position {position}, slot {slot}")

    def visible(self, layer: int, slot: int, position: int, window: int | None) -> tuple[Floats, Floats]:
        """Keys and values (S, G, d) that the token at `position` sees: its own and those before it in its window."""
        start = 0 if window is None else max(0, position - window + 1)
        return self.keys[layer, slot, start : position + 1], self.values[layer, slot, start : position + 1]
