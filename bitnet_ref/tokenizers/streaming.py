"""Text from token ids one at a time: only text that no later token can change.

A *detokenizer* has `push(token_id) -> str` and `flush() -> str`, whose outputs joined equal `decode`. Each kind is
exact for one family of decoders.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(Protocol):
    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...


def _one_mark_per_byte(error: UnicodeError) -> tuple[str, int]:
    """SentencePiece's handling of bad UTF-8: U+FFFD for one byte, then the next byte is tried.

    Python's own "replace" makes one U+FFFD of an incomplete character: b"\\xe4\\xb8" is one mark, here two.
    """
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return REPLACEMENT, error.start + 1


codecs.register_error("bitnet_ref.one_mark_per_byte", _one_mark_per_byte)


class ByteDetokenizer:
    """Tokens are the same bytes in every place, and text their UTF-8 decoding (SentencePiece; byte-level BPE).

    A character split over tokens is held back until its last byte. `errors`: the codec's handler of invalid UTF-8.
    `strips_first(token)`: whether a token loses its leading space when it is the first text. With `strip_all` every
    leading space is removed until there is other text (SentencePiece's remove_extra_whitespaces).
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        *,
        errors: str = "replace",
        strips_first: Callable[[int], bool] | None = None,
        strip_all: bool = False,
    ) -> None:
        self._bytes, self._utf8 = token_bytes, codecs.getincrementaldecoder("utf-8")(errors)
        self._strips_first, self._strip_all = strips_first, strip_all

    def push(self, token: int) -> str:
        data = self._bytes(token)
        if data and self._strips_first is not None:
            if self._strips_first(token):
                data = data[1:]
            if data or not self._strip_all:
                self._strips_first = None
        return self._utf8.decode(data)

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


class ByteRunDetokenizer:
    """Tokens are text (str) or bytes. One bad byte turns a whole run of bytes into U+FFFD, so a run is held back until
    its end (Llama's tokenizer.json). Up to `strip` leading `strip_char` of the whole text are removed."""

    def __init__(self, token_part: Callable[[int], str | bytes], *, strip_char: str = " ", strip: int = 0) -> None:
        self._part = token_part
        self._strip_char, self._strip = strip_char, strip
        self._new_run()

    def _new_run(self) -> None:
        self._run, self._run_is_bad = bytearray(), False  # its text is valid only if the whole run is
        self._utf8 = codecs.getincrementaldecoder("utf-8")("strict")

    def push(self, token: int) -> str:
        part = self._part(token)
        if isinstance(part, str):
            return self._cut(self._end_of_run() + part)
        if self._run_is_bad:
            return self._cut(REPLACEMENT * len(part))
        self._run += part
        try:
            self._utf8.decode(part)
            return ""
        except UnicodeDecodeError:
            self._run_is_bad = True
            return self._cut(REPLACEMENT * len(self._run))

    def flush(self) -> str:
        return self._cut(self._end_of_run())

    def _end_of_run(self) -> str:
        if not self._run:
            return ""
        try:
            text = "" if self._run_is_bad else self._run.decode("utf-8")
        except UnicodeDecodeError:  # it ends inside a character
            text = REPLACEMENT * len(self._run)
        self._new_run()
        return text

    def _cut(self, text: str) -> str:
        while self._strip and text:
            if not text.startswith(self._strip_char):
                self._strip = 0
                break
            text, self._strip = text[len(self._strip_char) :], self._strip - 1
        return text


class PairDetokenizer:
    """A token's text depends only on whether it is the first; else it is what `decode` adds after another token."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._previous: list[int] = []  # the previous token, if there is one

    def push(self, token: int) -> str:
        before = self._decode(self._previous) if self._previous else ""
        text, self._previous = self._decode([*self._previous, token])[len(before) :], [token]
        return text

    def flush(self) -> str:
        return ""


class WholeDetokenizer:
    """For unknown decoders: holds everything until the end."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []

    def push(self, token: int) -> str:
        self._tokens.append(token)
        return ""

    def flush(self) -> str:
        tokens, self._tokens = self._tokens, []
        return self._decode(tokens)


class StreamDecoder:
    """A detokenizer that checks ids and leaves special tokens out.

    The joined outputs equal `Tokenizer.decode` of the same ids. After `flush` the decoder cannot be used again.
    """

    def __init__(
        self, machine: Detokenizer, check: Callable[[object, int], int], is_skipped: Callable[[int], bool]
    ) -> None:
        self._machine, self._check, self._is_skipped = machine, check, is_skipped
        self._count, self._finished = 0, False

    def push(self, token_id: int) -> str:
        """Add one token; return the text that is now final, often "". Raises TokenizerError for a bad id."""
        if self._finished:
            raise RuntimeError("this StreamDecoder was flushed; ask the tokenizer for a new one")
        token = self._check(token_id, self._count)
        self._count += 1
        return "" if self._is_skipped(token) else self._machine.push(token)

    def flush(self) -> str:
        """Return the text that was held back, with U+FFFD for an incomplete character."""
        finished, self._finished = self._finished, True
        return "" if finished else self._machine.flush()
