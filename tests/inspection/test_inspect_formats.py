"""`inspect_model` on GGUF, native and ONNX files: what it says, and every suspicious thing that it can name."""

import json
import shutil

import numpy as np
import pytest
from helpers import BITNET, DATA, GOLDEN, TINY, put, tiny_tensors, write_checkpoint

import bitnet_ref
from bitnet_ref.errors import BitNetRefError
from bitnet_ref.formats.checkpoint import LoadOptions
from bitnet_ref.formats.convert import convert
from bitnet_ref.formats.gguf.blocks import BY_NAME, quantize
from bitnet_ref.formats.gguf.export import TensorToWrite, write_gguf
from bitnet_ref.formats.gguf.file import GgufFile, Typed
from bitnet_ref.formats.open import ASSETS
from bitnet_ref.inspection import inspect_model
from bitnet_ref.inspection.judge import template_style
from bitnet_ref.reference.weights import TernaryWeight

GGUF = DATA / "gguf"
SUFFIXES = {"native": ".bitnet.safetensors", "native-base3": ".bitnet.safetensors", "onnx": "", "hf-packed": ""}
TARGETS = ("hf-packed", "native", "native-base3", "onnx", "gguf-i2_s", "gguf-tq1_0", "gguf-tq2_0", "gguf-f16")
Q_PROJ = "blk.0.attn_q.weight"


def messages(found, severity="warning"):
    return [f.message for f in found.findings if f.severity == severity]


def says(found, severity, words, field=None):
    """Whether there is a finding of that severity with those words, about that field."""
    return any(
        f.severity == severity and words in f.message and (field is None or field in (f.field or ""))
        for f in found.findings
    )


@pytest.fixture(scope="module")
def formats(tmp_path_factory):
    """The shipped model in each format."""
    folder = tmp_path_factory.mktemp("formats")
    paths = {}
    for target in TARGETS:
        if target == "onnx":
            pytest.importorskip("onnx")
        paths[target] = folder / f"{target}{SUFFIXES.get(target, '.gguf')}"
        convert("storyteller", paths[target], target, verify=False)
    return paths


def changed(path, source, values=None, drop=(), data=None, types=None):
    """A copy of a GGUF with other metadata, without some keys or tensors, with some tensors' bytes changed."""
    data, types = data or {}, types or {}
    with GgufFile(source) as file:
        typed = {key: value for key, value in (file.typed | (values or {})).items() if key not in drop}

        def produce(name):
            raw = file.read_raw(name)
            return data[name](raw) if name in data else raw

        kept = [
            TensorToWrite(t.name, t.shape, types.get(t.name, t.type.name), lambda n=t.name: produce(n))
            for t in file.tensors.values()
            if t.name not in drop
        ]
        write_gguf(path, typed, kept)
    return path


# -- what it says of good files ----------------------------------------------------------------------------------------


@pytest.mark.sample(12)
@pytest.mark.parametrize("target", TARGETS)
def test_every_format_is_what_load_makes_of_it(formats, target):
    found, model = inspect_model(formats[target]), bitnet_ref.load(formats[target], backend="numpy", threads=1)
    assert found.errors == found.warnings == []
    assert found.kind == target.removesuffix("-base3")
    assert found.config == model.config
    assert found.parameters == inspect_model("storyteller").parameters
    assert found.nbytes == sum(size.nbytes for size in found.sizes) == sum(t.nbytes for t in found.tensors)
    assert {size.kind for size in found.sizes} >= {"embedding", "norms"}
    expected = {name: w for name, w in model.weights.linears() if isinstance(w, TernaryWeight)}
    assert {m.name: m.w_dequant_scale for m in found.ternary} == {n: w.w_dequant_scale for n, w in expected.items()}
    for matrix in found.ternary:
        w_t = expected[matrix.name].ternary()
        assert [matrix.minus, matrix.zero, matrix.plus] == [int((w_t == value).sum()) for value in (-1, 0, 1)]
    assert (found.tokenizer.vocab_size, found.tokenizer.adds_bos, found.stop_token_ids) == (4096, True, (2,))
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.thorough
def test_words_for_each_format(formats):
    words = {
        "native": ("native, version 1", "packed to 2 bits", "wherever the model came from"),
        "native-base3": ("native, version 1", "in base 3", "w_dequant_scale"),
        "onnx": ("written by bitnet_ref", "constants of the graph", "multiply"),
        "gguf-i2_s": ("GGUF version 3", "I2_S, 2 bits", "behind the codes"),
        "gguf-tq1_0": ("GGUF version 3", "TQ1_0", "float16 in every block of 256"),
        "gguf-tq2_0": ("GGUF version 3", "TQ2_0", "float16 in every block of 256"),
        "gguf-f16": ("GGUF version 3", "ternary, stored as floats", "-s, 0 and +s"),
    }
    for target, (form, stored, scales) in words.items():
        found = inspect_model(formats[target])
        assert form in found.format
        assert stored in found.quantization
        assert scales in found.scale_convention
        assert form in found._repr_html_()
        if target.startswith("gguf"):
            assert "the architecture bitnet-b1.58 means it" in found.activation
            assert "SentencePiece (tokenizer.ggml.model llama" in found.tokenizer.kind
            assert found.metadata["tokenizer.ggml.tokens"] == "[string] of 4096"


def test_evidence(formats):
    i2_s = " ".join(inspect_model(formats["gguf-i2_s"]).evidence)
    assert "dialect: bitnet.cpp" in i2_s
    assert "I2_S layout: x86, by the weights' columns" in i2_s
    assert "only -s, 0 and +s" in " ".join(inspect_model(formats["gguf-f16"]).evidence)
    assert "content hash holds" in " ".join(inspect_model(formats["native"]).evidence)


@pytest.mark.parametrize("kind", ["f16", "i2_s", "tq1_0", "tq2_0"])
def test_files_of_other_tools(kind):
    found = inspect_model(GGUF / f"{kind}.gguf")
    assert (found.errors, found.kind, found.architecture) == ([], f"gguf-{kind}", "bitnet-b1.58")
    assert len(found.ternary) == 14
    assert says(found, "warning", "only token ids can go in")
    assert says(found, "note", "1 part in 2048") == kind.startswith("tq")
    assert says(found, "warning", "--i2s-layout") == (kind == "i2_s")  # random weights: nothing tells the layout


def test_a_layout_that_was_asked_for():
    options = LoadOptions(i2_s_layout="arm")
    found = inspect_model(GGUF / "i2_s.gguf", options=options)
    assert "I2_S layout: arm, as it was asked for" in found.evidence
    assert not says(found, "warning", "--i2s-layout")


def test_an_onnx_folder_is_its_model_file(formats):
    assert inspect_model(formats["onnx"]).path.endswith("model.onnx")


def test_a_dense_gguf(tmp_path):
    path = tmp_path / "dense.gguf"
    convert(write_checkpoint(tmp_path / "m", TINY), path, "gguf-f16", verify=False)
    found = inspect_model(path)
    assert (found.errors, found.ternary, found.scale_convention) == ([], [], "no scales")
    assert found.quantization == "none: a dense model"
    assert "LLaMA, dense" in found.family


# -- suspicious, but loadable ------------------------------------------------------------------------------------------


def test_the_published_2b4t_file(tmp_path, formats):
    """Its two known faults: the older template, and no tokenizer.ggml.pre."""
    old = "{% for m in messages %}Human: {{ m.content }}\n\nBITNETAssistant: {% endfor %}"
    template = {"tokenizer.chat_template": Typed("string", old)}
    found = inspect_model(changed(tmp_path / "m.gguf", formats["gguf-i2_s"], template))
    assert found.tokenizer.template_style.startswith("an old one")
    assert says(found, "warning", "Role: content<|eot_id|>", "chat_template")
    pre = {"tokenizer.ggml.model": Typed("string", "gpt2")}
    found = inspect_model(changed(tmp_path / "p.gguf", formats["gguf-i2_s"], pre, drop=["tokenizer.ggml.pre"]))
    assert says(found, "warning", "the key is absent", "tokenizer.ggml.pre")
    assert not says(found, "warning", "llama-bpe is assumed", "tokenizer.ggml.pre")  # it has another number of tokens


@pytest.mark.parametrize(
    ("template", "style"),
    [
        (None, None),
        ("{{ '<|im_start|>' }}", "ChatML"),
        ("<|start_header_id|>", "Llama 3"),
        ("[INST]", "Llama 2"),
        ("{{ m.role | capitalize }}: {{ m.content }}<|eot_id|>", "BitNet 2B-4T"),
        ("{{ m.content }}", "of its own"),
    ],
)
def test_known_templates(template, style):
    found = template_style(template)
    assert found is None if style is None else found.startswith(style)


@pytest.mark.parametrize("number", [0, 300])
def test_an_end_of_turn_that_no_key_names(number, tmp_path, formats):
    with GgufFile(formats["gguf-i2_s"]) as file:
        tokens = list(file.metadata["tokenizer.ggml.tokens"])
        types = file.metadata["tokenizer.ggml.token_type"].copy()
    tokens[number], types[number] = "<|eot_id|>", 3
    values = {
        "tokenizer.ggml.tokens": Typed("[string]", tokens),
        "tokenizer.ggml.token_type": Typed("[int32]", types),
    }
    found = inspect_model(changed(tmp_path / "m.gguf", formats["gguf-i2_s"], values))
    assert found.stop_token_ids == (2, number)
    assert says(found, "note", f"no key says that <|eot_id|> ({number}) ends a turn", "eot_token_id")


@pytest.mark.parametrize(("target", "padding"), [("native", 1.0), ("native-base3", 1.0101)])
def test_the_parameters_of_a_file_whose_configuration_is_damaged(target, padding, tmp_path, formats):
    """They are counted by bytes: rows of 256 are padded to 260 in base 3."""
    path = tmp_path / "m.bitnet.safetensors"
    path.write_bytes(formats[target].read_bytes().replace(b"num_hidden_layers", b"num_hidden_lalers"))
    found = inspect_model(path)
    assert found.config is None
    assert found.parameters == pytest.approx(padding * inspect_model(formats[target]).parameters, rel=1e-5)


@pytest.mark.parametrize(
    ("architecture", "shape", "trained"),
    [("bitnet", (30, 2560, 6912), "relu2"), ("bitnet-b1.58", (24, 1536, 4096), "silu")],
)
def test_an_architecture_that_means_the_wrong_gate(architecture, shape, trained, monkeypatch, tmp_path):
    """The bug of 2026: a file of 2B-4T named `bitnet`. The known shape is that of the small file for this test."""
    from bitnet_ref.inspection import judge

    with GgufFile(GGUF / "tq2_0.gguf") as file:
        renamed = {key.replace("bitnet-b1.58", architecture): value for key, value in file.typed.items()}
        old = [key for key in file.typed if key not in renamed]
    renamed["general.architecture"] = Typed("string", architecture)
    path = changed(tmp_path / "m.gguf", GGUF / "tq2_0.gguf", renamed, drop=old)
    assert not says(inspect_model(path), "warning", "plausible")
    monkeypatch.setattr(judge, "KNOWN_SHAPES", {(2, 256, 768): judge.KNOWN_SHAPES[shape]})
    found = inspect_model(path)
    assert says(found, "warning", f"trained with {trained}", "general.architecture")
    assert f"the architecture {architecture} means" in found.activation


@pytest.mark.parametrize(("activation", "is_said"), [("relu2", False), ("silu", True)])
def test_an_activation_that_is_not_the_architectures(activation, is_said, tmp_path):
    key = "bitnet-b1.58.hidden_activation"
    path = changed(tmp_path / "m.gguf", GGUF / "tq2_0.gguf", {key: Typed("string", activation)})
    assert bool(says(inspect_model(path), "warning", f"says {activation}, which is used", key)) == is_said


def test_theta(tmp_path, monkeypatch):
    from bitnet_ref.inspection import judge

    drop = ["bitnet-b1.58.rope.freq_base"]
    path = changed(tmp_path / "m.gguf", GGUF / "tq2_0.gguf", drop=drop)
    found = inspect_model(path)
    assert found.config.rope.theta == 10000
    assert says(found, "note", "theta 10000", "rope.freq_base")
    assert not says(found, "warning", "theta 500000")
    monkeypatch.setattr(judge, "LLAMA3_VOCAB", 512)
    assert says(inspect_model(path), "warning", "theta 500000", "rope_theta")


def test_a_quantised_head(tmp_path):
    name = "token_embd.weight"
    with GgufFile(GGUF / "i2_s.gguf") as file:
        raw = quantize(file.read(name), "Q8_0")
    path = changed(tmp_path / "m.gguf", GGUF / "i2_s.gguf", data={name: lambda _: raw}, types={name: "Q8_0"})
    found = inspect_model(path)
    assert found.errors == []
    assert says(found, "warning", "the head too, is quantised to Q8_0", name)


def test_a_ternary_head(tmp_path):
    quantized = {**BITNET["quantization_config"], "modules_to_not_convert": ["none"]}
    config = {**BITNET, "tie_word_embeddings": False, "quantization_config": quantized}
    tensors = tiny_tensors(config)
    tensors["lm_head.weight"] = np.full((10, 16), 0x1A, dtype=np.uint8)
    tensors["lm_head.weight_scale"] = np.ones(1, dtype=np.float32)
    found = inspect_model(write_checkpoint(tmp_path / "m", config, tensors))
    assert found.errors == []
    assert says(found, "warning", "the head is ternary", "lm_head")


def test_a_scale_far_off(tmp_path):
    scale = np.array([2.5], dtype="<f4").view(np.uint8)
    path = changed(tmp_path / "m.gguf", GGUF / "i2_s.gguf", data={Q_PROJ: put(np.s_[-32:-28], scale)})
    found = inspect_model(path)
    assert [f.field for f in found.warnings if "far from the others" in f.message] == ["blocks.0.attn.q_proj"]
    median = np.median([matrix.w_dequant_scale for matrix in found.ternary])
    for number, (factor, is_far) in enumerate(((50.5, True), (49.5, False), (1 / 50.5, True), (1 / 49.5, False))):
        scale = np.array([median * factor], dtype="<f4").view(np.uint8)
        other = changed(tmp_path / f"{number}.gguf", GGUF / "i2_s.gguf", data={Q_PROJ: put(np.s_[-32:-28], scale)})
        assert says(inspect_model(other), "warning", "far from the others") == is_far


def test_scales_read_the_wrong_way(tmp_path):
    """The divide checkpoint with the linear class that multiplies: one word in config.json."""
    folder = tmp_path / "m"
    shutil.copytree(GOLDEN / "llama-packed-bitlinear", folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= {"linear_class": "autobitlinear", "quantization_mode": "offline"}
    (folder / "config.json").write_text(json.dumps(config))
    assert says(inspect_model(folder), "warning", "the other way")
    assert not says(inspect_model(GOLDEN / "llama-packed-bitlinear"), "warning", "the other way")


# -- what load refuses -------------------------------------------------------------------------------------------------

BROKEN = {
    "code 3": ({"data": {Q_PROJ: put(5, 0xFF)}}, Q_PROJ, "invalid ternary code 3"),
    "a NaN scale": ({"data": {Q_PROJ: put(np.s_[-32:-28], [0, 0, 0xC0, 0x7F])}}, Q_PROJ, "scale above zero"),
    "a scale of zero": ({"data": {Q_PROJ: put(np.s_[-32:-28], 0)}}, Q_PROJ, "scale above zero"),
    "a NaN in a norm": (
        {"data": {"blk.1.ffn_norm.weight": put(np.s_[4:8], [0, 0, 0xC0, 0x7F])}},
        "blk.1.ffn_norm.weight",
        "finite",
    ),
    "Inf in the embedding": (
        {"data": {"token_embd.weight": put(np.s_[514:516], [0x00, 0x7C])}},
        "token_embd.weight",
        "first at index [1, 1]",
    ),
    "a missing linear": ({"drop": ["blk.1.ffn_up.weight"]}, "blk.1.ffn_up.weight", "missing"),
    "a missing layer": (
        {"drop": [f"blk.1.{n}.weight" for n in ("attn_q", "attn_k", "attn_v")]},
        "blk.1.attn_q.weight",
        "missing",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_names_what_load_refuses_and_reports_the_rest(tmp_path, name):
    change, field, words = BROKEN[name]
    path = changed(tmp_path / "m.gguf", GGUF / "i2_s.gguf", **change)
    with pytest.raises(BitNetRefError):
        bitnet_ref.load(path, backend="numpy")
    found = inspect_model(path)
    assert says(found, "error", words, field)
    assert found.config is not None
    assert len(found.ternary) == 14 - len(change.get("drop", ()))
    assert found.tensors
    json.dumps(found.to_dict(), allow_nan=False)


def test_code_3_is_counted_where_it_is(tmp_path):
    path = changed(tmp_path / "m.gguf", GGUF / "i2_s.gguf", data={Q_PROJ: put(5, 0xFF)})
    found = inspect_model(path)
    assert {m.name: m.invalid for m in found.ternary if m.invalid} == {"blocks.0.attn.q_proj": 4}
    assert "I2_S layout: not decided, because a matrix could not be read" in found.evidence


def test_shares_of_a_model_that_cannot_be_opened(tmp_path):
    values = {"general.architecture": Typed("string", "gpt2")}
    found = inspect_model(changed(tmp_path / "m.gguf", GGUF / "tq2_0.gguf", values))
    assert says(found, "error", "is not supported; expected one of", "general.architecture")
    assert (found.config, found.architecture, found.kind) == (None, "gpt2", None)
    whole = {m.name: m.shares for m in inspect_model(GGUF / "tq2_0.gguf").ternary}
    assert {m.name: m.shares for m in found.ternary} == whole
    (said,) = inspect_model(changed(tmp_path / "other.gguf", GGUF / "i2_s.gguf", values)).evidence
    assert "dialect: bitnet.cpp" in said


def test_mxfp4_is_named(tmp_path):
    """Type 39 is TL2 in one dialect and MXFP4 in the other."""
    data = bytearray((GGUF / "tq2_0.gguf").read_bytes())
    at = data.index(Q_PROJ.encode()) + len(Q_PROJ) + 4 + 16  # behind the rank and two dimensions
    assert data[at] == BY_NAME["TQ2_0"].id
    data[at] = 39
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    found = inspect_model(path)
    assert says(found, "error", "MXFP4", Q_PROJ)


def test_an_end_token_that_is_an_array(tmp_path, formats):
    """Found by fuzzing: it cannot be looked up in a set."""
    values = {"tokenizer.ggml.eos_token_id": Typed("[int32]", np.array([2, 3], dtype=np.int32))}
    found = inspect_model(changed(tmp_path / "m.gguf", formats["gguf-i2_s"], values))
    assert says(found, "error", "expected a token id", "eos_token_id")
    assert len(found.ternary) == 42


def test_a_tokenizer_model_that_is_an_array(tmp_path, formats):
    array = {"tokenizer.ggml.model": Typed("[uint32]", [1, 2])}
    path = changed(tmp_path / "m.gguf", formats["gguf-i2_s"], array)
    assert "tokenizer.ggml.model" in {finding.field for finding in inspect_model(path).findings}


@pytest.mark.parametrize("suffix", [".gguf", ".bitnet.safetensors", ".onnx"])
@pytest.mark.parametrize("data", [b"", b"GGUF", b"\x00" * 100, b"\x08\x01\xff\xff"])
def test_files_that_are_no_models(tmp_path, suffix, data):
    pytest.importorskip("onnx")
    path = tmp_path / f"m{suffix}"
    path.write_bytes(data)
    found = inspect_model(path)
    assert found.errors
    assert (found.tensors, found.config, found.parameters) == ([], None, None)
    assert found.format.lower().startswith(suffix.strip(".")[:4].replace("bitn", "nati"))


def test_a_native_file_with_a_flipped_bit(tmp_path, formats):
    """Another weight, a valid one: only the content hash knows."""
    path = tmp_path / "m.bitnet.safetensors"
    data = bytearray(formats["native"].read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    start = 8 + int.from_bytes(data[:8], "little") + header["blocks.2.mlp.up_proj.packed"]["data_offsets"][0]
    data[start] = 0x55 if data[start] != 0x55 else 0x56
    path.write_bytes(data)
    found = inspect_model(path)
    assert says(found, "error", "changed or damaged", "content_hash")
    assert len(found.ternary) == 42


def test_a_native_file_of_a_newer_version(tmp_path, formats):
    path = tmp_path / "m.bitnet.safetensors"
    path.write_bytes(formats["native"].read_bytes().replace(b'"format_version":"1"', b'"format_version":"9"'))
    found = inspect_model(path)
    assert says(found, "error", "install a newer bitnet_ref", "format_version")
    assert {size.kind for size in found.sizes} >= {"ternary planes", "tokenizer"}


def test_an_onnx_file_with_a_scale_of_zero(tmp_path, formats):
    onnx = pytest.importorskip("onnx")
    for file in formats["onnx"].iterdir():
        shutil.copy(file, tmp_path)
    proto = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    scale = next(t for t in proto.graph.initializer if t.name == "model.layers.1.mlp.up_proj.weight_scale")
    scale.CopyFrom(onnx.numpy_helper.from_array(np.zeros((), dtype=np.float32), scale.name))
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    found = inspect_model(tmp_path)
    assert says(found, "error", "scale above zero", "blocks.1.mlp.up_proj")
    assert len(found.errors) == 1
    assert len(found.ternary) == 41


def test_an_onnx_file_of_too_few_layers(tmp_path, formats):
    onnx = pytest.importorskip("onnx")
    for file in formats["onnx"].iterdir():
        shutil.copy(file, tmp_path)
    proto = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    (entry,) = [entry for entry in proto.metadata_props if entry.key == "bitnet_ref.config"]
    entry.value = json.dumps({**json.loads(entry.value), "num_hidden_layers": 8})
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    found = inspect_model(tmp_path)
    assert [finding.message for finding in found.errors] == [
        "the configuration says 8 layers; there is no tensor of layers 6 to 7"
    ]
    assert len(found.ternary) == 42


def test_a_tokenizer_that_is_damaged(tmp_path, formats):
    values = {"tokenizer.ggml.scores": Typed("[uint8]", np.zeros(4096, dtype=np.uint8))}
    found = inspect_model(changed(tmp_path / "m.gguf", formats["gguf-tq1_0"], values))
    assert [(f.part, f.type) for f in found.errors] == [("tokenizer", "TokenizerError")]
    assert len(found.ternary) == 42


def test_shipped_assets_are_untouched():
    assert inspect_model(ASSETS / "storyteller").findings == []
