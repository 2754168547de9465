"""The whole campaign: `pytest -m slow -n0 -s tests/campaigns/test_many_drawn_mistakes.py`, an hour and more."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "crossval"))

import drawn_mistakes

pytestmark = pytest.mark.slow


def test_500_drawn_mistakes():
    outcomes = [drawn_mistakes.outcome(seed, budget_s=60) for seed in range(500)]
    named = sum(outcome.cause_right for outcome in outcomes)
    print(f"{named} of {len(outcomes)} causes named; missed: {[o.seed for o in outcomes if not o.cause_right]}")
    assert all(outcome.first_right for outcome in outcomes)
    assert named >= 450


def test_500_drawn_mistakes_from_thin_traces():
    outcomes = [drawn_mistakes.outcome(seed, is_thin=True, budget_s=60) for seed in range(500)]
    named = sum(outcome.cause_right for outcome in outcomes)
    print(f"{named} of {len(outcomes)} causes named from hook_resid_post and logits")
    assert named >= 250


def test_no_correct_engine_has_a_cause():
    assert [alarm for seed in range(200) if (alarm := drawn_mistakes.false_alarm(seed)) is not None] == []
