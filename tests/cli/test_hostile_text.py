"""No text of a file acts on the terminal that shows it, or on who reads it: it is shown with escapes."""

import json

import numpy as np
import pytest
from cli_runs import invoke
from helpers import BITNET, DATA, raw_safetensors, tiny_tensors, write_checkpoint

import bitnet_ref
from bitnet_ref.crossval import cross_trace
from bitnet_ref.crossval.report import write_html
from bitnet_ref.crossval.trace import write_trace
from bitnet_ref.errors import BitNetRefError, FormatError, GenerationError, printable
from bitnet_ref.inspection import inspect_model, show_tensor

# Clear the screen, a C1 escape, a title, a bell, DEL, marks of direction, a tag, a lone surrogate, a false second line
EVIL = "\x1b[2J\x9b31m\x1b]0;x\x07\x7f\u202egpj.\u2066\u200f\U000e0041\nproven: all equal\r\u2028"


def acting(text, lines=True):
    """The characters that do something; and the line that a file's text tries to begin."""
    bad = [c for c in text if not c.isprintable() and not (lines and c in "\n\t") and c != "\xa0"]
    return bad + [line for line in text.splitlines() if line.startswith("proven")]


def shown(*args, code=None):
    """What a command writes, as text and as JSON, neither of which may act."""
    plain, as_json = invoke(*args), invoke(*args, "--json")
    for result in (plain, as_json):
        assert not acting(result.stdout), args
        assert not acting(result.stderr), args
        assert code is None or result.exit_code == code, result.output
    assert "\\x1b[2J" in plain.output, plain.output
    return plain.output, json.loads(as_json.stdout)


def test_printable():
    assert printable("naïve 日本 \u00a0 a\tb\n") == "naïve 日本 \u00a0 a\tb\n"
    once = printable(EVIL)
    assert printable(once) == once
    assert not acting(printable(EVIL, keep=""), lines=False)
    assert printable("\udc80", keep="") == "\\udc80"


@pytest.mark.parametrize("make", [lambda text: FormatError(text, path=f"/{text}", field=text), GenerationError])
def test_errors(make):
    error = make(EVIL)
    assert not [c for c in acting(str(error)) if len(c) == 1]
    if isinstance(error, FormatError):
        assert not acting(str(error), lines=False)
        assert error.path == f"/{EVIL}"  # which opens the file


def test_a_header_alone(tmp_path):
    path = tmp_path / "x.safetensors"
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    path.write_bytes(raw_safetensors({"__metadata__": {EVIL: EVIL}, EVIL: entry}, np.ones(2, np.float32).tobytes()))
    _, facts = shown("inspect", path, code=0)
    assert facts["tensors"][0]["name"] == EVIL  # nothing is lost
    assert facts["metadata"] == {EVIL: EVIL}
    shown("inspect", path, "--tensor", EVIL, code=0)
    assert not acting(show_tensor(path, EVIL).text())
    assert not acting(inspect_model(path)._repr_html_())


def test_a_model_with_a_tensor_too_many(tmp_path):
    folder = write_checkpoint(tmp_path, BITNET, tiny_tensors(BITNET) | {EVIL: np.ones((4, 4), np.float32)})
    shown("inspect", folder, code=3)
    shown("convert", folder, tmp_path / "o.gguf", "--to", "gguf-i2_s", code=3)
    shown("generate", "x", "--model", folder, code=3)
    with pytest.raises(BitNetRefError) as caught:
        bitnet_ref.load(folder)
    assert not acting(str(caught.value))


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": EVIL},
        {"hidden_act": EVIL},
        {"quantization_config": {"quant_method": EVIL}},
        {"rope_scaling": EVIL},
    ],
)
def test_a_config(tmp_path, change):
    folder = write_checkpoint(tmp_path, {**BITNET, **change}, tiny_tensors(BITNET))
    for args in (("inspect", folder), ("generate", "x", "--model", folder)):
        for more in ((), ("--json",)):
            result = invoke(*args, *more)
            assert result.exit_code == 3
            assert not acting(result.output), result.output


def test_a_trace(tmp_path):
    model = bitnet_ref.load(DATA / "native" / "tiny-v1.bitnet.safetensors", backend="numpy")
    path = tmp_path / "trace.safetensors"
    logits = model.logits([1, 2, 3])
    write_trace(path, {"logits": logits, EVIL: logits}, [1, 2, 3], engine=EVIL)
    page = tmp_path / "page.html"
    shown("crossval", "trace", model.path, path, "--html", page)
    assert not acting(page.read_text())
    write_html(page, EVIL, [cross_trace(model, path, causes=False)], {EVIL: EVIL})
    assert not acting(page.read_text().replace("proven", ""))
    with path.open("r+b") as file:
        file.truncate(300)
    assert not acting(invoke("crossval", "trace", model.path, path).output)


def test_a_gguf(tmp_path):
    from gguf import GGUFWriter

    path = tmp_path / "x.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_string(EVIL.replace("\n", ""), EVIL)
    writer.add_string("general.name", EVIL)
    writer.add_tensor("token_embd.weight", np.ones((4, 4), np.float32))
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    for args in (("inspect", path), ("inspect", path, "--json"), ("generate", "x", "--model", path)):
        assert not acting(invoke(*args).output)
