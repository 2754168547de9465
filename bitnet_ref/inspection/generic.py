"""An inspection of any format: list what is stored, open it as `load` does, and go through it one layer at a time.

What a reader refuses becomes an *error* finding and the rest goes on. A format's own inspector (`hf`, `gguf`, `native`,
`onnx`) says how its tensors are called and how they are read in pieces.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import BackendError, BitNetRefError, FormatError
from ..formats.checkpoint import Checkpoint, ReadOptions, is_ternary, norms_of_layer
from ..reference.config import ModelConfig
from ..reference.weights import LinearWeight, TernaryWeight, linear_name
from .facts import Finding, Inspection, SizeOfKind, StoredTensor, TernaryMatrix, family_in_words
from .judge import judge_model
from .tokenizer import compare_with_config, describe_tokenizer

if TYPE_CHECKING:
    from ..tokenizers import Tokenizer

Progress = Callable[[int, int], None]  # (layers done, layers in all)
_SEVERITIES = ("error", "warning", "note")


class Inspector(ABC):
    """One inspection on its way: each step adds what it can, and a finding for what it cannot."""

    config_source = "the configuration"  # what messages call it
    layers: str | None = None  # "model.layers": what the names of a layer's tensors begin with, before its number

    def __init__(self, path: Path, options: ReadOptions | None = None, progress: Progress | None = None) -> None:
        self.path, self.progress = path, progress
        self.options = options or ReadOptions()
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
        self.look_at_file()
        describe_tokenizer(self)
        if out.config is not None:
            compare_with_config(self, out.config)
            judge_model(self, out.config)
        out.findings.sort(key=lambda finding: _SEVERITIES.index(finding.severity))
        return out

    def note(self, severity: str, part: str, message: str, field: str | None = None) -> None:
        self.out.findings.append(Finding(severity, part, message, field=field))

    def fail(self, part: str, error: BitNetRefError) -> None:
        """An error finding. A library that is missing is not the file's fault: such an error is raised."""
        if isinstance(error, BackendError):
            raise error
        message = getattr(error, "message", str(error))
        place = {key: getattr(error, key, None) for key in ("path", "offset", "field")}
        finding = Finding("error", part, message, type(error).__name__, **place)
        if finding not in self.out.findings:
            self.out.findings.append(finding)

    # -- what a format says for itself ---------------------------------------------------------------------------------

    @abstractmethod
    def list_tensors(self) -> None:
        """Fill in the format, the metadata and (`add_tensors`) the tensors, as the header has them."""

    @abstractmethod
    def open(self) -> Checkpoint | None:
        """Open it as a model. None after a finding that says why not; what can be told all the same is told."""

    @abstractmethod
    def taken(self, checkpoint: Any) -> set[str]:
        """The reader's own set of the tensors that the model has used."""

    def tokenizer_files(self) -> dict[str, bytes]:
        """As `Checkpoint.tokenizer_files`, if possible whether or not the model could be opened."""
        return {}

    def load_tokenizer(self) -> Tokenizer | None:
        """The tokenizer that `load` would take; None: there is none. TokenizerError."""
        from ..tokenizers import load_tokenizer_files

        files = self.tokenizer_files()
        if "tokenizer.json" not in files and "tokenizer.model" not in files:
            return None
        return load_tokenizer_files(files, path=self.path)

    def layers_there(self, layers: int) -> list[int]:
        """The layers below `layers` that have a tensor. (No loop up to a number from the file: it may be billions.)"""
        if self.layers is None:  # names do not tell; such a reader has compared the number with its tensors
            return list(range(layers))
        of_layer = re.compile(rf"{re.escape(self.layers)}\.(0|[1-9][0-9]{{0,17}})\.").match
        found = {int(match[1]) for tensor in self.out.tensors if (match := of_layer(tensor.name))}
        return sorted(index for index in found if index < layers)

    def table_name(self, name: str) -> str | None:
        """The file's tensor of "embedding" or "lm_head", if it can be read by `table_blocks`."""
        return None

    def table_blocks(self, checkpoint: Any, tensor: str) -> Iterator[NDArray]:
        """Its values in order, flat, a few megabytes at a time."""
        raise NotImplementedError

    def table_dtypes(self) -> tuple[str, ...]:
        """What a table may be stored as."""
        return ("BF16", "F16", "F32")

    def tensor_error(self, checkpoint: Any, tensor: str, message: str) -> FormatError:
        """The error about a tensor, with its place."""
        return FormatError(message, path=self.path, field=tensor)

    def count_raw_plane(self, name: str) -> None:
        """The shares of a linear (by our name) that cannot be loaded, straight from its bytes, where that can be."""
        return

    def look_at_linear(self, checkpoint: Any, index: int, short: str, weight: LinearWeight) -> None:
        """Something more to say about a linear that was read."""
        return

    def check_tied_head(self, checkpoint: Any) -> None:
        """A head that is stored although it is tied."""
        return

    def look_at_file(self) -> None:
        """What else is odd about the file."""
        return

    def weights_of(self, tensor: StoredTensor) -> int:
        """How many weights a stored tensor holds."""
        return int(np.prod(tensor.shape, dtype=object))

    # -- what is stored ------------------------------------------------------------------------------------------------

    def add_tensors(self, found: Iterable[StoredTensor]) -> None:
        out = self.out
        out.tensors = list(found)
        out.nbytes = sum(tensor.nbytes for tensor in out.tensors)
        tensors, nbytes = Counter(tensor.kind for tensor in out.tensors), Counter[str]()
        for tensor in out.tensors:
            nbytes[tensor.kind] += tensor.nbytes
        out.sizes = [
            SizeOfKind(kind, tensors[kind], size, size / out.nbytes if out.nbytes else 0.0)
            for kind, size in nbytes.most_common()
        ]

    def count_parameters(self) -> int:
        tied = self.out.config is not None and self.out.config.tie_word_embeddings
        return sum(
            self.weights_of(tensor)
            for tensor in self.out.tensors
            if tensor.kind not in ("scales", "other", "tokenizer") and not (tensor.kind == "head" and tied)
        )

    def set_config(self, config: ModelConfig) -> None:
        self.out.config, self.out.family = config, family_in_words(config)

    # -- the weights ---------------------------------------------------------------------------------------------------

    def read_as_model(self, checkpoint: Checkpoint) -> None:
        """Every tensor as `load` reads it, one layer in memory at a time."""
        config = checkpoint.config
        self.check_table(checkpoint, "embedding")
        there = self.layers_there(config.num_hidden_layers)
        for index in there:
            try:
                self.read_layer(checkpoint, index)
            except BitNetRefError as error:
                self.read_broken_layer(checkpoint, index, error)
            if self.progress is not None:
                self.progress(index + 1, config.num_hidden_layers)
        if len(there) < config.num_hidden_layers:
            known = set(there)
            first = next(index for index in count() if index not in known)
            last = next(index for index in count(config.num_hidden_layers - 1, -1) if index not in known)
            said = f"{self.config_source} says {config.num_hidden_layers} layers, and there is no tensor of "
            which = f"layers {first} to {last}" if first < last else f"layer {first}"
            self.fail("weights", FormatError(said + which, path=self.path, field=f"{self.layers}.{first}"))
        steps: list[Callable[[], object]] = [lambda: checkpoint.norm("final_norm")]
        if config.tie_word_embeddings:
            steps.append(lambda: self.check_tied_head(checkpoint))
        elif is_ternary(config, "lm_head"):  # rare: a head that is ternary too
            steps.append(lambda: checkpoint.linear("lm_head"))
        else:
            steps.append(lambda: self.check_table(checkpoint, "lm_head"))
        for step in (*steps, checkpoint.finish):
            try:
                step()
            except BitNetRefError as error:
                self.fail("weights", error)

    def read_layer(self, checkpoint: Checkpoint, index: int) -> None:
        config = checkpoint.config
        for name in norms_of_layer(config, index):
            checkpoint.norm(name)
        weights = {name: checkpoint.linear(linear_name(index, name)) for name in config.linear_shapes()}
        for name, weight in weights.items():
            self.add_linear(checkpoint, index, name, weight)

    def add_linear(self, checkpoint: Checkpoint, index: int, short: str, weight: LinearWeight) -> None:
        if isinstance(weight, TernaryWeight):
            minus, zero, plus, _ = count_codes([weight.packed])
            zero -= weight.shape[0] * weight.packed.shape[1] * 4 - weight.shape[0] * weight.shape[1]  # row padding
            scale = float(weight.w_dequant_scale)
            self.out.ternary.append(
                TernaryMatrix(linear_name(index, short), short, index, weight.shape, minus, zero, plus, scale)
            )
        self.look_at_linear(checkpoint, index, short, weight)

    def read_broken_layer(self, checkpoint: Checkpoint, index: int, error: BitNetRefError) -> None:
        """Something in the layer is wrong: go through its parts one by one, and keep what can be kept."""
        self.fail("weights", error)
        for name in norms_of_layer(checkpoint.config, index):
            try:
                checkpoint.norm(name)
            except BitNetRefError as problem:
                self.fail("weights", problem)
        for short in checkpoint.config.linear_shapes():
            name = linear_name(index, short)
            try:
                self.add_linear(checkpoint, index, short, checkpoint.linear(name))
            except BitNetRefError as problem:
                self.fail("weights", problem)
                self.count_raw_plane(name)
        if self.layers is not None:  # already reported, or past what can be said of a broken layer: not "extra"
            prefix = f"{self.layers}.{index}."
            self.taken(checkpoint).update(t.name for t in self.out.tensors if t.name.startswith(prefix))

    def check_table(self, checkpoint: Checkpoint, name: str) -> None:
        """The embedding or the head, which are large: looked through in blocks, never held, where the format allows."""
        config, tensor = checkpoint.config, self.table_name(name)
        try:
            if tensor is None:
                checkpoint.embedding() if name == "embedding" else checkpoint.linear(name)
                return
            shape = (config.vocab_size, config.hidden_size)
            found = next((stored for stored in self.out.tensors if stored.name == tensor), None)
            if found is None:
                message = f"the tensor is missing; expected a float tensor of shape {list(shape)}"
                raise FormatError(message, path=self.path, field=tensor)
            self.taken(checkpoint).add(tensor)
            if found.shape != shape or found.dtype not in self.table_dtypes():
                got = f"expected floats of shape {list(shape)}, got {found.dtype} {list(found.shape)}"
                raise self.tensor_error(checkpoint, tensor, got)
            done = 0
            for block in self.table_blocks(checkpoint, tensor):
                with np.errstate(invalid="ignore"):  # a signalling NaN of 16 bits would be a warning
                    finite = np.isfinite(block)
                if not finite.all():
                    row, column = divmod(done + int(np.argmin(finite)), shape[1])
                    raise self.tensor_error(checkpoint, tensor, f"holds NaN or Inf, first at index [{row}, {column}]")
                done += block.size
        except BitNetRefError as error:
            self.fail("weights", error)

    def add_raw_plane(self, name: str, shape: tuple[int, int], blocks: Iterable[NDArray[np.uint8]]) -> None:
        """What `count_codes` finds in a linear that could not be loaded."""
        minus, zero, plus, invalid = count_codes(blocks)
        _, layer, _, short = name.split(".")
        self.out.ternary.append(TernaryMatrix(name, short, int(layer), shape, minus, zero, plus, None, invalid))


_BYTES = np.arange(256)
_CODES_OF_BYTE = np.stack(
    [sum((_BYTES >> shift & 3) == code for shift in (0, 2, 4, 6)) for code in range(4)]
)  # (4, 256)


def count_codes(blocks: Iterable[NDArray[np.uint8]]) -> tuple[int, int, int, int]:
    """How often each 2-bit code (0, 1, 2 for -1, 0, +1; 3 is invalid) occurs in packed bytes, in any layout of them."""
    histogram = np.zeros(256, dtype=np.int64)
    for block in blocks:
        flat = block.reshape(-1)
        for start in range(0, flat.size, 1 << 20):  # bincount widens its input to int64
            histogram += np.bincount(flat[start : start + (1 << 20)], minlength=256)
    minus, zero, plus, invalid = (int(n) for n in _CODES_OF_BYTE @ histogram)
    return minus, zero, plus, invalid
