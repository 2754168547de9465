"""SmolLM3: LLaMA in which every fourth layer, as a rule, turns neither q nor k: it has no positions (NoPE)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, require
from ..reference import layers
from ..reference.config import ModelConfig, added
from ..reference.layers import Floats
from ..reference.model import BlockPlace, attention_result, split_heads
from ..reference.ops import Ops
from ..reference.weights import LayerWeights
from .family import (
    FULL,
    SLIDING,
    Architecture,
    Edit,
    Family,
    GgufForm,
    HfForm,
    HfKeys,
    Hypothesis,
    TraceStep,
    change_steps,
    config_of_layers,
    own_tables,
    types_of_layers,
)
from .llama import llama_steps

ROTATED = ("attn.hook_rot_q", "attn.hook_rot_k")
INTERVAL = 4  # between layers without positions, where a file does not list them


@dataclass(frozen=True)
class SmolLm3Config(ModelConfig):
    no_rope_layers: tuple[int, ...] = added(())  # for each layer 1: RoPE, or 0: none; (): all layers have it

    def __post_init__(self) -> None:
        super().__post_init__()
        listed = self.no_rope_layers
        fits = not listed or (len(listed) == self.num_hidden_layers and all(each in (0, 1) for each in listed))
        require(fits, "no_rope_layers", f"0 or 1 for each of {self.num_hidden_layers} layers", listed)

    def turns(self, layer: int) -> bool:
        """Whether a layer has RoPE."""
        return not self.no_rope_layers or bool(self.no_rope_layers[layer])


def _of_layers(config: SmolLm3Config, layers: Sequence[int]) -> SmolLm3Config:
    listed = tuple(config.no_rope_layers[layer] for layer in layers) if config.no_rope_layers else ()
    return config_of_layers(config, layers, no_rope_layers=listed)


def block_without_positions(be: Ops, x: Floats, w: LayerWeights, cfg: ModelConfig, at: BlockPlace) -> Floats:
    """(N, D) -> (N, D), residual included"""
    h = be.rms_norm(x, w.attn_norm)  # (N, D)
    q, k, v = split_heads(cfg, *be.linears(h, (w.q_proj, w.k_proj, w.v_proj)))  # (N, H, d), (N, G, d), (N, G, d)
    be.append(at.cache, at.layer, at.batch, k, v)
    z = be.attention(q, at.cache, at.batch, at.layer, cfg.window_of(at.layer))  # (N, H, d)
    return be.add(x, attention_result(be, z, w))  # (N, D)


class NoPositionsLayer(LayerWeights):
    attention_text = staticmethod(block_without_positions)


def _steps(config: SmolLm3Config, layer: int) -> list[TraceStep]:
    steps = llama_steps(config, layer)
    return steps if config.turns(layer) else without_rope(steps)


def without_rope(steps: list[TraceStep]) -> list[TraceStep]:
    """The same steps of a block that turns neither q nor k."""
    inputs = tuple(step.inputs[0] for step in steps if step.name in ROTATED)
    return change_steps([step for step in steps if step.name not in ROTATED], inputs=inputs)("attn.hook_attn_scores")


# -- files -------------------------------------------------------------------------------------------------------------


def _read(keys: HfKeys) -> dict[str, Any]:
    """A window only where use_sliding_window says so, and by default only in layers without positions."""
    layers, interval = keys.count("num_hidden_layers"), keys.count("no_rope_layer_interval")
    listed = keys.get("no_rope_layers", list(_by_interval(layers, interval)))
    if not isinstance(listed, list) or len(listed) < layers:
        raise ConfigError(f"expected 0 or 1 for each of {layers} layers, got {listed!r}"[:200], field="no_rope_layers")
    keys.ignore("max_window_layers")
    window = keys.get("sliding_window") if keys.get("use_sliding_window", False) else None
    types = [SLIDING if window and not turns else FULL for turns in listed[:layers]]
    return {**keys.layer_types(window, types), "no_rope_layers": tuple(listed[:layers])}


_PAD = 128004  # the class's default, for which PyTorch builds no embedding of fewer tokens


def _write(config: SmolLm3Config) -> dict[str, Any]:
    no_pad = {} if config.vocab_size > _PAD else {"pad_token_id": None}
    return no_pad | {
        "no_rope_layers": list(config.no_rope_layers) or [1] * config.num_hidden_layers,
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "layer_types": types_of_layers(config),
    }


def _by_interval(layers: int, interval: int = INTERVAL) -> tuple[int, ...]:
    return tuple(int((layer + 1) % interval != 0) for layer in range(layers))


_DEFAULTS = {
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "rope_theta": 2e6,
    "no_rope_layer_interval": INTERVAL,
    "tie_word_embeddings": True,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}


def turned_scores(step: Any, compute: Edit, q: Floats, k: Floats, window: int | None) -> Floats:
    """Scores of q and k with RoPE."""
    tables = own_tables(step, len(q))
    return compute(layers.apply_rope(q, *tables), layers.apply_rope(k, *tables), window)


FAMILIES = (
    Family(
        "smollm3",
        SmolLm3Config,
        layer_class=lambda config, layer: LayerWeights if config.turns(layer) else NoPositionsLayer,
        steps=_steps,
        of_layers=_of_layers,
        hf=HfForm("SmolLM3ForCausalLM", _DEFAULTS, _read, _write, flags=("attention_bias", "mlp_bias")),
        gguf=GgufForm(
            {"smollm3": Architecture("silu", permuted=True)},
            # the interval is in llama.cpp's code, not in the file
            lambda keys, fields: {"no_rope_layers": _by_interval(fields["num_hidden_layers"])},
            implied=lambda config: {"no_rope_layers": _by_interval(config.num_hidden_layers)},
        ),
        mistakes=(
            Hypothesis(
                "*.attn.hook_attn_scores",
                "rope_in_layers_without_positions",
                "q and k are turned in layers that have no positions",
                "No RoPE where no_rope_layers is 0.",
                turned_scores,
                lambda step: not step.setting.config.turns(step.layer),
            ),
        ),
        example_fields={"no_rope_layers": (1, 0)},
    ),
)
