"""The layers of the transformer as NumPy functions: the formula, then the lines that compute it.

Every function takes N tokens laid end to end, whatever sequences they belong to, and row i of its result depends on
row i of its input alone, computed in the same order whatever the other rows are ("batch invariance"). A matrix
product of the whole batch would not do: BLAS picks another order of summation for another number of rows. So where a
float product is needed, it is taken one token at a time; the call, and so its rounding, is then always the same.

The dtype of the input (float32 or float64) is the dtype of the result. On the way to the next int8 quantisation, sums
and exponentials are taken in float64 and rounded once: another order of summation, in another backend, then gives the
same float32 (but for one case in a hundred million), and so the same int8. In plain float32 two correct engines part
ways after some fifty tokens, because somewhere a value lies within their rounding of a tie, and one int8 that rounds
the other way moves the logits by a tenth. So dense linears among ternary ones are summed in float64 too; those of a
dense model, and the head, after which no int8 comes, are sums of float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, NumericsError, ShapeError
from .blocks import widen_blocks
from .config import RopeConfig

_BLOCK_VALUES = 1 << 20  # dense weights widened at a time


def rms_norm(x: NDArray, weight: NDArray, eps: float) -> NDArray:
    """y = x / sqrt(mean(x^2) + eps) * weight.   x (N, D), weight (D,) -> (N, D)"""
    return x / rms_scale(x, eps) * weight


def rms_scale(x: NDArray, eps: float) -> NDArray:
    """sqrt(mean(x^2) + eps), the length that RMSNorm divides by.   x (N, D) -> (N, 1)"""
    mean_square = np.square(x, dtype=np.float64).mean(axis=-1, keepdims=True)
    if not np.isfinite(mean_square).all():
        row = int(np.flatnonzero(~np.isfinite(mean_square))[0])
        raise NumericsError(f"rms_norm: token {row} holds NaN or Inf")
    return np.sqrt(mean_square + eps).astype(x.dtype)


def relu2(x: NDArray) -> NDArray:
    """relu(x)^2"""
    return np.square(np.maximum(x, 0))


def sigmoid(x: NDArray) -> NDArray:
    """1 / (1 + e^-x), written so that e^-|x| never overflows."""
    wide = x.astype(np.float64)
    e = np.exp(-np.abs(wide))
    return (np.where(wide >= 0, 1.0, e) / (1.0 + e)).astype(x.dtype)


def silu(x: NDArray) -> NDArray:
    """x * sigmoid(x) = x / (1 + e^-x), written so that e^-|x| never overflows."""
    wide = x.astype(np.float64)
    e = np.exp(-np.abs(wide))
    return (wide * np.where(wide >= 0, 1.0, e) / (1.0 + e)).astype(x.dtype)


GELU_SLOPE = math.sqrt(2.0 / math.pi)


def gelu_tanh(x: NDArray) -> NDArray:
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), the approximation of GELU that Gemma computes."""
    wide = x.astype(np.float64)
    return (0.5 * wide * (1.0 + np.tanh(GELU_SLOPE * (wide + 0.044715 * wide**3)))).astype(x.dtype)


GATES = {"relu2": relu2, "silu": silu, "gelu_tanh": gelu_tanh}


OUTPUT_GATES = {"sigmoid": sigmoid, "silu": silu}


def gated(gate: NDArray, up: NDArray, activation: str) -> NDArray:
    """act(gate) * up: the activation is on the gate, not on the product.   (N, F), (N, F) -> (N, F)"""
    if activation not in GATES:
        raise ShapeError("gated", expected=f"an activation among {', '.join(GATES)}", got=repr(activation))
    return GATES[activation](gate) * up


def softmax(scores: NDArray) -> NDArray:
    """exp(s - max s) / sum, over the last axis."""
    e = np.exp((scores - scores.max(axis=-1, keepdims=True)).astype(np.float64))
    return (e / e.sum(axis=-1, keepdims=True)).astype(scores.dtype)


def softcap(logits: NDArray, cap: float) -> NDArray:
    """c tanh(logits / c): no logit beyond the cap."""
    return (cap * np.tanh(logits.astype(np.float64) / cap)).astype(logits.dtype)


# -- rotary position embedding -----------------------------------------------------------------------------------------


def rope_frequencies(rope: RopeConfig, head_dim: int, position: int = 0) -> NDArray[np.float64]:
    """Radians a position, for each of the d/2 pairs.   -> (d/2,) float64

    `position` matters to dynamic and longrope only.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    inv_freq = rope.theta**-exponent
    if rope.rope_type == "linear":
        return inv_freq / rope.factor
    if rope.rope_type == "longrope":  # as with dynamic, by the length that this token sees
        is_long = position >= rope.original_max_position_embeddings
        return inv_freq / np.array(rope.long_factors if is_long else rope.short_factors)
    if rope.rope_type == "dynamic":
        # The base grows with the length seen *by this token*. transformers takes the longest length in the call for
        # all of its tokens, so there a prompt fed at once differs from the same prompt fed token by token; here the
        # two are equal, and equal to transformers' token by token.
        stretch = max(position + 1, rope.original_max_position_embeddings) / rope.original_max_position_embeddings
        growth = 1 + rope.factor * (stretch - 1)
        return (rope.theta * growth ** (head_dim / (head_dim - 2))) ** -exponent
    if rope.rope_type == "llama3":
        wavelength = 2 * math.pi / inv_freq
        context = rope.original_max_position_embeddings
        ramp = (context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = np.clip(ramp, 0, 1)  # 1 for short wavelengths, 0 for long ones
        return (1 - keep) * inv_freq / rope.factor + keep * inv_freq
    if rope.rope_type == "yarn":

        def pair_that_turns(rotations: float) -> float:  # the pair that makes so many turns over the trained context
            turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
            return head_dim * math.log(turns) / (2 * math.log(rope.theta))

        low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = high - low if high != low else 0.001
        interpolate = np.clip((np.arange(head_dim // 2) - low) / width, 0, 1)
        return (1 - interpolate) * inv_freq + interpolate * inv_freq / rope.factor
    if rope.rope_type == "default":
        return inv_freq
    raise ConfigError(f"RoPE type {rope.rope_type!r} is not supported", field="rope.rope_type")


def rope_tables(positions: NDArray, rope: RopeConfig, head_dim: int, dtype: type) -> tuple[NDArray, NDArray]:
    """cos and sin of every token's angles.   positions (N,) int -> two (N, d/2) arrays.

    The angles are computed in float64 and rounded once: at position 4096 a float32 angle is already off by 2e-4.
    """
    if rope.rope_type in ("dynamic", "longrope"):
        inv_freq = np.stack([rope_frequencies(rope, head_dim, int(p)) for p in positions])  # (N, d/2)
    else:
        inv_freq = rope_frequencies(rope, head_dim)  # (d/2,)
    angles = positions[:, None].astype(np.float64) * inv_freq
    factor = rope.attention_factor if rope.rope_type in ("yarn", "longrope") else 1.0
    return (np.cos(angles) * factor).astype(dtype), (np.sin(angles) * factor).astype(dtype)


def apply_rope(x: NDArray, cos: NDArray, sin: NDArray) -> NDArray:
    """Turn each pair (x[j], x[j + d/2]) by its token's angle ("half" RoPE).   x (N, H, d), cos (N, d/2) -> like x

    With narrower cos and sin (N, r/2) only the first r numbers of each head are turned.
    """
    if (turned := 2 * cos.shape[-1]) < x.shape[-1]:
        return np.concatenate([apply_rope(x[..., :turned], cos, sin), x[..., turned:]], axis=-1)
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = cos[:, None, :], sin[:, None, :]  # the same for every head
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


# -- attention of one token --------------------------------------------------------------------------------------------


def attention_scores(q: NDArray, keys: NDArray) -> NDArray:
    """q k / sqrt(d).   q (H, d), keys (S, G, d) -> (H, S).  Head h reads kv head h // (H/G)."""
    n_keys, kv_heads, head_dim = keys.shape
    grouped = q.reshape(kv_heads, -1, head_dim).astype(np.float64)  # (G, H/G, d)
    scores = grouped @ keys.transpose(1, 2, 0).astype(np.float64)  # (G, H/G, S)
    return (scores.reshape(-1, n_keys) * head_dim**-0.5).astype(q.dtype)


def attention_values(pattern: NDArray, values: NDArray) -> NDArray:
    """The average of the values that the pattern asks for.   pattern (H, S), values (S, G, d) -> (H, d)"""
    n_keys, kv_heads, head_dim = values.shape
    grouped = pattern.reshape(kv_heads, -1, n_keys).astype(np.float64)  # (G, H/G, S)
    z = grouped @ values.transpose(1, 0, 2).astype(np.float64)  # (G, H/G, d)
    return z.reshape(-1, head_dim).astype(pattern.dtype)


# -- dense products ----------------------------------------------------------------------------------------------------


def row_blocks(w: NDArray, dtype: type, block_type: str | None = None) -> Iterator[tuple[slice, NDArray]]:
    """Some rows of w (N, K) at a time, widened to dtype: a narrow matrix is never held in float32 as a whole."""
    rows = max(1, _BLOCK_VALUES // w.shape[1])
    for start in range(0, len(w), rows):
        part = w[start : start + rows]
        yield slice(start, start + rows), (part if block_type is None else widen_blocks(part, block_type)).astype(dtype)


def dense_matmul(x: NDArray, w: NDArray, wide: bool = False, block_type: str | None = None) -> NDArray:
    """y = x w^T, one token at a time.   x (N, K), w (out, K) of any float dtype -> (N, out)

    wide: sums in float64, rounded once. block_type: w holds rows of such blocks.
    """
    y = np.empty((len(x), len(w)), dtype=x.dtype)
    tokens = x.astype(np.float64) if wide else x
    for rows, block in row_blocks(w, tokens.dtype.type, block_type) if len(x) else ():
        for i in range(len(x)):
            y[i, rows] = block @ tokens[i]
    return y
