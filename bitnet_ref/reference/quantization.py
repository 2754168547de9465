"""What BitNet b1.58 *is*: ternary weights, int8 activations, an exact integer product. In NumPy, nothing else.

A BitLinear layer computes y = x W^T with both sides quantised:

    weights      s   = max(mean|W|, 1e-5)             one scale for the matrix ("absmean")
                 w_t = clip(round(W * (1/s)), -1, 1)   ternary: W ~ w_t * s
    activations  a   = 127 / max(max|x|, 1e-5)        one scale for each token ("absmax")
                 x_q = clip(round(x * a), -128, 127)   int8:    x ~ x_q / a
    product      acc = x_q w_t^T                       int32, exact
                 y   = acc * (s / a)

Source: "The Era of 1-bit LLMs" (arXiv:2402.17764), section 2, as computed by transformers' integrations/bitnet.py.

The sum is exact: |acc| <= 128 K, and float32 holds every integer up to 2^24. So for K < 131,072 a float32 product of
the same integers equals an int32 kernel's, in any order of summation: every backend must give EQUAL accumulators.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ..errors import NumericsError, ShapeError
from .layers import Floats

SCALE_FLOOR = 1e-5  # both scales' denominators are clamped to this: an all-zero matrix or token must not divide by zero
CODES_PER_BYTE = 4
FLOAT32_EXACT_K = 2**24 // 128  # below this many inputs a float32 sum of int8 * ternary products is exact
_BLOCK_VALUES = 1 << 20  # weights unpacked at a time by the product below: 4 MB of float32, which stays in cache


def absmean_scale(w: Floats) -> np.float32:
    """The weight scale s = max(mean|W|, 1e-5) of a whole matrix, in float32. Raises NumericsError for NaN or Inf."""
    # Summed in float64 and rounded once, so a matrix read in pieces has the same scale. transformers sums in float32.
    mean = float(np.abs(w, dtype=np.float32).mean(dtype=np.float64))
    if not math.isfinite(mean):
        raise NumericsError("absmean_scale: the weight matrix holds NaN or Inf")
    return np.float32(max(mean, SCALE_FLOOR))


def quantize_weights(w: Floats) -> tuple[NDArray[np.int8], np.float32]:
    """Absmean quantisation. w (N, K) float -> w_t (N, K) int8 in {-1, 0, +1}, w_dequant_scale: W ~ w_t * scale."""
    w_dequant_scale = absmean_scale(w)
    w_scaled = w.astype(np.float32) * (np.float32(1.0) / w_dequant_scale)
    return np.clip(np.rint(w_scaled), -1, 1).astype(np.int8), w_dequant_scale  # rint: half to even


def quantize_activations(x: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Absmax quantisation, token by token. x (N, K) float -> x_q (N, K) int8, x_quant_scale (N, 1): x ~ x_q / scale.

    Raises NumericsError when x holds NaN or Inf, which int8 would hide.
    """
    largest = np.abs(x).max(axis=-1, keepdims=True)  # (N, 1); NaN propagates
    if not np.isfinite(largest).all():
        row = int(np.flatnonzero(~np.isfinite(largest))[0])
        raise NumericsError(f"quantize_activations: the activation of token {row} holds NaN or Inf")
    x_quant_scale = x.dtype.type(127) / np.maximum(largest, x.dtype.type(SCALE_FLOOR))
    return np.clip(np.rint(x * x_quant_scale), -128, 127).astype(np.int8), x_quant_scale


def dequantize(acc: NDArray[np.int32], w_dequant_scale: np.float32, x_quant_scale: Floats) -> Floats:
    """acc (N, out) int32 -> y (N, out) in x_quant_scale's dtype. One division and one product, each rounded once."""
    return acc.astype(x_quant_scale.dtype) * (w_dequant_scale / x_quant_scale)


# A ternary matrix at rest: four weights per byte along the input axis, the first in the lowest bits, code = w_t + 1.
#     byte j of row n  =  c[4j] | c[4j+1] << 2 | c[4j+2] << 4 | c[4j+3] << 6        code 3 never occurs
# A row whose length is no multiple of 4 ends in code 1: a zero weight, so the padding adds nothing to any sum.
_ALL_BYTES = np.arange(256, dtype=np.uint8)
_BYTE_TO_TERNARY = np.stack([((_ALL_BYTES >> shift) & 3).astype(np.int8) - 1 for shift in (0, 2, 4, 6)], axis=-1)
_BYTE_TO_FLOAT = {dtype: _BYTE_TO_TERNARY.astype(dtype) for dtype in (np.float32, np.float64)}  # (256, 4) each


def pack_ternary(w_t: NDArray[np.int8]) -> NDArray[np.uint8]:
    """w_t (N, K) in {-1, 0, +1} -> packed (N, ceil(K/4)) uint8.

    >>> pack_ternary(np.array([[-1, 0, 1, 1, -1]], dtype=np.int8)).tolist()  # 0b10_10_01_00, 0b01_01_01_00
    [[164, 84]]
    """
    if w_t.ndim != 2 or w_t.size == 0 or w_t.min() < -1 or w_t.max() > 1:
        raise ShapeError("pack_ternary", expected="a non-empty (N, K) matrix of -1, 0, +1", got=f"{w_t.shape}: {w_t}")
    codes = np.ones((len(w_t), -(-w_t.shape[1] // CODES_PER_BYTE) * CODES_PER_BYTE), dtype=np.uint8)
    codes[:, : w_t.shape[1]] = w_t + 1
    packed: NDArray[np.uint8] = codes[:, 0::4] | codes[:, 1::4] << 2 | codes[:, 2::4] << 4 | codes[:, 3::4] << 6
    return packed


def unpack_ternary(packed: NDArray[np.uint8], in_features: int) -> NDArray[np.int8]:
    """packed (N, ceil(K/4)) uint8 -> w_t (N, K) int8, K = in_features."""
    w_t: NDArray[np.int8] = np.take(_BYTE_TO_TERNARY, packed, axis=0)  # a tenth of the time of indexing with them
    return w_t.reshape(len(packed), -1)[:, :in_features]


def ternary_matmul(x_q: NDArray[np.int8], packed: NDArray[np.uint8], in_features: int) -> NDArray[np.int32]:
    """The exact integer product. x_q (M, K) int8, packed (N, ceil(K/4)) uint8 -> acc (M, N) int32.

    A float product of the same integers, some rows at a time: as exact as NumPy's integer product, and much faster.
    """
    columns = -(-in_features // CODES_PER_BYTE)
    if x_q.dtype != np.int8 or x_q.ndim != 2 or x_q.shape[1] != in_features or packed.shape[1:] != (columns,):
        expected = f"x_q int8 (M, {in_features}) and packed (N, {columns})"
        raise ShapeError("ternary_matmul", expected=expected, got=f"x_q {x_q.dtype} {x_q.shape}, packed {packed.shape}")
    exact = np.float32 if in_features < FLOAT32_EXACT_K else np.float64
    x = np.zeros((len(x_q), columns * CODES_PER_BYTE), dtype=exact)  # padded with zeros to whole bytes
    x[:, :in_features] = x_q
    acc = np.empty((len(x_q), len(packed)), dtype=np.int32)
    rows = max(1, _BLOCK_VALUES // x.shape[1])
    for start in range(0, len(packed), rows):
        w_t = np.take(_BYTE_TO_FLOAT[exact], packed[start : start + rows], axis=0).reshape(-1, x.shape[1])
        acc[:, start : start + rows] = x @ w_t.T
    return acc
