"""Masters of ternary weights: bfloat16 values that absmean quantisation turns into the same planes and the same scale.

mean|W| must be the scale s, so the weights that are not zero, a share d, have the mean size s / d. bfloat16 has that
number rarely: of its two neighbours each is taken as often as gives the sum, and what is left, less than one step, goes
into weights that are rounded to zero. An engine that quantises when it loads then holds the model, to 1e-7.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError
from ...reference.layers import Floats
from ...reference.quantization import SCALE_FLOOR, quantize_weights

MEAN_ERROR = 1e-7  # relative, of the scale that mean|W| gives
_ZERO_PART = 0.25  # of the scale, at most in a weight that is rounded to zero, which is below 0.5


def masters_of(name: str, w_t: NDArray[np.int8], w_dequant_scale: np.float32) -> Floats:
    """w_t (N, K) in {-1, 0, +1}, its scale -> W (N, K) bfloat16 with quantize_weights(W) = w_t, and the scale to 1e-7.

    Raises ConfigError, which names the linear, where there are none: a matrix of zeros, a scale below the floor of
    1e-5, or a small matrix without a zero, whose mean no bfloat16 values give.
    """
    scale, signs = float(w_dequant_scale), w_t.reshape(-1)
    nonzero, zero = np.flatnonzero(signs), np.flatnonzero(signs == 0)
    if not len(nonzero):
        raise _no_masters(name, "all its weights are zero, and the mean of masters that round to zero is no scale")
    if w_dequant_scale < np.float32(SCALE_FLOOR):
        raise _no_masters(name, f"its scale {scale:.3g} is below {SCALE_FLOOR:g}, the least that absmean gives")
    total = scale * signs.size
    lower = _floor(total / len(nonzero))
    upper = float(np.nextafter(ml_dtypes.bfloat16(lower), ml_dtypes.bfloat16(np.inf)))
    steps = (total - lower * len(nonzero)) / (upper - lower)
    larger = int(steps) if len(zero) else round(steps)
    sizes = np.zeros(signs.size, dtype=np.float64)
    sizes[nonzero] = lower
    sizes[nonzero[:larger]] = upper
    rest = total - lower * (len(nonzero) - larger) - upper * larger
    for index in zero:
        sizes[index] = part = _floor(min(rest, _ZERO_PART * scale))
        rest -= part
        if rest <= MEAN_ERROR / 100 * total:
            break
    if len(zero) and not sizes[zero[0]]:
        sizes[zero[0]] = scale * 2.0**-40  # else it could be read as a ternary matrix that was saved in a float dtype
    out: Floats = np.where(signs < 0, -sizes, sizes).reshape(w_t.shape).astype(ml_dtypes.bfloat16)
    again, mean = quantize_weights(out.astype(np.float32))
    if not np.array_equal(again, w_t) or abs(float(mean) / scale - 1) > MEAN_ERROR:
        raise _no_masters(
            name, f"{signs.size} bfloat16 values, none of them zero, have the mean {float(mean):.9g}, not {scale:.9g}"
        )
    return out


def _floor(value: float) -> float:
    """The largest bfloat16 that is at most `value` > 0."""
    bits = np.array([value], dtype=np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    rounded = float(bits.view(np.float32)[0])
    return rounded if rounded <= value else float(np.nextafter(ml_dtypes.bfloat16(rounded), ml_dtypes.bfloat16(0)))


def _no_masters(name: str, reason: str) -> ConfigError:
    return ConfigError(f"{name} has no bfloat16 masters: {reason}; convert to hf-bf16 or hf-packed", field=name)
