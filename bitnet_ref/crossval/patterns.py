"""What a wrong tensor looks like beside the right one: the first clue to a cause, before anything is tested."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .explain.hypotheses.base import Kind

_LEFT_OVER = 0.02  # share of the difference that a tensor which is "the right one times a number" may leave unexplained


def kind_of(right: NDArray, wrong: NDArray) -> Kind:
    """The simplest relation between two tensors of one name. Both any shape and numeric dtype."""
    if right.shape != wrong.shape:
        return Kind.OTHER
    r, w = right.astype(np.float64), wrong.astype(np.float64)
    if (np.isfinite(r) != np.isfinite(w)).any():
        return Kind.MASKED
    r, w = np.where(np.isfinite(r), r, 0), np.where(np.isfinite(w), w, 0)  # a causal mask's -inf
    if r.any() and not w.any():
        return Kind.ZEROS
    if right.dtype.kind == "i":
        difference = w - r
        if difference.any() and not (difference % 0x10000).any():
            return Kind.WRAPPED
        if np.abs(difference).max(initial=0) <= 1 and (difference == 0).mean() > 0.5:
            return Kind.NEARLY
    ratio = scale_ratio(r, w)
    if ratio and np.linalg.norm(w - ratio * r) < _LEFT_OVER * np.linalg.norm(w - r):
        return Kind.SCALED
    if r.ndim and len(r) > 2 and any(np.allclose(w[1:-1], np.roll(r, by, axis=0)[1:-1]) for by in (1, -1)):
        return Kind.SHIFTED
    if np.allclose(np.sort(r, axis=None), np.sort(w, axis=None), rtol=1e-5):
        return Kind.PERMUTED
    for short in (ml_dtypes.bfloat16, np.float16):
        with np.errstate(over="ignore"):
            if np.array_equal(w.astype(short).astype(np.float64), w) and np.allclose(w, r, rtol=1e-2):
                return Kind.ROUNDED
    return Kind.OTHER


def scale_ratio(right: NDArray, wrong: NDArray) -> float:
    """The number that times `right` comes nearest to `wrong` (least squares); 0 where right is all zeros."""
    r, w = right.astype(np.float64).ravel(), wrong.astype(np.float64).ravel()
    square = float(r @ r)
    return float(r @ w) / square if square else 0.0


def relative_error(right: NDArray, wrong: NDArray) -> float:
    """|wrong - right| / |right|, lengths over all elements; inf where the shapes differ or wrong is not finite."""
    if right.shape != wrong.shape:
        return float("inf")
    r, w = right.astype(np.float64), wrong.astype(np.float64)
    if not np.isfinite(w).all():
        return float("inf")
    length = float(np.linalg.norm(r))
    return float(np.linalg.norm(w - r)) / length if length else float(np.linalg.norm(w) > 0)
