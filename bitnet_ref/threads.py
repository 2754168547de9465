"""The one owner of the thread count."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import BackendError

MOST_THREADS = 4096  # OpenMP ends the process when the system cannot start as many as it is asked for
_VARIABLES = ("BITNET_REF_NUM_THREADS", "OMP_NUM_THREADS")


def resolve_threads(threads: int | None = None) -> int:
    """How many threads to use: the argument, else BITNET_REF_NUM_THREADS, else OMP_NUM_THREADS, else what the machine
    gives this process (its CPU affinity and its cgroup's quota). Raises BackendError for anything but a positive int.
    """
    return thread_choice(threads)[0]


def thread_choice(threads: int | None = None) -> tuple[int, str]:
    """(count, where it came from)"""
    if threads is not None:
        return _positive(threads, "threads"), "argument"
    for name in _VARIABLES:
        text = os.environ.get(name, "").split(",")[0].strip()  # OMP_NUM_THREADS may list a count for each nesting level
        if text:
            return _positive(int(text) if text.isdecimal() and len(text) < 10 else text, name), name
    return available_cpus(), "CPUs available to this process"


def available_cpus() -> int:
    """CPUs this process may run on: the affinity mask, cut to the cgroup's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            count = min(count, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup v2 here
        pass
    return count


def _positive(value: object, source: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_THREADS:
        raise BackendError(f"{source}: expected a whole number of threads, 1 to {MOST_THREADS}, got {value!r}")
    return value
