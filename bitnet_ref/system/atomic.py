"""Writing a file, or a folder, so that an interrupt leaves the old one or the new one; and locks on files.

The system releases a process's lock when the process ends, even if it is killed. Windows has no such lock, and nothing
is locked there: two processes must not write the same file.

The temporary file is beside its target, and locked by the process that writes it. When that process is killed, the next
writer of the same target recognises the leftover file and removes it. The temporary name has the suffix of the target:
a reader that chooses by the suffix can check what was written.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

try:
    from fcntl import LOCK_EX, LOCK_NB, flock
except ImportError:
    CAN_LOCK = False
else:
    CAN_LOCK = True

_being_written: set[Path] = set()  # temporary files of this process


def lock_file(descriptor: int, *, block: bool = True) -> None:
    """Lock an open file or folder exclusively, until it is closed.

    Without `block`: raises BlockingIOError when another process, or another opening of the same file, holds the lock.
    """
    if CAN_LOCK:
        flock(descriptor, LOCK_EX if block else LOCK_EX | LOCK_NB)


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary file beside `path`, to be written by the caller; after the block it is synced and renamed to `path`.

    Raises FileNotFoundError if the caller wrote nothing to it. If `path` is itself such a temporary name, it is yielded
    unchanged: the outer block syncs and renames it.
    """
    path = Path(path)
    if path in _being_written:
        yield path
        return
    remove_leftovers(path)
    temporary, lock = _make_temporary(path, is_folder=False)
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
    """A temporary folder beside `path`, to be filled by the caller; after the block it is synced and renamed to `path`.

    Raises FileExistsError if `path` exists: a folder cannot be replaced in one step.
    """
    path = Path(path)
    if path.exists():
        raise FileExistsError(f"{path} is there already")
    remove_leftovers(path)
    temporary, lock = _make_temporary(path, is_folder=True)
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


def remove_leftovers(path: Path) -> None:
    """Remove the temporary files of killed writers of `path`. Without locks they cannot be recognised, and stay."""
    for leftover in path.parent.glob(f".????????.tmp.{escape(path.name)}") if CAN_LOCK else ():
        with suppress(OSError):  # another writer may be removing it too
            lock = os.open(leftover, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # it may be a pipe
            try:
                lock_file(lock, block=False)  # BlockingIOError: its writer is alive
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            finally:
                os.close(lock)


def _make_temporary(path: Path, *, is_folder: bool) -> tuple[Path, int]:
    """A new file or folder beside `path`, locked: (its path, file descriptor)."""
    while True:
        temporary = path.with_name(f".{secrets.token_hex(4)}.tmp.{path.name}")
        if is_folder:
            temporary.mkdir()
        lock = os.open(temporary, os.O_RDONLY if is_folder else os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        lock_file(lock)
        if temporary.exists():  # else another writer removed it before it was locked
            return temporary, lock
        os.close(lock)


def sync(path: Path) -> None:
    """Flush a file's bytes, or a folder's names, to the disk."""
    if os.name == "nt" and path.is_dir():
        return
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
