"""bitnet_ref.reference.quantization: the arithmetic of b1.58, against hand computations and from-scratch integers."""

import numpy as np
import pytest
from helpers import random_ternary, rng
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bitnet_ref.errors import NumericsError, ShapeError
from bitnet_ref.formats.packing import first_invalid_code, split_ternary
from bitnet_ref.reference import quantization as q

# -- weights -----------------------------------------------------------------------------------------------------------


def test_absmean_by_hand():
    w = np.array([[0.5, -1.5, 0.0], [2.0, -0.25, 0.75]], dtype=np.float32)
    assert q.absmean_scale(w) == np.float32(5.0 / 6)
    assert q.absmean_scale(w).dtype == np.float32


def test_quantize_weights_by_hand():
    """s = 1: values beyond 1.5 are clipped, ties go to the even neighbour."""
    w = np.array([[0.5, -0.5, 1.5, -1.5], [0.51, -0.51, 0.0, 2.98]], dtype=np.float32)
    w_t, scale = q.quantize_weights(w)
    assert scale == 1.0
    assert w_t.dtype == np.int8
    assert w_t.tolist() == [[0, 0, 1, -1], [1, -1, 0, 1]]


def test_the_scale_floor():
    w_t, scale = q.quantize_weights(np.full((2, 3), 1e-7, dtype=np.float32))
    assert scale == np.float32(1e-5)
    assert not w_t.any()
    assert q.absmean_scale(np.zeros((2, 2), dtype=np.float32)) == np.float32(1e-5)


@given(hnp.arrays(np.float32, st.tuples(st.integers(1, 9), st.integers(1, 40)), elements=st.floats(-9, 9, width=32)))
def test_quantize_weights_is_round_of_w_times_one_over_s(w):
    w_t, scale = q.quantize_weights(w)
    assert scale == max(np.float32(np.abs(w.astype(np.float64)).mean()), np.float32(1e-5))
    inverse = np.float32(1) / scale
    expected = [[max(-1, min(1, round(float(np.float32(v * inverse))))) for v in row] for row in w]
    assert w_t.tolist() == expected


def test_the_mean_does_not_depend_on_the_order_of_summation():
    w = (rng(1).standard_normal((300, 1000)) * 0.02).astype(np.float32)
    assert q.absmean_scale(w) == q.absmean_scale(w[::-1, ::-1]) == q.absmean_scale(w.T.copy())


def test_narrow_dtypes_are_averaged_in_wide_ones():
    w = np.full((64, 4096), 0.01, dtype=np.float16)  # a float16 sum would stop growing long before the end
    assert q.absmean_scale(w) == np.float32(np.float16(0.01))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_weights_are_refused(bad):
    w = np.ones((3, 4), dtype=np.float32)
    w[2, 1] = bad
    with pytest.raises(NumericsError, match="NaN or Inf"):
        q.quantize_weights(w)


# -- matrices that are ternary already ---------------------------------------------------------------------------------


def test_split_ternary_takes_the_stored_scale():
    w_t = random_ternary(rng(2), 8, 12)
    w_t[0, :2] = (1, -1)
    s = np.float32(0.1234)
    found, scale = split_ternary(w_t * s)
    assert scale == s
    np.testing.assert_array_equal(found, w_t)
    # absmean over it would be s times the share of non-zeros
    assert q.absmean_scale(w_t * s) < 0.8 * s


def test_split_ternary_of_one_sign():
    found, scale = split_ternary(np.full((2, 3), -0.25, dtype=np.float32))
    assert scale == 0.25
    assert (found == -1).all()


@pytest.mark.parametrize("w", [[[0.5, 0.5, 0.4]], [[0.0, 0.0]], [[1e-6, -1e-6]], [[1.0, -0.999]]])
def test_split_ternary_leaves_true_masters_alone(w):
    assert split_ternary(np.array(w, dtype=np.float32)) is None


# -- packing -----------------------------------------------------------------------------------------------------------


def test_the_layout_of_a_byte():
    """Weight 4j in the lowest bits of byte j, code = w + 1; a short row ends in code 1, a zero."""
    packed = q.pack_ternary(np.array([[-1, 0, 1, 1, -1]], dtype=np.int8))
    assert packed.tolist() == [[0b10_10_01_00, 0b01_01_01_00]]


@given(n=st.integers(1, 20), k=st.integers(1, 70), seed=st.integers(0, 10**6))
def test_pack_and_unpack(n, k, seed):
    w_t = random_ternary(rng(seed), n, k)
    packed = q.pack_ternary(w_t)
    assert packed.dtype == np.uint8
    assert packed.shape == (n, -(-k // 4))
    assert first_invalid_code(packed) is None
    unpacked = q.unpack_ternary(packed, k)
    assert unpacked.dtype == np.int8
    np.testing.assert_array_equal(unpacked, w_t)


def test_pack_does_not_change_its_argument_and_takes_views():
    w_t = random_ternary(rng(3), 6, 14)
    before = w_t.copy()
    np.testing.assert_array_equal(q.unpack_ternary(q.pack_ternary(w_t.T[::2]), 6), w_t.T[::2])
    np.testing.assert_array_equal(w_t, before)


@pytest.mark.parametrize("w_t", [[[2, 0]], [[0, -2]], [[]], [1, 0, -1], [[[1]]]])
def test_pack_refuses_what_is_not_a_ternary_matrix(w_t):
    with pytest.raises(ShapeError, match="pack_ternary"):
        q.pack_ternary(np.array(w_t, dtype=np.int8))


@pytest.mark.parametrize("shift", [0, 2, 4, 6])
def test_first_invalid_code_finds_code_3_anywhere(shift):
    packed = q.pack_ternary(random_ternary(rng(4), 700, 8000))  # several blocks of the search
    assert first_invalid_code(packed) is None
    packed[650, 1999] |= 3 << shift
    assert first_invalid_code(packed) == (650, 1999)
    packed[3, 7] |= 3 << shift
    assert first_invalid_code(packed) == (3, 7)


def test_codes_1_and_2_side_by_side_are_no_code_3():
    """Bits 1 and 2 of a byte belong to two codes."""
    assert first_invalid_code(np.array([[0b10_01_10_01, 0b01_10_01_10]], dtype=np.uint8)) is None


# -- activations and the product (each backend's versions are held to these by tests/contract) -------------------------


def test_quantize_activations_by_hand():
    x_q, scale = q.quantize_activations(np.array([[1.0, -2.0, 0.25]], dtype=np.float32))
    assert scale.tolist() == [[63.5]]
    assert x_q.tolist() == [[64, -127, 16]]  # 63.5 is a tie and goes to 64


def test_quantize_activations_keeps_float64():
    x = np.array([[1.0, 1 / 3]])
    x_q, scale = q.quantize_activations(x)
    assert scale.dtype == np.float64
    assert x_q.tolist() == [[127, 42]]


def test_ternary_matmul_by_hand():
    packed = q.pack_ternary(np.array([[1, -1, 0], [1, 1, 1]], dtype=np.int8))
    acc = q.ternary_matmul(np.array([[3, 5, 7], [-128, 127, 1]], dtype=np.int8), packed, 3)
    assert acc.dtype == np.int32
    assert acc.tolist() == [[-2, 15], [-255, 0]]


@pytest.mark.parametrize(
    ("x_q", "packed", "in_features"),
    [
        (np.ones((2, 5), np.int8), np.ones((3, 2), np.uint8), 6),
        (np.ones((2, 5), np.int8), np.ones((3, 3), np.uint8), 5),
        (np.ones(5, np.int8), np.ones((3, 2), np.uint8), 5),
        (np.ones((2, 5), np.float32), np.ones((3, 2), np.uint8), 5),
        (np.ones((2, 5), np.int8), np.ones((3, 2, 1), np.uint8), 5),
    ],
)
def test_ternary_matmul_refuses_other_shapes(x_q, packed, in_features):
    with pytest.raises(ShapeError, match="ternary_matmul: expected x_q"):
        q.ternary_matmul(x_q, packed, in_features)


def test_dequantize_rounds_twice():
    """acc * (s / a) in float32: the quotient rounded, then the product."""
    acc = np.array([[877824, -3]], dtype=np.int32)
    s, a = np.float32(0.3), np.array([[1.7]], dtype=np.float32)
    expected = [np.float32(877824) * (s / a[0, 0]), np.float32(-3) * (s / a[0, 0])]
    assert q.dequantize(acc, s, a).tolist() == [expected]
    assert q.dequantize(acc, s, a.astype(np.float64)).dtype == np.float64


def test_bitlinear_error_is_that_of_its_quantisation():
    """The whole layer approximates x W^T as well as ternary weights can: the direction is right, not exact."""
    generator = rng(5)
    x, w = generator.standard_normal((4, 512)).astype(np.float32), generator.standard_normal((64, 512)) * 0.02
    w_t, s = q.quantize_weights(w.astype(np.float32))
    x_q, a = q.quantize_activations(x)
    y = q.dequantize(q.ternary_matmul(x_q, q.pack_ternary(w_t), 512), s, a)
    exact = x @ (w_t * s).T.astype(np.float32)  # with the activations unquantised: int8 costs about 1 %
    assert np.abs(y - exact).max() < 0.02 * np.abs(exact).max()
    correlation = np.corrcoef(y.ravel(), (x @ w.T).ravel())[0, 1]
    assert 0.85 < correlation < 0.99
