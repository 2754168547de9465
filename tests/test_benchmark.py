"""The measurements: what differs gets no speed, the arithmetic is right, the shell shows it. No time is asserted."""

import json
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import pytest
from bench_runs import (
    LAYER_CODES,
    SMALL,
    TINY,
    OffByOne,
    WrongHead,
    WrongWhenFused,
    assert_positive,
    tiny_model,
)
from helpers import random_ternary, rng

from bitnet_ref import benchmark
from bitnet_ref.backends import Backend
from bitnet_ref.backends.cpu import extension
from bitnet_ref.benchmark import MemoryReader
from bitnet_ref.benchmark.kernels import KernelResult
from bitnet_ref.benchmark.models import profile_model
from bitnet_ref.benchmark.timing import Record, Timing, take_turns
from bitnet_ref.benchmark.validate import Check, Expected, check_linear, check_model
from bitnet_ref.cli import bench_shared
from bitnet_ref.errors import BackendUnavailable, ConfigError, GenerationError, NumericsError, ShapeError
from bitnet_ref.formats.packing import first_invalid_code
from bitnet_ref.reference.weights import DenseWeight, TernaryWeight

# -- the comparison ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wrong", "unequal"), [(OffByOne, (1, 1)), (WrongWhenFused, (0, 3 * 20))])
def test_a_wrong_kernel_differs_and_has_no_speed(wrong, unequal):
    found = benchmark.measure_kernels(
        [Backend(threads=1), wrong(threads=1)],
        [(20, 33)],
        [3],
        repeats=1,
        cache_bytes=SMALL,
        reader=MemoryReader(1, SMALL),
    )
    right, bad = found.results
    assert right.check.equal
    assert right.timing is not None
    assert (bad.check.unequal_accumulators, bad.check.unequal_floats) == unequal
    assert not bad.check.equal
    assert not found.equal
    assert (bad.timing, bad.gb_per_s, bad.g_multiply_adds_per_s, bad.of_read, bad.of_read_median) == (None,) * 5


@pytest.mark.parametrize("wrong", [OffByOne, WrongWhenFused, WrongHead])
def test_a_wrong_model_has_no_speed(wrong):
    found = benchmark.measure_model(tiny_model(wrong(threads=1)), 5, 2, reader_bytes=SMALL)
    assert not found.check.equal
    facts = found.to_dict()
    assert facts["equal"] is False
    assert {facts[name] for name in ("prompt", "decode", "decode_tokens_per_s", "of_bound", "bound_tokens_per_s")} == {
        None
    }


def test_every_backend_passes_the_comparison(be):
    weight = benchmark.random_ternary_weight(rng(1), 70, 37)
    expected = Expected.of(rng(2).standard_normal((5, 37)).astype(np.float32), weight)
    assert check_linear(be, be.prepare(weight), expected) == Check(350, 0, 350, 0)
    assert check_model(tiny_model(be), [1, 2, 3]).equal


def test_nothing_compared_is_not_equal():
    assert not Check().equal


def test_a_reference_that_is_not_exact_is_no_reference(monkeypatch):
    weight = TernaryWeight.from_ternary(random_ternary(rng(3), 4, 8), 1.0)
    monkeypatch.setattr(Backend, "ternary_matmul", lambda self, x_q, w: np.zeros((len(x_q), 4), dtype=np.int32))
    with pytest.raises(NumericsError, match="BLAS"):
        Expected.of(rng(4).standard_normal((1, 8)).astype(np.float32), weight)


def test_a_result_of_another_shape_or_type_differs():
    class Wide(Backend):
        def ternary_matmul(self, x_q, w):
            return super().ternary_matmul(x_q, w).astype(np.int64)

    weight = benchmark.random_ternary_weight(rng(1), 4, 8)
    expected = Expected.of(np.ones((2, 8), dtype=np.float32), weight)
    assert check_linear(Wide(threads=1), weight, expected).unequal_accumulators == 8


# -- the numbers -------------------------------------------------------------------------------------------------------


def test_kernel_arithmetic():
    """640 x 2560 for 2 tokens in 1 ms, beside a read of 10 GB/s."""
    timing, read = Timing(1e-3, 2e-3, 5), Timing(1.0, 1.0, 5)
    found = KernelResult("numpy", None, None, 640, 2560, 2, 409600, Check(1), timing, read, 10**10)
    assert found.gb_per_s == pytest.approx(0.4096)
    assert found.g_multiply_adds_per_s == pytest.approx(2 * 640 * 2560 / 1e6)
    assert found.of_read == pytest.approx(0.04096)
    assert found.of_read_median == pytest.approx(0.02048)


def test_a_record_is_written_with_its_properties():
    @dataclass(frozen=True)
    class Pair(Record):
        parts: tuple[Timing, ...]
        count: np.int64

        @property
        def best_s(self):
            return min(part.best_s for part in self.parts)

    facts = Pair((Timing(1.0, 2.0, 3, 1.5),), np.int64(4)).to_dict()
    part = {"best_s": 1.0, "median_s": 2.0, "repetitions": 3, "processor_s": 1.5, "energy_j": None}
    assert facts == {"parts": [part], "count": 4, "best_s": 1.0}
    assert json.loads(json.dumps(facts)) == facts


def test_timing_takes_turns_and_keeps_to_the_budget():
    order = []
    timings = take_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3)
    assert timings["a"].repetitions == timings["b"].repetitions == 3
    assert 0 < timings["a"].best_s <= timings["a"].median_s
    assert order[:2] == ["a", "b"]
    slow = take_turns({"a": lambda: sum(range(1000))}, 3, budget_s=0.0)["a"]
    assert slow.repetitions == 1  # the first call was it


@pytest.mark.parametrize("threads", [1, 3])
def test_reader_reads_every_word(threads, monkeypatch):
    assert MemoryReader(threads, 8 * 100_001).read() == 100_001
    monkeypatch.setattr(benchmark.limits.extension, "why_unavailable", lambda: "not built")
    plain = MemoryReader(threads, 8 * 100_001)
    assert (plain.read(), plain.how) == (100_001, "numpy.sum")


def test_bytes_of_a_step():
    found = benchmark.bytes_of_step(TINY, tiny_model().weights, position=9)
    assert found.ternary == 2 * LAYER_CODES == 2 * 480
    assert found.dense == 0
    assert found.head == 40 * 16 * 2
    assert found.cache == 2 * 2 * (2 * 4) * 4 * 10  # K and V, layers, G*d, float32, tokens
    assert found.other == (2 * (16 + 16 + 16 + 24) + 16) * 4 + 16 * 2  # norms, one row
    assert found.total == 960 + 1280 + 1280 + 640 + 32


def test_bytes_of_a_step_within_a_window():
    config = replace(TINY, sliding_window=4)
    assert benchmark.bytes_of_step(config, tiny_model().weights, 9).cache == 2 * 2 * 8 * 4 * 4


def test_bytes_of_2b_4t():
    """What is known of the model: 0.52 GB of ternary weights, 0.66 GB of head. Computed from one layer."""
    config = benchmark.SHAPES["2b-4t"]
    codes = sum(n_out * n_in for n_out, n_in in config.linear_shapes().values()) * config.num_hidden_layers / 4
    assert codes == 521_011_200
    assert config.vocab_size * config.hidden_size * 2 == 656_670_720


# -- synthetic models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_in", [1, 2, 3, 4, 33])
def test_random_weights_are_valid(n_in):
    weight = benchmark.random_ternary_weight(rng(n_in), 50, n_in)
    assert first_invalid_code(weight.packed) is None
    w_t = weight.ternary()
    assert set(np.unique(w_t)) == {-1, 0, 1}
    assert np.array_equal(TernaryWeight.from_ternary(w_t, 1.0).packed, weight.packed)  # the padding too


def test_valid_bytes():
    assert len(benchmark.synthetic.VALID_BYTES) == 81


def test_synthetic_model():
    model = tiny_model()
    assert model.weights.tied
    assert model.weights.embedding.array.dtype == ml_dtypes.bfloat16
    table = np.abs(model.weights.embedding.array.astype(np.float32))
    assert 1 / 64 <= table.min() < table.max() < 1 / 32
    assert np.array_equal(model.logits([1, 2, 3]), tiny_model().logits([1, 2, 3]))  # seeded
    untied = tiny_model(tie_word_embeddings=False, sub_norms=False)
    assert not untied.weights.tied
    assert isinstance(untied.weights.lm_head, DenseWeight)


def test_layers_of_a_synthetic_model():
    model = benchmark.synthetic_model(TINY, Backend(threads=1), layers=1)
    assert model.config.num_hidden_layers == len(model.weights.layers) == 1
    with pytest.raises(ConfigError, match="1 to 2, got 3"):
        benchmark.synthetic_model(TINY, Backend(threads=1), layers=3)


def test_the_shell_offers_every_shape():
    assert tuple(benchmark.SHAPES) == bench_shared.SYNTHETIC


# -- the profile -------------------------------------------------------------------------------------------------------


def test_profile_counts():
    found = profile_model(tiny_model(), 3, 5)
    prompt, decoding = found.in_order()
    assert prompt.ops()["linears gate_proj up_proj"].calls == 2
    ops = decoding.ops()
    assert ops["linears gate_proj up_proj"].calls == 4 * 2
    assert ops["linears gate_proj up_proj"].nbytes == 4 * 2 * 2 * (24 * 16 // 4)
    assert (ops["head_rows"].calls, ops["head_rows"].nbytes) == (4, 4 * 40 * 16 * 2)
    assert ops["rms_norm ffn_norm"].gb_per_s is None


# -- measuring, for real -----------------------------------------------------------------------------------------------


def test_measure_model(be):
    calls = []
    found = benchmark.measure_model(
        tiny_model(be), 5, 4, reader_bytes=SMALL, progress=lambda done, total: calls.append((done, total))
    )
    facts = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert facts["equal"]
    assert_positive(facts, "prompt_tokens_per_s", "decode_tokens_per_s", "decode_tokens_per_s_median", "read_gb_per_s")
    assert_positive(facts, "bound_tokens_per_s", "of_bound", "of_bound_median", "peak_memory_bytes", "of_weight_bytes")
    assert facts["decode"]["repetitions"] == 4
    assert_positive(facts["decode"], "processor_s")
    assert_positive(facts["conditions"], "wall_s", "processor_s", "processors")
    assert [done for done, _ in calls] == list(range(1, calls[-1][1] + 1))  # ends at the total


@pytest.mark.parametrize(("prompt", "new"), [(0, 1), (1, 0), (60, 5)])
def test_measure_model_refuses(prompt, new):
    with pytest.raises(GenerationError, match="at most 64 together"):
        benchmark.measure_model(tiny_model(), prompt, new, reader_bytes=SMALL)


@pytest.mark.parametrize(("shapes", "tokens"), [([], [1]), ([(4, 4)], []), ([(4, 0)], [1]), ([(4, 4)], [0])])
def test_measure_kernels_refuses(shapes, tokens):
    with pytest.raises(ShapeError, match="at least one"):
        benchmark.measure_kernels([Backend(threads=1)], shapes, tokens)


def test_candidates():
    everyone = benchmark.candidates(threads=1)
    assert everyone[0].name == "numpy"
    assert len({(be.name, getattr(be, "simd", None)) for be in everyone}) == len(everyone)
    with pytest.raises(BackendUnavailable):
        benchmark.candidates(simd="mmx")


def test_candidates_of_every_method():
    layouts = [(be.simd, be.layout) for be in benchmark.candidates("cython", 1, "scalar", methods=True)]
    assert layouts == [("scalar", "2-bit"), ("scalar", "table"), ("scalar", "1.6-bit")]


def test_peak_of_a_set_without_one_is_0():
    assert extension._cpu.peak_multiply_adds(0, 10, 1) == 0
