"""Every allocation of the CPU kernels fails once: an error, no leak, and the next use is right. See fault_points.py."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bitnet_ref.backends.cpu.extension import why_unavailable

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.skipif(why_unavailable() is not None, reason="the extension is not built")
@pytest.mark.skipif(
    not hasattr(os, "confstr") or "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""), reason="glibc"
)
def test_every_allocation_fails_once(tmp_path):
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    library = tmp_path / "fail_allocation.so"
    subprocess.run(["gcc", "-O1", "-Wall", "-shared", "-fPIC", HERE / "fail_allocation.c", "-o", library], check=True)
    command = [sys.executable, HERE / "fault_points.py", HERE.parent]
    done = subprocess.run(command, env={**os.environ, "LD_PRELOAD": str(library)}, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    failures = json.loads(done.stdout)
    print(f"{sum(failures.values())} allocations failed, in {len(failures)} uses of the kernels")
    assert sum(failures.values()) >= 2000
