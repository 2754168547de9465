"""`bitnet-ref eval`: lm-eval's own tasks machinery, on local JSON tasks."""

import json
import math

import pytest
from cli_runs import BACKEND, CHOICE, FAST, invoke, invoke_json
from helpers import model

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
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'bitnet-ref[eval]'")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    prompts = ["Once upon a time", "The king said", "In the wood", ""]
    targets = [story().generate(prompt, max_tokens=24, stop=["."]).text for prompt in prompts[:3]]
    documents = [
        {"q": prompt, "choices": ENDINGS, "text": f"{prompt} {TEXT}", "target": target}
        for prompt, target in zip(prompts, [*targets, "no such text"], strict=True)
    ]
    return write_tasks(tmp_path, documents), documents


def test_multiple_choice_texts_and_rolling(tasks):
    folder, documents = tasks
    facts = invoke_json("eval", "storyteller", "--tasks", "tiny_choice,tiny_rolling,tiny_until", "--include", folder, *FAST)
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


def test_what_is_refused(tasks):
    folder, _ = tasks
    refused = invoke("eval", "--tasks", "tiny_*,no_such_task", "--include", folder, *FAST)
    assert refused.exit_code == 2
    assert "lm-eval has no task no_such_task" in refused.output


def test_without_lm_eval(monkeypatch):
    monkeypatch.setattr("bitnet_ref.cli.evaluation_commands.find_spec", lambda name: None)
    result = invoke("eval", "--tasks", "x")
    assert result.exit_code == 4
    assert "pip install 'bitnet-ref[eval]'" in result.output
