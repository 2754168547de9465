"""Inspecting a model in any format: list what is stored, open it as `load` does, and read it one layer at a time.

What a reader refuses becomes an *error* finding, and the inspection continues. The inspectors of the formats (`hf`,
`gguf`, `native`, `onnx`) know the names of their tensors and how to read them in blocks.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import BitNetRefError, FormatError
from ..families import FAMILIES, family_table
from ..formats.checkpoint import (
    Checkpoint,
    LoadOptions,
    Progress,
    arrays_of_layer,
    choose_kind,
    fold,
    is_ternary,
    norms_of_layer,
)
from ..formats.gguf.blocks import TERNARY_TYPES
from ..formats.hf.folder import CheckpointTensors
from ..formats.names import gguf_linears
from ..formats.native.model import TOKENIZER_PREFIX
from ..formats.safetensors import DTYPES, TensorInfo
from ..reference.config import ModelConfig
from ..reference.layers import Array
from ..reference.weights import LinearWeight, linear_name
from ..tokenizers import Tokenizer, load_tokenizer_files
from .facts import Inspection, SizeOfKind, StoredTensor, TernaryMatrix, family_in_words
from .judge import compare_with_config, describe_tokenizer, judge_model

AnyCheckpoint = TypeVar("AnyCheckpoint", bound=Checkpoint)
_BLOCK_BYTES = 1 << 24
_SEVERITIES = ("error", "warning", "note")
_WORDS = ("U32", "I32")  # of MLX and AWQ
_UNCOUNTED = ("scales", "other", "tokenizer", "left out")  # kinds of tensors that hold no parameters
_BYTES = np.arange(256)
# (4, 256): how often each code is in each byte
_CODES_OF_BYTE = np.stack([sum((_BYTES >> shift & 3) == code for shift in (0, 2, 4, 6)) for code in range(4)])


@family_table
def _kinds() -> tuple[tuple[str, str], ...]:
    """(pattern, kind): names of tensors in Hugging Face, GGUF and native files, by which tables group them. The first
    match counts."""
    left_out = {re.escape(start) for each in FAMILIES.values() if each.hf is not None for start in each.hf.left_out}
    return (
        (rf"({'|'.join(sorted(left_out))}).*", "left out"),
        (rf"{TOKENIZER_PREFIX}.*", "tokenizer"),
        (r".*\.(weight_scale|w_dequant_scale|scales?|row_alpha|biases|qzeros|signs)", "scales"),
        (r".*\.bias", "biases"),
        (r"embedding|(.*\.)?embed_tokens\..*|token_embd\.weight", "embedding"),
        (r".*\.(packed|trits)", "ternary planes"),
        (r"lm_head\..*|output\.weight", "head"),
        (rf".*(_proj|\.({'|'.join(gguf_linears().values())}))\.q?weight", "float linears"),
        (r".*(norm|_ln)(\.weight)?", "norms"),
        (r".*", "other"),
    )


class Inspector(ABC):
    """One inspection. Each step adds to `out` what it learns, and a finding for what it cannot read."""

    config_source = "the configuration"  # its name in messages
    layers: str | None = None  # what the names of a layer's tensors begin with, before its number: "model.layers"

    def __init__(self, path: Path, options: LoadOptions | None = None, progress: Progress | None = None) -> None:
        self.path, self.progress = path, progress
        self.options = options or LoadOptions()
        self.out = Inspection(path=str(path))

    def run(self) -> Inspection:
        out = self.out
        self.list_tensors()
        checkpoint = self.open()
        if checkpoint is not None:
            with checkpoint:
                out.kind, out.evidence = checkpoint.kind, checkpoint.evidence
                self.set_config(checkpoint.config)
                self.read_as_model(checkpoint)
        out.parameters = self.count_parameters() if out.tensors else None
        self.check_file()
        describe_tokenizer(out, self.load_tokenizer)
        if out.config is not None:
            compare_with_config(out, out.config, self.config_source)
            judge_model(out, out.config, self.config_source)
        out.findings.sort(key=lambda finding: _SEVERITIES.index(finding.severity))
        return out

    # -- what a format provides ----------------------------------------------------------------------------------------

    @abstractmethod
    def list_tensors(self) -> None:
        """Fill in the format, the metadata and (`add_tensors`) the tensors, from the file's header."""

    @abstractmethod
    def open(self) -> Checkpoint | None:
        """Open the file as a model. None after adding a finding that says why it cannot be opened."""

    def tokenizer_files(self) -> dict[str, bytes]:
        """As `Checkpoint.tokenizer_files`, if possible even when the model could not be opened."""
        return {}

    def load_tokenizer(self) -> Tokenizer | None:
        """The tokenizer that `load` uses, or None. Raises TokenizerError."""
        files = self.tokenizer_files()
        is_there = "tokenizer.json" in files or "tokenizer.model" in files
        return load_tokenizer_files(files, path=self.path) if is_there else None

    def table_name(self, name: str) -> str | None:
        """The file's tensor of "embedding" or "lm_head", if `table_blocks` can read it."""
        return None

    def table_blocks(self, checkpoint: Any, tensor: str) -> Iterator[Array]:
        """Its values in order, flat, a few megabytes at a time."""
        return blocks_of(checkpoint.tensors, tensor)

    def table_dtypes(self) -> tuple[str, ...]:
        """The dtypes that a table may have."""
        return ("BF16", "F16", "F32")

    def count_raw_plane(self, name: str) -> None:
        """Count the codes of a linear that cannot be loaded, straight from its bytes, where possible."""
        return

    def check_linear(self, checkpoint: Any, index: int, short: str, weight: LinearWeight) -> None:
        """Add findings about a linear that was read."""
        return

    def check_tied_head(self, checkpoint: Any) -> None:
        """Check a head that is stored although it is tied."""
        return

    def check_file(self) -> None:
        """Add findings about the file as a whole."""
        return

    def weights_of(self, tensor: StoredTensor) -> int:
        """How many weights a stored tensor holds."""
        return int(np.prod(tensor.shape, dtype=object))

    def try_open(self, reader: Callable[[Path, LoadOptions], AnyCheckpoint]) -> AnyCheckpoint | None:
        """Open the file with a reader. None after adding an error finding."""
        try:
            checkpoint = reader(self.path, self.options)
        except BitNetRefError as error:
            self.out.report_error("config", error)
            return None
        self.out.architecture = checkpoint.config.model_type
        return checkpoint

    # -- what is stored ------------------------------------------------------------------------------------------------

    def add_tensors(self, tensors: Iterable[StoredTensor]) -> None:
        out = self.out
        out.tensors = list(tensors)
        out.nbytes = sum(tensor.nbytes for tensor in out.tensors)
        types, nbytes = dict[str, Counter[str]](), Counter[str]()
        for tensor in out.tensors:
            nbytes[tensor.kind] += tensor.nbytes
            types.setdefault(tensor.kind, Counter())[tensor.dtype] += 1
        out.sizes = [
            SizeOfKind(kind, types[kind].total(), size, size / out.nbytes if out.nbytes else 0.0, dict(types[kind]))
            for kind, size in nbytes.most_common()
        ]

    def count_parameters(self) -> int:
        is_tied = self.out.config is not None and self.out.config.tie_word_embeddings
        uncounted = (*_UNCOUNTED, "head") if is_tied else _UNCOUNTED
        return sum(self.weights_of(tensor) for tensor in self.out.tensors if tensor.kind not in uncounted)

    def set_config(self, config: ModelConfig) -> None:
        self.out.config, self.out.family = config, family_in_words(config)

    # -- the weights ---------------------------------------------------------------------------------------------------

    def read_as_model(self, checkpoint: Checkpoint) -> None:
        """Read every tensor as `load` does, with one layer in memory at a time."""
        config = checkpoint.config
        self.check_table(checkpoint, "embedding")
        stored = self.stored_layers(config.num_hidden_layers)
        for index in stored:
            self.read_layer(checkpoint, index)
            if self.progress is not None:
                self.progress(index + 1, config.num_hidden_layers)
        if len(stored) < config.num_hidden_layers:
            known = set(stored)
            first = next(index for index in count() if index not in known)
            last = next(index for index in count(config.num_hidden_layers - 1, -1) if index not in known)
            missing = f"layers {first} to {last}" if first < last else f"layer {first}"
            message = f"{self.config_source} says {config.num_hidden_layers} layers; there is no tensor of {missing}"
            self.out.report_error("weights", FormatError(message, path=self.path, field=f"{self.layers}.{first}"))
        self.try_part(lambda: checkpoint.norm("final_norm"))
        if config.tie_word_embeddings:
            self.try_part(lambda: self.check_tied_head(checkpoint))
        elif is_ternary(config, "lm_head"):  # rare
            self.try_part(lambda: checkpoint.linear("lm_head"))
        else:
            self.check_table(checkpoint, "lm_head")
        self.try_part(checkpoint.finish)
        if self.out.is_grouped:
            values = "binary" if self.out.is_binary else "ternary"
            self.out.family = family_in_words(config).replace(", dense", f", {values} by groups")

    def try_part(self, read: Callable[[], object]) -> bool:
        """Read a part of the model. False after adding an error finding."""
        try:
            read()
        except BitNetRefError as error:
            self.out.report_error("weights", error)
            return False
        return True

    def stored_layers(self, layers: int) -> list[int]:
        """The layers below `layers` that have a tensor. (The file may claim billions of layers: no loop.)"""
        if self.layers is None:  # names do not tell; such a reader has compared the number with its tensors
            return list(range(layers))
        of_layer = re.compile(rf"{re.escape(self.layers)}\.(0|[1-9][0-9]{{0,17}})\.").match
        indices = {int(match[1]) for tensor in self.out.tensors if (match := of_layer(tensor.name))}
        return sorted(index for index in indices if index < layers)

    def read_layer(self, checkpoint: Checkpoint, index: int) -> None:
        """Read a layer part by part, so that a broken part does not hide the others."""
        config = checkpoint.config
        good = [self.try_part(partial(checkpoint.norm, name)) for name in norms_of_layer(config, index)]
        for short in config.linear_shapes(index):
            good.append(self.try_part(partial(self.add_linear, checkpoint, index, short)))
            if not good[-1]:
                self.count_raw_plane(linear_name(index, short))
        good += [self.try_part(partial(checkpoint.array, name)) for name in arrays_of_layer(config, index)]
        if not all(good) and self.layers is not None:  # `finish` is not to report what was left unread as unknown
            prefix = f"{self.layers}.{index}."
            names = (tensor.name for tensor in self.out.tensors)
            checkpoint.taken.update(name for name in names if name.startswith(prefix))

    def add_linear(self, checkpoint: Checkpoint, index: int, short: str) -> None:
        name = linear_name(index, short)
        stored = checkpoint.linear(name)
        weight = choose_kind(checkpoint, name, fold(checkpoint, name, stored))
        planes: Any = weight.bit_linear or weight
        if hasattr(planes, "packed"):
            minus, zero, plus, _ = count_codes([planes.packed])
            zero -= weight.shape[0] * (planes.packed.shape[1] * 4 - weight.shape[1])  # the padding of the rows
            group = getattr(planes, "group", None)
            scale = float(planes.w_dequant_scale if group is None else planes.scales.mean())
            counts = minus, zero, plus, scale
            self.out.ternary.append(TernaryMatrix(name, short, index, weight.shape, *counts, group=group))
        self.check_linear(checkpoint, index, short, stored)

    def check_table(self, checkpoint: Checkpoint, name: str) -> None:
        """Check the embedding or the head, which are large: in blocks, never whole, where the format allows it."""
        tensor = self.table_name(name)
        if tensor is not None:
            self.try_part(lambda: self.check_blocks(checkpoint, tensor))
        elif name == "embedding":
            self.try_part(checkpoint.embedding)
        else:
            self.try_part(lambda: checkpoint.linear(name))

    def check_blocks(self, checkpoint: Checkpoint, tensor: str) -> None:
        shape = (checkpoint.config.vocab_size, checkpoint.config.hidden_size)
        stored = next((stored for stored in self.out.tensors if stored.name == tensor), None)
        if stored is None:
            message = f"the tensor is missing; expected a float tensor of shape {list(shape)}"
            raise FormatError(message, path=self.path, field=tensor)
        checkpoint.taken.add(tensor)
        if stored.shape != shape or stored.dtype not in self.table_dtypes():
            message = f"expected floats of shape {list(shape)}, got {stored.dtype} {list(stored.shape)}"
            raise checkpoint.fail(tensor, message)
        start = 0
        for block in self.table_blocks(checkpoint, tensor):
            with np.errstate(invalid="ignore"):  # a signalling NaN of 16 bits would be a warning
                finite = np.isfinite(block)
            if not finite.all():
                row, column = divmod(start + int(np.argmin(finite)), shape[1])
                raise checkpoint.fail(tensor, f"holds NaN or Inf, first at index [{row}, {column}]")
            start += block.size

    def add_raw_plane(self, name: str, shape: tuple[int, int], blocks: Iterable[NDArray[np.uint8]]) -> None:
        """Add the counts of a linear that could not be loaded."""
        minus, zero, plus, invalid = count_codes(blocks)
        _, layer, _, short = name.split(".")
        self.out.ternary.append(TernaryMatrix(name, short, int(layer), shape, minus, zero, plus, None, invalid))


def stored_tensor(name: str, info: TensorInfo, path: Path) -> StoredTensor:
    return StoredTensor(name, tensor_kind(name, info.dtype), info.dtype, info.shape, info.nbytes, path.name)


def blocks_of(tensors: CheckpointTensors, name: str) -> Iterator[NDArray[Any]]:
    """A tensor's values in order, flat, a few megabytes at a time; each block is overwritten by the next."""
    for block in tensors.blocks(name, _BLOCK_BYTES):
        yield np.frombuffer(block, dtype=DTYPES[tensors.info(name).dtype])


def tensor_kind(name: str, dtype: str) -> str:
    """A tensor's category in the table of sizes, by its name in the file."""
    kind = next(kind for pattern, kind in _kinds() if re.fullmatch(pattern, name, re.DOTALL))
    if kind != "float linears":
        return kind
    return "ternary planes" if dtype in ("U8", *TERNARY_TYPES) else "packed linears" if dtype in _WORDS else kind


def count_codes(blocks: Iterable[NDArray[np.uint8]]) -> tuple[int, int, int, int]:
    """Counts of the 2-bit codes 0, 1, 2 (-1, 0, +1) and 3 (invalid) in packed bytes, in any layout of them."""
    histogram = np.zeros(256, dtype=np.int64)
    for block in blocks:
        flat = block.reshape(-1)
        for start in range(0, flat.size, 1 << 20):  # bincount widens its input to int64
            histogram += np.bincount(flat[start : start + (1 << 20)], minlength=256)
    minus, zero, plus, invalid = (int(n) for n in _CODES_OF_BYTE @ histogram)
    return minus, zero, plus, invalid
