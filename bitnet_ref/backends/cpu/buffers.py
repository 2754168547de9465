"""Memory for the results of kernels: `Pool` reuses buffers that no array refers to; `Buffers` has a pool per thread.

A new array of megabytes is a new mapping: the system clears its pages at the first touch and takes them back when it is
freed, so each step of each layer would pay for memory that the step before has just freed.

Measured, 2B-4T's shape, 12 layers, 2 threads, against NumPy's arrays, median of paired ratios: a prompt of 64 tokens
1.0, of 192 1.04, of 512 1.065 times as fast; 20,000 pages of 4 KB per pass are no longer cleared.
"""

from __future__ import annotations

import math
import sys
import threading

import numpy as np
from numpy.typing import NDArray

FEW_TOKENS = 16  # results of fewer tokens are small; a decoding step does not compute their size
MIN_BYTES = 1 << 20  # the C library reuses smaller blocks by itself
MAX_FREE_BYTES = 128 << 20


class Pool:
    """Float32 arrays over reused buffers. `buffers`: all of them, in use or not, the last used last."""

    def __init__(self, max_free_bytes: float) -> None:
        """max_free_bytes: of buffers that no array refers to."""
        self.buffers: list[NDArray[np.uint8]] = []
        self._max_free_bytes = max_free_bytes

    def empty(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """An uninitialised array."""
        nbytes, buffers = 4 * math.prod(shape), self.buffers
        for i in range(len(buffers)):
            if nbytes <= buffers[i].size <= 2 * nbytes and _is_free(buffers, i):
                buffers.append(buffers.pop(i))
                break
        else:
            buffers.append(np.empty(nbytes, dtype=np.uint8))
            self._drop_free()
        return buffers[-1][:nbytes].view(np.float32).reshape(shape)

    def _drop_free(self) -> None:
        """Drop free buffers, the longest unused first, down to the maximum. The last buffer is in use."""
        free = [i for i in range(len(self.buffers) - 1) if _is_free(self.buffers, i)]
        excess = sum(self.buffers[i].size for i in free) - self._max_free_bytes
        for dropped, i in enumerate(free):
            if excess <= 0:
                break
            excess -= self.buffers.pop(i - dropped).size


class Buffers(threading.local):
    """A pool for each Python thread, so that no two threads find the same buffer free."""

    def __init__(self) -> None:  # runs once in each thread
        self._pool = Pool(MAX_FREE_BYTES)

    def empty(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """An uninitialised array."""
        if shape[0] < FEW_TOKENS or 4 * math.prod(shape) < MIN_BYTES:
            return np.empty(shape, dtype=np.float32)
        return self._pool.empty(shape)


def _is_free(buffers: list[NDArray[np.uint8]], i: int) -> bool:
    """Whether only the list refers to the buffer: every array over it holds a reference."""
    return sys.getrefcount(buffers[i]) == _FREE_COUNT


_HELD = [np.empty(0)]
_FREE_COUNT = sys.getrefcount(_HELD[0])
