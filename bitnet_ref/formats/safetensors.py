"""Reads and writes .safetensors files one tensor at a time, and checks every number of a header before using it.

The file: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data.
The `safetensors` package maps the file (one that shrinks while mapped kills the process), cannot return bfloat16 as
NumPy, and does not say where an error is. Its writer needs all tensors at once; `SafetensorsWriter` holds one.
"""

from __future__ import annotations

import hashlib
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
from ..reference.layers import Array
from ..system.atomic import check_space
from ..system.json_file import parse_json_object
from .binary_file import BinaryFile, Closeable

DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    **{f"F{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_WRITE_BLOCK = 1 << 24
MAX_HEADER = 100_000_000  # the limit of the reference implementation
MAX_RANK = 8
MAX_TENSORS = 1 << 17  # per file: checking one takes some microseconds


def dtype_name(dtype: np.dtype) -> str:
    """The format's name of a NumPy dtype. KeyError if it has none."""
    return _NAMES[np.dtype(dtype)]


@dataclass(frozen=True)
class TensorInfo:
    """`offset` is absolute, in bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFile(BinaryFile):
    """An open .safetensors file. `tensors` describes it; `read(name)` returns one array in its own memory."""

    def __init__(self, path: str | os.PathLike[str], folder: Path | None = None) -> None:
        super().__init__(path, folder)
        self.metadata: dict[str, str] = {}
        with self.closed_on_error():
            self.tensors = self._read_header()

    def read(self, name: str) -> Array:
        """The tensor as stored (bfloat16 as ml_dtypes.bfloat16)."""
        info = self.tensors[name]
        return self.read_array(DTYPES[info.dtype], info.shape, info.offset, name)

    def mapped(self) -> NDArray[np.uint8]:
        """The file's bytes, memory-mapped and read-only. They outlive `close`.

        Only for files that are never shortened: reading past a shortened file's end kills the process. Replacing the
        file is harmless.
        """
        try:
            memory = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as problem:
            raise OutOfMemory(f"{self.path}: cannot be mapped: {problem.strerror or problem}") from problem
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages, or without them for files
                memory.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(memory, np.uint8)

    def view(self, memory: NDArray[np.uint8], name: str) -> Array:
        """The tensor in `memory`, which holds the file's bytes. FormatError unless it is aligned for kernels."""
        info = self.tensors[name]
        if info.offset % DTYPES[info.dtype].itemsize:
            raise self.error(f"expected a place that is a multiple of the size of {info.dtype}", info.offset, name)
        return np.frombuffer(memory, DTYPES[info.dtype], math.prod(info.shape), info.offset).reshape(info.shape)

    def blocks(self, name: str, size: int) -> Iterator[memoryview]:
        """The tensor's bytes in order, at most `size` at a time. Each block overwrites the one before."""
        info = self.tensors[name]
        buffer = memoryview(bytearray(min(size, info.nbytes)))
        for start in range(0, info.nbytes, size):
            block = buffer[: info.nbytes - start]
            self.read_into(block, info.offset + start, name)
            yield block

    def read_rows(self, name: str, start: int, stop: int) -> Array:
        """Rows start to stop of the tensor's first axis; the rest is not read."""
        info = self.tensors[name]
        rows = info.shape[0]
        if not 0 <= start <= stop <= rows:
            expected = f"0 <= start <= stop <= {rows}, the rows of {name}"
            raise ShapeError("read_rows", expected=expected, got=f"{start}, {stop}")
        offset = info.offset + (start * (info.nbytes // rows) if rows else 0)
        return self.read_array(DTYPES[info.dtype], (stop - start, *info.shape[1:]), offset, name)

    def _read_header(self) -> dict[str, TensorInfo]:
        if self.size < 8:
            raise self.cut_off(8, f"a safetensors file has at least 8 bytes, this one {self.size}", 0, least=True)
        length = int(self.read_array("<u8", (1,), 0, "header length")[0])
        if length > min(MAX_HEADER, self.size - 8):
            message = f"its header would have {length} bytes, the file has {self.size}"
            if length > MAX_HEADER:
                raise self.error(f"not a safetensors file: {message}", 0, "header length")
            raise self.cut_off(8 + length, message, 0, "header length", least=True)
        header = self.read_array(np.uint8, (length,), 8, "header").tobytes()
        entries = parse_json_object(header, FormatError, self.path, offset=8)
        metadata = entries.pop("__metadata__", None)
        metadata = {} if metadata is None else metadata  # MLX writes null where there are none
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise self.error("expected an object of strings", 8, "__metadata__")
        self.metadata = metadata
        if len(entries) > MAX_TENSORS:
            raise self.error(f"expected at most {MAX_TENSORS} tensors, got {len(entries)}", 8, "header")
        end = data_start = 8 + length
        tensors = {name: self._check_entry(name, entry, data_start) for name, entry in entries.items()}
        size = max((info.offset + info.nbytes for info in tensors.values()), default=end)
        if size > self.size:
            cut = next(name for name, info in tensors.items() if info.offset + info.nbytes > self.size)
            message = f"expected an end within the file's {self.size - data_start} bytes of data"
            message += f", got {entries[cut]['data_offsets']}"
            raise self.cut_off(size, message, 8, f"{cut}.data_offsets")
        for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
            if info.offset != end:
                what = "overlaps the tensor before it" if info.offset < end else "leaves a hole before it"
                raise self.error(what, info.offset, f"{name}.data_offsets")
            end = info.offset + info.nbytes
        if end != self.size:
            raise self.error(f"the tensors end at byte {end}, the file at {self.size}", end)
        return tensors

    def _check_entry(self, name: str, entry: Any, data_start: int) -> TensorInfo:
        def fail(field: str, expected: str, got: Any) -> FormatError:
            return self.error(f"expected {expected}, got {got!r}", 8, f"{name}.{field}")

        if not isinstance(entry, dict):
            raise self.error(f"expected an object, got {entry!r}", 8, name)
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
        return TensorInfo(dtype, tuple(shape), data_start + begin, end - begin)


def content_hash(metadata: Mapping[str, str], tensors: Mapping[str, tuple[str, tuple[int, ...], str]]) -> str:
    """The hash of a file's content. tensors: name -> (dtype, shape, SHA-256 of its bytes in hexadecimal).

    It does not depend on the order of the tensors, so a writer can compute it one tensor at a time.
    """
    facts = {
        "metadata": {key: value for key, value in metadata.items() if key != "content_hash"},
        "tensors": {name: [dtype, list(shape), digest] for name, (dtype, shape, digest) in tensors.items()},
    }
    return "sha256:" + hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


class SafetensorsWriter(Closeable):
    """A .safetensors file whose tensors are written one at a time. The file's bytes do not depend on their order.

    layout: name -> (dtype, shape) of every tensor. They are laid out as the `safetensors` package does: widest dtype
    first, then by name, so that each is aligned. alignment: of the data's start, in bytes, a multiple of 8.
    Leaving the `with` raises ValueError if a tensor was not written.
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
        self._header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
        end = 0
        for name in sorted(layout, key=lambda name: (-DTYPES[layout[name][0]].itemsize, name)):
            dtype, shape = layout[name]
            begin, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
            self._header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        text = self._header_text()
        self._start = 8 + len(text)
        self._unwritten = set(layout)
        check_space(Path(path), self._start + end)
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by close()
        with self.closed_on_error():
            self._write_all(struct.pack("<Q", len(text)) + text)

    def close(self) -> None:
        self._file.close()

    def __exit__(self, *error: object) -> None:
        self.close()
        if error[0] is None and self._unwritten:
            raise ValueError(f"tensors of the layout were not written: {', '.join(sorted(self._unwritten)[:3])}")

    def write(self, name: str, array: Array) -> None:
        """Write one tensor of the layout. ShapeError if its dtype or shape differs from the layout's."""
        dtype, shape, (begin, _) = self._header[name].values()
        if list(array.shape) != shape or array.dtype != DTYPES[dtype]:
            raise ShapeError(f"write {name}", expected=f"{dtype} {tuple(shape)}", got=f"{array.dtype} {array.shape}")
        self._file.seek(self._start + begin)
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for at in range(0, flat.size, _WRITE_BLOCK):
            self._write_all(flat[at : at + _WRITE_BLOCK])
        self._unwritten.discard(name)

    def set_metadata(self, key: str, value: str) -> None:
        """Replace a metadata value that is known only at the end by one of the same length."""
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


def write_arrays(
    path: str | os.PathLike[str], arrays: Mapping[str, Array], metadata: Mapping[str, str], *, alignment: int = 8
) -> None:
    """Write arrays that are all in memory. alignment: as of `SafetensorsWriter`."""
    layout = {name: (dtype_name(array.dtype), array.shape) for name, array in arrays.items()}
    with SafetensorsWriter(path, layout, metadata, alignment=alignment) as writer:
        for name, array in arrays.items():
            writer.write(name, array)
