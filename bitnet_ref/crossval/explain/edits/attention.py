"""Other formulas of attention: the softmax, which tokens are seen, which kv head a query head reads, and RoPE."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ....families.family import Edit, after, own_rope
from ....reference import layers
from ....reference.layers import Array, Floats
from ...names import is_by_head
from ...types import Ints
from ..attention import all_scores
from ..variants import Step
from .by_token import sigmoid
from .kinds import Description, Formula, Row, wide


# fmt: off
def softmax(s: Array, extra: float = 0.0, base: float = math.e, axis: int = -1) -> Floats:
    """exp(s - max) / (sum + extra * exp(-max))."""
    top = np.maximum(np.where(np.isfinite(s), s, -np.inf).max(axis, keepdims=True), -1e30)
    e: Floats = np.power(base, wide(s) - top)
    total: Floats = e.sum(axis, keepdims=True) + extra * np.power(base, -top)
    return e / total


def _softmax_without(s: Array, drop: Array) -> Floats:
    """Softmax over what is left after `drop`, zeros where nothing is."""
    pattern: Floats = np.nan_to_num(softmax(np.where(drop, -np.inf, s)))
    return pattern


def _ij(s: Array) -> tuple[Array, Array]:
    return np.arange(s.shape[1])[:, None], np.arange(s.shape[2])[None, :]


def distance(s: Array) -> Ints:
    """How many tokens before its token each key is.   (H, N, S) -> (N, S)"""
    return np.arange(s.shape[1])[:, None] - np.arange(s.shape[2])


def exponentials(s: Array) -> Floats:
    """exp(s - max)"""
    e: Floats = np.exp(wide(s) - s.max(-1, keepdims=True))
    return e


def shares(e: Floats, counted: Any = 1) -> Floats:
    total: Floats = np.maximum((e * counted).sum(-1, keepdims=True), 1e-30)
    return e / total


def _not_rescaled(s: Array, size: int) -> Array:
    """exp(s - the largest score up to the end of its block of keys), divided by its sum."""
    ends = np.minimum((np.arange(s.shape[2]) // size + 1) * size, s.shape[2]) - 1
    return shares(np.exp(wide(s) - np.maximum.accumulate(s, axis=2)[..., ends]))


PATTERNS: list[Row] = [
    (1, "the softmax is not divided by its sum", exponentials),
    (1, "the softmax is of exp(s) without its sum", lambda s: np.exp(np.minimum(wide(s), 80))),
    (1.1, "the softmax's sum lacks the token itself", lambda s: shares(exponentials(s), (distance(s) != 0) | (_ij(s)[0] == 0))),
    (1.1, "the softmax's sum lacks the first token", lambda s: shares(exponentials(s), _ij(s)[1] > 0)),
    (1, "the softmax takes 2^s, not e^s", lambda s: softmax(s, base=2)),
    (1, "the softmax runs over the wrong axis: over the tokens that look, not over those seen", lambda s: np.nan_to_num(softmax(s, axis=1)) * (s > -np.inf)),
    *((1.2, f"the softmax goes by blocks of {n} keys, and sums of earlier blocks are not rescaled when the largest score grows", lambda s, n=n: _not_rescaled(s, n)) for n in (1, 2, 4, 8, 16, 32, 64, 128)),
    (1.2, "the softmax runs over the heads", lambda s: np.nan_to_num(softmax(s, axis=0)) * (s > -np.inf)),
    (1.1, "a sigmoid stands for the softmax", lambda s: sigmoid(wide(s)) * (s > -np.inf)),
    (1.1, "the average of all tokens seen stands for the softmax", lambda s: (s > -np.inf) / (s > -np.inf).sum(-1, keepdims=True)),
    (1.1, "the softmax's largest value takes all", lambda s: (s == s.max(-1, keepdims=True)) * 1.0),
    (1.1, "the token itself has no weight", lambda s: _softmax_without(s, (distance(s) == 0) & (_ij(s)[0] > 0))),
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
    return np.where(distance(free) >= 0, free, -np.inf).astype(q.dtype)


def scores(step: Step) -> Iterator[Description]:
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
    yield from kv_maps("the scores")
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


def kv_maps(noun: str) -> Iterator[Description]:
    for words, kv_head in KV_HEADS.items():
        yield Description(1.1, f"query head h reads kv head {words} in {noun}", reads_kv_head(kv_head))


def angles_of(step: Step) -> tuple[Array, Array, float]:
    """positions (N, 1), frequencies (d/2,), and what cos and sin are multiplied by (YaRN's and longrope's)"""
    positions, rope = np.arange(len(step.inputs[0]))[:, None].astype(np.float64), own_rope(step)
    return positions, rope.frequencies(2 * step.inputs[1].shape[1]), getattr(rope, "attention_factor", 1.0)


def turn(x: Array, angles: Array, scale: float = 1.0, size: int | None = None) -> Array:
    """The first `size` numbers of each head turned, all if None. scale: of cos and sin"""
    turned = layers.apply_rope(wide(x[..., :size]), np.cos(angles) * scale, np.sin(angles) * scale)
    return turned if size is None else np.concatenate([turned, wide(x[..., size:])], axis=-1)


def turned_by_own(x: Array, step: Step) -> Array:
    """x (N, H, d) turned by the RoPE of the step's layer, at positions 0 to N - 1."""
    return layers.apply_rope(x, *own_rope(step).tables(np.arange(len(x)), step.setting.config.rotary_size, np.float32))


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


def ropes(step: Step) -> Iterator[Row]:
    """Other angles for the two halves of each head."""
    p, f, scale = angles_of(step)
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
        return lambda x, c, s: turn(x, angles, scale, size)

    if scale != 1:
        yield 1, "RoPE's cos and sin are not multiplied by its attention factor", lambda x, c, s: turn(x, p * f)
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
    yield 1.2, "RoPE takes the head's number for the position", lambda x, c, s: turn(x.swapaxes(0, 1), np.arange(x.shape[1])[:, None] * f, scale).swapaxes(0, 1)
