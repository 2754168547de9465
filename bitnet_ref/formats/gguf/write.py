"""Writes a GGUF file: metadata, then tensor after tensor, each computed just before it is written."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import FormatError
from ...system.atomic import atomic_path
from ..checkpoint import Progress
from .file import ARRAY, DEFAULT_ALIGNMENT, MAGIC, NAME_OF, SCALARS, STRING, VERSIONS, Typed
from .ggml_types import BY_NAME

_CODE_OF = {name: code for code, name in NAME_OF.items()}


class TensorToWrite(NamedTuple):
    """A tensor to be written. `produce` is called once, just before it is written, and returns its bytes."""

    name: str
    shape: tuple[int, ...]  # rows first
    type: str  # "F16", "I2_S", ...
    produce: Callable[[], NDArray[np.uint8]]
    nbytes: int | None = None  # for the types whose size does not follow from the shape (TL1, TL2)


def write_gguf(
    path: str | os.PathLike[str],
    metadata: Mapping[str, Typed],
    tensors: Iterable[TensorToWrite],
    progress: Progress | None = None,
) -> None:
    """Write a GGUF of version 3 with one tensor in memory at a time. Equal input gives equal bytes. An interrupt leaves
    the old file or none (see `atomic`).

    progress: called with (tensors written, tensors in total).
    Tensors are aligned to the metadata's general.alignment, or 32 bytes when it has none.
    """
    tensors = list(tensors)
    alignment = metadata.get("general.alignment", Typed("uint32", DEFAULT_ALIGNMENT)).value
    if alignment < 1 or alignment & (alignment - 1):
        raise FormatError(f"the alignment {alignment} is no power of two", path=path, field="general.alignment")
    header = bytearray(MAGIC + struct.pack("<IQQ", VERSIONS[-1], len(tensors), len(metadata)))
    for key, typed in metadata.items():
        header += _packed_string(key) + _packed_value(key, typed)
    offset, sizes = 0, []
    for tensor in tensors:
        kind = BY_NAME[tensor.type]
        size = tensor.nbytes if tensor.nbytes is not None else kind.nbytes(math.prod(tensor.shape))
        header += _packed_string(tensor.name) + struct.pack("<I", len(tensor.shape))
        header += b"".join(struct.pack("<Q", n) for n in reversed(tensor.shape)) + struct.pack("<IQ", kind.id, offset)
        sizes.append(size)
        offset += size + -size % alignment
    header += bytes(-len(header) % alignment)
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        file.write(header)
        for done, (tensor, size) in enumerate(zip(tensors, sizes, strict=True), 1):
            data = tensor.produce()
            if data.size != size or data.dtype != np.uint8:
                message = f"expected {size} bytes to write, got {data.dtype} {data.shape}"
                raise FormatError(message, path=path, field=tensor.name)
            file.write(np.ascontiguousarray(data).data)
            file.write(bytes(-size % alignment))
            if progress is not None:
                progress(done, len(tensors))


def _packed_string(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _packed_value(key: str, typed: Typed) -> bytes:
    try:
        if not typed.type.startswith("["):
            code = _CODE_OF[typed.type]
            data = _packed_string(typed.value) if code == STRING else struct.pack(SCALARS[code][1], typed.value)
            return struct.pack("<I", code) + data
        code = _CODE_OF[typed.type[1:-1]]
        if code == STRING:
            data = b"".join(map(_packed_string, typed.value))
        else:
            data = np.asarray(typed.value, dtype=np.dtype(typed.type[1:-1]).newbyteorder("<")).tobytes()
        return struct.pack("<IIQ", ARRAY, code, len(typed.value)) + data
    except (struct.error, KeyError, TypeError, ValueError, AttributeError, OverflowError) as problem:
        raise FormatError(f"cannot be written as {typed.type}: {problem!r}", field=key) from problem
