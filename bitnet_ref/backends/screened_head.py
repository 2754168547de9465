"""A head with a second, coarser copy of itself in int8, which tells without doubt which of its rows need a closer look.

`kernels/head_screen.h` says what the copy holds and why its bounds are certain. This file says what is done with them:

    the k-th largest of the lower ends is a floor under the k-th largest logit;
    a row whose upper end is below that floor is not among the k largest, nor equal to the k-th;
    the other rows, some tens of 128,256, are computed from the weights as `lm_head` computes all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..reference.weights import DenseWeight

# A head this small is read from the processor's cache, or nearly: the second look costs what the first one saves.
SMALLEST_SCREENED_BYTES = 16 << 20
# Beyond this share of the rows all of them are computed: one by one they come from memory more slowly than in order.
MOST_CANDIDATES = 1 / 8


@dataclass(frozen=True, eq=False)
class ScreenedHead(DenseWeight):
    """The head's own rows (`array`), and what the screen reads of them."""

    rows_q: NDArray[np.int8] | None = None  # (V, D, padded to a multiple of 64)
    facts: NDArray[np.float32] | None = None  # (V, 3): scale and norms, see head_screen.h

    @property
    def screen_nbytes(self) -> int:
        """Bytes that screening a token reads."""
        assert self.rows_q is not None
        assert self.facts is not None
        return self.rows_q.nbytes + self.facts.nbytes

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.screen_nbytes


def surviving_rows(
    lower: NDArray[np.float32], upper: NDArray[np.float32], k: int, also: Sequence[int] | NDArray[np.int64] = ()
) -> NDArray[np.int64]:
    """The ids that may be among the k largest, or equal to the k-th, and those of `also`, ascending.

    lower, upper (V,): each logit lies between them.

    >>> lower, upper = np.array([1, 2, 5, 0], np.float32), np.array([3, 4, 6, 5], np.float32)
    >>> surviving_rows(lower, upper, 1).tolist(), surviving_rows(lower, upper, 2, also=[0]).tolist()
    ([2, 3], [0, 1, 2, 3])
    """
    floor = lower.max() if k == 1 else np.partition(lower, -k)[-k]
    survives = upper >= floor
    survives[list(also)] = True
    return np.flatnonzero(survives)
