"""Small edits of a DeltaNet's own steps, beside those that apply to every step (`edits`).

Most are one part of a formula exchanged for another: the function of a gate, the order of heads or channels of one
factor, the length that q and k are divided by, a factor of the memory's update. The file of the family has those that
engines shipped with, under names of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import permutations, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...families.family import Edit, before, instead
from ...families.qwen3_5 import (
    DeltaConfig,
    DeltaInputs,
    DeltaLayer,
    by_carry,
    by_decay,
    by_inputs,
    by_kept,
    changed_last,
    memory_states,
    recall,
    right_update,
    sigmoid,
    softplus,
    taps,
)
from ...reference.layers import ACTIVATIONS, Floats, silu
from .edits.by_token import OTHER_ACTIVATIONS
from .edits.changes import changes, orders
from .edits.kinds import Change, Description, Family, wide, with_other
from .number_formats import ROUNDED, Format, blocks_of, to_integers
from .variants import Step

# fmt: off
GATES = {each.words: each.function for each in ACTIVATIONS.values()} | OTHER_ACTIVATIONS | {"2 sigmoid": lambda x: 2 * sigmoid(x)}


def descriptions(step: Step) -> Iterator[Description]:
    """Other formulas of a DeltaNet's step, and of the output gate that attention has as well."""
    kind = step.kind
    if kind == "hook_gated_z":
        yield from _gates(step)
    elif kind in _OWN and any(isinstance(x, DeltaLayer) for x in step.inputs):
        yield from _OWN[kind](step)


def families(step: Step) -> Iterator[Family]:
    """Constants in the memory's inputs."""
    kind, shape = step.kind, next((x.delta for x in step.inputs if isinstance(x, DeltaLayer)), None)
    parts = {"hook_state": "kv", "hook_delta_out": "q"}.get(kind, "") if shape is not None else ""
    if parts == "kv":
        for words, right, change in _ALPHAS_BY:
            yield Family(1.2, words, partial(_part_by, "log_alpha", change), right, True, (0.1, 0.5, 0.9))
    for part in parts:
        yield Family(1.1, f"DeltaNet's {part} is multiplied by {{c}}", partial(_part_by, part, np.multiply), 1, False, (0.1, 8))
    for words, length, right, log, starts in _LENGTHS_BY if parts else ():
        yield Family(1.2, words, partial(_by_constant, length), right, log, starts)


_ALPHAS_BY: tuple[tuple[str, float, Callable[[float, Floats], Floats]], ...] = (
    ("alpha is {c} at least in the memory's update", 1e-9, lambda c, log: np.maximum(log, np.log(c))),
    ("alpha is {c} at most in the memory's update", 1.0, lambda c, log: np.minimum(log, np.log(c))),
    ("alpha is taken to the power {c} in the memory's update", 1.0, lambda c, log: log * c),
)


def _part_by(part: str, change: Callable[[float, Floats], Floats], c: float) -> Edit:
    return _part(part, partial(change, c))


# Lengths by which q and k are divided: (text, the length from the sum of squares and a constant, right, log and starts of Family)
_LENGTHS_BY: tuple[tuple[str, Callable[[Floats, float], Floats], float, bool, tuple[float, ...]], ...] = (
    ("DeltaNet's q and k are divided by another length: {c} is added to the length of each", lambda squares, c: np.sqrt(squares) + c, 0, False, (1e-6, 1e-3, 0.1)),
    ("DeltaNet's q and k are divided by another length: {c} is the least length of each", lambda squares, c: np.maximum(np.sqrt(squares), c), 0, False, (1e-6, 1e-3, 0.1)),
    ("eps of DeltaNet's q and k is {c} where 1e-06 belongs", lambda squares, c: np.sqrt(squares + c), 1e-6, True, (1e-12, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)),
)


def _by_constant(length: Callable[[Floats, float], Floats], c: float) -> Edit:
    return _by_length("qk", lambda x: length(np.square(x).sum(-1, keepdims=True), c))


# -- what a token gives to the memory ----------------------------------------------------------------------------------

LENGTHS: list[tuple[str, Change]] = [
    ("the sum of |x|", lambda x: np.abs(x).sum(-1, keepdims=True)),
    ("the largest |x|", lambda x: np.abs(x).max(-1, keepdims=True)),
    ("the sum of squares, without its root", lambda x: np.square(x).sum(-1, keepdims=True)),
    ("the length of all heads together", lambda x: np.sqrt(np.square(x).sum((1, 2), keepdims=True) + 1e-6)),
    ("the mean of |x|", lambda x: np.abs(x).mean(-1, keepdims=True)),
]


def _by_length(parts: str, length: Change) -> Edit:
    """q or k, as they come from the convolution, divided by length(x), x (T, Hk, dk); v divided as well."""

    def change(x: DeltaInputs, long: DeltaInputs, shape: DeltaConfig) -> DeltaInputs:
        group, root = shape.value_heads // shape.key_heads, shape.key_dim**-0.5
        given = {"q": long.q[:, ::group] / root, "k": long.k[:, ::group], "v": x.v}
        divided = {part: given[part] / length(given[part]) for part in parts}
        return x._replace(**{part: y if part == "v" else np.repeat(y, group, axis=1) * (root if part == "q" else 1) for part, y in divided.items()})

    return by_inputs(change)


def _asked_times(factor: Any, x: DeltaInputs, long: DeltaInputs, shape: DeltaConfig) -> DeltaInputs:
    return x._replace(q=x.q * factor(x)[:, :, None])


def _inputs(step: Step) -> Iterator[Description]:
    """The lengths of q and k, and each of q, k, v and beta moved, rounded or exchanged."""
    shape = step.inputs[-1].delta
    of_state = step.name.endswith("hook_state")
    for words, length in LENGTHS:
        for parts in ("qk", "k" if of_state else "q"):
            yield Description(1.2 + 0.05 * (len(parts) == 1), f"DeltaNet's {' and '.join(parts)} {'are' if len(parts) > 1 else 'is'} divided by {words}", _by_length(parts, length))
        if of_state:
            yield Description(1.3, f"DeltaNet's v is divided by {words}", _by_length("v", length))
    if of_state:
        yield Description(1.1, "DeltaNet's v is brought to unit length as well", _by_length("v", lambda x: np.sqrt(np.square(x).sum(-1, keepdims=True) + 1e-6)))
        yield Description(1.3, "DeltaNet's beta is that of the previous token, the first has its own", _part("beta", lambda x: np.concatenate([x[:1], x[:-1]])))
    else:
        for name, factor in (("its decay", lambda x: np.exp(x.log_alpha)), ("beta", lambda x: x.beta), ("1 - beta", lambda x: 1 - x.beta)):
            yield Description(1.2, f"the memory's answer is multiplied by {name}", by_inputs(partial(_asked_times, factor)))
        yield Description(1.1, "the memory is asked with k, not with q", by_inputs(lambda x, long, shape: x._replace(q=x.k)))
        yield Description(1.1, "the memory is asked with k / sqrt(head_k_dim), not with q", by_inputs(lambda x, long, shape: x._replace(q=x.k * shape.key_dim**-0.5)))
    for part, size in (("k", shape.key_dim), ("v", shape.value_dim)) if of_state else (("q", shape.key_dim),):
        like = np.zeros((len(step.inputs[-2]), shape.value_heads, size), dtype=np.float32)
        for cost, text, change in changes(like):
            yield Description(cost + 0.2, text.replace("{x}", f"DeltaNet's {part}"), _part(part, change))
        for words, rule in ROUNDED:
            yield Description(1.2, f"DeltaNet's {part} is {words}", _part(part, rule), rounds=True)


def _part(part: str, change: Change) -> Edit:
    return by_inputs(lambda x, long, shape: x._replace(**{part: change(getattr(x, part))}))


# -- the memory --------------------------------------------------------------------------------------------------------

# S becomes KEPT + k (WRITTEN (TAKEN - KNOWN)), each in the words of its formula. The first of each is right.
KEPT: dict[str, Callable[..., Floats]] = {"a S": lambda S, a: a * S, "S": lambda S, a: S, "a^2 S": lambda S, a: a * a * S}
WRITTEN: dict[str, Callable[..., Any]] = {"b": lambda a, b: b, "": lambda a, b: 1, "b^2": lambda a, b: b * b, "a b": lambda a, b: a * b, "sqrt(b)": lambda a, b: np.sqrt(np.abs(b)), "(1 - b)": lambda a, b: 1 - b}
TAKEN: dict[str, Callable[..., Floats]] = {"v": lambda v, a, b: v, "b v": lambda v, a, b: b * v, "a v": lambda v, a, b: a * v}
KNOWN: dict[str, Callable[..., Any]] = {
    "k a S": lambda k, S, a, b: recall(k, a * S), "k S": lambda k, S, a, b: recall(k, S), "b k a S": lambda k, S, a, b: b * recall(k, a * S), "b k S": lambda k, S, a, b: b * recall(k, S),
    "k a S / sqrt(head_k_dim)": lambda k, S, a, b: recall(k, a * S) * k.shape[1] ** -0.5, "k a S sqrt(head_k_dim)": lambda k, S, a, b: recall(k, a * S) * k.shape[1] ** 0.5, "k a^2 S": lambda k, S, a, b: recall(k, a * a * S),
    "2 k a S": lambda k, S, a, b: 2 * recall(k, a * S), "0": lambda k, S, a, b: 0 * k[:, :1], "-k a S": lambda k, S, a, b: -recall(k, a * S),
}
RIGHT_UPDATE = ("a S", "b", "v", "k a S")


def _updates(tokens: int) -> Iterator[Description]:
    for parts in product(KEPT.items(), WRITTEN.items(), TAKEN.items(), KNOWN.items()):
        names, (kept, written, taken, known) = zip(*parts, strict=True)
        others = sum(name != right for name, right in zip(names, RIGHT_UPDATE, strict=True))
        if others not in (1, 2):
            continue

        def update(S: Floats, a: Floats, k: Floats, v: Floats, b: Floats, kept: Any = kept, written: Any = written, taken: Any = taken, known: Any = known) -> Floats:
            return np.asarray(kept(S, a) + k * (written(a, b) * (taken(v, a, b) - known(k, S, a, b))))

        text = f"{names[0]} + k {names[1]} ({names[2]} - {names[3]})".replace("k  (", "k (")
        yield Description(1 + 0.1 * others, f"the memory S becomes {text}, where a S + k b (v - k a S) belongs", _by_memory(partial(memory_states, update=update)))
        for size in (4, 8, 16, 32, 64) if others == 1 else ():
            for words, is_first in (("the first", True), ("those behind the first", False)) if size < tokens else ():
                yield Description(1.3, f"by {words} of each {size} tokens the memory S becomes {text}, where a S + k b (v - k a S) belongs", _by_memory(partial(_by_turns, update, size, is_first)))
    yield Description(1.2, "the memory is transposed when it is written: v k, not k v", _by_memory(lambda x: memory_states(x, lambda S, a, k, v, b: a * S + (k * (b * (v - recall(k, a * S)))).swapaxes(1, 2))))


def _by_turns(update: Callable[..., Floats], size: int, is_first: bool, x: DeltaInputs) -> Floats:
    """The memory after each token, with another update by the first of each `size` tokens, or by the others."""
    turns = iter(range(len(x.v)))

    def by_turn(*arguments: Floats) -> Floats:
        return (update if (next(turns) % size == 0) == is_first else right_update)(*arguments)

    return memory_states(x, by_turn)


# What stands for alpha = exp(log alpha) in the update.
ALPHAS: dict[str, Change] = {
    "1 + log alpha": lambda a: 1 + np.log(np.maximum(a, 1e-300)), "1 - alpha": lambda a: 1 - a, "1 / (1 - log alpha)": lambda a: 1 / (1 - np.log(np.maximum(a, 1e-300))),
    "sqrt(alpha)": np.sqrt, "1 / alpha": np.reciprocal, "log alpha": lambda a: np.log(np.maximum(a, 1e-300)), "the sigmoid of log alpha": lambda a: a / (1 + a),
}


def _with_alpha(change: Change, S: Floats, a: Floats, k: Floats, v: Floats, b: Floats) -> Floats:
    return right_update(S, change(a), k, v, b)


def _by_memory(states: Callable[[DeltaInputs], Floats]) -> Edit:
    return by_inputs(lambda x, long, shape: x, states)


def _in_chunks(size: int, rule: str) -> Callable[[DeltaInputs], Floats]:
    """The memory after each token, of an engine that works by chunks of so many tokens."""

    def states(x: DeltaInputs) -> Floats:
        S, after_token = np.zeros((*x.k.shape[1:], x.v.shape[2])), []
        start, decay = S, np.ones((S.shape[0], 1, 1))
        for t, (_, k, v, log_alpha, beta) in enumerate(zip(*x, strict=True)):
            k, a = k[:, :, None], np.exp(log_alpha)[:, None, None]
            if t % size == 0:
                S = np.zeros_like(S) if rule == "emptied" else S
                start, decay = S, np.ones_like(a)
                a = np.ones_like(a) if rule == "undecayed" else a
            decay = decay * a
            known = {"start": decay * start, "start undecayed": start}.get(rule, a * S)
            S = a * S + k * (beta[:, None, None] * (v[:, None] - recall(k, known)))
            after_token.append(S)
        return np.stack(after_token).astype(np.float32)

    return states


CHUNKS = {
    "emptied": "the memory is emptied every {} tokens", "undecayed": "the memory is not decayed by the first of each {} tokens",
    "start": "v is corrected by the memory at the beginning of each {} tokens, decayed since: what the tokens of a chunk write does not correct each other",
    "start undecayed": "v is corrected by the memory at the beginning of each {} tokens, as it was there",
}
MEMORY_FORMATS: list[Format] = [
    *ROUNDED, *((f"quantised to int8, a scale for each {words}", partial(to_integers, top=127, axis=axis)) for words, axis in (("row of a head", -1), ("column of a head", -2), ("head", (1, 2)))),
    ("quantised to int8, one scale", partial(to_integers, top=127, axis=None)), *blocks_of((16, 32, 64)),
]


def _memories(step: Step) -> Iterator[Description]:
    yield from _carried(step)
    yield from _updates(len(step.inputs[0]))
    for words, change in ALPHAS.items():
        yield Description(1.1, f"{words} stands for alpha in the memory's update", _by_memory(partial(memory_states, update=partial(_with_alpha, change))))
    tokens = len(step.inputs[0])
    for (rule, text), size in product(CHUNKS.items(), (2, 4, 8, 16, 32, 64, 128)):
        if size < tokens:
            yield Description(1.3, text.format(size), _by_memory(_in_chunks(size, rule)))
    for words, rounded in MEMORY_FORMATS:
        def update(S: Floats, a: Floats, k: Floats, v: Floats, b: Floats, rounded: Any = rounded) -> Floats:
            return np.asarray(rounded(right_update(S, a, k, v, b).astype(np.float32))).astype(np.float64)

        yield Description(1.1, f"the memory is {words}, after each token", _by_memory(partial(memory_states, update=update)), rounds=True)
    for words, rounded in ROUNDED:
        def error(S: Floats, a: Floats, k: Floats, v: Floats, b: Floats, rounded: Any = rounded) -> Floats:
            return np.asarray(a * S + k * (b * wide(rounded((v - recall(k, a * S)).astype(np.float32)))))

        def written(S: Floats, a: Floats, k: Floats, v: Floats, b: Floats, rounded: Any = rounded) -> Floats:
            return np.asarray(a * S + wide(rounded((k * (b * (v - recall(k, a * S)))).astype(np.float32))))

        for part, update in (("the error v - k a S", error), ("what is written", written)):
            yield Description(1.2, f"{part} is {words}", _by_memory(partial(memory_states, update=update)), rounds=True)
    yield from _inputs(step)


# -- what is kept from call to call ------------------------------------------------------------------------------------


def _of_first(change: Change) -> Callable[[Floats, Floats], Floats]:
    return lambda memory, earlier: wide(change(memory.astype(np.float32)))


def _carried(step: Step) -> Iterator[Description]:
    """The memory that a call leaves to the next one: moved, or in another format."""
    if len(step.setting.calls) < 2:
        return
    shape = step.inputs[-1].delta
    like = np.zeros((shape.value_heads, shape.key_dim, shape.value_dim), dtype=np.float32)
    for cost, text, change in changes(like, by_head=True):
        if "token" not in text and "keys" not in text:  # it has none
            yield Description(cost + 0.1, f"between calls {text.replace('{x}', 'the memory')}", by_carry(_of_first(change)))
    for words, rounded in MEMORY_FORMATS:
        yield Description(1.1, f"the memory is {words} between calls", by_carry(_of_first(rounded)), rounds=True)


def _kept(step: Step) -> Iterator[Description]:
    """The inputs of the convolution that a call leaves to the next one."""
    if len(step.setting.calls) < 2:
        return
    qkv, w = step.inputs
    n = w.conv.shape[1] - 1
    kept: list[tuple[float, str, Callable[..., Floats]]] = [
        (1, "are the convolution's results", lambda window, y, earlier: np.concatenate([window[:n], y])[-n:]),
        (1, "are the convolution's sums, before silu", lambda window, y, earlier: np.concatenate([window[:n], taps(window, w.conv)[n:]])[-n:]),
        (1, "are one token too old", lambda window, y, earlier: window[-n - 1 : -1]),
        (1.1, "are those of the current call only, zeros before them", lambda window, y, earlier: np.concatenate([0 * window[:n], window[n:]])[-n:]),
        (1.1, "are the first of the call, not the last", lambda window, y, earlier: window[n : 2 * n] if len(window) >= 2 * n else window[-n:]),
        (1.1, "lack their newest token: zeros stand for it", lambda window, y, earlier: np.concatenate([window[-n:-1], 0 * window[:1]])),
        (1.1, "lack their oldest token: zeros stand for it", lambda window, y, earlier: np.concatenate([0 * window[:1], window[1 - n :]]) if n > 1 else 0 * window[-1:]),
    ]
    for cost, text, keep in kept:
        yield Description(cost, f"the inputs that the convolution keeps from call to call {text}", by_kept(keep))
    for cost, text, change in changes(qkv[:n]):
        yield Description(cost + 0.1, f"of the inputs that the convolution keeps from call to call, {text.replace('{x}', 'them')}", changed_last(change))
    for words, rule in ROUNDED:
        yield Description(1, f"the inputs that the convolution keeps from call to call are {words}", changed_last(rule), rounds=True)


# -- convolution, decay, beta, gates -----------------------------------------------------------------------------------


def _other_activations(owner: str, right: str, functions: dict[str, Callable[..., Any]], formula: Callable[..., Floats]) -> Iterator[Description]:
    """formula(function, *inputs) with the functions that are not the right one."""
    for words, function in functions.items():
        if words != right:
            yield Description(1.1, f"{owner}'s activation is {words} where {right} belongs", instead(partial(formula, function)))


def _convolutions(step: Step) -> Iterator[Description]:
    yield from _kept(step)
    w = step.inputs[1]
    n, sizes, starts = w.conv.shape[1], w.delta.sizes, np.cumsum((0, *w.delta.sizes))
    yield from _other_activations("the convolution", "silu", GATES, lambda f, qkv, w: f(taps(qkv, w.conv)))
    yield Description(1.1, "the convolution's silu is taken twice", instead(lambda qkv, w: silu(silu(taps(qkv, w.conv)))))
    for ahead in range(1, n):
        yield Description(1.1, f"the convolution sees {ahead} token{'s' * (ahead > 1)} after the current one", instead(lambda qkv, w, ahead=ahead: silu(taps(np.concatenate([qkv, 0 * qkv[:ahead]]), w.conv)[ahead:])))
    yield Description(1.2, "the convolution has the first token for those before it", instead(lambda qkv, w: silu(taps(np.concatenate([np.repeat(qkv[:1], n - 1, 0), qkv]), w.conv)[n - 1 :])))
    yield Description(1.1, "the convolution's input is added to its sum", instead(lambda qkv, w: silu(taps(qkv, w.conv) + qkv)))
    yield Description(1.1, "the convolution's input is added to its result", instead(lambda qkv, w: silu(taps(qkv, w.conv)) + qkv))
    for apart in (2, 3, 4, 8):
        yield Description(1.2, f"the convolution is over tokens that are {apart} apart", instead(lambda qkv, w, apart=apart: silu(taps(qkv, w.conv, apart))))
    matrices: list[tuple[float, str, Callable[..., Floats]]] = [
        (1.2, "the convolution's weights are stored as (tokens, channels) and read as (channels, tokens)", lambda m: m.reshape(m.shape[::-1]).T),
    ]
    for i in range(n):
        matrices.append((1.1, f"the convolution lacks its weight {i} of {n}", partial(np.multiply, np.arange(n) != i)))
    for i in range(1, n - 1):
        matrices.append((1.2, f"the convolution has its last {i} weights only", partial(np.multiply, np.arange(n) >= n - i)))
    for words, place_of in orders(len(w.conv)):
        matrices.append((1.2, f"the convolution's channels have weights that are {words}", partial(np.take, indices=place_of(len(w.conv)), axis=0)))
    for order in permutations(range(3)):  # of the parts q, k and v
        if order != (0, 1, 2):
            places = np.argsort(np.concatenate([np.arange(starts[i], starts[i] + sizes[i]) for i in order]))
            matrices.append((1.2, f"the convolution's weights are read for channels in the order {', '.join('qkv'[i] for i in order)}", lambda m, places=places: m[places]))
    for cost, text, change in matrices:
        yield Description(cost, text, with_other("conv", change))
    for words, rule in ROUNDED:
        yield Description(1.1, f"the convolution's weights are {words}", with_other("conv", rule), rounds=True)


def _decays(step: Step) -> Iterator[Description]:
    """Parts of -A f(a + bias), f softplus."""
    for words, function in {**GATES, "softplus squared": lambda x: softplus(x) ** 2, "the root of softplus": lambda x: np.sqrt(softplus(x))}.items():
        yield Description(1.1, f"{words} stands for softplus in the decay", by_decay(lambda a, A, bias, f=function: -A * f(a + bias)))
    others: dict[str, Callable[..., Any]] = {
        "exp(-A_log)": np.reciprocal, "exp(A_log)^2": np.square, "1": np.ones_like, "exp(exp(A_log))": np.exp, "-A_log": lambda A: -np.log(A), "|A_log|": lambda A: np.abs(np.log(A)),
        "softplus(A_log)": lambda A: softplus(np.log(A)),
    }
    for words, other in others.items():
        formula = partial(lambda other, a, A, bias: -other(A) * softplus(a + bias), other)
        yield Description(1.1, f"{words} stands for exp(A_log)", by_decay(formula))
    for words, rule in ROUNDED:

        def narrow(x: Floats, rule: Any = rule) -> Floats:
            return wide(rule(x.astype(np.float32)))

        for part, rounded in (
            ("A_log", lambda a, A, bias, r: -np.exp(r(np.log(A))) * softplus(a + bias)), ("exp(A_log)", lambda a, A, bias, r: -r(A) * softplus(a + bias)),
            ("dt_bias", lambda a, A, bias, r: -A * softplus(a + r(bias))), ("a + dt_bias", lambda a, A, bias, r: -A * softplus(r(a + bias))),
            ("softplus", lambda a, A, bias, r: -A * r(softplus(a + bias))),
        ):  # fmt: skip
            yield Description(1.2, f"{part} is {words} in the decay", by_decay(lambda a, A, bias, f=rounded, r=narrow: f(a, A, bias, r)), rounds=True)
    yield Description(1.1, "dt_bias is subtracted, not added", by_decay(lambda a, A, bias: -A * softplus(a - bias)))
    yield Description(1.1, "dt_bias multiplies, and is not added", by_decay(lambda a, A, bias: -A * softplus(a * bias)))
    for words, order in orders(len(step.inputs[1].decay)):
        places = order(len(step.inputs[1].decay))
        for part, (of_A, of_bias) in {"A_log": (1, 0), "dt_bias": (0, 1), "A_log and dt_bias": (1, 1)}.items():
            yield Description(1.2, f"heads of {part} are {words}", by_decay(lambda a, A, bias, p=places, x=of_A, y=of_bias: -(A[p] if x else A) * softplus(a + (bias[p] if y else bias))))


def _strengths(step: Step) -> Iterator[Description]:
    yield from _other_activations("beta", "sigmoid", {**GATES, "the sigmoid of a sigmoid": lambda b: sigmoid(sigmoid(b))}, lambda f, b, w: f(wide(b)))


def _heads_at(places: NDArray[np.intp], x: Floats) -> Floats:
    return x.reshape(len(x), len(places), -1)[:, places].reshape(x.shape)


def _gates(step: Step) -> Iterator[Description]:
    cfg: Any = step.setting.config
    attends = cfg.attends(step.layer)
    right, heads = ("sigmoid", cfg.num_attention_heads) if attends else ("silu", cfg.delta.value_heads)
    yield from _other_activations("the output gate", right, GATES, lambda f, z, gate: wide(z).reshape(gate.shape) * f(wide(gate)))
    function = GATES[right]
    yield Description(1.1, "the output gate's activation is squared", instead(lambda z, gate: wide(z).reshape(gate.shape) * function(wide(gate)) ** 2))
    yield Description(1.2, "the output gate is added, and does not multiply", instead(lambda z, gate: z.reshape(gate.shape) + function(wide(gate))))
    for words, order in orders(heads):
        for part, index in (("the output gate", 1), ("what the output gate multiplies", 0)):
            yield Description(1.2, f"heads of {part} are {words}", before(index, partial(_heads_at, order(heads))))


_OWN: dict[str, Callable[[Step], Iterator[Description]]] = {
    "hook_conv": _convolutions, "hook_log_decay": _decays, "hook_beta": _strengths, "hook_state": _memories, "hook_delta_out": _inputs,
}
