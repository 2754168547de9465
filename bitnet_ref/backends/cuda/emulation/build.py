"""Compiles `.cu` files with the host's C++ compiler, for the emulated device."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

from ....errors import BackendUnavailable, DeviceError
from ..sources import FOLDER, build_once, find, flattened

FLAGS = ["-std=c++17", "-O2", "-ffp-contract=off", "-fno-fast-math", "-fPIC", "-fvisibility=hidden", "-shared"]
FLAGS += ["-Wall", "-Wno-unused-function", "-Wno-unknown-pragmas", "-Wno-attributes"]
SANITIZERS = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
LISTING = 'EMULATED_EXPORT emulated_names() {{ return "{}"; }}'


def compiler() -> str | None:
    """The C++ compiler: $CXX, or the first of g++, clang++ and c++ that is installed."""
    names = (os.environ["CXX"].split()[0],) if os.environ.get("CXX") else ("g++", "clang++", "c++")
    return next(filter(None, map(shutil.which, names)), None)


def why_unavailable() -> str | None:
    """None if kernels can be emulated here, else the reason."""
    if compiler() is None:
        return "emulating CUDA needs a C++17 compiler (Debian/Ubuntu: apt install g++; or set CXX), and there is none"
    return None


@cache
def compiled(file: str, sanitize: bool) -> ctypes.CDLL:
    """The shared library of a `.cu` file, compiled unless the build cache has it."""
    path_of_compiler = compiler()
    if path_of_compiler is None:
        raise BackendUnavailable(str(why_unavailable()))
    version = _run([path_of_compiler, "--version"], "the compiler does not run")
    flags = [*FLAGS, *(SANITIZERS if sanitize else [])]
    headers = "".join((FOLDER / name).read_text() for name in ("emulated.h", "emulated_functions.h"))
    sources = "\0".join([flattened(file), headers, LISTING, version, *flags])
    path = find(file)
    build = build_once(path.name, sources, ".so", lambda target: _build(path, path_of_compiler, flags, target))
    return ctypes.CDLL(str(build))


def kernel_names(library: ctypes.CDLL) -> list[str]:
    """The names of the kernels in a compiled file."""
    library.emulated_names.restype = ctypes.c_char_p
    names: bytes = library.emulated_names()
    return names.decode().split()


def _build(path: Path, compiler: str, flags: list[str], target: Path) -> None:
    source = [compiler, "-x", "c++", f"-I{FOLDER}", "-include", str(FOLDER / "emulated_functions.h")]
    text = _run([*source, "-std=c++17", "-E", "-P", "-DBITNET_REF_LISTING", str(path)], path.name)
    names = re.findall(r"\b__global__\s+void\s+(\w+)\s*\(", text)
    lines = [f'#include "{path}"', *(f"EMULATED_KERNEL({name})" for name in names), LISTING.format(" ".join(names)), ""]
    _run([*source, *flags, "-o", str(target), "-"], f"{path.name} does not compile", "\n".join(lines))


def _run(command: list[str], what: str, text: str = "") -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise DeviceError(f"{what}: {' '.join(command[:1])} says\n{done.stderr[-2000:]}")
    return done.stdout
