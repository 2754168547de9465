"""Each op of the training pass, and beside it its gradient: the formula, then the lines that compute it.

`dy` is the gradient of the loss with respect to the op's result; the backward function returns the gradients with
respect to its inputs. There is no tape: a forward op returns what its backward one needs, and the caller keeps it.

A pass computes one sequence of T tokens. So a sequence's loss and gradients do not depend on the others of its batch.
Forward, the arithmetic is that of `reference`: norms, softmax and gates are its functions, and products of integers are
exact. So a trained model computes the same integers when it is packed and run. Gradients are plain float32.

A quantised linear y = x_q W_q^T is a staircase, whose true gradient is zero almost everywhere. The straight-through
estimator takes quantisation for the identity in the backward pass ("Estimating or Propagating Gradients Through
Stochastic Neurons", arXiv:1308.3432): with the rescaled values X_q and W_q

    dX = dY W_q        dW = dY^T X_q        and nothing through the two scales.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..reference import layers, quantization

Gradient = NDArray
QUERY_BLOCK = 64  # queries whose scores are computed together; keys after the last of them are left out


# -- embedding ---------------------------------------------------------------------------------------------------------


def embed_backward(dy: NDArray, tokens: NDArray, vocab_size: int) -> Gradient:
    """dE[v] = sum of dy over the places of token v.   dy (T, D) -> (V, D)"""
    order = np.argsort(tokens, kind="stable")
    ids, starts = np.unique(tokens[order], return_index=True)
    d_table = np.zeros((vocab_size, dy.shape[1]), dtype=dy.dtype)
    d_table[ids] = np.add.reduceat(dy[order], starts, axis=0)
    return d_table


# -- RMSNorm -----------------------------------------------------------------------------------------------------------


def rms_norm(x: NDArray, weight: NDArray, eps: float) -> tuple[NDArray, NDArray]:
    """y = x / r * g with r = sqrt(mean(x^2) + eps).   x (T, D), weight g (D,) -> y (T, D), r (T, 1)"""
    r = layers.rms_scale(x, eps)
    return x / r * weight, r


def rms_norm_backward(dy: NDArray, x: NDArray, weight: NDArray, r: NDArray) -> tuple[Gradient, Gradient]:
    """dx = (dy g - n mean(dy g n)) / r and dg = sum over tokens of dy n, with n = x / r.   -> dx (T, D), dg (D,)

    The mean is there because r depends on every value of the row.
    """
    n = x / r
    d_weight = np.einsum("td,td->d", dy, n)
    dn = dy * weight
    mean = np.einsum("td,td->t", dn, n)[:, None] / x.shape[1]
    dn -= n * mean
    dn /= r
    return dn, d_weight


# -- linears -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class StepLinear:
    """Linears of one input, stacked, as one optimiser step uses them: W_q = values * scales.

    values (out, K): ternary (-1, 0, +1) with scales (out,), or a dense matrix with scales None.
    mix: the share of quantisation, "lambda": W + mix (W_q - W), and likewise for x. Below 1, `values` is that sum.
    """

    values: NDArray
    scales: NDArray | None
    mix: float = 1.0

    @classmethod
    def quantize(cls, masters: list[NDArray], mix: float = 1.0) -> StepLinear:
        """BitLinears: each matrix by its own absmean."""
        pairs = [quantization.quantize_weights(w) for w in masters]
        dtype = masters[0].dtype
        if mix < 1:
            mixed = [w + mix * (w_t * s - w) for w, (w_t, s) in zip(masters, pairs, strict=True)]
            return cls(np.concatenate(mixed).astype(dtype, copy=False), None, mix)
        scales = np.concatenate([np.full(len(w_t), s, dtype) for w_t, s in pairs])
        return cls(np.concatenate([w_t for w_t, _ in pairs]).astype(dtype), scales)

    @classmethod
    def dense(cls, masters: list[NDArray]) -> StepLinear:
        return cls(masters[0] if len(masters) == 1 else np.concatenate(masters), None, 0.0)


@dataclass(frozen=True, eq=False)
class LinearInput:
    """What the backward pass of a linear needs of its input: x_q (T, K) int8 with its scale, or x (T, K) itself."""

    x: NDArray
    x_quant_scale: NDArray | None = None

    def rescaled(self, dtype: np.dtype) -> NDArray:
        return self.x if self.x_quant_scale is None else self.x.astype(dtype) / self.x_quant_scale


def linear(x: NDArray, w: StepLinear) -> tuple[NDArray, LinearInput]:
    """y = x_q W_q^T, by absmax and absmean; of a dense weight y = x W^T.   x (T, K) -> y (T, out)

    x_q w_t^T is a sum of integers, which float32 holds exactly; the scales follow, as in `quantization.dequantize`.
    """
    if w.mix == 0:
        return x @ w.values.T, LinearInput(x)
    x_q, x_quant_scale = quantization.quantize_activations(x)
    if w.scales is None:
        x = x + x.dtype.type(w.mix) * (x_q / x_quant_scale - x)
        return x @ w.values.T, LinearInput(x)
    y = x_q.astype(x.dtype) @ w.values.T
    y *= w.scales / x_quant_scale
    return y, LinearInput(x_q, x_quant_scale)


def linear_backward(dy: NDArray, saved: LinearInput, w: StepLinear) -> tuple[Gradient, Gradient]:
    """dX = dY W_q and dW = dY^T X_q, straight through both quantisations.   dy (T, out) -> dx (T, K), dW (out, K)"""
    d_weight = dy.T @ saved.rescaled(dy.dtype)
    return (dy if w.scales is None else dy * w.scales) @ w.values, d_weight


# -- attention of one sequence -----------------------------------------------------------------------------------------


def attention(q: NDArray, k: NDArray, v: NDArray, window: int | None) -> tuple[NDArray, list[NDArray]]:
    """z = softmax(q k^T / sqrt(d)) v, causal; head h reads kv head h // (H/G).   q (T, H, d), k and v (T, G, d)

    -> z (T, H, d), and the pattern of each block of queries (G, H/G, queries, keys).
    """
    (tokens, kv_heads, head_dim), dtype = k.shape, q.dtype
    queries = _by_kv_head(q, kv_heads).astype(np.float64)  # (G, H/G, T, d)
    keys, values = (x.transpose(1, 0, 2)[:, None].astype(np.float64) for x in (k, v))  # (G, 1, T, d)
    z, patterns = np.empty_like(queries, dtype=dtype), []
    for start, stop, first, mask in _query_blocks(tokens, window):
        scores = queries[:, :, start:stop] @ keys[:, :, first:stop].transpose(0, 1, 3, 2)
        scores = (scores * head_dim**-0.5).astype(dtype)
        scores[..., mask] = -np.inf
        pattern = layers.softmax(scores)
        z[:, :, start:stop] = pattern.astype(np.float64) @ values[:, :, first:stop]
        patterns.append(pattern)
    return _by_token(z), patterns


def attention_backward(
    dz: NDArray, q: NDArray, k: NDArray, v: NDArray, patterns: list[NDArray], window: int | None
) -> tuple[Gradient, Gradient, Gradient]:
    """With P the pattern: dV = P^T dz, dP = dz V^T, dS = P (dP - sum(dP P)) / sqrt(d), dQ = dS K, dK = dS^T Q.

    A kv head's gradients are the sums over the query heads that read it.   -> like q, k, v
    """
    tokens, kv_heads, head_dim = k.shape
    queries, dz = _by_kv_head(q, kv_heads), _by_kv_head(dz, kv_heads)  # (G, H/G, T, d)
    keys, values = (x.transpose(1, 0, 2)[:, None] for x in (k, v))  # (G, 1, T, d)
    dq = np.empty_like(queries)
    dk, dv = (np.zeros((kv_heads, tokens, head_dim), dtype=q.dtype) for _ in range(2))
    for (start, stop, first, _), pattern in zip(_query_blocks(tokens, window), patterns, strict=True):
        dz_block, seen = dz[:, :, start:stop], slice(first, stop)
        d_scores = dz_block @ values[:, :, seen].transpose(0, 1, 3, 2)
        d_scores -= np.einsum("grqk,grqk->grq", d_scores, pattern)[..., None]
        d_scores *= pattern
        d_scores *= head_dim**-0.5
        dq[:, :, start:stop] = d_scores @ keys[:, :, seen]
        dk[:, seen] += (d_scores.transpose(0, 1, 3, 2) @ queries[:, :, start:stop]).sum(axis=1)
        dv[:, seen] += (pattern.transpose(0, 1, 3, 2) @ dz_block).sum(axis=1)
    return _by_token(dq), dk.transpose(1, 0, 2), dv.transpose(1, 0, 2)


def _query_blocks(tokens: int, window: int | None) -> list[tuple[int, int, int, NDArray[np.bool_]]]:
    """(first query, last + 1, first key that any of them sees, which (query, key) pairs are hidden)"""
    blocks = []
    for start in range(0, tokens, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, tokens)
        first = 0 if window is None else max(0, start - window + 1)
        query, key = np.arange(start, stop)[:, None], np.arange(first, stop)
        blocks.append((start, stop, first, (key > query) | (key <= query - (window or tokens + 1))))
    return blocks


def _by_kv_head(x: NDArray, kv_heads: int) -> NDArray:
    """(T, H, d) -> (G, H/G, T, d)"""
    tokens, heads, head_dim = x.shape
    return x.reshape(tokens, kv_heads, heads // kv_heads, head_dim).transpose(1, 2, 0, 3)


def _by_token(x: NDArray) -> NDArray:
    """(G, H/G, T, d) -> (T, H, d)"""
    kv_heads, group, tokens, head_dim = x.shape
    return x.transpose(2, 0, 1, 3).reshape(tokens, kv_heads * group, head_dim)


def rope_backward(dy: NDArray, cos: NDArray, sin: NDArray) -> Gradient:
    """A rotation's gradient is turned back by the same angle.   dy (T, H, d) -> like dy"""
    return layers.apply_rope(dy, cos, -sin)


# -- the gate ----------------------------------------------------------------------------------------------------------


def gated_backward(dy: NDArray, gate: NDArray, up: NDArray, activation: str) -> tuple[Gradient, Gradient]:
    """Of y = act(gate) up: d gate = dy up act'(gate), d up = dy act(gate).

    relu2: act' = 2 relu(x).   silu: act' = s (1 + x (1 - s)) with s = sigmoid(x).
    gelu_tanh: act = x (1 + t) / 2 with t = tanh(u(x)), act' = (1 + t + x (1 - t^2) u'(x)) / 2.
    """
    if activation == "relu2":
        positive = np.maximum(gate, 0)
        d_up = dy * positive
        d_gate = d_up * up
        d_gate *= 2
        d_up *= positive
        return d_gate, d_up
    if activation == "silu":
        s = 1 / (1 + np.exp(-np.clip(gate, -80, 80)))
        return dy * up * (s * (1 + gate * (1 - s))), dy * gate * s
    if activation == "gelu_tanh":
        t = np.tanh(layers.GELU_SLOPE * (gate + 0.044715 * gate**3))
        slope = (1 + t) + gate * (1 - t * t) * layers.GELU_SLOPE * (1 + 3 * 0.044715 * gate**2)
        return dy * up * (0.5 * slope), dy * (0.5 * gate * (1 + t))
    raise ConfigError(f"training knows no gradient of {activation!r}", field="hidden_act")


# -- the loss ----------------------------------------------------------------------------------------------------------


def cross_entropy(logits: NDArray, targets: NDArray) -> tuple[NDArray[np.float64], NDArray]:
    """-log softmax(logits)[target].   logits (T, V), targets (T,) -> losses (T,) float64, probabilities (T, V)"""
    rows = np.arange(len(targets))
    shifted = logits - logits.max(axis=-1, keepdims=True)
    chosen = shifted[rows, targets].astype(np.float64)
    e = np.exp(shifted, out=shifted)
    sums = e.sum(axis=-1, dtype=np.float64)
    e /= sums[:, None].astype(e.dtype)
    return np.log(sums) - chosen, e


def cross_entropy_backward(probabilities: NDArray, targets: NDArray, weight: float) -> Gradient:
    """d logits = (p - [target]) * weight, in place; weight is 1 / (number of targets in the batch) of a mean."""
    probabilities[np.arange(len(targets)), targets] -= 1
    probabilities *= weight
    return probabilities
