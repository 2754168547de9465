"""bitnet-ref doctor: the installation, and each backend against the reference."""

import importlib.metadata
import re
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from cli_runs import invoke, invoke_json, process
from click.testing import CliRunner
from helpers import GOLDEN

import bitnet_ref
from bitnet_ref.backends import choose_backend, cuda
from bitnet_ref.cli import cli
from bitnet_ref.crossval import doctor, paths, self_check
from bitnet_ref.reference.weights import TernaryWeight
from bitnet_ref.system.threads import resolve_threads


@pytest.fixture
def no_emulation(monkeypatch):
    """Doctor without the emulated GPU, whose paths tests/crossval/test_paths.py runs."""
    monkeypatch.delenv("BITNET_REF_CUDA", raising=False)


@pytest.fixture
def one_backend(monkeypatch):
    """Doctor with the checks of one backend, a fast one where it is built."""
    name = "numpy" if bitnet_ref.available_backends()["cython"] else "cython"
    monkeypatch.setattr(self_check, "available_backends", lambda: {name: None})


def row_names(backend, quick=False):
    """The rows that the self-check of a backend has, none of them computed."""
    model = bitnet_ref.load(backend=backend, threads=1)
    checks = paths._checks(lambda **given: choose_backend(backend, threads=1, **given), model, [1, 5, 9], quick)
    answers = self_check._checks(model, self_check.read_answers(), quick)
    return {"accumulators", *(name for name, _ in checks), *(name for name, _ in answers)}


@pytest.mark.thorough
@pytest.mark.usefixtures("no_emulation")
def test_doctor_json():
    """The default takes every path of every backend, and every check of `--full` on one backend at least."""
    found = invoke_json("doctor")
    available = bitnet_ref.available_backends()
    assert {b["name"]: b["reason"] for b in found["backends"]} == available
    assert [c["backend"] for c in found["checks"]] == [name for name, reason in available.items() if reason is None]
    assert found["healthy"] is True
    for check in found["checks"]:
        assert check["accumulators"] > 10_000
        assert (check["unequal"], check["passed"], check["error"]) == (0, True, None)
        rows = {"ops, decoding", "recorded", "divided layers", "text", "text, 3 prompts", "answers: logits"}
        rows |= set(choose_backend(check["backend"], threads=2).paths)
        assert rows <= {path["path"] for path in check["paths"]}
        assert all(path["passed"] and path["compared"] > 0 for path in check["paths"])
    rows = {check["backend"]: {path["path"] for path in check["paths"]} for check in found["checks"]}
    assert set.union(*rows.values()) == set.union(*map(row_names, rows))
    assert found["verdict"] == f"All {sum(len(check['paths']) for check in found['checks'])} checks passed."
    assert found["versions"]["numpy"] == np.__version__
    assert found["versions"]["click"] == importlib.metadata.version("click")
    assert found["models"] == ["storychat", "storyteller"]
    assert found["memory_total"] >= found["memory_available"] > 0
    assert found["threads"] == resolve_threads()
    assert [method["name"] for method in found["methods"] if method["chosen"]] == (
        ["2-bit"] if available["cython"] is None else []
    )


@pytest.mark.slow
@pytest.mark.usefixtures("no_emulation")
def test_doctor_full_runs_every_check_on_every_backend():
    found = invoke_json("doctor", "--full")
    assert found["healthy"] is True
    for check in found["checks"]:
        assert {path["path"] for path in check["paths"]} == row_names(check["backend"])


@pytest.mark.usefixtures("no_emulation", "one_backend")
@pytest.mark.parametrize("fast", [True, False])
def test_numpy_runs_every_check_where_no_compiled_backend_does(monkeypatch, fast):
    quick = {}
    names = {"numpy": None, "cython": None if fast else "not built"}
    monkeypatch.setattr(self_check, "available_backends", lambda: names)
    monkeypatch.setattr(self_check, "check_backend", lambda name, threads, **how: quick.update({name: how["quick"]}))
    self_check.self_check(full=False)
    assert quick == ({"numpy": True, "cython": False} if fast else {"numpy": False})


@pytest.mark.thorough
@pytest.mark.parametrize("command", [["doctor", "--full"], ["crossval", "backends", "--only", "numpy"]])
def test_rows_come_when_they_are_done(command):
    """Also into a pipe: the first row is there while the others are computed."""
    with process(*command, stdout=subprocess.PIPE) as running:
        try:
            line = next(line for line in running.stdout if line.startswith(b"ops "))
            assert line.split()[:2] == [b"ops", b"passed"]
            assert running.poll() is None
        finally:
            running.kill()


@pytest.mark.thorough
def test_crossval_backends_ends_with_a_verdict(monkeypatch):
    arguments = ("crossval", "backends", GOLDEN / "bitnet-packed-offline", "--only", "numpy", "--tokens", "1,5,9")
    result = invoke(*arguments)
    rows = [line for line in result.stdout.splitlines() if " passed " in line]
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, f"All {len(rows)} checks passed.")
    monkeypatch.setattr(paths, "_over_pages", lambda model, tokens, path: paths._whole(model, tokens, path) + 1)
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == f"1 of {len(rows)} checks FAILED: numpy: ops, pages"
    assert invoke_json(*arguments, code=1)["agrees"] is False  # one document, without the rows


def test_a_backend_that_does_not_load_is_a_failed_check(monkeypatch):
    monkeypatch.setattr(self_check, "count_unequal", lambda *_: 1 / 0)
    shown = []
    check = self_check.check_backend("numpy", 1, on_check=lambda backend, row: shown.append((backend, row)))
    assert not check.passed
    assert check.error == "ZeroDivisionError: division by zero"
    assert shown == [("numpy", check.paths[0])]
    assert paths.sum_up(shown) == "1 of 1 checks FAILED: numpy: loads and runs"


def test_doctor_notices_wrong_accumulators():
    model = bitnet_ref.load(backend="numpy", threads=1)
    w_t = model.weights.layers[2].up_proj.ternary()
    w_t[5] = 1 - np.abs(w_t[5])  # one row of one matrix
    scale = model.weights.layers[2].up_proj.w_dequant_scale
    layers = list(model.weights.layers)
    layers[2] = replace(layers[2], up_proj=TernaryWeight.from_ternary(w_t, scale))
    exact = bitnet_ref.Model(model.config, replace(model.weights, layers=tuple(layers)), model.backend, model.path)
    accumulators, unequal = self_check.count_unequal(model, exact, [1, 3797, 537])
    assert accumulators > 10_000
    assert 1 <= unequal <= 3  # one accumulator of each token


@pytest.mark.thorough
@pytest.mark.usefixtures("no_emulation", "one_backend")
def test_doctor_fails_when_a_backend_differs(monkeypatch):
    """And shows an impossible thread count, and computes all the same."""
    monkeypatch.setattr(self_check, "LOGITS_FLOOR", -1.0)  # no computation is that good
    result = CliRunner().invoke(cli, ["doctor"], env={"BITNET_REF_NUM_THREADS": "none"})
    assert result.exit_code == 1
    expected = ("FAILED", "BITNET_REF_NUM_THREADS", "storyteller", "Backends")
    for words in (*expected, np.__version__, "answers: logits"):
        assert words in result.stdout
    assert re.search(r"^\d of \d+ checks FAILED: \w+: answers: logits", result.stdout, re.MULTILINE)
    assert "You are ready" not in result.stdout


@pytest.mark.parametrize("there", [True, False])
def test_doctor_says_that_cublas_is_missing(monkeypatch, there):
    memory = SimpleNamespace(total=80 << 30)
    card = SimpleNamespace(
        name="a card",
        emulated=False,
        compute_capability=(9, 0),
        can_matmul_16=there,
        memory=lambda: memory,
    )
    monkeypatch.setattr(cuda, "device_count", lambda: 1)
    monkeypatch.setattr(cuda, "open_device", lambda index: card)
    said = doctor._describe_backend("cupy", None).kernel
    assert said.startswith("CUDA kernels on a card (card 0, compute capability 9.0, 80 GiB)")
    assert ("cuBLAS is not installed" in said) == ('pip install "bitnet-ref[cuda12]"' in said) == (not there)
