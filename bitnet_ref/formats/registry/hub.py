"""`pull`: a repository of the Hugging Face hub into the store, through huggingface_hub (the extra `hub`).

The hub is asked what a revision holds; `choose_files` decides which of it a model needs; each of those is fetched at
the very commit that was answered, compared with the size and hash the hub gave, and opened before it counts.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from typing import Any

from ...errors import FormatError, HubError, RegistryError
from .names import Reference, choose_files, parse_reference
from .store import Entry, Notice, Store, describe, digest_of, file_facts, now

_COMMIT = re.compile(r"[0-9a-f]{40}")
INSTALL = "pip install 'bitnet-ref[hub]'"
Progress = Callable[[str, int, int], None]  # (file, its number from 1, how many)


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

    name: what to call it here, instead of "org/repo".   files: which of several .gguf or native files to take.
    An interrupted pull leaves the store as it was, and is taken up where it stopped when it is repeated within a day.
    Raises HubError when the hub cannot be reached, RegistryError when it has no such model, FormatError when what it
    has is none.
    """
    wanted, store = parse_reference(reference), store or Store()
    local = Reference(wanted.name) if name is None else parse_reference(name)
    if local.revision is not None:
        raise RegistryError(f"a --name has no @revision, got {name!r}")
    if "/" not in wanted.name:
        raise RegistryError(f"expected ORG/REPO as the hub has it, got {wanted.name!r}")
    hub = _huggingface_hub()
    with _explained(hub, wanted):
        api = hub.HfApi()
        info = api.model_info(wanted.name, revision=wanted.revision, files_metadata=True)
    commit = str(info.sha)
    if not _COMMIT.fullmatch(commit):
        raise HubError(f"the hub gave {commit[:80]!r} as the commit of {wanted}; expected 40 hexadecimal digits")
    listed = {file.rfilename: file for file in info.siblings or ()}
    names, main = choose_files(listed, files)
    revision = wanted.revision or "main"
    key = sha256("\n".join([wanted.name, commit, *names]).encode()).hexdigest()[:16]
    with store.staging(f"pull-{key}", notice) as staged:
        for old in reversed(store.entries()):  # the same files under another name or revision, or just pulled
            if (old.origin, old.commit, sorted(old.files)) == (wanted.name, commit, names) and store.path(old).exists():
                return store.commit(staged, replace(old, name=local.name, revision=revision, time=now()))
        _check_space(staged, sum(listed[each].size or 0 for each in names))
        for number, each in enumerate(names):
            if progress is not None:
                progress(each, number + 1, len(names))
            with _explained(hub, wanted):
                api.hf_hub_download(wanted.name, each, revision=commit, local_dir=staged)
        for other in staged.iterdir():  # the client's notes on the download
            if other.name not in names:
                shutil.rmtree(other) if other.is_dir() and not other.is_symlink() else other.unlink()
        found = file_facts(staged, names)
        try:
            _compare(found, listed, reference)
            kind, summary = describe(staged, main)
        except Exception:
            shutil.rmtree(staged)  # not to be taken up again
            raise
        entry = Entry(
            name=local.name, digest=digest_of(found), source="hub", origin=wanted.name, revision=revision,
            commit=commit, time=now(), files=found, main=main, kind=kind, summary=summary,
        )  # fmt: skip
        return store.commit(staged, entry)


def _huggingface_hub() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError as problem:
        raise HubError(f"huggingface_hub is not installed: {INSTALL}") from problem
    return huggingface_hub


@contextmanager
def _explained(hub: Any, wanted: Reference) -> Iterator[None]:
    """What the client raises, as one line that says what to do."""
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
    except Exception as problem:  # the client's HTTP library has changed its name, and its errors', more than once
        raise HubError(f"the hub cannot be reached: {_first_line(problem)}; what was pulled still loads") from problem


def _first_line(problem: BaseException) -> str:
    lines = str(problem).strip().splitlines()
    return lines[0][:300] if lines else type(problem).__name__


def _check_space(folder: Any, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise RegistryError(
            f"{needed} bytes are to be fetched, and {free} are free in {folder}; BITNET_REF_HOME moves it"
        )


def _compare(found: dict[str, dict[str, Any]], listed: dict[str, Any], reference: str) -> None:
    """What came against what the hub said of it."""
    for name, facts in found.items():
        said = listed[name]
        lfs = getattr(said, "lfs", None)
        if said.size is not None and said.size != facts["size"]:
            raise FormatError(
                f"{name} of {reference} has {facts['size']} bytes, and the hub says {said.size}", field=name
            )
        if lfs is not None and lfs.sha256 != facts["sha256"]:
            raise FormatError(
                f"{name} of {reference} is not what the hub says (SHA-256 differs); pull again", field=name
            )
