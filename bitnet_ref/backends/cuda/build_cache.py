"""What has been compiled from `.cu` files, kept for the next process.

It lies in `$XDG_CACHE_HOME/bitnet_ref/cuda` (or ~/.cache), under a hash of all that it was made from. Of each file the
few that were used last stay.
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

from ...system.atomic import atomic_path
from ...system.file_lock import lock_file

KEPT = 8  # builds of a file: more than the versions and options that anyone works with at a time


def kept(name: str, made_from: str, suffix: str, build: Callable[[Path], object]) -> Path:
    """Where the build of a file of kernels lies. Unless one of the same `made_from` is there, `build` writes it to the
    path that it is given, while other processes wait."""
    digest = hashlib.sha256(made_from.encode()).hexdigest()[:20]
    folder = _folder()
    path = folder / f"{name}-{digest}{suffix}"
    if not path.is_file():
        with open(folder / f"{name}.lock", "wb") as lock:
            lock_file(lock.fileno())
            if not path.is_file():  # no other process has done it meanwhile
                with atomic_path(path) as temporary:
                    build(temporary)
    with suppress(OSError):
        os.utime(path)  # used now
        _remove_old(folder, name, suffix)
    return path


def _remove_old(folder: Path, name: str, suffix: str) -> None:
    """All but the last used of a file. A process that has one of them loaded keeps it: only the name is gone."""
    builds = [path for path in folder.glob(f"*{suffix}") if path.name.rpartition("-")[0] == name]
    last_used = sorted(builds, key=lambda path: path.stat().st_mtime, reverse=True)
    for path in last_used[KEPT:]:
        path.unlink(missing_ok=True)


def _folder() -> Path:
    try:
        wished = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bitnet_ref" / "cuda"
        wished.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(wished, os.W_OK):
            return wished
    except (OSError, RuntimeError):  # a home that cannot be written, or none
        pass
    return _temporary_folder()


@cache
def _temporary_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="bitnet_ref-cuda-")
    weakref.finalize(kept, shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
