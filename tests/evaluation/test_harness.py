"""`bitnet-ref eval`: lm-eval's own tasks machinery, on local JSON tasks."""

import importlib
import json
import math
from functools import partial
from types import SimpleNamespace

import pytest
from cli_runs import BACKEND, CHOICE, FAST, invoke, invoke_json
from helpers import first_where, model

from bitnet_ref.errors import GenerationError
from bitnet_ref.evaluation import perplexity
from bitnet_ref.formats.open import ASSETS

TEXT = "Once upon a time there was a little girl who lived in a wood. " * 20
ENDINGS = [" there was a king", " said to her", " rabbit the of"]
ROLLING = """task: tiny_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
"""
UNTIL = """task: tiny_until
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: "{{target}}"
generation_kwargs: {until: ["."], max_gen_toks: 24}
metric_list: [{metric: exact_match, ignore_case: true}]
"""


def story():
    return model(ASSETS / "storyteller", BACKEND, threads=1)


def write_tasks(folder, documents):
    data = folder / "data.json"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    for name, text in (("choice", CHOICE), ("rolling", ROLLING), ("until", UNTIL)):
        (folder / f"{name}.yaml").write_text(text.replace("DATA", str(data)))
    return folder


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    harness = pytest.importorskip("bitnet_ref.evaluation.harness", reason="lm-eval is not installed")
    own_tasks = partial(harness.TaskManager, include_defaults=False)  # lm-eval's own are thousands of files to read
    monkeypatch.setattr(harness, "TaskManager", own_tasks)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    prompts = ["Once upon a time", "The king said", "In the wood", ""]
    targets = [story().generate(prompt, max_tokens=24, stop=["."]).text for prompt in prompts[:3]]
    documents = [
        {"q": prompt, "choices": ENDINGS, "text": f"{prompt} {TEXT}", "target": target}
        for prompt, target in zip(prompts, [*targets, "no such text"], strict=True)
    ]
    return write_tasks(tmp_path, documents), documents


@pytest.mark.thorough
def test_multiple_choice_texts_and_rolling(tasks):
    folder, documents = tasks
    facts = invoke_json(
        "eval", "storyteller", "--tasks", "tiny_choice,tiny_rolling,tiny_until", "--include", folder, *FAST
    )
    results = facts["results"]
    scores = [story().score(document["q"], ENDINGS) for document in documents[:3]]
    ids = [story().tokenizer.encode(each, False) for each in ENDINGS]
    scores.append(story().score([1], ids))  # without a context: after BOS
    right = [max(each, key=lambda score: score.total) is each[0] for each in scores]
    assert 0 < sum(right) < 4
    assert results["tiny_choice"]["acc,none"] == sum(right) / 4
    assert results["tiny_until"]["exact_match,none"] == 0.75
    ours = perplexity(story(), [document["text"] for document in documents], "lm-eval", story().context_length)
    assert ours.windows > len(documents)
    rolling = results["tiny_rolling"]
    assert rolling["bits_per_byte,none"] == pytest.approx(ours.bits_per_byte, rel=1e-9)
    assert rolling["byte_perplexity,none"] == pytest.approx(2**ours.bits_per_byte, rel=1e-9)
    assert math.log(rolling["word_perplexity,none"]) == pytest.approx(math.log(ours.word_perplexity), rel=1e-9)
    assert facts["n-samples"]["tiny_until"]["effective"] == 4
    shown = invoke("eval", "--tasks", "tiny_choice", "--include", folder, "--limit", 2, *FAST)
    assert "acc" in shown.stdout
    assert f"storyteller on {BACKEND}" in shown.stderr


def asked(*args):
    return SimpleNamespace(args=args)


@pytest.mark.thorough
def test_texts_and_scores_within_a_length():
    """Contexts that are too long are cut on their left; the last token of a continuation is not read."""
    harness = pytest.importorskip("bitnet_ref.evaluation.harness", reason="lm-eval is not installed")
    steps = []
    tasks = harness.TaskModel(story(), 24, lambda *at: steps.append(at))
    ids = story().tokenizer.encode(TEXT)
    contexts = ["The king said", TEXT, TEXT]
    texts = tasks.generate_until([asked(context, {"max_gen_toks": 9, "until": []}) for context in contexts])
    assert texts[1:] == [story().generate(ids[-15:], max_tokens=9).text] * 2
    assert texts[0] == story().generate(contexts[0], max_tokens=9).text
    sister = "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do"
    sister += " once or twice"

    def continuation(count, room):
        return story().generate(story().tokenizer.encode(sister)[-room:], max_tokens=count).text

    count = first_where(
        range(7, 20),
        lambda count: continuation(count, 24 - count) != continuation(count, 24 + count),
        "so many tokens that the text is another one with more context",
    )
    (text,) = tasks.generate_until([asked(sister, {"max_gen_toks": count})])
    assert text == continuation(count, 24 - count)
    steps[3:] = []
    assert steps == [(1, 3), (2, 3), (3, 3)]
    steps.clear()
    requests = [(("", ""), ids[:30], ids[30:31]), (("", ""), ids[:30], ids[30:34]), (("", ""), ids[:7], ids[7:31])]
    scores = tasks._loglikelihood_tokens(requests)
    for (total, greedy), (kept, ids_scored) in zip(
        scores, [(ids[6:30], ids[30:31]), (ids[9:30], ids[30:34]), (ids[6:7], ids[7:31])], strict=True
    ):
        (score,) = story().score(kept, [ids_scored])
        assert (total, greedy) == (score.total, score.is_greedy)
    assert steps == [(3, 3)]
    for count in (0, 25):
        with pytest.raises(GenerationError, match=f"a continuation of {count} tokens, expected 1 to 24"):
            tasks._loglikelihood_tokens([(("a", "b"), ids[:3], ids[:count])])


def test_of_stops_that_overlap_the_first_listed_counts():
    """lm-eval's own models cut a text at each stop in turn."""
    harness = pytest.importorskip("bitnet_ref.evaluation.harness", reason="lm-eval is not installed")
    text = story().generate("The king said", max_tokens=12).text
    end = first_where(range(3, len(text)), lambda i: text.index(text[i]) == i, "a character that is new")
    stops = [text[end], text[end - 2 : end + 1]]
    tasks = harness.TaskModel(story())
    given = [asked("The king said", {"max_gen_toks": 12, "until": until}) for until in (stops, stops[::-1], stops[:1])]
    assert tasks.generate_until(given) == [text[:end], text[: end - 2], text[:end]]


@pytest.mark.thorough
def test_more_texts_than_the_engine_takes(monkeypatch):
    harness = pytest.importorskip("bitnet_ref.evaluation.harness", reason="lm-eval is not installed")
    monkeypatch.setattr(story(), "engine", partial(story().engine, max_batch=2, max_queue=8))
    steps, prompts = [], ["The king said", "Alice", "Once", "The wood", "She", "It was", "A girl"]
    tasks = harness.TaskModel(story(), None, lambda *at: steps.append(at))
    texts = tasks.generate_until([asked(prompt, {"max_gen_toks": 3}) for prompt in prompts])
    assert texts == [story().generate(prompt, max_tokens=3).text for prompt in prompts]
    assert steps == [(done, 7) for done in range(1, 8)]


def test_a_model_as_lm_eval_sees_it():
    harness = pytest.importorskip("bitnet_ref.evaluation.harness", reason="lm-eval is not installed")
    tasks = harness.TaskModel(story())
    assert (tasks.max_length, tasks.eot_token_id, tasks.prefix_token_id) == (256, 2, 1)
    assert tasks.tokenizer_name == str(story().path)
    plain = story().tokenizer.encode("Alice", False)
    assert tasks.tok_encode("Alice") == tasks.tok_encode("Alice", True) == [1, *plain]
    assert tasks.tok_encode("Alice", False) == plain
    rolling = tasks.loglikelihood_rolling([asked(text) for text in ("Alice", TEXT)])
    found = [perplexity(story(), text, "lm-eval", 256) for text in ("Alice", TEXT)]
    assert rolling == pytest.approx([-each.nats_per_token * each.tokens for each in found], rel=1e-9)


@pytest.mark.parametrize(
    ("given", "params"),
    [
        ({}, {"stop": [], "max_tokens": 256, "temperature": 0.0, "seed": 0}),
        (
            {"until": ".", "max_gen_toks": 7, "max_tokens": 8},
            {"stop": ["."], "max_tokens": 7, "temperature": 0.0, "seed": 0},
        ),
        (
            {"until": ["a", ""], "max_new_tokens": 9999, "do_sample": True, "temperature": 0.5, "top_k": 3, "x": 1},
            {"stop": ["a"], "max_tokens": 500, "temperature": 0.5, "top_k": 3, "seed": 0},
        ),
        (
            {"do_sample": False, "temperature": 0.5, "max_tokens": "3"},
            {"stop": [], "max_tokens": 3, "temperature": 0.0, "seed": 0},
        ),
    ],
)
def test_parameters_of_a_text(given, params):
    harness = pytest.importorskip("bitnet_ref.evaluation.harness", reason="lm-eval is not installed")
    before = dict(given)
    assert harness.read_generation(given, 1000) == params
    assert given == before
    assert harness.read_generation({}, 1)["max_tokens"] == 1


def test_options_reach_lm_eval(tasks, monkeypatch):
    harness, calls = importlib.import_module("bitnet_ref.evaluation.harness"), []

    def simple_evaluate(*args, **options):
        calls.append((args, options))
        return {"results": {"tiny_choice": {}}, "n-shot": {"tiny_choice": 3}, "samples": []}

    monkeypatch.setattr(harness, "simple_evaluate", simple_evaluate)
    options = {"shots": 3, "limit": 2, "length": 20, "with_chat_template": True}
    results = harness.evaluate(story(), ["tiny_c*"], folders=[tasks[0]], **options)
    assert results == {"results": {"tiny_choice": {}}, "n-shot": {"tiny_choice": 3}}
    assert harness.evaluate(story(), ["tiny_choice"], folders=[tasks[0]]) == results
    ((task_model,), passed), ((plain,), defaults) = calls
    assert plain.max_length == story().context_length
    chosen = {name: defaults[name] for name in ("tasks", "num_fewshot", "limit", "apply_chat_template")}
    assert chosen == {"tasks": ["tiny_choice"], "num_fewshot": None, "limit": None, "apply_chat_template": False}
    assert task_model.max_length == 20
    del passed["task_manager"]
    assert passed == {
        "tasks": ["tiny_choice"],
        "num_fewshot": 3,
        "limit": 2,
        "apply_chat_template": True,
        "log_samples": False,
        "bootstrap_iters": 1000,
    }


def test_lm_evals_own_tasks_are_not_read_for_ours(monkeypatch, tmp_path):
    """They are thousands of files."""
    harness = pytest.importorskip("bitnet_ref.evaluation.harness", reason="lm-eval is not installed")
    calls = []

    def manager(**options):
        calls.append(options)
        return SimpleNamespace(all_subtasks=["mine", "other"])

    monkeypatch.setattr(harness, "TaskManager", manager)
    for names, folders, expected in (
        (["mine"], ["f"], [{"include_path": ["f"], "include_defaults": False}]),
        (["mine", "other"], ["f"], [{"include_path": ["f"], "include_defaults": False}]),
        (["mine", "mmlu"], ["f"], [{"include_path": ["f"], "include_defaults": False}, {"include_path": ["f"]}]),
        (["mmlu"], [], [{"include_path": None}]),
    ):
        harness._task_manager(names, folders)
        assert calls == expected
        calls.clear()


def test_what_is_refused(tasks):
    folder, _ = tasks
    refused = invoke("eval", "--tasks", "tiny_*,no_such_task", "--include", folder, *FAST)
    assert refused.exit_code == 2
    assert "lm-eval has no task no_such_task" in refused.output
    longer = invoke("eval", "--tasks", "tiny_until", "--include", folder, "--length", 257, *FAST)
    assert longer.exit_code == 2
    assert "--length: expected at most 256 (the model's context), got 257" in longer.output
    nothing = invoke("eval", "--tasks", ",", "--include", folder, *FAST)
    assert nothing.exit_code == 2
    assert "--tasks: expected names of tasks, got ','" in nothing.output


def test_without_lm_eval(monkeypatch):
    monkeypatch.setattr("bitnet_ref.cli.evaluation_commands.find_spec", lambda name: None)
    result = invoke("eval", "--tasks", "x")
    assert result.exit_code == 4
    assert "pip install 'bitnet-ref[eval]'" in result.output
