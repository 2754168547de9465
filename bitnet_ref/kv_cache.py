"""The keys and values of past tokens, and the description of the tokens of one call.

A *slot* holds one sequence. `TokenBatch` lays the tokens of any number of sequences end to end and says, for each,
its slot and its position there. Nothing else in the model knows that there are sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .config import ModelConfig
from .errors import OutOfMemory, ShapeError

TokenIds = Sequence[int] | NDArray[np.int64]


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

    @classmethod
    def of(cls, parts: Sequence[tuple[int, int, TokenIds]], logits_of_last: Sequence[int] | None = None) -> TokenBatch:
        """From (slot, first position, token ids) of each sequence.

        logits_of_last: indices of the parts whose last token's logits are wanted; None wants those of all tokens.

        >>> TokenBatch.of([(0, 0, [7, 8]), (1, 5, [9])]).positions.tolist()
        [0, 1, 5]
        """
        lengths = [len(ids) for _, _, ids in parts]
        tokens = np.concatenate([np.asarray(ids, dtype=np.int64) for _, _, ids in parts])
        positions = np.concatenate([np.arange(start, start + len(ids)) for _, start, ids in parts])
        slots = np.repeat([slot for slot, _, _ in parts], lengths)
        wanted = None if logits_of_last is None else np.cumsum(lengths)[list(logits_of_last)] - 1
        return cls(tokens, positions, slots, wanted)


class KVCache:
    """Keys and values, one pair of arrays (slots, capacity, G, d) a layer.

    The memory is reserved at once and touched by the system only when a token is written, so a generous capacity
    costs nothing until it is used.
    """

    def __init__(self, config: ModelConfig, slots: int, capacity: int, dtype: type = np.float32) -> None:
        self.slots, self.capacity = slots, capacity
        shape = (config.num_hidden_layers, slots, capacity, config.num_key_value_heads, config.head_dim)
        try:
            self.keys: NDArray = np.empty(shape, dtype=dtype)
            self.values: NDArray = np.empty(shape, dtype=dtype)
        except (MemoryError, ValueError) as error:
            raise OutOfMemory(
                f"the KV cache of {slots} sequences of {capacity} tokens does not fit in memory; "
                "ask for fewer tokens or fewer prompts at a time"
            ) from error

    @property
    def nbytes(self) -> int:
        """Bytes reserved, used or not."""
        return self.keys.nbytes + self.values.nbytes

    def append(self, layer: int, batch: TokenBatch, k: NDArray, v: NDArray) -> None:
        """Write k and v (N, G, d) of the batch's tokens at their slots and positions."""
        expected = (len(batch), *self.keys.shape[-2:])
        if k.shape != expected or v.shape != expected:
            raise ShapeError("KVCache.append", expected=f"k and v {expected}", got=f"k {k.shape}, v {v.shape}")
        last_slot, last_position = batch.extent
        if last_slot >= self.slots or last_position >= self.capacity:
            raise ShapeError(
                "KVCache.append",
                expected=f"positions < {self.capacity} and slots < {self.slots}",
                got=f"position {last_position}, slot {last_slot}",
            )
        self.keys[layer, batch.slots, batch.positions] = k
        self.values[layer, batch.slots, batch.positions] = v

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Give each target slot the first `length` tokens of its source slot, all at the same time."""
        moves = [(source, target) for source, target in zip(sources, targets, strict=True) if source != target]
        if moves:
            froms, to = (list(slots) for slots in zip(*moves, strict=True))
            self.keys[:, to, :length] = self.keys[:, froms, :length]
            self.values[:, to, :length] = self.values[:, froms, :length]

    def visible(self, layer: int, slot: int, position: int, window: int | None) -> tuple[NDArray, NDArray]:
        """Keys and values (S, G, d) that the token at `position` sees: itself, and those before it in its window."""
        start = 0 if window is None else max(0, position - window + 1)
        here = slice(start, position + 1)
        return self.keys[layer, slot, here], self.values[layer, slot, here]
