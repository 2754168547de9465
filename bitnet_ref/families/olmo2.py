"""OLMo-2: each half reads the residual stream as it is; an RMSNorm of the half's result comes before the addition.

q and k are normalised before RoPE, each as a whole: one length for all heads of a token, unlike Qwen3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..reference import layers
from ..reference.config import ModelConfig, added
from ..reference.layers import Floats
from ..reference.model import BlockPlace, attention_result, split_heads
from ..reference.ops import Ops
from .family import (
    Architecture,
    Edit,
    Family,
    GgufForm,
    GgufKeys,
    HfForm,
    Hypothesis,
    TraceStep,
    change_steps,
    layer_weights,
    leave_out,
    norm_each_head,
)
from .gemma3 import POST_NORM_MISTAKES, POST_NORM_NAMES, Gemma3Layer, post_norm_steps
from .llama import llama_steps
from .qwen import HEAD_NORM_STEPS, HEAD_NORMS, head_norm_steps


@dataclass(frozen=True)
class Olmo2Config(ModelConfig):
    # No norm before a half, but one after it, and norms of q and of k as wholes: what other families do not have
    result_norms_alone: bool = added(True, absent=False)

    def norm_shapes(self, layer: int = 0) -> dict[str, int]:
        heads = {"q_norm": self.query_size, "k_norm": self.kv_size}
        return {**heads, "attn_post_norm": self.hidden_size, "ffn_post_norm": self.hidden_size}


def attention_block(be: Ops, x: Floats, w: Olmo2Layer, cfg: ModelConfig, at: BlockPlace) -> Floats:
    """(N, D) -> (N, D), residual included"""
    q, k, v = be.linears(x, (w.q_proj, w.k_proj, w.v_proj))  # (N, H*d), (N, G*d), (N, G*d)
    q = be.rms_norm(q, w.q_norm)
    k = be.rms_norm(k, w.k_norm)
    q, k, v = split_heads(cfg, q, k, v)  # (N, H, d), (N, G, d), (N, G, d)
    q, k = be.rope(q, k, *at.rope)
    be.append(at.cache, at.layer, at.batch, k, v)
    z = be.attention(q, at.cache, at.batch, at.layer, cfg.window_of(at.layer))  # (N, H, d)
    return be.add(x, be.rms_norm(attention_result(be, z, w), w.attn_post_norm))  # (N, D)


def feed_forward(be: Ops, x: Floats, w: Olmo2Layer, cfg: ModelConfig) -> Floats:
    """(N, D) -> (N, D), residual included"""
    gate, up = be.linears(x, (w.gate_proj, w.up_proj))  # (N, F) each
    y = be.linear(be.gated(gate, up, cfg.activation), w.down_proj)  # (N, D)
    return be.add(x, be.rms_norm(y, w.ffn_post_norm))


@dataclass(frozen=True, eq=False, repr=False)
class Olmo2Layer(Gemma3Layer):
    """attn_norm and ffn_norm are None; q_norm is (H*d,), k_norm (G*d,)."""

    attention_text = staticmethod(attention_block)
    feed_forward_text = staticmethod(feed_forward)


def _steps(config: Olmo2Config, layer: int) -> list[TraceStep]:
    steps = [step for step in llama_steps(config, layer) if step.name not in ("ln1", "ln2")]
    steps = change_steps(steps, inputs=("hook_resid_pre",))("attn.q_proj", "attn.k_proj", "attn.v_proj")
    steps = change_steps(steps, inputs=("hook_resid_mid",))("mlp.gate_proj", "mlp.up_proj")
    return post_norm_steps(head_norm_steps(steps, ("Q", "K")))


# -- mistakes ----------------------------------------------------------------------------------------------------------


def _normed_first(step: Any, compute: Edit, x: Floats, *rest: Any) -> Floats:
    """An edit of what a half begins with, and of its norm: block(norm(x)) for norm(block(x)), as in LLaMA."""
    if step.name.endswith("_post.hook_normalized"):
        return x
    w = layer_weights(step)
    norm = w.attn_post_norm if ".attn." in step.name else w.ffn_post_norm
    return compute(layers.rms_norm(x, norm.weight, norm.eps), *rest)


MISTAKES = (
    *POST_NORM_MISTAKES,
    Hypothesis(
        HEAD_NORM_STEPS,
        "whole_qk_norms_missing",
        "the norms of q and of k are left out",
        "Apply q_norm and k_norm to all of q and of k before RoPE (OLMo-2).",
        leave_out,
    ),
    Hypothesis(
        HEAD_NORM_STEPS,
        "whole_qk_norms_of_each_head",
        "the norms of q and of k take the length of each head by itself",
        "One length for all heads of a token: normalise q and k before they are cut into heads.",
        norm_each_head,
    ),
    Hypothesis(
        "*.attn.[qkv]_proj.hook_out *.mlp.gate_proj.hook_out *.mlp.up_proj.hook_out *_post.hook_normalized",
        "result_norms_before_the_half",
        "the norms of each half's result are applied to its input, as LLaMA's are",
        "x + norm(block(x)): OLMo-2 normalises no input.",
        _normed_first,
        lambda step: step.setting.config.quantization is None,  # else a linear's input is int8 already
    ),
)

# -- files -------------------------------------------------------------------------------------------------------------


def _read_gguf(keys: GgufKeys, fields: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp's converter gives OLMo-3, three of whose four layers have a window, the same architecture."""
    if fields["sliding_window"] is not None:
        message = "expected none in OLMo-2; OLMo-3, which has it in some layers, is not supported"
        raise keys.fail(f"{keys.arch}.attention.sliding_window", message)
    return {}


_DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "eos_token_id": 50279}
FAMILIES = (
    Family(
        "olmo2",
        Olmo2Config,
        layer_class=lambda config, layer: Olmo2Layer,
        make_layer=lambda config, parts: {**parts, "attn_norm": None, "ffn_norm": None},
        steps=_steps,
        axes=lambda config: {"K": config.kv_size},
        names={**HEAD_NORMS, **POST_NORM_NAMES},
        hf=HfForm("Olmo2ForCausalLM", _DEFAULTS),
        gguf=GgufForm({"olmo2": Architecture("silu")}, _read_gguf),
        mistakes=MISTAKES,
    ),
)
