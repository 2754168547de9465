"""Drafts: with guesses verified together, each text is that of plain decoding, to the bit."""

import math
from importlib import import_module

import numpy as np
import pytest
from engine_checks import check
from helpers import GOLDEN, model
from hypothesis import given, settings
from hypothesis import strategies as st

from bitnet_ref.errors import GenerationError
from bitnet_ref.generation import greedy, sequence, stepper
from bitnet_ref.generation.drafts import (
    COST,
    FIRST_S,
    INCOME,
    LENGTHS,
    MOST_UNSEEN,
    START,
    SURE_MATCH,
    WORTH,
    Drafts,
    LookupDrafts,
    StepTimes,
)
from bitnet_ref.serving import scheduler

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


GREEDY = {"stop": st.sampled_from(["mat", ". "]), "filter": st.just(["log"]), "echo": st.booleans()}


def facts(result):
    outs = result if isinstance(result, list) else [result]
    return [(o.text, o.token_ids, o.finish_reason, o.stop_reason, o.logprobs, o.top_logprobs) for o in outs]


class SteadyTimes(StepTimes):
    """The times of a machine without other work: a guess takes COST of a step. So there are drafts, also of a model
    whose steps take less time than Python does."""

    def learn(self, rows, drafted, seconds):
        self.rows, self.cost = rows, COST * rows
        return COST * drafted


class OftenTimes(SteadyTimes):
    """Guesses cost next to nothing and are looked for every three tokens, so that there are greedy steps in a row."""

    def learn(self, rows, drafted, seconds):
        self.rows, self.cost, self.stride = rows, 0.01, 3
        return 0.0


@pytest.fixture
def steady(monkeypatch):
    for module in (GENERATE, scheduler):
        monkeypatch.setattr(module, "StepTimes", SteadyTimes)


@pytest.mark.thorough
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


@pytest.mark.thorough
@settings(max_examples=8, deadline=None)
@given(
    options=st.fixed_dictionaries({"max_tokens": st.integers(1, 60), "ignore_eos": st.booleans()}, optional=GREEDY),
    starts=st.lists(st.integers(0, 30), min_size=1, max_size=3),
    wrong=st.integers(0, 4),
)
def test_drafts_between_greedy_steps_in_a_row(options, starts, wrong):
    """The mixed path: groups of steps, looks for drafts between them, and of the guesses those after `wrong` false."""

    class Spoiled(LookupDrafts):
        def guess(self, ids, count):
            right = super().guess(ids, count)
            return np.where(np.arange(len(right)) < 4 - wrong, right, 5)

    subject = model("storyteller", "cython")
    prompts = [STORY[start:] for start in starts]
    plain = [fact for each in prompts for fact in facts(subject.generate(each, **options))]
    with pytest.MonkeyPatch.context() as patch:
        for module in (GENERATE, scheduler):
            patch.setattr(module, "StepTimes", OftenTimes)
        patch.setattr(sequence, "LookupDrafts", Spoiled)
        assert facts(subject.generate(prompts, speculate="lookup", **options)) == plain
        with subject.engine(max_batch=2, page_size=4) as engine:
            outs = engine.generate(prompts, speculate="lookup", **options)
    assert facts(outs) == plain


@pytest.mark.thorough
def test_both_kinds_of_steps_are_taken(monkeypatch):
    """In one text, of which the second half is a copy."""
    monkeypatch.setattr(GENERATE, "StepTimes", OftenTimes)
    subject, counts = model("storyteller", "cython"), []
    monkeypatch.setattr(stepper, "run_steps", lambda *args: counts.append(args[3]) or greedy.run_steps(*args))
    monkeypatch.setattr(greedy, "MOST_S", 1.0)
    out = subject.generate("Once upon a time", max_tokens=200, speculate="lookup", ignore_eos=True)
    assert out.stats.accepted_tokens > 20
    assert len(counts) > 3
    assert facts(out) == facts(subject.generate("Once upon a time", max_tokens=200, ignore_eos=True))


@pytest.mark.thorough
def test_guesses_save_steps(steady, monkeypatch):
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
        ([1, 2, 3, 4, 5, 1, 2, 3], [4, 5]),
        ([0, 1, 2, 9, 7, 0, 1, 2, 8, 7, 0, 1, 2], [8, 7]),  # equally long: the latest
        ([5, 0, 1, 2, 9, 7, 0, 1, 2, 8, 5, 0, 1, 2], [9, 7]),  # the longest
        ([1, 2, 3, 1, 2], []),  # two tokens are no repetition
        ([7, 7, 7, 7], [7, 7]),  # a copy that reaches the end is repeated
        ([1, 2, 3, 1, 2, 3], [1, 2]),
        ([1, *range(20, 40), 6, 6, 2, *range(20, 40), 7, 7, 1, *range(20, 40)], [7, 7]),  # equal in 16 tokens
        ([4], []),
    ],
)
def test_what_is_looked_up(ids, guess):
    drafts = LookupDrafts()
    drafts.matched(np.array(ids))
    assert drafts.guess(np.array(ids), 2).tolist() == guess


def times(cost=COST, stride=1):
    result = StepTimes()
    result.cost, result.stride = cost, stride
    return result


@pytest.mark.parametrize("stride", [1, 4])
@pytest.mark.parametrize("cost", [0.15, 0.5, 2.0])
def test_guesses_that_are_wrong_cost_a_bounded_share(cost, stride):
    """Also where a guess costs more than was expected."""
    drafts, lost = LookupDrafts(), 0.0
    text = [token for n in range(200) for token in (1, 2, 3, 100 + n, 500 + n)]  # every guess is wrong
    for length in range(1, len(text) + 1):
        guess = drafts.propose(np.array(text[:length]), 100, times(stride=stride))
        assert len(guess) in (0, *LENGTHS)
        if len(guess):
            drafts.learn(len(guess), 0, cost * len(guess))
            lost += cost * len(guess)
    assert 0 < lost <= START + INCOME * 1000 + 2 * cost * LENGTHS[0]


def test_guesses_that_cannot_pay_are_not_made():
    ids = np.array([*range(100, 140)] * 2)
    assert len(LookupDrafts().propose(ids, 100, times(WORTH))) == LENGTHS[1]
    assert len(LookupDrafts().propose(ids, 100, times(WORTH + 0.01))) == 0


@pytest.mark.parametrize("stride", [1, 4])
def test_a_copy_is_noticed_without_a_balance(stride):
    """By as many tokens as are surely a copy; the more such drafts were wrong, the more of them must be."""
    drafts, text, drafted = LookupDrafts(), [*range(100, 160)], []
    drafts.propose(np.array(text), 100, times())
    drafts.learn(2, 0, lost=100.0)
    for token in [*range(100, 110), *range(50, 60), *range(130, 130 + 15)]:
        text.append(token)
        drafted.append(len(drafts.propose(np.array(text), 100, times(stride=stride))))
        if drafted[-1]:
            drafts.learn(drafted[-1], 0)
    sure = [math.ceil(factor * SURE_MATCH * (1 + COST)) for factor in (1, 2)]  # tokens
    first = np.flatnonzero(drafted).tolist()
    assert len(first) == 2
    assert sure[0] <= first[0] + 1 < sure[0] + stride
    assert sure[1] <= first[1] + 1 - 20 < sure[1] + stride


def test_it_looks_again_at_once_after_a_right_guess():
    drafts, text = LookupDrafts(), [*range(100, 160)] * 2
    assert len(drafts.propose(np.array(text), 100, times(stride=4))) == LENGTHS[1]
    drafts.learn(4, 4)
    assert len(drafts.propose(np.array([*text, *range(100, 104)]), 100, times(stride=4))) == LENGTHS[2]
    drafts.learn(12, 0)
    assert len(drafts.propose(np.array([*text, *range(100, 106)]), 100, times(stride=4))) == 0
    assert drafts.looks_at == 124 + 4


def test_the_cost_of_guesses_is_measured():
    measured = StepTimes()
    for _ in range(3):
        assert measured.learn(2, 0, 1.0) == 0
    first = 2 * (COST / (1 + COST) + FIRST_S)
    assert measured.cost == pytest.approx(first, rel=0.01)
    assert measured.share == measured.cost / 2
    for _ in range(2):  # of each number the first two are recorded: later ones cost less
        assert measured.learn(2, 4, 2.5) == pytest.approx(3.0)
    assert measured.cost == pytest.approx(first, rel=0.01)
    for _ in range(30):
        assert measured.learn(2, 4, 2.0) == pytest.approx(2.0)  # a step more for two rows
    assert measured.cost == pytest.approx(0.5, abs=1e-3)
    assert measured.learn(2, 4, 99.0) == 8  # the processor was taken away
    measured.learn(1, 0, 0.5)  # of another row alone, a guess takes as long
    assert measured.cost == pytest.approx(2 * (0.25 + 0.3 * (1 - 0.25)), rel=0.01)
    for _ in range(3000):  # it is forgotten, so that it is measured again
        measured.learn(1, 0, 0.5)
    assert measured.cost == COST


def test_small_models_are_asked_every_few_tokens():
    for seconds, rows, stride in ((0.06, 1, 1), (0.001, 1, 2), (0.0004, 1, 5), (0.002, 8, MOST_UNSEEN)):
        measured = StepTimes()
        measured.learn(rows, 0, seconds)
        assert measured.stride == stride


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
        Drafts().propose(np.array([1]), 3, StepTimes())
