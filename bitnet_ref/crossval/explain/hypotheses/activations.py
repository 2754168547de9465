"""Mistakes in the quantisation of a BitLinear's input."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ....families.family import Hypothesis
from ....reference import layers
from ....reference.quantization import SCALE_FLOOR
from ....reference.weights import TernaryLinear
from ..variants import Op, Setting
from .linears import ACC, OUT, has_ternary

INT8 = "*_proj.hook_x_int8 *_proj.hook_x_scale"
int8_mistake = partial(Hypothesis, INT8)
product_mistake = partial(Hypothesis, f"{INT8} {ACC} {OUT}")


def _quantize(
    s: Setting, scale_of: Callable[[NDArray], NDArray], round_values: Callable[[NDArray], NDArray] = np.rint
) -> Setting | None:
    def quantize_activations(op: Op, x: NDArray) -> tuple[NDArray, NDArray]:
        scale = scale_of(np.abs(x).max(axis=-1, keepdims=True)).astype(x.dtype)
        return np.clip(round_values(x * scale), -128, 127).astype(np.int8), scale

    return s.with_ops(quantize_activations=quantize_activations) if has_ternary(s) else None


def _absmax(largest: NDArray) -> NDArray:
    return np.float32(127) / np.maximum(largest, np.float32(SCALE_FLOOR))


def scale_per_tensor(s: Setting) -> Setting | None:
    """The largest value of the whole call, not of each token, sets the scale."""
    if len(s.tokens) == 1:
        return None
    return _quantize(s, lambda largest: _absmax(np.full_like(largest, largest.max())))


def _blockwise(s: Setting, size: int) -> Setting | None:
    """Scales for blocks of `size` features: the accumulators get an axis (N, blocks, out), summed after scaling."""
    linears = [w.bit_linear for _, w in s.weights.linears() if w.bit_linear is not None]
    if not linears or any(w.in_features % size for w in linears) or all(w.in_features == size for w in linears):
        return None

    def quantize_activations(op: Op, x: NDArray) -> tuple[NDArray, NDArray]:
        blocks = x.reshape(len(x), -1, size)
        index = np.abs(blocks).argmax(axis=-1)[..., None]
        largest = np.take_along_axis(blocks, index, axis=-1)  # (N, blocks, 1), with its sign, as llama.cpp takes it
        scale = np.where(largest != 0, np.float32(-127) / np.where(largest != 0, largest, 1), 0)
        x_q = np.minimum(np.rint(blocks * scale), 127).astype(np.int8)
        return x_q.reshape(x.shape), scale[..., 0]

    def ternary_matmul(op: Op, x_q: NDArray, w: TernaryLinear) -> NDArray:
        n = w.shape[0]
        weights = w.ternary().reshape(n, -1, size).transpose(1, 2, 0).astype(np.float32)  # (blocks, size, out)
        acc = x_q.reshape(len(x_q), -1, size).transpose(1, 0, 2).astype(np.float32) @ weights
        return acc.transpose(1, 0, 2).astype(np.int32)

    def dequantize(op: Op, acc: NDArray, w: TernaryLinear, x_quant_scale: NDArray) -> NDArray:
        step = np.divide(np.float32(1), x_quant_scale, out=np.zeros_like(x_quant_scale), where=x_quant_scale != 0)
        return (acc * step[..., None]).sum(axis=1, dtype=np.float32) * w.w_dequant_scale

    return s.with_ops(quantize_activations=quantize_activations, ternary_matmul=ternary_matmul, dequantize=dequantize)


def _without_quantization(s: Setting) -> Setting | None:
    if not has_ternary(s):
        return None
    return s.with_ops(
        quantize_activations=lambda op, x: (x, np.ones((len(x), 1), dtype=x.dtype)),
        ternary_matmul=lambda op, x, w: layers.dense_matmul(x, w.ternary().astype(np.float32)),
    )


# fmt: off
HYPOTHESES = (
    int8_mistake("round_half_away", "activations at a tie are rounded away from zero",
        "Round half to even: rint, nearbyint, torch.round. C's round() and lround() round away from zero.",
        lambda s: _quantize(s, _absmax, lambda v: np.copysign(np.floor(np.abs(v) + np.float32(0.5)), v))),
    int8_mistake("round_half_up", "activations are rounded by floor(x + 0.5)",
        "Round half to even.", lambda s: _quantize(s, _absmax, lambda v: np.floor(v + np.float32(0.5)))),
    int8_mistake("truncated", "activations are truncated, not rounded, to int8",
        "Round before the cast to int8.", lambda s: _quantize(s, _absmax, np.trunc)),
    int8_mistake("activation_scale_per_tensor", "one activation scale for all tokens of the call",
        "absmax runs over each token's own features.", scale_per_tensor),
    int8_mistake("activation_floor_missing",
        "the activation scale has no floor: 127 / max|x| for a token of (almost) zeros",
        "x_scale = 127 / max(max|x|, 1e-5).", lambda s: _quantize(s, lambda largest: np.float32(127) / largest)),
    int8_mistake("activation_floor_added", "1e-5 is added to max|x|",
        "It is a floor: max(max|x|, 1e-5).",
        lambda s: _quantize(s, lambda largest: np.float32(127) / (largest + np.float32(SCALE_FLOOR)))),
    int8_mistake("activation_scale_128", "activations are scaled by 128 / max|x|",
        "The factor is 127.", lambda s: _quantize(s, lambda largest: _absmax(largest) * np.float32(128 / 127))),
    product_mistake("activation_blocks_of_256",
        "activations are quantised in blocks of 256 features, as llama.cpp does for TQ1_0 and TQ2_0 (Q8_K)",
        "The model was trained with one scale per token; expect small differences everywhere.",
        lambda s: _blockwise(s, 256)),
    product_mistake("activation_blocks_of_32", "activations are quantised in blocks of 32 (Q8_0)",
        "One scale per token.", lambda s: _blockwise(s, 32)),
    product_mistake("activations_not_quantised",
        "activations are not quantised: dense products with the dequantised weights",
        "Quantise the input of every BitLinear to int8.", _without_quantization),
)
