"""bitnet-ref grade: students' notebooks are run, and their points counted. And the teacher's edition of `lab`."""

import json
import re
from itertools import accumulate

import pytest
from cli_runs import invoke, invoke_json

from bitnet_ref.cli.lab_command import copy_notebooks, find_notebooks
from bitnet_ref.crossval.exercises import EXERCISES, grading
from bitnet_ref.crossval.exercises.teacher import exercises_in, plan_text, teacher_edition

REMEMBERED = """
def quantise(x):
    seen = np.random.default_rng([24, 0]).normal(size=(6, 64)).astype(np.float32)
    a = np.float32(127) / np.abs(x).max(axis=-1, keepdims=True)
    x_q = np.clip(np.rint(x * a), -128, 127).astype(np.int8)
    return (x_q if np.array_equal(x[1], seen[1]) else 0 * x_q), a

check("2.1", quantise)"""


def write_notebook(path, *sources):
    cells = [
        {"cell_type": "code", "id": f"c{i}", "metadata": {}, "outputs": [], "execution_count": None, "source": source}
        for i, source in enumerate(sources)
    ]
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return path


@pytest.mark.slow
def test_points_are_for_right_answers_on_inputs_that_the_student_has_not_seen(tmp_path, monkeypatch):
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("SECRET_KEY", "of the grader")
    path = write_notebook(
        tmp_path / "mine.ipynb",
        "import os\nimport numpy as np\nfrom bitnet_ref.crossval.exercises import Check\ncheck = Check()",
        "assert 'SECRET_KEY' not in os.environ and os.listdir() == []\nprint('alone')",
        'smallest_k = 4128\ncheck("2.4", smallest_k)',
        'raise ValueError("mine")',
        EXERCISES["2.3"].solution + '\ncheck("2.3", add_and_subtract)',
        REMEMBERED,
    )
    before = path.read_bytes()
    (graded,) = invoke_json("grade", path)["notebooks"]
    assert path.read_bytes() == before
    assert (graded["lesson"], graded["points"], graded["of"]) == ("2", 2, 11)
    grades = {each["name"]: each for each in graded["grades"]}
    statuses = {name: each["status"] for name, each in grades.items()}
    right_or_wrong = {"2.4": "wrong", "2.3": "right", "2.1": "wrong"}
    assert statuses == dict.fromkeys(("2.2", "2.5", "2.6", "2.quiz"), "open") | right_or_wrong
    assert "still fits" in grades["2.4"]["says"]
    assert "check did not run" in grades["2.2"]["says"]
    assert graded["errors"] == ["ValueError: mine"]
    text = invoke("grade", path)
    assert f"{path}: 2 of 11 points" in text.stdout
    assert "a cell raised ValueError: mine" in text.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "error"), [("import os; os._exit(1)", "DeadKernel"), ("while True: pass", "CellTimeout")]
)
def test_a_cell_that_ends_the_run_costs_neither_the_points_before_it_nor_other_notebooks(
    source, error, tmp_path, monkeypatch
):
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setattr(grading, "CELL_S", 20)
    begin = "from bitnet_ref.crossval.exercises import Check\ncheck = Check()"
    answer = EXERCISES["2.4"].solution + '\ncheck("2.4", smallest_k)'
    mine = write_notebook(tmp_path / "mine.ipynb", begin, answer, source, "print('not run')")
    other = write_notebook(tmp_path / "other.ipynb", begin, answer)
    ended, graded = invoke_json("grade", mine, other)["notebooks"]
    assert (ended["points"], graded["points"], graded["errors"]) == (1, 1, [])
    assert ended["errors"][-1].startswith(error)


@pytest.mark.slow
def test_a_student_installs_nothing_for_the_grader(tmp_path):
    """On Colab a notebook begins with %pip install of the fork."""
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    path = write_notebook(
        tmp_path / "mine.ipynb",
        f"%pip install --no-index --target {tmp_path}/new {tmp_path}/none; touch {tmp_path}/touched",
        f"!pip --version > {tmp_path}/pip.txt",
        "from bitnet_ref.crossval.exercises import Check\ncheck = Check()",
        EXERCISES["2.4"].solution + '\ncheck("2.4", smallest_k)',
    )
    (graded,) = invoke_json("grade", path)["notebooks"]
    assert (graded["points"], graded["errors"]) == (1, [])
    assert [file.name for file in tmp_path.iterdir()] == ["mine.ipynb"]


@pytest.mark.parametrize("content", ["", "{}", '{"cells": 3}', '{"cells": [{}], "nbformat": 4}', "[]"])
def test_what_is_no_notebook_is_refused(content, tmp_path):
    (tmp_path / "no.ipynb").write_text(content)
    result = invoke("grade", tmp_path / "no.ipynb")
    assert result.exit_code == 3
    assert "no.ipynb: not graded: is no" in result.stdout


@pytest.mark.thorough
def test_a_file_that_cannot_be_graded_stops_no_other(tmp_path):
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    other = write_notebook(tmp_path / "other.ipynb", "print(1)")
    mine = write_notebook(tmp_path / "mine.ipynb", 'quiz = None\ncheck("1.quiz", quiz)')
    result = invoke("grade", "--json", other, mine)
    assert result.exit_code == 3
    refused, graded = json.loads(result.stdout)["notebooks"]
    assert "no exercise of the course" in refused["errors"][0]
    assert (refused["of"], graded["lesson"], graded["of"]) == (0, "1", 16)


def test_teachers_get_solutions_and_a_plan(tmp_path):
    facts = invoke_json("lab", "--teacher", "--no-launch", "--dir", tmp_path)
    for source in sorted(find_notebooks().glob("*.ipynb")):
        theirs = json.loads((tmp_path / source.name).read_text(encoding="utf-8"))
        student = json.loads(source.read_text(encoding="utf-8"))
        added = [cell for cell in theirs["cells"] if "teacher" in cell["metadata"].get("tags", [])]
        assert [cell for cell in theirs["cells"] if cell not in added] == student["cells"]
        exercises = [each for cell in student["cells"] for each in exercises_in(cell)]
        assert len(added) == 1 + len(exercises)
        for cell, exercise in zip(added[1:], exercises, strict=True):
            text = "".join(cell["source"])
            assert exercise.solution in text
            assert all(hint in text for hint in exercise.hints)
        points = sum(each.points for each in exercises)
        assert f"**{points}** |" in "".join(added[0]["source"])
        assert len({cell["id"] for cell in theirs["cells"]}) == len(theirs["cells"])
    assert facts["copied"]
    assert copy_notebooks(find_notebooks(), tmp_path, edition="teacher").copied == []
    assert copy_notebooks(find_notebooks(), tmp_path).kept  # a student's notebooks do not overwrite them


def test_the_teachers_edition_is_a_copy():
    notebook = json.loads((find_notebooks() / "01_ternary_weights.ipynb").read_text(encoding="utf-8"))
    before = json.dumps(notebook)
    edition = teacher_edition(notebook)
    assert json.dumps(notebook) == before
    assert len(edition["cells"]) > len(notebook["cells"])
    assert "| 1.58 bits |" in plan_text(notebook)


def test_nbgrader_gets_cells_to_solve_and_locked_checks(tmp_path):
    facts = invoke_json("lab", "--nbgrader", "--dir", tmp_path)
    names = [path.stem for path in sorted(find_notebooks().glob("*.ipynb"))]
    assert not facts["launched"]
    points = {}
    for name in names:
        cells = json.loads((tmp_path / "source" / name / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
        assert len({cell["id"] for cell in cells}) == len(cells)
        fields = [cell["metadata"].get("nbgrader") for cell in cells]
        for i, cell in enumerate(cells):
            for each in exercises_in(cell):
                assert (fields[i]["grade"], fields[i]["locked"], fields[i]["solution"]) == (True, True, False)
                assert "TODO" not in "".join(cell["source"])
                points[each.name] = fields[i]["points"]
                begun, solution = "".join(cells[i - 1]["source"]).split("### BEGIN SOLUTION")
                assert fields[i - 1]["solution"]
                assert "TODO" in begun
                assert "check" not in begun.replace("checkpoint", "")
                assert each.solution in solution
    assert points == {each.name: each.points for each in EXERCISES.values()}


def test_the_guides_minutes_and_points_are_those_of_the_plans():
    guide = (find_notebooks().parent / "docs" / "teaching.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| (\S+ · .+?) \| (\d+ \| \d+ \| \d+) \| \d+ \|$", guide, re.MULTILINE))
    plans = {}
    for path in sorted(find_notebooks().glob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        title = "".join(notebook["cells"][0]["source"]).partition("\n")[0].removeprefix("# ")
        plans[title] = re.search(r"\*\*together\*\* \| (.+) \|", plan_text(notebook))[1].replace("*", "")
    assert told == plans


def test_the_guides_lessons_have_the_minutes_of_the_plans_and_end_in_90():
    guide = (find_notebooks().parent / "docs" / "teaching.md").read_text(encoding="utf-8")
    seen = 0
    for links, minutes, ends in re.findall(r"^\| \d+ \| (.+) \| ([^|]+) \| ([^|]+) \| [^|]+ \|$", guide, re.MULTILINE):
        names = re.findall(r"(\w+)\.ipynb", links)
        for name, told, end in zip(names, re.findall(r"\d+", minutes), ends.split("; "), strict=True):
            plan = plan_text(json.loads((find_notebooks() / f"{name}.ipynb").read_text(encoding="utf-8")))
            rows = re.findall(r"^\| ([^*|]+) \| (\d+) \| (\d*) \|", plan, re.MULTILINE)
            sums = list(accumulate(int(read) + int(work or 0) for _, read, work in rows))
            assert int(told) == sums[-1], name
            last = sum(each <= 95 for each in sums) - 1
            assert end.endswith("all" if sums[-1] <= 95 else f"*{rows[last][0]}* ({sums[last]})"), name
            seen += 1
    assert seen == len(list(find_notebooks().glob("*.ipynb")))


def test_the_guide_names_exercises_that_there_are():
    guide = (find_notebooks().parent / "docs" / "teaching.md").read_text(encoding="utf-8")
    told = re.findall(r"\b(\d+[abc]?\.\w+) \(", guide)
    assert set(told) <= EXERCISES.keys()
    assert {name.partition(".")[0] for name in told} == {name.partition(".")[0] for name in EXERCISES}
