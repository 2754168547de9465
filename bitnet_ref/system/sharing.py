"""Loaded models that callers share: one per file and way of computing, as long as one of them uses it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from .forks import ForkLock

Shared = TypeVar("Shared")
_NESTED = ("1_Pooling/config.json", "additional_chat_templates/*.jinja")  # files of a model in folders of its folder
_PART = re.compile(r"(.+)-[0-9]{5}-of-([0-9]{5})\.gguf")

_guard = ForkLock()
_loading: WeakValueDictionary[Hashable, ForkLock] = WeakValueDictionary()  # locks of callers that load
_loaded: WeakValueDictionary[Hashable, Any] = WeakValueDictionary()


def share_by_key(key: Hashable, make: Callable[[], Shared], is_usable: Callable[[Shared], bool]) -> Shared:
    """The object that `make` returned for this key, while it is in use and usable; else a new one, for all threads."""
    with _guard:
        lock = _loading.setdefault(key, ForkLock())
    with lock:
        value = _loaded.get(key)
        if value is None or not is_usable(value):
            value = _loaded[key] = make()
        return value


def model_files(path: Path) -> list[Path]:
    """The regular files that a model may be read from: the file itself if it holds all; else all beside it.
    None once the path is gone."""
    if path.is_file() and path.name.endswith((".gguf", ".bitnet.safetensors")):
        return [file for name in split_names(path.name) if (file := path.with_name(name)).is_file()]
    files = (file for pattern in ("*", *_NESTED) for file in folder_of(path).glob(pattern) if file.is_file())
    return sorted(files) if path.exists() else []


def folder_of(model: Path) -> Path:
    """The folder that a model is, or in which its file lies."""
    return model if model.is_dir() else model.parent


def split_names(name: str) -> list[str]:
    """The names of the files over which a GGUF is split, of that of any of them; the name alone where it is of no part.

    >>> split_names("x-00002-of-00002.gguf")
    ['x-00001-of-00002.gguf', 'x-00002-of-00002.gguf']
    """
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    return [f"{match[1]}-{number:05}-of-{match[2]}.gguf" for number in range(1, int(match[2]) + 1)] or [name]


def date_of(seconds: float) -> datetime:
    """A file's time, in UTC. Archives bring along years that Python's dates do not have: these are 1970 or 9999."""
    return datetime.fromtimestamp(min(max(seconds, 0.0), 253402300799.0), UTC)


def file_identity(path: Path) -> tuple[str, int, int, int, int]:
    """Changes when the file is changed or replaced: name, inode, size, and two times.

    The second time, ctime, is the system's own: no program sets it, and no archive brings it along.
    """
    s = os.stat(path)
    return path.name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns
