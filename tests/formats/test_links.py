"""Names: which are refused, which files of a folder are a model, and those that are given to local models."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from cli_runs import invoke, invoke_json
from click.testing import CliRunner
from helpers import BITNET, TINY, tiny_tensors, write_checkpoint, write_shards
from hypothesis import given
from hypothesis import strategies as st

import bitnet_ref
from bitnet_ref.cli import cli
from bitnet_ref.errors import BitNetRefError, FormatError, RegistryError, StorageError
from bitnet_ref.formats.checkpoint import EMBEDDING_FILES
from bitnet_ref.formats.native.model import write_native
from bitnet_ref.formats.open import ASSETS, find_model, open_checkpoint
from bitnet_ref.formats.registry.links import MAX_PATH_BYTES, home, linked_path, links, remove_link
from bitnet_ref.formats.registry.names import choose_files, model_in, parse_reference, split_choice
from bitnet_ref.formats.registry.pull import link_model


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("BITNET_REF_HOME", str(tmp_path / "home" / "names"))


@pytest.fixture
def folder(tmp_path):
    made = write_checkpoint(tmp_path / "hf", BITNET)
    (made / "modeling.py").write_text("raise SystemExit")
    (made / "pytorch_model.bin").write_bytes(b"\x80")
    return made


# -- names -------------------------------------------------------------------------------------------------------------


GOOD = ["a", "org/repo", "org/Repo-1.58_x@main", "a@refs/pr/1", "a.b/c.d@0123abc"]
GOOD += ["a" * 96, f"{'a' * 96}/{'b' * 96}@{'c' * 96}", "a@1/2/3/4/5/6/7/8"]


@pytest.mark.parametrize("text", GOOD)
def test_good_references(text):
    name, revision = parse_reference(text)
    assert (name if revision is None else f"{name}@{revision}") == text


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
    "a@1/2/3/4/5/6/7/8/9",
]


@pytest.mark.parametrize("text", BAD)
def test_bad_references(text):
    with pytest.raises(RegistryError, match="expected NAME"):
        parse_reference(text)
    assert linked_path(text) is None


@given(st.text(st.sampled_from("ab./@\\~-_0: \0"), max_size=12))
def test_no_reference_leaves_a_folder(text):
    try:
        name = parse_reference(text)[0]
    except RegistryError:
        return
    assert ".." not in text
    assert not os.path.isabs(name)
    assert os.path.normpath(name) == name


@pytest.mark.parametrize(
    ("text", "name", "which"),
    [
        ("org/repo:Q2_0", "org/repo", "Q2_0"),
        ("org/repo@v1:x.gguf", "org/repo@v1", "x.gguf"),
        ("a:b:c", "a:b", "c"),
        ("org/repo", "org/repo", None),
        ("org/repo:", "org/repo:", None),
        (":Q2_0", ":Q2_0", None),
        ("C:/models/x", "C:/models/x", None),
        ("a:.x", "a:.x", None),
        ("", "", None),
    ],
)
def test_the_file_that_a_reference_chooses(text, name, which):
    assert split_choice(text) == (name, which)


HF = ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"]
BELOW = [*EMBEDDING_FILES, "additional_chat_templates/tool_use.jinja"]
SHARDS = ["config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"]


@pytest.mark.parametrize(
    ("names", "file", "chosen"),
    [
        ([*HF, "x.py", "pytorch_model.bin", "vocab.pkl", ".hid.json", "training_args.json"], None, (sorted(HF), None)),
        ([*SHARDS, "consolidated.safetensors", "x.gguf"], None, (sorted(SHARDS), None)),
        ([*HF, *BELOW, "2_Dense/config.json"], None, (sorted([*HF, *BELOW]), None)),
        (["x.gguf", "README.md"], None, (["x.gguf"], "x.gguf")),
        ([*HF, "x.gguf"], "x.gguf", (["x.gguf"], "x.gguf")),
        (["a-Q2_0.gguf", "a-Q4_0.gguf", "a-TQ2_0.gguf"], "q2_0", (["a-Q2_0.gguf"], "a-Q2_0.gguf")),
        (["Q8_0.x.gguf", "b.Q2_0.bitnet.safetensors"], "Q8_0", (["Q8_0.x.gguf"], "Q8_0.x.gguf")),
        (
            ["m-F16-00002-of-00002.gguf", "m-F16-00001-of-00002.gguf", "n-F16x.gguf"],
            "F16",
            (["m-F16-00001-of-00002.gguf", "m-F16-00002-of-00002.gguf"], "m-F16-00001-of-00002.gguf"),
        ),
        (["a.bitnet.safetensors", "config.json"], None, (["a.bitnet.safetensors"], "a.bitnet.safetensors")),
        ([*HF, *SHARDS, "README.md"], None, (sorted([*HF, "README.md"]), None)),
        ([*SHARDS[1:], "x.gguf"], None, (["x.gguf"], "x.gguf")),
        (["config.json", SHARDS[2], "x.gguf"], None, (["x.gguf"], "x.gguf")),
        (["model.safetensors", "x.gguf"], None, (["x.gguf"], "x.gguf")),
        (
            ["m-00002-of-00003.gguf", "m-00003-of-00003.gguf"],
            "m-00003-of-00003.gguf",
            (["m-00002-of-00003.gguf", "m-00003-of-00003.gguf"], "m-00003-of-00003.gguf"),
        ),
    ],
)
def test_the_files_of_a_model(names, file, chosen):
    assert choose_files(names, file) == chosen


@pytest.mark.parametrize(
    ("names", "file", "message"),
    [
        (["a.gguf", "b.gguf"], None, "several models"),
        (["config.json", "pytorch_model.bin"], None, "no model"),
        (["sub/x.gguf", "../x.gguf", "/x.gguf"], None, "no model"),
        (["a.gguf"], "b.gguf", "there are: a.gguf"),
        (["x.bin"], "x.bin", "no model file"),
        (["m-00002-of-00002.gguf", "n.gguf"], None, "several models.*: m-00002-of-00002.gguf, n.gguf"),
        (["a-Q2_0.gguf", "b-Q2_0.gguf"], "Q2_0", "several model files 'Q2_0'; there are: a-Q2_0.gguf, b-Q2_0.gguf"),
        (["config.json", SHARDS[2]], None, "no model that bitnet_ref reads"),
        (SHARDS[1:], None, "no model that bitnet_ref reads"),
        (["a-Q2_0x.gguf", "a.gguf"], "Q2_0", "is no model file 'Q2_0'; there are: a-Q2_0x.gguf, a.gguf$"),
        (HF, "Q2_0", "is no model file 'Q2_0'; there are: none$"),
    ],
)
def test_no_files_of_a_model(names, file, message):
    with pytest.raises(RegistryError, match=message):
        choose_files(names, file)


def test_only_files_of_a_folder_are_models(tmp_path):
    """Not a folder of such a name, and not a link to nothing."""
    (tmp_path / "a.gguf").mkdir()
    (tmp_path / "b.gguf").symlink_to(tmp_path / "none")
    (tmp_path / "c.gguf").touch()
    assert model_in(tmp_path) == tmp_path / "c.gguf"


# -- names of local models ---------------------------------------------------------------------------------------------


def test_link_load_remove(folder):
    assert link_model(folder, "mine") == linked_path("mine") == folder
    want = bitnet_ref.load(folder, backend="numpy").logits([1, 2, 3])
    assert np.array_equal(bitnet_ref.load("mine", backend="numpy").logits([1, 2, 3]), want)
    link_model(folder, "org/again")
    assert links() == {"mine": folder, "org/again": folder}
    remove_link("mine")
    assert links() == {"org/again": folder}
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors", "modeling.py", "pytorch_model.bin"]
    with pytest.raises(FormatError, match="did you mean org/again"):
        bitnet_ref.load("org/agai")


def test_a_relative_path(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    link_model("hf/model.safetensors", "mine")
    monkeypatch.chdir(tmp_path / "home")
    assert find_model("mine") == folder


def test_a_sharded_folder_and_a_single_file(tmp_path):
    tensors = tiny_tensors(TINY)
    names = sorted(tensors)
    shards = {f"model-0000{i + 1}-of-00002.safetensors": {n: tensors[n] for n in names[i::2]} for i in (0, 1)}
    write_shards(tmp_path / "shards", TINY, shards)
    link_model(tmp_path / "shards", "sharded")
    native = tmp_path / "files" / "x.bitnet.safetensors"
    native.parent.mkdir()
    with open_checkpoint(tmp_path / "shards") as checkpoint:
        write_native(checkpoint, native)
    assert link_model(native, "org/native") == link_model(native.parent, "the-only-file") == native
    a, b = (bitnet_ref.load(name, backend="numpy").logits([1, 2]) for name in ("sharded", "org/native"))
    assert np.array_equal(a, b)
    shutil.copyfile(native, tmp_path / "files" / "y.bitnet.safetensors")
    with pytest.raises(RegistryError, match="several models"):
        link_model(native.parent, "x")
    assert link_model(native.parent, "x", file=native.name) == native


def test_a_path_and_a_shipped_name_come_first(folder, tmp_path, monkeypatch):
    link_model(folder, "org/tiny")
    monkeypatch.chdir(tmp_path)
    assert find_model("org/tiny") == folder
    write_checkpoint(tmp_path / "org" / "tiny", {**BITNET, "num_hidden_layers": 1})
    assert bitnet_ref.load("org/tiny", backend="numpy").config.num_hidden_layers == 1
    link_model(folder, "storyteller")
    assert find_model("storyteller") == ASSETS / "storyteller"


@pytest.mark.parametrize("name", ["../x", "/x", "x@main", "a/b/c", ""])
def test_a_bad_name_is_not_given(folder, name):
    with pytest.raises(RegistryError):
        link_model(folder, name)
    assert not home().exists()


def test_what_is_no_model_gets_no_name(folder, tmp_path):
    (folder / "model.safetensors").write_bytes(b"x")
    with pytest.raises(FormatError):
        link_model(folder, "x")
    with pytest.raises(RegistryError, match="no file or folder"):
        link_model(tmp_path / "none", "x")
    assert links() == {}


def test_a_large_file_that_git_did_not_fetch(folder):
    (folder / "model.safetensors").write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1000\n"
    )
    with pytest.raises(FormatError, match=r"model.safetensors: is a Git LFS pointer, .* git lfs pull"):
        link_model(folder, "x")


def test_a_name_whose_model_is_gone(folder):
    link_model(folder, "x")
    shutil.rmtree(folder)
    with pytest.raises(FormatError, match="is gone, and the name x refers to it"):
        bitnet_ref.load("x")
    (listed,) = invoke_json("list")["models"]
    assert (listed["name"], listed["path"]) == ("x", str(folder))
    assert "to forget that: bitnet-ref rm x" in listed["error"]
    shown = CliRunner().invoke(cli, ["list"], env={"COLUMNS": "400"}).stdout  # a folder may have a long name
    assert str(folder) in shown
    assert "removed the name x" in invoke("rm", "x").stdout


def test_a_damaged_name_is_an_error_that_says_so(folder):
    link_model(folder, "x")
    (home() / "links" / "x").write_bytes(b"/" * 100_000)
    with pytest.raises(FormatError, match="more than 65536 bytes"):
        bitnet_ref.load("x")
    link_model(folder, "x")
    assert find_model("x") == folder


def test_the_longest_path_of_a_name(folder):
    link_model(folder, "x")
    (home() / "links" / "x").write_bytes(b"/" * MAX_PATH_BYTES)
    assert linked_path("x") is not None
    (home() / "links" / "x").write_bytes(b"/" * (MAX_PATH_BYTES + 1))
    with pytest.raises(FormatError, match="more than 65536 bytes"):
        linked_path("x")


def test_other_files_beside_the_names(folder):
    """Names come in their order; a file that no name has is none, and a file's own name is not the name it holds."""
    assert links() == {}
    for name in ("org/b", "c", "a"):
        link_model(folder, name)
    for other in (".DS_Store", "org@b@c", "x y"):
        (home() / "links" / other).write_text(str(folder))
    assert list(links().items()) == [("a", folder), ("c", folder), ("org/b", folder)]
    assert linked_path("org@b") is None
    assert linked_path("org@b@c") is None
    remove_link("d")  # was given to nothing
    remove_link("org/b")
    assert list(links()) == ["a", "c"]


def test_a_folder_in_the_place_of_the_names(folder):
    home().mkdir(parents=True)
    (home() / "links").write_text("")
    with pytest.raises(StorageError, match="links"):
        link_model(folder, "x")
    assert links() == {}


def test_where_the_names_are(monkeypatch, tmp_path):
    assert home() == tmp_path / "home" / "names"
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setenv("BITNET_REF_HOME", "~/names")
    assert home() == tmp_path / "user" / "names"
    monkeypatch.delenv("BITNET_REF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert home() == tmp_path / "bitnet_ref"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert home() == tmp_path / ".cache" / "bitnet_ref"
    monkeypatch.setattr("sys.platform", "darwin")
    assert home() == tmp_path / "Library" / "Caches" / "bitnet_ref"


# -- commands ----------------------------------------------------------------------------------------------------------


def test_commands(folder):
    assert f"mine: hf-packed, 6.9 KB, {folder}" in invoke("pull", folder, "--name", "mine").stdout
    assert invoke_json("pull", folder, "--name", "org/b")["name"] == "org/b"
    listed = invoke_json("list")
    assert [each["name"] for each in listed["models"]] == ["mine", "org/b"]
    assert listed["shipped"] == ["storychat", "storyteller"]
    assert listed["models"][0]["path"] == str(folder)
    text = invoke("list").stdout
    assert "mine" in text
    assert "bitnet, 2 layers of 16" in text
    assert f"removed the name mine; its files stay: {folder}" in invoke("rm", "mine").stdout
    assert invoke("rm", "org/c").stderr.startswith("Error: there is no 'org/c' here; did you mean org/b?")
    assert invoke_json("rm", "org/b") == {"removed": [{"name": "org/b", "path": str(folder)}], "bytes": 0}
    assert invoke_json("list")["models"] == []
    assert "bitnet-ref list shows what there is" in invoke("rm", "mine").stderr
    assert invoke("rm", "storyteller").stderr == "Error: storyteller is a part of the package, and stays\n"


@pytest.mark.parametrize(
    "args", [[], ["./x"], ["./x", "--name", "storyteller"], ["a/b/c"], ["./none", "--name", "x"]], ids=str
)
def test_wrong_usage(args):
    result = invoke("pull", *args)
    assert result.exit_code == 2
    assert result.stderr


def test_errors_are_one_family():
    assert issubclass(RegistryError, BitNetRefError)
