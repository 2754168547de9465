"""What is suspicious about a model that loads: judged from the configuration and the counts, whatever the format."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..formats.checkpoint import is_ternary
from ..reference.config import ModelConfig

if TYPE_CHECKING:
    from .generic import Inspector

LLAMA3_VOCAB = 128256
_PLAUSIBLE = "the wrong one of the two gives text that looks plausible and is wrong"
_FAR = 50.0  # times the median: trained scales of one model lie within a factor of ten or so
_LARGE = 10.0  # mean|W| of a trained matrix is far below; 1 / mean|W| is above
# (layers, hidden, ffn) -> the model, and the gate it was trained with
KNOWN_SHAPES = {
    (30, 2560, 6912): ("BitNet b1.58 2B-4T", "relu2"),
    (24, 1536, 4096): ("1bitLLM bitnet_b1_58-large", "silu"),
    (26, 3200, 8640): ("1bitLLM bitnet_b1_58-3B", "silu"),
}


def judge_model(inspector: Inspector, config: ModelConfig) -> None:
    """Add the findings."""
    _judge_activation(inspector, config)
    _judge_theta(inspector, config)
    _judge_shares(inspector)
    _judge_scales(inspector)
    if not config.tie_word_embeddings and is_ternary(config, "lm_head"):
        message = "the head is ternary; BitNet models are trained with a head of full precision"
        inspector.note("warning", "weights", message, field="lm_head")


def _judge_activation(inspector: Inspector, config: ModelConfig) -> None:
    shape = (config.num_hidden_layers, config.hidden_size, config.intermediate_size)
    name, trained = KNOWN_SHAPES.get(shape, (None, None))
    hf_bitnet = inspector.config_source == "config.json" and config.model_type == "bitnet"
    if name is not None and config.sub_norms and config.activation != trained:
        message = f"this is the shape of {name}, which was trained with {trained}, and here is {config.activation}: "
    elif hf_bitnet and config.activation != "relu2":
        message = f"a bitnet model with {config.activation}: 2B-4T was trained with relu2, and "
    else:
        return
    if (inspector.out.format or "").startswith("GGUF"):
        key, arch = f"{inspector.out.architecture}.hidden_activation", inspector.out.architecture
        by_key = key in inspector.out.metadata
        source = f"{key} says {config.activation}" if by_key else f"the architecture {arch} means {config.activation}"
        field = key if by_key else "general.architecture"
        inspector.note("warning", "config", f"{message}{_PLAUSIBLE} ({source})", field=field)
    else:
        inspector.note("warning", "config", message + _PLAUSIBLE, field="hidden_act")


def _judge_theta(inspector: Inspector, config: ModelConfig) -> None:
    if config.vocab_size == LLAMA3_VOCAB and config.rope.theta == 10000:
        message = (
            "the vocabulary is Llama 3's, whose models have theta 500000, and this one 10000, the default where "
            "nothing is said: every position past the first few is turned wrongly if that is a mistake"
        )
        inspector.note("warning", "config", message, field="rope_theta")


def _judge_shares(inspector: Inspector) -> None:
    """Ternary matrices that no training gives."""
    for matrix in inspector.out.ternary:
        for value, share in zip(("-1", "0", "+1"), matrix.shares, strict=True):
            if share > 0.9:
                inspector.note("warning", "weights", f"{share:.1%} of the weights are {value}", field=matrix.name)


def _judge_scales(inspector: Inspector) -> None:
    """Scales that are far from all others; and scales that are large as a whole, as 1 / mean|W| is."""
    scales = {m.name: m.w_dequant_scale for m in inspector.out.ternary if m.w_dequant_scale is not None}
    if len(scales) < 3:
        return
    median = float(np.median(list(scales.values())))
    for name, scale in scales.items():
        if not median / _FAR < scale < median * _FAR:
            message = f"its scale {scale:.3g} is far from the others, whose median is {median:.3g}"
            inspector.note("warning", "weights", message, field=name)
    if median > _LARGE:
        message = (
            f"the matrices are multiplied by {median:.3g} (the median): mean|W| of a trained matrix is far smaller, "
            f"and its inverse would be {1 / median:.3g}; are the scales meant to be read the other way?"
        )
        inspector.note("warning", "weights", message)
