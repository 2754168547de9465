"""Other formulas of RoPE: its angles, its pairs, and how it turns them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ....families.family import own_rope
from ....reference import layers
from ....reference.layers import Array
from ..variants import Step
from .kinds import Formula, Row, wide


# fmt: off
def angles_of(step: Step) -> tuple[Array, Array]:
    """positions (N, 1), frequencies (d/2,)"""
    positions = np.arange(len(step.inputs[0]))[:, None].astype(np.float64)
    return positions, own_rope(step).frequencies(2 * step.inputs[1].shape[1])


def turn(x: Array, angles: Array, size: int | None = None) -> Array:
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


def ropes(step: Step) -> Iterator[Row]:
    """Other angles for the two halves of each head."""
    p, f = angles_of(step)
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
        return lambda x, c, s: turn(x, angles, size)

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
    yield 1.2, "RoPE takes the head's number for the position", lambda x, c, s: turn(x.swapaxes(0, 1), np.arange(x.shape[1])[:, None] * f).swapaxes(0, 1)
