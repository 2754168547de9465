"""`Ops`: every operation that the model's text calls, in plain NumPy. Each takes arrays and returns arrays.

This is the oracle, and the base class of every backend: a faster one overrides the ops it speeds up and must then agree
with these under the numerical contract. Each op checks the shapes it is given; the arithmetic is in `layers` and
`quantization`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import ShapeError
from . import layers, quantization
from .cache import KVCache, TokenBatch
from .config import DeltaConfig, RopeConfig
from .delta_net import causal_conv, delta_inputs, delta_recurrence
from .weights import (
    DeltaWeights,
    DenseWeight,
    EmbeddingWeight,
    GroupTernaryLinear,
    LinearWeight,
    TernaryLinear,
    TernaryWeight,
)


def require(op: str, ok: bool, expected: str, **arrays: NDArray) -> None:
    """Raises a ShapeError that describes the arrays, unless `ok`."""
    if not ok:
        got = " and ".join(f"{name} {array.dtype} {array.shape}" for name, array in arrays.items())
        raise ShapeError(op, expected=expected, got=got)


def check_rope(q: NDArray, k: NDArray, cos: NDArray, sin: NDArray, partial: bool = False) -> None:
    """Raises a ShapeError. partial: only the first numbers of each head are turned."""
    ok = q.ndim == k.ndim == 3 and q.shape[::2] == k.shape[::2] and cos.shape == sin.shape and len(q) == len(cos)
    width, turned = q.shape[-1], 2 * cos.shape[-1]
    expected = "q (N, H, d), k (N, G, d), cos and sin (N, d/2)" + " or narrower" * partial
    require("rope", ok and (turned == width or (turned < width and partial)), expected, q=q, k=k, cos=cos, sin=sin)


def check_dequantize(acc: NDArray, x_quant_scale: NDArray) -> None:
    ok = acc.ndim == 2 and x_quant_scale.shape == (len(acc), 1)
    require("dequantize", ok, "acc (N, out) and x_quant_scale (N, 1)", acc=acc, x_quant_scale=x_quant_scale)


def check_attention(q: NDArray, cache: KVCache, batch: TokenBatch) -> None:
    heads, (kv_heads, head_dim) = q.shape[1] if q.ndim == 3 else 0, cache.keys.shape[-2:]
    ok = q.shape == (len(batch), heads, head_dim) and heads % kv_heads == 0
    require("attention", ok, f"q ({len(batch)}, multiple of {kv_heads}, {head_dim})", q=q)


class Ops:
    """Ops in float32, which is the contract, or in float64, which measures the rounding error of float32."""

    dtype = np.dtype(np.float32)

    def embed(self, w: EmbeddingWeight, tokens: NDArray[np.int64]) -> NDArray:
        """tokens (N,) -> (N, D)"""
        rows, ids = w.shape[0], tokens.size
        ok = tokens.ndim == 1 and tokens.dtype.kind in "iu" and (ids == 0 or 0 <= tokens.min() <= tokens.max() < rows)
        require("embed", ok, f"tokens (N,) of ids 0 to {rows - 1}", tokens=tokens)
        return w.rows(tokens, self.dtype)

    def rms_norm(self, x: NDArray, weight: NDArray, eps: float) -> NDArray:
        """x (N, D), weight (D,) -> (N, D)"""
        require("rms_norm", weight.shape == x.shape[1:], "x (N, D) and weight (D,)", x=x, weight=weight)
        return layers.rms_norm(x, weight, eps)

    def rope_tables(self, positions: NDArray[np.int64], rope: RopeConfig, head_dim: int) -> tuple[NDArray, NDArray]:
        """positions (N,) -> cos, sin (N, d/2)"""
        require("rope_tables", positions.ndim == 1, "positions (N,)", positions=positions)
        return layers.rope_tables(positions, rope, head_dim, self.dtype.type)

    def rope(
        self, q: NDArray, k: NDArray, cos: NDArray, sin: NDArray, partial: bool = False
    ) -> tuple[NDArray, NDArray]:
        """q (N, H, d), k (N, G, d), cos and sin (N, d/2) -> q and k, rotated.

        partial: cos and sin may be narrower, (N, r/2); then only the first r numbers of each head are rotated.
        """
        check_rope(q, k, cos, sin, partial)
        return layers.apply_rope(q, cos, sin), layers.apply_rope(k, cos, sin)

    # -- linears -------------------------------------------------------------------------------------------------------

    def quantize_activations(self, x: NDArray) -> tuple[NDArray[np.int8], NDArray]:
        """x (N, K) -> x_q (N, K) int8, x_quant_scale (N, 1)"""
        require("quantize_activations", x.ndim == 2 and x.shape[1] > 0, "x (N, K), K > 0", x=x)
        return quantization.quantize_activations(x)

    def ternary_matmul(self, x_q: NDArray[np.int8], w: TernaryLinear) -> NDArray[np.int32]:
        """x_q (N, K) int8 -> acc (N, out) int32, exact"""
        assert isinstance(w, TernaryWeight)
        return quantization.ternary_matmul(x_q, w.packed, w.in_features)

    def dequantize(self, acc: NDArray[np.int32], w: TernaryLinear, x_quant_scale: NDArray) -> NDArray:
        """acc (N, out) int32 -> y (N, out)"""
        check_dequantize(acc, x_quant_scale)
        return quantization.dequantize(acc, w.w_dequant_scale, x_quant_scale)

    def dense_matmul(self, x: NDArray, w: DenseWeight) -> NDArray:
        """x (N, K) -> (N, out)"""
        require("dense_matmul", x.ndim == 2 and x.shape[1] == w.shape[1], f"x (N, {w.shape[1]})", x=x)
        return layers.dense_matmul(x, w.stored, w.wide, w.block_type)

    def group_matmul(self, x: NDArray, w: GroupTernaryLinear) -> NDArray:
        """x (N, K) -> (N, out)"""
        require("group_matmul", x.ndim == 2 and x.shape[1] == w.in_features, f"x (N, {w.in_features})", x=x)
        w = w.plain()
        turned = x.astype(np.float64) if w.rotation is None else w.rotation.turn(x)
        return quantization.group_matmul(turned, w.packed, w.in_features, w.scales, w.group).astype(x.dtype)

    def linears(self, x: NDArray, ws: Sequence[LinearWeight]) -> tuple[NDArray, ...]:
        """Several linears of one x (N, K), quantised once for all BitLinears without a norm of their own."""
        outputs, shared = [], None
        for w in ws:
            if isinstance(w, DenseWeight):
                y = self.dense_matmul(x, w)
            elif isinstance(w, GroupTernaryLinear):
                y = self.group_matmul(x, w)
            else:
                assert isinstance(w, TernaryLinear)
                if w.input_norm is not None:
                    normed = self.rms_norm(x, w.input_norm.weight, w.input_norm.eps)
                    x_q, x_quant_scale = self.quantize_activations(normed)
                else:
                    x_q, x_quant_scale = shared = shared or self.quantize_activations(x)
                y = self.dequantize(self.ternary_matmul(x_q, w), w, x_quant_scale)
            outputs.append(y if w.bias is None else self.add(y, w.bias))
        return tuple(outputs)

    def linear(self, x: NDArray, w: LinearWeight) -> NDArray:
        """x (N, K) -> x W^T (N, out); a ternary weight makes it a BitLinear"""
        return self.linears(x, (w,))[0]

    def lm_head(self, x: NDArray, w: LinearWeight) -> NDArray:
        """x (N, D) -> logits (N, V)"""
        return self.linear(x, w)

    # -- attention -----------------------------------------------------------------------------------------------------

    def append(self, cache: KVCache, layer: int, batch: TokenBatch, k: NDArray, v: NDArray) -> None:
        """Write k and v (N, G, d) of the batch's tokens into the cache."""
        cache.append(layer, batch, k, v)

    def attention(self, q: NDArray, cache: KVCache, batch: TokenBatch, layer: int, window: int | None) -> NDArray:
        """Each token of the batch over what it sees of its own sequence.   q (N, H, d) -> z (N, H, d)"""
        check_attention(q, cache, batch)
        z = np.empty_like(q)
        for i, (slot, position) in enumerate(zip(batch.slots, batch.positions, strict=True)):
            keys, values = cache.visible(layer, slot, position, window)  # (S, G, d) each
            pattern = layers.softmax(layers.attention_scores(q[i], keys))  # (H, S)
            z[i] = layers.attention_values(pattern, values)
        return z

    def delta_conv(self, qkv: NDArray, conv: NDArray, cache: KVCache, layer: int, batch: TokenBatch) -> NDArray:
        """silu of each channel's convolution over the last tokens.   qkv (N, C), conv (C, tokens) -> (N, C)"""
        require("delta_conv", qkv.shape == (len(batch), len(conv)), f"qkv (N, {len(conv)})", qkv=qkv)
        assert cache.states is not None
        mixed = np.empty_like(qkv)
        for slot, position, rows in batch.sequences():
            before = cache.states.begin(layer, slot, position)
            mixed[rows] = causal_conv(np.concatenate([before, qkv[rows]]), conv)
            before[:] = np.concatenate([before, qkv[rows]])[len(qkv[rows]) :]
        return mixed

    def delta_gates(self, a: NDArray, b: NDArray, w: DeltaWeights) -> tuple[NDArray, NDArray]:
        """log alpha and beta of a Gated DeltaNet.   a and b (N, Hv) -> (N, Hv) both"""
        require("delta_gates", a.shape == b.shape == (len(a), len(w.decay)), f"a and b (N, {len(w.decay)})", a=a, b=b)
        log_alpha = -w.decay.astype(np.float64) * np.logaddexp(0.0, a.astype(np.float64) + w.decay_bias)
        return log_alpha.astype(a.dtype), (1.0 / (1.0 + np.exp(-b.astype(np.float64)))).astype(b.dtype)

    def delta_rule(
        self,
        mixed: NDArray,
        log_alpha: NDArray,
        beta: NDArray,
        cfg: DeltaConfig,
        cache: KVCache,
        layer: int,
        batch: TokenBatch,
    ) -> NDArray:
        """A Gated DeltaNet's memory, asked and updated.   mixed (N, C), of `delta_conv`, log_alpha and beta (N, Hv)
        -> (N, Hv, dv)"""
        require("delta_rule", mixed.shape == (len(batch), sum(cfg.sizes)), f"mixed (N, {sum(cfg.sizes)})", mixed=mixed)
        assert cache.states is not None
        y = np.empty((len(mixed), cfg.value_heads, cfg.value_dim), dtype=mixed.dtype)
        for slot, position, rows in batch.sequences():
            inputs = delta_inputs(mixed[rows], log_alpha[rows], beta[rows], cfg)
            y[rows] = delta_recurrence(inputs, cache.states.memory_of(layer, slot))
            cache.states.end(layer, slot, position + len(inputs.v))
        return y

    # -- elementwise ---------------------------------------------------------------------------------------------------

    def gated(self, gate: NDArray, up: NDArray, activation: str) -> NDArray:
        """act(gate) * up.   (N, F), (N, F) -> (N, F)"""
        require("gated", gate.ndim == 2 and gate.shape == up.shape, "gate and up (N, F)", gate=gate, up=up)
        return layers.gated(gate, up, activation)

    def add(self, x: NDArray, y: NDArray) -> NDArray:
        """x (N, D), y (N, D) or a bias (D,) -> (N, D)"""
        require("add", y.shape in (x.shape, x.shape[1:]), "x (N, D) and y (N, D) or (D,)", x=x, y=y)
        return x + y

    def output_gate(self, z: NDArray, gate: NDArray, activation: str) -> NDArray:
        """z times "sigmoid" or "silu" of the gate.   (N, F), (N, F) -> (N, F)"""
        require("output_gate", z.ndim == 2 and z.shape == gate.shape, "z and gate (N, F)", z=z, gate=gate)
        return z * layers.OUTPUT_GATES[activation](gate)

    def scale(self, x: NDArray, factor: float) -> NDArray:
        """x times a number.   (N, D) -> (N, D)"""
        return x * x.dtype.type(factor)

    def take_rows(self, x: NDArray, rows: NDArray[np.int64]) -> NDArray:
        """x (N, D), rows (n,) -> (n, D)"""
        return x[rows]
