"""formats.base3: five ternary weights to a byte, against the definition written out."""

import numpy as np
from helpers import random_ternary, rng
from hypothesis import given
from hypothesis import strategies as st

from bitnet_ref.formats.native.base3 import BYTE_VALUES, first_invalid_byte, pack_base3, unpack_base3
from bitnet_ref.reference.quantization import pack_ternary


def by_definition(w_t):
    n, k = w_t.shape
    out = np.zeros((n, -(-k // 5)), dtype=np.uint8)
    for row in range(n):
        for column in range(out.shape[1]):
            weights = [*w_t[row, 5 * column : 5 * column + 5].tolist(), 0, 0, 0, 0][:5]
            out[row, column] = sum((w + 1) * 3**place for place, w in enumerate(weights))
    return out


@given(st.integers(1, 9), st.integers(1, 70), st.integers(0, 2**32))
def test_round_trip(n, k, seed):
    w_t = random_ternary(rng(seed), n, k)
    packed = pack_ternary(w_t)
    trits = pack_base3(packed, k)
    assert np.array_equal(trits, by_definition(w_t))
    assert np.array_equal(unpack_base3(trits, k), packed)
    assert first_invalid_byte(trits) is None


def test_rows_in_many_blocks():
    w_t = random_ternary(rng(1), 700, 2560)
    packed = pack_ternary(w_t)
    trits = pack_base3(packed, 2560)
    assert trits.nbytes == packed.nbytes * 4 // 5
    assert np.array_equal(unpack_base3(trits, 2560), packed)


def test_every_byte():
    """All 243 values decode to their digits; the 13 others are found, wherever they are."""
    column = np.arange(BYTE_VALUES, dtype=np.uint8)[:, None]
    packed = unpack_base3(column, 5)
    assert np.array_equal(pack_base3(packed, 5), column)
    assert len(np.unique(packed, axis=0)) == BYTE_VALUES
    for value in range(BYTE_VALUES, 256):
        trits = np.full((4000, 100), 242, dtype=np.uint8)
        trits[3987, 17] = value
        assert first_invalid_byte(trits) == (3987, 17)
