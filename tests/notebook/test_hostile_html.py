"""What a notebook or a browser shows of names and texts that others chose: HTML that runs nothing, in Chromium."""

import random
from dataclasses import replace

import numpy as np
import pytest
from chromium import Chromium, needs_chromium
from helpers import model

from bitnet_ref.backends.record import RecordedTensors
from bitnet_ref.crossval.matrix import Cell, write_matrix
from bitnet_ref.crossval.report import Crossing, write_html
from bitnet_ref.formats.open import ASSETS
from bitnet_ref.inspection import inspect_model, show_tensor
from bitnet_ref.serving.live import History, figures_html, requests_html
from bitnet_ref.serving.records import RequestProgress

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'bitnet-ref[notebooks]'")
STORY = ASSETS / "storyteller"
NAMES = [
    "<img src=x onerror=bad=1>",
    "'\"><script>bad=1<",
    "<svg onload=bad=1>",
    "</pre></td></table><iframe srcdoc='<script>parent.bad=1<'>",
    "<a href=javascript:bad=1 onfocus=bad=1 autofocus>",
    "&lt;img src=x onerror=bad=1&gt;",
    "$\\undefined{",
    "\ud800\x00\x1b[2J\u202e",
]


def random_names(count):
    """Pieces of hostile names in any order."""
    dice = random.Random(7)
    pieces = [*NAMES, *"<>&'\"`$\\{}%=/ \n", "<!--", "-->", "]]>", "<b", "style=", "&#60;", "<math>", "<template>", "a"]
    return ["".join(dice.choices(pieces, k=dice.randint(1, 8))) for _ in range(count)]


@pytest.mark.thorough
@needs_chromium
@pytest.mark.parametrize("names", [NAMES, pytest.param(random_names(200), marks=pytest.mark.slow)], ids=["8", "200"])
def test_names_and_texts_run_nothing(names, tmp_path):
    """And a name that is no formula draws the figure all the same."""
    text, facts = model(STORY).generate("Once", max_tokens=1), inspect_model(STORY)
    ternary, dense = (show_tensor(STORY, f"model.{name}.weight") for name in ("layers.0.self_attn.k_proj", "norm"))
    with model(STORY).engine() as engine:
        metrics = engine.metrics.snapshot()
    pages = []
    for name in names:
        frame = History().frame(0.0, metrics, [RequestProgress(1, name, 1, 1, 1.0, name)], False)
        shown = [replace(text, text=name), RecordedTensors({name: np.zeros(3, np.float32)})]
        shown.append(replace(dense, name=name))  # whose figure has the name in it
        shown += [replace(ternary, name="".join(names))] if not pages else []
        shown += [replace(facts, path=name, family=name, evidence=[name]), Crossing(name, failed=name, worked=name)]
        pages.append("".join([*(each._repr_html_() for each in shown), figures_html(frame), requests_html(frame)]))
        write_html(tmp_path / "page.html", name, [Crossing(name, failed=name)], {name: name})
        pages.append((tmp_path / "page.html").read_text(encoding="utf-8"))
        write_matrix(tmp_path / "page.html", [Cell(name, name, False, name, tmp_path / "r.json")])
        pages.append((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert len(pages) == 3 * len(names)
    check_in_chromium(tmp_path / "page.html", pages)


@pytest.mark.thorough
@needs_chromium
def test_a_generation_keeps_to_the_width_of_its_cell(tmp_path):
    """Also a long word; and a line from right to left has its end on its left."""
    (path := tmp_path / "page.html").write_text(
        replace(
            model(STORY).generate("Once", max_tokens=1), text="\u05e9\u05dc\u05d5\u05dd!\n" + "w" * 2000
        )._repr_html_(),
        encoding="utf-8-sig",
    )
    with Chromium() as browser:
        page = browser.page(path.as_uri(), width=900)
        assert page.run("document.documentElement.scrollWidth") <= 900
        lefts = """[0, 4].map((at) => {
            const range = document.createRange(), text = document.querySelector("div").firstChild;
            range.setStart(text, at);
            range.setEnd(text, at + 1);
            return range.getBoundingClientRect().left;
        })"""
        first, last = page.run(lefts)
        assert first > last


def check_in_chromium(path, pages):
    hostile = "script, iframe, [onload], [onerror], [onfocus], a[href^=java], img:not([src^=data])"
    with Chromium() as browser:
        page = browser.page("about:blank")
        for text in pages:
            path.write_text(text, encoding="utf-8", errors="replace")
            page.call("Page.navigate", url=f"file://{path}")
            page.until(f"location.protocol === 'file:' && document.readyState === 'complete' && {len(text)}")
            kinds = page.run(f"[typeof bad, document.querySelectorAll({hostile!r}).length]")
            assert kinds == ["undefined", 0], text[:200]
