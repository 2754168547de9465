"""MiniCPM: LLaMA with mu-P's three factors: of the embedding, of each half's result, of the head's input."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import require_number
from ..reference.config import ModelConfig, added
from ..reference.layers import Floats
from ..reference.model import BlockPlace, attention_result, feed_forward_result, split_heads
from ..reference.ops import Ops
from ..reference.weights import LayerWeights
from .family import (
    EMBEDDING_SCALE_MISSING,
    Architecture,
    Family,
    GgufForm,
    GgufKeys,
    HfForm,
    HfKeys,
    Hypothesis,
    Put,
    TraceStep,
    change_steps,
    leave_out,
    near,
)
from .llama import llama_steps


@dataclass(frozen=True)
class MiniCpmConfig(ModelConfig):
    residual_scale: float = added(1.0)  # each half's result times this, before it is added

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("residual_scale", self.residual_scale)


def attention_block(be: Ops, x: Floats, w: LayerWeights, cfg: MiniCpmConfig, at: BlockPlace) -> Floats:
    """(N, D) -> (N, D), residual included"""
    h = be.rms_norm(x, w.attn_norm)  # (N, D)
    q, k, v = split_heads(cfg, *be.linears(h, (w.q_proj, w.k_proj, w.v_proj)))  # (N, H, d), (N, G, d), (N, G, d)
    q, k = be.rope(q, k, *at.rope)
    be.append(at.cache, at.layer, at.batch, k, v)
    z = be.attention(q, at.cache, at.batch, at.layer, cfg.window_of(at.layer))  # (N, H, d)
    return be.add(x, be.scale(attention_result(be, z, w), cfg.residual_scale, f"{w.name}.o_proj_scaled"))  # (N, D)


def feed_forward(be: Ops, x: Floats, w: LayerWeights, cfg: MiniCpmConfig) -> Floats:
    """(N, D) -> (N, D), residual included"""
    y = feed_forward_result(be, x, w, cfg)
    return be.add(x, be.scale(y, cfg.residual_scale, f"{w.name}.down_proj_scaled"))


class MiniCpmLayer(LayerWeights):
    attention_text: ClassVar[Any] = staticmethod(attention_block)
    feed_forward_text: ClassVar[Any] = staticmethod(feed_forward)


def residual_scale_steps(config: MiniCpmConfig, layer: int) -> list[TraceStep]:
    """The steps of a block whose halves' results are multiplied by `residual_scale`."""
    steps = llama_steps(config, layer)
    if config.residual_scale == 1:
        return steps
    return change_steps(steps, kind="scaling")("hook_attn_out", "hook_mlp_out")


RESIDUAL_SCALE_MISSING = Hypothesis(
    "*_proj_scaled *.hook_attn_out *.hook_mlp_out",
    "residual_scale_missing",
    "the results of attention and of the feed-forward are not scaled before they are added",
    "Multiply them by scale_depth / sqrt(layers) (MiniCPM) or residual_multiplier (Granite).",
    leave_out,
    lambda step: getattr(step.setting.config, "residual_scale", 1) != 1,
)


# -- files -------------------------------------------------------------------------------------------------------------


def _read(keys: HfKeys) -> dict[str, Any]:
    layers, hidden = keys.count("num_hidden_layers"), keys.count("hidden_size")
    keys.ignore("mup_denominator")  # for heads that draft
    return {
        "embedding_scale": keys.number("scale_emb", 1.0),
        "residual_scale": keys.number("scale_depth", 1.0) / math.sqrt(layers),
        "head_scale": keys.number("dim_model_base", 1.0) / hidden,
    }


def _write(config: MiniCpmConfig) -> dict[str, Any]:
    root, hidden = math.sqrt(config.num_hidden_layers), config.hidden_size
    return {
        "scale_emb": config.embedding_scale,
        "scale_depth": near(lambda x: x / root, config.residual_scale * root, config.residual_scale),
        "dim_model_base": near(lambda x: x / hidden, config.head_scale * hidden, config.head_scale),
    }


def _read_gguf(keys: GgufKeys, fields: dict[str, Any]) -> dict[str, Any]:
    """The defaults are llama.cpp's."""
    return {
        "embedding_scale": keys.number("embedding_scale", 12.0),
        "residual_scale": keys.number("residual_scale", 1.4 / math.sqrt(fields["num_hidden_layers"])),
        "head_scale": 1.0 / keys.number("logit_scale", fields["hidden_size"] / 256.0),
    }


def _write_gguf(config: MiniCpmConfig, put: Put) -> None:
    put("embedding_scale", "float32", config.embedding_scale)
    put("residual_scale", "float32", config.residual_scale)
    put("logit_scale", "float32", 1.0 / config.head_scale)


_DEFAULTS = {  # of openbmb's own class
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = (
    Family(
        "minicpm",
        MiniCpmConfig,
        layer_class=lambda config, layer: MiniCpmLayer,
        steps=residual_scale_steps,
        constants=lambda config: {"residual_scale": config.residual_scale},
        lacks=lambda config: ["scaled residuals"] * (config.residual_scale != 1),
        hf=HfForm("MiniCPMForCausalLM", _DEFAULTS, _read, _write),
        gguf=GgufForm(
            {"minicpm": Architecture("silu", permuted=True)},
            _read_gguf,
            _write_gguf,
            lambda config: {"embedding_scale": config.embedding_scale, "head_scale": config.head_scale},
        ),
        mistakes=(EMBEDDING_SCALE_MISSING, RESIDUAL_SCALE_MISSING),
        example_fields={"residual_scale": 0.5},
    ),
)
