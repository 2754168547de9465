"""`score` against plain log softmax of `logits`: each continuation's tokens, alone and beside others."""

import numpy as np
import pytest
from cli_runs import BACKEND
from helpers import GOLDEN, first_where, model

from bitnet_ref.errors import GenerationError
from bitnet_ref.formats.open import ASSETS
from bitnet_ref.generation.sampling import log_probability
from bitnet_ref.generation.score import MAX_CONTINUATIONS, score_groups

ENDINGS = [" there was", " a king", " the little rabbit ran and ran until he came to the sea", "!"]


def plain(model, prompt, continuation):
    ids = [*prompt, *continuation]
    logits = model.logits(ids[:-1])
    rows = [(logits[at - 1], ids[at]) for at in range(len(prompt), len(ids))]
    return [log_probability(row, token) for row, token in rows], all(row.argmax() == token for row, token in rows)


@pytest.mark.parametrize("backend", sorted({"numpy", BACKEND}))
def test_texts_equal_the_logits(backend):
    story = model(ASSETS / "storyteller", backend)
    ids = story.tokenizer.encode("Once upon a time")

    def greedy(count):
        out = story.generate(ids, max_tokens=count, echo=True)
        return out.text.removeprefix("Once upon a time"), [*ids, *out.token_ids]

    def is_encoded_so(count):  # a model may write a word in other tokens than its tokenizer
        text, tokens = greedy(count)
        return story.tokenizer.encode("Once upon a time" + text) == tokens

    text, _ = greedy(first_where(range(6, 1, -1), is_encoded_so, "greedy tokens that their text gives again"))
    for ending, score in zip([*ENDINGS, text], story.score("Once upon a time", [*ENDINGS, text]), strict=True):
        rest = story.tokenizer.encode("Once upon a time" + ending)[len(ids) :]
        assert (score.logprobs.tolist(), score.is_greedy) == plain(story, ids, rest)
        assert score.total == pytest.approx(sum(score.logprobs))
    assert score.is_greedy
    spaced = story.score("Once upon a time ", ["there was"])[0]  # the space belongs to the continuation
    assert spaced.logprobs.tolist() == story.score("Once upon a time", ENDINGS[:1])[0].logprobs.tolist()


def test_groups_longer_than_a_pass_and_many_continuations(monkeypatch):
    story = model(ASSETS / "storyteller", BACKEND)
    monkeypatch.setattr(story.backend, "prompt_tokens", lambda config: 16, raising=False)
    rng = np.random.default_rng(5)
    groups = []
    for length, counts in ((1, [1, 1]), (40, [3, 20, 1]), (7, [1] * (MAX_CONTINUATIONS + 3)), (5, [9])):
        parts = [rng.integers(3, 4000, count) for count in counts]
        groups.append((rng.integers(3, 4000, length), parts))
    for (prompt, parts), scores in zip(groups, score_groups(story, groups), strict=True):
        for part, score in zip(parts, scores, strict=True):
            assert (score.logprobs.tolist(), score.is_greedy) == plain(story, prompt, part)


@pytest.mark.parametrize("case", ["mistral-window3", "bitnet-bf16-online"])
def test_families(case):
    loaded = model(GOLDEN / case, BACKEND)
    for part, score in zip([[5], [7, 8, 9]], loaded.score([1, 2, 3], [[5], [7, 8, 9]]), strict=True):
        assert score.logprobs.tolist() == plain(loaded, [1, 2, 3], part)[0]


def test_what_is_refused():
    story = model(ASSETS / "storyteller", BACKEND)
    for prompt, endings in (("a", "b"), ("a", [[5]]), ([5], ["a"]), ([], [[5]]), ([5], [[]]), ([5], [[10**6]])):
        with pytest.raises(GenerationError):
            story.score(prompt, endings)
    for prompt, ending in (("Once upon a t", "ime"), ("Once", "")):  # " time" is one token, as " t" is
        with pytest.raises(GenerationError, match=f"'{ending}' adds no token to those of the prompt"):
            story.score(prompt, [" day", ending])
    length = story.context_length
    assert story.score([5] * length, [[6]])[0].logprobs.shape == (1,)  # the last token need not be read
    with pytest.raises(GenerationError, match="context"):
        story.score([5] * length, [[6, 7]])
    assert story.score([5], []) == []
