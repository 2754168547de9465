"""The tokens of one call, and the keys and values of the tokens before them.

A *slot* holds one sequence. `TokenBatch` lays the tokens of any number of sequences end to end and gives each token's
slot and its position there. Nothing else in the model knows that there are sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..errors import OutOfMemory, ShapeError
from .config import ModelConfig

TokenIds = Sequence[int] | NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """N tokens of any number of sequences. `wanted`: indices of the tokens whose logits are needed (None: all)."""

    tokens: NDArray[np.int64]  # (N,)
    positions: NDArray[np.int64]  # (N,)
    slots: NDArray[np.int64]  # (N,)
    wanted: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def extent(self) -> tuple[int, int]:
        """(largest slot, largest position), computed once for all layers; (-1, -1) without tokens."""
        return (int(self.slots.max()), int(self.positions.max())) if len(self) else (-1, -1)

    @property
    def on_host(self) -> TokenBatch:
        """This batch with NumPy arrays; a device's batch returns the one it was made from."""
        return self

    @property
    def all_wanted(self) -> bool:
        """Whether the logits of all tokens are wanted, in order."""
        return self.wanted is None or np.array_equal(self.wanted, np.arange(len(self)))

    def sequences(self) -> Iterator[tuple[int, int, slice]]:
        """(slot, first position, rows of the batch) of each sequence."""
        turns = np.flatnonzero(np.diff(self.slots, prepend=-1)).tolist()  # where another sequence begins
        for first, stop in zip(turns, [*turns[1:], len(self)], strict=True):
            yield int(self.slots[first]), int(self.positions[first]), slice(first, stop)

    @classmethod
    def of(cls, parts: Sequence[tuple[int, int, TokenIds]], logits_of_last: Sequence[int] | None = None) -> TokenBatch:
        """From (slot, first position, token ids) of each part.

        logits_of_last: indices of the parts whose last token's logits are wanted. None: all tokens' logits are wanted.

        >>> TokenBatch.of([(0, 0, [7, 8]), (1, 5, [9])]).positions.tolist()
        [0, 1, 5]
        """
        lengths = [len(ids) for _, _, ids in parts]
        if logits_of_last is not None and all(length == 1 for length in lengths):  # decoding: one token per sequence
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


class States(Protocol):
    """What sequences of some families have beside keys and values: see `families/qwen3_5.py`."""

    def resumable(self, slot: int, length: int) -> int: ...

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None: ...

    def take_over(self, other: Any) -> None: ...


class KVCache:
    """Keys and values of every layer, contiguous: `capacity` tokens for each slot.

    keys, values: (L, slots, capacity, G, d). The system commits the memory as tokens are written, so a generous
    capacity costs nothing until it is used. `backends/paged_cache.py` has pages and narrow dtypes.
    """

    states: States | None = None  # of layers that have no keys

    def __init__(self, config: ModelConfig, slots: int, capacity: int, dtype: DTypeLike = np.float32) -> None:
        """Raises OutOfMemory."""
        self.slots, self.capacity = slots, capacity
        self.states = config.new_states(slots, np.dtype(dtype))
        shape = (config.num_hidden_layers, slots, capacity, config.num_key_value_heads, config.head_dim)
        try:
            self.keys, self.values = np.empty(shape, dtype=dtype), np.empty(shape, dtype=dtype)
        except (MemoryError, ValueError) as error:
            raise OutOfMemory(
                f"the KV cache of {slots} sequences of {capacity} tokens does not fit in memory; ask for fewer tokens "
                "or fewer prompts at a time"
            ) from error

    @property
    def dtype(self) -> np.dtype:
        """The dtype of keys and values at rest."""
        return self.keys.dtype

    @property
    def layers(self) -> int:
        return len(self.keys)

    @property
    def nbytes(self) -> int:
        """Bytes reserved, used or not."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token, all layers together."""
        return self.nbytes // max(1, self.slots * self.capacity)

    @property
    def has_states(self) -> bool:
        """Whether slots have states beside their keys and values."""
        return self.states is not None

    def append(self, layer: int, batch: TokenBatch, k: NDArray, v: NDArray) -> None:
        """Write k and v (N, G, d) of the batch's tokens at their slots and positions. Raises ShapeError."""
        self.check_append(batch, k, v)
        self.keys[layer, batch.slots, batch.positions] = k
        self.values[layer, batch.slots, batch.positions] = v

    def check_append(self, batch: TokenBatch, k: NDArray, v: NDArray) -> None:
        """Raises ShapeError unless k and v are (N, G, d), and the cache has the batch's slots and positions."""
        expected = (len(batch), *self.keys.shape[-2:])
        if k.shape != expected or v.shape != expected:
            raise ShapeError("KVCache.append", expected=f"k and v {expected}", got=f"k {k.shape}, v {v.shape}")
        self.check_extent(batch)

    def check_extent(self, batch: TokenBatch) -> None:
        """Raises ShapeError where the batch has a slot or a position beyond the cache's."""
        last_slot, last_position = batch.extent
        if last_slot >= self.slots or last_position >= self.capacity:
            raise ShapeError(
                "KVCache.append",
                expected=f"positions < {self.capacity} and slots < {self.slots}",
                got=f"position {last_position}, slot {last_slot}",
            )

    def visible(self, layer: int, slot: int, position: int, window: int | None) -> tuple[NDArray, NDArray]:
        """Keys and values (S, G, d) that the token at `position` sees: its own and those before it in its window."""
        start = 0 if window is None else max(0, position - window + 1)
        return self.keys[layer, slot, start : position + 1], self.values[layer, slot, start : position + 1]

    def stored(self, layer: int, batch: TokenBatch) -> tuple[NDArray, NDArray]:
        """Keys and values (N, G, d) of the batch's tokens, as attention reads them after `append`."""
        return self.keys[layer, batch.slots, batch.positions], self.values[layer, batch.slots, batch.positions]

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Give each target slot the first `length` tokens of its source slot, all at the same time."""
        for pool in (self.keys, self.values):
            pool[:, list(targets), :length] = pool[:, list(sources), :length]
        if self.states is not None:
            self.states.copy(sources, targets)

    def take_over(self, other: KVCache, length: int) -> None:
        """Give each slot the first `length` tokens of the same slot of another cache of the same kind."""
        self.keys[:, :, :length] = other.keys[:, :, :length]
        self.values[:, :, :length] = other.values[:, :, :length]
        if self.states is not None and other.states is not None:
            self.states.take_over(other.states)

    def resumable(self, slot: int, length: int) -> int:
        """How many of the first `length` tokens of a slot a later pass can build on."""
        return length if self.states is None else self.states.resumable(slot, length)
