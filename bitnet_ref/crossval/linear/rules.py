"""A BitLinear as a set of rules, each of which can be another one: what the layers of packages compute, right or wrong.

`Rules()` is the reference's BitLinear (`reference.quantization`); a test holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...reference.layers import Array, Floats
from ...reference.quantization import SCALE_FLOOR

Rounding = Callable[[Array], Array]
HALF, SMALL = np.float32(0.5), 1e-30


@dataclass(frozen=True)
class Rules:
    """What a BitLinear does, line by line.

    norm: of NORMS.   over: of OVER, the values that share an activation scale.   levels: 127 of 127 / max|x|; None: the
    activations stay floats.   floor: what max|x| is at least; `added`: what is added to it.   x_round, w_round: of
    ROUNDINGS.   x_clip: the smallest and largest integer, or None.   w_scale: of SCALES.   out: of OUTPUTS, the part
    of the weights in the rescaling, and x_out that of the activations.   constant: a factor that belongs nowhere.
    """

    norm: str = "none"
    over: str = "token"
    levels: float | None = 127
    floor: float = SCALE_FLOOR
    added: float = 0.0
    x_round: str = "half to even"
    x_clip: tuple[int, int] | None = (-128, 127)
    w_scale: str = "mean|W|"
    w_round: str = "half to even"
    w_clip: bool = True
    threshold: float = 0.5
    x_out: str = "divided by"
    out: str = "the weights' scale"
    constant: float = 1.0


# -- norms -------------------------------------------------------------------------------------------------------------


def _rms(x: Floats) -> Floats:
    length: Floats = np.sqrt(np.maximum((x * x).mean(axis=-1, keepdims=True), SMALL))
    return x / length


NORMS: dict[str, Callable[[Array], Array]] = {
    "none": lambda x: x,
    "RMSNorm": _rms,
    "LayerNorm": lambda x: _rms(x - x.mean(axis=-1, keepdims=True)),
}


# -- roundings ---------------------------------------------------------------------------------------------------------

ROUNDINGS: dict[str, Rounding] = {
    "half to even": np.rint,
    "nearest": np.rint,  # where it cannot be seen which of two equally near ones is taken
    "half away from zero": lambda u: np.trunc(u + np.copysign(HALF, u)),
    "half up": lambda u: np.floor(u + HALF),
    "floor": np.floor,
    "truncation": np.trunc,
    "ceiling": np.ceil,
}
ROUNDED_AS = {
    "half to even": "to the nearest, halves to even",
    "nearest": "to the nearest; behind this norm halves cannot be seen",
    "half away from zero": "to the nearest, halves away from zero",
    "half up": "to the nearest, halves up: floor(x + 0.5)",
    "floor": "down: floor(x)",
    "truncation": "towards zero: truncated",
    "ceiling": "up: ceil(x)",
    "sign": "by sign(w): two values, no zeros",
    "sign of w - mean": "by sign(w - mean w): two values, no zeros",
    "threshold": "by a threshold",
    "none": "not at all",
}


# -- activations -------------------------------------------------------------------------------------------------------

OVER: dict[str, tuple[int, ...]] = {"token": (-1,), "sequence": (-2, -1), "tensor": (0, 1, 2), "column": (0, 1)}


def quantize_x(n: Array, rules: Rules) -> tuple[Array, Array]:
    """n (B, T, K), behind the norm -> the integers as floats, and what multiplied them"""
    if rules.levels is None:
        return n, np.ones(1, dtype=n.dtype)
    largest = np.abs(n).max(axis=OVER[rules.over], keepdims=True)
    bottom = np.maximum(largest + n.dtype.type(rules.added), n.dtype.type(rules.floor))
    a = n.dtype.type(rules.levels) / np.maximum(bottom, n.dtype.type(SMALL))
    q = ROUNDINGS[rules.x_round](n * a)
    return q if rules.x_clip is None else np.clip(q, *rules.x_clip), a


X_OUT: dict[str, Callable[[Array, Array], Array]] = {
    "divided by": lambda q, a: q / a,
    "not divided by": lambda q, a: q + 0 * a,
    "multiplied by": lambda q, a: q * a,
}


def activations(x: Array, rules: Rules) -> Array:
    """x -> what is multiplied by the weights, with the activation scale taken out again as the layer does"""
    return X_OUT[rules.x_out](*quantize_x(NORMS[rules.norm](x), rules))


# -- weights -----------------------------------------------------------------------------------------------------------


def _of_groups(size: int, reduce: Callable[..., Array]) -> Callable[[Array], Array]:
    def scale(w: Array) -> Array:
        groups = np.abs(w).reshape(len(w), -1, size)
        return np.repeat(reduce(groups, axis=2), size, axis=1)

    return scale


def _lower_median(w: Array) -> Array:
    """As torch.median: of an even number of values the lower one of the two in the middle."""
    return np.sort(np.abs(w), axis=None)[[[(w.size - 1) // 2]]]


SCALES: dict[str, Callable[[Array], Array]] = {
    "mean|W|": lambda w: np.abs(w).mean(keepdims=True),
    "median|W|": _lower_median,
    "median|W|, between the two in the middle": lambda w: np.median(np.abs(w), keepdims=True),
    "max|W|": lambda w: np.abs(w).max(keepdims=True),
    "mean|W| of each row": lambda w: np.abs(w).mean(axis=1, keepdims=True),
    "max|W| of each row": lambda w: np.abs(w).max(axis=1, keepdims=True),
    "median|W| of each row": lambda w: np.median(np.abs(w), axis=1, keepdims=True),
    "mean|W| of each column": lambda w: np.abs(w).mean(axis=0, keepdims=True),
    **{f"mean|W| of each group of {g}": _of_groups(g, np.mean) for g in (16, 32, 64, 128)},
    **{f"max|W| of each group of {g}": _of_groups(g, np.max) for g in (32, 64, 128)},
    "the root of mean W^2": lambda w: np.sqrt((w * w).mean(keepdims=True)),
    "std(W)": lambda w: w.std(keepdims=True),
    "mean|W - mean W|": lambda w: np.abs(w - w.mean()).mean(keepdims=True),
    "1": lambda w: np.ones((1, 1), dtype=w.dtype),
}


def scale_of(w: Array, rules: Rules) -> Array:
    """The scale by which W is divided: of a shape that broadcasts with W"""
    return np.maximum(SCALES[rules.w_scale](w.astype(np.float64)), SCALE_FLOOR).astype(w.dtype)


def quantize_w(w: Array, rules: Rules, s: Array) -> Array:
    """The quantised weights as floats"""
    if rules.w_round == "none":
        return w / s
    if rules.w_round.startswith("sign"):
        shifted = w - w.mean() if rules.w_round == "sign of w - mean" else w
        return np.sign(shifted)
    if rules.w_round == "threshold":
        return np.sign(w) * (np.abs(w) > rules.threshold * s)
    q = ROUNDINGS[rules.w_round](w * (w.dtype.type(1) / s))
    return np.clip(q, -1, 1) if rules.w_clip else q


OUTPUTS: dict[str, Callable[[Array, Array, Array], Array]] = {  # (s, w, quantised w) -> a factor of the output
    "the weights' scale": lambda s, w, t: s,
    "nothing: the scale is missing": lambda s, w, t: np.ones_like(s),
    "1 / scale: it divides where it multiplies": lambda s, w, t: 1 / s,
    "the scale twice": lambda s, w, t: s * s,
    "the root of the scale": lambda s, w, t: np.sqrt(s),
    "mean|W_q|: the scale times the share of non-zeros": lambda s, w, t: s * np.abs(t).mean(keepdims=True),
    "max|W|": lambda s, w, t: np.abs(w).max(keepdims=True),
    "mean|W|": lambda s, w, t: np.abs(w).mean(keepdims=True),
    "median|W|": lambda s, w, t: _lower_median(w),
    "the mean of the |w| that are not rounded to zero": (
        lambda s, w, t: (np.abs(w) * (t != 0)).sum(keepdims=True) / np.maximum((t != 0).sum(), 1)
    ),
}


def weights(w: Array, rules: Rules) -> Array:
    """W (N, K) -> what the activations are multiplied by, with the output's factor"""
    s = scale_of(w, rules)
    t = quantize_w(w, rules, s)
    scaled: Array = t * OUTPUTS[rules.out](s, w, t) * w.dtype.type(rules.constant)
    return scaled.astype(w.dtype)


def output(x: Array, w: Array, rules: Rules) -> Array:
    """y (B, T, N) of the layer without its bias"""
    return activations(x, rules).astype(np.float64) @ weights(w, rules).T.astype(np.float64)
