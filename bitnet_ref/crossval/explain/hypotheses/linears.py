"""Mistakes in BitLinear: weight scales, accumulators, shapes that a kernel does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ....families.family import Hypothesis
from ....reference.weights import LinearWeight, TernaryLinear, TernaryWeight
from ..variants import Op, Setting

OUT = "*_proj.hook_out"
ACC = "*_proj.hook_acc_int32"
scale_mistake = partial(Hypothesis, OUT)
sum_mistake = partial(Hypothesis, f"{ACC} {OUT}")
WIDEN = "Widen to int32 before 256 products of +-127 have been added."


def has_ternary(s: Setting) -> bool:
    """Whether the model has a BitLinear."""
    return any(w.bit_linear is not None for _, w in s.weights.linears())


def _scales(s: Setting, change: Callable[[TernaryWeight], Any]) -> Setting | None:
    if not has_ternary(s):
        return None
    return s.map_ternary(lambda _, w: replace(w, w_dequant_scale=np.float32(change(w))))


def _row_scales(s: Setting, scales_of: Callable[[tuple[TernaryWeight, ...]], Sequence[NDArray]]) -> Setting | None:
    """q, k and v with one scale per row, as scales_of(their weights) says."""
    scales: dict[str, NDArray] = {}
    for layer in s.weights.layers:
        bit_linears = [w.bit_linear for w in (layer.q_proj, layer.k_proj, layer.v_proj)]
        ws = tuple(w.plain() for w in bit_linears if w is not None)
        if len(ws) == 3:
            scales |= {w.name: rows for w, rows in zip(ws, scales_of(ws), strict=True)}

    def dequantize(op: Op, acc: NDArray, w: TernaryLinear, x_quant_scale: NDArray) -> NDArray:
        rows = scales.get(w.name)
        if rows is None:
            return op(acc, w, x_quant_scale)
        return acc.astype(np.float32) * (rows[None, :] / x_quant_scale)

    return s.with_ops(dequantize=dequantize) if scales else None


def _scales_by_thirds(s: Setting) -> Setting | None:
    if s.config.num_attention_heads == s.config.num_key_value_heads:
        return None  # thirds are right

    def thirds(ws: tuple[TernaryWeight, ...]) -> Sequence[NDArray]:
        sizes = [len(w.packed) for w in ws]
        three = np.array([w.w_dequant_scale for w in ws], dtype=np.float32)
        of_row = three[np.minimum(np.arange(sum(sizes)) * 3 // sum(sizes), 2)]
        return np.split(of_row, np.cumsum(sizes)[:2])

    return _row_scales(s, thirds)


def _accumulators(s: Setting, change: Callable[[NDArray], NDArray]) -> Setting | None:
    def ternary_matmul(op: Op, x_q: NDArray, w: TernaryLinear) -> NDArray:
        return change(op(x_q, w)).astype(np.int32)

    return s.with_ops(ternary_matmul=ternary_matmul) if has_ternary(s) else None


def _transpose_tiles(acc: NDArray) -> NDArray:
    n, out = (size // 4 * 4 for size in acc.shape)
    tiles, changed = acc[:n, :out].reshape(n // 4, 4, out // 4, 4), acc.copy()
    changed[:n, :out] = tiles.swapaxes(1, 3).reshape(n, out)
    return changed


# fmt: off
HYPOTHESES = (
    scale_mistake("scale_inverted", "the weight scale is inverted: divided by where it multiplies, or the reverse",
        "quantization_config.linear_class decides: autobitlinear multiplies by weight_scale, bitlinear divides by it.",
        lambda s: _scales(s, lambda w: np.float32(1) / w.w_dequant_scale)),
    scale_mistake("scale_missing", "the weight scale is not applied",
        "y = acc * (w_scale / x_scale).", lambda s: _scales(s, lambda w: 1)),
    scale_mistake("scale_from_ternary_weights",
        "absmean was taken of matrices that were ternary already: the scale is too small by the share of non-zeros",
        "A matrix that holds only -s, 0 and +s has the scale s; absmean is for master weights.",
        lambda s: _scales(s, lambda w: w.w_dequant_scale * np.float32(np.abs(w.ternary()).mean(dtype=np.float64)))),
    scale_mistake("scale_f16", "the weight scale is rounded to float16",
        "Keep it in float32.", lambda s: _scales(s, lambda w: np.float16(w.w_dequant_scale))),
    scale_mistake("scale_bf16", "the weight scale is rounded to bfloat16",
        "Keep it in float32.", lambda s: _scales(s, lambda w: ml_dtypes.bfloat16(w.w_dequant_scale))),
    scale_mistake("qkv_scales_by_thirds",
        "the three scales of a fused qkv matrix are given to equal thirds of its rows",
        "Under GQA q has more rows than k and v: cut at H*d and (H+G)*d.", _scales_by_thirds),
    scale_mistake("qkv_share_one_scale", "q's weight scale is used for k and v too",
        "q, k and v were quantised separately: keep three scales.",
        lambda s: _row_scales(s, lambda ws: [np.full(len(w.packed), ws[0].w_dequant_scale) for w in ws])),
    sum_mistake("int16_accumulators_wrap", "sums are kept in int16 and wrap at 32,768",
        WIDEN, lambda s: _accumulators(s, lambda acc: (acc + 0x8000) % 0x10000 - 0x8000)),
    sum_mistake("int16_accumulators_saturate", "sums are kept in int16 and stop at 32,767",
        WIDEN, lambda s: _accumulators(s, lambda acc: np.clip(acc, -0x8000, 0x7FFF))),
    sum_mistake("tiles_of_4_transposed",
        "with 4 tokens or more, rows and columns of each tile of 4 tokens and 4 outputs are exchanged",
        "Compare with a run of one token, whose products take another way: the strides of the tiled one are wrong.",
        lambda s: _accumulators(s, _transpose_tiles) if len(s.tokens) > 3 else None),
    sum_mistake("bf16_accumulators", "the integer sums are rounded to bfloat16, which has 8 bits",
        "Keep the sums in int32 (or float32, exact below 2^24) until the scale is applied.",
        lambda s: _accumulators(s, lambda acc: acc.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32))),
    sum_mistake("f16_accumulators", "the integer sums are rounded to float16",
        "Keep them in int32.",
        lambda s: _accumulators(s, lambda acc: np.clip(acc, -65504, 65504).astype(np.float16).astype(np.float32))),
)
# fmt: on


# -- linears that return zeros -----------------------------------------------------------------------------------------


def _zeros(subject: str, names: frozenset[str]) -> Hypothesis:
    """These linears give zeros; `subject` names them in the cause."""

    def change(s: Setting) -> Setting:
        def product(op: Op, x: NDArray, w: LinearWeight) -> NDArray:
            y = op(x, w)
            return np.zeros_like(y) if w.name in names else y

        return s.with_ops(ternary_matmul=product, dense_matmul=product)

    cause = f"{subject} return zeros"
    remedy = "A kernel must refuse a shape that it cannot compute; look for a size that it needs a multiple of."
    return sum_mistake("unsupported_shape_gives_zeros", cause, remedy, change)


def zero_hypotheses(s: Setting, candidate: Mapping[str, NDArray]) -> Iterator[Hypothesis]:
    """Linears that give zeros: those whose recorded results are zeros or, if none is recorded, those of each shape."""
    blocks = {name: w for name, w in s.weights.linears() if name != "lm_head"}
    outputs = {
        name: [candidate[n] for n in (f"{name}.hook_acc_int32", f"{name}.hook_out") if n in candidate]
        for name in blocks
    }
    zeros = frozenset(name for name, arrays in outputs.items() if arrays and not any(a.any() for a in arrays))
    if zeros:
        shapes = sorted({"(out {}, in {})".format(*blocks[name].shape) for name in zeros})
        yield _zeros(f"the linears of shape {', '.join(shapes)}", zeros)
    elif not any(outputs.values()):
        for size in sorted({w.shape[1] for w in blocks.values()}):
            yield _zeros(f"the linears of {size} inputs", frozenset(n for n, w in blocks.items() if w.shape[1] == size))
        for shape in sorted({w.shape for w in blocks.values()}):
            names = frozenset(name for name, w in blocks.items() if w.shape == shape)
            yield _zeros("the linears of shape (out {}, in {})".format(*shape), names)
