"""`open_checkpoint`: whatever a model comes in, opened by the reader of its format."""

from __future__ import annotations

from pathlib import Path

from ..errors import FormatError
from .checkpoint import Checkpoint, ReadOptions

READABLE = "a folder (Hugging Face, or with a model.onnx), a .safetensors, .bitnet.safetensors, .gguf or .onnx file"


def open_checkpoint(path: Path, options: ReadOptions | None = None) -> Checkpoint:
    """A folder or a file -> its reader, by its suffix. Raises FormatError or ConfigError."""
    options = options or ReadOptions()
    if path.name.endswith(".bitnet.safetensors") and not path.is_dir():
        from .native import NativeCheckpoint

        return NativeCheckpoint(path, options)
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
    raise FormatError(f"expected {READABLE}; other formats are not read", path=path)


def read_tokenizer_files(path: Path) -> dict[str, bytes]:
    """`Checkpoint.tokenizer_files` of a folder or a file, without looking at its tensors."""
    if path.suffix == ".gguf":
        from ..tokenizers.gguf_vocab import tokenizer_files_from_gguf
        from .gguf import GgufFile

        with GgufFile(path) as file:
            return tokenizer_files_from_gguf(file.metadata, path) if "tokenizer.ggml.tokens" in file.metadata else {}
    with open_checkpoint(path) as checkpoint:
        return checkpoint.tokenizer_files()
