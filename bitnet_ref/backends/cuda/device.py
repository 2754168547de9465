"""The interface of a CUDA device: arrays, kernels, graphs, memory. Implemented by a GPU and by its emulation.

All work is in the order of one stream: a launch or `copy` returns at once, `to_host` and `synchronize` wait. Arrays are
those of the device's array module `xp` (CuPy's, or NumPy's under emulation). Kernels take them as pointers, so they
must be contiguous.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike

from ...errors import DeviceError, ShapeError
from ...reference.layers import Array

INSTALL = 'pip install "bitnet-ref[cuda12]" (or [cuda13], as nvidia-smi says)'  # CuPy, NVRTC and cuBLAS

DeviceArray = Array  # of the device's `xp`: CuPy's have NumPy's interface
Size = int | tuple[int, ...]


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes of a device. `used` and `peak` count this program's arrays, `held` the memory of its pool."""

    total: int
    free: int
    used: int
    held: int
    peak: int
    limit: int | None


class Kernel(Protocol):
    """A `__global__` function, ready to launch."""

    name: str

    def __call__(self, grid: Size, block: Size, args: Sequence[Any], shared_mem: int = 0) -> None:
        """Launch. args: device arrays (their pointers), None (a null pointer), NumPy scalars (as they are), int (as
        int32), float (as float32). shared_mem: bytes of dynamic shared memory; with the kernel's own, at most the
        device's `shared_bytes`.
        """


class DeviceGraph(ABC):
    """Launches and copies, recorded once, to be run again on the current contents of the same arrays."""

    @abstractmethod
    def launch(self) -> None:
        """Run all of it, in stream order."""


class Event(ABC):
    """A point in the order of the work."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the work before it is done."""

    @abstractmethod
    def seconds_since(self, earlier: Event) -> float:
        """The time between two events. Waits for this one."""


class Device(ABC):
    """A CUDA device, or its emulation."""

    name: str
    emulated: bool
    compute_capability: tuple[int, int]
    multiprocessors: int
    row_blocks: int  # max blocks of `ternary_row.cu`, each of which computes the whole row
    shared_bytes: int  # max shared memory of a block, the kernel's own and the launch's: 99 KB or more
    l2_bytes: int
    can_matmul_16: bool  # whether `matmul_16` is available
    xp: Any  # numpy or cupy
    _capturing: bool

    def _not_in_a_capture(self, what: str) -> None:
        if self._capturing:
            raise DeviceError(f"{what} while a graph is captured")

    # -- arrays --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def empty(self, shape: Size, dtype: DTypeLike) -> DeviceArray:
        """An array of unknown contents, aligned to 256 bytes. OutOfMemory if it does not fit; not while capturing."""

    def zeros(self, shape: Size, dtype: DTypeLike) -> DeviceArray:
        array = self.empty(shape, dtype)
        self.fill(array, 0)
        return array

    def array(self, host: Array) -> DeviceArray:
        """A copy of a host array."""
        array = self.empty(host.shape, host.dtype)
        self.copy(array, host)
        return array

    @abstractmethod
    def fill(self, array: DeviceArray, byte: int) -> None:
        """Set every byte of a contiguous array. May be captured."""

    @abstractmethod
    def copy(self, target: DeviceArray, source: DeviceArray | Array) -> None:
        """Copy into a device array from another, or from the host: contiguous, of one shape and dtype.

        May be captured between device arrays. A host array may change as soon as this returns.
        """

    @abstractmethod
    def to_host(self, array: DeviceArray) -> Array:
        """A copy on the host. Waits for the work before it."""

    # -- work ----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def kernel(self, file: str, name: str) -> Kernel:
        """A kernel of one of the package's files ("ternary.cu"), or of a file by its path; compiled on first use, which
        must not be inside a capture."""

    @abstractmethod
    def matmul_16(self, x: DeviceArray, w: DeviceArray, y: DeviceArray, kind: str) -> None:
        """y (n, out) float32 = x (n, k) w (out, k)^T, both of `kind`: float16, or bfloat16 as its bits.

        Sums are float32, in an order of the device's own that may depend on n. Must not be captured.
        """

    @abstractmethod
    def capture(self) -> AbstractContextManager[DeviceGraph]:
        """Record the launches, copies and fills inside the `with` instead of running them."""

    @abstractmethod
    def event(self) -> Event:
        """An event after the work so far."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all work. Raises DeviceError if some of it failed."""

    def use(self) -> AbstractContextManager[Any]:
        """The context for computing with `xp` itself: this device, its stream and its memory pool."""
        raise NotImplementedError

    # -- memory --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def memory(self) -> MemoryInfo:
        """The memory now."""

    def utilization(self) -> float | None:
        """As of `Backend`."""
        return None

    @abstractmethod
    def trim(self) -> None:
        """Free the memory of dropped arrays that the pool keeps."""

    @abstractmethod
    def close(self) -> None:
        """Free what the device holds beyond the arrays that are still referred to."""


def check_copy(target: Any, source: Any, from_host: bool) -> None:
    """Raises ShapeError unless `source` can be copied to `target` byte by byte. A host array may have any strides."""
    expected = "two arrays of one shape and dtype"
    got = f"{target.dtype} {target.shape} and {source.dtype} {source.shape}"
    if target.shape != source.shape or target.dtype != source.dtype:
        raise ShapeError("device copy", expected=expected, got=got)
    if not (target.flags.c_contiguous and (from_host or source.flags.c_contiguous)):
        raise ShapeError("device copy", expected=f"{expected}, contiguous", got=f"{got}, strides {source.strides}")


def plain_argument(value: Any) -> Any:
    """A kernel's argument: an array unchanged, a number as the NumPy scalar of the parameter's size."""
    if value is None:
        return np.uint64(0)
    if isinstance(value, np.generic):  # before the next: a float64 is a float too
        return value
    if isinstance(value, int):
        if not -(2**31) <= value < 2**31:
            raise ShapeError("kernel launch", expected="an int32, or a NumPy scalar of the right size", got=str(value))
        return np.int32(value)
    if isinstance(value, float):
        return np.float32(value)
    if not value.flags.c_contiguous:
        got = f"{value.dtype} {value.shape}, strides {value.strides}"
        raise ShapeError("kernel launch", expected="contiguous arrays", got=got)
    return value


def three(size: Size) -> tuple[int, int, int]:
    """5 -> (5, 1, 1)"""
    sizes = (size,) if isinstance(size, int) else tuple(int(each) for each in size)
    x, y, z = (*sizes, 1, 1, 1)[:3]
    return x, y, z


def plain_launch(
    name: str, grid: Size, block: Size, args: Sequence[Any], shared_mem: int, max_shared: int
) -> tuple[tuple[int, int, int], tuple[int, int, int], tuple[Any, ...]]:
    """A launch's grid, block and arguments, as `three` and `plain_argument` give them.

    Raises ShapeError beyond the limits of every GPU from sm_80 on, or of this one's shared memory.
    """
    grid, block = three(grid), three(block)
    threads = block[0] * block[1] * block[2]
    ok = min(*grid, *block) >= 1 and threads <= 1024 and block[2] <= 64
    ok = ok and grid[0] < 2**31 and max(grid[1:]) < 2**16 and 0 <= shared_mem <= max_shared
    if not ok:
        expected = (
            "a grid within (2^31 - 1, 65535, 65535), at most 1024 threads a block, "
            f"at most {max_shared} bytes of shared memory"
        )
        raise ShapeError(f"launch of {name}", expected=expected, got=f"grid {grid}, block {block}, {shared_mem} bytes")
    return grid, block, tuple(plain_argument(value) for value in args)
