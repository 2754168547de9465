"""bitnet-ref bench: its tables, its JSON and its exit codes."""

import pytest
from bench_runs import FAST, NO_CYTHON, SMALL, TINY, OffByOne, WrongWhenFused, assert_positive, invoke, invoke_json
from helpers import BITNET, DATA, GOLDEN, write_checkpoint

import bitnet_ref
from bitnet_ref import benchmark
from bitnet_ref.api import Model
from bitnet_ref.formats.convert import convert


@pytest.fixture
def small_reader(monkeypatch):
    """Reads and caches of 64 KB, so that the shell's own paths take no time."""
    monkeypatch.setattr(benchmark.limits, "MIN_READ_BYTES", SMALL)
    monkeypatch.setattr(benchmark.limits, "MAX_READ_BYTES", SMALL)
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


@pytest.mark.sample(6)
@pytest.mark.usefixtures("small_reader")
@pytest.mark.parametrize("case", sorted(folder.name for folder in (DATA / "families").iterdir()))
def test_bench_of_every_family(case):
    """Layers of several kinds, states, experts: each has its bytes per token, and processor time beside wall time."""
    result = invoke("model", DATA / "families" / case, "--prompt", "3", "--new", "2", "--threads", "1")
    assert result.exit_code == 0, result.output
    lines = {line[:17].strip(): line[17:] for line in result.stdout.splitlines()}
    assert "s per decoded token" in lines["processor"]
    assert lines["bytes per token"]
    assert "logits off by" in lines["check"] or "equal" in lines["check"]


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


@pytest.mark.thorough
@pytest.mark.usefixtures("small_reader")
def test_bench_of_both_rules_for_activations(tmp_path):
    """A GGUF by llama.cpp's rule: its own speed, that with float activations, and what the rule changes."""
    path, options = tmp_path / "m.gguf", ("--prompt", "6", "--new", "3", "--threads", "1")
    convert(GOLDEN / "llama-dense", path, "gguf-q8_0")
    facts = invoke_json("model", path, *options, "--activations", "blocks")
    assert facts["equal"]
    assert facts["check"]["floats"] >= 4 * (64 + 2 * 96)  # its linears, to the bit
    assert facts["step_bytes"]["ternary"] == 0
    rule = facts["rule"]
    assert rule["floats"]["equal"]
    assert_positive(rule, "kl_mean", "kl_max", "perplexity", "floats_perplexity", "same_top")
    assert_positive(rule["floats"], "prompt_tokens_per_s", "decode_tokens_per_s")
    text = [rule["tokens"], rule["kl_mean"] <= rule["kl_max"] < 0.1, rule["perplexity"] != rule["floats_perplexity"]]
    assert text == [9, True, True]
    result = invoke("model", path, *options, "--activations", "blocks", "--backend", "numpy")
    assert result.exit_code == 0, result.output
    assert "nats mean" in result.stdout
    assert "--activations blocks" in invoke("model", path, *options).stdout
    assert invoke("model", "--synthetic", "1b", "--activations", "blocks").exit_code == 2
    loaded = bitnet_ref.load(path, backend="numpy", activations="blocks")
    wrong = Model(loaded.config, loaded.weights, WrongWhenFused(threads=1))
    assert benchmark.check_model(wrong, [1, 2, 3]).unequal_floats >= 4 * (64 + 2 * 96)


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
    ],
)
def test_exit_codes(arguments, code):
    assert invoke(*arguments).exit_code == code
