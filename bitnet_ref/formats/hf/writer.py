"""Writing a Hugging Face folder: config.json, model.safetensors and the tokenizer's files, one tensor in memory.

Two ways to store ternary linears, both exact and both what transformers loads as `autobitlinear`, mode "offline":
"hf-packed" (2-bit planes) and "hf-bf16" (-1, 0, +1 as bfloat16), with `weight_scale` as float32. Full-precision masters
stay masters in "hf-bf16", mode "online". Never is a ternary matrix written as -s, 0, +s for mode "online":
transformers would take its absmean and get s times the share of non-zeros.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError
from ...reference.config import ModelConfig, QuantizationConfig, RopeConfig
from ...reference.weights import DenseWeight, LinearWeight, TernaryLinear
from ..checkpoint import (
    Checkpoint,
    Progress,
    all_linears,
    has_bias,
    hf_module,
    is_ternary,
    linear_names,
    linear_shape,
    norm_sizes,
)
from ..packing import hf_from_ternary
from ..safetensors import SafetensorsWriter, dtype_name
from .folder import SINGLE_FILE, hf_norm_names

Layout = dict[str, tuple[str, tuple[int, ...]]]


def write_hf(checkpoint: Checkpoint, folder: Path, kind: str = "hf-packed", progress: Progress | None = None) -> None:
    """Write the model into an existing, empty folder.   kind: "hf-packed" or "hf-bf16"

    Raises ConfigError for what no Hugging Face config can say, or (hf-packed) a ternary matrix whose number of outputs
    is no multiple of 4.
    """
    config = checkpoint.config
    masters = kind == "hf-bf16" and _has_masters(checkpoint)
    written = hf_quantization(checkpoint, masters)
    layout = _layout(checkpoint, kind, masters, written)
    tensors = _tensors(checkpoint, kind, masters, written)
    with SafetensorsWriter(folder / SINGLE_FILE, layout, {"format": "pt"}) as writer:
        for done, (name, array) in enumerate(tensors, 1):
            writer.write(name, array)
            if progress is not None:
                progress(done, len(layout))
    (folder / "config.json").write_text(json.dumps(hf_config_json(config, written), indent=2) + "\n", encoding="utf-8")
    for name, data in checkpoint.tokenizer_files().items():
        (folder / name).write_bytes(data)


def hf_quantization(checkpoint: Checkpoint, masters: bool) -> QuantizationConfig | None:
    """How the folder stores its ternary linears."""
    config = checkpoint.config
    if config.quantization is None:
        return None
    skipped = [hf_module(name) for name in all_linears(config) if not is_ternary(config, name)]
    return replace(
        config.quantization,
        linear_class="autobitlinear" if masters else _linear_class(checkpoint),
        quantization_mode="online" if masters else "offline",
        modules_to_not_convert=tuple(skipped + ["lm_head"] * config.tie_word_embeddings),
    )


def _linear_class(checkpoint: Checkpoint) -> str:
    """ "autobitlinear", which stores the scale itself; unless a bias, which it stores divided by the scale, forbids."""
    config = checkpoint.config
    biased = [name for name in all_linears(config) if is_ternary(config, name) and has_bias(config, name)]
    for linear_class in ("autobitlinear", "bitlinear") if biased else ():
        if all(_stored(linear_class, checkpoint.linear(name)) is not None for name in biased):
            return linear_class
    if biased:
        raise ConfigError(
            "the ternary linears have biases, and neither of transformers' two ways to store them (divided by the "
            "scale; beside the scale's reciprocal) gives these exactly; convert to native instead"
        )
    return "autobitlinear"


def _stored(linear_class: str, w: LinearWeight) -> tuple[NDArray[np.float32], NDArray[np.float32] | None] | None:
    """(weight_scale, bias) from which a reader makes exactly this scale and this bias; None: there are none."""
    assert isinstance(w, TernaryLinear)
    scale, bias = np.array([w.w_dequant_scale], np.float32), w.bias
    if linear_class == "bitlinear":
        reciprocal = _solve(lambda x: np.float32(1.0) / x, np.float32(1.0) / scale, scale)
        return None if reciprocal is None else (reciprocal, bias)
    if bias is None:
        return scale, None
    quotient = _solve(lambda x: x * scale, bias / scale, bias)
    return None if quotient is None else (scale, quotient)


def _solve(
    function: Callable[[NDArray], NDArray], near: NDArray[np.float32], wanted: NDArray[np.float32]
) -> NDArray[np.float32] | None:
    """x, elementwise `near` or a neighbour of it, with function(x) == wanted to the bit; None: there is none."""
    out, found = near.copy(), np.zeros(near.shape, np.bool_)
    for x in (near, np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf))):
        hit = ~found & (function(x) == wanted)
        out[hit], found = x[hit], found | hit
    return out if found.all() else None


def hf_config_json(config: ModelConfig, quantization: QuantizationConfig | None) -> dict[str, Any]:
    """The config.json that `hf_config.parse_hf_config` and transformers read back as `config`.

    Raises ConfigError for a combination that no model class of transformers has.
    """
    model_type = "bitnet" if config.sub_norms else ("mistral" if config.sliding_window is not None else "llama")
    if not config.sub_norms and config.model_type == "mistral":
        model_type = "mistral"
    classes = {"attention_bias": ("llama", "bitnet"), "mlp_bias": ("llama",), "sliding_window": ("mistral",)}
    for flag, allowed in classes.items():
        if getattr(config, flag) and model_type not in allowed:
            raise ConfigError(f"no {model_type} model of transformers has it; convert to another format", field=flag)
    architecture = {"bitnet": "BitNet", "llama": "Llama", "mistral": "Mistral"}[model_type]
    out: dict[str, Any] = {"architectures": [f"{architecture}ForCausalLM"], "model_type": model_type}
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        out[name] = getattr(config, name)
    out |= {
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.activation,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids[0] if len(config.eos_token_ids) == 1 else list(config.eos_token_ids),
        "rope_theta": config.rope.theta,
        "torch_dtype": "bfloat16",
    }
    if config.rope.rope_type != "default":
        out["rope_scaling"] = _rope_scaling(config.rope)
    if model_type == "llama":
        out["mlp_bias"] = config.mlp_bias
    if model_type == "mistral":
        out["sliding_window"] = config.sliding_window
    if quantization is not None:
        out["quantization_config"] = {
            "quant_method": "bitnet",
            "linear_class": quantization.linear_class,
            "quantization_mode": quantization.quantization_mode,
            "modules_to_not_convert": list(quantization.modules_to_not_convert),
            "use_rms_norm": quantization.use_rms_norm,
            "rms_norm_eps": quantization.rms_norm_eps,
        }
    return out


def _rope_scaling(rope: RopeConfig) -> dict[str, Any]:
    used = {
        "linear": ("factor",),
        "dynamic": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "yarn": (
            *("factor", "beta_fast", "beta_slow", "attention_factor", "truncate"),
            "original_max_position_embeddings",
        ),
    }[rope.rope_type]
    return {"rope_type": rope.rope_type} | {name: getattr(rope, name) for name in used}


def _has_masters(checkpoint: Checkpoint) -> bool:
    """Whether the file has full-precision masters; one matrix tells how a whole checkpoint was saved."""
    first = next((name for name in linear_names(checkpoint.config) if is_ternary(checkpoint.config, name)), None)
    return first is not None and checkpoint.master(first) is not None


def _layout(checkpoint: Checkpoint, kind: str, masters: bool, written: QuantizationConfig | None) -> Layout:
    """Every tensor of the file to be, from the configuration alone."""
    config = checkpoint.config
    layout: Layout = {hf_norm_names(name)[0]: ("F32", (size,)) for name, size in norm_sizes(config).items()}
    stored = dtype_name(checkpoint.dense_dtype("embedding"))
    layout["model.embed_tokens.weight"] = stored, (config.vocab_size, config.hidden_size)
    for name in all_linears(config):
        module, (rows, columns) = hf_module(name), linear_shape(config, name)
        if has_bias(config, name):
            layout[f"{module}.bias"] = "F32", (rows,)
        if not is_ternary(config, name):
            layout[f"{module}.weight"] = dtype_name(checkpoint.dense_dtype(name)), (rows, columns)
            continue
        if masters:
            master = checkpoint.master(name)
            layout[f"{module}.weight"] = dtype_name(master.dtype if master is not None else _BF16), (rows, columns)
        elif kind == "hf-packed":
            if rows % 4:
                raise ConfigError(
                    f"{name} has {rows} outputs, and packed rows come in fours; convert to hf-bf16 or native instead"
                )
            layout[f"{module}.weight"] = "U8", (rows // 4, columns)
        else:
            layout[f"{module}.weight"] = "BF16", (rows, columns)
        if not masters:
            layout[f"{module}.weight_scale"] = "F32", (1,)
        if written is not None and written.use_rms_norm:
            layout[f"{module}.rms_norm.weight"] = "F32", (columns,)
    return layout


_BF16 = np.dtype(ml_dtypes.bfloat16)


def _tensors(
    checkpoint: Checkpoint, kind: str, masters: bool, written: QuantizationConfig | None
) -> Iterator[tuple[str, NDArray]]:
    """(name, array) of every tensor of the layout, in the order of the model."""
    config = checkpoint.config
    embedding = checkpoint.embedding()
    yield "model.embed_tokens.weight", embedding.array
    if config.tie_word_embeddings:
        checkpoint.tied_head(embedding)
    del embedding
    for name in norm_sizes(config):
        yield hf_norm_names(name)[0], checkpoint.norm(name)
    for name in all_linears(config):
        module, weight = hf_module(name), checkpoint.linear(name)
        if isinstance(weight, DenseWeight):
            yield f"{module}.weight", weight.array
            if weight.bias is not None:
                yield f"{module}.bias", weight.bias
            continue
        assert isinstance(weight, TernaryLinear)
        assert written is not None
        if weight.input_norm is not None:
            yield f"{module}.rms_norm.weight", weight.input_norm.weight
        if masters:
            master = checkpoint.master(name)
            if master is None:
                raise ConfigError(f"{name} is ternary already, and other linears are full-precision masters")
            yield f"{module}.weight", master
            if weight.bias is not None:
                yield f"{module}.bias", weight.bias
            continue
        w_t = weight.ternary()
        yield f"{module}.weight", hf_from_ternary(w_t) if kind == "hf-packed" else w_t.astype(_BF16)
        stored = _stored(written.linear_class, weight)
        assert stored is not None
        yield f"{module}.weight_scale", stored[0]
        if stored[1] is not None:
            yield f"{module}.bias", stored[1]
    checkpoint.finish()
