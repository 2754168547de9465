"""Mutants of models as other people's tools wrote them: tests/data/containers, families, an adapter. Some families as
GGUF files too."""

from __future__ import annotations

import atexit
import json
import random
import shutil
import tempfile
from pathlib import Path

from gguf_mutants import change_gguf, change_numbers
from helpers import DATA, divide_experts
from json_mutants import flip_bytes, insert_bytes, mutate_json, mutate_safetensors, truncate

from bitnet_ref.formats.convert import convert

CASES = [
    *sorted((DATA / "containers").iterdir()),
    *(DATA / "families" / name for name in ("maple", "qwen3_moe-groups128", "mixtral-groups128", "olmo2", "granite")),
    DATA / "adapters" / "beside",
]
WRITTEN = tempfile.TemporaryDirectory()  # GGUF files, made when they are first drawn
atexit.register(WRITTEN.cleanup)
CASES += [Path(WRITTEN.name) / name for name in ("mixtral-groups128", "olmo2", "granite")]
NOT_OF_THE_MODEL = ("case.json", "golden.safetensors")


def copy_container(folder: Path, dice: random.Random) -> Path:
    case = dice.choice(CASES)
    if case.parent == Path(WRITTEN.name) and not case.exists():
        case.mkdir()
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
