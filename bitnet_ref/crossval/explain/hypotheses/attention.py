"""Mistakes in RoPE, in which tokens a token sees, in the grouping of heads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from numpy.typing import NDArray

from ....families.family import Hypothesis
from ....reference.config import RopeConfig
from ..edits import interleaved
from ..variants import Op, Sees, Setting, causal
from .layouts import permute_qk, query_mistake

rope_mistake = partial(Hypothesis, "*.attn.hook_rot_q *.attn.hook_rot_k")
scores_mistake = partial(Hypothesis, "*.attn.hook_attn_scores")
WINDOW = "A window of w is the token itself and w - 1 before it."


def _rope_interleaved(op: Op, q: NDArray, k: NDArray, cos: NDArray, sin: NDArray) -> tuple[NDArray, NDArray]:
    return interleaved(q, cos, sin), interleaved(k, cos, sin)


def _without_scaling(s: Setting) -> Setting | None:
    plain = RopeConfig(s.config.rope.theta)
    return None if s.config.rope == plain else s.with_config(rope=plain)


def _theta(value: float) -> Hypothesis:
    return rope_mistake(
        f"rope_theta_{value:.0f}",
        f"RoPE's theta is {value:.0f}, not the model's own",
        "Read rope_theta (or rope_parameters.rope_theta) from the config; 10000 is only a class default.",
        lambda s: s.with_rope(theta=value) if s.config.rope.theta != value else None,
    )


def _sees(name: str, cause: str, remedy: str, sees: Sees) -> Hypothesis:
    """A token sees other positions than it should. Does not apply where no token of the run would."""

    def change(s: Setting) -> Setting | None:
        window, n = s.config.sliding_window, len(s.tokens)

        def visible(rule: Sees) -> list[tuple[int, int]]:
            return [(first, min(stop, n)) for first, stop in (rule(i, window) for i in range(n))]

        return None if visible(sees) == visible(causal) else s.with_attention(sees=sees)

    return scores_mistake(name, cause, remedy, change)


def _kv_heads(s: Setting, kv_head_of: Callable[[int], int]) -> Setting:
    return s.with_attention(kv_heads=tuple(kv_head_of(h) for h in range(s.config.num_attention_heads)))


def _heads_interleaved(s: Setting) -> Setting | None:
    kv_heads = s.config.num_key_value_heads
    return _kv_heads(s, lambda h: h % kv_heads) if 1 < kv_heads < s.config.num_attention_heads else None


def _scaled_by_width(s: Setting) -> Setting | None:
    width = s.config.hidden_size / s.config.num_attention_heads
    return s.with_attention(factor=(s.config.head_dim / width) ** 0.5) if width != s.config.head_dim else None


# fmt: off
HYPOTHESES = (
    rope_mistake("rope_interleaved", "RoPE rotates the pairs (2j, 2j+1) instead of (j, j + d/2)",
        "Use the half-split (NeoX) form, or permute q and k to match the interleaved one.",
        lambda s: s.with_ops(rope=_rope_interleaved) if s.config.head_dim > 2 else None),
    query_mistake("qk_permuted_with_interleaved_rope",
        "q and k are stored permuted and RoPE is interleaved, as in llama.cpp: an equal computation in another order",
        "Nothing is wrong: compare from the attention scores on.",
        lambda s: permute_qk(s).with_ops(rope=_rope_interleaved) if s.config.head_dim > 2 else None),
    *(_theta(value) for value in (10000.0, 500000.0, 1000000.0)),
    rope_mistake("rope_scaling_ignored", "RoPE's scaling is ignored",
        "Apply rope_scaling (linear, dynamic, llama3, yarn) as the config says.",
        _without_scaling),
    rope_mistake("rope_missing", "q and k are not rotated at all",
        "Apply RoPE to q and k.", lambda s: s.with_ops(rope=lambda op, q, k, *rest: (q, k))),
    rope_mistake("rope_backwards", "RoPE rotates in the other direction",
        "x' = x cos - y sin, y' = y cos + x sin.",
        lambda s: s.with_ops(rope=lambda op, q, k, cos, sin: op(q, k, cos, -sin))),
    rope_mistake("positions_from_one", "positions are one too high: the first token's is 1",
        "The first token is at position 0; count the tokens already cached, not those plus one.",
        lambda s: s.with_ops(rope_tables=lambda op, positions, *rest: op(positions + 1, *rest))),
    _sees("cache_misses_the_newest", "the cache is read one entry short: a token does not see itself",
        "Write k and v before they are read; a token at position p reads p + 1 entries.",
        lambda position, window: (causal(position, window)[0], max(position, 1))),
    _sees("cache_misses_the_oldest", "the cache is read from its second entry: the first token is never seen",
        "A token at position p reads the entries 0 to p.",
        lambda position, window: (max(causal(position, window)[0], min(1, position)), position + 1)),
    _sees("sees_one_ahead", "the causal mask is off by one: a token sees the one after it",
        "Token i sees the tokens j <= i.", lambda position, window: (causal(position, window)[0], position + 2)),
    _sees("no_causal_mask", "there is no causal mask",
        "Token i sees the tokens j <= i.", lambda position, window: (0, 1 << 40)),
    _sees("window_one_too_long", "the sliding window is one token too long",
        WINDOW, lambda position, window: causal(position, None if window is None else window + 1)),
    _sees("window_one_too_short", "the sliding window is one token too short",
        WINDOW, lambda position, window: causal(position, None if window is None else max(1, window - 1))),
    _sees("window_ignored", "the sliding window is ignored",
        "Read sliding_window from the config.", lambda position, window: causal(position, None)),
    scores_mistake("gqa_heads_interleaved", "query heads are grouped wrongly: head h reads kv head h mod G",
        "Head h reads kv head h // (H/G): repeat each kv head H/G times in a row.", _heads_interleaved),
    scores_mistake("gqa_first_kv_head_for_all", "all query heads read the first kv head",
        "Head h reads kv head h // (H/G).",
        lambda s: _kv_heads(s, lambda h: 0) if s.config.num_key_value_heads > 1 else None),
    scores_mistake("scores_not_scaled", "scores are not divided by sqrt(d)",
        "q k / sqrt(head_dim).", lambda s: s.with_attention(factor=s.config.head_dim**0.5)),
    scores_mistake("scores_scaled_by_width", "scores are divided by sqrt(D / H) where head_dim is something else",
        "Read head_dim from the config; it need not be hidden_size / num_attention_heads.", _scaled_by_width),
)
