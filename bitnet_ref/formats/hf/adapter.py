"""A LoRA adapter in a folder, as peft writes it: adapter_config.json and adapter_model.safetensors.

It lies beside the weights of a model, and is applied to these whatever base it names, as transformers does; or alone,
and then the base that it names is loaded.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ConfigError, ConfigWarning, FormatError, describe, printable
from ...families.lora import LoraTerm
from ...reference.config import ModelConfig
from ...system.json_file import is_present, read_json_object
from ..binary_file import first_not_finite
from ..checkpoint import linear_shape
from ..names import linear_of_hf
from ..places import linear_place
from ..safetensors import SafetensorsFile
from .config_keys import is_off

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE, "adapter_model.bin")
NO_ADAPTER = "none"
MAX_CONFIG_BYTES = 1 << 20

# Keys of another function than c B (A x), and what they mean
OTHER_FUNCTION = {
    "alora_invocation_tokens": "the adapter acts after certain tokens only",
    "arrow_config": "adapters are chosen token by token",
    "bias": "biases were trained as well",
    "fan_in_fan_out": "matrices are transposed",
    "kasa_config": "the term has a diagonal matrix as well",
    "layer_replication": "layers are repeated",
    "lora_bias": "B has a bias",
    "modules_to_save": "whole modules were trained as well",
    "monteclora_config": "the term is drawn at random",
    "target_parameters": "parameters that are no linears were trained",
    "trainable_token_indices": "rows of the embedding were trained",
    "use_bdlora": "A and B are block-diagonal (BD-LoRA)",
    "use_dora": "the norm of each column was trained (DoRA)",
    "use_qalora": "inputs are averaged first (QA-LoRA)",
    "velora_config": "activations are compressed",
}
# Keys that decide how it was trained, or to what: the tensors themselves say that
_WITHOUT_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config"),
    *("exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform"),
    *("loftq_config", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_type"),
    *("peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type"),
}
_READ = {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")


def is_adapter_alone(path: Path) -> bool:
    """Whether a folder holds an adapter and no model."""
    return is_present(path / CONFIG_FILE) and not is_present(path / "config.json")


def find_adapter(path: Path, asked: str | os.PathLike[str] | None) -> tuple[Path | str, Path | None]:
    """(the model, the folder of the adapter to put on it) of a path that `load` was given.

    asked: `LoadOptions.adapter`. The model may be the name that an adapter has for its base. What lies beside a .gguf,
    an .onnx or a native file is not meant for it. Raises FormatError, ConfigError.
    """
    folder = path if path.is_dir() else path.parent
    if asked is not None and os.fspath(asked) != NO_ADAPTER:
        return path, _folder_of(Path(asked))
    if is_adapter_alone(path):
        if asked is not None:
            raise FormatError("is an adapter without a model; give its base to load that alone", path=path)
        return _base_of(path), path
    is_folders = path.is_dir() or (path.suffix == ".safetensors" and not path.name.endswith(".bitnet.safetensors"))
    beside = asked is None and is_folders and any(is_present(folder / name) for name in ADAPTER_FILES)
    return path, folder if beside else None


def _folder_of(path: Path) -> Path:
    folder = path if path.is_dir() else path.parent
    if not is_present(folder / CONFIG_FILE):
        raise FormatError(f"there is no {CONFIG_FILE}, as an adapter of peft has it", path=path)
    return folder


def _base_of(folder: Path) -> Path | str:
    """The base that an adapter names: a path, as it is or below the adapter's folder, or a model's name."""
    config = folder / CONFIG_FILE
    named = read_json_object(config, ConfigError, MAX_CONFIG_BYTES, folder).get("base_model_name_or_path")
    if not isinstance(named, str) or not named or "\0" in named:
        message = f"expected the name or path of the model that the adapter is for, got {describe(named)}"
        raise ConfigError(message, path=config, field="base_model_name_or_path")
    near = folder / named
    return near if not Path(named).is_absolute() and near.exists() else named


def adapter_files(folder: Path) -> list[Path]:
    """The files that decide what an adapter is."""
    return [folder / CONFIG_FILE, folder / WEIGHTS_FILE]


def read_adapter(folder: Path, config: ModelConfig) -> dict[str, LoraTerm]:
    """Our names of linears -> their terms, for a model of that config. Raises ConfigError, FormatError."""
    path = folder / CONFIG_FILE
    if not is_present(path):
        message = f"there is no {CONFIG_FILE} beside the adapter's weights, which says by what they are multiplied"
        raise FormatError(message, path=folder)
    raw = read_json_object(path, ConfigError, MAX_CONFIG_BYTES, folder)
    _check(raw, path)
    if not is_present(folder / WEIGHTS_FILE):
        pickled = is_present(folder / "adapter_model.bin")
        hint = "; adapter_model.bin is a pickle, which runs code and is not read" if pickled else ""
        raise FormatError(f"there is no {WEIGHTS_FILE}{hint}", path=folder)
    terms: dict[str, LoraTerm] = {}
    with SafetensorsFile(folder / WEIGHTS_FILE, folder) as file:
        parts: dict[str, dict[str, str]] = {}
        for tensor in file.tensors:
            match = _TENSOR.fullmatch(tensor)
            if match is None:
                message = f"is no term of a linear, base_model.model.<module>.lora_A.weight or lora_B: {_what(tensor)}"
                raise FormatError(message, path=file.path, field=tensor)
            parts.setdefault(match[1], {})[match[2]] = tensor
        for module, names in parts.items():
            linear = _linear_of(module, config)
            if linear is None:
                first = next(iter(names.values()))
                message = f"{module} is no linear with a tensor of its own in this {config.model_type} model"
                raise FormatError(message, path=file.path, field=first)
            terms[linear] = _read_term(file, module, names, raw, linear_shape(config, linear), path)
    if not terms:
        raise FormatError("holds no tensor", path=folder / WEIGHTS_FILE)
    return terms


def describe_adapter(folder: Path, terms: Mapping[str, LoraTerm]) -> str:
    """A sentence about an adapter that is applied."""
    kinds = sorted({name.rpartition(".")[2] for name in terms})
    ranks = sorted({len(term.a) for term in terms.values()})
    return (
        f"LoRA adapter {folder.name}: rank {' and '.join(map(str, ranks))} on {len(terms)} linears ({', '.join(kinds)})"
    )


def _what(tensor: str) -> str:
    kinds = {"lora_magnitude_vector": "DoRA's magnitudes", "lora_embedding_": "a term of an embedding"}
    return next((words for part, words in kinds.items() if part in tensor), "it is not supported")


def _check(raw: Mapping[str, Any], path: Path) -> None:
    """ConfigError for an adapter of another function."""
    if raw.get("peft_type") != "LORA":
        raise ConfigError(f'expected "LORA", got {describe(raw.get("peft_type"))}', path=path, field="peft_type")
    for key, meaning in OTHER_FUNCTION.items():
        if not is_off(raw.get(key)) and raw[key] != "none":
            message = f"{describe(raw[key])} means that {meaning}, which is not done"
            raise ConfigError(message, path=path, field=key)
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = raw.get(key) or {}
        if not isinstance(patterns, dict):
            raise ConfigError(f"expected an object, got {describe(patterns)}", path=path, field=key)
        for ending in patterns:
            if not re.fullmatch(r"[A-Za-z0-9_.]+", ending):
                message = f"expected the ends of modules' names, got {describe(ending)}: others are not supported"
                raise ConfigError(message, path=path, field=key)
    known = {*OTHER_FUNCTION, *_WITHOUT_EFFECT, *_READ}
    if unknown := [key[:100] for key in raw if key not in known and not is_off(raw[key])]:
        words = f"{path}: {', '.join(unknown[:6])}: ignored; no LoRA known here has it"
        warnings.warn(printable(words, keep=""), ConfigWarning, stacklevel=4)


def _linear_of(module: str, config: ModelConfig) -> str | None:
    """Our name of a module that is one of the model's linears, with a tensor of its own."""
    if module == "lm_head":
        return None if config.tie_word_embeddings else module
    name = linear_of_hf(f"{module}.weight")
    if name is None:
        return None
    layer, short = int(name.split(".")[1]), name.rpartition(".")[2]
    if layer >= config.num_hidden_layers or short not in config.linear_shapes(layer):
        return None
    place = linear_place(config, name, "hf")
    whole = place.rows is None and place.columns is None and not place.parts
    return name if whole and place.module.endswith(module.rpartition(".layers.")[2]) else None


def _read_term(
    file: SafetensorsFile,
    module: str,
    names: Mapping[str, str],
    raw: Mapping[str, Any],
    shape: tuple[int, int],
    path: Path,
) -> LoraTerm:
    if set(names) != {"A", "B"}:
        message = f"has no lora_{'B' if 'A' in names else 'A'} beside it"
        raise FormatError(message, path=file.path, field=next(iter(names.values())))
    rank = _of_module(raw, "rank_pattern", "r", module, path)
    alpha = _of_module(raw, "alpha_pattern", "lora_alpha", module, path)
    if rank != int(rank):
        raise ConfigError(f"expected a whole number, got {rank}", path=path, field="r")
    n_out, n_in = shape
    arrays = {}
    for letter, expected in (("A", (int(rank), n_in)), ("B", (n_out, int(rank)))):
        info = file.tensors[names[letter]]
        if info.shape != expected or info.dtype not in ("F32", "BF16", "F16"):
            message = f"expected floats of shape {list(expected)}, got {info.dtype} of shape {list(info.shape)}"
            raise FormatError(message, path=file.path, offset=info.offset, field=names[letter])
        array = file.read(names[letter])
        if (bad := first_not_finite(array)) is not None:
            message = f"holds {bad[1]} at index {bad[0]}; expected finite numbers"
            raise FormatError(message, path=file.path, offset=info.offset, field=names[letter])
        arrays[letter] = array.astype(np.float32)
    return LoraTerm(arrays["A"], arrays["B"], alpha / (rank**0.5 if raw.get("use_rslora") else rank))


def _of_module(raw: Mapping[str, Any], pattern: str, key: str, module: str, path: Path) -> float:
    """The value of a module: of the first pattern that is the end of its name, else the one for all."""
    patterns = raw.get(pattern) or {}
    value, field = raw.get(key), key
    words = module.split(".")
    endings = {".".join(words[start:]) for start in range(len(words))}
    if endings & patterns.keys():  # else the patterns, which may be many, are not gone through
        ending = next(each for each in patterns if each in endings)
        value, field = patterns[ending], f"{pattern}.{ending}"
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise ConfigError(f"expected a number above 0 and below 1e6, got {describe(value)}", path=path, field=field)
    return float(value)
