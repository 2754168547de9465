"""Steps that are played from a tape: the bits of those that are computed op by op, and the same errors."""

from __future__ import annotations

import re
import threading
import weakref
from dataclasses import replace

import numpy as np
import pytest
from helpers import GOLDEN, model, rng
from hypothesis import given, settings
from hypothesis import strategies as st

from bitnet_ref.backends import HeadNeed
from bitnet_ref.backends.cpu import backend as cython
from bitnet_ref.backends.cpu.backend import CythonBackend, why_unavailable
from bitnet_ref.backends.cpu.recorded_step import STEPS_KEPT
from bitnet_ref.errors import NumericsError, ShapeError
from bitnet_ref.reference.cache import KVCache, TokenBatch
from bitnet_ref.reference.model import final_hidden
from bitnet_ref.reference.weights import DenseWeight

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
PLAYED = ["bitnet-packed-offline", "mistral-dense-window8", "llama-packed-rmsnorm", "rope-dynamic", "onebitllm-silu"]
PLAYED += ["llama-bf16-biases"]
NOT_PLAYED = ["llama-f16-sharded"]  # NumPy multiplies float16
CAPACITY = 24


def load(case="bitnet-packed-offline"):
    return model(case if case == "storyteller" else GOLDEN / case, "cython")


def step_of(m, batch, cache):
    """Final hidden states of a batch, by the backend's `run`."""
    return m.backend.run(final_hidden, m.weights, m.config, batch, cache)


def decode(m, cache, prompts, steps, compute=step_of):
    """Feed each prompt at once, then a token of each in one batch, several times. -> final hidden of every step"""
    for slot, prompt in enumerate(prompts):
        compute(m, TokenBatch.of([(slot, 0, prompt)]), cache)
    seen = []
    for step in range(steps):
        parts = [(slot, len(p) + step, [(7 * step + slot) % 50 + 1]) for slot, p in enumerate(prompts)]
        seen.append(compute(m, TokenBatch.of(parts, range(len(parts))), cache))
    return np.stack(seen)


def eagerly(m, batch, cache):
    return final_hidden(m.backend, m.weights, m.config, replace(batch, wanted=None), cache)


def played(cache, n):
    """Whether the cache has a step of n tokens that it plays."""
    step = cache.steps._kept.get(n)
    return step is not None and bool(step.can_be_played)


@pytest.mark.parametrize("case", PLAYED)
@pytest.mark.parametrize("lengths", [[4], [2, 6, 3]])
def test_played_steps_equal_eager_ones(case, lengths):
    m, prompts = load(case), [rng(n).integers(1, 50, n) for n in lengths]
    caches = [m.new_cache(len(prompts), CAPACITY) for _ in range(2)]
    by_tape = decode(m, caches[0], prompts, 8)
    assert played(caches[0], len(prompts))
    np.testing.assert_array_equal(by_tape, decode(m, caches[1], prompts, 8, eagerly))
    for mine, theirs in zip(caches[0]._pools, caches[1]._pools, strict=True):
        for slot, length in enumerate(lengths):
            np.testing.assert_array_equal(mine[:, slot, : length + 8], theirs[:, slot, : length + 8])


@pytest.mark.parametrize("case", NOT_PLAYED)
def test_what_kernels_do_not_compute_alone_is_not_played(case):
    m, prompts = load(case), [rng(3).integers(1, 50, 3)]
    cache = m.new_cache(1, CAPACITY)
    by_run = decode(m, cache, prompts, 5)
    assert not played(cache, 1)
    np.testing.assert_array_equal(by_run, decode(m, m.new_cache(1, CAPACITY), prompts, 5, eagerly))


@pytest.mark.parametrize("kind", ["float16", "int8"])
def test_a_narrow_cache(kind):
    m, prompts = load(), [rng(3).integers(1, 50, 3)]
    caches = [m.backend.new_cache(m.config, 1, CAPACITY, kind) for _ in range(2)]
    by_tape = decode(m, caches[0], prompts, 5)
    assert played(caches[0], 1)
    np.testing.assert_array_equal(by_tape, decode(m, caches[1], prompts, 5, eagerly))


@pytest.mark.parametrize("kind", ["float32", "float16", "int8"])
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_a_kernel_appends_is_what_numpy_appends(kind, data):
    """Any float, zeros, subnormal halves and ties among them; or the same error, and nothing is written."""
    config = load().config
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
    batch = TokenBatch.of([(0, 1, [0] * shape[0])])
    mine, theirs = load().backend.new_cache(config, 1, 8, kind), KVCache(config, 1, 8, kind)
    mine.fill_with_zeros(), theirs.fill_with_zeros()
    try:
        theirs.append(0, batch, k, v)
        mine.append(0, batch, k, v)
    except NumericsError as error:
        with pytest.raises(NumericsError, match=re.escape(str(error))):
            mine.append(0, batch, k, v)
    for a, b in zip(mine._pools, theirs._pools, strict=True):
        np.testing.assert_array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}"))


def test_pages_that_change_places():
    """The owner of a pool writes into its table between two steps; a tape reads the table, and misses a page aloud."""
    m, prompt = load(), rng(1).integers(1, 50, 4)
    cache = m.backend.new_cache(m.config, 1, CAPACITY, page_size=2, pages=20)
    cache.page_table[0, :3] = [5, 9, 2]
    expected = decode(m, m.new_cache(1, CAPACITY), [prompt], 7, eagerly)
    found = decode(m, cache, [prompt], 2)
    assert played(cache, 1)

    def next_step(i):
        return step_of(m, TokenBatch.of([(0, 4 + i, [7 * i % 50 + 1])]), cache)

    with pytest.raises(ShapeError, match="a page for position 6 of slot 0") as by_tape:
        next_step(2)
    with pytest.raises(ShapeError) as alone:
        eagerly(m, TokenBatch.of([(0, 6, [15])]), cache)
    assert str(by_tape.value) == str(alone.value)
    cache.copy_pages([9], [11])
    cache.page_table[0, :6] = [5, 11, 2, 19, 0, 7]
    np.testing.assert_array_equal([*found, *(next_step(i) for i in range(2, 7))], expected)


def test_a_place_beyond_the_cache():
    m = load()
    cache = m.new_cache(1, 8)
    decode(m, cache, [[1, 2, 3]], 4)
    assert played(cache, 1)
    for bad in (TokenBatch.of([(0, 8, [1])]), TokenBatch.of([(1, 7, [1])])):
        with pytest.raises(ShapeError, match="positions < 8 and slots < 1"):
            step_of(m, bad, cache)


def test_nan_is_the_error_that_it_is_without_a_tape():
    plain = load()
    table = np.array(plain.weights.embedding.array, dtype=np.float32)
    table[7] = np.nan
    m = type(plain)(plain.config, replace(plain.weights, embedding=DenseWeight(table)), plain.backend)
    cache = m.new_cache(1, CAPACITY)
    expected = decode(m, cache, [[1, 2, 3]], 5)
    assert played(cache, 1)
    for _ in range(2):
        with pytest.raises(NumericsError, match="hook_embed is the first tensor that holds NaN"):
            m.candidates(TokenBatch.of([(0, 8, [7])], [0]), cache, [HeadNeed(1)])
    assert played(cache, 1)
    np.testing.assert_array_equal(decode(m, cache, [[1, 2, 3]], 5), expected)


def test_another_model_or_backend_on_the_same_cache():
    """A tape is of one model, one backend and one function: others are computed."""
    m, other = load(), CythonBackend(simd="scalar")
    cache = m.new_cache(1, CAPACITY)
    decode(m, cache, [[1, 2, 3]], 5)
    assert played(cache, 1)
    norm = np.full_like(m.weights.final_norm, 2)
    changed = type(m)(m.config, replace(m.weights, final_norm=norm), m.backend)
    batch = TokenBatch.of([(0, 8, [9])])
    np.testing.assert_array_equal(step_of(changed, batch, cache), eagerly(changed, batch, cache))
    np.testing.assert_array_equal(
        other.run(final_hidden, m.weights, m.config, batch, cache),
        final_hidden(other, m.weights, m.config, batch, cache),
    )

    def doubled(be, *rest):
        x = final_hidden(be, *rest)
        return be.add(x, x)

    double = m.backend.run(doubled, m.weights, m.config, batch, cache)
    np.testing.assert_array_equal(double, 2 * step_of(m, batch, cache))


def test_weights_that_were_laid_out_for_one_call():
    """A model that was loaded for NumPy: each call packs its weights anew, and a tape keeps those that it has seen."""
    plain = model("storyteller", "numpy")
    m = type(plain)(plain.config, plain.weights, CythonBackend())
    prompt = rng(5).integers(1, 500, 5)
    cache = m.new_cache(1, 64)
    by_tape = decode(m, cache, [prompt], 6)
    assert played(cache, 1)
    np.testing.assert_array_equal(by_tape, decode(m, m.new_cache(1, 64), [prompt], 6, eagerly))


def test_threads_of_python_at_once():
    """Each with a cache of its own, on one backend."""
    m = load("storyteller")
    prompts = [rng(n).integers(1, 500, n) for n in (3, 9, 5)]
    expected = [decode(m, m.new_cache(1, 64), [prompt], 40, eagerly) for prompt in prompts]
    found = [None] * 3

    def work(i):
        found[i] = decode(m, m.new_cache(1, 64), [prompts[i]], 40)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_few_steps_are_kept_and_go_with_their_cache():
    m = load()
    slots = STEPS_KEPT + 2
    cache = m.new_cache(slots, CAPACITY)
    for n in range(1, slots + 1):
        for position in range(3):
            step_of(m, TokenBatch.of([(slot, position, [slot + 1]) for slot in range(n)]), cache)
    assert list(cache.steps._kept) == list(range(3, slots + 1))
    keys = weakref.ref(cache.keys)
    del cache
    assert keys() is None  # at once: nothing refers to itself


def test_the_results_of_a_step_are_the_callers(monkeypatch):
    m = load()
    cache = m.new_cache(1, CAPACITY)
    seen = [step_of(m, TokenBatch.of([(0, i, [i + 1])]), cache) for i in range(5)]
    copies = [x.copy() for x in seen]
    monkeypatch.setattr(cython, "MOST_RECORDED", 0)
    again = m.new_cache(1, CAPACITY)
    for i in range(5):
        np.testing.assert_array_equal(seen[i], copies[i])
        np.testing.assert_array_equal(seen[i], step_of(m, TokenBatch.of([(0, i, [i + 1])]), again))
    assert not again.steps._kept
