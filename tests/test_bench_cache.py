"""measure_cache: what float16 and int8 caches cost on a text, and `bitnet-ref bench cache`."""

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import GOLDEN, model, rng

import bitnet_ref
from bitnet_ref.backends.paged_cache import CACHE_DTYPES
from bitnet_ref.cli import cli
from bitnet_ref.crossval.precision import measure_cache
from bitnet_ref.errors import GenerationError, ShapeError
from bitnet_ref.reference.cache import TokenBatch


def test_the_error_of_each_dtype():
    """On 70 tokens, two chunks: against whole passes, compared here in the plainest way."""
    m = model("storyteller", "cython" if bitnet_ref.available_backends()["cython"] is None else "numpy")
    ids = rng(4).integers(3, m.config.vocab_size, 70).tolist()
    found = measure_cache(m, ids)
    assert (found.tokens, [error.dtype for error in found.errors]) == (70, list(CACHE_DTYPES))
    exact, half, eighth = found.errors
    assert (exact.max_logit_error, exact.kl_mean, exact.kl_max, exact.greedy_agreement) == (0, 0, 0, 1)
    assert exact.bytes_per_token == 2 * half.bytes_per_token > 2 * eighth.bytes_per_token
    logits = m.logits(ids)
    for error in (half, eighth):
        other = m.run(TokenBatch.of([(0, 0, ids)]), m.new_cache(1, 70, dtype=error.dtype)).all()
        p, q = (
            np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(-1, keepdims=True) for x in (logits, other)
        )
        kl = (p * np.log(p / q)).sum(-1)
        assert error.max_logit_error == pytest.approx(np.abs(logits - other).max())
        assert error.kl_mean == pytest.approx(kl.mean(), rel=1e-6)
        assert error.kl_max == pytest.approx(kl.max(), rel=1e-6)
        assert error.greedy_agreement == pytest.approx((logits.argmax(-1) == other.argmax(-1)).mean())
        assert 0 < error.kl_mean < 0.05


def test_a_text_is_cut_to_the_context_and_may_not_be_empty():
    m = model("storyteller")
    assert measure_cache(m, "Once upon a time", ["int8"]).errors[0].dtype == "int8"
    assert (
        measure_cache(model(GOLDEN / "llama-dense"), [1] * 5000, []).tokens
        == model(GOLDEN / "llama-dense").config.context_length
    )
    with pytest.raises(GenerationError, match="no tokens"):
        measure_cache(m, [])
    with pytest.raises(ShapeError, match="cache dtype"):
        measure_cache(m, "A", ["int4"])


def test_bench_cache_and_the_option():
    runner = CliRunner()
    result = runner.invoke(cli, ["bench", "cache", "--text", "The old man and the sea", "--backend", "numpy"])
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines()[-3:]] == list(CACHE_DTYPES)
    arguments = ["generate", "The rabbit", "--max-tokens", "2", "--backend", "numpy", "--cache-dtype"]
    result = runner.invoke(cli, [*arguments, "int8"])
    assert "int8 cache of 1.6 KB per token" in result.stderr
    assert runner.invoke(cli, [*arguments, "int4"]).exit_code == 2
