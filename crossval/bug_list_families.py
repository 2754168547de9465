"""Planted bugs in what the families of 2026 have: norms of linears and heads, groups, rotations, DeltaNet."""

from __future__ import annotations

from bug_list import HF_FOLDER, MODEL, bug

OPS, WEIGHTS, QUANTIZATION = "reference/ops.py", "reference/weights.py", "reference/quantization.py"
DELTA_NET = "reference/delta_net.py"

HEAD_NORMS = """    if w.q_norm is not None and w.k_norm is not None:  # over each head: Qwen3, Gemma3
        q, k = norm_heads(be, q, w.q_norm, cfg), norm_heads(be, k, w.k_norm, cfg)
"""
ROPE = (
    "    q, k = be.rope(q, k, *rope) if cfg.rotary_dim is None else "
    "be.rope(q, k, *rope, partial=True)  # Qwen3.5: in part\n"
)
POST_NORM = """    if post_norm is not None:  # Gemma3
        y = be.rms_norm(y, post_norm, cfg.norm_eps)
"""
SUM = "    return be.add(x, y)\n"
NORM_OF_THE_SUM = """    x = be.add(x, y)
    return x if post_norm is None else be.rms_norm(x, post_norm, cfg.norm_eps)
"""
GROUPS_IN_PRODUCT = "expand_groups(packed[part], in_features, scales[part], group, np.float64)"
OWN_NORM = "        input_norm = None if eps is None else InputNorm(self._vector(inner, in_features), eps)\n"
FIRST_NORM = (
    OWN_NORM
    + """        if module.endswith(("k_proj", "v_proj", "up_proj")):
            input_norm = InputNorm(self.norm_before.weight.copy(), eps)
        self.norm_before = input_norm
"""
)
Q_OUT, EMBED, RESID = "blocks.0.attn.q_proj.hook_out", "hook_embed", "blocks.0.hook_resid_pre"
TURNED = "blocks.0.attn.q_proj.hook_x_rotated"
TURN = "return quantization.hadamard(x * self.signs.astype(np.float64), self.block)"
TURN_BACK = "x = quantization.hadamard(z, self.block) * self.signs"

# fmt: off
FAMILY_BUGS = (
    # -- a norm inside each linear
    bug("linear_norm_missing", "embedding-qwen3",
        "blocks.0.attn.q_proj.hook_x_*", (OPS, "if w.input_norm is not None:", "if False:")),
    bug("linear_norm_shared", "embedding-qwen3",
        "blocks.0.attn.k_proj.rms_norm.hook_normalized", (HF_FOLDER, OWN_NORM, FIRST_NORM)),
    # -- norms over heads
    bug("qk_norms_missing", "qwen3", "blocks.0.attn.hook_rot_q", (MODEL, HEAD_NORMS, "")),
    bug("qk_norms_after_rope", "qwen3",
        "blocks.0.attn.q_norm.hook_normalized", (MODEL, HEAD_NORMS + ROPE, ROPE + HEAD_NORMS)),
    # -- Gemma3
    bug("norm_one_left_out", "gemma3",
        "blocks.0.ln1.hook_normalized", (HF_FOLDER, "weight + np.float32(1.0) if", "weight if")),
    bug("norm_one_added_twice", "gemma3",
        "blocks.0.ln1.hook_normalized", (HF_FOLDER, "weight + np.float32(1.0) if", "weight + np.float32(2.0) if"),
        cause="norm_weight_plus_one"),
    bug("embedding_scale_missing", "gemma3",
        RESID, (MODEL, "return x if cfg.embedding_scale == 1 else be.scale(x, cfg.embedding_scale)", "return x")),
    bug("post_norms_missing", "gemma3", "blocks.0.hook_attn_out", (MODEL, POST_NORM, "")),
    bug("post_norm_of_the_sum", "gemma3",
        "blocks.0.ln1_post.hook_scale", (MODEL, POST_NORM, ""), (MODEL, SUM, NORM_OF_THE_SUM)),
    bug("rope_of_layer_types_exchanged", "gemma3",
        "blocks.0.attn.hook_rot_q", (MODEL, "ropes[cfg.is_sliding(index)]", "ropes[not cfg.is_sliding(index)]")),
    bug("query_scale_missing", "gemma3 with a query scale",
        "blocks.0.attn.hook_attn_scores", (MODEL, "if cfg.query_scale != 1:", "if False:"),
        twin="scores_scaled_by_width"),
    # -- ternary by groups
    bug("group_scales_along_rows", "qwen3",
        Q_OUT,
        (QUANTIZATION, GROUPS_IN_PRODUCT,
            "(expand_groups(packed[part], in_features, np.ones_like(scales[part]), group, np.float64)"
            " * np.kron(scales[part].astype(np.float64).reshape(-1, in_features), np.ones((group, 1))))")),
    bug("groups_of_64_for_128", "qwen3",
        Q_OUT,
        (QUANTIZATION, GROUPS_IN_PRODUCT,
            "expand_groups(packed[part], in_features, np.stack([np.append(scales.ravel(), [scales.flat[-1]] * 64)"
            "[r * scales.shape[1] :][: in_features // 64] for r in range(len(packed))])[part], 64, np.float64)")),
    bug("groups_of_128_for_64", "groups of 64",
        Q_OUT,
        (QUANTIZATION, GROUPS_IN_PRODUCT,
            "expand_groups(packed[part], in_features, np.repeat(scales[part], 2, axis=1)[:, : scales.shape[1]],"
            " group, np.float64)")),
    # -- a Hadamard basis
    bug("rotation_ignored", "hadamard", TURNED, (WEIGHTS, TURN, "return x.astype(np.float64)")),
    bug("rotation_signs_after", "hadamard",
        TURNED, (WEIGHTS, TURN, "return quantization.hadamard(x, self.block) * self.signs.astype(np.float64)")),
    bug("rotation_inverse_missing", "hadamard", EMBED, (WEIGHTS, TURN_BACK, "x = z")),
    bug("rotation_and_inverse_ignored", "hadamard",
        EMBED, (WEIGHTS, TURN, "return x.astype(np.float64)"), (WEIGHTS, TURN_BACK, "x = z")),
    # -- Qwen3.5
    bug("decay_and_beta_exchanged", "qwen3_5",
        "blocks.0.attn.hook_log_decay", (MODEL, "be.delta_gates(a, b, delta)", "be.delta_gates(b, a, delta)"),
        twin="a_proj_and_b_proj_exchanged"),
    bug("conv_one_late", "qwen3_5",
        "blocks.0.attn.hook_conv",
        (DELTA_NET, "x = conv.shape[1], qkv.astype(np.float64)",
            "x = conv.shape[1], np.concatenate([0 * qkv[:1], qkv[:-1]]) * 1.0")),
    bug("conv_reversed", "qwen3_5",
        "blocks.0.attn.hook_conv", (DELTA_NET, "conv[:, i].astype(np.float64)", "conv[:, ~i].astype(np.float64)")),
    bug("output_gate_missing", "qwen3_5",
        "blocks.0.attn.hook_gated_z", (OPS, "return z * layers.OUTPUT_GATES[activation](gate)", "return z")),
    bug("rope_of_the_whole_head", "qwen3_5",
        "blocks.3.attn.hook_rot_q",
        ("reference/config.py", "return self.rotary_dim or self.head_dim", "return self.head_dim")),
)
