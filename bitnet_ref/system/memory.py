"""Memory of this process and of the system."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from .cgroups import cgroup_folders


def peak_memory_bytes() -> int:
    """The maximum memory that this process has used (ru_maxrss: kilobytes on Linux, bytes on macOS)."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def memory_bytes() -> int | None:
    """The memory that this process uses now; None where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def cgroup_files() -> Iterator[tuple[Path, Path]]:
    """The files of the limit and of the use, in bytes, of this process's memory cgroup and of each one around it."""
    for folder in cgroup_folders("memory"):
        yield folder / "memory.max", folder / "memory.current"
        yield folder / "memory.limit_in_bytes", folder / "memory.usage_in_bytes"


def available_bytes() -> int | None:
    """Memory available without swapping, in the system and in the cgroup. None where the system does not say."""
    sizes = []
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        sizes.append(int(lines["MemAvailable"].split()[0]) * 1024)
    except (OSError, ValueError, KeyError):
        pass
    for limit, used in cgroup_files():
        try:
            sizes.append(int(limit.read_text()) - int(used.read_text()) + _file_bytes(used.with_name("memory.stat")))
        except (OSError, ValueError, KeyError):  # "max": no limit
            continue
    return max(0, min(sizes)) if sizes else None


def _file_bytes(path: Path) -> int:
    """Of a cgroup's use, the contents of files that the system gives up when a process needs memory."""
    lines = dict(line.split() for line in path.read_text().splitlines())
    prefix = "total_" if "total_inactive_file" in lines else ""  # cgroups 1: with those below it
    return sum(int(lines[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))
