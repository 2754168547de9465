"""The layers of the transformer as NumPy functions: the formula, then the lines that compute it.

Row i of a result depends on row i of the input alone, computed in the same order whatever the other rows are ("batch
invariance"). BLAS picks another order of summation for another number of rows, so float products are taken one token
at a time.

Results have the input's dtype, float32 or float64. Before an int8 quantisation, sums and exponentials are float64 and
rounded once: another order of summation then gives the same float32, but for one case in a hundred million, and so the
same int8. In plain float32 two correct engines part ways after some fifty tokens, as one int8 that rounds the other way
moves the logits by a tenth. So dense linears among ternary ones are summed in float64 too; the head and the linears of
a dense model, which no int8 follows, in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import NumericsError, ShapeError

Array = NDArray[Any]
Floats = NDArray[np.floating[Any]]  # float32 or float64
Ints = NDArray[np.int64]  # of tokens: ids, positions, slots, indices
_BLOCK_VALUES = 1 << 20  # dense weights widened at a time: no narrow matrix is held in float32 as a whole


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """y = x / sqrt(mean(x^2) + eps) * weight.   x (N, D), weight (D,) -> (N, D)"""
    return x / rms_scale(x, eps) * weight


def rms_scale(x: Floats, eps: float) -> Floats:
    """sqrt(mean(x^2) + eps), the length that RMSNorm divides by.   x (N, D) -> (N, 1)"""
    mean_square: NDArray[np.float64] = np.square(x, dtype=np.float64).mean(axis=-1, keepdims=True)
    if not np.isfinite(mean_square).all():
        row = int(np.flatnonzero(~np.isfinite(mean_square))[0])
        raise NumericsError(f"rms_norm: token {row} holds NaN or Inf")
    return np.sqrt(mean_square + eps).astype(x.dtype)


def relu2(x: Floats) -> Floats:
    """relu(x)^2"""
    return np.square(np.maximum(x, 0))


def silu(x: Floats) -> Floats:
    """x * sigmoid(x) = x / (1 + e^-x), written so that e^-|x| never overflows."""
    wide = x.astype(np.float64)
    e = np.exp(-np.abs(wide))
    return (wide * np.where(wide >= 0, 1.0, e) / (1.0 + e)).astype(x.dtype)


class Activation(NamedTuple):
    """An activation of the feed-forward gate."""

    function: Callable[[Floats], Floats]
    formula: str
    words: str  # what crossval calls it in a sentence
    spellings: tuple[str, ...] = ()  # other names of it in config files
    backward: Callable[[Floats, Floats, Floats], tuple[Floats, Floats]] | None = None  # see `training.ops`


# Readers, writers, checks and backends use these names. Kernels have some of them; the function computes the others.
ACTIVATIONS = {
    "relu2": Activation(relu2, "relu(gate)^2 * up", "relu squared"),
    "silu": Activation(silu, "silu(gate) * up", "silu", ("swish",)),
}


def gated(gate: Floats, up: Floats, activation: str) -> Floats:
    """act(gate) * up: the activation is on the gate, not on the product.   (N, F), (N, F) -> (N, F)"""
    if activation not in ACTIVATIONS:
        raise ShapeError("gated", expected=f"an activation among {', '.join(ACTIVATIONS)}", got=repr(activation))
    return ACTIVATIONS[activation].function(gate) * up


def softmax(scores: Floats) -> Floats:
    """exp(s - max s) / sum, over the last axis."""
    e = np.exp((scores - scores.max(axis=-1, keepdims=True)).astype(np.float64))
    pattern: Floats = e / e.sum(axis=-1, keepdims=True)
    return pattern.astype(scores.dtype)


def softcap(logits: Floats, cap: float) -> Floats:
    """c tanh(logits / c): no logit beyond the cap."""
    return (cap * np.tanh(logits.astype(np.float64) / cap)).astype(logits.dtype)


def apply_rope(x: Floats, cos: Floats, sin: Floats) -> Floats:
    """Turn each pair (x[j], x[j + d/2]) by its token's angle ("half" RoPE).   x (N, H, d), cos (N, d/2) -> like x"""
    half = cos.shape[-1]  # narrower cos and sin (N, r/2) turn the first r numbers of each head only
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None, :], sin[:, None, :]  # the same for every head
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def attention_scores(q: Floats, keys: Floats) -> Floats:
    """q k / sqrt(d).   q (H, d), keys (S, G, d) -> (H, S).  Head h reads kv head h // (H/G)."""
    n_keys, kv_heads, head_dim = keys.shape
    grouped = q.reshape(kv_heads, -1, head_dim).astype(np.float64)  # (G, H/G, d)
    scores: Floats = grouped @ keys.transpose(1, 2, 0).astype(np.float64) * head_dim**-0.5  # (G, H/G, S)
    return scores.reshape(-1, n_keys).astype(q.dtype)


def attention_values(pattern: Floats, values: Floats) -> Floats:
    """The average of the values that the pattern asks for.   pattern (H, S), values (S, G, d) -> (H, d)"""
    n_keys, kv_heads, head_dim = values.shape
    grouped = pattern.reshape(kv_heads, -1, n_keys).astype(np.float64)  # (G, H/G, S)
    z = grouped @ values.transpose(1, 0, 2).astype(np.float64)  # (G, H/G, d)
    return z.reshape(-1, head_dim).astype(pattern.dtype)


def dense_matmul(x: Floats, w: Floats, wide: bool = False, widen: Callable[[Floats], Floats] = np.asarray) -> Floats:
    """y = x w^T, one token at a time.   x (N, K), w (out, K) of any float dtype -> (N, out)

    wide: sums in float64, rounded once. widen: makes floats of rows of w that are stored otherwise, some at a time.
    """
    y = np.empty((len(x), len(w)), dtype=x.dtype)
    tokens = x.astype(np.float64) if wide else x
    rows = max(1, _BLOCK_VALUES // w.shape[1])
    for start in range(0, len(w) if len(x) else 0, rows):
        block = widen(w[start : start + rows]).astype(tokens.dtype)
        for i in range(len(x)):
            y[i, start : start + rows] = block @ tokens[i]
    return y
