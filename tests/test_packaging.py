"""What other packagers are told agrees with pyproject.toml: the version, and what is needed to run."""

import re
import tomllib
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RECIPE = (ROOT / "scripts" / "conda" / "recipe.yaml").read_text()


@pytest.mark.parametrize("name", ["scripts/conda/recipe.yaml", "CITATION.cff"])
def test_version(name):
    assert re.findall(r"^ *version: ([\d.]+)$", (ROOT / name).read_text(), re.MULTILINE) == [PROJECT["version"]]


def test_conda_requires_what_pip_does():
    run = RECIPE.split("\n  run:\n")[1].split("\ntests:")[0]
    needed = [f"python{PROJECT['requires-python']}", *(line.partition(";")[0] for line in PROJECT["dependencies"])]
    assert [line.removeprefix("- ").replace(" ", "") for line in map(str.strip, run.splitlines())] == needed


def test_a_package_has_the_same_minimum_everywhere():
    """.ci/run takes those of `dev` when it tests the oldest versions."""
    minimums = {}
    for line in chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()):
        name, _, minimum = line.partition(";")[0].partition(">=")
        assert minimums.setdefault(name, minimum) == minimum, name


def test_every_requirement_is_imported():
    """By the package itself, not only by a recorder, which runs beside another engine."""
    sources = (path for path in (ROOT / "bitnet_ref").rglob("*.py") if "recorders" not in path.parts)
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    for line in PROJECT["dependencies"]:
        name = re.match(r"\w+", line)[0]
        assert re.search(rf"^\s*(import|from) {name}\b", text, re.MULTILINE), f"{name} is required and not imported"
