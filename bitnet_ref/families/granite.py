"""Granite (IBM's dense models): LLaMA with four factors: of the embedding, of the attention scores, of each half's
result, and of the logits, which are divided by theirs. MiniCPM's are three of these."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..errors import require_number
from ..reference.config import added
from ..reference.layers import Floats
from ..reference.model import BlockPlace, attention_result, split_heads
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
    Put,
    near,
)
from .gemma3 import QUERY_SCALE_MISSING, query_scale_steps
from .minicpm import RESIDUAL_SCALE_MISSING, MiniCpmConfig, MiniCpmLayer, residual_scale_steps


@dataclass(frozen=True)
class GraniteConfig(MiniCpmConfig):
    query_scale: float = added(1.0)  # q times this: attention_multiplier / head_dim^-0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("query_scale", self.query_scale)


def attention_block(be: Ops, x: Floats, w: LayerWeights, cfg: GraniteConfig, at: BlockPlace) -> Floats:
    """(N, D) -> (N, D), residual included"""
    h = be.rms_norm(x, w.attn_norm)  # (N, D)
    q, k, v = split_heads(cfg, *be.linears(h, (w.q_proj, w.k_proj, w.v_proj)))  # (N, H, d), (N, G, d), (N, G, d)
    q, k = be.rope(q, k, *at.rope)
    if cfg.query_scale != 1:  # scores are q k attention_multiplier, not q k / sqrt(d)
        q = be.scale(q, cfg.query_scale, f"{w.name}.attn.hook_scaled_q")
    be.append(at.cache, at.layer, at.batch, k, v)
    z = be.attention(q, at.cache, at.batch, at.layer, cfg.window_of(at.layer))  # (N, H, d)
    return be.add(x, be.scale(attention_result(be, z, w), cfg.residual_scale, f"{w.name}.o_proj_scaled"))  # (N, D)


class GraniteLayer(MiniCpmLayer):
    attention_text = staticmethod(attention_block)


# -- files -------------------------------------------------------------------------------------------------------------


def _read(keys: HfKeys) -> dict[str, Any]:
    own = keys.get("head_dim")
    head_dim = keys.count("head_dim") if own else keys.count("hidden_size") // keys.count("num_attention_heads")
    return {
        "embedding_scale": keys.number("embedding_multiplier", 1.0),
        "residual_scale": keys.number("residual_multiplier", 1.0),
        "query_scale": keys.number("attention_multiplier", 1.0) * math.sqrt(head_dim),
        "head_scale": 1.0 / keys.number("logits_scaling", 1.0),
    }


def _attention_multiplier(config: GraniteConfig) -> float:
    root = math.sqrt(config.head_dim)
    return near(lambda x: x * root, config.query_scale / root, config.query_scale)


def _logits_scaling(config: GraniteConfig) -> float:
    return near(lambda x: 1.0 / x, 1.0 / config.head_scale, config.head_scale)


def _write(config: GraniteConfig) -> dict[str, Any]:
    return {
        "embedding_multiplier": config.embedding_scale,
        "residual_multiplier": config.residual_scale,
        "attention_multiplier": _attention_multiplier(config),
        "logits_scaling": _logits_scaling(config),
    }


def _read_gguf(keys: GgufKeys, fields: dict[str, Any]) -> dict[str, Any]:
    """A factor that is absent or 0 is 1, as in llama.cpp; that of attention is then LLaMA's."""
    if keys.get("rope.scaling.finetuned", True) is False:
        raise keys.fail(f"{keys.arch}.rope.scaling.finetuned", "is false: layers without RoPE are not supported")
    names = {"embedding_scale": "embedding_scale", "residual_scale": "residual_scale", "logit_scale": "head_scale"}
    out = {ours: keys.number(theirs) for theirs, ours in names.items() if keys.has(theirs)}
    if "head_scale" in out:
        out["head_scale"] = 1.0 / out["head_scale"]
    if keys.has("attention.scale"):
        out["query_scale"] = keys.number("attention.scale") * math.sqrt(fields["head_dim"])
    return out


def _write_gguf(config: GraniteConfig, put: Put) -> None:
    put("attention.scale", "float32", _attention_multiplier(config))
    put("embedding_scale", "float32", config.embedding_scale)
    put("residual_scale", "float32", config.residual_scale)
    put("logit_scale", "float32", _logits_scaling(config))


_DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES = (
    Family(
        "granite",
        GraniteConfig,
        layer_class=lambda config, layer: GraniteLayer,
        steps=lambda config, layer: query_scale_steps(residual_scale_steps(config, layer), config.query_scale),
        constants=lambda config: {"residual_scale": config.residual_scale, "query_scale": config.query_scale},
        lacks=lambda config: ["scaled results and queries"],
        hf=HfForm("GraniteForCausalLM", _DEFAULTS, _read, _write, flags=("attention_bias", "mlp_bias")),
        gguf=GgufForm(
            {"granite": Architecture("silu", permuted=True)},
            _read_gguf,
            _write_gguf,
            lambda config: {"embedding_scale": config.embedding_scale, "head_scale": config.head_scale},
        ),
        mistakes=(EMBEDDING_SCALE_MISSING, QUERY_SCALE_MISSING, RESIDUAL_SCALE_MISSING),
        example_fields={"residual_scale": 0.5, "query_scale": 0.25},
    ),
)
