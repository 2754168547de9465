"""What `bitnet-ref inspect` says of the models in tests/data, to the letter, and its JSON.

When a change of the words or numbers is meant, running this file records them.
"""

import contextlib
import json
import os
import re
import shutil
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import test_inspect_formats
import test_inspection
from click.testing import CliRunner
from helpers import BITNET, DATA, GOLDEN, TINY, safetensors_bytes, tiny_tensors, write_checkpoint
from onnx_graphs import decoder
from onnx_graphs import write as write_onnx

import bitnet_ref
from bitnet_ref.cli import cli
from bitnet_ref.formats.convert import convert
from bitnet_ref.formats.gguf.blocks import quantize
from bitnet_ref.formats.gguf.file import GgufFile, Typed
from bitnet_ref.formats.open import ASSETS
from bitnet_ref.inspection import inspect_model, show_tensor

RECORDED = DATA / "inspection" / "reports.json"
ODD_ONES = DATA / "inspection" / "odd.json"
SHOWN = DATA / "inspection" / "tensors.json"
LONG = ("metadata", "ternary", "tensors")  # of the JSON: recorded for some files alone
WHOLE = ("golden/bitnet-packed-offline", "gguf/tq2_0.gguf", "native/tiny-v1.bitnet.safetensors")
TENSORS = (
    ("golden/bitnet-packed-offline", "blocks.0.attn.q_proj"),
    ("golden/llama-dense", "final_norm"),
    ("golden/llama-dense", "lm_head"),
    ("gguf/i2_s.gguf", "blk.1.ffn_down.weight"),
    ("containers/gguf-q1_0/model.gguf", "blk.0.attn_q.weight"),
    ("native/tiny-v1.bitnet.safetensors", "embedding"),
)


@cache
def recorded(path):
    return json.loads(path.read_text())


def models():
    folders = [path.parent for path in DATA.glob("*/*/config.json")]
    files = [*DATA.glob("gguf/*.gguf"), *DATA.glob("containers/*/model.gguf"), *DATA.glob("native/*.safetensors")]
    files += [*DATA.glob("containers/*/*-00001-of-*.gguf"), *DATA.glob("gguf/golden-i2_s.safetensors")]
    return sorted(str(path.relative_to(DATA)) for path in (*folders, *files))


def report_of(path):
    """The text, and the JSON."""
    text = CliRunner().invoke(cli, ["inspect", path], env={"COLUMNS": "100"}).stdout
    facts = inspect_model(path).to_dict()
    facts |= {name: len(facts[name] or ()) for name in LONG if path not in WHOLE}
    return {"text": text.splitlines(), "facts": plain(facts)}


def plain(facts):
    """As JSON, with nine digits: processors sum floats in different orders."""
    return json.loads(json.dumps(facts), parse_float=lambda text: float(f"{float(text):.9g}"))


def view_of(path, name):
    view = show_tensor(path, name)
    return {"path": path, "text": view.text(100).splitlines(), "facts": plain(view.statistics())}


def write(path, value):
    """The texts line by line, and each fact in one line."""

    def dump(value, indent, depth):
        if depth == 0 or not isinstance(value, dict | list) or not value:
            return json.dumps(value, ensure_ascii=False)
        if isinstance(value, dict):
            pairs = [f"{json.dumps(key)}: {dump(each, indent + 1, depth - 1)}" for key, each in value.items()]
        else:
            pairs = [dump(each, indent + 1, depth - 1) for each in value]
        inner, (begin, end) = "\n" + " " * (indent + 1), "{}" if isinstance(value, dict) else "[]"
        return begin + inner + f",{inner}".join(pairs) + "\n" + " " * indent + end

    path.write_text(dump(value, 0, 3) + "\n")


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.chdir(DATA)


@pytest.mark.sample(9)
@pytest.mark.parametrize("path", models())
def test_the_report_of_a_model(path):
    found, expected = report_of(path), recorded(RECORDED)[path]
    assert found["text"] == expected["text"]
    assert found["facts"] == expected["facts"]


def test_no_record_is_of_a_model_that_is_gone():
    assert sorted(recorded(RECORDED)) == models()


def copy_of(case, **config):
    def build(folder):
        shutil.copytree(GOLDEN / case, folder)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        return folder

    return build


def converted(source, target, suffix):
    """Converted from a folder that `source` builds, or a model of tests/data."""

    def build(folder):
        path = folder.with_name(folder.name + suffix)
        convert(source if isinstance(source, Path) else source(folder), path, target, verify=False)
        return path

    return build


def shrunk(source, **options):
    """A changed GGUF, as of test_inspect_formats."""
    return lambda folder: test_inspect_formats.changed(folder.with_name(folder.name + ".gguf"), source, **options)


def with_tokenizer(folder, **config):
    """Storyteller's, beside a model whose configuration says otherwise."""
    write_checkpoint(folder, {**BITNET, **config})
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(ASSETS / "storyteller" / name, folder)
    return folder


def onnx_of(style, config, producer):
    """As another exporter writes it, which has named itself or not."""

    def build(folder):
        source = write_checkpoint(folder.with_name("source"), config)
        proto = decoder(bitnet_ref.load(source, backend="numpy", threads=1).weights, style, config)
        proto.producer_name = producer
        proto.opset_import[0].version = 21  # else the newest that the package knows
        return write_onnx(folder, proto, config)

    return build


def link_out_of_the_folder(folder):
    """One shard is missing, and the other is elsewhere."""
    test_inspection.one_shard_missing(folder)
    shutil.move(folder / "a.safetensors", "elsewhere.safetensors")
    (folder / "a.safetensors").symlink_to(Path("elsewhere.safetensors").absolute())
    return folder


def beside_others(folder, stored):
    """Files of other kinds in a folder that cannot be opened, where some tensors can be read or none."""
    test_inspection.one_shard_missing(folder)
    if not stored:
        (folder / "a.safetensors").unlink()
    for name in ("pytorch_model.bin", "x.pt", "y.pth", "z.bin"):
        (folder / name).write_bytes(b"?")
    return folder


def without_config(folder):
    write_checkpoint(folder, BITNET)
    (folder / "config.json").unlink()
    return folder


def empty_plane(folder):
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors = tiny_tensors(BITNET) | {name: np.zeros((0, 16), np.uint8)}
    tensors[name.replace("q_proj", "k_proj")] = np.zeros((1, 1), np.uint8)
    write_checkpoint(folder, BITNET, tensors)
    (folder / "config.json").unlink()
    return folder


def plain_file(folder):
    path = folder.with_name(folder.name + ".safetensors")
    arrays = {"a": np.zeros((2, 3), np.float32), "model.layers.0.mlp.up_proj.weight": np.zeros(4, np.uint8)}
    path.write_bytes(safetensors_bytes(arrays))
    return path


def empty_file(folder):
    path = folder.with_name(folder.name + ".safetensors")
    path.write_bytes(safetensors_bytes({"a": np.zeros((0, 3), np.float32)}))
    return path


def two_scales(folder):
    """Masters that are ternary, the first half of a matrix with another scale than the second: no ternary matrix."""
    tensors = test_inspection.ternary_floats(test_inspection.ONLINE)
    matrix = tensors["model.layers.0.self_attn.q_proj.weight"]
    matrix[: len(matrix) // 2] *= 2
    return write_checkpoint(folder, test_inspection.ONLINE, tensors)


GGUF, ONE_LAYER = DATA / "gguf", {"num_hidden_layers": 1}
TABLE = "token_embd.weight"


def q8_0_table(path):
    with GgufFile(path) as file:
        raw = quantize(file.read(TABLE), "Q8_0")
    return {"data": {TABLE: lambda _: raw}, "types": {TABLE: "Q8_0"}}


def ternary_floats(config):
    tensors = test_inspection.ternary_floats(config)
    kept = {name: array for name, array in tensors.items() if ".1." not in name or config["num_hidden_layers"] > 1}
    return lambda folder: write_checkpoint(folder, config, kept)


def dense_rounded(folder):
    """A dense GGUF with two matrices of eight bits."""
    source = converted(GOLDEN / "llama-dense", "gguf-f16", ".gguf")(folder.with_name("source"))
    names, data = ("blk.0.attn_q.weight", "blk.1.ffn_up.weight"), {}
    with GgufFile(source) as file:
        for name in names:
            raw = quantize(file.read(name), "Q8_0")
            data[name] = lambda _, raw=raw: raw
    path = folder.with_name(f"{folder.name}.gguf")
    return test_inspect_formats.changed(path, source, data=data, types=dict.fromkeys(names, "Q8_0"))


ODD = {
    **{f"folder, {name}": build for name, (build, *_) in test_inspection.BROKEN.items()},
    **{f"gguf, {name}": shrunk(GGUF / "i2_s.gguf", **how) for name, (how, *_) in test_inspect_formats.BROKEN.items()},
    "of one layer, ternary as floats": ternary_floats({**TINY, **ONE_LAYER}),
    "masters that are ternary": ternary_floats(test_inspection.ONLINE),
    "masters, native": converted(GOLDEN / "bitnet-bf16-online", "native", ".bitnet.safetensors"),
    "masters, gguf": converted(GOLDEN / "bitnet-bf16-online", "gguf-f16", ".gguf"),
    "dense, gguf": converted(GOLDEN / "llama-dense", "gguf-f16", ".gguf"),
    "dense, rounded": dense_rounded,
    "ternary, rounded": shrunk(GGUF / "tq2_0.gguf", **q8_0_table(GGUF / "tq2_0.gguf")),
    "without theta": shrunk(GGUF / "tq2_0.gguf", drop=["bitnet-b1.58.rope.freq_base"]),
    "of another architecture": shrunk(GGUF / "tq2_0.gguf", values={"general.architecture": Typed("string", "gpt2")}),
    "scales the wrong way": copy_of(
        "llama-packed-bitlinear",
        quantization_config={
            "quant_method": "bitnet",
            "linear_class": "autobitlinear",
            "quantization_mode": "offline",
        },
    ),
    "silu where relu2 is usual": copy_of("bitnet-packed-offline", hidden_act="silu"),
    "an unknown activation": copy_of("llama-dense", hidden_act="gelu_fast_2"),
    "no end token": copy_of("bitnet-packed-offline", eos_token_id=[]),
    "other tokens than its tokenizer's": lambda folder: with_tokenizer(folder, bos_token_id=3, eos_token_id=4),
    "more layers than it has": test_inspection.with_config({"num_hidden_layers": 7}),
    "onnx of ours": converted(GOLDEN / "llama-packed-bitlinear", "onnx", ""),
    "onnx, dense": onnx_of("named", TINY, "pytorch"),
    "onnx, ternary": onnx_of("qdq", BITNET, ""),
    "onnx, of two bits": onnx_of("qdq-int2", BITNET, "p" * 300),
    "onnx, of four bits": onnx_of("nbits-4", BITNET, "a b"),
    "a link out of the folder": link_out_of_the_folder,
    "pickles beside a shard": lambda folder: beside_others(folder, stored=True),
    "pickles alone": lambda folder: beside_others(folder, stored=False),
    "without config.json": without_config,
    "an empty plane": empty_plane,
    "a plain file": plain_file,
    "an empty file": empty_file,
    "masters of two scales": two_scales,
}


def odd_report(name):
    """The text without the path, the findings, and the counts of the ternary matrices."""
    path = ODD[name](Path("m"))
    text = CliRunner().invoke(cli, ["inspect", str(path)], env={"COLUMNS": "100"}).stdout.splitlines()
    facts = inspect_model(path).to_dict()
    findings = [[value for value in finding.values() if value is not None] for finding in facts["findings"]]
    planes = [list(matrix.values()) for matrix in facts["ternary"]]
    tensors = [list(tensor.values()) for tensor in facts["tensors"]] if path.suffix == ".onnx" or "onnx" in name else []
    html = re.findall(r"<th>(.*?)</th><td>(.*?)</td>", inspect_model(path)._repr_html_())
    shown = {} if name.startswith(("folder, ", "gguf, ")) else {"text": text}
    return plain({**shown, "findings": findings, "ternary": planes, "tensors": tensors, "html": html})


@pytest.mark.sample(9)
@pytest.mark.parametrize("name", ODD)
def test_the_report_of_an_odd_model(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert odd_report(name) == recorded(ODD_ONES)[name]


@pytest.mark.parametrize("number", range(len(TENSORS)), ids=[name for _, name in TENSORS])
def test_the_view_of_a_tensor(number):
    assert view_of(*TENSORS[number]) == recorded(SHOWN)[number]


if __name__ == "__main__":
    os.chdir(DATA)
    write(RECORDED, {path: report_of(path) for path in models()})
    odd = {}
    for name in ODD:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            odd[name] = odd_report(name)
    write(ODD_ONES, odd)
    write(SHOWN, [view_of(*each) for each in TENSORS])
