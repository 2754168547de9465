"""Rows that are not computed yet: what lies between two matrix products, put off until a kernel can do it at once.

The model's text says `h = be.rms_norm(be.add(x, y), w)`, then `be.linears(h, ...)`. On a card each of these would be a
kernel that reads 10 KB and writes 10 KB. So `add`, `gated` and `rms_norm` only note what they were asked for, and
whoever needs the numbers asks `rows.cu` for all of it: the sum, its norm and the int8 of the norm in one launch.

    Rows    made   = a | a + b | relu(a)^2 * b | silu(a) * b
    Normed  normed = made / sqrt(mean(made^2) + eps) * weight
    Turned  q or k after RoPE: the cache turns k on its way in, and q beside it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .ternary import padded_columns
from .workspace import Workspace

FILE = "rows.cu"
SHARED_FLOATS = 8192  # a row longer than this waits in global memory
PLAIN, SUM, RELU2, SILU = range(4)  # rows.cu: enum Source
GATES = {"relu2": RELU2, "silu": SILU}


@dataclass(eq=False)
class Rows:
    """(N, K) float32, made of one or two device arrays of that shape; `made` once a kernel has."""

    source: int
    a: Any
    b: Any = None
    made: Any = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.a.shape

    @property
    def ndim(self) -> int:
        return 2

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    def __len__(self) -> int:
        return self.shape[0]


@dataclass(eq=False)
class Normed:
    """(N, K) float32: the RMSNorm of some rows."""

    of: Rows
    weight: Any  # (K,) on the device
    eps: float
    value: Any = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.of.shape

    @property
    def ndim(self) -> int:
        return 2

    @property
    def dtype(self) -> np.dtype:
        return self.of.dtype

    def __len__(self) -> int:
        return self.shape[0]


@dataclass(eq=False)
class Rotation:
    """q (N, H, d) and k (N, G, d), to be turned by the tables cos and sin (N, d/2)."""

    q: Any
    k: Any
    cos: Any
    sin: Any
    q_turned: Any = None
    k_turned: Any = None


@dataclass(eq=False)
class Turned:
    """One of the two results of a rotation."""

    rotation: Rotation
    is_query: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.rotation.q if self.is_query else self.rotation.k).shape

    @property
    def ndim(self) -> int:
        return 3

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    def __len__(self) -> int:
        return self.shape[0]


DEFERRED = (Rows, Normed, Turned)


def value(ws: Workspace, x: Any) -> Any:
    """The device array itself: what was put off is computed now, once."""
    if isinstance(x, Rows):
        if x.source == PLAIN:
            return x.a
        if x.made is None:
            made = ws.empty(x.shape, np.float32)
            _compute(ws, x, made=made)
            x.made = made
        return x.made
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
    source, a, b = (PLAIN, of.made, None) if of.made is not None else (of.source, of.a, of.b)
    if source == SUM and made is None:  # the residual stream: it is needed again
        made = of.made = ws.empty(of.shape, np.float32)
    stash = ws.scratch((n, width), np.float32) if width > SHARED_FLOATS else None
    ws.launch(
        *(FILE, "rows", (n,), threads_of(width), source, a, b, width, weight, float(eps), made, normed),
        *(x_q, scale, 0 if x_q is None else x_q.shape[1], stash, ws.trouble),
        shared=0 if stash is not None else width * 4,
    )


def _turn(ws: Workspace, r: Rotation) -> None:
    """q and k by themselves, into arrays; what the cache does on the way in is in attention.py."""
    r.q_turned, r.k_turned = ws.empty(r.q.shape, np.float32), ws.empty(r.k.shape, np.float32)
    (n, heads, head_dim), kv_heads = r.q.shape, r.k.shape[1]
    grid = (-(-(heads + kv_heads) * (head_dim // 2) // 128), n)
    ws.launch("rope.cu", "rope", grid, 128, r.q, r.k, r.cos, r.sin, heads, kv_heads, head_dim, r.q_turned, r.k_turned)
