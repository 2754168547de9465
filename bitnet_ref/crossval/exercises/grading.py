"""Runs a student's notebook and counts its points.

The notebook runs in a kernel of its own: an empty folder, none of the variables of the grader's environment but those
that Python needs, and limits on time, memory and the size of files. Exercises get other inputs there than the student
saw, and a right answer is judged on a second sentence. It keeps mistakes apart from right answers; who wants to deceive
it can, since his code and the check share a process. Needs nbclient and ipykernel (`bitnet-ref[notebooks]`).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...errors import BackendUnavailable, FormatError
from ...system.json_file import open_regular
from .declare import EXERCISES, OTHER_INPUTS, Exercise
from .session import OPEN, RIGHT, Answered, Check
from .teacher import exercises_in

CELL_S, MEMORY_GB, FILE_MB = 300, 8, 64
OTHER_SENTENCE = "The old king sat on his throne and asked the cat,"
PYTHON_NEEDS = ("PATH", "PYTHONPATH", "VIRTUAL_ENV", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "TMPDIR")
MARK = "bitnet-ref-grades:"
INSTALLS = re.compile(r"^[%!] *(?:pip|conda|mamba|uv)\b.*", re.MULTILINE)  # the grader's own packages stay as they are


@dataclass(frozen=True)
class Grade:
    """The points for one exercise. says: the judgement, or why there is none."""

    name: str
    points: int
    of: int
    status: str
    says: str


@dataclass(frozen=True)
class Graded:
    """A notebook's points. errors: of cells that raised."""

    path: str
    lesson: str
    grades: list[Grade]
    errors: list[str]

    @property
    def points(self) -> int:
        return sum(grade.points for grade in self.grades)

    @property
    def of(self) -> int:
        return sum(grade.of for grade in self.grades)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self) | {"points": self.points, "of": self.of}


def grade_notebook(path: Path) -> Graded:
    """Run the notebook and judge its answers. Every exercise of its lesson counts, also those whose check was deleted.

    Raises FormatError for a file that is no notebook of the course, BackendUnavailable without nbclient."""
    notebook = read_notebook(path)
    names = [each.name for cell in notebook["cells"] for each in exercises_in(cell)]
    if not names:
        raise FormatError('has no exercise of the course, as check("1.1", ...)', path=path)
    lesson = Counter(EXERCISES[name].lesson for name in names).most_common(1)[0][0]
    results, errors = run_checked(notebook)
    wanted = [each for each in EXERCISES.values() if each.lesson == lesson]
    return Graded(str(path), lesson, [_grade(each, results.get(each.name)) for each in wanted], errors)


def _grade(exercise: Exercise, answered: Answered | None) -> Grade:
    if answered is None:
        return Grade(exercise.name, 0, exercise.points, OPEN, "its check did not run")
    points = exercise.points if answered.status == RIGHT else 0
    return Grade(exercise.name, points, exercise.points, answered.status, answered.text)


def read_notebook(path: Path) -> dict[str, Any]:
    """Raises FormatError for what is no notebook of format 4."""
    try:
        with open_regular(path, FormatError) as file:
            notebook = json.loads(file.read())
        kinds = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise FormatError("is no Jupyter notebook", path=path) from problem
    if notebook.get("nbformat") != 4 or not kinds:
        raise FormatError("is no notebook of format 4, or is empty", path=path, field="nbformat")
    checked: dict[str, Any] = notebook
    return checked


def run_checked(notebook: dict[str, Any]) -> tuple[dict[str, Answered], list[str]]:
    """The last judgement on each exercise, and the errors of cells."""
    try:
        import nbclient
        import nbformat
        from nbclient.exceptions import CellTimeoutError, DeadKernelError
    except ImportError as problem:
        raise BackendUnavailable("grading needs nbclient: pip install 'bitnet-ref[notebooks]'") from problem
    secret = secrets.token_hex(8)
    first = f"from bitnet_ref.crossval.exercises import grading as _g; _g.begin('{secret}'); del _g"
    last = f"from bitnet_ref.crossval.exercises import grading as _g; _g.report('{secret}')"
    cells = [nbformat.v4.new_code_cell(first)]
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cells.append(nbformat.v4.new_code_cell(INSTALLS.sub("pass", "".join(cell["source"]))))
    cells.append(nbformat.v4.new_code_cell(last))
    executed = nbformat.v4.new_notebook(cells=cells)
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as folder:
        environment = {name: os.environ[name] for name in PYTHON_NEEDS if name in os.environ}
        environment |= {"HOME": home, OTHER_INPUTS: str(1 + secrets.randbelow(2**31))}
        environment["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
        client = nbclient.NotebookClient(
            executed, timeout=CELL_S, kernel_name="python3", allow_errors=True, resources={"metadata": {"path": folder}}
        )
        client.extra_arguments = ["--log-level=ERROR"]
        try:
            client.execute(env=environment)
            ended = []
        except (CellTimeoutError, DeadKernelError) as error:  # the judgements before it count
            ended = [f"{type(error).__name__}: {str(error).splitlines()[0]}"]
    outputs = [output for cell in executed.cells for output in cell.get("outputs", [])]
    errors = [f"{output.ename}: {output.evalue}"[:200] for output in outputs if output.output_type == "error"]
    errors += ended
    text = "".join(output.get("text", "") for output in outputs if output.output_type == "stream")
    found = text.rpartition(f"{MARK}{secret} ")[2].splitlines()
    results = json.loads(found[0]) if f"{MARK}{secret} " in text else {}
    return {name: Answered(name, status, says) for name, (status, says) in results.items()}, errors


# -- in the kernel -----------------------------------------------------------------------------------------------------

_results: dict[str, dict[str, tuple[str, str]]] = {}


def begin(secret: str) -> None:
    """Set the limits, and note every judgement from here on."""
    _limit()
    notes = _results.setdefault(secret, {})
    judge = Check.judge

    def noting(self: Check, name: str, answer: Any, **given: Any) -> Answered:
        answered = judge(self, name, answer, **given)
        if answered.status == RIGHT and name.startswith("3b.") and self.model is not None:
            again = judge(Check(self.model, self.model.tokenizer.encode(OTHER_SENTENCE)), name, answer, **given)
            if again.status != RIGHT:
                answered = Answered(name, again.status, f"right on the sentence of the notebook only. {again.text}")
        notes[name] = (answered.status, answered.text)
        report(secret)  # now, as a later cell may end the run
        return answered

    Check.judge = noting  # type: ignore[method-assign]


def report(secret: str) -> None:
    """Print the judgements for the process that grades."""
    print(f"\n{MARK}{secret} {json.dumps(_results[secret])}")


def _limit() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    for kind, limit in ((resource.RLIMIT_AS, MEMORY_GB << 30), (resource.RLIMIT_FSIZE, FILE_MB << 20)):
        _, hard = resource.getrlimit(kind)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))
