"""ggml's rule of products: its plain text against loops over single numbers, and every backend against the text."""

import numpy as np
import pytest
from helpers import DATA, GOLDEN, call, prepared, random_blocks, rng

import bitnet_ref
from bitnet_ref.errors import ConfigError, NumericsError
from bitnet_ref.families.block_rule import (
    INPUTS,
    NARROW,
    RuledWeight,
    block_matmul,
    by_rule,
    round_inputs,
    ruled_linear,
)
from bitnet_ref.families.lora import LoraTerm
from bitnet_ref.formats.checkpoint import LoadOptions
from bitnet_ref.formats.convert import convert
from bitnet_ref.reference.weights import DenseWeight, Norm

F = np.float32
TYPES = list(INPUTS)


def by_loops(x, w):
    """The rule for one row of inputs and one of weights at a time, in integers and float32 of Python's own loops."""
    y = np.empty((len(x), w.shape[0]), dtype=F)
    for i, row in enumerate(x):
        kind = INPUTS[w.block_type]
        size = 256 if kind == "Q8_K" else 32
        for n in range(w.shape[0]):
            t, u, has_offset = F(0), F(0), False
            for start in range(0, len(row), size):
                part = row[start : start + size]
                block = w.stored[n].reshape(-1, w.block.nbytes)[start // w.block.values][None]
                integers = w.block.integers(block)
                d, e, m = integers.d, integers.e, integers.m
                first = start % w.block.values
                q = [int(value) for value in integers.scaled[0, first : first + size]]
                largest = max(part, key=abs)  # the first of equal ones
                if kind == "Q8_K":
                    scale = F(-127) / largest
                    dx, d32 = F(1) / scale, None
                else:
                    scale = F(127) / abs(largest)
                    d32 = abs(largest) / F(127)
                    dx = F(np.float16(d32))
                x_q = [min(127, round(float(F(value * scale)))) for value in part]
                t = F(t + F(F(F(d[0, 0]) * dx) * F(sum(a * b for a, b in zip(q, x_q, strict=True)))))
                if e is not None:
                    has_offset = True
                    if kind == "Q8_1":
                        u = F(u + F(F(np.float16(F(d32 * F(sum(x_q))))) * e[0, 0]))
                    else:
                        sums = sum(int(m[0, j // 32]) * x_q[j] for j in range(256))
                        u = F(u + F(F(F(e[0, 0]) * dx) * F(sums)))
            y[i, n] = F(t + u) if has_offset else t
    return y


@pytest.mark.parametrize("kind", TYPES)
def test_the_text_is_the_rule(kind):
    generator = rng(3)
    w = random_blocks(kind, generator, 5, 512)
    x = generator.standard_normal((2, 512)).astype(F)
    x[0, :7] *= 30
    np.testing.assert_array_equal(ruled_linear(x, by_rule(w)), by_loops(x, w))


@pytest.mark.sample(6)
@pytest.mark.parametrize("kind", TYPES)
def test_backends_equal_the_text(kind, be):
    if be.name == "cupy":
        with pytest.raises(bitnet_ref.errors.BackendUnavailable, match="ggml's rule"):
            be.prepare(by_rule(random_blocks(kind, rng(4), 35, 512)))
        return
    generator = rng(4)
    for rows, width, tokens in ((35, 512, 20), (1, 256, 3), (16, 768, 1), (64, 1280, 70)):
        w = by_rule(random_blocks(kind, generator, rows, width))
        (own,) = prepared(be, w)
        x = generator.standard_normal((tokens, width)).astype(F) * generator.lognormal(size=(tokens, 1)).astype(F)
        x[-1, :width:2] = 0
        x[0, :256] = 0  # an empty block
        expected = ruled_linear(x, w)
        np.testing.assert_array_equal(call(be, "linear", x, own), expected)
        for i in range(0, tokens, 7):
            np.testing.assert_array_equal(call(be, "linear", x[i : i + 1], own), expected[i : i + 1])
        np.testing.assert_array_equal(own.rows(np.array([0, rows - 1]), F), w.linear.rows(np.array([0, rows - 1]), F))
        np.testing.assert_array_equal(own.plain().linear.array, w.linear.array)
        if kind != "TQ1_0":  # whose random bytes are not what ggml writes: see `test_a_file_by_the_rule`
            np.testing.assert_array_equal(own.plain().linear.stored, w.linear.stored)


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", TYPES)
def test_the_largest_sums(kind, be):
    """All bits of the weights set, and inputs of +127 and -127 in every place."""
    if be.name == "cupy":
        pytest.skip("cupy has no kernels for ggml's rule")
    w = random_blocks(kind, rng(5), 17, 512)
    stored = w.stored.reshape(-1, w.block.nbytes)
    halves = {at + i for at in w.block.halves for i in (0, 1)}
    stored[:, [at for at in range(w.block.nbytes) if at not in halves]] = 255 if kind != "Q6_K" else 127
    x = np.ones((3, 512), dtype=F)
    x[1] = -1
    x[2, ::2] = -1
    np.testing.assert_array_equal(call(be, "linear", x, prepared(be, by_rule(w))[0]), ruled_linear(x, by_rule(w)))


def test_inputs_are_rounded_by_blocks():
    x = np.zeros((1, 512), dtype=F)
    x[0, :4] = -127, 0.5, 1.5, 2.5  # halves to even
    x[0, 32:34] = 2.0**-130, -(2.0**-130)
    x_q, dx, sums = round_inputs(x, "Q8_1")
    assert x_q[0, :4].tolist() == [-127, 0, 2, 2]
    assert (dx[0, :3].tolist(), sums[0, :2].tolist()) == ([1, 0, 0], [-123, 0])
    assert not x_q[0, 32:].any()
    x[0, 5] = 127  # of two of the same magnitude the first has the sign
    x_q, dx, sums = round_inputs(x, "Q8_K")
    assert x_q[0, :6].tolist() == [-127, 0, 2, 2, 0, 127]
    x_q, dx, sums = round_inputs(-x, "Q8_K")
    assert (x_q[0, :6].tolist(), dx[0].tolist()) == ([-127, 0, 2, 2, 0, 127], [-1, 0])
    assert sums.shape == (1, 16)


@pytest.mark.parametrize(
    ("bad", "kind", "words"), [(np.nan, "Q8_0", "token 1"), (np.inf, "Q8_K", "token 1"), (9e6, "Q8_0", "float16")]
)
def test_inputs_that_have_no_integers_are_refused(bad, kind, words, be):
    if be.name == "cupy":
        pytest.skip("cupy has no kernels for ggml's rule")
    x = np.ones((3, 256), dtype=F)
    x[1, 40] = bad
    w = by_rule(random_blocks("Q4_0" if kind == "Q8_0" else "Q6_K", rng(6), 4, 256))
    with pytest.raises(NumericsError, match=words):
        call(be, "linear", x, prepared(be, w)[0])


@pytest.mark.parametrize("kinds", [("Q8_0", "Q4_1"), ("Q6_K", "Q4_K")])
def test_the_steps_of_a_block_in_one_call_equal_its_ops(kinds, be):
    if be.name != "cython":
        pytest.skip("no calls of several steps by ggml's rule")
    generator = rng(7)
    gate, up = (be.prepare(by_rule(random_blocks(kind, generator, 35, 512))) for kind in kinds)
    norm = Norm(generator.standard_normal(512).astype(F), 1e-5)
    x, residual = generator.standard_normal((70, 512)).astype(F), generator.standard_normal((70, 35)).astype(F)
    h = be.rms_norm(x, norm)
    for activation in ("silu", "relu2"):
        expected = be.gated(*be.linears(h, (gate, up)), activation)
        np.testing.assert_array_equal(be.kernels.gated_linears(x, gate, up, activation, norm), expected)
    np.testing.assert_array_equal(be.kernels.linear_add(x, gate, residual, norm), be.add(residual, be.linear(h, gate)))
    x[67, 3] = np.inf
    with pytest.raises(NumericsError, match="rms_norm: token 67"):
        be.kernels.gated_linears(x, gate, up, "silu", norm)
    with pytest.raises(NumericsError, match="round_inputs: the activation of token 67"):
        be.kernels.linear_add(x, gate, residual, None)


def test_a_matrix_in_16_bits_rounds_its_inputs():
    x = np.array([[1 + 2.0**-11, 3]], dtype=F)
    w = by_rule(DenseWeight(np.array([[1, 2]], dtype=np.float16)))
    assert isinstance(w, RuledWeight)
    assert ruled_linear(x, w).tolist() == [[7]]


@pytest.mark.sample(8)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_backends_round_to_16_bits_as_the_text_does(dtype, be):
    if be.name == "cupy":
        pytest.skip("cupy has no kernels for ggml's rule")
    w = by_rule(DenseWeight(np.ones((1, 1), dtype=NARROW[dtype])))
    bits = rng(7).integers(0, 1 << 32, 20_000, dtype=np.uint32)
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(F)
    edges = np.array([65519, 65520, 65536, 3.4e38, np.inf, -np.inf, np.nan, 2**-14, 2**-24, 2**-25, -0.0], dtype=F)
    near = np.concatenate([edges, np.nextafter(edges, F(0)), np.nextafter(edges, F(np.inf))])
    with np.errstate(all="ignore"):
        x = np.concatenate([bits.view(F), halves, halves * F(1 + 2.0**-11), near])[:, None]
        np.testing.assert_array_equal(call(be, "linear", x, prepared(be, w)[0]), ruled_linear(x, w))


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "Q8_0"])
def test_an_adapters_term_reads_inputs_that_are_not_rounded(kind, be):
    if be.name == "cupy":
        pytest.skip("cupy has no kernels for ggml's rule")
    generator = rng(7)
    shapes = (3, 64), (48, 64), (4, 64), (48, 4)
    x, m, a, b = (generator.standard_normal(shape, dtype=F) for shape in shapes)
    matrix = DenseWeight(m.astype(NARROW[kind])) if kind in NARROW else random_blocks(kind, generator, 48, 64)
    w = LoraTerm(a, b, 0.5).put_on(by_rule(matrix))
    without, adapted = (call(be, "linears", x, prepared(be, each))[0] for each in (w.linear, w))
    term, of_rounded = (each.astype(np.float64) @ a.T @ (0.5 * b.T) for each in (x, x.astype(np.float16)))
    limit = 1e-6 * np.abs(without).max() + 1e-6 * np.abs(term).max()
    assert np.abs(adapted - without - term).max() < limit < np.abs(of_rounded - term).max() / 10


def test_sums_in_float64_are_near():
    x = rng(7).standard_normal((4, 512))
    w = random_blocks("Q4_K", rng(8), 9, 512)
    wide, narrow = (block_matmul(round_inputs(x.astype(dtype), "Q8_K"), w) for dtype in (np.float64, F))
    assert wide.dtype == np.float64
    np.testing.assert_allclose(narrow, wide, rtol=1e-4, atol=1e-4 * np.abs(wide).max())


@pytest.mark.parametrize("name", ["tq1_0", "tq2_0", "f16"])
def test_a_file_by_the_rule(name):
    path = DATA / "gguf" / f"{name}.gguf"
    by_blocks, exact = (bitnet_ref.load(path, backend="numpy", activations=each) for each in ("blocks", "float"))
    weights = dict(by_blocks.weights.linears())
    assert {type(w) for w in weights.values()} == {RuledWeight}
    assert by_blocks.config.quantization is None
    tokens = [1, 17, 3, 250, 9]
    mine, other = by_blocks.logits(tokens), exact.logits(tokens)
    difference = np.abs(mine - other).max() / np.abs(other).max()
    assert 0 < difference < 0.05
    compiled = bitnet_ref.load(path, backend="cython", activations="blocks")
    np.testing.assert_allclose(compiled.logits(tokens), mine, atol=2e-2 * np.abs(mine).max())
    for each, own in compiled.weights.linears():  # panels take the place of blocks, and give them back
        assert (type(own) is RuledWeight) == (type(weights[each].linear) is DenseWeight)
        np.testing.assert_array_equal(own.plain().linear.stored, weights[each].linear.stored)
        assert own.nbytes <= 1.25 * weights[each].nbytes  # TQ1_0 in two bits


@pytest.mark.parametrize("kind", ["q2_0", "q8_0", "f16"])
def test_experts_by_the_rule(kind, tmp_path):
    convert(DATA / "families" / "mixtral-groups128", tmp_path / "m.gguf", f"gguf-{kind}", verify=False)
    exact, mine, compiled = (
        bitnet_ref.load(tmp_path / "m.gguf", backend=backend, activations=each).logits([1, 17, 3, 9])
        for backend, each in (("numpy", "float"), ("numpy", "blocks"), ("cython", "blocks"))
    )
    assert 0 < np.abs(mine - exact).max() < 0.05 * np.abs(exact).max()
    np.testing.assert_allclose(compiled, mine, atol=2e-2 * np.abs(mine).max())


def test_prepared_weights_of_the_rule(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes((DATA / "gguf" / "tq2_0.gguf").read_bytes())
    first, again = (bitnet_ref.load(path, backend="cython", activations="blocks", prepared=True) for _ in range(2))
    np.testing.assert_array_equal(first.logits([1, 2, 3]), again.logits([1, 2, 3]))
    assert {w.kind for _, w in again.weights.linears()} == {"ruled"}


def test_what_the_rule_is_not_for(tmp_path):
    with pytest.raises(ConfigError, match="blocks"):
        convert(DATA / "gguf" / "tq1_0.gguf", tmp_path / "x", "native", options=LoadOptions(activations="blocks"))
    for path in (GOLDEN / "llama-dense", DATA / "gguf" / "i2_s.gguf"):
        with pytest.raises(ConfigError, match="blocks") as caught:
            bitnet_ref.load(path, backend="numpy", activations="blocks")
        assert caught.value.field == "activations"
