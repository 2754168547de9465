"""Teacher-forced comparison: every op and every block of a candidate backend on the reference's own inputs.

In a free run an error in one op is the input of the next, and a single flipped rounding changes everything after it.
Here the reference computes the pass. Beside each of its ops the candidate computes the same op from the same arrays;
its result is compared and dropped. So each op is judged alone, and a BitLinear must be equal. The candidate's fused
operations (several linears, attention, whole blocks) are judged too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..backends import Backend
from ..backends.loaded import LoadedModel
from ..backends.observe import observe
from ..backends.paged_cache import CacheSpec
from ..backends.record import Call, Recorder
from ..backends.run import run
from ..reference import layers
from ..reference.cache import KVCache, TokenBatch
from ..reference.config import ModelConfig
from ..reference.model import RopeTables, rope_tables_of
from ..reference.weights import EmbeddingWeight, LinearWeight, ModelWeights, TernaryLinear, plain_weights
from .compare import DIFFERS, FLIP, OK, Comparison, Walk, compare
from .names import ACC, INT8, NORM_SCALE, NORMALIZED, OUT, SCALE

MID, POST = "hook_resid_mid", "hook_resid_post"  # the results of a block's two halves


def teacher_forced(reference: LoadedModel, candidate: LoadedModel, tokens: Sequence[int]) -> Comparison:
    """Run the reference over the tokens and judge each op and block of the candidate on the reference's inputs.

    reference: has the right weights and config. NumPy computes it in float32, whatever backend it was loaded with.
    candidate: the same model on another backend, or a changed one of the same shape.
    Raises NumericsError when the reference itself computes NaN or Inf.
    """
    ids, cfg = reference.check_tokens(tokens), reference.config
    comparison = Comparison(mode="teacher-forced", tokens=len(ids), layers=cfg.num_hidden_layers)
    be, weights = Backend("float32", reference.backend.threads), plain_weights(reference.weights)
    batch, cache = TokenBatch.of([(0, 0, ids)]), KVCache(cfg, slots=1, capacity=len(ids))
    with candidate.backend.running():
        run(observe(be, _Teacher(_Side(be, weights, cfg, batch), candidate, comparison)), weights, cfg, batch, cache)
    return comparison


class _Side:
    """One side's backend and model, with its own cache, batch and RoPE tables where its ops take them."""

    def __init__(self, be: Backend, weights: ModelWeights, cfg: ModelConfig, batch: TokenBatch) -> None:
        self.be, self.weights, self.cfg, self.batch = be, weights, cfg, be.place(batch)
        self.cache = be.new_cache(cfg, CacheSpec(slots=1, capacity=len(batch)))
        self.ropes = rope_tables_of(be, cfg, self.batch.positions)

    def half_block(self, be: Backend, layer: int, half: str, x: NDArray) -> NDArray:
        """The half of a block whose result is called `half`, on a residual stream x (N, D) -> (N, D)"""
        stream, w = self.be.from_host(x), self.weights.layers[layer]
        if half == POST:
            return self.be.to_host(be.feed_forward(stream, w, self.cfg))
        y = be.attention_block(stream, w, self.cfg, self.rope_of(layer), self.batch, self.cache, layer)
        return self.be.to_host(y)

    def rope_of(self, layer: int) -> RopeTables:
        return self.ropes[self.cfg.is_sliding(layer)]

    def record_half(self, layer: int, half: str, x: NDArray) -> dict[str, NDArray]:
        """Every tensor of that half, computed op by op."""
        recorder = Recorder(self.be, self.weights, self.cfg)
        recorder.block = f"blocks.{layer}" if half == POST else ""
        y = self.half_block(observe(self.be, recorder), layer, half, x)
        return {**recorder.seen, f"blocks.{layer}.{half}": y}


class _Teacher(Recorder):
    """Around each op of the reference: computes the candidate's op beside it, judges it, returns the reference's."""

    def __init__(self, right: _Side, candidate: LoadedModel, comparison: Comparison) -> None:
        super().__init__(right.be, right.weights, right.cfg, names_filter=[])
        self.right, self.comparison, self.batch = right, comparison, right.batch
        self.side = _Side(candidate.backend, candidate.weights, candidate.config, right.batch)
        self.candidate, self.config, theirs = candidate.backend, candidate.config, candidate.weights
        ternary = {name for name, weight in right.weights.linears() if isinstance(weight, TernaryLinear)}
        self.walk = Walk({}, {}, right.cfg, right.batch.tokens, comparison, True, "float32", ternary.__contains__)
        self.residual: NDArray | None = None  # the reference's, before the current half of a block
        self.linears: dict[int, LinearWeight] = {id(right.weights.embedding): theirs.embedding}
        self.norms: dict[int, NDArray | None] = {id(right.weights.final_norm): theirs.final_norm}
        for (_, mine), (_, other) in zip(right.weights.linears(), theirs.linears(), strict=True):
            self.linears[id(mine)] = other
            if isinstance(mine, TernaryLinear) and mine.input_norm is not None:
                norm = other.input_norm if isinstance(other, TernaryLinear) else None
                self.norms[id(mine.input_norm.weight)] = (norm or mine.input_norm).weight
        for mine_layer, other_layer in zip(right.weights.layers, theirs.layers, strict=True):
            theirs_by_name = dict(other_layer.norms())
            self.norms |= {id(weight): theirs_by_name.get(name) for name, weight in mine_layer.norms()}

    def judge(self, name: str, mine: NDArray, theirs: NDArray, only_if_wrong: bool = False, note: str = "") -> None:
        result = self.walk.judge(name, mine, self.candidate.to_host(theirs), note=note)
        if not (only_if_wrong and result.status == OK):
            self.comparison.ops.append(result)

    def judge_half(self, half: str, mine: NDArray) -> None:
        """Judge the candidate's half of a block on the reference's residual stream.

        It is a chain of ops, so it has the tolerance of one layer. If an int8 activation flips inside, the difference
        is larger. It is then expected if the candidate's own ops give the same bits and differ by flips only.
        """
        if self.residual is not None:
            layer, name = int(self.block.removeprefix("blocks.")), f"{self.block}.{half}"
            theirs = self.side.half_block(self.candidate, layer, half, self.residual)
            result = self.walk.judge(name, mine, theirs, depth=0)
            if result.status == DIFFERS:
                right, own = (side.record_half(layer, half, self.residual) for side in (self.right, self.side))
                free = compare(right, own, self.config)
                if free.agrees and free.n_flips and np.array_equal(own[name], theirs):
                    result = replace(result, status=FLIP, note=f"expected, after a rounding flip: {free.flips[0]}")
            self.comparison.ops.append(result)
        self.residual = mine

    # -- ops -----------------------------------------------------------------------------------------------------------

    def _on_embed(self, call: Call, w: EmbeddingWeight, tokens: NDArray) -> NDArray:
        x: NDArray = super()._on_embed(call, w, tokens)
        other = self.linears[id(w)]
        assert isinstance(other, EmbeddingWeight)
        self.judge("hook_embed", x, self.candidate.embed(other, self.side.batch.tokens))
        return x

    def _on_rms_norm(self, call: Call, x: NDArray, weight: NDArray, eps: float) -> NDArray:
        name = self.norm_names[id(weight)]
        if name.endswith("ln2"):
            self.judge_half(MID, x)
        elif name.endswith("ln1") or name == "ln_final":
            self.judge_half(POST, x)
        y: NDArray = super()._on_rms_norm(call, x, weight, eps)
        other, other_eps = self.norms[id(weight)], eps if name.endswith("rms_norm") else self.config.norm_eps
        if other_eps != eps:
            self.judge(f"{name}.{NORM_SCALE}", layers.rms_scale(x, eps), layers.rms_scale(x, other_eps))
        on_device = self.candidate.from_host(x)
        other_y = on_device if other is None else self.candidate.rms_norm(on_device, other, other_eps)
        self.judge(f"{name}.{NORMALIZED}", self.by_token(name, y), self.by_token(name, other_y))
        return y

    def _on_rope(
        self, call: Call, q: NDArray, k: NDArray, cos: NDArray, sin: NDArray, *partial: bool
    ) -> tuple[NDArray, NDArray]:
        rotated: tuple[NDArray, NDArray] = super()._on_rope(call, q, k, cos, sin, *partial)
        from_host = self.candidate.from_host
        other = self.candidate.rope(
            from_host(q), from_host(k), *self.side.rope_of(int(self.block.removeprefix("blocks."))), *partial
        )
        for letter, mine, theirs in zip("qk", rotated, other, strict=True):
            self.judge(f"{self.block}.attn.hook_rot_{letter}", mine, theirs)
        return rotated

    def _on_quantize_activations(self, call: Call, x: NDArray) -> tuple[NDArray, NDArray]:
        x_q, x_quant_scale = call(x)
        other_q, other_scale = self.candidate.quantize_activations(self.candidate.from_host(x))
        self.judge(f"{self.linear}.{INT8}", x_q, other_q)
        self.judge(f"{self.linear}.{SCALE}", x_quant_scale, other_scale)
        return x_q, x_quant_scale

    def _on_ternary_matmul(self, call: Call, x_q: NDArray, w: TernaryLinear) -> NDArray:
        acc: NDArray = super()._on_ternary_matmul(call, x_q, w)
        other = self.linears[id(w)]
        if isinstance(other, TernaryLinear):
            theirs = self.candidate.ternary_matmul(self.candidate.from_host(x_q), other)
            self.judge(f"{self.linear}.{ACC}", acc, theirs)
        return acc

    def _on_dequantize(self, call: Call, acc: NDArray, w: TernaryLinear, x_quant_scale: NDArray) -> NDArray:
        y: NDArray = super()._on_dequantize(call, acc, w, x_quant_scale)
        other, from_host = self.linears[id(w)], self.candidate.from_host
        if isinstance(other, TernaryLinear):
            theirs = self.candidate.dequantize(from_host(acc), other, from_host(x_quant_scale))
            self.judge(f"{self.linear}.{OUT}", y, theirs, only_if_wrong=True, note="dequantize alone")
        return y

    def _on_linears(self, call: Call, x: NDArray, ws: Sequence[LinearWeight]) -> tuple[NDArray, ...]:
        outputs: tuple[NDArray, ...] = super()._on_linears(call, x, ws)
        others = self.candidate.linears(self.candidate.from_host(x), [self.linears[id(w)] for w in ws])
        for w, mine, theirs in zip(ws, outputs, others, strict=True):
            self.judge(f"{self.linear_names.get(id(w), 'lm_head')}.{OUT}", mine, theirs)
        return outputs

    def _on_append(self, call: Call, cache: KVCache, layer: int, batch: TokenBatch, k: NDArray, v: NDArray) -> None:
        call(cache, layer, batch, k, v)
        from_host = self.candidate.from_host
        self.candidate.append(self.side.cache, layer, self.side.batch, from_host(k), from_host(v))
        self.judge(f"{self.block}.attn.hook_v", v, self.side.cache.stored(layer, batch)[1])

    def _on_attention(
        self, call: Call, q: NDArray, cache: KVCache, batch: TokenBatch, layer: int, window: int | None
    ) -> NDArray:
        z: NDArray = call(q, cache, batch, layer, window)
        side, on_device = self.side, self.candidate.from_host(q)
        other = self.candidate.attention(on_device, side.cache, side.batch, layer, self.config.window_of(layer))
        self.judge(f"{self.block}.attn.hook_z", z, other)
        return z

    def _on_gated(self, call: Call, gate: NDArray, up: NDArray, activation: str) -> NDArray:
        y: NDArray = super()._on_gated(call, gate, up, activation)
        from_host = self.candidate.from_host
        theirs = self.candidate.gated(from_host(gate), from_host(up), self.config.activation)
        self.judge(f"{self.block}.mlp.hook_post", y, theirs)
        return y
