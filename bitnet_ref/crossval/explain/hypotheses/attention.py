"""Mistakes in RoPE, in what a token sees, in the grouping of heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ....backends import Backend
from ..variants import Sees, Setting, causal
from .base import Hypothesis, Kind, listed_in
from .layouts import permute_qk

HYPOTHESES: list[Hypothesis] = []
hypothesis = listed_in(HYPOTHESES)

ROTATED = "*.attn.hook_rot_q *.attn.hook_rot_k"
SCORES = "*.attn.hook_attn_scores"

# -- RoPE --------------------------------------------------------------------------------------------------------------


def _interleaved(x: NDArray, cos: NDArray, sin: NDArray) -> NDArray:
    """Turn the pairs (x[2j], x[2j+1]).   x (N, H, d), cos and sin (N, d/2)"""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = cos[:, None], sin[:, None]
    return np.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1).reshape(x.shape)


def _rope_interleaved(be: Backend, q: NDArray, k: NDArray, cos: NDArray, sin: NDArray) -> tuple[NDArray, NDArray]:
    return _interleaved(q, cos, sin), _interleaved(k, cos, sin)


@hypothesis(
    "rope_interleaved",
    ROTATED,
    "RoPE turns the pairs (2j, 2j+1) instead of (j, j + d/2)",
    "Use the half-split (NeoX) form, or permute q and k to go with the interleaved one.",
)
def _(s: Setting) -> Setting | None:
    return s.with_ops(rope=_rope_interleaved) if s.config.head_dim > 2 else None


@hypothesis(
    "qk_permuted_with_interleaved_rope",
    "*.q_proj.hook_acc_int32 *.q_proj.hook_out",
    "q and k are stored permuted and RoPE is interleaved, as in llama.cpp: an equal computation in another order",
    "Nothing is wrong: compare from the attention scores on.",
    Kind.PERMUTED,
)
def _(s: Setting) -> Setting | None:
    return permute_qk(s).with_ops(rope=_rope_interleaved) if s.config.head_dim > 2 else None


def _theta(value: float) -> None:
    @hypothesis(
        f"rope_theta_{value:.0f}",
        ROTATED,
        f"RoPE's theta is {value:.0f}, not the model's own",
        "Read rope_theta (or rope_parameters.rope_theta) from the config; 10000 is only a class default.",
    )
    def _(s: Setting) -> Setting | None:
        return s.with_rope(theta=value) if s.config.rope.theta != value else None


for _value in (10000.0, 500000.0, 1000000.0):
    _theta(_value)


@hypothesis(
    "rope_scaling_ignored",
    ROTATED,
    "RoPE's scaling is ignored",
    "Apply rope_scaling (linear, dynamic, llama3, yarn) as the config says.",
)
def _(s: Setting) -> Setting | None:
    return s.with_rope(rope_type="default") if s.config.rope.rope_type != "default" else None


@hypothesis("rope_missing", ROTATED, "q and k are not turned at all", "Apply RoPE to q and k.")
def _(s: Setting) -> Setting:
    return s.with_ops(rope=lambda be, q, k, cos, sin: (q, k))


@hypothesis("rope_backwards", ROTATED, "RoPE turns the other way", "x' = x cos - y sin, y' = y cos + x sin.")
def _(s: Setting) -> Setting:
    return s.with_ops(rope=lambda be, q, k, cos, sin: Backend.rope(be, q, k, cos, -sin))


@hypothesis(
    "positions_from_one",
    ROTATED,
    "positions are one too high: the first token's is 1",
    "The first token is at position 0; count the tokens already cached, not those plus one.",
)
def _(s: Setting) -> Setting:
    return s.with_ops(rope_tables=lambda be, positions, *more: Backend.rope_tables(be, positions + 1, *more))


# -- what a token sees -------------------------------------------------------------------------------------------------


def _seeing(s: Setting, sees: Sees) -> Setting | None:
    """The setting, unless no token of this run would see anything else."""
    window, n = s.config.sliding_window, len(s.tokens)
    same = all(_clipped(sees(i, window), n) == _clipped(causal(i, window), n) for i in range(n))
    return None if same else replace(s, sees=sees)


def _clipped(seen: tuple[int, int], n: int) -> tuple[int, int]:
    return seen[0], min(seen[1], n)


def _sees(name: str, cause: str, remedy: str, sees: Sees) -> None:
    @hypothesis(name, SCORES, cause, remedy, Kind.MASKED)
    def _(s: Setting) -> Setting | None:
        return _seeing(s, sees)


def _offset_window(offset: int) -> Sees:
    return lambda position, window: causal(position, None if window is None else max(1, window + offset))


_sees(
    "cache_misses_the_newest",
    "the cache is read one entry short: a token does not see itself",
    "Write k and v before they are read; a token at position p reads p + 1 entries.",
    lambda position, window: (causal(position, window)[0], max(position, 1)),
)
_sees(
    "cache_misses_the_oldest",
    "the cache is read from its second entry: the first token is never seen",
    "A token at position p reads the entries 0 to p.",
    lambda position, window: (max(causal(position, window)[0], min(1, position)), position + 1),
)
_sees(
    "sees_one_ahead",
    "the causal mask is off by one: a token sees the one after it",
    "Token i sees the tokens j <= i.",
    lambda position, window: (causal(position, window)[0], position + 2),
)
_sees("no_causal_mask", "there is no causal mask", "Token i sees the tokens j <= i.", lambda p, window: (0, 1 << 40))
_sees(
    "window_one_too_long",
    "the sliding window is one token too long",
    "A window of w is the token itself and w - 1 before it.",
    _offset_window(1),
)
_sees(
    "window_one_too_short",
    "the sliding window is one token too short",
    "A window of w is the token itself and w - 1 before it.",
    _offset_window(-1),
)
_sees(
    "window_ignored",
    "the sliding window is ignored",
    "Read sliding_window from the config.",
    lambda position, window: causal(position, None),
)

# -- heads -------------------------------------------------------------------------------------------------------------


def _per_head(s: Setting, kv_head_of: Callable[[int], int]) -> Setting:
    """Attention in which head h reads the kv head kv_head_of(h)."""
    order = np.array([kv_head_of(h) for h in range(s.config.num_attention_heads)])
    return s.with_ops(
        attention_scores=lambda be, q, keys: Backend.attention_scores(be, q, keys[:, order]),
        attention_values=lambda be, pattern, values: Backend.attention_values(be, pattern, values[:, order]),
    )


@hypothesis(
    "gqa_heads_interleaved",
    SCORES,
    "query heads are grouped wrongly: head h reads kv head h mod G",
    "Head h reads kv head h // (H/G): repeat each kv head H/G times in a row.",
)
def _(s: Setting) -> Setting | None:
    kv_heads = s.config.num_key_value_heads
    return _per_head(s, lambda h: h % kv_heads) if 1 < kv_heads < s.config.num_attention_heads else None


@hypothesis(
    "gqa_first_kv_head_for_all", SCORES, "all query heads read the first kv head", "Head h reads kv head h // (H/G)."
)
def _(s: Setting) -> Setting | None:
    return _per_head(s, lambda h: 0) if s.config.num_key_value_heads > 1 else None


def _scores_times(s: Setting, factor: float) -> Setting:
    return s.with_ops(attention_scores=lambda be, q, keys: Backend.attention_scores(be, q, keys) * np.float32(factor))


@hypothesis("scores_not_scaled", SCORES, "scores are not divided by sqrt(d)", "q k / sqrt(head_dim).", Kind.SCALED)
def _(s: Setting) -> Setting:
    return _scores_times(s, s.config.head_dim**0.5)


@hypothesis(
    "scores_scaled_by_width",
    SCORES,
    "scores are divided by sqrt(D / H) where head_dim is something else",
    "Read head_dim from the config; it need not be hidden_size / num_attention_heads.",
    Kind.SCALED,
)
def _(s: Setting) -> Setting | None:
    width = s.config.hidden_size / s.config.num_attention_heads
    return _scores_times(s, (s.config.head_dim / width) ** 0.5) if width != s.config.head_dim else None
