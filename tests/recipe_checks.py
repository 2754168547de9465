"""What must hold after each recipe of CONTRIBUTING.md that edits the package; test_recipes.py runs it in a copy.

python recipe_checks.py RECIPE FOLDER
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers import TINY, tiny_tensors, write_checkpoint

import bitnet_ref
from bitnet_ref.backends import choose_backend
from bitnet_ref.cli import cli, main
from bitnet_ref.crossval.compare import compare
from bitnet_ref.crossval.explain.diagnose import diagnose
from bitnet_ref.crossval.explain.variants import Setting
from bitnet_ref.crossval.paths import check_paths
from bitnet_ref.errors import ConfigError, GenerationError
from bitnet_ref.formats.convert import convert
from bitnet_ref.formats.gguf.blocks import dequantize
from bitnet_ref.formats.gguf.export import TensorToWrite, write_gguf
from bitnet_ref.formats.gguf.file import GgufFile
from bitnet_ref.inspection import inspect_model
from bitnet_ref.serving.http.schemas import SAMPLING

TOKENS = [1, 17, 5, 23, 9, 32, 3, 3]


def shell(*arguments: str) -> None:
    """Run `bitnet-ref`, which must exit with 0."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code in (0, None), arguments


def every_path(backend: str, m: bitnet_ref.Model) -> None:
    """Whole prompts, pieces, batches, decoding: what `crossval backends` compares."""
    checks = list(check_paths(partial(choose_backend, backend, threads=2), m, TOKENS))
    wrong = [(each.path, each.detail) for each in checks if not each.passed]
    assert not wrong, wrong


def activation(folder: Path) -> None:
    """relu: a checkpoint loads and computes, is written and read, traced and explained."""
    hf = write_checkpoint(folder / "hf", {**TINY, "hidden_act": "relu"})
    m, fast = (bitnet_ref.load(hf, backend=backend) for backend in ("numpy", "cython"))
    logits, seen = m.run_with_cache(TOKENS)
    gate, up = (seen[f"blocks.0.mlp.hook_pre{part}"] for part in ("", "_linear"))
    np.testing.assert_array_equal(seen["blocks.0.mlp.hook_post"], np.maximum(gate, 0) * up)
    np.testing.assert_allclose(fast.logits(TOKENS), logits, rtol=0, atol=2e-5)
    every_path("cython", m)
    for target, name in (("native", "x.bitnet.safetensors"), ("hf-bf16", "x")):
        convert(hf, folder / name, target)
        again = bitnet_ref.load(folder / name, backend="numpy")
        assert again.config == m.config
        np.testing.assert_array_equal(again.logits(TOKENS), logits)
    with pytest.raises(ConfigError):  # an engine that knows the architecture alone would compute silu
        convert(hf, folder / "x.gguf", "gguf-f32")
    assert "relu" in inspect_model(hf).activation
    file, ids = str(folder / "t.safetensors"), "1,17,5,23"
    shell("crossval", "record", str(hf), file, "--tokens", ids, "--backend", "cython")
    shell("crossval", "trace", str(hf), file)
    for wrong in ("silu", "relu2"):
        setting = Setting.of(m, TOKENS)
        candidate = replace(setting, config=replace(m.config, activation=wrong)).run()
        comparison = compare(seen, candidate, m.config, TOKENS)
        assert comparison.first_divergence.name == "blocks.0.mlp.hook_post"
        first = diagnose(m, TOKENS, candidate, comparison, depth=1)[0]
        assert first.confirmed
        assert "relu belongs" in first.cause, first.cause


def sampling_rule(folder: Path) -> None:
    """no_repeat: read and checked as every parameter, in the shell and over HTTP too, and the same on every head and in
    the engine."""
    m = bitnet_ref.load("storyteller", backend="cython")
    options = {"max_tokens": 40, "ignore_eos": True}
    ids = m.generate("Once upon a time", no_repeat=8, **options).token_ids
    assert all(token not in ids[max(0, i - 8) : i] for i, token in enumerate(ids))
    free = m.generate("Once upon a time", **options).token_ids
    assert any(token in free[max(0, i - 8) : i] for i, token in enumerate(free))
    exact = bitnet_ref.load("storyteller", backend="numpy", head="exact")
    assert exact.generate("Once upon a time", no_repeat=8, **options).token_ids == ids
    with m.engine(max_batch=2) as engine:
        assert engine.generate(["Once upon a time"], no_repeat=8, **options)[0].token_ids == ids
    with pytest.raises(GenerationError, match="no_repeat"):
        m.generate("Once", no_repeat=-1)
    assert "no_repeat" in str(bitnet_ref.Model.generate.__signature__)
    assert "no_repeat" in {param.name for param in cli.commands["generate"].params}
    assert SAMPLING["no_repeat"]["minimum"] == 0


def gguf_type(folder: Path) -> None:
    """Q5_1: matrices stay in blocks, and have the values that the package `gguf` gives."""
    from gguf import GGMLQuantizationType, quants

    kind = GGMLQuantizationType.Q5_1
    config = {**TINY, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
    hf = write_checkpoint(folder / "hf", config, tiny_tensors(config))
    convert(hf, folder / "f32.gguf", "gguf-f32")
    narrow, wide = [], []
    with GgufFile(folder / "f32.gguf") as file:
        for name, tensor in file.tensors.items():
            raw = file.read_raw(name)
            in_blocks = raw
            if len(tensor.shape) == 2:
                rows = quants.quantize(file.read(name), kind)
                values = dequantize(rows.reshape(-1), "Q5_1", tensor.shape)
                np.testing.assert_array_equal(values, quants.dequantize(rows, kind))
                in_blocks, raw = rows.reshape(-1), values.reshape(-1).view(np.uint8)
            stored_as = "F32" if in_blocks is raw else "Q5_1"
            for tensors, data, its_type in ((narrow, in_blocks, stored_as), (wide, raw, "F32")):
                tensors.append(TensorToWrite(name, tensor.shape, its_type, partial(np.asarray, data), data.nbytes))
        write_gguf(folder / "q5_1.gguf", file.typed, narrow)
        write_gguf(folder / "wide.gguf", file.typed, wide)
    expected = bitnet_ref.load(folder / "wide.gguf", backend="numpy").logits(TOKENS)
    for backend in ("numpy", "cython"):
        m = bitnet_ref.load(folder / "q5_1.gguf", backend=backend)
        assert {weight.block_type for _, weight in m.weights.linears()} == {"Q5_1"}
        np.testing.assert_allclose(m.logits(TOKENS), expected, rtol=0, atol=2e-5)
        every_path(backend, bitnet_ref.load(folder / "q5_1.gguf", backend="numpy"))
    assert inspect_model(folder / "q5_1.gguf").errors == []


if __name__ == "__main__":
    recipe = sys.argv[1]
    {"activation": activation, "sampling_rule": sampling_rule, "gguf_type": gguf_type}[recipe](Path(sys.argv[2]))
    print(recipe, Path(bitnet_ref.__file__).parent)
