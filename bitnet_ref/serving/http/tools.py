"""Tools: what forces a call, and the calls in a model's text.

Two forms are read, which published chat templates teach: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`
(Hermes, Qwen, Falcon 3) and a reply that is nothing but such an object (Llama 3; `parameters` means `arguments`).
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from .schemas import RequestError

MARK, END_MARK = "<tool_call>", "</tool_call>"


class ToolReader:
    """Passes the text of a reply on, but holds back what may be a call of one of these tools."""

    def __init__(self, names: Sequence[str], is_forced: bool, one_call: bool = False) -> None:
        """is_forced: the whole reply is one call. one_call: of several calls the first is read."""
        self.names, self._is_forced, self._one_call = names, is_forced, one_call
        self._held: list[str] = []  # what was not passed on
        self._is_blank = not is_forced  # so far
        self._is_object = is_forced
        self._has_mark = False

    def copy(self) -> ToolReader:
        """A reader for another reply."""
        return ToolReader(self.names, self._is_forced, self._one_call)

    def push(self, text: str, finish: str | None) -> tuple[str, list[dict[str, Any]]]:
        """Add text.   -> the part that is certain, and after the last piece (finish) the calls"""
        self._held.append(text)
        if self._is_blank:
            start = text.lstrip()
            self._is_blank = not start
            self._is_object = start.startswith("{")
        certain = ""
        if not (self._is_blank or self._is_object or self._has_mark):
            new = "".join(self._held)
            mark = new.find(MARK)
            self._has_mark = mark >= 0
            end = mark if self._has_mark else len(new) - _partial(new)
            certain, self._held = new[:end], [new[end:]]
        if finish is None:
            return certain, []
        rest = "".join(self._held)
        calls = self._read(rest)[: 1 if self._one_call else None]
        if calls or self._is_forced:  # a forced call that max_tokens cuts is no text
            return certain.rstrip(), calls
        return certain + rest, []

    def _read(self, text: str) -> list[dict[str, Any]]:
        """The calls in a text; none if any of it is not a call of a known tool."""
        calls = []
        for part in [text] if self._is_object else _split_calls(text):
            try:
                members = _read_members(part)
            except (ValueError, RecursionError):
                return []
            name, _ = members.get("name", (None, ""))
            arguments, written = members.get("arguments", members.get("parameters", ({}, "{}")))
            if name not in self.names or not isinstance(arguments, dict):
                return []
            # The model's own text: Python would write 1e999 as Infinity, and an escaped half of a pair as itself
            function = {"name": name, "arguments": written}
            calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
        return calls


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_refuse_constant)
_SPACE = re.compile(r"[ \t\r\n]*")


def _read_members(text: str) -> dict[str, tuple[Any, str]]:
    """The members of a JSON object, each with its text. Raises ValueError for what is none, and RecursionError.

    >>> _read_members('{"a": [1, 2.0 ], "b": "x"}')
    {'a': ([1, 2.0], '[1, 2.0 ]'), 'b': ('x', '"x"')}
    """

    place, members = 0, dict[str, tuple[Any, str]]()

    def skip(mark: str) -> bool:
        """Pass spaces, then the mark if it is there."""
        nonlocal place
        place = _end_of_space(text, place)
        is_there = text.startswith(mark, place)
        place = _end_of_space(text, place + len(mark)) if is_there else place
        return is_there

    is_first = True
    if not skip("{"):
        raise ValueError("expected an object")
    while not skip("}"):
        if not (is_first or skip(",")) or not text.startswith('"', place):
            raise ValueError("expected a member of an object")
        name, place = _JSON.raw_decode(text, place)
        if not skip(":"):
            raise ValueError("expected a value")
        value, end = _JSON.raw_decode(text, place)
        members[name] = value, text[place:end]
        place, is_first = end, False
    if place < len(text):
        raise ValueError("expected nothing after an object")
    return members


def _end_of_space(text: str, place: int) -> int:
    match = _SPACE.match(text, place)
    return match.end() if match else place


def _split_calls(text: str) -> Iterator[str]:
    """What is between each mark and the next end mark, or the end of the text."""
    start = text.find(MARK)
    while start >= 0:
        end = text.find(END_MARK, start)
        yield text[start + len(MARK) : end if end >= 0 else None].strip()
        start = text.find(MARK, end) if end >= 0 else -1


def _partial(text: str) -> int:
    """Length of the longest end of `text` that begins a mark."""
    return next(n for n in range(min(len(text), len(MARK) - 1), -1, -1) if text.endswith(MARK[:n]))


def choose_tools(
    tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any] | None, one_call: bool = False
) -> tuple[ToolReader | None, dict[str, Any] | None]:
    """A reader of calls, and the JSON schema of the reply if it has to be one. None, None without tools.

    choice: "auto", "none", "required" or {"function": {"name": ...}}, as `tool_choice`.
    """
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    if not functions and choice not in (None, "none", "auto"):
        raise RequestError("tool_choice: there are no tools to choose from", "tool_choice")
    if not functions or choice == "none":
        return None, None
    if choice in (None, "auto"):
        return ToolReader(list(functions), False, one_call), None
    if isinstance(choice, Mapping):
        name = choice["function"]["name"]
        if name not in functions:
            raise RequestError(f"tool_choice: there is no tool {name!r}", "tool_choice")
        functions = {name: functions[name]}
    definitions, forms = [], []
    for number, (name, function) in enumerate(functions.items()):
        place = f"#/$defs/{number}"
        parameters = function.get("parameters") or {}
        if not parameters.keys() & {"$ref", "anyOf", "oneOf", "allOf"}:
            parameters = {"type": "object", **parameters}
        if parameters.get("type", "object") != "object":
            raise RequestError(f"tools: the parameters of {name} are no object", "tools")
        definitions.append(_move(parameters, place))
        form = {"type": "object", "required": ["name", "arguments"], "additionalProperties": False}
        forms.append({**form, "properties": {"name": {"const": name}, "arguments": {"$ref": place}}})
    return ToolReader(list(functions), True), {"anyOf": forms, "$defs": {str(n): d for n, d in enumerate(definitions)}}


def _move(schema: Any, place: str) -> Any:
    """A JSON schema that stands at this place of another one: its references to parts of itself begin with it.

    >>> _move({"properties": {"x": {"$ref": "#/$defs/X"}}}, "#/$defs/0")
    {'properties': {'x': {'$ref': '#/$defs/0/$defs/X'}}}
    """
    if isinstance(schema, list):
        return [_move(each, place) for each in schema]
    if not isinstance(schema, dict) or "$id" in schema:  # references below an $id begin there
        return schema
    moved, target = {key: _move(value, place) for key, value in schema.items()}, schema.get("$ref")
    if isinstance(target, str) and (target == "#" or target.startswith("#/")):
        moved["$ref"] = place + target[1:]
    return moved
