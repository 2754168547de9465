"""Each op of the training pass, and beside it its gradient: the formula, then the lines that compute it.

`dy` is the gradient of the loss with respect to the op's result; the backward function returns the gradients with
respect to its inputs. There is no tape: a forward op returns what its backward one needs, and the caller keeps it.

A pass computes one sequence of T tokens. So a sequence's loss and gradients do not depend on the others of its batch.
Forward, the arithmetic is that of `reference`: norms, softmax and gates are its functions, and products of integers are
exact. So a trained model computes the same integers when it is packed and run. Gradients are plain float32, or their
products with matrices are of values rounded to bfloat16: see `product`.

Arrays are NumPy's or CuPy's: what is made is made `like` an argument, and nothing is converted unasked. Tokens are on
the host.

A quantised linear y = x_q W_q^T is a staircase, whose true gradient is zero almost everywhere. The straight-through
estimator takes quantisation for the identity in the backward pass ("Estimating or Propagating Gradients Through
Stochastic Neurons", arXiv:1308.3432): with the rescaled values X_q and W_q

    dX = dY W_q        dW = dY^T X_q        and nothing through the two scales.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..reference import layers
from ..reference import quantization as quantization
from ..reference.layers import Array, Floats, Ints

Gradient = Floats
QUERY_BLOCK = 64  # queries whose scores are computed together; keys after the last of them are left out
_ADAM_BLOCK = 1 << 15  # values updated at a time: their arrays stay in the processor's cache


# -- products of gradients ---------------------------------------------------------------------------------------------

Product = Callable[[Array, Array], Array]


def product(a: Floats, b: Floats) -> Gradient:
    """a b: each product of a gradient with a matrix, and those of Muon. `product_bfloat16` can stand in for it."""
    result: Gradient = a @ b
    return result


def product_bfloat16(a: Floats, b: Floats) -> Gradient:
    """a b of values rounded to bfloat16, with sums in a's dtype.

    A ternary matrix loses nothing; a gradient or a rescaled activation at most 2^-9 of itself.
    """
    result: Gradient = round_bfloat16(a) @ round_bfloat16(b)
    return result


def round_bfloat16(x: Floats) -> Floats:
    """The nearest number of 8 significant bits, half to even, in x's dtype. By its bits, as CuPy's arrays can, too."""
    bits = x.astype(np.float32, copy=False).view(np.uint32)
    bits = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) & np.uint32(0xFFFF0000)
    rounded: Floats = bits.view(np.float32).astype(x.dtype, copy=False)
    return rounded


# -- embedding ---------------------------------------------------------------------------------------------------------


def embed_backward(dy: Floats, tokens: NDArray[np.int64], d_table: Gradient) -> None:
    """dE[v] += sum of dy over the places of token v.   dy (T, D), tokens (T,) on the host, d_table (V, D)"""
    ids, index = np.unique(tokens, return_inverse=True)
    places = (np.arange(len(ids))[:, None] == index).astype(dy.dtype)  # (ids, T): 1 where the token is that id
    d_table[np.asarray(ids, like=dy)] += np.asarray(places, like=dy) @ dy


# -- RMSNorm -----------------------------------------------------------------------------------------------------------


def rms_norm(x: Floats, weight: Floats, eps: float) -> tuple[Floats, Floats]:
    """y = x / r * g with r = sqrt(mean(x^2) + eps).   x (T, D), weight g (D,) -> y (T, D), r (T, 1)"""
    r = layers.rms_scale(x, eps)
    return x / r * weight, r


def rms_norm_backward(dy: Floats, x: Floats, weight: Floats, r: Floats) -> tuple[Gradient, Gradient]:
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
    sizes: outputs of each linear.
    mix: the share of quantisation, "lambda": W + mix (W_q - W), and likewise for x. Below 1, `values` is that sum.
    """

    values: Floats
    scales: Floats | None
    sizes: tuple[int, ...]
    mix: float = 1.0

    @classmethod
    def quantize(cls, masters: list[Floats], mix: float = 1.0) -> StepLinear:
        """BitLinears: each matrix by its own absmean."""
        pairs = [quantization.quantize_weights(w) for w in masters]
        dtype, sizes = masters[0].dtype, tuple(map(len, masters))
        if mix < 1:
            mixed = [w + mix * (w_t * s - w) for w, (w_t, s) in zip(masters, pairs, strict=True)]
            return cls(np.concatenate(mixed).astype(dtype, copy=False), None, sizes, mix)
        scales = np.concatenate([np.full(len(w_t), s, dtype) for w_t, s in pairs])
        values = np.concatenate([w_t for w_t, _ in pairs]).astype(dtype)
        return cls(values, np.asarray(scales, like=values), sizes)

    @classmethod
    def dense(cls, masters: list[Floats]) -> StepLinear:
        values = masters[0] if len(masters) == 1 else np.concatenate(masters)
        return cls(values, None, tuple(map(len, masters)), 0.0)

    def split(self, x: Floats, axis: int) -> list[Floats]:
        """The linears' parts of an array whose `axis` has all outputs."""
        before = (slice(None),) * axis  # slices: np.split takes five times as long
        return [x[*before, end - size : end] for size, end in zip(self.sizes, accumulate(self.sizes), strict=True)]


@dataclass(frozen=True, eq=False)
class LinearInput:
    """What the backward pass of a linear needs of its input: x_q (T, K) int8 with its scale, or x (T, K) itself."""

    x: Array
    x_quant_scale: Floats | None = None

    def rescaled(self, dtype: np.dtype) -> Floats:
        return self.x if self.x_quant_scale is None else self.x.astype(dtype) / self.x_quant_scale


def linear(x: Floats, w: StepLinear) -> tuple[list[Floats], LinearInput]:
    """y = x_q W_q^T, by absmax and absmean; of a dense weight y = x W^T.   x (T, K) -> [y (T, out) of each linear]

    x_q w_t^T is a sum of integers, which float32 holds exactly; the scales follow, as in `quantization.dequantize`.
    """
    if w.mix == 0:
        return w.split(x @ w.values.T, 1), LinearInput(x)
    x_q, x_quant_scale = quantization.quantize_activations(x)
    if w.scales is None:
        x = x + x.dtype.type(w.mix) * (x_q / x_quant_scale - x)
        return w.split(x @ w.values.T, 1), LinearInput(x)
    y = x_q.astype(x.dtype) @ w.values.T
    y *= w.scales / x_quant_scale
    return w.split(y, 1), LinearInput(x_q, x_quant_scale)


def linear_backward(
    dys: Sequence[Floats], saved: LinearInput, w: StepLinear, product: Product = product
) -> tuple[Gradient, list[Gradient]]:
    """dX = dY W_q and dW = dY^T X_q, straight through both quantisations.

    [dy (T, out) of each linear] -> dx (T, K), [dW (out, K) of each]
    product: of two matrices, `product` or `product_bfloat16`.
    """
    dy = dys[0] if len(dys) == 1 else np.concatenate(dys, axis=1)
    d_weight = product(dy.T, saved.rescaled(dy.dtype))
    return product(dy if w.scales is None else dy * w.scales, w.values), w.split(d_weight, 0)


# -- attention of one sequence -----------------------------------------------------------------------------------------


def attention(q: Floats, k: Floats, v: Floats, window: int | None) -> tuple[Floats, list[Floats]]:
    """z = softmax(q k^T / sqrt(d)) v, causal; head h reads kv head h // (H/G).   q (T, H, d), k and v (T, G, d)

    -> z (T, H, d), and the pattern of each block of queries (G, H/G queries, keys).
    """
    (tokens, kv_heads, head_dim), dtype = k.shape, q.dtype
    queries = by_kv_head(q, kv_heads).astype(np.float64)  # (G, H/G, T, d)
    keys, values = (x.transpose(1, 0, 2).astype(np.float64) for x in (k, v))  # (G, T, d)
    z, patterns = np.empty_like(queries, dtype=dtype), []
    for start, stop, first in query_blocks(tokens, window):
        scores = block_rows(queries, start, stop) @ keys[:, first:stop].transpose(0, 2, 1)
        scores = (scores * head_dim**-0.5).astype(dtype)
        query, key = np.arange(start, stop, like=q)[:, None], np.arange(first, stop, like=q)
        hidden = (key > query) | (key <= query - (window or tokens + 1))
        seen = np.where(hidden, -math.inf, scores.reshape(-1, *hidden.shape))
        pattern = layers.softmax(seen).reshape(scores.shape)
        z_rows = pattern.astype(np.float64) @ values[:, first:stop]
        z[:, :, start:stop] = z_rows.reshape(z[:, :, start:stop].shape)
        patterns.append(pattern)
    return _by_token(z), patterns


def softmax_backward(d_scores: Floats, pattern: Floats, scale: float) -> None:
    """dS = P (dP - sum(dP P)) scale, in place.   d_scores, pattern (G, H/G queries, keys)"""
    d_scores -= np.einsum("gqk,gqk->gq", d_scores, pattern)[..., None]
    d_scores *= pattern
    d_scores *= scale


def attention_backward(
    dz: Floats,
    q: Floats,
    k: Floats,
    v: Floats,
    patterns: list[Floats],
    window: int | None,
    of_softmax: Callable[[Floats, Floats, float], None] = softmax_backward,
) -> tuple[Gradient, Gradient, Gradient]:
    """With P the pattern: dV = P^T dz, dP = dz V^T, dS = P (dP - sum(dP P)) / sqrt(d), dQ = dS K, dK = dS^T Q.

    A kv head's gradients are the sums over the query heads that read it.   -> like q, k, v
    """
    tokens, kv_heads, head_dim = k.shape
    queries, dz = by_kv_head(q, kv_heads), by_kv_head(dz, kv_heads)  # (G, H/G, T, d)
    keys, values = (x.transpose(1, 0, 2) for x in (k, v))  # (G, T, d)
    dq = np.empty_like(queries)
    dk, dv = (np.zeros((kv_heads, tokens, head_dim), dtype=q.dtype, like=q) for _ in range(2))
    for (start, stop, first), pattern in zip(query_blocks(tokens, window), patterns, strict=True):
        rows, dz_rows, seen = block_rows(queries, start, stop), block_rows(dz, start, stop), slice(first, stop)
        d_scores = dz_rows @ values[:, seen].transpose(0, 2, 1)
        of_softmax(d_scores, pattern, head_dim**-0.5)
        dq[:, :, start:stop] = (d_scores @ keys[:, seen]).reshape(dq[:, :, start:stop].shape)
        dk[:, seen] += d_scores.transpose(0, 2, 1) @ rows
        dv[:, seen] += pattern.transpose(0, 2, 1) @ dz_rows
    return _by_token(dq), dk.transpose(1, 0, 2), dv.transpose(1, 0, 2)


def query_blocks(tokens: int, window: int | None) -> list[tuple[int, int, int]]:
    """(first query, last + 1, first key that any of them sees)"""
    return [
        (start, min(start + QUERY_BLOCK, tokens), 0 if window is None else max(0, start - window + 1))
        for start in range(0, tokens, QUERY_BLOCK)
    ]


def by_kv_head(x: Floats, kv_heads: int) -> Floats:
    """(T, H, d) -> (G, H/G, T, d)"""
    tokens, heads, head_dim = x.shape
    return x.reshape(tokens, kv_heads, heads // kv_heads, head_dim).transpose(1, 2, 0, 3)


def block_rows(x: Floats, start: int, stop: int) -> Floats:
    """The rows of some tokens, of all heads that read one kv head.   (G, H/G, T, d) -> (G, H/G (stop - start), d)"""
    part = x[:, :, start:stop]
    return part.reshape(len(x), -1, part.shape[3])


def _by_token(x: Floats) -> Floats:
    """(G, H/G, T, d) -> (T, H, d)"""
    kv_heads, group, tokens, head_dim = x.shape
    return x.transpose(2, 0, 1, 3).reshape(tokens, kv_heads * group, head_dim)


rope = layers.apply_rope


def rope_backward(dy: Floats, cos: Floats, sin: Floats) -> Gradient:
    """The gradient of RoPE: turned back by the same angles.   dy (T, H, d) -> like dy"""
    return layers.apply_rope(dy, cos, -sin)


# -- the gate ----------------------------------------------------------------------------------------------------------


gated = layers.gated


def gated_backward(dy: Floats, gate: Floats, up: Floats, activation: str) -> tuple[Gradient, Gradient]:
    """Of y = act(gate) up: d gate = dy up act'(gate), d up = dy act(gate).

    relu2: act' = 2 relu(x).   silu: act' = s (1 + x (1 - s)) with s = sigmoid(x).
    Other activations bring their own (`Activation.backward`). Raises ConfigError for one that has none.
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
    known = layers.ACTIVATIONS.get(activation)
    if known is None or known.backward is None:
        raise ConfigError(f"training knows no gradient of {activation!r}", field="hidden_act")
    return known.backward(dy, gate, up)


# -- the loss ----------------------------------------------------------------------------------------------------------


def cross_entropy(logits: Floats, targets: Ints) -> tuple[NDArray[np.float64], Floats]:
    """-log softmax(logits)[target].   logits (T, V), targets (T,) -> losses (T,) float64, probabilities (T, V)"""
    rows, targets = np.arange(len(targets), like=logits), np.asarray(targets, like=logits)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    chosen = shifted[rows, targets].astype(np.float64)
    e = np.exp(shifted, out=shifted)
    sums = e.sum(axis=-1, dtype=np.float64)
    e /= sums[:, None].astype(e.dtype)
    return np.log(sums) - chosen, e


def cross_entropy_backward(probabilities: Floats, targets: Ints, weight: float) -> Gradient:
    """d logits = (p - [target]) * weight, in place; weight is 1 / (number of targets in the batch) of a mean."""
    rows, targets = np.arange(len(targets), like=probabilities), np.asarray(targets, like=probabilities)
    probabilities[rows, targets] -= 1
    probabilities *= weight
    return probabilities


# -- the optimiser, of one array ---------------------------------------------------------------------------------------


def sum_of_squares(g: Gradient) -> float:
    """In float64."""
    return float(np.square(g, dtype=np.float64).sum())


class AdamRates(NamedTuple):
    """The numbers of one step; keep: what weight decay leaves of w."""

    b1: float
    b2: float
    v_scale: float
    eps: float
    keep: float
    step_size: float


def adamw(w: Floats, g: Gradient, m: Floats, v: Floats, rates: AdamRates) -> None:
    """w = w keep - step_size m / (sqrt(v) / v_scale + eps), in place, with the means m and v of g and g^2: `AdamW`."""
    b1, b2 = rates.b1, rates.b2
    flat = w.reshape(-1), g.reshape(-1), m.reshape(-1), v.reshape(-1)
    block = _ADAM_BLOCK if isinstance(w, np.ndarray) else w.size  # on a card all at once
    for start in range(0, w.size, block):
        w_b, g_b, m_b, v_b = (array[start : start + block] for array in flat)
        m_b *= b1
        m_b += (1 - b1) * g_b
        v_b *= b2
        v_b += (1 - b2) * np.square(g_b)
        denominator = np.sqrt(v_b)
        denominator /= rates.v_scale
        denominator += rates.eps
        w_b *= rates.keep
        w_b -= rates.step_size * m_b / denominator


# Coefficients of x (a + b x^2 + c x^4), five times of which brings singular values from 0.01 to 1 between 0.7 and 1.2.
_NEWTON_SCHULZ = 3.4445, -4.7750, 2.0315
_NEWTON_SCHULZ_STEPS = 5
_MUON_LEAST = np.float32(1e-18)  # of the largest value: products of two such values are still normal numbers


def orthogonalize(g: Gradient, product: Product = product) -> Gradient:
    """U V^T of g = U S V^T, nearly: its singular values between 0.7 and 1.2, by Newton-Schulz steps in g's own dtype.

    Source: "Muon: An optimizer for hidden layers in neural networks" (Jordan et al., 2024).
    g (rows, columns) -> like g
    """
    a, b, c = _NEWTON_SCHULZ
    x = g if g.shape[0] <= g.shape[1] else g.T.copy()  # products of rows that lie together are faster
    x = x / (np.sqrt((x * x).sum()) + x.dtype.type(1e-7))
    for _ in range(_NEWTON_SCHULZ_STEPS):
        square = product(x, x.T)  # of the shorter side
        x = a * x + product(b * square + c * product(square, square), x)
    result: Gradient = x if g.shape[0] <= g.shape[1] else x.T
    return result


def muon(
    w: Floats, g: Gradient, m: Floats, momentum: float, keep: float, lr: float, product: Product = product
) -> None:
    """w = w keep - lr 0.2 sqrt(max(rows, columns)) orthogonalize(g + momentum m), in place: `Muon`."""
    m *= momentum
    m += g
    # A neuron that never fires has the gradient 0, and its row of m falls to float32's subnormal numbers, which halve
    # no further. BLAS is slow on them: after 2,700 steps of storyteller's shape a step took three times as long.
    size = np.abs(m)
    m *= size >= _MUON_LEAST * size.max()
    w *= keep
    w -= (lr * 0.2 * math.sqrt(max(w.shape))) * orthogonalize(g + momentum * m, product)
