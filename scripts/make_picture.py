"""Draws docs/two_texts.svg, the picture of README.md: storyteller's text beside that of an engine with one mistake.

    python scripts/make_picture.py

The mistake is planted in a copy of the package (crossval/planting.py). Both texts are greedy, and the line below them
is what crossval says of the copy's trace. tests/crossval/test_planted_bugs.py compares the file with a new drawing.
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

PICTURE = ROOT / "docs" / "two_texts.svg"
BUG = "rope_interleaved"
PROMPT, NEW_TOKENS = "Once upon a time", 39
LINE, COLUMNS, PANEL, HEIGHT, GAP, BAND = 22, 28, 264, 236, 12, 62  # COLUMNS: letters of a line; the others: pixels
INK, PAPER, RIGHT, WRONG = "#e6edf3", "#1c2430", "#3fb950", "#f0883e"  # a paper of its own suits white and dark pages


def draw() -> str:
    """The picture, as SVG."""
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
    verdict = f"crossval: the first wrong op is {comparison.first_divergence.name}", f"cause: {cause}"
    width = 2 * PANEL + GAP
    parts = [
        *panel(0, "the reference", RIGHT, right),
        *panel(PANEL + GAP, "an engine with one mistake", WRONG, wrong),
        box(0, HEIGHT + GAP, width, BAND),
        *(text(0, HEIGHT + GAP + 26 + 21 * row, line, WRONG, "monospace", 13) for row, line in enumerate(verdict)),
    ]
    texts = f"The reference: {right} An engine with one mistake: {wrong}"
    label = f"Two texts that begin {PROMPT!r}. {texts} {'; '.join(verdict)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT + GAP + BAND}" role="img">'
        f"<title>{escape(' '.join(label.split()))}</title>\n{''.join(parts)}</svg>\n"
    )


def panel(x: int, title: str, colour: str, continuation: str) -> list[str]:
    """A box with a title, and the prompt with its continuation."""
    gap = "" if continuation.startswith(",") else " "
    paragraphs = f"{PROMPT}{gap}{continuation}".split("\n")
    lines = [line for each in paragraphs for line in textwrap.wrap(each, COLUMNS)]
    rows = [text(x, 66 + LINE * number, line, INK, "serif", 17) for number, line in enumerate(lines)]
    return [box(x, 0, PANEL, HEIGHT), text(x, 32, title, colour, "sans-serif", 16), *rows]


def box(x: int, y: int, width: int, height: int) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{PAPER}"/>\n'


def text(x: int, y: int, content: str, colour: str, family: str, size: int) -> str:
    font = f'font-size="{size}" font-family="{family}"'
    return f'<text x="{x + 16}" y="{y}" {font} fill="{colour}">{escape(content)}</text>\n'


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
