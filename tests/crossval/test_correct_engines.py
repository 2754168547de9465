"""Correct float32 engines, of which a part of a trace is shown, agree and are given no cause."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "crossval"))

import correct_engines
from planted_models import BASE, SILU, tensors_for, write

import bitnet_ref
from bitnet_ref.backends.observe import observe
from bitnet_ref.backends.record import Recorder
from bitnet_ref.backends.run import run
from bitnet_ref.crossval.compare import compare
from bitnet_ref.crossval.explain.near_halves import follow_flips
from bitnet_ref.reference.cache import TokenBatch

# Draws that were accused once: a flip of an earlier token whose own result agrees, activations that float32 angles
# carry over a half, flips in many tokens one after another.
MENDED = (64, 121, 44)
SAMPLE = (8, 10, 16, 29, 36)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [*SAMPLE, *MENDED])
def test_a_correct_engine_agrees(seed):
    outcome = correct_engines.outcome(seed)
    assert not outcome.wrong, outcome
    assert not outcome.cause, outcome


def test_a_value_of_all_heads_that_share_it_flips_in_each(tmp_path):
    """Without a sub-norm the first token's z is v in four heads, and half of the largest value is at 63.5."""
    config = {**BASE, **SILU, "num_key_value_heads": 1}
    model = bitnet_ref.load(write(tmp_path / "m", config, tensors_for(config)), backend="numpy", threads=1)
    engine = correct_engines.CorrectEngine(correct_engines.Sums(8, False), None, False, 1, 0)
    implied = []
    for token in range(config["vocab_size"]):
        recorder, batch = Recorder(engine, model.config), TokenBatch.of([(0, 0, np.array([token]))])
        run(observe(engine, recorder), model.weights, model.config, batch, model.new_cache(1, 1))
        shown = {name: x for name, x in recorder.seen.items() if correct_engines.SHOWN["stream"](name)}
        trace, right = correct_engines.Shown(shown), model.run_with_cache([token])[1]
        found = follow_flips(model, [token], trace, compare(right, trace, model.config, [token]))
        assert found.agrees, found.verdict
        implied.append(found.implied_flips)
    assert max(implied) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 500, 50))
def test_many_correct_engines_agree(first):
    wrong = [o for seed in range(first, first + 50) if (o := correct_engines.outcome(seed)).wrong]
    assert wrong == []
