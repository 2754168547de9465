"""The logits of a pass: `Logits` for all its wanted tokens, `TokenLogits` for one of them.

Greedy and top-k sampling need few of a vocabulary's logits. A backend that can prove which ones matter (`head_rows`)
computes only those; every logit it returns equals that of the whole head to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = Sequence[int] | NDArray[np.int64]
SMALL = 4096  # numbers


class HeadNeed(NamedTuple):
    """What one token needs of the head: the k largest logits (None: all logits), and those of the ids `also`."""

    k: int | None = None
    also: Ids = ()


class HeadRows(NamedTuple):
    """Logits of one token. With `HeadNeed(k)` every logit among the k largest is there, and every tie of the k-th."""

    ids: NDArray[np.int64]  # (n,) ascending
    values: NDArray  # (n,)
    bounds: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None  # (V,) lower and upper bound of every logit


class TokenLogits:
    """One token's logits: those that were asked for, and on demand all of them."""

    def __init__(
        self, rows: HeadRows, vocab_size: int, head: Callable[[NDArray], NDArray], hidden: NDArray | None = None
    ) -> None:
        """head: the whole head, hidden states (n, D) -> logits (n, V).  hidden (D,): needed unless rows are all."""
        self.ids, self.values, self._bounds = rows  # (n,) ascending, (n,)
        self.vocab_size, self.head, self.hidden = vocab_size, head, hidden

    def __repr__(self) -> str:
        return f"<TokenLogits: {len(self.ids)} of {self.vocab_size}>"

    @property
    def complete(self) -> bool:
        """Whether `values` holds all logits, in the order of ids."""
        return len(self.ids) == self.vocab_size

    def all(self) -> NDArray:
        """Every logit, computed now if it was not asked for.   -> (V,)"""
        if self.complete:
            return self.values
        assert self.hidden is not None
        return self.head(self.hidden[None])[0]

    def rest(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Lower and upper bounds of the logits that are not in `values`.   -> (V - n,) both"""
        assert self._bounds is not None
        others = np.ones(self.vocab_size, dtype=np.bool_)
        others[self.ids] = False
        return self._bounds[0][others], self._bounds[1][others]


def all_finite(arrays: Sequence[NDArray]) -> bool:
    """Whether no array holds NaN or Inf. Many small arrays are checked together."""
    if len(arrays) > 1 and max(array.size for array in arrays) <= SMALL:
        arrays = [np.concatenate([array.ravel() for array in arrays])]
    return all(bool(np.isfinite(array).all()) for array in arrays)
