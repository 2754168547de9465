"""Host side of `rows.cu` and `ternary_row.cu`: what is done to a token's row between two matrix products.

For several tokens one launch of `rows.cu` gates, norms and quantises all rows. For one token there is no such launch:
`ternary_row.cu` norms and quantises the row in every block of the product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .device import Device, DeviceArray
from .ternary import TILE_COLUMNS, TILE_ROWS, TILE_WORDS, TiledWeight, padded_columns
from .workspace import Workspace

FILE = "rows.cu"
PLAIN, GATES = 0, {"relu2": 1, "silu": 2}  # row.cuh: enum Gate
ROW_THREADS, ROW_STEP = 512, 2048  # row.cuh: threads of a row's block, and the elements that they take at once
VECTORS = (2, 4, 8)  # times ROW_STEP: the elements of a row that the kernels of rows.cu hold in registers
PRODUCT_VECTORS = (2, 4, 6, 8)  # the same of ternary_row.cu
MAX_COLUMNS = ROW_STEP * VECTORS[-1]  # a longer row waits in global memory, and is not normed inside a product
MAX_SUMS = 512  # ternary_row.cu: of a block
MAX_SLOTS = 10  # ternary_row.cu: weight tiles that a warp has on their way
OWN_SHARED = 2560  # max bytes of shared memory that a block of ternary_row.cu has beside those of the launch
TILE_BYTES = 4 * TILE_WORDS

Norm = tuple[DeviceArray, float]  # an RMSNorm: weight (K,) on the device, eps


def rms_norm(ws: Workspace, x: DeviceArray, norm: Norm) -> DeviceArray:
    """x (N, K) -> (N, K)"""
    y = ws.empty(x.shape, np.float32)
    _launch(ws, x, None, PLAIN, norm, y=y)
    return y


def gated(ws: Workspace, gate: DeviceArray, up: DeviceArray, activation: str) -> DeviceArray:
    """gate and up (N, F) -> (N, F)"""
    y = ws.empty(gate.shape, np.float32)
    _launch(ws, gate, up, GATES[activation], None, y=y)
    return y


def quantize(
    ws: Workspace,
    x: DeviceArray,
    norm: Norm | None = None,
    *,
    up: DeviceArray | None = None,
    gate: int = PLAIN,
    pad: bool = True,
) -> tuple[DeviceArray, DeviceArray]:
    """x (N, K), gated with `up` and normed if asked for -> x_q (N, K or whole tiles) int8, x_quant_scale (N, 1)"""
    n, width = x.shape
    x_q = ws.empty((n, padded_columns(width) if pad else width), np.int8)
    scale = ws.empty((n, 1), np.float32)
    _launch(ws, x, up, gate, norm, x_q=x_q, scale=scale)
    return x_q, scale


def takes_row(x: DeviceArray, w: Any, gated: bool = False) -> bool:
    """Whether `linear_of_row` takes x and w. gated: as gate and up, stacked."""
    if not isinstance(w, TiledWeight) or len(x) != 1 or w.in_features > MAX_COLUMNS:
        return False
    return not gated or (len(w.parts) == 2 and w.parts[0] == w.parts[1] and w.parts[0] % TILE_ROWS == 0)


def linear_of_row(
    ws: Workspace,
    x: DeviceArray,
    w: TiledWeight,
    norm: Norm | None = None,
    *,
    gate: int = PLAIN,
    residual: DeviceArray | None = None,
) -> DeviceArray:
    """A ternary linear of one normed token, x (1, K), in one launch.   -> y (1, N) float32, residual added

    For a stack the results are one after the other; gated, of gate and up, it is (1, N / 2).
    """
    width, rows = w.in_features, w.out_features
    y = ws.empty((1, rows if gate == PLAIN else rows // 2), np.float32)
    launch = row_launch(ws.device, width, rows, norm is not None, gate != PLAIN)
    weight, eps = (None, 0.0) if norm is None else norm
    ws.launch(
        *("ternary_row.cu", launch.kernel, (launch.grid,), launch.block, x, width, 1.0 / width, weight, float(eps)),
        *(w.tiles, rows, launch.slots, w.w_scales, w.bias_on_device, residual, gate, y, ws.trouble),
        shared=launch.shared,
    )
    return y


@dataclass(frozen=True)
class RowLaunch:
    """One launch of `ternary_row.cu`. slots: tiles that each warp has room for; shared: bytes of shared memory."""

    kernel: str
    grid: int
    block: int
    slots: int
    shared: int


def row_launch(device: Device, width: int, rows: int, normed: bool = False, gated: bool = False) -> RowLaunch:
    """The kernel and grid that multiply a row of `width` elements by `rows` rows of weights.

    Cards with less shared memory have fewer slots where a row is long: with 99 KB ten up to some 3300 columns, and two
    for 16,384.
    """
    block, halves = threads_of_row(width), 2 if gated else 1
    vectors = vectors_of(width, PRODUCT_VECTORS)
    units = -(-rows // (TILE_ROWS * halves))
    max_units = min(MAX_SUMS // halves, block) // TILE_ROWS  # of a block: a thread for each result
    grid = max(min(units, device.row_blocks), -(-units // max_units))
    warps, row_bytes = block // 32, padded_columns(width) * (5 if normed else 1)
    slots = min(MAX_SLOTS, (device.shared_bytes - OWN_SHARED - row_bytes) // (warps * TILE_BYTES))
    return RowLaunch(f"ternary_row_{vectors}", grid, block, slots, slots * warps * TILE_BYTES + row_bytes)


def vectors_of(width: int, choices: tuple[int, ...] = VECTORS) -> int:
    """The narrowest kernel that holds a row of so many elements in registers."""
    return next(vectors for vectors in choices if width <= vectors * ROW_STEP)


def add(ws: Workspace, x: DeviceArray, y: DeviceArray) -> DeviceArray:
    """x (N, D), y (N, D) or (D,) -> (N, D)"""
    z = ws.empty(x.shape, np.float32)
    ws.each(FILE, "add", x.size, x, y, np.uint64(x.size), np.uint64(y.size), z)
    return z


def take_rows(ws: Workspace, table: DeviceArray, kind: str, ids: DeviceArray) -> DeviceArray:
    """table[ids] as float32; `kind` is the dtype of the table (any, width)."""
    rows, width = table.shape
    y = ws.empty((len(ids), width), np.float32)
    arguments = table, np.int64(rows), ids, width, y, ws.trouble
    ws.launch(FILE, f"take_rows_{kind}", (len(ids),), threads_of(width), *arguments)
    return y


def take_rows_of_two(
    ws: Workspace, first: DeviceArray, second: DeviceArray, ids: DeviceArray
) -> tuple[DeviceArray, DeviceArray]:
    """first[ids] and second[ids] of two float32 tables (any, width), in one launch."""
    rows, width = first.shape
    ys = ws.empty((len(ids), width), np.float32), ws.empty((len(ids), width), np.float32)
    arguments = first, second, np.int64(rows), ids, width, *ys, ws.trouble
    ws.launch(FILE, "take_rows_of_two", (len(ids), 2), threads_of(width), *arguments)
    return ys


def threads_of(width: int) -> int:
    """Threads of a block with one thread per element of a row, or several elements: whole warps."""
    return min(ROW_THREADS, -(-width // 32) * 32)


def threads_of_row(width: int) -> int:
    """Threads of a block that takes a row, four elements per thread: a warp for each tile of columns, up to 16."""
    return min(ROW_THREADS, -(-width // TILE_COLUMNS) * 32)


def _launch(
    ws: Workspace,
    a: DeviceArray,
    b: DeviceArray | None,
    gate: int,
    norm: Norm | None,
    *,
    y: DeviceArray | None = None,
    x_q: DeviceArray | None = None,
    scale: DeviceArray | None = None,
) -> None:
    """One launch of rows.cu: from a, or the gated pair a and b, to the results that are given."""
    n, width = a.shape
    fits = width <= MAX_COLUMNS
    stash = None if fits else ws.scratch((n, width), np.float32)
    weight, eps = (None, 0.0) if norm is None else norm
    ws.launch(
        *(FILE, f"rows_{vectors_of(width)}" if fits else "rows_long", (n,), threads_of_row(width)),
        *(gate, a, b, width, 1.0 / width, weight, float(eps)),
        *(y, x_q, scale, 0 if x_q is None else x_q.shape[1], stash, ws.trouble),
    )
