"""`bitnet-ref lab`: copy the notebooks to a folder of the user, and open them in JupyterLab."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import click

from ..errors import BackendUnavailable, FormatError, count_of
from ..system.atomic import explain_os_errors, write_file
from ..system.json_file import open_regular
from .shell import OutputFolder, common_options, paint, print_json, wants_json

PACKAGE = Path(__file__).resolve().parent.parent
DEFAULT_FOLDER, TEACHER_FOLDER, NBGRADER_FOLDER = "bitnet_ref_notebooks", "bitnet_ref_teacher", "bitnet_ref_nbgrader"
NO_JUPYTERLAB = (
    'JupyterLab is not installed: pip install "bitnet-ref[notebooks]"; --no-launch copies the notebooks only'
)


class Copied(NamedTuple):
    """Files, by their paths in the folder, by what was done with them."""

    copied: list[str]
    unchanged: list[str]
    kept: list[str]  # changed by the user since they were copied


@click.command(short_help="Copy the notebooks and open them in JupyterLab.")
@click.option("--dir", "folder", type=OutputFolder(), default=DEFAULT_FOLDER, show_default=True)
@click.option("--teacher", is_flag=True, help="With solutions, hints, minutes and points; into a folder of its own.")
@click.option("--nbgrader", is_flag=True, help="As source/NAME/NAME.ipynb of an nbgrader course; not opened.")
@click.option("--no-launch", is_flag=True, help="Copy only.")
@click.option("--force", is_flag=True, help="Overwrite notebooks that were changed.")
@click.argument("jupyter_options", nargs=-1, type=click.UNPROCESSED, metavar="[-- JUPYTERLAB_OPTIONS]")
@common_options
def lab(
    folder: Path, teacher: bool, nbgrader: bool, no_launch: bool, force: bool, jupyter_options: tuple[str, ...]
) -> None:
    """Copy the notebooks and open them in JupyterLab. A notebook that you changed is left as it is.

    The copies have no outputs yet, so that no answer stands below a question; the teacher's have them.

    \b
    Options after -- go to JupyterLab:  bitnet-ref lab -- --port 9999 --no-browser
    """
    if teacher and nbgrader:
        raise click.UsageError("--teacher and --nbgrader are two editions: choose one. nbgrader's has solutions, too.")
    source = find_notebooks()
    if source is None:
        raise FormatError("this installation has no notebooks; install bitnet-ref again", path=PACKAGE)
    if (teacher or nbgrader) and folder == Path(DEFAULT_FOLDER):
        folder = Path(NBGRADER_FOLDER if nbgrader else TEACHER_FOLDER)
    no_launch |= nbgrader
    if not no_launch and find_spec("jupyterlab") is None:
        raise BackendUnavailable(NO_JUPYTERLAB)
    done = copy_notebooks(source, folder, force, "nbgrader" if nbgrader else "teacher" if teacher else None)
    if wants_json():
        print_json({"directory": str(folder), **done._asdict(), "launched": not no_launch})
    else:
        for name in done.copied:
            click.echo(f"copied {folder / name}")
        for name in done.kept:
            click.echo(f"kept   {folder / name} {paint('(you changed it; --force overwrites)', sys.stdout, dim=True)}")
        if done.unchanged:
            click.echo(f"already in {folder}: {count_of(len(done.unchanged), 'file')}")
    if no_launch:
        return
    if os.name == "posix" and os.geteuid() == 0 and not any("allow-root" in option for option in jupyter_options):
        click.echo("running as root: starting JupyterLab with --allow-root", err=True)
        jupyter_options = ("--allow-root", *jupyter_options)
    sys.stdout.flush()
    # Replaces this process, so that Ctrl-C and the exit code are JupyterLab's own.
    os.execv(sys.executable, [sys.executable, "-m", "jupyterlab", str(folder), *jupyter_options])


def find_notebooks(package: Path = PACKAGE) -> Path | None:
    """The folder of notebooks: in the installed package, or beside it in a checkout of the repository."""
    folders = (package / "notebooks", package.parent / "notebooks")
    return next((folder for folder in folders if any(folder.glob("*.ipynb"))), None)


def _read(file: Path) -> bytes:
    with open_regular(file, FormatError) as opened:
        return opened.read()


def copy_notebooks(source: Path, target: Path, force: bool = False, edition: str | None = None) -> Copied:
    """Copy the notebooks and the modules they import. A changed file is not overwritten unless `force`.

    edition: None: notebooks without outputs, since outputs tell answers. "teacher": with outputs, solutions, hints,
    minutes and points. "nbgrader": the notebooks alone, each in a folder of its own under source/, as the source of an
    assignment."""
    done, nbgrader = Copied([], [], []), edition == "nbgrader"
    with explain_os_errors(target):
        target.mkdir(parents=True, exist_ok=True)
        for file in sorted(source.iterdir()):
            if not file.is_file() or file.suffix not in ((".ipynb",) if nbgrader else (".ipynb", ".py", ".md", ".txt")):
                continue
            copy, content = target / file.name, _read(file)
            if file.suffix == ".ipynb":
                content = _in_edition(content, edition)
            if nbgrader:
                copy = target / "source" / file.stem / file.name
            name = copy.relative_to(target).as_posix()
            if copy.exists() and _read(copy) == content:
                done.unchanged.append(name)
            elif copy.exists() and not force:
                done.kept.append(name)
            else:
                write_file(copy, content)
                done.copied.append(name)
    return done


def _in_edition(content: bytes, edition: str | None) -> bytes:
    notebook = json.loads(content)
    if edition is None:
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                cell |= {"outputs": [], "execution_count": None}
    else:
        from ..crossval.exercises.teacher import nbgrader_edition, teacher_edition

        notebook = (nbgrader_edition if edition == "nbgrader" else teacher_edition)(notebook)
    return (json.dumps(notebook, indent=1, ensure_ascii=False) + "\n").encode()
