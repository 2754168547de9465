"""formats.packing: Hugging Face's plane of 2-bit codes, whose rows are a quarter of the matrix apart."""

import numpy as np
import pytest
from helpers import random_ternary, rng
from hypothesis import given
from hypothesis import strategies as st

from bitnet_ref.backends import choose_backend
from bitnet_ref.backends.cpu.extension import why_unavailable
from bitnet_ref.errors import ShapeError
from bitnet_ref.formats.packing import hf_from_ternary, pack_from_hf, split_ternary
from bitnet_ref.reference.quantization import pack_ternary, unpack_ternary


def test_the_layout_by_hand():
    """8 rows: byte row 0 holds rows 0, 2, 4, 6 (a stride of R = 2), not rows 0-3."""
    w_t = np.array([[-1], [1], [0], [1], [1], [0], [1], [-1]], dtype=np.int8)
    assert hf_from_ternary(w_t).tolist() == [[0b10_10_01_00], [0b00_01_10_10]]


def test_the_example_of_transformers():
    """integrations/bitnet.py, unpack_weights."""
    plane = np.array([[0b10100001, 0b00011000], [0b10010000, 0b00001010]], dtype=np.uint8)
    expected = [[0, -1], [-1, 1], [-1, 1], [-1, 1], [1, 0], [0, -1], [1, -1], [1, -1]]
    assert unpack_ternary(pack_from_hf(plane), 2).tolist() == expected


@given(quarter=st.integers(1, 12), k=st.integers(1, 40), seed=st.integers(0, 10**6))
def test_there_and_back(quarter, k, seed):
    w_t = random_ternary(rng(seed), 4 * quarter, k)
    plane = hf_from_ternary(w_t)
    assert plane.dtype == np.uint8
    assert plane.shape == (quarter, k)
    np.testing.assert_array_equal(pack_from_hf(plane), pack_ternary(w_t))


def test_planes_larger_than_one_step():
    w_t = random_ternary(rng(1), 4 * 300, 5000)
    np.testing.assert_array_equal(pack_from_hf(hf_from_ternary(w_t)), pack_ternary(w_t))


@pytest.mark.skipif(why_unavailable() is not None, reason="the extension is not built")
@pytest.mark.parametrize(("quarter", "k"), [(1, 1), (1, 4), (3, 7), (5, 64), (40, 129), (300, 5000)])
def test_the_compiled_form(quarter, k):
    w_t = random_ternary(rng(quarter), 4 * quarter, k)
    plane = hf_from_ternary(w_t)
    for threads in (1, 2, 5):
        pack_plane = choose_backend("cython", threads=threads).pack_plane
        np.testing.assert_array_equal(pack_plane(plane), pack_ternary(w_t))
    for at in {(0, 0), (quarter - 1, k - 1), (quarter // 2, k // 2)}:
        for shift in (0, 2, 4, 6):
            broken = plane.copy()
            broken[at] |= 3 << shift
            assert pack_plane(broken) is None


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_rows_come_in_fours(rows):
    with pytest.raises(ShapeError, match="multiple of 4 rows"):
        hf_from_ternary(random_ternary(rng(2), rows, 4))


@pytest.mark.parametrize(("scale", "is_one"), [(1e-5, True), (np.nextafter(np.float32(1e-5), np.float32(0)), False)])
def test_the_smallest_scale_of_a_matrix_in_floats(scale, is_one):
    """Below the floor of absmean it is no scale."""
    w = np.array([[1, 0, -1]], np.float32) * np.float32(scale)
    assert (split_ternary(w) is not None) == is_one
