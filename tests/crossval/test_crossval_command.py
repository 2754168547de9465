"""bitnet-ref crossval: exit codes, JSON, files written."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import GOLDEN, model

import bitnet_ref
from bitnet_ref.cli import cli
from bitnet_ref.crossval.trace import Trace, write_trace

CASE = str(GOLDEN / "bitnet-packed-offline")
needs_cython = pytest.mark.skipif(bitnet_ref.available_backends()["cython"] is not None, reason="no extension here")


def invoke(*args):
    return CliRunner().invoke(cli, ["crossval", *map(str, args)])


@pytest.mark.thorough
@needs_cython
def test_backends_agree():
    some = "--only", "numpy", "--only", "cython"  # tests/crossval/test_opponents.py has the others
    result = invoke("backends", CASE, *some)
    assert result.exit_code == 0, result.output
    assert "AGREES" in result.stdout
    found = json.loads(invoke("backends", CASE, *some, "--tokens", "1 5,9", "--json").stdout)
    assert found["agrees"] is True
    assert found["tokens"] == [1, 5, 9]
    assert {result["opponent"] for result in found["results"]} == {"numpy", "cython"}


@pytest.fixture
def no_card(monkeypatch):
    monkeypatch.setattr("bitnet_ref.backends.cuda.why_unavailable", lambda index=0: "there is no GPU")


@pytest.mark.thorough
def test_a_missing_opponent(no_card):
    """Never agreement: 4 when nothing ran, 1 where it is required; beside others that agree, it is said."""
    some = "--only", "numpy", "--only", "cupy"
    found = json.loads(invoke("backends", CASE, *some, "--tokens", "1 5,9", "--json").stdout)
    assert found["agrees"] is True
    assert found["missing"]
    assert "not available: there is no GPU" in invoke("backends", CASE, *some).stdout
    assert invoke("backends", CASE, "--only", "cupy").exit_code == 4
    result = invoke("backends", CASE, "--only", "cupy", "--require")
    assert result.exit_code == 1
    assert "required" in result.stdout
    assert json.loads(invoke("backends", CASE, "--only", "cupy", "--json").stdout)["agrees"] is False


@pytest.mark.thorough
@needs_cython
def test_a_missing_opponent_beside_others(no_card):
    assert invoke("backends", CASE, "--only", "cupy", "--only", "cython").exit_code == 0
    assert invoke("backends", CASE, "--only", "cupy", "--only", "cython", "--require").exit_code == 1


def test_record_trace_receipt_verify(tmp_path):
    path, receipt, page = tmp_path / "t.safetensors", tmp_path / "r.json", tmp_path / "r.html"
    result = invoke("record", CASE, path, "--tokens", "1,5,9", "--json")
    assert json.loads(result.stdout) == {"path": str(path), "tensors": 108, "tokens": 3, "bytes": path.stat().st_size}
    assert invoke("record", CASE, tmp_path / "few", "--tokens", "1", "--names", "hook_embed").exit_code == 0
    assert invoke("record", CASE, tmp_path / "f64", "--tokens", "1", "--dtype", "float64").exit_code == 0
    alone = invoke("record", CASE, tmp_path / "alone", "--tokens", "1", "--runs", "decode")
    assert alone.exit_code == 2
    assert "decode cannot be made of 1 token" in alone.output
    with Trace(tmp_path / "few") as few:
        assert list(few) == ["hook_embed"]
    result = invoke("trace", CASE, path, "--receipt", receipt, "--html", page)
    assert result.exit_code == 0, result.output
    assert page.read_text().startswith("<!doctype html>")
    assert invoke("verify", receipt).exit_code == 0
    found = json.loads(invoke("verify", receipt, "--json", "--require").stdout)
    assert found["holds"]
    path.unlink()
    assert invoke("verify", receipt, "--require").exit_code == 1


@pytest.mark.thorough
def test_a_name_that_ends_in_a_slash_is_a_folder(tmp_path):
    result = invoke("record", CASE, f"{tmp_path}/runs/", "--tokens", "1,5,9")
    assert result.exit_code == 0, result.output
    assert {path.stem for path in (tmp_path / "runs").iterdir()} >= {"short", "decode", "pieces", "batch"}
    assert invoke("trace", CASE, tmp_path / "runs").exit_code == 0
    assert invoke("record", CASE, f"{tmp_path}/no/runs/", "--tokens", "1").exit_code == 2
    (tmp_path / "file").touch()
    assert invoke("record", CASE, f"{tmp_path}/file/", "--tokens", "1").exit_code == 2


@pytest.mark.thorough
def test_a_trace_that_differs(tmp_path):
    m = model(CASE)
    _, seen = m.run_with_cache([1, 5, 9])
    seen["blocks.1.mlp.hook_post"][1] *= np.float32(1.5)
    write_trace(tmp_path / "t", seen, [1, 5, 9], engine="theirs")
    result = invoke("trace", CASE, tmp_path / "t")
    assert result.exit_code == 1
    assert "blocks.1.mlp.hook_post" in result.stdout
    assert "scale" in result.stdout
    found = json.loads(invoke("trace", CASE, tmp_path / "t", "--json", "--no-causes").stdout)
    assert found["results"][0]["comparisons"][0]["first_divergence"] == "blocks.1.mlp.hook_post"


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("trace", CASE, "no such file"), 3),
        (("trace", CASE, f"{CASE}/model.safetensors"), 3),
        (("backends", "no such model"), 3),
        (("backends", CASE, "--tokens", "1,x"), 2),
        (("backends", CASE, "--tokens", "100000"), 2),
        (("backends", CASE, "--tokens", "1", "--prompt", "a"), 2),
        (("verify", f"{CASE}/config.json"), 3),
        (("compare",), 2),
    ],
)
def test_exit_codes(args, code):
    assert invoke(*args).exit_code == code
