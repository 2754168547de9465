"""Models of the Hugging Face cache by name, and what `list` and `Model.metadata` say of a model."""

import os
import shutil
import sys
from datetime import datetime
from types import SimpleNamespace

import pytest
from cli_runs import invoke, invoke_json
from gguf import GGUFWriter
from helpers import DATA, GOLDEN

import bitnet_ref
from bitnet_ref.errors import FormatError, RegistryError
from bitnet_ref.formats.registry import describe
from bitnet_ref.formats.registry.describe import describe_model, licence_of, usage_of
from bitnet_ref.formats.registry.hub_cache import CachedModel, cached_models, find_cached, hub_cache

COMMIT, OTHER = "0123456789" * 4, "a" * 40


def add(root, name, commit, files, refs=()):
    """A snapshot as huggingface_hub lays it out: links to blobs."""
    repository = root / f"models--{name.replace('/', '--')}"
    (repository / "blobs").mkdir(parents=True, exist_ok=True)
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for number, (file, source) in enumerate(files.items()):
        blob = repository / "blobs" / f"{commit[:8]}{number}"
        shutil.copyfile(source, blob) if not isinstance(source, bytes) else blob.write_bytes(source)
        (snapshot / file).symlink_to(os.path.relpath(blob, snapshot))
    for ref in refs:
        (repository / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (repository / "refs" / ref).write_text(commit)
    return snapshot


@pytest.fixture
def cache(tmp_path, monkeypatch):
    root = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(root))
    case = {file.name: file for file in (GOLDEN / "llama-dense").iterdir() if file.name != "golden.safetensors"}
    card = b"---\nlanguage: en\nlicense: apache-2.0\n---\n# card\nlicense: no\n"
    add(root, "org/tiny", COMMIT, {**case, "README.md": card, "model.py": b"boom"}, ["main", "refs/pr/1"])
    add(root, "org/tiny", OTHER, case, ["v1"])
    add(root, "org/gguf", COMMIT, {"tiny.gguf": DATA / "gguf" / "tq2_0.gguf"})
    add(root, "org/clip", COMMIT, {"config.json": b'{"model_type": "clip"}', "model.safetensors": b"x"}, ["main"])
    add(root, "org/part", COMMIT, {"config.json": case["config.json"]}, ["main"])
    (root / "datasets--org--tiny" / "snapshots" / COMMIT).mkdir(parents=True)
    (root / "models--..--tiny" / "snapshots" / COMMIT).mkdir(parents=True)
    (root / "version.txt").write_text("1")
    return root


def test_names(cache):
    assert {each.name for each in cached_models()} == {"org/tiny", "org/gguf", "org/clip", "org/part"}
    main = find_cached("org/tiny")
    assert main.name == COMMIT
    assert find_cached("org/tiny@v1").name == find_cached(f"org/tiny@{OTHER[:7]}").name == OTHER
    assert find_cached("org/tiny@refs/pr/1") == main
    assert find_cached("org/gguf").name == "tiny.gguf"
    for name in ("org/none", "org/tiny@v2", f"org/tiny@{COMMIT[:6]}", "../tiny", "tiny", ""):
        assert find_cached(name) is None
    with pytest.raises(RegistryError, match=r"org/part.*cannot be loaded"):
        find_cached("org/part")


def test_the_only_snapshot_needs_no_name(cache):
    """Of two snapshots without a main neither is meant."""
    case = {"tiny.gguf": DATA / "gguf" / "tq2_0.gguf"}
    assert find_cached("org/gguf").parent.name == COMMIT
    add(cache, "org/gguf", OTHER, case, ["v1"])
    assert find_cached("org/gguf") is None
    assert find_cached("org/gguf@v1").parent.name == OTHER
    assert find_cached("org/gguf@v1:tiny.gguf") == find_cached("org/gguf@v1")
    (cache / "models--org--gguf" / "refs" / "main").write_text(OTHER)
    assert find_cached("org/gguf").parent.name == OTHER


def test_whole_snapshots(cache):
    """With the branches and tags that name them, in their order; nothing but folders is one."""
    (cache / "models--org--file").write_text("")
    (cache / "models--org--link").symlink_to(cache / "models--org--tiny")
    snapshots = cache / "models--org--tiny" / "snapshots"
    (snapshots / ".DS_Store").write_text("")
    (snapshots / ("b" * 40)).symlink_to(snapshots / OTHER)
    refs = cache / "models--org--tiny" / "refs"
    (refs / "long").write_text("x" * 101)
    (refs / "linked").symlink_to(refs / "main")
    (refs / "newline").write_text(OTHER + "\n")
    (refs / "latin").write_bytes(b"\xe9" * 40)
    assert list(cached_models()) == [
        CachedModel(name, commit, revisions, cache / f"models--{name.replace('/', '--')}" / "snapshots" / commit)
        for name, commit, revisions in (
            ("org/clip", COMMIT, ("main",)),
            ("org/gguf", COMMIT, ()),
            ("org/part", COMMIT, ("main",)),
            ("org/tiny", COMMIT, ("main", "refs/pr/1")),
            ("org/tiny", OTHER, ("newline", "v1")),
        )
    ]


def test_what_a_model_says_of_itself(cache):
    path = find_cached("org/tiny")
    facts = describe_model(path)
    assert facts == {
        "path": str(path),
        "model_type": "llama",
        "layers": 2,
        "hidden_size": 128,
        "vocab_size": 320,
        "context": 256,
        "ternary": False,
        "kind": "hf-bf16",
        "licence": "apache-2.0",
        "bytes": sum(file.stat().st_size for file in path.iterdir()),
        "last_used": facts["last_used"],
    }
    assert datetime.fromisoformat(facts["last_used"]).year >= 2025
    gguf = describe_model(find_cached("org/gguf"))
    assert (gguf["kind"], gguf["licence"], gguf["bytes"]) == (
        "gguf-tq2_0",
        None,
        (DATA / "gguf" / "tq2_0.gguf").stat().st_size,
    )


def test_without_huggingface_hub(cache, monkeypatch):
    """Models load; what only the library can do says how to install it."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert bitnet_ref.load("org/tiny", backend="numpy").path == find_cached("org/tiny")
    for command in (["pull", "org/tiny"], ["rm", "org/tiny", "--yes"]):
        result = invoke(*command)
        message = "Error: huggingface_hub is not installed: pip install 'bitnet-ref[hub]'\n"
        assert (result.exit_code, result.stderr) == (4, message)


def test_loaded_without_a_copy(cache):
    model = bitnet_ref.load("org/tiny", backend="numpy")
    assert model.path == find_cached("org/tiny")
    tokens = [1, 2, 3]
    assert (model.logits(tokens) == bitnet_ref.load(GOLDEN / "llama-dense", backend="numpy").logits(tokens)).all()
    assert bitnet_ref.load("org/gguf", backend="numpy").config.quantization is not None
    with pytest.raises(FormatError, match="did you mean org/tiny"):
        bitnet_ref.load("org/tinny")
    facts = model.metadata
    assert (facts["model_type"], facts["licence"], facts["ternary"]) == ("llama", "apache-2.0", False)
    assert facts["bytes"] == sum(file.stat().st_size for file in model.path.iterdir())
    assert facts["kind"].startswith("hf")
    assert bitnet_ref.Model(model.config, model.weights, model.backend).metadata["layers"] == facts["layers"]


def test_list(cache):
    os.utime(find_cached("org/tiny") / "model.safetensors", (1e9 * 2, 1e9))  # the year 2033
    facts = {(each["name"], each["commit"]): each for each in invoke_json("list")["cached"]}
    assert set(facts) == {("org/tiny", COMMIT), ("org/tiny", OTHER), ("org/gguf", COMMIT)}
    tiny = facts["org/tiny", COMMIT]
    assert (tiny["revision"], tiny["licence"], tiny["last_used"]) == ("main", "apache-2.0", "2033-05-18")
    assert (facts["org/gguf", COMMIT]["kind"], facts["org/gguf", COMMIT]["ternary"]) == ("gguf-tq2_0", True)
    text = invoke("list").stdout
    for word in ("org/tiny", "main@01234567", "apache-2.0", "2033-05-18", "gguf-tq2_0, ternary", "storyteller"):
        assert word in text


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlicense: mit\n---\n", "mit"),
        ("---\r\nlicense: 'cc-by-4.0'\r\n---\r\n", "cc-by-4.0"),
        ("# title\n---\nlicense: mit\n---\n", None),
        ("---\nlicense: [a, b]\n---\n", None),
        ("---\nlicense: mit\n", None),
        ("---\nlicense: " + "x" * 999 + "\n---\n", None),
    ],
)
def test_licences(tmp_path, card, licence):
    (tmp_path / "README.md").write_text(card, newline="")
    assert licence_of(tmp_path) == licence


def test_a_card_that_is_not_utf_8(tmp_path):
    (tmp_path / "README.md").write_bytes(b"---\nauthor: Andr\xe9\nlicense: mit\n---\n")
    assert licence_of(tmp_path) == "mit"


def test_where_the_cache_is(monkeypatch, tmp_path):
    """Each variable hides the ones below it, and an empty one hides nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setenv("DISK", "d")
    places = {
        "HF_HUB_CACHE": ("~/a", tmp_path / "user" / "a"),
        "HUGGINGFACE_HUB_CACHE": ("b/$DISK", tmp_path / "b" / "d"),
        "HF_HOME": (str(tmp_path / "c"), tmp_path / "c" / "hub"),
        "XDG_CACHE_HOME": (str(tmp_path / "e"), tmp_path / "e" / "huggingface" / "hub"),
    }
    for variable, (value, _) in places.items():
        monkeypatch.setenv(variable, value)
    for variable, (_, folder) in places.items():
        assert hub_cache() == folder
        monkeypatch.setenv(variable, "")
    assert hub_cache() == tmp_path / "user" / ".cache" / "huggingface" / "hub"
    assert list(cached_models()) == []


def test_the_largest_card_that_is_read(tmp_path):
    card = b"---\nlicense: mit\n---\n"
    (tmp_path / "README.md").write_bytes(card.ljust(1 << 20))
    assert licence_of(tmp_path) == "mit"
    (tmp_path / "README.md").write_bytes(card.ljust((1 << 20) + 1))
    assert licence_of(tmp_path) is None


@pytest.mark.parametrize(
    ("given", "licence"), [("apache-2.0", "apache-2.0"), ("x" * 99, "x" * 64), (None, "mit"), (7, "mit")]
)
def test_the_licence_of_a_file(tmp_path, given, licence):
    """A GGUF's own, if it says one in words; else what the card beside the file says."""
    writer = GGUFWriter(tmp_path / "x.gguf", "bitnet")
    if given is not None:
        add_value = writer.add_string if isinstance(given, str) else writer.add_uint32
        add_value("general.license", given)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    assert licence_of(tmp_path / "x.gguf") == licence
    assert licence_of(tmp_path / "x.bitnet.safetensors") == licence_of(tmp_path) == "mit"


def test_the_size_and_last_use_of_several_files(tmp_path):
    """The sum of their sizes, and the newest of their times."""
    for name, size, read_s in (("a", 3, 2e9), ("config.json", 4, 1e9), ("b", 5, 15e8)):
        (tmp_path / name).write_bytes(bytes(size))
        os.utime(tmp_path / name, (read_s, 1e9))
    assert usage_of(tmp_path) == {"bytes": 12, "last_used": "2033-05-18"}
    assert usage_of(tmp_path / "none") == {"bytes": 0, "last_used": "1970-01-01"}


@pytest.mark.parametrize(("seconds", "date"), [(10**12, "9999-12-31"), (-(10**10), "1970-01-01")])
def test_a_time_that_no_date_has(tmp_path, monkeypatch, seconds, date):
    """A file system may keep times of other years, which archives bring along."""
    (tmp_path / "config.json").write_text("{}")
    status = os.stat(tmp_path / "config.json")
    times = os.stat_result((*status[:7], seconds, seconds, seconds))
    monkeypatch.setattr(describe, "model_files", lambda path: [SimpleNamespace(stat=lambda: times)])
    assert usage_of(tmp_path) == {"bytes": 2, "last_used": date}
