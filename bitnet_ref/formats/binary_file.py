"""Reading bytes from a place in a file that somebody else may be changing."""

from __future__ import annotations

from io import FileIO
from pathlib import Path

from ..errors import FormatError


def read_exactly(file: FileIO, path: Path, target: memoryview, offset: int, field: str) -> None:
    """Fill `target` from `offset` on. FormatError naming `field` when the file is shorter by now or cannot be read."""
    done = 0
    try:
        file.seek(offset)
        while done < len(target):
            count = file.readinto(target[done:])
            if not count:
                raise FormatError(
                    f"the file ends after {done} of {len(target)} bytes", path=path, offset=offset, field=field
                )
            done += count
    except OSError as problem:
        raise FormatError(f"cannot be read: {problem}", path=path, offset=offset, field=field) from problem
