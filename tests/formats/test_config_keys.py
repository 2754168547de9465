"""Keys of config.json that a family does not read: without effect, doubtful, or of another function or packing."""

import json
import warnings
from pathlib import Path

import pytest
from helpers import BITNET, TINY, write_checkpoint

import bitnet_ref
from bitnet_ref.errors import ConfigError, ConfigWarning, FormatError
from bitnet_ref.formats.hf.config import parse_hf_config, read_hf_config
from bitnet_ref.formats.hf.config_keys import OTHER_FUNCTION, OTHER_PACKING, Doubt, have_same_meaning
from bitnet_ref.inspection import inspect_model

PATH = Path("somewhere/config.json")


def doubts_of(**keys):
    doubts = []
    config = parse_hf_config({**TINY, **keys}, PATH, doubts=doubts)
    assert config == parse_hf_config({**TINY, "model_type": keys.get("model_type", "llama")}, PATH)
    return doubts


def field_of_error(**keys):
    with pytest.raises(ConfigError) as caught:
        parse_hf_config({**TINY, **keys}, PATH)
    assert caught.value.path == str(PATH)
    return caught.value.field


# -- without effect ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [False, 0, 0.0, None, [], {}, "", "default"], ids=repr)
def test_a_feature_that_is_off_counts_as_absent(value):
    assert doubts_of(anything=value) == []
    assert parse_hf_config({**TINY, "quantization_config": value}, PATH).quantization is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("activation", "swiglu"),
        ("add_cross_attention", False),
        ("attention_probs_dropout_prob", 0.1),
        ("attention_type", "full"),
        ("dims_per_head", 4),
        ("embd_pdrop", 0.1),
        ("ep_size", 1),
        ("flash_attn", True),
        ("hidden_dropout", 0.5),
        ("hidden_dropout_prob", 0.1),
        ("is_bitnet_config", True),
        ("is_causal", True),
        ("is_vision_model", True),
        ("language_model_only", True),
        ("layer_norm_eps", TINY["rms_norm_eps"]),
        ("logits_to_keep", 0),
        ("mask_token_id", 151670),
        ("mtp_num_hidden_layers", 1),
        ("norm_eps", TINY["rms_norm_eps"]),
        ("num_experts", 0),
        ("num_local_experts", 1),
        ("num_nextn_predict_layers", 1),
        ("output_gate_type", "swish"),
        ("packed", False),
        ("pretraining_model_parallel", 1),
        ("quant_bits", None),
        ("quantization", None),
        ("resid_pdrop", 0.1),
        ("rope_interleaved", False),
        ("rope_type", "default"),
        ("rotary_emb_base", 10000),
        ("rotary_pct", 1.0),
        ("tf_legacy_loss", False),
        ("type_vocab_size", 16),
        ("use_bidirectional_attention", None),
        ("use_mrope", False),
        ("use_mup", False),
        ("use_parallel_residual", False),
        ("use_qk_norm", False),
        ("use_sliding_window", False),
        ("vocab_size_padded", 0),
        ("_note", "x"),
    ],
)
def test_keys_without_effect(key, value):
    """Values that published files have."""
    assert doubts_of(**{key: value}) == []


def test_a_familys_own_keys():
    """Qwen3 and Gemma3 norm q and k in any case; Gemma3 reads hidden_activation."""
    assert doubts_of(model_type="qwen3", use_qk_norm=True) == []
    assert doubts_of(model_type="gemma3_text", use_qk_norm=True, hidden_act="gelu") == []
    assert field_of_error(use_qk_norm=True) == "use_qk_norm"
    assert field_of_error(use_cla=True, cla_share_factor=2) == "use_cla"
    assert doubts_of(model_type="hunyuan_v1_dense", use_qk_norm=True) == []
    assert doubts_of(model_type="minicpm", mup_denominator=32) == []


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_both_names_of_the_count_of_experts(model_type, key):
    """transformers 5 writes the second for both, and reads it first."""
    raw = {**TINY, "model_type": model_type, "num_experts_per_tok": 2}
    assert parse_hf_config({**raw, key: 6}, PATH).num_experts == 6
    assert parse_hf_config({**raw, "num_experts": 5, "num_local_experts": 6}, PATH).num_experts == 6


# -- doubts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("bits", 8, "ignored"),
        ("group_size", 128, "ignored"),
        ("use_mrope", True, "ignored"),
        ("attention_type", "linear", "ignored"),
        ("eos_token_id", [2, 4000000, -1], "[4000000, -1] ignored"),
        ("activation", "geglu", "ignored"),
        ("odd", {"a": 1}, "ignored"),
        ("sparse_config", {"dense_len": 8192}, "here a token sees all before it"),
        ("dims_per_head", 8, "head_dim alone, and that means 4"),
        ("layer_norm_eps", 1e-3, "rms_norm_eps alone, and that means 1e-05"),
        ("rotary_emb_base", 500000, "rope_theta alone, and that means 10000"),
        ("rope_type", "yarn", "rope_scaling alone, and that means default"),
    ],
)
def test_a_key_that_is_not_read_is_one_doubt(key, value, words):
    (doubt,) = doubts_of(**{key: value})
    assert doubt.field == key
    assert words in doubt.message


def test_many_keys_are_one_short_warning(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY, **{f"odd_{i}": i for i in range(1, 41)}}))
    with pytest.warns(ConfigWarning, match=r"odd_1, odd_2, .* and 34 more: ignored") as caught:
        read_hf_config(path)
    assert len(caught) == 1
    assert len(str(caught[0].message)) < 300 + len(str(path))


@pytest.mark.parametrize(
    ("count", "field", "words"),
    [
        (1, "odd_1", "it"),
        (2, "odd_1, odd_2", "them"),
        (6, "odd_1, odd_2, odd_3, odd_4, odd_5, odd_6", "them"),
        (7, "odd_1, odd_2, odd_3, odd_4, odd_5, odd_6 and 1 more", "them"),
    ],
)
def test_how_keys_that_are_ignored_are_named(count, field, words):
    odd = {f"odd_{n}": n for n in range(1, count + 1)}
    assert doubts_of(**odd) == [Doubt(field, f"ignored, as transformers' llama does not read {words}")]


def test_doubts_say_what_counts():
    """All of a file, in the order of its keys; those that are ignored come last, in one."""
    assert doubts_of(odd=1, norm_eps=0.5, even="x", dims_per_head=8, **{"k" * 101: 2}) == [
        Doubt("norm_eps", "is 0.5, but transformers reads rms_norm_eps alone, and that means 1e-05"),
        Doubt("dims_per_head", "is 8, but transformers reads head_dim alone, and that means 4"),
        Doubt(f"odd, even, {'k' * 100}", "ignored, as transformers' llama does not read them"),
    ]


@pytest.mark.parametrize(
    ("keys", "ids", "beyond"),
    [
        ({"eos_token_id": TINY["vocab_size"] - 1}, (TINY["vocab_size"] - 1,), None),
        ({"eos_token_id": 0}, (0,), None),
        ({"eos_token_id": [0, TINY["vocab_size"]]}, (0,), [TINY["vocab_size"]]),
        ({"eos_token_id": [-1]}, (), [-1]),
        ({"eos_token_id": TINY["vocab_size"]}, (), [TINY["vocab_size"]]),
    ],
)
def test_token_ids_at_the_end_of_a_vocabulary(keys, ids, beyond):
    doubts = []
    assert parse_hf_config({**TINY, **keys}, PATH, doubts=doubts).eos_token_ids == ids
    words = f"{beyond} ignored: not in the vocabulary of {TINY['vocab_size']} tokens"
    assert doubts == ([] if beyond is None else [Doubt("eos_token_id", words)])


def test_a_key_of_another_function_says_which():
    with pytest.raises(ConfigError) as caught:
        parse_hf_config({**TINY, "rotary_pct": 0.25}, PATH)
    meaning = "0.25 means that RoPE turns a part of each head, and no llama model does that"
    assert caught.value.message == f"{meaning}; expected 1, or no such key"


def test_text_of_the_file_does_not_act_on_a_terminal(tmp_path):
    with pytest.warns(ConfigWarning) as caught:
        parse_hf_config({**TINY, "a\x1b[2J\n\t": "b\x1b[2J"}, tmp_path / "config\n.json")
    text = str(caught[0].message)
    assert text.isprintable()
    assert "config\\n.json: a\\x1b[2J\\n\\t: ignored" in text


def test_inspect_shows_doubts(tmp_path):
    folder = write_checkpoint(tmp_path, {**TINY, "use_mrope": True, "odd": 8, "dims_per_head": 8})
    with warnings.catch_warnings(record=True) as caught:
        found = inspect_model(folder)
    assert not caught
    shown = [(each.field, each.part) for each in found.warnings if each.part == "config"]
    assert sorted(shown) == [("dims_per_head", "config"), ("use_mrope, odd", "config")]
    assert found.errors == []


# -- errors ------------------------------------------------------------------------------------------------------------

ON = {"is_causal": False, "use_rope": False, "rotary_pct": 0.25, "num_local_experts": 8, "logit_scale": 2}


@pytest.mark.parametrize("key", OTHER_FUNCTION)
def test_keys_of_another_function(key):
    value = ON.get(key, 0.5 if OTHER_FUNCTION[key].neutral == (1,) else 8 if "expert" in key else True)
    assert field_of_error(**{key: value}) == key
    for neutral in (None, *OTHER_FUNCTION[key].neutral):
        assert doubts_of(**{key: neutral}) == []


@pytest.mark.parametrize("key", sorted({*OTHER_PACKING} - {"quantization"}))
def test_keys_of_another_packing(key):
    assert field_of_error(**{key: {"bits": 2, "group_size": 128}}) == key
    assert field_of_error(**{key: {"bits": 2}, "quantization_config": {"bits": 2}}) == key


def test_mlxs_packing():
    """mlx-lm writes its key twice, and over a BitNet's own; a mode that is not known is refused by name."""
    stated = {"bits": 2, "group_size": 128}
    plain = parse_hf_config(TINY, PATH)
    assert parse_hf_config({**TINY, "quantization": stated, "quantization_config": stated}, PATH) == plain
    bitnet = {**TINY, "model_type": "bitnet", "quantization": stated, "quantization_config": stated}
    assert parse_hf_config(bitnet, PATH).quantization.linear_class == "autobitlinear"
    assert field_of_error(quantization={**stated, "mode": "mxfp6"}) == "quantization.mode"
    assert field_of_error(quantization={**stated, "lm_head": {"mode": "mxfp6"}}) == "quantization.lm_head.mode"
    assert field_of_error(quantization={"method": "other"}) == "quantization"


def test_keys_inside_quantization_config():
    def quantized(**keys):
        return {"quantization_config": {"quant_method": "bitnet", **keys}}

    plain = parse_hf_config({**TINY, **quantized()}, PATH)
    assert parse_hf_config({**TINY, **quantized(bits=2, desc_act=False, _note="x")}, PATH) == plain
    assert parse_hf_config({**TINY, **quantized(bits=1.58)}, PATH) == plain
    assert field_of_error(**quantized(bits=4)) == "quantization_config.bits"
    assert field_of_error(**quantized(group_size=64)) == "quantization_config.group_size"
    with pytest.warns(ConfigWarning, match="quantization_config.odd: ignored"):
        assert parse_hf_config({**TINY, **quantized(odd=1)}, PATH) == plain


# -- keys that occur twice ---------------------------------------------------------------------------------------------


def test_a_key_twice_with_one_meaning(tmp_path):
    """As in HF1BitLLM's files: a null counts as an absent key."""
    plain = {"quant_method": "bitnet"}
    text = json.dumps({**TINY, "quantization_config": {**plain, "modules_to_not_convert": None}})
    path = tmp_path / "config.json"
    path.write_text(text[:-1] + f', "quantization_config": {json.dumps(plain)}, "rope_theta": 10000.0' + "}")
    assert read_hf_config(path) == parse_hf_config({**TINY, "quantization_config": plain}, PATH)


def test_of_two_values_the_last_counts(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY)[:-1] + ', "rms_norm_eps": 0.5}')
    with pytest.warns(ConfigWarning, match=r"rms_norm_eps: occurs twice .*then 0.5: the last one counts"):
        assert read_hf_config(path).norm_eps == 0.5
    folder = write_checkpoint(tmp_path / "m", TINY)
    (folder / "config.json").write_text(path.read_text())
    assert [each.field for each in inspect_model(folder).warnings if each.part == "config"] == ["rms_norm_eps"]


# -- which model it is -------------------------------------------------------------------------------------------------


def test_the_class_says_the_model_type():
    raw = {key: value for key, value in TINY.items() if key != "model_type"}
    for more, model_type in (
        ({"architectures": ["MiniCPMForCausalLM"], "scale_emb": 2}, "minicpm"),
        ({"architectures": ["X", "Qwen3ForCausalLM"], "model_type": None}, "qwen3"),
        ({"architectures": ["MiniCPM"], "auto_map": {"AutoModelForCausalLM": "x.MiniCPMForCausalLM"}}, "minicpm"),
    ):
        assert parse_hf_config({**raw, **more}, PATH).model_type == model_type
    for more in ({}, {"architectures": ["X"]}, {"architectures": [[]], "auto_map": {"AutoModelForCausalLM": 1}}):
        with pytest.raises(ConfigError) as caught:
            parse_hf_config({**raw, **more}, PATH)
        assert caught.value.field == "model_type"


TEXT = {key: value for key, value in TINY.items() if key not in ("model_type", "tie_word_embeddings")}


def test_the_text_part_of_a_vision_model():
    outer = {"vision_config": {"hidden_size": 3}, "image_token_index": 99, "eos_token_id": [3]}
    gemma = {"model_type": "gemma3", "text_config": TEXT, **outer}
    config = parse_hf_config(gemma, PATH)
    inner = TEXT | {"model_type": "gemma3_text", "eos_token_id": TEXT.get("eos_token_id", [3])}
    assert config == parse_hf_config(inner, PATH)
    assert config.tie_word_embeddings
    assert not parse_hf_config({**gemma, "tie_word_embeddings": False}, PATH).tie_word_embeddings
    tied = {**gemma, "tie_word_embeddings": False, "text_config": {**TEXT, "tie_word_embeddings": True}}
    assert parse_hf_config(tied, PATH).tie_word_embeddings
    sizes = parse_hf_config({"model_type": "gemma3", "text_config": {}}, PATH)
    assert (sizes.vocab_size, sizes.hidden_size, sizes.num_hidden_layers) == (262208, 2304, 26)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"text_config": None}, "text_config"),
        ({"text_config": []}, "text_config"),
        ({"text_config": {**TEXT, "model_type": "llama"}}, "text_config.model_type"),
        ({"text_config": {**TEXT, "is_causal": False}}, "is_causal"),
        ({"is_causal": False}, "is_causal"),
        ({"quantization": {"bits": 2, "mode": "mxfp6"}}, "quantization.mode"),
        ({"text_config": {**TEXT, "quantization": {"method": "x"}}}, "quantization"),
        ({"quantization_config": {"quant_method": "modelopt"}}, "quantization_config.quant_method"),
    ],
)
@pytest.mark.parametrize("model_type", ["gemma3", "qwen3_5"])
def test_vision_models_that_are_refused(model_type, change, field):
    with pytest.raises(ConfigError) as caught:
        parse_hf_config({"model_type": model_type, "text_config": TEXT, **change}, PATH)
    assert caught.value.field == field


def test_doubts_about_a_vision_model():
    raw = {"model_type": "gemma3", "text_config": {**TEXT, "inner": 1}, "outer": 1}
    doubts = []
    parse_hf_config(raw, PATH, doubts=doubts)
    assert [doubt.field for doubt in doubts] == ["outer", "inner"]


# -- what takes a configuration alone ----------------------------------------------------------------------------------


def test_read_config_needs_no_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    expected = parse_hf_config(TINY, PATH)
    assert bitnet_ref.read_config(tmp_path) == bitnet_ref.read_config(str(tmp_path / "config.json")) == expected
    model = bitnet_ref.load(backend="numpy")
    assert bitnet_ref.read_config("storyteller") == model.config
    with pytest.raises(FormatError, match="no such file"):
        bitnet_ref.read_config(tmp_path / "absent")
    bare = {key: value for key, value in BITNET.items() if key != "quantization_config"}
    (tmp_path / "config.json").write_text(json.dumps(bare))
    with pytest.raises(ConfigError):
        bitnet_ref.read_config(tmp_path)
    assert bitnet_ref.read_config(tmp_path, allow_unquantized=True).quantization is None


def test_what_one_of_two_dicts_says_alone_is_another_meaning():
    stated = {"bits": 2, "modules_to_not_convert": None}
    for other in ({}, {"bits": None}, {"bits": 3}, {"bits": 2, "group_size": 32}):
        assert not have_same_meaning(stated, other)
        assert not have_same_meaning(other, stated)
    assert have_same_meaning(stated, {"bits": 2})
    assert have_same_meaning({"bits": 2}, stated)
