"""Adds models to the store: `pull` from the Hugging Face hub (the extra `hub`), `add` from local files.

The hub lists the files of a revision, and `choose_files` selects those of a model. They are fetched at the listed
commit, compared with the hub's sizes and hashes, and opened before they enter the store.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...errors import FormatError, HubError, RegistryError
from ...system.atomic import DISK_FULL, check_space
from ...system.json_file import open_regular, stays_inside
from ..hf.folder import SINGLE_FILE
from ..native.model import NativeCheckpoint
from ..open import open_checkpoint
from .describe import summarize
from .store import Entry, Notice, Reference, Store, choose_files, parse_reference

_COMMIT = re.compile(r"[0-9a-f]{40}")
_BLOCK = 1 << 20
# OSErrors of the disk, not of the network
_OF_THE_DISK = (
    *DISK_FULL,
    *(errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.ENOENT, errno.ENOTDIR, errno.EINTR),
)
INSTALL = "pip install 'bitnet-ref[hub]'"
Files = dict[str, dict[str, Any]]  # name -> {"size": bytes, "sha256": hexadecimal}
Version = tuple[str | None, str | None]  # (revision as requested, its commit); None for a local model
Progress = Callable[[str, int, int], None]  # (file, its number from 1, number of files)


def pull(
    reference: str,
    *,
    name: str | None = None,
    files: Sequence[str] = (),
    store: Store | None = None,
    progress: Progress | None = None,
    notice: Notice | None = None,
) -> Entry:
    """Fetch "org/repo", or "org/repo@revision" (a branch, a tag or a commit), and store it.

    name: its name in the store, instead of "org/repo".   files: which of several .gguf or native files to take.
    An interrupted pull leaves the store unchanged; repeated within a day, it continues where it stopped.
    Raises HubError if the hub cannot be reached, RegistryError if it has no such model, FormatError if the files are no
    model.
    """
    wanted, store = parse_reference(reference), store or Store()
    local = Reference(wanted.name) if name is None else parse_reference(name)
    if local.revision is not None:
        raise RegistryError(f"a --name has no @revision, got {name!r}")
    if "/" not in wanted.name:
        raise RegistryError(f"expected ORG/REPO as the hub has it, got {wanted.name!r}")
    hub = _huggingface_hub()
    with _explain_errors(hub, wanted):
        api = hub.HfApi()
        info = api.model_info(wanted.name, revision=wanted.revision, files_metadata=True)
    commit = str(info.sha)
    if not _COMMIT.fullmatch(commit):
        raise HubError(f"the hub gave {commit[:80]!r} as the commit of {wanted}; expected 40 hexadecimal digits")
    listed = {file.rfilename: file for file in info.siblings or ()}
    names, main = choose_files(listed, files)
    revision = wanted.revision or "main"
    key = hashlib.sha256("\n".join([wanted.name, commit, *names]).encode()).hexdigest()[:16]
    with store.staging(f"pull-{key}", notice) as staged:
        for old in reversed(store.entries()):  # the same files may be there under another name or revision
            if (old.origin, old.commit, sorted(old.files)) == (wanted.name, commit, names) and store.path(old).exists():
                return store.commit(staged, replace(old, name=local.name, revision=revision, time=now()))
        check_space(staged, sum(listed[each].size or 0 for each in names))
        for number, each in enumerate(names):
            if progress is not None:
                progress(each, number + 1, len(names))
            with _explain_errors(hub, wanted):
                api.hf_hub_download(wanted.name, each, revision=commit, local_dir=staged)
        for other in staged.iterdir():  # the client's own files about the download
            if other.name not in names:
                shutil.rmtree(other) if other.is_dir() and not other.is_symlink() else other.unlink()
        received = file_facts(staged, names)
        try:
            _compare(staged, received, listed, reference)
            entry = new_entry(staged, received, main, local.name, "hub", wanted.name, (revision, commit))
        except Exception:
            shutil.rmtree(staged)  # so that it is not continued
            raise
        return store.commit(staged, entry)


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
        check_space(staged, sum((folder / each).stat().st_size for each in names))
        for each in names:
            shutil.copyfile(folder / each, staged / each)
        entry = new_entry(staged, file_facts(staged, names), main, reference.name, "local", str(source.resolve()))
        return store.commit(staged, entry)


def new_entry(
    folder: Path, files: Files, main: str | None, name: str, source: str, origin: str, version: Version = (None, None)
) -> Entry:
    """The entry of the model in `folder`, which its reader opens here, so a broken header or config raises."""
    text = json.dumps(files, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    with open_checkpoint(folder if main is None else folder / main) as checkpoint:
        if isinstance(checkpoint, NativeCheckpoint):
            checkpoint.verify()
        summary = summarize(checkpoint.config)
        kind = checkpoint.kind
    return Entry(name, digest, source, origin, *version, now(), files, main, kind, summary)


def file_facts(folder: Path, names: Sequence[str]) -> Files:
    """Size and SHA-256 of each file. FormatError for anything but a regular file: links lead out of the store."""
    facts = {}
    for name in sorted(names):
        path = folder / name
        if path.is_symlink():
            raise FormatError("is not a regular file", path=path)
        digest, size = hashlib.sha256(), 0
        with open_regular(path, FormatError) as file:
            while block := file.read(_BLOCK):
                digest.update(block)
                size += len(block)
        facts[name] = {"size": size, "sha256": digest.hexdigest()}
    return facts


def now() -> str:
    """The time, ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _huggingface_hub() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError as problem:
        raise HubError(f"huggingface_hub is not installed: {INSTALL}") from problem
    return huggingface_hub


@contextmanager
def _explain_errors(hub: Any, wanted: Reference) -> Iterator[None]:
    """Turn the client's exceptions into one line that says what to do."""
    errors = hub.errors
    try:
        yield
    except errors.OfflineModeIsEnabled as problem:
        raise HubError("HF_HUB_OFFLINE is set: nothing can be fetched; bitnet-ref list shows what is here") from problem
    except errors.GatedRepoError as problem:
        raise RegistryError(f"{wanted.name} is gated: accept its terms on the hub, then: hf auth login") from problem
    except errors.RepositoryNotFoundError as problem:
        raise RegistryError(f"the hub has no {wanted.name!r}; if it is private: hf auth login") from problem
    except errors.RevisionNotFoundError as problem:
        raise RegistryError(f"{wanted.name} has no revision {wanted.revision!r}") from problem
    except (errors.EntryNotFoundError, errors.HfHubHTTPError, errors.FileMetadataError) as problem:
        raise HubError(f"the hub did not give {wanted}: {_first_line(problem)}") from problem
    except errors.HFValidationError as problem:
        raise RegistryError(f"{wanted} is no name on the hub: {_first_line(problem)}") from problem
    except Exception as problem:
        if isinstance(problem, OSError) and problem.errno in _OF_THE_DISK:
            raise
        # the client's HTTP library has changed its name, and its errors', more than once
        raise HubError(f"the hub cannot be reached: {_first_line(problem)}; what was pulled still loads") from problem


def _first_line(problem: BaseException) -> str:
    lines = str(problem).strip().splitlines()
    return lines[0][:300] if lines else type(problem).__name__


def _compare(folder: Path, received: Files, listed: dict[str, Any], reference: str) -> None:
    """FormatError if a file has another size or hash than the hub lists: SHA-256 for LFS files, else Git's."""
    for name, facts in received.items():
        expected = listed[name]
        lfs, blob_id = getattr(expected, "lfs", None), getattr(expected, "blob_id", None)
        if expected.size is not None and expected.size != facts["size"]:
            message = f"{name} of {reference} has {facts['size']} bytes, and the hub says {expected.size}"
            raise FormatError(message, field=name)
        if lfs is not None and lfs.sha256 != facts["sha256"]:
            message = f"{name} of {reference} is not what the hub says (SHA-256 differs); pull again"
            raise FormatError(message, field=name)
        if lfs is None and blob_id is not None and blob_id != git_blob_id(folder / name):
            message = f"{name} of {reference} is not what the hub says (its Git hash differs); pull again"
            raise FormatError(message, field=name)


def git_blob_id(path: Path) -> str:
    """The SHA-1 by which Git, and so the hub's listing, names the content of a file."""
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with open_regular(path, FormatError) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
