"""crossval/cases.py and packages.py: what they say is what stands on the pages of docs/cases."""

import os
import re
import sys
from pathlib import Path

import pytest

from bitnet_ref.crossval.linear import LinearVerdict, LineVerdict

FOLDER = Path(__file__).parents[2] / "crossval"
path = list(sys.path)
sys.path.insert(0, str(FOLDER))
import cases  # noqa: E402
import packages  # noqa: E402

sys.path[:] = path  # the folder's other scripts have the names of packages

QUICK = ("i2_s-sequential", "avx-one-token", "avx-prompt", "q2_0-of-128", "sub-norms")
PLANTED = [case.name for case in cases.CASES if not case.program]


def block_of(case):
    text = (cases.PAGES / f"{case.page}.md").read_text(encoding="utf-8")
    (block,) = re.findall(rf"\$ python crossval/cases.py {re.escape(case.name)}\n(.*?)```", text, re.S)
    return block


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in PLANTED if n not in QUICK)]
)
def test_a_planted_case_is_named_as_its_page_says(name):
    (case,) = [case for case in cases.CASES if case.name == name]
    outcome = cases.run_case(case)
    assert outcome.right, outcome.lines
    written = block_of(case).splitlines()
    assert outcome.lines[0].split(":")[0] == written[0].split(":")[0]  # the op; figures may differ in a last digit
    assert "\n".join(outcome.lines).splitlines()[1:] == written[1:]


@pytest.mark.slow
@pytest.mark.parametrize("program", ["llama_cpp", "transformers"])
def test_a_program_is_named_as_its_page_says(program):
    python = os.environ.get(f"BITNET_REF_{program.upper()}_PYTHON")
    if python is None:
        pytest.skip(f"BITNET_REF_{program.upper()}_PYTHON names no interpreter")
    for case in cases.CASES:
        if case.program == program:
            assert cases.run_case(case, python).right


def test_every_case_has_its_output_on_a_page():
    index = (cases.PAGES / "README.md").read_text(encoding="utf-8")
    for case in cases.CASES:
        assert block_of(case).startswith("AGREES" if not case.op and not case.refused else ("DIFFERS", "FAILED"))
        assert f"({case.page}.md)" in index


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["silu", "hadamard"])
def test_a_case_that_is_not_named_is_reported(case, monkeypatch, capsys):
    """The same judge of a copy without a mistake."""
    (right,) = [each for each in cases.CASES if each.name == case]
    monkeypatch.setattr(cases, "CASES", (cases.replace(right, judge=cases.of_copy("bitnet")),))
    assert cases.main([case]) == 1
    assert f"{case}: NOT AS EXPECTED\nAGREES" in capsys.readouterr().out


# -- packages ----------------------------------------------------------------------------------------------------------


def verdict_of(**statuses):
    lines = [name for names in packages.COLUMNS.values() for name in names]
    words = {name: statuses.get(name.replace(" ", "_"), "right") for name in lines}
    return LinearVerdict(
        "a:B", "", tuple(LineVerdict(name, status, f"{name} | text") for name, status in words.items())
    )


def test_a_row_has_what_is_wrong_in_each_column():
    right = packages.row("a 1.0", "B", verdict_of())
    assert right == "| a 1.0 | B | norm inside \\| text | right | right | right | right | right | right |"
    wrong = packages.row("a 1.0", "B", verdict_of(weight_scale="WRONG", dbias="not explained", dX="-"))
    assert wrong.split(" | ")[4:] == [
        *("**weight scale \\| text**", "right", "-", "**dbias: dbias \\| text**", "right |"),
    ]
    failed = packages.row("a 1.0", "B", LinearVerdict("a:B", "", (), "ImportError: no kernel"))
    assert "could not be run: ImportError: no kernel" in failed
    assert failed.count("|") == right.replace("\\|", "").count("|")


def test_the_table_on_the_page():
    rows = [line for line in packages.PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    expected = [(package, label) for package in sorted(packages.LAYERS) for label, _, _ in packages.LAYERS[package]]
    assert [(row.split()[1], row.split(" | ")[1]) for row in rows[1:]] == expected
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 10 for row in rows)


def test_writing_keeps_the_other_rows(tmp_path, monkeypatch):
    page = tmp_path / "packages.md"
    page.write_text(packages.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(packages, "PAGE", page)
    before = page.read_text(encoding="utf-8")
    packages.write({"bitnet": ["| bitnet 9.9 | BitLinear | none |" + " right |" * 6]})
    changed = [
        (a, b)
        for a, b in zip(before.splitlines(), page.read_text(encoding="utf-8").splitlines(), strict=True)
        if a != b
    ]
    assert [new[:12] for old, new in changed if not old.startswith("Measured")] == ["| bitnet 9.9"]


@pytest.mark.slow
def test_transformers_is_as_its_rows_say():
    python = os.environ.get("BITNET_REF_TRANSFORMERS_PYTHON")
    if python is None:
        pytest.skip("BITNET_REF_TRANSFORMERS_PYTHON names no interpreter")
    page = packages.PAGE.read_text(encoding="utf-8")
    for made in packages.rows("transformers", python):
        assert made.split(" | ", 1)[1] in page  # whatever its version is
