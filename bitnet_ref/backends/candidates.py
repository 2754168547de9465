"""What a token needs of its logits (`HeadNeed`), and those of them that can matter to its choice (`HeadCandidates`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class HeadNeed(NamedTuple):
    """The logits that a choice among the k largest needs (None: all of them), and those of the ids `also`.

    A rule that moves some logits before it takes the k largest asks for k + (how many it moves), and for those ids.
    """

    k: int | None = None
    also: Sequence[int] | NDArray[np.int64] = ()


@dataclass(frozen=True, eq=False)
class HeadCandidates:
    """Ids and their logits, exactly as `Backend.lm_head` computes them. What `head_candidates` returns for a token.

    Every id whose logit is one of the k largest is here, and all that equal the k-th: any rule that takes the k
    largest, and among equals the smaller id, takes the same from these as from all logits.
    """

    ids: NDArray[np.int64]  # (n,) ascending
    logits: NDArray  # (n,)
    vocab_size: int
    bounds: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None  # each id's logit lies between; (V,) both

    @property
    def complete(self) -> bool:
        """Whether these are all logits there are, in the order of ids."""
        return len(self.ids) == self.vocab_size

    def rest(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Lower and upper ends of the logits that are not here.   -> (V - n,) both"""
        assert self.bounds is not None
        others = np.ones(self.vocab_size, dtype=np.bool_)
        others[self.ids] = False
        return self.bounds[0][others], self.bounds[1][others]
