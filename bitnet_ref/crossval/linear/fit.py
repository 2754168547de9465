"""The rules that give what a layer gave: the reference's first, then those that differ least from it next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, product
from typing import Any

import numpy as np

from ...reference.layers import Array, Floats
from ..types import Tensors
from .probes import LEVELS, TINY, Answers, Call, read_activations
from .rules import NORMS, OUTPUTS, OVER, ROUNDINGS, SCALES, SMALL, X_OUT, Rules, activations, quantize_w, scale_of

FLIPS = 2e-3  # share of values that float32 noise may round the other way
STEP = 0.1  # of a quantisation step: what two equal values may differ by
SAME = 2e-3  # relative, of effective weights: they are solved for from float32 outputs
FLOORS = (1e-5, 1e-6, 1e-7, 1e-8, 0.0, 1e-4, 1e-3, 1e-2)
CLIPS: tuple[tuple[int, int] | None, ...] = ((-128, 127), (-127, 127), (-127, 128), None)
_SMALL_CLIPS: dict[float | None, tuple[int, int]] = {7: (-8, 7), 8: (-8, 7), 1: (-1, 1)}
Options = Mapping[str, Sequence[Any]]


def by_difference(options: Options, weight: Mapping[str, float]) -> list[dict[str, Any]]:
    """All combinations, those first that differ in few options from the first of each."""

    def cost(combination: Sequence[Any]) -> float:
        pairs = zip(options.items(), combination, strict=True)
        others = ((name, values.index(value)) for (name, values), value in pairs if value != values[0])
        return sum(weight.get(name, 1) + place / 1000 for name, place in others)

    return [dict(zip(options, each, strict=True)) for each in sorted(product(*options.values()), key=cost)]


# -- activations -------------------------------------------------------------------------------------------------------


@cache
def _activation_rules() -> list[Rules]:
    levels = (127, 128, 127.5, None, 7, 8, 255)
    over, rounding = tuple(OVER), tuple(each for each in ROUNDINGS if each != "nearest")
    options = {"norm": tuple(NORMS), "x_out": tuple(X_OUT), "over": over, "levels": levels, "x_round": rounding}
    out = []
    for each in by_difference({**options, "x_clip": CLIPS}, {"norm": 0.4}):
        rules = Rules(**each)
        if rules.x_clip != CLIPS[0] and rules.levels not in (128, 127.5):
            continue  # it cannot be seen: |x a| is at most 127
        if rules.levels is None and (rules.over, rules.x_round, rules.x_out) != (over[0], rounding[0], "divided by"):
            continue
        if rules.levels in _SMALL_CLIPS:
            rules = replace(rules, x_clip=_SMALL_CLIPS[rules.levels])
        out.append(replace(rules, x_clip=None) if rules.levels == 255 else rules)
    return out


def distance(measured: Floats, simulated: Floats, levels: float | None) -> Floats:
    """Of each value, in steps of its token's quantisation."""
    step: Floats = np.abs(simulated).max(axis=-1, keepdims=True) / (levels or 1000)
    return np.abs(measured - simulated) / np.maximum(step, SMALL)


def read_calls(calls: Mapping[str, Call], answers: Answers) -> dict[str, Array]:
    """Of the calls whose weights are all of one size: what was multiplied by them, times an unknown factor"""
    names = [name for name in calls if name.split()[0] in ("tokens", "ties", "tiny", "zeros", "huge")]
    ys = {name: answers.get(name) for name in names}
    return {name: read_activations(y) for name, y in ys.items() if y is not None and np.isfinite(y).all()}


def factor_between(measured: Array, simulated: Array) -> float:
    return float((measured * simulated).sum() / max((simulated * simulated).sum(), SMALL))


def fit_activations(calls: Mapping[str, Call], seen: Tensors, random: bool) -> tuple[Rules, float] | None:
    """(rules of the activations, the factor of `seen`), or None if no rules give what was seen.

    random: equal calls gave different values, so that a value may be a step away.
    """
    near = 1.05 if random else STEP
    nearest = [each for each in _activation_rules() if each.x_round == "half to even"]
    # a norm inside whose float32 noise moves values off the half
    blurred = [replace(each, x_round="nearest") for each in nearest if each.norm != "none"]
    for rules in nearest if random else [*_activation_rules(), *blurred]:
        factor = 0.0
        for name in ("tokens", *(f"ties {levels}" for levels in LEVELS)):
            if name not in seen:
                continue
            simulated = activations(calls[name].x, rules).astype(np.float64)
            if name == "tokens":
                factor = factor_between(seen[name], simulated)
                if not abs(factor) > SMALL:
                    break
            wrong = distance(seen[name] / factor, simulated, rules.levels) > near
            if rules.x_round == "nearest" and rules.levels:
                u = np.abs(NORMS[rules.norm](calls[name].x))
                wrong &= np.abs(u / u.max(axis=-1, keepdims=True) * rules.levels % 1 - 0.5) > 1e-4
            if wrong.mean() > (FLIPS if name == "tokens" else 0):
                break
        else:
            return rules, factor
    return None


def fit_floor(calls: Mapping[str, Call], seen: Tensors, rules: Rules, factor: float) -> Rules | None:
    """The rules with the floor of max|x| that the faint tokens show; None: no floor that was tried does."""
    names = [name for size in TINY if (name := f"tiny {size}") in seen]
    for added, floor in [(0.0, each) for each in FLOORS] + [(each, 0.0) for each in FLOORS if each]:
        tried = replace(rules, floor=floor, added=added)
        errors = []
        for name in names:
            simulated = activations(calls[name].x, tried).astype(np.float64)
            bottom = max(float(np.abs(calls[name].x).max()) + added, floor)
            step = bottom / (rules.levels or 1000)
            errors.append(float((np.abs(seen[name] / factor - simulated) / step > 2 * STEP).mean()))
        if max(errors, default=0) <= 0.01:
            return tried
    return None


# -- weights -----------------------------------------------------------------------------------------------------------


def effective_weights(y: Array, multiplied: Array) -> Array:
    """W (N, K) with y = x W^T.   y (1, T, N), multiplied (1, T, K)"""
    solved = np.linalg.lstsq(multiplied[0].astype(np.float64), y[0], rcond=None)[0]
    return np.asarray(solved.T)


@cache
def _weight_rules() -> list[dict[str, Any]]:
    rounding = (*(each for each in ROUNDINGS if each != "nearest"), "sign", "sign of w - mean", "none")
    return by_difference({"w_scale": tuple(SCALES), "w_round": rounding, "w_clip": (True, False)}, {})


def fit_weights(effective: Tensors, drawn: Tensors, rules: Rules) -> Rules | None:
    """The rules of weights that give every one of the effective weights `effective`, by name of the matrix `drawn`."""
    patterns = {name: np.abs(w[:32]) > 1e-3 * np.abs(w).max() for name, w in effective.items()}
    scales: dict[str, dict[str, Array]] = {}
    for tried in chain((replace(rules, **each) for each in _weight_rules()), _thresholds(effective, drawn, rules)):
        if tried.w_scale not in scales:
            scales[tried.w_scale] = {name: scale_of(w, tried) for name, w in drawn.items()}
        own = scales[tried.w_scale]
        fitted = _fit_output(tried, own, effective, drawn) if _has_pattern(tried, own, drawn, patterns) else None
        if fitted is not None:
            return fitted
    return None


def _has_pattern(rules: Rules, scales: Tensors, drawn: Tensors, patterns: Tensors) -> bool:
    """Whether the same weights are zero, in the first rows."""
    if rules.w_round == "sign of w - mean":
        return all(pattern.mean() > 0.99 for pattern in patterns.values())
    if rules.w_round == "none":
        return all(pattern.mean() > 0.7 for pattern in patterns.values())
    for name, pattern in patterns.items():
        s = scales[name][: len(pattern)]
        zero = quantize_w(drawn[name][: len(pattern)], rules, s) == 0
        if (zero == pattern).mean() > (FLIPS if name != "ties" else 0):
            return False
    return True


def _fit_output(rules: Rules, scales: Tensors, effective: Tensors, drawn: Tensors) -> Rules | None:
    """With the factor of the output; the one without a constant first."""
    ternary = {name: quantize_w(w, rules, scales[name]) for name, w in drawn.items()}
    fitted = None
    for out, of in OUTPUTS.items():
        eff = {name: ternary[name] * of(scales[name].astype(np.float64), w, ternary[name]) for name, w in drawn.items()}
        ratios = {name: factor_between(effective[name], each) for name, each in eff.items() if each.any()}
        first = next(iter(ratios.values()), 0.0)
        if not abs(first) > SMALL or any(abs(ratio / first - 1) > SAME for ratio in ratios.values()):
            continue
        near = {name: np.abs(effective[name] / first - each) <= 0.02 * np.abs(each).max() for name, each in eff.items()}
        if min(float(each.mean()) for each in near.values()) < 1 - FLIPS:
            continue
        is_one = abs(first - 1) < SAME
        if is_one or fitted is None:
            fitted = replace(rules, out=out, constant=1.0 if is_one else first)
        if is_one:
            return fitted
    return fitted


def _thresholds(effective: Tensors, drawn: Tensors, rules: Rules) -> Iterator[Rules]:
    """Rules that take -1, 0, +1 by a threshold, which is read off: below it effective weights are zero."""
    for name in SCALES:
        tried = replace(rules, w_scale=name, w_round="threshold")
        lower, upper = 0.0, np.inf
        for matrix, w in drawn.items():
            if matrix == "ties":
                continue
            size = np.abs(w) / scale_of(w, tried)
            is_zero = np.abs(effective[matrix]) < 1e-3 * np.abs(effective[matrix]).max()
            lower = max(lower, float(size[is_zero].max(initial=0)))
            upper = min(upper, float(size[~is_zero].min(initial=np.inf)))
        if lower < upper * 1.0001 and np.isfinite(upper):
            yield replace(tried, threshold=(lower + upper) / 2)


# -- the bias ----------------------------------------------------------------------------------------------------------

Factor = Callable[[Array, Array], Array]  # (activations' scale (B, T, 1), weights' scale) -> what multiplies the bias
BIASES: dict[str, Factor] = {
    "added as it is": lambda a, s: np.ones_like(a),
    "left out": lambda a, s: 0 * a,
    "subtracted": lambda a, s: -np.ones_like(a),
    "added twice": lambda a, s: 2 * np.ones_like(a),
}
SCALED_BIASES: dict[str, Factor] = {
    "added before the rescaling: it comes out times both scales": lambda a, s: s / a,
    "times the weights' scale": lambda a, s: s + 0 * a,
    "divided by the weights' scale": lambda a, s: 1 / s + 0 * a,
    "divided by the activations' scale": lambda a, s: 1 / a,
    "times the activations' scale": lambda a, s: a + 0 * s,
    "divided by both scales": lambda a, s: 1 / (a * s),
}


def fit_bias(added: Array, bias: Array, a: Array | None, s: Array) -> str | None:
    """The name of what was added (B, T, N) to the outputs. a, s: the scales, (B, T, 1) and (1, 1)"""
    biases = BIASES if a is None or s.shape != (1, 1) else BIASES | SCALED_BIASES
    a = np.ones((*added.shape[:2], 1)) if a is None else a.astype(np.float64)
    scale = np.abs(added).max() + np.abs(bias).max() * 1e-3
    for name, factor in biases.items():
        expected = bias.astype(np.float64) * factor(a, s.astype(np.float64))
        if np.abs(added - expected).max() <= 2e-3 * scale:
            return name
    return None
