"""How a wrong tensor relates to the right one: the first clue to a cause, before any hypothesis is tested."""

from __future__ import annotations

from enum import StrEnum

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

_MAX_RESIDUAL = 0.02  # SCALED: share of the difference that may remain after the best factor is applied


class Kind(StrEnum):
    """The relation of a wrong tensor to the right one."""

    ZEROS = "all zeros"
    SCALED = "the right tensor times one number"
    PERMUTED = "the right values in another order"
    SHIFTED = "the right rows at other tokens"
    WRAPPED = "the right integers modulo 2^16"
    ROUNDED = "the right values with fewer bits"
    MASKED = "other places masked"
    NEARLY = "off by one at a few places"
    OTHER = "other values"


def kind_of(right: NDArray, wrong: NDArray) -> Kind:
    """The first Kind that fits two tensors of any numeric dtype; OTHER where their shapes differ."""
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
    if ratio and np.linalg.norm(w - ratio * r) < _MAX_RESIDUAL * np.linalg.norm(w - r):
        return Kind.SCALED
    if r.ndim and len(r) > 2 and any(np.allclose(w[1:-1], np.roll(r, by, axis=0)[1:-1]) for by in (1, -1)):
        return Kind.SHIFTED
    if np.allclose(np.sort(r, axis=None), np.sort(w, axis=None), rtol=1e-5):
        return Kind.PERMUTED
    for narrow in (ml_dtypes.bfloat16, np.float16):
        with np.errstate(over="ignore"):
            if np.array_equal(w.astype(narrow).astype(np.float64), w) and np.allclose(w, r, rtol=1e-2):
                return Kind.ROUNDED
    return Kind.OTHER


def scale_ratio(right: NDArray, wrong: NDArray) -> float:
    """The least-squares factor: wrong ~ factor * right. 0 where right is all zeros."""
    r, w = right.astype(np.float64).ravel(), wrong.astype(np.float64).ravel()
    square = float(r @ r)
    return float(r @ w) / square if square else 0.0


def relative_error(right: NDArray, wrong: NDArray) -> float:
    """Relative L2 error |wrong - right| / |right|. inf where the shapes differ or `wrong` is not finite."""
    if right.shape != wrong.shape:
        return float("inf")
    r, w = right.astype(np.float64), wrong.astype(np.float64)
    if not np.isfinite(w).all():
        return float("inf")
    length = float(np.linalg.norm(r))
    return float(np.linalg.norm(w - r)) / length if length else float(np.linalg.norm(w) > 0)
