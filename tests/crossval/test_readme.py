"""crossval/README.md: its examples compile and run, and what they write is a trace. The scripts beside it run too."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import GOLDEN, model

from bitnet_ref.crossval import cross_trace
from bitnet_ref.crossval.names import op_order
from bitnet_ref.crossval.trace import Trace, record_to_file

FOLDER = Path(__file__).parents[2] / "crossval"
README = (FOLDER / "README.md").read_text()


def example(language):
    code, *_ = re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)
    return code


def test_the_numpy_example_writes_a_trace(tmp_path, monkeypatch):
    m = model("storyteller")
    monkeypatch.chdir(tmp_path)
    exec(compile(example("python"), "README.md", "exec"), {"embedding": np.asarray(m.weights.embedding.array)})
    crossing = cross_trace(m, tmp_path / "my_run.safetensors")
    assert crossing.opponent == "my port 0.1"
    assert crossing.agrees, crossing.verdict


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
def test_the_c_example_writes_a_trace(tmp_path):
    (tmp_path / "trace.c").write_text(example("c"))
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-O1"]
    subprocess.run(["gcc", *flags, "trace.c", "-o", "trace"], cwd=tmp_path, check=True)
    subprocess.run([tmp_path / "trace", tmp_path / "t.safetensors"], check=True)
    with Trace(tmp_path / "t.safetensors") as trace:
        assert trace.token_ids == [1, 17, 5]
        assert trace.engine == "my C port 0.1"
        np.testing.assert_array_equal(trace["hook_embed"], np.zeros((3, 256), dtype=np.float32))
    crossing = cross_trace(model("storyteller"), tmp_path / "t.safetensors")
    assert crossing.comparisons[-1].first_divergence.name == "hook_embed"


def test_the_names_of_the_page_are_the_recorders():
    named = set(re.findall(r"(hook_\w+)", README))
    assert named == {name.rpartition(".")[2] for name in op_order(model("storyteller").config)}


def run(script, *arguments):
    done = subprocess.run(
        [sys.executable, FOLDER / script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "BITNET_REF_CUDA"},  # not emulated: slow
    )
    return done.returncode, done.stdout + done.stderr


def test_the_scripts(tmp_path):
    case = GOLDEN / "bitnet-packed-offline"
    code, said = run("backends.py", case, "--tokens", "1,5,9")
    assert code in (0, 4), said
    assert "cupy" in said
    record_to_file(model(case), [1, 5, 9], tmp_path / "t")
    assert run("trace_file.py", case, tmp_path / "t")[0] == 0
    code, said = run("trace_file.py", case, case / "model.safetensors")
    assert code == 3
    assert "not a trace" in said
