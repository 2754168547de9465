"""The measurements: what differs gets no speed, the arithmetic is right, the shell shows it. No time is asserted."""

import json
import math
import sys
from dataclasses import replace
from importlib.util import find_spec

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from helpers import BITNET, random_ternary, rng, write_checkpoint

import bitnet_ref
from bitnet_ref import benchmark
from bitnet_ref.api import find_model
from bitnet_ref.backends import Backend, cython_backend
from bitnet_ref.backends.cython_backend import simd_variants
from bitnet_ref.benchmark import MemoryReader, Timing
from bitnet_ref.benchmark.kernels import KernelResult
from bitnet_ref.benchmark.models import profile_model
from bitnet_ref.benchmark.peers import Peer, peer_config
from bitnet_ref.benchmark.random_file import write_random_gguf
from bitnet_ref.benchmark.timing import take_turns
from bitnet_ref.benchmark.validate import Check, Expected, check_linear, check_model
from bitnet_ref.cli import bench_model, bench_shared, cli
from bitnet_ref.errors import BackendError, BackendUnavailable, ConfigError, GenerationError, NumericsError, ShapeError
from bitnet_ref.quantization import first_invalid_code
from bitnet_ref.tokenizers import load_tokenizer
from bitnet_ref.weights import DenseWeight, TernaryWeight

SMALL = 1 << 16  # bytes to read, and of the cache: the real code, in no time
NO_CYTHON = bitnet_ref.available_backends()["cython"] is not None
FAST = "numpy" if NO_CYTHON else "cython"
# By hand: D 16, F 24, 2 layers, 4 heads and 2 kv heads of 4, V 40. Four weights a byte, 4-byte norms, 2-byte table.
TINY = replace(
    benchmark.SHAPES["2b-4t"],
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    max_position_embeddings=64,
)
LAYER_CODES = 16 * 16 // 4 * 2 + 8 * 16 // 4 * 2 + 24 * 16 // 4 * 3  # q o, k v, gate up down


def invoke(*args):
    return CliRunner().invoke(cli, ["bench", *map(str, args)])


def invoke_json(*args, code=0):
    result = invoke(*args, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def tiny_model(be=None, **changes):
    return benchmark.synthetic_model(replace(TINY, **changes), be or Backend(threads=1))


class OffByOne(Backend):
    """A kernel with a wrong sum in one place, as kernels have."""

    def ternary_matmul(self, x_q, w):
        acc = super().ternary_matmul(x_q, w)
        acc[-1, -1] += 1
        return acc


class WrongWhenFused(Backend):
    """Its product is right, its fused linear rounds once more than the contract says."""

    def linears(self, x, ws):
        return tuple(np.nextafter(y, np.float32(np.inf)) for y in super().linears(x, ws))


class WrongHead(Backend):
    """Its ternary linears are right, its logits are not."""

    def lm_head(self, x, w):
        return super().lm_head(x, w) * np.float32(1.001)


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
    monkeypatch.setattr(benchmark.bandwidth.cython_backend, "why_unavailable", lambda: "not built")
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
    found = profile_model(tiny_model(), np.array([1, 2, 3]), 4)["decode"]
    ops = {op.name: op for op in found.ops}
    assert ops["linears gate_proj up_proj"].calls == 4 * 2
    assert ops["linears gate_proj up_proj"].nbytes == 4 * 2 * 2 * (24 * 16 // 4)
    assert (ops["head_candidates"].calls, ops["head_candidates"].nbytes) == (4, 4 * 40 * 16 * 2)
    assert ops["rms_norm ffn_norm"].gb_per_s is None
    assert found.outside_s >= 0
    assert [op.total_s for op in found.ops] == sorted((op.total_s for op in found.ops), reverse=True)


# -- measuring, for real -----------------------------------------------------------------------------------------------


def assert_positive(facts, *names):
    for name in names:
        assert math.isfinite(facts[name]), name
        assert facts[name] > 0, name


def test_measure_model(be):
    calls = []
    found = benchmark.measure_model(
        tiny_model(be), 5, 4, profile=True, reader_bytes=SMALL, progress=lambda done, total: calls.append((done, total))
    )
    facts = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert facts["equal"]
    assert_positive(facts, "prompt_tokens_per_s", "decode_tokens_per_s", "decode_tokens_per_s_median", "read_gb_per_s")
    assert_positive(facts, "bound_tokens_per_s", "of_bound", "of_bound_median", "peak_memory_bytes", "of_weight_bytes")
    assert facts["decode"]["repetitions"] == 4
    assert set(facts["profiles"]) == {"prompt", "decode"}
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


def test_ceiling():
    """Small, on two threads: everything that this processor has is there, and the roof is the lower of both limits."""
    found = benchmark.measure_ceiling(2, repeats=2, nbytes=1 << 20, rounds=1000)
    assert [read.threads for read in found.reads] == [1, 2]
    assert {read.nbytes for read in found.reads} == {1 << 20}
    for name, lacks in simd_variants().items():
        measured = {peak.threads for peak in found.peaks if peak.kernel_set == name}
        assert measured == (set() if name in found.lacks else {1, 2})
        assert lacks is None or found.lacks[name] == lacks
    for peak in found.peaks:
        assert peak.multiply_adds % (1000 * 32 * peak.threads) == 0
        assert found.roof(peak.kernel_set, 1, 1e9) == found.peak(peak.kernel_set, 1) > 0
        assert found.roof(peak.kernel_set, 1, 1e-9) == pytest.approx(1e-9 * found.read_gb_per_s(1))
    with pytest.raises(ShapeError):
        benchmark.measure_ceiling(1, repeats=0)


def test_peak_of_a_set_without_one_is_0():
    assert cython_backend._cpu.peak_multiply_adds(0, 10, 1) == 0


# -- the shell ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_reader(monkeypatch):
    """Reads and caches of 64 KB, so that the shell's own paths take no time."""
    monkeypatch.setattr(benchmark.bandwidth, "LEAST_READ_BYTES", SMALL)
    monkeypatch.setattr(benchmark.bandwidth, "MOST_READ_BYTES", SMALL)
    monkeypatch.setattr(benchmark.kernels, "last_level_cache_bytes", lambda: SMALL)


KERNELS = ("kernels", "--shape", "70x64", "--tokens", "1,3", "--repeats", "2", "--threads", "1")


@pytest.mark.usefixtures("small_reader")
def test_bench_kernels():
    facts = invoke_json(*KERNELS)
    assert facts["equal"]
    assert_positive(facts, "read_gb_per_s", "threads", "last_level_cache_bytes")
    assert len(facts["results"]) == 2 * len(benchmark.candidates())
    for result in facts["results"]:
        assert (result["out_features"], result["in_features"], result["equal"]) == (70, 64, True)
        assert_positive(result, "weight_bytes", "gb_per_s", "g_multiply_adds_per_s", "of_read", "of_read_median")
        assert_positive(result["timing"], "best_s", "median_s", "repetitions")
        assert result["check"]["accumulators"] == result["tokens"] * 70
    result = invoke(*KERNELS)
    assert result.exit_code == 0, result.output
    assert "70 x 64" in result.stdout
    assert "equal the NumPy reference" in result.stdout


@pytest.mark.usefixtures("small_reader")
def test_bench_kernels_by_method():
    facts = invoke_json(*KERNELS, "--backend", "cython", "--simd", "scalar", "--methods")
    sizes = {result["layout"]: result["weight_bytes"] for result in facts["results"]}
    assert sizes == {"2-bit": 2 * 4 * 256, "table": 2 * 4 * 256, "1.6-bit": 2 * 4 * 256}  # 64 columns: 4 blocks of each
    assert facts["equal"]


@pytest.mark.usefixtures("small_reader")
def test_bench_ceiling(tmp_path):
    pytest.importorskip("matplotlib")
    facts = invoke_json("ceiling", "--threads", "1", "--repeats", "1", "--plot", str(tmp_path / "roof.svg"))
    assert [read["threads"] for read in facts["reads"]] == [1]
    assert "<svg" in (tmp_path / "roof.svg").read_text()
    result = invoke("ceiling", "--threads", "1", "--repeats", "1")
    assert result.exit_code == 0
    assert "GB/s" in result.stdout
    assert invoke("ceiling", "--plot", str(tmp_path / "roof.xyz")).exit_code == 2


@pytest.mark.usefixtures("small_reader")
def test_a_difference_is_exit_code_1(monkeypatch):
    monkeypatch.setattr(benchmark, "candidates", lambda *args: [OffByOne(threads=1)])
    result = invoke(*KERNELS)
    assert result.exit_code == 1
    assert "DIFFERS" in result.stdout
    facts = invoke_json(*KERNELS, code=1)
    assert not facts["equal"]
    assert facts["results"][0]["timing"] is None


@pytest.mark.usefixtures("small_reader")
def test_bench_model(tmp_path):
    folder = write_checkpoint(tmp_path / "tiny", BITNET)
    options = ("--prompt", "6", "--new", "3", "--threads", "1")
    facts = invoke_json("model", folder, *options)
    assert facts["backend"] == FAST
    assert facts["model"] == str(folder)
    assert facts["step_bytes"]["head"] == 40 * 16 * 2
    assert_positive(facts, "prompt_tokens_per_s", "decode_tokens_per_s", "weight_bytes", "peak_memory_bytes")
    result = invoke("model", folder, *options, "--profile", "--backend", "numpy")
    assert result.exit_code == 0, result.output
    assert "linears gate_proj up_proj" in result.stdout
    assert "outside the operations" in result.stdout


@pytest.mark.usefixtures("small_reader")
def test_bench_model_of_a_synthetic_shape_says_when_it_is_shortened(monkeypatch):
    monkeypatch.setitem(benchmark.SHAPES, "1b", TINY)
    result = invoke("model", "--synthetic", "1b", "--layers", "1", "--prompt", "4", "--new", "2", "--threads", "1")
    assert result.exit_code == 0, result.output
    assert "1 of its 2 layers" in result.stdout
    assert invoke("model", "--synthetic", "1b", "--layers", "3").exit_code == 2


@pytest.mark.skipif(NO_CYTHON, reason="no extension here")
@pytest.mark.usefixtures("small_reader")
def test_bench_with_a_kernel_set(tmp_path):
    folder = write_checkpoint(tmp_path / "tiny", BITNET)
    facts = invoke_json("model", folder, "--simd", "scalar", "--prompt", "4", "--new", "2", "--threads", "1")
    assert facts["kernel_set"] == "scalar"
    facts = invoke_json(*KERNELS, "--backend", "cython", "--simd", "scalar")
    assert {result["kernel_set"] for result in facts["results"]} == {"scalar"}


def test_bench_tokenizer(monkeypatch):
    facts = invoke_json("tokenizer", "--texts", 4, "--words", 6, "--repeats", 1)
    assert facts["equal"]
    assert_positive(facts, "tokens", "load_s", *(f"{name}_tokens_per_s" for name in facts["timings"]))
    assert set(facts["timings"]) == {"encode_single", "encode_batch", "decode", "stream"}
    assert "encode_batch" in invoke("tokenizer", "--texts", 4, "--words", 6, "--repeats", 1).stdout
    monkeypatch.setattr(type(load_tokenizer(find_model("storyteller"))), "encode_batch", lambda self, texts: [])
    facts = invoke_json("tokenizer", "--texts", 4, "--words", 6, "--repeats", 1, code=1)
    assert facts["timings"] == {}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("kernels", "--shape", "70"), 2),
        (("kernels", "--shape", "0x64"), 2),
        (("kernels", "--tokens", "1,two"), 2),
        (("kernels", "--simd", "scalar", "--backend", "numpy"), 2),
        (("kernels", "--simd", "mmx"), 4),
        (("model", "storyteller", "--synthetic", "1b"), 2),
        (("model", "--layers", "1"), 2),
        (("model", "--simd", "mmx"), 4),
        (("model", "--backend", "numpy", "--simd", "scalar"), 2),
        (("model", "no/such/model"), 3),
        (("model", "--prompt", "1000000"), 2),
        (("tokenizer", "--texts", "0"), 2),
    ],
)
def test_exit_codes(arguments, code):
    assert invoke(*arguments).exit_code == code


# -- peers -------------------------------------------------------------------------------------------------------------


def test_the_shell_knows_the_peers():
    assert set(bench_model.PEER_NAMES) == set(benchmark.PEERS)


def test_a_peer_is_asked_for_the_same_shape():
    asked = peer_config(TINY)
    assert (asked["hidden_size"], asked["num_key_value_heads"], asked["hidden_act"]) == (16, 2, "relu2")
    assert asked["tie_word_embeddings"] is True
    assert "sliding_window" not in asked
    assert peer_config(replace(TINY, model_type="mistral", sliding_window=4))["sliding_window"] == 4
    json.dumps(asked)


@pytest.mark.skipif(find_spec("transformers") is not None, reason="transformers is installed")
def test_a_peer_that_is_not_installed_costs_one_line():
    with pytest.raises(BackendUnavailable, match="pip install torch transformers"):
        benchmark.measure_peer("transformers", TINY, 3, 2)
    arguments = ["bench", "model", "--prompt", "3", "--new", "2", "--versus", "transformers"]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0
    assert "versus transformers" in done.output
    assert "pip install torch transformers" in " ".join(done.output.split())
    told = json.loads(CliRunner().invoke(cli, [*arguments, "--json"]).output)
    assert "pip install" in told["versus"]["transformers"]


def test_a_file_of_random_weights_is_a_model(tmp_path):
    """What llama.cpp is given, read by our own reader: the shape, each plane drawn apart, and the gate that it has."""
    config = replace(TINY, hidden_size=256, intermediate_size=512, num_attention_heads=4, head_dim=64)
    write_random_gguf(config, path := tmp_path / "model.gguf")
    model = bitnet_ref.load(path, backend="numpy")
    assert model.config.linear_shapes() == config.linear_shapes()
    assert (model.config.num_hidden_layers, model.config.activation) == (config.num_hidden_layers, "silu")
    planes = [w.ternary() for _, w in model.weights.layers[0].linears()]
    assert not np.array_equal(planes[0], planes[3])
    assert 0.25 < np.mean(planes[0] == 0) < 0.42
    assert np.isfinite(model.logits([1, 2, 3])).all()


def test_a_shape_that_a_peer_cannot_hold_costs_one_line(tmp_path, monkeypatch):
    (tmp_path / "peer.py").write_text("print('{}')")
    monkeypatch.setitem(benchmark.PEERS, "blocks", Peer(str(tmp_path / "peer.py"), "pip install it", gguf="tq2_0"))
    with pytest.raises(BackendError, match="blocks of 256 inputs"):
        benchmark.measure_peer("blocks", TINY, 3, 2)


@pytest.mark.skipif(find_spec("llama_cpp") is not None, reason="llama-cpp-python is installed")
def test_llama_cpp_that_is_not_installed_writes_no_file(monkeypatch):
    monkeypatch.setattr("bitnet_ref.benchmark.peers.write_random_gguf", pytest.fail)
    with pytest.raises(BackendUnavailable, match="pip install llama-cpp-python"):
        benchmark.measure_peer("llama-cpp-python", TINY, 3, 2)


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="needs llama-cpp-python")
def test_llama_cpp_is_measured():
    config = replace(TINY, hidden_size=256, intermediate_size=512, num_attention_heads=4, head_dim=64)
    found = benchmark.measure_peer("llama-cpp-python", config, 5, 3)
    assert found.prompt_tokens_per_s > 0
    assert found.decode.repetitions == 3


@pytest.mark.skipif(find_spec("transformers") is None or find_spec("torch") is None, reason="needs transformers")
def test_transformers_is_measured():
    found = benchmark.measure_peer("transformers", TINY, 5, 3)
    assert found.prompt_tokens_per_s > 0
    assert found.decode.repetitions == 3
    assert found.peak_memory_bytes > 0
    json.dumps(found.to_dict())


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("raise SystemExit('too little memory')", "too little memory"),
        ("print('no JSON')", "JSONDecodeError"),
        ("", "IndexError"),
    ],
)
def test_a_peer_that_fails_says_why(script, why, tmp_path, monkeypatch):
    (tmp_path / "peer.py").write_text(script)
    monkeypatch.setitem(benchmark.PEERS, "broken", Peer(str(tmp_path / "peer.py"), "pip install it"))
    with pytest.raises(BackendError, match=why):
        benchmark.measure_peer("broken", TINY, 3, 2)


def test_what_a_peer_prints_becomes_its_speeds(tmp_path, monkeypatch):
    """The ratio of times that a script gives; a Python that is not there is named."""
    times = {"version": "1", "weights": "w", "prompt_s": [2, 1], "decode_s": [0.5, 0.25, 1], "peak_memory_bytes": 7}
    (tmp_path / "peer.py").write_text(f"print('loading'); print({json.dumps(times)!r})")
    monkeypatch.setitem(benchmark.PEERS, "fixed", Peer(str(tmp_path / "peer.py"), "pip install it"))
    found = benchmark.measure_peer("fixed", TINY, 10, 3, threads=2, python=sys.executable)
    assert (found.prompt_tokens_per_s, found.decode_tokens_per_s, found.decode.median_s) == (10, 4, 0.5)
    with pytest.raises(BackendError, match="no-such-python"):
        benchmark.measure_peer("fixed", TINY, python="no-such-python")
