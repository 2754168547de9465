"""Looking for NaN and Inf in what was read from a file, without the copy that a look at all of it would take."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_BLOCK = 1 << 22  # values looked at in one go


def first_not_finite(array: NDArray) -> tuple[list[int], float] | None:
    """(index, value) of the first NaN or Inf of a float array, row by row; None: all are finite.

    >>> first_not_finite(np.array([[1, 2], [np.inf, 4]], dtype=np.float32))
    ([1, 0], inf)
    """
    flat = array.reshape(-1)
    for start in range(0, flat.size, _BLOCK):
        with np.errstate(invalid="ignore"):  # a signalling NaN of bfloat16 would be a warning
            finite = np.isfinite(flat[start : start + _BLOCK])
        if not finite.all():
            at = start + int(np.argmin(finite))
            return [int(i) for i in np.unravel_index(at, array.shape)], float(flat[at])
    return None
