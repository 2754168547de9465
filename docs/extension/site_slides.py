"""Slides of the notebooks: a page for each, with reveal.js beside it, so that they need no network.

    python docs/extension/site_slides.py FOLDER     writes the slides alone; reveal.js is downloaded by npm, once

A heading begins a slide, and what does not fit on it goes on below. A figure has a slide of its own, with a
sentence at most. Imports, cells that only assert, and the code of figures are left out; a long source scrolls.
Without npm the site has no slides, and the build says so.
"""

import ast
import json
import os
import re
import shutil
import sys
from html import escape
from pathlib import Path
from typing import NamedTuple

from latex2mathml.converter import convert
from markdown_it import MarkdownIt
from mdit_py_plugins.dollarmath import dollarmath_plugin
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from site_playground import ROOT, download

REVEAL = "reveal.js@5.2.1"
INTEGRITY = "sha512-r7//6mIM5p34hFiDMvYfXgyjXqGRta+/psd9YtytsgRlrpRzFv4RbH76TXd2qD+7ZPZEbpBDhdRhJaFgfQ7zNQ=="
FILES = {"reveal.js": "dist/reveal.js", "reveal.css": "dist/reveal.css"}
LINES = 15  # of a slide
LETTERS = 84  # of a line of text
FEW = 4  # lines that do not fill a slide: what follows joins them, and is made smaller or scrolls
LEFT_OUT = ("assert ", "show(", "%", "#", ")", "    ")  # a cell of such lines alone has no slide
MARKDOWN = (
    MarkdownIt("commonmark")
    .enable("table")
    .use(
        dollarmath_plugin,
        renderer=lambda formula, options: convert(formula, display="block" if options["display_mode"] else "inline"),
    )
)
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><link rel="icon" href="favicon.svg">
<link rel="stylesheet" href="reveal.css"><link rel="stylesheet" href="slides.css"></head>
<body><div class="reveal"><div class="slides">
{slides}
</div></div>
<a class="back" href="index.html">All slides</a>
<script src="reveal.js"></script>
<script>
const isNarrow = innerWidth < 700; // a phone: the slide is as high as its screen, and its letters can be read
Reveal.initialize({{
  width: isNarrow ? 600 : 1280, height: isNarrow ? Math.round((600 * innerHeight) / innerWidth) : 720, margin: 0.04,
  hash: true, center: false, transition: "none", slideNumber: "c/t", scrollActivationWidth: 0,
}});</script>
</body></html>
"""
INDEX = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Slides of the course</title><link rel="icon" href="favicon.svg"><link rel="stylesheet" href="slides.css"></head>
<body class="index"><h1>Slides of the course</h1><p>Arrows move, Esc shows all slides, ? the keys.{back}</p><ul>
{links}
</ul></body></html>
"""


class Part(NamedTuple):
    """Something that is shown. text: Markdown; empty for code and outputs."""

    begins: bool  # a slide
    height: float  # in lines
    html: str
    text: str = ""

    @property
    def is_figure(self):
        return 'class="figure"' in self.html


def slides_of(notebook):
    """Slides, each a list of pages that follow downwards; a page is a list of parts.

    Code that has no room takes the text before it to its page. Where that has no room either, or begins the slide, its
    last sentence stands there again; where there is none, the slide's heading.
    """
    slides, room, heading = [], 0, ""
    for part in parts_of(notebook):
        if part.begins:
            slides.append([[]])
            room, heading = LINES, part.text.partition("\n")[0].lstrip("# ")
        elif not has_room(slides[-1][-1], part, room):
            before, page = slides[-1][-1], []
            if not part.text and not part.is_figure:
                is_free = len(before) > 1 and before[-1].text
                if is_free and before[-1].height + min(part.height, LINES - FEW) <= LINES:
                    page = [before.pop()]
                else:
                    page = [caption(last_sentence(before[-1].text) or heading)]
            slides[-1].append(page)
            room = LINES - sum(each.height for each in page)
        slides[-1][-1].append(part)
        room -= part.height
    return slides


def has_room(page, part, room):
    """Whether a part goes on a page. One that is nearly full takes only what fits, or a line of output."""
    if part.height <= room:
        return True
    if any(each.is_figure for each in page):
        return False
    return room >= LINES - FEW or (not part.text and part.height < 2)


def caption(text):
    return Part(False, 1, f'<div class="caption">{MARKDOWN.render(text)}</div>')


def last_sentence(text):
    """The last sentence of a text; empty where it ends in a table, a list or a formula.

    >>> last_sentence("One. Now *two*:")
    'Now *two*:'
    """
    lines = text.strip().rpartition("\n\n")[2].split("\n")
    is_plain = not any(line.startswith(("|", "-", "$$", "#", "  ")) for line in lines)
    return re.split(r"(?<=[.?!]) (?=\W*[A-Z])", " ".join(lines))[-1] if is_plain else ""


def parts_of(notebook):
    """What is shown of the cells: a `Part` for each paragraph, cell of code and output."""
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            for text in paragraphs(source):
                begins = text.startswith("#")
                height = 1 + len(text) / LETTERS + text.count("\n- ") + begins
                yield Part(begins, height, MARKDOWN.render(text), text)
            continue
        hidden = cell["metadata"].get("jupyter", {}).get("source_hidden")
        code = without_imports(source)
        lines = [line for line in code.splitlines() if line.strip() and not line.startswith(LEFT_OUT)]
        if lines and not hidden:
            height = 1 + 0.75 * (code.count("\n") + 1)
            yield Part(False, height, highlight(code, PythonLexer(), HtmlFormatter(nowrap=False)))
        for output in cell["outputs"]:
            yield from shown_output(output)


def without_imports(source):
    """The code of a cell without its imports, where Python can read it.

    >>> without_imports("import os\\n\\nx = 1")
    'x = 1'
    """
    lines = source.splitlines()
    try:
        statements = ast.parse(source).body
    except SyntaxError:  # a line for IPython
        return source
    for each in statements:
        if isinstance(each, ast.Import | ast.ImportFrom):
            lines[each.lineno - 1 : each.end_lineno] = [None] * (each.end_lineno - each.lineno + 1)
    code = "\n".join(line for line in lines if line is not None)
    return re.sub(r"\n\n\n+", "\n\n", code).strip("\n")


def paragraphs(source):
    """A cell's text cut at empty lines, without the badges; a heading stays with what follows it."""
    parts = [part for part in source.split("\n\n") if not part.startswith("[![") and part.strip()]
    while parts:
        part = parts.pop(0)
        yield f"{part}\n\n{parts.pop(0)}" if part.startswith("#") and "\n" not in part and parts else part


def shown_output(output):
    """The `Part` of a picture, a table or a text."""
    data = output.get("data", {})
    if "image/png" in data:
        alt = output["metadata"].get("image/png", {}).get("alt", "")
        picture = f"data:image/png;base64,{data['image/png'].strip()}"
        yield Part(False, LINES, f'<div class="figure"><img alt="{escape(alt)}" src="{picture}"></div>')
    elif "text/markdown" in data:
        text = "".join(data["text/markdown"])
        yield Part(False, 1 + 0.75 * text.count("\n"), MARKDOWN.render(text))
    elif text := "".join(output.get("text", data.get("text/plain", ""))).rstrip():
        yield Part(False, 1 + 0.75 * (text.count("\n") + 1), f'<pre class="output">{escape(text)}</pre>')


def page_of(notebook):
    """(title, HTML) of a notebook."""
    title = "".join(notebook["cells"][0]["source"]).partition("\n")[0].removeprefix("# ")
    slides = []
    for pages in slides_of(notebook):
        inner = "".join(f"<section>{''.join(part.html for part in page)}</section>\n" for page in pages)
        slides.append(f"<section>{inner}</section>" if len(pages) > 1 else inner)
    return title, PAGE.format(title=escape(title), slides="\n".join(slides))


def write_slides(folder, back=""):
    """Write the slides of all notebooks into a folder. back: HTML in the index that leads to the site.

    Raises OSError where reveal.js cannot be had.
    """
    reveal = download(REVEAL, INTEGRITY, FILES)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in FILES:
        shutil.copy2(reveal / name, folder)
    shutil.copy2(Path(__file__).parent / "favicon.svg", folder)
    light, dark = (HtmlFormatter(style=name).get_style_defs(".highlight") for name in ("friendly", "monokai"))
    style = f"{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}\n"
    style += (Path(__file__).parent / "slides.css").read_text(encoding="utf-8")
    (folder / "slides.css").write_text(style, encoding="utf-8")
    links = []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        title, page = page_of(json.loads(path.read_text(encoding="utf-8")))
        (folder / f"{path.stem}.html").write_text(page, encoding="utf-8")
        links.append(f'<li><a href="{path.stem}.html">{escape(title)}</a></li>')
    (folder / "index.html").write_text(INDEX.format(links="\n".join(links), back=back), encoding="utf-8")


def write(app, problem):
    if problem is None and app.builder.name == "html":
        try:
            write_slides(Path(app.outdir) / "slides", ' <a href="../teaching.html">Back to the course</a>.')
        except OSError as missing:
            if os.environ.get("BITNET_REF_PLAYGROUND") == "required":
                raise
            print(f"slides: none ({missing})")


def setup(app):
    app.connect("build-finished", write)
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    write_slides(Path(sys.argv[1]))
