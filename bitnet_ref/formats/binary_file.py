"""Reads bytes from files that are not trusted and that another process may be changing (`BinaryFile`)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..errors import FormatError, OutOfMemory
from ..system.json_file import open_regular

_BLOCK = 1 << 18  # values checked at a time
_READ_BYTES = 8 << 20  # at a time, so that the read-ahead moves on within a large tensor
_AHEAD_BYTES = 256 << 20  # that the system is asked to read before they are used
_ADVISED_BYTES = 512 << 10  # per request: Linux reads no more than its disk takes at once, and forgets the rest
_EXPONENTS = {"bfloat16": np.uint16(0x7F80), "float16": np.uint16(0x7C00)}  # all set: NaN or Inf


class Closeable:
    """A context manager that calls `close` when it ends."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError


class BinaryFile(Closeable):
    """A regular file, open for reading. `size` is its size at opening."""

    def __init__(self, path: str | os.PathLike[str], folder: Path | None = None) -> None:
        """folder: the model folder that the file belongs to; see `open_regular`."""
        self.path = Path(path)
        self._file = open_regular(self.path, FormatError, folder)
        self.size = os.fstat(self._file.fileno()).st_size
        self._ahead: Iterator[int] = iter(())  # each step asks for some bytes more and gives their number
        self._lead = 0  # bytes that were asked for and not read yet

    def read_ahead(self, spans: Iterable[tuple[int, int]]) -> None:
        """Let the system read (offset, size) after (offset, size) from the disk while earlier ones are computed with:
        always so many bytes more than were used. It changes no result, and nothing where the system has no such call.
        """
        if hasattr(os, "posix_fadvise"):
            self._ahead, self._lead = self._advise(list(spans)), 0

    def _advise(self, spans: list[tuple[int, int]]) -> Iterator[int]:
        for offset, size in spans:
            for start in range(offset, offset + size, _ADVISED_BYTES):
                count = min(_ADVISED_BYTES, offset + size - start)
                with suppress(OSError):  # a file system that takes no advice
                    os.posix_fadvise(self._file.fileno(), start, count, os.POSIX_FADV_WILLNEED)
                yield count

    def close(self) -> None:
        self._file.close()

    def error(self, message: str, offset: int | None = None, field: str | None = None) -> FormatError:
        """The error to raise about a place in this file."""
        return FormatError(message, path=self.path, offset=offset, field=field)

    def read_array(self, dtype: DTypeLike, shape: tuple[int, ...], offset: int, field: str) -> NDArray:
        """A new array with the file's bytes from `offset` on. OutOfMemory, FormatError naming `field`."""
        try:
            array = np.empty(shape, dtype=dtype)
        except MemoryError as problem:
            nbytes = math.prod(shape) * np.dtype(dtype).itemsize
            raise OutOfMemory(f"{self.path}: no memory for the {nbytes} bytes of {field}") from problem
        self.read_into(array.reshape(-1).view(np.uint8).data, offset, field)
        return array

    def read_into(self, target: memoryview, offset: int, field: str) -> None:
        """Fill `target` from `offset` on. FormatError naming `field` if the file has become shorter or unreadable."""
        done = 0
        try:
            self._file.seek(offset)
            while done < len(target):
                while self._lead < _AHEAD_BYTES and (asked := next(self._ahead, 0)):
                    self._lead += asked
                count = self._file.readinto(target[done : done + _READ_BYTES])
                if not count:
                    raise self.error(f"the file ends after {done} of {len(target)} bytes", offset, field)
                done += count
                self._lead = max(0, self._lead - count)
        except OSError as problem:
            raise self.error(f"cannot be read: {problem}", offset, field) from problem


def first_bad(array: NDArray, are_bad: Callable[[NDArray], NDArray[np.bool_]]) -> tuple[int, ...] | None:
    """Index of the first element that `are_bad` says True of, row by row, or None. Checks in blocks, without a copy."""
    flat = array.reshape(-1)
    for start in range(0, flat.size, _BLOCK):
        bad = are_bad(flat[start : start + _BLOCK])
        if bad.any():
            return tuple(int(i) for i in np.unravel_index(start + int(np.argmax(bad)), array.shape))
    return None


def first_not_finite(array: NDArray) -> tuple[list[int], float] | None:
    """(index, value) of the first NaN or Inf of a float array, or None.

    >>> first_not_finite(np.array([[1, 2], [np.inf, 4]], dtype=np.float32))
    ([1, 0], inf)
    """
    at = first_bad(array, _not_finite)
    return None if at is None else (list(at), float(array[at]))


def _not_finite(values: NDArray) -> NDArray[np.bool_]:
    exponent = _EXPONENTS.get(values.dtype.name)
    if exponent is None:
        return ~np.isfinite(values)
    return values.view(np.uint16) & exponent == exponent  # `isfinite` of 16 bits goes through float32
