"""Tile sizes of bitnet.cpp's TL1 and TL2 layouts: which are possible, and in what order each puts the weights.

A TL file does not store its tile sizes. bitnet.cpp reads them from `include/kernel_config.ini`, which stays in the
build folder. `tl.py` chooses among candidates by the bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from configparser import ConfigParser
from configparser import Error as IniError
from math import isqrt
from pathlib import Path
from typing import Literal, NamedTuple

from ...errors import FormatError, ShapeError
from ...system.json_file import read_bounded

TLKind = Literal["tl1", "tl2"]
TL2_ROWS, TL2_COLUMNS, TL2_SIGN_COLUMNS = 32, 6, 24  # what 32 bytes of nibbles, and of sign bits, cover
TL2_MAX_TAIL = 256  # columns stored as pairs; the converter reserves room for this many
MAX_INI_BYTES = 1 << 20


class Tiles(NamedTuple):
    """The three numbers of a kernel, named as in bitnet.cpp's options; its ini calls them bm, bk and bmm."""

    BM: int  # rows of the outer tile
    BK: int  # columns of the outer tile
    bm: int  # rows of the inner tile; it is 256 / bm (TL1) or 192 / bm (TL2) columns wide


# The tile sizes that setup_env.py gives to codegen_tl1.py and codegen_tl2.py for the shapes (out, in) of the models it
# knows: model, shape, TL1, TL2. It uses the 3B kernels for BitNet 2B-4T as well, whose shapes differ: the converter
# refuses that model as TL1 or TL2.
_LARGE, _3B, _LLAMA3 = "bitnet_b1_58-large", "bitnet_b1_58-3B", "Llama3-8B-1.58-100B-tokens"
_PRESETS = (
    (_LARGE, (1536, 4096), Tiles(256, 128, 32), Tiles(256, 96, 32)),
    (_LARGE, (1536, 1536), Tiles(128, 64, 64), Tiles(128, 192, 32)),
    (_LARGE, (4096, 1536), Tiles(256, 128, 32), Tiles(256, 96, 32)),
    (_3B, (3200, 8640), Tiles(160, 64, 32), Tiles(160, 96, 32)),
    (_3B, (3200, 3200), Tiles(320, 128, 64), Tiles(320, 96, 32)),
    (_3B, (8640, 3200), Tiles(320, 64, 32), Tiles(320, 96, 32)),
    (_LLAMA3, (14336, 4096), Tiles(256, 128, 32), Tiles(256, 96, 32)),
    (_LLAMA3, (4096, 14336), Tiles(128, 64, 64), Tiles(128, 96, 32)),
    (_LLAMA3, (1024, 4096), Tiles(256, 128, 32), Tiles(256, 96, 32)),
    (_LLAMA3, (4096, 4096), Tiles(128, 64, 64), Tiles(128, 96, 32)),
)
# kind -> shape -> (tiles, model) of bitnet.cpp's own set-up
KNOWN_TILES: dict[TLKind, dict[tuple[int, int], tuple[Tiles, str]]] = {
    "tl1": {shape: (tl1, model) for model, shape, tl1, _ in _PRESETS},
    "tl2": {shape: (tl2, model) for model, shape, _, tl2 in _PRESETS},
}


def tiles_problem(kind: TLKind, n: int, k: int, tiles: Tiles) -> str | None:
    """Why a matrix (N, K) cannot be laid out in these tiles; None if it can."""
    big_m, big_k, small_m = tiles
    if min(tiles) < 1:
        return "tile sizes are positive"
    small_k, tail = 256 // small_m or 1, k % big_k
    problems = [
        (n % big_m, f"BM {big_m} does not divide the {n} rows"),
        (big_m % small_m, f"bm {small_m} does not divide BM {big_m}"),
        (big_k > k, f"BK {big_k} is more than the {k} columns"),
    ]
    if kind == "tl1":
        problems += [
            (small_m not in (16, 32, 64), f"bm is 16, 32 or 64, not {small_m}"),
            (tail, f"BK {big_k} does not divide the {k} columns"),
            (big_k % small_k, f"BK {big_k} is no multiple of 256 / bm = {small_k}"),
        ]
    else:
        over = f"leaves {tail} columns over, which must be a multiple of 32 and at most {TL2_MAX_TAIL}"
        problems += [
            (small_m != TL2_ROWS, f"bm is {TL2_ROWS}, not {small_m}"),
            (big_k % TL2_SIGN_COLUMNS, f"BK {big_k} is no multiple of {TL2_SIGN_COLUMNS}"),
            (tail % 32 or tail > TL2_MAX_TAIL, f"BK {big_k} {over}"),
        ]
    return next((problem for is_wrong, problem in problems if is_wrong), None)


def check_tiles(kind: TLKind, n: int, k: int, tiles: Tiles) -> None:
    """Raise ShapeError unless a matrix (N, K) can be laid out in these tiles."""
    problem = tiles_problem(kind, n, k, tiles)
    if problem:
        raise ShapeError(kind, expected="tile sizes that fit the matrix", got=f"({n}, {k}) with {tiles}: {problem}")


def nest(kind: TLKind, n: int, k: int, tiles: Tiles) -> tuple[tuple[str, int, int], ...]:
    """The loops over inner tiles: (axis, stride, count), outermost first.

    Loops that can be joined are merged, so two tilings give the same bytes exactly if their nests are equal.
    """
    big_m, big_k, small_m = tiles
    small_k = 256 // small_m if kind == "tl1" else TL2_COLUMNS
    loops = [("m", big_m, n // big_m), ("k", big_k, k // big_k)]
    loops += [("m", small_m, big_m // small_m), ("k", small_k, big_k // small_k)]
    if kind == "tl1":
        loops += [("m", 16, small_m // 16), ("k", 4, small_k // 4)]
    merged = _merge(loops)
    if kind == "tl2" and (tail := k % big_k):  # the pairs run over [m BM][k 32][m 32], and begin at another byte
        loops = [("m", big_m, n // big_m), ("k", 32, tail // 32), ("m", 32, big_m // 32)]
        merged += (("tail", tail, 1), *_merge(loops))
    return merged


def _merge(loops: list[tuple[str, int, int]]) -> tuple[tuple[str, int, int], ...]:
    merged: list[tuple[str, int, int]] = []
    for axis, stride, count in loops:
        if count == 1:
            continue
        if merged and merged[-1][0] == axis and merged[-1][1] == stride * count:
            count *= merged.pop()[2]
        merged.append((axis, stride, count))
    return tuple(merged)


def candidates(kind: TLKind, n: int, k: int) -> list[Tiles]:
    """One tiling for each order of weights that bitnet.cpp can generate for a matrix (N, K).

    Its generators make kernels for bm 32 and 64 (TL1), and 32 (TL2).
    """
    by_nest: dict[tuple[tuple[str, int, int], ...], Tiles] = {}
    known = KNOWN_TILES[kind].get((n, k))
    tilings = _tilings(kind, n, k)
    for tiles in tilings if known is None else (known[0], *tilings):  # so that a known shape shows its usual numbers
        if tiles_problem(kind, n, k, tiles) is None:
            by_nest.setdefault(nest(kind, n, k, tiles), tiles)
    return list(by_nest.values())


def _tilings(kind: TLKind, n: int, k: int) -> Iterator[Tiles]:
    tails = (0,) if kind == "tl1" else range(0, min(TL2_MAX_TAIL, k - 1) + 1, 32)
    columns = sorted({big_k for tail in tails for big_k in _divisors(k - tail)})
    for small_m in (32, 64) if kind == "tl1" else (TL2_ROWS,):
        yield from (Tiles(big_m, big_k, small_m) for big_m in _divisors(n) for big_k in columns)


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def read_kernel_config(path: str | os.PathLike[str]) -> dict[tuple[int, int], Tiles]:
    """(N, K) -> tiles, from bitnet.cpp's `kernel_config.ini` (sections with m, k, bm, bk and bmm).

    Raises FormatError: no such file, not an ini file, a key that is missing or no positive integer, or one shape with
    two different tiles.
    """
    source = Path(os.fspath(path))
    parser = ConfigParser(interpolation=None)
    try:
        parser.read_string(read_bounded(source, FormatError, MAX_INI_BYTES).decode("utf-8"))
    except (IniError, UnicodeDecodeError) as error:
        raise FormatError(f"not an ini file: {str(error)[:200]}", path=source) from error
    table: dict[tuple[int, int], Tiles] = {}
    for section in parser.sections():
        values = [_positive(parser.get(section, key, fallback=None), source, f"{section}.{key}") for key in _INI_KEYS]
        shape, tiles = (values[0], values[1]), Tiles(*values[2:])
        if table.setdefault(shape, tiles) != tiles:
            message = f"the shape {shape} has {tiles} here, and {table[shape]} in another section"
            raise FormatError(message, path=source, field=section)
    if not table:
        raise FormatError("no kernel in it: expected sections with the keys m, k, bm, bk and bmm", path=source)
    return table


_INI_KEYS = ("m", "k", "bm", "bk", "bmm")


def _positive(text: str | None, path: Path, field: str) -> int:
    if text is None or not (text.isascii() and text.isdigit() and 0 < len(text) < 10 and int(text)):
        shown = "nothing" if text is None else repr(text[:40])
        raise FormatError(f"expected a positive integer, got {shown}", path=path, field=field)
    return int(text)
