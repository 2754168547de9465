"""Conversion from one file format to another, with proof: `convert(source, destination, to)`.

The result is read again before it gets its name, and compared with the source: every ternary plane bit for bit, every
scale, every other tensor, the tokenizer, and the logits of a few tokens. If the proof fails, nothing is left behind.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...errors import ConfigError, FormatError, TokenizerError
from ...system.atomic import atomic_folder, atomic_path, explain_os_errors
from ...system.sharing import model_files
from ..checkpoint import Checkpoint, LoadOptions, Progress
from ..gguf.export import KINDS, write_gguf_model
from ..gguf.file import Typed
from ..hf.config import read_hf_config
from ..hf.writer import write_hf
from ..native.model import SUFFIX as NATIVE_SUFFIX
from ..native.model import write_native
from ..onnx.export import write_onnx_folder
from ..open import find_model, open_checkpoint
from .proof import Proof, prove

__all__ = ["TARGETS", "Proof", "Target", "convert", "gguf_tokenizer", "prove"]

Phase = Callable[[str], Progress]  # "writing", "comparing", "computing" -> that phase's progress


class Target(NamedTuple):
    """A format to write."""

    name: str
    suffix: str | None  # of the file; None for a folder
    write: Callable[[Checkpoint, Path, LoadOptions, Progress | None], object]


def _gguf(kind: str, checkpoint: Checkpoint, path: Path, options: LoadOptions, progress: Progress | None) -> None:
    dense_type = kind.upper() if kind in ("bf16", "f32") else "F16"  # of the embedding and the head
    tokenizer, tiles = gguf_tokenizer(checkpoint), options.tl_tiles
    write_gguf_model(
        checkpoint, path, kind, tokenizer=tokenizer, dense_type=dense_type, tl_tiles=tiles, progress=progress
    )


_TARGETS = (
    Target("hf-packed", None, lambda model, path, _, tick: write_hf(model, path, "hf-packed", tick)),
    Target("hf-bf16", None, lambda model, path, _, tick: write_hf(model, path, "hf-bf16", tick)),
    Target("hf-online", None, lambda model, path, _, tick: write_hf(model, path, "hf-online", tick)),
    Target("hf-unpacked", None, lambda model, path, _, tick: write_hf(model, path, "hf-unpacked", tick)),
    *(Target(f"gguf-{kind}", ".gguf", partial(_gguf, kind)) for kind in KINDS),
    Target("onnx", None, lambda model, path, _, tick: write_onnx_folder(model, path, tick)),
    Target("native", NATIVE_SUFFIX, lambda model, path, _, tick: write_native(model, path, "2bit", tick)),
    Target(
        "native-base3", NATIVE_SUFFIX, lambda model, path, _, progress: write_native(model, path, "base3", progress)
    ),
)
MAX_WEIGHTS_PER_BYTE = 8  # binary ones
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


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    to: str,
    *,
    options: LoadOptions | None = None,
    tl_tiles: str | os.PathLike[str] | None = None,
    verify: bool = True,
    overwrite: bool = False,
    phase: Phase | None = None,
) -> Proof | None:
    """Write the model `source` (a path, or a shipped model's name) to `destination` in the format `to`.

    One tensor is in memory at a time. An interrupt, an error or a failed proof leaves `destination` unchanged. The
    bytes depend on the model alone.
    options: what the user knows better about the source.
    tl_tiles: the kernel_config.ini with the tile sizes to write TL1 or TL2 in.
    verify: compare the result with the source and return the Proof; FormatError if the two differ.
    overwrite: replace an existing file. A folder is never replaced. Without it, one of several conversions to the same
        destination at a time gets the name, and the others raise StorageError.

    Raises ConfigError (an unknown target, a model the target cannot hold), FormatError, StorageError (a full disk).
    """
    if to not in TARGETS:
        raise ConfigError(f"no format is called {to!r}; there are: {', '.join(TARGETS)}")
    if options is not None and options.activations == "blocks":
        raise ConfigError('"blocks" is how a model computes; files hold the same either way', field="activations")
    target, path = TARGETS[to], Path(destination)
    written_options = LoadOptions(tl_tiles=None if tl_tiles is None else Path(tl_tiles))
    with explain_os_errors(path):
        _check_destination(target, path, overwrite)
    proof = None
    with ExitStack() as stack:
        checkpoint = stack.enter_context(open_checkpoint(find_model(source), options))
        _check_size(checkpoint)
        writing = atomic_folder(path) if target.suffix is None else atomic_path(path, replace=overwrite)
        temporary = stack.enter_context(writing)
        target.write(checkpoint, temporary, written_options, phase("writing") if phase else None)
        if verify:
            try:
                with open_checkpoint(temporary, written_options) as written:
                    proof = prove(checkpoint, written, phase)
            except (FormatError, ConfigError, TokenizerError) as problem:
                message = str(problem).replace(str(temporary), str(path))
                raise FormatError(f"what was written cannot be read: {message}", path=path) from problem
            if not proof.holds:
                raise FormatError(f"what was written is not the model that was read: {proof.verdict}", path=path)
    return proof


def remark_on(path: Path, to: str) -> str | None:
    """What a folder that was written as `to` is not, where its name may mislead."""
    if to != "hf-bf16":
        return None
    quantization = read_hf_config(path / "config.json").quantization
    if quantization is None or quantization.quantization_mode == "online":
        return None
    return (
        "hf-bf16 holds -1, 0, +1 beside weight_scale, and no masters: what quantises when it loads would take "
        "mean|W| of these for the scale; hf-online is for that, and for training on"
    )


def _check_size(checkpoint: Checkpoint) -> None:
    """FormatError if the config describes more weights than the files can hold: it sizes what is to be written."""
    config, nbytes = checkpoint.config, sum(file.stat().st_size for file in model_files(checkpoint.path))
    weights = config.vocab_size * config.hidden_size * (2 - config.tie_word_embeddings)
    weights += config.num_hidden_layers * sum(n * k for n, k in config.linear_shapes().values())
    if weights > MAX_WEIGHTS_PER_BYTE * nbytes:
        message = f"the configuration describes {weights} weights, which the {nbytes} bytes here cannot hold"
        raise FormatError(message, path=checkpoint.path, field="config")


def _check_destination(target: Target, path: Path, overwrite: bool) -> None:
    folder, suffix, shown = path.absolute().parent, target.suffix or "", repr(str(path))
    problems = (
        (not path.name.endswith(suffix), f"{target.name} is a file whose name ends in {suffix}, got {shown}"),
        (not folder.is_dir(), f"there is no folder {str(folder)!r} to write into"),
        (path.is_dir(), f"{shown} is a folder that is there already; remove it, or give another name"),
        (path.exists() and not overwrite, f"{shown} is there already; --force (overwrite=True) replaces it"),
        (path.exists() and not suffix, f"{target.name} is a folder, and {shown} is a file"),
    )
    for is_wrong, message in problems:
        if is_wrong:
            raise ConfigError(message)
