"""TL2, bitnet.cpp's layout for x86: three weights in five bits, the remaining columns as pairs like TL1's.

A triple is v = 9*w0 + 3*w1 + w2: |v| (0..13) in a nibble, its sign elsewhere. With K2 = K mod BK and K3 = K - K2:
1. |v| of the first K3 columns: [N/BM][K3/BK][BM/32][BK/6][32 rows] bytes, two triples of a row in each, the first in
   the high nibble. The rows of 32 bytes run 0-7, 16-23, 8-15, 24-31.
2. signs: [N/BM][K3/BK][BM/32][BK/24][16] little-endian uint16. Word j has, from its highest bit down, row j and row
   16 + j of the first triple, then of the second, to the eighth. 1 is negative.
3. the last K2 columns: [N/BM][K2/32][BM/32][8][32 rows] bytes, two pairs 3*w0 + w1 + 4 in each, rows as in 1.
4. zeros, up to the room that 256 columns of pairs would need.
Source: bitnet.cpp, utils/convert-hf-to-gguf-bitnet.py, preprocess_three_weights_tl2 and preprocess_two_weights_tl2.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import FormatError
from .tl1 import TL1_WEIGHTS, checked_bytes, checked_ternary, tl1_problem
from .tl_tiles import Tiles, check_tiles

_ROW_GROUPS = [0, 2, 1, 3]  # of eight rows each; its own inverse
_BITS = np.arange(15, -1, -1, dtype=np.uint16)


class Sections(NamedTuple):
    """k3: the number of columns stored as triples. The others: where each part ends, in bytes from the start."""

    k3: int
    values_end: int
    signs_end: int
    pairs_end: int


def tl2_nbytes(n: int, k: int) -> int:
    """Bytes of a TL2 matrix (N, K), padding included, as the converter writes it; the same for all tile sizes.

    The scale is a separate tensor, `<name>_scale`. (ggml_nbytes rounds up to 32 and adds 32, as for TL1.)
    """
    return (k - 256) * n // 3 * 5 // 8 + 256 * n // 2 * 4 // 8


def tl2_sections(n: int, k: int, tail: int) -> Sections:
    """The sections of a matrix (N, K) with `tail` columns stored as pairs."""
    k3 = k - tail
    values_end = n * k3 // 6
    signs_end = values_end + n * k3 // 24
    return Sections(k3, values_end, signs_end, signs_end + n * tail // 4)


def _three_weights() -> NDArray[np.int8]:
    """(32, 3): |v| + 16 * sign -> w0, w1, w2; a row of 2s for an index that is no triple."""
    table = np.full((32, 3), 2, dtype=np.int8)
    for v in range(-13, 14):
        w0, rest = divmod(v + 13, 9)
        table[abs(v) + 16 * (v < 0)] = w0 - 1, rest // 3 - 1, rest % 3 - 1
    return table


_TRIPLES = _three_weights()


def tl2_problem(data: NDArray[np.uint8], n: int, k: int, tail: int) -> tuple[int, str] | None:
    """(offset, message) of the first byte that is impossible if `tail` columns are pairs, or None. The result does not
    depend on the order of the tiles, which is the same for value and sign bytes."""
    _, values_end, signs_end, pairs_end = tl2_sections(n, k, tail)
    if pairs_end > data.size:
        return data.size, f"the matrix would need {pairs_end} bytes"
    step = 1 << 14
    for first in range(0, values_end // 128, step):  # 128 value bytes, 32 sign bytes: 24 columns of 32 rows
        values = data[128 * first : min(128 * (first + step), values_end)]
        large = (values >> 4 > 13) | (values & 15 > 13)
        if large.any():
            at = int(np.argmax(large))
            return 128 * first + at, f"byte {values[at]:#04x} is no pair of triples 0..13"
        start = values_end + 32 * first
        signs = data[start : min(start + 32 * step, signs_end)]
        zero = _triples(values) == 0
        bad = zero & _negative(signs)
        if bad.any():
            return start + 32 * int(np.argmax(bad.any(axis=(1, 2)))), "a sign bit is set for a triple that is zero"
    if (pair := tl1_problem(data[signs_end:pairs_end])) is not None:
        return signs_end + pair[0], pair[1]
    padding = data[pairs_end:] != 0
    if padding.any():
        at = pairs_end + int(np.argmax(padding))
        return at, f"byte {data[at]:#04x} stands in the padding, which is zero"
    return None


def _triples(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Value bytes -> |v| (blocks, 32 rows, 8 triples), a block being 24 columns."""
    pairs = np.stack([values >> 4, values & 15], axis=-1)
    nibbles = pairs.reshape(-1, 4, 4, 8, 2)  # block, byte column, group, row, nibble
    return nibbles[:, :, _ROW_GROUPS].transpose(0, 2, 3, 1, 4).reshape(-1, 32, 8)


def _negative(signs: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Sign bytes -> (blocks, 32 rows, 8 triples)."""
    words = np.ascontiguousarray(signs).view("<u2").reshape(-1, 16, 1)
    bits = (words >> _BITS & 1).astype(np.bool_)  # (blocks, 16, 16): 8 triples x 2 halves of the rows
    return bits.reshape(-1, 16, 8, 2).transpose(0, 3, 1, 2).reshape(-1, 32, 8)


def unpack_tl2(data: NDArray[np.uint8], n: int, k: int, tiles: Tiles) -> NDArray[np.int8]:
    """data (tl2_nbytes(N, K),) uint8 -> w_t (N, K) int8 in {-1, 0, +1}.

    Raises ShapeError (tiles that do not fit, another number of bytes) and FormatError with the offset: a value above
    13, a sign without a value, a nibble above 8 among the pairs, padding that is not zero.
    """
    check_tiles("tl2", n, k, tiles)
    flat = checked_bytes("unpack_tl2", data, tl2_nbytes(n, k))
    problem = tl2_problem(flat, n, k, k % tiles.BK)
    if problem:
        raise FormatError(f"not a TL2 matrix ({n}, {k}) with {tiles}: {problem[1]}", offset=problem[0])
    k3, values_end, signs_end, pairs_end = tl2_sections(n, k, k % tiles.BK)
    w_t = np.empty((n, k), dtype=np.int8)
    big_m, big_k, _ = tiles
    n_tiles, ms = n // big_m, big_m // 32
    values, signs = flat[:values_end].reshape(n_tiles, -1), flat[values_end:signs_end].reshape(n_tiles, -1)
    pairs = flat[signs_end:pairs_end].reshape(n_tiles, -1)
    for tile in range(n_tiles):
        rows = w_t[tile * big_m : (tile + 1) * big_m]
        codes = _triples(values[tile]) + (_negative(signs[tile]).view(np.uint8) << 4)
        codes = codes.reshape(k3 // big_k, ms, big_k // 24, 32, 8).transpose(1, 3, 0, 2, 4)  # ms, row, kb, ks, triple
        rows[:, :k3] = _TRIPLES[codes.reshape(big_m, k3 // 3)].reshape(big_m, k3)
        quads = TL1_WEIGHTS[pairs[tile]].reshape((k - k3) // 32, ms, 8, 4, 8)[:, :, :, _ROW_GROUPS]
        ordered = np.ascontiguousarray(quads.transpose(1, 3, 4, 0, 2))  # ms, group, row, kb, ks
        rows[:, k3:] = ordered.reshape(big_m, (k - k3) // 4).view(np.int8)
    return w_t


def pack_tl2(w_t: NDArray[np.int8], tiles: Tiles) -> NDArray[np.uint8]:
    """w_t (N, K) int8 in {-1, 0, +1} -> (tl2_nbytes(N, K),) uint8, byte for byte what bitnet.cpp's converter writes.

    Raises ShapeError for a matrix that is not ternary int8 and for tiles that do not fit it.
    """
    n, k = checked_ternary("pack_tl2", w_t)
    check_tiles("tl2", n, k, tiles)
    k3, values_end, signs_end, pairs_end = tl2_sections(n, k, k % tiles.BK)
    data = np.zeros(tl2_nbytes(n, k), dtype=np.uint8)
    big_m, big_k, _ = tiles
    n_tiles, ms = n // big_m, big_m // 32
    values, signs = data[:values_end].reshape(n_tiles, -1), data[values_end:signs_end].reshape(n_tiles, -1)
    pairs = data[signs_end:pairs_end].reshape(n_tiles, -1)
    for tile in range(n_tiles):
        rows = w_t[tile * big_m : (tile + 1) * big_m]
        v = 9 * rows[:, 0:k3:3] + 3 * rows[:, 1:k3:3] + rows[:, 2:k3:3]  # (BM, K3/3) int8
        blocks = v.reshape(ms, 32, k3 // big_k, big_k // 24, 8).transpose(2, 0, 3, 1, 4).reshape(-1, 32, 8)
        nibbles = np.abs(blocks).view(np.uint8).reshape(-1, 4, 8, 4, 2)  # block, group, row, byte, nibble
        nibbles = nibbles[:, _ROW_GROUPS].transpose(0, 3, 1, 2, 4)
        values[tile] = (nibbles[..., 0] << 4 | nibbles[..., 1]).ravel()
        bits = (blocks < 0).reshape(-1, 2, 16, 8).transpose(0, 2, 3, 1).reshape(-1, 16)
        signs[tile] = np.packbits(bits, axis=-1).view(">u2").astype("<u2").view(np.uint8).ravel()
        codes = (3 * rows[:, k3::2] + rows[:, k3 + 1 :: 2] + np.int8(4)).view(np.uint8)
        quads = (codes[:, 0::2] << 4 | codes[:, 1::2]).reshape(ms, 4, 8, (k - k3) // 32, 8)[:, _ROW_GROUPS]
        pairs[tile] = quads.transpose(3, 0, 4, 1, 2).ravel()
    return data
