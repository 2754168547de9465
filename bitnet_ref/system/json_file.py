"""Opening files that are not trusted (`open_regular`: all readers do so here), reading JSON (limited sizes, no
duplicate keys unless the caller takes them, clear errors) and TOML, and writing JSON."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ..errors import ConfigError, FormatError, TokenizerError
from .atomic import atomic_path

AnyFileError = TypeVar("AnyFileError", ConfigError, FormatError, TokenizerError)
OnDuplicate = Callable[[str, Any, Any], None]  # (key, first value, last value)

_BLOCK_BYTES = 1 << 16
MAX_TOML_BYTES = 1 << 20
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_MAX_POINTER_BYTES = 1024  # by Git LFS's specification
MAX_VALUES = 1 << 22  # a tokenizer.json of 260,000 tokens and 510,000 merges has 2 million


# Opening a pipe would wait for a writer, and a terminal could become the process's own
_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY"))


def open_regular(
    path: str | os.PathLike[str], error: type[AnyFileError], folder: str | os.PathLike[str] | None = None
) -> FileIO:
    """A regular file, open for reading, unbuffered. Anything else raises `error`: a pipe, a device, a folder, no file.

    folder: the model folder that the file belongs to. Then a link that leads out of it is refused too: a stranger's
    folder could show any file of this machine as a part of the model.
    """
    path = Path(path)
    try:
        target, no_link = path, 0
        if folder is not None and path.is_symlink():
            if not stays_inside(Path(folder), path):
                raise error("is a link out of the folder; copy the file into it", path=path)
            target, no_link = Path(os.path.realpath(path)), getattr(os, "O_NOFOLLOW", 0)
        _check_regular(os.stat(target).st_mode, error, path)  # a device acts when it is opened
        file = os.open(target, _FLAGS | no_link)
        try:
            _check_regular(os.fstat(file).st_mode, error, path)  # it may have been replaced
            _check_content(file, error, path)
            return FileIO(file, "rb")
        except BaseException:
            os.close(file)
            raise
    except FileNotFoundError as problem:
        raise error("there is no such file", path=path) from problem
    except (OSError, ValueError) as problem:  # ValueError: a NUL in the path
        raise error(f"cannot be opened: {getattr(problem, 'strerror', None) or problem}", path=path) from problem


def _check_regular(mode: int, error: type[AnyFileError], path: Path) -> None:
    if not stat.S_ISREG(mode):
        raise error(f"is not a regular file{', but a directory' if stat.S_ISDIR(mode) else ''}", path=path)


def _check_content(file: int, error: type[AnyFileError], path: Path) -> None:
    """Raise `error` for what Git leaves in the place of a large file that was not fetched."""
    if os.fstat(file).st_size < _MAX_POINTER_BYTES:
        start = os.read(file, len(_LFS_POINTER))
        os.lseek(file, 0, os.SEEK_SET)
        if start == _LFS_POINTER:
            raise error("is a Git LFS pointer, not the file itself: fetch that with git lfs pull", path=path)


def stays_inside(folder: Path, file: Path) -> bool:
    """Whether a link leads to a file of the folder itself, or to the hub cache's blobs: those beside its snapshots, or
    those that its repositories share."""
    real, home = Path(os.path.realpath(file)), Path(os.path.realpath(folder))  # not resolve(): links may be in a loop
    if real.parent == home:
        return True
    repository = home.parent.parent
    shared = repository.parent / "blobs" / real.name[:2]
    return home.parent.name == "snapshots" and real.parent in (repository / "blobs", shared)


def is_present(path: Path) -> bool:
    """Whether there is something of this name, be it a link to nothing or a pipe: opening it says what is wrong."""
    return os.path.lexists(path)


def read_bounded(
    path: str | os.PathLike[str],
    error: type[AnyFileError],
    max_bytes: int,
    folder: str | os.PathLike[str] | None = None,
) -> bytes:
    """The bytes of a file of at most `max_bytes`, opened by `open_regular`. Anything else raises `error`."""
    with open_regular(path, error, folder) as file:
        try:
            # First the size in the directory, because read() allocates it at once; then what was appended since
            data = file.read(min(os.fstat(file.fileno()).st_size, max_bytes) + 1)
            while len(data) <= max_bytes and (block := file.read(_BLOCK_BYTES)):
                data += block
        except OSError as problem:
            raise error(f"cannot be read: {problem.strerror or problem}", path=path) from problem
    if len(data) > max_bytes:
        raise error(f"has more than {max_bytes} bytes, and at most that many are accepted", path=path)
    return data


def decode_text(data: bytes, error: type[AnyFileError], path: str | os.PathLike[str], offset: int = 0) -> str:
    """The text of UTF-8 bytes at `offset` of `path`. Anything else raises `error`."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise error(f"not UTF-8 text: {problem.reason}", path=path, offset=offset + problem.start) from problem


def read_toml(path: str | os.PathLike[str], error: type[AnyFileError]) -> dict[str, Any]:
    """The tables of a TOML file of at most MAX_TOML_BYTES. Anything else raises `error`."""
    import tomllib

    try:
        return tomllib.loads(decode_text(read_bounded(path, error, MAX_TOML_BYTES), error, path))
    except (ValueError, RecursionError) as problem:  # also an integer of thousands of digits, and deep lists
        raise error(f"is not valid TOML: {problem}", path=path) from problem


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write a JSON file, which is complete or not there at all. StorageError if it cannot be written."""
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def json_hash(value: Any, default: Callable[[Any], str] | None = None) -> str:
    """The SHA-256 of a value as JSON with sorted keys, in hexadecimal. default: makes a text of what is no JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=default).encode()).hexdigest()


def read_json_object(
    path: Path,
    error: type[AnyFileError],
    max_bytes: int,
    folder: Path | None = None,
    on_duplicate: OnDuplicate | None = None,
) -> dict[str, Any]:
    """The object in the file. Anything else raises `error`: missing, too large, not UTF-8, not JSON, not an object."""
    return parse_json_object(read_bounded(path, error, max_bytes, folder), error, path, on_duplicate=on_duplicate)


def parse_json_object(
    data: bytes,
    error: type[AnyFileError],
    path: str | os.PathLike[str],
    offset: int = 0,
    on_duplicate: OnDuplicate | None = None,
) -> dict[str, Any]:
    """Parse bytes at `offset` of `path`. NaN and Infinity are errors, and so are duplicate keys without `on_duplicate`.

    on_duplicate: called with the key and its two values; the last one counts, as in Python's json.
    More than MAX_VALUES values are refused: an empty list is 3 bytes of text and 64 in memory.
    """
    if data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_VALUES:
        raise error(f"holds more than {MAX_VALUES} values, and at most that many are accepted", path=path)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in pairs:
            if key in out and on_duplicate is not None:
                on_duplicate(key, out[key], value)
            elif key in out:
                raise error(f"the key {key!r} occurs twice in one object", path=path, field=key)
            out[key] = value
        return out

    def no_constant(name: str) -> NoReturn:
        raise error(f"{name} is not JSON", path=path)

    try:
        text = decode_text(data, error, path, offset)
        value = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
    except json.JSONDecodeError as problem:
        offset += len(problem.doc[: problem.pos].encode())
        raise error(f"not valid JSON: {problem.msg}", path=path, offset=offset) from problem
    except RecursionError as problem:
        raise error("not usable JSON: nested too deeply", path=path) from problem
    except ValueError as problem:  # an integer of thousands of digits
        raise error(f"not usable JSON: {problem}", path=path) from problem
    if not isinstance(value, dict):
        raise error(f"expected a JSON object, got {type(value).__name__}", path=path)
    return value
