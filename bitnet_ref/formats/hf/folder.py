"""A Hugging Face folder: config.json, and model.safetensors or the shards that its index lists.

Every tensor is checked as it is read: present, of the right shape and dtype, finite, without invalid ternary codes.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, ConfigWarning, FormatError, TokenizerError, describe, printable
from ...families import family_of
from ...families.family import LinearPlace
from ...families.linear_norms import put_norm
from ...families.moe import stack_rows
from ...reference import quantization
from ...reference.config import ModelConfig, QuantizationConfig
from ...reference.layers import Array, Floats
from ...reference.weights import DenseWeight, LinearWeight, TernaryWeight
from ...system.json_file import is_present, parse_json_object, read_bounded, read_json_object, stays_inside
from ...system.sharing import folder_of
from ..binary_file import Closeable, find_not_finite
from ..checkpoint import (
    EMBEDDING_FILES,
    Checkpoint,
    LoadOptions,
    all_linears,
    array_shape,
    check_room,
    has_bias,
    is_ternary,
    linear_shape,
    norm_size,
    read_tokenizer_folder,
    scale_convention,
)
from ..names import HF_PREFIXES, hf_modules
from ..packing import pack_from_hf, split_ternary
from ..places import linear_place
from ..safetensors import DTYPES, SafetensorsFile, TensorInfo
from .adapter import ADAPTER_FILES
from .config import MAX_CONFIG_BYTES, read_hf_config
from .packings import (
    HADAMARD_TYPE,
    describe_mlx,
    read_affine,
    read_awq,
    read_hadamard_modules,
    read_small_floats,
    read_ternary_rows,
)
from .wrappers import hf_form

MAX_INDEX_BYTES = 64 << 20
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
MODULES = ("Transformer", "Pooling", "Normalize")  # of sentence-transformers' modules.json
POOLINGS = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}  # sentence-transformers' keys
POOLING_MODES = {"lasttoken": "last", "mean": "mean"}  # since version 6 one key, pooling_mode, has one of these values
_FLOATS = ("BF16", "F16", "F32")


class CheckpointTensors(Closeable):
    """The tensors of one checkpoint in one file or several. `taken` remembers which were read."""

    def __init__(self, path: Path) -> None:
        self._stack = ExitStack()
        self._files: dict[str, SafetensorsFile] = {}
        self.metadata: dict[str, str] = {}  # of a checkpoint that is one file
        self.taken: set[str] = set()
        with self.closed_on_error():
            self._open(path)
        self.prefix = next((each for each in HF_PREFIXES if f"{each}embed_tokens.weight" in self), HF_PREFIXES[0])

    def close(self) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def names(self) -> list[str]:
        return list(self._files)

    def info(self, name: str) -> TensorInfo:
        return self._files[name].tensors[name]

    def path_of(self, name: str) -> Path:
        return self._files[name].path

    def rename(self, module: str) -> str:
        """transformers' name of a module as these files have it: a model saved without its head has no "model."."""
        if f"language_model.{module}.weight" in self:
            return f"language_model.{module}"  # the head; other modules lie under the prefix
        return self.prefix + module.removeprefix("model.") if module.startswith("model.") else module

    def blocks(self, name: str, size: int) -> Iterator[memoryview]:
        """The tensor's bytes in order, at most `size` at a time. Each block overwrites the one before."""
        return self._files[name].blocks(name, size)

    def read_ahead(self) -> None:
        """See `Checkpoint.read_ahead`. Layers in the order of their numbers: files have them in that of the digits."""
        for file in dict.fromkeys(self._files.values()):
            names = sorted(file.tensors, key=lambda name: [each.zfill(9) for each in name.split(".")])
            file.read_ahead((file.tensors[name].offset, file.tensors[name].nbytes) for name in names)

    def fail(self, name: str, message: str) -> FormatError:
        """The error to raise about a tensor. It names the file, and the tensor's place if it has one."""
        if name not in self._files:
            return FormatError(message, path=self.main, field=name)
        return FormatError(message, path=self.path_of(name), offset=self.info(name).offset, field=name)

    def take(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = _FLOATS) -> Array:
        """Read a tensor, which must have that shape, one of those dtypes, and finite values."""
        expected = f"expected {' or '.join(dtypes)} of shape {list(shape)}"
        if name not in self._files:
            raise self.fail(name, f"the tensor is missing; {expected}")
        info = self.info(name)
        if info.shape != shape or info.dtype not in dtypes:
            raise self.fail(name, f"{expected}, got {info.dtype} of shape {list(info.shape)}")
        self.taken.add(name)
        array = self._files[name].read(name)
        if info.dtype in _FLOATS and (message := find_not_finite(array)):
            raise self.fail(name, message)
        return array

    def take_rows(self, name: str, place: LinearPlace, columns: int, dtypes: tuple[str, ...] = _FLOATS) -> Array:
        """`take` of a linear's tensor, of so many columns.   -> (place.height, columns)"""
        rows = (place.height,) if place.stacked == 1 else (place.stacked, place.height // place.stacked)
        return self.take(name, (*rows, columns), dtypes).reshape(place.height, columns)

    def _open(self, path: Path) -> None:
        shard_of: dict[str, str] | None = None
        folder = path if path.is_dir() else None
        if folder is None:
            self.main = path
        elif is_present(path / INDEX_FILE) and not is_present(path / SINGLE_FILE):
            self.main = path / INDEX_FILE
            shard_of = _read_index(self.main)
        else:
            self.main = path / SINGLE_FILE
            if not is_present(self.main):
                raise FormatError(f"the folder has neither {SINGLE_FILE} nor {INDEX_FILE}", path=path)
        shards = [self.main] if shard_of is None else [path / name for name in dict.fromkeys(shard_of.values())]
        for shard in shards:
            file = self._stack.enter_context(SafetensorsFile(shard, folder))
            self.metadata = file.metadata if len(shards) == 1 else {}
            for name in file.tensors:
                if shard_of is not None and shard_of.get(name) != shard.name:
                    place = f"in {shard_of[name]}" if name in shard_of else "nowhere"
                    raise FormatError(f"the index {INDEX_FILE} places this tensor {place}", path=shard, field=name)
                self._files[name] = file
        for name, shard_name in (shard_of or {}).items():
            if name not in self._files:
                raise FormatError(f"is not in {shard_name}, where the index places it", path=self.main, field=name)


def _read_index(path: Path) -> dict[str, str]:
    """weight_map of a sharded checkpoint's index: tensor name -> file name, each a plain file of the same folder."""
    weight_map = read_json_object(path, FormatError, MAX_INDEX_BYTES, path.parent).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError("expected a non-empty object of file names", path=path, field="weight_map")
    for shard in dict.fromkeys(str(value) for value in weight_map.values()):
        if "\0" in shard or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise FormatError(f"expected the name of a .safetensors file, got {shard!r}", path=path, field="weight_map")
        if not is_present(path.parent / shard):
            raise FormatError(f"the shard {shard} is missing", path=path, field="weight_map")
        if not stays_inside(path.parent, path.parent / shard):
            raise FormatError(f"the shard {shard} is a link out of the folder", path=path, field="weight_map")
    return {name: str(value) for name, value in weight_map.items()}


def refuse_adapter(folder: Path) -> None:
    """FormatError if there is a LoRA adapter in the folder, for those who would use the weights without it."""
    for name in ADAPTER_FILES:
        if is_present(folder / name):
            message = (
                "is a LoRA adapter, which load applies and this does not. Merge it into the weights (peft: "
                f"model.merge_and_unload(), then save_pretrained), or move the files {', '.join(ADAPTER_FILES)} out of "
                "the folder to use the weights without it"
            )
            raise FormatError(message, path=folder / name)


def read_folder_config(path: Path, allow_unquantized: bool = False) -> ModelConfig:
    """What config.json and the files of sentence-transformers beside it say. Raises ConfigError.   path: config.json"""
    config = read_hf_config(path, allow_unquantized)
    return replace(config, **embedding_fields(path.parent))


def embedding_fields(folder: Path) -> dict[str, Any]:
    """The fields of the config that the files of sentence-transformers say, if there are any. Raises ConfigError."""
    (modules, path, _, texts), out = (folder / name for name in EMBEDDING_FILES), dict[str, Any]()
    if is_present(texts) and read_json_object(texts, ConfigError, MAX_INDEX_BYTES, folder).get("do_lower_case"):
        raise ConfigError("true, which makes all letters small, is not done", path=texts, field="do_lower_case")
    if is_present(modules):
        try:
            kinds = [
                str(each["type"]).rpartition(".")[2]
                for each in json.loads(read_bounded(modules, ConfigError, MAX_INDEX_BYTES, folder))
            ]
        except (ValueError, TypeError, KeyError) as problem:
            raise ConfigError("expected a list of modules, each with a type", path=modules) from problem
        if unknown := [kind for kind in kinds if kind not in MODULES]:
            raise ConfigError(f"{unknown[0]} is not done; there are: {', '.join(MODULES)}", path=modules, field="type")
        out["unit_embeddings"] = "Normalize" in kinds
    if not is_present(path):
        return out
    raw = read_json_object(path, ConfigError, MAX_INDEX_BYTES, folder)
    if (mode := raw.get("pooling_mode")) is not None:
        if mode not in list(POOLING_MODES):  # a list takes an unhashable value too
            message = f"expected {' or '.join(POOLING_MODES)}, got {describe(mode)}"
            raise ConfigError(message, path=path, field="pooling_mode")
        out["pooling"] = POOLING_MODES[mode]
    else:
        modes = [key for key, value in raw.items() if key.startswith("pooling_mode_") and value]
        if len(modes) != 1 or modes[0] not in POOLINGS:
            raise ConfigError(f"expected one of {', '.join(POOLINGS)} to be true, got {modes}", path=path)
        out["pooling"] = POOLINGS[modes[0]]
    if out["pooling"] == "mean" and raw.get("include_prompt") is False:
        message = "false, which leaves a prompt's tokens out of the mean, is not done"
        raise ConfigError(message, path=path, field="include_prompt")
    return out


class HfCheckpoint(Checkpoint):
    """A Hugging Face folder, or one .safetensors file in such a folder.

    config: used instead of config.json, by a caller that has checked it.
    """

    def __init__(self, path: Path, options: LoadOptions | None = None, config: ModelConfig | None = None) -> None:
        self.path = path
        self.folder = folder_of(path)
        allow = options is not None and options.allow_unquantized
        if config is None:
            if options is None or options.adapter is None:  # else the caller knows of it
                refuse_adapter(self.folder)
            self.config = read_folder_config(self.folder / "config.json", allow)
        else:
            self.config = replace(config, **embedding_fields(self.folder))
        self.tensors = CheckpointTensors(path)
        self.taken = self.tensors.taken
        layers, names = self.config.num_hidden_layers, self.tensors.names
        with self.closed_on_error():
            if config is None and layers > len(names):  # before anything is counted or named layer by layer
                message = f"{self.folder / 'config.json'} says {layers} layers, and there are {len(names)} tensors"
                raise FormatError(message, path=self.tensors.main, field="num_hidden_layers")
            check_room(self.config, sum(self.tensors.info(name).nbytes for name in names), self.tensors.main)
            if self.config.quantization is None and any(name.endswith("q_proj.norm.weight") for name in names):
                # BitNet-Embedding: masters of BitLinears, each with a norm inside, which only the tensors' names show
                online = QuantizationConfig("autobitlinear", "online", use_rms_norm=True)
                self.config = replace(self.config, quantization=online)
            self.kind = "hf-bf16" if self._scale_convention in (None, "absmean") else "hf-packed"
            self.evidence: list[str] = self._describe_left_out()
            has_head = self.tensors.prefix.startswith("model.") or f"{self._module('lm_head')}.weight" in self.tensors
            if not (self.config.tie_word_embeddings or has_head):
                # Saved by a class without a head: e5-mistral-7b-instruct, Qwen3-Embedding-8B
                self.evidence.append(
                    "there is no lm_head.weight: embed needs none; logits are guessed by the embedding matrix"
                )
                warnings.warn(
                    printable(f"{self.tensors.main}: {self.evidence[-1]}", keep=""), ConfigWarning, stacklevel=2
                )
                self.config = replace(self.config, tie_word_embeddings=True)
            if any(name.endswith(".scales") for name in names):
                self._read_packing(options or LoadOptions())
        moved = [name for name in names if name.endswith(".conv1d.weight")]
        # mlx-lm writes Qwen3.5 with the axes of its convolution in another order, and then with the 1 of norms added
        self._norms_are_whole = bool(moved) and self.tensors.info(moved[0]).shape[-1:] == (1,)

    def close(self) -> None:
        self.tensors.close()

    def read_ahead(self) -> None:
        self.tensors.read_ahead()

    def fail(self, tensor: str, message: str) -> FormatError:
        return self.tensors.fail(tensor, message)

    def _read_packing(self, options: LoadOptions) -> None:
        """What config.json says about matrices that other tools have packed."""
        raw = read_json_object(self.folder / "config.json", ConfigError, MAX_CONFIG_BYTES, self.folder)
        if words := describe_mlx(raw):
            self.evidence.append(words)
        if raw.get("model_type") == HADAMARD_TYPE:
            stored = read_hadamard_modules(self.folder, raw, self.tensors)
            names = ("embedding", *all_linears(self.config))
            by_module = {name: stored.get(self._module(name)) for name in names}
            self.set_bases({name: basis for name, basis in by_module.items() if basis is not None}, options)

    def _place(self, name: str) -> LinearPlace:
        """Where these files have a linear or "embedding"; mlx-lm stacks the experts of a layer in one tensor."""
        place = linear_place(self.config, name, "hf")
        if f"{self.tensors.rename(place.stack)}.weight" not in self.tensors:
            return place
        return place._replace(module=place.stack, parts=(), stacked=len(place.parts))

    def _module(self, name: str) -> str:
        return self.tensors.rename(self._place(name).module)

    def _dense(self, name: str, bias: NDArray[np.float32] | None) -> LinearWeight:
        """A matrix that is no BitLinear's, (N, K)."""
        place, width = self._place(name), linear_shape(self.config, name)[1]
        if place.parts:
            height = place.height // len(place.parts)
            parts = [self._matrix(LinearPlace(module, height), width, None) for module in place.parts]
            try:
                return stack_rows(parts)
            except ValueError as problem:
                raise self.fail(f"{self.tensors.rename(place.module)}.weight", str(problem)) from None
        return self._matrix(place, width, bias)

    def _matrix(self, place: LinearPlace, width: int, bias: NDArray[np.float32] | None) -> LinearWeight:
        module = self.tensors.rename(place.module)
        if f"{module}.qweight" in self.tensors:
            return read_awq(self.tensors, module, place, width, bias)
        if f"{module}.scales" in self.tensors:
            read = read_small_floats if self._has_small_floats(module) else read_affine
            return read(self.tensors, module, place, width, bias)
        if f"{module}.row_alpha" in self.tensors:
            return read_ternary_rows(self.tensors, module, place, width, bias)
        return DenseWeight(place.take(self.tensors.take_rows(f"{module}.weight", place, width)), bias)

    def _has_small_floats(self, module: str) -> bool:
        """Whether a matrix is in one of MLX's modes of small floats."""
        return f"{module}.scales" in self.tensors and self.tensors.info(f"{module}.scales").dtype == "U8"

    def embedding(self) -> LinearWeight:
        return self._dense("embedding", None)

    def norm(self, name: str) -> NDArray[np.float32]:
        tensors = [f"{self.tensors.rename(module)}.weight" for module in hf_modules(name, self.config)]
        stored = next((tensor for tensor in tensors if tensor in self.tensors), tensors[0])
        weight = self._vector(stored, norm_size(self.config, name))
        adds_one = hf_form(self.config.model_type).norms_add_one and not self._norms_are_whole
        return weight + np.float32(1.0) if adds_one else weight

    def linear(self, name: str) -> LinearWeight:
        module, (out_features, in_features) = self._module(name), linear_shape(self.config, name)
        bias = self._vector(f"{module}.bias", out_features) if has_bias(self.config, name) else None
        if not is_ternary(self.config, name):
            return self._dense(name, bias)
        eps, inner = self.input_norm_eps, f"{module}.rms_norm.weight"
        inner = inner if inner in self.tensors else f"{module}.norm.weight"  # BitNet-Embedding's name of it
        own_norm = None if eps is None else self._vector(inner, in_features)
        if self._scale_convention == "absmean":
            w = self.tensors.take(f"{module}.weight", (out_features, in_features)).astype(np.float32)
            w_t, scale = split_ternary(w) or quantization.quantize_weights(w)
            packed = quantization.pack_ternary(w_t)
        else:
            packed = self.packed_plane(f"{module}.weight", out_features, in_features)
            scale = self.scale(f"{module}.weight_scale")
            if self._scale_convention == "divide":
                scale = np.float32(1.0) / scale
            elif bias is not None:
                bias = bias * scale  # AutoBitLinear adds the bias before it multiplies by the scale
        return put_norm(TernaryWeight(packed, in_features, scale, bias), own_norm, eps)

    def array(self, name: str) -> NDArray[np.float32]:
        _, layer, part = name.split(".", 2)
        form, shape = family_of(self.config).arrays[part], array_shape(self.config, name)
        tensor = f"{self.tensors.rename(f'model.layers.{layer}')}.{form.hf}"
        expected = form.hf_shape(shape)
        moved = (expected[0], *expected[:0:-1]) if self._norms_are_whole else expected
        stored = self.tensors.take(tensor, moved).astype(np.float32).reshape(expected)  # an axis of one element moves
        try:
            return form.from_hf(self.config, int(layer), stored)
        except ValueError as problem:
            raise self.fail(tensor, str(problem)) from None

    def master(self, name: str) -> Floats | None:
        if self._scale_convention != "absmean" or not is_ternary(self.config, name):
            return None
        w = self.tensors.take(f"{self._module(name)}.weight", linear_shape(self.config, name))
        return w if split_ternary(w.astype(np.float32)) is None else None

    def dense_dtype(self, name: str) -> np.dtype:
        module = self._module(name)
        tensor = f"{module}.weight"
        if any(f"{module}.{packed}" in self.tensors for packed in ("scales", "row_alpha")):
            return np.dtype(ml_dtypes.bfloat16 if self._has_small_floats(module) else np.float32)
        if tensor not in self.tensors or self.tensors.info(tensor).dtype not in _FLOATS:
            return super().dense_dtype(name)  # which says what is wrong
        return DTYPES[self.tensors.info(tensor).dtype]

    def check_tied_head(self, embedding: LinearWeight) -> None:
        name = f"{self._module('lm_head')}.weight"
        table: Any = embedding
        if name in self.tensors and not np.array_equal(self.tensors.take(name, embedding.shape), table.array):
            raise self.fail(name, "differs from the embedding, but config.json says tie_word_embeddings")

    def finish(self) -> None:
        unused = [name for name in self.tensors.names if name not in self.taken]
        unused = [name for name in unused if not name.endswith(".rotary_emb.inv_freq")]  # a constant of old LLaMA files
        unused = [name for name in unused if not name.startswith(self._left_out)]
        self.refuse_unused(unused, f"a {self.config.model_type} model as config.json describes it")

    def _describe_left_out(self) -> list[str]:
        """A sentence about the tensors of vision and of drafting layers, if there are any."""
        names = [name for name in self.tensors.names if name.startswith(self._left_out)]
        if not names:
            return []
        parts = sorted({next(part for part in self._left_out if name.startswith(part)) for name in names})
        words = ", ".join(f"{part}*" for part in parts)
        return [f"left out, as text needs none of them: {len(names)} tensors ({words})"]

    def tokenizer_files(self) -> dict[str, bytes]:
        files = read_tokenizer_folder(self.folder)
        if "tokenizer.json" not in files and "tokenizer.model" not in files:
            return {}
        name = "generation_config.json"
        generation = parse_json_object(files.get(name, b"{}"), TokenizerError, self.folder / name)
        ids = {"bos_token_id": self.config.bos_token_id, "eos_token_id": list(self.config.eos_token_ids) or None}
        missing = {key: value for key, value in ids.items() if value is not None and generation.get(key) is None}
        if missing:  # config.json has them, and is not among the tokenizer's files
            files[name] = json.dumps(generation | missing, indent=2).encode() + b"\n"
        return files

    @property
    def _left_out(self) -> tuple[str, ...]:
        return hf_form(self.config.model_type).left_out

    @property
    def _scale_convention(self) -> str | None:
        return scale_convention(self.config.quantization)

    def _vector(self, name: str, size: int) -> NDArray[np.float32]:
        return self.tensors.take(name, (size,)).astype(np.float32)

    def packed_plane(self, name: str, out_features: int, in_features: int) -> NDArray[np.uint8]:
        """A ternary matrix in our packing, stored as 2-bit codes or, unpacked, as the floats -1, 0 and 1."""
        if name in self.tensors and self.tensors.info(name).dtype in _FLOATS:
            w = self.tensors.take(name, (out_features, in_features)).astype(np.float32)
            bad = (w != 0) & (np.abs(w) != 1)
            if bad.any():
                index = [int(i) for i in np.argwhere(bad)[0]]
                raise self.fail(name, f"holds {w[tuple(index)]} at index {index}; expected -1, 0 or 1")
            return quantization.pack_ternary(w.astype(np.int8))
        if out_features % 4:
            raise self.fail(name, f"packed rows come in fours, but config.json says {out_features} outputs")
        plane = self.tensors.take(name, (out_features // 4, in_features), ("U8",))
        packed = None if self.pack_plane is None else self.pack_plane(plane)
        if packed is None:
            self.check_codes(name, plane)
        return pack_from_hf(plane) if packed is None else packed

    def scale(self, name: str) -> np.float32:
        shape = () if name in self.tensors and self.tensors.info(name).shape == () else (1,)
        return self.checked_scale(name, self.tensors.take(name, shape).astype(np.float32).reshape(-1)[0])
