"""Inspecting an .onnx file: its initialisers, and the model that the reader finds in the graph."""

from __future__ import annotations

import math

from ..errors import FormatError
from ..formats.checkpoint import Checkpoint
from ..formats.onnx.file import CONFIG_KEY, DTYPES, FORMAT_KEY, PACKED_SUFFIX, SCALE_SUFFIX, SMALL_TYPES, OnnxFile
from ..formats.onnx.model import OnnxCheckpoint
from .facts import StoredTensor
from .inspector import Inspector, tensor_kind

_SHOWN = 200


class OnnxInspector(Inspector):
    """Knows the tensors of our own exports by their names (Hugging Face's), and of other exporters where it can."""

    checkpoint: OnnxCheckpoint | None = None
    ours = False

    def list_tensors(self) -> None:
        self.out.format = "ONNX"
        try:
            file = OnnxFile(self.path)
            opset = max((entry.version for entry in file.model.opset_import if not entry.domain), default=0)
            self.ours = FORMAT_KEY in file.metadata
            self.layers = "model.layers" if self.ours else None
            by = "bitnet_ref" if self.ours else f"{file.model.producer_name or 'an unnamed producer'}"[:_SHOWN]
            self.out.format = f"ONNX, operator set {opset}, written by {by}"
            self.out.metadata = {key: value[:_SHOWN] for key, value in file.metadata.items() if key != CONFIG_KEY}
            self.add_tensors(self.stored(file, name) for name in file.tensors)
        except FormatError as error:
            self.out.report_error("weights", error)

    def stored(self, file: OnnxFile, name: str) -> StoredTensor:
        tensor, shape = file.tensors[name], file.shape(name)
        if tensor.data_type in DTYPES:
            dtype, bits = DTYPES[tensor.data_type].name, 8 * DTYPES[tensor.data_type].itemsize
        else:
            dtype = SMALL_TYPES.get(tensor.data_type, f"type {tensor.data_type}")
            bits = int(dtype[-1]) if tensor.data_type in SMALL_TYPES else 8
        nbytes = -(-math.prod(shape) * bits // 8)
        kind = "other" if name.startswith("constant_") else tensor_kind(name, dtype)
        if name.endswith((PACKED_SUFFIX, SCALE_SUFFIX)):
            kind = "ternary planes" if name.endswith(PACKED_SUFFIX) else "scales"
        return StoredTensor(name, kind, dtype, shape, nbytes, self.path.name)

    def open(self) -> Checkpoint | None:
        if self.out.format != "ONNX":  # else the file could not be parsed
            self.checkpoint = self.try_open(OnnxCheckpoint)
        return self.checkpoint

    def tokenizer_files(self) -> dict[str, bytes]:
        return {} if self.checkpoint is None else self.checkpoint.tokenizer_files()

    def check_tied_head(self, checkpoint: OnnxCheckpoint) -> None:
        if not self.ours:
            checkpoint.check_tied_head(checkpoint.embedding())

    def weights_of(self, tensor: StoredTensor) -> int:
        return super().weights_of(tensor) * (4 if tensor.name.endswith(PACKED_SUFFIX) else 1)
