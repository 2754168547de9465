"""What rules about text need to know of a vocabulary: each token's bytes. Found out once for a model."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import TokenizerError

if TYPE_CHECKING:
    from ..tokenizers import Tokenizer
    from .constraints import LLVocabulary


class Vocabulary:
    """The bytes of every token that the tokenizer has; b"" for a special one and for holes."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """vocab_size: the model's, which may be larger than the tokenizer's."""
        self.tokenizer, self.vocab_size = tokenizer, vocab_size

    @cached_property
    def tokens(self) -> list[bytes]:
        return [_bytes(self.tokenizer, token) for token in range(min(self.tokenizer.vocab_size, self.vocab_size))]

    @cached_property
    def sorted(self) -> SortedTokens:
        return SortedTokens(self.tokens)

    @cached_property
    def llguidance(self) -> LLVocabulary:
        from .constraints import LLVocabulary

        return LLVocabulary(self.tokenizer, self.tokens, self.vocab_size)


class SortedTokens:
    """Tokens in the order of their bytes, so that those with one beginning lie together."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = tokens
        self.order = np.array(sorted(range(len(tokens)), key=tokens.__getitem__), dtype=np.int64)
        self._sorted = [tokens[token] for token in self.order]
        self._joined = b"".join(tokens)  # one search of it is much faster than one of each token
        self._starts = [0, *accumulate(map(len, tokens))]

    def beginning_with(self, start: bytes) -> NDArray[np.int64]:
        """
        >>> SortedTokens([b"b", b"abc", b"ab", b"a"]).beginning_with(b"ab").tolist()
        [2, 1]
        """
        first = bisect_left(self._sorted, start)
        end = start.rstrip(b"\xff")  # the first bytes after all that begin so: the last byte that can, counted up
        last = bisect_left(self._sorted, end[:-1] + bytes([end[-1] + 1])) if end else len(self._sorted)
        return self.order[first:last]

    def holding(self, part: bytes) -> list[int]:
        """
        >>> SortedTokens([b"b", b"abc", b"ab", b"a"]).holding(b"b")
        [0, 1, 2]
        """
        found, at = [], self._joined.find(part)
        while at >= 0:
            token = bisect_right(self._starts, at) - 1
            if at + len(part) <= self._starts[token] + len(self.tokens[token]):
                found.append(token)
                at = self._starts[token + 1] - 1
            at = self._joined.find(part, at + 1)
        return found


def _bytes(tokenizer: Tokenizer, token: int) -> bytes:
    try:
        return tokenizer.token_bytes(token)
    except TokenizerError:  # a hole in the vocabulary
        return b""
