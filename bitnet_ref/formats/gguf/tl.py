"""Decodes TL1 and TL2 matrices of bitnet.cpp, whose tile sizes no file stores.

The tile sizes come from the first of these that is there: the caller, a kernel_config.ini, bitnet.cpp's own choice for
the shapes of the models it knows, and the bytes themselves.

The exact checks (|v| <= 13, no sign without a value, zeros behind the end) only show how many columns TL2 stores as
pairs. The order of the tiles shows in statistics alone: in a trained matrix some rows and columns have more zeros than
others, and a wrong order mixes them. A matrix without such a pattern is an error; nothing is guessed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...errors import FormatError
from .tl1 import TL1_WEIGHTS, checked_bytes, pack_tl1, tl1_nbytes, tl1_problem, unpack_tl1
from .tl2 import pack_tl2, tl2_nbytes, tl2_problem, tl2_sections, unpack_tl2
from .tl_tiles import KNOWN_TILES, Tiles, TLKind, candidates, read_kernel_config

_SIGMAS = 8.0  # how far one order must be ahead of all others: about one in 10^15 by chance, times some hundred orders
_POOL = 8  # neighbouring rows that are counted together; all tilings keep them together
_MAX_SHOWN = 6


@dataclass(frozen=True)
class TLMatrix:
    """A decoded matrix: w_t (N, K) int8, its tiles, and a sentence about where they come from."""

    w_t: NDArray[np.int8]
    tiles: Tiles
    evidence: str


def tl_nbytes(kind: TLKind, n: int, k: int) -> int:
    """Bytes of a TL1 or TL2 matrix (N, K) in a GGUF file, for all tile sizes, without the scale."""
    return tl1_nbytes(n, k) if kind == "tl1" else tl2_nbytes(n, k)


def unpack_tl(kind: TLKind, data: NDArray[np.uint8], n: int, k: int, tiles: Tiles) -> NDArray[np.int8]:
    """`unpack_tl1` or `unpack_tl2`: bytes -> w_t (N, K) int8. Raises ShapeError or FormatError."""
    return (unpack_tl1 if kind == "tl1" else unpack_tl2)(data, n, k, tiles)


def pack_tl(kind: TLKind, w_t: NDArray[np.int8], tiles: Tiles) -> NDArray[np.uint8]:
    """`pack_tl1` or `pack_tl2`: w_t (N, K) int8 -> bytes. Raises ShapeError."""
    return (pack_tl1 if kind == "tl1" else pack_tl2)(w_t, tiles)


def decode_tl(
    kind: TLKind,
    data: NDArray[np.uint8],
    n: int,
    k: int,
    *,
    tiles: Tiles | tuple[int, int, int] | None = None,
    config: Mapping[tuple[int, int], Tiles] | str | os.PathLike[str] | None = None,
    field: str | None = None,
) -> TLMatrix:
    """data (tl_nbytes,) uint8 -> the matrix (N, K), its tiles and where they come from.

    tiles: (BM, BK, bm), used without question. config: a kernel_config.ini, or the result of `read_kernel_config`.
    field: the tensor's name, for messages. Finding tiles (`infer_tiles`) takes longer than decoding: give the `tiles`
    of the first matrix of a shape to the others.

    Raises ShapeError (wrong number of bytes, tiles that do not fit) and FormatError (bytes that no such matrix has;
    undecidable tiles; bytes that contradict the tiles that bitnet.cpp uses for the shape).
    """
    if tiles is not None:
        chosen, why = Tiles(*tiles), "given by the caller"
    else:
        table = config if config is None or isinstance(config, Mapping) else read_kernel_config(config)
        if table is None:
            chosen, why = infer_tiles(kind, data, n, k, field=field)
        elif (n, k) in table:
            chosen, why = table[n, k], "from the kernel configuration"
        else:
            shapes = ", ".join(map(str, sorted(table)))
            raise FormatError(f"the kernel configuration has no shape ({n}, {k}), only {shapes[:200]}", field=field)
    try:
        return TLMatrix(unpack_tl(kind, data, n, k, chosen), chosen, f"{chosen} {why}")
    except FormatError as error:
        raise FormatError(error.message, offset=error.offset, field=field) from error


def infer_tiles(
    kind: TLKind, data: NDArray[np.uint8], n: int, k: int, *, field: str | None = None
) -> tuple[Tiles, str]:
    """The tiles of a matrix by its shape and its bytes, and a sentence with the reason.

    Raises FormatError: no tiling fits the bytes; several do and cannot be told apart (the message lists them and says
    how to choose); or the bytes clearly contradict the tiles that bitnet.cpp uses for this shape.
    """
    flat = checked_bytes(f"infer_tiles({kind})", data, tl_nbytes(kind, n, k))
    possible = candidates(kind, n, k)
    if not possible:
        raise FormatError(f"no tile sizes of {kind.upper()} fit a matrix ({n}, {k})", field=field)
    tails = {k % tiles.BK for tiles in possible}
    problems = {tail: tl1_problem(flat) if kind == "tl1" else tl2_problem(flat, n, k, tail) for tail in tails}
    fitting = [tiles for tiles in possible if problems[k % tiles.BK] is None]
    if not fitting:
        offset, what = max((p for p in problems.values() if p is not None), key=lambda problem: problem[0])
        raise FormatError(f"not a {kind.upper()} matrix ({n}, {k}) in any tiles: {what}", offset=offset, field=field)
    scores, dof = _scores(kind, flat, n, k, fitting)
    order = np.argsort(-scores, kind="stable")
    best = fitting[order[0]]
    # Twice the noise of a chi-square with this many degrees of freedom and this much pattern in it
    noise = float(np.sqrt(2 * (2 * dof + 4 * max(0.0, scores[order[0]]))))
    lead = float(scores[order[0]] - scores[order[1]]) / noise if len(fitting) > 1 else np.inf
    preset = KNOWN_TILES[kind].get((n, k))
    if preset is not None and preset[0] in fitting:
        usual, model = preset
        why = f"as bitnet.cpp uses for this shape ({model})"
        if best == usual and lead > _SIGMAS:
            return usual, f"{why}; the zeros per row and column confirm it ({lead:.0f} sigmas before any other order)"
        ahead = float(scores[order[0]] - scores[fitting.index(usual)]) / noise
        if ahead > _SIGMAS:
            message = (
                f"bitnet.cpp uses {usual} for a matrix ({n}, {k}), but its zeros per row and column speak for {best} "
                f"({ahead:.0f} sigmas); give tiles=(BM, BK, bm), or the kernel_config.ini that it was made with"
            )
            raise FormatError(message, field=field)
        return usual, f"{why}; the bytes do not tell it from {len(fitting) - 1} other orders"
    if len(fitting) == 1:
        return best, "the only ones that fit the shape and the bytes"
    if lead > _SIGMAS:
        return best, f"by the zeros per row and column: {lead:.0f} sigmas before the next of {len(fitting)} orders"
    shown = ", ".join(str(tuple(fitting[i])) for i in order[:_MAX_SHOWN]) + (
        ", ..." if len(fitting) > _MAX_SHOWN else ""
    )
    message = (
        f"the tile sizes of this {kind.upper()} matrix ({n}, {k}) are not in the file, and its bytes do not clearly "
        f"tell {len(fitting)} possible orders apart: (BM, BK, bm) = {shown}. Give tiles=(BM, BK, bm), or the "
        "kernel_config.ini that bitnet.cpp made it with"
    )
    raise FormatError(message, field=field)


def _scores(
    kind: TLKind, data: NDArray[np.uint8], n: int, k: int, tilings: list[Tiles]
) -> tuple[NDArray[np.float64], int]:
    """For each order of the tiles, how much the share of zeros differs between rows and between columns, as the excess
    of a chi-square; and the degrees of freedom. The right order has the largest excess."""
    scores = np.zeros(len(tilings), dtype=np.float64)
    counted: dict[tuple[int, int], list[_Counts]] = {}
    for number, (big_m, big_k, small_m) in enumerate(tilings):
        tail = k % big_k if kind == "tl2" else 0
        if (small_m, tail) not in counted:
            counted[small_m, tail] = [_tl1_counts(data, small_m)] if kind == "tl1" else _tl2_counts(data, n, k, tail)
        parts = counted[small_m, tail]
        scores[number] = _excess(parts[0], n, k - tail, big_m, big_k, small_m)
        if tail:
            scores[number] += _excess(parts[1], n, tail, big_m, 32, 32)
    return scores, n // _POOL + k


def _excess(counts: _Counts, n: int, columns: int, big_m: int, big_k: int, small_m: int) -> float:
    """The chi-square of the zeros per 8 rows and per column against one common share, minus its degrees of freedom.
    It is near 0 if the order is wrong or the matrix has no pattern."""
    by_row, by_column = counts
    small_k = by_column.shape[1]
    loops = n // big_m, columns // big_k, big_m // small_m, big_k // small_k
    rows = by_row.reshape(*loops, small_m // _POOL).sum(axis=(1, 3), dtype=np.float32).astype(np.float64)
    cols = by_column.reshape(*loops, small_k).sum(axis=(0, 2), dtype=np.float32).astype(np.float64)
    share = rows.sum() / (n * columns)
    if not 0 < share < 1:
        return 0.0
    in_rows = np.square(rows - _POOL * columns * share).sum() / (_POOL * columns)
    in_cols = np.square(cols - n * share).sum() / n
    return float((in_rows + in_cols) / (share * (1 - share)) - rows.size - cols.size)


# Zeros of each inner tile, in the order of the file: per eight rows, and per column.
_Counts = tuple[NDArray[np.float32], NDArray[np.float32]]


def _tl1_counts(data: NDArray[np.uint8], small_m: int) -> _Counts:
    """Tiles of bm rows and 256/bm columns: (tiles, bm/8), (tiles, 256/bm)."""
    units = data.reshape(-1, small_m // 16, 64 // small_m, 2, 8)  # tile, m16, k4, half of the 16 rows, row
    by_row = _PAIR_ZEROS.sum(axis=1, dtype=np.uint8)[units].sum(axis=(2, 4), dtype=np.float32)
    by_column = [_PAIR_ZEROS[:, c][units].sum(axis=(1, 3, 4), dtype=np.float32) for c in range(4)]
    return by_row.reshape(len(units), -1), np.stack(by_column, axis=-1).reshape(len(units), -1)


def _tl2_counts(data: NDArray[np.uint8], n: int, k: int, tail: int) -> list[_Counts]:
    """Of the triples, tiles of 32 rows and 6 columns: (tiles, 4), (tiles, 6). Of the pairs: (tiles, 4), (tiles, 4).

    The groups of eight rows are in another order, but the same one everywhere."""
    _, values_end, signs_end, pairs_end = tl2_sections(n, k, tail)
    parts = []
    for part, zeros in ((data[:values_end], _TRIPLE_ZEROS), (data[signs_end:pairs_end], _PAIR_ZEROS)):
        tiles = part.reshape(-1, 4, 8)
        by_row = zeros.sum(axis=1, dtype=np.uint8)[tiles].sum(axis=2, dtype=np.float32)
        by_column = [zeros[:, c][tiles].sum(axis=(1, 2), dtype=np.float32) for c in range(zeros.shape[1])]
        parts.append((by_row, np.stack(by_column, axis=-1)))
    return parts


def _triple_zeros() -> NDArray[np.uint8]:
    digits = np.arange(13, 29)[:, None] // np.array([9, 3, 1]) % 3  # of |v| + 13; a weight is its digit less one
    zero = (digits == 1).astype(np.uint8)
    return np.concatenate([np.repeat(zero, 16, axis=0), np.tile(zero, (16, 1))], axis=1)


_TRIPLE_ZEROS = _triple_zeros()  # (256, 6): which of the weights of a byte of two triples are zero
_PAIR_ZEROS = (TL1_WEIGHTS.view(np.int8).reshape(256, 4) == 0).astype(np.uint8)  # (256, 4): of two pairs
