"""Bounds of grammars and JSON schemas. llguidance compiles them by recursion, and a stack overflow ends the process.

The depth of that recursion is at most the number of rules and brackets of a grammar, and of objects and lists of a
schema: a chain of references goes through each of them once. `run_with_stack` compiles on a stack that has room for
MAX_LINKS of them. Measured with llguidance 1.9.1: at most 5.6 KB for a link of any kind; what follows compilation runs
on 256 KB.

These bounds cannot tell how long everything else takes: two `multipleOf` in one `allOf` take minutes. The server and
`batch`, which take guides from strangers, compile each in a helper process first (`guide_prover.py`).

llguidance has numbers as doubles, and bounds of integers as int64, at whose ends it recurses without end. So bounds are
moved inwards to the next numbers that it has, and other integers that it would write wrongly are refused.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

from ..errors import GenerationError
from ..system.threads import thread_stack_bytes
from .guide_helper import STACK_BYTES

MAX_BYTES = 1 << 18  # of a grammar, a regular expression or a schema
MAX_LINKS = 20_000  # rules and brackets of a grammar with the objects and lists of its schemas: 112 MB of stack
MAX_RULES = 2000  # rules and terminals of a grammar, keys of one object of a schema, names in `required`
MAX_NESTING = 100  # brackets of a grammar or an expression, objects and lists of a schema
MAX_REGEX_BYTES = 1 << 14
MAX_LITERAL = 1 << 14  # characters of a string in a grammar or schema: each step reads those that are forced
MAX_BOUND = 2**63 - 1024  # the largest double below 2^63
INNER_NESTING = 250  # of an expression within a grammar or schema: llguidance's own limit
MAX_REPEATS = 4000  # of a regular expression

T = TypeVar("T")


def run_with_stack(function: Callable[[], T]) -> T:
    """The result of the function, run in a thread with a stack of STACK_BYTES."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="bitnet_ref constraint") as pool:
        with thread_stack_bytes(STACK_BYTES):
            future = pool.submit(function)
        return future.result()


def check_size(guide: str, text: str) -> None:
    """Raise GenerationError for a text of more than MAX_BYTES."""
    _at_most(guide, "bytes", len(text.encode(errors="surrogatepass")), MAX_BYTES)


def check_choices(texts: Sequence[str]) -> None:
    """Raise GenerationError for a string that is too long."""
    _at_most("guided_choice", "characters of a string", max(map(len, texts)), MAX_LITERAL)


def check_regex(text: str, guide: str = "guided_regex", max_nesting: int = MAX_NESTING) -> None:
    """Raise GenerationError for a regular expression that is too long, nested too deeply, or has too many parts that
    may be missing or repeated: llguidance takes their number squared in time and memory."""
    _at_most(guide, "bytes of a regular expression", len(text.encode(errors="surrogatepass")), MAX_REGEX_BYTES)
    marks = list(_outside_classes(text))
    depth = max(accumulate({"(": 1, ")": -1}.get(mark, 0) for mark in marks), default=0)
    _at_most(guide, "parentheses in each other", depth, max_nesting)
    _at_most(guide, "parts that may be missing or repeated", sum(mark in _REPEATS for mark in marks), MAX_REPEATS)


_MARK = re.compile(r"\\.|\(\??|\|(?=[|)]|\Z)|[)\[\]?*+{]", re.DOTALL)
_REPEATS = frozenset("?*+{|")  # "|": before nothing


def _outside_classes(text: str) -> Iterator[str]:
    """The marks of `_MARK` in an expression, one character each, without those of a class like [(?]. One pass."""
    matches = [match for match in _MARK.finditer(text) if not match.group().startswith("\\")]
    closes = [index for index, match in enumerate(matches) if match.group() == "]"]
    number = place = 0
    while place < len(matches):
        match = matches[place]
        place += 1
        if match.group() != "[":
            yield match.group()[0]
            continue
        first = match.end() + text.startswith("^", match.end())  # where "]" is an ordinary character
        while number < len(closes) and (closes[number] < place or matches[closes[number]].start() == first):
            number += 1
        if number < len(closes):  # else it has no end, and llguidance says so
            place = closes[number] + 1


def _at_most(guide: str, kind: str, got: int, limit: int) -> None:
    """Raise GenerationError for more of that kind than the limit."""
    if got > limit:
        raise GenerationError(f"expected at most {limit} {kind}, got {got}; use a smaller or flatter one", field=guide)


# -- grammars ----------------------------------------------------------------------------------------------------------

# As in llguidance's lexer; an alternative may match more than there where that is an error there.
_LEXEME = re.compile(
    r"""(?P<space>(?:\#|//)[^\n]*|\s+)
    |(?P<json>%(?:json|regex|llguidance))
    |(?P<name>!?[_?]?[a-z][_a-z0-9\-]*|_?[A-Z][_A-Z0-9\-]*)
    |(?P<literal>"(?:\\.|[^"\\\n])*+"i?|/(?:\\.|[^/\\])++/[imslux]*|<[^<>\s]+>|@[\w\-]+
        |0[xX][0-9a-fA-F]+|[+-]?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)
    |(?P<mark>::|.)""",
    re.VERBOSE,
)
_OPENING, _CLOSING = "([{", ")]}"


class _Lexeme(NamedTuple):
    kind: str  # "json", "name", "literal" or "mark"
    text: str
    value: Any = None  # of "json"


def check_grammar(text: str) -> None:
    """Raise GenerationError for a Lark grammar that llguidance could not compile within STACK_BYTES, or slowly."""
    guide = "guided_grammar"
    check_size(guide, text)
    if text.lstrip().startswith("{"):  # llguidance's own form, in which a grammar can be anything
        message = "expected a Lark grammar, got JSON; a schema belongs in guided_json"
        raise GenerationError(message, field=guide, mentions=["guided_json"])
    lexemes = list(_lex(text, guide))
    marks = Counter(lexeme.text for lexeme in lexemes if lexeme.kind == "mark")
    _at_most(guide, "parts that may be missing or repeated", sum(marks[mark] for mark in "?*+{"), 2 * MAX_REPEATS)
    _at_most(guide, "rules and terminals", marks[":"], MAX_RULES)  # each has one after its name
    links = marks[":"] + sum(marks[bracket] for bracket in _OPENING)
    depth = 0
    for lexeme in lexemes:
        if lexeme.kind == "json" and lexeme.text == "%json":
            links += check_schema(lexeme.value, guide)
            if _move_bounds(lexeme.value, guide) != lexeme.value:
                raise GenerationError("expected bounds in %json that doubles hold, below 2^63", field=guide)
        elif lexeme.kind == "literal" and lexeme.text.startswith("/"):
            check_regex(lexeme.text, guide, INNER_NESTING)
        elif lexeme.kind == "literal":
            _at_most(guide, "characters of a string", len(lexeme.text), MAX_LITERAL)
        elif lexeme.kind == "mark":
            depth = max(0, depth + (lexeme.text in _OPENING) - (lexeme.text in _CLOSING))
            _at_most(guide, "brackets in each other", depth, MAX_NESTING)
    _at_most(guide, "rules, brackets, and objects and lists of schemas", links, MAX_LINKS)


def _lex(text: str, guide: str) -> Iterator[_Lexeme]:
    place = 0
    while match := _LEXEME.match(text, place):
        place = match.end()
        kind, found = str(match.lastgroup), match.group()
        if kind == "mark" and found in '"/':
            line = text.count("\n", 0, place) + 1
            raise GenerationError(f"the string or regular expression in line {line} has no end", field=guide)
        if kind == "json":
            place = _SPACE.match(text, place).end()  # type: ignore[union-attr]  # it matches nothing too
            try:
                value, place = _JSON.raw_decode(text, place)
            except (ValueError, RecursionError) as problem:
                raise GenerationError(f"what follows {found} is no JSON: {problem}", field=guide) from problem
            yield _Lexeme(kind, found, value)
        elif kind != "space":
            yield _Lexeme(kind, found)


_JSON = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")


# -- JSON schemas ------------------------------------------------------------------------------------------------------


def read_schema(value: str | Mapping[str, Any] | bool) -> str:
    """The text of a JSON schema, checked. Raises GenerationError; ValueError and TypeError for what is no JSON."""
    text = value if isinstance(value, str) else json.dumps(dict(value) if isinstance(value, Mapping) else value)
    check_size("guided_json", text)
    schema = json.loads(text)
    check_schema(schema)
    return json.dumps(_move_bounds(schema, "guided_json"))  # so that llguidance reads what was checked


def check_schema(schema: Any, guide: str = "guided_json") -> int:
    """Raise GenerationError for a schema that llguidance could not compile within STACK_BYTES, or slowly.

    -> the number of its objects and lists
    """
    parts: list[tuple[Any, int]] = [(schema, 1)] if isinstance(schema, dict) else []  # with their depths
    for part, depth in parts:
        _check_part(part, depth, guide)
        inner = part.values() if isinstance(part, dict) else part
        parts += [(each, depth + 1) for each in inner if isinstance(each, dict | list)]
    _at_most(guide, "objects and lists", len(parts), MAX_LINKS)
    return len(parts)


def _check_part(part: dict[str, Any] | list[Any], depth: int, guide: str) -> None:
    _at_most(guide, "objects and lists in each other", depth, MAX_NESTING)
    for text in (*part, *part.values()) if isinstance(part, dict) else part:
        if isinstance(text, str):
            _at_most(guide, "characters of a string", len(text), MAX_LITERAL)
    if isinstance(part, dict):
        patterns = part.get("patternProperties")
        for pattern in (part.get("pattern"), *(patterns if isinstance(patterns, dict) else ())):
            if isinstance(pattern, str):
                check_regex(pattern, guide, INNER_NESTING)
        required = part["required"] if isinstance(part.get("required"), list) else []
        _at_most(guide, "keys of an object, or names in `required`", max(len(part), len(required)), MAX_RULES)
        _check_constants(part.get("const"), guide)
        _check_constants(part.get("enum"), guide)
        least = part.get("minProperties")
        is_open = isinstance(patterns, dict) or part.get("additionalProperties", True) is not False
        if isinstance(least, int) and least > len(required) + 1 and is_open:
            message = f"expected minProperties of at most {len(required) + 1}, one more than are required, got {least}"
            raise GenerationError(f"{message}: llguidance would count one name twice", field=guide)


def _check_constants(value: Any, guide: str) -> None:
    """Raise GenerationError for an integer that llguidance would not write as it is."""
    values = [value]
    for each in values:
        if isinstance(each, dict | list):
            values += each.values() if isinstance(each, dict) else each
        elif isinstance(each, int) and abs(each) > 2**53:
            written = int(Decimal(repr(float(each)))) if abs(each) < MAX_BOUND else None
            if written != each:
                message = f"expected integers that doubles hold, got {each}, which llguidance writes as another one"
                raise GenerationError(f"{message}; make it a string", field=guide)


def _move_bounds(schema: Any, guide: str) -> Any:
    """The schema with its bounds moved inwards to numbers that llguidance has. Raises GenerationError for others."""
    if isinstance(schema, list):
        return [_move_bounds(each, guide) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: each if key in _DATA else _move_bounds(each, guide) for key, each in schema.items()}
    for key, sign in (("minimum", 1), ("exclusiveMinimum", 1), ("maximum", -1), ("exclusiveMaximum", -1)):
        bound = schema.get(key)
        if isinstance(bound, int | float) and abs(bound) > 2**53:
            inwards = max(sign * bound, -MAX_BOUND)  # the bound is from below now
            if inwards > MAX_BOUND:
                message = f"expected {key} within +-{MAX_BOUND}, the range of llguidance, got {bound}"
                raise GenerationError(message, field=guide)
            double = float(inwards)
            moved[key] = sign * int(double if double >= inwards else math.nextafter(double, math.inf))
    return moved


_DATA = {"const", "enum", "default", "examples"}  # what they hold is no schema
