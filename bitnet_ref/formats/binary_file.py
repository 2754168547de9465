"""`BinaryFile`: reads bytes from a file that is not trusted and that another process may be changing."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..errors import FormatError, OutOfMemory


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

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            if self.path.exists() and not self.path.is_file():  # opening a pipe would wait for ever
                kind = "a directory" if self.path.is_dir() else "not a regular file"
                raise FormatError(f"is {kind}", path=self.path)
            self._file = open(self.path, "rb", buffering=0)  # noqa: SIM115 - closed by close()
        except (OSError, ValueError) as problem:
            reason = getattr(problem, "strerror", None) or problem
            raise FormatError(f"cannot be opened: {reason}", path=self.path) from problem
        self.size = os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()

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
                count = self._file.readinto(target[done:])
                if not count:
                    message = f"the file ends after {done} of {len(target)} bytes"
                    raise FormatError(message, path=self.path, offset=offset, field=field)
                done += count
        except OSError as problem:
            raise FormatError(f"cannot be read: {problem}", path=self.path, offset=offset, field=field) from problem
