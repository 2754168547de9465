"""Looking for NaN and Inf in what was read from a file, without the copy that a look at all of it would take."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_BLOCK = 1 << 18  # values looked at in one go
_EXPONENTS = {"bfloat16": np.uint16(0x7F80), "float16": np.uint16(0x7C00)}  # all set: NaN or Inf


def first_not_finite(array: NDArray) -> tuple[list[int], float] | None:
    """(index, value) of the first NaN or Inf of a float array, row by row; None: all are finite.

    >>> first_not_finite(np.array([[1, 2], [np.inf, 4]], dtype=np.float32))
    ([1, 0], inf)
    """
    flat = array.reshape(-1)
    for start in range(0, flat.size, _BLOCK):
        finite = _are_finite(flat[start : start + _BLOCK])
        if not finite.all():
            at = start + int(np.argmin(finite))
            return [int(i) for i in np.unravel_index(at, array.shape)], float(flat[at])
    return None


def _are_finite(values: NDArray) -> NDArray[np.bool_]:
    exponent = _EXPONENTS.get(values.dtype.name)
    if exponent is None:
        return np.isfinite(values)
    return values.view(np.uint16) & exponent != exponent  # `isfinite` of 16 bits goes through float32
