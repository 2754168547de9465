"""Bounds of grammars and JSON schemas. llguidance compiles them by recursion, and a stack overflow ends the process.

The depth of that recursion is the longest chain of references (a rule that names a rule, a `$ref` to a schema with a
`$ref`), where each link adds the brackets, objects and lists around the next reference. `measure_chain` bounds it from
above, and `run_with_stack` compiles on a stack of known size. Measured with llguidance 1.9.1: 11 MB are enough for
chains of MAX_CHAIN of every kind; what follows compilation runs on 256 KB.

These bounds cannot tell how long everything else takes: two `multipleOf` in one `allOf` take minutes. The server and
`batch`, which take guides from strangers, compile each in a helper process first (`guide_prover.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any, NamedTuple, NoReturn, TypeVar
from urllib.parse import unquote

from ..errors import GenerationError
from ..system.threads import thread_stack_bytes

MAX_BYTES = 1 << 18  # of a grammar, a regular expression or a schema
MAX_RULES = 2000  # rules and terminals of a grammar, keys of one object of a schema, names in `required`
MAX_NESTING = 100  # brackets of a grammar or an expression, objects and lists of a schema
MAX_CHAIN = 2000
MAX_REGEX_BYTES = 1 << 14
MAX_LITERAL = 1 << 14  # characters of a string in a grammar or schema: each step reads those that are forced
INNER_NESTING = 250  # of an expression within a grammar or schema: llguidance's own limit
MAX_REPEATS = 4000  # of a regular expression
STACK_BYTES = 64 << 20  # reserved, not used, until a grammar needs it

T = TypeVar("T")


def run_with_stack(function: Callable[[], T]) -> T:
    """The result of the function, run in a thread with a stack of STACK_BYTES."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="bitnet_ref constraint") as pool:
        with thread_stack_bytes(STACK_BYTES):
            future = pool.submit(function)
        return future.result()


def check_size(guide: str, text: str) -> None:
    """Raise GenerationError for a text of more than MAX_BYTES."""
    size = len(text.encode(errors="surrogatepass"))
    if size > MAX_BYTES:
        _refuse(guide, "bytes", size, MAX_BYTES)


def check_choices(texts: Sequence[str], guide: str = "guided_choice") -> None:
    """Raise GenerationError for a string that is too long."""
    longest = max(map(len, texts))
    if longest > MAX_LITERAL:
        _refuse(guide, "characters of a string", longest, MAX_LITERAL)


def check_regex(text: str, guide: str = "guided_regex", max_nesting: int = MAX_NESTING) -> None:
    """Raise GenerationError for a regular expression that is too long, nested too deeply, or has too many parts that
    may be missing or repeated: llguidance takes their number squared in time and memory."""
    size = len(text.encode(errors="surrogatepass"))
    if size > MAX_REGEX_BYTES:
        _refuse(guide, "bytes of a regular expression", size, MAX_REGEX_BYTES)
    marks = list(_outside_classes(text))
    depth = max(accumulate({"(": 1, ")": -1}.get(mark, 0) for mark in marks), default=0)
    if depth > max_nesting:
        _refuse(guide, "parentheses in each other", depth, max_nesting)
    repeats = sum(mark in _REPEATS for mark in marks)
    if repeats > MAX_REPEATS:
        _refuse(guide, "parts that may be missing or repeated", repeats, MAX_REPEATS)


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


def measure_chain(weights: Sequence[int], links: Sequence[Sequence[int]]) -> int:
    """An upper bound of the weight of the longest chain in a graph; no node is twice in a chain.

    weights: of each node. links: the nodes that each node refers to. Nodes that refer to each other count as if one
    chain went through all of them. Tarjan's algorithm, without recursion.

    >>> measure_chain([1, 2, 1, 5], [[1], [2], [1], []])  # 0 -> 1 <-> 2, and 3 alone
    5
    >>> measure_chain([1, 2, 1], [[1], [2], [1]])
    4
    """
    order = [0] * len(weights)  # of discovery, from 1; 0: not yet
    lowest = [0] * len(weights)
    chain = [0] * len(weights)  # 0 while the node's component is open
    component: list[int] = []
    count = 0
    for root in range(len(weights)):
        path = [] if order[root] else [(root, iter(links[root]))]
        while path:
            node, rest = path[-1]
            if not order[node]:
                count += 1
                order[node] = lowest[node] = count
                component.append(node)
            for target in rest:
                if not order[target]:
                    path.append((target, iter(links[target])))
                    break
                if not chain[target]:
                    lowest[node] = min(lowest[node], order[target])
            else:
                path.pop()
                if path:
                    lowest[path[-1][0]] = min(lowest[path[-1][0]], lowest[node])
                if lowest[node] == order[node]:
                    members: list[int] = []
                    while not members or members[-1] != node:
                        members.append(component.pop())
                    longest = max((chain[target] for member in members for target in links[member]), default=0)
                    total = longest + sum(weights[member] for member in members)
                    for member in members:
                        chain[member] = total
    return max(chain, default=0)


def _check_chain(guide: str, weights: Sequence[int], links: Sequence[Sequence[int]]) -> None:
    if sum(weights) > MAX_CHAIN and (length := measure_chain(weights, links)) > MAX_CHAIN:
        _refuse(guide, "links in a chain of references, with the brackets around them", length, MAX_CHAIN)


def _refuse(guide: str, kind: str, got: int, limit: int) -> NoReturn:
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
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class _Lexeme(NamedTuple):
    kind: str  # "json", "name", "literal" or "mark"
    text: str
    value: Any = None  # of "json"


def check_grammar(text: str, guide: str = "guided_grammar") -> None:
    """Raise GenerationError for a Lark grammar that llguidance could not compile within STACK_BYTES, or slowly."""
    check_size(guide, text)
    if text.lstrip().startswith("{"):  # llguidance's own form, in which a grammar can be anything
        message = "expected a Lark grammar, got JSON; a schema belongs in guided_json"
        raise GenerationError(message, field=guide, mentions=["guided_json"])
    lexemes = list(_lex(text, guide))
    repeats = sum(lexeme.kind == "mark" and lexeme.text in "?*+{" for lexeme in lexemes)
    if repeats > 2 * MAX_REPEATS:
        _refuse(guide, "parts that may be missing or repeated", repeats, 2 * MAX_REPEATS)
    heads = _find_definitions(lexemes)
    if len(heads) > MAX_RULES:
        _refuse(guide, "rules and terminals", len(heads), MAX_RULES)
    names = list({lexemes[place].text.lstrip("!?") for place in heads})
    numbers = {name: number for number, name in enumerate(names)}
    weights = [1] * len(names)
    links: list[list[int]] = [[] for _ in names]
    owner: int | None = None  # the rule around this place
    outer: list[int | None] = []
    for place, lexeme in enumerate(lexemes):
        if place in heads:
            owner = numbers[lexeme.text.lstrip("!?")]
        elif (
            lexeme.kind == "name"
            and owner is not None
            and (target := numbers.get(lexeme.text.lstrip("!?"))) is not None
        ):
            links[owner].append(target)
        elif lexeme.kind == "json" and lexeme.text == "%json":
            check_schema(lexeme.value, guide)
        elif lexeme.kind == "literal" and lexeme.text.startswith("/"):
            check_regex(lexeme.text, guide, INNER_NESTING)
        elif lexeme.kind == "literal" and len(lexeme.text) > MAX_LITERAL:
            _refuse(guide, "characters of a string", len(lexeme.text), MAX_LITERAL)
        elif lexeme.kind == "mark" and lexeme.text in _CLOSING:
            outer.append(owner)
            if len(outer) > MAX_NESTING:
                _refuse(guide, "brackets in each other", len(outer), MAX_NESTING)
            if owner is not None:
                weights[owner] = max(weights[owner], 1 + len(outer))
        elif lexeme.kind == "mark" and lexeme.text in _CLOSING.values() and outer:
            owner = outer.pop()  # a %lark {...} in a rule has rules of its own
    _check_chain(guide, weights, links)


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


def _find_definitions(lexemes: Sequence[_Lexeme]) -> set[int]:
    """Where rules and terminals are defined: the places of their names. Rules may share a line."""
    closers: dict[int, int] = {}
    openers: list[int] = []
    for place, lexeme in enumerate(lexemes):
        if lexeme.kind == "mark" and lexeme.text in _CLOSING:
            openers.append(place)
        elif lexeme.kind == "mark" and lexeme.text in _CLOSING.values() and openers:
            closers[openers.pop()] = place
    texts = [lexeme.text if lexeme.kind == "mark" else "" for lexeme in lexemes] + [""] * 8
    heads = set()
    for place, lexeme in enumerate(lexemes):
        if lexeme.kind != "name":
            continue
        end = place + 1
        if texts[end] == "::":  # name::_
            end += 2
        if texts[end] == "{":  # name{parameter}
            end = closers.get(end, end) + 1
        if texts[end] == ".":  # name.priority
            end += 2
        if texts[end] == "[":  # name[attribute=value]
            end = closers.get(end, end) + 1
        if texts[end] == ":":
            heads.add(place)
    return heads


# -- JSON schemas ------------------------------------------------------------------------------------------------------

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_ANCHORS = ("$id", "$anchor", "$dynamicAnchor", "$recursiveAnchor")


def read_schema(value: str | Mapping[str, Any] | bool, guide: str = "guided_json") -> str:
    """The text of a JSON schema, checked. Raises GenerationError; ValueError and TypeError for what is no JSON."""
    text = value if isinstance(value, str) else json.dumps(dict(value) if isinstance(value, Mapping) else value)
    check_size(guide, text)
    schema = json.loads(text)
    check_schema(schema, guide)
    return json.dumps(schema)  # so that llguidance reads what was checked


def check_schema(schema: Any, guide: str = "guided_json") -> None:
    """Raise GenerationError for a schema that llguidance could not compile within STACK_BYTES, or slowly."""
    if not isinstance(schema, dict):
        return
    parts: list[Any] = [schema]  # objects and lists, each after the one around it
    parents = [0]
    depths = [1]
    for number, part in enumerate(parts):
        _check_part(part, depths[number], guide)
        for inner in part.values() if isinstance(part, dict) else part:
            if isinstance(inner, dict | list):
                parts.append(inner)
                parents.append(number)
                depths.append(depths[number] + 1)
    if len(parts) <= MAX_CHAIN:
        return
    anchors = (*_ANCHORS, "id") if "draft-04" in json.dumps(schema) else _ANCHORS
    if any(isinstance(part, dict) and not part.keys().isdisjoint(anchors) for part in parts[1:]):
        raise GenerationError(
            f"expected no $id and no $anchor within a schema of more than {MAX_CHAIN} objects and lists, got "
            f"one among {len(parts)}; write references like #/$defs/name",
            field=guide,
        )
    numbers = {id(part): number for number, part in enumerate(parts)}
    references: list[list[int]] = [[] for _ in parts]
    for number, part in enumerate(parts):
        if isinstance(part, dict):
            texts = [text for name in _REFERENCES if isinstance(text := part.get(name), str)]
            references[number] = [numbers[id(target)] for text in texts for target in _resolve(schema, text)]
    targets = {0, *(target for each in references for target in each)}
    owners: list[int] = []  # of each part: the target of references that it belongs to
    weights = [0] * len(parts)
    links: list[list[int]] = [[] for _ in parts]
    for number in range(len(parts)):
        owner = number if number in targets else owners[parents[number]]
        owners.append(owner)
        weights[owner] = max(weights[owner], depths[number] - depths[owner] + 1)
        links[owner] += references[number]
        if owner == number and number:
            links[owners[parents[number]]].append(number)
    _check_chain(guide, weights, links)


def _check_part(part: dict[str, Any] | list[Any], depth: int, guide: str) -> None:
    if depth > MAX_NESTING:
        _refuse(guide, "objects and lists in each other", depth, MAX_NESTING)
    for text in (*part, *part.values()) if isinstance(part, dict) else part:
        if isinstance(text, str) and len(text) > MAX_LITERAL:
            _refuse(guide, "characters of a string", len(text), MAX_LITERAL)
    if isinstance(part, dict):
        patterns = part.get("patternProperties")
        for pattern in (part.get("pattern"), *(patterns if isinstance(patterns, dict) else ())):
            if isinstance(pattern, str):
                check_regex(pattern, guide, INNER_NESTING)
        required = part.get("required")
        largest = max(len(part), len(required) if isinstance(required, list) else 0)
        if largest > MAX_RULES:
            _refuse(guide, "keys of an object, or names in `required`", largest, MAX_RULES)


def _resolve(schema: dict[str, Any], reference: str) -> list[Any]:
    """The parts that a reference may mean, where no part but the whole has a name of its own."""
    _, _, pointer = reference.partition("#")
    places: list[Any] = [schema]
    for segment in pointer.split("/")[1:]:
        keys = {segment, unquote(segment)}
        keys |= {key.replace("~1", "/").replace("~0", "~") for key in keys}
        places = [inner for place in places for inner in _members(place, keys)]
    parts = [place for place in places if isinstance(place, dict | list)]
    return parts or [schema]  # an unknown one is an error, or a published schema that llguidance has


def _members(place: Any, keys: set[str]) -> list[Any]:
    if isinstance(place, dict):
        return [place[key] for key in keys if key in place]
    if isinstance(place, list):
        indices = {int(key) for key in keys if re.fullmatch(r"\+?[0-9]{1,9}", key)}
        return [place[index] for index in indices if index < len(place)]
    return []
