"""Hunyuan dense (Tencent's Hy-MT): LLaMA with an RMSNorm over each head of q and of k, after RoPE.

Its files call their RoPE "dynamic" and give a factor of theta, alpha, for all positions alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..errors import ConfigError
from ..reference import layers
from ..reference.config import ModelConfig, RopeConfig
from ..reference.layers import Floats
from ..reference.model import BlockPlace, attention_result, split_heads
from ..reference.ops import Ops
from .family import (
    Architecture,
    Edit,
    Family,
    GgufForm,
    HfForm,
    HfKeys,
    Hypothesis,
    PartNames,
    TraceStep,
    change_steps,
    leave_out,
    norm_step,
    own_rope,
    own_tables,
    put_after,
    turned_by,
)
from .llama import llama_steps
from .qwen import HEAD_NORM_STEPS, Qwen3Config, Qwen3Layer, norm_heads


def attention_block(be: Ops, x: Floats, w: HunyuanLayer, cfg: ModelConfig, at: BlockPlace) -> Floats:
    """`reference.model.attention_block` with norms over heads that are turned already.   (N, D) -> (N, D)"""
    h = be.rms_norm(x, w.attn_norm)  # (N, D)
    q, k, v = split_heads(cfg, *be.linears(h, (w.q_proj, w.k_proj, w.v_proj)))  # (N, H, d), (N, G, d), (N, G, d)
    q, k = be.rope(q, k, *at.rope)
    q = norm_heads(be, q, w.q_norm)
    k = norm_heads(be, k, w.k_norm)
    be.append(at.cache, at.layer, at.batch, k, v)
    z = be.attention(q, at.cache, at.batch, at.layer, cfg.window_of(at.layer))  # (N, H, d)
    return be.add(x, attention_result(be, z, w))  # (N, D)


@dataclass(frozen=True, eq=False, repr=False)
class HunyuanLayer(Qwen3Layer):
    attention_text: ClassVar[Any] = staticmethod(attention_block)


def _steps(config: Qwen3Config, layer: int) -> list[TraceStep]:
    norms = [norm_step(f"attn.{x}_norm", f"attn.hook_rot_{x}", f"{heads} d", f"{x}_norm") for x, heads in ("qH", "kG")]
    steps = put_after(llama_steps(config, layer), "attn.hook_rot_k", *norms)
    normed = ("attn.q_norm.hook_normalized", "attn.k_norm.hook_normalized")
    return change_steps(steps, inputs=normed)("attn.hook_attn_scores")


# -- files -------------------------------------------------------------------------------------------------------------


def _read(keys: HfKeys) -> dict[str, Any]:
    """RoPE of type "dynamic" with an alpha: theta times alpha^(d / (d - 2)). Other numbers are not read. The norms of q
    and k are in every layer, whatever use_qk_norm says."""
    keys.ignore("use_qk_norm")
    scaling = keys.raw.get("rope_scaling") or keys.raw.get("rope_parameters")
    scaling = scaling if isinstance(scaling, dict) else {}
    alpha = scaling.get("alpha")
    if not alpha or scaling.get("rope_type", scaling.get("type")) != "dynamic":
        return {}
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < 1e30:
        raise ConfigError(f"expected a number above 0, got {alpha!r}", field="rope_scaling.alpha")
    plain = keys.rope({**keys.raw, "rope_scaling": None, "rope_parameters": {**scaling, "rope_type": "default"}})
    head_dim = keys.get("head_dim") or keys.count("hidden_size") // keys.count("num_attention_heads")
    if not isinstance(head_dim, int) or head_dim < 3:
        raise ConfigError(f"expected more than 2 with alpha, got {head_dim!r}", field="head_dim")
    return {"rope": replace(plain, theta=plain.theta * float(alpha) ** (head_dim / (head_dim - 2)))}


# -- mistakes ----------------------------------------------------------------------------------------------------------


def _before_rope(step: Any, compute: Edit, x: Floats, *rest: Any) -> Floats:
    """Normalised first, rotated then. The length of a head is the same before and after."""
    attn, norm, _ = step.name.rsplit(".", 2)
    heads = step.seen[f"{attn}.hook_{norm[0]}"]
    normed = compute(heads.reshape(x.shape), *rest).reshape(heads.shape)
    return layers.apply_rope(normed, *own_tables(step, len(heads))).reshape(x.shape)


MISTAKES = (
    Hypothesis(
        HEAD_NORM_STEPS,
        "qk_norms_missing_after_rope",
        "the norms over the heads of q and k are left out",
        "Apply query_layernorm and key_layernorm to each head after RoPE (Hunyuan).",
        leave_out,
    ),
    Hypothesis(
        HEAD_NORM_STEPS,
        "qk_norms_before_rope",
        "the norms over the heads of q and k come before RoPE",
        "Rotate, then normalise each head: the norm's weights differ within a pair.",
        _before_rope,
    ),
    Hypothesis(
        "*.attn.hook_rot_[qk]",
        "rope_alpha_ignored",
        "RoPE has theta 10000, without its factor alpha",
        'RoPE of type "dynamic" with an alpha: theta is rope_theta * alpha^(d / (d - 2)).',
        turned_by(lambda step: RopeConfig(theta=10000.0)),
        lambda step: own_rope(step).theta != 10000.0,
    ),
)

_DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES = (
    Family(
        "hunyuan_v1_dense",
        Qwen3Config,
        layer_class=lambda config, layer: HunyuanLayer,
        steps=_steps,
        names={
            "q_norm": PartNames(("self_attn.query_layernorm",), "attn_q_norm"),
            "k_norm": PartNames(("self_attn.key_layernorm",), "attn_k_norm"),
        },
        hf=HfForm("HunYuanDenseV1ForCausalLM", _DEFAULTS, _read),
        gguf=GgufForm({"hunyuan-dense": Architecture("silu")}),
        mistakes=MISTAKES,
        example_fields={"rope": RopeConfig(theta=12_000_000.0)},
    ),
)
