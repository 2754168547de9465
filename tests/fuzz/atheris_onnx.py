"""Coverage-guided fuzzing of the ONNX reader; see atheris_target.py.

An input is model.onnx beside the config.json of a small BitNet, for files that carry no configuration of their own.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

import onnx
from atheris_target import files_of, fuzz
from helpers import BITNET
from onnx_mutants import ONNX_FILE, change_message, write_onnx_base


def seeds() -> Iterable[bytes]:
    yield from files_of(lambda dice, folder: write_onnx_base(folder, dice), 80)


def mutate(dice: random.Random, data: bytes) -> bytes:
    model = onnx.ModelProto.FromString(data)
    change_message(dice, model)
    return model.SerializeToString()


def write_config(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(BITNET))


if __name__ == "__main__":
    fuzz(lambda data: ONNX_FILE, write_config, seeds(), mutate)
