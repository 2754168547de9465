"""The tokenizer of a model: what it is, whether it fits the configuration, which chat template it has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import BitNetRefError
from ..reference.config import ModelConfig
from .facts import Inspection, TokenizerFacts

if TYPE_CHECKING:
    from ..tokenizers import Tokenizer

OLD_TEMPLATE = "BITNETAssistant"
# (strings that a known template contains, its description); the first match counts
_TEMPLATES = (
    ((OLD_TEMPLATE,), "an old one of BitNet 2B-4T: Human: ... BITNETAssistant:"),
    (("<|start_header_id|>",), "Llama 3: <|start_header_id|>role<|end_header_id|>"),
    (("<|im_start|>",), "ChatML: <|im_start|>role ... <|im_end|>"),
    (("[INST]",), "Llama 2: [INST] ... [/INST]"),
    (("<|eot_id|>", "capitalize"), "BitNet 2B-4T: Role: content<|eot_id|>"),
)


def describe_tokenizer(out: Inspection, load: Callable[[], Tokenizer | None]) -> None:
    """Fill in `Inspection.tokenizer`, or add a finding that says why there is none."""
    try:
        tokenizer = load()
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
        )
    except BitNetRefError as error:
        out.report_error("tokenizer", error)
        return
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
