"""`crossval sample`: each wrong rule is named, by probabilities and by draws; correct engines are not accused."""

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cli_runs import invoke, invoke_json

from bitnet_ref.crossval.outputs.draws import Draws, judge_draws
from bitnet_ref.crossval.outputs.files import read_draws
from bitnet_ref.crossval.outputs.sampling_rules import RIGHT, WRONG_RULES, Row, truth
from bitnet_ref.errors import FormatError
from bitnet_ref.generation.params import SamplingParams

VALUES = {
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.05,
    "typical_p": 0.7,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.4,
}
EVERYTHING = {**VALUES, "top_k": 40, "typical_p": 1.0}
VOCABULARY = 200


def rows_of(seed, count=6):
    rng = np.random.default_rng(seed)
    likely = np.where(np.arange(VOCABULARY) < 30, 3.0, 0.0)  # the ids before a choice, so that penalties matter
    return [
        Row(rng.normal(size=VOCABULARY) * 3 - 2 + likely, rng.integers(0, 20, 12), rng.integers(0, 30, 15))
        for _ in range(count)
    ]


def draws_of(rows, params, compute, chosen=0, seed=0):
    """What an engine shows whose probabilities are `compute`'s: these, or ids drawn from them."""
    p = np.stack([compute(row, params) for row in rows])
    histories = [row.prompt.tolist() for row in rows], [row.generated.tolist() for row in rows]
    given = np.stack([row.logits for row in rows]), params, *histories
    if not chosen:
        return Draws(*given, p.astype(np.float32).astype(np.float64))
    rng = np.random.default_rng(seed)
    return Draws(*given, None, [rng.choice(VOCABULARY, size=chosen, p=row / row.sum()).tolist() for row in p])


def params_for(rule):
    used = {name: VALUES[name] for name in rule.uses}
    if rule.name == "temperature_after_limits":
        used["top_p"] = 0.9
    if rule.name == "top_p_before_top_k":
        used["top_k"] = 4
    if rule.name == "top_p_and_min_p_exchanged":
        used |= {"top_p": 0.3, "min_p": 0.6}
    return SamplingParams(**{"temperature": 0.7, **used})


@pytest.mark.parametrize("seed", range(12))
def test_the_stages_are_the_rules_of_generation(seed):
    changes = {"typical_p": 0.8 if seed % 2 else 1.0, "top_k": (0, 5, 40)[seed % 3], "min_p": (0.0, 0.1)[seed % 2]}
    params = SamplingParams(**{**EVERYTHING, **changes})
    for row in rows_of(seed):
        np.testing.assert_allclose(RIGHT.run(row, params), truth(row, params), atol=1e-12)


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "rule", [rule for rule in WRONG_RULES if rule.name != "top_p_strict"], ids=lambda rule: rule.name
)
def test_a_wrong_rule_is_named(rule):
    params, rows = params_for(rule), rows_of(1)
    exact = judge_draws(draws_of(rows, params, rule.run))
    assert not exact.agrees
    assert rule.name in [cause.name for cause in exact.causes]
    for cause in exact.causes:  # others only if their probabilities are the same
        if cause.name != rule.name:
            (other,) = [each for each in WRONG_RULES if each.name == cause.name]
            for row in rows:
                np.testing.assert_allclose(other.run(row, params), rule.run(row, params), atol=1e-6)
    drawn = judge_draws(draws_of(rows, params, rule.run, chosen=1500))
    if not drawn.agrees:
        assert rule.name in [cause.name for cause in drawn.causes], drawn
    assert not (drawn.agrees and rule.name.startswith(("temperature", "top_p_one", "min_p", "typical_ig"))), drawn
    assert all(cause.name == rule.name for cause in drawn.causes if cause.confirmed)


def test_a_strict_top_p_shows_where_sums_are_exact():
    (rule,) = [rule for rule in WRONG_RULES if rule.name == "top_p_strict"]
    row = Row(np.array([1.0, 1.0, 1.0, 1.0]), np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
    params = SamplingParams(temperature=1.0, top_p=0.5)
    given = row.logits[None], params, [[]], [[]]
    wrong = judge_draws(Draws(*given, rule.run(row, params)[None]))
    assert "top_p_strict" in [cause.name for cause in wrong.causes]  # of a flat row one token more is the same
    assert judge_draws(Draws(*given, truth(row, params)[None])).agrees


@pytest.mark.thorough
def test_correct_engines_are_not_accused():
    for seed in range(40):
        params = SamplingParams(**{**EVERYTHING, "top_p": (0.9, 1.0)[seed % 2], "min_p": (0.0, 0.05)[seed % 3 > 0]})
        rows = rows_of(seed)
        exact, drawn = (judge_draws(draws_of(rows, params, truth, n, seed)) for n in (0, 60))
        assert exact.agrees, exact
        assert drawn.agrees, drawn


def test_a_token_at_the_threshold_may_fall_on_either_side():
    rows = rows_of(3, 1)
    p = truth(rows[0], SamplingParams(temperature=0.7))
    limit = float(np.sort(p)[::-1][:5].sum())
    params = SamplingParams(temperature=0.7, top_p=limit)
    nudged = replace(params, top_p=limit * (1 - 5e-7)), replace(params, top_p=limit * (1 + 5e-7))
    for each in nudged:
        assert judge_draws(draws_of(rows, params, lambda row, _, each=each: truth(row, each))).agrees


def test_one_impossible_choice_differs_without_a_cause():
    rows, params = rows_of(0, 1), SamplingParams(temperature=0.7, top_k=5)
    excluded = int(np.argmin(rows[0].logits))
    verdict = judge_draws(Draws(rows[0].logits[None], params, [[]], [[]], None, [[excluded]]))
    assert not verdict.agrees
    assert f"token {excluded} was chosen, which the reference excludes" in verdict.verdict
    assert not any(cause.confirmed for cause in verdict.causes)


def test_files_and_the_shell(tmp_path):
    params = {"temperature": 0.7, "min_p": 0.1}
    rows = rows_of(5, 3)
    logits = np.stack([row.logits for row in rows])
    right = np.stack([truth(row, SamplingParams(**params)) for row in rows])
    (wrong,) = [rule for rule in WRONG_RULES if rule.name == "min_p_absolute"]
    other = np.stack([wrong.run(row, SamplingParams(**params)) for row in rows])
    np.savez(tmp_path / "right.npz", logits=logits.astype(np.float32), params=json.dumps(params), probabilities=right)
    assert invoke_json("crossval", "sample", tmp_path / "right.npz")["agrees"]
    given = {"logits": logits.tolist(), "params": params, "probabilities": other.tolist()}
    (tmp_path / "wrong.json").write_text(json.dumps(given))
    said = invoke_json("crossval", "sample", tmp_path / "wrong.json", code=1)
    assert [cause["name"] for cause in said["causes"]] == ["min_p_absolute"]
    shown = invoke("crossval", "sample", tmp_path / "wrong.json")
    assert "confirmed: min_p is relative to 1" in shown.output


def test_the_example_of_the_page(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "crossval" / "README.md").read_text(encoding="utf-8")
    (code,) = [each.split("```")[0] for each in page.split("```python\n")[1:] if "np.savez" in each.split("```")[0]]
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    result = invoke("crossval", "sample", "draws.npz")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"logits": None}, "logits"),
        ({"logits": [[1.0, "x"]]}, "logits: expected numbers"),
        ({"params": {"temprature": 1}}, "params.temprature"),
        ({"params": {"top_p": 3}}, "top_p"),
        ({"logits": [10**400, 0, 0]}, "logits: expected numbers"),
        ({"chosen": [7]}, "chosen: expected ids below 3"),
        ({"chosen": None}, "chosen: is missing"),
        ({"prompt": [9]}, "prompt: expected ids below 3"),
        ({"prompt": [[1], "more"]}, "prompt: expected ids below 3"),
        ({"seeds": 1}, "seeds: there is no such key"),
        ({"probabilities": [0.5, 0.5]}, "probabilities: expected (1, 3)"),
    ],
)
def test_bad_files(change, said, tmp_path):
    given = {"logits": [1.0, 2.0, 3.0], "chosen": [1], **change}
    text = json.dumps({key: value for key, value in given.items() if value is not None})
    (tmp_path / "bad.json").write_text(text)
    result = invoke("crossval", "sample", tmp_path / "bad.json")
    assert result.exit_code == 3, result.output
    assert said in result.output
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04 no archive")
    assert invoke("crossval", "sample", tmp_path / "bad.npz").exit_code == 3


@pytest.mark.parametrize(
    ("at", "value"), [(6, 1), (6, 0x20), (8, 77), (4, 99)], ids=["encrypted", "patched", "compression", "version"]
)
def test_archives_that_zipfile_refuses(at, value, tmp_path):
    """By a byte of the first entry and of its record in the directory."""
    path = tmp_path / "bad.npz"
    np.savez(path, logits=[[1.0, 2.0]], chosen=[1])
    data = bytearray(path.read_bytes())
    for place in (0, data.index(b"PK\x01\x02") + 2):
        data[place + at] = value
    path.write_bytes(data)
    with pytest.raises(FormatError, match=r"is not a \.npz file"):
        read_draws(path)


@pytest.mark.parametrize("header", ["(" * 90, "{'descr':'<f8','fortran_order':False,'shape':(1,1000000000000000)}"])
def test_arrays_that_numpy_refuses(header, tmp_path):
    path = tmp_path / "bad.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("logits.npy", b"\x93NUMPY\x01\x00" + bytes([118, 0]) + header.ljust(117).encode() + b"\n")
    with pytest.raises(FormatError, match=r"is not a \.npz file"):
        read_draws(path)


def test_members_that_are_no_arrays_of_numbers(tmp_path):
    path = tmp_path / "bad.npz"
    np.savez(path, logits=[[1j, 2.0]], chosen=[1])
    with pytest.raises(FormatError, match="logits: expected numbers"):
        read_draws(path)
    np.savez(path, logits=[[1.0, 2.0]])
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("chosen", b"abc")
    with pytest.raises(FormatError, match="chosen: expected ids"):
        read_draws(path)
