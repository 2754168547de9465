"""bitnet-ref inspect: what is said of a file."""

import json
import re
import shutil

import numpy as np
import pytest
from cli_runs import invoke, invoke_json
from click.testing import CliRunner
from helpers import BITNET, DATA, GOLDEN, tiny_tensors, write_checkpoint
from safetensors.numpy import load_file, save_file

from bitnet_ref.cli import cli
from bitnet_ref.formats.open import ASSETS
from bitnet_ref.inspection import inspect_model


def test_inspect_shows_the_facts():
    result = invoke("inspect", "storyteller")
    assert result.exit_code == 0
    for words in (
        "2B-4T",
        "5,776,640",
        "multiply by it",
        "relu2",
        "RoPE theta 10000",
        "256 tokens",
        "down_proj",
        "63.6%",
    ):
        assert words in result.stdout
    assert result.stdout.endswith("Nothing odd about it.\n")
    assert not any(line.endswith(" ") for line in result.stdout.splitlines())


@pytest.mark.parametrize("columns", [80, 120])
def test_inspect_fits_the_width(columns):
    result = CliRunner().invoke(cli, ["inspect", str(GOLDEN / "bitnet-packed-offline")], env={"COLUMNS": str(columns)})
    lines = result.stdout.splitlines()
    assert all(len(line) <= columns for line in lines[1:])  # the first is the path, which is never cut
    assert not any("…" in line for line in lines)
    assert sum(line.startswith(("q_proj", "down_proj")) for line in lines) == 2


def test_inspect_json_equals_the_library():
    found = inspect_model("storyteller")
    assert invoke_json("inspect", "storyteller") == json.loads(json.dumps(found.to_dict()))


def test_inspect_of_a_broken_model(tmp_path):
    tensors = tiny_tensors(BITNET)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 3] = 0xFF
    folder = write_checkpoint(tmp_path / "m", BITNET, tensors)
    result = invoke("inspect", folder)
    assert result.exit_code == 3
    assert "model.layers.1.mlp.up_proj.weight: holds the invalid ternary code 3" in " ".join(result.stdout.split())
    assert "gate_proj" in result.stdout
    facts = invoke_json("inspect", folder, code=3)
    assert facts["findings"][0]["severity"] == "error"


def test_inspect_of_a_file_that_is_cut_off_and_of_no_model(tmp_path):
    file = tmp_path / "cut.gguf"
    whole = (DATA / "gguf" / "i2_s.gguf").read_bytes()
    file.write_bytes(whole[:-100])
    result = invoke("inspect", file)
    assert result.exit_code == 3
    assert result.stdout.splitlines()[1] == "A model of which a part is missing: a file is cut off"
    text = " ".join(result.stdout.split())
    assert f"the file is cut off ({len(whole) - 100:,} of {len(whole):,} bytes): download it again; " in text
    assert "tokenizer" not in text
    (tmp_path / "empty").mkdir()
    assert invoke("inspect", tmp_path / "empty").stdout.splitlines()[1] == "No model that can be read"
    assert json.loads(invoke("inspect", tmp_path / "empty", "--json").stdout)["format"] is None


def test_inspect_shows_a_fault_of_many_tensors_once(tmp_path):
    tensors = {name: a for name, a in tiny_tensors(BITNET).items() if not name.endswith("weight_scale")}
    result = invoke("inspect", write_checkpoint(tmp_path / "m", BITNET, tensors))
    (line,) = [line for line in result.stdout.split("error: ") if "the tensor is missing" in line]
    assert " ".join(line.split()).startswith("14 tensors: the tensor is missing; expected BF16 or F16 or F32")
    assert "first model.safetensors, model.layers.0.self_attn.q_proj.weight_scale" in " ".join(line.split())


def test_inspect_lists_a_plain_file(tmp_path):
    file = tmp_path / "plain.safetensors"
    shutil.copy(GOLDEN / "llama-dense" / "golden.safetensors", file)
    result = invoke("inspect", file)
    assert result.exit_code == 0
    for words in ("without a config.json", "logits64", "F64", "tokens", "I32"):
        assert words in result.stdout
    assert invoke_json("inspect", file)["header_only"] is True
    save_file({"a": np.zeros(1, np.float32)}, file, {"a key": "long " * 99})
    assert re.search(r"\na key: (long )+lo…\n\n", invoke("inspect", file).stdout)  # in one line


def test_inspect_of_a_gguf():
    path = DATA / "gguf" / "i2_s.gguf"
    result = invoke("inspect", path)
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    for words in (
        "GGUF version 3, architecture bitnet-b1.58",
        "dialect: bitnet.cpp",
        "I2_S layout: x86 assumed",
        "the architecture bitnet-b1.58 means it",
        "--i2s-layout",
    ):
        assert words in text
    facts = invoke_json("inspect", path, "--i2s-layout", "x86")
    assert (facts["kind"], facts["architecture"], len(facts["ternary"])) == ("gguf-i2_s", "bitnet-b1.58", 14)
    assert facts["evidence"][1] == "I2_S layout: x86, as it was asked for"


def test_inspect_one_tensor():
    result = invoke("inspect", "storyteller", "--tensor", "blocks.2.mlp.down_proj")
    assert result.exit_code == 0
    packed = load_file(ASSETS / "storyteller" / "model.safetensors")["model.layers.2.mlp.down_proj.weight"]
    codes = packed[..., None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
    minus, zero, _ = np.bincount(codes.ravel()) / codes.size
    shares = f"-1: {minus:.1%}, 0: {zero:.1%}"
    assert result.stdout.startswith(f"blocks.2.mlp.down_proj: 256 x 768, ternary (hf-packed)\n{shares}")
    facts = invoke_json("inspect", "storyteller", "--tensor", "model.layers.2.mlp.down_proj.weight")
    assert facts["name"] == "blocks.2.mlp.down_proj"
    assert sum(facts["shares"]) == pytest.approx(1)
    assert [(rows["from"], rows["to"]) for rows in facts["rows"]][-1] == (224, 256)


def test_a_long_name_of_a_tensor_is_one_line(tmp_path):
    save_file({"long." * 50: np.zeros(3, np.float32)}, tmp_path / "m.safetensors")
    result = invoke("inspect", tmp_path / "m.safetensors", "--tensor", "long." * 50)
    assert result.stdout.startswith(f"{'long.' * 50}: 3, F32, as stored\n")


def test_inspect_no_such_tensor():
    result = invoke("inspect", "storyteller", "--tensor", "blocks.2.mlp.down_prj")
    assert result.exit_code == 2
    assert "near it are" in result.stderr
    assert "blocks.2.mlp.down_proj" in result.stderr


def test_inspect_says_once_what_layers_have_in_common(tmp_path):
    """A file without a config.json beside it: 2 layers of 9 tensors, on 9 lines."""
    folder = write_checkpoint(tmp_path / "m", BITNET, tiny_tensors(BITNET))
    (folder / "config.json").unlink()
    lines = invoke("inspect", folder / "model.safetensors").stdout.splitlines()
    assert sum("q_proj.weight " in line for line in lines) == 1
    assert any(line.startswith("model.layers.*.self_attn.q_proj.weight  ") and " 2 " in line for line in lines)
