"""Options, declared once: the fields of a dataclass with their rules, and its docstring with their help.

    top_k: Sample among the k most likely tokens. 0 is no limit.

    top_k: int = option(0, Number(0, whole=True))

From the declarations come the checks of values (`read_options`), signatures and help() of the functions that take them
as keywords (`show_options`), the shell's options (`cli/generation_options.py`) and the keys of HTTP requests
(`serving/http/schemas.py`).
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, TypeVar, get_type_hints

import numpy as np

from ..errors import BitNetRefError, GenerationError, describe

Schema = dict[str, Any]  # a JSON schema
Error = type[BitNetRefError]
F = TypeVar("F", bound=Callable[..., Any])

LARGEST = 2**31 - 1  # of a whole number, unless a rule says otherwise
LONGEST_S = 1e9  # 32 years: clocks and locks take no more


# -- declarations ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """What is declared of an option.

    rule: the values that it may have.
    in_shell: whether commands have it; a text is shown by --help instead of the first sentence of `help`.
    flag: its name in the shell, if that is not --name. metavar: the shell's name for its value.
    is_flag: whether the shell gives True for its name alone.
    in_http: whether requests have it; a schema says that they take other values than `rule`.
    help, section: from the docstring of the class: the text, and the heading above it.
    """

    default: Any
    rule: Rule
    in_shell: bool | str = True
    flag: str | None = None
    metavar: str | None = None
    is_flag: bool = False
    in_http: bool | Schema = False
    help: str = ""
    section: str = ""

    @property
    def short_help(self) -> str:
        """What --help says: one sentence."""
        return self.in_shell if isinstance(self.in_shell, str) else self._sentences[0]

    @property
    def default_text(self) -> str:
        """What the last sentence says of the default, else the default; "" for None, False, and what is empty."""
        if self._sentences[-1].startswith("By default "):
            return self._sentences[-1].removeprefix("By default ").removesuffix(".")
        if isinstance(self.default, float):
            return f"{self.default:g}"
        return str(self.default) if isinstance(self.default, int | str) and self.default is not False else ""

    @property
    def _sentences(self) -> list[str]:
        return re.split(r"(?<=\.)\s", self.help)

    @property
    def schema(self) -> Schema:
        """What an HTTP request may give. None (JSON's null) is the default."""
        return self.in_http if isinstance(self.in_http, dict) else self.rule.schema()


def option(default: Any, rule: Rule, is_hashable: bool = True, **more: Any) -> Any:
    """A field of a dataclass that declares an option. more: the other attributes of `Option`."""
    metadata = {"option": Option(default, rule, **more)}
    if default == {}:
        return field(default_factory=dict, hash=is_hashable, metadata=metadata)
    return field(default=default, hash=is_hashable, metadata=metadata)


def reuse_option(declaration: type, name: str) -> Any:
    """A field that declares the same option as another class does."""
    declared = declared_options(declaration)[name]
    return option(declared.default, declared.rule)


@cache
def declared_options(declaration: type) -> dict[str, Option]:
    """The options that a dataclass declares, by name, in their order."""
    explained, section = {}, ""
    for item in re.split(r"\n+(?! )", explain_options(declaration)):
        name, _, text = item.partition(":")
        section = section if text else name
        explained[name] = {"help": " ".join(text.split()), "section": section}
    named = {each.name: each.metadata["option"] for each in fields(declaration)}
    return {name: replace(declared, **explained.get(name, {})) for name, declared in named.items()}


def explain_options(declaration: type) -> str:
    """The part of the docstring that explains the options: "name: help" for each, under headings."""
    _, _, explanation = (inspect.getdoc(declaration) or "").partition("\n\n")
    return explanation


def read_options(instance: Any, error: Error) -> None:
    """Check the values of an instance by their rules, and store them in the rules' own types. Raises `error`."""
    for each in fields(instance):
        value = each.metadata["option"].rule.read(getattr(instance, each.name), each.name, error)
        object.__setattr__(instance, each.name, value)


def show_options(*declarations: type, types: type) -> Callable[[F], F]:
    """A decorator: signature, help() and completion show the declared options in place of `**keywords`.

    types: the TypedDict of the keywords, as callers may give them.
    """

    def decorate(function: F) -> F:
        annotations = get_type_hints(types)
        try:
            signature = inspect.signature(function, eval_str=True)
        except NameError:  # a type that is defined below, or imported for type checkers only, stays a string
            signature = inspect.signature(function)
        shown = {name: each for name, each in signature.parameters.items() if each.kind is not each.VAR_KEYWORD}
        for declaration in declarations:
            for name, declared in declared_options(declaration).items():
                kind, annotation = inspect.Parameter.KEYWORD_ONLY, annotations[name]
                keyword = inspect.Parameter(name, kind, default=declared.default, annotation=annotation)
                shown.setdefault(name, keyword)
        function.__dict__["__signature__"] = signature.replace(parameters=list(shown.values()))
        function.__doc__ = "\n\n".join([inspect.getdoc(function) or "", *map(explain_options, declarations)])
        return function

    return decorate


def suggest(name: str, known: Iterable[str], aliases: Iterable[str] = ()) -> str:
    """The hint for an unknown name: the nearest known one, or all of them."""
    near = difflib.get_close_matches(name, [*known, *aliases], n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"


def find_surrogate(value: Any) -> str | None:
    """Half of a surrogate pair in a text, or in one of a list or a mapping; None if there is none.

    >>> find_surrogate({"a": ["b", "c\\ud800"]})
    '\\ud800'
    """
    seen, waiting = set[int](), [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            if half := _SURROGATE.search(each):
                return half.group()
        elif isinstance(each, Mapping | list | tuple) and id(each) not in seen:
            seen.add(id(each))  # it may contain itself
            waiting += [*each, *each.values()] if isinstance(each, Mapping) else each
    return None


_SURROGATE = re.compile("[\ud800-\udfff]")


# -- rules -------------------------------------------------------------------------------------------------------------


class Rule:
    """The values that an option may have. `str(rule)` says for errors what they are."""

    def faults(self, value: Any) -> list[Any]:
        """What is wrong with the value: itself, or items of it. Empty where nothing is."""
        raise NotImplementedError

    def store(self, value: Any) -> Any:
        """What becomes of a value without faults."""
        return value

    def schema(self) -> Schema:
        """The JSON schema of the values, and null; empty where HTTP has no such option."""
        return {}

    def accepts(self, value: Any) -> bool:
        return not self.faults(value)

    def read(self, value: Any, name: str, error: Error = GenerationError) -> Any:
        """The value as it is stored. Raises `error`, with the option's name, for one that has faults."""
        if wrong := self.faults(value):
            raise error(f"expected {self}, got {describe(wrong[0])}", field=name)
        return self.store(value)


@dataclass(frozen=True)
class Values(Rule):
    """Those for which `is_good`. convert: makes what is stored of one."""

    is_good: Callable[[Any], bool]
    words: str
    json: Schema = field(default_factory=dict, hash=False)
    convert: Callable[[Any], Any] = lambda value: value

    def faults(self, value: Any) -> list[Any]:
        return [] if self.is_good(value) else [value]

    def store(self, value: Any) -> Any:
        return self.convert(value)

    def schema(self) -> Schema:
        return self.json

    def __str__(self) -> str:
        return self.words


@dataclass(frozen=True)
class Number(Rule):
    """Numbers from `low` to `high`. `above`: `low` itself is excluded. `or_zero`: so may 0 be, below `low`.

    Stored as an int or a float of Python. Python's own and NumPy's are accepted; bool, Decimal, Fraction and NaN are
    not.
    """

    low: float
    high: float = LARGEST
    whole: bool = False
    above: bool = False
    optional: bool = False
    or_zero: bool = False

    def faults(self, value: Any) -> list[Any]:
        number = _python_number(value)
        is_good = (value is None and self.optional) or (number is not None and self._contains(number))
        return [] if is_good else [value]

    def _contains(self, number: int | float) -> bool:
        if self.whole and not isinstance(number, int):
            return False
        if self.or_zero and number == 0:
            return True
        return (self.low < number if self.above else self.low <= number) and number <= self.high

    def store(self, value: Any) -> int | float | None:
        number = _python_number(value)
        return number if number is None or self.whole else float(number)

    def schema(self) -> Schema:
        kind = "integer" if self.whole else "number"
        low = 0 if self.or_zero else self.low
        return {"type": [kind, "null"], "exclusiveMinimum" if self.above else "minimum": low, "maximum": self.high}

    def __str__(self) -> str:
        kind = ("0 or " if self.or_zero else "") + ("a whole number" if self.whole else "a number")
        low, high = (f"{limit:g}" if isinstance(limit, float) else limit for limit in (self.low, self.high))
        return f"{kind} above {low}, at most {high}" if self.above else f"{kind} from {low} to {high}"


def _python_number(value: Any) -> int | float | None:
    """The value of an int, a float or a scalar of NumPy; None for everything else."""
    if isinstance(value, bool | np.timedelta64):  # both count as integers
        return None
    if isinstance(value, int):
        return int.__index__(value)
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        with np.errstate(over="ignore"):  # of a longdouble
            return float(value)
    return None


@dataclass(frozen=True)
class ListOf(Rule):
    """Lists, stored as tuples. item: the rule of each. or_one: an item may be given for a list of one.

    high: maximum number of items over HTTP.
    """

    item: Rule
    plural: str
    or_one: bool = False
    high: int = 1024

    def faults(self, value: Any) -> list[Any]:
        items = self._items(value)
        return [each for each in items if not self.item.accepts(each)] if isinstance(items, list | tuple) else [value]

    def store(self, value: Any) -> tuple[Any, ...]:
        return tuple(map(self.item.store, self._items(value)))

    def _items(self, value: Any) -> Any:
        return (value,) if self.or_one and isinstance(value, str) else value

    def schema(self) -> Schema:
        items = {name: of[0] if name == "type" else of for name, of in self.item.schema().items()}
        return {"type": ["array", "null"], "items": items, "minItems": 0, "maxItems": self.high}

    def __str__(self) -> str:
        return f"a list of {self.plural}"


def choice(*values: str | bool | None) -> Values:
    """A few texts, True, False or None. The shell offers those that are not None."""

    def is_good(value: Any) -> bool:
        return any(value is each or (isinstance(value, str) and value == each) for each in values)

    names = [str(each) for each in values if each is not None]
    words = " or ".join(names) if len(names) == 2 else f"one of {', '.join(names)}"
    return Values(is_good, words, {"enum": [*(each for each in values if each is not None), None]})


def parse_bytes(value: Any) -> int | None:
    """A number of bytes, also as a text. None for what is no such number.

    >>> parse_bytes("1.5 GiB")
    1610612736
    """
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool) and 0 < value < 2**63
    text = str(value).strip() if isinstance(value, str) or is_whole else ""
    match = re.fullmatch(r"(\d{1,19}(?:\.\d{1,19})?)\s*([KMGT]?)(i?)B?", text, re.IGNORECASE)
    if match is None:
        return None
    unit = (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " ")
    size = int(float(match[1]) * unit)
    return size if 1 <= size < 2**63 else None


FLAG = Values(lambda value: isinstance(value, bool), "True or False", {"type": ["boolean", "null"]})
TEXT = Values(
    lambda value: isinstance(value, str) and value != "",
    "a non-empty text",
    {"type": ["string", "null"], "minLength": 1},
)
TEXT_OR_NONE = Values(lambda value: value is None or TEXT.accepts(value), TEXT.words, TEXT.json)
BYTES = Values(
    lambda value: value is None or parse_bytes(value) is not None, "bytes, or a text like '8GiB'", convert=parse_bytes
)
