"""Mistakes in what the families of 2026 have beyond LLaMA: more norms, groups, rotations, DeltaNet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....formats.gguf.blocks import dequantize
from ....reference import quantization
from ....reference.cache import KVCache, TokenBatch
from ....reference.config import ModelConfig
from ....reference.model import RopeTables, add_result, attention_block, norm_heads
from ....reference.ops import Ops
from ....reference.weights import (
    DeltaWeights,
    DenseWeight,
    GroupTernaryWeight,
    InputNorm,
    LayerWeights,
    LinearWeight,
    Rotation,
    TernaryWeight,
)
from ..variants import Hypothesis, Op, Setting, map_norms

inner_norm_mistake = partial(Hypothesis, "*_proj.rms_norm.* *_proj.hook_x_*")
head_norm_mistake = partial(Hypothesis, "*.attn.[qk]_norm.* *.attn.hook_rot_[qk]")
rope_mistake = partial(Hypothesis, "*.attn.hook_rot_q *.attn.hook_rot_k")
scaled_query_mistake = partial(Hypothesis, "*.attn.hook_scaled_q *.attn.hook_attn_scores")
norm_mistake = partial(Hypothesis, "*.hook_normalized")
embedding_scale_mistake = partial(Hypothesis, "hook_embed_scaled blocks.0.hook_resid_pre")
post_norm_mistake = partial(Hypothesis, "*_post.* *.hook_attn_out *.hook_mlp_out *.hook_resid_mid *.hook_resid_post")
group_mistake = partial(Hypothesis, "*_proj.hook_out")
rotation_mistake = partial(Hypothesis, "*_proj.hook_x_rotated *_proj.hook_out")
rotated_table_mistake = partial(Hypothesis, "hook_embed")
conv_mistake = partial(Hypothesis, "*.attn.hook_conv")
delta_gate_mistake = partial(Hypothesis, "*.attn.[ab]_proj.hook_out *.attn.hook_log_decay *.attn.hook_beta")
gate_mistake = partial(Hypothesis, "*.attn.hook_gated_z")

# -- norms -------------------------------------------------------------------------------------------------------------


def _inner_norms(s: Setting, change: Callable[[LayerWeights, str, InputNorm], InputNorm | None]) -> Setting | None:
    """change(layer, name of the linear, its norm) in place of the norm that a linear has of its own."""

    def layer(w: LayerWeights) -> LayerWeights:
        changed: dict[str, Any] = {}
        for name, weight in w.linears():
            if isinstance(weight, TernaryWeight) and weight.input_norm is not None:
                changed[name] = replace(weight, input_norm=change(w, name, weight.input_norm))
        return replace(w, **changed)

    any_norm = any(isinstance(w, TernaryWeight) and w.input_norm is not None for _, w in s.weights.linears())
    return s.map_layers(layer) if any_norm else None


def _shared_norm(w: LayerWeights, name: str, norm: InputNorm) -> InputNorm:
    """The norm of the first linear that reads the same input: q_proj's for k and v, gate_proj's for up. A copy, since
    a recorder knows a norm by its array."""
    first = {"k_proj": w.q_proj, "v_proj": w.q_proj, "up_proj": w.gate_proj}.get(name)
    if not isinstance(first, TernaryWeight) or first.input_norm is None:
        return norm
    return replace(first.input_norm, weight=first.input_norm.weight.copy())


def _without_head_norms(s: Setting) -> Setting | None:
    changed = s.map_layers(lambda w: replace(w, q_norm=None, k_norm=None)).with_config(qk_norms=False)
    return changed if s.config.qk_norms else None


def _exchanged_head_norms(s: Setting) -> Setting | None:
    return s.map_layers(lambda w: replace(w, q_norm=w.k_norm, k_norm=w.q_norm)) if s.config.qk_norms else None


def _norm_after_rope(
    be: Ops,
    x: NDArray,
    w: LayerWeights,
    cfg: ModelConfig,
    rope: RopeTables,
    batch: TokenBatch,
    cache: KVCache,
    layer: int,
) -> NDArray:
    """`attention_block` of a model with q/k norms, which here come after RoPE."""
    if w.q_norm is None or w.k_norm is None or w.delta is not None:
        return attention_block(be, x, w, cfg, rope, batch, cache, layer)
    h = be.rms_norm(x, w.attn_norm, cfg.norm_eps)
    q, k, v = (y.reshape(len(x), -1, cfg.head_dim) for y in be.linears(h, (w.q_proj, w.k_proj, w.v_proj)))
    q, k = be.rope(q, k, *rope, *[True] * (cfg.rotary_dim is not None))
    q, k = norm_heads(be, q, w.q_norm, cfg), norm_heads(be, k, w.k_norm, cfg)
    q = q if cfg.query_scale == 1 else be.scale(q, cfg.query_scale)
    be.append(cache, layer, batch, k, v)
    z = be.attention(q, cache, batch, layer, cfg.window_of(layer)).reshape(len(x), -1)
    z = z if w.z_proj is None else be.output_gate(z, be.linear(h, w.z_proj), "sigmoid")
    z = z if w.attn_sub_norm is None else be.rms_norm(z, w.attn_sub_norm, cfg.norm_eps)
    return add_result(be, x, be.linear(z, w.o_proj), w.attn_post_norm, cfg)


def _one_left_out(s: Setting) -> Setting | None:
    """The norms of a family whose files hold w for a factor of 1 + w; the reader has added the 1."""
    if not (s.config.post_norms or s.config.delta is not None):
        return None
    return map_norms(s, lambda w: w - np.float32(1))


def _without_post_norms(s: Setting) -> Setting | None:
    if not s.config.post_norms:
        return None
    none = s.map_layers(lambda w: replace(w, attn_post_norm=None, ffn_post_norm=None))
    return none.with_config(post_norms=False)


def _post_norm_of_the_sum(s: Setting) -> Setting | None:
    """norm(x + y) for x + norm(y)."""
    return s.with_texts(add_result=_norm_the_sum) if s.config.post_norms else None


def _norm_the_sum(be: Ops, x: NDArray, y: NDArray, post_norm: NDArray | None, cfg: ModelConfig) -> NDArray:
    y = y if cfg.residual_scale == 1 else be.scale(y, cfg.residual_scale)
    return be.add(x, y) if post_norm is None else be.rms_norm(be.add(x, y), post_norm, cfg.norm_eps)


# -- RoPE of layer types -----------------------------------------------------------------------------------------------


def _ropes(s: Setting, full: str, sliding: str) -> Setting | None:
    """RoPE of the layers of both types: "rope" or "local_rope" of the config."""
    if s.config.local_rope is None:
        return None
    ropes = {"rope": s.config.rope, "local_rope": s.config.local_rope}
    return s.with_config(rope=ropes[full], local_rope=ropes[sliding])


# -- ternary by groups -------------------------------------------------------------------------------------------------


def _grouped(s: Setting, change: Callable[[GroupTernaryWeight], LinearWeight | None]) -> Setting | None:
    """Every linear that is ternary by groups, changed; None from `change` leaves it. The embedding's rows stay."""
    count = 0

    def changed(weight: LinearWeight) -> LinearWeight:
        nonlocal count
        other = change(weight) if isinstance(weight, GroupTernaryWeight) else None
        count += other is not None
        return weight if other is None else other

    def layer(w: LayerWeights) -> LayerWeights:
        linears: dict[str, Any] = {name: changed(each) for name, each in w.linears()}
        return replace(w, **linears)

    other = s.map_layers(layer)
    other = replace(other, weights=replace(other.weights, lm_head=changed(s.weights.lm_head)))
    return other if count else None


def _with_scales(w: GroupTernaryWeight, scales: NDArray) -> DenseWeight:
    """The matrix with a scale (N, K) for each of its numbers."""
    w_t = quantization.unpack_ternary(w.packed, w.in_features)
    return DenseWeight((w_t * scales.astype(np.float32)).astype(np.float32), w.bias, wide=True)


def _other_group(w: GroupTernaryWeight, group: int, of_row: bool) -> DenseWeight | None:
    """Scales looked up as for groups of another size. of_row: from the row's first scale on; otherwise from where rows
    of such groups would begin."""
    if w.rotation is not None or w.in_features % group or group == w.group:
        return None
    columns = np.arange(w.in_features) // group
    row_length = w.scales.shape[1] if of_row else w.in_features // group
    index = np.arange(len(w.packed))[:, None] * row_length + columns
    return _with_scales(w, w.scales.ravel()[np.minimum(index, w.scales.size - 1)])


def _read_as_64(w: GroupTernaryWeight) -> DenseWeight | None:
    """What a reader of blocks of 18 bytes makes of the file's blocks of 34. What the span lacks is zeros."""
    if w.group != 128 or w.in_features % 128:
        return None
    scales = np.ascontiguousarray(w.scales, dtype=np.float16).reshape(-1, 1).view(np.uint8)
    blocks = np.concatenate([scales, w.packed.reshape(-1, 32)], axis=1).reshape(-1)
    data = np.concatenate([blocks, np.zeros(2 * len(scales), dtype=np.uint8)])
    return DenseWeight(dequantize(data, "Q2_0", w.shape), w.bias, wide=True)


def _all_read_as_64(s: Setting) -> Setting | None:
    changed = _grouped(s, _read_as_64)
    if changed is None or not isinstance(s.weights.embedding, GroupTernaryWeight):
        return changed
    embedding = _read_as_64(s.weights.embedding) or s.weights.embedding
    head = embedding if s.weights.tied else changed.weights.lm_head
    return replace(changed, weights=replace(changed.weights, embedding=embedding, lm_head=head))


def _wrong_axis(w: GroupTernaryWeight) -> DenseWeight | None:
    if w.rotation is not None or len(w.packed) % w.group or w.in_features % w.group:
        return None
    by_column = w.scales.reshape(len(w.packed) // w.group, w.in_features)
    return _with_scales(w, np.repeat(by_column, w.group, axis=0))


def _one_scale_per_row(w: GroupTernaryWeight) -> DenseWeight | None:
    if w.rotation is not None or w.scales.shape[1] == 1:
        return None
    return _with_scales(w, np.broadcast_to(w.scales.astype(np.float64).mean(axis=1, keepdims=True), w.shape))


def _group_size(wrong: int, right: int, of_row: bool, name: str) -> Hypothesis:
    place = "the row's own scales" if of_row else "rows of such groups"
    return group_mistake(
        name,
        f"scales are taken for groups of {wrong} where the file has groups of {right}, from {place}",
        f"The scale of input k is number k // {right} of its row; Q2_0 files have groups of 64 or of 128.",
        lambda s: _grouped(s, lambda w: _other_group(w, wrong, of_row) if w.group == right else None),
    )


# -- Hadamard bases ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _SignsAfter(Rotation):
    def turn(self, x: NDArray) -> NDArray[np.float64]:
        x = x if self.order is None else x[..., self.order]
        return quantization.hadamard(x, self.block) * self.signs

    def turn_back(self, z: NDArray) -> NDArray[np.float64]:
        x = quantization.hadamard(z * self.signs.astype(np.float64), self.block)
        return x if self.order is None else x[..., np.argsort(self.order)]


@dataclass(frozen=True, eq=False)
class _NoInverse(Rotation):
    def turn_back(self, z: NDArray) -> NDArray[np.float64]:
        return z.astype(np.float64)


@dataclass(frozen=True, eq=False)
class _NoTurn(Rotation):
    def turn(self, x: NDArray) -> NDArray[np.float64]:
        return x.astype(np.float64)


def _rotated(s: Setting, linears: type[Rotation], table: type[Rotation] = Rotation) -> Setting | None:
    """Every rotation of the linears, and that of the embedding's rows, of another kind."""

    def turned(w: Any, kind: type[Rotation]) -> GroupTernaryWeight | None:
        if not isinstance(w, GroupTernaryWeight) or w.rotation is None:
            return None
        return replace(w, rotation=kind(w.rotation.signs, w.rotation.block, w.rotation.order))

    if (embedding := turned(s.weights.embedding, table)) is None and table is not Rotation:
        return None
    changed = _grouped(s, lambda w: turned(w, linears))
    if changed is None or embedding is None:
        return changed
    return replace(changed, weights=replace(changed.weights, embedding=embedding))


def _with_signs(s: Setting, change: Callable[[NDArray], NDArray]) -> Setting | None:
    def other(w: GroupTernaryWeight) -> GroupTernaryWeight | None:
        rotation = w.rotation
        if rotation is None or np.array_equal(signs := change(rotation.signs), rotation.signs):
            return None
        return replace(w, rotation=replace(rotation, signs=signs))

    return _grouped(s, other)


# -- Gated DeltaNet ----------------------------------------------------------------------------------------------------


def _delta(s: Setting, **ops: Callable[..., Any]) -> Setting | None:
    return s.with_ops(**ops) if s.config.delta is not None else None


def _shifted_conv(shift: int) -> Callable[..., NDArray]:
    """The convolution sees the inputs of `shift` tokens before; of a negative shift, after."""

    def conv(op: Op, qkv: NDArray, *rest: Any) -> NDArray:
        moved = np.zeros_like(qkv)
        if shift > 0:
            moved[shift:] = qkv[:-shift]
        else:
            moved[:shift] = qkv[-shift:]
        return op(moved, *rest)

    return conv


def _reversed_conv(op: Op, qkv: NDArray, conv: NDArray, *rest: Any) -> NDArray:
    return op(qkv, np.ascontiguousarray(conv[:, ::-1]), *rest)


def _exchange_products(w: LayerWeights) -> LayerWeights:
    return w if w.delta is None else replace(w, a_proj=w.b_proj, b_proj=w.a_proj)


def _gates(change: Callable[[NDArray, NDArray], tuple[NDArray, NDArray]]) -> Callable[..., Any]:
    def gates(op: Op, a: NDArray, b: NDArray, w: DeltaWeights) -> tuple[NDArray, NDArray]:
        return change(*op(a, b, w))

    return gates


def _other_gate(op: Op, z: NDArray, gate: NDArray, activation: str) -> NDArray:
    return op(z, gate, "silu" if activation == "sigmoid" else "sigmoid")


def _has_output_gate(s: Setting) -> bool:
    return s.config.output_gate or s.config.delta is not None


# fmt: off
HYPOTHESES = (
    inner_norm_mistake("linear_norm_missing", "the norm that each linear has of its own is left out",
        "Normalise each linear's input with its own norm before it is quantised (BitNet-Embedding, Qwen2.5-BitNet).",
        lambda s: _inner_norms(s, lambda w, name, norm: None)),
    inner_norm_mistake("linear_norm_shared", "linears of one input share a norm: k and v have q's, up has gate's",
        "Each linear has a norm of its own, and so a quantised input of its own.",
        lambda s: _inner_norms(s, _shared_norm)),
    inner_norm_mistake("linear_norm_eps", "the norms inside the linears have the model's eps",
        "Their eps is rms_norm_eps of the quantization_config, 1e-6 unless it says otherwise.",
        lambda s: _inner_norms(s, lambda w, name, norm: replace(norm, eps=1e-5))),
    head_norm_mistake("qk_norms_missing", "the norms over the heads of q and k are left out",
        "Apply q_norm and k_norm to each head before RoPE (Qwen3, Gemma3).", _without_head_norms),
    head_norm_mistake("qk_norms_after_rope", "the norms over the heads of q and k come after RoPE",
        "Normalise each head, then rotate: the norm's weights differ within a pair.",
        lambda s: s.with_texts(attention_block=_norm_after_rope) if s.config.qk_norms else None),
    head_norm_mistake("qk_norms_exchanged", "q has k_norm and k has q_norm", "q_norm is q's.", _exchanged_head_norms),
    norm_mistake("norm_one_left_out", "norms multiply by w where the family's files mean 1 + w",
        "Add 1 to the norms of Gemma and Qwen3.5 (not to those inside BitLinears, nor to DeltaNet's).", _one_left_out),
    embedding_scale_mistake("embedding_scale_missing", "rows of the embedding are not scaled",
        "Multiply by sqrt(hidden_size) (Gemma) or scale_emb (MiniCPM).",
        lambda s: s.with_config(embedding_scale=1.0) if s.config.embedding_scale != 1 else None),
    post_norm_mistake("post_norms_missing", "the norms of each block's result are left out",
        "Normalise the result before it is added (Gemma3's post_attention_layernorm, post_feedforward_layernorm).",
        _without_post_norms),
    post_norm_mistake("post_norm_of_the_sum", "the post-norms are applied to the residual stream after the addition",
        "x + norm(y): only the block's result is normalised.", _post_norm_of_the_sum),
    scaled_query_mistake("query_scale_missing",
        "scores are divided by sqrt(head_dim) where the model has query_pre_attn_scalar",
        "q k / sqrt(query_pre_attn_scalar).",
        lambda s: s.with_config(query_scale=1.0) if s.config.query_scale != 1 else None),
    rope_mistake("rope_of_layer_types_exchanged",
        "sliding layers have the RoPE of full ones, and full layers that of sliding ones",
        "rope_theta is of full attention, rope_local_base_freq of sliding layers.",
        lambda s: _ropes(s, "local_rope", "rope")),
    rope_mistake("rope_of_full_layers_for_all", "sliding layers have the RoPE of full ones",
        "Read rope_local_base_freq (or rope_parameters of sliding_attention) too.",
        lambda s: _ropes(s, "rope", "rope")),
    rope_mistake("rope_of_sliding_layers_for_all", "full layers have the RoPE of sliding ones",
        "Read the RoPE of each layer type.", lambda s: _ropes(s, "local_rope", "local_rope")),
    rope_mistake("rope_of_the_whole_head", "RoPE turns the whole head where it should turn a part",
        "Read partial_rotary_factor: only the first numbers of a head are turned.",
        lambda s: s.with_config(rotary_dim=None) if s.config.rotary_dim is not None else None),
    Hypothesis("hook_embed *_proj.hook_out lm_head.hook_out", "q2_0_of_128_read_as_64",
        "Q2_0 blocks of 128 weights (34 bytes) are read as blocks of 64 (18 bytes)",
        "Both have type id 42: the bytes of a tensor divided by its weights tell which it is.", _all_read_as_64),
    group_mistake("group_scales_along_rows",
        "group scales are taken along the wrong axis: for neighbouring rows, not for neighbouring inputs",
        "A scale is for `group` neighbouring inputs of one row.", lambda s: _grouped(s, _wrong_axis)),
    _group_size(64, 128, True, "groups_of_64_for_128"),
    _group_size(64, 128, False, "groups_of_64_for_128_rows_too"),
    _group_size(128, 64, True, "groups_of_128_for_64"),
    _group_size(128, 64, False, "groups_of_128_for_64_rows_too"),
    group_mistake("group_scales_averaged", "one scale for the row, the mean of its groups' scales",
        "Apply each group's own scale.",
        lambda s: _grouped(s, _one_scale_per_row)),
    rotation_mistake("rotation_ignored", "matrices in a Hadamard basis are used as plain ones",
        "Multiply by R x, R x = H (signs x), as the keys prism.hadamard.* say.", lambda s: _rotated(s, _NoTurn)),
    rotated_table_mistake("rotation_and_inverse_ignored",
        "matrices and the embedding in a Hadamard basis are used as plain ones",
        "Multiply by R x, and turn rows of the embedding back, as the keys prism.hadamard.* say.",
        lambda s: _rotated(s, _NoTurn, _NoInverse)),
    rotation_mistake("rotation_signs_after", "the signs are applied after the Hadamard transform",
        "R x = H (signs x): signs first.", lambda s: _rotated(s, _SignsAfter)),
    rotated_table_mistake("rotation_signs_after_everywhere",
        "the signs are applied after the transform, and before it on the way back",
        "R x = H (signs x), and rows of the embedding are signs (H z).",
        lambda s: _rotated(s, _SignsAfter, _SignsAfter)),
    rotation_mistake("rotation_signs_ignored", "the Hadamard transform is applied without its signs",
        "Read prism.hadamard.sign_values where sign_mode is explicit.", lambda s: _with_signs(s, np.ones_like)),
    rotated_table_mistake("rotation_inverse_missing", "rows of the embedding are not turned back",
        "A looked-up row z of a table in prism.hadamard.inverse_weight_names becomes signs (H z).",
        lambda s: _rotated(s, Rotation, _NoInverse)),
    delta_gate_mistake("decay_and_beta_exchanged",
        "the products of a and b are exchanged: decay is computed from b, beta from a",
        "alpha = exp(-exp(A_log) softplus(a + dt_bias)), beta = sigmoid(b).",
        lambda s: _delta(s, delta_gates=lambda op, a, b, w: op(b, a, w))),
    delta_gate_mistake("a_proj_and_b_proj_exchanged", "the matrices in_proj_a and in_proj_b are exchanged",
        "in_proj_a is of the decay, in_proj_b of beta.",
        lambda s: s.map_layers(_exchange_products) if s.config.delta is not None else None),
    delta_gate_mistake("decay_missing", "the memory is not decayed",
        "S becomes alpha S before it is corrected.",
        lambda s: _delta(s, delta_gates=_gates(lambda log_alpha, beta: (np.zeros_like(log_alpha), beta)))),
    delta_gate_mistake("beta_missing", "the whole error is written, without beta",
        "Write beta (v - k S).",
        lambda s: _delta(s, delta_gates=_gates(lambda log_alpha, beta: (log_alpha, np.ones_like(beta))))),
    conv_mistake("conv_one_late", "the convolution is off by one: it ends before the current token",
        "Its last weight is for the current token.", lambda s: _delta(s, delta_conv=_shifted_conv(1))),
    conv_mistake("conv_one_early", "the convolution is off by one: it sees the next token",
        "Pad conv_size - 1 tokens in front, none behind.",
        lambda s: _delta(s, delta_conv=_shifted_conv(-1)) if len(s.tokens) > 1 else None),
    conv_mistake("conv_reversed", "the convolution's weights are in reverse order",
        "torch's conv1d is a correlation: weight [.., -1] is for the current token.",
        lambda s: _delta(s, delta_conv=_reversed_conv)),
    gate_mistake("output_gate_missing", "the result is not multiplied by its gate before o_proj",
        "Multiply by sigmoid (attention) or silu (DeltaNet) of the gate's product.",
        lambda s: s.with_ops(output_gate=lambda op, z, gate, activation: z) if _has_output_gate(s) else None),
    gate_mistake("output_gates_exchanged", "the output gates of attention and DeltaNet have each other's activation",
        "sigmoid for attention, silu for DeltaNet.",
        lambda s: s.with_ops(output_gate=_other_gate) if _has_output_gate(s) else None),
)
