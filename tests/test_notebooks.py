"""The notebooks: valid, committed with outputs, portable; and (`pytest -m notebooks`) still running top to bottom."""

from __future__ import annotations

import copy
import importlib
import json
import os
import re
import sys
import warnings
from pathlib import Path

import pytest

from bitnet_ref.crossval.exercises import EXERCISES

FOLDER = Path(__file__).parent.parent / "notebooks"
sys.path.append(str(FOLDER.parent / "scripts"))
prepare_notebooks = importlib.import_module("prepare_notebooks")
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MACHINE_PATH = re.compile(r"(?<![\w.])(/(home|root|Users|work|tmp|opt|usr|var|mnt|workspace)/|C:\\)")
MAX_LINE = 110
SHOWN = re.compile(r"`(?P<file>bitnet_ref/[^`]+)`\n```\w+\n(?P<source>.*)```", re.DOTALL)

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path, kind: str) -> list[dict]:
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


def test_they_are_numbered_in_reading_order():
    """00, 01, 02, 03a, 03b, 03c, 04, ...: the names sort as they are read."""
    assert NOTEBOOKS, "no notebooks found"
    numbers = [re.fullmatch(r"(\d\d)([a-z]?)_[a-z0-9_]+\.ipynb", path.name).groups() for path in NOTEBOOKS]
    assert sorted({int(number) for number, _ in numbers}) == list(range(int(numbers[-1][0]) + 1))
    for number in {number for number, _ in numbers}:
        letters = [letter for each, letter in numbers if each == number]
        assert letters in ([""], list("abcdefgh"[: len(letters)])), number


def test_the_readme_lists_each_of_them():
    listed = re.findall(r"\(([^)]+\.ipynb)\)", (FOLDER / "README.md").read_text(encoding="utf-8"))
    assert listed == [path.name for path in NOTEBOOKS]


@each_notebook
def test_slides_and_pictures_are_as_prepared(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    expected = copy.deepcopy(notebook)
    prepare_notebooks.prepare(expected)
    assert notebook == expected, "run: python scripts/prepare_notebooks.py"


@each_notebook
def test_figures_are_described_and_not_drawn(path):
    code = "".join("".join(cell["source"]) for cell in cells(path, "code"))
    assert "plt." not in code, "use bitnet_ref.notebook.panels: a figure is its data"


@each_notebook
def test_it_ends_with_what_to_read_next(path):
    assert "**Next:**" in "".join(cells(path, "markdown")[-1]["source"])


@each_notebook
def test_links_lead_somewhere(path):
    text = "".join("".join(cell["source"]) for cell in cells(path, "markdown"))
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert link.startswith("https://") or (FOLDER / link).is_file(), link


@each_notebook
def test_is_valid(path):
    nbformat = pytest.importorskip("nbformat")
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    nbformat.validate(notebook)  # nbformat.read would validate it too, and only log what it finds


@each_notebook
def test_is_committed_as_executed_from_top_to_bottom(path):
    code = cells(path, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs), "no figure"
    for output in outputs:
        assert output["output_type"] != "error", output
        assert output.get("name") != "stderr", output  # a warning is no part of a lesson


@each_notebook
def test_what_a_check_has_printed_is_of_its_own_exercise(path):
    for cell in cells(path, "code"):
        names = set(re.findall(r'check(?:\.use)?\("([^"]+)"', "".join(cell["source"])))
        printed = "".join("".join(output.get("text", "")) for output in cell["outputs"])
        assert set(re.findall(r"^(\S+): not answered yet", printed, re.MULTILINE)) <= names, f"cell {cell['id']}"


@each_notebook
def test_is_small_and_of_no_particular_machine(path):
    assert path.stat().st_size < 1_000_000
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert set(notebook["metadata"]) <= {"kernelspec", "language_info"}
    assert "version" not in notebook["metadata"].get("language_info", {})
    for cell in notebook["cells"]:
        assert "execution" not in cell["metadata"], "execution times are not for the repository"
        for output in cell.get("outputs", []):
            output.get("data", {}).pop("image/png", None)  # base64 has slashes of its own
    found = MACHINE_PATH.search(json.dumps(notebook, ensure_ascii=False))
    assert found is None, found


@each_notebook
def test_the_source_that_it_shows_is_the_present_one(path):
    for cell in cells(path, "code"):
        for output in cell["outputs"]:
            shown = SHOWN.search("".join(output.get("data", {}).get("text/markdown", "")))
            if shown is not None:
                present = (FOLDER.parent / shown["file"]).read_text(encoding="utf-8")
                assert shown["source"] in present, f"{shown['file']} has changed: execute {path.name} again"


@each_notebook
def test_teaches_with_asserts_and_the_source_itself(path):
    code = ["".join(cell["source"]) for cell in cells(path, "code")]
    assert sum("assert " in source or "check(" in source for source in code) >= 10
    assert any(re.search(r"^show\(", source, re.MULTILINE) for source in code), "shows no source of the package"
    too_long = [line for source in code for line in source.splitlines() if len(line) > MAX_LINE]
    assert not too_long, too_long


def test_the_speeds_of_notebook_8_are_those_of_the_guide():
    source = "".join("".join(cell["source"]) for cell in cells(FOLDER / "08_cuda_kernels.ipynb", "code"))
    shown = re.findall(r"^    (\d+): \((\d+), ([\d.]+)\),$", source, re.MULTILINE)
    guide = (FOLDER.parent / "docs" / "gpu.md").read_text(encoding="utf-8").replace(",", "")
    rates = re.findall(r"^\| (?:one|(\d+)) sequences?[^|]*tok/s \| \d+ \| (\d+) \|", guide, re.MULTILINE)
    times = re.findall(
        r"^\| (?:time of a step on the card|the same) \D*(\d+) .*?\| [\d.]+ \| ([\d.]+) \|", guide, re.MULTILINE
    )
    assert len(shown) == len(rates) == len(times) == 4
    for (n, rate, ms), (of_rate, now), (of_time, step) in zip(shown, rates, times, strict=True):
        assert (n, rate, float(ms)) == (of_rate or "1", now, float(step))
        assert n == of_time


@each_notebook
def test_its_figures_say_in_words_what_they_show(path):
    """For readers who do not see them: a text in each picture's metadata."""
    for cell in cells(path, "code"):
        for output in cell["outputs"]:
            if "image/png" in output.get("data", {}):
                text = output["metadata"].get("image/png", {}).get("alt", "")
                assert len(text) > 20, f"{path.name}, cell {cell['id']}: a figure without alternative text"


@each_notebook
def test_code_that_only_plots_is_folded(path):
    """A cell that is one figure of some length begins folded; its reader comes for the picture."""
    for cell in cells(path, "code"):
        source = "".join(cell["source"])
        only = source.startswith(("panels(", "display(panels(", "Explorer(")) and source.count("\n") > 2
        assert not only or cell["metadata"].get("jupyter", {}).get("source_hidden"), f"cell {cell['id']}"


@each_notebook
def test_answers_are_checked_by_the_reference_and_not_told(path):
    """`check` knows the answer and the hints; the notebook has neither. tests/crossval/test_exercises.py judges it."""
    text = "".join("".join(cell["source"]) for cell in cells(path, "markdown"))
    assert "<details>" not in text
    for cell in cells(path, "code"):
        source = "".join(cell["source"])
        if "# TODO" in source:
            assert re.search(r"^(\w+ = )?check(\.use)?\(", source, re.MULTILINE), f"cell {cell['id']} checks nothing"


def with_solutions(notebook):
    """The notebook with every answer filled in: the solution stands before the check of it, as a student's would."""
    for cell in notebook["cells"]:
        for name, exercise in EXERCISES.items():
            match = re.search(rf'^(\w+ = )?check(\.use)?\("{re.escape(name)}"', cell["source"], re.MULTILINE)
            if cell["cell_type"] == "code" and match:
                start = match.start()
                cell["source"] = f"{cell['source'][:start]}{exercise.solution}\n\n{cell['source'][start:]}"
    return notebook


def answered_at_the_end(notebook):
    """The notebook as it is, and behind it the cells of its exercises again, solved, and the one that counts them."""
    solved = with_solutions(copy.deepcopy(notebook))["cells"]
    pairs = zip(notebook["cells"], solved, strict=True)
    again = [after for before, after in pairs if before != after or "check.progress()" in after["source"]]
    for number, cell in enumerate(again):
        cell["id"] = f"answer-{number}"
    notebook["cells"] += again
    return notebook


def builds_on_answers(path):
    """Whether later cells of a notebook run what a student has written. In the longest they run our solution alone."""
    return path.stem != LONGEST and any("check.use(" in "".join(cell["source"]) for cell in cells(path, "code"))


LONGEST = "09_training"  # trains models: it begins first, and the others run beside it


def runs():
    """(path, what is done to the notebook before it runs, for each count of right answers whether all are right)"""
    for path in sorted(NOTEBOOKS, key=lambda path: path.stem != LONGEST):
        if builds_on_answers(path):
            yield pytest.param(path, copy.copy, [False], id=f"{path.stem}-as it is")
            yield pytest.param(path, with_solutions, [True], id=f"{path.stem}-solved")
        else:
            yield pytest.param(path, answered_at_the_end, [False, True], id=path.stem)


@pytest.mark.notebooks
@pytest.mark.filterwarnings("ignore")  # Jupyter's own
@pytest.mark.parametrize(("path", "change", "right"), [*runs()])
def test_runs(path, change, right, tmp_path, monkeypatch):
    """In a fresh kernel and an empty folder: a failed assert in a cell fails the test. Solved, each answer is right.

    A notebook in which nothing is built on the answers runs once: it is solved when its end has been reached.
    """
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):  # many small products: threads only wait for each other
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    notebook = change(nbformat.read(path, as_version=4))
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        client.execute()
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            assert output.output_type != "error", output
    assert not list(tmp_path.iterdir()), "a notebook leaves files behind"
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    counts = re.findall(r"(\d+) of (\d+) exercises are right", printed)
    assert [(done, total) for done, total in counts] == [
        (total if filled else "0", total) for filled, (_, total) in zip(right, counts, strict=True)
    ], printed
