"""Inspecting a native .bitnet.safetensors file: its version, content hash and storage."""

from __future__ import annotations

from ..errors import FormatError
from ..formats.checkpoint import Checkpoint, linear_shape
from ..formats.native.model import NativeCheckpoint
from ..formats.safetensors import SafetensorsFile
from .facts import StoredTensor
from .inspector import Inspector, stored_tensor

_PLANES = (".packed", ".trits")
_SHOWN = 200


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

    def table_name(self, name: str) -> str:
        return name if name == "embedding" else f"{name}.weight"

    def weights_of(self, tensor: StoredTensor) -> int:
        config, stem = self.out.config, tensor.name.rpartition(".")[0]
        if config is None or not tensor.name.endswith(_PLANES):
            return super().weights_of(tensor) * {"packed": 4, "trits": 5}.get(tensor.name.rpartition(".")[2], 1)
        try:
            rows, columns = linear_shape(config, stem)  # rows are padded to whole bytes
        except KeyError:  # the name of no linear
            return 0
        return rows * columns
