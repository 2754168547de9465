"""Slides of the notebooks: a page for each, with reveal.js beside it, so that they need no network.

    python docs/extension/site_slides.py FOLDER     writes the slides alone; reveal.js is downloaded by npm, once

A heading begins a slide, and what does not fit on it goes on below, under the same heading. A question ends its slide.
An exercise is its task and its minutes. A figure has a slide of its own, with a sentence at most. Imports, setup,
checks, cells that only assert, and the code of figures are left out; a long source scrolls.
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

from bitnet_ref.crossval.exercises.teacher import exercises_in

REVEAL = "reveal.js@5.2.1"
INTEGRITY = "sha512-r7//6mIM5p34hFiDMvYfXgyjXqGRta+/psd9YtytsgRlrpRzFv4RbH76TXd2qD+7ZPZEbpBDhdRhJaFgfQ7zNQ=="
FILES = {"reveal.js": "dist/reveal.js", "reveal.css": "dist/reveal.css"}
LINES = 15  # of a slide
LETTERS = 84  # of a line of text
FEW = 4  # lines above a figure, which is made smaller
TO_GUESS = "[Gg]uess|[Oo]n paper|[Bb]y hand|[Pp]redict|[Vv]ote|[Bb]efore you run"
QUESTION = re.compile(rf"\?\**\s*([^.?]*:)?(\n\n|$)|\*\*[^*]*({TO_GUESS})[^*]*\*\*")
HELP = re.compile(r"\s?`check` says what is wrong with an answer[^.]*\.hint[^.]*\.")
TO_ANSWER = re.compile(r"# TODO|(?<!\.)\bcheck[.(]")  # a statement of an exercise
# Lines of output that say that an exercise is not answered, or how far a loop is
PLACEHOLDER = re.compile(r"^((.*: )?not? \w+ yet\b| *\d+ of \d+: ).*\n?", re.MULTILINE)
LEFT_OUT = ("assert ", "show(", "%", "#", ")", "    ")  # a cell of such lines alone has no slide
TURN = '<p class="turn">'
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

    @property
    def asks(self):
        return bool(QUESTION.search(self.text)) or self.html.startswith(TURN)


def slides_of(notebook):
    """Slides, each a list of pages that follow downwards; a page is a list of parts.

    A question ends its page; only the minutes of an exercise follow it. Code that has no room takes the text before it
    to its page, where that is not all of the page before.
    """
    slides, room, is_asked = [], 0, False
    for part in parts_of(notebook):
        if part.begins:
            slides.append([[]])
            room, is_asked = LINES, False
        elif (is_asked and not part.html.startswith(TURN)) or not has_room(slides[-1][-1], part, room):
            before, page = slides[-1][-1], []
            is_free = len(before) > 1 and before[-1].text and not is_asked and not part.text and not part.is_figure
            if is_free and before[-1].height + part.height < LINES:
                page = [before.pop()]
            slides[-1].append(page)
            room, is_asked = LINES - 1 - sum(each.height for each in page), False
        slides[-1][-1].append(part)
        room -= part.height
        is_asked = is_asked or part.asks
    return slides


def has_room(page, part, room):
    """Whether a part goes on a page: what fits, a figure below a sentence, and a line of output."""
    if part.height <= room:
        return True
    if any(each.is_figure for each in page):
        return False
    return room >= LINES - FEW if part.is_figure else not part.text and part.height < 2


def parts_of(notebook):
    """What is shown of the cells: a `Part` for each paragraph, cell of code and output."""
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            for text in paragraphs(source):
                begins = text.startswith("#")
                extra = text.count("\n- ") + text.count("$$") + 0.8 * text.count("\n|")  # lines that are not full
                height = 1 + len(text) / LETTERS + extra + begins
                yield Part(begins, height, MARKDOWN.render(text), text)
            continue
        if exercises := exercises_in(cell):
            yield Part(False, 1, f"{TURN}Your turn: about {sum(each.minutes for each in exercises)} minutes</p>")
        code = shown_code(source)
        lines = [line for line in code.splitlines() if line.strip() and not line.startswith(LEFT_OUT)]
        if lines and not cell["metadata"].get("jupyter", {}).get("source_hidden"):
            height = 1 + 0.65 * (code.count("\n") + 1)
            yield Part(False, height, highlight(code, PythonLexer(), HtmlFormatter(nowrap=False)))
        for output in cell["outputs"] if code else ():
            yield from shown_output(output)


def shown_code(source):
    """The code of a cell without imports and checks, where Python can read it; empty for the cell of the setup.

    >>> shown_code("import os\\n\\nx = 1")
    'x = 1'
    >>> shown_code("answer = None  # TODO\\ncheck('1.1', answer)")
    ''
    """
    lines = source.splitlines()
    try:
        statements = ast.parse(source).body
    except SyntaxError:  # a line for IPython
        return source
    for each in statements:
        span = slice(each.lineno - 1, each.end_lineno)
        text = "\n".join(line or "" for line in lines[span])
        if text == "show = setup()":
            return ""
        if isinstance(each, ast.Import | ast.ImportFrom) or TO_ANSWER.search(text):
            lines[span] = [None] * (each.end_lineno - each.lineno + 1)
    code = "\n".join(line for line in lines if line is not None)
    return re.sub(r"\n\n\n+", "\n\n", code).strip("\n")


def paragraphs(source):
    """A cell's text cut at empty lines, but not within a sentence, and without the badges and the help to `check`.

    >>> list(paragraphs("So:\\n\\n$$x$$\\n\\nis\\n\\nMore."))
    ['So:\\n\\n$$x$$\\n\\nis', 'More.']
    """
    whole = []
    for text in re.split(r"\n\n+", HELP.sub("", source)):
        if not text.strip() or text.startswith("[!["):
            continue
        if whole and goes_on(whole[-1].rpartition("\n\n")[2], text):
            whole[-1] += f"\n\n{text}"
        else:
            whole.append(text)
    return whole


def goes_on(before, text):
    """Whether a paragraph belongs to the one before: below a heading, in a sentence, or a list of what is asked."""
    is_heading = before.startswith("#") and "\n" not in before
    is_listed = QUESTION.search(before) and re.match(r"[-|]|1\. ", text)
    return bool(is_heading or is_listed or text.startswith("$$") or text[0].islower())


def shown_output(output):
    """The `Part` of a picture, a table or a text."""
    data = output.get("data", {})
    if "image/png" in data:
        alt = output["metadata"].get("image/png", {}).get("alt", "")
        picture = f"data:image/png;base64,{data['image/png'].strip()}"
        yield Part(False, LINES, f'<div class="figure"><img alt="{escape(alt)}" src="{picture}"></div>')
    elif "text/html" in data:
        yield Part(False, LINES, f'<div class="output">{"".join(data["text/html"])}</div>')
    elif "text/markdown" in data:
        text = "".join(data["text/markdown"]).replace("| None |", "| |")  # a guess that is not made
        yield Part(False, 1 + 0.65 * text.count("\n"), f'<div class="output">{MARKDOWN.render(text)}</div>')
    elif text := PLACEHOLDER.sub("", "".join(output.get("text", data.get("text/plain", "")))).rstrip():
        yield Part(False, 1 + 0.65 * (text.count("\n") + 1), f'<pre class="output">{escape(text)}</pre>')


def page_of(notebook):
    """(title, HTML) of a notebook."""
    title = "".join(notebook["cells"][0]["source"]).partition("\n")[0].removeprefix("# ")
    slides = []
    for pages in slides_of(notebook):
        heading = re.search(r"<h\d>(.*)</h\d>", pages[0][0].html)[1]
        inner = ""
        for number, page in enumerate(pages):
            goes_on_below = number > 0 and not page[0].is_figure
            above = f'<h2 class="again">{heading}</h2>' if goes_on_below else ""
            inner += f"<section>{above}{''.join(part.html for part in page)}</section>\n"
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
