"""Launches that may start while the one before them still runs, by the driver: CuPy's own launches cannot ask for it.

Source: CUDA driver API, "cuLaunchKernelEx()", CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION; CUDA programming
guide, "Programmatic dependent launch": the kernel itself waits (`kernels/cuda/early.cuh`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from ...errors import ShapeError
from .sources import flattened

WAITS = "void wait_for_earlier()"  # early.cuh
CAPABILITY, DRIVER = (9, 0), 12030  # griddepcontrol; its edges in graphs that are captured
_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):  # CUlaunchAttribute: the value is a union of 64 bytes, 8 bytes from the start
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15))


class _Config(ctypes.Structure):  # CUlaunchConfig
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


_ATTRIBUTE = _Attribute(id=_SERIALIZATION, value=1)


@cache
def starts_early(file: str) -> bool:
    """Whether the kernels of a file wait themselves for the launch before."""
    return WAITS in flattened(file)


@cache
def _driver() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    return library


def launch_early(
    function: int,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    args: Sequence[Any],
    shared: int,
    stream: int,
) -> int:
    """Launch a kernel, given the driver's handle of it and of the stream.   -> a CUresult, 0: launched

    args: as `plain_launch` gives them.
    """
    packed, places = bytearray(), []
    for value in args:
        if isinstance(value, np.ndarray):
            raise ShapeError("kernel launch", expected="arrays of the device", got=f"a NumPy array {value.shape}")
        raw = value.tobytes() if isinstance(value, np.generic) else value.data.ptr.to_bytes(8, "little")
        packed += bytes(-len(packed) % len(raw))  # aligned to its size
        places.append(len(packed))
        packed += raw
    cells = (ctypes.c_char * len(packed)).from_buffer(packed)
    start = ctypes.addressof(cells)
    pointers = (ctypes.c_void_p * len(places))(*(start + place for place in places))
    config = _Config(grid, block, shared, stream, ctypes.pointer(_ATTRIBUTE), 1)
    error: int = _driver().cuLaunchKernelEx(ctypes.byref(config), function, pointers, None)
    return error
