"""formats.atomic: after an interrupt the old file is there, whole, and nothing else."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from bitnet_ref.errors import StorageError
from bitnet_ref.system import atomic
from bitnet_ref.system.atomic import atomic_folder, atomic_path, check_target, lock_folder


def test_a_clean_exit_replaces_the_file(tmp_path):
    path = tmp_path / "file.bin"
    path.write_bytes(b"old")
    with atomic_path(path) as temporary:
        assert temporary.parent == tmp_path  # the same file system, so that the rename is one step
        temporary.write_bytes(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file.bin"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, MemoryError, SystemExit])
def test_an_interrupt_leaves_the_old_file(tmp_path, error):
    path = tmp_path / "file.bin"
    path.write_bytes(b"old")
    with pytest.raises(error), atomic_path(path) as temporary:  # noqa: PT012 - the body is what is interrupted
        temporary.write_bytes(b"half of the n")
        raise error
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file.bin"]


def test_a_body_that_writes_nothing_is_an_error(tmp_path):
    path = tmp_path / "file.bin"
    path.write_bytes(b"old")
    with pytest.raises(ValueError, match="nothing was written"), atomic_path(path):
        pass
    assert path.read_bytes() == b"old"


def test_a_link_is_followed_and_stays(tmp_path):
    (tmp_path / "there").mkdir()
    link, real = tmp_path / "link.bin", tmp_path / "there" / "real.bin"
    link.symlink_to("there/real.bin")
    for data in (b"new", b"newer"):  # a dangling link names a new file
        with atomic_path(link) as temporary:
            assert temporary.parent == real.parent
            temporary.write_bytes(data)
        assert link.is_symlink()
        assert real.read_bytes() == data
    assert os.listdir(real.parent) == ["real.bin"]


def refused_targets(folder):
    """(path, words) of targets that are refused before the work begins"""
    (folder / "file").write_bytes(b"x")
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to("loop")
    (folder / "device").symlink_to("/dev/null")
    yield folder / "none" / "x", "there is no folder"
    yield folder / "file" / "x", "there is no folder"
    yield folder / "folder", "is a folder"
    yield folder / "pipe", "neither a regular file"
    yield folder / "device", "neither a regular file"
    yield folder / "loop", "neither a regular file"
    yield folder / "a\0b", "NUL"
    yield folder / ("x" * 300), "File name too long"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_targets_that_are_refused(tmp_path):
    for path, words in list(refused_targets(tmp_path)):
        before = sorted(os.listdir(tmp_path))
        for writer in (check_target, lambda path: atomic_path(path).__enter__()):
            with pytest.raises(StorageError, match=words) as caught:
                writer(path)
            assert caught.value.path == str(path)
        assert sorted(os.listdir(tmp_path)) == before
    with pytest.raises(StorageError, match="are free on the disk") as caught:
        check_target(tmp_path / "x", 1 << 60)
    assert caught.value.errno == errno.ENOSPC


def test_permissions_are_kept_and_long_names_fit(tmp_path):
    for name in ("private", "x" * 255, "ä" * 127):
        path = tmp_path / name
        path.write_bytes(b"old")
        path.chmod(0o640)
        with atomic_path(path) as temporary:
            temporary.write_bytes(b"new")
        assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o640)
    assert len(os.listdir(tmp_path)) == 3


def test_one_of_several_new_files_wins(tmp_path, monkeypatch):
    """Also where the others began before anything was to be seen, and on a file system without hard links."""
    path = tmp_path / "file"
    first, second = atomic_path(path, replace=False), atomic_path(path, replace=False)
    one = first.__enter__()
    with pytest.raises(StorageError, match="another process is writing it"):
        second.__enter__()
    monkeypatch.setattr(atomic, "remove_leftovers", lambda path: False)
    with pytest.raises(StorageError, match="File exists"), atomic_path(path, replace=False) as other:  # noqa: PT012
        other.write_bytes(b"other")
        one.write_bytes(b"one")
        first.__exit__(None, None, None)
    assert path.read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["file"]
    monkeypatch.setattr(os, "link", refuse_link)
    with atomic_path(tmp_path / "new", replace=False) as temporary:
        temporary.write_bytes(b"new")
    assert (tmp_path / "new").read_bytes() == b"new"


def test_a_folder_is_locked_until_its_owner_is_no_more(tmp_path):
    owners = [set(), set()]
    unlock = lock_folder(tmp_path, owners[0])
    with pytest.raises(StorageError, match=f"^{tmp_path}: another run is writing into it"):
        lock_folder(tmp_path, owners[1])
    unlock()
    lock_folder(tmp_path, owners[1])
    unlock()  # a second time: it does nothing
    with pytest.raises(StorageError):
        lock_folder(tmp_path, owners[0])
    owners.pop()
    lock_folder(tmp_path, owners[0])
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_locks_stops_no_run(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(atomic, "flock", refuse)
    owners = [set(), set()]
    for owner in owners:
        lock_folder(tmp_path, owner)


def refuse_link(*paths):
    raise PermissionError(errno.EPERM, "no hard links here")


KILLED = """
import os, signal, sys
from bitnet_ref.system import atomic
from bitnet_ref.system.atomic import atomic_folder, atomic_path, check_target
with {kind}(sys.argv[1]) as temporary:
    (temporary / "part" if temporary.is_dir() else temporary).write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def write_and_be_killed(kind, path):
    done = subprocess.run([sys.executable, "-c", KILLED.format(kind=kind), str(path)], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this system")
def test_a_killed_process_leaves_the_old_file_and_the_next_writer_sweeps(tmp_path):
    path = tmp_path / "file[1].bin"
    path.write_bytes(b"old")
    write_and_be_killed("atomic_path", path)
    assert path.read_bytes() == b"old"
    assert len(os.listdir(tmp_path)) == 2
    other = tmp_path / ".00000000.tmp.file1.bin"  # another file's
    other.write_bytes(b"x")
    with atomic_path(path) as temporary:
        temporary.write_bytes(b"new")
    assert path.read_bytes() == b"new"
    assert sorted(os.listdir(tmp_path)) == [other.name, path.name]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this system")
def test_a_killed_process_leaves_no_folder_and_the_next_writer_sweeps(tmp_path):
    path = tmp_path / "folder"
    write_and_be_killed("atomic_folder", path)
    assert not path.exists()
    assert len(os.listdir(tmp_path)) == 1
    with atomic_folder(path) as temporary:
        (temporary / "file").write_bytes(b"whole")
    assert os.listdir(tmp_path) == ["folder"]
    assert (path / "file").read_bytes() == b"whole"


def test_what_another_writer_is_writing_is_not_swept(tmp_path):
    path = tmp_path / "file.bin"
    with atomic_path(path) as first:
        first.write_bytes(b"first")
        with atomic_path(path) as second:
            second.write_bytes(b"second")
        assert first.read_bytes() == b"first"
    assert path.read_bytes() == b"first"


def test_a_folder_is_there_whole_or_not_at_all(tmp_path):
    path = tmp_path / "folder"
    with pytest.raises(KeyboardInterrupt), atomic_folder(path) as temporary:  # noqa: PT012
        (temporary / "file").write_bytes(b"half")
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []
    path.mkdir()
    with pytest.raises(StorageError, match="is there already"), atomic_folder(path):
        pass


@pytest.mark.skipif(not atomic.CAN_LOCK, reason="no locks on this system, so nothing is swept")
def test_a_folder_that_another_writer_sweeps_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    path, swept, real = tmp_path / "folder", [], os.open

    def sweep_first(name, *rest, **more):
        if not swept:
            swept.append(name)
            atomic.remove_leftovers(path)
        return real(name, *rest, **more)

    monkeypatch.setattr(os, "open", sweep_first)
    with atomic_folder(path) as temporary:
        (temporary / "file").write_bytes(b"whole")
    assert swept
    assert swept[0] != temporary
    assert os.listdir(tmp_path) == ["folder"]


def test_a_temporary_name_is_not_wrapped_again(tmp_path):
    path = tmp_path / "file.bin"
    with atomic_path(path) as temporary, atomic_path(temporary) as same:
        assert same == temporary
        same.write_bytes(b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file.bin"]
