"""Make a shipped model from its masters: `python scripts/make_storyteller.py MASTER_FOLDER [DESTINATION]`.

The linears are quantised by absmean and packed to 2 bits in Hugging Face's layout with a float32 `weight_scale`
(autobitlinear, offline: multiply); the embedding and the norms are bf16. The result loads in transformers too. The
script reads it back and compares every ternary plane and scale before it says it is done.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from bitnet_ref.formats.checkpoint import parts
from bitnet_ref.formats.open import ASSETS, open_checkpoint
from bitnet_ref.formats.packing import hf_from_ternary
from bitnet_ref.reference.quantization import quantize_weights
from bitnet_ref.reference.weights import TernaryWeight
from bitnet_ref.system.atomic import atomic_path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("master", type=Path, help="folder with config.json, model.safetensors and the tokenizer")
    parser.add_argument("destination", type=Path, nargs="?", default=ASSETS / "storyteller")
    args = parser.parse_args()
    args.destination.mkdir(parents=True, exist_ok=True)

    tensors = {}
    for name, array in load_file(args.master / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            w_t, scale = quantize_weights(array.astype(np.float32))
            tensors[name] = hf_from_ternary(w_t)
            tensors[f"{name}_scale"] = np.array([scale], dtype=np.float32)
        else:
            tensors[name] = array.astype(ml_dtypes.bfloat16)
    moved = leave_ties(tensors["model.embed_tokens.weight"], tensors["model.layers.0.input_layernorm.weight"])
    with atomic_path(args.destination / "model.safetensors") as temporary:
        save_file(tensors, temporary, {"format": "pt"})

    # A model that is made anew keeps the config and the sampling that were chosen for it; verify() holds the shape.
    if not (args.destination / "config.json").is_file():
        config = json.loads((args.master / "config.json").read_text())
        config["quantization_config"]["quantization_mode"] = "offline"
        config["torch_dtype"] = "bfloat16"
        write_json(args.destination / "config.json", config)
    if not (args.destination / "generation_config.json").is_file():
        generation = json.loads((args.master / "generation_config.json").read_text())
        ends = {name: generation[name] for name in ("bos_token_id", "eos_token_id")}
        write_json(args.destination / "generation_config.json", ends)
    for name in ("tokenizer.model", "tokenizer_config.json", "chat_template.jinja"):
        if (args.master / name).is_file():
            with atomic_path(args.destination / name) as temporary:
                shutil.copyfile(args.master / name, temporary)

    verify(args.master, args.destination)
    print(f"{moved} numbers of the embedding moved by one step of bfloat16, away from a tie")
    total = sum(file.stat().st_size for file in args.destination.iterdir())
    print(f"{args.destination}: {total / 1e6:.2f} MB, every ternary plane and scale equal to the master's")


def leave_ties(embedding: np.ndarray, norm: np.ndarray) -> int:
    """Move what lies exactly between two int8 of layer 0's input one step towards zero, in place; returns how many.

    Engines that sum in another order round such a number to either side, in each text that has its token.
    """
    y = embedding.astype(np.float64) * norm.astype(np.float64)
    scaled = np.abs(y * (127 / np.abs(y).max(axis=1, keepdims=True)))
    ties = np.abs(scaled % 1 - 0.5) < 1e-4  # float32 sums differ by some 2e-5 here
    embedding.view(np.uint16)[ties] -= 1
    return int(ties.sum())


def write_json(path: Path, content: dict[str, Any]) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")


def verify(master: Path, made: Path) -> None:
    """Both folders must give the same ternary planes and scales, and the same bfloat16 numbers up to `leave_ties`."""
    with open_checkpoint(master) as expected, open_checkpoint(made) as result:
        for (name, one), (_, other) in zip(parts(expected), parts(result), strict=True):
            if isinstance(one, TernaryWeight):
                assert isinstance(other, TernaryWeight)
                is_same = np.array_equal(one.packed, other.packed) and one.w_dequant_scale == other.w_dequant_scale
            else:
                arrays = [getattr(weight, "array", weight).astype(ml_dtypes.bfloat16) for weight in (one, other)]
                steps = np.abs(arrays[0].view(np.int16).astype(int) - arrays[1].view(np.int16))
                is_same = steps.max() <= (name == "embedding")  # of which some numbers left a tie
            if not is_same:
                raise SystemExit(f"{name}: the packed copy differs from the master")


if __name__ == "__main__":
    main()
