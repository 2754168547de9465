"""config.json of a Hugging Face checkpoint, in its old and new spellings -> `ModelConfig`.

An absent key takes the default of transformers' class for that model_type, because the checkpoint was saved against
it. The sizes have no sensible default and are required.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...reference.config import (
    LARGEST_INT,
    ROPE_TYPES,
    ModelConfig,
    QuantizationConfig,
    RopeConfig,
    activation_name,
    yarn_scale,
)
from ...system.json_file import read_json_object

MAX_CONFIG_BYTES = 1 << 20

# transformers 5: BitNetConfig, LlamaConfig, MistralConfig
_CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "bitnet": {
        "num_key_value_heads": 5,
        "hidden_act": "relu2",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "rope_theta": 500000.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "mistral": {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def read_hf_config(path: Path, allow_unquantized: bool = False) -> ModelConfig:
    """Read and check config.json. ConfigError names the file, the key, and what was expected."""
    return parse_hf_config(read_json_object(path, ConfigError, MAX_CONFIG_BYTES, path.parent), path, allow_unquantized)


def parse_hf_config(raw: dict[str, Any], path: Path, allow_unquantized: bool = False) -> ModelConfig:
    """`allow_unquantized`: accept a bitnet config without quantization_config as a dense model."""
    try:
        return _parse(raw, allow_unquantized)
    except ConfigError as error:
        raise ConfigError(error.message, path=path, field=error.field) from None


def _parse(raw: dict[str, Any], allow_unquantized: bool) -> ModelConfig:
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in _CLASS_DEFAULTS:
        raise ConfigError(
            f"expected one of {', '.join(_CLASS_DEFAULTS)}, got {model_type!r}: other architectures are not supported",
            field="model_type",
        )
    defaults = _CLASS_DEFAULTS[model_type]

    def get(key: str, default: Any = None) -> Any:
        """The value; if the key is absent transformers' default for the class; if that is absent or null `default`."""
        value = raw.get(key, defaults.get(key))
        return default if value is None else value

    def token_ids(key: str) -> Any:
        """The value; but not a class's default id that is beyond a smaller vocabulary."""
        value, vocab = get(key), raw["vocab_size"]
        beyond = key not in raw and _is_int(vocab) and _is_int(value) and value >= vocab
        return None if beyond else value

    for key in _REQUIRED:
        if raw.get(key) is None:
            raise ConfigError("is required and absent", field=key)
    one_bit_llm = "weight_bits" in raw or "input_bits" in raw
    quantization = _one_bit_llm_quantization(raw) if one_bit_llm else _quantization(raw.get("quantization_config"))
    if model_type == "bitnet" and quantization is None and not allow_unquantized:
        raise ConfigError(
            "a bitnet model without quantization_config would be computed as a dense one and give plausible, wrong "
            'numbers. Add it (for bf16 master weights: {"quant_method": "bitnet", "linear_class": "autobitlinear", '
            '"quantization_mode": "online"}), or pass allow_unquantized=True if it really is dense',
            field="quantization_config",
        )
    heads = raw["num_attention_heads"]
    kv_heads = get("num_key_value_heads", heads)
    head_dim = raw.get("head_dim")
    if head_dim is None:
        hidden = raw["hidden_size"]
        if not _is_int(hidden) or not _is_int(heads) or heads < 1 or hidden % heads:
            message = f"is absent, and hidden_size {hidden!r} is no multiple of {heads!r} heads"
            raise ConfigError(message, field="head_dim")
        head_dim = hidden // heads
    eos = token_ids("eos_token_id")
    max_positions = get("max_position_embeddings")
    return ModelConfig(
        model_type=model_type,
        **{key: raw[key] for key in _REQUIRED},
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        activation=activation_name(get("hidden_act", "silu"), "hidden_act"),
        norm_eps=get("rms_norm_eps"),
        max_position_embeddings=max_positions,
        tie_word_embeddings=get("tie_word_embeddings", False),
        sub_norms=model_type == "bitnet" or one_bit_llm,
        attention_bias=get("attention_bias", False) if model_type != "mistral" else False,
        mlp_bias=get("mlp_bias", False) if model_type == "llama" else False,
        sliding_window=get("sliding_window") if model_type == "mistral" else None,
        rope=_rope(raw, get("rope_theta", 10000.0), max_positions),
        quantization=quantization,
        bos_token_id=token_ids("bos_token_id"),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
    )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _one_bit_llm_quantization(raw: dict[str, Any]) -> QuantizationConfig:
    """1bitLLM's checkpoints (large, 3B) hold bf16 or f16 masters, marked by weight_bits 1 and input_bits 8."""
    for key, expected in (("weight_bits", 1), ("input_bits", 8)):
        if raw.get(key) != expected:
            message = f"expected {expected} (BitNet b1.58 as 1bitLLM writes it), got {raw.get(key)!r}"
            raise ConfigError(message, field=key)
    return QuantizationConfig(linear_class="autobitlinear", quantization_mode="online")


def _quantization(raw: Any) -> QuantizationConfig | None:
    if raw is None:
        return None
    field = "quantization_config"
    if not isinstance(raw, dict):
        raise ConfigError(f"expected an object, got {raw!r}", field=field)
    if raw.get("quant_method") != "bitnet":
        raise ConfigError(
            f'expected "bitnet", got {raw.get("quant_method")!r}: other quantisations are not supported',
            field=f"{field}.quant_method",
        )
    skipped = raw.get("modules_to_not_convert")
    if skipped is None:
        skipped = ["lm_head"]
    if not isinstance(skipped, list) or not all(isinstance(name, str) and name for name in skipped):
        raise ConfigError(f"expected a list of names, got {skipped!r}", field=f"{field}.modules_to_not_convert")
    keys = ("linear_class", "quantization_mode", "use_rms_norm", "rms_norm_eps")
    given = {key: raw[key] for key in keys if raw.get(key) is not None}
    return QuantizationConfig(modules_to_not_convert=tuple(skipped), **given)


def _rope(raw: dict[str, Any], theta: Any, max_positions: Any) -> RopeConfig:
    field = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"  # the old key wins, as in transformers
    params = raw.get(field) or {}
    if not isinstance(params, dict) or any(isinstance(value, dict) for value in params.values()):
        raise ConfigError(f"expected one flat object for all layers, got {params!r}", field=field)
    rope_type = params.get("rope_type", params.get("type", "default"))
    for source in (params, raw.get("rope_parameters")):
        if isinstance(source, dict) and source.get("rope_theta") is not None:
            theta = source["rope_theta"]
            break
    partial = params.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ConfigError(f"partial rotary embedding ({partial!r}) is not supported", field="partial_rotary_factor")
    if not isinstance(rope_type, str) or rope_type not in ROPE_TYPES:
        message = f"RoPE type {rope_type!r} is not supported; supported are {', '.join(ROPE_TYPES)}"
        raise ConfigError(message, field=f"{field}.rope_type")
    if rope_type == "default":
        return RopeConfig(theta=theta)
    # As transformers: a top-level key wins, then the object's own, then the model's whole context.
    original = raw.get("original_max_position_embeddings") or params.get("original_max_position_embeddings")
    if rope_type == "dynamic" or original is None:
        original = max_positions
    factor = params.get("factor")
    if factor is None:
        sizes = (max_positions, original)
        if rope_type != "yarn" or not all(_is_int(size) and 0 < size <= LARGEST_INT for size in sizes):
            raise ConfigError(f"is required for RoPE type {rope_type!r}", field=f"{field}.factor")
        factor = max_positions / original
    given: dict[str, Any] = {"theta": theta, "rope_type": rope_type, "factor": factor}
    if rope_type in ("dynamic", "llama3", "yarn"):
        given["original_max_position_embeddings"] = original
    optional = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_fast", "beta_slow", "truncate")}
    for key in optional.get(rope_type, ()):
        if params.get(key) is not None:
            given[key] = params[key]
        elif rope_type == "llama3":
            raise ConfigError("is required for RoPE type 'llama3'", field=f"{field}.{key}")
    if rope_type == "yarn":
        given["attention_factor"] = _yarn_attention_factor(params, factor, field)
    return RopeConfig(**given)


def _yarn_attention_factor(params: dict[str, Any], factor: Any, field: str) -> Any:
    """What yarn scales cos and sin by: the given factor, 0.1 ln(factor) + 1, or DeepSeek's quotient of two of these."""
    if params.get("attention_factor") is not None:
        return params["attention_factor"]
    numbers = {"factor": factor, "mscale": params.get("mscale"), "mscale_all_dim": params.get("mscale_all_dim")}
    for key, value in numbers.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 <= value < 1e9):
            raise ConfigError(f"expected a number from 0 to 1e9, got {value!r}", field=f"{field}.{key}")
    if numbers["mscale"] and numbers["mscale_all_dim"]:
        return yarn_scale(factor, numbers["mscale"]) / yarn_scale(factor, numbers["mscale_all_dim"])
    return yarn_scale(factor)
