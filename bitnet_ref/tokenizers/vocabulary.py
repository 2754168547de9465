"""The bytes of every token of a vocabulary, and lookup of tokens by prefix or substring."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from ..errors import TokenizerError
from ..system.lazy import lazy_property
from .base import Tokenizer


class Vocabulary:
    """The bytes of every token that a tokenizer has, computed once per model."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """vocab_size: the model's, which may be larger than the tokenizer's."""
        self.tokenizer, self.vocab_size = tokenizer, vocab_size

    @lazy_property
    def tokens(self) -> list[bytes]:
        """The bytes of each token; b"" for special tokens and for ids that are not in the vocabulary."""
        tokens = []
        for token in range(min(self.tokenizer.vocab_size, self.vocab_size)):
            try:
                tokens.append(self.tokenizer.token_bytes(token))
            except TokenizerError:  # the id is not in the vocabulary
                tokens.append(b"")
        return tokens

    def name(self, token: int) -> bytes:
        """The bytes of a token; of a special one, of its name; b"" for an id that is not in the vocabulary."""
        data = self.tokens[token] if token < len(self.tokens) else b""
        return data or (self.tokenizer.id_to_token(token).encode() if self.tokenizer.has_id(token) else b"")

    @lazy_property
    def sorted(self) -> SortedTokens:
        return SortedTokens(self.tokens)


class SortedTokens:
    """Tokens sorted by their bytes, so that tokens with a common prefix are adjacent."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = tokens
        self.order = np.array(sorted(range(len(tokens)), key=tokens.__getitem__), dtype=np.int64)
        self._sorted = [tokens[token] for token in self.order]
        self._joined = b"".join(tokens)  # one search of this is much faster than one search per token
        self._starts = [0, *accumulate(map(len, tokens))]

    def span(self, prefix: bytes) -> tuple[int, int]:
        """Where in `order` the tokens with this prefix are: from the first number to before the second."""
        first = bisect_left(self._sorted, prefix)
        end = prefix.rstrip(b"\xff")  # the smallest bytes after all with this prefix: its last byte below 255, plus 1
        last = bisect_left(self._sorted, end[:-1] + bytes([end[-1] + 1])) if end else len(self._sorted)
        return first, last

    def containing(self, part: bytes) -> list[int]:
        """
        >>> SortedTokens([b"b", b"abc", b"ab", b"a"]).containing(b"b")
        [0, 1, 2]
        """
        matches, position = [], self._joined.find(part)
        while position >= 0:
            token = bisect_right(self._starts, position) - 1
            if position + len(part) <= self._starts[token] + len(self.tokens[token]):
                matches.append(token)
                position = self._starts[token + 1] - 1
            position = self._joined.find(part, position + 1)
        return matches
