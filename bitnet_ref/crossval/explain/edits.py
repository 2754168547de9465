"""Small edits of one step of a run: what an engine may have computed instead of it. Each has a cost; simple ones cost less.

Two kinds of edits apply to every step. One changes an input or the result: it is moved, scaled, rounded, left out or
replaced by another tensor of the run. The other replaces the step's formula, by a row of the tables below. A `Family` is an
edit with an unknown constant, for which `site` solves. `site` tries the edits and returns those that give the engine's
tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...families import family_of
from ...families.family import Around, Edit, Hypothesis, after, before, heads_apart, instead, layer_weights, own_rope
from ...reference import layers
from ...reference.layers import ACTIVATIONS, Array
from ...reference.weights import LinearWeight, Norm
from ..names import is_by_head, linear_input
from .attention import all_scores
from .variants import Step

# In the tables below a row is a line.
# fmt: off
Change = Callable[[Array], Array]
Formula = Callable[..., Any]
Row = tuple[float, str, Formula]  # cost, words, the formula of the step's inputs
ConstantRow = tuple[Any, ...]  # of a Family: cost, words, the formula of c and the inputs, right (None: the second input), log and starts if there are any


@dataclass(frozen=True)
class Description:
    """One edit in words. text: a clause in which "{it}" stands for the step's tensor.   cost: lower for simpler edits.

    known: the mistake that it is an edit of.   rounds: it rounds, so a few values may differ from the engine's.
    """

    cost: float
    text: str
    edit: Edit
    known: Hypothesis | None = None
    rounds: bool = False


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


def wide(x: Array) -> NDArray[np.float64]:
    return x.astype(np.float64)


# -- the kinds of edits ------------------------------------------------------------------------------------------------


def from_run(index: int | None, name: str, origin: str) -> Edit:
    """The step with another tensor of the run as one of its inputs, or (None) as its result."""

    def edit(step: Step, compute: Edit, *inputs: Any) -> Array:
        right = compute(*inputs) if index is None else inputs[index]
        other = step.seen[moved(name, origin, step)].reshape(right.shape).astype(right.dtype)
        return other if index is None else compute(*inputs[:index], other, *inputs[index + 1 :])

    return edit


def normed_by(index: int | None, name: str, origin: str) -> Edit:
    """The step with one of its inputs, or (None) its result, brought through a norm of the step's block."""

    def edit(step: Step, compute: Edit, *inputs: Any) -> Array:
        norm = norms_of(step)[moved(name, origin, step)]
        normed = partial(layers.rms_norm, weight=norm.weight, eps=norm.eps)
        return (after(normed) if index is None else before(index, normed))(step, compute, *inputs)

    return Around(edit)


def moved(name: str, origin: str, step: Step) -> str:
    """The name of a tensor or weight that lies as far from `step` as `name` does from the step `origin`, in layers."""
    parts, here = name.split("."), step.name.split(".")
    if parts[0] != "blocks" or here[0] != "blocks" or not origin.startswith("blocks."):
        return name
    layer = int(parts[1]) - int(origin.split(".")[1]) + int(here[1])
    return ".".join(["blocks", str(layer % step.setting.config.num_hidden_layers), *parts[2:]])


def parts_of(step: Step) -> dict[str, Any]:
    """Every linear of the model, and the weight of every norm."""
    w = step.setting.weights
    norms = {f"blocks.{index}.{name}": norm.weight for index, layer in enumerate(w.layers) for name, norm in layer.norms()}
    return {**dict(w.linears()), **norms, "the final norm": w.final_norm.weight}


def with_part(cost: float, text: str, step: Step, fits: Callable[[Any], bool], use: Formula) -> Iterator[Description]:
    """Another linear or norm in place of the step's own, its second or third input: use(compute, the other, *inputs).

    Each in two readings: of that module in every layer, or of the module that is as many layers away from each layer as
    it is from this one.
    """
    def edit(name: str, origin: str) -> Edit:
        return lambda step, compute, *inputs: use(compute, parts_of(step)[moved(name, origin, step)], *inputs)

    for name, part in parts_of(step).items():
        if fits(part) and not any(part is x for x in step.inputs):
            yield Description(cost, text.format(name), edit(name, step.name))
            if name.startswith("blocks.") and name.split(".")[1] != step.name.split(".")[1]:
                yield Description(cost + 0.01, text.format(name), edit(name, ""))


def take_row(shift: int) -> Edit:
    """The embedding's row of id + shift."""
    return lambda step, compute, table, ids: compute(table, (ids + shift) % table.shape[0])


def input_floats(step: Step) -> Array:
    """The floats that the input of a linear's product was quantised from, of a step of that linear.   (N, K)"""
    source = step.seen[linear_input(step.name.rpartition(".")[0], step.setting.config)]
    return source.reshape(len(step.inputs[0]), -1)


def scale_inputs(first: int, stop: int | None, factor: int, others: int = 1) -> Edit:
    """A product whose inputs from `first` to before `stop` are multiplied by `factor`, and the others by `others`.

    stop None: to the last.
    """

    def change(x: Array) -> Array:
        factors = np.full(x.shape[1], others, dtype=np.int16)
        factors[first:stop] = factor
        return np.clip(x * factors, -128, 127).astype(x.dtype) if x.dtype == np.int8 else (x * factors).astype(x.dtype)

    return before(0, change)


# -- what can be done with any tensor ----------------------------------------------------------------------------------


Order = Callable[..., NDArray[np.int64]]  # (n) -> the places of n things


@cache
def orders(n: int) -> tuple[tuple[str, Order], ...]:
    """Other orders of n things, in words, and as rules for any number of them, which raise for numbers that do not fit."""
    named: list[tuple[str, Order]] = [
        ("in reverse", lambda n: np.arange(n)[::-1]),
        ("one too far", lambda n: np.arange(n) - 1),
        ("one too early", lambda n: (np.arange(n) + 1) % n),
    ]
    if n % 2 == 0 and n > 2:
        named.append(("with neighbours exchanged", lambda n: np.arange(n) ^ 1))
        named.append(("with its halves exchanged", lambda n: (np.arange(n) + n // 2) % n))
    for a in (2, 4, 8, 16):
        if n % (2 * a) == 0 and n > 2 * a:
            named.append((f"with neighbouring {a}s exchanged", lambda n, a=a: np.arange(n) ^ a))
    for a in [a for a in range(2, n // 2 + 1) if n % a == 0 and (a <= 8 or n // a <= 8 or a in (16, 32, 64, 128))]:
        named.append((f"as a ({a}, {n // a}) array that was transposed", lambda n, a=a: np.arange(n).reshape(a, -1).T.reshape(-1)))
        if a in (2, 4, 8, 16, 32):
            named.append((f"with each {a} in reverse", lambda n, a=a: np.arange(n).reshape(-1, a)[:, ::-1].reshape(-1)))
    return tuple(named)


def _shifted(x: Array, by: int, axis: int) -> Array:
    """Moved by one, with zeros at the end."""
    rolled = np.roll(x, by, axis)
    np.moveaxis(rolled, axis, 0)[0 if by > 0 else -1] = 0
    return rolled


def _shared(x: Array, axis: int, words: str) -> Iterator[Row]:
    """Some neighbours that have one value: the first's, or their mean."""
    n = x.shape[axis]
    for size in [size for size in range(2, n + 1) if n % size == 0] if n <= 64 else ():

        def mean(x: Array, size: int = size) -> Array:
            first = np.moveaxis(wide(x), axis, 0)
            means = first.reshape(-1, size, *first.shape[1:]).mean(1)
            return np.moveaxis(np.repeat(means, size, 0), 0, axis)

        yield 1.4, f"each {size} {words} of {{x}} have the first one's" if size < n else f"all {words} of {{x}} have the first one's", lambda x, size=size: x.take(np.arange(n) // size * size, axis)
        yield 1.4, f"each {size} {words} of {{x}} have their mean" if size < n else f"all {words} of {{x}} have their mean", mean


def changes(x: Array, by_head: bool = False) -> Iterator[Row]:
    """(cost, words, change) of a float or integer array: (N, C), (N, heads, d), or by_head (heads, N, keys)."""
    tokens, heads = (1, 0) if by_head else (0, 1)

    def reorder(cost: float, words: str, axis: int, count: int | None = None) -> Iterator[Row]:
        for order_words, order in orders(x.shape[axis])[:count]:
            yield cost, f"{words} are {order_words}", lambda x, order=order: x.take(order(x.shape[axis]), axis)

    yield 1, "{x} is all zeros", np.zeros_like
    yield 1, "{x} has the other sign", np.negative
    yield 1.5, "{x} is taken without its sign", np.abs
    yield 1.5, "negative values of {x} are set to 0", lambda x: np.maximum(x, 0)
    if x.shape[tokens] > 1 and x.ndim > 1:
        for words, by in (("previous", 1), ("next", -1)):
            yield 1.2, f"each token has {{x}} of the {words} token", partial(np.roll, shift=by, axis=tokens)
            yield 1.3, f"each token has {{x}} of the {words} token, the one at the end has zeros", partial(_shifted, by=by, axis=tokens)
        yield 1.2, "every token has {x} of the first", lambda x: np.repeat(x.take([0], tokens), x.shape[tokens], tokens)
        yield 1.2, "every token has {x} of the last", lambda x: np.repeat(x.take([-1], tokens), x.shape[tokens], tokens)
        yield 1.4, "tokens of {x} are in reverse", lambda x: np.flip(x, tokens)
    if x.ndim == 2 and x.shape[1] > 1:
        yield from reorder(1.4, "columns of {x}", 1)
        yield 2, "{x} is stored column by column and read row by row", lambda x: np.ascontiguousarray(x.T)
    if x.ndim == 2 and not by_head:
        yield from _shared(x, 1, "columns")
    if x.ndim > 2 and x.shape[heads] > 1:
        yield from reorder(1.3, "heads of {x}", heads)
        yield 1.3, "every head has {x} of the first", lambda x: np.repeat(x.take([0], heads), x.shape[heads], heads)
        yield from _shared(x, heads, "heads")
    if x.ndim == 3:
        if not by_head:
            yield from reorder(1.4, "numbers of each head of {x}", 2)
            yield 1.4, "{x} is stored as (head_dim, heads) and read as (heads, head_dim)", lambda x: x.swapaxes(1, 2)
            yield 1.5, "{x} is (heads, head_dim) and read as (head_dim, heads)", lambda x: x.reshape(len(x), x.shape[2], x.shape[1]).swapaxes(1, 2)
            yield 1.6, "{x} is laid out as (heads, tokens, head_dim) and read as (tokens, heads, head_dim)", lambda x: np.ascontiguousarray(x.swapaxes(0, 1))
        elif x.shape[1] == x.shape[2]:
            yield 1.3, "{x} is transposed", lambda x: x.swapaxes(1, 2)
        if by_head:
            yield from reorder(1.4, "the keys of {x}", 2, 3)


# -- the formula of each step ------------------------------------------------------------------------------------------


def _ms(x: Array) -> Array:
    return np.square(wide(x)).mean(-1, keepdims=True)


def _absmax(x: Array) -> Array:
    return np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(1e-5))


def _int8(x: Array, low: float = -128, high: float = 127) -> Array:
    return np.clip(np.rint(x), low, high)


def _lengths_of_blocks(x: Array, size: int, eps: float) -> Array:
    """The length of each `size` columns, for each of them."""
    return np.repeat(np.sqrt(_ms(x.reshape(len(x), -1, size)) + eps)[..., 0], size, axis=1)


def norms_of(step: Step) -> dict[str, Norm]:
    """Every norm of the model, by name."""
    w = step.setting.weights
    norms = [norm for layer in w.layers for _, norm in layer.norms()]
    norms += [each.norm for _, each in w.linears() if each.norm is not None]
    return {norm.name: norm for norm in (*norms, w.final_norm)}


PARTS: list[tuple[str, Change]] = [
    ("first half", lambda x: x[:, : x.shape[1] // 2]), ("second half", lambda x: x[:, x.shape[1] // 2 :]),
    ("first quarter", lambda x: x[:, : x.shape[1] // 4]), ("first three quarters", lambda x: x[:, : 3 * x.shape[1] // 4]),
    ("even columns", lambda x: x[:, ::2]), ("odd columns", lambda x: x[:, 1::2]), ("columns but the first", lambda x: x[:, 1:]),
    *((f"first {n} columns", lambda x, n=n: x[:, :n]) for n in (16, 32, 64, 128)),
    *((f"columns but the last {n}", lambda x, n=n: x[:, :-n] if n < x.shape[1] else x) for n in (1, 4, 8, 16, 32, 64)),
]
LENGTHS: list[Row] = [
    (1.1, "eps is a floor of the mean of squares, not added", lambda x, eps: np.sqrt(np.maximum(_ms(x), eps))),
    (1.1, "the mean of |x| stands for the root of the mean of squares", lambda x, eps: np.abs(wide(x)).mean(-1, keepdims=True) + eps),
    (1.1, "the mean of |x| stands for the root, without eps", lambda x, eps: np.abs(wide(x)).mean(-1, keepdims=True)),
    (1.1, "the largest |x| stands for the root of the mean of squares", lambda x, eps: np.abs(x).max(-1, keepdims=True)),
    (1, "the sum of squares stands for their mean", lambda x, eps: np.sqrt(_ms(x) * x.shape[-1] + eps)),
    (1.1, "the root is not taken", lambda x, eps: _ms(x) + eps),
    (1.2, "the sum of squares is divided by D - 1", lambda x, eps: np.sqrt(_ms(x) * x.shape[-1] / (x.shape[-1] - 1) + eps)),
    (1.2, "the norm does not divide: its length is 1", lambda x, eps: np.ones_like(x[:, :1])),
    *((1.4, f"the mean of squares runs over the {words} only", lambda x, eps, part=part: np.sqrt(_ms(part(x)) + eps)) for words, part in PARTS),
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
    (1.1, "the activation scale is max|x| / 127, the inverse", lambda x: _absmax(x) / 127),
    (1.1, "the activation scale takes the mean of |x|, not the largest", lambda x: 127 / np.abs(x).mean(-1, keepdims=True)),
    (1.2, "the activation scale takes the root of the mean of squares, not the largest", lambda x: 127 / np.sqrt(_ms(x))),
    *((1.3, f"the activation scale takes the largest of the {words} only", lambda x, part=part: 127 / _absmax(part(x))) for words, part in PARTS),
]
INT8_RULES: list[Row] = [
    (1, "activations are rounded down", lambda x, s: np.clip(np.floor(x * s), -128, 127)),
    (1, "activations are rounded up", lambda x, s: np.clip(np.ceil(x * s), -128, 127)),
    (1.2, "values beyond int8 wrap round instead of being clipped", lambda x, s: np.rint(x * s).astype(np.int64).astype(np.int8)),
    *((1.2, f"activations have {n} bits, not 8: they are multiples of {2 ** (8 - n)}", lambda x, s, m=2 ** (8 - n): np.clip(np.rint(x * s / m) * m, -128, 127)) for n in (7, 6, 5, 4, 3, 2)),
    *((1.1, f"activations have {n} bits, clipped to {-(2 ** (n - 1))} and {2 ** (n - 1) - 1}", lambda x, s, n=n: _int8(x * s, -(2 ** (n - 1)), 2 ** (n - 1) - 1)) for n in (7, 6, 5, 4)),
    (1.3, "activations are unsigned: 128 is added", lambda x, s: (_int8(x * s) + 128).astype(np.uint8).astype(np.int8)),
    *((1.1, f"activations are clipped to {-n} and {n}", lambda x, s, n=n: _int8(x * s, -n, n)) for n in (126, 125, 124, 120, 112, 100, 96, 80, 64)),
]


def _sig(x: Array) -> Array:
    return 1 / (1 + np.exp(-np.clip(x, -700, 700)))


OTHER_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {  # that no model has, beside those of ACTIVATIONS
    "relu": lambda x: np.maximum(x, 0),
    "gelu (erf)": lambda x: 0.5 * x * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2))),
    "quick gelu, x sigmoid(1.702 x)": lambda x: x * _sig(1.702 * x), "sigmoid": _sig, "tanh": np.tanh, "no activation": lambda x: x,
    "the square without relu": np.square, "x |x|": lambda x: x * np.abs(x), "the absolute value": np.abs, "softplus": lambda x: np.logaddexp(0, x),
    "mish": lambda x: x * np.tanh(np.logaddexp(0, x)), "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "hard swish": lambda x: x * np.clip(x + 3, 0, 6) / 6, "hard sigmoid": lambda x: np.clip(x + 3, 0, 6) / 6, "relu6": lambda x: np.clip(x, 0, 6),
    "leaky relu, slope 0.01": lambda x: np.where(x > 0, x, 0.01 * x), "the constant 1": np.ones_like,
}


def _act(x: Array, activation: str) -> Array:
    return ACTIVATIONS[activation].function(wide(x))


GATES: list[Row] = [
    (1, "up is left out", lambda g, u, n: _act(g, n)),
    (1.1, "the activation is squared once more", lambda g, u, n: np.square(_act(g, n)) * wide(u)),
    (1.1, "the activation is on gate and on up", lambda g, u, n: _act(g, n) * _act(u, n)),
    (1, "gate and up are added, not multiplied", lambda g, u, n: _act(g, n) + wide(u)),
]


def _gates(step: Step) -> Iterator[Row]:
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


# -- attention ---------------------------------------------------------------------------------------------------------


def _softmax(s: Array, extra: float = 0.0, base: float = math.e, axis: int = -1) -> Array:
    """exp(s - max) / (sum + extra * exp(-max))."""
    top = np.maximum(np.where(np.isfinite(s), s, -np.inf).max(axis, keepdims=True), -1e30)
    e = np.power(base, wide(s) - top)
    return e / (e.sum(axis, keepdims=True) + extra * np.power(base, -top))


def _softmax_without(s: Array, drop: Array) -> Array:
    """Softmax over what is left after `drop`, zeros where nothing is."""
    return np.nan_to_num(_softmax(np.where(drop, -np.inf, s)))


def _ij(s: Array) -> tuple[Array, Array]:
    return np.arange(s.shape[1])[:, None], np.arange(s.shape[2])[None, :]


def _distance(s: Array) -> Array:
    return np.arange(s.shape[1])[:, None] - np.arange(s.shape[2])


def _e(s: Array) -> Array:
    return np.exp(wide(s) - s.max(-1, keepdims=True))


def _shares(e: Array, counted: Any = 1) -> Array:
    return e / np.maximum((e * counted).sum(-1, keepdims=True), 1e-30)


def _not_rescaled(s: Array, size: int) -> Array:
    """exp(s - the largest score up to the end of its block of keys), divided by its sum."""
    ends = np.minimum((np.arange(s.shape[2]) // size + 1) * size, s.shape[2]) - 1
    return _shares(np.exp(wide(s) - np.maximum.accumulate(s, axis=2)[..., ends]))


PATTERNS: list[Row] = [
    (1, "the softmax is not divided by its sum", _e),
    (1, "the softmax is of exp(s) without its sum", lambda s: np.exp(np.minimum(wide(s), 80))),
    (1.1, "the softmax's sum lacks the token itself", lambda s: _shares(_e(s), (_distance(s) != 0) | (_ij(s)[0] == 0))),
    (1.1, "the softmax's sum lacks the first token", lambda s: _shares(_e(s), _ij(s)[1] > 0)),
    (1, "the softmax takes 2^s, not e^s", lambda s: _softmax(s, base=2)),
    (1, "the softmax runs over the wrong axis: over the tokens that look, not over those seen", lambda s: np.nan_to_num(_softmax(s, axis=1)) * (s > -np.inf)),
    *((1.2, f"the softmax goes by blocks of {n} keys, and sums of earlier blocks are not rescaled when the largest score grows", lambda s, n=n: _not_rescaled(s, n)) for n in (1, 2, 4, 8, 16, 32, 64, 128)),
    (1.2, "the softmax runs over the heads", lambda s: np.nan_to_num(_softmax(s, axis=0)) * (s > -np.inf)),
    (1.1, "a sigmoid stands for the softmax", lambda s: _sig(wide(s)) * (s > -np.inf)),
    (1.1, "the average of all tokens seen stands for the softmax", lambda s: (s > -np.inf) / (s > -np.inf).sum(-1, keepdims=True)),
    (1.1, "the softmax's largest value takes all", lambda s: (s == s.max(-1, keepdims=True)) * 1.0),
    (1.1, "the token itself has no weight", lambda s: _softmax_without(s, (_distance(s) == 0) & (_ij(s)[0] > 0))),
    (1.1, "the first token has no weight", lambda s: _softmax_without(s, (_ij(s)[1] == 0) & (_ij(s)[0] > 0))),
    *((1.3, f"only the {n} largest scores count", lambda s, n=n: _softmax_without(s, s < np.sort(s, -1)[..., -min(n, s.shape[-1])][..., None])) for n in (1, 2, 3, 4, 8)),
]


def sees_by(rule: Callable[[Array, Array, int | None], Array]) -> Edit:
    """Scores of the pairs of tokens (i, j) for which rule(i, j, window) is true."""

    def edit(step: Step, compute: Edit, q: Array, keys: Array, window: int | None) -> Array:
        n = len(step.setting.tokens)
        return all_scores(n, q, keys, window, rule(np.arange(n)[:, None], np.arange(n)[None], window))

    return edit


def _exchanged(step: Step, compute: Edit, q: Array, keys: Array, window: int | None) -> Array:
    n = len(step.setting.tokens)
    free = all_scores(n, q, keys, window, np.ones((n, n), dtype=bool)).swapaxes(1, 2)
    return np.where(_distance(free) >= 0, free, -np.inf).astype(q.dtype)


def _scores(step: Step) -> Iterator[Description]:
    n_tokens, window = len(step.inputs[0]), step.inputs[2]
    rules: list[tuple[float, str, Callable[..., Array]]] = [
        (1.2, "the mask is turned round: a token sees itself and those after it", lambda i, j, w: j >= i),
        *((1.2, f"a token sees {n} tokens only, itself included", lambda i, j, w, n=n: (j <= i) & (j > i - n)) for n in range(1, n_tokens) if n != window),
        *((1.3, f"a token sees {n} tokens after it", lambda i, j, w, n=n: j <= i + n) for n in range(2, min(n_tokens, 6))),
        *((1.3, f"the first {n} tokens are seen by all", lambda i, j, w, n=n: (j <= i) | (j < n)) for n in range(2, n_tokens)),
        *((1.3, f"the first {n} tokens are not seen by later ones", lambda i, j, w, n=n: (j <= i) & ((j >= n) | (i < n))) for n in range(2, n_tokens)),
        *((1.3, f"attention is in blocks of {n} tokens", lambda i, j, w, n=n: (j <= i) & (j // n == i // n)) for n in (2, 3, 4, 6, 8, 16)),
    ]
    yield from (Description(cost, text, sees_by(rule)) for cost, text, rule in rules)
    masks: list[Row] = [(1.1, f"masked scores are {n} instead of minus infinity", lambda x, n=n: np.where(np.isneginf(x), x.dtype.type(n), x)) for n in (0, -1, -10, -100, -10000)]
    yield from (Description(cost, text, after(change)) for cost, text, change in masks)
    yield from _kv_maps("the scores")
    yield Description(1.2, "q and k are exchanged: scores are k q", _exchanged)


KV_HEADS: dict[str, Callable[..., int]] = {  # of query head i, of h query and g kv heads
    "(h // (H/G) + 1) mod G, the next one": lambda i, h, g: (i * g // h + 1) % g,
    "G - 1 - h // (H/G), in reverse": lambda i, h, g: g - 1 - i * g // h,
    "G - 1, the last": lambda i, h, g: g - 1,
    **{f"{n}, for all heads": lambda i, h, g, n=n: n % g for n in range(4)},
}


def reads_kv_head(kv_head: Callable[..., int]) -> Edit:
    """Query head i reads kv head kv_head(i, H, G), in a step whose second input is the keys or the values."""

    def mapped(step: Step, compute: Edit, first: Array, kv: Array, *rest: Any) -> Array:
        heads, groups = step.setting.config.num_attention_heads, kv.shape[1]
        axis, result = int(not is_by_head(step.name)), compute(first, kv, *rest).copy()
        for g in range(groups):  # with every kv head replaced by g, the heads that read g are right
            own = [i for i in range(heads) if kv_head(i, heads, groups) == g]
            every = compute(first, np.repeat(kv[:, g : g + 1], groups, axis=1), *rest)
            np.moveaxis(result, axis, 0)[own] = np.moveaxis(every, axis, 0)[own]
        return result

    return mapped


def _kv_maps(noun: str) -> Iterator[Description]:
    for words, kv_head in KV_HEADS.items():
        yield Description(1.1, f"query head h reads kv head {words} in {noun}", reads_kv_head(kv_head))


# -- RoPE --------------------------------------------------------------------------------------------------------------


def _angles(step: Step) -> tuple[Array, Array]:
    """positions (N, 1), frequencies (d/2,)"""
    positions = np.arange(len(step.inputs[0]))[:, None].astype(np.float64)
    return positions, own_rope(step).frequencies(2 * step.inputs[1].shape[1])


def _turn(x: Array, angles: Array, size: int | None = None) -> Array:
    """The first `size` numbers of each head turned, all if None."""
    turned = layers.apply_rope(wide(x[..., :size]), np.cos(angles), np.sin(angles))
    return turned if size is None else np.concatenate([turned, wide(x[..., size:])], axis=-1)


def interleaved(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates the pairs (x[2j], x[2j+1]).   x (N, H, d), cos and sin (N, d/2), or narrower"""
    x, rest = np.split(x, [2 * cos.shape[-1]], axis=-1)
    even, odd, cos, sin = x[..., 0::2], x[..., 1::2], cos[:, None], sin[:, None]
    turned = np.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1).reshape(x.shape)
    return np.concatenate([turned, rest], axis=-1)


def _turn_halves(x: Array, cos: Array, first_sin: Array, second_sin: Array) -> Array:
    """RoPE with a sin of its own for each half of a head."""
    first, second = layers.apply_rope(x, cos, first_sin), layers.apply_rope(x, cos, second_sin)
    return np.where(np.arange(x.shape[-1]) < cos.shape[-1], first, second)


ROPES: list[Row] = [
    (1.1, "RoPE takes sin for cos as well", lambda x, c, s: layers.apply_rope(x, s, s)),
    (1.1, "RoPE takes cos for sin as well", lambda x, c, s: layers.apply_rope(x, c, c)),
    (1.1, "RoPE's cos and sin are exchanged", lambda x, c, s: layers.apply_rope(x, s, c)),
    (1, "RoPE rotates in the other direction", lambda x, c, s: layers.apply_rope(x, c, -s)),
    (1.2, "RoPE turns the pairs (2j, 2j+1) the other way", lambda x, c, s: interleaved(x, c, -s)),
    (1.1, "the sin terms of RoPE are left out", lambda x, c, s: layers.apply_rope(x, c, 0 * s)),
    (1.1, "RoPE adds the sin term to the first half of a head, without its minus", lambda x, c, s: _turn_halves(x, c, -s, s)),
    (1.1, "RoPE subtracts the sin term from both halves of a head", lambda x, c, s: _turn_halves(x, c, s, -s)),
]


def _ropes(step: Step) -> Iterator[Row]:
    """Other angles for the two halves of each head."""
    p, f = _angles(step)
    n, half = len(p), len(f)
    theta, hidden = own_rope(step).theta, step.setting.config.hidden_size
    d, j = 2 * half, np.arange(half, dtype=np.float64)
    positions = {
        "in reverse": p[::-1], "halved and rounded down": p // 2, "those of the last token for all": p * 0 + n - 1,
        **{f"counted mod {m}": p % m for m in range(2, 9)},
    }
    frequencies = {
        "theta^(-j/d), half the exponent": theta ** (-j / d),
        "theta^(-2j/D), over the hidden size": theta ** (-2 * j / hidden),
        "theta^(-4j/d), twice the exponent": theta ** (-4 * j / d),
        "in reverse": f[::-1],
        "theta^(-2(j+1)/d), one too far": theta ** (-2 * (j + 1) / d),
        "theta^(-2j/(d-2))": theta ** (-2 * j / max(d - 2, 1)),
        "theta^(2j/d), growing": theta ** (2 * j / d),
        "divided by 2 pi": f / (2 * np.pi),
        "times 2 pi": f * 2 * np.pi,
    }

    def by(angles: Array, size: int | None = None) -> Formula:
        return lambda x, c, s: _turn(x, angles, size)

    yield from ((1, f"RoPE's positions are {words}", by(places * f)) for words, places in positions.items())
    yield from ((1, f"RoPE's frequencies are {words}", by(p * other)) for words, other in frequencies.items())
    for part in sorted({d // 2, d // 4, 3 * d // 4 // 2 * 2, d - 2} - {0}):
        text = f"RoPE turns only the first {part} of the {d} numbers of a head"
        yield 1, f"{text}, with frequencies of their own", by(p * theta ** (-2 * np.arange(part // 2) / part), part)
        yield 1, f"{text}, with the first frequencies", by(p * f[: part // 2], part)
        yield 1.1, f"RoPE leaves out the pairs from {part // 2} on", by(p * f * (j < part // 2))
        yield 1.1, f"RoPE leaves out the pairs before {part // 2}", by(p * f * (j >= part // 2))
    if 2 * half < step.inputs[0].shape[-1]:
        yield 1, f"RoPE turns the last {2 * half} numbers of a head, not the first", lambda x, c, s: np.roll(layers.apply_rope(np.roll(x, 2 * half, -1), c, s), -2 * half, -1)
    yield from ROPES
    yield 1.2, "RoPE takes the head's number for the position", lambda x, c, s: _turn(x.swapaxes(0, 1), np.arange(x.shape[1])[:, None] * f).swapaxes(0, 1)


# -- products ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def matrix(w: LinearWeight) -> NDArray[np.float32]:
    """The matrix itself, (out, K); a ternary one in integers."""
    if w.bit_linear is not None:
        return w.bit_linear.ternary().astype(np.float32)
    return w.rows(slice(None), np.float32)


def product(x: Array, w: Array) -> Array:
    return wide(x) @ wide(w).T


CODES = {
    "0 and +1 exchanged": (-1, 1, 0), "-1 and 0 exchanged": (0, -1, 1), "taken as 0, 1, 2": (0, 1, 2),
    "shifted: 0, +1, -1": (0, 1, -1), "shifted: +1, -1, 0": (1, -1, 0), "without zeros: -1, +1, +1": (-1, 1, 1), "without zeros: -1, -1, +1": (-1, -1, 1),
    "taken without their sign": (1, 0, 1), "without -1": (0, 0, 1), "without +1": (-1, 0, 0),
}


TERNARY_MATRICES: list[Row] = [(1, f"the codes of {{w}} are {words}", lambda m, codes=codes: np.array(codes, dtype=np.float32)[m.astype(int) + 1]) for words, codes in CODES.items()]


def _shifted_with_sign(are_highest: Callable[[Array], Array]) -> Change:
    """Codes in the two highest bits of a byte, 2 for +1, that are shifted down with their sign: -2, so -3."""
    return lambda m: np.where(are_highest(m) & (m > 0), np.float32(-3), m)


TERNARY_MATRICES += [
    (1.2, f"the codes of {{w}} in the highest bits of a byte, of {words}, are shifted with their sign, so that +1 becomes -3", _shifted_with_sign(are_highest))
    for words, are_highest in (
        ("the last quarter of rows", lambda m: np.arange(len(m))[:, None] >= len(m) // 4 * 3), ("each fourth weight", lambda m: np.arange(m.shape[1]) % 4 == 3),
        ("the first 32 of 128 weights", lambda m: (np.arange(m.size).reshape(-1, 128) % 128 < 32).reshape(m.shape)),
    )
]


def _in_parts(size: int, limit: Change, running: bool = False) -> Formula:
    """Sums of `size` products each, of which limit() is taken, then added; running: limit() of each sum so far."""

    def formula(x: Array, w: LinearWeight) -> Array:
        m = matrix(w)
        total = np.zeros((len(x), len(m)))
        for start in range(0, x.shape[1], size):
            part = product(x[:, start : start + size], m[:, start : start + size])
            total = limit(total + part) if running else total + limit(part)
        return total

    return formula


def _saturated(bits: int) -> Change:
    return lambda y: np.clip(y, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _wrapped(bits: int) -> Change:
    return lambda y: (y + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


LIMITS = (("wrap round", _wrapped), ("saturate", _saturated))
PARTIAL_SUMS: list[Row] = [
    *((1.2, f"sums of {size} products {words} at {bits} bits, before they are added", _in_parts(size, limit(bits))) for bits, sizes in ((8, (2, 4, 8, 16, 32, 64)), (16, (512, 1024, 2048)))
        for size in sizes for words, limit in LIMITS),
    *((1.2, f"accumulators saturate at {bits} bits after each {size} products", _in_parts(size, _saturated(bits), running=True)) for bits, sizes in ((8, (4, 8, 16, 32)), (16, (16, 32, 64, 128))) for size in sizes),
]
ACCUMULATORS: list[Row] = [
    (1, f"accumulators {words} at {bits} bits", limit(bits)) for bits in range(16, 7, -1) for words, limit in LIMITS
]


def _products(step: Step) -> Iterator[Description]:
    """Another matrix, other columns, another table of codes."""
    x, w = step.inputs[:2]
    ternary, n = step.name.endswith("hook_acc_int32"), x.shape[1]
    matrices = list(TERNARY_MATRICES) if ternary else []
    matrices.append((1, "{w} is transposed", np.transpose) if w.shape[0] == w.shape[1] else (1.2, "{w} is stored the other way round: (in, out)", lambda m: m.reshape(m.shape[::-1]).T))
    for cost, text, change in matrices:
        yield Description(cost, text, instead(lambda x, w, change=change: product(x, change(matrix(w)))))
    if ternary:
        yield from (Description(cost, text, after(change)) for cost, text, change in ACCUMULATORS)
        yield from (Description(cost, text, instead(formula)) for cost, text, formula in PARTIAL_SUMS)
    else:
        yield from _from_norm(step)
    yield from _fused(step)
    yield from _scale_maps(w)
    yield from _whole_tiles()
    if not step.name.startswith("lm_head"):
        yield from (Description(1.3, f"rows of {{w}} are {by} too far: a tile's place is wrong", after(partial(np.roll, shift=by, axis=1))) for k in (2, 4, 8, 16, 32, 64) for by in (k, -k) if k < w.shape[0] // 2)
    for k in sorted({n - n % 256, n - n % 128, n // 2, n // 4, 3 * n // 4, *(n - b for b in (1, 2, 3, 4, 8, 16, 32, 64, 128, 256))}):
        if 0 < k < n:
            yield Description(1.1, f"the sums stop after {k} of {n} inputs", scale_inputs(0, k, 1, others=0))
            yield Description(1.2, f"the sums start at input {n - k}", scale_inputs(n - k, None, 1, others=0))
    yield Description(1.3, "every second input is left out", before(0, lambda x: x * (np.arange(x.shape[1]) % 2 == 0).astype(x.dtype)))
    for k in (8, 16, 32, 64, 128):
        for first in range(0, n, k) if n % k == 0 and n > k else ():
            yield Description(1.4, f"inputs {first} to {first + k - 1} are left out", scale_inputs(first, first + k, 0))
            yield Description(1.5, f"inputs {first} to {first + k - 1} count twice", scale_inputs(first, first + k, 2))
    yield from with_part(1.1, "the matrix of {} is taken", step, lambda other: isinstance(other, type(w)) and other.shape == w.shape, lambda compute, other, x, w, *rest: compute(x, other, *rest))
    embedding = step.setting.weights.embedding
    if embedding is not w and embedding.shape == w.shape and not ternary:
        yield Description(1, "the embedding is taken for {w}, as if they were tied", instead(lambda x, w: product(x, matrix(embedding))))


# Linears that many files hold as one matrix, in the order of its parts.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def _fused_rows(order: Callable[[list[NDArray[np.int64]], int, int], Any]) -> Edit:
    """A product whose rows are cut from a fused matrix in another order.

    order(the rows of each part, heads of q for a kv head, head_dim): all rows, in the order in which they are taken.
    """

    def edit(step: Step, compute: Edit, x: Array, w: LinearWeight) -> Array:
        own, layer, cfg = step.name.split(".")[-2], layer_weights(step), step.setting.config
        names = next(names for names in FUSED if own in names)
        matrices = [matrix(getattr(layer, name)) for name in names]
        stops = np.cumsum([len(m) for m in matrices])
        parts = np.split(np.arange(stops[-1]), stops[:-1])
        rows = order(parts, cfg.num_attention_heads // cfg.num_key_value_heads, cfg.head_dim)
        return product(x, np.concatenate(matrices)[rows[parts[names.index(own)]]]).astype(step.result.dtype)

    return edit


def _by_kv_head(parts: list[NDArray[np.int64]], group: int, d: int) -> NDArray[np.int64]:
    """q's heads of a kv head, its k, its v, then those of the next one."""
    q, k, v = parts
    return np.concatenate([x.reshape(len(k) // d, -1) for x in (q, k, v)], axis=1).reshape(-1)


def _by_pair(parts: list[NDArray[np.int64]], group: int, d: int) -> NDArray[np.int64]:
    return np.stack(parts, axis=1).reshape(-1)


def _fused(step: Step) -> Iterator[Description]:
    names = next((names for names in FUSED if step.name.split(".")[-2] in names), ())
    orders_of: list[tuple[str, Callable[..., Any]]] = []
    for order in permutations(range(len(names))) if names else ():
        if list(order) != sorted(order):
            words = ", ".join(names[i] for i in order)
            orders_of.append((f"taken as if they were in the order {words}", lambda p, group, d, order=order: np.argsort(np.concatenate([p[i] for i in order]))))
    if len(names) == 3:
        orders_of += [("stored by kv head (its queries, its k, its v) and read part by part", _by_kv_head), ("stored part by part and read by kv head", lambda *a: np.argsort(_by_kv_head(*a)))]
    elif names:
        orders_of += [("stored in turn, gate and up, and read as halves", _by_pair), ("stored as halves and read in turn, gate and up", lambda *a: np.argsort(_by_pair(*a)))]
    for words, rows in orders_of:
        yield Description(1.2, f"rows of {' and '.join(names)}, in one matrix, are {words}", _fused_rows(rows))


def _absmean_again(axis: int | None, size: int = 1) -> Change:
    """A matrix of few values ternary once more, with the mean of |w| along `axis` of blocks of `size` columns."""

    def change(m: Array) -> Array:
        blocks = m.reshape(len(m), -1, size) if size > 1 else m
        scale = np.maximum(np.abs(wide(blocks)).mean(axis, keepdims=True), 1e-30)
        return (np.clip(np.rint(blocks / scale), -1, 1) * scale).reshape(m.shape)

    return change


def _whole_tiles_only(y: Array, size: int) -> Array:
    return y * (np.arange(y.shape[1]) < y.shape[1] // size * size)


def _whole_tiles() -> Iterator[Description]:
    """A kernel that has no code for what is left behind the last whole tile of rows."""
    for size in (4, 8, 16, 32, 64, 128, 256):
        yield Description(1.2, f"rows of {{w}} behind the last whole tile of {size} give zeros", after(partial(_whole_tiles_only, size=size)))


def _from_norm(step: Step) -> Iterator[Description]:
    """The input of a product without the weight of the norm that it comes from."""
    x = step.inputs[0]
    names = [name for name, other in step.seen.items() if name.endswith("hook_normalized") and np.may_share_memory(x, other)]
    weight = norms_of(step)[names[-1].rpartition(".")[0]].weight if names else None
    if weight is not None and weight.size == x.shape[1]:
        yield Description(1.2, "its input is not multiplied by the norm's weight", before(0, lambda x: x / weight))
        yield Description(1.2, "its input is multiplied by the norm's weight twice", before(0, lambda x: x * weight))


def with_other(field: str, change: Formula) -> Edit:
    """The step's weight with another array in the place of this one."""

    def edit(w: Any) -> Any:
        array = getattr(w, field)
        return replace(w, **{field: np.ascontiguousarray(change(array), dtype=array.dtype)})

    return before(1, edit)


def _scale_maps(w: LinearWeight) -> Iterator[Description]:
    """Scales of groups of weights, (rows, groups), read at other places."""
    scales = getattr(w, "scales", None)
    if not isinstance(scales, np.ndarray) or scales.ndim != 2:
        return
    group = w.shape[1] // scales.shape[1]
    for words, again in (("matrix", _absmean_again(None)), ("row", _absmean_again(1)), (f"group of {group}", _absmean_again(2, group))):
        text = f"absmean was taken again, of each {words} of {{w}}, which was ternary already"
        yield Description(1.1, text, instead(lambda x, w, again=again: product(x, again(matrix(w)))))
    for words, codes in (("0, 1 and 2", 1), ("-2, -1 and 0", -1)):
        yield Description(1.1, f"the codes of {{w}} are taken as {words}", instead(lambda x, w, by=codes: product(x, matrix(w) + by * np.repeat(w.scales.astype(np.float32), group, 1))))
    maps: list[Row] = [(1.2, f"are those of {abs(by)} rows {'before' if by > 0 else 'after'}", partial(np.roll, shift=by, axis=0)) for size in (1, 2, 4, 8, 16, 32, 64, 128) for by in (size, -size) if size < len(scales)]
    maps += [(1.2, f"are those of the {words} row", lambda s, i=i: s[[i] * len(s)]) for words, i in (("first", 0), ("last", -1))]
    if scales.shape[1] > 1:
        maps += [(1.2, f"of a row are those of its {words} group", lambda s, i=i: s[:, [i] * s.shape[1]]) for words, i in (("first", 0), ("last", -1))]
        maps.append((1.2, "of a row are all their mean", lambda s: np.broadcast_to(wide(s).mean(1, keepdims=True), s.shape)))
        for words, order in orders(scales.shape[1]):
            maps.append((1.2, f"of a row are {words}", partial(np.take, indices=order(scales.shape[1]), axis=1)))
        maps += [(1.1, "are stored group by group and read row by row", lambda s: s.reshape(s.shape[::-1]).T), (1.1, "are stored row by row and read group by group", lambda s: s.T.reshape(s.shape))]
    for cost, words, change in maps:
        yield Description(cost, f"the scales of {{w}} {words}", with_other("scales", change))


DEQUANTIZED: list[Row] = [  # acc * (w_scale / x_scale): other scales, other places for them
    (1, "the scale of {w} is applied once more", lambda a, w, s: a * (w.w_dequant_scale**2 / s)),
    (1, "the activation scale is left out", lambda a, w, s: a * w.w_dequant_scale),
    (1, "the result is multiplied by the activation scale, not divided", lambda a, w, s: a * w.w_dequant_scale * s),
    (1.1, "the activation scale is applied once more", lambda a, w, s: a * (w.w_dequant_scale / s / s)),
    (1.1, "both scales are left out", lambda a, w, s: a),
    (1.2, "the largest activation scale is taken for all tokens", lambda a, w, s: a * (w.w_dequant_scale / s.max())),
    (1.1, "absmean was taken again, of each row of {w}, which was ternary already: its scale times the row's share of non-zeros", lambda a, w, s: a * (w.w_dequant_scale * np.abs(matrix(w)).mean(1) / s)),
]


def _merged(step: Step) -> Iterator[Description]:
    """One scale for the linears that are computed as one matrix."""
    own = step.name.split(".")[-2]
    names = next((names for names in FUSED if own in names), ())
    for words, density in (("the mean of their scales", False), ("mean |w| of their ternary matrices together", True)):
        def scale(step: Step, density: bool = density) -> float:
            ws = [w.bit_linear for name in names if (w := getattr(layer_weights(step), name, None)) is not None]
            sizes = [w.shape[0] for w in ws]
            return float(np.average([w.w_dequant_scale * (np.abs(matrix(w)).mean() if density else 1) for w in ws], weights=sizes))

        if names:
            yield Description(1.2, f"{' and '.join(names)} share one scale, {words}", lambda step, compute, acc, w, s, scale=scale: (acc * (np.float32(scale(step)) / s)).astype(np.float32))


# -- all descriptions of a step ----------------------------------------------------------------------------------------

FORMULAS: dict[str, Callable[[Step], Iterable[Row]]] = {
    "hook_scale": lambda step: LENGTHS, "hook_normalized": lambda step: NORMS, "hook_x_scale": lambda step: ACTIVATION_SCALES, "hook_x_int8": lambda step: INT8_RULES,
    "hook_rot_q": _ropes, "hook_rot_k": _ropes, "hook_pattern": lambda step: PATTERNS, "hook_post": _gates,
    "hook_resid_mid": lambda step: RESIDUALS, "hook_resid_post": lambda step: RESIDUALS,
}  # the tables by kind of step


def own_descriptions(step: Step) -> Iterator[Description]:
    """Other formulas of this step."""
    kind, x = step.name.rpartition(".")[2], step.inputs
    rows = [*FORMULAS[kind](step)] if kind in FORMULAS else []
    of_linear = len(x) > 1 and isinstance(x[1], LinearWeight) and kind != "hook_embed"
    if of_linear and len(x) == 3:
        rows += DEQUANTIZED
        yield from _whole_tiles()
        yield from _merged(step)
    if kind == "hook_normalized":
        width = len(x[2])
        sizes = [size for size in sorted({step.setting.config.head_dim, 16, 32, 64, 128, width // 2}) if width % size == 0 and size < width]
        eps = norms_of(step)[step.name.rpartition(".")[0]].eps
        rows += [(1.2, f"each {size} columns are divided by their own length", lambda x, r, w, size=size: x / _lengths_of_blocks(x, size, eps) * w) for size in sizes]
        rows.append((1.2, "the weight multiplies the norm's input, before its length is taken", lambda x, r, w: layers.rms_norm(x * w, np.ones_like(w), eps)))
        rows.append((1.4, "the norm is applied twice", lambda x, r, w: layers.rms_norm(x / r * w, w, eps)))
    if kind == "hook_scale" and (heads := len(x[0]) // len(step.setting.tokens)) > 1:  # a norm over heads
        rows.append((1.2, "the mean of squares runs over all heads of a token together", lambda x, eps: np.repeat(np.sqrt(_ms(x.reshape(len(x) // heads, -1)) + eps), heads, 0)))
    yield from (Description(cost, text, instead(formula)) for cost, text, formula in rows)
    if kind == "hook_normalized":
        yield from with_part(1.1, "the weight of {} is taken", step, lambda other: isinstance(other, np.ndarray) and other.shape == x[2].shape, lambda compute, other, x, r, w: compute(x, r, other))
    if kind == "hook_attn_scores":
        yield from _scores(step)
    if kind == "hook_z":
        yield from _kv_maps("the values")
    if kind in ("hook_resid_mid", "hook_resid_post"):
        for norm in norms_of(step).values():
            if norm.weight.shape == step.result.shape[1:] and norm.name.startswith(step.name.rpartition(".")[0] + "."):
                for words, index in (("the sum", None), ("{in0}", 0), ("{in1}", 1)):
                    yield Description(1.2, f"{words} is normed, with the weight of {norm.name.split('.')[-1]}", normed_by(index, norm.name, step.name))
    if kind == "hook_v":
        yield Description(1.1, "v is turned by RoPE as well", after(lambda v: _turn(v, np.arange(len(v))[:, None] * own_rope(step).frequencies(step.setting.config.rotary_size))))
    if of_linear and len(x) == 3:
        yield from with_part(1.1, "the scale of {} is taken", step, lambda other: isinstance(other, LinearWeight) and other.bit_linear is not None, lambda compute, other, acc, w, s: acc.astype(np.float32) * (other.bit_linear.w_dequant_scale / s))
    elif of_linear:
        yield from _products(step)
    if kind == "hook_embed":
        yield from (Description(1, f"the row of the {words} id is taken", take_row(shift)) for words, shift in (("next", 1), ("previous", -1)))
        if step.setting.weights.lm_head is not x[0] and step.setting.weights.lm_head.kind == "dense":
            yield Description(1, "the rows of lm_head are taken for those of the embedding", before(0, lambda w: step.setting.weights.lm_head))


def descriptions(step: Step) -> Iterator[Description]:
    """Every description of a step that has no unknown constant. Those of the step's own formula come first."""
    yield from own_descriptions(step)
    for cost, text, change in changes(heads_apart(step.result, step), is_by_head(step.name)):
        yield Description(cost, text.replace("{x}", "{it}"), after(change))
    arrays = [i for i, x in enumerate(step.inputs) if isinstance(x, np.ndarray) and x.ndim > 1 and x.dtype.kind in "fi"]
    arrays = [i for i in arrays if i == 0 or not step.name.endswith(("hook_rot_q", "hook_rot_k"))]
    for index in arrays:
        for cost, text, change in changes(heads_apart(step.inputs[index], step), step.name.endswith("hook_pattern")):
            yield Description(cost + 0.2, text.replace("{x}", f"{{in{index}}}"), before(index, change))
    for name, other in reversed(list(step.seen.items())):
        far = 0.0 if name.split(".")[:2] == step.name.split(".")[:2] else 0.5
        if name == step.name or other.dtype.kind != step.result.dtype.kind or name.endswith("hook_x_scale"):
            continue
        if other.size == step.result.size:
            yield Description(1 + far, f"{{it}} is {{{name}}} itself", from_run(None, name, step.name))
        for index in arrays:
            if other.size == step.inputs[index].size and other.dtype == step.inputs[index].dtype:
                yield Description(1.1 + far, f"{{{name}}} is taken for {{in{index}}}", from_run(index, name, step.name))
    if len(arrays) == 2 and step.inputs[arrays[0]].shape == step.inputs[arrays[1]].shape:
        yield Description(1.1, "{in0} and {in1} are exchanged", lambda s, f, *a: f(a[1], a[0], *a[2:]))


# -- constants ---------------------------------------------------------------------------------------------------------


def _capped(c: float, x: Array) -> Array:
    return c * np.tanh(wide(x) / c)


def _leaky(c: float, x: Array) -> Array:
    return np.where(x > 0, x, c * wide(x))


def _gelu(x: Array, slope: float = math.sqrt(2 / math.pi), cubic: float = 0.044715) -> Array:
    x = wide(x)
    return 0.5 * x * (1 + np.tanh(slope * (x + cubic * x**3)))


CONSTANTS: dict[str, list[ConstantRow]] = {
    "hook_scale": [
        (1, "eps is {c} where {right} belongs", lambda c, x, eps: np.sqrt(_ms(x) + c), None, True, (1e-12, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)),
        (1.3, "{c} is added to the length", lambda c, x, eps: np.sqrt(_ms(x)) + c, None, True),
        (1.4, "the sum of squares is divided by {c} times its number of terms", lambda c, x, eps: np.sqrt(_ms(x) / c + eps), 1, True),
    ],
    "hook_normalized": [
        (1.2, "the weight of the norm is taken to the power {c}", lambda c, x, r, w: x / r * np.sign(w) * np.abs(w) ** c, 1),
        (1.2, "{c} is added to the weight of the norm", lambda c, x, r, w: x / r * (w + c), 0, False, (1,)),
        (1.3, "the length is taken to the power {c}", lambda c, x, r, w: x / r**c * w, 1),
    ],
    "hook_x_scale": [
        (1, "the activation scale is {c} / max|x|, where 127 belongs", lambda c, x: np.float32(c) / _absmax(x), 127, True),
        (1.2, "the floor of max|x| is {c}, not 1e-5", lambda c, x: 127 / np.maximum(np.abs(x).max(-1, keepdims=True), c), 1e-5, True, (1e-3, 0.1, 1)),
        (1.3, "{c} is added to max|x|", lambda c, x: 127 / (np.abs(x).max(-1, keepdims=True) + c), 1e-5, True, (1e-3, 0.1)),
    ],
    "hook_x_int8": [
        (1.2, "{c} is added before the rounding", lambda c, x, s: _int8(x * s + c), 0),
        (1.2, "x * scale is multiplied by {c} before the rounding", lambda c, x, s: _int8(x * s * np.float32(c)), 1, True),
    ],
    "hook_pattern": [
        (1, "scores are multiplied by {c} in the softmax", lambda c, s: _softmax(s * np.float32(c)), 1, True),
        (1.2, "{c} is added to the softmax's sum, an attention sink", lambda c, s: _softmax(s, extra=c), 0, False, (1,)),
        (1.3, "{c} is added to the softmax's sum after the maximum is subtracted", lambda c, s: _e(s) / (_e(s).sum(-1, keepdims=True) + c), 0, False, (0.1, 1)),
        (1.2, "scores are capped by {c} tanh(s / {c}) before the softmax", lambda c, s: _softmax(np.where(s > -np.inf, _capped(c, s), s)), 1e4, True, (1, 5, 30)),
        (1.3, "the weight of the first token has {c} added to its score", lambda c, s: _softmax(s + c * (np.arange(s.shape[2]) == 0)), 0),
        (1.2, "the distance times {c} is subtracted from the scores", lambda c, s: _softmax(s - c * _distance(s)), 0),
    ],
    "hook_post": [
        (1.1, "the activation's argument is multiplied by {c}", lambda c, g, u, n: _act(wide(g) * c, n) * u, 1, False, (0.5, 2)),
        (1.1, "the activation is x sigmoid({c} x)", lambda c, g, u, n: wide(g) * _sig(c * wide(g)) * u, 1.5, False, (0.5, 3)),
        (1.1, "the gate is clipped at {c} from above", lambda c, g, u, n: _act(np.minimum(wide(g), c), n) * u, 1e3, True, (0.1, 0.5, 1, 2, 5)),
        (1.1, "gate and up are clipped to {c}", lambda c, g, u, n: _act(np.clip(wide(g), -c, c), n) * np.clip(u, -c, c), 1e3, True, (0.1, 0.5, 1, 2, 5)),
        (1.1, "up is clipped to {c}", lambda c, g, u, n: _act(g, n) * np.clip(u, -c, c), 1e3, True, (0.1, 0.5, 1, 2, 5)),
        (1.1, "the activation is a leaky relu of slope {c}", lambda c, g, u, n: _leaky(c, g) * u, 0),
        (1.2, "the activation is the square of a leaky relu of slope {c}", lambda c, g, u, n: np.square(_leaky(c, g)) * u, 0, False, (0.3,)),
        (1.2, "{c} is added to up", lambda c, g, u, n: _act(g, n) * (wide(u) + c), 0),
        (1.2, "{c} is added to the gate", lambda c, g, u, n: _act(wide(g) + c, n) * wide(u), 0),
        (1.3, "{c} is added to the activation", lambda c, g, u, n: (_act(g, n) + c) * wide(u), 0),
        (1.3, "the activation is relu to the power {c}", lambda c, g, u, n: np.maximum(wide(g), 0) ** c * u, 2, True, (1.5, 3)),
    ],
    "hook_log_decay": [
        (1.2, "softplus is {c} at most in the decay", lambda c, a, w: -w.decay * np.minimum(np.logaddexp(0, wide(a) + w.decay_bias), c), 1e3, True, (0.1, 0.5, 1, 2)),
        (1.2, "softplus is {c} at least in the decay", lambda c, a, w: -w.decay * np.maximum(np.logaddexp(0, wide(a) + w.decay_bias), c), 1e-6, True, (0.1, 0.5, 1)),
        (1.2, "softplus is that of {c} x, divided by {c}", lambda c, a, w: -w.decay * np.logaddexp(0, c * (wide(a) + w.decay_bias)) / c, 1, True, (2,)),
    ],
    "hook_acc_int32": [
        (1.1, "{c} is added to the inputs, a zero point that is not taken off the sums", lambda c, x, w: product(wide(x) + c, matrix(w)), 0, False, (128, -128, 127)),
        (1.2, "{c} times the sum of the inputs is added to the accumulators: codes have an offset", lambda c, x, w: product(x, matrix(w)) + c * wide(x).sum(1, keepdims=True), 0, False, (1, -1)),
    ],
}
GELUS: list[ConstantRow] = [
    (1, "gelu's tanh is of x + {c} x^3 where 0.044715 belongs", lambda c, g, u, n: _gelu(g, cubic=c) * u, 0.044715),
    (1, "gelu's tanh is multiplied by {c} inside where sqrt(2 / pi) belongs", lambda c, g, u, n: _gelu(g, slope=c) * u, math.sqrt(2 / math.pi), True),
]
SCORES: list[ConstantRow] = [  # a change of the step's result
    (1, "scores are multiplied by {c} more than 1/sqrt(head_dim)", lambda c, x: x * np.float32(c), 1, True, (0.1, 4)),
    (1.1, "scores are capped by {c} tanh(s / {c})", lambda c, x: np.where(x > -np.inf, c * np.tanh(x / np.float32(c)), x), 1e4, True, (1, 5, 30)),
    (1.2, "the distance times {c} is subtracted from the scores, as in ALiBi", lambda c, x: x - np.float32(c) * _distance(x) * (x > -np.inf), 0),
    (1.3, "{c} is added to all scores that are seen", lambda c, x: np.where(x > -np.inf, x + np.float32(c), x), 0),
    (1.3, "scores are clipped to {c}", lambda c, x: np.where(x > -np.inf, np.clip(x, -c, c), x), 1e3, True, (0.1, 1, 5, 10)),
]
SUMS: list[ConstantRow] = [
    (1.2, "{it} is multiplied by {c}", lambda c, x: wide(x) * c, 1, False, (2,)),
    (1.3, "{c} is added to the accumulators", lambda c, x: x + round(c), 0),
]
FLOATS: list[ConstantRow] = [
    (1.1, "{it} is multiplied by {c}", lambda c, x: x * x.dtype.type(c), 1, False, (0.1, 8)),
    (1.3, "{c} is added to {it}", lambda c, x: x + x.dtype.type(c), 0),
    (1.3, "{it} is {c} at most", lambda c, x: np.minimum(x, c), 1e4, False, (0, 0.1, 1, 10)),
    (1.3, "{it} is {c} at least", lambda c, x: np.maximum(x, c), -1e4, False, (-0.1, -1, -10)),
    (1.3, "{it} is clipped to {c}", lambda c, x: np.clip(x, -c, c), 1e4, True, (0.01, 0.1, 1, 10)),
    (1.3, "{it} is capped by {c} tanh(x / {c})", _capped, 1e4, True, (0.1, 1, 10, 30)),
]


def _rope_constants(step: Step) -> list[ConstantRow]:
    p, f = _angles(step)
    e, theta = np.arange(len(f)) / len(f), own_rope(step).theta
    return [
        (1.2, "RoPE's cos is multiplied by {c}", lambda c, x, co, si: layers.apply_rope(x, co * np.float32(c), si), 1),
        (1.2, "RoPE's sin is multiplied by {c}", lambda c, x, co, si: layers.apply_rope(x, co, si * np.float32(c)), 1),
        (1.2, "RoPE's cos and sin are multiplied by {c}", lambda c, x, co, si: layers.apply_rope(x, co, si) * c, 1),
        (1, "RoPE's theta is {c} where {right} belongs", lambda c, x, co, si: _turn(x, p * c**-e), theta, True, (1e3, 1e4, 1e5, 5e5, 1e6, 1e2)),
        (1.1, "RoPE's positions are multiplied by {c}", lambda c, x, co, si: _turn(x, p * c * f), 1, True, (0.1, 0.25, 0.5, 1.5, 2, 4)),
        (1.1, "{c} is added to RoPE's positions", lambda c, x, co, si: _turn(x, (p + c) * f), 0, False, (-1, 2, 3, 4, 5, 7, 10)),
    ]


def families(step: Step) -> Iterator[Family]:
    """The constants of a step's formula, and those that could be in it."""
    kind = step.name.rpartition(".")[2]
    rotates, of_scores = kind in ("hook_rot_q", "hook_rot_k"), kind == "hook_attn_scores"

    def of(rows: Iterable[ConstantRow], make: Callable[[Formula], Edit]) -> Iterator[Family]:
        def edit(formula: Formula) -> Callable[[float], Edit]:
            return lambda c: make(partial(formula, c))

        for cost, text, formula, right, *search in rows:
            right = float(step.inputs[1]) if right is None else right
            yield Family(cost, text.replace("{right}", f"{right:g}"), edit(formula), right, *search)

    yield from of(_rope_constants(step) if rotates else CONSTANTS.get(kind, ()), instead)
    if kind == "hook_post" and step.inputs[2] == "gelu_tanh":
        yield from of(GELUS, instead)
    for index, x in enumerate(step.inputs):
        if of_scores and index < 2:
            yield from of([(1.2, f"{{in{index}}} is normalised to the length {{c}}", lambda c, x: x / np.sqrt(_ms(x)) * c / math.sqrt(x.shape[-1]), 1, True)], partial(before, index))
        elif isinstance(x, np.ndarray) and x.ndim > 1 and x.dtype.kind == "f" and not (rotates or of_scores or kind == "hook_pattern"):
            yield from of([(1.2, f"{{in{index}}} is multiplied by {{c}}", lambda c, x: x * x.dtype.type(c), 1, False, (0.1, 8))], partial(before, index))
    if of_scores or kind == "hook_acc_int32":
        yield from of(SCORES if of_scores else SUMS, after)
    elif step.result.dtype.kind == "f":
        yield from of(FLOATS, after)


def constants(step: Step) -> dict[str, float]:
    """The numbers that belong to this step, by their names: a constant is not one of numbers from elsewhere."""
    cfg, place, kind = step.setting.config, step.name.split("."), step.name.rpartition(".")[2]
    w = step.inputs[1] if len(step.inputs) > 1 else None
    numbers: dict[str, float] = {"2": 2, "hidden_size": cfg.hidden_size, "pi": math.pi}
    if "resid" in kind or kind.endswith(("attn_out", "mlp_out")) or "o_proj" in step.name or "down_proj" in step.name:
        numbers["layers"] = cfg.num_hidden_layers
    if place[0] == "blocks":
        numbers["layer number + 1"] = int(place[1]) + 1
    if ".attn" in step.name or "attn_out" in kind or "resid_mid" in kind:
        heads, kv_heads = cfg.num_attention_heads, cfg.num_key_value_heads
        numbers |= {"head_dim": cfg.head_dim, "heads": heads, "kv heads": kv_heads, "heads per kv head": heads / kv_heads}
        numbers |= {"tokens": len(step.setting.tokens), "ln 2": math.log(2), "255": 255, "theta": own_rope(step).theta}
    elif place[0] == "blocks":
        numbers["intermediate_size"] = cfg.intermediate_size
    else:
        numbers |= {"vocab_size": cfg.vocab_size, "embedding_scale": cfg.embedding_scale}
    if kind in ("hook_scale", "hook_normalized"):
        numbers["eps"] = cfg.norm_eps
    if "_proj." in step.name and kind != "hook_scale":
        numbers |= {"127": 127, "128": 128, "255": 255}
    if isinstance(w, LinearWeight) and w.bit_linear is not None:
        numbers |= {"this matrix's scale": float(w.bit_linear.w_dequant_scale), "this matrix's share of non-zeros": float(np.abs(matrix(w)).mean())}
    numbers |= family_of(cfg).constants(cfg)
    return {name: float(value) for name, value in numbers.items() if value not in (0, 1)}


Constant = Callable[[dict[str, float]], float]
Form = tuple[str, Callable[..., float]]
SIMPLE: tuple[Form, ...] = (("{}", float), ("sqrt({})", math.sqrt), ("1/sqrt({})", lambda x: x**-0.5), ("({})^2", lambda x: x * x))
RATIOS: tuple[Form, ...] = (("{} / {}", lambda x, y: x / y), ("sqrt({} / {})", lambda x, y: abs(x / y) ** 0.5))


def names_of(value: float, step: Step, near: float) -> Iterator[tuple[str, Constant]]:
    """What a constant may be, (words, its value by `constants`), simplest first: within a share `near` of the value."""
    numbers, sign = constants(step), math.copysign(1.0, value)

    def fixed(digits: int) -> tuple[str, Constant]:
        x = float(f"{value:.{digits}g}") if digits else 0.0
        return f"{x:.7g}", lambda _: x

    def named(form: Form, *names: str) -> tuple[str, Constant]:
        return "-" * (sign < 0) + form[0].format(*names), lambda g: sign * form[1](*(g[name] for name in names))

    forms = [fixed(0), fixed(1), fixed(2), *(named(("1/{}", lambda x: 1 / x), name) for name in numbers)]
    forms += [*(named(form, name) for name in numbers for form in SIMPLE), fixed(3)]
    forms += [named(form, name) for name in numbers for form in (("({} - 1)", lambda x: x - 1), ("({} + 1)", lambda x: x + 1))]
    forms += [named(form, a, b) for a in numbers for b in numbers if a != b for form in RATIOS]
    values: list[float] = []
    for words, constant in [*forms, fixed(4), fixed(5), fixed(6)]:
        exact = constant(numbers)
        close = abs(exact - value) <= near * max(abs(value), 1e-30) or (exact == 0 and abs(value) < near)
        if close and exact not in values:
            values.append(exact)
            yield (words if words == f"{exact:.7g}" else f"{words} = {exact:.6g}"), constant
