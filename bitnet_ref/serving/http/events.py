"""What a reply consists of, in order, for every API: reasoning, text, and calls of tools with their arguments."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Reasoning:
    """A piece of the thinking before the answer."""

    text: str


@dataclass(frozen=True)
class Text:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """The beginning of a call; its arguments follow. index: of the call in the reply."""

    index: int
    name: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}", compare=False)


@dataclass(frozen=True)
class CallArguments:
    """A piece of the JSON of a call's arguments."""

    index: int
    text: str


Event = Reasoning | Text | CallStart | CallArguments


def merge_events(events: Iterable[Event]) -> list[Event]:
    """The same events, with neighbouring pieces of one kind joined.

    >>> merge_events([Text("a"), Text("b"), Reasoning("c")])
    [Text(text='ab'), Reasoning(text='c')]
    """
    groups: list[list[Event]] = []
    for event in events:
        last = groups[-1][0] if groups else None
        joins = type(last) is type(event) and not isinstance(event, CallStart)
        if joins and (not isinstance(event, CallArguments) or event.index == last.index):  # type: ignore[union-attr]
            groups[-1].append(event)
        else:
            groups.append([event])
    return [group[0] if len(group) == 1 else _join(group) for group in groups]


def _join(group: list[Event]) -> Event:
    text, first = "".join(each.text for each in group if not isinstance(each, CallStart)), group[0]
    if isinstance(first, CallArguments):
        return CallArguments(first.index, text)
    return Reasoning(text) if isinstance(first, Reasoning) else Text(text)


@dataclass
class Call:
    """A call, as far as it came."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Reply:
    """All events of a reply together."""

    reasoning: str = ""
    text: str = ""
    calls: list[Call] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[Event]) -> Reply:
        reply = cls()
        for event in merge_events(events):
            if isinstance(event, Reasoning):
                reply.reasoning += event.text
            elif isinstance(event, Text):
                reply.text += event.text
            elif isinstance(event, CallStart):
                reply.calls.append(Call(event.id, event.name))
            else:
                reply.calls[event.index].arguments += event.text
        return reply
