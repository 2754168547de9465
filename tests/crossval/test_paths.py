"""Execution paths: all agree as they are; a mistake in one of them is noticed, wherever `generate` passes."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from helpers import GOLDEN, model

import bitnet_ref
from bitnet_ref.backends import choose_backend, paged_cache
from bitnet_ref.backends.cpu import backend as cpu_backend
from bitnet_ref.backends.cpu import kernels, replay
from bitnet_ref.crossval import paths, self_check
from bitnet_ref.crossval.paths import check_paths
from bitnet_ref.generation import sampling, score, sequence
from bitnet_ref.reference.config import RopeConfig

cython_only = pytest.mark.skipif(cpu_backend._cpu is None, reason="the extension is not built")
TOKENS = self_check.read_answers()["tokens"]


def failed(name="cython"):
    """The paths that fail for that backend on the shipped model."""
    make = partial(choose_backend, name, threads=2)
    checks = check_paths(make, model("storyteller"), TOKENS[:24], quick=name == "numpy")
    return [check.path for check in checks if not check.passed]


def failed_answers(name):
    return [check.path for check in self_check.check_answers(bitnet_ref.load(backend=name)) if not check.passed]


@pytest.mark.slow
@pytest.mark.skipif(bitnet_ref.available_backends()["cupy"] is not None, reason="no card, and no emulated one")
def test_every_path_agrees_on_cupy():
    """The other backends: tests/cli/test_doctor_command.py."""
    check = self_check.check_backend("cupy", 2)
    assert check.passed, [each for each in check.paths if not each.passed]
    assert {"blocks", "replayed", "recorded"} <= {each.path for each in check.paths}
    assert all(each.compared > 0 for each in check.paths)


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["bitnet-packed-offline", "llama-dense", "mistral-dense-window8", "rope-dynamic"])
def test_every_path_of_other_models_agrees(case):
    reference = model(GOLDEN / case)
    tokens = [i % reference.config.vocab_size for i in TOKENS]
    checks = list(check_paths(partial(choose_backend, "auto", threads=2), reference, tokens))
    assert len(checks) > 12
    assert [check for check in checks if not check.passed] == []


@pytest.mark.thorough
@cython_only
def test_another_gate_in_the_fused_block(monkeypatch):
    """What doctor and crossval did not see when generate had a path of its own."""
    monkeypatch.setattr(kernels, "GATES", {"relu2": 2, "silu": 1})
    assert "blocks" in failed()


@pytest.mark.thorough
@cython_only
def test_drawn_steps_by_another_rule(monkeypatch):
    """Steps in a row that leave out top_k."""
    play = replay.KernelStep.play_greedy

    def unlimited(self, cfg, embedding, tables, run):
        if run.draws is not None:
            run = replace(run, draws=replace(run.draws, rules=run.draws.rules * [1, 0, 1, 1]))
            run.draws.rules[:, 2] = 1
        return play(self, cfg, embedding, tables, run)

    monkeypatch.setattr(replay.KernelStep, "play_greedy", unlimited)
    assert failed() == ["drawn steps"]


@pytest.mark.thorough
@cython_only
def test_greedy_steps_with_the_angles_of_the_position_before(monkeypatch):
    play = replay.KernelStep.play_greedy

    def shifted(self, cfg, embedding, tables, run):
        return play(self, cfg, embedding, [np.roll(table, 1, axis=1) for table in tables], run)

    monkeypatch.setattr(replay.KernelStep, "play_greedy", shifted)
    problems = failed()
    assert "greedy steps" in problems
    assert not any(path.startswith(("ops", "blocks", "replayed")) for path in problems)


@pytest.mark.thorough
@cython_only
def test_a_score_of_the_wrong_token(monkeypatch):
    right = score._log_probabilities
    monkeypatch.setattr(score, "_log_probabilities", lambda rows, targets: right(rows, np.roll(targets, 1)))
    assert failed() == ["scores"]


@pytest.mark.thorough
@cython_only
def test_a_prompt_whose_scores_belong_to_the_token_before(monkeypatch):
    def shift(self, logits):
        self.scored += 1
        self._prompt_logprobs.add(int(self._ids[self.scored - 1]), logits, None)

    monkeypatch.setattr(sequence.Continuation, "score", shift)
    assert failed() == ["text, engine, prompt scored"]


@pytest.mark.thorough
@cython_only
def test_a_replayed_step_that_keeps_its_positions(monkeypatch):
    fill = replay.KernelStep.fill

    def stale(self, batch, x, tables):
        positions = self._batch.positions.copy()
        fill(self, batch, x, tables)
        if self.is_recorded:
            self._batch.positions[:] = positions

    monkeypatch.setattr(replay.KernelStep, "fill", stale)
    problems = failed()
    assert "replayed, decoding" in problems
    assert not any(path.startswith("blocks") for path in problems)


@pytest.mark.thorough
@cython_only
def test_a_screen_that_loses_a_row(monkeypatch):
    right = cpu_backend.surviving_rows
    monkeypatch.setattr(cpu_backend, "surviving_rows", lambda *args: right(*args)[:-1])
    assert "screened head" in failed()


@pytest.mark.thorough
def test_pages_in_another_order(monkeypatch):
    right = paged_cache.PagedKVCache.pages_of
    monkeypatch.setattr(paged_cache.PagedKVCache, "pages_of", lambda *args: right(*args)[..., ::-1])
    assert "ops, pages" in failed("numpy")


@pytest.mark.thorough
def test_a_narrow_cache_that_truncates(monkeypatch):
    def truncate(x, dtype):
        return (np.trunc(x * 4) / 4).astype(dtype), None

    right = paged_cache.narrow
    monkeypatch.setattr(paged_cache, "narrow", lambda x, t: truncate(x, t) if t == np.float16 else right(x, t))
    if cpu_backend._cpu is not None:
        assert failed() == ["cache float16"]


@pytest.mark.thorough
def test_a_mistake_that_the_reference_shares(monkeypatch):
    """RoPE's tables serve every backend on the CPU: only the known answers can tell."""
    right = RopeConfig.frequencies
    monkeypatch.setattr(RopeConfig, "frequencies", lambda *args: right(*args) * 1.01)
    assert "answers: logits" in failed_answers("auto")


@pytest.mark.thorough
def test_a_mistake_in_sampling(monkeypatch):
    monkeypatch.setattr(sampling, "count_min_p", lambda scaled, min_p: len(scaled))
    assert "answers: sampled texts" in failed_answers("numpy")


def test_a_check_that_breaks_fails_alone():
    def broken():
        raise ZeroDivisionError("no")

    first, second = paths.run_checks([("a", broken), ("b", lambda: (1, None, "fine"))])
    assert (first.passed, first.detail, second.passed) == (False, "ZeroDivisionError: no", True)


@pytest.mark.thorough
@pytest.mark.parametrize("count", [1, 2, 3])
def test_short_prompts_have_every_path(count):
    reference = model(GOLDEN / "bitnet-packed-offline")
    checks = check_paths(lambda **settings: choose_backend("numpy", **settings), reference, [5, 9, 7][:count])
    assert [(each.path, each.detail) for each in checks if not each.passed] == []
