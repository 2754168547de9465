"""Models as other people's tools write them, and the GGUF types that they brought: by golden files of these tools, by
encoders written from the descriptions, and by files that are damaged."""

import json
import shutil
from itertools import product

import gguf
import numpy as np
import pytest
from helpers import BITNET, DATA, model, rng, tiny_tensors, write_checkpoint
from safetensors.numpy import load_file, save_file
from test_gguf_model import changed

import bitnet_ref
from bitnet_ref.errors import ConfigError, FormatError
from bitnet_ref.families.groups import GroupTernaryWeight
from bitnet_ref.formats.checkpoint import LoadOptions
from bitnet_ref.formats.convert import convert
from bitnet_ref.formats.gguf import blocks
from bitnet_ref.formats.gguf.blocks import (
    blocks_from_groups,
    codes_fit,
    dequantize,
    groups_from_blocks,
    groups_from_rows,
    iq2_bn_rows,
)
from bitnet_ref.formats.gguf.export import write_gguf_model
from bitnet_ref.formats.gguf.file import GgufFile, Typed, open_gguf
from bitnet_ref.formats.gguf.model import GgufCheckpoint
from bitnet_ref.formats.open import open_checkpoint
from bitnet_ref.inspection import inspect_model
from bitnet_ref.reference.quantization import unpack_ternary
from bitnet_ref.reference.weights import TernaryWeight

CASES = DATA / "containers"
NAMES = sorted(folder.name for folder in CASES.iterdir())
SPLIT = CASES / "gguf-split"
TOKENS = [1, 5, 9, 2, 7]


def read_all(raw):
    return lambda start, count: raw[start : start + count]


# -- golden files ------------------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", NAMES)
def test_golden(name, backend_name):
    case = json.loads((CASES / name / "case.json").read_text())
    golden = load_file(CASES / name / "golden.safetensors")
    m = model(CASES / name / case["path"], backend_name)
    np.testing.assert_allclose(m.logits(golden["tokens"]), golden["logits"], rtol=0, atol=case["tolerance"])


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", NAMES)
def test_a_native_file_of_it_is_the_same_model(name, tmp_path):
    path = CASES / name / json.loads((CASES / name / "case.json").read_text())["path"]
    assert convert(path, tmp_path / "x.bitnet.safetensors", "native").exact
    again = bitnet_ref.load(tmp_path / "x.bitnet.safetensors", backend="numpy")
    np.testing.assert_array_equal(again.logits(TOKENS), model(path).logits(TOKENS))
    assert inspect_model(path).errors == []


# -- types -------------------------------------------------------------------------------------------------------------


def iq2_bn(codes, scales):
    """Of each row a float32 scale; of each 64 weights 16 bytes: weight 16 l + i at bits 2 l of byte i."""
    rows = b""
    for row, scale in zip(codes, scales, strict=True):
        rows += np.float32(scale).tobytes()
        for block in row.reshape(-1, 64):
            for i in range(16):
                rows += bytes([sum(int(block[16 * lane + i]) << 2 * lane for lane in range(4))])
    return np.frombuffer(rows, dtype=np.uint8)


def iq2_bn_r4(codes, scales):
    """Of four rows the scales; of each 64 weights 64 bytes: byte 16 l + 4 r + i has 16 l + i, 4, 8, 12 on of row r."""
    rows = b""
    for four, scale in zip(codes.reshape(-1, 4, codes.shape[1]), scales.reshape(-1, 4), strict=True):
        rows += scale.astype(np.float32).tobytes()
        for first in range(0, codes.shape[1], 64):
            for lane, r, i in product(range(4), range(4), range(4)):
                at = first + 16 * lane + i
                rows += bytes([sum(int(four[r, at + 4 * step]) << 2 * step for step in range(4))])
    return np.frombuffer(rows, dtype=np.uint8)


def iq1_bn(codes, scales):
    """Of each row a float16 scale; of each 64 weights 13 bytes: v in base 3, the lowest digit first, as 256 v / 243."""

    def byte(digits):
        return -(-256 * sum(int(digit) * 3**n for n, digit in enumerate(digits)) // 243)

    rows = b""
    for row, scale in zip(codes, scales, strict=True):
        rows += np.float16(scale).tobytes()
        for block in row.reshape(-1, 64):
            quarters = block.reshape(4, 16)
            rows += bytes([byte(quarters[i, 5 * k : 5 * k + 5]) for i in range(4) for k in range(3)])
            rows += bytes([byte([*quarters[:, 15], 0])])
    return np.frombuffer(rows, dtype=np.uint8)


@pytest.mark.parametrize(("kind", "encode"), [("IQ1_BN", iq1_bn), ("IQ2_BN", iq2_bn), ("IQ2_BN_R4", iq2_bn_r4)])
def test_rows_of_ik_llama_cpp(kind, encode, monkeypatch):
    monkeypatch.setattr(blocks, "_CHUNK_BLOCKS", 4)  # 5 of the 8 rows are read at once, or the 4 of IQ2_BN_R4
    codes, scales = rng(1).integers(0, 3, (8, 192), dtype=np.uint8), np.arange(1, 9, dtype=np.float32) / 16
    codes[5] = 1
    raw = encode(codes, scales)
    packed, found = groups_from_rows(read_all(raw), kind, codes.shape)
    np.testing.assert_array_equal(unpack_ternary(packed, 192), codes.astype(np.int8) - 1)
    np.testing.assert_array_equal(found[:, 0], np.where(np.arange(8) == 5, 0, scales))
    values = (codes.astype(np.float32) - 1) * scales[:, None]
    np.testing.assert_array_equal(dequantize(raw, kind, codes.shape), values)
    if kind == "IQ2_BN":
        np.testing.assert_array_equal(iq2_bn_rows(packed, scales[:, None]), raw)


def test_bad_rows():
    raw = iq2_bn(np.ones((2, 64), np.uint8), np.array([0.5, -1]))
    with pytest.raises(FormatError, match="row 1 has the scale -1"):
        groups_from_rows(read_all(raw), "IQ2_BN", (2, 64))
    raw = iq2_bn(np.full((2, 64), 3, np.uint8), np.array([0.5, 1]))
    with pytest.raises(FormatError, match="row 0 holds the invalid ternary code 3"):
        groups_from_rows(read_all(raw), "IQ2_BN", (2, 64))


def stq1_0(weights, scales):
    """Of each 256 weights 32 bytes of slots, 8 of signs, d; four weights 16 apart have one zero each."""
    out = b""
    for block, scale in zip(weights.reshape(-1, 256), scales, strict=True):
        slots, signs = [0] * 32, [0] * 8
        for g in range(64):
            lanes = [int(block[64 * (g // 16) + g % 16 + 16 * p]) for p in range(4)]
            zero, others = lanes.index(0), [lane for lane in lanes if lane]
            tail = (others[1] != others[0]) | (others[2] != others[0]) << 1
            slots[g // 2] |= (zero << 2 | tail) << 4 * (g % 2)
            signs[g // 8] |= (others[0] < 0) << g % 8
        out += bytes(slots) + bytes(signs) + np.float16(scale).tobytes()
    return np.frombuffer(out, dtype=np.uint8)


def sherry(n, k):
    """(n, k) in {-1, 0, 1}: of four weights 16 apart one is zero."""
    w = rng(2).choice([-1, 1], (n * k // 64, 4, 16)).astype(np.int8)
    np.put_along_axis(w, rng(3).integers(0, 4, (n * k // 64, 1, 16)), 0, axis=1)
    return w.reshape(n, k)


def test_sherrys_blocks():
    w, scales = sherry(4, 512), np.arange(1, 9, dtype=np.float16) / 8
    raw = stq1_0(w, scales)
    packed, found = groups_from_blocks(read_all(raw), "STQ1_0", w.shape)
    np.testing.assert_array_equal(unpack_ternary(packed, 512), w)
    np.testing.assert_array_equal(found.reshape(-1), scales)
    np.testing.assert_array_equal(dequantize(raw, "STQ1_0", w.shape), w * np.repeat(scales.reshape(4, 2), 256, axis=1))
    np.testing.assert_array_equal(blocks_from_groups(packed, found, "STQ1_0"), raw)
    assert codes_fit(packed, found, "STQ1_0")
    packed[3, 5] = 0x55  # four zeros
    assert not codes_fit(packed, found, "STQ1_0")
    assert codes_fit(packed, found * [[1, 1], [1, 1], [1, 1], [0, 1]], "STQ1_0")


def test_binary_blocks():
    signs = rng(4).choice([-1, 1], (2, 256)).astype(np.int8)
    for kind, size in (("Q1_0", 128), ("Q1_0 of 32", 32)):
        bits = np.packbits(signs.reshape(-1, size) > 0, axis=1, bitorder="little")
        d = np.full((len(bits), 1), 0.25, np.float16).view(np.uint8)
        raw = np.concatenate([d, bits], axis=1).reshape(-1)
        packed, scales = groups_from_blocks(read_all(raw), kind, signs.shape)
        np.testing.assert_array_equal(unpack_ternary(packed, 256), signs)
        assert set(scales.reshape(-1).tolist()) == {0.25}
        np.testing.assert_array_equal(dequantize(raw, kind, signs.shape), signs * np.float32(0.25))
        if kind == "Q1_0":
            np.testing.assert_array_equal(blocks_from_groups(packed, scales, kind), raw)
            packed[1, 40] ^= 1
            assert not codes_fit(packed, scales, kind)


@pytest.mark.parametrize(
    ("name", "target"),
    [("gguf-q1_0", "gguf-q1_0"), ("gguf-tq1_0-default", "gguf-tq1_0"), ("gguf-split", "gguf-q2_0")],
)
def test_blocks_are_written_as_llama_cpp_writes_them(name, target, tmp_path):
    """Files of its quantiser: each ternary tensor has the same bytes."""
    source = CASES / name / json.loads((CASES / name / "case.json").read_text())["path"]
    assert convert(source, tmp_path / "x.gguf", target).holds
    with open_gguf(source) as theirs, open_gguf(tmp_path / "x.gguf") as ours:
        ternary = [each for each, tensor in theirs.tensors.items() if f"gguf-{tensor.type.kind}" == target]
        assert len(ternary) >= 14
        for each in ternary:
            np.testing.assert_array_equal(ours.read_raw(each), theirs.read_raw(each))


@pytest.mark.sample(9)
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("families/qwen3-groups128", "mlx-2bit"),
        ("families/mixtral-groups128", "mlx-2bit"),
        ("families/qwen3_moe-groups128", "mlx-2bit"),
        ("containers/mlx-qwen35-ternary-2bit", "mlx-2bit"),
        ("containers/gguf-tq1_0-default/model.gguf", "mlx-2bit"),
        ("containers/gguf-tq1_0-default/model.gguf", "gguf-iq2_bn"),
        ("containers/gguf-q1_0/model.gguf", "mlx-2bit"),
        ("containers/gguf-q1_0/model.gguf", "mlx-1bit"),
        ("containers/mlx-binary-1bit", "gguf-q1_0"),
    ],
)
def test_forms_of_ternary_groups(source, target, tmp_path):
    """Compared with the source's own logits; what one form cannot say (a scale for each row, no zeros) others can."""
    path = tmp_path / ("x.gguf" if target.startswith("gguf") else "x")
    proof = convert(DATA / source, path, target)
    assert proof.planes.equal == proof.planes.total >= 9
    logits = [bitnet_ref.load(each, backend="numpy").logits(TOKENS) for each in (DATA / source, path)]
    np.testing.assert_allclose(
        *logits, rtol=0, atol=0.01 if "tq1_0" in source else 1e-5
    )  # embedding in Q4_K -> float16
    if path.is_dir():
        stated = json.loads((path / "config.json").read_text())["quantization"]
        assert stated == {"group_size": 128, "bits": int(target[4]), "mode": "affine"}
        assert (path / "model.safetensors.index.json").is_file()


def test_sherrys_form(tmp_path):
    """A model whose matrices are so: made of Qwen3's, with a zero in each four weights and scales of 256 inputs."""
    tensors = load_file(DATA / "families" / "qwen3-groups128" / "model.safetensors")
    for name, w in tensors.items():
        if w.ndim == 2:
            wide = sherry(*w.shape) if w.shape[1] % 256 == 0 else np.sign(w)
            tensors[name] = (wide * np.float16(0.125)).astype(np.float16)
    folder = tmp_path / "model"
    shutil.copytree(DATA / "families" / "qwen3-groups128", folder)
    save_file(tensors, folder / "model.safetensors")
    sherries = sum(w.ndim == 2 and w.shape[1] % 256 == 0 for w in tensors.values())
    assert convert(folder, tmp_path / "x.gguf", "gguf-stq1_0").exact
    with open_gguf(tmp_path / "x.gguf") as file:
        assert sum(tensor.type.name == "STQ1_0" for tensor in file.tensors.values()) == sherries > 0


def test_a_bitnet_whose_inputs_stay_in_float(tmp_path):
    """Its matrices are in blocks where these fit, else dense: each is its ternary values times its scale."""
    config = {**BITNET, "use_sub_norms": False, "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 96}
    tensors = {name: w for name, w in tiny_tensors(config).items() if "sub_norm" not in name}
    source, path = write_checkpoint(tmp_path / "hf", config, tensors), tmp_path / "x.gguf"
    assert convert(source, path, "gguf-q2_0").exact
    with open_gguf(path) as file:
        types = {name: tensor.type.name for name, tensor in file.tensors.items() if name.startswith("blk.1.")}
    dense = {"attn_norm": "F32", "ffn_norm": "F32", "ffn_down": "F16"}
    linears = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up")
    assert types == {f"blk.1.{name}.weight": kind for name, kind in (dense | dict.fromkeys(linears, "Q2_0")).items()}
    found, expected = (bitnet_ref.load(each, backend="numpy") for each in (path, source))
    for (name, a), (_, b) in zip(found.weights.linears(), expected.weights.linears(), strict=True):
        np.testing.assert_array_equal(a.array, b.array, err_msg=name)


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        (
            "families/qwen3-groups128",
            "gguf-q1_0",
            "no linear of this model is -d or .d, without zeros, by groups of 128",
        ),
        ("families/qwen3-groups128", "gguf-stq1_0", "with one zero in each four weights that are 16 apart"),
        ("families/qwen3-groups128", "gguf-iq2_bn", "ternary with one scale for each row"),
        ("families/qwen3-groups128", "gguf-i2_s", "activations are int8, and here they stay floats; use gguf-q2_0"),
        ("families/qwen3-groups128", "mlx-1bit", "binary, without zeros"),
        ("containers/mlx-prism-hadamard", "onnx", "ONNX files cannot say that matrices are in a Hadamard basis"),
        ("containers/mlx-prism-hadamard", "hf-unpacked", "Hugging Face files cannot say"),
        ("containers/mlx-prism-hadamard", "gguf-q2_0", "gguf-q2_0 files cannot say"),
        ("families/maple", "mlx-2bit", "mlx-lm has no maple model"),
        ("families/hunyuan", "mlx-2bit", "no matrix of this model is ternary by groups of 32, 64 or 128"),
        (
            "golden/bitnet-packed-offline",
            "mlx-2bit",
            "activations stay floats, and here they are int8; convert to native, or to hf-packed",
        ),
    ],
)
def test_why_a_form_does_not_hold_a_model(source, target, reason, tmp_path):
    with pytest.raises((FormatError, ConfigError), match=reason):
        convert(DATA / source, tmp_path / ("x.gguf" if target.startswith("gguf") else "x"), target)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("code", "size", "block", "name"),
    [
        (42, 72, 256, "Q2_0"),
        (42, 68, 256, "Q2_0 of 128"),
        (42, 42, 256, "STQ1_0"),
        (40, 144, 256, "NVFP4"),
        (40, 48, 256, "Q1_0 of 32"),
    ],
)
def test_what_an_id_means_is_told_by_the_spans(tmp_path, code, size, block, name):
    """As bytes of a type that is one byte wide, then with the id changed in the header."""
    matrix = np.zeros(8 * size, dtype=np.uint8)
    tensors = dict.fromkeys(("a.weight", "b.weight"), ((8 * size,), "I8", matrix))
    path = changed(tmp_path / "x.gguf", DATA / "gguf" / "i2_s.gguf", tensors=tensors)
    data = path.read_bytes()
    for each in (b"a.weight", b"b.weight"):
        at = data.index(each + b"\x01\0\0\0") + len(each) + 4
        data = data[:at] + (8 * block).to_bytes(8, "little") + code.to_bytes(4, "little") + data[at + 12 :]
    path.write_bytes(data)
    with GgufFile(path) as file:
        assert {file.tensors[each].type.name for each in ("a.weight", "b.weight")} == {name}
        assert file.tensors["b.weight"].nbytes == 8 * size


# -- what ternary linears do with their inputs -------------------------------------------------------------------------


TRILM = CASES / "gguf-tq1_0-default" / "model.gguf"  # two scales in each matrix


def one_scale(tmp_path, other=None, **metadata):
    """The same with one scale. other: but for the last block of one matrix."""
    tensors = {}
    with GgufFile(TRILM) as file:
        for tensor in file.tensors.values():
            if tensor.type.name == "TQ1_0":
                blocks = file.read_raw(tensor.name).reshape(-1, 54)
                blocks[:, 52:] = np.array([0.0625], np.float16).view(np.uint8)
                if other is not None and not tensors:
                    blocks[-1, 52:] = np.array([other], np.float16).view(np.uint8)
                tensors[tensor.name] = (tensor.shape, "TQ1_0", blocks.reshape(-1))
    values = {f"general.{key}": Typed("string", value) for key, value in metadata.items()}
    return changed(tmp_path / "x.gguf", TRILM, values, drop=["general.name"] * (not metadata), tensors=tensors)


def test_one_scale_is_a_bit_linears_unless_something_says_otherwise(tmp_path):
    path = one_scale(tmp_path)
    with GgufCheckpoint(path) as checkpoint:
        assert any('activations="float"' in words for words in checkpoint.evidence)
        assert isinstance(checkpoint.linear("blocks.0.attn.q_proj"), TernaryWeight)
    m = bitnet_ref.load(path, backend="numpy")
    assert m.config.quantization.int8_activations
    floats = bitnet_ref.load(path, backend="numpy", activations="float")
    assert not floats.config.quantization.int8_activations
    assert isinstance(floats.weights.layers[0].q_proj, GroupTernaryWeight)
    assert 0 < np.abs(floats.logits(TOKENS) - m.logits(TOKENS)).max() < 3
    named = bitnet_ref.load(one_scale(tmp_path, name="TriLM 99M"), backend="numpy")
    np.testing.assert_array_equal(named.logits(TOKENS), floats.logits(TOKENS))
    forced = bitnet_ref.load(tmp_path / "x.gguf", backend="numpy", activations="int8")
    np.testing.assert_array_equal(forced.logits(TOKENS), m.logits(TOKENS))


@pytest.mark.parametrize(
    ("activations", "words", "int8"),
    [
        ("float", "activations: float, as it was asked for", False),
        ("int8", "activations: int8, as it was asked for", True),
        (
            "blocks",
            "activations: rounded by blocks, as it was asked for (the rule of ggml, see docs/families.md)",
            None,
        ),
    ],
)
def test_what_is_asked_for_of_the_inputs_is_told(activations, words, int8, tmp_path):
    with GgufCheckpoint(one_scale(tmp_path), LoadOptions(activations=activations)) as checkpoint:
        assert [each for each in checkpoint.evidence if "activations" in each] == [words]
        quantization = checkpoint.config.quantization
        assert (None if quantization is None else quantization.int8_activations) is int8


def test_several_scales_leave_the_inputs_in_float(tmp_path):
    with GgufCheckpoint(TRILM) as checkpoint:
        assert any("several scales, which no BitLinear has" in words for words in checkpoint.evidence)
        assert checkpoint.config.quantization is None
    for path in (TRILM, one_scale(tmp_path, other=0.125)):  # all scales are looked at
        with pytest.raises(FormatError, match="TQ1_0 with several scales: a BitLinear's matrix has a single one"):
            bitnet_ref.load(path, backend="numpy", activations="int8")
        assert bitnet_ref.load(path, backend="numpy").config.quantization is None
    with pytest.raises(ConfigError, match="activations"):
        bitnet_ref.load(TRILM, activations="fp8")


# -- split files -------------------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("families/qwen3-groups128", "gguf-f16"),
        ("families/qwen3-groups128", "mlx-2bit"),
        ("golden/bitnet-packed-offline", "hf-packed"),
        ("golden/bitnet-packed-offline", "gguf-tq2_0"),
    ],
)
def test_written_in_parts(source, target, tmp_path):
    limit, folder = 90_000, tmp_path / "x"
    assert convert(DATA / source, folder, target, split_size=limit).exact
    suffix = "gguf" if target.startswith("gguf") else "safetensors"
    written = sorted(folder.glob(f"*.{suffix}"))
    count = len(written)
    assert count > 2
    assert [path.name for path in written] == [f"model-{i + 1:05}-of-{count:05}.{suffix}" for i in range(count)]
    expected = model(DATA / source).logits(TOKENS)
    np.testing.assert_array_equal(bitnet_ref.load(folder, backend="numpy").logits(TOKENS), expected)
    if suffix == "safetensors":
        text = (folder / "model.safetensors.index.json").read_text()
        index = json.loads(text)
        assert text == json.dumps(index, indent=2) + "\n"
        stored = {path.name: load_file(path) for path in written}
        assert index["weight_map"] == {name: file for file, tensors in stored.items() for name in tensors}
        sizes = [[w.nbytes for w in tensors.values()] for tensors in stored.values()]
        assert index["metadata"]["total_size"] == sum(map(sum, sizes))
        assert all(sum(each) <= limit or len(each) == 1 for each in sizes)
        return
    np.testing.assert_array_equal(bitnet_ref.load(written[-1], backend="numpy").logits(TOKENS), expected)
    readers = [gguf.GGUFReader(path) for path in written]  # llama.cpp's own, of a part alone
    values = [{key: field.contents() for key, field in reader.fields.items() if "split" in key} for reader in readers]
    total = sum(len(reader.tensors) for reader in readers)
    assert values == [{"split.no": i, "split.count": count, "split.tensors.count": total} for i in range(count)]
    assert all(path.stat().st_size <= limit or len(r.tensors) == 1 for path, r in zip(written, readers, strict=True))
    assert ["general.architecture" in reader.fields for reader in readers] == [True] + [False] * (count - 1)


@pytest.mark.parametrize("size", [None, 90_000])
def test_progress_over_all_parts(size, tmp_path):
    seen = []
    with open_checkpoint(DATA / "golden" / "bitnet-packed-offline") as checkpoint:
        path = tmp_path if size else tmp_path / "x.gguf"
        write_gguf_model(checkpoint, path, "f32", split_size=size, progress=lambda *done: seen.append(done))
    assert (len(list(tmp_path.iterdir())) > 2) == (size is not None)
    assert seen == [(number, len(seen)) for number in range(1, len(seen) + 1)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("size", [None, 1 << 20], ids=["one", "split"])
def test_the_tokenizer_of_a_folder_of_gguf_files(size, tmp_path):
    (tmp_path / "m").mkdir()
    convert("storyteller", tmp_path / "m" / ("s" if size else "s.gguf"), "gguf-tq2_0", split_size=size)
    folder = tmp_path / "m" / "s" if size else tmp_path / "m"
    expected = model("storyteller").tokenizer.encode("Once upon a time")
    assert bitnet_ref.load(folder, backend="numpy").tokenizer.encode("Once upon a time") == expected


@pytest.mark.parametrize(
    ("target", "size", "reason"),
    [("native", 1 << 20, "native is not split"), ("onnx", 1, "onnx is not split"), ("gguf-tq2_0", 0, "1 byte or more")],
)
def test_what_is_not_split(target, size, reason, tmp_path):
    with pytest.raises(ConfigError, match=reason):
        convert(DATA / "golden" / "bitnet-packed-offline", tmp_path / "x", target, split_size=size)


@pytest.fixture
def parts(tmp_path):
    shutil.copytree(SPLIT, tmp_path / "split")
    return sorted((tmp_path / "split").glob("*.gguf"))


def test_any_part_or_the_folder_opens_the_whole(parts):
    expected = model(SPLIT / parts[0].name).logits(TOKENS)
    for path in (*parts, parts[0].parent):
        np.testing.assert_array_equal(bitnet_ref.load(path, backend="numpy").logits(TOKENS), expected)
        assert bitnet_ref.load(path, backend="numpy", share=True).config.num_hidden_layers == 2
        assert inspect_model(path).errors == []


def test_parts_that_do_not_fit_together(parts):
    def fails(words, path=parts[0]):
        with pytest.raises(FormatError, match=words):
            bitnet_ref.load(path, backend="numpy")

    whole = [path.read_bytes() for path in parts]
    parts[1].unlink()
    fails("part 2 of 3 is missing: model-00002-of-00003.gguf")
    fails("part 2 of 3 is missing: model-00002-of-00003.gguf", parts[2])
    parts[1].write_bytes(whole[2])
    fails("expected part 2 of 3|is in an earlier part too")
    parts[1].write_bytes(whole[1])
    other = parts[0].with_name("other.gguf")
    other.write_bytes(whole[1])
    fails(r"is part 2 of 3 of a model; its name must be NAME-00002-of-00003\.gguf", other)
    changed(parts[2], SPLIT / parts[2].name, drop=["blk.1.ffn_up.weight"])
    fails("split.tensors.count: says 25; all parts have")
    changed(parts[2], SPLIT / parts[2].name, {"split.no": Typed("string", "2")})
    fails("split.no: expected a whole number")
    parts[2].unlink()
    elsewhere = parts[0].parent.parent / "elsewhere.gguf"
    elsewhere.write_bytes(whole[2])
    parts[2].symlink_to(elsewhere)
    fails("link")


def test_a_folder_of_several_models_says_which_there_are(parts):
    folder = parts[0].parent
    shutil.copy(CASES / "gguf-q1_0" / "model.gguf", folder / "Bonsai-Q1_0.gguf")
    with pytest.raises(FormatError, match=r"NAME:TYPE or NAME:FILE.*Bonsai-Q1_0\.gguf, model-00001-of-00003\.gguf$"):
        bitnet_ref.load(folder)
    expected = model(CASES / "gguf-q1_0" / "model.gguf").logits(TOKENS)
    for which in ("Q1_0", "q1_0", "Bonsai-Q1_0.gguf"):
        np.testing.assert_array_equal(bitnet_ref.load(f"{folder}:{which}", backend="numpy").logits(TOKENS), expected)
    with pytest.raises(FormatError, match="no model file 'Q4_K'"):
        bitnet_ref.load(f"{folder}:Q4_K")
