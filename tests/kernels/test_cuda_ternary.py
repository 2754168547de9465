"""The CUDA ternary kernels, on a card or emulated: equal to the reference, whatever the shape and order of threads."""

import numpy as np
import pytest
from helpers import random_ternary, rng, run_sanitized
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bitnet_ref.backends import cuda
from bitnet_ref.backends.cuda.emulation import build as emulated_build
from bitnet_ref.backends.cuda.emulation.device import EmulatedDevice
from bitnet_ref.backends.cuda.stacks import split, stack_of
from bitnet_ref.backends.cuda.ternary import (
    COLUMNS_TIMES_64,
    GEMM,
    GEMM_ROWS,
    GEMM_TOKENS,
    GEMV,
    KERNELS,
    WARPS_PER_MULTIPROCESSOR,
    TernaryKernels,
    choose_launch,
    padded_columns,
)
from bitnet_ref.backends.cuda.workspace import Workspace
from bitnet_ref.errors import ShapeError
from bitnet_ref.families.linear_norms import NormedLinear
from bitnet_ref.reference import quantization
from bitnet_ref.reference.weights import DenseWeight, Norm, TernaryWeight

pytestmark = pytest.mark.skipif(cuda.why_unavailable() is not None, reason=str(cuda.why_unavailable()))
emulated = pytest.mark.skipif(emulated_build.compiler() is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def kernels():
    return TernaryKernels(Workspace(cuda.open_device()))


def kernels_for(tokens):
    """All that take so many tokens."""
    return [None, *(name for name in KERNELS if tokens <= GEMV.get(name, tokens))]


def random_case(seed, tokens, n_out, n_in):
    dice = rng(seed)
    weight = TernaryWeight.from_ternary(random_ternary(dice, n_out, n_in), float(dice.uniform(0.01, 3)))
    x_q = dice.integers(-128, 128, (tokens, n_in), dtype=np.int8)
    x_scale = dice.uniform(0.1, 200, (tokens, 1)).astype(np.float32)
    return weight, x_q, x_scale


def check(kernels, weight, x_q, x_scale, names, prepared=None):
    """Accumulators equal, and y bit for bit."""
    device = kernels.device
    prepared = prepared or kernels.prepare(weight)
    acc = quantization.ternary_matmul(x_q, weight.packed, weight.in_features)
    y = quantization.dequantize(acc, weight.w_dequant_scale, x_scale)
    if weight.bias is not None:
        y = y + weight.bias
    on_device = device.array(x_q), device.array(x_scale)
    for name in names:
        found = device.to_host(kernels.matmul(on_device[0], prepared, kernel=name))
        np.testing.assert_array_equal(found, acc, err_msg=str(name))
        found = device.to_host(kernels.linear(*on_device, prepared, kernel=name))
        np.testing.assert_array_equal(found.view(np.int32), y.view(np.int32), err_msg=str(name))


@pytest.mark.thorough
@settings(max_examples=150)
@given(st.integers(0, 1000), st.integers(1, 40), st.integers(1, 70), st.integers(1, 700))
@example(0, 1, 1, 1)
@example(0, 40, 16, 128)
@example(0, 33, 17, 129)
@example(0, 32, 70, 256)
def test_any_shape_equals_the_reference(kernels, seed, tokens, n_out, n_in):
    names = kernels_for(tokens)
    check(kernels, *random_case(seed, tokens, n_out, n_in), {None, names[1 + seed % (len(names) - 1)]})


@pytest.mark.sample(3)
@pytest.mark.parametrize("tokens", [1, 8, 9, 32, 65, 130])
def test_every_kernel_that_takes_them(kernels, tokens):
    check(kernels, *random_case(0, tokens, 150, 400), kernels_for(tokens))


@pytest.mark.sample(2)
@emulated
@pytest.mark.parametrize("order", [1, 2])
def test_the_order_of_threads_does_not_matter(order):
    kernels = TernaryKernels(Workspace(EmulatedDevice(order=order)))
    for tokens in (1, 5, 70):
        check(kernels, *random_case(order, tokens, 40, 1300), kernels_for(tokens))


@pytest.mark.sample(3)
@pytest.mark.parametrize(("n_in", "tokens"), [(6912, 1), (6912, 9), (27648, 2), (27648, 33)])
@pytest.mark.parametrize("value", [127, -128])
def test_the_largest_sums(kernels, n_in, tokens, value):
    """All of one sign: 64 times the sum is 226 million at the longest, and must not wrap."""
    weight = TernaryWeight.from_ternary(np.ones((17, n_in), dtype=np.int8), 0.5)
    x_q = np.full((tokens, n_in), value, dtype=np.int8)
    check(kernels, weight, x_q, np.ones((tokens, 1), dtype=np.float32), [None])


def test_the_longest_row_of_the_fast_kernels(kernels):
    """64 * 128 * 262,143 is 8,192 below 2^31; one column more takes the plain kernel, and says so when it may not."""
    for n_in in (COLUMNS_TIMES_64 - 1, COLUMNS_TIMES_64):
        weight = TernaryWeight.from_ternary(np.ones((1, n_in), dtype=np.int8), 0.5)
        x_q = np.full((1, n_in), -128, dtype=np.int8)
        acc = kernels.device.to_host(kernels.matmul(kernels.device.array(x_q), kernels.prepare(weight)))
        assert acc.tolist() == [[-128 * n_in]]
    assert choose_launch(1, 1, COLUMNS_TIMES_64, 132).kernel == "ternary_plain"
    with pytest.raises(ShapeError, match="one that takes 1 tokens of 262144 columns"):
        choose_launch(1, 1, COLUMNS_TIMES_64, 132, "ternary_gemv_dp4a")


def test_every_token_alone_and_together(kernels):
    """A row's result does not depend on the rows beside it, nor on the kernel that their number chooses."""
    weight, x_q, x_scale = random_case(1, 70, 33, 200)
    prepared, device = kernels.prepare(weight), kernels.device
    together = device.to_host(kernels.linear(device.array(x_q), device.array(x_scale), prepared))
    for part in (slice(0, 1), slice(3, 8), slice(20, 45), slice(69, 70)):
        alone = kernels.linear(device.array(x_q[part]), device.array(x_scale[part]), prepared)
        np.testing.assert_array_equal(device.to_host(alone), together[part])


@pytest.mark.sample(3)
@pytest.mark.parametrize("rows", [(48, 16, 9), (32, 7)])
@pytest.mark.parametrize(("tokens", "n_in"), [(1, 260), (3, 260), (40, 260), (40, 9000)])
def test_a_stack_is_its_matrices(kernels, rows, tokens, n_in):
    """Each keeps its own scale and bias, its result is an array of its own, and it still computes by itself. With 9000
    columns several blocks add to a sum, and the last of them puts it into its place."""
    dice, device = rng(3), kernels.device
    ws = [
        TernaryWeight.from_ternary(random_ternary(dice, n, n_in), scale)
        for n, scale in zip(rows, (0.3, 2, 1.1), strict=False)
    ]
    ws[1] = TernaryWeight(ws[1].packed, n_in, ws[1].w_dequant_scale, dice.standard_normal(rows[1]).astype(np.float32))
    assert (choose_launch(tokens, sum(rows), n_in, device.multiprocessors).parts > 1) == (n_in == 9000)
    x_q = dice.integers(-128, 128, (tokens, n_in), dtype=np.int8)
    x_scale = dice.uniform(1, 2, (tokens, 1)).astype(np.float32)
    members = [kernels.prepare(w) for w in ws]
    stack = kernels.stack(*members)
    assert stack_of(members) is stack
    assert stack_of(members[:-1]) is stack_of(members[::-1]) is stack_of([]) is None
    for name in kernels_for(tokens):
        y = kernels.linear(device.array(x_q), device.array(x_scale), stack.whole, kernel=name)
        for w, part in zip(ws, split(y, tokens, stack.parts), strict=True):
            expected = quantization.dequantize(
                quantization.ternary_matmul(x_q, w.packed, n_in), w.w_dequant_scale, x_scale
            )
            expected = expected if w.bias is None else expected + w.bias
            np.testing.assert_array_equal(device.to_host(part), expected, err_msg=str(name))
    for w, member in zip(ws, members, strict=True):
        assert member.shape == w.shape
        assert device.xp.shares_memory(member.tiles, stack.whole.tiles)
        np.testing.assert_array_equal(member.ternary(), w.ternary())
        check(kernels, w, x_q, x_scale, [None], member)
    assert sum(member.tiles.nbytes for member in members) == stack.whole.tiles.nbytes


def test_what_is_no_stack(kernels):
    def ternary(n_out, n_in):
        return kernels.prepare(TernaryWeight.from_ternary(random_ternary(rng(0), n_out, n_in), 1.0))

    own_norm = Norm(np.ones(100, dtype=np.float32), 1e-5)
    stacked = [ternary(16, 100), ternary(16, 100)]
    kernels.stack(*stacked)
    refused = [
        [ternary(16, 100)],
        [ternary(16, 100)] * 4,
        [ternary(17, 100), ternary(16, 100)],  # the second would begin within a tile
        [ternary(16, 100), ternary(16, 101)],
        [ternary(16, 100), NormedLinear(own_norm, ternary(16, 100))],
        [ternary(16, 100), DenseWeight(np.ones((16, 100), dtype=np.float32))],
        stacked,
    ]
    for weights in refused:
        assert not kernels.can_stack(weights)
        with pytest.raises(ShapeError, match="all but the last of whole tiles of 16 rows"):
            kernels.stack(*weights)
    assert kernels.can_stack([ternary(16, 100), ternary(17, 100)])


def test_tiles_hold_the_matrix(kernels):
    for n_out, n_in in ((1, 1), (16, 128), (17, 130), (40, 300)):
        weight = TernaryWeight.from_ternary(random_ternary(rng(n_in), n_out, n_in), 1.0)
        prepared = kernels.prepare(weight)
        np.testing.assert_array_equal(prepared.ternary(), weight.ternary())
        assert prepared.shape == weight.shape
        assert prepared.tiles.nbytes == -(-n_out // 16) * -(-n_in // 128) * 512


def test_longer_rows_of_x_may_hold_anything_behind(kernels):
    weight, x_q, _ = random_case(5, 3, 20, 200)
    padded = np.full((3, padded_columns(200)), 99, dtype=np.int8)
    padded[:, :200] = x_q
    acc = kernels.matmul(kernels.device.array(padded), kernels.prepare(weight))
    expected = quantization.ternary_matmul(x_q, weight.packed, 200)
    np.testing.assert_array_equal(kernels.device.to_host(acc), expected)


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_a_graph_computes_again_from_what_its_arrays_hold(tokens):
    device = cuda.open_device()
    kernels = TernaryKernels(Workspace(device))
    weight, x_q, x_scale = random_case(7, tokens, 20, 9000)
    divided = choose_launch(tokens, *weight.shape, device.multiprocessors).parts > 1
    assert divided == (tokens == 40)  # sums of several blocks, which every launch leaves as zeros
    prepared = kernels.prepare(weight)
    x, scale, y = device.array(x_q), device.array(x_scale), device.empty((tokens, 20), np.float32)
    kernels.linear(x, scale, prepared, y)
    with device.capture() as graph:
        kernels.linear(x, scale, prepared, y)
    for seed in (1, 2):
        x_q = rng(seed).integers(-128, 128, x_q.shape, dtype=np.int8)
        device.copy(x, x_q)
        graph.launch()
        acc = quantization.ternary_matmul(x_q, weight.packed, weight.in_features)
        np.testing.assert_array_equal(
            device.to_host(y), quantization.dequantize(acc, np.float32(weight.w_dequant_scale), x_scale)
        )


def test_wrong_arguments(kernels):
    weight, x_q, x_scale = random_case(0, 2, 5, 200)
    prepared, device = kernels.prepare(weight), kernels.device
    x, scale = device.array(x_q), device.array(x_scale)
    with pytest.raises(ShapeError, match=r"x_q int8 \(M, 200\) or"):
        kernels.matmul(device.array(x_q[:, :199]), prepared)
    with pytest.raises(ShapeError, match="x_q int8"):
        kernels.matmul(device.array(x_q.view(np.uint8)), prepared)
    with pytest.raises(ShapeError, match=r"x_quant_scale float32 \(2, 1\)"):
        kernels.linear(x, device.array(x_scale[:1]), prepared)
    with pytest.raises(ShapeError, match=r"out float32 \(2, 5\)"):
        kernels.linear(x, scale, prepared, device.empty((2, 5), np.int32))
    with pytest.raises(ShapeError, match="'ternary_gemv_dp4a'"):
        kernels.matmul(x, prepared, kernel="ternary_gemv_dp4a")
    assert kernels.matmul(device.array(x_q[:0]), prepared).shape == (0, 5)


# -- launch configurations ---------------------------------------------------------------------------------------------


@given(st.integers(1, 5000), st.integers(1, 150_000), st.integers(1, 40_000), st.sampled_from([1, 20, 108, 132]))
def test_every_launch_is_within_a_gpus_limits(tokens, n_out, n_in, multiprocessors):
    for kernel in kernels_for(tokens):
        how = choose_launch(tokens, n_out, n_in, multiprocessors, kernel)
        tiles_k = -(-n_in // 128)
        assert how.block % 32 == 0
        assert 32 <= how.block <= 512
        assert how.shared_mem <= 96 << 10
        assert how.grid[0] < 2**31
        assert max(how.grid[1:]) < 2**16
        assert 1 <= how.parts <= tiles_k
        assert (how.parts - 1) * how.share < tiles_k <= how.parts * how.share  # no part is empty
        if how.kernel in GEMV:
            assert how.grid == (-(-n_out // 16), 1, 1)
            assert how.block // 32 <= tiles_k  # no warp without a tile
            assert how.parts == 1
        elif how.kernel == GEMM:
            assert how.grid[0] * GEMM_ROWS >= n_out
            assert how.grid[1] * GEMM_TOKENS >= tokens
            assert how.grid[2] == how.parts
        else:
            assert how.grid[0] * how.block >= tokens * n_out


SHAPES_2B_4T = (3840, 2560), (2560, 2560), (13824, 2560), (2560, 6912)


def test_2b_4t_on_132_multiprocessors():
    """Every block is on the card at once, and no warp has more tiles than it asks for at first."""
    for n_out, n_in in SHAPES_2B_4T:
        how = choose_launch(1, n_out, n_in, 132)
        warps = how.block // 32
        assert how.kernel == "ternary_gemv_dp4a"
        assert how.parts == 1
        assert -(-how.grid[0] // 132) * warps <= WARPS_PER_MULTIPROCESSOR[how.kernel]
        assert -(-n_in // 128 // warps) <= 4


@pytest.mark.parametrize(("tokens", "most"), [(8, 20), (16, 16), (32, 16)])
def test_2b_4t_of_few_tokens_on_132_multiprocessors(tokens, most):
    """With twice the registers all blocks are there at once, but for gate's and up's: seven a multiprocessor."""
    for n_out, n_in in SHAPES_2B_4T:
        how = choose_launch(tokens, n_out, n_in, 132)
        assert how.kernel == f"ternary_gemv_mma_{tokens}"
        assert how.block // 32 >= 4
        assert n_out == 13824 or -(-how.grid[0] // 132) * how.block // 32 <= most


# -- longer ------------------------------------------------------------------------------------------------------------

SANITIZED = """
import numpy as np
from bitnet_ref.families.linear_norms import NormedLinear
from bitnet_ref.reference import quantization
from bitnet_ref.backends.cuda.emulation.device import EmulatedDevice
from bitnet_ref.backends.cuda.ternary import GEMV, KERNELS, TernaryKernels
from bitnet_ref.backends.cuda.workspace import Workspace
from bitnet_ref.reference.weights import TernaryWeight

dice = np.random.default_rng(0)
device = EmulatedDevice(sanitize=True)
kernels = TernaryKernels(Workspace(device))
for tokens, n_out, n_in in ((1, 1, 1), (1, 16, 128), (1, 20, 9000), (3, 33, 300), (16, 17, 513), (20, 128, 640),
                            (40, 129, 129), (64, 16, 256), (130, 150, 1100)):
    weight = TernaryWeight.from_ternary(dice.integers(-1, 2, (n_out, n_in), dtype=np.int8), 0.5)
    x_q = dice.integers(-128, 128, (tokens, n_in), dtype=np.int8)
    scale = device.array(np.ones((tokens, 1), dtype=np.float32))
    acc = quantization.ternary_matmul(x_q, weight.packed, n_in)
    prepared = kernels.prepare(weight)
    for name in (None, *(name for name in KERNELS if tokens <= GEMV.get(name, tokens))):
        x = device.array(x_q)
        assert np.array_equal(device.to_host(kernels.matmul(x, prepared, kernel=name)), acc), name
        assert np.array_equal(device.to_host(kernels.linear(x, scale, prepared, kernel=name)), acc * 0.5), name
print("clean")
"""


@emulated
@pytest.mark.slow
def test_no_access_is_out_of_bounds():
    done = run_sanitized(SANITIZED)
    assert (done.returncode, done.stdout) == (0, "clean\n"), done.stderr


@pytest.mark.slow
@settings(max_examples=200)
@given(st.integers(0, 10**6), st.integers(1, 140), st.integers(1, 300), st.integers(1, 3000))
def test_many_shapes(kernels, seed, tokens, n_out, n_in):
    check(kernels, *random_case(seed, tokens, n_out, n_in), kernels_for(tokens)[:: 1 + seed % 2])


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(640, 2560), (2560, 6912)])
@pytest.mark.parametrize("tokens", [1, 4, 40])
def test_shapes_of_2b_4t(kernels, shape, tokens):
    check(kernels, *random_case(0, tokens, *shape), [None])
