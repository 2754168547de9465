"""Running a chat template that is not trusted: Jinja's sandbox, with bounded work.

Three protections. The syntax tree may contain only the nodes, filters and tests of an allow-list. The tree is then
rewritten, so that every loop turn and every list, `~` and slice passes through a function that pays from the budget of
the rendering (`limits`). Operators and calls pay in the environment's own hooks, which also allow only listed methods.
"""

from __future__ import annotations

import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_context
from jinja2.visitor import NodeTransformer

from .filters import FILTERS_ALLOWED, GLOBALS, METHODS, TESTS, pay_search, size_after_join, size_after_replace, text_of
from .limits import MAX_INTEGER, MAX_MACRO_DEPTH, Budget, LimitError, current

MAX_SOURCE = 1 << 18  # characters; the longest published template has about 60,000
MAX_NODES = 20_000
MAX_SCOPES = 1_000_000  # assignments times blocks: Jinja copies the names of all of them for each block
MAX_TREE_DEPTH = 150  # Jinja and Python compile by recursion
_FILE_NAME = "<chat_template>"
_METHOD_TYPES = (types.BuiltinMethodType, types.MethodType)

_ALLOWED_NODES = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.For, nodes.If, nodes.Macro, nodes.CallBlock),
    *(nodes.FilterBlock, nodes.With, nodes.Assign, nodes.AssignBlock, nodes.Break, nodes.Continue, nodes.Scope),
    *(nodes.Name, nodes.NSRef, nodes.Const, nodes.Tuple, nodes.List, nodes.Dict, nodes.Pair, nodes.Keyword),
    *(nodes.CondExpr, nodes.Filter, nodes.Test, nodes.Call, nodes.Getitem, nodes.Getattr, nodes.Slice, nodes.Concat),
    *(nodes.Compare, nodes.Operand, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Add, nodes.Sub, nodes.Mod),
    *(nodes.And, nodes.Or, nodes.Not, nodes.Neg, nodes.Pos),
)


class GenerationExtension(Extension):
    """`{% generation %}...{% endgeneration %}`: marks the model's text, for training. Here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own way to declare it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


# The functions that the rewritten tree calls. They take the context, so that Jinja cannot evaluate them when compiling.


@pass_context
def _loop(context: Context, value: Any, weight: int) -> Iterator[Any]:
    budget = current.get()
    for item in value:
        budget.step(weight)
        yield item


@pass_context
def _concat(context: Context, values: list[Any]) -> str:
    current.get().made(values)  # first, because the parts exist, and the whole is no larger than they are
    return current.get().made("".join(map(text_of, values)))


_HOOKS: dict[str, Callable[..., Any]] = {
    "bitnet_ref.loop": _loop,
    "bitnet_ref.made": pass_context(lambda context, value: current.get().made(value)),
    "bitnet_ref.read": pass_context(lambda context, value: current.get().read(value)),
    "bitnet_ref.concat": _concat,
}


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment that transformers gives chat templates, with the protections of this module."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self, macro_weights: dict[str, int]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, GenerationExtension],
            optimized=False,  # it evaluates constants when it compiles: "x" * 10**9
            finalize=pass_context(lambda context, value: text_of(value)),
            autoescape=False,
        )
        self.filters = {**FILTERS_ALLOWED, **_HOOKS}
        self.tests = dict(TESTS)
        self.globals = dict(GLOBALS)
        self._macro_weights = macro_weights

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Only methods of the allow-list; other attributes as in Jinja's sandbox."""
        if isinstance(value, _METHOD_TYPES) and not isinstance(obj, LoopContext):
            allowed = next((names for kind, names in METHODS.items() if isinstance(obj, kind)), frozenset[str]())
            return attr in allowed
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        return None  # so that str.format goes through is_safe_attribute, which refuses it

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = current.get()
        if operator == "**":
            raise LimitError("** is not available in a chat template")
        texts = isinstance(left, (str, list, tuple, dict)), isinstance(right, (str, list, tuple, dict))
        if operator == "%" and texts[0]:
            raise LimitError("% on text is not available in a chat template: use ~")
        if operator == "*" and any(texts):
            sequence, count = (left, right) if texts[0] else (right, left)
            if not isinstance(count, int):
                raise LimitError("* needs an integer")
            budget.will_make(len(sequence) * max(0, count) * (1 if isinstance(sequence, str) else 8))
        return budget.made(self.binop_table[operator](left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a macro, a function of GLOBALS, or an allowed method; of a loop these are cycle and changed."""
        budget = current.get()
        budget.step(len(args) + len(kwargs))  # f(*range(100000))
        # Compiled code also passes the loop's variables, for functions that take the context; none of ours does.
        given = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}
        for value in (*args, *given.values()):
            budget.read(value)
        if isinstance(__obj, Macro):
            return __self._call_macro(__context, __obj, args, kwargs)
        kwargs = given
        if isinstance(__obj, Undefined):
            return __obj()  # raises, naming what is undefined
        if any(__obj is function for function in GLOBALS.values()):
            return budget.made(__obj(*args, **kwargs))
        owner: Any = getattr(__obj, "__self__", None)
        name: str = getattr(__obj, "__name__", "")
        if isinstance(__obj, _METHOD_TYPES) and __self.is_safe_attribute(owner, name, __obj):
            budget.read(owner)
            pay_search(name, owner, *args, *kwargs.values())
            if name == "replace":
                budget.will_make(size_after_replace(owner, *args, **kwargs))
            elif name == "join" and len(args) == 1:
                args = (list(args[0]),)
                budget.made(args[0])
                budget.will_make(size_after_join(args[0], owner))
            result = __obj(*args, **kwargs)
            return budget.made(list(result) if name in ("items", "keys", "values") else result)
        raise LimitError(f"a {type(__obj).__name__} cannot be called in a chat template")

    def _call_macro(self, context: Context, macro: Macro, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        budget = current.get()
        weights = self._macro_weights
        budget.step(100 + weights.get(macro.name or "", max(weights.values(), default=0)))
        if budget.macro_depth == MAX_MACRO_DEPTH:
            raise LimitError(f"macros call each other more than {MAX_MACRO_DEPTH} deep")
        budget.macro_depth += 1
        try:
            return budget.made(context.call(macro, *args, **kwargs))
        finally:
            budget.macro_depth -= 1


class _Rewriter(NodeTransformer):
    """Checks a tree against the allow-lists and inserts the functions that pay."""

    def __init__(self) -> None:
        self.macro_weights: dict[str, int] = {}

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        if type(node) not in _ALLOWED_NODES:
            name = type(node).__name__
            raise TemplateSyntaxError(f"{name} is not available in a chat template", node.lineno)
        return super().generic_visit(node)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise TemplateSyntaxError("recursive loops are not available in a chat template", node.lineno)
        weight = _weight([*node.body, node.test])
        self.generic_visit(node)
        node.iter = _hook("loop", node.iter, nodes.Const(weight, lineno=node.lineno))
        return node

    def visit_Macro(self, node: nodes.Macro | nodes.CallBlock) -> nodes.Node:
        name = node.name if isinstance(node, nodes.Macro) else "caller"
        self.macro_weights[name] = max(self.macro_weights.get(name, 0), _weight(node.body))
        return self.generic_visit(node)

    visit_CallBlock = visit_Macro

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        if isinstance(node.value, int) and abs(node.value) >= MAX_INTEGER:
            raise TemplateSyntaxError("an integer of more than 63 bits", node.lineno)
        return node

    def visit_Filter(self, node: nodes.Filter | nodes.Test) -> nodes.Node:
        kind, allowed = ("test", TESTS) if isinstance(node, nodes.Test) else ("filter", FILTERS_ALLOWED)
        if node.name not in allowed:
            raise TemplateSyntaxError(f"the {kind} {node.name!r} is not available in a chat template", node.lineno)
        return self.generic_visit(node)

    visit_Test = visit_Filter

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _hook("read", node.expr)
        for operand in node.ops:
            operand.expr = _hook("read", operand.expr)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _hook("concat", nodes.List(node.nodes, lineno=node.lineno))

    def visit_List(self, node: nodes.List | nodes.Dict) -> nodes.Node:
        return _hook("made", self.generic_visit(node))

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _hook("made", node) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        sliced = isinstance(node.arg, nodes.Slice)
        self.generic_visit(node)
        return _hook("made", node) if sliced else node


def _hook(name: str, value: Any, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, f"bitnet_ref.{name}", list(args), [], None, None, lineno=value.lineno)


def _weight(body: list[Any]) -> int:
    """The maximum cost of one pass over these nodes, without inner loops and macros, which pay for themselves."""
    total, todo = 1, [node for node in body if node is not None]
    while todo:
        node = todo.pop()
        total += 1 + (len(node.data) // 4 if isinstance(node, nodes.TemplateData) else 0)
        todo.extend(node.iter_child_nodes())
    return total


def _check_shape(tree: nodes.Node) -> None:
    """Refuse a tree that is too large or too deep for the recursive walks that follow."""
    count, assignments, blocks, todo = 0, 0, 0, [(tree, 0)]
    while todo:
        node, depth = todo.pop()
        count += 1
        assignments += isinstance(node, nodes.Macro) or (isinstance(node, nodes.Name) and node.ctx != "load")
        blocks += "body" in node.fields
        if assignments * blocks > MAX_SCOPES:
            raise TemplateSyntaxError("a template of very many assignments and blocks is refused", node.lineno)
        if depth > MAX_TREE_DEPTH or count > MAX_NODES:
            limit = f"deeper than {MAX_TREE_DEPTH}" if depth > MAX_TREE_DEPTH else f"of more than {MAX_NODES} parts"
            raise TemplateSyntaxError(f"a template {limit} is refused", node.lineno)
        todo.extend((child, depth + 1) for child in node.iter_child_nodes())


def compile_template(source: str) -> Template:
    """Check and compile. Raises TemplateSyntaxError with its line, or RecursionError."""
    if len(source) > MAX_SOURCE:
        raise TemplateSyntaxError(f"a template of more than {MAX_SOURCE} characters is refused", 1)
    rewriter = _Rewriter()
    environment = BoundedEnvironment(rewriter.macro_weights)
    tree = environment.parse(source)
    _check_shape(tree)
    code = environment.compile(rewriter.visit(tree), filename=_FILE_NAME)
    return Template.from_code(environment, code, environment.make_globals(None))


def render(template: Template, variables: dict[str, Any]) -> str:
    """The text. Raises LimitError, or the template's own errors."""
    budget, parts = Budget(variables), []
    token = current.set(budget)
    try:
        for part in template.generate(variables):
            budget.print(len(part))
            parts.append(part)
        return "".join(parts)
    finally:
        current.reset(token)


def message_of(error: Exception) -> str:
    """The error's message, without the line."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    text = error.message if isinstance(error, TemplateError) else str(error)
    return (text or type(error).__name__)[:500]


def line_of(error: BaseException) -> int | None:
    """The template's line in which an error was raised, or None."""
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    frames = traceback.walk_tb(error.__traceback__)
    return next(reversed([line for frame, line in frames if frame.f_code.co_filename == _FILE_NAME]), None)
