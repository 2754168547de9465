"""The conversion: write under a temporary name, prove, rename."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from ...errors import ConfigError, FormatError
from ...system.atomic import atomic_folder, atomic_path
from ..checkpoint import Progress, ReadOptions
from ..open import find_model, open_checkpoint
from .proof import Proof, prove
from .targets import TARGETS, Target

Phase = Callable[[str], Progress]  # "writing", "comparing", "computing" -> that phase's progress


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    to: str,
    *,
    options: ReadOptions | None = None,
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
    overwrite: replace an existing file. A folder is never replaced.

    Raises ConfigError (an unknown target, a model the target cannot hold), FormatError.
    """
    if to not in TARGETS:
        raise ConfigError(f"no format is called {to!r}; there are: {', '.join(TARGETS)}")
    target, path = TARGETS[to], Path(destination)
    written_options = ReadOptions(tl_tiles=None if tl_tiles is None else Path(tl_tiles))
    _check_destination(target, path, overwrite)
    proof = None
    with ExitStack() as stack:
        checkpoint = stack.enter_context(open_checkpoint(find_model(source), options))
        temporary = stack.enter_context(atomic_folder(path) if target.suffix is None else atomic_path(path))
        target.write(checkpoint, temporary, written_options, phase("writing") if phase else None)
        if verify:
            with open_checkpoint(temporary, written_options) as written:
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
