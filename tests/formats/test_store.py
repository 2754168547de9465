"""registry: names, the files of a model, the store and its index; no network anywhere."""

import json
import os
import shutil
import threading
import time

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import BITNET, TINY, tiny_tensors, write_checkpoint, write_shards
from hypothesis import given
from hypothesis import strategies as st

import bitnet_ref
from bitnet_ref.cli import cli
from bitnet_ref.errors import BitNetRefError, FormatError, RegistryError
from bitnet_ref.formats.native.model import write_native
from bitnet_ref.formats.open import ASSETS, find_model, open_checkpoint
from bitnet_ref.formats.registry.add import add
from bitnet_ref.formats.registry.store import (
    KEEP_DOWNLOADS_S,
    Reference,
    Store,
    choose_files,
    find,
    home,
    parse_reference,
    remove,
)


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("BITNET_REF_HOME", str(tmp_path / "home" / "store"))
    return Store()


@pytest.fixture
def folder(tmp_path):
    made = write_checkpoint(tmp_path / "hf", BITNET)
    (made / "modeling.py").write_text("raise SystemExit")
    (made / "pytorch_model.bin").write_bytes(b"\x80")
    return made


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["a", "org/repo", "org/Repo-1.58_x@main", "a@refs/pr/1", "a.b/c.d@0123abc"])
def test_good_references(text):
    assert str(parse_reference(text)) == text


BAD = [
    "",
    ".",
    "..",
    "a/b/c",
    "/a",
    "a/",
    "../a",
    "a/..",
    "a/.b",
    "a..b",
    "a.",
    "-a",
    "a b",
    "a\n",
    "a\0",
    "é",
    "a@",
    "@a",
]
BAD += [
    "a@..",
    "a@../b",
    "a@b//c",
    "a@/b",
    "a@b/",
    "a@-b",
    "a@b@c",
    "a\\b",
    "C:a",
    "~",
    "%2e",
    "a" * 97,
    "a@" + "b" * 97,
]


@pytest.mark.parametrize("text", BAD)
def test_bad_references(text):
    with pytest.raises(RegistryError, match="expected NAME"):
        parse_reference(text)
    assert find(text) is None


@given(st.text(st.sampled_from("ab./@\\~-_0: \0"), max_size=12))
def test_no_reference_leaves_the_store(text):
    try:
        name = parse_reference(text).name
    except RegistryError:
        return
    assert ".." not in text
    assert not os.path.isabs(name)
    assert os.path.normpath(name) == name


HF = ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"]
SHARDS = ["config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"]


@pytest.mark.parametrize(
    ("names", "wanted", "chosen"),
    [
        ([*HF, "x.py", "pytorch_model.bin", "vocab.pkl", ".hidden.json", "training_args.json"], [], (sorted(HF), None)),
        ([*SHARDS, "consolidated.safetensors", "x.gguf"], [], (sorted(SHARDS), None)),
        (["x.gguf", "README.md"], [], (["x.gguf"], "x.gguf")),
        ([*HF, "x.gguf"], ["x.gguf"], (["x.gguf"], "x.gguf")),
        (["a.bitnet.safetensors", "config.json"], [], (["a.bitnet.safetensors"], "a.bitnet.safetensors")),
    ],
)
def test_the_files_of_a_model(names, wanted, chosen):
    assert choose_files(names, wanted) == chosen


@pytest.mark.parametrize(
    ("names", "wanted", "message"),
    [
        (["a.gguf", "b.gguf"], [], "several models"),
        (["config.json", "pytorch_model.bin"], [], "no model"),
        (["sub/x.gguf", "../x.gguf", "/x.gguf"], [], "no model"),
        (["a.gguf"], ["b.gguf"], "there are: a.gguf"),
        (["a.gguf", "b.gguf"], ["a.gguf", "b.gguf"], "one model"),
        (["x.bin"], ["x.bin"], "no model file"),
    ],
)
def test_no_files_of_a_model(names, wanted, message):
    with pytest.raises(RegistryError, match=message):
        choose_files(names, wanted)


# -- the store ---------------------------------------------------------------------------------------------------------


def test_add_find_load_remove(folder, store):
    entry = add(folder, "mine")
    assert set(entry.files) == {"config.json", "model.safetensors"}
    assert find("mine") == store.models / entry.digest
    want = bitnet_ref.load(folder, backend="numpy").logits([1, 2, 3])
    assert np.array_equal(bitnet_ref.load("mine", backend="numpy").logits([1, 2, 3]), want)
    assert bitnet_ref.load(f"mine@{entry.digest[:10]}", backend="numpy").path == find("mine")
    assert add(folder, "mine").digest == entry.digest
    assert len(Store().entries()) == 1  # the same content is the same version
    add(folder, "again")
    assert remove("mine")[0].digest == entry.digest
    assert find("again") == store.models / entry.digest
    remove("again")
    assert os.listdir(store.models) == os.listdir(store.incoming) == []


def test_a_sharded_folder_and_a_single_file(tmp_path):
    tensors = tiny_tensors(TINY)
    names = sorted(tensors)
    shards = {f"model-0000{i + 1}-of-00002.safetensors": {n: tensors[n] for n in names[i::2]} for i in (0, 1)}
    write_shards(tmp_path / "shards", TINY, shards)
    assert len(add(tmp_path / "shards", "sharded").files) == 4
    with open_checkpoint(tmp_path / "shards") as checkpoint:
        digest = write_native(checkpoint, tmp_path / "x.bitnet.safetensors")
    entry = add(tmp_path / "x.bitnet.safetensors", "org/native")
    assert entry.kind == "native"
    a, b = (bitnet_ref.load(name, backend="numpy").logits([1, 2]) for name in ("sharded", "org/native"))
    assert np.array_equal(a, b)
    damaged = bytearray((tmp_path / "x.bitnet.safetensors").read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "x.bitnet.safetensors").write_bytes(damaged)
    with pytest.raises(FormatError, match=digest):
        add(tmp_path / "x.bitnet.safetensors", "org/native")
    assert len(Store().entries()) == 2


def test_a_path_and_a_shipped_name_come_first(folder, tmp_path, monkeypatch):
    add(folder, "org/tiny")
    monkeypatch.chdir(tmp_path)
    assert find_model("org/tiny") == find("org/tiny")
    write_checkpoint(tmp_path / "org" / "tiny", {**BITNET, "num_hidden_layers": 1})
    assert bitnet_ref.load("org/tiny", backend="numpy").config.num_hidden_layers == 1
    add(folder, "storyteller")
    assert find_model("storyteller") == ASSETS / "storyteller"


@pytest.mark.parametrize("name", ["../x", "/x", "x@main", "a/b/c", ""])
def test_names_are_checked_before_anything(folder, store, name):
    with pytest.raises(RegistryError):
        add(folder, name)
    assert not store.root.exists()


def test_no_links_out(folder, tmp_path):
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
    (folder / "tokenizer_config.json").symlink_to(secret)
    with pytest.raises(RegistryError, match="link out of the folder"):
        add(folder, "x")
    assert Store().entries() == []


def test_a_failed_add_leaves_nothing(folder, store):
    (folder / "model.safetensors").write_bytes(b"x")
    with pytest.raises(FormatError):
        add(folder, "x")
    assert Store().entries() == []
    assert [p for p in store.incoming.iterdir() if p.is_dir()] == []


def test_stale_temporaries_are_swept(folder, store):
    add(folder, "x")
    for key, age_s in (("add-1", 0), ("pull-new", 60), ("pull-old", KEEP_DOWNLOADS_S + 60)):
        (store.incoming / key).mkdir()
        (store.incoming / key / "model.safetensors").write_bytes(b"half")
        lock = store.incoming / f"{key}.lock"
        lock.touch()
        os.utime(lock, (time.time() - age_s,) * 2)
    (store.models / ("0" * 64)).mkdir()  # renamed, and killed before the index was written
    add(folder, "y")
    assert {p.name for p in store.incoming.iterdir()} == {"pull-new", "pull-new.lock"}
    assert os.listdir(store.models) == [Store().entries()[0].digest]


def test_changes_at_once(folder):
    """Eight threads add and remove; the index holds exactly what it should."""

    def work(n):
        add(folder, f"keep{n}")
        add(folder, f"drop{n}")
        remove(f"drop{n}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {entry.name for entry in Store().entries()} == {f"keep{n}" for n in range(8)}


def damaged_indices(good):
    yield "[]"
    yield "{"
    yield '{"version": 2, "entries": []}'
    yield '{"version": 1}'
    entry = good["entries"][0]
    changes = [{"name": "../x"}, {"digest": "../../x"}, {"digest": "A" * 64}, {"main": "../x"}, {"main": "none"}]
    changes += [{"files": []}, {"files": {"../x": {"size": 1}}}, {"files": {"x": {}}}, {"files": {"x": {"size": "1"}}}]
    changes += [{"more": 1}, {"time": 1}, {"revision": 1}, {"summary": None}]
    for change in changes:
        yield json.dumps({"version": 1, "entries": [{**entry, **change}]})


def test_a_damaged_index_is_an_error_that_names_it(folder, store):
    add(folder, "x")
    for text in list(damaged_indices(json.loads(store.index_path.read_text()))):
        store.index_path.write_text(text)
        for action in (Store().entries, lambda: find("x"), lambda: add(folder, "y"), lambda: remove("x")):
            with pytest.raises(FormatError) as caught:
                action()
            assert caught.value.path == str(store.index_path), text


def test_files_that_are_gone(folder, store):
    add(folder, "x")
    shutil.rmtree(store.models)
    with pytest.raises(FormatError, match="fetch it again"):
        bitnet_ref.load("x")


def test_where_the_store_is(monkeypatch, tmp_path):
    assert home() == tmp_path / "home" / "store"
    monkeypatch.delenv("BITNET_REF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert home() == tmp_path / "bitnet_ref"


def test_remove_says_what_there_is(folder):
    add(folder, "storymaker")
    with pytest.raises(RegistryError, match="did you mean storymaker"):
        remove("storymakr")
    with pytest.raises(RegistryError, match="bitnet-ref list"):
        remove("zzz@v1")
    assert Store().find(Reference("storymaker", "none")) is None


# -- commands ----------------------------------------------------------------------------------------------------------


def invoke(*args, code=0):
    result = CliRunner().invoke(cli, list(map(str, args)))
    assert result.exit_code == code, result.output
    return result


def test_commands(folder):
    assert "mine: hf-packed" in invoke("pull", folder, "--name", "mine").output
    assert json.loads(invoke("pull", folder, "--name", "org/b", "--json").output)["name"] == "org/b"
    listed = json.loads(invoke("list", "--json").output)
    assert [entry["name"] for entry in listed["models"]] == ["mine", "org/b"]
    assert listed["shipped"] == ["storychat", "storyteller"]
    assert os.path.isdir(listed["models"][0]["path"])
    text = invoke("list").output
    assert "mine" in text
    assert "bitnet, 2 layers of 16" in text
    assert "removed mine" in invoke("rm", "mine").output
    assert invoke("rm", "mine", code=2).stderr.startswith("error: the store has no 'mine'")
    assert json.loads(invoke("rm", "org/b", "--json").output)["removed"][0]["name"] == "org/b"
    assert json.loads(invoke("list", "--json").output)["models"] == []


@pytest.mark.parametrize("args", [["./x"], ["./x", "--name", "storyteller"], ["a/b/c"], ["./none", "--name", "x"]])
def test_wrong_usage(args):
    assert invoke("pull", *args, code=2).stderr


def test_errors_are_one_family():
    assert issubclass(RegistryError, BitNetRefError)
