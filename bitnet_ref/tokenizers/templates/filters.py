"""The filters, tests, methods and functions that a chat template may use. Each pays for its work.

An allow-list: what published chat templates use and what cannot amplify. Not on it: center, format, batch and slice (a
width makes a megabyte of nothing), round (10 to any power), groupby, random, urlize and all others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from jinja2.defaults import DEFAULT_TESTS
from jinja2.exceptions import TemplateError
from jinja2.filters import FILTERS
from jinja2.runtime import Context, Macro, Undefined
from jinja2.utils import Namespace, _PassArg, pass_context

from .limits import LimitError, current, measure

STRING_METHODS = """
    capitalize count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric isspace istitle
    isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split
    splitlines startswith strip swapcase title upper
"""
METHODS: dict[type, frozenset[str]] = {
    str: frozenset(STRING_METHODS.split()),
    list: frozenset(["count", "index"]),
    tuple: frozenset(["count", "index"]),
    dict: frozenset(["get", "items", "keys", "values"]),
}
PLAIN_FILTERS = """
    abs capitalize count d default dictsort first float int items last length list lower map max min reject rejectattr
    reverse safe select selectattr sort string title trim unique upper
"""
# Python searches backwards, and strips, in the product of both lengths; forwards in their sum.
_PRODUCT_METHODS = {"rfind", "rindex", "rpartition", "rsplit", "strip", "lstrip", "rstrip", "trim"}
_BY_ATTRIBUTE = {"map", "max", "min", "rejectattr", "selectattr", "sort", "unique"}
_MAX_ATTRIBUTE = 256
_MAX_TITLE = 1 << 16  # characters; it cuts the text into words in one call, which holds the interpreter
_GLANCES = {"count", "d", "default", "first", "last", "length"}  # do not walk their argument

# A width, as in %9999999d, pads to any length.
_TIME_FORMAT = re.compile(r"(?:[^%]|%[-_0^#]?[A-Za-z%])*")


def size_after_replace(text: str, old: Any, new: Any, count: Any = None) -> int:
    """Upper bound of the characters in `text.replace(old, new)`, without computing it."""
    if not (isinstance(old, str) and isinstance(new, str)):
        raise LimitError("replace() takes two strings")
    occurrences = text.count(old)
    if isinstance(count, int) and count >= 0:
        occurrences = min(occurrences, count)
    return len(text) + occurrences * max(0, len(new) - len(old))


def size_after_join(items: list[Any], separator: Any) -> int:
    """Lower bound of the characters of a join; items are measured, not printed."""
    if not isinstance(separator, str):
        raise LimitError("join takes a string")
    return len(separator) * len(items)


def _pay_items(value: Any) -> list[Any]:
    """The items of any iterable, each paid for, so that a lazy one is not walked for free."""
    items = []
    for item in value:
        current.get().step(1)
        items.append(item)
    return items


def pay_search(name: str, text: Any, *args: Any) -> None:
    """Pay for a search of `text` for the first of `args`."""
    needle = args[0] if args else None
    if name in _PRODUCT_METHODS and isinstance(text, str) and isinstance(needle, str):
        current.get().step(len(text) * len(needle) // 64)


def _pay_attribute(value: Any, *paths: Any) -> None:
    """Pay for looking up "a.b,c" in each item of a value; `paths` are a filter's arguments."""
    parts = sum(1 + path.count(".") + path.count(",") for path in paths if isinstance(path, str))
    if any(isinstance(path, str) and len(path) > _MAX_ATTRIBUTE for path in paths):
        raise LimitError(f"an attribute has more than {_MAX_ATTRIBUTE} characters")
    current.get().step((2 + parts) * len(value) if isinstance(value, (str, list, tuple, dict, range)) else 0)


def _refuse_objects(name: str, value: Any) -> None:
    """Most filters convert their argument to text, and Jinja's own objects can print for ever: see `text_of`."""
    if isinstance(value, (Namespace, Macro)) and name not in ("d", "default"):
        raise LimitError(f"{name}: expected text, a number, a list or a dict, got a {type(value).__name__}")


def _make_paying(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Jinja's filter, paying for what it reads and makes. A lazy result is computed, and returned as an iterator."""
    wants = _PassArg.from_obj(function)

    # pass_context also keeps Jinja from evaluating the filter when it compiles, where there is no budget.
    @pass_context
    def filter_function(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = current.get()
        for item in (value, *args, *kwargs.values()):
            _refuse_objects(name, item)
            if name not in _GLANCES:
                budget.read(item)
        if name in _BY_ATTRIBUTE:
            _pay_attribute(value, *(args if name != "map" else ()), kwargs.get("attribute"))
        elif name == "title" and isinstance(value, str) and len(value) > _MAX_TITLE:
            raise LimitError(f"title takes at most {_MAX_TITLE} characters")
        pay_search(name, value, *args, *kwargs.values())
        passed = {_PassArg.eval_context: context.eval_ctx, _PassArg.environment: context.environment}
        extra = () if wants is None else (passed.get(wants, context),)
        result = function(*extra, value, *args, **kwargs)
        if isinstance(result, Iterator):
            items = _pay_items(result)
            budget.made(items)
            return iter(items)  # as in Jinja: true in a test, no length, walked once
        return budget.made(result)

    return filter_function


@pass_context
def _replace(context: Context, value: Any, old: Any, new: Any, count: int | None = None) -> Any:
    text = value if isinstance(value, str) else text_of(value)
    current.get().will_make(size_after_replace(text, old, new, count))
    return text.replace(old, new, -1 if count is None else count)


@pass_context
def _join(context: Context, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    items = _pay_items(value)
    if attribute is not None:
        _pay_attribute(items, attribute)
        items = [context.environment.getitem(item, attribute) for item in items]
    budget = current.get()
    budget.made(items)
    budget.will_make(size_after_join(items, d))
    return budget.made(d.join(map(text_of, items)))


@pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """transformers' tojson: json.dumps without Jinja's escaping of <, >, & and '."""
    budget = current.get()
    size, depth = measure(value, budget.value_limit)
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= 16):
        raise LimitError("tojson takes an indent from 0 to 16")
    if separators is not None and (measure(separators, 64)[0] > 64 or len(separators) != 2):
        raise LimitError("tojson takes two short separators")
    budget.will_make(size * (1 + (indent or 0) * depth // 8))
    return budget.made(
        json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    )


@pass_context
def _indent(context: Context, s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    wide = len(width) if isinstance(width, str) else int(width)
    if not isinstance(s, str) or not 0 <= wide <= 64:
        raise LimitError("indent takes a string and a width from 0 to 64")
    current.get().will_make(len(s) + wide * (1 + len(s.splitlines())))
    indented: str = FILTERS["indent"](s, width, first, blank)
    return indented


def _make_paying_test(name: str, test: Any) -> Callable[..., bool]:
    @pass_context
    def test_function(context: Context, value: Any, *args: Any) -> bool:
        for item in (value, *args):
            current.get().read(item)
        if name in ("lower", "upper"):  # these two print
            _refuse_objects(name, value)
        passed: bool = test(value, *args)
        return passed

    return test_function


TESTS = {name: _make_paying_test(name, test) for name, test in DEFAULT_TESTS.items() if name not in ("filter", "test")}
FILTERS_ALLOWED: dict[str, Callable[..., Any]] = {
    **{name: _make_paying(name, FILTERS[name]) for name in PLAIN_FILTERS.split()},
    "replace": _replace,
    "join": _join,
    "tojson": _tojson,
    "indent": _indent,
}


def text_of(value: Any) -> str:
    """A value as `{{ }}` prints it: only text, numbers, lists and dicts, as Jinja's own objects can print for ever."""
    current.get().made(value)
    if value is None or isinstance(value, (str, int, float, list, tuple, dict, Undefined)):
        return str(value)
    raise LimitError(f"cannot print a {type(value).__name__}")


def raise_exception(message: Any = "") -> None:
    """Called by a template to refuse a conversation."""
    raise TemplateError(text_of(message)[:500])


def strftime_now(format: str) -> str:
    """The time now, for templates that write today's date."""
    if not isinstance(format, str) or len(format) > 64 or not _TIME_FORMAT.fullmatch(format):
        raise LimitError("strftime_now takes a short format without widths")
    return datetime.now().strftime(format)


def bounded_range(*args: int) -> range:
    result = range(*args)
    if len(result) > 100_000:
        raise LimitError(f"range of {len(result)} items")
    return result


class SafeNamespace(Namespace):
    """Jinja's namespace, without names that begin with an underscore (as in transformers)."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_public(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        Namespace.__setitem__(self, name, value)


def _check_public(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise LimitError(f"a namespace cannot hold {name!r:.80}")


GLOBALS: dict[str, Callable[..., Any]] = {
    "range": bounded_range,
    "dict": lambda *args, **kwargs: dict(*args, **kwargs),  # a function, because the type itself has methods
    "namespace": SafeNamespace,
    "raise_exception": raise_exception,
    "strftime_now": strftime_now,
}
