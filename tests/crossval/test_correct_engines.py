"""Correct float32 engines, of which a part of a trace is shown, agree and are given no cause."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "crossval"))

import correct_engines

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


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 500, 50))
def test_many_correct_engines_agree(first):
    wrong = [o for seed in range(first, first + 50) if (o := correct_engines.outcome(seed)).wrong]
    assert wrong == []
