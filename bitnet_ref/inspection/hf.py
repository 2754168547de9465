"""Inspecting .safetensors: a Hugging Face folder, a file with or without its config.json, a native file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError, FormatError
from ..families import config_to_dict
from ..formats.checkpoint import Checkpoint, LoadOptions, Progress, linear_shape, scale_convention
from ..formats.hf.adapter import CONFIG_FILE, describe_adapter, find_adapter, read_adapter
from ..formats.hf.config import parse_hf_config, read_config_json
from ..formats.hf.config_keys import Doubt
from ..formats.hf.folder import CheckpointTensors, HfCheckpoint
from ..formats.hf.packings import CODES_PER_WORD, packed_width
from ..formats.hf.wrappers import text_part
from ..formats.names import hf_module, linear_of_hf
from ..formats.native.model import NativeCheckpoint
from ..formats.packing import split_ternary
from ..formats.safetensors import SafetensorsFile
from ..reference.weights import DenseWeight, LinearWeight
from ..system.json_file import is_present
from ..system.sharing import folder_of
from ..tokenizers import Tokenizer, load_tokenizer
from .facts import Inspection, StoredTensor
from .inspector import Inspector, blocks_of, stored_tensor

# When absent, transformers takes defaults that are wrong for many checkpoints.
_KEYS_WITH_DEFAULTS = ("hidden_act", "rms_norm_eps", "max_position_embeddings", "num_key_value_heads", "rope_theta")
_PLANES = (".packed", ".trits")  # of native files
_SHOWN = 200


class HfInspector(Inspector):
    """Reads config.json first, because it says what the tensors mean; then model.safetensors or its shards."""

    config_source = "config.json"
    layers = "model.layers"

    def __init__(self, path: Path, options: LoadOptions | None = None, progress: Progress | None = None) -> None:
        super().__init__(path, options, progress)
        self.folder = folder_of(path)
        self.tensors: CheckpointTensors | None = None
        self.group_size: Any = None  # that config.json names for MLX's matrices

    def run(self) -> Inspection:
        if self.path.is_file() and not (self.folder / "config.json").exists():
            try:
                with SafetensorsFile(self.path) as file:
                    self.out.metadata = dict(file.metadata)
                    self.add_tensors(stored_tensor(name, info, self.path) for name, info in file.tensors.items())
            except FormatError as error:
                self.out.report_error("weights", error)
                return self.out
            self.out.header_only = True
            self.out.parameters = self.count_parameters()
            return self.out
        try:
            return super().run()
        finally:
            if self.tensors is not None:
                self.tensors.close()

    def list_tensors(self) -> None:
        if not is_present(self.folder / "config.json") and is_present(self.folder / CONFIG_FILE):
            self.out.format = f"LoRA adapter of peft: {CONFIG_FILE} and safetensors"
        elif (self.folder / "config.json").exists() or any(self.folder.glob("*.safetensors")):
            self.out.format = "Hugging Face: config.json and safetensors"
        self.read_config()
        self.try_part(self.read_adapter)
        try:
            self.tensors = CheckpointTensors(self.path)
        except FormatError as error:
            self.out.report_error("weights", error)
            self.list_readable_files(error)
            return
        names = self.tensors.names
        self.layers = self.tensors.rename("model.layers")
        self.add_tensors(stored_tensor(name, self.tensors.info(name), self.tensors.path_of(name)) for name in names)

    def read_config(self) -> None:
        path = self.folder / "config.json"
        doubts: list[Doubt] = []
        try:
            raw = read_config_json(path, doubts)
        except ConfigError as error:
            self.out.report_error("config", error)
            return
        self.out.architecture = str(raw["model_type"])[:80] if "model_type" in raw else None
        try:
            config = parse_hf_config(raw, path, self.options.allow_unquantized, doubts)
        except ConfigError as error:
            self.out.report_error("config", error)
            if error.field != "quantization_config":
                return
            try:  # a bitnet model that does not say how it is quantised: inspect the rest
                config = parse_hf_config(raw, path, allow_unquantized=True, doubts=doubts)
            except ConfigError:
                return
        for doubt in doubts:
            self.out.report("warning", "config", doubt.message, field=doubt.field)
        self.set_config(config)
        if isinstance(stated := raw.get("quantization"), dict):
            self.group_size = stated.get("group_size")
        raw = text_part(raw)
        nested = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        if isinstance(nested, dict):  # of all layers, or of each type of layer
            nested = {**nested, **{key: 1 for inner in nested.values() if isinstance(inner, dict) for key in inner}}
        given = set(raw) | ({"rope_theta"} & set(nested)) | ({"hidden_act"} if "hidden_activation" in raw else set())
        if absent := [key for key in _KEYS_WITH_DEFAULTS if key not in given]:
            values = {**config_to_dict(config), "rms_norm_eps": config.norm_eps, "hidden_act": config.activation}
            taken = ", ".join(f"{key} {config.rope.theta if key == 'rope_theta' else values[key]}" for key in absent)
            self.out.report("note", "config", f"absent from config.json, so transformers' defaults hold: {taken}")

    def read_adapter(self) -> None:
        """Describe the LoRA adapter beside the weights, if there is one."""
        adapter = find_adapter(self.path, None)[1]
        if adapter is not None and self.out.config is not None:
            words = describe_adapter(adapter, read_adapter(adapter, self.out.config))
            self.out.report("note", "weights", f"{words}; load applies it, adapter='none' leaves it out")

    def open(self) -> Checkpoint | None:
        tensors, config = self.tensors, self.out.config
        if tensors is None:
            return None
        packed = [tensor.name for tensor in self.out.tensors if tensor.kind == "ternary planes"]
        if packed and config is not None and config.quantization is None:
            message = (
                "the linears are ternary, packed to 2 bits, but config.json has no quantization_config, so there "
                "is no telling whether weight_scale multiplies (autobitlinear) or divides (bitlinear)"
            )
            self.out.report_error("weights", tensors.fail(packed[0], message))
        elif config is not None:
            try:
                return HfCheckpoint(self.path, config=config)
            except (FormatError, ConfigError) as error:
                self.out.report_error("weights" if isinstance(error, FormatError) else "config", error)
        for name in packed:
            if (linear := linear_of_hf(name)) is not None:
                self.count_raw_plane(linear)
        return None

    def list_readable_files(self, error: FormatError) -> None:
        """List the tensors of the files that can be read, of a checkpoint that cannot be opened as a whole."""
        stored: list[StoredTensor] = []
        for path in [self.path] if self.path.is_file() else sorted(self.folder.glob("*.safetensors")):
            try:
                with SafetensorsFile(path, self.folder if self.path.is_dir() else None) as file:
                    stored += [stored_tensor(name, info, path) for name, info in file.tensors.items()]
            except FormatError as other:
                if (other.path, other.message) != (error.path, error.message):
                    self.out.report_error("weights", other)
        self.add_tensors(stored)
        if not stored and self.path.is_dir():
            files = sorted(self.folder.iterdir())
            onnx = [path.name for path in files if path.suffix == ".onnx"]
            pickles = [path.name for path in files if path.suffix in (".bin", ".pt", ".pth")]
            if others := onnx or pickles:
                why = "give that file itself" if onnx else "pickles are not read, they run code"
                self.out.report("note", "weights", f"there is {', '.join(others[:3])}: {why}")

    def load_tokenizer(self) -> Tokenizer | None:
        names = ("tokenizer.json", "tokenizer.model")
        return load_tokenizer(self.folder) if any(is_present(self.folder / name) for name in names) else None

    def table_name(self, name: str) -> str | None:
        module = hf_module(name, self.out.config)
        module = module if self.tensors is None else self.tensors.rename(module)
        is_packed = self.tensors is not None and f"{module}.scales" in self.tensors
        return None if is_packed else f"{module}.weight"

    def weights_of(self, tensor: StoredTensor) -> int:
        if tensor.dtype == "I32":
            return super().weights_of(tensor) * 8  # of 4 bits
        module = tensor.name.removesuffix(".weight")
        if tensor.dtype == "U32" and self.tensors is not None and f"{module}.scales" in self.tensors:
            width = packed_width(tensor.shape, self.tensors.info(f"{module}.scales"), self.group_size)
            return math.prod(tensor.shape[:-1]) * width
        if tensor.dtype == "U32" and self.tensors is not None and f"{module}.row_alpha" in self.tensors:
            return super().weights_of(tensor) * CODES_PER_WORD
        return super().weights_of(tensor) * (4 if tensor.kind == "ternary planes" else 1)

    def check_linear(self, checkpoint: HfCheckpoint, index: int, short: str, weight: LinearWeight) -> None:
        if index == 0 and short == "q_proj":  # one matrix shows how the whole checkpoint was saved
            self.check_masters(checkpoint.tensors, isinstance(weight, DenseWeight))

    def check_masters(self, tensors: CheckpointTensors, dense: bool) -> None:
        """Report float matrices that hold only -s, 0, +s: saved after quantisation. One block of rows shows it."""
        names = [name for name in tensors.names if linear_of_hf(name) is not None and tensors.info(name).dtype != "U8"]
        convention = None if self.out.config is None else scale_convention(self.out.config.quantization)
        if not names or convention in ("multiply", "divide"):
            return
        first = next(blocks_of(tensors, names[0])).astype(np.float32)
        if not np.isfinite(first).all() or split_ternary(first.reshape(1, -1)) is None:
            return
        if dense:
            message = "the linears hold only -s, 0 and +s: a ternary model, but config.json makes it a dense one"
        else:
            message = (
                "these are no master weights: they hold only -s, 0 and +s, as saved after quantisation. "
                "s itself is taken as the scale (an absmean would shrink it by the share of zeros)"
            )
        self.out.report("warning", "weights", message, field=names[0])

    def count_raw_plane(self, name: str) -> None:
        tensors, plane = self.tensors, f"{self.table_name(name)}"
        if tensors is None or plane not in tensors or tensors.info(plane).dtype != "U8":
            return
        shape = tensors.info(plane).shape
        if len(shape) != 2 or 0 in shape:
            return
        self.try_part(lambda: self.add_raw_plane(name, (4 * shape[0], shape[1]), blocks_of(tensors, plane)))

    def check_tied_head(self, checkpoint: HfCheckpoint) -> None:
        tensors, name = checkpoint.tensors, self.table_name("lm_head")
        if name is None or name not in tensors:
            return
        tensors.taken.add(name)
        shape = (checkpoint.config.vocab_size, checkpoint.config.hidden_size)
        table = self.table_name("embedding")
        if table is None or table not in tensors:
            return  # already reported
        same = tensors.info(name).shape == shape == tensors.info(table).shape
        try:
            pairs = zip(blocks_of(tensors, name), blocks_of(tensors, table), strict=True)
            same = same and all(np.array_equal(a, b) for a, b in pairs)
        except ValueError:  # different numbers of blocks, so different dtypes
            same = False
        if not same:
            raise tensors.fail(name, "differs from the embedding, but config.json says tie_word_embeddings")


class NativeInspector(Inspector):
    """The configuration, the tokenizer and all tensors are in one file."""

    layers = "blocks"
    checkpoint: NativeCheckpoint | None = None

    def list_tensors(self) -> None:
        self.out.format = "native"
        try:
            with SafetensorsFile(self.path) as file:
                self.out.metadata = {key: value[:_SHOWN] for key, value in file.metadata.items()}
                self.add_tensors(stored_tensor(name, info, self.path) for name, info in file.tensors.items())
        except FormatError as error:
            self.out.report_error("weights", error)
            return
        self.out.format = f"native, version {self.out.metadata.get('format_version', 'not named')[:20]}"

    def open(self) -> Checkpoint | None:
        if self.out.tensors:
            self.checkpoint = self.try_open(NativeCheckpoint)
        return self.checkpoint

    def check_file(self) -> None:
        """Compare every byte with the content hash, because a plane with a flipped bit is a valid plane."""
        if self.checkpoint is None or self.out.errors:
            return
        try:
            with NativeCheckpoint(self.path) as again:
                digest = again.verify()
            self.out.evidence.append(f"the content hash holds: {digest[:23]}...")
        except FormatError as error:
            self.out.report_error("weights", error)

    def tokenizer_files(self) -> dict[str, bytes]:
        if self.checkpoint is None:
            return {}
        with NativeCheckpoint(self.path) as again:
            return again.tokenizer_files()

    def table_name(self, name: str) -> str | None:
        tensor = name if name == "embedding" else f"{name}.weight"
        return None if any(stored.name == f"{name}.scales" for stored in self.out.tensors) else tensor

    def weights_of(self, tensor: StoredTensor) -> int:
        config, stem = self.out.config, tensor.name.rpartition(".")[0]
        if config is None or not tensor.name.endswith(_PLANES):
            return super().weights_of(tensor) * {"packed": 4, "trits": 5}.get(tensor.name.rpartition(".")[2], 1)
        try:
            rows, columns = linear_shape(config, stem)  # rows are padded to whole bytes
        except KeyError:  # the name of no linear
            return 0
        return rows * columns
