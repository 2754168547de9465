"""Make the shipped model from its bf16 master: `python scripts/make_storyteller.py MASTER_FOLDER [DESTINATION]`.

The linears are quantised by absmean and packed to 2 bits in Hugging Face's layout with a float32 `weight_scale`
(autobitlinear, offline: multiply); the embedding and the norms stay bf16, bit for bit. The result loads in
transformers too. The script reads it back and compares every ternary plane and scale before it says it is done.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import numpy as np

from bitnet_ref.formats.hf.config import read_hf_config
from bitnet_ref.formats.hf.folder import load_hf_weights
from bitnet_ref.formats.open import ASSETS
from bitnet_ref.formats.packing import hf_from_ternary
from bitnet_ref.formats.safetensors import SafetensorsFile, write_safetensors
from bitnet_ref.reference.quantization import quantize_weights
from bitnet_ref.system.atomic import atomic_path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("master", type=Path, help="folder with config.json, model.safetensors and the tokenizer")
    parser.add_argument("destination", type=Path, nargs="?", default=ASSETS / "storyteller")
    args = parser.parse_args()
    args.destination.mkdir(parents=True, exist_ok=True)

    tensors = {}
    with SafetensorsFile(args.master / "model.safetensors") as source:
        for name in source.tensors:
            array = source.read(name)
            if name.endswith("_proj.weight"):
                w_t, scale = quantize_weights(array.astype(np.float32))
                tensors[name] = hf_from_ternary(w_t)
                tensors[f"{name}_scale"] = np.array([scale], dtype=np.float32)
            else:
                tensors[name] = array
    write_safetensors(args.destination / "model.safetensors", tensors, {"format": "pt"})

    config = json.loads((args.master / "config.json").read_text())
    config["quantization_config"]["quantization_mode"] = "offline"
    with atomic_path(args.destination / "config.json") as temporary:
        temporary.write_text(json.dumps(config, indent=1) + "\n")
    for name in ("tokenizer.model", "tokenizer_config.json", "generation_config.json"):
        with atomic_path(args.destination / name) as temporary:
            shutil.copyfile(args.master / name, temporary)

    verify(args.master, args.destination)
    total = sum(file.stat().st_size for file in args.destination.iterdir())
    print(f"{args.destination}: {total / 1e6:.2f} MB, every ternary plane and scale equal to the master's")


def verify(master: Path, made: Path) -> None:
    """Both folders must give the same ternary planes, scales, embedding and norms."""
    expected = load_hf_weights(master, read_hf_config(master / "config.json"))
    found = load_hf_weights(made, read_hf_config(made / "config.json"))
    for (name, one), (_, other) in zip(expected.linears(), found.linears(), strict=True):
        if name != "lm_head" and not (
            np.array_equal(one.packed, other.packed) and one.w_dequant_scale == other.w_dequant_scale
        ):
            raise SystemExit(f"{name}: the packed copy differs from the master")
    if not np.array_equal(expected.embedding.array, found.embedding.array):
        raise SystemExit("the embedding differs from the master")


if __name__ == "__main__":
    main()
