"""`ops` on the compiled kernels: the same functions in one thread without the GIL, float32 only.

The forward pass has the packed model's bits: norm, quantisation, products of integers, RoPE and gate are the cython
backend's kernels. Products of floats are BLAS's here as there. What has no kernel is `ops`'s own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..backends.cpu.extension import _cpu, choose_simd, layout_number, simd_variants
from ..backends.cpu.kernels import GATES, as_floats
from ..errors import NumericsError
from ..reference import quantization
from ..reference.layers import Floats
from . import ops
from .ops import Gradient, LinearInput

LAYOUT = "2-bit"
BLOCK_K = 16  # columns in a block of that layout


@dataclass(frozen=True, eq=False)
class PackedLinear(ops.StepLinear):
    """The ternary values are packed too, for the kernels."""

    panels: tuple[Any, ...] = ()  # _cpu.Panels of each linear; () for a dense or mixed weight

    @classmethod
    def quantize(cls, masters: list[Floats], mix: float = 1.0) -> ops.StepLinear:
        if mix < 1:
            return super().quantize(masters, mix)
        sizes, columns = tuple(map(len, masters)), masters[0].shape[1]
        values, scales, panels = np.empty((sum(sizes), columns), dtype=np.float32), [], []
        kernel_set = _kernel_set()
        for w, part in zip(masters, np.split(values, np.cumsum(sizes)[:-1]), strict=True):
            scale = quantization.absmean_scale(w)
            packed = np.empty((len(w), -(-columns // quantization.CODES_PER_BYTE)), dtype=np.uint8)
            _cpu.ternarize(w, scale, packed, part, kernel_set)
            shape = -(-len(w) // _cpu.panel_rows), -(-columns // BLOCK_K) * _cpu.block_bytes
            in_panels, layout = np.empty(shape, dtype=np.uint8), layout_number(LAYOUT)
            _cpu.pack_panels(packed, in_panels, 1, layout)
            panels.append(_cpu.Panels(in_panels, len(w), columns, scale, None, layout))
            scales.append(np.full(len(w), scale, dtype=np.float32))
        return cls(values, np.concatenate(scales), sizes, 1.0, tuple(panels))


def _kernel_set() -> int:
    return list(simd_variants()).index(choose_simd())


@dataclass(frozen=True)
class Compiled:
    """The functions that have kernels, by the names of `ops`."""

    kernel_set: int

    def rms_norm(self, x: Floats, weight: Floats, eps: float) -> tuple[Floats, float]:
        """What the backward pass needs is eps alone: it sums the squares again."""
        x, y = as_floats(x), np.empty(x.shape, dtype=np.float32)
        if (row := _cpu.rms_norm(x, weight, eps, y, 1, self.kernel_set)) >= 0:
            raise NumericsError(f"rms_norm: token {row} holds NaN or Inf")
        return y, eps

    def rms_norm_backward(self, dy: Floats, x: Floats, weight: Floats, eps: float) -> tuple[Gradient, Gradient]:
        dx, d_weight = np.empty(x.shape, dtype=np.float32), np.empty(weight.shape, dtype=np.float32)
        _cpu.norm_backward(as_floats(dy), as_floats(x), weight, eps, dx, d_weight, self.kernel_set)
        return dx, d_weight

    def linear(self, x: Floats, w: ops.StepLinear) -> tuple[list[Floats], LinearInput]:
        if not (isinstance(w, PackedLinear) and w.panels):
            return ops.linear(x, w)
        x, ys = as_floats(x), [np.empty((len(x), size), dtype=np.float32) for size in w.sizes]
        row = _cpu.bit_linears(x, list(w.panels), ys, 1, self.kernel_set)
        if row >= 0:
            raise NumericsError(f"quantize_activations: the activation of token {row} holds NaN or Inf")
        x_q, x_quant_scale = np.empty(x.shape, dtype=np.int8), np.empty((len(x), 1), dtype=np.float32)
        _cpu.quantize(x, x_q, x_quant_scale, self.kernel_set)
        return ys, LinearInput(x_q, x_quant_scale)

    def linear_backward(
        self, dys: Sequence[Floats], saved: LinearInput, w: ops.StepLinear, product: ops.Product = ops.product
    ) -> tuple[Gradient, list[Gradient]]:
        """Part by part: gradients of several linears are never copied into one array."""
        x, parts = self._rescaled(saved), w.split(w.values, 0)
        scaled = dys if w.scales is None else [dy * s for dy, s in zip(dys, w.split(w.scales, 0), strict=True)]
        dx = product(scaled[0], parts[0])
        for dy, part in zip(scaled[1:], parts[1:], strict=True):
            dx += product(dy, part)
        return dx, [product(dy.T, x) for dy in dys]

    def product_bfloat16(self, a: Floats, b: Floats) -> Gradient:
        """By the processor's products of bfloat16, where it has them; else rounded, and by BLAS."""
        if not _cpu.has_bfloat16_product(self.kernel_set):
            return ops.product_bfloat16(a, b)
        c = np.empty((len(a), b.shape[1]), dtype=np.float32)
        _cpu.bfloat16_product(a, b, c, self.kernel_set)
        return c

    def _rescaled(self, saved: LinearInput) -> Floats:
        if saved.x_quant_scale is None:
            return saved.x
        x = np.empty(saved.x.shape, dtype=np.float32)
        _cpu.rescale(saved.x, saved.x_quant_scale, x, self.kernel_set)
        return x

    def attention(self, q: Floats, k: Floats, v: Floats, window: int | None) -> tuple[Floats, list[Floats]]:
        (tokens, kv_heads, head_dim), heads = k.shape, q.shape[1]
        queries = ops.by_kv_head(q, kv_heads).astype(np.float64)  # (G, H/G, T, d)
        keys, values = (x.transpose(1, 0, 2).astype(np.float64, order="C") for x in (k, v))  # (G, T, d)
        z, patterns = np.empty((tokens, heads, head_dim), dtype=np.float32), []
        z_by_head = ops.by_kv_head(z, kv_heads)
        for start, stop, first in ops.query_blocks(tokens, window):
            scores = ops.block_rows(queries, start, stop) @ keys[:, first:stop].transpose(0, 2, 1)
            pattern, flat = np.empty(scores.shape, dtype=np.float32), (heads, stop - start, stop - first)
            args = start, min(window or 0, tokens), head_dim**-0.5, self.kernel_set
            _cpu.causal_softmax(scores.reshape(flat), pattern.reshape(flat), *args)
            rows = scores @ values[:, first:stop]
            z_by_head[:, :, start:stop] = rows.reshape(kv_heads, -1, stop - start, head_dim)
            patterns.append(pattern)
        return z, patterns

    def attention_backward(
        self, dz: Floats, q: Floats, k: Floats, v: Floats, patterns: list[Floats], window: int | None
    ) -> tuple[Gradient, Gradient, Gradient]:
        return ops.attention_backward(dz, q, k, v, patterns, window, self.softmax_backward)

    def softmax_backward(self, d_scores: Floats, pattern: Floats, scale: float) -> None:
        _cpu.softmax_backward(d_scores, pattern, scale, self.kernel_set)

    def rope(self, x: Floats, cos: Floats, sin: Floats) -> Floats:
        if 2 * cos.shape[-1] < x.shape[-1]:
            return ops.rope(x, cos, sin)
        y = np.empty(x.shape, dtype=np.float32)
        _cpu.rope(as_floats(x), cos, sin, y, 1, self.kernel_set)
        return y

    def rope_backward(self, dy: Floats, cos: Floats, sin: Floats) -> Gradient:
        return self.rope(dy, cos, -sin)

    def gated(self, gate: Floats, up: Floats, activation: str) -> Floats:
        if activation not in GATES:
            return ops.gated(gate, up, activation)
        y = np.empty(gate.shape, dtype=np.float32)
        _cpu.gated(as_floats(gate), as_floats(up), activation == "silu", y, 1, self.kernel_set)
        return y

    def gated_backward(self, dy: Floats, gate: Floats, up: Floats, activation: str) -> tuple[Gradient, Gradient]:
        if activation != "relu2":
            return ops.gated_backward(dy, gate, up, activation)
        d_gate, d_up = (np.empty(gate.shape, dtype=np.float32) for _ in range(2))
        _cpu.relu2_backward(as_floats(dy), as_floats(gate), as_floats(up), d_gate, d_up, self.kernel_set)
        return d_gate, d_up

    def sum_of_squares(self, g: Floats) -> float:
        total: float = _cpu.sum_of_squares(as_floats(g).reshape(-1), self.kernel_set)
        return total

    def adamw(self, w: Floats, g: Floats, m: Floats, v: Floats, rates: ops.AdamRates) -> None:
        arrays = w.reshape(-1), as_floats(g).reshape(-1), m.reshape(-1), v.reshape(-1)
        _cpu.adamw(*arrays, *rates, self.kernel_set)


def compiled_ops() -> SimpleNamespace:
    """What stands in for `ops`. Raises BackendUnavailable without the extension, or for a BITNET_REF_SIMD of none."""
    kernels = Compiled(_kernel_set())
    names = [name for name in vars(Compiled) if not name.startswith("_")]
    return SimpleNamespace(
        **{**vars(ops), "StepLinear": PackedLinear, **{name: getattr(kernels, name) for name in names}}
    )
