"""The package's CUDA files as text, to be compiled for a GPU or for the host."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from ...errors import DeviceError

FOLDER = Path(__file__).resolve().parent.parent.parent / "kernels" / "cuda"

# No fused multiply-add and no fast-math: the contract writes every rounding.
NVRTC_OPTIONS = ("-std=c++17", "--fmad=false")  # CuPy looks for "-std=" before it adds its own

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
        for found in _INCLUDE.finditer(body):
            parts.append(body[end : found.start()])
            if found[1] not in seen:
                seen.add(found[1])
                parts.append(text_of(found[1]))
            line = body.count("\n", 0, found.end()) + 2
            parts.append(f'#line {line} "{name}"')
            end = found.end()
        return "".join([*parts, body[end:]])

    return text_of(name)
