"""Reading a text letter by letter, as it comes: small readers of JSON, Python and tagged values.

A reader is a generator that takes one letter with each `yield`, so nothing is read twice and it may stop anywhere.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Generator
from typing import Any, TypeVar

MAX_DEPTH = 64
CLOSING = {"{": "}", "[": "]", "(": ")"}
T = TypeVar("T")
Letters = Generator[None, str, T]
Sink = Callable[[str], object]


class NotACall(Exception):
    """The text is no call in this form."""


def read_solid() -> Letters[str]:
    """The next letter that is no white space."""
    while (letter := (yield)).isspace():
        pass
    return letter


def read_literal(text: str) -> Letters[None]:
    """Exactly this text. Raises NotACall."""
    for expected in text:
        if (yield) != expected:
            raise NotACall


def read_until(mark: str, sink: Sink) -> Letters[None]:
    """Pass on what is before the mark, which is read too."""
    pending = ""
    while True:
        pending += yield
        if pending.endswith(mark):
            sink(pending[: -len(mark)])
            return
        if len(pending) > len(mark):
            sink(pending[0])
            pending = pending[1:]


def read_text(mark: str) -> Letters[str]:
    """What is before the mark, which is read too."""
    parts: list[str] = []
    yield from read_until(mark, parts.append)
    return "".join(parts)


def read_name(ends: str) -> Letters[tuple[str, str]]:
    """A name without white space.   -> name, and the letter of `ends` after it.  Raises NotACall"""
    parts: list[str] = []
    letter = yield from read_solid()
    while letter not in ends:
        if not (letter.isalnum() or letter in "_-.") or len(parts) >= 256:
            raise NotACall
        parts.append(letter)
        letter = yield
        if letter.isspace():
            letter = yield from read_solid()
            if letter not in ends:
                raise NotACall
    return "".join(parts), letter


def read_quoted(quote: str, sink: Sink) -> Letters[None]:
    """The rest of a string whose opening quote was read, quote and escapes included."""
    while (letter := (yield)) != quote:
        sink(letter)
        if letter == "\\":
            sink((yield))
    sink(quote)


def read_value(first: str, sink: Sink, quotes: str = '"', ends: str = ",}]") -> Letters[str]:
    """Pass on a value of JSON or Python whose first letter was read. -> the solid letter after it. Raises NotACall."""
    closing: list[str] = []
    letter = first
    is_scalar = first not in CLOSING and first not in quotes
    while True:
        if not closing and letter in ends:
            return letter
        sink(letter)
        if letter in quotes:
            yield from read_quoted(letter, sink)
        elif letter in CLOSING:
            closing.append(CLOSING[letter])
            if len(closing) > MAX_DEPTH:
                raise NotACall
        elif closing and letter in "}])" and letter != closing.pop():
            raise NotACall
        if not closing and not is_scalar:
            return (yield from read_solid())
        letter = yield
        if is_scalar and letter.isspace():
            return (yield from read_solid())


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises NotACall."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise NotACall from problem


def guess_json(text: str) -> str:
    """JSON for a value of a call in another form: of JSON or Python, or else the text as a string.

    >>> [guess_json(text) for text in ("1", "true", "None", "['a']", "north east")]
    ['1', 'true', 'null', '["a"]', '"north east"']
    """
    for parse in (json.loads, ast.literal_eval):
        try:
            return json.dumps(parse(text), ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    return json.dumps(text, ensure_ascii=False)
