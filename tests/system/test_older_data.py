"""What the version of 23 November 2026 left on a disk: each is read, converted, or refused with what to do.

tests/data/older was written by that version: `crossval record`, `crossval trace --receipt`, `pull`, `train`,
`perplexity` with a state, `generate --prepared` (cython), and a `batch` that was killed. The receipt does not name the
machine, and the store not the folder that its model came from.
"""

import json
import logging
import shutil
import sys

import numpy as np
import pytest
from cli_runs import BACKEND, invoke
from helpers import DATA, model

import bitnet_ref
from bitnet_ref.crossval.opponents import cross_trace
from bitnet_ref.crossval.receipt import verify_receipt
from bitnet_ref.errors import ConfigWarning, FormatError
from bitnet_ref.evaluation import perplexity
from bitnet_ref.formats import prepared
from bitnet_ref.formats.registry.old_store import move_old_store
from bitnet_ref.training import TrainingRun, read_run

OLDER = DATA / "older"
TINY = OLDER / "tiny.bitnet.safetensors"


def test_a_journal_is_refused_and_stays(tmp_path):
    """It names the model by its files' sizes, so that its answers may be another model's."""
    for name in ("in.jsonl", "out.jsonl.partial"):
        shutil.copy(OLDER / name, tmp_path)
    result = invoke(
        "batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--model", "storyteller", "--backend", "numpy"
    )
    assert result.exit_code == 3
    assert (
        "out.jsonl.partial: is of another run (other model, settings or version), or damaged; delete it"
        in result.output
    )
    assert (tmp_path / "out.jsonl.partial").read_bytes() == (OLDER / "out.jsonl.partial").read_bytes()
    assert not (tmp_path / "out.jsonl").exists()


def test_a_training_run_goes_on(tmp_path):
    """With a warning: its checkpoint does not say of which texts it is. The rest of the run is that of a whole one."""
    for name in ("run.toml", "tokens.npy", "checkpoint.safetensors", "metrics.csv"):
        folder = tmp_path / "run" if name in ("checkpoint.safetensors", "metrics.csv") else tmp_path
        folder.mkdir(exist_ok=True)
        shutil.copy(OLDER / name, folder)
    config = tmp_path / "run.toml"
    config.write_text(config.read_text().replace("steps = 8", "steps = 12"))
    settings, shape = read_run(config)
    with pytest.warns(ConfigWarning, match="does not say of which texts it is"):
        TrainingRun(settings, tmp_path / "run", shape, threads=1, resume=True).run()
    TrainingRun(settings, tmp_path / "whole", shape, threads=1).run()
    rows, whole = (read_rows(tmp_path / name / "metrics.csv") for name in ("run", "whole"))
    assert rows[:, 0].tolist() == list(range(1, 13))
    np.testing.assert_allclose(rows[:, 1], whole[:, 1], rtol=1e-5)
    config.write_text(config.read_text().replace("context = 8", "context = 4"))
    settings, shape = read_run(config)
    with pytest.raises(FormatError, match="of another run"):
        TrainingRun(settings, tmp_path / "run", shape, threads=1, resume=True)


def read_rows(path):
    """Steps and losses."""
    return np.loadtxt(path, delimiter=",", skiprows=1, usecols=(0, 1))


class Letters:
    """A tokenizer for the tiny model, which has none."""

    bos_id = 1

    def encode(self, text):
        return [1, *(3 + byte % 37 for byte in text.encode())]

    def token_bytes(self, token):
        return bytes(1)


def test_a_state_of_perplexity_is_used(tmp_path, monkeypatch):
    shutil.copy(OLDER / "perplexity.json", tmp_path)
    m, texts, options = bitnet_ref.load(TINY, backend="numpy"), [(OLDER / "text.txt").read_text()], {"length": 64}
    m.tokenizer = Letters()
    expected = perplexity(m, texts, "llama.cpp", **options)
    monkeypatch.setattr(sys.modules[perplexity.__module__], "sum_windows", None)  # nothing is computed
    result = perplexity(m, texts, "llama.cpp", state=tmp_path / "perplexity.json", **options)
    assert result.perplexity == pytest.approx(expected.perplexity, rel=1e-12)
    with pytest.raises(FormatError, match="is the state of another run: windows_sha256 differs"):
        perplexity(m, [texts[0] + "The end. " * 20], "llama.cpp", state=tmp_path / "perplexity.json", **options)


def test_a_trace_and_its_receipt():
    m = model(TINY, "numpy")
    crossing = cross_trace(m, OLDER / "trace.safetensors")
    assert crossing.agrees
    assert "56 of 56 tensors compared, all equal" in crossing.verdict
    verification = verify_receipt(OLDER / "receipt.json", str(TINY), str(OLDER / "trace.safetensors"))
    assert verification.holds
    assert len(verification.confirmed) > 5
    assert not verification.unchecked


def test_a_store_is_moved(tmp_path, monkeypatch):
    shutil.copytree(OLDER / "store", tmp_path / "home")
    monkeypatch.setenv("BITNET_REF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    result = invoke("list")
    assert "bitnet-ref pull --move-old-store" in result.output + result.stderr
    assert [name for name, _ in move_old_store()] == ["mine"]
    ids = [1, 17, 5]
    np.testing.assert_array_equal(
        bitnet_ref.load("mine", backend="numpy").logits(ids), model(TINY, "numpy").logits(ids)
    )
    assert not (tmp_path / "home" / "index.json").exists()


@pytest.mark.skipif(BACKEND != "cython", reason="prepared weights are those of a compiled backend")
def test_prepared_weights_are_made_anew(tmp_path, caplog):
    """Also where they claim to be of these files: their form is another."""
    shutil.copy(TINY, tmp_path)
    path = tmp_path / TINY.name
    (tmp_path / prepared.FOLDER).mkdir()
    expected = model(TINY, "cython").logits([1, 17, 5])
    with caplog.at_level(logging.INFO, "bitnet_ref"):
        bitnet_ref.load(path, backend="cython", prepared=True)
        (kept,) = (tmp_path / prepared.FOLDER).iterdir()
        for of_these_files in (False, True):
            stale = (OLDER / "prepared.safetensors").read_bytes()
            if of_these_files:
                stale = with_metadata(stale, made_from=metadata_of(kept.read_bytes())["made_from"])
            caplog.clear()
            current = kept.read_bytes()
            kept.write_bytes(stale)
            m = bitnet_ref.load(path, backend="cython", prepared=True)
            assert "is damaged" in caplog.text if of_these_files else "other files or options" in caplog.text
            np.testing.assert_array_equal(m.logits([1, 17, 5]), expected)
            assert metadata_of(kept.read_bytes()) == metadata_of(current)


def metadata_of(data):
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]


def with_metadata(data, **changes):
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"] |= changes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + size :]
