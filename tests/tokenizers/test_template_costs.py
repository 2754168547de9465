"""What each part of a chat template gives, and what it pays for it: steps, characters made, characters printed.

The limits of tests/tokenizers/test_template_limits.py rest on these prices. When a change is meant, running this file
records it.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers import DATA
from jinja2.exceptions import TemplateError

from bitnet_ref.tokenizers.templates import limits, sandbox

RECORDED = DATA / "tokenizers" / "template_costs.json"
LONG = "The quick brown fox, " * 40
VARIABLES: dict[str, Any] = {
    "text": LONG,
    "words": ["red", "Blue", "green", "Blue"] * 20,
    "numbers": [3, 1, 2, 2.5],
    "table": {"b": 1, "a": [1, "x"]},
    "messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": " World "}],
    "nothing": None,
}
FILTERS = (
    *("numbers[0] | abs", "text | capitalize", "words | count", "missing | d('x')", "missing | default(text)"),
    *("table | dictsort", "words | first", "'2.5' | float", "'12' | int", "table | items | list", "words | last"),
    *("words | length", "'abc' | list", "text | lower", "words | map('upper') | list", "numbers | max"),
    *(
        "numbers | min",
        "words | reject('equalto', 'red') | list",
        "messages | rejectattr('role', 'equalto', 'user') | list",
    ),
    *("words | reverse | list", "text | reverse", "text | safe", "numbers | select('gt', 2) | list"),
    *("messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list", "words | sort"),
    *("messages | sort(attribute='content,role')", "text | string", "('ab cd' * 9) | title", "text | trim"),
    *("text | trim('T ,xyz')", "words | unique | list", "messages | unique(attribute='role') | list", "text | upper"),
    *("text | replace('fox', 'hedgehog')", "text | replace('fox', '', 3)", "12345 | replace('3', 'xyz')"),
    *("words | join", "words | join(' and ')", "messages | join('-', attribute='role')", "'abc' | join('--')"),
    *("table | tojson", "table | tojson(indent=2)", "table | tojson(sort_keys=True)", "messages | tojson(indent=16)"),
    *("['é', 1, none] | tojson", "['é'] | tojson(ensure_ascii=True)", "table | tojson(separators=(',', ':'))"),
    *("'a\\nb\\n\\nc' | indent", "'a\\nb\\n\\nc' | indent(2, true)", "'a\\n\\nc' | indent('>>', blank=true)"),
    *("messages | map(attribute='role') | join", "words | map('replace', 'e', 'ee') | join"),
)
METHODS = (
    *("text.capitalize()", "text.count('fox')", "text.endswith(', ')", "text.find('fox')", "text.index('fox', 99)"),
    *("'a1'.isalnum()", "'a'.isalpha()", "'a'.isascii()", "'1'.isdecimal()", "'1'.isdigit()", "'a'.islower()"),
    *("'1'.isnumeric()", "' '.isspace()", "'Ab'.istitle()", "'A'.isupper()", "', '.join(words)", "text.lower()"),
    *("text.lstrip('The ')", "text.partition('fox')", "'abc'.removeprefix('a')", "'abc'.removesuffix('c')"),
    *("text.replace('fox', 'hedgehog')", "text.replace('fox', 'x', 2)", "text.rfind('fox')", "text.rindex('fox')"),
    *(
        "text.rpartition('fox')",
        "text.rsplit(' ', 3)",
        "text.rstrip(', ')",
        "text.split('fox')",
        "'a\\nb'.splitlines()",
    ),
    *("text.startswith('The')", "text.strip('T, ')", "text.swapcase()", "'ab cd'.title()", "text.upper()"),
    *("words.count('Blue')", "words.index('green')", "(1, 2, 2).count(2)", "(1, 2).index(2)"),
    *("table.get('a')", "table.get('z', 'other')", "table.items()", "table.keys()", "table.values()"),
)
EXPRESSIONS = (
    *("1 + 2 * 3 - 4 / 2 // 1 % 5", "'ab' + 'cd'", "'ab' * 50", "[1, 2] * 9", "9 * 'ab'", "words + [1]", "-3", "+3"),
    *("'a' ~ 1 ~ none ~ text", "text[3:9]", "text[::2]", "words[-1]", "words[1:3]", "table['b']", "table.b", "text[0]"),
    *("'fox' in text", "'cat' not in text", "1 < 2 <= 2", "text == text", "words != numbers", "3 >= 3.0", "1 > 2"),
    *(
        "true and 'x'",
        "false or 'y'",
        "not 1",
        "'a' if words else 'b'",
        "'a' if 0",
        "[1, [2, (3,)]]",
        "{'a': {'b': text}}",
    ),
    *(
        "dict(a=1, b=text)",
        "range(5) | list",
        "range(2, 9, 3) | list",
        "missing",
        "missing is defined",
        "text is string",
    ),
    *("3 is odd", "6 is divisibleby 3", "words is iterable", "nothing is none", "'A' is upper", "text is in words"),
    *("table is mapping", "3 is number", "words is sequence", "1 is eq 1", "1 is sameas 1", "true is boolean"),
)
STATEMENTS = (
    "plain text of some length, which costs by its characters",
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% if not loop.last %}, {% endif %}{% endfor %}",
    "{% for w in words %}{% for n in numbers %}{{ n }}{% endfor %}{% endfor %}",
    "{% for w in words if w == 'red' %}{{ loop.index }}{% else %}none{% endfor %}",
    "{% for w in words %}{% if loop.index > 3 %}{% break %}{% endif %}"
    "{% if w == 'Blue' %}{% continue %}{% endif %}{{ w }}{% endfor %}",
    "{% for w in words %}{{ loop.cycle('a', 'b') }}{{ loop.changed(w) }}{% endfor %}",
    "{% for k, v in table.items() %}{{ k }}={{ v }};{% endfor %}",
    "{% set ns = namespace(n=0, t='') %}{% for w in words %}{% set ns.n = ns.n + 1 %}{% set ns.t = ns.t ~ w %}"
    "{% endfor %}{{ ns.n }}{{ ns.t }}",
    "{% macro f(a, b='x') %}[{{ a }}{{ b }}{{ varargs | length }}{{ kwargs | length }}]{% endmacro %}"
    "{{ f(1) }}{{ f(2, text) }}",
    "{% macro f(n) %}{% if n %}{{ n }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(9) }}",
    "{% macro f() %}<{{ caller() }}>{% endmacro %}{% call f() %}inner {{ words | length }}{% endcall %}",
    "{% filter upper %}loud {{ words[0] }}{% endfilter %}",
    "{% with a = 1, b = text %}{{ a }}{{ b | length }}{% endwith %}",
    "{% set x %}a block of {{ words | length }}{% endset %}{{ x }}{{ x }}",
    "{% generation %}{{ messages[1].content }}{% endgeneration %}",
    "{% if words | length > 3 and 'red' in words %}many{% elif words %}some{% else %}none{% endif %}",
    "{%- for w in words[:2] -%}  {{ w }}  {%- endfor -%}",
    "{% for w in words[:3] %}The text between the marks is printed in each pass, too.{% endfor %}",
)
SOURCES = (*(f"{{{{ {each} }}}}" for each in (*FILTERS, *METHODS, *EXPRESSIONS)), *STATEMENTS)


def spend(source: str) -> list[Any]:
    """[the text, steps, size, printed]"""
    budgets: list[limits.Budget] = []

    class Kept(limits.Budget):
        def __init__(self, variables: dict[str, Any]) -> None:
            super().__init__(variables)
            budgets.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "Budget", Kept)
        text = sandbox.render(sandbox.compile_template(source), VARIABLES)
    (budget,) = budgets
    fresh = limits.Budget(VARIABLES)
    return [text, fresh._steps - budget._steps, fresh._size - budget._size, budget.printed]


def test_what_templates_give_and_pay() -> None:
    recorded = json.loads(RECORDED.read_text())
    assert list(recorded) == list(SOURCES)
    assert {source: spend(source) for source in SOURCES} == recorded


def test_the_budget_grows_with_what_is_given() -> None:
    for given in (0, 1, 1000):
        budget = limits.Budget({"a": "x" * given})
        assert budget.value_limit == (1 << 20) + 16 * given
        assert (budget._size, budget._steps) == (64 * budget.value_limit, 2_000_000 + 32 * given)


def test_the_last_step_and_character_of_a_budget() -> None:
    budget = limits.Budget({})
    budget.step(2_000_000)
    budget.step(511)  # it looks after 512
    with pytest.raises(limits.LimitError, match="more work"):
        budget.step(2)
    budget = limits.Budget({})
    for _ in range(64):
        budget.will_make(1 << 20)
    with pytest.raises(limits.LimitError, match="more text"):
        budget.will_make(1)
    budget = limits.Budget({})
    budget.print(1 << 20)
    with pytest.raises(limits.LimitError, match="the text grows"):
        budget.print(1)
    with pytest.raises(limits.LimitError, match="a value grows"):
        limits.Budget({}).will_make((1 << 20) + 1)


COUNT_DOWN = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}"


@pytest.mark.parametrize(
    ("source", "good", "bad", "message"),
    [
        ("TEXT", 1 << 18, (1 << 18) + 1, "more than 262144 characters"),
        ("{{ range(NUMBER) | length }}", 100_000, 100_001, "range of"),
        ("{{ [1] | map(attribute='TEXT') | list }}", 256, 257, "more than 256 characters"),
        ("{{ ('a' * NUMBER) | title | length }}", 65536, 65537, "title takes at most 65536"),
        ("{{ [1] | tojson(indent=NUMBER) }}", 16, 17, "indent from 0 to 16"),
        ("{{ [1] | tojson(separators=('TEXT', 'b')) }}", 39, 41, "grows past 64|two short separators"),
        ("{{ strftime_now('TEXT') }}", 64, 65, "strftime_now"),
        (COUNT_DOWN + "{{ f(NUMBER) }}", 31, 32, "32 deep"),
        ("{{ NUMBER }}", (1 << 63) - 1, 1 << 63, "63 bits"),
    ],
)
def test_the_last_that_is_taken(source: str, good: int, bad: int, message: str) -> None:
    def render(number: int) -> str:
        text = source.replace("TEXT", "x" * number) if "TEXT" in source else source.replace("NUMBER", str(number))
        return sandbox.render(sandbox.compile_template(text), VARIABLES)

    render(good)
    with pytest.raises(TemplateError, match=message):
        render(bad)


if __name__ == "__main__":
    lines = [f"{json.dumps(source)}: {json.dumps(spend(source), ensure_ascii=False)}" for source in SOURCES]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
