"""bitnet_ref.system.threads: the count comes from the argument, two variables or the machine."""

import os
import re
import subprocess
import sys
import threading

import pytest
from helpers import run_python

from bitnet_ref.backends import choose_backend
from bitnet_ref.backends.backend import blas_threads
from bitnet_ref.backends.cpu.extension import why_unavailable
from bitnet_ref.errors import BackendError
from bitnet_ref.system.threads import (
    MAX_THREADS,
    available_cpus,
    cgroup_cpus,
    machine_threads,
    physical_cores,
    resolve_threads,
    thread_choice,
    usable_cpus,
)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    monkeypatch.delenv("BITNET_REF_NUM_THREADS", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_the_order_of_sources(monkeypatch):
    assert thread_choice() == machine_threads()
    assert thread_choice()[0] == available_cpus()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert thread_choice() == (3, "OMP_NUM_THREADS")
    monkeypatch.setenv("BITNET_REF_NUM_THREADS", "5")
    assert thread_choice() == (5, "BITNET_REF_NUM_THREADS")
    assert thread_choice(2) == (2, "argument")


def test_the_first_level_of_omp_num_threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", " 4 ,2,1")
    assert resolve_threads() == 4


@pytest.mark.parametrize("text", ["", "  "])
def test_empty_variables_are_not_set(monkeypatch, text):
    monkeypatch.setenv("BITNET_REF_NUM_THREADS", text)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert resolve_threads() == 7


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "0x2", "²", "9" * 5000, str(MAX_THREADS + 1), "1e2"])
@pytest.mark.parametrize("variable", ["BITNET_REF_NUM_THREADS", "OMP_NUM_THREADS"])
def test_bad_variables_are_named(monkeypatch, variable, text):
    monkeypatch.setenv(variable, text)
    with pytest.raises(BackendError, match=f"^{variable}: expected a whole number of threads"):
        resolve_threads()


@pytest.mark.parametrize("threads", [0, -3, 1.0, "2", True, MAX_THREADS + 1, 2**31, 10**30])
def test_bad_arguments(threads, backend_name):
    with pytest.raises(BackendError, match=r"^threads: expected"):
        choose_backend(backend_name, threads=threads)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no CPU affinity")
def test_affinity_is_honoured():
    cpus = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cpus)})
        assert usable_cpus() == {min(cpus)}
        assert available_cpus() == 1
    finally:
        os.sched_setaffinity(0, cpus)
    assert 1 <= available_cpus() <= len(cpus)


BOUND = """
import json, os
allowed = sorted(os.sched_getaffinity(0))
import bitnet_ref
from bitnet_ref.system.threads import machine_threads, usable_cpus

model = bitnet_ref.load("storyteller", backend="cython")
print(json.dumps([allowed, sorted(usable_cpus()), *machine_threads(), model.backend.threads]))
"""


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="libgomp binds threads on Linux only")
@pytest.mark.skipif(why_unavailable() is not None, reason="the extension is not built")
@pytest.mark.parametrize("variable", ["OMP_PROC_BIND=true", "OMP_PLACES=threads", "GOMP_CPU_AFFINITY={cpus}", "one"])
def test_threads_that_openmp_binds_are_counted(variable):
    """OpenMP binds the main thread to one CPU when the extension is loaded."""
    cpus = sorted(os.sched_getaffinity(0))
    if variable == "one":
        name, value, expected = "OMP_PLACES", f"{{{cpus[-1]}}}", cpus[-1:]
    else:
        name, value = variable.format(cpus=" ".join(map(str, cpus))).split("=")
        expected = cpus
    allowed, usable, count, source, threads = run_python(BOUND, env={name: value})
    assert allowed == cpus
    assert usable == expected
    assert threads == count == min(physical_cores(expected), count)
    assert "OpenMP binds" in source or "cgroup" in source


# -- the machine: made-up /proc and /sys -------------------------------------------------------------------------------


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def siblings(*groups):
    """thread_siblings_list of each CPU, in the kernel's notation: "0,4" or "0-1"."""
    return {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{text}\n"
        for text, cpus in groups
        for cpu in cpus
    }


def test_hardware_threads_of_a_core_count_once(tmp_path):
    root = write(tmp_path, siblings(("0,4", (0, 4)), ("1,5", (1, 5)), ("2-3", (2, 3))))
    assert physical_cores(range(6), root) == 3
    assert physical_cores([0, 1], root) == 2
    assert physical_cores([0, 4], root) == 1
    assert physical_cores([0, 4, 7, 8], root) == 3  # of 7 and 8 nothing is known
    assert physical_cores(range(6), tmp_path / "elsewhere") == 6


CGROUPS = {
    "nothing": ({}, None),
    "v2, no limit": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
    "v2, at the top, as in a container": ({"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
    "v2, own group": ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "300000 100000\n"}, 3),
    "v2, a group above": (
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
            "sys/fs/cgroup/a/b/cpu.max": "300000 100000\n",
        },
        2,
    ),
    "v2, of another group": ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/b/cpu.max": "100000 100000\n"}, None),
    "v1": (
        {
            "proc/self/cgroup": "4:memory:/m\n2:cpu,cpuacct:/docker/x\n0::/\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us": "250000\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us": "50000\n",
        },
        5,
    ),
    "v1, at the top, as in a container": (
        {
            "proc/self/cgroup": "1:cpu:/docker/x\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        0.5,
    ),
    "v1, no limit": (
        {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"},
        None,
    ),
    "hybrid, v2 under unified": (
        {"proc/self/cgroup": "1:cpu:/\n0::/s\n", "sys/fs/cgroup/unified/s/cpu.max": "700000 100000\n"},
        7,
    ),
    "rubbish": ({"proc/self/cgroup": "::\nx\n0\n", "sys/fs/cgroup/cpu.max": "many\n"}, None),
    "zero": ({"sys/fs/cgroup/cpu.max": "0 0\n"}, None),
}


@pytest.mark.parametrize("case", CGROUPS)
def test_cgroup_limits(case, tmp_path):
    files, expected = CGROUPS[case]
    assert cgroup_cpus(write(tmp_path, files)) == expected


def test_the_least_limit_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("bitnet_ref.system.threads.usable_cpus", lambda: set(range(8)))
    assert machine_threads(tmp_path) == (8, "CPUs available to this process")
    write(tmp_path, siblings(*((f"{i},{i + 4}", (i, i + 4)) for i in range(4))))
    assert machine_threads(tmp_path) == (4, "physical cores of the 8 CPUs available to this process")
    write(tmp_path, {"sys/fs/cgroup/cpu.max": "250000 100000"})
    assert machine_threads(tmp_path) == (2, "cgroup limit of 2.5 CPUs")
    write(tmp_path, {"sys/fs/cgroup/cpu.max": "10000 100000"})
    assert machine_threads(tmp_path) == (1, "cgroup limit of 0.1 CPUs")
    write(tmp_path, {"sys/fs/cgroup/cpu.max": "900000 100000"})
    assert machine_threads(tmp_path)[0] == 4


# -- NumPy's BLAS ------------------------------------------------------------------------------------------------------


def blas_counts():
    from threadpoolctl import threadpool_info

    return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]


@pytest.fixture
def two_blas_threads():
    from threadpoolctl import threadpool_limits

    with threadpool_limits(limits=2, user_api="blas"):
        if not blas_counts() or set(blas_counts()) != {2}:
            pytest.skip("this NumPy has no BLAS whose threads can be set")
        yield


@pytest.mark.usefixtures("two_blas_threads")
def test_blas_keeps_to_the_count_inside_and_gets_its_own_back():
    with blas_threads(1):
        assert set(blas_counts()) == {1}
        with blas_threads(5):  # never more than it had, nor than the one around allows
            assert set(blas_counts()) == {1}
    assert set(blas_counts()) == {2}
    with pytest.raises(ValueError, match="inside"), blas_threads(1):
        raise ValueError("inside")
    assert set(blas_counts()) == {2}


@pytest.mark.usefixtures("two_blas_threads")
def test_blas_limits_of_overlapping_threads_leave_nothing_behind():
    first_in, first_may_leave = threading.Event(), threading.Event()

    def first():
        with blas_threads(1):
            first_in.set()
            first_may_leave.wait(10)

    other = threading.Thread(target=first)
    other.start()
    first_in.wait(10)
    with blas_threads(1):  # entered while the limit stands, left after the one who set it
        first_may_leave.set()
        other.join()
        assert set(blas_counts()) == {1}
    assert set(blas_counts()) == {2}


@pytest.mark.usefixtures("two_blas_threads")
def test_a_numpy_model_computes_on_its_threads(monkeypatch):
    import bitnet_ref
    from bitnet_ref.reference import layers

    seen, rms_norm = [], layers.rms_norm
    monkeypatch.setattr(layers, "rms_norm", lambda *args: (seen.append(set(blas_counts())), rms_norm(*args))[1])
    bitnet_ref.load(backend="numpy", threads=1).logits([1, 2])
    assert seen
    assert all(counts == {1} for counts in seen)
    assert set(blas_counts()) == {2}


TEAM = """
import resource, sys, threading
from pathlib import Path
import bitnet_ref

model = bitnet_ref.load("storyteller", backend="cython", threads=16)
model.generate("Once", max_tokens=2)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
threading.stack_size(256 << 20)  # so that few stacks fit, and no want of memory meets anything else
resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), resource.RLIM_INFINITY))
errors = []

def use():
    try:
        model.generate("Once", max_tokens=2)
    except bitnet_ref.errors.BackendError as error:
        errors.append(str(error))

thread = threading.Thread(target=use)
thread.start(), thread.join()
assert len(model.generate("Once", max_tokens=2).token_ids) == 2  # this thread has its team
print(__import__("json").dumps(errors))
"""


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="the limit of an address space is Linux's")
@pytest.mark.skipif(why_unavailable() is not None, reason="the extension is not built")
def test_a_thread_that_cannot_start_its_team_gets_an_error():
    """OpenMP would end the process."""
    (error,) = run_python(TEAM, env={"OMP_STACKSIZE": "256M"})
    assert re.match(r"the system starts only \d of the 15 threads .* pass a smaller `threads`", error)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64m", 64 << 20),
        (" 1 G ", 1 << 30),
        ("512", 512 << 10),
        ("65536B", 65536),
        ("1B", 0),
        ("-5", 0),
        ("x", 0),
        ("", 0),
    ],
)
def test_the_stacks_of_openmp(monkeypatch, text, size):
    from bitnet_ref.system.threads import openmp_stack_bytes

    monkeypatch.delenv("GOMP_STACKSIZE", raising=False)
    monkeypatch.setenv("OMP_STACKSIZE", text)
    assert openmp_stack_bytes() == size


GENERATE = """
import resource, sys
import bitnet_ref
try:
    model = bitnet_ref.load("storyteller", threads=16, backend="cython")
    if int(sys.argv[1]):
        pages = int(open("/proc/self/statm").read().split()[0])
        limit = pages * resource.getpagesize() + int(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    model.generate("Once upon a time, " * 20, max_tokens=2)
    print("a text")
except (bitnet_ref.errors.BitNetRefError, MemoryError) as error:
    print(type(error).__name__)
"""


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="limits on memory as Linux has them")
@pytest.mark.parametrize(("stack", "room"), [("2147483648K", 0), ("999999999G", 0), ("", 24 << 20), ("", 64 << 20)])
def test_no_memory_for_the_team_is_an_error(stack, room):
    """OpenMP would end the process, with exit code 1."""
    environment = {**os.environ, "OMP_STACKSIZE": stack}
    done = subprocess.run(
        [sys.executable, "-c", GENERATE, str(room)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] in ("BackendError", "TokenizerError", "MemoryError", "a"), done.stdout
    assert room or done.stdout == "BackendError\n"
