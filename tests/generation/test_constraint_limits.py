"""Grammars and schemas that would overflow a stack are refused; the largest that are not refused compile."""

import json
import subprocess
import sys

import pytest

from bitnet_ref.errors import GenerationError
from bitnet_ref.generation import constraint_limits
from bitnet_ref.generation.constraint_limits import (
    MAX_BYTES,
    MAX_LINKS,
    MAX_NESTING,
    MAX_RULES,
    check_grammar,
    check_regex,
    check_schema,
    read_schema,
)

pytest.importorskip("llguidance")

# Compiles in the main thread, and takes two steps in a thread whose stack is smaller than any engine's.
PROGRAM = """
import json, sys, threading
import numpy as np
import bitnet_ref
from bitnet_ref.errors import GenerationError
from bitnet_ref.generation.constraints import Constraint
model = bitnet_ref.load("storyteller", backend="numpy")
def follow(constraint):
    ids = np.zeros(0, np.int64)
    for _ in range(2):
        ids = np.append(ids, np.argmax(constraint(ids, np.zeros(model.config.vocab_size, np.float32))))
    print(json.dumps("follows"), flush=True)
threading.stack_size(1 << 18)
for guide, value in json.load(sys.stdin):
    try:
        constraint = Constraint(guide, value, model.vocabulary, 0).copy()
    except GenerationError as error:
        print(json.dumps(str(error)), flush=True)
        continue
    thread = threading.Thread(target=follow, args=(constraint,))
    thread.start()
    thread.join()
"""


def run_apart(guides):
    """What a process says that follows these guides one after another; where one ends it, its exit code is said."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(guides), capture_output=True, text=True, timeout=300
    )
    said = [json.loads(line) for line in run.stdout.splitlines()]
    rest = len(guides) - len(said)
    return said + [f"the process ended with {run.returncode}: {run.stderr}"] * rest


@pytest.fixture(scope="module")
def said_of_refused():
    return dict(zip(REFUSED, run_apart(list(REFUSED.values())), strict=True))


@pytest.fixture(scope="module")
def said_of_largest():
    return dict(zip(LARGEST, run_apart(list(LARGEST.values())), strict=True))


def rules(links, body="{}", name="a", end='"x"', between="\n"):
    """start refers to a0, a0 to a1 and so on."""
    lines = [f"{name}{n}: {body.format(f'{name}{n + 1}')}" for n in range(links)]
    return between.join([f"start: {body.format(f'{name}0')}", *lines, f"{name}{links}: {end}", ""])


def references(links, wrap=lambda reference: reference, key="$defs"):
    """d0 refers to d1 and so on."""
    definitions = {f"d{n}": wrap({"$ref": f"#/{key}/d{n + 1}"}) for n in range(links)}
    return {"$ref": f"#/{key}/d0", key: {**definitions, f"d{links}": {"type": "string"}}}


def anchors(links):
    definitions = {f"d{n}": {"$anchor": f"d{n}", "allOf": [{"$ref": f"#d{n + 1}"}]} for n in range(links)}
    return {"$ref": "#d0", "$defs": {**definitions, f"d{links}": {"$anchor": f"d{links}", "type": "string"}}}


def split_references(links):
    """The definitions of a chain in several objects, none of which is large."""
    place = lambda n: f"#/$defs/g{n // 500}/d{n}"  # noqa: E731
    groups = {f"g{first}": {} for first in range(links // 500 + 1)}
    for number in range(links):
        groups[f"g{number // 500}"][f"d{number}"] = {"$ref": place(number + 1)}
    groups[f"g{links // 500}"][f"d{links}"] = {"type": "string"}
    return {"$ref": place(0), "$defs": groups}


def nested(links, opening, closing, inner):
    return opening * links + inner + closing * links


WRAPS = {
    "allOf": lambda r: {"allOf": [r, {"type": "string"}]},
    "anyOf": lambda r: {"anyOf": [{"type": "null"}, r]},
    "oneOf": lambda r: {"oneOf": [{"type": "null"}, r]},
    "properties": lambda r: {"type": "object", "properties": {"a": r}},
    "patternProperties": lambda r: {"type": "object", "patternProperties": {"^a": r}},
    "additionalProperties": lambda r: {"type": "object", "additionalProperties": r},
    "items": lambda r: {"type": "array", "items": r},
    "prefixItems": lambda r: {"type": "array", "prefixItems": [r], "items": False},
}
LONG = 1900
DEEP = nested(10, "(", ")", "{}")
REFUSED = {
    "rules": ("guided_grammar", rules(5000)),
    "terminals": ("guided_grammar", rules(5000, name="A")),
    "a schema in a grammar": ("guided_grammar", f"start: %json {json.dumps(references(5000))}"),
    "a list of grammars": ("guided_grammar", json.dumps({"grammars": [{"json_schema": references(5000)}]})),
    "brackets": ("guided_grammar", "start: " + nested(5000, "(", ")", '"x"')),
    "conditions": (
        "guided_grammar",
        'start: a::0x0\na::_: "x" %if ' + nested(20_000, "not(", ")", "is_zeros(_)"),
    ),
    "expressions": ("guided_regex", nested(100_000, "(", ")", "x")),
    "expressions in a grammar": ("guided_grammar", "start: /" + nested(5000, "(", ")", "x") + "/"),
    "expressions in a schema": ("guided_json", {"type": "string", "pattern": nested(5000, "(", ")", "x")}),
    "repetitions": ("guided_regex", nested(50_000, "(?:", ")*", "x")),
    "an expression's size": ("guided_regex", "a" * (MAX_BYTES + 1)),
    "parts that may be missing": ("guided_regex", "a?" * 4001),
    "empty alternatives": ("guided_regex", "(a|)" * 4001),
    "optional parts in a schema": ("guided_json", {"type": "string", "pattern": "(a*b*)" * 2001}),
    "optional parts in a grammar": ("guided_grammar", "start: /" + "a?" * 4001 + "/"),
    "a string in a grammar": ("guided_grammar", 'start: "' + "a" * 70_000 + '"'),
    "a choice": ("guided_choice", ["a", "b" * 17_000]),
    "a constant": ("guided_json", {"const": "a" * 70_000}),
    "an expression's bytes": ("guided_regex", "é" * (constraint_limits.MAX_REGEX_BYTES // 2 + 1)),
    "references": ("guided_json", references(5000)),
    "references as text": ("guided_json", json.dumps(references(5000))),
    "references in definitions": ("guided_json", references(5000, key="definitions")),
    "a text with an object twice": (
        "guided_json",
        '{"$defs": {}, ' + json.dumps(references(5000))[1:-1] + "}",
    ),
    "objects in each other": ("guided_json", nested(5000, '{"items": ', "}", "true")),
    "constants in each other": ("guided_json", {"const": json.loads(nested(300, "[", "]", ""))}),
    "properties": ("guided_json", {"type": "object", "properties": {f"p{n}": True for n in range(20_000)}}),
    "required": ("guided_json", {"type": "object", "required": [f"p{n}" for n in range(20_000)]}),
    "links": ("guided_grammar", rules(LONG, body=DEEP)),
    "links after what looks like comments": ("guided_grammar", rules(LONG, body='"//" /[#]/ ' + DEEP + ' // "\n\n')),
    "links after strings with quotes": ("guided_grammar", rules(LONG, body=r'"\"" ' + DEEP + r' "\\"')),
    "links after expressions with slashes": ("guided_grammar", rules(LONG, body=r'/a"\/\\/ ' + DEEP + ' /"#\n"/')),
    "links after special tokens": ("guided_grammar", rules(LONG, body='<"> ' + DEEP + ' "a".."b" <">')),
    "links after JSON": ("guided_grammar", rules(LONG, body='%json {{"const": "}} a: \\""}} ' + DEEP)),
    "links and a schema": (
        "guided_grammar",
        rules(1000, body=DEEP) + "x: %json " + json.dumps({"enum": [[]] * 10_000}),
    ),
    "objects": ("guided_json", {"enum": [[]] * (MAX_LINKS - 1)}),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_overflow_a_stack_is_refused(name, said_of_refused):
    guide, _ = REFUSED[name]
    said = said_of_refused[name]
    assert said.startswith(f"{guide}: "), said
    ours = ("expected at most", "expected a Lark grammar", "maximum recursion depth")
    theirs = ("invalid regex", "regex parse error")
    assert any(words in said for words in ours + theirs), said
    assert len(said) < 500


LARGEST = {
    "rules": ("guided_grammar", rules(MAX_RULES - 10)),
    "rules between others": ("guided_grammar", rules(MAX_RULES - 10, body='"y" {} "k" | "z"')),
    "terminals": ("guided_grammar", rules(MAX_RULES - 10, body='"y" {} | "z"', name="A")),
    "rules in brackets": ("guided_grammar", rules(MAX_RULES - 10, body=nested(9, "(", ")", "{}"))),
    "brackets": ("guided_grammar", rules(MAX_LINKS // 25, body=nested(23, "(", ")", "{}"))),
    "optional parts": ("guided_grammar", rules(LONG, body=nested(3, "[", "]", "{}"))),
    "repeated parts": ("guided_grammar", rules(LONG, body="({}){{0,2}}")),
    "alternatives": ("guided_grammar", "start: A\nA: " + " | ".join(f'"x{n}"' for n in range(20_000))),
    "references in several objects": ("guided_json", split_references(5200)),
    "anchors": ("guided_json", anchors(LONG)),
    "names of parts": (
        "guided_json",
        json.loads(json.dumps(anchors(LONG)).replace("$anchor", "$id").replace("#d", "d")),
    ),
    "escaped references": (
        "guided_json",
        json.loads(json.dumps(references(LONG, WRAPS["items"])).replace("#/$", "#/%24")),
    ),
    **{f"references in {name}": ("guided_json", references(LONG, wrap)) for name, wrap in WRAPS.items()},
    "an expression in a grammar": ("guided_grammar", "start: /" + nested(248, "(", ")", "x") + "/"),
    "properties": ("guided_json", {"type": "object", "required": [f"p{n}" for n in range(MAX_RULES)]}),
    "values": ("guided_json", {"enum": [f"v{n}" for n in range(20_000)]}),
    "an expression": ("guided_regex", nested(MAX_NESTING, "(", ")", "x")),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_that_are_accepted_compile_and_run_on_a_small_stack(name, said_of_largest):
    said = said_of_largest[name]
    theirs = ("consider making your grammar left-recursive", "oneOf constraints are not supported")
    assert said == "follows" or any(words in said for words in theirs), said


def grammar_of_a_language(statements):
    """Expressions in 15 levels, statements in blocks, comments, names: every rule leads to every other one."""
    levels = [f'e{n}: e{n + 1} (("+{n}" | "-{n}") e{n + 1})*  // e{n}: not a rule' for n in range(15)]
    forms = [f'?s{n}: "word{n}" e0 ("," e0)* [block] ";" -> form{n}\n  | "other{n}" NAME' for n in range(statements)]
    block = "block: " + "\n  | ".join(f"s{n} block?" for n in range(statements))
    ends = 'e15: NAME | /[0-9]+/ | "(" e0 ")" | %json {"type": "object", "properties": {"e0": {"type": "string"}}}'
    return "\n".join(
        ["%import common.WS", "%ignore WS", "start: block", block, *forms, *levels, ends, "NAME: /[a-z]+/"]
    )


def schema_of_tools(count):
    """Objects that refer to each other, as pydantic writes them."""
    fields = {f"f{n}": {"anyOf": [{"type": "string"}, {"type": "null"}], "title": f"F{n}"} for n in range(10)}
    definitions = {
        f"T{n}": {
            "type": "object",
            "title": f"T{n}",
            "properties": {**fields, "next": {"type": "array", "items": {"$ref": f"#/$defs/T{(n + 1) % count}"}}},
            "required": ["f0"],
        }
        for n in range(count)
    }
    return {"anyOf": [{"$ref": f"#/$defs/T{n}"} for n in range(count)], "$defs": definitions}


@pytest.mark.thorough
def test_large_grammars_and_schemas_of_people_are_accepted():
    guides = [
        ("guided_grammar", grammar_of_a_language(100)),
        ("guided_json", schema_of_tools(20)),
        ("guided_json", {**anchors(50), "$id": "http://a.example/b"}),
    ]
    assert run_apart(guides) == ["follows"] * 3
    check_grammar(grammar_of_a_language(400))
    check_schema(schema_of_tools(300))
    check_grammar('start: "' + "(" * 500 + '" /' + r"\(" * 500 + "/ // " + "(" * 500)  # brackets in texts nest nothing
    check_regex(r"\(" * 500 + "[(]" * 500 + "[](]" * 500 + "(a)" * 500)
    check_schema(references(400, lambda r: {"description": "x" * 100, "items": r}))


def test_messages_say_what_is_too_large():
    for text, message in {
        rules(5000): f"expected at most {MAX_RULES} rules and terminals, got 5002",
        rules(LONG, body=DEEP): f"expected at most {MAX_LINKS} rules, brackets",
        "start: " + "(" * 101: f"expected at most {MAX_NESTING} brackets",
        'start: "x': "the string or regular expression in line 1 has no end",
        "start: %json {": "what follows %json is no JSON",
        " {}": "expected a Lark grammar, got JSON",
    }.items():
        with pytest.raises(GenerationError, match="guided_grammar: ") as caught:
            check_grammar(text)
        assert message in str(caught.value)


@pytest.mark.thorough
def test_the_work_grows_with_the_size_alone(monkeypatch):
    """Texts that search again and again for an end, and graphs with one large component, take one pass."""
    monkeypatch.setattr(constraint_limits, "MAX_LINKS", 1 << 30)
    monkeypatch.setattr(constraint_limits, "MAX_RULES", 1 << 30)
    monkeypatch.setattr(constraint_limits, "MAX_REGEX_BYTES", 1 << 30)
    for text in ("[" * 60_000, "[a" * 30_000, "[]" * 30_000 + "]", "[^]" * 20_000, "\\" * 60_000, "(?x)" + "#(" * 100):
        check_regex(text.replace("(?x)", ""), max_nesting=1 << 20)
    for text in ('"' + '\\"' * 100_000, "/" + "\\/" * 100_000, "a[" * 60_000):
        with pytest.raises(GenerationError):
            check_grammar(text)
    check_grammar("a[]" * 60_000 + "a]:" * 1500)
    check_grammar("start: " + "%json{}" * 30_000)
    names = [f"d{n}" for n in range(1500)]
    check_schema({"$defs": {name: {"allOf": [{"$ref": "#"}, {"$ref": f"#/$defs/{name}"}]} for name in names}})


LAST = 2**63 - 1024  # the largest double below 2^63


@pytest.mark.parametrize(
    ("bounds", "moved"),
    [
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, {"minimum": -LAST, "maximum": LAST}),
        ({"minimum": -(10**30), "exclusiveMaximum": 1e30}, {"minimum": -LAST, "exclusiveMaximum": LAST}),
        ({"minimum": 2**53 + 1}, {"minimum": 2**53 + 2}),
        ({"maximum": 2**53 + 1}, {"maximum": 2**53}),
        (
            {"exclusiveMinimum": -(2**53) - 1, "maximum": -(2**53) - 1},
            {"exclusiveMinimum": -(2**53), "maximum": -(2**53) - 2},
        ),
        ({"minimum": 2**53, "maximum": 0.5, "const": {"minimum": 0.25}}, {}),
        ({"minimum": 10**19}, "expected minimum within"),
        ({"maximum": -(10**19)}, "expected maximum within"),
        ({"maximum": -1e30, "minimum": -1e31}, "expected maximum within"),
    ],
)
def test_bounds_are_moved_to_numbers_that_llguidance_has(bounds, moved):
    """Inwards, so that every text fits the schema. Beyond them llguidance ends the process, or writes others."""
    schema = {"items": {"type": "integer", **bounds}}
    if isinstance(moved, str):
        with pytest.raises(GenerationError, match=f"guided_json: {moved}"):
            read_schema(schema)
    else:
        assert json.loads(read_schema(schema))["items"] == {"type": "integer", **bounds, **moved}
    grammar = f"start: %json {json.dumps(schema)}"
    if moved == {}:
        check_grammar(grammar)
        return
    with pytest.raises(GenerationError, match="guided_grammar: expected"):
        check_grammar(grammar)


@pytest.mark.parametrize("value", [2**53 + 1, 123456789012345679, -(2**60), 2**63, 10**400])
def test_integers_that_llguidance_would_write_as_others_are_refused(value):
    for schema in ({"const": value}, {"enum": [1, value]}, {"items": {"const": {"a": [value]}}}):
        with pytest.raises(GenerationError, match=f"guided_json: .* doubles hold, got {value}, which .* a string"):
            read_schema(schema)


def test_integers_and_bounds_in_texts(story):
    near = {"minimum": 123456789012345670, "maximum": 123456789012345690}
    for schema in ({"const": 123456789012345680}, {"enum": [-(2**53)]}, {"minimum": -LAST, "maximum": -LAST}, near):
        schema = {"type": "integer", **schema}
        texts = [
            out.text for out in story.generate("x", guided_json=schema, n=3, temperature=2.0, seed=1, max_tokens=40)
        ]
        for number in map(int, texts):
            assert number in schema.get("enum", [schema.get("const", number)])
            assert schema.get("minimum", number) <= number <= schema.get("maximum", number)


def test_names_that_would_be_counted_twice():
    """llguidance does not know which names of an open object it has written."""
    pair = {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a"]}
    for good in ({"minProperties": 2}, {"minProperties": 3, "additionalProperties": False}):
        read_schema({**pair, **good})
    for bad in ({}, {"additionalProperties": True}, {"additionalProperties": False, "patternProperties": {"x": {}}}):
        with pytest.raises(GenerationError, match=r"guided_json: expected minProperties of at most 2, .* got 3"):
            read_schema({**pair, **bad, "minProperties": 3})
