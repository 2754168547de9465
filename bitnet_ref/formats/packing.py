"""The layouts in which other software stores ternary matrices, to and from ours (`quantization.pack_ternary`)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import ShapeError
from ..quantization import pack_ternary

_CHUNK_BYTES = 1 << 20


def pack_from_hf(plane: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Hugging Face's layout -> ours.   plane (R, K) uint8 -> packed (4R, ceil(K/4)) uint8

    Byte row r of the plane holds weight rows r, r+R, r+2R, r+3R (not 4r..4r+3) in bits 0-1, 2-3, 4-5, 6-7.
    Source: transformers, integrations/bitnet.py, pack_weights.
    """
    n_rows, k = plane.shape
    packed = np.empty((4 * n_rows, -(-k // 4)), dtype=np.uint8)
    step = max(1, _CHUNK_BYTES // max(1, k))
    for start in range(0, n_rows, step):
        block = plane[start : start + step]
        for quarter in range(4):
            w_t = (block >> (2 * quarter) & 3).view(np.int8) - np.int8(1)
            first = quarter * n_rows + start
            packed[first : first + len(block)] = pack_ternary(w_t)
    return packed


def hf_from_ternary(w_t: NDArray[np.int8]) -> NDArray[np.uint8]:
    """w_t (N, K) in {-1, 0, +1}, N a multiple of 4 -> Hugging Face's plane (N/4, K) uint8."""
    if w_t.shape[0] % 4:
        raise ShapeError("hf_from_ternary", expected="a multiple of 4 rows", got=f"{w_t.shape[0]} rows")
    q0, q1, q2, q3 = np.split((w_t + 1).astype(np.uint8), 4, axis=0)
    return np.bitwise_or(q0 | q1 << 2, q2 << 4 | q3 << 6, dtype=np.uint8)
