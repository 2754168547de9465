"""Tools: what forces a call, and the calls in a model's text as they come."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from typing import Any

from .events import CallArguments, CallStart, Event, Text, merge_events
from .letters import Letters, NotACall
from .schemas import RequestError
from .tool_formats import HERMES, CallFormat, Reader, Section, read_json_call

PIECE = 256  # letters that are searched for marks at a time
JSON_REPLY: Mapping[str, Reader] = {"{": read_json_call}


class ToolReader:
    """Passes the text of a reply on, but turns calls of these tools into events, argument by argument.

    What is no call of a known tool stays text. Each letter is looked at once, however the text is cut into pieces.
    """

    def __init__(
        self,
        tools: Mapping[str, Mapping[str, Any]],
        is_forced: bool,
        one_call: bool = False,
        form: CallFormat = HERMES,
    ) -> None:
        """tools: their names, with the JSON schemas of their parameters. is_forced: the whole reply is one call, an
        object of JSON. one_call: of several calls the first is read."""
        self.tools, self.is_forced, self._one_call, self.form = tools, is_forced, one_call, form
        self._sections: Mapping[str, Reader] = {} if is_forced else form.sections
        self._marks = (*self._sections, *(() if is_forced else form.closings))
        self._bare = JSON_REPLY if is_forced else form.bare
        self._pending = ""  # may begin a mark
        self._spaces: list[str] = []  # at the end of the text; before a call they are no text
        self._is_blank = True  # so far
        self._follows_call = False
        self._calls = 0
        self._section: Section | None = None
        self._letters: Letters[str] | None = None
        self._held: list[str] = []  # of the section, until it is a call
        self._events: list[Event] = []

    def copy(self) -> ToolReader:
        """A reader for another reply."""
        return ToolReader(self.tools, self.is_forced, self._one_call, self.form)

    def push(self, text: str, finish: str | None) -> list[Event]:
        """Add text. finish: why the reply ended, with its last piece.   -> what is certain now"""
        for start in range(0, len(text), PIECE):
            rest, self._pending = self._pending + text[start : start + PIECE], ""
            while rest:
                rest = self._scan(rest) if self._letters is None else self._read(rest)
        if finish is not None:
            self._end()
        events, self._events = merge_events(self._events), []
        return events

    def _scan(self, text: str) -> str:
        """Look for the beginning of calls.   -> the text after it"""
        if self._is_blank:
            solid = text.lstrip()
            if solid and solid[0] in self._bare:
                self._say(text[: -len(solid)])
                self._open(solid[0], self._bare[solid[0]])
                return solid[1:]
        hits = [(text.find(mark), -len(mark), mark) for mark in self._marks]
        start, _, mark = min((hit for hit in hits if hit[0] >= 0), default=(-1, 0, ""))
        if start < 0:
            end = len(text) - self._partial(text)
            self._say(text[:end])
            self._pending = text[end:]
            return ""
        self._say(text[:start])
        if mark in self._sections:
            self._open(mark, self._sections[mark])
        elif not self._follows_call:
            self._say(mark)
        return text[start + len(mark) :]

    def _partial(self, text: str) -> int:
        """Length of the longest end of `text` that begins a mark."""
        longest = max(map(len, self._marks), default=1)
        ends = range(min(len(text), longest - 1), 0, -1)
        return next((n for n in ends if any(mark.startswith(text[-n:]) for mark in self._marks)), 0)

    def _open(self, mark: str, reader: Reader) -> None:
        self._section = Section(self.tools, self._calls, self.is_forced)
        self._letters, self._held = reader(self._section), [mark]
        next(self._letters)

    def _read(self, text: str) -> str:
        """Give letters to the section's reader.   -> those that it did not take"""
        assert self._letters is not None
        assert self._section is not None
        section = self._section
        for index, letter in enumerate(text, 1):
            if not section.has_started:
                self._held.append(letter)
            try:
                self._letters.send(letter)
            except StopIteration as stop:
                self._take(section)
                self._close()
                return (stop.value or "") + text[index:]
            except NotACall:
                self._take(section)
                if not section.has_started and not self.is_forced:  # the last letter may begin a mark
                    self._say("".join(self._held[:-1]))
                self._close()
                return letter + text[index:]
        self._take(section)
        return ""

    def _take(self, section: Section) -> None:
        if section.has_started and self._calls < section.count:
            self._spaces, self._is_blank, self._follows_call = [], False, True
        self._calls = section.count
        self._events += [each for each in section.events if not self._one_call or getattr(each, "index", 0) == 0]
        section.events.clear()

    def _close(self) -> None:
        self._letters, self._section, self._held = None, None, []

    def _say(self, text: str) -> None:
        solid = text.rstrip()
        if not solid:
            self._spaces.append(text)
            return
        if self.is_forced or (self._one_call and self._calls):
            return
        self._events.append(Text("".join([*self._spaces, solid])))
        self._spaces, self._is_blank, self._follows_call = [text[len(solid) :]], False, False

    def _end(self) -> None:
        section = self._section
        if section is not None and not section.has_started and not self.is_forced:
            self._say("".join(self._held))
        self._say(self._pending)
        self._close()
        if self.is_forced and not self._calls and len(self.tools) == 1:  # cut before its name
            self._events.append(CallStart(0, *self.tools))
            self._calls = 1
        if not self._follows_call and not self.is_forced:
            self._events.append(Text("".join(self._spaces)))
            self._events = [each for each in self._events if not isinstance(each, Text) or each.text]


CUSTOM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def function_tool(tool: Mapping[str, Any], place: str, schema: str = "parameters") -> dict[str, Any]:
    """A tool as chats have it. schema: the field with that of the parameters. Raises RequestError unless it is one."""
    parameters = tool.get(schema)
    if not isinstance(parameters, Mapping | None):
        raise RequestError("expected an object", f"{place}.{schema}")
    function = {"name": tool["name"], "parameters": parameters or {"type": "object", "properties": {}}}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def function_call(call_id: Any, name: str, arguments: Any) -> dict[str, Any]:
    """A call of a tool as chats have it. arguments: a value."""
    function = {"name": name, "arguments": json.dumps(arguments or {}, ensure_ascii=False)}
    return {"id": str(call_id), "type": "function", "function": function}


class InputReader:
    """Makes the whole reply the input of one custom tool."""

    def __init__(self, name: str) -> None:
        self._name, self._has_started = name, False

    def copy(self) -> InputReader:
        """A reader for another reply."""
        return InputReader(self._name)

    def push(self, text: str, finish: str | None) -> list[Event]:
        """As of `ToolReader`: the arguments are an object of JSON with the `input`."""
        events: list[Event] = []
        piece = json.dumps(text, ensure_ascii=False)[1:-1]
        if not self._has_started:
            self._has_started, piece = True, '{"input": "' + piece
            events.append(CallStart(0, self._name))
        return [*events, CallArguments(0, piece + '"}' * (finish is not None and finish != "length"))]


def read_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], dict[str, tuple[str, str]]]:
    """The tools of a chat as functions; and of the custom ones, functions whose input is one text, each name with what
    the text has to match: a guide of `GUIDES` and its value, or ("", "").

    Raises RequestError.
    """
    functions: list[Mapping[str, Any]] = []
    custom = dict[str, tuple[str, str]]()
    for number, tool in enumerate(tools):
        inner = _inner(tool, f"tools.{number}")
        if tool["type"] == "custom":
            custom[inner["name"]] = guide, text = _read_format(inner.get("format"), f"tools.{number}.custom.format")
            schema = {"type": "string", **({"pattern": f"^(?:{text})$"} if guide == "guided_regex" else {})}
            tool = function_tool({**inner, "parameters": {**CUSTOM, "properties": {"input": schema}}}, "tools")
        functions.append(tool)
    return functions, custom


def _read_format(form: Any, place: str) -> tuple[str, str]:
    if form is None or form.get("type") == "text":
        return "", ""
    grammar = form if "definition" in form else form.get("grammar") or {}  # /v1/responses has both on one level
    guides = {"lark": "guided_grammar", "regex": "guided_regex"}
    syntax, definition = grammar.get("syntax"), grammar.get("definition")
    if form.get("type") != "grammar" or syntax not in guides or not isinstance(definition, str):
        raise RequestError("expected a grammar with the syntax lark or regex, and its definition", place)
    return guides[syntax], definition


def choose_input(
    functions: Sequence[Mapping[str, Any]], choice: Any, custom: Mapping[str, tuple[str, str]]
) -> tuple[InputReader, dict[str, str]] | None:
    """A reader of a reply that has to be the input of one custom tool, and the guide of its `format`.

    None where another tool may be called, or none, or there is no such format. Raises RequestError for a grammar that
    is one choice of several, since the text of a JSON string cannot be held to it.
    """
    names = [each["function"]["name"] for each in functions]
    if isinstance(choice, Mapping):
        names = [name for name in names if name == choice["function"]["name"]]
    elif choice != "required":
        return None
    guide, text = custom.get(names[0], ("", "")) if len(names) == 1 else ("", "")
    if guide:
        return InputReader(names[0]), {guide: text}
    if len(names) > 1 and any(custom.get(name, ("", ""))[0] == "guided_grammar" for name in names):
        message = "with a tool whose format is a grammar in Lark, name that tool, or allow it alone"
        raise RequestError(message, "tool_choice")
    return None


def read_choice(choice: Any, functions: Sequence[Mapping[str, Any]]) -> tuple[Any, list[Mapping[str, Any]]]:
    """`tool_choice` as `choose_tools` takes it, and the functions that it allows. Raises RequestError."""
    if not isinstance(choice, Mapping):
        return choice, list(functions)
    inner = _inner(choice, "tool_choice")
    if choice["type"] != "allowed_tools":
        return {"function": {"name": inner["name"]}}, list(functions)
    names = [_inner(tool, "tool_choice.allowed_tools")["name"] for tool in inner.get("tools") or []]
    return inner.get("mode", "auto"), [each for each in functions if each["function"]["name"] in names]


def _inner(value: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """What stands beside the type, under its name."""
    inner = value.get(value["type"])
    if not isinstance(inner, Mapping):
        raise RequestError("is missing", f"{place}.{value['type']}")
    return inner


def custom_arguments(text: str) -> str:
    """The JSON of the arguments of a custom tool with this input."""
    return json.dumps({"input": text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The input of a custom tool's call; of one that was cut, what came.

    >>> custom_input('{"input": "one')
    'one'
    """
    for end in ("", "}", '"}'):
        try:
            text = json.loads(arguments + end)["input"]
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
        return str(text)
    return ""


def choose_tools(
    tools: Sequence[Mapping[str, Any]],
    choice: str | Mapping[str, Any] | None,
    one_call: bool = False,
    form: CallFormat = HERMES,
) -> tuple[ToolReader | None, dict[str, Any] | None]:
    """A reader of calls, and the JSON schema of the reply if it has to be one. None, None without tools.

    choice: "auto", "none", "required" or {"function": {"name": ...}}, as `tool_choice`. form: of calls in the text.
    """
    functions = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    if not functions and choice not in (None, "none", "auto"):
        raise RequestError("there are no tools to choose from", "tool_choice")
    if not functions or choice == "none":
        return None, None
    if choice in (None, "auto"):
        return ToolReader(functions, False, one_call, form), None
    if isinstance(choice, Mapping):
        name = choice["function"]["name"]
        if name not in functions:
            raise RequestError(f"there is no tool {name!r}", "tool_choice")
        functions = {name: functions[name]}
    definitions, forms = [], []
    for number, (name, parameters) in enumerate(functions.items()):
        place = f"#/$defs/{number}"
        if not parameters.keys() & {"$ref", "anyOf", "oneOf", "allOf"}:
            parameters = {"type": "object", **parameters}
            if not parameters.get("properties") and not parameters.keys() & OPEN:
                parameters["additionalProperties"] = False  # it takes no arguments
        if parameters.get("type", "object") != "object":
            raise RequestError(f"the parameters of {name} are no object", "tools")
        definitions.append(_move(close_objects(parameters), place))
        shape = {"type": "object", "required": ["name", "arguments"], "additionalProperties": False}
        forms.append({**shape, "properties": {"name": {"const": name}, "arguments": {"$ref": place}}})
    return ToolReader(functions, True), {"anyOf": forms, "$defs": {str(n): d for n, d in enumerate(definitions)}}


OPEN = {"additionalProperties", "patternProperties", "unevaluatedProperties"}  # what says of other properties
MIXED = {"$ref", "$id", "anyOf", "oneOf", "allOf", "if"}  # what may say more about the same object
OWN = {"properties", "required"} | OPEN


def close_objects(schema: Any) -> Any:
    """A JSON schema whose objects have only the properties that they name, where they name some and it says nothing
    of others, nor requires them. Else a model invents more of them; llama-server and vLLM read schemas so too.

    >>> close_objects({"type": "object", "properties": {"x": {"type": "object"}}})
    {'type': 'object', 'properties': {'x': {'type': 'object'}}, 'additionalProperties': False}
    """
    parts, shared = [part for part in _parts_of(schema) if _is_mixed(part)], set[str]()
    for part in parts:  # what is said together with them stays open, and what they refer to
        for each in _parts_of(part):
            place, target = _find(schema, each.get("$ref"))
            if target is not None and place not in shared:
                shared.add(place)
                parts.append(target)
    return _close(schema, "#", shared)


def _parts_of(schema: Any) -> list[dict[str, Any]]:
    """The objects of a schema, itself among them."""
    every = [schema]
    for each in every:
        every += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
    return [each for each in every if isinstance(each, dict)]


def _is_mixed(schema: Mapping[str, Any]) -> bool:
    """Whether several things are said of the same object."""
    said, every = schema.keys() & MIXED, schema.get("allOf")
    return len(said) + bool(schema.keys() & OWN) > 1 or "if" in said or (isinstance(every, list) and len(every) > 1)


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _find(schema: Any, reference: Any) -> tuple[str, Any]:
    """The place and the part that a reference like "#/$defs/x" means; None: there is none."""
    place, *names = reference.split("/") if isinstance(reference, str) else [""]
    for name in names:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and name.isdecimal() and int(name[:9]) < len(schema):
            place, schema = f"{place}/{int(name[:9])}", schema[int(name[:9])]
        elif isinstance(schema, dict) and name in schema:
            place, schema = f"{place}/{_escape(name)}", schema[name]
        else:
            return "", None
    return (place, schema) if place.startswith("#") else ("", None)


def _close(schema: Any, place: str, shared: Set[str]) -> Any:
    """shared: places of what stays open."""
    if not isinstance(schema, dict) or "$id" in schema or place in shared:
        return schema
    closed, keys, is_mixed = dict(schema), ["$defs", "definitions"], _is_mixed(schema)
    keys += [] if is_mixed else ["properties", "anyOf", "oneOf", "prefixItems"]
    for key in keys:
        part, at = schema.get(key), f"{place}/{key}"
        if isinstance(part, dict):
            closed[key] = {name: _close(each, f"{at}/{_escape(name)}", shared) for name, each in part.items()}
        elif isinstance(part, list):
            closed[key] = [_close(each, f"{at}/{number}", shared) for number, each in enumerate(part)]
    if isinstance(schema.get("items"), dict) and not is_mixed:
        closed["items"] = _close(schema["items"], f"{place}/items", shared)
    properties = schema["properties"] if isinstance(schema.get("properties"), dict) else {}
    required = schema["required"] if isinstance(schema.get("required"), list) else []
    names_all = properties.keys() >= set(map(str, required))
    if schema.get("type") == "object" and properties and names_all and not schema.keys() & (OPEN | MIXED):
        closed["additionalProperties"] = False
    return closed


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
