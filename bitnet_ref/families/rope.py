"""RoPE for contexts longer than the trained one: how theta^(-2j/d) is stretched.

    linear     divided by `factor`.
    dynamic    (NTK): theta grows with the position once it passes `original_max_position_embeddings`.
    llama3     long wavelengths divided by `factor`, short ones kept, a ramp in between.
    yarn       a ramp between `beta_fast` and `beta_slow` turns; cos and sin are also scaled by `attention_factor`.
    longrope   each frequency divided by its own number, of `short_factors` up to the trained context and of
               `long_factors` beyond it; cos and sin are also scaled by `attention_factor`.

Source: transformers, modeling_rope_utils.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..errors import require, require_bool, require_int, require_number
from ..reference.config import RopeConfig, added
from ..reference.layers import Floats

_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")


@dataclass(frozen=True)
class StretchedRope(RopeConfig):
    """RoPE of one of `STRETCHINGS`; the numbers of the others stay at their defaults."""

    rope_type: str = "linear"  # type: ignore[misc]
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # the trained context; of no use to linear
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    long_factors: tuple[float, ...] = added(())  # of longrope, (d/2,)
    short_factors: tuple[float, ...] = added(())

    def __post_init__(self) -> None:
        require(self.rope_type in ROPE_TYPES[1:], "rope.rope_type", f"one of {', '.join(ROPE_TYPES)}", self.rope_type)
        require_number("rope.theta", self.theta, above=1.0 if self.rope_type == "yarn" else 0.0)
        for name in _NUMBERS:
            require_number(f"rope.{name}", getattr(self, name))
        require_bool("rope.truncate", self.truncate)
        for name in ("long_factors", "short_factors"):
            factors = getattr(self, name)
            require(bool(factors) == (self.rope_type == "longrope"), f"rope.{name}", "numbers with longrope", factors)
            for each in factors:
                require_number(f"rope.{name}", each)
        if self.rope_type != "linear":
            require_int("rope.original_max_position_embeddings", self.original_max_position_embeddings)
        if self.rope_type == "dynamic":
            require(self.factor >= 1.0, "rope.factor", "a factor >= 1", self.factor)
        if self.rope_type == "llama3":
            require(
                self.high_freq_factor > self.low_freq_factor,
                "rope.high_freq_factor",
                f"more than low_freq_factor ({self.low_freq_factor})",
                self.high_freq_factor,
            )

    def check_size(self, rotary_size: int) -> None:
        if self.rope_type == "longrope":
            pairs = rotary_size // 2
            lengths = [len(self.long_factors), len(self.short_factors)]
            require(lengths == [pairs, pairs], "rope.long_factors", f"{pairs} numbers, and as many short", lengths)
        if self.rope_type == "dynamic":
            require(rotary_size > 2, "head_dim", "more than 2 with dynamic RoPE", rotary_size)

    @property
    def context_factor(self) -> float:  # type: ignore[override]
        return self.factor if self.rope_type == "dynamic" else 1.0  # the others do not go beyond the trained context

    def frequencies(self, head_dim: int, position: int = 0) -> NDArray[np.float64]:
        """Radians per position. `position` matters to dynamic and longrope only.   -> (d/2,) float64"""
        return STRETCHINGS[self.rope_type](self, head_dim, position)

    def angles(self, positions: NDArray[np.int64], head_dim: int) -> NDArray[np.float64]:
        if self.rope_type not in ("dynamic", "longrope"):
            return super().angles(positions, head_dim)
        inv_freq = np.stack([self.frequencies(head_dim, int(position)) for position in positions])  # (N, d/2)
        return positions[:, None].astype(np.float64) * inv_freq

    def tables(self, positions: NDArray[np.int64], head_dim: int, dtype: DTypeLike) -> tuple[Floats, Floats]:
        if self.rope_type not in ("yarn", "longrope"):
            return super().tables(positions, head_dim, dtype)
        cos, sin = super().tables(positions, head_dim, np.float64)
        return (cos * self.attention_factor).astype(dtype), (sin * self.attention_factor).astype(dtype)


def _dynamic(rope: StretchedRope, head_dim: int, position: int) -> NDArray[np.float64]:
    # The base grows with the length seen *by this token*. transformers takes the longest length in the call for
    # all of its tokens, so there a prompt fed at once differs from the same prompt fed token by token; here the
    # two are equal, and equal to transformers' token by token.
    exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    stretch = max(position + 1, rope.original_max_position_embeddings) / rope.original_max_position_embeddings
    growth = 1 + rope.factor * (stretch - 1)
    base: float = rope.theta * growth ** (head_dim / (head_dim - 2))
    return base**-exponent


def _llama3(rope: StretchedRope, head_dim: int, position: int) -> NDArray[np.float64]:
    inv_freq = RopeConfig.frequencies(rope, head_dim)
    wavelength = 2 * math.pi / inv_freq
    context = rope.original_max_position_embeddings
    ramp = (context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = np.clip(ramp, 0, 1)  # 1 for short wavelengths, 0 for long ones
    return (1 - keep) * inv_freq / rope.factor + keep * inv_freq


def _yarn(rope: StretchedRope, head_dim: int, position: int) -> NDArray[np.float64]:
    def pair_that_turns(turns: float) -> float:  # the pair that makes so many turns over the trained context
        positions_per_radian = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(positions_per_radian) / (2 * math.log(rope.theta))

    inv_freq = RopeConfig.frequencies(rope, head_dim)
    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    interpolate: NDArray[np.float64] = np.clip((np.arange(head_dim // 2) - low) / width, 0, 1)
    return (1 - interpolate) * inv_freq + interpolate * inv_freq / rope.factor


def _longrope(rope: StretchedRope, head_dim: int, position: int) -> NDArray[np.float64]:
    is_long = position >= rope.original_max_position_embeddings  # as with dynamic, by the length that this token sees
    factors = rope.long_factors if is_long else rope.short_factors
    return RopeConfig.frequencies(rope, head_dim) / np.array(factors, dtype=np.float64)


STRETCHINGS: dict[str, Callable[[StretchedRope, int, int], NDArray[np.float64]]] = {
    "linear": lambda rope, head_dim, position: RopeConfig.frequencies(rope, head_dim) / rope.factor,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
ROPE_TYPES = ("default", *STRETCHINGS)


def make_rope(theta: Any = 10000.0, rope_type: str = "default", **numbers: Any) -> RopeConfig:
    """The RoPE of that type. Raises ConfigError."""
    return RopeConfig(theta) if rope_type == "default" else StretchedRope(theta, rope_type, **numbers)


def longrope_scale(factor: float, original: int) -> float:
    """What longrope scales cos and sin by unless the model says otherwise: sqrt(1 + ln(factor) / ln(original))."""
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """What yarn scales cos and sin by unless the model says otherwise: 0.1 weight ln(factor) + 1."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


_KEYS = {  # beside the factor, as config.json calls them
    "linear": (),
    "dynamic": (),
    "llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate", "original_max_position_embeddings"),
    "longrope": ("attention_factor", "original_max_position_embeddings"),
}


def rope_json(rope: RopeConfig) -> dict[str, Any]:
    """The object that describes a RoPE in a config.json, without theta."""
    if not isinstance(rope, StretchedRope):
        return {"rope_type": "default"}
    keys = {name: getattr(rope, name) for name in ("rope_type", "factor", *_KEYS[rope.rope_type])}
    if rope.rope_type == "longrope":
        keys |= {"long_factor": list(rope.long_factors), "short_factor": list(rope.short_factors)}
    return keys
