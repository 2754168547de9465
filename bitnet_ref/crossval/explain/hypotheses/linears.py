"""Mistakes in BitLinear: weight scales, accumulators, shapes that a kernel does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ....backends import Backend
from ....reference.weights import DenseWeight, TernaryLinear, TernaryWeight
from ..variants import Setting
from .base import Hypothesis, Kind, listed_in

HYPOTHESES: list[Hypothesis] = []
hypothesis = listed_in(HYPOTHESES)

OUT = "*_proj.hook_out"
ACC = "*_proj.hook_acc_int32"


def has_ternary(s: Setting) -> bool:
    """Whether the model has a BitLinear at all."""
    return any(isinstance(w, TernaryLinear) for _, w in s.weights.linears())


# -- weight scales -----------------------------------------------------------------------------------------------------


def _scales(s: Setting, change: Callable[[str, TernaryWeight], Any]) -> Setting | None:
    if not has_ternary(s):
        return None
    return s.map_ternary(lambda name, w: replace(w, w_dequant_scale=np.float32(change(name, w))))


@hypothesis(
    "scale_inverted",
    OUT,
    "the weight scale is inverted: divided by where it multiplies, or the reverse",
    "quantization_config.linear_class decides: autobitlinear multiplies by weight_scale, bitlinear divides by it.",
    Kind.SCALED,
)
def _(s: Setting) -> Setting | None:
    return _scales(s, lambda _, w: np.float32(1) / w.w_dequant_scale)


@hypothesis("scale_missing", OUT, "the weight scale is not applied", "y = acc * (w_scale / x_scale).", Kind.SCALED)
def _(s: Setting) -> Setting | None:
    return _scales(s, lambda _, w: 1)


@hypothesis(
    "scale_from_ternary_weights",
    OUT,
    "absmean was taken of matrices that were ternary already: the scale is short by the share of non-zeros",
    "A matrix that holds only -s, 0 and +s has the scale s; absmean is for master weights.",
    Kind.SCALED,
)
def _(s: Setting) -> Setting | None:
    return _scales(s, lambda _, w: w.w_dequant_scale * np.float32(np.abs(w.ternary()).mean(dtype=np.float64)))


@hypothesis("scale_f16", OUT, "the weight scale is rounded to float16", "Keep it in float32.", Kind.SCALED)
def _(s: Setting) -> Setting | None:
    return _scales(s, lambda _, w: np.float16(w.w_dequant_scale))


@hypothesis("scale_bf16", OUT, "the weight scale is rounded to bfloat16", "Keep it in float32.", Kind.SCALED)
def _(s: Setting) -> Setting | None:
    return _scales(s, lambda _, w: ml_dtypes.bfloat16(w.w_dequant_scale))


def _row_scales(s: Setting, scales_of: Callable[[tuple[TernaryWeight, ...]], Sequence[NDArray]]) -> Setting | None:
    """q, k and v with a scale for each row, as scales_of(their weights) says."""
    scales: dict[int, NDArray] = {}
    for layer in s.weights.layers:
        ws = tuple(w for w in (layer.q_proj, layer.k_proj, layer.v_proj) if isinstance(w, TernaryWeight))
        if len(ws) == 3:
            scales |= {id(w): rows for w, rows in zip(ws, scales_of(ws), strict=True)}

    def dequantize(be: Backend, acc: NDArray, w: TernaryLinear, x_quant_scale: NDArray) -> NDArray:
        rows = scales.get(id(w))
        if rows is None:
            return Backend.dequantize(be, acc, w, x_quant_scale)
        return acc.astype(np.float32) * (rows[None, :] / x_quant_scale)

    return s.with_ops(dequantize=dequantize) if scales else None


@hypothesis(
    "qkv_scales_by_thirds",
    OUT,
    "the three scales of a fused qkv matrix are given to equal thirds of its rows",
    "Under GQA q has more rows than k and v: cut at H*d and (H+G)*d.",
)
def _(s: Setting) -> Setting | None:
    if s.config.num_attention_heads == s.config.num_key_value_heads:
        return None  # thirds are right

    def thirds(ws: tuple[TernaryWeight, ...]) -> Sequence[NDArray]:
        sizes = [len(w.packed) for w in ws]
        three = np.array([w.w_dequant_scale for w in ws], dtype=np.float32)
        of_row = three[np.minimum(np.arange(sum(sizes)) * 3 // sum(sizes), 2)]
        return np.split(of_row, np.cumsum(sizes)[:2])

    return _row_scales(s, thirds)


@hypothesis(
    "qkv_share_one_scale",
    OUT,
    "q's weight scale is used for k and v too",
    "Each of q, k and v was quantised on its own: keep three scales.",
    Kind.SCALED,
)
def _(s: Setting) -> Setting | None:
    return _row_scales(s, lambda ws: [np.full(len(w.packed), ws[0].w_dequant_scale) for w in ws])


# -- accumulators ------------------------------------------------------------------------------------------------------


def _accumulator(s: Setting, change: Callable[[NDArray], NDArray]) -> Setting | None:
    def ternary_matmul(be: Backend, x_q: NDArray, w: TernaryLinear) -> NDArray:
        return change(Backend.ternary_matmul(be, x_q, w)).astype(np.int32)

    return s.with_ops(ternary_matmul=ternary_matmul) if has_ternary(s) else None


@hypothesis(
    "int16_accumulators_wrap",
    f"{ACC} {OUT}",
    "sums are kept in int16 and wrap at 32,768",
    "Widen to int32 before 256 products of +-127 have been added.",
    Kind.WRAPPED,
)
def _(s: Setting) -> Setting | None:
    return _accumulator(s, lambda acc: (acc + 0x8000) % 0x10000 - 0x8000)


@hypothesis(
    "int16_accumulators_saturate",
    f"{ACC} {OUT}",
    "sums are kept in int16 and stop at 32,767",
    "Widen to int32 before 256 products of +-127 have been added.",
)
def _(s: Setting) -> Setting | None:
    return _accumulator(s, lambda acc: np.clip(acc, -0x8000, 0x7FFF))


@hypothesis(
    "bf16_accumulators",
    f"{ACC} {OUT}",
    "the integer sums are rounded to bfloat16, which has 8 bits",
    "Keep the sums in int32 (or float32, exact below 2^24) until the scale is applied.",
    Kind.ROUNDED,
)
def _(s: Setting) -> Setting | None:
    return _accumulator(s, lambda acc: acc.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32))


@hypothesis(
    "f16_accumulators", f"{ACC} {OUT}", "the integer sums are rounded to float16", "Keep them in int32.", Kind.ROUNDED
)
def _(s: Setting) -> Setting | None:
    return _accumulator(s, lambda acc: np.clip(acc, -65504, 65504).astype(np.float16).astype(np.float32))


# -- linears that return zeros -----------------------------------------------------------------------------------------


def _zeros(name: str, what: str, zero: frozenset[str]) -> Hypothesis:
    def change(s: Setting) -> Setting:
        ours = {id(w) for full, w in s.weights.linears() if full in zero}

        def ternary_matmul(be: Backend, x_q: NDArray, w: TernaryLinear) -> NDArray:
            acc = Backend.ternary_matmul(be, x_q, w)
            return np.zeros_like(acc) if id(w) in ours else acc

        def dense_matmul(be: Backend, x: NDArray, w: DenseWeight) -> NDArray:
            y = Backend.dense_matmul(be, x, w)
            return np.zeros_like(y) if id(w) in ours else y

        return s.with_ops(ternary_matmul=ternary_matmul, dense_matmul=dense_matmul)

    remedy = "A kernel must refuse a shape that it cannot compute; find the multiple that it silently asks for."
    return Hypothesis(name, (ACC, OUT), f"{what} return zeros", remedy, change, (Kind.ZEROS,))


def zero_hypotheses(s: Setting, candidate: Mapping[str, NDArray]) -> Iterator[Hypothesis]:
    """Linears that give nothing: those seen to be all zeros; where none can be seen, those of each input size."""
    blocks = {name: w for name, w in s.weights.linears() if name != "lm_head"}
    outputs = {
        name: [candidate[n] for n in (f"{name}.hook_acc_int32", f"{name}.hook_out") if n in candidate]
        for name in blocks
    }
    seen = frozenset(name for name, arrays in outputs.items() if arrays and not any(a.any() for a in arrays))
    if seen:
        shapes = sorted({"(out {}, in {})".format(*blocks[name].shape) for name in seen})
        yield _zeros("unsupported_shape_gives_zeros", f"the linears of shape {', '.join(shapes)}", seen)
    elif not any(outputs.values()):
        for size in sorted({w.shape[1] for w in blocks.values()}):
            those = frozenset(name for name, w in blocks.items() if w.shape[1] == size)
            yield _zeros("unsupported_shape_gives_zeros", f"the linears of {size} inputs", those)
        for shape in sorted({w.shape for w in blocks.values()}):
            those = frozenset(name for name, w in blocks.items() if w.shape == shape)
            yield _zeros("unsupported_shape_gives_zeros", "the linears of shape (out {}, in {})".format(*shape), those)
