"""What a token needs of the head, and what a backend gives.

Greedy and top-k sampling need few of a vocabulary's logits. A backend that can prove which ones matter (`head_rows`)
computes only those; every logit it returns equals that of the whole head to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = Sequence[int] | NDArray[np.int64]


class HeadNeed(NamedTuple):
    """What one token needs of the head: the k largest logits (None: all logits), and those of the ids `also`."""

    k: int | None = None
    also: Ids = ()


class HeadRows(NamedTuple):
    """Logits of one token. With `HeadNeed(k)` every logit among the k largest is there, and every tie of the k-th."""

    ids: NDArray[np.int64]  # (n,) ascending
    values: NDArray  # (n,)
    bounds: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None  # (V,) lower and upper bound of every logit
