"""Every writer with faults let into it: nothing is torn, errors are clear, and the command works when repeated.

`writers.py` has the writers and the campaigns, each of which runs in a process of its own. A sample runs by default.
"""

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import bitnet_ref

HERE = Path(__file__).parent
CONVERSIONS = [
    f"convert:{name}"
    for name in (
        *("hf-packed", "hf-bf16", "native", "native-base3", "onnx", "gguf-i2_s", "gguf-tq1_0", "gguf-tq2_0"),
        *("gguf-tl1", "gguf-tl2", "gguf-f16", "gguf-bf16", "gguf-f32", "gguf-q8_0"),
    )
]
OTHERS = ["receipt", "html", "record", "trace", "json", "profile", "plot", "lab"]
NAMES = ["names:give", "names:replace", "names:forget", "old-store"]
PREPARED = ["prepared"] if bitnet_ref.available_backends()["cython"] is None else []
GROUPS = [CONVERSIONS[:3], CONVERSIONS[3:7], CONVERSIONS[7:], [*OTHERS, *NAMES, *PREPARED]]
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="counts and kills as Linux does")


@pytest.fixture(scope="module")
def faults_library(tmp_path_factory):
    path = tmp_path_factory.mktemp("faults") / "faults.so"
    command = ["cc", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", "-o", path, HERE / "faults.c", "-ldl"]
    try:
        subprocess.run(command, check=True)
    except FileNotFoundError:
        pytest.skip("no C compiler")
    return path


@pytest.fixture
def memory(tmp_path):
    """A folder in memory where there is one: a campaign syncs some thousand files."""
    with TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path) as folder:
        yield Path(folder)


def run(campaign, writers, folder, *arguments, library=None):
    """Run the campaign on each writer, print its counts, and return them. Fails on the first escape."""
    path = [str(HERE.parents[1]), str(HERE.parent), str(HERE.parent / "formats"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)} | ({"LD_PRELOAD": str(library)} if library else {})
    command = [sys.executable, HERE / "writers.py", campaign, ",".join(writers), folder, *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [result["writer"] for result in results] == list(writers)
    for result in results:
        if "skipped" in result:
            pytest.skip(result["skipped"])
        print(f"{campaign} {result['writer']}: {result['points']} points {result['outcomes']}, {result['seconds']} s")
        assert not result["escapes"], (result["writer"], result["escapes"][:5])
    return results


@pytest.mark.thorough
@linux_only
def test_some_system_calls_fail(faults_library, memory):
    receipt, names, _ = run("faults", ["receipt", "names:give", "old-store"], memory, library=faults_library)
    assert names["outcomes"].keys() == {"done", "error"}
    assert {"open64", "write", "fsync", "rename"} <= receipt["calls"].keys()
    run("faults", [*PREPARED, "convert:hf-packed"], memory, 20, library=faults_library)


@pytest.mark.thorough
@linux_only
def test_small_limits_and_a_few_kills(tmp_path):
    run("limits", ["receipt", "names:give", "convert:hf-packed"], tmp_path, 2)
    run("kills", ["receipt", *PREPARED], tmp_path, 2)


@pytest.mark.slow
@linux_only
@pytest.mark.parametrize("writers", GROUPS, ids=lambda writers: writers[0])
def test_every_system_call_fails_once(writers, faults_library, memory):
    """ENOSPC, EIO, EINTR, and half of a write, in every call of every writer."""
    run("faults", writers, memory, library=faults_library)


@pytest.mark.slow
@linux_only
@pytest.mark.parametrize("fault", range(4))
def test_every_system_call_of_a_pull_fails_once(fault, faults_library, memory):
    pytest.importorskip("huggingface_hub")
    run("faults", ["hub:pull"], memory, 1, fault, library=faults_library)


@pytest.mark.slow
@linux_only
@pytest.mark.parametrize("campaign", ["limits", "disks"])
def test_full_disks(campaign, tmp_path):
    """40 sizes for each writer: a limit on the length of files, and a small disk."""
    run(campaign, [*chain(*GROUPS), "hub:pull"], tmp_path)


@pytest.mark.slow
@linux_only
@pytest.mark.parametrize(
    "writers", [["convert:hf-packed", "convert:gguf-i2_s", "convert:native"], [*NAMES, *PREPARED]], ids=str
)
def test_killed_at_random(writers, tmp_path):
    """100 processes of each, killed at random moments."""
    for result in run("kills", writers, tmp_path, 100):
        assert any("killed" in end for end in result["outcomes"])
