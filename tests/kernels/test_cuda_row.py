"""`ternary_row.cu`, on a GPU or emulated: one token's row normed, quantised and multiplied in one launch equals the
same steps one by one, by NumPy, bit for bit. And `rows.cu`, which gates, norms and quantises rows of several tokens."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import random_ternary, rng, run_sanitized
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bitnet_ref.backends import Backend, cuda
from bitnet_ref.backends.cuda.emulation import build as emulated_build
from bitnet_ref.backends.cuda.emulation.device import EmulatedDevice
from bitnet_ref.backends.cuda.rows import (
    GATES,
    MAX_COLUMNS,
    MAX_SLOTS,
    MAX_SUMS,
    OWN_SHARED,
    PLAIN,
    gated,
    linear_of_row,
    quantize,
    rms_norm,
    row_launch,
    takes_row,
)
from bitnet_ref.backends.cuda.stacks import stack_of
from bitnet_ref.backends.cuda.ternary import TernaryKernels
from bitnet_ref.backends.cuda.workspace import Workspace
from bitnet_ref.errors import NumericsError
from bitnet_ref.reference.weights import Norm, TernaryWeight

pytestmark = pytest.mark.skipif(cuda.why_unavailable() is not None, reason=str(cuda.why_unavailable()))
emulated = pytest.mark.skipif(emulated_build.compiler() is None, reason="no C++ compiler")
PLAIN_BACKEND = Backend()
SOURCES = {"plain": PLAIN, **GATES}


@pytest.fixture(scope="module")
def ws():
    return Workspace(cuda.open_device())


def random_weight(dice, n_out, n_in, biased=False):
    weight = TernaryWeight.from_ternary(random_ternary(dice, n_out, n_in), float(dice.uniform(0.01, 3)))
    return replace(weight, bias=dice.standard_normal(n_out).astype(np.float32)) if biased else weight


def equal_bits(ws, found, expected):
    np.testing.assert_array_equal(ws.download(found).view(np.int32), expected.view(np.int32))


@pytest.mark.thorough
@settings(max_examples=120, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 80), st.integers(1, 1200), *[st.booleans()] * 3)
@example(0, 1, 1, False, False, False)
@example(1, 16, 512, True, False, True)
@example(2, 17, 513, True, True, True)
@example(3, 40, 1025, True, False, False)
@example(4, 33, 8300, True, False, True)  # more tiles than its warps ask for at once
def test_a_row_normed_multiplied_and_added(ws, seed, n_out, n_in, norms, biased, adds):
    check_row(ws, seed, n_out, n_in, norms, biased, adds)


def check_row(ws, seed, n_out, n_in, norms=True, biased=False, adds=True):
    """A random row, by one launch and by NumPy."""
    dice = rng(seed)
    weight = random_weight(dice, n_out, n_in, biased)
    x = dice.standard_normal((1, n_in)).astype(np.float32)
    normed, norm = x, None
    if norms:
        vector = dice.standard_normal(n_in).astype(np.float32)
        normed, norm = PLAIN_BACKEND.rms_norm(x, Norm(vector, 1e-5)), (ws.upload(vector), 1e-5)
    expected, residual = PLAIN_BACKEND.linear(normed, weight), None
    if adds:
        residual = dice.standard_normal((1, n_out)).astype(np.float32)
        expected = PLAIN_BACKEND.add(residual, expected)
    tiled, on_device = TernaryKernels(ws).prepare(weight), ws.upload(x)
    assert takes_row(x, tiled)
    equal_bits(ws, linear_of_row(ws, on_device, tiled, norm, residual=ws.upload(residual)), expected)


@pytest.mark.parametrize("n_in", [4092, 4096, 4097, 8190, 8192, 8193, 12_288, 12_289, 14_336, 16_383, 16_384])
def test_rows_as_long_as_registers_hold(ws, n_in):
    """Where the kernels meet that hold 2, 4, 6 and 8 times 2048 elements."""
    check_row(ws, n_in, 33, n_in)


@pytest.mark.parametrize(("n_out", "n_in"), [(1100, 40), (1100, 2100), (200, 8300), (700, 3000)])
def test_more_rows_than_a_block_has_sums_for_and_more_tiles_than_a_warp_has_slots_for(ws, n_out, n_in):
    check_row(ws, 7, n_out, n_in, biased=True)


@pytest.mark.parametrize("kilobytes", [99, 163])
@pytest.mark.parametrize("n_in", [2560, 6912, 11_008, 16_384])
@emulated
def test_cards_with_less_shared_memory(kilobytes, n_in):
    """Fewer slots, so that a warp asks for the next tiles while it multiplies."""
    device = EmulatedDevice()
    device.shared_bytes = (kilobytes << 10) - OWN_SHARED  # the emulation does not count a kernel's own
    check_row(Workspace(device), kilobytes, 40, n_in)


@pytest.mark.parametrize("power", [-149, -130, -100, -75, -50, -24, 24, 50, 60])
@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_rows_of_any_size(ws, power, eps):
    """Beside elements of size one or by themselves; the norm by itself too, to the last bit of the smallest number."""
    dice, width = rng(abs(power)), 600
    weight, norm = random_weight(dice, 40, width), dice.standard_normal(width).astype(np.float32)
    tiled = TernaryKernels(ws).prepare(weight)
    small = np.ldexp(dice.standard_normal((1, width)), power).astype(np.float32)
    mixed = np.where(dice.random((1, width)) < 0.5, small, dice.standard_normal((1, width)).astype(np.float32))
    for x in (small, mixed):
        expected = PLAIN_BACKEND.rms_norm(x, Norm(norm, eps))
        if not np.isfinite(expected).all():
            continue
        row, on_device = ws.upload(x), (ws.upload(norm), eps)
        equal_bits(ws, linear_of_row(ws, row, tiled, on_device), PLAIN_BACKEND.linear(expected, weight))
        equal_bits(ws, rms_norm(ws, row, on_device), expected)


def test_rows_that_begin_anywhere(ws):
    """Sixteen bytes are read at once only where they are aligned."""
    dice = rng(3)
    weight, norm = random_weight(dice, 20, 1000), dice.standard_normal(1003).astype(np.float32)
    x = dice.standard_normal((1, 1003)).astype(np.float32)
    tiled, on_device = TernaryKernels(ws).prepare(weight), ws.upload(x)
    for first in (0, 1, 3):
        part = slice(first, first + 1000)
        y = linear_of_row(ws, on_device[:, part], tiled, (ws.upload(norm)[part], 1e-5))
        equal_bits(ws, y, PLAIN_BACKEND.linear(PLAIN_BACKEND.rms_norm(x[:, part], Norm(norm[part], 1e-5)), weight))


@pytest.mark.sample(3)
@pytest.mark.parametrize("n_in", [100, 2560, 6912, 9001, 16_384, 16_385, 40_000])
@pytest.mark.parametrize("source", list(SOURCES))
def test_a_row_is_the_same_in_any_company(ws, n_in, source):
    """By `rows.cu`: alone, among others, and by NumPy; gated, normed and quantised in one launch or in several."""
    dice = rng(n_in)
    a, b = (dice.standard_normal((3, n_in)).astype(np.float32) for _ in range(2))
    vector = dice.standard_normal(n_in).astype(np.float32)
    norm, plain = (ws.upload(vector), 1e-5), source == "plain"

    def quantize_rows(rows):
        up = None if plain else ws.upload(b[rows])
        found = quantize(ws, ws.upload(a[rows]), norm, up=up, gate=SOURCES[source], pad=n_in % 2 == 0)
        return [ws.download(each) for each in found]

    together = quantize_rows(slice(0, 3))
    source_rows = a if plain else PLAIN_BACKEND.gated(a, b, source)
    normed = PLAIN_BACKEND.rms_norm(source_rows, Norm(vector, 1e-5))
    for found, expected in zip(together, PLAIN_BACKEND.quantize_activations(normed), strict=True):
        np.testing.assert_array_equal(found[:, : expected.shape[1]], expected)
        assert not found[:, expected.shape[1] :].any()
    for found, expected in zip(quantize_rows(slice(1, 2)), together, strict=True):
        np.testing.assert_array_equal(found[0], expected[1])
    if not plain:
        equal_bits(ws, gated(ws, ws.upload(a), ws.upload(b), source), source_rows)
    equal_bits(ws, rms_norm(ws, ws.upload(source_rows), norm), normed)


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 700), st.sampled_from(list(GATES)), st.booleans())
@example(0, 300, 40, "relu2", False)  # more rows than blocks
@example(1, 2, 4200, "silu", True)
@example(2, 40, 2100, "relu2", True)  # more sums than a block has room for
def test_gate_and_up_multiplied_as_one(ws, seed, tiles, n_in, activation, biased):
    dice, kernels = rng(seed), TernaryKernels(ws)
    weights = [random_weight(dice, 16 * tiles, n_in, biased) for _ in range(2)]
    tiled = [kernels.prepare(w) for w in weights]
    kernels.stack(*tiled)
    whole = stack_of(tiled).whole
    x = dice.standard_normal((1, n_in)).astype(np.float32)
    assert takes_row(x, whole, gated=True)
    gate, up = PLAIN_BACKEND.linears(x, weights)
    found = linear_of_row(ws, ws.upload(x), whole, gate=GATES[activation])
    equal_bits(ws, found, PLAIN_BACKEND.gated(gate, up, activation))
    both = linear_of_row(ws, ws.upload(x), whole)
    equal_bits(ws, both, np.concatenate([gate, up], axis=1))


def test_what_it_does_not_take(ws):
    dice, kernels = rng(0), TernaryKernels(ws)
    one, two = np.zeros((1, 8), dtype=np.float32), np.zeros((2, 8), dtype=np.float32)
    tiled = [kernels.prepare(random_weight(dice, n_out, 8)) for n_out in (16, 32, 8)]
    kernels.stack(*tiled)
    whole = stack_of(tiled).whole
    assert takes_row(one, whole)
    assert not takes_row(one, whole, gated=True)  # q, k and v are no gate and up
    assert not takes_row(two, whole)
    assert not takes_row(one, random_weight(dice, 16, 8))
    wide = kernels.prepare(random_weight(dice, 1, MAX_COLUMNS + 1))
    assert not takes_row(np.zeros((1, MAX_COLUMNS + 1), dtype=np.float32), wide)


@pytest.mark.parametrize(
    ("bad", "norms", "what"), [(np.inf, True, "rms_norm"), (np.nan, False, "quantize_activations")]
)
def test_what_is_not_finite_is_told(ws, bad, norms, what):
    x = np.ones((1, 100), dtype=np.float32)
    x[0, 77] = bad
    norm = (ws.upload(np.ones(100, dtype=np.float32)), 1e-5) if norms else None
    y = linear_of_row(ws, ws.upload(x), TernaryKernels(ws).prepare(random_weight(rng(0), 40, 100)), norm)
    with pytest.raises(NumericsError, match=what):
        ws.download(y)


@emulated
@pytest.mark.parametrize("order", [1, 2])
def test_the_order_of_threads_does_not_matter(order):
    ws, dice = Workspace(EmulatedDevice(order=order)), rng(5)
    weight, norm = random_weight(dice, 100, 700), dice.standard_normal(700).astype(np.float32)
    x = dice.standard_normal((1, 700)).astype(np.float32)
    found = linear_of_row(ws, ws.upload(x), TernaryKernels(ws).prepare(weight), (ws.upload(norm), 1e-5))
    equal_bits(ws, found, PLAIN_BACKEND.linear(PLAIN_BACKEND.rms_norm(x, Norm(norm, 1e-5)), weight))


# -- launches ----------------------------------------------------------------------------------------------------------


@given(
    st.integers(1, MAX_COLUMNS),
    st.integers(1, 40_000),
    *[st.booleans()] * 2,
    st.sampled_from([99, 163, 227]),
    st.sampled_from([2, 108, 132]),
)
@example(MAX_COLUMNS, 40_000, True, True, 99, 2)
def test_every_launch_is_within_a_cards_limits(width, rows, normed, gated, kilobytes, multiprocessors):
    device = SimpleNamespace(shared_bytes=kilobytes << 10, row_blocks=multiprocessors)
    rows = rows * 32 if gated else rows
    how, halves = row_launch(device, width, rows, normed, gated), 2 if gated else 1
    units = -(-rows // 16 // halves)
    mine = -(-units // how.grid)
    assert 1 <= how.grid <= units
    assert mine * 16 * halves <= MAX_SUMS
    assert mine * 16 <= how.block
    assert how.block % 32 == 0
    assert 4 * how.block >= min(width, 2048)
    assert width <= 2048 * int(how.kernel[-1])
    assert 1 <= how.slots <= MAX_SLOTS
    assert how.shared + OWN_SHARED <= device.shared_bytes
    x_q = -(-width // 128) * 128
    assert how.shared == how.slots * how.block // 32 * 512 + x_q * (5 if normed else 1)


SANITIZED = """
import numpy as np
from bitnet_ref.backends.cuda.emulation.device import EmulatedDevice
from bitnet_ref.backends.cuda.rows import GATES, linear_of_row
from bitnet_ref.backends.cuda.ternary import TernaryKernels
from bitnet_ref.backends.cuda.workspace import Workspace
from bitnet_ref.reference.weights import TernaryWeight

ws = Workspace(EmulatedDevice(sanitize=True))
kernels = TernaryKernels(ws)
for n_out, n_in in ((1, 1), (16, 128), (20, 600), (33, 129), (64, 9000), (1100, 40), (100, 4099), (7, 16384)):
    ones = [np.ones((n, n_in), dtype=np.int8) for n in (n_out, 32, 32)]
    weights = [kernels.prepare(TernaryWeight.from_ternary(w, 0.5)) for w in ones]
    ones = ws.upload(np.ones((1, n_in), dtype=np.float32))
    norm, residual = (ones[0], 1e-5), ws.upload(np.ones((1, n_out), dtype=np.float32))
    assert (ws.download(linear_of_row(ws, ones, weights[0], norm, residual=residual)) > 0).all()
    whole = kernels.stack(*weights[1:]).whole
    assert (ws.download(linear_of_row(ws, ones, whole, norm, gate=GATES["relu2"])) > 0).all()
print("clean")
"""


@emulated
@pytest.mark.slow
def test_no_access_is_out_of_bounds():
    done = run_sanitized(SANITIZED)
    assert (done.returncode, done.stdout) == (0, "clean\n"), done.stderr
