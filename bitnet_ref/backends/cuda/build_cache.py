"""Compiled `.cu` files, cached for the next process.

They lie in `$XDG_CACHE_HOME/bitnet_ref/cuda` (or ~/.cache), named by a hash of everything they were built from. The few
builds of each file that were used last are kept.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from ...system.atomic import atomic_path, lock_file

KEPT = 8  # builds of each file: more than the versions and options in use at a time


def build_once(name: str, sources: str, suffix: str, build: Callable[[Path], object]) -> Path:
    """The path of a build of these sources. If there is none yet, `build` writes it to the path that it is given, while
    other processes wait."""
    digest = hashlib.sha256(sources.encode()).hexdigest()[:20]
    folder = _folder()
    path = folder / f"{name}-{digest}{suffix}"
    if not path.is_file():
        with open(folder / f"{name}.lock", "wb") as lock:
            lock_file(lock.fileno())
            if not path.is_file():  # no other process has built it meanwhile
                with atomic_path(path) as temporary:
                    build(temporary)
    with suppress(OSError):
        os.utime(path)  # used now
        _remove_old(folder, name, suffix)
    return path


def _remove_old(folder: Path, name: str, suffix: str) -> None:
    """Remove all but the last used builds of a file. A process that has loaded one keeps it."""
    builds = [path for path in folder.glob(f"*{suffix}") if path.name.rpartition("-")[0] == name]
    last_used = sorted(builds, key=lambda path: path.stat().st_mtime, reverse=True)
    for path in last_used[KEPT:]:
        path.unlink(missing_ok=True)


def _folder() -> Path:
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bitnet_ref" / "cuda"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # no home, or one that cannot be written
        pass
    return _temporary_folder()


@cache
def _temporary_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="bitnet_ref-cuda-")
    weakref.finalize(build_once, shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
