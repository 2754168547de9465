"""Conversion from one file format to another, with proof: `convert(source, destination, to)`.

The result is read again before it gets its name, and compared with the source: every ternary plane bit for bit, every
scale, every other tensor, the tokenizer, and the logits of a few tokens. If the proof fails, nothing is left behind.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from ...errors import BitNetRefError, ConfigError, ConfigWarning, FormatError, StorageError, TokenizerError, require
from ...reference.config import ModelConfig
from ...system.atomic import atomic_folder, atomic_path, explain_os_errors
from ...system.sharing import model_files
from ..checkpoint import Checkpoint, LoadOptions, Progress, files_of_texts, merge_adapter
from ..gguf.config import END_OF_TURN, architecture, ignored_by_llama_cpp
from ..gguf.export import KINDS, write_gguf_model
from ..gguf.file import Typed
from ..hf.adapter import NO_ADAPTER, find_adapter
from ..hf.writer import MLX_BITS, write_hf
from ..native.model import SUFFIX as NATIVE_SUFFIX
from ..native.model import write_native
from ..onnx.export import write_onnx_folder
from ..open import find_model, open_checkpoint, read_config
from .proof import Proof, prove

__all__ = ["TARGETS", "Fit", "Proof", "Target", "convert", "fits", "gguf_tokenizer", "prove"]

Phase = Callable[[str], Progress]  # "writing", "comparing", "computing" -> that phase's progress


class WriteOptions(NamedTuple):
    """What the user chooses about the result."""

    tl_tiles: Path | None = None  # the kernel_config.ini with the tile sizes of TL1 or TL2
    split_size: int | None = None  # bytes of a file, beyond which there is a further one


class Target(NamedTuple):
    """A format to write."""

    name: str
    suffix: str | None  # of the file; None for a folder
    write: Callable[[Checkpoint, Path, WriteOptions, Progress | None], object]


def _gguf(kind: str, checkpoint: Checkpoint, path: Path, options: WriteOptions, progress: Progress | None) -> None:
    dense_type = kind.upper() if kind in ("bf16", "f32") else "F16"  # of the embedding and the head
    write_gguf_model(
        checkpoint,
        path,
        kind,
        tokenizer=gguf_tokenizer(checkpoint),
        dense_type=dense_type,
        tl_tiles=options.tl_tiles,
        split_size=options.split_size,
        progress=progress,
    )


def _hf(kind: str, checkpoint: Checkpoint, path: Path, options: WriteOptions, progress: Progress | None) -> None:
    write_hf(checkpoint, path, kind, progress, options.split_size)


_HF_KINDS = ("hf-packed", "hf-bf16", "hf-online", "hf-unpacked", *MLX_BITS)
_TARGETS = (
    *(Target(kind, None, partial(_hf, kind)) for kind in _HF_KINDS),
    *(Target(f"gguf-{kind}", ".gguf", partial(_gguf, kind)) for kind in KINDS),
    Target("onnx", None, lambda model, path, _, tick: write_onnx_folder(model, path, tick)),
    Target("native", NATIVE_SUFFIX, lambda model, path, _, tick: write_native(model, path, "2bit", tick)),
    Target(
        "native-base3", NATIVE_SUFFIX, lambda model, path, _, progress: write_native(model, path, "base3", progress)
    ),
)
# Who runs a format, where it does not depend on the model; "gguf-" is left out
ENGINES = {
    **dict.fromkeys(("i2_s", "tl1", "tl2"), "bitnet.cpp"),
    **dict.fromkeys(("pq2_0", "ptq1_0"), "PrismML's llama.cpp"),
    **dict.fromkeys(MLX_BITS, "mlx-lm"),
    **dict.fromkeys(("native", "native-base3"), "bitnet_ref"),
    "iq2_bn": "ik_llama.cpp",
    "stq1_0": "AngelSlim's llama.cpp",
    "onnx": "onnxruntime",
}
OF_BITNET_CPP = ("bitnet-25", "bitnet-b1.58")  # architectures that llama.cpp does not have
MAX_WEIGHTS_PER_BYTE = 8  # binary ones
TARGETS = {target.name: target for target in _TARGETS}


def gguf_tokenizer(checkpoint: Checkpoint) -> Mapping[str, Typed] | None:
    """The tokenizer as GGUF metadata, or None. Stop tokens that only the configuration names take the free keys.

    It has a token for each row of the embedding, as llama.cpp requires: unused ones follow the tokenizer's own.
    """
    from ...tokenizers.gguf_vocab import gguf_from_tokenizer_files, pad_vocabulary

    files = checkpoint.tokenizer_files()
    if "tokenizer.json" not in files and "tokenizer.model" not in files:
        return None
    metadata = pad_vocabulary(gguf_from_tokenizer_files(files), checkpoint.config.vocab_size)
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    named = {metadata[key] for key in keys if key in metadata}
    free = [key for key in keys if key not in metadata]
    for key, token in zip(free, [t for t in checkpoint.config.eos_token_ids if t not in named], strict=False):
        metadata[key] = token
    stops = [metadata[key] for key in keys if key in metadata]
    turns = {number for number, text in enumerate(metadata["tokenizer.ggml.tokens"]) if text in END_OF_TURN}
    if stops and keys[1] not in metadata and not turns.issubset(stops):
        metadata[keys[1]] = stops[0]  # of a base model: without this key a reader takes those tokens for ends of text
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
    split_size: int | None = None,
    verify: bool = True,
    compute: bool = True,
    overwrite: bool = False,
    phase: Phase | None = None,
) -> Proof | None:
    """Write the model `source` (a path, or a shipped model's name) to `destination` in the format `to`.

    One tensor is in memory at a time. An interrupt, an error or a failed proof leaves `destination` unchanged. The
    bytes depend on the model alone.
    options: what the user knows better about the source. Its `adapter`, or the one beside the weights, is merged into
        matrices that are dense, in float32; of ternary ones it is refused.
    tl_tiles: the kernel_config.ini with the tile sizes to write TL1 or TL2 in.
    split_size: write further files beyond so many bytes each. The result is a folder then, of a GGUF too; native files
        and ONNX are not split.
    verify: compare the result with the source and return the Proof; FormatError if the two differ.
    compute: also run a few tokens through both.
    overwrite: replace an existing file. A folder is never replaced. Without it, one of several conversions to the same
        destination at a time gets the name, and the others raise StorageError.

    Raises ConfigError (an unknown target, a model the target cannot hold), FormatError, StorageError (a full disk).
    """
    if to not in TARGETS:
        raise ConfigError(f"no format is called {to!r}; there are: {', '.join(TARGETS)}")
    if options is not None and options.activations == "blocks":
        raise ConfigError('"blocks" is how a model computes; files hold the same either way', field="activations")
    target, path = TARGETS[to], Path(destination)
    chosen = WriteOptions(None if tl_tiles is None else Path(tl_tiles), split_size)
    if split_size is not None:
        if not to.startswith(("hf-", "mlx-", "gguf-")):
            message = f"{to} is not split; formats whose names begin with hf-, mlx- or gguf- are"
            raise ConfigError(message, field="split_size")
        require(split_size > 0, "split_size", "1 byte or more", split_size)
        target = target._replace(suffix=None)
    with explain_os_errors(path):
        _check_destination(target, path, overwrite)
    proof = None
    with ExitStack() as stack:
        model, adapter = find_adapter(find_model(source), None if options is None else options.adapter)
        reading = replace(options or LoadOptions(), adapter=NO_ADAPTER if adapter is None else adapter)
        checkpoint = stack.enter_context(open_checkpoint(find_model(model), reading))
        merge_adapter(checkpoint)
        _check_size(checkpoint)
        writing = atomic_folder(path) if target.suffix is None else atomic_path(path, replace=overwrite)
        temporary = stack.enter_context(writing)
        target.write(checkpoint, temporary, chosen, phase("writing") if phase else None)
        if verify:
            try:
                with open_checkpoint(temporary, LoadOptions(tl_tiles=chosen.tl_tiles)) as written:
                    proof = prove(checkpoint, written, phase, compute)
            except (FormatError, ConfigError, TokenizerError) as problem:
                message = str(problem).replace(str(temporary), str(path))
                raise FormatError(f"what was written cannot be read: {message}", path=path) from problem
            if not proof.holds:
                raise FormatError(f"what was written is not the model that was read: {proof.verdict}", path=path)
    for name in files_of_texts(checkpoint.texts_path):
        if name not in files_of_texts(path):
            message = f"{path}: {to} has no place for {name}; copy that file beside it, where embed reads it"
            warnings.warn(message, ConfigWarning, stacklevel=2)
    for words in ignored_by_llama_cpp(checkpoint.config) if to.startswith("gguf-") else ():
        warnings.warn(f"{path}: {words}; run it in bitnet_ref or transformers", ConfigWarning, stacklevel=2)
    return proof


def engine_of(config: ModelConfig, to: str) -> str:
    """The name of the engine that runs a model of this config written as `to`; "" where none is known."""
    kind = to.removeprefix("gguf-")
    if to.startswith("gguf-") and config.quantization is not None and config.quantization.use_rms_norm:
        return ""
    if kind in ENGINES or not to.startswith("gguf-"):
        return ENGINES.get(kind, "transformers")
    return "bitnet.cpp" if architecture(config) in OF_BITNET_CPP else "llama.cpp"


def remark_on(path: Path, to: str) -> str | None:
    """What a result that was written as `to` is not, where its name may mislead.   path: of the result"""
    config = read_config(path)
    engine = engine_of(config, to)
    if to.startswith("gguf-") and not engine:
        return "its linears have norms inside (attn_q_norm_in), which llama.cpp does not load"
    if engine == "bitnet.cpp" and to.removeprefix("gguf-") not in ENGINES:
        return f"its architecture is {architecture(config)}, which bitnet.cpp runs and llama.cpp does not"
    if to != "hf-bf16" or config.quantization is None or config.quantization.quantization_mode == "online":
        return None
    return (
        "hf-bf16 holds -1, 0, +1 beside weight_scale, and no masters: what quantises when it loads would take "
        "mean|W| of these for the scale; hf-online is for that, and for training on"
    )


class Fit(NamedTuple):
    """What a format makes of a model."""

    target: str
    nbytes: int | None  # of the result; None where there is none
    proof: Proof | None
    reason: str  # what is rounded, or why there is no result
    engine: str


def fits(
    source: str | os.PathLike[str],
    *,
    options: LoadOptions | None = None,
    tl_tiles: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Iterator[Fit]:
    """Each format of TARGETS: whether it holds the model exactly.

    Each is written into a temporary folder, read again and compared, and deleted: it takes as long as all conversions,
    without the logits, and the disk space of the largest.
    """
    with open_checkpoint(find_model(source), options) as checkpoint:
        config = checkpoint.config
    with TemporaryDirectory() as folder:
        for number, (name, target) in enumerate(TARGETS.items(), 1):
            path = Path(folder) / f"model{target.suffix or ''}"
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", ConfigWarning)  # nothing is kept
                    proof = convert(source, path, name, options=options, tl_tiles=tl_tiles, compute=False)
            except StorageError:
                raise
            except BitNetRefError as error:
                message = getattr(error, "message", str(error)).replace(f"{folder}{os.sep}", "")
                field = getattr(error, "field", None)
                reason = f"{field}: {message}" if field and not message.startswith(field) else message
                yield Fit(name, None, None, reason, ENGINES.get(name.removeprefix("gguf-"), ""))
            else:
                files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
                nbytes = sum(each.stat().st_size for each in files)
                reason = "" if proof is None or proof.exact else f"rounds {proof.rounded}"
                yield Fit(name, nbytes, proof, reason, engine_of(config, name))
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            if progress is not None:
                progress(number, len(TARGETS))


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
        (path.exists() and not overwrite, f"{shown} is there already; overwrite=True replaces it"),
        (path.exists() and not suffix, f"{target.name} is a folder, and {shown} is a file"),
    )
    for is_wrong, message in problems:
        if is_wrong:
            raise ConfigError(message, mentions=["overwrite=True"])
