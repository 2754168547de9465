"""Checks of a parsed tokenizer.json before the library reads it: what it would accept and then handle wrongly.

The errors name the field; `hf_tokenizer` adds the path.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..errors import TokenizerError
from .files import check_token_id, check_type
from .hf_decoders import BYTE_TOKEN

MAX_GROWTH = 1024  # characters that the normalizer may make of one; real files stay under 10


def check_tokenizer_json(table: dict[str, Any]) -> None:
    """Raise TokenizerError, naming the field, for a file that must not reach the library."""
    model = check_type(table.get("model"), dict, "model")
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        _check_vocabulary(vocabulary)
    elif isinstance(vocabulary, list):  # Unigram: [[token, score], ...]
        for n, entry in enumerate(vocabulary):
            if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)):
                raise TokenizerError("expected [token, score]", field=f"model.vocab[{n}]")
    else:
        raise TokenizerError("expected an object or a list", field="model.vocab")
    decoder_kinds = [step.get("type") for step in _steps(table.get("decoder"), "decoders")]
    if model.get("byte_fallback") or "ByteFallback" in decoder_kinds:
        _check_byte_tokens(vocabulary)
    if isinstance(vocabulary, dict) and "merges" in model and model.get("continuing_subword_prefix"):
        # The library cuts this many bytes off the right half of every merge, unchecked: past a shorter half it reads
        # other memory, or its Rust code panics twice and ends the process (0.23). No published language model sets it.
        raise TokenizerError("is not supported for BPE", field="model.continuing_subword_prefix")
    _check_added_tokens(table.get("added_tokens"))
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if table.get(part) is not None:
            check_type(table[part], dict, part)
    growth = 1.0
    for step in _steps(table.get("normalizer"), "normalizers"):
        if step.get("type") == "Replace" and isinstance(step.get("content"), str):
            pattern = step.get("pattern")
            old = pattern.get("String") if isinstance(pattern, dict) else None
            growth *= max(1.0, len(step["content"]) / (len(old) if old and isinstance(old, str) else 1))
    if growth > MAX_GROWTH:  # forty steps of "a" to "aa" make 10^12 characters of one
        raise TokenizerError(f"its Replace steps make a text {growth:.0f} times longer", field="normalizer")


def _check_vocabulary(vocabulary: dict[str, Any]) -> None:
    owner: dict[int, str] = {}
    for token, value in vocabulary.items():
        number = check_token_id(value, f"model.vocab[{token[:40]!r}]")
        if number in owner:
            message = f"{owner[number][:40]!r} and {token[:40]!r} are both token {number}"
            raise TokenizerError(message, field="model.vocab")
        owner[number] = token


def _check_byte_tokens(vocabulary: dict[str, Any] | list[Any]) -> None:
    """With byte fallback every token of the form <0x..> must be a byte."""
    for token in vocabulary if isinstance(vocabulary, dict) else (entry[0] for entry in vocabulary):
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">") and not BYTE_TOKEN.fullmatch(token):
            message = f"{token!r} has the form of a byte token, but is no byte <0x00> to <0xFF>"
            raise TokenizerError(message, field="model.vocab")


def _check_added_tokens(entries: Any) -> None:
    seen: set[int | str] = set()
    for n, entry in enumerate([] if entries is None else check_type(entries, list, "added_tokens")):
        where = f"added_tokens[{n}]"
        check_type(entry, dict, where)
        number = check_token_id(entry.get("id"), f"{where}.id")
        content = check_type(entry.get("content"), str, f"{where}.content")
        if number in seen or content in seen:
            raise TokenizerError(f"{content!r} or its id {number} stands twice", field=where)
        seen.update((number, content))


def _steps(part: Any, key: str) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or decoder, also inside Sequences. Wrong types are left for the library to refuse."""
    if not isinstance(part, dict):
        return
    if part.get("type") == "Sequence":
        inner = part.get(key)
        for step in inner if isinstance(inner, list) else []:
            yield from _steps(step, key)
    else:
        yield part


def post_processor_affixes(processor: Any) -> tuple[list[int], list[int]]:
    """The ids that the file's post-processor puts before and after a single text.

    Read from the file, because the library puts BOS even before a text that already has it.
    """
    try:
        return _affixes(processor)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise TokenizerError(f"cannot be understood: {error!r}", field="post_processor") from error


def _affixes(processor: Any) -> tuple[list[int], list[int]]:
    kind = None if processor is None else processor.get("type")
    if kind in (None, "ByteLevel"):  # ByteLevel only adjusts offsets
        return [], []
    if kind == "Sequence":
        before: list[int] = []
        after: list[int] = []
        for inner in processor["processors"]:
            left, right = _affixes(inner)
            before, after = left + before, after + right
        return before, after
    if kind in ("BertProcessing", "RobertaProcessing"):  # [token, id]
        cls_id, sep_id = (check_token_id(processor[key][1], "post_processor") for key in ("cls", "sep"))
        return [cls_id], [sep_id]
    if kind == "TemplateProcessing":
        sides: tuple[list[int], list[int]] = ([], [])
        texts = 0
        for step in processor["single"]:
            if "Sequence" in step:
                texts += 1
            else:
                ids = processor["special_tokens"][step["SpecialToken"]["id"]]["ids"]
                sides[texts > 0].extend(check_token_id(number, "post_processor") for number in ids)
        if texts == 1:
            return sides
        raise TokenizerError("the text must stand in it exactly once", field="post_processor.single")
    raise TokenizerError(f"{kind!r} is not supported", field="post_processor.type")
