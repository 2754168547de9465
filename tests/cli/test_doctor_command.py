"""bitnet-ref doctor: the installation, and each backend against the reference."""

import importlib.metadata
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from cli_runs import invoke_json
from click.testing import CliRunner

import bitnet_ref
from bitnet_ref.backends import choose_backend, cuda
from bitnet_ref.cli import cli
from bitnet_ref.crossval import doctor, self_check
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


@pytest.mark.usefixtures("no_emulation")
def test_doctor_json():
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
    assert found["versions"]["numpy"] == np.__version__
    assert found["versions"]["click"] == importlib.metadata.version("click")
    assert found["models"] == ["storychat", "storyteller"]
    assert found["memory_total"] >= found["memory_available"] > 0
    assert found["threads"] == resolve_threads()
    assert [method["name"] for method in found["methods"] if method["chosen"]] == (
        ["2-bit"] if available["cython"] is None else []
    )


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


@pytest.mark.usefixtures("no_emulation", "one_backend")
def test_doctor_fails_when_a_backend_differs(monkeypatch):
    """And shows an impossible thread count, and computes all the same."""
    monkeypatch.setattr(self_check, "LOGITS_FLOOR", -1.0)  # no computation is that good
    result = CliRunner().invoke(cli, ["doctor"], env={"BITNET_REF_NUM_THREADS": "none"})
    assert result.exit_code == 1
    expected = ("FAILED", "DIFFER", "BITNET_REF_NUM_THREADS", "storyteller", "accumulators exact", "Backends")
    for words in (*expected, np.__version__, "ops, in chunks"):
        assert words in result.stdout


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
