"""Which gradients a layer gives: straight through both roundings, clipped, through the scales, or none."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...reference.layers import Array
from .rules import NORMS, OUTPUTS, OVER, SMALL, Rules, activations, quantize_w, quantize_x, scale_of, weights

NEAR = 2e-3  # relative L2: float32 sums, and a norm's eps
RIGHT = "straight through the rounding"


def back_through_norm(x: Array, dn: Array, norm: str) -> Array:
    """dX of a norm inside, without its weight and its eps."""
    if norm == "none":
        return dn
    x, dn = x.astype(np.float64), dn.astype(np.float64)
    centred = norm == "LayerNorm"
    shifted = x - x.mean(axis=-1, keepdims=True) if centred else x
    r = np.sqrt((shifted * shifted).mean(axis=-1, keepdims=True))
    n = shifted / r
    out = dn - n * (dn * n).mean(axis=-1, keepdims=True)
    return np.asarray((out - (out.mean(axis=-1, keepdims=True) if centred else 0)) / r)


def input_gradients(x: Array, w: Array, dy: Array, rules: Rules) -> Iterator[tuple[str, Array]]:
    """name -> dX of each way to differentiate the layer"""
    n = NORMS[rules.norm](x)
    q, a = (each.astype(np.float64) for each in quantize_x(n, rules))
    eff = weights(w, rules).astype(np.float64)
    g = dy.astype(np.float64) @ eff
    largest = np.abs(n).max(axis=OVER[rules.over], keepdims=True)
    peak = (np.abs(n) == largest) * np.sign(n) / largest

    def through(values: Array) -> Array:
        """What reaches the largest |x| through the scale."""
        reaching: Array = peak * (g * values).sum(axis=OVER[rules.over], keepdims=True)
        return reaching

    raw = w.astype(np.float64)
    s = scale_of(w, rules).astype(np.float64)
    divided = {"divided by": a**0, "not divided by": a, "multiplied by": a * a}[rules.x_out]
    top = np.inf if rules.x_clip is None or rules.levels is None else rules.x_clip[1]
    ways = {
        RIGHT: g * divided,
        f"{RIGHT}, without the output's wrong factor": dy.astype(np.float64) @ (eff / _wrong_factor(w, rules)),
        "none: the rounding passes nothing": 0 * g,
        "through the scale too: max|x| is not held constant": g + through(q / a - n),
        "through the scale alone: the rounding passes nothing": through(q / a),
        "of the weights before their quantisation": dy.astype(np.float64) @ raw,
        "without the weights' scale": dy.astype(np.float64) @ (eff / s),
        "times the activations' scale": g * a,
        "divided by the activations' scale": g / a,
        "none where |x| is the largest: the clip is not passed straight through": g * (np.abs(q) < np.floor(top)),
        "none where |x| > 1": g * (np.abs(n) <= 1),
    }
    for name, dn in ways.items():
        yield name, back_through_norm(x, dn, rules.norm)


def _wrong_factor(w: Array, rules: Rules) -> Array:
    """What the output's factor is to the scale: 1 for a right layer."""
    s = scale_of(w, rules).astype(np.float64)
    out = OUTPUTS[rules.out](s, w.astype(np.float64), quantize_w(w, rules, scale_of(w, rules)))
    return np.asarray(out * rules.constant / s)


def weight_gradients(x: Array, w: Array, dy: Array, rules: Rules) -> Iterator[tuple[str, Array]]:
    """name -> dW of each way to differentiate the layer"""
    n = NORMS[rules.norm](x)
    flat = dy.reshape(-1, dy.shape[-1]).astype(np.float64)
    g = flat.T @ activations(x, rules).reshape(len(flat), -1).astype(np.float64)
    before = flat.T @ n.reshape(len(flat), -1).astype(np.float64)
    integers = flat.T @ quantize_x(n, rules)[0].reshape(len(flat), -1).astype(np.float64)
    s = scale_of(w, rules).astype(np.float64)
    t = quantize_w(w, rules, scale_of(w, rules)).astype(np.float64)
    sizes = np.abs(w) / s

    def through(values: Array) -> Array:
        """What each |w| gets through the mean of all: d mean|W| / dw = sign(w) / size."""
        reaching: Array = np.sign(w) * (g * values).sum() / w.size
        return reaching

    yield RIGHT, g
    yield f"{RIGHT}, with the output's wrong factor", g * _wrong_factor(w, rules)
    yield "of the activations before their quantisation", before
    yield "of the integers: the activations' scale is missing", integers
    yield "none: the rounding passes nothing", 0 * g
    if s.shape == (1, 1):
        yield "through the scale too: mean|W| is not held constant", g + through(t - w / s)
        yield "through the scale alone: the rounding passes nothing", through(t)
        yield "times the weights' scale, and through it too", g * s + through(t)
    yield "times the weights' scale: the step is passed as if W_q were W", g * s
    yield "divided by the weights' scale", g / s
    yield "none where |w| > scale: the clip is not passed straight through", g * (sizes <= 1)
    yield "none where |w| > 1.5 scales: the clip is not passed straight through", g * (sizes <= 1.5)
    yield "none where the weight is rounded to zero", g * (t != 0)
    yield "averaged over the tokens, where their sum belongs", g / len(flat)
    yield "of the activations before their quantisation, averaged over the sequences", before / len(dy)
    yield "averaged over the sequences, where their sum belongs", g / len(dy)


def name_gradient(given: Array, ways: Iterator[tuple[str, Array]]) -> tuple[str | None, Array]:
    """(the name of the way that gives the gradient, or None; the right gradient)"""
    right, best = None, None
    for name, each in ways:
        right = each if right is None else right
        size = float(np.linalg.norm(each))
        error = float(np.linalg.norm(given - each)) / max(size, SMALL) if size else float(np.abs(given).max() > 0)
        if error <= NEAR and (best is None or error < best[0] / 10):
            best = error, name
    assert right is not None
    return None if best is None else best[1], right
