"""What was put off (`../deferred.py`), computed on a card: one launch of `rows.cu` gives all that is wanted of it.

Of one token even that is no launch of its own: `ternary_row.cu` makes the row where it multiplies it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..deferred import PLAIN, SUM, Normed, OfPair, Rotation, Rows, Turned
from .device import Device
from .stacks import stack_of
from .ternary import TILE_ROWS, TiledWeight, padded_columns
from .workspace import Workspace

FILE = "rows.cu"
ROW_THREADS = 512  # row.cuh: of a block that takes a row, if the row has so many elements
SHARED_FLOATS = 8192  # a row longer than this waits in global memory
MOST_COLUMNS = 16384  # of a row that is multiplied where it is made: 5 bytes of shared memory each


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
    width = recipe.of.shape[1]
    ws.launch(
        *("ternary_row.cu", "ternary_row", (blocks_of(ws.device, y.shape[1]),), threads_of(width)),
        *(*recipe.arguments, made, w.tiles, rows, w.w_scales, w.bias_on_device, gate, y, ws.trouble),
        shared=padded_columns(width) + width * 4,
    )
    if made is not None:
        recipe.of.settle(made)
    return y


def blocks_of(device: Device, outputs: int) -> int:
    """Of a launch of `linear_of_row` with so many outputs."""
    return min(-(-outputs // TILE_ROWS), device.row_blocks)


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
    """Of a block that takes a row: whole warps, and never so few or many that a row's sum has another order."""
    return min(ROW_THREADS, -(-width // 32) * 32)


@dataclass(frozen=True)
class _Recipe:
    """What a launch is told of x: what it is made of, and its norm."""

    of: Rows
    weight: Any = None
    eps: float = 0.0

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.of.source, self.of.a, self.of.b, self.of.shape[1], self.weight, float(self.eps)


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
    stash = ws.scratch((n, width), np.float32) if width > SHARED_FLOATS else None
    ws.launch(
        *(FILE, "rows", (n,), threads_of(width), *recipe.arguments, made, normed),
        *(x_q, scale, 0 if x_q is None else x_q.shape[1], stash, ws.trouble),
        shared=0 if stash is not None else width * 4,
    )
    if made is not None:
        recipe.of.settle(made)


def _turn(ws: Workspace, r: Rotation) -> None:
    """q and k by themselves, into arrays; what the cache does on the way in is in attention.py."""
    r.q_turned, r.k_turned = ws.empty(r.q.shape, np.float32), ws.empty(r.k.shape, np.float32)
    (n, heads, head_dim), kv_heads = r.q.shape, r.k.shape[1]
    grid = (-(-(heads + kv_heads) * (head_dim // 2) // 128), n)
    ws.launch("rope.cu", "rope", grid, 128, r.q, r.k, r.cos, r.sin, heads, kv_heads, head_dim, r.q_turned, r.k_turned)
