"""`ternary_row.cu` on the emulated device: one token's row made, normed, quantised and multiplied in one launch equals
the same steps one by one, by NumPy, bit for bit."""

from dataclasses import replace

import numpy as np
import pytest
from helpers import random_ternary, rng, run_sanitized
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bitnet_ref.backends import Backend
from bitnet_ref.backends.cuda import emulated_build
from bitnet_ref.backends.cuda.emulated_device import EmulatedDevice
from bitnet_ref.backends.cuda.rows import MOST_COLUMNS, linear_of_row, takes_row, value
from bitnet_ref.backends.cuda.stacks import stack_of
from bitnet_ref.backends.cuda.ternary import TernaryKernels
from bitnet_ref.backends.cuda.workspace import Workspace
from bitnet_ref.backends.deferred import GATES, PLAIN, SUM, Normed, Rows
from bitnet_ref.errors import NumericsError
from bitnet_ref.weights import TernaryWeight

pytestmark = pytest.mark.skipif(emulated_build.compiler() is None, reason="no C++ compiler")
PLAIN_BACKEND = Backend()
SOURCES = {"plain": PLAIN, "sum": SUM, **GATES}


@pytest.fixture(scope="module")
def ws():
    return Workspace(EmulatedDevice())


def random_weight(dice, n_out, n_in, biased=False):
    weight = TernaryWeight.from_ternary(random_ternary(dice, n_out, n_in), float(dice.uniform(0.01, 3)))
    return replace(weight, bias=dice.standard_normal(n_out).astype(np.float32)) if biased else weight


def row_by_numpy(source, a, b):
    if source == "plain":
        return a
    return PLAIN_BACKEND.add(a, b) if source == "sum" else PLAIN_BACKEND.gated(a, b, source)


def equal_bits(ws, found, expected):
    np.testing.assert_array_equal(ws.download(found)[0].view(np.int32), expected.view(np.int32))


@settings(max_examples=120, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 80),
    st.integers(1, 1200),
    st.sampled_from(list(SOURCES)),
    *[st.booleans()] * 2,
)
@example(0, 1, 1, "plain", False, False)
@example(1, 16, 512, "sum", True, False)
@example(2, 17, 513, "sum", True, True)
@example(3, 40, 1025, "silu", True, False)
@example(4, 33, 8300, "relu2", True, False)  # more tiles than its warps ask for at once
def test_a_row_made_and_multiplied(ws, seed, n_out, n_in, source, norms, biased):
    dice = rng(seed)
    weight = random_weight(dice, n_out, n_in, biased)
    a, b = (dice.standard_normal((1, n_in)).astype(np.float32) for _ in range(2))
    made = row_by_numpy(source, a, b)
    normed, of = made, Rows(SOURCES[source], ws.upload(a), None if source == "plain" else ws.upload(b))
    x = of
    if norms:
        norm = dice.standard_normal(n_in).astype(np.float32)
        normed, x = PLAIN_BACKEND.rms_norm(made, norm, 1e-5), Normed(of, ws.upload(norm), 1e-5)
    tiled = TernaryKernels(ws.device).prepare(weight)
    assert takes_row(x, tiled)
    equal_bits(ws, linear_of_row(ws, x, tiled), PLAIN_BACKEND.linear(normed, weight))
    assert (of.source == PLAIN) == (source in ("plain", "sum"))  # the residual stream is there now
    equal_bits(ws, value(ws, of), made)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 700), st.sampled_from(list(GATES)), st.booleans())
@example(0, 300, 40, "relu2", False)  # more rows than blocks
@example(1, 2, 4200, "silu", True)  # gate and up have more tiles than are asked for at once
def test_gate_and_up_multiplied_as_one(ws, seed, tiles, n_in, activation, biased):
    dice, kernels = rng(seed), TernaryKernels(ws.device)
    weights = [random_weight(dice, 16 * tiles, n_in, biased) for _ in range(2)]
    tiled = [kernels.prepare(w) for w in weights]
    kernels.stack(*tiled)
    whole = stack_of(tiled).whole
    x = dice.standard_normal((1, n_in)).astype(np.float32)
    assert takes_row(x, whole, gated=True)
    gate, up = PLAIN_BACKEND.linears(x, weights)
    equal_bits(ws, linear_of_row(ws, ws.upload(x), whole, GATES[activation]), PLAIN_BACKEND.gated(gate, up, activation))
    both = linear_of_row(ws, ws.upload(x), whole)
    equal_bits(ws, both, np.concatenate([gate, up], axis=1))


def test_what_it_does_not_take(ws):
    dice, kernels = rng(0), TernaryKernels(ws.device)
    one, two = np.zeros((1, 8), dtype=np.float32), np.zeros((2, 8), dtype=np.float32)
    tiled = [kernels.prepare(random_weight(dice, n_out, 8)) for n_out in (16, 32, 8)]
    kernels.stack(*tiled)
    whole = stack_of(tiled).whole
    assert takes_row(one, whole)
    assert not takes_row(one, whole, gated=True)  # q, k and v are no gate and up
    assert not takes_row(two, whole)
    assert not takes_row(one, random_weight(dice, 16, 8))
    wide = kernels.prepare(random_weight(dice, 1, MOST_COLUMNS + 1))
    assert not takes_row(np.zeros((1, MOST_COLUMNS + 1), dtype=np.float32), wide)


@pytest.mark.parametrize(
    ("bad", "norms", "what"), [(np.inf, True, "rms_norm"), (np.nan, False, "quantize_activations")]
)
def test_what_is_not_finite_is_told(ws, bad, norms, what):
    x = np.ones((1, 100), dtype=np.float32)
    x[0, 77] = bad
    rows = Rows(PLAIN, ws.upload(x))
    norm = ws.upload(np.ones(100, dtype=np.float32))
    y = linear_of_row(
        ws,
        Normed(rows, norm, 1e-5) if norms else rows,
        TernaryKernels(ws.device).prepare(random_weight(rng(0), 40, 100)),
    )
    with pytest.raises(NumericsError, match=what):
        ws.download(y)


@pytest.mark.parametrize("order", [1, 2])
def test_the_order_of_threads_does_not_matter(order):
    ws, dice = Workspace(EmulatedDevice(order=order)), rng(5)
    weight, norm = random_weight(dice, 100, 700), dice.standard_normal(700).astype(np.float32)
    a, b = (dice.standard_normal((1, 700)).astype(np.float32) for _ in range(2))
    of = Rows(SUM, ws.upload(a), ws.upload(b))
    found = linear_of_row(ws, Normed(of, ws.upload(norm), 1e-5), TernaryKernels(ws.device).prepare(weight))
    equal_bits(ws, found, PLAIN_BACKEND.linear(PLAIN_BACKEND.rms_norm(a + b, norm, 1e-5), weight))
    equal_bits(ws, of.a, a + b)


SANITIZED = """
import numpy as np
from bitnet_ref.backends.cuda.emulated_device import EmulatedDevice
from bitnet_ref.backends.cuda.rows import linear_of_row
from bitnet_ref.backends.cuda.ternary import TernaryKernels
from bitnet_ref.backends.cuda.workspace import Workspace
from bitnet_ref.backends.deferred import RELU2, SUM, Normed, Rows
from bitnet_ref.weights import TernaryWeight

ws = Workspace(EmulatedDevice(sanitize=True))
kernels = TernaryKernels(ws.device)
for n_out, n_in in ((1, 1), (16, 128), (20, 600), (33, 129), (64, 9000)):
    ones = [np.ones((n, n_in), dtype=np.int8) for n in (n_out, 32, 32)]
    weights = [kernels.prepare(TernaryWeight.from_ternary(w, 0.5)) for w in ones]
    ones = ws.upload(np.ones((1, n_in), dtype=np.float32))
    normed = Normed(Rows(SUM, ones, ones), ones[0], 1e-5)
    assert (ws.download(linear_of_row(ws, normed, weights[0]))[0] > 0).all()
    whole = kernels.stack(*weights[1:]).whole
    assert (ws.download(linear_of_row(ws, normed, whole, RELU2))[0] > 0).all()
print("clean")
"""


@pytest.mark.slow
def test_no_access_is_out_of_bounds():
    done = run_sanitized(SANITIZED)
    assert (done.returncode, done.stdout) == (0, "clean\n"), done.stderr
