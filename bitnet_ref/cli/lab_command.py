"""`bitnet-ref lab`: the notebooks, copied to where they may be changed, and opened in JupyterLab."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import click

from ..errors import FormatError
from .shell import UNAVAILABLE, common_options, paint, print_json, say_error, wants_json

PACKAGE = Path(__file__).resolve().parent.parent
DEFAULT_FOLDER = "bitnet_ref_notebooks"
NO_JUPYTERLAB = 'JupyterLab is not installed: pip install "bitnet-ref[notebooks]"'


class Copied(NamedTuple):
    """File names, by what became of them."""

    copied: list[str]
    unchanged: list[str]
    kept: list[str]  # changed since they were copied, so left alone


@click.command(short_help="Copy the notebooks and open them in JupyterLab.")
@click.option(
    "--dir", "folder", type=click.Path(file_okay=False, path_type=Path), default=DEFAULT_FOLDER, show_default=True
)
@click.option("--no-launch", is_flag=True, help="Copy only.")
@click.option("--force", is_flag=True, help="Overwrite notebooks that were changed.")
@common_options
def lab(folder: Path, no_launch: bool, force: bool) -> None:
    """Copy the notebooks and open them in JupyterLab. A notebook that you changed is left as it is."""
    source = find_notebooks()
    if source is None:
        raise FormatError("this installation has no notebooks; install bitnet-ref again", path=PACKAGE)
    try:
        done = copy_notebooks(source, folder, force)
    except OSError as problem:
        raise click.UsageError(
            f"the notebooks cannot be copied to {folder}: {problem.strerror or problem}"
        ) from problem
    missing = not no_launch and find_spec("jupyterlab") is None
    if wants_json():
        report = {"directory": str(folder), **done._asdict(), "launched": not no_launch and not missing}
        print_json(report | ({"error": {"type": "Unavailable", "message": NO_JUPYTERLAB}} if missing else {}))
    else:
        for name in done.copied:
            click.echo(f"copied {folder / name}")
        for name in done.kept:
            click.echo(f"kept   {folder / name} {paint('(you changed it; --force overwrites)', sys.stdout, dim=True)}")
        if done.unchanged:
            click.echo(f"{len(done.unchanged)} notebooks were already in {folder}")
        if missing:
            say_error(NO_JUPYTERLAB)
    if missing:
        raise click.exceptions.Exit(UNAVAILABLE)
    if no_launch:
        return
    # In our place, not under us: Ctrl-C and the exit code are then JupyterLab's own.
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "jupyterlab", str(folder)])


def find_notebooks(package: Path = PACKAGE) -> Path | None:
    """The folder of notebooks: inside an installed package, else beside it in a repository's checkout."""
    for folder in (package / "notebooks", package.parent / "notebooks"):
        if any(folder.glob("*.ipynb")):
            return folder
    return None


def copy_notebooks(source: Path, target: Path, force: bool = False) -> Copied:
    """Copy what a reader needs (notebooks and the helpers beside them); a changed file stays, unless `force`."""
    done = Copied([], [], [])
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        if not file.is_file() or file.suffix not in (".ipynb", ".py", ".md"):
            continue
        copy = target / file.name
        if copy.exists() and copy.read_bytes() == file.read_bytes():
            done.unchanged.append(file.name)
        elif copy.exists() and not force:
            done.kept.append(file.name)
        else:
            shutil.copyfile(file, copy)
            done.copied.append(file.name)
    return done
