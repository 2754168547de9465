"""Strips: rows of up_proj and columns of down_proj that meet zeros are left out: the bits are equal."""

import math
from dataclasses import replace

import numpy as np
import pytest
from helpers import model, random_ternary, rng

from bitnet_ref.backends import Backend
from bitnet_ref.backends.cpu.backend import CythonBackend
from bitnet_ref.backends.cpu.extension import simd_variants, why_unavailable
from bitnet_ref.backends.cpu.weights import PanelWeight, strip_bytes
from bitnet_ref.benchmark.models import measure_model
from bitnet_ref.errors import BackendUnavailable, NumericsError
from bitnet_ref.families.lora import LoraTerm, SelectedLinear
from bitnet_ref.reference.weights import TernaryLinear, TernaryWeight

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
SETS = [name for name, lacks in simd_variants().items() if lacks is None]
MAX_SKIPPING_TOKENS = {"amx": 6, "neon": 1, "dotprod": 1}  # more tokens are multiplied with everything


def feed_forward_layer(hidden, ffn, density, seed, sub_norm=True, tokens=1):
    """A layer whose gates are above zero for about that share of rows: its first channel decides.   -> layer, x"""
    layer = model("storyteller", "numpy").weights.layers[0]
    dice = rng(seed)
    x = dice.standard_normal((tokens, hidden), dtype=np.float32)
    x[:, 0] = 9
    gate = random_ternary(dice, ffn, hidden)
    gate[:, 1:] *= dice.random((ffn, 1)) < 0.3  # some rows are decided by all channels
    gate[:, 0] = np.where(dice.random(ffn) < density, 1, -1)
    matrices = {"gate_proj": gate, "up_proj": random_ternary(dice, ffn, hidden)}
    matrices["down_proj"] = random_ternary(dice, hidden, ffn)
    weights = {name: TernaryWeight.from_ternary(w_t, 0.02) for name, w_t in matrices.items()}
    norms = {
        "ffn_norm": replace(layer.ffn_norm, weight=np.ones(hidden, np.float32)),
        "ffn_sub_norm": replace(layer.ffn_sub_norm, weight=np.ones(ffn, np.float32)) if sub_norm else None,
    }
    return replace(layer, **weights, **norms), x


def both(layer, config, simd, threads):
    """The layer on a backend with strips and on one without."""
    for strips in ("always", "never"):
        be = CythonBackend(threads=threads, simd=simd, strips=strips)
        weights = {name: be.prepare(w) for name, w in layer.linears()}
        if strips == "always":
            yield be, be._add_strips(replace(layer, **weights))
        else:
            yield be, replace(layer, **weights)


@pytest.mark.sample(3)
@pytest.mark.parametrize("simd", SETS)
@pytest.mark.parametrize(("hidden", "ffn"), [(64, 64), (70, 333), (513, 300), (300, 1100)])
def test_the_bits_do_not_depend_on_what_is_skipped(simd, hidden, ffn):
    config = model("storyteller", "numpy").config
    read_whole = set()
    for density in (0, 0.01, 0.2, 0.45, 0.6, 1):
        for threads in (1, 3):
            layer, x = feed_forward_layer(hidden, ffn, density, seed=int(100 * density) + hidden, sub_norm=threads == 1)
            (be, stripped), (plain_be, plain) = both(layer, config, simd, threads)
            y = be.feed_forward(x, stripped, config)
            np.testing.assert_array_equal(y, plain_be.feed_forward(x, plain, config))
            np.testing.assert_array_equal(y, be.op_by_op().feed_forward(x, stripped, config))
            np.testing.assert_array_equal(y, Backend("float32", 1).feed_forward(x, layer, config))
            for w in (stripped.up_proj, stripped.down_proj):
                tokens, needed, read, total = w.kernel_view.counts.read()
                assert tokens == (2 if w.by_columns else 1)  # down_proj alone is an op too
                assert 0 <= needed <= read <= total == tokens * len(w.strips)
                read_whole.add(read == total)
    assert read_whole == {True, False}  # both ways were taken


@pytest.mark.sample(3)
@pytest.mark.parametrize("simd", SETS)
@pytest.mark.parametrize(("hidden", "ffn"), [(70, 333), (513, 300), (300, 1100)])
def test_several_tokens_do_not_multiply_by_zeros(simd, hidden, ffn):
    config, ways = model("storyteller", "numpy").config, set()
    drawn = [(0, 2, 1), (0.2, 3, 3), (0.5, 5, 1), (0.1, 7, 2), (1, 2, 3)]
    drawn += [(0.02, 15, 3), (0.2, 16, 1), (0.4, 70, 2), (1, 40, 3)]
    for density, tokens, threads in drawn:
        layer, x = feed_forward_layer(hidden, ffn, density, seed=tokens + hidden, tokens=tokens, sub_norm=threads > 1)
        (be, stripped), (plain_be, plain) = both(layer, config, simd, threads)
        y = be.feed_forward(x, stripped, config)
        np.testing.assert_array_equal(y, plain_be.feed_forward(x, plain, config))
        np.testing.assert_array_equal(y, Backend("float32", 1).feed_forward(x, layer, config))
        np.testing.assert_array_equal(y[-1:], be.feed_forward(x[-1:], stripped, config))
        for w in (stripped.up_proj, stripped.down_proj):
            calls, needed, read, total = w.kernel_view.counts.read(True)
            expected = tokens if tokens <= MAX_SKIPPING_TOKENS.get(simd, tokens) else 0
            assert (calls, total) == (expected, expected * len(w.strips))
            assert 0 <= needed <= read <= total
            if calls:
                ways.add((w.by_columns, read < total))
    if MAX_SKIPPING_TOKENS.get(simd) != 1:  # both ways were taken, by both matrices
        assert ways == {(False, True), (False, False), (True, True), (True, False)}


@pytest.mark.parametrize("simd", SETS)
def test_one_token_may_need_everything_beside_others_that_need_little(simd):
    ffn = 333
    layer, _ = feed_forward_layer(300, ffn, 0.5, seed=5)
    (be, stripped), (plain_be, plain) = both(layer, model("storyteller", "numpy").config, simd, 2)
    for tokens in (5, 40):
        x = rng(tokens).standard_normal((tokens, ffn), dtype=np.float32)
        others = np.arange(tokens) != (tokens - 1) // 2  # the last token that the first thread lists
        x[others] *= rng(1).random((tokens - 1, ffn)) < 0.02
        x[others, 0] = 1
        np.testing.assert_array_equal(be.linear(x, stripped.down_proj), plain_be.linear(x, plain.down_proj))


def test_a_product_that_overflows_beside_a_gate_of_zero_is_still_an_error():
    config = model("storyteller", "numpy").config
    for tokens in (1, 16):
        layer, x = feed_forward_layer(64, 128, 0.1, seed=3, tokens=tokens)
        layer = replace(layer, up_proj=replace(layer.up_proj, w_dequant_scale=np.float32(3e38)))
        for be, w in both(layer, config, SETS[-1], 1):
            with pytest.raises(NumericsError), np.errstate(all="ignore"):
                be.feed_forward(x, w, config)


def put_terms(layer, choice, seed, size=0.1):
    """The layer with two terms on gate and up and one on down; each row of `choice` takes one of them or none."""
    dice = rng(seed)

    def term(w, rank):
        a, b = (dice.standard_normal(shape, dtype=np.float32) for shape in ((rank, w.shape[1]), (w.shape[0], rank)))
        return LoraTerm(a, b, size).put_on(w)

    own = {name: term(w, 5) for name, w in layer.linears() if name in ("gate_proj", "up_proj", "down_proj")}
    if choice is not None:
        for name, w in own.items():
            other = None if name == "down_proj" else term(w.linear, 3)
            own[name] = SelectedLinear(w.linear, (w, other), choice)
    return replace(layer, **own)


@pytest.mark.sample(3)
@pytest.mark.parametrize("simd", SETS)
def test_terms_of_adapters_are_added_to_what_is_not_skipped(simd):
    config = model("storyteller", "numpy").config
    for density, tokens, threads in ((0.1, 1, 1), (0.6, 1, 2), (0.1, 3, 2), (0.2, 16, 3), (1, 40, 1)):
        for choice in (None, rng(tokens).integers(-1, 2, tokens).astype(np.int32)):
            layer, x = feed_forward_layer(70, 333, density, seed=tokens, sub_norm=threads > 1, tokens=tokens)
            expected = Backend("float32", 1).feed_forward(x, put_terms(layer, choice, 1), config)
            for be, w in both(layer, config, simd, threads):
                w = put_terms(w, choice, 1)
                np.testing.assert_array_equal(be.feed_forward(x, w, config), expected)
                np.testing.assert_array_equal(be.op_by_op().feed_forward(x, w, config), expected)


def test_a_model_that_has_an_adapter_when_it_is_prepared_gets_the_same_strips():
    story, be = model("storyteller", "numpy"), CythonBackend(strips="always")
    layers = tuple(put_terms(layer, None, 1) for layer in story.weights.layers)
    adapted = type(story)(story.config, replace(story.weights, layers=layers), story.backend)
    assert strip_bytes(adapted.on(be).weights) == strip_bytes(story.on(be).weights) > 0


def test_a_term_that_overflows_beside_a_gate_of_zero_is_still_an_error():
    config = model("storyteller", "numpy").config
    layer, x = feed_forward_layer(64, 128, 0.1, seed=3)
    for be, w in both(layer, config, SETS[-1], 1):
        w = replace(w, up_proj=put_terms(w, None, 1, size=1e38).up_proj)
        with pytest.raises(NumericsError), np.errstate(all="ignore"):
            be.feed_forward(x, w, config)


def test_nan_is_an_error():
    config = model("storyteller", "numpy").config
    layer, x = feed_forward_layer(64, 128, 0.1, seed=3)
    x[0, 5] = np.nan
    for be, w in both(layer, config, SETS[-1], 1):
        with pytest.raises(NumericsError, match="token 0 holds NaN"):
            be.feed_forward(x, w, config)


def test_auto_gives_strips_to_large_matrices_of_relu2(monkeypatch):
    story = model("storyteller", "numpy")
    strips = [w.strips is not None for _, w in story.on(CythonBackend()).weights.linears() if type(w) is PanelWeight]
    assert not any(strips)
    layers = story.on(CythonBackend(strips="always")).weights.layers
    assert all(w.strips is not None for layer in layers for w in (layer.up_proj, layer.down_proj))
    assert layers[0].gate_proj.strips is None
    assert layers[0].up_proj.nbytes == 2 * layers[0].up_proj.panels.nbytes  # sizes that fill panels and strips
    silu = replace(story.config, activation="silu")
    assert CythonBackend(strips="always").prepare_model(story.weights, silu) is story.weights
    monkeypatch.setenv("BITNET_REF_STRIPS", "never")
    assert CythonBackend().strips == "never"
    with pytest.raises(BackendUnavailable, match="expected one of auto, always, never, got 'some'"):
        CythonBackend(strips="some")


def test_a_profile_and_a_benchmark_say_what_was_left_out():
    simd = [name for name in SETS if name not in MAX_SKIPPING_TOKENS][-1]
    story = model("storyteller", "numpy").on(CythonBackend(simd=simd, strips="always"))
    with story.profile(path="blocks") as profile:
        story.generate("The cat sat on the mat and looked at the old man.", max_tokens=4)
    layers = story.config.num_hidden_layers
    # Of a prompt the last layer's feed-forward computes one token.
    for shares, linears in ((profile.skipped, 2 * layers), (profile.not_multiplied, 2 * layers - 2)):
        assert len(shares) == linears
        assert all(0 <= share < 1 for share in shares.values())
        assert max(shares.values()) > 0.5
    assert "not read" in profile.caption
    assert "not multiplied" in profile.caption
    bench = measure_model(story, 16, 4, reader_bytes=1 << 20)
    assert bench.equal
    of_all = sum(math.prod(w.shape) for _, w in story.weights.linears() if isinstance(w, TernaryLinear))
    assert 0.4 * of_all < bench.ternary_multiply_adds < 0.9 * of_all
    assert all(0.3 < share < 1 for share in (*bench.skipped.values(), *bench.not_multiplied.values()))
