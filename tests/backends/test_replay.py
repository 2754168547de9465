"""Recorded passes: the bits of steps that are computed block by block and op by op, and the same errors."""

from __future__ import annotations

import math
import re
import signal
import threading
import weakref
from dataclasses import replace

import numpy as np
import pytest
from helpers import DATA, GOLDEN, GOLDEN_CASES, model, rng
from hypothesis import given, settings
from hypothesis import strategies as st

import bitnet_ref
from bitnet_ref.backends.backend import GreedyRun
from bitnet_ref.backends.cpu.backend import CythonBackend
from bitnet_ref.backends.cpu.extension import why_unavailable
from bitnet_ref.backends.cpu.memory import MAX_FREE_BYTES, Pool
from bitnet_ref.backends.cpu.replay import MAX_STEPS, MAX_TOKENS, KernelStep
from bitnet_ref.backends.paged_cache import CacheSpec, PagedKVCache
from bitnet_ref.errors import NumericsError, ShapeError
from bitnet_ref.reference.cache import TokenBatch
from bitnet_ref.reference.weights import DenseWeight

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
REPLAYED = ["bitnet-packed-offline", "mistral-dense-window8", "llama-packed-rmsnorm", "rope-dynamic", "onebitllm-silu"]
REPLAYED += ["llama-bf16-biases", "llama-f16-sharded"]
CAPACITY = 24


def load(case="bitnet-packed-offline"):
    return model(case if case == "storyteller" else GOLDEN / case, "cython")


def hidden(m, batch, cache, path=None):
    """Final hidden states of a batch, by a path of the backend."""
    return m.backend.hidden(m.weights, m.config, batch, cache, path)


def decode(m, cache, prompts, steps, path=None):
    """Feed each prompt at once, then one token of each in one batch, several times. -> final hidden of every step"""
    for slot, prompt in enumerate(prompts):
        hidden(m, TokenBatch.of([(slot, 0, prompt)]), cache, path)
    return np.stack([hidden(m, next_tokens(prompts, step), cache, path) for step in range(steps)])


def next_tokens(prompts, step):
    parts = [(slot, len(p) + step, [(7 * step + slot) % 50 + 1]) for slot, p in enumerate(prompts)]
    return TokenBatch.of(parts, range(len(parts)))


def recorded(cache, n):
    """The step of n tokens that this cache can play, or None."""
    step = cache.steps._steps.get(n)
    return None if step is None or step._result is None else step


def test_a_buffer_in_the_place_of_an_array_that_was_freed_makes_no_step_replayable():
    """NumPy's results, such as the mixed experts of a router's choice, are not what a tape computes again."""
    m, n = load(), 1 << 15
    taken = set()
    for _ in range(20):
        step = KernelStep(m.backend.kernels, m.weights, m.config, 1, pool := Pool(math.inf))

        def compute(be, pool=pool):
            elsewhere = np.ones((1, n), dtype=np.float32)
            y = be.kernels.add(elsewhere, elsewhere)
            address = elsewhere.ctypes.data
            del elsewhere
            result = be.kernels.add(y, y)
            taken.add(address in [buffer.ctypes.data for buffer in pool.buffers])
            return result

        assert step._record(m.backend, step._tape, compute) is None
    assert True in taken


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", REPLAYED)
@pytest.mark.parametrize("lengths", [[4], [2, 6, 3]])
def test_replayed_steps_equal_the_other_paths(case, lengths):
    m, prompts = load(case), [rng(n).integers(1, 50, n) for n in lengths]
    paths = [None, *m.backend.paths]
    caches = {path: m.new_cache(len(prompts), CAPACITY) for path in paths}
    outputs = {path: decode(m, cache, prompts, 8, path) for path, cache in caches.items()}
    assert all(recorded(caches[path], len(prompts)) for path in (None, "replayed"))
    assert not any(caches[path].steps._steps for path in ("ops", "blocks"))
    for path in paths:
        np.testing.assert_array_equal(outputs[path], outputs["ops"], err_msg=str(path))
        for mine, plain in zip(caches[path].pools, caches["ops"].pools, strict=True):
            for slot, length in enumerate(lengths):
                np.testing.assert_array_equal(mine[:, slot, : length + 8], plain[:, slot, : length + 8])


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_paths_give_equal_logits_through_run(case):
    m, tokens = load(case), rng(8).integers(1, 50, 9)
    rows = {}
    for path in m.backend.paths:
        cache = m.new_cache(1, CAPACITY)
        prompt = m.run(TokenBatch.of([(0, 0, tokens[:5])]), cache, path=path).all()
        steps = [m.run(TokenBatch.of([(0, i, [tokens[i]])], [0]), cache, path=path).all() for i in range(5, 9)]
        rows[path] = np.concatenate([prompt, *steps])
    for logits in rows.values():
        np.testing.assert_array_equal(logits, m.logits(tokens))


@pytest.mark.sample(9)
@pytest.mark.parametrize("layout", ["2-bit", "table", "1.6-bit"])
@pytest.mark.parametrize("tokens", [1, 16, 17])
def test_every_layout(layout, tokens):
    """Tables take 16 tokens per call; the parts of a larger batch are joined by NumPy, so it is not replayed."""
    m = model(GOLDEN / "bitnet-packed-offline").on(CythonBackend(threads=2, layout=layout, simd="scalar"))
    prompts = [rng(slot).integers(1, 50, 2 + slot % 3) for slot in range(tokens)]
    cache = m.new_cache(tokens, CAPACITY)
    outputs = decode(m, cache, prompts, 4)
    assert bool(recorded(cache, tokens)) == (layout != "table" or tokens <= 16)
    np.testing.assert_array_equal(outputs, decode(m, m.new_cache(tokens, CAPACITY), prompts, 4, "ops"))


@pytest.mark.parametrize("case", ["hunyuan", "maple", "mixtral-groups128", "olmo2", "qwen3-groups128", "smollm3"])
def test_families_whose_steps_are_replayed(case):
    """All of Maple's: RoPE turns a part of each head, and the router chooses experts, in kernels."""
    m = model(DATA / "families" / case, "cython")
    cache = m.new_cache(1, CAPACITY)
    outputs = decode(m, cache, [[1, 2, 3]], 3)
    assert recorded(cache, 1)
    np.testing.assert_array_equal(outputs, decode(m, m.new_cache(1, CAPACITY), [[1, 2, 3]], 3, "ops"))


def test_matrices_in_16_bits_by_the_rule_are_replayed():
    m = bitnet_ref.load(DATA / "gguf" / "f16.gguf", backend="cython", activations="blocks")
    caches = {path: m.new_cache(2, CAPACITY) for path in (None, "ops")}
    outputs = {path: decode(m, cache, [[1, 2, 3], [4]], 4, path) for path, cache in caches.items()}
    assert recorded(caches[None], 2)
    np.testing.assert_array_equal(outputs[None], outputs["ops"])
    run = GreedyRun(3, np.array([3, 3]), np.empty(0, dtype=np.int64), np.zeros(1, dtype=np.uint8))
    steps = list(m.run_greedy(next_tokens([[1, 2, 3], [4]], 4), caches[None], run))
    assert len(steps) == 3
    single = m.run(next_tokens([[1, 2, 3], [4]], 4), caches["ops"], path="ops").all()
    assert [int(each.ids[0]) for each in steps[0]] == single.argmax(axis=1).tolist()


def test_what_kernels_do_not_compute_alone_is_not_replayed():
    """A matrix whose rows are not contiguous is NumPy's."""
    m, prompts = load("llama-f16-sharded"), [rng(3).integers(1, 50, 3)]
    first, *others = m.weights.layers
    apart = DenseWeight(np.repeat(first.down_proj.array, 2, axis=1)[:, ::2])
    weights = replace(m.weights, layers=(replace(first, down_proj=apart), *others))
    m = bitnet_ref.Model(m.config, weights, m.backend, m.path)
    cache = m.new_cache(1, CAPACITY)
    outputs = decode(m, cache, prompts, 5)
    assert not cache.steps._steps
    np.testing.assert_array_equal(outputs, decode(m, m.new_cache(1, CAPACITY), prompts, 5, "ops"))


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_a_narrow_cache(dtype):
    m, prompts = load(), [rng(3).integers(1, 50, 3)]
    caches = [m.new_cache(1, CAPACITY, dtype=dtype) for _ in range(2)]
    outputs = decode(m, caches[0], prompts, 5)
    assert recorded(caches[0], 1)
    np.testing.assert_array_equal(outputs, decode(m, caches[1], prompts, 5, "ops"))


@pytest.mark.thorough
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_one_tape_for_any_places(data):
    """A tape of n tokens plays for any slots, positions and company: a piece of one prompt, or a token of each of n."""
    m = load(data.draw(st.sampled_from(["bitnet-packed-offline", "mistral-dense-window8"])))
    n, slots = data.draw(st.integers(1, 6)), 6
    replayed, plain = (m.new_cache(slots, 64, page_size=data.draw(st.sampled_from([None, 5]))) for _ in range(2))
    lengths, generator = [0] * slots, rng(data.draw(st.integers(0, 10**6)))
    for _ in range(data.draw(st.integers(2, 7))):
        counts = data.draw(st.sampled_from([[n], [1] * n, [1, n - 1] if n > 1 else [1]]))
        chosen = data.draw(st.permutations(range(slots)))[: len(counts)]
        parts = [
            (slot, lengths[slot], generator.integers(1, 50, count)) for slot, count in zip(chosen, counts, strict=True)
        ]
        for slot, count in zip(chosen, counts, strict=True):
            lengths[slot] += count
        batch = TokenBatch.of(parts)
        outputs = hidden(m, batch, replayed, "replayed")
        np.testing.assert_array_equal(outputs, hidden(m, batch, plain, "ops"))
    assert recorded(replayed, n)


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_a_kernel_appends_is_what_numpy_appends(dtype, data):
    """Any float, zeros, subnormal halves and ties among them; or the same error, and nothing is written."""
    config, be = load().config, load().backend
    shape = (data.draw(st.integers(1, 4)), config.num_key_value_heads, config.head_dim)
    generator = rng(data.draw(st.integers(0, 10**6)))
    k, v = (generator.standard_normal(shape) * 10.0 ** generator.integers(-12, 6, shape) for _ in range(2))
    ties = generator.random(shape) < 0.2
    k[ties] = np.float16(k[ties].clip(-6e4, 6e4)).astype(np.float32) * np.float32(1 + 2.0**-11)
    k, v = np.float32(k), np.float32(v)
    k[generator.random(shape) < 0.1] = data.draw(
        st.sampled_from([0.0, -0.0, 65519.9, 2.0**-25, 3 * 2.0**-25, 6e-8, -65504])
    )
    if data.draw(st.integers(0, 4)) == 0:
        v[-1, -1, 0] = data.draw(st.sampled_from([np.nan, -np.inf, 65520, 1e9]))
    batch, spec = TokenBatch.of([(0, 1, [0] * shape[0])]), CacheSpec(1, 8, dtype)
    mine, theirs = be.new_cache(config, spec), PagedKVCache(config, spec, np.dtype(dtype))
    mine.fill_with_zeros()
    theirs.fill_with_zeros()
    try:
        theirs.append(0, batch, k, v)
        be.append(mine, 0, batch, k, v)
    except NumericsError as error:
        with pytest.raises(NumericsError, match=re.escape(str(error))):
            be.append(mine, 0, batch, k, v)
    for a, b in zip(mine.pools, theirs.pools, strict=True):
        np.testing.assert_array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}"))


def test_pages_that_change_places():
    """The owner of a pool writes its table between two steps. A tape reads it; a missing page is an error."""
    m, prompt = load(), rng(1).integers(1, 50, 4)
    cache = m.new_cache(1, CAPACITY, page_size=2, pages=20)
    cache.page_table[0, :3] = [5, 9, 2]
    expected = decode(m, m.new_cache(1, CAPACITY), [prompt], 7, "ops")
    outputs = decode(m, cache, [prompt], 2)
    assert recorded(cache, 1)
    errors = []
    for path in (None, "replayed", "blocks", "ops"):
        with pytest.raises(ShapeError, match="a page for position 6 of slot 0") as caught:
            hidden(m, next_tokens([prompt], 2), cache, path)
        errors.append(str(caught.value))
    assert len(set(errors)) == 1
    cache.copy_pages([9], [11])
    cache.page_table[0, :6] = [5, 11, 2, 19, 0, 7]
    later = [hidden(m, next_tokens([prompt], i), cache) for i in range(2, 7)]
    np.testing.assert_array_equal([*outputs, *later], expected)


def test_a_place_beyond_the_cache():
    m = load()
    cache = m.new_cache(1, 8)
    decode(m, cache, [[1, 2, 3]], 4)
    assert recorded(cache, 1)
    for bad in (TokenBatch.of([(0, 8, [1])]), TokenBatch.of([(1, 7, [1])])):
        with pytest.raises(ShapeError, match="positions < 8 and slots < 1"):
            hidden(m, bad, cache)


# -- errors ------------------------------------------------------------------------------------------------------------


def test_nan_is_the_error_that_it_is_without_a_tape():
    plain = load()
    table = np.array(plain.weights.embedding.array, dtype=np.float32)
    table[7] = np.nan
    m = type(plain)(plain.config, replace(plain.weights, embedding=DenseWeight(table)), plain.backend)
    cache = m.new_cache(1, CAPACITY)
    expected = decode(m, cache, [[1, 2, 3]], 5)
    assert recorded(cache, 1)
    for top in (None, [(1, ())]):
        with pytest.raises(NumericsError, match="hook_embed is the first tensor that holds NaN"):
            m.run(TokenBatch.of([(0, 8, [7])], [0]), cache, top)
    assert recorded(cache, 1)
    np.testing.assert_array_equal(decode(m, cache, [[1, 2, 3]], 5), expected)


@pytest.mark.parametrize(("pool", "tensor"), [("keys", "hook_attn_scores"), ("values", "hook_z")])
def test_nan_in_the_middle_of_a_replayed_step_names_its_tensor(pool, tensor):
    """A bad number in the second layer's cache: the tape stops there, and the step is computed again op by op."""
    m = load()
    cache = m.new_cache(1, CAPACITY)
    decode(m, cache, [[1, 2, 3]], 4)
    step, array = recorded(cache, 1), getattr(cache, pool)
    good = array[1, 0, 2].copy()
    array[1, 0, 2] = np.nan
    for _ in range(2):
        with pytest.raises(NumericsError) as caught:
            m.run(next_tokens([[1, 2, 3]], 4), cache)
        assert caught.value.tensor == f"blocks.1.attn.{tensor}"
    array[1, 0, 2] = good
    outputs = hidden(m, next_tokens([[1, 2, 3]], 4), cache)
    assert recorded(cache, 1) is step
    np.testing.assert_array_equal(outputs, decode(m, m.new_cache(1, CAPACITY), [[1, 2, 3]], 5, "ops")[-1])


# -- what belongs to a tape --------------------------------------------------------------------------------------------


def test_a_tape_belongs_to_its_weights_and_kernels():
    m, other = load(), CythonBackend(simd="scalar")
    cache = m.new_cache(1, CAPACITY)
    decode(m, cache, [[1, 2, 3]], 5)
    first, batch = recorded(cache, 1), TokenBatch.of([(0, 8, [9])])
    norm = replace(m.weights.final_norm, weight=np.full_like(m.weights.final_norm.weight, 2))
    changed = type(m)(m.config, replace(m.weights, final_norm=norm), m.backend)
    np.testing.assert_array_equal(hidden(changed, batch, cache), hidden(changed, batch, cache, "ops"))
    second = recorded(cache, 1)
    assert second is not first
    assert second.weights is changed.weights
    scalar = type(m)(m.config, changed.weights, other)
    np.testing.assert_array_equal(hidden(scalar, batch, cache), hidden(scalar, batch, cache, "ops"))
    third = recorded(cache, 1)
    assert third is not second
    assert third.kernels is other.kernels
    np.testing.assert_array_equal(hidden(m, batch, cache), hidden(m, batch, cache, "ops"))
    assert recorded(cache, 1).weights is m.weights


def test_a_backend_that_composes_its_blocks_is_not_replayed():
    m = load()
    plain = type(m)(m.config, m.weights, m.backend.op_by_op())
    cache = m.new_cache(1, CAPACITY)
    decode(plain, cache, [[1, 2, 3]], 4)
    assert not cache.steps._steps


def test_weights_that_were_laid_out_for_one_call():
    """A model loaded for NumPy: each call packs its weights anew, and a tape keeps those that it was recorded with."""
    plain = model("storyteller", "numpy")
    m = type(plain)(plain.config, plain.weights, CythonBackend())
    prompt = rng(5).integers(1, 500, 5)
    cache = m.new_cache(1, 64)
    outputs = decode(m, cache, [prompt], 6)
    assert recorded(cache, 1)
    np.testing.assert_array_equal(outputs, decode(m, m.new_cache(1, 64), [prompt], 6, "ops"))


def test_threads_of_python_at_once():
    """Each with its own cache, on one backend."""
    m = load("storyteller")
    prompts = [rng(n).integers(1, 500, n) for n in (3, 9, 5)]
    expected = [decode(m, m.new_cache(1, 64), [prompt], 40, "ops") for prompt in prompts]
    outputs = [None] * 3

    def work(i):
        outputs[i] = decode(m, m.new_cache(1, 64), [prompts[i]], 40)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mine, plain in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(mine, plain)


def test_the_number_of_steps_is_bounded_and_they_go_with_their_cache():
    m = load()
    slots = MAX_STEPS + 2
    cache = m.new_cache(slots, CAPACITY)
    for n in range(1, slots + 1):
        for position in range(3):
            hidden(m, TokenBatch.of([(slot, position, [slot + 1]) for slot in range(n)]), cache)
    assert list(cache.steps._steps) == list(range(3, slots + 1))
    keys = weakref.ref(cache.keys)
    del cache
    assert keys() is None  # at once: nothing refers to itself


def test_larger_batches_are_played_once():
    m = load()
    cache = m.new_cache(1, MAX_TOKENS + 1)
    for n in (MAX_TOKENS, MAX_TOKENS + 1):
        batch = TokenBatch.of([(0, 0, rng(n).integers(1, 50, n))])
        np.testing.assert_array_equal(hidden(m, batch, cache, "replayed"), hidden(m, batch, cache, "ops"))
    assert list(cache.steps._steps) == [MAX_TOKENS]


# -- prompts, whose tapes are played once ------------------------------------------------------------------------------


@pytest.fixture
def records(monkeypatch):
    """(tokens, whether it can be played) of each pass that is recorded"""
    seen, record = [], KernelStep.record

    def watched(step, *args):
        can_play = record(step, *args)
        seen.append((len(step._x), can_play))
        return can_play

    monkeypatch.setattr(KernelStep, "record", watched)
    return seen


@pytest.mark.parametrize("case", ["bitnet-packed-offline", "mistral-dense-window8", "storyteller"])
@pytest.mark.parametrize("wanted", [[0], [1], [], [0, 2], [0, 1, 2]])
def test_prompts_of_which_some_tokens_are_wanted(case, wanted, records):
    m = load(case)
    batch = TokenBatch.of([(slot, 0, rng(slot).integers(1, 50, 3 + 2 * slot)) for slot in range(3)], wanted)
    caches = [m.new_cache(3, CAPACITY) for _ in range(2)]
    outputs = hidden(m, batch, caches[0])
    assert outputs.shape == (len(wanted), m.config.hidden_size)
    np.testing.assert_array_equal(outputs, hidden(m, batch, caches[1], "ops"))
    for slot, end in enumerate((3, 5, 7)):
        for mine, plain in zip(caches[0].pools, caches[1].pools, strict=True):
            np.testing.assert_array_equal(mine[:, slot, :end], plain[:, slot, :end])
    assert records == [(15, True)]
    assert not caches[0].steps._steps


@pytest.mark.parametrize("wanted", [np.array([-1], dtype=np.int32), np.arange(4) == 3, [3]])
def test_what_is_wanted_may_be_given_as_numpy_takes_it(wanted):
    m = load()
    batch = replace(TokenBatch.of([(0, 0, [1, 2, 3, 4])]), wanted=wanted)
    outputs = hidden(m, batch, m.new_cache(1, CAPACITY))
    np.testing.assert_array_equal(outputs, hidden(m, batch, m.new_cache(1, CAPACITY), "ops"))


@pytest.mark.parametrize("wanted", [None, [0]])
def test_a_pass_that_kernels_alone_do_not_compute_is_recorded_once(wanted, records):
    """What NumPy multiplies meanwhile are numbers that are not there yet: no warning and no error comes of them."""
    m, batch = load("llama-f16-sharded"), TokenBatch.of([(0, 0, rng(3).integers(1, 50, 5))], wanted)
    first, *others = m.weights.layers
    apart = DenseWeight(np.repeat(first.down_proj.array, 2, axis=1)[:, ::2])
    m = type(m)(m.config, replace(m.weights, layers=(replace(first, down_proj=apart), *others)), m.backend, m.path)
    for _ in range(3):
        cache = m.new_cache(1, CAPACITY)
        np.testing.assert_array_equal(hidden(m, batch, cache), hidden(m, batch, cache, "ops"))
    assert records == [(5, False)]


def test_nan_in_a_prompt_names_its_tensor():
    m = load()
    for pool, tensor in (("keys", "hook_attn_scores"), ("values", "hook_z")):
        cache = m.new_cache(1, CAPACITY)
        hidden(m, TokenBatch.of([(0, 0, [1, 2, 3])], [0]), cache)
        getattr(cache, pool)[1, 0, 2] = np.nan
        with pytest.raises(NumericsError) as caught:
            m.run(TokenBatch.of([(0, 3, [4, 5, 6])], [0]), cache)
        assert caught.value.tensor == f"blocks.1.attn.{tensor}"


def test_the_results_of_prompts_share_a_thread_s_buffers(monkeypatch):
    """They are not kept with the cache, and no more of them than without a tape."""
    m = load("storyteller")
    for n in (200, 250, 120):
        hidden(m, TokenBatch.of([(0, 0, rng(n).integers(1, 500, n))], [0]), m.new_cache(1, 256))
        sizes = [buffer.size for buffer in m.backend.kernels.pool.buffers]
        assert 0 < sum(sizes) < MAX_FREE_BYTES
    monkeypatch.setattr(m.backend.kernels.pool, "_max_free_bytes", 0)
    hidden(m, TokenBatch.of([(0, 0, [1, 2, 3])], [0]), m.new_cache(1, 256))
    assert m.backend.kernels.pool.buffers == []


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="a system without it")
def test_a_signal_is_answered_between_two_calls_of_a_prompt():
    m = load("storyteller")
    batch, main = TokenBatch.of([(0, 0, rng(0).integers(1, 500, 250))], [0]), threading.get_ident()

    class Answered(Exception):
        pass

    def answer(*_):
        if computing.is_set():
            raise Answered

    def send(cache):
        while computing.is_set() and np.isnan(cache.keys[0, 0, 249, 0, 0]):
            pass
        signal.pthread_kill(main, signal.SIGUSR1)

    def is_interrupted():
        """Whether the signal came in time for the last layer to stay as it was."""
        cache = m.new_cache(1, 256)
        cache.keys[:] = np.nan
        thread = threading.Thread(target=send, args=(cache,))
        computing.set()
        thread.start()
        try:
            hidden(m, batch, cache)
            computing.clear()
        except Answered:
            computing.clear()
            return bool(np.isnan(cache.keys[-1]).all())
        finally:
            thread.join()
        return False

    computing = threading.Event()
    before = signal.signal(signal.SIGUSR1, answer)
    try:
        assert any(is_interrupted() for _ in range(50))
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_results_of_a_step_are_the_callers():
    m = load()
    cache, plain = (m.new_cache(1, CAPACITY) for _ in range(2))
    outputs = [hidden(m, TokenBatch.of([(0, i, [i + 1])]), cache) for i in range(5)]
    copies = [x.copy() for x in outputs]
    for i in range(5):
        np.testing.assert_array_equal(outputs[i], copies[i])
        np.testing.assert_array_equal(outputs[i], hidden(m, TokenBatch.of([(0, i, [i + 1])]), plain, "ops"))
    assert not plain.steps._steps
