"""Edits with an unknown constant, and what a constant may be: a number of the model's config, or a plain one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np

from ....families import family_of
from ....families.family import Edit, after, before, instead, own_rope
from ....reference import layers
from ....reference.layers import Array
from ....reference.weights import LinearWeight
from ...types import Wide
from ..variants import Step
from .attention import angles_of, distance, exponentials, softmax, turn
from .by_token import absmax, act, mean_square, sigmoid, to_int8
from .kinds import ConstantRow, Family, Formula, wide
from .products import matrix, product


# fmt: off
def _capped(c: float, x: Array) -> Array:
    return c * np.tanh(wide(x) / c)


def _leaky(c: float, x: Array) -> Array:
    return np.where(x > 0, x, c * wide(x))


def _gelu(gate: Array, slope: float = math.sqrt(2 / math.pi), cubic: float = 0.044715) -> Wide:
    x = wide(gate)
    turned: Wide = np.tanh(slope * (x + cubic * x**3))
    return 0.5 * x * (1 + turned)


CONSTANTS: dict[str, list[ConstantRow]] = {
    "hook_scale": [
        (1, "eps is {c} where {right} belongs", lambda c, x, eps: np.sqrt(mean_square(x) + c), None, True, (1e-12, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)),
        (1.3, "{c} is added to the length", lambda c, x, eps: np.sqrt(mean_square(x)) + c, None, True),
        (1.4, "the sum of squares is divided by {c} times its number of terms", lambda c, x, eps: np.sqrt(mean_square(x) / c + eps), 1, True),
    ],
    "hook_normalized": [
        (1.2, "the weight of the norm is taken to the power {c}", lambda c, x, r, w: x / r * np.sign(w) * np.abs(w) ** c, 1),
        (1.2, "{c} is added to the weight of the norm", lambda c, x, r, w: x / r * (w + c), 0, False, (1,)),
        (1.3, "the length is taken to the power {c}", lambda c, x, r, w: x / r**c * w, 1),
    ],
    "hook_x_scale": [
        (1, "the activation scale is {c} / max|x|, where 127 belongs", lambda c, x: np.float32(c) / absmax(x), 127, True),
        (1.2, "the floor of max|x| is {c}, not 1e-5", lambda c, x: 127 / np.maximum(np.abs(x).max(-1, keepdims=True), c), 1e-5, True, (1e-3, 0.1, 1)),
        (1.3, "{c} is added to max|x|", lambda c, x: 127 / (np.abs(x).max(-1, keepdims=True) + c), 1e-5, True, (1e-3, 0.1)),
    ],
    "hook_x_int8": [
        (1.2, "{c} is added before the rounding", lambda c, x, s: to_int8(x * s + c), 0),
        (1.2, "x * scale is multiplied by {c} before the rounding", lambda c, x, s: to_int8(x * s * np.float32(c)), 1, True),
    ],
    "hook_pattern": [
        (1, "scores are multiplied by {c} in the softmax", lambda c, s: softmax(s * np.float32(c)), 1, True),
        (1.2, "{c} is added to the softmax's sum, an attention sink", lambda c, s: softmax(s, extra=c), 0, False, (1,)),
        (1.3, "{c} is added to the softmax's sum after the maximum is subtracted", lambda c, s: exponentials(s) / (exponentials(s).sum(-1, keepdims=True) + c), 0, False, (0.1, 1)),
        (1.2, "scores are capped by {c} tanh(s / {c}) before the softmax", lambda c, s: softmax(np.where(s > -np.inf, _capped(c, s), s)), 1e4, True, (1, 5, 30)),
        (1.3, "the weight of the first token has {c} added to its score", lambda c, s: softmax(s + c * (np.arange(s.shape[2]) == 0)), 0),
        (1.2, "the distance times {c} is subtracted from the scores", lambda c, s: softmax(s - c * distance(s)), 0),
    ],
    "hook_post": [
        (1.1, "the activation's argument is multiplied by {c}", lambda c, g, u, n: act(wide(g) * c, n) * u, 1, False, (0.5, 2)),
        (1.1, "the activation is x sigmoid({c} x)", lambda c, g, u, n: wide(g) * sigmoid(c * wide(g)) * u, 1.5, False, (0.5, 3)),
        (1.1, "the gate is clipped at {c} from above", lambda c, g, u, n: act(np.minimum(wide(g), c), n) * u, 1e3, True, (0.1, 0.5, 1, 2, 5)),
        (1.1, "gate and up are clipped to {c}", lambda c, g, u, n: act(np.clip(wide(g), -c, c), n) * np.clip(u, -c, c), 1e3, True, (0.1, 0.5, 1, 2, 5)),
        (1.1, "up is clipped to {c}", lambda c, g, u, n: act(g, n) * np.clip(u, -c, c), 1e3, True, (0.1, 0.5, 1, 2, 5)),
        (1.1, "the activation is a leaky relu of slope {c}", lambda c, g, u, n: _leaky(c, g) * u, 0),
        (1.2, "the activation is the square of a leaky relu of slope {c}", lambda c, g, u, n: np.square(_leaky(c, g)) * u, 0, False, (0.3,)),
        (1.2, "{c} is added to up", lambda c, g, u, n: act(g, n) * (wide(u) + c), 0),
        (1.2, "{c} is added to the gate", lambda c, g, u, n: act(wide(g) + c, n) * wide(u), 0),
        (1.3, "{c} is added to the activation", lambda c, g, u, n: (act(g, n) + c) * wide(u), 0),
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
    (1.2, "the distance times {c} is subtracted from the scores, as in ALiBi", lambda c, x: x - np.float32(c) * distance(x) * (x > -np.inf), 0),
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
    p, f, scale = angles_of(step)
    e, theta = np.arange(len(f)) / len(f), own_rope(step).theta
    return [
        (1.2, "RoPE's cos is multiplied by {c}", lambda c, x, co, si: layers.apply_rope(x, co * np.float32(c), si), 1),
        (1.2, "RoPE's sin is multiplied by {c}", lambda c, x, co, si: layers.apply_rope(x, co, si * np.float32(c)), 1),
        (1.2, "RoPE's cos and sin are multiplied by {c}", lambda c, x, co, si: layers.apply_rope(x, co, si) * c, 1),
        (1, "RoPE's theta is {c} where {right} belongs", lambda c, x, co, si: turn(x, p * c**-e, scale), theta, True, (1e3, 1e4, 1e5, 5e5, 1e6, 1e2)),
        (1.1, "RoPE's positions are multiplied by {c}", lambda c, x, co, si: turn(x, p * c * f, scale), 1, True, (0.1, 0.25, 0.5, 1.5, 2, 4)),
        (1.1, "{c} is added to RoPE's positions", lambda c, x, co, si: turn(x, (p + c) * f, scale), 0, False, (-1, 2, 3, 4, 5, 7, 10)),
    ]


def families(step: Step) -> Iterator[Family]:
    """The constants of a step's formula, and those that could be in it."""
    kind = step.kind
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
            yield from of([(1.2, f"{{in{index}}} is normalised to the length {{c}}", lambda c, x: x / np.sqrt(mean_square(x)) * c / math.sqrt(x.shape[-1]), 1, True)], partial(before, index))
        elif isinstance(x, np.ndarray) and x.ndim > 1 and x.dtype.kind == "f" and not (rotates or of_scores or kind == "hook_pattern"):
            yield from of([(1.2, f"{{in{index}}} is multiplied by {{c}}", lambda c, x: x * x.dtype.type(c), 1, False, (0.1, 8))], partial(before, index))
    if of_scores or kind == "hook_acc_int32":
        yield from of(SCORES if of_scores else SUMS, after)
    elif step.result.dtype.kind == "f":
        yield from of(FLOATS, after)


def numbers_of(step: Step) -> dict[str, float]:
    """The numbers that belong to this step, by their names: a constant is not one of numbers from elsewhere."""
    cfg, place, kind = step.setting.config, step.name.split("."), step.kind
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
    """What a constant may be, (words, its value by `numbers_of`), simplest first: within a share `near` of the value."""
    numbers, sign = numbers_of(step), math.copysign(1.0, value)

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
