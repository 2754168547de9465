"""crossval/cases.py and packages.py: what they say is what stands on the pages of docs/cases."""

import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "crossval"
environment, path = dict(os.environ), list(sys.path)
sys.path.insert(0, str(FOLDER))
import cases  # noqa: E402
import packages  # noqa: E402

sys.path[:] = path  # the folder's other scripts have the names of packages
for name in ("TORCHDYNAMO_DISABLE", "TRITON_INTERPRET"):  # which packages.py sets for its probes
    if name not in environment:
        os.environ.pop(name, None)

QUICK = ("i2_s-sequential", "avx-one-token", "avx-prompt", "q2_0-of-128", "sub-norms")
PLANTED = [case.name for case in cases.CASES if not case.program]


def block_of(case):
    text = (cases.PAGES / f"{case.page}.md").read_text(encoding="utf-8")
    (block,) = re.findall(rf"\$ python crossval/cases.py {re.escape(case.name)}\n(.*?)```", text, re.S)
    return block


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


@pytest.mark.parametrize("case", ["silu", "hadamard"])
def test_a_case_that_is_not_named_is_reported(case, monkeypatch, capsys):
    """The same judge of a copy without a mistake."""
    (right,) = [each for each in cases.CASES if each.name == case]
    monkeypatch.setattr(cases, "CASES", (cases.replace(right, judge=cases.of_copy("bitnet")),))
    assert cases.main([case]) == 1
    assert f"{case}: NOT AS EXPECTED\nAGREES" in capsys.readouterr().out


# -- packages ----------------------------------------------------------------------------------------------------------


def lines_of(weight="w", activations=np.rint, levels=127, **changes):
    given = packages.inputs()
    x, w = given["x"], given[weight]
    x_dq = packages.scaled(x, levels, activations, np.abs(x).max(axis=-1, keepdims=True))
    mean = np.abs(w).mean()
    w_dq = changes.pop("w_dq", np.clip(np.rint(w / mean), -1, 1) * mean)
    lines = {"normed": x, "x_dq": x_dq, "w": w, "w_dq": w_dq, "y": x_dq @ w_dq.T}
    lines |= {"dX": given["dy"] @ w_dq, "dW": given["dy"].T @ x_dq, **changes}
    return packages.judge(lines, given)


def test_a_right_package_and_each_wrong_line():
    assert set(lines_of().values()) == set(lines_of("ties").values()) == {"right"}
    given = packages.inputs()
    w, x = given["w"], given["x"]
    signs = np.sign(w - w.mean()) * np.abs(w).mean()
    for wrong, line, words in (
        ({"activations": packages.half_up}, "activations", "ties are rounded up"),
        ({"levels": 128}, "activations", "128 / max"),
        ({"w_dq": signs}, "weights", "two values"),
        ({"y": np.zeros((12, 32), dtype=np.float32)}, "output", "differs from the reference"),
        ({"dX": np.zeros_like(x)}, "dX", "differs"),
        ({"dW": given["dy"].T @ x}, "dW", "before their quantisation"),
    ):
        judged = lines_of(**wrong)
        assert words in judged.pop(line)
        assert set(judged.values()) == {"right"}, wrong
    assert "does not run: no kernel" in packages.judge({"failed": np.array("no kernel")}, given)["activations"]


def test_the_table_on_the_page():
    rows = [line for line in packages.PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert {row.split()[1] for row in rows[1:]} == set(packages.VARIANTS)
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 9 for row in rows)
