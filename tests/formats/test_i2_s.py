"""formats.i2_s: three layouts by their definition, bytes of bitnet.cpp's own quantiser, and finding the layout."""

import numpy as np
import pytest
from helpers import DATA, model, random_ternary, rng
from hypothesis import given
from hypothesis import strategies as st

from bitnet_ref.errors import FormatError, ShapeError
from bitnet_ref.formats.gguf import evidence
from bitnet_ref.formats.gguf.file import GgufFile
from bitnet_ref.formats.gguf.i2_s import (
    LAYOUTS,
    LayoutEvidence,
    StaleTail,
    _squared_z,
    fits_layout,
    i2_s_scale,
    pack_from_i2_s,
    pack_i2_s,
    unpack_i2_s,
)
from bitnet_ref.formats.gguf.model import GgufCheckpoint
from bitnet_ref.reference.quantization import pack_ternary


def place(n_in, row, column, layout):
    """(byte, shift) of one weight, from the definition, in scalars."""
    if layout == "interleaved":
        return row // 4 * n_in + column, 6 - 2 * (row % 4)
    block, width = (128, 32) if layout == "x86" else (64, 16)
    at = row * n_in + column
    return at // block * width + at % block % width, 6 - 2 * (at % block // width)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(4, 128), (8, 64), (12, 96), (128, 1)])
def test_the_definition(layout, shape):
    if layout == "x86" and shape[0] * shape[1] % 128:
        pytest.skip("not a whole number of blocks")
    w_t = random_ternary(rng(1), *shape)
    raw = pack_i2_s(w_t, 0.375, layout)
    assert raw.size == w_t.size // 4 + 32
    for row in range(shape[0]):
        for column in range(shape[1]):
            byte, shift = place(shape[1], row, column, layout)
            assert (int(raw[byte]) >> shift & 3) - 1 == w_t[row, column]
    np.testing.assert_array_equal(pack_from_i2_s(raw, shape, layout), pack_ternary(w_t))
    assert raw[-32:].tobytes() == np.float32(0.375).tobytes() + bytes(28)
    assert i2_s_scale(raw) == np.float32(0.375)


@given(layout=st.sampled_from(LAYOUTS), n=st.integers(1, 9), k=st.integers(1, 5), seed=st.integers(0, 10**6))
def test_there_and_back(layout, n, k, seed):
    w_t = random_ternary(rng(seed), 4 * n, 32 * k)
    raw = pack_i2_s(w_t, 1.0, layout)
    np.testing.assert_array_equal(unpack_i2_s(raw, w_t.shape, layout), w_t)
    np.testing.assert_array_equal(pack_from_i2_s(raw, w_t.shape, layout), pack_ternary(w_t))


def test_packed_in_several_pieces():
    w_t = random_ternary(rng(3), 512, 1280)
    for layout in LAYOUTS:
        packed = pack_from_i2_s(pack_i2_s(w_t, 1.0, layout), w_t.shape, layout)
        np.testing.assert_array_equal(packed, pack_ternary(w_t))


def test_equal_to_the_file_of_bitnet_cpp():
    """Codes, scale, and the 28 bytes after it, which are what its buffer held before."""
    tail = StaleTail()
    with GgufFile(DATA / "gguf" / "i2_s.gguf") as file:
        matrices = [tensor for tensor in file.tensors.values() if tensor.type.name == "I2_S"]
        leftovers = 0
        for tensor in matrices:
            raw = file.read_raw(tensor.name)
            w_t = unpack_i2_s(raw, tensor.shape)
            assert set(np.unique(w_t)) == {-1, 0, 1}
            assert tail.apply(pack_i2_s(w_t, i2_s_scale(raw))).tobytes() == raw.tobytes()
            assert pack_i2_s(w_t, i2_s_scale(raw))[:-28].tobytes() == raw[:-28].tobytes()
            leftovers += bool(raw[-28:].any())
    assert len(matrices) == 14
    assert leftovers > 0


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_the_tail_is_of_an_earlier_larger_tensor(sizes):
    """As a buffer that grows with zeros, of which each tensor writes its codes and the four bytes of its scale."""
    tail, buffer = StaleTail(), bytearray(1000)
    for number, size in enumerate(sizes, 1):
        raw = np.full(size + 32, number, dtype=np.uint8)
        buffer[: size + 4] = bytes([number]) * (size + 4)
        assert tail.apply(raw).tobytes() == bytes(buffer[: size + 32])
        assert raw.tolist() == [number] * (size + 32)  # the argument stays as it is


# -- bad data ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_code_3(layout):
    w_t = random_ternary(rng(2), 8, 128)
    raw = pack_i2_s(w_t, 1.0, layout)
    raw[77] = 0b00_11_00_00
    with pytest.raises(FormatError, match=r"code 3 in byte 77 \(0x30\)"):
        unpack_i2_s(raw, w_t.shape, layout)


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf])
def test_scales(scale):
    with pytest.raises(FormatError, match="scale above zero"):
        i2_s_scale(pack_i2_s(random_ternary(rng(3), 4, 32), scale))


def test_shapes():
    with pytest.raises(ShapeError, match="multiple of 128 weights"):
        pack_i2_s(random_ternary(rng(4), 3, 64), 1.0)
    with pytest.raises(ShapeError, match="multiple of 64 weights"):
        unpack_i2_s(np.zeros(40, np.uint8), (1, 32), "arm")
    with pytest.raises(ShapeError, match="multiple of 4 rows"):
        pack_i2_s(random_ternary(rng(4), 2, 64), 1.0, "interleaved")
    with pytest.raises(ShapeError, match="expected 64 bytes"):
        unpack_i2_s(np.zeros(65, np.uint8), (1, 128))
    with pytest.raises(FormatError, match="x86, arm, interleaved"):
        pack_i2_s(random_ternary(rng(4), 1, 128), 1.0, "neon")
    for code in (-2, 2):
        with pytest.raises(ShapeError, match="of -1, 0, \\+1"):
            pack_i2_s(np.repeat(np.int8([0, code]), 64)[None], 1.0)


# -- which layout ------------------------------------------------------------------------------------------------------


def gather(layers, layout):
    evidence = LayoutEvidence()
    for layer in layers:
        shares = {}
        for name, weight in layer.linears():
            w_t = weight.ternary()
            shares[name] = evidence.densities(pack_i2_s(w_t, 1.0, layout), w_t.shape)
        columns = {name: {k: v[0] for k, v in both.items()} for name, both in shares.items()}
        rows = {name: {k: v[1] for k, v in both.items()} for name, both in shares.items()}
        evidence.add(columns["q_proj"], dict.fromkeys(LAYOUTS, layer.attn_norm.weight))
        evidence.add(columns["o_proj"], dict.fromkeys(LAYOUTS, layer.attn_sub_norm.weight))
        evidence.add(columns["down_proj"], rows["up_proj"])
    return evidence


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_trained_model_shows_its_layout(layout):
    verdict = gather(model("storyteller").weights.layers[:2], layout).judge()
    assert verdict.decided
    assert verdict.layout == layout
    assert layout in verdict.words


@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_weights_do_not_show_it(layout):
    evidence = LayoutEvidence()
    for seed in range(20):
        w_t = random_ternary(rng(seed), 128, 256)
        shares = evidence.densities(pack_i2_s(w_t, 1.0, layout), w_t.shape)
        evidence.add({k: v[0] for k, v in shares.items()}, dict.fromkeys(LAYOUTS, rng(seed, 1).standard_normal(256)))
    verdict = evidence.judge()
    assert (verdict.layout, verdict.decided) == ("x86", False)
    assert "do not tell" in verdict.words


# counted once, or unpacked
@pytest.mark.parametrize("shape", [(4, 128), (1024, 256), (1028, 384), (12, 96), (6, 128), (128, 129)])
def test_shares_of_nonzeros(shape):
    raw = pack_i2_s(random_ternary(rng(6), *shape), 1.0)
    shares = LayoutEvidence().densities(raw, shape)
    assert list(shares) == [layout for layout in LAYOUTS if fits_layout(shape, layout)]
    for layout, pair in shares.items():
        nonzero = unpack_i2_s(raw, shape, layout) != 0
        for axis in (0, 1):
            np.testing.assert_array_equal(pair[axis], nonzero.mean(axis=axis, dtype=np.float32), strict=True)


def test_a_shape_that_one_layout_cannot_have_rules_it_out():
    w_t = random_ternary(rng(5), 3, 64)  # 192 weights: no multiple of 128, and no fours of rows
    evidence = LayoutEvidence()
    shares = evidence.densities(pack_i2_s(w_t, 1.0, "arm"), w_t.shape)
    assert list(shares) == ["arm"]
    evidence.add({k: v[0] for k, v in shares.items()}, dict.fromkeys(LAYOUTS, np.ones(64)))
    assert evidence.judge()[:2] == ("arm", True)


def test_nothing_to_compare():
    words = "I2_S layout: x86 assumed, as there was nothing to compare"
    assert LayoutEvidence().judge() == ("x86", False, words)


NO = -np.inf


@pytest.mark.parametrize(
    ("sums", "layout", "decided", "words"),
    [
        ((10.0, 80.0, 40.0), "arm", True, "arm, by the weights' columns (agreement, 1 is chance: {})"),
        ((10.0, 79.0, 39.5), "x86", False, None),  # not 40 more
        ((10.0, 99.0, 50.0), "x86", False, None),  # not twice as much
        ((10.0, 100.0, 50.0), "arm", True, "arm, by the weights' columns (agreement, 1 is chance: {})"),
        ((0.0, 0.0, 39.9), "x86", False, None),
        ((0.0, 0.0, 40.0), "interleaved", True, "interleaved, by the weights' columns (agreement, 1 is chance: {})"),
        ((NO, 3.0, 2.0), "arm", False, None),  # x86 cannot be
        ((NO, 2.0, NO), "arm", True, "arm, by the weights' columns (agreement, 1 is chance: {})"),
        ((NO, NO, NO), "x86", False, "no layout fits every matrix's shape; x86 assumed"),
    ],
)
def test_what_decides(sums, layout, decided, words):
    """The best needs 40 more than the next, and twice as much."""
    assert LAYOUTS == ("x86", "arm", "interleaved")
    comparison = LayoutEvidence()
    comparison.sums, comparison.comparisons = dict(zip(LAYOUTS, sums, strict=True)), 2
    figures = ", ".join(
        f"{name} {'does not fit' if value == NO else f'{value / 2:.1f}'}"
        for name, value in zip(LAYOUTS, sums, strict=True)
    )
    words = words or "x86 assumed; the weights do not tell (agreement of columns, 1 is chance: {})"
    assert comparison.judge() == (layout, decided, f"I2_S layout: {words.format(figures)}")


def test_a_matrix_of_another_shape_rules_layouts_out():
    comparison = LayoutEvidence()
    columns = np.linspace(0, 1, 64, dtype=np.float32)
    comparison.add({"x86": columns, "arm": columns}, {"arm": columns, "interleaved": columns})
    comparison.add(dict.fromkeys(LAYOUTS, columns), dict.fromkeys(LAYOUTS, columns))
    assert comparison.sums == {"x86": NO, "arm": pytest.approx(2 * 64), "interleaved": NO}
    assert comparison.comparisons == 2


def test_what_is_compared_in_a_layer():
    """The columns of each of seven matrices with its norm, those of down_proj also with the rows of gate and of up."""
    comparison = LayoutEvidence()
    with GgufCheckpoint(DATA / "gguf" / "i2_s.gguf") as checkpoint:
        evidence._compare_layouts(checkpoint.file, checkpoint.config, 0, checkpoint.norm, comparison)
    assert comparison.comparisons == 7 + 2


def test_what_differs_from_block_to_block_is_no_evidence():
    """Of 128 columns; a vector without whole blocks is one."""
    steps, waves = np.repeat([0.0, 1.0, 5.0], 128), np.resize([0.0, 1.0], 384)
    assert _squared_z(steps, steps) == 0.0
    assert _squared_z(steps + waves, waves) == pytest.approx(384)
    assert _squared_z(steps[:200], steps[:200]) == pytest.approx(200)
