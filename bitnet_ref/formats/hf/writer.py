"""Writes a Hugging Face folder: config.json, model.safetensors and the tokenizer's files, one tensor in memory.

Ternary linears are stored exactly, as `autobitlinear`, mode "offline": "hf-packed" (2-bit planes) or "hf-bf16" (-1, 0,
+1 as floats), with a `weight_scale`. Packed planes whose scales divide (`bitlinear`) stay so in "hf-packed". Masters
stay masters in "hf-bf16", mode "online". A BitLinear's matrix is never written as -s, 0, +s: transformers would take
its absmean, which is s times the share of non-zeros. Dense matrices, ternary by groups or not, are written as they are;
"hf-unpacked" takes models of these alone.

All floats of a file have one dtype, which config.json names: transformers leaves a quantised model's tensors in the
dtype of the file, and torch multiplies no float32 by bfloat16. It is the narrowest that changes no value (`_DTYPES`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError
from ...reference.config import DeltaConfig, ModelConfig, QuantizationConfig, RopeConfig
from ...reference.weights import DenseWeight, GroupTernaryLinear, LinearWeight, TernaryLinear
from ..checkpoint import (
    Checkpoint,
    Progress,
    all_linears,
    delta_shapes,
    fold,
    has_bias,
    is_ternary,
    linear_names,
    linear_shape,
)
from ..names import DELTA_ARRAYS, hf_module, hf_modules
from ..packing import hf_from_ternary
from ..places import linear_place, stored_matrix
from ..planned_tensors import PlannedTensor, exact_dtype, in_one_dtype, layout_of, plan_model, write_parts
from ..safetensors import SafetensorsWriter, dtype_name
from .config import NORMS_ADD_ONE, parse_hf_config
from .folder import MODULES, POOLINGS, SINGLE_FILE
from .wrappers import ARCHITECTURES

# What transformers calls the dtype of a file
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_FAMILIES = ("qwen2", "qwen3", "gemma3_text", "qwen3_5_text", "minicpm")  # what the fields alone do not show
# Fields that some model classes of transformers have
_FIELD_CLASSES = {
    "attention_bias": ("llama", "bitnet", "qwen3", "gemma3_text", "minicpm"),
    "mlp_bias": ("llama",),
    "sliding_window": ("mistral", "gemma3_text"),
}
_SAME_NAME = (  # fields of ModelConfig whose keys have the same name
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings"),
    "bos_token_id",
)
_ROPE_FIELDS = {  # beside the factor
    "linear": (),
    "longrope": ("attention_factor", "original_max_position_embeddings"),
    "dynamic": (),
    "llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate", "original_max_position_embeddings"),
}
_SAID_ELSEWHERE = ("model_type", "quantization", "eos_token_ids", "pooling", "unit_embeddings")
_NO_SCALE = (
    "the ternary linears have biases, and no way of transformers to store them beside these planes (divided by the "
    "scale; where planes are packed, beside the scale's reciprocal) gives these"
)
_NO_NORM = "transformers stores w - 1 of each norm of this family, and no float32 gives these weights"


def write_hf(checkpoint: Checkpoint, folder: Path, kind: str = "hf-packed", progress: Progress | None = None) -> None:
    """Write the model into an existing, empty folder.   kind: "hf-packed", "hf-bf16" or "hf-unpacked"

    Raises ConfigError for what no Hugging Face config can say, and for an hf-packed matrix whose number of outputs is
    no multiple of 4.
    """
    config = checkpoint.config
    checkpoint.refuse_rotation("Hugging Face")
    if kind == "hf-unpacked" and config.quantization is not None:
        message = "-s, 0, +s would be quantised once more when they are loaded; convert to native, hf-packed or hf-bf16"
        raise ConfigError(message, field="quantization")
    masters = kind == "hf-bf16" and _has_masters(checkpoint)
    quantization = hf_quantization(checkpoint, kind, masters)
    plan_linear = partial(_plan_linear, checkpoint, kind, masters, quantization)
    norm = _norm_less_one if hf_model_type(config) in NORMS_ADD_ONE else np.asarray
    planned = plan_model(
        checkpoint,
        lambda name: f"{hf_modules(name, config.post_norms)[0]}.weight",
        plan_linear,
        partial(_plan_delta, checkpoint),
        norm,
    )
    dtype = exact_dtype(checkpoint, planned, _narrow_dtypes(checkpoint))
    plan = in_one_dtype(planned, dtype)
    text = json.dumps(hf_config_json(config, quantization, dtype), indent=2) + "\n"
    with SafetensorsWriter(folder / SINGLE_FILE, layout_of(plan), {"format": "pt"}) as writer:
        write_parts(checkpoint, plan, writer.write, progress)
    (folder / "config.json").write_text(text, encoding="utf-8")
    if config.pooling != "last":
        (folder / "1_Pooling").mkdir()
        modes = {key: mode == config.pooling for key, mode in POOLINGS.items()}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes) + "\n", encoding="utf-8")
    if not config.unit_embeddings:
        kinds = [{"type": f"sentence_transformers.models.{kind}"} for kind in MODULES if kind != "Normalize"]
        (folder / "modules.json").write_text(json.dumps(kinds) + "\n", encoding="utf-8")
    for name, data in checkpoint.tokenizer_files().items():
        (folder / name).write_bytes(data)


def _narrow_dtypes(checkpoint: Checkpoint) -> list[str]:
    """The dtypes to try before float32. float16 only if a dense model has it: a BitLinear's sums exceed its range."""
    has_float16 = checkpoint.given_dtype("embedding") == np.float16
    return ["BF16", *["F16"] * (has_float16 and checkpoint.config.quantization is None)]


def hf_quantization(checkpoint: Checkpoint, kind: str, masters: bool) -> QuantizationConfig | None:
    """The quantization_config of the folder.

    It is "autobitlinear", which stores the scale itself, unless a bias, which it stores divided by the scale, cannot be
    stored exactly: then "bitlinear", which stores the scale's reciprocal. A packed file of "bitlinear" stays one, since
    a scale that is exact in bfloat16 has no reciprocal that is. transformers' BitLinear has packed planes only, so
    "hf-bf16" is always "autobitlinear". Raises ConfigError if no class is exact.
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
    if kind == "hf-packed" and checkpoint.kind == "hf-packed" and config.quantization.scale_convention == "divide":
        return replace(quantization, linear_class="bitlinear")
    biased = [name for name in all_linears(config) if is_ternary(config, name) and has_bias(config, name)]
    try:
        for name in biased:
            _scale_and_bias(quantization, checkpoint.linear(name))
    except ConfigError:
        if kind != "hf-packed":
            raise
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


def _norm_less_one(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """What a family that multiplies by 1 + w stores. Raises ConfigError where no float32 gives the weight."""
    return _solve(lambda x: x + np.float32(1.0), weight - np.float32(1.0), weight, _NO_NORM)


def _solve(
    function: Callable[[NDArray], NDArray],
    near: NDArray[np.float32],
    wanted: NDArray[np.float32],
    problem: str = _NO_SCALE,
) -> NDArray[np.float32]:
    """x with function(x) == wanted to the bit, elementwise `near` as bfloat16, `near` or a neighbour of it.

    Raises ConfigError if there is none.
    """
    out, solved = near.copy(), np.zeros(near.shape, np.bool_)
    neighbours = [np.nextafter(near, np.float32(limit)) for limit in (-np.inf, np.inf)]
    for x in (near.astype(ml_dtypes.bfloat16).astype(np.float32), near, *neighbours):
        hit = ~solved & (function(x) == wanted)
        out[hit], solved = x[hit], solved | hit
    if not solved.all():
        raise ConfigError(f"{problem} exactly; convert to native instead")
    return out


def hf_model_type(config: ModelConfig) -> str:
    """transformers' model class that computes the model."""
    weight_only = config.quantization is not None and not config.quantization.int8_activations
    if config.model_type in _FAMILIES:
        return config.model_type
    mistral = config.sliding_window is not None or config.model_type == "mistral"
    return "bitnet" if config.sub_norms or weight_only else "mistral" if mistral else "llama"


def hf_config_json(config: ModelConfig, quantization: QuantizationConfig | None, dtype: str) -> dict[str, Any]:
    """The config.json that `parse_hf_config` and transformers read back as `config`.

    dtype: of the file's floats, "BF16", "F16" or "F32". transformers 5 reads "dtype", older ones "torch_dtype".
    Raises ConfigError for a combination that no model class of transformers has.
    """
    model_type = hf_model_type(config)
    spelling = "gelu_pytorch_tanh" if config.activation == "gelu_tanh" else config.activation
    out: dict[str, Any] = {"architectures": [ARCHITECTURES[model_type]], "model_type": model_type}
    out |= {name: getattr(config, name) for name in _SAME_NAME}
    out |= {
        "hidden_activation" if model_type == "gemma3_text" else "hidden_act": spelling,
        "rms_norm_eps": config.norm_eps,
        "eos_token_id": config.eos_token_ids[0] if len(config.eos_token_ids) == 1 else list(config.eos_token_ids),
        "rope_theta": config.rope.theta,
        "dtype": _DTYPES[dtype],
        "torch_dtype": _DTYPES[dtype],
    }
    if config.rope.rope_type != "default":
        out["rope_scaling"] = _rope_json(config.rope)
    out |= {field: getattr(config, field) for field, classes in _FIELD_CLASSES.items() if model_type in classes}
    if model_type in _OF_FAMILY:
        out |= _OF_FAMILY[model_type](config)
    if model_type == "bitnet" and not config.sub_norms:
        out["use_sub_norms"] = False
    if quantization is not None:
        skipped = {"modules_to_not_convert": list(quantization.modules_to_not_convert)}
        out["quantization_config"] = {"quant_method": "bitnet", **asdict(quantization), **skipped}
        out["quantization_config"].pop("int8_activations")
    again = asdict(parse_hf_config(out, Path("config.json"), allow_unquantized=True))
    for field, value in asdict(config).items():
        if again[field] != value and field not in _SAID_ELSEWHERE:
            message = f"no {model_type} model of transformers has {value!r}; convert to another format"
            raise ConfigError(message, field=field)
    return out


def _rope_json(rope: RopeConfig) -> dict[str, Any]:
    names = ("rope_type", *(("factor", *_ROPE_FIELDS[rope.rope_type]) if rope.rope_type != "default" else ()))
    factors = {"long_factor": list(rope.long_factors), "short_factor": list(rope.short_factors)}
    return {name: getattr(rope, name) for name in names} | (factors if rope.rope_type == "longrope" else {})


def _layer_types(config: ModelConfig) -> list[str]:
    alike = "full_attention" if config.sliding_window is None else "sliding_attention"
    return list(config.layer_types) or [alike] * config.num_hidden_layers


def _windows_of_qwen(config: ModelConfig) -> dict[str, Any]:
    windows = {"use_sliding_window": config.sliding_window is not None, "sliding_window": config.sliding_window}
    return windows | {"layer_types": _layer_types(config)}


def _gemma3(config: ModelConfig) -> dict[str, Any]:
    scalar = config.head_dim / config.query_scale**2
    ropes = {"full_attention": config.rope, "sliding_attention": config.rope_of_sliding}
    return {
        # transformers wants a number even where no layer has a window
        "sliding_window": config.sliding_window or config.max_position_embeddings,
        "query_pre_attn_scalar": _near(lambda x: math.sqrt(config.head_dim / x), scalar, config.query_scale),
        "layer_types": _layer_types(config),
        "final_logit_softcapping": config.logit_softcap,
        "rope_parameters": {kind: {"rope_theta": rope.theta, **_rope_json(rope)} for kind, rope in ropes.items()},
        "rope_local_base_freq": config.rope_of_sliding.theta,
    }


def _qwen3_5(config: ModelConfig) -> dict[str, Any]:
    share = _near(lambda x: int(config.head_dim * x), config.rotary_size / config.head_dim, config.rotary_size)
    delta = config.delta or DeltaConfig(1, 1, 1, 1, 4)  # where no layer is a DeltaNet
    keys = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    rope = {"rope_theta": config.rope.theta, **_rope_json(config.rope), "partial_rotary_factor": share}
    return {
        "layer_types": _layer_types(config),
        "partial_rotary_factor": share,
        "rope_parameters": rope,
        "rope_scaling": None,
        **{f"linear_{key}": getattr(delta, field.name) for key, field in zip(keys, fields(delta), strict=True)},
    }


def _minicpm(config: ModelConfig) -> dict[str, Any]:
    root, hidden = math.sqrt(config.num_hidden_layers), config.hidden_size
    return {
        "scale_emb": config.embedding_scale,
        "scale_depth": _near(lambda x: x / root, config.residual_scale * root, config.residual_scale),
        "dim_model_base": _near(lambda x: x / hidden, config.head_scale * hidden, config.head_scale),
    }


_OF_FAMILY: dict[str, Callable[[ModelConfig], dict[str, Any]]] = {
    "qwen2": _windows_of_qwen,
    "qwen3": _windows_of_qwen,
    "gemma3_text": _gemma3,
    "qwen3_5_text": _qwen3_5,
    "minicpm": _minicpm,
}


def _near(function: Callable[[float], float], near: float, wanted: float) -> float | int:
    """A number, whole or short if possible, with function(x) == wanted; `near` if there is none."""
    candidates = (round(near), float(f"{near:.12g}"), near, math.nextafter(near, 0), math.nextafter(near, math.inf))
    return next((x for x in candidates if x and function(x) == wanted), near)


def _has_masters(checkpoint: Checkpoint) -> bool:
    """Whether the file has full-precision masters. One matrix shows how the whole checkpoint was saved."""
    first = next((name for name in linear_names(checkpoint.config) if is_ternary(checkpoint.config, name)), None)
    return first is not None and checkpoint.master(first) is not None


def _plan_delta(checkpoint: Checkpoint, index: int) -> Iterator[PlannedTensor]:
    def log(decay: NDArray) -> NDArray:
        """The float32 whose exponential is nearest to the decay: equal, or off by its last bit. Of several with equal
        exponentials, one that a narrower dtype holds."""
        near = np.log(decay.astype(np.float64)).astype(np.float32)
        steps = np.arange(-4, 5)[:, None]
        narrow = [near.astype(dtype).astype(np.float32) for dtype in (ml_dtypes.bfloat16, np.float16)]
        candidates = np.stack([*narrow, *(near.view(np.int32) + steps.astype(np.int32)).view(np.float32)])
        closest = np.abs(np.exp(candidates) - decay).argmin(axis=0)
        return candidates[closest, np.arange(len(decay))]

    shape = checkpoint.config.delta
    assert shape is not None
    make: dict[str, Callable[[Any], NDArray]] = {"conv": lambda w: w.conv[:, None], "decay": lambda w: log(w.decay)}
    for part, size in delta_shapes(shape).items():
        stored = (size[0], 1, size[1]) if part == "conv" else size
        tensor = f"model.layers.{index}.{DELTA_ARRAYS[part].hf[0]}"
        yield PlannedTensor(tensor, "F32", stored, make.get(part, attrgetter(part)))


def _plan_linear(
    checkpoint: Checkpoint, kind: str, masters: bool, quantization: QuantizationConfig | None, name: str
) -> Iterator[PlannedTensor]:
    place, (rows, columns) = linear_place(checkpoint.config, name, "hf"), linear_shape(checkpoint.config, name)
    module = place.module
    weight = f"{module}.weight"
    if has_bias(checkpoint.config, name):
        yield PlannedTensor(f"{module}.bias", "F32", (rows,), lambda w: _scale_and_bias(quantization, w)[1])
    if not is_ternary(checkpoint.config, name):
        if name == (place.sharers or (name,))[0]:

            def array(each: str) -> NDArray:
                dense = fold(checkpoint, each, checkpoint.linear(each))
                assert isinstance(dense, DenseWeight | GroupTernaryLinear)
                return dense.array

            dtype = dtype_name(checkpoint.given_dtype(name))
            # A tensor of several linears is written with the first of them.
            yield PlannedTensor(
                weight,
                dtype,
                (place.height, columns),
                lambda w: stored_matrix(checkpoint.config, name, "hf", array) if place.sharers else w.array,
            )
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
