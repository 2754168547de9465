"""The store: versions of models as folders named by their content, and one index of names, replaced as a whole.

    index.json         what there is; read without a lock, since it is only ever renamed into place
    lock               held while the index changes
    models/<hash>/     the files of one version
    incoming/<key>/    what is being downloaded or copied, with <key>.lock held by the process that does

A crash at any moment leaves the index as it was or as it was to be. What it may leave besides, a folder that no name
stands for, is removed when the index changes next.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ...errors import FormatError, RegistryError
from ...system.atomic import atomic_path, sync
from ...system.file_lock import CAN_LOCK, lock_file
from ...system.json_file import read_json_object
from ..hf.folder import SINGLE_FILE, stays_inside
from ..native.model import NativeCheckpoint
from ..open import open_checkpoint
from .names import Reference, choose_files, is_reference, parse_reference

INDEX_VERSION = 1
MAX_INDEX_BYTES = 16 << 20
KEEP_DOWNLOADS_S = 24 * 3600.0  # an interrupted one can be taken up again for so long
_HASH = re.compile(r"[0-9a-f]{64}")
_BLOCK = 1 << 20
Notice = Callable[[str], None]  # a line about what takes time


@dataclass(frozen=True)
class Entry:
    """One version of a model in the store.   digest: over the names, sizes and SHA-256 of its files"""

    name: str
    digest: str
    source: str  # "hub", or "local"
    origin: str  # the repository, or the path it was copied from
    revision: str | None  # as it was asked for
    commit: str | None  # what that was on the hub
    time: str  # when it was stored, ISO 8601, UTC
    files: dict[str, dict[str, Any]]  # name -> {"size": bytes, "sha256": hexadecimal}
    main: str | None  # the file to open; None: the folder
    kind: str  # as `convert --to` calls it: "hf-packed", "gguf-i2_s", "native", ...
    summary: dict[str, Any]  # model_type, layers, hidden_size, vocab_size, context, ternary

    @property
    def nbytes(self) -> int:
        return sum(file["size"] for file in self.files.values())

    def matches(self, revision: str | None) -> bool:
        """Whether `@revision` names this version: as it was asked for, or the start of its commit or digest."""
        if revision is None or revision == self.revision:
            return True
        return len(revision) >= 7 and ((self.commit or "").startswith(revision) or self.digest.startswith(revision))


def home() -> Path:
    """BITNET_REF_HOME, or bitnet_ref in the platform's folder for caches."""
    if given := os.environ.get("BITNET_REF_HOME"):
        return Path(given).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "bitnet_ref"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bitnet_ref"


class Store:
    """A store in some folder, which need not exist yet."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = home() if root is None else root
        self.index_path = self.root / "index.json"
        self.models, self.incoming = self.root / "models", self.root / "incoming"

    # -- reading -------------------------------------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """All versions, the oldest first. FormatError when the index is damaged."""
        if not self.index_path.exists():
            return []
        raw = read_json_object(self.index_path, FormatError, MAX_INDEX_BYTES)
        if raw.get("version") != INDEX_VERSION or not isinstance(raw.get("entries"), list):
            message = f"expected version {INDEX_VERSION} and a list of entries; a newer bitnet_ref may have written it"
            raise FormatError(message, path=self.index_path, field="version")
        return [self._entry(value, f"entries[{n}]") for n, value in enumerate(raw["entries"])]

    def _entry(self, value: Any, where: str) -> Entry:
        names = {field.name for field in fields(Entry)}
        if not isinstance(value, dict) or set(value) != names:
            raise FormatError(f"expected an object of {', '.join(sorted(names))}", path=self.index_path, field=where)
        strings = all(isinstance(value[key], str) for key in ("name", "digest", "source", "origin", "time", "kind"))
        maybe = all(value[key] is None or isinstance(value[key], str) for key in ("revision", "commit", "main"))
        tables = isinstance(value["files"], dict) and isinstance(value["summary"], dict)
        if not (strings and maybe and tables and is_reference(value["name"]) and _HASH.fullmatch(value["digest"])):
            raise FormatError("is no entry of a store", path=self.index_path, field=where)
        sizes = [file.get("size") if isinstance(file, dict) else None for file in value["files"].values()]
        inside = all(name == Path(name).name and not name.startswith(".") for name in value["files"])
        if not inside or not all(isinstance(size, int) and size >= 0 for size in sizes):
            raise FormatError("expected plain names with sizes", path=self.index_path, field=f"{where}.files")
        if value["main"] is not None and value["main"] not in value["files"]:
            raise FormatError("expected one of the files", path=self.index_path, field=f"{where}.main")
        return Entry(**value)

    def path(self, entry: Entry) -> Path:
        """What `load` opens."""
        folder = self.models / entry.digest
        return folder if entry.main is None else folder / entry.main

    def find(self, reference: Reference) -> Entry | None:
        """The newest version that the reference names."""
        found = [e for e in self.entries() if e.name == reference.name and e.matches(reference.revision)]
        return found[-1] if found else None

    # -- changing ------------------------------------------------------------------------------------------------------

    def commit(self, folder: Path, entry: Entry) -> Entry:
        """Make a folder of files in `incoming` a version of the store."""
        for file in folder.iterdir():
            sync(file)
        sync(folder)
        with self._changing() as kept:
            target = self.models / entry.digest
            if target.exists():
                shutil.rmtree(folder)
            else:
                self.models.mkdir(exist_ok=True)
                os.rename(folder, target)
                sync(self.models)
            same = (entry.name, entry.digest, entry.revision)
            kept[:] = [e for e in kept if (e.name, e.digest, e.revision) != same] + [entry]
        return entry

    def remove(self, reference: Reference) -> list[Entry]:
        """Forget the versions that the reference names (without @revision: all), and delete what no name stands for."""
        with self._changing() as kept:
            gone = [e for e in kept if e.name == reference.name and e.matches(reference.revision)]
            if not gone:
                near = get_close_matches(reference.name, {e.name for e in kept}, 3)
                hint = f"; did you mean {' or '.join(near)}?" if near else "; bitnet-ref list shows what there is"
                raise RegistryError(f"the store has no {str(reference)!r}{hint}")
            kept[:] = [e for e in kept if e not in gone]
        return gone

    @contextmanager
    def _changing(self) -> Iterator[list[Entry]]:
        """The entries, to be changed in place under the lock; then written, and unnamed folders removed."""
        self._make()
        with locked(self.root / "lock"):
            kept = self.entries()
            yield kept
            with atomic_path(self.index_path) as temporary:
                value = {"version": INDEX_VERSION, "entries": [asdict(entry) for entry in kept]}
                temporary.write_text(json.dumps(value, indent=1), encoding="utf-8")
            named = {entry.digest for entry in kept}
            for folder in self.models.iterdir() if self.models.exists() else ():
                if folder.name not in named:
                    shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def staging(self, key: str, notice: Notice | None = None) -> Iterator[Path]:
        """A folder to be filled under a key, with it locked. Keys that begin with "pull-" survive an interrupt."""
        self._make()
        self.incoming.mkdir(exist_ok=True)
        self.sweep()
        with locked(self.incoming / f"{key}.lock", notice):
            folder = self.incoming / key
            folder.mkdir(exist_ok=True)
            try:
                yield folder
            except BaseException:
                if not key.startswith("pull-"):
                    shutil.rmtree(folder, ignore_errors=True)
                raise
            shutil.rmtree(folder, ignore_errors=True)
            (self.incoming / f"{key}.lock").unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove what interrupted processes left: copies at once, downloads after a day."""
        for lock in list(self.incoming.glob("*.lock")) if CAN_LOCK else ():
            with suppress(OSError), locked(lock, block=False):
                stale = time.time() - lock.stat().st_mtime > KEEP_DOWNLOADS_S
                if stale or not lock.name.startswith("pull-"):
                    shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
                    lock.unlink(missing_ok=True)

    def _make(self) -> None:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise RegistryError(
                f"the store {self.root} cannot be made ({problem.strerror}); BITNET_REF_HOME names another place"
            ) from problem


@contextmanager
def locked(path: Path, notice: Notice | None = None, *, block: bool = True) -> Iterator[None]:
    """Hold an exclusive lock on the file. Without `block`: BlockingIOError when another process has it."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                lock_file(file, block=False)
            except BlockingIOError:
                if not block:
                    raise
                if notice is not None:
                    notice("another process is fetching the same model; waiting for it")
                lock_file(file)
            if os.fstat(file).st_nlink == 0:
                continue  # its last holder removed it: lock the one that is there now
            yield
            return
        finally:
            os.close(file)


def describe(folder: Path, main: str | None) -> tuple[str, dict[str, Any]]:
    """(kind, summary) of the model in the folder, opened by its reader: a broken header or config is an error here."""
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
        return checkpoint.kind, summary


def file_facts(folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of each. FormatError for anything but a regular file: a link would lead out of the store."""
    out = {}
    for name in sorted(names):
        path = folder / name
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise FormatError("is not a regular file", path=path)
        digest, size = hashlib.sha256(), 0
        with open(path, "rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
                size += len(block)
        out[name] = {"size": size, "sha256": digest.hexdigest()}
    return out


def digest_of(files: dict[str, dict[str, Any]]) -> str:
    """The content hash of a version."""
    return hashlib.sha256(json.dumps(files, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def add(path: str | os.PathLike[str], name: str, *, file: str | None = None, store: Store | None = None) -> Entry:
    """Copy a local model (a Hugging Face folder, or a .gguf or native file) into the store under `name`.

    file: which of several model files in the folder. Raises RegistryError, or FormatError when it is no model.
    """
    reference, source, store = parse_reference(name), Path(path), store or Store()
    if reference.revision is not None:
        raise RegistryError(
            f"the name of a local model has no @revision, got {name!r}: its digest tells versions apart"
        )
    if not source.exists():
        raise RegistryError(f"there is no file or folder {str(source)!r}")
    folder = source if source.is_dir() else source.parent
    wanted = [] if file is None else [file]
    if source.is_file() and source.name != SINGLE_FILE:  # that one is a folder's
        wanted = [source.name]
    names, main = choose_files((p.name for p in folder.iterdir() if p.is_file()), wanted)
    for each in names:
        if not stays_inside(folder, folder / each):
            raise RegistryError(f"{str(folder / each)!r} is a link out of the folder")
    with store.staging(f"add-{os.urandom(8).hex()}") as staged:
        for each in names:
            shutil.copyfile(folder / each, staged / each)
        kind, summary = describe(staged, main)
        files = file_facts(staged, names)
        entry = Entry(
            name=reference.name, digest=digest_of(files), source="local", origin=str(source.resolve()), revision=None,
            commit=None, time=now(), files=files, main=main, kind=kind, summary=summary,
        )  # fmt: skip
        return store.commit(staged, entry)


def entries() -> list[Entry]:
    """Every version in the store, the oldest first."""
    return Store().entries()


def find(name: str) -> Path | None:
    """What "name" or "name@revision" stands for in the store, as a path to load; None: nothing. Never the network."""
    if not is_reference(name):
        return None
    store = Store()
    entry = store.find(parse_reference(name))
    if entry is None:
        return None
    path = store.path(entry)
    if not path.exists():
        raise FormatError(f"the store's index has {name}, and its files are gone; fetch it again", path=path)
    return path


def remove(name: str) -> list[Entry]:
    """Forget a name, or one version of it ("name@revision"), and delete the files that nothing else names."""
    return Store().remove(parse_reference(name))
