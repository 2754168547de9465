"""Writes a Hugging Face folder: config.json, model.safetensors and the tokenizer's files, one tensor in memory.

Ternary linears are stored exactly, as `autobitlinear`, mode "offline": "hf-packed" (2-bit planes) or "hf-bf16" (-1, 0,
+1 as floats), with a `weight_scale`. Packed planes whose scales divide (`bitlinear`) stay so in "hf-packed". Masters
stay masters in "hf-bf16", mode "online", and "hf-online" makes some where there are none (see `masters`). A BitLinear's
matrix is never written as -s, 0, +s: transformers would take its absmean, which is s times the share of non-zeros.
Matrices whose inputs stay in float are written as they are; "hf-unpacked" takes models of these alone. "mlx-2bit" and
"mlx-1bit" pack those that are ternary, or binary, by groups as mlx-lm does (see `packings`).

All floats of a file have one dtype, which config.json names: transformers leaves a quantised model's tensors in the
dtype of the file, and torch multiplies no float32 by bfloat16. It is the narrowest that changes no value (`_DTYPES`).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import lru_cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError
from ...families import family_of
from ...families.family import SIZES, LinearPlace
from ...families.groups import split_tensor
from ...families.moe import some_rows
from ...families.rope import rope_json
from ...reference.config import ModelConfig, QuantizationConfig
from ...reference.layers import Array, Floats
from ...reference.weights import LinearWeight
from ..checkpoint import (
    Checkpoint,
    Progress,
    all_linears,
    array_shape,
    has_bias,
    is_ternary,
    linear_names,
    linear_shape,
    read_part,
    scale_convention,
    write_tokenizer_files,
)
from ..names import hf_module, hf_modules
from ..packing import hf_from_ternary
from ..places import linear_place, stored_matrix
from ..planned_tensors import (
    Layout,
    Plan,
    PlannedTensor,
    cut_by_size,
    exact_dtype,
    in_one_dtype,
    layout_of,
    plan_model,
    write_parts,
)
from ..safetensors import DTYPES, SafetensorsWriter, dtype_name
from .config import parse_hf_config
from .folder import INDEX_FILE, MODULES, POOLINGS, SINGLE_FILE
from .masters import masters_of
from .packings import AffineMatrix, affine_from_groups
from .wrappers import hf_form

MLX_BITS = {"mlx-2bit": 2, "mlx-1bit": 1}
_WRAPPED_BY_MLX = ("qwen3_5_text",)  # model types that mlx-lm has inside of a vision model's alone
_NOT_IN_MLX = ("maple",)  # that it does not have
# What transformers calls the dtype of a file
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh"}  # transformers' names, where they are not ours
_SAME_NAME = (  # fields of ModelConfig whose keys have the same name
    *(*SIZES, "num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings", "bos_token_id"),
)
_SAID_ELSEWHERE = ("model_type", "quantization", "eos_token_ids", "pooling", "unit_embeddings")
_NO_SCALE = (
    "the ternary linears have biases, and no way of transformers to store them beside these planes (divided by the "
    "scale; where planes are packed, beside the scale's reciprocal) gives these"
)
_NO_NORM = "transformers stores w - 1 of each norm of this family, and no float32 gives these weights"


def write_hf(
    checkpoint: Checkpoint,
    folder: Path,
    kind: str = "hf-packed",
    progress: Progress | None = None,
    split_size: int | None = None,
) -> None:
    """Write the model into an existing, empty folder.

    kind: "hf-packed", "hf-bf16", "hf-online", "hf-unpacked", "mlx-2bit" or "mlx-1bit".
    split_size: bytes of tensors in a file, beyond which there is a further one.
    Raises ConfigError for what no Hugging Face config can say, and for an hf-packed matrix whose number of outputs is
    no multiple of 4.
    """
    config = checkpoint.config
    checkpoint.require_plain_basis("Hugging Face")
    if kind in MLX_BITS and config.quantization is not None:
        message = "MLX's packing means that activations stay floats, and here they are int8"
        message += "; convert to native, or to hf-packed, which mlx-lm reads of a BitNet"
        raise ConfigError(message, field="quantization")
    if kind in MLX_BITS and config.model_type in _NOT_IN_MLX:
        message = f"mlx-lm has no {config.model_type} model; convert to hf-unpacked or gguf-tq2_0"
        raise ConfigError(message, field="model_type")
    if kind == "hf-unpacked" and config.quantization is not None:
        message = "-s, 0, +s would be quantised once more when they are loaded; convert to native, hf-packed or hf-bf16"
        raise ConfigError(message, field="quantization")
    if kind == "hf-online" and config.quantization is None:
        raise ConfigError("the model has no BitLinears, which have masters; convert to hf-bf16", field="quantization")
    masters = kind == "hf-online" or (kind == "hf-bf16" and _has_masters(checkpoint))
    quantization = hf_quantization(checkpoint, kind, masters)
    plan_linear = partial(_plan_linear, checkpoint, kind, masters, quantization)
    is_wrapped = kind in MLX_BITS and hf_model_type(config) in _WRAPPED_BY_MLX
    adds_one = hf_form(hf_model_type(config)).norms_add_one and not is_wrapped
    norm = _norm_less_one if adds_one else np.asarray
    planned = plan_model(
        checkpoint,
        lambda name: f"{hf_modules(name, config)[0]}.weight",
        plan_linear,
        partial(_plan_array, checkpoint),
        norm,
    )
    if is_wrapped:
        planned = {name: [_move_taps(tensor) for tensor in tensors] for name, tensors in planned.items()}
    packing = _pack_for_mlx(checkpoint, planned, MLX_BITS[kind]) if kind in MLX_BITS else {}
    narrow = ["F16", "BF16"] if packing else _narrow_dtypes(checkpoint)
    dtype = exact_dtype(checkpoint, planned, narrow)
    plan = in_one_dtype(planned, dtype)
    stated = hf_config_json(config, quantization, dtype)
    text = json.dumps((_wrapper_json(stated) if is_wrapped else stated) | packing, indent=2) + "\n"
    metadata = {"format": "mlx" if packing else "pt"}
    with _write_shards(folder, layout_of(plan), metadata, split_size, has_index=bool(packing)) as write:
        write_parts(checkpoint, plan, write, progress)
    (folder / "config.json").write_text(text, encoding="utf-8")
    if config.pooling != "last":
        (folder / "1_Pooling").mkdir()
        modes = {key: mode == config.pooling for key, mode in POOLINGS.items()}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes) + "\n", encoding="utf-8")
    if not config.unit_embeddings:
        kinds = [{"type": f"sentence_transformers.models.{kind}"} for kind in MODULES if kind != "Normalize"]
        (folder / "modules.json").write_text(json.dumps(kinds) + "\n", encoding="utf-8")
    write_tokenizer_files(checkpoint, folder)


@contextmanager
def _write_shards(
    folder: Path, layout: Layout, metadata: Mapping[str, str], limit: int | None, has_index: bool
) -> Iterator[Callable[[str, Array], None]]:
    """Gives what writes a tensor: into model.safetensors or, if all are more than `limit` bytes, into one of several
    files beside their index. has_index: write the index in any case."""
    sizes = {name: math.prod(shape) * DTYPES[dtype].itemsize for name, (dtype, shape) in layout.items()}
    parts = cut_by_size(sizes, limit)
    names = [SINGLE_FILE]
    if len(parts) > 1:
        names = [f"model-{number:05}-of-{len(parts):05}.safetensors" for number in range(1, len(parts) + 1)]
    shard_of = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
    with ExitStack() as stack:
        files = {
            name: stack.enter_context(SafetensorsWriter(folder / name, {each: layout[each] for each in part}, metadata))
            for name, part in zip(names, parts, strict=True)
        }
        yield lambda tensor, array: files[shard_of[tensor]].write(tensor, array)
    if len(parts) > 1 or has_index:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(shard_of.items()))}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _wrapper_json(text: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a vision model without its tower, around that of its text model."""
    wrapper, kinds = hf_form(text["model_type"]).wrapper, text["layer_types"]
    assert wrapper is not None
    interval = kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
    if any((kind == "full_attention") != ((index + 1) % interval == 0) for index, kind in enumerate(kinds)):
        message = "mlx-lm has full attention in every n-th layer, and this model otherwise; convert to hf-unpacked"
        raise ConfigError(message, field="layer_types")
    text = {**text, "full_attention_interval": interval}
    return {"architectures": [wrapper.architecture], "model_type": wrapper.model_type, "text_config": text}


def _move_taps(tensor: PlannedTensor) -> PlannedTensor:
    """A convolution as mlx-lm stores it, which says too that the 1 of norms is added: (channels, taps, 1)."""
    if not tensor.name.endswith(".conv1d.weight"):
        return tensor
    channels, _, taps = tensor.shape
    return tensor._replace(shape=(channels, taps, 1), make=lambda part: tensor.make(part).reshape(channels, taps, 1))


def _pack_for_mlx(checkpoint: Checkpoint, plan: Plan, bits: int) -> dict[str, Any]:
    """Put packed tensors into the plan where MLX's groups hold a matrix. Returns what config.json says of them.

    Raises ConfigError where no matrix is so.
    """
    pack = lru_cache(maxsize=1)(partial(_mlx_matrix, checkpoint, bits))  # each is asked for once for each tensor
    sizes = {}
    for name in ("embedding", *all_linears(checkpoint.config)):
        place = linear_place(checkpoint.config, name, "hf")
        if place.stack:
            plan[name] = [_stack_experts(place, plan[name])]
        if not plan[name] or (packed := pack(name)) is None:
            continue
        dense = next(tensor for tensor in plan[name] if tensor.name.endswith(".weight"))
        plan[name].remove(dense)
        module = dense.name.removesuffix(".weight")
        sizes[module] = packed.group
        for field, suffix in (("words", "weight"), ("scales", "scales"), ("biases", "biases")):
            shape = *dense.shape[:-1], getattr(packed, field).shape[1]
            dtype = "U32" if field == "words" else "F32"
            make = partial(_array_of_mlx, pack, name, field, shape)
            plan[name].append(PlannedTensor(f"{module}.{suffix}", dtype, shape, make))
    if not sizes:
        words = "ternary" if bits == 2 else "binary, without zeros,"
        message = f"no matrix of this model is {words} by groups of 32, 64 or 128 inputs; convert to hf-unpacked"
        raise ConfigError(message)
    usual = Counter(sizes.values()).most_common(1)[0][0]
    others = {module: {"group_size": size, "bits": bits} for module, size in sizes.items() if size != usual}
    stated = {"group_size": usual, "bits": bits, "mode": "affine", **others}
    return {"quantization": stated, "quantization_config": stated}


def _mlx_matrix(checkpoint: Checkpoint, bits: int, name: str) -> AffineMatrix | None:
    """The tensor of a linear or "embedding" as MLX packs it; None where it cannot exactly."""
    config = checkpoint.config
    weights = {each: read_part(checkpoint, each) for each in linear_place(config, name, "hf").sharers or (name,)}
    stack = partial(stored_matrix, config, name, "hf")
    split = split_tensor(weights, stack, lambda: stack(lambda each: weights[each].array))
    return None if split is None else affine_from_groups(*split, linear_shape(config, name)[1], bits)


def _array_of_mlx(
    pack: Callable[[str], AffineMatrix | None], name: str, field: str, shape: tuple[int, ...], _: Any
) -> Array:
    array: Array = getattr(pack(name), field)
    return array.reshape(shape)


def _stack_experts(place: LinearPlace, tensors: list[PlannedTensor]) -> PlannedTensor:
    """One tensor of all experts' matrices, as mlx-lm has them in its model."""
    shape = len(place.parts), *tensors[0].shape
    return PlannedTensor(f"{place.stack}.weight", tensors[0].dtype, shape, lambda w: w.array.reshape(shape))


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
    if kind == "hf-packed" and checkpoint.kind == "hf-packed" and scale_convention(config.quantization) == "divide":
        return replace(quantization, linear_class="bitlinear")
    try:
        return _exact_for_biases(checkpoint, quantization)
    except ConfigError:
        if kind != "hf-packed":
            raise
        return _exact_for_biases(checkpoint, replace(quantization, linear_class="bitlinear"))


def _exact_for_biases(checkpoint: Checkpoint, quantization: QuantizationConfig) -> QuantizationConfig:
    """The same. Raises ConfigError for a bias that it cannot store."""
    for name in all_linears(checkpoint.config):
        if is_ternary(checkpoint.config, name) and has_bias(checkpoint.config, name):
            _scale_and_bias(quantization, checkpoint.linear(name))
    return quantization


def _scale_and_bias(quantization: QuantizationConfig | None, w: LinearWeight) -> tuple[Floats, Floats | None]:
    """(weight_scale, bias) from which a reader computes exactly the scale and the bias of `w`. Raises ConfigError."""
    ternary, bias = w.bit_linear, w.bias
    scale = np.array([1 if ternary is None else ternary.w_dequant_scale], np.float32)
    convention = None if ternary is None else scale_convention(quantization)
    if convention == "divide":
        return _solve(lambda x: np.float32(1.0) / x, np.float32(1.0) / scale, scale), bias
    if convention == "multiply" and bias is not None:
        return scale, _solve(lambda x: x * scale, bias / scale, bias)
    return scale, bias


def _norm_less_one(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """What a family that multiplies by 1 + w stores. Raises ConfigError where no float32 gives the weight."""
    return _solve(lambda x: x + np.float32(1.0), weight - np.float32(1.0), weight, _NO_NORM)


def _solve(
    function: Callable[[Array], Array],
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
    """The model type of transformers' class that computes the model. ConfigError where no class does."""
    form = family_of(config).hf
    if form is None:
        message = f"config.json has no words for a {config.model_type} model; convert to native instead"
        raise ConfigError(message, field="model_type")
    return family_of(config).model_type if form.class_of is None else form.class_of(config)


def hf_config_json(config: ModelConfig, quantization: QuantizationConfig | None, dtype: str) -> dict[str, Any]:
    """The config.json that `parse_hf_config` and transformers read back as `config`.

    dtype: of the file's floats, "BF16", "F16" or "F32". transformers 5 reads "dtype", older ones "torch_dtype".
    Raises ConfigError for a combination that no model class of transformers has.
    """
    model_type = hf_model_type(config)
    form = hf_form(model_type)
    out: dict[str, Any] = {"architectures": [form.architecture], "model_type": model_type}
    out |= {name: getattr(config, name) for name in _SAME_NAME}
    out |= {
        form.activation_key: _ACTIVATIONS.get(config.activation, config.activation),
        "rms_norm_eps": config.norm_eps,
        "eos_token_id": config.eos_token_ids[0] if len(config.eos_token_ids) == 1 else list(config.eos_token_ids),
        "rope_theta": config.rope.theta,
        "dtype": _DTYPES[dtype],
        "torch_dtype": _DTYPES[dtype],
    }
    if config.rope.rope_type != "default":
        out["rope_scaling"] = rope_json(config.rope)
    out |= {field: getattr(config, field) for field in form.flags} | form.write(config)
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


def _has_masters(checkpoint: Checkpoint) -> bool:
    """Whether the file has full-precision masters. One matrix shows how the whole checkpoint was saved."""
    first = next((name for name in linear_names(checkpoint.config) if is_ternary(checkpoint.config, name)), None)
    return first is not None and checkpoint.master(first) is not None


def _plan_array(checkpoint: Checkpoint, name: str) -> PlannedTensor:
    config, (_, layer, part) = checkpoint.config, name.split(".", 2)
    form, shape = family_of(config).arrays[part], array_shape(config, name)
    tensor = f"model.layers.{layer}.{form.hf}"
    return PlannedTensor(tensor, "F32", form.hf_shape(shape), lambda array: form.to_hf(config, int(layer), array))


def _plan_parts(checkpoint: Checkpoint, place: LinearPlace, name: str) -> Iterator[PlannedTensor]:
    """A dense linear whose rows are in several tensors."""
    height, columns = place.height // len(place.parts), linear_shape(checkpoint.config, name)[1]
    dtype = dtype_name(checkpoint.given_dtype(name))
    for number, module in enumerate(place.parts):
        rows = slice(number * height, (number + 1) * height)
        array = partial(lambda w, rows: some_rows(w, rows).array, rows=rows)
        yield PlannedTensor(f"{module}.weight", dtype, (height, columns), array)


def _plan_linear(
    checkpoint: Checkpoint, kind: str, masters: bool, quantization: QuantizationConfig | None, name: str
) -> Iterator[PlannedTensor]:
    config = checkpoint.config
    place, (rows, columns) = linear_place(config, name, "hf"), linear_shape(config, name)
    module = place.module
    weight = f"{module}.weight"
    if has_bias(config, name):
        yield PlannedTensor(f"{module}.bias", "F32", (rows,), lambda w: _scale_and_bias(quantization, w)[1])
    if not is_ternary(config, name):
        if place.parts:
            yield from _plan_parts(checkpoint, place, name)
        elif name == (place.sharers or (name,))[0]:  # a tensor of several linears is written with the first of them
            dtype = dtype_name(checkpoint.given_dtype(name))
            stored = partial(stored_matrix, config, name, "hf", lambda each: read_part(checkpoint, each).array)
            array = (lambda w: stored()) if place.sharers else attrgetter("array")
            yield PlannedTensor(weight, dtype, (place.height, columns), array)
        return
    if checkpoint.input_norm_eps is not None:
        yield PlannedTensor(f"{module}.rms_norm.weight", "F32", (columns,), lambda w: w.norm.weight)
    if masters:
        master = checkpoint.master(name)
        if master is None and kind == "hf-online":

            def master_of(w: Any) -> Floats:
                return masters_of(name, w.bit_linear.ternary(), w.bit_linear.w_dequant_scale)

            yield PlannedTensor(weight, "BF16", (rows, columns), master_of)
            return
        if master is None:
            raise ConfigError(f"{name} is ternary already, and other linears are full-precision masters")
        yield PlannedTensor(weight, dtype_name(master.dtype), (rows, columns), lambda w: checkpoint.master(name))
        return
    yield PlannedTensor(f"{module}.weight_scale", "F32", (1,), lambda w: _scale_and_bias(quantization, w)[0])
    if kind == "hf-bf16":
        yield PlannedTensor(
            weight, "BF16", (rows, columns), lambda w: w.bit_linear.ternary().astype(ml_dtypes.bfloat16)
        )
    elif rows % 4:
        message = f"{name} has {rows} outputs, and packed rows come in fours; convert to hf-bf16 or native instead"
        raise ConfigError(message)
    else:
        yield PlannedTensor(weight, "U8", (rows // 4, columns), lambda w: hf_from_ternary(w.bit_linear.ternary()))
