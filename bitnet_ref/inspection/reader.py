"""`inspect_model`: which inspector a path needs."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import FormatError
from ..formats.checkpoint import ReadOptions
from ..formats.native.model import SUFFIX as NATIVE_SUFFIX
from ..formats.open import READABLE, find_model
from .facts import Inspection
from .generic import Inspector, Progress


def inspect_model(
    path: str | os.PathLike[str], progress: Progress | None = None, options: ReadOptions | None = None
) -> Inspection:
    """Look at a model in any format that `load` reads: a folder, a file, or a shipped model by its name.

    progress: called with (layers done, layers in all). options: what the user knows better than the file.
    Raises FormatError when there is nothing there, or it is a kind of file that is not read, and BackendUnavailable
    when the library that reads it is missing; everything else that is wrong becomes a finding. One layer is in memory
    at a time (of an .onnx file without external data, the file).
    """
    found = find_model(path)
    if (found / "model.onnx").is_file() and not any(found.glob("model.safetensors*")):
        found /= "model.onnx"
    return _inspector_of(found)(found, options, progress).run()


def _inspector_of(path: Path) -> type[Inspector]:
    """As `formats.open.open_checkpoint` chooses."""
    if path.is_dir() or (path.suffix == ".safetensors" and not path.name.endswith(NATIVE_SUFFIX)):
        from .hf import HfInspector

        return HfInspector
    if path.name.endswith(NATIVE_SUFFIX):
        from .native import NativeInspector

        return NativeInspector
    if path.suffix == ".gguf":
        from .gguf import GgufInspector

        return GgufInspector
    if path.suffix == ".onnx":
        from .onnx import OnnxInspector

        return OnnxInspector
    raise FormatError(f"expected {READABLE}; other formats are not read", path=path)
