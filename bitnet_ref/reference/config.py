"""What a model's shape is: `ModelConfig`, a frozen dataclass that cannot exist in an invalid state.

Field names are Hugging Face's. `families/` has subclasses with more; `formats/` reads config.json and GGUF's keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..errors import require, require_bool, require_int, require_number
from .layers import ACTIVATIONS, Floats, Ints


def added(default: Any, absent: Any = None) -> Any:
    """A dataclass field that files leave out where its value is `absent` (None: the default), as older files do."""
    return field(default=default, metadata={"absent": default if absent is None else absent})


@dataclass(frozen=True)
class RopeConfig:
    """Position p turns the pair (x[j], x[j + d/2]) by the angle p * theta^(-2j/d). `families/rope.py` stretches it."""

    theta: float = 10000.0

    rope_type: ClassVar[str] = "default"
    context_factor: ClassVar[float] = 1.0  # how many times the trained context a sequence may have

    def __post_init__(self) -> None:
        require_number("rope.theta", self.theta)

    def frequencies(self, head_dim: int) -> NDArray[np.float64]:
        """Radians per position, for each of the d/2 pairs.   -> (d/2,) float64"""
        return self.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)

    def angles(self, positions: Ints, head_dim: int) -> NDArray[np.float64]:
        """Radians of each token.   positions (N,) int -> (N, d/2) float64"""
        return positions[:, None].astype(np.float64) * self.frequencies(head_dim)

    def tables(self, positions: Ints, head_dim: int, dtype: DTypeLike) -> tuple[Floats, Floats]:
        """cos and sin of each token's angles.   positions (N,) int -> two (N, d/2)"""
        angles = self.angles(positions, head_dim)  # float64: at position 4096 a float32 angle is already off by 2e-4
        return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)

    def check_size(self, rotary_size: int) -> None:
        """Raises ConfigError where the frequencies do not fit heads of which so many numbers are turned."""


@dataclass(frozen=True)
class QuantizationConfig:
    """How the linears of a checkpoint are ternary, in the words of transformers' BitNetQuantConfig."""

    linear_class: str = "bitlinear"  # or "autobitlinear"
    quantization_mode: str = "offline"  # packed to 2 bits; or "online": full-precision masters, quantised at load
    modules_to_not_convert: tuple[str, ...] = ("lm_head",)
    use_rms_norm: bool = False  # each linear has a norm of its own: families/linear_norms.py
    rms_norm_eps: float = 1e-6
    int8_activations: bool = added(True)  # False: weights are ternary, activations stay floats ("weight-only")

    def __post_init__(self) -> None:
        prefix = "quantization_config."
        is_class = self.linear_class in ("bitlinear", "autobitlinear")
        require(is_class, prefix + "linear_class", "bitlinear or autobitlinear", self.linear_class)
        is_mode = self.quantization_mode in ("online", "offline")
        require(is_mode, prefix + "quantization_mode", "online or offline", self.quantization_mode)
        require_bool(prefix + "use_rms_norm", self.use_rms_norm)
        require_number(prefix + "rms_norm_eps", self.rms_norm_eps)
        require_bool(prefix + "int8_activations", self.int8_activations)
        plain = self.int8_activations or not self.use_rms_norm
        require(plain, prefix + "use_rms_norm", "false where activations are not quantised", True)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder: D hidden_size, F intermediate_size, H heads, G kv heads, d head_dim, V vocab_size.

    Raises ConfigError, which names the field.
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
    o_proj_bias: bool = added(True)  # False: with attention_bias q, k and v have biases, o has none
    layer_types: tuple[str, ...] = added(())  # of each layer, one of kinds_of_layers; (): all as sliding_window says
    embedding_scale: float = added(1.0)  # rows of the embedding times this
    head_scale: float = added(1.0)  # the input of the head times this
    logit_softcap: float | None = added(None)  # logits become c tanh(logits / c)
    pooling: str = added("last")  # what `embed` takes of a text: the last token's hidden state, or the mean
    unit_embeddings: bool = added(True)  # whether `embed` scales it to length 1

    kinds_of_layers: ClassVar[tuple[str, ...]] = ("full_attention", "sliding_attention")  # as transformers calls them
    has_states: ClassVar[bool] = False  # whether sequences have states beside their keys and values

    def __post_init__(self) -> None:
        for each in fields(ModelConfig):
            if each.type == "int":
                require_int(each.name, getattr(self, each.name))
        for each in fields(self):
            if each.type == "bool":
                require_bool(each.name, getattr(self, each.name))
        require(self.head_dim % 2 == 0, "head_dim", "an even number (RoPE turns pairs)", self.head_dim)
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        require(heads % kv_heads == 0, "num_key_value_heads", f"a divisor of num_attention_heads ({heads})", kv_heads)
        activations = list(ACTIVATIONS)  # a list takes an unhashable value too
        require(self.activation in activations, "hidden_act", f"one of {', '.join(activations)}", self.activation)
        require_number("rms_norm_eps", self.norm_eps)
        require_number("embedding_scale", self.embedding_scale)
        require_number("head_scale", self.head_scale)
        if self.logit_softcap is not None:
            require_number("final_logit_softcapping", self.logit_softcap)
        if self.sliding_window is not None:
            require_int("sliding_window", self.sliding_window)
        require(self.pooling in ("last", "mean"), "pooling", "last or mean", self.pooling)
        known = all(kind in self.kinds_of_layers for kind in self.layer_types)
        fits = len(self.layer_types) in (0, self.num_hidden_layers)
        expected = f"{self.num_hidden_layers} names, each one of {', '.join(self.kinds_of_layers)}"
        require(known and fits, "layer_types", expected, self.layer_types)
        windowed = "sliding_attention" not in self.layer_types or self.sliding_window is not None
        require(windowed, "sliding_window", "a number of tokens", None)
        bos = 0 if self.bos_token_id is None else self.bos_token_id
        for name, token in (("bos_token_id", bos), *(("eos_token_id", each) for each in self.eos_token_ids)):
            require_int(name, token, low=0)
            require(token < self.vocab_size, name, f"an id below vocab_size ({self.vocab_size})", token)
        for rope in self.ropes:
            rope.check_size(self.rotary_size)

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
        return self.head_dim

    @property
    def context_length(self) -> int:
        """How many tokens a sequence may have."""
        return int(self.max_position_embeddings * self.rope.context_factor)

    @property
    def layers_differ(self) -> bool:
        """Whether a layer may have other parts than the first one."""
        return bool(self.layer_types)

    def linear_shapes(self, layer: int = 0) -> dict[str, tuple[int, int]]:
        """(out_features, in_features) of each linear of one block, in the order of the computation."""
        return {
            "q_proj": (self.query_size, self.hidden_size),
            "k_proj": (self.kv_size, self.hidden_size),
            "v_proj": (self.kv_size, self.hidden_size),
            "o_proj": (self.hidden_size, self.query_size),
            "gate_proj": (self.intermediate_size, self.hidden_size),
            "up_proj": (self.intermediate_size, self.hidden_size),
            "down_proj": (self.hidden_size, self.intermediate_size),
        }

    def norm_shapes(self, layer: int = 0) -> dict[str, int]:
        """The length of each norm of one block."""
        sizes = {"attn_norm": self.hidden_size, "ffn_norm": self.hidden_size}
        if self.sub_norms:
            sizes |= {"attn_sub_norm": self.query_size, "ffn_sub_norm": self.intermediate_size}
        return sizes

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The RoPEs that layers have."""
        return (self.rope,)

    def rope_of(self, layer: int) -> int:
        """Which of `ropes` turns the queries and keys of a layer."""
        return 0

    def window_of(self, layer: int) -> int | None:
        """How many tokens a token of this layer sees, itself included; None: all before it."""
        slides = not self.layer_types or self.layer_types[layer] == "sliding_attention"
        return self.sliding_window if slides else None
