"""Memory of this process and of the system."""

from __future__ import annotations

import os
import sys
from pathlib import Path

CGROUP_FILES = (  # (limit, use) of cgroups 2 and 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


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


def available_bytes() -> int | None:
    """Memory available without swapping, in the system and in the cgroup. None where the system does not say."""
    sizes = []
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        sizes.append(int(lines["MemAvailable"].split()[0]) * 1024)
    except (OSError, ValueError, KeyError):
        pass
    for limit, used in CGROUP_FILES:
        try:
            sizes.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # "max": no limit
            continue
    return max(0, min(sizes)) if sizes else None
