"""Loaded models that callers share: one per file and way of computing, as long as one of them uses it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

Shared = TypeVar("Shared")


_guard = threading.Lock()
_loading: WeakValueDictionary[Hashable, threading.Lock] = WeakValueDictionary()  # locks of callers that load
_loaded: WeakValueDictionary[Hashable, Any] = WeakValueDictionary()


def share_by_key(key: Hashable, make: Callable[[], Shared], is_usable: Callable[[Shared], bool]) -> Shared:
    """The object that `make` returned for this key, while it is in use and usable; else a new one, for all threads."""
    with _guard:
        lock = _loading.setdefault(key, threading.Lock())
    with lock:
        value = _loaded.get(key)
        if value is None or not is_usable(value):
            value = _loaded[key] = make()
        return value


def file_identity(path: Path) -> Hashable:
    """Changes when the file, or a file directly in the folder, is changed or replaced: paths, sizes and times."""
    facts: list[tuple[str, int, int, int]] = []
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file.is_file():
            s = os.stat(file)
            facts.append((str(file.resolve()), s.st_ino, s.st_size, s.st_mtime_ns))
    return tuple(facts)
