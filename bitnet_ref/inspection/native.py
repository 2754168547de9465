"""Inspecting a native .bitnet.safetensors file: version, content hash, storage of its planes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from numpy.typing import NDArray

from ..errors import BitNetRefError, FormatError
from ..formats.checkpoint import Checkpoint, linear_shape
from ..formats.native.model import TOKENIZER_PREFIX, NativeCheckpoint
from ..formats.safetensors import SafetensorsFile
from .facts import Inspection, StoredTensor
from .generic import Inspector
from .hf import blocks_of

_PLANES = (".packed", ".trits")
_SHOWN = 200


def tensor_kind(name: str) -> str:
    """What a tensor is for, by its name in a native file: the categories of the table of sizes."""
    if name.startswith(TOKENIZER_PREFIX):
        return "tokenizer"
    if name.endswith(".w_dequant_scale"):
        return "scales"
    if name.endswith(".bias"):
        return "biases"
    if name.endswith(_PLANES):
        return "ternary planes"
    if name == "embedding" or name.startswith("lm_head."):
        return "embedding" if name == "embedding" else "head"
    return "norms" if name.endswith("norm") else "float linears" if name.endswith(".weight") else "other"


class NativeInspector(Inspector):
    """The configuration, the tokenizer and all tensors are in the one file."""

    layers = "blocks"
    checkpoint: NativeCheckpoint | None = None

    def run(self) -> Inspection:
        try:
            return super().run()
        finally:
            if self.checkpoint is not None:
                self.checkpoint.close()

    def list_tensors(self) -> None:
        self.out.format = "native"
        try:
            with SafetensorsFile(self.path) as file:
                self.out.metadata = {key: value[:_SHOWN] for key, value in file.metadata.items()}
                self.add_tensors(
                    StoredTensor(name, tensor_kind(name), info.dtype, info.shape, info.nbytes, self.path.name)
                    for name, info in file.tensors.items()
                )
        except FormatError as error:
            self.fail("weights", error)
            return
        self.out.format = f"native, version {self.out.metadata.get('format_version', 'not named')[:20]}"

    def open(self) -> Checkpoint | None:
        if not self.out.tensors:
            return None
        try:
            self.checkpoint = NativeCheckpoint(self.path, self.options)
        except BitNetRefError as error:
            self.fail("config", error)
            return None
        self.out.architecture = self.checkpoint.config.model_type
        return self.checkpoint

    def look_at_file(self) -> None:
        """Every byte against the content hash: a plane with a flipped bit is a valid plane."""
        if self.checkpoint is None or self.out.errors:
            return
        try:
            with NativeCheckpoint(self.path) as again:
                digest = again.verify()
            self.out.evidence.append(f"the content hash holds: {digest[:23]}...")
        except FormatError as error:
            self.fail("weights", error)

    def taken(self, checkpoint: NativeCheckpoint) -> set[str]:
        return checkpoint.tensors.taken

    def tokenizer_files(self) -> dict[str, bytes]:
        if self.checkpoint is None:
            return {}
        with NativeCheckpoint(self.path) as again:
            return again.tokenizer_files()

    def table_name(self, name: str) -> str:
        return name if name == "embedding" else f"{name}.weight"

    def table_blocks(self, checkpoint: NativeCheckpoint, tensor: str) -> Iterator[NDArray[Any]]:
        return blocks_of(checkpoint.tensors, tensor)

    def tensor_error(self, checkpoint: NativeCheckpoint, tensor: str, message: str) -> FormatError:
        return checkpoint.tensors.fail(tensor, message)

    def weights_of(self, tensor: StoredTensor) -> int:
        config, stem = self.out.config, tensor.name.rpartition(".")[0]
        if config is None or not tensor.name.endswith(_PLANES):
            return super().weights_of(tensor) * {"packed": 4, "trits": 5}.get(tensor.name.rpartition(".")[2], 1)
        try:
            rows, columns = linear_shape(config, stem)  # rows are padded to whole bytes
        except KeyError:  # the name of no linear
            return 0
        return rows * columns
