"""`bitnet-ref grade`: run students' notebooks, and count the points of their exercises."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import FormatError
from .shell import common_options, exit_code, make_table, report, waiting

if TYPE_CHECKING:
    from rich.console import Console

    from ..crossval.exercises.grading import Graded


@click.command(short_help="Run notebooks of the course and count the points of their exercises.")
@click.argument("notebooks", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@common_options
def grade(notebooks: tuple[Path, ...]) -> None:
    """Run students' notebooks and count the points of their exercises.

    \b
    Each runs in a process of its own, in an empty folder, with limits on time, memory and files, and with other inputs
    than the student saw. It needs bitnet-ref[notebooks]. A file that cannot be graded stops no other; the exit code is
    then 3.
    """
    from ..crossval.exercises.grading import Graded, grade_notebook

    graded, code = [], 0
    for path in notebooks:
        try:
            with waiting(f"running {path.name}"):
                graded.append(grade_notebook(path))
        except FormatError as error:
            graded.append(Graded(str(path), "", [], [error.message]))
            code = exit_code(error)
    report({"notebooks": [each.to_dict() for each in graded]}, lambda console: _draw(console, graded), code)


def _draw(console: Console, graded: list[Graded]) -> None:
    for notebook in graded:
        if not notebook.grades:
            console.print(f"{notebook.path}: not graded: {'; '.join(notebook.errors)}", markup=False)
            continue
        console.print(f"{notebook.path}: {notebook.points} of {notebook.of} points", markup=False)
        rows = [(each.name, str(each.points), str(each.of), each.says) for each in notebook.grades]
        console.print(make_table(("exercise", ">points", ">of", "says"), rows))
        for error in notebook.errors:
            console.print(f"  a cell raised {error}", markup=False)
