"""From tokens to text: only whole characters, and nothing that may still turn out to be part of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ..tokenizers import Tokenizer
from .string_search import StringSearch


class StopStrings:
    """Passes text on, but holds back an end that may begin a stop string.

    >>> stops = StopStrings(["END"])
    >>> [stops.push(text) for text in ("one E", "N", "d. E", "ND, no")]
    ['one ', '', 'ENd. ', '']
    >>> stops.found
    'END'
    """

    def __init__(self, stops: Sequence[str] | StringSearch) -> None:
        """stops: the strings, or the search for them, which several texts may share."""
        self.found: str | None = None
        self._search = stops if isinstance(stops, StringSearch) else StringSearch(stops)
        self._state = 0  # of the search: its string is what is held back
        self._held = ""

    @property
    def is_empty(self) -> bool:
        """Whether there are no stop strings."""
        return self._search.is_empty

    def push(self, text: str) -> str:
        """Add text. -> the part that is certain; nothing after a stop string."""
        if self._search.is_empty:
            return text
        if self.found is not None:
            return ""
        self._state, hits = self._search.ends(self._state, text)
        held, self._held = self._held + text, ""
        if hits:
            before = len(held) - len(text)
            # The first to begin; of those, the longest
            start, length = min(
                ((before + end - length, length) for end, length in hits), key=lambda hit: (hit[0], -hit[1])
            )
            self.found = held[start : start + length]
            return held[:start]
        certain = len(held) - self._search.depths[self._state]
        self._held = held[certain:]
        return held[:certain]

    def flush(self) -> str:
        held, self._held, self._state = self._held, "", 0
        return held


class TextStream:
    """Tokens in, certain text out: a tokenizer's incremental decoder, then banned strings, stop strings and the filter.

    An id that is not in the tokenizer's vocabulary gives no text: embeddings are often padded to a round number, and a
    vocabulary may have holes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stops: Sequence[str] | StringSearch,
        *,
        banned: Sequence[str] | StringSearch = (),
        refuses: Callable[[str], bool] | None = None,
        stops_after: int = 0,
        shown: Collection[int] = (),
    ) -> None:
        """banned: strings that end the text before them. refuses: a function of the text; the text ends before the
        piece for which it returns True. stops_after: stop strings count after this many tokens.
        shown: special tokens that have text."""
        self._tokenizer = tokenizer
        self._decoder = None if tokenizer is None else tokenizer.stream_decoder(shown=shown)
        self.banned, self.stops = StopStrings(banned), StopStrings(stops)
        self._refuses, self._text, self._refused = refuses, "", False
        self._passes_all = refuses is None and self.banned.is_empty and self.stops.is_empty
        self._tokens, self._stops_after = 0, stops_after

    @property
    def filtered(self) -> bool:
        """Whether a banned string or the filter ended the text, not a stop string before it."""
        return self.stops.found is None and (self._refused or self.banned.found is not None)

    def prime(self, tokens: Sequence[int]) -> str:
        """The text of the prompt, which is neither searched nor filtered."""
        return "".join(map(self._decode, tokens))

    def push(self, token: int) -> str:
        self._tokens += 1
        text = self._decode(token)
        return text if self._passes_all else self._filter(self._search(self.banned.push(text)))

    def flush(self) -> str:
        if self._decoder is None:
            return ""
        text = self.banned.push(self._decoder.flush())
        if self.banned.found is None:
            text += self.banned.flush()
        return self._filter(self._search(text) + self.stops.flush())

    def _decode(self, token: int) -> str:
        if self._decoder is None or self._tokenizer is None or not self._tokenizer.has_id(token):
            return ""
        return self._decoder.push(token)

    def _search(self, text: str) -> str:
        return text if self._tokens <= self._stops_after else self.stops.push(text)

    def _filter(self, text: str) -> str:
        if self._refused or (text and self._refuses is not None and self._refuses(self._text + text)):
            self._refused = True
            return ""
        if self._refuses is not None:
            self._text += text
        return text
