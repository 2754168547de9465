"""A GPU, through CuPy: the package's `.cu` files compiled by NVRTC, a stream and a memory pool of the device's own."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ...errors import BackendUnavailable, DeviceError, OutOfMemory
from ...reference.layers import Array
from .device import INSTALL, Device, DeviceArray, DeviceGraph, Event, MemoryInfo, Size, check_copy, plain_launch
from .early import CAPABILITY, DRIVER, launch_early, starts_early
from .sources import NVRTC_OPTIONS, build_once, find, flattened

CupyArray = Any  # CuPy has no types
MIN_CAPABILITY = (8, 0)  # cp.async and the int8 mma of Ampere
OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation: also of memory outside the pool
OP_N, OP_T = 0, 1  # cublasOperation_t
R_32F, R_16 = 0, {"float16": 2, "bfloat16": 14}  # cudaDataType
COMPUTE_32F = 68  # cublasComputeType_t
GEMM_DEFAULT = -1  # cublasGemmAlgo_t
_ONE, _ZERO = np.array(1, dtype=np.float32), np.array(0, dtype=np.float32)

# (device number, pool) of closed devices. CuPy leaks the blocks of a pool that is dropped while it has some, so each
# pool is kept until all of its blocks are free.
_retired: list[tuple[int, Any]] = []


@cache
def why_unavailable(index: int = 0) -> str | None:
    """None when CuPy is installed and finds a GPU that can run the kernels, else the reason and the remedy."""
    if find_spec("cupy") is None:
        return f"CuPy is not installed: {INSTALL}"
    try:
        import cupy
    except Exception as error:  # its libraries raise many types when they do not load
        return f"CuPy is installed and does not load ({type(error).__name__}: {error}); {INSTALL}"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
        if index >= count:
            return f"there is no GPU {index}: this machine has {count}"
        facts = cupy.cuda.runtime.getDeviceProperties(index)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"CuPy finds no GPU that it can use ({error}); see nvidia-smi for the driver and its CUDA version"
    if (capability := (facts["major"], facts["minor"])) < MIN_CAPABILITY:
        name = facts["name"].decode()
        return f"{name} has compute capability {capability[0]}.{capability[1]}; the kernels need 8.0 (Ampere) or later"
    try:
        cupy.cuda.nvrtc.getVersion()
    except Exception as error:  # a plain RuntimeError: the library is loaded when it is first called
        return f"CuPy does not find NVRTC, which compiles the kernels ({error}); {INSTALL}"
    return None


@cache
def _cublas() -> Any:
    """CuPy's cuBLAS module, or None where the library is not installed."""
    try:
        from cupy.cuda import cublas as module
    except ImportError:
        return None
    return module


def gemm_arguments(shape: tuple[int, int, int], x: int, w: int, y: int, kind: str) -> tuple[Any, ...]:
    """What `cupy.cuda.cublas.gemmEx` takes after its handle for y (n, out) = x (n, k) w (out, k)^T.

    shape: (n, out, k).   x, w, y: addresses on the device; x and w of `kind`, y of float32.

    cuBLAS takes matrices column by column. An array of rows read so is its transpose: y (n, out) is written as
    y^T (out, n) = w x^T, where w (out, k), read as (k, out), is transposed back and x, read as (k, n), is as wanted.
    CuPy has no bfloat16 arrays in all of its versions, but `gemmEx` is told by number what lies behind a pointer.

    Source: cuBLAS documentation, "cublasGemmEx()": of A and B in CUDA_R_16F or CUDA_R_16BF with C in CUDA_R_32F the
    compute type is CUBLAS_COMPUTE_32F, and alpha and beta are float32 in the host's memory.
    """
    n, out, k = shape
    return (
        *(OP_T, OP_N, out, n, k, _ONE.ctypes.data),
        *(w, R_16[kind], k),
        *(x, R_16[kind], k),
        _ZERO.ctypes.data,
        *(y, R_32F, out),
        *(COMPUTE_32F, GEMM_DEFAULT),
    )


@contextmanager
def device_errors() -> Iterator[None]:
    """Raises CuPy's exceptions as the package's own."""
    import cupy

    try:
        yield
    except cupy.cuda.memory.OutOfMemoryError as error:
        raise OutOfMemory(f"the GPU does not have enough memory: {error}") from error
    except cupy.cuda.compiler.CompileException as error:
        raise DeviceError(f"NVRTC cannot compile the kernels: {error}") from error
    except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError) as error:
        if getattr(error, "status", None) == OUT_OF_MEMORY:
            raise OutOfMemory(f"there is not enough memory: {error}") from error
        raise DeviceError(f"the GPU returned an error: {error}") from error


def _machine_code(file: str) -> Path:
    """A .cu file compiled for the current device. RawModule would compile it too, but it always adds -ftz=true, which
    flushes numbers below 1.2e-38 to zero; no other backend does."""
    import cupy
    from cupy.cuda import compiler, nvrtc

    source = flattened(file)

    def build(target: Path) -> None:
        code, _ = compiler.compile_using_nvrtc(source, NVRTC_OPTIONS, cache_in_memory=True)
        target.write_bytes(code)

    facts = cupy.__version__, nvrtc.getVersion(), cupy.cuda.Device().compute_capability, NVRTC_OPTIONS
    return build_once(find(file).name, "\0".join([source, *map(str, facts)]), ".cubin", build)


class CupyKernel:
    """A kernel of a RawModule, on the device's stream.  early: it waits itself for the launch before."""

    def __init__(self, device: CupyDevice, function: Any, name: str, early: bool = False) -> None:
        self.name, self._device, self._function, self._early = name, device, function, early
        self._max_shared = device.shared_bytes - function.shared_size_bytes  # that a launch may add
        # By default the kernel's own and the launch's shared memory may be 48 KB together. All kernels ask for the same
        # share of the first-level cache, so that blocks of the next one fit beside those of this one.
        function.max_dynamic_shared_size_bytes = self._max_shared
        function.preferred_shared_memory_carveout = 100

    def __call__(self, grid: Size, block: Size, args: Sequence[Any], shared_mem: int = 0) -> None:
        launch = plain_launch(self.name, grid, block, args, shared_mem, self._max_shared)
        stream = self._device.stream
        with device_errors(), self._device.gpu:
            if not self._early:
                self._function(*launch, shared_mem=shared_mem, stream=stream)
            elif error := launch_early(self._function.kernel.ptr, *launch, shared_mem, stream.ptr):
                raise self._device.xp.cuda.driver.CUDADriverError(error)


def _empty_retired_pools() -> None:
    """Free the unused blocks of retired pools, and drop the pools that are empty."""
    import cupy

    for index, pool in list(_retired):
        with cupy.cuda.Device(index):
            pool.free_all_blocks()
            if pool.total_bytes() == 0:
                with suppress(ValueError):  # another thread has done it
                    _retired.remove((index, pool))


class CupyGraph(DeviceGraph):
    """A CUDA graph, instantiated."""

    def __init__(self, device: CupyDevice) -> None:
        self._device = device
        self.graph: Any = None

    def launch(self) -> None:
        with device_errors(), self._device.gpu:
            self.graph.launch(self._device.stream)


class CupyEvent(Event):
    """A CUDA event, recorded when made."""

    def __init__(self, device: CupyDevice) -> None:
        with device_errors(), device.gpu:
            self._elapsed_ms = device.xp.cuda.get_elapsed_time
            self.event = device.xp.cuda.Event()
            self.event.record(device.stream)

    def synchronize(self) -> None:
        with device_errors():
            self.event.synchronize()

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, CupyEvent)
        self.synchronize()
        return float(self._elapsed_ms(earlier.event, self.event)) / 1e3


class CupyDevice(Device):
    """One GPU. memory_limit: max bytes of its pool."""

    emulated = False

    def __init__(self, index: int = 0, memory_limit: int | None = None) -> None:
        if (reason := why_unavailable(index)) is not None:
            raise BackendUnavailable(reason)
        import cupy

        self.xp = cupy
        self.index = index
        self.gpu = cupy.cuda.Device(index)
        facts = cupy.cuda.runtime.getDeviceProperties(index)
        self.name = facts["name"].decode()
        self.compute_capability = facts["major"], facts["minor"]
        self.multiprocessors, self.l2_bytes = facts["multiProcessorCount"], facts["l2CacheSize"]
        self.shared_bytes = facts["sharedMemPerBlockOptin"]
        self.row_blocks = self.multiprocessors
        self.can_matmul_16 = _cublas() is not None
        self.overlaps = self.compute_capability >= CAPABILITY and cupy.cuda.runtime.driverGetVersion() >= DRIVER
        self._limit, self._peak, self._capturing = memory_limit, 0, False
        self._modules: dict[str, Any] = {}
        self._kernels: dict[tuple[str, str], CupyKernel] = {}
        with device_errors(), self.gpu:
            self.stream = cupy.cuda.Stream(non_blocking=True)
            _empty_retired_pools()
            self.pool = cupy.cuda.MemoryPool()
            weakref.finalize(self, _retired.append, (index, self.pool)).atexit = False
            if memory_limit is not None:
                self.pool.set_limit(size=memory_limit)

    # -- arrays --------------------------------------------------------------------------------------------------------

    @contextmanager
    def use(self) -> Iterator[None]:
        with device_errors(), self.gpu, self.stream, self.xp.cuda.using_allocator(self.pool.malloc):
            yield
            self._peak = max(self._peak, self.pool.used_bytes())  # of the current device, so inside

    def empty(self, shape: Size, dtype: DTypeLike) -> DeviceArray:
        self._not_in_a_capture("an array was allocated")
        with self.use():
            try:
                array: DeviceArray = self.xp.empty(shape, dtype=dtype)
            except self.xp.cuda.memory.OutOfMemoryError:  # the pool may hold free blocks of other sizes
                self.trim()
                array = self.xp.empty(shape, dtype=dtype)
            return array

    def fill(self, array: CupyArray, byte: int) -> None:
        with self.use():
            array.data.memset_async(byte, array.nbytes, self.stream)

    def copy(self, target: CupyArray, source: CupyArray | Array) -> None:
        check_copy(target, source, from_host=isinstance(source, np.ndarray))
        if isinstance(source, np.ndarray):
            self._not_in_a_capture("an array was copied from the host")
        with self.use():
            if isinstance(source, np.ndarray):
                target.set(source, stream=self.stream)
            else:
                target.data.copy_from_device_async(source.data, source.nbytes, self.stream)

    def to_host(self, array: CupyArray) -> Array:
        self._not_in_a_capture("an array was read")
        with self.use():
            host: Array = array.get(stream=self.stream)
            return host

    # -- work ----------------------------------------------------------------------------------------------------------

    def kernel(self, file: str, name: str) -> CupyKernel:
        if (file, name) not in self._kernels:
            with device_errors(), self.gpu:
                if file not in self._modules:
                    self._modules[file] = self.xp.RawModule(path=str(_machine_code(file)))
                function = self._modules[file].get_function(name)
                self._kernels[file, name] = CupyKernel(self, function, name, self.overlaps and starts_early(file))
        return self._kernels[file, name]

    def matmul_16(self, x: CupyArray, w: CupyArray, y: CupyArray, kind: str) -> None:
        self._not_in_a_capture("cuBLAS was called")
        module = _cublas()
        shape = len(x), *w.shape
        with self.use():  # gemmEx gives the current stream to cuBLAS
            arguments = gemm_arguments(shape, x.data.ptr, w.data.ptr, y.data.ptr, kind)
            try:
                module.gemmEx(self.xp.cuda.device.get_cublas_handle(), *arguments)
            except module.CUBLASError as error:
                raise DeviceError(f"cuBLAS cannot multiply {shape[0]} rows by {shape[1:]}: {error}") from error

    @contextmanager
    def capture(self) -> Iterator[DeviceGraph]:
        if self._capturing:
            raise DeviceError("a graph is being captured already")
        graph = CupyGraph(self)
        with self.use():
            self.stream.begin_capture()
            self._capturing = True
            try:
                yield graph
            except BaseException:
                self._capturing = False
                with suppress(Exception):  # the error inside is the one to report
                    self.stream.end_capture()
                raise
            self._capturing = False
            graph.graph = self.stream.end_capture()

    def event(self) -> Event:
        return CupyEvent(self)

    def synchronize(self) -> None:
        self._not_in_a_capture("synchronize was called")
        with device_errors(), self.gpu:
            self.stream.synchronize()

    # -- memory --------------------------------------------------------------------------------------------------------

    def memory(self) -> MemoryInfo:
        with device_errors(), self.gpu:
            free, total = self.xp.cuda.runtime.memGetInfo()
            used, held = self.pool.used_bytes(), self.pool.total_bytes()  # a pool counts for the current device
        self._peak = max(self._peak, used)
        return MemoryInfo(total, free, used, held, self._peak, self._limit)

    def utilization(self) -> float | None:
        try:
            import pynvml  # the package nvidia-ml-py

            pynvml.nvmlInit()
            card = pynvml.nvmlDeviceGetHandleByPciBusId(self.gpu.pci_bus_id)  # NVML numbers cards in its own order
            return float(pynvml.nvmlDeviceGetUtilizationRates(card).gpu) / 100
        except Exception:  # it is not installed, or finds no driver, or the card counts nothing (MIG)
            return None

    def trim(self) -> None:
        self._not_in_a_capture("trim was called")
        with device_errors(), self.gpu:
            self.stream.synchronize()
            self.pool.free_all_blocks()
            _empty_retired_pools()

    def close(self) -> None:
        self._kernels.clear()
        self._modules.clear()
        self.trim()
