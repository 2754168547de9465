"""The package's CUDA files as text, to be compiled for a GPU or for the host, and the builds, cached for later.

Builds lie in `$XDG_CACHE_HOME/bitnet_ref/cuda` (or ~/.cache), named by a hash of everything they were made from. The
few builds of each file that were used last are kept.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from ...errors import DeviceError
from ...system.atomic import atomic_path, lock_file

FOLDER = Path(__file__).resolve().parent.parent.parent / "kernels" / "cuda"

# No fused multiply-add and no fast-math: the contract writes every rounding.
NVRTC_OPTIONS = ("-std=c++17", "--fmad=false")  # CuPy looks for "-std=" before it adds its own

MAX_BUILDS = 8  # of each file: more than the versions and options in use at a time
_INCLUDE = re.compile(r'^#include "([^"]+)".*$', re.MULTILINE)


def files() -> list[str]:
    """Every file of kernels: ["ternary.cu", ...]"""
    return sorted(path.name for path in FOLDER.glob("*.cu"))


def find(name: str) -> Path:
    """One of the package's files by its name, or any file by its path. DeviceError when there is none."""
    path = Path(name) if "/" in name else FOLDER / name
    if not path.is_file():
        raise DeviceError(f"there is no CUDA file {name!r}; the package's are {', '.join(files())}, others need a path")
    return path


@cache
def flattened(name: str) -> str:
    """A file (see `find`) with the package's headers that it includes in their places, each once.

    So the text alone names a build, and no include path is needed.
    """
    seen: set[str] = set()

    def text_of(name: str) -> str:
        body = find(name).read_text().replace("#pragma once\n", "")
        parts, end = [f'#line 1 "{name}"\n'], 0
        for include in _INCLUDE.finditer(body):
            parts.append(body[end : include.start()])
            if include[1] not in seen:
                seen.add(include[1])
                parts.append(text_of(include[1]))
            line = body.count("\n", 0, include.end()) + 2
            parts.append(f'#line {line} "{name}"')
            end = include.end()
        return "".join([*parts, body[end:]])

    return text_of(name)


# -- builds ------------------------------------------------------------------------------------------------------------


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
    for path in last_used[MAX_BUILDS:]:
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
