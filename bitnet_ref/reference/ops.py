"""`Ops`: every operation that the model's text calls, in plain NumPy. Each takes arrays and returns arrays.

This is the oracle, and the base class of every backend: a faster one overrides the ops it speeds up and must agree with
these. Each op checks the shapes it is given and raises ShapeError; the arithmetic is in `layers` and `quantization`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ShapeError
from . import layers, quantization
from .cache import KVCache, TokenBatch
from .config import RopeConfig
from .layers import Array, Floats, Ints
from .weights import LinearWeight, Norm, Shared, TernaryLinear


def require(op: str, ok: bool, expected: str, **arrays: Array) -> None:
    """Raises a ShapeError that describes the arrays, unless `ok`."""
    if not ok:
        got = " and ".join(f"{name} {array.dtype} {array.shape}" for name, array in arrays.items())
        raise ShapeError(op, expected=expected, got=got)


def check_rope(q: Floats, k: Floats, cos: Floats, sin: Floats) -> None:
    ok = q.ndim == k.ndim == 3 and q.shape[::2] == k.shape[::2] and cos.shape == sin.shape and len(q) == len(cos)
    expected = "q (N, H, d), k (N, G, d), cos and sin (N, d/2) or narrower"
    require("rope", ok and 2 * cos.shape[-1] <= q.shape[-1], expected, q=q, k=k, cos=cos, sin=sin)


def check_norm(x: Floats, norm: Norm) -> None:
    ok = x.ndim == 2 and norm.weight.shape == x.shape[1:]
    require("rms_norm", ok, "x (N, D) and weight (D,)", x=x, weight=norm.weight)


def check_dequantize(acc: Array, x_quant_scale: Floats) -> None:
    ok = acc.ndim == 2 and x_quant_scale.shape == (len(acc), 1)
    require("dequantize", ok, "acc (N, out) and x_quant_scale (N, 1)", acc=acc, x_quant_scale=x_quant_scale)


def check_attention(q: Floats, cache: KVCache, batch: TokenBatch) -> None:
    kv_heads, head_dim = cache.keys.shape[-2:]
    ok = q.ndim == 3 and q.shape[::2] == (len(batch), head_dim) and q.shape[1] % kv_heads == 0
    require("attention", ok, f"q ({len(batch)}, multiple of {kv_heads}, {head_dim})", q=q)


class Ops:
    """Ops in float32, which is the contract, or in float64, which measures the rounding error of float32."""

    dtype = np.dtype(np.float32)

    def embed(self, w: LinearWeight, tokens: Ints) -> Floats:
        """tokens (N,) -> (N, D)"""
        rows, ids = w.shape[0], tokens.size
        ok = tokens.ndim == 1 and tokens.dtype.kind in "iu" and (ids == 0 or 0 <= tokens.min() <= tokens.max() < rows)
        require("embed", ok, f"tokens (N,) of ids 0 to {rows - 1}", tokens=tokens)
        return w.rows(tokens, self.dtype)

    def rms_norm(self, x: Floats, norm: Norm) -> Floats:
        """x (N, D) -> (N, D)"""
        check_norm(x, norm)
        return layers.rms_norm(x, norm.weight, norm.eps)

    def rope_tables(self, positions: Ints, rope: RopeConfig, head_dim: int) -> tuple[Floats, Floats]:
        """positions (N,) -> cos, sin (N, d/2)"""
        require("rope_tables", positions.ndim == 1, "positions (N,)", positions=positions)
        return rope.tables(positions, head_dim, self.dtype)

    def rope(self, q: Floats, k: Floats, cos: Floats, sin: Floats) -> tuple[Floats, Floats]:
        """q (N, H, d), k (N, G, d), cos and sin (N, d/2) -> q and k, rotated"""
        check_rope(q, k, cos, sin)
        return layers.apply_rope(q, cos, sin), layers.apply_rope(k, cos, sin)

    def quantize_activations(self, x: Floats) -> tuple[NDArray[np.int8], Floats]:
        """x (N, K) -> x_q (N, K) int8, x_quant_scale (N, 1)"""
        require("quantize_activations", x.ndim == 2 and x.shape[1] > 0, "x (N, K), K > 0", x=x)
        return quantization.quantize_activations(x)

    def ternary_matmul(self, x_q: NDArray[np.int8], w: TernaryLinear) -> NDArray[np.int32]:
        """x_q (N, K) int8 -> acc (N, out) int32, exact"""
        return quantization.ternary_matmul(x_q, w.plain().packed, w.in_features)

    def dequantize(self, acc: NDArray[np.int32], w: TernaryLinear, x_quant_scale: Floats) -> Floats:
        """acc (N, out) int32 -> y (N, out)"""
        check_dequantize(acc, x_quant_scale)
        return quantization.dequantize(acc, w.w_dequant_scale, x_quant_scale)

    def dense_matmul(self, x: Floats, w: Any) -> Floats:
        """x (N, K), w a DenseWeight, or one in a backend's layout -> (N, out)"""
        require("dense_matmul", x.ndim == 2 and x.shape[1] == w.shape[1], f"x (N, {w.shape[1]})", x=x)
        w = w.plain()
        return layers.dense_matmul(x, w.stored, w.wide, w.widen)

    def linears(self, x: Floats, ws: Sequence[LinearWeight]) -> tuple[Floats, ...]:
        """Several linears of one x (N, K), which is quantised once for all BitLinears.   -> (N, out) each"""
        shared: Shared = {}
        return tuple(self.one_linear(x, w, shared) for w in ws)

    def one_linear(self, x: Floats, w: LinearWeight, shared: Shared) -> Floats:
        """One of `linears`.   x (N, K) -> (N, out)"""
        y = w.product(self, x, shared)
        return y if w.bias is None else self.add(y, w.bias)

    def linear(self, x: Floats, w: LinearWeight) -> Floats:
        """x (N, K) -> x W^T (N, out); a ternary weight makes it a BitLinear"""
        return self.linears(x, (w,))[0]

    def lm_head(self, x: Floats, w: LinearWeight) -> Floats:
        """x (N, D) -> logits (N, V)"""
        return self.linear(x, w)

    def append(self, cache: KVCache, layer: int, batch: TokenBatch, k: Floats, v: Floats) -> None:
        """Write k and v (N, G, d) of the batch's tokens into the cache."""
        cache.append(layer, batch, k, v)

    def attention(self, q: Floats, cache: KVCache, batch: TokenBatch, layer: int, window: int | None) -> Floats:
        """Each token of the batch over what it sees of its own sequence.   q (N, H, d) -> z (N, H, d)"""
        check_attention(q, cache, batch)
        z = np.empty_like(q)
        for i, (slot, position) in enumerate(zip(batch.slots, batch.positions, strict=True)):
            keys, values = cache.visible(layer, slot, position, window)  # (S, G, d) each
            pattern = layers.softmax(layers.attention_scores(q[i], keys))  # (H, S)
            z[i] = layers.attention_values(pattern, values)
        return z

    def gated(self, gate: Floats, up: Floats, activation: str) -> Floats:
        """act(gate) * up.   (N, F), (N, F) -> (N, F)"""
        require("gated", gate.ndim == 2 and gate.shape == up.shape, "gate and up (N, F)", gate=gate, up=up)
        return layers.gated(gate, up, activation)

    def add(self, x: Floats, y: Floats) -> Floats:
        """x (N, D), y (N, D) or a bias (D,) -> (N, D)"""
        require("add", y.shape in (x.shape, x.shape[1:]), "x (N, D) and y (N, D) or (D,)", x=x, y=y)
        return x + y

    def scale(self, x: Floats, factor: float, name: str) -> Floats:
        """x times a number. name: of the result in a trace.   (N, ...) -> (N, ...)"""
        return x * x.dtype.type(factor)

    def compute(self, name: str, function: Callable[..., Floats], *args: Any) -> Floats:
        """An op that one family has alone: function(*args), in NumPy. name: of the result in a trace."""
        return function(*args)

    def compose(self, name: str, function: Callable[..., Floats], *args: Any) -> Floats:
        """An op that one family has alone and that is made of these: function(self, *args). name: as in `compute`."""
        return function(self, *args)

    def take_rows(self, x: Floats, rows: Ints) -> Floats:
        """x (N, D), rows (n,) -> (n, D)"""
        return x[rows]
