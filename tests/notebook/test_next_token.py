"""The stages between logits and a choice are those of generation itself."""

from collections import Counter

import numpy as np
import pytest
from helpers import model

from bitnet_ref.errors import GenerationError
from bitnet_ref.generation.params import SamplingParams
from bitnet_ref.generation.sampling import choose, distribution
from bitnet_ref.notebook import NextToken

PROMPT = "The rabbit ran"
ALL = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.95}


@pytest.fixture
def after():
    return NextToken(model("storyteller"), PROMPT)


def test_the_logits_are_the_models(after):
    story = model("storyteller")
    assert np.array_equal(after.logits, story.logits(story.tokenizer.encode(PROMPT))[-1])


def test_one_stage_for_each_parameter_that_does_something(after):
    names = [stage.name for stage in after.stages(**ALL, repetition_penalty=1.2)]
    assert names == [
        *("the model", "rules", "temperature 0.8", "top_k 40", "top_p 0.9", "min_p 0.02", "typical_p 0.95")
    ]
    assert [stage.name for stage in after.stages(temperature=1.0)] == ["the model"]


@pytest.mark.thorough
def test_the_last_stage_is_what_is_sampled_from(after):
    last = after.stages(**ALL)[-1]
    ids, probabilities = distribution(after.logits, SamplingParams(**ALL))
    assert np.array_equal(last.ids, ids)
    assert np.array_equal(last.probabilities, probabilities)
    drawn = Counter(choose(after.logits, SamplingParams(**ALL), (i + 0.5) / 2000) for i in range(2000))
    for token, p in zip(last.ids.tolist(), last.probabilities.tolist(), strict=True):
        assert drawn[token] / 2000 == pytest.approx(p, abs=2 / 2000)


def test_greedy_is_one_token(after):
    story = model("storyteller")
    bad = {"bad_words": [story.vocabulary.tokens[after.likeliest(1)[0]].decode()]}
    for params in ({}, bad):
        last = after.stages(**params)[-1]
        assert last.ids.tolist() == story.generate(PROMPT, max_tokens=1, **params).token_ids
        assert last.probabilities.tolist() == [1.0]
    assert after.stages()[-1].ids.tolist() != after.stages(**bad)[-1].ids.tolist()


def test_probabilities_of_ids(after):
    stage = after.stages(**ALL)[-1]
    ids = after.likeliest(60)
    p = stage.of(ids)
    assert len(stage.ids) <= 40 < np.count_nonzero(p == 0) + len(stage.ids)
    assert p.sum() == pytest.approx(1)
    assert stage.of(ids[:0]).shape == (0,)
    assert p[0] == p.max()


def test_texts_show_spaces_and_special_tokens(after):
    tokenizer = after.model.tokenizer
    assert after.texts(np.array(tokenizer.encode("the")[-1:])) == ["▁the"]
    assert after.texts(np.array([tokenizer.eos_ids[0]])) == ["</s>"]


@pytest.mark.parametrize("params", [{"num_beams": 2}, {"strategy": lambda ids, logits, rng: 1}])
def test_choices_without_a_distribution(after, params):
    with pytest.raises(GenerationError, match="without a distribution"):
        after.stages(**params)


def test_the_figure_shows_the_numbers(after):
    pytest.importorskip("matplotlib")
    figure = after.plot(count=12, temperature=0.7, top_k=5)
    stages = after.stages(temperature=0.7, top_k=5)
    ids = after.likeliest(12)
    assert [ax.get_title() for ax in figure.axes] == [stage.name for stage in stages]
    for ax, stage in zip(figure.axes, stages, strict=True):
        assert [bar.get_width() for bar in ax.patches[-12:]] == stage.of(ids).tolist()
    crosses = [line for line in figure.axes[-1].lines if line.get_marker() == "x"]
    assert [int(line.get_ydata()[0]) for line in crosses] == list(range(5, 12))


def test_reprs_fit_a_cell(after):
    (best,) = after.texts(after.likeliest(1))
    p = 1 / np.exp(after.logits.astype(np.float64) - after.logits.max()).sum()
    assert repr(after).startswith(f"<bitnet_ref.NextToken after 6 tokens: {best} {p:.3f}")
    assert max(len(repr(each)) for each in (after, *after.stages(**ALL))) < 200
