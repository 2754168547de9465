"""`add`: copies a local model into the store."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...errors import FormatError, RegistryError
from ..hf.folder import SINGLE_FILE, stays_inside
from ..native.model import NativeCheckpoint
from ..open import open_checkpoint
from .names import choose_files, parse_reference
from .store import Entry, Store

_BLOCK = 1 << 20
Files = dict[str, dict[str, Any]]  # name -> {"size": bytes, "sha256": hexadecimal}


def add(path: str | os.PathLike[str], name: str, *, file: str | None = None, store: Store | None = None) -> Entry:
    """Copy a local model (a Hugging Face folder, or a .gguf or native file) into the store under `name`.

    file: which of several model files in the folder. Raises RegistryError, or FormatError if it is no model.
    """
    reference, source, store = parse_reference(name), Path(path), store or Store()
    if reference.revision is not None:
        message = f"the name of a local model has no @revision, got {name!r}: its digest tells versions apart"
        raise RegistryError(message)
    if not source.exists():
        raise RegistryError(f"there is no file or folder {str(source)!r}")
    folder = source if source.is_dir() else source.parent
    wanted = [] if file is None else [file]
    if source.is_file() and source.name != SINGLE_FILE:  # model.safetensors means its folder
        wanted = [source.name]
    names, main = choose_files((p.name for p in folder.iterdir() if p.is_file()), wanted)
    for each in names:
        if not stays_inside(folder, folder / each):
            raise RegistryError(f"{str(folder / each)!r} is a link out of the folder")
    with store.staging(f"add-{os.urandom(8).hex()}") as staged:
        for each in names:
            shutil.copyfile(folder / each, staged / each)
        origin = str(source.resolve())
        entry = new_entry(staged, file_facts(staged, names), main, reference.name, source="local", origin=origin)
        return store.commit(staged, entry)


def new_entry(
    folder: Path,
    files: Files,
    main: str | None,
    name: str,
    *,
    source: str,
    origin: str,
    revision: str | None = None,
    commit: str | None = None,
) -> Entry:
    """The entry of the model in `folder`, which its reader opens here, so a broken header or config raises."""
    text = json.dumps(files, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    with open_checkpoint(folder if main is None else folder / main) as checkpoint:
        if isinstance(checkpoint, NativeCheckpoint):
            checkpoint.verify()
        cfg = checkpoint.config
        summary = {
            "model_type": cfg.model_type,
            "layers": cfg.num_hidden_layers,
            "hidden_size": cfg.hidden_size,
            "vocab_size": cfg.vocab_size,
            "context": cfg.context_length,
            "ternary": cfg.quantization is not None,
        }
        kind = checkpoint.kind
    return Entry(name, digest, source, origin, revision, commit, now(), files, main, kind, summary)


def file_facts(folder: Path, names: Sequence[str]) -> Files:
    """Size and SHA-256 of each file. FormatError for anything but a regular file: links lead out of the store."""
    facts = {}
    for name in sorted(names):
        path = folder / name
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise FormatError("is not a regular file", path=path)
        digest, size = hashlib.sha256(), 0
        with open(path, "rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
                size += len(block)
        facts[name] = {"size": size, "sha256": digest.hexdigest()}
    return facts


def now() -> str:
    """The time, ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")
