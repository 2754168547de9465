"""The dtypes that keys and values may be kept in, and what each of them loses.

float32 is the contract: what is kept is what was computed. The narrow ones are another model in the strict sense, so
they are a choice, never a default; `benchmark.measure_cache` says what they cost on a text.

float16: the nearest half; 11 bits of every number, for half the bytes.
int8: of each token and kv head, x_q = round(x / scale) with scale = max|x| / 127, half to even, and back x_q * scale:
    an error of at most half a step, max|x| / 254, in every number; for a quarter of the bytes and one float32 a head.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import NumericsError

CACHE_DTYPES = ("float32", "float16", "int8")
SMALLEST_ABSMAX = np.float32(1e-30)  # of a row of zeros: its scale is a number to divide by


def narrow(x: NDArray, dtype: np.dtype) -> tuple[NDArray, NDArray[np.float32] | None]:
    """What is kept of x (..., G, d): in that dtype, and of int8 also the scales (..., G) that it is multiplied by.

    Raises NumericsError where it cannot hold x: NaN or Inf, or in float16 a number beyond 65504.
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
    x_dequant_scale = np.maximum(absmax, SMALLEST_ABSMAX) / np.float32(127)
    x_q = np.clip(np.rint(x / x_dequant_scale[..., None]), -127, 127).astype(np.int8)
    return x_q, x_dequant_scale


def widen(kept: NDArray, scales: NDArray[np.float32] | None) -> NDArray:
    """What the model computes with: floats. float32 and float64 as they are, the others as float32.

    >>> widen(np.array([[32, -127]], dtype=np.int8), np.array([1 / 127], dtype=np.float32))[0, 1].item()
    -1.0
    """
    if scales is not None:
        return kept.astype(np.float32) * scales[..., None]
    return kept.astype(np.float32) if kept.dtype == np.float16 else kept
