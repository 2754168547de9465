"""crossval/planted_bugs.py: every planted bug is named, op and cause. A quick part of them here, the rest as slow."""

import importlib.util
import json
import sys
from functools import partial
from pathlib import Path

import pytest
from helpers import SENTENCES, first_where, model

FOLDER = Path(__file__).parents[2] / "crossval"
sys.path.insert(0, str(FOLDER))

import planted_bugs  # noqa: E402
import planting  # noqa: E402
from generation_causes import TEXTS, diagnose_generation, greedy  # noqa: E402

sys.path[:] = [path for path in sys.path if path != str(FOLDER)]  # its other scripts have the names of packages

QUICK = (
    "sub_norms_missing",
    "qkv_scales_by_thirds",
    "cache_misses_the_newest",
    "groups_of_64_for_128",
    "decay_and_beta_exchanged",
    "eot_not_a_stop",
)
NAMES = [bug.name for bug in planted_bugs.BUGS]


@pytest.fixture(scope="module")
def hunt():
    with planted_bugs.Hunt() as hunt:
        yield hunt


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in NAMES if n not in QUICK)])
def test_a_planted_bug_is_named(hunt, name):
    (bug,) = [bug for bug in planted_bugs.BUGS if bug.name == name]
    outcome = hunt.find(bug)
    assert not outcome.agreed
    assert outcome.op_right, outcome.op
    assert outcome.cause_right, outcome.causes


@pytest.mark.slow
@pytest.mark.parametrize("name", [bug.name for bug in planted_bugs.BUGS if bug.in_logits])
def test_a_planted_bug_is_named_by_its_logits(hunt, name):
    (bug,) = [bug for bug in planted_bugs.BUGS if bug.name == name]
    outcome = hunt.find(bug, logits_only=True)
    assert outcome.right, outcome.causes


@pytest.mark.thorough
def test_the_pictures_of_the_readme_are_of_real_runs(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    path = FOLDER.parent / "scripts" / "make_picture.py"
    spec = importlib.util.spec_from_file_location("make_picture", path)
    make_picture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_picture)
    sys.path.remove(str(FOLDER))
    for path, drawing in make_picture.draw().items():
        assert path.read_text(encoding="utf-8") == drawing


def test_there_are_enough_and_no_name_twice():
    assert len(NAMES) == len(set(NAMES)) >= 40


def test_every_edit_still_fits_the_source():
    """All of them, also those whose hunt is marked slow; and the copy without an edit is the package."""
    for bug in planted_bugs.BUGS:
        for edit in bug.edits:
            text = (planting.PACKAGE / edit.file).read_text(encoding="utf-8")
            assert edit.apply(text) != text
    with pytest.raises(LookupError, match="occurs 0 times"):
        planting.planted([planting.Edit("reference/model.py", "no such text", "")]).__enter__()


def test_the_copy_is_apart_from_the_package(hunt):
    """Without an edit the copy computes the same, with classes of its own; afterwards it is gone."""
    model = hunt.reference("bitnet")
    with planting.planted([]) as copy:
        other = copy.load(model.path, backend="numpy")
        assert type(other) is not type(model)
        assert (other.logits([1, 2, 3]) == model.logits([1, 2, 3])).all()
    assert not any(name.startswith(planting.COPY) for name in sys.modules)


@pytest.mark.thorough
def test_the_script(capsys):
    assert planted_bugs.main(["--json", "silu_for_relu2"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["planted"], said["named_rightly"]) == (1, 1)
    assert said["bugs"][0]["causes"] == ["silu_for_relu2"]
    assert planted_bugs.main(["relu2_for_silu"]) == 0
    assert "1 of 1 named rightly" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        planted_bugs.main(["no_such_bug"])
    assert caught.value.code == 2


def confirmed(diagnoses):
    return {diagnosis.name for diagnosis in diagnoses if diagnosis.confirmed}


@pytest.mark.thorough
def test_causes_of_a_wrong_continuation():
    m = model("storyteller", backend="auto")
    ids = m.tokenizer.encode("Once upon a time")
    right = m.generate(ids, max_tokens=24).token_ids
    assert greedy(m, ids, 24) == right
    assert diagnose_generation(m, ids, right) == []

    def names_alone(name, first, text):  # other mistakes may fit the tokens as well: then none is confirmed
        ids = m.tokenizer.encode(text)
        named = confirmed(diagnose_generation(m, ids, greedy(m, ids, 24, first_from=first)))
        assert named <= {name}
        return named

    for name, first in {
        "prefill_logits_of_the_previous_position": -2,
        "prefill_logits_of_the_first_position": 0,
    }.items():
        texts = (TEXTS[2], *SENTENCES[:4], "Once upon a time", *TEXTS[:2])
        first_where(texts, partial(names_alone, name, first), f"a prompt on which {name} alone gives its tokens")
    assert confirmed(diagnose_generation(m, ids, right[:2], right)) == {"stops_early"}
    assert not confirmed(diagnose_generation(m, ids, [7, 7, 7]))
