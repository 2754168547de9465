"""Editions of a notebook: for teachers, with minutes, points and solutions; and as the source of an nbgrader course."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...errors import count_of
from .declare import EXERCISES, Exercise
from .lessons import MODULES

CHECKED = re.compile(r'^(?:\w+ = )?check(?:\.use)?\("([^"]+)", *(\w+)', re.MULTILINE)
WORDS_PER_MINUTE, LINES_PER_MINUTE = 150, 15  # of prose and of code, with thinking
assert MODULES, "their import declares the exercises"


def source_of(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def exercises_in(cell: dict[str, Any]) -> list[Exercise]:
    """The exercises that a code cell checks."""
    if cell["cell_type"] != "code":
        return []
    return [EXERCISES[name] for name, _ in CHECKED.findall(source_of(cell)) if name in EXERCISES]


def teacher_edition(notebook: dict[str, Any]) -> dict[str, Any]:
    """A copy with the plan after the title, and solutions. Outputs stay as they are."""
    out = copy.deepcopy(notebook)
    cells: list[dict[str, Any]] = []
    for cell in out["cells"]:
        cells.append(cell)
        cells += [note(f"solution-{each.name}", solution_text(each)) for each in exercises_in(cell)]
    cells.insert(1, note("teacher-plan", plan_text(notebook)))
    out["cells"] = cells
    return out


def nbgrader_edition(notebook: dict[str, Any]) -> dict[str, Any]:
    """A copy as the source of an nbgrader assignment: each exercise is a cell with its solution, which
    `nbgrader generate_assignment` takes out, and a locked cell with the check, which has the points.

    Source: nbgrader's documentation, "Cell metadata", schema 3.
    """
    out = copy.deepcopy(notebook)
    cells: list[dict[str, Any]] = []
    for cell in out["cells"]:
        cells.append(cell)
        for each in exercises_in(cell):
            begun, check = source_of(cell).rsplit("\n", 1)
            solved = f"{begun.rstrip()}\n\n### BEGIN SOLUTION\n{each.solution}\n### END SOLUTION"
            answered = f'check.answers["{each.name}"]'
            tested = f'{check}\nassert {answered}.status == "right", {answered}.text'
            cells.append(copy.deepcopy(cell) | {"id": f"{cell['id']}-check"})
            for part, text, points in ((cell, solved, None), (cells[-1], tested, each.points)):
                part |= {"source": text.splitlines(keepends=True), "outputs": [], "execution_count": None}
                part["metadata"]["nbgrader"] = _nbgrader_fields(part["id"], points)
    out["cells"] = cells
    return out


def _nbgrader_fields(cell_id: str, points: int | None) -> dict[str, Any]:
    """points: of a cell with tests; None: of a cell that the student writes."""
    fields = {"schema_version": 3, "grade_id": cell_id, "task": False}
    if points is None:
        return fields | {"grade": False, "locked": False, "solution": True}
    return fields | {"grade": True, "locked": True, "solution": False, "points": points}


def note(name: str, text: str) -> dict[str, Any]:
    """A cell of the teacher's own, marked as such."""
    cell_id = re.sub(r"[^a-zA-Z0-9_-]", "-", name)
    metadata = {"tags": ["teacher"]}
    return {"cell_type": "markdown", "id": cell_id, "metadata": metadata, "source": text.splitlines(keepends=True)}


def solution_text(exercise: Exercise) -> str:
    hints = "\n".join(f"{number}. {hint}" for number, hint in enumerate(exercise.hints, start=1))
    return (
        f"> **Teacher: {exercise.name}**, about {exercise.minutes} minutes, {count_of(exercise.points, 'point')}.\n\n"
        f"```python\n{exercise.solution}\n```\n\nHints that `check.hint()` tells, in this order:\n\n{hints}\n"
    )


def plan_text(notebook: dict[str, Any]) -> str:
    """A table of the sections: minutes to read, minutes of exercises, points."""
    rows = [(title, *_minutes(cells)) for title, cells in sections(notebook)]
    lines = [f"| {title} | {read} | {work or ''} | {points or ''} |" for title, read, work, points in rows]
    read, work, points = np.sum([row[1:] for row in rows], axis=0)
    total = f"| **together** | **{read}** | **{work}** | **{points}** |"
    head = "| section | minutes to read | minutes of exercises | points |\n|---|---|---|---|"
    return (
        "> **Teacher's edition.** Solutions stand below the exercises. Minutes are estimates, by the length of texts "
        "and code.\n\n" + "\n".join([head, *lines, total]) + "\n\n"
        "A point is for a right answer, however many hints it took; `bitnet-ref grade` counts them.\n"
    )


def sections(notebook: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(heading, its cells) of a notebook."""
    title, cells = "", list[dict[str, Any]]()
    for cell in notebook["cells"]:
        heading = re.search(r"^##? (.*)", source_of(cell), re.MULTILINE) if cell["cell_type"] == "markdown" else None
        if heading and cells:
            yield title, cells
            cells = []
        title = heading[1] if heading else title
        cells.append(cell)
    yield title, cells


def _minutes(cells: list[dict[str, Any]]) -> tuple[int, int, int]:
    """Minutes to read, minutes of exercises, points."""
    words = sum(len(source_of(cell).split()) for cell in cells if cell["cell_type"] == "markdown")
    shown = [cell for cell in cells if cell["cell_type"] == "code" and not cell["metadata"].get("jupyter")]
    lines = sum(source_of(cell).count("\n") + 1 for cell in shown)
    exercises = [each for cell in cells for each in exercises_in(cell)]
    read = max(1, round(words / WORDS_PER_MINUTE + lines / LINES_PER_MINUTE))
    return read, sum(each.minutes for each in exercises), sum(each.points for each in exercises)
