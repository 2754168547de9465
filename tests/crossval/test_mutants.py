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

import kernel_models  # noqa: E402
import kernel_mutants  # noqa: E402
import mutant_texts  # noqa: E402
import mutants  # noqa: E402
import python_mutants  # noqa: E402
import room_mutants  # noqa: E402

sys.path[:] = [path for path in sys.path if path != str(FOLDER)]  # its other scripts have the names of packages

SOURCE = '''
"""A docstring with 1 < 2."""

def scores(q: int, k: int, n: int = 3) -> int:
    """Not 1."""
    if not n < 4 and q is None:
        raise ValueError(f"{n + 1} is too many")
    cache[n] = scale(q, k, exact=True)
    list(zip(cache, strict=True))
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


def test_an_install_beside_it_changes_no_text_of_the_kernels(tmp_path):
    """`setup.py` writes a file into the folder, by which the extension with the mutants would be another."""
    kernels = FOLDER.parent / kernel_mutants.KERNELS
    for kind in ("*.h", "*.pyx", "*.pxi", "sets_*.c"):
        for path in kernels.glob(kind):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "_types.pxi").write_text("generated")
    assert "_types.pxi" not in kernel_mutants._edited(tmp_path)
    assert kernel_mutants._edited(tmp_path) == kernel_mutants._edited(kernels)


def test_each_model_of_the_kernels_has_texts(tmp_path):
    assert kernel_models.kernel_models(tmp_path).keys() == mutant_texts.KERNEL_VARIANTS.keys()


def test_a_place_that_is_gone_is_an_error(monkeypatch):
    monkeypatch.setattr(kernel_mutants, "PLACES", {"panel.h": "no_such_text(⟦a → b⟧)"})
    with pytest.raises(LookupError, match="occurs 0 times"):
        kernel_mutants._edited(FOLDER.parent / kernel_mutants.KERNELS)


def test_known_mutants_have_reasons_and_are_there():
    for name, reason in mutants.KNOWN.items():
        place, _, edit = name.partition(": ")
        arrows = edit.split(" -> ")  # one is the edit, others may be of annotations
        source = (python_mutants.PACKAGE / place.split()[0]).read_text(encoding="utf-8")
        lines = " ".join(source.split())
        assert any(" -> ".join(arrows[:number]) in lines for number in range(1, len(arrows))), name
        assert len(reason) > 20


def test_rooms_have_files_and_tests_and_are_in_the_docs():
    docs = (FOLDER.parent / "docs" / "mutants.md").read_text()
    files = [file for room in room_mutants.ROOMS.values() for file in room.files()]
    assert len(files) == len(set(files))  # no file is in two rooms
    for name, room in room_mutants.ROOMS.items():
        assert len(room.files()) > 0
        assert all((FOLDER.parent / test).is_file() for test in room.test_files())
        assert f"| `{name}/` " in docs


def measured(file, seconds, lines):
    tests = [f"{file}::{number}" for number in range(len(seconds))]
    return room_mutants.TestLines(file, tests, seconds, {"a.py": lines}, {"a.py": [1, 2, 3, 4]})


def test_a_mutant_is_judged_by_the_tests_that_reach_it(monkeypatch):
    """First those that reach the line, then the file's others, in files of tests that reach it; the quickest first."""
    both = [
        measured("t1", [0.3, 0.1, 0.2, 0.0], {"1": [], "2": [0, 1], "3": [2]}),
        measured("t2", [0.2], {"1": [], "2": [0]}),
        measured("t3", [0.0], {"1": []}),
    ]
    mutant = python_mutants.Mutant("a.py", "", "", "", line=2)
    assert room_mutants.plan(mutant, both) == [
        ("t1", {"t1::1": 0.1, "t1::0": 0.3, "t1::2": 0.2, "t1::3": 0.0}),
        ("t2", {"t2::0": 0.2}),
    ]
    monkeypatch.setattr(room_mutants, "TESTS_LIMIT_S", 0.05)
    assert room_mutants.plan(mutant, both) == [("t1", {"t1::1": 0.1, "t1::3": 0.0})]  # of each kind
    monkeypatch.setattr(room_mutants, "TESTS_LIMIT_S", 0.15)
    constant = python_mutants.Mutant("a.py", "", "", "", text="LIMIT: int = 3\n\nx = LIMIT\n", line=1)
    assert next(iter(room_mutants.plan(constant, both)[0][1])) == "t1::2"  # reaches line 3, which uses it
    assert room_mutants.reached_share(both) == 0.75


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
