"""Coverage-guided fuzzing of the safetensors reader, as folders and native files; see atheris_target.py.

An input that says it is a native file is read as one. Any other is model.safetensors beside the config.json of a small
BitNet; the files of other models are seeds too.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

from atheris_target import files_of, fuzz
from checkpoint_mutants import write_base, write_native_base
from helpers import BITNET, DATA, GOLDEN
from json_mutants import mutate_safetensors

from bitnet_ref.formats.native.model import FORMAT


def write_seed(dice: random.Random, folder: Path) -> Path:
    write_base(folder, dice, sharded=False)
    return folder / "model.safetensors"


def write_native_seed(dice: random.Random, folder: Path) -> Path:
    return write_native_base(folder, dice)


def name(data: bytes) -> str:
    return "model.bitnet.safetensors" if FORMAT.encode() in data[:100_000] else "model.safetensors"


def write_config(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(BITNET))


def seeds() -> Iterable[bytes]:
    yield from files_of(write_seed, 20)
    yield from files_of(write_native_seed, 20)
    yield (DATA / "native" / "tiny-v1.bitnet.safetensors").read_bytes()
    for path in sorted(GOLDEN.glob("*/*.safetensors")):
        yield path.read_bytes()


if __name__ == "__main__":
    fuzz(name, write_config, seeds(), mutate_safetensors)
