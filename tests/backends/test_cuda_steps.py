"""Steps of the CuPy backend that are recorded: to the bit what eager ones compute. On a GPU, or emulated."""

from __future__ import annotations

import os

import numpy as np
import pytest
from cupy_runs import kernels_asked_for, load, top
from helpers import GOLDEN, model, rng

from bitnet_ref.backends import cuda
from bitnet_ref.backends.backend import GreedyRun, HeadNeed
from bitnet_ref.backends.cuda.backend import MAX_REPLAYED
from bitnet_ref.backends.cuda.emulation.device import EmulatedDevice
from bitnet_ref.backends.cuda.select import GreedyChoice, blocks_of, select
from bitnet_ref.backends.cuda.workspace import Workspace
from bitnet_ref.backends.paged_cache import CacheSpec
from bitnet_ref.errors import NumericsError
from bitnet_ref.reference.cache import TokenBatch

pytestmark = [
    pytest.mark.card,
    pytest.mark.skipif(cuda.why_unavailable() is not None, reason=str(cuda.why_unavailable())),
]


def decode(m, prompts, steps, cache=None):
    """Feed each prompt at once, then `steps` tokens one by one in one batch. -> all logits of every step"""
    cache = m.new_cache(len(prompts), 24) if cache is None else cache
    batch = TokenBatch.of([(slot, 0, p) for slot, p in enumerate(prompts)], range(len(prompts)))
    m.run(batch, cache, top(len(prompts)))
    seen = []
    for step in range(steps):
        parts = [(slot, len(p) + step, [(7 * step + slot) % 50 + 1]) for slot, p in enumerate(prompts)]
        seen.append(m.run(TokenBatch.of(parts, range(len(parts))), cache, top(len(parts))).all())
    return np.stack(seen), cache


@pytest.mark.parametrize("case", ["bitnet-packed-offline", "mistral-dense-window8", "llama-packed-rmsnorm"])
@pytest.mark.parametrize("lengths", [[4], [1, 6, 3]])
def test_replayed_steps_equal_eager_ones(case, lengths):
    """Over changing positions, lengths and (three padded to four) numbers of tokens."""
    prompts = [rng(n).integers(1, 50, n) for n in lengths]
    recorded, cache = decode(load(GOLDEN / case), prompts, 6)
    assert [size for size, *_ in cache.steps] == [1 << (len(lengths) - 1).bit_length()]
    eager, cache = decode(load(GOLDEN / case, graphs=False), prompts, 6)
    assert not cache.steps
    np.testing.assert_array_equal(recorded, eager)
    plain, _ = decode(model(GOLDEN / case, "numpy"), prompts, 6)
    np.testing.assert_allclose(recorded, plain, rtol=0, atol=1e-4)


def test_a_recorded_step_runs_no_python_of_the_model(monkeypatch):
    m = load()
    _, cache = decode(m, [np.array([3, 1, 4])], 2)
    device = m.backend.ws.device
    for op in ("embed", "rope", "attention", "attention_block", "feed_forward", "linears", "dense_matmul", "lm_head"):
        monkeypatch.setattr(type(m.backend), op, None)
    for name in ("empty", "kernel"):  # nor does it allocate arrays or launch single kernels
        monkeypatch.setattr(device, name, None)
    (replayed,) = m.run(TokenBatch.of([(0, 5, [9])], [0]), cache, top(1)).tokens
    monkeypatch.undo()
    eager = load(graphs=False)
    batch = TokenBatch.of([(0, 0, [3, 1, 4, 1, 8, 9])], [0])
    (expected,) = eager.run(batch, eager.new_cache(1, 8), top(1)).tokens
    np.testing.assert_array_equal(replayed.ids, expected.ids)
    np.testing.assert_array_equal(replayed.all(), expected.all())


def test_sequences_that_come_and_go_use_the_same_records():
    """Three, then two, then one of three: each token's logits are what they are alone."""
    m = load()
    prompts = [rng(n).integers(1, 50, n) for n in (3, 5, 2)]
    alone = {slot: decode(load(graphs=False), [p], 3)[0][:, 0] for slot, p in enumerate(prompts)}
    cache = m.new_cache(3, 24)
    m.run(TokenBatch.of([(s, 0, p) for s, p in enumerate(prompts)], [0]), cache, top(1))
    for step, slots in enumerate([[0, 1, 2], [0, 1, 2], [2, 0]]):
        # the tokens that `decode` feeds a prompt alone, which is slot 0 there
        parts = [(slot, len(prompts[slot]) + step, [7 * step % 50 + 1]) for slot in slots]
        logits = m.run(TokenBatch.of(parts, range(len(parts))), cache, top(len(parts))).all()
        for slot, row in zip(slots, logits, strict=True):
            np.testing.assert_array_equal(row, alone[slot][step])
    assert sorted(size for size, *_ in cache.steps) == [2, 4]


def test_a_new_cache_takes_over_what_a_dropped_one_left():
    """Arrays and records; what the old cache held is not seen. Other lengths of about the same size share them."""
    m = load()
    prompts = [rng(n).integers(1, 50, 5) for n in range(2)]
    _, cache = decode(m, prompts[:1], 3, m.new_cache(1, 24))
    keys, steps = cache.keys, cache.steps
    other = m.new_cache(1, 24)
    assert other.keys is not keys
    del cache, other
    second, cache = decode(m, prompts[1:], 3, m.new_cache(1, 200))
    assert cache.keys is keys
    assert cache.steps is steps
    assert len(steps) == 1
    np.testing.assert_array_equal(second, decode(load(graphs=False), prompts[1:], 3)[0])
    assert m.new_cache(2, 24).keys.shape != keys.shape


@pytest.mark.parametrize("case", ["bitnet-packed-offline", "llama-dense"])
@pytest.mark.parametrize("order", [0, pytest.param(7, marks=pytest.mark.slow)])
def test_steps_on_a_device_that_is_as_late_as_a_gpu_may_be(case, order):
    """Replayed steps of four tokens, one of them padding, and of one; in any order of threads."""
    for lengths in ([2, 6, 130], [5]):
        prompts, seen = [rng(n).integers(1, 50, n) for n in lengths], []
        for device in (EmulatedDevice(order=order, late=True), EmulatedDevice()):
            m = load(GOLDEN / case, device=device)
            seen.append(decode(m, prompts, 4, m.new_cache(len(prompts), 140))[0])
        np.testing.assert_array_equal(*seen)


@pytest.mark.parametrize("case", ["bitnet-packed-offline", "mistral-dense-window8"])
def test_recorded_steps_rotate_and_append_within_attention(case, monkeypatch):
    m = load(GOLDEN / case)
    layers, names = m.config.num_hidden_layers, kernels_asked_for(monkeypatch, m.backend.ws.device)
    decode(m, [rng(n).integers(1, 50, n) for n in (1, 6, 3)], 3)
    assert names.count("attention_append_scores_float32") == 2 * layers  # once eagerly, and once recorded


def test_two_tokens_of_a_sequence_are_appended_before_attention(monkeypatch):
    """In one record: the second would read the first one's key while it is written."""
    m = load()
    names = kernels_asked_for(monkeypatch, m.backend.ws.device)
    batch, cache = TokenBatch.of([(0, 0, [5, 6]), (1, 0, [7])]), m.new_cache(2, 24)
    logits = [m.run(batch, cache, top(3)).all() for _ in range(3)]
    assert cache.steps
    assert not any("append_scores" in name for name in names)
    np.testing.assert_array_equal(logits[0], logits[2])


@pytest.mark.parametrize("case", ["bitnet-packed-offline", "mistral-dense-window8"])
def test_a_recorded_step_writes_only_the_keys_of_its_own_tokens(case):
    """Of three sequences padded to four, in pages that lie anyhow."""
    m = load(GOLDEN / case)
    cache = m.backend.new_cache(m.config, CacheSpec(3, 24, page_size=4, pages=18))
    cache.page_table[:] = rng(0).permutation(18).reshape(3, 6)
    to_host = m.backend.ws.device.to_host
    for position in range(8):
        before = [to_host(pool) for pool in (cache.keys, cache.values)]
        batch = TokenBatch.of([(slot, position, [5 + slot]) for slot in range(3)], range(3))
        m.run(batch, cache, top(3))
        for old, pool in zip(before, (cache.keys, cache.values), strict=True):
            new = to_host(pool)
            for each in (old, new):
                each[:, cache.page_table[batch.slots, position // 4], position % 4] = 0
            np.testing.assert_array_equal(old.view(np.uint8), new.view(np.uint8))
    assert cache.steps


def test_what_grows_later_leaves_recorded_steps_their_arrays():
    """Tables of RoPE for a longer text, counters for a longer prompt. A graph keeps nothing alive."""
    m = load()
    prompts = [rng(1).integers(1, 50, 3)]
    expected, _ = decode(load(), prompts, 4)
    _, cache = decode(m, prompts, 2)
    far = m.backend.place(TokenBatch.of([(0, 5000, [1])]))
    m.backend.rope_tables(far.positions, m.config.rope, m.config.head_dim)
    m.backend.ws.counters("attention", 1 << 16)
    for step in (2, 3):
        batch = TokenBatch.of([(0, 3 + step, [7 * step % 50 + 1])], [0])
        np.testing.assert_array_equal(m.run(batch, cache, top(1)).all(), expected[step])


def test_what_happens_to_the_cache_between_is_seen():
    """The same token at the same place, but another text before it."""
    models = [load(), load(graphs=False)]
    caches = [m.new_cache(2, 40) for m in models]
    for step in range(8):
        seen = []
        for m, cache in zip(models, caches, strict=True):
            if step == 4:
                m.run(TokenBatch.of([(0, 0, [7, 8, 9])], [0]), cache, top(1))
            if step == 6:
                cache.copy([1], [0], 4)
            batch = TokenBatch.of([(slot, step, [4 + step + slot]) for slot in range(2)], range(2))
            seen.append(m.run(batch, cache, top(2)).all())
        np.testing.assert_array_equal(*seen)


def test_trouble_of_a_failed_step_does_not_reach_the_next():
    m = load()
    cache, device, trouble = m.new_cache(1, 40), m.backend.ws.device, m.backend.ws.trouble
    expected = [m.run(TokenBatch.of([(0, i, [5])], [0]), cache, top(1)).all() for i in range(3)][-1]
    device.fill(trouble, 1)
    with m.backend.running(), pytest.raises(NumericsError):
        m.backend.to_host(m.backend.hidden(m.weights, m.config, TokenBatch.of([(0, 2, [5])], [0]), cache))
    np.testing.assert_array_equal(m.run(TokenBatch.of([(0, 2, [5])], [0]), cache, top(1)).all(), expected)


def test_many_tokens_are_not_recorded():
    m = load()
    n = MAX_REPLAYED + 1
    cache = m.new_cache(n, 4)
    m.run(TokenBatch.of([(slot, 0, [5]) for slot in range(n)], range(n)), cache, top(n))
    assert not cache.steps


# -- the head of a recorded step ---------------------------------------------------------------------------------------


NEEDS = {
    "greedy": [HeadNeed(1)] * 3,
    "k": [HeadNeed(5), HeadNeed(1), HeadNeed(40)],
    "another k of the same record": [HeadNeed(7), HeadNeed(64), HeadNeed(2)],
    "ids beside": [HeadNeed(1, [3, 3, 500]), HeadNeed(1), HeadNeed(1, [0])],
    "other ids": [HeadNeed(1, [7]), HeadNeed(1, [1, 2, 300]), HeadNeed(1)],
    "both": [HeadNeed(9, np.arange(9)), HeadNeed(3), HeadNeed(1, [4])],
    "one needs all": [HeadNeed(1), HeadNeed(), HeadNeed(3)],
    "more than is selected": [HeadNeed(511), HeadNeed(512), HeadNeed(513)],
}


def test_a_recorded_head_gives_what_an_eager_one_does():
    """Greedy, k, ids beside, in turn and some again over the same step, whose last token is there twice."""
    models = [load(), load(graphs=False)]
    caches = [m.new_cache(3, 24) for m in models]
    rounds = [*NEEDS.items(), *list(NEEDS.items())[:4], *[("fewer tokens", [HeadNeed(1)] * 2)] * 2]
    for position, (title, needs) in enumerate(rounds):
        parts = [(slot, position, [5 * position + slot]) for slot in range(len(needs))]
        batch = TokenBatch.of(parts, range(len(parts)))
        results = [m.run(batch, cache, needs).tokens for m, cache in zip(models, caches, strict=True)]
        for mine, theirs in zip(*results, strict=True):
            np.testing.assert_array_equal(mine.ids, theirs.ids, err_msg=title)
            np.testing.assert_array_equal(mine.values, theirs.values, err_msg=title)
            np.testing.assert_array_equal(mine.all(), theirs.all(), err_msg=title)
    assert len(caches[0].steps) == 2  # of four tokens, and of two


def test_logits_of_a_record_are_the_callers_own():
    """The next step writes where they came from."""
    m = load()
    cache = m.new_cache(1, 8)
    results, copies = [], []
    for position in range(3):
        (token,) = m.run(TokenBatch.of([(0, position, [position + 4])], [0]), cache, top(1, 3)).tokens
        results += [token.ids, token.values, token.all()]
        copies += [token.ids.copy(), token.values.copy(), token.all().copy()]
    for mine, copy in zip(results, copies, strict=True):
        np.testing.assert_array_equal(mine, copy)


def test_only_a_steps_own_result_takes_its_record():
    """The head of other states, and of a step that is past, is computed."""
    m = load()
    be, w, cache = m.backend, m.weights, m.new_cache(1, 8)
    batches = [TokenBatch.of([(0, position, [position + 4])], [0]) for position in range(3)]
    with be.running():
        x = be.to_host(be.hidden(w, m.config, batches[0], cache))
        be.hidden(w, m.config, batches[1], cache)
        (rows,) = be.head_rows(be.from_host(x), w.lm_head, [HeadNeed(1)])
        expected = be.to_host(be.lm_head(be.from_host(x), w.lm_head))[0]
    assert rows.ids.tolist() == [expected.argmax()]
    assert rows.values.tolist() == [expected.max()]


@pytest.mark.parametrize(
    ("n", "vocab", "blocks"), [(1, 128256, 264), (4, 128256, 66), (8, 128256, 33), (9, 128256, 32), (128, 50000, 32)]
)
def test_few_tokens_share_a_card_in_larger_parts(n, vocab, blocks):
    assert blocks_of(n, vocab, 132) == blocks
    assert blocks_of(n, 700, 132) == 3  # of 256 threads, none of which has nothing to do


def test_the_choice_of_many_blocks():
    """The largest in any of them, equal ones in several, and some that are not finite."""
    be = load().backend
    logits = np.round(rng(1).standard_normal((3, 40_000)) * 8).astype(np.float32) / 4
    logits[0, 39_999] = 1e3
    logits[2] = -np.abs(logits[2]) - 1
    logits[2, [5, 30_000]] = -0.5
    for _ in range(2):
        selected = select(be.ws, be.ws.upload(logits), [HeadNeed(1)] * 3)
        for row, rows in zip(logits, selected, strict=True):
            np.testing.assert_array_equal(np.sort(rows.ids), np.flatnonzero(row == row.max()))
            assert (rows.values == row.max()).all()
    logits[1, 20_000] = np.inf
    with pytest.raises(NumericsError, match="lm_head: token 1"):
        select(be.ws, be.ws.upload(logits), [HeadNeed(1)] * 3)


# -- greedy steps in a row ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["bitnet-packed-offline", "mistral-dense-window8"])
@pytest.mark.parametrize("late", [False, True])
def test_greedy_steps_in_a_row_equal_single_ones(case, late):
    """Three sequences padded to four, one of which has fewer tokens left, over pages; a bell, ends, a missing page."""
    device = EmulatedDevice(late=late, order=5) if os.environ.get("BITNET_REF_CUDA") == "emulated" else None
    m, texts = load(GOLDEN / case, device=device), [rng(n).integers(1, 50, n).tolist() for n in (4, 2, 6)]
    expected = [list(text) for text in texts]
    mine, plain = m.new_cache(3, 24, page_size=4), m.new_cache(3, 24, page_size=4)

    def single(cache, texts, starts):
        parts = [(slot, start, text[start:]) for slot, (start, text) in enumerate(zip(starts, texts, strict=True))]
        logits = m.run(TokenBatch.of(parts, range(3)), cache, top(3)).all()
        for text, row in zip(texts, logits, strict=True):
            text.append(int(row.argmax()))
        return logits

    for both in range(2):
        single(mine, texts, [0] * 3 if both == 0 else [len(text) - 1 for text in texts])
        single(plain, expected, [0] * 3 if both == 0 else [len(text) - 1 for text in expected])

    def in_a_row(steps, left=(9, 9, 9), ends=(), bell=0):
        batch = TokenBatch.of([(slot, len(text) - 1, text[-1:]) for slot, text in enumerate(texts)], range(3))
        run = GreedyRun(steps, np.array(left), np.array(ends, dtype=np.int64), np.array([bell], dtype=np.uint8))
        return list(m.run_greedy(batch, mine, run))

    for options, count in (({}, 5), ({"bell": 1}, 1), ({"left": (9, 2, 9)}, 2)):
        taken = in_a_row(5, **options)
        assert len(taken) == count
        for step in taken:
            logits = single(plain, expected, [len(text) - 1 for text in expected])
            for text, row, each in zip(texts, logits, step, strict=True):
                np.testing.assert_array_equal(each.values, row[each.ids])
                np.testing.assert_array_equal(each.all(), row)
                text.append(int(each.ids[0]))
        assert texts == expected
    logits = single(plain, expected, [len(text) - 1 for text in expected])
    assert len(in_a_row(5, ends=[int(logits[1].argmax())])) == 1


def test_of_equal_logits_the_first_is_the_greedy_token_and_nan_ends_the_steps():
    device = EmulatedDevice() if os.environ.get("BITNET_REF_CUDA") == "emulated" else load().backend.ws.device
    ws = Workspace(device)
    logits = np.ones((2, 700), dtype=np.float32)
    logits[1, 600:650], logits[1, 3] = 2, -np.inf
    for bad in (False, True):
        logits[1, 3] = np.inf if bad else -1
        choice, sheet = GreedyChoice(ws, 2, 700, 3, 4), ws.zeros((3, 2), np.int64)
        choice.begin(np.array([1, 4]))
        choice.launch(ws.upload(logits), ws.zeros((2, 3), np.float32), sheet)
        ids, values, states = choice.read(1, 2)
        assert len(ids) == len(values) == len(states) == (0 if bad else 1)
        if not bad:
            assert (ids.tolist(), values.tolist()) == ([[0, 600]], [[1, 2]])
            assert device.to_host(sheet).tolist() == [[0, 600], [0, 1], [0, 0]]  # the first has no token left
