"""Mutated checkpoints and tokenizers load and compute, or fail with one of our errors; see campaign.py."""

import importlib.util
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from helpers import run_python

CAMPAIGN = Path(__file__).parent / "campaign.py"
COUNTS = {
    "config": 20,
    "weights": 15,
    "index": 15,
    "tokenizer": 8,
    "gguf": 15,
    "native": 15,
    "onnx": 12,
    "container": 15,
}
FORKED_KINDS, FORKED_COUNT = ("gguf", "weights", "onnx"), 20
OURS = {
    "BackendUnavailable",
    "FormatError",
    "ConfigError",
    "NumericsError",
    "TokenizerError",
    "GenerationError",
    "OutOfMemory",
}
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="the limits of a forked child are Linux's")


def needs_package(kind):
    if kind == "onnx":
        pytest.importorskip("onnx", reason="needs the onnx package: pip install 'bitnet-ref[onnx]'")


def run_campaign(*arguments, timeout_s):
    done = subprocess.run(
        [sys.executable, str(CAMPAIGN), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    where = f"{arguments}: exit status {done.returncode}, last {lines[-1] if lines else 'none'}"
    assert done.returncode == 0, f"{where}\n{done.stderr[-3000:]}"
    return lines


def check_variety(outcomes):
    """That the mutations reach something: some files stay usable, most do not."""
    assert outcomes["ok"] > 0, outcomes
    assert outcomes.total() - outcomes["ok"] > outcomes.total() // 4, outcomes


def run_in_one_process(kind, first, last, timeout_s):
    lines = run_campaign(kind, first, last, timeout_s=timeout_s)
    outcomes = Counter(line["outcome"] for line in lines if "outcome" in line)
    assert outcomes.total() == last - first
    assert set(outcomes) <= OURS | {"ok"}
    return outcomes


@pytest.mark.sample(12)
@pytest.mark.parametrize("kind", COUNTS)
def test_mutants_with_every_backend(kind):
    needs_package(kind)
    check_variety(run_in_one_process(kind, 0, COUNTS[kind], timeout_s=300))


@pytest.mark.thorough
@needs_linux
@pytest.mark.parametrize("kind", FORKED_KINDS)
def test_mutants_within_their_limits(kind, tmp_path):
    """Each in a child with 5 CPU-seconds and 1 GiB beyond the files' size: a model or one of our errors."""
    run_forked(kind, 100_000, FORKED_COUNT, tmp_path)


@needs_linux
@pytest.mark.slow
@pytest.mark.parametrize("kind", [*FORKED_KINDS, "container"])
def test_more_mutants_within_their_limits(kind, tmp_path):
    run_forked(kind, 100_000 + FORKED_COUNT, 1000, tmp_path)


def run_forked(kind, first, count, folder):
    needs_package(kind)
    last = run_campaign("--forked", kind, first, first + count, "--keep", folder, timeout_s=600)[-1]
    assert (last["done"], last["finds"]) == (count, [])
    outcomes = Counter(last["outcomes"])
    assert outcomes.total() == count
    check_variety(outcomes)


@pytest.mark.thorough
@needs_linux
def test_the_limits_are_limits():
    """What the forked campaign reports of children that do that."""
    jobs = {
        "return 'ok'": "ok",
        "raise KeyError('x')": "KeyError",
        "raise KeyboardInterrupt": "KeyboardInterrupt",  # as pyo3's panics, no Exception
        "os.kill(os.getpid(), 11)": "died by SIGSEGV",
        "os._exit(3)": "exit status 3",
        "bytearray(1 << 30)": "MemoryError",
        "bytearray(1 << 24); return 'ok'": "ok",
        "\n while True: pass": "timeout",
        "warnings.warn('x')": "UserWarning",
    }
    code = """if True:
        import json, os, sys, warnings
        sys.path.insert(0, sys.argv[1])
        from forked import run_in_child
        def run(text):
            names = {}
            exec(f"def job():\\n warnings.simplefilter('error')\\n {text.strip()}", globals(), names)
            return run_in_child(names["job"], 1 << 28, cpu_s=1)[0]
        print(json.dumps({text: run(text) for text in sys.argv[2:]}))
    """
    assert run_python(code, CAMPAIGN.parent, *jobs) == jobs


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("kind", COUNTS)
def test_longer_campaign(kind, part):
    needs_package(kind)
    n = 16 * COUNTS[kind]
    run_in_one_process(kind, 1000 + part * n, 1000 + (part + 1) * n, timeout_s=3000)


@pytest.mark.slow
@pytest.mark.parametrize(
    "target", ["safetensors", "gguf", "onnx", "uses tokenizer", "uses template", "uses trace", "uses receipt"]
)
def test_coverage_guided_targets_run(target, tmp_path):
    """A few seconds of each; what a real run takes is in atheris_target.py."""
    name, *kind = target.split()
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("needs the atheris package: pip install 'bitnet-ref[fuzz]'")
    needs_package(name)
    done = subprocess.run(
        [
            sys.executable,
            str(CAMPAIGN.parent / f"atheris_{name}.py"),
            *kind,
            "-max_total_time=2",
            f"-artifact_prefix={tmp_path}/",
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Done" in done.stderr, done.stderr[-3000:]
