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


def judged_first_token(folder, seed, kv_heads, scaling, token, shown, mistake=None):
    """The comparison of an engine that runs one token of a drawn LLaMA without sub-norms, flips followed."""
    config = {**BASE, **SILU, "num_key_value_heads": kv_heads}
    tensors = tensors_for(config, seed=seed)
    model = bitnet_ref.load(write(folder / "m", config, tensors), backend="numpy", threads=1)
    wrong = bitnet_ref.load(write(folder / "w", {**config, **(mistake or {})}, tensors), backend="numpy", threads=1)
    engine = correct_engines.CorrectEngine(correct_engines.Sums(8, False), None, False, scaling, 0)
    recorder, batch = Recorder(engine, wrong.config), TokenBatch.of([(0, 0, np.array([token]))])
    run(observe(engine, recorder), wrong.weights, wrong.config, batch, wrong.new_cache(1, 1))
    show = correct_engines.SHOWN[shown]
    trace = correct_engines.Shown({name: x for name, x in recorder.seen.items() if show(name)})
    right = model.run_with_cache([token])[1]
    largest = [np.abs(x).max() for name, x in right.items() if name.endswith("v_proj.hook_acc_int32")]
    assert any(each % 254 == 0 for each in largest)
    before = compare(right, trace, model.config, [token])
    assert not before.agrees
    return follow_flips(model, [token], trace, before)


TIES = [(9, 1, 1, 35), (13, 2, 0, 52), (47, 4, 1, 48), (56, 4, 1, 61)]  # seed, kv heads, scaling, token


@pytest.mark.sample(2)
@pytest.mark.parametrize("draw", TIES)
def test_a_first_token_with_many_ties_agrees(tmp_path, draw):
    """Its largest accumulator is a multiple of 254, so that up to 27 sizes of its z are on a half."""
    found = judged_first_token(tmp_path, *draw, "stream")
    assert found.agrees, found.verdict
    assert len({abs(flip.before_rounding) for flip in found.flips}) >= 3


@pytest.mark.parametrize("mistake", [{"rms_norm_eps": 2e-5}, {"hidden_act": "relu2"}])
def test_ties_of_the_first_token_hide_no_mistake(tmp_path, mistake):
    found = judged_first_token(tmp_path, *TIES[2], "stream", mistake)
    assert found.verdict.startswith("DIFFERS"), found.verdict


def test_logits_after_ties_of_an_early_layer_are_not_called_wrong(tmp_path):
    """24 sizes in the first layer: what they give cannot be seen through the second layer's roundings."""
    found = judged_first_token(tmp_path, 14, 4, 2, 21, "logits")
    assert found.agrees or found.undecided, found.verdict


def test_one_scale_and_the_last_logits_do_not_accuse_a_right_engine():
    """A number for each token fits flips that the engine did not make: what then differs shows no mistake."""
    model = correct_engines.model_of("bitlinear llama, 12 layers")
    rng = np.random.default_rng([78, 18])
    ids = rng.integers(0, model.config.vocab_size, int(rng.choice([1, 4, 12, 24, 48]))).tolist()
    engine = correct_engines.CorrectEngine(correct_engines.Sums(32, False), 64, True, 0, 18)
    names = ("blocks.8.attn.k_proj.hook_x_scale", "lm_head.hook_out")
    recorder, batch = Recorder(engine, model.config, names), TokenBatch.of([(0, 0, np.asarray(ids))])
    run(observe(engine, recorder), model.weights, model.config, batch, model.new_cache(1, len(ids)))
    scale, logits = (recorder.seen[name] for name in names)
    trace = correct_engines.Shown({names[0]: scale.astype(np.float16), names[1]: logits[-1:].astype(np.float16)})
    before = compare(model.run_with_cache(ids)[1], trace, model.config, ids)
    found = follow_flips(model, ids, trace, before)
    assert not before.agrees
    assert found.agrees or found.undecided, found.verdict


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 500, 50))
def test_many_correct_engines_agree(first):
    wrong = [o for seed in range(first, first + 50) if (o := correct_engines.outcome(seed)).wrong]
    assert wrong == []
