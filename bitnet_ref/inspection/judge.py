"""What is suspicious about a model that loads: its configuration, the counts of its weights, and its tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import BitNetRefError, GenerationError
from ..formats.checkpoint import is_ternary
from ..generation.params import SamplingParams
from ..reference.config import ModelConfig
from ..tokenizers import Tokenizer
from .facts import Inspection, TokenizerFacts

LLAMA3_VOCAB = 128256
_FAR = 50.0  # times the median: trained scales of one model lie within a factor of about ten
_LARGE = 5.0  # mean|W| of a trained matrix is far below; 1 / mean|W| is above
# (layers, hidden, ffn) -> the model, and the activation it was trained with
KNOWN_SHAPES = {
    (30, 2560, 6912): ("BitNet b1.58 2B-4T", "relu2"),
    (24, 1536, 4096): ("1bitLLM bitnet_b1_58-large", "silu"),
    (26, 3200, 8640): ("1bitLLM bitnet_b1_58-3B", "silu"),
}
OLD_TEMPLATE = "BITNETAssistant"
# (strings that a known template contains, its description); the first match counts
_TEMPLATES = (
    ((OLD_TEMPLATE,), "an old one of BitNet 2B-4T: Human: ... BITNETAssistant:"),
    (("<|start_header_id|>",), "Llama 3: <|start_header_id|>role<|end_header_id|>"),
    (("<|im_start|>",), "ChatML: <|im_start|>role ... <|im_end|>"),
    (("[INST]",), "Llama 2: [INST] ... [/INST]"),
    (("<|eot_id|>", "capitalize"), "BitNet 2B-4T: Role: content<|eot_id|>"),
)


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


# -- the tokenizer -----------------------------------------------------------------------------------------------------


def describe_tokenizer(out: Inspection, load: Callable[[], Tokenizer | None]) -> None:
    """Fill in `Inspection.tokenizer`, or add a finding that says why there is none."""
    try:
        tokenizer = load()
        if tokenizer is None and out.is_cut_off and not Path(out.path).is_dir():
            return  # it may be in what is missing
        if tokenizer is None:
            names = " (tokenizer.json, tokenizer.model)" if Path(out.path).is_dir() else ""
            out.report("warning", "tokenizer", f"there is none{names}: only token ids can go in")
            return
        bos_id, template = tokenizer.bos_id, tokenizer.chat_template
        out.tokenizer = TokenizerFacts(
            kind=_kind(out, tokenizer),
            vocab_size=tokenizer.vocab_size,
            bos_id=bos_id,
            bos_token=None if bos_id is None else tokenizer.id_to_token(bos_id),
            adds_bos=bos_id is not None and tokenizer.encode("a")[:1] == [bos_id],
            eos_ids=tokenizer.eos_ids,
            eos_tokens=tuple(tokenizer.id_to_token(token) for token in tokenizer.eos_ids),
            chat_template=template is not None,
            template_style=template_style(template),
            sampling=tokenizer.recommended_sampling,
        )
    except BitNetRefError as error:
        out.report_error("tokenizer", error)
        return
    try:
        SamplingParams.of(**dict[str, Any](out.tokenizer.sampling))
    except GenerationError as error:
        message = f"generation_config.json recommends what no request may ask for: {error.message}"
        out.report("warning", "tokenizer", f"{message}. Serve with --generation-defaults plain", field=error.field)
    if template is not None and OLD_TEMPLATE in template:
        message = (
            "the chat template is the one with Human: and BITNETAssistant:, which is in 2B-4T's published GGUF and is "
            "older than the model: it was trained on `Role: content<|eot_id|>`, then `Assistant: `"
        )
        out.report("warning", "tokenizer", message, field="chat_template")


def _kind(out: Inspection, tokenizer: Tokenizer) -> str:
    if out.is_gguf:
        model = out.metadata.get("tokenizer.ggml.model", "")
        name = {"llama": "SentencePiece", "gpt2": "byte-level BPE"}.get(model, model)
        pre = out.metadata.get("tokenizer.ggml.pre")
        return f"{name} (tokenizer.ggml.model {model}" + (f", pre {pre})" if pre else ")")
    kind = "SentencePiece" if (tokenizer.path or "").endswith(".model") else "Hugging Face tokenizers"
    return f"{kind} ({Path(tokenizer.path).name})" if tokenizer.path else kind


def template_style(template: str | None) -> str | None:
    """The description of a known template. None: there is no template."""
    if template is None:
        return None
    styles = (style for strings, style in _TEMPLATES if all(string in template for string in strings))
    return next(styles, "of its own")


def compare_with_config(out: Inspection, config: ModelConfig, config_source: str) -> None:
    """Fill in the tokens that end a generation, and report where tokenizer and configuration contradict each other."""
    facts = out.tokenizer
    out.stop_token_ids = tuple(dict.fromkeys(config.eos_token_ids + (facts.eos_ids if facts else ())))

    def report(severity: str, message: str) -> None:
        out.report(severity, "tokenizer", message)

    if not out.stop_token_ids:
        report("warning", "no end token is named anywhere: generation ends at max_tokens only")
    if facts is None:
        return
    if facts.vocab_size > config.vocab_size:
        sizes = f"it has {facts.vocab_size} tokens and the embedding {config.vocab_size} rows"
        report("warning", f"{sizes}: some text cannot go in")
    elif facts.vocab_size < config.vocab_size:
        spare = config.vocab_size - facts.vocab_size
        report("note", f"the last {spare} rows of the embedding have no token (usually padding)")
    if facts.bos_id is not None and config.bos_token_id not in (None, facts.bos_id):
        report("warning", f"its BOS is {facts.bos_id}, {config_source}'s bos_token_id is {config.bos_token_id}")
    if facts.eos_ids and config.eos_token_ids and set(facts.eos_ids) != set(config.eos_token_ids):
        ours, theirs = list(facts.eos_ids), list(config.eos_token_ids)
        report("note", f"it ends on {ours}, {config_source} on {theirs}: generation stops on any of them")
