"""crossval matrix: a receipt behind each cell, cells that are kept, and cells whose engine fails."""

import json
import re
from urllib.parse import urljoin

import pytest
from chromium import Chromium, needs_chromium
from helpers import GOLDEN

from bitnet_ref.cli import main
from bitnet_ref.crossval import matrix, verify_receipt
from bitnet_ref.crossval.report import Crossing, write_html

MODEL = str(GOLDEN / "bitnet-packed-offline")


def run(arguments, capsys):
    try:
        main(["crossval", "matrix", *arguments, "--json"])
    except SystemExit as end:
        code = end.code or 0
    captured = capsys.readouterr()
    return code, json.loads(captured.out), captured.err


@pytest.mark.thorough
def test_cells_are_kept_and_failures_have_their_reason(tmp_path, capsys, monkeypatch):
    table = tmp_path / "table.md"
    arguments = [MODEL, str(tmp_path / "none"), "--engine", "numpy", "--engine", "llama-cpp", "--out", str(table)]
    arguments += ["--python", "llama-cpp=/no/such/python"]
    code, facts, log = run(arguments, capsys)
    cells = {(cell["model"], cell["engine"]): cell for cell in facts["cells"]}
    assert (code, len(cells)) == (0, 4)
    assert cells[MODEL, "numpy"]["agrees"] is True
    assert cells[MODEL, "llama_cpp"]["agrees"] is None
    assert "/no/such/python" in cells[MODEL, "llama_cpp"]["text"]
    assert "does not load" in cells[str(tmp_path / "none"), "numpy"]["text"]
    assert "computing" in log
    receipts = tmp_path / "table.receipts"
    receipt = receipts / "bitnet-packed-offline--numpy.json"
    assert f"({receipts.name}/{receipt.name})" in table.read_text()
    assert verify_receipt(receipt).holds

    def crash(*_):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(matrix, "cross_backends", crash)
    _, _, log = run(arguments, capsys)  # the numpy cell is kept; the engine that could not run is tried again
    assert "numpy: kept" in log
    assert "llama_cpp: computing" in log
    receipt.write_text(receipt.read_text().replace('"agrees": true', '"agrees": false', 1))  # its seal is broken
    page = tmp_path / "table.html"  # its receipts are in the same folder
    code, facts, _ = run([MODEL, "--engine", "numpy", "--out", str(page)], capsys)
    assert code == 1
    assert "ZeroDivisionError: planted" in facts["cells"][0]["text"]
    assert "planted" in page.read_text()


def test_links_lead_to_receipts_of_any_name(tmp_path):
    receipt = tmp_path / "run #2 (50%).receipts" / "a--numpy.json"
    cell = matrix.Cell("a", "numpy", True, "equal", receipt)
    for name, form in (("table.html", 'href="(.*?)"'), ("table.md", r"\[equal\]\((\S*?)\) ")):
        matrix.write_matrix(tmp_path / name, [cell])
        link = re.search(form, (tmp_path / name).read_text())[1]
        assert urljoin(tmp_path.as_uri() + "/", link) == receipt.as_uri()


@pytest.mark.thorough
@needs_chromium
def test_both_pages_have_the_width_of_a_phone(tmp_path):
    """Without a viewport a phone draws them 980 pixels wide, with letters too small to read."""
    matrix.write_matrix(tmp_path / "table.html", [matrix.Cell("a", "numpy", True, "equal", None)])
    write_html(tmp_path / "report.html", "a", [Crossing("numpy", failed="ValueError: no such file")], {})
    with Chromium() as browser:
        for path in tmp_path.iterdir():
            page = browser.page(path.as_uri(), width=360)
            assert page.run("[innerWidth, document.documentElement.scrollWidth]") == [360, 360], path.name
