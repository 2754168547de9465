"""The one owner of the thread count.

The first of these that is set: the argument; BITNET_REF_NUM_THREADS; OMP_NUM_THREADS; what the machine gives this
process. The last is the number of physical cores among the processors that the process may run on (a core's second
hardware thread adds nothing to loops that fill the vector units, or wait for memory), limited by its cgroup's quota.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import BackendError
from .cgroups import ROOT, cgroup_folders
from .forks import ForkLock

MAX_THREADS = 4096
_VARIABLES = ("BITNET_REF_NUM_THREADS", "OMP_NUM_THREADS")
LEAST_STACK_BYTES = 1 << 15  # that Python takes
_stack_size_lock = ForkLock()
_team = threading.local()  # .size: max OpenMP threads that this thread may start
_bound_cpus: frozenset[int] = frozenset()  # the processors that OpenMP binds its threads to, if it binds them


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


def check_team(threads: int, starts_now: bool = True) -> None:
    """Raise BackendError unless the calling thread can start the others of its team now: OpenMP would end the process.

    Every thread that computes has a team of its own, so each of them asks once. starts_now: the team starts after this
    call; else what is loaded until then may take the memory that it needs, and the thread asks again.
    """
    if getattr(_team, "size", 1) >= threads:
        return
    done, team = threading.Event(), list[threading.Thread]()
    stack_bytes = openmp_stack_bytes()
    try:
        with thread_stack_bytes(stack_bytes):
            for _ in range(threads - 1):
                thread = threading.Thread(target=done.wait, daemon=True)
                thread.start()
                team.append(thread)
    except (RuntimeError, MemoryError, ValueError, OverflowError) as error:
        stack = f", each with a stack of {stack_bytes} bytes (OMP_STACKSIZE)" if stack_bytes else ""
        raise BackendError(
            f"the system starts only {len(team)} of the {threads - 1} threads that compute beside this one{stack}; "
            "pass a smaller `threads` (BITNET_REF_NUM_THREADS), or raise the limit on processes (ulimit -u, the "
            "cgroup's pids.max) or on memory (ulimit -v)"
        ) from error
    finally:
        done.set()
        for thread in team:
            thread.join()
    if starts_now:
        _team.size = threads


def openmp_stack_bytes() -> int:
    """The size of the stack of OpenMP's threads, by its variables; 0: the system's usual one.

    A value that OpenMP does not understand is ignored by it.
    """
    for name in ("OMP_STACKSIZE", "GOMP_STACKSIZE"):
        match = re.fullmatch(r"([0-9]{1,20})\s*([bkmgBKMG]?)", os.environ.get(name, "").strip())
        if match is not None:
            size = int(match[1]) << {"b": 0, "": 10, "k": 10, "m": 20, "g": 30}[match[2].lower()]
            if LEAST_STACK_BYTES <= size < 1 << 64:
                return size
    return 0


@contextmanager
def thread_stack_bytes(size: int) -> Iterator[None]:
    """Python threads that start within have stacks of this size; 0: of the usual one."""
    with _stack_size_lock:  # the size is a setting of the process
        before = threading.stack_size(size)
        try:
            yield
        finally:
            threading.stack_size(before)


def machine_threads(root: Path = ROOT) -> tuple[int, str]:
    """(count, the limit that sets it) without any setting. root: the folder of proc and sys, for tests."""
    cpus = usable_cpus()
    whose = "that OpenMP binds its threads to" if _bound_cpus else "available to this process"
    count, source = len(cpus), f"CPUs {whose}"
    if (cores := physical_cores(cpus, root)) < count:
        count, source = cores, f"physical cores of the {count} CPUs {whose}"
    quota = cgroup_cpus(root)
    if quota is not None and quota < count:
        count, source = max(1, int(quota)), f"cgroup limit of {quota:g} CPUs"
    return count, source


def available_cpus() -> int:
    """Threads that this process can usefully run at once; see `machine_threads`."""
    return machine_threads()[0]


def set_bound_cpus(cpus: Iterable[int]) -> None:
    """Take these processors for those that this process may run on; none of them: the ones that the system names.

    If OpenMP binds threads (OMP_PROC_BIND, OMP_PLACES, GOMP_CPU_AFFINITY), it binds the main thread too, as soon as the
    extension is loaded; the system then names only that thread's processors.
    """
    global _bound_cpus
    _bound_cpus = frozenset(cpus)


def usable_cpus() -> set[int]:
    """Numbers of the processors that this process may run on."""
    if _bound_cpus:
        return set(_bound_cpus)
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def physical_cores(cpus: Iterable[int], root: Path = ROOT) -> int:
    """How many cores these processors have: hardware threads of one core count once. Unknown ones count as cores."""
    cores: set[str] = set()
    for cpu in cpus:
        try:
            cores.add((root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip())
        except (OSError, UnicodeDecodeError):
            cores.add(f"{cpu}")
    return len(cores)


def cgroup_cpus(root: Path = ROOT) -> float | None:
    """The minimum CPU quota of this process's cgroup and its parents (v2 cpu.max, v1 cfs_quota_us), or None."""
    limits = [_quota(group) for group in cgroup_folders("cpu", root)]
    return min((limit for limit in limits if limit is not None), default=None)


def _quota(group: Path) -> float | None:
    """The group's quota in CPUs; None without a limit, or if there is no such group."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):  # versions 2 and 1
        with suppress(OSError, ValueError):  # ValueError: "max", no limit
            quota, period = map(int, " ".join((group / name).read_text() for name in names).split())
            if quota > 0 < period:  # -1: no limit
                return quota / period
    return None


def _check_count(value: object, source: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_THREADS:
        raise BackendError(f"{source}: expected a whole number of threads, 1 to {MAX_THREADS}, got {value!r}")
    return value
