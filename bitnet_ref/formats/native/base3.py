"""Ternary matrices at 1.6 bits per weight, five in a byte, for storage. Kernels start from two bits (`quantization`).

    byte j of row n  =  c[5j] + 3 c[5j+1] + 9 c[5j+2] + 27 c[5j+3] + 81 c[5j+4]        c = w_t + 1, in 0..2

3^5 = 243, so bytes 243 to 255 never occur. The minimum is log2(3) = 1.585 bits per weight; this is 1% above it and 20%
below two bits. A row whose length is no multiple of 5 is padded with code 1, a zero weight.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...reference.quantization import unpack_ternary
from ..binary_file import first_bad

TRITS_PER_BYTE = 5
BYTE_VALUES = 3**TRITS_PER_BYTE
_ZEROS = 121  # the byte of five zero weights: 1 + 3 + 9 + 27 + 81
_PLACES = np.array([1, 3, 9, 27, 81], dtype=np.uint8)
_BLOCK_BYTES = 1 << 18  # base-3 bytes decoded at a time: the result stays in cache

# Byte -> its five weights as 2-bit codes, the first in the lowest bits: ten bits. Four of these make five whole bytes
# of the 2-bit form, so no weight is ever unpacked.
_DIGITS = np.arange(BYTE_VALUES)[:, None] // _PLACES % 3  # (243, 5)
_BYTE_TO_CODES = (_DIGITS << (2 * np.arange(TRITS_PER_BYTE))).sum(axis=1).astype(np.uint64)  # (243,)


def pack_base3(packed: NDArray[np.uint8], in_features: int) -> NDArray[np.uint8]:
    """Two bits -> base 3.   packed (N, ceil(K/4)), as `quantization.pack_ternary` makes it -> (N, ceil(K/5)) uint8

    >>> from bitnet_ref.reference.quantization import pack_ternary
    >>> pack_base3(pack_ternary(np.array([[-1, 0, 1, 1, -1, 1]], dtype=np.int8)), 6).tolist()  # 0 + 3 + 18 + 54 + 0
    [[75, 122]]
    """
    columns = -(-in_features // TRITS_PER_BYTE)
    out = np.empty((len(packed), columns), dtype=np.uint8)
    rows = max(1, _BLOCK_BYTES // columns)
    for start in range(0, len(packed), rows):
        w_t = unpack_ternary(packed[start : start + rows], in_features)
        codes = np.ones((len(w_t), columns * TRITS_PER_BYTE), dtype=np.uint8)
        codes[:, :in_features] = w_t + 1
        np.matmul(codes.reshape(len(w_t), columns, TRITS_PER_BYTE), _PLACES, out=out[start : start + rows])
    return out


def unpack_base3(trits: NDArray[np.uint8], in_features: int) -> NDArray[np.uint8]:
    """Base 3 -> two bits.   trits (N, ceil(K/5)) uint8, all below 243 -> packed (N, ceil(K/4)) uint8"""
    n, columns = trits.shape
    packed = np.empty((n, -(-in_features // 4)), dtype=np.uint8)
    fours = -(-columns // 4)
    rows = max(1, _BLOCK_BYTES // (4 * fours))
    for start in range(0, n, rows):
        block = np.full((min(rows, n - start), 4 * fours), _ZEROS, dtype=np.uint8)
        block[:, :columns] = trits[start : start + rows]
        codes = _BYTE_TO_CODES[block].reshape(len(block), fours, 4)
        forty_bits = codes[..., 0] | codes[..., 1] << 10 | codes[..., 2] << 20 | codes[..., 3] << 30
        five_bytes = forty_bits.astype("<u8", copy=False).view(np.uint8).reshape(len(block), fours, 8)[..., :5]
        packed[start : start + rows] = five_bytes.reshape(len(block), -1)[:, : packed.shape[1]]
    return packed


def first_invalid_byte(trits: NDArray[np.uint8]) -> tuple[int, ...] | None:
    """Index of the first byte that is no five trits (243 or more), or None when all are."""
    return first_bad(trits, lambda block: block >= BYTE_VALUES)
