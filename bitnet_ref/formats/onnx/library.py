"""Shared by the reader and the writer of .onnx: the `onnx` package, its dtypes, the names in our own exports."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from ...errors import BackendUnavailable

FORMAT_KEY, CONFIG_KEY = "bitnet_ref.format", "bitnet_ref.config"  # metadata_props of our exports
FORMAT_VERSION = "1"
MODEL_FILE = "model.onnx"  # in a folder of its own
MAX_MODEL_BYTES = 2**31 - 1  # protobuf's limit per message
PACKED_SUFFIX, SCALE_SUFFIX = ".weight_packed", ".weight_scale"  # of a ternary linear's two initialisers

# TensorProto.DataType -> NumPy's dtype, of the types that take whole bytes
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.float32),
    2: np.dtype(np.uint8),
    3: np.dtype(np.int8),
    4: np.dtype(np.uint16),
    5: np.dtype(np.int16),
    6: np.dtype(np.int32),
    7: np.dtype(np.int64),
    9: np.dtype(np.bool_),
    10: np.dtype(np.float16),
    11: np.dtype(np.float64),
    12: np.dtype(np.uint32),
    13: np.dtype(np.uint64),
    16: np.dtype(ml_dtypes.bfloat16),
}
DATA_TYPES = {dtype: number for number, dtype in DTYPES.items()}


def import_onnx() -> Any:
    """The `onnx` module. Raises BackendUnavailable with the command that installs it."""
    try:
        import onnx
    except ImportError as problem:
        raise BackendUnavailable(".onnx files need the onnx package: pip install 'bitnet-ref[onnx]'") from problem
    return onnx
