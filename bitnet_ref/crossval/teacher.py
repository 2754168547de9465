"""Teacher-forced comparison: every op of a candidate backend on the reference's own inputs.

In a free run an error in one op is the input of the next, and a single flipped rounding moves everything after it. Here
the reference computes the flow; beside each of its ops the candidate computes the same op from the same arrays, and
its result is compared and dropped. Each op is judged alone, so a BitLinear has no excuse: it must be equal.

The candidate's primitives are judged, and its fused operations (several linears in one call, a whole attention) too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..backends import Backend
from ..backends.record import Recorder
from ..reference import layers
from ..reference.cache import KVCache, TokenBatch
from ..reference.config import RopeConfig
from ..reference.model import forward
from ..reference.weights import DenseWeight, LinearWeight, TernaryLinear, plain_weights
from .compare import OK, Comparison, OpResult, Walk
from .names import ACC, INT8, NORM_SCALE, NORMALIZED, OUT, SCALE

if TYPE_CHECKING:
    from ..api import Model


def teacher_forced(reference: Model, candidate: Model, tokens: Sequence[int]) -> Comparison:
    """Run the reference over the tokens and judge each op of the candidate on the reference's inputs.

    reference: whose weights and config are right; computed in NumPy float32, whatever backend it was loaded with.
    candidate: the same model on another backend, or a changed one of the same shape.
    Raises NumericsError when the reference itself computes NaN or Inf.
    """
    ids = reference.check_tokens(tokens)
    cfg = reference.config
    found = Comparison(mode="teacher-forced", tokens=len(ids), layers=cfg.num_hidden_layers)
    beside = _Beside(reference, candidate, found, ids)
    cache = KVCache(cfg, slots=1, capacity=len(ids))
    logits = forward(beside, beside.w, cfg, TokenBatch.of([(0, 0, ids)]), cache)
    if not np.isfinite(logits).all():
        raise reference_not_finite(beside, ids)
    return found


def reference_not_finite(beside: _Beside, ids: NDArray[np.int64]) -> Exception:
    from ..backends.record import first_non_finite

    cache = KVCache(beside.cfg, slots=1, capacity=len(ids))
    return first_non_finite(beside.inner, beside.w, beside.cfg, TokenBatch.of([(0, 0, ids)]), cache)


class _Beside(Recorder):
    """The reference as a recorder, with the candidate's ops computed and judged beside it."""

    def __init__(self, reference: Model, candidate: Model, found: Comparison, ids: NDArray[np.int64]) -> None:
        self.w = plain_weights(reference.weights)
        super().__init__(Backend("float32", reference.backend.threads), self.w, reference.config, [])
        self.candidate, self.config, self.found = candidate.backend, candidate.config, found
        ternary = {name for name, weight in self.w.linears() if isinstance(weight, TernaryLinear)}
        self.walk = Walk({}, {}, reference.config, ids, found, True, "float32", ternary.__contains__)
        theirs = candidate.weights
        self.theirs: dict[int, LinearWeight] = {id(self.w.embedding): theirs.embedding}
        for (_, mine), (_, other) in zip(self.w.linears(), theirs.linears(), strict=True):
            self.theirs[id(mine)] = other
        self.norms = {id(self.w.final_norm): theirs.final_norm}
        for mine_layer, other_layer in zip(self.w.layers, theirs.layers, strict=True):
            for name in ("attn_norm", "attn_sub_norm", "ffn_norm", "ffn_sub_norm"):
                self.norms[id(getattr(mine_layer, name))] = getattr(other_layer, name)

    def judge(self, name: str, mine: NDArray, theirs: NDArray, only_if_wrong: bool = False, note: str = "") -> OpResult:
        result = self.walk.pair(name, mine, theirs, note=note)
        if not (only_if_wrong and result.status == OK):
            self.found.ops.append(result)
        return result

    # -- primitives ----------------------------------------------------------------------------------------------------

    def embed(self, w: DenseWeight, tokens: NDArray) -> NDArray:
        x = super().embed(w, tokens)
        other = self.theirs[id(w)]
        assert isinstance(other, DenseWeight)
        self.judge("hook_embed", x, self.candidate.embed(other, tokens))
        return x

    def rms_norm(self, x: NDArray, weight: NDArray, eps: float) -> NDArray:
        y = super().rms_norm(x, weight, eps)
        name = self._norm_names[id(weight)]
        own = name.endswith("rms_norm")  # inside a linear: its weight and eps are the linear's
        other, other_eps = (weight, eps) if own else (self.norms[id(weight)], self.config.norm_eps)
        if other is None:  # the candidate has no such norm
            other_y = x
        else:
            if other_eps != eps:
                self.judge(f"{name}.{NORM_SCALE}", layers.rms_scale(x, eps), layers.rms_scale(x, other_eps))
            other_y = self.candidate.rms_norm(x, other, other_eps)
        self.judge(f"{name}.{NORMALIZED}", y, other_y)
        return y

    def rope_tables(self, positions: NDArray, rope: RopeConfig, head_dim: int) -> tuple[NDArray, NDArray]:
        self.tables = self.candidate.rope_tables(positions, self.config.rope, head_dim)
        return super().rope_tables(positions, rope, head_dim)

    def rope(self, q: NDArray, k: NDArray, cos: NDArray, sin: NDArray) -> tuple[NDArray, NDArray]:
        turned = super().rope(q, k, cos, sin)
        for hook, mine, theirs in zip("qk", turned, self.candidate.rope(q, k, *self.tables), strict=True):
            self.judge(f"{self._block}.attn.hook_rot_{hook}", mine, theirs)
        return turned

    def quantize_activations(self, x: NDArray) -> tuple[NDArray, NDArray]:
        x_q, x_quant_scale = super().quantize_activations(x)
        other_q, other_scale = self.candidate.quantize_activations(x)
        self.judge(f"{self._linear}.{INT8}", x_q, other_q)
        self.judge(f"{self._linear}.{SCALE}", x_quant_scale, other_scale)
        return x_q, x_quant_scale

    def ternary_matmul(self, x_q: NDArray, w: TernaryLinear) -> NDArray:
        acc = super().ternary_matmul(x_q, w)
        other = self.theirs[id(w)]
        if isinstance(other, TernaryLinear):
            self.judge(f"{self._linear}.{ACC}", acc, self.candidate.ternary_matmul(x_q, other))
        return acc

    def dequantize(self, acc: NDArray, w: TernaryLinear, x_quant_scale: NDArray) -> NDArray:
        y = super().dequantize(acc, w, x_quant_scale)
        other = self.theirs[id(w)]
        if isinstance(other, TernaryLinear):
            theirs = self.candidate.dequantize(acc, other, x_quant_scale)
            self.judge(f"{self._linear}.{OUT}", y, theirs, only_if_wrong=True, note="dequantize alone")
        return y

    def gated(self, gate: NDArray, up: NDArray, activation: str) -> NDArray:
        y = super().gated(gate, up, activation)
        self.judge(f"{self._block}.mlp.hook_post", y, self.candidate.gated(gate, up, self.config.activation))
        return y

    # -- fused ---------------------------------------------------------------------------------------------------------

    def linears(self, x: NDArray, ws: Sequence[LinearWeight]) -> tuple[NDArray, ...]:
        outputs = super().linears(x, ws)
        others = self.candidate.linears(x, [self.theirs[id(w)] for w in ws])
        for w, mine, theirs in zip(ws, outputs, others, strict=True):
            self.judge(f"{self._linear_names.get(id(w), 'lm_head')}.{OUT}", mine, theirs)
        return outputs

    def attention(self, q: NDArray, cache: KVCache, batch: TokenBatch, layer: int, window: int | None) -> NDArray:
        attn = f"{self._block}.attn"
        mine = np.full((2, q.shape[1], len(batch), len(batch)), -np.inf, dtype=np.float32)  # scores, pattern
        mine[1] = 0
        theirs = mine.copy()
        for i in range(len(batch)):
            keys, _ = cache.visible(layer, 0, i, window)
            seen = slice(i + 1 - len(keys), i + 1)
            mine[0, :, i, seen] = scores = self.inner.attention_scores(q[i], keys)
            mine[1, :, i, seen] = self.inner.softmax(scores)
            keys, _ = cache.visible(layer, 0, i, self.config.sliding_window)
            seen = slice(i + 1 - len(keys), i + 1)
            theirs[0, :, i, seen] = self.candidate.attention_scores(q[i], keys)
            theirs[1, :, i, seen] = self.candidate.softmax(mine[0, :, i, seen])
        self.judge(f"{attn}.hook_attn_scores", mine[0], theirs[0])
        self.judge(f"{attn}.hook_pattern", mine[1], theirs[1])
        z = self.inner.attention(q, cache, batch, layer, window)
        other = self.candidate.attention(q, cache, batch, layer, self.config.sliding_window)
        self.judge(f"{attn}.hook_z", z, other)
        return z
