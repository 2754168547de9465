"""A GGUF's metadata -> `ModelConfig`, and back. A family declares what its general.architecture means.

Numbers are float32 in the file: 1e-5 would come back as 9.99999975e-06, so the shortest decimal with the same float32
value is taken. Source: llama.cpp, docs/gguf.md and convert_hf_to_gguf.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, FormatError, errors_at
from ...families import FAMILIES, family_of, family_table
from ...families.family import Architecture, Family, GgufForm, activation_name
from ...families.rope import StretchedRope, longrope_scale, yarn_scale
from ...reference.config import ModelConfig, QuantizationConfig, RopeConfig
from ...reference.weights import FEED_FORWARD
from ..names import gguf_linears
from .file import GgufFile, Typed


@family_table
def architectures() -> dict[str, tuple[Family, Architecture]]:
    """general.architecture -> the first family that declares it, and what it means."""
    out: dict[str, tuple[Family, Architecture]] = {}
    for family in FAMILIES.values():
        for name, meaning in ({} if family.gguf is None else family.gguf.architectures).items():
            out.setdefault(name, (family, meaning))
    return out


_COUNTS = {  # key -> field of ModelConfig, in the order of bitnet.cpp's converter
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
_POOLINGS = {1: "mean", 3: "last"}  # llama.cpp's numbers
ROPE_FREQS = "rope_freqs.weight"
ROPE_FACTORS = {"long_factors": "rope_factors_long.weight", "short_factors": "rope_factors_short.weight"}
_ORIGINAL = "rope.scaling.original_context_length"
_YARN_ATTN_FACTOR = "rope.scaling.yarn_attn_factor"
LINEAR_NORM_EPS = 1e-6  # of these norms
LINEAR_NORM = "blk.0.attn_q_norm_in.weight"  # there if each linear has a norm of its own before it
_MIN_TENSORS_PER_LAYER = 9  # two norms, seven linears
# Texts that mark the end of a turn; llama.cpp looks for the same
END_OF_TURN = frozenset(("<|eot_id|>", "<|im_end|>", "<|end_of_turn|>", "<end_of_turn>", "<|end|>", "<EOT>"))


class _Keys:
    """The metadata of one architecture. Its errors name the key."""

    def __init__(self, file: GgufFile) -> None:
        self.file, self.metadata = file, file.metadata
        arch, known = self.metadata.get("general.architecture"), architectures()
        if not isinstance(arch, str) or arch not in known:
            got = f"{arch!r} is not supported" if isinstance(arch, str) else f"got {arch!r}"
            raise self.fail("general.architecture", f"{got}; expected one of {', '.join(known)}")
        self.arch = arch
        self.family, self.architecture = known[arch]
        for family in FAMILIES.values():
            form = family.gguf
            if form is not None and form.key is not None and arch in form.architectures and self.has(form.key):
                self.family, self.architecture = family, form.architectures[arch]

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

    def _get_one(self, key: str, default: Any) -> Any:
        """The value of a key; of an array with a value for each layer, as llama.cpp writes some, the one value."""
        value, layers = self.get(key, default), self.get("block_count")
        if isinstance(value, np.ndarray) and isinstance(layers, int) and len(value) == layers > 0:
            return value[0].item() if (value == value[0]).all() else value
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value = self._get_one(key, default)
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
        value = self._get_one(key, default)
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
    pooling = keys.get("pooling_type", 0)
    if not isinstance(pooling, int) or pooling not in (0, *_POOLINGS):
        raise keys.fail(f"{keys.arch}.pooling_type", f"expected 1 (mean) or 3 (last token), got {pooling!r}")
    if quantization is not None and LINEAR_NORM in file.tensors:
        quantization = replace(quantization, use_rms_norm=True, rms_norm_eps=LINEAR_NORM_EPS)
    if keys.get("attention.causal", True) is not True:
        message = "expected true: with false a token also sees those after it, and the model is an encoder"
        raise keys.fail(f"{keys.arch}.attention.causal", message)
    window = keys.count("attention.sliding_window") if keys.has("attention.sliding_window") else None
    if evidence is not None and ROPE_FACTORS["long_factors"] in file.tensors and not keys.has(_ORIGINAL):
        evidence.append(f"longrope without {keys.arch}.{_ORIGINAL}: the whole context is taken as the trained one")
    if evidence is not None and keys.has(_YARN_ATTN_FACTOR) and keys.text("rope.scaling.type", "none") == "yarn":
        words = "scales cos and sin, as attention_factor in transformers; llama.cpp ignores this key, its logits differ"
        evidence.append(f"yarn: {keys.arch}.{_YARN_ATTN_FACTOR} {words}")
    with errors_at(file.path):
        fields: dict[str, Any] = {
            "vocab_size": vocab,
            **counts,
            "head_dim": head_dim,
            "activation": _activation(keys, evidence),
            "norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": "output.weight" not in file.tensors,
            "sub_norms": keys.architecture.sub_norms,
            "sliding_window": window,
            "quantization": quantization,
            "pooling": _POOLINGS.get(pooling, "last"),
            "bos_token_id": _token_id(file, "bos"),
            "eos_token_ids": _eos_ids(file),
        }
        fields["rope"] = _rope(keys, context, head_dim)
        own = {} if keys.family.gguf is None else keys.family.gguf.read(keys, fields)
        if "rotary_dim" not in own and keys.count("rope.dimension_count", head_dim) != head_dim:
            message = f"partial rotary embedding of {head_dim} is not supported"
            raise keys.fail(f"{keys.arch}.rope.dimension_count", message)
        if "attention_bias" not in own:
            own["attention_bias"] = _biases(file, attention=True)
        family = FAMILIES[own.get("model_type", keys.family.model_type)]
        return family.config(
            **{"model_type": family.model_type, **fields, "mlp_bias": _biases(file, attention=False)} | own
        )


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
    activation = activation_name(keys.text("hidden_activation", implied), key)
    if evidence is not None and activation != implied:
        evidence.append(f"activation: {activation}, by {key}; the architecture {keys.arch} alone would mean {implied}")
    return activation


def _biases(file: GgufFile, attention: bool) -> bool:
    """Whether the linears of attention, or of the feed-forward, have biases in block 0: all of them, or none."""
    linears = [theirs for ours, theirs in gguf_linears().items() if (ours not in FEED_FORWARD) == attention]
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
        ids += [index for index, text in enumerate(tokens) if text in END_OF_TURN]
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
    has_factor = keys.has("rope.scaling.factor") or keys.has("rope.scale_linear")
    kind = keys.text("rope.scaling.type", "linear" if has_factor else "none")  # llama.cpp's default is linear
    is_llama3 = ROPE_FREQS in keys.file.tensors
    if not is_llama3 and (kind == "longrope" or {*ROPE_FACTORS.values()} & {*keys.file.tensors}):
        return _longrope(keys, theta, context, head_dim)
    scale = 1.0 if kind == "yarn" and not is_llama3 else keys.number("rope.scaling.attn_factor", 1.0)
    if scale != 1:  # llama.cpp scales cos and sin by it with every type
        message = (
            f"expected 1, or a rope.scaling.type of yarn or longrope, got {scale:g}; other types have no scale here"
        )
        raise keys.fail(f"{keys.arch}.rope.scaling.attn_factor", message)
    if is_llama3:
        factor = keys.number("rope.scaling.factor", keys.get("rope.scale_linear", 1.0))
        if kind != "none" and factor not in (0, 1):
            message = f"expected 1 beside {ROPE_FREQS}, which divides the frequencies already, got {factor:g}"
            raise keys.fail(f"{keys.arch}.rope.scaling.factor", message)
        return _llama3_rope(keys, theta, head_dim)
    if kind == "none":
        return RopeConfig(theta=theta)
    factor = keys.number("rope.scaling.factor", keys.get("rope.scale_linear"))
    if kind == "linear":
        return StretchedRope(theta, "linear", factor)
    if kind != "yarn":
        raise keys.fail(f"{keys.arch}.rope.scaling.type", f"expected none, linear, yarn or longrope, got {kind!r}")
    if not 0 < factor < 1e9:
        raise keys.fail(f"{keys.arch}.rope.scaling.factor", f"expected a number from 0 to 1e9, got {factor}")
    return StretchedRope(
        theta,
        "yarn",
        factor,
        keys.count("rope.scaling.original_context_length", context),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(keys, factor),
    )


def _yarn_attention_factor(keys: _Keys, factor: float) -> float:
    """What cos and sin are scaled by: `yarn_attn_factor` or 0.1 ln(factor) + 1, times `attn_factor`.

    llama.cpp's converter writes transformers' attention_factor as yarn_attn_factor, and llama.cpp does not read it for
    the architectures here. It multiplies its own scale by attn_factor, whatever the architecture.
    """
    numbers = []
    for key, default in ((_YARN_ATTN_FACTOR, yarn_scale(factor)), ("rope.scaling.attn_factor", 1.0)):
        value = keys.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
            raise keys.fail(f"{keys.arch}.{key}", f"expected a number from 0 to 1e9, got {value!r}")
        numbers.append(value)
    own, extra = numbers
    return shortest(own) if extra == 1 else _product(extra, own)


def _product(quotient: float, divisor: float) -> float:
    """The number that divided by `divisor` is the float32 `quotient`: one of six digits, if there is one."""
    short = float(f"{quotient * divisor:.6g}")
    return short if np.float32(short / divisor) == quotient else float(str(np.float32(quotient * divisor)))


def _longrope(keys: _Keys, theta: float, context: int, head_dim: int) -> RopeConfig:
    """The factors are tensors. llama.cpp's converter leaves the trained context and the scale of cos and sin out."""
    file, given = keys.file, dict[str, Any]()
    for field, name in ROPE_FACTORS.items():
        given[field] = tuple(shortest(float(each)) for each in _of_frequencies(file, name, head_dim))
    original = keys.count(_ORIGINAL, context)
    factor = keys.number("rope.scaling.factor", max(1.0, context / original))
    scale = keys.number("rope.scaling.attn_factor", longrope_scale(factor, original))
    return StretchedRope(theta, "longrope", factor, original, attention_factor=scale, **given)


def _of_frequencies(file: GgufFile, name: str, head_dim: int) -> NDArray[np.float32]:
    """A tensor with a number for each frequency, (d/2,)."""
    if tensor_shape(file, name, 1) != (head_dim // 2,) or file.tensors[name].type.name != "F32":
        raise FormatError(f"expected F32 of shape [{head_dim // 2}]", path=file.path, field=name)
    return file.read(name)


def llama3_divisors(rope: RopeConfig, head_dim: int) -> NDArray[np.float32]:
    """The divisor of each frequency in llama3 scaling, (d/2,): a GGUF's tensor rope_freqs.weight."""
    plain = RopeConfig(rope.theta).frequencies(head_dim)
    return (plain / rope.frequencies(head_dim)).astype(np.float32)


def _llama3_rope(keys: _Keys, theta: float, head_dim: int) -> RopeConfig:
    """rope_freqs.weight holds divisors: find the parameters of Llama 3's formula that give them."""
    divisors = _of_frequencies(keys.file, ROPE_FREQS, head_dim)
    if np.all(divisors == 1):
        return RopeConfig(theta=theta)
    factor = shortest(float(divisors.max())) if np.isfinite(divisors).all() else 0.0
    if 1 < factor < 1e9:
        for exponent in range(21):
            rope = StretchedRope(theta, "llama3", factor, 2**exponent, low_freq_factor=1.0, high_freq_factor=4.0)
            if np.allclose(llama3_divisors(rope, head_dim), divisors, rtol=1e-5, atol=0):
                return rope
    message = "these frequency divisors are not those of Llama 3 scaling (low_freq_factor 1, high_freq_factor 4)"
    raise keys.file.tensor_error(ROPE_FREQS, message)


# -- writing -----------------------------------------------------------------------------------------------------------


def architecture(config: ModelConfig) -> str:
    """The GGUF architecture of a model. ConfigError if there is none."""
    form = family_of(config).gguf
    for name, arch in ({} if form is None else form.architectures).items():
        if (arch.activation, arch.sub_norms) == (config.activation, config.sub_norms):
            return name
    norms = "with" if config.sub_norms else "without"
    model = f"{config.activation} {norms} sub-norms in a model of type {config.model_type}"
    raise ConfigError(f"GGUF has no architecture for {model}; convert to native instead", field="hidden_act")


def _check_family(config: ModelConfig, form: GgufForm) -> None:
    """ConfigError for what the architecture of a family implies and this model has otherwise."""
    implied = {"embedding_scale": 1.0, "head_scale": 1.0, "logit_softcap": None, **form.implied(config)}
    if "sliding_attention" in config.layer_types and "layer_types" not in implied:
        message = (
            "GGUF has one window for all layers, and this model has layers of two kinds; convert to native instead"
        )
        raise ConfigError(message, field="layer_types")
    for field, value in implied.items():
        if getattr(config, field) != value:
            message = f"a {config.model_type} GGUF means {value}, and this model has {getattr(config, field)}"
            raise ConfigError(f"{message}; convert to native instead", field=field)
    if not config.unit_embeddings:
        message = "GGUF cannot say that embeddings are not scaled to length 1; convert to native instead"
        raise ConfigError(message, field="unit_embeddings")


def gguf_metadata(config: ModelConfig, makes_vectors: bool = False) -> dict[str, Typed]:
    """The metadata that describe a model, in the order of bitnet.cpp's converter. The tokenizer's come after them.
    makes_vectors: whether it is published as an embedding model. Raises ConfigError for what GGUF cannot say."""
    arch = architecture(config)
    form = family_of(config).gguf or GgufForm({})
    rope: Any = config.rope
    _check_family(config, form)
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
    form.write(config, put)
    if config.pooling != "last" or makes_vectors:  # without the key llama.cpp gives a vector for each token
        put("pooling_type", "uint32", next(number for number, name in _POOLINGS.items() if name == config.pooling))
    if rope.rope_type in ("linear", "yarn", "longrope"):
        put("rope.scaling.type", "string", rope.rope_type)
    if rope.rope_type in ("linear", "yarn"):  # with longrope llama.cpp would divide all frequencies by it once more
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
            put("rope.scaling.attn_factor", "float32", rope.attention_factor / yarn_scale(rope.factor))
    if rope.rope_type == "longrope":
        put("rope.scaling.original_context_length", "uint32", rope.original_max_position_embeddings)
        put("rope.scaling.attn_factor", "float32", rope.attention_factor)
    if rope.rope_type == "dynamic":
        message = "dynamic RoPE scaling is not written into GGUF files; convert to native instead"
        raise ConfigError(message, field="rope.rope_type")
    return out


def ignored_by_llama_cpp(config: ModelConfig) -> list[str]:
    """What llama.cpp does not read of `gguf_metadata`, so that its logits differ. A sentence for each."""
    form, arch, rope = family_of(config).gguf or GgufForm({}), architecture(config), config.rope
    out, window = [], config.sliding_window
    if window is not None and window < config.context_length and not form.architectures[arch].window:
        out.append(
            f"llama.cpp has no window in models of the architecture {arch} and ignores the {window} of "
            f"attention.sliding_window: its logits of texts of more than {window} tokens differ"
        )
    if isinstance(rope, StretchedRope) and rope.rope_type == "yarn" and (rope.beta_fast, rope.beta_slow) != (32, 1):
        out.append(
            f"llama.cpp takes 32 and 1 for yarn's beta_fast and beta_slow and ignores {rope.beta_fast:g} and "
            f"{rope.beta_slow:g}: its logits differ"
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
