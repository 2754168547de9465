"""A CUDA device that is the host: its kernels are the same `.cu` files, built by the host's C++ compiler.

For tests and for reading kernels where there is no GPU (`BITNET_REF_CUDA=emulated`): some thousand times slower than
a GPU, and stricter. See `kernels/cuda/emulated.h` for what it finds out, `emulated_build.py` for how they are compiled.

A GPU may do its work at any time between being asked and being waited for. The device that `open_device` gives is as
late as that allows: nothing runs before somebody waits, so a wait that is missing, or host memory that is used again
too early, shows. `CUDA_LAUNCH_BLOCKING=1` has every call run at once, as with a GPU: errors are raised where they are.

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
from numpy.typing import DTypeLike, NDArray

from ....errors import BackendUnavailable, DeviceError, OutOfMemory, ShapeError
from ..device import (
    Device,
    DeviceArray,
    Event,
    Graph,
    MemoryInfo,
    Size,
    check_copy,
    check_launch,
    plain_argument,
    three,
)
from .build import compiled, kernel_names, why_unavailable
from .pool import EmulatedPool

UNWRITTEN = 0xFF  # what new memory holds: NaN as a float, -1 as an integer

# An H200's figures where launch configurations ask for them, so that what is tested is what will run there.
MULTIPROCESSORS = 132
L2_BYTES = 60 << 20
SHARED_BYTES = 227 << 10

_KINDS = {"int32": "i", "uint32": "i", "float32": "f", "float64": "d", "int64": "l", "uint64": "l"}
_numbers = itertools.count()  # of the devices
_one_at_a_time = threading.Lock()  # a compiled file keeps the state of its launch in static variables


class _Hidden(ctypes.Structure):
    """`emulated::Hidden`"""

    _fields_ = (("place", ctypes.c_uint64), ("bytes", ctypes.c_uint64))


class _Launch(ctypes.Structure):
    """`emulated::Launch`"""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("dynamic_bytes", ctypes.c_uint),
        ("order", ctypes.c_uint),
        ("overlapped", ctypes.c_uint),
        ("hidden_count", ctypes.c_uint),
        ("hidden", ctypes.POINTER(_Hidden)),
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

    def __call__(
        self, grid: Size, block: Size, args: Sequence[Any], shared_mem: int = 0, overlap: bool = False
    ) -> None:
        sizes = three(grid), three(block)
        check_launch(self.name, *sizes, shared_mem, self._device.shared_bytes)
        plain = [plain_argument(value) for value in args]
        self._device._check_own(self.name, *plain)
        found = "".join(map(_kind, plain))
        for place, (kind, value) in enumerate(zip(self.kinds, plain, strict=False)):
            if found[place] != kind and not (kind == "p" and isinstance(value, np.uint64)):
                got = f"argument {place + 1} of {len(plain)}: {getattr(value, 'dtype', value)}; kinds {found}"
                raise ShapeError(f"launch of {self.name}", expected=f"arguments of kinds {self.kinds}", got=got)
        if len(plain) != len(self.kinds):
            raise ShapeError(f"launch of {self.name}", expected=f"{len(self.kinds)} arguments", got=str(len(plain)))
        cells = [np.array(a.ctypes.data if isinstance(a, np.ndarray) else a) for a in plain]
        more = shared_mem, self._device.order, overlap or self._device.overlaps
        how = _Launch((ctypes.c_uint * 3)(*sizes[0]), (ctypes.c_uint * 3)(*sizes[1]), *more)
        self._device._do(lambda: self._run(how, cells), *plain)

    def _run(self, how: _Launch, cells: list[NDArray]) -> None:
        pointers = (ctypes.c_void_p * len(cells))(*(cell.ctypes.data for cell in cells))
        self._device._launches += 1
        if how.overlapped and self._device.hides:
            hidden = self._device._changed_in_step()
            how.hidden, how.hidden_count = (_Hidden * len(hidden))(*hidden), len(hidden)
        with _one_at_a_time:
            wrong = self._launch(ctypes.byref(how), pointers)
        if wrong is not None:
            raise DeviceError(f"kernel {self.name} of {self._file}: {wrong.decode()}")


def _kind(value: Any) -> str:
    return "p" if isinstance(value, np.ndarray) else _KINDS.get(value.dtype.name, "?")


class EmulatedGraph(Graph):
    """Recorded calls, each with the allocations that it touches. As a GPU's graph it knows addresses and keeps nothing
    alive; unlike one it says so when what lay there has gone."""

    def __init__(self, device: EmulatedDevice) -> None:
        self.calls: list[tuple[Callable[[], object], frozenset[int]]] = []
        self._device = device

    def launch(self) -> None:
        device = self._device
        if device.hides:
            device._do(lambda: device._begin_step(frozenset().union(*(touched for _, touched in self.calls))))
        for call, allocations in self.calls:
            if not allocations <= device._alive.keys():
                raise DeviceError("a graph was launched that touches an array which is no more")
            device._do(call)
        if device.hides:
            device._do(device._step.clear)


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


class PinnedArray(np.ndarray):
    """Host memory that a card reads and writes when it comes to it; of any other it takes a copy when it is asked."""


class EmulatedDevice(Device):
    """NumPy arrays, kernels on the host. order: 0, threads and blocks run ascending; 1 descending; else a shuffle's
    seed. Results that depend on it are a race. late: work is done when it is waited for, not when it is asked for; then
    what an array holds is to be seen by `to_host` only. hides: of a graph's kernels those that overlap see nothing of
    what it has changed so far, until they wait: on a card there is no telling how many of the launches before are done.
    """

    emulated = True
    compute_capability = (9, 0)
    multiprocessors = MULTIPROCESSORS
    row_blocks = 2  # few: one runs at a time here, and so each takes several units
    l2_bytes = L2_BYTES
    shared_bytes = SHARED_BYTES
    can_overlap = False  # one launch ends before the next begins; it only looks whether kernels would wait
    can_matmul_16 = True
    xp = np

    def __init__(
        self,
        memory_limit: int | None = None,
        order: int = 0,
        sanitize: bool | None = None,
        late: bool = False,
        hides: bool = False,
    ) -> None:
        if (reason := why_unavailable()) is not None:
            raise BackendUnavailable(reason)
        self.name = "emulated on the host"
        self.order, self.late, self.hides, self._launches = order, late, hides, 0
        self._step: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]] = []  # the memory of a graph, and as it began
        self.sanitize = os.environ.get("BITNET_REF_CUDA_SANITIZE", "") == "1" if sanitize is None else sanitize
        self._pool = EmulatedPool(memory_limit)
        self._array_numbers = itertools.count(1)
        self._alive: dict[int, tuple[int, int]] = {}  # array's number -> first address, and the one after
        self._recording: EmulatedGraph | None = None
        self._queue: deque[Callable[[], object]] = deque()
        self._dropped: deque[int] = deque()  # addresses of arrays that nobody has any more
        self._working = threading.Lock()
        weakref.finalize(self, _free, self._dropped)
        self.number = next(_numbers)
        self._kernels: dict[tuple[str, str], EmulatedKernel] = {}

    @property
    def _capturing(self) -> bool:  # type: ignore[override]
        return self._recording is not None

    @property
    def launches(self) -> int:
        """Kernels that have run, eagerly or in a graph, when all work is done."""
        self._work()
        return self._launches

    def _do(self, call: Callable[[], object], *touched: Any) -> None:
        """Now, or when it is waited for, or when the graph that is being captured is launched. touched: the arrays
        whose addresses the call has, among other values."""
        if self._recording is not None:
            allocations = (self._allocation(each) for each in touched if isinstance(each, np.ndarray) and each.size)
            self._recording.calls.append((call, frozenset(number for number in allocations if number is not None)))
        elif self.late:
            self._queue.append(call)
        else:
            call()

    def _work(self, done: Callable[[], bool] = lambda: False) -> None:
        """Do what was asked for, in order, until that is so or nothing is left. What comes after an error is lost."""
        with self._working:
            try:
                while self._queue and not done():
                    self._queue.popleft()()
            except BaseException:
                self._queue.clear()
                raise
            finally:
                dropped = len(self._dropped)  # so far: all that touches them is in the queue, or done
                if not self._queue:
                    _free(self._dropped, dropped)

    def _begin_step(self, allocations: frozenset[int]) -> None:
        for start, end in (self._alive[number] for number in allocations if number in self._alive):
            memory = np.ctypeslib.as_array((ctypes.c_uint8 * (end - start)).from_address(start))
            self._step.append((memory, memory.copy()))

    def _changed_in_step(self) -> list[_Hidden]:
        """All that is not as it was when the graph began; of no graph nothing is known."""
        found = []
        for memory, before in self._step:
            places = np.flatnonzero(memory != before)
            for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1):
                if len(run):
                    found.append(_Hidden(memory.ctypes.data + int(run[0]), len(run)))
        return found

    def _allocation(self, array: DeviceArray) -> int | None:
        """The number of the allocation that the array lies in; None for the host's."""
        address = array.ctypes.data
        found = (number for number, (start, end) in self._alive.copy().items() if start <= address < end)
        return next(found, None)

    # -- arrays --------------------------------------------------------------------------------------------------------

    def _check_own(self, what: str, *values: Any) -> None:
        """DeviceError for an array of another emulated device: what a card cannot reach, or only slowly."""
        for value in values:
            while isinstance(value, np.ndarray):
                value = value.base
            if (number := getattr(value, "device_number", self.number)) != self.number:
                raise DeviceError(f"{what}: an array of emulated device {number}, asked for on device {self.number}")

    def empty(self, shape: Size, dtype: DTypeLike) -> DeviceArray:
        self._not_in_a_capture("an array was asked for")
        dtype = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else tuple(int(n) for n in shape)
        size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        if size == 0:
            return np.empty(shape, dtype=dtype)
        number, pool = next(self._array_numbers), self._pool
        if not pool.take(number, size):
            raise OutOfMemory(f"{size} bytes beside {pool.held} held are over the limit of {pool.limit}")
        place = ctypes.c_void_p()
        if _libc().posix_memalign(ctypes.byref(place), 256, size) != 0:
            pool.free(number)
            raise OutOfMemory(f"the host has no {size} bytes for the emulated device")
        address = int(place.value or 0)
        memory: Any = (ctypes.c_char * size).from_address(address)
        self._alive[number] = address, address + size
        weakref.finalize(memory, self._release, number, address)
        ctypes.memset(address, UNWRITTEN, size)
        memory.device_number = self.number  # for `_check_own`
        return np.frombuffer(memory, dtype=dtype).reshape(shape)

    def _release(self, number: int, place: int) -> None:
        self._pool.free(number)
        del self._alive[number]
        # What was asked for may still touch it, as it may what has gone back to a card's pool.
        if self._queue or self._working.locked():
            self._dropped.append(place)
        else:
            _libc().free(ctypes.c_void_p(place))

    def fill(self, array: DeviceArray, byte: int) -> None:
        address, size = array.ctypes.data, array.nbytes
        self._do(lambda: ctypes.memset(address, byte, size), array)

    def copy(self, target: DeviceArray, source: DeviceArray | NDArray) -> None:
        self._check_own("device copy", target, source)
        from_host = self._allocation(source) is None
        check_copy(target, source, from_host)
        if from_host:
            self._not_in_a_capture("a copy from the host was asked for")
            source = np.ascontiguousarray(source) if isinstance(source, PinnedArray) else source.copy()
        to, origin, size = target.ctypes.data, source.ctypes.data, target.nbytes
        hosts = [each for each in (target, source) if self._allocation(each) is None]
        self._do(lambda: (ctypes.memmove(to, origin, size), hosts), target, source)  # which keeps these

    def to_host(self, array: DeviceArray) -> NDArray:
        self._not_in_a_capture("an array was read")
        self._check_own("to_host", array)
        self._work()
        return np.array(array)

    def to_pinned(self, target: NDArray, source: DeviceArray) -> None:
        self._not_in_a_capture("an array was read")
        self.copy(target, source)

    def pinned(self, shape: Size, dtype: DTypeLike) -> NDArray:
        return np.zeros(shape, dtype=dtype).view(PinnedArray)

    # -- work ----------------------------------------------------------------------------------------------------------

    def kernel(self, file: str, name: str) -> EmulatedKernel:
        if (file, name) not in self._kernels:
            library = compiled(file, self.sanitize)
            if name not in (names := kernel_names(library)):
                raise DeviceError(f"{file} has no kernel {name!r}; there are: {', '.join(names)}")
            self._kernels[file, name] = EmulatedKernel(self, library, file, name)
        return self._kernels[file, name]

    def matmul_16(self, x: DeviceArray, w: DeviceArray, y: DeviceArray, kind: str) -> None:
        self._not_in_a_capture("cuBLAS was asked for")
        dtype = ml_dtypes.bfloat16 if kind == "bfloat16" else np.float16

        def multiply() -> None:
            wide = [np.asarray(a).view(dtype).astype(np.float32) for a in (x, w)]
            with np.errstate(all="ignore"):
                np.matmul(wide[0], wide[1].T, out=np.asarray(y))

        self._do(multiply, x, w, y)

    @contextmanager
    def capture(self) -> Iterator[Graph]:
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
        self._not_in_a_capture("the device was waited for")
        self._work()

    def use(self) -> AbstractContextManager[Any]:
        self._work()  # NumPy does its own at once
        return nullcontext()

    # -- memory --------------------------------------------------------------------------------------------------------

    def memory(self) -> MemoryInfo:
        pool = self._pool
        pool.settle()
        total = pool.limit if pool.limit is not None else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return MemoryInfo(total, total - pool.held, pool.used, pool.held, pool.peak, pool.limit)

    def trim(self) -> None:
        self._not_in_a_capture("memory was to be given back")
        self._work()
        self._pool.trim()

    def close(self) -> None:
        self._work()
        self._kernels.clear()


def _free(addresses: deque[int], count: int | None = None) -> None:
    """The first of them, or all."""
    for _ in range(len(addresses) if count is None else count):
        _libc().free(ctypes.c_void_p(addresses.popleft()))


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)
