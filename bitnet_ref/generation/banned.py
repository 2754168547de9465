"""Strings that must not be said: no token is allowed that would complete one, however the text is cut into tokens.

A token stands for bytes, and so does a string. It is completed by a token that holds it whole, or by one that begins
with the rest of it when the text ends with its beginning. (transformers' and vLLM's bad words compare token ids, so
another spelling of the same string in tokens passes them.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..tokenizers.vocabulary import SortedTokens
from .processors import without


class BannedWords:
    """A processor (see `processors`): tokens that would complete one of `words` after the prompt are impossible."""

    def __init__(self, words: Sequence[str], vocabulary: SortedTokens, prompt_tokens: int) -> None:
        self.vocabulary, self.prompt_tokens = vocabulary, prompt_tokens
        self.words = [word.encode() for word in words]
        whole = {token for word in self.words for token in vocabulary.containing(word)}
        self.whole = np.array(sorted(whole), dtype=np.int64)
        self.longest = max(map(len, self.words))

    def moves(self, token_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        tail = self._tail(token_ids)
        rests = [
            self.vocabulary.with_prefix(word[begun:])
            for word in self.words
            for begun in range(1, min(len(word) - 1, len(tail)) + 1)
            if tail.endswith(word[:begun])
        ]
        return np.unique(np.concatenate([self.whole, *rests]))

    def __call__(self, token_ids: NDArray[np.int64], logits: NDArray) -> NDArray:
        return without(logits, self.moves(token_ids))

    def _tail(self, token_ids: NDArray[np.int64]) -> bytes:
        """The last bytes of the text, as many as can begin a word."""
        tail, tokens = b"", self.vocabulary.tokens
        for token in token_ids[: self.prompt_tokens - 1 if self.prompt_tokens else None : -1].tolist():
            tail = (tokens[token] if token < len(tokens) else b"") + tail
            if len(tail) >= self.longest:
                break
        return tail
