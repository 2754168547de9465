"""Reading .safetensors, one tensor at a time, with every number in the header checked before it is used.

The file: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data.
The `safetensors` package reads the same files; this reader exists because the package maps the file (a file that
shrinks under a map kills the process, and mapped pages count twice against the memory of a load), cannot give NumPy a
bfloat16, and does not say where in the file an error is. `write_safetensors` is the package's writer, which wants all
tensors at once; `SafetensorsWriter` writes the same bytes and holds one.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError, OutOfMemory, ShapeError
from ..system.atomic import atomic_path
from ..system.json_file import parse_json_object
from .binary_file import read_exactly

DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_WRITE_BLOCK = 1 << 24
MAX_HEADER = 100_000_000  # the limit of the reference implementation
MAX_RANK = 8
MAX_TENSORS = 1 << 17  # of one file: each is checked, which takes some microseconds


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: absolute byte offset in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFile:
    """An open .safetensors file. `tensors` describes it; `read(name)` gives one array of its own memory."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._file = open(self.path, "rb", buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as problem:
            raise FormatError(f"cannot be opened: {problem.strerror or problem}", path=self.path) from problem
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            self.metadata: dict[str, str] = {}
            self.tensors = self._read_header()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def read(self, name: str) -> NDArray:
        """The tensor of that name, as stored (bfloat16 as ml_dtypes.bfloat16)."""
        info = self.tensors[name]
        try:
            array = np.empty(info.shape, dtype=DTYPES[info.dtype])
        except MemoryError as problem:
            raise OutOfMemory(f"{self.path}: no memory for the {info.nbytes} bytes of {name}") from problem
        self._read_into(array.reshape(-1).view(np.uint8).data, info.offset, name)
        return array

    def mapped(self) -> dict[str, NDArray]:
        """All tensors, read-only, as they lie in the file: each part is read when it is used. They outlive `close`.

        For files that nobody shortens: to use what is gone ends the process. A file that is replaced stays as it was.
        """
        try:
            memory = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as problem:
            raise OutOfMemory(f"{self.path}: cannot be mapped: {problem.strerror or problem}") from problem
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages, or without them for files
                memory.madvise(mmap.MADV_HUGEPAGE)
        return {
            name: np.frombuffer(memory, DTYPES[info.dtype], math.prod(info.shape), info.offset).reshape(info.shape)
            for name, info in self.tensors.items()
        }

    def blocks(self, name: str, size: int) -> Iterator[memoryview]:
        """The bytes of a tensor, in order, at most `size` at a time: each block is overwritten by the next."""
        info = self.tensors[name]
        buffer = memoryview(bytearray(min(size, info.nbytes)))
        for start in range(0, info.nbytes, size):
            block = buffer[: info.nbytes - start]
            self._read_into(block, info.offset + start, name)
            yield block

    def read_rows(self, name: str, start: int, stop: int) -> NDArray:
        """Rows start to stop of the tensor's first axis: of a large tensor, no more than is asked for."""
        info = self.tensors[name]
        rows = info.shape[0]
        if not 0 <= start <= stop <= rows:
            raise ShapeError(
                "read_rows", expected=f"0 <= start <= stop <= {rows}, the rows of {name}", got=f"{start}, {stop}"
            )
        array = np.empty((stop - start, *info.shape[1:]), dtype=DTYPES[info.dtype])
        if array.size:
            self._read_into(array.reshape(-1).view(np.uint8).data, info.offset + start * (info.nbytes // rows), name)
        return array

    def _read_into(self, target: memoryview, offset: int, field: str) -> None:
        read_exactly(self._file, self.path, target, offset, field)

    def _read_header(self) -> dict[str, TensorInfo]:
        prefix = bytearray(8)
        if self.size < 8:
            raise FormatError(
                f"a safetensors file has at least 8 bytes, this one {self.size}", path=self.path, offset=0
            )
        self._read_into(memoryview(prefix), 0, "header length")
        length = int.from_bytes(prefix, "little")
        if length > min(MAX_HEADER, self.size - 8):
            raise FormatError(
                f"the header is said to have {length} bytes, the file has {self.size}",
                path=self.path,
                offset=0,
                field="header length",
            )
        header = bytearray(length)
        self._read_into(memoryview(header), 8, "header")
        entries = parse_json_object(bytes(header), FormatError, self.path, offset=8)
        metadata = entries.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise FormatError("expected an object of strings", path=self.path, offset=8, field="__metadata__")
        self.metadata = metadata
        data_start = 8 + length
        if len(entries) > MAX_TENSORS:
            message = f"expected at most {MAX_TENSORS} tensors, got {len(entries)}"
            raise FormatError(message, path=self.path, offset=8, field="header")
        tensors = {name: self._check_entry(name, entry, data_start) for name, entry in entries.items()}
        end = data_start
        for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
            if info.offset != end:
                what = "overlaps the tensor before it" if info.offset < end else "leaves a hole before it"
                raise FormatError(what, path=self.path, offset=info.offset, field=f"{name}.data_offsets")
            end = info.offset + info.nbytes
        if end != self.size:
            raise FormatError(f"the tensors end at byte {end}, the file at {self.size}", path=self.path, offset=end)
        return tensors

    def _check_entry(self, name: str, entry: Any, data_start: int) -> TensorInfo:
        def fail(field: str, expected: str, got: Any) -> FormatError:
            return FormatError(f"expected {expected}, got {got!r}", path=self.path, offset=8, field=f"{name}.{field}")

        if not isinstance(entry, dict):
            raise FormatError(f"expected an object, got {entry!r}", path=self.path, offset=8, field=name)
        dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise fail("dtype", f"one of {', '.join(DTYPES)}", dtype)
        if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(_is_count(n) for n in shape):
            raise fail("shape", f"a list of at most {MAX_RANK} whole numbers", shape)
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(n) for n in offsets):
            raise fail("data_offsets", "[begin, end]", offsets)
        begin, end = offsets
        count = math.prod(shape)  # of Python integers: nothing wraps
        if math.prod(n for n in shape if n) * DTYPES[dtype].itemsize >= 2**63:  # NumPy counts so, even beside a zero
            raise fail("shape", "no more than an array can have", shape)
        if end - begin != count * DTYPES[dtype].itemsize:
            expected = f"{count * DTYPES[dtype].itemsize} bytes for {dtype} {shape}"
            raise fail("data_offsets", expected, offsets)
        if data_start + end > self.size:
            raise fail("data_offsets", f"an end within the file's {self.size - data_start} bytes of data", offsets)
        return TensorInfo(dtype, tuple(shape), data_start + begin, end - begin)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def write_safetensors(
    path: str | os.PathLike[str], tensors: Mapping[str, NDArray], metadata: Mapping[str, str] | None = None
) -> None:
    """Write the arrays (bfloat16 allowed) to a temporary name, sync, rename: the old file or the new one, no third."""
    from safetensors.numpy import save_file

    contiguous = {name: np.require(array, requirements="C") for name, array in tensors.items()}
    with atomic_path(path) as temporary:
        save_file(contiguous, temporary, dict(metadata) if metadata else None)


def dtype_name(dtype: np.dtype) -> str:
    """The name that the format has for a NumPy dtype. KeyError: it has none."""
    return _NAMES[np.dtype(dtype)]


class SafetensorsWriter:
    """A .safetensors file whose tensors are written one at a time, in any order; the bytes do not depend on the order.

    layout: name -> (dtype, shape) of every tensor. They lie in the file as the `safetensors` package lays them: widest
    dtype first, then by name, so that each is aligned. alignment: of the first of them, in bytes, a multiple of 8.
    Leaving the `with` raises if one of them was not written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        layout: Mapping[str, tuple[str, tuple[int, ...]]],
        metadata: Mapping[str, str] | None = None,
        *,
        alignment: int = 8,
    ) -> None:
        self._alignment = alignment
        header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
        self._header = header
        self._places: dict[str, tuple[int, str, tuple[int, ...]]] = {}
        end = 0
        for name in sorted(layout, key=lambda name: (-DTYPES[layout[name][0]].itemsize, name)):
            dtype, shape = layout[name]
            begin, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
            self._places[name] = begin, dtype, tuple(shape)
        text = self._header_text()
        self._start = 8 + len(text)
        self._left = set(layout)
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by __exit__
        self._write_all(struct.pack("<Q", len(text)) + text)
        self._file.truncate(self._start + end)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._file.close()
        if kind is None and self._left:
            raise ValueError(f"tensors of the layout were not written: {', '.join(sorted(self._left)[:3])}")

    def write(self, name: str, array: NDArray) -> None:
        """Write one tensor of the layout. ShapeError if it is not what the layout says."""
        begin, dtype, shape = self._places[name]
        if array.shape != shape or array.dtype != DTYPES[dtype]:
            raise ShapeError(f"write {name}", expected=f"{dtype} {shape}", got=f"{array.dtype} {array.shape}")
        self._file.seek(self._start + begin)
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for at in range(0, flat.size, _WRITE_BLOCK):
            self._write_all(flat[at : at + _WRITE_BLOCK])
        self._left.discard(name)

    def set_metadata(self, key: str, value: str) -> None:
        """Change an entry of the metadata to a value as long as the old one: what is known only at the end."""
        self._header["__metadata__"][key] = value
        text = self._header_text()
        if len(text) != self._start - 8:
            raise ShapeError(f"set metadata {key}", expected="a value as long as the old one", got=repr(value))
        self._file.seek(8)
        self._write_all(text)

    def _header_text(self) -> bytes:
        text = json.dumps(self._header, separators=(",", ":"), ensure_ascii=False).encode()
        return text + b" " * (-(8 + len(text)) % self._alignment)

    def _write_all(self, data: Any) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
