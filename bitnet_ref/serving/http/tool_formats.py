"""How models write calls of tools: the forms that published chat templates teach, recognised by the template's text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .events import CallArguments, CallStart, Event
from .letters import (
    MAX_DEPTH,
    Letters,
    NotACall,
    guess_json,
    parse_json,
    read_literal,
    read_name,
    read_quoted,
    read_solid,
    read_text,
    read_until,
    read_value,
)


class Section:
    """A part of the text that may be calls: what its reader has found. names: of the tools, with their parameters."""

    def __init__(self, tools: Mapping[str, Mapping[str, Any]], first: int, starts_early: bool) -> None:
        """first: index of the next call. starts_early: a call is reported with its name, before its arguments."""
        self.tools, self.events = tools, list[Event]()
        self.count, self._first, self._starts_early = first, first, starts_early
        self._name: str | None = None  # of the call that is being read
        self._is_reported = False
        self._parameters = 0

    @property
    def has_started(self) -> bool:
        return self.count > self._first

    def name(self, name: Any) -> None:
        """The next call is of this tool. Raises NotACall if there is none."""
        if not isinstance(name, str) or name not in self.tools:
            raise NotACall
        self._name, self._is_reported, self._parameters = name, False, 0
        if self._starts_early:
            self.start()

    def start(self) -> None:
        """Report the call whose name is known, if it is not yet. Raises NotACall before its name."""
        if self._name is None:
            raise NotACall
        if not self._is_reported:
            self.events.append(CallStart(self.count, self._name))
            self.count += 1
            self._is_reported = True

    def add(self, text: str) -> None:
        """A piece of the arguments' JSON."""
        self.start()
        self.events.append(CallArguments(self.count - 1, text))

    def add_parameter(self, name: str, value: str) -> None:
        """An argument with its JSON."""
        self.open_parameter(name)
        self.add(value)

    def open_parameter(self, name: str) -> None:
        self.add(f"{', ' if self._parameters else '{'}{json.dumps(name, ensure_ascii=False)}: ")
        self._parameters += 1

    def close(self, has_arguments: bool = False) -> None:
        """The end of a call. has_arguments: their JSON is complete."""
        if not has_arguments:
            self.add("}" if self._parameters else "{}")
        self.start()
        self._name = None

    def is_text(self, parameter: str) -> bool:
        """Whether the open call's parameter is declared as a string."""
        properties = self.tools.get(self._name or "", {}).get("properties")
        declared = properties.get(parameter) if isinstance(properties, Mapping) else None
        return isinstance(declared, Mapping) and declared.get("type") == "string"


Reader = Callable[[Section], Letters[str]]  # its result: letters that are not of the calls


# -- JSON --------------------------------------------------------------------------------------------------------------


def read_json_call(section: Section) -> Letters[str]:
    """{"name": ..., "arguments": {...}} after its first letter; "parameters" means arguments."""
    waiting: list[str] = []  # arguments that stand before the name
    has_arguments, has_name = False, False
    letter = yield from read_solid()
    while True:
        if letter != '"':
            raise NotACall
        parts = ['"']
        yield from read_quoted('"', parts.append)
        key = parse_json("".join(parts))
        if (yield from read_solid()) != ":":
            raise NotACall
        first, parts = (yield from read_solid()), []
        if key in ("arguments", "parameters") and first == "{" and not has_arguments:
            has_arguments = True
            if has_name:
                section.start()
            letter = yield from read_value(first, section.add if has_name else waiting.append)
        else:
            letter = yield from read_value(first, parts.append)
            value = parse_json("".join(parts))
            if key == "name" and not has_name:
                section.name(value)
                has_name = True
                if waiting:
                    section.add("".join(waiting))
            elif key in ("arguments", "parameters"):
                if not isinstance(value, str) or not isinstance(parse_json(value), dict) or has_arguments:
                    raise NotACall
                has_arguments = True
                section.add(value) if has_name else waiting.append(value)
        if letter == "}":
            break
        if letter != ",":
            raise NotACall
        letter = yield from read_solid()
    if not has_name:
        raise NotACall
    section.close(has_arguments)
    return ""


def read_tagged_json(section: Section) -> Letters[str]:
    """The same, after a tag."""
    if (yield from read_solid()) != "{":
        raise NotACall
    return (yield from read_json_call(section))


def read_mistral(section: Section) -> Letters[str]:
    """A list of such objects, or the name and then the arguments: `f{...}`, `f[ARGS]{...}` (`[CALL_ID]1` between)."""
    letter = yield from read_solid()
    if letter == "[":
        while letter != "]":
            yield from read_tagged_json(section)
            letter = yield from read_solid()
            if letter not in ",]":
                raise NotACall
        return ""
    if letter == "{":
        return (yield from read_json_call(section))
    name, end = yield from read_name("[{")
    section.name(letter + name)
    while end == "[":
        if (yield from read_text("]")) == "CALL_ID":
            yield from read_text("[")
        else:
            end = yield from read_solid()
    if end != "{":
        raise NotACall
    section.add("{")
    yield from _read_object(section)
    return ""


def _read_object(section: Section) -> Letters[None]:
    """The arguments after the first letter of their JSON, which was added."""
    depth = 1
    while depth:
        letter = yield
        section.add(letter)
        if letter == '"':
            yield from read_quoted('"', section.add)
        depth += (letter in "{[") - (letter in "}]")
    section.close(has_arguments=True)


# -- tags --------------------------------------------------------------------------------------------------------------


def read_xml(section: Section) -> Letters[str]:
    """`f>\\n<parameter=p>\\nvalue\\n</parameter>\\n</function>` after `<function=`, or `f>{...}</function>`."""
    section.name((yield from read_text(">")))
    return (yield from _read_parameters(section, "parameter=", ">", "</parameter>"))


def read_tagged_xml(section: Section) -> Letters[str]:
    """The same after `<tool_call>`, or an object of JSON there."""
    letter = yield from read_solid()
    if letter == "{":
        return (yield from read_json_call(section))
    if letter != "<":
        raise NotACall
    yield from read_literal("function=")
    return (yield from read_xml(section))


def read_quoted_xml(section: Section) -> Letters[str]:
    """`f"><param name="p">value</param></function>` after `<function name="`."""
    section.name((yield from read_text('">')))
    return (yield from _read_parameters(section, 'param name="', '">', "</param>"))


def _read_parameters(section: Section, opening: str, name_end: str, closing: str) -> Letters[str]:
    while True:
        letter = yield from read_solid()
        if letter == "{" and not section.has_started:
            section.add("{")
            yield from _read_object(section)
            return ""
        if letter != "<":
            raise NotACall
        letter = yield
        if letter == "/":
            yield from read_literal("function>")
            section.close()
            return ""
        if letter != opening[0]:
            raise NotACall
        yield from read_literal(opening[1:])
        name = yield from read_text(name_end)
        if section.is_text(name):
            section.open_parameter(name)
            section.add('"')
            yield from _read_lines(closing, lambda text: section.add(json.dumps(text, ensure_ascii=False)[1:-1]))
            section.add('"')
        else:
            value = yield from read_text(closing)
            section.add_parameter(name, guess_json(value.strip()))


def _read_lines(closing: str, sink: Callable[[str], object]) -> Letters[None]:
    """Pass on what is before `closing`, without one line end at either side."""
    pending, is_first = "", True

    def hold(text: str) -> None:
        nonlocal pending, is_first
        if is_first and text:
            text, is_first = text.removeprefix("\n"), False
        pending += text
        if len(pending) > 1:
            sink(pending[:-1])
            pending = pending[-1:]

    yield from read_until(closing, hold)
    if pending.removesuffix("\n"):
        sink(pending)


# -- Python ------------------------------------------------------------------------------------------------------------


def read_python(section: Section) -> Letters[str]:
    """`f(a=1, b="x"), g()]` after `[`."""
    letter = ","
    while letter == ",":
        section.name((yield from read_name("("))[0])
        letter = yield from _read_arguments(section)
    if letter != "]":
        raise NotACall
    return ""


def read_tagged_python(section: Section) -> Letters[str]:
    """Calls after a tag: a list as above, or one in each line between ```python and ```."""
    letter = yield from read_solid()
    if letter == "[":
        return (yield from read_python(section))
    if letter == "`":
        yield from read_text("\n")
        letter = yield from read_solid()
    while letter.isalnum() or letter == "_":
        section.name(letter + (yield from read_name("("))[0])
        letter = yield from _read_arguments(section)
    if not section.has_started:
        raise NotACall
    return letter


def _read_arguments(section: Section) -> Letters[str]:
    """After the bracket that opens them.   -> the solid letter after the one that closes them"""
    while True:
        name, end = yield from read_name("=)")
        if end == ")" and not name:
            break
        if end == ")":
            raise NotACall
        parts: list[str] = []
        end = yield from read_value((yield from read_solid()), parts.append, quotes="\"'", ends=",)")
        section.add_parameter(name, guess_json("".join(parts).strip()))
        if end == ")":
            break
        if end != ",":
            raise NotACall
    section.close()
    return (yield from read_solid())


# -- Gemma -------------------------------------------------------------------------------------------------------------


def read_gemma(quote: str) -> Reader:
    """`call:f{a:1,b:"x"}` after its tag, with `quote` around strings."""

    def read(section: Section) -> Letters[str]:
        if (yield from read_solid()) != "c":
            raise NotACall
        yield from read_literal("all:")
        section.name((yield from read_name("{"))[0])
        letter = yield from read_solid()
        while letter != "}":
            name = letter + (yield from read_text(":"))
            value, letter = yield from _read_gemma_value(quote, (yield from read_solid()), 0)
            section.add_parameter(_unquote(name, quote), value)
            if letter == ",":
                letter = yield from read_solid()
            elif letter != "}":
                raise NotACall
        section.close()
        return ""

    return read


def _unquote(name: str, quote: str) -> str:
    return name.strip().removeprefix(quote).removesuffix(quote)


def _read_gemma_value(quote: str, letter: str, depth: int) -> Letters[tuple[str, str]]:
    """-> JSON, and the solid letter after the value"""
    if depth > MAX_DEPTH:
        raise NotACall
    if letter == quote[0]:
        yield from read_literal(quote[1:])
        text = yield from read_text(quote)
        return json.dumps(text, ensure_ascii=False), (yield from read_solid())
    if letter not in "{[":
        parts = []
        while letter not in ",}]":
            parts.append(letter)
            letter = yield
        return guess_json("".join(parts).strip()), letter
    closing, values = "}" if letter == "{" else "]", []
    opening, letter = letter, (yield from read_solid())
    while letter != closing:
        key = ""
        if opening == "{":
            key = _unquote(letter + (yield from read_text(":")), quote)
            key, letter = f"{json.dumps(key, ensure_ascii=False)}: ", (yield from read_solid())
        value, letter = yield from _read_gemma_value(quote, letter, depth + 1)
        values.append(key + value)
        if letter == ",":
            letter = yield from read_solid()
        elif letter != closing:
            raise NotACall
    return opening + ", ".join(values) + closing, (yield from read_solid())


# -- which form --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CallFormat:
    """A form of calls. sections: what begins one, with its reader. bare: the same for a letter that begins the reply.
    closings: what may follow a call and is no text. signs: what a chat template that teaches the form contains."""

    name: str
    signs: tuple[str, ...]
    sections: Mapping[str, Reader]
    closings: tuple[str, ...] = ()
    bare: Mapping[str, Reader] = field(default_factory=lambda: {"{": read_json_call})
    quotes: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that the reader needs, even where they are special tokens."""
        return (*self.sections, *self.closings, *self.quotes)


END_TAGS = ("</tool_call>", "</function>")
HERMES = CallFormat("hermes", ("<tool_call>",), {"<tool_call>": read_tagged_json}, END_TAGS[:1])
FORMATS = (  # the first whose sign is in the template
    CallFormat("mistral", ("[TOOL_CALLS]",), {"[TOOL_CALLS]": read_mistral}, quotes=("[ARGS]", "[CALL_ID]")),
    CallFormat(
        "functiongemma",
        ("<start_function_call>",),
        {"<start_function_call>": read_gemma("<escape>")},
        ("<end_function_call>",),
        quotes=("<escape>",),
    ),
    CallFormat(
        "gemma4",
        ("<|tool_call>",),
        {"<|tool_call>": read_gemma('<|"|>')},
        ("<tool_call|>",),
        quotes=('<|"|>',),
    ),
    CallFormat(
        "minicpm",
        ("<|tool_call_start|>",),
        {"<|tool_call_start|>": read_tagged_python},
        ("```", "<|tool_call_end|>"),
    ),
    CallFormat(
        "qwen-xml",
        ("<function=",),
        {"<tool_call>": read_tagged_xml, "<function=": read_xml},
        END_TAGS,
    ),
    CallFormat("minicpm-xml", ("<function name=",), {'<function name="': read_quoted_xml}, END_TAGS),
    HERMES,
    CallFormat(
        "llama-pythonic",
        ("func_name1(", "[func1(", "function calls in the format [func"),
        {"<|python_tag|>": read_tagged_json, "<|python_start|>": read_tagged_python},
        ("<|python_end|>",),
        {"[": read_python, "{": read_json_call},
    ),
    CallFormat("llama-json", ("python_tag", '"parameters": '), {"<|python_tag|>": read_tagged_json}, (";",)),
)


def find_format(template: str) -> CallFormat:
    """The form that this chat template teaches; Hermes's where it shows none.

    >>> find_format("{{ '<tool_call>' }} ... <function=example_function_name>").name
    'qwen-xml'
    """
    return next((each for each in FORMATS if any(sign in template for sign in each.signs)), HERMES)
