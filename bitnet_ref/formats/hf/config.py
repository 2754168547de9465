"""config.json of a Hugging Face checkpoint, in its old and new spellings -> `ModelConfig`.

An absent key takes the default of transformers' class for that model_type, because the checkpoint was saved against
it. The sizes have no sensible default and are required.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import ConfigError, ConfigWarning, describe, printable
from ...reference.config import (
    LARGEST_INT,
    ROPE_TYPES,
    DeltaConfig,
    ModelConfig,
    QuantizationConfig,
    RopeConfig,
    activation_name,
    longrope_scale,
    yarn_scale,
)
from ...system.json_file import read_json_object
from .config_keys import BITNET_PACKING, Doubt, check_unread, have_same_meaning, is_off
from .wrappers import text_part

MAX_CONFIG_BYTES = 1 << 20

# Defaults of transformers' class of each model_type
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
    "qwen2": {"num_key_value_heads": 32, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768},
    "qwen3": {"num_key_value_heads": 32, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "head_dim": 128},
    "gemma3_text": {
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
    "qwen3_5_text": {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
    "minicpm": {  # openbmb's own class
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
_CLASS_DEFAULTS["qwen2"] |= {"sliding_window": 4096, "max_window_layers": 28}
_CLASS_DEFAULTS["qwen3"] |= {"sliding_window": 4096, "max_window_layers": 28}
NORMS_ADD_ONE = ("gemma3_text", "qwen3_5_text")  # their files hold w - 1 of each norm but those inside a linear
_NOT_DONE = {
    "moe": "mixture of experts is",
    "mixtral": "mixture of experts is",
    "vl": "vision is",
    "gemma3n": "vision is",
}
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def read_hf_config(path: Path, allow_unquantized: bool = False) -> ModelConfig:
    """Read and check config.json. ConfigError names the file, the key, and what was expected.

    What is read but may not be what was meant (`Doubt`) becomes one `ConfigWarning`.
    """
    doubts: list[Doubt] = []
    config = parse_hf_config(read_config_json(path, doubts), path, allow_unquantized, doubts)
    _warn(path, doubts)
    return config


def read_config_json(path: Path, doubts: list[Doubt]) -> dict[str, Any]:
    """The object in config.json. Of a key that occurs twice the last value counts; adds a doubt if they differ."""

    def compare(key: str, first: Any, last: Any) -> None:
        if not have_same_meaning(first, last):
            values = f"first {describe(first)}, then {describe(last)}"
            doubts.append(Doubt(key[:100], f"occurs twice in one object, {values}: the last one counts"))

    return read_json_object(path, ConfigError, MAX_CONFIG_BYTES, path.parent, compare)


def parse_hf_config(
    raw: dict[str, Any], path: Path, allow_unquantized: bool = False, doubts: list[Doubt] | None = None
) -> ModelConfig:
    """`allow_unquantized`: accept a bitnet config without quantization_config as a dense model.

    doubts: receives them; None: they become one `ConfigWarning`.
    """
    own: list[Doubt] = []
    try:
        config = _parse(text_part(raw, own), allow_unquantized, own)
    except ConfigError as error:
        raise ConfigError(error.message, path=path, field=error.field) from None
    if doubts is None:
        _warn(path, own)
    else:
        doubts += own
    return config


def _warn(path: Path, doubts: list[Doubt]) -> None:
    if doubts:
        words = "; ".join(f"{doubt.field}: {doubt.message}" for doubt in doubts)
        warnings.warn(printable(f"{path}: {words}", keep=""), ConfigWarning, stacklevel=3)


class _Keys:
    """The keys of a config.json. It remembers which were read: another key may change the arithmetic."""

    def __init__(self, raw: dict[str, Any], defaults: dict[str, Any]) -> None:
        self.raw, self.defaults = raw, defaults
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The value; if the key is absent transformers' default for the class; if that is absent or null `default`."""
        self.read.add(key)
        value = self.raw.get(key, self.defaults.get(key))
        return default if value is None else value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above zero; ConfigError names the key."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
            raise ConfigError(f"expected a number above 0, got {value!r}", field=key)
        return float(value)

    def token_ids(self, key: str) -> Any:
        """The value; but not a class's default id that is beyond a smaller vocabulary."""
        value, vocab = self.get(key), self.raw["vocab_size"]
        beyond = key not in self.raw and _is_int(vocab) and _is_int(value) and value >= vocab
        return None if beyond else value

    def ignore(self, *keys: str) -> None:
        """Keys that this family's class does not read although they look as if they changed what it computes."""
        self.read.update(keys)


def _parse(raw: dict[str, Any], allow_unquantized: bool, doubts: list[Doubt]) -> ModelConfig:
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in _CLASS_DEFAULTS:
        others = "other architectures are"
        reason = next((reason for part, reason in _NOT_DONE.items() if part in str(model_type)), others)
        expected = ", ".join(_CLASS_DEFAULTS)
        raise ConfigError(f"expected one of {expected}, got {model_type!r}: {reason} not supported", field="model_type")
    keys = _Keys(raw, _CLASS_DEFAULTS[model_type])
    get = keys.get
    for key in _REQUIRED:
        if raw.get(key) is None:
            raise ConfigError("is required and absent", field=key)
        keys.read.add(key)
    one_bit_llm = "weight_bits" in raw or "input_bits" in raw
    stated = raw.get("quantization_config")
    quantization = _one_bit_llm_quantization(raw) if one_bit_llm else _quantization(stated, doubts)
    if model_type == "bitnet" and quantization is None and not allow_unquantized:
        raise ConfigError(
            "a bitnet model without quantization_config would be computed as a dense one and give plausible, wrong "
            'numbers. Add it (for bf16 master weights: {"quant_method": "bitnet", "linear_class": "autobitlinear", '
            '"quantization_mode": "online"}), or pass allow_unquantized=True if it really is dense',
            field="quantization_config",
        )
    heads = raw["num_attention_heads"]
    kv_heads = get("num_key_value_heads", heads)
    head_dim = get("head_dim") if "head_dim" not in raw else raw["head_dim"]
    keys.read.add("head_dim")
    if head_dim is None:
        hidden = raw["hidden_size"]
        if not _is_int(hidden) or not _is_int(heads) or heads < 1 or hidden % heads:
            message = f"is absent, and hidden_size {hidden!r} is no multiple of {heads!r} heads"
            raise ConfigError(message, field="head_dim")
        head_dim = hidden // heads
    eos = keys.token_ids("eos_token_id")
    max_positions = get("max_position_embeddings")
    activation = "hidden_activation" if model_type == "gemma3_text" else "hidden_act"
    fields: dict[str, Any] = {
        "model_type": model_type,
        **{key: raw[key] for key in _REQUIRED},
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "activation": activation_name(get(activation, "silu"), activation),
        "norm_eps": get("rms_norm_eps"),
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": get("tie_word_embeddings", False),
        "sub_norms": model_type == "bitnet" or one_bit_llm,
        "attention_bias": get("attention_bias", False) if model_type != "mistral" else False,
        "mlp_bias": get("mlp_bias", False) if model_type == "llama" else False,
        "quantization": quantization,
        "bos_token_id": keys.token_ids("bos_token_id"),
        "eos_token_ids": tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
    }
    if model_type not in ("gemma3_text", "qwen3_5_text"):
        fields["rope"] = _rope(raw, get("rope_theta", 10000.0), max_positions)
    if model_type in _OF_FAMILY:
        fields |= _OF_FAMILY[model_type](keys)
    _check_layer_types(keys, fields.get("layer_types", ()))
    config = ModelConfig(**fields)
    doubts += check_unread(raw, keys.read, config)
    return config


# -- what a family has beyond LLaMA: fields of `ModelConfig` -----------------------------------------------------------


def _bitnet(keys: _Keys) -> dict[str, Any]:
    """With use_sub_norms false a checkpoint is "weight-only": no sub-norms, and activations are not quantised."""
    sub_norms = keys.get("use_sub_norms", True)
    if sub_norms is True:
        return {}
    if sub_norms is not False:
        raise ConfigError(f"expected true or false, got {sub_norms!r}", field="use_sub_norms")
    quantization = _quantization(keys.raw.get("quantization_config"), [])
    return {"sub_norms": False, "quantization": quantization and replace(quantization, int8_activations=False)}


def _mistral(keys: _Keys) -> dict[str, Any]:
    return {"sliding_window": keys.get("sliding_window")}


def _qwen2(keys: _Keys) -> dict[str, Any]:
    """Biases on q, k and v; from layer max_window_layers on a window, where use_sliding_window says so."""
    return {"attention_bias": True, "o_proj_bias": False, **_window_of_qwen(keys)}


def _qwen3(keys: _Keys) -> dict[str, Any]:
    """Norms of q and k in every layer, whatever use_qk_norm says."""
    keys.ignore("use_qk_norm")
    return {"qk_norms": True, **_window_of_qwen(keys)}


def _window_of_qwen(keys: _Keys) -> dict[str, Any]:
    window = keys.get("sliding_window") if keys.get("use_sliding_window", False) else None
    if window is None:
        return {}
    first, layers = keys.get("max_window_layers"), _count(keys, "num_hidden_layers")
    by_default = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return _layer_types(window, keys.get("layer_types", by_default))


def _gemma3(keys: _Keys) -> dict[str, Any]:
    """Norms of q and k and of each block's result; layers of two kinds, each with its RoPE; a scaled embedding."""
    keys.ignore("hidden_act", "use_qk_norm")  # beside hidden_activation; q and k have norms in any case
    for key in ("attn_logit_softcapping", "use_bidirectional_attention"):
        if (value := keys.get(key)) not in (None, False):
            raise ConfigError(f"{value!r} is not supported for gemma3_text; expected null", field=key)
    pattern = keys.get("_sliding_window_pattern", keys.get("sliding_window_pattern", 6))
    if not _is_int(pattern) or pattern < 1:
        raise ConfigError(f"expected a number of layers, got {pattern!r}", field="sliding_window_pattern")
    layers = _count(keys, "num_hidden_layers")
    by_default = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]
    head_dim, scalar = keys.get("head_dim"), keys.number("query_pre_attn_scalar")
    cap = keys.get("final_logit_softcapping")
    both = keys.raw.get("rope_parameters")
    both = both if isinstance(both, dict) and {"full_attention", "sliding_attention"} & both.keys() else {}
    old = {key: keys.raw[key] for key in ("rope_scaling", "rope_parameters")[: 1 if both else 2] if key in keys.raw}
    full, local = ({"rope_parameters": both.get(kind) or {}} for kind in ("full_attention", "sliding_attention"))
    rope = _rope(full | old, keys.get("rope_theta"), keys.get("max_position_embeddings"))
    local_rope = _rope(local, keys.get("rope_local_base_freq"), keys.get("max_position_embeddings"))
    return {
        **_layer_types(keys.get("sliding_window"), keys.get("layer_types", by_default)),
        "o_proj_bias": True,
        "qk_norms": True,
        "post_norms": True,
        "rope": rope,
        "local_rope": None if local_rope == rope else local_rope,
        # written so that it is exactly 1 where the scalar is head_dim, as it nearly always is
        "query_scale": 1.0 if scalar == head_dim else math.sqrt(head_dim / scalar) if _is_int(head_dim) else 1.0,
        "embedding_scale": math.sqrt(_count(keys, "hidden_size")),
        "logit_softcap": None if cap is None else keys.number("final_logit_softcapping"),
    }


def _qwen3_5(keys: _Keys) -> dict[str, Any]:
    """Gated DeltaNet in three of four layers; attention with a gate, RoPE on a part of each head."""
    for key, expected in (("attention_bias", False), ("attn_output_gate", True), ("quantization_config", None)):
        if keys.get(key, expected) != expected:
            raise ConfigError(f"{keys.get(key)!r} is not supported for qwen3_5_text", field=key)
    interval, layers = keys.get("full_attention_interval", 4), _count(keys, "num_hidden_layers")
    if not _is_int(interval) or interval < 1:
        raise ConfigError(f"expected a number of layers, got {interval!r}", field="full_attention_interval")
    by_default = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
    types = keys.get("layer_types", by_default)
    parameters, share = keys.raw.get("rope_parameters") or keys.raw.get("rope_scaling") or {}, None
    if isinstance(parameters, dict):
        share = parameters.get("partial_rotary_factor")
        parameters = {key: value for key, value in parameters.items() if key != "partial_rotary_factor"}
    share = keys.get("partial_rotary_factor") if share is None else share
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise ConfigError(f"expected a number from 0 to 1, got {share!r}", field="partial_rotary_factor")
    head_dim = _count(keys, "head_dim")
    shape = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    delta = DeltaConfig(*(_count(keys, f"linear_{name}") for name in shape))
    theta, context = keys.get("rope_theta", 10000.0), keys.get("max_position_embeddings")
    return {
        **_layer_types(None, types),
        "qk_norms": True,
        "output_gate": True,
        "rotary_dim": None if share == 1 else int(head_dim * share),
        "delta": delta if isinstance(types, list) and "linear_attention" in types else None,
        "rope": _rope({"rope_parameters": parameters}, theta, context),
    }


def _minicpm(keys: _Keys) -> dict[str, Any]:
    """mu-P's three factors: of the embedding, of each block's result, of the head's input."""
    layers, hidden = _count(keys, "num_hidden_layers"), _count(keys, "hidden_size")
    if keys.get("mup_denominator", layers) != layers:
        message = f"expected num_hidden_layers ({layers}), got {keys.get('mup_denominator')!r}"
        raise ConfigError(message, field="mup_denominator")
    return {
        "embedding_scale": keys.number("scale_emb", 1.0),
        "residual_scale": keys.number("scale_depth", 1.0) / math.sqrt(layers),
        "head_scale": keys.number("dim_model_base", 1.0) / hidden,
    }


_OF_FAMILY: dict[str, Callable[[_Keys], dict[str, Any]]] = {
    "bitnet": _bitnet,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma3_text": _gemma3,
    "qwen3_5_text": _qwen3_5,
    "minicpm": _minicpm,
}


def _count(keys: _Keys, key: str) -> int:
    value = keys.get(key)
    if not _is_int(value) or not 1 <= value <= MAX_CONFIG_BYTES:
        raise ConfigError(f"expected a whole number from 1 to {MAX_CONFIG_BYTES}, got {value!r}", field=key)
    return int(value)


def _layer_types(window: Any, types: Any) -> dict[str, Any]:
    """Fields of layers that are not all alike, or of a window that all have or none."""
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise ConfigError(f"expected a list of names, got {types!r}"[:200], field="layer_types")
    if set(types) == {"full_attention"}:
        return {}
    alike = set(types) == {"sliding_attention"}
    return {"sliding_window": window, "layer_types": () if alike else tuple(types)}


def _check_layer_types(keys: _Keys, taken: tuple[str, ...]) -> None:
    """ConfigError for types of layers that this family's class does not compute."""
    given = keys.get("layer_types")
    if given is not None and not taken and (not isinstance(given, list) or len({*map(str, given)}) > 1):
        raise ConfigError(f"layers of several kinds are not supported here, got {given!r}"[:200], field="layer_types")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _one_bit_llm_quantization(raw: dict[str, Any]) -> QuantizationConfig:
    """1bitLLM's checkpoints (large, 3B) hold bf16 or f16 masters, marked by weight_bits 1 and input_bits 8."""
    for key, expected in (("weight_bits", 1), ("input_bits", 8)):
        if raw.get(key) != expected:
            message = f"expected {expected} (BitNet b1.58 as 1bitLLM writes it), got {raw.get(key)!r}"
            raise ConfigError(message, field=key)
    return QuantizationConfig(linear_class="autobitlinear", quantization_mode="online")


def _quantization(raw: Any, doubts: list[Doubt]) -> QuantizationConfig | None:
    if is_off(raw):
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
    unread = [key for key in raw if key not in (*keys, "quant_method", "modules_to_not_convert")]
    unread = [key for key in unread if not key.startswith("_") and not is_off(raw[key])]
    for key in unread:
        if key in BITNET_PACKING and raw[key] not in BITNET_PACKING[key]:
            message = f"{describe(raw[key])} means another packing than BitNet's, 2 bits and one scale per matrix"
            raise ConfigError(message, field=f"{field}.{key}")
        if key not in BITNET_PACKING:
            doubts.append(Doubt(f"{field}.{key}"[:100], "ignored, as transformers does not read it"))
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
        known = all(_is_int(size) and 0 < size <= LARGEST_INT for size in (max_positions, original))
        if rope_type not in ("yarn", "longrope") or not known:
            raise ConfigError(f"is required for RoPE type {rope_type!r}", field=f"{field}.factor")
        factor = max_positions / original
    given: dict[str, Any] = {"theta": theta, "rope_type": rope_type, "factor": factor}
    if rope_type in ("dynamic", "llama3", "yarn", "longrope"):
        given["original_max_position_embeddings"] = original
    optional = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_fast", "beta_slow", "truncate")}
    for key in optional.get(rope_type, ()):
        if params.get(key) is not None:
            given[key] = params[key]
        elif rope_type == "llama3":
            raise ConfigError("is required for RoPE type 'llama3'", field=f"{field}.{key}")
    if rope_type == "yarn":
        given["attention_factor"] = _yarn_attention_factor(params, factor, field)
    if rope_type == "longrope":
        given |= {f"{key}s": _factors(params.get(key), f"{field}.{key}") for key in ("long_factor", "short_factor")}
        scale = params.get("attention_factor")
        known = isinstance(factor, int | float) and _is_int(original)
        given["attention_factor"] = longrope_scale(factor, original) if scale is None and known else scale
    return RopeConfig(**given)


def _factors(values: Any, field: str) -> tuple[Any, ...]:
    if not isinstance(values, list) or not values or len(values) > MAX_CONFIG_BYTES:
        raise ConfigError("expected a list of numbers, one for each pair that RoPE turns", field=field)
    return tuple(values)


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
