"""The one owner of the thread count.

The first of these that is set: the argument; BITNET_REF_NUM_THREADS; OMP_NUM_THREADS; what the machine gives this
process. The last is the number of physical cores among the processors that the process may run on (a core's second
hardware thread adds nothing to loops that fill the vector units, or wait for memory), limited by its cgroup's quota.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from ..errors import BackendError

MAX_THREADS = 4096  # OpenMP ends the process when the system cannot start all of them
_VARIABLES = ("BITNET_REF_NUM_THREADS", "OMP_NUM_THREADS")
_ROOT = Path("/")  # where /proc and /sys are


def resolve_threads(threads: int | None = None) -> int:
    """How many threads to use. Raises BackendError for anything but a positive int."""
    return thread_choice(threads)[0]


def thread_choice(threads: int | None = None) -> tuple[int, str]:
    """(count, its source)"""
    if threads is not None:
        return _check_count(threads, "threads"), "argument"
    for name in _VARIABLES:
        text = os.environ.get(name, "").split(",")[0].strip()  # OMP_NUM_THREADS may list a count for each nesting level
        if text:
            return _check_count(int(text) if text.isdecimal() and len(text) < 10 else text, name), name
    return machine_threads()


def machine_threads(root: Path = _ROOT) -> tuple[int, str]:
    """(count, the limit that sets it) without any setting. root: the folder of proc and sys, for tests."""
    cpus = usable_cpus()
    count, source = len(cpus), "CPUs available to this process"
    if (cores := physical_cores(cpus, root)) < count:
        count, source = cores, f"physical cores of the {count} CPUs available to this process"
    quota = cgroup_cpus(root)
    if quota is not None and quota < count:
        count, source = max(1, int(quota)), f"cgroup limit of {quota:g} CPUs"
    return count, source


def available_cpus() -> int:
    """Threads that this process can usefully run at once; see `machine_threads`."""
    return machine_threads()[0]


def usable_cpus() -> set[int]:
    """Numbers of the processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def physical_cores(cpus: Iterable[int], root: Path = _ROOT) -> int:
    """How many cores these processors have: hardware threads of one core count once. Unknown ones count as cores."""
    cores: set[str] = set()
    for cpu in cpus:
        try:
            cores.add((root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip())
        except (OSError, UnicodeDecodeError):
            cores.add(f"{cpu}")
    return len(cores)


def cgroup_cpus(root: Path = _ROOT) -> float | None:
    """The minimum CPU quota of this process's cgroup and its parents (v2 cpu.max, v1 cfs_quota_us), or None.

    A container usually sees its own group at the top of the tree, whatever /proc/self/cgroup says, so the top is read
    too.
    """
    top, limits = root / "sys/fs/cgroup", []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    groups = {"": "/"}  # controllers -> the group's path; "" is version 2
    for line in lines:
        if match := re.fullmatch("[^:]*:([^:]*):(/.*)", line):
            groups[match[1]] = match[2]
    for controllers, path in {"cpu": "/", **groups}.items():
        if controllers == "":
            tops, read = (top, top / "unified"), _quota_v2
        elif "cpu" in controllers.split(","):
            tops, read = (top / controllers, top / "cpu"), _quota_v1
        else:
            continue
        for folder in tops:
            group = folder / path.strip("/")
            limits += [read(each) for each in (group, *group.parents) if each == folder or folder in each.parents]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def _quota_v2(group: Path) -> float | None:
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return int(quota) / int(period) if quota != "max" and int(quota) > 0 < int(period) else None
    except (OSError, ValueError):  # no such group, or not of this version
        return None


def _quota_v1(group: Path) -> float | None:
    try:
        quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return quota / period if quota > 0 < period else None  # -1: no limit
    except (OSError, ValueError):
        return None


def _check_count(value: object, source: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_THREADS:
        raise BackendError(f"{source}: expected a whole number of threads, 1 to {MAX_THREADS}, got {value!r}")
    return value
