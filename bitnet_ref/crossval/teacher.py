"""Teacher-forced comparison: every op and every block of a candidate backend on the reference's own inputs.

In a free run an error in one op is the input of the next, and a single flipped rounding changes everything after it.
Here the reference computes the pass. Beside each of its ops the candidate computes the same op from the same arrays;
its result is compared and dropped. So each op is judged alone, and a BitLinear must be equal. The candidate's fused
operations (several linears, attention, whole blocks) are judged too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends import Backend
from ..backends.backend import plain_weights
from ..backends.loaded import LoadedModel
from ..backends.observe import Call, ObservedStep, observe
from ..backends.paged_cache import CacheSpec, EngineKVCache
from ..backends.record import Recorder, sibling
from ..backends.run import run
from ..families.linear_norms import model_norms
from ..reference import layers
from ..reference.cache import KVCache, TokenBatch
from ..reference.config import ModelConfig
from ..reference.model import RopeTables, rope_tables_of
from ..reference.weights import LayerWeights, LinearWeight, ModelWeights, Norm, TernaryLinear
from .compare import DIFFERS, FLIP, OK, Comparison, Walk, compare
from .names import NORM_SCALE, OUT, SCALE

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
    batch, cache = TokenBatch.of([(0, 0, ids)]), EngineKVCache(cfg, slots=1, capacity=len(ids))
    with candidate.backend.running():
        run(observe(be, _Teacher(_Side(be, weights, cfg, batch), candidate, comparison)), weights, cfg, batch, cache)
    return comparison


class _Side:
    """One side's backend and model, with its own cache, batch and RoPE tables where its ops take them."""

    def __init__(self, be: Backend, weights: ModelWeights, cfg: ModelConfig, batch: TokenBatch) -> None:
        self.be, self.weights, self.cfg, self.batch = be, weights, cfg, be.place(batch)
        self.cache = be.new_cache(cfg, CacheSpec(slots=1, capacity=len(batch)))
        self.ropes = rope_tables_of(be, cfg, self.batch.positions)
        self.linears = {**dict(weights.linears()), "embedding": weights.embedding}
        self.norms = {norm.name: norm for norm in model_norms(weights)}

    def half_block(self, be: Backend, layer: int, half: str, x: NDArray) -> NDArray:
        """The half of a block whose result is called `half`, on a residual stream x (N, D) -> (N, D)"""
        stream, w = self.be.from_host(x), self.weights.layers[layer]
        if half == POST:
            return self.be.to_host(be.feed_forward(stream, w, self.cfg))
        y = be.attention_block(stream, w, self.cfg, self.rope_of(layer), self.batch, self.cache, layer)
        return self.be.to_host(y)

    def rope_of(self, layer: int) -> RopeTables:
        return self.ropes[self.cfg.rope_of(layer)]

    def record_half(self, layer: int, half: str, x: NDArray) -> dict[str, NDArray]:
        """Every tensor of that half, computed op by op."""
        recorder = Recorder(self.be, self.cfg)
        y = self.half_block(observe(self.be, recorder), layer, half, x)
        return {**recorder.seen, f"blocks.{layer}.{half}": y}


class _Teacher(Recorder):
    """Around each op of the reference: computes the candidate's op beside it, judges it, returns the reference's."""

    def __init__(self, right: _Side, candidate: LoadedModel, comparison: Comparison) -> None:
        super().__init__(right.be, right.cfg, names_filter=[])
        self.right, self.comparison, self.batch = right, comparison, right.batch
        self.side = _Side(candidate.backend, candidate.weights, candidate.config, right.batch)
        self.candidate, self.config = candidate.backend, candidate.config
        ternary = {name for name, weight in right.weights.linears() if weight.bit_linear}
        self.walk = Walk({}, {}, right.cfg, right.batch.tokens, comparison, True, "float32", ternary.__contains__)
        self.handlers |= {"quantize_activations": self.on_quantize_activations, "append": self.on_append}

    def judge(self, name: str, mine: NDArray, theirs: NDArray, only_if_wrong: bool = False, note: str = "") -> None:
        result = self.walk.judge(name, mine, self.candidate.to_host(theirs), note=note)
        if not (only_if_wrong and result.status == OK):
            self.comparison.ops.append(result)

    def judge_half(self, half: str, layer: int, x: NDArray, mine: NDArray) -> None:
        """Judge the candidate's half of a block on the reference's residual stream x.

        It is a chain of ops, so it has the tolerance of one layer. If an int8 activation flips inside, the difference
        is larger. It is then expected if the candidate's own ops give the same bits and differ by flips only.
        """
        name = f"blocks.{layer}.{half}"
        theirs = self.side.half_block(self.candidate, layer, half, x)
        result = self.walk.judge(name, mine, theirs, depth=0)
        if result.status == DIFFERS:
            right, own = (side.record_half(layer, half, x) for side in (self.right, self.side))
            free = compare(right, own, self.config)
            if free.agrees and free.n_flips and np.array_equal(own[name], theirs):
                result = replace(result, status=FLIP, note=f"expected, after a rounding flip: {free.flips[0]}")
        self.comparison.ops.append(result)

    # -- ops -----------------------------------------------------------------------------------------------------------

    def on_attention_block(self, step: ObservedStep, call: Call, x: NDArray, w: LayerWeights, *rest: Any) -> NDArray:
        y: NDArray = super().on_attention_block(step, call, x, w, *rest)
        self.judge_half(MID, rest[-1], x, y)
        return y

    def on_feed_forward(self, step: ObservedStep, call: Call, x: NDArray, w: LayerWeights, *rest: Any) -> NDArray:
        y: NDArray = super().on_feed_forward(step, call, x, w, *rest)
        self.judge_half(POST, int(w.name.removeprefix("blocks.")), x, y)
        return y

    def on_result(self, step: ObservedStep, call: Call, *args: Any) -> NDArray:
        x: NDArray = super().on_result(step, call, *args)
        if step.op == "embed":
            self.judge(step.name, x, self.candidate.embed(self.side.linears["embedding"], self.side.batch.tokens))
        return x

    def on_rms_norm(self, step: ObservedStep, call: Call, x: NDArray, norm: Norm) -> NDArray:
        y: NDArray = super().on_rms_norm(step, call, x, norm)
        other = self.side.norms.get(norm.name)
        if other is not None and other.eps != norm.eps:
            mine, theirs = layers.rms_scale(x, norm.eps), layers.rms_scale(x, other.eps)
            self.judge(f"{norm.name}.{NORM_SCALE}", mine, theirs)
        on_device = self.candidate.from_host(x)
        other_y = on_device if other is None else self.candidate.rms_norm(on_device, other)
        self.judge(step.name, self.by_token(y), self.by_token(other_y))
        return y

    def on_rope(
        self, step: ObservedStep, call: Call, q: NDArray, k: NDArray, cos: NDArray, sin: NDArray
    ) -> tuple[NDArray, NDArray]:
        rotated: tuple[NDArray, NDArray] = super().on_rope(step, call, q, k, cos, sin)
        from_host = self.candidate.from_host
        tables = self.side.rope_of(int(step.name.split(".")[1]))
        other = self.candidate.rope(from_host(q), from_host(k), *tables)
        for letter, mine, theirs in zip("qk", rotated, other, strict=True):
            self.judge(sibling(step.name, f"hook_rot_{letter}"), mine, theirs)
        return rotated

    def on_quantize_activations(self, step: ObservedStep, call: Call, x: NDArray) -> tuple[NDArray, NDArray]:
        x_q, x_quant_scale = call(x)
        other_q, other_scale = self.candidate.quantize_activations(self.candidate.from_host(x))
        self.judge(step.name, x_q, other_q)
        self.judge(sibling(step.name, SCALE), x_quant_scale, other_scale)
        return x_q, x_quant_scale

    def on_ternary_matmul(self, step: ObservedStep, call: Call, x_q: NDArray, w: TernaryLinear) -> NDArray:
        acc: NDArray = super().on_ternary_matmul(step, call, x_q, w)
        other = self.side.linears[step.name.rpartition(".")[0]].bit_linear
        if other is not None:
            self.judge(step.name, acc, self.candidate.ternary_matmul(self.candidate.from_host(x_q), other))
        return acc

    def on_dequantize(
        self, step: ObservedStep, call: Call, acc: NDArray, w: TernaryLinear, x_quant_scale: NDArray
    ) -> NDArray:
        y: NDArray = super().on_dequantize(step, call, acc, w, x_quant_scale)
        other, from_host = self.side.linears[step.name.rpartition(".")[0]].bit_linear, self.candidate.from_host
        if other is not None:
            theirs = self.candidate.dequantize(from_host(acc), other, from_host(x_quant_scale))
            self.judge(step.name, y, theirs, only_if_wrong=True, note="dequantize alone")
        return y

    def on_linears(self, step: ObservedStep, call: Call, x: NDArray, ws: Sequence[LinearWeight]) -> tuple[NDArray, ...]:
        outputs: tuple[NDArray, ...] = super().on_linears(step, call, x, ws)
        names = [step.name.removesuffix(f".{OUT}")] if len(ws) == 1 else [w.name for w in ws]
        others = self.candidate.linears(self.candidate.from_host(x), [self.side.linears[name] for name in names])
        for name, mine, theirs in zip(names, outputs, others, strict=True):
            self.judge(f"{name}.{OUT}", mine, theirs)
        return outputs

    def on_append(
        self, step: ObservedStep, call: Call, cache: KVCache, layer: int, batch: TokenBatch, k: NDArray, v: NDArray
    ) -> None:
        call(cache, layer, batch, k, v)
        from_host = self.candidate.from_host
        self.candidate.append(self.side.cache, layer, self.side.batch, from_host(k), from_host(v))
        self.judge(step.name, v, self.side.cache.stored(layer, batch)[1])

    def on_attention(
        self,
        step: ObservedStep,
        call: Call,
        q: NDArray,
        cache: KVCache,
        batch: TokenBatch,
        layer: int,
        window: int | None,
    ) -> NDArray:
        z: NDArray = call(q, cache, batch, layer, window)
        side, on_device = self.side, self.candidate.from_host(q)
        other = self.candidate.attention(on_device, side.cache, side.batch, layer, self.config.window_of(layer))
        self.judge(step.name, z, other)
        return z

    def on_gated(self, step: ObservedStep, call: Call, gate: NDArray, up: NDArray, activation: str) -> NDArray:
        y: NDArray = super().on_gated(step, call, gate, up, activation)
        from_host = self.candidate.from_host
        theirs = self.candidate.gated(from_host(gate), from_host(up), self.config.activation)
        self.judge(step.name, y, theirs)
        return y
