"""From tokens to text that is certain: whole characters only, and nothing that may yet turn out to be a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        if not self._stops:
            return text
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
    """Tokens in, certain text out: a tokenizer's incremental decoder, then banned strings, stop strings and the filter.

    An id past the tokenizer's vocabulary (embeddings are often padded to a round number) stands for no text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stops: Sequence[str],
        *,
        banned: Sequence[str] = (),
        refuses: Callable[[str], bool] | None = None,
        stops_after: int = 0,
    ) -> None:
        """banned: strings that end the text before them; refuses: a function of the text that ends it before the piece
        that made it true. stops_after: so many tokens pass before stop strings count."""
        self._decoder = tokenizer.stream_decoder() if tokenizer is not None else None
        self._vocab_size = tokenizer.vocab_size if tokenizer is not None else 0
        self._banned, self._stops = StopStrings(banned), StopStrings(stops)
        self._refuses, self._text, self._refused = refuses, "", False
        self._tokens, self._stops_after = 0, stops_after

    @property
    def stopped_by(self) -> str | None:
        return self._stops.found

    @property
    def filtered(self) -> bool:
        """Whether the text ended before something that must not be said. A stop string before that ends it first."""
        return self._stops.found is None and (self._refused or self._banned.found is not None)

    @property
    def banned_by(self) -> str | None:
        return self._banned.found

    def prime(self, tokens: Sequence[int]) -> str:
        """The text of the prompt, which what comes continues. It is neither searched nor filtered."""
        if self._decoder is None:
            return ""
        return "".join(self._decoder.push(token) for token in tokens if token < self._vocab_size)

    def push(self, token: int) -> str:
        self._tokens += 1
        if self._decoder is None or token >= self._vocab_size:
            return ""
        return self._allowed(self._searched(self._banned.push(self._decoder.push(token))))

    def flush(self) -> str:
        if self._decoder is None or self.filtered:
            return ""
        text = self._banned.push(self._decoder.flush())
        if self._banned.found is None:
            text += self._banned.flush()
        return self._allowed(self._searched(text) + self._stops.flush())

    def _searched(self, text: str) -> str:
        return text if self._tokens <= self._stops_after else self._stops.push(text)

    def _allowed(self, text: str) -> str:
        """The text, if the filter has nothing against it."""
        if self._refused or (text and self._refuses is not None and self._refuses(self._text + text)):
            self._refused = True
            return ""
        if self._refuses is not None:
            self._text += text
        return text
