"""The layouts in which other software stores ternary matrices, to and from ours (`quantization.pack_ternary`)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import ShapeError
from ..reference.layers import Floats
from ..reference.quantization import SCALE_FLOOR
from .binary_file import first_bad

_CHUNK_BYTES = 1 << 18  # of a plane at a time: what is made of it stays in the processor's cache
_PADDING = 0x55  # code 1, a zero weight, in all four fields
_GATHER = np.uint32(1 << 24 | 1 << 18 | 1 << 12 | 1 << 6)


def pack_words(words: NDArray[np.uint32], shift: int) -> NDArray[np.uint32]:
    """The codes at bit `shift` of the four bytes of each word -> packed, a byte each in as many words.

    c0 | c1 << 8 | c2 << 16 | c3 << 24 times _GATHER has c0 | c1 << 2 | c2 << 4 | c3 << 6 in its highest byte: the terms
    that meet there move by 24, 18, 12 and 6 bits, and no two terms anywhere share a bit, so nothing carries.
    """
    return (words >> np.uint32(shift) & np.uint32(0x03030303)) * _GATHER >> np.uint32(24)


def pack_from_hf(plane: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Hugging Face's layout -> ours.   plane (R, K) uint8 -> packed (4R, ceil(K/4)) uint8

    Byte row r of the plane holds weight rows r, r+R, r+2R, r+3R (not 4r..4r+3) in bits 0-1, 2-3, 4-5, 6-7.
    Source: transformers, integrations/bitnet.py, pack_weights.
    """
    n_rows, k = plane.shape
    packed = np.empty((4 * n_rows, -(-k // 4)), dtype=np.uint8)
    step = max(1, _CHUNK_BYTES // max(1, k))
    for start in range(0, n_rows, step):
        block = np.full((len(plane[start : start + step]), 4 * packed.shape[1]), _PADDING, dtype=np.uint8)
        block[:, :k] = plane[start : start + step]
        words = block.view("<u4")  # four neighbouring columns each
        for quarter in range(4):
            first = quarter * n_rows + start
            packed[first : first + len(block)] = pack_words(words, 2 * quarter)
    return packed


def hf_from_ternary(w_t: NDArray[np.int8]) -> NDArray[np.uint8]:
    """w_t (N, K) in {-1, 0, +1}, N a multiple of 4 -> Hugging Face's plane (N/4, K) uint8."""
    if w_t.shape[0] % 4:
        raise ShapeError("hf_from_ternary", expected="a multiple of 4 rows", got=f"{w_t.shape[0]} rows")
    q0, q1, q2, q3 = np.split((w_t + 1).astype(np.uint8), 4, axis=0)
    plane: NDArray[np.uint8] = np.bitwise_or(q0 | q1 << 2, q2 << 4 | q3 << 6, dtype=np.uint8)
    return plane


def first_invalid_code(packed: NDArray[np.uint8]) -> tuple[int, ...] | None:
    """Index of the first byte that holds a code 3 (in any layout of 2-bit codes), or None when all are valid."""
    return first_bad(packed, lambda block: block & (block >> 1) & 0x55 != 0)


def split_ternary(w: Floats) -> tuple[NDArray[np.int8], np.float32] | None:
    """w (N, K) that holds only -s, 0 and +s -> (w_t, s); None for anything else, which is a true master.

    Some tools save a model after quantisation in a float dtype. The scale of such a matrix is s; the absmean of it
    would be s times the share of its non-zeros.
    """
    size = np.abs(w)
    s = size.max()
    if s < SCALE_FLOOR or not ((size == s) | (size == 0)).all():
        return None
    return np.sign(w).astype(np.int8), np.float32(s)
