"""LLaMA, Mistral and BitNet b1.58: the steps of the blocks in `reference/model.py`, and how files say them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..errors import ConfigError
from ..reference.config import ModelConfig
from .family import (
    FULL,
    SLIDING,
    Architecture,
    Family,
    GgufForm,
    GgufKeys,
    HfForm,
    HfKeys,
    PartNames,
    TraceStep,
    linear_step,
    norm_step,
)

N_D, N_F, N_H, N_G = "N D", "N F", "N H d", "N G d"


def llama_steps(config: ModelConfig, layer: int) -> list[TraceStep]:
    """The steps of a block, in the order of the computation."""
    normed, result = "hook_normalized", "hook_out"
    sub_norms = config.sub_norms
    z = f"attn.sub_norm.{normed}" if sub_norms else "attn.hook_z"
    post = f"mlp.sub_norm.{normed}" if sub_norms else "mlp.hook_post"
    return [
        TraceStep("hook_resid_pre", (), "residual", N_D),
        norm_step("ln1", "hook_resid_pre"),
        *(linear_step(f"attn.{name}", f"ln1.{normed}") for name in ("q_proj", "k_proj", "v_proj")),
        TraceStep("attn.hook_q", (f"attn.q_proj.{result}",), "linear", N_H),
        TraceStep("attn.hook_k", (f"attn.k_proj.{result}",), "linear", N_G),
        TraceStep("attn.hook_rot_q", ("attn.hook_q",), "rope", N_H),
        TraceStep("attn.hook_rot_k", ("attn.hook_k",), "rope", N_G),
        TraceStep("attn.hook_v", (f"attn.v_proj.{result}",), "linear", N_G),
        TraceStep("attn.hook_attn_scores", ("attn.hook_rot_q", "attn.hook_rot_k"), "attention scores", "H N N"),
        TraceStep("attn.hook_pattern", ("attn.hook_attn_scores",), "attention pattern", "H N N"),
        TraceStep("attn.hook_z", ("attn.hook_pattern", "attn.hook_v"), "attention values", N_H),
        *([norm_step("attn.sub_norm", "attn.hook_z", "Q")] * sub_norms),
        linear_step("attn.o_proj", z),
        TraceStep("hook_attn_out", (f"attn.o_proj.{result}",), "linear", N_D),
        TraceStep("hook_resid_mid", ("hook_resid_pre", "hook_attn_out"), "residual", N_D),
        norm_step("ln2", "hook_resid_mid"),
        *(linear_step(f"mlp.{name}", f"ln2.{normed}") for name in ("gate_proj", "up_proj")),
        TraceStep("mlp.hook_pre", (f"mlp.gate_proj.{result}",), "linear", N_F),
        TraceStep("mlp.hook_pre_linear", (f"mlp.up_proj.{result}",), "linear", N_F),
        TraceStep("mlp.hook_post", ("mlp.hook_pre", "mlp.hook_pre_linear"), "gate", N_F),
        *([norm_step("mlp.sub_norm", "mlp.hook_post", "F")] * sub_norms),
        linear_step("mlp.down_proj", post),
        TraceStep("hook_mlp_out", (f"mlp.down_proj.{result}",), "linear", N_D),
        TraceStep("hook_resid_post", ("hook_resid_mid", "hook_mlp_out"), "residual", N_D),
    ]


def llama_axes(config: ModelConfig) -> dict[str, int]:
    """The sizes of the axes in the shapes above."""
    return {
        "D": config.hidden_size,
        "F": config.intermediate_size,
        "H": config.num_attention_heads,
        "G": config.num_key_value_heads,
        "d": config.head_dim,
        "Q": config.query_size,
    }


NAMES = {
    "attn_norm": PartNames(("input_layernorm",), "attn_norm"),
    "ffn_norm": PartNames(("post_attention_layernorm",), "ffn_norm"),
    "attn_sub_norm": PartNames(("self_attn.attn_sub_norm", "self_attn.inner_attn_ln"), "attn_sub_norm"),
    "ffn_sub_norm": PartNames(("mlp.ffn_sub_norm", "mlp.ffn_layernorm"), "ffn_sub_norm"),
    "q_proj": PartNames(("self_attn.q_proj",), "attn_q"),
    "k_proj": PartNames(("self_attn.k_proj",), "attn_k"),
    "v_proj": PartNames(("self_attn.v_proj",), "attn_v"),
    "o_proj": PartNames(("self_attn.o_proj",), "attn_output"),
    "gate_proj": PartNames(("mlp.gate_proj",), "ffn_gate"),
    "up_proj": PartNames(("mlp.up_proj",), "ffn_up"),
    "down_proj": PartNames(("mlp.down_proj",), "ffn_down"),
}


def _read_bitnet(keys: HfKeys) -> dict[str, Any]:
    """With use_sub_norms false a checkpoint is "weight-only": no sub-norms, and activations are not quantised."""
    if keys.quantization is None and not keys.allow_unquantized:
        raise ConfigError(
            "a bitnet model without quantization_config would be computed as a dense one and give plausible, wrong "
            'numbers. Add it (for bf16 master weights: {"quant_method": "bitnet", "linear_class": "autobitlinear", '
            '"quantization_mode": "online"}), or pass allow_unquantized=True if it really is dense',
            field="quantization_config",
            mentions=["allow_unquantized=True"],
        )
    sub_norms = keys.get("use_sub_norms", True)
    if not isinstance(sub_norms, bool):
        raise ConfigError(f"expected true or false, got {sub_norms!r}", field="use_sub_norms")
    if sub_norms:
        return {"sub_norms": True}
    quantization = keys.quantization
    return {"sub_norms": False, "quantization": quantization and replace(quantization, int8_activations=False)}


def _read_mistral(keys: HfKeys) -> dict[str, Any]:
    """With layer_types transformers' AutoModel takes its class of Ministral, whose layers have a window or none."""
    window = keys.get("sliding_window")
    by_default = [FULL if window is None else SLIDING] * keys.count("num_hidden_layers")
    return keys.layer_types(window, by_default)


def _write_mistral(config: ModelConfig) -> dict[str, Any]:
    types = {"layer_types": list(config.layer_types)} if config.layer_types else {}
    return {"sliding_window": config.sliding_window, **types}


def _class_of(config: ModelConfig) -> str:
    """The fields alone tell LLaMA, Mistral and BitNet apart."""
    weight_only = config.quantization is not None and not config.quantization.int8_activations
    mistral = config.sliding_window is not None or config.model_type == "mistral"
    return "bitnet" if config.sub_norms or weight_only else "mistral" if mistral else "llama"


def _family_in_gguf(keys: GgufKeys, fields: dict[str, Any]) -> dict[str, Any]:
    """Sub-norms make a BitNet, a window makes a Mistral of the architecture "llama"."""
    plain = "llama" if fields["sliding_window"] is None else "mistral"
    return {"model_type": "bitnet" if fields["sub_norms"] else plain}


LLAMA_IN_GGUF = GgufForm(
    {
        "bitnet": Architecture("silu", sub_norms=True),  # 1bitLLM
        "bitnet-b1.58": Architecture("relu2", sub_norms=True),  # 2B-4T
        "bitnet-25": Architecture("relu2", sub_norms=True),  # the same, older name
        "llama": Architecture("silu", permuted=True),  # LLaMA, Mistral; ternary (Falcon3) or dense
    },
    read=_family_in_gguf,
)
_LLAMA = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}
_MISTRAL = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BITNET = {
    "num_key_value_heads": 5,
    "hidden_act": "relu2",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "rope_theta": 500000.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
FAMILIES = (
    Family(
        "llama",
        hf=HfForm("LlamaForCausalLM", _LLAMA, class_of=_class_of, flags=("attention_bias", "mlp_bias")),
        gguf=LLAMA_IN_GGUF,
    ),
    Family(
        "mistral",
        hf=HfForm(
            "MistralForCausalLM",
            _MISTRAL,
            _read_mistral,
            _write_mistral,
            class_of=_class_of,
            flags=(),
        ),
        gguf=LLAMA_IN_GGUF,
    ),
    Family(
        "bitnet",
        hf=HfForm(
            "BitNetForCausalLM",
            _BITNET,
            _read_bitnet,
            lambda config: {} if config.sub_norms else {"use_sub_norms": False},
            class_of=_class_of,
        ),
        gguf=LLAMA_IN_GGUF,
    ),
)
