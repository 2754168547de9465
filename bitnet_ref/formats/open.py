"""`open_checkpoint`: whatever a model comes in, opened by the reader of its format."""

from __future__ import annotations

from pathlib import Path

from ..errors import FormatError
from .checkpoint import Checkpoint, ReadOptions

READABLE = "a folder (Hugging Face, or with a model.onnx), a .safetensors, a .gguf or an .onnx file"


def open_checkpoint(path: Path, options: ReadOptions | None = None) -> Checkpoint:
    """A folder or a file -> its reader, by its suffix. Raises FormatError or ConfigError."""
    options = options or ReadOptions()
    if path.is_dir() and (path / "model.onnx").is_file() and not any(path.glob("model.safetensors*")):
        path = path / "model.onnx"
    if path.is_dir() or path.suffix == ".safetensors":
        from .hf_folder import HfCheckpoint

        return HfCheckpoint(path, options)
    if path.suffix == ".gguf":
        from .gguf_model import GgufCheckpoint

        return GgufCheckpoint(path, options)
    if path.suffix == ".onnx":
        from .onnx_model import OnnxCheckpoint

        return OnnxCheckpoint(path, options)
    raise FormatError(f"expected {READABLE}; no other format can be read yet", path=path)
