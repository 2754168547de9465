"""Draws docs/two_texts.svg, the picture of README.md: storyteller's text beside that of an engine with one mistake;
and docs/two_texts_narrow.svg, the same for a phone, with the boxes below one another.

    python scripts/make_picture.py

The mistake is planted in a copy of the package (crossval/planting.py). Both texts are greedy, and the line below them
is what crossval says of the copy's trace. tests/crossval/test_planted_bugs.py compares the files with new drawings.
"""

from __future__ import annotations

import sys
import textwrap
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "crossval"))

from bug_list import BLOCK_BUGS  # noqa: E402
from planting import planted  # noqa: E402

import bitnet_ref  # noqa: E402
from bitnet_ref.crossval.compare import compare  # noqa: E402
from bitnet_ref.crossval.explain.diagnose import diagnose  # noqa: E402

PICTURES = {ROOT / "docs" / "two_texts.svg": False, ROOT / "docs" / "two_texts_narrow.svg": True}  # whether narrow
BUG = "rope_interleaved"
PROMPT, NEW_TOKENS = "The rabbit ran", 44
LINE, GAP, MARGIN = 22, 12, 16  # pixels
PANEL, COLUMNS = 264, 28  # the width of a box, in pixels, and of its lines, in letters
NARROW_PANEL, NARROW_COLUMNS = 358, 38  # as wide as the text on a screen of 390 pixels
VERDICT_SIZE, VERDICT_LETTER = 13, 7.8
INK, PAPER, RIGHT, WRONG = "#e6edf3", "#1c2430", "#3fb950", "#f0883e"  # a paper of its own suits white and dark pages


def draw() -> dict[Path, str]:
    """The pictures, as SVG."""
    model = bitnet_ref.load(backend="numpy", threads=1)
    tokens = model.tokenizer.encode(PROMPT)
    (bug,) = (each for each in BLOCK_BUGS if each.name == BUG)
    right = model.generate(PROMPT, max_tokens=NEW_TOKENS, temperature=0.0).text
    with planted(bug.edits) as engine:
        copy = engine.load(backend="numpy", threads=1)
        wrong = copy.generate(PROMPT, max_tokens=NEW_TOKENS, temperature=0.0).text
        _, trace = copy.run_with_cache(tokens)
    comparison = compare(model.run_with_cache(tokens)[1], trace, model.config, tokens)
    assert comparison.first_divergence is not None
    (cause,) = (each.cause for each in diagnose(model, tokens, trace, comparison) if each.confirmed)
    verdict = [f"crossval: the first wrong op is {comparison.first_divergence.name}", f"cause: {cause}"]
    return {path: picture(right, wrong, verdict, narrow) for path, narrow in PICTURES.items()}


def picture(right: str, wrong: str, verdict: list[str], narrow: bool) -> str:
    """A box for each text, side by side or one below the other, and the verdict below both."""
    panel_width, columns = (NARROW_PANEL, NARROW_COLUMNS) if narrow else (PANEL, COLUMNS)
    texts = [lines_of(each, columns) for each in (right, wrong)]
    height = 82 + LINE * max(map(len, texts))
    x, y = (0, height + GAP) if narrow else (panel_width + GAP, 0)
    width, top = x + panel_width, y + height + GAP
    letters = int((width - 2 * MARGIN) / VERDICT_LETTER)
    rows = [row for line in verdict for row in textwrap.wrap(line, letters)]
    parts = [
        *panel(0, 0, panel_width, height, "the reference", RIGHT, texts[0]),
        *panel(x, y, panel_width, height, "an engine with one mistake", WRONG, texts[1]),
        box(0, top, width, 20 + 21 * len(rows)),
        *(text(0, top + 26 + 21 * number, row, WRONG, "monospace", VERDICT_SIZE) for number, row in enumerate(rows)),
    ]
    both = f"The reference: {right} An engine with one mistake: {wrong}"
    label = f"Two texts that begin {PROMPT!r}. {both} {'; '.join(verdict)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top + 20 + 21 * len(rows)}" role="img">'
        f"<title>{escape(' '.join(label.split()))}</title>\n{''.join(parts)}</svg>\n"
    )


def lines_of(continuation: str, columns: int) -> list[str]:
    """The prompt with its continuation, in lines."""
    gap = "" if continuation.startswith(",") else " "
    paragraphs = f"{PROMPT}{gap}{continuation}".split("\n")
    return [line for each in paragraphs for line in textwrap.wrap(each, columns)]


def panel(x: int, y: int, width: int, height: int, title: str, colour: str, lines: list[str]) -> list[str]:
    """A box with a title and lines of text."""
    rows = [text(x, y + 66 + LINE * number, line, INK, "serif", 17) for number, line in enumerate(lines)]
    return [box(x, y, width, height), text(x, y + 32, title, colour, "sans-serif", 16), *rows]


def box(x: int, y: int, width: int, height: int) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{PAPER}"/>\n'


def text(x: int, y: int, content: str, colour: str, family: str, size: int) -> str:
    font = f'font-size="{size}" font-family="{family}"'
    return f'<text x="{x + MARGIN}" y="{y}" {font} fill="{colour}">{escape(content)}</text>\n'


if __name__ == "__main__":
    for path, drawing in draw().items():
        path.write_text(drawing, encoding="utf-8")
