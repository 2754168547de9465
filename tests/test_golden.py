"""Tiny checkpoints against the logits and hidden states that Hugging Face transformers computes for them."""

import json

import numpy as np
import pytest
from helpers import GOLDEN, GOLDEN_CASES, golden, model

import bitnet_ref
from bitnet_ref.formats.hf.config import parse_hf_config, read_hf_config
from bitnet_ref.reference.cache import TokenBatch

pytestmark = pytest.mark.quick_emulated

# Ternary cases were chosen to have no activation near a rounding boundary (data/make_golden.py), so two correct float32
# engines differ by float rounding alone: about 1e-5 here. 2e-4 leaves room for another order of summation and is far
# below the 0.1 of a single int8 that went the other way.
TOLERANCE = 2e-4


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_float32_logits_and_hidden_states(case, backend_name):
    expected = golden(case)
    m = model(GOLDEN / case, backend_name)
    logits, seen = m.run_with_cache(expected["tokens"], names_filter=["*.hook_resid_pre", "ln_final.hook_normalized"])
    layers = m.config.num_hidden_layers
    assert logits.dtype == np.float32
    for i in range(layers):
        hidden = seen[f"blocks.{i}.hook_resid_pre"]
        np.testing.assert_allclose(hidden, expected[f"hidden.{i}"], rtol=0, atol=TOLERANCE, err_msg=f"hidden.{i}")
    np.testing.assert_allclose(seen["ln_final.hook_normalized"], expected[f"hidden.{layers}"], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=TOLERANCE)


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_logits_of_every_path(case, backend_name):
    """As a prompt and one token at a time, by each way in which the backend computes a pass."""
    expected, m = golden(case), model(GOLDEN / case, backend_name)
    tokens = expected["tokens"]
    for path in m.backend.paths:
        prompt = m.run(TokenBatch.of([(0, 0, tokens)]), m.new_cache(1, len(tokens)), path=path).all()
        np.testing.assert_allclose(prompt, expected["logits"], rtol=0, atol=TOLERANCE, err_msg=path)
        cache = m.new_cache(1, len(tokens))
        steps = [m.run(TokenBatch.of([(0, i, [token])], [0]), cache, path=path).all() for i, token in enumerate(tokens)]
        np.testing.assert_array_equal(np.concatenate(steps), prompt, err_msg=path)


@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_float64_logits(case):
    expected = golden(case)
    logits = model(GOLDEN / case, "numpy", dtype="float64").logits(expected["tokens"])
    assert logits.dtype == np.float64
    # transformers computes norms, softmax and angles in float32 even in its float64 run
    np.testing.assert_allclose(logits, expected["logits64"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_float32_error_is_rounding_only(case):
    """The float32 run is as near to our float64 run as the oracle's float32 run is to its own."""
    tokens = golden(case)["tokens"]
    in_single = model(GOLDEN / case, "numpy").logits(tokens)
    in_double = model(GOLDEN / case, "numpy", dtype="float64").logits(tokens)
    assert 0 < np.abs(in_single - in_double).max() < 5e-5


@pytest.mark.parametrize("case", [case for case in GOLDEN_CASES if case.startswith("rope-")])
def test_both_spellings_of_rope_mean_the_same(case):
    """make_golden.py has checked that transformers gives equal logits for the two files."""
    folder = GOLDEN / case
    raw = json.loads((folder / "config-other-spelling.json").read_text())
    assert ("rope_parameters" in raw) != ("rope_parameters" in json.loads((folder / "config.json").read_text()))
    config = read_hf_config(folder / "config.json")
    assert parse_hf_config(raw, folder) == config
    assert config.rope.rope_type == case.removeprefix("rope-")


def test_a_single_file_loads_like_its_folder():
    case = "llama-packed-rmsnorm"
    m = bitnet_ref.load(GOLDEN / case / "model.safetensors", backend="numpy")
    expected = model(GOLDEN / case).logits(golden(case)["tokens"])
    np.testing.assert_array_equal(m.logits(golden(case)["tokens"]), expected)
