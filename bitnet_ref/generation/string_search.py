"""One pass over a text that finds any of many strings (Aho and Corasick, 1975), whatever their number and length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_SYMBOLS = 1 << 21  # more than there are characters


class StringSearch:
    """A tree of strings, and for each of its nodes the node of the longest end of its string that begins another one.

    A state is a node: the longest end of the text so far that begins one of the strings. 0 is the empty one.

    >>> search = StringSearch([b"he", b"she"])
    >>> state = search.advance(0, b"us")
    >>> search.depths[state]  # "s" begins "she"
    1
    >>> search.lengths[search.advance(state, b"he")]  # "she" ends here, and "he"
    3
    """

    def __init__(self, strings: Iterable[str] | Iterable[bytes]) -> None:
        self._edges: dict[int, int] = {}  # node * _SYMBOLS + symbol -> node
        parents, symbols = [0], [0]
        self.depths = [0]  # of each node, the length of its string
        self.lengths = [0]  # of the longest of the strings that ends at each node; 0: none does
        for string in strings:
            node = 0
            for symbol in _symbols(string):
                key = node * _SYMBOLS + symbol
                if (child := self._edges.get(key)) is None:
                    child = self._edges[key] = len(parents)
                    parents.append(node)
                    symbols.append(symbol)
                    self.depths.append(self.depths[node] + 1)
                    self.lengths.append(0)
                node = child
            self.lengths[node] = self.depths[node]
        self.shorter = [0] * len(parents)  # of each node, that of the longest proper end of its string
        for node in sorted(range(1, len(parents)), key=self.depths.__getitem__):
            if parents[node]:
                self.shorter[node] = self._step(self.shorter[parents[node]], symbols[node])
            self.lengths[node] = self.lengths[node] or self.lengths[self.shorter[node]]
        self.is_empty = len(parents) == 1  # no string is looked for

    def _step(self, node: int, symbol: int) -> int:
        edges, shorter = self._edges, self.shorter
        while (target := edges.get(node * _SYMBOLS + symbol)) is None and node:
            node = shorter[node]
        return target or 0

    def advance(self, state: int, text: str | bytes) -> int:
        """The state after more text."""
        for symbol in _symbols(text):
            state = self._step(state, symbol)
        return state

    def ends(self, state: int, text: str | bytes) -> tuple[int, list[tuple[int, int]]]:
        """The state after more text, and where strings end in it: (characters of `text` before the end, the length of
        the longest string that ends there)."""
        hits = []
        for place, symbol in enumerate(_symbols(text), start=1):
            state = self._step(state, symbol)
            if self.lengths[state]:
                hits.append((place, self.lengths[state]))
        return state, hits


def _symbols(text: str | bytes) -> Sequence[int]:
    return text if isinstance(text, bytes) else [ord(character) for character in text]
