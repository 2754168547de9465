"""The GGUF container: metadata and tensors, with every number in the header checked before it is used.

The file, little-endian: "GGUF", u32 version, u64 tensor count, u64 metadata count; the metadata (key, type, value); for
each tensor its name, dimensions (fastest first), type and offset; then, aligned, the data. Versions 2 and 3 look the
same to a little-endian reader. Every count in the header is compared with the rest of the file before anything is
allocated or looped over. Source: ggml, docs/gguf.md.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import FormatError, ShapeError
from ...reference.layers import Array
from ...system.sharing import split_names
from ..binary_file import BinaryFile
from ..safetensors import DTYPES
from .blocks import MEANINGS, MXFP4, TYPES, GgmlType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_HEADER = 1 << 28  # a vocabulary of a million tokens with merges is far below
# A few bytes of header make a much larger Python object, so counts have limits of their own
MAX_TENSORS, MAX_KEYS, MAX_STRINGS = 1 << 17, 1 << 16, 1 << 22
MAX_NAME = 64  # bytes of a tensor's name, as in ggml
MAX_KEY = 65535
MAX_RANK = 4

# Metadata value types by id: name, struct format. String (8) and array (9) have none.
SCALARS = {0: ("uint8", "<B"), 1: ("int8", "<b"), 2: ("uint16", "<H"), 3: ("int16", "<h"), 4: ("uint32", "<I")}
SCALARS |= {5: ("int32", "<i"), 6: ("float32", "<f"), 7: ("bool", "<?")}
SCALARS |= {10: ("uint64", "<Q"), 11: ("int64", "<q"), 12: ("float64", "<d")}
STRING, ARRAY = 8, 9
NAME_OF = {code: name for code, (name, _) in SCALARS.items()} | {STRING: "string"}
_U32, _LENGTH = struct.Struct("<I"), struct.Struct("<Q")

# Types that NumPy has too
PLAIN_DTYPES = {name: DTYPES[name] for name in ("F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64")}


class Typed(NamedTuple):
    """A metadata value and its type: "uint32", "string", ..., or "[string]" for an array of them."""

    type: str
    value: Any


@dataclass(frozen=True)
class GgufTensor:
    """`offset` is absolute, in bytes; `shape` has rows first, as in NumPy."""

    name: str
    type: GgmlType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class GgufFile(BinaryFile):
    """An open GGUF file. `typed`, `metadata` and `tensors` describe it; `read_raw` and `read` return one tensor.

    Scalars in the metadata are int, float, bool or str; an array of strings is a list, any other a NumPy array.
    further: the files with the other tensors, of a model that `open_gguf` has put together.
    """

    def __init__(self, path: str | os.PathLike[str], folder: Path | None = None) -> None:
        """folder: as of `BinaryFile`."""
        super().__init__(path, folder)
        self.further: list[GgufFile] = []
        self._holders: dict[str, GgufFile] = {}  # of the tensors that are in another file
        with self.closed_on_error():
            header = _Header(self)
        self.version, self.alignment = header.version, header.alignment
        self.typed: dict[str, Typed] = header.typed
        self.tensors: dict[str, GgufTensor] = header.tensors
        self.metadata: dict[str, Any] = {key: typed.value for key, typed in self.typed.items()}

    def close(self) -> None:
        super().close()
        for part in self.further:
            part.close()

    def add_part(self, part: GgufFile) -> None:
        """Take the tensors of a further file of the model."""
        self.further.append(part)
        for name, tensor in part.tensors.items():
            if name in self.tensors:
                raise part.tensor_error(name, "is in an earlier part too")
            self.tensors[name] = tensor
            self._holders[name] = part

    def read_all_ahead(self) -> None:
        """`read_ahead` of everything."""
        for file in (self, *self.further):
            file.read_ahead([(0, file.size)])

    def tensor_error(self, name: str, message: str) -> FormatError:
        """The error to raise about a tensor. It names the tensor's place if the file has it."""
        holder = self._holders.get(name, self)
        return holder.error(message, self.tensors[name].offset if name in self.tensors else None, name)

    @contextmanager
    def naming(self, name: str) -> Iterator[None]:
        """Errors about a tensor's contents, raised inside, name the tensor and its place."""
        try:
            yield
        except (FormatError, ShapeError) as error:
            raise self.tensor_error(name, getattr(error, "message", str(error))) from None

    def read_raw(self, name: str, start: int = 0, count: int | None = None) -> NDArray[np.uint8]:
        """The tensor's bytes: all of them, or `count` from `start`."""
        info = self.tensors[name]
        count = info.nbytes - start if count is None else count
        if not 0 <= start <= start + count <= info.nbytes:
            raise ValueError(f"{name}: bytes {start} to {start + count} of {info.nbytes}")
        return self._holders.get(name, self).read_array(np.uint8, (count,), info.offset + start, name)

    def read(self, name: str) -> Array:
        """A tensor of a type that NumPy has too (F32, F16, BF16, ...), in that dtype and its shape."""
        info = self.tensors[name]
        dtype = PLAIN_DTYPES.get(info.type.name)
        if dtype is None:
            raise self.tensor_error(name, f"expected one of {', '.join(PLAIN_DTYPES)}, got {info.type.name}")
        return self.read_raw(name).view(dtype).reshape(info.shape)


def open_gguf(path: Path) -> GgufFile:
    """An open GGUF file; where it is a part of a model that is split over several, the whole of that.

    The other parts are found by their names, in the same folder. The first has the metadata.
    """
    file = GgufFile(path)
    try:
        count, number = (_whole_number(file, f"split.{key}", default) for key, default in (("count", 1), ("no", 0)))
        if count < 2:
            return file
        names = split_names(path.name)
        if len(names) != count or path.name != names[min(number, count - 1)]:
            expected = f"NAME-{number + 1:05}-of-{count:05}.gguf, beside the others"
            raise file.error(
                f"is part {number + 1} of {count} of a model; its name must be {expected}", None, "split.no"
            )
        if number:
            file.close()
            file = _open_part(path, names, 0)
        for index in range(1, count):
            part = _open_part(path, names, index)
            file.add_part(part)
            if (_whole_number(part, "split.no", 0), _whole_number(part, "split.count", 1)) != (index, count):
                raise part.error(f"expected part {index + 1} of {count}", None, "split.no")
        total = _whole_number(file, "split.tensors.count", len(file.tensors))
        if total != len(file.tensors):
            raise file.error(f"says {total}; all parts have {len(file.tensors)}", None, "split.tensors.count")
        return file
    except BaseException:
        file.close()
        raise


def _open_part(path: Path, names: Sequence[str], index: int) -> GgufFile:
    part = path.with_name(names[index])
    if not os.path.lexists(part):
        raise FormatError(f"part {index + 1} of {len(names)} is missing: {part.name}", path=path)
    return GgufFile(part, path.parent)


def _whole_number(file: GgufFile, key: str, default: int) -> int:
    value = file.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
        raise file.error(f"expected a whole number, got {value!r}"[:200], None, key)
    return value


# name, type, shape, offset in the data, and the header's byte where this entry begins
_Info = tuple[str, GgmlType, tuple[int, ...], int, int]


class _Header:
    """Parses a header from front to back."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.at = 0
        self.limit = min(file.size, MAX_HEADER)
        self._buffer = bytearray()  # the file's beginning, as far as it has been parsed
        self.version = self._read_version()
        n_tensors, n_values = self._number(_LENGTH, "tensor count"), self._number(_LENGTH, "metadata count")
        self._check_count(n_values, 13, "metadata count", MAX_KEYS)  # a key's length, a type, one byte of value
        self._check_count(n_tensors, 24, "tensor count", MAX_TENSORS)  # a name's length, a rank, a type, an offset
        self._strings_left = MAX_STRINGS
        self.typed: dict[str, Typed] = {}
        for index in range(n_values):
            start = self.at
            key = self._string(f"metadata key {index}", MAX_KEY)
            if not key or key in self.typed:
                what = f"the key {key!r} occurs twice" if key else "a key is empty"
                raise self._fail(what, f"metadata key {index}", start)
            self.typed[key] = self._value(key)
        self.alignment = self._alignment()
        infos = [self._tensor_info(index) for index in range(n_tensors)]
        self.tensors = self._locate(infos)

    def _fail(self, message: str, field: str, offset: int | None = None) -> FormatError:
        return self.file.error(message, self.at if offset is None else offset, field)

    def _too_long(self, end: int, message: str, field: str) -> FormatError:
        """The error where the header needs bytes up to `end`: the file is cut off, or `end` is beyond any header."""
        if end > MAX_HEADER:
            return self._fail(f"{message}, at most {MAX_HEADER} are read", field)
        return self.file.cut_off(end, message, self.at, field, least=True)

    def _need(self, count: int, field: str) -> int:
        """Make sure that `count` more bytes are in the buffer, step over them, and return where they begin."""
        start, end = self.at, self.at + count
        if end > self.limit:
            raise self._too_long(end, f"needs bytes up to {end}", field)
        if end > len(self._buffer):
            grown = min(self.limit, max(end, 2 * len(self._buffer), 1 << 16))
            chunk = bytearray(grown - len(self._buffer))
            self.file.read_into(memoryview(chunk), len(self._buffer), field)
            self._buffer += chunk
        self.at = end
        return start

    def _number(self, layout: struct.Struct, field: str) -> Any:
        return layout.unpack_from(self._buffer, self._need(layout.size, field))[0]

    def _check_count(self, count: int, min_bytes: int, field: str, max_count: int | None = None) -> None:
        """Refuse a count that the rest of the file cannot hold, before anything is done that often."""
        left = self.limit - self.at
        if count * min_bytes > left:
            message = f"says {count}, but at {min_bytes} bytes or more each {left} bytes are too few"
            raise self._too_long(self.at + count * min_bytes, message, field)
        if max_count is not None and count > max_count:
            raise self._fail(f"says {count}, and at most {max_count} are read", field)

    def _read_version(self) -> int:
        magic = bytes(self._take_bytes(4, "magic"))
        if magic != MAGIC:
            raise self._fail(f"expected a GGUF file, which begins with {MAGIC!r}, got {magic!r}", "magic", 0)
        version = self._number(_U32, "version")
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if version not in VERSIONS:
            if swapped in (1, *VERSIONS):
                message = f"this is a big-endian GGUF (version {swapped}); only little-endian is read"
                raise self._fail(message, "version", 4)
            hint = "; convert it again with current tools" if version == 1 else ""
            raise self._fail(f"expected GGUF version 2 or 3, got {version}{hint}", "version", 4)
        return int(version)

    def _take_bytes(self, count: int, field: str) -> memoryview:
        start = self._need(count, field)
        return memoryview(self._buffer)[start : start + count]

    def _string(self, field: str, max_bytes: int | None = None) -> str:
        length = self._number(_LENGTH, field)
        if max_bytes is not None and length > max_bytes:
            raise self._fail(f"expected at most {max_bytes} bytes, got {length}", field, self.at - 8)
        self._check_count(length, 1, field)
        start = self._need(length, field)
        try:
            return self._buffer[start : self.at].decode("utf-8")
        except UnicodeDecodeError as problem:
            raise self._fail(f"not UTF-8 text: {problem.reason}", field, start + problem.start) from problem

    def _value(self, key: str) -> Typed:
        start = self.at
        code = self._number(_U32, key)
        if code == STRING:
            return Typed("string", self._string(key))
        if code == ARRAY:
            return self._array(key)
        if code not in SCALARS:
            raise self._fail(f"expected a value type from 0 to 12, got {code}", key, start)
        name, layout = SCALARS[code]
        at = self._need(struct.calcsize(layout), key)
        if name == "bool" and self._buffer[at] > 1:
            raise self._fail(f"expected a bool of 0 or 1, got {self._buffer[at]}", key, at)
        return Typed(name, struct.unpack_from(layout, self._buffer, at)[0])

    def _array(self, key: str) -> Typed:
        start = self.at
        code, count = self._number(_U32, key), self._number(_LENGTH, key)
        if code == ARRAY:
            raise self._fail("an array of arrays is not supported", key, start)
        if code not in NAME_OF:
            raise self._fail(f"expected an element type from 0 to 12, got {code}", key, start)
        if code == STRING:
            self._check_count(count, 8, key, self._strings_left)
            self._strings_left -= count
            return Typed("[string]", self._strings(key, count))
        name, layout = SCALARS[code]
        size = struct.calcsize(layout)
        self._check_count(count, size, key)
        data = self._take_bytes(count * size, key)
        values = np.frombuffer(data, np.uint8 if name == "bool" else np.dtype(name).newbyteorder("<"))
        if name == "bool" and values.size and values.max() > 1:
            bad = int(np.argmax(values > 1))
            raise self._fail(f"expected bools of 0 or 1, got {values[bad]} at index {bad}", key, start)
        return Typed(f"[{name}]", values.astype(name))  # a copy: the buffer is temporary

    def _strings(self, key: str, count: int) -> list[str]:
        """One loop with few calls: a vocabulary has 128,000 strings, its merges 280,000."""
        out: list[str] = []
        buffer, unpack, at = self._buffer, _LENGTH.unpack_from, self.at
        for index in range(count):
            end = at + 8
            if end > len(buffer):
                self.at = at
                self._need(8, f"{key}[{index}]")
            length = unpack(buffer, at)[0]
            start, at = end, end + length
            if at > len(buffer):
                self.at = start
                self._need(length, f"{key}[{index}]")
            try:
                out.append(buffer[start:at].decode())
            except UnicodeDecodeError as problem:
                at = start + problem.start
                raise self._fail(f"not UTF-8 text: {problem.reason}", f"{key}[{index}]", at) from problem
        self.at = at
        return out

    def _alignment(self) -> int:
        field = "general.alignment"
        typed = self.typed.get(field, Typed("uint32", DEFAULT_ALIGNMENT))
        value = typed.value
        if typed.type != "uint32" or value < 1 or value & (value - 1):
            raise self._fail(f"expected a uint32 that is a power of two, got {typed.type} {value!r}", field)
        return int(value)

    def _tensor_info(self, index: int) -> _Info:
        start = self.at
        field = f"tensor {index}"
        name = self._string(f"{field}, name", MAX_NAME)
        if not name or name.startswith("/") or ".." in name or "\\" in name or not name.isprintable():
            raise self._fail(f"expected a plain name, got {name!r}", f"{field}, name", start)
        rank = self._number(_U32, f"{name}, rank")
        if rank > MAX_RANK:
            raise self._fail(f"expected at most {MAX_RANK} dimensions, got {rank}", name, self.at - 4)
        shape = tuple(self._number(_LENGTH, f"{name}, dimensions") for _ in range(rank))[::-1]
        if math.prod(shape) >= 2**62 or 0 in shape:  # of Python integers: nothing wraps
            raise self._fail(f"the shape {list(shape)} is not one that an array can have", name, start)
        code = self._number(_U32, f"{name}, type")
        if code not in TYPES:
            raise self._fail(f"the tensor type {code} is not known", name, self.at - 4)
        offset = self._number(_LENGTH, f"{name}, offset")
        if offset % self.alignment:
            raise self._fail(f"the offset {offset} is no multiple of the alignment {self.alignment}", name, self.at - 8)
        return name, TYPES[code], shape, offset, start

    def _locate(self, infos: list[_Info]) -> dict[str, GgufTensor]:
        """Absolute offsets and sizes. Refuses tensors that overlap or extend beyond the file."""
        data_start = -(-self.at // self.alignment) * self.alignment
        available = self.file.size - data_start
        tensors: dict[str, GgufTensor] = {}
        order = sorted(range(len(infos)), key=lambda index: infos[index][3])
        ends = dict(zip(order, [infos[index][3] for index in order[1:]] + [available], strict=False))
        spans = [ends[index] - info[3] for index, info in enumerate(infos)]
        names = {info[0] for info in infos}
        placed = [(info[1], info[2], span) for info, span in zip(infos, spans, strict=True)]
        meanings = _find_meanings(placed, self.alignment)
        for index, (name, kind, shape, offset, entry) in enumerate(infos):
            if name in tensors:
                raise self._fail("a tensor of this name has occurred before", name, entry)
            kind = meanings.get(kind.id, kind)
            if kind.name == "TL2/MXFP4" and f"{name}_scale" not in names:
                kind = MXFP4
            if not kind.has_whole_rows(shape):
                expected = f"rows of a multiple of {kind.block_values} values for {kind.name}"
                raise self._fail(f"expected {expected}, got shape {list(shape)}", name, entry)
            nbytes = kind.nbytes(shape) if kind.block_bytes else ends[index] - offset
            if nbytes < 1 or offset + nbytes > available:
                span = f"bytes {offset} to {offset + max(nbytes, 0)} of the data, which has {max(available, 0)}"
                message = f"{kind.name} of shape {list(shape)} would be {span}"
                size = data_start + max(info[3] + _least_bytes(info, meanings) for info in infos)
                if size > self.file.size:
                    raise self.file.cut_off(size, message, entry, name)
                raise self._fail(message, name, entry)
            if offset + nbytes > ends[index]:
                message = f"{kind.name} of shape {list(shape)} overlaps the tensor after it"
                raise self._fail(f"{message}, at byte {ends[index]} of the data", name, entry)
            tensors[name] = GgufTensor(name, kind, shape, data_start + offset, nbytes)
        return tensors


def _least_bytes(info: _Info, meanings: dict[int, GgmlType]) -> int:
    """The bytes of a tensor; 0 where its type does not tell."""
    kind = meanings.get(info[1].id, info[1])
    return kind.nbytes(info[2]) if kind.block_bytes else 0


def _find_meanings(infos: Sequence[tuple[GgmlType, tuple[int, ...], int]], alignment: int) -> dict[int, GgmlType]:
    """What each id in MEANINGS means in this file: the first type with which all tensors of the id fill their spans.

    infos: (type, shape, bytes from its beginning to that of the next) of each tensor.
    """
    meanings = {}
    for code, kinds in MEANINGS.items():
        sizes = [(shape, span) for kind, shape, span in infos if kind.id == code]
        filling = (kind for kind in kinds if _fill_spans(kind, sizes, alignment))
        meanings[code] = next(filling, kinds[0])
    return meanings


def _fill_spans(kind: GgmlType, sizes: Sequence[tuple[tuple[int, ...], int]], alignment: int) -> bool:
    """Whether tensors of these (shape, span) have room in their spans, and fill all but perhaps the last."""
    whole = all(kind.has_whole_rows(shape) for shape, _ in sizes)
    gaps = [span - kind.nbytes(shape) for shape, span in sizes]
    return whole and all(gap >= 0 for gap in gaps) and sum(gap >= alignment for gap in gaps) <= 1
