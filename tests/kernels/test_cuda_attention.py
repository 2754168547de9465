"""Attention on a card, over every way to cut tokens and keys: emulated where there is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from decoding import Decoding, fused_kernels, same_bits
from helpers import GOLDEN, call, model, of_one_layer, rng, run_sanitized
from hypothesis import given, settings
from hypothesis import strategies as st

from bitnet_ref.backends import Backend, choose_backend, cuda
from bitnet_ref.backends.cuda import attention
from bitnet_ref.backends.cuda.backend import CupyBackend
from bitnet_ref.backends.cuda.emulation.device import EmulatedDevice
from bitnet_ref.backends.paged_cache import CacheSpec
from bitnet_ref.errors import NumericsError
from bitnet_ref.reference.cache import TokenBatch

pytestmark = pytest.mark.skipif(cuda.why_unavailable() is not None, reason=str(cuda.why_unavailable()))


@pytest.fixture(scope="module")
def be():
    return choose_backend("cupy")


@st.composite
def cases(draw):
    kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 4, 5, 8, 9, 12, 33]))
    head_dim = draw(st.sampled_from([2, 6, 8, 16, 18, 32, 34, 64, 66, 128, 130]))
    kind = draw(st.sampled_from(["float32", "float16", "int8"]))
    window = draw(st.none() | st.sampled_from([1, 3, 8, 100, 128, 129, 200]))
    page_size = draw(st.none() | st.sampled_from([4, 7, 128]))
    pieces = []  # (length of the sequence, first token of the batch, how many)
    for length in draw(st.lists(st.sampled_from([1, 2, 5, 17, 40, 127, 128, 129, 140, 260]), min_size=1, max_size=3)):
        count = draw(st.integers(1, min(length, 20)))
        pieces.append((length, draw(st.integers(0, length - count)), count))
    return kv_heads, group, head_dim, kind, window, page_size, pieces


@pytest.mark.thorough
@settings(max_examples=20, deadline=None)
@given(cases())
def test_a_token_attends_alike_in_any_company(be, case):
    """Pieces of sequences together, with the keys of a block in chunks or not, and each token alone: no bit differs.
    Beside NumPy, whose products add in another order, one in some 10^8 may be rounded the other way."""
    kv_heads, group, head_dim, kind, window, page_size, pieces = case
    config, heads = of_one_layer(kv_heads, group, head_dim), kv_heads * group
    spec = CacheSpec(len(pieces), 264, kind, page_size)
    caches = [b.new_cache(config, spec) for b in (be, Backend())]
    generator = rng(head_dim)
    for slot, (length, _, _) in enumerate(pieces):
        batch = TokenBatch.of([(slot, 0, [0] * length)])
        k, v = (generator.standard_normal((length, kv_heads, head_dim)).astype(np.float32) for _ in range(2))
        for b, cache in zip((be, Backend()), caches, strict=True):
            call(b, "append", cache, 0, batch, k, v)
    batch = TokenBatch.of([(slot, first, [0] * count) for slot, (_, first, count) in enumerate(pieces)])
    q = generator.standard_normal((len(batch), heads, head_dim)).astype(np.float32)

    def attend(q, batch, enough_blocks=attention.ENOUGH_BLOCKS):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "ENOUGH_BLOCKS", enough_blocks)
            return call(be, "attention", q, caches[0], batch, 0, window)

    z = attend(q, batch, 1)  # a block takes all chunks, if tokens follow each other at all
    np.testing.assert_array_equal(attend(q, batch, 1 << 30), z)
    for i in generator.choice(len(batch), min(len(batch), 5), replace=False):
        alone = TokenBatch.of([(int(batch.slots[i]), int(batch.positions[i]), [0])])
        np.testing.assert_array_equal(attend(q[i : i + 1], alone)[0], z[i])
    np.testing.assert_array_max_ulp(z, Backend().attention(q, caches[1], batch, 0, window), maxulp=1)


def test_a_long_prompt_is_taken_in_parts(be, monkeypatch):
    """No more scores at a time than SCORES_BYTES, and no bit differs."""
    config = model(GOLDEN / "llama-dense").config
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    cache, batch = be.new_cache(config, CacheSpec(1, 150)), be.place(TokenBatch.of([(0, 0, [0] * 150)]))
    q, k, v = (
        be.ws.upload(rng(n).standard_normal((150, n, head_dim)).astype(np.float32)) for n in (heads, kv_heads, kv_heads)
    )
    cache.append(0, batch, k, v)
    whole = be.to_host(be.attention(q, cache, batch, 0, None))
    monkeypatch.setattr(attention, "SCORES_BYTES", 4 * heads * 2 * attention.CHUNK * 40)
    shapes = []
    scratch = be.ws.scratch
    monkeypatch.setattr(be.ws, "scratch", lambda shape, dtype: (shapes.append(shape), scratch(shape, dtype))[1])
    np.testing.assert_array_equal(be.to_host(be.attention(q, cache, batch, 0, None)), whole)
    assert {shape[0] for shape in shapes if shape[-1] == 2 * attention.CHUNK} == {32, 22}


# -- tokens that are decoded -------------------------------------------------------------------------------------------


@st.composite
def decodings(draw):
    return Decoding(
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 2, 3, 4, 5, 8, 9, 12])),
        head_dim=draw(st.sampled_from([2, 16, 20, 32, 64, 80, 96, 100, 128, 144])),
        kind=draw(st.sampled_from(["float32", "float16", "bfloat16"])),
        window=draw(st.none() | st.sampled_from([1, 3, 15, 16, 100, 127, 128, 129, 200])),
        page_size=draw(st.none() | st.sampled_from([4, 7, 16, 128, 150])),
        lengths=draw(
            st.lists(
                st.sampled_from([1, 2, 16, 17, 32, 33, 96, 127, 128, 129, 140, 255, 256, 257, 290]),
                min_size=1,
                max_size=4,
            )
        ),
        padding=draw(st.integers(0, 2)),
    )


@pytest.mark.thorough
@settings(max_examples=25, deadline=None)
@given(decodings())
def test_attention_that_rotates_and_appends_changes_no_bit(be, case):
    """z and the cache, beside rope.cu and the kernels of prompts."""
    found, eager = case.run(be), case.run(be, fused=False)
    assert found[2] == fused_kernels(case.kind, case.group)
    assert eager[2] == [f"attention_{part}_{1 if case.group <= 8 else 4}_{case.kind}" for part in ("scores", "values")]
    same_bits(found, eager)


@pytest.mark.sample(3)
@pytest.mark.parametrize("order", [1, 7, 8])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_decoded_tokens_in_any_order_of_threads(be, kind, order):
    """Blocks and threads descending, and shuffled: another block is the last, and what differs lacks a barrier."""
    if not be.ws.device.emulated:
        pytest.skip("a GPU has its own order")
    for window in (None, 150):
        case = Decoding(2, 3, 96, kind, window, 7, [290, 1, 128], padding=1)
        found = case.run(CupyBackend(device=EmulatedDevice(order=order, late=True)))
        assert found[2] == fused_kernels(kind)
        same_bits(found, case.run(be, fused=False))


def test_an_int8_cache_takes_the_general_kernels(be):
    case = Decoding(1, 2, 32, "int8", None, 4, [140, 3])
    found = case.run(be)
    assert not any("append" in name for name in found[2])
    same_bits(found, case.run(be, fused=False))


def test_what_sixteen_bits_cannot_hold_is_reported(be):
    case = Decoding(1, 2, 32, "float16", None, None, [140, 3], scale=1e6)
    for fused in (True, False):
        with pytest.raises(NumericsError, match="the cache's dtype cannot hold token"):
            case.run(be, fused)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_passed_on(be, bad):
    """In a key, in a value, in the query: where it comes out is what the general kernels say."""
    case = Decoding(1, 2, 32, "float32", None, None, [140, 3], scale=bad)
    found, expected = case.run(be), case.run(be, fused=False)
    assert np.isnan(found[0]).any()
    for mine, theirs in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        np.testing.assert_array_equal(mine, theirs)  # of a NaN not its bits


# -- longer ------------------------------------------------------------------------------------------------------------

SANITIZED = """
import sys
from dataclasses import replace
import numpy as np
import bitnet_ref
from bitnet_ref.backends import Backend
from bitnet_ref.backends.cuda import attention
from bitnet_ref.backends.cuda.emulation.device import EmulatedDevice
from bitnet_ref.backends.cuda.backend import CupyBackend
from bitnet_ref.backends.paged_cache import CacheSpec
from bitnet_ref.reference.cache import TokenBatch

dice = np.random.default_rng(0)
attention.ENOUGH_BLOCKS = 2
config = bitnet_ref.load(sys.argv[1], backend="numpy").config
for order in (0, 1, 5):  # ascending, descending, shuffled by a seed
    be = CupyBackend(device=EmulatedDevice(order=order, sanitize=True))
    for (heads, kv_heads, d), kind, window, pieces in (
        ((4, 1, 64), "float32", None, [(0, 270, 1), (1, 140, 1)]),
        ((6, 2, 18), "float16", 100, [(0, 300, 40), (1, 5, 5)]),
        ((33, 1, 130), "int8", None, [(0, 129, 3)]),
        ((2, 2, 16), "float32", 7, [(0, 260, 70), (1, 131, 1), (2, 1, 1)]),
    ):
        sizes = dict(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=d, num_hidden_layers=1)
        shape = replace(config, **sizes)
        caches = [b.new_cache(shape, CacheSpec(3, 300, kind, 7)) for b in (be, Backend())]
        for slot, length, _ in pieces:
            batch = TokenBatch.of([(slot, 0, [0] * length)])
            k, v = (dice.standard_normal((length, kv_heads, d)).astype(np.float32) for _ in range(2))
            caches[0].append(0, be.place(batch), be.ws.upload(k), be.ws.upload(v))
            caches[1].append(0, batch, k, v)
        batch = TokenBatch.of([(slot, length - count, [0] * count) for slot, length, count in pieces])
        q = dice.standard_normal((len(batch), heads, d)).astype(np.float32)
        z = be.to_host(be.attention(be.ws.upload(q), caches[0], be.place(batch), 0, window))
        np.testing.assert_array_max_ulp(z, Backend().attention(q, caches[1], batch, 0, window), maxulp=1)
    sys.path.insert(0, sys.argv[2])
    from decoding import Decoding, fused_kernels, same_bits

    for case in (
        Decoding(2, 3, 80, "float32", None, 7, [290, 1, 128], padding=1),
        Decoding(1, 8, 128, "float16", 100, None, [257, 96]),
        Decoding(3, 1, 16, "bfloat16", 3, 150, [129, 2]),
    ):
        found = case.run(be)
        assert found[2] == fused_kernels(case.kind, case.group)
        same_bits(found, case.run(be, fused=False))
print("clean")
"""


@pytest.mark.slow
def test_no_access_is_out_of_bounds_in_any_order_of_threads():
    done = run_sanitized(SANITIZED, str(GOLDEN / "llama-dense"), str(Path(__file__).parent.parent))
    assert (done.returncode, done.stdout) == (0, "clean\n"), done.stderr
