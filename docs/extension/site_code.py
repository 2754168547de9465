"""What slides show of the code of a notebook: the statements that print something, or that these need."""

import ast
import re
from itertools import pairwise
from textwrap import dedent

LINES = 15  # of a slide
CODE_LINES = 12  # of a slide, if the code can be cut between its statements
CODE_LINE = 0.65  # height of a line of code or output
WIDE = 112  # letters of such a line
TO_ANSWER = re.compile(r"# TODO|(?<!\.)\bcheck[.(]")  # a statement of an exercise
# Lines of output that say that an exercise is not answered, what a check says, or how far a loop is
PLACEHOLDER = re.compile(r"^((.*: )?not? \w+ yet\b|[\w.]+: right\.| *\d+ of \d+: ).*\n?", re.MULTILINE)
NOT_SHOWN = ("show(", "panels(", "display(panels(", "os.chdir(", "folder.cleanup(", "RECORDED =")  # statements
MISSING = re.compile(r"\bNone\b|emulated")  # in a question for something that may be missing
CHANGE = ("append", "extend", "add", "update", "sort", "insert", "pop")  # methods that change their object


def waits_for_student(cell):
    """Whether a cell without a check has no output but that an exercise is not answered."""
    texts = ["".join(each.get("text", "?")) for each in cell.get("outputs", ())]
    is_task = TO_ANSWER.search("".join(cell["source"]))
    return bool(texts) and not is_task and not PLACEHOLDER.sub("", "".join(texts)).strip()


def code_is_hidden(cell):
    return cell["metadata"].get("jupyter", {}).get("source_hidden", False)


def printed(cell):
    return "".join("".join(each.get("text", "")) for each in cell.get("outputs", ()))


def has_output(cell, told=""):
    """Whether the outputs of a cell are shown: not those of an exercise alone, and of the setup only what is told."""
    source = "".join(cell["source"])
    try:
        statements = [ast.get_source_segment(source, each) for each in ast.parse(source).body]
    except SyntaxError:  # a line for IPython
        return True
    counted = re.match(r"\d+ \w+(?=:)", printed(cell))
    is_setup = "show = setup()" in statements and not (counted and counted[0] in told)
    is_work = any(not TO_ANSWER.search(each) and not each.startswith(("import ", "from ")) for each in statements)
    return is_work and not is_setup and not waits_for_student(cell)


def live_codes(cells):
    """The code of each cell that a slide shows.

    Imports and checks go, and what only they, a figure or an assert at the end of a cell use, but for names in an
    exercise of which a later text speaks. Of what a cell does if something is missing only what was done is left.
    """
    used, told, codes = set(), set(), []
    for cell in reversed(cells):
        code, source = "", "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            told.update(re.findall(r"\w+", " ".join(re.findall("`[^`]*`", source))))
        if cell["cell_type"] == "code" and not waits_for_student(cell):
            given = told if "# TODO" in source else ()
            code = live_code(what_ran(source, printed(cell)), set() if code_is_hidden(cell) else used, given)
        codes.append(code)
    return codes[::-1]


def what_ran(source, output):
    """The source with only the branch whose first string is in the output, where a cell asks what is missing.

    >>> what_ran("if tool is None:\\n    print('no tool')\\nelse:\\n    x = 1\\n    print('tool', x)", "tool 1")
    "x = 1\\nprint('tool', x)"
    """
    try:
        statements = ast.parse(source).body
    except SyntaxError:  # a line for IPython
        return source
    lines = source.splitlines()
    for each in statements:
        if isinstance(each, ast.If) and MISSING.search(ast.unparse(each.test)) and (strings := strings_in(each.body)):
            branch = each.body if strings[0] in output else each.orelse
            rest = lines[branch[0].lineno - 1 : branch[-1].end_lineno] if branch else []
            lines[each.lineno - 1 : each.end_lineno] = dedent("\n".join(rest)).splitlines()
            return what_ran("\n".join(lines), output)
    return source


def strings_in(statements):
    nodes = [node for each in statements for node in ast.walk(each) if isinstance(node, ast.Constant)]
    return [node.value for node in nodes if isinstance(node.value, str) and len(node.value) > 2]


def live_code(source, used, told=()):
    """The statements of a cell that show something, or make a name in `used`, to which the names in them are added.

    >>> live_code("import os\\n\\nx = 1\\n# dead\\ny = 2\\nprint(x)\\nassert x", set())
    'x = 1\\nprint(x)'
    >>> live_code("answer = None  # TODO\\ncheck('1.1', answer)", set())
    ''
    """
    lines = source.splitlines()
    try:
        statements = ast.parse(source).body
    except SyntaxError:  # a line for IPython
        used.update(re.findall(r"\w+", source))
        return source
    is_last = True  # no statement after it is shown
    for each in reversed(statements):
        first = each.lineno - 1 - len(getattr(each, "decorator_list", ()))
        span = slice(first, each.end_lineno)
        text = "\n".join(lines[span])
        if text == "show = setup()":
            return ""
        made = names_made(each)
        if TO_ANSWER.search(text):
            is_asked = isinstance(each, ast.Assign) and "# TODO" in text and bool(made.intersection(told))
            is_shown = is_asked or isinstance(each, ast.FunctionDef | ast.ClassDef)  # the signature
            text = re.sub("= None *# TODO.*", "= ...", text) if is_asked else text
            text = re.sub(r"^( *)[^# ].*[^: ] *# TODO.*$", r"\1...", text, flags=re.MULTILINE)
            text = re.sub(r"(?<=:) *# TODO.*", "", text)
            lines[span] = [None if line.lstrip().startswith("# TODO") else line for line in text.split("\n")]
        elif isinstance(each, ast.Assert):
            is_shown = not is_last
        elif isinstance(each, ast.Import | ast.ImportFrom) or text.startswith(NOT_SHOWN):
            is_shown = False
        else:
            is_value = isinstance(each, ast.Expr) and (is_last or not made)
            is_whole = isinstance(each, ast.FunctionDef | ast.ClassDef) or "print(" in text or "display(" in text
            is_shown = is_value or is_whole or bool(made & used.union(told))
        if is_shown:
            if isinstance(each, ast.Assign) and not isinstance(each.targets[0], ast.Subscript | ast.Attribute):
                used -= made
            used |= names_read(each)
            is_last = False
        else:
            while first and lines[first - 1] is not None and lines[first - 1].startswith("#"):
                first -= 1
            lines[first : each.end_lineno] = [None] * (each.end_lineno - first)
    for each in statements:  # an assert before all else that is shown is about another cell
        if isinstance(each, ast.Assert):
            lines[each.lineno - 1 : each.end_lineno] = [None] * (each.end_lineno - each.lineno + 1)
        elif lines[each.lineno - 1] is not None:
            break
    code = "\n".join(line for line in lines if line is not None)
    return re.sub(r"\n\n\n+", "\n\n", code).strip("\n")


def names_read(statement):
    """The names that a statement takes from outside: not its arguments, and not what only a function binds."""
    read, own = set(), {"_"}
    for each in ast.walk(statement):
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load):
            read.add(each.id)
        elif isinstance(each, ast.Name) and isinstance(statement, ast.FunctionDef):
            own.add(each.id)
        elif isinstance(each, ast.arg):
            own.add(each.arg)
        elif isinstance(each, ast.comprehension):
            own |= {name.id for name in ast.walk(each.target) if isinstance(name, ast.Name)}
    return read - own


def names_made(statement):
    """The names that a statement binds or changes."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    made = set()
    for each in ast.walk(statement):
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            made.add(each.id)
        elif isinstance(each, ast.Attribute | ast.Subscript) and isinstance(each.value, ast.Name):
            is_changed = isinstance(each.ctx, ast.Store) or getattr(each, "attr", "") in CHANGE
            made |= {each.value.id} if is_changed else set()
    return made


def cut_code(code):
    """Code cut between its statements into pieces of CODE_LINES lines at most, of nearly equal length."""
    try:
        starts = [each.lineno - 1 - len(getattr(each, "decorator_list", ())) for each in ast.parse(code).body]
    except SyntaxError:
        starts = []
    lines = code.split("\n")
    starts = [0, *(comment_above(lines, start) for start in starts[1:]), len(lines)]
    fewest = len(join_spans(starts, CODE_LINES))
    spans = next(spans for limit in range(CODE_LINES + 1) if len(spans := join_spans(starts, limit)) == fewest)
    return [piece for start, end in spans for piece in cut_lines("\n".join(lines[start:end]).strip("\n"))]


def join_spans(starts, limit):
    """[(start, end)] of statements in a row that have `limit` lines together, or are a longer one."""
    spans = []
    for start, end in pairwise(starts):
        if spans and end - spans[-1][0] <= limit:
            start = spans.pop()[0]
        spans.append((start, end))
    return spans


def comment_above(lines, start):
    while start and lines[start - 1].startswith("#"):
        start -= 1
    return start


def cut_lines(code):
    """A text cut into pieces that have room on a slide, at the outermost line near its middle."""
    lines = code.split("\n")
    if code_height(code) <= LINES - 0.6:
        return [code]
    middle = range(len(lines) // 3, len(lines) * 2 // 3 + 1)
    cut = min(middle, key=lambda i: (len(lines[i]) - len(lines[i].lstrip()), abs(2 * i - len(lines))))
    return [*cut_lines("\n".join(lines[:cut]).rstrip()), *cut_lines("\n".join(lines[cut:]))]


def code_height(code):
    """Of code or output, in lines of a slide."""
    return 0.6 + CODE_LINE * sum(-(-max(len(line), 1) // WIDE) for line in code.split("\n"))
