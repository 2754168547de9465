"""Mistakes in RoPE, in which tokens a token sees, in the grouping of heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from ....families.family import Hypothesis, instead, leave_out, own_rope, turned_by
from ....reference.config import RopeConfig
from ....reference.layers import Array
from ..attention import is_seen
from ..edits.attention import interleaved, reads_kv_head, sees_by
from ..variants import Step

rope_mistake = partial(Hypothesis, "*.attn.hook_rot_[qk]")
scores_mistake = partial(Hypothesis, "*.attn.hook_attn_scores")
WINDOW = "A window of w is the token itself and w - 1 before it."


def _is_first_rope(step: Step) -> bool:
    """Whether a block turns by the RoPE that all layers have in a model of one."""
    return step.setting.config.rope_of(step.layer or 0) == 0


def _plain(step: Step) -> RopeConfig:
    return RopeConfig(own_rope(step).theta)


def _sees(name: str, cause: str, remedy: str, rule: Callable[[Array, Array, int | None], Array]) -> Hypothesis:
    """Token i sees the tokens j for which rule(i, j, window) is true. Does not apply where that is right."""

    def fits(step: Step) -> bool:
        n, window = len(step.setting.tokens), step.inputs[2]
        return not np.array_equal(rule(np.arange(n)[:, None], np.arange(n)[None], window), is_seen(n, window))

    return scores_mistake(name, cause, remedy, sees_by(rule), fits)


def _width(step: Step) -> float:
    """The head_dim that hidden_size and the number of heads give."""
    return step.setting.config.hidden_size / step.setting.config.num_attention_heads


# fmt: off
HYPOTHESES = (
    rope_mistake("rope_interleaved", "RoPE rotates the pairs (2j, 2j+1) instead of (j, j + d/2)",
        "Use the half-split (NeoX) form, or permute q and k to match the interleaved one.",
        instead(interleaved), lambda step: step.setting.config.head_dim > 2),
    rope_mistake("rope_theta_10000", "RoPE's theta is 10000, not the model's own",
        "Read rope_theta (or rope_parameters.rope_theta) from the config; 10000 is only a class default.",
        turned_by(lambda step: replace(own_rope(step), theta=10000.0)),
        lambda step: _is_first_rope(step) and own_rope(step).theta != 10000),
    rope_mistake("rope_scaling_ignored", "RoPE's scaling is ignored",
        "Apply rope_scaling (linear, dynamic, llama3, yarn) as the config says.",
        turned_by(_plain), lambda step: _is_first_rope(step) and own_rope(step) != _plain(step)),
    rope_mistake("rope_missing", "q and k are not rotated at all",
        "Apply RoPE to q and k.", leave_out),
    rope_mistake("positions_from_one", "positions are one too high: the first token's is 1",
        "The first token is at position 0; count the tokens already cached, not those plus one.",
        turned_by(first=1)),
    _sees("cache_misses_the_newest", "the cache is read one entry short: a token does not see itself",
        "Write k and v before they are read; a token at position p reads p + 1 entries.",
        lambda i, j, window: is_seen(len(i), window) & (j < np.maximum(i, 1))),
    _sees("cache_misses_the_oldest", "the cache is read from its second entry: the first token is never seen",
        "A token at position p reads the entries 0 to p.",
        lambda i, j, window: is_seen(len(i), window) & (j >= np.minimum(i, 1))),
    _sees("sees_one_ahead", "the causal mask is off by one: a token sees the one after it",
        "Token i sees the tokens j <= i.", lambda i, j, window: is_seen(len(i), window) | (j == i + 1)),
    _sees("no_causal_mask", "there is no causal mask",
        "Token i sees the tokens j <= i.", lambda i, j, window: (i >= 0) & (j >= 0)),
    _sees("window_one_too_long", "the sliding window is one token too long",
        WINDOW, lambda i, j, window: is_seen(len(i), None if window is None else window + 1)),
    _sees("window_one_too_short", "the sliding window is one token too short",
        WINDOW, lambda i, j, window: is_seen(len(i), None if window is None else max(1, window - 1))),
    _sees("window_ignored", "the sliding window is ignored",
        "Read sliding_window from the config.", lambda i, j, window: j <= i),
    Hypothesis("*.attn.hook_attn_scores *.attn.hook_z", "gqa_heads_interleaved",
        "query heads are grouped wrongly: head h reads kv head h mod G",
        "Head h reads kv head h // (H/G): repeat each kv head H/G times in a row.",
        reads_kv_head(lambda i, h, g: i % g),
        lambda step: bool(1 < step.inputs[1].shape[1] < step.setting.config.num_attention_heads)),
    scores_mistake("scores_not_scaled", "scores are not divided by sqrt(d)",
        "q k / sqrt(head_dim).", lambda step, compute, q, *rest: compute(q, *rest) * np.float32(q.shape[2] ** 0.5)),
    scores_mistake("scores_scaled_by_width", "scores are divided by sqrt(D / H) where head_dim is something else",
        "Read head_dim from the config; it need not be hidden_size / num_attention_heads.",
        lambda step, compute, q, *rest: compute(q, *rest) * np.float32((q.shape[2] / _width(step)) ** 0.5),
        lambda step: _width(step) != step.setting.config.head_dim),
)
