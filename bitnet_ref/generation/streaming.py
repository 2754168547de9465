"""From tokens to text that is certain: whole characters only, and nothing that may yet turn out to be a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..tokenizers import Tokenizer


class StopStrings:
    """Passes text on, except for an end that may be the beginning of a stop string.

    >>> stops = StopStrings(["END"])
    >>> [stops.push(text) for text in ("one E", "N", "d. E", "ND, no")]
    ['one ', '', 'ENd. ', '']
    >>> stops.found
    'END'
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.found: str | None = None
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> str:
        """More text -> what of it is certain. Once a stop string is found, nothing more comes."""
        if self.found is not None:
            return ""
        self._held += text
        hits = [(at, -len(stop), stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if hits:
            at, _, self.found = min(hits)  # the first to begin; of those, the longest
            certain, self._held = self._held[:at], ""
            return certain
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        certain, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return certain

    def flush(self) -> str:
        """The text is over: what was held back is no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class TextStream:
    """Tokens in, certain text out: a tokenizer's incremental decoder, then the stop strings.

    An id past the tokenizer's vocabulary (embeddings are often padded to a round number) stands for no text.
    """

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str]) -> None:
        self._decoder = tokenizer.stream_decoder() if tokenizer is not None else None
        self._vocab_size = tokenizer.vocab_size if tokenizer is not None else 0
        self._stops = StopStrings(stops)

    @property
    def stopped_by(self) -> str | None:
        return self._stops.found

    def push(self, token: int) -> str:
        if self._decoder is None or token >= self._vocab_size:
            return ""
        return self._stops.push(self._decoder.push(token))

    def flush(self) -> str:
        if self._decoder is None:
            return ""
        return self._stops.push(self._decoder.flush()) + self._stops.flush()
