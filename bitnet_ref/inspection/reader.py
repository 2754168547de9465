"""Reading a checkpoint in order to describe it, one layer at a time."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import quantization
from ..api import find_model
from ..config import ModelConfig
from ..errors import BitNetRefError, ConfigError, FormatError, TokenizerError
from ..formats.checkpoint import hf_module, linear_name, norms_of_layer
from ..formats.hf_config import MAX_CONFIG_BYTES, parse_hf_config
from ..formats.hf_folder import CheckpointTensors, HfCheckpoint
from ..formats.safetensors import DTYPES, SafetensorsFile, TensorInfo
from ..json_file import read_json_object
from ..weights import DenseWeight, LinearWeight, TernaryWeight
from .facts import (
    Finding,
    Inspection,
    SizeOfKind,
    StoredTensor,
    TernaryMatrix,
    TokenizerFacts,
    family_in_words,
    tensor_kind,
)

Progress = Callable[[int, int], None]  # (layers done, layers in all)
_BLOCK_BYTES = 1 << 24
_LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,17})\.")
_LINEAR = re.compile(r"model\.layers\.(\d+)\.(?:self_attn|mlp)\.([a-z]+_proj)\.weight")
# Keys that transformers fills in when they are absent, with a value that is wrong for many a checkpoint.
_KEYS_WITH_DEFAULTS = ("hidden_act", "rms_norm_eps", "max_position_embeddings", "num_key_value_heads", "rope_theta")


def inspect_model(path: str | os.PathLike[str], progress: Progress | None = None) -> Inspection:
    """Look at a Hugging Face folder, a .safetensors file, or a shipped model by its name.

    Raises FormatError when there is nothing there, or it is a kind of file that cannot be read; everything else that is
    wrong becomes a finding. One layer is in memory at a time. progress: called with (layers done, layers in all).
    """
    found = find_model(path)
    if found.is_file() and found.suffix != ".safetensors":
        kind = {".gguf": "GGUF files", ".onnx": "ONNX files"}.get(found.suffix, "files of this kind")
        raise FormatError(f"{kind} cannot be read yet; give a Hugging Face folder or a .safetensors file", path=found)
    return _Inspector(found, progress).run()


class _Inspector:
    """One inspection on its way: each step adds what it can, and a finding for what it cannot."""

    def __init__(self, path: Path, progress: Progress | None) -> None:
        self.path, self.progress = path, progress
        self.folder = path if path.is_dir() else path.parent
        self.out = Inspection(path=str(path))

    def run(self) -> Inspection:
        out = self.out
        if self.path.is_file() and not (self.folder / "config.json").exists():
            out.header_only = True
            with SafetensorsFile(self.path) as file:  # nothing else to report, so a broken header is raised
                out.metadata = dict(file.metadata)
                self.add_tensors({name: (info, self.path.name) for name, info in file.tensors.items()})
            return out
        self.read_config()
        self.read_weights()
        self.read_tokenizer()
        if out.config is not None:
            self.compare_config_and_tokenizer(out.config)
        order = {"error": 0, "warning": 1, "note": 2}
        out.findings.sort(key=lambda finding: order[finding.severity])
        return out

    def note(self, severity: str, part: str, message: str, field: str | None = None) -> None:
        self.out.findings.append(Finding(severity, part, message, field=field))

    def fail(self, part: str, error: BitNetRefError) -> None:
        message = getattr(error, "message", str(error))
        place = {key: getattr(error, key, None) for key in ("path", "offset", "field")}
        finding = Finding("error", part, message, type(error).__name__, **place)
        if finding not in self.out.findings:
            self.out.findings.append(finding)

    # -- config.json ---------------------------------------------------------------------------------------------------

    def read_config(self) -> None:
        path = self.folder / "config.json"
        try:
            raw = read_json_object(path, ConfigError, MAX_CONFIG_BYTES)
        except ConfigError as error:
            self.fail("config", error)
            return
        try:
            config = parse_hf_config(raw, path)
        except ConfigError as error:
            self.fail("config", error)
            if error.field != "quantization_config":
                return
            try:  # a bitnet model that does not say how it is quantised: look at the rest all the same
                config = parse_hf_config(raw, path, allow_unquantized=True)
            except ConfigError:
                return
        self.out.config, self.out.family = config, family_in_words(config)
        nested = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        given = set(raw) | ({"rope_theta"} & set(nested) if isinstance(nested, dict) else set())
        if absent := [key for key in _KEYS_WITH_DEFAULTS if key not in given]:
            values = {**config.to_dict(), "rms_norm_eps": config.norm_eps, "hidden_act": config.activation}
            taken = ", ".join(f"{key} {config.rope.theta if key == 'rope_theta' else values[key]}" for key in absent)
            self.note("note", "config", f"absent from config.json, so transformers' defaults hold: {taken}")
        if config.model_type == "bitnet" and config.activation != "relu2":
            self.note(
                "warning",
                "config",
                f"a bitnet model with {config.activation}: 2B-4T was trained with relu2, and the wrong one of the two "
                "gives text that looks plausible and is wrong",
                field="hidden_act",
            )

    # -- weights -------------------------------------------------------------------------------------------------------

    def read_weights(self) -> None:
        try:
            tensors = CheckpointTensors(self.path)
        except FormatError as error:
            self.fail("weights", error)
            self.list_readable_files(error)
            return
        with tensors:
            self.add_tensors({name: (tensors.info(name), tensors.path_of(name).name) for name in tensors.names})
            config = self.out.config
            packed = [tensor.name for tensor in self.out.tensors if tensor.kind == "ternary planes"]
            if packed and config is not None and config.quantization is None:
                message = (
                    "the linears are ternary, packed to 2 bits, but config.json has no quantization_config, so there "
                    "is no telling whether weight_scale multiplies (autobitlinear) or divides (bitlinear)"
                )
                self.fail("weights", tensors.fail(packed[0], message))
            elif config is not None:
                with HfCheckpoint(self.path, config=config) as checkpoint:
                    self.read_as_model(checkpoint)
                return
            for name in packed:
                self.count_raw_plane(tensors, name)

    def list_readable_files(self, error: FormatError) -> None:
        """The checkpoint does not open as a whole: list the tensors of the files that do."""
        found: dict[str, tuple[TensorInfo, str]] = {}
        for path in [self.path] if self.path.is_file() else sorted(self.folder.glob("*.safetensors")):
            try:
                with SafetensorsFile(path) as file:
                    found |= {name: (info, path.name) for name, info in file.tensors.items()}
            except FormatError as other:
                if (other.path, other.message) != (error.path, error.message):
                    self.fail("weights", other)
        self.add_tensors(found)
        if not found and self.path.is_dir():
            others = [p.name for p in sorted(self.folder.iterdir()) if p.suffix in (".gguf", ".onnx", ".bin", ".pt")]
            if others:
                self.note("note", "weights", f"there is {', '.join(others[:3])}: only .safetensors can be read yet")

    def add_tensors(self, found: dict[str, tuple[TensorInfo, str]]) -> None:
        out = self.out
        out.tensors = [
            StoredTensor(name, tensor_kind(name, info.dtype), info.dtype, info.shape, info.nbytes, file)
            for name, (info, file) in found.items()
        ]
        out.nbytes = sum(tensor.nbytes for tensor in out.tensors)
        count, nbytes = Counter(t.kind for t in out.tensors), Counter[str]()
        for tensor in out.tensors:
            nbytes[tensor.kind] += tensor.nbytes
        out.sizes = [
            SizeOfKind(kind, count[kind], size, size / out.nbytes if out.nbytes else 0.0)
            for kind, size in nbytes.most_common()
        ]
        tied = out.config is not None and out.config.tie_word_embeddings
        out.parameters = sum(
            (4 if tensor.kind == "ternary planes" else 1) * int(np.prod(tensor.shape, dtype=object))
            for tensor in out.tensors
            if tensor.kind not in ("scales", "other") and not (tensor.kind == "head" and tied)
        )

    def read_as_model(self, checkpoint: HfCheckpoint) -> None:
        """Every tensor as `load` reads it, one layer in memory at a time."""
        config, tensors = checkpoint.config, checkpoint.tensors
        shape = (config.vocab_size, config.hidden_size)
        self.check_table(tensors, "model.embed_tokens.weight", shape)
        there = {int(match[1]) for name in tensors.names if (match := _LAYER.match(name))}
        layers = sorted(index for index in there if index < config.num_hidden_layers)
        for index in layers:  # not up to what config.json says, which may be billions
            try:
                self.read_layer(checkpoint, index)
            except BitNetRefError as error:
                self.read_broken_layer(checkpoint, index, error)
            if self.progress is not None:
                self.progress(index + 1, config.num_hidden_layers)
        if len(layers) < config.num_hidden_layers:
            first = next(index for index in count() if index not in there)
            last = next(index for index in count(config.num_hidden_layers - 1, -1) if index not in there)
            said = f"config.json says {config.num_hidden_layers} layers, and there is no tensor of "
            which = f"layers {first} to {last}" if first < last else f"layer {first}"
            self.fail("weights", FormatError(said + which, path=tensors.main, field=f"model.layers.{first}"))
        try:
            checkpoint.norm("final_norm")
        except BitNetRefError as error:
            self.fail("weights", error)
        if not config.tie_word_embeddings:
            self.check_head(checkpoint, shape)
        elif "lm_head.weight" in tensors:
            self.check_tied_head(tensors, shape)
        left = [n for n in tensors.names if n not in tensors.taken and not n.endswith(".rotary_emb.inv_freq")]
        if left:
            more = f", and {len(left) - 1} more" if len(left) > 1 else ""
            self.fail("weights", tensors.fail(left[0], f"no part of the model that config.json describes{more}"))
        self.judge_shares()

    def read_layer(self, checkpoint: HfCheckpoint, index: int) -> None:
        config = checkpoint.config
        for name in norms_of_layer(config, index):
            checkpoint.norm(name)
        weights = {name: checkpoint.linear(linear_name(index, name)) for name in config.linear_shapes()}
        for name, weight in weights.items():
            self.add_linear(checkpoint.tensors, index, name, weight)

    def add_linear(self, tensors: CheckpointTensors, index: int, name: str, weight: LinearWeight) -> None:
        if isinstance(weight, TernaryWeight):
            minus, zero, plus, _ = _count_codes([weight.packed])
            zero -= weight.shape[0] * weight.packed.shape[1] * 4 - weight.shape[0] * weight.shape[1]  # row padding
            scale = float(weight.w_dequant_scale)
            self.out.ternary.append(
                TernaryMatrix(linear_name(index, name), name, index, weight.shape, minus, zero, plus, scale)
            )
        if index == 0 and name == "q_proj":  # one matrix tells how the whole checkpoint was saved
            self.look_for_ternary_masters(tensors, isinstance(weight, DenseWeight))

    def look_for_ternary_masters(self, tensors: CheckpointTensors, dense: bool) -> None:
        """Float matrices that hold only -s, 0, +s: saved after quantisation. A block of rows is enough to see it."""
        names = [name for name in tensors.names if _LINEAR.fullmatch(name) and tensors.info(name).dtype != "U8"]
        convention = getattr(self.out.config and self.out.config.quantization, "scale_convention", None)
        if not names or convention in ("multiply", "divide"):
            return
        first = next(_blocks(tensors, names[0])).astype(np.float32)
        if not np.isfinite(first).all() or quantization.split_ternary(first.reshape(1, -1)) is None:
            return
        if dense:
            message = (
                "the linears hold only -s, 0 and +s: a ternary model, but config.json has it computed as a dense one"
            )
        else:
            message = (
                "these are no master weights: they hold only -s, 0 and +s, as saved after quantisation. "
                "s itself is taken as the scale (an absmean would shrink it by the share of zeros)"
            )
        self.note("warning", "weights", message, field=names[0])

    def read_broken_layer(self, checkpoint: HfCheckpoint, index: int, error: BitNetRefError) -> None:
        """Something in the layer is wrong: go through its linears one by one, and keep what can be kept."""
        self.fail("weights", error)
        tensors = checkpoint.tensors
        for name in checkpoint.config.linear_shapes():
            full = linear_name(index, name)
            try:
                self.add_linear(tensors, index, name, checkpoint.linear(full))
            except BitNetRefError as problem:
                self.fail("weights", problem)
                self.count_raw_plane(tensors, f"{hf_module(full)}.weight")
        # Already reported, or past what can be said of a broken layer: not "extra".
        tensors.taken |= {name for name in tensors.names if name.startswith(f"model.layers.{index}.")}

    def count_raw_plane(self, tensors: CheckpointTensors, name: str) -> None:
        """Shares straight from the packed bytes of a tensor that cannot be loaded."""
        match = _LINEAR.fullmatch(name)
        if match is None or name not in tensors or tensors.info(name).dtype != "U8":
            return
        shape = tensors.info(name).shape
        if len(shape) != 2 or 0 in shape:
            return
        layer, kind = int(match[1]), match[2]
        try:
            counts = _count_codes(_blocks(tensors, name))
        except FormatError as error:
            self.fail("weights", error)
            return
        minus, zero, plus, invalid = counts
        full = (4 * shape[0], shape[1])
        self.out.ternary.append(
            TernaryMatrix(linear_name(layer, kind), kind, layer, full, minus, zero, plus, None, invalid)
        )

    def check_table(self, tensors: CheckpointTensors, name: str, shape: tuple[int, int]) -> None:
        """The embedding or the head, which are large: looked through in blocks, never held."""
        try:
            if name not in tensors:
                raise tensors.fail(name, f"the tensor is missing; expected a float tensor of shape {list(shape)}")
            info = tensors.info(name)
            tensors.taken.add(name)
            if info.shape != shape or info.dtype not in ("BF16", "F16", "F32"):
                raise tensors.fail(name, f"expected floats of shape {list(shape)}, got {info.dtype} {list(info.shape)}")
            done = 0
            for block in _blocks(tensors, name):
                with np.errstate(invalid="ignore"):  # a signalling NaN of bfloat16 would be a warning
                    finite = np.isfinite(block)
                if not finite.all():
                    row, column = divmod(done + int(np.argmin(finite)), shape[1])
                    raise tensors.fail(name, f"holds NaN or Inf, first at index [{row}, {column}]")
                done += block.size
        except FormatError as error:
            self.fail("weights", error)

    def check_head(self, checkpoint: HfCheckpoint, shape: tuple[int, int]) -> None:
        quantized = checkpoint.config.quantization
        if quantized is None or "lm_head" in quantized.modules_to_not_convert:
            self.check_table(checkpoint.tensors, "lm_head.weight", shape)
            return
        try:  # rare: a head that is ternary too
            checkpoint.linear("lm_head")
        except BitNetRefError as error:
            self.fail("weights", error)

    def check_tied_head(self, tensors: CheckpointTensors, shape: tuple[int, int]) -> None:
        tensors.taken.add("lm_head.weight")
        try:
            pairs = zip(_blocks(tensors, "lm_head.weight"), _blocks(tensors, "model.embed_tokens.weight"), strict=True)
            same_kind = tensors.info("lm_head.weight").shape == shape
            if not same_kind or any(not np.array_equal(a, b) for a, b in pairs):
                message = "differs from the embedding, but config.json says tie_word_embeddings"
                raise tensors.fail("lm_head.weight", message)
        except (FormatError, KeyError, ValueError) as error:
            if isinstance(error, FormatError):
                self.fail("weights", error)  # a missing embedding is already reported

    def judge_shares(self) -> None:
        """Ternary matrices that no training gives."""
        for matrix in self.out.ternary:
            for value, share in zip(("-1", "0", "+1"), matrix.shares, strict=True):
                if share > 0.9:
                    self.note("warning", "weights", f"{share:.1%} of the weights are {value}", field=matrix.name)

    # -- tokenizer -----------------------------------------------------------------------------------------------------

    def read_tokenizer(self) -> None:
        from ..tokenizers import load_tokenizer

        if not any((self.folder / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
            self.note(
                "warning", "tokenizer", "there is none (tokenizer.json, tokenizer.model): only token ids can go in"
            )
            return
        try:
            tokenizer = load_tokenizer(self.folder)
            kind = "SentencePiece" if (tokenizer.path or "").endswith(".model") else "Hugging Face tokenizers"
            self.out.tokenizer = TokenizerFacts(
                kind=f"{kind} ({Path(tokenizer.path).name})" if tokenizer.path else kind,
                vocab_size=tokenizer.vocab_size,
                bos_id=tokenizer.bos_id,
                bos_token=None if tokenizer.bos_id is None else tokenizer.id_to_token(tokenizer.bos_id),
                adds_bos=tokenizer.bos_id is not None and tokenizer.encode("a")[:1] == [tokenizer.bos_id],
                eos_ids=tokenizer.eos_ids,
                eos_tokens=tuple(tokenizer.id_to_token(token) for token in tokenizer.eos_ids),
                chat_template=tokenizer.chat_template is not None,
            )
        except TokenizerError as error:
            self.fail("tokenizer", error)

    def compare_config_and_tokenizer(self, config: ModelConfig) -> None:
        facts = self.out.tokenizer
        stops = dict.fromkeys(config.eos_token_ids + (facts.eos_ids if facts else ()))
        self.out.stop_token_ids = tuple(stops)
        if not stops:
            self.note("warning", "tokenizer", "no end token is named anywhere: generation ends at max_tokens only")
        if facts is None:
            return
        if facts.vocab_size > config.vocab_size:
            self.note(
                "warning",
                "tokenizer",
                f"it has {facts.vocab_size} tokens and the embedding {config.vocab_size} rows: some text cannot go in",
            )
        elif facts.vocab_size < config.vocab_size:
            spare = config.vocab_size - facts.vocab_size
            self.note("note", "tokenizer", f"the last {spare} rows of the embedding have no token (usually padding)")
        if facts.bos_id is not None and config.bos_token_id not in (None, facts.bos_id):
            self.note(
                "warning",
                "tokenizer",
                f"its BOS is {facts.bos_id}, config.json's bos_token_id is {config.bos_token_id}",
            )
        if facts.eos_ids and config.eos_token_ids and set(facts.eos_ids) != set(config.eos_token_ids):
            ours, theirs = list(facts.eos_ids), list(config.eos_token_ids)
            self.note(
                "note", "tokenizer", f"it ends on {ours}, config.json on {theirs}: generation stops on any of them"
            )


def _blocks(tensors: CheckpointTensors, name: str) -> Iterator[NDArray]:
    """A tensor's values in order, flat, a few megabytes at a time."""
    info, path = tensors.info(name), tensors.path_of(name)
    left = info.nbytes
    try:
        with open(path, "rb") as file:
            file.seek(info.offset)
            while left:
                data = file.read(min(left, _BLOCK_BYTES))
                if not data or len(data) % DTYPES[info.dtype].itemsize:
                    raise FormatError("the file ends before the tensor does", path=path, offset=info.offset, field=name)
                yield np.frombuffer(data, dtype=DTYPES[info.dtype])
                left -= len(data)
    except OSError as problem:
        raise FormatError(f"cannot be read: {problem}", path=path, offset=info.offset, field=name) from problem


_BYTES = np.arange(256)
_CODES_OF_BYTE = np.stack(
    [sum((_BYTES >> shift & 3) == code for shift in (0, 2, 4, 6)) for code in range(4)]
)  # (4, 256)


def _count_codes(blocks: Any) -> tuple[int, int, int, int]:
    """How often each 2-bit code (0, 1, 2 for -1, 0, +1; 3 is invalid) occurs in packed bytes, in any layout of them."""
    histogram = np.zeros(256, dtype=np.int64)
    for block in blocks:
        flat = block.reshape(-1)
        for start in range(0, flat.size, 1 << 20):  # bincount widens its input to int64
            histogram += np.bincount(flat[start : start + (1 << 20)], minlength=256)
    minus, zero, plus, invalid = (int(n) for n in _CODES_OF_BYTE @ histogram)
    return minus, zero, plus, invalid
