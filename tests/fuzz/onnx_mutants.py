"""Small decoders in ONNX, our exports and as other exporters name them, and mutations of bytes, message and data."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

from checkpoint_mutants import base, write_base
from helpers import BITNET, TINY, write_checkpoint
from json_mutants import cut_out, flip_bytes, insert_bytes, mutate_json, poison, truncate

import bitnet_ref
from bitnet_ref.formats.open import open_checkpoint

ONNX_FILE = "model.onnx"


def write_onnx_base(folder: Path, dice: random.Random) -> Path:
    import onnx
    from onnx_graphs import LINEAR_STYLES, QUANTIZED_STYLES, decoder

    from bitnet_ref.formats.onnx.export import export_onnx

    ours, number, inside = dice.randrange(2), dice.randrange(8), dice.randrange(2)
    config, styles = dice.choice([(TINY, LINEAR_STYLES), (BITNET, QUANTIZED_STYLES)])
    style = dice.choice(styles)

    def make(folder: Path) -> None:
        if ours:
            write_base(folder, random.Random(number), sharded=False)
            with open_checkpoint(folder) as checkpoint:
                path, data = export_onnx(folder / ONNX_FILE, checkpoint, external_bytes=256)
            if inside:
                onnx.save(onnx.load(path), path)
                data.unlink()
        else:
            m = bitnet_ref.load(write_checkpoint(folder, config), backend="numpy")
            (folder / ONNX_FILE).write_bytes(decoder(m.weights, style, config).SerializeToString())
        (folder / "model.safetensors").unlink()

    base(folder, ("onnx", number, inside) if ours else ("onnx", style, str(config)), make)
    return folder / ONNX_FILE


def mutate_onnx(dice: random.Random, folder: Path) -> Path:
    import onnx

    path = write_onnx_base(folder, dice)
    action = dice.randrange(6)
    some_bytes = dice.choice([flip_bytes, truncate, insert_bytes, cut_out])
    if action == 0:
        path.write_bytes(some_bytes(dice, path.read_bytes()))
    elif action == 1 and (data := folder / "model.onnx.data").exists():
        data.write_bytes(some_bytes(dice, data.read_bytes()))
    elif action == 2:
        (folder / "config.json").write_bytes(mutate_json(dice, (folder / "config.json").read_bytes()))
    else:
        model = onnx.load(path, load_external_data=False)
        for _ in range(dice.choice([1, 1, 1, 2, 4])):
            change_message(dice, model)
        path.write_bytes(model.SerializeToString())
    return path


def change_message(dice: random.Random, model: Any) -> None:
    """One change to a ModelProto: of a tensor, a node, or the metadata."""
    graph = model.graph
    tensor, node = dice.choice(graph.initializer), dice.choice(graph.node)
    number = dice.choice([0, 1, 2, 3, -1, 7, 16, 40, 2**31, 2**62, -(2**63)])
    action = dice.randrange(13)
    if action == 0 and tensor.dims:
        tensor.dims[dice.randrange(len(tensor.dims))] = number
    elif action == 1:
        tensor.dims[:] = [dice.choice([0, 1, 2, 16, 2**20, 2**40, 2**62]) for _ in range(dice.randrange(10))]
    elif action == 2:
        tensor.data_type = dice.randrange(28)
    elif action == 3 and tensor.raw_data:
        change = dice.choice([flip_bytes, truncate, insert_bytes, partial(poison, start=0)])
        tensor.raw_data = change(dice, tensor.raw_data)
    elif action == 4 and tensor.external_data:
        texts = ["", "0", "-1", "1e3", "9" * 40, "../x", "/etc/passwd", ONNX_FILE, ".", "\0", "٣", str(number)]
        dice.choice(tensor.external_data).value = dice.choice(texts)
    elif action == 5:
        tensor.name = dice.choice([dice.choice(graph.initializer).name, "", "x", "model.norm.weight", "\0" * 9])
    elif action == 6 and node.input:
        node.input[dice.randrange(len(node.input))] = dice.choice(["", "x", tensor.name, *node.output])
    elif action == 7 and node.attribute:
        attribute = dice.choice(node.attribute)
        attribute.i = number
        attribute.ints[:] = [number] * dice.randrange(4)
        attribute.type = dice.choice([attribute.type, 0, 1, 2, 3, 7])
    elif action == 8 and len(model.metadata_props) == 2:
        text = mutate_json(dice, model.metadata_props[1].value.encode())
        model.metadata_props[dice.choice([0, 1, 1, 1])].value = text.decode("utf-8", "replace")
    elif action == 9:
        graph.initializer.append(tensor) if dice.randrange(2) else graph.node.append(node)
    elif action == 10:
        del graph.initializer[dice.randrange(len(graph.initializer))]
    elif action == 11:  # the numbers in another field, or in two
        tensor.float_data[:] = [dice.choice([0.0, 1.0, float("nan"), 1e30])] * dice.randrange(40)
        tensor.int32_data[:] = [number % 2**31] * dice.randrange(40)
        if dice.randrange(2):
            tensor.ClearField("raw_data")
    else:
        ops = ["MatMul", "Gemm", "Add", "MatMulNBits", "DequantizeLinear", "Transpose", "Cast", "Gather", "Constant"]
        node.op_type = dice.choice([*ops, ""])
