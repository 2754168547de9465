"""A GGUF's metadata -> `ModelConfig`, and back. `ARCHITECTURES` says what general.architecture means.

Numbers are float32 in the file: 1e-5 would come back as 9.99999975e-06, so the shortest decimal with the same float32
value is taken. Source: llama.cpp, docs/gguf.md and convert_hf_to_gguf.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, FormatError
from ...reference.config import ModelConfig, QuantizationConfig, RopeConfig, activation_name, yarn_scale
from ...reference.layers import rope_frequencies
from ...reference.weights import ATTENTION_LINEARS
from ..names import GGUF_LINEARS
from .file import GgufFile, Typed


class Architecture(NamedTuple):
    """What a value of general.architecture means."""

    activation: str  # unless `<arch>.hidden_activation` says otherwise
    sub_norms: bool
    permuted: bool = False  # rows of q and k are in the order of interleaved RoPE
    model_type: str = ""  # transformers' name of the family; "": by sub-norms and window


ARCHITECTURES = {
    "bitnet": Architecture("silu", sub_norms=True),  # 1bitLLM
    "bitnet-b1.58": Architecture("relu2", sub_norms=True),  # 2B-4T
    "bitnet-25": Architecture("relu2", sub_norms=True),  # the same, older name
    "llama": Architecture("silu", sub_norms=False, permuted=True),  # LLaMA, Mistral; ternary (Falcon3) or dense
    "qwen2": Architecture("silu", sub_norms=False, model_type="qwen2"),
    "qwen3": Architecture("silu", sub_norms=False, model_type="qwen3"),
    "gemma3": Architecture("gelu_tanh", sub_norms=False, model_type="gemma3_text"),
}
_COUNTS = {  # key -> field of ModelConfig, in the order of bitnet.cpp's converter
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
ROPE_FREQS = "rope_freqs.weight"
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
    if keys.count("rope.dimension_count", head_dim) != head_dim:
        raise keys.fail(f"{keys.arch}.rope.dimension_count", f"partial rotary embedding of {head_dim} is not supported")
    bitnet, family = keys.architecture.sub_norms, keys.architecture.model_type
    if quantization is not None and LINEAR_NORM in file.tensors:
        quantization = replace(quantization, use_rms_norm=True, rms_norm_eps=1e-6)
    window = keys.count("attention.sliding_window") if keys.has("attention.sliding_window") else None
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
    if family == "qwen3":
        return {"sliding_window": window, "qk_norms": True}
    if family != "gemma3_text":
        return {"sliding_window": window}
    layers, hidden = counts["num_hidden_layers"], counts["hidden_size"]
    pattern = keys.count("attention.sliding_window_pattern", 6)
    types = tuple("sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers))
    cap = keys.number("final_logit_softcapping") if keys.has("final_logit_softcapping") else None
    # llama.cpp's rule: 27B alone has a query_pre_attn_scalar that is not head_dim
    scalar = hidden / counts["num_attention_heads"] if layers == 62 else head_dim
    return {
        "sliding_window": window,
        "layer_types": types if len({*types}) > 1 else (),
        "local_rope": RopeConfig(theta=keys.number("rope.freq_base_swa", 10000.0)),
        "qk_norms": True,
        "post_norms": True,
        "embedding_scale": math.sqrt(hidden),
        "query_scale": 1.0 if scalar == head_dim else math.sqrt(head_dim / scalar),
        "logit_softcap": cap,
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
    if kind == "none":
        return RopeConfig(theta=theta)
    factor = keys.number("rope.scaling.factor", keys.get("rope.scale_linear"))
    if kind == "linear":
        return RopeConfig(theta, "linear", factor)
    if kind != "yarn":
        raise keys.fail(f"{keys.arch}.rope.scaling.type", f"expected none, linear or yarn, got {kind!r}")
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
        for exponent in range(8, 21):
            rope = RopeConfig(theta, "llama3", factor, 2**exponent, low_freq_factor=1.0, high_freq_factor=4.0)
            if np.allclose(llama3_divisors(rope, head_dim), divisors, rtol=1e-5, atol=0):
                return rope
    message = "these frequency divisors are not those of Llama 3 scaling (low_freq_factor 1, high_freq_factor 4)"
    raise file.tensor_error(ROPE_FREQS, message)


# -- writing -----------------------------------------------------------------------------------------------------------


def architecture(config: ModelConfig) -> str:
    """The GGUF architecture of a model. ConfigError if there is none."""
    for name, (activation, sub_norms, *_) in ARCHITECTURES.items():
        if (activation, sub_norms) == (config.activation, config.sub_norms):
            return name
    norms = "with" if config.sub_norms else "without"
    message = f"GGUF has no architecture for {config.activation} {norms} sub-norms; convert to native instead"
    raise ConfigError(message, field="hidden_act")


def gguf_metadata(config: ModelConfig) -> dict[str, Typed]:
    """The metadata that describe a model, in the order of bitnet.cpp's converter. The tokenizer's come after them.
    Raises ConfigError for what GGUF cannot say."""
    arch, rope = architecture(config), config.rope
    out = {"general.architecture": Typed("string", arch)}

    def put(key: str, kind: str, value: Any) -> None:
        out[f"{arch}.{key}"] = Typed(kind, value)

    for key, field in _COUNTS.items():
        put(key, "uint32", getattr(config, field))
    put("rope.freq_base", "float32", rope.theta)
    put("attention.layer_norm_rms_epsilon", "float32", config.norm_eps)
    put("rope.dimension_count", "uint32", config.head_dim)
    put("vocab_size", "uint32", config.vocab_size)
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        put("attention.key_length", "uint32", config.head_dim)
        put("attention.value_length", "uint32", config.head_dim)
    if config.sliding_window is not None:
        put("attention.sliding_window", "uint32", config.sliding_window)
    if rope.rope_type in ("linear", "yarn"):
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
    if rope.rope_type == "dynamic":
        raise ConfigError(
            "dynamic RoPE scaling cannot be said in a GGUF; convert to native instead", field="rope.rope_type"
        )
    return out


def special_token_metadata(config: ModelConfig) -> dict[str, Typed]:
    """The special tokens of a model without a vocabulary. Where there is one, the tokenizer's metadata name them."""
    out = {"tokenizer.ggml.model": Typed("string", "no_vocab")}
    ids = (config.bos_token_id, *config.eos_token_ids[:3])
    for name, value in zip(("bos", "eos", "eot", "eom"), ids, strict=False):
        if value is not None:
            out[f"tokenizer.ggml.{name}_token_id"] = Typed("uint32", value)
    return out
