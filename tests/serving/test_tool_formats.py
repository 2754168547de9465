"""Calls of tools in a model's text: each form that published chat templates teach, in pieces of any size."""

import json
from itertools import product

import pytest

from bitnet_ref.serving.http import tools
from bitnet_ref.serving.http.events import CallArguments, CallStart, Reply, Text
from bitnet_ref.serving.http.tool_formats import FORMATS, find_format
from bitnet_ref.serving.http.tools import ToolReader, choose_tools, close_objects

TOOLS = {"f": {"properties": {"a": {"type": "string"}, "n": {}}}, "g": {}}
BY_NAME = {form.name: form for form in FORMATS}

# Parts of templates in the style of the published ones.
TEMPLATES = {
    "hermes": 'return json within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <function-name>',
    "qwen-xml": "reply in the following format:\\n<tool_call>\\n<function=example_function_name>\\n<parameter=example>",
    "mistral": "{{- '[TOOL_CALLS][' }}{% for call in message.tool_calls %}{{ call.function | tojson }}",
    "llama-json": 'Respond in the format {"name": function name, "parameters": dictionary}. {{ "<|python_tag|>" }}',
    "llama-pythonic": "put it in the format of [func_name1(params_name1=params_value1, ...), func_name2(params)]",
    "functiongemma": "{{ '<start_function_call>call:' + name + '{' }}",
    "gemma4": "{{ '<|tool_call>call:' + name + '{' }}",
    "minicpm": "{{ '<|tool_call_start|>\\n```python\\n' }}",
    "minicpm-xml": "{{ '<function name=\"' + name }}",
}

TEXTS = [  # form, text, what is left as text, calls
    (
        "hermes",
        'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": "x}y"}}\n</tool_call>\n'
        '<tool_call>{"arguments":{},"name":"g"}</tool_call>',
        "Let me see.",
        [("f", {"a": "x}y"}), ("g", {})],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"n\\": 1}"}</tool_call>', "", [("f", {"n": 1})]),
    ("hermes", '<tool_call>{"name": "g"}</tool_call>', "", [("g", {})]),
    ("hermes", '<tool_call>{"name": "h", "arguments": {}}</tool_call>', None, []),
    ("hermes", '<tool_call>{"name": "f", "arguments": 5}</tool_call>', None, []),
    (
        "qwen-xml",
        "ok\n<tool_call>\n<function=f>\n<parameter=a>\nline 1\n\n 2 <b> </p\n</parameter>\n"
        "<parameter=n>\n[1, 2]\n</parameter>\n</function>\n</tool_call>",
        "ok",
        [("f", {"a": "line 1\n\n 2 <b> </p", "n": [1, 2]})],
    ),
    ("qwen-xml", "<function=g>\n</function>\n</tool_call>", "", [("g", {})]),
    ("qwen-xml", '<function=f>{"a": "b"}</function> done', " done", [("f", {"a": "b"})]),
    ("qwen-xml", "<function=f>\n<parameter=a>5</parameter></function>", "", [("f", {"a": "5"})]),
    ("qwen-xml", "<function=h></function>", None, []),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": "q"}}, {"name":"g","arguments":{}}]',
        "",
        [("f", {"a": "q"}), ("g", {})],
    ),
    ("mistral", '[TOOL_CALLS]f{"a": "q{"}', "", [("f", {"a": "q{"})]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]12[ARGS]{"n": 1}[TOOL_CALLS]g[ARGS]{}', "", [("f", {"n": 1}), ("g", {})]),
    ("mistral", "[TOOL_CALLS] I cannot.", None, []),
    ("llama-json", '<|python_tag|>{"name": "f", "parameters": {"a": "1"}}', "", [("f", {"a": "1"})]),
    ("llama-json", '{"type": "function", "name": "g", "parameters": {}}', "", [("g", {})]),
    ("llama-json", '{"a": [1, {"b": 2}]}', None, []),
    (
        "llama-pythonic",
        "[f(a=\"x, (y)\", n=[1, 'z', {'k': True}]), g()]",
        "",
        [("f", {"a": "x, (y)", "n": [1, "z", {"k": True}]}), ("g", {})],
    ),
    ("llama-pythonic", "<|python_start|>[g()]<|python_end|>", "", [("g", {})]),
    ("llama-pythonic", "[1, 2] is a list", None, []),
    (
        "functiongemma",
        "<start_function_call>call:f{a:<escape>x,}y<escape>,n:{k:1,l:[true,<escape>z<escape>]}}<end_function_call>",
        "",
        [("f", {"a": "x,}y", "n": {"k": 1, "l": [True, "z"]}})],
    ),
    ("gemma4", '<|tool_call>call:f{a:<|"|>x<|"|>,n:-2.5}<tool_call|>', "", [("f", {"a": "x", "n": -2.5})]),
    (
        "minicpm",
        '<|tool_call_start|>\n```python\nf(a="x")\ng()\n```\n<|tool_call_end|>',
        "",
        [("f", {"a": "x"}), ("g", {})],
    ),
    ("minicpm", '<|tool_call_start|>[f(a="b")]<|tool_call_end|>ok', "ok", [("f", {"a": "b"})]),
    (
        "minicpm-xml",
        '<function name="f"><param name="a">x</param><param name="n">5</param></function>',
        "",
        [("f", {"a": "x", "n": 5})],
    ),
]


def read(text, size, form, **options):
    reader = ToolReader(TOOLS, False, form=BY_NAME[form], **options)
    events = [event for at in range(0, len(text), size) for event in reader.push(text[at : at + size], None)]
    return events + reader.push("", "stop")


@pytest.mark.parametrize(("form", "text", "rest", "calls"), TEXTS, ids=[f"{t[0]} {n}" for n, t in enumerate(TEXTS)])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_the_calls_of_each_form(form, text, rest, calls, size):
    reply = Reply(read(text, size, form))
    assert [(call.name, json.loads(call.text)) for call in reply.calls] == calls
    assert reply.join("text").strip() == (text if rest is None else rest).strip()


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_form_is_known_by_the_template(name):
    assert find_format(TEMPLATES[name]).name == name


def test_marks_that_are_read_even_as_special_tokens():
    assert {name: form.marks for name, form in BY_NAME.items()} == {
        "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        "functiongemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
        "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
        "minicpm": ("<|tool_call_start|>", "```", "<|tool_call_end|>"),
        "qwen-xml": ("<tool_call>", "<function=", "</tool_call>", "</function>"),
        "minicpm-xml": ('<function name="', "</tool_call>", "</function>"),
        "hermes": ("<tool_call>", "</tool_call>"),
        "llama-pythonic": ("<|python_tag|>", "<|python_start|>", "<|python_end|>"),
        "llama-json": ("<|python_tag|>", ";"),
    }


def test_a_template_that_shows_no_form_has_hermes():
    assert find_format("{{ tools }}").name == "hermes"


def test_arguments_come_before_the_call_ends():
    for form, text in (
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "some long text'),
        ("qwen-xml", "<tool_call>\n<function=f>\n<parameter=a>\nsome long text that goes on and on"),
        ("mistral", '[TOOL_CALLS]f{"a": "some long text'),
        ("llama-pythonic", "[f(a='some long text', n="),
    ):
        reader = ToolReader(TOOLS, False, form=BY_NAME[form])
        events = reader.push(text, None)
        assert events[0] == CallStart(0, "f")
        assert isinstance(events[1], CallArguments)
        assert "some long text" in events[1].text
        assert reader.push("", "length") == []  # what was cut stays a part


def test_one_call_of_several():
    events = read(
        '<tool_call>{"name": "g"}</tool_call><tool_call>{"name": "f"}</tool_call> bye', 5, "hermes", one_call=True
    )
    assert events == [CallStart(0, "g"), CallArguments(0, "{}")]


def test_a_forced_call_that_is_cut_is_a_part():
    clock = {"type": "function", "function": {"name": "clock", "parameters": {"properties": {"zone": {}}}}}
    other = {"type": "function", "function": {"name": "other"}}
    reader, _ = choose_tools([clock], "required")
    assert Reply(reader.copy().push('{"na', "length")).calls[0].name == "clock"
    assert Reply(reader.copy().push('{"name":"clock","arguments":{"zo', "length")).calls[0].text == '{"zo'
    reader, _ = choose_tools([clock, other], "required")
    assert reader.copy().push('{"na', "length") == []  # which one is not known
    assert reader.copy().push('{"name":"clock",', "length") == [CallStart(0, "clock")]


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}, {"type": "object", "properties": {}}])
def test_a_function_without_parameters_takes_none(parameters):
    function = {"name": "stop"} if parameters is None else {"name": "stop", "parameters": parameters}
    _, schema = choose_tools([{"type": "function", "function": function}], "required")
    assert schema["$defs"]["0"]["additionalProperties"] is False
    _, schema = choose_tools([{"function": {**function, "parameters": {"additionalProperties": {}}}}], "required")
    assert schema["$defs"]["0"] == {"type": "object", "additionalProperties": {}}


def test_arguments_are_only_those_that_are_declared():
    inner = {"type": "object", "properties": {"y": {}}}
    parameters = {
        "type": "object",
        "properties": {"x": inner, "z": {"type": "array", "items": inner}, "w": {"type": "object", "allOf": [inner]}},
    }
    _, schema = choose_tools([{"function": {"name": "f", "parameters": parameters}}], "required")
    found = schema["$defs"]["0"]
    closed = {**inner, "additionalProperties": False}
    assert found["additionalProperties"] is False
    assert (found["properties"]["x"], found["properties"]["z"]["items"]) == (closed, closed)
    assert found["properties"]["w"] == {"type": "object", "allOf": [inner]}
    for required, is_closed in ((["y"], True), (["y", "other"], False)):  # one that is required is possible
        assert ("additionalProperties" in close_objects({**inner, "required": required})) == is_closed


A, AT = {"type": "object", "properties": {"a": {}}, "required": ["a"]}, {"$ref": "#/$defs/A"}
B = {"type": "object", "properties": {"b": {}}, "required": ["b"]}
CLOSED = {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "changes"),
    [
        ({**B, "$defs": {"A": A}, "allOf": [AT]}, {}),
        ({**B, "$defs": {"A": A}, **AT}, {}),
        ({**B, "$defs": {"A": {**AT, "$defs": {"C": A}}}, "allOf": [{"$ref": "#/$defs/A/$defs/C"}]}, {}),
        ({**B, "anyOf": [A, {**A, "items": A}]}, {}),
        ({"if": A, "then": B, "items": A}, {}),
        ({"allOf": [A, B]}, {}),
        ({"$defs": {"A": A}, **AT}, {"$defs": {"A": {**A, **CLOSED}}}),
        ({"$defs": {"A": A}, "allOf": [AT], "title": "x"}, {"$defs": {"A": {**A, **CLOSED}}}),
        ({"type": "object", "anyOf": [A, B]}, {"anyOf": [{**A, **CLOSED}, {**B, **CLOSED}]}),
        (
            {**B, "$defs": {"A": A, "C/~": A}, "properties": {"b": AT, "c": {"allOf": [{"$ref": "#/$defs/C~1~0"}, B]}}},
            {**CLOSED, "$defs": {"A": {**A, **CLOSED}, "C/~": A}},
        ),
        ({"allOf": 5, "items": [A], "anyOf": 3}, {}),
        ({"allOf": [{"$ref": 3}, {"$ref": "#/allOf/0"}, {"$ref": "#/allOf/x"}, {"$ref": "#/0"}, {"$ref": "b"}]}, {}),
    ],
)
def test_what_is_combined_with_other_parts_stays_open(schema, changes):
    """A part that is closed would refuse the properties that the other parts name."""
    assert close_objects(schema) == {**schema, **changes}


def test_a_part_is_looked_into_once_however_it_is_referred_to(monkeypatch):
    """So a client's schema cannot make this take long."""
    part = {"$defs": {"~" * 10: {"anyOf": [{"type": "string"}] * 1000}}}
    names = ["".join(letters) for letters in product(("~", "~0"), repeat=10)]
    refs = [{"$ref": f"#/$defs/{name}"} for name in names] + [{"$ref": f"{n}#/$defs"} for n in range(1000)]
    seen, parts_of = [], tools._parts_of
    monkeypatch.setattr(tools, "_parts_of", lambda schema: seen.extend(found := parts_of(schema)) or found)
    assert close_objects({**part, "allOf": refs}) == {**part, "allOf": refs}
    assert len(seen) < 10_000  # of some 3,000 parts


@pytest.mark.thorough
@pytest.mark.parametrize("form", [form.name for form in FORMATS])
@pytest.mark.parametrize(
    "text",
    ["[f(a=" * 20_000, '<tool_call>{"a":' * 10_000, '{"name": "' + "x" * 200_000, "<function=" * 20_000, " " * 200_000],
    ids=lambda text: text[:12],
)
def test_a_text_is_read_once(form, text):
    """A search that begins again with each piece or mark takes minutes here, and this test would not end."""
    for size in (100, len(text)):
        reply = Reply(read(text, size, form))
        assert (reply.join("text"), reply.calls) == (text, [])


def test_deep_nesting_is_no_call():
    text = '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 100 + "1"
    events = read(text, 7, "hermes")
    assert events[0] == CallStart(0, "f")  # the call had begun; what is too deep ends it
    assert any(isinstance(event, Text) for event in events)
