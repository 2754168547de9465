"""SentencePiece `tokenizer.model` files (Llama 1 and 2, Mistral, TinyLlama, 1bitLLM, storyteller).

The sentencepiece library encodes. As in Hugging Face, strings of special and added tokens are first cut out of the
text, and tokens may be added after the model's own pieces.
Decoding is ours, because it must also work one token at a time. A test holds it equal to the library's, token for
token, except that special tokens can be shown, where the library always hides them.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

from ..errors import TokenizerError, errors_at
from .base import Tokenizer
from .files import MAX_TOKEN_ID, AnyPath, read_prefixes
from .sentencepiece_model import BYTE, CONTROL, NO_DUMMY_PREFIX, UNKNOWN, read_model
from .settings import AddedToken, TokenizerSettings
from .streaming import ByteDetokenizer, Detokenizer


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer over a serialized SentencePiece model.

    Differs from transformers 5 in one place: transformers converts the model, and then encodes a newline or two spaces
    at the very start of a text without the leading "\\u2581" that the model was trained with. We keep it.
    """

    def __init__(self, model_bytes: bytes, settings: TokenizerSettings | None = None, *, path: AnyPath = None) -> None:
        """Raises TokenizerError if the bytes are no such model, or the settings contradict it."""
        settings = settings or TokenizerSettings()
        model_bytes += b"" if settings.add_prefix_space else NO_DUMMY_PREFIX
        self._model_bytes = model_bytes
        self._model = read_model(model_bytes, path)
        self._processor = _processor(model_bytes, path)
        # The same model without the space in front of the text, made when first needed (see _encode_segment).
        self._inner_processor = self._processor if settings.legacy else None
        self._size = len(self._model.pieces)
        if self._processor.vocab_size() != self._size:
            message = f"sentencepiece reads {self._processor.vocab_size()} pieces where the file has {self._size}"
            raise TokenizerError(message, path=path)
        self._ids = {piece: n for n, piece in enumerate(self._model.pieces)}  # and those of added tokens
        self._specials = {n for n, kind in enumerate(self._model.types) if kind in (CONTROL, UNKNOWN)}
        self._added: dict[int, str] = {}
        cut_out = {self._model.pieces[n]: AddedToken(self._model.pieces[n]) for n in self._specials}
        for token in settings.added_tokens:
            with errors_at(settings.path):
                number = self._add(token)
            if number is not None:
                cut_out[token.content] = token
                if token.special:
                    self._specials.add(number)
        self.vocab_size = max([self._size, *(n + 1 for n in self._added)])
        self.path = None if path is None else os.fspath(path)
        self._measure_tokens([*self._model.pieces, *self._added.values()])
        self._cut_out = cut_out
        self._prefixes = read_prefixes(cut_out, "added_tokens")
        self._sorted = list(self._prefixes)
        self._first = re.compile("[" + re.escape("".join({token[0] for token in cut_out})) + "]")
        self._bytes: dict[int, bytes] = {}
        super().__init__(settings, path, model_bytes)

    def _add(self, token: AddedToken) -> int | None:
        """Give an added token its id; None for a token that is only named and not in the vocabulary."""
        known = self.token_to_id(token.content)
        if known is not None:
            if token.id not in (None, known):
                message = f"{token.content!r} is token {known} in the model, and {token.id} here"
                raise TokenizerError(message, field="added_tokens")
            return known
        if token.id is None:
            return None
        if token.id >= MAX_TOKEN_ID or self._token(token.id) is not None:
            message = f"{token.content!r} cannot be token {token.id}: that is {self._token(token.id)!r}"
            raise TokenizerError(message, field="added_tokens")
        self._added[token.id], self._ids[token.content] = token.content, token.id
        return token.id

    def token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def _token(self, token: int) -> str | None:
        return self._model.pieces[token] if token < self._size else self._added.get(token)

    def _is_special(self, token: int) -> bool:
        return token in self._specials

    def _own_ids(self) -> tuple[int | None, int | None]:
        bos, eos = self._processor.bos_id(), self._processor.eos_id()  # -1: the model has no such token
        return bos if bos >= 0 else None, eos if eos >= 0 else None

    def _own_affixes(self) -> tuple[list[int], list[int]]:
        # The file does not say it: transformers' Llama class, the usual reader of these files, adds BOS by default.
        return [] if self.bos_id is None else [self.bos_id], []

    def _find_tokens(self, text: str) -> Iterator[tuple[str, int]]:
        """(token, offset) of each special and added token in a text; the longest at each place, as in Hugging Face."""
        end = 0
        for match in self._first.finditer(text):
            start = match.start()
            if start >= end:
                rest = text[start : start + self._longest]
                # Of the sorted tokens, the last one up to `rest` begins it, or one of its own prefixes does, or none.
                token = self._sorted[max(0, bisect_right(self._sorted, rest) - 1)]
                while token and not rest.startswith(token):
                    token = self._prefixes[token]
                if token:
                    end = start + len(token)
                    yield token, start

    def _encode_plain(self, text: str) -> list[int]:
        """Cuts the text at its special tokens; the segments between them are encoded alone."""
        ids: list[int] = []
        start = 0
        for token, left in self._find_tokens(text):
            flags, right = self._cut_out[token], left + len(token)
            if left < start or (
                flags.single_word and re.search(r"\w", text[left - 1 : left] + text[right : right + 1])
            ):
                continue
            before = text[start:left].rstrip() if flags.lstrip else text[start:left]
            ids += [*self._encode_segment(before, first=start == 0), self._ids[token]]
            start = right + (len(text[right:]) - len(text[right:].lstrip()) if flags.rstrip else 0)
        return ids + self._encode_segment(text[start:], first=start == 0)

    def _encode_plain_batch(self, texts: list[str]) -> list[list[int]]:
        plain = [n for n, text in enumerate(texts) if next(self._find_tokens(text), None) is None]
        # One thread: the library's own pool would use every core of the machine.
        encoded = dict(zip(plain, self._processor.encode([texts[n] for n in plain], num_threads=1), strict=True))
        return [encoded[n] if n in encoded else self._encode_plain(text) for n, text in enumerate(texts)]

    def _encode_segment(self, text: str, *, first: bool) -> list[int]:
        """Ids of text without special tokens.

        Only the start of the text gets the model's leading space, unless the tokenizer is `legacy`: then every segment
        gets one. "a</s>b" is a </s> b, or a </s> \\u2581b.
        """
        if not text:
            return []
        if not first and self._inner_processor is None:
            self._inner_processor = _processor(self._model_bytes + NO_DUMMY_PREFIX, self.path)
        processor: Any = self._processor if first else self._inner_processor
        ids: list[int] = processor.encode(text)
        return ids

    def _token_bytes(self, token: int) -> bytes:
        data = self._bytes.get(token)
        if data is None:
            shown = self._token(token) or ""
            whole = token >= self._size or token in self._specials
            data = self._bytes[token] = shown.encode("utf-8") if whole else self._model.piece_bytes(token)
        return data

    def _detokenizer(self) -> Detokenizer:
        model = self._model
        strips = model.add_dummy_prefix or model.remove_extra_whitespaces
        return ByteDetokenizer(
            self._token_bytes,
            errors="bitnet_ref.one_mark_per_byte",
            strips_first=self._starts_with_space if strips else None,
            strip_all=model.remove_extra_whitespaces,
        )

    def _starts_with_space(self, token: int) -> bool:
        """Whether the token's text begins with \\u2581 (a byte piece for a space does not)."""
        if token >= self._size or token in self._specials or self._model.types[token] == BYTE:
            return False
        return self._model.pieces[token].startswith("\u2581")


def _processor(data: bytes, path: AnyPath) -> Any:
    import sentencepiece

    try:
        return sentencepiece.SentencePieceProcessor(model_proto=data)
    except (RuntimeError, ValueError, TypeError, OSError, MemoryError) as error:
        raise TokenizerError(f"sentencepiece cannot read this model: {error}", path=path) from error
