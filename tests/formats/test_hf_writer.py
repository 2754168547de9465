"""formats.hf_writer: what is written reads back as the same model, to the bit, whatever the source stored."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import BITNET, DATA, GOLDEN, GOLDEN_CASES, TINY, tiny_tensors, write_checkpoint

import bitnet_ref
from bitnet_ref.errors import ConfigError
from bitnet_ref.formats import planned_tensors
from bitnet_ref.formats.checkpoint import is_ternary, parts
from bitnet_ref.formats.convert import convert
from bitnet_ref.formats.hf import writer
from bitnet_ref.formats.hf.config import parse_hf_config
from bitnet_ref.formats.hf.writer import hf_config_json, write_hf
from bitnet_ref.formats.open import ASSETS, open_checkpoint
from bitnet_ref.formats.planned_tensors import PlannedTensor, cut_by_size
from bitnet_ref.formats.safetensors import DTYPES as SAFETENSORS_DTYPES
from bitnet_ref.formats.safetensors import SafetensorsFile
from bitnet_ref.reference.weights import DenseWeight, TernaryWeight

FAMILIES = DATA / "families"
IN_A_BLOCK = [f"attn.{each}_proj" for each in "qkvo"] + [f"mlp.{each}_proj" for each in ("gate", "up", "down")]
LINEARS = ["lm_head", *(f"{layer}.{name}" for layer in (0, 1) for name in IN_A_BLOCK)]

REFUSALS = {  # (kind, case) -> the reason
    ("hf-packed", "onebitllm-silu"): "54 outputs",
    ("hf-bf16", "llama-packed-rmsnorm"): "biases",  # not exact when divided by the scale
}
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def as_arrays(part):
    """Everything that a part of a model consists of."""
    if isinstance(part, np.ndarray):
        return [part]
    if isinstance(part, DenseWeight):
        return [part.array] + [part.bias] * (part.bias is not None)
    ternary = part.bit_linear
    assert isinstance(ternary, TernaryWeight)
    norm = [] if part.norm is None else [part.norm.weight, np.array(part.norm.eps)]
    return [ternary.packed, ternary.w_dequant_scale] + [part.bias] * (part.bias is not None) + norm


def assert_same_model(a, b):
    ours, theirs = dict(parts(a)), dict(parts(b))
    assert list(ours) == list(theirs)
    for name in ours:
        for x, y in zip(as_arrays(ours[name]), as_arrays(theirs[name]), strict=True):
            np.testing.assert_array_equal(x, y, err_msg=name)  # the dtype may be a wider one
    same = {"model_type": "", "quantization": None}  # who wrote it, and how it is stored
    assert replace(a.config, **same) == replace(b.config, **same)


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", ["hf-packed", "hf-bf16"])
@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_a_written_folder_is_the_same_model(case, kind, tmp_path):
    with open_checkpoint(GOLDEN / case) as source:
        if (refusal := REFUSALS.get((kind, case))) is not None:
            with pytest.raises(ConfigError, match=refusal):
                write_hf(source, tmp_path, kind)
            return
        write_hf(source, tmp_path, kind)
    with open_checkpoint(GOLDEN / case) as source, open_checkpoint(tmp_path) as written:
        assert_same_model(source, written)
        if source.config.quantization is not None and kind == "hf-packed":
            assert written.kind == "hf-packed"


def test_a_bias_that_only_the_next_float_gives_back(tmp_path):
    """1 / scale, rounded, times the scale is less than 1: with the float above it, it is 1; with that below, -1."""
    case = GOLDEN / "llama-packed-rmsnorm"
    scale = np.float32(1.001853)
    with SafetensorsFile(case / "model.safetensors") as file:
        tensors = {name: np.array(file.read(name)) for name in file.tensors}
    for name, value in tensors.items():
        if name.endswith("weight_scale"):
            tensors[name] = np.full(value.shape, np.float32(1) / scale)
        if name.endswith("bias"):
            tensors[name] = np.resize(np.array([1, -1], np.float32), value.shape)
    source = write_checkpoint(tmp_path / "source", json.loads((case / "config.json").read_text()), tensors)
    with open_checkpoint(source) as checkpoint:
        assert checkpoint.linear("blocks.0.attn.q_proj").bit_linear.w_dequant_scale == scale
        write_hf(checkpoint, tmp_path, "hf-bf16")
    with SafetensorsFile(tmp_path / "model.safetensors") as file:
        stored = file.read("model.layers.0.self_attn.q_proj.bias")
    near = np.float32(1) / scale
    assert near * scale < 1
    expected = np.nextafter(near, np.float32(2)) * np.array([1, -1], np.float32)
    np.testing.assert_array_equal(stored, np.resize(expected, stored.shape))
    with open_checkpoint(source) as ours, open_checkpoint(tmp_path) as written:
        assert_same_model(ours, written)


def float_dtypes(folder):
    """The dtypes of a folder's floats, and the one that config.json names."""
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"]
    with SafetensorsFile(folder / "model.safetensors") as file:
        dtypes = {info.dtype for info in file.tensors.values()}
    return dtypes - {"U8"}, DTYPES[config["dtype"]]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("source", "kind", "dtype"),
    [
        (ASSETS / "storyteller", "hf-packed", "F32"),  # its scales are no bfloat16
        (ASSETS / "storyteller", "hf-bf16", "F32"),
        (GOLDEN / "bitnet-packed-offline", "hf-packed", "BF16"),
        (GOLDEN / "bitnet-packed-offline", "hf-bf16", "BF16"),
        (GOLDEN / "bitnet-bf16-online", "hf-bf16", "BF16"),
        (GOLDEN / "bitnet-bf16-online", "hf-packed", "F32"),
        (GOLDEN / "llama-packed-bitlinear", "hf-packed", "BF16"),  # its scales divide
        (GOLDEN / "llama-packed-bitlinear", "hf-bf16", "F32"),
        (GOLDEN / "llama-unpacked-offline", "hf-bf16", "BF16"),  # biases divided by the scale
        (GOLDEN / "llama-f16-sharded", "hf-unpacked", "F16"),
        (GOLDEN / "llama-f32-headdim", "hf-unpacked", "F32"),
        (FAMILIES / "embedding-gemma3", "hf-bf16", "BF16"),  # norms less one
        (FAMILIES / "qwen3-groups128", "hf-unpacked", "F16"),
        (FAMILIES / "qwen3_5-groups128-hybrid", "hf-unpacked", "F16"),  # logarithms of decays
    ],
)
def test_a_file_has_one_dtype_which_its_config_names(source, kind, dtype, tmp_path):
    with open_checkpoint(source) as checkpoint:
        write_hf(checkpoint, tmp_path, kind)
    assert float_dtypes(tmp_path) == ({dtype}, dtype)


def test_one_value_that_bfloat16_cannot_hold_makes_the_file_float32(tmp_path):
    tensors = tiny_tensors(TINY)
    norm = tensors["model.norm.weight"].astype(np.float32)
    norm[3] = np.float32(1) + np.float32(2**-20)
    source = write_checkpoint(tmp_path / "source", TINY, tensors | {"model.norm.weight": norm})
    proof = convert(source, tmp_path / "out", "hf-unpacked")
    assert proof.exact
    assert float_dtypes(tmp_path / "out") == ({"F32"}, "F32")


def test_ternary_linears_are_never_float16(tmp_path):
    """Their sums reach 128 K; the largest float16 is 65,504."""
    source = write_checkpoint(tmp_path / "source", BITNET, tiny_tensors(BITNET, np.float16))
    convert(source, tmp_path / "out", "hf-packed")
    assert float_dtypes(tmp_path / "out") == ({"F32"}, "F32")


def test_masters_stay_masters(tmp_path):
    with open_checkpoint(GOLDEN / "bitnet-bf16-online") as source:
        write_hf(source, tmp_path, "hf-bf16")
    with open_checkpoint(GOLDEN / "bitnet-bf16-online") as source, open_checkpoint(tmp_path) as written:
        name = "blocks.1.mlp.down_proj"
        np.testing.assert_array_equal(source.master(name), written.master(name))


def test_the_bytes_are_reproducible(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        with open_checkpoint(GOLDEN / "llama-packed-bitlinear") as source:
            write_hf(source, tmp_path / folder, "hf-packed")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_tokenizer_travels(tmp_path):
    with open_checkpoint(ASSETS / "storyteller") as source:
        write_hf(source, tmp_path, "hf-packed")
        files = source.tokenizer_files()
    assert "tokenizer.model" in files
    assert all((tmp_path / name).read_bytes() == data for name, data in files.items())


@pytest.mark.parametrize("target", ["hf-packed", "onnx"])
def test_the_prompts_of_its_texts_travel(target, tmp_path):
    source = write_checkpoint(tmp_path / "source", BITNET)
    modules = [{"type": f"sentence_transformers.models.{kind}"} for kind in ("Transformer", "Pooling", "Normalize")]
    files = {"config_sentence_transformers.json": b'{"prompts": {}}', "sentence_bert_config.json": b"{}"}
    files |= {"modules.json": json.dumps(modules).encode(), "1_Pooling/config.json": b'{"pooling_mode": "mean"}'}
    (source / "1_Pooling").mkdir()
    for name, data in files.items():
        (source / name).write_bytes(data)
    convert(source, tmp_path / "out", target, verify=False)
    assert {name: (tmp_path / "out" / name).read_bytes() for name in files} == files


def test_gemma3_has_a_window_even_where_no_layer_uses_it():
    """transformers computes its window from the number before it looks at the layers."""
    raw = json.loads((DATA / "families" / "embedding-gemma3" / "config.json").read_text())
    raw["layer_types"] = ["full_attention"] * raw["num_hidden_layers"]
    config = parse_hf_config(raw, Path("config.json"), allow_unquantized=True)
    assert config.sliding_window is None
    assert hf_config_json(config, config.quantization, "BF16")["sliding_window"] == config.max_position_embeddings


def test_a_small_smollm3_has_no_padding_token(tmp_path):
    """The class's default is token 128004, with which transformers builds no model of fewer tokens."""
    convert(DATA / "families" / "smollm3", tmp_path / "out", "hf-bf16")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["pad_token_id"] is None


@pytest.mark.parametrize("interval", [1, 2, 3, 4])
def test_mlx_is_told_every_how_many_layers_attend_to_all(interval):
    kinds = ["full_attention" if layer % interval == 0 else "linear_attention" for layer in range(1, 10)]
    text = {"model_type": "qwen3_5_text", "layer_types": kinds}
    assert writer._wrapper_json(text)["text_config"] == {**text, "full_attention_interval": interval}
    other = ["full_attention" if kind == "linear_attention" else "linear_attention" for kind in kinds[:-1]]
    if interval > 2:
        with pytest.raises(ConfigError, match="every n-th layer"):
            writer._wrapper_json({**text, "layer_types": other})


# -- the plan of a writer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "limit", "parts"),
    [
        ({}, 4, [[]]),
        ({"a": 2, "b": 2}, 4, [["a", "b"]]),  # exactly full
        ({"a": 2, "b": 3}, 4, [["a"], ["b"]]),
        ({"a": 9, "b": 1, "c": 3, "d": 1}, 4, [["a"], ["b", "c"], ["d"]]),  # the first is too large by itself
        ({"a": 1, "b": 9, "c": 1}, 4, [["a"], ["b"], ["c"]]),
        ({"a": 0, "b": 4, "c": 0}, 4, [["a", "b", "c"]]),
        ({"a": 9, "b": 9}, None, [["a", "b"]]),
    ],
)
def test_parts_of_a_size(sizes, limit, parts):
    assert cut_by_size(sizes, limit) == parts


@pytest.mark.parametrize(
    ("values", "dtype", "is_exact"),
    [
        ([1.0, 0.5, -3.0], "BF16", True),
        ([1.0, 0.5, 1.00390625], "BF16", False),  # nine bits, in the second block
        ([1.0, 0.5, 1.00390625], "F16", True),
        ([65504.0, 65536.0], "F16", False),
        ([1e-8, 1.0], "F16", False),
        ([1.1], "F32", True),
        ([], "BF16", True),
    ],
)
def test_whether_a_dtype_holds_numbers(values, dtype, is_exact, monkeypatch):
    monkeypatch.setattr(planned_tensors, "_BLOCK_VALUES", 2)
    assert planned_tensors._is_exact(np.array([values], np.float32), SAFETENSORS_DTYPES[dtype]) is is_exact


def test_the_first_dtype_that_holds_all(monkeypatch):
    """Only parts with floats in another dtype are read, and none once no candidate is left."""
    values = {"a": [1.5], "b": [1.00390625], "c": [3.0], "d": [1.1]}
    seen = []

    def read(checkpoint, name):
        seen.append(name)
        return np.array(values[name], np.float32)

    monkeypatch.setattr(planned_tensors, "read_part", read)

    def choose(candidates, **dtypes):
        seen.clear()
        plan = {name: [PlannedTensor(name, dtype, (1,), lambda part: part)] for name, dtype in dtypes.items()}
        return planned_tensors.exact_dtype(None, plan, candidates), "".join(seen)

    assert choose(["BF16", "F16"], a="F32", c="F32") == ("BF16", "ac")
    assert choose(["BF16", "F16"], a="F32", b="F32", c="F32") == ("F16", "abc")
    assert choose(["F16", "BF16"], b="F16", a="BF16", c="U8") == ("F16", "ba")
    assert choose(["BF16"], b="BF16", c="BF16") == ("BF16", "")  # as they are stored
    assert choose(["BF16", "F16"], d="F32", a="F32") == ("F32", "d")
    assert choose([], a="F32") == ("F32", "")


def test_a_plan_in_one_dtype():
    plan = {
        "a": [PlannedTensor("a.w", "F32", (1,), lambda part: part), PlannedTensor("a.p", "U8", (1,), lambda part: part)]
    }
    (floats, codes) = planned_tensors.in_one_dtype(plan, "F16")["a"]
    assert (floats.name, floats.dtype, codes) == ("a.w", "F16", plan["a"][1])
    assert floats.make(np.array([1.5], np.float32)).dtype == np.float16
    half = np.array([1.5], np.float16)
    assert floats.make(half) is half  # no copy of what is right
    assert planned_tensors.layout_of(plan) == {"a.w": ("F32", (1,)), "a.p": ("U8", (1,))}


@pytest.mark.parametrize(
    ("pattern", "dense"),
    [
        ("lm_head", {"lm_head"}),
        ("o_proj", {"0.attn.o_proj", "1.attn.o_proj"}),
        ("model.layers.1", {name for name in LINEARS if name.startswith("1.")}),
        ("model.layers.1.", {name for name in LINEARS if name.startswith("1.")}),
        ("model.layers.1.mlp", {"1.mlp.gate_proj", "1.mlp.up_proj", "1.mlp.down_proj"}),
        ("model.layers.1.mlp.up_proj", {"1.mlp.up_proj"}),
        ("layers", set()),
        ("model.layers.*.mlp", {name for name in LINEARS if ".mlp." in name}),
        ("*.up_proj", {"0.mlp.up_proj", "1.mlp.up_proj"}),
        ("*self_attn.[qk]_proj", {name for name in LINEARS if name.endswith(("q_proj", "k_proj"))}),
        ("up_pro", set()),
        (".*up_proj", {"0.mlp.up_proj", "1.mlp.up_proj"}),
        ("model.layers.[1-9].mlp", {name for name in LINEARS if name.startswith("1.mlp.")}),
        ("model.layers.(1|2).(mlp|self_attn)", {name for name in LINEARS if name.startswith("1.")}),
        (r"model\.layers\.\d\.self_attn", {name for name in LINEARS if ".attn." in name}),
        ("model.layers.0*", {name for name in LINEARS if name != "lm_head"}),  # 0* is no digit at all, too
    ],
)
def test_modules_that_are_not_converted(pattern, dense):
    """As in transformers: the start of a module's path, as a regular expression, or its end; or else a glob."""
    config = bitnet_ref.read_config(GOLDEN / "llama-packed-bitlinear")
    assert not config.tie_word_embeddings
    named = {name: name if name == "lm_head" else f"blocks.{name}" for name in LINEARS}
    with_pattern = replace(config, quantization=replace(config.quantization, modules_to_not_convert=(pattern,)))
    assert {name for name, full in named.items() if not is_ternary(with_pattern, full)} == dense
    assert not any(is_ternary(replace(config, quantization=None), full) for full in named.values())
