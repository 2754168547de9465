"""The package's `.cu` files, compiled by the host's C++ compiler: what the emulated device runs.

Compiled files are kept in `$XDG_CACHE_HOME/bitnet_ref/cuda` (or ~/.cache), under a hash of their text, the compiler and
its options; of each file those that were used last, a few, and the others are removed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import weakref
from contextlib import suppress
from functools import cache
from pathlib import Path

from ...errors import BackendUnavailable, DeviceError
from ...file_lock import lock_file
from .sources import FOLDER, find, flattened

FLAGS = ["-std=c++17", "-O2", "-ffp-contract=off", "-fno-fast-math", "-fPIC", "-fvisibility=hidden", "-shared"]
FLAGS += ["-Wall", "-Wno-unused-function", "-Wno-unknown-pragmas", "-Wno-attributes"]
SANITIZERS = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
BUILDS_KEPT = 8  # of a file: more than the versions and options that anyone works with at a time


def compiler() -> str | None:
    """The C++ compiler: $CXX, or the first of g++, clang++ and c++ that is installed."""
    names = (os.environ["CXX"].split()[0],) if os.environ.get("CXX") else ("g++", "clang++", "c++")
    return next((found for name in names if (found := shutil.which(name))), None)


def why_unavailable() -> str | None:
    """None, or why kernels cannot be emulated here."""
    if compiler() is None:
        return "emulating CUDA needs a C++17 compiler (Debian/Ubuntu: apt install g++; or set CXX), and there is none"
    return None


@cache
def compiled(file: str, sanitize: bool) -> tuple[Path, tuple[str, ...]]:
    """The shared library of a file of kernels, and the kernels' names. Compiles it unless that has been done."""
    found = compiler()
    if found is None:
        raise BackendUnavailable(str(why_unavailable()))
    version = _run([found, "--version"], "the compiler does not run")
    flags = [*FLAGS, *(SANITIZERS if sanitize else [])]
    headers = "".join((FOLDER / name).read_text() for name in ("emulated.h", "emulated_functions.h"))
    key = "\0".join([flattened(file), headers, version, *flags])
    digest = hashlib.sha256(key.encode()).hexdigest()[:20]
    folder = _cache_folder()
    path = find(file)
    library, listing = folder / f"{path.name}-{digest}.so", folder / f"{path.name}-{digest}.txt"
    if not (library.is_file() and listing.is_file()):
        with open(folder / f"{path.name}.lock", "wb") as lock:
            lock_file(lock.fileno())
            if not (library.is_file() and listing.is_file()):  # no other process has done it meanwhile
                _build(path, found, flags, library, listing)
    with suppress(OSError):
        os.utime(library)  # used now
        _remove_old_builds(folder, path.name)
    return library, tuple(listing.read_text().split())


def _build(path: Path, compiler: str, flags: list[str], library: Path, listing: Path) -> None:
    source = [compiler, "-x", "c++", f"-I{FOLDER}", "-include", str(FOLDER / "emulated.h")]
    with tempfile.TemporaryDirectory(dir=library.parent) as work:
        text = _run([*source, "-std=c++17", "-E", "-P", "-DBITNET_REF_LISTING", str(path)], path.name)
        names = re.findall(r"\b__global__\s+void\s+(\w+)\s*\(", text)
        lines = [f'#include "{path}"', *(f"EMULATED_KERNEL({name})" for name in names), ""]
        shim, built, listed = Path(work, "kernels.cpp"), Path(work, "kernels.so"), Path(work, "names")
        shim.write_text("\n".join(lines))
        listed.write_text("\n".join(names))
        _run([*source, *flags, "-o", str(built), str(shim)], f"{path.name} does not compile")
        os.replace(listed, listing)
        os.replace(built, library)


def _remove_old_builds(folder: Path, name: str) -> None:
    """All but the last used of a file. A process that has one of them loaded keeps it: only the name is gone."""
    builds = [path for path in folder.glob("*.so") if path.name.rpartition("-")[0] == name]
    last_used = sorted(builds, key=lambda path: path.stat().st_mtime, reverse=True)
    for path in last_used[BUILDS_KEPT:]:
        path.with_suffix(".txt").unlink(missing_ok=True)
        path.unlink(missing_ok=True)


def _run(command: list[str], what: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise DeviceError(f"{what}: {' '.join(command[:1])} says\n{done.stderr[-2000:]}")
    return done.stdout


def _cache_folder() -> Path:
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
    weakref.finalize(compiled, shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
