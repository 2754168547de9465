"""Mistakes in the gate, the norms, the embedding and the head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ....families.family import Hypothesis
from ....reference import layers
from ....reference.quantization import quantize_activations
from ....reference.weights import TRACE_NAMES, DenseWeight, LayerWeights, Norm
from ..edits import int8_matrix
from ..variants import Op, Setting

gate_mistake = partial(Hypothesis, "*.mlp.hook_post")
attn_sub_norm_mistake = partial(Hypothesis, "*.attn.sub_norm.* *.attn.o_proj.*")
ffn_sub_norm_mistake = partial(Hypothesis, "*.mlp.sub_norm.* *.mlp.down_proj.*")
norm_mistake = partial(Hypothesis, "*.hook_scale *.hook_normalized")
embedding_mistake = partial(Hypothesis, "hook_embed")
head_mistake = partial(Hypothesis, "lm_head.hook_out")
table_mistake = partial(Hypothesis, "hook_embed lm_head.hook_out")
Change = Callable[[NDArray], NDArray]

# -- the gate and the norms --------------------------------------------------------------------------------------------


def _gate(s: Setting, compute: Callable[[Change, NDArray, NDArray], NDArray]) -> Setting:
    """compute(act, gate, up) in place of act(gate) * up."""
    act = layers.ACTIVATIONS[s.config.activation].function
    return s.with_ops(gated=lambda op, gate, up, activation: compute(act, gate, up))


def _without_sub_norms(s: Setting, *names: str) -> Setting | None:
    none: dict[str, Any] = dict.fromkeys(names)
    return s.map_layers(lambda w: replace(w, **none)) if s.config.sub_norms else None


def _without_both_sub_norms(s: Setting) -> Setting | None:
    changed = _without_sub_norms(s, "attn_sub_norm", "ffn_sub_norm")
    return None if changed is None else changed.with_config(sub_norms=False)


def _with_sub_norms(s: Setting) -> Setting | None:
    cfg = s.config
    if cfg.sub_norms or cfg.has_states:
        return None
    ones = {"attn_sub_norm": cfg.query_size, "ffn_sub_norm": cfg.intermediate_size}

    def layer(w: LayerWeights) -> LayerWeights:
        norms: dict[str, Any] = {
            name: Norm(np.ones(size, dtype=np.float32), cfg.norm_eps, f"{w.name}.{TRACE_NAMES[name]}")
            for name, size in ones.items()
        }
        return replace(w, **norms)

    return s.map_layers(layer).with_config(sub_norms=True)


def _sub_norm_per_head(s: Setting) -> Setting | None:
    def rms_norm(op: Op, x: NDArray, norm: Norm) -> NDArray:
        if not norm.name.endswith(".attn.sub_norm"):
            return op(x, norm)
        heads = x.reshape(-1, s.config.head_dim)
        return (heads / layers.rms_scale(heads, norm.eps)).reshape(x.shape) * norm.weight

    return s.with_ops(rms_norm=rms_norm) if s.config.sub_norms and s.config.num_attention_heads > 1 else None


def _eps(value: float) -> Hypothesis:
    return norm_mistake(
        f"norm_eps_{value:g}",
        f"the norms' eps is {value:g}, not the model's own",
        "Read rms_norm_eps from the config; class defaults differ.",
        lambda s: s.map_norms(lambda norm: replace(norm, eps=value)) if s.config.norm_eps != value else None,
    )


def _plus_one(norm: Norm) -> Norm:
    return replace(norm, weight=norm.weight + np.float32(1))


def _without_weight(norm: Norm) -> Norm:
    return replace(norm, weight=np.ones_like(norm.weight))


def _eps_outside(op: Op, x: NDArray, norm: Norm) -> NDArray:
    root = np.sqrt(np.square(x, dtype=np.float64).mean(axis=-1, keepdims=True)) + norm.eps
    return x / root.astype(x.dtype) * norm.weight


def _layer_norm(op: Op, x: NDArray, norm: Norm) -> NDArray:
    return op(x - x.mean(axis=-1, keepdims=True), norm)


# -- the embedding and the head ----------------------------------------------------------------------------------------


def _dense(weight: Any, change: Change) -> Any:
    if weight.kind != "dense":
        return weight
    return DenseWeight(change(weight.array.astype(np.float32)), weight.bias, weight.wide, weight.name)


def _head(s: Setting, change: Change) -> Setting | None:
    if s.weights.lm_head.kind != "dense":
        return None
    return replace(s, weights=replace(s.weights, lm_head=_dense(s.weights.lm_head, change)))


def _embedding_and_head(s: Setting, change: Change) -> Setting:
    embedding = _dense(s.weights.embedding, change)
    head = embedding if s.weights.tied else _dense(s.weights.lm_head, change)
    return replace(s, weights=replace(s.weights, embedding=embedding, lm_head=head))


def _int8_rows(w: NDArray) -> NDArray:
    return int8_matrix(w, axis=1)


def int8_blocks(w: NDArray) -> NDArray:
    """As Q8_0: blocks of 32 along the row, with one float16 scale each."""
    blocks = w.reshape(-1, 32)
    step = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
    inverse = np.where(step > 0, 1 / np.where(step > 0, step, 1), 0)
    return (np.rint(blocks * inverse) * step.astype(np.float16).astype(np.float32)).reshape(w.shape)


def _on_head_input(s: Setting, change: Change) -> Setting:
    head = s.weights.lm_head

    def dense_matmul(op: Op, x: NDArray, w: DenseWeight) -> NDArray:
        return op(change(x) if w is head else x, w)

    return s.with_ops(dense_matmul=dense_matmul)


def _int8_head(s: Setting) -> Setting | None:
    def int8_tokens(x: NDArray) -> NDArray:
        x_q, x_quant_scale = quantize_activations(x)
        return x_q.astype(np.float32) / x_quant_scale

    changed = _head(s, _int8_rows)
    return None if changed is None else _on_head_input(changed, int8_tokens)


def _shifted_logits(shift: int, neighbour: str) -> Hypothesis:
    return head_mistake(
        f"logits_of_the_{neighbour}_position",
        f"row i of the logits is that of the {neighbour} token",
        "After a batched prefill, the row to read is (first row of the sequence) + length - 1.",
        lambda s: _on_head_input(s, lambda x: np.roll(x, shift, axis=0)) if len(s.tokens) > 1 else None,
    )


# fmt: off
HYPOTHESES = (
    gate_mistake("silu_for_relu2", "silu where the model has relu squared",
        "Read hidden_act: relu2 is relu(gate)^2.",
        lambda s: s.with_config(activation="silu") if s.config.activation == "relu2" else None),
    gate_mistake("relu2_for_silu", "relu squared where the model has silu",
        "Read hidden_act: silu is x * sigmoid(x).",
        lambda s: s.with_config(activation="relu2") if s.config.activation == "silu" else None),
    gate_mistake("activation_on_the_product", "the activation is applied to gate * up, not to the gate alone",
        "Compute act(gate) * up: the activation sees the gate only.",
        lambda s: _gate(s, lambda act, gate, up: act(gate * up))),
    gate_mistake("relu_not_squared", "relu without the square",
        "relu2 is relu(gate)^2.",
        lambda s: _gate(s, lambda act, gate, up: np.maximum(gate, 0) * up) if s.config.activation == "relu2" else None),
    gate_mistake("activation_on_up", "gate and up exchanged: the activation is on up",
        "Activate the gate projection.", lambda s: _gate(s, lambda act, gate, up: gate * act(up))),
    attn_sub_norm_mistake("attn_sub_norm_missing", "attn_sub_norm is left out",
        "Normalise attention's output before o_proj.", lambda s: _without_sub_norms(s, "attn_sub_norm")),
    ffn_sub_norm_mistake("ffn_sub_norm_missing", "ffn_sub_norm is left out",
        "Normalise act(gate) * up before down_proj.", lambda s: _without_sub_norms(s, "ffn_sub_norm")),
    attn_sub_norm_mistake("sub_norms_missing", "both sub-norms are left out, as in LLaMA",
        "BitNet blocks have two more norms: before o_proj and before down_proj.", _without_both_sub_norms),
    Hypothesis("*.attn.o_proj.*", "sub_norms_added",
        "there are sub-norms, of weight 1, where the model has none",
        "Without sub-norms (use_sub_norms: false) o_proj and down_proj take their inputs as they are.",
        _with_sub_norms),
    attn_sub_norm_mistake("attn_sub_norm_per_head", "attn_sub_norm divides each head by its own length",
        "The sub-norm's mean of squares runs over the full width H*d, not over one head.", _sub_norm_per_head),
    *(_eps(value) for value in (1e-5, 1e-6, 1e-8)),
    norm_mistake("norm_eps_outside_the_root", "eps is added to the root, not to the mean of squares under it",
        "x / sqrt(mean(x^2) + eps).", lambda s: s.with_ops(rms_norm=_eps_outside)),
    norm_mistake("norm_weight_plus_one", "norms multiply by 1 + weight, as in Gemma",
        "Multiply by the weight.", lambda s: s.map_norms(_plus_one)),
    norm_mistake("norm_weight_ignored", "norms do not multiply by their weight",
        "Multiply by the weight.", lambda s: s.map_norms(_without_weight)),
    norm_mistake("layer_norm_for_rms_norm", "the mean is subtracted, as in LayerNorm",
        "RMSNorm does not subtract the mean.", lambda s: s.with_ops(rms_norm=_layer_norm)),
    embedding_mistake("embedding_scaled", "the embedding is multiplied by sqrt(D), as in Gemma",
        "Use it unscaled.",
        lambda s: s.with_ops(embed=lambda op, w, tokens: op(w, tokens) * np.float32(s.config.hidden_size**0.5))),
    head_mistake("head_int8_rows", "lm_head is quantised to int8, with one scale per row",
        "lm_head is not quantised.", lambda s: _head(s, _int8_rows)),
    head_mistake("head_q8_0", "lm_head is stored as Q8_0 (int8 blocks of 32)",
        "Keep lm_head in bf16 or f32.", lambda s: _head(s, int8_blocks) if s.config.hidden_size % 32 == 0 else None),
    embedding_mistake("head_and_embedding_q8_0", "the embedding, tied to the head, is stored as Q8_0",
        "Keep token_embd in bf16 or f16.",
        lambda s: _embedding_and_head(s, int8_blocks) if s.weights.tied and s.config.hidden_size % 32 == 0 else None),
    head_mistake("head_activations_int8", "lm_head runs with int8 weights and int8 activations",
        "lm_head is a plain float product: no activation quantisation there.", _int8_head),
    table_mistake("head_f16", "embedding and head are rounded to float16",
        "bf16 has a wider range.", lambda s: _embedding_and_head(s, lambda w: w.astype(np.float16))),
    table_mistake("head_bf16", "embedding and head are rounded to bfloat16",
        "Keep the file's dtype.", lambda s: _embedding_and_head(s, lambda w: w.astype(ml_dtypes.bfloat16))),
    _shifted_logits(1, "previous"),
    _shifted_logits(-1, "next"),
    head_mistake("logits_of_one_position_for_all", "every row of the logits is the last token's",
        "Index the hidden states by token before the head.",
        lambda s: _on_head_input(s, lambda x: np.repeat(x[-1:], len(x), axis=0)) if len(s.tokens) > 1 else None),
)
