"""Processors, limits and beams against transformers' own: see data/make_sampling.py."""

import json

import numpy as np
import pytest
from helpers import DATA, GOLDEN, model

from bitnet_ref.generation import SamplingParams
from bitnet_ref.generation.processors import BannedWords, MinTokens, Rules
from bitnet_ref.generation.sampling import distribution
from bitnet_ref.tokenizers.vocabulary import SortedTokens

RECORDED = np.load(DATA / "sampling" / "processors.npz")
NAMES = sorted(name.removeprefix("out.") for name in RECORDED.files if name.startswith("out."))
LIMITS = [name for name in NAMES if name.split("=")[0] in ("temperature", "top_k", "top_p", "min_p", "typical_p")]
PROMPT = 8
LETTERS = [bytes([token + 48]) for token in range(64)]  # a token a character: then ids and bytes ban the same
CASES = json.loads((DATA / "sampling" / "beams.json").read_text())["cases"]


def rules(name):
    if name == "bad_words":
        words = [bytes(token + 48 for token in ids).decode() for ids in ([3], [10, 11], [10, 11, 12], [20, 21, 20])]
        return Rules([BannedWords(words, SortedTokens(LETTERS), PROMPT)])
    if name.startswith("min_tokens"):
        return Rules([MinTokens(int(name[-1]), [2, 9], PROMPT)])
    given = {"logit_bias": {3: 2.5, 40: -7.0}} if name == "logit_bias" else {name[:18]: float(name[19:])}
    return Rules.of(SamplingParams.of(**given), PROMPT, [], [])


@pytest.mark.parametrize("name", [name for name in NAMES if name not in LIMITS])
def test_processors(name):
    for ids, logits, expected in zip(RECORDED["ids"], RECORDED["logits"], RECORDED[f"out.{name}"], strict=True):
        before = logits.copy()
        got = rules(name).apply(ids, logits)
        np.testing.assert_allclose(got, expected, rtol=1e-6)
        np.testing.assert_array_equal(logits, before)
        assert set(np.flatnonzero(got != logits)) <= set(rules(name).moved(ids).tolist())
    assert (RECORDED[f"out.{name}"] != RECORDED["logits"]).any() == (name != "min_tokens=6")  # 6 tokens are there


@pytest.mark.parametrize("name", LIMITS)
def test_limits(name):
    given = {key: int(value) if key == "top_k" else float(value) for key, value in
             (pair.split("=") for pair in name.split(","))}  # fmt: skip
    params = SamplingParams.of(**{"temperature": 1.0, **given})
    for logits, scores in zip(RECORDED["logits"], RECORDED[f"out.{name}"], strict=True):
        expected = np.exp(scores.astype(np.float64) - scores.max())
        ids, probabilities = distribution(logits, params)
        got = np.zeros(len(logits))
        got[ids] = probabilities
        assert set(ids.tolist()) == set(np.flatnonzero(expected).tolist())
        np.testing.assert_allclose(got, expected / expected.sum(), rtol=2e-5, atol=1e-9)


def label(case):
    given = {key: value for key, value in case.items() if key not in ("model", "prompt", "out", "scores")}
    return f"{case['model']}-{len(case['prompt'])}-{given}"


@pytest.mark.sample(9)
@pytest.mark.parametrize("case", CASES, ids=label)
def test_beams(case):
    params = {key: value for key, value in case.items() if key not in ("model", "prompt", "end", "out", "scores")}
    if "min_new_tokens" in params:
        params["min_tokens"] = params.pop("min_new_tokens")
    m = model("storyteller" if case["model"] == "storyteller" else GOLDEN / case["model"], "auto")
    outs = m.generate(case["prompt"], max_tokens=16, stop_token_ids=case["end"], ignore_eos=True, **params)
    outs = outs if isinstance(outs, list) else [outs]
    assert [out.token_ids for out in outs] == case["out"]
    if case["scores"] is not None:
        ternary = m.config.model_type == "bitnet"  # one int8 that rounds the other way moves its logits by 1e-3 or so
        np.testing.assert_allclose(
            [out.score for out in outs], case["scores"], rtol=3e-3 if ternary else 1e-5, atol=1e-6
        )
    for out in outs:
        assert out.finish_reason == ("stop" if out.token_ids[-1] in case["end"] else "length")


def test_the_cases_are_worth_it():
    """That beams differ from greedy, that some end early, and that settings change what is found."""
    stories = [case for case in CASES if case["model"] == "storyteller"]
    assert len({json.dumps(case["out"][0]) for case in stories}) > 8
    assert any(len(case["out"][0]) < 16 for case in CASES)
    assert any(len(case["out"][0]) == 16 for case in CASES if case["end"])
