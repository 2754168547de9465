"""Thin traces of a correct float32 engine agree up to rounding; an engine with a mistake does not."""

import json
from dataclasses import replace
from functools import cache

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from helpers import SENTENCES, model

from bitnet_ref.backends import Backend
from bitnet_ref.backends.loaded import LoadedModel
from bitnet_ref.backends.observe import observe
from bitnet_ref.backends.record import Recorder
from bitnet_ref.backends.run import run
from bitnet_ref.cli import cli
from bitnet_ref.crossval.compare import compare
from bitnet_ref.crossval.explain import near_halves
from bitnet_ref.crossval.explain.diagnose import diagnose
from bitnet_ref.crossval.explain.hypotheses import HYPOTHESES
from bitnet_ref.crossval.explain.near_halves import follow_flips
from bitnet_ref.crossval.explain.variants import Setting
from bitnet_ref.crossval.opponents import PROMPT, cross_trace
from bitnet_ref.crossval.report import summarize
from bitnet_ref.crossval.trace import write_trace
from bitnet_ref.reference.cache import TokenBatch

F32 = np.float32
COUNT = 6  # prompts of the tests
FIVE = ("hook_embed", "blocks.0.attn.q_proj.hook_out", "blocks.0.attn.hook_z")


class Float32Engine(Backend):
    """Another engine's arithmetic: norms, gates and attention in float32 throughout, sums in an order of their own."""

    def __init__(self, eps=None):
        super().__init__("float32", 1)
        self.eps = eps

    def rms_norm(self, x, norm):
        order = np.random.default_rng(0).permutation(x.shape[1])
        total = np.cumsum(np.square(x[:, order]), axis=1, dtype=F32)[:, -1:]
        return x * (F32(1) / np.sqrt(total / F32(x.shape[1]) + F32(self.eps or norm.eps))) * norm.weight

    def attention(self, q, cache, batch, layer, window):
        keys, values = cache.stored(layer, batch)
        group = q.shape[1] // keys.shape[1]
        k, v = (np.repeat(each, group, axis=1) for each in (keys, values))
        scores = np.einsum("ihd,jhd->hij", q, k) * F32(q.shape[2] ** -0.5)
        scores += np.triu(np.full(scores.shape[1:], -np.inf, dtype=F32), 1)
        e = np.exp(scores - scores.max(-1, keepdims=True))
        return np.einsum("hij,jhd->ihd", e / e.sum(-1, keepdims=True, dtype=F32), v)

    def dequantize(self, acc, w, x_quant_scale):
        return acc.astype(F32) / x_quant_scale * F32(w.w_dequant_scale)


class Trace(dict):
    own_engine = False


def run_engine(engine, tokens, config=None):
    """{name: array} of everything that the engine computes on storyteller."""
    m = model("storyteller")
    cfg = config or m.config
    recorder = Recorder(engine, cfg)
    loaded = LoadedModel(cfg, m.weights, engine)
    batch = TokenBatch.of([(0, 0, np.asarray(tokens, dtype=np.int64))])
    run(observe(engine, recorder), m.weights, cfg, batch, loaded.new_cache(1, len(tokens)))
    return recorder.seen


def thin(seen, *more):
    names = (*more, "lm_head.hook_out")
    return Trace({name: x for name, x in seen.items() if name.endswith("hook_resid_post") or name in names})


@cache
def runs(prompt):
    """(tokens, the reference's run, the engine's)"""
    m = model("storyteller")
    tokens = m.tokenizer.encode(prompt)
    return tokens, m.run_with_cache(tokens)[1], run_engine(Float32Engine(), tokens)


def differs(prompt):
    """Whether a trace of the residual stream has a flip: it differs without the search."""
    tokens, right, seen = runs(prompt)
    return not compare(right, thin(seen), model("storyteller").config, tokens).agrees


@cache
def prompts():
    """Those that differ come first."""
    return sorted(SENTENCES, key=differs, reverse=True)[:COUNT]


@pytest.fixture(scope="module", params=range(COUNT))
def pair(request):
    return runs(prompts()[request.param])


@pytest.mark.sample(6)
@pytest.mark.parametrize("more", [(), FIVE])
def test_a_correct_engine_agrees_up_to_rounding(pair, more):
    tokens, right, seen = pair
    m, shown = model("storyteller"), thin(seen, *more)
    comparison = follow_flips(m, tokens, shown, compare(right, shown, m.config, tokens))
    assert comparison.agrees, comparison.verdict
    assert diagnose(m, tokens, shown, comparison) == []
    assert comparison.implied_flips <= 3
    for flip in comparison.flips:  # the engine's own integers, which it did not show, are these
        assert seen[flip.name][flip.token, flip.element] == flip.candidate
        assert flip.in_words in comparison.verdict


@pytest.mark.sample(3)
@pytest.mark.parametrize("axes", [(), (1,), (1, 1)])
def test_flips_in_the_last_token_s_logits(axes):
    m = model("storyteller")
    for tokens, right, seen in map(runs, prompts()):
        shown = Trace({"lm_head.hook_out": seen["lm_head.hook_out"][-1].reshape(*axes, -1)})
        before = compare(right, shown, m.config, tokens)
        if not before.agrees and follow_flips(m, tokens, shown, before).agrees:
            return
    raise AssertionError("no prompt's logits agree up to rounding")


@pytest.mark.thorough
@pytest.mark.parametrize("narrow", [ml_dtypes.bfloat16, np.float16])
def test_flips_in_a_trace_that_was_recorded_in_a_narrow_float(narrow):
    m, implied = model("storyteller"), 0
    for tokens, right, seen in map(runs, prompts()[:3]):
        floats = {name: x for name, x in seen.items() if x.dtype == F32 and not name.endswith("hook_x_scale")}
        for shown in (thin(seen), floats):
            shown = Trace({name: x.astype(narrow) for name, x in shown.items()})
            found = follow_flips(m, tokens, shown, compare(right, shown, m.config, tokens))
            assert found.agrees, found.verdict
            implied += found.implied_flips
    assert implied


@pytest.mark.parametrize("hook", ["hook_attn_scores", "hook_pattern"])
def test_flips_in_a_trace_of_what_has_an_axis_of_heads(hook):
    """Its rows are over as many tokens as the whole run has; those of a trial over fewer."""
    m, implied = model("storyteller"), 0
    for tokens, right, seen in map(runs, prompts()[:3]):
        shown = Trace({name: x for name, x in seen.items() if name.endswith(hook)})
        found = follow_flips(m, tokens, shown, compare(right, shown, m.config, tokens))
        assert found.agrees, found.verdict
        implied += found.implied_flips
    assert implied


def test_the_prompts_have_flips():
    """Without the search most of these correct traces differ, so that the test above can fail."""
    assert sum(map(differs, prompts())) >= 3, "give more SENTENCES: with these weights too few have a flip"


@pytest.mark.thorough
def test_a_small_mistake_is_no_rounding():
    """Small ones: another eps, a window of all but one token, another theta, 1e-5 added to max|x|."""
    m = model("storyteller")
    tokens = m.tokenizer.encode(PROMPT)
    right = m.run_with_cache(tokens)[1]
    engines = {
        "eps": run_engine(Float32Engine(eps=1e-3), tokens),
        "window": run_engine(Backend("float32", 1), tokens, replace(m.config, sliding_window=len(tokens) - 1)),
        "theta": run_engine(
            Backend("float32", 1), tokens, replace(m.config, rope=replace(m.config.rope, theta=9900.0))
        ),
    }
    added = next(h for h in HYPOTHESES if h.name == "activation_floor_added").change(Setting.of(m, tokens))
    engines["floor"] = added.run()  # it flips a dozen activations
    for mistake, seen in engines.items():
        shown = thin(seen)
        before = compare(right, shown, m.config, tokens)
        assert not before.agrees
        assert follow_flips(m, tokens, shown, before) is before, mistake


@pytest.mark.thorough
def test_the_command_says_which_integer(tmp_path):
    m = model("storyteller")
    tokens, _, seen = runs(prompts()[0])
    write_trace(tmp_path / "t", thin(seen), tokens, engine="theirs")
    crossing = cross_trace(m, tmp_path / "t")
    assert crossing.agrees
    done = CliRunner().invoke(cli, ["crossval", "trace", "storyteller", str(tmp_path / "t"), "--json"])
    assert done.exit_code == 0, done.output
    (result,) = json.loads(done.stdout)["results"]
    free = result["comparisons"][-1]
    assert free["implied_flips"] == free["n_flips"] == len(free["flips"]) >= 1
    first = free["flips"][0]
    assert seen[first["name"]][first["token"], first["element"]] == first["candidate"] != first["reference"]
    _, layer, *_, linear, _ = first["name"].split(".")
    place = f"token {first['token']}, layer {layer}, {linear}, int8 at {first['before_rounding']:.6f}"
    assert f"AGREES up to rounding, free-running: {place}" in result["verdict"]


def last_logits(seen):
    return Trace({"lm_head.hook_out": seen["lm_head.hook_out"][-1:]})


@pytest.mark.thorough
def test_logits_of_many_tokens_are_not_called_wrong_for_flips_they_do_not_show(tmp_path, monkeypatch):
    """Of 60 tokens: more may have flipped than the search tries together."""
    monkeypatch.setattr(near_halves, "_WORK", 500)  # it finds nothing with a hundred times as much either
    m = model("storyteller")
    tokens = m.tokenizer.encode(" ".join(SENTENCES))[:60]
    right, shown = m.run_with_cache(tokens)[1], last_logits(run_engine(Float32Engine(), tokens))
    comparison = follow_flips(m, tokens, shown, compare(right, shown, m.config, tokens))
    assert not comparison.agrees
    assert comparison.verdict.startswith("CANNOT TELL from the logits alone, free-running: those of the last token are")
    assert "record hook_resid_post" in comparison.verdict
    write_trace(tmp_path / "t", shown, tokens, engine="theirs")
    crossing = cross_trace(m, tmp_path / "t", causes=False)
    assert crossing.agrees is None
    assert summarize(crossing) == "cannot tell"
    embedded = Trace({**shown, "hook_embed": right["hook_embed"]})  # which shows no flip either
    both = follow_flips(m, tokens, embedded, compare(right, embedded, m.config, tokens))
    start = "CANNOT TELL from these tensors, free-running: in lm_head.hook_out the values of the last token are off by"
    assert both.verdict.startswith(start), both.verdict
    # with the tensors that it asks for, the same engine agrees
    whole = thin(run_engine(Float32Engine(), tokens))
    assert follow_flips(m, tokens, whole, compare(right, whole, m.config, tokens)).agrees


@pytest.mark.thorough
def test_a_mistake_in_logits_of_many_tokens_differs(monkeypatch):
    """One that moves them further than flips do, and a small one whose cause is named, or that each token shows."""
    monkeypatch.setattr(near_halves, "_WORK", 500)
    m = model("storyteller")
    tokens = m.tokenizer.encode(" ".join(SENTENCES))[:30]
    right = m.run_with_cache(tokens)[1]
    window = run_engine(Backend("float32", 1), tokens, replace(m.config, sliding_window=16))
    eps = run_engine(Float32Engine(eps=1e-3), tokens)
    for shown in (last_logits(window), Trace({"lm_head.hook_out": eps["lm_head.hook_out"]})):
        comparison = follow_flips(m, tokens, shown, compare(right, shown, m.config, tokens))
        assert comparison.verdict.startswith("DIFFERS, free-running, first at lm_head.hook_out"), comparison.verdict
    added = next(h for h in HYPOTHESES if h.name == "activation_floor_added").change(Setting.of(m, tokens))
    shown = last_logits(added.run())
    comparison = follow_flips(m, tokens, shown, compare(right, shown, m.config, tokens))
    assert comparison.undecided
    causes = diagnose(m, tokens, shown, comparison)
    assert [cause.name for cause in causes if cause.confirmed] == ["activation_floor_added"]
    assert comparison.verdict.startswith("DIFFERS")
