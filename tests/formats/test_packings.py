"""Matrices that MLX and AWQ pack: by folders that mlx-lm wrote, and by encoders written from the descriptions."""

import json
import shutil

import numpy as np
import pytest
from helpers import DATA, model, rng
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import bitnet_ref
from bitnet_ref.errors import BitNetRefError, ConfigError, FormatError
from bitnet_ref.families.blocks import BlockWeight
from bitnet_ref.families.groups import GroupTernaryWeight
from bitnet_ref.formats.hf.folder import CheckpointTensors
from bitnet_ref.formats.hf.packings import (
    FLOAT_MODES,
    GROUPS,
    check_awq,
    describe_mlx,
    packed_width,
    read_affine,
    read_awq,
    read_small_floats,
    read_ternary_rows,
)
from bitnet_ref.formats.places import LinearPlace
from bitnet_ref.formats.safetensors import TensorInfo
from bitnet_ref.inspection import inspect_model
from bitnet_ref.reference.weights import DenseWeight

CASES = DATA / "containers"
TOKENS = [1, 5, 9, 2, 7]


def stream(codes, bits):
    """Of each row one stream of bits, the lowest first, in words of 32: by a Python integer."""
    rows = []
    for row in codes:
        number = sum(int(code) << bits * j for j, code in enumerate(row))
        rows.append(np.frombuffer(number.to_bytes(len(row) * bits // 8, "little"), dtype=np.uint32))
    return np.stack(rows)


def write_affine(folder, codes, bits, scales, biases):
    tensors = {"x.weight": stream(codes, bits), "x.scales": scales, "x.biases": biases}
    save_file(tensors, folder / "model.safetensors")
    return CheckpointTensors(folder)


def affine(folder, codes, bits, scales, biases):
    with write_affine(folder, codes, bits, scales, biases) as tensors:
        return read_affine(tensors, "x", LinearPlace("x", len(codes)), codes.shape[1], None)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_every_width_and_group(tmp_path, bits, group, dtype):
    codes = rng(bits).integers(0, 1 << bits, (6, 256)).astype(np.uint8)
    scales, biases = (rng(seed).standard_normal((6, 256 // group)).astype(dtype) for seed in (1, 2))
    if dtype == np.float32:
        scales[0, 0] = 1e6  # beyond float16
    weight = affine(tmp_path, codes, bits, scales, biases)
    wide = [np.repeat(each.astype(np.float32), group, axis=1) for each in (scales, biases)]
    np.testing.assert_array_equal(weight.array, wide[0] * codes + wide[1])
    assert weight.shape == (6, 256)
    assert isinstance(weight, BlockWeight) == (bits <= 4 and dtype == np.float16)  # packed, with a kernel


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_ternary_and_binary_matrices_are_planes(tmp_path_factory, seed, is_binary):
    draw = rng(seed)
    codes = draw.integers(0, 2 if is_binary else 3, (3, 128)).astype(np.uint8)
    scales = draw.choice([-0.5, 0, 0.25, 2], (3, 4)).astype(np.float16)  # mlx anchors the larger edge: of either sign
    biases = -scales / np.float16(2 if is_binary else 1)
    weight = affine(tmp_path_factory.mktemp("x"), codes, 1 if is_binary else 2, scales, biases)
    assert isinstance(weight, GroupTernaryWeight)
    expected = np.repeat(scales, 32, axis=1).astype(np.float32) * codes + np.repeat(biases, 32, axis=1)
    np.testing.assert_array_equal(weight.dense().array, expected)


def test_a_group_of_zeros_has_no_scale(tmp_path):
    codes = np.repeat([[0, 1, 2, 1], [1, 1, 0, 2]], 32, axis=1).astype(np.uint8)
    scales = np.array([[0.5, 0.5, 2, -2], [1, 3, 3, 1]], dtype=np.float16)
    weight = affine(tmp_path, codes, 2, scales, -scales)
    assert weight.scales.tolist() == [[0.5, 0, 2, 0], [0, 0, 3, 1]]


def test_two_bits_that_are_not_ternary_stay_what_they_say(tmp_path):
    codes = rng(3).integers(0, 3, (4, 128)).astype(np.uint8)
    scales = np.full((4, 2), 0.5, np.float16)
    assert isinstance(affine(tmp_path, codes, 2, scales, -2 * scales), BlockWeight)
    codes[0, 0] = 3
    assert isinstance(affine(tmp_path, codes, 2, scales, -scales), BlockWeight)


@pytest.mark.parametrize(
    ("words", "columns"), [((4, 9), 4), ((4, 8), 5), ((4, 8), 16), ((4, 14), 2), ((4, 8), 0), ((), 4)]
)
def test_shapes_that_fit_no_width(tmp_path, words, columns):
    tensors = {"x.weight": np.zeros(words, np.uint32)}
    tensors |= {name: np.zeros((4, columns), np.float16) for name in ("x.scales", "x.biases")}
    save_file(tensors, tmp_path / "model.safetensors")
    with CheckpointTensors(tmp_path) as opened, pytest.raises(FormatError, match="1 to 8 bits in groups of 32"):
        read_affine(opened, "x", LinearPlace("x", 4), 128, None)


def test_scales_without_their_weight(tmp_path):
    save_file({"x.scales": np.zeros((4, 4), np.float16)}, tmp_path / "model.safetensors")
    with CheckpointTensors(tmp_path) as opened, pytest.raises(FormatError, match=r"got 0 words and 4 scales"):
        read_affine(opened, "x", LinearPlace("x", 4), 128, None)


def test_ternary_rows_of_experts(tmp_path):
    """Two experts of three rows in one tensor, a scale for each row, one of them negative."""
    codes = rng(1).integers(0, 3, (6, 32)).astype(np.uint8)
    alpha = np.array([[0.5, -0.25, 1], [2, 0.125, 0]], dtype=np.float16)
    tensors = {"x.weight": stream(codes, 2).reshape(2, 3, 2), "x.row_alpha": alpha}
    place = LinearPlace("x", 6, stacked=2)
    save_file(tensors, tmp_path / "model.safetensors")
    with CheckpointTensors(tmp_path) as stored:
        weight = read_ternary_rows(stored, "x", place, 32, None)
        with pytest.raises(FormatError, match=r"expected U32 of shape \[6, 2\]"):
            read_ternary_rows(stored, "x", LinearPlace("x", 6), 32, None)
    np.testing.assert_array_equal(weight.array, (codes.astype(np.float32) - 1) * alpha.reshape(6, 1))
    tensors["x.weight"][1, 2, 0] |= 3
    save_file(tensors, tmp_path / "model.safetensors")
    with CheckpointTensors(tmp_path) as stored, pytest.raises(FormatError, match="expected codes 0, 1 and 2"):
        read_ternary_rows(stored, "x", place, 32, None)


def test_parameters_of_stacked_experts():
    """As many as the same model has with a tensor for each expert; a router's matrix is not counted in either."""
    unpacked = inspect_model(DATA / "families" / "maple").parameters
    assert inspect_model(CASES / "mlx-maple-rows").parameters == unpacked == 103_872
    config = model(CASES / "mlx-qwen3_moe-4bit").config
    linears = sum(n * k for i in (0, 1) for n, k in config.linear_shapes(i).values()) - 4 * 64
    norms = sum(size for i in (0, 1) for size in config.norm_shapes(i).values()) + 64
    assert inspect_model(CASES / "mlx-qwen3_moe-4bit").parameters == linears + norms + 2 * 64 * 64


def small_float(code, exponent_bits, fraction_bits):
    """A number by the description of its format: a sign, then the exponent, then the fraction."""
    sign = -1.0 if code >> (exponent_bits + fraction_bits) else 1.0
    exponent, fraction = code >> fraction_bits & ((1 << exponent_bits) - 1), code & ((1 << fraction_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    size = fraction / 2**fraction_bits + (exponent > 0)
    return sign * size * 2.0 ** (max(exponent, 1) - bias)


def write_small_floats(folder, codes, bits, scales):
    save_file({"x.weight": stream(codes, bits), "x.scales": scales}, folder / "model.safetensors")
    return CheckpointTensors(folder)


@pytest.mark.parametrize("mode", FLOAT_MODES)
def test_small_floats(tmp_path, mode):
    """Every code with small and large scales; where e4m3 has NaN, 0x7f and 0xff, there is 1 in its place."""
    bits, group = FLOAT_MODES[mode]
    codes = np.tile(np.arange(1 << bits), (8, 256 >> bits)).astype(np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x38
    draw = rng(1).integers(*((0, 0x7F) if mode == "nvfp4" else (10, 240)), (8, 256 // group)).astype(np.uint8)
    with write_small_floats(tmp_path, codes, bits, draw) as tensors:
        weight = read_small_floats(tensors, "x", LinearPlace("x", 8), 256, None)
        part = read_small_floats(tensors, "x", LinearPlace("x", 8, rows=slice(2, 5)), 256, None)
        assert packed_width((8, 8 * bits), tensors.info("x.scales"), None) == 256
    number = np.vectorize(lambda code: small_float(int(code), *((4, 3) if bits == 8 else (2, 1))))
    unit = np.vectorize(lambda code: small_float(int(code), 4, 3) if mode == "nvfp4" else 2.0 ** (int(code) - 127))
    expected = number(codes) * np.repeat(unit(draw), group, axis=1)
    assert weight.stored.dtype.name == "bfloat16"
    np.testing.assert_array_equal(weight.array.astype(np.float64), expected)
    np.testing.assert_array_equal(part.array.astype(np.float64), expected[2:5])


@pytest.mark.parametrize(("bits", "code", "scale"), [(4, 1, 255), (8, 0x7F, 127), (8, 1, 0), (4, 7, 254)])
def test_small_floats_that_bfloat16_cannot_hold(tmp_path, bits, code, scale):
    """NaN as a scale and as a code, a number that is too small, and one that is too large."""
    codes, scales = np.full((1, 32), code, np.uint8), np.full((1, 1), scale, np.uint8)
    with (
        write_small_floats(tmp_path, codes, bits, scales) as tensors,
        pytest.raises(FormatError, match="not finite, or that bfloat16 cannot hold"),
    ):
        read_small_floats(tensors, "x", LinearPlace("x", 1), 32, None)


@pytest.mark.parametrize(("words", "columns", "width"), [(4, 1, 64), (5, 1, 32), (0, 1, 32), (4, 0, 32), (8, 1, 64)])
def test_small_floats_of_no_mode(tmp_path, words, columns, width):
    tensors = {"x.weight": np.zeros((1, words), np.uint32), "x.scales": np.zeros((1, columns), np.uint8)}
    save_file(tensors, tmp_path / "model.safetensors")
    with CheckpointTensors(tmp_path) as opened, pytest.raises(FormatError, match="expected mxfp4 or mxfp8 or nvfp4"):
        read_small_floats(opened, "x", LinearPlace("x", 1), width, None)


def test_modes_that_are_not_read_are_named():
    with pytest.raises(ConfigError, match="'mxfp6' is a mode of MLX that is not read: expected affine, mxfp4"):
        describe_mlx({"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp6"}})
    with pytest.raises(ConfigError, match="mxfp6"):
        describe_mlx({"quantization": {"bits": 4, "group_size": 32, "lm_head": {"mode": "mxfp6"}}})
    for mode, (bits, group) in FLOAT_MODES.items():
        words = describe_mlx({"quantization": {"bits": bits, "group_size": group, "mode": mode}})
        assert f"{mode}, {bits} bits, groups of {group}" in words
    assert describe_mlx({"quantization": {"bits": 4, "group_size": 32, "lm_head": False}}) is not None
    assert describe_mlx({}) is None
    folder = CASES / "mlx-qwen3_moe-4bit"
    words = describe_mlx(json.loads((folder / "config.json").read_text()))
    assert words in inspect_model(folder).evidence


# -- AWQ ---------------------------------------------------------------------------------------------------------------


def awq(numbers):
    """(n, N) of 0 to 15 -> (n, N/8) int32: column 8 j + i at bits 4 {0, 4, 1, 5, 2, 6, 3, 7}[i]."""
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    words = np.zeros((len(numbers), numbers.shape[1] // 8), dtype=np.uint32)
    for column in range(numbers.shape[1]):
        words[:, column // 8] |= numbers[:, column].astype(np.uint32) << np.uint32(4 * order[column % 8])
    return words.view(np.int32)


def test_the_width_by_the_shapes():
    """Words of 32 bits, and a scale for each group: of the size that is stated, else of the first that fits."""

    def width(words, columns, stated, dtype="F16"):
        return packed_width((8, words), TensorInfo(dtype, (8, columns), 0, 0), stated)

    for stated, expected in ((64, 256), (128, 512), (32, 128)):  # 4, 2 and 8 bits
        assert width(32, 4, stated) == expected
    assert width(32, 4, None) == width(32, 4, 100) == 4 * GROUPS[0]
    assert width(7, 2, None) == width(7, 0, 64) == 0  # none fits
    assert [width(words, 4, 64, "U8") for words in (16, 32, 8, 12, 0)] == [128, 128, 64, 0, 0]  # small floats
    for dtype in ("U8", "F16"):
        assert packed_width((), TensorInfo(dtype, (), 0, 0), 64) == 0  # a damaged file


def test_awq(tmp_path):
    q, z = rng(1).integers(0, 16, (256, 24)), rng(2).integers(0, 16, (2, 24))
    scales = rng(3).standard_normal((2, 24)).astype(np.float16)
    save_file({"x.qweight": awq(q), "x.qzeros": awq(z), "x.scales": scales}, tmp_path / "model.safetensors")
    with CheckpointTensors(tmp_path) as tensors:
        weight = read_awq(tensors, "x", LinearPlace("x", 24), 256, None)
    assert isinstance(weight, DenseWeight)
    assert weight.array.dtype == np.float32
    expected = (q - np.repeat(z, 128, axis=0)) * np.repeat(scales.astype(np.float32), 128, axis=0)
    np.testing.assert_array_equal(weight.array, expected.T.astype(np.float32))


def test_which_awq_is_read():
    """ "GEMM" as in AutoAWQ's examples; GPTQModel calls the version format."""
    for read in ({}, {"version": "GEMM"}, {"version": None, "format": "gemm", "bits": 4}):
        check_awq(read)
    for key, value in {"version": "gemv", "format": "gemv_fast", "bits": 8, "zero_point": False}.items():
        with pytest.raises(ConfigError, match=rf"^quantization_config.{key}: AWQ with {value!r} is not read"):
            check_awq({key: value})


# -- folders -----------------------------------------------------------------------------------------------------------

HADAMARD = CASES / "mlx-prism-hadamard"


def test_what_inspect_says(tmp_path):
    found = inspect_model(CASES / "mlx-binary-1bit")
    assert (found.errors, found.parameters) == ([], 1_312_256)
    assert found.quantization.startswith("binary, -1 and +1, with a scale for each 128 inputs, in 14 of 14")
    found = inspect_model(CASES / "mlx-bitnet-q4-embedding")
    assert (found.errors, found.quantization) == ([], "autobitlinear, offline: packed to 2 bits")
    assert inspect_model(HADAMARD).errors == []


def test_a_folded_basis_is_the_same_model():
    expected = model(HADAMARD).logits(TOKENS)
    folded = bitnet_ref.load(HADAMARD, backend="numpy", rotation="folded")
    np.testing.assert_allclose(folded.logits(TOKENS), expected, rtol=0, atol=3e-4)


def test_a_basis_that_is_not_whole_is_an_error(tmp_path):
    shutil.copytree(HADAMARD, tmp_path / "x")
    folder = tmp_path / "x"
    config, keys = (json.loads((folder / name).read_text()) for name in ("config.json", "hadamard.json"))
    tensors = load_file(folder / "model.safetensors")
    prefix = "prism.hadamard."

    def fails(words, config=config, keys=keys, tensors=tensors):
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "hadamard.json").write_text(json.dumps(keys))
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(BitNetRefError, match=words):
            bitnet_ref.load(folder, backend="numpy")

    def signs_of(more_widths, more_values):
        widths, values = (keys[f"{prefix}sign_{name}"] for name in ("widths", "values"))
        return {f"{prefix}sign_widths": widths + more_widths, f"{prefix}sign_values": values + more_values}

    (folder / "hadamard.json").write_text(json.dumps(keys | signs_of([1], [-1])))
    bitnet_ref.load(folder, backend="numpy")  # a width that no matrix has
    modules = config["modules"]
    fails("lacks language_model", config | {"modules": modules[1:]})
    fails("is listed twice", config | {"modules": [*modules, modules[0]]})
    fails("is not packed in this folder", config | {"modules": [*modules, {"path": "model.norm", "block": 512}]})
    fails(
        "blocks of 256, and hadamard.json says 512", config | {"modules": [modules[0] | {"block": 256}, *modules[1:]]}
    )
    for size in (2, 1, 48, 1024, 512.0):
        blocks = config | {"modules": [each | {"block": each["block"] and size} for each in modules]}
        sizes = keys | {f"{prefix}block_size": size}
        if size == 2:
            (folder / "config.json").write_text(json.dumps(blocks))
            (folder / "hadamard.json").write_text(json.dumps(sizes))
            bitnet_ref.load(folder, backend="numpy")
        else:
            fails(f"blocks of {size} are no power of two that divides", blocks, sizes)
    fails("gdn_activation_layout: expected 'grouped'", config | {"gdn_activation_layout": "tiled"})
    fails("schema_version", config | {"schema_version": 3})
    fails("names other matrices", keys=keys | {f"{prefix}weight_names": keys[f"{prefix}weight_names"][1:]})
    for name in ("weight_names", "inverse_weight_names"):
        fails(f"{name}: expected a list of names", keys=keys | {f"{prefix}{name}": [["x"]]})
    for wrong in ([0.5], [[1]], 1):
        fails(r"sign_values: expected \d+ values of -1 or 1", keys=keys | {f"{prefix}sign_values": wrong})
    for more, ones in ([1], []), ([], [1]):
        fails(r"sign_values: expected \d+ values of -1 or 1", keys=keys | signs_of(more, ones))
    for more, ones in ([0], []), ([-1], []), ([1.0], [1]), ([512], [1] * 512):
        fails("sign_widths: expected different numbers of inputs", keys=keys | signs_of(more, ones))
    fails("version: expected 1", keys=keys | {f"{prefix}version": 2})
    signs = {name: -array if name.endswith("lm_head.signs") else array for name, array in tensors.items()}
    fails("differs from the signs for 512 inputs", tensors=signs)
    of_head = {name: array for name, array in tensors.items() if name.endswith("lm_head.signs")}
    flat = {name: array[None] for name, array in of_head.items()}
    fails(r"lm_head\.signs: expected F32 of shape \[0\], got F32 of shape \[1, 512\]", tensors=tensors | flat)
    others = {name: array for name, array in tensors.items() if name not in of_head}
    fails(r"lm_head\.signs: the tensor is missing; expected F32 of shape \[0\]", tensors=others)
    (folder / "hadamard.json").unlink()
    with pytest.raises(ConfigError, match=r"hadamard\.json is missing"):
        bitnet_ref.load(folder)
