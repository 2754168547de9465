"""NaN and Inf are never lost on the way: an operation passes them on or raises, in the rows that have them only."""

import numpy as np
import pytest
from helpers import GOLDEN, call, model, rng

from bitnet_ref.backends.paged_cache import CacheSpec
from bitnet_ref.errors import NumericsError
from bitnet_ref.reference.cache import TokenBatch
from bitnet_ref.reference.config import RopeConfig
from bitnet_ref.reference.weights import DenseWeight, Norm

N, K, BAD_ROW = 4, 37, 2
VALUES = [np.nan, np.inf, -np.inf]


def with_bad(value, *shape, at=0):
    x = rng(*shape).standard_normal(shape).astype(np.float32)
    x[BAD_ROW].reshape(-1)[at] = value
    return x


def check(compute, clean_rows=(0, 1, 3)):
    """The bad row shows it, or the call raises; the other rows are finite."""
    with np.errstate(all="ignore"):
        try:
            y = compute()
        except NumericsError:
            return
    assert not np.isfinite(y[BAD_ROW]).all()
    assert np.isfinite(y[list(clean_rows)]).all()


@pytest.mark.parametrize("at", [0, 17, K - 1])
@pytest.mark.parametrize("value", VALUES)
def test_rows(be, value, at):
    x, good = with_bad(value, N, K, at=at), np.ones((N, K), np.float32)
    check(lambda: call(be, "rms_norm", x, Norm(good[0], 1e-5)))
    check(lambda: call(be, "gated", good, x, "relu2"))
    check(lambda: call(be, "gated", good, x, "silu"))
    if value != -np.inf:  # relu(-inf) is 0, and the limit of silu is too
        check(lambda: call(be, "gated", x, good, "relu2"))
        check(lambda: call(be, "gated", x, good, "silu"))
    for dtype in (np.float32, np.float16):
        w = DenseWeight(np.ones((5, K), dtype))
        check(lambda w=w: call(be, "linear", x, w))
        check(lambda w=w: call(be, "lm_head", x, w))


@pytest.mark.parametrize("value", VALUES)
def test_weights(be, value):
    w = np.ones((5, K), np.float32)
    w[3, 20] = value
    with np.errstate(all="ignore"):
        y = call(be, "linear", np.ones((N, K), np.float32), DenseWeight(w))
    assert not np.isfinite(y[:, 3]).any()
    assert np.isfinite(y[:, [0, 1, 2, 4]]).all()


@pytest.mark.parametrize("value", VALUES)
def test_rope(be, value):
    q, k = with_bad(value, N, 3, 8, at=13), np.ones((N, 1, 8), np.float32)
    tables = call(be, "rope_tables", np.arange(N), RopeConfig(), 8)
    check(lambda: call(be, "rope", q, k, *tables)[0])


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("value", VALUES)
def test_attention(be, value, where):
    """A bad query shows in its own token; a bad key or value also in those after it, which see it."""
    config = model(GOLDEN / "llama-dense").config
    heads, kv_heads, head = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    q, k, v = (
        rng(i).standard_normal((N, n, head)).astype(np.float32) for i, n in enumerate((heads, kv_heads, kv_heads))
    )
    {"q": q, "k": k, "v": v}[where][BAD_ROW, 0, 5] = value
    batch = TokenBatch.of([(0, 0, [0] * N)])
    cache = be.new_cache(config, CacheSpec(slots=1, capacity=N))
    call(be, "append", cache, 0, batch, k, v)
    with np.errstate(all="ignore"):
        z = call(be, "attention", q, cache, batch, 0, None)
    assert np.isfinite(z[:BAD_ROW]).all()
    if where == "k" and not np.isnan(value):
        return  # a score of -inf is a pattern of 0, as it would be in the limit
    assert not np.isfinite(z[BAD_ROW]).all()
    for later in z[BAD_ROW + 1 :]:
        assert np.isfinite(later).all() == (where == "q")


def test_attention_scores_that_overflow(be):
    """q k is beyond float32: inf - inf is no pattern."""
    config = model(GOLDEN / "llama-dense").config
    batch = TokenBatch.of([(0, 0, [0, 0])])
    cache = be.new_cache(config, CacheSpec(slots=1, capacity=2))
    ones = np.ones((2, config.num_key_value_heads, config.head_dim), np.float32)
    call(be, "append", cache, 0, batch, ones * 1e30, ones)
    with np.errstate(all="ignore"):
        z = call(
            be,
            "attention",
            np.full((2, config.num_attention_heads, config.head_dim), 1e30, np.float32),
            cache,
            batch,
            0,
            None,
        )
    assert np.isnan(z).all()
