"""A Hugging Face folder: config.json, and model.safetensors or the shards its index lists.

Every tensor is checked as it is read: there, of the right shape and dtype, finite, no invalid ternary code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...errors import FormatError, TokenizerError
from ...reference import quantization
from ...reference.config import ModelConfig
from ...reference.weights import DenseWeight, InputNorm, LinearWeight, ModelWeights, TernaryWeight
from ...system.json_file import parse_json_object, read_bounded, read_json_object
from ..checkpoint import (
    Checkpoint,
    Prepare,
    Progress,
    ReadOptions,
    has_bias,
    hf_module,
    is_ternary,
    linear_shape,
    norm_size,
    read_weights,
)
from ..finite import first_not_finite
from ..packing import pack_from_hf
from ..safetensors import DTYPES, SafetensorsFile, TensorInfo
from .config import read_hf_config

MAX_INDEX_BYTES = MAX_TOKENIZER_BYTES = 64 << 20
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_FLOATS = ("BF16", "F16", "F32")
# Our name -> the names under which checkpoints have it (transformers' first, then 1bitLLM's).
_NORM_NAMES = {
    "attn_norm": ("input_layernorm.weight",),
    "ffn_norm": ("post_attention_layernorm.weight",),
    "attn_sub_norm": ("self_attn.attn_sub_norm.weight", "self_attn.inner_attn_ln.weight"),
    "ffn_sub_norm": ("mlp.ffn_sub_norm.weight", "mlp.ffn_layernorm.weight"),
}
# What a tokenizer consists of in a hub repository; config.json is not among them.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("generation_config.json", "chat_template.jinja"),
)


class CheckpointTensors:
    """The tensors of one checkpoint, whatever the number of files. Remembers which were taken."""

    def __init__(self, path: Path) -> None:
        self._stack = ExitStack()
        self._files: dict[str, SafetensorsFile] = {}
        self._single: SafetensorsFile | None = None  # also of a file without tensors
        self.taken: set[str] = set()
        try:
            self._open(path)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> CheckpointTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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

    @property
    def metadata(self) -> dict[str, str]:
        """Of a checkpoint that is one file."""
        return self._single.metadata if self._single is not None else {}

    def blocks(self, name: str, size: int) -> Iterator[memoryview]:
        """The bytes of a tensor, in order, at most `size` at a time: each is overwritten by the next."""
        return self._files[name].blocks(name, size)

    def fail(self, name: str, message: str) -> FormatError:
        """The error to raise about a tensor: it names the file, and the tensor's place there when it has one."""
        if name not in self._files:
            return FormatError(message, path=self.main, field=name)
        return FormatError(message, path=self.path_of(name), offset=self.info(name).offset, field=name)

    def take(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = _FLOATS) -> NDArray:
        """Read a tensor that must be there with that shape and one of those dtypes."""
        if name not in self._files:
            raise self.fail(name, f"the tensor is missing; expected {_list(dtypes)} of shape {list(shape)}")
        info = self.info(name)
        if info.shape != shape or info.dtype not in dtypes:
            raise self.fail(
                name, f"expected {_list(dtypes)} of shape {list(shape)}, got {info.dtype} of shape {list(info.shape)}"
            )
        self.taken.add(name)
        array = self._files[name].read(name)
        if info.dtype in _FLOATS and (bad := first_not_finite(array)) is not None:
            raise self.fail(name, f"holds {bad[1]} at index {bad[0]}; expected finite numbers")
        return array

    def _open(self, path: Path) -> None:
        if path.is_file():
            self.main, shards, placed = path, [path], None
        elif (path / INDEX_FILE).is_file() and not (path / SINGLE_FILE).is_file():
            self.main = path / INDEX_FILE
            placed = _read_index(self.main)
            shards = [path / name for name in dict.fromkeys(placed.values())]
        else:
            self.main, placed = path / SINGLE_FILE, None
            shards = [self.main]
            if not self.main.is_file():
                raise FormatError(f"the folder has neither {SINGLE_FILE} nor {INDEX_FILE}", path=path)
        for shard in shards:
            file = self._stack.enter_context(SafetensorsFile(shard))
            self._single = file if len(shards) == 1 else None
            for name in file.tensors:
                if placed is not None and placed.get(name) != shard.name:
                    said = f"in {placed[name]}" if name in placed else "nowhere"
                    raise FormatError(f"the index {INDEX_FILE} places this tensor {said}", path=shard, field=name)
                self._files[name] = file
        for name, shard_name in (placed or {}).items():
            if name not in self._files:
                raise FormatError(f"is not in {shard_name}, where the index places it", path=self.main, field=name)


def _list(names: tuple[str, ...]) -> str:
    return " or ".join(names)


def _read_index(path: Path) -> dict[str, str]:
    """weight_map of a sharded checkpoint's index: tensor name -> file name, each a plain file of the same folder."""
    weight_map = read_json_object(path, FormatError, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError("expected a non-empty object of file names", path=path, field="weight_map")
    for shard in dict.fromkeys(str(value) for value in weight_map.values()):
        if "\0" in shard or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise FormatError(f"expected the name of a .safetensors file, got {shard!r}", path=path, field="weight_map")
        if not (path.parent / shard).is_file():
            raise FormatError(f"the shard {shard} is missing", path=path, field="weight_map")
        if not stays_inside(path.parent, path.parent / shard):
            raise FormatError(f"the shard {shard} is a link out of the folder", path=path, field="weight_map")
    return {name: str(value) for name, value in weight_map.items()}


def stays_inside(folder: Path, file: Path) -> bool:
    """Whether a link leads to a file of the folder itself, or to the hub cache's blobs beside its snapshots."""
    real, home = file.resolve(), folder.resolve()
    if real.parent == home:
        return True
    return home.parent.name == "snapshots" and real.parent == home.parent.parent / "blobs"


def load_hf_weights(
    path: str | os.PathLike[str],
    config: ModelConfig,
    progress: Progress | None = None,
    prepare: Prepare | None = None,
) -> ModelWeights:
    """The weights of a folder (or of one .safetensors file) that `config` describes.

    prepare: what to make of each linear's weight as soon as it is read (a backend's own layout).
    FormatError names the file, the tensor, what was expected and what was found; a tensor that no part of the model
    uses is an error too, because it means that the config describes another model.
    """
    with HfCheckpoint(Path(path), config=config) as checkpoint:
        return read_weights(checkpoint, progress, lambda layer: prepare)


def hf_norm_names(name: str) -> list[str]:
    """Our name of a norm -> the tensor names under which checkpoints have it, transformers' first."""
    if name == "final_norm":
        return ["model.norm.weight"]
    _, index, norm = name.split(".")
    return [f"model.layers.{index}.{theirs}" for theirs in _NORM_NAMES[norm]]


def _may_be_ignored(name: str) -> bool:
    return name.endswith(".rotary_emb.inv_freq")  # old LLaMA checkpoints carry this constant


class HfCheckpoint(Checkpoint):
    """A Hugging Face folder, or one .safetensors file in such a folder.

    config: instead of that of config.json, by a caller who counts on no more layers than there are tensors.
    """

    def __init__(self, path: Path, options: ReadOptions | None = None, config: ModelConfig | None = None) -> None:
        self.path = path
        self.folder = path if path.is_dir() else path.parent
        allow = options is not None and options.allow_unquantized
        self.config = config or read_hf_config(self.folder / "config.json", allow)
        self.tensors = CheckpointTensors(path)
        layers, names = self.config.num_hidden_layers, self.tensors.names
        if config is None and layers > len(names):  # before anything is counted or named layer by layer
            self.close()
            message = f"{self.folder / 'config.json'} says {layers} layers, and there are {len(names)} tensors"
            raise FormatError(message, path=self.tensors.main, field="num_hidden_layers")
        self.kind = "hf-bf16" if self._scale_convention in (None, "absmean") else "hf-packed"
        self.evidence: list[str] = []

    def close(self) -> None:
        self.tensors.close()

    def embedding(self) -> DenseWeight:
        shape = (self.config.vocab_size, self.config.hidden_size)
        return DenseWeight(self.tensors.take("model.embed_tokens.weight", shape))

    def norm(self, name: str) -> NDArray[np.float32]:
        names = hf_norm_names(name)
        found = next((theirs for theirs in names if theirs in self.tensors), names[0])
        return self._vector(found, norm_size(self.config, name))

    def master(self, name: str) -> NDArray | None:
        if self._scale_convention != "absmean" or not is_ternary(self.config, name):
            return None
        w = self.tensors.take(f"{hf_module(name)}.weight", linear_shape(self.config, name))
        return w if quantization.split_ternary(w.astype(np.float32)) is None else None

    def dense_dtype(self, name: str) -> np.dtype:
        tensor = "model.embed_tokens.weight" if name == "embedding" else f"{hf_module(name)}.weight"
        if tensor not in self.tensors or self.tensors.info(tensor).dtype not in _FLOATS:
            return super().dense_dtype(name)  # which says what is wrong
        return DTYPES[self.tensors.info(tensor).dtype]

    def tied_head(self, embedding: DenseWeight) -> DenseWeight:
        name = "lm_head.weight"
        if name in self.tensors and not np.array_equal(self.tensors.take(name, embedding.shape), embedding.array):
            raise self.tensors.fail(name, "differs from the embedding, but config.json says tie_word_embeddings")
        return embedding

    def finish(self) -> None:
        left = [name for name in self.tensors.names if name not in self.tensors.taken and not _may_be_ignored(name)]
        if left:
            more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
            raise self.tensors.fail(
                left[0], f"this tensor is no part of a {self.config.model_type} model as config.json says{more}"
            )

    def tokenizer_files(self) -> dict[str, bytes]:
        found = [self.folder / name for name in TOKENIZER_FILES if (self.folder / name).is_file()]
        files = {path.name: read_bounded(path, TokenizerError, MAX_TOKENIZER_BYTES) for path in found}
        if "tokenizer.json" not in files and "tokenizer.model" not in files:
            return {}
        name = "generation_config.json"
        said = parse_json_object(files.get(name, b"{}"), TokenizerError, self.folder / name)
        ids = {"bos_token_id": self.config.bos_token_id, "eos_token_id": list(self.config.eos_token_ids) or None}
        missing = {key: value for key, value in ids.items() if value is not None and said.get(key) is None}
        if missing:  # config.json has them, and does not travel
            files[name] = json.dumps(said | missing, indent=2).encode() + b"\n"
        return files

    def linear(self, name: str) -> LinearWeight:
        module, quantized = hf_module(name), self.config.quantization
        out_features, in_features = linear_shape(self.config, name)
        bias_vector = self._vector(f"{module}.bias", out_features) if has_bias(self.config, name) else None
        if quantized is None or not is_ternary(self.config, name):
            return DenseWeight(self.tensors.take(f"{module}.weight", (out_features, in_features)), bias_vector)
        input_norm = None
        if quantized.use_rms_norm:
            input_norm = InputNorm(self._vector(f"{module}.rms_norm.weight", in_features), quantized.rms_norm_eps)
        if self._scale_convention == "absmean":
            packed, scale = self.quantize_master(f"{module}.weight", out_features, in_features)
        else:
            packed = self.packed_plane(f"{module}.weight", out_features, in_features)
            scale = self.scale(f"{module}.weight_scale")
            if self._scale_convention == "divide":
                scale = np.float32(1.0) / scale
            elif bias_vector is not None:
                bias_vector = bias_vector * scale  # AutoBitLinear adds the bias before it multiplies by the scale
        return TernaryWeight(packed, in_features, scale, bias_vector, input_norm)

    @property
    def _scale_convention(self) -> str | None:
        return None if self.config.quantization is None else self.config.quantization.scale_convention

    def _vector(self, name: str, size: int) -> NDArray[np.float32]:
        return self.tensors.take(name, (size,)).astype(np.float32)

    def quantize_master(self, name: str, out_features: int, in_features: int) -> tuple[NDArray[np.uint8], np.float32]:
        """Full-precision master weights -> ternary, by absmean, or by their own scale if they are ternary already."""
        w = self.tensors.take(name, (out_features, in_features)).astype(np.float32)
        w_t, scale = quantization.split_ternary(w) or quantization.quantize_weights(w)
        return quantization.pack_ternary(w_t), scale

    def packed_plane(self, name: str, out_features: int, in_features: int) -> NDArray[np.uint8]:
        if name in self.tensors and self.tensors.info(name).dtype in _FLOATS:  # saved unpacked: -1.0, 0.0, 1.0
            w = self.tensors.take(name, (out_features, in_features)).astype(np.float32)
            bad = (w != 0) & (np.abs(w) != 1)
            if bad.any():
                index = [int(i) for i in np.argwhere(bad)[0]]
                raise self.tensors.fail(name, f"holds {w[tuple(index)]} at index {index}; expected -1, 0 or 1")
            return quantization.pack_ternary(w.astype(np.int8))
        if out_features % 4:
            raise self.tensors.fail(name, f"packed rows come in fours, but config.json says {out_features} outputs")
        plane = self.tensors.take(name, (out_features // 4, in_features), ("U8",))
        if (at := quantization.first_invalid_code(plane)) is not None:
            raise self.tensors.fail(name, f"holds the invalid ternary code 3 in byte {list(at)} (0x{plane[at]:02x})")
        return pack_from_hf(plane)

    def scale(self, name: str) -> np.float32:
        shape = () if name in self.tensors and self.tensors.info(name).shape == () else (1,)
        scale = self.tensors.take(name, shape).astype(np.float32).reshape(-1)[0]
        with np.errstate(over="ignore"):
            if scale <= 0 or not np.isfinite(np.float32(1.0) / scale):
                raise self.tensors.fail(name, f"expected a scale above zero, got {scale}")
        return scale
