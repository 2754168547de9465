"""Writes a Hugging Face folder: config.json, model.safetensors and the tokenizer's files, one tensor in memory.

Ternary linears are stored exactly, as `autobitlinear`, mode "offline": "hf-packed" (2-bit planes) or "hf-bf16" (-1, 0,
+1 as bfloat16), with a float32 `weight_scale`. Masters stay masters in "hf-bf16", mode "online". A ternary matrix is
never written as -s, 0, +s: transformers would take its absmean, which is s times the share of non-zeros.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError
from ...reference.config import ModelConfig, QuantizationConfig
from ...reference.weights import LinearWeight, TernaryLinear
from ..checkpoint import Checkpoint, Progress, all_linears, has_bias, is_ternary, linear_names, linear_shape
from ..names import hf_module
from ..packing import hf_from_ternary
from ..planned_tensors import PlannedTensor, layout_of, plan_model, write_parts
from ..safetensors import SafetensorsWriter, dtype_name
from .folder import SINGLE_FILE

_ARCHITECTURES = {"bitnet": "BitNetForCausalLM", "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
# Fields that not every model class of transformers has -> those that have it
_FIELD_CLASSES = {"attention_bias": ("llama", "bitnet"), "mlp_bias": ("llama",), "sliding_window": ("mistral",)}
_SAME_NAME = (  # fields of ModelConfig whose keys have the same name
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings", "attention_bias"),
    "bos_token_id",
)
_ROPE_FIELDS = {  # beside the factor
    "linear": (),
    "dynamic": (),
    "llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate", "original_max_position_embeddings"),
}


def write_hf(checkpoint: Checkpoint, folder: Path, kind: str = "hf-packed", progress: Progress | None = None) -> None:
    """Write the model into an existing, empty folder.   kind: "hf-packed" or "hf-bf16"

    Raises ConfigError for what no Hugging Face config can say, and for an hf-packed matrix whose number of outputs is
    no multiple of 4.
    """
    checkpoint.refuse_extras("Hugging Face")
    masters = kind == "hf-bf16" and _has_masters(checkpoint)
    quantization = hf_quantization(checkpoint, masters)
    plan_linear = partial(_plan_linear, checkpoint, kind, masters, quantization)
    plan = plan_model(checkpoint, lambda name: f"{hf_module(name)}.weight", plan_linear)
    with SafetensorsWriter(folder / SINGLE_FILE, layout_of(plan), {"format": "pt"}) as writer:
        write_parts(checkpoint, plan, writer.write, progress)
    text = json.dumps(hf_config_json(checkpoint.config, quantization), indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    for name, data in checkpoint.tokenizer_files().items():
        (folder / name).write_bytes(data)


def hf_quantization(checkpoint: Checkpoint, masters: bool) -> QuantizationConfig | None:
    """The quantization_config of the folder.

    It is "autobitlinear", which stores the scale itself, unless a bias, which it stores divided by the scale, cannot be
    stored exactly: then "bitlinear", which stores the scale's reciprocal. Raises ConfigError if neither is exact.
    """
    config = checkpoint.config
    if config.quantization is None:
        return None
    dense = [hf_module(name) for name in all_linears(config) if not is_ternary(config, name)]
    quantization = replace(
        config.quantization,
        linear_class="autobitlinear",
        quantization_mode="online" if masters else "offline",
        modules_to_not_convert=tuple(dense + ["lm_head"] * config.tie_word_embeddings),
    )
    biased = [name for name in all_linears(config) if is_ternary(config, name) and has_bias(config, name)]
    try:
        for name in biased:
            _scale_and_bias(quantization, checkpoint.linear(name))
    except ConfigError:
        quantization = replace(quantization, linear_class="bitlinear")
        for name in biased:
            _scale_and_bias(quantization, checkpoint.linear(name))
    return quantization


def _scale_and_bias(quantization: QuantizationConfig | None, w: LinearWeight) -> tuple[NDArray, NDArray | None]:
    """(weight_scale, bias) from which a reader computes exactly the scale and the bias of `w`. Raises ConfigError."""
    scale, bias = np.array([getattr(w, "w_dequant_scale", 1)], np.float32), w.bias
    convention = quantization.scale_convention if quantization is not None and isinstance(w, TernaryLinear) else None
    if convention == "divide":
        return _solve(lambda x: np.float32(1.0) / x, np.float32(1.0) / scale, scale), bias
    if convention == "multiply" and bias is not None:
        return scale, _solve(lambda x: x * scale, bias / scale, bias)
    return scale, bias


def _solve(
    function: Callable[[NDArray], NDArray], near: NDArray[np.float32], wanted: NDArray[np.float32]
) -> NDArray[np.float32]:
    """x, elementwise `near` or a neighbour, with function(x) == wanted to the bit. ConfigError if there is none."""
    out, solved = near.copy(), np.zeros(near.shape, np.bool_)
    for x in (near, np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf))):
        hit = ~solved & (function(x) == wanted)
        out[hit], solved = x[hit], solved | hit
    if not solved.all():
        raise ConfigError(
            "the ternary linears have biases, and neither of transformers' two ways to store them (divided by the "
            "scale; beside the scale's reciprocal) gives these exactly; convert to native instead"
        )
    return out


def hf_config_json(config: ModelConfig, quantization: QuantizationConfig | None) -> dict[str, Any]:
    """The config.json that `parse_hf_config` and transformers read back as `config`.

    Raises ConfigError for a combination that no model class of transformers has.
    """
    mistral = config.sliding_window is not None or config.model_type == "mistral"
    model_type = "bitnet" if config.sub_norms else "mistral" if mistral else "llama"
    for field, classes in _FIELD_CLASSES.items():
        if getattr(config, field) and model_type not in classes:
            raise ConfigError(f"no {model_type} model of transformers has it; convert to another format", field=field)
    out: dict[str, Any] = {"architectures": [_ARCHITECTURES[model_type]], "model_type": model_type}
    out |= {name: getattr(config, name) for name in _SAME_NAME}
    out |= {
        "hidden_act": config.activation,
        "rms_norm_eps": config.norm_eps,
        "eos_token_id": config.eos_token_ids[0] if len(config.eos_token_ids) == 1 else list(config.eos_token_ids),
        "rope_theta": config.rope.theta,
        "torch_dtype": "bfloat16",
    }
    if config.rope.rope_type != "default":
        fields = ("rope_type", "factor", *_ROPE_FIELDS[config.rope.rope_type])
        out["rope_scaling"] = {name: getattr(config.rope, name) for name in fields}
    out |= {field: getattr(config, field) for field, classes in _FIELD_CLASSES.items() if model_type in classes}
    if quantization is not None:
        skipped = {"modules_to_not_convert": list(quantization.modules_to_not_convert)}
        out["quantization_config"] = {"quant_method": "bitnet", **asdict(quantization), **skipped}
        out["quantization_config"].pop("int8_activations")
    return out


def _has_masters(checkpoint: Checkpoint) -> bool:
    """Whether the file has full-precision masters. One matrix shows how the whole checkpoint was saved."""
    first = next((name for name in linear_names(checkpoint.config) if is_ternary(checkpoint.config, name)), None)
    return first is not None and checkpoint.master(first) is not None


def _plan_linear(
    checkpoint: Checkpoint, kind: str, masters: bool, quantization: QuantizationConfig | None, name: str
) -> Iterator[PlannedTensor]:
    module, (rows, columns) = hf_module(name), linear_shape(checkpoint.config, name)
    weight = f"{module}.weight"
    if has_bias(checkpoint.config, name):
        yield PlannedTensor(f"{module}.bias", "F32", (rows,), lambda w: _scale_and_bias(quantization, w)[1])
    if not is_ternary(checkpoint.config, name):
        yield PlannedTensor(weight, dtype_name(checkpoint.dense_dtype(name)), (rows, columns), lambda w: w.array)
        return
    if checkpoint.input_norm_eps is not None:
        yield PlannedTensor(f"{module}.rms_norm.weight", "F32", (columns,), lambda w: w.input_norm.weight)
    if masters:
        master = checkpoint.master(name)
        if master is None:
            raise ConfigError(f"{name} is ternary already, and other linears are full-precision masters")
        yield PlannedTensor(weight, dtype_name(master.dtype), (rows, columns), lambda w: checkpoint.master(name))
        return
    yield PlannedTensor(f"{module}.weight_scale", "F32", (1,), lambda w: _scale_and_bias(quantization, w)[0])
    if kind == "hf-bf16":
        yield PlannedTensor(weight, "BF16", (rows, columns), lambda w: w.ternary().astype(ml_dtypes.bfloat16))
    elif rows % 4:
        message = f"{name} has {rows} outputs, and packed rows come in fours; convert to hf-bf16 or native instead"
        raise ConfigError(message)
    else:
        yield PlannedTensor(weight, "U8", (rows // 4, columns), lambda w: hf_from_ternary(w.ternary()))
