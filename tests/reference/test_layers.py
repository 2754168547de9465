"""bitnet_ref.reference.layers: norms, gates, softmax, RoPE and attention, against formulas written here."""

import json

import numpy as np
import pytest
from helpers import GOLDEN, rng

from bitnet_ref.errors import NumericsError, ShapeError
from bitnet_ref.families.rope import StretchedRope
from bitnet_ref.formats.hf.config import parse_hf_config
from bitnet_ref.reference import layers
from bitnet_ref.reference.config import RopeConfig

# -- norms -------------------------------------------------------------------------------------------------------------


def test_rms_norm_by_hand():
    y = layers.rms_norm(np.array([[3.0, -4.0]], dtype=np.float32), np.array([1.0, 2.0], dtype=np.float32), 0.0)
    np.testing.assert_allclose(y, [[3 / 12.5**0.5, -8 / 12.5**0.5]], rtol=1e-6)
    assert y.dtype == np.float32


def test_eps_is_added_inside_the_root():
    y = layers.rms_norm(np.full((1, 4), 1e-3, dtype=np.float32), np.ones(4, dtype=np.float32), 1e-5)
    np.testing.assert_allclose(y, 1e-3 / (1e-6 + 1e-5) ** 0.5, rtol=1e-5)
    assert not layers.rms_norm(np.zeros((1, 4), dtype=np.float32), np.ones(4, dtype=np.float32), 1e-5).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rms_norm_of_nan_and_inf_is_an_error(bad):
    x = np.ones((3, 4), dtype=np.float32)
    x[2, 0] = bad  # x / inf would be a silent zero
    with pytest.raises(NumericsError, match="token 2"):
        layers.rms_norm(x, np.ones(4, dtype=np.float32), 1e-5)


def test_rms_norm_squares_in_float64():
    """1e30 squared is beyond float32; dividing by its inf would be a silent zero."""
    y = layers.rms_norm(np.full((1, 4), 1e30, dtype=np.float32), np.ones(4, dtype=np.float32), 1e-5)
    assert y.dtype == np.float32
    np.testing.assert_allclose(y, 1.0, rtol=1e-6)
    with np.errstate(over="ignore"), pytest.raises(NumericsError, match="token 0"):
        layers.rms_norm(np.full((1, 4), 1e200), np.ones(4), 1e-5)


def test_float64_stays_float64():
    x = rng(1).standard_normal((2, 8))
    assert layers.rms_norm(x, np.ones(8, dtype=np.float32), 1e-5).dtype == np.float64
    assert layers.gated(x, x, "silu").dtype == np.float64
    assert layers.softmax(x).dtype == np.float64


# -- gates -------------------------------------------------------------------------------------------------------------


def test_relu2():
    assert layers.relu2(np.array([-3.0, -0.0, 0.5, 2.0])).tolist() == [0, 0, 0.25, 4]


def test_silu():
    x = np.array([-1e4, -104.0, -88.0, -1.0, 0.0, 1.0, 88.0, 1e4], dtype=np.float32)
    y = layers.silu(x)
    assert y.dtype == np.float32
    assert np.isfinite(y).all()
    assert y[0] == 0
    assert y[-1] == 1e4
    wide = x[1:-1].astype(np.float64)
    np.testing.assert_allclose(y[1:-1], wide / (1 + np.exp(-wide)), rtol=1e-6, atol=1e-37)


def test_the_activation_is_on_the_gate_not_on_the_product():
    gate, up = np.array([[-2.0, 3.0]]), np.array([[-5.0, -7.0]])
    assert layers.gated(gate, up, "relu2").tolist() == [[0.0, -63.0]]


def test_an_unknown_activation_is_refused():
    with pytest.raises(ShapeError, match="gelu"):
        layers.gated(np.ones((1, 2)), np.ones((1, 2)), "gelu")


def test_softmax():
    scores = np.array([[1000.0, 1000.0 - np.log(3.0)], [-1e30, 0.0]], dtype=np.float32)
    np.testing.assert_allclose(layers.softmax(scores), [[0.75, 0.25], [0.0, 1.0]], rtol=1e-4)


# -- RoPE --------------------------------------------------------------------------------------------------------------

TABLES = json.loads((GOLDEN / "rope_tables.json").read_text())


def rope_of(table):
    """The RopeConfig that a checkpoint's config.json with these rope_parameters gives."""
    raw = {
        "model_type": "llama",
        "vocab_size": 10,
        "hidden_size": 4 * table["head_dim"],
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "head_dim": table["head_dim"],
        "max_position_embeddings": table["max_position_embeddings"],
        "rope_parameters": table["rope_parameters"],
    }
    return parse_hf_config(raw, GOLDEN).rope


@pytest.mark.parametrize("name", TABLES)
def test_frequencies_of_published_settings(name):
    table = TABLES[name]
    rope = rope_of(table)
    position = (table["length"] or 1) - 1
    stretched = isinstance(rope, StretchedRope)
    inv_freq = rope.frequencies(table["head_dim"], *([position] if stretched else []))
    assert inv_freq.dtype == np.float64
    np.testing.assert_allclose(inv_freq, table["inv_freq"], rtol=2e-6)  # the oracle computes them in float32
    cos, sin = rope.tables(np.array([position]), table["head_dim"], np.float64)
    length = np.sqrt(cos**2 + sin**2)
    np.testing.assert_allclose(length, table["attention_factor"], rtol=1e-12)


def test_frequencies_by_hand():
    np.testing.assert_allclose(RopeConfig(theta=100.0).frequencies(8), [1, 100**-0.25, 0.1, 100**-0.75])


def test_dynamic_rope_keeps_the_trained_length_and_stretches_beyond_it():
    rope = StretchedRope(rope_type="dynamic", factor=4.0, original_max_position_embeddings=16)
    plain = RopeConfig().frequencies(8)
    np.testing.assert_array_equal(rope.frequencies(8, position=15), plain)
    assert (rope.frequencies(8, position=16)[1:] < plain[1:]).all()
    cos, _ = rope.tables(np.array([3, 40]), 8, np.float64)
    np.testing.assert_array_equal(cos[0], np.cos(3 * plain))
    np.testing.assert_array_equal(cos[1], np.cos(40 * rope.frequencies(8, position=40)))


def test_angles_are_exact_at_long_positions():
    """A float32 angle at position 100,000 is off by 4e-3; these are rounded once, at the end."""
    positions = np.array([0, 1, 4095, 100_000])
    cos, sin = RopeConfig(theta=500000.0).tables(positions, 16, np.float32)
    angles = positions[:, None] * 500000.0 ** -(np.arange(8) / 8)
    assert cos.dtype == sin.dtype == np.float32
    np.testing.assert_allclose(cos, np.cos(angles), rtol=0, atol=6e-8)
    np.testing.assert_allclose(sin, np.sin(angles), rtol=0, atol=6e-8)


def test_rope_turns_the_pair_of_the_two_halves():
    """As complex numbers: x[j] + i x[j + d/2] times e^(i angle), for every head."""
    x = rng(2).standard_normal((3, 5, 8))
    positions = np.array([0, 2, 9])
    cos, sin = RopeConfig().tables(positions, 8, np.float64)
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * positions[:, None] * 10000.0 ** -(np.arange(4) / 4))[:, None]
    np.testing.assert_allclose(layers.apply_rope(x, cos, sin), np.concatenate([turned.real, turned.imag], -1))


def test_rope_scores_depend_on_distance_only():
    q, k = rng(3).standard_normal((2, 1, 1, 16))

    def score(at_q, at_k):
        cos, sin = RopeConfig().tables(np.array([at_q, at_k]), 16, np.float64)
        return float(np.sum(layers.apply_rope(q, cos[:1], sin[:1]) * layers.apply_rope(k, cos[1:], sin[1:])))

    assert score(7, 3) == pytest.approx(score(1007, 1003))
    assert score(7, 3) != pytest.approx(score(7, 4))


# -- attention ---------------------------------------------------------------------------------------------------------


def test_heads_share_kv_heads_in_runs():
    """Head h reads kv head h // (H/G): heads 0-2 the first, 3-5 the second."""
    generator = rng(4)
    q, keys, values = (generator.standard_normal(s) for s in ((6, 8), (5, 2, 8), (5, 2, 8)))
    scores = layers.attention_scores(q, keys)
    assert scores.shape == (6, 5)
    pattern = layers.softmax(scores)
    z = layers.attention_values(pattern, values)
    assert z.shape == (6, 8)
    for h in range(6):
        np.testing.assert_allclose(scores[h], keys[:, h // 3] @ q[h] / 8**0.5)
        np.testing.assert_allclose(z[h], pattern[h] @ values[:, h // 3])


def test_dense_matmul_in_blocks():
    """More rows than one block holds: each is widened and multiplied by itself."""
    generator = rng(5)
    w = generator.standard_normal((5000, 300)).astype(np.float16)
    x = generator.standard_normal((2, 300))
    assert w.size > layers._BLOCK_VALUES
    np.testing.assert_allclose(layers.dense_matmul(x, w), x @ w.astype(np.float64).T, rtol=1e-12, atol=1e-12)
    assert layers.dense_matmul(x[:0], w).shape == (0, 5000)
