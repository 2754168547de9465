"""Mutants of the package's Python files: one small edit each, by syntax tree, on lines that were executed."""

from __future__ import annotations

import ast
import copy
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = Path(__file__).resolve().parent.parent / "bitnet_ref"

Executed = dict[str, list[int]]  # file in the package -> its executed lines


@dataclass(frozen=True)
class Mutant:
    """One edit. `text` is the whole edited source of a Python file, `line` where the edit begins; `number` selects a
    mutant of the kernels."""

    file: str  # relative to the package
    place: str  # the function
    old: str  # the line or lines
    new: str
    text: str = ""
    line: int = 0
    number: int = 0

    @property
    def name(self) -> str:
        place = f"{self.file} {self.place}" if self.place else self.file
        return f"{place}: {self.old} -> {self.new}"


OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
_PAIRS = """slots positions; keys values; key value; k v; q k; gate up; gate_proj up_proj; q_proj k_proj; k_proj v_proj;
    attn_norm ffn_norm; attn_sub_norm ffn_sub_norm; lower upper; cos sin; min max; any all; start stop; first last;
    argmax argmin; zeros ones; append extend; capacity slots; num_attention_heads num_key_value_heads"""
EXCHANGED = {a: b for pair in _PAIRS.split(";") for a, b in (pair.split(), pair.split()[::-1])}


LEFT_ALONE = ("strict", "encoding", "help")  # keywords: an assertion, what is the default where it is UTF-8, a text
SYMMETRIC = ("min", "max", "is_same_file", "np.array_equal", "np.maximum", "np.minimum")
NOT_SWAPPED = (*SYMMETRIC, "isinstance", "getattr", "hasattr", "field", "cast", "require", "log.info", "log.debug")


def python_mutants(executed: Executed) -> list[Mutant]:
    """Every mutant of the executed lines."""
    return [mutant for file in sorted(executed) for mutant in file_mutants(file, set(executed[file]))]


def file_mutants(file: str, lines: set[int]) -> Iterator[Mutant]:
    """The mutants of one file of the package, on these lines."""
    source = (PACKAGE / file).read_text(encoding="utf-8")
    rows = source.splitlines(keepends=True)
    seen = {source}
    for node, place, names in _computing_nodes(ast.parse(source)):
        if node.lineno not in lines:
            continue
        start, end = (
            _offset(rows, *at) for at in ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
        )
        before, after = source.rindex("\n", 0, start) + 1 if start else 0, source.index("\n", end)
        for changed in _changes(node, names):
            new = ast.unparse(changed)
            new = new if isinstance(node, ast.stmt) else f"({new})"
            text = source[:start] + new + source[end:]
            if text not in seen:
                seen.add(text)
                old_line, new_line = source[before:after], source[before:start] + new + source[end:after]
                yield Mutant(file, place, _one_line(old_line), _one_line(new_line), text, node.lineno)


def _one_line(code: str) -> str:
    return " ".join(code.split())


def _offset(rows: Sequence[str], line: int, column: int) -> int:
    before = rows[line - 1].encode()[:column].decode()  # the tree counts columns in bytes
    return sum(len(row) for row in rows[: line - 1]) + len(before)


def _computing_nodes(tree: ast.Module) -> Iterator[tuple[Any, str, set[str]]]:
    """Each statement and expression, the function in which it stands, and that function's names. Annotations,
    decorators, messages, assertions and docstrings are left out."""
    # The 1 in reshape(n, -1): NumPy takes any negative number there
    any_number = {
        id(argument.operand)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "reshape"
        for argument in call.args
        if isinstance(argument, ast.UnaryOp)
    }

    def visit(node: ast.AST, place: str, names: set[str]) -> Iterator[tuple[Any, str, set[str]]]:
        if id(node) in any_number:
            return
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.arg):
            return
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        if isinstance(node, ast.keyword) and node.arg in LEFT_ALONE:
            return
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            place = f"{place}.{node.name}" if place else node.name
        if isinstance(node, ast.FunctionDef):
            names = {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
            names |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        if isinstance(node, ast.expr | ast.stmt):
            yield node, place, names
        for field, children in ast.iter_fields(node):
            for child in children if isinstance(children, list) else [children]:
                if isinstance(child, ast.AST) and field not in ("annotation", "returns", "decorator_list"):
                    yield from visit(child, place, names)

    for node in tree.body:
        yield from visit(node, "", set())


def _changes(node: Any, names: set[str]) -> Iterator[Any]:
    """The node with one mistake, each in turn. names: those of its function."""

    def changed(**fields: Any) -> Any:
        made = copy.copy(node)
        for field, value in fields.items():
            setattr(made, field, value)
        return made

    match node:
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in OPERATORS:
            yield changed(op=OPERATORS[type(op)]())
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                yield changed(ops=[*ops[:i], OPERATORS[type(op)](), *ops[i + 1 :]])
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node.operand
        case ast.Constant(value=bool() as value):
            yield changed(value=not value)
        case ast.Constant(value=int() | float() as value):
            yield changed(value=value + 1)
        case ast.IfExp():
            yield changed(body=node.orelse, orelse=node.body)
        case ast.Attribute(attr=attr, ctx=ast.Load()) if attr in EXCHANGED:
            yield changed(attr=EXCHANGED[attr])
        case ast.Name(id=name, ctx=ast.Load()) if EXCHANGED.get(name) in names:
            yield changed(id=EXCHANGED[name])
        case ast.Call(func=func, args=args, keywords=keywords) if ast.unparse(func) not in NOT_SWAPPED:
            are_exchangeable = len(args) > 1 and not any(isinstance(arg, ast.Starred) for arg in args)
            if are_exchangeable and ast.dump(args[0]) != ast.dump(args[1]):
                yield changed(args=[args[1], args[0], *args[2:]])
            if keywords and keywords[-1].arg not in LEFT_ALONE:
                yield changed(keywords=keywords[:-1])
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Assign(targets=[ast.Subscript() | ast.Attribute()]):
            yield ast.Pass()


def executed_lines(work: Callable[[], object]) -> Executed:
    """The lines of the package that `work` executes, imports included, of files of which it calls a function."""
    root = f"{PACKAGE}{os.sep}"
    executed: dict[str, set[int]] = {}
    called = set()

    def enter(frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(root):
            return None
        file = frame.f_code.co_filename[len(root) :]
        lines = executed.setdefault(file, set())
        if frame.f_code.co_name != "<module>":
            called.add(file)

        def line(frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
            lines.add(frame.f_lineno)
            return line

        return line(frame, event, arg)

    threading.settrace(enter)
    sys.settrace(enter)
    try:
        work()
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
    return {file: sorted(executed[file]) for file in called}
