"""Comparison: what differs is named at its op, what is noise is not, and a rounding flip is shown to be one."""

import json
import os
import shutil
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from helpers import DATA, GOLDEN, GOLDEN_CASES, golden, model
from tracing_engines import TOKENS, NoisyBackend, QuickBackend, load_random, record

import bitnet_ref
from bitnet_ref.crossval.compare import FLIP, OK, compare
from bitnet_ref.crossval.explain.diagnose import diagnose
from bitnet_ref.crossval.explain.hypotheses import HYPOTHESES
from bitnet_ref.crossval.explain.replay import judge_trace
from bitnet_ref.crossval.explain.variants import Setting
from bitnet_ref.crossval.names import LOGITS, layer_of, linear_input, op_inputs, op_kind, op_order, op_shape
from bitnet_ref.crossval.token_ids import token_parity
from bitnet_ref.crossval.tolerances import FLIP_CEILING, NARROW_FLOATS, TABLE
from bitnet_ref.families import FAMILIES
from bitnet_ref.families.minicpm import MiniCpmLayer

ROTATED = "families/qwen3-groups128/pq2_0-hadamard.gguf"
FAMILY_CASES = [*(f"families/{name}" for name in sorted(os.listdir(DATA / "families"))), ROTATED]
OTHER_MODELS = {  # where storyteller has no op of the kind
    "routing": "families/maple",
    "dense linear": "llama-dense",
    "scaling": "families/embedding-gemma3",
    "experts' sum": "families/maple",
    "Hadamard transform": ROTATED,
    **dict.fromkeys(("delta gate", "delta rule"), "families/qwen3_5-groups128-hybrid"),
}
TEXT = "Once upon a time, the little rabbit ran down the hill and said"


def case_of(case):
    return model(case if case == "storyteller" else DATA / case if "/" in case else GOLDEN / case)


def gemma_with_factors():
    """Gemma3 with a scale of q, a cap of its logits and a factor of the head's input."""
    m = case_of("families/embedding-gemma3")
    factors = {"query_scale": 2.0, "logit_softcap": 5.0, "head_scale": 0.5}
    return bitnet_ref.Model(replace(m.config, **factors), m.weights, m.backend)


def minicpm_with_factors():
    """A dense LLaMA with MiniCPM's three factors and a cap of its logits."""
    m = case_of("llama-dense")
    factors = {"embedding_scale": 3.0, "residual_scale": 0.7, "head_scale": 0.5, "logit_softcap": 5.0}
    config = FAMILIES["minicpm"].config(**{**vars(m.config), "model_type": "minicpm", **factors})
    layers = tuple(MiniCpmLayer(**vars(layer)) for layer in m.weights.layers)
    return bitnet_ref.Model(config, replace(m.weights, layers=layers), m.backend)


WITH_FACTORS = {"Gemma3 with every factor": gemma_with_factors, "MiniCPM with every factor": minicpm_with_factors}


@pytest.fixture(scope="module")
def story():
    m = model("storyteller")
    tokens = m.tokenizer.encode(TEXT)
    return m, tokens, m.run_with_cache(tokens)[1]


def run(backend, m, tokens):
    return record(backend, m.weights, m.config, tokens)[1]


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.sample(9)
@pytest.mark.parametrize("case", ["storyteller", *GOLDEN_CASES, *FAMILY_CASES, *WITH_FACTORS])
def test_the_order_of_ops_is_the_recorders(case):
    m = WITH_FACTORS[case]() if case in WITH_FACTORS else case_of(case)
    seen = m.run_with_cache([1, 5, 9])[1]
    order = op_order(m.config)
    assert [name for name in order if name in seen] == list(seen)
    assert len(set(order)) == len(order)
    assert {name: op_shape(name, m.config, 3) for name in seen} == {name: array.shape for name, array in seen.items()}
    for name in order:
        assert op_kind(name, config=m.config) in TABLE
        for source in op_inputs(name, m.config):  # an op reads what was computed before it
            assert order.index(source) < order.index(name)
    linears = (name for name, w in m.weights.linears() if w.kind != "experts")  # which are no steps
    assert all(linear_input(name, m.config) in order for name in linears)
    replayed = judge_trace(m, seen, np.array([1, 5, 9]))
    assert replayed.agrees, replayed.verdict
    assert (len(replayed.ops), replayed.missing) == (len(seen), [])


@pytest.mark.sample(12)
@pytest.mark.parametrize("case", FAMILY_CASES)
def test_each_op_of_a_family_is_judged_by_its_own_inputs(case):
    """A tensor changed by a thousandth is named, or the first that is computed from it."""
    m = case_of(case)
    seen = m.run_with_cache([1, 5, 9])[1]
    last = {name.rpartition(".")[2]: name for name in seen if "hook_x_scale" not in name}
    for name in last.values():
        array = seen[name].copy()
        array[-1] = array[-1] + 1 if array.dtype.kind == "i" else array[-1] * 1.001 + 1e-3
        found = judge_trace(m, {**seen, name: array}, np.array([1, 5, 9]))
        readers = [other for other in seen if name in op_inputs(other, m.config)]
        assert found.first_divergence is not None, name
        assert found.first_divergence.name in (name, *readers)


# -- agreement ---------------------------------------------------------------------------------------------------------


def test_norms_over_heads_may_have_a_row_for_each_head():
    m, ids = case_of("families/qwen3-groups128"), [1, 5, 9, 3]
    right = m.run_with_cache(ids)[1]
    heads = {"q_norm": m.config.num_attention_heads, "k_norm": m.config.num_key_value_heads}
    apart = dict(right)
    for name in right:
        if (norm := name.rpartition(".")[0].rpartition(".")[2]) in heads:
            apart[name] = right[name].reshape(len(ids) * heads[norm], -1)
    assert sum(apart[name].shape != right[name].shape for name in right) == 4 * m.config.num_hidden_layers
    for reference, candidate in ((right, apart), (apart, right), (apart, apart)):
        comparison = compare(reference, candidate, m.config, ids)
        assert comparison.agrees, comparison.verdict
    assert judge_trace(m, apart, np.array(ids)).agrees


@pytest.mark.sample(9)
@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_backends_agree_on_the_golden_cases(case, backend_name):
    tokens = golden(case)["tokens"]
    seen = [model(GOLDEN / case, name).run_with_cache(tokens)[1] for name in ("numpy", backend_name)]
    found = compare(*seen, model(GOLDEN / case).config, tokens)
    assert found.agrees, found.verdict
    assert not found.n_flips
    assert len(found.ops) == len(seen[0])
    assert found.accumulators[1] == 0
    assert found.verdict.startswith("AGREES")
    assert found.logits.top1_agreement == 1
    assert json.dumps(found.to_dict(), allow_nan=False)


def test_figures(story):
    m, tokens, seen = story
    name = "blocks.2.mlp.hook_post"
    found = compare(seen, {name: seen[name] * np.float32(1.5)}, m.config, tokens)
    (op,) = found.ops
    assert op.scale_ratio == pytest.approx(1.5)
    assert op.cosine == pytest.approx(1.0)
    assert op.relative_l2 == pytest.approx(0.5)
    assert op.max_abs == pytest.approx(0.5 * np.abs(seen[name]).max())
    assert op.n_differ == np.count_nonzero(seen[name])
    assert (op.layer, op.kind, op.shape) == (2, "gate", seen[name].shape)
    assert abs(seen[name][op.worst]) == np.abs(seen[name]).max()
    assert not found.agrees
    assert found.first_divergence is op
    assert "scale ratio 1.5" in found.verdict
    assert len(found.missing) == len(seen) - 1


def test_logits_figures_are_those_of_the_distributions(story):
    m, tokens, seen = story
    right = seen[LOGITS].astype(np.float64)
    wrong = right[:, ::-1].astype(np.float32)
    found = compare(seen, {"logits": wrong}, m.config, tokens).logits
    p, q = (np.exp(x - x.max(-1, keepdims=True)) for x in (right, wrong.astype(np.float64)))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    kl = (p * np.log(p / q)).sum(-1)
    assert found.kl_mean == pytest.approx(kl.mean())
    assert found.kl_max == pytest.approx(kl.max())
    assert found.top1_agreement == 0
    following = np.array(tokens[1:])
    expected = np.exp(-np.log(p[np.arange(len(following)), following]).mean())
    assert found.perplexity_reference == pytest.approx(expected)
    assert found.perplexity_candidate - found.perplexity_reference > 100
    ordered = np.sort(right, axis=-1)
    assert found.smallest_margin == pytest.approx((ordered[:, -1] - ordered[:, -2]).min())
    assert found.widest_lost_margin == pytest.approx((ordered[:, -1] - ordered[:, -2]).max())


def test_other_layouts_of_the_same_numbers(story):
    m, tokens, seen = story
    n = len(tokens)
    other = {
        "blocks.0.attn.hook_q": seen["blocks.0.attn.hook_q"].reshape(n, -1),
        "blocks.0.attn.hook_z": seen["blocks.0.attn.hook_z"][None],
        "blocks.0.attn.hook_pattern": seen["blocks.0.attn.hook_pattern"][None],
        "blocks.0.attn.hook_attn_scores": np.maximum(seen["blocks.0.attn.hook_attn_scores"], np.float32(-3e38)),
        "blocks.1.attn.hook_attn_scores": np.maximum(seen["blocks.1.attn.hook_attn_scores"], np.float32(-65504)),
        "blocks.0.attn.q_proj.hook_acc_int32": seen["blocks.0.attn.q_proj.hook_acc_int32"].astype(np.float32),
        "logits": seen[LOGITS][-1],
    }
    found = compare(seen, other, m.config, tokens)
    assert found.agrees, found.verdict
    assert len(found.ops) == len(other)
    assert all(op.equal for op in found.ops)


@pytest.mark.parametrize("axes", [(), (1,), (1, 1)])
def test_logits_of_the_last_token(story, axes):
    m, tokens, seen = story
    other = {"logits": seen[LOGITS][-1].reshape(*axes, -1)}
    assert compare(seen, other, m.config, tokens).agrees
    assert not judge_trace(m, other, tokens).ops


def test_scores_before_the_mask(story):
    m, tokens, seen = story
    name = "blocks.0.attn.hook_attn_scores"
    found = compare(seen, {name: np.maximum(seen[name], -1)}, m.config, tokens)
    assert found.verdict.endswith("not the same scores are masked")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda a: a[:, :-1], "shape"),
        (lambda a: a[:-1], "shape"),
        (lambda a: a.T, "shape"),
        (lambda a: np.where(a == a.max(), np.nan, a), "NaN"),
        (lambda a: np.where(a == a.max(), np.inf, a), "NaN or Inf"),
        (lambda a: a * np.float32(0), "values differ"),
    ],
)
def test_what_cannot_be_right_differs(story, change, what):
    m, tokens, seen = story
    name = "blocks.1.hook_resid_post"
    found = compare(seen, {**seen, name: change(seen[name])}, m.config, tokens)
    assert found.first_divergence.name == name
    assert what in found.verdict
    assert json.dumps(found.to_dict(), allow_nan=False)


def test_what_to_record_next_lies_before_the_first_difference(story):
    m, tokens, seen = story
    ends = [name for name in seen if name.endswith("hook_resid_post")]
    thin = {name: seen[name] for name in (*ends, LOGITS)}
    comparison = compare(seen, {**thin, ends[2]: thin[ends[2]] + 1}, m.config, tokens)
    assert comparison.first_divergence.name == ends[2]
    names = list(seen)
    assert comparison.missing_between == names[names.index(ends[1]) + 1 : names.index(ends[2])]
    assert len(comparison.record_next) == 6
    assert {layer_of(name) for name in comparison.record_next} == {2}
    assert compare(seen, {LOGITS: seen[LOGITS] + 1}, m.config, tokens).record_next == ends
    assert compare(seen, seen, m.config, tokens).record_next == []


def test_nothing_in_common_is_no_agreement(story):
    m, tokens, seen = story
    for candidate in ({}, {"layers.0.output": seen[LOGITS]}):
        found = compare(seen, candidate, m.config, tokens)
        assert not found.agrees
        assert found.verdict.startswith("NOT COMPARABLE")
        assert list(found.unknown) == list(candidate)


def test_two_names_of_one_tensor(story):
    """What the engine returns counts; that the other name has other values is said."""
    m, tokens, seen = story
    right, wrong = seen[LOGITS], seen[LOGITS] + 1
    assert (
        compare(seen, {"logits": right, LOGITS: right}, m.config, tokens).gaps
        == compare(seen, {"logits": right}, m.config, tokens).gaps
    )
    for candidate in ({"logits": right, LOGITS: wrong}, {LOGITS: wrong, "logits": right}):
        found = compare(seen, candidate, m.config, tokens)
        assert found.agrees
        assert found.gaps[-1] == f"{LOGITS} not compared: logits, a name of the same tensor, has other values"
        assert not compare(seen, {"logits": wrong, LOGITS: right}, m.config, tokens).agrees


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", sorted(TABLE))
def test_a_change_of_a_thousandth_in_any_kind_is_seen(story, kind):
    """The tolerances are no nets of wide mesh: each op changed by a thousandth, one token of it, is named."""
    m, tokens, seen = story
    if kind in OTHER_MODELS:
        m, tokens = case_of(OTHER_MODELS[kind]), golden("llama-dense")["tokens"] % 80
        seen = m.run_with_cache(tokens)[1]
    ternary = m.config.quantization is not None
    name = [name for name in seen if op_kind(name, lambda linear: ternary) == kind][-1]
    changed = seen[name].copy()
    if changed.dtype.kind == "i":
        changed.flat[7] += 1
    elif kind == "attention pattern":
        changed[:, -1] += np.float32(1e-3)
    else:
        changed[-1] *= np.float32(1.001)
    found = compare(seen, {**seen, name: changed}, m.config, tokens)
    assert found.first_divergence.name == name


# -- rounding flips ----------------------------------------------------------------------------------------------------


def test_noise_is_no_difference_and_flips_are_explained(story):
    m, tokens, seen = story
    flips = 0
    for seed in range(2):
        found = compare(seen, run(NoisyBackend(seed), m, tokens), m.config, tokens, own_engine=False)
        assert found.agrees, found.verdict
        flips += found.n_flips
        for flip in found.flips:
            assert abs(flip.reference - flip.candidate) == 1
            assert abs(flip.before_rounding - np.floor(flip.before_rounding) - 0.5) < 0.01
        if found.n_flips:
            first = next(op for op in found.ops if op.status == FLIP)
            assert first.name == found.flips[0].name
            assert all(op.status == OK for op in found.ops[: found.ops.index(first)])
            assert "expected" in found.verdict
            assert str(found.flips[0]) in found.verdict
    assert flips  # or this test saw nothing


def test_flips_whose_source_has_another_shape_are_no_flips_by_noise(story):
    m, tokens, seen = story
    candidate = {name: np.array(seen[name]) for name in seen}
    candidate["blocks.0.attn.q_proj.hook_x_int8"][0, 0] ^= 4
    source = linear_input("blocks.0.attn.q_proj", m.config)
    candidate[source] = candidate[source][:1]
    found = compare(seen, candidate, m.config, tokens)
    assert not found.agrees
    assert any("noise of" in op.note for op in found.ops)


@pytest.mark.thorough
def test_random_models_with_noise_give_no_false_alarm(tmp_path):
    flips, worst = 0, 0.0
    for seed in range(20):
        m = load_random(tmp_path, seed)
        right = run(QuickBackend(), m, TOKENS)
        found = compare(right, run(NoisyBackend(seed), m, TOKENS), m.config, TOKENS, own_engine=False)
        assert found.agrees, f"seed {seed}: {found.verdict}"
        flips += found.n_flips
        worst = max([worst, *(op.relative_l2 for op in found.ops if op.status == FLIP)])
    assert worst < FLIP_CEILING


def nudged(m, tokens, seen, name, token):
    """A run in which the activation nearest a half at that int8 tensor has flipped, all else right."""
    x_q = seen[name]
    value = seen[linear_input(name.rpartition(".")[0], m.config)] * seen[name.replace("x_int8", "x_scale")]
    distance = np.abs(value - np.floor(value) - 0.5)
    element = int(distance[token].argmin())
    at = float(value[token, element])
    other = int(np.floor(at) + np.ceil(at)) - int(x_q[token, element])

    class Flipped(QuickBackend):
        def ternary_matmul(self, given, w):
            if w is weight:
                given = given.copy()
                given[token, element] = other
                self.flipped = given
            return super().ternary_matmul(given, w)

    weight = dict(m.weights.linears())[name.rpartition(".")[0]]
    be = Flipped()
    candidate = run(be, m, tokens)
    candidate[name] = be.flipped
    return candidate, element, float(distance[token, element])


def test_a_flip_reaches_what_comes_after_it_and_nothing_else(story):
    """One activation made to flip, by an input that is off in its last bits: what is before it stays equal, what comes
    after it is expected, and only the tokens from it on have moved."""
    m, tokens, seen = story
    name, source = "blocks.2.attn.o_proj.hook_x_int8", "blocks.2.attn.sub_norm.hook_normalized"
    scale = seen[name.replace("x_int8", "x_scale")]
    value = seen[source] * scale
    token = int(np.abs(value - np.floor(value) - 0.5)[5:].min(axis=1).argmin()) + 5
    candidate, element, distance = nudged(m, tokens, seen, name, token)
    assert 0 < distance < 1e-3
    up = 1 if candidate[name][token, element] > seen[name][token, element] else -1
    candidate[source] = candidate[source].copy()
    candidate[source][token, element] += up * 2 * distance / scale[token, 0]
    found = compare(seen, candidate, m.config, tokens)
    assert found.agrees, found.verdict
    assert found.n_flips == 1
    flip = found.flips[0]
    assert (flip.name, flip.token, flip.element) == (name, token, element)
    assert flip.before_rounding == pytest.approx(float(value[token, element]))
    at = [op.name for op in found.ops].index(name)
    assert all(op.status == OK for op in found.ops[:at])
    moved = [op for op in found.ops if op.status == FLIP]
    assert len(moved) > 50
    assert min(op.token for op in moved) == token
    np.testing.assert_array_equal(candidate[LOGITS][:token], seen[LOGITS][:token])


def test_equal_inputs_have_no_noise(story):
    """The same step of one where the inputs are equal is a wrong rounding, not a flip."""
    m, tokens, seen = story
    name = "blocks.2.attn.o_proj.hook_x_int8"
    candidate, element, _ = nudged(m, tokens, seen, name, 9)
    found = compare(seen, candidate, m.config, tokens)
    assert found.first_divergence.name == name
    assert f"[9, {element}]" in found.verdict
    assert "equal inputs" in found.verdict


def test_halves_rounded_away_from_zero_are_named():
    """Exact halves: x of small integers whose largest is 127, plus halves. Equal inputs, so it cannot be noise."""
    m = model(GOLDEN / "bitnet-packed-offline")
    seen = m.run_with_cache(TOKENS)[1]
    source, name = "blocks.0.ln1.hook_normalized", "blocks.0.attn.q_proj.hook_x_int8"
    x = np.tile(np.float32([127, 0.5, 2.5, -1.5]), (len(TOKENS), seen[source].shape[1] // 4))
    to_even = np.tile(np.int8([127, 0, 2, -2]), (len(TOKENS), x.shape[1] // 4))
    away = np.tile(np.int8([127, 1, 3, -2]), (len(TOKENS), x.shape[1] // 4))
    for own in (True, False):
        assert compare({source: x, name: to_even}, {source: x, name: to_even}, m.config, own_engine=own).agrees
        found = compare({source: x, name: to_even}, {source: x, name: away}, m.config, own_engine=own)
        assert "halves are rounded another way" in found.verdict


def test_a_step_that_noise_cannot_explain_differs(story):
    m, tokens, seen = story
    name = "blocks.3.mlp.down_proj.hook_x_int8"
    value = seen["blocks.3.mlp.sub_norm.hook_normalized"] * seen[name.replace("x_int8", "x_scale")]
    far = np.unravel_index(np.abs(np.abs(value - np.floor(value) - 0.5) - 0.3).argmin(), value.shape)
    changed = seen[name].copy()
    changed[far] += 1
    candidate = {other: array for other, array in seen.items() if not other.endswith("hook_normalized")}
    found = compare(seen, {**candidate, name: changed}, m.config, tokens)
    assert found.first_divergence.name == name
    assert "does not explain it" in found.verdict


def test_flips_are_found_in_a_trace_that_has_no_int8(story):
    """What hooks on another engine's modules see: float inputs and outputs. The integers follow from the inputs."""
    m, tokens, seen = story
    hooks = ("hook_x_int8", "hook_x_scale", "hook_acc_int32", "hook_scale")
    flips = 0
    for seed in range(2):
        noisy = run(NoisyBackend(seed), m, tokens)
        noisy = {name: array for name, array in noisy.items() if not name.endswith(hooks)}
        found = compare(seen, noisy, m.config, tokens, own_engine=False)
        assert found.agrees, found.verdict
        flips += found.n_flips
    assert flips


@pytest.mark.parametrize("rows", [slice(None), slice(-1, None)])
def test_logits_of_a_padded_vocabulary_are_refused_with_advice(story, rows):
    m, tokens, seen = story
    padded = np.pad(seen[LOGITS], ((0, 0), (0, 64)))[rows]
    advice = f": cut the padded logits to vocab_size, logits[..., :{m.config.vocab_size}]"
    for found in (compare(seen, {LOGITS: padded}, m.config, tokens), judge_trace(m, {LOGITS: padded}, tokens)):
        assert found.first_divergence.note.endswith(advice), found.verdict
        assert advice in found.verdict
    assert compare(seen, {LOGITS: padded[:, : m.config.vocab_size]}, m.config, tokens).agrees
    few = compare(seen, {LOGITS: padded[:, :7]}, m.config, tokens)
    assert "padded" not in few.verdict


# -- narrow engines ----------------------------------------------------------------------------------------------------


class NarrowBackend(QuickBackend):
    """Rounds the result of every op to a narrow float."""

    def __init__(self, narrow):
        super().__init__()
        self.narrow = narrow

    def _narrow(self, y):
        return y.astype(self.narrow).astype(np.float32)

    def rms_norm(self, x, norm):
        return self._narrow(super().rms_norm(x, norm))

    def dequantize(self, acc, w, x_quant_scale):
        return self._narrow(super().dequantize(acc, w, x_quant_scale))

    def gated(self, gate, up, activation):
        return self._narrow(super().gated(gate, up, activation))

    def attention(self, q, cache, batch, layer, window):
        return self._narrow(super().attention(q, cache, batch, layer, window))


@pytest.mark.sample(2)
@pytest.mark.parametrize("narrow", [ml_dtypes.bfloat16, np.float16])
def test_narrow_engines_are_held_to_their_own_tolerance(story, narrow):
    m, tokens, seen = story
    dtype = np.dtype(narrow).name
    candidate = run(NarrowBackend(narrow), m, tokens)
    assert not compare(seen, candidate, m.config, tokens, own_engine=False).agrees
    found = compare(seen, candidate, m.config, tokens, own_engine=False, engine_dtype=dtype)
    assert found.agrees, found.verdict
    assert (
        max(op.relative_l2 for op in found.ops) > NARROW_FLOATS[dtype].relative_l2 / 20
    )  # the limit is not a free pass
    wrong = replace(m.config, activation="silu")
    bad = record(NarrowBackend(narrow), m.weights, wrong, tokens)[1]
    found = compare(seen, bad, m.config, tokens, own_engine=False, engine_dtype=dtype)
    assert found.first_divergence.name == "blocks.0.mlp.hook_post"


class NarrowFloats(NarrowBackend):
    """Rounds the results of floats' products and sums too."""

    def dense_matmul(self, x, w):
        return self._narrow(super().dense_matmul(x, w))

    def add(self, x, y):
        return self._narrow(super().add(x, y))

    def compute(self, name, function, *args):
        return self._narrow(super().compute(name, function, *args))


@pytest.mark.thorough
def test_a_narrow_engine_that_gives_a_token_to_another_expert():
    m, rng = case_of("families/mixtral-groups128"), np.random.default_rng(7)
    notes = []
    for _ in range(12):
        tokens = rng.integers(0, m.config.vocab_size, 24).tolist()
        right, seen = m.run_with_cache(tokens)[1], run(NarrowFloats(ml_dtypes.bfloat16), m, tokens)
        for shown in (seen, {name: x for name, x in seen.items() if name.endswith(("resid_post", LOGITS))}):
            found = compare(right, shown, m.config, tokens, own_engine=False, engine_dtype="bfloat16")
            assert found.agrees, found.verdict
            notes += [op.note for op in found.ops if "may give to other experts" in op.note]
        wrong = {**seen, "blocks.0.mlp.hook_mixed": seen["blocks.0.mlp.hook_mixed"] * np.float32(1.3)}
        found = compare(right, wrong, m.config, tokens, own_engine=False, engine_dtype="bfloat16")
        assert found.first_divergence.name == "blocks.0.mlp.hook_mixed"
    assert notes, "give more texts: no token went to another expert"


def test_experts_that_are_summed_in_float32(tmp_path):
    """The reference sums them in float64; a float32 sum of several products has more than one rounding."""
    folder = DATA / "families/qwen3_moe-groups128"
    config = json.loads((folder / "config.json").read_text()) | {"num_experts_per_tok": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(folder / "model.safetensors", tmp_path)
    m, tokens = bitnet_ref.load(tmp_path, backend="numpy"), np.random.default_rng(1).integers(0, 64, 48)
    seen = m.run_with_cache(tokens)[1]
    for name in [name for name in seen if name.endswith("hook_mixed")]:
        out, shares = (seen[name.replace("mixed", each)] for each in ("expert_out", "expert_weights"))
        total = np.float32(0.7)  # of the shares, by which this engine divides last
        seen[name] = sum(shares[:, [i]] * total * out[:, i] for i in range(3)) / total
    assert judge_trace(m, seen, tokens).agrees


@pytest.mark.thorough
@pytest.mark.parametrize("narrow", [ml_dtypes.bfloat16, np.float16])
def test_a_float32_engine_recorded_in_a_narrow_float(story, narrow):
    m, tokens, seen = story
    silu = next(h for h in HYPOTHESES if h.name == "silu_for_relu2").change(Setting.of(m, tokens)).run()
    right, wrong = (
        {name: x.astype(narrow) if x.dtype == np.float32 else x for name, x in each.items()} for each in (seen, silu)
    )
    found = compare(seen, right, m.config, tokens, own_engine=False)
    assert found.agrees, found.verdict
    assert found.n_flips == 0
    assert judge_trace(m, right, tokens).agrees
    for name in ("blocks.0.ln1.hook_normalized", LOGITS):  # twice the step is too much
        off = right | {name: (seen[name] * (1 + 2 * float(ml_dtypes.finfo(narrow).eps))).astype(narrow)}
        assert compare(seen, off, m.config, tokens, own_engine=False).first_divergence.name == name
    found = compare(seen, wrong, m.config, tokens, own_engine=False)
    assert found.first_divergence.name == "blocks.0.mlp.hook_post"
    thin = {name: x for name, x in wrong.items() if name.endswith(("hook_post", LOGITS))}
    (cause,) = [d for d in diagnose(m, tokens, thin, compare(seen, thin, m.config, tokens)) if d.confirmed]
    assert cause.name == "silu_for_relu2"


# -- tokens ------------------------------------------------------------------------------------------------------------

PARITY = {
    "BOS twice": ([1, 5, 6, 7], [1, 1, 5, 6, 7]),
    "puts BOS": ([5, 6, 7], [1, 5, 6, 7]),
    "BOS is missing": ([1, 5, 6, 7], [5, 6, 7]),
    "stops after 2": ([1, 5, 6, 7], [1, 5]),
    "2 tokens more at its end": ([1, 5], [1, 5, 6, 7]),
    "outside the vocabulary": ([1, 5], [1, 5000]),
    "another chat template": ([1, 5, 6, 7, 8, 9, 10], [1, 4, 4, 6, 7, 8, 9, 10]),
    "other tokens": ([1, 5, 6, 7], [1, 8, 9, 10]),
}


@pytest.mark.parametrize("what", PARITY)
def test_token_parity(what):
    mine, theirs = PARITY[what]
    config = model("storyteller").config
    assert token_parity(mine, mine, config) is None
    assert what in token_parity(mine, theirs, config)


def test_token_parity_uses_the_prompts():
    config = model("storyteller").config
    assert "another tokenizer" in token_parity([1, 5, 6], [1, 5, 7], config, ("a b", "a b"))
    assert "chat template" in token_parity([1, 5, 6], [1, 5, 7], config, ("a b", "User: a b"))


# -- what another engine may do ----------------------------------------------------------------------------------------


def test_halves_of_another_engine_may_fall_either_way_but_not_all_one_way():
    from bitnet_ref.crossval.flips import judge_flips

    m = model(GOLDEN / "bitnet-packed-offline")
    linear, source = "blocks.0.attn.q_proj", "blocks.0.ln1.hook_normalized"
    x = np.full((2, 64), 0.5, dtype=np.float32) * np.arange(1, 65, 2)[:32].repeat(2) / 64
    x[:, 0] = 127 / 64  # the scale is 64
    runs = {source: x}
    mine = np.rint(x * 64).astype(np.int8)
    up, places = np.floor(x * 64 + 0.5).astype(np.int8), np.ones(2, dtype=bool)
    one = mine.copy()
    one[0, np.flatnonzero(up[0] != mine[0])[0]] += 1

    def judge(theirs, own_engine):
        return judge_flips(runs, runs, linear, m.config, 0, places, mine, theirs, own_engine).unexplained

    assert judge(one, own_engine=False) is None
    assert judge(one, own_engine=True) is not None
    assert judge(up, own_engine=False) is not None  # more than TIES_IN_A_ROW, all upwards


def test_float32_angles_of_another_engine_drift_with_the_position():
    from bitnet_ref.crossval.tolerances import EPSILON, angle_drift

    assert not angle_drift("embedding", 0, 9).any()
    assert not angle_drift("norm", None, 9).any()
    assert angle_drift("rope", None, 9)[8] == angle_drift("logits", 3, 9)[8] == 32 * EPSILON
