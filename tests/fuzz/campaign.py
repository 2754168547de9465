"""A fuzzing campaign in a process of its own: mutate files of a good checkpoint, load, compute, report the outcome.

    python tests/fuzz/campaign.py config 0 100        # a kind of COUNTS in test_fuzz.py, seeds 0 to 99

Prints one JSON line for each seed before it runs and one after, so that a crash names its seed. Whatever a mutated
file is, the outcome must be a model that computes (or a tokenizer that encodes) or one of bitnet_ref's errors; no
warning, no other exception, and no allocation beyond the files' size and SPARE_BYTES. A seed always makes the same
files.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
from helpers import BITNET, TINY, tiny_tensors, write_checkpoint, write_shards

import bitnet_ref
from bitnet_ref.errors import BitNetRefError, ConfigError, FormatError, TokenizerError
from bitnet_ref.formats.gguf import GgufFile, Typed
from bitnet_ref.formats.gguf_export import write_gguf_model
from bitnet_ref.formats.gguf_write import TensorToWrite, write_gguf
from bitnet_ref.formats.open import open_checkpoint

SPARE_BYTES = 256 << 20
TOKENS = [1, 3, 2, 5]
TEXT = "Once upon a time, a wörld of \U0001f600 began.\n"
ASSETS = Path(bitnet_ref.__file__).parent / "assets" / "storyteller"

HOSTILE: list[Any] = [
    *(0, -1, 1, 2, 3, 7, 2**31, 2**32, 2**63, 2**64, -(2**63), 10**30, 10**400, 0.5, -0.0, 1e-320, 1e300, -1e300),
    *(float("nan"), float("inf"), float("-inf"), True, False, None, "", "0", "x" * 5000, "../x", "\0", "\ud800"),
    *([], [[]], [[[[1]]]], {}, {"": {}}, {"a": [1, {"b": None}]}, [None] * 100, "relu2", "yarn", "bitlinear", "BF16"),
    *(
        {"rope_type": "yarn", "factor": 1e300},
        {"rope_type": "dynamic", "factor": 2},
        {"type": "linear", "factor": 1e-300},
    ),
]


# -- mutations ---------------------------------------------------------------------------------------------------------


def flip_bytes(dice: random.Random, data: bytes, within: int | None = None) -> bytes:
    out = bytearray(data)
    for _ in range(dice.choice([1, 1, 2, 4, 16])):
        if out:
            out[dice.randrange(min(len(out), within or len(out)))] = dice.randrange(256)
    return bytes(out)


def truncate(dice: random.Random, data: bytes) -> bytes:
    return data[: dice.randrange(len(data) + 1)]


def insert_bytes(dice: random.Random, data: bytes) -> bytes:
    at = dice.randrange(len(data) + 1)
    return data[:at] + dice.randbytes(dice.choice([1, 4, 100])) + data[at:]


def cut_out(dice: random.Random, data: bytes) -> bytes:
    at = dice.randrange(len(data) + 1)
    return data[:at] + data[at + dice.choice([1, 4, 100]) :]


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value inside a JSON value."""
    out: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        out.append((value, key))
        out.extend(places(inner))
    return out


def change_json(dice: random.Random, value: Any) -> None:
    """Replace, delete, rename or nudge one value, in place."""
    found = places(value)
    if not found:
        return
    container, key = dice.choice(found)
    action = dice.randrange(5)
    if action == 0 and isinstance(container, dict):
        del container[key]
    elif action == 1 and isinstance(container, dict):
        container[dice.choice([*container, "x", "", "__metadata__", "\ud800"])] = container.pop(key)
    elif action == 2 and isinstance(container[key], int | float) and abs(container[key]) < 2**64:
        container[key] += dice.choice([-1, 1, 8, -8, 2**32, 0.5])
    else:
        container[key] = json.loads(json.dumps(dice.choice(HOSTILE)))


def dump(dice: random.Random, value: Any) -> bytes:
    """As JSON text, now and then with a key twice."""
    text = json.dumps(value).encode()
    if dice.randrange(12) == 0 and isinstance(value, dict) and value:
        key = dice.choice(list(value))
        text = text[:-1] + b", " + json.dumps({key: dice.choice(HOSTILE)}).encode()[1:]
    if dice.randrange(40) == 0:
        text = text[:-1] + b', "deep": ' + b"[" * 100_000
    return text


def mutate_json(dice: random.Random, data: bytes) -> bytes:
    if dice.randrange(3) == 0:
        return dice.choice([flip_bytes, truncate, insert_bytes, cut_out])(dice, data)
    value = json.loads(data)
    for _ in range(dice.choice([1, 1, 1, 2, 5])):
        change_json(dice, value)
    return dump(dice, value)


def mutate_safetensors(dice: random.Random, data: bytes) -> bytes:
    action = dice.randrange(8)
    length = int.from_bytes(data[:8], "little")
    if action == 0:  # anywhere, so mostly in the weights
        return flip_bytes(dice, data)
    if action == 1:
        return flip_bytes(dice, data, within=8 + length)
    if action == 2:
        return dice.choice([truncate, insert_bytes, cut_out])(dice, data)
    if action == 3:
        wrong = dice.choice([0, 1, length - 1, length + 1, len(data), 2**31, 2**63, 2**64 - 1, dice.randrange(2**64)])
        return wrong.to_bytes(8, "little") + data[8:]
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    if action == 4:  # two tensors exchange names
        a, b = dice.sample(names, 2)
        header[a], header[b] = header[b], header[a]
    elif action == 5:  # a tensor goes, its bytes stay or go
        begin, end = header.pop(dice.choice(names))["data_offsets"]
        if dice.randrange(2):
            body = body[:begin] + body[end:]
            for entry in header.values():
                if isinstance(entry, dict) and entry.get("data_offsets", [0])[0] >= end:
                    entry["data_offsets"] = [offset - (end - begin) for offset in entry["data_offsets"]]
    else:
        for _ in range(dice.choice([1, 1, 2])):
            change_json(dice, header)
    text = dump(dice, header)
    return len(text).to_bytes(8, "little") + text + body


# -- checkpoints -------------------------------------------------------------------------------------------------------


def write_base(folder: Path, dice: random.Random, sharded: bool) -> None:
    kind = dice.randrange(3)
    if kind == 0:
        config, tensors = BITNET, tiny_tensors(BITNET)
    elif kind == 1:
        scaling = dice.choice([None, {"type": "dynamic", "factor": 2.0}, {"type": "yarn", "factor": 4.0}])
        config = {**TINY, "rope_scaling": scaling, "head_dim": dice.choice([4, 8])}
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


def mutate_checkpoint(kind: str, dice: random.Random, folder: Path) -> None:
    write_base(folder, dice, sharded=kind == "index")
    file = {"config": "config.json", "weights": "model.safetensors", "index": "model.safetensors.index.json"}[kind]
    mutate = mutate_safetensors if kind == "weights" else mutate_json
    (folder / file).write_bytes(mutate(dice, (folder / file).read_bytes()))


def mutate_native(dice: random.Random, folder: Path) -> Path:
    """A native file of one of the base checkpoints, mutated: as safetensors, or in the JSON of its config."""
    from bitnet_ref.formats.native_writer import write_native
    from bitnet_ref.formats.open import open_checkpoint

    path = folder / "model.bitnet.safetensors"
    write_base(folder, dice, sharded=False)
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    with open_checkpoint(folder) as checkpoint:
        write_native(checkpoint, path, storage=dice.choice(["2bit", "base3"]))
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


ONNX_FILE = "model.onnx"


def mutate_onnx(dice: random.Random, folder: Path) -> None:
    """An export of ours, or a decoder as another exporter names it; its bytes, its message or its data changed."""
    import onnx
    from onnx_graphs import LINEAR_STYLES, QUANTIZED_STYLES, decoder

    from bitnet_ref.formats.onnx_export import export_onnx
    from bitnet_ref.formats.open import open_checkpoint

    path = folder / ONNX_FILE
    if dice.randrange(2):
        write_base(folder, dice, sharded=False)
        with open_checkpoint(folder) as checkpoint:
            export_onnx(path, checkpoint, external_bytes=dice.choice([256, None]))
    else:
        config, styles = dice.choice([(TINY, LINEAR_STYLES), (BITNET, QUANTIZED_STYLES)])
        m = bitnet_ref.load(write_checkpoint(folder, config), backend="numpy")
        path.write_bytes(decoder(m.weights, dice.choice(styles), config).SerializeToString())
    (folder / "model.safetensors").unlink()
    action = dice.randrange(5)
    if action == 0:
        some_bytes = dice.choice([flip_bytes, truncate, insert_bytes, cut_out])
        path.write_bytes(some_bytes(dice, path.read_bytes()))
    elif action == 1 and (data := folder / "model.onnx.data").exists():
        data.write_bytes(dice.choice([flip_bytes, truncate, insert_bytes, cut_out])(dice, data.read_bytes()))
    elif action == 2:
        (folder / "config.json").write_bytes(mutate_json(dice, (folder / "config.json").read_bytes()))
    else:
        model = onnx.load(path, load_external_data=False)
        for _ in range(dice.choice([1, 1, 2, 4])):
            change_message(dice, model)
        path.write_bytes(model.SerializeToString())


def change_message(dice: random.Random, model: Any) -> None:
    """One change to a ModelProto: of a tensor, a node, or the metadata."""
    graph = model.graph
    tensor, node = dice.choice(graph.initializer), dice.choice(graph.node)
    number = dice.choice([0, 1, 2, 3, -1, 7, 16, 40, 2**31, 2**62, -(2**63)])
    action = dice.randrange(10)
    if action == 0 and tensor.dims:
        tensor.dims[dice.randrange(len(tensor.dims))] = number
    elif action == 1:
        tensor.dims[:] = [dice.choice([0, 1, 2, 16, 2**20, 2**40, 2**62]) for _ in range(dice.randrange(10))]
    elif action == 2:
        tensor.data_type = dice.randrange(28)
    elif action == 3 and tensor.raw_data:
        tensor.raw_data = dice.choice([flip_bytes, truncate, insert_bytes])(dice, tensor.raw_data)
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
    else:
        node.op_type = dice.choice(
            ["MatMul", "Gemm", "Add", "MatMulNBits", "DequantizeLinear", "Transpose", "Cast", ""]
        )


def use_checkpoint(path: Path, backend: str) -> None:
    m = bitnet_ref.load(path, backend=backend, threads=1)
    tokens = [token % m.config.vocab_size for token in TOKENS][: m.config.context_length]
    logits = m.logits(tokens)
    assert logits.shape == (len(tokens), m.config.vocab_size)
    assert np.isfinite(logits).all()


GGUF_FILE = "model.gguf"
GGUF_KINDS = ("i2_s", "tq1_0", "tq2_0", "f16", "f32", "q8_0")
HOSTILE_TYPED: list[Typed] = [
    *(Typed("uint32", n) for n in (0, 1, 2, 3, 7, 255, 2**20, 2**31, 2**32 - 1)),
    *(Typed("uint64", n) for n in (0, 4, 2**40, 2**63, 2**64 - 1)),
    *(Typed("int32", n) for n in (-1, -(2**31), 5)),
    *(Typed("float32", x) for x in (0.0, -1.0, 1e-38, 1e30, float("nan"), float("inf"), 0.5)),
    *(
        Typed("string", x)
        for x in ("", "llama", "bitnet", "bitnet-25", "bitnet-b1.58", "yarn", "linear", "\0", "x" * 999)
    ),
    *(Typed("bool", True), Typed("[uint32]", []), Typed("[uint32]", [1, 2]), Typed("[float32]", [1.0])),
    *(Typed("[string]", ["a", "<|eot_id|>"]), Typed("[string]", ["x"] * 50), Typed("[bool]", [True])),
]


def write_gguf_base(folder: Path, dice: random.Random) -> None:
    kind = dice.choice(GGUF_KINDS)
    wide = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    dense = kind in ("f16", "f32", "q8_0") and dice.randrange(2) == 0
    scaling = dice.choice([None, {"type": "yarn", "factor": 4.0}, {"type": "linear", "factor": 2.0}]) if dense else None
    config = {**(TINY if dense else BITNET), **wide, "rope_scaling": scaling}
    source = write_checkpoint(folder / "source", config, tiny_tensors(config))
    with open_checkpoint(source) as checkpoint:
        write_gguf_model(checkpoint, folder / GGUF_FILE, kind)
    shutil.rmtree(source)


def change_gguf(dice: random.Random, path: Path) -> None:
    """Well-formed, but other: metadata replaced or dropped, tensors renamed, reshaped, retyped, dropped or cut."""
    with GgufFile(path) as file:
        typed = dict(file.typed)
        tensors = [[t.name, t.shape, t.type.name, file.read_raw(t.name)] for t in file.tensors.values()]
    for _ in range(dice.choice([1, 1, 1, 2, 4])):
        action, chosen = dice.randrange(9), dice.choice(tensors)
        key = dice.choice(list(typed))
        if action == 0:
            del typed[key]
        elif action <= 3:
            arch = typed.get("general.architecture", Typed("string", "llama")).value
            more = ("rope.scaling.type", "rope.scaling.factor", "attention.key_length", "attention.sliding_window")
            extra = [f"{arch}.{name}" for name in more]
            extra += ["tokenizer.ggml.tokens", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"]
            typed[dice.choice([key, key, *extra])] = dice.choice(HOSTILE_TYPED)
        elif action == 4:
            chosen[0] = dice.choice(
                ["x", "output.weight", "rope_freqs.weight", "blk.0.attn_q.scale", "blk.0.attn_q.bias"]
            )
        elif action == 5:
            chosen[1] = dice.choice([chosen[1][::-1], (*chosen[1], 1), (chosen[3].size // 4,), (1, 256), (4, 64)])
        elif action == 6:
            chosen[2] = dice.choice(
                ["F32", "F16", "BF16", "I2_S", "TQ1_0", "TQ2_0", "TL1", "TL2/MXFP4", "Q8_0", "I8", "Q4_K"]
            )
        elif action == 7 and len(tensors) > 1:
            tensors.remove(chosen)
        else:
            at = dice.randrange(chosen[3].size)
            chosen[3] = chosen[3].copy()
            chosen[3][at] = dice.randrange(256)
            if dice.randrange(3) == 0:
                chosen[3][-64:] = dice.randrange(256)
    if typed.get("general.alignment") is not None:
        del typed["general.alignment"]  # not by this way: the writer refuses a wrong one
    written = [TensorToWrite(n, shape, kind, lambda d=d: d, d.size) for n, shape, kind, d in tensors]
    write_gguf(path, typed, written)


def mutate_gguf(dice: random.Random, folder: Path) -> None:
    write_gguf_base(folder, dice)
    path = folder / GGUF_FILE
    action = dice.randrange(8)
    if action <= 3:
        change_gguf(dice, path)
    data = path.read_bytes()
    if action == 4:  # in the header, mostly
        path.write_bytes(flip_bytes(dice, data, within=dice.choice([24, 700, 2000])))
    elif action == 5:
        path.write_bytes(dice.choice([truncate, insert_bytes, cut_out])(dice, data[:2500]) + data[2500:])
    elif action == 6:  # a hostile number in place of any eight bytes of the header
        at = dice.randrange(1500)
        wrong = dice.choice([0, 1, 2**31, 2**32, 2**61, 2**63, 2**64 - 1, len(data)]).to_bytes(8, "little")
        path.write_bytes(data[:at] + wrong[: dice.choice([1, 4, 8])] + data[at + dice.choice([1, 4, 8]) :])
    elif action == 7:
        path.write_bytes(truncate(dice, data) if dice.randrange(2) else flip_bytes(dice, data))


def mutate_tokenizer(dice: random.Random, folder: Path) -> None:
    for name in ("tokenizer.model", "tokenizer_config.json", "config.json", "generation_config.json"):
        shutil.copy(ASSETS / name, folder / name)
    if dice.randrange(2):
        path, mutate = folder / "tokenizer_config.json", mutate_json
    else:
        path, mutate = folder / "tokenizer.model", dice.choice([flip_bytes, truncate, insert_bytes, cut_out])
    path.write_bytes(mutate(dice, path.read_bytes()))


def use_tokenizer(folder: Path) -> None:
    from bitnet_ref.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(TEXT)
    assert all(isinstance(i, int) and 0 <= i < tokenizer.vocab_size for i in ids)
    assert isinstance(tokenizer.decode(ids), str)
    assert all(isinstance(i, int) for i in tokenizer.eos_ids)


def outcome(use: Callable[[], None], folder: Path) -> str:
    """The class name of the error of ours, or "ok"; anything else is raised."""
    try:
        use()
        return "ok"
    except BitNetRefError as raised:
        error = raised
    str(error).encode("utf-8", "backslashreplace")
    if isinstance(error, FormatError | ConfigError | TokenizerError):
        assert error.path is not None, f"an error about a file that does not name it: {error}"
        assert str(folder) in error.path
    return type(error).__name__


def run(kind: str, first: int, last: int) -> None:
    warnings.simplefilter("error")
    backends = [name for name, why_not in bitnet_ref.available_backends().items() if why_not is None]
    tracemalloc.start()
    for seed in range(first, last):
        print(json.dumps({"seed": seed}), flush=True)
        dice = random.Random(f"{kind} {seed}")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            model = folder
            if kind == "tokenizer":
                mutate_tokenizer(dice, folder)
            elif kind == "gguf":
                mutate_gguf(dice, folder)
                model = folder / GGUF_FILE
            elif kind == "onnx":
                mutate_onnx(dice, folder)
                model = folder / ONNX_FILE
            elif kind == "native":
                model = mutate_native(dice, folder)
            else:
                mutate_checkpoint(kind, dice, folder)
            size = sum(path.stat().st_size for path in folder.iterdir())
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            if kind == "tokenizer":
                found = outcome(lambda folder=folder: use_tokenizer(folder), folder)
            else:
                backend = backends[seed % len(backends)]
                found = outcome(lambda model=model, backend=backend: use_checkpoint(model, backend), folder)
            taken = tracemalloc.get_traced_memory()[1] - before
            assert taken < size + SPARE_BYTES, f"seed {seed}: {taken} bytes allocated for files of {size}"
        print(json.dumps({"seed": seed, "outcome": found}), flush=True)


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
