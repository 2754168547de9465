"""bench model: a model by the name of its shape, and what its prompt is measured against."""

import json

import pytest
from bench_runs import NO_CYTHON, SMALL, TINY
from bench_runs import invoke as invoke_bench
from helpers import BITNET, write_checkpoint

from bitnet_ref import benchmark
from bitnet_ref.backends import Backend
from bitnet_ref.backends.cpu import extension
from bitnet_ref.backends.cpu.backend import CythonBackend
from bitnet_ref.benchmark.ceiling import INSTRUCTIONS, peak_of

MULTIPLY_ADDS = 2 * (2 * 16 * 16 + 2 * 8 * 16 + 3 * 24 * 16)  # layers of q o, k v, gate up down; the head is dense


@pytest.fixture(autouse=True)
def small_reader(monkeypatch):
    monkeypatch.setattr(benchmark.ceiling, "MIN_READ_BYTES", SMALL)
    monkeypatch.setattr(benchmark.ceiling, "MAX_READ_BYTES", SMALL)


def invoke(*args):
    return invoke_bench("model", *args, "--prompt", "4", "--new", "2", "--threads", "1")


@pytest.mark.parametrize("name", ["2b4t", "2b-4t", "2B-4T"])
def test_a_synthetic_shape_by_any_of_its_names(name, monkeypatch):
    monkeypatch.setitem(benchmark.SHAPES, "2b-4t", TINY)
    result = invoke("--shape", name, "--layers", "1", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["model"] == "2b-4t"
    assert facts["config"]["num_hidden_layers"] == 1


def test_a_path_or_a_shipped_model_as_a_shape(tmp_path):
    folder = write_checkpoint(tmp_path / "tiny", BITNET)
    for name in (folder, "storyteller"):
        result = invoke("--shape", name, "--json")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["model"] == str(name)
    assert invoke("--shape", "no/such/model").exit_code == 3


@pytest.mark.parametrize("more", [("storyteller",), ("--synthetic", "1b")])
def test_one_name_for_the_model(more):
    result = invoke("--shape", "1b", *more)
    assert result.exit_code == 2
    assert "not several" in result.stderr


def test_a_prompt_without_a_known_instruction_has_no_bound():
    found = benchmark.measure_model(
        benchmark.synthetic_model(TINY, Backend(threads=1)), 4, 2, reader_bytes=SMALL
    ).to_dict()
    assert found["ternary_multiply_adds"] == MULTIPLY_ADDS
    assert found["prompt_bound_tokens_per_s"] is None
    assert found["of_prompt_bound"] is None
    assert peak_of(Backend(threads=1)) is None


@pytest.mark.skipif(NO_CYTHON, reason="no extension here")
def test_a_prompt_is_bound_by_the_rate_of_the_product_instruction():
    sets = [name for name, why in extension.simd_variants().items() if why is None and name in INSTRUCTIONS]
    if not sets:
        pytest.skip("no kernel set of this processor has a known instruction")
    be = CythonBackend(threads=1, simd=sets[-1])
    found = benchmark.measure_model(benchmark.synthetic_model(TINY, be), 4, 2, reader_bytes=SMALL)
    rate = found.peak_multiply_adds / found.peak.best_s
    assert found.prompt_bound_tokens_per_s == pytest.approx(rate / MULTIPLY_ADDS)
    assert found.of_prompt_bound == pytest.approx(found.prompt_tokens_per_s / found.prompt_bound_tokens_per_s)
    assert found.peak_multiply_adds == extension._cpu.peak_multiply_adds(
        list(extension.simd_variants()).index(sets[-1]), benchmark.ceiling.PEAK_ROUNDS, 1
    )
    result = invoke("--shape", "storyteller", "--simd", sets[-1])
    assert INSTRUCTIONS[sets[-1]] in result.stdout
