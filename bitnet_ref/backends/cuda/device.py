"""What the CUDA backend asks of a device: arrays, kernels, graphs, memory. A GPU answers it, or its emulation.

Everything is in the order of one stream unless said otherwise: a launch or `copy` returns at once, `to_host` and
`synchronize` wait. Arrays are whatever the device's array module `xp` makes (CuPy's, or NumPy's under emulation);
kernels take them as pointers, so they must be contiguous.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ...errors import DeviceError, ShapeError

INSTALL = 'pip install "bitnet-ref[cuda12]" (or [cuda13], as nvidia-smi says)'  # CuPy, NVRTC and cuBLAS

DeviceArray = Any  # an array of the device's `xp`
Size = int | tuple[int, ...]


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes of a device. `used` and `peak` count this program's arrays, `held` what its pool has taken for them."""

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


class Graph(ABC):
    """Launches and copies, recorded once, to be run again on the same arrays, whatever those then hold."""

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
        """Between two events that have both been reached (waits for this one)."""


class Device(ABC):
    """A CUDA device, or its emulation."""

    name: str
    emulated: bool
    compute_capability: tuple[int, int]
    multiprocessors: int
    row_blocks: int  # the max blocks of `ternary_row.cu`, each of which computes the whole row: one per multiprocessor
    shared_bytes: int  # the max shared memory of a block, a kernel's own and what a launch adds: 99 KB or more
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

    def array(self, host: NDArray) -> DeviceArray:
        """A copy of a host array."""
        array = self.empty(host.shape, host.dtype)
        self.copy(array, host)
        return array

    @abstractmethod
    def fill(self, array: DeviceArray, byte: int) -> None:
        """Every byte of a contiguous array; may be captured."""

    @abstractmethod
    def copy(self, target: DeviceArray, source: DeviceArray | NDArray) -> None:
        """Into a device array from another, or from the host: contiguous, of one shape and dtype.

        May be captured between device arrays. A host array may change as soon as this returns.
        """

    @abstractmethod
    def to_host(self, array: DeviceArray) -> NDArray:
        """A copy on the host, when the work before it is done."""

    # -- work ----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def kernel(self, file: str, name: str) -> Kernel:
        """A kernel of one of the package's files ("ternary.cu"), or of a file by its path; compiled on first use.

        Ask for it before a capture, not in it.
        """

    @abstractmethod
    def matmul_16(self, x: DeviceArray, w: DeviceArray, y: DeviceArray, kind: str) -> None:
        """y (n, out) float32 = x (n, k) w (out, k)^T, both of `kind`: float16, or bfloat16 as its bits.

        Sums are float32, in an order of the device's own that may be another one for another n. Not to be captured.
        """

    @abstractmethod
    def capture(self) -> AbstractContextManager[Graph]:
        """Record the launches, copies and fills inside the `with` instead of running them."""

    @abstractmethod
    def event(self) -> Event:
        """An event here, in the order of the work."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all work. DeviceError when some of it has failed."""

    def use(self) -> AbstractContextManager[Any]:
        """What computing with `xp` itself runs in: the same device, stream and memory pool."""
        raise NotImplementedError

    # -- memory --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def memory(self) -> MemoryInfo:
        """Where memory stands."""

    @abstractmethod
    def trim(self) -> None:
        """Give back what dropped arrays have left, where it is kept for others."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the device holds beyond the arrays that are still referred to."""


def check_copy(target: Any, source: Any, from_host: bool) -> None:
    """ShapeError unless one array can be written over the other byte by byte; a host's is made contiguous first."""
    expected = "two arrays of one shape and dtype"
    got = f"{target.dtype} {target.shape} and {source.dtype} {source.shape}"
    if target.shape != source.shape or target.dtype != source.dtype:
        raise ShapeError("device copy", expected=expected, got=got)
    if not (target.flags.c_contiguous and (from_host or source.flags.c_contiguous)):
        raise ShapeError("device copy", expected=f"{expected}, contiguous", got=f"{got}, strides {source.strides}")


def plain_argument(value: Any) -> Any:
    """A kernel's argument: an array as it is, a number as the NumPy scalar that has the parameter's size."""
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


def check_launch(name: str, grid: tuple[int, ...], block: tuple[int, ...], shared_mem: int, most_shared: int) -> None:
    """The limits of every GPU from sm_80 on, and of this one's shared memory; ShapeError where one is passed."""
    threads = block[0] * block[1] * block[2]
    ok = min(*grid, *block) >= 1 and threads <= 1024 and block[2] <= 64
    ok = ok and grid[0] < 2**31 and max(grid[1:]) < 2**16 and 0 <= shared_mem <= most_shared
    if not ok:
        expected = (
            "a grid within (2^31 - 1, 65535, 65535), at most 1024 threads a block, "
            f"at most {most_shared} bytes of shared memory"
        )
        raise ShapeError(f"launch of {name}", expected=expected, got=f"grid {grid}, block {block}, {shared_mem} bytes")
