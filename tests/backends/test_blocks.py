"""Blocks of fused kernels: bit for bit the composition of the same backend's ops, and the same errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers import GOLDEN, GOLDEN_CASES, model, prepared, random_ternary, rng
from hypothesis import given, settings
from hypothesis import strategies as st

from bitnet_ref.backends.cpu.backend import CythonBackend
from bitnet_ref.backends.cpu.extension import layouts, simd_variants, why_unavailable
from bitnet_ref.backends.paged_cache import CacheSpec
from bitnet_ref.errors import NumericsError, ShapeError
from bitnet_ref.families.linear_norms import NormedLinear
from bitnet_ref.reference.cache import TokenBatch
from bitnet_ref.reference.model import BlockPlace
from bitnet_ref.reference.weights import DenseWeight, LayerWeights, Norm, TernaryWeight

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
SETS = [name for name, lacks in simd_variants().items() if lacks is None]
METHODS = [(simd, layout) for layout, (_, sets) in layouts().items() for simd in SETS if simd in sets]


def hidden(m, batch, cache, path):
    with np.errstate(all="ignore"):
        return m.backend.hidden(m.weights, m.config, batch, cache, path)


def batches_of(prompts):
    """Prompts one by one, then the rest of all of them together, then some of their tokens again, in another order."""
    yield from (TokenBatch.of([(slot, 0, prompt[: 5 + slot])]) for slot, prompt in enumerate(prompts))
    rest = [(slot, 5 + slot, prompt[5 + slot :]) for slot, prompt in enumerate(prompts)]
    yield TokenBatch.of(rest, range(len(prompts)))
    yield replace(TokenBatch.of(rest), wanted=np.array([1, 0]))


def check_blocks(m, lengths, dtype=None):
    """Fused and composed passes give equal hidden states and equal caches."""
    prompts = [rng(slot).integers(1, m.config.vocab_size, n) for slot, n in enumerate(lengths)]
    fused, composed = (m.new_cache(len(prompts), max(lengths), dtype=dtype) for _ in range(2))
    for batch in batches_of(prompts):
        np.testing.assert_array_equal(hidden(m, batch, fused, "blocks"), hidden(m, batch, composed, "ops"))
    for mine, theirs in zip(fused.pools, composed.pools, strict=True):
        for slot, length in enumerate(lengths):
            np.testing.assert_array_equal(mine[:, slot, :length], theirs[:, slot, :length])


@pytest.mark.sample(9)
@pytest.mark.parametrize("case", GOLDEN_CASES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_every_golden_model(case, dtype):
    check_blocks(model(GOLDEN / case, "cython"), (12, 9, 17), dtype)


@pytest.mark.parametrize(("simd", "layout"), METHODS)
@pytest.mark.parametrize("case", ["bitnet-packed-offline", "onebitllm-silu"])
def test_every_kernel_set_and_layout(simd, layout, case):
    check_blocks(model(GOLDEN / case).on(CythonBackend(simd=simd, layout=layout, threads=2)), (12, 9))


@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 64, 65, 130])
def test_prompts_of_any_length(tokens):
    m = model("storyteller", "cython")
    batch = TokenBatch.of([(0, 0, rng(tokens).integers(1, 4000, tokens))])
    found, expected = (hidden(m, batch, m.new_cache(1, tokens), path) for path in ("blocks", "ops"))
    np.testing.assert_array_equal(found, expected)


# -- blocks of any shape -----------------------------------------------------------------------------------------------


def random_layer(be, cfg, generator, *, biases, sub_norms, odd_one=None):
    """One layer's weights on this backend. odd_one: "dense" or "own norm", of the layer's v_proj and up_proj."""
    width, ffn = cfg.hidden_size, cfg.intermediate_size
    heads, kv_heads = cfg.num_attention_heads * cfg.head_dim, cfg.num_key_value_heads * cfg.head_dim

    def linear(n_out, n_in, odd=None):
        bias = np.float32(generator.standard_normal(n_out)) if biases else None
        if odd == "dense":
            return DenseWeight(np.float32(generator.standard_normal((n_out, n_in)) * n_in**-0.5), bias)
        own_norm = norm(n_in) if odd == "own norm" else None
        w_t = TernaryWeight.from_ternary(random_ternary(generator, n_out, n_in), 1.7 * n_in**-0.5)
        w = replace(w_t, bias=bias)
        return prepared(be, w if own_norm is None else NormedLinear(own_norm, w))[0]

    def norm(size):
        return Norm(np.float32(1 + 0.3 * generator.standard_normal(size)), cfg.norm_eps)

    return LayerWeights(
        name="blocks.0",
        attn_norm=norm(width),
        q_proj=linear(heads, width),
        k_proj=linear(kv_heads, width),
        v_proj=linear(kv_heads, width, odd_one),
        attn_sub_norm=norm(heads) if sub_norms else None,
        o_proj=linear(width, heads),
        ffn_norm=norm(width),
        gate_proj=linear(ffn, width),
        up_proj=linear(ffn, width, odd_one),
        ffn_sub_norm=norm(ffn) if sub_norms else None,
        down_proj=linear(width, ffn),
    )


@pytest.mark.thorough
@settings(max_examples=120, deadline=None)
@given(st.data())
def test_blocks_of_any_shape(data):
    """Any sizes, both activations, with and without sub-norms and biases, several sequences, every kind of cache."""
    simd, layout = data.draw(st.sampled_from(METHODS))
    be = CythonBackend(simd=simd, layout=layout, threads=data.draw(st.integers(1, 3)))
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2, 5]))
    cfg = replace(
        model(GOLDEN / "bitnet-packed-offline").config,
        num_hidden_layers=1,
        hidden_size=data.draw(st.integers(1, 90)),
        intermediate_size=data.draw(st.integers(1, 130)),
        num_attention_heads=kv_heads * group,
        num_key_value_heads=kv_heads,
        head_dim=data.draw(st.sampled_from([2, 6, 16, 40])),
        activation=data.draw(st.sampled_from(["relu2", "silu"])),
        sliding_window=data.draw(st.sampled_from([None, 1, 7])),
    )
    parts = data.draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 50)), min_size=1, max_size=3))
    batch = TokenBatch.of([(slot, first, [0] * count) for slot, (first, count) in enumerate(parts)])
    generator = rng(data.draw(st.integers(0, 10**6)))
    odd_one = data.draw(st.sampled_from([None, None, "dense", "own norm"]))
    biases, sub_norms = data.draw(st.booleans()), data.draw(st.booleans())
    w = random_layer(be, cfg, generator, biases=biases, sub_norms=sub_norms, odd_one=odd_one)
    spec = CacheSpec(len(parts), 60, data.draw(st.sampled_from(["float32", "float16", "int8"])))
    spec = replace(spec, page_size=data.draw(st.sampled_from([None, 1, 5, 16])))
    x = np.float32(generator.standard_normal((len(batch), cfg.hidden_size)) * 10.0 ** data.draw(st.integers(-6, 3)))
    rope = be.rope_tables(batch.positions, cfg.rope, cfg.head_dim)
    history = TokenBatch.of([(slot, 0, [0] * first) for slot, (first, _) in enumerate(parts)])
    old = np.float32(generator.standard_normal((2, len(history), kv_heads, cfg.head_dim)))
    caches = [be.new_cache(cfg, spec) for _ in range(2)]
    outputs = []
    for blocks, cache in zip((be, be.op_by_op()), caches, strict=True):
        cache.fill_with_zeros()
        cache.append(0, history, *old)
        middle = blocks.attention_block(x, w, cfg, BlockPlace(rope, batch, cache, 0))
        outputs.append((middle, blocks.feed_forward(middle, w, cfg), *cache.pools))
    assert not be.op_by_op().fuses
    for fused, composed in zip(*outputs, strict=True):
        np.testing.assert_array_equal(fused, composed)


OPS = ("rms_norm", "linears", "rope", "append", "attention", "gated", "add")


@pytest.mark.parametrize("case", ["bitnet-packed-offline", "onebitllm-silu", "llama-bf16-biases"])
def test_what_is_fused_calls_no_op(case, monkeypatch):
    """That the tests above compare two things: a fused block has kernels of its own, a composed one calls the ops."""
    m = model(GOLDEN / case).on(CythonBackend(threads=1))
    called = []
    for op in OPS:
        monkeypatch.setattr(CythonBackend, op, _counted(getattr(CythonBackend, op), op, called))
    batch = TokenBatch.of([(0, 0, [1, 2, 3])])
    for path, expected in (("blocks", set() if m.config.quantization else set(OPS)), ("ops", set(OPS))):
        called.clear()
        hidden(m, batch, m.new_cache(1, 4), path)
        assert set(called) - {"rms_norm"} == expected - {"rms_norm"}  # the final norm is an op on every path
        assert called.count("rms_norm") == 1 or expected


def _counted(method, name, called):
    def count(self, *args):
        called.append(name)
        return method(self, *args)

    return count


def test_an_activation_without_a_kernel_is_an_op(monkeypatch):
    """A fused block takes what it covers; any other activation goes to the plain op, which refuses what is unknown."""
    be = CythonBackend(threads=1)
    cfg = model(GOLDEN / "bitnet-packed-offline").config
    w = random_layer(be, cfg, rng(1), biases=False, sub_norms=True)
    object.__setattr__(cfg := replace(cfg), "activation", "gelu")
    with pytest.raises(ShapeError, match="an activation among"):
        be.feed_forward(np.ones((2, cfg.hidden_size), np.float32), w, cfg)


# -- errors ------------------------------------------------------------------------------------------------------------


def bad_model(bad, layer, part):
    """A tiny model with one bad value in a norm."""
    m = model(GOLDEN / "bitnet-packed-offline", "cython")
    layers = list(m.weights.layers)
    norm = getattr(layers[layer], part)
    weight = np.array(norm.weight)
    weight[3] = bad
    layers[layer] = replace(layers[layer], **{part: replace(norm, weight=weight)})
    return type(m)(m.config, replace(m.weights, layers=tuple(layers)), m.backend)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("part", ["attn_norm", "attn_sub_norm", "ffn_norm", "ffn_sub_norm"])
def test_what_is_not_finite_is_the_same_error_on_every_path(bad, part):
    m = bad_model(bad, 1, part)
    prompt = TokenBatch.of([(0, 0, [5, 6, 7, 8])])
    outcomes = []
    for path in m.backend.paths:
        try:
            outcomes.append(m.run(prompt, m.new_cache(1, 8), path=path).all().tobytes())
        except NumericsError as error:
            outcomes.append((str(error), error.tensor))
    assert len(set(outcomes)) == 1
    if bad != 3e38:
        name = {"attn_norm": "ln1", "ffn_norm": "ln2", "attn_sub_norm": "attn.sub_norm", "ffn_sub_norm": "mlp.sub_norm"}
        assert outcomes[0][1] == f"blocks.1.{name[part]}.hook_normalized"


def test_keys_that_a_narrow_cache_cannot_hold():
    """A key's size is checked after its rotation; then nothing is written."""
    m = model(GOLDEN / "bitnet-packed-offline", "cython")
    weight = replace(m.weights.layers[0].k_proj, w_dequant_scale=np.float32(1e6))
    layers = (replace(m.weights.layers[0], k_proj=weight), *m.weights.layers[1:])
    m = type(m)(m.config, replace(m.weights, layers=layers), m.backend)
    batch = TokenBatch.of([(0, 0, [5, 6, 7, 8])])
    errors = []
    for path in m.backend.paths:
        cache = m.new_cache(1, 8, dtype="float16")
        cache.fill_with_zeros()
        with pytest.raises(NumericsError, match="float16 cannot hold") as single:
            hidden(m, batch, cache, path)
        with pytest.raises(NumericsError, match=r"blocks\.0\.attn\.hook_rot_k is the first bad tensor") as whole:
            m.run(batch, cache, path=path)
        errors.append((str(single.value), str(whole.value)))
        assert not any(pool.any() for pool in cache.pools)
    assert len(set(errors)) == 1
