"""Writing a file, or a folder, so that an interrupt leaves the old one or the new one.

What is being written lies beside its target under a temporary name, locked by the process that writes it. A process
that was killed lets go of its lock, so the next writer of the same target knows the leftover for one and removes it.
The temporary name ends as the target's does: a reader that goes by the suffix can prove what was written.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .file_lock import CAN_LOCK, lock_file

_being_written: set[Path] = set()  # temporary files of this process


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary file beside `path`, to be written by the caller; on a clean exit synced and renamed to `path`.

    Raises FileNotFoundError if the caller wrote nothing to it. A path that is such a temporary name already is given
    back as it is: who asked for it syncs and renames it.
    """
    path = Path(path)
    if path in _being_written:
        yield path
        return
    sweep(path)
    temporary, lock = _locked(path, _new_file)
    _being_written.add(temporary)
    try:
        yield temporary
        if temporary.stat().st_size == 0:
            raise FileNotFoundError(f"nothing was written to {temporary}, which was to become {path}")
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)  # the new name too must survive a power cut
    finally:
        _being_written.discard(temporary)
        temporary.unlink(missing_ok=True)
        os.close(lock)


@contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary folder beside `path`, to be filled; on a clean exit synced and renamed to `path`.

    Raises FileExistsError if there is something at `path`: a folder cannot be replaced in one step.
    """
    path = Path(path)
    if path.exists():
        raise FileExistsError(f"{path} is there already")
    sweep(path)
    temporary, lock = _locked(path, _new_folder)
    try:
        yield temporary
        for file in temporary.rglob("*"):
            sync(file)
        sync(temporary)
        os.rename(temporary, path)
        sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(lock)


def sweep(path: Path) -> None:
    """Remove what killed writers of `path` left beside it. Where nothing is locked, nothing is known to be left."""
    for left in path.parent.glob(f".????????.tmp.{_escaped(path.name)}") if CAN_LOCK else ():
        with suppress(OSError):  # another writer may be sweeping too
            lock = os.open(left, os.O_RDONLY)
            try:
                lock_file(lock, block=False)  # BlockingIOError: its writer is alive
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            finally:
                os.close(lock)


def _new_file(name: Path) -> int:
    return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)


def _new_folder(name: Path) -> int:
    name.mkdir()
    return os.open(name, os.O_RDONLY)


def _locked(path: Path, make: Callable[[Path], int]) -> tuple[Path, int]:
    """A new temporary name beside `path`, made and locked: (name, file descriptor)."""
    while True:
        temporary = path.with_name(f".{secrets.token_hex(4)}.tmp.{path.name}")
        lock = make(temporary)
        lock_file(lock)
        if temporary.exists():  # else another writer swept it before it was locked
            return temporary, lock
        os.close(lock)


def _escaped(name: str) -> str:
    """The name as a glob that matches nothing else."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def sync(path: Path) -> None:
    """Have the system write a file's bytes, or a folder's names, to the disk."""
    if os.name == "nt" and path.is_dir():
        return
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
