"""Small checkpoints, folders and native files, and mutations of them; the shipped tokenizer, and mutations of it."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from helpers import BITNET, TINY, tiny_tensors, write_checkpoint, write_shards
from json_mutants import cut_out, dump, flip_bytes, insert_bytes, mutate_json, mutate_safetensors, truncate

import bitnet_ref
from bitnet_ref.formats.native.model import write_native
from bitnet_ref.formats.open import open_checkpoint

ASSETS = Path(bitnet_ref.__file__).parent / "assets" / "storyteller"
_BASES: dict[Any, dict[str, bytes]] = {}


def base(folder: Path, key: Any, make: Callable[[Path], None]) -> None:
    """The files that `make` writes into an empty folder, here; made once for each key."""
    if key not in _BASES:
        with tempfile.TemporaryDirectory() as name:
            make(Path(name))
            _BASES[key] = {path.name: path.read_bytes() for path in Path(name).iterdir() if path.is_file()}
    for name, data in _BASES[key].items():
        (folder / name).write_bytes(data)


def write_base(folder: Path, dice: random.Random, sharded: bool) -> None:
    kind, head_dim = dice.randrange(3), dice.choice([4, 8])
    scaling = dice.choice([None, {"type": "dynamic", "factor": 2.0}, {"type": "yarn", "factor": 4.0}])

    def make(folder: Path) -> None:
        if kind == 0:
            config, tensors = BITNET, tiny_tensors(BITNET)
        elif kind == 1:
            config = {**TINY, "rope_scaling": scaling, "head_dim": head_dim}
            tensors = tiny_tensors(config)
        else:  # 1bitLLM: master weights
            config = {**TINY, "weight_bits": 1, "input_bits": 8}
            tensors = tiny_tensors(config, np.float16)
            for i in range(2):
                tensors[f"model.layers.{i}.self_attn.inner_attn_ln.weight"] = np.ones(16, np.float16)
                tensors[f"model.layers.{i}.mlp.ffn_layernorm.weight"] = np.ones(24, np.float16)
        if not sharded:
            write_checkpoint(folder, config, tensors)
            return
        names = sorted(tensors)
        halves = {f"model-{i}.safetensors": {name: tensors[name] for name in names[i::2]} for i in (0, 1)}
        write_shards(folder, config, halves)

    base(folder, (sharded, kind, (head_dim, str(scaling)) if kind == 1 else None), make)


def mutate_checkpoint(kind: str, dice: random.Random, folder: Path) -> None:
    write_base(folder, dice, sharded=kind == "index")
    file = {"config": "config.json", "weights": "model.safetensors", "index": "model.safetensors.index.json"}[kind]
    mutate = mutate_safetensors if kind == "weights" else mutate_json
    (folder / file).write_bytes(mutate(dice, (folder / file).read_bytes()))


def write_native_base(folder: Path, dice: random.Random) -> Path:
    """A native file of one of the base checkpoints."""
    path = folder / "model.bitnet.safetensors"
    number, storage = dice.randrange(8), dice.choice(["2bit", "base3"])

    def make(folder: Path) -> None:
        (folder / "source").mkdir()
        write_base(folder / "source", random.Random(number), sharded=False)
        (folder / "source" / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
        with open_checkpoint(folder / "source") as checkpoint:
            write_native(checkpoint, folder / path.name, storage=storage)

    base(folder, ("native", number, storage), make)
    return path


def mutate_native(dice: random.Random, folder: Path) -> Path:
    """Mutated as a safetensors file, or in the JSON of its config."""
    path = write_native_base(folder, dice)
    data = path.read_bytes()
    if dice.randrange(3):
        path.write_bytes(mutate_safetensors(dice, data))
        return path
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    metadata = header["__metadata__"]
    key = dice.choice(["config", "config", "config", "format_version", "format", "content_hash"])
    mutate = mutate_json if key == "config" else dice.choice([flip_bytes, truncate, insert_bytes])
    metadata[key] = mutate(dice, metadata[key].encode()).decode("latin-1")
    text = dump(dice, header)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return path


def copy_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.model", "tokenizer_config.json", "config.json", "generation_config.json"):
        shutil.copy(ASSETS / name, folder / name)


def mutate_tokenizer(dice: random.Random, folder: Path) -> None:
    copy_tokenizer(folder)
    if dice.randrange(2):
        path, mutate = folder / "tokenizer_config.json", mutate_json
    else:
        path, mutate = folder / "tokenizer.model", dice.choice([flip_bytes, truncate, insert_bytes, cut_out])
    path.write_bytes(mutate(dice, path.read_bytes()))
