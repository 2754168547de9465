"""scripts/benchmarks/gpu.py: every part for real, small, on the emulated device. Times are of no interest here."""

import json
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from bench_runs import NO_CYTHON, TINY
from benchmark_scripts import cuda_kernels, gpu, peers
from click.testing import CliRunner

from bitnet_ref import benchmark
from bitnet_ref.backends import Backend
from bitnet_ref.backends.cuda.backend import CupyBackend
from bitnet_ref.backends.cuda.emulation import build as emulated_build
from bitnet_ref.backends.cuda.ternary import TernaryKernels
from bitnet_ref.benchmark import validate
from bitnet_ref.benchmark.timing import Sample, Timing
from bitnet_ref.errors import BackendError, BackendUnavailable, ConfigError, FormatError, OutOfMemory

Goal, GoalResult, GpuPlan, goals, measure_gpu = gpu.Goal, gpu.GoalResult, gpu.GpuPlan, gpu.goals, gpu.measure_gpu

pytestmark = [pytest.mark.card, pytest.mark.skipif(emulated_build.compiler() is None, reason="no C++ compiler")]
SIZES = {"vocab_size": 96, "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "head_dim": 32}
SHAPES = {name: replace(benchmark.SHAPES[name], **SIZES, num_hidden_layers=2, num_key_value_heads=2)
          for name in ("2b-4t", "7b", "tinyllama-1.1b")}  # fmt: skip
PLAN = GpuPlan(
    shapes=SHAPES,
    kernel_shapes=((20, 300), (16, 128)),
    batches=(2, 3),
    large_batch=2,
    prompt_tokens=3,
    new_tokens=3,
    prefill_tokens=20,
    repeats=1,
    kernel_repeats=1,
    cold_bytes=10_000,
    copy_bytes=4096,
)


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setenv("BITNET_REF_CUDA", "emulated")


def fixed_peer(name, config, prompt, new, *, device, quantized, **_):
    """transformers on the emulated device's host, at 50 and 10 ms a step."""
    assert (name, config, device) == ("transformers", PLAN.config("2b-4t"), "cpu")
    decode = Timing.of([Sample(0.05 if quantized else 0.01)] * new)
    return peers.PeerBench(name, "1", "weights", 1, prompt, new, decode, decode, 1)


def test_every_part(monkeypatch):
    monkeypatch.setattr(gpu, "measure_peer", fixed_peer)
    kept = []
    found = measure_gpu(PLAN, on_row=lambda so_far: kept.append(json.dumps(so_far.to_dict(), allow_nan=False)))
    assert found.equal
    assert found.finished
    assert [row.goal.part for row in found.rows] == [
        *("kernels", "kernels", "decode", "batches", "batches", "prefill", "7b", "7b", "7b", "dense", "dense"),
        *("precision", "precision", "cpu", "peers", "peers"),
    ]
    rows = {row.goal.what: row for row in found.rows}
    unmeasured = [what for what, row in rows.items() if row.value is None]
    assert unmeasured == (["2B-4T, GPU over CPU"] if NO_CYTHON else [])
    assert not any(found.met(row) is not None for row in found.rows)  # no target is for the emulation
    assert set(found.checks) >= {"2b-4t float32 cupy", "2b-4t float16 cupy", "7b float32 cupy"}

    one = rows["2B-4T, batch 1"]
    assert one.value == one.facts["tokens_per_s"]
    assert one.facts["of_bound"] == pytest.approx(one.value / one.facts["bound_tokens_per_s"])
    assert one.facts["repetitions"] == 1
    many = rows["2B-4T, batch 3 over 1"]
    assert many.value == pytest.approx(many.facts["tokens_per_s"] / one.value)
    cache = 2 * 2 * 2 * 32 * 4 * 4.5  # keys and values of 2 layers of 2 heads of 32, in float32: of 4 tokens, then 5
    assert many.facts["step_bytes"] - one.facts["step_bytes"] == 2 * cache
    assert rows["2B-4T, bfloat16 over float32"].facts["fewer_bytes"] > 1  # the cache's
    weights = sum(n * k for n, k in SHAPES["7b"].linear_shapes().values()) * 2 / 4 + 2 * 2 * 96 * 128
    assert weights / 1e9 < rows["7B, packed weights"].value < 1.5 * weights / 1e9  # scales, norms and whole tiles
    ratio = rows["2B-4T over transformers' BitNet"].value / rows["2B-4T over transformers' bf16"].value
    assert ratio == pytest.approx(5)

    assert len(kept) == len(found.rows)
    facts = json.loads(kept[-1])
    assert [row["found"] for row in facts["rows"]] == [row.value for row in found.rows]
    assert [len(json.loads(text)["rows"]) for text in kept[:3]] == [1, 2, 3]
    assert not json.loads(kept[0])["finished"]
    assert facts["plan"]["layers_of"] == {"2b-4t": 2, "7b": 2, "tinyllama-1.1b": 2}


def test_a_ratio_measures_what_it_is_a_ratio_to():
    found = measure_gpu(replace(PLAN, batches=(2,), layers=1), ["batches"])
    assert [row.goal.what for row in found.rows] == ["2B-4T of 1 layers, batch 2 over 1"]
    assert found.rows[0].value > 0
    assert found.plan.config("2b-4t").num_hidden_layers == 1


def test_one_model_at_a_time_is_held(monkeypatch):
    open_models = []
    make, close = gpu.synthetic_model, CupyBackend.close

    def counted(config, be):
        assert not open_models
        open_models.append(be)
        return make(config, be)

    monkeypatch.setattr(gpu, "synthetic_model", counted)
    monkeypatch.setattr(CupyBackend, "close", lambda self: (open_models.remove(self), close(self)))
    measure_gpu(PLAN, ["decode", "7b", "dense"])
    assert not open_models


def test_what_fails_says_why_and_the_others_go_on(monkeypatch):
    make = gpu.synthetic_model

    def no_peer(*_, **__):
        raise BackendUnavailable("transformers is not installed")

    def none_of_7b(config, be):
        if not config.tie_word_embeddings:
            raise OutOfMemory("the card\nis full")
        return make(config, be)

    monkeypatch.setattr(gpu, "measure_peer", no_peer)
    monkeypatch.setattr(gpu, "synthetic_model", none_of_7b)
    found = measure_gpu(PLAN, ["decode", "7b", "peers"])
    assert found.equal  # of what was measured
    assert found.finished
    assert found.rows[0].value > 0
    assert {row.why for row in found.rows[1:4]} == {"OutOfMemory: the card is full"}
    assert {row.why for row in found.rows[4:]} == {"BackendUnavailable: transformers is not installed"}
    assert len(found.rows) == 6


def test_a_mistake_of_ours_ends_one_row(monkeypatch, capsys):
    def mistaken(model, tokens):
        raise AttributeError("a name that is not there")

    monkeypatch.setattr(gpu, "check_model", mistaken)
    found = measure_gpu(PLAN, ["kernels", "decode", "prefill"])
    assert found.finished
    assert [row.value is None for row in found.rows] == [False, False, True, True]
    assert {row.why for row in found.rows[2:]} == {"AttributeError: a name that is not there"}
    assert "in mistaken" in capsys.readouterr().err  # the place


def test_what_a_ratio_is_to_is_kept_where_there_is_none(monkeypatch):
    """A model that differs has no speed, but what its rival took is not lost."""
    wrong = validate.Check(accumulators=9, unequal_accumulators=1)
    right = gpu.check_model
    monkeypatch.setattr(gpu, "measure_peer", fixed_peer)
    monkeypatch.setattr(
        gpu, "check_model", lambda model, tokens: wrong if model.backend.name == "cupy" else right(model, tokens)
    )
    found = measure_gpu(PLAN, ["cpu", "peers"])
    assert [row.value for row in found.rows] == [None] * 3
    assert [row.facts["peer"]["decode"]["median_s"] for row in found.rows[1:]] == [0.05, 0.01]
    if not NO_CYTHON:
        assert found.rows[0].differs
        assert found.rows[0].facts["cpu_tokens_per_s"] > 0


def test_a_model_that_differs_gets_no_speed(monkeypatch):
    wrong = validate.Check(accumulators=9, unequal_accumulators=1)
    monkeypatch.setattr(gpu, "check_model", lambda model, tokens: wrong)
    found = measure_gpu(PLAN, ["decode", "prefill"])
    assert not found.equal
    assert [(row.value, row.differs) for row in found.rows] == [(None, True)] * 2
    assert "2b-4t float32 cupy is not what the NumPy reference computes" in found.rows[0].why


def test_a_kernel_that_differs_gets_no_speed(monkeypatch):
    right = cuda_kernels.linear_of_row
    monkeypatch.setattr(cuda_kernels, "linear_of_row", lambda *args: np.asarray(right(*args)) * np.float32(1.1))
    found = measure_gpu(PLAN, ["kernels"])
    assert not found.equal
    assert "DIFFERS: ternary_row" in found.rows[0].why


def test_a_kernel_that_models_do_not_take_is_compared_too(monkeypatch):
    right = TernaryKernels.matmul

    def wrong(self, x_q, w, kernel=None):
        return right(self, x_q, w, kernel).view(np.ndarray) + np.int32(kernel == "ternary_gemv_mma_8")

    monkeypatch.setattr(TernaryKernels, "matmul", wrong)
    found = measure_gpu(PLAN, ["kernels"])
    assert all(row.value > 0 for row in found.rows)
    assert not found.equal


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (2, "repetitions give different tokens"),
        (3, "of 2 sequences the first has other tokens than alone"),
    ],
)
def test_other_tokens_are_no_speed(call, why, monkeypatch):
    """One token is wrong from that call of the loop on: in a repetition alone, or in all of a batch."""
    right, calls = gpu.generate, []

    def wrong(*args):
        tokens, stats = right(*args)
        calls.append(1)
        tokens[0][-1] += len(calls) >= call
        return tokens, stats

    monkeypatch.setattr(gpu, "generate", wrong)
    found = measure_gpu(replace(PLAN, batches=(2,)), ["decode", "batches"])
    assert not found.equal
    assert [why in row.why for row in found.rows if row.differs] == [True]
    assert [row.facts["tokens_per_s"] > 0 for row in found.rows if row.differs] == [True]


def test_prompts_are_the_same_for_every_count():
    assert PLAN.prompts(96, 1) == PLAN.prompts(96, 2)[:1]


def test_targets():
    """What the default plan asks for, and when it is met: only of whole models, only on a card."""
    asked = {goal.what: goal for goal in goals(GpuPlan())}
    assert list(dict.fromkeys(goal.part for goal in asked.values())) == list(gpu.PARTS)
    words = {what: goal.words for what, goal in asked.items()}
    assert words["GEMV 13824x2560 over a copy"] == ">= 60 %"
    assert words["GEMV 2560x6912 over a copy"] == ">= 35 %"
    assert words["2B-4T, batch 1"] == ">= 1,500 tok/s (stretch 2,400)"
    assert [words[f"2B-4T, batch {n} over 1"] for n in (8, 32, 128)] == [">= 6 x", ">= 18 x", ">= 40 x"]
    assert words["2B-4T, prompt of 2,048"] == "<= 40 ms"
    assert words["7B, packed weights"] == "<= 2.6 GB"
    fast, slow = (GoalResult(asked["2B-4T, prompt of 2,048"], ms) for ms in (39.0, 41.0))
    found = gpu.GpuBench("H200", False, {}, GpuPlan(), ("prefill",), 2, [1.0], [fast, slow])
    assert [found.met(row) for row in found.rows] == [True, False]
    assert found.met(GoalResult(Goal("batches", "2B-4T, batch 5 over 1", "x"), 4.0)) is None
    assert found.met(GoalResult(fast.goal, why="no room")) is None
    for less in ({"emulated": True}, {"plan": GpuPlan(layers=3)}, {"plan": PLAN}):
        assert replace(found, **less).met(fast) is None


def test_arguments():
    for plan, parts in ((PLAN, ["speed"]), (replace(PLAN, new_tokens=1), ["decode"]), (GpuPlan(layers=0), ["decode"])):
        with pytest.raises(ConfigError, match="expected"):
            measure_gpu(plan, parts)


# -- what it rests on --------------------------------------------------------------------------------------------------


def test_a_dense_shape_gets_dense_bfloat16_linears():
    model = benchmark.synthetic_model(SHAPES["tinyllama-1.1b"], Backend(threads=1))
    for _, weight in model.weights.linears():
        assert weight.array.dtype == ml_dtypes.bfloat16
    assert not model.weights.tied
    assert model.weights.layers[0].ffn_sub_norm is None
    whole = benchmark.SHAPES["tinyllama-1.1b"]
    linears = whole.num_hidden_layers * sum(n * k for n, k in whole.linear_shapes().values())
    assert linears + 2 * whole.vocab_size * whole.hidden_size == pytest.approx(1.1e9, rel=0.01)


def test_16_bits_are_allowed_their_rounding_and_no_more():
    class Broken(CupyBackend):
        def lm_head(self, x, w):
            logits = super().lm_head(x, w)
            return self.add(logits, logits)

    def check(be, config):
        return benchmark.check_model(benchmark.synthetic_model(config, be), [1, 2, 3, 4])

    narrow, wide = (check(CupyBackend(dtype), SHAPES["tinyllama-1.1b"]) for dtype in ("bfloat16", "float32"))
    assert narrow.equal
    assert narrow.logits_allowed > narrow.logits_error > wide.logits_allowed
    assert not check(Broken("bfloat16"), SHAPES["tinyllama-1.1b"]).equal


def test_only_transformers_can_be_told_where():
    with pytest.raises(BackendError, match="for transformers"):
        peers.measure_peer("llama-cpp-python", TINY, device="cuda")
    with pytest.raises(FormatError, match="dense"):
        peers.write_random_gguf(SHAPES["tinyllama-1.1b"], "never-written.gguf")


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_shapes(monkeypatch):
    monkeypatch.setattr(gpu, "SHAPES", SHAPES)
    monkeypatch.setattr(gpu, "PlainCopy", lambda device, _: cuda_kernels.PlainCopy(device, 4096))


COMMAND = ["--only", "decode", "--new-tokens", "2", "--repeats", "1"]


@pytest.mark.usefixtures("small_shapes")
def test_the_command(tmp_path):
    done = CliRunner().invoke(gpu.main, [*COMMAND, "--layers", "1", "--out", str(tmp_path / "gpu.json")])
    assert done.exit_code == 0, done.output
    assert "Emulated on the host: the times say nothing about a GPU." in done.output
    assert "Models of at most 1 layers: no target is judged." in done.output
    assert "2B-4T of 1 layers, batch 1" in done.output
    assert " s  2B-4T of 1 layers, batch 1: " in done.stderr  # as it is found
    assert ">= 1,500 tok/s" in done.output
    assert "1 comparisons with the NumPy reference" in done.output
    kept = json.loads((tmp_path / "gpu.json").read_text())
    assert kept["finished"]
    told = json.loads(CliRunner().invoke(gpu.main, [*COMMAND, "--json"]).stdout)
    assert told.keys() == kept.keys()
    assert told["rows"][0]["met"] is None


@pytest.mark.usefixtures("small_shapes")
def test_a_difference_is_exit_code_1(monkeypatch):
    monkeypatch.setattr(gpu, "check_model", lambda model, tokens: validate.Check())
    done = CliRunner().invoke(gpu.main, COMMAND)
    assert done.exit_code == 1
    assert "DIFFERS: 2b-4t float32 cupy" in done.output
    assert "not measured" in done.output


@pytest.mark.usefixtures("small_shapes")
def test_a_place_that_cannot_be_written_is_said_at_once(tmp_path):
    done = CliRunner().invoke(gpu.main, [*COMMAND, "--out", str(tmp_path / "nowhere" / "gpu.json")])
    assert done.exit_code == 2
    assert "--out" in done.output


def test_no_gpu_is_exit_code_4(monkeypatch):
    monkeypatch.setenv("BITNET_REF_CUDA", "nowhere")
    done = CliRunner().invoke(gpu.main, [])
    assert done.exit_code == 4
    assert "expected gpu" in done.output


def test_what_a_row_says():
    facts = {"cpu_tokens_per_s": 24.5, "cpu_threads": 16}
    row = GoalResult(Goal("cpu", "2B-4T, GPU over CPU", "x", 50), 61.24, facts)
    assert gpu.describe_row(row) == "61.2 x, CPU 24.5 tok/s on 16 threads"
    assert gpu.verdict_of(SimpleNamespace(met=lambda row: row.meets), row) == "yes"
