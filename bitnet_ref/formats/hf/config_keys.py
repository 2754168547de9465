"""What it means when config.json has a key that the reader of its family does not take: nothing, a doubt, or an error.

transformers ignores a key that its class does not read, so the key cannot change what the model computes. We ignore it
too and report a `Doubt`. Two kinds of keys are errors all the same: those that ask for another function, and those
of another packing of the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from ...errors import ConfigError, describe
from ...reference.config import ModelConfig
from .packings import describe_mlx


class Doubt(NamedTuple):
    """Something in a config.json that is read, but may not be what was meant."""

    field: str
    message: str


class Function(NamedTuple):
    """A key of another function: the values with which it changes nothing, and what it means with any other."""

    neutral: tuple[Any, ...]
    meaning: str


_NOT_SET = (False, 0)
_FACTOR = Function((1,), "the result is multiplied by a factor")
_EXPERTS = "the feed-forward is a mixture of experts"
_PARALLEL = Function(_NOT_SET, "attention and feed-forward read the same input")
OTHER_FUNCTION = {
    "add_cross_attention": Function(_NOT_SET, "the layers attend to an encoder"),
    "alibi": Function(_NOT_SET, "positions are ALiBi's biases, not RoPE"),
    "attention_multiplier": _FACTOR,
    "attn_logit_softcapping": Function(_NOT_SET, "attention scores are capped"),
    "embedding_multiplier": _FACTOR,
    "final_logit_softcapping": Function(_NOT_SET, "logits are capped"),
    "is_causal": Function((True,), "a token also sees those after it: the model is an encoder"),
    "logit_scale": _FACTOR,
    "logits_scaling": _FACTOR,
    "n_routed_experts": Function((0,), _EXPERTS),
    "num_experts": Function((0,), _EXPERTS),
    "num_local_experts": Function((0, 1), _EXPERTS),
    "parallel_attn": _PARALLEL,
    "residual_multiplier": _FACTOR,
    "rope_interleaved": Function(_NOT_SET, "RoPE turns neighbouring values, not the two halves of a head"),
    "rotary_pct": Function((1,), "RoPE turns a part of each head"),
    "use_bidirectional_attention": Function(_NOT_SET, "a token also sees those after it"),
    "use_cla": Function(_NOT_SET, "layers share keys and values"),
    "use_mup": Function(_NOT_SET, "activations are multiplied by mu-P's factors"),
    "use_parallel_residual": _PARALLEL,
    "use_qk_norm": Function(_NOT_SET, "queries and keys are normalised"),
    "use_rope": Function((True,), "positions are not RoPE"),
}
OTHER_PACKING = {
    "compression_config": "compressed-tensors",
    "hadamard": "a repack of Bonsai 2 in a Hadamard basis",
    "hadamard_config": "MLX's Bonsai 2 in a Hadamard basis",
    "packed": "a packing of its own",
    "quant_bits": "AutoGPTQ",
    "quantization": "MLX",
}
# Inside quantization_config of quant_method "bitnet", with the values that describe BitNet's own packing
BITNET_PACKING = {"bits": (1.58, 2), "group_size": ()}
# Keys that repeat another: the key that counts, and the field of `ModelConfig` that holds its value
REPEATED = {
    "dims_per_head": ("head_dim", "head_dim"),
    "layer_norm_eps": ("rms_norm_eps", "norm_eps"),
    "norm_eps": ("rms_norm_eps", "norm_eps"),
    "rope_type": ("rope_scaling", "rope.rope_type"),
    "rotary_emb_base": ("rope_theta", "rope.theta"),
}
# Keys whose one usual value names what is computed anyway
_USUAL = {"activation": "swiglu", "attention_type": "full", "output_gate_type": "swish"}
# Keys that do not change what is computed, or not for inference
_WITHOUT_EFFECT = {
    *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "initializer_range", "use_cache"),
    *("pretraining_tp", "pretraining_model_parallel", "ep_size", "flash_attn", "tf_legacy_loss", "logits_to_keep"),
    *("tokenizer_class", "cache_implementation", "is_llama_config", "transformers.js_config", "unsloth_version"),
    *("unsloth_fixed", "attn_implementation", "keys_to_ignore_at_inference", "gradient_checkpointing", "return_dict"),
    *("output_attentions", "output_hidden_states", "torchscript", "use_bfloat16", "chunk_size_feed_forward"),
    *("task_specific_params", "problem_type", "id2label", "label2id", "finetuning_task", "prefix", "name_or_path"),
    *("is_encoder_decoder", "is_decoder", "use_flash_attn", "max_length", "min_length", "do_sample", "temperature"),
    *("top_k", "top_p", "num_beams", "repetition_penalty", "early_stopping", "suppress_tokens"),
    *("begin_suppress_tokens", "bad_words_ids", "model_max_length", "length_penalty", "no_repeat_ngram_size"),
    *("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mlp_only_layers"),
    *("is_bitnet_config", "language_model_only", "is_vision_model", "num_nextn_predict_layers", "vocab_size_padded"),
    *("weight_bits", "input_bits", "sliding_window", "attention_bias", "mlp_bias", "rope_parameters", "rope_scaling"),
    *("rope_theta", "original_max_position_embeddings", "partial_rotary_factor", "max_window_layers"),
    *("router_aux_loss_coef", "router_jitter_noise", "output_router_logits"),
    *("use_sliding_window", "quantization_config", "quantization", "model_type", "type_vocab_size"),
}
_WITHOUT_EFFECT_ENDINGS = ("_dropout", "_dropout_prob", "_pdrop", "_token_id", "_token_index")
# Keys that only code of the repository's own reads, and what it does by them
_OF_OTHER_CODE = {
    "sparse_config": "openbmb's code chooses what a token of a long text sees; here a token sees all before it"
}
_NAMED = 6  # keys that one message names


def is_off(value: Any) -> bool:
    """Whether a key with this value says the same as no key: the feature is off."""
    return value in (None, False, 0, "", "default", [], {})


def have_same_meaning(a: Any, b: Any) -> bool:
    """Whether two values of one key are equal when a null counts as an absent key.

    >>> have_same_meaning({"quant_method": "bitnet", "modules_to_not_convert": None}, {"quant_method": "bitnet"})
    True
    """
    if isinstance(a, dict) and isinstance(b, dict):
        return all(have_same_meaning(a.get(key), b.get(key)) for key in a.keys() | b.keys())
    return type(a) is type(b) and bool(a == b)


def refuse_other_packings(raw: Mapping[str, Any]) -> None:
    """ConfigError for a key that says that the weights are packed in a way that is not read."""
    for key, name in OTHER_PACKING.items():
        value = raw.get(key)
        if is_off(value) or (key == "quantization" and describe_mlx(raw) is not None):
            continue
        raise ConfigError(
            f"says that the weights are packed by {name}, which is not read: got {describe(value)}", field=key
        )


def check_unread(raw: Mapping[str, Any], read: Iterable[str], config: ModelConfig | None = None) -> list[Doubt]:
    """Doubts about the keys that were not read. ConfigError for a key of another function.

    config: what was made of the others, to compare keys with that repeat them.
    """
    doubts: list[Doubt] = []
    ignored: list[str] = []
    for key in (key for key in raw if key not in read):
        value = raw[key]
        if key in OTHER_FUNCTION:
            _check_function(key, value, str(raw.get("model_type")))
        elif _has_no_effect(key, value):
            continue
        elif key in REPEATED and config is not None:
            counting_key, field = REPEATED[key]
            counting = attrgetter(field)(config)
            if value != counting:
                message = (
                    f"is {describe(value)}, but transformers reads {counting_key} alone, and that means {counting}"
                )
                doubts.append(Doubt(key, message))
        elif key in _OF_OTHER_CODE:
            doubts.append(Doubt(key, _OF_OTHER_CODE[key]))
        else:
            ignored.append(key[:100])
    if ignored:
        doubts.append(_doubt_ignored(ignored, str(raw.get("model_type"))))
    return doubts


def _check_function(key: str, value: Any, model_type: str) -> None:
    neutral, meaning = OTHER_FUNCTION[key]
    if value is None or value in neutral:
        return
    expected = f"expected {neutral[0]!r}, or no such key"
    raise ConfigError(
        f"{describe(value)} means that {meaning}, and no {model_type} model does that; {expected}", field=key
    )


def _has_no_effect(key: str, value: Any) -> bool:
    by_name = key in _WITHOUT_EFFECT or key.startswith("_") or key.endswith(_WITHOUT_EFFECT_ENDINGS)
    return by_name or is_off(value) or _USUAL.get(key) == value


def _doubt_ignored(keys: list[str], model_type: str) -> Doubt:
    """One doubt for all keys, however many there are."""
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    words = "it" if len(keys) == 1 else "them"
    return Doubt(f"{', '.join(keys[:_NAMED])}{more}", f"ignored, as transformers' {model_type} does not read {words}")
