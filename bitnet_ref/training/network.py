"""The forward pass of `reference/model.py` for training, and the same text backwards.

`TrainingNetwork.sequence_gradients` takes one sequence: its loss, and the gradient of every master. A master is a
float32 array under the name that the hub gives it: "model.layers.0.self_attn.q_proj.weight".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, numerics_errors_of
from ..families import differences_from_llama, family_of
from ..families.qwen import Qwen3Layer
from ..formats.checkpoint import has_bias, is_ternary, linear_shape, norm_sizes
from ..formats.names import hf_module
from ..reference.config import ModelConfig
from ..reference.layers import Array, Floats
from ..reference.weights import linear_name
from . import ops
from .distil import Distillation, TeacherValues, relation_loss, soft_cross_entropy
from .ops import LinearInput, StepLinear

Masters = dict[str, Array]
EMBEDDING = f"{hf_module('embedding')}.weight"
QKV, OUTPUT, GATE_UP, DOWN = ("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)
GROUPS: tuple[tuple[str, ...], ...] = (QKV, OUTPUT, GATE_UP, DOWN)  # linears of one input


def master_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hub name -> shape of every master of a model. ConfigError for a model with what training has no gradient of."""
    differences = differences_from_llama(config)
    if unknown := [name for name in differences if name not in ("o_proj_bias", "qk_norms")]:
        raise ConfigError("training has no gradient of it", field=unknown[0])
    text = family_of(config).layer_class(config, 0).attention_text
    if "qk_norms" in differences and text is not Qwen3Layer.attention_text:
        raise ConfigError(f"training has no gradient of them as {config.model_type} has them", field="qk_norms")
    shapes: dict[str, tuple[int, ...]] = {"embedding": linear_shape(config, "embedding")}
    if not config.tie_word_embeddings:
        shapes["lm_head"] = linear_shape(config, "lm_head")
    shapes = {f"{hf_module(name)}.weight": shape for name, shape in shapes.items()}
    for name, size in norm_sizes(config).items():
        shapes[f"{hf_module(name)}.weight"] = (size,)
    quantized = config.quantization
    for layer in range(config.num_hidden_layers):
        for short, (rows, columns) in config.linear_shapes().items():
            name = linear_name(layer, short)
            shapes[f"{hf_module(name)}.weight"] = rows, columns
            if has_bias(config, name):
                shapes[f"{hf_module(name)}.bias"] = (rows,)
            if quantized is not None and quantized.use_rms_norm and is_ternary(config, name):
                shapes[f"{hf_module(name)}.rms_norm.weight"] = (columns,)
    return shapes


@dataclass(frozen=True, eq=False)
class LinearGroup:
    """Linears that read one input: their names, and their matrices stacked."""

    modules: tuple[str, ...]  # "model.layers.0.self_attn.q_proj", ...
    weight: StepLinear
    norm: str | None  # the master of the norm inside a single BitLinear, if there is one
    norm_eps: float
    biased: bool


Lesson = tuple[Distillation, TeacherValues]


@dataclass(eq=False)
class SequencePass:
    """What the passes over one sequence gather: gradients, and the relations' part of the loss.

    share: the sequence's share of the batch's tokens.
    """

    gradients: Masters = field(default_factory=dict)
    lesson: Lesson | None = None
    share: float = 1.0
    relation_loss: float = 0.0


Backward = Callable[[Floats], Floats]  # gradient of a result -> gradient of its input; stores those of masters


def pass_through(dy: Floats) -> Floats:
    """The backward pass of a norm that is not there."""
    return dy


class TrainingNetwork:
    """The network of one optimiser step: every master quantised once, for all sequences of the step."""

    def __init__(
        self,
        config: ModelConfig,
        masters: Mapping[str, Floats],
        mix: float = 1.0,
        functions: Any = ops,
        run: Callable[..., Iterable[Any]] = map,
    ) -> None:
        """mix: how much the linears are quantised, 0 (not at all) to 1. functions: what stands in for `ops`.
        run: `map`, or that of a pool of threads."""
        self.config, self.masters, self.ops = config, masters, functions
        keys = [(layer, shorts) for layer in range(config.num_hidden_layers) for shorts in GROUPS]
        self._groups = dict(zip(keys, run(lambda key: list(self._group(key, mix)), keys), strict=True))
        self._head = f"{hf_module('embedding' if config.tie_word_embeddings else 'lm_head')}.weight"

    def _group(self, key: tuple[int, tuple[str, ...]], mix: float) -> Iterator[LinearGroup]:
        """The linears of one input in one group, or each in its own where not all are quantised, or norms differ."""
        config, (layer, shorts) = self.config, key
        names = [linear_name(layer, short) for short in shorts]
        quantization = config.quantization
        norms_inside = quantization is not None and quantization.use_rms_norm
        apart = norms_inside or len({is_ternary(config, name) for name in names}) > 1
        for part in [[name] for name in names] if apart else [names]:
            modules = tuple(hf_module(name) for name in part)
            quantized = is_ternary(config, part[0])
            weight = self._step_linears(modules, quantized, mix)
            norm = f"{modules[0]}.rms_norm.weight" if quantized and norms_inside else None
            eps = config.norm_eps if quantization is None else quantization.rms_norm_eps
            yield LinearGroup(modules, weight, norm, eps, has_bias(config, part[0]))

    def _step_linears(self, modules: tuple[str, ...], quantized: bool, mix: float) -> StepLinear:
        """The matrices of some linears of one input, stacked."""
        masters, kind = [self.masters[f"{module}.weight"] for module in modules], self.ops.StepLinear
        with numerics_errors_of(", ".join(modules)):
            stacked: StepLinear = kind.quantize(masters, mix) if quantized and mix > 0 else kind.dense(masters)
        return stacked

    # -- one sequence --------------------------------------------------------------------------------------------------

    def logits(self, tokens: NDArray[np.int64]) -> Floats:
        """tokens (T,) -> logits (T, V): the forward pass alone."""
        hidden, _ = self._hidden(tokens, SequencePass())
        return hidden @ self.masters[self._head].T

    def sequence_loss(self, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """The loss of each token after the first.   tokens (T,) -> (T-1,)"""
        losses: NDArray[np.float64] = self.ops.cross_entropy(self.logits(tokens[:-1]), tokens[1:])[0]
        return losses

    def sequence_gradients(
        self, tokens: NDArray[np.int64], weight: float, lesson: Lesson | None = None
    ) -> tuple[NDArray[np.float64], Masters]:
        """The losses of one sequence, and the gradient of `weight` times their sum.

        tokens (T,), on the host -> losses (T-1,), {hub name: gradient}.
        lesson: what a teacher gives for tokens[:-1]; its divergences are part of the losses.
        """
        inputs, targets = tokens[:-1], tokens[1:]
        state = SequencePass({}, lesson, weight * len(targets))
        hidden, backward = self._hidden(inputs, state)
        head = self.masters[self._head]
        logits = hidden @ head.T
        losses, probabilities = self.ops.cross_entropy(logits, targets)
        d_logits = self.ops.cross_entropy_backward(probabilities, targets, weight)
        if lesson is not None:
            settings, values = lesson
            divergence, d_soft = soft_cross_entropy(logits, values.logits, settings.temperature)
            losses += settings.logits_weight * divergence
            d_logits += d_soft * d_soft.dtype.type(settings.logits_weight * weight)
        dx = backward(self.ops.product(d_logits, head))
        self._outer_gradients(state, d_logits, hidden, dx, inputs)
        return losses + state.relation_loss, state.gradients

    def _outer_gradients(
        self, state: SequencePass, d_logits: Floats, hidden: Floats, dx: Floats, inputs: NDArray[np.int64]
    ) -> None:
        """The gradients of the head and the embedding."""
        gradients = state.gradients
        gradients[self._head] = self.ops.product(d_logits.T, hidden)
        if EMBEDDING not in gradients:  # the head is not tied to it
            gradients[EMBEDDING] = np.zeros_like(self.masters[EMBEDDING])
        self.ops.embed_backward(dx, inputs, gradients[EMBEDDING])

    def _hidden(self, tokens: NDArray[np.int64], state: SequencePass) -> tuple[Floats, Backward]:
        """The input of the head.   tokens (T,) -> (T, D), its backward pass"""
        config = self.config
        table = self.masters[EMBEDDING]
        x = table[np.asarray(tokens, like=table)]
        tables = config.rope.tables(np.arange(len(tokens)), config.head_dim, x.dtype)
        rope = np.asarray(tables[0], like=x), np.asarray(tables[1], like=x)
        passes: list[Backward] = []
        for layer in range(config.num_hidden_layers):
            x, backward = self._attention_block(x, layer, rope, state)
            passes.append(backward)
            x, backward = self._feed_forward(x, layer, state)
            passes.append(backward)
        x, backward = self._norm(x, "final_norm", state)
        passes.append(backward)

        def all_backward(dx: Floats) -> Floats:
            while passes:  # each block's values are freed when its gradients are known
                dx = passes.pop()(dx)
            return dx

        return x, all_backward

    # -- blocks: as in reference/model.py, each with its backward pass -------------------------------------------------

    def _attention_block(
        self, x: Floats, layer: int, rope: tuple[Floats, Floats], state: SequencePass
    ) -> tuple[Floats, Backward]:
        cfg = self.config
        h, norm_backward = self._norm(x, f"blocks.{layer}.attn_norm", state)
        (q, k, v), qkv_backward = self._linears(h, layer, QKV, state)
        q = q.reshape(-1, cfg.num_attention_heads, cfg.head_dim)
        k = k.reshape(-1, cfg.num_key_value_heads, cfg.head_dim)
        v = v.reshape(-1, cfg.num_key_value_heads, cfg.head_dim)
        d_relations = self._relations(layer, (q, k, v), state)
        head_norms: list[Backward] = [pass_through, pass_through]
        if "q_norm" in cfg.norm_shapes(layer):
            q, head_norms[0] = self._norm(q, f"blocks.{layer}.q_norm", state)
            k, head_norms[1] = self._norm(k, f"blocks.{layer}.k_norm", state)
        q, k = self.ops.rope(q, *rope), self.ops.rope(k, *rope)
        z, patterns = self.ops.attention(q, k, v, cfg.window_of(layer))
        z = z.reshape(len(x), -1)
        sub_backward: Backward = pass_through
        if cfg.sub_norms:
            z, sub_backward = self._norm(z, f"blocks.{layer}.attn_sub_norm", state)
        (y,), o_backward = self._linears(z, layer, OUTPUT, state)

        def backward(dx: Floats) -> Floats:
            dz = sub_backward(o_backward([dx])).reshape(q.shape)
            dq, dk, dv = self.ops.attention_backward(dz, q, k, v, patterns, cfg.window_of(layer))
            dq, dk = self.ops.rope_backward(dq, *rope), self.ops.rope_backward(dk, *rope)
            d_qkv = [head_norms[0](dq), head_norms[1](dk), dv]
            if d_relations:
                d_qkv = [d + of_relation for d, of_relation in zip(d_qkv, d_relations, strict=True)]
            return dx + norm_backward(qkv_backward([d.reshape(len(dx), -1) for d in d_qkv]))

        return x + y, backward

    def _relations(self, layer: int, qkv: tuple[Floats, ...], state: SequencePass) -> list[Floats]:
        """The gradients of q, k and v by their relations, in the layer that a teacher is compared with; else []."""
        if state.lesson is None or not state.lesson[0].relations_weight:
            return []
        settings, values = state.lesson
        if layer != (self.config.num_hidden_layers - 1 if settings.layer is None else settings.layer):
            return []
        pairs = [relation_loss(states, wanted) for states, wanted in zip(qkv, values.relations, strict=True)]
        state.relation_loss = settings.relations_weight * sum(loss for loss, _ in pairs)
        return [d * d.dtype.type(settings.relations_weight * state.share) for _, d in pairs]

    def _feed_forward(self, x: Floats, layer: int, state: SequencePass) -> tuple[Floats, Backward]:
        cfg = self.config
        h, norm_backward = self._norm(x, f"blocks.{layer}.ffn_norm", state)
        (gate, up), gate_backward = self._linears(h, layer, GATE_UP, state)
        h = self.ops.gated(gate, up, cfg.activation)
        sub_backward: Backward = pass_through
        if cfg.sub_norms:
            h, sub_backward = self._norm(h, f"blocks.{layer}.ffn_sub_norm", state)
        (y,), down_backward = self._linears(h, layer, DOWN, state)

        def backward(dx: Floats) -> Floats:
            dh = sub_backward(down_backward([dx]))
            return dx + norm_backward(gate_backward(self.ops.gated_backward(dh, gate, up, cfg.activation)))

        return x + y, backward

    def _norm(self, x: Floats, name: str, state: SequencePass) -> tuple[Floats, Backward]:
        return self._norm_of(x, f"{hf_module(name)}.weight", self.config.norm_eps, state)

    def _norm_of(self, x: Floats, master: str, eps: float, state: SequencePass) -> tuple[Floats, Backward]:
        """RMSNorm over the last axis of x, (T, D) or (T, H, d)."""
        weight, rows = self.masters[master], x.reshape(-1, x.shape[-1])
        with numerics_errors_of(f"the input of {master.removesuffix('.weight')}"):
            y, r = self.ops.rms_norm(rows, weight, eps)

        def backward(dy: Floats) -> Floats:
            of_rows = self.ops.rms_norm_backward(dy.reshape(rows.shape), rows, weight, r)
            dx: Floats = of_rows[0]
            state.gradients[master] = of_rows[1]
            return dx.reshape(x.shape)

        return y.reshape(x.shape), backward

    def _linears(
        self, x: Floats, layer: int, shorts: tuple[str, ...], state: SequencePass
    ) -> tuple[list[Floats], Callable[[Sequence[Floats]], Floats]]:
        """Linears of one input.   x (T, K) -> [y (T, out), ...], their backward pass: [dy, ...] -> dx"""
        outputs: list[Floats] = []
        passes: list[tuple[LinearGroup, LinearInput, Backward]] = []
        for group in self._groups[layer, shorts]:
            h = x
            norm_backward: Backward = pass_through
            if group.norm is not None:
                h, norm_backward = self._norm_of(x, group.norm, group.norm_eps, state)
            with numerics_errors_of(f"the input of {group.modules[0]}"):
                parts, saved = self.ops.linear(h, group.weight)
            if group.biased:
                parts = [y + self.masters[f"{m}.bias"] for m, y in zip(group.modules, parts, strict=True)]
            outputs += parts
            passes.append((group, saved, norm_backward))

        def backward(dys: Sequence[Floats]) -> Floats:
            remaining, d_inputs = list(dys), []
            for group, saved, norm_backward in passes:
                taken = [remaining.pop(0) for _ in group.modules]
                d_inputs.append(norm_backward(self._linear_backward(taken, saved, group, state)))
            return sum(d_inputs[1:], start=d_inputs[0])

        return outputs, backward

    def _linear_backward(
        self, dys: list[Floats], saved: LinearInput, group: LinearGroup, state: SequencePass
    ) -> Floats:
        """[dy (T, out) of each linear] -> dx (T, K); the gradients of the masters go into `state`."""
        dh: Floats
        dh, d_weights = self.ops.linear_backward(dys, saved, group.weight, self.ops.product)
        for module, d_weight, d_out in zip(group.modules, d_weights, dys, strict=True):
            state.gradients[f"{module}.weight"] = d_weight
            if group.biased:
                state.gradients[f"{module}.bias"] = d_out.sum(axis=0)
        return dh
