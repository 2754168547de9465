"""Dense prompts in 16 bits: what cuBLAS is asked for, when, and what that does to a model."""

import ctypes

import ml_dtypes
import numpy as np
import pytest
from helpers import GOLDEN, call, model, rng

import bitnet_ref
from bitnet_ref.backends import cuda
from bitnet_ref.backends.cuda import cupy_device
from bitnet_ref.backends.cuda.backend import CupyBackend
from bitnet_ref.backends.cuda.dense import KINDS, MAX_IN_ORDER
from bitnet_ref.backends.cuda.emulation.device import EmulatedDevice
from bitnet_ref.errors import DeviceError, NumericsError
from bitnet_ref.reference.cache import TokenBatch
from bitnet_ref.reference.weights import DenseWeight

pytestmark = pytest.mark.card

needs_device = pytest.mark.skipif(cuda.why_unavailable() is not None, reason=str(cuda.why_unavailable()))
SIXTEEN = ("float16", "bfloat16")


def gemm_ex(transa, transb, m, n, k, alpha, a, a_type, lda, b, b_type, ldb, beta, c, c_type, ldc, compute, _):
    """`cublasGemmEx` as its documentation says it, of matrices in the host's memory: C = alpha op(A) op(B) + beta C."""
    assert (c_type, compute) == (cupy_device.R_32F, cupy_device.COMPUTE_32F)
    dtypes = {cupy_device.R_16[kind]: KINDS[kind] for kind in SIXTEEN}
    scalars = [np.frombuffer((ctypes.c_char * 4).from_address(at), dtype=np.float32)[0] for at in (alpha, beta)]

    def matrix(at, dtype, rows, columns, ld):  # column-major: element (i, j) is at i + j ld
        assert ld >= rows
        size = np.dtype(dtype).itemsize
        flat = np.frombuffer((ctypes.c_char * (size * ld * columns)).from_address(at), dtype=dtype)
        return flat.reshape(columns, ld)[:, :rows].T

    op_a = matrix(a, dtypes[a_type], *((m, k) if transa == cupy_device.OP_N else (k, m)), lda).astype(np.float32)
    op_b = matrix(b, dtypes[b_type], *((k, n) if transb == cupy_device.OP_N else (n, k)), ldb).astype(np.float32)
    op_a, op_b = op_a if transa == cupy_device.OP_N else op_a.T, op_b if transb == cupy_device.OP_N else op_b.T
    to = matrix(c, np.float32, m, n, ldc)
    to[...] = scalars[0] * (op_a @ op_b) + (scalars[1] * to if scalars[1] else 0)


def operands(n, out, k, kind):
    dice = rng(n, out, k)
    x, w = (dice.standard_normal(shape).astype(KINDS[kind]) for shape in ((n, k), (out, k)))
    return x, w, x.astype(np.float64) @ w.astype(np.float64).T


@pytest.mark.parametrize("kind", SIXTEEN)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (70, 16, 24)])
def test_the_arguments_mean_the_product(shape, kind):
    x, w, expected = operands(*shape, kind)
    y = np.full(shape[:2], np.nan, dtype=np.float32)
    gemm_ex(*cupy_device.gemm_arguments(shape, x.ctypes.data, w.ctypes.data, y.ctypes.data, kind))
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5 * shape[2])


def test_the_numbers_are_cupys():
    cupy = pytest.importorskip("cupy")
    try:
        from cupy.cuda import cublas as names  # made when it is asked for
    except ImportError as error:
        pytest.skip(str(error))
    runtime = cupy.cuda.runtime
    assert callable(names.gemmEx)
    assert callable(cupy.cuda.device.get_cublas_handle)
    assert issubclass(names.CUBLASError, Exception)
    assert (names.CUBLAS_OP_N, names.CUBLAS_OP_T) == (cupy_device.OP_N, cupy_device.OP_T)
    assert {"float16": runtime.CUDA_R_16F, "bfloat16": runtime.CUDA_R_16BF} == cupy_device.R_16
    assert (runtime.CUDA_R_32F, names.CUBLAS_COMPUTE_32F) == (cupy_device.R_32F, cupy_device.COMPUTE_32F)
    assert names.CUBLAS_GEMM_DEFAULT == cupy_device.GEMM_DEFAULT


@needs_device
@pytest.mark.parametrize("kind", SIXTEEN)
def test_a_device_multiplies(kind):
    device = cuda.open_device()
    if not device.can_matmul_16:
        pytest.skip("cuBLAS is not installed")
    x, w, expected = operands(70, 33, 40, kind)
    bits = np.uint16 if kind == "bfloat16" else np.float16
    y = device.zeros((70, 33), np.float32)
    device.matmul_16(device.array(x.view(bits)), device.array(w.view(bits)), y, kind)
    np.testing.assert_allclose(device.to_host(y), expected, rtol=0, atol=1e-4)
    with device.capture(), pytest.raises(DeviceError, match="while a graph is captured"):
        device.matmul_16(device.array, w, y, kind)


# -- the backend -------------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch):
    """The numbers of rows that `matmul_16` was asked for."""
    rows = []
    right = EmulatedDevice.matmul_16
    monkeypatch.setattr(
        EmulatedDevice, "matmul_16", lambda self, x, w, y, kind: (rows.append(len(x)), right(self, x, w, y, kind))[1]
    )
    return rows


@needs_device
@pytest.mark.parametrize("dtype", ["float32", *SIXTEEN])
def test_when_cublas_is_asked(dtype, asked):
    be = CupyBackend(dtype, device=EmulatedDevice())
    w = be.prepare(DenseWeight(rng(1).standard_normal((20, 24)).astype(ml_dtypes.bfloat16)))
    x = rng(2).standard_normal((MAX_IN_ORDER + 1, 24)).astype(np.float32)
    together = call(be, "linear", x, w)
    assert asked == ([] if dtype == "float32" else [MAX_IN_ORDER + 1])
    fewer = call(be, "linear", x[:-1], w)
    assert len(asked) <= 1
    for i in (0, 7, MAX_IN_ORDER - 1):  # in any company of as many as a step may have
        np.testing.assert_array_equal(call(be, "linear", x[i : i + 1], w)[0], fewer[i])
    if dtype == "float32":
        np.testing.assert_array_equal(together[:-1], fewer)
    kept = x if dtype == "float32" else x.astype(KINDS[dtype]).astype(np.float32)
    matrix = w.array if dtype == "float32" else w.array.astype(KINDS[dtype])
    np.testing.assert_allclose(together, kept @ matrix.astype(np.float32).T, rtol=0, atol=1e-5)


@needs_device
@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("case", ["llama-dense", "llama-bf16-biases"])
def test_long_prompts_stay_near(case, dtype, asked):
    """Stacked linears, biases, the head of all tokens: as far from float64 as rounding to 16 bits takes it."""
    exact = model(GOLDEN / case, "numpy", dtype="float64")
    prompts = rng(3).integers(1, 90, (2, MAX_IN_ORDER // 2 + 6))
    m = bitnet_ref.load(GOLDEN / case, backend="cupy", dtype=dtype)
    batch = TokenBatch.of([(slot, 0, tokens) for slot, tokens in enumerate(prompts)])
    logits = m.run(batch, m.new_cache(2, prompts.shape[1])).all()
    expected = np.concatenate([exact.logits(tokens) for tokens in prompts])
    error = np.abs(logits - expected).max() / np.abs(expected).max()
    assert 1e-6 < error < {"float16": 3e-3, "bfloat16": 3e-2}[dtype]
    if m.backend.ws.device.emulated:
        assert asked == [prompts.size] * (7 * m.config.num_hidden_layers + 1)


@needs_device
def test_ternary_sums_stay_exact_in_long_prompts(asked):
    """Only the head is dense: the final hidden states of one prompt are those of its tokens one by one."""
    m = bitnet_ref.load(GOLDEN / "bitnet-packed-offline", backend="cupy", dtype="bfloat16")
    tokens = rng(4).integers(1, 90, 3 * 45)
    caches = [m.new_cache(1, len(tokens)) for _ in range(2)]
    with m.backend.running():
        whole = m.backend.to_host(m.backend.hidden(m.weights, m.config, TokenBatch.of([(0, 0, tokens)]), caches[0]))
        for position in range(0, len(tokens), 45):
            batch = TokenBatch.of([(0, position, tokens[position : position + 45])])
            part = m.backend.to_host(m.backend.hidden(m.weights, m.config, batch, caches[1], "blocks"))
            np.testing.assert_array_equal(part, whole[position : position + 45])
    assert asked == []


@needs_device
def test_an_activation_that_float16_cannot_hold():
    be = CupyBackend("float16")
    w = be.prepare(DenseWeight(np.ones((2, 8), dtype=np.float32)))
    x = np.ones((MAX_IN_ORDER + 1, 8), dtype=np.float32)
    x[5, 3] = 70000
    with pytest.raises(NumericsError, match="dense_matmul: token 5, rounded to 16 bits, holds NaN or Inf"):
        call(be, "linear", x, w)
    assert np.isfinite(call(be, "linear", x[:-1], w)).all()  # which the kernel takes as it is


@needs_device
def test_without_cublas_the_kernel_multiplies_and_it_is_said(asked, monkeypatch):
    monkeypatch.setattr(EmulatedDevice, "can_matmul_16", False)
    with pytest.warns(UserWarning, match=r"cuBLAS is not installed, and bfloat16 prompts .*pip install"):
        be = CupyBackend("bfloat16", device=EmulatedDevice())
    w = be.prepare(DenseWeight(np.ones((2, 8), dtype=np.float32)))
    assert (call(be, "linear", np.ones((MAX_IN_ORDER + 6, 8), dtype=np.float32), w) == 8).all()
    assert asked == []
