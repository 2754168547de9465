"""Every limit of formats/: what is exactly that large is not refused for its size, and what has one more is.

A limit that is too large to be tried is lowered for its test. Its value stands in LIMITS all the same.
"""

import json
import re
import shutil
from fractions import Fraction
from importlib import import_module
from itertools import pairwise
from math import ceil
from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import DATA, GOLDEN, raw_safetensors
from onnx import TensorProto, helper
from test_gguf import array, info, raw_gguf, text, u32, u64, write

import bitnet_ref
from bitnet_ref.errors import BitNetRefError, FormatError
from bitnet_ref.formats import convert
from bitnet_ref.formats.checkpoint import read_tokenizer_folder
from bitnet_ref.formats.gguf.file import GgufFile
from bitnet_ref.formats.gguf.tl_tiles import read_kernel_config
from bitnet_ref.formats.hf.adapter import _base_of, _Values
from bitnet_ref.formats.hf.config import read_config_json, read_hf_config
from bitnet_ref.formats.hf.folder import _read_index
from bitnet_ref.formats.hf.packings import _hadamard_keys
from bitnet_ref.formats.native.model import write_native
from bitnet_ref.formats.onnx.constants import Constants
from bitnet_ref.formats.onnx.export import _TensorProtos
from bitnet_ref.formats.onnx.file import CONFIG_KEY, FORMAT_KEY, FORMAT_VERSION, OnnxFile
from bitnet_ref.formats.onnx.model import OnnxCheckpoint
from bitnet_ref.formats.open import open_checkpoint
from bitnet_ref.formats.safetensors import SafetensorsFile
from bitnet_ref.system.sharing import model_files

FORMATS = Path(bitnet_ref.__file__).parent / "formats"


def gguf(folder, **content):
    GgufFile(write(folder / "x.gguf", raw_gguf(**content))).close()


def header(count, folder):
    """A string, and a number that ends at byte `count`."""
    values = [("a", u32(8) + text("v" * (count - 66))), ("b", u32(10) + u64(1))]
    gguf(folder, values=values, data=bytes(64))


def strings(count, folder):
    gguf(folder, values=[("a", array(8, count - 2, text("") * (count - 2))), ("b", array(8, 2, text("") * 2))])


def safetensors(header, folder):
    SafetensorsFile(write(folder / "x.safetensors", raw_safetensors(header))).close()


def padded(read, name, content=b"{}"):
    """read(the path of a file of `count` bytes)"""

    def try_size(count, folder):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content + b" " * (count - len(content)))
        read(path)

    return try_size


def number(count, folder):
    raw = json.loads((DATA / "families" / "smollm3" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "no_rope_layer_interval": count}))
    read_hf_config(folder / "config.json")


def patterns(given):
    _Values({"r": 2, "rank_pattern": dict.fromkeys(given, 2)}, "r", "rank_pattern", Path("adapter_config.json"))


def onnx_file(folder, nodes, dims=(1,)):
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=dims)
    source = helper.make_tensor_value_info("x", TensorProto.FLOAT, None)
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [source], [output], [tensor])), folder / "x.onnx")
    return OnnxFile(folder / "x.onnx")


def onnx_size(count, folder):
    path = folder / "x.onnx"
    onnx_file(folder, [helper.make_node("Identity", ["x"], ["y"])])
    model = onnx.load(path)
    while (missing := count - len(model.SerializeToString())) > 0:
        model.doc_string += "." * max(1, missing - 3)
    path.write_bytes(model.SerializeToString())
    OnnxFile(path)


def onnx_shape(dims, folder):
    onnx_file(folder, [helper.make_node("Identity", ["x"], ["y"])], dims).shape("w")


def chain(count, folder):
    """A value that `count` nodes compute from an initialiser."""
    names = ["w", *(f"n{number}" for number in range(1, count)), "y"]
    nodes = [helper.make_node("Identity", [x], [y]) for x, y in pairwise(names)]
    constants = Constants(onnx_file(folder, nodes))
    if constants.root("y") is None:
        raise FormatError("no root within the depth")


def inside(limit, folder):
    """Half of the limit may be inside the file: 1000 bytes of 2001, and not 1001 of 2002."""
    count = limit // 2
    with open(folder / "x", "wb") as file:
        _TensorProtos(file, "x", 1 << 30)("w", np.zeros(count, np.uint8), inside=True)


def onnx_config(count, folder):
    onnx_file(folder, [helper.make_node("Identity", ["x"], ["y"])])
    model = onnx.load(folder / "x.onnx")
    helper.set_model_props(model, {FORMAT_KEY: FORMAT_VERSION, CONFIG_KEY: "{}".ljust(count)})
    onnx.save(model, folder / "x.onnx")
    OnnxCheckpoint(folder / "x.onnx")


def native_file(count, folder):
    source = shutil.copytree(GOLDEN / "llama-dense", folder / "source")
    (source / "tokenizer.model").write_bytes(b"x" * count)
    with open_checkpoint(source) as checkpoint:
        write_native(checkpoint, folder / "x.bitnet.safetensors")
    with open_checkpoint(folder / "x.bitnet.safetensors") as checkpoint:
        checkpoint.tokenizer_files()


BYTES = "has more than [0-9]+ bytes"
# "module NAME": (the value, what is tried instead or None, what takes a size and a folder, the words of the refusal)
LIMITS = {
    "gguf.file MAX_HEADER": (1 << 28, 300, header, "needs bytes up to 301, at most 300 are read"),
    "gguf.file MAX_TENSORS": (
        1 << 17,
        None,
        lambda n, folder: gguf(folder, counts=(n, 0), infos=[bytes(24 * n)]),
        "at most 131072 are read",
    ),
    "gguf.file MAX_KEYS": (
        1 << 16,
        None,
        lambda n, folder: gguf(folder, counts=(0, n), infos=[bytes(13 * n)]),
        "at most 65536 are read",
    ),
    "gguf.file MAX_STRINGS": (1 << 22, 7, strings, "at most 1 are read"),
    "gguf.file MAX_NAME": (
        64,
        None,
        lambda n, folder: gguf(folder, infos=[info("x" * n)], data=bytes(32)),
        "at most 64 bytes, got 65",
    ),
    "gguf.file MAX_KEY": (
        65535,
        None,
        lambda n, folder: gguf(folder, values=[("k" * n, u32(7) + b"\0")]),
        "at most 65535 bytes, got 65536",
    ),
    "gguf.file MAX_RANK": (
        4,
        None,
        lambda n, folder: gguf(folder, infos=[info(dims=(1,) * n)], data=bytes(32)),
        "at most 4 dimensions, got 5",
    ),
    "gguf.tl_tiles MAX_INI_BYTES": (1 << 20, None, padded(read_kernel_config, "x.ini", b"\n"), BYTES),
    "hf.config MAX_CONFIG_BYTES": (
        1 << 20,
        None,
        padded(lambda path: read_config_json(path, []), "config.json"),
        BYTES,
    ),
    "hf.config MAX_CONFIG_BYTES of a number": (
        1 << 20,
        None,
        number,
        "whole number from 1 to 1048576",
    ),
    "hf.adapter MAX_CONFIG_BYTES": (
        1 << 20,
        None,
        padded(lambda path: _base_of(path.parent), "adapter_config.json"),
        BYTES,
    ),
    "names _MAX_REPEATS": (2, None, lambda n, _: patterns(["x" + "a?" * n]), "others are refused"),
    "names _MAX_WAYS": (
        400,
        None,
        lambda n, _: patterns([2 * f"({'|'.join('a' * ceil(n**0.5))})"]),
        "others are refused",
    ),
    "names _MAX_PATTERN": (500, None, lambda n, _: patterns(["^" + "x" * (n - 1)]), "others are refused"),
    "hf.adapter MAX_PATTERNS": (64, None, lambda n, _: patterns([f"^x{i}" for i in range(n)]), "at most 64 patterns"),
    "hf.folder MAX_INDEX_BYTES": (64 << 20, 4000, padded(_read_index, "model.safetensors.index.json"), BYTES),
    "hf.packings _MAX_JSON_BYTES": (64 << 20, 4000, padded(_hadamard_keys, "hadamard.json"), BYTES),
    "checkpoint MAX_TOKENIZER_BYTES": (
        64 << 20,
        4000,
        padded(lambda path: read_tokenizer_folder(path.parent), "tokenizer.json"),
        BYTES,
    ),
    "native.model MAX_TOKENIZER_BYTES": (64 << 20, 4000, native_file, "expected at most 4000 bytes"),
    "onnx.file MAX_MODEL_BYTES": (2**31 - 1, 4000, onnx_size, BYTES),
    "onnx.model MAX_CONFIG_BYTES": (1 << 20, 4000, onnx_config, "has more than 4000 characters"),
    "onnx.export MAX_MODEL_BYTES": (2**31 - 1, 2 * 1000 + 1, inside, "at most 1 GB inside the file"),
    "onnx.file MAX_RANK": (8, None, lambda n, folder: onnx_shape((1,) * n, folder), "at most 8 dimensions"),
    "onnx.file _MAX_DIM": (2**62, None, lambda n, folder: onnx_shape((n, 0), folder), "of an array's size"),
    "onnx.constants _MAX_DEPTH": (16, None, chain, "no root"),
    "safetensors MAX_HEADER": (
        100_000_000,
        4000,
        lambda n, folder: safetensors(b"{}" + b" " * (n - 2), folder),
        "its header would have 4001 bytes",
    ),
    "safetensors MAX_RANK": (
        8,
        None,
        lambda n, folder: safetensors({"x": {"dtype": "U8", "shape": [0] * n, "data_offsets": [0, 0]}}, folder),
        "at most 8 whole numbers",
    ),
    "safetensors MAX_TENSORS": (
        1 << 17,
        3,
        lambda n, folder: safetensors(dict.fromkeys("abcd"[:n], 1), folder),
        "at most 3",
    ),
}

# How much is looked at or shown: nothing is refused by these.
AMOUNTS = {"_MAX_PART", "_MAX_LAYERS_FOR_LAYOUT", "_MAX_SHOWN"}


def test_no_limit_is_left_out():
    text = "".join(path.read_text() for path in FORMATS.rglob("*.py") if path.parent.name != "registry")
    assignments = re.findall(r"^((?:_?[A-Z]+_[A-Z_]+(?:, )?)+) = ", text, re.MULTILINE)
    names = {name for each in assignments for name in each.split(", ") if name.lstrip("_").startswith("MAX_")}
    tried = {name.split()[1] for name in LIMITS} | {"MAX_WEIGHTS_PER_BYTE"}
    assert names - AMOUNTS == tried


@pytest.mark.parametrize("limit", LIMITS)
def test_the_largest_that_is_taken(limit, tmp_path, monkeypatch):
    module, name = limit.split()[:2]
    value, lowered, attempt, words = LIMITS[limit]
    module = import_module(f"bitnet_ref.formats.{module}")
    assert getattr(module, name) == value
    if lowered is not None:
        monkeypatch.setattr(module, name, lowered)

    def refusal(count):
        folder = tmp_path / str(count)
        folder.mkdir()
        try:
            attempt(count, folder)
        except BitNetRefError as error:
            return str(error)
        return ""

    assert not re.search(words, refusal(lowered or value))
    assert re.search(words, refusal((lowered or value) + 1))


def test_a_configuration_of_more_weights_than_the_files_can_hold(tmp_path, monkeypatch):
    assert convert.MAX_WEIGHTS_PER_BYTE == 8
    source = GOLDEN / "llama-dense"
    with open_checkpoint(source) as checkpoint:
        config = checkpoint.config
        weights = sum(n * k for n, k in config.linear_shapes().values()) * config.num_hidden_layers
        weights += config.vocab_size * config.hidden_size * (2 - config.tie_word_embeddings)
    nbytes = sum(path.stat().st_size for path in model_files(source))
    monkeypatch.setattr(convert, "MAX_WEIGHTS_PER_BYTE", Fraction(weights, nbytes))
    convert.convert(source, tmp_path / "x.bitnet.safetensors", "native")
    monkeypatch.setattr(convert, "MAX_WEIGHTS_PER_BYTE", Fraction(weights - 1, nbytes))
    with pytest.raises(FormatError, match=f"describes {weights} weights, which the {nbytes} bytes here cannot hold"):
        convert.convert(source, tmp_path / "y.bitnet.safetensors", "native")
