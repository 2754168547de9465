"""Arrays and launches on a device, for the host side of the kernels."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from ...errors import BackendError, DeviceError, NumericsError, OutOfMemory, ShapeError
from ...reference.layers import Array
from .device import Device, DeviceArray

THREADS = 256  # of a block of kernels with one thread per element
TROUBLES = {  # floats.cuh: enum Trouble
    1: "rms_norm: token {}",
    2: "quantize_activations: the activation of token {}",
    3: "lm_head: token {}",
    4: "KVCache.append: the cache's dtype cannot hold token {}: it",
    5: "dense_matmul: token {}, rounded to 16 bits,",
}
TAKE_ROWS = 6
SHELF_ROOM = 2  # caches whose storage is kept


class EmulatedArray(np.ndarray):
    """An array of the emulated device: a type of its own, as a GPU's arrays have.

    It refuses what CuPy would compute beside the device's stream, on numbers that are not there yet: arithmetic, and
    indices that copy.
    """

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        raise DeviceError(f"{ufunc.__name__} of an array of the device, beside its stream: use an op of the backend")

    def __getitem__(self, key: Any) -> Any:
        if any(isinstance(part, (list, np.ndarray)) for part in (key if isinstance(key, tuple) else (key,))):
            raise DeviceError("rows of an array of the device by a list of numbers: use take_rows")
        return super().__getitem__(key)


class Arena:
    """Arrays for one pass, allocated in the first one and given again, in the same order, in every later one."""

    def __init__(self, make: Callable[[tuple[int, ...], DTypeLike], DeviceArray]) -> None:
        self._make = make
        self._arrays: list[DeviceArray] = []
        self._scratch: dict[Hashable, DeviceArray] = {}
        self._next = 0

    def begin(self) -> None:
        """Start again with the first array."""
        self._next = 0

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        """The next array of the pass."""
        if self._next == len(self._arrays):
            self._arrays.append(self._make(shape, dtype))
        array = self._arrays[self._next]
        if array.shape != tuple(shape) or array.dtype != np.dtype(dtype):
            asked = f"{np.dtype(dtype)} {shape}"
            raise BackendError(f"a recorded step that asked for {array.dtype} {array.shape} now asks for {asked}")
        self._next += 1
        return array

    def scratch(self, shape: tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        """An array whose contents are not needed after the next kernels: the same one for all layers."""
        key = tuple(shape), np.dtype(dtype)
        if key not in self._scratch:
            self._scratch[key] = self._make(shape, dtype)
        return self._scratch[key]


class Shelf:
    """The storage of dropped caches, by shape: the last few, until a new cache takes them or the memory is needed."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Any] = {}

    def take(self, shape: Hashable) -> Any:
        """The storage of that shape, or None."""
        return self._kept.pop(shape, None)

    def put(self, shape: Hashable, storage: Any) -> None:
        """Keep it, unless the one that is there has recorded steps and this one none; drop the oldest of too many."""
        old = self._kept.pop(shape, None)
        self._kept[shape] = old if old is not None and old.steps and not storage.steps else storage
        while len(self._kept) > SHELF_ROOM:
            self._kept.pop(next(iter(self._kept)))

    def clear(self) -> bool:
        """Drop everything. -> whether there was anything"""
        had = bool(self._kept)
        self._kept.clear()
        return had


class Workspace:
    """A device with what every launch needs: arrays, the flag where kernels report NaN and Inf (`trouble`), the device
    copies of host vectors, and, while a step is recorded, its arena."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.arena: Arena | None = None
        self._vectors: dict[int, tuple[Array, DeviceArray]] = {}  # host vectors by id, with their device copies
        self._scratch = Arena(self.make)
        self._counters: dict[str, list[DeviceArray]] = {}
        self.shelf = Shelf()
        self._array_type: type = EmulatedArray if device.emulated else device.xp.ndarray
        self.trouble = self.zeros((1,), np.int32)

    @property
    def recording(self) -> bool:
        """Whether a step is being recorded, to be replayed: nothing may depend on this batch's lengths."""
        return self.arena is not None

    @contextmanager
    def arrays_of(self, arena: Arena) -> Iterator[None]:
        """Inside, arrays come from the arena, starting with its first."""
        arena.begin()
        self.arena = arena
        try:
            yield
        finally:
            self.arena = None

    # -- arrays --------------------------------------------------------------------------------------------------------

    def holds(self, array: Any) -> bool:
        """Whether it is an array of this device."""
        return isinstance(array, self._array_type)

    def make(self, shape: tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        """A new array with unknown contents."""
        try:
            array = self.device.empty(shape, dtype)
        except OutOfMemory:
            if not self.shelf.clear():
                raise
            gc.collect()  # recorded steps and their backend refer to each other
            array = self.device.empty(shape, dtype)
        return array.view(EmulatedArray) if self.device.emulated else array

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        """An array for a result: new, or while a step is recorded one of its arena."""
        return self.make(shape, dtype) if self.arena is None else self.arena.empty(shape, dtype)

    def scratch(self, shape: tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        """An array that only the next kernels need: within a pass the same one for all layers, so that no smaller array
        is put where the largest ones of a prompt were."""
        return (self._scratch if self.arena is None else self.arena).scratch(shape, dtype)

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """A pass that is not recorded: its scratch arrays are dropped at the end."""
        try:
            yield
        finally:
            self._scratch = Arena(self.make)

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        """An array of zeros."""
        array = self.empty(shape, dtype)
        self.device.fill(array, 0)
        return array

    def counters(self, name: str, size: int) -> DeviceArray:
        """So many int32 of a kept array of that name, zeros before and after each launch. A larger array does not
        replace the smaller, which recorded steps refer to."""
        arrays = self._counters.setdefault(name, [])
        if not arrays or len(arrays[-1]) < size:
            arrays.append(self.make((1 << (size - 1).bit_length(),), np.int32))
            self.device.fill(arrays[-1], 0)
        return arrays[-1][:size]

    def upload(self, value: Array) -> DeviceArray:
        """A host array on the device, bfloat16 as its bits (CuPy has none); anything else as it is."""
        if not isinstance(value, np.ndarray) or self.holds(value):
            return value
        value = np.ascontiguousarray(value)
        value = value.view(np.uint16) if value.dtype == ml_dtypes.bfloat16 else value
        array = self.make(value.shape, value.dtype)
        self.device.copy(array, value)
        return array

    def keep_vector(self, vector: Array) -> None:
        """Put a norm's weight or a bias on the device; `vector` finds it by the host array's identity."""
        self._vectors[id(vector)] = vector, self.upload(np.ascontiguousarray(vector, dtype=np.float32))

    def vector(self, vector: Array) -> DeviceArray:
        """The device copy of a float32 vector: the kept one, a new one, or the array itself if it is on the device."""
        if self.holds(vector):
            return vector
        known = self._vectors.get(id(vector))
        return known[1] if known is not None else self.upload(np.ascontiguousarray(vector, dtype=np.float32))

    def download(self, array: Any) -> Array:
        """A device array as a NumPy array. Raises NumericsError if a kernel met NaN or Inf where NumPy's op raises."""
        host = self.device.to_host(array)
        self.raise_trouble(int(self.device.to_host(self.trouble)[0]))
        return host

    def raise_trouble(self, code: int) -> None:
        """Raises the error that the `trouble` flag holds, if any, and clears the flag."""
        if code:
            self.device.fill(self.trouble, 0)
            if code & 7 == TAKE_ROWS:
                raise ShapeError("take_rows", expected="ids of rows of the table", got=f"another id at {code >> 3}")
            raise NumericsError(f"{TROUBLES[code & 7].format(code >> 3)} holds NaN or Inf")

    def close(self) -> None:
        """Drop all kept arrays."""
        self._vectors.clear()
        self._counters.clear()
        self.shelf.clear()

    # -- launches ------------------------------------------------------------------------------------------------------

    def launch(self, file: str, name: str, grid: tuple[int, ...], block: int, *args: Any, shared: int = 0) -> None:
        """grid blocks of `block` threads, unless there is nothing to do. A Python float is a double to the kernel."""
        if 0 not in grid:
            plain = [np.float64(value) if type(value) is float else value for value in args]
            self.device.kernel(file, name)(grid, block, plain, shared)

    def each(self, file: str, name: str, count: int, *args: Any) -> None:
        """A kernel with one thread per element."""
        self.launch(file, name, (-(-count // THREADS),), THREADS, *args)
