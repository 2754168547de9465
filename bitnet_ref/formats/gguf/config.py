"""A GGUF's metadata -> `ModelConfig`, and back. `ARCHITECTURES` says what general.architecture means.

Numbers are float32 in the file: 1e-5 would come back as 9.99999975e-06, so the shortest decimal with the same float32
value is taken. Source: llama.cpp, docs/gguf.md and convert_hf_to_gguf.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, FormatError
from ...reference.config import (
    DeltaConfig,
    ModelConfig,
    QuantizationConfig,
    RopeConfig,
    activation_name,
    longrope_scale,
    yarn_scale,
)
from ...reference.layers import rope_frequencies
from ...reference.weights import ATTENTION_LINEARS
from ..names import GGUF_LINEARS, gguf_name
from .file import GgufFile, Typed


class Architecture(NamedTuple):
    """What a value of general.architecture means."""

    activation: str  # unless `<arch>.hidden_activation` says otherwise
    sub_norms: bool
    permuted: bool = False  # rows of q and k are in the order of interleaved RoPE
    model_type: str = ""  # transformers' name of the family; "": by sub-norms and window
    renamed: Mapping[str, str] = MappingProxyType({})  # our name of a norm -> its own of these files


ARCHITECTURES = {
    "bitnet": Architecture("silu", sub_norms=True),  # 1bitLLM
    "bitnet-b1.58": Architecture("relu2", sub_norms=True),  # 2B-4T
    "bitnet-25": Architecture("relu2", sub_norms=True),  # the same, older name
    "llama": Architecture("silu", sub_norms=False, permuted=True),  # LLaMA, Mistral; ternary (Falcon3) or dense
    "qwen2": Architecture("silu", sub_norms=False, model_type="qwen2"),
    "qwen3": Architecture("silu", sub_norms=False, model_type="qwen3"),
    "gemma3": Architecture("gelu_tanh", sub_norms=False, model_type="gemma3_text"),
    "qwen35": Architecture("silu", False, model_type="qwen3_5_text", renamed={"ffn_norm": "post_attention_norm"}),
    "minicpm": Architecture("silu", sub_norms=False, permuted=True, model_type="minicpm"),
}
_COUNTS = {  # key -> field of ModelConfig, in the order of bitnet.cpp's converter
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
_DELTA_KEYS = ("group_count", "time_step_rank", "state_size", "inner_size", "conv_kernel")  # as in `DeltaConfig`
_ROPE_SECTIONS = (11, 11, 10, 0)  # of Qwen3.5: text has one position for all of them, but llama.cpp wants the key
_POOLINGS = {1: "mean", 3: "last"}  # llama.cpp's numbers
ROPE_FREQS = "rope_freqs.weight"
ROPE_FACTORS = {"long_factors": "rope_factors_long.weight", "short_factors": "rope_factors_short.weight"}
_ORIGINAL = "rope.scaling.original_context_length"
LINEAR_NORM_EPS = 1e-6  # of these norms
LINEAR_NORM = "blk.0.attn_q_norm_in.weight"  # there if each linear has a norm of its own before it
_MIN_TENSORS_PER_LAYER = 9  # two norms, seven linears
# Texts that mark the end of a turn; llama.cpp looks for the same
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end_of_turn|>", "<end_of_turn>", "<|end|>", "<EOT>")


class _Keys:
    """The metadata of one architecture. Its errors name the key."""

    def __init__(self, file: GgufFile) -> None:
        self.file, self.metadata = file, file.metadata
        self.arch = self.metadata.get("general.architecture")
        if not isinstance(self.arch, str) or self.arch not in ARCHITECTURES:
            expected = f"expected one of {', '.join(ARCHITECTURES)}"
            raise self.fail("general.architecture", f"{expected}, got {self.arch!r}: others are not supported")
        self.architecture = ARCHITECTURES[self.arch]

    def fail(self, key: str, message: str) -> ConfigError:
        return ConfigError(message, path=self.file.path, field=key)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `<arch>.key`."""
        return self.metadata.get(f"{self.arch}.{key}", default)

    def has(self, key: str) -> bool:
        """Whether the key is there and not 0, which means the same as absent."""
        value = self.get(key)
        return value is not None and not (isinstance(value, int | float) and value == 0)

    def text(self, key: str, default: str) -> str:
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self.fail(f"{self.arch}.{key}", f"expected a string, got {value!r}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            got = "it is absent" if value is None else f"got {value!r}"
            raise self.fail(f"{self.arch}.{key}", f"expected a whole number above zero; {got}")
        return value

    def flags(self, key: str, layers: int) -> list[bool]:
        """An array with true or false for each layer, perhaps with more for draft layers after them."""
        value = self.get(key)
        values = value.tolist() if isinstance(value, np.ndarray) else value
        if not isinstance(values, list) or len(values) < layers or any(each not in (0, 1) for each in values):
            raise self.fail(f"{self.arch}.{key}", f"expected true or false for each of {layers} layers")
        return [bool(each) for each in values[:layers]]

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            got = "it is absent" if value is None else f"got {value!r}"
            raise self.fail(f"{self.arch}.{key}", f"expected a number; {got}")
        return shortest(value)


def shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 9.999999747378752e-06 -> 1e-05."""
    with np.errstate(over="ignore"):
        single = np.float32(value)
    return float(str(single)) if float(single) == value else float(value)


def read_gguf_config(
    file: GgufFile, quantization: QuantizationConfig | None, evidence: list[str] | None = None
) -> ModelConfig:
    """The configuration. The metadata do not describe `quantization`; see `evidence.find_ternary`.

    evidence: gets a sentence if the metadata contradict the architecture's name. Raises ConfigError naming the key,
    FormatError when the tensors contradict the metadata.
    """
    keys = _Keys(file)
    shape = tensor_shape(file, "token_embd.weight", 2)
    heads = keys.count("attention.head_count")
    counts: dict[str, Any] = {
        field: keys.count(key, heads if key.endswith("_kv") else None) for key, field in _COUNTS.items()
    }
    hidden, layers, context = (
        counts[field] for field in ("hidden_size", "num_hidden_layers", "max_position_embeddings")
    )
    drafts = keys.get("nextn_predict_layers", 0)  # blocks after the model's own, which guess further tokens
    if isinstance(drafts, int) and 0 < drafts < layers:
        counts["num_hidden_layers"] = layers = layers - drafts
    if layers * _MIN_TENSORS_PER_LAYER > len(file.tensors):
        raise keys.fail(f"{keys.arch}.block_count", f"says {layers} blocks; the file has {len(file.tensors)} tensors")
    if shape[1] != hidden:
        raise keys.fail(f"{keys.arch}.embedding_length", f"says {hidden}; token_embd.weight has rows of {shape[1]}")
    vocab = keys.count("vocab_size", shape[0])
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    if not isinstance(tokens, list):
        got = file.typed["tokenizer.ggml.tokens"].type
        raise keys.fail("tokenizer.ggml.tokens", f"expected an array of strings, got {got}")
    if vocab != shape[0] or len(tokens) > vocab:
        sizes = f"{vocab} and there are {len(tokens)} tokens" if tokens else f"{vocab}"
        raise keys.fail(f"{keys.arch}.vocab_size", f"says {sizes}; token_embd.weight has {shape[0]} rows")
    head_dim = keys.count("attention.key_length", hidden // heads or None)
    if keys.count("attention.value_length", head_dim) != head_dim:
        raise keys.fail(f"{keys.arch}.attention.value_length", "differs from key_length, which is not supported")
    bitnet, family = keys.architecture.sub_norms, keys.architecture.model_type
    if family != "qwen3_5_text" and keys.count("rope.dimension_count", head_dim) != head_dim:
        raise keys.fail(f"{keys.arch}.rope.dimension_count", f"partial rotary embedding of {head_dim} is not supported")
    pooling = keys.get("pooling_type", 0)
    if pooling and (not isinstance(pooling, int) or pooling not in _POOLINGS):
        raise keys.fail(f"{keys.arch}.pooling_type", f"expected 1 (mean) or 3 (last token), got {pooling!r}")
    if quantization is not None and LINEAR_NORM in file.tensors:
        quantization = replace(quantization, use_rms_norm=True, rms_norm_eps=LINEAR_NORM_EPS)
    window = keys.count("attention.sliding_window") if keys.has("attention.sliding_window") else None
    if evidence is not None and ROPE_FACTORS["long_factors"] in file.tensors and not keys.has(_ORIGINAL):
        evidence.append(f"longrope without {keys.arch}.{_ORIGINAL}: the whole context is taken as the trained one")
    try:
        return ModelConfig(
            model_type=family or ("bitnet" if bitnet else "llama" if window is None else "mistral"),
            vocab_size=vocab,
            **counts,
            head_dim=head_dim,
            activation=_activation(keys, evidence),
            norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
            tie_word_embeddings="output.weight" not in file.tensors,
            sub_norms=bitnet,
            attention_bias=family == "qwen2" or _biases(file, attention=True),
            mlp_bias=_biases(file, attention=False),
            **_of_family(keys, window, head_dim, counts),
            rope=_rope(keys, context, head_dim),
            quantization=quantization,
            pooling=_POOLINGS.get(pooling, "last"),
            bos_token_id=_token_id(file, "bos"),
            eos_token_ids=_eos_ids(file),
        )
    except ConfigError as error:
        raise ConfigError(error.message, path=file.path, field=error.field) from None


def _of_family(keys: _Keys, window: int | None, head_dim: int, counts: dict[str, int]) -> dict[str, Any]:
    """The fields in which a family differs from LLaMA. Norms of Gemma3 have their 1 added by the converter."""
    family = keys.architecture.model_type
    if family == "qwen2":
        return {"sliding_window": window, "o_proj_bias": False}
    layers, hidden = counts["num_hidden_layers"], counts["hidden_size"]
    if family == "qwen3":
        return {"sliding_window": window, "qk_norms": True}
    if family == "qwen3_5_text":
        return _qwen35(keys, head_dim, layers)
    if family == "minicpm":  # the defaults are llama.cpp's
        return {
            "sliding_window": window,
            "embedding_scale": keys.number("embedding_scale", 12.0),
            "residual_scale": keys.number("residual_scale", 1.4 / math.sqrt(layers)),
            "head_scale": 1.0 / keys.number("logit_scale", hidden / 256.0),
        }
    if family != "gemma3_text":
        return {"sliding_window": window}
    key, pattern = "attention.sliding_window_pattern", 6
    if isinstance(keys.get(key), list | np.ndarray):
        is_sliding = keys.flags(key, layers)
    else:
        pattern = keys.count(key, pattern)
        is_sliding = [(i + 1) % pattern != 0 for i in range(layers)]
    is_sliding = [each and window is not None for each in is_sliding]
    types = tuple("sliding_attention" if each else "full_attention" for each in is_sliding)
    cap = keys.number("final_logit_softcapping") if keys.has("final_logit_softcapping") else None
    # llama.cpp's rule: 27B alone has a query_pre_attn_scalar that is not head_dim
    scalar = hidden / counts["num_attention_heads"] if layers == 62 else head_dim
    local = RopeConfig(theta=keys.number("rope.freq_base_swa", 10000.0))
    return {
        "sliding_window": window if any(is_sliding) else None,
        "layer_types": types if len({*types}) > 1 else (),
        "local_rope": None if local == _rope(keys, counts["max_position_embeddings"], head_dim) else local,
        "qk_norms": True,
        "post_norms": True,
        "embedding_scale": math.sqrt(hidden),
        "query_scale": 1.0 if scalar == head_dim else math.sqrt(head_dim / scalar),
        "logit_softcap": cap,
    }


def _qwen35(keys: _Keys, head_dim: int, layers: int) -> dict[str, Any]:
    rotary, delta = keys.count("rope.dimension_count", head_dim), None
    if keys.has("attention.recurrent_layers"):
        is_delta = keys.flags("attention.recurrent_layers", layers)
    else:
        interval = keys.count("full_attention_interval", 4)
        is_delta = [(i + 1) % interval != 0 for i in range(layers)]
    if any(is_delta):
        key_heads, value_heads, key_dim, inner, taps = (keys.count(f"ssm.{name}") for name in _DELTA_KEYS)
        if inner % value_heads:
            raise keys.fail(f"{keys.arch}.ssm.inner_size", f"expected a multiple of {value_heads} heads, got {inner}")
        delta = DeltaConfig(key_heads, value_heads, key_dim, inner // value_heads, taps)
    return {
        "layer_types": tuple("linear_attention" if each else "full_attention" for each in is_delta) if delta else (),
        "qk_norms": True,
        "output_gate": True,
        "rotary_dim": None if rotary == head_dim else rotary,
        "delta": delta,
    }


def tensor_shape(file: GgufFile, name: str, rank: int) -> tuple[int, ...]:
    """The shape of a tensor that must be there; FormatError."""
    if name not in file.tensors:
        raise file.tensor_error(name, "the tensor is missing")
    shape = file.tensors[name].shape
    if len(shape) != rank:
        raise file.tensor_error(name, f"expected {rank} dimensions, got shape {list(shape)}")
    return shape


def _activation(keys: _Keys, evidence: list[str] | None) -> str:
    """`<arch>.hidden_activation`; if that key is absent, the architecture's activation."""
    implied, key = keys.architecture.activation, f"{keys.arch}.hidden_activation"
    activation = activation_name(keys.get("hidden_activation", implied), key)
    if evidence is not None and activation != implied:
        evidence.append(f"activation: {activation}, by {key}; the architecture {keys.arch} alone would mean {implied}")
    return activation


def _biases(file: GgufFile, attention: bool) -> bool:
    """Whether the linears of attention, or of the feed-forward, have biases in block 0: all of them, or none."""
    linears = [theirs for ours, theirs in GGUF_LINEARS.items() if (ours in ATTENTION_LINEARS) == attention]
    biased = [name for name in linears if f"blk.0.{name}.bias" in file.tensors]
    if biased and len(biased) < len(linears):
        message = f"{', '.join(biased)} have a bias and the other linears of {', '.join(linears)} none; not supported"
        raise FormatError(message, path=file.path, field=f"blk.0.{biased[0]}.bias")
    return bool(biased)


def _eos_ids(file: GgufFile) -> tuple[int, ...]:
    """eos and end-of-turn ids. If no key names an end of turn, tokens with the usual texts count, as in llama.cpp."""
    ids = [_token_id(file, name) for name in ("eos", "eot", "eom")]
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    if ids[1] is None:
        ids += [index for index, text in enumerate(tokens) if text in _END_OF_TURN]
    return tuple(dict.fromkeys(value for value in ids if value is not None))


def _token_id(file: GgufFile, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = file.metadata.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise ConfigError(f"expected a token id, got {value!r}", path=file.path, field=key)
    return value


# -- RoPE --------------------------------------------------------------------------------------------------------------


def _rope(keys: _Keys, context: int, head_dim: int) -> RopeConfig:
    theta = keys.number("rope.freq_base", 10000.0)
    if ROPE_FREQS in keys.file.tensors:
        return _llama3_rope(keys, theta, head_dim)
    kind = keys.text("rope.scaling.type", "linear" if keys.has("rope.scale_linear") else "none")
    if kind == "longrope" or {*ROPE_FACTORS.values()} & {*keys.file.tensors}:
        return _longrope(keys, theta, context, head_dim)
    if kind == "none":
        return RopeConfig(theta=theta)
    factor = keys.number("rope.scaling.factor", keys.get("rope.scale_linear"))
    if kind == "linear":
        return RopeConfig(theta, "linear", factor)
    if kind != "yarn":
        raise keys.fail(f"{keys.arch}.rope.scaling.type", f"expected none, linear, yarn or longrope, got {kind!r}")
    if not 0 < factor < 1e9:
        raise keys.fail(f"{keys.arch}.rope.scaling.factor", f"expected a number from 0 to 1e9, got {factor}")
    extra = keys.get("rope.scaling.yarn_attn_factor", keys.get("rope.scaling.attn_factor", 1.0))
    if isinstance(extra, bool) or not isinstance(extra, int | float) or not 0 < extra < 1e9:
        key = f"{keys.arch}.rope.scaling.yarn_attn_factor"
        raise keys.fail(key, f"expected a number from 0 to 1e9, got {extra!r}")
    own = yarn_scale(factor)  # llama.cpp scales cos and sin by this times the file's factor
    return RopeConfig(
        theta,
        "yarn",
        factor,
        keys.count("rope.scaling.original_context_length", context),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=own if extra == 1 else float(str(np.float32(extra * own))),
    )


def _longrope(keys: _Keys, theta: float, context: int, head_dim: int) -> RopeConfig:
    """The factors are tensors. llama.cpp's converter leaves the trained context and the scale of cos and sin out."""
    file, given = keys.file, dict[str, Any]()
    for field, name in ROPE_FACTORS.items():
        if tensor_shape(file, name, 1) != (head_dim // 2,) or file.tensors[name].type.name != "F32":
            raise FormatError(f"expected F32 of shape [{head_dim // 2}]", path=file.path, field=name)
        given[field] = tuple(shortest(float(each)) for each in file.read(name))
    original = keys.count(_ORIGINAL, context)
    factor = keys.number("rope.scaling.factor", max(1.0, context / original))
    scale = keys.number("rope.scaling.attn_factor", longrope_scale(factor, original))
    return RopeConfig(theta, "longrope", factor, original, attention_factor=scale, **given)


def llama3_divisors(rope: RopeConfig, head_dim: int) -> NDArray[np.float32]:
    """The divisor of each frequency in llama3 scaling, (d/2,): a GGUF's tensor rope_freqs.weight."""
    plain = rope_frequencies(RopeConfig(theta=rope.theta), head_dim)
    return (plain / rope_frequencies(rope, head_dim)).astype(np.float32)


def _llama3_rope(keys: _Keys, theta: float, head_dim: int) -> RopeConfig:
    """rope_freqs.weight holds divisors: find the parameters of Llama 3's formula that give them."""
    file = keys.file
    if tensor_shape(file, ROPE_FREQS, 1) != (head_dim // 2,) or file.tensors[ROPE_FREQS].type.name != "F32":
        raise FormatError(f"expected F32 of shape [{head_dim // 2}]", path=file.path, field=ROPE_FREQS)
    divisors = file.read(ROPE_FREQS)
    if np.all(divisors == 1):
        return RopeConfig(theta=theta)
    factor = shortest(float(divisors.max())) if np.isfinite(divisors).all() else 0.0
    if 1 < factor < 1e9:
        for exponent in range(21):
            rope = RopeConfig(theta, "llama3", factor, 2**exponent, low_freq_factor=1.0, high_freq_factor=4.0)
            if np.allclose(llama3_divisors(rope, head_dim), divisors, rtol=1e-5, atol=0):
                return rope
    message = "these frequency divisors are not those of Llama 3 scaling (low_freq_factor 1, high_freq_factor 4)"
    raise file.tensor_error(ROPE_FREQS, message)


# -- writing -----------------------------------------------------------------------------------------------------------


def architecture(config: ModelConfig) -> str:
    """The GGUF architecture of a model. ConfigError if there is none."""
    families = {arch.model_type for arch in ARCHITECTURES.values()}
    for name, arch in ARCHITECTURES.items():
        is_family = arch.model_type == (config.model_type if config.model_type in families else "")
        if is_family and (arch.activation, arch.sub_norms) == (config.activation, config.sub_norms):
            return name
    norms = "with" if config.sub_norms else "without"
    model = f"{config.activation} {norms} sub-norms in a model of type {config.model_type}"
    raise ConfigError(f"GGUF has no architecture for {model}; convert to native instead", field="hidden_act")


def gguf_part(architecture: str, name: str) -> str:
    """The GGUF name of a norm, "embedding" or "lm_head" in files of an architecture, without ".weight"."""
    renamed, part = ARCHITECTURES[architecture].renamed, name.rpartition(".")[2]
    return f"blk.{name.split('.')[1]}.{renamed[part]}" if part in renamed else gguf_name(name)


def _check_family(config: ModelConfig) -> None:
    """ConfigError for what the architecture of a family implies and this model has otherwise."""
    gemma, types = config.model_type == "gemma3_text", set(config.layer_types)
    minicpm = config.model_type == "minicpm"
    implied = {
        "embedding_scale": math.sqrt(config.hidden_size) if gemma else config.embedding_scale if minicpm else 1.0,
        "residual_scale": config.residual_scale if minicpm else 1.0,
        "head_scale": config.head_scale if minicpm else 1.0,
        "query_scale": 1.0,
        "logit_softcap": config.logit_softcap if gemma else None,
    }
    if gemma and config.num_hidden_layers == 62:  # 27B, see `_of_family`
        implied["query_scale"] = math.sqrt(config.head_dim * config.num_attention_heads / config.hidden_size)
    for field, value in implied.items():
        if getattr(config, field) != value:
            message = f"a {config.model_type} GGUF means {value}, and this model has {getattr(config, field)}"
            raise ConfigError(f"{message}; convert to native instead", field=field)
    if "sliding_attention" in types and not gemma:
        message = (
            "GGUF has one window for all layers, and this model has layers of two kinds; convert to native instead"
        )
        raise ConfigError(message, field="layer_types")
    if not config.unit_embeddings:
        message = "GGUF cannot say that embeddings are not scaled to length 1; convert to native instead"
        raise ConfigError(message, field="unit_embeddings")
    if config.local_rope is not None and config.local_rope.rope_type != "default":
        message = "GGUF cannot say a RoPE scaling of sliding layers; convert to native instead"
        raise ConfigError(message, field="local_rope")


def gguf_metadata(config: ModelConfig) -> dict[str, Typed]:
    """The metadata that describe a model, in the order of bitnet.cpp's converter. The tokenizer's come after them.
    Raises ConfigError for what GGUF cannot say."""
    arch, rope = architecture(config), config.rope
    _check_family(config)
    out = {"general.architecture": Typed("string", arch)}

    def put(key: str, kind: str, value: Any) -> None:
        out[f"{arch}.{key}"] = Typed(kind, value)

    for key, field in _COUNTS.items():
        put(key, "uint32", getattr(config, field))
    put("rope.freq_base", "float32", rope.theta)
    put("attention.layer_norm_rms_epsilon", "float32", config.norm_eps)
    put("rope.dimension_count", "uint32", config.rotary_size)
    put("vocab_size", "uint32", config.vocab_size)
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        put("attention.key_length", "uint32", config.head_dim)
        put("attention.value_length", "uint32", config.head_dim)
    if config.sliding_window is not None:
        put("attention.sliding_window", "uint32", config.sliding_window)
    if config.model_type == "gemma3_text":
        put("rope.freq_base_swa", "float32", config.rope_of_sliding.theta)
        is_sliding = np.array([config.is_sliding(index) for index in range(config.num_hidden_layers)])
        put("attention.sliding_window_pattern", "[bool]", is_sliding)
        if config.logit_softcap is not None:
            put("final_logit_softcapping", "float32", config.logit_softcap)
    if config.model_type == "qwen3_5_text":
        _put_delta(config, put)
    if config.model_type == "minicpm":
        put("embedding_scale", "float32", config.embedding_scale)
        put("residual_scale", "float32", config.residual_scale)
        put("logit_scale", "float32", 1.0 / config.head_scale)
    if config.pooling != "last":
        put("pooling_type", "uint32", next(number for number, name in _POOLINGS.items() if name == config.pooling))
    if rope.rope_type in ("linear", "yarn", "longrope"):
        put("rope.scaling.type", "string", rope.rope_type)
        put("rope.scaling.factor", "float32", rope.factor)
    if rope.rope_type == "yarn":
        if not rope.truncate:
            raise ConfigError(
                "yarn without truncation cannot be said in a GGUF; convert to native instead", field="rope.truncate"
            )
        put("rope.scaling.original_context_length", "uint32", rope.original_max_position_embeddings)
        put("rope.scaling.yarn_beta_fast", "float32", rope.beta_fast)
        put("rope.scaling.yarn_beta_slow", "float32", rope.beta_slow)
        if not math.isclose(rope.attention_factor, yarn_scale(rope.factor), rel_tol=1e-6):
            put("rope.scaling.yarn_attn_factor", "float32", rope.attention_factor / yarn_scale(rope.factor))
    if rope.rope_type == "longrope":
        put("rope.scaling.original_context_length", "uint32", rope.original_max_position_embeddings)
        put("rope.scaling.attn_factor", "float32", rope.attention_factor)
    if rope.rope_type == "dynamic":
        message = "dynamic RoPE scaling is not written into GGUF files; convert to native instead"
        raise ConfigError(message, field="rope.rope_type")
    return out


def _put_delta(config: ModelConfig, put: Callable[[str, str, Any], None]) -> None:
    """The keys of Qwen3.5, as llama.cpp's converter writes them."""
    is_delta = [config.is_delta(index) for index in range(config.num_hidden_layers)]
    put("rope.dimension_sections", "[int32]", np.array(_ROPE_SECTIONS))
    put("attention.recurrent_layers", "[bool]", np.array(is_delta))
    # llama.cpp wants the numbers of a DeltaNet in any case
    delta = config.delta or DeltaConfig(1, 1, config.head_dim, config.head_dim, 4)
    numbers = (delta.key_heads, delta.value_heads, delta.key_dim, delta.sizes[2], delta.conv_size)
    for key, number in zip(_DELTA_KEYS, numbers, strict=True):
        put(f"ssm.{key}", "uint32", number)


def special_token_metadata(config: ModelConfig) -> dict[str, Typed]:
    """The special tokens of a model without a vocabulary. Where there is one, the tokenizer's metadata name them."""
    out = {"tokenizer.ggml.model": Typed("string", "no_vocab")}
    ids = (config.bos_token_id, *config.eos_token_ids[:3])
    for name, value in zip(("bos", "eos", "eot", "eom"), ids, strict=False):
        if value is not None:
            out[f"tokenizer.ggml.{name}_token_id"] = Typed("uint32", value)
    return out
