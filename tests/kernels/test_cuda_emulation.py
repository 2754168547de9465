"""The emulation by itself: that it computes as a GPU would, and that it finds what a GPU would leave to chance."""

import sys

import ml_dtypes
import numpy as np
import pytest
from helpers import run_sanitized

from bitnet_ref.backends.cuda import sources
from bitnet_ref.backends.cuda.emulation import build as emulated_build
from bitnet_ref.backends.cuda.emulation.device import EmulatedDevice
from bitnet_ref.errors import BackendUnavailable, DeviceError, ShapeError

pytestmark = pytest.mark.skipif(emulated_build.compiler() is None, reason="no C++ compiler")

KERNELS = """
#include "common.cuh"
#include "mma.cuh"

#define KERNEL extern "C" __global__ void

KERNEL divergent_barrier(int *y) {
    if (threadIdx.x < 32) __syncthreads();
    y[threadIdx.x] = 1;
}
KERNEL two_barriers(int *y) {
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
    y[threadIdx.x] = 1;
}
KERNEL masks_that_differ(int *y) {
    y[threadIdx.x] = __shfl_xor_sync(threadIdx.x < 16 ? 0xffffffffu : 0xffff8000u, 1, 1);
}
KERNEL operations_that_differ(int *y) {
    y[threadIdx.x] = threadIdx.x < 16 ? __shfl_xor_sync(ALL_LANES, 1, 1) : int(__ballot_sync(ALL_LANES, 1));
}
KERNEL from_an_exited_lane(int *y) {
    if (threadIdx.x == 3) return;
    y[threadIdx.x] = __shfl_sync(ALL_LANES, int(threadIdx.x), 3);
}
KERNEL a_lane_waits_for_ever(int *y) {
    if (threadIdx.x == 3) __syncthreads();
    y[threadIdx.x] = __shfl_xor_sync(ALL_LANES, 1, 1);
}
KERNEL past_shared_memory(int *y) {
    dynamic_shared<int>()[threadIdx.x] = y[0];
}
KERNEL no_barrier(int *y) {
    __shared__ int before[64];
    before[threadIdx.x] = threadIdx.x;
    y[threadIdx.x] = before[63 - threadIdx.x];
}
KERNEL with_barrier(int *y) {
    __shared__ int before[64];
    before[threadIdx.x] = threadIdx.x;
    __syncthreads();
    y[threadIdx.x] = before[63 - threadIdx.x];
}
KERNEL warp_operations(const int *x, int *y) {  // 64 threads, one warp and another
    const int value = x[threadIdx.x], n = blockDim.x;
    y[threadIdx.x] = __shfl_xor_sync(ALL_LANES, value, 6);
    y[n + threadIdx.x] = __shfl_sync(ALL_LANES, value, 9, 8);
    y[2 * n + threadIdx.x] = int(__ballot_sync(ALL_LANES, value & 1));
    y[3 * n + threadIdx.x] = __reduce_max_sync(ALL_LANES, value);
    y[4 * n + threadIdx.x] = __syncthreads_or(threadIdx.x == 40 && value > 5000);
    y[5 * n + threadIdx.x] = __syncthreads_or(threadIdx.x == 40);
    y[6 * n + threadIdx.x] = warp_sum(value);
}
KERNEL half_a_warp(int *y) {  // lanes of one mask go on without the others
    if (threadIdx.x >= 16) return;
    y[threadIdx.x] = __shfl_xor_sync(0xffffu, int(threadIdx.x), 8);
}
KERNEL block_operations(const float *x, int n, float *y) {
    __shared__ float sums[32];
    __shared__ int of_largest[32];
    float sum = 0, largest = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += x[i], largest = Max::combine(largest, fabsf(x[i]));
    sum = block_sum(sum, sums);
    largest = block_largest(largest, of_largest);
    if (threadIdx.x == 0) y[0] = sum, y[1] = largest;
}
KERNEL halves(unsigned short *h, float *f, unsigned short *b, float *g, int back) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (back) {
        h[i] = float_to_half(f[i]);
        b[i] = float_to_bfloat16(f[i]);
    } else {
        f[i] = half_to_float(h[i]);
        g[i] = bfloat16_to_float(b[i]);
    }
}
KERNEL integer_functions(const unsigned *a, const unsigned *b, const unsigned *c, int *y) {
    const int i = threadIdx.x, n = blockDim.x;
    y[i] = __dp4a(int(a[i]), int(b[i]), int(c[i]));
    y[n + i] = int(__byte_perm(a[i], b[i], c[i] & 0x7777));
    y[2 * n + i] = __clz(int(a[i]));
}
KERNEL one_mma(const signed char *a, const signed char *b, int *d) {  // a (16, 32), b (8, 32): its columns
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    const unsigned *words_a = reinterpret_cast<const unsigned *>(a), *words_b = reinterpret_cast<const unsigned *>(b);
    const unsigned left[4] = {words_a[8 * g + t], words_a[8 * (g + 8) + t], words_a[8 * g + t + 4],
                              words_a[8 * (g + 8) + t + 4]};
    const unsigned right[2] = {words_b[8 * g + t], words_b[8 * g + t + 4]};
    int sums[4] = {1, 2, 3, 4};
    mma_s8(sums, left, right);
    d[8 * g + 2 * t] = sums[0], d[8 * g + 2 * t + 1] = sums[1];
    d[8 * (g + 8) + 2 * t] = sums[2], d[8 * (g + 8) + 2 * t + 1] = sums[3];
}
KERNEL bf16_mma(const unsigned short *a, const unsigned short *b, float *d) {  // 3 x 2 tiles, two steps
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    const unsigned *words_a = reinterpret_cast<const unsigned *>(a), *words_b = reinterpret_cast<const unsigned *>(b);
    unsigned left[3][2][4], right[2][2][2];
    float sums[3][2][4];
    for (int step = 0; step < 2; step++) {
        for (int r = 0; r < 3; r++)
            for (int i = 0; i < 4; i++)
                left[r][step][i] = words_a[(16 * r + g + i % 2 * 8) * 16 + 8 * step + t + i / 2 * 4];
        for (int c = 0; c < 2; c++)
            for (int i = 0; i < 2; i++) right[c][step][i] = words_b[(8 * c + g) * 16 + 8 * step + t + i * 4];
    }
    auto place = [&](int r, int c, int i) { return ((16 * r + g + i / 2 * 8) * 2 + c) * 8 + 2 * t + i % 2; };
    for (int r = 0; r < 3; r++)
        for (int c = 0; c < 2; c++)
            for (int i = 0; i < 4; i++) sums[r][c][i] = d[place(r, c, i)];
    mma_bf16(sums, left, right);
    for (int r = 0; r < 3; r++)
        for (int c = 0; c < 2; c++)
            for (int i = 0; i < 4; i++) d[place(r, c, i)] = sums[r][c][i];
}
KERNEL kinds(const float *, int, unsigned, long long, float, double) {}
"""

BOUNDS = """
#define KERNEL extern "C" __global__ void
KERNEL of_an_array(int *y) { y[threadIdx.x] = 1; }
KERNEL of_shared_memory(int *y) {
    __shared__ int few[60];
    few[threadIdx.x] = y[0];
    __syncthreads();
    y[threadIdx.x] = few[59 - threadIdx.x % 60];
}
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("cuda") / "kernels.cu"
    path.write_text(KERNELS)
    return str(path)


def failure(file, kernel, threads=64, shared_mem=0):
    device = EmulatedDevice()
    with pytest.raises(DeviceError) as caught:
        device.kernel(file, kernel)(1, threads, (device.zeros(64, np.int32),), shared_mem)
    return str(caught.value)


@pytest.mark.thorough
def test_a_barrier_that_some_never_reach(file):
    message = failure(file, "divergent_barrier")
    assert "32 of 64 have exited; thread 0 waits in __syncthreads at line 8" in message


@pytest.mark.thorough
def test_threads_at_different_barriers(file):
    message = failure(file, "two_barriers")
    assert "thread 0 waits in __syncthreads at line 13" in message
    assert "thread 32 waits in __syncthreads at line 15" in message


@pytest.mark.thorough
def test_collectives_that_do_not_match(file):
    message = failure(file, "masks_that_differ", 32)
    assert "different collectives: __shfl_sync with mask 0xffff8000 and __shfl_sync with mask 0xffffffff" in message
    message = failure(file, "operations_that_differ", 32)
    assert "different collectives: __ballot_sync" in message or "different collectives: __shfl_sync" in message
    assert "a shuffle from lane 3, which takes no part" in failure(file, "from_an_exited_lane", 32)
    message = failure(file, "a_lane_waits_for_ever", 32)
    assert "thread 0 waits in __shfl_sync with mask 0xffffffff; thread 3 waits in __syncthreads" in message


@pytest.mark.thorough
def test_writes_past_shared_memory(file):
    assert "a write past the 100 bytes of dynamic shared memory, at byte 100" in failure(
        file, "past_shared_memory", shared_mem=100
    )


@pytest.mark.thorough
def test_a_failed_launch_leaves_nothing_behind(file):
    failure(file, "divergent_barrier")
    device = EmulatedDevice()
    y = device.zeros(64, np.int32)
    device.kernel(file, "with_barrier")(3, 64, (y,))
    np.testing.assert_array_equal(device.to_host(y), np.arange(64)[::-1])


@pytest.mark.thorough
def test_a_missing_barrier_shows_in_another_order(file):
    results = []
    for kernel in ("no_barrier", "with_barrier"):
        for order in (0, 1, 2):
            device = EmulatedDevice(order=order)
            y = device.zeros(64, np.int32)
            device.kernel(file, kernel)(1, 64, (y,))
            results.append(device.to_host(y).tolist())
    racing, right = results[:3], results[3:]
    assert right[0] == right[1] == right[2]
    assert racing[0] != racing[1] != racing[2]
    assert np.int32(-842150451) in racing[0]  # 0xCDCDCDCD: read before it was written


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD")
def test_the_sanitizer_finds_accesses_out_of_bounds(tmp_path):
    path = tmp_path / "bounds.cu"
    path.write_text(BOUNDS)
    code = (
        "import sys; import numpy as np; from bitnet_ref.backends.cuda.emulation.device import EmulatedDevice\n"
        "device = EmulatedDevice(sanitize=True); y = device.zeros(60, np.int32)\n"
        "kernel = device.kernel(sys.argv[1], sys.argv[2])\n"
        "kernel(1, 60, (y,)); print('60 are fine'); kernel(1, 61, (y,))"
    )
    for kernel, wrong in {"of_an_array": "heap-buffer-overflow", "of_shared_memory": "index 60 out of bounds"}.items():
        done = run_sanitized(code, str(path), kernel)
        assert done.stdout == "60 are fine\n"
        assert done.returncode != 0
        assert wrong in done.stderr


@pytest.mark.slow
def test_the_other_way_to_switch_stacks(tmp_path, monkeypatch):
    """ucontext, for processors that have no switch of their own."""
    path = tmp_path / "other.cu"
    path.write_text(KERNELS)
    monkeypatch.setattr(emulated_build, "FLAGS", [*emulated_build.FLAGS, "-DBITNET_REF_UCONTEXT"])
    test_warps_and_blocks(str(path))
    test_mma_is_a_product_of_matrices(str(path))
    test_mma_of_bfloat16_is_a_product_of_matrices(str(path))
    test_a_failed_launch_leaves_nothing_behind(str(path))


@pytest.mark.thorough
def test_warps_and_blocks(file):
    device = EmulatedDevice(order=5)
    x = np.random.default_rng(0).integers(-1000, 1000, 64).astype(np.int32)
    y = device.empty((7, 64), np.int32)
    device.kernel(file, "warp_operations")(1, 64, (device.array(x), y))
    warps, lane = x.reshape(2, 32), np.arange(32)
    expected = [
        warps[:, lane ^ 6],
        warps[:, lane // 8 * 8 + 1],
        np.repeat(((warps.astype(np.int64) & 1) << lane).sum(1, keepdims=True), 32, 1).astype(np.uint32).view("i4"),
        np.repeat(warps.max(1, keepdims=True), 32, 1),
        np.full((2, 32), 0),
        np.full((2, 32), 1),
        np.repeat(warps.sum(1, keepdims=True), 32, 1),
    ]
    for found, right in zip(device.to_host(y), expected, strict=True):
        np.testing.assert_array_equal(found, right.reshape(-1))
    y = device.zeros(32, np.int32)
    device.kernel(file, "half_a_warp")(1, 32, (y,))
    np.testing.assert_array_equal(device.to_host(y)[:16], np.arange(16) ^ 8)


@pytest.mark.parametrize("threads", [32, 96, 1024])
def test_block_sum_and_max(file, threads):
    device = EmulatedDevice()
    x = np.random.default_rng(0).integers(-50, 50, 3000).astype(np.float32)
    y = device.empty(2, np.float32)
    device.kernel(file, "block_operations")(1, threads, (device.array(x), x.size, y))
    assert device.to_host(y).tolist() == [x.sum(), np.abs(x).max()]
    x[7] = np.nan
    device.kernel(file, "block_operations")(1, threads, (device.array(x), x.size, y))
    assert np.isnan(device.to_host(y)).all()


def test_16_bit_floats(file):
    """All 65,536 of each to float32; back, all of those and what lies just beside and half way to the next."""
    device = EmulatedDevice()
    kernel = device.kernel(file, "halves")
    bits = np.arange(1 << 16, dtype=np.uint16)
    h, b = device.array(bits), device.array(bits)
    f, g = device.empty(1 << 16, np.float32), device.empty(1 << 16, np.float32)
    kernel(256, 256, (h, f, b, g, 0))
    np.testing.assert_array_equal(device.to_host(f).view("u4"), bits.view(np.float16).astype("f4").view("u4"))
    as_bfloat16 = (bits.astype(np.uint32) << 16).view("f4")
    np.testing.assert_array_equal(device.to_host(g).view("u4"), as_bfloat16.view("u4"))
    for exact in (bits.view(np.float16).astype("f4"), as_bfloat16):
        for shift in (-1, 0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001):
            x = (exact.view("i4").astype(np.int64) + shift).astype(np.uint32).view("f4")
            x = np.where(np.isnan(x), np.float32(1.5), x)
            kernel(256, 256, (h, device.array(x), b, g, 1))
            with np.errstate(over="ignore"):
                np.testing.assert_array_equal(device.to_host(h), x.astype(np.float16).view("u2"))
                np.testing.assert_array_equal(device.to_host(b), x.astype(ml_dtypes.bfloat16).view("u2"))


def test_integer_functions(file):
    device = EmulatedDevice()
    a, b, c = (np.random.default_rng(i).integers(0, 1 << 32, 256, dtype=np.uint32) for i in range(3))
    a[0] = 0
    y = device.empty((3, 256), np.int32)
    device.kernel(file, "integer_functions")(1, 256, (device.array(a), device.array(b), device.array(c), y))
    dots = (a.view("i1").reshape(-1, 4).astype("i4") * b.view("i1").reshape(-1, 4)).sum(1) + c.view("i4")
    both = np.concatenate([a.view("u1").reshape(-1, 4), b.view("u1").reshape(-1, 4)], axis=1)
    chosen = np.take_along_axis(both, (c[:, None] >> np.array([0, 4, 8, 12], dtype=np.uint32) & 7).astype(int), 1)
    counts = [32 - int(x).bit_length() for x in a]
    np.testing.assert_array_equal(
        device.to_host(y), [dots.astype(np.int32), np.ascontiguousarray(chosen).view("i4")[:, 0], counts]
    )


def test_mma_is_a_product_of_matrices(file):
    device = EmulatedDevice(order=3)
    for seed in range(5):
        dice = np.random.default_rng(seed)
        a, b = (dice.integers(-128, 128, shape, dtype=np.int8) for shape in ((16, 32), (8, 32)))
        d = device.empty((16, 8), np.int32)
        device.kernel(file, "one_mma")(1, 32, (device.array(a), device.array(b), d))
        begin = np.tile([[1, 2], [3, 4]], (1, 4)).repeat(8, axis=0)
        np.testing.assert_array_equal(device.to_host(d), a.astype("i4") @ b.T.astype("i4") + begin)


def bf16_mma(file, a, b, d):
    """a (3, 16, 32), b (2, 8, 32): its columns, d (3, 16, 2, 8)"""
    device = EmulatedDevice(order=3)
    bits = [device.array(x.astype(ml_dtypes.bfloat16).view(np.uint16)) for x in (a, b)]
    on_device = device.array(d.astype(np.float32))
    device.kernel(file, "bf16_mma")(1, 32, (*bits, on_device))
    return device.to_host(on_device)


def test_mma_of_bfloat16_is_a_product_of_matrices(file):
    """Of small integers exactly; of any numbers but for what is cut off."""
    dice = np.random.default_rng(1)
    a, b = dice.integers(-128, 128, (3, 16, 32)), dice.integers(-128, 128, (2, 8, 32))
    d = dice.integers(-1000, 1000, (3, 16, 2, 8))
    np.testing.assert_array_equal(bf16_mma(file, a, b, d), d + np.einsum("rik,cjk->ricj", a, b))
    a, b = (dice.standard_normal(x.shape).astype(ml_dtypes.bfloat16).astype(np.float64) for x in (a, b))
    exact = np.einsum("rik,cjk->ricj", a, b)
    error = np.abs(bf16_mma(file, a, b, 0 * d) - exact)
    assert 0 < error.max() < 2 * 17 * 2**-23 * 16  # of two steps, 17 terms each cut at the last bit of one below 16


def test_mma_of_bfloat16_cuts_what_a_sum_cannot_hold(file):
    """Each term at the last bit of the largest, towards zero; then the sum. Inf and NaN pass, in their rows."""
    a, b, d = np.zeros((3, 16, 32)), np.ones((2, 8, 32)), np.zeros((3, 16, 2, 8))
    a[0, 0, :3] = [1, 2.0**-24, 2.0**-24]  # half a step twice, which is lost twice
    a[0, 1, :3] = [1, 2.0**-23, 2.0**-23]
    a[0, 2, :2] = [1, -(2.0**-25)]
    a[0, 3, :3] = [1.5, 1, 2.0**-23]  # 2.5 has steps of 2^-22
    a[0, 4, [0, 16]] = [2.0**-24, 1]  # another step: the sum before is cut as a term is
    d[0, 5], a[0, 5, 0] = 1, -(2.0**-24)
    d[0, 6], a[0, 6, 0] = 2.0**100, 2.0**100
    a[1, 2, 7], a[1, 3, 8], a[1, 4, 9] = np.inf, -np.inf, np.nan
    a[1, 5, :2] = [np.inf, -np.inf]
    d[1, 6] = np.inf
    y = bf16_mma(file, a, b, d)
    assert y[0, :7, 0, 0].tolist() == [1, 1 + 2.0**-22, 1, 2.5, 1, 1, 2.0**101]
    np.testing.assert_array_equal(y[1, :8, 1, 7], [0, 0, np.inf, -np.inf, np.nan, np.nan, np.inf, 0])
    assert (y[2] == 0).all()


def test_arguments_are_checked(file):
    device = EmulatedDevice()
    kernel, x = device.kernel(file, "kinds"), device.zeros((4, 4), np.float32)
    good = (x, 1, np.uint32(1), np.int64(1), 1.0, np.float64(1))
    assert kernel.kinds == "piilfd"
    kernel(1, 1, good)
    kernel(1, 1, (None, *good[1:]))
    with pytest.raises(DeviceError, match=r"float32 \(4, 4\) is an array of the host"):
        kernel(1, 1, (np.zeros((4, 4), dtype=np.float32), *good[1:]))
    for place, wrong in ((0, 1), (1, 1.0), (3, 1), (4, 1), (5, 1.0), (1, x)):
        with pytest.raises(ShapeError, match=f"argument {place + 1} of 6"):
            kernel(1, 1, (*good[:place], wrong, *good[place + 1 :]))
    with pytest.raises(ShapeError, match="6 arguments"):
        kernel(1, 1, good[:5])
    with pytest.raises(ShapeError, match="contiguous"):
        kernel(1, 1, (x[:, :2], *good[1:]))
    with pytest.raises(ShapeError, match="int32"):
        kernel(1, 1, (x, 1 << 31, *good[2:]))
    for grid, block, shared_mem in ((0, 1, 0), (1, 1025, 0), ((1, 65536), 1, 0), (1, 1, 228 << 10)):
        with pytest.raises(ShapeError, match="at most 1024 threads"):
            kernel(grid, block, good, shared_mem)


def test_a_kernel_that_is_not_there(file):
    device = EmulatedDevice()
    with pytest.raises(DeviceError, match=r"no kernel 'absent'; there are: .*one_mma"):
        device.kernel(file, "absent")
    with pytest.raises(DeviceError, match=r"no CUDA file 'absent.cu'; the package's are .*ternary.cu"):
        device.kernel("absent.cu", "absent")


@pytest.mark.thorough
def test_a_file_that_does_not_compile(tmp_path):
    path = tmp_path / "wrong.cu"
    path.write_text('extern "C" __global__ void f(int *y) { y[0] = missing; }')
    with pytest.raises(DeviceError, match=r"wrong.cu does not compile[\s\S]*missing"):
        EmulatedDevice().kernel(str(path), "f")


@pytest.mark.thorough
def test_old_builds_of_a_file_are_removed(tmp_path, monkeypatch):
    """But for those used last, of each file; and not from under who has loaded one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sources, "MAX_BUILDS", 1)
    folder = tmp_path / "bitnet_ref" / "cuda"
    folder.mkdir(parents=True)
    (folder / "other.cu-0123.so").touch()
    path = tmp_path / "some.cu"
    kernels = []
    for number in (1, 2):
        emulated_build.compiled.cache_clear()
        path.write_text(f'extern "C" __global__ void f(int *y) {{ y[0] = {number}; }}')
        emulated_build.flattened.cache_clear()
        device = EmulatedDevice()
        kernels.append((device, device.kernel(str(path), "f")))
        assert [found.suffix for found in folder.glob("some.cu-*")] == [".so"]
    assert (folder / "other.cu-0123.so").exists()
    for number, (device, kernel) in enumerate(kernels, 1):
        y = device.zeros(1, np.int32)
        kernel(1, 1, (y,))
        assert device.to_host(y).tolist() == [number]
    emulated_build.compiled.cache_clear()  # what is in this folder will not be there


def test_no_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BackendUnavailable, match=r"needs a C\+\+17 compiler"):
        EmulatedDevice()
