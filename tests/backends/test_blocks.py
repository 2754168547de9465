"""A pass whose small steps are done with the products they lead to: the bits of single operations, and their errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers import GOLDEN, GOLDEN_CASES, model, prepared, random_ternary, rng
from hypothesis import given, settings
from hypothesis import strategies as st

from bitnet_ref.backends.cpu.backend import CythonBackend, layouts, simd_variants, why_unavailable
from bitnet_ref.backends.cpu.deferred import OfPair
from bitnet_ref.backends.cpu.fused_pass import FusedPass, copy_as
from bitnet_ref.crossval.opponents import prepared_model
from bitnet_ref.errors import NumericsError, ShapeError
from bitnet_ref.reference.cache import TokenBatch
from bitnet_ref.reference.model import final_hidden
from bitnet_ref.reference.weights import TernaryWeight

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
SETS = [name for name, lacks in simd_variants().items() if lacks is None]


def in_turn(m, prompts, caches):
    """Prompts and then tokens of several sequences, fused and op by op: (found, expected) of each call."""
    batches = [TokenBatch.of([(slot, 0, p[: 5 + slot])]) for slot, p in enumerate(prompts)]
    batches.append(
        TokenBatch.of([(slot, 5 + slot, p[5 + slot :]) for slot, p in enumerate(prompts)], range(len(prompts)))
    )
    batches.append(replace(batches[-1], wanted=np.array([1, 0])))
    for batch in batches:
        found = m.backend.run(final_hidden, m.weights, m.config, batch, caches[0])
        yield found, final_hidden(m.backend, m.weights, m.config, batch, caches[1])


@pytest.mark.parametrize("case", GOLDEN_CASES)
@pytest.mark.parametrize("kind", ["float32", "float16", "int8"])
def test_a_pass_is_its_operations(case, kind):
    m = model(GOLDEN / case, "cython")
    prompts = [rng(slot).integers(1, m.config.vocab_size, n) for slot, n in enumerate((12, 9, 17))]
    caches = [m.backend.new_cache(m.config, len(prompts), 24, kind) for _ in range(2)]
    for found, expected in in_turn(m, prompts, caches):
        np.testing.assert_array_equal(found, expected)
    for mine, theirs in zip(caches[0]._pools, caches[1]._pools, strict=True):
        for slot, prompt in enumerate(prompts):
            np.testing.assert_array_equal(mine[:, slot, : len(prompt)], theirs[:, slot, : len(prompt)])


@pytest.mark.parametrize(
    ("simd", "layout"), [(simd, layout) for layout, (_, sets) in layouts().items() for simd in SETS if simd in sets]
)
def test_on_every_kernel_set_and_layout(simd, layout):
    be = CythonBackend(simd=simd, layout=layout, threads=2)
    m = prepared_model(model(GOLDEN / "bitnet-packed-offline"), be)
    prompts = [rng(slot).integers(1, m.config.vocab_size, n) for slot, n in enumerate((12, 9))]
    for found, expected in in_turn(m, prompts, [m.new_cache(2, 24) for _ in range(2)]):
        np.testing.assert_array_equal(found, expected)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_rows_that_are_made_on_the_way(data):
    """x, or x + y, or act(x) * y, then perhaps a norm, into one, two or three products, or two that are gated: any
    shapes, any kernel set; and what was put off is there for whoever asks, before the product or after."""
    n, width = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 90))
    be = CythonBackend(simd=data.draw(st.sampled_from(SETS)), threads=data.draw(st.integers(1, 3)))
    fused, generator = copy_as(FusedPass, be), rng(data.draw(st.integers(0, 10**6)))
    outs = data.draw(st.lists(st.integers(1, 130), min_size=1, max_size=3))
    outs = outs if data.draw(st.booleans()) else [outs[0]] * 2
    ws = prepared(be, *(TernaryWeight.from_ternary(random_ternary(generator, out, width), 1.7) for out in outs))
    if data.draw(st.booleans()):
        ws = [replace(w, bias=np.float32(generator.standard_normal(w.shape[0]))) for w in ws]
    x, y = np.float32(generator.standard_normal((2, n, width)) * 10.0 ** data.draw(st.integers(-6, 3)))
    norm = np.float32(generator.standard_normal(width))
    source = data.draw(st.sampled_from(["x", "x + y", "relu2", "silu"]))
    normed, gate = data.draw(st.booleans()), data.draw(st.sampled_from([None, "relu2", "silu"]))
    ask = data.draw(st.sets(st.sampled_from(["rows", "normed", "product"])))

    def compute(of):
        seen = []

        def look(when, *values):
            if when in ask:
                seen.extend(np.array(fused.value(v)) for v in values)

        rows = x if source == "x" else of.add(x, y) if source == "x + y" else of.gated(x, y, source)
        look("rows", rows)
        h = of.rms_norm(rows, norm, 1e-5) if normed else rows
        look("normed", h)
        products = of.linears(h, ws)
        look("product", *products)
        if gate and len(products) == 2 and products[0].shape == products[1].shape:
            products = [of.gated(*products, gate)]
        return [*seen, *(fused.value(p) for p in products), fused.value(h), fused.value(rows)]

    for found, expected in zip(compute(fused), compute(be), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_gate_and_up_wait_for_each_other():
    """They are put off, gated in the other order or with something else, and then are what they are alone."""
    be = CythonBackend()
    fused, x = copy_as(FusedPass, be), np.float32(rng(1).standard_normal((5, 40)))
    ws = prepared(be, *(TernaryWeight.from_ternary(random_ternary(rng(i), 70, 40), 0.3) for i in range(2)))
    gate, up = be.linears(x, ws)
    later = fused.linears(x, ws)
    assert all(isinstance(y, OfPair) and y.shape == (5, 70) and len(y) == 5 for y in later)
    np.testing.assert_array_equal(fused.value(fused.gated(later[1], later[0], "relu2")), be.gated(up, gate, "relu2"))
    np.testing.assert_array_equal(fused.value(fused.gated(later[0], up, "silu")), be.gated(gate, up, "silu"))
    other = fused.linears(x, ws)
    np.testing.assert_array_equal(fused.value(fused.gated(other[0], later[1], "silu")), be.gated(gate, up, "silu"))
    with pytest.raises(ShapeError, match="an activation among"):
        fused.gated(*fused.linears(x, ws), "gelu")


def bad_model(bad, layer, part):
    """A tiny model one of whose norms holds a value that it should not."""
    m = model(GOLDEN / "bitnet-packed-offline", "cython")
    layers = list(m.weights.layers)
    norm = np.array(getattr(layers[layer], part))
    norm[3] = bad
    layers[layer] = replace(layers[layer], **{part: norm})
    return type(m)(m.config, replace(m.weights, layers=tuple(layers)), m.backend)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("part", ["attn_norm", "attn_sub_norm", "ffn_norm", "ffn_sub_norm"])
def test_what_is_not_finite_is_the_error_of_the_operation(bad, part):
    m = bad_model(bad, 1, part)
    prompt = TokenBatch.of([(0, 0, [5, 6, 7, 8])], [0])
    raised = []
    for compute in (m.backend.run, lambda f, *rest: f(m.backend, *rest)):
        with np.errstate(all="ignore"):
            try:
                compute(final_hidden, m.weights, m.config, prompt, m.new_cache(1, 8))
                raised.append(None)
            except NumericsError as error:
                raised.append(str(error))
    assert raised[0] == raised[1]
    assert bad == 3e38 or raised[0] is not None


def test_keys_that_a_narrow_cache_cannot_keep():
    """A key's size is looked at after it is turned; then nothing is written."""
    m = model(GOLDEN / "bitnet-packed-offline", "cython")
    weight = replace(m.weights.layers[0].k_proj, w_dequant_scale=np.float32(1e6))
    layers = (replace(m.weights.layers[0], k_proj=weight), *m.weights.layers[1:])
    m = type(m)(m.config, replace(m.weights, layers=layers), m.backend)
    batch = TokenBatch.of([(0, 0, [5, 6, 7, 8])], [0])
    caches = [m.backend.new_cache(m.config, 1, 8, "float16") for _ in range(2)]
    for cache in caches:
        cache.fill_with_zeros()
    with pytest.raises(NumericsError) as alone:
        final_hidden(m.backend, m.weights, m.config, batch, caches[1])
    with pytest.raises(NumericsError) as together:
        m.backend.run(final_hidden, m.weights, m.config, batch, caches[0])
    assert str(together.value) == str(alone.value)
    assert not any(np.any(cache.keys) or np.any(cache.values) for cache in caches)
