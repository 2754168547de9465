"""What is no regular file, or is a link out of the model's folder, is refused: each file, by each reader."""

import ast
import os
import shutil
import signal
import socket
from pathlib import Path

import click
import pytest
from helpers import DATA, TINY, tiny_tensors, write_shards

import bitnet_ref
from bitnet_ref.cli.generation_options import content_of
from bitnet_ref.crossval.receipt import read_receipt
from bitnet_ref.crossval.trace import Trace
from bitnet_ref.errors import BitNetRefError, FormatError
from bitnet_ref.formats.checkpoint import EMBEDDING_FILES, LENGTH_FILE, PROMPTS_FILE, check_room
from bitnet_ref.formats.convert import convert
from bitnet_ref.formats.gguf.tl_tiles import read_kernel_config
from bitnet_ref.formats.hashes import file_hash
from bitnet_ref.formats.hf.config import parse_hf_config
from bitnet_ref.formats.open import ASSETS, open_checkpoint
from bitnet_ref.inspection import inspect_model, show_tensor
from bitnet_ref.serving import EngineConfig
from bitnet_ref.system.atomic import remove_leftovers
from bitnet_ref.tokenizers import load_tokenizer
from bitnet_ref.tokenizers.settings import TOOL_TEMPLATE

PACKAGE = Path(bitnet_ref.__file__).parent
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SMALL = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json")
OF_TOKENIZER = ("tokenizer.json", "tokenizer.model", *SMALL, "chat_template.jinja", TOOL_TEMPLATE)
OF_FOLDER = ("config.json", INDEX, *SHARDS, "model.safetensors", *EMBEDDING_FILES[:2], *OF_TOKENIZER)


@pytest.fixture(autouse=True)
def no_waiting():
    """Opening a pipe waits for ever; the signal turns that into a failure."""

    def fail(*_):
        raise AssertionError("waits for a file")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def sharded_folder(path, with_single_file=False):
    tensors = tiny_tensors({**TINY, "vocab_size": 4096})
    write_shards(
        path, {**TINY, "vocab_size": 4096}, {name: dict(list(tensors.items())[n::2]) for n, name in enumerate(SHARDS)}
    )
    shutil.copy(ASSETS / "storyteller" / "tokenizer.model", path)
    for name in SMALL:
        (path / name).write_text("{}")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    if with_single_file:
        for name in (INDEX, *SHARDS):
            (path / name).unlink()
    return path


def make_pipe(path, outside):
    os.mkfifo(path)


def make_socket(path, outside):
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(path.name)
    finally:
        os.chdir(here)


def make_folder(path, outside):
    path.mkdir()


def link_to_device(path, outside):
    path.symlink_to("/dev/zero")


def link_to_pipe(path, outside):
    os.mkfifo(outside)
    path.symlink_to(outside)


def link_out(path, outside):
    outside.write_text("{}\nroot:x:0:0")
    path.symlink_to(outside)


def link_to_itself(path, outside):
    path.symlink_to(path.name)


def link_to_nothing(path, outside):
    path.symlink_to("nothing")


KINDS = [make_pipe, make_socket, make_folder, link_to_device, link_to_pipe, link_out, link_to_itself, link_to_nothing]
NO_FILES = [kind for kind in KINDS if kind is not link_out]


def put(kind, path, outside):
    if path.exists():
        path.unlink()
    kind(path, outside)


@pytest.mark.sample(12)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_file_of_a_folder(kind, tmp_path):
    """Refused by what reads it, in each use; and nothing of a file outside is in what is written."""
    for name in OF_FOLDER:
        base = Path(name).name
        folder = sharded_folder(tmp_path / f"{base} of {len(name)}", with_single_file=name == "model.safetensors")
        (folder / name).parent.mkdir(exist_ok=True)
        put(kind, folder / name, tmp_path / f"outside {base} of {len(name)}")
        uses = {
            "load": lambda folder: bitnet_ref.load(folder, backend="numpy").tokenizer,
            "convert": lambda folder: convert(folder, folder.with_suffix(".bitnet.safetensors"), "native"),
        }
        if name in OF_TOKENIZER:
            uses["tokenizer"] = load_tokenizer
        for use, call in uses.items():
            with pytest.raises(BitNetRefError) as caught:
                call(folder)
            assert str(folder) in str(caught.value), (name, use)
            assert name in str(caught.value) or name in ("model.safetensors", *SHARDS), (name, use)
        assert inspect_model(folder).errors, name
        if name in SHARDS:
            with pytest.raises(BitNetRefError):
                show_tensor(folder, "lm_head.weight")
        assert not folder.with_suffix(".bitnet.safetensors").exists()


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [PROMPTS_FILE, LENGTH_FILE])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_embed_reads_beside_a_model(kind, name, tmp_path):
    model = bitnet_ref.load("storyteller", backend="numpy")
    model.texts_path = tmp_path / "m"
    model.texts_path.mkdir()
    kind(model.texts_path / name, tmp_path / "outside")
    with pytest.raises(BitNetRefError, match=name):
        model.embed("Alice")


def test_links_within_the_folder_are_files_of_it(tmp_path):
    folder = sharded_folder(tmp_path / "model")
    for name in ("config.json", INDEX, *SHARDS, "tokenizer.model", *SMALL, "chat_template.jinja"):
        (folder / name).rename(folder / f"real {name}")
        (folder / name).symlink_to(f"real {name}")
    model = bitnet_ref.load(folder, backend="numpy")
    assert model.tokenizer.chat_template == "{{ messages }}"
    assert convert(folder, tmp_path / "out.bitnet.safetensors", "native").holds


@pytest.mark.parametrize("kind", NO_FILES, ids=lambda kind: kind.__name__)
def test_a_file_that_is_named(kind, tmp_path):
    """Each reader of a single file, given what is none."""
    outside = tmp_path / "outside"
    readers = {
        "m.gguf": open_checkpoint,
        "m.bitnet.safetensors": open_checkpoint,
        "m.safetensors": open_checkpoint,
        "m.onnx": open_checkpoint,
        "trace.safetensors": Trace,
        "hashed": file_hash,
        "receipt.json": read_receipt,
        "kernel_config.ini": read_kernel_config,
        "engine.toml": EngineConfig.load,
        "i.gguf": lambda path: show_tensor(path, "x"),
        "i.safetensors": lambda path: show_tensor(path, "x"),
    }
    (tmp_path / "config.json").write_text((sharded_folder(tmp_path / "good") / "config.json").read_text())
    for name, read in readers.items():
        outside.unlink(missing_ok=True)
        put(kind, tmp_path / name, outside)
        with pytest.raises(BitNetRefError) as caught:
            read(tmp_path / name)
        assert name in str(caught.value)
    outside.unlink(missing_ok=True)
    put(kind, tmp_path / "prompt", outside)
    with pytest.raises(click.BadParameter, match="prompt"):
        content_of(f"@{tmp_path / 'prompt'}")


def test_a_folders_onnx_file(tmp_path):
    pytest.importorskip("onnx")
    convert(DATA / "native" / "tiny-v1.bitnet.safetensors", tmp_path / "m", "onnx")
    (tmp_path / "m" / "model.onnx").rename(tmp_path / "outside.onnx")
    (tmp_path / "m" / "model.onnx").symlink_to(tmp_path / "outside.onnx")
    for use in (bitnet_ref.load, inspect_model):
        with pytest.raises(BitNetRefError, match="link out of the folder"):
            use(tmp_path / "m")
    bitnet_ref.load(tmp_path / "m" / "model.onnx")  # which the user names


def test_an_onnx_files_data_beside_it(tmp_path):
    onnx = pytest.importorskip("onnx")
    convert(DATA / "native" / "tiny-v1.bitnet.safetensors", tmp_path / "m", "onnx")
    path = tmp_path / "m" / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    for kind in KINDS:
        for tensor in model.graph.initializer:
            tensor.data_location = 1
            del tensor.external_data[:]
            tensor.external_data.add(key="location", value=kind.__name__)
        path.write_bytes(model.SerializeToString())  # `save` would write the data there
        kind(path.parent / kind.__name__, tmp_path / kind.__name__)
        with pytest.raises(BitNetRefError, match=kind.__name__):
            bitnet_ref.load(path, backend="numpy")


def test_a_pipe_among_the_leftovers_of_writers(tmp_path):
    os.mkfifo(tmp_path / ".01234567.tmp.model")
    remove_leftovers(tmp_path / "model")
    assert not list(tmp_path.iterdir())


# -- one opener --------------------------------------------------------------------------------------------------------

# Files of the package itself and of /proc and /sys, which no other user writes
OWN_FILES = {
    "backends/cuda/emulation/build.py",
    "backends/cuda/sources.py",
    "benchmark/energy.py",
    "benchmark/limits.py",
    "benchmark/timing.py",
    "crossval/self_check.py",
    "crossval/outputs/files.py",  # np.load of what open_regular opened
    "crossval/exercises/declare.py",  # the texts beside the package
    "crossval/linear/__init__.py",  # what the recorder wrote into a folder of this process
    "crossval/engines/recorders/record_linear.py",  # what this process wrote, in an interpreter without the package
    "generation/guide_helper.py",  # its own standard streams
    "notebook/lesson.py",
    "serving/http/page.py",
    "system/cgroups.py",
    "system/machine.py",
    "system/memory.py",
    "system/threads.py",
    "training/data.py",  # np.load maps token ids, after open_regular
}
OPENER = "system/json_file.py"
# os.open of locks, of folders to sync, of what this process has just made, and of /dev/null
DESCRIPTORS = {"system/atomic.py", "cli/generation_options.py", "cli/shell.py", OPENER}
READERS = {"read_text", "read_bytes", "fromfile", "memmap", "genfromtxt", "loadtxt", "fdopen", "FileIO", "open_code"}


def raw_reads(path):
    """(line, what) of each call that opens a file to read it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        owner = getattr(getattr(node.func, "value", None), "id", "")
        modes = [a.value for a in [*node.args, *(k.value for k in node.keywords)] if isinstance(a, ast.Constant)]
        if name == "open" and isinstance(node.func, ast.Name) and not {"wb", "w", "x", "xb", "a"} & set(modes):
            yield node.lineno, "open"
        elif name in ("open", "open_code", "load", "loadtxt", "fromfile", "memmap") and owner in ("os", "io", "np"):
            yield node.lineno, f"{owner}.{name}"
        elif name == "open" and isinstance(node.func, ast.Attribute) and {"r", "rb"} & set(modes):
            yield node.lineno, "Path.open"
        elif name in READERS and not (name == "read_text" and isinstance(node.func, ast.Name)):  # ours, not Path's
            yield node.lineno, name


@pytest.mark.thorough
def test_files_are_opened_in_one_place():
    seen = {}
    for path in PACKAGE.rglob("*.py"):
        relative = str(path.relative_to(PACKAGE))
        for line, what in raw_reads(path):
            seen.setdefault(relative, set()).add(what)
            allowed = relative in OWN_FILES or (what in ("os.open", "FileIO") and relative in DESCRIPTORS)
            assert allowed, f"{relative}:{line} reads with {what}; read with open_regular or read_bounded"
    assert seen[OPENER] == {"os.open", "FileIO"}
    assert set(seen) == OWN_FILES | DESCRIPTORS  # that the walk sees them, and no name here is stale


def test_a_matrix_needs_a_bit_for_each_weight():
    config = parse_hf_config(TINY, Path("config.json"))
    largest = max(n * k for n, k in config.linear_shapes().values())
    check_room(config, largest // 8, Path("x"))
    with pytest.raises(FormatError, match="by the configuration it has"):
        check_room(config, largest // 8 - 1, Path("x"))
