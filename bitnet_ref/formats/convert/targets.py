"""The formats that `convert` can write: `TARGETS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..checkpoint import Checkpoint, Progress, ReadOptions
from ..gguf.export import KINDS, write_gguf_model
from ..gguf.file import Typed
from ..hf.writer import write_hf
from ..native.model import SUFFIX as NATIVE_SUFFIX
from ..native.writer import write_native
from ..onnx.export import write_onnx_folder


class Target(NamedTuple):
    """A format to write."""

    name: str
    suffix: str | None  # of the file; None for a folder
    write: Callable[[Checkpoint, Path, ReadOptions, Progress | None], object]


def _hf(kind: str, checkpoint: Checkpoint, path: Path, options: ReadOptions, progress: Progress | None) -> None:
    write_hf(checkpoint, path, kind, progress)


def _native(storage: str, checkpoint: Checkpoint, path: Path, options: ReadOptions, progress: Progress | None) -> None:
    write_native(checkpoint, path, storage=storage, progress=progress)


def _onnx(checkpoint: Checkpoint, path: Path, options: ReadOptions, progress: Progress | None) -> None:
    write_onnx_folder(checkpoint, path, progress)


def _gguf(kind: str, checkpoint: Checkpoint, path: Path, options: ReadOptions, progress: Progress | None) -> None:
    dense_type = kind.upper() if kind in ("bf16", "f32") else "F16"  # of the embedding and the head
    tokenizer, tiles = gguf_tokenizer(checkpoint), options.tl_tiles
    write_gguf_model(
        checkpoint, path, kind, tokenizer=tokenizer, dense_type=dense_type, tl_tiles=tiles, progress=progress
    )


_TARGETS = (
    Target("hf-packed", None, partial(_hf, "hf-packed")),
    Target("hf-bf16", None, partial(_hf, "hf-bf16")),
    *(Target(f"gguf-{kind}", ".gguf", partial(_gguf, kind)) for kind in KINDS),
    Target("onnx", None, _onnx),
    Target("native", NATIVE_SUFFIX, partial(_native, "2bit")),
    Target("native-base3", NATIVE_SUFFIX, partial(_native, "base3")),
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
