"""What is suspicious about a model that loads, by its configuration and the counts of its weights."""

from __future__ import annotations

import numpy as np

from ..formats.checkpoint import is_ternary
from ..reference.config import ModelConfig
from .facts import Inspection

LLAMA3_VOCAB = 128256
_FAR = 50.0  # times the median: trained scales of one model lie within a factor of about ten
_LARGE = 10.0  # mean|W| of a trained matrix is far below; 1 / mean|W| is above
# (layers, hidden, ffn) -> the model, and the activation it was trained with
KNOWN_SHAPES = {
    (30, 2560, 6912): ("BitNet b1.58 2B-4T", "relu2"),
    (24, 1536, 4096): ("1bitLLM bitnet_b1_58-large", "silu"),
    (26, 3200, 8640): ("1bitLLM bitnet_b1_58-3B", "silu"),
}


def judge_model(out: Inspection, config: ModelConfig, config_source: str) -> None:
    """Add the findings."""
    _judge_activation(out, config, config_source)
    if config.vocab_size == LLAMA3_VOCAB and config.rope.theta == 10000:
        message = (
            "the vocabulary is Llama 3's, whose models have theta 500000, and this one has 10000, the default for an "
            "absent key: if that is a mistake, every position after the first few is rotated wrongly"
        )
        out.report("warning", "config", message, field="rope_theta")
    for matrix in out.ternary:  # shares that no training gives
        for value, share in zip(("-1", "0", "+1"), matrix.shares, strict=True):
            if share > 0.9:
                out.report("warning", "weights", f"{share:.1%} of the weights are {value}", field=matrix.name)
    _judge_scales(out)
    if not config.tie_word_embeddings and is_ternary(config, "lm_head"):
        message = "the head is ternary; BitNet models are trained with a head of full precision"
        out.report("warning", "weights", message, field="lm_head")


def _judge_activation(out: Inspection, config: ModelConfig, config_source: str) -> None:
    shape = (config.num_hidden_layers, config.hidden_size, config.intermediate_size)
    name, trained = KNOWN_SHAPES.get(shape, (None, None))
    if name is not None and config.sub_norms and config.activation != trained:
        message = f"this is the shape of {name}, which was trained with {trained}, and here is {config.activation}: "
    elif config_source == "config.json" and config.model_type == "bitnet" and config.activation != "relu2":
        message = f"a bitnet model with {config.activation}: 2B-4T was trained with relu2, and "
    else:
        return
    message += "the wrong one of the two gives text that looks plausible and is wrong"
    field = "hidden_act"
    if out.is_gguf:
        key = f"{out.architecture}.hidden_activation"
        field, source = "general.architecture", f"the architecture {out.architecture} means"
        if key in out.metadata:
            field, source = key, f"{key} says"
        message += f" ({source} {config.activation})"
    out.report("warning", "config", message, field=field)


def _judge_scales(out: Inspection) -> None:
    """Scales far from all others; and scales that are large as a whole, as 1 / mean|W| is."""
    scales = {matrix.name: matrix.w_dequant_scale for matrix in out.ternary if matrix.w_dequant_scale is not None}
    if len(scales) < 3:
        return
    median = float(np.median(list(scales.values())))
    for name, scale in scales.items():
        if not median / _FAR < scale < median * _FAR:
            message = f"its scale {scale:.3g} is far from the others, whose median is {median:.3g}"
            out.report("warning", "weights", message, field=name)
    if median > _LARGE:
        message = (
            f"the matrices are multiplied by {median:.3g} (the median): mean|W| of a trained matrix is far smaller, "
            f"and its inverse would be {1 / median:.3g}; are the scales meant to be read the other way?"
        )
        out.report("warning", "weights", message)
