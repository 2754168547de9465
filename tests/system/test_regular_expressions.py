"""Every regular expression of the package on texts that make a search quadratic: its time must grow with the text.

The calls are read from the source. Each expression gets texts made of its own characters, repeated behind the beginning
of a match. A quadratic one takes 0.1 s or more for 4,000 characters, a linear one a tenth of a millisecond.
"""

import ast
import importlib
import random
import re
import time
from pathlib import Path

import pytest

import bitnet_ref

try:
    from re import _parser as parser  # since Python 3.11
except ImportError:
    import sre_parse as parser

PACKAGE = Path(bitnet_ref.__file__).parent
METHODS = ("search", "match", "fullmatch", "sub", "split", "findall", "finditer")
LENGTH, MOST_S = 4_000, 0.05

# Of the machine's own user, or of texts that are bounded to some hundred characters: module and expression
SHORT = {
    ("crossval.exercises.answers", r"\s*,\s*"): "a student's answer",
    ("serving.http.page", r"\{\{(.+?)\}\}"): "our own page, when the server starts",
    ("crossval.report", r"\S*\w[-/]\w\S*"): "a sentence of ours, with words of a trace that are cut",
}


def calls():
    """(module, name or None, pattern or None, method) of each use."""
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        named = {}
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Call)
                and isinstance(node.targets[0], ast.Name)
            ) and ast.unparse(node.value.func) == "re.compile":
                named[node.targets[0].id] = node.value
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            owner, method = ast.unparse(node.func.value), node.func.attr
            if owner == "re" and method in METHODS and isinstance(node.args[0], ast.Constant):
                flags = [each.value for each in node.keywords if each.arg == "flags"] + node.args[
                    3 if method == "sub" else 2 :
                ]
                value = 0
                for flag in flags:
                    value |= eval(ast.unparse(flag), {"re": re}) if "re." in ast.unparse(flag) else 0
                yield module, None, re.compile(node.args[0].value, value), method
            elif owner in named and method in METHODS:
                yield module, owner, None, method


def compiled(module, name, pattern):
    return pattern or getattr(importlib.import_module(f"bitnet_ref.{module}"), name, None)


def sample(items, dice):
    """A text that the parsed items match, roughly."""
    out = []
    for op, value in items:
        kind = str(op)
        if kind == "LITERAL":
            out.append(chr(value))
        elif kind == "NOT_LITERAL":
            out.append("b" if value == ord("a") else "a")
        elif kind == "ANY":
            out.append("a")
        elif kind == "IN":
            out.append(member(value, dice))
        elif kind == "BRANCH":
            out.append(sample(dice.choice(value[1]), dice))
        elif kind == "SUBPATTERN":
            out.append(sample(value[-1], dice))
        elif kind in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            out.append(sample(value[2], dice) * max(1, value[0]))
        elif kind == "ATOMIC_GROUP":
            out.append(sample(value, dice))
    return "".join(out)


def member(items, dice):
    if str(items[0][0]) == "NEGATE":
        kept = re.compile("[" + "".join(part_of_class(each) for each in items) + "]")
        return next(c for c in "a 0\n.%b" if kept.match(c))
    return re.sub(r"^\^", "a", chr_of(dice.choice(items)))


def chr_of(item):
    kind, value = str(item[0]), item[1]
    if kind == "LITERAL":
        return chr(value)
    if kind == "RANGE":
        return chr(value[0])
    return {"CATEGORY_DIGIT": "0", "CATEGORY_SPACE": " ", "CATEGORY_WORD": "a"}.get(str(value), "-")


def part_of_class(item):
    kind, value = str(item[0]), item[1]
    names = {"CATEGORY_DIGIT": r"\d", "CATEGORY_SPACE": r"\s", "CATEGORY_WORD": r"\w"}
    if kind == "NEGATE":
        return "^"
    if kind == "LITERAL":
        return re.escape(chr(value))
    return f"{re.escape(chr(value[0]))}-{re.escape(chr(value[1]))}" if kind == "RANGE" else names[str(value)]


def texts(pattern):
    """Texts of the expression's own characters."""
    dice = random.Random(repr(pattern.pattern))
    items = list(parser.parse(pattern.pattern, pattern.flags & ~re.UNICODE))
    starts = {"", *(sample(items[:end], dice) for end in range(1, len(items) + 1) for _ in range(2))}
    letters = {c for start in starts for c in start} | {"\n", " "}
    letters = sorted(letters) if len(letters) <= 8 else dice.sample(sorted(letters), 8)
    pairs = [a + b for a in letters[:4] for b in letters[:4] if a != b]
    for start in sorted(starts, key=lambda start: (len(start), start))[:8]:
        for pump in (*letters, *pairs, start):
            yield start + pump * (LENGTH // max(1, len(pump))) + "\0"


def slowest(regex, method):
    """(processor time in s, start) of the text that takes longest, or of the first that takes too long."""
    use, worst = getattr(regex, method), (0.0, "")
    for text in texts(regex):
        took_s = float("inf")
        for _ in range(3):  # a collection of garbage may fall into one
            start_s = time.process_time()
            result = use("", text) if method == "sub" else use(text)
            if method == "finditer":
                list(result)
            took_s = min(took_s, time.process_time() - start_s)
            if took_s < MOST_S:
                break
        worst = max(worst, (took_s, text[:60]))
        if worst[0] > MOST_S:
            break
    return worst


@pytest.mark.thorough
def test_time_grows_with_the_text():
    slow, count = {}, 0
    for module, name, pattern, method in calls():
        try:
            regex = compiled(module, name, pattern)
        except ImportError:  # a recorder in another engine's process
            continue
        if regex is None or (module, regex.pattern) in SHORT:
            continue
        count += 1
        took_s, text = slowest(regex, method)
        if took_s > MOST_S:
            slow[module, regex.pattern, method] = f"{took_s:.2f} s: {text!r}"
    print(f"{count} expressions")
    assert not slow
    assert count > 50
