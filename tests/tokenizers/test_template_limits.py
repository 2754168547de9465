"""Chat templates that would work, grow or dig for ever, or leave the sandbox: each is stopped, at once and by name."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import jinja2.defaults
import pytest

from bitnet_ref.errors import TokenizerError
from bitnet_ref.tokenizers.templates import filters, limits
from bitnet_ref.tokenizers.templates.chat_template import ChatTemplate
from bitnet_ref.tokenizers.templates.filters import METHODS

HELLO = [{"role": "user", "content": "Hello"}]
# 2^20 characters of text in ns.x, honestly doubled to just under the limit of one value.
MEGABYTE = "{% set ns = namespace(x='ab') %}{% for i in range(19) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
LOOP = "{% for i in range(99999) %}"
# Two names for each of 40 objects: in print, 2^40 of them.
WEB = "{% set n0 = namespace(a=1) %}" + "".join(f"{{% set n{i + 1} = namespace(a=n{i}, b=n{i}) %}}" for i in range(40))

TOO_MUCH = {
    "power": ("{{ 10 ** 10 }}", "Pow is not available"),
    "repeated text": ("{{ 'a' * 1000000000 }}", "grows past"),
    "repeated list": ("{% set x = [1] * 1000000000 %}", "grows past"),
    "big integers": ("{{ 1000000000000 * 1000000000000 }}", "63 bits"),
    "big literal": ("{{ 99999999999999999999 }}", "63 bits"),
    "text width": ("{{ '%1000000000d' % 1 }}", "% on text"),
    "format method": ("{{ '{:1000000000}'.format(1) }}", "'format' of 'str' object is unsafe"),
    "padding method": ("{{ 'a'.zfill(1000000000) }}", "unsafe"),
    "padding filter": ("{{ 'a' | center(1000000000) }}", "not available"),
    "date width": ("{{ strftime_now('%1000000000d') }}", "without widths"),
    "text that doubles": (MEGABYTE.replace("19", "60"), "grows past"),
    "text that doubles by +": (MEGABYTE.replace("~", "+").replace("19", "60"), "grows past"),
    "text that doubles in a block": (
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
        "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
        "grows past",
    ),
    "list that doubles": (
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}",
        "grows past",
    ),
    "list that digs": (
        "{% set ns = namespace(x=[]) %}{% for i in range(60) %}{% set ns.x = [ns.x] %}{% endfor %}",
        "nested more than 40 deep",
    ),
    "dict that doubles": ("{% set d = {} %}" + "{% set d = dict(a=d, b=d) %}" * 39, "grows past"),
    "replace": (MEGABYTE + "{{ ns.x.replace('a', ns.x) }}", "grows past"),
    "replace filter": (MEGABYTE + "{{ ns.x | replace('', ns.x) }}", "grows past"),
    "join": (MEGABYTE + "{{ ns.x.join(['a'] * 1000) }}", "grows past"),
    "join filter": (MEGABYTE + "{{ ['a', 'b', 'c'] | join(ns.x) }}", "grows past"),
    "split": (MEGABYTE + "{{ ns.x.split('a') | length }}", "grows past"),
    "filter block": ("{% filter replace('a', 'aaaaaaaa') %}" * 12 + "a" + "{% endfilter %}" * 12, "grows past"),
    "indent": ("{{ 'a' | indent(1000000000) }}", "width from 0 to 64"),
    "tojson indent": ("{{ [1] | tojson(indent=1000000000) }}", "indent from 0 to 16"),
    "long output": (MEGABYTE + "{{ ns.x }}{{ ns.x }}", "grows past"),
    "nested loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "more work than",
    ),
    "long range": ("{% for i in range(1000000000000) %}{% endfor %}", "range of 1000000000000 items"),
    "loop of searches": (MEGABYTE + LOOP + "{% if 'zz' in ns.x %}{% endif %}{% endfor %}", "more work"),
    "loop of methods": (MEGABYTE + LOOP + "{% if ns.x.find('zz') %}{% endif %}{% endfor %}", "more work"),
    "loop of tests": (MEGABYTE + LOOP + "{% if ns.x is eq(ns.x) %}{% endif %}{% endfor %}", "more work"),
    "loop of copies": (MEGABYTE + LOOP + "{% set y = ns.x | upper %}{% endfor %}", "more work than"),
    "loop of slices": (MEGABYTE + LOOP + "{% set y = ns.x[1:] %}{% endfor %}", "more text than"),
    "recursive macro": ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "more than 32 deep"),
    "branching macro": (
        "{% macro f(n) %}{% if n < 25 %}{{ f(n + 1) }}{{ f(n + 1) }}{% endif %}{% endmacro %}{{ f(0) }}",
        "more work",
    ),
    "recursive loop": ("{% for x in [[1]] recursive %}{{ loop(x) }}{% endfor %}", "recursive loops"),
    "printed web": (WEB + "{{ n40 }}", "cannot print a SafeNamespace"),
    "web as text": (WEB + "{{ n40 | string }}", "expected text"),
    "web in a list": (WEB + "{{ [n40] }}", "a SafeNamespace inside a list"),
    "web in a keyword": (WEB + "{{ 'a' | trim(chars=n40) }}", "trim: expected text"),
    "web in an error": (WEB + "{{ raise_exception(n40) }}", "cannot print"),
    "web in a test": (WEB + "{% if n40 is lower %}{% endif %}", "expected text"),
    "deep brackets": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nested too deeply"),
    "deep blocks": ("{% if 1 %}" * 2000 + "{% endif %}" * 2000, "nested too deeply"),
    "long sum": ("{{ 1" + " + 1" * 5000 + " }}", "deeper than"),
    "many parts": ("{{ 1 }}" * 20000, "more than 20000 parts"),
    "long attribute": ("{{ (['a'] * 100000) | map(attribute='x.' * 20000) | list }}", "more than 256"),
    "deep attributes": (
        "{% set l = [dict(x=1)] * 20000 %}{{ l | sort(attribute='x,' * 120 ~ 'x') }}",
        "more work",
    ),
    **{
        f"long needle of {name}": (f"{{% set x = 'a' * 500000 %}}{{{{ x.{name}('b' ~ 'a' * 200000) }}}}", "more work")
        for name in ("rfind", "rindex", "rsplit", "rpartition", "strip", "lstrip", "rstrip")
    },
    "trim of many": ("{{ ('a' * 500000) | trim('b' * 200000 ~ 'a') }}", "more work"),
    "title of a book": ("{{ ('a ' * 40000) | title }}", "at most 65536 characters"),
    "text in a range": (LOOP + "{% if 'a' in range(99999) %}{% endif %}{% endfor %}", "more work"),
    "largest of a range": (LOOP + "{% if range(99999) | max %}{% endif %}{% endfor %}", "more work"),
    "many arguments": (LOOP + "{{ loop.cycle(*range(99999)) }}{% endfor %}", "more work"),
    "many names in many blocks": (
        "".join(f"{{% set a{n} = 1 %}}" for n in range(1500)) + "{% if x %}{% endif %}" * 1000,
        "very many assignments",
    ),
    "long source": ("a" * 300_000, "more than 262144 characters"),
}  # fmt: skip

FORBIDDEN = {
    "class": "{{ ''.__class__.__mro__ }}",
    "init": "{{ raise_exception.__globals__.x }}",
    "macro insides": "{% macro f() %}{% endmacro %}{{ f._func.x }}",
    "change a message": "{{ messages[0].update({'role': 'system'}) }}",
    "change a list": "{{ messages.append(1) }}",
    "private namespace": "{% set ns = namespace(_x=1) %}",
    "private namespace of a dict": "{% set ns = namespace({'_x': 1}) %}",
    "lipsum": "{{ lipsum(100) }}",
    "extends": "{% extends 'x' %}",
    "block": "{% block a %}{{ self.a() }}{% endblock %}",
    "import": "{% import 'x' as y %}",
    "autoescape": "{% autoescape true %}{% endautoescape %}",
    "groupby": "{{ messages | groupby('role') }}",
    "a filter by name": "{{ messages | map('center', 1000000000) | list }}",
}


@pytest.mark.sample(9)
@pytest.mark.parametrize("name", TOO_MUCH)
def test_too_much_is_stopped(name: str) -> None:
    source, message = TOO_MUCH[name]
    start = time.process_time()
    with pytest.raises(TokenizerError, match=message.replace("(", r"\(")) as caught:
        ChatTemplate(source).render(HELLO)
    assert (caught.value.field or "").startswith("chat_template")
    # Unbounded, each of these takes hours or all memory. The bound is loose: machines differ, and are shared.
    assert time.process_time() - start < 6


@pytest.mark.parametrize("name", FORBIDDEN)
def test_the_forbidden_is_refused(name: str) -> None:
    with pytest.raises(TokenizerError, match="chat_template"):
        ChatTemplate(FORBIDDEN[name]).render(HELLO)


# Every place of a template where an expression may stand
PLACES = (
    *("{{ X }}", "{{ (X) }}", "{{ [1, X] }}", "{{ (1, X) }}", "{{ {'a': X} }}", "{{ {X: 'a'} }}", "{{ 'a' ~ X }}"),
    *("{{ X + 1 }}", "{{ 1 * X }}", "{{ -X }}", "{{ +X }}", "{{ not X }}", "{{ X and 1 }}", "{{ 0 or X }}"),
    *("{{ X < 1 }}", "{{ 1 < 2 < X }}", "{{ X in 'a' }}", "{{ 'a' not in X }}", "{{ messages[X] }}", "{{ X[0] }}"),
    *("{{ messages[X:] }}", "{{ messages[:X] }}", "{{ messages[::X] }}", "{{ X[1:2] }}", "{{ X.a }}", "{{ X(1) }}"),
    *("{{ range(X) }}", "{{ dict(a=X) }}", "{{ range(*X) }}", "{{ dict(**X) }}", "{{ X | upper }}", "{{ 'a' | d(X) }}"),
    *("{{ 'a' | join(d=X) }}", "{{ X is odd }}", "{{ 1 is divisibleby(X) }}", "{{ X if 1 }}", "{{ 1 if X else 2 }}"),
    *(
        "{{ 1 if 0 else X }}",
        "{% if X %}{% endif %}",
        "{% if 0 %}{% elif X %}{% endif %}",
        "{% if 1 %}{{ X }}{% endif %}",
    ),
    *("{% if 0 %}{% else %}{{ X }}{% endif %}", "{% for i in X %}{% endfor %}", "{% for i in [] %}{{ X }}{% endfor %}"),
    *("{% for i in [] if X %}{% endfor %}", "{% for i in [] %}{% else %}{{ X }}{% endfor %}", "{% set a = X %}"),
    *("{% set a %}{{ X }}{% endset %}", "{% set a | upper %}{{ X }}{% endset %}", "{% with a = X %}{% endwith %}"),
    *("{% with %}{{ X }}{% endwith %}", "{% macro f() %}{{ X }}{% endmacro %}", "{% macro f(a=X) %}{% endmacro %}"),
    "{% macro f() %}{% endmacro %}{% call f(X) %}{% endcall %}",
    "{% macro f() %}{% endmacro %}{% call f() %}{{ X }}{% endcall %}",
    *("{% filter upper %}{{ X }}{% endfilter %}", "{% filter d(X) %}{% endfilter %}"),
    "{% generation %}{{ X }}{% endgeneration %}",
    "{% set ns = namespace() %}{% set ns.a = X %}",
)


@pytest.mark.parametrize("place", PLACES)
def test_the_forbidden_is_refused_wherever_it_stands(place: str) -> None:
    for forbidden, message in (
        ("('a' | center(9))", "the filter 'center' is not available"),
        ("(1 is filter)", "the test 'filter' is not available"),
        ("(2 ** 3)", "Pow is not available"),
        ("9999999999999999999999", "an integer of more than 63 bits"),
    ):
        with pytest.raises(TokenizerError, match=message):
            ChatTemplate(place.replace("X", forbidden))


def test_what_is_no_function_is_not_called() -> None:
    with pytest.raises(TokenizerError, match="a str cannot be called in a chat template"):
        ChatTemplate("{{ 'a'() }}").render(HELLO)


def test_honest_templates_have_room() -> None:
    assert len(ChatTemplate(MEGABYTE + "{{ ns.x }}").render(HELLO)) == 1 << 20
    loop = "{% for m in messages %}{% if m.role == 'user' %}<{{ m.content | trim }}>{% endif %}{% endfor %}"
    assert len(ChatTemplate(loop).render(HELLO * 5000)) == 5000 * len("<Hello>")


def test_what_is_just_within_the_limits() -> None:
    """And one more of each is not."""
    nested: list[object] = []
    for _ in range(39):
        nested = [nested]
    assert limits.measure(nested, 1000) == (8 * (40 + 39), 40)
    assert limits.measure([2**63 - 1, 1 - 2**63, None, 1.5, "ab"], 1000) == (8 * 6 + 4 + 2, 1)
    assert limits.measure({"a": "bc", "d": []}, 1000) == (8 * 3 + 1 + 2 + 1 + 8, 2)
    assert limits.measure("ab", 2) == (2, 0)
    for value, limit in (([nested], 1000), ([2**63], 1000), ([-(2**63)], 1000), ("abc", 2), ([1], 16)):
        with pytest.raises(limits.LimitError):
            limits.measure(value, limit)
    assert ChatTemplate("{{ 'a\nb' | indent(0) }}{{ 'a\nb' | indent(64) }}").render(HELLO) == "a\nba\n" + " " * 64 + "b"
    with pytest.raises(TokenizerError, match="width from 0 to 64"):
        ChatTemplate("{{ 'a' | indent(65) }}").render(HELLO)
    assert ChatTemplate("{{ 1" + " + 1" * 148 + " }}").render(HELLO) == "149"
    with pytest.raises(TokenizerError, match="deeper than 150 is refused"):
        ChatTemplate("{{ 1" + " + 1" * 149 + " }}")


def test_a_template_can_be_used_again_after_it_was_stopped() -> None:
    template = ChatTemplate("{% if messages | length > 1 %}{{ 'a' * 1000000000 }}{% endif %}fine")
    with pytest.raises(TokenizerError):
        template.render(HELLO * 2)
    assert template.render(HELLO) == "fine"


# Everything that a value in the sandbox can do, and what a call of it costs at most: a template pays for it by
# "reads" (the lengths of what it reads and makes), "product" (of both lengths) or "items" (and the parts of a path).
METHODS_ALLOWED = {
    str: {
        "reads": "capitalize count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric "
        "isspace istitle isupper join lower partition removeprefix removesuffix replace split splitlines startswith "
        "swapcase title upper",
        "product": "lstrip rfind rindex rpartition rsplit rstrip strip",
    },
    list: {"reads": "count index"},
    tuple: {"reads": "count index"},
    dict: {"reads": "get items keys values"},
}
FILTERS_ALLOWED = {
    "reads": "abs capitalize count d default dictsort first float indent int items join last length list lower reject "
    "replace reverse safe select string title tojson upper",
    "product": "trim",
    "items": "map max min rejectattr selectattr sort unique",
}
VALUES = {
    str: "('a' * 500000)",
    list: "(['aa', 'b'] * 30000)",
    tuple: "('a', ('b', 'c'))",
    dict: "dict(a='b' * 500000)",
}
ARGUMENTS = ["", "'b' ~ 'a' * 200000", "'a', 'a' * 200000", "'a.b,' * 60", "['a'] * 60000", "99999, 99999", "'a'"]


def names_of(classes: dict[str, str]) -> set[str]:
    return {name for names in classes.values() for name in names.split()}


@pytest.mark.thorough
def test_the_list_of_what_a_value_can_do_is_complete() -> None:
    for kind, classes in METHODS_ALLOWED.items():
        assert METHODS[kind] == names_of(classes)
        for name in dir(kind):
            if name not in METHODS[kind]:
                with pytest.raises(TokenizerError, match=r"unsafe|undefined|cannot be called"):
                    ChatTemplate(f"{{{{ {VALUES[kind]}.{name}() }}}}").render(HELLO)
    assert set(filters.FILTERS_ALLOWED) == names_of(FILTERS_ALLOWED)
    assert set(filters.TESTS) == set(jinja2.defaults.DEFAULT_TESTS) - {"filter", "test"}
    assert set(filters.GLOBALS) == {"range", "dict", "namespace", "raise_exception", "strftime_now"}
    for name in set(jinja2.defaults.DEFAULT_NAMESPACE) - set(filters.GLOBALS):
        with pytest.raises(TokenizerError, match="undefined"):
            ChatTemplate(f"{{{{ {name}(10) }}}}").render(HELLO)
    for name in set(jinja2.defaults.DEFAULT_FILTERS) - set(filters.FILTERS_ALLOWED):
        with pytest.raises(TokenizerError, match="is not available"):
            ChatTemplate(f"{{{{ 'a' | {name} }}}}").render(HELLO)


def calls() -> Iterator[tuple[str, str]]:
    """(name, expression) of every method, filter and test with each of the arguments."""
    for kind, value in VALUES.items():
        for name in sorted(METHODS[kind]):
            yield from ((f"{kind.__name__}.{name}", f"{value}.{name}({given})") for given in ARGUMENTS)
    for value in VALUES.values():
        for name in sorted(filters.FILTERS_ALLOWED):
            yield from ((f"| {name}", f"{value} | {name}({given})") for given in ARGUMENTS)
        for name in sorted(filters.TESTS):
            yield from ((f"is {name}", f"{value} is {name}({given})") for given in ARGUMENTS[:5])


@pytest.mark.thorough
def test_no_single_call_is_long() -> None:
    """A call is not interrupted, so it must pay before it works. Each with one of its arguments, another each time."""
    check_calls(list(calls())[::23])


@pytest.mark.slow
def test_no_call_is_long_with_any_argument() -> None:
    check_calls(list(calls()))


def check_calls(expressions: list[tuple[str, str]]) -> None:
    slowest = (0.0, "")
    for name, expression in expressions:
        start = time.thread_time()
        with contextlib.suppress(TokenizerError):
            ChatTemplate(f"{{% if {expression} %}}{{% endif %}}").render(HELLO)
        slowest = max(slowest, (time.thread_time() - start, f"{name}: {expression}"))
    print(f"{len(expressions)} calls, the slowest {slowest[0]:.2f} s: {slowest[1]}")
    assert slowest[0] < limits.MAX_SECONDS, slowest


def test_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_SECONDS", 0.2)
    template = ChatTemplate("{% set l = [[1] * 99] * 99 %}" + LOOP + "{% set y = l | tojson(indent=2) %}{% endfor %}")
    start = time.thread_time()
    with pytest.raises(TokenizerError, match="works for more than"):
        template.render(HELLO)
    assert time.thread_time() - start < 0.5
    assert ChatTemplate("{{ 'fine' }}").render(HELLO) == "fine"
