"""One token out of one row of logits, against the definitions spelled out."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bitnet_ref.backends.backend import DrawRule
from bitnet_ref.backends.cpu.extension import simd_variants, why_unavailable
from bitnet_ref.generation import SamplingParams
from bitnet_ref.generation.sampling import _draw_by_blocks, _invert, choose, distribution, log_probability

LOGITS = hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(-30, 30, width=32))


def softmax(x):
    e = np.exp(x.astype(np.float64) - x.max())
    return e / e.sum()


def by_definition(logits, temperature, top_k, top_p):
    """{id: probability}, the slow way: sort, cut to k, cut to the fewest that reach p, renormalise."""
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    if top_k:
        order = order[:top_k]
    p = softmax(logits[order].astype(np.float64) / temperature)
    kept, mass = [], 0.0
    for i, probability in zip(order, p, strict=True):
        if kept and mass >= top_p and top_p < 1:
            break
        kept.append((i, probability))
        mass += probability
    return {i: probability / sum(q for _, q in kept) for i, probability in kept}


@given(LOGITS, st.floats(0.1, 3), st.integers(0, 45), st.sampled_from([1.0, 0.9, 0.5, 0.01]))
def test_distribution_is_the_definition(logits, temperature, top_k, top_p):
    ids, probabilities = distribution(logits, SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p))
    expected = by_definition(logits, temperature, top_k, top_p)
    got = dict(zip(ids.tolist(), probabilities.tolist(), strict=True))
    if len(got) != len(expected):  # a cumulative sum within rounding of top_p may fall either way
        shorter, longer = sorted((got, expected), key=len)
        assert set(shorter) < set(longer)
        before = by_definition(logits, temperature, top_k, 1.0)
        assert sum(before[i] for i in shorter) == pytest.approx(top_p, abs=1e-9)
    else:
        assert got == pytest.approx(expected, abs=1e-12)
    assert sum(got.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    "limits", [{"top_p": 0.9}, {"min_p": 0.02}, {"top_p": 0.99, "min_p": 1e-4}, {"typical_p": 0.5}]
)
@pytest.mark.parametrize("spread", [0.01, 1.0, 3.0, 30.0])
def test_the_limits_of_many_tokens(limits, spread):
    """Few tokens, hundreds or nearly all stay: the same as of all tokens sorted."""
    logits = (spread * np.random.default_rng(0).standard_normal(3000)).astype(np.float32)
    logits[7] = logits[1999] = logits[5]
    params = SamplingParams(temperature=0.8, **limits)
    ids, probabilities = distribution(logits, params)
    order = np.argsort(-logits, kind="stable")
    p = softmax(logits.astype(np.float64) / 0.8)[order]
    keep = np.cumsum(p) - p < params.top_p
    keep &= p >= params.min_p * p[0]
    if params.typical_p < 1:
        distance = np.abs(-np.log(p) + (p * np.log(p)).sum())
        nearest = np.argsort(distance, kind="stable")
        keep = distance <= distance[nearest[np.count_nonzero(np.cumsum(p[nearest]) < 0.5)]]
    assert ids.tolist() == order[keep].tolist()
    np.testing.assert_allclose(probabilities, p[keep] / p[keep].sum(), rtol=1e-12)


SETS = [name for name, lacks in simd_variants().items() if lacks is None] if why_unavailable() is None else []


@cache
def kernel_draws():
    from bitnet_ref.backends.cpu.backend import CythonBackend

    return [CythonBackend(threads=1, simd=name).draw for name in SETS]


def by_blocks(logits, rule, uniform):
    return _draw_by_blocks(logits, rule.temperature, uniform)


def draws():
    """`_draw_by_blocks`, and the same in the kernels."""
    return [by_blocks, *kernel_draws()]


@pytest.mark.sample(4)
@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 1000, 4096])
@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0])
@pytest.mark.parametrize("draw", draws(), ids=["NumPy", *SETS])
def test_a_draw_by_blocks_is_the_draw_one_by_one(size, temperature, draw):
    """For the numbers at which one token ends and the next begins, too."""
    rng, params, undecided = np.random.default_rng(size), SamplingParams(temperature=temperature), 0
    for spread in (0.01, 1, 5, 40):
        logits = (rng.standard_normal(size) * spread).astype(np.float32)
        logits[1 + np.flatnonzero(rng.random(size - 1) < 0.1)] = -np.inf
        ids, probabilities = distribution(logits, params)
        ends = np.cumsum(probabilities)
        edges = rng.choice(ends, 6)
        uniforms = [0.0, np.nextafter(1, 0), *rng.random(9), *edges, *np.nextafter(edges, 0), *np.nextafter(edges, 2)]
        for uniform in (each for each in uniforms if each < 1):
            last = int(np.searchsorted(ends, ends[-1]))
            expected = min(int(np.searchsorted(ends, uniform, side="right")), last)
            assert choose(logits, params, uniform, draw) == ids[expected]
            undecided += draw(logits, DrawRule(temperature), uniform) is None
    assert undecided > 0  # at the edges


@st.composite
def rows_of_logits(draw):
    """Many or few, near or far apart, with equal ones, zeros of both signs and tokens that cannot come."""
    n, seed = draw(st.sampled_from([1, 2, 63, 64, 65, 300, 1500])), draw(st.integers(0, 2**32))
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal(n) * draw(st.sampled_from([1e-3, 1, 5, 40])) + draw(st.sampled_from([0, 0, 30, -1e4]))
    if draw(st.booleans()):
        logits = np.round(logits * 2) / 2  # ties
    logits[1 + np.flatnonzero(rng.random(n - 1) < draw(st.sampled_from([0, 0.1, 0.99])))] = -np.inf
    return logits.astype(np.float32)


@pytest.mark.thorough
@settings(max_examples=300)
@given(
    rows_of_logits(),
    st.sampled_from([1e-6, 0.01, 0.3, 0.8, 1.0, 3.0, 1e6]),
    st.sampled_from([0, 1, 2, 40, 1500, 10**6]),
    st.sampled_from([1.0, 1 - 1e-12, 0.999, 0.95, 0.5, 1e-3, 1e-12]),
    st.sampled_from([0.0, 1e-30, 1e-4, 0.05, 0.5, 1.0]),
    st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=4),
)
def test_a_limited_draw_of_the_kernels_is_numpys(logits, temperature, top_k, top_p, min_p, uniforms):
    """At the numbers at which one token ends and the next begins, too: there the kernels may leave it to NumPy."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ids, probabilities = distribution(logits, params)
    ends = np.cumsum(probabilities)
    edges = ends[np.argsort(-probabilities, kind="stable")[:3]]
    numbers = [0.0, *uniforms, *edges, *np.nextafter(edges, 0), *np.nextafter(edges, 2), np.nextafter(1, 0)]
    for uniform in (float(each) for each in numbers if each < 1):
        expected = int(ids[_invert(ends, uniform)])
        for draw in kernel_draws():
            rule = DrawRule(temperature, top_k if top_k < len(logits) else 0, top_p, min_p)
            assert draw(logits, rule, uniform) in (None, expected)
            assert choose(logits, params, uniform, draw) == expected


@pytest.mark.parametrize("limits", [{"top_k": 40}, {"top_p": 0.95}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.9}])
def test_the_kernels_draw_nearly_all_limited_tokens(limits):
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.8, **limits)
    rule, uniform = DrawRule(params.temperature, params.top_k, params.top_p, params.min_p), rng.random()
    for row in (3 * rng.standard_normal((20, 4096))).astype(np.float32):
        assert all(draw(row, rule, uniform) is not None for draw in kernel_draws())


@given(LOGITS)
def test_greedy_takes_the_smallest_id_among_the_largest(logits):
    expected = min(i for i in range(len(logits)) if logits[i] == logits.max())
    rng = np.random.default_rng(0)
    assert choose(logits, SamplingParams(), rng.random()) == expected
    assert choose(logits, SamplingParams(temperature=0.7, top_k=1), rng.random()) == expected


@pytest.mark.thorough
def test_sampling_follows_the_distribution():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    rng = np.random.default_rng(1)
    drawn = [choose(logits, SamplingParams(temperature=1.0), rng.random()) for _ in range(4000)]
    counts = np.bincount(drawn, minlength=4) / 4000
    np.testing.assert_allclose(counts, [0.5, 0.3, 0.15, 0.05], atol=0.03)  # 4 standard deviations


def test_top_k_keeps_exactly_k_of_equal_logits():
    ids, probabilities = distribution(np.zeros(10, np.float32), SamplingParams(temperature=1.0, top_k=3))
    assert ids.tolist() == [0, 1, 2]
    assert probabilities.tolist() == pytest.approx([1 / 3] * 3)


def test_a_tiny_temperature_does_not_overflow():
    logits = np.array([0.0, 80.0, -80.0], np.float32)
    ids, probabilities = distribution(logits, SamplingParams(temperature=1e-6))
    assert dict(zip(ids.tolist(), probabilities.tolist(), strict=True)) == {0: 0.0, 1: 1.0, 2: 0.0}


@given(LOGITS)
def test_log_probability(logits):
    for token in range(len(logits)):
        assert log_probability(logits, token) == pytest.approx(np.log(softmax(logits)[token]), rel=1e-9, abs=1e-9)
