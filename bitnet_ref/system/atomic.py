"""Writing a file, or a folder, so that an interrupt leaves the old one or the new one; and locks on files.

The system releases a process's lock when the process ends, even if it is killed. Windows has no such lock, and nothing
is locked there: two processes must not write the same file.

The temporary file is beside its target, and locked by the process that writes it. When that process is killed, the next
writer of the same target recognises the leftover file and removes it. The temporary name has the suffix of the target:
a reader that chooses by the suffix can check what was written. A link in the place of the target is followed: the file
that it names is replaced, in that file's own folder, and the link stays.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

from ..errors import StorageError

try:
    from fcntl import LOCK_EX, LOCK_NB, flock
except ImportError:
    CAN_LOCK = False
else:
    CAN_LOCK = True

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_HARD_LINKS = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)  # of a file system
_LEAST_BYTES = 4096  # that a file of unknown size needs
_NAME_BYTES = 200  # of a target's name in that of its temporary file, which has at most 255
_being_written: set[Path] = set()  # temporary files of this process


def lock_file(descriptor: int, *, block: bool = True) -> None:
    """Lock an open file or folder exclusively, until it is closed.

    Without `block`: raises BlockingIOError when another process, or another opening of the same file, holds the lock.
    """
    if CAN_LOCK:
        flock(descriptor, LOCK_EX if block else LOCK_EX | LOCK_NB)


def lock_folder(folder: Path, owner: object) -> Callable[[], object]:
    """Lock the folder of a run until the returned function is called, or until `owner` is no more.

    Raises StorageError when another process, or another owner in this one, holds the lock.
    """
    if not CAN_LOCK:
        return lambda: None
    with explain_os_errors(folder):
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        lock_file(descriptor, block=False)
    except BlockingIOError:
        os.close(descriptor)
        message = "another run is writing into it; wait for its end, or choose another folder"
        raise StorageError(message, path=folder) from None
    except OSError:
        pass  # a file system without locks
    return weakref.finalize(owner, os.close, descriptor)


@contextmanager
def explain_os_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise an OSError of the block as a StorageError, about the file that it names or else about `path`."""
    try:
        yield
    except OSError as problem:
        raise storage_error(problem, path) from problem


def storage_error(problem: OSError, path: str | os.PathLike[str] | None = None) -> StorageError:
    """The StorageError that says what an OSError says. Temporary files are not named, but their target, `path`."""
    if isinstance(problem, StorageError):
        named, message = problem.path, problem.message
    else:
        named = problem.filename2 or problem.filename  # of two the second is the one that is written
        message = problem.strerror or str(problem) or type(problem).__name__
        if problem.errno in DISK_FULL:
            message += "; free some, or name a place on another disk"
    if isinstance(named, str) and (path is None or ".tmp." not in named):
        path = named
    error = StorageError(message, path=path)
    error.errno = problem.errno
    return error


def is_same_file(path: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Whether both exist and are one file or folder, by links or other spellings too."""
    try:
        return os.path.samefile(path, other)
    except (OSError, ValueError):  # one is missing, or a text that is no path
        return False


def check_target(path: str | os.PathLike[str], nbytes: int = _LEAST_BYTES) -> None:
    """Raise StorageError if a file of so many bytes cannot be written to `path`: call it before the work begins.

    Among the reasons: no such folder, a folder or a device of that name, no permission, a full or read-only disk.
    """
    with explain_os_errors(path):
        target, _ = _find_target(Path(path), replace=True)
        check_space(target, nbytes)
        _discard(*_make_temporary(target, is_folder=False))


def check_space(path: Path, nbytes: int) -> None:
    """Raise OSError if the disk of the folder around `path` has fewer bytes free."""
    usage = shutil.disk_usage(path.absolute().parent)
    if usage.total and nbytes > usage.free:  # without a total, the file system does not say
        raise OSError(errno.ENOSPC, f"{nbytes:,} bytes are to be written, and {usage.free:,} are free on the disk")


@contextmanager
def atomic_path(path: str | os.PathLike[str], *, replace: bool = True) -> Iterator[Path]:
    """A temporary file beside `path`, to be written by the caller; after the block it is synced and renamed to `path`.

    replace: whether an existing file is replaced. If not, one writer of several at a time gets the name.
    If `path` is itself such a temporary name, it is yielded unchanged: the outer block syncs and renames it.

    Raises StorageError for every OSError, of the block too: before the block if `path` cannot be written. Raises
    ValueError if the block wrote nothing.
    """
    path = Path(path)
    if path in _being_written:
        yield path
        return
    with explain_os_errors(path):
        target, mode = _find_target(path, replace)
        if remove_leftovers(target) and not replace:
            raise storage_error(FileExistsError(errno.EEXIST, "another process is writing it"), path)
        temporary, lock = _make_temporary(target, is_folder=False)
        _being_written.add(temporary)
        try:
            if mode is not None:
                os.chmod(temporary, mode)
            yield temporary
            if temporary.stat().st_size == 0:
                raise ValueError(f"nothing was written to {temporary}, which was to become {path}")
            sync(temporary)
            if replace:
                os.replace(temporary, target)
            else:
                _rename_to_new(temporary, target)
            sync(target.parent)  # the new name too must survive a power cut
        finally:
            _being_written.discard(temporary)
            _discard(temporary, lock)


def write_file(path: Path, data: bytes) -> None:
    """Write a small file as a whole, in a folder that is made if it is not there. Raises StorageError."""
    with explain_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


@contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary folder beside `path`, to be filled by the caller; after the block it is synced and renamed to `path`.

    A folder cannot be replaced in one step: raises StorageError if `path` exists, or another process is writing it, and
    for every OSError.
    """
    path = Path(path)
    with explain_os_errors(path):
        target, _ = _find_target(path, replace=False)
        if remove_leftovers(target):
            raise storage_error(FileExistsError(errno.EEXIST, "another process is writing it"), path)
        temporary, lock = _make_temporary(target, is_folder=True)
        try:
            yield temporary
            for file in temporary.rglob("*"):
                sync(file)
            sync(temporary)
            os.rename(temporary, target)  # fails if there is a folder by now, unless it is empty
            sync(target.parent)
        finally:
            _discard(temporary, lock)


def _find_target(path: Path, replace: bool) -> tuple[Path, int | None]:
    """(the file that `path` names, links followed; its permissions if it exists). StorageError if it cannot be written.

    replace: whether it may exist, as a regular file.
    """
    if "\0" in str(path):
        raise StorageError("a file's name has no NUL", path=path)
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    if not target.absolute().parent.is_dir():
        raise StorageError(f"there is no folder {str(target.absolute().parent)!r} to write into", path=path)
    try:
        mode = os.lstat(target).st_mode
    except FileNotFoundError:
        return target, None
    problems = (
        (stat.S_ISDIR(mode) and replace, "is a folder, and a file is to be written"),
        (not replace, "is there already; remove it, or give another name"),
        (not stat.S_ISREG(mode), "is neither a regular file nor a link to one; only those are replaced"),
        (not os.access(target, os.W_OK), "is write-protected"),
    )
    for is_wrong, message in problems:
        if is_wrong:
            raise StorageError(message, path=path)
    return target, stat.S_IMODE(mode)


def _rename_to_new(temporary: Path, target: Path) -> None:
    """Give the file the name `target`. FileExistsError if there is such a file, also from a moment ago."""
    try:
        os.link(temporary, target)  # which unlike a rename never replaces a file
    except OSError as problem:
        if problem.errno not in _NO_HARD_LINKS or target.exists():
            raise
        os.rename(temporary, target)


def remove_leftovers(path: Path) -> bool:
    """Remove the temporary files of killed writers of `path`.   -> whether some other writer is alive

    Without locks they cannot be recognised, and stay.
    """
    is_written = False
    for leftover in path.parent.glob(f".????????.tmp.{escape(_shortened(path.name))}") if CAN_LOCK else ():
        with suppress(OSError):  # another writer may be removing it too
            flags = os.O_RDONLY | os.O_NONBLOCK  # it may be a pipe
            lock = os.open(leftover, flags | os.O_NOFOLLOW)
            try:
                lock_file(lock, block=False)
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            except BlockingIOError:  # its writer is alive
                is_written = True
            finally:
                os.close(lock)
    return is_written


def _shortened(name: str) -> str:
    """The end of a name, as much as a temporary file's name has space for."""
    while len(os.fsencode(name)) > _NAME_BYTES:
        name = name[1:]
    return name


def _make_temporary(path: Path, *, is_folder: bool) -> tuple[Path, int]:
    """A new file or folder beside `path`, locked: (its path, file descriptor)."""
    while True:
        temporary = path.with_name(f".{secrets.token_hex(4)}.tmp.{_shortened(path.name)}")
        if is_folder:
            temporary.mkdir()
        lock = -1
        try:
            lock = os.open(temporary, os.O_RDONLY if is_folder else os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            with suppress(OSError):  # a file system without locks: then no other writer can lock it, and remove it
                lock_file(lock)
            if temporary.exists():  # else another writer removed it before it was locked
                return temporary, lock
        except OSError as problem:
            _discard(temporary, lock)
            if is_folder and isinstance(problem, FileNotFoundError):  # removed before it was opened
                continue
            raise
        os.close(lock)


def _discard(temporary: Path, lock: int) -> None:
    """Remove the temporary file or folder if it is still there. What cannot be removed is left to the next writer."""
    for remove in (os.unlink, shutil.rmtree):
        with suppress(OSError):
            remove(temporary)
    with suppress(OSError):
        os.close(lock)


def sync(path: Path) -> None:
    """Flush a file's bytes, or a folder's names, to the disk."""
    is_folder = path.is_dir()
    if os.name == "nt" and is_folder:
        return
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            with suppress(OSError):  # it was only read
                os.close(file)
    except OSError as problem:
        if not is_folder or problem.errno in (errno.EIO, *DISK_FULL):  # others: a file system that syncs no folders
            raise
