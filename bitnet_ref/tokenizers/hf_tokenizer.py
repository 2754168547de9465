"""Hugging Face `tokenizer.json` files (Llama 3, BitNet 2B-4T, Falcon; Llama 2 in its converted form).

The `tokenizers` library encodes and decodes. The checks before and after it loads a file are ours, because on some
files it panics, on some it pads to two thousand million tokens, and on some it renumbers tokens without an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from ..errors import TokenizerError, errors_at
from ..system.json_file import parse_json_object
from .base import Tokenizer
from .files import MAX_TOKEN_ID, AnyPath
from .hf_json import Decoding, check_tokenizer_json, post_processor_affixes, read_decoder
from .hf_limits import TextLimits
from .settings import TokenizerSettings
from .streaming import Detokenizer

T = TypeVar("T")


class HfTokenizer(Tokenizer):
    """A tokenizer over the bytes of a tokenizer.json."""

    def __init__(self, json_bytes: bytes, settings: TokenizerSettings | None = None, *, path: AnyPath = None) -> None:
        """Raises TokenizerError if the file cannot be used, or the settings contradict it."""
        settings = settings or TokenizerSettings()
        self.path = None if path is None else os.fspath(path)
        table = parse_json_object(json_bytes, TokenizerError, path or "tokenizer.json")
        with errors_at(path):
            check_tokenizer_json(table)
            self._limits = TextLimits(table)
            # The library normalizes added tokens, with each that is added.
            for tokens in (table.get("added_tokens") or [], [{"content": t.content} for t in settings.added_tokens]):
                self._check_length(" ".join(token["content"] for token in tokens), "added_tokens")
            self._tokenizer = self._load(json_bytes)
            for n, entry in enumerate(table.get("added_tokens") or []):
                self._check_declared_id(entry["content"], entry["id"], f"added_tokens[{n}]")
        with errors_at(settings.path):
            self._add_tokens(settings)
        with errors_at(path):
            self._read_vocabulary()
            self._affixes = post_processor_affixes(table.get("post_processor"))
            for token in (*self._affixes[0], *self._affixes[1]):
                if self._token(token) is None:
                    raise TokenizerError(f"token {token} is not in the vocabulary", field="post_processor")
        self._decoding: Decoding = read_decoder(table.get("decoder"))
        self._measure_tokens(self._tokens.values(), self._limits.growth["decoder"])
        super().__init__(settings, path, json_bytes)

    def _load(self, json_bytes: bytes) -> Any:
        try:
            import tokenizers
        except ImportError as error:
            raise TokenizerError("tokenizer.json needs tokenizers: pip install tokenizers") from error
        tokenizer = self._guard("load this file", lambda: tokenizers.Tokenizer.from_buffer(json_bytes))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        if getattr(tokenizer.model, "dropout", None):
            tokenizer.model.dropout = None  # BPE dropout is for training: it splits a text at random
        return tokenizer

    def _check_declared_id(self, content: str, number: int, field: str) -> None:
        actual = self._tokenizer.token_to_id(content)
        if actual != number:  # the library only warns, and continues with its own number
            message = f"{content!r} is declared as token {number} but is token {actual} in the vocabulary"
            raise TokenizerError(message, field=field)

    def _add_tokens(self, settings: TokenizerSettings) -> None:
        """Add tokens that the side files declare, unless tokenizer.json has them alike, as transformers does."""
        from tokenizers import AddedToken as LibraryToken

        present = {token.content: _flags(token) for token in self._tokenizer.get_added_tokens_decoder().values()}
        fresh = []
        for token in settings.added_tokens:
            if self._tokenizer.token_to_id(token.content) is None and token.id is None:
                continue  # named, but not in the vocabulary
            known, flags = present.get(token.content), _flags(token)
            if known is not None:
                stated = flags if settings.flags_count and token.id is not None else known
                special = known["special"] or (token.special and token.content not in settings.listed)
                flags = stated | {"special": special}
            if flags != known:
                fresh.append((token, flags))
        # In the order of their ids: the library numbers a new token after the last one. All at once: a call for each
        # token would make the library read all that it has each time.
        fresh.sort(key=lambda each: -1 if each[0].id is None else each[0].id)
        made = [LibraryToken(token.content, **flags) for token, flags in fresh]
        self._guard("add tokens", partial(self._tokenizer.add_tokens, made))
        for token in settings.added_tokens:
            if token.id is not None:
                self._check_declared_id(token.content, token.id, "added_tokens")

    def _read_vocabulary(self) -> None:
        self._ids: dict[str, int] = self._guard("list its vocabulary", partial(self._tokenizer.get_vocab, True))
        self._tokens = {number: token for token, number in self._ids.items()}
        added = self._tokenizer.get_added_tokens_decoder()
        if not self._tokens:
            raise TokenizerError("the vocabulary is empty", field="model.vocab")
        self.vocab_size = max(self._tokens) + 1
        if self.vocab_size > MAX_TOKEN_ID:
            raise TokenizerError(f"a token's id is {self.vocab_size - 1}", field="model.vocab")
        # By their text, as the library decides what to leave out when it decodes.
        special = {token.content for token in added.values() if token.special}
        self._specials = {number for number, token in self._tokens.items() if token in special}

    def token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def _token(self, token: int) -> str | None:
        return self._tokens.get(token)

    def _is_special(self, token: int) -> bool:
        return token in self._specials

    def _own_affixes(self) -> tuple[list[int], list[int]]:
        return self._affixes

    def _encode_plain(self, text: str) -> list[int]:
        self._check_length(text)
        return self._guard("encode this text", lambda: self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _encode_plain_batch(self, texts: list[str]) -> list[list[int]]:
        for text in texts:
            self._check_length(text)
        # The "fast" batch keeps no offsets, which nothing here reads.
        encode = partial(self._tokenizer.encode_batch_fast, texts, add_special_tokens=False)
        return [encoding.ids for encoding in self._guard("encode these texts", encode)]

    def _check_length(self, text: str, field: str | None = None) -> None:
        with errors_at(self.path):
            self._guard("normalize this text", lambda: self._limits.check_text(text, field))

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        checked = self._check_ids(ids)
        if skip_special_tokens:
            checked = [token for token in checked if token not in self._specials]
        return self._library_decode(checked)

    def _library_decode(self, ids: list[int]) -> str:
        self._check_decoded(ids)
        text: str = self._guard("decode these ids", lambda: self._tokenizer.decode(ids, skip_special_tokens=False))
        return text

    def _token_bytes(self, token: int) -> bytes:
        if self._decoding.part is None:
            # An unknown decoder: the text that the token adds after itself.
            before = self._library_decode([token])
            return self._library_decode([token, token])[len(before) :].encode("utf-8")
        part = self._decoding.part(self._tokenizer.id_to_token(token))
        return part.encode("utf-8") if isinstance(part, str) else part

    def _detokenizer(self) -> Detokenizer:
        # Not self._tokens: an added token that is matched after normalization is decoded in its normalized form.
        return self._decoding.detokenizer(self._tokenizer.id_to_token, self._library_decode)

    def _guard(self, doing: str, action: Callable[[], T]) -> T:
        """Call the library, which raises plain Exceptions, and its own BaseException when its Rust code panics."""
        try:
            return action()
        except (KeyboardInterrupt, SystemExit, GeneratorExit, TokenizerError):
            raise
        except BaseException as error:
            raise TokenizerError(f"tokenizers cannot {doing}: {error}", path=self.path) from error


def _flags(token: Any) -> dict[str, bool]:
    """How a token is cut out of a text."""
    return {name: getattr(token, name) for name in ("lstrip", "rstrip", "single_word", "normalized", "special")}
