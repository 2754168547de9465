"""The recipes of CONTRIBUTING.md, carried out: their code is all that is added, and everything works with it."""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers import TINY, rng, tiny_tensors, write_checkpoint

import bitnet_ref
from bitnet_ref import families
from bitnet_ref.backends import choose_backend
from bitnet_ref.backends.cuda.backend import CupyBackend
from bitnet_ref.crossval.compare import compare
from bitnet_ref.crossval.explain.diagnose import diagnose
from bitnet_ref.crossval.explain.hypotheses import forward_hypotheses
from bitnet_ref.crossval.explain.variants import Setting
from bitnet_ref.crossval.names import op_order, op_shape
from bitnet_ref.crossval.paths import check_paths
from bitnet_ref.crossval.teacher import teacher_forced
from bitnet_ref.errors import BackendUnavailable, ConfigError
from bitnet_ref.formats.convert import convert
from bitnet_ref.formats.gguf.file import GgufFile
from bitnet_ref.inspection import inspect_model

ROOT = Path(__file__).resolve().parent.parent
# Code blocks whose first line says where the rest belongs: "# FILE", "# FILE, in NAME", "# FILE, before NAME"
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n# (\S+?)(?:, (in|before) (\S+))?\n(.*?)```", TEXT, re.DOTALL)
TOY = {**TINY, "model_type": "toy", "ffn_factor": 0.5, "tie_word_embeddings": False}
TOKENS = [1, 17, 5, 23, 9, 32, 3, 3]


# -- a model family, from outside the package --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """The family's module of the recipe, registered while this file's tests run."""
    (code,) = [code for path, how, _, code in BLOCKS if path.endswith("families/toy.py") and not how]
    path = tmp_path_factory.mktemp("recipe") / "toy.py"
    path.write_text(code)
    spec = importlib.util.spec_from_file_location("toy", path)
    module = sys.modules["toy"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    before = dict(families.FAMILIES)
    bitnet_ref.load("storyteller", backend="numpy")  # tables of families are made before this one comes
    families.register(module.FAMILIES[0])
    yield module
    families.FAMILIES.clear()
    families.FAMILIES.update(before)
    families.register(before["llama"])
    del sys.modules["toy"]


@pytest.fixture(scope="module")
def folder(toy, tmp_path_factory):
    """A checkpoint of the family."""
    tensors = tiny_tensors(TOY)
    for layer in range(TOY["num_hidden_layers"]):
        norm = 1 + rng(layer).standard_normal(TOY["hidden_size"]) / 8
        tensors[f"model.layers.{layer}.self_attn.result_norm.weight"] = norm.astype(ml_dtypes.bfloat16)
    return write_checkpoint(tmp_path_factory.mktemp("toy") / "hf", TOY, tensors)


@pytest.fixture(scope="module")
def m(folder):
    return bitnet_ref.load(folder, backend="numpy")


def test_the_family_is_computed_as_its_text_says(m, folder):
    assert (m.config.ffn_factor, type(m.config).__name__) == (0.5, "ToyConfig")
    logits, seen = m.run_with_cache(TOKENS)
    np.testing.assert_allclose(bitnet_ref.load(folder, backend="cython").logits(TOKENS), logits, rtol=0, atol=2e-5)
    y, w = seen["blocks.1.attn.o_proj.hook_out"], m.weights.layers[1].result_norm
    normed = y / np.sqrt(np.square(y).mean(axis=1, keepdims=True) + w.eps) * w.weight
    np.testing.assert_allclose(seen["blocks.1.hook_attn_out"], normed, rtol=1e-5)
    np.testing.assert_array_equal(
        seen["blocks.1.hook_mlp_out"], seen["blocks.1.mlp.down_proj.hook_out"] * np.float32(0.5)
    )
    np.testing.assert_array_equal(
        seen["blocks.1.hook_resid_mid"], seen["blocks.1.hook_resid_pre"] + seen["blocks.1.hook_attn_out"]
    )


def test_a_prepared_copy_of_the_family(folder, m):
    """Stored beside the model, then read: the family's layers and norms are in it."""
    stored, again = (bitnet_ref.load(folder, backend="cython", prepared=True) for _ in range(2))
    assert type(again.weights.layers[0]).__name__ == "ToyLayer"
    assert again.generate(TOKENS, max_tokens=8).token_ids == m.generate(TOKENS, max_tokens=8).token_ids
    np.testing.assert_array_equal(again.logits(TOKENS), stored.logits(TOKENS))


def test_a_trace_has_the_familys_steps(m):
    _, seen = m.run_with_cache(TOKENS)
    order = [name for name in op_order(m.config) if not name.endswith(("hook_x_rotated", "hook_lora"))]
    assert list(seen) == order
    assert "blocks.0.attn.result_norm.hook_normalized" in order
    for name, array in seen.items():
        assert array.shape == op_shape(name, m.config, len(TOKENS)), name


@pytest.mark.parametrize(
    ("target", "name"), [("native", "x.bitnet.safetensors"), ("hf-bf16", "x"), ("gguf-f32", "x.gguf")]
)
def test_the_family_in_files(target, name, folder, m, tmp_path):
    assert convert(folder, tmp_path / name, target).exact
    again = bitnet_ref.load(tmp_path / name, backend="numpy")
    assert again.config == m.config
    np.testing.assert_array_equal(again.logits(TOKENS), m.logits(TOKENS))
    found = inspect_model(tmp_path / name)
    assert found.errors == []
    assert (
        found.parameters
        == inspect_model(folder).parameters
        == sum(np.prod(a.shape) for a in tiny_tensors(TOY).values()) + 32
    )
    if target == "gguf-f32":
        with GgufFile(tmp_path / name) as file:
            assert file.metadata["general.architecture"] == "toy"
            assert file.metadata["toy.ffn_factor"] == 0.5
            assert "blk.1.attn_result_norm.weight" in file.tensors


@pytest.mark.sample(2)
@pytest.mark.parametrize("backend", ["numpy", "cython"])
def test_the_family_on_every_path(backend, m):
    checks = list(check_paths(partial(choose_backend, backend, threads=2), m, TOKENS))
    assert len(checks) > 12
    assert [(each.path, each.detail) for each in checks if not each.passed] == []


def test_each_op_of_the_family(m, folder):
    comparison = teacher_forced(m, bitnet_ref.load(folder, backend="cython"), TOKENS)
    assert {op.status for op in comparison.ops} == {"ok"}
    assert "blocks.1.attn.result_norm.hook_normalized" in {op.name for op in comparison.ops}


def test_the_familys_own_mistake_is_named(m):
    setting = Setting.of(m, TOKENS)
    (mistake,) = [each for each in forward_hypotheses(setting, {}) if each.name == "ffn_factor_missing"]
    candidate = mistake.change(setting).run()
    comparison = compare(m.run_with_cache(TOKENS)[1], candidate, m.config, TOKENS)
    assert comparison.first_divergence.name == "blocks.0.hook_mlp_out"
    diagnoses = diagnose(m, TOKENS, candidate, comparison, depth=1)
    assert "ffn_factor_missing" in {each.name for each in diagnoses if each.confirmed}


def test_a_backend_without_its_kernels_refuses_the_family(m):
    with pytest.raises(BackendUnavailable, match="scaled results of toy"):
        CupyBackend.check_config(m.backend, m.config)


def test_a_family_that_is_not_registered_is_refused(folder, toy, monkeypatch):
    monkeypatch.delitem(families.FAMILIES, "toy")
    with pytest.raises(ConfigError, match="toy"):
        bitnet_ref.load(folder, backend="numpy")


# -- edits of the package, in a copy -----------------------------------------------------------------------------------


def edited(code: str, how: str, name: str, more: str) -> str:
    """The code of a module with more lines: before a statement, at the end of a table or class, before a function's
    return."""
    lines, body, found = code.splitlines(), ast.parse(code).body, None
    for part in name.split("."):
        found = next(each for each in body if part in names_of(each))
        body = getattr(found, "body", [])
    if how == "before":
        at = min([found.lineno, *(each.lineno for each in getattr(found, "decorator_list", []))]) - 1
    elif isinstance(found, ast.FunctionDef):
        at = next(each.lineno for each in body if isinstance(each, ast.Return)) - 1
    elif isinstance(found, ast.ClassDef):
        at = max(each.end_lineno for each in body if isinstance(each, ast.AnnAssign))
    else:
        at = found.end_lineno - 1
    return "\n".join([*lines[:at], *more.splitlines(), *lines[at:], ""])


def names_of(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    target = getattr(statement, "target", None)
    return [getattr(target, "id", None) or getattr(statement, "name", "")]


EDITS = {
    "activation": ["reference/layers.py"],
    "sampling_rule": ["generation/params.py", "generation/processors.py"],
    "gguf_type": ["families/blocks.py"],
}


def test_every_code_block_is_carried_out():
    files = [f"bitnet_ref/{file}" for files in EDITS.values() for file in files]
    assert {where for where, *_ in BLOCKS} == {"bitnet_ref/families/toy.py", *files}
    assert len(BLOCKS) == TEXT.count("```python")


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", EDITS)
def test_an_edit_of_the_package(recipe, tmp_path):
    """recipe_checks.py runs in a copy of the package that has the recipe's lines, and no others."""
    shutil.copytree(ROOT / "bitnet_ref", tmp_path / "bitnet_ref")
    for file in EDITS[recipe]:
        path = tmp_path / "bitnet_ref" / file
        edits = [(how, name, code) for where, how, name, code in BLOCKS if where == f"bitnet_ref/{file}"]
        assert edits, file
        for edit in edits:
            path.write_text(edited(path.read_text(), *edit))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "tests")])}
    command = [sys.executable, str(ROOT / "tests" / "recipe_checks.py"), recipe, str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].split() == [recipe, str(tmp_path / "bitnet_ref")]
