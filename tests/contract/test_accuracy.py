"""Float operations: a backend's error against float64 is at most twice that of the float32 NumPy reference."""

import numpy as np
import pytest
from helpers import GOLDEN, call, golden, model, prepared, random_blocks, random_ternary, rng

from bitnet_ref.backends.paged_cache import CacheSpec
from bitnet_ref.crossval.tolerances import EPSILON, FLOOR_IN_EPSILONS
from bitnet_ref.families.blocks import BLOCK_TYPES
from bitnet_ref.families.groups import GroupTernaryWeight
from bitnet_ref.reference.cache import TokenBatch
from bitnet_ref.reference.config import RopeConfig
from bitnet_ref.reference.quantization import pack_ternary
from bitnet_ref.reference.weights import DenseWeight, Norm


def check(mine, plain, exact):
    assert mine.dtype == np.float32
    assert mine.shape == exact.shape
    floor = FLOOR_IN_EPSILONS * EPSILON * np.abs(exact).max()
    assert np.abs(mine - exact).max() <= 2 * np.abs(plain - exact).max() + floor


def both(be, reference, in_double, op, *arrays):
    """The op on float32 arrays with the backend and the reference, and on the same values in float64."""
    wide = [a.astype(np.float64) if isinstance(a, np.ndarray) and a.dtype == np.float32 else a for a in arrays]
    check(op(be, *arrays), op(reference, *arrays), op(in_double, *wide))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 64, 100, 2560, 6912])
def test_rms_norm(be, reference, in_double, size):
    x = (rng(size).standard_normal((4, size)) * np.array([[1e-3], [1.0], [1e4], [0.0]])).astype(np.float32)
    weight = rng(size, 1).standard_normal(size).astype(np.float32)
    both(be, reference, in_double, lambda b, x, w: call(b, "rms_norm", x, Norm(w, 1e-5)), x, weight)


@pytest.mark.parametrize("activation", ["relu2", "silu"])
def test_gated(be, reference, in_double, activation):
    gate = np.concatenate([rng(1).standard_normal(200) * 5, np.linspace(-120, 120, 57)])[None].astype(np.float32)
    up = rng(2).standard_normal(gate.shape).astype(np.float32)
    both(be, reference, in_double, lambda b, g, u: call(b, "gated", g, u, activation), gate, up)


@pytest.mark.parametrize("head_dim", [2, 6, 16, 128])
def test_rope(be, reference, in_double, head_dim):
    generator = rng(head_dim)
    q = generator.standard_normal((5, 6, head_dim)).astype(np.float32)
    k = generator.standard_normal((5, 2, head_dim)).astype(np.float32)
    positions = np.array([0, 1, 17, 4095, 100000])
    rope = RopeConfig(theta=500000.0)

    def op(b, q, k):
        return np.concatenate(call(b, "rope", q, k, *call(b, "rope_tables", positions, rope, head_dim)), axis=1)

    both(be, reference, in_double, op, q, k)


@pytest.mark.parametrize(("n", "out", "k"), [(1, 7, 5), (3, 50, 33), (5, 300, 256), (2, 9, 2560)])
def test_dense_linear_and_lm_head(be, reference, in_double, n, out, k):
    x = rng(n, out).standard_normal((n, k)).astype(np.float32)
    w = DenseWeight(rng(out, k).standard_normal((out, k)).astype(np.float32))
    both(be, reference, in_double, lambda b, x: call(b, "linear", x, w), x)
    both(be, reference, in_double, lambda b, x: call(b, "lm_head", x, w), x)


@pytest.mark.sample(3)
@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize(
    ("n", "out", "k", "group"),
    [
        (1, 300, 2560, 128),
        (5, 70, 512, 64),
        (13, 60, 768, 256),
        (2, 40, 200, 48),
        (3, 50, 1000, 1000),
        (2, 1300, 300, 128),
    ],
)
def test_ternary_by_groups(be, reference, in_double, n, out, k, group, outliers):
    """On the CPU without the floor: the reference has one rounding, the last."""
    generator = rng(n, k, group)
    x = generator.standard_normal((n, k)).astype(np.float32)
    if outliers:
        x[:, generator.integers(0, k, 4)] *= 1000
    scales = generator.uniform(0.01, 0.1, (out, -(-k // group))).astype(np.float16)
    plain = GroupTernaryWeight(pack_ternary(random_ternary(generator, out, k)), k, scales, group)
    mine, theirs, exact = (
        call(b, "linear", x.astype(b.dtype), *prepared(b, plain)) for b in (be, reference, in_double)
    )
    check(mine, theirs, exact)
    if be.name != "cupy":  # whose sums are in float32 within 16 columns
        assert np.abs(mine - exact).max() <= 2 * np.abs(theirs - exact).max()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dense_weights_of_every_dtype(be, dtype):
    """A narrow matrix is widened, not the activation narrowed."""
    from ml_dtypes import bfloat16

    w = rng(3).standard_normal((21, 19)).astype(bfloat16 if dtype == "bfloat16" else dtype)
    x = rng(4).standard_normal((3, 19)).astype(np.float32)
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    y = call(be, "linear", x, DenseWeight(w))
    np.testing.assert_allclose(y, exact, rtol=0, atol=1e-5)
    if be.name != "cupy":  # whose kernels for 16 bits sum in another order; the others widen exactly
        np.testing.assert_array_equal(y, call(be, "linear", x, DenseWeight(w.astype(np.float32))))
    rows = call(be, "embed", DenseWeight(w), np.array([20, 0, 0]))
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows, w.astype(np.float32)[[20, 0, 0]])


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_dense_weights_in_blocks(be, reference, in_double, kind):
    """Within the contract, a token's bits the same in any company; but by AMX's tiles, which have no Q6_K, those of the
    same matrix in float32, for the weights are widened exactly."""
    generator = rng(6, len(kind))
    by_tiles = getattr(be, "simd", None) == "amx" and kind != "Q6_K"
    for out, k in ((21, 2 * BLOCK_TYPES[kind].values), (4, 768), (35, 512)):
        w = random_blocks(kind, generator, out, k)
        wide = DenseWeight(w.array)
        x = generator.standard_normal((40, k)).astype(np.float32)
        x[:20, generator.integers(0, k, 2)] *= 1000
        y = call(be, "linear", x, w)
        for n in (1, 2, 5, 6, 7, 20):
            np.testing.assert_array_equal(call(be, "linear", x[:n], w), y[:n])
        if not by_tiles:
            np.testing.assert_array_equal(y, call(be, "linear", x, wide))
        for some in (x[:20], x[20:]):
            both(be, reference, in_double, lambda b, x, w=w: call(b, "linear", x, w), some)
        rows = call(be, "embed", w, np.array([3, 0, 0]))
        np.testing.assert_array_equal(rows, wide.array[[3, 0, 0]])


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_attention(be, reference, in_double, window):
    config = model(GOLDEN / "llama-dense").config
    generator = rng(5)
    batch = TokenBatch.of([(0, 0, [0] * 10), (1, 0, [0] * 4)])
    shape = (len(batch), config.num_key_value_heads, config.head_dim)
    k, v = (generator.standard_normal(shape).astype(np.float32) for _ in range(2))
    q = (3 * generator.standard_normal((len(batch), config.num_attention_heads, config.head_dim))).astype(np.float32)

    def op(b, q, k, v):
        cache = b.new_cache(config, CacheSpec(slots=2, capacity=10))
        call(b, "append", cache, 0, batch, k, v)
        return call(b, "attention", q, cache, batch, 0, window)

    both(be, reference, in_double, op, q, k, v)
    # and against attention written with a mask, all heads and tokens of a sequence at once
    for slot in (0, 1):
        rows = batch.slots == slot
        group = config.num_attention_heads // config.num_key_value_heads
        keys, values = (np.repeat(a[rows].astype(np.float64), group, axis=1) for a in (k, v))
        scores = np.einsum("qhd,khd->hqk", q[rows].astype(np.float64), keys) / np.sqrt(config.head_dim)
        distance = np.arange(rows.sum())[:, None] - np.arange(rows.sum())
        scores[:, (distance < 0) | (distance >= (window or 1000))] = -np.inf
        pattern = np.exp(scores - scores.max(-1, keepdims=True))
        expected = np.einsum("hqk,khd->qhd", pattern / pattern.sum(-1, keepdims=True), values)
        np.testing.assert_allclose(op(be, q, k, v)[rows], expected, rtol=0, atol=1e-5)


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", ["bitnet-packed-offline", "llama-dense", "mistral-dense-window8", "rope-yarn"])
def test_whole_models(backend_name, case):
    tokens = golden(case)["tokens"]
    exact = model(GOLDEN / case, "numpy", dtype="float64").logits(tokens)
    check(model(GOLDEN / case, backend_name).logits(tokens), model(GOLDEN / case, "numpy").logits(tokens), exact)
