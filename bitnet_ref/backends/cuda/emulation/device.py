"""A CUDA device that is the host: it runs the same `.cu` files, built by the host's C++ compiler.

For tests and for reading kernels where there is no GPU (`BITNET_REF_CUDA=emulated`): some thousand times slower than a
GPU, and stricter. `kernels/cuda/emulated.h` says which errors it finds, `build.py` how the files are compiled.

A GPU may do its work at any time between the call and the wait. The device that `open_device` returns is as late as
possible: nothing runs before a wait, so a missing wait shows. With `CUDA_LAUNCH_BLOCKING=1` every call runs at once, as
with a GPU: errors are raised where they happen.

`BITNET_REF_CUDA_SANITIZE=1` builds with AddressSanitizer, which must be loaded before Python is:
LD_PRELOAD=$(gcc -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from ....errors import BackendUnavailable, DeviceError, OutOfMemory, ShapeError
from ....reference.layers import Array
from ..device import Device, DeviceArray, DeviceGraph, Event, MemoryInfo, Size, check_copy, plain_launch
from .build import compiled, kernel_names, why_unavailable

UNWRITTEN = 0xFF  # the bytes of new memory: NaN as a float, -1 as an integer

# An H200's figures, so that tests run the launch sizes of a real GPU.
MULTIPROCESSORS = 132
L2_BYTES = 60 << 20
SHARED_BYTES = 227 << 10

_KINDS = {"int32": "i", "uint32": "i", "float32": "f", "float64": "d", "int64": "l", "uint64": "l"}
_numbers = itertools.count()  # of the devices
_one_at_a_time = threading.Lock()  # a compiled file keeps the state of its launch in static variables


class _Launch(ctypes.Structure):
    """`emulated::Launch`"""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("dynamic_bytes", ctypes.c_uint),
        ("order", ctypes.c_uint),
    )


class EmulatedKernel:
    """A kernel in a shared library of the host."""

    def __init__(self, device: EmulatedDevice, library: ctypes.CDLL, file: str, name: str) -> None:
        self.name, self._device, self._file = name, device, file
        kinds = library[f"emulated_kinds_{name}"]
        kinds.restype = ctypes.c_char_p
        self.kinds = kinds().decode()  # of each parameter: p pointer, i 32-bit integer, l 64-bit, f float, d double
        self._launch = library[f"emulated_launch_{name}"]
        self._launch.restype = ctypes.c_char_p

    def __call__(self, grid: Size, block: Size, args: Sequence[Any], shared_mem: int = 0) -> None:
        *sizes, plain = plain_launch(self.name, grid, block, args, shared_mem, self._device.shared_bytes)
        self._device._check_own(self.name, *plain, host_too=False)
        kinds = "".join(map(_kind, plain))
        for place, (kind, value) in enumerate(zip(self.kinds, plain, strict=False)):
            if kinds[place] != kind and not (kind == "p" and isinstance(value, np.uint64)):
                got = f"argument {place + 1} of {len(plain)}: {getattr(value, 'dtype', value)}; kinds {kinds}"
                raise ShapeError(f"launch of {self.name}", expected=f"arguments of kinds {self.kinds}", got=got)
        if len(plain) != len(self.kinds):
            raise ShapeError(f"launch of {self.name}", expected=f"{len(self.kinds)} arguments", got=str(len(plain)))
        cells = [np.array(a.ctypes.data if isinstance(a, np.ndarray) else a) for a in plain]
        launch = _Launch(*((ctypes.c_uint * 3)(*size) for size in sizes), shared_mem, self._device.order)
        self._device._do(lambda: self._run(launch, cells), *plain)

    def _run(self, launch: _Launch, cells: list[Array]) -> None:
        pointers = (ctypes.c_void_p * len(cells))(*(cell.ctypes.data for cell in cells))
        self._device._launches += 1
        with _one_at_a_time:
            error = self._launch(ctypes.byref(launch), pointers)
        if error is not None:
            raise DeviceError(f"kernel {self.name} of {self._file}: {error.decode()}")


def _kind(value: Any) -> str:
    return "p" if isinstance(value, np.ndarray) else _KINDS.get(value.dtype.name, "?")


class EmulatedGraph(DeviceGraph):
    """Recorded calls, each with the allocations that it touches. Like a GPU's graph it refers to addresses and keeps
    nothing alive; unlike one it raises an error when an array there was freed."""

    def __init__(self, device: EmulatedDevice) -> None:
        self.calls: list[tuple[Callable[[], object], frozenset[int]]] = []
        self._device = device

    def launch(self) -> None:
        device = self._device
        for call, allocations in self.calls:
            if not allocations <= device._alive.keys():
                raise DeviceError("a graph was launched that uses an array which was freed")
            device._do(call)


class EmulatedEvent(Event):
    """A place in the queue of work, and the time at which it was reached."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device
        self._reached_s: float | None = None
        device._do(self._reach)

    def _reach(self) -> None:
        self._reached_s = time.perf_counter()

    def synchronize(self) -> None:
        self._device._work(lambda: self._reached_s is not None)

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, EmulatedEvent)
        self.synchronize()
        assert self._reached_s is not None
        assert earlier._reached_s is not None
        return self._reached_s - earlier._reached_s


class EmulatedDevice(Device):
    """NumPy arrays, kernels on the host.

    order: 0, threads and blocks run ascending; 1 descending; else a shuffle's seed. Results must not depend on it.
    late: work is done when it is waited for, not when it is asked for; only `to_host` then shows what an array holds.
    """

    emulated = True
    compute_capability = (9, 0)
    multiprocessors = MULTIPROCESSORS
    row_blocks = 2  # few: blocks run one at a time here, and each takes several units
    l2_bytes = L2_BYTES
    shared_bytes = SHARED_BYTES
    can_matmul_16 = True
    xp = np

    def __init__(
        self, memory_limit: int | None = None, order: int = 0, sanitize: bool | None = None, late: bool = False
    ) -> None:
        if (reason := why_unavailable()) is not None:
            raise BackendUnavailable(reason)
        self.name = "emulated on the host"
        self.order, self.late, self._launches = order, late, 0
        self.sanitize = os.environ.get("BITNET_REF_CUDA_SANITIZE", "") == "1" if sanitize is None else sanitize
        self._limit, self._peak = memory_limit, 0  # bytes
        self._array_numbers = itertools.count(1)
        self._alive: dict[int, tuple[int, int]] = {}  # array's number -> first address, and the one after
        self._recording: EmulatedGraph | None = None
        self._queue: deque[Callable[[], object]] = deque()
        self._dropped: deque[int] = deque()  # addresses of freed arrays that queued work may still use
        self._working = threading.Lock()
        weakref.finalize(self, _free, self._dropped)
        self.number = next(_numbers)
        self._kernels: dict[tuple[str, str], EmulatedKernel] = {}

    @property
    def _capturing(self) -> bool:  # type: ignore[override]
        return self._recording is not None

    @property
    def launches(self) -> int:
        """The number of kernels that have run, eagerly or in a graph. Waits for all work."""
        self._work()
        return self._launches

    def _do(self, call: Callable[[], object], *touched: Any) -> None:
        """Run the call now, at the next wait, or when the graph that is being captured is launched. touched: its
        arguments; those that are arrays must then still exist."""
        if self._recording is not None:
            allocations = (self._allocation(each) for each in touched if isinstance(each, np.ndarray) and each.size)
            self._recording.calls.append((call, frozenset(number for number in allocations if number is not None)))
        elif self.late:
            self._queue.append(call)
        else:
            call()

    def _work(self, done: Callable[[], bool] = lambda: False) -> None:
        """Run queued calls in order, until `done` or none is left. The calls after an error are dropped."""
        with self._working:
            try:
                while self._queue and not done():
                    self._queue.popleft()()
            except BaseException:
                self._queue.clear()
                raise
            finally:
                dropped = len(self._dropped)  # so far: the calls that use them are in the queue, or done
                if not self._queue:
                    _free(self._dropped, dropped)

    @property
    def _used(self) -> int:
        """Bytes of all arrays. Counted anew: finalizers may run in the middle of anything."""
        return sum(_rounded(end - start) for start, end in self._alive.copy().values())

    def _allocation(self, array: DeviceArray) -> int | None:
        """The number of the allocation that holds the array; None for a host array."""
        address = array.ctypes.data
        allocations = self._alive.copy().items()
        return next((number for number, (start, end) in allocations if start <= address < end), None)

    # -- arrays --------------------------------------------------------------------------------------------------------

    def _check_own(self, what: str, *values: Any, host_too: bool = True) -> None:
        """Raises DeviceError for an array of another device, or (unless `host_too`) of the host."""
        for array in (value for value in values if isinstance(value, np.ndarray) and value.size):
            memory: Any = array
            while isinstance(memory, np.ndarray):
                memory = memory.base
            number = getattr(memory, "device_number", None)
            if number is None and not host_too:
                raise DeviceError(f"{what}: {array.dtype} {array.shape} is an array of the host; see `from_host`")
            if number not in (None, self.number):
                raise DeviceError(f"{what}: an array of emulated device {number}, used on device {self.number}")

    def empty(self, shape: Size, dtype: DTypeLike) -> DeviceArray:
        self._not_in_a_capture("an array was allocated")
        dtype = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else tuple(int(n) for n in shape)
        size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        if size == 0:
            return np.empty(shape, dtype=dtype)
        used = self._used + _rounded(size)
        if self._limit is not None and used > self._limit:
            raise OutOfMemory(f"{size} more bytes would make {used} in use, over the limit of {self._limit}")
        place = ctypes.c_void_p()
        if _libc().posix_memalign(ctypes.byref(place), 256, size) != 0:
            raise OutOfMemory(f"the host has no {size} bytes for the emulated device")
        address, number = int(place.value or 0), next(self._array_numbers)
        memory: Any = (ctypes.c_char * size).from_address(address)
        self._alive[number] = address, address + size
        self._peak = max(self._peak, used)
        weakref.finalize(memory, self._release, number, address)
        ctypes.memset(address, UNWRITTEN, size)
        memory.device_number = self.number  # for `_check_own`
        return np.frombuffer(memory, dtype=dtype).reshape(shape)

    def _release(self, number: int, place: int) -> None:
        del self._alive[number]
        # Queued work may still touch it, as on a GPU work may touch what has gone back to the pool.
        if self._queue or self._working.locked():
            self._dropped.append(place)
        else:
            _libc().free(ctypes.c_void_p(place))

    def fill(self, array: DeviceArray, byte: int) -> None:
        address, size = array.ctypes.data, array.nbytes
        self._do(lambda: ctypes.memset(address, byte, size), array)

    def copy(self, target: DeviceArray, source: DeviceArray | Array) -> None:
        self._check_own("device copy", target, source)
        from_host = self._allocation(source) is None
        check_copy(target, source, from_host)
        if from_host:
            self._not_in_a_capture("an array was copied from the host")
            source = source.copy()
        to, origin, size = target.ctypes.data, source.ctypes.data, target.nbytes
        held = source if from_host else None  # until the copy is made
        self._do(lambda: (ctypes.memmove(to, origin, size), held), target, source)

    def to_host(self, array: DeviceArray) -> Array:
        self._not_in_a_capture("an array was read")
        self._check_own("to_host", array)
        self._work()
        return np.array(array)

    # -- work ----------------------------------------------------------------------------------------------------------

    def kernel(self, file: str, name: str) -> EmulatedKernel:
        if (file, name) not in self._kernels:
            library = compiled(file, self.sanitize)
            if name not in (names := kernel_names(library)):
                raise DeviceError(f"{file} has no kernel {name!r}; there are: {', '.join(names)}")
            self._kernels[file, name] = EmulatedKernel(self, library, file, name)
        return self._kernels[file, name]

    def matmul_16(self, x: DeviceArray, w: DeviceArray, y: DeviceArray, kind: str) -> None:
        self._not_in_a_capture("cuBLAS was called")
        dtype = ml_dtypes.bfloat16 if kind == "bfloat16" else np.float16

        def multiply() -> None:
            wide = [np.asarray(a).view(dtype).astype(np.float32) for a in (x, w)]
            with np.errstate(all="ignore"):
                np.matmul(wide[0], wide[1].T, out=np.asarray(y))

        self._do(multiply, x, w, y)

    @contextmanager
    def capture(self) -> Iterator[DeviceGraph]:
        if self._recording is not None:
            raise DeviceError("a graph is being captured already")
        graph = self._recording = EmulatedGraph(self)
        try:
            yield graph
        finally:
            self._recording = None

    def event(self) -> Event:
        return EmulatedEvent(self)

    def synchronize(self) -> None:
        self._not_in_a_capture("synchronize was called")
        self._work()

    def use(self) -> AbstractContextManager[Any]:
        self._work()  # NumPy does not queue
        return nullcontext()

    # -- memory --------------------------------------------------------------------------------------------------------

    def memory(self) -> MemoryInfo:
        total = self._limit if self._limit is not None else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        used = self._used
        return MemoryInfo(total, total - used, used, used, self._peak, self._limit)

    def trim(self) -> None:
        self._not_in_a_capture("trim was called")
        self._work()

    def close(self) -> None:
        self._work()
        self._kernels.clear()


def _rounded(size: int) -> int:
    """The bytes that CuPy's pool takes for an array."""
    return size + -size % 512


def _free(addresses: deque[int], count: int | None = None) -> None:
    """Free the first `count` of them, or all."""
    for _ in range(len(addresses) if count is None else count):
        _libc().free(ctypes.c_void_p(addresses.popleft()))


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)
