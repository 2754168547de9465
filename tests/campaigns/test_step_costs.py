"""What each generation parameter costs a step, at its limits: bounded, whatever is given.

The steps of all requests wait for each other in an engine, so a rule of one is paid for by all.
"""

import statistics
import time
from itertools import pairwise

import pytest

import bitnet_ref
from bitnet_ref.errors import GenerationError
from bitnet_ref.generation.constraint_limits import MAX_LITERAL
from bitnet_ref.generation.params import MAX_CHARACTERS, SamplingParams
from bitnet_ref.system.options import declared_options

TOKENS = 60
STEP_S = 0.02  # beyond a step without parameters; on a free core of 2019 the most is 3 ms
FULL = MAX_CHARACTERS - 1
MANY = [f"{number:09d}" for number in range(FULL // 9)]
ENGLISH = [f" {letter}{number:06d}" for number in range(FULL // 8 // 26) for letter in "abcdefghijklmnopqrstuvwxyz"]
PERIODIC = ["e " * length for length in range(1, 250)]
STRINGS = {
    "many": MANY,
    "beginnings of words": ENGLISH,
    "one": ["a" * FULL],
    "of a period": PERIODIC,
    "letters": ["Q", "Z"],
}
SCHEMA = {"type": "object", "properties": {f"key{number}": {"type": "string"} for number in range(300)}}


def limits(vocab_size):
    """name -> the parameters that are costly; each declared parameter is there."""
    ids = list(range(vocab_size))
    costly = {
        "max_tokens": [TOKENS],
        "min_tokens": [TOKENS],
        "stop": STRINGS.values(),
        "stop_token_ids": [ids[3000:], [vocab_size - 1] * 200_000],
        "ignore_eos": [True],
        "guide_after": [ids[3000:]],
        "adapter": [],  # its cost is that of its kernels: scripts/benchmarks/adapters.py
        "shown_tokens": [ids[3000:]],
        "overflow": ["sliding", "sinks", "truncate"],
        "window": [8, 200],
        "sink_tokens": [0, 100],
        "temperature": [1e-100, 1e100, 1.0],
        "top_k": [1, 1024, vocab_size - 1, 2**31 - 1],
        "top_p": [1e-300, 0.5, 1 - 1e-12],
        "min_p": [1e-300, 1.0],
        "typical_p": [1e-300, 0.5],
        "repetition_penalty": [1e-6, 1e6],
        "presence_penalty": [-2, 2],
        "frequency_penalty": [-2, 2],
        "logit_bias": [dict.fromkeys(ids, 0.5), {str(number): -100 for number in ids[:-1]}],
        "seed": [2**64 - 1],
        "bad_words": STRINGS.values(),
        "filter": STRINGS.values(),
        "guided_json": [
            SCHEMA,
            {"enum": MANY[:1900]},
            {"const": "a" * MAX_LITERAL},
            {"type": "array", "items": SCHEMA},
            True,
        ],
        "guided_regex": ["(a|b| )*a(a|b| ){60}", "[a-z ]?" * 2000, r"(\w|\s)*", ".{30000}", "a" * MAX_LITERAL],
        "guided_choice": [MANY[:1900], ["x" * MAX_LITERAL]],
        "guided_grammar": ["start: a\na: a a | /[a-z ]/", 'start: /(.|\\n)*x/ | "y" start "z" | start /[a-z]+/'],
        "n": [8],
        "num_beams": [8],
        "length_penalty": [-30, 30],
        "early_stopping": ["never"],
        "logprobs": [1024],
        "prompt_logprobs": [1024],
        "echo": [True],
        "speculate": ["lookup"],
    }
    functions = {"strategy", "processors"}  # the caller's own
    assert set(costly) | functions == set(declared_options(SamplingParams))
    return costly


def step_s(model, **params):
    """Processor time of a step and of the setting up, for each text. None for a request that is refused."""
    rest = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.8, "seed": 1}
    if "num_beams" in params:
        rest["temperature"] = 0
    if params.get("overflow") in ("sliding", "sinks") or "sink_tokens" in params or "window" in params:
        rest |= {"overflow": "sinks"} | ({} if "window" in params else {"window": 120})
    marks = []

    def note(ids, logits):
        marks.append(time.thread_time())
        return logits

    started = time.thread_time()
    try:
        model.generate("Once upon a time there was a fox", processors=[note], **(rest | params))
    except GenerationError:
        return None
    gaps = [after - before for before, after in pairwise(marks)]
    return statistics.median(gaps or [0.0]), sum(gaps) / max(1, len(gaps)), marks[0] - started


@pytest.mark.slow
def test_every_parameter_at_its_limits():
    model = bitnet_ref.load("storyteller")
    usual = min(step_s(model)[0] for _ in range(3))
    count, slow = 0, []
    for name, values in limits(model.config.vocab_size).items():
        for number, value in enumerate(values):
            measured = step_s(model, **{name: value})
            count += 1
            if measured is None:
                print(f"{name} {number}: refused")
                continue
            median, mean, setup = measured
            print(f"{name} {number}: {median * 1000:.2f} ms a step, mean {mean * 1000:.2f}, {setup:.2f} s before")
            if mean > usual + STEP_S:
                slow.append((name, number, mean))
    print(f"{count} settings of {len(declared_options(SamplingParams))} parameters; without any {usual * 1000:.2f} ms")
    assert not slow


def test_each_parameter_has_its_limits_here():
    assert limits(4096)
