"""Trials of flips in one pass give the rows that each gives alone."""

import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import model

sys.path.insert(0, str(Path(__file__).parents[2] / "crossval"))

import correct_engines

from bitnet_ref.crossval.compare import View
from bitnet_ref.crossval.explain import flip_trials
from bitnet_ref.crossval.explain.flip_trials import FlipTrials, row_of
from bitnet_ref.crossval.explain.near_halves import _FlipSearch
from bitnet_ref.crossval.explain.variants import Setting
from bitnet_ref.crossval.flips import Flip
from bitnet_ref.crossval.names import INT8, layer_of

LOGITS = "lm_head.hook_out"
SHARED = tuple(f"{part}.{INT8}" for part in ("k_proj", "v_proj", "up_proj"))  # whose flips are those of q and gate


def search_of(name, count):
    """The search of flips in a run of so many tokens, and two flips of each int8 tensor of the run."""
    m = model("storyteller") if name == "storyteller" else correct_engines.model_of(name)
    ids = np.random.default_rng(3).integers(0, m.config.vocab_size, count).tolist()
    right = m.run_with_cache(ids)[1]
    search = _FlipSearch(Setting.of(m, ids), View(right))
    rng, flips = np.random.default_rng(4), []
    names = [each for each in right if each.endswith(INT8) and not each.endswith(SHARED)]
    for each in [*names, *names]:
        token, element = int(rng.integers(count)), int(rng.integers(right[each].shape[1]))
        mine = int(right[each][token, element])
        flips.append(Flip(each, token, element, float(mine), 1.0, mine, mine - 1 if mine > 0 else mine + 1))
    return search, flips


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "until"),
    [
        ("storyteller", LOGITS),
        ("storyteller", "blocks.3.attn.hook_pattern"),
        ("storyteller", "blocks.4.hook_resid_post"),
        ("llama-packed-rmsnorm", LOGITS),
    ],
)
def test_trials_of_one_pass_give_the_rows_of_each_alone(name, until, monkeypatch):
    search, flips = search_of(name, 12)
    run, token = search.run(), 9
    stop = search.order[until]
    trials = [[flip] for flip in flips if flip.token <= token and search.order[flip.name] < stop]
    trials += [[one, *other] for one, other in zip(flips, trials[::-1], strict=False) if one.token <= token]
    trials = [made for made in trials if all(search.order[flip.name] < stop for flip in made)]
    assert len(trials) > 12
    passes = []
    moved = FlipTrials._moved
    monkeypatch.setattr(FlipTrials, "_moved", lambda self, trials: passes.append(len(trials)) or moved(self, trials))
    made_at_once = FlipTrials(search.setting, search.order, run, until, token)
    rows = list(made_at_once.rows(trials))
    assert len(passes) < len(trials) / 3
    base, changed = row_of(until, run.tensors[until], token), 0
    for made, row in zip(trials, rows, strict=True):
        alone = row_of(until, search.trial(run, made, until, token).tensors[until], token)
        np.testing.assert_allclose(row, alone, rtol=0, atol=1e-6 * np.abs(alone).max())
        changed += not np.array_equal(row, base)
    assert changed > len(trials) / 2
    made_at_once.whole = True  # as of a model with states: all tokens are computed in all layers
    for row, again in zip(rows, made_at_once.rows(trials), strict=True):
        np.testing.assert_allclose(row, again, rtol=0, atol=1e-6 * np.abs(row).max())


def test_a_trial_after_flips_begins_with_them():
    search, flips = search_of("storyteller", 12)
    token = 11
    first, second = flips[3], next(flip for flip in flips if layer_of(flip.name) == 2)
    run = search.run()
    before = search.trial(run, [first], LOGITS, token)
    (after,) = FlipTrials(search.setting, search.order, before, LOGITS, token).rows([[second]])
    (both,) = FlipTrials(search.setting, search.order, run, LOGITS, token).rows([[first, second]])
    np.testing.assert_allclose(after, both, rtol=0, atol=1e-6 * np.abs(both).max())


def test_few_trials_are_made_at_once_where_the_cache_is_large(monkeypatch):
    search, flips = search_of("storyteller", 12)
    monkeypatch.setattr(flip_trials, "_CACHE_BYTES", 1)
    run, trials = search.run(), [[flip] for flip in flips[-3:]]
    alone = list(FlipTrials(search.setting, search.order, run, LOGITS, 11).rows(trials))
    monkeypatch.undo()
    np.testing.assert_array_equal(alone, list(FlipTrials(search.setting, search.order, run, LOGITS, 11).rows(trials)))
