"""What `pull` and `rm` do: models come from the Hugging Face hub into its cache, or get a name where they are.

huggingface_hub (the extra `hub`) fetches and deletes. A revision's name (refs/main) is written last, when the files are
whole, equal what the hub lists, and can be opened: an interrupted pull leaves the old version under the name. Weights
come after the other files: a snapshot without a name that has its weights has everything.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import FormatError, HubError, RegistryError, StorageError, describe
from ...system.atomic import DISK_FULL, check_space, explain_os_errors, write_file
from ...system.json_file import read_bounded, stays_inside
from ..hashes import file_hash
from ..hf.folder import SINGLE_FILE
from ..open import open_checkpoint
from .hub_cache import WEIGHTS, CachedModel, hub_cache, repository_folder
from .links import links, remove_link, set_link
from .names import check_name, choose_files, model_in, parse_reference, split_choice

INSTALL = "pip install 'bitnet-ref[hub]'"
MAX_GIT_BYTES = 64 << 20  # of a file that is not in LFS
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ETAG = re.compile(r'(?:W/)?"?[A-Za-z0-9_=+-]{1,128}"?')
# OSErrors of the disk, not of the network
_OF_THE_DISK = (
    *DISK_FULL,
    *(errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.EINTR),
    *(errno.ENOENT, errno.ENOTDIR, errno.EEXIST),
)


def pull(reference: str, *, name: str | None = None, file: str | None = None) -> tuple[CachedModel, Path]:
    """Fetch "org/repo", or "org/repo@revision" (a branch, a tag or a commit), into the Hugging Face cache.

    -> the snapshot, and the path to load: its folder, or the one file
    name: one more name for it here.   file: which of several .gguf or native files to take, by its name or the type in
    it, as may follow the reference ("org/repo:Q2_0"); the name then means it.
    Raises HubError if the hub cannot be reached, RegistryError if it has no such model, FormatError if the files are no
    model, StorageError if they cannot be written.
    """
    reference, which = split_choice(reference)
    file = file or which
    repository, revision = parse_reference(reference)
    if "/" not in repository:
        raise RegistryError(f"expected ORG/REPO as the hub has it, got {repository!r}")
    if name is not None:
        check_name(name)
    hub = _huggingface_hub()
    with _explain_errors(hub, reference):
        info = hub.HfApi().model_info(repository, revision=revision, files_metadata=True)
    commit = str(info.sha)
    if not _COMMIT.fullmatch(commit):
        raise HubError(f"the hub gave {commit[:80]!r} as the commit of {reference}; expected 40 hexadecimal digits")
    listed = _read_listing(info.siblings, reference)
    names, main = choose_files(listed, file)
    cache, home = hub_cache(), repository_folder(repository)
    folder = home / "snapshots" / commit
    path = folder if main is None else folder / main
    with explain_os_errors(cache):
        cache.mkdir(parents=True, exist_ok=True)
        check_space(home, sum(listed[each].size for each in names if not (folder / each).exists()))
        for are_weights in (False, True):
            patterns = [each for each in names if each.endswith(WEIGHTS) == are_weights]
            if not patterns:  # a file alone: the client would warn that nothing matches
                continue
            with _explain_errors(hub, reference), _plain_etags(hub):
                hub.snapshot_download(repository, revision=commit, cache_dir=cache, allow_patterns=patterns)
        for each in names:
            _check_place(folder, each, reference)
            _compare(folder / each, listed[each], reference)
        open_checkpoint(path).close()  # raises if it is no model
        if revision != commit:
            write_file(home / "refs" / (revision or "main"), commit.encode())
        if name is not None or file is not None:
            set_link(name or repository, path)
        elif revision is None:
            remove_link(repository)
    return CachedModel(repository, commit, (revision or "main",), folder), path


def link_model(path: str | os.PathLike[str], name: str, *, file: str | None = None) -> Path:
    """Give a local model a name; it is not copied.   -> the path to load

    path: a Hugging Face folder, a folder with a .gguf or native file, or a file that `load` takes.
    file: which of several model files in the folder. Raises RegistryError, or FormatError if it is no model.
    """
    source = Path(os.path.abspath(path))
    if not source.exists():
        raise RegistryError(f"there is no file or folder {str(source)!r}")
    if source.name == SINGLE_FILE:
        source = source.parent
    target = model_in(source, file) if source.is_dir() else source
    open_checkpoint(target).close()  # raises if it is none
    set_link(name, target)
    return target


def plan_deletion(models: Sequence[CachedModel]) -> Any:
    """huggingface_hub's plan to delete snapshots of one repository, and the files that only they use.

    Its `expected_freed_size` is in bytes, its `execute()` deletes. Raises RegistryError if the cache is damaged there.
    """
    cache, folder = _huggingface_hub().scan_cache_dir(hub_cache()), repository_folder(models[0].name)
    # Not among all repositories: copies of a repository have the same commits
    own = frozenset(each for each in cache.repos if each.repo_path.name == folder.name)
    if not own:
        reason = next((f": {each}" for each in cache.warnings if folder.name in str(each)), "")
        raise RegistryError(f"huggingface_hub cannot read {folder}, which you may delete yourself{reason}")
    return replace(cache, repos=own).delete_revisions(*(each.commit for each in models))


def delete_models(models: Sequence[CachedModel], plan: Any) -> None:
    """Carry out `plan_deletion`'s plan, and take back the names that were given to what it deletes.

    Raises StorageError if something could not be deleted.
    """
    with explain_os_errors(hub_cache()):
        plan.execute()
    for model in models:
        if model.folder.exists():  # the client has only logged it
            raise StorageError("could not be deleted", path=model.folder)
        for name, path in links().items():
            if path.is_relative_to(model.folder):
                remove_link(name)


class Listed(NamedTuple):
    """What the hub says of a file. sha256: of an LFS file; blob_id: Git's SHA-1 of another."""

    size: int
    sha256: str | None
    blob_id: str | None


def _read_listing(siblings: Any, reference: str) -> dict[str, Listed]:
    """File name -> what the hub says of it. Raises HubError for a listing that is none."""
    out: dict[str, Listed] = {}
    try:
        for each in siblings or ():
            lfs = getattr(each, "lfs", None)
            out[each.rfilename] = Listed(each.size or 0, lfs and lfs.sha256, getattr(each, "blob_id", None))
    except (AttributeError, TypeError) as problem:
        raise HubError(f"the hub's list of the files of {reference} is none: {problem}") from problem
    for name, (size, *hashes) in out.items():
        if not isinstance(name, str) or not isinstance(size, int) or size < 0:
            raise HubError(f"the hub lists {describe(name)} of {reference} with a size of {describe(size)}")
        if not all(each is None or isinstance(each, str) for each in hashes):
            raise HubError(f"the hub lists {describe(name)} of {reference} with the hashes {describe(hashes)}")
    return out


@contextmanager
def _plain_etags(hub: Any) -> Iterator[None]:
    """Raise HubError for an answer whose ETag is no plain name: huggingface_hub calls a file of the cache by it, and
    "../../x" is a file elsewhere. Before version 1 it has no such hook, and `_check_place` finds what has come."""
    session = hub.get_session()
    before = getattr(session, "event_hooks", None)
    if before is None:
        yield
        return

    def check(response: Any) -> None:
        given = response.headers.get("X-Linked-Etag", response.headers.get("ETag"))
        if response.request.method == "HEAD" and given is not None and not _ETAG.fullmatch(given):
            raise HubError(f"the hub gave {given[:80]!r} as an ETag, which is no plain name: do not use this hub")

    session.event_hooks = {**before, "response": [*before.get("response", ()), check]}
    try:
        yield
    finally:
        session.event_hooks = before


def _check_place(folder: Path, name: str, reference: str) -> None:
    """Raise HubError for a link out of the repository's folder, to what may be a file of the user's own."""
    file = folder / name
    if file.is_symlink() and not stays_inside(folder, file):
        target = file.resolve()
        file.unlink()
        message = f"the hub has placed {file.name} of {reference} outside of the cache, at {target}"
        raise HubError(f"{message}: do not use this hub, and delete that file unless it is your own")


def _compare(file: Path, listed: Listed, reference: str) -> None:
    """Raise if the file has another size or hash than the hub lists: SHA-256 for LFS files, else Git's SHA-1."""
    if not file.exists():
        raise HubError(f"{file.name} of {reference} did not come; pull again")
    if listed.sha256 is not None:
        is_equal = file_hash(file) == listed.sha256
    else:
        data = read_bounded(file, FormatError, MAX_GIT_BYTES)
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False)
        is_equal = listed.blob_id in (None, blob.hexdigest())
    if not is_equal:
        file.resolve().unlink()
        file.unlink(missing_ok=True)
        raise FormatError(
            f"{file.name} of {reference} is not what the hub lists (its hash differs); pull again", path=file
        )


def _huggingface_hub() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError as problem:
        raise HubError(f"huggingface_hub is not installed: {INSTALL}") from problem
    return huggingface_hub


@contextmanager
def _explain_errors(hub: Any, reference: str) -> Iterator[None]:
    """Turn the client's exceptions into one line that says what to do."""
    errors = hub.errors
    name, revision = parse_reference(reference)
    try:
        yield
    except errors.OfflineModeIsEnabled as problem:
        raise HubError("HF_HUB_OFFLINE is set: nothing can be fetched; bitnet-ref list shows what is here") from problem
    except errors.GatedRepoError as problem:
        raise RegistryError(f"{name} is gated: accept its terms on the hub, then: hf auth login") from problem
    except errors.RepositoryNotFoundError as problem:
        raise RegistryError(f"the hub has no {name!r}; if it is private: hf auth login") from problem
    except errors.RevisionNotFoundError as problem:
        raise RegistryError(f"{name} has no revision {revision!r}") from problem
    except (errors.EntryNotFoundError, errors.HfHubHTTPError, errors.FileMetadataError) as problem:
        raise HubError(f"the hub did not give {reference}: {_first_line(problem)}") from problem
    except errors.HFValidationError as problem:
        raise RegistryError(f"{reference} is no name on the hub: {_first_line(problem)}") from problem
    except HubError:
        raise
    except Exception as problem:
        if isinstance(problem, OSError) and problem.errno in _OF_THE_DISK:
            raise
        # the client's HTTP library has changed its name, and its errors', more than once
        raise HubError(f"the hub cannot be reached: {_first_line(problem)}; what was pulled still loads") from problem


def _first_line(problem: BaseException) -> str:
    lines = str(problem).strip().splitlines()
    return lines[0][:300] if lines else type(problem).__name__
