"""Other formulas of the steps that treat each token by itself: norms, the quantisation of activations, gates, sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from ....reference.layers import ACTIVATIONS, Array, Floats
from ..variants import Step
from .kinds import Change, Row, wide


# fmt: off
def mean_square(x: Array) -> Floats:
    """Of each row.   (..., n) -> (..., 1)"""
    mean: Floats = np.square(wide(x)).mean(-1, keepdims=True)
    return mean


def absmax(x: Array) -> Floats:
    largest: Floats = np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(1e-5))
    return largest


def to_int8(x: Array, low: float = -128, high: float = 127) -> Array:
    return np.clip(np.rint(x), low, high)


def lengths_of_blocks(x: Array, size: int, eps: float) -> Array:
    """The length of each `size` columns, for each of them."""
    return np.repeat(np.sqrt(mean_square(x.reshape(len(x), -1, size)) + eps)[..., 0], size, axis=1)


PARTS: list[tuple[str, Change]] = [
    ("first half", lambda x: x[:, : x.shape[1] // 2]), ("second half", lambda x: x[:, x.shape[1] // 2 :]),
    ("first quarter", lambda x: x[:, : x.shape[1] // 4]), ("first three quarters", lambda x: x[:, : 3 * x.shape[1] // 4]),
    ("even columns", lambda x: x[:, ::2]), ("odd columns", lambda x: x[:, 1::2]), ("columns but the first", lambda x: x[:, 1:]),
    *((f"first {n} columns", lambda x, n=n: x[:, :n]) for n in (16, 32, 64, 128)),
    *((f"columns but the last {n}", lambda x, n=n: x[:, :-n] if n < x.shape[1] else x) for n in (1, 4, 8, 16, 32, 64)),
]
LENGTHS: list[Row] = [
    (1.1, "eps is a floor of the mean of squares, not added", lambda x, eps: np.sqrt(np.maximum(mean_square(x), eps))),
    (1.1, "the mean of |x| stands for the root of the mean of squares", lambda x, eps: np.abs(wide(x)).mean(-1, keepdims=True) + eps),
    (1.1, "the mean of |x| stands for the root, without eps", lambda x, eps: np.abs(wide(x)).mean(-1, keepdims=True)),
    (1.1, "the largest |x| stands for the root of the mean of squares", lambda x, eps: np.abs(x).max(-1, keepdims=True)),
    (1, "the sum of squares stands for their mean", lambda x, eps: np.sqrt(mean_square(x) * x.shape[-1] + eps)),
    (1.1, "the root is not taken", lambda x, eps: mean_square(x) + eps),
    (1.2, "the sum of squares is divided by D - 1", lambda x, eps: np.sqrt(mean_square(x) * x.shape[-1] / (x.shape[-1] - 1) + eps)),
    (1.2, "the norm does not divide: its length is 1", lambda x, eps: np.ones_like(x[:, :1])),
    *((1.4, f"the mean of squares runs over the {words} only", lambda x, eps, part=part: np.sqrt(mean_square(part(x)) + eps)) for words, part in PARTS),
]
NORMS: list[Row] = [
    (1, "the norm is left out", lambda x, r, w: x),
    (1.1, "the norm multiplies by its weight, but does not divide by the length", lambda x, r, w: x * w),
    (1.1, "the norm multiplies by the length instead of dividing", lambda x, r, w: x * r * w),
    (1.3, "the weight of the norm is in reverse", lambda x, r, w: x / r * w[::-1]),
    (1.3, "the weight of the norm is one too far", lambda x, r, w: x / r * np.roll(w, 1)),
    (1.3, "the weight of the norm is one too early", lambda x, r, w: x / r * np.roll(w, -1)),
    (1.3, "the input is added to the norm's result", lambda x, r, w: x / r * w + x),
]
ACTIVATION_SCALES: list[Row] = [
    (1.1, "the activation scale takes max x, not max |x|", lambda x: 127 / np.maximum(x.max(-1, keepdims=True), 1e-5)),
    (1.1, "the activation scale is max|x| / 127, the inverse", lambda x: absmax(x) / 127),
    (1.1, "the activation scale takes the mean of |x|, not the largest", lambda x: 127 / np.abs(x).mean(-1, keepdims=True)),
    (1.2, "the activation scale takes the root of the mean of squares, not the largest", lambda x: 127 / np.sqrt(mean_square(x))),
    *((1.3, f"the activation scale takes the largest of the {words} only", lambda x, part=part: 127 / absmax(part(x))) for words, part in PARTS),
]
INT8_RULES: list[Row] = [
    (1, "activations are rounded down", lambda x, s: np.clip(np.floor(x * s), -128, 127)),
    (1, "activations are rounded up", lambda x, s: np.clip(np.ceil(x * s), -128, 127)),
    (1.2, "values beyond int8 wrap round instead of being clipped", lambda x, s: np.rint(x * s).astype(np.int64).astype(np.int8)),
    *((1.2, f"activations have {n} bits, not 8: they are multiples of {2 ** (8 - n)}", lambda x, s, m=2 ** (8 - n): np.clip(np.rint(x * s / m) * m, -128, 127)) for n in (7, 6, 5, 4, 3, 2)),
    *((1.1, f"activations have {n} bits, clipped to {-(2 ** (n - 1))} and {2 ** (n - 1) - 1}", lambda x, s, n=n: to_int8(x * s, -(2 ** (n - 1)), 2 ** (n - 1) - 1)) for n in (7, 6, 5, 4)),
    (1.3, "activations are unsigned: 128 is added", lambda x, s: (to_int8(x * s) + 128).astype(np.uint8).astype(np.int8)),
    *((1.1, f"activations are clipped to {-n} and {n}", lambda x, s, n=n: to_int8(x * s, -n, n)) for n in (126, 125, 124, 120, 112, 100, 96, 80, 64)),
]


def sigmoid(x: Array) -> Floats:
    power: Floats = np.exp(-np.clip(x, -700, 700))
    return 1 / (1 + power)


OTHER_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {  # that no model has, beside those of ACTIVATIONS
    "relu": lambda x: np.maximum(x, 0),
    "gelu (erf)": lambda x: 0.5 * x * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2))),
    "quick gelu, x sigmoid(1.702 x)": lambda x: x * sigmoid(1.702 * x), "sigmoid": sigmoid, "tanh": np.tanh, "no activation": lambda x: x,
    "the square without relu": np.square, "x |x|": lambda x: x * np.abs(x), "the absolute value": np.abs, "softplus": lambda x: np.logaddexp(0, x),
    "mish": lambda x: x * np.tanh(np.logaddexp(0, x)), "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "hard swish": lambda x: x * np.clip(x + 3, 0, 6) / 6, "hard sigmoid": lambda x: np.clip(x + 3, 0, 6) / 6, "relu6": lambda x: np.clip(x, 0, 6),
    "leaky relu, slope 0.01": lambda x: np.where(x > 0, x, 0.01 * x), "the constant 1": np.ones_like,
}


def act(x: Array, activation: str) -> Array:
    return ACTIVATIONS[activation].function(wide(x))


GATES: list[Row] = [
    (1, "up is left out", lambda g, u, n: act(g, n)),
    (1.1, "the activation is squared once more", lambda g, u, n: np.square(act(g, n)) * wide(u)),
    (1.1, "the activation is on gate and on up", lambda g, u, n: act(g, n) * act(u, n)),
    (1, "gate and up are added, not multiplied", lambda g, u, n: act(g, n) + wide(u)),
]


def gates(step: Step) -> Iterator[Row]:
    right = ACTIVATIONS[step.inputs[2]].words
    of_models = {each.words: each.function for each in ACTIVATIONS.values()}
    for name, other in (of_models | OTHER_ACTIVATIONS).items():
        if name != right:
            yield 1, f"the activation is {name} where {right} belongs", lambda g, u, n, other=other: other(wide(g)) * wide(u)
    yield from GATES


RESIDUALS: list[Row] = [
    (1, "the residual is left out: the block's result is the stream", lambda x, y: y),
    (1, "the block's result is left out", lambda x, y: x),
    (1.2, "the block's result multiplies the stream", lambda x, y: x * y),
]
