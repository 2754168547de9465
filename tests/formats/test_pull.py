"""`pull` and `rm` of models of the hub, through the real huggingface_hub, from a hub on this machine (hub_server)."""

import errno
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cli_runs import invoke, invoke_json
from helpers import BITNET, DATA, TINY, write_checkpoint
from hub_server import Hub, git_blob_id, serving

import bitnet_ref
from bitnet_ref.errors import BitNetRefError, FormatError, HubError, RegistryError, StorageError
from bitnet_ref.formats.native.model import write_native
from bitnet_ref.formats.open import find_model, open_checkpoint
from bitnet_ref.formats.registry.hub_cache import cached_models, find_cached, hub_cache, repository_folder
from bitnet_ref.formats.registry.links import links
from bitnet_ref.formats.registry.pull import Listed, _compare, delete_models, link_model, plan_deletion, pull
from bitnet_ref.generation.embed import default_prompt

huggingface_hub = pytest.importorskip("huggingface_hub")
constants = pytest.importorskip("huggingface_hub.constants")


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def model_files(tmp_path):
    return files_of(write_checkpoint(tmp_path / "bitnet", BITNET))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setenv("BITNET_REF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf"))
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
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **env,
    }


def run(hub, *args, code=0, **env):
    line, env = command(hub, *args, **env)
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == code, done.stderr
    return done


def test_pull_load_and_delete(hub, model_files):
    """Only what the model needs comes; it loads by its name when the hub is gone; rm leaves nothing."""
    extra = {"evil.py": b"print()", "pytorch_model.bin": b"\x80", "README.md": b"#", "sub/model.safetensors": b"x"}
    commit = hub.put("org/tiny", "main", {**model_files, **extra, "tokenizer_config.json": b"{}"})
    model, path = pull("org/tiny")
    assert (model.name, model.revisions, model.commit) == ("org/tiny", ("main",), commit)
    assert list(cached_models()) == [model]
    names = {"README.md", "config.json", "model.safetensors", "tokenizer_config.json"}
    assert {name for name, _ in hub.sent} == set(os.listdir(path)) == names
    assert hub.sent[-1][0] == "model.safetensors"
    hub.repos.clear()
    for name in ("org/tiny", "org/tiny@main", f"org/tiny@{commit[:8]}"):
        assert np.isfinite(bitnet_ref.load(name, backend="numpy").logits([1, 2])).all()
    nbytes = sum(each.stat().st_size for each in path.iterdir())
    asked = invoke("rm", "org/tiny", stdin="n\n")
    assert f"org/tiny (main@{commit[:8]}): {nbytes / 1024:.1f} KB in {hub_cache()}" in asked.stderr
    assert asked.exit_code == 1
    assert invoke("rm", "org/tiny", "--json").exit_code == 2  # it does not ask
    assert find_cached("org/tiny") == path
    assert "deleted org/tiny" in invoke("rm", "org/tiny", stdin="y\n").stdout
    assert [each for each in hub_cache().rglob("*tiny*") if ".locks" not in each.parts] == []
    with pytest.raises(FormatError, match="bitnet-ref pull"):
        bitnet_ref.load("org/tiny")


def test_the_files_in_folders_of_their_own_come_too(hub, model_files):
    mean = b'{"pooling_mode_mean_tokens": true}'
    below = {"1_Pooling/config.json": mean, "additional_chat_templates/tool_use.jinja": b"with {{ tools }}"}
    prompts = b'{"prompts": {"query": "Q: "}, "default_prompt_name": "query"}'
    files = {**model_files, **below, "config_sentence_transformers.json": prompts, "2_Dense/config.json": b"{}"}
    hub.put("org/tiny", "main", files)
    _, path = pull("org/tiny")
    assert {str(each.relative_to(path)) for each in path.rglob("*/*")} == {*below}
    assert bitnet_ref.load("org/tiny", backend="numpy").config.pooling == "mean"
    assert default_prompt(find_model("org/tiny")) == "Q: "


def test_revisions(hub, model_files, tmp_path):
    other = files_of(write_checkpoint(tmp_path / "dense", TINY))
    old = hub.put("org/tiny", "v1", model_files)
    first, first_path = pull("org/tiny@v1")
    new = hub.put("org/tiny", "main", other)
    second, second_path = pull("org/tiny")
    assert {each.commit for each in cached_models()} == {old, new} == {first.commit, second.commit}
    assert find_model("org/tiny") == second_path
    assert find_model("org/tiny@v1") == find_model(f"org/tiny@{old[:7]}") == first_path
    with pytest.raises(FormatError):
        find_model("org/tiny@v2")
    hub.put("org/tiny", "v1.0", model_files)  # the same commit under another name: nothing is fetched again
    hub.sent.clear()
    third, _ = pull("org/tiny@v1.0", name="mine")
    assert hub.sent == []
    assert third.commit == first.commit
    assert links() == {"mine": first_path}
    removed = invoke_json("rm", "org/tiny@v1", "--yes")
    assert [each["commit"] for each in removed["removed"]] == [old]
    assert links() == {}  # its files are gone
    assert find_model("org/tiny") == second_path
    assert pull(f"org/tiny@{old}")[0].revisions == (old,)
    assert find_model(f"org/tiny@{old}") == first_path
    assert [each.revisions for each in cached_models() if each.commit == old] == [()]  # a commit needs no name


def test_copies_of_a_repository_have_the_same_commits(hub, model_files):
    commit = hub.put("org/tiny", "main", model_files)
    hub.repos["org/copy"] = hub.repos["org/tiny"]
    for name in ("org/tiny", "org/copy"):
        assert pull(name)[0].commit == commit
    by_name = {each.name: each for each in cached_models()}
    for name, model in by_name.items():
        plan, folder = plan_deletion([model]), repository_folder(name)
        assert plan.expected_freed_size > 5000
        paths = [*plan.blobs, *plan.refs, *plan.repos, *plan.snapshots]
        assert paths
        assert all(path.is_relative_to(folder) for path in paths)
    for name in ("org/copy", "org/tiny"):
        invoke_json("rm", name, "--yes")
        assert find_cached(name) is None
        assert (find_cached("org/tiny") is None) == (name == "org/tiny")


def test_a_bad_name_is_refused_before_anything_comes(hub, model_files):
    hub.put("org/tiny", "main", model_files)
    with pytest.raises(RegistryError, match="expected NAME or ORG/NAME"):
        pull("org/tiny", name="../tiny")
    with pytest.raises(RegistryError, match="has no @revision"):
        pull("org/tiny", name="tiny@main")
    assert hub.sent == []
    assert list(cached_models()) == []


def test_one_of_several_files(hub, tmp_path, caplog):
    folder = write_checkpoint(tmp_path / "many", BITNET)
    with open_checkpoint(folder) as checkpoint:
        write_native(checkpoint, tmp_path / "a.bitnet.safetensors")
    data = (tmp_path / "a.bitnet.safetensors").read_bytes()
    hub.put("org/many", "main", {"a.bitnet.safetensors": data, "b.bitnet.safetensors": data, "c.gguf": b"GGUF"})
    with pytest.raises(RegistryError, match=r"NAME:FILE, .*: a\.bitnet\.safetensors, b\.bitnet"):
        pull("org/many")
    for name in ("b.bitnet.safetensors", "a.bitnet.safetensors"):  # the name means the one that was pulled last
        _, path = pull("org/many", file=name)
        assert path.name == name
        assert bitnet_ref.load("org/many", backend="numpy").path == path
    with pytest.raises(RegistryError, match="no model file"):
        pull("org/many", file="../c.gguf")
    with pytest.raises(FormatError):
        pull("org/many", file="c.gguf")  # which is no GGUF
    assert find_model("org/many") == path
    chosen = invoke_json("pull", "org/many", "--file", "b.bitnet.safetensors", "--name", "mine")
    assert (chosen["name"], Path(chosen["path"]).name, chosen["revision"]) == ("mine", "b.bitnet.safetensors", "main")
    assert links().pop("mine").name == "b.bitnet.safetensors"
    invoke("rm", "mine")
    assert "No files matched" not in caplog.text  # a file alone has nothing that comes before its weights
    assert pull("org/many:b.bitnet.safetensors")[1].name == "b.bitnet.safetensors"
    assert find_model("org/many@main:a.bitnet.safetensors").name == "a.bitnet.safetensors"
    assert pull("org/many:a.bitnet.safetensors", file="b.bitnet.safetensors")[1].name == "b.bitnet.safetensors"
    invoke_json("rm", "org/many", "--yes")
    assert list(cached_models()) == []
    assert links() == {}


def test_a_name_means_what_was_pulled_last(hub, model_files, tmp_path):
    hub.put("org/tiny", "main", model_files)
    _, path = pull("org/tiny")
    link_model(tmp_path / "bitnet", "org/tiny")
    assert find_model("org/tiny") == tmp_path / "bitnet"
    assert "removed the name" in invoke("rm", "org/tiny").stdout
    assert find_model("org/tiny") == path
    link_model(tmp_path / "bitnet", "org/tiny")
    model, _ = pull("org/tiny@main")  # a version, which is not what the name alone means
    assert model.revisions == ("main",)
    assert find_model("org/tiny") == tmp_path / "bitnet"
    pull("org/tiny")
    assert find_model("org/tiny") == path
    link_model(tmp_path / "bitnet", "mine")
    invoke_json("rm", "org/tiny", "--yes")
    assert links() == {"mine": tmp_path / "bitnet"}


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
    assert list(cached_models()) == []
    assert links() == {}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_broken_model_gets_no_name(hub, model_files, name):
    """Its files stay in the cache, where `rm` deletes them; the name still means the version before."""
    hub.put("org/tiny", "main", model_files)
    _, path = pull("org/tiny")
    hub.put("org/tiny", "main", {**model_files, name: b"{}"})
    with pytest.raises(BitNetRefError):
        pull("org/tiny")
    assert find_model("org/tiny") == path
    assert len(invoke_json("rm", "org/tiny", "--yes")["removed"]) == 2
    assert list(cached_models()) == []


def test_a_file_that_git_lfs_did_not_fetch(hub, model_files):
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n".encode()
    hub.put("org/tiny", "main", {**model_files, "model.safetensors": pointer})
    with pytest.raises(FormatError, match="is a Git LFS pointer"):
        pull("org/tiny")


@pytest.mark.parametrize("commit", ["../../../../x", "main", "A" * 40, ""])
def test_a_hub_with_a_commit_that_is_none(hub, model_files, commit):
    hub.repos["org/tiny"] = {"main": (commit, model_files)}
    with pytest.raises(HubError, match="expected 40 hexadecimal digits"):
        pull("org/tiny")
    assert not hub_cache().exists()


@pytest.mark.parametrize("etag", ["../../../own.txt", "a/../../../own.txt", "..", ".", ""])
def test_a_hub_that_names_a_file_outside_of_the_cache(hub, model_files, tmp_path, etag):
    """The client calls a blob as the ETag says. A file of the user's own that is there stays as it is."""
    own = hub_cache() / "models--org--tiny" / "blobs" / etag
    if own.name == "own.txt":
        own = Path(os.path.normpath(own))
        own.parent.mkdir(parents=True, exist_ok=True)
        own.write_text("mine")
    hub.put("org/tiny", "main", model_files)
    hub.etag = etag
    with pytest.raises(HubError, match="as an ETag, which is no plain name"):
        pull("org/tiny")
    repository = repository_folder("org/tiny")
    outside = {path.name for path in tmp_path.rglob("*") if path.is_file() and not path.is_relative_to(repository)}
    assert outside <= {*model_files, "CACHEDIR.TAG", "own.txt"}
    assert own.name != "own.txt" or own.read_text() == "mine"


def test_the_client_is_as_before(hub, model_files):
    """After a pull, and after one that fails: its session calls the hooks of before, and no other."""
    calls = []
    session = huggingface_hub.get_session()
    own = session.event_hooks
    session.event_hooks = before = {event: [*hooks, calls.append] for event, hooks in own.items()}
    try:
        hub.put("org/tiny", "main", model_files)
        hub.etag = ".."
        with pytest.raises(HubError):
            pull("org/tiny")
        assert session.event_hooks == before
        hub.etag = None
        pull("org/tiny")
        assert session.event_hooks == before
        fetched = {Path(call.url.path).name for call in calls if hasattr(call, "status_code") and call.is_success}
        assert fetched >= set(model_files)
    finally:
        session.event_hooks = own


@pytest.mark.parametrize(("linked", "etag"), [("../../../x", None), (None, "../../../x"), ("../x", "plain")])
def test_either_etag_is_a_plain_name(hub, model_files, linked, etag):
    hub.put("org/tiny", "main", model_files)
    hub.linked_etag, hub.etag = linked, etag
    with pytest.raises(HubError, match="as an ETag, which is no plain name"):
        pull("org/tiny")
    assert list(links()) == []


@pytest.mark.parametrize("etag", ['W/"abc-DEF_1"', "a" * 128])
def test_an_etag_may_be(hub, model_files, etag):
    hub.put("org/tiny", "main", {"x.gguf": (DATA / "gguf" / "tq2_0.gguf").read_bytes()})
    hub.linked_etag = etag
    assert pull("org/tiny")[1].name == "x.gguf"


def test_a_file_that_was_placed_outside_of_the_cache(hub, model_files, tmp_path):
    """As a client without that hook would: the link goes, and the file stays."""
    commit = hub.put("org/tiny", "main", model_files)
    own = tmp_path / "own.txt"
    own.write_text("mine")
    link = repository_folder("org/tiny") / "snapshots" / commit / "config.json"
    link.parent.mkdir(parents=True)
    link.symlink_to(own)
    message = f"has placed config.json of org/tiny outside of the cache, at {own}: do not use this hub"
    with pytest.raises(HubError, match=re.escape(message)):
        pull("org/tiny")
    assert own.read_text() == "mine"
    assert not link.is_symlink()
    assert find_cached("org/tiny@main") is None


def test_a_file_that_did_not_come(hub, model_files, monkeypatch):
    hub.put("org/tiny", "main", model_files)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **options: None)
    with pytest.raises(HubError, match=r"config\.json of org/tiny did not come; pull again"):
        pull("org/tiny")


@pytest.mark.parametrize(
    ("refusal", "error", "message"),
    [
        ((403, "GatedRepo", ""), RegistryError, "org/tiny is gated: accept its terms on the hub, then: hf auth login"),
        ((404, "RepoNotFound", ""), RegistryError, "the hub has no 'org/tiny'; if it is private: hf auth login"),
        ((404, "RevisionNotFound", ""), RegistryError, "org/tiny has no revision 'v1'"),
        ((404, "EntryNotFound", ""), HubError, "the hub did not give org/tiny@v1: 404 Client Error"),
        ((403, "", "Access to this resource is disabled."), HubError, "the hub did not give org/tiny@v1: 403 Client"),
        ((418, "", ""), HubError, "the hub did not give org/tiny@v1: Client error '418"),
    ],
    ids=str,
)
def test_what_the_hub_refuses(hub, refusal, error, message):
    """One line says what to do."""
    hub.refusal = refusal
    with pytest.raises(error) as caught:
        pull("org/tiny@v1")
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("problem", "line"), [(ValueError("a\nb"), "a"), (ValueError(), "ValueError"), (ValueError("x" * 301), "x" * 300)]
)
def test_other_errors_of_the_client(hub, monkeypatch, problem, line):
    def refuse(*args, **options):
        raise problem

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", refuse)
    with pytest.raises(HubError) as caught:
        pull("org/tiny")
    assert str(caught.value) == f"the hub cannot be reached: {line}; what was pulled still loads"


@pytest.mark.parametrize("says", [{"size": None}, {"blobId": None}, {"lfs": None}], ids=str)
def test_a_hub_that_says_less(hub, model_files, says):
    hub.put("org/tiny", "main", model_files)
    hub.says = says
    assert files_of(pull("org/tiny")[1]) == model_files


def test_weights_that_are_not_in_lfs(hub, model_files):
    """Their hash is Git's, as of the other files. An empty file is one too."""
    hub.says = {"lfs": None}
    hub.put("org/tiny", "main", {**model_files, "README.md": b""})
    hub.corrupt.add("model.safetensors")
    with pytest.raises(FormatError, match=r"model\.safetensors of org/tiny is not what the hub lists"):
        pull("org/tiny")
    hub.corrupt.clear()
    assert (pull("org/tiny")[1] / "README.md").read_bytes() == b""


def test_the_largest_file_outside_of_lfs(tmp_path):
    file, listed = tmp_path / "tokenizer.json", Listed(64 << 20, None, git_blob_id(bytes(64 << 20)))
    file.touch()
    os.truncate(file, 64 << 20)
    _compare(file, listed, "org/tiny")
    os.truncate(file, (64 << 20) + 1)
    with pytest.raises(FormatError, match="more than 67108864 bytes"):
        _compare(file, listed, "org/tiny")


@pytest.mark.parametrize("key", ["rfilename", "size", "blobId", "lfs"])
@pytest.mark.parametrize("value", [-1, 1.5, "x", [1], {"sha256": 1, "size": 1, "pointerSize": 1}, 10**30])
def test_a_hub_whose_listing_is_none(hub, model_files, key, value):
    hub.put("org/tiny", "main", model_files)
    hub.says = {key: value}
    with pytest.raises((HubError, RegistryError, FormatError, StorageError)):
        pull("org/tiny")
    assert list(cached_models()) == [] or key == "blobId"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"], ids=["LFS", "Git"])
def test_a_file_that_differs_from_what_the_hub_lists(hub, model_files, name):
    hub.put("org/tiny", "main", model_files)
    hub.corrupt.add(name)
    with pytest.raises(FormatError, match=f"{name} of org/tiny is not what the hub lists"):
        pull("org/tiny")
    assert name not in [path.name for path in hub_cache().rglob("*")]  # not even a link
    hub.corrupt.clear()
    _, path = pull("org/tiny")
    assert files_of(path) == model_files


def test_a_system_that_allows_sha_1_for_no_security(hub, model_files, monkeypatch):
    """As FIPS has it: Git's hash of a file is none."""

    def sha1(data, *, usedforsecurity=True):
        if usedforsecurity:
            raise ValueError("disabled for FIPS")
        return hashlib.sha1(data)

    monkeypatch.setattr("bitnet_ref.formats.registry.pull.hashlib", SimpleNamespace(sha1=sha1))
    hub.put("org/tiny", "main", model_files)
    assert files_of(pull("org/tiny")[1]) == model_files


def test_a_system_without_links(hub, model_files, monkeypatch):
    """The snapshot has the files themselves."""
    monkeypatch.setattr("huggingface_hub.file_download.are_symlinks_supported", lambda cache_dir=None: False)
    hub.put("org/tiny", "main", model_files)
    hub.corrupt.add("config.json")
    with pytest.raises(FormatError, match=r"config\.json of org/tiny is not what the hub lists"):
        pull("org/tiny")
    assert "config.json" not in [path.name for path in hub_cache().rglob("*")]
    hub.corrupt.clear()
    _, path = pull("org/tiny")
    assert files_of(path) == model_files
    assert not any(each.is_symlink() for each in path.iterdir())


def test_a_cache_in_folders_that_are_not_there(hub, model_files, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "a" / "b" / "c"))
    hub.put("org/tiny", "main", model_files)
    assert pull("org/tiny")[1].is_relative_to(tmp_path / "a" / "b" / "c")


def test_without_network(hub, model_files, monkeypatch):
    hub.put("org/tiny", "main", model_files)
    pull("org/tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set"):
        pull("org/tiny")
    assert bitnet_ref.load("org/tiny", backend="numpy").logits([1]).shape == (1, BITNET["vocab_size"])


def test_a_full_disk(hub, model_files, monkeypatch):
    hub.put("org/tiny", "main", model_files)
    usage = shutil.disk_usage(hub_cache().parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(StorageError, match=r"7,058 bytes are to be written, and 1,000 are free.*free some"):
        pull("org/tiny")
    assert hub.sent == []
    wanted = {**model_files, "README.md": b""}
    hub.put("org/tiny", "main", {**wanted, "pytorch_model.bin": bytes(10_000)})  # which is not fetched
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=sum(map(len, wanted.values()))))
    assert files_of(pull("org/tiny")[1]) == wanted  # to the byte
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    pull("org/tiny")  # what is here needs no space


def test_a_disk_that_fills_up(hub, model_files, monkeypatch):
    hub.put("org/tiny", "main", model_files)
    _, path = pull("org/tiny")
    hub.put("org/tiny", "main", {**model_files, "README.md": b"#"})

    def download(*args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(StorageError, match="No space left on device; free some"):
        pull("org/tiny")
    assert find_model("org/tiny") == path


def test_a_cache_that_the_client_cannot_read(hub, model_files):
    hub.put("org/tiny", "main", model_files)
    pull("org/tiny")
    (hub_cache() / "models--org--tiny" / "refs" / "lost").write_text("0" * 40)
    with pytest.raises(RegistryError, match=r"cannot read .*models--org--tiny, which you may delete yourself: Ref"):
        plan_deletion(list(cached_models()))


@pytest.mark.parametrize(
    ("number", "message"), [(errno.EACCES, "could not be deleted"), (errno.EIO, "Input/output error")], ids=str
)
def test_what_cannot_be_deleted(hub, model_files, monkeypatch, number, message):
    def refuse(path):
        raise OSError(number, os.strerror(number), str(path))

    hub.put("org/tiny", "main", model_files)
    pull("org/tiny", name="mine")
    models = list(cached_models())
    plan = plan_deletion(models)
    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(StorageError, match=message):
        delete_models(models, plan)
    assert "mine" in links()


@pytest.mark.thorough
def test_no_server(hub):
    done = run(hub, "pull", "org/tiny", code=4, HF_ENDPOINT="http://127.0.0.1:9")
    assert "the hub cannot be reached" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    done = run(hub, "pull", "org/tiny", "--json", code=4, HF_HUB_OFFLINE="1")
    assert json.loads(done.stdout)["error"]["type"] == "HubError"


def kill_while_fetching_weights(hub, commit):
    hub.gates["model.safetensors"] = threading.Event()
    line, env = command(hub, "pull", "org/tiny")
    child = subprocess.Popen(line, env=env, stderr=subprocess.DEVNULL)
    while not (repository_folder("org/tiny") / "snapshots" / commit / "config.json").exists():
        assert child.poll() is None
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()


@pytest.mark.thorough
def test_kill_9_in_the_middle_then_again(hub, model_files):
    """Nothing can be loaded; the second pull ends what the first began, without fetching again what had come."""
    commit = hub.put("org/tiny", "main", model_files)
    kill_while_fetching_weights(hub, commit)
    with pytest.raises(BitNetRefError):
        bitnet_ref.load("org/tiny")
    hub.gates.clear()
    run(hub, "pull", "org/tiny")
    assert [name for name, _ in hub.sent].count("config.json") == 1
    assert bitnet_ref.load("org/tiny", backend="numpy").config.num_hidden_layers == 2


@pytest.mark.thorough
def test_kill_9_in_an_update(hub, model_files):
    """The name means the old version until the new one is whole."""
    hub.put("org/tiny", "main", model_files)
    _, path = pull("org/tiny")
    changed = model_files["config.json"].replace(b'"bitnet"', b'"bitnet" ')
    new = hub.put("org/tiny", "main", {**model_files, "config.json": changed, "model.safetensors": b""})
    kill_while_fetching_weights(hub, new)
    assert find_model("org/tiny") == path
    assert bitnet_ref.load("org/tiny", backend="numpy").logits([1]).shape == (1, BITNET["vocab_size"])


@pytest.mark.thorough
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
    assert len(list(cached_models())) == 1
