"""Mistakes in the quantisation of a BitLinear's input."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....backends import Backend
from ....families.family import Edit, Hypothesis, instead
from ....reference import layers
from ....reference.layers import Array, Floats
from ....reference.quantization import SCALE_FLOOR
from ....reference.weights import TernaryLinear
from ..edits.kinds import input_floats
from ..variants import Step
from .linears import OUT, dequantizes

rounding_mistake = partial(Hypothesis, "*_proj.hook_x_int8")
scale_mistake = partial(Hypothesis, "*_proj.hook_x_scale")
product_mistake = partial(Hypothesis, OUT)


def _rounded(rule: Callable[[Array], Array]) -> Edit:
    return instead(lambda x, scale: np.clip(rule(x * scale), -128, 127))


def _scaled(scale_of: Callable[[Array], Array]) -> Edit:
    """The scale of each token's largest value (N, 1)."""
    return instead(lambda x: scale_of(np.abs(x).max(axis=-1, keepdims=True)))


def _absmax(largest: Array) -> Array:
    return np.float32(127) / np.maximum(largest, np.float32(SCALE_FLOOR))


def scale_per_tensor(x: Array) -> Array:
    """The largest value of the whole call, not of each token, sets the scale."""
    return np.full((len(x), 1), _absmax(np.abs(x).max()))


class BlockwiseBackend(Backend):
    """Activations quantised in blocks of `size` features, as llama.cpp does: the accumulators get an axis for the
    blocks, (N, blocks, out), and are summed after scaling."""

    def __init__(self, size: int, threads: int | None = 1) -> None:
        super().__init__("float32", threads=threads)
        self.size = size

    def quantize_activations(self, x: Array) -> tuple[NDArray[np.int8], Array]:
        """x (N, K) -> x_q (N, K) int8, scales (N, blocks)"""
        blocks = x.reshape(len(x), -1, self.size)
        index = np.abs(blocks).argmax(axis=-1)[..., None]
        largest = np.take_along_axis(blocks, index, axis=-1)  # (N, blocks, 1), with its sign, as llama.cpp takes it
        scale = np.where(largest != 0, np.float32(-127) / np.where(largest != 0, largest, 1), 0)
        x_q = np.minimum(np.rint(blocks * scale), 127).astype(np.int8)
        return x_q.reshape(x.shape), scale[..., 0]

    def ternary_matmul(self, x_q: NDArray[np.int8], w: TernaryLinear) -> NDArray[np.int32]:
        """(N, K), (out, K) -> (N, blocks, out)"""
        n = w.shape[0]
        weights = w.ternary().reshape(n, -1, self.size).transpose(1, 2, 0).astype(np.float32)  # (blocks, size, out)
        acc = x_q.reshape(len(x_q), -1, self.size).transpose(1, 0, 2).astype(np.float32) @ weights
        return acc.transpose(1, 0, 2).astype(np.int32)

    def dequantize(self, acc: NDArray[np.int32], w: TernaryLinear, x_quant_scale: Array) -> Array:
        """(N, blocks, out), (N, blocks) -> (N, out)"""
        step = np.divide(np.float32(1), x_quant_scale, out=np.zeros_like(x_quant_scale), where=x_quant_scale != 0)
        total: NDArray[np.float32] = (acc * step[..., None]).sum(axis=1, dtype=np.float32)
        return total * w.w_dequant_scale


_BY_256 = BlockwiseBackend(256)


def _in_blocks_of_256(step: Step, compute: Edit, acc: Array, w: TernaryLinear, scale: Array) -> Array:
    x_q, scales = _BY_256.quantize_activations(input_floats(step))
    return _BY_256.dequantize(_BY_256.ternary_matmul(x_q, w), w, scales)


def _has_blocks_of_256(step: Step) -> bool:
    """Whether a step is the output of a BitLinear, in a model whose rows are whole blocks, and of more than one."""
    widths = {w.in_features for _, each in step.setting.weights.linears() if (w := each.bit_linear) is not None}
    return dequantizes(step) and not any(width % 256 for width in widths) and widths != {256}


def _has_blocks(step: Step, size: int) -> bool:
    """Whether a step is of a BitLinear's integers or output, and its rows are whole blocks, and more than one."""
    if not (step.name.endswith("hook_x_int8") or dequantizes(step)):
        return False
    floats = input_floats(step) if dequantizes(step) else step.inputs[0]
    return bool(floats.shape[1] > size and floats.shape[1] % size == 0)


def _of_floats(compute: Edit, x: Array, w: TernaryLinear, scale: Array) -> Array:
    """The output of a BitLinear whose input is not quantised, or not here."""
    return compute(layers.dense_matmul(x, w.ternary().astype(np.float32)), w, np.ones_like(scale))


def _in_plain_blocks(size: int) -> Edit:
    """int8 values with a scale for each block; what is computed from them is computed from the blocks' own."""

    def edit(step: Step, compute: Edit, x: Array, *rest: Any) -> Array:
        floats = x if len(rest) == 1 else input_floats(step)
        blocks = floats.reshape(len(floats), -1, size)
        scales = _absmax(np.abs(blocks).max(axis=-1, keepdims=True))
        codes: Floats = np.rint(blocks * scales)
        if len(rest) == 1:
            return codes.reshape(x.shape).astype(np.int8)
        return _of_floats(compute, (codes / scales).reshape(floats.shape), *rest)

    return edit


def _asymmetric(step: Step, compute: Edit, x: Floats, *rest: Any) -> Array:
    """A scale and a zero point for a token: its least value is -128, its largest 127."""
    is_product = len(rest) == 1 and isinstance(rest[0], TernaryLinear)
    floats = input_floats(step) if is_product else x
    low, high = floats.min(axis=-1, keepdims=True), floats.max(axis=-1, keepdims=True)
    scale: Floats = np.float32(255) / np.maximum(high - low, np.float32(SCALE_FLOOR))
    if not rest:
        return scale
    zero = np.rint(-low * scale) - 128
    if is_product:
        return compute(x - zero, *rest)
    codes: Floats = np.rint(x * scale) + zero
    return codes.clip(-128, 127).astype(np.int8)


def _of_128_wrapping(step: Step, compute: Edit, x: Array, *scale: Array) -> Array:
    """128 / max|x|, and the largest value as the int8 -128."""
    if not scale:
        return _absmax(np.abs(x).max(axis=-1, keepdims=True)) * np.float32(128 / 127)
    whole: Floats = np.rint(x * scale[0])
    return whole.astype(np.int64).astype(np.int8)


# fmt: off
HYPOTHESES = (
    rounding_mistake("round_half_away", "activations at a tie are rounded away from zero",
        "Round half to even: rint, nearbyint, torch.round. C's round() and lround() round away from zero.",
        _rounded(lambda v: np.copysign(np.floor(np.abs(v) + np.float32(0.5)), v))),
    rounding_mistake("round_half_up", "activations are rounded by floor(x + 0.5)",
        "Round half to even.", _rounded(lambda v: np.floor(v + np.float32(0.5)))),
    rounding_mistake("truncated", "activations are truncated, not rounded, to int8",
        "Round before the cast to int8.", _rounded(np.trunc)),
    scale_mistake("activation_scale_per_tensor", "one activation scale for all tokens of the call",
        "absmax runs over each token's own features.",
        instead(scale_per_tensor), lambda step: len(step.setting.tokens) > 1),
    scale_mistake("activation_floor_missing",
        "the activation scale has no floor: 127 / max|x| for a token of (almost) zeros",
        "x_scale = 127 / max(max|x|, 1e-5).", _scaled(lambda largest: np.float32(127) / largest)),
    scale_mistake("activation_floor_added", "1e-5 is added to max|x|",
        "It is a floor: max(max|x|, 1e-5).",
        _scaled(lambda largest: np.float32(127) / (largest + np.float32(SCALE_FLOOR)))),
    scale_mistake("activation_scale_of_128", "the activation scale is 128 / max|x|",
        "The factor is 127.", _scaled(lambda largest: np.float32(128) / np.maximum(largest, np.float32(SCALE_FLOOR)))),
    Hypothesis("*_proj.hook_x_scale *_proj.hook_x_int8", "activation_scale_128_wraps",
        "activations are scaled by 128 / max|x|, and 128 becomes the int8 -128",
        "The factor is 127.", _of_128_wrapping),
    product_mistake("activation_blocks_of_256",
        "activations are quantised in blocks of 256 features, as llama.cpp does for TQ1_0 and TQ2_0 (Q8_K)",
        "The model was trained with one scale per token; expect small differences everywhere.",
        _in_blocks_of_256, _has_blocks_of_256),
    *(Hypothesis("*_proj.hook_x_int8 *_proj.hook_out", f"activation_scales_by_{size}",
        f"each {size} activations of a token have a scale of their own",
        "One scale per token.", _in_plain_blocks(size), partial(_has_blocks, size=size))
        for size in (16, 32, 64, 128, 256)),
    Hypothesis("*_proj.hook_x_scale *_proj.hook_x_int8 *_proj.hook_acc_int32", "activations_asymmetric",
        "activations are asymmetric, with a zero point: their least value is -128, their largest 127",
        "The scale is 127 / max|x|, and 0 is 0.", _asymmetric),
    product_mistake("activations_not_quantised",
        "activations are not quantised: dense products with the dequantised weights",
        "Quantise the input of every BitLinear to int8.",
        lambda step, compute, acc, *rest: _of_floats(compute, input_floats(step), *rest), dequantizes),
)
