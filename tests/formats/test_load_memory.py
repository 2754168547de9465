"""Loading a model takes the memory of its file and little more: nothing is held twice, nothing is widened whole."""

import math
import sys
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers import BITNET, TINY, raw_safetensors, rng, run_python

from bitnet_ref.backends import choose_backend, cuda
from bitnet_ref.benchmark.synthetic import SHAPES, RandomCheckpoint
from bitnet_ref.formats.checkpoint import read_weights
from bitnet_ref.formats.convert import convert
from bitnet_ref.formats.gguf.blocks import BY_NAME
from bitnet_ref.formats.gguf.export import TensorToWrite, write_gguf
from bitnet_ref.formats.gguf.file import GgufFile, Typed

LIMIT = 1.5  # times the file's size, above the baseline of the imported package
WIDE = {
    "vocab_size": 3000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
VALID_BYTES = np.array([b for b in range(256) if not any(b >> s & 3 == 3 for s in (0, 2, 4, 6))], dtype=np.uint8)

CODE = """
import json, re, sys
import bitnet_ref.api
from bitnet_ref.backends import choose_backend

def peak():
    # not ru_maxrss, which a child inherits from the process that started it
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1])

choose_backend(sys.argv[2], threads=1)
before = peak()
m = bitnet_ref.load(sys.argv[1], backend=sys.argv[2], threads=1)
strips = sum(w.strips.nbytes for _, w in m.weights.linears() if getattr(w, "strips", None) is not None)
print(json.dumps([peak() - before, strips]))
"""

CONVERT = (
    CODE.partition("choose_backend(sys")[0]
    + """
from bitnet_ref.formats.convert import convert
before = peak()
convert(sys.argv[1], f"{sys.argv[1]}.{sys.argv[2]}.gguf", sys.argv[2], verify=False)
print(json.dumps(peak() - before))
"""
)


def write_large_checkpoint(folder: Path, config: dict) -> int:
    """A checkpoint of valid random bytes, streamed to the disk. Returns the size of model.safetensors."""
    import json

    d_model, d_ffn = config["hidden_size"], config["intermediate_size"]
    kv = d_model // config["num_attention_heads"] * config["num_key_value_heads"]
    packed = config["model_type"] == "bitnet"
    entries: dict[str, tuple[str, list[int]]] = {"model.embed_tokens.weight": ("BF16", [config["vocab_size"], d_model])}
    for i in range(config["num_hidden_layers"]):
        block = f"model.layers.{i}."
        shapes = {"self_attn.q_proj": (d_model, d_model), "self_attn.k_proj": (kv, d_model)}
        shapes |= {"self_attn.v_proj": (kv, d_model), "self_attn.o_proj": (d_model, d_model)}
        shapes |= {
            "mlp.gate_proj": (d_ffn, d_model),
            "mlp.up_proj": (d_ffn, d_model),
            "mlp.down_proj": (d_model, d_ffn),
        }
        for name, (n_out, n_in) in shapes.items():
            entries[f"{block}{name}.weight"] = ("U8", [n_out // 4, n_in]) if packed else ("BF16", [n_out, n_in])
            if packed:
                entries[f"{block}{name}.weight_scale"] = ("BF16", [1])
        norms = {"input_layernorm": d_model, "post_attention_layernorm": d_model}
        if packed:
            norms |= {"self_attn.attn_sub_norm": d_model, "mlp.ffn_sub_norm": d_ffn}
        entries |= {f"{block}{name}.weight": ("BF16", [size]) for name, size in norms.items()}
    entries["model.norm.weight"] = ("BF16", [d_model])
    header, end = {}, 0
    for name, (dtype, shape) in entries.items():
        begin, end = end, end + int(np.prod(shape)) * (1 if dtype == "U8" else 2)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    pattern = {
        "U8": rng(1).choice(VALID_BYTES, 1 << 20).tobytes(),
        "BF16": (rng(2).random(1 << 19) + 0.5).astype(ml_dtypes.bfloat16).tobytes(),
    }
    with open(folder / "model.safetensors", "wb") as file:
        file.write(raw_safetensors(header))
        for entry in header.values():
            left = entry["data_offsets"][1] - entry["data_offsets"][0]
            while left > 0:
                left -= file.write(pattern[entry["dtype"]][:left])
    (folder / "config.json").write_text(json.dumps(config))
    return (folder / "model.safetensors").stat().st_size


@pytest.mark.sample(2)
@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize("kind", ["packed", "dense"])
def test_peak_of_a_load(tmp_path, backend_name, kind):
    emulated = backend_name == "cupy" and cuda.emulation_wanted()  # the memory of that device is the host's
    if backend_name == "cupy" and not emulated:
        pytest.skip("the weights are in the card's memory, and the compiler of its kernels in the host's")
    base = BITNET if kind == "packed" else {**TINY, "tie_word_embeddings": True}
    config = {**base, **WIDE, "num_hidden_layers": 6 if kind == "packed" else 1}
    size = write_large_checkpoint(tmp_path, config)
    assert 75e6 < size < 120e6
    growth, strips = run_python(CODE, tmp_path, backend_name)  # strips: second copies, of up_proj and down_proj
    assert growth > 0.8 * size  # the measure works: the weights are in memory
    assert growth < min(LIMIT * size + strips, 2 * size) + emulated * size, f"{growth / size:.2f} times the file's size"


def write_large_gguf(path: Path, kind: str) -> int:
    """A Qwen3 whose matrices, the tied embedding among them, are blocks of random ternary bytes. Returns its size."""
    block, hidden, ffn = BY_NAME[kind], 1024, 3072
    shapes = {"token_embd": (12000, hidden), "output_norm": (hidden,)}
    for i in range(3):
        vectors = {"attn_norm": hidden, "ffn_norm": hidden, "attn_q_norm": 128, "attn_k_norm": 128}
        narrow = {"attn_k": (512, hidden), "attn_v": (512, hidden), "ffn_down": (hidden, ffn)}
        square = dict.fromkeys(("attn_q", "attn_output"), (hidden, hidden))
        wide = dict.fromkeys(("ffn_gate", "ffn_up"), (ffn, hidden))
        of_layer = {name: (size,) for name, size in vectors.items()} | narrow | square | wide
        shapes |= {f"blk.{i}.{name}": shape for name, shape in of_layer.items()}

    def make(shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) == 1:
            return np.ones(shape, dtype=np.float32).view(np.uint8)
        raw = rng(3).choice(VALID_BYTES, (shape[0] * shape[1] // block.block_values, block.block_bytes))
        scales = (0.02, 0.03) * (len(raw) // 2)  # of neighbours: no larger groups
        at = block.block_bytes - 2 if kind == "PTQ1_0" else 0
        raw[:, at : at + 2] = np.array(scales, dtype=np.float16).view(np.uint8).reshape(-1, 2)
        return raw.reshape(-1)

    keys = {"context_length": 64, "embedding_length": hidden, "block_count": 3, "feed_forward_length": ffn}
    keys |= {"attention.head_count": 8, "attention.head_count_kv": 4, "attention.key_length": 128, "vocab_size": 12000}
    typed = {"general.architecture": Typed("string", "qwen3")}
    typed |= {f"qwen3.{key}": Typed("uint32", value) for key, value in keys.items()}
    typed["qwen3.attention.layer_norm_rms_epsilon"] = Typed("float32", 1e-6)
    tensors = [
        TensorToWrite(f"{name}.weight", shape, "F32" if len(shape) == 1 else kind, partial(make, shape))
        for name, shape in shapes.items()
    ]
    write_gguf(path, typed, tensors)
    return path.stat().st_size


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.filterwarnings("ignore:.*taken as not rotated")
@pytest.mark.parametrize("kind", ["Q2_0", "PTQ1_0"])
def test_peak_of_a_load_of_groups(tmp_path, kind):
    """The blocks become the packed form in pieces, never floats; those are 15 times as many bytes."""
    path = tmp_path / "x.gguf"
    size = write_large_gguf(path, kind)
    assert size > 8e6
    growth, _ = run_python(CODE, path, "cython")
    constant = 10e6  # the extension's code, and a chunk of blocks
    assert 0.8 * size < growth < LIMIT * size + constant, f"{growth / size:.2f} times the file's size"
    convert(path, tmp_path / "x.bitnet.safetensors", "native", verify=False)
    growth, _ = run_python(CODE, tmp_path / "x.bitnet.safetensors", "numpy")
    assert 0.8 * size < growth < LIMIT * size + constant, f"{growth / size:.2f} times, native"


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.filterwarnings("ignore:.*taken as not rotated")
def test_peaks_of_a_dense_matrix_in_ternary_blocks_and_of_blocks_that_are_written(tmp_path):
    """A code 3 makes a matrix dense: it is read as float16, with no copy beside it. Blocks are written from blocks."""
    path, constant = tmp_path / "x.gguf", 10e6
    size = write_large_gguf(path, "Q2_0")
    growth = run_python(CONVERT, path, "gguf-q2_0")
    assert growth < LIMIT * size + constant, f"{growth / size:.2f} times the file's size, written"
    with GgufFile(path) as file:
        table = file.tensors["token_embd.weight"]
    with open(path, "r+b") as opened:
        opened.seek(table.offset + 2)
        opened.write(b"\xff")
    growth, _ = run_python(CODE, path, "numpy")
    dense = 2 * math.prod(table.shape)
    assert dense < growth < dense + size + constant, f"{growth / size:.2f} times the file's size"


class WatchedEmbedding(RandomCheckpoint):
    """Says for each linear that is read whether the embedding is still there as the file has it."""

    def __init__(self, config):
        super().__init__(config)
        self.alive = []

    def embedding(self):
        w = super().embedding()
        self.stored = weakref.ref(w.packed)
        return w

    def linear(self, name):
        self.alive.append(self.stored() is not None)
        return super().linear(name)


def test_an_embedding_that_was_packed_anew_is_not_held_as_the_file_has_it():
    small = {"vocab_size": 300, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
    config = replace(SHAPES["bonsai-1.7b"], **small, num_attention_heads=4, num_key_value_heads=2)
    checkpoint, be = WatchedEmbedding(config), choose_backend("cython")
    read_weights(checkpoint, prepare_for=be.prepare_for)
    assert checkpoint.alive == [False] * 14
