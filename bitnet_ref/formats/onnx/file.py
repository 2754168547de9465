"""Reads an .onnx file that is not trusted: the message, and its tensors one at a time, from inside or beside it.

Also what the reader and the writer share: the `onnx` package, its dtypes, the names in our own exports.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ...errors import BackendUnavailable, FormatError, OutOfMemory
from ...reference.layers import Array
from ...system.json_file import read_bounded
from ..binary_file import BinaryFile, find_not_finite

FORMAT_KEY, CONFIG_KEY = "bitnet_ref.format", "bitnet_ref.config"  # metadata_props of our exports
FORMAT_VERSION = "1"
MODEL_FILE = "model.onnx"  # in a folder of its own
MAX_MODEL_BYTES = 2**31 - 1  # protobuf's limit per message
PACKED_SUFFIX, SCALE_SUFFIX = ".weight_packed", ".weight_scale"  # of a ternary linear's two initialisers

# TensorProto.DataType -> NumPy's dtype, of the types that take whole bytes
_NUMBERED = (np.float32, np.uint8, np.int8, np.uint16, np.int16, np.int32, np.int64)  # 1 to 7
DTYPES: dict[int, np.dtype[Any]] = {number: np.dtype(dtype) for number, dtype in enumerate(_NUMBERED, 1)}
DTYPES |= {9: np.dtype(np.bool_), 10: np.dtype(np.float16), 11: np.dtype(np.float64), 12: np.dtype(np.uint32)}
DTYPES |= {13: np.dtype(np.uint64), 16: np.dtype(ml_dtypes.bfloat16)}
DATA_TYPES = {dtype: number for number, dtype in DTYPES.items()}
MAX_RANK = 8
SMALL_TYPES = {21: "UINT4", 22: "INT4", 25: "UINT2", 26: "INT2"}  # TensorProto.DataType of the types below a byte
_MAX_DIM = 2**62


def import_onnx() -> Any:
    """The `onnx` module. Raises BackendUnavailable with the command that installs it."""
    try:
        import onnx
    except ImportError as problem:
        raise BackendUnavailable(".onnx files need the onnx package: pip install 'bitnet-ref[onnx]'") from problem
    return onnx


class OnnxFile:
    """A parsed model. `tensors` are its initialisers and the values of its Constant nodes; `read(name)` gives one."""

    def __init__(self, path: Path) -> None:
        onnx = import_onnx()
        from google.protobuf.message import DecodeError  # comes with onnx

        self.path = path
        data = read_bounded(path, FormatError, MAX_MODEL_BYTES)
        try:
            self.model = onnx.ModelProto.FromString(data)
        except (DecodeError, ValueError) as problem:  # ValueError: text that is not UTF-8
            raise FormatError(f"is no ONNX model: {problem}", path=path) from problem
        except MemoryError as problem:
            raise OutOfMemory(f"{path}: no memory for a model of {len(data)} bytes") from problem
        graph = self.model.graph
        if not graph.node or not graph.input:
            raise FormatError("is no ONNX model: it has no nodes or no inputs", path=path)
        for text in _texts(self.model):
            if not isinstance(text, str):  # protobuf gives bytes for what is no UTF-8
                raise FormatError(f"holds a name that is not UTF-8 text: {text!r}", path=path)
        self.metadata = {entry.key: entry.value for entry in self.model.metadata_props}
        self.tensors: dict[str, Any] = {}
        for name, tensor in self._named_tensors():
            if name in self.tensors:
                raise self.fail(name, "the tensor occurs twice")
            self.tensors[name] = tensor
        self._shapes: dict[str, tuple[int, ...]] = {}

    def _named_tensors(self) -> Iterator[tuple[str, Any]]:
        for tensor in self.model.graph.initializer:
            yield tensor.name, tensor
        for node in self.model.graph.node:
            if node.op_type == "Constant" and node.output:
                for attribute in node.attribute:
                    if attribute.name == "value" and attribute.HasField("t"):
                        yield node.output[0], attribute.t

    def fail(self, name: str, message: str) -> FormatError:
        return FormatError(message, path=self.path, field=name or "a tensor without a name")

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, checked."""
        if name not in self._shapes:
            dims = tuple(self.tensors[name].dims)
            if len(dims) > MAX_RANK or any(dim < 0 for dim in dims) or math.prod(dim or 1 for dim in dims) > _MAX_DIM:
                raise self.fail(name, f"expected at most {MAX_RANK} dimensions of an array's size, got {list(dims)}")
            self._shapes[name] = dims
        return self._shapes[name]

    def read(self, name: str) -> Array:
        """The tensor in its own memory; types of 2 and 4 bits as int8 or uint8. Floats are finite."""
        tensor, shape = self.tensors[name], self.shape(name)
        count = math.prod(shape)
        if tensor.data_type in SMALL_TYPES:
            kind = SMALL_TYPES[tensor.data_type]
            bits = int(kind[-1])
            codes = self._bytes(name, np.dtype(np.uint8), -(-count * bits // 8))
            flat = unpack_bits(codes, bits)[:count]
            if kind.startswith("INT"):
                flat = ((flat ^ (1 << (bits - 1))).view(np.int8) - np.int8(1 << (bits - 1))).astype(np.int8)
            return flat.reshape(shape)
        if tensor.data_type not in DTYPES:
            names = ", ".join(dtype.name for dtype in DTYPES.values())
            raise self.fail(name, f"expected one of {names}, or integers of 2 or 4 bits; got type {tensor.data_type}")
        array = self._bytes(name, DTYPES[tensor.data_type], count).reshape(shape)
        if array.dtype.kind not in "iub" and (message := find_not_finite(array)):
            raise self.fail(name, message)
        return array

    def _bytes(self, name: str, dtype: np.dtype, count: int) -> Array:
        """`count` elements, from the file beside, raw_data or a typed field."""
        tensor, nbytes = self.tensors[name], count * dtype.itemsize
        little = dtype.newbyteorder("<")
        if tensor.data_location == 1:  # EXTERNAL
            return self._external(name, nbytes).view(little).astype(dtype, copy=False)
        if tensor.HasField("raw_data"):
            if len(tensor.raw_data) != nbytes:
                raise self.fail(name, f"expected {nbytes} bytes for its shape and type, got {len(tensor.raw_data)}")
            return np.frombuffer(tensor.raw_data, dtype=little).astype(dtype)
        return self._typed(name, dtype, count)

    def _typed(self, name: str, dtype: np.dtype, count: int) -> Array:
        tensor = self.tensors[name]
        fields = {"float32": "float_data", "float64": "double_data", "int64": "int64_data"}
        field = fields.get(dtype.name, "uint64_data" if dtype.name in ("uint32", "uint64") else "int32_data")
        values = getattr(tensor, field)
        if len(values) != count:
            raise self.fail(name, f"expected {count} elements for its shape, got {len(values)} in {field}")
        # Protobuf in pure Python gives lists: without a dtype NumPy makes float64 of those with 1 and 2^63.
        wide = np.array(values, dtype={"uint64_data": np.uint64, "int32_data": np.int32}.get(field, dtype))
        stored = np.dtype(np.uint16) if dtype.kind not in "iub" and dtype.itemsize == 2 else dtype  # bits of a float
        narrow = wide.astype(stored)
        if wide.dtype.kind in "iu" and not np.array_equal(narrow.astype(wide.dtype), wide):
            raise self.fail(name, f"holds numbers beyond {dtype.name} in {field}")
        return narrow.view(dtype)

    def _external(self, name: str, nbytes: int) -> NDArray[np.uint8]:
        """The tensor's bytes in a file beside. Nothing is allocated before that file is known to have them."""
        entries = {entry.key: entry.value for entry in self.tensors[name].external_data}
        location = entries.get("location", "")
        if not location or "\0" in location or location in (".", "..") or Path(location).name != location:
            raise self.fail(name, f"external data: expected the name of a file of the same folder, got {location!r}")
        path = self.path.parent / location
        numbers = []
        for key, default in (("offset", 0), ("length", nbytes)):
            text = entries.get(key, str(default))
            if not text.isascii() or not text.isdigit() or len(text) > 19:
                raise self.fail(name, f"external data: expected a whole number of bytes as {key}, got {text!r}")
            numbers.append(int(text))
        offset, length = numbers
        if length != nbytes:
            raise self.fail(name, f"external data: expected {nbytes} bytes for its shape and type, got {length}")
        try:
            file = BinaryFile(path, self.path.parent)
        except FormatError as problem:
            raise self.fail(name, f"external data: {location} is no file of the model's folder") from problem
        with file:
            if offset + length > file.size:
                message = f"{length} bytes are said to lie here, the file has {file.size}"
                raise FormatError(message, path=path, offset=offset, field=name)
            return file.read_array(np.uint8, (nbytes,), offset, name)


def _texts(model: Any) -> Iterator[Any]:
    """Every name and text of the message that this package uses."""
    for entry in model.metadata_props:
        yield from (entry.key, entry.value)
    tensors = list(model.graph.initializer)
    for node in model.graph.node:
        yield from (node.name, node.op_type, *node.input, *node.output)
        for attribute in node.attribute:
            yield attribute.name
            tensors += [attribute.t] if attribute.HasField("t") else []
        for entry in node.metadata_props:
            yield from (entry.key, entry.value)
    for tensor in tensors:
        yield tensor.name
        for entry in tensor.external_data:
            yield from (entry.key, entry.value)


def unpack_bits(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """codes (..., n) of 8/bits numbers per byte, the first in the lowest bits -> (..., n * 8/bits) uint8

    >>> unpack_bits(np.array([0b10_01_00_11], dtype=np.uint8), 2).tolist()
    [3, 0, 1, 2]
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return (codes[..., None] >> shifts & np.uint8(2**bits - 1)).reshape(*codes.shape[:-1], -1)
