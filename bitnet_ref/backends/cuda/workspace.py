"""Arrays and launches on a device, for the host side of the kernels: `Workspace`; `Arena`, whose arrays come again."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from ...errors import BackendError, BackendUnavailable, NumericsError, OutOfMemory
from .device import Device

THREADS = 256  # of a block of kernels with one thread an element
_TROUBLES = {1: "rms_norm: token {}", 2: "quantize_activations: the activation of token {}", 3: "lm_head: token {}"}
_TROUBLES[5] = "dense_matmul: token {}, rounded to 16 bits,"
_TROUBLES[4] = "KVCache.append: the cache's dtype cannot hold token {}: it"


class EmulatedArray(np.ndarray):
    """An array of the emulated device, so that it cannot be taken for one of the host."""


class Arena:
    """Arrays for one pass, made in the first one and handed out again, in the same order, in every later one."""

    def __init__(self, make: Callable[[tuple[int, ...], DTypeLike], Any]) -> None:
        self._make = make
        self._arrays: list[Any] = []
        self._scratch: dict[Any, Any] = {}
        self._next = 0

    def begin(self) -> None:
        """From the first array again."""
        self._next = 0

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """The next array of the pass."""
        if self._next == len(self._arrays):
            self._arrays.append(self._make(shape, dtype))
        array = self._arrays[self._next]
        if array.shape != tuple(shape) or array.dtype != np.dtype(dtype):
            asked = f"{np.dtype(dtype)} {shape}"
            raise BackendError(f"a recorded step that asked for {array.dtype} {array.shape} now asks for {asked}")
        self._next += 1
        return array

    def scratch(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """An array whose contents nobody needs after the next kernels: the same one for all layers."""
        key = tuple(shape), np.dtype(dtype)
        if key not in self._scratch:
            self._scratch[key] = self._make(shape, dtype)
        return self._scratch[key]


class Shelf:
    """What dropped caches have left, by shape: the last few, until somebody takes them or the memory is needed."""

    def __init__(self, room: int = 2) -> None:
        self._room = room
        self._kept: dict[Hashable, Any] = {}

    def take(self, shape: Hashable) -> Any:
        """What there is of that shape, or None."""
        return self._kept.pop(shape, None)

    def put(self, shape: Hashable, storage: Any) -> None:
        """Keep it, or what is there if only that has recorded steps; let go of the oldest when there are too many."""
        kept = self._kept.pop(shape, None)
        self._kept[shape] = kept if kept is not None and kept.steps and not storage.steps else storage
        while len(self._kept) > self._room:
            self._kept.pop(next(iter(self._kept)))

    def clear(self) -> bool:
        """Let go of everything. -> whether there was anything"""
        had = bool(self._kept)
        self._kept.clear()
        return had


class Workspace:
    """A device, the place where its kernels note NaN and Inf (`trouble`), and, while a step is recorded, its arena."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.arena: Arena | None = None
        self._scratch = Arena(self.make)
        self.shelf = Shelf()
        self._array_type: type = EmulatedArray if device.emulated else device.xp.ndarray
        self.trouble = self.zeros((1,), np.int32)

    @property
    def recording(self) -> bool:
        """Whether what runs is a step that will be replayed: nothing may depend on this batch's lengths."""
        return self.arena is not None

    @contextmanager
    def arrays_of(self, arena: Arena, overlap: bool = True) -> Iterator[None]:
        """What runs in this takes its arrays from the arena, from its first again; and its launches overlap, where the
        device can do that."""
        arena.begin()
        self.arena = arena
        self.device.overlaps = overlap and (self.device.can_overlap or self.device.emulated)
        try:
            yield
        finally:
            self.arena, self.device.overlaps = None, False

    # -- arrays --------------------------------------------------------------------------------------------------------

    def holds(self, array: Any) -> bool:
        """Whether it is an array of this device."""
        return isinstance(array, self._array_type)

    def make(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """A new array, its contents unknown."""
        try:
            array = self.device.empty(shape, dtype)
        except OutOfMemory:
            if not self.shelf.clear():
                raise
            gc.collect()  # recorded steps and their backend refer to each other
            array = self.device.empty(shape, dtype)
        return array.view(EmulatedArray) if self.device.emulated else array

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """An array for a result: new, or while a step is recorded the step's own."""
        return self.make(shape, dtype) if self.arena is None else self.arena.empty(shape, dtype)

    def scratch(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """An array that is needed by the next kernels only; of a pass the same one for all layers, so that nothing
        smaller is put where the largest arrays of a prompt were."""
        return (self._scratch if self.arena is None else self.arena).scratch(shape, dtype)

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """A pass that is not recorded: what it had as scratch goes with it."""
        try:
            yield
        finally:
            self._scratch = Arena(self.make)

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """An array of zeros."""
        array = self.empty(shape, dtype)
        self.device.fill(array, 0)
        return array

    def upload(self, value: Any) -> Any:
        """A host array on the device, bfloat16 as its bits (CuPy has none); anything else as it is."""
        if not isinstance(value, np.ndarray) or self.holds(value):
            return value
        value = np.ascontiguousarray(value)
        value = value.view(np.uint16) if value.dtype == ml_dtypes.bfloat16 else value
        array = self.make(value.shape, value.dtype)
        self.device.copy(array, value)
        return array

    def download(self, *arrays: Any) -> list[NDArray]:
        """Device arrays as NumPy arrays. NumericsError when a kernel has met NaN or Inf where the reference raises."""
        host = [self.device.to_host(array) for array in arrays]
        self.raise_trouble(int(self.device.to_host(self.trouble)[0]))
        return host

    def raise_trouble(self, code: int) -> None:
        """NumericsError for what `trouble` holds, which is zero again then; unless it is zero."""
        if code:
            self.device.fill(self.trouble, 0)
            raise NumericsError(f"{_TROUBLES[code & 7].format(code >> 3)} holds NaN or Inf")

    # -- launches ------------------------------------------------------------------------------------------------------

    def launch(self, file: str, name: str, grid: tuple[int, ...], block: int, *args: Any, shared: int = 0) -> None:
        """grid blocks of `block` threads, unless there is nothing to do. A Python float is a double to the kernel."""
        if 0 not in grid:
            plain = [np.float64(value) if type(value) is float else value for value in args]
            self.device.kernel(file, name)(grid, block, plain, shared)

    def each(self, file: str, name: str, count: int, *args: Any) -> None:
        """A kernel with one thread an element."""
        self.launch(file, name, (-(-count // THREADS),), THREADS, *args)


def parse_bytes(limit: int | str | None) -> int | None:
    """8589934592, "8GiB" or "8 GB" as a number of bytes.

    >>> parse_bytes("1.5 GiB")
    1610612736
    """
    if limit is None:
        return limit
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", str(limit), re.IGNORECASE)
    unit = 0 if found is None else (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " ")
    if found is None or (size := int(float(found[1]) * unit)) < 1:
        raise BackendUnavailable(f"memory_limit: expected bytes, or a text like '8GiB', got {limit!r}")
    return size
