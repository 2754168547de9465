"""scripts/benchmarks: ceilings, the tokenizer, the engine under load with its picture, zeros of gates."""

import json
import math
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import benchmark_scripts
import click
import pytest
from bench_runs import SMALL, TINY, assert_positive
from benchmark_scripts import (
    FOLDER,
    adapters,
    ceilings,
    first_token,
    gate_zeros,
    models,
    serve,
    servers,
    tokenizer,
    train_steps,
)
from click.testing import CliRunner
from helpers import DATA, GOLDEN, model

from bitnet_ref import benchmark
from bitnet_ref.backends import Backend, loaded
from bitnet_ref.backends.cpu.extension import simd_variants
from bitnet_ref.benchmark.serve import Load
from bitnet_ref.errors import BackendError, ConfigError, NumericsError, ShapeError
from bitnet_ref.families.lora import select_adapters
from bitnet_ref.formats.open import ASSETS, find_model
from bitnet_ref.serving import Engine, EngineConfig
from bitnet_ref.tokenizers import load_tokenizer

ROOT = FOLDER.parents[1]
COMMANDS = sorted(path.name for path in FOLDER.glob("*.py") if "start(main)" in path.read_text())


def invoke(script, *arguments):
    return CliRunner().invoke(script.main, [str(word) for word in arguments])


def invoke_json(script, *arguments, code=0):
    result = invoke(script, *arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


@pytest.fixture(autouse=True)
def small_reader(monkeypatch):
    monkeypatch.setattr(benchmark.limits, "MIN_READ_BYTES", SMALL)
    monkeypatch.setattr(benchmark.limits, "MAX_READ_BYTES", SMALL)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_says_in_its_text_how_it_is_run(name):
    assert f"    python scripts/benchmarks/{name}" in own_text(name)


def own_text(name):
    return (FOLDER / name).read_text(encoding="utf-8").split('"""')[1]


def shown_commands():
    """(page, words) of each `python scripts/benchmarks/...` in a guide or in a script's own text."""
    texts = {
        path.name: path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    }
    for page, text in {**texts, **{name: own_text(name) for name in COMMANDS}}.items():
        for command in re.findall(r"python scripts/benchmarks/([^`]+?)(?:`|\n\n)", text):
            yield page, shlex.split(command)


@pytest.mark.parametrize(("page", "words"), list(shown_commands()))
def test_every_command_that_is_shown_has_these_options(page, words):
    script, *options = words
    main = getattr(benchmark_scripts, Path(script).stem).main
    values = [{"NAME": "transformers"}.get(word, word) for word in options]
    main.make_context(script, values)
    with pytest.raises(click.UsageError):
        main.make_context(script, [*values, "--no-such-option"])


@pytest.mark.parametrize(("name", "option"), [("ceilings", "--plot"), ("serve", "--plot"), ("gpu", "--out")])
def test_targets_are_checked_before_any_work(name, option, tmp_path):
    (tmp_path / "folder.svg").mkdir()
    for target, words in (("none/x.svg", "there is no folder"), ("folder.svg", "is a folder")):
        result = invoke(getattr(benchmark_scripts, name), option, tmp_path / target)
        assert result.exit_code == 2
        assert words in result.stderr


@pytest.mark.thorough
def test_a_command_runs_as_a_program():
    command = [sys.executable, FOLDER / "tokenizer.py", "--texts", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "--texts" in done.stderr


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_train_steps(optimizer):
    """Every trainer is timed, after each has given the same loss; one with another loss is refused."""
    options = ("--optimizer", optimizer, "--batch", 2, "--context", 8, "--rounds", 1)
    trainers = invoke_json(train_steps, *options)["trainers"]
    assert {each["trainer"] for each in trainers} >= {"numpy, float32"}
    for each in trainers:
        assert 8 < each["first_loss"] < 8.6
        assert min(each["tokens_per_s"], each["processor_s"]) > 0


def test_a_trainer_with_another_loss(monkeypatch):
    monkeypatch.setattr(train_steps, "trainers", lambda *_: {"numpy, float32": lambda _: 8.0, "odd": lambda _: 8.1})
    with pytest.raises(NumericsError, match=r"the first loss of odd is 8\.1, NumPy's 8\.0"):
        train_steps.measure("adamw", 1, 8, 1)


# -- the start ---------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="drops files from Linux's cache")
def test_first_token():
    result = invoke_json(first_token, "storyteller", "--repeats", 1)
    assert result["file_bytes"] > 1 << 20
    for start in (*result["cold"], *result["warm"]):
        assert start[0] > 0
        assert start[1] > 0
    failed = invoke(first_token, DATA / "gguf" / "i2_s.gguf")  # has no tokenizer
    assert "did not start" in failed.stderr
    assert failed.exit_code != 0


# -- ceilings ----------------------------------------------------------------------------------------------------------


def test_ceilings():
    """Small, on two threads: everything that this processor has is there, and the roof is the lower of both limits."""
    found = ceilings.measure_ceiling(2, repeats=2, nbytes=1 << 20, rounds=1000)
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
        ceilings.measure_ceiling(1, repeats=0)


@pytest.mark.thorough
def test_the_command_of_ceilings(tmp_path):
    pytest.importorskip("matplotlib")
    facts = invoke_json(ceilings, "--threads", 1, "--repeats", 1, "--plot", tmp_path / "roof.svg")
    assert [read["threads"] for read in facts["reads"]] == [1]
    assert "<svg" in (tmp_path / "roof.svg").read_text()
    result = invoke(ceilings, "--threads", 1, "--repeats", 1)
    assert result.exit_code == 0
    assert "GB/s" in result.stdout
    assert invoke(ceilings, "--plot", tmp_path / "roof.xyz").exit_code == 2


# -- the tokenizer -----------------------------------------------------------------------------------------------------


def test_the_tokenizer(monkeypatch):
    small = ("--texts", 4, "--words", 6, "--repeats", 1)
    facts = invoke_json(tokenizer, *small)
    assert facts["equal"]
    assert_positive(facts, "tokens", "load_s", *(f"{name}_tokens_per_s" for name in facts["timings"]))
    assert set(facts["timings"]) == {"encode_single", "encode_batch", "decode", "stream"}
    assert "encode_batch" in invoke(tokenizer, *small).stdout
    monkeypatch.setattr(type(load_tokenizer(find_model("storyteller"))), "encode_batch", lambda self, texts: [])
    assert invoke_json(tokenizer, *small, code=1)["timings"] == {}


# -- the engine --------------------------------------------------------------------------------------------------------

FAST = (GOLDEN / "bitnet-packed-offline", "--requests", 6, "--prompt", "2-4", "--new", 3, "--together", 4)
RATES = ("--rate", 200, "--rate", 400)


def test_prompts_together_and_one_after_another():
    assert serve.Together(4, 8, 1.0, 3.0, (2.0, 4.0, 3.0)).ratio == 3.0
    load = Load(requests=5, prompt=(2, 4), new=(3, 5))
    found = serve.measure_together(model(GOLDEN / "bitnet-packed-offline", "auto"), EngineConfig(), 3, load)
    assert (found.prompts, found.new_tokens) == (3, 4)
    assert len(found.ratios) == 3
    assert all(ratio > 0 and math.isfinite(ratio) for ratio in found.ratios)


@pytest.mark.thorough
def test_the_command_of_the_engine(tmp_path):
    pytest.importorskip("matplotlib")
    result = invoke(serve, *FAST, *RATES, "--plot", tmp_path / "load.svg")
    assert result.exit_code == 0, result.output
    assert "4 prompts together" in result.stdout
    assert "<svg" in (tmp_path / "load.svg").read_text()
    assert invoke(serve, "--plot", "load.xyz").exit_code == 2


def test_an_engine_that_gives_something_else_has_no_ratio(monkeypatch):
    submit = Engine.submit
    monkeypatch.setattr(Engine, "submit", lambda self, prompt, **p: submit(self, [*prompt[:-1], 3], **p))
    facts = invoke_json(serve, *FAST, *RATES, code=1)
    assert (facts["equal"], facts["points"], facts["together"]) == (False, [], None)


# -- zeros -------------------------------------------------------------------------------------------------------------


def test_the_command_with_zeros(monkeypatch):
    wide = replace(TINY, hidden_size=256, intermediate_size=256, num_attention_heads=4, head_dim=64)
    monkeypatch.setitem(benchmark.SHAPES, "2b-4t", wide)
    command = ("--synthetic", "2b-4t", "--gate-zeros", 0.8, "--prompt", 4, "--new", 2, "--threads", 1)
    assert invoke_json(models, *command)["equal"]
    assert invoke(models, "--gate-zeros", 0.8).exit_code == 2
    assert invoke(models, "--synthetic", "2b-4t", "--gate-zeros", 1.5).exit_code == 2


def test_a_synthetic_model_has_the_zeros_that_are_asked_for():
    shape = replace(benchmark.SHAPES["2b-4t"], vocab_size=300, hidden_size=1024, intermediate_size=1536)
    shape = replace(shape, num_attention_heads=8, num_key_value_heads=4)
    made = benchmark.synthetic_model(shape, Backend(), layers=3, draw=partial(gate_zeros.SparseGates, gate_zeros=0.8))
    gates = made.run_with_cache([5, 7, 11, 200], "*.mlp.hook_pre")[1]
    assert len(gates) == 3
    for name, gate in gates.items():
        assert 0.77 < (gate <= 0).mean() < 0.83, name
    with pytest.raises(ConfigError, match="a shape with relu2"):
        gate_zeros.SparseGates(benchmark.SHAPES["700m"], gate_zeros=0.8)


@pytest.mark.thorough
def test_what_adapters_cost():
    words = "--requests", 3, "--adapters", 2, "--rank", 2, "--rounds", 1
    facts = invoke_json(adapters, "--model", GOLDEN / "bitnet-packed-offline", *words)
    kinds = ["1 request", "1 request, adapter", "3 requests", "3 requests, 1 adapter", "3 requests, 2 adapters"]
    assert list(facts["step_s"]) == kinds
    assert_positive(facts["step_s"], *kinds)
    assert_positive(facts, "one_of_none", "batch_of_none", "several_of_one")


def test_adapters_of_other_requests_are_found(monkeypatch):
    """An adapter that is on for the request beside the one that asked for it."""
    subject = model(GOLDEN / "bitnet-packed-offline", "cython")
    drawn = [adapters.draw_adapter(subject, 2, ("q_proj",), seed) for seed in range(2)]
    adapters.check(subject, 4, drawn)
    monkeypatch.setattr(
        loaded,
        "select_adapters",
        lambda w, models, choice, wanted: select_adapters(w, models, choice[::-1].copy(), wanted),
    )
    with pytest.raises(ShapeError, match="among others as alone"):
        adapters.check(subject.on(subject.backend), 4, drawn)


# -- servers -----------------------------------------------------------------------------------------------------------


NAMES = (servers.OURS, servers.THEIRS)


@pytest.mark.thorough
def test_two_servers_in_turn():
    """Ours twice, in place of another one: the same texts, a value for each round."""
    from server_runs import RunningServer

    with (
        RunningServer({"model": ASSETS / "storyteller"}) as one,
        RunningServer({"model": ASSETS / "storyteller"}) as other,
    ):
        both = {name: servers.Served(each.port, os.getpid()) for name, each in zip(NAMES, (one, other), strict=True)}
        bench = servers.compare_servers(both, (1, 3), words=6, shared=3, new=4, rounds=2)
        assert bench.equal_texts == bench.prompts == 16
        assert [pair.streams for pair in bench.pairs] == [1, 3]
        for pair in bench.pairs:
            for field in ("tokens_per_s", "first_token_s", "slow_first_token_s", "cpu_s_per_text"):
                assert [ratio > 0 for ratio in pair.ratios(field)] == [True, True]
        with pytest.raises(BackendError, match="status 400"):
            servers.ask(one.port, "Alice", 5000)


@pytest.mark.thorough
def test_a_server_that_does_not_start(tmp_path):
    result = invoke(servers, tmp_path / "none.gguf", "--peer-python", sys.executable)
    assert result.exit_code != 0
    assert "does not start" in result.stderr
    result = invoke(servers, tmp_path / "none.gguf")
    assert "expected --llama-server or --peer-python" in result.stderr
