"""What was put off (`../deferred.py`), computed on a card: one launch of `rows.cu` gives all that is wanted of it.

Of one token even that is no launch of its own: `ternary_row.cu` makes the row where it multiplies it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..cpu.deferred import PLAIN, SUM, Normed, OfPair, Rotation, Rows, Turned
from .device import Device
from .stacks import stack_of
from .ternary import TILE_COLUMNS, TILE_ROWS, TILE_WORDS, TiledWeight, padded_columns
from .workspace import Workspace

FILE = "rows.cu"
ROW_THREADS, ROW_STEP = 512, 2048  # row.cuh: of a block that takes a row, and the elements that these take at once
VECTORS = (2, 4, 8)  # times ROW_STEP: elements of a row that the kernels of rows.cu hold in registers
PRODUCTS = {PLAIN: ("plain", (2, 4, 6, 8)), SUM: ("sum", (2, 4, 8))}  # ternary_row.cu's, by the source of a row
PRODUCT_OF_GATE = "gate", (8,)
MOST_COLUMNS = ROW_STEP * VECTORS[-1]  # a longer row waits in global memory, and is not multiplied where it is made
MOST_SUMS = 512  # ternary_row.cu: of a block
MOST_SLOTS = 10  # tiles that a warp has on their way
OWN_SHARED = 2560  # bytes of shared memory, at most, that a block of ternary_row.cu has beside what it is launched with
MOST_SHARED = 123 << 10  # with these, of a block that leaves registers for the next kernel's
TILE_BYTES = 4 * TILE_WORDS


def value(ws: Workspace, x: Any) -> Any:
    """The device array itself: what was put off is computed now, once."""
    if isinstance(x, Rows):
        if x.source != PLAIN:
            _compute(ws, _Recipe(x), made=ws.empty(x.shape, np.float32))
        return x.a
    if isinstance(x, Normed):
        if x.value is None:
            normed, recipe = ws.empty(x.shape, np.float32), _recipe(ws, x)
            _compute(ws, recipe, normed=normed)
            x.value = normed
        return x.value
    if isinstance(x, Turned):
        r = x.rotation
        if r.q_turned is None or (r.k_turned is None and not x.is_query):
            _turn(ws, r)
        return r.q_turned if x.is_query else r.k_turned
    if isinstance(x, OfPair):
        stack = stack_of(x.pair.ws)
        if x.pair.ys is None and stack is not None:
            x.pair.ys = stack.split(linear_of_row(ws, x.pair.x, stack.whole), 1)
        return x.pair.ys[x.index]
    return x


def quantized(ws: Workspace, x: Any, pad: bool = True) -> tuple[Any, Any]:
    """x_q int8 (N, K, padded to whole tiles) and x_quant_scale (N, 1), in one launch from what x is made of."""
    n, width = x.shape
    x_q = ws.empty((n, padded_columns(width) if pad else width), np.int8)
    scale = ws.empty((n, 1), np.float32)
    _compute(ws, _recipe(ws, x), x_q=x_q, scale=scale)
    return x_q, scale


def takes_row(x: Any, w: Any, gated: bool = False) -> bool:
    """Whether `linear_of_row` takes them."""
    if not isinstance(w, TiledWeight) or len(x) != 1 or w.in_features > MOST_COLUMNS:
        return False
    return not gated or (len(w.parts) == 2 and w.parts[0] == w.parts[1] and w.parts[0] % TILE_ROWS == 0)


def linear_of_row(ws: Workspace, x: Any, w: TiledWeight, gate: int = PLAIN) -> Any:
    """A ternary linear of one token in one launch from what x (1, K) is made of.   -> y (1, N) float32

    Of a stack the results lie one after the other; of gate and up, gated, it is (1, N / 2).
    """
    recipe, rows = _recipe(ws, x), w.out_features
    y = ws.empty((1, rows if gate == PLAIN else rows // 2), np.float32)
    made = _room_for_made(ws, recipe)
    how = row_launch(ws.device, w.in_features, rows, recipe.of.source, recipe.weight is not None, gate != PLAIN)
    ws.launch(
        *("ternary_row.cu", how.kernel, (how.grid,), how.block, *recipe.arguments, made),
        *(w.tiles, rows, how.slots, w.w_scales, w.bias_on_device, gate, y, ws.trouble),
        shared=how.shared,
    )
    if made is not None:
        recipe.of.settle(made)
    return y


@dataclass(frozen=True)
class RowLaunch:
    """One launch of `ternary_row.cu`. slots: tiles that each warp has room for; shared: bytes of shared memory."""

    kernel: str
    grid: int
    block: int
    slots: int
    shared: int


def row_launch(
    device: Device, width: int, rows: int, source: int = PLAIN, normed: bool = False, gated: bool = False
) -> RowLaunch:
    """Which kernel multiplies a row of `width` elements by `rows` rows of weights, and its grid.

    With a norm a block has 80 KB of ten slots, 12.5 KB for 2560 columns of 2B-4T, and 2.5 KB of its own. Two are
    190 of the 226 KB that two blocks on a multiprocessor of sm_90 may have, so the next kernel's begins beside this
    one's. One of 6912 columns takes 116 KB and has room beside one of 2560; past 8192 a block gives up slots to have
    room beside one of 4096 (103 KB), and past 12,288 it needs the registers of both. Cards with less shared memory
    have fewer slots where a row is long: of 99 KB ten up to some 3300 columns, and two of 16,384.
    """
    block, halves = threads_of_row(width), 2 if gated else 1
    name, choices = PRODUCTS.get(source, PRODUCT_OF_GATE)
    vectors = vectors_of(width, choices)
    units = -(-rows // (TILE_ROWS * halves))
    most_units = min(MOST_SUMS // halves, block) // TILE_ROWS  # of a block: a thread for each result
    grid = max(min(units, device.row_blocks), -(-units // most_units))
    warps, row_bytes = block // 32, padded_columns(width) * (5 if normed else 1)
    most_shared = min(device.shared_bytes, MOST_SHARED if vectors < 8 else device.shared_bytes) - OWN_SHARED
    slots = min(MOST_SLOTS, (most_shared - row_bytes) // (warps * TILE_BYTES))
    return RowLaunch(f"ternary_row_{name}_{vectors}", grid, block, slots, slots * warps * TILE_BYTES + row_bytes)


def vectors_of(width: int, choices: tuple[int, ...] = VECTORS) -> int:
    """Of the narrowest kernel that holds a row of so many elements in registers."""
    return next(vectors for vectors in choices if width <= vectors * ROW_STEP)


def take(ws: Workspace, table: Any, kind: str, width: int, rows: Any) -> Any:
    """table[rows] as float32; `kind` is what the table (any, width) holds."""
    y = ws.empty((len(rows), width), np.float32)
    ws.launch(FILE, f"take_rows_{kind}", (len(rows),), threads_of(width), table, rows, width, y)
    return y


def take_both(ws: Workspace, first: Any, second: Any, width: int, rows: Any) -> tuple[Any, Any]:
    """first[rows] and second[rows] of two float32 tables (any, width), in one launch."""
    ys = ws.empty((len(rows), width), np.float32), ws.empty((len(rows), width), np.float32)
    ws.launch(FILE, "take_rows_of_two", (len(rows), 2), threads_of(width), first, second, rows, width, *ys)
    return ys


def threads_of(width: int) -> int:
    """Of a block with one thread an element of a row, or several: whole warps."""
    return min(ROW_THREADS, -(-width // 32) * 32)


def threads_of_row(width: int) -> int:
    """Of a block that takes a row, four elements a thread: a warp for each tile of columns, up to 16."""
    return min(ROW_THREADS, -(-width // TILE_COLUMNS) * 32)


@dataclass(frozen=True)
class _Recipe:
    """What a launch is told of x: what it is made of, and its norm."""

    of: Rows
    weight: Any = None
    eps: float = 0.0

    @property
    def arguments(self) -> tuple[Any, ...]:
        width = self.of.shape[1]
        return self.of.source, self.of.a, self.of.b, width, 1.0 / width, self.weight, float(self.eps)


def _recipe(ws: Workspace, x: Any) -> _Recipe:
    if isinstance(x, Normed) and x.value is None:
        return _Recipe(x.of, x.weight, x.eps)
    return _Recipe(x if isinstance(x, Rows) else Rows(PLAIN, value(ws, x)))


def _room_for_made(ws: Workspace, recipe: _Recipe) -> Any:
    """Where a launch is to leave the residual stream, which is needed again; else None."""
    return ws.empty(recipe.of.shape, np.float32) if recipe.of.source == SUM else None


def _compute(
    ws: Workspace, recipe: _Recipe, *, made: Any = None, normed: Any = None, x_q: Any = None, scale: Any = None
) -> None:
    """One launch: everything from what x is made of to the results that are wanted."""
    n, width = recipe.of.shape
    made = _room_for_made(ws, recipe) if made is None else made
    short = width <= MOST_COLUMNS
    stash = None if short else ws.scratch((n, width), np.float32)
    ws.launch(
        *(FILE, f"rows_{vectors_of(width)}" if short else "rows_long", (n,), threads_of_row(width)),
        *(*recipe.arguments, made, normed, x_q, scale, 0 if x_q is None else x_q.shape[1], stash, ws.trouble),
        shared=padded_columns(width) * 4 if short and recipe.weight is not None else 0,
    )
    if made is not None:
        recipe.of.settle(made)


def _turn(ws: Workspace, r: Rotation) -> None:
    """q and k by themselves, into arrays; what the cache does on the way in is in attention.py."""
    r.q_turned, r.k_turned = ws.empty(r.q.shape, np.float32), ws.empty(r.k.shape, np.float32)
    (n, heads, head_dim), kv_heads = r.q.shape, r.k.shape[1]
    grid = (-(-(heads + kv_heads) * (head_dim // 2) // 128), n)
    ws.launch("rope.cu", "rope", grid, 128, r.q, r.k, r.cos, r.sin, heads, kv_heads, head_dim, r.q_turned, r.k_turned)
