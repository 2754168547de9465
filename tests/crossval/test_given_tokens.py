"""`crossval tokens`: an engine's greedy ids, teacher-forced; causes in how generation was driven; its files."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from cli_runs import BACKEND, invoke, invoke_json
from helpers import GOLDEN, first_where, model

import bitnet_ref
from bitnet_ref.crossval.outputs.causes import explain_tokens, judge_tokens
from bitnet_ref.crossval.outputs.files import read_runs
from bitnet_ref.crossval.outputs.given import GivenRun
from bitnet_ref.errors import FormatError

FOLDER = Path(__file__).parents[2] / "crossval"
sys.path.insert(0, str(FOLDER))

import generation_causes  # noqa: E402

sys.path[:] = [path for path in sys.path if path != str(FOLDER)]

SMALL = GOLDEN / "llama-dense"
PROMPT = "Once upon a time"
PROMPTS = (PROMPT, "Hello", "Alice", "The king", "The rabbit ran", "My dear", "In the morning", "The end", "Yes")
QUICK = ("end token after the prompt", "repetition penalty 1.3", "no 3-gram twice", "first token of row 0")


@pytest.fixture(scope="module")
def engine():
    return model("storyteller", backend=BACKEND, threads=1)


def generated(engine, prompt, n=32, **options):
    return tuple(engine.generate(list(prompt), max_tokens=n, **{"temperature": 0, **options}).token_ids)


def test_right_ids_agree_and_say_what_they_do_not_show(engine):
    prompt = tuple(engine.tokenizer.encode(PROMPT))
    greedy = judge_tokens(engine, GivenRun(prompt, generated(engine, prompt), PROMPT))
    assert greedy.agrees
    assert greedy.verdict.startswith("AGREES: equal for 32 tokens, smallest margin 0.")
    assert f"at token {greedy.smallest_at}" in greedy.verdict

    def hides_a_second_bos(text):
        ids = tuple(engine.tokenizer.encode(text))
        return any(
            "BOS twice" in each for each in judge_tokens(engine, GivenRun(ids, generated(engine, ids, 8), text)).hidden
        )

    first_where(
        PROMPTS, hides_a_second_bos, "a prompt whose tokens are the same with BOS twice, of which the verdict says so"
    )


def test_a_near_tie_is_no_difference(engine):
    """The second best of two logits within rounding agrees; one further behind does not."""

    def continued(text):
        prompt = tuple(engine.tokenizer.encode(text))
        ids = generated(engine, prompt, 60)
        rows = engine.logits([*prompt, *ids[:-1]])[len(prompt) - 1 :]
        order = np.argsort(-rows, axis=1)
        margins = rows.max(axis=1) - np.take_along_axis(rows, order[:, 1:2], axis=1)[:, 0]
        return text, prompt, ids, order, margins

    text, prompt, ids, order, margins = first_where(
        map(continued, PROMPTS), lambda run: run[-1].min() < 0.1, "two logits that are nearly equal"
    )
    for at, agrees in ((int(margins.argmin()), True), (int(margins.argmax()), False)):
        judged = judge_tokens(engine, GivenRun(prompt, (*ids[:at], int(order[at, 1])), text))
        assert judged.agrees == agrees, judged.verdict
        assert judged.ties == ((at,) if agrees else ())
    assert judged.verdict.startswith(f"DIFFERS from token {at} on: ")
    assert judge_tokens(engine, GivenRun(prompt, (*ids[:at], int(order[at, 1])), engine_dtype="bfloat16")).parted == at


@pytest.mark.thorough
@pytest.mark.parametrize("label", QUICK)
def test_a_planted_mistake_is_named(label):
    (planted,) = [each for each in generation_causes.PLANTED if each.label == label]
    outcome = generation_causes.find(str(SMALL), planted, n=32)
    assert outcome.outcome == "named", outcome


@pytest.mark.thorough
def test_sampling_is_named_by_two_continuations(engine):
    prompt = tuple(engine.tokenizer.encode(PROMPT))
    runs = [GivenRun(prompt, generated(engine, prompt, temperature=1.0, seed=seed), PROMPT) for seed in (1, 2)]
    causes = explain_tokens(engine, runs)
    assert [cause.name for cause in causes if cause.confirmed] == ["sampling"]
    assert "two continuations" in causes[0].cause
    once = explain_tokens(engine, runs[:1])  # a wrong model may give tokens as likely: no more than possible
    assert not any(cause.confirmed for cause in once)


@pytest.mark.thorough
def test_no_cause_of_a_wrong_model(engine):
    """Logits with noise: nothing is confirmed, and the advice is to record a trace."""
    prompt = tuple(engine.tokenizer.encode(PROMPT))
    directions = np.random.default_rng(0).normal(size=(engine.config.vocab_size, 16)).astype(np.float32) / 4

    def noisy(ids, logits):
        return logits + 0.4 * (directions @ np.random.default_rng(ids.tolist()).normal(size=16)).astype(np.float32)

    causes = explain_tokens(engine, [GivenRun(prompt, generated(engine, prompt, processors=(noisy,)), PROMPT)])
    assert not any(cause.confirmed for cause in causes)
    assert "record_a_trace" in [cause.name for cause in causes]


def test_stops(engine):
    prompt = tuple(engine.tokenizer.encode(PROMPT))
    ids = generated(engine, prompt, 8)
    assert judge_tokens(engine, GivenRun(prompt, ids, max_tokens=8)).agrees
    short = GivenRun(prompt, ids[:5], max_tokens=8)
    assert [cause.name for cause in explain_tokens(engine, [short]) if cause.confirmed] == ["stops_early"]
    assert judge_tokens(engine, GivenRun(prompt, ids[:5], finish="length")).agrees
    assert not judge_tokens(engine, GivenRun(prompt, ids[:5], finish="stop")).agrees
    outside = judge_tokens(engine, GivenRun(prompt, (*ids[:3], 1 << 20)))
    assert outside.parted == 3
    assert "outside the vocabulary" in outside.verdict


def test_correct_runs_are_not_accused():
    assert [each for each in generation_causes.correct_runs(8) if each[2] is not None] == []


@pytest.mark.slow
def test_the_whole_list_and_200_correct_runs(capsys):
    assert generation_causes.main(["--json"]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert counts["planted"] >= 60
    assert counts["wrong"] == counts["accused"] == 0
    assert counts["named"] >= 0.6 * (counts["planted"] - counts["hidden"])


# -- files and the shell -----------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_files_of_every_form(engine, tmp_path):
    prompt = engine.tokenizer.encode(PROMPT)
    ids = list(generated(engine, prompt, 8))
    run = {"prompt": PROMPT, "tokens": ids, "finish_reason": "length", "max_tokens": 8}
    by_ids = {"prompt": prompt, "tokens": ids}
    numbers = "\n".join(" ".join(map(str, each)) for each in (prompt, ids))
    for text, count in (
        (json.dumps(run), 1),
        (json.dumps([run, by_ids]), 2),
        (f"{json.dumps(run)}\n{json.dumps(by_ids)}\n", 2),
        (numbers, 1),
        (f"{numbers}\n\nprompt: {prompt}\ntokens: {ids}\n", 2),
    ):
        (tmp_path / "runs").write_text(text)
        said = invoke_json("crossval", "tokens", "storyteller", tmp_path / "runs")
        assert said["agrees"]
        assert len(said["runs"]) == count
    (tmp_path / "runs").write_text(" ".join(map(str, ids)))
    assert invoke("crossval", "tokens", "storyteller", tmp_path / "runs", "--prompt", PROMPT).exit_code == 0


def test_the_example_of_the_page(tmp_path):
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    (tmp_path / "runs.json").write_text(page.split("```json\n")[1].split("```")[0])
    assert "equal for 8 tokens" in invoke("crossval", "tokens", "storyteller", tmp_path / "runs.json").output


def test_the_shell_says_what_differs(engine, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    prompt = engine.tokenizer.encode(PROMPT)
    ids = generated(engine, [*prompt, 2], 24)
    (tmp_path / "runs.json").write_text(json.dumps({"prompt": PROMPT, "tokens": ids}))
    result = invoke("crossval", "tokens", "storyteller", tmp_path / "runs.json")
    assert result.exit_code == 1
    assert "DIFFERS from token 0 on" in result.output
    assert "confirmed: the tokenizer put the end token </s> after the prompt" in " ".join(result.output.split())
    assert max(map(len, result.output.splitlines())) <= 80


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no run"),
        ("1 2 x\n3", "line 1: expected token ids"),
        ("1 2 3", "expected two for each run"),
        ('{"prompt": "a"}', "tokens: run 1: expected a list of token ids"),
        ('{"tokens": [5]}', "prompt: run 1: expected a text, or token ids"),
        ('{"prompt": [99999], "tokens": [5]}', "ids below 4096"),
        ('{"prompt": [1], "tokens": [5], "finish_reason": 3}', "finish_reason: run 1"),
        ('{"prompt": [1], "tokens": [5], "engine_dtype": "int4"}', "engine_dtype: run 1"),
        ('{"prompt": [1], "tokens": [5], "engine_dtype": ["float16"]}', "engine_dtype: run 1"),
        ('{"prompt": [1], "tokens": [5]', "not valid JSON"),
        ("[1, 2]", "expected objects"),
    ],
)
def test_bad_files(text, said, tmp_path):
    (tmp_path / "runs").write_text(text)
    result = invoke("crossval", "tokens", "storyteller", tmp_path / "runs")
    assert result.exit_code == 3
    assert said in result.output
    assert str(tmp_path / "runs") in result.output


def test_an_empty_text_without_bos_is_no_prompt(tmp_path, monkeypatch):
    m = bitnet_ref.load("storyteller", backend="numpy")
    monkeypatch.setattr(m.tokenizer, "encode", lambda text: [])
    (tmp_path / "runs").write_text('{"prompt": "", "tokens": [5, 6]}')
    with pytest.raises(FormatError, match="prompt: run 1: expected a text, or token ids"):
        read_runs(tmp_path / "runs", m)


def test_no_such_file(tmp_path):
    assert invoke("crossval", "tokens", "storyteller", tmp_path / "none").exit_code == 3
