"""Mistakes in BitLinear: weight scales, accumulators, shapes that a kernel does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from ....families.family import Edit, Hypothesis, after, before, layer_weights
from ....reference.layers import Array, Floats
from ....reference.quantization import SCALE_FLOOR
from ....reference.weights import TernaryLinear, TernaryWeight
from ...types import Tensors
from ..number_formats import rounded
from ..variants import Setting, Step

OUT = "*_proj.hook_out"
ACC = "*_proj.hook_acc_int32"
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
Quantized = tuple[Array, Array]  # W_t (N, K) of -1, 0 and +1, the scale () or (N,)
sum_mistake = partial(Hypothesis, ACC)
WIDEN = "Widen to int32 before 256 products of +-127 have been added."


def dequantizes(step: Step) -> bool:
    """Whether an output is computed from accumulators and scales."""
    return len(step.inputs) == 3


def scale_mistake(name: str, cause: str, remedy: str, scale_of: Callable[[TernaryWeight], Any]) -> Hypothesis:
    """scale_of(w): another w_dequant_scale."""
    edit = before(1, lambda w: replace(w, w_dequant_scale=np.float32(scale_of(w))))
    return Hypothesis(OUT, name, cause, remedy, edit, dequantizes)


def _qkv(step: Step) -> list[TernaryLinear]:
    w = layer_weights(step)
    return [w.q_proj.bit_linear, w.k_proj.bit_linear, w.v_proj.bit_linear]


def _scale_by_thirds(step: Step, compute: Edit, acc: Array, w: TernaryLinear, x_quant_scale: Array) -> Array:
    sizes = [each.shape[0] for each in _qkv(step)]
    scales = np.array([each.w_dequant_scale for each in _qkv(step)], dtype=np.float32)
    thirds = np.minimum(np.arange(sum(sizes)) * 3 // sum(sizes), 2)  # of the rows of the fused matrix
    own = np.split(thirds, np.cumsum(sizes)[:2])["qkv".index(step.name.rpartition("_proj")[0][-1])]
    factors: Floats = scales[own][None, :] / x_quant_scale
    return acc.astype(np.float32) * factors


def _has_fewer_kv_heads(step: Step) -> bool:
    """Whether thirds of a BitLinear's three matrices are wrong."""
    config, is_ternary = step.setting.config, dequantizes(step) and all(each is not None for each in _qkv(step))
    return is_ternary and config.num_attention_heads != config.num_key_value_heads


def masters_mistake(
    name: str,
    cause: str,
    remedy: str,
    quantize: Callable[[Step, Array], Quantized],
    linears: Sequence[str] = ("*_proj",),
) -> Hypothesis:
    """quantize(step, W (N, K)): another way to quantise the masters of these BitLinears."""

    def edit(step: Step, compute: Edit, x: Array, w: TernaryWeight, *scale: Array) -> Array:
        master = step.setting.master(step.owner)
        if master is None:
            raise LookupError(f"{step.owner} has no master")
        w_t, w_scale = quantize(step, master)
        if scale:  # x are the accumulators
            return (x.astype(np.float32) * (w_scale / scale[0])).astype(np.float32)
        return (x.astype(np.float32) @ w_t.T.astype(np.float32)).astype(np.int32)

    steps = " ".join(f"*.{linear}.{hook}" for linear in linears for hook in ("hook_acc_int32", "hook_out"))
    return Hypothesis(steps, name, cause, remedy, edit, _has_master)


def _has_master(step: Step) -> bool:
    """Asked of one matrix, for all: reading each takes time."""
    first = next((name for name, w in step.setting.weights.linears() if w.bit_linear is not None), "")
    return step.setting.master(first) is not None and (step.name.endswith(ACC[1:]) or dequantizes(step))


def _ternary(w: Array, w_scale: Array) -> Quantized:
    """w (N, K), w_scale () or (N, 1) -> W_t, the scale () or (N,)"""
    w_scale = np.maximum(w_scale, np.float32(SCALE_FLOOR))
    return np.clip(np.rint(w * (np.float32(1) / w_scale)), -1, 1), w_scale.squeeze()


def _by_row(step: Step, w: Array) -> Quantized:
    return _ternary(w, np.abs(w).mean(1, keepdims=True, dtype=np.float64).astype(np.float32))


def _in_bfloat16(step: Step, w: Array) -> Quantized:
    narrow = partial(rounded, dtype=ml_dtypes.bfloat16)
    inverse = narrow(1 / np.maximum(narrow(np.abs(narrow(w)).mean()), np.float32(SCALE_FLOOR)))
    return np.clip(np.rint(narrow(narrow(w) * inverse)), -1, 1), narrow(1 / inverse)


def _merged(names: Sequence[str], step: Step, w: Array) -> Quantized:
    """By the mean |W| of the matrices that are computed as one."""
    block = step.owner.rpartition(".")[0]
    masters = [step.setting.master(f"{block}.{name}") for name in names]
    values = np.concatenate([np.abs(each).reshape(-1) for each in masters if each is not None])
    return _ternary(w, values.mean(dtype=np.float64).astype(np.float32))


def _transpose_tiles(acc: Array) -> Array:
    n, out = (size // 4 * 4 for size in acc.shape)
    tiles, changed = acc[:n, :out].reshape(n // 4, 4, out // 4, 4), acc.copy()
    changed[:n, :out] = tiles.swapaxes(1, 3).reshape(n, out)
    return changed


# fmt: off
HYPOTHESES = (
    scale_mistake("scale_inverted", "the weight scale is inverted: divided by where it multiplies, or the reverse",
        "quantization_config.linear_class decides: autobitlinear multiplies by weight_scale, bitlinear divides by it.",
        lambda w: np.float32(1) / w.w_dequant_scale),
    scale_mistake("scale_missing", "the weight scale is not applied",
        "y = acc * (w_scale / x_scale).", lambda w: 1),
    scale_mistake("scale_from_ternary_weights",
        "absmean was taken of matrices that were ternary already: the scale is too small by the share of non-zeros",
        "A matrix that holds only -s, 0 and +s has the scale s; absmean is for master weights.",
        lambda w: w.w_dequant_scale * np.float32(np.abs(w.ternary()).mean(dtype=np.float64))),
    masters_mistake("masters_by_row", "the masters are quantised with a scale for each row",
        "absmean is taken of the whole matrix: |W|.mean(), not |W|.mean(-1).", _by_row),
    masters_mistake("masters_in_bfloat16", "the masters are quantised in bfloat16, scale and quotient",
        "Widen them to float32 first: many quotients are near a half.", _in_bfloat16),
    *(masters_mistake(f"masters_merged_{name}", f"the masters of {words} are quantised as one matrix, with one scale",
        "Quantise each matrix by its own mean |W|, then merge.", partial(_merged, names), names)
      for name, words, names in (("qkv", "q, k and v", QKV), ("gate_up", "gate and up", GATE_UP))),
    Hypothesis("*.attn.[qkv]_proj.hook_out", "qkv_scales_by_thirds",
        "the three scales of a fused qkv matrix are given to equal thirds of its rows",
        "Under GQA q has more rows than k and v: cut at H*d and (H+G)*d.", _scale_by_thirds,
        _has_fewer_kv_heads),
    sum_mistake("int16_accumulators_wrap", "sums are kept in int16 and wrap at 32,768",
        WIDEN, after(lambda acc: (acc + 0x8000) % 0x10000 - 0x8000)),
    sum_mistake("int16_accumulators_saturate", "sums are kept in int16 and stop at 32,767",
        WIDEN, after(lambda acc: np.clip(acc, -0x8000, 0x7FFF))),
    sum_mistake("tiles_of_4_transposed",
        "with 4 tokens or more, rows and columns of each tile of 4 tokens and 4 outputs are exchanged",
        "Compare with a run of one token, whose products take another way: the strides of the tiled one are wrong.",
        after(_transpose_tiles), lambda step: len(step.setting.tokens) > 3),
    sum_mistake("bf16_accumulators", "the integer sums are rounded to bfloat16, which has 8 bits",
        "Keep the sums in int32 (or float32, exact below 2^24) until the scale is applied.",
        after(partial(rounded, dtype=ml_dtypes.bfloat16))),
    sum_mistake("f16_accumulators", "the integer sums are rounded to float16",
        "Keep them in int32.",
        after(lambda acc: np.clip(acc, -65504, 65504).astype(np.float16).astype(np.float32))),
)
# fmt: on


def _zeros(subject: str, names: list[str]) -> Hypothesis:
    """These linears give zeros; `subject` names them in the cause."""
    cause = f"{subject} return zeros"
    remedy = "A kernel must refuse a shape that it cannot compute; look for a size that it needs a multiple of."
    steps = " ".join(f"{name}.hook_acc_int32 {name}.hook_out" for name in names)
    return Hypothesis(steps, "unsupported_shape_gives_zeros", cause, remedy, after(np.zeros_like))


def zero_hypotheses(s: Setting, candidate: Tensors) -> Iterator[Hypothesis]:
    """Linears that give zeros: those whose recorded results are zeros or, if none is recorded, those of each shape."""
    blocks = {name: w for name, w in s.weights.linears() if name != "lm_head"}
    hooks = ("hook_acc_int32", "hook_out")
    outputs = {name: [candidate[n] for h in hooks if (n := f"{name}.{h}") in candidate] for name in blocks}
    zeros = [name for name, arrays in outputs.items() if arrays and not any(a.any() for a in arrays)]
    if zeros:
        shapes = sorted({"(out {}, in {})".format(*blocks[name].shape) for name in zeros})
        yield _zeros(f"the linears of shape {', '.join(shapes)}", zeros)
    elif not any(outputs.values()):
        for size in sorted({w.shape[1] for w in blocks.values()}):
            yield _zeros(f"the linears of {size} inputs", [n for n, w in blocks.items() if w.shape[1] == size])
        for shape in sorted({w.shape for w in blocks.values()}):
            names = [name for name, w in blocks.items() if w.shape == shape]
            yield _zeros("the linears of shape (out {}, in {})".format(*shape), names)
