"""Memory for the large results of a prompt's steps, and for all of a recorded one (`recorded_step.py`), used again when
nobody holds what was in it.

A new array of megabytes is a new map: the system clears its pages at the first touch, and takes them back when the
array goes. Each step of each layer then pays for memory that the step before has just given up.

Measured, 2B-4T's shape, 12 layers, 2 threads, in turns with NumPy's arrays, median of the ratios: a prompt of 64 tokens
the same, of 192 1.04 and of 512 1.065 times as fast; 20,000 pages of 4 KB a pass are no longer cleared.
"""

from __future__ import annotations

import math
import sys
import threading

import numpy as np
from numpy.typing import NDArray

FEW = 16  # tokens, whose results are small: a step of decoding does not stop to reckon how small
SMALLEST = 1 << 20  # bytes; the C library keeps smaller ones by itself
MOST = 128 << 20  # bytes kept that nobody holds


class Pool:
    """Memory for float32 arrays. `kept`: all of it that is not let go of, in use or not, the last used last."""

    def __init__(self, most: float) -> None:
        """most: bytes kept that nobody holds"""
        self.kept: list[NDArray[np.uint8]] = []
        self._most = most

    def empty(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """An array of that shape whose content is not set."""
        nbytes, kept = 4 * math.prod(shape), self.kept
        for i in range(len(kept)):
            if nbytes <= kept[i].size <= 2 * nbytes and _free(kept, i):
                kept.append(kept.pop(i))
                break
        else:
            kept.append(np.empty(nbytes, dtype=np.uint8))
            _drop(kept, self._most)
        return kept[-1][:nbytes].view(np.float32).reshape(shape)


class Buffers(threading.local):
    """Hands out float32 arrays. Each thread of Python has its own, so that no two find the same one free."""

    def __init__(self) -> None:  # called anew in each thread
        self._pool = Pool(MOST)

    def empty(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """An array of that shape whose content is not set."""
        if shape[0] < FEW or 4 * math.prod(shape) < SMALLEST:
            return np.empty(shape, dtype=np.float32)
        return self._pool.empty(shape)


def _free(kept: list[NDArray[np.uint8]], i: int) -> bool:
    """Whether only the list holds it: every array made of it does, and so does whatever is made of those."""
    return sys.getrefcount(kept[i]) == _ALONE


_HELD = [np.empty(0)]
_ALONE = sys.getrefcount(_HELD[0])


def _drop(kept: list[NDArray[np.uint8]], most: float) -> None:
    """Lets go of free ones, the longest unused first, down to `most` bytes of them; the last is the caller's."""
    free = [i for i in range(len(kept) - 1) if _free(kept, i)]
    too_much = sum(kept[i].size for i in free) - most
    for count, i in enumerate(free):
        if too_much <= 0:
            break
        too_much -= kept.pop(i - count).size
