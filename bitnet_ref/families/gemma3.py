"""Gemma3: norms of q's and k's heads and of each half's result; layers of two kinds, each with its RoPE; a scaled
embedding; scores by query_pre_attn_scalar; perhaps capped logits. Its files hold w - 1 of each norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from ..errors import ConfigError, require_number
from ..reference.config import ModelConfig, RopeConfig, added
from ..reference.layers import ACTIVATIONS, Activation, Floats
from ..reference.model import BlockPlace, attention_result, feed_forward_result, split_heads
from ..reference.ops import Ops
from ..reference.weights import Norm
from .family import (
    EMBEDDING_SCALE_MISSING,
    FULL,
    LEFT_OUT_VISION,
    NORM_ONE_LEFT_OUT,
    SIZES,
    SLIDING,
    Architecture,
    Edit,
    Family,
    GgufForm,
    GgufKeys,
    HfForm,
    HfKeys,
    Hypothesis,
    PartNames,
    Put,
    TraceStep,
    Wrapper,
    change_steps,
    fields_of_types,
    leave_out,
    near,
    norm_step,
    put_after,
    turned_by,
    types_of_layers,
)
from .llama import llama_steps
from .qwen import HEAD_NORM_MISTAKES, HEAD_NORM_NAMES, HEAD_NORMS, Qwen3Layer, head_norm_steps, norm_heads
from .rope import rope_json

_SLOPE = math.sqrt(2.0 / math.pi)


def gelu_tanh(x: Floats) -> Floats:
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), the approximation of GELU that Gemma computes."""
    wide = x.astype(np.float64)
    return (0.5 * wide * (1.0 + np.tanh(_SLOPE * (wide + 0.044715 * wide**3)))).astype(x.dtype)


def gelu_tanh_backward(dy: Floats, gate: Floats, up: Floats) -> tuple[Floats, Floats]:
    """act = x (1 + t) / 2 with t = tanh(u(x)), act' = (1 + t + x (1 - t^2) u'(x)) / 2."""
    t = np.tanh(_SLOPE * (gate + 0.044715 * gate**3))
    slope = (1 + t) + gate * (1 - t * t) * _SLOPE * (1 + 3 * 0.044715 * gate**2)
    return dy * up * (0.5 * slope), dy * (0.5 * gate * (1 + t))


ACTIVATIONS["gelu_tanh"] = Activation(
    gelu_tanh, "gelu(gate) * up", "gelu (tanh)", ("gelu_pytorch_tanh",), gelu_tanh_backward
)


@dataclass(frozen=True)
class Gemma3Config(ModelConfig):
    qk_norms: bool = added(True, absent=False)
    post_norms: bool = added(True, absent=False)  # an RMSNorm of each half's result, before it is added to the stream
    local_rope: RopeConfig | None = added(None)  # of the sliding layers, where they have another
    query_scale: float = added(1.0)  # q times this: query_pre_attn_scalar^-0.5 / head_dim^-0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("query_scale", self.query_scale)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    def rope_of(self, layer: int) -> int:
        return int(self.local_rope is not None and self.window_of(layer) is not None)

    def norm_shapes(self, layer: int = 0) -> dict[str, int]:
        heads = {"q_norm": self.head_dim, "k_norm": self.head_dim}
        results = {"attn_post_norm": self.hidden_size, "ffn_post_norm": self.hidden_size}
        return super().norm_shapes(layer) | heads | results


def attention_block(be: Ops, x: Floats, w: Gemma3Layer, cfg: Gemma3Config, at: BlockPlace) -> Floats:
    """(N, D) -> (N, D), residual included"""
    h = be.rms_norm(x, w.attn_norm)  # (N, D)
    q, k, v = split_heads(cfg, *be.linears(h, (w.q_proj, w.k_proj, w.v_proj)))  # (N, H, d), (N, G, d), (N, G, d)
    q = norm_heads(be, q, w.q_norm)
    k = norm_heads(be, k, w.k_norm)
    q, k = be.rope(q, k, *at.rope)
    if cfg.query_scale != 1:  # scores are q k / sqrt(query_pre_attn_scalar), not q k / sqrt(d)
        q = be.scale(q, cfg.query_scale, f"{w.name}.attn.hook_scaled_q")
    be.append(at.cache, at.layer, at.batch, k, v)
    z = be.attention(q, at.cache, at.batch, at.layer, cfg.window_of(at.layer))  # (N, H, d)
    return be.add(x, be.rms_norm(attention_result(be, z, w), w.attn_post_norm))  # (N, D)


def feed_forward(be: Ops, x: Floats, w: Gemma3Layer, cfg: ModelConfig) -> Floats:
    """(N, D) -> (N, D), residual included"""
    return be.add(x, be.rms_norm(feed_forward_result(be, x, w, cfg), w.ffn_post_norm))


@dataclass(frozen=True, eq=False, repr=False)
class Gemma3Layer(Qwen3Layer):
    attn_post_norm: Norm  # (D,)
    ffn_post_norm: Norm  # (D,)

    attention_text: ClassVar[Any] = staticmethod(attention_block)
    feed_forward_text: ClassVar[Any] = staticmethod(feed_forward)
    trace_names: ClassVar = {**HEAD_NORM_NAMES, "attn_post_norm": "ln1_post", "ffn_post_norm": "ln2_post"}


def query_scale_steps(steps: list[TraceStep], scale: float) -> list[TraceStep]:
    """The steps of a block whose q is multiplied by `scale` after RoPE."""
    if scale == 1:
        return steps
    scaled = TraceStep("attn.hook_scaled_q", ("attn.hook_rot_q",), "scaling", "N H d", "q times the query scale")
    steps = put_after(steps, "attn.hook_rot_k", scaled)
    return change_steps(steps, inputs=("attn.hook_scaled_q", "attn.hook_rot_k"))("attn.hook_attn_scores")


def post_norm_steps(steps: list[TraceStep]) -> list[TraceStep]:
    """The steps of a block with a norm of each half's result."""
    for half, linear, norm in (("attn", "attn.o_proj", "ln1_post"), ("mlp", "mlp.down_proj", "ln2_post")):
        steps = put_after(steps, linear, norm_step(norm, f"{linear}.hook_out"))
        steps = change_steps(steps, inputs=(f"{norm}.hook_normalized",), kind="norm")(f"hook_{half}_out")
    return steps


def _steps(config: Gemma3Config, layer: int) -> list[TraceStep]:
    return post_norm_steps(query_scale_steps(head_norm_steps(llama_steps(config, layer)), config.query_scale))


# -- files -------------------------------------------------------------------------------------------------------------


def _read(keys: HfKeys) -> dict[str, Any]:
    keys.ignore("hidden_act", "use_qk_norm")  # beside hidden_activation; q and k have norms in any case
    for key in ("attn_logit_softcapping", "use_bidirectional_attention"):
        if (value := keys.get(key)) not in (None, False):
            raise ConfigError(f"{value!r} is not supported for gemma3_text; expected null", field=key)
    pattern = keys.get("sliding_window_pattern", 6)
    if not isinstance(pattern, int) or isinstance(pattern, bool) or pattern < 1:
        raise ConfigError(f"expected a number of layers, got {pattern!r}", field="sliding_window_pattern")
    layers, head_dim = keys.count("num_hidden_layers"), keys.count("head_dim")
    by_default = [SLIDING if (i + 1) % pattern else FULL for i in range(layers)]
    scalar, cap = keys.number("query_pre_attn_scalar"), keys.get("final_logit_softcapping")
    both = keys.raw.get("rope_parameters") or {}
    if both and not (isinstance(both, dict) and {"full_attention", "sliding_attention"} & both.keys()):
        keys.doubt("rope_parameters", "ignored, as transformers reads that of full_attention and of sliding_attention")
        both = {}
    old = {"rope_scaling": keys.raw.get("rope_scaling")}
    full, local = ({"rope_parameters": both.get(kind) or {}} for kind in ("full_attention", "sliding_attention"))
    rope, local_rope = keys.rope(full | old), keys.rope(local, "rope_local_base_freq")
    return {
        **keys.layer_types(keys.get("sliding_window"), by_default),
        "o_proj_bias": True,
        "rope": rope,
        "local_rope": None if local_rope == rope else local_rope,
        "query_scale": math.sqrt(head_dim / scalar),
        "embedding_scale": math.sqrt(keys.count("hidden_size")),
        "logit_softcap": None if cap is None else keys.number("final_logit_softcapping"),
    }


def _write(config: Gemma3Config) -> dict[str, Any]:
    scalar = config.head_dim / config.query_scale**2
    local = config.local_rope or config.rope
    ropes = {"full_attention": config.rope, "sliding_attention": local}
    return {
        # transformers wants a number even where no layer has a window
        "sliding_window": config.sliding_window or config.max_position_embeddings,
        "query_pre_attn_scalar": near(lambda x: math.sqrt(config.head_dim / x), scalar, config.query_scale),
        "layer_types": types_of_layers(config),
        "final_logit_softcapping": config.logit_softcap,
        "rope_parameters": {kind: {"rope_theta": rope.theta, **rope_json(rope)} for kind, rope in ropes.items()},
        "rope_local_base_freq": local.theta,
    }


def _read_gguf(keys: GgufKeys, fields: dict[str, Any]) -> dict[str, Any]:
    """The 1 of each norm is added by the converter."""
    key, pattern = "attention.sliding_window_pattern", 6
    layers, window = fields["num_hidden_layers"], fields["sliding_window"]
    if isinstance(keys.get(key), list | np.ndarray):
        is_sliding = keys.flags(key, layers)
    else:
        pattern = keys.count(key, pattern)
        is_sliding = [(i + 1) % pattern != 0 for i in range(layers)]
    types = [SLIDING if each and window is not None else FULL for each in is_sliding]
    local = RopeConfig(theta=keys.number("rope.freq_base_swa", 10000.0))
    return {
        **fields_of_types(types, window),
        "local_rope": None if local == fields["rope"] else local,
        "embedding_scale": math.sqrt(fields["hidden_size"]),
        "query_scale": _query_scale(fields),
        "logit_softcap": keys.number("final_logit_softcapping") if keys.has("final_logit_softcapping") else None,
    }


def _query_scale(fields: Mapping[str, Any]) -> float:
    """llama.cpp's rule: 27B, with its 62 layers, alone has a query_pre_attn_scalar that is not head_dim."""
    is_27b = fields["num_hidden_layers"] == 62
    return math.sqrt(fields["head_dim"] / (fields["hidden_size"] / fields["num_attention_heads"])) if is_27b else 1.0


def _write_gguf(config: Gemma3Config, put: Put) -> None:
    local = config.local_rope or config.rope
    if config.local_rope is not None and local.rope_type != "default":
        message = "GGUF cannot say a RoPE scaling of sliding layers; convert to native instead"
        raise ConfigError(message, field="local_rope")
    put("rope.freq_base_swa", "float32", local.theta)
    is_sliding = np.array([config.window_of(index) is not None for index in range(config.num_hidden_layers)])
    put("attention.sliding_window_pattern", "[bool]", is_sliding)
    if config.logit_softcap is not None:
        put("final_logit_softcapping", "float32", config.logit_softcap)


def _implied_by_gguf(config: Gemma3Config) -> dict[str, Any]:
    return {
        "embedding_scale": math.sqrt(config.hidden_size),
        "logit_softcap": config.logit_softcap,
        "query_scale": _query_scale(vars(config)),
        "layer_types": config.layer_types,
    }


HF = HfForm(
    "Gemma3ForCausalLM",
    {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    _read,
    _write,
    activation_key="hidden_activation",
    wrapper=Wrapper(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        dict(zip(SIZES, (262208, 2304, 9216, 26, 8), strict=True)),
    ),
    left_out=LEFT_OUT_VISION,
    norms_add_one=True,
)

# -- mistakes ----------------------------------------------------------------------------------------------------------

POST_NORMS = "*_post.hook_scale *_post.hook_normalized"


def _of_the_sum(step: Any, compute: Edit, x: Floats, *rest: Any) -> Floats:
    """An edit of a post-norm and of the sum after it: norm(x + y) for x + norm(y)."""
    seen: dict[str, Floats] = step.seen
    hook = step.name.rpartition(".")[2]
    half = "attn" if "ln1_post" in step.name or hook in ("hook_attn_out", "hook_resid_mid") else "mlp"
    norm, result = ("ln1_post", "attn.o_proj.hook_out") if half == "attn" else ("ln2_post", "mlp.down_proj.hook_out")
    block = f"blocks.{step.layer}"
    if hook == f"hook_{half}_out":
        return seen[f"{block}.{result}"]
    if hook.startswith("hook_resid"):
        return seen[f"{block}.{norm}.hook_normalized"]
    stream = f"{block}.hook_resid_mid" if half == "mlp" else f"blocks.{step.layer - 1}.hook_resid_post"
    if stream not in seen:  # of the first block
        stream = "hook_embed_scaled" if "hook_embed_scaled" in seen else "hook_embed"
    return compute(seen[stream] + x, *rest)


def _has_two_ropes(step: Any) -> bool:
    return len(step.setting.config.ropes) == 2


def _has_rope(number: int) -> Callable[[Any], bool]:
    return lambda step: _has_two_ropes(step) and step.setting.config.rope_of(step.layer) == number


POST_NORM_MISTAKES = (
    Hypothesis(
        "*_post.hook_normalized",
        "post_norms_missing",
        "the norms of each block's result are left out",
        "Normalise the result before it is added (post_attention_layernorm, post_feedforward_layernorm).",
        leave_out,
    ),
    Hypothesis(
        f"{POST_NORMS} *.hook_attn_out *.hook_mlp_out *.hook_resid_mid *.hook_resid_post",
        "post_norm_of_the_sum",
        "the post-norms are applied to the residual stream after the addition",
        "x + norm(y): only the block's result is normalised.",
        _of_the_sum,
    ),
)
QUERY_SCALE_MISSING = Hypothesis(
    "*.attn.hook_scaled_q",
    "query_scale_missing",
    "scores are divided by sqrt(head_dim) where the model has another factor",
    "q k / sqrt(query_pre_attn_scalar) (Gemma), q k attention_multiplier (Granite).",
    leave_out,
)
_rope_mistake = partial(Hypothesis, "*.attn.hook_rot_[qk]")
MISTAKES = (
    *HEAD_NORM_MISTAKES,
    NORM_ONE_LEFT_OUT,
    EMBEDDING_SCALE_MISSING,
    *POST_NORM_MISTAKES,
    QUERY_SCALE_MISSING,
    _rope_mistake(
        "rope_of_layer_types_exchanged",
        "sliding layers have the RoPE of full ones, and full layers that of sliding ones",
        "rope_theta is of full attention, rope_local_base_freq of sliding layers.",
        turned_by(lambda step: step.setting.config.ropes[1 - step.setting.config.rope_of(step.layer)]),
        _has_two_ropes,
    ),
    _rope_mistake(
        "rope_of_full_layers_for_all",
        "sliding layers have the RoPE of full ones",
        "Read rope_local_base_freq (or rope_parameters of sliding_attention) too.",
        turned_by(lambda step: step.setting.config.ropes[0]),
        _has_rope(1),
    ),
    _rope_mistake(
        "rope_of_sliding_layers_for_all",
        "full layers have the RoPE of sliding ones",
        "Read the RoPE of each layer type.",
        turned_by(lambda step: step.setting.config.ropes[1]),
        _has_rope(0),
    ),
)

POST_NORM_NAMES = {
    "attn_post_norm": PartNames(("post_attention_layernorm",), "post_attention_norm"),
    "ffn_post_norm": PartNames(("post_feedforward_layernorm",), "post_ffw_norm"),
}
NAMES = {
    **HEAD_NORMS,
    **POST_NORM_NAMES,
    "ffn_norm": PartNames(("pre_feedforward_layernorm",), "ffn_norm"),
}
FAMILIES = (
    Family(
        "gemma3_text",
        Gemma3Config,
        layer_class=lambda config, layer: Gemma3Layer,
        steps=_steps,
        constants=lambda config: {"query_scale": config.query_scale},
        lacks=lambda config: ["scaled queries"] * (config.query_scale != 1),
        names=NAMES,
        hf=HF,
        gguf=GgufForm({"gemma3": Architecture("gelu_tanh", window=True)}, _read_gguf, _write_gguf, _implied_by_gguf),
        mistakes=MISTAKES,
        example_fields={"query_scale": 2.0},
    ),
)
