"""Edits that round: a tensor of a step, a number between its inputs and its result, or its matrix, in a narrow format.

A value near the border of two numbers of the format may be rounded the other way by an engine that is right but for
this. So such an edit need not give every value of the engine's tensor: see `Target.match`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from ...families.family import Edit, after, before, heads_apart, instead
from ...reference import layers
from ...reference.layers import ACTIVATIONS as GATES
from ...reference.layers import Array
from ...reference.weights import LinearWeight
from ..names import is_by_head
from .edits.attention import angles_of, exponentials, shares, turn
from .edits.by_token import absmax, mean_square
from .edits.kinds import Description, Row, input_floats, wide
from .edits.products import matrix, product
from .number_formats import (
    FLOATS,
    INT4_ROWS,
    INT8_ROWS,
    MATRICES,
    NARROW,
    Q8_0,
    ROUNDED,
    SIZES,
    Format,
    Rule,
    activation_formats,
    blocks_of,
    rounded,
    running_sum,
)
from .variants import Step


def descriptions(step: Step) -> Iterator[Description]:
    """Every description that rounds in this step. Those of its own formula come first."""
    kind = step.kind
    for cost, text, formula in _between(step):
        yield Description(cost, text, instead(formula), rounds=True)
    weights = [i for i, x in enumerate(step.inputs) if isinstance(x, LinearWeight)]
    if weights == [0]:
        for words, rule in MATRICES:
            if not words.endswith("one scale"):  # which is not known from the rows that were taken
                yield Description(1, f"the matrix is {words}", with_matrix_in(rule), rounds=True)
    elif weights == [1] and len(step.inputs) == 2 and not step.name.endswith("hook_acc_int32"):
        yield from _dense_products()
    elif weights == [1] and len(step.inputs) == 3:
        yield from _bit_linears(step)
    if len(step.inputs) == 2 and isinstance(step.inputs[1], float) and step.name.endswith("scaled"):
        for name, to in NARROW.items():
            yield Description(1, f"the factor is rounded to {name}", before(1, partial(_factor_in, to)))
    for words, rule in _formats_of(step.result, step):
        yield Description(1, f"{{it}} is {words}", after(rule), rounds=True)
    if kind == "hook_attn_scores":
        for words, rule in activation_formats(step.inputs[1].shape):
            yield Description(1.2, f"{{in0}} and {{in1}} are {words}", partial(_both_in, rule), rounds=True)
    turns = step.name.endswith(("hook_rot_q", "hook_rot_k"))  # cos and sin have rows of their own
    for index, x in enumerate(step.inputs[:1] if turns else step.inputs):
        if isinstance(x, np.ndarray) and x.ndim > 1 and x.dtype.kind == "f":
            for words, rule in _formats_of(x, step):
                yield Description(1.2, f"{{in{index}}} is {words}", before(index, rule), rounds=True)


def _factor_in(dtype: Any, factor: float) -> float:
    return float(rounded(np.asarray(factor), dtype))


def _both_in(rule: Rule, step: Step, compute: Edit, x: Array, y: Array, *rest: Any) -> Array:
    return compute(rule(x).astype(np.float32), rule(y).astype(np.float32), *rest)


def _formats_of(x: Array, step: Step) -> list[Format]:
    """The formats that a tensor may be in: scores and patterns, (heads, N, keys), are not quantised to integers."""
    apart = heads_apart(x, step)
    if apart.dtype.kind != "f":
        return []
    return ROUNDED if is_by_head(step.name) and apart.ndim == 3 else activation_formats(apart.shape)


# -- matrices ----------------------------------------------------------------------------------------------------------


def with_matrix_in(rule: Rule, of_input: Rule = np.asarray) -> Edit:
    """A product, or the embedding, whose matrix is in another format.   of_input: changes what is multiplied."""

    def edit(step: Step, compute: Edit, first: Any, second: Any) -> Array:
        if isinstance(first, LinearWeight):
            return rule(first.rows(second, np.float32)).astype(np.float32)
        return product(of_input(first), rule(matrix(second))).astype(np.float32)

    return edit


_BOTH: list[tuple[str, Rule, Rule]] = [  # of products whose matrix and input are quantised
    ("the matrix and its input are quantised to int8, a scale per row and token", INT8_ROWS, INT8_ROWS),
    ("the matrix is quantised to int4, a scale per row, its input to int8", INT4_ROWS, INT8_ROWS),
    *((f"the matrix and its input are {words}", rule, rule) for words, rule in ROUNDED),
    *((f"the matrix is {words}, its input as Q8_0", rule, Q8_0) for words, rule in MATRICES if "as Q" in words),
]  # fmt: skip


def _all_in(rule: Rule) -> Edit:
    product_in = with_matrix_in(rule, rule)
    return lambda step, compute, *inputs: rule(product_in(step, compute, *inputs)).astype(np.float32)


def _dense_products() -> Iterator[Description]:
    for words, rule in MATRICES:
        yield Description(1.1, f"the matrix is {words}", with_matrix_in(rule), rounds=True)
    for words, rule in ROUNDED:
        yield Description(1.3, f"the matrix, its input and the result are {words}", _all_in(rule), rounds=True)
    for words, rule, of_input in _BOTH:
        yield Description(1.3, words, with_matrix_in(rule, of_input), rounds=True)


def _bit_linears(step: Step) -> Iterator[Description]:
    """The output of a BitLinear whose input is in another format than int8 with a scale for each token."""
    width = step.inputs[1].shape[1]
    formats = [*ROUNDED, *blocks_of([size for size in SIZES if size < width and width % size == 0])]

    def edit(rule: Rule) -> Edit:
        def of_floats(step: Step, compute: Edit, acc: Array, w: Any, x_quant_scale: Array) -> Array:
            scale: np.float32 = w.w_dequant_scale
            return (product(rule(input_floats(step)), matrix(w)) * scale).astype(np.float32)

        return of_floats

    for words, rule in formats:
        instead_of = ", not quantised to int8" * words.startswith("rounded")
        yield Description(1.1, f"activations are {words}{instead_of}", edit(rule), rounds=True)


# -- between the inputs of a step and its result -----------------------------------------------------------------------


# By kind of step: cost, words with the format's name in them, the formula of the format and of the step's inputs.
# fmt: off
IN_16_BITS: dict[str, list[Row]] = {
    "hook_scale": [
        (1.3, "squares are rounded to {}",
         lambda to, x, eps: np.sqrt(wide(rounded(np.square(x), to)).mean(-1, keepdims=True) + eps)),
        (1.3, "the sum of squares is kept in {}, term by term",
         lambda to, x, eps: np.sqrt(running_sum(np.square(x), to) / x.shape[-1] + eps)),
        (1.3, "the mean of squares is rounded to {}", lambda to, x, eps: np.sqrt(rounded(mean_square(x), to) + eps)),
        (1.3, "the sum of squares is rounded to {}",
         lambda to, x, eps: np.sqrt(rounded(mean_square(x) * x.shape[-1], to) / x.shape[-1] + eps)),
    ],
    "hook_normalized": [
        (1.3, "the weight of the norm is rounded to {}", lambda to, x, r, w: x / r * rounded(w, to)),
        (1.2, "a norm is computed in {}: its input, x / length and their product with the weight",
         lambda to, x, r, w: rounded(rounded(rounded(x, to) / r, to) * rounded(w, to), to)),
        (1.3, "x / length is rounded to {} before its weight", lambda to, x, r, w: rounded(x / r, to) * w),
    ],
    "hook_x_int8": [
        (1.2, "x * scale is rounded to {} before it is rounded to int8",
         lambda to, x, s: np.clip(np.rint(rounded(x * s, to)), -128, 127)),
    ],
    "hook_pattern": [
        (1.3, "the scores, less the largest, are rounded to {} before exp",
         lambda to, s: shares(np.exp(wide(rounded(s - s.max(-1, keepdims=True), to))))),
    ],
    "hook_post": [
        (1.3, "the activation is rounded to {}", lambda to, g, u, n: wide(rounded(GATES[n].function(wide(g)), to)) * u),
        (1.3, "the activation is a table of {}: its argument and its value are rounded",
         lambda to, g, u, n: wide(rounded(GATES[n].function(wide(rounded(g, to))), to)) * u),
    ],
}
IN_FEWER_BITS: dict[str, list[Row]] = {  # and in 8
    "hook_x_scale": [(1.1, "max|x| / 127 is rounded to {}", lambda to, x: 1 / rounded(absmax(x) / 127, to))],
    "hook_pattern": [(1.3, "exp(s) is rounded to {}", lambda to, s: shares(wide(rounded(exponentials(s), to))))],
    "hook_out": [
        (1.1, "the scale of {{w}} is rounded to {}", lambda to, a, w, s: a * (rounded(w.w_dequant_scale, to) / s)),
        (1.1, "the inverse of the activation scale is rounded to {}",
         lambda to, a, w, s: a * (w.w_dequant_scale * rounded(1 / s, to))),
        (1.2, "the quotient of the two scales is rounded to {}",
         lambda to, a, w, s: a * rounded(w.w_dequant_scale / s, to)),
    ],
}
# The order in which accumulators a and the scales are multiplied, rounded by r after each product but the last.
PRODUCTS: dict[str, Callable[..., Array]] = {
    "acc w_scale / x_scale": lambda a, w, s, r: r(a * w) / s,
    "acc / x_scale w_scale": lambda a, w, s, r: r(a / s) * w,
    "acc (w_scale / x_scale)": lambda a, w, s, r: a * r(w / s),
}
# fmt: on


def _between(step: Step) -> Iterator[Row]:
    """The rows of a step, with each format in its place."""
    kind = step.kind
    if kind in ("hook_rot_q", "hook_rot_k"):
        yield from _of_ropes(step)
    kind = "hook_out" if kind == "product" else kind
    if kind == "hook_out" and len(step.inputs) < 3:
        return
    if kind == "hook_out":
        yield from _of_outputs()
    if kind == "hook_attn_scores":
        root = math.sqrt(step.inputs[0].shape[-1])
        for name, to in NARROW.items():
            text = f"q k is rounded to {name} before it is divided by sqrt(head_dim)"
            yield 1.1, text, lambda *a, to=to: rounded(step.compute(*a) * root, to) / root
    for table, formats in ((IN_16_BITS, NARROW), (IN_FEWER_BITS, FLOATS)):
        for name, to in formats.items():
            yield from ((cost, text.format(name), partial(formula, to)) for cost, text, formula in table.get(kind, ()))
    for top in (127, 255) if kind == "hook_pattern" else ():
        text = f"the pattern is rounded to multiples of 1/{top}"
        yield 1.3, text, lambda s, top=top: np.rint(shares(exponentials(s)) * top) / top


def _of_ropes(step: Step) -> Iterator[Row]:
    p, f, scale = angles_of(step)
    for name, to in NARROW.items():
        narrow = partial(rounded, dtype=to)
        angles = narrow(narrow(p) * narrow(f))
        text = f"cos and sin are rounded to {name}"
        yield 1.3, text, lambda x, c, s, r=narrow: layers.apply_rope(x, r(c), r(s))
        yield 1, f"RoPE's frequencies are rounded to {name}", lambda x, c, s, r=narrow: turn(x, p * wide(r(f)), scale)
        yield 1.1, f"RoPE's frequencies and angles are in {name}", lambda x, c, s, a=angles: turn(x, wide(a), scale)
        text = f"RoPE's frequencies, angles, cos and sin are in {name}"
        tables = narrow(np.cos(angles) * scale), narrow(np.sin(angles) * scale)
        yield 1.2, text, lambda x, c, s, t=tables: layers.apply_rope(x, *t)
        yield 1.1, f"RoPE's angles are rounded to {name}", lambda x, c, s, r=narrow: turn(x, wide(r(p * f)), scale)
        yield 1.1, f"RoPE's positions are rounded to {name}", lambda x, c, s, r=narrow: turn(x, wide(r(p)) * f, scale)


def _of_outputs() -> Iterator[Row]:
    for name, to in NARROW.items():
        cast = partial(rounded, dtype=to)
        for words, formula in PRODUCTS.items():
            for narrow, of_scale in (("", np.asarray), (", as is the activation scale", cast)):
                text = f"accumulators and scales are in {name}, and so is each product: {words}{narrow}"
                yield 1.3, text, lambda a, w, s, f=formula, r=cast, n=of_scale: f(r(a), r(w.w_dequant_scale), n(s), r)
