"""The families of 2026 in GGUF files: blocks of 64 and 128, rotated planes, architectures, norms inside linears."""

import json
import shutil
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from helpers import DATA, TINY, rng, write_checkpoint
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import bitnet_ref
from bitnet_ref.backends import Backend, choose_backend
from bitnet_ref.crossval import paths as crossval_paths
from bitnet_ref.errors import BitNetRefError, ConfigError, FormatError
from bitnet_ref.families import differences_from_llama
from bitnet_ref.families.groups import GroupTernaryWeight, group_linear
from bitnet_ref.families.hadamard import Rotation
from bitnet_ref.formats.checkpoint import LoadOptions
from bitnet_ref.formats.convert import convert
from bitnet_ref.formats.convert.proof import prove
from bitnet_ref.formats.gguf.blocks import BY_PACKAGE, blocks_from_groups, dequantize, quantize
from bitnet_ref.formats.gguf.export import TensorToWrite, write_gguf
from bitnet_ref.formats.gguf.file import GgufFile, Typed
from bitnet_ref.formats.hashes import weight_hash
from bitnet_ref.formats.names import gguf_name
from bitnet_ref.formats.open import open_checkpoint
from bitnet_ref.inspection import inspect_model
from bitnet_ref.reference import quantization

FAMILIES = DATA / "families"
CASE = FAMILIES / "qwen3-groups128"
ROTATED = CASE / "pq2_0-hadamard.gguf"
KEYS = "prism.hadamard."


@pytest.mark.sample(3)
@pytest.mark.quick_emulated
@pytest.mark.parametrize("name", ["q2_0", "q2_0-legacy128", "pq2_0-hadamard", "ptq1_0-hadamard"])
def test_golden_files(name, backend_name):
    expected = load_file(CASE / f"golden{'-hadamard' if 'hadamard' in name else ''}.safetensors")
    m = bitnet_ref.load(CASE / f"{name}.gguf", backend=backend_name)
    np.testing.assert_allclose(m.logits(expected["tokens"]), expected["logits"], rtol=0, atol=3e-4)
    assert m.config.num_hidden_layers == 2
    with open_checkpoint(CASE / f"{name}.gguf") as checkpoint:
        assert any("a scale for each block" in words for words in checkpoint.evidence)
        assert any("Hadamard" in words for words in checkpoint.evidence) == ("hadamard" in name)
    assert inspect_model(CASE / f"{name}.gguf").quantization.startswith("ternary with a scale for")


def test_the_blocks_of_type_42_are_told_by_the_spans():
    sizes = {}
    for name in ("q2_0", "q2_0-legacy128"):
        with GgufFile(CASE / f"{name}.gguf") as file:
            sizes[name] = {tensor.type.name for tensor in file.tensors.values()} - {"F32"}
    assert sizes == {"q2_0": {"Q2_0"}, "q2_0-legacy128": {"Q2_0 of 128"}}


def test_trits_of_ptq1_0():
    """Encoded here as the format says, one weight at a time."""
    w_t = rng(143).integers(-1, 2, 128)
    block, code = np.zeros(26, dtype=np.uint8), w_t + 1
    places = [(m, [16 * n + m for n in range(5)]) for m in range(16)]
    places += [(16 + m, [80 + 8 * n + m for n in range(5)]) for m in range(8)]
    places += [(24 + m, [120 + 2 * n + m for n in range(4)]) for m in range(2)]
    for at, weights in places:
        digits = [code[i] for i in weights] + [0] * (5 - len(weights))
        q = sum(int(digit) * 3 ** (4 - n) for n, digit in enumerate(digits))
        block[at] = -(-q * 256 // 243)
    raw = np.concatenate([block, np.array([0.5], dtype=np.float16).view(np.uint8)])
    np.testing.assert_array_equal(dequantize(raw, "PTQ1_0", (1, 128))[0], 0.5 * w_t)


@pytest.mark.parametrize("kind", ["Q5_1", "Q3_K", "IQ4_XS", "MXFP4", "NVFP4"])
def test_dense_types_of_the_gguf_package(kind):
    gguf = pytest.importorskip("gguf")
    qtype = gguf.GGMLQuantizationType[kind]
    values, size = gguf.GGML_QUANT_SIZES[qtype]
    raw = rng(5).integers(0, 60, (6, 2 * size), dtype=np.uint8)
    expected = gguf.quants.dequantize(raw, qtype)
    np.testing.assert_array_equal(dequantize(raw.reshape(-1), kind, (6, 2 * values)), expected)
    assert kind in BY_PACKAGE


# -- Hadamard ----------------------------------------------------------------------------------------------------------


def sylvester(n):
    return np.ones((1, 1)) if n == 1 else np.kron([[1, 1], [1, -1]], sylvester(n // 2))


@pytest.mark.parametrize(("width", "block"), [(8, 8), (64, 16), (96, 32), (4, 1)])
def test_the_fast_transform(width, block):
    generator = rng(width, block)
    x, signs = generator.standard_normal((3, width)), np.sign(generator.standard_normal(width)).astype(np.float32)
    r = np.kron(np.eye(width // block), sylvester(block) / np.sqrt(block)) * signs
    rotation = Rotation(signs, block)
    np.testing.assert_allclose(rotation.turn(x), x @ r.T, atol=1e-12)
    np.testing.assert_allclose(rotation.turn_back(rotation.turn(x)), x, atol=1e-12)
    w_t = generator.integers(-1, 2, (5, width)).astype(np.int8)
    scales = np.ones((5, 1), dtype=np.float16)
    weight = GroupTernaryWeight(quantization.pack_ternary(w_t), width, scales, width, None, rotation)
    np.testing.assert_allclose(weight.dense().array, w_t @ r, atol=1e-6)


def test_a_folded_llama_becomes_onnx(tmp_path):
    """Its embedding too is taken out of the basis."""
    with GgufFile(ROTATED) as file:
        tensors = [
            TensorToWrite(t.name, t.shape, t.type.name, lambda n=t.name: file.read_raw(n), t.nbytes)
            for t in file.tensors.values()
            if not t.name.endswith(("q_norm.weight", "k_norm.weight"))
        ]
        typed = {key.replace("qwen3.", "llama."): value for key, value in file.typed.items()}
        write_gguf(tmp_path / "x.gguf", typed | {"general.architecture": Typed("string", "llama")}, tensors)
    folded = LoadOptions(rotation="folded")
    assert convert(tmp_path / "x.gguf", tmp_path / "onnx", "onnx", options=folded).exact


def changed(path, source=ROTATED, drop=(), **keys):
    """The file with other metadata under the prefix."""
    with GgufFile(source) as file:
        tensors = [
            TensorToWrite(t.name, t.shape, t.type.name, lambda n=t.name: file.read_raw(n), t.nbytes)
            for t in file.tensors.values()
        ]
        typed = {key: value for key, value in file.typed.items() if key.removeprefix(KEYS) not in drop}
        write_gguf(path, typed | {KEYS + key: value for key, value in keys.items()}, tensors)
    return path


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("version", Typed("uint32", 2)),
        ("transform", Typed("string", "walsh")),
        ("axis", Typed("string", "output")),
        ("block_size", Typed("uint32", 96)),
        ("block_size", Typed("uint32", 1024)),
        ("sign_mode", Typed("string", "random")),
        ("sign_values", Typed("[float32]", [1.0] * 767)),
        ("sign_values", Typed("[float32]", [0.5] * 768)),
        ("sign_widths", Typed("[uint32]", [256, 256])),
        ("weight_names", Typed("[string]", ["blk.0.attn_q.weight"])),
        ("inverse_weight_names", Typed("[string]", ["output_norm.weight"])),
        ("order", Typed("string", "x")),
    ],
)
def test_what_is_not_understood_is_refused(key, value, tmp_path):
    path = changed(tmp_path / "x.gguf", **{key: value})
    with pytest.raises(ConfigError) as caught:
        bitnet_ref.load(path, backend="numpy")
    assert caught.value.field.startswith(KEYS)


def test_identity_signs_and_no_keys(tmp_path):
    same = changed(tmp_path / "identity.gguf", sign_mode=Typed("string", "identity"))
    tokens = [1, 2, 3]
    right = bitnet_ref.load(ROTATED, backend="numpy").logits(tokens)
    other = bitnet_ref.load(same, backend="numpy")
    assert not np.allclose(other.logits(tokens), right, atol=0.1)
    assert set(other.weights.layers[0].q_proj.rotation.signs) == {1.0}
    keys = ("version", "block_size", "transform", "axis", "sign_mode", "sign_widths", "sign_values", "weight_names")
    plain = changed(tmp_path / "plain.gguf", drop=(*keys, "inverse_weight_names"))
    with pytest.warns(UserWarning, match="taken as not rotated"):
        bitnet_ref.load(plain, backend="numpy")


@pytest.mark.thorough
def test_a_rotated_model_in_other_files(tmp_path, backend_name):
    """As stored: native, PQ2_0 and PTQ1_0 files. Folded into dense matrices: any. Elsewhere refused."""
    tokens = [1, 2, 3, 300, 7]
    expected = bitnet_ref.load(ROTATED, backend="numpy").logits(tokens)
    paths = {"native": tmp_path / "x.bitnet.safetensors", "gguf-ptq1_0": tmp_path / "x.gguf"}
    for target, path in paths.items():
        assert convert(ROTATED, path, target).exact
        again = bitnet_ref.load(path, backend="numpy")
        np.testing.assert_array_equal(again.logits(tokens), expected)
        assert again.weights.layers[1].down_proj.rotation.block == 128
        folded = bitnet_ref.load(path, backend=backend_name, rotation="folded")
        assert {type(w).__name__ for w in folded.weights.layers[0].linears()} & {"GroupTernaryWeight"} == set()
        np.testing.assert_allclose(folded.logits(tokens), expected, rtol=0, atol=1e-4)
    for target in ("hf-bf16", "hf-unpacked", "gguf-f16", "gguf-q2_0", "onnx"):
        with pytest.raises(ConfigError, match='rotation="folded"'):
            convert(paths["native"], tmp_path / f"y{'.gguf' * ('gguf' in target)}", target)
    folded = LoadOptions(rotation="folded")
    assert convert(ROTATED, tmp_path / "folded.bitnet.safetensors", "native", options=folded).exact
    assert convert(ROTATED, tmp_path / "hf", "hf-unpacked", options=folded).exact
    plain = bitnet_ref.load(tmp_path / "hf", backend="numpy").logits(tokens)
    np.testing.assert_allclose(plain, expected, rtol=0, atol=1e-4)
    with pytest.raises(ConfigError, match="stored or folded"):
        bitnet_ref.load(ROTATED, rotation="undone")


def test_the_folded_rotation_is_a_path_of_crossval(backend_name):
    reference = bitnet_ref.load(ROTATED, backend="numpy")
    checks = dict(crossval_paths._checks(partial(choose_backend, backend_name), reference, [5, 6, 7], True))
    compared, problem, words = checks["folded rotation"]()
    assert (compared, problem) == (3 * reference.config.vocab_size, None), words


def test_another_basis_is_another_model(tmp_path):
    path = tmp_path / "x.bitnet.safetensors"
    convert(ROTATED, path, "native")
    arrays = load_file(path)
    with safe_open(path, framework="np") as file:
        metadata = file.metadata()
    others = {"signs": -arrays["embedding.signs"], "order": np.arange(256, dtype=np.int64)}
    for part, array in others.items():
        save_file(arrays | {f"embedding.{part}": array}, path, metadata)
        with open_checkpoint(ROTATED) as source, open_checkpoint(path) as written:
            proof = prove(source, written, compute=False)
        assert proof.problems == [f"embedding ({part}) differs"]
        hashes = {weight_hash(bitnet_ref.load(each, backend="numpy").weights) for each in (ROTATED, path)}
        assert len(hashes) == 2


@pytest.mark.parametrize("tensor", ["signs", "order"])
def test_a_bad_basis_in_a_native_file(tensor, tmp_path):
    path = tmp_path / "x.bitnet.safetensors"
    convert(ROTATED, path, "native")
    arrays = load_file(path)
    with safe_open(path, framework="np") as file:
        metadata = file.metadata()
    bad = {"signs": arrays["embedding.signs"] * 2, "order": np.zeros(256, dtype=np.int64)}
    save_file(arrays | {f"embedding.{tensor}": bad[tensor]}, path, metadata)
    with pytest.raises(FormatError, match=f"embedding.{tensor}"):
        bitnet_ref.load(path, backend="numpy")


def test_the_factors_of_longrope(tmp_path):
    """As llama.cpp's converter writes them for MiniCPM: two tensors, and no key but the type."""
    factors = {"long_factor": [1.0, 4.0], "short_factor": [1.0, 1.25]}
    scaling = {"rope_type": "longrope", **factors, "original_max_position_embeddings": 8, "factor": 8.0}
    config = {**TINY, "model_type": "minicpm", "tie_word_embeddings": True, "rope_scaling": scaling}
    config |= {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 4, "max_position_embeddings": 64}
    folder, tokens = write_checkpoint(tmp_path / "m", config), rng(8).integers(0, 40, 20)
    m = bitnet_ref.load(folder, backend="numpy")
    assert m.config.rope.attention_factor == pytest.approx(2**0.5)
    path = tmp_path / "x.gguf"
    assert convert(folder, path, "gguf-f32").holds
    again = bitnet_ref.load(path, backend="numpy")
    np.testing.assert_allclose(again.logits(tokens), m.logits(tokens), rtol=0, atol=1e-5)
    bare = tmp_path / "bare.gguf"
    with GgufFile(path) as file:
        tensors = [
            TensorToWrite(t.name, t.shape, t.type.name, lambda n=t.name: file.read_raw(n), t.nbytes)
            for t in file.tensors.values()
        ]
        keys = {key: value for key, value in file.typed.items() if "rope.scaling" not in key or key.endswith("type")}
        write_gguf(bare, keys, tensors)
        short = [tensor for tensor in tensors if "factors_long" not in tensor.name]
        write_gguf(tmp_path / "short.gguf", file.typed, short)
    rope = bitnet_ref.load(bare, backend="numpy").config.rope
    assert (rope.original_max_position_embeddings, rope.attention_factor, rope.long_factors) == (64, 1.0, (1.0, 4.0))
    for file_path, count in ((path, 0), (bare, 1)):
        with open_checkpoint(file_path) as checkpoint:
            assert sum("the whole context" in words for words in checkpoint.evidence) == count
    with pytest.raises(FormatError, match="missing") as caught:
        bitnet_ref.load(tmp_path / "short.gguf", backend="numpy")
    assert caught.value.field == "rope_factors_long.weight"


@pytest.mark.parametrize("own", [{}, {"attention_factor": 1.5}])
def test_longrope_with_a_factor_of_its_own(own, tmp_path):
    """Beside factors llama.cpp would take rope.scaling.factor too, so it is not written: attn_factor has its effect."""
    scaling = {"rope_type": "longrope", "long_factor": [1.0, 4.0], "short_factor": [1.0, 1.25], "factor": 2.0, **own}
    config = {**TINY, "rope_scaling": {**scaling, "original_max_position_embeddings": 8}}
    folder, path, tokens = write_checkpoint(tmp_path / "m", config), tmp_path / "x.gguf", rng(8).integers(0, 40, 20)
    assert convert(folder, path, "gguf-f32").holds
    with GgufFile(path) as file:
        assert "llama.rope.scaling.factor" not in file.metadata
    m, again = (bitnet_ref.load(each, backend="numpy") for each in (folder, path))
    assert m.config.rope.factor == 2.0
    assert again.config.rope.attention_factor == pytest.approx(own.get("attention_factor", (4 / 3) ** 0.5))
    np.testing.assert_allclose(again.logits(tokens), m.logits(tokens), rtol=0, atol=1e-5)


# -- Qwen3.5 -----------------------------------------------------------------------------------------------------------

HYBRID = FAMILIES / "qwen3_5-groups128-hybrid"


def test_qwen35_as_llama_cpps_converter_writes_it(tmp_path):
    """The transformations of conversion/qwen.py (Qwen3NextModel, _LinearAttentionVReorderBase), by loops."""
    convert(HYBRID, tmp_path / "x.gguf", "gguf-f32")
    raw, hf = json.loads((HYBRID / "config.json").read_text()), load_file(HYBRID / "model.safetensors")
    key_heads, value_heads = raw["linear_num_key_heads"], raw["linear_num_value_heads"]
    tiled = [g * (value_heads // key_heads) + j for j in range(value_heads // key_heads) for g in range(key_heads)]
    size = raw["linear_value_head_dim"]
    channels = np.concatenate([np.arange(size) + head * size for head in tiled])
    start = 2 * key_heads * raw["linear_key_head_dim"]
    qkv = np.concatenate([np.arange(start), start + channels])
    net = "model.layers.1.linear_attn."
    expected = {
        "blk.1.attn_qkv.weight": hf[net + "in_proj_qkv.weight"][qkv],
        "blk.1.attn_gate.weight": hf[net + "in_proj_z.weight"][channels],
        "blk.1.ssm_alpha.weight": hf[net + "in_proj_a.weight"][tiled],
        "blk.1.ssm_beta.weight": hf[net + "in_proj_b.weight"][tiled],
        "blk.1.ssm_out.weight": hf[net + "out_proj.weight"][:, channels],
        "blk.1.ssm_a": -np.exp(hf[net + "A_log"].astype(np.float32))[tiled],
        "blk.1.ssm_dt.bias": hf[net + "dt_bias"][tiled],
        "blk.1.ssm_conv1d.weight": hf[net + "conv1d.weight"][qkv, 0],
        "blk.1.ssm_norm.weight": hf[net + "norm.weight"],
        "blk.1.post_attention_norm.weight": hf["model.layers.1.post_attention_layernorm.weight"] + np.float32(1),
        "blk.3.attn_q.weight": hf["model.layers.3.self_attn.q_proj.weight"],
        "blk.3.attn_k_norm.weight": hf["model.layers.3.self_attn.k_norm.weight"] + np.float32(1),
    }
    with GgufFile(tmp_path / "x.gguf") as file:
        for name, array in expected.items():
            np.testing.assert_array_equal(file.read(name), array.astype(np.float32), err_msg=name)
        metadata = file.metadata
    numbers = [metadata[f"qwen35.ssm.{key}"] for key in ("group_count", "time_step_rank", "state_size", "inner_size")]
    assert numbers == [key_heads, value_heads, raw["linear_key_head_dim"], value_heads * size]
    assert metadata["qwen35.attention.recurrent_layers"].tolist() == [1, 1, 1, 0]


def rotated_hybrid(path, **more):
    """A GGUF whose ternary planes are random and said to be in a Hadamard basis.   more: keys -> values"""
    source = path.with_name(f"source-{path.name}")
    convert(HYBRID, source, "gguf-pq2_0", verify=False)
    with GgufFile(source) as file:
        planes = [t.name for t in file.tensors.values() if t.type.name == "PQ2_0"]
        wide = [t for t in file.tensors.values() if t.name.endswith("ssm_out.weight")]
        if wide[0].name not in planes:  # its blocks would mix scales: one scale for each row
            planes += [tensor.name for tensor in wide]
        tensors = []
        for tensor in file.tensors.values():
            raw, kind = file.read_raw(tensor.name), tensor.type.name
            if tensor in wide:
                kind = "PQ2_0"
                packed = quantization.pack_ternary(np.sign(rng(5).standard_normal(tensor.shape)).astype(np.int8))
                scales = np.full((tensor.shape[0], tensor.shape[1] // 128), 0.01, np.float16)
                raw = blocks_from_groups(packed, scales, kind)
            tensors.append(TensorToWrite(tensor.name, tensor.shape, kind, lambda raw=raw: raw, raw.size))
        signs = np.sign(rng(6).standard_normal(256 + 384)).astype(np.float32)
        keys = {
            "version": Typed("uint32", 1),
            "block_size": Typed("uint32", 64),
            "transform": Typed("string", "normalized-sylvester-walsh-hadamard"),
            "axis": Typed("string", "input-last-dimension"),
            "sign_mode": Typed("string", "explicit"),
            "sign_widths": Typed("[int32]", np.array([256, 384], dtype=np.int32)),
            "sign_values": Typed("[float32]", signs),
            "weight_names": Typed("[string]", [name for name in planes if name != "token_embd.weight"]),
            "inverse_weight_names": Typed("[string]", ["token_embd.weight"]),
        }
        write_gguf(path, file.typed | {KEYS + key: value for key, value in (keys | more).items()}, tensors)
    return path


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*taken as not rotated")
def test_a_rotated_hybrid_keeps_its_order_of_inputs(tmp_path):
    """ssm_out reads R x of the inputs in the file's order of heads."""
    path, tokens = rotated_hybrid(tmp_path / "x.gguf"), [1, 2, 3, 4, 5, 6]
    m, folded = (bitnet_ref.load(path, backend="numpy", rotation=way) for way in ("stored", "folded"))
    rotation = m.weights.layers[0].o_proj.rotation
    assert sorted(rotation.order) == list(range(256)) != rotation.order.tolist()
    np.testing.assert_allclose(folded.logits(tokens), m.logits(tokens), rtol=0, atol=1e-4)
    for target, again in (("gguf-pq2_0", tmp_path / "y.gguf"), ("native", tmp_path / "y.bitnet.safetensors")):
        convert(path, again, target, verify=False)
        np.testing.assert_array_equal(bitnet_ref.load(again, backend="numpy").logits(tokens), m.logits(tokens))


def test_a_packed_hybrid_in_the_order_of_inputs_of_gguf_files(tmp_path):
    """The inputs of ssm_out are in another order there, in which its codes cannot stay packed."""
    native, path, tokens = tmp_path / "x.bitnet.safetensors", tmp_path / "x.gguf", [1, 2, 3, 4, 5, 6]
    for source, target, kind in ((HYBRID, native, "native"), (native, path, "gguf-q2_0")):
        convert(source, target, kind, verify=False)
    first, again = (bitnet_ref.load(each, backend="numpy").logits(tokens) for each in (HYBRID, path))
    np.testing.assert_array_equal(again, first)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*taken as not rotated")
def test_value_heads_in_the_order_of_hugging_face(tmp_path):
    """prism.hadamard.gdn_v_grouped: the inputs of ssm_out alone are not in the file's order of heads."""
    path, tokens = rotated_hybrid(tmp_path / "x.gguf", gdn_v_grouped=Typed("bool", True)), [1, 2, 3, 4, 5, 6]
    m, folded = (bitnet_ref.load(path, backend="numpy", rotation=way) for way in ("stored", "folded"))
    np.testing.assert_allclose(folded.logits(tokens), m.logits(tokens), rtol=0, atol=1e-4)
    tiled = bitnet_ref.load(rotated_hybrid(tmp_path / "tiled.gguf"), backend="numpy", rotation="folded")
    stored, ours = m.weights.layers[0].o_proj, folded.weights.layers[0].o_proj.array
    signs = np.sign(rng(6).standard_normal(256 + 384))[:256]
    r = np.kron(np.eye(256 // 64), sylvester(64) / np.sqrt(64)) * signs
    np.testing.assert_allclose(ours, stored.array.astype(np.float64) @ r, rtol=0, atol=1e-6)
    heads = [2 * key + value for value in range(2) for key in range(4)]  # as the tiled file has them
    columns = np.concatenate([np.arange(32) + 32 * head for head in heads])
    np.testing.assert_array_equal(tiled.weights.layers[0].o_proj.array[:, columns], ours)
    for short in ("q_proj", "v_proj", "z_proj", "a_proj"):
        in_tiled, in_grouped = (getattr(each.weights.layers[0], short) for each in (tiled, folded))
        np.testing.assert_array_equal(in_tiled.array, in_grouped.array, err_msg=short)
    native = tmp_path / "y.bitnet.safetensors"
    for source, again in ((path, tmp_path / "y.gguf"), (path, native), (native, tmp_path / "z.gguf")):
        convert(source, again, "native" if again == native else "gguf-ptq1_0", verify=False)
        np.testing.assert_array_equal(bitnet_ref.load(again, backend="numpy").logits(tokens), m.logits(tokens))


def test_grouped_value_heads_of_a_matrix_that_is_not_rotated(tmp_path):
    path = changed(tmp_path / "x.gguf", gdn_v_grouped=Typed("uint32", 1))
    with pytest.raises(ConfigError, match="true or false") as caught:
        bitnet_ref.load(path, backend="numpy")
    assert caught.value.field == KEYS + "gdn_v_grouped"


# -- architectures -----------------------------------------------------------------------------------------------------


def as_gguf(path, case, arch, **keys):
    """A golden case of Hugging Face as llama.cpp's converter would write it."""
    raw = json.loads((FAMILIES / case / "config.json").read_text())
    tensors = load_file(FAMILIES / case / "model.safetensors")
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    head_dim = raw.get("head_dim", hidden // heads)
    numbers = {
        "context_length": raw["max_position_embeddings"],
        "embedding_length": hidden,
        "block_count": raw["num_hidden_layers"],
        "feed_forward_length": raw["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": raw["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        **keys,
    }
    typed = {"general.architecture": Typed("string", arch)}
    typed |= {f"{arch}.{k}": Typed("uint32" if isinstance(v, int) else "float32", v) for k, v in numbers.items()}
    typed[f"{arch}.attention.layer_norm_rms_epsilon"] = Typed("float32", 1e-6)
    gemma, out = arch == "gemma3", {}
    with open_checkpoint(FAMILIES / case) as checkpoint:
        for name, array in tensors.items():
            name = name.removeprefix("model.").removesuffix(".weight").removesuffix(".bias")
            suffix = "bias" if array.ndim == 1 and name.endswith("_proj") else "weight"
            outside = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
            if name in outside:
                theirs = outside[name]
            else:
                _, index, *_, part = name.split(".")
                inner = part in ("norm", "rms_norm") and name.split(".")[-2].endswith("_proj")
                part = name.split(".")[-2] if inner else part
                post = {"post_attention_layernorm": "attn_post_norm", "pre_feedforward_layernorm": "ffn_norm"}
                plain = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
                renamed = plain | (post if gemma else {}) | {"post_feedforward_layernorm": "ffn_post_norm"}
                theirs = gguf_name(f"blocks.{index}.{renamed.get(part, part)}") + "_norm_in" * inner
            is_norm = array.ndim == 1 and suffix == "weight"
            values = array.astype(np.float32) + (1 if gemma and is_norm and not theirs.endswith("norm_in") else 0)
            kind, dtype = ("F32", np.float32) if array.ndim == 1 else ("BF16", ml_dtypes.bfloat16)
            stored = np.ascontiguousarray(values.astype(dtype))
            out[f"{theirs}.{suffix}"] = (kind, stored)
        assert checkpoint.config.num_hidden_layers == raw["num_hidden_layers"]
    written = [
        TensorToWrite(name, a.shape, kind, lambda a=a: a.reshape(-1).view(np.uint8), a.nbytes)
        for name, (kind, a) in out.items()
    ]
    write_gguf(path, typed, written)
    return path


@pytest.mark.parametrize(
    ("case", "arch", "keys"),
    [
        ("qwen2-bias-linear-norms", "qwen2", {"rope.freq_base": 1e6}),
        ("embedding-qwen3", "qwen3", {"rope.freq_base": 1e6}),
        (
            "embedding-gemma3",
            "gemma3",
            {
                "rope.freq_base": 1e6,
                "rope.freq_base_swa": 1e4,
                "attention.sliding_window": 4,
                "attention.sliding_window_pattern": 3,
            },
        ),
    ],
)
def test_the_same_model_from_both_formats(case, arch, keys, tmp_path):
    path = as_gguf(tmp_path / "x.gguf", case, arch, **keys)
    tokens = load_file(FAMILIES / case / "golden.safetensors")["tokens"]
    a, b = (bitnet_ref.load(each, backend="numpy") for each in (FAMILIES / case, path))
    np.testing.assert_array_equal(a.logits(tokens), b.logits(tokens))
    np.testing.assert_array_equal(a.embed(tokens), b.embed(tokens))
    assert differences_from_llama(a.config) == differences_from_llama(b.config)


def test_a_cut_file_is_an_error(tmp_path):
    path = tmp_path / "x.gguf"
    shutil.copy(CASE / "q2_0.gguf", path)
    size = path.stat().st_size
    for keep in (size - 64, size // 2, 700):
        with open(path, "r+b") as file:
            file.truncate(keep)
        with pytest.raises(BitNetRefError) as caught:
            bitnet_ref.load(path, backend="numpy")
        assert isinstance(caught.value, FormatError | ConfigError)


class _AsLlamaCpp(Backend):
    """llama.cpp's own rule for Q2_0: the input of a product is rounded to Q8_0, an int8 for each of 32 and a scale."""

    def compute(self, name, function, x, *args):
        if function is group_linear:
            x = dequantize(quantize(np.ascontiguousarray(x), "Q8_0"), "Q8_0", x.shape).astype(x.dtype)
        return super().compute(name, function, x, *args)


@pytest.mark.parametrize("case", ["qwen3-groups128", "qwen3_5-groups128-hybrid"])
@pytest.mark.parametrize("kind", ["q2_0", "f32"])
def test_llama_cpp_computes_the_same(case, kind, tmp_path):
    path, tokens = tmp_path / "x.gguf", [5, 17, 33, 250, 9, 11, 299, 1]
    convert(FAMILIES / case, path, f"gguf-{kind}", verify=False)
    theirs = logits_of_llama_cpp(path, tokens)
    mine = bitnet_ref.load(path, backend="numpy")
    mine = mine.on(_AsLlamaCpp("float32", 1)) if kind == "q2_0" else mine
    np.testing.assert_allclose(theirs, mine.logits(tokens), rtol=0, atol=1e-4)


def logits_of_llama_cpp(path, tokens):
    """-> (N, V); the test is skipped without llama.cpp."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="pip install llama-cpp-python")
    try:
        m = llama_cpp.Llama(str(path), logits_all=True, n_ctx=64, verbose=False, type_k=0, type_v=0, flash_attn=False)
    except ValueError:
        pytest.skip("this llama.cpp is older than the file's types or architecture")
    m.eval(tokens)
    return m.scores[: len(tokens)]


LONGROPE = {
    "rope_type": "longrope",
    "long_factor": [1.0, 4.0],
    "short_factor": [1.0, 1.25],
    "original_max_position_embeddings": 256,  # llama.cpp takes the short factors if its context, 256, is no longer
    "factor": 4.0,
}


@pytest.mark.parametrize(
    ("model_type", "scaling", "drop"),
    [
        ("llama", LONGROPE, ""),
        ("minicpm", LONGROPE, ""),
        ("llama", {"rope_type": "linear", "factor": 4.0}, "llama.rope.scaling.type"),
        ("llama", {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.8}, ""),
    ],
)
def test_llama_cpp_stretches_rope_the_same(model_type, scaling, drop, tmp_path):
    config = {**TINY, "model_type": model_type, "rope_scaling": scaling, "max_position_embeddings": 1024}
    config |= {"tie_word_embeddings": model_type == "minicpm"}
    folder, path, tokens = write_checkpoint(tmp_path / "m", config), tmp_path / "x.gguf", rng(8).integers(0, 40, 20)
    convert(folder, path, "gguf-f32")
    path = changed(tmp_path / "y.gguf", path, drop=(drop,))
    expected = bitnet_ref.load(folder, backend="numpy").logits(tokens)
    np.testing.assert_allclose(bitnet_ref.load(path).logits(tokens), expected, rtol=0, atol=1e-4)
    np.testing.assert_allclose(logits_of_llama_cpp(path, tokens.tolist()), expected, rtol=0, atol=1e-4)
