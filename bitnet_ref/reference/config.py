"""What a model's shape is: `ModelConfig`, a frozen dataclass that cannot exist in an invalid state.

Reading a checkpoint's own config.json into it is the business of `formats.hf.config`. Field names are Hugging Face's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ..errors import ConfigError

# The activations of the feed-forward gate. `layers.GATES` has a function for each; readers, writers and kernels use
# these names and no others.
ACTIVATIONS = {"relu2": "relu(gate)^2 * up", "silu": "silu(gate) * up", "gelu_tanh": "gelu(gate) * up"}
_OTHER_SPELLINGS = {"swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # transformers' names of them
LAYER_TYPES = ("full_attention", "sliding_attention", "linear_attention")  # as transformers calls them
POOLINGS = ("last", "mean")
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def _require(condition: bool, field: str, expected: str, got: Any) -> None:
    if not condition:
        raise ConfigError(f"expected {expected}, got {got!r}", field=field)


# Fields that `to_dict` leaves out at their defaults: files written before there were such fields are read as they
# always were, and files of models without the feature stay as they are.
_ADDED_FIELDS = {
    *("int8_activations", "o_proj_bias", "qk_norms", "post_norms", "layer_types", "local_rope", "query_scale"),
    *("embedding_scale", "residual_scale", "head_scale", "logit_softcap", "pooling", "rotary_dim", "output_gate"),
    *("delta", "long_factors", "short_factors", "unit_embeddings"),
}
LARGEST_INT = 2**40  # beyond any model; arithmetic on sizes, positions and window stays within int64 and float64


def _require_int(field: str, value: Any, low: int = 1) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    _require(whole and low <= value <= LARGEST_INT, field, f"an int from {low} to {LARGEST_INT}", value)


def _require_number(field: str, value: Any, above: float = 0.0) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)  # NaN fails every comparison
    low, high = max(above, 1e-30), 1e30  # float32 holds them, and neither they nor their products overflow float64
    _require(number and value > above and low <= value <= high, field, f"a number > {above}, at most {high}", value)


def _require_bool(field: str, value: Any) -> None:
    _require(isinstance(value, bool), field, "true or false", value)


def activation_name(spelling: Any, field: str) -> str:
    """The name in `ACTIVATIONS` of what a checkpoint calls its activation. ConfigError naming `field` and the value."""
    name = _OTHER_SPELLINGS.get(spelling, spelling) if isinstance(spelling, str) else None
    _require(name in ACTIVATIONS, field, f"one of {', '.join(ACTIVATIONS)}", spelling)
    return str(name)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. A position p turns the pair (x[j], x[j + d/2]) by the angle p * inv_freq[j].

    `rope_type` says how inv_freq = theta^(-2j/d) is stretched for contexts longer than the trained one:

    - default: not at all.   - linear: divided by `factor`.
    - dynamic (NTK): theta grows with the position once it passes `original_max_position_embeddings`.
    - llama3: long wavelengths divided by `factor`, short ones kept, a ramp in between.
    - yarn: a ramp between `beta_fast` and `beta_slow` rotations; cos and sin are also scaled by `attention_factor`.
    - longrope: each frequency divided by its own number, of `short_factors` up to the trained context and of
      `long_factors` beyond it; cos and sin are also scaled by `attention_factor`.

    Source: transformers, modeling_rope_utils.py.
    """

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # the trained context; of no use to default and linear
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    long_factors: tuple[float, ...] = ()  # of longrope, (d/2,)
    short_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _require(self.rope_type in ROPE_TYPES, "rope.rope_type", f"one of {', '.join(ROPE_TYPES)}", self.rope_type)
        _require_number("rope.theta", self.theta, above=1.0 if self.rope_type == "yarn" else 0.0)
        for name in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"):
            _require_number(f"rope.{name}", getattr(self, name))
        _require_bool("rope.truncate", self.truncate)
        for name in ("long_factors", "short_factors"):
            factors = getattr(self, name)
            _require(bool(factors) == (self.rope_type == "longrope"), f"rope.{name}", "numbers with longrope", factors)
            for each in factors:
                _require_number(f"rope.{name}", each)
        if self.rope_type in ("dynamic", "llama3", "yarn", "longrope"):
            _require_int("rope.original_max_position_embeddings", self.original_max_position_embeddings)
        if self.rope_type == "dynamic":
            _require(self.factor >= 1.0, "rope.factor", "a factor >= 1", self.factor)
        if self.rope_type == "llama3":
            _require(
                self.high_freq_factor > self.low_freq_factor,
                "rope.high_freq_factor",
                f"more than low_freq_factor ({self.low_freq_factor})",
                self.high_freq_factor,
            )


def longrope_scale(factor: float, original: int) -> float:
    """What longrope scales cos and sin by unless the model says otherwise: sqrt(1 + ln(factor) / ln(original))."""
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """What yarn scales cos and sin by unless the model says otherwise: 0.1 weight ln(factor) + 1."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class QuantizationConfig:
    """How the linears of a checkpoint are ternary. The names are those of transformers' BitNetQuantConfig.

    linear_class "bitlinear": packed uint8, `weight_scale` = 1/mean|W|, DIVIDE by it.
    linear_class "autobitlinear": mode "offline" packed uint8, `weight_scale` = mean|W|, MULTIPLY by it;
    mode "online" full-precision master weights, quantised by absmean when they are loaded.
    """

    linear_class: str = "bitlinear"
    quantization_mode: str = "offline"
    modules_to_not_convert: tuple[str, ...] = ("lm_head",)
    use_rms_norm: bool = False
    rms_norm_eps: float = 1e-6
    int8_activations: bool = True  # False: weights are ternary, activations stay floats ("weight-only")

    def __post_init__(self) -> None:
        where = "quantization_config."
        classes, modes = ("bitlinear", "autobitlinear"), ("online", "offline")
        _require(self.linear_class in classes, where + "linear_class", " or ".join(classes), self.linear_class)
        _require(
            self.quantization_mode in modes, where + "quantization_mode", " or ".join(modes), self.quantization_mode
        )
        _require_bool(where + "use_rms_norm", self.use_rms_norm)
        _require_number(where + "rms_norm_eps", self.rms_norm_eps)
        _require_bool(where + "int8_activations", self.int8_activations)
        plain = self.int8_activations or not self.use_rms_norm
        _require(plain, where + "use_rms_norm", "false where activations are not quantised", True)

    @property
    def scale_convention(self) -> str:
        """What a checkpoint's `weight_scale` means: "multiply", "divide", or "absmean" (computed at load)."""
        if self.linear_class == "bitlinear":
            return "divide"
        return "multiply" if self.quantization_mode == "offline" else "absmean"


@dataclass(frozen=True)
class DeltaConfig:
    """The shape of the Gated DeltaNet of layers of type "linear_attention"; see `delta_net.py`."""

    key_heads: int
    value_heads: int  # a multiple of key_heads
    key_dim: int  # of a head of q and k
    value_dim: int  # of a head of v
    conv_size: int  # tokens that the convolution sees

    def __post_init__(self) -> None:
        for each in fields(self):
            _require_int(f"delta.{each.name}", getattr(self, each.name))
        groups = self.value_heads % self.key_heads == 0
        _require(groups, "linear_num_value_heads", f"a multiple of {self.key_heads} key heads", self.value_heads)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The widths of q, k and v, all heads together."""
        return self.key_heads * self.key_dim, self.key_heads * self.key_dim, self.value_heads * self.value_dim


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder: D hidden_size, F intermediate_size, H heads, G kv heads, d head_dim, V vocab_size.

    What a family has that others do not is a field here, and a line with an `if` in `model.py`.
    """

    model_type: str  # "bitnet", "llama", "qwen3", ...: as in the checkpoint
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    activation: str  # one of ACTIVATIONS
    norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool = False  # the head is the embedding, transposed
    sub_norms: bool = False  # BitNet's extra RMSNorms, before o_proj (over H*d) and before down_proj (over F)
    attention_bias: bool = False  # biases on q, k, v and o
    mlp_bias: bool = False  # biases on gate, up and down
    sliding_window: int | None = None  # a token sees itself and this many - 1 tokens before it
    rope: RopeConfig = RopeConfig()
    quantization: QuantizationConfig | None = None  # None: dense
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    o_proj_bias: bool = True  # False: with attention_bias q, k and v have biases, o has none (Qwen2)
    qk_norms: bool = False  # an RMSNorm over each head of q and of k, before RoPE (Qwen3, Gemma3)
    post_norms: bool = False  # an RMSNorm of each block's result, before it is added to the stream (Gemma3)
    layer_types: tuple[str, ...] = ()  # of each layer, one of LAYER_TYPES; (): all as sliding_window says
    local_rope: RopeConfig | None = None  # of the sliding layers, where they have another (Gemma3)
    query_scale: float = 1.0  # q times this: query_pre_attn_scalar^-0.5 / head_dim^-0.5 (Gemma3)
    embedding_scale: float = 1.0  # rows of the embedding times this (Gemma3, MiniCPM)
    residual_scale: float = 1.0  # each block's result times this, before it is added (MiniCPM)
    head_scale: float = 1.0  # the input of the head times this (MiniCPM)
    logit_softcap: float | None = None  # logits become c tanh(logits / c) (Gemma)
    rotary_dim: int | None = None  # how many numbers of a head RoPE turns; None: all (Qwen3.5)
    output_gate: bool = False  # attention's result times sigmoid of a linear, before o_proj (Qwen3.5)
    delta: DeltaConfig | None = None  # of the layers of type "linear_attention" (Qwen3.5)
    pooling: str = "last"  # what `embed` takes of a text: the last token's hidden state, or the mean
    unit_embeddings: bool = True  # whether `embed` scales it to length 1

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "max_position_embeddings",
        ):
            _require_int(name, getattr(self, name))
        _require_int("head_dim", self.head_dim, low=2)
        _require(self.head_dim % 2 == 0, "head_dim", "an even number (RoPE turns pairs)", self.head_dim)
        _require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            "num_key_value_heads",
            f"a divisor of num_attention_heads ({self.num_attention_heads})",
            self.num_key_value_heads,
        )
        activations = list(ACTIVATIONS)
        _require(self.activation in activations, "hidden_act", f"one of {', '.join(activations)}", self.activation)
        _require_number("rms_norm_eps", self.norm_eps)
        flags = ("tie_word_embeddings", "sub_norms", "attention_bias", "mlp_bias")
        for name in (*flags, "o_proj_bias", "qk_norms", "post_norms", "output_gate", "unit_embeddings"):
            _require_bool(name, getattr(self, name))
        for name in ("query_scale", "embedding_scale", "residual_scale", "head_scale"):
            _require_number(name, getattr(self, name))
        if self.logit_softcap is not None:
            _require_number("final_logit_softcapping", self.logit_softcap)
        _require(self.pooling in POOLINGS, "pooling", " or ".join(POOLINGS), self.pooling)
        if self.layer_types:
            types = f"{self.num_hidden_layers} names, each one of {', '.join(LAYER_TYPES)}"
            known = all(isinstance(kind, str) and kind in LAYER_TYPES for kind in self.layer_types)
            _require(known and len(self.layer_types) == self.num_hidden_layers, "layer_types", types, self.layer_types)
            linear = "linear_attention" in self.layer_types
            _require(linear == (self.delta is not None), "delta", "the shape of the linear layers, if any", self.delta)
            sliding = "sliding_attention" in self.layer_types
            _require(not sliding or self.sliding_window is not None, "sliding_window", "a number of tokens", None)
        if self.sliding_window is not None:
            _require_int("sliding_window", self.sliding_window)
        if self.rotary_dim is not None:
            _require_int("partial_rotary_factor", self.rotary_dim, low=2)
            fits = self.rotary_dim <= self.head_dim and self.rotary_dim % 2 == 0
            _require(fits, "partial_rotary_factor", f"an even part of a head of {self.head_dim}", self.rotary_dim)
        for rope in (self.rope, self.rope_of_sliding):
            if rope.rope_type == "longrope":
                pairs, lengths = self.rotary_size // 2, [len(rope.long_factors), len(rope.short_factors)]
                _require(lengths == [pairs, pairs], "rope.long_factors", f"{pairs} numbers, and as many short", lengths)
        if "dynamic" in (self.rope.rope_type, self.rope_of_sliding.rope_type):
            _require(self.head_dim > 2, "head_dim", "more than 2 with dynamic RoPE", self.head_dim)
        for key, ids in (("bos_token_id", (self.bos_token_id,)), ("eos_token_id", self.eos_token_ids)):
            for token in ids:
                if token is not None:
                    _require_int(key, token, low=0)
                    _require(token < self.vocab_size, key, f"an id below vocab_size ({self.vocab_size})", token)

    @property
    def query_size(self) -> int:
        """H * d: the width of q and of the attention's output; usually, but not always, D."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """G * d: the width of k and of v."""
        return self.num_key_value_heads * self.head_dim

    @property
    def rotary_size(self) -> int:
        """How many numbers of a head RoPE turns."""
        return self.rotary_dim or self.head_dim

    def is_delta(self, layer: int) -> bool:
        """Whether the layer is a Gated DeltaNet instead of attention."""
        return bool(self.layer_types) and self.layer_types[layer] == "linear_attention"

    @property
    def rope_of_sliding(self) -> RopeConfig:
        """The RoPE of the layers that attend to a window."""
        return self.local_rope or self.rope

    def is_sliding(self, layer: int) -> bool:
        """Whether the layer attends to `sliding_window` tokens, not to all before it."""
        if self.layer_types:
            return self.layer_types[layer] == "sliding_attention"
        return self.sliding_window is not None

    def window_of(self, layer: int) -> int | None:
        """How many tokens a token of this layer sees, itself included; None: all before it."""
        return self.sliding_window if self.is_sliding(layer) else None

    @property
    def widest_window(self) -> int | None:
        """The window of the layer that sees the most."""
        layers = range(self.num_hidden_layers) if self.layer_types else range(1)
        return self.sliding_window if all(self.is_sliding(i) or self.is_delta(i) for i in layers) else None

    def of_layers(self, layers: Sequence[int]) -> ModelConfig:
        """The config of a model that consists of these layers."""
        types = tuple(self.layer_types[layer] for layer in layers) if self.layer_types else ()
        delta = self.delta if "linear_attention" in types else None
        return replace(self, num_hidden_layers=len(layers), layer_types=types, delta=delta)

    @property
    def first_of_each_type(self) -> list[int]:
        """The first layer of each type; [0] where all layers are alike."""
        return sorted({self.layer_types.index(kind) for kind in self.layer_types}) or [0]

    @property
    def has_plain_blocks(self) -> bool:
        """Whether blocks are as in LLaMA and 2B-4T. Fused blocks cover these; a block with more is composed of ops."""
        plain = not (self.qk_norms or self.post_norms or self.output_gate or self.rotary_dim or self.delta)
        return plain and self.query_scale == self.residual_scale == 1

    @property
    def context_length(self) -> int:
        """How many tokens a sequence may have. Dynamic RoPE is meant to go beyond the trained length, by its factor."""
        stretch = self.rope.factor if self.rope.rope_type == "dynamic" else 1
        return int(self.max_position_embeddings * stretch)

    @property
    def extras(self) -> tuple[str, ...]:
        """Names of the fields by which the model differs from LLaMA, Mistral and BitNet."""
        config = replace(self, quantization=None, pooling="last", unit_embeddings=True)
        names = [
            each.name
            for each in fields(self)
            if each.name in _ADDED_FIELDS and getattr(config, each.name) != each.default
        ]
        weight_only = self.quantization is not None and not self.quantization.int8_activations
        return (*names, *["int8_activations"] * weight_only)

    def linear_shapes(self, layer: int = 0) -> dict[str, tuple[int, int]]:
        """(out_features, in_features) of each linear of one block."""
        d_model, d_ffn = self.hidden_size, self.intermediate_size
        q, k, v = self.query_size, self.kv_size, self.kv_size
        gates: dict[str, tuple[int, int]] = {"z_proj": (q, d_model)} if self.output_gate else {}
        if self.delta is not None and self.is_delta(layer):
            q, k, v = self.delta.sizes
            heads = (self.delta.value_heads, d_model)
            gates = {"z_proj": (v, d_model), "a_proj": heads, "b_proj": heads}
        return {
            "q_proj": (q, d_model),
            "k_proj": (k, d_model),
            "v_proj": (v, d_model),
            **gates,
            "o_proj": (d_model, v if self.is_delta(layer) else q),
            "gate_proj": (d_ffn, d_model),
            "up_proj": (d_ffn, d_model),
            "down_proj": (d_model, d_ffn),
        }

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON values."""
        return _plain(self)

    @classmethod
    def from_dict(cls, raw: Any) -> ModelConfig:
        """What `to_dict` gave, or its JSON, back. Raises ConfigError: a key too many or too few, or a bad value.

        No default stands in for an absent key: absent keys are how a config comes to describe another model.
        """
        values = _exact_fields(cls, raw, "")
        for name in ("rope", "local_rope"):
            if name == "rope" or values.get(name) is not None:
                inner = _exact_fields(RopeConfig, values[name], f"{name}.")
                for key in ("long_factors", "short_factors"):
                    _require(isinstance(inner.get(key, []), list), f"{name}.{key}", "a list", inner.get(key))
                    inner[key] = tuple(inner.get(key, ()))
                values[name] = RopeConfig(**inner)
        if values.get("delta") is not None:
            values["delta"] = DeltaConfig(**_exact_fields(DeltaConfig, values["delta"], "delta."))
        if values["quantization"] is not None:
            inner = _exact_fields(QuantizationConfig, values["quantization"], "quantization.")
            skipped = inner["modules_to_not_convert"]
            names = isinstance(skipped, list) and all(isinstance(name, str) and name for name in skipped)
            _require(names, "quantization.modules_to_not_convert", "a list of names", skipped)
            values["quantization"] = QuantizationConfig(**inner | {"modules_to_not_convert": tuple(skipped)})
        _require(isinstance(values["model_type"], str), "model_type", "a string", values["model_type"])
        for name in ("eos_token_ids", "layer_types"):
            if name in values:
                _require(isinstance(values[name], list), name, "a list", values[name])
                values[name] = tuple(values[name])
        return cls(**values)


def _plain(value: Any) -> Any:
    """A config as JSON values, without its optional fields that have their defaults."""
    if not isinstance(value, ModelConfig | RopeConfig | QuantizationConfig | DeltaConfig):
        return list(value) if isinstance(value, tuple) else value
    items = [(each, getattr(value, each.name)) for each in fields(value)]
    return {each.name: _plain(got) for each, got in items if each.name not in _ADDED_FIELDS or got != each.default}


def _exact_fields(kind: type[Any], raw: Any, prefix: str) -> dict[str, Any]:
    """`raw`, which must be an object with the dataclass's fields as its keys, no more and no fewer."""
    _require(isinstance(raw, dict), prefix.rstrip(".") or "config", "an object", raw)
    expected = [each.name for each in fields(kind)]
    for each in fields(kind):
        if each.name not in raw and each.name not in _ADDED_FIELDS:
            raise ConfigError("is required and absent", field=prefix + each.name)
    for name in raw:
        if name not in expected:
            raise ConfigError(f"is no field of {kind.__name__}", field=f"{prefix}{name}"[:100])
    return dict(raw)
