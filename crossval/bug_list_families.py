"""Planted bugs in what the families of 2026 have: norms of linears and heads, groups, rotations, DeltaNet."""

from __future__ import annotations

from bug_list import HF_FOLDER, MODEL, bug

LINEAR_NORMS, GROUPS, HADAMARD = "families/linear_norms.py", "families/groups.py", "families/hadamard.py"
QWEN, GEMMA3, QWEN3_5 = "families/qwen.py", "families/gemma3.py", "families/qwen3_5.py"

HEAD_NORMS = """    q = norm_heads(be, q, w.q_norm)
    k = norm_heads(be, k, w.k_norm)
"""
ROPE = "    q, k = be.rope(q, k, *at.rope)\n"
ATTN_RESULT = "be.add(x, be.rms_norm(attention_result(be, z, w), w.attn_post_norm))"
FFN_RESULT = "be.add(x, be.rms_norm(feed_forward_result(be, x, w, cfg), w.ffn_post_norm))"
GROUPS_IN_PRODUCT = "expand_groups(packed[part], in_features, scales[part], group, np.float64)"
OWN_NORM = "        own_norm = None if eps is None else self._vector(inner, in_features)\n"
FIRST_NORM = (
    OWN_NORM
    + """        if module.endswith(("k_proj", "v_proj", "up_proj")):
            own_norm = self.norm_before.copy()
        self.norm_before = own_norm
"""
)
EMBEDDING_SCALE = 'x if cfg.embedding_scale == 1 else be.scale(x, cfg.embedding_scale, "hook_embed_scaled")'
Q_OUT, EMBED, RESID = "blocks.0.attn.q_proj.hook_out", "hook_embed", "blocks.0.hook_resid_pre"
TURNED = "blocks.0.attn.q_proj.hook_x_rotated"
TURN = "return hadamard(x * self.signs.astype(np.float64), self.block)"
TURN_BACK = "x = hadamard(z, self.block) * self.signs"

STATE, DECAY = "blocks.0.attn.hook_state", "blocks.0.attn.hook_log_decay"
SOFTPLUS = "np.logaddexp(0.0, a.astype(np.float64) + w.decay_bias)"
STAYS = "stays = memory.astype(np.float64) * np.exp(x.log_alpha[t])[:, None, None]"
RECALLED = "(x.k[t][:, None, :] @ stays)[:, 0]"
WRITTEN = "memory[:] = stays + x.k[t][:, :, None] * (x.beta[t][:, None] * error)[:, None, :]"
ANSWER = "y[t] = (x.q[t][:, None, :] @ memory.astype(np.float64))[:, 0]"

# fmt: off
FAMILY_BUGS = (
    # -- a norm inside each linear
    bug("linear_norm_missing", "embedding-qwen3",
        "blocks.0.attn.q_proj.hook_x_*", (LINEAR_NORMS, "be.rms_norm(x, self.own_norm)", "x")),
    bug("linear_norm_shared", "embedding-qwen3",
        "blocks.0.attn.k_proj.rms_norm.hook_normalized", (HF_FOLDER, OWN_NORM, FIRST_NORM)),
    # -- norms over heads
    bug("qk_norms_missing", "qwen3", "blocks.0.attn.hook_rot_q", (QWEN, HEAD_NORMS, "")),
    bug("qk_norms_after_rope", "qwen3",
        "blocks.0.attn.q_norm.hook_normalized", (QWEN, HEAD_NORMS + ROPE, ROPE + HEAD_NORMS)),
    # -- Gemma3
    bug("norm_one_left_out", "gemma3",
        "blocks.0.ln1.hook_normalized", (HF_FOLDER, "weight + np.float32(1.0) if", "weight if")),
    bug("norm_one_added_twice", "gemma3",
        "blocks.0.ln1.hook_normalized", (HF_FOLDER, "weight + np.float32(1.0) if", "weight + np.float32(2.0) if"),
        cause="norm_weight_plus_one"),
    bug("embedding_scale_missing", "gemma3", RESID, (MODEL, EMBEDDING_SCALE, "x")),
    bug("post_norms_missing", "gemma3",
        "blocks.0.hook_attn_out",
        (GEMMA3, ATTN_RESULT, "be.add(x, attention_result(be, z, w))"),
        (GEMMA3, FFN_RESULT, "be.add(x, feed_forward_result(be, x, w, cfg))")),
    bug("post_norm_of_the_sum", "gemma3",
        "blocks.0.ln1_post.hook_scale",
        (GEMMA3, ATTN_RESULT, "be.rms_norm(be.add(x, attention_result(be, z, w)), w.attn_post_norm)"),
        (GEMMA3, FFN_RESULT, "be.rms_norm(be.add(x, feed_forward_result(be, x, w, cfg)), w.ffn_post_norm)")),
    bug("rope_of_layer_types_exchanged", "gemma3",
        "blocks.0.attn.hook_rot_q", (MODEL, "ropes[cfg.rope_of(index)]", "ropes[1 - cfg.rope_of(index)]")),
    bug("query_scale_missing", "gemma3 with a query scale",
        "blocks.0.attn.hook_attn_scores", (GEMMA3, "if cfg.query_scale != 1:", "if False:"),
        twin="scores_scaled_by_width"),
    # -- ternary by groups
    bug("group_scales_along_rows", "qwen3",
        Q_OUT,
        (GROUPS, GROUPS_IN_PRODUCT,
            "(expand_groups(packed[part], in_features, np.ones_like(scales[part]), group, np.float64)"
            " * np.kron(scales[part].astype(np.float64).reshape(-1, in_features), np.ones((group, 1))))")),
    bug("groups_of_64_for_128", "qwen3",
        Q_OUT,
        (GROUPS, GROUPS_IN_PRODUCT,
            "expand_groups(packed[part], in_features, np.stack([np.append(scales.ravel(), [scales.flat[-1]] * 64)"
            "[r * scales.shape[1] :][: in_features // 64] for r in range(len(packed))])[part], 64, np.float64)")),
    bug("groups_of_128_for_64", "groups of 64",
        Q_OUT,
        (GROUPS, GROUPS_IN_PRODUCT,
            "expand_groups(packed[part], in_features, np.repeat(scales[part], 2, axis=1)[:, : scales.shape[1]],"
            " group, np.float64)")),
    bug("group_scales_of_the_previous_group", "qwen3",
        Q_OUT,
        (GROUPS, GROUPS_IN_PRODUCT,
            "expand_groups(packed[part], in_features, np.roll(scales, 1, 1)[part], group, np.float64)")),
    bug("group_scales_of_the_next_row", "qwen3",
        Q_OUT,
        (GROUPS, GROUPS_IN_PRODUCT,
            "expand_groups(packed[part], in_features, np.roll(scales, -1, 0)[part], group, np.float64)")),
    # -- a Hadamard basis
    bug("rotation_ignored", "hadamard", TURNED, (HADAMARD, TURN, "return x.astype(np.float64)")),
    bug("rotation_signs_after", "hadamard",
        TURNED, (HADAMARD, TURN, "return hadamard(x, self.block) * self.signs.astype(np.float64)")),
    bug("rotation_inverse_missing", "hadamard", EMBED, (HADAMARD, TURN_BACK, "x = z")),
    bug("rotation_and_inverse_ignored", "hadamard",
        EMBED, (HADAMARD, TURN, "return x.astype(np.float64)"), (HADAMARD, TURN_BACK, "x = z")),
    # -- Qwen3.5
    bug("decay_and_beta_exchanged", "qwen3_5",
        "blocks.0.attn.hook_log_decay",
        (QWEN3_5, "log_decay, a, w)", "log_decay, b, w)"),
        (QWEN3_5, "write_strength, b, w)", "write_strength, a, w)"),
        twin="a_proj_and_b_proj_exchanged"),
    bug("conv_one_late", "qwen3_5",
        "blocks.0.attn.hook_conv",
        (QWEN3_5, "x = conv.shape[1], qkv.astype(np.float64)",
            "x = conv.shape[1], np.concatenate([0 * qkv[:1], qkv[:-1]]) * 1.0")),
    bug("conv_reversed", "qwen3_5",
        "blocks.0.attn.hook_conv", (QWEN3_5, "conv[:, i].astype(np.float64)", "conv[:, ~i].astype(np.float64)")),
    bug("decay_after_update", "qwen3_5",
        STATE,
        (QWEN3_5, STAYS, "stays = memory.astype(np.float64)"),
        (QWEN3_5, WRITTEN,
            f"memory[:] = ({WRITTEN.removeprefix('memory[:] = ')}) * np.exp(x.log_alpha[t])[:, None, None]")),
    bug("error_of_undecayed", "qwen3_5",
        STATE, (QWEN3_5, RECALLED, "(x.k[t][:, None, :] @ memory.astype(np.float64))[:, 0]")),
    bug("delta_rule_missing", "qwen3_5", STATE, (QWEN3_5, RECALLED, "0")),
    bug("beta_on_v_only", "qwen3_5",
        STATE,
        (QWEN3_5, "error = x.v[t] - ", "error = x.beta[t][:, None] * x.v[t] - "),
        (QWEN3_5, "(x.beta[t][:, None] * error)", "error")),
    bug("read_before_update", "qwen3_5",
        "blocks.0.attn.hook_delta_out",
        (QWEN3_5, STAYS, f"{ANSWER}\n        {STAYS}"),
        (QWEN3_5, f"        {ANSWER}\n    return y", "    return y")),
    bug("l2_is_rms", "qwen3_5", STATE, (QWEN3_5, "np.square(x).sum(axis=-1", "np.square(x).mean(axis=-1")),
    bug("l2_missing", "qwen3_5",
        STATE, (QWEN3_5, "    return x / length", "    return x")),
    bug("query_scale_missing_in_delta", "qwen3_5",
        "blocks.0.attn.hook_delta_out", (QWEN3_5, "DeltaInputs(q * shape.key_dim**-0.5,", "DeltaInputs(q,")),
    bug("heads_tiled", "qwen3_5",
        STATE,
        (QWEN3_5, "np.repeat(_unit(x.reshape(len(mixed), shape.key_heads, shape.key_dim)), group, axis=1)",
            "np.tile(_unit(x.reshape(len(mixed), shape.key_heads, shape.key_dim)), (1, group, 1))")),
    bug("softplus_is_relu", "qwen3_5",
        DECAY, (QWEN3_5, SOFTPLUS, "np.maximum(0.0, a.astype(np.float64) + w.decay_bias)")),
    bug("dt_bias_after_softplus", "qwen3_5",
        DECAY, (QWEN3_5, SOFTPLUS, "(np.logaddexp(0.0, a.astype(np.float64)) + w.decay_bias)")),
    bug("a_log_without_exp", "qwen3_5",
        DECAY, (QWEN3_5, "(-w.decay.astype(np.float64) *", "(-np.log(w.decay.astype(np.float64)) *")),
    bug("conv_silu_before", "qwen3_5",
        "blocks.0.attn.hook_conv",
        (QWEN3_5, "x = conv.shape[1], qkv.astype(np.float64)", "x = conv.shape[1], silu(qkv.astype(np.float64))"),
        (QWEN3_5, "return silu(sum(taps[1:], taps[0]))", "return sum(taps[1:], taps[0])")),
    bug("gate_before_norm", "qwen3_5",
        "blocks.0.attn.delta_norm.hook_scale",
        (QWEN3_5, "    y = be.rms_norm(y.reshape(-1, w.delta.value_dim), w.delta_norm).reshape(z.shape)  # (N, Hv*dv)\n"
            '    y = be.compute(f"{attn}.hook_gated_z", silu_gate, y, z)',
            "    y = y * silu(z).reshape(y.shape)\n"
            "    y = be.rms_norm(y.reshape(-1, w.delta.value_dim), w.delta_norm).reshape(z.shape)")),
    bug("output_gate_missing", "qwen3_5",
        "blocks.0.attn.hook_gated_z",
        (QWEN3_5, "return z * sigmoid(gate)", "return z"),
        (QWEN3_5, "return z * silu(gate)", "return z")),
    bug("rope_of_the_whole_head", "qwen3_5",
        "blocks.3.attn.hook_rot_q",
        (QWEN, "return self.rotary_dim or self.head_dim", "return self.head_dim")),
)
