"""registry.pull through the real huggingface_hub client, from a hub on this machine (hub_server)."""

import json
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from helpers import BITNET, TINY, write_checkpoint
from hub_server import Hub, serving

import bitnet_ref
from bitnet_ref.errors import FormatError, HubError, RegistryError
from bitnet_ref.formats.native.model import write_native
from bitnet_ref.formats.open import open_checkpoint
from bitnet_ref.formats.registry.add import pull
from bitnet_ref.formats.registry.store import Store, find, remove

constants = pytest.importorskip("huggingface_hub.constants")


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def model_files(tmp_path):
    return files_of(write_checkpoint(tmp_path / "bitnet", BITNET))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setenv("BITNET_REF_HOME", str(tmp_path / "store"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    made = Hub()
    with serving(made) as url:
        made.url = url
        monkeypatch.setattr(constants, "ENDPOINT", url)  # what HF_ENDPOINT sets, when the client is imported
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 5)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
        yield made


def command(hub, *args, **env):
    return [sys.executable, "-m", "bitnet_ref.cli", *args], {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(Store().root / "hf"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **env,
    }


def run(hub, *args, code=0, **env):
    line, env = command(hub, *args, **env)
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == code, done.stderr
    return done


def test_pull_load_and_remove(hub, model_files):
    """Only what the model needs comes; it loads by its name when the hub is gone; rm leaves nothing."""
    extra = {"evil.py": b"print()", "pytorch_model.bin": b"\x80", "README.md": b"#", "sub/model.safetensors": b"x"}
    commit = hub.put("org/tiny", "main", {**model_files, **extra, "tokenizer_config.json": b"{}"})
    entry = pull("org/tiny")
    assert (entry.name, entry.source, entry.revision, entry.commit) == ("org/tiny", "hub", "main", commit)
    assert set(entry.files) == {"README.md", "config.json", "model.safetensors", "tokenizer_config.json"}
    assert {name for name, _ in hub.sent} == set(entry.files)
    assert entry.kind == "hf-packed"
    assert entry.summary["layers"] == 2
    hub.repos.clear()
    for name in ("org/tiny", "org/tiny@main", f"org/tiny@{commit[:8]}", f"org/tiny@{entry.digest[:12]}"):
        assert np.isfinite(bitnet_ref.load(name, backend="numpy").logits([1, 2])).all()
    stored = Store().models / entry.digest
    assert sorted(os.listdir(stored)) == sorted(entry.files)
    assert remove("org/tiny") == [entry]
    assert Store().entries() == []
    assert os.listdir(Store().models) == os.listdir(Store().incoming) == []
    with pytest.raises(FormatError, match="bitnet-ref pull"):
        bitnet_ref.load("org/tiny")


def test_revisions_are_versions(hub, model_files, tmp_path):
    other = files_of(write_checkpoint(tmp_path / "dense", TINY))
    old = hub.put("org/tiny", "v1", model_files)
    first = pull("org/tiny@v1")
    new = hub.put("org/tiny", "main", other)
    second = pull("org/tiny")
    assert [e.commit for e in Store().entries()] == [old, new]
    assert find("org/tiny") == Store().path(second)
    assert find("org/tiny@v1") == find(f"org/tiny@{old[:7]}") == Store().path(first)
    assert find("org/tiny@v2") is None
    hub.put("org/tiny", "v1.0", model_files)  # the same commit under another name: nothing is fetched again
    hub.sent.clear()
    third = pull("org/tiny@v1.0", name="mine")
    assert hub.sent == []
    assert third.digest == first.digest
    assert remove("org/tiny@v1") == [first]
    assert find("mine") is not None  # the files are still named
    assert len(os.listdir(Store().models)) == 2


def test_one_of_several_files(hub, tmp_path):
    folder = write_checkpoint(tmp_path / "hf", BITNET)
    with open_checkpoint(folder) as checkpoint:
        write_native(checkpoint, tmp_path / "a.bitnet.safetensors")
    data = (tmp_path / "a.bitnet.safetensors").read_bytes()
    hub.put("org/many", "main", {"a.bitnet.safetensors": data, "b.bitnet.safetensors": data, "c.gguf": b"GGUF"})
    with pytest.raises(RegistryError, match=r"--file: a\.bitnet\.safetensors, b\.bitnet"):
        pull("org/many")
    entry = pull("org/many", files=["b.bitnet.safetensors"])
    assert (entry.kind, list(entry.files), entry.main) == ("native", ["b.bitnet.safetensors"], "b.bitnet.safetensors")
    assert bitnet_ref.load("org/many", backend="numpy").path == Store().path(entry)
    with pytest.raises(RegistryError, match="no model file"):
        pull("org/many", files=["../c.gguf"])
    with pytest.raises(FormatError):
        pull("org/many", files=["c.gguf"])  # which is no GGUF
    assert len(Store().entries()) == 1


@pytest.mark.parametrize(
    ("reference", "error", "message"),
    [
        ("org/none", RegistryError, "the hub has no 'org/none'"),
        ("org/tiny@v9", RegistryError, "no revision 'v9'"),
        ("org/code", RegistryError, "no model that bitnet_ref reads"),
        ("tiny", RegistryError, "expected ORG/REPO"),
        ("org/../tiny", RegistryError, "expected NAME or ORG/NAME"),
        ("org/tiny@../main", RegistryError, "expected NAME or ORG/NAME"),
        ("org/tiny--x@main", RegistryError, "no name on the hub"),
    ],
)
def test_what_is_not_there(hub, model_files, reference, error, message):
    hub.put("org/tiny", "main", model_files)
    hub.put("org/code", "main", {"train.py": b"", "pytorch_model.bin": b"\x80", "x/config.json": b"{}"})
    with pytest.raises(error, match=message):
        pull(reference)
    assert Store().entries() == []


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_broken_model_is_not_stored(hub, model_files, name):
    hub.put("org/tiny", "main", {**model_files, name: b"{}"})
    with pytest.raises(bitnet_ref.errors.BitNetRefError):
        pull("org/tiny")
    assert Store().entries() == []
    assert [p for p in Store().incoming.iterdir() if p.is_dir()] == []


@pytest.mark.parametrize(
    ("name", "words"), [("model.safetensors", None), ("config.json", "its Git hash differs")], ids=["LFS", "Git"]
)
def test_a_file_that_differs_from_the_hubs_word(hub, model_files, name, words):
    hub.put("org/tiny", "main", model_files)
    hub.corrupt.add(name)
    with pytest.raises((FormatError, HubError), match=words):  # the client may find it first
        pull("org/tiny")
    assert Store().entries() == []
    hub.corrupt.clear()
    assert pull("org/tiny").nbytes == sum(map(len, model_files.values()))


def test_without_network(hub, model_files, monkeypatch):
    hub.put("org/tiny", "main", model_files)
    pull("org/tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set"):
        pull("org/tiny")
    monkeypatch.undo()
    monkeypatch.setenv("BITNET_REF_HOME", str(Store().root))


def test_no_server_and_no_client(hub):
    done = run(hub, "pull", "org/tiny", code=4, HF_ENDPOINT="http://127.0.0.1:9")
    assert "the hub cannot be reached" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    done = run(hub, "pull", "org/tiny", "--json", code=4, HF_HUB_OFFLINE="1")
    assert json.loads(done.stdout)["error"]["type"] == "HubError"
    code = "import sys; sys.modules['huggingface_hub'] = None; from bitnet_ref.cli import main; main(['pull', 'a/b'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (
        4,
        "error: huggingface_hub is not installed: pip install 'bitnet-ref[hub]'\n",
    )


def test_kill_9_in_the_middle_then_again(hub, model_files):
    """No half entry; the second pull ends what the first began, without fetching again what had come."""
    hub.put("org/tiny", "main", model_files)
    hub.gates["model.safetensors"] = threading.Event()
    line, env = command(hub, "pull", "org/tiny")
    child = subprocess.Popen(line, env=env, stderr=subprocess.DEVNULL)
    while not any(name == "config.json" for name, _ in hub.sent):
        assert child.poll() is None
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert Store().entries() == []
    assert find("org/tiny") is None
    hub.gates.clear()
    run(hub, "pull", "org/tiny")
    assert [name for name, _ in hub.sent].count("config.json") <= 2
    assert bitnet_ref.load("org/tiny", backend="numpy").config.num_hidden_layers == 2
    assert os.listdir(Store().incoming) == []


def test_two_pulls_at_once(hub, model_files):
    """The second waits for the first and fetches nothing."""
    hub.put("org/tiny", "main", model_files)
    hub.gates["config.json"] = threading.Event()
    line, env = command(hub, "pull", "org/tiny")
    children = [subprocess.Popen(line, env=env, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    waiting = threading.Timer(3.0, hub.gates["config.json"].set)
    waiting.start()
    said = [child.communicate(timeout=100)[1] for child in children]
    assert [child.returncode for child in children] == [0, 0], said
    assert sorted(name for name, _ in hub.sent) == sorted(model_files)
    assert len(Store().entries()) == 1
