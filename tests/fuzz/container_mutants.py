"""Mutants of models as other people's tools wrote them: tests/data/containers, families, an adapter. Some families as
GGUF files too."""

from __future__ import annotations

import atexit
import json
import random
import shutil
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from gguf_mutants import change_gguf, change_numbers
from helpers import DATA, divide_experts
from json_mutants import flip_bytes, insert_bytes, mutate_json, mutate_safetensors, truncate
from safetensors.numpy import save_file

from bitnet_ref.formats.convert import convert

CASES = [
    *sorted((DATA / "containers").iterdir()),
    *(DATA / "families" / name for name in ("maple", "qwen3_moe-groups128", "mixtral-groups128", "olmo2", "granite")),
    DATA / "adapters" / "beside",
]
WRITTEN = tempfile.TemporaryDirectory()  # GGUF files, made when they are first drawn
atexit.register(WRITTEN.cleanup)
CASES += [Path(WRITTEN.name) / name for name in ("mixtral-groups128", "olmo2", "granite", "awq")]
NOT_OF_THE_MODEL = ("case.json", "golden.safetensors")


def write_awq(folder: Path) -> None:
    """A model of random numbers as AutoAWQ writes it."""
    draw, hidden, group = np.random.default_rng(1), 16, 8
    sizes = {"hidden_size": hidden, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    quantization = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    config = {**sizes, "model_type": "llama", "vocab_size": 40, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    config |= {"max_position_embeddings": 64, "tie_word_embeddings": True, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    half = partial(np.asarray, dtype=np.float16)
    tensors = {
        "model.embed_tokens.weight": half(draw.standard_normal((40, hidden))),
        "model.norm.weight": half([1.0] * 16),
    }
    tensors |= {f"model.layers.0.{name}_layernorm.weight": half([1.0] * 16) for name in ("input", "post_attention")}
    linears = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
    linears |= {"mlp.gate_proj": (24, hidden), "mlp.up_proj": (24, hidden), "mlp.down_proj": (hidden, 24)}
    for name, (n, k) in linears.items():
        words = draw.integers(-(2**31), 2**31, (k + k // group, n // 8), dtype=np.int32)
        tensors[f"model.layers.0.{name}.qweight"], tensors[f"model.layers.0.{name}.qzeros"] = words[:k], words[k:]
        tensors[f"model.layers.0.{name}.scales"] = half(draw.uniform(0.01, 0.1, (k // group, n)))
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")


def copy_container(folder: Path, dice: random.Random) -> Path:
    case = dice.choice(CASES)
    if case.parent == Path(WRITTEN.name) and not case.exists():
        case.mkdir()
        if case.name == "awq":
            write_awq(case)
    if case.parent == Path(WRITTEN.name) and not list(case.iterdir()):
        convert(DATA / "families" / case.name, case / "model.gguf", "gguf-f32")
        if dice.random() < 0.5 and case.name.startswith("mixtral"):
            divide_experts(case / "model.gguf", case / "divided")
            (case / "divided").replace(case / "model.gguf")
    for file in case.iterdir():
        if file.name not in NOT_OF_THE_MODEL:
            shutil.copy(file, folder / file.name)
    facts = case / "case.json"
    return folder / json.loads(facts.read_text())["path"] if facts.is_file() else folder


def mutate_container(dice: random.Random, folder: Path) -> Path:
    path = copy_container(folder, dice)
    files = sorted(folder.iterdir())
    for file in dice.sample(files, min(len(files), dice.choice([1, 1, 1, 2]))):
        data = file.read_bytes()
        if file.suffix == ".json":
            file.write_bytes(mutate_json(dice, data))
        elif file.suffix == ".safetensors":
            file.write_bytes(mutate_safetensors(dice, data))
        elif dice.randrange(3) == 0 and b"split.no" not in data[:4000]:
            change_gguf(dice, file)
        elif dice.randrange(2):
            file.write_bytes(change_numbers(dice, data))
        else:
            change = dice.choice([flip_bytes, truncate, insert_bytes])
            file.write_bytes(change(dice, data[:3000]) + data[3000:])
    return path
