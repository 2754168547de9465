"""Slides of the notebooks: a page for each, with reveal.js beside it, so that they need no network.

    python docs/extension/site_slides.py FOLDER     writes the slides alone; reveal.js is downloaded by npm, once

A heading begins a slide, and what does not fit on it goes on below, under the same heading: tables with their head,
code cut between its statements. A question ends its slide. An exercise is its task, its minutes and what is given. A
figure fills a slide, with its key below it or, where that makes its letters small, on the next. Imports, setup, checks,
the code of figures, and what only they use are left out, as are sentences for somebody at the notebook, widgets without
a question, and questions that only a student's own code answers.
Without npm the site has no slides, and the build says so.
"""

import json
import os
import re
import shutil
import struct
import sys
from base64 import b64decode
from html import escape, unescape
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import NamedTuple

from latex2mathml.converter import convert
from markdown_it import MarkdownIt
from mdit_py_plugins.dollarmath import dollarmath_plugin
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from site_code import (
    LINES,
    PLACEHOLDER,
    code_height,
    code_is_hidden,
    cut_code,
    cut_lines,
    has_output,
    live_codes,
    waits_for_student,
)
from site_playground import ROOT, download

from bitnet_ref.crossval.exercises.teacher import exercises_in

REVEAL = "reveal.js@5.2.1"
INTEGRITY = "sha512-r7//6mIM5p34hFiDMvYfXgyjXqGRta+/psd9YtytsgRlrpRzFv4RbH76TXd2qD+7ZPZEbpBDhdRhJaFgfQ7zNQ=="
FILES = {"reveal.js": "dist/reveal.js", "reveal.css": "dist/reveal.css"}
LETTERS = 84  # of a line of text
CODE_WIDTH = 1980  # letters of a line of code, times their pixels
FULL = 12  # lines of a page with large code
FEW = 3  # lines above a figure
MUCH_CODE = 9  # lines that the code of two cells on a page takes at most
TO_GUESS = "[Gg]uess|[Oo]n paper|[Bb]y hand|[Pp]redict|[Vv]ote|[Bb]efore you run"
QUESTION = re.compile(rf"\?\**\s*([^.?]*:)?(\n\n|$)|\*\*[^*]*({TO_GUESS})[^*]*\*\*")
GUESS = re.compile(r"(.*?(?:a guess|first:)[^?]*\?)\s+(?=[*A-Z])([^?]+)$", re.DOTALL)  # and what follows
# Sentences for somebody at the notebook, and what stands for them
ASIDE = re.compile(
    r"\b[Cc]ells?\b|\b[Ss]liders?\b|\b[Ff]olded\b|\bMove the scale|`show\(|running kernel|pip install|[`a] ?check`? say"
    r"|Equal, bit for bit|check\.(use|hint)|^Five letters|\bTry:|^Try layer|Change the prompt"
)
BESIDE = re.compile(r",? (at the top of the notebook|in the next cell)|(?<=On paper), before you run the cell")
BEFORE = re.compile(r"Before you run the (next )?cell")
SENTENCE = re.compile(r"(?<=[.?!)])(?:\*\*)?\s+(?=[A-Z(*`$])")
BRACKETS = re.compile(r"\s?\((?:[^()]|\([^()]*\))*\)")
# A sentence that is the key of the figure before it
KEY = re.compile(
    r"\b(pictures?|figures?|panels?|colou?rs?|blue|red|orange|green|gr[ea]y|black|dashed|dotted|cross(es)?|dots?|curves?"
    r"|lines?|bars?|clouds?|points?|markers?|left|right|upper|lower|diagonal|box(es)?|steep|slope|number is)\b",
    re.IGNORECASE,
)
KEY_LETTERS = 320
FIGURE = (1264, 630)  # pixels of a slide that a figure has
KEY_LINE = (95, 38)  # letters of a line of its key, and pixels
LARGE = 1.62  # times its own pixels, and the smallest letters of a figure are 2% of the page
YOURS = re.compile(r"\b[Yy]ours?\b|\?")  # sentences about the output of an exercise that is not answered
MARKUP = re.compile(r"\]\([^)]*\)|\\[a-z]+|[${}*`\[]")  # letters of Markdown and of formulas that are not seen
TABLE_HEAD = re.compile(r"\D+?\S {2,}\D+?\S {2,}\D+?\n(?=.*\d)")  # the first line of a table that is printed
TITLE = re.compile(r"\*\*[^*?]*\.\*\*")  # of a paragraph
WIDGET = "application/vnd.jupyter.widget-view+json"
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
  navigationMode: "linear",
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
    breaks: bool = False  # begins a page: the rest of a long part, or an output whose code is not shown
    is_given: bool = False  # belongs to the task before it
    key_letters: int = 0  # that a figure has room for

    @property
    def is_figure(self):
        return 'class="figure"' in self.html

    @property
    def asks(self):
        return self.is_given or bool(QUESTION.search(re.sub("^#.*", "", self.text, flags=re.MULTILINE)))


def slides_of(notebook):
    """Slides, each a list of pages that follow downwards; a page is a list of parts.

    A question ends its page; only the minutes of an exercise and what is given for it follow. Code that has no room
    takes the text before it to its page, where that is not all of the page before. So does a table after a colon.
    """
    slides, room, is_asked = [], 0, False
    for part in parts_of(notebook):
        if part.begins:
            slides.append([[]])
            room, is_asked = LINES, False
        elif (is_asked and not part.is_given) or part.breaks or not has_room(slides[-1][-1], part, room):
            before, page = slides[-1][-1], []
            start = max((i for i, each in enumerate(before) if each.text), default=0)
            height = sum(each.height for each in before[start:])
            is_announced = not part.text or before[start].text.endswith(":")
            is_free = part.is_given or (start == len(before) - 1 and not is_asked and is_announced and not part.breaks)
            if start and is_free and height + part.height < LINES and not (part.is_figure and height > FEW):
                before[start:], page = [], before[start:]
            slides[-1].append(page)
            room, is_asked = LINES - 1 - sum(each.height for each in page), any(each.asks for each in page)
        slides[-1][-1].append(part)
        room -= part.height
        is_asked = is_asked or part.asks
    return slides


def has_room(page, part, room):
    """Whether a part goes on a page: what fits, a figure below a sentence, a line of output, what a colon announces."""
    if part.height <= room:
        codes = [each.height for each in (*page, part) if 'class="highlight"' in each.html]
        return len(codes) < 2 or sum(codes) <= MUCH_CODE
    if any(each.is_figure for each in page):
        return False
    is_announced = len(page) == 1 and page[0].text.endswith(":") and part.height < room + 2
    is_line = not part.text and part.height < 2
    return room >= LINES - FEW if part.is_figure else is_line or is_announced


def parts_of(notebook):
    """What is shown of the cells, with the key of each figure below it."""
    figure, letters = None, 0
    parts = [*cell_parts(told_first(notebook["cells"]))]
    for part, following in zip_longest(parts, parts[1:]):
        if part.text.endswith(":") and (not following or re.match(r"[^-|\d]", following.text)):  # it announces nothing
            part = part_of(f"{part.text[:-1]}.")
        if figure:
            announces = bool(following) and not following.text and not following.is_figure
            key, rest = key_of(part.text, letters, announces) if not part.begins else ("", "")
            letters -= len(key)
            if key:
                figure = figure._replace(html=figure.html.removesuffix("</div>") + MARKDOWN.render(key) + "</div>")
            if key and not rest and not QUESTION.search(key):
                continue
            yield figure
            if key and not rest:
                figure = None
                continue
            part = part_of(rest) if key else part
        figure, letters = part if part.is_figure else None, part.key_letters
        if not figure:
            yield part
    if figure:
        yield figure


def key_room(width, height):
    """Letters of a key below a picture of so many pixels that do not make its own letters too small.

    >>> key_room(496, 224), key_room(496, 512)
    (320, 0)
    """
    free = FIGURE[1] - height * min(LARGE, FIGURE[0] / width)
    return max(0, min(KEY_LETTERS, int(free / KEY_LINE[1]) * KEY_LINE[0]))


def key_of(text, letters=KEY_LETTERS, announces=False):
    """(what speaks of the figure before it, in so many letters, the rest), of a paragraph. announces: code follows it.

    >>> key_of("Blue is above. Why? The rest.")
    ('Blue is above.', 'Why? The rest.')
    """
    if QUESTION.search(text) and len(text) < letters and "Your turn" not in text and "\n-" not in text:
        return text, ""
    block = text.partition("\n\n")[0]
    is_told = not re.search(r"\?|Your turn|:$|^[-|\d]", block)
    if is_told and len(block) <= letters and (not announces or KEY.search(SENTENCE.split(block)[0])):
        return block, text[len(block) :].strip()
    end = 0
    for sentence in sentences_of(block):
        if not KEY.search(sentence) or "?" in sentence or "Your turn" in sentence or sentence.endswith(":"):
            break
        if end + len(sentence) > letters or re.match(r"[-|\d]", sentence):
            break
        end += len(sentence)
    return text[:end].strip(), text[end:].strip()


def told_first(cells):
    """The cells, but what hidden cells print between two texts with a title comes after the second.

    >>> texts = [{"cell_type": "markdown", "source": f"**Case {i}.** Why."} for i in (1, 2)]
    >>> hidden = {"cell_type": "code", "metadata": {"jupyter": {"source_hidden": True}}}
    >>> told_first([texts[0], hidden, texts[1]]) == [*texts, hidden]
    True
    """
    cells = [*cells]
    titled = [i for i, cell in enumerate(cells) if cell["cell_type"] == "markdown"]
    for start, end in [*pairwise(titled)][::-1]:
        have_titles = all(TITLE.match("".join(cells[i]["source"])) for i in (start, end))
        if have_titles and all(map(code_is_hidden, cells[start + 1 : end])):
            cells.insert(start + 1, cells.pop(end))
    return cells


def linked(source):
    """Links to notebooks lead to their slides; those to other files of the repository are their text.

    >>> linked("[2](02_bitlinear.ipynb#absmax), [one file](tinybitnet.py), [a paper](https://arxiv.org)")
    '[2](02_bitlinear.html), one file, [a paper](https://arxiv.org)'
    """
    source = re.sub(r"\]\((\w+)\.ipynb[^)]*\)", r"](\1.html)", source)
    return re.sub(r"\[([^]\n]+)]\((?!https?:|\w+\.html)[^)]+\)", r"\1", source)


def cell_parts(cells):
    """A `Part` for each paragraph, piece of code, and output."""
    codes = live_codes(cells)
    told = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    for number, (cell, code) in enumerate(zip(cells, codes, strict=True)):
        source = "".join(cell["source"])
        is_hidden = code_is_hidden(cell)
        exercises = exercises_in(cell)
        is_quiz = any(each.name.endswith(".quiz") for each in exercises)
        if cell["cell_type"] == "markdown":
            texts = paragraphs(linked(source))
            if is_lone_widget(cells, number + 1):
                texts = texts[:-1]
            for place, beside in ((0, cells[number - 1 : number]), (-1, cells[number + 1 : number + 2])):
                if beside and waits_for_student(beside[0]) and texts:
                    texts[place] = without_sentences(texts[place], YOURS)
            minutes = minutes_of(exercises_in(cells[number + 1])) if source.startswith("## Quiz") else ""
            for text in filter(None, texts):
                yield from text_parts(text)
                if minutes and QUESTION.search(text):
                    yield Part(False, 1, minutes, is_given=True)
                    minutes = ""
            continue
        if is_lone_widget(cells, number):
            continue
        if exercises and not is_quiz:
            yield Part(False, 1, minutes_of(exercises), is_given=True)
        outputs = (
            [part for output in cell["outputs"] for part in shown_output(output)] if has_output(cell, told) else []
        )
        outputs.sort(key=lambda part: part.is_figure)  # nothing between a figure and its key
        if code and not is_hidden:
            while outputs and 'class="highlight"' in outputs[0].html:  # a source that the code uses
                yield outputs.pop(0)
            outputs.sort(key=lambda part: 'class="highlight"' in part.html or 2 * part.is_figure)  # prints first
            is_given = bool(exercises or re.fullmatch(r"\w+ = \{(\s+.*: None,)+\s*\}", code))
            is_widget = any(WIDGET in each.get("data", ()) for each in cell["outputs"])
            for place, piece in enumerate(() if is_widget else cut_code(code)):
                html = highlighted(piece)
                if is_given:
                    html = html.replace("<pre>", '<pre class="given">')
                yield Part(False, code_height(piece), html, breaks=place > 0, is_given=is_given and not place)
        if outputs and is_hidden and not outputs[0].is_figure:
            source_before = "".join(cells[number - 1]["source"])
            is_announced = source_before.rstrip().endswith(":") or TITLE.match(source_before)
            outputs[0] = outputs[0]._replace(breaks=not is_announced)
        yield from outputs


def is_lone_widget(cells, number):
    """Whether a cell is a widget, and the text before it asks nothing that its picture answers."""
    outputs = [output for cell in cells[number : number + 1] for output in cell.get("outputs", ())]
    is_widget = any(WIDGET in output.get("data", ()) for output in outputs)
    return is_widget and not any("?" in text for text in paragraphs("".join(cells[number - 1]["source"])))


def minutes_of(exercises):
    return f"{TURN}About {sum(each.minutes for each in exercises)} minutes</p>"


def highlighted(code, language="python"):
    return highlight(code, get_lexer_by_name(language or "text"), HtmlFormatter())


def paragraphs(source):
    """A cell's text cut at empty lines and after a guess, but not within a sentence; without what only a reader at the
    notebook needs.

    >>> list(paragraphs("So:\\n\\n$$x$$\\n\\nis\\n\\nMore."))
    ['So:\\n\\n$$x$$\\n\\nis', 'More.']
    >>> list(paragraphs("Before the picture, a guess: how many? Ten, say the next two cells. *More* than five."))
    ['Before the picture, a guess: how many?', '*More* than five.']
    """
    whole = []
    for text in re.split(r"\n\n+", BEFORE.sub("First", BESIDE.sub(lambda m: "" if m[1] else " first", source))):
        if not text.strip() or text.startswith("[![") or not (text := without_sentences(text, ASIDE)):
            continue
        if whole and goes_on(whole[-1].rpartition("\n\n")[2], text):
            whole[-1] += f"\n\n{text}"
        elif (guess := GUESS.match(text)) and "Your turn" not in text:
            whole += guess.groups()
        else:
            whole.append(text)
    return whole


def without_sentences(text, pattern):
    """A paragraph without the sentences, and the brackets, that match."""
    if text.startswith(("#", "|", "-")) or not pattern.search(text):
        return text
    text = BRACKETS.sub(lambda found: "" if pattern.search(found[0]) else found[0], text)
    remaining = "".join(sentence for sentence in sentences_of(text) if not pattern.search(sentence))
    return "" if re.fullmatch(r"\*\*[^*]*\*\*\s*", remaining) else remaining.strip()


def sentences_of(text):
    """Each with the space after it.

    >>> sentences_of("One. *Two*? Three")
    ['One. ', '*Two*? ', 'Three']
    """
    ends = [each.end() for each in SENTENCE.finditer(text)]
    return [text[start:end] for start, end in pairwise([0, *ends, len(text)])]


def goes_on(before, text):
    """Whether a paragraph belongs to the one before: below a heading, in a sentence, or a list of what is asked."""
    is_heading = before.startswith("#") and "\n" not in before
    is_listed = QUESTION.search(before) and re.match(r"[-|]|1\. ", text)
    return bool(is_heading or is_listed or text.startswith("$$") or text[0].islower())


def part_of(text, letters=100, high=1.05):
    """The `Part` of a paragraph. letters, high: of a line of its table, and its height."""
    begins = text.startswith("#")
    words = re.sub(r"^\|.*\n?", "", text, flags=re.MULTILINE)
    extra = words.count("\n- ") + words.count("$$")  # lines that are not full
    height = 1 + len(words) / LETTERS + extra + begins + sum(row_heights(text, letters, high))
    return Part(begins, height, MARKDOWN.render(text), text)


def row_heights(text, letters, high):
    """Height of each row of the table in a text, the line below the head left out."""
    lines = [line for line in text.split("\n") if line.startswith("|") and "|---" not in line]
    rows = [[len(MARKUP.sub("", cell.strip())) for cell in line.strip("| ").split("|")] for line in lines]
    longest = [max(column) for column in zip_longest(*rows, fillvalue=0)]
    share = min(1, (letters - 2 * len(longest)) / max(sum(longest), 1))
    wraps = [
        max(-(-cell // max(int(most * share), 1)) for cell, most in zip(row, longest, strict=False)) for row in rows
    ]
    return [high * (0.25 + 0.75 * number) for number in wraps]


def text_parts(text, *of_table):
    """A `Part` for a text, or several where its table has no room on a page: each has the head of the table."""
    lines = text.split("\n")
    table = [i for i, line in enumerate(lines) if line.startswith("|")]
    if not table or part_of(text, *of_table).height <= LINES - 0.5:
        yield part_of(text, *of_table)
        return
    head, body = lines[table[0] : table[0] + 2], lines[table[2] : table[-1] + 1]
    before, after = lines[: table[0]], lines[table[-1] + 1 :]
    rows, is_first = [], True
    for row in [*body, None]:
        longer = part_of("\n".join([*before, *head, *rows, row or ""]), *of_table)
        if row is None or (rows and longer.height > LINES - 0.5 - (not is_first)):
            yield part_of("\n".join([*before, *head, *rows]), *of_table)._replace(breaks=not is_first)
            before, rows, is_first = [], [], False
        rows.append(row)
    if rest := "\n".join(after).strip():
        yield part_of(rest)


def shown_output(output):
    """The parts of a picture, a table or a text."""
    data = output.get("data", {})
    if "image/png" in data:
        alt = output["metadata"].get("image/png", {}).get("alt", "")
        picture = data["image/png"].strip()
        html = f'<div class="figure"><img alt="{escape(alt)}" src="data:image/png;base64,{picture}"></div>'
        yield Part(False, LINES, html, key_letters=key_room(*struct.unpack(">II", b64decode(picture[:32])[16:24])))
    elif "text/html" in data:
        html = "".join(data["text/html"])
        yield Part(False, 2 + 0.85 * html.count("<tr") + 6 * ("<img" in html), f'<div class="output">{html}</div>')
    elif "text/markdown" in data:
        text = re.sub("</?div[^>]*>", "", "".join(data["text/markdown"])).replace("| None |", "| |")
        for label, language, code in re.findall(r"(`[^`\n]*`)\n```(\w*)\n(.*?)\n```", text, flags=re.DOTALL):
            above = MARKDOWN.render(label)
            for piece in cut_lines(code):
                height = code_height(piece) + 1.2 * bool(above)
                yield Part(False, height, above + highlighted(piece, language), breaks=not above)
                above = ""
        if "```" not in text:
            for part in text_parts(text.strip(), 135, 0.85):
                yield part._replace(text="", html=f'<div class="output">{part.html}</div>')
    elif text := PLACEHOLDER.sub("", "".join(output.get("text", data.get("text/plain", "")))).rstrip():
        head = TABLE_HEAD.match(text)
        for number, piece in enumerate(cut_lines(text)):
            piece = f"{head[0]}{piece}" if head and number else piece
            yield Part(False, code_height(piece), f'<pre class="output">{escape(piece)}</pre>', breaks=number > 0)


def code_letters(page):
    """Pixels of the letters of code and output: larger ones where their lines have room, and the page is not full."""
    codes = [(part.height, pre) for part in page for pre in re.findall("<pre.*?</pre>", part.html, flags=re.DOTALL)]
    lines = [line for _, code in codes for line in unescape(re.sub("<[^>]*>", "", code)).split("\n")]
    for size in (24, 21) if codes and not any(part.is_figure for part in page) else ():
        added = sum(height for height, _ in codes) * (size / 18 - 1)
        if max(map(len, lines)) * size < CODE_WIDTH and sum(part.height for part in page) + added < FULL:
            return size
    return 18


def page_of(notebook):
    """(title, HTML) of a notebook."""
    title = "".join(notebook["cells"][0]["source"]).partition("\n")[0].removeprefix("# ")
    slides = []
    for pages in slides_of(notebook):
        heading = re.findall(r"<h\d>(.*)</h\d>", pages[0][0].html)[-1]
        inner = ""
        for number, page in enumerate(pages):
            above = f'<h2 class="again">{heading}</h2>' if number else ""
            shown = above + "".join(part.html for part in page)
            inner += f'<section style="--code: {code_letters(page)}px">{shown}</section>\n'
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
    light, dark = (HtmlFormatter(style=name).get_style_defs(".highlight") for name in ("default", "monokai"))
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
