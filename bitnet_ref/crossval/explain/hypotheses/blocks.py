"""Mistakes in the gate, the norms, the embedding and the head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ....backends import Backend
from ....reference import layers
from ....reference.weights import DenseWeight
from ..variants import Setting, map_norms
from .base import Hypothesis, Kind, listed_in

HYPOTHESES: list[Hypothesis] = []
hypothesis = listed_in(HYPOTHESES)

# -- the gate ----------------------------------------------------------------------------------------------------------

GATE = "*.mlp.hook_post"


@hypothesis("silu_for_relu2", GATE, "silu where the model has relu squared", "Read hidden_act: relu2 is relu(gate)^2.")
def _(s: Setting) -> Setting | None:
    return s.with_config(activation="silu") if s.config.activation == "relu2" else None


@hypothesis("relu2_for_silu", GATE, "relu squared where the model has silu", "Read hidden_act: silu is x * sigmoid(x).")
def _(s: Setting) -> Setting | None:
    return s.with_config(activation="relu2") if s.config.activation == "silu" else None


def _gate(act: Callable[[NDArray, NDArray], NDArray]) -> Callable[..., NDArray]:
    return lambda be, gate, up, activation: act(gate, up)


@hypothesis(
    "activation_on_the_product",
    GATE,
    "the activation is applied to gate * up, not to the gate alone",
    "Compute act(gate) * up: the activation sees the gate only.",
)
def _(s: Setting) -> Setting:
    act = layers.GATES[s.config.activation]
    return s.with_ops(gated=_gate(lambda gate, up: act(gate * up)))


@hypothesis("relu_not_squared", GATE, "relu without the square", "relu2 is relu(gate)^2.")
def _(s: Setting) -> Setting | None:
    relu = _gate(lambda gate, up: np.maximum(gate, 0) * up)
    return s.with_ops(gated=relu) if s.config.activation == "relu2" else None


@hypothesis("activation_on_up", GATE, "gate and up exchanged: the activation is on up", "Activate the gate projection.")
def _(s: Setting) -> Setting:
    act = layers.GATES[s.config.activation]
    return s.with_ops(gated=_gate(lambda gate, up: gate * act(up)))


# -- norms -------------------------------------------------------------------------------------------------------------

ATTN_SUB = "*.attn.sub_norm.* *.attn.o_proj.*"
FFN_SUB = "*.mlp.sub_norm.* *.mlp.down_proj.*"
NORMALIZED = "*.hook_scale *.hook_normalized"


@hypothesis(
    "attn_sub_norm_missing", ATTN_SUB, "attn_sub_norm is left out", "Normalise attention's output before o_proj."
)
def _(s: Setting) -> Setting | None:
    return s.map_layers(lambda w: replace(w, attn_sub_norm=None)) if s.config.sub_norms else None


@hypothesis("ffn_sub_norm_missing", FFN_SUB, "ffn_sub_norm is left out", "Normalise act(gate) * up before down_proj.")
def _(s: Setting) -> Setting | None:
    return s.map_layers(lambda w: replace(w, ffn_sub_norm=None)) if s.config.sub_norms else None


@hypothesis(
    "sub_norms_missing",
    ATTN_SUB,
    "both sub-norms are left out, as in LLaMA",
    "BitNet blocks have two more norms: before o_proj and before down_proj.",
)
def _(s: Setting) -> Setting | None:
    if not s.config.sub_norms:
        return None
    return s.with_config(sub_norms=False).map_layers(lambda w: replace(w, attn_sub_norm=None, ffn_sub_norm=None))


@hypothesis(
    "attn_sub_norm_per_head",
    ATTN_SUB,
    "attn_sub_norm divides each head by its own length",
    "The sub-norm's mean of squares runs over the full width H*d, not over one head.",
)
def _(s: Setting) -> Setting | None:
    ours = {id(w.attn_sub_norm) for w in s.weights.layers if w.attn_sub_norm is not None}

    def rms_norm(be: Backend, x: NDArray, weight: NDArray, eps: float) -> NDArray:
        if id(weight) not in ours:
            return Backend.rms_norm(be, x, weight, eps)
        heads = x.reshape(-1, s.config.head_dim)
        return (heads / layers.rms_scale(heads, eps)).reshape(x.shape) * weight

    return s.with_ops(rms_norm=rms_norm) if ours and s.config.num_attention_heads > 1 else None


def _eps(value: float) -> None:
    @hypothesis(
        f"norm_eps_{value:g}",
        NORMALIZED,
        f"the norms' eps is {value:g}, not the model's own",
        "Read rms_norm_eps from the config; class defaults differ.",
    )
    def _(s: Setting) -> Setting | None:
        return s.with_config(norm_eps=value) if s.config.norm_eps != value else None


for _value in (1e-5, 1e-6, 1e-8):
    _eps(_value)


@hypothesis(
    "norm_eps_outside_the_root",
    NORMALIZED,
    "eps is added to the root, not to the mean of squares under it",
    "x / sqrt(mean(x^2) + eps).",
)
def _(s: Setting) -> Setting:
    def rms_norm(be: Backend, x: NDArray, weight: NDArray, eps: float) -> NDArray:
        root = np.sqrt(np.square(x, dtype=np.float64).mean(axis=-1, keepdims=True)) + eps
        return x / root.astype(x.dtype) * weight

    return s.with_ops(rms_norm=rms_norm)


@hypothesis("norm_weight_plus_one", NORMALIZED, "norms multiply by 1 + weight, as in Gemma", "Multiply by the weight.")
def _(s: Setting) -> Setting:
    return map_norms(s, lambda w: w + np.float32(1))


@hypothesis("norm_weight_ignored", NORMALIZED, "norms do not multiply by their weight", "Multiply by the weight.")
def _(s: Setting) -> Setting:
    return map_norms(s, np.ones_like)


@hypothesis("layer_norm_for_rms_norm", NORMALIZED, "the mean is subtracted, as in LayerNorm", "RMSNorm keeps the mean.")
def _(s: Setting) -> Setting:
    def rms_norm(be: Backend, x: NDArray, weight: NDArray, eps: float) -> NDArray:
        return Backend.rms_norm(be, x - x.mean(axis=-1, keepdims=True), weight, eps)

    return s.with_ops(rms_norm=rms_norm)


# -- embedding and head ------------------------------------------------------------------------------------------------

HEAD = "lm_head.hook_out"


@hypothesis(
    "embedding_scaled",
    "hook_embed",
    "the embedding is multiplied by sqrt(D), as in Gemma",
    "Take it as it is.",
    Kind.SCALED,
)
def _(s: Setting) -> Setting:
    def embed(be: Backend, w: DenseWeight, tokens: NDArray) -> NDArray:
        return Backend.embed(be, w, tokens) * np.float32(s.config.hidden_size**0.5)

    return s.with_ops(embed=embed)


def _dense(weight: Any, change: Callable[[NDArray], NDArray]) -> Any:
    return replace(weight, array=change(weight.array.astype(np.float32))) if isinstance(weight, DenseWeight) else weight


def _head(s: Setting, change: Callable[[NDArray], NDArray]) -> Setting | None:
    if not isinstance(s.weights.lm_head, DenseWeight):
        return None
    return replace(s, weights=replace(s.weights, lm_head=_dense(s.weights.lm_head, change)))


def int8_rows(w: NDArray) -> NDArray:
    """w (N, K), each row rounded to 255 levels of its largest value."""
    step = np.maximum(np.abs(w).max(axis=-1, keepdims=True), np.float32(1e-30)) / np.float32(127)
    return np.rint(w / step) * step


def int8_blocks(w: NDArray) -> NDArray:
    """As Q8_0: blocks of 32 along the row, a float16 scale each."""
    blocks = w.reshape(-1, 32)
    step = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
    inverse = np.where(step > 0, 1 / np.where(step > 0, step, 1), 0)
    return (np.rint(blocks * inverse) * step.astype(np.float16).astype(np.float32)).reshape(w.shape)


@hypothesis("head_int8_rows", HEAD, "lm_head is quantised to int8, a scale for each row", "lm_head is not quantised.")
def _(s: Setting) -> Setting | None:
    return _head(s, int8_rows)


@hypothesis("head_q8_0", HEAD, "lm_head is stored as Q8_0 (int8 blocks of 32)", "Keep lm_head in bf16 or f32.")
def _(s: Setting) -> Setting | None:
    return _head(s, int8_blocks) if s.config.hidden_size % 32 == 0 else None


@hypothesis(
    "head_and_embedding_q8_0",
    "hook_embed",
    "the embedding, tied to the head, is stored as Q8_0",
    "Keep token_embd in bf16 or f16.",
)
def _(s: Setting) -> Setting | None:
    if not s.weights.tied or s.config.hidden_size % 32:
        return None
    both = _dense(s.weights.embedding, int8_blocks)
    return replace(s, weights=replace(s.weights, embedding=both, lm_head=both))


@hypothesis(
    "head_activations_int8",
    HEAD,
    "lm_head runs with int8 weights and int8 activations",
    "lm_head is a plain float product: no activation quantisation there.",
)
def _(s: Setting) -> Setting | None:
    changed = _head(s, int8_rows)
    return None if changed is None else _on_head_input(changed, _int8_tokens)


@hypothesis(
    "head_f16", "hook_embed lm_head.hook_out", "embedding and head are rounded to float16", "bf16 has a wider range."
)
def _(s: Setting) -> Setting:
    def half(w: NDArray) -> NDArray:
        return w.astype(np.float16)

    embedding = _dense(s.weights.embedding, half)
    head = embedding if s.weights.tied else _dense(s.weights.lm_head, half)
    return replace(s, weights=replace(s.weights, embedding=embedding, lm_head=head))


@hypothesis(
    "head_bf16", "hook_embed lm_head.hook_out", "embedding and head are rounded to bfloat16", "Keep the file's dtype."
)
def _(s: Setting) -> Setting:
    def short(w: NDArray) -> NDArray:
        return w.astype(ml_dtypes.bfloat16)

    embedding = _dense(s.weights.embedding, short)
    head = embedding if s.weights.tied else _dense(s.weights.lm_head, short)
    return replace(s, weights=replace(s.weights, embedding=embedding, lm_head=head))


def _int8_tokens(x: NDArray) -> NDArray:
    x_q, x_quant_scale = Backend("float32", threads=1).quantize_activations(x)
    return x_q.astype(np.float32) / x_quant_scale


def _on_head_input(s: Setting, change: Callable[[NDArray], NDArray]) -> Setting:
    head = s.weights.lm_head

    def dense_matmul(be: Backend, x: NDArray, w: DenseWeight) -> NDArray:
        return Backend.dense_matmul(be, change(x) if w is head else x, w)

    return s.with_ops(dense_matmul=dense_matmul)


def _position(shift: int, where: str) -> None:
    @hypothesis(
        f"logits_of_the_{where}_position",
        HEAD,
        f"row i of the logits is that of the {where} token",
        "After a batched prefill, the row to read is (first row of the sequence) + length - 1.",
        Kind.SHIFTED,
    )
    def _(s: Setting) -> Setting | None:
        return _on_head_input(s, lambda x: np.roll(x, shift, axis=0)) if len(s.tokens) > 1 else None


_position(1, "previous")
_position(-1, "next")


@hypothesis(
    "logits_of_one_position_for_all",
    HEAD,
    "every row of the logits is the last token's",
    "Index the hidden states by token before the head.",
    Kind.SHIFTED,
)
def _(s: Setting) -> Setting | None:
    return _on_head_input(s, lambda x: np.repeat(x[-1:], len(x), axis=0)) if len(s.tokens) > 1 else None
