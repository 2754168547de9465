"""How CuPy's memory pool shares out a card's memory, for the emulated device: the count of it, not the memory.

A program's arrays may be well below a limit that its pool has reached. The pool takes chunks from the card, splits them
for smaller arrays and joins what is free side by side; only a chunk that is free as a whole can be given back, which is
done when the limit is met, and by `trim`.

Source: CuPy, "Memory Management", and what its `SingleDeviceMemoryPool` does.
"""

from __future__ import annotations

import threading
from collections import deque

UNIT = 512  # bytes: every array is rounded up to it


class Piece:
    """Of a chunk: the number of the array that has it, or None."""

    def __init__(self, size: int, array: int | None = None) -> None:
        self.size, self.array = size, array


class EmulatedPool:
    """limit: the most bytes that it takes from the card. used, held: bytes that arrays have, and that it has taken."""

    def __init__(self, limit: int | None) -> None:
        self.limit, self.used, self.held, self.peak = limit, 0, 0, 0
        self._chunks: list[list[Piece]] = []
        self._places: dict[int, list[Piece]] = {}  # array -> its chunk
        self._freed: deque[int] = deque()  # arrays that are gone, not yet counted
        self._lock = threading.Lock()

    def take(self, array: int, size: int) -> bool:
        """Room for an array, in the smallest free piece that has it or a new chunk.   -> whether there is"""
        size += -size % UNIT
        with self._lock:
            self._settle()
            chunk = self._split(array, size) or self._new_chunk(array, size)
            if chunk is None:
                return False
            self._places[array] = chunk
            self.used += size
            self.peak = max(self.peak, self.used)
            return True

    def free(self, array: int) -> None:
        """The array is gone. May be called by a finalizer, in the middle of anything here."""
        self._freed.append(array)

    def settle(self) -> None:
        """Count what is gone."""
        with self._lock:
            self._settle()

    def trim(self) -> None:
        """Give back every chunk that is free as a whole."""
        with self._lock:
            self._settle()
            self._trim()

    def _split(self, array: int, size: int) -> list[Piece] | None:
        pieces = ((piece, chunk) for chunk in self._chunks for piece in chunk)
        fits = [(piece, chunk) for piece, chunk in pieces if piece.array is None and piece.size >= size]
        if not fits:
            return None
        piece, chunk = min(fits, key=lambda each: each[0].size)
        at = chunk.index(piece)
        chunk[at : at + 1] = [Piece(size, array), *([Piece(piece.size - size)] if piece.size > size else [])]
        return chunk

    def _new_chunk(self, array: int, size: int) -> list[Piece] | None:
        if self.limit is not None and self.held + size > self.limit:
            self._trim()
            if self.held + size > self.limit:
                return None
        self._chunks.append([Piece(size, array)])
        self.held += size
        return self._chunks[-1]

    def _settle(self) -> None:
        while self._freed:
            array = self._freed.popleft()
            chunk, joined = self._places.pop(array), list[Piece]()
            for piece in chunk:
                if piece.array == array:
                    self.used -= piece.size
                    piece.array = None
                if joined and joined[-1].array is None and piece.array is None:
                    joined[-1].size += piece.size
                else:
                    joined.append(piece)
            chunk[:] = joined

    def _trim(self) -> None:
        self._chunks = [chunk for chunk in self._chunks if len(chunk) > 1 or chunk[0].array is not None]
        self.held = sum(piece.size for chunk in self._chunks for piece in chunk)
