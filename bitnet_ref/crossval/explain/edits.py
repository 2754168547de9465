"""Small edits of one step of a run: what an engine may have computed instead of it. Each has a cost; simple ones cost less.

Two kinds of edits apply to every step. One changes an input or the result: it is moved, scaled, rounded, left out or
replaced by another tensor of the run. The other replaces the step's formula, by a row of the tables below. A `Family` is an
edit with an unknown constant, for which `describe` solves. `describe` tries the edits and reports those that give the
engine's tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ...reference import layers
from ...reference.weights import DenseWeight, EmbeddingWeight, GroupTernaryLinear, LinearWeight, TernaryLinear
from .variants import Edit, Step

# In the tables below a row is a line.
# fmt: off
Change = Callable[[NDArray], NDArray]
erf = np.vectorize(math.erf, otypes=[np.float64])


@dataclass(frozen=True)
class Description:
    """One edit in words. text: a clause in which "{it}" stands for the step's tensor.   cost: lower for simpler edits."""

    cost: float
    text: str
    edit: Edit


@dataclass(frozen=True)
class Family:
    """An edit with one unknown constant c. edit(c): the step's edit.   right: the c with which it changes nothing.

    text: "{c}" stands for the constant.   log: c is positive and varied by factors, not by differences.
    starts: values of c to begin the search from, besides `right`.
    """

    cost: float
    text: str
    edit: Callable[[float], Edit]
    right: float
    log: bool = False
    starts: tuple[float, ...] = ()

    @property
    def nudged(self) -> Edit:
        """The edit with a constant slightly different from `right`."""
        return self.edit(self.right * 1.01 if self.log or self.right else 0.01)


def wide(x: NDArray) -> NDArray[np.float64]:
    return x.astype(np.float64)


def like(x: Any, right: NDArray) -> NDArray:
    """x in the dtype of the right tensor, or in float32 if x has fractions and the right tensor has integers."""
    x = np.asarray(x)
    if right.dtype.kind == "i" and x.dtype.kind == "f" and not (x == np.rint(x)).all():
        return x.astype(np.float32)
    return x.astype(right.dtype)


def instead(function: Callable[..., Any]) -> Edit:
    """function(*inputs) in place of the step's own formula."""

    def edit(step: Step, compute: Edit, *inputs: Any) -> NDArray:
        right = compute(*inputs)
        return like(np.broadcast_to(np.asarray(function(*inputs)), right.shape), right)

    return edit


def heads_apart(x: NDArray, step: Step) -> NDArray:
    """The rows of a norm over heads, (N*H, C), as (N, H, C); any other array as it is."""
    n = len(step.setting.tokens)
    return x.reshape(n, -1, x.shape[1]) if x.ndim == 2 and len(x) > n and len(x) % n == 0 else x


def after(change: Change) -> Edit:
    """The step's result, changed."""

    def edit(step: Step, compute: Edit, *inputs: Any) -> NDArray:
        right = compute(*inputs)
        return like(np.asarray(change(heads_apart(right, step))).reshape(right.shape), right)

    return edit


def before(index: int, change: Callable[[Any], Any]) -> Edit:
    """The step with one of its inputs changed."""

    def edit(step: Step, compute: Edit, *inputs: Any) -> NDArray:
        x = inputs[index]
        if isinstance(x, np.ndarray):
            apart = heads_apart(x, step)
            changed = change(apart)
            changed = changed if apart is x else changed.reshape(x.shape)
        else:
            changed = change(x)
        return compute(*inputs[:index], changed, *inputs[index + 1 :])

    return edit


def moved(name: str, origin: str, step: Step) -> str:
    """The name of a tensor or weight that lies as far from `step` as `name` does from the step `origin`, in layers."""
    parts, here = name.split("."), step.name.split(".")
    if parts[0] != "blocks" or here[0] != "blocks" or not origin.startswith("blocks."):
        return name
    layer = int(parts[1]) - int(origin.split(".")[1]) + int(here[1])
    return ".".join(["blocks", str(layer % step.setting.config.num_hidden_layers), *parts[2:]])


def from_run(index: int | None, name: str, origin: str) -> Edit:
    """The step with another tensor of the run as one of its inputs, or (None) as its result."""

    def edit(step: Step, compute: Edit, *inputs: Any) -> NDArray:
        right = compute(*inputs) if index is None else inputs[index]
        other = step.seen[moved(name, origin, step)].reshape(right.shape).astype(right.dtype)
        return other if index is None else compute(*inputs[:index], other, *inputs[index + 1 :])

    return edit


# -- what can be done with any tensor ----------------------------------------------------------------------------------


@cache
def orders(n: int) -> tuple[tuple[str, NDArray[np.int64]], ...]:
    """Other orders of n things, in words."""
    i = np.arange(n)
    named = [("in reverse", i[::-1]), ("one too far", i - 1), ("one too early", (i + 1) % n)]
    if n % 2 == 0 and n > 2:
        named.append(("with neighbours exchanged", i ^ 1))
        named.append(("with its halves exchanged", (i + n // 2) % n))
    for a in [a for a in range(2, n // 2 + 1) if n % a == 0 and (a <= 8 or n // a <= 8 or a in (16, 32, 64, 128))]:
        named.append((f"as a ({a}, {n // a}) array that was transposed", i.reshape(a, -1).T.reshape(-1)))
        if a in (2, 4, 8, 16, 32):
            named.append((f"with each {a} in reverse", i.reshape(-1, a)[:, ::-1].reshape(-1)))
    return tuple(named)


def _rounded(dtype: Any) -> Change:
    return lambda x: np.clip(wide(x), -3e38, 3e38).astype(dtype).astype(np.float32)


def _shifted(x: NDArray, by: int, axis: int, fill: bool) -> NDArray:
    moved = np.roll(x, by, axis)
    if fill:
        np.moveaxis(moved, axis, 0)[: by if by > 0 else None][by if by < 0 else 0 :] = 0
    return moved


def changes(x: NDArray, by_head: bool = False) -> Iterator[tuple[float, str, Change]]:
    """(cost, words, change) of a float or integer array: (N, C), (N, heads, d), or by_head (heads, N, keys)."""
    tokens = 1 if by_head else 0
    yield 1, "{x} is all zeros", lambda x: np.zeros_like(x)
    yield 1, "{x} has the other sign", lambda x: -x
    yield 1.5, "{x} is taken without its sign", lambda x: np.abs(x)
    yield 1.5, "negative values of {x} are set to 0", lambda x: np.maximum(x, 0)
    if x.dtype.kind == "f":
        yield 1, "{x} is rounded to bfloat16", _rounded(ml_dtypes.bfloat16)
        yield 1, "{x} is rounded to float16", _rounded(np.float16)
    if x.shape[tokens] > 1 and x.ndim > 1:
        for words, by in (("previous", 1), ("next", -1)):
            yield 1.2, f"each token has {{x}} of the {words} token", partial(np.roll, shift=by, axis=tokens)
            yield (1.3, f"each token has {{x}} of the {words} token, the one at the end has zeros", partial(_shifted, by=by, axis=tokens, fill=True))
        yield 1.2, "every token has {x} of the first", lambda x: np.repeat(x.take([0], tokens), x.shape[tokens], tokens)
        yield 1.2, "every token has {x} of the last", lambda x: np.repeat(x.take([-1], tokens), x.shape[tokens], tokens)
        yield 1.4, "tokens of {x} are in reverse", lambda x: np.flip(x, tokens)
    if x.ndim == 2 and x.shape[1] > 1:
        for words, order in orders(x.shape[1]):
            yield 1.4, f"columns of {{x}} are {words}", partial(np.take, indices=order, axis=1)
        yield 2, "{x} is stored column by column and read row by row", lambda x: np.ascontiguousarray(x.T)
    if x.ndim == 3:
        heads = 0 if by_head else 1
        if x.shape[heads] > 1:
            for words, order in orders(x.shape[heads]):
                yield 1.3, f"heads of {{x}} are {words}", partial(np.take, indices=order, axis=heads)
            yield 1.3, "every head has {x} of the first", lambda x: np.repeat(x.take([0], heads), x.shape[heads], heads)
        if not by_head:
            for words, order in orders(x.shape[2]):
                yield 1.4, f"numbers of each head of {{x}} are {words}", partial(np.take, indices=order, axis=2)
            yield 1.4, "{x} is stored as (head_dim, heads) and read as (heads, head_dim)", lambda x: x.swapaxes(1, 2)
            yield (1.5, "{x} is (heads, head_dim) and read as (head_dim, heads)", lambda x: x.reshape(len(x), x.shape[2], x.shape[1]).swapaxes(1, 2))
            yield (1.6, "{x} is laid out as (heads, tokens, head_dim) and read as (tokens, heads, head_dim)", lambda x: np.ascontiguousarray(x.swapaxes(0, 1)))
        elif x.shape[1] == x.shape[2]:
            yield 1.3, "{x} is transposed", lambda x: x.swapaxes(1, 2)
        if by_head:
            for words, order in orders(x.shape[2])[:3]:
                yield 1.4, f"the keys of {{x}} are {words}", partial(np.take, indices=order, axis=2)


# -- the formula of each step ------------------------------------------------------------------------------------------
# Rows: cost, words, formula.   Families: cost, words, formula with the constant c first, the right constant, more starts.


def _ms(x: NDArray) -> NDArray:
    return np.square(wide(x)).mean(-1, keepdims=True)


PARTS: list[tuple[str, Change]] = [
    ("first half", lambda x: x[:, : x.shape[1] // 2]),
    ("second half", lambda x: x[:, x.shape[1] // 2 :]),
    ("first quarter", lambda x: x[:, : x.shape[1] // 4]),
    ("first three quarters", lambda x: x[:, : 3 * x.shape[1] // 4]),
    ("even columns", lambda x: x[:, ::2]),
    ("odd columns", lambda x: x[:, 1::2]),
    ("columns but the first", lambda x: x[:, 1:]),
    *((f"first {n} columns", lambda x, n=n: x[:, :n]) for n in (16, 32, 64, 128)),
    *((f"columns but the last {n}", lambda x, n=n: x[:, :-n] if n < x.shape[1] else x) for n in (1, 4, 8, 16, 32, 64)),
]
LENGTHS: list[tuple[float, str, Callable[..., Any]]] = [
    (1, "eps is added to the root, not under it", lambda x, eps: np.sqrt(_ms(x)) + eps),
    (1.1, "eps is a floor of the mean of squares, not added", lambda x, eps: np.sqrt(np.maximum(_ms(x), eps))),
    (1, "the mean is subtracted before the squares, as in LayerNorm", lambda x, eps: np.sqrt(x.var(-1, keepdims=True) + eps)),
    (1.1, "the mean of |x| stands for the root of the mean of squares", lambda x, eps: np.abs(wide(x)).mean(-1, keepdims=True) + eps),
    (1.1, "the mean of |x| stands for the root, without eps", lambda x, eps: np.abs(wide(x)).mean(-1, keepdims=True)),
    (1.1, "the largest |x| stands for the root of the mean of squares", lambda x, eps: np.abs(x).max(-1, keepdims=True)),
    (1, "the sum of squares stands for their mean", lambda x, eps: np.sqrt(_ms(x) * x.shape[-1] + eps)),
    (1.1, "the root is not taken", lambda x, eps: _ms(x) + eps),
    (1.2, "the sum of squares is divided by D - 1", lambda x, eps: np.sqrt(_ms(x) * x.shape[-1] / (x.shape[-1] - 1) + eps)),
    (1.2, "the norm does not divide: its length is 1", lambda x, eps: np.ones_like(x[:, :1])),
    (1.3, "squares are rounded to bfloat16", lambda x, eps: np.sqrt(wide(np.square(x).astype(ml_dtypes.bfloat16)).mean(-1, keepdims=True) + eps)),
    (1.3, "x is rounded to float16 before it is squared", lambda x, eps: np.sqrt(_ms(x.astype(np.float16)) + eps)),
    (1.3, "x is rounded to bfloat16 before it is squared", lambda x, eps: np.sqrt(_ms(x.astype(ml_dtypes.bfloat16)) + eps)),
    *((1.4, f"the mean of squares runs over the {words} only", lambda x, eps, part=part: np.sqrt(_ms(part(x)) + eps)) for words, part in PARTS),
]
NORMS: list[tuple[float, str, Callable[..., Any]]] = [
    (1, "the weight of the norm is left out", lambda x, r, w: x / r),
    (1, "the norm multiplies by 1 + weight, as Gemma's", lambda x, r, w: x / r * (1 + w)),
    (1.2, "the norm multiplies by its weight twice", lambda x, r, w: x / r * w * w),
    (1, "the norm is left out", lambda x, r, w: x),
    (1.1, "the norm multiplies by its weight, but does not divide by the length", lambda x, r, w: x * w),
    (1.1, "the norm multiplies by the length instead of dividing", lambda x, r, w: x * r * w),
    (1.2, "the norm divides by the length twice", lambda x, r, w: x / r / r * w),
    (1.1, "the mean is subtracted, as in LayerNorm", lambda x, r, w: (x - x.mean(-1, keepdims=True)) / np.sqrt(wide(x).var(-1, keepdims=True) + 1e-6) * w),
    (1.3, "the weight of the norm is in reverse", lambda x, r, w: x / r * w[::-1]),
    (1.3, "the weight of the norm is one too far", lambda x, r, w: x / r * np.roll(w, 1)),
    (1.3, "the weight of the norm is one too early", lambda x, r, w: x / r * np.roll(w, -1)),
    (1.3, "the weight of the norm is rounded to bfloat16", lambda x, r, w: x / r * w.astype(ml_dtypes.bfloat16).astype(np.float32)),
    (1.3, "the weight of the norm is rounded to float16", lambda x, r, w: x / r * w.astype(np.float16).astype(np.float32)),
    (1.3, "the input is added to the norm's result", lambda x, r, w: x / r * w + x),
    (1.4, "the norm is applied twice", lambda x, r, w: layers.rms_norm(x / r * w, w, 1e-6)),
]


def _absmax(x: NDArray) -> NDArray:
    return np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(1e-5))


def _bits(n: int) -> Callable[..., Any]:
    """x * scale with n bits: steps of 2^(8-n)."""
    step = 2 ** (8 - n)
    return lambda x, s: np.clip(np.rint(x * s / step) * step, -128, 127)


ACTIVATION_SCALES: list[tuple[float, str, Callable[..., Any]]] = [
    (1, "one activation scale for all tokens", lambda x: np.full((len(x), 1), 127 / _absmax(x).max())),
    (1.1, "the activation scale takes max x, not max |x|", lambda x: 127 / np.maximum(x.max(-1, keepdims=True), 1e-5)),
    (1.1, "the activation scale is max|x| / 127, the inverse", lambda x: _absmax(x) / 127),
    (1.1, "the activation scale takes the mean of |x|, not the largest", lambda x: 127 / np.abs(x).mean(-1, keepdims=True)),
    (1.2, "the activation scale takes the root of the mean of squares, not the largest", lambda x: 127 / np.sqrt(_ms(x))),
    (1.2, "1e-5 is added to max|x|", lambda x: 127 / (np.abs(x).max(-1, keepdims=True) + 1e-5)),
    (1.3, "the activation scale is rounded to bfloat16", lambda x: (127 / _absmax(x)).astype(ml_dtypes.bfloat16)),
    (1.3, "the activation scale is rounded to float16", lambda x: np.minimum(127 / _absmax(x), 65504).astype(np.float16)),
    (1.2, "each token has the activation scale of the token before it", lambda x: 127 / np.roll(_absmax(x), 1, 0)),
    *((1.3, f"the activation scale takes the largest of the {words} only", lambda x, part=part: 127 / _absmax(part(x))) for words, part in PARTS),
]
INT8_RULES: list[tuple[float, str, Callable[..., Any]]] = [
    (1, "ties are rounded away from zero, not to even", lambda x, s: np.clip(np.copysign(np.floor(np.abs(x * s) + 0.5), x), -128, 127)),
    (1, "activations are rounded by floor(x + 0.5)", lambda x, s: np.clip(np.floor(x * s + np.float32(0.5)), -128, 127)),
    (1, "activations are truncated towards zero, not rounded", lambda x, s: np.clip(np.trunc(x * s), -128, 127)),
    (1, "activations are rounded down", lambda x, s: np.clip(np.floor(x * s), -128, 127)),
    (1, "activations are rounded up", lambda x, s: np.clip(np.ceil(x * s), -128, 127)),
    (
        1.2,
        "x * scale is rounded to bfloat16 before it is rounded to int8",
        lambda x, s: np.clip(np.rint((x * s).astype(ml_dtypes.bfloat16).astype(np.float32)), -128, 127),
    ),
    (1.2, "x * scale is rounded to float16 before it is rounded to int8", lambda x, s: np.clip(np.rint((x * s).astype(np.float16).astype(np.float32)), -128, 127)),
    (1.2, "values beyond int8 wrap round instead of being clipped", lambda x, s: np.rint(x * s).astype(np.int64).astype(np.int8)),
    *((1.2, f"activations have {n} bits, not 8: they are multiples of {2 ** (8 - n)}", _bits(n)) for n in (7, 6, 5, 4, 3, 2)),
    *(
        (
            1.1,
            f"activations have {n} bits, clipped to {-(2 ** (n - 1))} and {2 ** (n - 1) - 1}",
            lambda x, s, n=n: np.clip(np.rint(x * s), -(2 ** (n - 1)), 2 ** (n - 1) - 1),
        )
        for n in (7, 6, 5, 4)
    ),
    (1.3, "activations are unsigned: 128 is added", lambda x, s: (np.clip(np.rint(x * s), -128, 127) + 128).astype(np.uint8).astype(np.int8)),
    *((1.1, f"activations are clipped to {-n} and {n}", lambda x, s, n=n: np.clip(np.rint(x * s), -n, n)) for n in (126, 125, 124, 120, 112, 100, 96, 80, 64)),
    (1.4, "negative activations are clipped to 0", lambda x, s: np.clip(np.rint(x * s), 0, 127)),
]


def _act(function: Callable[[NDArray], NDArray]) -> Callable[..., Any]:
    return lambda gate, up, name: function(wide(gate)) * wide(up)


def _sig(x: NDArray) -> NDArray:
    return 1 / (1 + np.exp(-np.clip(x, -700, 700)))


ACTIVATIONS: dict[str, Callable[[NDArray], NDArray]] = {
    "relu squared": lambda x: np.square(np.maximum(x, 0)),
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x * _sig(x),
    "gelu (tanh)": lambda x: 0.5 * x * (1 + np.tanh(layers.GELU_SLOPE * (x + 0.044715 * x**3))),
    "gelu (erf)": lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))),
    "quick gelu, x sigmoid(1.702 x)": lambda x: x * _sig(1.702 * x),
    "sigmoid": _sig,
    "tanh": np.tanh,
    "no activation": lambda x: x,
    "the square without relu": np.square,
    "x |x|": lambda x: x * np.abs(x),
    "the absolute value": np.abs,
    "softplus": lambda x: np.logaddexp(0, x),
    "mish": lambda x: x * np.tanh(np.logaddexp(0, x)),
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "hard swish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "hard sigmoid": lambda x: np.clip(x + 3, 0, 6) / 6,
    "relu6": lambda x: np.clip(x, 0, 6),
    "leaky relu, slope 0.01": lambda x: np.where(x > 0, x, 0.01 * x),
    "the constant 1": np.ones_like,
}
RIGHT_ACTIVATIONS = {"relu2": "relu squared", "silu": "silu", "gelu_tanh": "gelu (tanh)"}


def _gates(activation: str) -> Iterator[tuple[float, str, Callable[..., Any]]]:
    right = RIGHT_ACTIVATIONS[activation]
    act = ACTIVATIONS[right]
    for name, other in ACTIVATIONS.items():
        if name != right:
            yield 1, f"the activation is {name} where {right} belongs", _act(other)
    yield 1, "gate and up are exchanged: the activation is on up", lambda gate, up, name: wide(gate) * act(wide(up))
    yield 1, "the activation is on gate * up", lambda gate, up, name: act(wide(gate) * wide(up))
    yield 1, "up is left out", lambda gate, up, name: act(wide(gate))
    yield 1.1, "gate is left out", lambda gate, up, name: wide(up)
    yield 1.1, "the activation is squared once more", lambda gate, up, name: np.square(act(wide(gate))) * wide(up)
    yield 1.1, "the activation is on gate and on up", lambda gate, up, name: act(wide(gate)) * act(wide(up))
    yield 1, "gate and up are added, not multiplied", lambda gate, up, name: act(wide(gate)) + wide(up)
    yield 1.1, "up is taken plus 1", lambda gate, up, name: act(wide(gate)) * (wide(up) + 1)
    yield (1.3, "the activation is rounded to bfloat16", lambda gate, up, name: wide(act(wide(gate)).astype(ml_dtypes.bfloat16)) * up)
    yield (1.3, "the activation is rounded to float16", lambda gate, up, name: wide(act(wide(gate)).astype(np.float16)) * up)


def _softmax(s: NDArray, extra: float = 0.0, base: float = math.e, axis: int = -1) -> NDArray:
    """exp(s - max) / (sum + extra * exp(-max))."""
    top = np.maximum(np.where(np.isfinite(s), s, -np.inf).max(axis, keepdims=True), -1e30)
    e = np.power(base, wide(s) - top)
    return e / (e.sum(axis, keepdims=True) + extra * np.power(base, -top))


def _softmax_without(s: NDArray, drop: NDArray) -> NDArray:
    """Softmax over what is left after `drop`, zeros where nothing is."""
    return np.nan_to_num(_softmax(np.where(drop, -np.inf, s)))


def _ij(s: NDArray) -> tuple[NDArray, NDArray]:
    return np.arange(s.shape[1])[:, None], np.arange(s.shape[2])[None, :]


def _e(s: NDArray) -> NDArray:
    return np.exp(wide(s) - s.max(-1, keepdims=True))


PATTERNS: list[tuple[float, str, Callable[..., Any]]] = [
    (1, "the softmax is not divided by its sum", _e),
    (1, "the softmax is of exp(s) without its sum", lambda s: np.exp(np.minimum(wide(s), 80))),
    (1, "the softmax's sum has 1 too much: exp(s) / (1 + sum), an attention sink", lambda s: _softmax(s, extra=1)),
    (1.1, "the softmax's sum has exp(max) too much: 1 / (1 + sum) after the maximum is subtracted", lambda s: _e(s) / (_e(s).sum(-1, keepdims=True) + 1)),
    (1.1, "the softmax's sum lacks the token itself", lambda s: _e(s) / np.maximum((_e(s) * ((_ij(s)[0] != _ij(s)[1]) | (_ij(s)[0] == 0))).sum(-1, keepdims=True), 1e-30)),
    (1.1, "the softmax's sum lacks the first token", lambda s: _e(s) / np.maximum((_e(s) * (_ij(s)[1] > 0)).sum(-1, keepdims=True), 1e-30)),
    (1, "the softmax takes 2^s, not e^s", lambda s: _softmax(s, base=2)),
    (1, "the softmax runs over the wrong axis: over the tokens that look, not over those seen", lambda s: np.nan_to_num(_softmax(s, axis=1)) * (s > -np.inf)),
    (1.2, "the softmax runs over the heads", lambda s: np.nan_to_num(_softmax(s, axis=0)) * (s > -np.inf)),
    (1.1, "a sigmoid stands for the softmax", lambda s: _sig(wide(s)) * (s > -np.inf)),
    (1.1, "the average of all tokens seen stands for the softmax", lambda s: (s > -np.inf) / (s > -np.inf).sum(-1, keepdims=True)),
    (1.1, "the softmax's largest value takes all", lambda s: (s == s.max(-1, keepdims=True)) * 1.0),
    (1.1, "the token itself has no weight", lambda s: _softmax_without(s, (_ij(s)[0] == _ij(s)[1]) & (_ij(s)[0] > 0))),
    (1.1, "the first token has no weight", lambda s: _softmax_without(s, (_ij(s)[1] == 0) & (_ij(s)[0] > 0))),
    (1.3, "exp(s) is rounded to bfloat16", lambda s: (lambda e: e / e.sum(-1, keepdims=True))(wide(_e(s).astype(ml_dtypes.bfloat16)))),
    (1.3, "exp(s) is rounded to float16", lambda s: (lambda e: e / e.sum(-1, keepdims=True))(wide(_e(s).astype(np.float16)))),
    *((1.3, f"only the {n} largest scores count", lambda s, n=n: _softmax_without(s, s < np.sort(s, -1)[..., -min(n, s.shape[-1])][..., None])) for n in (1, 2, 3, 4, 8)),
]


def _sees(s: Step, keep: Callable[[NDArray, NDArray], NDArray]) -> Edit:
    """Scores of the pairs (i, j) for which keep(i, j)."""

    def edit(step: Step, compute: Edit, q: NDArray, keys: NDArray, window: int | None) -> NDArray:
        free = _unmasked(step, q, keys)
        return np.where(keep(*_ij(free)), free, -np.inf).astype(q.dtype)

    return edit


def _unmasked(step: Step, q: NDArray, keys: NDArray) -> NDArray:
    heads = list(step.setting.attention.kv_heads or np.arange(q.shape[1]) // (q.shape[1] // keys.shape[1]))
    return np.einsum("ihd,jhd->hij", wide(q), wide(keys)[:, heads]) * q.shape[2] ** -0.5


def _scores(step: Step) -> Iterator[Description]:
    q, _, window = step.inputs
    rules: list[tuple[float, str, Callable[[NDArray, NDArray], NDArray]]] = [
        (1, "there is no causal mask", lambda i, j: (i >= 0) & (j >= 0)),
        (1, "a token sees the one after it: the mask is off by one", lambda i, j: j <= i + 1),
        (1, "a token does not see itself", lambda i, j: (j < i) | (i == 0) & (j == 0)),
        (1, "the first token is not seen", lambda i, j: ((j > 0) | (i == 0)) & (j <= i)),
        (1.2, "the mask is turned round: a token sees itself and those after it", lambda i, j: j >= i),
        *((1.2, f"a token sees {n} tokens only, itself included", lambda i, j, n=n: (j <= i) & (j > i - n)) for n in range(1, len(q)) if n != window),
        *((1.3, f"a token sees {n} tokens after it", lambda i, j, n=n: j <= i + n) for n in range(2, min(len(q), 6))),
        *((1.3, f"the first {n} tokens are seen by all", lambda i, j, n=n: (j <= i) | (j < n)) for n in range(2, len(q))),
        *((1.3, f"the first {n} tokens are not seen by later ones", lambda i, j, n=n: (j <= i) & ((j >= n) | (i < n))) for n in range(2, len(q))),
        *((1.3, f"attention is in blocks of {n} tokens", lambda i, j, n=n: (j <= i) & (j // n == i // n)) for n in (2, 3, 4, 6, 8, 16)),
    ]
    if window is not None:
        rules.append((1, "the sliding window is ignored", lambda i, j: j <= i))
    for cost, text, keep in rules:
        yield Description(cost, text, _sees(step, keep))
    masked = "masked scores are {} instead of minus infinity"
    for value in (0.0, -1.0, -10.0, -100.0, -10000.0):
        yield Description(1.1, masked.format(f"{value:g}"), after(partial(_filled, value=value)))

    yield from _kv_maps("the scores")
    yield Description(1.2, "q and k are exchanged: scores are k q", instead(lambda q, k, w: _exchanged(step, q, k)))


def _exchanged(step: Step, q: NDArray, keys: NDArray) -> NDArray:
    free = _unmasked(step, q, keys).swapaxes(1, 2)
    return np.where(_ij(free)[1] <= _ij(free)[0], free, -np.inf)


def _filled(x: NDArray, value: float) -> NDArray:
    return np.where(np.isneginf(x), x.dtype.type(value), x)


def _one_for_all(index: int, heads: int, groups: int) -> list[int]:
    return [index % groups] * heads


def _kv_maps(noun: str) -> Iterator[Description]:
    """Which kv head each query head reads; the keys or values are the step's second input."""
    maps: dict[str, Callable[[int, int], list[int]]] = {
        "h mod G": lambda h, g: [i % g for i in range(h)],
        "(h // (H/G) + 1) mod G, the next one": lambda h, g: [(i * g // h + 1) % g for i in range(h)],
        "G - 1 - h // (H/G), in reverse": lambda h, g: [g - 1 - i * g // h for i in range(h)],
        "0, the first": lambda h, g: [0] * h,
        "G - 1, the last": lambda h, g: [g - 1] * h,
    }

    def edit(order: Callable[[int, int], list[int]]) -> Edit:
        def mapped(step: Step, compute: Edit, first: NDArray, kv: NDArray, *rest: Any) -> NDArray:
            heads, groups = step.setting.config.num_attention_heads, kv.shape[1]
            wanted = np.array(order(heads, groups))
            axis = 0 if step.name.endswith("hook_attn_scores") else 1
            result = compute(first, kv, *rest).copy()
            for g in range(groups):  # with every kv head replaced by g, the heads that read g are right
                own = np.flatnonzero(wanted == g)
                every = compute(first, np.repeat(kv[:, g : g + 1], groups, axis=1), *rest)
                np.moveaxis(result, axis, 0)[own] = np.moveaxis(every, axis, 0)[own]
            return result

        return mapped

    maps |= {f"{i}, for all heads": partial(_one_for_all, i) for i in range(1, 4)}
    for words, order in maps.items():
        yield Description(1.1, f"query head h reads kv head {words} in {noun}", edit(order))


def _angles(step: Step, shape: int) -> tuple[NDArray, NDArray]:
    """positions (N, 1), frequencies (d/2,)"""
    cfg = step.setting.config
    rope = cfg.rope_of_sliding if cfg.is_sliding(int(step.name.split(".")[1])) else cfg.rope
    return np.arange(len(step.inputs[0]))[:, None].astype(np.float64), layers.rope_frequencies(rope, 2 * shape)


def _turn(x: NDArray, angles: NDArray) -> NDArray:
    return layers.apply_rope(wide(x), np.cos(angles), np.sin(angles))


def _interleaved(x: NDArray, cos: NDArray, sin: NDArray) -> NDArray:
    even, odd, cos, sin = x[..., 0::2], x[..., 1::2], cos[:, None], sin[:, None]
    return np.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1).reshape(x.shape)


def _partly(x: NDArray, n: int, angles: NDArray) -> NDArray:
    return np.concatenate([_turn(x[..., :n], angles), wide(x[..., n:])], axis=-1)


def _rope(step: Step) -> Iterator[Description]:
    cfg, half = step.setting.config, step.inputs[1].shape[1]
    p, f = _angles(step, half)
    theta, d = cfg.rope.theta, 2 * half
    j = np.arange(half, dtype=np.float64)
    n = len(p)
    positions = {
        "one too high": p + 1,
        "one too low": p - 1,
        "in reverse": p[::-1],
        "all 0": p * 0,
        "doubled": p * 2,
        "halved": p / 2,
        "halved and rounded down": p // 2,
        "those of the last token for all": p * 0 + n - 1,
        "negative": -p,
        **{f"counted mod {m}": p % m for m in range(2, 9)},
        "two too high": p + 2,
    }
    for words, places in positions.items():
        yield Description(1, f"RoPE's positions are {words}", instead(lambda x, c, s, a=places * f: _turn(x, a)))
    frequencies = {
        "theta^(-j/d), half the exponent": theta ** (-j / d),
        "theta^(-2j/D), over the hidden size": theta ** (-2 * j / cfg.hidden_size),
        "theta^(-4j/d), twice the exponent": theta ** (-4 * j / d),
        "in reverse": f[::-1],
        "theta^(-2(j+1)/d), one too far": theta ** (-2 * (j + 1) / d),
        "theta^(-2j/(d-2))": theta ** (-2 * j / max(d - 2, 1)),
        "theta^(2j/d), growing": theta ** (2 * j / d),
        "divided by 2 pi": f / (2 * np.pi),
        "times 2 pi": f * 2 * np.pi,
        "those without the scaling": theta ** (-2 * j / d),
        "rounded to bfloat16": wide(f.astype(ml_dtypes.bfloat16)),
    }
    for words, freq in frequencies.items():
        yield Description(1, f"RoPE's frequencies are {words}", instead(lambda x, c, s, a=p * freq: _turn(x, a)))
    for part in sorted({d // 2, d // 4, 3 * d // 4 // 2 * 2, d - 2} - {0}):
        own, angles = theta ** (-2 * np.arange(part // 2) / part), p * f[: part // 2]
        text = f"RoPE turns only the first {part} of the {d} numbers of a head"
        yield Description(1, text + ", with frequencies of their own", instead(lambda x, c, s, n=part, a=p * own: _partly(x, n, a)))
        yield Description(1, text + ", with the first frequencies", instead(lambda x, c, s, n=part, a=angles: _partly(x, n, a)))
        yield Description(1.1, f"RoPE leaves out the pairs from {part // 2} on", instead(lambda x, c, s, a=p * f * (j < part // 2): _turn(x, a)))
        yield Description(1.1, f"RoPE leaves out the pairs before {part // 2}", instead(lambda x, c, s, a=p * f * (j >= part // 2): _turn(x, a)))
    rows: list[tuple[float, str, Callable[..., Any]]] = [
        (1, "RoPE is left out", lambda x, c, s: x),
        (1, "RoPE turns the pairs (2j, 2j+1), not (j, j + d/2)", _interleaved),
        (1, "RoPE turns the other way", lambda x, c, s: layers.apply_rope(x, c, -s)),
        (1.1, "RoPE is applied twice", lambda x, c, s: layers.apply_rope(layers.apply_rope(x, c, s), c, s)),
        (1.1, "RoPE takes sin for cos as well", lambda x, c, s: layers.apply_rope(x, s, s)),
        (1.1, "RoPE takes cos for sin as well", lambda x, c, s: layers.apply_rope(x, c, c)),
        (1.1, "RoPE's cos and sin are exchanged", lambda x, c, s: layers.apply_rope(x, s, c)),
        (1.2, "RoPE turns the pairs (2j, 2j+1) the other way", lambda x, c, s: _interleaved(x, c, -s)),
        (1.1, "the sin terms of RoPE are left out", lambda x, c, s: layers.apply_rope(x, c, 0 * s)),
        (1.2, "RoPE takes the head's number for the position", lambda x, c, s: _turn(x.swapaxes(0, 1), np.arange(x.shape[1])[:, None] * f).swapaxes(0, 1)),
        (
            1.3,
            "cos and sin are rounded to bfloat16",
            lambda x, c, s: layers.apply_rope(x, c.astype(ml_dtypes.bfloat16).astype(np.float32), s.astype(ml_dtypes.bfloat16).astype(np.float32)),
        ),
        (
            1.3,
            "cos and sin are rounded to float16",
            lambda x, c, s: layers.apply_rope(x, c.astype(np.float16).astype(np.float32), s.astype(np.float16).astype(np.float32)),
        ),
    ]
    yield from (Description(cost, text, instead(function)) for cost, text, function in rows)


# -- products ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def matrix(w: LinearWeight | EmbeddingWeight) -> NDArray[np.float32]:
    """The matrix itself, (out, K); a ternary one in integers."""
    if isinstance(w, TernaryLinear):
        return w.ternary().astype(np.float32)
    dense = w.dense() if isinstance(w, GroupTernaryLinear) else w
    assert isinstance(dense, DenseWeight)
    return dense.array.astype(np.float32)


def product(x: NDArray, w: NDArray) -> NDArray:
    return wide(x) @ wide(w).T


def with_matrix(change: Callable[[NDArray], NDArray]) -> Edit:
    return instead(lambda x, w: product(x, change(matrix(w))))


CODES = {
    "0 and +1 exchanged": (-1, 1, 0),
    "-1 and 0 exchanged": (0, -1, 1),
    "taken as 0, 1, 2": (0, 1, 2),
    "taken as 1, 0, -1": (1, 0, -1),
    "shifted: 0, +1, -1": (0, 1, -1),
    "shifted: +1, -1, 0": (1, -1, 0),
    "without zeros: -1, +1, +1": (-1, 1, 1),
    "without zeros: -1, -1, +1": (-1, -1, 1),
    "taken without their sign": (1, 0, 1),
    "without -1": (0, 0, 1),
    "without +1": (-1, 0, 0),
}


def _products(step: Step) -> Iterator[Description]:
    """Another matrix, other columns, another table of codes."""
    x, w = step.inputs[:2]
    ternary = step.name.endswith("hook_acc_int32")
    n = x.shape[1]
    if ternary:
        for words, codes in CODES.items():
            table = np.array(codes, dtype=np.float32)
            yield Description(1, f"the codes of {{w}} are {words}", with_matrix(partial(_recoded, table=table)))
        for bits in range(16, 7, -1):
            top = 2 ** (bits - 1)
            yield Description(1, f"accumulators wrap round at {bits} bits", after(partial(_wrapped, top=top)))
            yield Description(1, f"accumulators saturate at {bits} bits", after(partial(np.clip, a_min=-top, a_max=top - 1)))
        for mantissa, words in ((8, "bfloat16"), (11, "float16")):
            yield Description(1, f"accumulators are rounded to {words}", after(partial(_cut, bits=mantissa)))
    else:
        yield Description(1.2, "{w} is rounded to bfloat16", with_matrix(lambda m: wide(m.astype(ml_dtypes.bfloat16))))
        yield Description(1.2, "{w} is rounded to float16", with_matrix(lambda m: wide(m.astype(np.float16))))
        yield Description(1.1, "{w} is quantised to int8, a scale per row", with_matrix(partial(_int8, axis=1)))
        yield Description(1.2, "{w} is quantised to int8, one scale", with_matrix(partial(_int8, axis=None)))
        yield Description(1.3, "the bias of {w} is left out", instead(lambda x, w: product(x, matrix(w))))
    for k in sorted({n - n % 256, n - n % 128, n // 2, n // 4, 3 * n // 4, *(n - b for b in (1, 2, 3, 4, 8, 16, 32, 64, 128, 256))}):
        if 0 < k < n:
            zeroed = partial(keep_columns, first=0, stop=k)
            yield Description(1.1, f"the sums stop after {k} of {n} inputs", before(0, zeroed))
            yield Description(1.2, f"the sums start at input {n - k}", before(0, partial(keep_columns, first=n - k, stop=n)))
    yield Description(1.3, "every second input is left out", before(0, lambda x: x * (np.arange(x.shape[1]) % 2 == 0).astype(x.dtype)))
    for k in (8, 16, 32, 64, 128):
        if n % k == 0 and n > k:
            for part in range(n // k):
                yield Description(1.4, f"inputs {part * k} to {part * k + k - 1} are left out", before(0, partial(hole, first=part * k, stop=part * k + k)))
                yield Description(1.5, f"inputs {part * k} to {part * k + k - 1} count twice", before(0, partial(hole, first=part * k, stop=part * k + k, factor=2)))
    if w.shape[0] == w.shape[1]:
        yield Description(1, "{w} is transposed", with_matrix(lambda m: m.T))
    else:
        yield Description(1.2, "{w} is stored the other way round: (in, out)", with_matrix(lambda m: m.reshape(m.shape[::-1]).T))
    for name, other in step.setting.weights.linears():
        if other is not w and other.shape == w.shape and isinstance(other, type(w)):
            yield from _others(1.1, "the matrix of {} is taken", name, step, _other_matrix)
    embedding = step.setting.weights.embedding
    if embedding is not w and embedding.shape == w.shape and not ternary:
        yield Description(1, "the embedding is taken for {w}, as if they were tied", instead(lambda x, w: product(x, matrix(embedding))))


def _others(cost: float, text: str, name: str, step: Step, edit: Callable[[str, str], Edit]) -> Iterator[Description]:
    """A matrix, scale or norm of another module, in two readings: of that module in every layer, or of the module that
    is as many layers away from each layer as it is from this step."""
    yield Description(cost, text.format(name), edit(name, step.name))
    if name.startswith("blocks.") and name.split(".")[1] != step.name.split(".")[1]:
        yield Description(cost + 0.01, text.format(name), edit(name, ""))


def _other_matrix(name: str, origin: str) -> Edit:
    def edit(step: Step, compute: Edit, x: NDArray, w: LinearWeight, *rest: Any) -> NDArray:
        return compute(x, linears_of(step)[moved(name, origin, step)], *rest)

    return edit


def linears_of(step: Step) -> dict[str, LinearWeight]:
    return dict(step.setting.weights.linears())


def _recoded(m: NDArray, table: NDArray) -> NDArray:
    return table[m.astype(int) + 1]


def _wrapped(y: NDArray, top: int) -> NDArray:
    return (y + top) % (2 * top) - top


def next_id(ids: NDArray, by: int, rows: int) -> NDArray:
    return (ids + by) % rows


def _times(index: int) -> Callable[[float], Edit]:
    return lambda c: before(index, lambda x: x * x.dtype.type(c))


def _of_length(index: int) -> Callable[[float], Edit]:
    return lambda c: before(index, lambda x: x / np.sqrt(_ms(x)) * c / math.sqrt(x.shape[-1]))


def _cut(y: NDArray, bits: int) -> NDArray:
    mantissa, exponent = np.frexp(wide(y))
    return np.ldexp(np.rint(mantissa * 2**bits) / 2**bits, exponent)


def _int8(m: NDArray, axis: int | None) -> NDArray:
    step = np.maximum(np.abs(m).max(axis, keepdims=True), 1e-30) / 127
    return np.rint(m / step) * step


def keep_columns(x: NDArray, first: int, stop: int) -> NDArray:
    result = np.zeros_like(x)
    result[:, first:stop] = x[:, first:stop]
    return result


def hole(x: NDArray, first: int, stop: int, factor: int = 0) -> NDArray:
    changed = x.astype(np.int16) if x.dtype == np.int8 else x.copy()
    changed[:, first:stop] *= factor
    return np.clip(changed, -128, 127).astype(x.dtype)


def _dequantized(step: Step) -> Iterator[Description]:
    """acc * (w_scale / x_scale): other scales, other places for them."""
    rows: list[tuple[float, str, Callable[..., Any]]] = [
        (1, "the scale of {w} is left out", lambda a, w, s: a / s),
        (1, "the result is divided by the scale of {w}, not multiplied", lambda a, w, s: a / (w.w_dequant_scale * s)),
        (1, "the scale of {w} is applied once more", lambda a, w, s: a * (w.w_dequant_scale**2 / s)),
        (1, "the activation scale is left out", lambda a, w, s: a * w.w_dequant_scale),
        (1, "the result is multiplied by the activation scale, not divided", lambda a, w, s: a * w.w_dequant_scale * s),
        (1.1, "the activation scale is applied once more", lambda a, w, s: a * (w.w_dequant_scale / s / s)),
        (1.1, "both scales are left out", lambda a, w, s: a),
        (1.2, "the result is divided by 127 twice", lambda a, w, s: a * (w.w_dequant_scale / s) / 127),
        (1.1, "the scale of {w} is rounded to bfloat16", lambda a, w, s: a * (np.float32(ml_dtypes.bfloat16(w.w_dequant_scale)) / s)),
        (1.1, "the scale of {w} is rounded to float16", lambda a, w, s: a * (np.float32(np.float16(w.w_dequant_scale)) / s)),
        (1.1, "the scale of {w} is times the share of its non-zero weights", lambda a, w, s: a * (w.w_dequant_scale * np.abs(matrix(w)).mean() / s)),
        (1.2, "the scale of {w} is divided by the share of its non-zero weights", lambda a, w, s: a * (w.w_dequant_scale / np.abs(matrix(w)).mean() / s)),
        (1.2, "every token is divided by the first one's activation scale", lambda a, w, s: a * (w.w_dequant_scale / s[:1])),
        (1.2, "every token is divided by the last one's activation scale", lambda a, w, s: a * (w.w_dequant_scale / s[-1:])),
        (1.2, "each token is divided by the activation scale of the token before it", lambda a, w, s: a * (w.w_dequant_scale / np.roll(s, 1, 0))),
        (1.2, "each token is divided by the activation scale of the next token", lambda a, w, s: a * (w.w_dequant_scale / np.roll(s, -1, 0))),
        (1.2, "the largest activation scale is taken for all tokens", lambda a, w, s: a * (w.w_dequant_scale / s.max())),
    ]
    yield from (Description(cost, text, instead(function)) for cost, text, function in rows)
    for name, other in step.setting.weights.linears():
        if isinstance(other, TernaryLinear) and other is not step.inputs[1]:
            yield from _others(1.1, "the scale of {} is taken", name, step, _other_scale)


def _other_scale(name: str, origin: str) -> Edit:
    def edit(step: Step, compute: Edit, acc: NDArray, w: TernaryLinear, scale: NDArray) -> NDArray:
        other = linears_of(step)[moved(name, origin, step)]
        assert isinstance(other, TernaryLinear)
        return acc.astype(np.float32) * (other.w_dequant_scale / scale)

    return edit


# -- all descriptions of a step ----------------------------------------------------------------------------------------


def norms_of(step: Step) -> dict[str, NDArray]:
    """The weight of every norm of the model."""
    layers = enumerate(step.setting.weights.layers)
    norms = {f"blocks.{index}.{name}": weight for index, layer in layers for name, weight in layer.norms()}
    return {**norms, "the final norm": step.setting.weights.final_norm}


def _other_norm(name: str, origin: str) -> Edit:
    return lambda step, compute, x, length, weight: compute(x, length, norms_of(step)[moved(name, origin, step)])


def own_descriptions(step: Step) -> Iterator[Description]:
    """Other formulas of this step."""
    kind = step.name.rpartition(".")[2]
    tables: dict[str, list[tuple[float, str, Callable[..., Any]]]] = {
        "hook_scale": LENGTHS,
        "hook_normalized": NORMS,
        "hook_x_scale": ACTIVATION_SCALES,
        "hook_x_int8": INT8_RULES,
        "hook_pattern": PATTERNS,
    }
    for cost, text, function in tables.get(kind, ()):
        yield Description(cost, text, instead(function))
    if kind == "hook_normalized":
        weight = step.inputs[2]
        for size in sorted({step.setting.config.head_dim, 16, 32, 64, 128, len(weight) // 2}):
            if len(weight) % size == 0 and size < len(weight):
                yield Description(
                    1.2,
                    f"each {size} columns are divided by their own length",
                    instead(lambda x, r, w, n=size: (lambda b: (b / np.sqrt(_ms(b) + 1e-6)).reshape(r.shape[0], -1) * w)(x.reshape(-1, n))),
                )
        for name, other in norms_of(step).items():
            if other is not weight and other.shape == weight.shape:
                yield from _others(1.1, "the weight of {} is taken", name, step, _other_norm)
    if kind == "hook_attn_scores":
        yield from _scores(step)
    if kind == "hook_z":
        yield from _kv_maps("the values")
    if kind in ("hook_rot_q", "hook_rot_k"):
        yield from _rope(step)
    if kind == "hook_post":
        yield from (Description(cost, text, instead(function)) for cost, text, function in _gates(step.inputs[2]))
    if len(step.inputs) > 1 and isinstance(step.inputs[1], LinearWeight) and kind != "hook_embed":
        yield from _dequantized(step) if len(step.inputs) == 3 else _products(step)
    if kind == "hook_embed":
        table = step.inputs[0]
        for words, shift in (("next", 1), ("previous", -1)):
            yield Description(1, f"the row of the {words} id is taken", before(1, partial(next_id, by=shift, rows=table.shape[0])))
        if step.setting.weights.lm_head is not table and isinstance(step.setting.weights.lm_head, DenseWeight):
            yield Description(1, "the rows of lm_head are taken for those of the embedding", before(0, lambda w: step.setting.weights.lm_head))
    if kind in ("hook_resid_mid", "hook_resid_post"):
        yield Description(1, "the residual is left out: the block's result is the stream", instead(lambda x, y: y))
        yield Description(1, "the block's result is left out", instead(lambda x, y: x))
        yield Description(1.1, "the block's result is subtracted", instead(lambda x, y: x - y))
        yield Description(1.2, "the block's result multiplies the stream", instead(lambda x, y: x * y))


def descriptions(step: Step) -> Iterator[Description]:
    """Every description of a step that has no unknown constant. Those of the step's own formula come first."""
    yield from own_descriptions(step)
    by_head = step.name.endswith(("hook_attn_scores", "hook_pattern"))
    for cost, text, change in changes(heads_apart(step.result, step), by_head):
        yield Description(cost, text.replace("{x}", "{it}"), after(change))
    arrays = [i for i, x in enumerate(step.inputs) if isinstance(x, np.ndarray) and x.ndim > 1 and x.dtype.kind in "fi"]
    arrays = [i for i in arrays if i == 0 or not step.name.endswith(("hook_rot_q", "hook_rot_k"))]
    for index in arrays:
        masked = step.name.endswith("hook_pattern")
        for cost, text, change in changes(heads_apart(step.inputs[index], step), masked):
            yield Description(cost + 0.2, text.replace("{x}", f"{{in{index}}}"), before(index, change))
    size, block = step.result.size, step.name.split(".")[:2]
    near = [name for name in step.seen if name != step.name]
    for name in reversed(near):
        far = 0.0 if name.split(".")[:2] == block else 0.5
        if step.seen[name].dtype.kind != step.result.dtype.kind or name.endswith("hook_x_scale"):
            continue
        if step.seen[name].size == size:
            yield Description(1 + far, f"{{it}} is {{{name}}} itself", from_run(None, name, step.name))
        for index in arrays:
            if step.seen[name].size == step.inputs[index].size and step.seen[name].dtype == step.inputs[index].dtype:
                text = f"{{{name}}} is taken for {{in{index}}}"
                yield Description(1.1 + far, text, from_run(index, name, step.name))
    if len(arrays) == 2 and step.inputs[arrays[0]].shape == step.inputs[arrays[1]].shape:
        yield Description(1.1, "{in0} and {in1} are exchanged", lambda s, f, *a: f(a[1], a[0], *a[2:]))


# -- constants ---------------------------------------------------------------------------------------------------------


def families(step: Step) -> Iterator[Family]:
    """The constants of a step's formula, and those that could be in it."""
    kind, cfg = step.name.rpartition(".")[2], step.setting.config

    def with_c(function: Callable[..., Any]) -> Callable[[float], Edit]:
        return lambda c: instead(partial(function, c))

    if kind == "hook_scale":
        eps = float(step.inputs[1])
        yield Family(1, "eps is {c}" + f" where {eps:g} belongs", with_c(lambda c, x, eps: np.sqrt(_ms(x) + c)), eps, True, (1e-12, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1))
        yield Family(1.3, "{c} is added to the length", with_c(lambda c, x, eps: np.sqrt(_ms(x)) + c), eps, True)
        yield Family(1.4, "the sum of squares is divided by {c} times its number of terms", with_c(lambda c, x, eps: np.sqrt(_ms(x) / c + eps)), 1, True)
    if kind == "hook_normalized":
        yield Family(1.2, "the weight of the norm is taken to the power {c}", with_c(lambda c, x, r, w: x / r * np.sign(w) * np.abs(w) ** c), 1)
        yield Family(1.2, "{c} is added to the weight of the norm", with_c(lambda c, x, r, w: x / r * (w + c)), 0, False, (1,))
        yield Family(1.3, "the length is taken to the power {c}", with_c(lambda c, x, r, w: x / r**c * w), 1)
    if kind == "hook_x_scale":
        yield Family(1, "the activation scale is {c} / max|x|, where 127 belongs", with_c(lambda c, x: np.float32(c) / _absmax(x)), 127, True)
        yield Family(1.2, "the floor of max|x| is {c}, not 1e-5", with_c(lambda c, x: 127 / np.maximum(np.abs(x).max(-1, keepdims=True), c)), 1e-5, True, (1e-3, 0.1, 1))
        yield Family(1.3, "{c} is added to max|x|", with_c(lambda c, x: 127 / (np.abs(x).max(-1, keepdims=True) + c)), 1e-5, True, (1e-3, 0.1))
    if kind == "hook_x_int8":
        yield Family(1.2, "{c} is added before the rounding", with_c(lambda c, x, s: np.clip(np.rint(x * s + c), -128, 127)), 0)
        yield Family(1.2, "x * scale is multiplied by {c} before the rounding", with_c(lambda c, x, s: np.clip(np.rint(x * s * np.float32(c)), -128, 127)), 1, True)
    if kind == "hook_pattern":
        yield Family(1, "scores are multiplied by {c} in the softmax", with_c(lambda c, s: _softmax(s * np.float32(c))), 1, True)
        yield Family(1.2, "{c} is added to the softmax's sum, an attention sink", with_c(lambda c, s: _softmax(s, extra=c)), 0, False, (1,))
        yield Family(
            1.3, "{c} is added to the softmax's sum after the maximum is subtracted", with_c(lambda c, s: _e(s) / (_e(s).sum(-1, keepdims=True) + c)), 0, False, (0.1, 1)
        )
        yield Family(
            1.2,
            "scores are capped by {c} tanh(s / {c}) before the softmax",
            with_c(lambda c, s: _softmax(np.where(s > -np.inf, c * np.tanh(wide(s) / c), s))),
            1e4,
            True,
            (1, 5, 30),
        )
        yield Family(1.3, "the weight of the first token has {c} added to its score", with_c(lambda c, s: _softmax(s + c * (np.arange(s.shape[2]) == 0))), 0)
        yield Family(1.2, "the distance times {c} is subtracted from the scores", with_c(lambda c, s: _softmax(s - c * (_ij(s)[0] - _ij(s)[1]))), 0)
    if kind == "hook_attn_scores":
        yield Family(1, "scores are multiplied by {c} more than 1/sqrt(head_dim)", lambda c: after(lambda x: x * np.float32(c)), 1, True, (0.1, 4))
        yield Family(
            1.1, "scores are capped by {c} tanh(s / {c})", lambda c: after(lambda x: np.where(x > -np.inf, c * np.tanh(x / np.float32(c)), x)), 1e4, True, (1, 5, 30)
        )
        yield Family(
            1.2,
            "the distance times {c} is subtracted from the scores, as in ALiBi",
            lambda c: after(lambda x: x - np.float32(c) * (_ij(x)[0] - _ij(x)[1]) * (x > -np.inf)),
            0,
        )
        yield Family(1.3, "{c} is added to all scores that are seen", lambda c: after(lambda x: np.where(x > -np.inf, x + np.float32(c), x)), 0)
        yield Family(1.3, "scores are clipped to {c}", lambda c: after(lambda x: np.where(x > -np.inf, np.clip(x, -c, c), x)), 1e3, True, (0.1, 1, 5, 10))
        for b in (0, 1):
            yield Family(
                1.2, "{in" + str(b) + "} is normalised to the length {c}", _of_length(b), 1, True
            )
    if kind in ("hook_rot_q", "hook_rot_k"):
        p, f = _angles(step, step.inputs[1].shape[1])
        half = len(f)
        e, theta = np.arange(half) / half, cfg.rope.theta
        yield Family(1.2, "RoPE's cos is multiplied by {c}", with_c(lambda c, x, co, si: layers.apply_rope(x, co * np.float32(c), si)), 1)
        yield Family(1.2, "RoPE's sin is multiplied by {c}", with_c(lambda c, x, co, si: layers.apply_rope(x, co, si * np.float32(c))), 1)
        yield Family(1.2, "RoPE's cos and sin are multiplied by {c}", with_c(lambda c, x, co, si: layers.apply_rope(x, co, si) * c), 1)
        yield Family(
            1, "RoPE's theta is {c}" + f" where {theta:g} belongs", with_c(lambda c, x, co, si: _turn(x, p * c**-e)), theta, True, (1e3, 1e4, 1e5, 5e5, 1e6, 1e2)
        )
        yield Family(1.1, "RoPE's positions are multiplied by {c}", with_c(lambda c, x, co, si: _turn(x, p * c * f)), 1, True, (0.1, 0.25, 0.5, 1.5, 2, 4))
        yield Family(1.1, "{c} is added to RoPE's positions", with_c(lambda c, x, co, si: _turn(x, (p + c) * f)), 0, False, (-1, 2, 3, 4, 5, 7, 10))
    if kind == "hook_post":
        act = ACTIVATIONS[RIGHT_ACTIVATIONS[step.inputs[2]]]
        yield Family(1.1, "the activation's argument is multiplied by {c}", with_c(lambda c, g, u, n: act(wide(g) * c) * u), 1, False, (0.5, 2))
        yield Family(1.1, "the activation is x sigmoid({c} x)", with_c(lambda c, g, u, n: wide(g) * _sig(c * wide(g)) * u), 1.5, False, (0.5, 3))
        yield Family(1.1, "the gate is clipped at {c} from above", with_c(lambda c, g, u, n: act(np.minimum(wide(g), c)) * u), 1e3, True, (0.1, 0.5, 1, 2, 5))
        yield Family(1.1, "gate and up are clipped to {c}", with_c(lambda c, g, u, n: act(np.clip(wide(g), -c, c)) * np.clip(u, -c, c)), 1e3, True, (0.1, 0.5, 1, 2, 5))
        yield Family(1.1, "up is clipped to {c}", with_c(lambda c, g, u, n: act(wide(g)) * np.clip(u, -c, c)), 1e3, True, (0.1, 0.5, 1, 2, 5))
        yield Family(1.1, "the activation is a leaky relu of slope {c}", with_c(lambda c, g, u, n: np.where(g > 0, g, c * wide(g)) * u), 0)
        yield Family(
            1.2, "the activation is the square of a leaky relu of slope {c}", with_c(lambda c, g, u, n: np.square(np.where(g > 0, g, c * wide(g))) * u), 0, False, (0.3,)
        )
        yield Family(1.2, "{c} is added to up", with_c(lambda c, g, u, n: act(wide(g)) * (wide(u) + c)), 0)
        yield Family(1.2, "{c} is added to the gate", with_c(lambda c, g, u, n: act(wide(g) + c) * wide(u)), 0)
        yield Family(1.3, "{c} is added to the activation", with_c(lambda c, g, u, n: (act(wide(g)) + c) * wide(u)), 0)
        yield Family(1.3, "the activation is relu to the power {c}", with_c(lambda c, g, u, n: np.maximum(wide(g), 0) ** c * u), 2, True, (1.5, 3))
    for index, x in enumerate(step.inputs):
        if isinstance(x, np.ndarray) and x.ndim > 1 and x.dtype.kind == "f" and kind not in ("hook_pattern", "hook_rot_q", "hook_rot_k", "hook_attn_scores"):
            yield Family(1.2, f"{{in{index}}} is multiplied by {{c}}", _times(index), 1, False, (0.1, 8))
    if kind == "hook_acc_int32":
        yield Family(1.2, "{it} is multiplied by {c}", lambda c: after(lambda x: wide(x) * c), 1, False, (2,))
        yield Family(
            1.2,
            "{c} times the sum of the inputs is added to the accumulators: codes have an offset",
            lambda c: instead(lambda x, w: product(x, matrix(w)) + c * wide(x).sum(1, keepdims=True)),
            0,
            False,
            (1, -1),
        )
        yield Family(1.3, "{c} is added to the accumulators", lambda c: after(lambda x: x + round(c)), 0)
    elif step.result.dtype.kind == "f" and kind != "hook_attn_scores":
        yield Family(1.1, "{it} is multiplied by {c}", lambda c: after(lambda x: x * x.dtype.type(c)), 1, False, (0.1, 8))
        yield Family(1.3, "{c} is added to {it}", lambda c: after(lambda x: x + x.dtype.type(c)), 0)
        yield Family(1.3, "{it} is clipped to {c}", lambda c: after(lambda x: np.clip(x, -c, c)), 1e4, True, (0.01, 0.1, 1, 10))
        yield Family(1.3, "{it} is capped by {c} tanh(x / {c})", lambda c: after(lambda x: c * np.tanh(wide(x) / c)), 1e4, True, (0.1, 1, 10, 30))


def constants(step: Step) -> dict[str, float]:
    """The numbers that this step's model has, by their names."""
    cfg = step.setting.config
    numbers = {
        "2": 2.0,
        "3": 3.0,
        "10": 10.0,
        "127": 127.0,
        "128": 128.0,
        "255": 255.0,
        "pi": math.pi,
        "ln 2": math.log(2),
        "head_dim": cfg.head_dim,
        "hidden_size": cfg.hidden_size,
        "heads": cfg.num_attention_heads,
        "kv heads": cfg.num_key_value_heads,
        "heads per kv head": cfg.num_attention_heads / cfg.num_key_value_heads,
        "intermediate_size": cfg.intermediate_size,
        "layers": cfg.num_hidden_layers,
        "vocab_size": cfg.vocab_size,
        "tokens": len(step.setting.tokens),
        "theta": cfg.rope.theta,
        "eps": cfg.norm_eps,
        "embedding_scale": cfg.embedding_scale,
        "residual_scale": cfg.residual_scale,
        "query_scale": cfg.query_scale,
    }
    for w in step.inputs:
        if isinstance(w, TernaryLinear):
            numbers["this matrix's scale"] = float(w.w_dequant_scale)
    if (parts := step.name.split("."))[0] == "blocks":
        numbers["layer number + 1"] = int(parts[1]) + 1
    return {name: float(value) for name, value in numbers.items() if value not in (0, 1)}


Constant = Callable[[dict[str, float]], float]


def names_of(value: float, step: Step, near: float) -> Iterator[tuple[str, Constant]]:
    """What a constant may be, (words, its value by `constants`), simplest first: within a share `near` of the value."""
    numbers, sign = constants(step), math.copysign(1.0, value)
    minus = "-" * (sign < 0)

    def fixed(x: float) -> tuple[str, Constant]:
        return f"{x:.7g}", lambda _: x

    def named(words: str, function: Callable[..., float], *names: str) -> tuple[str, Constant]:
        return minus + words.format(*names), lambda g: sign * function(*(g[name] for name in names))

    forms = [fixed(0.0), *(fixed(float(f"{value:.{digits}g}")) for digits in (1, 2))]
    forms += [named("1/{}", lambda x: 1 / x, name) for name in numbers]
    for name in numbers:
        forms += [named("{}", float, name), named("sqrt({})", math.sqrt, name), named("1/sqrt({})", lambda x: x**-0.5, name)]
        forms.append(named("({})^2", lambda x: x * x, name))
    forms.append(fixed(float(f"{value:.3g}")))
    for name in numbers:
        forms += [named("({} - 1)", lambda x: x - 1, name), named("({} + 1)", lambda x: x + 1, name)]
    for a in numbers:
        for b in numbers:
            if a != b:
                forms += [named("{} / {}", lambda x, y: x / y, a, b), named("sqrt({} / {})", lambda x, y: abs(x / y) ** 0.5, a, b)]
    forms += [fixed(float(f"{value:.{digits}g}")) for digits in (4, 5, 6)]
    values: list[float] = []
    for words, constant in forms:
        exact = constant(numbers)
        close = abs(exact - value) <= near * max(abs(value), 1e-30) or (exact == 0 and abs(value) < near)
        if close and exact not in values:
            values.append(exact)
            yield (words if words == f"{exact:.7g}" else f"{words} = {exact:.6g}"), constant
