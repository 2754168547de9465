"""What is read from a parsed tokenizer.json here, not by the library: checks, the ids around a text, the decoder.

The checks come before the library reads the file, and refuse what it would accept and then handle wrongly. The errors
name the field; `hf_tokenizer` adds the path. Source of the decoders: huggingface/tokenizers (`decoders/` and
`pre_tokenizers/byte_level.rs`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from ..errors import TokenizerError
from .files import MAX_TOKEN_ID, check_token_id, check_type
from .hf_limits import read_steps
from .streaming import ByteDetokenizer, ByteRunDetokenizer, Detokenizer, PairDetokenizer, WholeDetokenizer

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_FIRST_MATTERS = {"Metaspace", "WordPiece", "Replace", "Strip"}  # each token alone; only the first may differ
MAX_AFFIXES = 64  # tokens that a post-processor may put before or after a text; published ones put 1 or 2


def check_tokenizer_json(table: dict[str, Any]) -> None:
    """Raise TokenizerError, naming the field, for a file that must not reach the library."""
    model = check_type(table.get("model"), dict, "model")
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        if not _are_distinct_ids(vocabulary.values()):
            _refuse_vocabulary(vocabulary)
    elif isinstance(vocabulary, list):  # Unigram: [[token, score], ...]
        for n, entry in enumerate(vocabulary):
            if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)):
                raise TokenizerError("expected [token, score]", field=f"model.vocab[{n}]")
    else:
        raise TokenizerError("expected an object or a list", field="model.vocab")
    decoder_kinds = [step["type"] for _, step in read_steps(table.get("decoder"), "decoder")]
    if model.get("byte_fallback") or "ByteFallback" in decoder_kinds:
        for token in vocabulary if isinstance(vocabulary, dict) else (entry[0] for entry in vocabulary):
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">") and not BYTE_TOKEN.fullmatch(token):
                message = f"{token!r} has the form of a byte token, but is no byte <0x00> to <0xFF>"
                raise TokenizerError(message, field="model.vocab")
    if isinstance(vocabulary, dict) and "merges" in model and model.get("continuing_subword_prefix"):
        # The library cuts this many bytes off the right half of every merge, unchecked: past a shorter half it reads
        # other memory, or its Rust code panics twice and ends the process (0.23). No published language model sets it.
        raise TokenizerError("is not supported for BPE", field="model.continuing_subword_prefix")
    entries, seen = table.get("added_tokens"), set[int | str]()
    for n, entry in enumerate([] if entries is None else check_type(entries, list, "added_tokens")):
        where = f"added_tokens[{n}]"
        check_type(entry, dict, where)
        number = check_token_id(entry.get("id"), f"{where}.id")
        content = check_type(entry.get("content"), str, f"{where}.content")
        if number in seen or content in seen:
            raise TokenizerError(f"{content!r} or its id {number} stands twice", field=where)
        seen.update((number, content))
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if table.get(part) is not None:
            check_type(table[part], dict, part)


def _are_distinct_ids(values: Collection[Any]) -> bool:
    """Whether they are token ids, each once. At once for all: a call for each takes longer than parsing the file."""
    if not values or set(map(type, values)) != {int}:
        return not values
    return min(values) >= 0 and max(values) < MAX_TOKEN_ID and len(set(values)) == len(values)


def _refuse_vocabulary(vocabulary: dict[str, Any]) -> None:
    """Raise TokenizerError about the first entry that is no token id, or that of another token."""
    owner: dict[int, str] = {}
    for token, value in vocabulary.items():
        number = check_token_id(value, f"model.vocab[{token[:40]!r}]")
        if owner.setdefault(number, token) != token:
            message = f"{owner[number][:40]!r} and {token[:40]!r} are both token {number}"
            raise TokenizerError(message, field="model.vocab")


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
            before, after = _check_affixes(left + before), _check_affixes(after + right)
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
                _check_affixes(sides[texts > 0]).extend(check_token_id(number, "post_processor") for number in ids)
        if texts == 1:
            return _check_affixes(sides[0]), _check_affixes(sides[1])
        raise TokenizerError("the text must stand in it exactly once", field="post_processor.single")
    raise TokenizerError(f"{kind!r} is not supported", field="post_processor.type")


def _check_affixes(ids: list[int]) -> list[int]:
    if len(ids) > MAX_AFFIXES:
        raise TokenizerError(f"puts more than {MAX_AFFIXES} tokens around a text", field="post_processor")
    return ids


@dataclass(frozen=True)
class Decoding:
    """How to decode: `part` gives a token's text or bytes (None: unknown); `detokenizer` makes a detokenizer."""

    part: Callable[[str], str | bytes] | None
    detokenizer: Callable[[Callable[[int], str], Callable[[list[int]], str]], Detokenizer]


def read_decoder(decoder: dict[str, Any] | None) -> Decoding:
    """The decoding for the `decoder` object of a file that the library has accepted (None: tokens joined by spaces)."""
    steps = [step for _, step in read_steps(decoder, "decoder")]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return Decoding(byte_level_bytes, lambda token, _: ByteDetokenizer(lambda n: byte_level_bytes(token(n))))
    if (llama := _llama(steps)) is not None:
        return llama
    if set(kinds) <= _FIRST_MATTERS:
        return Decoding(None, lambda _, decode: PairDetokenizer(decode))
    return Decoding(None, lambda _, decode: WholeDetokenizer(decode))


def _llama(steps: list[dict[str, Any]]) -> Decoding | None:
    """Replace* ByteFallback? Fuse Strip?, the decoder of converted SentencePiece models. None for any other."""
    kinds = [str(step.get("type")) for step in steps]
    if not re.fullmatch(r"(Replace )*(ByteFallback )?Fuse( Strip)?", " ".join(kinds)):
        return None
    replaced = [(step["pattern"].get("String"), step["content"]) for step in steps if step["type"] == "Replace"]
    strip: dict[str, Any] = steps[-1] if kinds[-1] == "Strip" else {"content": " ", "start": 0, "stop": 0}
    if any(not old for old, _ in replaced) or strip["stop"]:  # a regex; or the end of the text matters
        return None
    falls_back = "ByteFallback" in kinds

    def part(token: str) -> str | bytes:
        for old, new in replaced:
            token = token.replace(old, new)
        match = BYTE_TOKEN.fullmatch(token) if falls_back else None
        return bytes([int(match[1], 16)]) if match else token

    stripping = {"strip_char": strip["content"], "strip": strip["start"]}
    return Decoding(part, lambda token, _: ByteRunDetokenizer(lambda n: part(token(n)), **stripping))


# GPT-2's characters for bytes: a printable byte is itself, the 68 others are U+0100 and up, in order.
_BYTE_OF = {chr(byte): byte for byte in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))}
_BYTE_OF |= {chr(0x100 + n): byte for n, byte in enumerate(sorted(set(range(256)) - set(_BYTE_OF.values())))}


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token: `byte_level_bytes("\\u0120a") == b" a"`.

    A token with any character outside the alphabet (an added token with a real space) is itself, in UTF-8.
    """
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode("utf-8")
