"""Attention of many tokens at once, by the reference's own functions for one: the tokens stand beside the heads."""

from __future__ import annotations

import numpy as np

from ...reference import layers
from ...reference.layers import Array, Floats
from ..types import Mask


def scores_of(q: Floats, keys: Floats) -> Floats:
    """`layers.attention_scores` of several tokens.   q (n, H, d), keys (S, G, d) -> (H, n, S)"""
    n, heads, head_dim = q.shape
    by_kv_head = q.reshape(n, keys.shape[1], -1, head_dim).transpose(1, 2, 0, 3)  # (G, H/G, n, d)
    return layers.attention_scores(by_kv_head.reshape(-1, head_dim), keys).reshape(heads, n, -1)


def values_of(pattern: Floats, values: Floats) -> Floats:
    """`layers.attention_values` of several tokens.   pattern (H, n, S), values (S, G, d) -> (n, H, d)"""
    heads, n, n_keys = pattern.shape
    z = layers.attention_values(pattern.reshape(-1, n_keys), values)
    return np.ascontiguousarray(z.reshape(heads, n, -1).transpose(1, 0, 2))  # NumPy sums rows of this in its own order


def is_seen(n: int, window: int | None) -> Mask:
    """(n, n), which token sees which: itself and those before it, as far as the window reaches."""
    i, j = np.arange(n)[:, None], np.arange(n)
    return (j <= i) & (i - j < (n if window is None else window))


def all_scores(n: int, q: Array, keys: Array, window: int | None, sees: Array | None = None) -> Array:
    """Attention scores of sequences of n tokens, laid end to end.   q (N, H, d), keys (N, G, d) -> (H, N, n)

    sees: (n, n), which token sees which; None: as it should.
    """
    sees = is_seen(n, window) if sees is None else sees
    return np.concatenate([np.where(sees, scores_of(q[own], keys[own]), -np.inf) for own in _sequences(n, q)], axis=1)


def all_values(n: int, pattern: Array, v: Array) -> Array:
    """pattern (H, N, n), v (N, G, d) -> (N, H, d)"""
    return np.concatenate([values_of(pattern[:, own], v[own]) for own in _sequences(n, v)])


def _sequences(n: int, rows: Array) -> list[slice]:
    """The rows of each sequence of n tokens."""
    return [slice(start, start + n) for start in range(0, len(rows), n)]
