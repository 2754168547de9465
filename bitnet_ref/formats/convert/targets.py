"""The formats that `convert` can write: `TARGETS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint import Checkpoint, Progress, ReadOptions
from ..gguf.file import Typed
from ..native.model import SUFFIX as NATIVE_SUFFIX

Write = Callable[[Checkpoint, Path, ReadOptions, Progress | None], None]


@dataclass(frozen=True)
class Target:
    """A format to write."""

    name: str
    suffix: str | None  # of the file; None for a folder
    description: str
    write: Write


def _hf(kind: str) -> Write:
    def write(checkpoint: Checkpoint, path: Path, options: ReadOptions, progress: Progress | None) -> None:
        from ..hf.writer import write_hf

        write_hf(checkpoint, path, kind, progress)

    return write


def _gguf(kind: str, description: str, dense_type: str = "F16") -> Target:
    def write(checkpoint: Checkpoint, path: Path, options: ReadOptions, progress: Progress | None) -> None:
        from ..gguf.export import write_gguf_model

        write_gguf_model(
            checkpoint,
            path,
            kind,
            tokenizer=gguf_tokenizer(checkpoint),
            dense_type=dense_type,
            tl_tiles=options.tl_tiles,
            progress=progress,
        )

    return Target(f"gguf-{kind}", ".gguf", description, write)


def _native(storage: str) -> Write:
    def write(checkpoint: Checkpoint, path: Path, options: ReadOptions, progress: Progress | None) -> None:
        from ..native.writer import write_native

        write_native(checkpoint, path, storage=storage, progress=progress)

    return write


def _onnx(checkpoint: Checkpoint, path: Path, options: ReadOptions, progress: Progress | None) -> None:
    from ..onnx.export import write_onnx_folder

    write_onnx_folder(checkpoint, path, progress)


_TARGETS = (
    Target("hf-packed", None, "a Hugging Face folder, ternary planes of 2 bits", _hf("hf-packed")),
    Target("hf-bf16", None, "a Hugging Face folder in bfloat16: the masters, or -1, 0, +1", _hf("hf-bf16")),
    _gguf("i2_s", "bitnet.cpp's 2 bits, x86 layout"),
    _gguf("tq1_0", "llama.cpp's 1.69 bits; scales become float16"),
    _gguf("tq2_0", "llama.cpp's 2.06 bits; scales become float16"),
    _gguf("tl1", "bitnet.cpp's look-up tables for Arm"),
    _gguf("tl2", "bitnet.cpp's look-up tables for x86"),
    _gguf("f16", "matrices as float16 numbers"),
    _gguf("bf16", "matrices as bfloat16 numbers", "BF16"),
    _gguf("f32", "matrices as float32 numbers", "F32"),
    _gguf("q8_0", "matrices as int8 numbers in blocks of 32, with a float16 scale in each"),
    Target("onnx", None, "a folder: model.onnx for onnxruntime, its data, the tokenizer", _onnx),
    Target("native", NATIVE_SUFFIX, "one file with everything, ternary planes of 2 bits", _native("2bit")),
    Target("native-base3", NATIVE_SUFFIX, "the same, planes of 1.6 bits: smaller, slower to read", _native("base3")),
)
TARGETS = {target.name: target for target in _TARGETS}


def gguf_tokenizer(checkpoint: Checkpoint) -> Mapping[str, Typed] | None:
    """The tokenizer as GGUF metadata, or None. Stop tokens that only the configuration names take the free keys."""
    from ...tokenizers.gguf_vocab import gguf_from_tokenizer_files

    files = checkpoint.tokenizer_files()
    if "tokenizer.json" not in files and "tokenizer.model" not in files:
        return None
    metadata = gguf_from_tokenizer_files(files)
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    named = {metadata[key] for key in keys if key in metadata}
    free = [key for key in keys if key not in metadata]
    for key, token in zip(free, [t for t in checkpoint.config.eos_token_ids if t not in named], strict=False):
        metadata[key] = token
    return {key: _typed(value) for key, value in metadata.items()}


def _typed(value: Any) -> Typed:
    if isinstance(value, np.ndarray):
        return Typed(f"[{value.dtype}]", value)
    if isinstance(value, list):
        return Typed("[string]", value)
    return Typed({str: "string", bool: "bool", int: "uint32", float: "float32"}[type(value)], value)
