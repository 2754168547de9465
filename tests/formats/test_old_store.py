"""The store of earlier versions: found by its index, and moved to the Hugging Face cache with nothing lost."""

import hashlib
import json
import os
import shutil
from contextlib import suppress

import pytest
from cli_runs import invoke, invoke_json
from helpers import BITNET, write_checkpoint

import bitnet_ref
from bitnet_ref.errors import FormatError, StorageError
from bitnet_ref.formats.native.model import write_native
from bitnet_ref.formats.open import find_model, open_checkpoint
from bitnet_ref.formats.registry import old_store
from bitnet_ref.formats.registry.hub_cache import hub_cache, repository_folder
from bitnet_ref.formats.registry.links import home, links
from bitnet_ref.formats.registry.old_store import MAX_INDEX_BYTES, move_old_store, old_entries
from bitnet_ref.formats.registry.pull import link_model

OLD, NEW, OTHER = "a" * 40, "b" * 40, "c" * 40
NATIVE = "x.bitnet.safetensors"


def entry(name, files, origin="/gone", commit=None, revision=None, main=None):
    """A line of the index, as earlier versions wrote it, and the files in the store."""
    facts = {file: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for file, data in files.items()}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    folder = home() / "models" / digest
    folder.mkdir(parents=True, exist_ok=True)
    for file, data in files.items():
        (folder / file).write_bytes(data)
    source = "local" if commit is None else "hub"
    version = {"origin": origin, "revision": revision, "commit": commit, "main": main, "digest": digest}
    return {"name": name, "source": source, "time": "", "files": facts, "kind": "", "summary": {}, **version}


@pytest.fixture
def contents(tmp_path):
    """Three models of 1 to 3 layers, and one in a native file: {file name: bytes} of each."""
    made = []
    for layers in (1, 2, 3):
        folder = write_checkpoint(tmp_path / f"hf{layers}", {**BITNET, "num_hidden_layers": layers})
        made.append({path.name: path.read_bytes() for path in folder.iterdir()})
    with open_checkpoint(folder) as checkpoint:
        write_native(checkpoint, tmp_path / NATIVE)
    return [*made, {NATIVE: (tmp_path / NATIVE).read_bytes()}]


@pytest.fixture
def store(tmp_path, monkeypatch, contents):
    """Two versions of org/tiny, one of which has a second name; two local models of one name; a file of org/many."""
    monkeypatch.setenv("BITNET_REF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    one, two, three, native = contents
    entries = [
        entry("org/tiny", one, "org/tiny", OLD, "main"),
        entry("mine", one),
        entry("org/tiny", two, "org/tiny", NEW, "main"),
        entry("again", two, "org/tiny", NEW, "v2"),
        entry("mine", three),
        entry("org/many", native, "org/many", OTHER, "main", NATIVE),
    ]
    index = home() / "index.json"
    index.write_text(json.dumps({"version": 1, "entries": entries}))
    (home() / "lock").touch()
    (home() / "incoming" / "pull-1").mkdir(parents=True)
    return entries


def layers_of(name):
    return bitnet_ref.load(name, backend="numpy").config.num_hidden_layers


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def check_moved(store, contents):
    """Every model of the store loads by its name, and nothing is left of what moved."""
    one, two, three, _ = contents
    assert [layers_of(name) for name in ("org/tiny", "again", "mine", "org/many")] == [2, 2, 3, 3]
    assert layers_of(f"org/tiny@{OLD[:8]}") == layers_of(f"mine-{store[1]['digest'][:8]}") == 1
    assert find_model("org/tiny") == find_model("again") == find_model("org/tiny@v2")
    assert files_of(find_model("org/tiny")) == two
    assert files_of(find_model("mine")) == three
    assert files_of(find_model(f"org/tiny@{OLD}")) == one
    assert sorted(os.listdir(home())) == ["links", "models"]
    assert {path.name for path in (home() / "models").iterdir()} == {store[1]["digest"], store[4]["digest"]}
    assert move_old_store() == []


def test_everything_moves(store, contents, monkeypatch):
    move = "bitnet-ref pull --move-old-store"
    with pytest.raises(FormatError, match=f"org/tiny: is a model in the store of an earlier version.*{move}"):
        bitnet_ref.load("org/tiny")
    assert f"again, mine, org/many, org/tiny; to move them to the Hugging Face cache: {move}" in invoke("list").stderr
    with monkeypatch.context() as patch:
        patch.setattr("bitnet_ref.formats.registry.pull.pull", lambda *_, **__: 1 / 0)
        assert f"to move them to the Hugging Face cache: {move}" in invoke("pull", "org/tiny").stderr
    moved = {each["name"]: each["path"] for each in invoke_json("pull", "--move-old-store")["moved"]}
    assert moved.keys() == {
        *("again", "mine", f"mine-{store[1]['digest'][:8]}", "org/many"),
        *(f"org/tiny@{OLD[:8]}", f"org/tiny@{NEW[:8]}"),
    }
    assert moved["mine"] == str(find_model("mine"))
    check_moved(store, contents)
    assert "there is no store of an earlier version" in invoke("pull", "--move-old-store").stdout
    assert not invoke("list").stderr


def test_huggingface_hub_reads_what_moved(store):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    move_old_store()
    cache = huggingface_hub.scan_cache_dir(hub_cache())
    assert not cache.warnings
    refs = {repo.repo_id: {ref: each.commit_hash for ref, each in repo.refs.items()} for repo in cache.repos}
    assert refs == {"org/tiny": {"main": NEW, "v2": NEW}, "org/many": {"main": OTHER}}
    assert len(invoke_json("rm", "org/tiny", "--yes")["removed"]) == 2
    assert "again" not in links()


def test_another_disk(store, contents, monkeypatch):
    def refuse(source, target):
        raise OSError(18, os.strerror(18))

    monkeypatch.setattr("bitnet_ref.formats.registry.old_store.os.link", refuse)
    move_old_store()
    check_moved(store, contents)


def test_what_moves_is_not_copied(store):
    """One disk holds both folders: each file stays the same file."""

    def numbers(folder):
        return {path.name: path.stat().st_ino for path in folder.iterdir()}

    before = numbers(home() / "models" / store[2]["digest"])
    move_old_store()
    assert numbers(find_model(f"org/tiny@{NEW}")) == before


def test_weights_move_last(store, contents, monkeypatch):
    """A snapshot that has its weights has everything, also when the move is stopped in the middle."""
    files = {**contents[0], "README.md": b"#", "tokenizer.json": b"{}", "zzz.json": b"{}"}
    moved = [entry("org/large", files, "org/large", "d" * 40, "main")]
    (home() / "index.json").write_text(json.dumps({"version": 1, "entries": moved}))
    link, linked = os.link, []

    def recording(source, target):
        linked.append(target.name)
        link(source, target)

    monkeypatch.setattr("bitnet_ref.formats.registry.old_store.os.link", recording)
    move_old_store()
    assert sorted(linked) == sorted(files)
    assert linked[-1] == "model.safetensors"


def test_what_moved_is_on_the_disk_before_anything_is_removed(store, monkeypatch):
    written = []

    def recording(folder):
        assert (home() / "index.json").exists()
        written.append(folder.name)

    monkeypatch.setattr(old_store, "sync", recording)
    move_old_store()
    assert {*written} == {OLD, NEW, OTHER}


def test_names_and_versions_that_are_newer_stay(store, tmp_path):
    newest = repository_folder("org/tiny") / "refs" / "main"
    newest.parent.mkdir(parents=True)
    newest.write_text("d" * 40)
    link_model(tmp_path / "hf1", "mine")
    names = [name for name, _ in move_old_store()]
    assert newest.read_text() == "d" * 40
    assert find_model("mine") == tmp_path / "hf1"
    assert {f"mine-{store[n]['digest'][:8]}" for n in (1, 4)} <= set(names)


@pytest.mark.thorough
@pytest.mark.parametrize("step", range(49))
def test_stopped_anywhere_and_repeated(store, contents, monkeypatch, step):
    """The n-th change of the disk fails: the next move ends what the first began."""
    calls = []

    def failing(change):
        def call(*args, **options):
            calls.append(change)
            if len(calls) == step + 1:
                raise OSError(5, os.strerror(5))
            return change(*args, **options)

        return call

    with monkeypatch.context() as patch:
        for module, name in ((os, "link"), (os, "replace"), (os, "mkdir"), (os, "unlink"), (os, "rmdir")):
            patch.setattr(module, name, failing(getattr(module, name)))
        with suppress(StorageError):  # some failures are mended at once
            move_old_store()
    assert len(calls) > step
    move_old_store()
    check_moved(store, contents)


def test_files_that_are_gone(store, contents):
    shutil.rmtree(home() / "models" / store[2]["digest"])
    names = [name for name, _ in move_old_store()]
    assert "again" not in names
    assert layers_of("mine") == 3


def damaged(good):
    yield "[]"
    yield "{"
    yield '{"version": 1}'
    changes = [{"name": "../x"}, {"name": "x@y"}, {"name": None}, {"digest": "../../x"}, {"digest": "A" * 64}]
    changes += [
        {"main": "../x"},
        {"main": "none"},
        {"main": []},
        {"files": []},
        {"files": {"../x": {}}},
        {"files": {"x/y": {}}},
    ]
    changes += [{"revision": "../x"}, {"revision": None}, {"commit": "../x"}, {"commit": 1}, {"origin": "../x"}]
    for change in changes:
        yield json.dumps({"version": 1, "entries": [{**good, **change}]})
    yield '{"entries": [1]}'


def test_a_damaged_index_is_an_error_that_names_it(store):
    index = home() / "index.json"
    for text in damaged(store[0]):
        index.write_text(text)
        for action in (old_entries, move_old_store, lambda: bitnet_ref.load("none")):
            with pytest.raises(FormatError) as caught:
                action()
            assert caught.value.path == str(index), text
    assert not hub_cache().exists()


def test_the_largest_index(store):
    assert MAX_INDEX_BYTES == 16 << 20
    index = home() / "index.json"
    index.write_bytes(index.read_bytes().ljust(16 << 20))
    assert old_entries() == store
    index.write_bytes(index.read_bytes() + b" ")
    with pytest.raises(FormatError, match="more than 16777216 bytes"):
        old_entries()
