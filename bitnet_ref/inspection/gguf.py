"""Inspecting a .gguf file: its dialect, its layouts, and what its metadata leave out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import BitNetRefError, ConfigError, FormatError
from ..formats.checkpoint import Checkpoint, LoadOptions
from ..formats.gguf.blocks import BY_PACKAGE, DEQUANTIZABLE, TERNARY_TYPES, dequantize
from ..formats.gguf.config import architectures, read_gguf_config
from ..formats.gguf.evidence import block_linears, check_dialect
from ..formats.gguf.file import GgufFile, GgufTensor, Typed, open_gguf
from ..formats.gguf.model import GgufCheckpoint
from ..formats.names import gguf_name, linear_of_gguf
from ..reference.config import QuantizationConfig
from ..reference.layers import Array
from ..tokenizers.gguf_vocab import tokenizer_files_from_gguf
from .facts import Inspection, StoredTensor
from .inspector import Inspector, tensor_kind
from .judge import LLAMA3_VOCAB

_BLOCK_VALUES = 1 << 20
_EXACT_TYPES = ("F32", "F16", "BF16")
_SHOWN = 200  # characters of a metadata value


class GgufInspector(Inspector):
    """Reads the header, then the model that `GgufCheckpoint` makes of it; if that fails, what the header allows."""

    config_source = "the metadata"
    layers = "blk"
    file: GgufFile | None = None

    def run(self) -> Inspection:
        try:
            return super().run()
        finally:
            if self.file is not None:
                self.file.close()

    def list_tensors(self) -> None:
        self.out.format = "GGUF"
        try:
            self.file = file = open_gguf(self.path)
        except FormatError as error:
            self.out.report_error("weights", error)
            return
        self.out.format = f"GGUF version {file.version}"
        self.out.architecture = str(file.metadata.get("general.architecture", "not named"))[:_SHOWN]
        self.out.metadata = {key: _describe(typed) for key, typed in file.typed.items()}
        self.add_tensors(
            StoredTensor(t.name, tensor_kind(t.name, t.type.name), t.type.name, t.shape, t.nbytes, self.path.name)
            for t in file.tensors.values()
        )

    def open(self) -> Checkpoint | None:
        if self.file is None:
            return None
        try:
            return GgufCheckpoint(self.path, self.options)
        except BitNetRefError as error:
            self.out.report_error("config" if isinstance(error, ConfigError) else "weights", error)
        try:  # without the evidence for the I2_S layout, which may be what cannot be read
            checkpoint = GgufCheckpoint(self.path, LoadOptions(i2_s_layout="x86", tl_tiles=self.options.tl_tiles))
        except BitNetRefError:
            self.read_without_model(self.file)
            return None
        checkpoint.evidence = [words for words in checkpoint.evidence if not words.startswith("I2_S layout")]
        if any(tensor.type.name == "I2_S" for tensor in block_linears(self.file)):
            checkpoint.evidence.append("I2_S layout: not decided, because a matrix could not be read")
        return checkpoint

    def read_without_model(self, file: GgufFile) -> None:
        """Read the configuration and the shares of a file that cannot be loaded as a model."""
        try:
            check_dialect(file, self.out.evidence)
            self.set_config(read_gguf_config(file, QuantizationConfig("autobitlinear", "offline")))
        except BitNetRefError:
            pass  # already reported
        for tensor in block_linears(file):
            name = linear_of_gguf(tensor.name)
            if name is not None and tensor.type.name in TERNARY_TYPES:
                self.count_raw_plane(name)

    def tokenizer_files(self) -> dict[str, bytes]:
        if self.file is None or "tokenizer.ggml.tokens" not in self.file.metadata:
            return {}
        return tokenizer_files_from_gguf(self.file.metadata)

    def table_name(self, name: str) -> str:
        return f"{gguf_name(name)}.weight"

    def table_dtypes(self) -> tuple[str, ...]:
        return (*DEQUANTIZABLE, *BY_PACKAGE)

    def table_blocks(self, checkpoint: GgufCheckpoint, tensor: str) -> Iterator[Array]:
        stored = checkpoint.file.tensors[tensor]
        for raw in self.raw_blocks(stored):
            values = len(raw) // stored.type.block_bytes * stored.type.block_values
            yield dequantize(raw, stored.type.name, (values,))

    def raw_blocks(self, tensor: GgufTensor) -> Iterator[NDArray[np.uint8]]:
        """Whole blocks of the tensor's type, a few megabytes at a time, without the tail."""
        assert self.file is not None
        step = max(1, _BLOCK_VALUES // tensor.type.block_values) * tensor.type.block_bytes
        end = tensor.nbytes - tensor.type.tail_bytes
        for start in range(0, end, step):
            yield self.file.read_raw(tensor.name, start, min(step, end - start))

    def count_raw_plane(self, name: str) -> None:
        tensor = self.file.tensors.get(f"{gguf_name(name)}.weight") if self.file is not None else None
        if tensor is None or len(tensor.shape) != 2 or tensor.type.name not in ("I2_S", "TQ2_0"):
            return
        blocks = self.raw_blocks(tensor)
        if tensor.type.name == "TQ2_0":  # 64 bytes of codes, then the scale
            blocks = (np.ascontiguousarray(raw.reshape(-1, 66)[:, :64]) for raw in blocks)
        shape = tensor.shape[0], tensor.shape[1]
        self.try_part(lambda: self.add_raw_plane(name, shape, blocks))

    def check_file(self) -> None:
        if self.file is None:
            return
        if any("x86 assumed" in words for words in self.out.evidence):
            message = (
                "the layout of the I2_S matrices is assumed: nothing in the file tells it, and in a wrong layout the "
                "model still loads; --i2s-layout (LoadOptions.i2_s_layout) sets another"
            )
            self.out.report("warning", "weights", message)
        if self.out.kind in ("gguf-tq1_0", "gguf-tq2_0"):
            message = "scales are float16: each may have been rounded by up to 1 part in 2048 when it was written"
            self.out.report("note", "weights", message)
        self.check_tables(self.file)
        self.check_metadata(self.file)

    def check_tables(self, file: GgufFile) -> None:
        """Report a quantised embedding or head: BitNet's are trained in full precision."""
        for name, what in (("output.weight", "the head"), ("token_embd.weight", "the embedding")):
            tensor = file.tensors.get(name)
            if tensor is None or tensor.type.name in _EXACT_TYPES:
                continue
            if name == "token_embd.weight" and "output.weight" not in file.tensors:
                what = "the embedding, which is the head too,"
            message = f"{what} is quantised to {tensor.type.name}: logits differ from those of the model as trained"
            self.out.report("warning", "weights", message, field=name)

    def check_metadata(self, file: GgufFile) -> None:
        metadata, arch = file.metadata, file.metadata.get("general.architecture")
        if self.out.config is not None:
            key, activation = f"{arch}.hidden_activation", self.out.config.activation
            if key in metadata and activation != (implied := architectures()[str(arch)][1].activation):
                message = f"says {activation}, which is used; the architecture {arch} alone would mean {implied}"
                self.out.report("warning", "config", message, field=key)
            if (key := f"{arch}.rope.freq_base") not in metadata:
                self.out.report("note", "config", "the key is absent, so the default holds: theta 10000", field=key)
        tokens = metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list):
            return
        model = metadata.get("tokenizer.ggml.model")  # it may be an array, which has no truth value
        if isinstance(model, str) and model == "gpt2" and "tokenizer.ggml.pre" not in metadata:
            assumed = "; llama-bpe is assumed" if len(tokens) == LLAMA3_VOCAB else ""
            message = f"the key is absent, which names the pre-tokenizer{assumed}. Other tools cut text wrongly"
            self.out.report("warning", "tokenizer", message, field="tokenizer.ggml.pre")
        ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        named = {value for value in ids if isinstance(value, int)}  # another type is the configuration's error
        stops = self.out.config.eos_token_ids if self.out.config is not None else ()
        if by_text := [token for token in stops if token not in named and 0 <= token < len(tokens)]:
            listed = ", ".join(f"{tokens[token]} ({token})" for token in by_text)
            message = f"no key says that {listed} ends a turn; it is a stop token because of its text"
            self.out.report("note", "tokenizer", message, field="tokenizer.ggml.eot_token_id")


def _describe(typed: Typed) -> str:
    value: Any = typed.value
    if typed.type.startswith("["):
        return f"{typed.type} of {len(value)}"
    text = str(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
