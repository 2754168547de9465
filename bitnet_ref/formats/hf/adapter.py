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
from numpy.typing import NDArray

from ...errors import ConfigError, ConfigWarning, FormatError, describe, printable
from ...families.family import LinearPlace
from ...families.lora import LoraTerm
from ...reference.config import ModelConfig
from ...reference.weights import linear_name
from ...system.json_file import is_present, read_json_object
from ...system.sharing import folder_of
from ..binary_file import find_not_finite
from ..checkpoint import EMBEDDING_FILES, linear_shape
from ..names import HF_PREFIXES, is_simple_pattern, pattern_error
from ..places import linear_place
from ..safetensors import SafetensorsFile
from .config_keys import is_off
from .wrappers import hf_form

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
_PREFIXES = "|".join(map(re.escape, HF_PREFIXES))
_MODULE = re.compile(rf"(?:{_PREFIXES})(layers\.([0-9]{{1,18}})\..+)")
# Ways to begin (init_lora_weights) that subtract the first B A from the matrix, so the adapter is for another base
_CHANGE_THE_BASE = ("corda", "loftq", "lora_ga", "olora", "pissa")
MAX_PATTERNS = 64  # of modules' names


def find_adapter(path: Path, asked: str | os.PathLike[str] | None) -> tuple[Path | str, Path | None]:
    """(the model, the folder of the adapter to put on it) of a path that `load` was given.

    asked: `LoadOptions.adapter`. The model may be the name that an adapter has for its base. What lies beside a .gguf,
    an .onnx or a native file is not meant for it. Raises FormatError, ConfigError.
    """
    folder = folder_of(path)
    if asked is not None and os.fspath(asked) != NO_ADAPTER:
        own = folder_of(Path(asked))
        if not is_present(own / CONFIG_FILE):
            raise FormatError(f"there is no {CONFIG_FILE}, as an adapter of peft has it", path=asked)
        return path, own
    if is_present(path / CONFIG_FILE) and not is_present(path / "config.json"):  # an adapter and no model
        if asked is not None:
            raise FormatError("is an adapter without a model; give its base to load that alone", path=path)
        return _base_of(path), path
    is_folders = path.is_dir() or (path.suffix == ".safetensors" and not path.name.endswith(".bitnet.safetensors"))
    beside = asked is None and is_folders and any(is_present(folder / name) for name in ADAPTER_FILES)
    return path, folder if beside else None


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
    """The files that decide what an adapter is, and those of sentence-transformers beside them."""
    beside = [folder / name for name in EMBEDDING_FILES if is_present(folder / name)]
    return [folder / CONFIG_FILE, folder / WEIGHTS_FILE, *beside]


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
    ranks = _Values(raw, "r", "rank_pattern", path)
    alphas = _Values(raw, "lora_alpha", "alpha_pattern", path)
    terms: dict[str, LoraTerm] = {}
    with SafetensorsFile(folder / WEIGHTS_FILE, folder) as file:
        parts: dict[str, dict[str, str]] = {}
        for tensor in file.tensors:
            match = _TENSOR.fullmatch(tensor)
            if match is None:
                message = f"is no term of a linear, base_model.model.<module>.lora_A.weight or lora_B: {_what(tensor)}"
                raise FormatError(message, path=file.path, field=tensor)
            parts.setdefault(match[1], {})[match[2]] = tensor
        unused = [module for module in parts if module.startswith(hf_form(config.model_type).left_out)]
        for module, names in parts.items():
            if module in unused:
                continue
            places = _places_of(module, config)
            if not places:
                first = next(iter(names.values()))
                message = f"{module} is no linear with a tensor of its own in this {config.model_type} model"
                raise FormatError(message, path=file.path, field=first)
            shape = next(iter(places.values())).height, linear_shape(config, next(iter(places)))[1]
            a, b = _read_factors(file, names, ranks.of(module), shape)
            factor = alphas.of(module) / (len(a) ** 0.5 if raw.get("use_rslora") else len(a))
            for linear, place in places.items():
                columns = a if place.columns is None else a[:, place.columns]
                terms[linear] = LoraTerm(columns, b if place.rows is None else b[place.rows], factor)
    if not terms:
        raise FormatError("holds no tensor" if not unused else "holds no term of the text model", path=file.path)
    if unused:
        words = f"{file.path}: {len(unused)} terms of modules that text does not need are left out ({unused[0]}, ...)"
        warnings.warn(printable(words, keep=""), ConfigWarning, stacklevel=3)
    return terms


def describe_adapter(folder: Path, terms: Mapping[str, LoraTerm]) -> str:
    """A sentence about an adapter that is applied."""
    kinds = sorted({name.rpartition(".")[2] for name in terms})
    ranks = sorted({len(term.a) for term in terms.values()})
    return (
        f"LoRA adapter {folder.name}: rank {' and '.join(map(str, ranks))} on {len(terms)} linears ({', '.join(kinds)})"
    )


def _what(tensor: str) -> str:
    kinds = {
        "base_layer.": "the matrix itself, which peft saves beside an adapter of the head or the embedding",
        "lora_magnitude_vector": "DoRA's magnitudes",
        "lora_embedding_": "a term of an embedding",
    }
    return next((words for part, words in kinds.items() if part in tensor), "it is not supported")


def _check(raw: Mapping[str, Any], path: Path) -> None:
    """ConfigError for an adapter of another function."""
    if "peft_type" not in raw and {"fine_tune_type", "lora_parameters"} & raw.keys():
        raise ConfigError("is absent: an adapter of mlx-lm, which is not read", path=path, field="peft_type")
    if raw.get("peft_type") != "LORA":
        raise ConfigError(f'expected "LORA", got {describe(raw.get("peft_type"))}', path=path, field="peft_type")
    for key, meaning in OTHER_FUNCTION.items():
        if not is_off(raw.get(key)) and raw[key] != "none":
            message = f"{describe(raw[key])} means that {meaning}, which is not done"
            raise ConfigError(message, path=path, field=key)
    begun = raw.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGE_THE_BASE):
        message = f"{describe(begun)} means that the model's matrices were changed before it was trained; convert it"
        message = f"{message} to LoRA (peft: save_pretrained with path_initial_model_for_weight_conversion)"
        raise ConfigError(message, path=path, field="init_lora_weights")
    known = {*OTHER_FUNCTION, *_WITHOUT_EFFECT, *_READ}
    if unknown := [key[:100] for key in raw if key not in known and not is_off(raw[key])]:
        words = f"{path}: {', '.join(unknown[:6])}: ignored; no LoRA known here has it"
        warnings.warn(printable(words, keep=""), ConfigWarning, stacklevel=4)


def _places_of(module: str, config: ModelConfig) -> dict[str, LinearPlace]:
    """Our names of the linears that a module holds, and where: one of its own, or several that share its tensor."""
    if module == "lm_head":
        return {} if config.tie_word_embeddings else {module: linear_place(config, module, "hf")}
    match = _MODULE.fullmatch(module)
    if match is None or (layer := int(match[2])) >= config.num_hidden_layers:
        return {}
    names = (linear_name(layer, short) for short in config.linear_shapes(layer))
    places = {name: linear_place(config, name, "hf") for name in names}
    own = f"model.{match[1]}"
    return {name: place for name, place in places.items() if place.module == own and not place.parts}


def _read_factors(
    file: SafetensorsFile, names: Mapping[str, str], rank: float, shape: tuple[int, int]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """A (r, n_in) and B (n_out, r) of a module of shape (n_out, n_in)."""
    if set(names) != {"A", "B"}:
        message = f"has no lora_{'B' if 'A' in names else 'A'} beside it"
        raise FormatError(message, path=file.path, field=next(iter(names.values())))
    n_out, n_in = shape
    arrays = {}
    for letter, expected in (("A", (int(rank), n_in)), ("B", (n_out, int(rank)))):
        info = file.tensors[names[letter]]
        if info.shape != expected or info.dtype not in ("F32", "BF16", "F16"):
            message = f"expected floats of shape {list(expected)}, got {info.dtype} of shape {list(info.shape)}"
            raise FormatError(message, path=file.path, offset=info.offset, field=names[letter])
        array = file.read(names[letter])
        if problem := find_not_finite(array):
            raise FormatError(problem, path=file.path, offset=info.offset, field=names[letter])
        arrays[letter] = array.astype(np.float32)
    return arrays["A"], arrays["B"]


class _Values:
    """A number for every module: of the first pattern that is, after a dot, the end of its name; else the one for all.

    Source: peft's get_pattern_key.
    """

    def __init__(self, raw: Mapping[str, Any], key: str, pattern_key: str, path: Path) -> None:
        self.raw, self.path = raw, path
        self.key, self.pattern_key = key, pattern_key
        given = raw.get(pattern_key) or {}
        if not isinstance(given, dict):
            raise ConfigError(f"expected an object, got {describe(given)}", path=path, field=pattern_key)
        self.values: dict[str, Any] = given
        self.order = {pattern: number for number, pattern in enumerate(given)}
        self.plain = {pattern for pattern in given if re.fullmatch(r"[A-Za-z0-9_.]+", pattern)}
        self.others = {pattern: self._compile(pattern) for pattern in given if pattern not in self.plain}
        if len(self.others) > MAX_PATTERNS:
            message = f"expected at most {MAX_PATTERNS} patterns that are no names, got {len(self.others)}"
            raise ConfigError(message, path=path, field=pattern_key)

    def of(self, module: str) -> float:
        """The value of a module, above 0; ranks are whole numbers. Raises ConfigError."""
        value, field = self.raw.get(self.key), self.key
        words = module.split(".")
        ends = {".".join(words[start:]) for start in range(len(words))} & self.plain
        ends |= {pattern for pattern, compiled in self.others.items() if compiled.match(module)}
        if ends:
            first = min(ends, key=self.order.__getitem__)
            value, field = self.values[first], f"{self.pattern_key}.{first}"
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
            message = f"expected a number above 0 and below 1e6, got {describe(value)}"
            raise ConfigError(message, path=self.path, field=field)
        if self.key == "r" and value != int(value):
            raise ConfigError(f"expected a whole number, got {value}", path=self.path, field="r")
        return float(value)

    def _compile(self, pattern: str) -> re.Pattern[str]:
        if is_simple_pattern(pattern):
            return re.compile(rf"(?:.*\.)?(?:{pattern})$")
        raise pattern_error(pattern, self.pattern_key, self.path)
