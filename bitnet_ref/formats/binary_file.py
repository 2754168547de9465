"""Reads bytes from files that are not trusted and that another process may be changing (`BinaryFile`)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..errors import LARGEST_INT, FormatError, OutOfMemory
from ..reference.layers import Array, Floats
from ..system.json_file import open_regular

CUT_OFF = "the file is cut off"  # begins the message of `BinaryFile.cut_off`
_BLOCK = 1 << 18  # values checked at a time
_READ_BYTES = 8 << 20  # at a time, so that the read-ahead moves on within a large tensor
_AHEAD_BYTES = 256 << 20  # that the system is asked to read before they are used
_ADVISED_BYTES = 512 << 10  # per request: Linux reads no more than its disk takes at once, and forgets the rest
_LARGE_BYTES = 128 << 20  # of a tensor that several threads read: a disk does more at a time than one thread asks for
_READERS, _MAX_PART = 2, 1 << 30  # threads, each with one call, which does not need the interpreter's lock; bytes of it
_EXPONENTS: dict[str, np.unsignedinteger] = {  # all set: NaN or Inf
    "bfloat16": np.uint16(0x7F80),
    "float16": np.uint16(0x7C00),
    "float32": np.uint32(0x7F800000),
}


class Closeable:
    """A context manager that calls `close` when it ends. `close` does nothing where nothing stays open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None: ...

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """For what comes after opening: an error that is raised inside closes it."""
        try:
            yield
        except BaseException:
            self.close()
            raise


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
            self._ahead, self._lead = self._advise([span for span in spans if span[1] < _LARGE_BYTES]), 0

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

    def cut_off(
        self, size: int, message: str, offset: int, field: str | None = None, least: bool = False
    ) -> FormatError:
        """The error to raise where a file of `size` bytes is expected and this one has fewer.

        least: the file has at least so many, and where it ends is not known. A size beyond any model is a wrong number
        in the header, and not called a cut.
        """
        if size <= LARGEST_INT:
            whole = f"{'at least ' if least else ''}{size:,}"
            message = f"{CUT_OFF} ({self.size:,} of {whole} bytes): download it again; {message}"
        return self.error(message, offset, field)

    def read_array(self, dtype: DTypeLike, shape: tuple[int, ...], offset: int, field: str) -> Array:
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
            if len(target) >= _LARGE_BYTES and hasattr(os, "preadv"):
                done = self._read_large(target, offset)
            self._file.seek(offset + done)
            while done < len(target):
                self._keep_ahead()
                count = self._file.readinto(target[done : done + _READ_BYTES])
                if not count:
                    raise self.error(f"the file ends after {done} of {len(target)} bytes", offset, field)
                done += count
                self._lead = max(0, self._lead - count)
        except OSError as problem:
            raise self.error(f"cannot be read: {problem}", offset, field) from problem

    def _read_large(self, target: memoryview, offset: int) -> int:
        """Fill `target` from several threads. Returns the bytes that are there from its start on without a gap."""
        part = min(-(-len(target) // _READERS), _MAX_PART)
        starts = range(0, len(target), part)

        def read(start: int) -> int:
            return os.preadv(self._file.fileno(), [target[start : start + part]], offset + start)

        with ThreadPoolExecutor(_READERS) as readers:
            counts = readers.map(read, starts)
            done = 0
            for start, count in zip(starts, counts, strict=True):
                done += count if done == start else 0
        self._keep_ahead()
        return done

    def _keep_ahead(self) -> None:
        while self._lead < _AHEAD_BYTES and (asked := next(self._ahead, 0)):
            self._lead += asked


def first_bad(array: Array, are_bad: Callable[[Array], NDArray[np.bool_]]) -> tuple[int, ...] | None:
    """Index of the first element that `are_bad` says True of, row by row, or None. Checks in blocks, without a copy."""
    flat = array.reshape(-1)
    for start in range(0, flat.size, _BLOCK):
        bad = are_bad(flat[start : start + _BLOCK])
        if bad.any():
            return tuple(int(i) for i in np.unravel_index(start + int(np.argmax(bad)), array.shape))
    return None


def find_not_finite(array: Floats) -> str | None:
    """The message about the first NaN or Inf of a float array, or None.

    >>> find_not_finite(np.array([[1, 2], [np.inf, 4]], dtype=np.float32))
    'holds inf at index [1, 0]; expected finite numbers'
    """
    at = None if _is_finite(array) else first_bad(array, _not_finite)
    return None if at is None else f"holds {float(array[at])} at index {list(at)}; expected finite numbers"


def _is_finite(array: Floats) -> bool:
    """Whether a float array holds no NaN or Inf; False also where that is not known. It makes no temporary arrays."""
    exponent = _EXPONENTS.get(array.dtype.name)
    if exponent is None or not array.size or not array.flags.c_contiguous or not array.dtype.isnative:
        return False
    bits, sign = array.view(exponent.dtype), exponent.dtype.type(1 << (8 * exponent.itemsize - 1))
    # NaN and Inf are the largest integers: with a sign the positive ones, without one the negative ones.
    return bool(bits.view(f"i{exponent.itemsize}").max() < exponent and bits.max() < exponent | sign)


def _not_finite(values: Floats) -> NDArray[np.bool_]:
    if values.dtype.itemsize > 2:
        return ~np.isfinite(values)
    exponent = _EXPONENTS[values.dtype.name]
    bad: NDArray[np.bool_] = values.view(np.uint16) & exponent == exponent  # `isfinite` of 16 bits goes through float32
    return bad
