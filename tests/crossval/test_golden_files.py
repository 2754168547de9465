"""`bitnet-ref golden`: every file that it writes gives the logits beside it, and no other rule's."""

import ast
import json
import os
import re
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest
from cli_runs import invoke_json
from helpers import rng
from safetensors.numpy import load_file

import bitnet_ref
from bitnet_ref.crossval import golden
from bitnet_ref.formats.convert import TARGETS

PYTHON = os.environ.get("BITNET_REF_ENGINES_PYTHON") or None
NAMES = [(tiny.name, target) for tiny in golden.MODELS for target in tiny.targets]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("golden") / "golden-files"
    told = invoke_json("golden", path)
    assert [(file["model"], file["target"]) for file in told["files"]] == NAMES
    return path


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "target"), NAMES)
def test_a_file_gives_its_logits(name, target, folder):
    facts = json.loads((folder / "files.json").read_text())
    file = next(each for each in facts["files"] if (each["model"], each["target"]) == (name, target))
    expected = load_file(folder / name / "expected.safetensors")
    tokens, path = expected.pop("tokens"), folder / file["path"]
    tiles = path.with_suffix(".ini")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "PQ2_0 and PTQ1_0 planes without keys|.*taken as not rotated")
        m = bitnet_ref.load(path, backend="numpy", tl_tiles=tiles if tiles.is_file() else None)
    logits = m.logits(tokens)
    for rule, values in expected.items():
        away = np.abs(logits - values).max()
        assert away < 1e-5 if rule in ("logits", "logits64") else away > 50 * facts["tolerance"], rule
    assert np.abs(expected["logits"] - expected["logits64"]).max() > 0
    assert golden.rounding_margin(m, tokens) > 0.9e-5


@pytest.mark.thorough
def test_every_type_and_container_is_there_and_small(folder):
    assert {target for _, target in NAMES} == {*TARGETS}
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 5e6
    rules = {tiny.name: {*load_file(folder / tiny.name / "expected.safetensors")} for tiny in golden.MODELS}
    plain = {"tokens", "logits", "logits64"}
    assert rules == {
        "bitnet": plain | {"logits_int8_by_256", "logits_float"},
        "llama-bitnet": plain | {"logits_float"},
        "groups": plain | {"logits_int8_by_32"},
        "sherry": plain | {"logits_int8_by_32", "logits_int8_by_256"},
        "binary": plain | {"logits_int8_by_32"},
        "dense": plain,
    }
    explained = (folder / "README.md").read_text(encoding="utf-8")
    assert all(rule in explained for rule in {each for rules_of in rules.values() for each in rules_of})


@pytest.mark.thorough
def test_the_bytes_are_the_same_each_time(folder, tmp_path, monkeypatch):
    small = [tiny for tiny in golden.MODELS if tiny.name in ("llama-bitnet", "binary")]
    monkeypatch.setattr(golden, "MODELS", small)
    golden.write_golden(tmp_path / "again")
    for tiny in small:
        files = [path.relative_to(folder) for path in (folder / tiny.name).rglob("*") if path.is_file()]
        assert len(files) > len(tiny.targets)
        for path in files:
            assert (tmp_path / "again" / path).read_bytes() == (folder / path).read_bytes(), path


def test_inputs_are_rounded_as_ggml_rounds_them():
    x = rng(9).standard_normal((3, 512)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    theirs = gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind)
    np.testing.assert_array_equal(golden.BlockInputs(32).round_inputs(x), theirs)
    x[0, 256:] = 0
    by_256 = golden.BlockInputs(256).round_inputs(x)
    assert not by_256[0, 256:].any()
    step = np.abs(x.reshape(3, 2, 256)).max(axis=2, keepdims=True) / 127
    assert (np.abs(by_256 - x).reshape(3, 2, 256) <= step * 0.501).all()


@pytest.mark.thorough
def test_the_guide_is_true(folder, monkeypatch, capsys):
    """docs/crossval.md: its example runs, and its table names the models."""
    guide = (Path(__file__).parents[2] / "docs" / "crossval.md").read_text(encoding="utf-8")
    guide = guide.partition("## Golden files for a kernel of your own")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", guide, flags=re.DOTALL)
    monkeypatch.chdir(folder.parent)
    exec(compile(code, "crossval.md", "exec"), {})
    distances = ast.literal_eval(capsys.readouterr().out)
    assert min(distances, key=distances.get) in ("logits", "logits64")
    assert re.findall(r"^\| `([a-z-]+)` \|", guide, flags=re.MULTILINE) == [tiny.name for tiny in golden.MODELS]


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None and find_spec("llama_cpp") is None, reason="needs llama-cpp-python")
def test_llama_cpp_gives_these_logits(folder, tmp_path):
    """By the rule for activations that it has for each type. Its head is in float16 where the embedding is."""
    cases = {
        "groups/gguf-q2_0": ("logits_int8_by_32", 1e-5),
        "binary/gguf-q1_0": ("logits_int8_by_32", 1e-5),
        "sherry/gguf-tq1_0": ("logits_int8_by_256", 3e-3),
        "sherry/gguf-tq2_0": ("logits_int8_by_256", 3e-3),
        "dense/gguf-f32": ("logits", 1e-5),
        "dense/gguf-f16": ("logits", 3e-3),
        "llama-bitnet/gguf-f16": ("logits_float", 3e-3),
    }
    expected = {name: load_file(folder / name.partition("/")[0] / "expected.safetensors") for name in cases}
    jobs = []
    for number, name in enumerate(cases):
        config = bitnet_ref.read_config(folder / f"{name}.gguf")
        heads = [config.num_attention_heads, config.num_key_value_heads]
        facts = {"model": str(folder / f"{name}.gguf"), "tokens": expected[name]["tokens"].tolist(), "heads": heads}
        interleaved = config.model_type == "llama"
        jobs.append({**facts, "out": str(tmp_path / str(number)), "interleaved": interleaved, "long_names": []})
    recorder = Path(bitnet_ref.__file__).parent / "crossval" / "engines" / "recorders" / "record_llama_cpp.py"
    asked, command = json.dumps(jobs), [PYTHON or sys.executable, str(recorder)]
    subprocess.run(command, input=asked, text=True, check=True, capture_output=True, timeout=300)
    for number, (name, (rule, tolerance)) in enumerate(cases.items()):
        logits = load_file(tmp_path / str(number))["lm_head.hook_out"]
        np.testing.assert_allclose(logits, expected[name][rule], rtol=0, atol=tolerance, err_msg=name)
