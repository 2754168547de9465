"""What this machine can do at most: bytes read per second, and multiply-adds per second of a product instruction."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from ..backends import Backend
from ..backends.cpu import extension
from ..system.threads import resolve_threads
from .timing import Action

UNKNOWN_CACHE_BYTES = 32 << 20  # assumed where the system does not report the cache size
CACHES_READ = 3  # a buffer of this many last-level caches is read from memory
MIN_READ_BYTES, MAX_READ_BYTES = 64 << 20, 512 << 20
PEAK_ROUNDS = 1 << 18  # of a dozen instructions: about 1 ms
INSTRUCTIONS = {
    "avx2": "vpmaddubsw + vpaddw, 256 bits",
    "avxvnni": "vpdpbusd, 256 bits",
    "avx512": "vpdpbusd, 512 bits",
    "amx": "tdpbsud, tiles",
}


def last_level_cache_bytes() -> int:
    """The size of the largest cache of the first processor. A virtual machine may share it with others."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        if text[:-1].isdecimal() and text[-1] in "KM":
            sizes.append(int(text[:-1]) << (10 if text[-1] == "K" else 20))
    return max(sizes, default=UNKNOWN_CACHE_BYTES)


class MemoryReader:
    """A buffer larger than the caches, and `read`, which sums it on `threads` threads.

    `how` names what reads it: the compiled `sum_words` where the extension is built, else NumPy's sum.
    """

    def __init__(self, threads: int | None = None, nbytes: int | None = None) -> None:
        if nbytes is None:
            nbytes = min(MAX_READ_BYTES, max(MIN_READ_BYTES, CACHES_READ * last_level_cache_bytes()))
        self.threads = resolve_threads(threads)
        self.words = np.ones(max(1, nbytes // 8), dtype=np.uint64)  # written, so that each page has its own memory
        compiled = extension.why_unavailable() is None
        self.how = "sum_words" if compiled else "numpy.sum"
        self._pool = None if compiled else ThreadPoolExecutor(self.threads)

    @property
    def nbytes(self) -> int:
        return self.words.nbytes

    def read(self) -> int:
        """Read the buffer once.   -> the sum of its words, which is their number"""
        if self._pool is None:
            return int(extension._cpu.sum_words(self.words, self.threads))
        return sum(map(int, self._pool.map(np.sum, np.array_split(self.words, self.threads))))


def peak_of(backend: Backend) -> tuple[Action, int] | None:
    """The product instruction of the backend's kernel set, on its threads: (what to time, multiply-adds per call).

    None for a backend, or a kernel set, whose instruction is not known.
    """
    name = getattr(backend, "simd", None)
    if name not in INSTRUCTIONS:
        return None
    number = list(extension.simd_variants()).index(name)
    call = partial(extension._cpu.peak_multiply_adds, number, PEAK_ROUNDS, backend.threads)
    return call, call()
