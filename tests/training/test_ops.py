"""Each gradient of training/ops.py against central differences in float64."""

import numpy as np
import pytest
from helpers import rng
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_dtypes import bfloat16

from bitnet_ref.errors import ConfigError
from bitnet_ref.families.rope import StretchedRope
from bitnet_ref.reference import layers
from bitnet_ref.training import distil, ops
from bitnet_ref.training.ops import StepLinear

TOLERANCE = 1e-6  # relative: central differences with steps of 1e-5 err by 1e-10 of the third derivative


def numeric(f, x, dy, step=1e-5):
    """The gradient of sum(f(x) dy) by central differences, for each value of x."""
    gradient = np.empty_like(x)
    for index in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[index] += step
        down[index] -= step
        gradient[index] = ((f(up) - f(down)) * dy).sum() / (2 * step)
    return gradient


def assert_close(gradient, expected):
    assert gradient.shape == expected.shape
    assert np.linalg.norm(gradient - expected) <= TOLERANCE * max(np.linalg.norm(expected), 1e-3)


def test_rms_norm():
    x, weight, dy = rng(1).standard_normal((3, 4, 6))[0], rng(2).standard_normal(6), rng(3).standard_normal((4, 6))
    y, r = ops.rms_norm(x, weight, 1e-5)
    np.testing.assert_array_equal(y, layers.rms_norm(x, weight, 1e-5))
    dx, d_weight = ops.rms_norm_backward(dy, x, weight, r)
    assert_close(dx, numeric(lambda x: layers.rms_norm(x, weight, 1e-5), x, dy))
    assert_close(d_weight, numeric(lambda weight: layers.rms_norm(x, weight, 1e-5), weight, dy))


def test_embedding():
    table, tokens, dy = rng(1).standard_normal((5, 3)), np.array([4, 0, 4, 2, 0, 4]), rng(2).standard_normal((6, 3))
    d_table = np.zeros_like(table)
    ops.embed_backward(dy, tokens, d_table)
    assert_close(d_table, numeric(lambda table: table[tokens], table, dy))


def test_dense_linear():
    x, w, dy = rng(1).standard_normal((4, 5)), rng(2).standard_normal((3, 5)), rng(3).standard_normal((4, 3))
    weight = StepLinear.dense([w[:1], w[1:]])
    ys, saved = ops.linear(x, weight)
    np.testing.assert_allclose(np.concatenate(ys, axis=1), x @ w.T)
    dx, dws = ops.linear_backward([dy[:, :1], dy[:, 1:]], saved, weight)
    assert_close(dx, numeric(lambda x: x @ w.T, x, dy))
    assert_close(np.concatenate(dws), numeric(lambda w: x @ w.T, w, dy))


def test_bfloat16_is_the_nearest_of_eight_bits():
    values = [1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8, 0.0, 127.0, -128.0]
    expected = [1.0, 1.0, 1 + 2**-6, 1 + 2**-7, -1.0, 0.0, 127.0, -128.0]
    rounded = ops.round_bfloat16(np.array(values))
    assert rounded.dtype == np.float64
    np.testing.assert_array_equal(rounded, expected)
    x = rng(4).standard_normal(1000).astype(np.float32)
    assert 2**-10 < (np.abs(ops.round_bfloat16(x) - x) / np.abs(x)).max() <= 2**-8
    np.testing.assert_array_equal(ops.round_bfloat16(ops.round_bfloat16(x)), ops.round_bfloat16(x))
    np.testing.assert_array_equal(ops.round_bfloat16(x), x.astype(bfloat16))


def test_a_gradient_by_products_of_bfloat16():
    """Ternary values are exact in it, gradients are rounded, and only these."""
    x, w, dy = rng(1).standard_normal((4, 8)), rng(2).standard_normal((3, 8)), rng(3).standard_normal((4, 3))
    weight = StepLinear.quantize([w[:1], w[1:]])
    _, saved = ops.linear(x, weight)
    dx, dws = ops.linear_backward([dy[:, :1], dy[:, 1:]], saved, weight, ops.product_bfloat16)
    assert weight.scales is not None
    assert_close(dx, ops.round_bfloat16(dy * weight.scales) @ weight.values)
    rescaled = ops.round_bfloat16(saved.x / saved.x_quant_scale)
    assert_close(np.concatenate(dws), ops.round_bfloat16(dy).T @ rescaled)


@pytest.mark.parametrize("mix", [1.0, 0.25])
def test_straight_through(mix):
    """dX = dY W_q and dW = dY^T X_q with the values that the forward pass multiplied."""
    x, dy = rng(1).standard_normal((4, 8)), rng(3).standard_normal((4, 5))
    masters = [rng(2).standard_normal((3, 8)), 3 * rng(4).standard_normal((2, 8))]
    weight = StepLinear.quantize(masters, mix)
    ys, saved = ops.linear(x, weight)
    w_q, x_q = [], []
    for w in masters:
        s = np.abs(w).mean()
        w_q.append(w + mix * (np.clip(np.rint(w / s), -1, 1) * np.float32(s) - w))
    for row in x:
        a = 127 / np.abs(row).max()
        x_q.append(row + mix * (np.rint(row * a) / a - row))
    w_q, x_q = np.concatenate(w_q), np.array(x_q)
    np.testing.assert_allclose(np.concatenate(ys, axis=1), x_q @ w_q.T, rtol=1e-9)
    dx, dws = ops.linear_backward([dy[:, :3], dy[:, 3:]], saved, weight)
    np.testing.assert_allclose(dx, dy @ w_q, rtol=1e-9)
    np.testing.assert_allclose(np.concatenate(dws), dy.T @ x_q, rtol=1e-9)


def test_rope():
    q, dy = rng(1).standard_normal((3, 2, 4)), rng(2).standard_normal((3, 2, 4))
    rope = StretchedRope(rope_type="yarn", factor=4.0, original_max_position_embeddings=8, attention_factor=1.3)
    tables = rope.tables(np.arange(3), 4, np.float64)
    assert_close(ops.rope_backward(dy, *tables), numeric(lambda q: layers.apply_rope(q, *tables), q, dy))


@settings(max_examples=12)
@given(
    tokens=st.integers(1, 9),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    window=st.sampled_from([None, 1, 2, 5]),
    block=st.sampled_from([1, 4, 64]),
)
def test_attention(tokens, kv_heads, group, window, block):
    q = rng(1).standard_normal((tokens, kv_heads * group, 2))
    k, v = (rng(seed).standard_normal((tokens, kv_heads, 2)) for seed in (2, 3))
    dz = rng(4).standard_normal(q.shape)

    def of(q, k, v):  # the reference's functions, token by token
        z = []
        for i in range(tokens):
            seen = slice(0 if window is None else max(0, i + 1 - window), i + 1)
            pattern = layers.softmax(layers.attention_scores(q[i], k[seen]))
            z.append(layers.attention_values(pattern, v[seen]))
        return np.array(z)

    before, ops.QUERY_BLOCK = ops.QUERY_BLOCK, block
    try:
        z, patterns = ops.attention(q, k, v, window)
        dq, dk, dv = ops.attention_backward(dz, q, k, v, patterns, window)
    finally:
        ops.QUERY_BLOCK = before
    np.testing.assert_allclose(z, of(q, k, v), rtol=1e-12)
    assert_close(dq, numeric(lambda q: of(q, k, v), q, dz))
    assert_close(dk, numeric(lambda k: of(q, k, v), k, dz))
    assert_close(dv, numeric(lambda v: of(q, k, v), v, dz))


@pytest.mark.parametrize("activation", layers.ACTIVATIONS)
def test_gate(activation):
    gate, up, dy = rng(1).standard_normal((3, 4, 6))
    d_gate, d_up = ops.gated_backward(dy, gate, up, activation)
    assert_close(d_gate, numeric(lambda gate: layers.gated(gate, up, activation), gate, dy))
    assert_close(d_up, numeric(lambda up: layers.gated(gate, up, activation), up, dy))


def test_a_gate_without_a_gradient_is_an_error():
    with pytest.raises(ConfigError, match="no gradient of 'swiglu'"):
        ops.gated_backward(*np.ones((3, 1, 1)), "swiglu")


def test_cross_entropy():
    logits, targets = 3 * rng(1).standard_normal((4, 7)), np.array([0, 6, 3, 3])

    def losses(logits):
        return ops.cross_entropy(logits, targets)[0]

    exact = -np.log(np.exp(logits)[np.arange(4), targets] / np.exp(logits).sum(axis=1))
    np.testing.assert_allclose(losses(logits), exact)
    gradient = ops.cross_entropy_backward(ops.cross_entropy(logits, targets)[1], targets, 0.25)
    assert_close(gradient, numeric(lambda logits: losses(logits).mean(keepdims=True), logits, np.ones(1)))


def test_soft_cross_entropy():
    logits, teacher = 3 * rng(1).standard_normal((4, 7)), 3 * rng(2).standard_normal((4, 7))
    losses, gradient = distil.soft_cross_entropy(logits, teacher, 2.5)
    p, q = (np.exp(x / 2.5) / np.exp(x / 2.5).sum(axis=1, keepdims=True) for x in (teacher, logits))
    np.testing.assert_allclose(losses, (p * np.log(p / q)).sum(axis=1))
    assert_close(
        gradient, numeric(lambda x: distil.soft_cross_entropy(x, teacher, 2.5)[0].sum(keepdims=True), logits, 1.0)
    )
    np.testing.assert_allclose(distil.soft_cross_entropy(teacher, teacher, 2.5)[0], 0, atol=1e-12)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_relations(heads):
    states, other = rng(1).standard_normal((5, 2, 4)), rng(2).standard_normal((5, 2, 8))
    teacher, _ = distil.relation(other, heads)
    loss, gradient = distil.relation_loss(states, teacher)
    assert loss > 0
    assert_close(gradient, numeric(lambda x: np.array([distil.relation_loss(x, teacher)[0]]), states, np.ones(1)))
    assert distil.relation_loss(other, teacher)[0] == pytest.approx(0, abs=1e-12)
