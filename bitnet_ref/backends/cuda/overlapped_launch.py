"""Launching a kernel so that it may start before the one before it has ended (programmatic dependent launch).

CuPy has no call for it, so this calls the driver's `cuLaunchKernelEx` itself, and tries once on each device whether all
of it works. The kernel must wait for the kernels before it (`griddepcontrol.wait`) before it touches what they wrote;
what it does until then overlaps their end.

Source: CUDA Driver API, "Execution Control", CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION; sm_90 and later.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from ...errors import DeviceError, OutOfMemory
from .device import Device

PROGRAMMATIC_STREAM_SERIALIZATION = 6
LEAST_CAPABILITY = (9, 0)


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: an id, and a union of 64 bytes that for this id begins with an int."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig"""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_mem", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


@cache
def driver() -> Any:
    """CUDA's driver library, or None where there is none with the call."""
    try:
        return declared(ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError):
        return None


def declared(library: Any) -> Any:
    """The same library, its call told what it takes: without that ctypes passes a pointer's lower half."""
    pointer: Any = ctypes.c_void_p
    library.cuLaunchKernelEx.argtypes = [ctypes.POINTER(LaunchConfig), pointer, pointer, pointer]
    return library


def launch(
    library: Any,
    function: int,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    args: Sequence[Any],
    shared_mem: int,
    stream: int,
) -> None:
    """Launch a CUfunction. args: CuPy arrays and NumPy scalars, as `plain_argument` gives them."""
    cells = [np.array(a) if isinstance(a, np.generic) else np.array(a.data.ptr, dtype=np.uint64) for a in args]
    pointers = (ctypes.c_void_p * len(cells))(*(cell.ctypes.data for cell in cells))
    attribute = LaunchAttribute(PROGRAMMATIC_STREAM_SERIALIZATION, b"", 1, b"")
    config = LaunchConfig(
        (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block), shared_mem, stream, ctypes.pointer(attribute), 1
    )
    status = library.cuLaunchKernelEx(ctypes.byref(config), function, pointers, None)
    if status != 0:
        raise DeviceError(f"the GPU refused an overlapped launch: cuLaunchKernelEx gives CUDA error {status}")


def works(device: Device) -> bool:
    """Whether an array that is handed on from launch to launch, all of them overlapped, arrives whole: in a graph that
    runs twice, with a fill and a copy among the launches, as recorded steps are. What a driver refuses is a no."""
    rows, width = 64, 4096
    dice = np.random.default_rng(0)
    try:
        kernel = device.kernel("rows.cu", "take_rows_float32")
        ids = device.array(np.arange(rows, dtype=np.int64))
        arrays = [device.zeros((rows, width), np.float32) for _ in range(6)]

        def hand_on() -> None:
            for number, (source, target) in enumerate(pairwise(arrays)):
                if number == 2:
                    device.fill(target, 0)
                elif number == 4:
                    device.copy(target, source)
                    continue
                kernel(rows, 1024, (source, ids, width, target), overlap=True)

        hand_on()
        with device.capture() as graph:
            hand_on()
        for _ in range(2):
            sent = dice.standard_normal((rows, width), dtype=np.float32)
            device.copy(arrays[0], sent)
            graph.launch()
            if not np.array_equal(device.to_host(arrays[-1]), sent):
                return False
    except (DeviceError, OutOfMemory):
        return False
    return True
