"""The device layer: which device there is and why not, arrays, memory, graphs. On the emulation, and on any GPU."""

import re
import sys
import types

import numpy as np
import pytest

from bitnet_ref.backends import cuda
from bitnet_ref.backends.cuda import cupy_device, early, sources
from bitnet_ref.backends.cuda.emulation import build as emulated_build
from bitnet_ref.backends.cuda.emulation.device import EmulatedDevice
from bitnet_ref.backends.cuda.workspace import Workspace
from bitnet_ref.errors import BackendUnavailable, DeviceError, OutOfMemory, ShapeError


@pytest.fixture(params=["emulated", "gpu"])
def device(request, monkeypatch):
    monkeypatch.setenv("BITNET_REF_CUDA", request.param)
    if (reason := cuda.why_unavailable()) is not None:
        pytest.skip(reason)
    found = cuda.open_device(memory_limit=1 << 24)
    yield found
    found.close()


def test_arrays_come_back(device):
    for host in (np.arange(12, dtype=np.float32).reshape(3, 4), np.ones((2, 0), dtype=np.int8), np.array(5)):
        array = device.array(host)
        assert (array.shape, array.dtype) == (host.shape, host.dtype)
        np.testing.assert_array_equal(device.to_host(array), host)
    other = device.zeros((3, 4), np.float32)
    device.copy(other, device.array(np.full((3, 4), 2, dtype=np.float32)))
    assert device.to_host(other).sum() == 24
    device.fill(other, 0)
    assert device.to_host(other).sum() == 0
    with pytest.raises(ShapeError, match=r"float32 \(3, 4\) and float64 \(4,\)"):
        device.copy(other, np.zeros(4))
    square = device.array(np.arange(9, dtype=np.int32).reshape(3, 3))
    for target, source in ((device.zeros((3, 2), np.int32), square[:, :2]), (square[:, :2], np.ones((3, 2), np.int32))):
        with pytest.raises(ShapeError, match=r"contiguous.*strides"):
            device.copy(target, source)
    device.copy(square, np.arange(9, dtype=np.int32).reshape(3, 3).T)  # the host's may lie as it likes
    assert device.to_host(square)[0].tolist() == [0, 3, 6]


def test_events(device):
    before = device.event()
    array = device.array(np.arange(4, dtype=np.int32))
    after = device.event()
    after.synchronize()
    assert after.seconds_since(before) >= 0
    device.synchronize()
    assert device.to_host(array).tolist() == [0, 1, 2, 3]


def test_memory_is_counted_limited_and_given_back(device):
    start = device.memory()
    array = device.empty(1 << 20, np.float32)
    assert device.memory().used - start.used == 4 << 20
    assert device.memory().limit == 1 << 24
    view = array[10:]
    del array
    assert device.memory().used - start.used == 4 << 20  # the view still refers to it
    del view
    assert device.memory().used == start.used
    assert device.memory().peak >= start.used + (4 << 20)
    with pytest.raises(OutOfMemory):
        device.empty(1 << 23, np.float32)
    for _ in range(100):  # nothing leaks, or the limit would be met
        device.array(np.zeros(1 << 20, dtype=np.uint8))


def test_a_graph_runs_when_it_is_launched(device):
    source, target = device.array(np.arange(4, dtype=np.int32)), device.zeros(4, np.int32)
    with device.capture() as graph:
        device.copy(target, source)
    assert device.to_host(target).tolist() == [0, 0, 0, 0]
    graph.launch()
    assert device.to_host(target).tolist() == [0, 1, 2, 3]
    device.fill(source, 0)
    graph.launch()
    assert device.to_host(target).tolist() == [0, 0, 0, 0]


def test_the_emulation_finds_a_graph_of_arrays_that_are_gone():
    """A GPU would read whatever lies there now."""
    device = EmulatedDevice()
    source, target = device.array(np.arange(4, dtype=np.int32)), device.zeros(4, np.int32)
    view = source[2:]
    with device.capture() as graph:
        device.copy(target[:2], view)
        device.fill(target[3:], 255)
    del source
    graph.launch()  # the view keeps it
    assert target.tolist() == [2, 3, 0, -1]
    del view
    with pytest.raises(DeviceError, match="uses an array which was freed"):
        graph.launch()


def test_what_a_capture_refuses(device):
    with device.capture(), pytest.raises(DeviceError, match="while a graph is captured"):
        device.empty(4, np.int32)
    with device.capture(), pytest.raises(DeviceError, match="while a graph is captured"):
        device.synchronize()
    with device.capture(), pytest.raises(DeviceError, match="captured already"), device.capture():
        pass
    array, host = device.zeros(4, np.int32), np.zeros(4, dtype=np.int32)
    for call in (lambda: device.copy(array, host), lambda: device.to_host(array), device.trim):
        with device.capture(), pytest.raises(DeviceError, match="while a graph is captured"):
            call()
    assert device.to_host(device.zeros(2, np.int8)).tolist() == [0, 0]


def test_the_emulation_is_as_late_as_a_gpu_may_be():
    """A program may not count on a result that it has not waited for."""
    device = EmulatedDevice(late=True)
    host = np.array([1, 2], dtype=np.int32)
    array = device.array(host)
    host[:] = 3, 4  # the device has its own copy
    arrived = device.event()
    device.fill(array, 0)
    assert array.tolist() == [-1, -1]  # neither has happened
    arrived.synchronize()
    assert array.tolist() == [1, 2]
    assert device.to_host(array).tolist() == [0, 0]


@pytest.mark.parametrize(("blocking", "late"), [("", True), ("0", True), ("1", False)])
def test_launches_that_block_run_at_once(monkeypatch, blocking, late):
    monkeypatch.setenv("BITNET_REF_CUDA", "emulated")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", blocking)
    device = cuda.open_device()
    array = device.zeros(4, np.int8)
    assert (array.tolist() != [0] * 4) == late
    device.synchronize()
    assert array.tolist() == [0] * 4


@pytest.mark.thorough
def test_an_error_comes_when_it_is_waited_for(tmp_path):
    """And what was to come after it does not, as on a card."""
    source = tmp_path / "stops.cu"
    source.write_text('extern "C" __global__ void stops(int *y) { if (threadIdx.x == 0) __syncthreads(); y[0] = 1; }')
    device = EmulatedDevice(late=True)
    y = device.zeros(1, np.int32)
    device.kernel(str(source), "stops")(1, 64, (y,))
    device.fill(y, 5)
    with pytest.raises(DeviceError, match="stops"):
        device.synchronize()
    assert device.to_host(y).tolist() != [0x05050505]


def test_new_memory_of_the_emulation_is_no_number_and_aligned():
    array = EmulatedDevice().empty((3, 5), np.float32)
    assert np.isnan(array).all()
    assert array.ctypes.data % 256 == 0


# -- which device ------------------------------------------------------------------------------------------------------


def test_the_variable_chooses(monkeypatch):
    monkeypatch.setenv("BITNET_REF_CUDA", "emulated")
    if emulated_build.compiler() is not None:
        assert cuda.why_unavailable() is None
        assert cuda.open_device().emulated
    monkeypatch.setenv("BITNET_REF_CUDA", "imaginary")
    with pytest.raises(BackendUnavailable, match="BITNET_REF_CUDA='imaginary': expected gpu"):
        cuda.open_device()


@pytest.fixture
def asked_anew():
    cupy_device.why_unavailable.cache_clear()
    yield
    cupy_device.why_unavailable.cache_clear()


def stand_in(monkeypatch, count=1, capability=(9, 0), error=None, nvrtc_error=None):
    """A module in CuPy's place that answers what the checks before any computing ask."""

    class CUDARuntimeError(RuntimeError):
        pass

    def get_device_count():
        if error:
            raise CUDARuntimeError(error)
        return count

    facts = {"major": capability[0], "minor": capability[1], "name": b"An old card"}
    runtime = types.SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError, getDeviceCount=get_device_count, getDeviceProperties=lambda index: facts
    )

    def get_version():
        if nvrtc_error:
            raise RuntimeError(nvrtc_error)
        return 13, 0

    module = types.ModuleType("cupy")
    module.cuda = types.SimpleNamespace(runtime=runtime, nvrtc=types.SimpleNamespace(getVersion=get_version))
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(cupy_device, "find_spec", lambda name: object())


def test_no_cupy(monkeypatch, asked_anew):
    monkeypatch.setattr(cupy_device, "find_spec", lambda name: None)
    monkeypatch.delenv("BITNET_REF_CUDA", raising=False)
    reason = cuda.why_unavailable()
    assert reason.startswith("CuPy is not installed: pip install")
    with pytest.raises(BackendUnavailable, match="CuPy is not installed"):
        cuda.open_device()


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"error": "cudaErrorInsufficientDriver: CUDA driver version is insufficient"}, "CuPy finds no GPU .*driver"),
        ({"count": 0}, "there is no GPU 0: this machine has 0"),
        ({"capability": (7, 5)}, "An old card has compute capability 7.5; the kernels need 8.0"),
        ({"nvrtc_error": "CuPy failed to load libnvrtc.so.12"}, "does not find NVRTC.* libnvrtc.so.12.*pip install"),
    ],
)
def test_a_gpu_that_cannot_be_used(facts, reason, monkeypatch, asked_anew):
    stand_in(monkeypatch, **facts)
    with pytest.raises(BackendUnavailable, match=reason):
        cupy_device.CupyDevice()


def test_a_kernel_may_have_all_shared_memory_of_a_block():
    """The driver gives 48 KB unasked, of which a kernel's own are a part; and two devices may have one kernel."""
    function, device = types.SimpleNamespace(shared_size_bytes=4480), types.SimpleNamespace(shared_bytes=99 << 10)
    for _ in range(2):
        launch = cupy_device.CupyKernel(device, function, "f")
        assert function.max_dynamic_shared_size_bytes == (99 << 10) - 4480
        assert function.preferred_shared_memory_carveout == 100
    with pytest.raises(ShapeError, match="at most 96896 bytes of shared memory"):
        launch(1, 32, (), (99 << 10) - 4480 + 1)


def test_cupy_that_does_not_load(monkeypatch, asked_anew):
    monkeypatch.setattr(cupy_device, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "cupy", None)  # importing it raises ImportError
    assert "does not load" in cupy_device.why_unavailable()


def test_real_cupy_without_a_gpu_says_so(asked_anew):
    cupy = pytest.importorskip("cupy")
    reason = cupy_device.why_unavailable()
    if reason is None:
        pytest.skip(f"there is a GPU: {cupy.cuda.runtime.getDeviceCount()}")
    assert "CuPy finds no GPU" in reason or "there is no GPU" in reason
    with pytest.raises(BackendUnavailable):
        cupy_device.CupyDevice()


@pytest.mark.parametrize("file", [file for file in sources.files() if early.starts_early(file)])
def test_kernels_that_start_early_wait(file):
    """Each by itself, or in the one function that it calls; see early.cuh."""
    text = sources.find(file).read_text().replace("\\\n", "\n")
    waits = r"wait_for_(end_of_)?earlier\(\);"
    device = re.findall(r"^[^\n]*__device__ [^;{]*?(\w+)\([^{}]*\) \{(.*?)^\}", text, re.S | re.M)
    functions = {name for name, body in device if re.search(waits, body)}
    kernels = [each for each in re.split(r"__global__", text)[1:] if "{" in each]  # a macro's head may have no body
    assert kernels
    calls = "|".join([waits, *(rf"\b{name}[<(]" for name in functions)])
    assert [kernel[:80] for kernel in kernels if not re.search(calls, kernel)] == []


def test_the_emulation_refuses_what_a_card_would_compute_beside_its_stream():
    """`x[rows]` by CuPy ran before the kernels that fill x had ended: seen on an H200, as NaN now and then."""
    ws = Workspace(EmulatedDevice())
    x = ws.upload(np.ones((3, 4), np.float32))
    assert x[1:].shape == (2, 4)
    for wrong in (lambda: x[[0, 2]], lambda: x[np.array([0])], lambda: x + 1, lambda: np.add(x, x)):
        with pytest.raises(DeviceError, match=r"take_rows|beside its stream"):
            wrong()
