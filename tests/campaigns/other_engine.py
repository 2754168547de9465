"""An engine that is right and shares no arithmetic with the package: float32, BLAS over the whole batch, where the
reference sums in float64 one token at a time. It takes every freedom that the contract leaves to another engine.
"""

import numpy as np

from bitnet_ref.backends.backend import plain_weights
from bitnet_ref.families.groups import GroupTernaryWeight
from bitnet_ref.reference.weights import DenseWeight

F = np.float32


def run(model, tokens):
    """-> name -> array, of every tensor that a trace can have."""
    cfg, w = model.config, plain_weights(model.weights)
    n, heads, groups, d = len(tokens), cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
    out = {}

    def keep(name, value):
        out[name] = value
        return value

    def norm(name, x, w):
        scale = keep(f"{name}.hook_scale", np.sqrt(np.mean(x * x, axis=-1, keepdims=True, dtype=F) + F(w.eps)))
        return keep(f"{name}.hook_normalized", x * (F(1) / scale) * w.weight)

    def linear(name, x, weight):
        if isinstance(weight, DenseWeight):
            y = x @ weight.array.astype(F).T
        elif isinstance(weight, GroupTernaryWeight):
            y = x @ weight.dense().array.astype(F).T
        else:
            if weight.norm is not None:
                x = norm(f"{name}.rms_norm", x, weight.norm)
            step = np.maximum(np.abs(x).max(axis=-1, keepdims=True), F(1e-5)) / F(127)
            x_q = keep(f"{name}.hook_x_int8", np.clip(np.rint(x / step), -128, 127).astype(np.int8))
            keep(f"{name}.hook_x_scale", F(1) / step)
            w_t = weight.bit_linear.ternary().astype(F)
            acc = keep(f"{name}.hook_acc_int32", (x_q.astype(F) @ w_t.T).astype(np.int32))
            y = acc.astype(F) * step * F(weight.bit_linear.w_dequant_scale)
        return keep(f"{name}.hook_out", y if weight.bias is None else y + weight.bias)

    def head_norm(name, x, weight):
        y = norm(name, x.reshape(-1, d), weight).reshape(x.shape)
        out.update({key: out[key].reshape(n, -1) for key in (f"{name}.hook_scale", f"{name}.hook_normalized")})
        return y

    def rope(x):
        inv_freq = F(cfg.rope.theta) ** (-np.arange(0, d, 2, dtype=F) / F(d))
        angle = np.arange(n, dtype=F)[:, None, None] * inv_freq
        a, b = x[..., : d // 2], x[..., d // 2 :]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)

    table = w.embedding if isinstance(w.embedding, DenseWeight) else w.embedding.dense()
    x = keep("hook_embed", table.array[np.asarray(tokens)].astype(F))
    for i, layer in enumerate(w.layers):
        block, window = f"blocks.{i}", cfg.window_of(i)
        h = norm(f"{block}.ln1", keep(f"{block}.hook_resid_pre", x), layer.attn_norm)
        q = keep(f"{block}.attn.hook_q", linear(f"{block}.attn.q_proj", h, layer.q_proj).reshape(n, heads, d))
        k = keep(f"{block}.attn.hook_k", linear(f"{block}.attn.k_proj", h, layer.k_proj).reshape(n, groups, d))
        v = keep(f"{block}.attn.hook_v", linear(f"{block}.attn.v_proj", h, layer.v_proj).reshape(n, groups, d))
        if hasattr(layer, "q_norm"):
            q, k = (
                head_norm(f"{block}.attn.q_norm", q, layer.q_norm),
                head_norm(f"{block}.attn.k_norm", k, layer.k_norm),
            )
        q, k = keep(f"{block}.attn.hook_rot_q", rope(q)), keep(f"{block}.attn.hook_rot_k", rope(k))
        keys, values = (np.repeat(each, heads // groups, axis=1).swapaxes(0, 1) for each in (k, v))
        scores = q.swapaxes(0, 1) @ keys.swapaxes(1, 2) * F(d**-0.5)
        distance = np.arange(n)[:, None] - np.arange(n)
        scores[:, (distance < 0) | (distance >= (n if window is None else window))] = -np.inf
        e = np.exp(keep(f"{block}.attn.hook_attn_scores", scores) - scores.max(axis=-1, keepdims=True))
        pattern = keep(f"{block}.attn.hook_pattern", e / e.sum(axis=-1, keepdims=True))
        z = keep(f"{block}.attn.hook_z", (pattern @ values).swapaxes(0, 1)).reshape(n, -1)
        if layer.attn_sub_norm is not None:
            z = norm(f"{block}.attn.sub_norm", z, layer.attn_sub_norm)
        x = keep(
            f"{block}.hook_resid_mid",
            x + keep(f"{block}.hook_attn_out", linear(f"{block}.attn.o_proj", z, layer.o_proj)),
        )
        h = norm(f"{block}.ln2", x, layer.ffn_norm)
        gate = keep(f"{block}.mlp.hook_pre", linear(f"{block}.mlp.gate_proj", h, layer.gate_proj))
        up = keep(f"{block}.mlp.hook_pre_linear", linear(f"{block}.mlp.up_proj", h, layer.up_proj))
        with np.errstate(over="ignore"):
            act = np.maximum(gate, 0) ** 2 if cfg.activation == "relu2" else gate / (F(1) + np.exp(-gate))
        h = keep(f"{block}.mlp.hook_post", act * up)
        if layer.ffn_sub_norm is not None:
            h = norm(f"{block}.mlp.sub_norm", h, layer.ffn_sub_norm)
        x = keep(
            f"{block}.hook_resid_post",
            x + keep(f"{block}.hook_mlp_out", linear(f"{block}.mlp.down_proj", h, layer.down_proj)),
        )
    linear("lm_head", norm("ln_final", x, w.final_norm), w.lm_head)
    return {name: np.ascontiguousarray(array) for name, array in out.items()}
