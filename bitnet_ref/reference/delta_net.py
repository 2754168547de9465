"""Gated DeltaNet: the block that Qwen3.5 has in three of four layers instead of attention.

It keeps no keys. Each value head has a matrix S (dk, dv), a memory that answers a key k with the value k S. A token:

    q, k, v     silu of a causal convolution over the last tokens, channel by channel; q and k of length 1, q / sqrt(dk)
    alpha       exp(-exp(A_log) softplus(a + dt_bias)), how much of the memory stays
    beta        sigmoid(b), how much of the error is corrected
    S           becomes alpha S + k^T beta (v - k alpha S): it forgets, then learns what it would have got wrong
    y           q S, normed per head, times silu(z)

So its state is of one size, however long the text: S, and the convolution's last inputs. The state can be copied but
not cut: a text is continued where it ended, or begun again (`DeltaStates`).

Source: Yang et al. 2024, "Gated Delta Networks" (arXiv:2412.06464), as in transformers' modeling_qwen3_5.py.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .config import DeltaConfig
from .layers import silu

L2_EPS = 1e-6


class DeltaInputs(NamedTuple):
    """What the recurrence takes of some tokens, in float64. T tokens, Hv value heads."""

    q: NDArray  # (T, Hv, dk)
    k: NDArray  # (T, Hv, dk)
    v: NDArray  # (T, Hv, dv)
    log_alpha: NDArray  # (T, Hv)
    beta: NDArray  # (T, Hv)


def causal_conv(qkv: NDArray, conv: NDArray) -> NDArray[np.float64]:
    """silu of the convolution, channel by channel. qkv (tokens - 1 + T, C) begins with the tokens before; conv (C,
    tokens), the current token's last.   -> (T, C)"""
    tokens, x = conv.shape[1], qkv.astype(np.float64)
    taps = [x[i : len(x) - (tokens - 1 - i)] * conv[:, i].astype(np.float64) for i in range(tokens)]
    return silu(sum(taps[1:], taps[0]))


def delta_inputs(mixed: NDArray, log_alpha: NDArray, beta: NDArray, cfg: DeltaConfig) -> DeltaInputs:
    """mixed (T, C): q, k and v after the convolution. log_alpha and beta (T, Hv)."""
    q, k, v = np.split(mixed.astype(np.float64), np.cumsum(cfg.sizes)[:-1], axis=1)
    group = cfg.value_heads // cfg.key_heads
    q, k = (np.repeat(_unit(x.reshape(len(mixed), cfg.key_heads, cfg.key_dim)), group, axis=1) for x in (q, k))
    v = v.reshape(len(mixed), cfg.value_heads, cfg.value_dim)
    return DeltaInputs(q * cfg.key_dim**-0.5, k, v, log_alpha.astype(np.float64), beta.astype(np.float64))


def _unit(x: NDArray) -> NDArray:
    """x / sqrt(sum(x^2) + eps), over the last axis."""
    return x / np.sqrt(np.square(x).sum(axis=-1, keepdims=True) + L2_EPS)


def delta_recurrence(x: DeltaInputs, memory: NDArray) -> NDArray:
    """Token by token. memory (Hv, dk, dv) is updated in place, in its own dtype.   -> y (T, Hv, dv) float64"""
    y = np.empty(x.v.shape, dtype=np.float64)
    for t in range(len(y)):
        stays = memory.astype(np.float64) * np.exp(x.log_alpha[t])[:, None, None]
        error = x.v[t] - (x.k[t][:, None, :] @ stays)[:, 0]  # (Hv, dv)
        memory[:] = stays + x.k[t][:, :, None] * (x.beta[t][:, None] * error)[:, None, :]
        y[t] = (x.q[t][:, None, :] @ memory.astype(np.float64))[:, 0]
    return y


def delta_chunk(x: DeltaInputs, memory: NDArray) -> NDArray:
    """All tokens at once: the same values as `delta_recurrence` but for rounding, by a few matrix products.

    The corrections of the tokens depend on each other: u = beta (v - k S_before - sum of earlier u, as this k sees
    them). That is a triangular system; with its solution the outputs and the new memory are sums.
    """
    total = np.cumsum(x.log_alpha, axis=0).T  # (Hv, T), the log of what stays of the memory since the beginning
    later = np.tril(np.ones((len(x.q), len(x.q)), dtype=bool))
    stays = np.exp(np.where(later, total[:, :, None] - total[:, None, :], -np.inf))  # (Hv, T, T), from j to i
    q, k, v = (part.transpose(1, 0, 2) for part in (x.q, x.k, x.v))  # (Hv, T, d)
    beta, from_start = x.beta.T[:, :, None], np.exp(total)[:, :, None]
    old = memory.astype(np.float64)
    system = np.eye(len(x.q)) + np.tril(beta * (k @ k.transpose(0, 2, 1)) * stays, -1)
    u = np.linalg.solve(system, beta * (v - from_start * (k @ old)))  # (Hv, T, dv)
    y = from_start * (q @ old) + ((q @ k.transpose(0, 2, 1)) * stays) @ u
    memory[:] = from_start[:, -1:] * old + (k * stays[:, -1, :, None]).transpose(0, 2, 1) @ u
    return y.transpose(1, 0, 2)
