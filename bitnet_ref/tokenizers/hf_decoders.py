"""The text or bytes of a token of a tokenizer.json, by the file's `decoder`, and the detokenizer that is exact for it.

Source: the decoders of huggingface/tokenizers (`decoders/` and `pre_tokenizers/byte_level.rs`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .streaming import ByteDetokenizer, ByteRunDetokenizer, Detokenizer, PairDetokenizer, WholeDetokenizer

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_FIRST_MATTERS = {"Metaspace", "WordPiece", "Replace", "Strip"}  # each token alone; only the first may differ


@dataclass(frozen=True)
class Decoding:
    """How to decode: `part` gives a token's text or bytes (None: unknown); `detokenizer` makes a detokenizer."""

    part: Callable[[str], str | bytes] | None
    detokenizer: Callable[[Callable[[int], str], Callable[[list[int]], str]], Detokenizer]


def read_decoder(decoder: dict[str, Any] | None) -> Decoding:
    """The decoding for the `decoder` object of a file that the library has accepted (None: tokens joined by spaces)."""
    steps = _flatten(decoder)
    kinds = [str(step.get("type")) for step in steps]
    if kinds == ["ByteLevel"]:
        return Decoding(byte_level_bytes, lambda token, _: ByteDetokenizer(lambda n: byte_level_bytes(token(n))))
    llama = _llama(steps)
    if llama is not None:
        return llama
    if set(kinds) <= _FIRST_MATTERS:
        return Decoding(None, lambda _, decode: PairDetokenizer(decode))
    return Decoding(None, lambda _, decode: WholeDetokenizer(decode))


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder["decoders"] for step in _flatten(inner)]
    return [decoder]


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


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: a printable byte is itself, the 68 others are U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    return alphabet | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token: `byte_level_bytes("\\u0120a") == b" a"`.

    A token with any character outside the alphabet (an added token with a real space) is itself, in UTF-8.
    """
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode("utf-8")
