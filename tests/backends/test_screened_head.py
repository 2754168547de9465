"""The screened head: its bounds hold, and what is chosen from its candidates is what is chosen from all logits."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from helpers import GOLDEN, model, rng
from hypothesis import given, settings
from hypothesis import strategies as st

import bitnet_ref
from bitnet_ref.backends import Backend
from bitnet_ref.backends.backend import HeadNeed
from bitnet_ref.backends.cpu.backend import CythonBackend
from bitnet_ref.backends.cpu.extension import simd_variants, why_unavailable
from bitnet_ref.backends.cpu.weights import MIN_SCREENED_BYTES, ScreenedHead, surviving_rows
from bitnet_ref.backends.run import TokenLogits
from bitnet_ref.errors import BackendUnavailable, NumericsError, ShapeError
from bitnet_ref.generation import SamplingParams
from bitnet_ref.generation.sampling import candidates_needed, choose, choose_among
from bitnet_ref.reference.cache import TokenBatch
from bitnet_ref.reference.weights import DenseWeight

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
RUNNABLE = [name for name, lacks in simd_variants().items() if lacks is None]
BF16 = ml_dtypes.bfloat16


@pytest.fixture(params=RUNNABLE)
def compiled(request):
    return CythonBackend(threads=2, simd=request.param, head="screened")


def candidates(be, x, head, needs):
    """The logits that a screened head computes for each token of x, as a pass returns them."""
    rows = be.head_rows(x, head, needs)
    return [TokenLogits(each, head.shape[0], lambda h: be.lm_head(h, head), h) for each, h in zip(rows, x, strict=True)]


def gaussian(n_rows, n_in, dtype=BF16, seed=0):
    return rng(seed, n_rows, n_in).standard_normal((n_rows, n_in)).astype(np.float32).astype(dtype)


def adversarial(kind, dtype=BF16):
    """300 rows of 70 that are hard to tell apart, or hard on the arithmetic."""
    w = gaussian(300, 70, dtype, seed=1)
    bits = w.view(np.uint32 if dtype == np.float32 else np.uint16)
    if kind == "duplicates":
        w[1::2] = w[::2]
    elif kind == "last bit":
        w[:] = w[0]
        bits[1::3, 5] ^= 1
        bits[2::3, 66] ^= 1
    elif kind == "negated":
        w[1::2] = -w[::2]
    elif kind == "negative zeros":
        w[:] = 0
        w[::2] = -w[::2]
    elif kind == "huge":
        w[:] = (w.astype(np.float64) * (1e4 if dtype == np.float16 else 1e34)).astype(dtype)
    elif kind == "norms of all sizes":
        sizes = (-8, 4) if dtype == np.float16 else (-38, 30)
        w[:] = (w.astype(np.float64) * 10.0 ** np.linspace(*sizes, 300)[:, None]).astype(dtype)
    elif kind == "subnormal":
        w[:] = (w.astype(np.float64) * (1e-6 if dtype == np.float16 else 1e-39)).astype(dtype)
    elif kind == "one outlier a row":
        w[np.arange(300), np.arange(300) % 70] = 1000
    elif kind == "extreme":  # the int8 sums at their largest
        w[:] = np.where(np.arange(300)[:, None] % 2, 1, -1)
    return w


KINDS = ["duplicates", "last bit", "negated", "negative zeros", "huge", "norms of all sizes", "subnormal"]
KINDS += ["one outlier a row", "extreme", "random"]


def states(n_in):
    """What a head may see: plain, one outlier, tiny, large, all equal, zero."""
    x = rng(3, n_in).standard_normal((6, n_in)).astype(np.float32)
    x[1, 7 % n_in] = 500
    x[2] *= 1e-42
    x[3] *= 1e15
    x[4] = 1
    x[5] = 0
    return x


def check_bounds(be, x, w):
    with np.errstate(all="ignore"):
        logits = be.lm_head(x, w)
        lower, upper = be._head_bounds(x, be._add_screen(w), range(len(x)))
    finite = np.isfinite(logits)
    assert (lower <= logits)[finite].all()
    assert (logits <= upper)[finite].all()
    assert np.isinf(upper[~finite]).all()  # what overflows has no bound, and so is computed
    return lower, upper


@pytest.mark.parametrize("dtype", [BF16, np.float32, np.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_bounds_hold_on_adversarial_rows(compiled, kind, dtype):
    w = DenseWeight(adversarial(kind, dtype))
    with np.errstate(all="ignore"):
        check_bounds(compiled, states(70), w)
        exact = w.array.astype(np.float64) @ states(70).astype(np.float64).T  # for any order of the sum, so for none
    lower, upper = compiled._head_bounds(states(70), compiled._add_screen(w), range(6))
    assert (lower <= exact.T).all()
    assert (upper >= exact.T).all()


@pytest.mark.parametrize("n_in", [1, 31, 64, 65, 2560, 6000])
def test_bounds_hold_and_are_narrow(compiled, n_in):
    w = DenseWeight(gaussian(200, n_in))
    x = states(n_in)[:1]
    lower, upper = check_bounds(compiled, x, w)
    rows = np.linalg.norm(w.array.astype(np.float64), axis=1)
    # int8 residuals are about max|w| / 127 / sqrt(12) in size, a hundredth of the row: the bound is no wider for long
    assert ((upper - lower)[0] <= 2 * 0.015 * rows * np.linalg.norm(x)).all()


def test_the_integer_sum_at_its_largest(compiled):
    for n_in in (2048, 4097, 20000):
        w = DenseWeight(np.ones((5, n_in), np.float32).astype(BF16))
        lower, upper = check_bounds(compiled, np.full((1, n_in), 3.0, np.float32), w)
        np.testing.assert_allclose(lower, 3 * n_in, rtol=n_in * 1e-7)
        np.testing.assert_allclose(upper, 3 * n_in, rtol=n_in * 1e-7)


def test_the_rounding_of_the_exact_logits_is_in_the_bounds(compiled):
    """Rows and states of whole numbers have no residual: all that is between int8 and float32 is float32's rounding."""
    half = rng(4).integers(1, 127, (50, 10000))
    w = np.concatenate([half, -half[:, ::-1]], axis=1).astype(np.float32)
    w[:, 0] = 127
    x = rng(5).integers(1, 32639, (1, 10000)).astype(np.float32)
    x = np.concatenate([x, x[:, ::-1]], axis=1)
    x[0, 0] = 32639
    exact = w.astype(np.float64) @ x[0].astype(np.float64)
    logits = compiled.lm_head(x, DenseWeight(w))[0]
    assert np.abs(logits - exact).max() > 100  # float32 sums of 10,000 numbers of up to 4 million, mostly cancelled
    check_bounds(compiled, x, DenseWeight(w))


finite_floats = st.floats(-1e6, 1e6, width=32, allow_subnormal=True)


@pytest.mark.thorough
@given(st.data())
@settings(max_examples=100)
def test_bounds_and_choices_on_any_head(data):
    be = CythonBackend(threads=1, simd=data.draw(st.sampled_from(RUNNABLE)), head="screened")
    n_rows, n_in = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 9))
    values = st.lists(finite_floats, min_size=n_rows * n_in, max_size=n_rows * n_in)
    w = np.array(data.draw(values), np.float32).reshape(n_rows, n_in)
    w = DenseWeight(w.astype(data.draw(st.sampled_from([BF16, np.float32]))))
    x = np.array([data.draw(st.lists(finite_floats, min_size=n_in, max_size=n_in))], np.float32)
    lower, upper = check_bounds(be, x, w)
    logits = be.lm_head(x, w)[0]
    for k in {1, min(3, n_rows), n_rows}:
        ids = surviving_rows(lower[0], upper[0], k)
        assert set(np.argsort(-logits, kind="stable")[:k]) <= set(ids)
        assert set(np.flatnonzero(logits == np.sort(logits)[-k])) <= set(ids)


# -- candidates and choices --------------------------------------------------------------------------------------------

PARAMS = [
    {},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.5},
    {"temperature": 0.01, "top_k": 20, "top_p": 0.99},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 1e-3, "top_p": 0.999},
    {"temperature": 30.0, "top_p": 0.01},
    {"temperature": 1.0},
    {"temperature": 1e100, "top_k": 3},
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", KINDS)
def test_choices_equal_those_of_all_logits(compiled, kind):
    w = adversarial(kind)
    w = DenseWeight(np.concatenate([w, gaussian(4000, 70, seed=2) * BF16(0.01)]))  # so that there is much to leave out
    head, x = compiled._add_screen(w), states(70)[[0, 1, 4]]
    logits = compiled.lm_head(x, w)
    if not np.isfinite(logits).all():
        pytest.skip("these logits overflow: generation refuses them")
    for given_params in PARAMS:
        params = SamplingParams.of(**given_params)
        found = candidates(compiled, x, head, [HeadNeed(candidates_needed(params, 4300))] * 3)
        for i, token in enumerate(found):
            np.testing.assert_array_equal(token.values.view(np.uint32), logits[i][token.ids].view(np.uint32))
            for uniform in (0.0, 0.3, 0.9999, float(rng(i).random())):
                if token.complete:
                    continue
                chosen = choose_among(token, params, uniform)
                assert chosen in (choose(logits[i], params, uniform), None)
                assert chosen is not None or (params.top_p < 1 and params.top_k == 0)


def test_few_rows_are_computed(compiled):
    w = gaussian(20000, 256)
    x = states(256)[[0, 4]]
    for k, most in ((1, 60), (50, 1000)):
        for token in candidates(compiled, x, compiled._add_screen(DenseWeight(w)), [HeadNeed(k)] * 2):
            assert k <= len(token.ids) <= most


def test_ties_go_to_the_smaller_id(compiled):
    w = gaussian(5000, 64) * BF16(0.1)
    w[[4001, 17, 2500]] = w[17] = gaussian(1, 64, seed=9)[0]
    x = w[17].astype(np.float32)[None]
    (found,) = candidates(compiled, x, compiled._add_screen(DenseWeight(w)), [HeadNeed(1)])
    assert {17, 2500, 4001} <= set(found.ids.tolist())
    assert len(found.ids) < 100
    assert choose_among(found, SamplingParams(), 0.0) == 17
    (found,) = candidates(compiled, x, compiled._add_screen(DenseWeight(w)), [HeadNeed(2)])
    params = SamplingParams(temperature=1.0, top_k=2)
    assert {choose_among(found, params, uniform) for uniform in (0.1, 0.9)} == {17, 2500}


def test_ids_can_be_forced_in(compiled):
    w = DenseWeight(gaussian(2000, 64))
    x = states(64)[:1]
    (found,) = candidates(compiled, x, compiled._add_screen(w), [HeadNeed(1, [3, 1999, 3])])
    assert {3, 1999} <= set(found.ids.tolist())
    assert (np.diff(found.ids) > 0).all()
    np.testing.assert_array_equal(found.values, compiled.lm_head(x, w)[0][found.ids])


def test_top_p_alone_is_decided_by_the_bounds_where_it_can(compiled):
    """A sharp distribution, whose rest weighs nothing, is; a flat one is not."""
    w = gaussian(20000, 64) * BF16(0.05)
    w[:3] = gaussian(3, 64, seed=5)
    x = w[0].astype(np.float32)[None]
    logits = compiled.lm_head(x, DenseWeight(w))[0]
    for temperature, decided in ((0.5, True), (1000.0, False)):
        params = SamplingParams(temperature=temperature, top_p=0.9)
        k = candidates_needed(params, len(w))
        (found,) = candidates(compiled, x, compiled._add_screen(DenseWeight(w)), [HeadNeed(k)])
        assert not found.complete
        token = choose_among(found, params, 0.5)
        assert token == (choose(logits, params, 0.5) if decided else None)


def test_rows_that_are_all_alike_take_the_whole_head(compiled):
    w = np.repeat(gaussian(1, 64), 5000, axis=0)
    (found,) = candidates(compiled, states(64)[:1], compiled._add_screen(DenseWeight(w)), [HeadNeed(1)])
    assert found.complete
    assert choose(found.values, SamplingParams(), 0.0) == 0


def test_each_token_gets_what_it_needs_itself(compiled):
    """One that needs all logits does not make the others compute them."""
    w, x = DenseWeight(gaussian(5000, 64)), states(64)[[0, 4, 0]]
    head, logits = compiled._add_screen(w), compiled.lm_head(x, w)
    needs = [HeadNeed(1), HeadNeed(None), HeadNeed(2, np.array([7]))]
    found = candidates(compiled, x, head, needs)
    assert [token.complete for token in found] == [False, True, False]
    assert 7 in found[2].ids
    assert 7 not in found[0].ids
    for i, token in enumerate(found):
        np.testing.assert_array_equal(token.values, logits[i][token.ids])
        (alone,) = candidates(compiled, x[i : i + 1], head, needs[i : i + 1])
        np.testing.assert_array_equal(token.ids, alone.ids)
        np.testing.assert_array_equal(token.values, alone.values)
    with pytest.raises(ShapeError, match="head_rows"):
        candidates(compiled, x, head, needs[:2])


# -- NaN and Inf -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_bad_state_is_refused(compiled, value):
    x = states(64)[:2]
    x[1, 40] = value
    head = compiled._add_screen(DenseWeight(gaussian(5000, 64)))
    for needs in ([HeadNeed(1), HeadNeed(1)], [HeadNeed(), HeadNeed(1)]):
        with pytest.raises(NumericsError, match="token 1"):
            candidates(compiled, x, head, needs)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -3e38])
def test_a_row_that_is_not_finite_or_overflows_is_always_computed(compiled, value):
    w = gaussian(5000, 64)
    w[1234, 60:] = value
    with np.errstate(all="ignore"):
        (found,) = candidates(
            compiled, np.full((1, 64), 10, np.float32), compiled._add_screen(DenseWeight(w)), [HeadNeed(1)]
        )
    assert not np.isfinite(found.values[found.ids == 1234]).any()
    assert np.isfinite(found.values[found.ids != 1234]).all()


# -- the whole model ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair():
    return [bitnet_ref.load("storyteller", backend="cython", threads=2, head=head) for head in ("exact", "screened")]


@pytest.mark.sample(3)
@pytest.mark.parametrize("params", PARAMS[:-1])
def test_generation_is_the_same_to_the_bit(pair, params):
    prompts = ["Once upon a time", "Alice", "The old man of the sea"]
    exact, screened = ([*m.generate(prompts, max_tokens=12, seed=1, **params)] for m in pair)
    for a, b in zip(exact, screened, strict=True):
        assert (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)
        assert a.logprobs == b.logprobs
    assert exact[0].stats.screened_tokens == 0
    assert exact[0].stats.head_rows == 36 * 4096
    stats = screened[0].stats
    if params.get("temperature", 0) == 0:
        assert stats.screened_tokens == 36
        assert 36 <= stats.head_rows < 36 * 100
    elif "top_k" not in params and "top_p" not in params:
        assert stats.screened_tokens == 0
    assert stats.generated_tokens == 36


def test_top_k_is_screened(pair):
    stats = pair[1].generate("Alice", max_tokens=12, temperature=0.8, top_k=5, seed=2).stats
    assert stats.screened_tokens == 12
    assert 12 * 5 <= stats.head_rows < 12 * 512


def test_auto_screens_large_heads_only(pair):
    be = CythonBackend(threads=1)
    small = bitnet_ref.load("storyteller", backend="cython")
    assert small.head == "exact"
    assert [m.head for m in pair] == ["exact", "screened"]
    assert pair[1].weights.tied == pair[0].weights.tied
    large = DenseWeight(np.zeros((MIN_SCREENED_BYTES // 128, 64), BF16))
    weights = small.weights
    assert type(be.prepare_model(weights, small.config)) is type(weights)
    screened = be.prepare_model(replace(weights, lm_head=large, embedding=large), small.config)
    assert isinstance(screened.lm_head, ScreenedHead)
    assert screened.tied
    assert screened.lm_head.nbytes == large.nbytes + screened.lm_head.screen_nbytes


def test_heads_that_no_screen_fits_stay_as_they_are(compiled):
    story = model("storyteller", "cython")
    weights = story.weights
    for head in (
        DenseWeight(gaussian(50, 16)[:, ::2]),
        DenseWeight(gaussian(50, 8), bias=np.ones(50, np.float32)),
        weights.layers[0].q_proj,
    ):
        assert compiled.prepare_model(replace(weights, lm_head=head), story.config).lm_head is head


def test_capped_logits_may_be_equal_where_others_are_not(compiled):
    """The cap rounds them: the smaller id is the choice, as with an exact head."""
    story = model("storyteller", "cython")
    config = replace(story.config, logit_softcap=0.1)
    capped = bitnet_ref.Model(config, compiled.prepare_model(story.weights, config), compiled)
    exact = bitnet_ref.Model(config, story.weights, story.backend)
    prompt = story.tokenizer.encode("Once upon a time")
    for params in ({"temperature": 0.0}, {"top_k": 5, "seed": 1}):
        mine, expected = (m.generate(prompt, max_tokens=8, ignore_eos=True, **params) for m in (capped, exact))
        assert mine.token_ids == expected.token_ids


def test_other_options_are_refused():
    with pytest.raises(BackendUnavailable, match="numpy"):
        bitnet_ref.load("storyteller", backend="numpy", head="screened")
    with pytest.raises(BackendUnavailable, match="fast"):
        CythonBackend(head="fast")


@pytest.mark.parametrize("case", ["bitnet-packed-offline", "llama-tied-duplicate", "llama-dense"])
def test_golden_models(case):
    numpy = model(GOLDEN / case)
    screened = bitnet_ref.load(GOLDEN / case, backend="cython", head="screened")
    ids = [1, 5, 9]
    assert screened.generate(ids, max_tokens=8, ignore_eos=True).token_ids == (
        numpy.generate(ids, max_tokens=8, ignore_eos=True).token_ids
    )


def test_nan_in_a_screened_run_is_named(pair):
    m = pair[1]
    weight = m.weights.final_norm.weight.copy()
    weight[3] = np.inf
    norm = replace(m.weights.final_norm, weight=weight)
    bad = bitnet_ref.Model(m.config, replace(m.weights, final_norm=norm), m.backend, m.path)
    for top in (None, [(1, ())]):
        with pytest.raises(NumericsError, match=r"ln_final\.hook_normalized"):
            bad.run(TokenBatch.of([(0, 0, [1, 2, 3])], [0]), bad.new_cache(1, 3), top)


@pytest.mark.parametrize("path", [None, "ops", "blocks", "replayed"])
def test_a_screened_pass_has_the_logits_of_the_exact_one(pair, path):
    """Each token gets what it was asked for, on every path; the rest is bounded, and computed when somebody asks."""
    exact, screened = pair
    batch = TokenBatch.of([(0, 0, [1, 20, 300, 7])])
    logits = exact.run(batch, exact.new_cache(1, 4)).all()
    top = [(1, ()), (None, ()), (5, [7, 9]), (1, [3])]
    tokens = screened.run(batch, screened.new_cache(1, 4), top, path).tokens
    assert [token.complete for token in tokens] == [False, True, False, False]
    for token, (k, also), expected in zip(tokens, top, logits, strict=True):
        np.testing.assert_array_equal(token.values, expected[token.ids])
        assert {*also} <= {*token.ids.tolist()}
        if k is not None:
            assert {*np.argsort(-expected, kind="stable")[:k]} <= {*token.ids.tolist()}
            lower, upper = token.rest()
            others = np.delete(expected, token.ids)
            assert (lower <= others).all()
            assert (others <= upper).all()
            assert upper.max() < np.sort(expected)[-k]
        np.testing.assert_array_equal(token.all(), expected)
    np.testing.assert_array_equal(screened.run(batch, screened.new_cache(1, 4), path=path).all(), logits)


def test_every_row_is_the_base_definition():
    be, w, x = Backend(), DenseWeight(gaussian(50, 8, np.float32)), states(8)[:2]
    for token, logits in zip(candidates(be, x, w, [HeadNeed(3, [1])] * 2), be.lm_head(x, w), strict=True):
        assert token.complete
        np.testing.assert_array_equal(token.values, logits)
