"""The exact part of the contract: every backend's int32 accumulators and int8 activations EQUAL the plain ones."""

import numpy as np
import pytest
from helpers import call, prepared, random_ternary, rng
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bitnet_ref.backends import choose_backend
from bitnet_ref.errors import NumericsError
from bitnet_ref.reference.quantization import FLOAT32_EXACT_K
from bitnet_ref.reference.weights import TernaryWeight

# -- ternary_matmul ----------------------------------------------------------------------------------------------------


def oracle(x_q, w_t):
    """The product in 64-bit integers, by NumPy's own integer matmul: no packing, no floating point."""
    return x_q.astype(np.int64) @ w_t.astype(np.int64).T


def check_product(be, x_q, w_t):
    (w,) = prepared(be, TernaryWeight.from_ternary(w_t, 1.0))
    acc = call(be, "ternary_matmul", x_q, w)
    assert acc.dtype == np.int32
    assert acc.shape == (len(x_q), len(w_t))
    np.testing.assert_array_equal(acc, oracle(x_q, w_t))


@pytest.mark.sample(6)
@given(
    m=st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 33, 64, 65]),
    n=st.integers(1, 70),
    k=st.integers(1, 300),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape(be, m, n, k, seed):
    generator = rng(seed)
    check_product(be, generator.integers(-128, 128, (m, k), dtype=np.int8), random_ternary(generator, n, k))


@pytest.mark.sample(4)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 256, 256), (3, 1027, 641), (64, 65, 2560), (5, 64, 6912)])
def test_shapes_of_models(be, m, n, k):
    generator = rng(m, n, k)
    check_product(be, generator.integers(-128, 128, (m, k), dtype=np.int8), random_ternary(generator, n, k))


@pytest.mark.sample(4)
@pytest.mark.parametrize("k", [6912, 27648, 6911])
@pytest.mark.parametrize(("x", "w"), [(127, 1), (127, -1), (-128, 1), (-128, -1)])
def test_largest_sums(be, k, x, w):
    """The accumulators that int16 would wrap and bf16 round: up to 128 * 27648."""
    check_product(be, np.full((2, k), x, dtype=np.int8), np.full((5, k), w, dtype=np.int8))


def test_more_inputs_than_float32_sums_exactly(be):
    """128 * K passes 2^24, and an odd sum there is no float32."""
    k = FLOAT32_EXACT_K + 5
    x_q = np.full((2, k), -128, dtype=np.int8)
    x_q[:, 0] = -127
    assert abs(oracle(x_q, np.ones((1, k), dtype=np.int8))).max() > 2**24
    check_product(be, x_q, np.stack([np.ones(k), -np.ones(k), np.arange(k) % 3 - 1]).astype(np.int8))


def test_one_weight_at_a_time(be):
    """Each position of a row by itself: a wrong order of the codes within a byte or a block cannot hide in a sum."""
    k = 133
    x_q = (np.arange(k) % 113 + 1).astype(np.int8)[None]
    w_t = np.concatenate([np.eye(k, dtype=np.int8), -np.eye(k, dtype=np.int8)])
    check_product(be, x_q, w_t)


def test_views_that_are_not_contiguous(be):
    generator = rng(1)
    wide = generator.integers(-128, 128, (6, 90), dtype=np.int8)
    w_t = random_ternary(generator, 12, 45)
    check_product(be, wide[::2, ::2], w_t)
    check_product(be, np.asfortranarray(wide)[:, :45], w_t)


def test_a_view_that_may_not_be_written(be):
    x_q = rng(2).integers(-128, 128, (3, 20), dtype=np.int8)
    x_q.flags.writeable = False
    check_product(be, x_q, random_ternary(rng(3), 8, 20))


@pytest.mark.long_emulated
@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_any_number_of_threads(backend_name, threads):
    generator = rng(4)
    be = choose_backend(backend_name, threads=threads)
    check_product(be, generator.integers(-128, 128, (7, 129), dtype=np.int8), random_ternary(generator, 11, 129))


# -- quantize_activations ----------------------------------------------------------------------------------------------


def quantize_oracle(x):
    """The two lines of the specification, in float32, with Python's own rounding (half to even)."""
    scale = np.float32(127) / np.maximum(np.abs(x).max(axis=1, keepdims=True), np.float32(1e-5))
    rounded = [[max(-128, min(127, round(float(value)))) for value in row] for row in x * scale]
    return np.array(rounded, dtype=np.int8).reshape(x.shape), scale


def check_activations(be, x):
    x = np.asarray(x, dtype=np.float32)
    x_q, scale = call(be, "quantize_activations", x)
    expected_q, expected_scale = quantize_oracle(x)
    assert (x_q.dtype, scale.dtype, scale.shape) == (np.int8, np.float32, (len(x), 1))
    np.testing.assert_array_equal(x_q, expected_q)
    np.testing.assert_array_equal(scale, expected_scale)


def test_ties_round_half_to_even(be):
    ties = [127.0, 0.5, 1.5, 2.5, 3.5, -0.5, -1.5, -2.5, 125.5, 126.5, -125.5, -126.5, -127.0]  # the scale is 1
    check_activations(be, [ties])
    x_q, _ = call(be, "quantize_activations", np.array([ties], dtype=np.float32))
    assert x_q[0].tolist() == [127, 0, 2, 2, 4, 0, -2, -2, 126, 126, -126, -126, -127]


@pytest.mark.sample(4)
@pytest.mark.parametrize("k", [1, 3, 7, 8, 15, 16, 17, 31, 32, 33, 100])
def test_every_length_of_row(be, k):
    check_activations(be, rng(k).standard_normal((5, k)))


def test_zero_tiny_and_large_rows(be):
    generator = rng(5)
    row = generator.standard_normal(37)
    check_activations(be, [row * size for size in (0.0, 1e-42, 1e-12, 9e-6, 1.1e-5, 1.0, 1e6, 1e30, 7e37)])


def test_a_tiny_row_is_scaled_by_the_floor(be):
    x_q, scale = call(be, "quantize_activations", np.array([[1e-6, -4e-7, 0.0]], dtype=np.float32))
    assert scale[0, 0] == np.float32(127) / np.float32(1e-5)
    assert x_q[0].tolist() == [13, -5, 0]


@pytest.mark.sample(6)
@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 40)), elements=st.floats(-9e4, 9e4, width=32))
)
def test_any_activation(be, x):
    check_activations(be, x)


def test_no_tokens(be):
    x_q, scale = call(be, "quantize_activations", np.empty((0, 8), dtype=np.float32))
    assert (x_q.shape, scale.shape) == ((0, 8), (0, 1))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 18])
def test_non_finite_activations_are_refused(be, bad, column):
    x = np.zeros((3, 19), dtype=np.float32)
    x[1, column] = bad
    with pytest.raises(NumericsError, match="token 1"):
        call(be, "quantize_activations", x)


# -- BitLinear ---------------------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@given(m=st.integers(0, 9), n=st.integers(1, 40), k=st.integers(1, 90), seed=st.integers(0, 2**32 - 1))
def test_linear_equals_numpy_to_the_bit(be, reference, m, n, k, seed):
    generator = rng(seed)
    x = (generator.standard_normal((m, k)) * 10.0 ** generator.integers(-7, 5, (m, 1))).astype(np.float32)
    w = TernaryWeight.from_ternary(random_ternary(generator, n, k), generator.uniform(1e-5, 2))
    (mine,) = prepared(be, w)
    y = call(be, "linear", x, mine)
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y, reference.linear(x, w))


def test_linears_equal_numpy_to_the_bit(be, reference):
    """Three at once, with and without a bias, of one quantised x."""
    generator = rng(6)
    x = generator.standard_normal((5, 48)).astype(np.float32)
    x[2] = 0
    ws = []
    for n, bias in ((64, False), (16, True), (17, False)):
        packed = TernaryWeight.from_ternary(random_ternary(generator, n, 48), 0.37)
        bias_vector = generator.standard_normal(n).astype(np.float32) if bias else None
        ws.append(TernaryWeight(packed.packed, 48, packed.w_dequant_scale, bias_vector))
    outs = call(be, "linears", x, prepared(be, *ws))
    for y, w in zip(outs, ws, strict=True):
        np.testing.assert_array_equal(y, reference.linear(x, w))
        acc = oracle(reference.quantize_activations(x)[0], w.ternary()).astype(np.float32)
        scale = np.float32(127) / np.maximum(np.abs(x).max(axis=1, keepdims=True), np.float32(1e-5))
        expected = acc * (np.float32(0.37) / scale)
        np.testing.assert_array_equal(y, expected if w.bias is None else expected + w.bias)


def test_dequantize_is_one_division_and_one_product(be):
    generator = rng(7)
    acc = generator.integers(-(2**24), 2**24, (4, 33), dtype=np.int32)
    scale = generator.uniform(1, 1e7, (4, 1)).astype(np.float32)
    w = TernaryWeight.from_ternary(random_ternary(generator, 33, 8), 0.0123)
    (mine,) = prepared(be, w)
    expected = acc.astype(np.float32) * (np.float32(0.0123) / scale)
    np.testing.assert_array_equal(call(be, "dequantize", acc, mine, scale), expected)


@pytest.mark.sample(3)
@pytest.mark.parametrize("tokens", [383, 384, 385, 800])
def test_more_tokens_than_a_kernel_takes_at_once(be, reference, tokens):
    random = rng(tokens)
    weights = [TernaryWeight.from_ternary(random.integers(-1, 2, (n, 203), dtype=np.int8), 0.03) for n in (70, 5, 130)]
    x = random.standard_normal((tokens, 203)).astype(np.float32)
    for got, expected in zip(call(be, "linears", x, weights), reference.linears(x, weights), strict=True):
        assert np.array_equal(got, expected)
