"""The tokenizer that comes with a model: what it is, whether it fits the configuration, which chat template it has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import BitNetRefError
from ..reference.config import ModelConfig
from .facts import TokenizerFacts
from .reporter import Reporter

if TYPE_CHECKING:
    from ..tokenizers import Tokenizer

OLD_TEMPLATE = "BITNETAssistant"
# What a known template has in it -> what it is, the first that fits
_TEMPLATES = (
    ((OLD_TEMPLATE,), "an old one of BitNet 2B-4T: Human: ... BITNETAssistant:"),
    (("<|start_header_id|>",), "Llama 3: <|start_header_id|>role<|end_header_id|>"),
    (("<|im_start|>",), "ChatML: <|im_start|>role ... <|im_end|>"),
    (("[INST]",), "Llama 2: [INST] ... [/INST]"),
    (("<|eot_id|>", "capitalize"), "BitNet 2B-4T: Role: content<|eot_id|>"),
)


def describe_tokenizer(inspector: Reporter) -> None:
    """Fill in `Inspection.tokenizer`, or say why not."""
    try:
        tokenizer = inspector.load_tokenizer()
        if tokenizer is None:
            message = "there is none: only token ids can go in"
            if inspector.path.is_dir():
                message = "there is none (tokenizer.json, tokenizer.model): only token ids can go in"
            inspector.note("warning", "tokenizer", message)
            return
        style = template_style(tokenizer.chat_template)
        inspector.out.tokenizer = TokenizerFacts(
            kind=_kind(inspector, tokenizer),
            vocab_size=tokenizer.vocab_size,
            bos_id=tokenizer.bos_id,
            bos_token=None if tokenizer.bos_id is None else tokenizer.id_to_token(tokenizer.bos_id),
            adds_bos=tokenizer.bos_id is not None and tokenizer.encode("a")[:1] == [tokenizer.bos_id],
            eos_ids=tokenizer.eos_ids,
            eos_tokens=tuple(tokenizer.id_to_token(token) for token in tokenizer.eos_ids),
            chat_template=tokenizer.chat_template is not None,
            template_style=style,
        )
    except BitNetRefError as error:
        inspector.fail("tokenizer", error)
        return
    if tokenizer.chat_template is not None and OLD_TEMPLATE in tokenizer.chat_template:
        message = (
            "the chat template is the one with Human: and BITNETAssistant:, which 2B-4T's published GGUF carries and "
            "which is older than the model: it was trained on `Role: content<|eot_id|>`, then `Assistant: `"
        )
        inspector.note("warning", "tokenizer", message, field="chat_template")


def _kind(inspector: Reporter, tokenizer: Tokenizer) -> str:
    kind = "SentencePiece" if (tokenizer.path or "").endswith(".model") else "Hugging Face tokenizers"
    if (inspector.out.format or "").startswith("GGUF"):
        model = inspector.out.metadata.get("tokenizer.ggml.model", "")
        name = {"llama": "SentencePiece", "gpt2": "byte-level BPE"}.get(model, model)
        pre = inspector.out.metadata.get("tokenizer.ggml.pre")
        return f"{name} (tokenizer.ggml.model {model}" + (f", pre {pre})" if pre else ")")
    return f"{kind} ({Path(tokenizer.path).name})" if tokenizer.path else kind


def template_style(template: str | None) -> str | None:
    """Which of the known templates it is; None: there is none."""
    if template is None:
        return None
    for marks, words in _TEMPLATES:
        if all(mark in template for mark in marks):
            return words
    return "of its own"


def compare_with_config(inspector: Reporter, config: ModelConfig) -> None:
    """The end tokens of both, and where they contradict each other."""
    facts, source = inspector.out.tokenizer, inspector.config_source
    stops = dict.fromkeys(config.eos_token_ids + (facts.eos_ids if facts else ()))
    inspector.out.stop_token_ids = tuple(stops)

    def note(severity: str, message: str) -> None:
        inspector.note(severity, "tokenizer", message)

    if not stops:
        note("warning", "no end token is named anywhere: generation ends at max_tokens only")
    if facts is None:
        return
    if facts.vocab_size > config.vocab_size:
        message = f"it has {facts.vocab_size} tokens and the embedding {config.vocab_size} rows: some text cannot go in"
        note("warning", message)
    elif facts.vocab_size < config.vocab_size:
        spare = config.vocab_size - facts.vocab_size
        note("note", f"the last {spare} rows of the embedding have no token (usually padding)")
    if facts.bos_id is not None and config.bos_token_id not in (None, facts.bos_id):
        note("warning", f"its BOS is {facts.bos_id}, {source}'s bos_token_id is {config.bos_token_id}")
    if facts.eos_ids and config.eos_token_ids and set(facts.eos_ids) != set(config.eos_token_ids):
        ours, theirs = list(facts.eos_ids), list(config.eos_token_ids)
        note("note", f"it ends on {ours}, {source} on {theirs}: generation stops on any of them")
