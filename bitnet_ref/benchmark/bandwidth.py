"""The ceiling of everything that must read its weights: memory, read once and nothing done with it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ..backends.cpu import backend as cython_backend
from ..system.threads import resolve_threads

UNKNOWN_CACHE_BYTES = 32 << 20  # where the system does not say
CACHES_READ = 3  # a read of this many last-level caches comes from memory
LEAST_READ_BYTES, MOST_READ_BYTES = 64 << 20, 512 << 20


def last_level_cache_bytes() -> int:
    """The size of the largest cache that the first processor sees; a virtual machine may share it with others."""
    found = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        if text[:-1].isdecimal() and text[-1] in "KM":
            found.append(int(text[:-1]) << (10 if text[-1] == "K" else 20))
    return max(found, default=UNKNOWN_CACHE_BYTES)


class MemoryReader:
    """A buffer larger than the caches, and `read`, which goes through it on `threads` threads.

    The compiled `sum_words` reads it where the extension is built, else NumPy's sum, a share of it for each thread.
    """

    def __init__(self, threads: int | None = None, nbytes: int | None = None) -> None:
        if nbytes is None:
            nbytes = min(MOST_READ_BYTES, max(LEAST_READ_BYTES, CACHES_READ * last_level_cache_bytes()))
        self.threads = resolve_threads(threads)
        self.words = np.ones(max(1, nbytes // 8), dtype=np.uint64)  # written, so that each page is a page of its own
        compiled = cython_backend.why_unavailable() is None
        self.how = "sum_words" if compiled else "numpy.sum"
        self._pool = None if compiled else ThreadPoolExecutor(self.threads)

    @property
    def nbytes(self) -> int:
        return self.words.nbytes

    def read(self) -> int:
        """One pass: the sum of the words, which is their number."""
        if self._pool is None:
            return int(cython_backend._cpu.sum_words(self.words, self.threads))
        return sum(map(int, self._pool.map(np.sum, np.array_split(self.words, self.threads))))
