"""`inspect_model`: choose the inspector for a path, and run it."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import FormatError
from ..formats.checkpoint import Progress, ReadOptions
from ..formats.native.model import SUFFIX as NATIVE_SUFFIX
from ..formats.open import READABLE, find_model
from .facts import Inspection
from .inspector import Inspector


def inspect_model(
    path: str | os.PathLike[str], progress: Progress | None = None, options: ReadOptions | None = None
) -> Inspection:
    """Inspect a model in any format that `load` reads: a folder, a file, or a shipped model by its name.

    progress: called with (layers done, layers in all). options: what the user knows and the file does not say.
    Raises FormatError when there is no such file or its format is not read, and BackendUnavailable when the library
    that reads it is missing; everything else that is wrong becomes a finding. One layer is in memory at a time (of an
    .onnx file without external data, the whole file).
    """
    model_path = find_model(path)
    if (model_path / "model.onnx").is_file() and not any(model_path.glob("model.safetensors*")):
        model_path /= "model.onnx"
    return _choose_inspector(model_path)(model_path, options, progress).run()


def _choose_inspector(path: Path) -> type[Inspector]:
    """As `formats.open.open_checkpoint` chooses the reader."""
    if path.name.endswith(NATIVE_SUFFIX) and not path.is_dir():
        from .native import NativeInspector

        return NativeInspector
    if path.is_dir() or path.suffix == ".safetensors":
        from .hf import HfInspector

        return HfInspector
    if path.suffix == ".gguf":
        from .gguf import GgufInspector

        return GgufInspector
    if path.suffix == ".onnx":
        from .onnx import OnnxInspector

        return OnnxInspector
    raise FormatError(f"expected {READABLE}; other formats are not read", path=path)
