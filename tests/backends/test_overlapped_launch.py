"""The driver call behind overlapped launches, made to a library built from CUDA's own header in the driver's place."""

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bitnet_ref.backends.cuda import overlapped_launch
from bitnet_ref.backends.cuda.emulation import build as emulated_build
from bitnet_ref.backends.cuda.emulation.device import EmulatedDevice
from bitnet_ref.errors import DeviceError

HEADERS = [path for path in (Path("/usr/local/cuda/include"), Path("/usr/include")) if (path / "cuda.h").is_file()]
needs_header = pytest.mark.skipif(not HEADERS or shutil.which("g++") is None, reason="no cuda.h, or no C++ compiler")
needs_compiler = pytest.mark.skipif(emulated_build.compiler() is None, reason="no C++ compiler")

DRIVER = """
#include <cuda.h>
#include <cstdint>
#include <cstring>
struct Seen {
    unsigned sizes[7];
    uint64_t stream, function, pointer;
    int attributes, id, value, number;
    float fraction;
} seen;
CUresult cuLaunchKernelEx(const CUlaunchConfig *how, CUfunction function, void **parameters, void **extra) {
    const unsigned sizes[7] = {how->gridDimX, how->gridDimY, how->gridDimZ, how->blockDimX, how->blockDimY,
                               how->blockDimZ, how->sharedMemBytes};
    memcpy(seen.sizes, sizes, sizeof sizes);
    seen.stream = (uint64_t)how->hStream, seen.function = (uint64_t)function;
    seen.attributes = how->numAttrs, seen.id = how->attrs[0].id;
    seen.value = how->attrs[0].value.programmaticStreamSerializationAllowed;
    seen.pointer = *(uint64_t *)parameters[0], seen.number = *(int *)parameters[1];
    seen.fraction = *(float *)parameters[2];
    const bool right = seen.id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION && extra == nullptr &&
                       *(uint64_t *)parameters[3] == 0;
    return right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
extern "C" const Seen *what_was_seen() { return &seen; }
"""


class Seen(ctypes.Structure):
    _fields_ = (
        ("sizes", ctypes.c_uint * 7),
        *((name, ctypes.c_uint64) for name in ("stream", "function", "pointer")),
        *((name, ctypes.c_int) for name in ("attributes", "id", "value", "number")),
        ("fraction", ctypes.c_float),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.cpp").write_text(DRIVER)
    command = [
        "g++",
        "-shared",
        "-fPIC",
        f"-I{HEADERS[0]}",
        "-o",
        str(folder / "driver.so"),
        str(folder / "driver.cpp"),
    ]
    subprocess.run(command, check=True)
    found = overlapped_launch.declared(ctypes.CDLL(str(folder / "driver.so")))
    found.what_was_seen.restype = ctypes.POINTER(Seen)
    return found


@needs_header
def test_the_driver_gets_what_was_asked_for(library):
    array = SimpleNamespace(data=SimpleNamespace(ptr=0x7F0000000100))  # all that is asked of a CuPy array
    args = (array, np.int32(-5), np.float32(0.25), np.uint64(0))
    overlapped_launch.launch(library, 0x1234567890, (7, 6, 5), (32, 2, 1), args, 1024, 0xABCDEF0123)
    seen = library.what_was_seen().contents
    assert list(seen.sizes) == [7, 6, 5, 32, 2, 1, 1024]
    assert (seen.stream, seen.function, seen.pointer) == (0xABCDEF0123, 0x1234567890, 0x7F0000000100)
    assert (seen.attributes, seen.value, seen.number, seen.fraction) == (1, 1, -5, 0.25)


@needs_header
def test_the_drivers_errors_are_told(library):
    args = (np.uint64(0), np.int32(0), np.float32(0), np.uint64(1))  # which this driver refuses
    with pytest.raises(DeviceError, match="cuLaunchKernelEx gives CUDA error 1"):
        overlapped_launch.launch(library, 1, (1, 1, 1), (1, 1, 1), args, 0, 0)


@needs_compiler
def test_whether_it_works_is_tried():
    assert overlapped_launch.works(EmulatedDevice())


@needs_compiler
def test_a_device_that_loses_something_does_not_work():
    class Forgetful(EmulatedDevice):
        def copy(self, target, source):
            super().copy(target, source)
            if self._recording is None and isinstance(source, np.ndarray):
                target[..., -1] = 0

    assert not overlapped_launch.works(Forgetful())


@needs_compiler
def test_a_device_that_refuses_does_not_work():
    class Unwilling(EmulatedDevice):
        def kernel(self, file, name):
            def refuse(*args, overlap=False):
                raise DeviceError("cuLaunchKernelEx gives CUDA error 801")

            return refuse

    assert not overlapped_launch.works(Unwilling())
    assert not overlapped_launch.works(EmulatedDevice(memory_limit=1 << 20))


@needs_compiler
def test_a_kernel_that_waits_for_nothing_is_found(tmp_path):
    """What guards the package's own kernels: recorded steps launch all of them so."""
    file = tmp_path / "hasty.cu"
    file.write_text('#include "common.cuh"\nextern "C" __global__ void hasty(int *y) { y[threadIdx.x] = 1; }\n')
    device = EmulatedDevice()
    kernel, y = device.kernel(str(file), "hasty"), device.zeros(32, np.int32)
    kernel(1, 32, (y,))
    with pytest.raises(DeviceError, match="launched to overlap, and waits for nothing"):
        kernel(1, 32, (y,), overlap=True)


EARLY = """
#include "common.cuh"
extern "C" __global__ void gives(int *y, int i) {
    begin_in_turn();
    if (threadIdx.x == i) y[i]++;
}
extern "C" __global__ void takes(const int *x, int early, int *y) {
    int value = early ? x[threadIdx.x] : 0;
    __syncthreads();
    begin_in_turn();
    y[threadIdx.x] = early ? value : x[threadIdx.x];
}
"""


@needs_compiler
@pytest.mark.parametrize(("hides", "early"), [(False, True), (True, False), (True, True)])
def test_a_kernel_that_reads_a_graphs_results_before_it_waits_is_found(tmp_path, hides, early):
    """However many launches back it was written; what the graph leaves as it was may be read. Elsewhere by chance."""
    file = tmp_path / "early.cu"
    file.write_text(EARLY)
    device = EmulatedDevice(hides=hides, late=True)
    x, other, y = (device.zeros(32, np.int32) for _ in range(3))
    gives, takes = (device.kernel(str(file), name) for name in ("gives", "takes"))
    with device.capture() as graph:
        gives(1, 32, (x, 3), overlap=True)
        gives(1, 32, (other, 0), overlap=True)
        takes(1, 32, (x, int(early), y), overlap=True)
    for time in (1, 2):
        graph.launch()
        expected = np.where(np.arange(32) == 3, time, 0)
        if hides and early:
            expected[3] = 0xFF  # the byte that has changed
        np.testing.assert_array_equal(device.to_host(y), expected)
        np.testing.assert_array_equal(device.to_host(x), np.where(np.arange(32) == 3, time, 0))
