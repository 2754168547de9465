"""Qwen2 and Qwen3. Qwen2 has biases on q, k and v; Qwen3 has an RMSNorm over each head of q and of k, before RoPE.

Ternary-Bonsai and BitNet-Embedding are Qwen3 in other dialects of weights: see `groups.py` and `linear_norms.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import ConfigError, require, require_int
from ..reference import layers
from ..reference.config import ModelConfig, added
from ..reference.layers import Floats
from ..reference.model import BlockPlace, attention_result, split_heads
from ..reference.ops import Ops
from ..reference.weights import TRACE_NAMES, LayerWeights, Norm
from .family import (
    Architecture,
    Edit,
    Family,
    GgufForm,
    HfForm,
    HfKeys,
    Hypothesis,
    PartNames,
    TraceStep,
    change_steps,
    layer_weights,
    leave_out,
    norm_step,
    own_tables,
    put_after,
    types_of_layers,
)
from .llama import llama_steps

HEAD_NORM_NAMES = {**TRACE_NAMES, "q_norm": "attn.q_norm", "k_norm": "attn.k_norm"}


@dataclass(frozen=True)
class Qwen3Config(ModelConfig):
    qk_norms: bool = added(True, absent=False)

    def norm_shapes(self, layer: int = 0) -> dict[str, int]:
        return super().norm_shapes(layer) | {"q_norm": self.head_dim, "k_norm": self.head_dim}


@dataclass(frozen=True)
class PartialRopeConfig(ModelConfig):
    """A model whose RoPE may turn a part of each head."""

    rotary_dim: int | None = added(None)  # how many numbers of a head; None: all

    def __post_init__(self) -> None:
        if self.rotary_dim is not None:
            require_int("head_dim", self.head_dim, low=2)
            require_int("partial_rotary_factor", self.rotary_dim, low=2)
            fits = self.rotary_dim <= self.head_dim and self.rotary_dim % 2 == 0
            require(fits, "partial_rotary_factor", f"an even part of a head of {self.head_dim}", self.rotary_dim)
        super().__post_init__()

    @property
    def rotary_size(self) -> int:
        return self.rotary_dim or self.head_dim


def attention_block(be: Ops, x: Floats, w: Qwen3Layer, cfg: ModelConfig, at: BlockPlace) -> Floats:
    """`reference.model.attention_block` with norms over heads.   (N, D) -> (N, D)"""
    h = be.rms_norm(x, w.attn_norm)  # (N, D)
    q, k, v = split_heads(cfg, *be.linears(h, (w.q_proj, w.k_proj, w.v_proj)))  # (N, H, d), (N, G, d), (N, G, d)
    q = norm_heads(be, q, w.q_norm)
    k = norm_heads(be, k, w.k_norm)
    q, k = be.rope(q, k, *at.rope)
    be.append(at.cache, at.layer, at.batch, k, v)
    z = be.attention(q, at.cache, at.batch, at.layer, cfg.window_of(at.layer))  # (N, H, d)
    return be.add(x, attention_result(be, z, w))  # (N, D)


def norm_heads(be: Ops, x: Floats, norm: Norm) -> Floats:
    """An RMSNorm over each head.   (N, H, d) -> (N, H, d)"""
    return be.rms_norm(x.reshape(-1, x.shape[-1]), norm).reshape(x.shape)


@dataclass(frozen=True, eq=False, repr=False)
class Qwen3Layer(LayerWeights):
    q_norm: Norm  # (d,)
    k_norm: Norm  # (d,)

    attention_text: ClassVar[Any] = staticmethod(attention_block)
    trace_names: ClassVar = HEAD_NORM_NAMES


def head_norm_steps(steps: list[TraceStep], shapes: tuple[str, str] = ("H d", "G d")) -> list[TraceStep]:
    """The steps of a block that norms the heads of q and k before RoPE. shapes: of what the norms are over."""
    pairs = zip("qk", shapes, strict=True)
    norms = [norm_step(f"attn.{x}_norm", f"attn.hook_{x}", shape, f"{x}_norm") for x, shape in pairs]
    steps = put_after(steps, "attn.hook_k", *norms)
    steps = change_steps(steps, inputs=("attn.q_norm.hook_normalized",))("attn.hook_rot_q")
    return change_steps(steps, inputs=("attn.k_norm.hook_normalized",))("attn.hook_rot_k")


# -- mistakes ----------------------------------------------------------------------------------------------------------

HEAD_NORM_STEPS = "*.attn.[qk]_norm.hook_normalized"


def _after_rope(step: Any, compute: Edit, x: Floats, *rest: Any) -> Floats:
    """An edit of the norms over heads, of RoPE and of what reads its result: rotated first, normalised then."""
    attn, _, hook = step.name.rpartition(".")
    if hook == "hook_normalized":
        heads = x.reshape(len(step.setting.tokens), -1, x.shape[1])
        return compute(layers.apply_rope(heads, *own_tables(step, len(heads))).reshape(x.shape), *rest)
    if hook.startswith("hook_rot_"):
        return compute(step.seen[f"{attn}.hook_{hook[-1]}"], *rest)
    q, k = (step.seen[f"{attn}.{letter}_norm.hook_normalized"] for letter in "qk")
    if hook == "hook_scaled_q":
        return compute(q.reshape(x.shape), *rest)
    keys, window = rest
    q = x if f"{attn}.hook_scaled_q" in step.seen else q.reshape(x.shape)
    return compute(q, k.reshape(keys.shape), window)


def _exchanged(step: Any, compute: Edit, x: Floats, length: Floats, weight: Floats) -> Floats:
    w = layer_weights(step)
    other = w.k_norm if ".q_norm." in step.name else w.q_norm
    return compute(x, length, other.weight)


def _has_both_norms(step: Any) -> bool:
    return isinstance(layer_weights(step), Qwen3Layer)


HEAD_NORM_MISTAKES = (
    Hypothesis(
        HEAD_NORM_STEPS,
        "qk_norms_missing",
        "the norms over the heads of q and k are left out",
        "Apply q_norm and k_norm to each head before RoPE (Qwen3, Gemma3).",
        leave_out,
    ),
    Hypothesis(
        f"{HEAD_NORM_STEPS} *.attn.hook_rot_[qk] *.attn.hook_scaled_q *.attn.hook_attn_scores",
        "qk_norms_after_rope",
        "the norms over the heads of q and k come after RoPE",
        "Normalise each head, then rotate: the norm's weights differ within a pair.",
        _after_rope,
        _has_both_norms,
    ),
    Hypothesis(
        HEAD_NORM_STEPS,
        "qk_norms_exchanged",
        "q has k_norm and k has q_norm",
        "q_norm is q's.",
        _exchanged,
    ),
)

HEAD_NORMS = {
    "q_norm": PartNames(("self_attn.q_norm",), "attn_q_norm"),
    "k_norm": PartNames(("self_attn.k_norm",), "attn_k_norm"),
}


def read_partial_rope(keys: HfKeys) -> dict[str, Any]:
    """The fields `rotary_dim` and `rope`. The share of a head that turns stands beside RoPE's parameters or in them."""
    field = "rope_scaling" if keys.raw.get("rope_scaling") else "rope_parameters"
    parameters, share = keys.raw.get(field), keys.get("partial_rotary_factor", 1.0)
    if isinstance(parameters, dict):
        share = parameters.get("partial_rotary_factor", share)
        parameters = {key: value for key, value in parameters.items() if key != "partial_rotary_factor"}
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise ConfigError(f"expected a number from 0 to 1, got {share!r}", field="partial_rotary_factor")
    return {
        "rotary_dim": None if share == 1 else int(keys.count("head_dim") * share),
        "rope": keys.rope({**keys.raw, field: parameters, "partial_rotary_factor": None}),
    }


def _window(keys: HfKeys) -> dict[str, Any]:
    """From layer max_window_layers on a window, where use_sliding_window says so."""
    window = keys.get("sliding_window") if keys.get("use_sliding_window", False) else None
    layers = keys.count("num_hidden_layers")
    first = layers if window is None else keys.get("max_window_layers")
    if not isinstance(first, int) or isinstance(first, bool):
        raise ConfigError(f"expected a number of layers, got {first!r}"[:200], field="max_window_layers")
    return keys.layer_types(window, ["sliding_attention" if i >= first else "full_attention" for i in range(layers)])


def _window_keys(config: ModelConfig) -> dict[str, Any]:
    windows = {"use_sliding_window": config.sliding_window is not None, "sliding_window": config.sliding_window}
    return windows | {"layer_types": types_of_layers(config)}


def _read_qwen3(keys: HfKeys) -> dict[str, Any]:
    """Norms of q and k in every layer, whatever use_qk_norm says."""
    keys.ignore("use_qk_norm")
    return _window(keys)


END_OF_TEXT = "<|endoftext|>"  # Qwen3's embedding models were trained to be read at this token
_BIASES = {"attention_bias": True, "o_proj_bias": False}  # of Qwen2: on q, k and v
_SIZES = {"num_key_value_heads": 32, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768}
_DEFAULTS = {**_SIZES, "sliding_window": 4096, "max_window_layers": 28}
FAMILIES = (
    Family(
        "qwen2",
        hf=HfForm("Qwen2ForCausalLM", _DEFAULTS, lambda keys: _BIASES | _window(keys), _window_keys, flags=()),
        gguf=GgufForm({"qwen2": Architecture("silu")}, lambda keys, fields: dict(_BIASES)),
        end_of_embedded=END_OF_TEXT,
    ),
    Family(
        "qwen3",
        Qwen3Config,
        layer_class=lambda config, layer: Qwen3Layer,
        steps=lambda config, layer: head_norm_steps(llama_steps(config, layer)),
        names=HEAD_NORMS,
        hf=HfForm("Qwen3ForCausalLM", {**_DEFAULTS, "head_dim": 128}, _read_qwen3, _window_keys),
        gguf=GgufForm({"qwen3": Architecture("silu")}),
        mistakes=HEAD_NORM_MISTAKES,
        end_of_embedded=END_OF_TEXT,
    ),
)
