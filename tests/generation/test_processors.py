"""What may be said and how likely: rules on logits, alone, in a batch, and on the few rows of a screened head."""

import numpy as np
import pytest
from helpers import model, rng

import bitnet_ref
from bitnet_ref.backends.backend import HeadRows
from bitnet_ref.backends.cpu.extension import why_unavailable
from bitnet_ref.backends.run import TokenLogits
from bitnet_ref.errors import GenerationError
from bitnet_ref.generation import SamplingParams
from bitnet_ref.generation.processors import CountPenalties, Rules
from bitnet_ref.generation.sampling import choose, distribution

PROMPTS = ["Once upon a time", "Alice", "The old man of the sea"]
needs_kernels = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
PARAMS = [
    {"repetition_penalty": 1.4},
    {"presence_penalty": 1.5, "frequency_penalty": -0.5, "temperature": 0.9, "top_k": 8},
    {"logit_bias": {262: -100, 300: 3.5}, "temperature": 1.0, "top_p": 0.7},
    {"bad_words": ["the", " was", "a"], "min_tokens": 5, "stop_token_ids": [4044]},
    {"temperature": 0.8, "min_p": 0.1},
    {"temperature": 1.1, "min_p": 0.02, "top_p": 0.9, "repetition_penalty": 1.2},
    {"temperature": 0.8, "top_k": 12, "typical_p": 0.7, "min_p": 0.01},
]
WHOLE = [{"temperature": 0.8, "typical_p": 0.7}, {"processors": [lambda ids, logits: np.roll(logits, 1)]}]


def in_words(params):
    return ",".join(name if name == "processors" else f"{name}={value}" for name, value in params.items())


@pytest.fixture
def story():
    return model("storyteller", "auto")


def test_backends_agree(backend_name):
    """A seed gives the same tokens on every backend, through every kind of rule."""
    params = {"temperature": 0.9, "top_k": 20, "min_p": 0.02, "typical_p": 0.9, "repetition_penalty": 1.2, "seed": 5}
    outs = [model("storyteller", name).generate("Alice", max_tokens=6, **params) for name in ("numpy", backend_name)]
    assert outs[0].token_ids == outs[1].token_ids


def test_count_penalties_count_what_was_generated():
    """OpenAI: mu[j] -> mu[j] - c[j] * frequency - (c[j] > 0) * presence, c of the generated tokens."""
    logits, ids = rng(1).standard_normal(9).astype(np.float32), np.array([0, 1, 5, 5, 2, 5])
    expected = logits.copy()
    expected[5] -= 0.5 + 2 * 0.25
    expected[2] -= 0.5 + 1 * 0.25
    np.testing.assert_allclose(CountPenalties(0.5, 0.25, 3)(ids, logits), expected, rtol=1e-6)


@pytest.mark.sample(3)
@pytest.mark.parametrize("params", [*PARAMS, *WHOLE], ids=in_words)
def test_a_batch_gives_what_each_row_gives_alone(params, story):
    batch = story.generate(PROMPTS, max_tokens=10, seed=3, **params)
    alone = [story.generate(prompt, max_tokens=10, seed=3, **params) for prompt in PROMPTS]
    assert [(row.token_ids, row.text, row.logprobs) for row in batch] == [
        (row.token_ids, row.text, row.logprobs) for row in alone
    ]


@pytest.fixture(scope="module")
def pair():
    return [bitnet_ref.load("storyteller", backend="cython", threads=2, head=head) for head in ("exact", "screened")]


@pytest.mark.sample(3)
@needs_kernels
@pytest.mark.parametrize("params", PARAMS, ids=in_words)
def test_the_screened_head_gives_the_same_from_fewer_rows(pair, params):
    exact, screened = (m.generate(PROMPTS, max_tokens=12, seed=1, **params) for m in pair)
    for a, b in zip(exact, screened, strict=True):
        assert (a.token_ids, a.text, a.finish_reason, a.logprobs) == (b.token_ids, b.text, b.finish_reason, b.logprobs)
    stats = screened[0].stats
    if "bad_words" not in params and ("top_k" in params or "temperature" not in params):  # "a" bans much
        assert stats.screened_tokens == stats.generated_tokens
        assert stats.head_rows < exact[0].stats.head_rows / 4


@needs_kernels
@pytest.mark.parametrize("params", WHOLE, ids=in_words)
def test_rules_that_need_all_logits_get_them(pair, params):
    exact, screened = (m.generate("Alice", max_tokens=6, seed=1, **params) for m in pair)
    assert exact.token_ids == screened.token_ids
    assert screened.stats.screened_tokens == 0


@pytest.mark.parametrize("k", [1, 3])
def test_candidates_keep_the_k_largest_through_any_move(k):
    """What the moved ids lose, others gain: k + (moved) candidates are enough, and no fewer."""
    generator = rng(4, k)
    for _ in range(50):
        logits = generator.standard_normal(40).astype(np.float32)
        bias = {
            int(i): float(b) for i, b in zip(generator.choice(40, 4, False), generator.uniform(-9, 9, 4), strict=True)
        }
        rules = Rules.of(SamplingParams(logit_bias=bias), 1, [], [])
        moved = rules.moved(np.array([1]))
        ids = np.union1d(np.argsort(-logits)[: k + len(moved)], moved)
        values = rules.apply_among(np.array([1]), TokenLogits(HeadRows(ids, logits[ids]), 40, None))
        expected = rules.apply(np.array([1]), logits)
        best = np.argsort(-expected)[:k]
        assert ids[np.argsort(-values)[:k]].tolist() == best.tolist()
        np.testing.assert_array_equal(np.sort(values)[::-1][:k], expected[best])


def test_a_forbidden_token_is_never_drawn():
    logits = np.array([-np.inf, 0, 0, -np.inf], np.float32)
    params = SamplingParams(temperature=1.0)
    assert {choose(logits, params, u) for u in (0.0, 0.49, 0.51, 1 - 1e-16, np.nextafter(1, 0))} == {1, 2}
    for more in ({"top_k": 3}, {"top_p": 0.99}, {"min_p": 0.01}, {"typical_p": 0.9}):
        ids, p = distribution(logits, SamplingParams(temperature=1.0, **more))
        assert p[np.isin(ids, [0, 3])].sum() == 0


def test_end_tokens_wait_for_min_tokens(story):
    free = story.generate("Alice", max_tokens=12)
    end = free.token_ids[2]
    assert len(story.generate("Alice", max_tokens=12, stop_token_ids=[end]).token_ids) == 3
    late = story.generate("Alice", max_tokens=12, stop_token_ids=[end], min_tokens=6)
    assert end not in late.token_ids[:6]
    assert len(late.token_ids) >= 6
    stop = free.text[1:3]
    assert stop not in story.generate("Alice", max_tokens=12, stop=[stop]).text
    assert story.generate("Alice", max_tokens=12, stop=[stop], min_tokens=12).text == free.text


@pytest.mark.parametrize("policy", ["error", "truncate", "sliding"])
def test_a_text_without_max_tokens_has_room_for_min_tokens(story, policy):
    assert len(story.generate("Alice", min_tokens=70, overflow=policy).token_ids) == 70


def test_users_processors_and_strategies(story):
    seen = []

    def ban_e(ids, logits):
        seen.append(ids.tolist())
        out = logits.copy()
        out[262] = -np.inf
        return out

    out = story.generate("Once upon a time", max_tokens=8, processors=[ban_e])
    assert 262 not in out.token_ids
    assert seen == [out.prompt_token_ids + out.token_ids[:n] for n in range(8)]

    def second_best(ids, logits, rng):
        return np.argsort(-logits)[1]

    out = story.generate("Alice", max_tokens=5, strategy=second_best)
    ids = list(out.prompt_token_ids)
    for token in out.token_ids:
        assert token == np.argsort(-story.logits(ids)[-1])[1]
        ids.append(token)
    drawn = [
        story.generate("Alice", max_tokens=4, seed=s, strategy=lambda i, x, r: r.integers(5, 99)) for s in (1, 1, 2)
    ]
    assert drawn[0].token_ids == drawn[1].token_ids != drawn[2].token_ids


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"processors": [lambda ids, x: x[:5]]}, r"expected logits \(4096,\)"),
        ({"processors": [lambda ids, x: x * np.nan]}, "got NaN"),
        ({"processors": [lambda ids, x: np.full_like(x, -np.inf)]}, "-inf for every token"),
        ({"strategy": lambda ids, x, r: 4096}, "token id below 4096"),
        ({"strategy": lambda ids, x, r: "the"}, "got 'the'"),
        ({"logit_bias": {4096: 1}}, "token id 4096 is not in the vocabulary"),
    ],
)
def test_what_users_functions_get_wrong(wrong, message):
    with pytest.raises(GenerationError, match=message):
        model("storyteller").generate("Alice", max_tokens=2, **wrong)


def test_n_continuations_of_a_prompt_computed_once(story):
    params = {"max_tokens": 6, "temperature": 1.0, "seed": 4}
    outs = story.generate("Alice", n=3, **params)
    assert outs[0].token_ids == story.generate("Alice", **params).token_ids
    assert len({tuple(out.token_ids) for out in outs}) == 3
    assert outs[0].stats.prompt_tokens == len(outs[0].prompt_token_ids)
    both = story.generate(["The king", "Alice"], n=3, **params)
    assert [out.token_ids for out in both[1]] == [out.token_ids for out in outs]
    assert len({tuple(out.token_ids) for out in story.generate("Alice", n=2, max_tokens=6)}) == 1  # greedy
    with pytest.raises(GenerationError, match="a stream is one continuation"):
        story.stream("Alice", n=2)


def test_top_logprobs(story):
    out = story.generate("Alice", max_tokens=5, temperature=1.5, seed=2, logprobs=3)
    plain = story.generate("Alice", max_tokens=5, temperature=1.5, seed=2)
    assert (out.token_ids, out.logprobs, plain.top_logprobs) == (plain.token_ids, plain.logprobs, None)
    ids = list(out.prompt_token_ids)
    for token, logprob, top in zip(out.token_ids, out.logprobs, out.top_logprobs, strict=True):
        logits = story.logits(ids)[-1].astype(np.float64)
        expected = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        assert list(top)[:3] == np.argsort(-logits, kind="stable")[:3].tolist()
        assert set(top) == set(list(top)[:3]) | {token}
        assert top[token] == logprob
        assert list(top.values()) == pytest.approx(expected[list(top)].tolist())
        ids.append(token)
    assert [
        chunk.top_logprobs for chunk in story.stream("Alice", max_tokens=5, temperature=1.5, seed=2, logprobs=3)
    ] == (out.top_logprobs)
    chosen = story.generate("Alice", max_tokens=2, logprobs=0)
    assert chosen.top_logprobs == [{t: p} for t, p in zip(chosen.token_ids, chosen.logprobs, strict=True)]


def test_echo_is_the_whole_text(story):
    out = story.generate("The rabbit ran", max_tokens=8, echo=True)
    assert out.text == story.tokenizer.decode(out.prompt_token_ids + out.token_ids)
    assert out.text.startswith("The rabbit ran")
    assert "".join(chunk.text for chunk in story.stream("The rabbit ran", max_tokens=8, echo=True)) == out.text
    assert (
        story.generate("The rabbit ran", max_tokens=8, echo=True, stop="rabbit").text == out.text
    )  # its own text only
    assert out.token_ids == story.generate("The rabbit ran", max_tokens=8).token_ids
