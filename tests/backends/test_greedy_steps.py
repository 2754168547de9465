"""Greedy steps in a row without Python between them: the tokens, logits and states of single steps, to the bit."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from helpers import GOLDEN, model, rng
from hypothesis import given, settings
from hypothesis import strategies as st

from bitnet_ref.backends.backend import Draws, GreedyRun
from bitnet_ref.backends.cpu.backend import CythonBackend
from bitnet_ref.backends.cpu.extension import _cpu, why_unavailable
from bitnet_ref.errors import NumericsError, ShapeError
from bitnet_ref.generation import SamplingParams
from bitnet_ref.generation.sampling import choose
from bitnet_ref.reference.cache import TokenBatch
from bitnet_ref.reference.weights import DenseWeight

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
CASES = ["bitnet-packed-offline", "mistral-dense-window8", "llama-packed-rmsnorm", "rope-dynamic", "onebitllm-silu"]
CASES += ["llama-bf16-biases", "llama-f16-sharded", "storyteller"]
CAPACITY = 40


def load(case="bitnet-packed-offline"):
    return model(case if case == "storyteller" else GOLDEN / case, "cython", threads=2)


def greedy_run(steps, left, ends=(), bell=0):
    return GreedyRun(
        steps, np.array(left, dtype=np.int64), np.array(ends, dtype=np.int64), np.array([bell], dtype=np.uint8)
    )


class Decoding:
    """Sequences with their cache, a token of each waiting to be computed."""

    def __init__(self, m, prompts, **pages):
        self.m, self.texts = m, [list(prompt) for prompt in prompts]
        self.cache = m.new_cache(len(prompts), CAPACITY, **pages)
        self.done = [0] * len(prompts)

    def batch(self):
        parts = [(slot, done, self.texts[slot][done:]) for slot, done in enumerate(self.done)]
        return TokenBatch.of(parts, range(len(parts)))

    def note(self, tokens):
        for slot, token in enumerate(tokens):
            self.done[slot] = len(self.texts[slot])
            self.texts[slot].append(int(token))

    def single(self, path=None):
        logits = self.m.run(self.batch(), self.cache, path=path).all()
        self.note(logits.argmax(axis=1))
        return logits

    def in_a_row(self, run):
        batch = self.batch()
        steps = list(self.m.run_greedy(batch, self.cache, run))
        for step in steps:
            self.note([each.ids[0] for each in step])
        return steps


def start(m, prompts, **pages):
    """Decoding with a recorded step: after three single ones."""
    decoding = Decoding(m, prompts, **pages)
    for _ in range(3):
        decoding.single()
    return decoding


def prompts_of(lengths, vocab=50):
    return [rng(n + 7 * i).integers(1, vocab, n).tolist() for i, n in enumerate(lengths)]


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("lengths", [[4], [2, 6, 3]])
def test_steps_in_a_row_equal_single_ones(case, lengths):
    m = load(case)
    mine, plain = start(m, prompts_of(lengths)), Decoding(m, prompts_of(lengths))
    for _ in range(3):
        plain.single("ops")
    for count in (4, 1, 7):
        steps = mine.in_a_row(greedy_run(count, [30] * len(lengths)))
        assert len(steps) == count
        for step in steps:
            logits = plain.single("ops")
            for row, each in zip(logits, step, strict=True):
                np.testing.assert_array_equal(each.values, row[each.ids])
                np.testing.assert_array_equal(each.all(), row)  # of its states
                assert (each.complete, each.computed, len(each.ids)) == (False, len(row), 1)
        assert mine.texts == plain.texts
    np.testing.assert_array_equal(mine.single(), plain.single("ops"))
    for a, b in zip(mine.cache.pools, plain.cache.pools, strict=True):
        for slot, done in enumerate(mine.done):
            np.testing.assert_array_equal(a[:, slot, :done], b[:, slot, :done])


def test_drawn_steps_in_a_row_equal_single_ones():
    """A greedy row among rows that draw, each by its own rule; an ended row's number is not looked at."""
    m, lengths = load("storyteller"), [4, 2, 6, 3]
    rules = [(0.0, 0, 1.0, 0.0), (0.8, 0, 1.0, 0.0), (1.0, 40, 0.9, 0.0), (0.7, 0, 1.0, 0.05)]
    params = [SamplingParams(temperature=t, top_k=k, top_p=p, min_p=q) for t, k, p, q in rules]
    mine, plain = start(m, prompts_of(lengths)), start(m, prompts_of(lengths))
    for count in (4, 1, 6):
        numbers = rng(count).random((count, 4))
        run = replace(greedy_run(count, [30] * 4), draws=Draws(np.array(rules), numbers))
        assert len(mine.in_a_row(run)) == count
        for row in numbers:
            logits = m.run(plain.batch(), plain.cache).all()
            plain.note([choose(*each) for each in zip(logits, params, row.tolist(), strict=True)])
        assert mine.texts == plain.texts
    assert mine.texts[1] != mine.texts[0]


@pytest.mark.thorough
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_steps_ends_and_pages(data):
    """Rows end by their tokens left or an end token; then they stand still until an eighth of the rows has ended."""
    m = load(data.draw(st.sampled_from(["bitnet-packed-offline", "mistral-dense-window8"])))
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=18))
    pages = data.draw(st.sampled_from([{}, {"page_size": 5}]))
    mine, plain = start(m, prompts_of(lengths), **pages), start(m, prompts_of(lengths))
    while min(CAPACITY - done for done in mine.done) > 8 and data.draw(st.booleans()):
        left = data.draw(st.lists(st.integers(1, 8), min_size=len(lengths), max_size=len(lengths)))
        ends = data.draw(st.lists(st.integers(0, m.config.vocab_size - 1), max_size=9))
        bell, most = data.draw(st.integers(0, 1)), data.draw(st.integers(1, 6))
        batch = mine.batch()
        steps = list(m.run_greedy(batch, mine.cache, greedy_run(most, left, ends, bell)))
        ended = np.zeros(len(lengths), dtype=bool)
        for index, step in enumerate(steps):
            before = [len(text) for text in plain.texts]
            tokens = plain.single().argmax(axis=1)
            for slot, each in enumerate(step):
                if ended[slot]:  # it stood still, so single steps must not go on either
                    del plain.texts[slot][before[slot] :]
                    plain.done[slot] = before[slot] - 1
                else:
                    assert each.ids[0] == tokens[slot]
                    ended[slot] = index + 1 >= left[slot] or tokens[slot] in ends
            is_last = 8 * ended.sum() >= len(ended) or bell or index + 1 == most
            assert is_last == (index + 1 == len(steps))
        mine.texts, mine.done = [list(text) for text in plain.texts], list(plain.done)
    np.testing.assert_array_equal(mine.single(), plain.single("ops"))


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_a_narrow_cache(dtype):
    m = load()
    m = type(m)(m.config, m.weights, m.backend, cache_dtype=dtype)
    mine, plain = (start(m, prompts_of([3, 5])) for _ in range(2))
    assert len(mine.in_a_row(greedy_run(6, [9, 9]))) == 6
    for _ in range(6):
        plain.single("ops")
    assert mine.texts == plain.texts


@pytest.mark.parametrize("scale", [1.0, 7.5])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, "bfloat16"])
def test_every_embedding(dtype, scale):
    """In each dtype, scaled or not; its own matrix or the head's."""
    import ml_dtypes

    plain = load()
    table = plain.weights.embedding.array.astype(np.float32).astype(
        ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    )
    weights = replace(plain.weights, embedding=DenseWeight(table))
    m = type(plain)(replace(plain.config, embedding_scale=scale), weights, plain.backend)
    mine, single = (start(m, prompts_of([3, 5])) for _ in range(2))
    assert len(mine.in_a_row(greedy_run(5, [9, 9]))) == 5
    for _ in range(5):
        single.single("ops")
    assert mine.texts == single.texts


def test_of_equal_logits_the_first_counts():
    plain = load()
    head = np.array(plain.weights.lm_head.array, dtype=np.float32)
    head[:] = head[5]
    m = type(plain)(plain.config, replace(plain.weights, lm_head=DenseWeight(head)), plain.backend)
    steps = start(m, [[1, 2, 3]]).in_a_row(greedy_run(3, [9]))
    assert [each.ids[0] for (each,) in steps] == [0, 0, 0]


# -- what is computed one by one ---------------------------------------------------------------------------------------


def test_the_first_step_of_a_kind_is_not_in_a_row():
    decoding = Decoding(load(), [[1, 2, 3], [4]])
    for computed in (0, 0, 2, 2):  # the prompts, and the first step of two tokens
        assert len(decoding.in_a_row(greedy_run(2, [9, 9]))) == computed
        decoding.single()


def test_other_backends_and_models():
    screened = model("storyteller").on(CythonBackend(head="screened"))
    for m in (model(GOLDEN / "bitnet-packed-offline", "numpy"), screened):
        decoding = start(m, [[1, 2, 3]])
        assert decoding.in_a_row(greedy_run(4, [9])) == []


def test_a_profile_sees_every_pass_by_itself():
    m = load()
    decoding = start(m, [[1, 2, 3]])
    watched = type(m)(m.config, m.weights, m.backend)
    watched.watcher = lambda be, *_: nullcontext(be)
    decoding.m = watched
    assert decoding.in_a_row(greedy_run(4, [9])) == []


# -- errors ------------------------------------------------------------------------------------------------------------


def test_nan_ends_the_steps_before_it_and_run_names_it():
    """The embedding of a token that the text comes to holds NaN: what stands before it is right."""
    plain = load("storyteller")
    prompt = plain.tokenizer.encode("Alice")
    good = start(plain, [prompt])
    for _ in range(17):
        good.single()
    text = good.texts[0][len(prompt) :]
    at = next(i for i in range(4, 20) if text[i] not in [*text[:i], *prompt])
    table = np.array(plain.weights.embedding.array, dtype=np.float32)
    table[text[at]] = np.nan
    head = plain.weights.lm_head
    m = type(plain)(plain.config, replace(plain.weights, embedding=DenseWeight(table), lm_head=head), plain.backend)
    mine = start(m, [prompt])
    steps = mine.in_a_row(greedy_run(20, [20]))
    assert len(steps) == at + 1 - 3
    assert mine.texts[0][len(prompt) :] == text[: at + 1]
    assert mine.in_a_row(greedy_run(8, [20])) == []
    with pytest.raises(NumericsError, match="hook_embed is the first tensor that holds NaN"):
        mine.single()


def test_a_page_that_is_missing_ends_the_steps_before_it():
    m = load()
    cache_pages = {"page_size": 4, "pages": 12}
    decoding = Decoding(m, [[1, 2, 3]], **cache_pages)
    decoding.cache.page_table[0, :2] = [7, 3]
    for _ in range(3):
        decoding.single()
    assert len(decoding.in_a_row(greedy_run(8, [20]))) == 3  # positions 5, 6, 7
    with pytest.raises(ShapeError, match="a page for position 8 of slot 0"):
        decoding.single()


def test_no_step_goes_beyond_the_cache():
    m = load()
    decoding = start(m, [[1] * 33])
    with pytest.raises(ShapeError, match=f"positions < {CAPACITY}"):
        decoding.in_a_row(greedy_run(8, [8]))
    assert len(decoding.in_a_row(greedy_run(8, [5]))) == 5  # the row needs no more
    assert decoding.done == [CAPACITY]


# -- the extension -----------------------------------------------------------------------------------------------------


def play_nothing(logits, rules=(), uniforms=()):
    """A step of tapes that do nothing, which chooses among these logits.   -> steps taken, tokens, values"""
    (n, V), D = logits.shape, 4
    states, tokens, values = np.empty((1, n, D), np.float32), np.empty((1, n), np.int64), np.empty((1, n), np.float32)
    x, rope, angles = np.empty((n, D), np.float32), np.empty((1, 2, n, 2), np.float32), np.empty((2, 9, 2), np.float32)
    taken = _cpu.greedy_steps(
        *(_cpu.Tape(), _cpu.Tape(), np.zeros((V, D), np.float32), 1.0, x, np.zeros(n, np.int64), rope, angles, angles),
        *(np.ones((n, D), np.float32), logits, np.ones(n, np.int64), np.empty(0, np.int64), np.zeros(1, np.uint8)),
        *(tokens, values, states, np.reshape(rules, (-1, 4)), np.reshape(uniforms, (-1, n)), 2, 0),
    )
    return taken, tokens, values


def test_a_draw_that_rounding_could_decide_ends_the_steps():
    logits, rules = np.zeros((2, 2), np.float32), np.array([[1.0, 0, 1.0, 0.0], [0.5, 0, 0.9, 0.1]])
    assert play_nothing(logits, rules, np.array([[0.5, 0.2]]))[0] == 0
    taken, tokens, _ = play_nothing(logits, rules, np.array([[0.4, 0.6]]))
    assert (taken, tokens.tolist()) == (1, [[0, 1]])
    for wrong in ([-1.0, 0, 1.0, 0.0], [1.0, -1, 1.0, 0.0], [1.0, 0, 0.0, 0.0], [1, 0, 1, np.nan], [np.nan, 0, 1, 0]):
        with pytest.raises(ValueError, match="top_p"):
            play_nothing(logits, np.array([wrong, wrong], dtype=np.float64), np.array([[0.4, 0.6]]))
    with pytest.raises(ValueError, match="uniform 1"):
        play_nothing(logits, rules, np.array([[0.4, 1.0]]))


@pytest.mark.thorough
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_largest_of_any_numbers(data):
    """NumPy's argmax, of a tape that does nothing."""
    n, V = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 70))
    generator = rng(data.draw(st.integers(0, 10**6)))
    logits = generator.choice([-1.0, -0.0, 0.0, 1.0, 3e38, 1e-40, -3e38], (n, V)).astype(np.float32)
    if bad := data.draw(st.sampled_from([0.0, 0.0, np.nan, np.inf, -np.inf])):
        logits[generator.integers(n), generator.integers(V)] = bad
    taken, tokens, values = play_nothing(logits)
    assert taken == (1 if np.isfinite(logits).all() else 0)
    if taken:
        np.testing.assert_array_equal(tokens[0], logits.argmax(axis=1))
        np.testing.assert_array_equal(values[0], logits.max(axis=1))
