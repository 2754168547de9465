"""The store: versions of models as folders named by their content, and one index of names, replaced as a whole.

    index.json         all entries; read without a lock, because it is only ever replaced by a rename
    lock               held while the index changes
    models/<hash>/     the files of one version
    incoming/<key>/    a download or copy in progress, with <key>.lock held by its process

A crash leaves the old index or the new one. Folders that no entry names are removed when the index next changes.
On a full disk they are removed before: `rm` needs no space. Raises StorageError for what the system refuses.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ...errors import FormatError, RegistryError, StorageError
from ...system.atomic import CAN_LOCK, DISK_FULL, explain_os_errors, lock_file, sync
from ...system.json_file import read_json_object, write_json
from ..checkpoint import TOKENIZER_FILES
from ..hf.folder import INDEX_FILE, SINGLE_FILE
from ..native.model import SUFFIX as NATIVE_SUFFIX

INDEX_VERSION = 1
MAX_INDEX_BYTES = 16 << 20
MODEL_CARD = "README.md"  # names the licence
KEEP_DOWNLOADS_S = 24 * 3600.0  # how long an interrupted download can be continued
_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9_-]|\.(?!\.)){0,95}(?<!\.)"  # no "..", no dot at either end
_NAME = re.compile(rf"{_WORD}(?:/{_WORD})?")
_REVISION = re.compile(rf"{_WORD}(?:/{_WORD}){{0,7}}")
_FILE = re.compile(_WORD)
_SHARD = re.compile(r"model-[0-9]{5}-of-[0-9]{5}\.safetensors")
_HASH = re.compile(r"[0-9a-f]{64}")
Notice = Callable[[str], None]  # gets a line about what takes time


@dataclass(frozen=True)
class Reference:
    """ "org/repo@revision": a model's name and version; a revision of None means the newest."""

    name: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"


def is_reference(text: str) -> bool:
    name, at, revision = text.partition("@")
    return bool(_NAME.fullmatch(name)) and (not at or bool(_REVISION.fullmatch(revision)))


def parse_reference(text: str) -> Reference:
    """ "name", "org/repo" or either with "@revision" -> Reference. RegistryError for anything else, including "..".

    >>> parse_reference("org/repo@v1.0")
    Reference(name='org/repo', revision='v1.0')
    """
    if not is_reference(text):
        expected = "expected NAME or ORG/NAME, perhaps with @REVISION (letters, digits, '.', '_', '-')"
        raise RegistryError(f"{expected}, got {text[:120]!r}")
    name, _, revision = text.partition("@")
    return Reference(name, revision or None)


def choose_files(names: Iterable[str], wanted: Sequence[str] = ()) -> tuple[list[str], str | None]:
    """(the files of one model among a folder's file names, the file to open or None for the folder).

    wanted: the weights file to take if there are several. Only files with known names and suffixes in the folder itself
    are taken: no code, no pickles, no subfolders.
    """
    plain = {name for name in names if _FILE.fullmatch(name)}
    single = sorted(name for name in plain if name.endswith((NATIVE_SUFFIX, ".gguf")))
    for name in wanted:
        if name not in single:
            listed = ", ".join(single[:20]) or "none"
            raise RegistryError(f"there is no model file {name[:120]!r}; there are: {listed}")
    if len(wanted) > 1:
        raise RegistryError(f"one file is one model; asked for {len(wanted)}: give each a --name of its own")
    if wanted:
        return [wanted[0]], wanted[0]
    hf = {SINGLE_FILE} & plain or {name for name in plain if _SHARD.fullmatch(name) or name == INDEX_FILE}
    if "config.json" in plain and hf & {SINGLE_FILE, INDEX_FILE}:
        return sorted(hf | {"config.json"} | plain & {*TOKENIZER_FILES, MODEL_CARD}), None
    if len(single) == 1:
        return single, single[0]
    if single:
        raise RegistryError(f"it holds several models; choose one with --file: {', '.join(single[:20])}")
    raise RegistryError(
        f"it holds no model that bitnet_ref reads: neither config.json with {SINGLE_FILE} or {INDEX_FILE}, "
        f"nor a {NATIVE_SUFFIX} or .gguf file"
    )


@dataclass(frozen=True)
class Entry:
    """One version of a model in the store.   digest: a hash of the names, sizes and SHA-256 of its files"""

    name: str
    digest: str
    source: str  # "hub", or "local"
    origin: str  # the repository, or the path it was copied from
    revision: str | None  # as requested
    commit: str | None  # the hub's commit of that revision
    time: str  # when it was stored, ISO 8601, UTC
    files: dict[str, dict[str, Any]]  # name -> {"size": bytes, "sha256": hexadecimal}
    main: str | None  # the file to open; None for the folder
    kind: str  # as `convert --to` calls it: "hf-packed", "gguf-i2_s", "native", ...
    summary: dict[str, Any]  # model_type, layers, hidden_size, vocab_size, context, ternary

    @property
    def nbytes(self) -> int:
        return sum(file["size"] for file in self.files.values())

    def matches(self, revision: str | None) -> bool:
        """Whether `@revision` means this version: its revision as requested, or the start of its commit or digest."""
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
    """A store in a folder, which need not exist yet."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = home() if root is None else root
        self.index_path = self.root / "index.json"
        self.models, self.incoming = self.root / "models", self.root / "incoming"

    def entries(self) -> list[Entry]:
        """All versions, the oldest first. FormatError if the index is damaged."""
        if not self.index_path.exists():
            return []
        raw = read_json_object(self.index_path, FormatError, MAX_INDEX_BYTES)
        if raw.get("version") != INDEX_VERSION or not isinstance(raw.get("entries"), list):
            message = f"expected version {INDEX_VERSION} and a list of entries; a newer bitnet_ref may have written it"
            raise FormatError(message, path=self.index_path, field="version")
        return [self._entry(value, f"entries[{n}]") for n, value in enumerate(raw["entries"])]

    def _entry(self, value: Any, field: str) -> Entry:
        names = {each.name for each in fields(Entry)}
        if not isinstance(value, dict) or set(value) != names:
            raise FormatError(f"expected an object of {', '.join(sorted(names))}", path=self.index_path, field=field)
        strings = all(isinstance(value[key], str) for key in ("name", "digest", "source", "origin", "time", "kind"))
        maybe = all(value[key] is None or isinstance(value[key], str) for key in ("revision", "commit", "main"))
        tables = isinstance(value["files"], dict) and isinstance(value["summary"], dict)
        if not (strings and maybe and tables and is_reference(value["name"]) and _HASH.fullmatch(value["digest"])):
            raise FormatError("is no entry of a store", path=self.index_path, field=field)
        sizes = [file.get("size") if isinstance(file, dict) else None for file in value["files"].values()]
        inside = all(name == Path(name).name and not name.startswith(".") for name in value["files"])
        if not inside or not all(isinstance(size, int) and size >= 0 for size in sizes):
            raise FormatError("expected plain names with sizes", path=self.index_path, field=f"{field}.files")
        if value["main"] is not None and value["main"] not in value["files"]:
            raise FormatError("expected one of the files", path=self.index_path, field=f"{field}.main")
        return Entry(**value)

    def path(self, entry: Entry) -> Path:
        """The path to load."""
        folder = self.models / entry.digest
        return folder if entry.main is None else folder / entry.main

    def find(self, reference: Reference) -> Entry | None:
        """The newest version that the reference names, or None."""
        matching = [e for e in self.entries() if e.name == reference.name and e.matches(reference.revision)]
        return matching[-1] if matching else None

    def commit(self, folder: Path, entry: Entry) -> Entry:
        """Turn a folder in `incoming` into a version of the store."""
        for file in folder.iterdir():
            sync(file)
        sync(folder)
        with self._changing() as entries:
            target = self.models / entry.digest
            if target.exists():
                shutil.rmtree(folder)
            else:
                self.models.mkdir(exist_ok=True)
                os.rename(folder, target)
                sync(self.models)
            same = (entry.name, entry.digest, entry.revision)
            entries[:] = [e for e in entries if (e.name, e.digest, e.revision) != same] + [entry]
        return entry

    def remove(self, reference: Reference) -> list[Entry]:
        """Remove the versions that the reference names (without @revision: all), and folders that no entry names."""
        with self._changing() as entries:
            removed = [e for e in entries if e.name == reference.name and e.matches(reference.revision)]
            if not removed:
                near = get_close_matches(reference.name, {e.name for e in entries}, 3)
                hint = f"; did you mean {' or '.join(near)}?" if near else "; bitnet-ref list shows what there is"
                raise RegistryError(f"the store has no {str(reference)!r}{hint}")
            entries[:] = [e for e in entries if e not in removed]
        return removed

    @contextmanager
    def _changing(self) -> Iterator[list[Entry]]:
        """The entries, for the caller to change in place under the lock. Then writes them and removes other folders."""
        with explain_os_errors(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            with locked(self.root / "lock"):
                entries = self.entries()
                try:
                    yield entries
                    self._write_index(entries)
                except BaseException:
                    with suppress(FormatError):
                        self._remove_others(self.entries())  # a copy that got no name
                    raise
                self._remove_others(entries)

    def _write_index(self, entries: Sequence[Entry]) -> None:
        value = {"version": INDEX_VERSION, "entries": [asdict(entry) for entry in entries]}
        try:
            write_json(self.index_path, value)
        except StorageError as problem:
            if problem.errno not in DISK_FULL:
                raise
            # Killed after this, the index names files that are gone: `find` says so, and `rm` and `pull` mend it.
            self._remove_others(entries)
            write_json(self.index_path, value)

    def _remove_others(self, entries: Sequence[Entry]) -> None:
        """Remove the folders that no entry names. What cannot be removed now is left to the next change."""
        named = {entry.digest for entry in entries}
        with suppress(OSError):
            for folder in self.models.iterdir():
                if folder.name not in named:
                    removed = folder.with_name(f"{os.urandom(8).hex()}.removed")
                    with suppress(OSError):
                        os.rename(folder, removed)  # a part of a model never has the model's name
                        shutil.rmtree(removed)

    @contextmanager
    def staging(self, key: str, notice: Notice | None = None) -> Iterator[Path]:
        """A locked folder for the caller to fill. If the key begins with "pull-", the folder survives an interrupt."""
        folder, lock = self.incoming / key, self.incoming / f"{key}.lock"
        with explain_os_errors(self.root):
            self.incoming.mkdir(parents=True, exist_ok=True)
            self.sweep()
            try:
                with locked(lock, notice):
                    folder.mkdir(exist_ok=True)
                    yield folder
                    self._remove_staged(folder, lock)
            except BaseException:
                if not key.startswith("pull-"):
                    self._remove_staged(folder, lock)
                raise

    def _remove_staged(self, folder: Path, lock: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # `sweep` removes it later
            lock.unlink()

    def sweep(self) -> None:
        """Remove the remains of interrupted processes: copies at once, downloads after a day."""
        for lock in list(self.incoming.glob("*.lock")) if CAN_LOCK else ():
            with suppress(OSError), locked(lock, block=False):
                stale = time.time() - lock.stat().st_mtime > KEEP_DOWNLOADS_S
                if stale or not lock.name.startswith("pull-"):
                    self._remove_staged(lock.with_suffix(""), lock)


@contextmanager
def locked(path: Path, notice: Notice | None = None, *, block: bool = True) -> Iterator[None]:
    """Hold an exclusive lock on the file. Without `block`, BlockingIOError if another process has it."""
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
                continue  # its last holder removed it: lock the new one
            yield
            return
        finally:
            with suppress(OSError):
                os.close(file)


def find(name: str) -> Path | None:
    """The path to load for "name" or "name@revision"; None if the store has no such model. Never uses the network."""
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
    """Remove a name, or one version of it ("name@revision"), and the files that no other name uses."""
    return Store().remove(parse_reference(name))
