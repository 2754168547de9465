"""formats.gguf_blocks: bit for bit what the gguf package computes, there and back."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from helpers import random_ternary, rng
from hypothesis import given
from hypothesis import strategies as st

from bitnet_ref.errors import FormatError, NumericsError, ShapeError
from bitnet_ref.families.blocks import unpack_codes
from bitnet_ref.families.groups import expand_groups, merge_groups, split_groups
from bitnet_ref.formats.gguf import blocks
from bitnet_ref.formats.gguf.blocks import (
    BY_NAME,
    DEQUANTIZABLE,
    GROUP_TYPES,
    TERNARY_ROWS,
    block_scales,
    blocks_from_groups,
    blocks_from_ternary,
    dequantize,
    groups_from_blocks,
    quantize,
    scale_in_blocks,
    ternary_from_blocks,
)
from bitnet_ref.reference import quantization

# the byte of a block's float16
SCALE_AT = {"Q8_0": 0, "Q4_0": 0, "Q4_1": 0, "Q5_0": 0, "Q4_K": 0, "Q5_K": 0, "Q6_K": 208, "TQ1_0": 52, "TQ2_0": 64}


def random_blocks(kind, n, seed):
    """Blocks of any bytes, with scales that are finite: any float16 in turn."""
    size = BY_NAME[kind].block_bytes
    generator = rng(seed)
    raw = generator.integers(0, 256, (n, size), dtype=np.uint8)
    if kind in SCALE_AT:
        halves = generator.integers(0, 2**16, n, dtype=np.uint16)
        halves[(halves & 0x7C00) == 0x7C00] = 0x3C01
        raw[:, SCALE_AT[kind] : SCALE_AT[kind] + 2] = halves[:, None].view(np.uint8)
    if kind in ("Q4_K", "Q5_K", "Q4_1"):
        raw[:, 3] &= 0xBF  # its second float16
    elif kind == "F32":
        raw[:, 3] &= 0xBF
    elif kind in ("F16", "BF16"):
        raw[:, 1] &= 0xBF
    return raw


def assert_same_bits(kind, n, seed):
    raw = random_blocks(kind, n, seed)
    expected = gguf.dequantize(raw, GGMLQuantizationType[kind])
    got = dequantize(raw.reshape(-1), kind, (n, BY_NAME[kind].block_values))
    assert got.dtype == np.float32
    got, expected = got.reshape(-1) + np.float32(0), expected.reshape(-1) + np.float32(0)  # -0 is 0
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


OF_THE_PACKAGE = [kind for kind in DEQUANTIZABLE if kind not in (*GROUP_TYPES, *TERNARY_ROWS)]


@pytest.mark.parametrize("kind", OF_THE_PACKAGE)
def test_every_bit_of_the_package(kind):
    assert_same_bits(kind, 200, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", OF_THE_PACKAGE)
def test_every_bit_of_the_package_in_ten_thousand_blocks(kind):
    assert_same_bits(kind, 10_000, seed=2)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_quantising_as_the_package(kind):
    values = rng(3).standard_normal((60, 256)).astype(np.float32)
    values[3, :64] = 0
    values[4] *= 1e-6
    values[5, 0] = values[5, 1:].max() * 2  # steps of which some lie half way
    values[6] = np.rint(values[6] * 8) / 2
    values[6, ::32] = 127
    expected = np.asarray(gguf.quantize(values, GGMLQuantizationType[kind]))
    assert quantize(values, kind).tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", ["TQ1_0", "TQ2_0"])
def test_ternary_blocks_as_the_package_quantises_them(kind):
    w_t = random_ternary(rng(4), 33, 512)
    w_t[5, 256:] = 0
    scale = np.float32(0.0371)
    raw = blocks_from_ternary(w_t, scale, kind)
    assert raw.tobytes() == gguf.quantize(w_t * scale, GGMLQuantizationType[kind]).tobytes()
    again, found = ternary_from_blocks(raw, kind, w_t.shape)
    np.testing.assert_array_equal(again, w_t)
    assert found == scale_in_blocks(scale) == np.float32(np.float16(scale))
    assert found != scale  # float16 does not hold it, and the blocks say so


@given(
    kind=st.sampled_from(["TQ1_0", "TQ2_0"]),
    rows=st.integers(1, 5),
    blocks=st.integers(1, 3),
    scale=st.floats(2**-14, 60000, width=16),
    seed=st.integers(0, 10**6),
)
def test_ternary_there_and_back(kind, rows, blocks, scale, seed):
    w_t = random_ternary(rng(seed), rows, 256 * blocks)
    w_t[0, :256] *= seed % 2
    raw = blocks_from_ternary(w_t, scale, kind)
    again, found = ternary_from_blocks(raw, kind, w_t.shape)
    np.testing.assert_array_equal(again, w_t)
    assert again.dtype == np.int8
    assert found == scale or not w_t.any()
    np.testing.assert_array_equal(dequantize(raw, kind, w_t.shape), w_t * np.float32(scale))


@given(rows=st.integers(1, 4), blocks=st.integers(1, 4), seed=st.integers(0, 10**6))
def test_q8_0_is_near(rows, blocks, seed):
    values = rng(seed).standard_normal((rows, 32 * blocks)).astype(np.float32)
    again = dequantize(quantize(values, "Q8_0"), "Q8_0", values.shape)
    assert np.abs(again - values).max() <= np.abs(values).max() / 127


def test_more_blocks_than_are_done_at_a_time():
    w_t = random_ternary(rng(5), 40, 256 * 256)
    raw = blocks_from_ternary(w_t, 0.5, "TQ1_0")
    np.testing.assert_array_equal(ternary_from_blocks(raw, "TQ1_0", w_t.shape)[0], w_t)
    np.testing.assert_array_equal(dequantize(raw, "TQ1_0", w_t.shape), w_t * np.float32(0.5))


@pytest.mark.parametrize("kind", blocks._CODES)
def test_codes_are_packed_as_they_are_read(kind):
    raw = rng(8).integers(0, 256, (70, BY_NAME[kind].block_bytes), dtype=np.uint8)
    np.testing.assert_array_equal(unpack_codes(blocks._packed(kind, raw)), blocks._CODES[kind](raw), strict=True)


def set_scale(raw, kind, block, value):
    blocks = raw.reshape(-1, BY_NAME[kind].block_bytes)
    blocks[block, -2:] = np.array([value], dtype=np.float16).view(np.uint8)


@pytest.mark.parametrize("kind", ["TQ1_0", "TQ2_0"])
def test_scales_of_blocks(kind):
    w_t = random_ternary(rng(6), 3, 512)
    raw = blocks_from_ternary(w_t, 0.25, kind)
    for bad in (np.nan, np.inf, -0.25):
        broken = raw.copy()
        set_scale(broken, kind, 4, bad)
        with pytest.raises(FormatError, match="block 4 has the scale"):
            ternary_from_blocks(broken, kind, w_t.shape)
    other = raw.copy()
    set_scale(other, kind, 1, 0.5)
    assert ternary_from_blocks(other, kind, w_t.shape) is None  # two scales: not one ternary matrix
    zero = raw.copy()
    set_scale(zero, kind, 1, 0)
    found, scale = ternary_from_blocks(zero, kind, w_t.shape)  # d = 0 says that the block is zero, whatever its codes
    assert scale == 0.25
    assert not found[0, 256:].any()
    np.testing.assert_array_equal(found * scale, dequantize(zero, kind, w_t.shape))


@pytest.mark.parametrize("kind", ["TQ1_0", "TQ2_0"])
def test_a_matrix_of_zeros_has_a_scale_above_zero(kind):
    found, scale = ternary_from_blocks(blocks_from_ternary(np.zeros((2, 256), np.int8), 0.5, kind), kind, (2, 256))
    assert not found.any()
    assert scale > 0


def test_code_3():
    raw = blocks_from_ternary(random_ternary(rng(7), 2, 512), 1.0, "TQ2_0")
    raw[2 * 66 + 5] |= 0xC0
    with pytest.raises(FormatError, match="block 2 holds the invalid ternary code 3"):
        ternary_from_blocks(raw, "TQ2_0", (2, 512))


def test_what_does_not_fit():
    with pytest.raises(ShapeError, match="multiple of 256"):
        blocks_from_ternary(random_ternary(rng(8), 4, 128), 1.0, "TQ2_0")
    with pytest.raises(ShapeError, match="multiple of 32"):
        quantize(np.zeros((4, 16), np.float32), "Q8_0")
    with pytest.raises(ShapeError, match="expected 66 bytes"):
        dequantize(np.zeros(65, np.uint8), "TQ2_0", (1, 256))
    with pytest.raises(FormatError, match="Q8_K are not read"):
        dequantize(np.zeros(292, np.uint8), "Q8_K", (1, 256))
    with pytest.raises(FormatError, match="not written as Q4_0"):
        quantize(np.zeros((1, 32), np.float32), "Q4_0")
    with pytest.raises(NumericsError, match="F16 can hold"):
        quantize(np.array([[70000.0]], np.float32), "F16")
    with pytest.raises(NumericsError, match="Q8_0 can hold"):
        quantize(np.full((1, 32), np.nan, np.float32), "Q8_0")
    for scale in (1e-9, 1e6, np.nan, -1.0):
        with pytest.raises(NumericsError, match="in float16"):
            blocks_from_ternary(np.ones((1, 256), np.int8), scale, "TQ1_0")
    for scale, rounded in ((1e6, "inf"), (1e-9, "0.0")):  # of one of two blocks
        with pytest.raises(NumericsError, match=rf"is {rounded} in float16, which Q2_0 holds"):
            block_scales(np.array([[0.5, scale]]), 64, 128, "Q2_0")
    with pytest.raises(ShapeError, match="of -1, 0, \\+1"):
        blocks_from_ternary(np.full((1, 256), 2, np.int8), 1.0, "TQ1_0")


# -- ternary by groups -------------------------------------------------------------------------------------------------


def reader(raw):
    return lambda start, count: raw[start : start + count]


@pytest.mark.parametrize("kind", ["Q2_0", "Q2_0 of 128", "PQ2_0", "PTQ1_0"])
@pytest.mark.parametrize("runs", [1, 2, 5])
def test_blocks_are_packed_as_their_values_would_be(kind, runs, monkeypatch):
    """Scales of any sign, of 0, and of blocks of zeros; `runs` neighbours share one."""
    monkeypatch.setattr(blocks, "_CHUNK_BLOCKS", 7)
    generator, block = rng(42, runs), BY_NAME[kind].block_values
    n, k = 9, block * 10
    w_t = random_ternary(generator, n, k)
    w_t[0, :block], w_t[3, block:] = 0, 0
    d = np.repeat(generator.standard_normal((n, 10 // runs)), runs, axis=1).astype(np.float16)
    d[generator.random(d.shape) < 0.1] = 0
    d[5] = np.float16(2**-24)
    raw = blocks_from_groups(quantization.pack_ternary(w_t), d, "PQ2_0" if block == 128 and "Q2" in kind else kind)
    packed, scales = groups_from_blocks(reader(raw), kind, (n, k))
    merged, group = merge_groups(scales, block, k)
    values = dequantize(raw, kind, (n, k)).astype(np.float16)
    np.testing.assert_array_equal(values, w_t * d.repeat(block, axis=1))
    expected = split_groups(values)
    np.testing.assert_array_equal(expand_groups(packed, k, merged, group, np.float16), values)
    for got, wanted in zip((packed, merged, group), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert group == block * runs or runs == 1


@pytest.mark.parametrize("kind", ["Q2_0", "PTQ1_0"])
def test_what_is_not_ternary_has_no_groups(kind):
    block = BY_NAME[kind]
    raw = np.zeros((4, block.block_bytes), dtype=np.uint8)
    shape, at = (2, 2 * block.block_values), block.block_bytes - 2 if kind == "PTQ1_0" else 0
    assert groups_from_blocks(reader(raw.reshape(-1)), kind, shape) is None  # all 0
    raw[:, at : at + 2] = np.float16(0.5).tobytes()[0], np.float16(0.5).tobytes()[1]
    assert groups_from_blocks(reader(raw.reshape(-1)), kind, shape) is not None
    if kind == "Q2_0":
        raw[2, 9] = 0xC0  # a code 3
        assert groups_from_blocks(reader(raw.reshape(-1)), kind, shape) is None
        assert dequantize(raw.reshape(-1), kind, shape).max() == 1.0
        raw[2, 9] = 0
    raw[3, at + 1] = 0x7C  # Inf
    assert groups_from_blocks(reader(raw.reshape(-1)), kind, shape) is None
    with pytest.raises(ShapeError):
        groups_from_blocks(reader(raw.reshape(-1)), kind, (4, 32))
