"""Models in GGUF files: the golden files of bitnet.cpp's and llama.cpp's quantisers, both ways to the byte."""

from types import SimpleNamespace

import numpy as np
import pytest
from helpers import BITNET, DATA, GOLDEN, TINY, cut_to, golden, model, rng, tiny_tensors, write_checkpoint
from safetensors.numpy import load_file

import bitnet_ref
from bitnet_ref.errors import ConfigError, FormatError, NumericsError
from bitnet_ref.families.groups import GroupTernaryWeight
from bitnet_ref.families.rope import StretchedRope
from bitnet_ref.formats.checkpoint import LoadOptions, parts, read_weights, scale_convention
from bitnet_ref.formats.convert import convert
from bitnet_ref.formats.gguf import evidence
from bitnet_ref.formats.gguf.blocks import MXFP4, TYPES
from bitnet_ref.formats.gguf.config import _Keys, ignored_by_llama_cpp, llama3_divisors, shortest
from bitnet_ref.formats.gguf.evidence import (
    block_linears,
    check_dialect,
    find_i2_s_layout,
    permute_rows,
    unpermute_rows,
)
from bitnet_ref.formats.gguf.export import KINDS, TensorToWrite, write_gguf, write_gguf_model
from bitnet_ref.formats.gguf.file import GgufFile, Typed
from bitnet_ref.formats.gguf.i2_s import LAYOUTS, pack_i2_s
from bitnet_ref.formats.gguf.model import GgufCheckpoint
from bitnet_ref.formats.hf.config import parse_hf_config
from bitnet_ref.formats.names import linear_of_gguf
from bitnet_ref.formats.open import ASSETS, open_checkpoint
from bitnet_ref.reference.config import RopeConfig
from bitnet_ref.reference.quantization import quantize_weights, unpack_ternary
from bitnet_ref.reference.weights import DenseWeight, TernaryWeight
from bitnet_ref.system.options import declared_options

GGUF = DATA / "gguf"
GOLDEN_KINDS = ("f16", "i2_s", "tq1_0", "tq2_0")
TOLERANCE = 2e-4  # see test_golden.py
TOKENS = [1, 3, 2, 5, 39, 7]
NO_VOCABULARY = {"tokenizer.ggml.model": Typed("string", "no_vocab")}
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
ONLINE = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}


def export(folder, path, kind, **options):
    with open_checkpoint(folder) as checkpoint:
        write_gguf_model(checkpoint, path, kind, **options)
    return path


def evidence_of(path, **options):
    with GgufCheckpoint(path, LoadOptions(**options)) as checkpoint:
        read_weights(checkpoint)
        return checkpoint.evidence


def changed(path, source, values=(), drop=(), tensors=None):
    """A copy of a GGUF with other metadata, without some keys or tensors, with other or more tensors."""
    tensors = dict(tensors or {})
    with GgufFile(source) as file:
        typed = {k: v for k, v in (file.typed | dict(values)).items() if k not in drop}
        kept = [
            TensorToWrite(t.name, t.shape, t.type.name, lambda n=t.name: file.read_raw(n), t.nbytes)
            for t in file.tensors.values()
            if t.name not in drop and t.name not in tensors
        ]
        more = [
            TensorToWrite(n, shape, kind, lambda d=data: d, data.size) for n, (shape, kind, data) in tensors.items()
        ]
        write_gguf(path, typed, kept + more)
    return path


def f32(*values):
    return (len(values),), "F32", np.array(values, dtype=np.float32).view(np.uint8)


# -- the golden files --------------------------------------------------------------------------------------------------


@pytest.mark.quick_emulated
@pytest.mark.parametrize("kind", GOLDEN_KINDS)
def test_golden_logits(kind, backend_name):
    expected = load_file(GGUF / f"golden-{kind}.safetensors")
    logits = model(GGUF / f"{kind}.gguf", backend_name).logits(expected["tokens"])
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=TOLERANCE)


def test_dequantised_floats_are_the_ternary_model():
    tokens = load_file(GGUF / "golden-f16.safetensors")["tokens"]
    i2_s = model(GGUF / "i2_s.gguf").logits(tokens)
    np.testing.assert_array_equal(model(GGUF / "f16.gguf").logits(tokens), i2_s)


@pytest.mark.parametrize("kind", GOLDEN_KINDS)
def test_written_to_the_byte(kind, tmp_path):
    """From the Hugging Face checkpoint, what bitnet.cpp's and llama.cpp's own tools wrote from it."""
    written = export(GOLDEN / "bitnet-packed-offline", tmp_path / "x.gguf", kind, tokenizer=NO_VOCABULARY)
    assert written.read_bytes() == (GGUF / f"{kind}.gguf").read_bytes()


@pytest.mark.parametrize("kind", GOLDEN_KINDS)
def test_from_gguf_to_gguf(kind, tmp_path):
    for source in GOLDEN_KINDS:
        written = export(GGUF / f"{source}.gguf", tmp_path / f"{source}.gguf", kind, tokenizer=NO_VOCABULARY)
        assert written.read_bytes() == (GGUF / f"{kind}.gguf").read_bytes()


def test_what_is_said(tmp_path):
    with GgufCheckpoint(GGUF / "i2_s.gguf") as checkpoint:
        assert checkpoint.kind == "gguf-i2_s"
        assert checkpoint.metadata["tokenizer.ggml.model"] == "no_vocab"
        dialect, layout = checkpoint.evidence
        assert "bitnet.cpp" in dialect
        assert "x86 assumed" in layout
    path = changed(tmp_path / "x.gguf", GGUF / "i2_s.gguf", drop=["blk.0.attn_norm.weight"])
    with GgufCheckpoint(path) as checkpoint:  # the other matrices and norms are compared
        assert "x86 assumed" in checkpoint.evidence[1]
    assert any("only -s, 0 and +s" in words for words in evidence_of(GGUF / "f16.gguf"))
    assert evidence_of(GGUF / "tq2_0.gguf") == []


def test_the_names_of_linears():
    """A router has rows and columns too."""
    names = {
        "blk.3.attn_output": "blocks.3.attn.o_proj",
        "blk.0.ffn_down": "blocks.0.mlp.down_proj",
        **dict.fromkeys(("blk.0.attn_norm", "blk.0.ffn_gate_inp", "blk.0.", "output"), None),
    }
    assert {name: linear_of_gguf(f"{name}.weight") for name in names} == names


def test_the_configuration():
    config = model(GGUF / "tq1_0.gguf").config
    expected = model(GOLDEN / "bitnet-packed-offline").config
    assert config.bos_token_id is None  # the file has no such key
    for field in ("activation", "sub_norms", "norm_eps", "rope", "quantization", "head_dim", "tie_word_embeddings"):
        assert getattr(config, field) == getattr(expected, field), field


# -- every family, there and back --------------------------------------------------------------------------------------

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES = {
    "llama": {**TINY, **WIDE},
    "llama head_dim": {**TINY, **WIDE, "head_dim": 32},
    "llama tied": {**TINY, **WIDE, "tie_word_embeddings": True},
    "llama ternary": {**TINY, **WIDE, "quantization_config": ONLINE},
    "llama3 rope": {
        **TINY,
        **WIDE,
        "head_dim": 64,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192},
    },
    "yarn": {**TINY, **WIDE, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "yarn, own factor": {
        **TINY,
        **WIDE,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.5, "beta_fast": 20.0, "beta_slow": 2.0},
    },
    "linear": {**TINY, **WIDE, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "mistral": {**TINY, **WIDE, "model_type": "mistral", "sliding_window": 3},
    "1bitLLM": {**TINY, **WIDE, "weight_bits": 1, "input_bits": 8, "tie_word_embeddings": True},
    "bitnet": {**BITNET, **WIDE},
}


def write_family(folder, config):
    tensors = tiny_tensors(config)
    if "weight_bits" in config:
        for i in range(config["num_hidden_layers"]):
            for name, size in (("self_attn.inner_attn_ln", 256), ("mlp.ffn_layernorm", 512)):
                tensors[f"model.layers.{i}.{name}.weight"] = (1 + rng(i).random(size)).astype(np.float32)
    return write_checkpoint(folder, config, tensors)


def test_the_key_of_yarns_own_factor(tmp_path):
    """llama.cpp reads it for every architecture; yarn_attn_factor it reads for a few, not these."""
    folder = write_family(tmp_path / "hf", FAMILIES["yarn, own factor"])
    with GgufFile(export(folder, tmp_path / "x.gguf", "f32", dense_type="F32")) as file:
        keys = {key.removeprefix("llama.rope.scaling."): value for key, value in file.metadata.items()}
    assert keys["attn_factor"] == pytest.approx(1.5 / (0.1 * np.log(4.0) + 1))
    assert "yarn_attn_factor" not in keys


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, tmp_path):
    """f32 loses nothing: the same configuration, the same weights to the bit, q and k in our order again."""
    folder = write_family(tmp_path / "hf", FAMILIES[family])
    path = export(folder, tmp_path / "x.gguf", "f32", dense_type="F32")
    with open_checkpoint(folder) as a, open_checkpoint(path) as b:
        for field in ("rope", "head_dim", "sliding_window", "norm_eps", "activation", "bos_token_id", "eos_token_ids"):
            assert getattr(a.config, field) == getattr(b.config, field), field
        assert (a.config.quantization is None) == (b.config.quantization is None)
        for (name, one), (other_name, other) in zip(parts(a), parts(b), strict=True):
            assert name == other_name
            if isinstance(one, TernaryWeight):
                np.testing.assert_array_equal(one.packed, other.packed, err_msg=name)
                assert one.w_dequant_scale == other.w_dequant_scale
            else:
                one, other = (getattr(w, "array", w).astype(np.float32) for w in (one, other))
                np.testing.assert_array_equal(one, other, err_msg=name)
    np.testing.assert_array_equal(
        bitnet_ref.load(folder, backend="numpy").logits(TOKENS), bitnet_ref.load(path, backend="numpy").logits(TOKENS)
    )


WINDOW = {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 0}
YARN = {"rope_type": "yarn", "factor": 4.0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True}


@pytest.mark.parametrize(
    ("keys", "architecture"),
    [
        ({"model_type": "mistral", "sliding_window": 5}, "llama"),
        ({"model_type": "mixtral", "sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2}, "llama"),
        ({"model_type": "qwen2", **WINDOW}, "qwen2"),
        ({"model_type": "qwen3", **WINDOW}, "qwen3"),
        ({"model_type": "qwen3_moe", **WINDOW, **EXPERTS}, "qwen3moe"),
        ({"model_type": "smollm3", **WINDOW, "layer_types": ["sliding_attention"] * 2}, "smollm3"),
        ({"model_type": "mistral", "sliding_window": 64}, None),  # the whole context
        ({"model_type": "qwen3", **WINDOW, "use_sliding_window": False}, None),
        ({"model_type": "gemma3_text", "sliding_window": 5, "query_pre_attn_scalar": 4}, None),
    ],
)
def test_windows_that_llama_cpp_ignores(keys, architecture, tmp_path):
    sentences = ignored_by_llama_cpp(parse_hf_config({**TINY, "head_dim": 4, **keys}, tmp_path))
    assert [f"of the architecture {architecture} " in words for words in sentences] == [True] * bool(architecture)


def test_yarns_ramp_that_llama_cpp_ignores(tmp_path):
    for betas, count in (
        ({}, 0),
        ({"beta_fast": 32, "beta_slow": 1}, 0),
        ({"beta_fast": 16}, 1),
        ({"beta_slow": 2}, 1),
    ):
        config = parse_hf_config({**TINY, "rope_scaling": {**YARN, **betas}}, tmp_path)
        assert ["takes 32 and 1 for yarn's" in words for words in ignored_by_llama_cpp(config)] == [True] * count


def test_biases(tmp_path):
    path = export(GOLDEN / "llama-bf16-biases", tmp_path / "x.gguf", "f32", dense_type="F32")
    tokens = golden("llama-bf16-biases")["tokens"]
    expected = model(GOLDEN / "llama-bf16-biases").logits(tokens)
    np.testing.assert_array_equal(bitnet_ref.load(path, backend="numpy").logits(tokens), expected)


@pytest.mark.parametrize("kind", ["i2_s", "tq1_0", "tq2_0", "f32"])
def test_the_storyteller(kind, tmp_path):
    path = export(ASSETS / "storyteller", tmp_path / "x.gguf", kind, dense_type="F32")
    with open_checkpoint(ASSETS / "storyteller") as a, open_checkpoint(path) as b:
        assert a.config == b.config
        for (_, one), (_, other) in zip(parts(a), parts(b), strict=True):
            if isinstance(one, TernaryWeight):
                np.testing.assert_array_equal(one.packed, other.packed)
                rounded = np.float16(one.w_dequant_scale) if kind.startswith("tq") else one.w_dequant_scale
                assert other.w_dequant_scale == rounded


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0"])
def test_dense_kinds_are_near(kind, tmp_path):
    folder = write_family(tmp_path / "hf", FAMILIES["llama"])
    path = export(folder, tmp_path / "x.gguf", kind, dense_type=kind)
    expected = bitnet_ref.load(folder, backend="numpy").logits(TOKENS)
    got = bitnet_ref.load(path, backend="numpy").logits(TOKENS)
    assert np.abs(got - expected).max() < (0.2 if kind == "q8_0" else 1e-3)


def test_permutation_by_hand():
    """llama.cpp's converter: reshape (heads, 2, d/2), swap, so that the pairs of RoPE become neighbours."""
    rows = np.arange(8)[:, None]  # two heads of 4: pairs (0, 2), (1, 3) and (4, 6), (5, 7)
    assert permute_rows(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    np.testing.assert_array_equal(unpermute_rows(permute_rows(rows, 2), 2), rows)


def test_shortest():
    assert shortest(float(np.float32(1e-5))) == 1e-5
    assert shortest(float(np.float32(0.1))) == 0.1
    assert shortest(500000.0) == 500000.0
    assert shortest(0.1) == 0.1
    assert shortest(1e300) == 1e300


# -- what the file does not say ----------------------------------------------------------------------------------------


def test_how_the_options_are_called_in_the_shell():
    """flag, metavar, whether it takes no value, and its default; and what the shell does not have."""
    options = declared_options(LoadOptions)
    assert {name: (o.flag, o.metavar, o.is_flag, o.default) for name, o in options.items() if o.in_shell} == {
        "allow_unquantized": (None, None, False, False),
        "prepared": (None, None, True, False),
        "i2_s_layout": ("--i2s-layout", None, False, None),
        "tl_tiles": (None, None, False, None),
        "adapter": (None, "FOLDER", False, None),
        "activations": (None, None, False, "auto"),
        "rotation": (None, None, False, "stored"),
        "dense": (None, None, False, "stored"),
    }
    assert {name: o.default for name, o in options.items() if not o.in_shell} == {
        "verify": False,
        "share": False,
        "progress": None,
    }


def file_of(metadata=(), **types):
    """A file of tensors of these types, by the words of their names, as far as its evidence looks at it."""
    ids = {kind.name: kind for kind in TYPES.values()}
    tensors = {name: SimpleNamespace(name=name, type=ids[kind]) for name, kind in types.items()}
    return SimpleNamespace(metadata=dict(metadata), tensors=tensors)


BITNET_CPP = "GGUF dialect: bitnet.cpp (tensor type {} there, and unused in llama.cpp)"


@pytest.mark.parametrize(
    ("types", "words"),
    [
        ({}, []),
        ({"a": "F32", "b": "TQ2_0", "c": "TQ1_0", "d": "NVFP4"}, []),
        ({"a": "I2_S", "b": "TL2/MXFP4"}, [BITNET_CPP.format("36 is I2_S")]),
        ({"a": "I8_S"}, [BITNET_CPP.format("37 is I8_S")]),
        ({"a": "I8_S", "b": "TL1"}, [BITNET_CPP.format("38 is TL1")]),
        (
            {"a": "F32", "b": "TL2/MXFP4"},
            ["GGUF dialect: bitnet.cpp (tensor type 39 with a tensor b_scale is TL2, not MXFP4)"],
        ),
    ],
)
def test_the_dialect_of_type_ids(types, words):
    notes = []
    check_dialect(file_of(**types), notes)
    assert notes == words


def test_type_39_without_a_scale_is_llama_cpps():
    file, notes = file_of(a="TL2/MXFP4"), []
    file.tensors["a"].type = MXFP4
    check_dialect(file, notes)
    words = "tensor type 39 without a tensor of its scale is MXFP4, not TL2"
    assert notes == [f"GGUF dialect: llama.cpp ({words})"]


ASSUMED = "activations: int8, as each matrix has a single scale; if the model was trained with floats, as TriLM and "
ASSUMED += 'BitCPM were, load it with activations="float"'


@pytest.mark.parametrize(
    ("metadata", "in_doubt", "activations", "floats", "words"),
    [
        ({}, True, "auto", False, [ASSUMED]),
        ({}, False, "auto", False, []),
        ({"general.name": "My TriLM 99M"}, True, "auto", True, ["activations stay floats: the file's name says trilm"]),
        ({"general.name": "My TriLM 99M"}, False, "auto", False, []),
        ({"general.basename": "BitCPM4"}, True, "auto", True, ["activations stay floats: the file's name says bitcpm"]),
        (
            {"general.source.url": "https://hub/Spectra/x"},
            True,
            "auto",
            True,
            ["activations stay floats: the file's name says spectra"],
        ),
        ({"general.name": 7, "general.author": "trilm"}, True, "auto", False, [ASSUMED]),
        ({"general.name": "TriLM"}, True, "int8", False, ["activations: int8, as it was asked for"]),
        ({}, False, "float", True, ["activations: float, as it was asked for"]),
    ],
)
def test_how_inputs_are_taken(metadata, in_doubt, activations, floats, words):
    notes = []
    assert evidence._choose_float_inputs(file_of(metadata), in_doubt, activations, notes) is floats
    assert notes == words


@pytest.mark.parametrize(
    ("layers", "looked_at"),
    [
        (1, [0]),
        (2, [0, 1]),
        (8, [0, 1, 2, 3, 4, 5, 6, 7]),
        (9, [0, 1, 2, 3, 5, 6, 7, 8]),
        (30, [0, 4, 8, 12, 17, 21, 25, 29]),
    ],
)
def test_the_layers_that_show_a_layout(layers, looked_at, monkeypatch):
    """Eight of them, from the first to the last, until it is clear."""
    asked, notes = [], []
    monkeypatch.setattr(evidence, "_compare_layouts", lambda file, config, index, norm, comparison: asked.append(index))
    file, config = file_of(**{"blk.0.attn_q.weight": "I2_S"}), SimpleNamespace(num_hidden_layers=layers)
    file.tensors["blk.0.attn_q.weight"].shape = (4, 128)
    assert find_i2_s_layout(file, config, None, lambda name: None, notes) == "x86"
    assert asked == looked_at
    assert notes == ["I2_S layout: x86 assumed, as there was nothing to compare"]

    def decide(file, config, index, norm, comparison):
        asked.append(index)
        comparison.comparisons, comparison.sums["arm"] = 1, 50.0 * len(asked)

    asked.clear()
    monkeypatch.setattr(evidence, "_compare_layouts", decide)
    assert find_i2_s_layout(file, config, None, lambda name: None, notes) == "arm"
    assert asked == [0]
    assert find_i2_s_layout(file_of(), config, "arm", lambda name: None, notes) == "x86"  # nothing is in a layout


@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_of_a_trained_model_is_found(layout, tmp_path):
    source = export(ASSETS / "storyteller", tmp_path / "x86.gguf", "i2_s", dense_type="F32")
    path = changed(tmp_path / "x.gguf", source, tensors=in_layout(source, layout))
    assert any(f"layout: {layout}, by the weights" in words for words in evidence_of(path))
    expected = model("storyteller").logits(TOKENS)
    np.testing.assert_array_equal(bitnet_ref.load(path, backend="numpy").logits(TOKENS), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_can_be_forced(layout, tmp_path):
    source = GGUF / "i2_s.gguf"  # random weights, which do not show it
    path = changed(tmp_path / "x.gguf", source, tensors=in_layout(source, layout))
    assert any("as it was asked for" in words for words in evidence_of(path, i2_s_layout=layout))
    with GgufCheckpoint(path, LoadOptions(i2_s_layout=layout)) as a, GgufCheckpoint(source) as b:
        for (_, one), (_, other) in zip(parts(a), parts(b), strict=True):
            if isinstance(one, TernaryWeight):
                np.testing.assert_array_equal(one.packed, other.packed)
    with pytest.raises(ConfigError, match="x86, arm, interleaved"):
        GgufCheckpoint(path, LoadOptions(i2_s_layout="neon"))


def in_layout(source, layout):
    """The I2_S tensors of a file in another layout."""
    out = {}
    with GgufCheckpoint(source) as checkpoint:
        for tensor in block_linears(checkpoint.file):
            packed, scale = checkpoint._i2_s(tensor, tensor.shape)
            w_t = unpack_ternary(packed, tensor.shape[1])
            out[tensor.name] = (tensor.shape, "I2_S", pack_i2_s(w_t, float(scale), layout))
    return out


def with_masters(path, source, wanted=lambda name: True):
    """A copy whose chosen linears hold floats of many values."""
    masters = {}
    with GgufCheckpoint(source) as checkpoint:
        for tensor in block_linears(checkpoint.file):
            if wanted(tensor.name):
                values = rng(len(masters)).standard_normal(tensor.shape).astype(np.float32)
                masters[tensor.name] = (tensor.shape, "F32", values.reshape(-1).view(np.uint8))
    return changed(path, source, tensors=masters)


def test_masters_are_quantised_by_absmean(tmp_path):
    folder = write_family(tmp_path / "hf", FAMILIES["1bitLLM"])
    path = with_masters(tmp_path / "y.gguf", export(folder, tmp_path / "x.gguf", "f32"))
    with GgufCheckpoint(path) as checkpoint:
        assert any("master weights, quantised by absmean" in words for words in checkpoint.evidence)
        assert scale_convention(checkpoint.config.quantization) == "absmean"
        weight, master = (read("blocks.0.attn.v_proj") for read in (checkpoint.linear, checkpoint.master))
        w_t, scale = quantize_weights(master)
        np.testing.assert_array_equal(weight.ternary(), w_t)
        assert weight.w_dequant_scale == scale


def test_masters_among_ternary_matrices_are_refused(tmp_path):
    """In a BitNet's architecture; nothing says which of the two the others are."""
    path = with_masters(tmp_path / "x.gguf", GGUF / "i2_s.gguf", lambda name: name == "blk.1.ffn_up.weight")
    with pytest.raises(FormatError, match="F32 and not ternary") as caught:
        bitnet_ref.load(path, backend="numpy")
    assert caught.value.field == "blk.1.ffn_up.weight"


def test_a_float_matrix_that_is_ternary_only_where_it_begins(tmp_path):
    with GgufFile(GGUF / "f16.gguf") as file:
        w = file.read("blk.1.ffn_up.weight").astype(np.float32)
    w[-1, -1] = 0.7
    other = {"blk.1.ffn_up.weight": (w.shape, "F32", w.reshape(-1).view(np.uint8))}
    with pytest.raises(FormatError, match="where it begins"):
        bitnet_ref.load(changed(tmp_path / "x.gguf", GGUF / "f16.gguf", tensors=other), backend="numpy")


@pytest.mark.parametrize("kind", ["f32", "i2_s"])
def test_dense_modules_of_a_ternary_llama(kind, tmp_path):
    """modules_to_not_convert: F32 among ternary matrices, and dense when it is read again."""
    skips = {"quantization_config": {**ONLINE, "modules_to_not_convert": ["lm_head", "model.layers.1.mlp", "o_proj"]}}
    folder = write_family(tmp_path / "hf", {**FAMILIES["llama"], **skips})
    path = export(folder, tmp_path / "x.gguf", kind, dense_type="F32")
    with GgufCheckpoint(path) as checkpoint:
        assert isinstance(checkpoint.linear("blocks.1.mlp.up_proj"), DenseWeight)
        assert isinstance(checkpoint.linear("blocks.0.mlp.up_proj"), TernaryWeight)
        assert any("dense among ternary" in words for words in checkpoint.evidence)
    expected = bitnet_ref.load(folder, backend="numpy").logits(TOKENS)
    np.testing.assert_array_equal(bitnet_ref.load(path, backend="numpy").logits(TOKENS), expected)


def test_a_llama_in_ternary_blocks_of_several_scales(tmp_path):
    """What llama.cpp makes of a dense model that is asked to be TQ2_0: ternary by blocks, inputs in float."""
    folder = write_family(tmp_path / "hf", FAMILIES["llama"])
    path = export(folder, tmp_path / "x.gguf", "f32")
    name, shape = "blk.0.attn_q.weight", (256, 256)
    raw = rng(3).integers(0, 128, (256, 66), dtype=np.uint8) & 0b01_01_01_01
    raw[:, 64:] = (rng(4).random((256, 1)) + 0.5).astype(np.float16).view(np.uint8)
    path = changed(tmp_path / "y.gguf", path, tensors={name: (shape, "TQ2_0", raw.reshape(-1))})
    with GgufCheckpoint(path) as checkpoint:
        assert checkpoint.config.quantization is None
        assert "TQ2_0 with several scales" in checkpoint.evidence[0]
        assert isinstance(checkpoint.linear("blocks.0.attn.q_proj"), GroupTernaryWeight)
        assert isinstance(checkpoint.linear("blocks.0.attn.k_proj"), DenseWeight)
    assert np.isfinite(bitnet_ref.load(path, backend="numpy").logits(TOKENS)).all()


def test_a_bitnet_of_blocks_with_different_scales_is_refused(tmp_path):
    with GgufFile(GGUF / "tq2_0.gguf") as file:
        raw = file.read_raw("blk.1.ffn_up.weight")
        shape = file.tensors["blk.1.ffn_up.weight"].shape
    raw[64:66] = np.array([0.5], np.float16).view(np.uint8)
    path = changed(tmp_path / "x.gguf", GGUF / "tq2_0.gguf", tensors={"blk.1.ffn_up.weight": (shape, "TQ2_0", raw)})
    with pytest.raises(FormatError, match="TQ2_0 with several scales") as caught:
        bitnet_ref.load(path, backend="numpy")
    assert caught.value.field == "blk.1.ffn_up.weight"


def test_a_scale_apart(tmp_path):
    """Older converters of llama.cpp write the matrix as -1, 0, +1 and its scale in a tensor of its own."""
    with GgufCheckpoint(GGUF / "f16.gguf") as checkpoint:
        weight = checkpoint.linear("blocks.0.mlp.up_proj")
    plain = np.ascontiguousarray(weight.ternary(), dtype=np.float32).reshape(-1).view(np.uint8)
    apart = {"blk.0.ffn_up.weight": (weight.shape, "F32", plain), "blk.0.ffn_up.scale": f32(weight.w_dequant_scale)}
    path = changed(tmp_path / "x.gguf", GGUF / "f16.gguf", tensors=apart)
    expected = model(GGUF / "f16.gguf").logits(TOKENS)
    np.testing.assert_array_equal(bitnet_ref.load(path, backend="numpy").logits(TOKENS), expected)


def test_ends_of_turn(tmp_path):
    tokens = [f"t{i}" for i in range(512)]
    tokens[509] = "<|eot_id|>"
    values = {
        "tokenizer.ggml.tokens": Typed("[string]", tokens),
        "tokenizer.ggml.eos_token_id": Typed("uint32", 2),
    }
    path = changed(tmp_path / "x.gguf", GGUF / "tq2_0.gguf", values)
    with GgufCheckpoint(path) as checkpoint:
        assert checkpoint.config.eos_token_ids == (2, 509)
    values["tokenizer.ggml.eot_token_id"] = Typed("uint32", 7)
    values["tokenizer.ggml.bos_token_id"] = Typed("uint32", 1)
    with GgufCheckpoint(changed(path, GGUF / "tq2_0.gguf", values)) as checkpoint:
        assert checkpoint.config.eos_token_ids == (2, 7)
        assert checkpoint.config.bos_token_id == 1


# -- TL1 and TL2 -------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["tl1", "tl2"])
def test_lookup_table_types(kind, tmp_path):
    pytest.importorskip("bitnet_ref.formats.gguf.tl", reason="the TL codecs are not here")
    config = {
        **BITNET,
        "hidden_size": 1536,
        "intermediate_size": 1536,
        "num_hidden_layers": 1,
        "num_key_value_heads": 4,
    }
    folder = write_checkpoint(tmp_path / "hf", config)
    path = export(folder, tmp_path / "x.gguf", kind, dense_type="F32")
    said = evidence_of(path)
    assert "dialect: bitnet.cpp" in said[0]
    assert any(f"{kind.upper()} tiles of [1536, 1536]" in words for words in said)
    expected = bitnet_ref.load(folder, backend="numpy").logits(TOKENS)
    np.testing.assert_array_equal(bitnet_ref.load(path, backend="numpy").logits(TOKENS), expected)


def test_type_39_without_a_scale_is_mxfp4(tmp_path):
    """Read by the package gguf's decoder; a tensor too short for it is refused."""
    gguf = pytest.importorskip("gguf")
    name, source = "blk.0.ffn_up.weight", tmp_path / "dense.gguf"
    config = TINY | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    export(write_checkpoint(tmp_path / "hf", config, tiny_tensors(config)), source, "f32")
    raw = rng(39).integers(0, 125, (96, 2 * 17), dtype=np.uint8)
    tensors = {name: ((96, 64), "MXFP4", raw.reshape(-1))}
    path = changed(tmp_path / "x.gguf", source, tensors=tensors)
    with GgufCheckpoint(path) as checkpoint:
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.MXFP4)
        np.testing.assert_array_equal(checkpoint.linear("blocks.0.mlp.up_proj").array, expected)
        assert any("MXFP4, not TL2" in words for words in checkpoint.evidence)
    assert bitnet_ref.load(path, backend="numpy").config.quantization is None
    short = {name: ((768, 256), "TL2/MXFP4", np.zeros(32, np.uint8))}
    with pytest.raises(FormatError, match="MXFP4 of shape"):
        GgufCheckpoint(changed(tmp_path / "short.gguf", GGUF / "tq2_0.gguf", tensors=short))


# -- bad models --------------------------------------------------------------------------------------------------------

ARCH = "bitnet-b1.58"
BAD_METADATA = {
    "no architecture": ({}, ["general.architecture"], "got None", "general.architecture"),
    "another architecture": ({"general.architecture": Typed("string", "mamba")}, [], "mamba", "general.architecture"),
    "a number for it": ({"general.architecture": Typed("uint32", 3)}, [], "got 3", "general.architecture"),
    "an array for it": (
        {"general.architecture": Typed("[uint32]", [1, 2])},
        [],
        "got array([1, 2]",
        "general.architecture",
    ),
    "texts for it": (
        {"general.architecture": Typed("[string]", [ARCH])},
        [],
        f"got ['{ARCH}']",
        "general.architecture",
    ),
    "no block_count": ({}, [f"{ARCH}.block_count"], "absent", f"{ARCH}.block_count"),
    "2^32 - 1 blocks": ({f"{ARCH}.block_count": Typed("uint32", 2**32 - 1)}, [], "24 tensors", f"{ARCH}.block_count"),
    "a block too many": ({f"{ARCH}.block_count": Typed("uint32", 3)}, [], "says 3 blocks", f"{ARCH}.block_count"),
    "text": ({f"{ARCH}.context_length": Typed("string", "x")}, [], "got 'x'", f"{ARCH}.context_length"),
    **{
        f"{name} per layer": (
            {f"{ARCH}.attention.head_count": Typed(kind, value)},
            [],
            "whole number",
            f"{ARCH}.attention.head_count",
        )
        for name, kind, value in (
            ("other values", "[uint32]", [4, 2]),
            ("0", "[uint32]", [0, 0]),
            ("texts", "[string]", ["4", "4"]),
            ("true", "[bool]", [True, True]),
            ("too few values", "[uint32]", [4]),
            ("too many values", "[uint32]", [4, 4, 4]),
            ("no value", "[uint32]", []),
        )
    },
    "an array of numbers of blocks": (
        {f"{ARCH}.block_count": Typed("[uint32]", [2, 2])},
        [],
        "whole number",
        f"{ARCH}.block_count",
    ),
    "other eps per layer": (
        {f"{ARCH}.attention.layer_norm_rms_epsilon": Typed("[float32]", [1e-5, 1e-6])},
        [],
        "expected a number",
        f"{ARCH}.attention.layer_norm_rms_epsilon",
    ),
    "poolings": (
        {f"{ARCH}.pooling_type": Typed("[uint32]", [1, 3])},
        [],
        "1 (mean) or 3",
        f"{ARCH}.pooling_type",
    ),
    "activations": (
        {f"{ARCH}.hidden_activation": Typed("[uint32]", [0, 0])},
        [],
        "expected a string",
        f"{ARCH}.hidden_activation",
    ),
    "scalings": (
        {f"{ARCH}.rope.scaling.type": Typed("[uint32]", [1, 2])},
        [],
        "expected a string",
        f"{ARCH}.rope.scaling.type",
    ),
    "an encoder": ({f"{ARCH}.attention.causal": Typed("bool", False)}, [], "encoder", f"{ARCH}.attention.causal"),
    "no eps": ({}, [f"{ARCH}.attention.layer_norm_rms_epsilon"], "absent", f"{ARCH}.attention.layer_norm_rms_epsilon"),
    "NaN": ({f"{ARCH}.rope.freq_base": Typed("float32", float("nan"))}, [], "nan", f"{ARCH}.rope.freq_base"),
    "true for a number": (
        {f"{ARCH}.rope.freq_base": Typed("bool", True)},
        [],
        "number; got True",
        f"{ARCH}.rope.freq_base",
    ),
    "another width": ({f"{ARCH}.embedding_length": Typed("uint32", 128)}, [], "says 128", f"{ARCH}.embedding_length"),
    "another vocabulary": ({f"{ARCH}.vocab_size": Typed("uint32", 500)}, [], "512 rows", f"{ARCH}.vocab_size"),
    "partial rotary": (
        {f"{ARCH}.rope.dimension_count": Typed("uint32", 32)},
        [],
        "not supported",
        f"{ARCH}.rope.dimension_count",
    ),
    "heads that do not divide": ({f"{ARCH}.attention.head_count_kv": Typed("uint32", 3)}, [], "divisor", None),
    "eos past the vocabulary": ({"tokenizer.ggml.eos_token_id": Typed("uint32", 512)}, [], "512", "eos_token_id"),
    "an unknown scaling": (
        {
            f"{ARCH}.rope.scaling.type": Typed("string", "su"),
            f"{ARCH}.rope.scaling.factor": Typed("float32", 2.0),
        },
        [],
        "'su'",
        f"{ARCH}.rope.scaling.type",
    ),
    **{
        f"yarn with the {key} {value!r}": (
            {
                f"{ARCH}.rope.scaling.type": Typed("string", "yarn"),
                f"{ARCH}.rope.scaling.factor": Typed("float32", 2.0),
                f"{ARCH}.rope.scaling.{key}": Typed(kind, value),
            },
            [],
            "expected a number from 0 to 1e9",
            f"{ARCH}.rope.scaling.{key}",
        )
        for key, kind, value in (
            ("factor", "float32", 0.0),
            ("factor", "float32", 1e9),
            ("yarn_attn_factor", "float32", -1.0),
            ("yarn_attn_factor", "float32", float("nan")),
            ("yarn_attn_factor", "float32", 1e9),
            ("yarn_attn_factor", "string", "1"),
            ("yarn_attn_factor", "bool", True),
        )
    },
}


@pytest.mark.parametrize("case", BAD_METADATA)
def test_bad_metadata(case, tmp_path):
    values, drop, message, field = BAD_METADATA[case]
    path = changed(tmp_path / "x.gguf", GGUF / "tq2_0.gguf", values, drop)
    with pytest.raises(ConfigError) as caught:
        bitnet_ref.load(path, backend="numpy")
    assert message in caught.value.message, caught.value
    assert caught.value.path == str(path)
    assert field is None or caught.value.field == field


def keys_with(tmp_path, source=GGUF / "tq2_0.gguf", arch=ARCH, drop=(), tensors=None, **values):
    """The configuration of a file with these keys of its architecture; `kind__key` with __ for a dot."""
    typed = {f"{arch}.{key.replace('__', '.')}": Typed(*value) for key, value in values.items()}
    return bitnet_ref.read_config(changed(tmp_path / "x.gguf", source, typed, drop, tensors))


def test_equal_values_per_layer_are_that_value(tmp_path):
    """As llama.cpp's converter writes them for some architectures."""
    one = bitnet_ref.read_config(GGUF / "tq2_0.gguf")
    sizes = {"feed_forward_length": one.intermediate_size, "attention__head_count": one.num_attention_heads}
    sizes |= {"attention__head_count_kv": one.num_key_value_heads}
    arrays = {key: ("[uint32]", [size] * one.num_hidden_layers) for key, size in sizes.items()}
    arrays["attention__layer_norm_rms_epsilon"] = ("[float32]", [one.norm_eps] * one.num_hidden_layers)
    assert keys_with(tmp_path, **arrays) == one
    of_one_layer = {"general.architecture": "llama", "llama.block_count": 1, "llama.x": np.array([4], np.uint32)}
    assert _Keys(SimpleNamespace(metadata=of_one_layer, path=tmp_path)).count("x") == 4


@pytest.mark.parametrize("zeros", [[], [0, 0]], ids=str)
def test_no_experts_and_no_drafts_in_arrays(zeros, tmp_path):
    none = {f"{ARCH}.{key}": Typed("[uint32]", zeros) for key in ("expert_count", "nextn_predict_layers")}
    path = changed(tmp_path / "x.gguf", GGUF / "tq2_0.gguf", none, [])
    assert bitnet_ref.load(path, backend="numpy").config == bitnet_ref.read_config(GGUF / "tq2_0.gguf")


def test_olmo_3_is_refused(tmp_path):
    """In llama.cpp it has the architecture of OLMo-2, and a window in three of four layers."""
    olmo2 = export(DATA / "families" / "olmo2", tmp_path / "olmo2.gguf", "f32")
    assert keys_with(tmp_path, olmo2, "olmo2", attention__sliding_window=("uint32", 0)).sliding_window is None
    with pytest.raises(ConfigError, match=r"attention.sliding_window: expected none in OLMo-2; OLMo-3") as caught:
        keys_with(tmp_path, olmo2, "olmo2", attention__sliding_window=("uint32", 5))
    assert caught.value.field == "olmo2.attention.sliding_window"


@pytest.mark.parametrize(("number", "pooling"), [(0, "last"), (1, "mean"), (3, "last"), (2, None), (4, None)])
def test_poolings(number, pooling, tmp_path):
    if pooling is not None:
        assert keys_with(tmp_path, pooling_type=("uint32", number)).pooling == pooling
        return
    with pytest.raises(ConfigError, match=rf"pooling_type: expected 1 \(mean\) or 3 \(last token\), got {number}"):
        keys_with(tmp_path, pooling_type=("uint32", number))


def test_yarn_at_its_limits(tmp_path):
    """llama.cpp multiplies attn_factor with its own, 0.1 ln(factor) + 1."""
    kind = {"rope__scaling__type": ("string", "yarn")}

    def rope(factor, **more):
        typed = {f"rope__scaling__{key}": ("float32", value) for key, value in more.items()}
        return keys_with(tmp_path, **kind, rope__scaling__factor=("float32", factor), **typed).rope

    for factor in (1e-3, 999999936.0):  # the last float32 below 1e9
        assert rope(factor).factor == pytest.approx(factor)
    plain = rope(4.0)
    assert plain.original_max_position_embeddings == bitnet_ref.read_config(GGUF / "tq2_0.gguf").context_length
    assert (plain.beta_fast, plain.beta_slow) == (32.0, 1.0)
    assert plain.attention_factor == 0.1 * np.log(4.0) + 1
    assert rope(4.0, yarn_attn_factor=0.8).attention_factor == 0.8  # transformers' attention_factor
    assert rope(4.0, yarn_attn_factor=1.0).attention_factor == 1.0
    assert rope(4.0, attn_factor=0.5).attention_factor == pytest.approx(plain.attention_factor / 2)
    assert rope(4.0, attn_factor=0.5, yarn_attn_factor=2.0).attention_factor == 1.0
    for factor, number in ((16.0, 1.0), (5.0, 1.0), (2.0, 0.7), (40.0, 1.3)):  # the quotient is rounded to float32
        assert rope(factor, attn_factor=number / (0.1 * np.log(factor) + 1)).attention_factor == number
    own = rope(4.0, yarn_beta_fast=20.0, yarn_beta_slow=2.0)
    assert (own.beta_fast, own.beta_slow) == (20.0, 2.0)


def test_linear_scaling_by_either_key(tmp_path):
    for keys in (
        {"rope__scale_linear": ("float32", 2.0)},
        {"rope__scaling__type": ("string", "linear"), "rope__scaling__factor": ("float32", 2.0)},
        {"rope__scaling__factor": ("float32", 2.0), "rope__scale_linear": ("float32", 3.0)},
        {"rope__scaling__factor": ("float32", 2.0)},  # llama.cpp's default type is linear
    ):
        rope = keys_with(tmp_path, **keys).rope
        assert (rope.rope_type, rope.factor) == ("linear", 2.0)
    for keys in (
        {"rope__scale_linear": ("float32", 0.0)},
        {"rope__scaling__type": ("string", "none"), "rope__scaling__factor": ("float32", 2.0)},
    ):
        assert keys_with(tmp_path, **keys).rope.rope_type == "default"
    with pytest.raises(ConfigError, match=r"rope.scaling.factor: expected a number; it is absent"):
        keys_with(tmp_path, rope__scaling__type=("string", "linear"))
    with pytest.raises(ConfigError, match=r"rope.scaling.type: expected a string, got 1"):
        keys_with(tmp_path, rope__scaling__type=("uint32", 1))


def test_a_scale_of_cos_and_sin_without_yarn(tmp_path):
    """llama.cpp scales them by attn_factor, whatever the type."""
    scaling = {"rope__scaling__type": ("string", "linear"), "rope__scaling__factor": ("float32", 2.0)}
    for keys in ({}, scaling):
        assert keys_with(tmp_path, rope__scaling__attn_factor=("float32", 1.0), **keys) == keys_with(tmp_path, **keys)
        with pytest.raises(ConfigError, match=r"rope.scaling.attn_factor: expected 1, or .* got 1.3"):
            keys_with(tmp_path, rope__scaling__attn_factor=("float32", 1.3), **keys)
    divisors = {"rope_freqs.weight": f32(*[1.0] * (bitnet_ref.read_config(GGUF / "tq2_0.gguf").head_dim // 2))}
    scaling["rope__scaling__type"] = ("string", "yarn")
    with pytest.raises(ConfigError, match="expected 1, or"):
        keys_with(tmp_path, tensors=divisors, rope__scaling__attn_factor=("float32", 1.3), **scaling)


def test_inspect_says_that_llama_cpp_ignores_yarns_factor(tmp_path):
    scaling = {"type": ("string", "yarn"), "factor": ("float32", 4.0), "yarn_attn_factor": ("float32", 0.8)}
    typed = {f"{ARCH}.rope.scaling.{key}": Typed(*value) for key, value in scaling.items()}
    path = changed(tmp_path / "x.gguf", GGUF / "tq2_0.gguf", typed)
    assert any("llama.cpp ignores this key" in words for words in evidence_of(path))


def test_llama_3s_divisors_of_every_length(tmp_path):
    """The trained context is a power of two up to 2^20. Divisors of 1 are no scaling."""
    source = export(write_family(tmp_path / "hf", FAMILIES["llama"]), tmp_path / "plain.gguf", "f32")
    half = bitnet_ref.read_config(source).head_dim // 2

    def rope(divisors):
        tensors = {"rope_freqs.weight": f32(*divisors)}
        return keys_with(tmp_path, source, "llama", tensors=tensors, rope__freq_base=("float32", 1e7)).rope

    assert rope([1.0] * half) == RopeConfig(1e7)
    for exponent in (10, 13, 20):
        given = StretchedRope(1e7, "llama3", 8.0, 2**exponent, low_freq_factor=1.0, high_freq_factor=4.0)
        assert rope(llama3_divisors(given, 2 * half)) == given
    tensors = {"rope_freqs.weight": f32(*llama3_divisors(given, 2 * half))}
    with pytest.raises(ConfigError, match=r"rope.scaling.factor: expected 1 beside rope_freqs.weight, .* got 2"):
        keys_with(tmp_path, source, "llama", tensors=tensors, rope__scaling__factor=("float32", 2.0))  # divided twice
    beyond = StretchedRope(1e7, "llama3", 8.0, 2**21, low_freq_factor=1.0, high_freq_factor=4.0)
    wrong = [llama3_divisors(beyond, 2 * half), [np.inf] * half, [0.5] * half, [2e9] * half]
    wrong += [llama3_divisors(given, 2 * half) * 1.001]
    for divisors in wrong:
        with pytest.raises(FormatError, match="not those of Llama 3 scaling"):
            rope(divisors)
    with pytest.raises(FormatError, match=rf"expected F32 of shape \[{half}\]"):
        rope([1.0] * (half + 1))


def test_blocks_that_only_guess(tmp_path):
    """Those after the model's own, which llama.cpp counts among its blocks, are left out."""
    assert bitnet_ref.read_config(GGUF / "tq2_0.gguf").num_hidden_layers == 2
    for drafts, layers in ((0, 2), (1, 1), (2, 2), (3, 2)):
        assert keys_with(tmp_path, nextn_predict_layers=("uint32", drafts)).num_hidden_layers == layers


def test_a_window_of_none_or_of_some_tokens(tmp_path):
    source = export(write_family(tmp_path / "hf", FAMILIES["mistral"]), tmp_path / "m.gguf", "f32")
    with GgufFile(source) as file:
        arch = file.metadata["general.architecture"]
    assert bitnet_ref.read_config(source).sliding_window == 3
    for window, expected in ((1, 1), (0, None)):
        config = keys_with(tmp_path, source, arch, attention__sliding_window=("uint32", window))
        assert config.sliding_window == expected
    with pytest.raises(ConfigError, match="sliding_window: expected a whole number above zero; got -1"):
        keys_with(tmp_path, source, arch, attention__sliding_window=("int32", -1))


def test_other_mixtures_of_maple(tmp_path):
    convert(DATA / "families" / "maple", tmp_path / "m.gguf", "gguf-f32", verify=False)
    for value, is_read in ((7.0, True), (5.0, False)):
        path = changed(
            tmp_path / "x.gguf", tmp_path / "m.gguf", {"maple.swiglu_clamp_exp": Typed("[float32]", [value])}
        )
        if is_read:
            assert bitnet_ref.read_config(path).gate_clamp == value
        else:
            with pytest.raises(ConfigError, match=r"swiglu_clamp_exp: expected 7\.0"):
                bitnet_ref.read_config(path)
    norms = {"maple.expert_weights_norm": Typed("[uint32]", [1, 1])}
    with pytest.raises(ConfigError, match="expert_weights_norm: expected true or false"):
        bitnet_ref.read_config(changed(tmp_path / "x.gguf", tmp_path / "m.gguf", norms))


def test_bad_tensors(tmp_path):
    source, path = GGUF / "tq2_0.gguf", tmp_path / "x.gguf"
    cases = [
        (
            "the tensor is missing",
            "blk.1.ffn_norm.weight",
            {"drop": ["blk.1.ffn_norm.weight"], "tensors": {"y": f32(1)}},
        ),
        ("no part of a bitnet-b1.58", "extra", {"tensors": {"extra": f32(1.0)}}),
        (
            "expected shape [256], got [255]",
            "output_norm.weight",
            {"tensors": {"output_norm.weight": f32(*range(255))}},
        ),
        ("got shape [1, 2]", "output_norm.weight", {"tensors": {"output_norm.weight": ((1, 2), *f32(1, 2)[1:])}}),
        (
            "holds nan at index [3]",
            "output_norm.weight",
            {"tensors": {"output_norm.weight": f32(0, 0, 0, *[np.nan] * 253)}},
        ),
    ]
    for message, field, change in cases:
        with pytest.raises(FormatError) as caught:
            bitnet_ref.load(changed(path, source, **change), backend="numpy")
        assert message in caught.value.message, caught.value
        assert caught.value.field == field
        assert caught.value.path == str(path)


def test_a_signalling_nan_of_bfloat16(tmp_path):
    """NumPy warns of it where it looks whether a number is finite; warnings are errors here."""
    path = export(write_checkpoint(tmp_path / "hf", TINY), tmp_path / "x.gguf", "bf16", dense_type="BF16")
    for name in ("token_embd.weight", "blk.1.attn_v.weight"):
        with GgufFile(path) as file:
            raw, shape = file.read_raw(name), file.tensors[name].shape
        raw[4:6] = 0x81, 0x7F
        with pytest.raises(FormatError, match=r"holds nan at index \[0, 2\]|expected finite") as caught:
            bitnet_ref.load(changed(tmp_path / "y.gguf", path, tensors={name: (shape, "BF16", raw)}), backend="numpy")
        assert caught.value.field == name


def test_truncated_at_every_byte_of_the_header(tmp_path):
    path = export(write_checkpoint(tmp_path / "hf", {**TINY, "num_hidden_layers": 1}), tmp_path / "x.gguf", "f32")
    with GgufFile(path) as file:
        first = min(tensor.offset for tensor in file.tensors.values())
    for _ in cut_to(path, [*range(first), first, first + 1, path.stat().st_size - 64]):
        with pytest.raises(FormatError) as caught:
            GgufCheckpoint(path)
        assert caught.value.path == str(path)


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf])
def test_bad_i2_s(scale, tmp_path):
    name = "blk.1.attn_v.weight"
    with GgufFile(GGUF / "i2_s.gguf") as file:
        raw, shape = file.read_raw(name), file.tensors[name].shape
    raw[-32:-28] = np.array([scale], np.float32).view(np.uint8)
    path = changed(tmp_path / "x.gguf", GGUF / "i2_s.gguf", tensors={name: (shape, "I2_S", raw)})
    with pytest.raises(FormatError, match="scale above zero"):
        bitnet_ref.load(path, backend="numpy")
    raw[9] |= 0x0C
    path = changed(path, GGUF / "i2_s.gguf", tensors={name: (shape, "I2_S", raw)})
    with pytest.raises(FormatError, match=r"code 3 in byte 9") as caught:
        bitnet_ref.load(path, backend="numpy")
    assert caught.value.field == name


def test_rope_divisors_that_are_not_llama_3s(tmp_path):
    folder = write_family(tmp_path / "hf", FAMILIES["llama3 rope"])
    path = export(folder, tmp_path / "x.gguf", "f32")
    with GgufCheckpoint(path) as checkpoint:
        divisors = llama3_divisors(checkpoint.config.rope, 64)
        assert divisors[0] == 1
        assert divisors[-1] == 8
    with pytest.raises(FormatError, match="not those of Llama 3"):
        GgufCheckpoint(changed(tmp_path / "y.gguf", path, tensors={"rope_freqs.weight": f32(*range(1, 33))}))


def test_what_cannot_be_written(tmp_path):
    path = tmp_path / "x.gguf"
    dense = write_family(tmp_path / "dense", FAMILIES["llama"])
    for kind in ("i2_s", "tq1_0", "tq2_0", "tl1"):
        with pytest.raises(FormatError, match="this model is dense"):
            export(dense, path, kind)
    narrow = write_checkpoint(tmp_path / "narrow", BITNET)
    with pytest.raises(FormatError, match="blocks of 256 inputs"):
        export(narrow, path, "tq2_0")
    with pytest.raises(FormatError, match="ptq1_0, stq1_0, q1_0, got 'gguf'"):
        export(narrow, path, "gguf")
    with pytest.raises(FormatError, match="multiple of 32"):
        export(narrow, path, "f16", dense_type="Q8_0")
    dynamic = {**FAMILIES["llama"], "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    with pytest.raises(ConfigError, match="dynamic"):
        export(write_family(tmp_path / "dynamic", dynamic), path, "f16")
    with pytest.raises(ConfigError, match="norm inside a linear"):
        export(GOLDEN / "llama-packed-rmsnorm", path, "f16")
    huge = tiny_tensors(TINY, np.float32)
    huge["model.embed_tokens.weight"][3, 3] = 1e6
    with pytest.raises(NumericsError, match="F16 can hold"):
        export(write_checkpoint(tmp_path / "huge", TINY, huge), path, "f16")
    assert not path.exists()
    assert "q8_0" in KINDS


def test_tl_of_a_shape_without_tiles_is_refused(tmp_path):
    pytest.importorskip("bitnet_ref.formats.gguf.tl", reason="the TL codecs are not here")
    with pytest.raises(FormatError, match="no tl2 tile sizes"):
        export(write_checkpoint(tmp_path / "hf", {**BITNET, **WIDE}), tmp_path / "x.gguf", "tl2")


# -- llama.cpp itself --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "llama ternary", "1bitLLM", "llama3 rope", "yarn", "linear"])
@pytest.mark.parametrize("kind", ["f32", "tq1_0", "tq2_0"])
def test_llama_cpp_reads_what_we_write(family, kind, tmp_path):
    """llama.cpp keeps keys and values in float16 and quantises activations in blocks of 256, not per token."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    config = FAMILIES[family]
    ternary = "quantization_config" in config or "weight_bits" in config
    if not ternary and kind != "f32":
        pytest.skip("a dense model")
    path = export(write_family(tmp_path / "hf", config), tmp_path / "x.gguf", kind, dense_type="F32")
    llama = llama_cpp.Llama(str(path), n_ctx=64, logits_all=True, verbose=False, n_threads=1)
    tokens = list(range(1, 30))
    llama.eval(tokens)
    theirs = np.array(llama.scores[: len(tokens)])
    ours = bitnet_ref.load(path, backend="numpy").logits(tokens)
    assert np.abs(theirs - ours).max() < (0.1 if ternary else 0.004) * ours.std()


def test_a_bitnet_with_dense_linears_has_no_gguf(tmp_path):
    """A reader takes the linears of its architecture for ternary, or all of them for master weights."""
    module, config = "model.layers.1.mlp.down_proj", {**BITNET}
    tensors = {name: tensor for name, tensor in tiny_tensors(BITNET).items() if not name.startswith(module)}
    tensors[f"{module}.weight"] = np.ones((16, 24), np.float32)
    config["quantization_config"] = {**config["quantization_config"], "modules_to_not_convert": ["lm_head", module]}
    one = write_checkpoint(tmp_path / "one", config, tensors), "blocks.1.mlp.down_proj"
    norms = {name: tensor for name, tensor in tiny_tensors(BITNET).items() if "sub_norm" in name}
    config.pop("quantization_config")
    every = write_checkpoint(tmp_path / "every", config, tiny_tensors(TINY) | norms), "blocks.0.attn.q_proj"
    for source, field in (one, every):
        with pytest.raises(FormatError) as caught:
            convert(source, tmp_path / "x.gguf", "gguf-f32", options=LoadOptions(allow_unquantized=True))
        assert caught.value.field == field
        assert caught.value.message == "is dense; in the architecture bitnet-b1.58 every linear is ternary"
