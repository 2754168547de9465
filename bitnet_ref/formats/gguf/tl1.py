"""TL1, bitnet.cpp's layout for ARM: four weights per byte, as two base-3 pairs, in nested tiles.

A pair is the nibble 3*w0 + w1 + 4 (0..8), the first pair of a byte in its high nibble; the four weights are neighbours
in a row. Bytes run over [N/BM][K/BK][BM/bm][BK/by][bm/16][by/4][16 rows], by = 256/bm.
Source: bitnet.cpp, utils/convert-hf-to-gguf-bitnet.py, process_tl1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...errors import FormatError, ShapeError
from ..binary_file import first_bad
from .tl_tiles import Tiles, check_tiles


def tl1_nbytes(n: int, k: int) -> int:
    """Bytes of a TL1 matrix (N, K). The scale is a separate tensor, `<name>_scale`.

    (ggml_nbytes gives 32 more: bitnet.cpp's reader takes the scale from the tensor that follows.)
    """
    return n * k // 4


def _four_weights() -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    """byte -> its four int8 weights as one uint32; byte -> whether it is two nibbles of 0..8."""
    byte = np.arange(256, dtype=np.int16)
    high, low = byte >> 4, byte & 15
    weights = np.stack([high // 3, high % 3, low // 3, low % 3], axis=1) - 1
    return weights.astype(np.int8).view(np.uint32).ravel(), (high <= 8) & (low <= 8)


TL1_WEIGHTS, _VALID = _four_weights()


def tl1_problem(data: NDArray[np.uint8]) -> tuple[int, str] | None:
    """(offset, message) of the first byte that is impossible, or None."""
    at = first_bad(data, lambda block: ~_VALID[block])
    return None if at is None else (at[0], f"byte {data[at]:#04x} is no pair of nibbles 0..8")


def _tile_shape(k: int, tiles: Tiles) -> tuple[int, ...]:
    """The axes of the bytes of BM rows: K/BK, BM/bm, BK/by, bm/16, by/4, 16."""
    big_m, big_k, small_m = tiles
    small_k = 256 // small_m
    return k // big_k, big_m // small_m, big_k // small_k, small_m // 16, small_k // 4, 16


def unpack_tl1(data: NDArray[np.uint8], n: int, k: int, tiles: Tiles) -> NDArray[np.int8]:
    """data (N*K/4,) uint8 -> w_t (N, K) int8 in {-1, 0, +1}.

    Raises ShapeError (tiles that do not fit, another number of bytes) and FormatError (a nibble above 8; its offset).
    """
    check_tiles("tl1", n, k, tiles)
    flat = checked_bytes("unpack_tl1", data, tl1_nbytes(n, k))
    if problem := tl1_problem(flat):
        raise FormatError(problem[1], offset=problem[0])
    w_t = np.empty((n, k), dtype=np.int8)
    quads = w_t.view(np.uint32)  # (N, K/4)
    per_tile = tiles.BM * k // 4
    kb, ms, ks, m16, k4, row = range(6)
    for tile in range(n // tiles.BM):
        part = flat[tile * per_tile : (tile + 1) * per_tile]
        ordered = TL1_WEIGHTS[part].reshape(_tile_shape(k, tiles)).transpose(ms, m16, row, kb, ks, k4)
        quads[tile * tiles.BM : (tile + 1) * tiles.BM] = ordered.reshape(tiles.BM, k // 4)
    return w_t


def pack_tl1(w_t: NDArray[np.int8], tiles: Tiles) -> NDArray[np.uint8]:
    """w_t (N, K) int8 in {-1, 0, +1} -> (N*K/4,) uint8, byte for byte what bitnet.cpp's converter writes.

    Raises ShapeError for a matrix that is not ternary int8 and for tiles that do not fit it.
    """
    n, k = checked_ternary("pack_tl1", w_t)
    check_tiles("tl1", n, k, tiles)
    data = np.empty(tl1_nbytes(n, k), dtype=np.uint8)
    per_tile = tiles.BM * k // 4
    kb, ms, ks, m16, k4, row = _tile_shape(k, tiles)
    for tile in range(n // tiles.BM):
        rows = w_t[tile * tiles.BM : (tile + 1) * tiles.BM]
        pairs = (3 * rows[:, 0::2] + rows[:, 1::2] + np.int8(4)).view(np.uint8)
        codes = (pairs[:, 0::2] << 4 | pairs[:, 1::2]).reshape(ms, m16, row, kb, ks, k4)
        data[tile * per_tile : (tile + 1) * per_tile] = codes.transpose(3, 0, 4, 1, 5, 2).ravel()
    return data


def checked_bytes(op: str, data: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """`data` flattened. ShapeError unless it is uint8 and has `size` bytes."""
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.size != size:
        got = f"{data.size} of {data.dtype}" if isinstance(data, np.ndarray) else type(data).__name__
        raise ShapeError(op, expected=f"{size} bytes, as a uint8 array", got=got)
    return data.reshape(-1)


def checked_ternary(op: str, w_t: NDArray[np.int8]) -> tuple[int, int]:
    """The shape of `w_t`. ShapeError unless it is an int8 matrix of -1, 0 and +1."""
    if not isinstance(w_t, np.ndarray) or w_t.dtype != np.int8 or w_t.ndim != 2:
        got = f"{w_t.dtype} {w_t.shape}" if isinstance(w_t, np.ndarray) else type(w_t).__name__
        raise ShapeError(op, expected="an int8 matrix (N, K)", got=got)
    if w_t.size and (w_t.min() < -1 or w_t.max() > 1):
        raise ShapeError(op, expected="weights -1, 0 and +1", got=f"values from {w_t.min()} to {w_t.max()}")
    return w_t.shape
