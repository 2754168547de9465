"""A CUDA device that is the host: its kernels are the same `.cu` files, built by the host's C++ compiler.

For tests and for reading kernels where there is no GPU (`BITNET_REF_CUDA=emulated`): some thousand times slower than
a GPU, and stricter. See `kernels/cuda/emulated.h` for what it finds out. Compiled files are kept in
`$XDG_CACHE_HOME/bitnet_ref/cuda` (or ~/.cache), under a hash of their text, the compiler and its options; of each file
those that were used last, a few, and the others are removed.

`BITNET_REF_CUDA_SANITIZE=1` builds with AddressSanitizer, which must be loaded before Python is:
LD_PRELOAD=$(gcc -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from ...errors import BackendUnavailable, DeviceError, OutOfMemory, ShapeError
from ...file_lock import lock_file
from .device import Device, DeviceArray, Event, Graph, MemoryInfo, Size, check_launch, plain_argument, three
from .sources import FOLDER, find, flattened

FLAGS = ["-std=c++17", "-O2", "-ffp-contract=off", "-fno-fast-math", "-fPIC", "-fvisibility=hidden", "-shared"]
FLAGS += ["-Wall", "-Wno-unused-function", "-Wno-unknown-pragmas", "-Wno-attributes"]
SANITIZERS = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
UNWRITTEN = 0xFF  # what new memory holds: NaN as a float, -1 as an integer

BUILDS_KEPT = 8  # of a file: more than the versions and options that anyone works with at a time

# An H200's figures where launch configurations ask for them, so that what is tested is what will run there.
MULTIPROCESSORS = 132
L2_BYTES = 60 << 20

_KINDS = {"int32": "i", "uint32": "i", "float32": "f", "float64": "d", "int64": "l", "uint64": "l"}
_numbers = itertools.count()  # of the devices
_one_at_a_time = threading.Lock()  # a compiled file keeps the state of its launch in static variables


def compiler() -> str | None:
    """The C++ compiler: $CXX, or the first of g++, clang++ and c++ that is installed."""
    names = (os.environ["CXX"].split()[0],) if os.environ.get("CXX") else ("g++", "clang++", "c++")
    return next((found for name in names if (found := shutil.which(name))), None)


def why_unavailable() -> str | None:
    """None, or why kernels cannot be emulated here."""
    if compiler() is None:
        return "emulating CUDA needs a C++17 compiler (Debian/Ubuntu: apt install g++; or set CXX), and there is none"
    return None


@cache
def compiled(file: str, sanitize: bool) -> tuple[Path, tuple[str, ...]]:
    """The shared library of a file of kernels, and the kernels' names. Compiles it unless that has been done."""
    found = compiler()
    if found is None:
        raise BackendUnavailable(str(why_unavailable()))
    version = _run([found, "--version"], "the compiler does not run")
    flags = [*FLAGS, *(SANITIZERS if sanitize else [])]
    headers = "".join((FOLDER / name).read_text() for name in ("emulated.h", "emulated_functions.h"))
    key = "\0".join([flattened(file), headers, version, *flags])
    digest = hashlib.sha256(key.encode()).hexdigest()[:20]
    folder = _cache_folder()
    path = find(file)
    library, listing = folder / f"{path.name}-{digest}.so", folder / f"{path.name}-{digest}.txt"
    if not (library.is_file() and listing.is_file()):
        with open(folder / f"{path.name}.lock", "wb") as lock:
            lock_file(lock.fileno())
            if not (library.is_file() and listing.is_file()):  # no other process has done it meanwhile
                _build(path, found, flags, library, listing)
    with suppress(OSError):
        os.utime(library)  # used now
        _remove_old_builds(folder, path.name)
    return library, tuple(listing.read_text().split())


def _build(path: Path, compiler: str, flags: list[str], library: Path, listing: Path) -> None:
    source = [compiler, "-x", "c++", f"-I{FOLDER}", "-include", str(FOLDER / "emulated.h")]
    with tempfile.TemporaryDirectory(dir=library.parent) as work:
        text = _run([*source, "-std=c++17", "-E", "-P", "-DBITNET_REF_LISTING", str(path)], path.name)
        names = re.findall(r"\b__global__\s+void\s+(\w+)\s*\(", text)
        lines = [f'#include "{path}"', *(f"EMULATED_KERNEL({name})" for name in names), ""]
        shim, built, listed = Path(work, "kernels.cpp"), Path(work, "kernels.so"), Path(work, "names")
        shim.write_text("\n".join(lines))
        listed.write_text("\n".join(names))
        _run([*source, *flags, "-o", str(built), str(shim)], f"{path.name} does not compile")
        os.replace(listed, listing)
        os.replace(built, library)


def _remove_old_builds(folder: Path, name: str) -> None:
    """All but the last used of a file. A process that has one of them loaded keeps it: only the name is gone."""
    builds = [path for path in folder.glob("*.so") if path.name.rpartition("-")[0] == name]
    last_used = sorted(builds, key=lambda path: path.stat().st_mtime, reverse=True)
    for path in last_used[BUILDS_KEPT:]:
        path.with_suffix(".txt").unlink(missing_ok=True)
        path.unlink(missing_ok=True)


def _run(command: list[str], what: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise DeviceError(f"{what}: {' '.join(command[:1])} says\n{done.stderr[-2000:]}")
    return done.stdout


def _cache_folder() -> Path:
    try:
        wished = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bitnet_ref" / "cuda"
        wished.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(wished, os.W_OK):
            return wished
    except (OSError, RuntimeError):  # a home that cannot be written, or none
        pass
    return _temporary_folder()


@cache
def _temporary_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="bitnet_ref-cuda-")
    weakref.finalize(compiled, shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


class _Launch(ctypes.Structure):
    """`emulated::Launch`"""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("dynamic_bytes", ctypes.c_uint),
        ("order", ctypes.c_uint),
        ("overlapped", ctypes.c_uint),
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
        check_launch(self.name, *sizes, shared_mem)
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
        self._device.launches += 1
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
        for call, allocations in self.calls:
            if not allocations <= self._device._alive.keys():
                raise DeviceError("a graph was launched that touches an array which is no more")
            self._device._do(call)


class EmulatedEvent(Event):
    """The time at which it was made: all work before it is done by then."""

    def __init__(self) -> None:
        self.reached_s = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, EmulatedEvent)
        return self.reached_s - earlier.reached_s


class EmulatedDevice(Device):
    """NumPy arrays, kernels on the host. order: 0, threads and blocks run ascending; 1 descending; else a shuffle's
    seed. Results that depend on it are a race.

    launches: kernels that have run, eagerly or in a graph.
    """

    emulated = True
    compute_capability = (9, 0)
    multiprocessors = MULTIPROCESSORS
    row_blocks = 2  # few: one runs at a time here, and so each takes several units
    l2_bytes = L2_BYTES
    can_overlap = False  # one launch ends before the next begins; it only looks whether kernels would wait
    can_matmul_16 = True
    xp = np

    def __init__(self, memory_limit: int | None = None, order: int = 0, sanitize: bool | None = None) -> None:
        if (reason := why_unavailable()) is not None:
            raise BackendUnavailable(reason)
        self.name = "emulated on the host"
        self.order, self.launches = order, 0
        self.sanitize = os.environ.get("BITNET_REF_CUDA_SANITIZE", "") == "1" if sanitize is None else sanitize
        self._limit, self._used, self._peak = memory_limit, 0, 0
        self._allocated, self._alive = 0, dict[int, tuple[int, int]]()  # number -> first address, and the one after
        self._recording: EmulatedGraph | None = None
        self.number = next(_numbers)
        self._kernels: dict[tuple[str, str], EmulatedKernel] = {}

    def _do(self, call: Callable[[], object], *touched: Any) -> None:
        """Now, or when the graph that is being captured is launched. touched: the arrays whose addresses the call has,
        among other values."""
        if self._recording is not None:
            allocations = (self._allocation(each) for each in touched if isinstance(each, np.ndarray) and each.size)
            self._recording.calls.append((call, frozenset(number for number in allocations if number is not None)))
        else:
            call()

    def _allocation(self, array: DeviceArray) -> int | None:
        """The number of the allocation that the array lies in; None for the host's."""
        address = array.ctypes.data
        found = (number for number, (start, end) in self._alive.items() if start <= address < end)
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
        if self._recording is not None:
            raise DeviceError("an array was asked for while a graph is captured; make all of them before")
        dtype = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else tuple(int(n) for n in shape)
        size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        if self._limit is not None and self._used + size > self._limit:
            raise OutOfMemory(f"{size} bytes beside {self._used} in use are over the limit of {self._limit}")
        if size == 0:
            return np.empty(shape, dtype=dtype)
        place = ctypes.c_void_p()
        if _libc().posix_memalign(ctypes.byref(place), 256, size) != 0:
            raise OutOfMemory(f"the host has no {size} bytes for the emulated device")
        address = int(place.value or 0)
        memory: Any = (ctypes.c_char * size).from_address(address)
        self._allocated += 1
        self._alive[self._allocated] = address, address + size
        weakref.finalize(memory, self._release, self._allocated, address, size)
        self._used += size
        self._peak = max(self._peak, self._used)
        ctypes.memset(address, UNWRITTEN, size)
        memory.device_number = self.number  # for `_check_own`
        return np.frombuffer(memory, dtype=dtype).reshape(shape)

    def _release(self, number: int, place: int, size: int) -> None:
        self._used -= size
        del self._alive[number]
        _libc().free(ctypes.c_void_p(place))

    def fill(self, array: DeviceArray, byte: int) -> None:
        address, size = array.ctypes.data, array.nbytes
        self._do(lambda: ctypes.memset(address, byte, size), array)

    def copy(self, target: DeviceArray, source: DeviceArray | NDArray) -> None:
        self._check_own("device copy", target, source)
        if target.shape != source.shape or target.dtype != source.dtype:
            got = f"{target.dtype} {target.shape} and {source.dtype} {source.shape}"
            raise ShapeError("device copy", expected="two arrays of one shape and dtype", got=got)
        if self._recording is None:
            np.copyto(target, source)
            return
        to, origin, size = target.ctypes.data, source.ctypes.data, target.nbytes
        self._do(lambda: ctypes.memmove(to, origin, size), target, source)

    def to_host(self, array: DeviceArray) -> NDArray:
        if self._recording is not None:
            raise DeviceError("an array was read while a graph is captured")
        self._check_own("to_host", array)
        return np.array(array)

    def to_pinned(self, target: NDArray, source: DeviceArray) -> None:
        self.copy(target, source)

    def pinned(self, shape: Size, dtype: DTypeLike) -> NDArray:
        return np.zeros(shape, dtype=dtype)

    # -- work ----------------------------------------------------------------------------------------------------------

    def kernel(self, file: str, name: str) -> EmulatedKernel:
        if (file, name) not in self._kernels:
            library, names = compiled(file, self.sanitize)
            if name not in names:
                raise DeviceError(f"{file} has no kernel {name!r}; there are: {', '.join(names)}")
            self._kernels[file, name] = EmulatedKernel(self, ctypes.CDLL(str(library)), file, name)
        return self._kernels[file, name]

    def matmul_16(self, x: DeviceArray, w: DeviceArray, y: DeviceArray, kind: str) -> None:
        if self._recording is not None:
            raise DeviceError("cuBLAS was asked for while a graph is captured")
        dtype = ml_dtypes.bfloat16 if kind == "bfloat16" else np.float16
        wide = [np.asarray(a).view(dtype).astype(np.float32) for a in (x, w)]
        with np.errstate(all="ignore"):
            np.matmul(wide[0], wide[1].T, out=np.asarray(y))

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
        return EmulatedEvent()

    def synchronize(self) -> None:
        if self._recording is not None:
            raise DeviceError("the device was waited for while a graph is captured")

    def use(self) -> AbstractContextManager[Any]:
        return nullcontext()

    # -- memory --------------------------------------------------------------------------------------------------------

    def memory(self) -> MemoryInfo:
        total = self._limit if self._limit is not None else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return MemoryInfo(total, total - self._used, self._used, self._used, self._peak, self._limit)

    def trim(self) -> None:
        pass  # nothing is kept

    def close(self) -> None:
        self._kernels.clear()


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)
