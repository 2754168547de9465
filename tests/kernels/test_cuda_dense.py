"""The CUDA product with matrices that are not quantised: the same bits in any company, and what the sums lose."""

import numpy as np
import pytest
from helpers import rng, run_sanitized
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bitnet_ref.backends import cuda
from bitnet_ref.backends.cuda.dense import FEW, KINDS, MANY, MAX_IN_ORDER, DenseKernels, choose_launch
from bitnet_ref.backends.cuda.emulation.device import EmulatedDevice
from bitnet_ref.backends.cuda.groups import group_matmul, put_groups, takes_groups
from bitnet_ref.backends.cuda.workspace import Workspace
from bitnet_ref.crossval.tolerances import EPSILON
from bitnet_ref.families.groups import GroupTernaryWeight
from bitnet_ref.reference.quantization import pack_ternary
from bitnet_ref.reference.weights import DenseWeight

pytestmark = pytest.mark.skipif(cuda.why_unavailable() is not None, reason=str(cuda.why_unavailable()))
SIXTEEN = ("bfloat16", "float16")
KERNELS = (*FEW, *MANY)


def product(x, w, kernel=None, order=0):
    """x (N, K), w (out, K) of any kind -> (N, out), on a device of its own; emulated for another order than 0."""
    ws = Workspace(EmulatedDevice(order=order) if order else cuda.open_device())
    kernels = DenseKernels(ws)
    with np.errstate(all="ignore"):
        (y,) = kernels.matmul(ws.upload(x), kernels.prepare(DenseWeight(w)).on_device, kernel)
    return ws.download(y)


def random_case(seed, n, out, width, kind):
    dice = rng(seed)
    return dice.standard_normal((n, width)).astype(np.float32), dice.standard_normal((out, width)).astype(KINDS[kind])


def error_of(y, x, w):
    """The largest error, in roundings of the largest result, or of what is usual for one that happens to be small."""
    wide, weights = x.astype(np.float64), w.astype(np.float64).T
    exact, usual = wide @ weights, np.sqrt(wide**2 @ weights**2)
    return np.abs(y - exact).max() / max(np.abs(exact).max(), usual.max()) / EPSILON


# -- one order ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_in_any_company(kind):
    x, w = random_case(1, 130, 150, 200, kind)
    together = product(x, w)
    for n in (1, 2, 7, 8, 9, 40, 64, 65):
        np.testing.assert_array_equal(product(x[:n], w), together[:n])
    np.testing.assert_array_equal(product(x[:0], w), together[:0])
    assert error_of(together, x, w) < 4


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 70), st.integers(1, 140), st.integers(1, 300), st.sampled_from(SIXTEEN))
@example(0, 1, 1, 1, "bfloat16")
@example(0, 8, 16, 64, "float16")
@example(0, 33, 129, 65, "bfloat16")
def test_any_shape_by_every_kernel(seed, n, out, width, kind):
    x, w = random_case(seed, n, out, width, kind)
    order = seed % 3 if cuda.emulation_wanted() else 0  # a card's tensor cores cut other bits than the emulated ones
    alone = product(x[-1:], w, "dense_few_8", order)
    together = product(x, w, KERNELS[seed % len(KERNELS)], order)
    np.testing.assert_array_equal(together[-1:], alone)
    assert error_of(together, x, w) < 4


@pytest.mark.parametrize("kind", SIXTEEN)
def test_rows_of_more_chunks_than_are_kept_at_a_time(kind):
    x, w = random_case(2, 9, 20, 4200, kind)
    expected = product(x, w, "dense_many_32")
    for kernel in FEW:
        np.testing.assert_array_equal(product(x, w, kernel), expected)
    assert error_of(expected, x, w) < 4


def test_launches():
    """The head of 2B-4T by tensor cores from 9 tokens on; a matrix of few rows in small blocks."""
    of_head = [choose_launch(n, 2560, 128256, "bfloat16", 132) for n in (1, 8, 9, 32, 33, 128)]
    names = ["tall_8", "tall_8", "many_32", "many_32", "many_64", "many_64"]
    assert [how.kernel for how in of_head] == [f"dense_{name}_bfloat16" for name in names]
    assert [how.grid for how in of_head] == [(4008,), (4008,), (1002,), (1002,), (1002,), (2004,)]
    assert of_head[0].shared_mem == 40 * 32 * 8 * 4
    assert max(how.shared_mem for how in of_head) <= 64 << 10  # three blocks on a multiprocessor of an H200
    assert choose_launch(64, 2048, 2048, "bfloat16", 132).kernel == "dense_few_32_bfloat16"
    assert choose_launch(MAX_IN_ORDER, 2048, 5632, "float16", 132).kernel == "dense_many_64_float16"
    assert choose_launch(9, 2048, 2048, "float32", 132).kernel == "dense_8_float32"


# -- what the parts hold -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SIXTEEN)
def test_a_product_alone_is_exact(kind):
    """One column: x w of every size, each rounded once, and nothing lost of 24 bits times 8 or 11."""
    dice = rng(3)
    w = np.concatenate([dice.standard_normal(30), [1, -1, 0, 2.0**-24, 0.25 + 2.0**-10]]).astype(KINDS[kind])[:, None]
    x = (dice.standard_normal((40, 1)) * 2.0 ** dice.integers(-60, 60, (40, 1))).astype(np.float32)
    exact = x.astype(np.float64) * w.astype(np.float64)[:, 0]
    y = product(x, w)
    np.testing.assert_array_less(np.abs(y - exact), 4 * EPSILON * np.abs(exact) + 1e-300)
    one = w.astype(np.float32)[:, 0] == 1
    np.testing.assert_array_equal(y[:, one], np.repeat(x, one.sum(), axis=1))  # 24 bits, as they were


@pytest.mark.parametrize("kind", SIXTEEN)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_ends_of_the_range(kind, kernel):
    """The largest x, and numbers below the normal ones: what is finite stays so. Inf and NaN show, in their rows."""
    top = np.finfo(np.float32).max
    x = np.zeros((12, 70), dtype=np.float32)
    x[0, 3], x[1, 3], x[2, [3, 5]], x[3, 69] = top, -top, top, 1e-40
    x[4, 0], x[5, 69], x[6, 64], x[7, 1] = np.inf, -np.inf, np.nan, np.uint32(0x7F800001).view(np.float32)
    x[8] = 1
    w = np.ones((20, 70), dtype=KINDS[kind])
    y = product(x, w, kernel)
    assert (y[0] == top).all()
    assert (y[1] == -top).all()
    assert np.isinf(y[2]).all()
    assert (np.abs(y[3]) <= 1e-39).all()
    assert not np.isfinite(y[4:8]).any()
    assert (y[8] == 70).all()
    assert (y[9:] == 0).all()
    w[7, 40] = np.inf
    y = product(x[8:], w, kernel)
    assert not np.isfinite(y[:, 7]).any()
    assert np.isfinite(np.delete(y, 7, axis=1)).all()


@pytest.mark.slow
def test_the_sanitizer_finds_nothing():
    code = (
        "import numpy as np, ml_dtypes; from bitnet_ref.backends.cuda.dense import *\n"
        "from bitnet_ref.backends.cuda.emulation.device import EmulatedDevice\n"
        "from bitnet_ref.backends.cuda.workspace import Workspace\n"
        "ws = Workspace(EmulatedDevice(sanitize=True)); kernels = DenseKernels(ws)\n"
        "for kind in KINDS:\n"
        "    for out, width in ((1, 1), (17, 65), (130, 72), (20, 4200)):\n"
        "        w = kernels.prepare(DenseWeight(np.ones((out, width), dtype=KINDS[kind]))).on_device\n"
        "        for n in (1, 9, 33):\n"
        "            for kernel in (*FEW, *MANY):\n"
        "                (y,) = kernels.matmul(ws.upload(np.ones((n, width), np.float32)), w, kernel)\n"
        "                assert (ws.download(y) == width).all()\n"
        "print('nothing')"
    )
    done = run_sanitized(code)
    assert done.stdout == "nothing\n", done.stderr


# -- ternary by groups: group.cu ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "group"), [(700, 64), (512, 128), (530, 256), (37, 100)])
@pytest.mark.parametrize("kind", KINDS)
def test_by_groups_in_any_company_and_order_of_threads(kind, k, group):
    dice = rng(k, group)
    x, scales = dice.standard_normal((11, k)).astype(np.float32), dice.random((21, -(-k // group))).astype(KINDS[kind])
    w = GroupTernaryWeight(pack_ternary(dice.integers(-1, 2, (21, k), dtype=np.int8)), k, scales, group)
    assert takes_groups(w)
    results = []
    for order in (0, 1, 2):
        ws = Workspace(EmulatedDevice(order=order))
        mine = put_groups(ws, w)
        results.append(ws.download(group_matmul(ws, ws.upload(x), mine)))
        np.testing.assert_array_equal(ws.download(group_matmul(ws, ws.upload(x[7:8]), mine)), results[0][7:8])
    np.testing.assert_array_equal(results[1], results[0])
    np.testing.assert_array_equal(results[2], results[0])
    assert error_of(results[0], x, w.array) < 2
