"""The names of a run's tensors: their order, their kind, and which of them each is computed from.

`record.py` gives the names; this file is the one place that says what they mean. `op_order(config)` is the order of
the computation, `op_kind` what sort of op gives a tensor (the key of `tolerances.py`), `op_inputs` what it reads.
"""

from __future__ import annotations

from collections.abc import Callable

from ..reference.config import ModelConfig
from ..reference.weights import ATTENTION_LINEARS

LOGITS = "lm_head.hook_out"
INT8, SCALE, ACC, OUT = "hook_x_int8", "hook_x_scale", "hook_acc_int32", "hook_out"
NORM_SCALE, NORMALIZED = "hook_scale", "hook_normalized"
SYNONYMS = {"logits": LOGITS, "lm_head.hook_logits": LOGITS, "hook_logits": LOGITS}


def op_order(config: ModelConfig) -> list[str]:
    """Every name that a run of such a model can have, in the order of the computation.

    A dense linear has `hook_out` only; which linears are ternary is for the checkpoint to say, so where a model is
    quantised at all each of its linears is listed with its int8, its scale and its accumulator.
    """
    order = ["hook_embed"]
    for layer in range(config.num_hidden_layers):
        block = f"blocks.{layer}"
        attn, mlp = f"{block}.attn", f"{block}.mlp"
        order += [f"{block}.hook_resid_pre", *_norm(f"{block}.ln1")]
        for linear in ("q_proj", "k_proj", "v_proj"):
            order += _linear(f"{attn}.{linear}", config)
        order += [f"{attn}.{hook}" for hook in ("hook_q", "hook_k", "hook_rot_q", "hook_rot_k", "hook_v")]
        order += [f"{attn}.{hook}" for hook in ("hook_attn_scores", "hook_pattern", "hook_z")]
        order += _norm(f"{attn}.sub_norm") if config.sub_norms else []
        order += [*_linear(f"{attn}.o_proj", config), f"{block}.hook_attn_out", f"{block}.hook_resid_mid"]
        order += _norm(f"{block}.ln2")
        for linear in ("gate_proj", "up_proj"):
            order += _linear(f"{mlp}.{linear}", config)
        order += [f"{mlp}.{hook}" for hook in ("hook_pre", "hook_pre_linear", "hook_post")]
        order += _norm(f"{mlp}.sub_norm") if config.sub_norms else []
        order += [*_linear(f"{mlp}.down_proj", config), f"{block}.hook_mlp_out", f"{block}.hook_resid_post"]
    return [*order, *_norm("ln_final"), *_linear("lm_head", config)]


def _norm(name: str) -> list[str]:
    return [f"{name}.{NORM_SCALE}", f"{name}.{NORMALIZED}"]


def _quantized(config: ModelConfig) -> bool:
    return config.quantization is not None or config.sub_norms  # sub-norms: a BitNet, however it was loaded


def _linear(name: str, config: ModelConfig) -> list[str]:
    if not _quantized(config):
        return [f"{name}.{OUT}"]
    inner = _norm(f"{name}.rms_norm") if config.quantization and config.quantization.use_rms_norm else []
    return [*inner, *(f"{name}.{hook}" for hook in (INT8, SCALE, ACC, OUT))]


# The last part of a name -> the kind of op that gives it.
_KINDS = {
    "hook_embed": "embedding",
    "hook_resid_pre": "residual",
    "hook_resid_mid": "residual",
    "hook_resid_post": "residual",
    NORM_SCALE: "norm scale",
    NORMALIZED: "norm",
    INT8: "activation int8",
    SCALE: "activation scale",
    ACC: "accumulator",
    OUT: "linear",
    "hook_q": "linear",  # these are a linear's result, cut into heads or renamed
    "hook_k": "linear",
    "hook_v": "linear",
    "hook_pre": "linear",
    "hook_pre_linear": "linear",
    "hook_attn_out": "linear",
    "hook_mlp_out": "linear",
    "hook_rot_q": "rope",
    "hook_rot_k": "rope",
    "hook_attn_scores": "attention scores",
    "hook_pattern": "attention pattern",
    "hook_z": "attention values",
    "hook_post": "gate",
}


def op_kind(name: str, is_ternary: Callable[[str], bool] = lambda linear: True) -> str:
    """What sort of op gives the tensor of that name. `is_ternary` tells of a linear ("blocks.0.attn.q_proj")."""
    if name == LOGITS:
        return "logits"
    kind = _KINDS[name.rpartition(".")[2]]
    if kind == "linear" and not is_ternary(linear_of(name)):
        return "dense linear"
    return kind


def layer_of(name: str) -> int | None:
    """The block that a name belongs to, None for the embedding, the last norm and the head."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blocks" else None


_LINEAR_OF = {
    "hook_q": "attn.q_proj",
    "hook_k": "attn.k_proj",
    "hook_v": "attn.v_proj",
    "hook_attn_out": "attn.o_proj",
    "hook_pre": "mlp.gate_proj",
    "hook_pre_linear": "mlp.up_proj",
    "hook_mlp_out": "mlp.down_proj",
}


def linear_of(name: str) -> str:
    """The linear whose tensor this is: "blocks.0.attn.hook_q" and "blocks.0.attn.q_proj.hook_out" -> ...q_proj."""
    parent, _, hook = name.rpartition(".")
    if hook not in _LINEAR_OF:
        return parent
    return f"{'.'.join(name.split('.')[:2])}.{_LINEAR_OF[hook]}"


def linear_input(linear: str, config: ModelConfig) -> str:
    """The name of what a linear reads: the tensor that its activation quantisation rounds.

    hook_z is (N, H, d) where the linear reads (N, H*d).
    """
    if config.quantization is not None and config.quantization.use_rms_norm and linear != "lm_head":
        return f"{linear}.rms_norm.{NORMALIZED}"
    return module_input(linear, config)


def module_input(linear: str, config: ModelConfig) -> str:
    """The same, before a norm that the linear may have of its own."""
    if linear == "lm_head":
        return f"ln_final.{NORMALIZED}"
    block, _, name = linear.rpartition(".")
    layer = block.rpartition(".")[0]
    if name in ATTENTION_LINEARS[:3]:
        return f"{layer}.ln1.{NORMALIZED}"
    if name == "o_proj":
        return f"{block}.sub_norm.{NORMALIZED}" if config.sub_norms else f"{block}.hook_z"
    if name in ("gate_proj", "up_proj"):
        return f"{layer}.ln2.{NORMALIZED}"
    return f"{block}.sub_norm.{NORMALIZED}" if config.sub_norms else f"{block}.hook_post"


def op_inputs(name: str, config: ModelConfig) -> tuple[str, ...]:
    """The names of the tensors that this one is computed from (weights apart); () for the embedding."""
    parent, _, hook = name.rpartition(".")
    layer = layer_of(name)
    block = "" if layer is None else f"blocks.{layer}"
    attn, mlp = f"{block}.attn", f"{block}.mlp"
    if hook == "hook_embed":
        return ()
    if hook == "hook_resid_pre":
        return ("hook_embed",) if layer == 0 else (f"blocks.{int(layer or 0) - 1}.hook_resid_post",)
    if hook in (NORM_SCALE, NORMALIZED):
        return (_norm_input(parent, config),)
    if hook in (INT8, SCALE):
        return (linear_input(parent, config),)
    if hook == ACC:
        return (f"{parent}.{INT8}",)
    if hook == OUT:
        return (f"{parent}.{ACC}", f"{parent}.{SCALE}") if _quantized(config) else (linear_input(parent, config),)
    if hook in _LINEAR_OF:
        return (f"{linear_of(name)}.{OUT}",)
    return {
        "hook_rot_q": (f"{attn}.hook_q",),
        "hook_rot_k": (f"{attn}.hook_k",),
        "hook_attn_scores": (f"{attn}.hook_rot_q", f"{attn}.hook_rot_k"),
        "hook_pattern": (f"{attn}.hook_attn_scores",),
        "hook_z": (f"{attn}.hook_pattern", f"{attn}.hook_v"),
        "hook_post": (f"{mlp}.hook_pre", f"{mlp}.hook_pre_linear"),
        "hook_resid_mid": (f"{block}.hook_resid_pre", f"{block}.hook_attn_out"),
        "hook_resid_post": (f"{block}.hook_resid_mid", f"{block}.hook_mlp_out"),
    }[hook]


def op_shape(name: str, config: ModelConfig, tokens: int) -> tuple[int, ...]:
    """The shape of the tensor of that name in a run over so many tokens."""
    parent, _, hook = name.rpartition(".")
    if hook in (NORM_SCALE, SCALE):
        return (tokens, 1)
    if hook in ("hook_attn_scores", "hook_pattern"):
        return (config.num_attention_heads, tokens, tokens)
    if hook in ("hook_q", "hook_rot_q", "hook_z"):
        return (tokens, config.num_attention_heads, config.head_dim)
    if hook in ("hook_k", "hook_rot_k", "hook_v"):
        return (tokens, config.num_key_value_heads, config.head_dim)
    if hook in ("hook_pre", "hook_pre_linear", "hook_post"):
        return (tokens, config.intermediate_size)
    if hook in (INT8, ACC, OUT):
        shapes = {**config.linear_shapes(), "lm_head": (config.vocab_size, config.hidden_size)}
        n_out, n_in = shapes[parent.rpartition(".")[2]]
        return (tokens, n_in if hook == INT8 else n_out)
    if hook == NORMALIZED:
        return (tokens, _norm_width(parent, config))
    return (tokens, config.hidden_size)


def _norm_width(norm: str, config: ModelConfig) -> int:
    parent, _, name = norm.rpartition(".")
    if name == "rms_norm":
        return {**config.linear_shapes(), "lm_head": (0, config.hidden_size)}[parent.rpartition(".")[2]][1]
    if name == "sub_norm":
        return config.query_size if parent.endswith("attn") else config.intermediate_size
    return config.hidden_size


def _norm_input(norm: str, config: ModelConfig) -> str:
    parent, _, name = norm.rpartition(".")
    if name == "rms_norm":
        return module_input(parent, config)
    if name == "ln_final":
        return f"blocks.{config.num_hidden_layers - 1}.hook_resid_post"
    if name == "sub_norm":
        return f"{parent}.hook_z" if parent.endswith("attn") else f"{parent}.hook_post"
    return f"{parent}.hook_resid_pre" if name == "ln1" else f"{parent}.hook_resid_mid"
