"""Writes a model as an .onnx file, with the large tensors beside it. onnxruntime computes what the NumPy backend does.

The file holds everything to read the model back: see `onnx.model`. The tokenizer's files lie beside it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ...errors import ShapeError
from ...families import config_to_dict
from ...reference.layers import Array
from ...system.atomic import atomic_path
from ..checkpoint import Checkpoint, Progress, write_tokenizer_files
from .file import CONFIG_KEY, DATA_TYPES, FORMAT_KEY, FORMAT_VERSION, MAX_MODEL_BYTES, MODEL_FILE, import_onnx
from .graph import IR_VERSION, OPSET, DecoderGraph

EXTERNAL_BYTES = 1024  # tensors of at least this size go to the file beside, as in onnx's own converter
_ALIGNMENT = 4096  # a page: onnxruntime maps tensors that begin on one


class _TensorProtos:
    """Makes TensorProtos. The data of large ones goes to the file `data` at once, so that none is kept in memory."""

    def __init__(self, data: BinaryIO, location: str, external_bytes: int) -> None:
        self._onnx = import_onnx()
        self._data, self._location, self._external_bytes = data, location, external_bytes
        self._inside = 0

    def __call__(self, name: str, array: Array, inside: bool) -> Any:
        tensor = self._onnx.TensorProto(name=name, data_type=DATA_TYPES[array.dtype], dims=array.shape)
        array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        if not inside and array.nbytes >= self._external_bytes:
            offset = self._data.seek(-self._data.tell() % _ALIGNMENT, os.SEEK_CUR)
            self._data.write(array.reshape(-1).view(np.uint8).data)
            tensor.data_location = self._onnx.TensorProto.EXTERNAL
            entries = {"location": self._location, "offset": str(offset), "length": str(array.nbytes)}
            for key, value in entries.items():
                tensor.external_data.add(key=key, value=value)
            return tensor
        self._inside += array.nbytes
        if self._inside > MAX_MODEL_BYTES // 2:
            raise ShapeError("export_onnx", expected="at most 1 GB inside the file", got=f"{self._inside} bytes")
        tensor.raw_data = array.tobytes()
        return tensor


def export_onnx(
    path: str | os.PathLike[str],
    checkpoint: Checkpoint,
    *,
    external_bytes: int = EXTERNAL_BYTES,
    progress: Progress | None = None,
    graph_type: type[DecoderGraph] = DecoderGraph,
) -> list[Path]:
    """Write an open checkpoint as ONNX, one matrix at a time. Returns the files: `path`, and `<path>.data`.

    Inputs input_ids, attention_mask (past and new tokens), position_ids (int64), past_key_values.N.key and .value
    (batch, kv_heads, past, head_dim) float32, which may be of length 0; outputs logits (batch, sequence, vocab) and
    present.N.key and .value, float32. Opset 18. Ternary matrices are stored in 2 bits per weight, others as they are.

    progress: called with (parts done, parts in total).
    external_bytes: tensors of at least this size go to the file beside.
    graph_type: a class that builds another graph of the same weights, such as one with more outputs.

    Both files are complete before either gets its name; an old model is removed first, so that it never reads new data.
    Equal models give equal bytes. Unlike our backends, the graph does not report NaN in an activation.
    Raises BackendUnavailable without the onnx package, ShapeError, and what reading the checkpoint raises.
    """
    helper = import_onnx().helper
    path = Path(path)
    data_path = path.with_name(path.name + ".data")
    # the model's file is renamed last
    with atomic_path(path) as model_file, atomic_path(data_path) as data_file, open(data_file, "wb") as data:
        graph = graph_type(checkpoint, _TensorProtos(data, data_path.name, external_bytes), progress).build()
        opsets = [helper.make_opsetid("", OPSET)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="bitnet_ref")
        config = json.dumps(config_to_dict(checkpoint.config), sort_keys=True)
        for key, value in ((FORMAT_KEY, FORMAT_VERSION), (CONFIG_KEY, config)):
            model.metadata_props.add(key=key, value=value)
        model_file.write_bytes(model.SerializeToString(deterministic=True))
        path.unlink(missing_ok=True)
    return [path, data_path]


def write_onnx_folder(checkpoint: Checkpoint, folder: Path, progress: Progress | None = None) -> None:
    """Write model.onnx, its data and the tokenizer's files into an existing folder."""
    export_onnx(folder / MODEL_FILE, checkpoint, progress=progress)
    write_tokenizer_files(checkpoint, folder)
