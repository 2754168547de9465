"""Loaded models that callers share: one for each file and way of computing, for as long as anybody holds it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

Shared = TypeVar("Shared")

_guard = threading.Lock()
_loading: WeakValueDictionary[Hashable, Any] = WeakValueDictionary()  # key -> the lock of those who load it
_loaded: WeakValueDictionary[Hashable, Any] = WeakValueDictionary()


def shared(key: Hashable, make: Callable[[], Shared], is_usable: Callable[[Shared], bool]) -> Shared:
    """What `make` gave for this key, if anybody still holds it and it is usable; else what it gives now, once for all
    threads."""
    with _guard:
        lock = _loading.setdefault(key, _Lock())
    with lock.lock:
        found = _loaded.get(key)
        if found is None or not is_usable(found):
            found = _loaded[key] = make()
        return found


class _Lock:
    """A lock that a weak dictionary can hold."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def identity(path: Path) -> Hashable:
    """What changes when a file, or a file directly in a folder, is changed or replaced: places, sizes, times."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    facts: list[tuple[str, int, int, int]] = []
    for file in files:
        if file.is_file():
            s = os.stat(file)
            facts.append((str(file.resolve()), s.st_ino, s.st_size, s.st_mtime_ns))
    return tuple(facts)
