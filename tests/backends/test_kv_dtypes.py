"""bitnet_ref.backends.paged_cache: what float16 and int8 keep of keys and values, on every backend the same."""

from dataclasses import replace

import numpy as np
import pytest
from helpers import GOLDEN, call, model, rng
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import bitnet_ref
from bitnet_ref.backends import Backend
from bitnet_ref.backends.paged_cache import CACHE_DTYPES, CacheSpec, PagedKVCache, narrow, quantize_rows, widen
from bitnet_ref.errors import NumericsError, ShapeError
from bitnet_ref.reference.cache import TokenBatch

CONFIG = model(GOLDEN / "llama-dense").config  # 2 layers, 4 heads on 2 of 32
ROWS = hnp.arrays(np.float32, (3, 2, 8), elements=st.floats(-1e4, 1e4, width=32))
NARROW = ("float16", "int8")


@given(x=ROWS)
def test_int8_is_off_by_half_a_step_at_most(x):
    x_q, scale = quantize_rows(x)
    assert x_q.dtype == np.int8
    assert scale.dtype == np.float32
    assert x_q.min() >= -127  # symmetric
    step = np.abs(x).max(axis=-1, keepdims=True).astype(np.float64) / 127
    assert (np.abs(widen(x_q, scale) - x.astype(np.float64)) <= step * 0.50001 + 1e-30).all()


@given(x=ROWS)
def test_float16_is_the_nearest_half(x):
    half, scales = narrow(x, np.dtype(np.float16))
    assert scales is None
    back = widen(half, None)
    assert back.dtype == np.float32
    np.testing.assert_array_equal(back, x.astype(np.float16).astype(np.float32))


@given(x=ROWS)
def test_what_was_widened_is_kept_as_it_is(x):
    """A token that moves from one narrow cache to another loses nothing more."""
    for dtype in map(np.dtype, NARROW):
        once = widen(*narrow(x, dtype))
        np.testing.assert_allclose(widen(*narrow(once, dtype)), once, rtol=1e-6)


def test_wide_dtypes_are_kept_as_they_are():
    x = rng(1).standard_normal((3, 2, 8))
    for dtype in (np.float32, np.float64):
        assert narrow(x, np.dtype(dtype))[0] is x


@pytest.mark.parametrize(("dtype", "value"), [("float16", 65520.0), ("float16", np.inf), ("int8", np.nan)])
def test_what_cannot_be_kept_is_an_error(dtype, value):
    cache = PagedKVCache(CONFIG, CacheSpec(1, 4, dtype), np.dtype(dtype))
    k = np.ones((1, 2, 32), np.float32)
    k[0, 1, 7] = value
    with pytest.raises(NumericsError, match=r"KVCache\.append: "):
        cache.append(0, TokenBatch.of([(0, 0, [1])]), k, k)


def test_bytes():
    sizes = {dtype: Backend(threads=1).new_cache(CONFIG, CacheSpec(2, 10, dtype)) for dtype in CACHE_DTYPES}
    numbers = 2 * 2 * 2 * 32  # keys and values of 2 layers, 2 kv heads
    assert {dtype: cache.bytes_per_token for dtype, cache in sizes.items()} == {
        "float32": numbers * 4,
        "float16": numbers * 2,
        "int8": numbers + 2 * 2 * 2 * 4,  # and a scale of each head
    }
    assert all(cache.nbytes == 20 * cache.bytes_per_token for cache in sizes.values())


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("page_size", [None, 3])
def test_a_narrow_cache_computes_with_the_floats_it_stands_for(be, dtype, page_size):
    """The bits of attention are those of a float32 cache that holds what the narrow one is widened to."""
    generator = rng(2)
    config = replace(CONFIG, num_attention_heads=6, head_dim=40)  # groups of 3; no whole number of vectors
    batch = TokenBatch.of([(0, 0, [0] * 37), (1, 0, [0] * 5)])
    k, v = (generator.standard_normal((42, 2, 40)).astype(np.float32) * 3 for _ in range(2))
    q = generator.standard_normal((42, 6, 40)).astype(np.float32)
    narrow_cache = be.new_cache(config, CacheSpec(2, 40, dtype, page_size))
    assert narrow_cache.dtype == dtype
    call(be, "append", narrow_cache, 1, batch, k, v)
    stored = narrow_cache.stored(1, batch)
    floats = be.new_cache(config, CacheSpec(2, 40, "float32"))
    call(be, "append", floats, 1, batch, *stored)
    for window in (None, 4):
        np.testing.assert_array_equal(
            call(be, "attention", q, narrow_cache, batch, 1, window), call(be, "attention", q, floats, batch, 1, window)
        )
    assert np.abs(stored[0] - k).max() > 0


@pytest.mark.parametrize("dtype", NARROW)
def test_a_narrow_cache_is_batch_invariant_and_equal_on_all_backends(backend_name, dtype):
    m = model("storyteller", backend_name)
    tokens = rng(3).integers(3, m.config.vocab_size, 12)
    whole = m.run(TokenBatch.of([(0, 0, tokens)]), m.new_cache(1, 12, dtype=dtype)).all()
    assert whole.dtype == np.float32
    cache = m.new_cache(2, 12, dtype=dtype, page_size=5)
    m.run(TokenBatch.of([(1, 0, tokens[:7])]), cache).all()
    cache.copy([1], [0], 7)
    rest = m.run(TokenBatch.of([(0, 7, tokens[7:])]), cache).all()
    np.testing.assert_array_equal(rest, whole[7:])
    numpy = model("storyteller")
    expected = numpy.run(TokenBatch.of([(0, 0, tokens)]), numpy.new_cache(1, 12, dtype=dtype)).all()
    np.testing.assert_allclose(whole, expected, rtol=0, atol=2e-5)


def test_a_float64_run_with_a_narrow_cache_stays_float64():
    double = model(GOLDEN / "llama-dense", "numpy", dtype="float64")
    tokens = [1, 5, 9, 2]
    exact = double.logits(tokens)
    for dtype in NARROW:
        logits = double.run(TokenBatch.of([(0, 0, tokens)]), double.new_cache(1, 4, dtype=dtype)).all()
        assert logits.dtype == np.float64
        assert 0 < np.abs(logits - exact).max() < 0.1


def test_a_dtype_that_a_backend_cannot_keep(be):
    for wrong in ("float8", "bfloat16", *(["float64"] if be.name != "numpy" else [])):
        with pytest.raises(ShapeError, match=f"expected cache dtype .*float16 or int8, got {wrong!r}"):
            be.new_cache(CONFIG, CacheSpec(1, 1, wrong))
    with pytest.raises(ShapeError, match="cache dtype"):
        bitnet_ref.load("storyteller", backend=be.name, cache_dtype="int4")


@pytest.mark.long_emulated
def test_a_model_is_loaded_with_a_cache_dtype(backend_name):
    prompt = "The rabbit ran"
    for dtype in NARROW:
        m = bitnet_ref.load("storyteller", backend=backend_name, threads=2, cache_dtype=dtype)
        assert m.new_cache(1, 1).dtype == dtype
        out = m.generate(prompt, max_tokens=8)
        assert (out.stats.cache_dtype, out.stats.cache_bytes_per_token) == (dtype, m.new_cache(1, 1).bytes_per_token)
        # the tokens are the likeliest by the logits of this model, whose cache is narrow too
        ids = [*out.prompt_token_ids, *out.token_ids]
        logits, seen = m.run_with_cache(ids, names_filter="blocks.0.attn.hook_v")
        assert logits[len(out.prompt_token_ids) - 1 : -1].argmax(-1).tolist() == out.token_ids
        np.testing.assert_array_equal(m.logits(ids), logits)
        plain, exact = model("storyteller", backend_name).run_with_cache(ids, names_filter="blocks.0.attn.hook_v")
        assert np.abs(logits - plain).max() > 0
        np.testing.assert_array_equal(
            seen["blocks.0.attn.hook_v"], widen(*narrow(exact["blocks.0.attn.hook_v"], np.dtype(dtype)))
        )


def test_shared_models_of_other_cache_dtypes_are_others():
    one = bitnet_ref.load("storyteller", backend="numpy", share=True, cache_dtype="int8")
    assert bitnet_ref.load("storyteller", backend="numpy", share=True, cache_dtype="int8") is one
    assert bitnet_ref.load("storyteller", backend="numpy", share=True) is not one


def test_the_interface_takes_no_other_dtype_by_default():
    assert Backend(threads=1).new_cache(CONFIG, CacheSpec(1, 1)).dtype == np.float32
    assert Backend("float64", threads=1).new_cache(CONFIG, CacheSpec(1, 1)).dtype == np.float64
