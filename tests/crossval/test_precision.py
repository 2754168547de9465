"""What 16 bits cost: the measure itself, and the command that prints it."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import GOLDEN, model, rng

from bitnet_ref.backends import cuda
from bitnet_ref.cli import cli
from bitnet_ref.crossval import measure_precision, precision
from bitnet_ref.errors import ConfigError, GenerationError

CASE = GOLDEN / "llama-bf16-biases"
TOKENS = rng(5).integers(1, 90, 66).tolist()  # more than a step: the prompt goes through `matmul_16`
needs_cuda = pytest.mark.skipif(cuda.why_unavailable() is not None, reason=str(cuda.why_unavailable()))


def test_a_backend_that_is_the_reference_is_exact():
    found = measure_precision(model(CASE), "numpy", ["float32"], TOKENS)
    for error in found.errors:
        assert (error.max_logit_error, error.mean_logit_error, error.greedy_agreement) == (0, 0, 1)
        assert max(error.kl_mean, error.kl_max) < 1e-12
    assert [error.way for error in found.errors] == ["prompt", "steps"]
    assert found.same_tokens == {"float32": found.continued}
    assert (found.tokens, found.device) == (66, None)


@pytest.mark.thorough
@needs_cuda
def test_errors_grow_as_bits_go(monkeypatch):
    """bfloat16 some eight times as far as float16, and the figures are those of the logits."""
    monkeypatch.setattr(precision, "CONTINUED", 4)
    found = measure_precision(model(CASE), "cupy", ["float16", "bfloat16"], TOKENS)
    by = {(error.dtype, error.way): error for error in found.errors}
    assert len(by) == 4
    for way in ("prompt", "steps"):
        half, brain = by["float16", way], by["bfloat16", way]
        assert 1e-6 < 2 * half.mean_logit_error < brain.mean_logit_error < 40 * half.mean_logit_error
        assert brain.max_logit_error > brain.mean_logit_error
        assert brain.kl_max > brain.kl_mean > half.kl_mean > 0
    exact = model(CASE).logits(TOKENS)
    logits = model(CASE, "cupy", dtype="float16").logits(TOKENS)
    assert by["float16", "prompt"].max_logit_error == np.abs(exact - logits).max()
    assert found.largest_logit == np.abs(exact).max()


@pytest.mark.thorough
@needs_cuda
def test_the_command():
    arguments = ["crossval", "precision", str(CASE), "--dtype", "bfloat16", "--tokens", "1,17,5,9"]
    shown = CliRunner().invoke(cli, arguments)
    assert shown.exit_code == 0, shown.output
    assert "same greedy choice" in shown.stdout
    assert shown.stdout.count("bfloat16") == 2
    found = json.loads(CliRunner().invoke(cli, [*arguments, "--json"]).stdout)
    assert [error["way"] for error in found["errors"]] == ["prompt", "steps"]
    assert found["tokens"] == 4


def test_what_it_refuses(monkeypatch):
    with pytest.raises(GenerationError, match="two tokens or more, got 1"):
        measure_precision(model(CASE), "numpy", ["float32"], [1])
    with pytest.raises(ConfigError, match="computes in float32"):
        measure_precision(model(CASE), "numpy", ["float16"], [1, 2])
    monkeypatch.setattr("bitnet_ref.backends.cuda.why_unavailable", lambda index=0: "there is no GPU")
    assert CliRunner().invoke(cli, ["crossval", "precision", str(CASE), "--tokens", "1,2"]).exit_code == 4
    assert CliRunner().invoke(cli, ["crossval", "precision", "--tokens", "1,2", "--prompt", "a"]).exit_code == 2
