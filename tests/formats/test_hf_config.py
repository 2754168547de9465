"""formats.hf_config: config.json in its spellings, transformers' defaults, and errors that name file and key."""

import json
import math
from pathlib import Path

import pytest
from helpers import BITNET, TINY

import bitnet_ref
from bitnet_ref.errors import LARGEST_INT, ConfigError, ConfigWarning, FormatError
from bitnet_ref.formats.checkpoint import scale_convention
from bitnet_ref.formats.hf.config import MAX_CONFIG_BYTES, Keys, parse_hf_config, read_hf_config
from bitnet_ref.formats.hf.wrappers import hf_form
from bitnet_ref.formats.hf.writer import hf_config_json
from bitnet_ref.formats.open import choose_format
from bitnet_ref.reference.config import QuantizationConfig, RopeConfig

PATH = Path("somewhere/config.json")

# microsoft/bitnet-b1.58-2B-4T, as published
TWO_B = {
    "architectures": ["BitNetForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "relu2",
    "hidden_size": 2560,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 4096,
    "model_type": "bitnet",
    "rms_norm_eps": 1e-05,
    "num_attention_heads": 20,
    "num_hidden_layers": 30,
    "num_key_value_heads": 5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
    "quantization_config": {
        "quant_method": "bitnet",
        "linear_class": "autobitlinear",
        "quantization_mode": "offline",
    },
}


def parse(raw, **more):
    return parse_hf_config({**raw, **more}, PATH)


def without(raw, *keys):
    return {key: value for key, value in raw.items() if key not in keys}


def check_error(raw, field):
    with pytest.raises(ConfigError) as caught:
        parse_hf_config(raw, PATH)
    assert caught.value.path == str(PATH)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{PATH}, {field}: ")


# -- what is read ------------------------------------------------------------------------------------------------------


def test_the_2b_model():
    cfg = parse(TWO_B)
    assert cfg.head_dim == 128
    assert (cfg.activation, cfg.sub_norms, cfg.tie_word_embeddings) == ("relu2", True, True)
    assert cfg.rope == RopeConfig(theta=500000.0)
    assert scale_convention(cfg.quantization) == "multiply"
    assert (cfg.bos_token_id, cfg.eos_token_ids, cfg.sliding_window) == (128000, (128001,), None)
    assert cfg.context_length == 4096


def test_absent_keys_take_the_defaults_of_the_class():
    optional = ("num_key_value_heads", "rms_norm_eps", "max_position_embeddings")
    bitnet = parse(without(BITNET, *optional), num_attention_heads=5, hidden_size=20)
    assert (bitnet.num_key_value_heads, bitnet.norm_eps, bitnet.max_position_embeddings) == (5, 1e-5, 2048)
    assert (bitnet.rope.theta, bitnet.activation) == (500000.0, "relu2")
    untied = parse(without(BITNET, "tie_word_embeddings"))
    assert not untied.tie_word_embeddings
    llama = parse(without(TINY, *optional))
    assert (llama.num_key_value_heads, llama.norm_eps, llama.max_position_embeddings) == (4, 1e-6, 2048)
    assert (llama.rope.theta, llama.activation, llama.sub_norms) == (10000.0, "silu", False)
    assert (llama.bos_token_id, llama.eos_token_ids) == (1, (2,))
    assert (llama.attention_bias, llama.mlp_bias) == (False, False)
    mistral = parse(without(TINY, "max_position_embeddings"), model_type="mistral")
    assert (mistral.sliding_window, mistral.max_position_embeddings) == (4096, 131072)


def test_null_is_not_absent():
    """A null sliding_window is full attention; an absent one is the class's 4096."""
    assert parse(TINY, model_type="mistral", sliding_window=None).sliding_window is None
    cfg = parse(TINY, bos_token_id=None, eos_token_id=None, head_dim=None, num_key_value_heads=None)
    assert (cfg.bos_token_id, cfg.eos_token_ids, cfg.head_dim, cfg.num_key_value_heads) == (None, (), 4, 4)


def test_a_mistral_with_layer_types_is_a_ministral():
    """transformers' AutoModel takes that class, in which each layer has its own kind."""
    layers = TINY["num_hidden_layers"]
    mixed = ["full_attention", *["sliding_attention"] * (layers - 1)]
    for types, windows in (
        (mixed, [None, *[8] * (layers - 1)]),
        (["full_attention"] * layers, [None] * layers),
        (["sliding_attention"] * layers, [8] * layers),
        (None, [8] * layers),
    ):
        config = parse(TINY, model_type="mistral", sliding_window=8, layer_types=types)
        assert [config.window_of(layer) for layer in range(layers)] == windows
        assert parse(hf_config_json(config, None, "F32")) == config


def test_default_ids_beyond_a_small_vocabulary_are_dropped():
    cfg = parse(without(BITNET, "bos_token_id", "eos_token_id"))
    assert (cfg.bos_token_id, cfg.eos_token_ids) == (None, ())


def test_several_eos_ids():
    assert parse(TINY, eos_token_id=[2, 7]).eos_token_ids == (2, 7)


def test_head_dim_need_not_be_hidden_over_heads():
    assert parse(TINY, head_dim=32).query_size == 128


def test_keys_of_other_families_are_not_read():
    """transformers' LLaMA has no sliding window and its Mistral no biases, whatever the file says."""
    assert parse(TINY, sliding_window=4).sliding_window is None
    mistral = parse(TINY, model_type="mistral", attention_bias=True, mlp_bias=True)
    assert (mistral.attention_bias, mistral.mlp_bias) == (False, False)


def test_one_bit_llm():
    raw = {**TINY, "weight_bits": 1, "input_bits": 8, "hidden_act": "silu"}
    cfg = parse(raw)
    assert cfg.sub_norms
    assert cfg.quantization == QuantizationConfig("autobitlinear", "online")
    check_error({**raw, "weight_bits": 2}, "weight_bits")
    check_error({**raw, "input_bits": 4}, "input_bits")
    check_error(without(raw, "input_bits"), "input_bits")


def test_quantization_defaults():
    """No linear_class is bitlinear, whose scale divides; no list of modules leaves the head alone."""
    cfg = parse(TINY, quantization_config={"quant_method": "bitnet", "modules_to_not_convert": None})
    assert cfg.quantization == QuantizationConfig("bitlinear", "offline", ("lm_head",), False, 1e-6)
    assert parse(TINY, quantization_config={"quant_method": "bitnet", "modules_to_not_convert": []}).quantization == (
        QuantizationConfig(modules_to_not_convert=())
    )


def test_bitnet_without_quantization_config_is_refused_unless_asked():
    raw = without(BITNET, "quantization_config")
    check_error(raw, "quantization_config")
    check_error({**raw, "quantization_config": None}, "quantization_config")
    assert parse_hf_config(raw, PATH, allow_unquantized=True).quantization is None


LLAMA3 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 7.0}, {"rope_type": "default", "rope_theta": 7.0}),
        ({"rope_theta": 7.0, "rope_scaling": None}, {"rope_theta": 7.0}),
        (
            {"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2}},
            {"rope_type": "linear", "factor": 2, "rope_theta": 7.0},
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, {"rope_type": "dynamic", "factor": 2.0}),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, {"rope_type": "llama3", **LLAMA3}),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
            {"rope_type": "yarn", "original_max_position_embeddings": 16},  # 64 / 16
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 16},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        ),
    ],
)
def test_old_and_new_spelling_of_rope(old, new):
    assert parse(TINY, **old) == parse(TINY, rope_parameters=new)


@pytest.mark.parametrize("theta", [None, 7000.0])
def test_of_both_spellings_of_rope_the_old_one_wins(theta):
    """As in transformers, which does not read the other's theta either."""
    words = r"rope_scaling: counts, as in transformers, with rope_theta (10000|7000);"
    with pytest.warns(ConfigWarning, match=words) as caught:
        cfg = parse(
            {**TINY, "rope_theta": theta},
            rope_scaling={"type": "linear", "factor": 4.0},
            rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        )
    assert (cfg.rope.rope_type, cfg.rope.factor, cfg.rope.theta) == ("linear", 4.0, theta or 10000.0)
    assert caught[0].filename == __file__


def test_original_length_defaults_to_the_whole_context():
    rope = parse(TINY, rope_parameters={"rope_type": "yarn", "factor": 2.0}).rope
    assert rope.original_max_position_embeddings == 64
    assert parse(TINY, rope_parameters={"rope_type": "yarn", "original_max_position_embeddings": 1}).rope.factor == 64
    assert rope.attention_factor == pytest.approx(1.0693147180559945)  # 0.1 ln 2 + 1


def test_dynamic_rope_is_based_on_the_whole_context():
    rope = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16}
    assert parse(TINY, rope_parameters=rope).rope.original_max_position_embeddings == 64


@pytest.mark.parametrize(
    ("params", "factor"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 0.75, "mscale": 2, "mscale_all_dim": 3}, 0.75),
        ({"mscale": 2.0, "mscale_all_dim": 0.5}, (0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1)),
        ({"mscale": 2.0}, 0.1 * math.log(4) + 1),
        ({"mscale": 0, "mscale_all_dim": 3}, 0.1 * math.log(4) + 1),
        ({"mscale": 2.0, "mscale_all_dim": 0.0}, 0.1 * math.log(4) + 1),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_what_yarn_scales_by(params, factor):
    rope = parse(TINY, rope_parameters={"rope_type": "yarn", "factor": 4.0, **params}).rope
    assert rope.attention_factor == pytest.approx(factor, rel=1e-12)


def test_the_largest_context_that_yarn_divides():
    raw = {**TINY, "rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 2**20}}
    assert parse(raw, max_position_embeddings=LARGEST_INT).rope.factor == LARGEST_INT / 2**20
    check_error({**raw, "max_position_embeddings": LARGEST_INT + 1}, "rope_parameters.factor")


def test_the_width_of_a_head():
    for heads in (1, 2, 4):
        raw = {**without(TINY, "head_dim"), "num_attention_heads": heads, "num_key_value_heads": 1}
        assert parse(raw).head_dim == TINY["hidden_size"] // heads
    for heads in (0, -1, 3, 2.0):
        check_error({**raw, "num_attention_heads": heads}, "head_dim")


def test_all_that_yarn_may_say():
    own = {"factor": 4.0, "beta_fast": 20.0, "beta_slow": 2.0, "truncate": False, "rope_theta": 5.0}
    rope = parse(TINY, rope_parameters={"rope_type": "yarn", "original_max_position_embeddings": 16, **own}).rope
    assert (rope.theta, rope.factor, rope.original_max_position_embeddings) == (5.0, 4.0, 16)
    assert (rope.beta_fast, rope.beta_slow, rope.truncate) == (20.0, 2.0, False)
    plain = parse(TINY, rope_parameters={"rope_type": "yarn", "factor": 4.0}).rope
    assert (plain.beta_fast, plain.beta_slow, plain.truncate) == (32.0, 1.0, True)


def test_what_longrope_scales_by():
    """sqrt(1 + ln(factor) / ln(original)), unless the file says it; the factor is that of the lengths."""
    factors = {"long_factor": [1.0, 2.0], "short_factor": [1.0, 1.5], "original_max_position_embeddings": 16}
    rope = parse(TINY, rope_parameters={"rope_type": "longrope", **factors}).rope
    assert (rope.factor, rope.long_factors, rope.short_factors) == (4.0, (1.0, 2.0), (1.0, 1.5))
    assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(16)), rel=1e-12)
    given = parse(TINY, rope_parameters={"rope_type": "longrope", **factors, "attention_factor": 1.25, "factor": 2.0})
    assert (given.rope.factor, given.rope.attention_factor) == (2.0, 1.25)
    for wrong in ([], "x", 1, None):
        check_error(
            {**TINY, "rope_parameters": {"rope_type": "longrope", **factors, "short_factor": wrong}},
            "rope_parameters.short_factor",
        )


def keys_of(**raw):
    return Keys({**TINY, **raw}, hf_form("llama"), False, [])


def test_numbers_from_the_least_to_the_most():
    for value in (1, 1e-300, 9.9e29, 0.5):
        assert keys_of(x=value).number("x") == value
        assert type(keys_of(x=value).number("x")) is float
    for value in (0, 0.0, -1.0, 1e30, float("nan"), float("inf"), True, "1", None, [1]):
        with pytest.raises(ConfigError, match=r"^x: expected a number above 0, got "):
            keys_of(x=value).number("x")
    assert keys_of().number("x", 2) == 2.0
    assert keys_of(x=None).number("x", 2) == 2.0
    for value in (0, 1.0, True, "1", None, -1):
        with pytest.raises(ConfigError, match=r"^x: expected a whole number from 1 to 1048576, got "):
            keys_of(x=value).count("x")
    assert keys_of(x=1).count("x") == 1


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        (["full_attention"] * 2, {"sliding_window": None, "layer_types": ()}),
        (["sliding_attention"] * 2, {"sliding_window": 7, "layer_types": ()}),
        (
            ["full_attention", "sliding_attention"],
            {"sliding_window": 7, "layer_types": ("full_attention", "sliding_attention")},
        ),
    ],
)
def test_the_kinds_of_layers(types, expected):
    assert TINY["num_hidden_layers"] == 2
    assert keys_of(layer_types=types).layer_types(7, []) == expected
    assert keys_of().layer_types(7, types) == expected
    for wrong in ("full_attention", [1], {}):
        with pytest.raises(ConfigError, match=r"^layer_types: expected a list of names, got "):
            keys_of(layer_types=wrong or {"a": 1}).layer_types(7, [])
    for kind in ("full_attention", "sliding_attention"):
        raw = {**TINY, "model_type": "smollm3", "use_sliding_window": True, "sliding_window": 7}
        with pytest.raises(ConfigError, match=r"layer_types: expected a name for each of 2 layers, got "):
            parse_hf_config({**raw, "layer_types": [kind]}, PATH)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
def test_sizes_are_required(key):
    check_error(without(TINY, key), key)
    check_error({**TINY, key: None}, key)


HOSTILE = [-1, 0, 1.5, "16", [], {}, True, float("nan"), float("inf"), 10**30, 10**400]


@pytest.mark.parametrize("value", HOSTILE, ids=lambda v: repr(v)[:8])
@pytest.mark.parametrize(
    "key",
    [
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "max_position_embeddings"),
    ],
)
def test_hostile_sizes(key, value):
    with pytest.raises(ConfigError) as caught:
        parse(TINY, **{key: value})
    assert caught.value.path == str(PATH)
    assert caught.value.field is not None


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"model_type": {}}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"hidden_act": 3}, "hidden_act"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"tie_word_embeddings": "true"}, "tie_word_embeddings"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "head_dim"),  # 16 / 3
        ({"bos_token_id": [1]}, "bos_token_id"),
        ({"eos_token_id": [[2]]}, "eos_token_id"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 2}, "partial_rotary_factor"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types"),
        ({"rope_theta": -1.0}, "rope.theta"),
        ({"rope_theta": "big"}, "rope.theta"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope_parameters.rope_type"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.long_factor"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_parameters.rope_type"),
        ({"rope_scaling": {"type": "su"}}, "rope_scaling.rope_type"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope_scaling.factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "2"}}, "rope.factor"),
        (
            {"rope_parameters": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": None}},
            "rope_parameters.low_freq_factor",
        ),
        ({"rope_parameters": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1}}, "rope.high_freq_factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": []}}, "rope_parameters.factor"),
        ({"rope_parameters": {"rope_type": "yarn"}, "max_position_embeddings": 0}, "rope_parameters.factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": -1}}, "rope_parameters.mscale"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 1e9}}, "rope_parameters.mscale"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": "no"}}, "rope.truncate"),
        (
            {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 10**400}},
            "rope_parameters.factor",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": []}},
            "rope.original_max_position_embeddings",
        ),
        ({"quantization_config": "bitnet"}, "quantization_config"),
        ({"quantization_config": {"linear_class": "bitlinear"}}, "quantization_config.quant_method"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.quant_method"),
        (
            {"quantization_config": {"quant_method": "bitnet", "linear_class": "dense"}},
            "quantization_config.linear_class",
        ),
        (
            {"quantization_config": {"quant_method": "bitnet", "quantization_mode": 1}},
            "quantization_config.quantization_mode",
        ),
        (
            {"quantization_config": {"quant_method": "bitnet", "modules_to_not_convert": "lm_head"}},
            "quantization_config.modules_to_not_convert",
        ),
        (
            {"quantization_config": {"quant_method": "bitnet", "modules_to_not_convert": [""]}},
            "quantization_config.modules_to_not_convert",
        ),
        (
            {
                "tie_word_embeddings": True,
                "quantization_config": {"quant_method": "bitnet", "modules_to_not_convert": []},
            },
            "quantization_config.modules_to_not_convert",
        ),
        (
            {"quantization_config": {"quant_method": "bitnet", "modules_to_not_convert": ["re:.*q_proj"]}},
            "quantization_config.modules_to_not_convert",
        ),
        (
            {"quantization_config": {"quant_method": "bitnet", "modules_to_not_convert": ["(.*)*q_proj"]}},
            "quantization_config.modules_to_not_convert",
        ),
    ],
)
def test_bad_values_name_their_key(change, field):
    check_error({**TINY, **change}, field)


def test_an_architecture_that_is_not_read_is_told_which_are_and_why():
    for name, reason in (("gpt2", "other architectures are"), ("a_vl", "vision is"), ("moe", "mixture of experts is")):
        with pytest.raises(ConfigError, match=rf"expected one of llama, mistral, .*, got '{name}': {reason} not supp"):
            parse(TINY, model_type=name)


def test_huge_numbers_without_a_factor_do_not_overflow():
    check_error(
        {**TINY, "max_position_embeddings": 10**400, "rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.factor"
    )


# -- the file ----------------------------------------------------------------------------------------------------------


def test_reading_a_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    assert read_hf_config(path) == parse(TINY)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"", "not valid JSON"),
        (b"[]", "expected a JSON object, got list"),
        (b"null", "got NoneType"),
        (b"{'model_type': 1}", "not valid JSON"),
        (b'{"a": 1,}', "not valid JSON"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b'{"a": ' + b"[" * 200_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not usable JSON"),
        (b" " * (MAX_CONFIG_BYTES + 1), "at most"),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_files_that_are_no_config(tmp_path, content, message):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_hf_config(path)
    assert caught.value.path == str(path)


def test_the_offset_of_a_syntax_error_is_in_bytes(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"é": é}', encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_hf_config(path)
    assert caught.value.offset == 7


def test_a_folder_named_config_json(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match="not a regular file"):
        read_hf_config(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("method", "writer"),
    [
        ("gptq", "AutoGPTQ"),
        ("compressed-tensors", "llm-compressor"),
        ("mxfp4", "gpt-oss"),
        ("new", "which is not read"),
    ],
)
def test_other_packings_are_refused_by_their_writers(method, writer):
    with pytest.raises(ConfigError, match=writer) as caught:
        parse_hf_config({**TINY, "quantization_config": {"quant_method": method, "bits": 2}}, Path("config.json"))
    assert caught.value.field == "quantization_config.quant_method"
    assert "before it was packed" in str(caught.value)


def test_a_folder_of_ternary_quant(tmp_path):
    (tmp_path / "codes").mkdir()
    (tmp_path / "metadata.json").write_text('{"format_family": "groupwise_small"}')
    with pytest.raises(FormatError, match="ternary-quant"):
        bitnet_ref.load(tmp_path)
    for missing in ("codes", "metadata.json"):
        (tmp_path / missing).rename(tmp_path / "other")
        assert choose_format(tmp_path) == ("hf", tmp_path)
        (tmp_path / "other").rename(tmp_path / missing)
    (tmp_path / "config.json").write_text("{}")
    assert choose_format(tmp_path) == ("hf", tmp_path)
