"""The package's docstrings, which are plain text with `names` in backticks, as the reStructuredText of autodoc."""

import re

from bitnet_ref import SamplingParams
from bitnet_ref.system.options import explain_options

ITEM = re.compile(r"(?P<names>[a-z_]\w*(?:, [a-z_]\w*)*): (?P<text>.*)")
TABLE = re.compile(r"\S {3,}\S")


def inline(text):
    r"""A line's text with its marks escaped.

    >>> inline("x of `load` (**params) and T_")
    'x of ``load`` (\\*\\*params) and T\\_'
    """
    parts = re.split(r"`+([^`]+)`+", text)
    parts[::2] = [re.sub(r"[*|@\\]|_(?!\w)", r"\\\g<0>", part) for part in parts[::2]]
    parts[1::2] = [f"``{part}``" for part in parts[1::2]]
    # a name in backticks is a word: an s or a bracket may follow it directly
    return "".join(f"{part}\\ " if i % 2 and re.match(r"\w", parts[i + 1]) else part for i, part in enumerate(parts))


def convert(lines):
    """The lines of a docstring as lines of reStructuredText: paragraphs, `name: text` items, tables, examples.

    >>> convert(["Load.", "", "path: a file", "    or a folder", "", ">>> 1", "1"])
    ['Load.', '', '``path``', '    a file', '    or a folder', '', '>>> 1', '1', '']
    """
    result = []
    for block in re.split(r"\n\s*\n", "\n".join(lines).strip("\n")):
        rows = block.split("\n")
        if rows[0].lstrip().startswith(">>>"):
            result += [*rows, ""]
            continue
        if rows[0].startswith(" ") or sum(bool(TABLE.search(row)) for row in rows) > 1:
            result += ["::", "", *(f"    {row}" for row in rows), ""]
            continue
        in_item = False
        for i, row in enumerate(rows):
            item = ITEM.fullmatch(row)
            if item and (i == 0 or in_item):
                names = ", ".join(f"``{name}``" for name in item["names"].split(", "))
                result += [names, f"    {inline(item['text'])}"]
                in_item = True
            elif i == 0 and row.endswith(":") and len(rows) > 1:  # a heading of items
                result += [f"*{row[:-1].translate(str.maketrans('', '', '`'))}*", ""]
                in_item = True
            elif in_item:
                result.append(f"    {inline(row.strip())}")
            else:
                result.append(inline(row))
        result.append("")
    return result


def shorten_signature(app, obj, bound):
    """Undo what `expand_params` writes out for help(): on the page, SamplingParams itself is not far."""
    if "max_tokens" in getattr(getattr(obj, "__signature__", None), "parameters", ()):
        del obj.__signature__


def shorten_arrays(app, what, name, obj, options, signature, returns):
    """Types of arrays as the source has them: NDArray[int64] is ndarray[tuple[Any, ...], dtype[int64]]."""

    def shorten(text):
        text = re.sub(r"~?(?:\w+\.)*ndarray\[tuple\[.*?\], ~?(?:\w+\.)*dtype\[([^]]*)\]\]", r"NDArray[\1]", text or "")
        return re.sub(r"\[[~\w.]*_ScalarT\]", "", text) or None

    return shorten(signature), shorten(returns)


def process_docstring(app, what, name, obj, options, lines):
    if what == "module":  # the rest is for those who read the source
        lines[:] = [inline(" ".join(lines[: lines.index("")]).partition(" May import")[0]), ""]
        return
    if what in ("function", "method"):
        explanation = explain_options(SamplingParams)
        lines[:] = "\n".join(lines).replace(explanation, "params: those of `SamplingParams`.").split("\n")
    lines[:] = convert(lines)


def setup(app):
    app.connect("autodoc-before-process-signature", shorten_signature)
    app.connect("autodoc-process-signature", shorten_arrays)
    app.connect("autodoc-process-docstring", process_docstring)
    return {"parallel_read_safe": True}
