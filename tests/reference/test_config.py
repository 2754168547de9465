"""bitnet_ref.reference.config: a ModelConfig cannot exist in an invalid state, and its errors name the field."""

import json
from dataclasses import FrozenInstanceError, replace

import pytest

from bitnet_ref.errors import LARGEST_INT, ConfigError
from bitnet_ref.families import FAMILIES, config_from_dict, config_to_dict
from bitnet_ref.families.rope import StretchedRope, make_rope
from bitnet_ref.formats.checkpoint import scale_convention
from bitnet_ref.reference.config import ModelConfig, QuantizationConfig

GOOD = ModelConfig(
    model_type="bitnet",
    vocab_size=100,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=10,
    activation="relu2",
    norm_eps=1e-5,
    max_position_embeddings=128,
)
DYNAMIC = StretchedRope(rope_type="dynamic", factor=2.5, original_max_position_embeddings=128)
LONGROPE = make_rope(
    rope_type="longrope", original_max_position_embeddings=8, long_factors=(2.0,) * 5, short_factors=(1.0,) * 5
)

COUNTS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
)
BAD_COUNTS = [0, -1, 1.0, "8", None, True, [8], float("nan"), LARGEST_INT + 1, 10**400]


@pytest.mark.parametrize("value", BAD_COUNTS, ids=lambda v: repr(v)[:12])
@pytest.mark.parametrize("field", COUNTS)
def test_counts_are_positive_ints(field, value):
    with pytest.raises(ConfigError) as caught:
        replace(GOOD, **{field: value})
    assert caught.value.field == field
    assert repr(value)[:20] in str(caught.value)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"head_dim": 9}, "head_dim"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": None}, "head_dim"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"num_key_value_heads": 12}, "num_key_value_heads"),
        ({"activation": "gelu"}, "hidden_act"),
        ({"activation": ["relu2"]}, "hidden_act"),
        ({"norm_eps": 0.0}, "rms_norm_eps"),
        ({"norm_eps": -1e-5}, "rms_norm_eps"),
        ({"norm_eps": float("inf")}, "rms_norm_eps"),
        ({"norm_eps": float("nan")}, "rms_norm_eps"),
        ({"norm_eps": 1e-46}, "rms_norm_eps"),  # zero in float32: a division by zero
        ({"norm_eps": 1e39}, "rms_norm_eps"),  # infinite in float32: every norm would be zero
        ({"norm_eps": "1e-5"}, "rms_norm_eps"),
        ({"norm_eps": True}, "rms_norm_eps"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"sub_norms": None}, "sub_norms"),
        ({"attention_bias": "false"}, "attention_bias"),
        ({"mlp_bias": 0}, "mlp_bias"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"sliding_window": 4.5}, "sliding_window"),
        ({"sliding_window": 10**30}, "sliding_window"),
        ({"bos_token_id": 100}, "bos_token_id"),
        ({"bos_token_id": -1}, "bos_token_id"),
        ({"eos_token_ids": (3, 100)}, "eos_token_id"),
        ({"eos_token_ids": (3, "4")}, "eos_token_id"),
        ({"rope": DYNAMIC, "head_dim": 2}, "head_dim"),
    ],
)
def test_other_fields(change, field):
    with pytest.raises(ConfigError) as caught:
        replace(GOOD, **change)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"theta": 0.0}, "rope.theta"),
        ({"theta": "10000"}, "rope.theta"),
        ({"theta": 1e31}, "rope.theta"),
        ({"rope_type": "proportional"}, "rope.rope_type"),
        ({"rope_type": "longrope", "original_max_position_embeddings": 8}, "rope.long_factors"),
        ({"long_factors": (1.0,)}, "rope.long_factors"),
        ({"rope_type": None}, "rope.rope_type"),
        ({"rope_type": []}, "rope.rope_type"),
        ({"rope_type": "linear", "factor": 0}, "rope.factor"),
        ({"rope_type": "linear", "factor": float("nan")}, "rope.factor"),
        ({"rope_type": "dynamic", "factor": 0.5, "original_max_position_embeddings": 8}, "rope.factor"),
        ({"rope_type": "dynamic", "factor": 2.0}, "rope.original_max_position_embeddings"),
        ({"rope_type": "llama3", "factor": 2.0}, "rope.original_max_position_embeddings"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 8.0}, "rope.original_max_position_embeddings"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 8, "theta": 1.0}, "rope.theta"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 8, "truncate": 1}, "rope.truncate"),
        ({"beta_fast": -1}, "rope.beta_fast"),
        ({"beta_slow": float("inf")}, "rope.beta_slow"),
        ({"attention_factor": 0}, "rope.attention_factor"),
        (
            {
                "rope_type": "llama3",
                "original_max_position_embeddings": 8,
                "low_freq_factor": 4.0,
                "high_freq_factor": 4.0,
            },
            "rope.high_freq_factor",
        ),
    ],
)
def test_rope(given, field):
    is_plain = given.get("rope_type", "default") == "default" and set(given) <= {"theta"}
    with pytest.raises(ConfigError) as caught:
        make_rope(**given) if is_plain or "rope_type" in given else StretchedRope(**given)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"linear_class": "linear"}, "linear_class"),
        ({"quantization_mode": None}, "quantization_mode"),
        ({"use_rms_norm": "yes"}, "use_rms_norm"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
    ],
)
def test_quantization(given, field):
    with pytest.raises(ConfigError) as caught:
        QuantizationConfig(**given)
    assert caught.value.field == f"quantization_config.{field}"


@pytest.mark.parametrize(
    ("linear_class", "mode", "convention"),
    [
        ("bitlinear", "offline", "divide"),
        ("bitlinear", "online", "divide"),
        ("autobitlinear", "offline", "multiply"),
        ("autobitlinear", "online", "absmean"),
    ],
)
def test_what_a_weight_scale_means(linear_class, mode, convention):
    assert scale_convention(QuantizationConfig(linear_class, mode)) == convention


def test_frozen():
    with pytest.raises(FrozenInstanceError):
        GOOD.vocab_size = 5


def test_sizes():
    assert (GOOD.query_size, GOOD.kv_size) == (60, 20)
    assert GOOD.linear_shapes() == {
        "q_proj": (60, 48),
        "k_proj": (20, 48),
        "v_proj": (20, 48),
        "o_proj": (48, 60),
        "gate_proj": (64, 48),
        "up_proj": (64, 48),
        "down_proj": (48, 64),
    }


def test_context_length():
    """Dynamic RoPE is meant for texts beyond the trained length; the other types have it in max_position_embeddings."""
    assert GOOD.context_length == 128
    assert replace(GOOD, rope=DYNAMIC).context_length == 320
    assert replace(GOOD, rope=StretchedRope(rope_type="linear", factor=4.0)).context_length == 128


def test_config_to_dict_is_json():
    cfg = replace(GOOD, quantization=QuantizationConfig(), rope=DYNAMIC, eos_token_ids=(2, 5))
    back = json.loads(json.dumps(config_to_dict(cfg)))
    assert back["eos_token_ids"] == [2, 5]
    assert back["rope"]["factor"] == 2.5
    assert back["quantization"]["modules_to_not_convert"] == ["lm_head"]
    assert set(back) == set(config_to_dict(GOOD))


@pytest.mark.parametrize(
    "config",
    [
        GOOD,
        replace(GOOD, rope=DYNAMIC, sliding_window=7, bos_token_id=1, eos_token_ids=(2, 5)),
        replace(GOOD, quantization=QuantizationConfig("autobitlinear", "online", ("lm_head", "a*"), True, 1e-5)),
        replace(GOOD, layer_types=("full_attention", "sliding_attention"), sliding_window=7),
        replace(GOOD, rope=LONGROPE),
        *(family.example() for family in FAMILIES.values()),
    ],
)
def test_config_from_dict_is_the_inverse_of_config_to_dict(config):
    back = config_from_dict(json.loads(json.dumps(config_to_dict(config))))
    assert back == config
    assert hash(back) == hash(config)  # tuples, not lists


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda raw: raw.pop("sub_norms"), "sub_norms"),
        (lambda raw: raw.update(more=1), "more"),
        (lambda raw: raw["rope"].pop("theta"), "rope.theta"),
        (lambda raw: raw["rope"].update(more=1), "rope.more"),
        (lambda raw: raw.update(rope=None), "rope"),
        (lambda raw: raw["rope"].update(rope_type=[]), "rope.rope_type"),
        (lambda raw: raw["rope"].update(rope_type="longrope", long_factors=2.0), "rope.long_factors"),
        (lambda raw: raw.update(layer_types="full_attention"), "layer_types"),
        (lambda raw: raw.update(quantization=[]), "quantization"),
        (lambda raw: raw["quantization"].pop("use_rms_norm"), "quantization.use_rms_norm"),
        (lambda raw: raw["quantization"].update(modules_to_not_convert="lm_head"), "modules_to_not_convert"),
        (lambda raw: raw["quantization"].update(modules_to_not_convert=[1]), "modules_to_not_convert"),
        (lambda raw: raw.update(model_type=None), "model_type"),
        (lambda raw: raw.update(eos_token_ids=2), "eos_token_ids"),
        (lambda raw: raw.update(eos_token_ids=[10**6]), "eos_token_id"),
        (lambda raw: raw.update(activation=[]), "hidden_act"),
        (lambda raw: raw.update(head_dim=3), "head_dim"),
    ],
)
def test_config_from_dict_is_strict(change, field):
    raw = config_to_dict(replace(GOOD, quantization=QuantizationConfig()))
    change(raw)
    with pytest.raises(ConfigError) as caught:
        config_from_dict(raw)
    assert field in caught.value.field


@pytest.mark.parametrize("raw", [None, [], "x", {}])
def test_config_from_dict_of_anything_else(raw):
    with pytest.raises(ConfigError):
        config_from_dict(raw)
