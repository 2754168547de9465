"""`inspect_model`: what it says of good checkpoints equals what `load` makes of them; what `load` refuses, it names."""

import json
import shutil
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from helpers import (
    BITNET,
    DATA,
    GOLDEN,
    GOLDEN_CASES,
    TINY,
    put,
    safetensors_bytes,
    tiny_tensors,
    write_checkpoint,
    write_shards,
)

import bitnet_ref
from bitnet_ref.errors import BitNetRefError, ConfigError, FormatError
from bitnet_ref.families.linear_norms import model_norms
from bitnet_ref.formats.open import ASSETS, choose_format, describe_ignored
from bitnet_ref.inspection import inspect_model, inspector, judge, show_tensor
from bitnet_ref.inspection.facts import Inspection, TernaryMatrix

FAMILIES = [path.parent for path in sorted((DATA / "families").glob("*/config.json"))]
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
V_SCALE = "model.layers.1.self_attn.v_proj.weight_scale"


def messages(found, severity="error"):
    return [f.message for f in found.findings if f.severity == severity]


# -- good checkpoints --------------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize("path", ["storyteller", *(GOLDEN / case for case in GOLDEN_CASES)], ids=str)
def test_says_what_load_makes_of_it(path):
    found, model = inspect_model(path), bitnet_ref.load(path, backend="numpy", threads=1)
    assert found.errors == []
    assert found.config == model.config
    expected = {name: w.bit_linear for name, w in model.weights.linears() if w.bit_linear and name != "lm_head"}
    assert {m.name: m.w_dequant_scale for m in found.ternary} == {n: w.w_dequant_scale for n, w in expected.items()}
    for matrix in found.ternary:
        w_t = expected[matrix.name].ternary()
        assert (matrix.shape, matrix.invalid) == (w_t.shape, 0)
        assert [matrix.minus, matrix.zero, matrix.plus] == [int((w_t == value).sum()) for value in (-1, 0, 1)]
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("case", "words", "scales"),
    [
        ("bitnet-packed-offline", "autobitlinear, offline: packed", "multiply by it"),
        ("llama-packed-bitlinear", "bitlinear, offline: packed", "divide by it"),
        ("bitnet-bf16-online", "autobitlinear, online: full-precision", "no scale stored"),
        ("llama-unpacked-offline", "autobitlinear, offline: ternary, stored as floats", "multiply by it"),
        ("llama-dense", "none: a dense model", "no scales"),
    ],
)
def test_names_quantisation_and_scale_direction(case, words, scales):
    found = inspect_model(GOLDEN / case)
    assert found.quantization.startswith(words)
    assert scales in found.scale_convention


WITHOUT_THETA = ("llama-bf16-biases", "llama-f16-sharded", "llama-f32-headdim", "llama-packed-rmsnorm", "rope-dynamic")
WITHOUT_THETA += ("llama-packed-skips", "llama-tied-duplicate", "llama-unpacked-offline")
WITHOUT_THETA += ("mistral-window1", "mistral-window3", "granite", "olmo2")


@pytest.mark.sample(3)
@pytest.mark.parametrize("folder", [*(GOLDEN / case for case in GOLDEN_CASES), *FAMILIES], ids=lambda path: path.name)
def test_every_finding_about_a_good_checkpoint(folder):
    found = inspect_model(folder)
    expected = [("warning", "there is none (tokenizer.json, tokenizer.model): only token ids can go in")]
    if beside := describe_ignored(folder, choose_format(folder)[1]):
        expected.append(("note", beside))
    if folder in FAMILIES and not found.config.eos_token_ids:
        expected.append(("warning", "no end token is named anywhere: generation ends at max_tokens only"))
    if folder.name == "llama-packed-skips":
        expected.append(("warning", "the head is ternary; BitNet models are trained with a head of full precision"))
    if folder.name in WITHOUT_THETA:
        message = "absent from config.json, so transformers' defaults hold: rope_theta 10000.0"
        expected.append(("note", message))
    assert sorted((finding.severity, finding.message) for finding in found.findings) == sorted(expected)
    assert (beside is not None) == any(folder.glob("*.gguf"))
    assert found.architecture == json.loads((folder / "config.json").read_text())["model_type"]


@pytest.mark.parametrize(
    ("missing", "words"),
    [((1, 2, 4), "layers 1 to 4"), ((3,), "layer 3"), ((5,), "layer 5"), ((0, 5), "layers 0 to 5")],
)
def test_layers_that_are_missing(missing, words, tmp_path):
    config = {**BITNET, "num_hidden_layers": 6}
    tensors = {
        name: array
        for name, array in tiny_tensors(config).items()
        if not any(name.startswith(f"model.layers.{index}.") for index in missing)
    }
    found = inspect_model(write_checkpoint(tmp_path / "m", config, tensors))
    assert messages(found) == [f"config.json says 6 layers; there is no tensor of {words}"]
    assert found.errors[0].field == f"model.layers.{missing[0]}"
    assert {matrix.layer for matrix in found.ternary} == set(range(6)) - set(missing)


def test_storyteller():
    found = inspect_model("storyteller")
    assert found.findings == []
    assert "2B-4T" in found.family
    assert "2B-4T" in found.activation
    assert found.parameters == 5_776_640  # 4096 * 256 + 6 * (786,432 weights + 1536 in norms) + 256
    assert found.nbytes == sum(size.nbytes for size in found.sizes) == sum(t.nbytes for t in found.tensors)
    assert {size.kind: size.tensors for size in found.sizes} == {
        "embedding": 1,
        "ternary planes": 42,
        "norms": 25,
        "scales": 42,
    }
    assert sum(size.share for size in found.sizes) == pytest.approx(1)
    assert found.tokenizer.vocab_size == found.config.vocab_size == 4096
    assert (found.tokenizer.bos_token, found.tokenizer.adds_bos) == ("<s>", True)
    assert (found.tokenizer.eos_tokens, found.tokenizer.chat_template) == (("</s>",), False)
    assert found.stop_token_ids == (2,)
    by_kind, by_layer = found.ternary_shares("kind"), found.ternary_shares("layer")
    assert list(by_layer) == list(range(6))
    assert list(by_kind) == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    for shares in [*by_kind.values(), *by_layer.values()]:
        assert sum(shares) == pytest.approx(1)


def test_an_unknown_activation_is_named():
    found = inspect_model("storyteller")
    object.__setattr__(found.config, "activation", "swiglu")
    assert found.activation == "unknown: 'swiglu'"


def test_parameter_count_of_a_tied_model_with_a_stored_head():
    found = inspect_model(GOLDEN / "llama-tied-duplicate")
    weights = bitnet_ref.load(GOLDEN / "llama-tied-duplicate", backend="numpy").weights
    linears = sum(w.array.size for name, w in weights.linears() if name != "lm_head")
    norms = sum(norm.weight.size for norm in model_norms(weights))
    assert found.parameters == weights.embedding.array.size + linears + norms


@pytest.mark.thorough
def test_holds_one_layer_at_a_time(tmp_path):
    config = {**BITNET, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 24}
    folder = write_checkpoint(tmp_path / "deep", config)
    tracemalloc.start()
    try:
        found = inspect_model(folder)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    planes = next(size.nbytes for size in found.sizes if size.kind == "ternary planes")
    assert found.errors == []
    assert peak < planes / 2, f"{peak} bytes at the peak, {planes} bytes of planes in all"


def test_reports_progress(tmp_path):
    seen = []
    inspect_model(write_checkpoint(tmp_path / "m", BITNET), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]


def test_four_tensors_with_one_fault_are_a_group():
    """Their messages differ in figures only, and they name a tensor."""
    for count, groups in ((3, [1, 1, 1]), (4, [4])):
        out = Inspection("m")
        for number in range(count):
            out.report("error", "weights", f"expected {number} rows, got 1e-{number}", field=f"t{number}")
        assert [len(group) for group in out.finding_groups()] == groups
    for part, field in (("config", "t"), ("weights", None)):
        out = Inspection("m")
        for _ in range(4):
            out.report("error", part, "the same", field=field)
        assert [len(group) for group in out.finding_groups()] == [1] * 4


def test_three_scales_are_compared_and_two_are_not():
    """One that is 50 times the median is far, and a median above 5 is too large for a mean."""
    far = (([1.0, 1.0, 50.5], 1), ([1.0, 1.0, 49.5], 0), ([1.0, 1.0, 0.0195], 1), ([1.0, 99.0], 0))
    for scales, messages_of in (*far, ([5.0] * 3, 0), ([5.5] * 3, 1)):
        out = Inspection("m")
        out.ternary = [TernaryMatrix(str(n), "q_proj", n, (2, 2), 1, 2, 1, scale) for n, scale in enumerate(scales)]
        judge._judge_scales(out)
        assert len(out.findings) == messages_of


def test_html_is_escaped(tmp_path):
    folder = write_checkpoint(tmp_path / "<b>&", TINY)
    html = inspect_model(folder)._repr_html_()
    assert "&lt;b&gt;&amp;" in html
    assert "<b>&" not in html


# -- broken checkpoints ------------------------------------------------------------------------------------------------


def changed(config=BITNET, **changes):
    """A builder of a tiny checkpoint with some tensors replaced, or removed when None."""

    def build(folder):
        tensors = tiny_tensors(config)
        for name, change in changes.items():
            name = name.replace("__", ".")
            tensors[name] = change(tensors[name].copy()) if callable(change) else change
        return write_checkpoint(folder, config, {name: array for name, array in tensors.items() if array is not None})

    return build


def with_config(change, config=BITNET):
    return lambda folder: write_checkpoint(folder, {**config, **change}, tiny_tensors(config))


def without_quantization(folder, config=BITNET):
    stripped = {key: value for key, value in config.items() if key != "quantization_config"}
    return write_checkpoint(folder, stripped, tiny_tensors(config))


def truncated(folder):
    write_checkpoint(folder, BITNET)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    return folder


def text_config(text):
    def build(folder):
        write_checkpoint(folder, BITNET)
        (folder / "config.json").write_text(text)
        return folder

    return build


def one_shard_missing(folder):
    tensors = list(tiny_tensors(BITNET).items())
    write_shards(folder, BITNET, {"a.safetensors": dict(tensors[:9]), "b.safetensors": dict(tensors[9:])})
    (folder / "b.safetensors").unlink()
    return folder


def packed_but_dense(folder):
    return write_checkpoint(folder, TINY, tiny_tensors(TINY) | {Q_PROJ: tiny_tensors(BITNET)[Q_PROJ]})


NAN = np.float32("nan")
BROKEN = {
    "code 3": (changed(**{Q_PROJ: put((0, 0), 0x03)}), Q_PROJ, "code 3"),
    "NaN in a norm": (changed(**{"model.layers.1.input_layernorm.weight": put(3, NAN)}), "input_layernorm", "nan"),
    "NaN in the embedding": (
        changed(**{"model.embed_tokens.weight": put((7, 5), NAN)}),
        "model.embed_tokens.weight",
        "[7, 5]",
    ),
    "Inf in the head": (changed(TINY, **{"lm_head.weight": put((1, 2), np.inf)}), "lm_head.weight", "[1, 2]"),
    "a scale of zero": (changed(**{V_SCALE: put(0, 0)}), V_SCALE, "above zero"),
    "a missing linear": (changed(**{"model.layers.1.mlp.up_proj.weight": None}), "layers.1.mlp.up_proj", "missing"),
    "a missing embedding": (changed(**{"model.embed_tokens.weight": None}), "embed_tokens", "missing"),
    "a missing final norm": (changed(**{"model.norm.weight": None}), "model.norm.weight", "missing"),
    "a tensor too many": (changed(**{"model.extra": np.zeros(3, np.float32)}), "model.extra", "no part"),
    "a wrong shape": (
        changed(**{"model.norm.weight": np.ones(8, np.float32)}),
        "model.norm.weight",
        "expected BF16 or F16 or F32 of shape [16]",
    ),
    "a layer too few": (with_config({"num_hidden_layers": 3}), "model.layers.2", None),
    "a head that differs": (
        changed(**{"lm_head.weight": np.zeros((40, 16), np.float32)}),
        "lm_head.weight",
        "tie_word_embeddings",
    ),
    "a file cut short": (truncated, None, None),
    "a shard missing": (one_shard_missing, "weight_map", "b.safetensors"),
    "config.json is no JSON": (text_config("{"), None, "not valid JSON"),
    "another architecture": (text_config('{"model_type": "gpt2"}'), "model_type", "gpt2"),
    "no quantization_config": (without_quantization, "quantization_config", "plausible, wrong"),
    "packed, but dense by its config": (packed_but_dense, Q_PROJ, "multiplies (autobitlinear) or divides"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", BROKEN)
def test_names_what_load_refuses(tmp_path, name):
    build, field, words = BROKEN[name]
    folder = build(tmp_path / "broken")
    with pytest.raises(BitNetRefError) as refused:
        bitnet_ref.load(folder, backend="numpy")
    found = inspect_model(folder)
    assert type(refused.value).__name__ in [finding.type for finding in found.errors]
    if field is not None:
        assert any(field in (f.field or "") and (words or "").lower() in f.message.lower() for f in found.errors)
    assert found.tensors or name == "a file cut short"
    json.dumps(found.to_dict(), allow_nan=False)


def test_the_place_in_a_table_of_several_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(inspector, "_BLOCK_BYTES", 64)  # two rows of bfloat16
    found = inspect_model(changed(**{"model.embed_tokens.weight": put((7, 5), NAN)})(tmp_path / "m"))
    (error,) = found.errors
    assert error.message == "holds NaN or Inf, first at index [7, 5]"


def test_the_rest_of_a_broken_layer_is_reported(tmp_path):
    found = inspect_model(BROKEN["code 3"][0](tmp_path / "m"))
    assert len(found.errors) == 1
    assert len(found.ternary) == 14
    assert {m.name: m.invalid for m in found.ternary if m.invalid} == {"blocks.0.attn.q_proj": 1}


def test_every_broken_tensor_is_named(tmp_path):
    build = changed(
        **{Q_PROJ: put((0, 0), 0xFF), V_SCALE: put(0, -1), "model.norm.weight": put(0, NAN), "x": np.ones(1)}
    )
    found = inspect_model(build(tmp_path / "m"))
    assert [finding.field for finding in found.errors] == [Q_PROJ, V_SCALE, "model.norm.weight", "x"]


def test_shares_without_a_usable_config(tmp_path):
    folder = write_checkpoint(tmp_path / "m", BITNET)
    whole = inspect_model(folder)
    (folder / "config.json").unlink()
    bare = inspect_model(folder)
    assert (bare.config, bare.parameters) == (None, whole.parameters)
    assert {m.name: m.shares for m in bare.ternary} == {m.name: m.shares for m in whole.ternary}
    assert {m.w_dequant_scale for m in bare.ternary} == {None}


def test_packed_planes_without_quantization_config_say_so_once(tmp_path):
    found = inspect_model(without_quantization(tmp_path / "m"))
    assert [finding.part for finding in found.errors] == ["config", "weights"]
    assert "multiplies (autobitlinear) or divides (bitlinear)" in found.errors[1].message
    assert len(found.ternary) == 14


# -- odd, but loadable -------------------------------------------------------------------------------------------------


def ternary_floats(config):
    """A checkpoint of float linears that hold only -s, 0 and +s."""
    tensors = tiny_tensors(TINY | {"tie_word_embeddings": config.get("tie_word_embeddings", False)})
    if config["model_type"] == "bitnet":
        tensors |= {name: array for name, array in tiny_tensors(BITNET).items() if "sub_norm" in name}
    for name, array in tensors.items():
        if name.endswith("_proj.weight"):
            tensors[name] = (np.sign(np.rint(array.astype(np.float32) * 6)) * 0.125).astype(ml_dtypes.bfloat16)
    return tensors


ONLINE = {**BITNET, "quantization_config": {**BITNET["quantization_config"], "quantization_mode": "online"}}


def test_a_master_that_is_ternary_already(tmp_path):
    found = inspect_model(write_checkpoint(tmp_path / "m", ONLINE, ternary_floats(ONLINE)))
    assert found.errors == []
    (finding,) = [each for each in found.warnings if "no master weights" in each.message]
    assert finding.field == Q_PROJ
    assert {m.w_dequant_scale for m in found.ternary} == {0.125}


def test_a_ternary_model_that_would_be_computed_as_dense(tmp_path):
    found = inspect_model(write_checkpoint(tmp_path / "m", TINY, ternary_floats(TINY)))
    assert found.errors == []
    assert any("a ternary model" in message for message in messages(found, "warning"))
    assert not any("ternary" in message for message in messages(inspect_model(GOLDEN / "llama-dense"), "warning"))


def test_silu_in_a_bitnet_model(tmp_path):
    found = inspect_model(write_checkpoint(tmp_path / "m", {**BITNET, "hidden_act": "silu"}, tiny_tensors(BITNET)))
    assert found.errors == []
    assert any("relu2" in message for message in messages(found, "warning"))


def test_a_matrix_of_zeros(tmp_path):
    found = inspect_model(changed(**{Q_PROJ: lambda plane: np.full_like(plane, 0x55)})(tmp_path / "m"))
    assert [(w.field, w.message) for w in found.warnings if w.part == "weights"] == [
        ("blocks.0.attn.q_proj", "100.0% of the weights are 0")
    ]


def test_tokenizer_against_config(tmp_path):
    folder = write_checkpoint(tmp_path / "m", {**BITNET, "bos_token_id": 3, "eos_token_id": 4})
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(ASSETS / "storyteller" / name, folder)
    found = inspect_model(folder)
    warnings, notes = messages(found, "warning"), messages(found, "note")
    assert found.errors == []
    assert any("4096 tokens and the embedding 40 rows" in message for message in warnings)
    assert any("BOS is 1, config.json's bos_token_id is 3" in message for message in warnings)
    assert any("stops on any of them" in message for message in notes)
    assert set(found.stop_token_ids) == {2, 4}


def test_no_end_token_and_no_tokenizer(tmp_path):
    found = inspect_model(write_checkpoint(tmp_path / "m", {**BITNET, "eos_token_id": []}))
    assert any("no end token" in message for message in messages(found, "warning"))
    assert any("only token ids" in message for message in messages(found, "warning"))


def test_a_broken_tokenizer_is_an_error(tmp_path):
    folder = write_checkpoint(tmp_path / "m", BITNET)
    (folder / "tokenizer.model").write_bytes(b"not protobuf")
    found = inspect_model(folder)
    assert [(finding.part, finding.type) for finding in found.errors] == [("tokenizer", "TokenizerError")]
    assert len(found.ternary) == 14


def test_defaults_that_were_filled_in_are_named(tmp_path):
    config = {key: value for key, value in BITNET.items() if key != "max_position_embeddings"}
    (note,) = messages(inspect_model(write_checkpoint(tmp_path / "m", config)), "note")
    assert "max_position_embeddings 2048" in note
    assert "rope_theta 500000" in note


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_read_has_a_report(tmp_path):
    file = tmp_path / "weights.safetensors"
    file.write_bytes(b"\xff" * 50)
    (error,) = inspect_model(file).errors
    assert (error.type, error.part, error.field) == ("FormatError", "weights", "header length")


def test_an_adapter_is_called_one():
    assert inspect_model(DATA / "adapters/alone/adapter").format.startswith("LoRA adapter of peft")


def test_a_file_without_a_config_is_listed(tmp_path):
    file = tmp_path / "weights.safetensors"
    file.write_bytes(safetensors_bytes({"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.uint8)}))
    found = inspect_model(file)
    assert found.header_only
    assert [(t.name, t.dtype, t.shape, t.nbytes) for t in found.tensors] == [
        ("a", "F32", (2, 3), 24),
        ("b", "U8", (4,), 4),
    ]
    assert found.findings == []


def test_a_file_beside_its_config_is_a_model():
    found = inspect_model(ASSETS / "storyteller" / "model.safetensors")
    assert (found.parameters, found.header_only, found.findings) == (5_776_640, False, [])


def test_what_is_readable_is_said(tmp_path):
    (tmp_path / "m.bin").write_bytes(b"GGUF")
    with pytest.raises(FormatError, match=r"expected a folder .*\.safetensors, .*\.gguf or \.onnx file"):
        inspect_model(tmp_path / "m.bin")


@pytest.mark.parametrize(("name", "words"), [("m.onnx", "give that file itself"), ("m.bin", "pickles are not read")])
def test_a_folder_with_something_else(tmp_path, name, words):
    (tmp_path / name).write_bytes(b"?")
    assert any(words in message for message in messages(inspect_model(tmp_path), "note"))


def test_nothing_there(tmp_path):
    with pytest.raises(FormatError, match="no such file, folder or model"):
        inspect_model(tmp_path / "none")
    found = inspect_model(tmp_path)
    assert {finding.part for finding in found.errors} == {"config", "weights"}


@pytest.mark.parametrize("layers", [3, 7, 10**9])
def test_more_layers_than_there_are_tensors_for(tmp_path, layers):
    found = inspect_model(
        write_checkpoint(tmp_path / "m", {**BITNET, "num_hidden_layers": layers}, tiny_tensors(BITNET))
    )
    (message,) = (f.message for f in found.errors if f.field == "model.layers.2")
    assert message.endswith("layer 2" if layers == 3 else f"layers 2 to {layers - 1}")
    assert len(found.ternary) == 14
    if layers == 3:  # a config that says billions is refused, and the file's own names remain
        assert show_tensor(tmp_path / "m", "blocks.1.mlp.up_proj").is_ternary
    assert show_tensor(tmp_path / "m", "model.layers.1.mlp.up_proj.weight").name
    with pytest.raises(ConfigError, match="near it are"):
        show_tensor(tmp_path / "m", "blocks.999.mlp.up_proj")


def test_a_signalling_nan_of_bfloat16_is_no_warning(tmp_path):
    tensors = tiny_tensors(BITNET)
    tensors["model.embed_tokens.weight"].view(np.uint16)[3, 1] = 0x7F81
    found = inspect_model(write_checkpoint(tmp_path / "m", BITNET, tensors))
    assert any("first at index [3, 1]" in message for message in messages(found))
