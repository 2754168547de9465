"""How much memory this process has needed."""

from __future__ import annotations

import sys


def peak_memory_bytes() -> int:
    """The most memory this process has held (ru_maxrss: kilobytes on Linux, bytes on macOS)."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
