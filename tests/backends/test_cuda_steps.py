"""Steps of the CuPy backend that are recorded, and begun before they are asked for: to the bit what eager ones give. A
GPU, or emulated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cupy_runs import kernels_asked_for, load
from helpers import GOLDEN, model, rng

from bitnet_ref.backends import HeadNeed, cuda
from bitnet_ref.backends.cuda.attention import Attention
from bitnet_ref.backends.cuda.backend import MOST_REPLAYED
from bitnet_ref.backends.cuda.emulation.device import EmulatedDevice, EmulatedGraph
from bitnet_ref.backends.cuda.select import blocks_of, select
from bitnet_ref.errors import NumericsError
from bitnet_ref.reference.cache import TokenBatch
from bitnet_ref.reference.model import final_hidden
from bitnet_ref.reference.weights import DenseWeight

pytestmark = pytest.mark.skipif(cuda.why_unavailable() is not None, reason=str(cuda.why_unavailable()))


def decode(m, prompts, steps, cache=None):
    """Feed each prompt at once, then `steps` tokens one by one in one batch. -> final hidden states of every step"""
    cache = m.new_cache(len(prompts), 24) if cache is None else cache
    m.candidates(
        TokenBatch.of([(slot, 0, p) for slot, p in enumerate(prompts)], range(len(prompts))),
        cache,
        [HeadNeed(1)] * len(prompts),
    )
    seen = []
    for step in range(steps):
        parts = [(slot, len(p) + step, [(7 * step + slot) % 50 + 1]) for slot, p in enumerate(prompts)]
        hidden, _ = m.candidates(TokenBatch.of(parts, range(len(parts))), cache, [HeadNeed(1)] * len(parts))
        seen.append(hidden)
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
    for op in ("embed", "rope", "attention", "gated", "add", "linears", "dense_matmul", "lm_head"):
        monkeypatch.setattr(type(m.backend), op, None)
    for what in ("empty", "to_host", "kernel"):  # nor makes arrays, waits for them one by one, or launches by itself
        monkeypatch.setattr(device, what, None)
    hidden, (found,) = m.candidates(TokenBatch.of([(0, 5, [9])], [0]), cache, [HeadNeed(1)])
    monkeypatch.undo()
    assert np.isfinite(hidden).all()
    eager = load(graphs=False)
    again, (expected,) = eager.candidates(
        TokenBatch.of([(0, 0, [3, 1, 4, 1, 8, 9])], [0]), eager.new_cache(1, 8), [HeadNeed(1)]
    )
    np.testing.assert_array_equal(hidden, again)
    np.testing.assert_array_equal(found.ids, expected.ids)


def test_sequences_that_come_and_go_use_the_same_records():
    """Three, then two, then one of three: each token's state is what it is alone."""
    m = load()
    prompts = [rng(n).integers(1, 50, n) for n in (3, 5, 2)]
    alone = {slot: decode(load(graphs=False), [p], 3)[0][:, 0] for slot, p in enumerate(prompts)}
    cache = m.new_cache(3, 24)
    m.candidates(TokenBatch.of([(s, 0, p) for s, p in enumerate(prompts)], [0]), cache, [HeadNeed(1)])
    for step, slots in enumerate([[0, 1, 2], [0, 1, 2], [2, 0]]):
        # the tokens that `decode` feeds a prompt alone, which is slot 0 there
        parts = [(slot, len(prompts[slot]) + step, [7 * step % 50 + 1]) for slot in slots]
        hidden, _ = m.candidates(TokenBatch.of(parts, range(len(parts))), cache, [HeadNeed(1)] * len(parts))
        for slot, row in zip(slots, hidden, strict=True):
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
@pytest.mark.parametrize("order", [0, 1, 7])
def test_no_kernel_of_a_step_reads_before_it_waits_what_the_step_computes(case, order):
    """Where that is hidden from it: replayed steps of four tokens, one of them padding, and of one."""
    for lengths in ([2, 6, 130], [5]):
        prompts, seen = [rng(n).integers(1, 50, n) for n in lengths], []
        for device in (EmulatedDevice(order=order, late=True, hides=True), EmulatedDevice()):
            m = load(GOLDEN / case, device=device)
            seen.append(decode(m, prompts, 4, m.new_cache(len(prompts), 140))[0])
        np.testing.assert_array_equal(*seen)


def test_steps_begun_ahead_read_nothing_too_early_either():
    device = EmulatedDevice(late=True, hides=True)
    assert steps_beside_eager_ones(3, 8, device=device) == [False] * 3 + [True] * 5


DECODES_BY_KERNELS_OF_ITS_OWN = ["attention_scores_decode_float32", "attention_values_decode_float32"]


@pytest.mark.parametrize("case", ["bitnet-packed-offline", "mistral-dense-window8"])
@pytest.mark.parametrize("lengths", [[4], [1, 6, 3]])
def test_recorded_steps_take_the_decode_kernels_which_change_no_bit(case, lengths, monkeypatch):
    prompts, found = [rng(n).integers(1, 50, n) for n in lengths], []
    for decode_kernels in (True, False):
        m = load(GOLDEN / case)
        layers, names = m.config.num_hidden_layers, kernels_asked_for(monkeypatch, m.backend.ws.device)
        monkeypatch.setattr(m.backend, "_attention", Attention(m.backend.ws, decode_kernels))
        found.append(decode(m, prompts, 6)[0])
        decoded = [name for name in names if "_decode_" in name]
        assert decoded == (DECODES_BY_KERNELS_OF_ITS_OWN * layers * 2 if decode_kernels else [])  # once, and a record
    np.testing.assert_array_equal(*found)


def test_two_tokens_of_a_sequence_do_not_take_the_decode_kernels(monkeypatch):
    """In one record: the second would ask for the first one's key before it is written."""
    m = load()
    names = kernels_asked_for(monkeypatch, m.backend.ws.device)
    tokens, cache = TokenBatch.of([(0, 0, [5, 6]), (1, 0, [7])]), m.new_cache(2, 24)
    hidden = [m.candidates(tokens, cache, [HeadNeed(1)] * 3)[0] for _ in range(3)]
    assert cache.steps
    assert not any("_decode_" in name for name in names)
    np.testing.assert_array_equal(hidden[0], hidden[2])


@pytest.mark.parametrize("case", ["bitnet-packed-offline", "mistral-dense-window8"])
def test_a_recorded_step_writes_nothing_that_its_kernels_read_before_they_wait(case, monkeypatch):
    """attention_decode.cu: positions, slots, the page table, and keys and values but for those of the step's tokens.

    Of three sequences padded to four, in pages, some steps begun ahead. What does write them comes before the step:
    copies, and `advance`, which is launched so that it overlaps nothing and the graph waits for it."""
    m = load(GOLDEN / case)
    device, kernel, overlapped = m.backend.ws.device, m.backend.ws.device.kernel, []
    cache = m.backend.new_cache(m.config, 3, 24, page_size=4, pages=18)
    cache.page_table[:] = rng(0).permutation(18).reshape(3, 6)
    ahead, launches = [], 0

    def kept(step):
        return [device.to_host(array) for array in (step._sheet[1:], cache.table, cache.keys, cache.values)]

    class Watched:
        def __init__(self, step):
            self.step, self.graph = step, step._graph

        def launch(self):
            nonlocal launches
            before = kept(self.step)
            self.graph.launch()
            after = kept(self.step)
            positions, slots = before[0]
            mine = cache.page_table[slots, positions // 4], positions % 4
            for pools in (before, after):
                for pool in pools[2:]:
                    pool[:, *mine] = 0
            for old, new in zip(before, after, strict=True):
                np.testing.assert_array_equal(old.view(np.uint8), new.view(np.uint8))
            launches += 1

    def asked(file, name):
        overlapped.append((name, device.overlaps))
        return kernel(file, name)

    monkeypatch.setattr(device, "kernel", asked)
    tokens = [5, 6, 7]
    for position in range(12):
        batch = TokenBatch.of([(slot, position, [token]) for slot, token in enumerate(tokens)], range(3))
        _, found = m.candidates(batch, cache, [HeadNeed(1)] * 3)
        tokens = [int(each.ids[each.logits.argmax()]) for each in found]
        ahead.append(m.backend._ahead is not None)
        for step in cache.steps.values():
            if not isinstance(step._graph, Watched):
                step._graph = Watched(step)
    assert launches >= 11
    assert sum(ahead) >= 8
    assert [each for each in overlapped if each[0] == "advance"] == [("advance", False)] * sum(ahead)
    assert ("attention_values_decode_float32", True) in overlapped


def test_what_grows_later_leaves_recorded_steps_their_arrays():
    """Tables of RoPE for a longer text, counters for a longer prompt. A graph keeps nothing alive."""
    m = load()
    prompts = [rng(1).integers(1, 50, 3)]
    expected, _ = decode(load(), prompts, 4)
    _, cache = decode(m, prompts, 2)
    far = m.backend.place(TokenBatch.of([(0, 5000, [1])]))
    m.backend.rope_tables(far.positions, m.config.rope, m.config.head_dim)
    m.backend._attention._counters(1 << 16)
    for step in (2, 3):
        batch = TokenBatch.of([(0, 3 + step, [7 * step % 50 + 1])], [0])
        hidden, _ = m.candidates(batch, cache, [HeadNeed(1)])
        np.testing.assert_array_equal(hidden, expected[step])


def steps_beside_eager_ones(sequences, steps, between=lambda m, cache, step: None, forced=None, device=None):
    """Greedy steps of some sequences on a recording model and an eager one, which must agree to the bit.
    forced: {step: token of all}, in place of the greedy ones.   -> whether the device went ahead after each step"""
    models = [load(device=device), load(graphs=False)]
    caches = [m.new_cache(sequences, 40) for m in models]
    prompts = [rng(n).integers(1, 50, 2 + n) for n in range(sequences)]
    needs, ahead = [HeadNeed(1)] * sequences, []
    batch = TokenBatch.of([(slot, 0, p) for slot, p in enumerate(prompts)], range(sequences))
    for step in range(steps):
        (hidden, found), (expected, other) = (
            m.candidates(batch, cache, needs) for m, cache in zip(models, caches, strict=True)
        )
        np.testing.assert_array_equal(hidden, expected)
        tokens = [int(f.ids[f.logits.argmax()]) for f in found]
        assert tokens == [int(f.ids[f.logits.argmax()]) for f in other]
        ahead.append(models[0].backend._ahead is not None)
        for m, cache in zip(models, caches, strict=True):
            between(m, cache, step)
        tokens = [(forced or {}).get(step, token) for token in tokens]
        parts = [(slot, len(p) + step, [token]) for slot, (p, token) in enumerate(zip(prompts, tokens, strict=True))]
        batch = TokenBatch.of(parts, range(sequences))
    return ahead


@pytest.mark.parametrize("sequences", [1, 3])
def test_the_device_goes_ahead_where_it_guesses_right(sequences):
    assert steps_beside_eager_ones(sequences, 8) == [False] * 3 + [True] * 5


def test_a_wrong_guess_is_not_seen():
    """Another token than the likeliest: what was computed for that one is dropped, and guessing begins anew."""
    assert steps_beside_eager_ones(2, 12, forced={5: 3}) == [False] * 3 + [True] * 3 + [False] * 2 + [True] * 4


def test_all_logits_of_a_step_that_the_device_has_left(monkeypatch):
    """More equals than there is room for, when the logits may be those of the next step already: computed again."""
    monkeypatch.setattr("bitnet_ref.backends.cuda.select.SPARE", 0)
    models = [load(), load(graphs=False)]
    for m in models:
        vocab, width = m.weights.lm_head.shape
        few = rng(3).standard_normal((5, width)).astype(np.float32)
        few_rows = DenseWeight(np.tile(few, (vocab // 5 + 1, 1))[:vocab])  # so that each is the largest ten times
        m.weights = replace(m.weights, lm_head=m.backend.prepare(few_rows))
    caches, tokens = [m.new_cache(2, 40) for m in models], [5, 9]
    for position in range(10):
        batch = TokenBatch.of([(slot, position, [token]) for slot, token in enumerate(tokens)], range(2))
        results = [m.candidates(batch, cache, [HeadNeed(1)] * 2)[1] for m, cache in zip(models, caches, strict=True)]
        for mine, theirs in zip(*results, strict=True):
            assert mine.complete
            np.testing.assert_array_equal(mine.logits, theirs.logits)
        tokens = [int(found.logits.argmax()) for found in results[0]]
    assert models[0].backend._ahead is not None


def test_what_was_begun_is_not_done_again(monkeypatch):
    """A step and its head, which the device has begun, are launched once."""
    launches = []
    launch = EmulatedGraph.launch
    monkeypatch.setattr(EmulatedGraph, "launch", lambda self: (launches.append(self), launch(self)))
    m = load(device=EmulatedDevice(late=True))
    cache, token, counts = m.new_cache(1, 40), 5, []
    for position in range(10):
        before = len(launches)
        _, (found,) = m.candidates(TokenBatch.of([(0, position, [token])], [0]), cache, [HeadNeed(1)])
        token = int(found.ids[0])
        counts.append(len(launches) - before)
    assert counts == [0, 2, 4, *[2] * 7]  # recorded; asked for; that and the next; the next


def test_what_happens_to_the_cache_between_is_seen():
    """The same token at the same place, but another text before it: what was begun over the old one is of no use."""

    def between(m, cache, step):
        if step == 4:
            m.candidates(TokenBatch.of([(0, 0, [7, 8, 9])], [0]), cache, [HeadNeed(1)])
        if step == 8:
            cache.copy([1], [0], 4)

    ahead = steps_beside_eager_ones(2, 14, between)
    assert ahead == [False] * 3 + [True] * 2 + [False] * 2 + [True] * 2 + [False] * 2 + [True] * 3


def test_trouble_of_a_step_that_nobody_asked_for():
    """It is told to whoever asks for that step, and to nobody else."""
    m = load()
    cache, device, trouble = m.new_cache(1, 40), m.backend.ws.device, m.backend.ws.trouble

    def step(position, token):
        _, (found,) = m.candidates(TokenBatch.of([(0, position, [token])], [0]), cache, [HeadNeed(1)])
        return int(found.ids[0])

    token = step(0, 5)
    for position in range(1, 5):
        token = step(position, token)
    assert m.backend._ahead is not None
    device.fill(trouble, 1)
    token = step(5, (token + 1) % 50)  # not what was begun
    for position in range(6, 9):
        token = step(position, token)
    assert m.backend._ahead is not None
    device.fill(trouble, 1)
    token = step(9, token)  # what it met had been read before
    with pytest.raises(NumericsError):
        step(10, token)
    assert step(10, token) >= 0


def test_nothing_is_begun_where_there_is_no_place():
    """At the end of a cache, and at the end of the pages that a sequence has."""
    m = load()
    page = 8
    cache = m.backend.new_cache(m.config, 1, 3 * page, page_size=page, pages=3)
    cache.page_table[0, :2] = [2, 0]
    token = 5
    for position in range(2 * page):
        _, (found,) = m.candidates(TokenBatch.of([(0, position, [token])], [0]), cache, [HeadNeed(1)])
        token = int(found.ids[0])
        assert (m.backend._ahead is not None) == (2 <= position < 2 * page - 1)
    cache.page_table[0, 2] = 1
    m.candidates(TokenBatch.of([(0, 2 * page, [token])], [0]), cache, [HeadNeed(1)])


def test_many_tokens_are_not_recorded():
    m = load()
    n = MOST_REPLAYED + 1
    cache = m.new_cache(n, 4)
    m.candidates(TokenBatch.of([(slot, 0, [5]) for slot in range(n)], range(n)), cache, [HeadNeed(1)] * n)
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
    for position, (what, needs) in enumerate(rounds):
        parts = [(slot, position, [5 * position + slot]) for slot in range(len(needs))]
        batch = TokenBatch.of(parts, range(len(parts)))
        (hidden, found), (eager_hidden, eager) = (
            m.candidates(batch, cache, needs) for m, cache in zip(models, caches, strict=True)
        )
        np.testing.assert_array_equal(hidden, eager_hidden, err_msg=what)
        for mine, theirs in zip(found, eager, strict=True):
            np.testing.assert_array_equal(mine.ids, theirs.ids, err_msg=what)
            np.testing.assert_array_equal(mine.logits, theirs.logits, err_msg=what)
    assert len(caches[0].steps) == 2  # of four tokens, and of two


def test_candidates_of_a_record_are_the_callers_own():
    """The next step writes where they came from."""
    m = load()
    cache = m.new_cache(1, 8)
    kept, copies = [], []
    for position in range(3):
        hidden, (found,) = m.candidates(TokenBatch.of([(0, position, [position + 4])], [0]), cache, [HeadNeed(3)])
        kept += [hidden, found.ids, found.logits]
        copies += [hidden.copy(), found.ids.copy(), found.logits.copy()]
    for mine, copy in zip(kept, copies, strict=True):
        np.testing.assert_array_equal(mine, copy)


def test_only_a_steps_own_result_takes_its_record():
    """The head of other states, and of a step that is past, is computed."""
    m = load()
    be, w, cache = m.backend, m.weights, m.new_cache(1, 8)
    tokens = [TokenBatch.of([(0, position, [position + 4])], [0]) for position in range(3)]
    with be.running():
        x = be.to_host(be.run(final_hidden, w, m.config, tokens[0], cache))
        be.run(final_hidden, w, m.config, tokens[1], cache)
        (found,) = be.head_candidates(x, w.lm_head, [HeadNeed(1)])
    expected = be.to_host(be.lm_head(x, w.lm_head))[0]
    assert found.ids.tolist() == [expected.argmax()]
    assert found.logits.tolist() == [expected.max()]


def test_nothing_but_kernels_lies_between_a_head_and_its_choice(monkeypatch):
    """All of which overlap: a fill or a copy would wait for the one before it to end, and the next for it."""
    m = load()
    device, overlapped = m.backend.ws.device, []
    for what in ("fill", "copy"):
        done = getattr(device, what)
        monkeypatch.setattr(device, what, lambda *args, done=done: (overlapped.append(device.overlaps), done(*args))[1])
    decode(m, [np.array([3, 1, 4])], 2)
    assert overlapped
    assert not any(overlapped)


@pytest.mark.parametrize(
    ("n", "vocab", "blocks"), [(1, 128256, 264), (4, 128256, 66), (8, 128256, 33), (9, 128256, 32), (128, 50000, 32)]
)
def test_few_tokens_share_a_card_in_larger_parts(n, vocab, blocks):
    assert blocks_of(n, vocab, 132) == blocks
    assert blocks_of(n, 700, 132) == 3  # of 256 threads, none of which has nothing to do


def test_the_choice_of_many_blocks(monkeypatch):
    """The largest in any of them, equal ones in several, and some that are not finite."""
    be = load().backend
    logits = np.round(rng(1).standard_normal((3, 40_000)) * 8).astype(np.float32) / 4
    logits[0, 39_999] = 1e3
    logits[2] = -np.abs(logits[2]) - 1
    logits[2, [5, 30_000]] = -0.5
    for _ in range(2):
        selected = select(be.ws, be.ws.upload(logits), [HeadNeed(1)] * 3)
        for row, found in zip(logits, selected, strict=True):
            np.testing.assert_array_equal(np.sort(found.ids), np.flatnonzero(row == row.max()))
            assert (found.logits == row.max()).all()
    logits[1, 20_000] = np.inf
    with pytest.raises(NumericsError, match="lm_head: token 1"):
        select(be.ws, be.ws.upload(logits), [HeadNeed(1)] * 3)
