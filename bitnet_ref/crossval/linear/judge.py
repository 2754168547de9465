"""Finds what a layer does in each line of a BitLinear, from its answers to `all_calls`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ...reference.layers import Array
from .fit import STEP, effective_weights, fit_activations, fit_bias, fit_floor, fit_weights, read_calls
from .gradients import RIGHT, input_gradients, name_gradient, weight_gradients
from .probes import LEVELS, Answers, Call, K, matrices
from .rules import (
    NORMS,
    OUTPUTS,
    ROUNDED_AS,
    ROUNDINGS,
    SMALL,
    Rules,
    activations,
    output,
    quantize_w,
    quantize_x,
    scale_of,
    weights,
)
from .verdict import (
    ABSENT,
    CHOICE,
    RIGHT_STATUS,
    UNKNOWN,
    WRONG,
    LinearVerdict,
    LineVerdict,
    compared,
    equal_outputs,
    place_of,
)

_CONSTANTS: dict[float, str] = {
    1 / K: "1 / in_features: a norm by dim^-0.5 where dim^0.5 belongs", K: "in_features",
    K**0.5: "the root of in_features", K**-0.5: "1 / the root of in_features",
    128 / 127: "128 / 127", 127 / 128: "127 / 128", 127.0: "127", 1 / 127: "1 / 127", 128.0: "128", 1 / 128: "1 / 128",
}  # fmt: skip


def judge(target: str, versions: str, calls: Sequence[Call], answers: Answers) -> LinearVerdict:
    """The verdict on what the layer gave for `all_calls`."""
    by_name = {call.name: call for call in calls}
    if (failed := answers.text("tokens")) is not None:
        return LinearVerdict(target, versions, (), failed)
    return LinearVerdict(target, versions, tuple(_Judge(by_name, answers).lines()))


class _Judge:
    def __init__(self, calls: Mapping[str, Call], answers: Answers) -> None:
        self.calls, self.answers = calls, answers
        self.seen = read_calls(calls, answers)
        first, again = answers.get("tokens"), answers.get("tokens again")
        self.random = again is not None and first is not None and not np.array_equal(first, again, equal_nan=True)

    def lines(self) -> list[LineVerdict]:
        if "tokens" not in self.seen:
            return [LineVerdict("activation scale", WRONG, "the outputs of usual tokens hold NaN or Inf")]
        fitted = fit_activations(self.calls, self.seen, self.random)
        if fitted is None:
            text = "no rule that was tried gives what the layer makes of its inputs"
            return [LineVerdict("activation scale", UNKNOWN, text), *self._modes()]
        rules, self.factor = fitted
        shows_floor = rules.norm == "none" and rules.x_out == "divided by" and not self.random
        floored = fit_floor(self.calls, self.seen, rules, self.factor) if shows_floor else rules
        self.rules = rules if floored is None else floored
        lines = [self._norm(), self._activation_scale(floored is None), self._activation_rounding()]
        multiplied = activations(self.calls["weights normal"].x, self.rules)
        drawn: dict[str, Array] = {}
        self.effective = {}  # by the name of a drawn matrix: what the layer multiplies by in its place
        for name, w in matrices().items():
            y = self.answers.get(f"weights {name}")
            if y is not None and np.isfinite(y).all():
                drawn[name], self.effective[name] = w, effective_weights(y, multiplied)
        fit = fit_weights(self.effective, drawn, self.rules) if drawn else None
        if fit is None:
            text = "no rule that was tried gives what the layer makes of its weights"
            return [*lines, LineVerdict("weight scale", UNKNOWN, text), *self._modes()]
        self.rules = fit
        lines += [self._weight_scale(), self._weight_rounding(), self._rescaling(), self._bias()]
        lines += [*self._gradients(), *self._modes(), self._held_out()]
        return lines

    # -- activations

    def _value(self, alternative: Rules, name: str, norm: str | None = None) -> tuple[str, float, float]:
        """The value of a call that differs most from other rules: what it is behind a norm, expected, found.

        norm: None for the layer's own.
        """
        x = self.calls[name].x
        simulated = activations(x, alternative).astype(np.float64)
        found = self.seen[name] / self.factor
        at = place_of(np.abs(found - simulated))
        value = NORMS[norm or self.rules.norm](x)[at]
        return f"x{list(at)} = {value:.6g}", float(simulated[at]), float(found[at])

    def _norm(self) -> LineVerdict:
        norm = self.rules.norm
        status = RIGHT_STATUS if norm == "none" else CHOICE
        text = "none" if norm == "none" else f"{norm}, as in the layer of the first papers; not in 2B-4T's"
        value, expected, found = self._value(replace(self.rules, norm="none"), "tokens", "none")
        words = " becomes" if norm == "none" else ", without a norm"
        return LineVerdict("norm inside", status, text, f"{value}{words}", expected, found)

    def _activation_scale(self, unknown_floor: bool) -> LineVerdict:
        rules, line = self.rules, "activation scale"
        right = replace(rules, over="token", levels=127, floor=1e-5, added=0.0, x_clip=(-128, 127))
        name = "tokens"
        if rules.levels is None:
            return LineVerdict(line, WRONG, "none: the activations are not quantised", *self._value(right, name))
        wrong = []
        if rules.over != "token":
            wrong.append(f"one scale for each {rules.over}, where each token has its own")
        if rules.levels != 127:
            wrong.append(f"{rules.levels:g} / max|x|, where 127 / max|x| belongs")
        if rules.added and rules.added > 1e-6:
            wrong.append(f"{rules.added:g} is added to max|x|, where max|x| is at least 1e-5")
        if unknown_floor:
            wrong.append("tokens with max|x| below 1e-5 are scaled by no rule that was tried")
        zeros = self.answers.get("zeros")
        if zeros is not None and not np.isfinite(zeros).all():
            wrong.append("a token of zeros gives NaN: max|x| has no floor")
        elif zeros is not None and zeros.any() and rules.norm == "none":
            wrong.append("a token of zeros does not give zeros")
        if (huge := self.answers.get("huge")) is not None and not np.isfinite(huge).all() and rules.norm == "none":
            wrong.append("a token of 1e12 gives NaN or Inf")
        text = f"{rules.levels:g} / max|x| of each {rules.over}"
        choice = ""
        if rules.norm == "none" and not unknown_floor and (rules.added or rules.floor != 1e-5):
            bottom = f"{rules.added:g} is added to max|x|" if rules.added else f"max|x| is at least {rules.floor:g}"
            choice = f"; {bottom}, in the reference it is at least 1e-5"
            if rules.floor > 1e-5:
                wrong.append(f"{bottom}, where 1e-5 belongs")
            name = "tiny 3e-06" if "tiny 3e-06" in self.seen and rules.over == "token" and rules.levels == 127 else name
        elif rules.norm == "none" and not unknown_floor:
            text += ", max|x| at least 1e-5"
        status = WRONG if wrong else CHOICE if choice else RIGHT_STATUS
        text = "; ".join(wrong) if wrong else text + choice
        return LineVerdict(line, status, text, *self._value(right, name))

    def _activation_rounding(self) -> LineVerdict:
        rules, line = self.rules, "activation rounding"
        if self.random:
            first, again = self.seen["tokens"], self.seen.get("tokens again", self.seen["tokens"])
            at = place_of(np.abs(first - again))
            where = f"x{list(at)}, two equal calls"
            text = "two equal calls give other values: stochastic rounding, or dropout"
            return LineVerdict(line, WRONG, text, where, float(again[at] / self.factor), float(first[at] / self.factor))
        if rules.levels is None:
            return LineVerdict(line, WRONG, "not at all")
        shown = [name for level in LEVELS if level == rules.levels and (name := f"ties {level:g}") in self.seen]
        name = shown[0] if shown else "tokens"
        x = self.calls[name].x
        n = NORMS[rules.norm](x)
        right_q, a = quantize_x(n, replace(rules, x_round="half to even", x_clip=(-128, 127)))
        is_seen = rules.x_out == "divided by"
        q = self.seen[name] / self.factor * a if is_seen else quantize_x(n, rules)[0]
        u = (n * a).astype(np.float64)
        gap = np.abs(q - right_q) * (rules.x_round != "nearest")
        if gap.max() < STEP:
            gap = (np.abs(np.abs(u) % 1 - 0.5) < 1e-6).astype(float)  # a tie, to show
        at = place_of(gap)
        text, wrong = ROUNDED_AS[rules.x_round], rules.x_round not in ("half to even", "nearest")
        if rules.levels in (128, 127.5):
            clip = rules.x_clip
            text += ", not cut to int8: 128 is kept" if clip is None else f", cut to {clip[0]}..{clip[1]}"
            wrong |= clip is None or clip[1] == 128
        status = WRONG if wrong else RIGHT_STATUS
        where = f"x a{list(at)} = {u[at]:.6g}"
        return LineVerdict(line, status, text, where, float(right_q[at]), round(float(q[at]), 3))

    # -- weights

    def _matrix(self, alternative: Rules, name: str) -> tuple[str, float, float]:
        w = matrices()[name]
        expected, effective = weights(w, alternative).astype(np.float64), self.effective[name]
        at = place_of(np.abs(effective - expected))
        return f"W{list(at)} = {w[at]:.6g}, mean|W| = {np.abs(w).mean():.6g}", float(expected[at]), float(effective[at])

    def _weight_scale(self) -> LineVerdict:
        rules, line = self.rules, "weight scale"
        if rules.w_round == "none":
            text = "none: the weights are not quantised"
            return LineVerdict(line, WRONG, text, *self._matrix(Rules(), "normal"))
        at = self._matrix(replace(rules, w_scale="mean|W|"), "heavy")
        if rules.w_round.startswith("sign"):
            text = "nothing is divided by it: the signs alone are taken"
            return LineVerdict(line, ABSENT, text)
        if rules.w_scale == "1":
            return LineVerdict(line, WRONG, "1: W is rounded as it is, where W / mean|W| is", *at)
        wrong = "" if rules.w_scale == "mean|W|" else f"{rules.w_scale}, where mean|W| of the whole matrix belongs"
        zero = self.answers.get("weights zero")
        if zero is not None and not np.isfinite(zero).all():
            wrong = f"{wrong}{'; ' * bool(wrong)}a matrix of zeros gives NaN: the scale has no floor"
        if wrong:
            return LineVerdict(line, WRONG, wrong, *at)
        faint = self.answers.get("weights faint")
        if faint is None or not np.any(faint):
            return LineVerdict(line, RIGHT_STATUS, "mean|W| of the whole matrix, at least 1e-5", *at)
        text = "mean|W| of the whole matrix; its floor is below the reference's 1e-5"
        return LineVerdict(line, CHOICE, text, *at)

    def _weight_rounding(self) -> LineVerdict:
        rules, line = self.rules, "weight rounding"
        if rules.w_round == "none":
            return LineVerdict(line, WRONG, "not at all", *self._matrix(Rules(), "normal"))
        is_rounded = rules.w_round in ROUNDINGS
        name = "ties" if "ties" in self.effective and is_rounded and rules.w_clip else "normal"
        w = matrices()[name]
        right, s = replace(rules, w_round="half to even", w_clip=True), scale_of(w, rules)
        t = quantize_w(w, rules, s)
        out = OUTPUTS[rules.out](s.astype(np.float64), w, t) * rules.constant
        found, expected = self.effective[name] / out, quantize_w(w, right, s)
        gap = np.abs(found - expected)
        if gap.max() < STEP:
            gap = (np.abs(np.abs(w / s) - 0.5) < 1e-6).astype(float)
        at = place_of(gap)
        text, wrong = ROUNDED_AS[rules.w_round], rules.w_round != "half to even" or not rules.w_clip
        if rules.w_round == "threshold":
            text = f"zero where |w| <= {rules.threshold:.3g} scales, where the rounding's threshold is 0.5"
        if is_rounded:
            text += ", cut to -1..1" if rules.w_clip else "; not cut to -1..1"
        where = f"W / scale{list(at)} = {float((w / s)[at]):.6g}"
        status = WRONG if wrong else RIGHT_STATUS
        return LineVerdict(line, status, text, where, float(expected[at]), round(float(found[at]), 3))

    def _rescaling(self) -> LineVerdict:
        rules, line = self.rules, "rescaling"
        right = replace(rules, x_out="divided by", out="the weights' scale", constant=1.0)
        call = self.calls["without bias"]
        y = self.answers.get("without bias")
        expected = output(call.x, call.w, right)
        if y is None:
            return LineVerdict(line, UNKNOWN, "the layer failed on drawn weights")
        wrong = []
        if rules.x_out != "divided by":
            wrong.append(f"the sums are {rules.x_out} the activations' scale, where they are divided by it")
        if rules.out != "the weights' scale" and rules.w_round != "none":
            own = rules.out == "mean|W|" and rules.w_round.startswith("sign")
            wrong += [] if own else [f"the sums are multiplied by {rules.out}, where they are by the weights' scale"]
        if rules.constant != 1.0:
            known = (f": {words}" for value, words in _CONSTANTS.items() if abs(rules.constant / value - 1) < 1e-3)
            wrong.append(f"the output is {rules.constant:.6g} times the right one{next(known, '')}")
        text = "; ".join(wrong) or "the sums times weight scale / activation scale"
        return compared(line, WRONG if wrong else RIGHT_STATUS, text, "y", expected, y)

    def _bias(self) -> LineVerdict:
        line, call = "bias", self.calls["with bias"]
        if self.random:
            return LineVerdict(line, ABSENT, "not judged: equal calls give other values")
        if (failed := self.answers.text("with bias")) is not None:
            return LineVerdict(line, ABSENT, f"cannot be built with one: {failed}"[:200])
        if self.answers.text("with bias", "no_bias") is not None:
            return LineVerdict(line, ABSENT, "the layer has none")
        with_bias, without = self.answers.get("with bias"), self.answers.get("without bias")
        if with_bias is None or without is None or call.bias is None:
            return LineVerdict(line, UNKNOWN, "the layer failed with a bias")
        added = with_bias - without
        n = NORMS[self.rules.norm](call.x)
        a = None  # the activations' scale of each token
        if self.rules.over != "column":
            a = np.broadcast_to(quantize_x(n, self.rules)[1], (*call.x.shape[:2], 1))
        s = scale_of(call.w, self.rules)
        name = fit_bias(added, call.bias, a, s)
        status = UNKNOWN if name is None else RIGHT_STATUS if name == "added as it is" else WRONG
        text = name or "what is added is not explained by the bias and the scales"
        return compared(line, status, text, "what is added to y", np.broadcast_to(call.bias, added.shape), added)

    # -- gradients

    def _gradients(self) -> list[LineVerdict]:
        call = self.calls["gradients"]
        assert call.dy is not None
        if (text := self.answers.text("gradients", "no_backward") or self.answers.text("gradients")) is not None:
            return [LineVerdict(line, WRONG, f"the backward pass fails: {text}"[:200]) for line in ("dX", "dW")]
        if self.random:
            return [LineVerdict(line, ABSENT, "not judged: equal calls give other values") for line in ("dX", "dW")]
        lines = []
        ways = {"dX": input_gradients, "dW": weight_gradients}
        for line, each in ways.items():
            given = self.answers.get("gradients", line.lower())
            if given is None and line == "dX" and self.answers.get("gradients", "dw") is not None:
                lines.append(LineVerdict(line, WRONG, "none: the weights get a gradient, and the inputs none"))
                continue
            if given is None:
                lines.append(LineVerdict(line, ABSENT, "none: the layer has no backward pass, or no weight to train"))
                continue
            name, right = name_gradient(given, each(call.x, call.w, call.dy, self.rules))
            is_right = name is not None and name.startswith(RIGHT)
            status = RIGHT_STATUS if is_right else UNKNOWN if name is None else WRONG
            text = name or "equals none of the gradients that were tried"
            lines.append(compared(line, status, text, line, right, given))
        given = self.answers.get("bias gradient", "db")
        if given is not None:
            right = call.dy.astype(np.float64).sum(axis=(0, 1))
            near = np.linalg.norm(given - right) <= 1e-4 * np.linalg.norm(right)
            text = "the sum of dY over the tokens" if near else "is not the sum of dY over the tokens"
            lines.append(compared("dbias", RIGHT_STATUS if near else WRONG, text, "dbias", right, given))
        return lines

    # -- modes and dtypes

    def _modes(self) -> list[LineVerdict]:
        lines = []
        train, in_eval = self.answers.get("without bias"), self.answers.get("in eval")
        if train is not None:
            failed = self.answers.text("in eval")
            if in_eval is None:
                lines.append(LineVerdict("train and eval", WRONG, f"eval() fails: {failed}"[:200]))
            else:
                lines.append(equal_outputs("train and eval", "eval() and train()", train, in_eval, self.random))
        lines += self._stored(train)
        lines += self._narrow(train)
        return lines

    def _stored(self, train: Array | None) -> list[LineVerdict]:
        """The output after the weights were stored, once and twice."""
        if train is None or self.random:
            return []
        line, wrong, names = "stored weights", list[LineVerdict](), []
        for way, y in self.answers.by_call.get("storage", {}).items():
            if y.dtype.kind != "U":
                names.append(way)
                for count, each in zip(("once", "twice"), y.astype(np.float64), strict=True):
                    wrong.append(equal_outputs(line, f"{way}, {count}", train, each, False))
            elif "eval()" in way:  # another method may need more than the layer
                wrong.append(LineVerdict(line, WRONG, f"{way} fails: {y}"[:200]))
        if wrong := [each for each in wrong if each.status == WRONG]:
            return wrong[:1]
        return [LineVerdict(line, RIGHT_STATUS, f"{', '.join(names)} change nothing")] if names else []

    def _narrow(self, train: Array | None) -> list[LineVerdict]:
        """What 16 bits cost: no verdict but NaN and failure."""
        texts, status = [], RIGHT_STATUS
        for dtype in ("bfloat16", "float16"):
            y, failed = self.answers.get(dtype), self.answers.text(dtype)
            if y is None or train is None:
                texts.append(f"{dtype}: fails, {failed}"[:120])
                status = CHOICE
            elif not np.isfinite(y).all():
                texts.append(f"{dtype}: NaN or Inf")
                status = WRONG
            else:
                error = np.linalg.norm(y - train) / max(float(np.linalg.norm(train)), SMALL)
                texts.append(f"{dtype}: {error:.1e} from float32")
        return [LineVerdict("16 bits", status, "; ".join(texts))]

    def _held_out(self) -> LineVerdict:
        call, y = self.calls["held out"], self.answers.get("held out")
        line = "together"
        if y is None:
            return LineVerdict(line, UNKNOWN, "the layer failed on other weights")
        expected = output(call.x, call.w, self.rules)
        errors = np.linalg.norm(y - expected, axis=-1) / np.maximum(np.linalg.norm(expected, axis=-1), SMALL)
        # float32 noise may round an activation of a token the other way, which moves all of its outputs
        near = np.median(errors) <= (0.1 if self.random else 1e-3) and errors.max() <= (0.5 if self.random else 0.05)
        text = "the lines above give the outputs for other weights and tokens"
        if not near:
            text = "the lines above do not give the outputs for other weights and tokens"
        return compared(line, RIGHT_STATUS if near else UNKNOWN, text, "y", expected, y)
