"""Memory for weights, which every token reads in full: few large mappings, in huge pages where the system has them.

The hardware prefetcher stops at the end of a 4 KB page, and 500 MB are 130,000 pages, far more than the TLB holds.
NumPy asks for huge pages only for arrays of 4 MB and more, and their ends stay in small pages: of 2B-4T's matrices
only those of the feed-forward are large enough.

Measured, 2 threads of a quiet Cascade Lake Xeon (memory read 21 GB/s), decoding 2B-4T's shape, median of paired ratios:
30 layers 1.04 times as fast as with NumPy's arrays, 12 layers 1.03; matrices of 2560 x 2560 alone 17 GB/s instead of
14 to 15. When other programs take half of the memory's rate: no gain.
"""

from __future__ import annotations

import math
import mmap
import threading

import numpy as np
from numpy.typing import NDArray

HUGE_PAGE = 2 << 20
MAP_BYTES = 64 << 20  # per mapping; untouched pages take no memory
ALIGNMENT = 64  # bytes: a vector, and a cache line
MIN_BYTES = 64 << 10  # smaller arrays are ordinary ones


class HugePages:
    """Hands out arrays from its mappings. A mapping lives as long as an array in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = np.empty(0, dtype=np.uint8)  # the unused end of the last mapping

    def empty(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """An uninitialised array, aligned to 64 bytes unless it is small."""
        nbytes = math.prod(shape)
        if nbytes < MIN_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
            return np.empty(shape, dtype=np.uint8)
        with self._lock:
            if self._rest.size < nbytes:
                self._rest = _map_memory(max(nbytes, MAP_BYTES))
            array = self._rest[:nbytes]
            self._rest = self._rest[-(-nbytes // ALIGNMENT) * ALIGNMENT :]
        return array.reshape(shape)


def _map_memory(nbytes: int) -> NDArray[np.uint8]:
    """At least nbytes bytes, starting at a huge page."""
    try:  # private: a shared mapping, Python's default, gets no huge pages
        memory = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a system without them, or a limit on the address space
        return np.empty(nbytes, dtype=np.uint8)
    mapped = np.frombuffer(memory, dtype=np.uint8)
    return mapped[-mapped.ctypes.data % HUGE_PAGE :]
