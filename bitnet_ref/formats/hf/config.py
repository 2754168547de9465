"""config.json of a Hugging Face checkpoint, in its old and new spellings -> `ModelConfig`.

An absent key takes the default of transformers' class for that model_type, because the checkpoint was saved against
it. The sizes have no sensible default and are required.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import LARGEST_INT, ConfigError, ConfigWarning, describe, errors_at, printable
from ...families import FAMILIES
from ...families.family import SIZES, SLIDING, HfForm, activation_name, fields_of_types
from ...families.rope import ROPE_TYPES, longrope_scale, make_rope, yarn_scale
from ...reference.config import ModelConfig, QuantizationConfig, RopeConfig
from ...system.json_file import read_json_object
from ..checkpoint import is_ternary
from ..names import is_simple_pattern, pattern_error
from .config_keys import BITNET_PACKING, Doubt, check_unread, have_same_meaning, is_off
from .packings import check_awq
from .wrappers import hf_form, hf_forms, text_part

MAX_CONFIG_BYTES = 1 << 20

# quant_method of quantization_config -> who writes it
WRITERS = {
    "aqlm": "AQLM",
    "auto-round": "Intel's AutoRound",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "llm-compressor (vLLM)",
    "eetq": "EETQ",
    "fbgemm_fp8": "FBGEMM",
    "fp8": "transformers' blocks of FP8",
    "gptq": "AutoGPTQ or GPTQModel",
    "higgs": "HIGGS",
    "hqq": "HQQ",
    "modelopt": "NVIDIA's ModelOpt",
    "mxfp4": "OpenAI's gpt-oss (MXFP4)",
    "quanto": "Quanto",
    "quark": "AMD's Quark",
    "spqr": "SpQR",
    "torchao": "torchao",
    "vptq": "VPTQ",
}
_NOT_DONE = {
    "moe": "mixture of experts is",
    "mixtral": "mixture of experts is",
    "vl": "vision is",
    "gemma3n": "vision is",
}


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
    if not path.exists():
        message = "there is no such file; expected config.json, a .gguf or a model.onnx in the folder of a model"
        raise ConfigError(message, path=path)

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
    with errors_at(path):
        config = _parse(text_part(raw, own), allow_unquantized, own)
    if doubts is None:
        _warn(path, own)
    else:
        doubts += own
    return config


def _warn(path: Path, doubts: list[Doubt]) -> None:
    if doubts:
        words = "; ".join(f"{doubt.field}: {doubt.message}" for doubt in doubts)
        warnings.warn(printable(f"{path}: {words}", keep=""), ConfigWarning, stacklevel=3)


class Keys:
    """The keys of a config.json: see `HfKeys`. It remembers which were read: another may change the arithmetic."""

    def __init__(self, raw: dict[str, Any], form: HfForm, allow_unquantized: bool, doubts: list[Doubt]) -> None:
        self.raw, self.defaults, self.allow_unquantized = raw, form.defaults, allow_unquantized
        self.doubts = doubts
        self.read: set[str] = set()
        self.one_bit_llm = "weight_bits" in raw or "input_bits" in raw
        stated = raw.get("quantization_config")
        self.quantization = _one_bit_llm_quantization(raw) if self.one_bit_llm else _quantization(stated, doubts)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        value = self.raw.get(key, self.defaults.get(key))
        return default if value is None else value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
            raise ConfigError(f"expected a number above 0, got {value!r}", field=key)
        return float(value)

    def count(self, key: str) -> int:
        value = self.get(key)
        if not _is_int(value) or not 1 <= value <= MAX_CONFIG_BYTES:
            raise ConfigError(f"expected a whole number from 1 to {MAX_CONFIG_BYTES}, got {value!r}", field=key)
        return int(value)

    def token_ids(self, key: str) -> Any:
        """The value, without ids that the vocabulary does not have. A doubt about these, unless they are a default."""
        value, vocab = self.get(key), self.raw["vocab_size"]
        ids = value if isinstance(value, list) else [value]
        beyond = [each for each in ids if _is_int(each) and _is_int(vocab) and not 0 <= each < vocab]
        if beyond and key in self.raw:
            self.doubts.append(Doubt(key, f"{describe(beyond)} ignored: not in the vocabulary of {vocab} tokens"))
        inside = [each for each in ids if each not in beyond]
        return inside if isinstance(value, list) else next(iter(inside), None)

    def ignore(self, *keys: str) -> None:
        self.read.update(keys)

    def doubt(self, key: str, message: str) -> None:
        self.doubts.append(Doubt(key, message))

    def rope(self, raw: Mapping[str, Any] | None = None, theta_key: str = "rope_theta") -> RopeConfig:
        raw = self.raw if raw is None else raw
        rope = _rope(raw, self.get(theta_key, 10000.0), self.get("max_position_embeddings"))
        scaling, parameters = raw.get("rope_scaling"), raw.get("rope_parameters")
        theta = parameters.get("rope_theta") if scaling and isinstance(parameters, dict) else None
        if theta not in (None, rope.theta):
            words = f"counts, as in transformers, with rope_theta {rope.theta:g}; that of rope_parameters is ignored"
            self.doubts.append(Doubt("rope_scaling", words))
        return rope

    def layer_types(self, window: Any, by_default: list[str]) -> dict[str, Any]:
        types = self.get("layer_types", by_default)
        if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
            raise ConfigError(f"expected a list of names, got {types!r}"[:200], field="layer_types")
        if window is None and SLIDING in types:
            raise ConfigError("is absent or not in use, and layer_types has sliding layers", field="sliding_window")
        return fields_of_types(types, window)


def _parse(raw: dict[str, Any], allow_unquantized: bool, doubts: list[Doubt]) -> ModelConfig:
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        others = "other architectures are"
        reason = next((reason for part, reason in _NOT_DONE.items() if part in str(model_type)), others)
        expected = ", ".join(hf_forms())
        raise ConfigError(f"expected one of {expected}, got {model_type!r}: {reason} not supported", field="model_type")
    form = hf_form(model_type)
    for key in SIZES:
        if raw.get(key) is None:
            raise ConfigError("is required and absent", field=key)
    keys = Keys(raw, form, allow_unquantized, doubts)
    keys.read.update(SIZES)
    get = keys.get
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
    fields: dict[str, Any] = {
        "model_type": model_type,
        **{key: raw[key] for key in SIZES},
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "activation": activation_name(get(form.activation_key, "silu"), form.activation_key),
        "norm_eps": get("rms_norm_eps"),
        "max_position_embeddings": get("max_position_embeddings"),
        "tie_word_embeddings": get("tie_word_embeddings", False),
        "sub_norms": keys.one_bit_llm,
        **{flag: get(flag, False) for flag in form.flags},
        "quantization": keys.quantization,
        "bos_token_id": keys.token_ids("bos_token_id"),
        "eos_token_ids": tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
    }
    fields |= form.read(keys)
    if "rope" not in fields:
        fields["rope"] = keys.rope()
    _check_layer_types(keys, fields.get("layer_types", ()))
    config = FAMILIES[model_type].config(**fields)
    if config.tie_word_embeddings and is_ternary(config, "lm_head"):
        message = "lacks lm_head, which tie_word_embeddings makes the embedding: a BitLinear of that is not supported"
        raise ConfigError(message, field="quantization_config.modules_to_not_convert")
    doubts += check_unread(raw, keys.read, config)
    return config


def _check_layer_types(keys: Keys, taken: tuple[str, ...]) -> None:
    """ConfigError for types of layers that this family's class does not compute."""
    given = keys.get("layer_types")
    if is_off(given) or taken:  # which the family's config has checked
        return
    layers = keys.raw["num_hidden_layers"]
    if not isinstance(given, list) or len(given) != layers:
        raise ConfigError(f"expected a name for each of {layers} layers, got {given!r}"[:200], field="layer_types")
    kinds = {*map(str, given)}
    if kinds not in ({"full_attention"}, {"sliding_attention"}):
        words = f"layers of such kinds are not supported here: {', '.join(sorted(kinds))}"
        raise ConfigError(words[:200], field="layer_types")


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
    if raw.get("quant_method") == "awq":
        check_awq(raw)
        return None
    method = raw.get("quant_method")
    if method != "bitnet":
        writer = WRITERS.get(method) if isinstance(method, str) else None
        by = "which is not read" if writer is None else f"the packing of {writer}, which is not read"
        message = f'expected "bitnet" or "awq", got {describe(method)}, {by}; use the checkpoint before it was packed'
        raise ConfigError(message, field=f"{field}.quant_method")
    skipped = raw.get("modules_to_not_convert")
    if skipped is None:
        skipped = ["lm_head"]
    if not isinstance(skipped, list) or not all(isinstance(name, str) and name for name in skipped):
        raise ConfigError(f"expected a list of names, got {skipped!r}", field=f"{field}.modules_to_not_convert")
    for name in skipped:
        if not is_simple_pattern(name) and not re.fullmatch(r"[\w.*?\[\]-]+", name):
            raise pattern_error(name, f"{field}.modules_to_not_convert")
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


def _rope(raw: Mapping[str, Any], theta: Any, max_positions: Any) -> RopeConfig:
    field = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"  # the old key wins, as in transformers
    params = raw.get(field) or {}
    if not isinstance(params, dict) or any(isinstance(value, dict) for value in params.values()):
        raise ConfigError(f"expected one flat object for all layers, got {params!r}", field=field)
    rope_type = params.get("rope_type", params.get("type", "default"))
    theta = theta if params.get("rope_theta") is None else params["rope_theta"]
    partial = params.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise ConfigError(f"partial rotary embedding ({partial!r}) is not supported", field="partial_rotary_factor")
    if not isinstance(rope_type, str) or rope_type not in ROPE_TYPES:
        message = f"RoPE type {rope_type!r} is not supported; supported are {', '.join(ROPE_TYPES)}"
        raise ConfigError(message, field=f"{field}.rope_type")
    if rope_type == "default":
        return RopeConfig(theta)
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
    return make_rope(**given)


def _factors(values: Any, field: str) -> tuple[Any, ...]:
    if not isinstance(values, list) or not values:
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
