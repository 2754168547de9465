"""What was put off (`../deferred.py`), computed on a card: one launch of `rows.cu` gives all that is wanted of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..deferred import PLAIN, SUM, Normed, Rotation, Rows, Turned
from .ternary import padded_columns
from .workspace import Workspace

FILE = "rows.cu"
SHARED_FLOATS = 8192  # a row longer than this waits in global memory


def value(ws: Workspace, x: Any) -> Any:
    """The device array itself: what was put off is computed now, once."""
    if isinstance(x, Rows):
        if x.source != PLAIN:
            _compute(ws, x, made=ws.empty(x.shape, np.float32))
        return x.a
    if isinstance(x, Normed):
        if x.value is None:
            x.value = ws.empty(x.shape, np.float32)
            _compute(ws, x, normed=x.value)
        return x.value
    if isinstance(x, Turned):
        r = x.rotation
        if r.q_turned is None or (r.k_turned is None and not x.is_query):
            _turn(ws, r)
        return r.q_turned if x.is_query else r.k_turned
    return x


def quantized(ws: Workspace, x: Any, pad: bool = True) -> tuple[Any, Any]:
    """x_q int8 (N, K, padded to whole tiles) and x_quant_scale (N, 1), in one launch from what x is made of."""
    n, width = x.shape
    x_q = ws.empty((n, padded_columns(width) if pad else width), np.int8)
    scale = ws.empty((n, 1), np.float32)
    if isinstance(x, Normed) and x.value is not None:
        x = x.value
    _compute(ws, x if isinstance(x, Rows | Normed) else Rows(PLAIN, value(ws, x)), x_q=x_q, scale=scale)
    return x_q, scale


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
    """Of a block that takes a row: four elements a thread, whole warps."""
    return min(1024, max(32, -(-width // 128) * 32))


def _compute(
    ws: Workspace, x: Rows | Normed, *, made: Any = None, normed: Any = None, x_q: Any = None, scale: Any = None
) -> None:
    """One launch: everything from what `x` is made of to the results that are wanted."""
    of, weight, eps = (x.of, x.weight, x.eps) if isinstance(x, Normed) else (x, None, 0.0)
    n, width = of.shape
    if of.source == SUM and made is None:  # the residual stream: it is needed again
        made = ws.empty(of.shape, np.float32)
    stash = ws.scratch((n, width), np.float32) if width > SHARED_FLOATS else None
    ws.launch(
        *(FILE, "rows", (n,), threads_of(width), of.source, of.a, of.b, width, weight, float(eps), made, normed),
        *(x_q, scale, 0 if x_q is None else x_q.shape[1], stash, ws.trouble),
        shared=0 if stash is not None else width * 4,
    )
    if made is not None:
        of.settle(made)


def _turn(ws: Workspace, r: Rotation) -> None:
    """q and k by themselves, into arrays; what the cache does on the way in is in attention.py."""
    r.q_turned, r.k_turned = ws.empty(r.q.shape, np.float32), ws.empty(r.k.shape, np.float32)
    (n, heads, head_dim), kv_heads = r.q.shape, r.k.shape[1]
    grid = (-(-(heads + kv_heads) * (head_dim // 2) // 128), n)
    ws.launch("rope.cu", "rope", grid, 128, r.q, r.k, r.cos, r.sin, heads, kv_heads, head_dim, r.q_turned, r.k_turned)
