"""crossval/mutants.py: edits of executed lines are found out. A few here, the whole as slow."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bitnet_ref import available_backends

FOLDER = Path(__file__).parents[2] / "crossval"
sys.path.insert(0, str(FOLDER))

import kernel_mutants  # noqa: E402
import mutants  # noqa: E402
import python_mutants  # noqa: E402

sys.path[:] = [path for path in sys.path if path != str(FOLDER)]  # its other scripts have the names of packages

SOURCE = '''
"""A docstring with 1 < 2."""

def scores(q: int, k: int, n: int = 3) -> int:
    """Not 1."""
    if not n < 4 and q is None:
        raise ValueError(f"{n + 1} is too many")
    cache[n] = scale(q, k, exact=True)
    return q.keys * 2 if n else -k
'''
EDITS = {
    "def scores(q: int, k: int, n: int = (4)) -> int:",
    "if (not n < 4 or q is None):",
    "if (n < 4) and q is None:",
    "if not (n <= 4) and q is None:",
    "if not n < (5) and q is None:",
    "if not n < 4 and (q is not None):",
    "if not n < 4 and (k) is None:",
    "pass",
    "cache[n] = (scale(k, q, exact=True))",
    "cache[n] = (scale(q, k))",
    "cache[n] = scale((k), k, exact=True)",
    "cache[n] = scale(q, k, exact=(False))",
    "return (-k if n else q.keys * 2)",
    "return (q.keys + 2) if n else -k",
    "return (q.values) * 2 if n else -k",
    "cache[n] = scale(q, (q), exact=True)",
    "return (k).keys * 2 if n else -k",
    "return q.keys * 2 if n else -(q)",
    "return q.keys * (3) if n else -k",
    "return q.keys * 2 if n else (k)",
}

needs_cython = pytest.mark.skipif(
    available_backends()["cython"] is not None, reason="mutants run on the cython backend"
)


def test_python_mutants_are_small_edits_of_executed_lines(tmp_path, monkeypatch):
    (tmp_path / "scores.py").write_text(SOURCE)
    monkeypatch.setattr(python_mutants, "PACKAGE", tmp_path)
    found = list(python_mutants.file_mutants("scores.py", set(range(20))))
    assert {mutant.new for mutant in found} == EDITS
    assert {mutant.place for mutant in found} == {"scores"}
    for mutant in found:
        ast.parse(mutant.text)
        lines = zip(SOURCE.splitlines(), mutant.text.splitlines(), strict=True)
        assert sum(before != after for before, after in lines) == 1
    assert {mutant.old for mutant in python_mutants.file_mutants("scores.py", {8})} == {
        "cache[n] = scale(q, k, exact=True)"
    }


def test_every_place_in_the_kernels_exists():
    texts = kernel_mutants._edited(FOLDER.parent / kernel_mutants.KERNELS)
    count = len(kernel_mutants.kernel_places())
    assert count > 150
    everything = "".join(texts.values())
    assert all(f"bitnet_ref_mutant == {number}" in everything for number in range(1, count + 1))


def test_a_place_that_is_gone_is_an_error(monkeypatch):
    monkeypatch.setattr(kernel_mutants, "PLACES", {"panel.h": "no_such_text(⟦a → b⟧)"})
    with pytest.raises(LookupError, match="occurs 0 times"):
        kernel_mutants._edited(FOLDER.parent / kernel_mutants.KERNELS)


def test_known_mutants_have_reasons():
    assert all(len(reason) > 20 for reason in mutants.KNOWN.values())


def run(*arguments: str, tmp_path: Path) -> list[list[str]]:
    command = [sys.executable, str(FOLDER / "mutants.py"), *arguments, "--json", str(tmp_path / "verdicts.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    return json.loads((tmp_path / "verdicts.json").read_text())


@needs_cython
@pytest.mark.slow
def test_a_mistake_in_the_fused_block_is_noticed(tmp_path):
    only = "backends/cpu/backend.py CythonBackend.feed_forward: "
    rows = run("--kernels", "0", "--python", "2", "--only", only, "--no-control", tmp_path=tmp_path)
    assert len(rows) == 2


@needs_cython
@pytest.mark.slow
def test_every_silent_change_is_noticed_or_known(tmp_path):
    run("--python", "300", tmp_path=tmp_path)
