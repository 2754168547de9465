"""What a reply consists of, in order, for every API: reasoning, text, and calls of tools with their arguments.

An `Event` is a piece of it as it comes; a `Reply` has all of them together, as blocks.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, ClassVar


@dataclass(frozen=True)
class Reasoning:
    """A piece of the thinking before the answer."""

    text: str
    kind: ClassVar = "reasoning"


@dataclass(frozen=True)
class Text:
    """A piece of the answer."""

    text: str
    kind: ClassVar = "text"


@dataclass(frozen=True)
class CallStart:
    """The beginning of a call; its arguments follow. index: of the call in the reply."""

    index: int
    name: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}", compare=False)
    kind: ClassVar = "call"


@dataclass(frozen=True)
class CallArguments:
    """A piece of the JSON of a call's arguments."""

    index: int
    text: str
    kind: ClassVar = "call"


Event = Reasoning | Text | CallStart | CallArguments


def merge_events(events: Iterable[Event]) -> list[Event]:
    """The same events, with neighbouring pieces of one kind joined.

    >>> merge_events([Text("a"), Text("b"), Reasoning("c")])
    [Text(text='ab'), Reasoning(text='c')]
    """
    merged: list[Event] = []
    for _, group in groupby(events, lambda event: (type(event), getattr(event, "index", 0))):
        first, *rest = group
        if rest and not isinstance(first, CallStart):  # no two calls begin with one index
            first = replace(first, text="".join([first.text, *(event.text for event in rest)]))  # type: ignore[union-attr]
        merged.append(first)
    return merged


def read_value(text: str) -> Any:
    """The value of a JSON text. ValueError for other texts, and for what a reply in JSON and UTF-8 cannot say again: an
    infinite number (1e999), half of a surrogate pair ("\\ud800")."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError as problem:
        raise ValueError("it is nested too deep") from problem
    return value


@dataclass
class Block:
    """A part of a reply. kind: "reasoning", "text" or "call". text: of a call, the JSON of its arguments."""

    kind: str
    index: int
    name: str = ""
    call_id: str = ""
    text: str = ""

    @property
    def arguments(self) -> dict[str, Any] | None:
        """Of a call; None where it was cut, or is no JSON that a reply can hold."""
        try:
            value = read_value(self.text)
        except ValueError:
            return None
        return value if isinstance(value, dict) else None


class Reply:
    """The blocks of a reply, as far as it came."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.blocks: list[Block] = []
        for event in events:
            self.add(event)

    def add(self, event: Event) -> bool:
        """Take a piece.   -> whether it begins a new block"""
        is_new = isinstance(event, CallStart) or not self.blocks or self.blocks[-1].kind != event.kind
        if is_new:
            start = (event.name, event.id) if isinstance(event, CallStart) else ()
            self.blocks.append(Block(event.kind, len(self.blocks), *start))
        if not isinstance(event, CallStart):
            self.blocks[-1].text += event.text
        return is_new

    def join(self, kind: str) -> str:
        """The texts of all blocks of this kind."""
        return "".join(block.text for block in self.blocks if block.kind == kind)

    @property
    def calls(self) -> list[Block]:
        return [block for block in self.blocks if block.kind == "call"]
