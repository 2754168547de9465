"""The targets of a conversion, and the conversion: write under a temporary name, prove, rename."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ..api import find_model
from ..errors import ConfigError, FormatError
from ..formats.atomic import atomic_folder, atomic_path
from ..formats.checkpoint import Checkpoint, Progress, ReadOptions
from ..formats.open import open_checkpoint
from .proof import Proof, prove

Phase = Callable[[str], Progress]  # "writing", "comparing", "computing" -> that phase's progress


@dataclass(frozen=True)
class Target:
    """One of the formats that can be written.   suffix: of the file; None: it is a folder"""

    name: str
    suffix: str | None
    says: str
    write: Callable[[Checkpoint, Path, Progress | None], None]


def _hf(kind: str) -> Callable[[Checkpoint, Path, Progress | None], None]:
    def write(checkpoint: Checkpoint, path: Path, progress: Progress | None) -> None:
        from ..formats.hf_writer import write_hf

        write_hf(checkpoint, path, kind, progress)

    return write


def _onnx(checkpoint: Checkpoint, path: Path, progress: Progress | None) -> None:
    from ..formats.onnx_export import write_onnx_folder

    write_onnx_folder(checkpoint, path, progress)


_TARGETS = (
    Target("hf-packed", None, "a Hugging Face folder, ternary planes of 2 bits", _hf("hf-packed")),
    Target("hf-bf16", None, "a Hugging Face folder in bfloat16: the masters, or -1, 0, +1", _hf("hf-bf16")),
    Target("onnx", None, "a folder: model.onnx for onnxruntime, its data, the tokenizer", _onnx),
)
TARGETS = {target.name: target for target in _TARGETS}


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    to: str,
    *,
    options: ReadOptions | None = None,
    verify: bool = True,
    overwrite: bool = False,
    phase: Phase | None = None,
) -> Proof | None:
    """Write the model `source` (a path, or a shipped model's name) to `destination` in the format `to`.

    One tensor is in memory at a time. Nothing is at `destination` until the whole of it is, proven: an interrupt, an
    error or a failed proof leaves what was there. The bytes depend on the model alone.
    verify: prove it; the Proof is returned, and if it says that the two differ, FormatError is raised.
    overwrite: replace a file that is there. A folder is never replaced.

    Raises ConfigError (an unknown target, a model the target cannot hold), FormatError.
    """
    if to not in TARGETS:
        raise ConfigError(f"no format is called {to!r}; there are: {', '.join(TARGETS)}")
    target, path = TARGETS[to], Path(destination)
    _check_destination(target, path, overwrite)
    proof = None
    with ExitStack() as stack:
        checkpoint = stack.enter_context(open_checkpoint(find_model(source), options))
        temporary = stack.enter_context(atomic_folder(path) if target.suffix is None else atomic_path(path))
        target.write(checkpoint, temporary, phase("writing") if phase else None)
        if verify:
            with open_checkpoint(temporary) as written:
                proof = prove(checkpoint, written, phase)
            if not proof.holds:
                raise FormatError(f"what was written is not the model that was read: {proof.verdict}", path=path)
    return proof


def _check_destination(target: Target, path: Path, overwrite: bool) -> None:
    if target.suffix is not None and not path.name.endswith(target.suffix):
        raise ConfigError(f"{target.name} is a file whose name ends in {target.suffix}, got {str(path)!r}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"there is no folder {str(path.absolute().parent)!r} to write into")
    if path.is_dir():
        raise ConfigError(f"{str(path)!r} is a folder that is there already; remove it, or give another name")
    if path.exists() and not overwrite:
        raise ConfigError(f"{str(path)!r} is there already; --force (overwrite=True) replaces it")
    if path.exists() and target.suffix is None:
        raise ConfigError(f"{target.name} is a folder, and {str(path)!r} is a file")
