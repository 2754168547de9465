"""bench model: a model by the name of its shape, and what its prompt is measured against."""

import json
from dataclasses import replace

import numpy as np
import pytest
from bench_runs import NO_CYTHON, SMALL, TINY
from bench_runs import invoke as invoke_bench
from helpers import BITNET, DATA, model, write_checkpoint
from helpers import TINY as TINY_CONFIG

from bitnet_ref import Model, benchmark
from bitnet_ref.backends import Backend
from bitnet_ref.backends.cpu import extension
from bitnet_ref.backends.cpu.backend import CythonBackend
from bitnet_ref.benchmark.limits import INSTRUCTIONS, peak_of
from bitnet_ref.benchmark.validate import check_model, first_of_each_type
from bitnet_ref.families import FAMILIES

MULTIPLY_ADDS = 2 * (2 * 16 * 16 + 2 * 8 * 16 + 3 * 24 * 16)  # layers of q o, k v, gate up down; the head is dense


@pytest.fixture(autouse=True)
def small_reader(monkeypatch):
    monkeypatch.setattr(benchmark.limits, "MIN_READ_BYTES", SMALL)
    monkeypatch.setattr(benchmark.limits, "MAX_READ_BYTES", SMALL)


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


MINICPM = TINY_CONFIG | {"model_type": "minicpm", "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 4}


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", [*(path.name for path in sorted((DATA / "families").iterdir())), "minicpm"])
def test_a_family(family, tmp_path):
    folder = DATA / "families" / family
    if family == "minicpm":
        folder = write_checkpoint(tmp_path / family, MINICPM | {"tie_word_embeddings": True})
    result = invoke(folder, "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["check"]["logits_error"] <= facts["check"]["logits_allowed"]
    assert facts["decode_tokens_per_s"] > 0


class WrongAttention(Backend):
    def attention(self, *args):
        return super().attention(*args) * np.float32(1.01)


def test_a_block_of_each_type_is_checked():
    """The hybrid has attention in its last block only."""
    right = model(DATA / "families" / "qwen3_5-groups128-hybrid")
    assert first_of_each_type(right.config) == [0, 3]
    assert check_model(right, [1, 5, 3]).equal
    assert not check_model(Model(right.config, right.weights, WrongAttention(threads=1)), [1, 5, 3]).equal


def test_a_dense_layer_of_a_mixture_is_checked_too():
    config = FAMILIES["qwen3_moe"].example()
    assert config.dense_layers == (1,)
    assert first_of_each_type(config) == [0, 1]
    assert first_of_each_type(replace(config, dense_layers=())) == [0]


def test_fewer_layers_of_several_types():
    config = model(DATA / "families" / "embedding-gemma3").config
    assert config.layer_types == ("sliding_attention", "sliding_attention", "full_attention")
    short = benchmark.synthetic_model(config, Backend(threads=1), layers=2)
    assert short.config.layer_types == ("sliding_attention", "sliding_attention")
    assert check_model(short, [1, 5, 3]).equal


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
        list(extension.simd_variants()).index(sets[-1]), benchmark.limits.PEAK_ROUNDS, 1
    )
    result = invoke("--shape", "storyteller", "--simd", sets[-1])
    assert INSTRUCTIONS[sets[-1]] in result.stdout
