"""The dtypes of keys and values at rest, and what each of them loses.

float32 is the contract: it stores what was computed. With a narrow dtype the model is, strictly, another one, so it is
never a default; `bitnet-ref bench cache` measures its effect on a text.

float16: the nearest half: 11 bits of every number, for half the bytes.
int8: for each token and kv head, x_q = round(x / scale) with scale = max|x| / 127, half to even; back as x_q * scale.
    The error is at most half a step, max|x| / 254, for a quarter of the bytes and one float32 per head.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import NumericsError

CACHE_DTYPES = ("float32", "float16", "int8")
MIN_ABSMAX = np.float32(1e-30)  # for a row of zeros, whose scale is a divisor


def narrow(x: NDArray, dtype: np.dtype) -> tuple[NDArray, NDArray[np.float32] | None]:
    """x (..., G, d) -> the same in that dtype, and for int8 its scales (..., G), else None.

    Raises NumericsError when the dtype cannot hold x: NaN or Inf, or in float16 a number beyond 65504.
    """
    if dtype.itemsize > 2:
        return x, None
    if dtype == np.int8:
        return quantize_rows(x)
    with np.errstate(over="ignore"):
        half = x.astype(np.float16)
    if not np.isfinite(half).all():
        largest = float(np.abs(x).max())
        raise NumericsError(f"KVCache.append: float16 cannot hold {largest:g}; keep the cache in float32")
    return half, None


def quantize_rows(x: NDArray) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """x (..., d) -> x_q int8 (..., d), x_dequant_scale float32 (...)

    >>> quantize_rows(np.array([[0.5, -2.0, 1.0]], dtype=np.float32))[0].tolist()
    [[32, -127, 64]]
    """
    x = x.astype(np.float32, copy=False)
    absmax = np.abs(x).max(axis=-1)
    if not np.isfinite(absmax).all():
        raise NumericsError("KVCache.append: NaN or Inf cannot be kept in int8")
    x_dequant_scale = np.maximum(absmax, MIN_ABSMAX) / np.float32(127)
    x_q = np.clip(np.rint(x / x_dequant_scale[..., None]), -127, 127).astype(np.int8)
    return x_q, x_dequant_scale


def widen(stored: NDArray, scales: NDArray[np.float32] | None) -> NDArray:
    """The stored numbers as floats: float32 and float64 unchanged, the others as float32.

    >>> widen(np.array([[32, -127]], dtype=np.int8), np.array([1 / 127], dtype=np.float32))[0, 1].item()
    -1.0
    """
    if scales is not None:
        return stored.astype(np.float32) * scales[..., None]
    return stored.astype(np.float32) if stored.dtype == np.float16 else stored
