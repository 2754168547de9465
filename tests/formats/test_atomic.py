"""formats.atomic: after an interrupt the old file is there, whole, and nothing else."""

import os
import signal
import subprocess
import sys

import pytest

from bitnet_ref.formats.atomic import atomic_path


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
    with pytest.raises(FileNotFoundError), atomic_path(path):
        pass
    assert path.read_bytes() == b"old"


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this system")
def test_a_killed_process_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.bin"
    path.write_bytes(b"old")
    code = (
        "import os, signal, sys\n"
        "from bitnet_ref.formats.atomic import atomic_path\n"
        "with atomic_path(sys.argv[1]) as temporary:\n"
        "    temporary.write_bytes(b'half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert path.read_bytes() == b"old"
