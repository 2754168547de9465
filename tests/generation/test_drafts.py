"""Drafts: with guesses verified together, each text is that of plain decoding, to the bit."""

from importlib import import_module

import numpy as np
import pytest
from engine_checks import check
from helpers import GOLDEN, model
from hypothesis import given, settings
from hypothesis import strategies as st

from bitnet_ref.errors import GenerationError
from bitnet_ref.generation import greedy
from bitnet_ref.generation.drafts import COST, INCOME, LENGTHS, STREAK, Drafts, LookupDrafts, Pace, StepTimes

GENERATE = import_module("bitnet_ref.generation.generate")  # the package has a function of that name
STORY = "The cat sat on the mat. The dog sat on the log. The cat sat on the mat. The dog sat"
OPTIONS = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 40)},
    optional={
        "temperature": st.sampled_from([0.0, 0.7, 1.5]),
        "seed": st.integers(0, 5),
        "top_k": st.sampled_from([0, 1, 20]),
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
        "frequency_penalty": st.sampled_from([-1.0, 0.5]),
        "logit_bias": st.sampled_from([{5: 3.0}, {262: -9.0}]),
        "stop": st.sampled_from(["mat", ". "]),
        "bad_words": st.sampled_from([["cat"], ["The dog"]]),
        "min_tokens": st.just(3),
        "filter": st.just(["log"]),
        "logprobs": st.integers(0, 4),
        "ignore_eos": st.booleans(),
        "n": st.just(2),
        "echo": st.booleans(),
    },
)


def facts(result):
    outs = result if isinstance(result, list) else [result]
    return [(o.text, o.token_ids, o.finish_reason, o.stop_reason, o.logprobs, o.top_logprobs) for o in outs]


@settings(max_examples=6, deadline=None)
@given(options=OPTIONS, backend=st.sampled_from(["numpy", "cython"]), by_model=st.booleans(), start=st.integers(0, 20))
def test_the_text_is_that_of_plain_decoding(options, backend, by_model, start):
    """Alone; and in an engine, beside the same request without drafts, on too few pages for both."""
    subject = model("storyteller", backend)
    if options.get("temperature", 0) and "seed" not in options:
        options = {**options, "seed": 1}
    prompt = STORY[start:]
    plain = subject.generate(prompt, **options)
    drafted = subject.generate(prompt, speculate=subject if by_model else "lookup", **options)
    assert facts(drafted) == facts(plain)
    with subject.engine(max_batch=4, max_batch_tokens=24, page_size=4, cache_tokens=100) as engine:
        handles = [engine.submit(prompt, speculate=each, **options) for each in ("lookup", None, "lookup")]
        assert [facts(handle.result()) for handle in handles] == [facts(plain)] * 3
    check(engine)


class SteadyTimes(StepTimes):
    """The times of a machine without other work: a guess takes COST of a step."""

    def learn(self, rows, drafted, seconds):
        self.cost = COST * rows
        return COST * drafted


def test_guesses_save_steps(monkeypatch):
    monkeypatch.setattr(GENERATE, "StepTimes", SteadyTimes)
    monkeypatch.setattr(greedy, "MOST_S", 0)  # steps in a row, or one by one, as the machine is busy
    subject = model("storyteller", "cython")
    out = subject.generate(STORY, max_tokens=40, speculate=subject, ignore_eos=True)
    assert out.stats.accepted_tokens == out.stats.drafted_tokens > 30
    prompts = [STORY, "Alice", STORY[8:]]
    together = subject.generate(prompts, max_tokens=120, speculate="lookup")  # how many guesses: by the machine's pace
    assert facts(together) == [fact for each in prompts for fact in facts(subject.generate(each, max_tokens=120))]
    assert together[0].stats.drafted_tokens > together[0].stats.accepted_tokens > 0
    chunks = list(subject.stream(STORY, max_tokens=120, speculate="lookup"))
    assert [chunk.token_id for chunk in chunks] == together[0].token_ids


def test_what_cannot_go_back_is_decoded_plainly():
    subject = model("storyteller", "cython")
    for options in ({"overflow": "sliding", "window": 40}, {"guided_regex": "[a-z ]+"}):
        if "guided_regex" in options:
            pytest.importorskip("llguidance")
        out = subject.generate(STORY, max_tokens=30, speculate="lookup", **options)
        assert facts(out) == facts(subject.generate(STORY, max_tokens=30, **options))
        assert out.stats.drafted_tokens == 0


@pytest.mark.parametrize(
    ("ids", "guess"),
    [
        ([1, 2, 3, 4, 1, 2], [3, 4]),
        ([1, 2, 9, 7, 1, 2, 8, 7, 1, 2], [8, 7]),  # equally long: the latest
        ([5, 1, 2, 9, 7, 1, 2, 8, 5, 1, 2], [9, 7]),  # the longest
        ([1, 2, 3, 2], []),  # one token is no repetition
        ([7, 7, 7, 7], [7, 7]),  # a copy that reaches the end is repeated
        ([1, 2, 3, 1, 2, 3], [1, 2]),
        ([1, *range(20, 40), 6, 6, 2, *range(20, 40), 7, 7, 1, *range(20, 40)], [7, 7]),  # equal in 16 tokens
        ([4], []),
    ],
)
def test_what_is_looked_up(ids, guess):
    assert LookupDrafts().guess(np.array(ids), 2).tolist() == guess


@pytest.mark.parametrize("cost", [0.15, 0.5, 2.0])
def test_guesses_that_are_wrong_cost_a_bounded_share(cost):
    """Also where a guess costs more than was expected."""
    drafts, lost = LookupDrafts(), 0.0
    for n in range(1000):  # a text in which every guess is wrong
        guess = drafts.propose(np.array([1, 2, *range(3, n + 4), 1, 2]), 100)
        assert len(guess) in (0, *LENGTHS)
        if len(guess):
            drafts.learn(len(guess), 0, cost * len(guess))
            lost += cost * len(guess)
    assert 0 < lost <= INCOME * 1000 + 2 * cost * LENGTHS[0]


def test_a_copy_is_noticed_without_a_balance():
    """Plain steps show that guesses are right; the more such drafts were wrong, the more of them must be."""
    drafts, text, drafted = LookupDrafts(), [*range(100, 140)], []
    drafts.propose(np.array(text), 100)
    drafts.learn(2, 0, lost=100.0)
    for token in [*range(100, 100 + STREAK + 2), *range(50, 60), *range(120, 120 + 2 * STREAK + 3)]:
        text.append(token)
        drafted.append(len(drafts.propose(np.array(text), 100)))
        if drafted[-1]:
            drafts.learn(drafted[-1], 0)
    first = STREAK + 1  # two tokens are a copy; then so many guesses were right
    assert np.flatnonzero(drafted).tolist() == [first, STREAK + 2 + 10 + 2 * STREAK + 1]


def test_the_cost_of_guesses_is_measured():
    times = StepTimes()
    assert times.learn(2, 0, 1.0) == 0
    assert times.cost == 2 * COST
    for _ in range(2):  # of each number the first two are recorded: later ones cost less
        assert times.learn(2, 4, 2.5) == pytest.approx(3.0)
    assert times.cost == 2 * COST
    for _ in range(30):
        assert times.learn(2, 4, 1.5) == pytest.approx(1.0)  # half a step more for two rows
    assert times.cost == pytest.approx(0.25, abs=1e-4)
    assert times.learn(2, 4, 99.0) == 4  # the processor was taken away
    times.learn(1, 0, 3.0)  # other rows
    assert times.cost == COST


def test_the_pace_is_that_of_the_last_passes():
    pace = Pace()
    assert (pace.cost, pace.time(1), pace.token_cost(1, 1)) == (0.15, 1, 0.15)
    for cost in (0.3, 0.8):
        for number in range(400):
            tokens = 1 + number % 5
            pace.learn(tokens, (2.0 if number % 51 else 90.0) * (1 + cost * (tokens - 1)))  # with a hiccup now and then
        assert pace.cost == pytest.approx(cost, abs=0.2)
    assert pace.token_cost(8, 8) == pytest.approx(8 * pace.cost / (1 + 7 * pace.cost))
    for slope, cost in ((0.0, 0.15), (9.0, 1.0)):
        for number in range(400):
            pace.learn(1 + number % 5, 1 + slope * (number % 5))
        assert pace.cost == cost


def test_wrong_uses_are_refused(tmp_path):
    subject = model("storyteller", "numpy")
    with pytest.raises(GenerationError, match="speculate: expected \"lookup\" or a loaded model, got 'look'"):
        subject.generate("a", speculate="look")
    with pytest.raises(GenerationError, match="the draft model has a vocabulary of"):
        subject.generate("a", speculate=model(GOLDEN / "llama-dense", "numpy"))
    with pytest.raises(GenerationError, match="takes no speculate"):
        subject.generate("a", speculate="lookup", num_beams=2)
    with subject.engine() as engine, pytest.raises(GenerationError, match='takes "lookup" and no draft model'):
        engine.generate("a", speculate=subject)
    with pytest.raises(NotImplementedError):
        Drafts().propose(np.array([1]), 3)
