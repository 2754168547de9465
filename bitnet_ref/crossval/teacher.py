"""Teacher-forced comparison: every op and every block of a candidate backend on the reference's own inputs.

In a free run an error in one op is the input of the next, and a single flipped rounding changes everything after it.
Here the reference computes the pass. Beside each of its ops the candidate computes the same op from the same arrays;
its result is compared and dropped. So each op is judged alone, and a BitLinear must be equal. The candidate's fused
operations (several linears, attention, whole blocks) are judged too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ..backends import Backend
from ..backends.backend import plain_weights
from ..backends.loaded import LoadedModel
from ..backends.observe import Call, ObservedStep, observe
from ..backends.paged_cache import CacheSpec, EngineKVCache
from ..backends.record import Recorder, sibling
from ..backends.run import run
from ..families.linear_norms import model_norms
from ..reference import layers
from ..reference.cache import TokenBatch
from ..reference.config import ModelConfig
from ..reference.layers import Array
from ..reference.model import BlockPlace, RopeTables, rope_tables_of
from ..reference.weights import ModelWeights, TernaryLinear
from .compare import DIFFERS, FLIP, OK, Comparison, Walk, compare
from .names import NORM_SCALE, OUT, SCALE
from .types import Tokens

MID, POST = "hook_resid_mid", "hook_resid_post"  # the results of a block's two halves


def teacher_forced(reference: LoadedModel, candidate: LoadedModel, tokens: Tokens) -> Comparison:
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

    def half_block(self, be: Backend, layer: int, half: str, x: Array) -> Array:
        """The half of a block whose result is called `half`, on a residual stream x (N, D) -> (N, D)"""
        stream, w = self.be.from_host(x), self.weights.layers[layer]
        if half == POST:
            return self.be.to_host(be.feed_forward(stream, w, self.cfg))
        at = BlockPlace(self.rope_of(layer), self.batch, self.cache, layer)
        return self.be.to_host(be.attention_block(stream, w, self.cfg, at))

    def rope_of(self, layer: int) -> RopeTables:
        return self.ropes[self.cfg.rope_of(layer)]

    def ternary_of(self, step: ObservedStep) -> TernaryLinear | None:
        """The BitLinear to which an op belongs."""
        return self.linears[step.name.rpartition(".")[0]].bit_linear

    def record_half(self, layer: int, half: str, x: Array) -> dict[str, Array]:
        """Every tensor of that half, computed op by op."""
        recorder = Recorder(self.be, self.cfg)
        y = self.half_block(observe(self.be, recorder), layer, half, x)
        return {**recorder.seen, f"blocks.{layer}.{half}": y}


class _Teacher:
    """Around each op of the reference: computes the candidate's op beside it, judges it, returns the reference's."""

    def __init__(self, right: _Side, candidate: LoadedModel, comparison: Comparison) -> None:
        self.right, self.comparison = right, comparison
        self.side = _Side(candidate.backend, candidate.weights, candidate.config, right.batch)
        self.candidate, self.config = candidate.backend, candidate.config
        ternary = {name for name, weight in right.weights.linears() if weight.bit_linear}
        self.walk = Walk({}, {}, right.cfg, right.batch.tokens, comparison, True, "float32", ternary.__contains__)

    def __call__(self, step: ObservedStep, call: Call, args: tuple[Any, ...]) -> Any:
        result = call(*args)
        if step.op == "attention_block":
            self.judge_half(MID, args[-1].layer, args[0], result)
        elif step.op == "feed_forward":
            self.judge_half(POST, int(args[1].name.removeprefix("blocks.")), args[0], result)
        elif step.op == "dequantize":
            self.judge_dequantize(step, args, result)
        for name, mine, theirs in self.beside(step, args, result):
            self.judge(name, mine, theirs)
        return result

    def beside(self, step: ObservedStep, args: tuple[Any, ...], result: Any) -> Iterator[tuple[str, Array, Array]]:
        """(name, the reference's, the candidate's) of the tensors that an op computes."""
        be, side, on_device = self.candidate, self.side, self.candidate.from_host
        match step.op:
            case "embed":
                yield step.name, result, be.embed(side.linears["embedding"], side.batch.tokens)
            case "rms_norm":
                x, norm = args
                other = side.norms.get(norm.name)
                if other is not None and other.eps != norm.eps:
                    mine, theirs = layers.rms_scale(x, norm.eps), layers.rms_scale(x, other.eps)
                    yield f"{norm.name}.{NORM_SCALE}", mine, theirs
                theirs = on_device(x) if other is None else be.rms_norm(on_device(x), other)
                yield step.name, self.by_token(result), self.by_token(theirs)
            case "rope":
                q, k, *_ = args
                other_q, other_k = be.rope(on_device(q), on_device(k), *side.rope_of(int(step.name.split(".")[1])))
                yield step.name, result[0], other_q
                yield sibling(step.name, "hook_rot_k"), result[1], other_k
            case "quantize_activations":
                x_q, x_quant_scale = be.quantize_activations(on_device(args[0]))
                yield step.name, result[0], x_q
                yield sibling(step.name, SCALE), result[1], x_quant_scale
            case "ternary_matmul":
                w = side.ternary_of(step)
                if w is not None:
                    yield step.name, result, be.ternary_matmul(on_device(args[0]), w)
            case "linears":
                x, ws = args
                names = [step.name.removesuffix(f".{OUT}")] if len(ws) == 1 else [w.name for w in ws]
                others = be.linears(on_device(x), [side.linears[name] for name in names])
                yield from zip((f"{name}.{OUT}" for name in names), result, others, strict=True)
            case "append":
                _, layer, batch, k, v = args
                be.append(side.cache, layer, side.batch, on_device(k), on_device(v))
                yield step.name, v, side.cache.stored(layer, batch)[1]
            case "attention":
                q, _, _, layer, _ = args
                window = self.config.window_of(layer)
                yield step.name, result, be.attention(on_device(q), side.cache, side.batch, layer, window)
            case "gated":
                gate, up, _ = args
                yield step.name, result, be.gated(on_device(gate), on_device(up), self.config.activation)

    def by_token(self, array: Array) -> Array:
        """A row for each token, of a norm over each head too."""
        return array.reshape(len(self.right.batch), -1)

    def judge(self, name: str, mine: Array, theirs: Array, only_if_wrong: bool = False, note: str = "") -> None:
        result = self.walk.judge(name, mine, self.candidate.to_host(theirs), note=note)
        if not (only_if_wrong and result.status == OK):
            self.comparison.ops.append(result)

    def judge_half(self, half: str, layer: int, x: Array, mine: Array) -> None:
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

    def judge_dequantize(self, step: ObservedStep, args: tuple[Any, ...], mine: Array) -> None:
        """The last op of a BitLinear, which is listed only if it is wrong by itself."""
        acc, _, x_quant_scale = args
        w, on_device = self.side.ternary_of(step), self.candidate.from_host
        if w is not None:
            theirs = self.candidate.dequantize(on_device(acc), w, on_device(x_quant_scale))
            self.judge(step.name, mine, theirs, only_if_wrong=True, note="dequantize alone")
