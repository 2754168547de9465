"""What several test files need: paths, tiny checkpoints written in NumPy alone, raw bytes, child processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import bitnet_ref
from bitnet_ref.backends import Backend
from bitnet_ref.families.blocks import BlockWeight, block_type
from bitnet_ref.formats.gguf.export import TensorToWrite, write_gguf
from bitnet_ref.formats.gguf.file import GgufFile
from bitnet_ref.formats.open import ASSETS
from bitnet_ref.formats.packing import hf_from_ternary
from bitnet_ref.reference.cache import TokenBatch
from bitnet_ref.reference.config import ModelConfig
from bitnet_ref.reference.quantization import quantize_weights
from bitnet_ref.reference.weights import LinearWeight

DATA = Path(__file__).parent / "data"
GOLDEN = DATA / "golden"
GOLDEN_CASES = sorted(folder.name for folder in GOLDEN.iterdir() if folder.is_dir())
SEED = 20240227  # the day the b1.58 paper appeared


def difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())


def rng(*more: int) -> np.random.Generator:
    return np.random.default_rng([SEED, *more])


@cache
def golden(case: str) -> dict[str, np.ndarray]:
    """tokens, logits, hidden.N and logits64 of a golden case; see data/make_golden.py."""
    return load_file(GOLDEN / case / "golden.safetensors")


@cache
def model(path: str | Path, backend: str = "numpy", threads: int = 2, dtype: str = "float32") -> bitnet_ref.Model:
    """A loaded model, kept for all tests: models hold no state. Only for files that no test changes."""
    return bitnet_ref.load(path, backend=backend, threads=threads, dtype=dtype)


# -- what a test needs of the shipped models, whose weights change when they are trained anew ------------------------


SENTENCES = (  # for what depends on rounding: with any weights, an int8 flips in some of them
    "Alice was beginning to get very tired of sitting by her sister on the bank",
    "The mouse looked at the cat and did not move",
    "Mother made a cake and put it upon the table by the window",
    "Peter ran through the garden as fast as he could, and lost one of his shoes among the cabbages",
    "It was a dark night and the wind was blowing hard",
    "There was once a poor woodcutter who had seven sons",
    "The old king sat by the fire and told the children of the ships that he had seen when he was young",
    "In the middle of the forest there stood a little house, and in it lived a witch with two black cats",
    "The rabbit took a watch out of his pocket, looked at it, and hurried on down the long road to the sea",
    "When the snow had fallen the boys went up the hill with their sledges, and nobody thought of the cold",
    "Her grandmother had given her a cap of red velvet, which suited her so well that she wore nothing else",
    "The sailor climbed to the top of the mast and cried that he could see land, far away in the east",
    "They walked all day, and in the evening they came to a bridge where a giant asked them for a penny",
    "One fine morning the frog said to the hedgehog that he would race him to the mill and back again",
    "The lion was so fond of singing that the other beasts of the wood went to live far from the river",
    "Tom lost his shoe in the mud, and the dog, who had seen it all, brought it back to him in the morning",
)


def first_where(candidates: Iterable[Any], condition: Callable[[Any], Any], wanted: str) -> Any:
    """The first candidate for which the condition holds, with this model; without one the test fails."""
    tried = []
    for candidate in candidates:
        if condition(candidate):
            return candidate
        tried.append(candidate)
    pytest.fail(f"wanted: {wanted}. None of {len(tried)} candidates has it with this model; give more: {tried}")


def stop_words(text: str) -> list[str]:
    """Words of a text, each with its space: as a stop string each cuts the text where it stands first.

    >>> stop_words("the king and the king's son")
    [' king', ' and', ' the', ' son']
    """
    words = [match for match in re.finditer(r" [A-Za-z]+", text) if 0 < match.start() == text.index(match[0])]
    assert words, f"no word to stop at in {text!r}"
    return [word[0] for word in words]


# -- tiny checkpoints --------------------------------------------------------------------------------------------------

TINY: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}
BITNET: dict[str, Any] = {
    **TINY,
    "model_type": "bitnet",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "quantization_config": {
        "quant_method": "bitnet",
        "linear_class": "autobitlinear",
        "quantization_mode": "offline",
    },
}


def tiny_tensors(config: dict[str, Any], dtype: Any = ml_dtypes.bfloat16, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors, under Hugging Face's names, for a config like TINY (dense) or BITNET (packed, multiply)."""
    generator = rng(seed)
    d_model, d_ffn = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or d_model // config["num_attention_heads"]
    query, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    tensors: dict[str, np.ndarray] = {}

    def normal(*shape: int, std: float) -> np.ndarray:
        return (generator.standard_normal(shape) * std).astype(np.float32)

    def norm(name: str, size: int) -> None:
        tensors[name] = (1 + normal(size, std=0.1)).astype(dtype)

    def linear(name: str, n_out: int, n_in: int) -> None:
        w = normal(n_out, n_in, std=n_in**-0.5)
        if config["model_type"] == "bitnet":
            w_t, scale = quantize_weights(w)
            tensors[f"{name}.weight"] = hf_from_ternary(w_t)
            tensors[f"{name}.weight_scale"] = np.array([scale]).astype(dtype)
        else:
            tensors[f"{name}.weight"] = w.astype(dtype)

    tensors["model.embed_tokens.weight"] = normal(config["vocab_size"], d_model, std=0.5).astype(dtype)
    for i in range(config["num_hidden_layers"]):
        block = f"model.layers.{i}."
        norm(block + "input_layernorm.weight", d_model)
        norm(block + "post_attention_layernorm.weight", d_model)
        if config["model_type"] == "bitnet":
            norm(block + "self_attn.attn_sub_norm.weight", query)
            norm(block + "mlp.ffn_sub_norm.weight", d_ffn)
        linear(block + "self_attn.q_proj", query, d_model)
        linear(block + "self_attn.k_proj", kv, d_model)
        linear(block + "self_attn.v_proj", kv, d_model)
        linear(block + "self_attn.o_proj", d_model, query)
        linear(block + "mlp.gate_proj", d_ffn, d_model)
        linear(block + "mlp.up_proj", d_ffn, d_model)
        linear(block + "mlp.down_proj", d_model, d_ffn)
    norm("model.norm.weight", d_model)
    if not config.get("tie_word_embeddings"):
        tensors["lm_head.weight"] = normal(config["vocab_size"], d_model, std=d_model**-0.5).astype(dtype)
    return tensors


_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64", "uint8": "U8", "int8": "I8"}
_NAMES |= {"int16": "I16", "uint16": "U16", "int32": "I32", "uint32": "U32", "int64": "I64", "uint64": "U64"}
_NAMES |= {"bool": "BOOL"}


def safetensors_bytes(tensors: dict[str, np.ndarray]) -> bytes:
    """A safetensors file, put together here rather than by the library that the reader is compared with."""
    header, data = {}, b""
    for name, array in tensors.items():
        end = len(data) + array.nbytes
        header[name] = {"dtype": _NAMES[array.dtype.name], "shape": list(array.shape), "data_offsets": [len(data), end]}
        data += array.tobytes()
    return raw_safetensors(header, data)


def raw_safetensors(header: Any, data: bytes = b"") -> bytes:
    """A file with that header (any JSON value, or bytes as they are) and that data: right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray] | None = None) -> Path:
    """A Hugging Face folder: config.json and model.safetensors (random tensors that fit, if none are given)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tiny_tensors(config) if tensors is None else tensors))
    return folder


def chat_folder(parent: Path) -> Path:
    """Storyteller with a chat template and a sampling of its own: a model that chats, whatever it answers."""
    folder = parent / "talker"
    shutil.copytree(ASSETS / "storyteller", folder)
    generation = {"bos_token_id": 1, "eos_token_id": 2, "do_sample": True, "temperature": 0.8, "top_k": 40}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return folder


def write_shards(folder: Path, config: dict[str, Any], shards: dict[str, dict[str, np.ndarray]]) -> dict[str, str]:
    """A sharded folder: file name -> its tensors. Returns the weight_map that it wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    for file, tensors in shards.items():
        (folder / file).write_bytes(safetensors_bytes(tensors))
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def of_one_layer(kv_heads: int, group: int, head_dim: int) -> ModelConfig:
    """A model of which only attention is asked: `group` query heads for each kv head."""
    sizes = {"num_attention_heads": kv_heads * group, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    return replace(model("storyteller").config, num_hidden_layers=1, **sizes)


# -- damaged files -----------------------------------------------------------------------------------------------------


def cut_to(path: Path, sizes: Iterable[int]) -> Iterator[int]:
    """The file cut to each of these sizes, the longest first, and which it is.

    It is never written anew: a file system that saves what replaces a file before it goes on (ext4) would take seconds.
    """
    for size in sorted(sizes, reverse=True):
        os.truncate(path, size)
        yield size


def with_one_byte_changed(path: Path, places: Iterable[int]) -> Iterator[int]:
    """The file with the byte at each of these places changed to each of a few values, and the place; then as it was."""
    with open(path, "r+b", buffering=0) as file:
        for at in places:
            file.seek(at)
            good = file.read(1)
            for value in (0, 0x7F, 0xFF, good[0] ^ 1):
                file.seek(at)
                file.write(bytes([value]))
                yield at
            file.seek(at)
            file.write(good)


# -- single weights ----------------------------------------------------------------------------------------------------


def random_ternary(generator: np.random.Generator, n_out: int, n_in: int) -> np.ndarray:
    return generator.integers(-1, 2, (n_out, n_in), dtype=np.int8)


def call(be: Backend, op: str, *arguments: Any) -> Any:
    """An op on NumPy arrays, with NumPy results. Arrays and batches are placed where the backend's ops take them.

    Vectors of floats stay on the host: they are norm weights and biases, which a model has there on every backend.
    """

    def place(value: Any) -> Any:
        if isinstance(value, np.ndarray) and not (value.ndim == 1 and value.dtype.kind == "f"):
            return be.from_host(value)
        return be.place(value) if isinstance(value, TokenBatch) else value

    with be.running():
        result = getattr(be, op)(*map(place, arguments))
        if isinstance(result, tuple):
            return tuple(be.to_host(each) for each in result)
        return None if result is None else be.to_host(result)


def prepared(be: Backend, *ws: LinearWeight) -> tuple[LinearWeight, ...]:
    """The weights in the backend's own layout, as the loader hands them to the model."""
    return tuple(be.prepare(w) for w in ws)


def random_blocks(kind: str, generator: Any, out: int, width: int) -> BlockWeight:
    """A matrix of any bytes in blocks, with scales of about 0.01."""
    block = block_type(kind)
    raw = generator.integers(0, 256, (out, width // block.values, block.nbytes), dtype=np.uint8)
    for at in block.halves:
        scales = (0.01 * generator.standard_normal(raw.shape[:2])).astype(np.float16)
        raw[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    return BlockWeight(raw.reshape(out, -1), block_type=kind)


# -- child processes ---------------------------------------------------------------------------------------------------


def run_python(code: str, *arguments: str | Path, env: dict[str, str] | None = None) -> Any:
    """Run the code in a fresh interpreter with those arguments; the JSON value that it prints last is the result."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **(env or {})},
        check=False,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr[-3000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def run_sanitized(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the code in a fresh interpreter with AddressSanitizer loaded, for emulated kernels that are built with it.

    Skips the test where gcc has none.
    """
    found = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=False)
    if found.returncode != 0 or "/" not in found.stdout:
        pytest.skip("gcc has no AddressSanitizer")
    env = {"LD_PRELOAD": found.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=False)


def put(index, value):
    """A change of an array, or of bytes, in one place."""

    def change(array):
        array[index] = value
        return array

    return change


def divide_experts(path: Path, out: Path) -> None:
    """A mixture's GGUF as files of 2023 have it: a tensor for each expert."""
    with GgufFile(path) as file:
        tensors = []
        for name, tensor in file.tensors.items():
            raw, shape, names = file.read_raw(name), tensor.shape, [name]
            if name.endswith("_exps.weight"):
                names = [name.replace("_exps.weight", f".{number}.weight") for number in range(shape[0])]
                shape = shape[1:]
            for each, part in zip(names, np.split(raw, len(names)), strict=True):
                tensors.append(TensorToWrite(each, shape, tensor.type.name, partial(np.asarray, part), part.nbytes))
        write_gguf(out, file.typed, tensors)
