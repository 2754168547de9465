"""formats.hf_folder: a folder's tensors become the weights they are, or one error says which is wrong and where."""

import hashlib
import json
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from helpers import (
    BITNET,
    DATA,
    GOLDEN,
    TINY,
    golden,
    model,
    rng,
    tiny_tensors,
    write_checkpoint,
    write_index,
    write_shards,
)

import bitnet_ref
from bitnet_ref.errors import ConfigError, ConfigWarning, FormatError
from bitnet_ref.formats import hashes
from bitnet_ref.formats.checkpoint import LoadOptions, check_room, parts, read_weights, scale_convention
from bitnet_ref.formats.convert import convert
from bitnet_ref.formats.hf.config import parse_hf_config, read_hf_config
from bitnet_ref.formats.hf.folder import INDEX_FILE, SINGLE_FILE, HfCheckpoint, read_folder_config
from bitnet_ref.formats.hf.wrappers import hf_form
from bitnet_ref.formats.open import describe_ignored, open_checkpoint
from bitnet_ref.formats.safetensors import SafetensorsFile
from bitnet_ref.inspection import inspect_model
from bitnet_ref.reference.config import QuantizationConfig
from bitnet_ref.reference.quantization import quantize_weights
from bitnet_ref.reference.weights import DenseWeight, TernaryWeight

Q0 = "model.layers.0.self_attn.q_proj"


def load(folder):
    return bitnet_ref.load(folder, backend="numpy")


def check_error(folder, message, field=None, path=None):
    with pytest.raises(FormatError, match=message) as caught:
        load(folder)
    if field is not None:
        assert caught.value.field == field
    assert caught.value.path == str(path if path is not None else folder / SINGLE_FILE)
    return caught.value


def with_config(tensors_changed, config=BITNET):
    return {**tiny_tensors(config), **tensors_changed}


# -- what the tensors become -------------------------------------------------------------------------------------------


def test_ternary_layers_are_packed_and_the_rest_keeps_its_dtype(tmp_path):
    weights = load(write_checkpoint(tmp_path, BITNET)).weights
    tensors = tiny_tensors(BITNET)
    q = weights.layers[0].q_proj
    assert isinstance(q, TernaryWeight)
    assert (q.shape, q.packed.shape) == ((16, 16), (16, 4))
    assert q.w_dequant_scale == tensors[f"{Q0}.weight_scale"].astype(np.float32)[0]
    assert weights.embedding.array.dtype == ml_dtypes.bfloat16
    assert weights.lm_head is weights.embedding
    assert weights.layers[1].ffn_sub_norm.weight.dtype == np.float32
    np.testing.assert_array_equal(weights.final_norm.weight, tensors["model.norm.weight"].astype(np.float32))
    assert weights.nbytes < sum(a.nbytes for a in tensors.values()) * 1.2


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_dense_layers_keep_the_dtype_of_the_file(tmp_path, dtype):
    m = load(write_checkpoint(tmp_path, TINY, tiny_tensors(TINY, dtype)))
    assert isinstance(m.weights.layers[0].down_proj, DenseWeight)
    assert {w.array.dtype for _, w in m.weights.linears()} == {np.dtype(dtype)}
    assert m.weights.lm_head is not m.weights.embedding


def test_divide_and_multiply_are_inverse(tmp_path):
    """The same stored number means s to autobitlinear and 1/s to bitlinear."""
    weights = {}
    for name in ("autobitlinear", "bitlinear"):
        config = {**BITNET, "quantization_config": {"quant_method": "bitnet", "linear_class": name}}
        weights[name] = load(write_checkpoint(tmp_path / name, config, tiny_tensors(BITNET))).weights.layers[0].q_proj
    multiply, divide = weights["autobitlinear"].w_dequant_scale, weights["bitlinear"].w_dequant_scale
    assert divide == np.float32(1) / multiply
    np.testing.assert_array_equal(weights["autobitlinear"].packed, weights["bitlinear"].packed)


ONLINE = {**BITNET["quantization_config"], "quantization_mode": "online"}


def online_tensors(w, dtype=np.float32):
    tensors = tiny_tensors({**TINY, "tie_word_embeddings": True}, dtype)
    for i in range(2):
        tensors[f"model.layers.{i}.self_attn.attn_sub_norm.weight"] = np.ones(16, dtype)
        tensors[f"model.layers.{i}.mlp.ffn_sub_norm.weight"] = np.ones(24, dtype)
    return {**tensors, f"{Q0}.weight": w.astype(dtype)}


def test_masters_are_quantised_by_absmean(tmp_path):
    w = rng(1).standard_normal((16, 16)).astype(np.float32)
    folder = write_checkpoint(tmp_path, {**BITNET, "quantization_config": ONLINE}, online_tensors(w))
    q = load(folder).weights.layers[0].q_proj
    w_t, scale = quantize_weights(w)
    np.testing.assert_array_equal(q.ternary(), w_t)
    assert q.w_dequant_scale == scale


def test_masters_that_are_ternary_already_keep_their_scale(tmp_path):
    w_t = rng(2).integers(-1, 2, (16, 16))
    folder = write_checkpoint(tmp_path, {**BITNET, "quantization_config": ONLINE}, online_tensors(w_t * 0.375))
    q = load(folder).weights.layers[0].q_proj
    np.testing.assert_array_equal(q.ternary(), w_t)
    assert q.w_dequant_scale == 0.375


def test_a_scalar_scale(tmp_path):
    tensors = with_config({f"{Q0}.weight_scale": np.array(0.5, dtype=np.float32)})
    assert load(write_checkpoint(tmp_path, BITNET, tensors)).weights.layers[0].q_proj.w_dequant_scale == 0.5


def test_modules_to_not_convert_like_transformers():
    weights = model(GOLDEN / "llama-packed-skips").weights
    kinds = {name: type(w) for name, w in weights.linears()}
    dense = {name for name, kind in kinds.items() if kind is DenseWeight}
    mlp = {f"blocks.0.mlp.{name}_proj" for name in ("gate", "up", "down")}
    assert dense == mlp | {"blocks.0.attn.o_proj", "blocks.1.attn.o_proj"}
    assert kinds["lm_head"] is TernaryWeight


def test_rotary_constants_of_old_checkpoints_are_ignored(tmp_path):
    tensors = with_config({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}, TINY)
    load(write_checkpoint(tmp_path, TINY, tensors))


@pytest.mark.parametrize(
    "name",
    [
        *(f"golden/{case}" for case in ("llama-dense", "bitnet-packed-offline")),
        *(f"families/{case}" for case in ("maple", "qwen3_moe-groups128", "qwen3_5-groups128-hybrid")),
    ],
)
def test_progress_counts_to_the_end(name):
    """Of a head of its own and of a tied one, and of layers with other parts."""
    seen = []
    bitnet_ref.load(DATA / name, backend="numpy", progress=lambda done, total: seen.append((done, total)))
    n = seen[-1][1]
    assert seen == [(i + 1, n) for i in range(n)]


def test_a_model_saved_without_its_head(tmp_path):
    """Of AutoModel, whose names have no "model.": vectors need no head."""
    tensors = tiny_tensors(TINY)
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    with pytest.warns(ConfigWarning, match="there is no lm_head.weight"):
        m = load(write_checkpoint(tmp_path / "bare", TINY, bare))
    np.testing.assert_array_equal(
        m.embed([1, 2]), load(write_checkpoint(tmp_path / "whole", TINY, tensors)).embed([1, 2])
    )
    assert m.config.tie_word_embeddings


# -- tensors that are wrong --------------------------------------------------------------------------------------------

EVERY = [*tiny_tensors(BITNET)]


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", EVERY)
def test_a_missing_tensor(tmp_path, name):
    tensors = tiny_tensors(BITNET)
    del tensors[name]
    check_error(write_checkpoint(tmp_path, BITNET, tensors), "missing", field=name)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", EVERY)
def test_a_tensor_of_another_shape(tmp_path, name):
    tensors = tiny_tensors(BITNET)
    tensors[name] = np.concatenate([tensors[name], tensors[name][:1]])
    error = check_error(write_checkpoint(tmp_path, BITNET, tensors), "expected .* of shape .*, got", field=name)
    assert str(list(tensors[name].shape)) in str(error)
    assert error.offset > 0


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("model.norm.weight", np.ones(16, np.float64)),
        ("model.norm.weight", np.ones(16, np.int32)),
        ("model.norm.weight", np.ones((16, 1), np.float32)),
        ("model.norm.weight", np.ones((), np.float32)),
        ("model.embed_tokens.weight", np.ones((40, 16), np.uint8)),
        (f"{Q0}.weight", np.ones((4, 16), np.int8)),
        (f"{Q0}.weight", np.ones((16, 4), np.uint8)),
        (f"{Q0}.weight_scale", np.ones(2, np.float32)),
        (f"{Q0}.weight_scale", np.ones(16, np.float32)),
        (f"{Q0}.weight_scale", np.ones(1, np.int64)),
    ],
)
def test_a_tensor_of_another_kind(tmp_path, name, array):
    check_error(write_checkpoint(tmp_path, BITNET, with_config({name: array})), "expected", field=name)


def test_a_tensor_that_no_part_of_the_model_uses(tmp_path):
    """It means that config.json describes another model: here, one with fewer layers, or without biases."""
    check_error(
        write_checkpoint(tmp_path / "a", {**BITNET, "num_hidden_layers": 1}, tiny_tensors(BITNET)), "no part of"
    )
    bias = {f"{Q0}.bias": np.ones(16, np.float32)}
    check_error(write_checkpoint(tmp_path / "b", TINY, with_config(bias, TINY)), "no part of", field=f"{Q0}.bias")
    check_error(write_checkpoint(tmp_path / "c", {**TINY, "tie_word_embeddings": True}, tiny_tensors(TINY)), "differs")
    for name, message in (("b", "no part of"), ("c", "differs")):
        with HfCheckpoint(tmp_path / name) as checkpoint, pytest.raises(FormatError, match=message):
            list(parts(checkpoint))  # as a conversion reads it


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "a\0b", "", "x" * 5000, "\u2581", "model.layers.-1.x", "__metadata"]
)
def test_tensor_names_are_no_paths(tmp_path, name):
    folder = write_checkpoint(tmp_path / "f", BITNET, with_config({name: np.ones(1, np.float32)}))
    check_error(folder, "no part of", field=name)
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.mlp.ffn_sub_norm.weight", "model.norm.weight"]
)
def test_nan_and_inf_are_found_where_they_are(tmp_path, name, bad):
    tensors = tiny_tensors(BITNET)
    flat = tensors[name].reshape(-1)
    flat[-3] = bad
    index = [int(i) for i in np.unravel_index(flat.size - 3, tensors[name].shape)]
    error = check_error(write_checkpoint(tmp_path, BITNET, tensors), "expected finite numbers", field=name)
    assert str(index) in str(error)
    assert str(float(bad)) in str(error)


def test_nan_in_a_master_weight(tmp_path):
    w = np.ones((16, 16), np.float32)
    w[3, 4] = np.nan
    folder = write_checkpoint(
        tmp_path, {**BITNET, "quantization_config": ONLINE}, online_tensors(w, ml_dtypes.bfloat16)
    )
    assert "[3, 4]" in str(check_error(folder, "finite", field=f"{Q0}.weight"))


@pytest.mark.parametrize("shift", [0, 2, 4, 6])
def test_code_3(tmp_path, shift):
    tensors = tiny_tensors(BITNET)
    plane = tensors[f"{Q0}.weight"]
    plane[2, 5] |= 3 << shift
    error = check_error(write_checkpoint(tmp_path, BITNET, tensors), "invalid ternary code 3", field=f"{Q0}.weight")
    assert "[2, 5]" in str(error)


@pytest.mark.parametrize("value", [0.5, 2.0, -1.5])
def test_unpacked_planes_hold_minus_one_zero_and_one(tmp_path, value):
    w = np.zeros((16, 16), np.float32)
    w[1, 2], w[5, 6] = -1, value
    error = check_error(write_checkpoint(tmp_path, BITNET, with_config({f"{Q0}.weight": w})), "-1, 0 or 1")
    assert "[5, 6]" in str(error)


@pytest.mark.parametrize("scale", [0.0, -0.5, np.nan, np.inf, -np.inf, 1e-40])
@pytest.mark.parametrize("linear_class", ["autobitlinear", "bitlinear"])
def test_scales_that_are_no_scale(tmp_path, scale, linear_class):
    """1e-40 has no reciprocal in float32."""
    config = {**BITNET, "quantization_config": {"quant_method": "bitnet", "linear_class": linear_class}}
    tensors = with_config({f"{Q0}.weight_scale": np.array([scale], np.float32)})
    check_error(write_checkpoint(tmp_path, config, tensors), "expected", field=f"{Q0}.weight_scale")


def test_packed_rows_come_in_fours(tmp_path):
    config = {**BITNET, "intermediate_size": 26}
    tensors = with_config({"model.layers.0.mlp.ffn_sub_norm.weight": np.ones(26, np.float32)})
    check_error(write_checkpoint(tmp_path, config, tensors), "rows come in fours")


def test_a_packed_checkpoint_is_no_master(tmp_path):
    """online over a packed file would take bytes for weights."""
    config = {**BITNET, "quantization_config": ONLINE}
    check_error(write_checkpoint(tmp_path, config, tiny_tensors(BITNET)), "expected BF16 or F16 or F32")


# -- files of a folder -------------------------------------------------------------------------------------------------


def test_an_empty_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    check_error(tmp_path, f"neither {SINGLE_FILE} nor {INDEX_FILE}", path=tmp_path)


def two_shards(config=BITNET):
    tensors = tiny_tensors(config)
    names = sorted(tensors)
    return {
        "model-00001-of-00002.safetensors": {name: tensors[name] for name in names[::2]},
        "model-00002-of-00002.safetensors": {name: tensors[name] for name in names[1::2]},
    }


def test_shards_equal_one_file(tmp_path):
    one = load(write_checkpoint(tmp_path / "one", BITNET))
    write_shards(tmp_path / "two", BITNET, two_shards())
    np.testing.assert_array_equal(load(tmp_path / "two").logits([1, 2, 3]), one.logits([1, 2, 3]))


def test_one_file_goes_before_an_index(tmp_path):
    write_checkpoint(tmp_path, BITNET)
    write_index(tmp_path, {"x": "missing.safetensors"})
    load(tmp_path)


def test_a_missing_shard(tmp_path):
    write_shards(tmp_path, BITNET, two_shards())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    check_error(tmp_path, "model-00002-of-00002.safetensors is missing", "weight_map", tmp_path / INDEX_FILE)


def test_a_tensor_in_the_wrong_shard(tmp_path):
    weight_map = write_shards(tmp_path, BITNET, two_shards())
    name = sorted(weight_map)[0]
    write_index(tmp_path, {**weight_map, name: "model-00002-of-00002.safetensors"})
    check_error(tmp_path, "places this tensor in model-00002", name, tmp_path / "model-00001-of-00002.safetensors")


def test_a_tensor_that_the_index_does_not_know(tmp_path):
    weight_map = write_shards(tmp_path, BITNET, two_shards())
    name = sorted(weight_map)[0]
    write_index(tmp_path, {key: value for key, value in weight_map.items() if key != name})
    check_error(tmp_path, "places this tensor nowhere", name, tmp_path / "model-00001-of-00002.safetensors")


def test_a_tensor_that_no_shard_has(tmp_path):
    weight_map = write_shards(tmp_path, BITNET, two_shards())
    write_index(tmp_path, {**weight_map, "ghost": "model-00001-of-00002.safetensors"})
    check_error(tmp_path, "is not in model-00001", "ghost", tmp_path / INDEX_FILE)


@pytest.mark.parametrize(
    "weight_map", [None, [], {}, "model.safetensors", 3, {"a": 3}, {"a": None}, {"a": ["model.safetensors"]}, {"a": ""}]
)
def test_an_index_that_is_none(tmp_path, weight_map):
    write_shards(tmp_path, BITNET, two_shards())
    write_index(tmp_path, weight_map)
    check_error(tmp_path, "expected", "weight_map", tmp_path / INDEX_FILE)


@pytest.mark.parametrize(
    "shard",
    [
        *("../outside.safetensors", "sub/../../outside.safetensors", "sub/inside.safetensors", "./x.safetensors"),
        *("..", ".", "x\0.safetensors", "model.bin", "../.safetensors", "a\\..\\b.bin"),
    ],
)
def test_shards_are_plain_names(tmp_path, shard):
    outside = tmp_path / "outside.safetensors"
    write_checkpoint(tmp_path / "f", BITNET)
    shutil.move(tmp_path / "f" / SINGLE_FILE, outside)
    write_index(tmp_path / "f", {"x": shard})
    check_error(tmp_path / "f", "expected the name of a .safetensors file", "weight_map", tmp_path / "f" / INDEX_FILE)


def test_a_shard_with_an_absolute_path(tmp_path):
    write_checkpoint(tmp_path / "f", BITNET)
    shutil.move(tmp_path / "f" / SINGLE_FILE, tmp_path / "outside.safetensors")
    write_index(tmp_path / "f", {"x": str(tmp_path / "outside.safetensors")})
    check_error(tmp_path / "f", "expected the name", "weight_map", tmp_path / "f" / INDEX_FILE)


@pytest.mark.parametrize("depth", ["..", "../..", "blobs"])
def test_a_shard_that_is_a_link_out_of_the_folder(tmp_path, depth):
    folder = tmp_path / "a" / "f"
    shards = two_shards()
    write_shards(folder, BITNET, shards)
    shard = folder / next(iter(shards))
    target = (folder / depth).resolve() / "elsewhere.safetensors"
    target.parent.mkdir(exist_ok=True)
    shutil.move(shard, target)
    shard.symlink_to(os.path.relpath(target, folder))
    check_error(folder, "is a link out of the folder", "weight_map", folder / INDEX_FILE)


def test_a_shard_that_is_a_link_within_the_folder(tmp_path):
    shards = two_shards()
    write_shards(tmp_path, BITNET, shards)
    shard = tmp_path / next(iter(shards))
    shard.rename(tmp_path / "real.safetensors")
    shard.symlink_to("real.safetensors")
    load(tmp_path)


def as_hub_cache(folder, cache):
    """The layout of huggingface_hub's cache: snapshots/<revision> full of links into blobs/."""
    snapshot = cache / "models--someone--model" / "snapshots" / ("0123456789abcdef" * 2 + "01234567")
    blobs = snapshot.parent.parent / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        blob = blobs / f"{number:064x}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


@pytest.mark.parametrize("case", ["llama-f16-sharded", "bitnet-packed-offline"])
def test_the_hub_cache(tmp_path, case):
    snapshot = as_hub_cache(GOLDEN / case, tmp_path)
    tokens = golden(case)["tokens"]
    expected = model(GOLDEN / case).logits(tokens)
    np.testing.assert_array_equal(load(snapshot).logits(tokens), expected)
    if case == "bitnet-packed-offline":
        np.testing.assert_array_equal(load(snapshot / SINGLE_FILE).logits(tokens), expected)


def test_the_hub_cache_through_a_link_to_it(tmp_path):
    snapshot = as_hub_cache(GOLDEN / "llama-f16-sharded", tmp_path / "cache")
    (tmp_path / "link").symlink_to(snapshot)
    load(tmp_path / "link")


def test_a_file_that_repositories_of_the_hub_cache_share(tmp_path):
    """huggingface_hub may keep a blob for all repositories, as <cache>/blobs/ab/<hash>, and a link to it in each."""
    snapshot = as_hub_cache(GOLDEN / "llama-f16-sharded", tmp_path / "cache")
    blob = Path(os.path.realpath(snapshot / "model-00002-of-00003.safetensors"))
    shared = tmp_path / "cache" / "blobs" / "ab" / ("ab" * 32)
    shared.parent.mkdir(parents=True)
    blob.rename(shared)
    blob.symlink_to(os.path.relpath(shared, blob.parent))
    load(snapshot)


def test_a_link_out_of_a_hub_cache(tmp_path):
    snapshot = as_hub_cache(GOLDEN / "llama-f16-sharded", tmp_path / "cache")
    shard = snapshot / "model-00002-of-00003.safetensors"
    outside = tmp_path / "outside.safetensors"
    shutil.copy(shard, outside)
    shard.unlink()
    shard.symlink_to(outside)
    check_error(snapshot, "link out of the folder", "weight_map", snapshot / INDEX_FILE)


def test_a_matrix_that_the_file_cannot_hold(tmp_path):
    """Qwen3.5's attention has the places of its rows in an array, which is not made."""
    folder = shutil.copytree(DATA / "containers" / "mlx-prism-hadamard", tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_attention_heads"] = 2**32
    (folder / "config.json").write_text(json.dumps(config))
    check_error(folder, r"it has \d+ x 512 weights, and all tensors have \d+ bytes", "blocks.1.attn.q_proj")


def test_a_config_of_a_trillion_layers(tmp_path):
    """Nothing is listed or counted up to the last layer: not by a load, not by a conversion, not by an inspection."""
    config = {**BITNET, "num_hidden_layers": 2**40}
    folder = write_checkpoint(tmp_path, config, tiny_tensors(BITNET))
    said = r"config.json says 1099511627776 layers, and there are 38 tensors"
    check_error(folder, said, "num_hidden_layers")
    with pytest.raises(FormatError, match=said):
        convert(folder, tmp_path / "out.gguf", to="gguf-i2_s")
    found = [error.message for error in inspect_model(folder).errors]
    assert any("there is no tensor of layers 2 to 1099511627775" in message for message in found)
    # With a config that the caller has changed
    changed = read_hf_config(folder / "config.json")
    with pytest.raises(FormatError, match="is missing") as caught, HfCheckpoint(folder, config=changed) as checkpoint:
        read_weights(checkpoint)
    assert caught.value.field == "model.layers.2.input_layernorm.weight"


@pytest.mark.parametrize("bits", [0x7F81, 0xFF81])
def test_signalling_nans_of_bfloat16(tmp_path, bits):
    """NumPy warns of them where it looks whether a number is finite; warnings are errors here."""
    tensors = tiny_tensors(BITNET)
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        tensors[name].reshape(-1).view(np.uint16)[5] = bits
        folder = write_checkpoint(tmp_path / name, BITNET, tensors)
        check_error(folder, "holds nan at index", field=name)
        assert next(finding.field for finding in inspect_model(folder).errors) == name
        tensors = tiny_tensors(BITNET)


# -- files beside the model --------------------------------------------------------------------------------------------


def beside(folder, modules=None, pooling=None):
    """What the files of sentence-transformers say: the fields of the configuration that they change."""
    plain = asdict(read_folder_config(write_checkpoint(folder, TINY) / "config.json"))
    if modules is not None:
        (folder / "modules.json").write_text(modules if isinstance(modules, str) else json.dumps(modules))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    changed = asdict(read_folder_config(folder / "config.json"))
    return {name: value for name, value in changed.items() if value != plain[name]}


def kinds(*names):
    return [{"type": f"sentence_transformers.models.{name}"} for name in names]


@pytest.mark.parametrize(
    ("modules", "pooling", "fields"),
    [
        (None, None, {}),
        (kinds("Transformer", "Pooling", "Normalize"), None, {}),
        (kinds("Transformer", "Pooling"), None, {"unit_embeddings": False}),
        ([], None, {"unit_embeddings": False}),
        ([{"type": "Normalize"}], None, {}),
        (
            None,
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False, "dimension": 3},
            {"pooling": "mean"},
        ),
        (None, {"pooling_mode_lasttoken": True, "include_prompt": True}, {}),
        (None, {"embedding_dimension": 3, "pooling_mode": "mean", "include_prompt": True}, {"pooling": "mean"}),
        (None, {"pooling_mode": "lasttoken", "pooling_mode_mean_tokens": True, "include_prompt": False}, {}),
        (
            kinds("Transformer", "Pooling"),
            {"pooling_mode_mean_tokens": True},
            {"unit_embeddings": False, "pooling": "mean"},
        ),
    ],
)
def test_what_sentence_transformers_say(modules, pooling, fields, tmp_path):
    assert beside(tmp_path, modules, pooling) == fields


POOLING = "expected one of pooling_mode_lasttoken, pooling_mode_mean_tokens to be true, got "


@pytest.mark.parametrize(
    ("modules", "pooling", "message"),
    [
        (kinds("Transformer", "Dense", "Other"), None, "Dense is not done; there are: Transformer, Pooling, Normalize"),
        ("{", None, "expected a list of modules, each with a type"),
        ({"a": 1}, None, "expected a list of modules, each with a type"),
        ([{}], None, "expected a list of modules, each with a type"),
        (5, None, "expected a list of modules, each with a type"),
        (None, {}, f"{POOLING}[]"),
        (None, {"pooling_mode": "cls"}, "expected lasttoken or mean, got 'cls'"),
        (None, {"pooling_mode": ["mean", "max"]}, "expected lasttoken or mean, got ['mean', 'max']"),
        (
            None,
            {"pooling_mode": "mean", "include_prompt": False},
            "false, which leaves a prompt's tokens out of the mean, is not done",
        ),
        (None, {"pooling_mode_cls_token": True}, f"{POOLING}['pooling_mode_cls_token']"),
        (
            None,
            {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True},
            f"{POOLING}['pooling_mode_lasttoken', 'pooling_mode_mean_tokens']",
        ),
    ],
)
def test_what_sentence_transformers_must_not_say(modules, pooling, message, tmp_path):
    with pytest.raises(ConfigError) as caught:
        beside(tmp_path, modules, pooling)
    assert caught.value.message == message
    place = tmp_path / "1_Pooling" / "config.json" if modules is None else tmp_path / "modules.json"
    assert caught.value.path == str(place)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"bos_token_id": 1, "eos_token_id": [2, 3]}, None, {"bos_token_id": 1, "eos_token_id": [2, 3]}),
        (
            {"bos_token_id": 1, "eos_token_id": 2},
            {"eos_token_id": 5, "top_k": 3},
            {"eos_token_id": 5, "top_k": 3, "bos_token_id": 1},
        ),
        ({"bos_token_id": 1, "eos_token_id": 2}, {"eos_token_id": None}, {"eos_token_id": [2], "bos_token_id": 1}),
        ({"bos_token_id": 1, "eos_token_id": 2}, {"eos_token_id": 3, "bos_token_id": 0}, "as it is"),
        ({"bos_token_id": None, "eos_token_id": None}, None, None),
    ],
)
def test_ids_that_the_configuration_alone_has_go_along_with_the_tokenizer(config, generation, expected, tmp_path):
    folder = write_checkpoint(tmp_path, TINY | config)
    (folder / "tokenizer.model").write_bytes(b"x")
    text = None if generation is None else json.dumps(generation)
    if text is not None:
        (folder / "generation_config.json").write_text(text)
    with HfCheckpoint(folder) as checkpoint:
        files = checkpoint.tokenizer_files()
        assert files["tokenizer.model"] == b"x"
        if expected == "as it is":
            assert files["generation_config.json"] == text.encode()
        elif expected is None:
            assert "generation_config.json" not in files
        else:
            assert json.loads(files["generation_config.json"]) == expected
        (folder / "tokenizer.model").unlink()
        assert checkpoint.tokenizer_files() == {}


def test_a_bit_at_least_for_each_weight():
    config = parse_hf_config(TINY, Path("config.json"))
    largest = max(n * k for n, k in config.linear_shapes(0).values())
    assert largest % 8 == 0
    check_room(config, largest // 8, Path("x"))
    with pytest.raises(
        FormatError, match=rf"^x, blocks\.0\.mlp\.\w+: .* and all tensors have {largest // 8 - 1} bytes"
    ):
        check_room(config, largest // 8 - 1, Path("x"))


def test_what_is_prepared_for_a_backend(tmp_path):
    """Each linear for its layer, the head for none; of a packed embedding what keeps its kind."""
    with HfCheckpoint(write_checkpoint(tmp_path, TINY)) as checkpoint:
        weights = read_weights(checkpoint, prepare_for=lambda layer: lambda w: w.called(f"{w.name} for {layer}"))
    names = [weights.embedding.name, *(layer.q_proj.name for layer in weights.layers), weights.lm_head.name]
    assert names == ["embedding", *(f"blocks.{i}.attn.q_proj for {i}" for i in range(2)), "lm_head for None"]
    with open_checkpoint(DATA / "containers" / "gguf-q1_0" / "model.gguf") as checkpoint:
        checkpoint.config = replace(checkpoint.config, tie_word_embeddings=True)
        checkpoint.check_tied_head = checkpoint.finish = lambda *_: None
        for kind in ("groups", "other"):
            made = SimpleNamespace(kind=kind)
            head = read_weights(
                checkpoint, prepare_for=lambda layer, made=made: None if layer is not None else lambda _: made
            ).lm_head
            assert (head is made) == (kind == "groups")


def test_layers_are_read_ahead_in_the_order_of_their_numbers(tmp_path, monkeypatch):
    config = {**TINY, "num_hidden_layers": 11}
    folder = write_checkpoint(tmp_path, config, tiny_tensors(config))
    spans = []
    monkeypatch.setattr(SafetensorsFile, "read_ahead", lambda self, given: spans.extend(given))
    with HfCheckpoint(folder) as checkpoint:
        read_weights(checkpoint)
        file = checkpoint.tensors
        places = {(file.info(name).offset, file.info(name).nbytes): name for name in file.names}
    layers = [int(places[span].split(".")[2]) for span in spans if ".layers." in places[span]]
    assert len(spans) == len(places)
    assert layers == sorted(layers)
    assert set(layers) == set(range(11))


def test_what_is_left_out_of_a_vision_model_is_said(tmp_path):
    folder = write_checkpoint(tmp_path, TINY)
    with HfCheckpoint(folder) as checkpoint:
        assert checkpoint.evidence == []
    text = {"model_type": "gemma3", "text_config": {k: v for k, v in TINY.items() if k != "model_type"}}
    left_out = hf_form("gemma3_text").left_out
    assert left_out
    tensors = {f"{part}.{n}": np.ones(1, np.float32) for part in left_out[:2] for n in (1, 2)}
    tensors["model.embed_tokens.weight"] = np.ones((40, 16), np.float32)
    folder = write_checkpoint(tmp_path / "vision", text, tensors)
    with HfCheckpoint(folder) as checkpoint:
        parts = ", ".join(f"{part}*" for part in sorted(left_out[:2]))
        assert checkpoint.evidence == [
            f"left out, as text needs none of them: {2 * len(left_out[:2])} tensors ({parts})"
        ]


SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
ONE = "of m is read model.safetensors; beside it, and not read: "


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["config.json"], None),
        (["model.safetensors", "config.json"], None),
        (SHARDS, None),
        (["model.safetensors", *SHARDS], ONE + ", ".join(SHARDS)),
        (["model.safetensors", "a.gguf", *SHARDS], f"{ONE}a.gguf, {', '.join(SHARDS)}"),
        (["model.safetensors", "a.gguf", "b.gguf", *SHARDS], f"{ONE}a.gguf, b.gguf, {SHARDS[0]} and 1 more"),
        ([*SHARDS, "a.gguf"], f"of m is read {SHARDS[0]}, ...; beside it, and not read: a.gguf"),
    ],
)
def test_weights_that_are_not_read_are_named(names, sentence, tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    assert describe_ignored(folder, folder) == sentence
    assert describe_ignored(folder / names[0], folder) is None


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_beside_the_weights_is_not_overlooked(name, tmp_path):
    folder = write_checkpoint(tmp_path, TINY)
    (folder / name).write_text("{}")
    with pytest.raises(FormatError, match="is a LoRA adapter, which load applies and this does not") as caught:
        HfCheckpoint(folder)
    assert caught.value.path == str(folder / name)
    HfCheckpoint(folder, LoadOptions(adapter="none")).close()
    HfCheckpoint(folder, config=read_folder_config(folder / "config.json")).close()


def test_as_many_layers_as_tensors(tmp_path):
    tensors = tiny_tensors(TINY)
    count = len(tensors)
    for layers, message in ((count, None), (count + 1, f"says {count + 1} layers, and there are {count} tensors")):
        folder = write_checkpoint(tmp_path / str(layers), {**TINY, "num_hidden_layers": layers}, tensors)
        if message is None:
            HfCheckpoint(folder).close()
        else:
            check_error(folder, message, "num_hidden_layers")


@pytest.mark.parametrize(
    ("linear_class", "mode", "convention"),
    [
        ("bitlinear", "offline", "divide"),
        ("bitlinear", "online", "divide"),
        ("autobitlinear", "offline", "multiply"),
        ("autobitlinear", "online", "absmean"),
    ],
)
def test_what_a_scale_means(linear_class, mode, convention):
    assert scale_convention(QuantizationConfig(linear_class, mode)) == convention
    assert scale_convention(None) is None


def test_the_smallest_and_largest_scale(tmp_path):
    """A reciprocal in float32 must be there."""
    with HfCheckpoint(write_checkpoint(tmp_path, TINY)) as checkpoint:
        for scale in (2.0**-127, 1e-38, 1.0, 3.4e38):
            assert checkpoint.checked_scale("x", np.float32(scale)) == np.float32(scale)
        for scale in (2.0**-129, 0.0, -1.0, np.inf, np.nan):
            with pytest.raises(FormatError, match="expected a finite scale above zero, got "):
                checkpoint.checked_scale("x", np.float32(scale))


@pytest.mark.parametrize(("count", "more"), [(1, ""), (2, " (and 1 more)"), (5, " (and 4 more)")])
def test_tensors_that_have_no_place_are_counted(count, more, tmp_path):
    tensors = with_config({f"odd{n}": np.ones(1, np.float32) for n in range(count)}, TINY)
    message = "this tensor is no part of a llama model as config.json describes it"
    error = check_error(write_checkpoint(tmp_path, TINY, tensors), "no part of")
    assert error.message == message + more
    assert error.field.startswith("odd")


def test_the_hash_of_a_file_counts_its_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(hashes, "BLOCK_BYTES", 4)
    (tmp_path / "x").write_bytes(b"0123456789")
    seen = []
    assert hashes.file_hash(tmp_path / "x", seen.append) == hashlib.sha256(b"0123456789").hexdigest()
    assert seen == [4, 4, 2]


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("llama-unpacked-offline", "8d978524b154e00a295b21c5cbd34a4fc0295f484264fadb783c8b2ce202b55e"),  # with biases
        ("bitnet-packed-offline", "9caf9c0a92aca2c46169d5ca2d5b2b518d98ec640f771a561a39db81367773ae"),
    ],
)
def test_the_hash_of_weights_stays(name, digest):
    """Traces and receipts of earlier versions hold it."""
    assert hashes.weight_hash(model(GOLDEN / name).weights) == digest
