"""Models for mutants of the kernels alone: what the texts of `mutant_texts.py` lack. All small.

blocks     a llama of random matrices in GGUF blocks of nine types, exact and by ggml's rule
groups     a llama with biases, ternary by groups of 128, of so many rows that panels are divided
hadamard   the Qwen3 of the tests in a Hadamard basis
mixture    the Qwen3 mixture of the tests, ternary by groups;   ruled mixture: a Mixtral in Q2_0, by ggml's rule
sparse     a BitNet with four of five gates at zero, multiplied by strips; a LoRA adapter for some requests
adapted    a dense model with an adapter, in float32 and bfloat16
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from planted_models import BASE, FAMILIES, Tensors, tensors_for, write
from safetensors.numpy import save_file

from bitnet_ref.families.blocks import INVERSES, BlockIntegers, block_type
from bitnet_ref.formats.checkpoint import Checkpoint
from bitnet_ref.formats.convert import convert
from bitnet_ref.formats.gguf.config import gguf_metadata, special_token_metadata
from bitnet_ref.formats.gguf.export import TensorToWrite, write_gguf
from bitnet_ref.formats.gguf.file import GgufFile
from bitnet_ref.formats.names import gguf_name
from bitnet_ref.formats.open import open_checkpoint
from bitnet_ref.reference.quantization import quantize_weights
from bitnet_ref.reference.weights import linear_name

INTEGERS = {  # type: (smallest q, largest q + 1)
    "Q8_0": (-127, 128),
    "Q4_0": (-8, 8),
    "Q5_0": (-16, 16),
    "Q4_1": (0, 16),
    "Q4_K": (0, 16),
    "Q5_K": (0, 32),
    "Q6_K": (-32, 32),
    "TQ2_0": (-1, 2),
    "Q2_0": (-1, 2),
}
LAYERS = (  # the type of each matrix; gate and up of one layer take the same form of an input
    {"q_proj": "Q4_K", "k_proj": "Q8_0", "v_proj": "Q6_K", "o_proj": "Q5_0"}
    | {"gate_proj": "Q4_0", "up_proj": "Q4_1", "down_proj": "Q2_0"},
    {"q_proj": "Q5_K", "k_proj": "TQ2_0", "v_proj": "Q4_0", "o_proj": "Q4_1"}
    | {"gate_proj": "Q5_K", "up_proj": "Q6_K", "down_proj": "Q8_0"},
)


def kernel_models(folder: Path) -> dict[str, str]:
    """{name: path} of these models."""
    convert(FAMILIES / "mixtral-groups128", folder / "mixture.gguf", "gguf-q2_0", verify=False)
    paths = {
        "blocks": _in_blocks(folder / "blocks.gguf"),
        "groups": _by_groups(folder / "groups"),
        "hadamard": _in_hadamard_basis(folder / "hadamard.gguf"),
        "mixture": FAMILIES / "qwen3_moe-groups128",
        "ruled mixture": folder / "mixture.gguf",
        "sparse": _sparse(folder / "sparse"),
        "adapted": _adapted(folder / "adapted"),
    }
    return {name: str(path) for name, path in paths.items()}


def _in_blocks(path: Path) -> Path:
    """Sizes of two blocks of 256 and a rest, and rows that fill no panel."""
    sizes = {"hidden_size": 512, "intermediate_size": 576, "num_attention_heads": 10, "head_dim": 32, "vocab_size": 70}
    config = {**BASE, **sizes, "model_type": "llama", "hidden_act": "silu", "tie_word_embeddings": False}
    del config["quantization_config"]
    write(path.with_suffix(""), config, tensors_for(config, embedding_std=0.5))
    dice = np.random.default_rng(6)
    with open_checkpoint(path.with_suffix("")) as plain:
        tensors = list(_tensors_in_blocks(plain, dice))
        write_gguf(path, gguf_metadata(plain.config) | special_token_metadata(plain.config), tensors)
    return path


def _tensors_in_blocks(plain: Checkpoint, dice: np.random.Generator) -> list[TensorToWrite]:
    cfg = plain.config
    D = cfg.hidden_size
    out = [_matrix("token_embd.weight", "Q4_K", (cfg.vocab_size, D), dice)]
    out += [_matrix("output.weight", "Q6_K", (cfg.vocab_size, D), dice), _norm("output_norm.weight", D, dice)]
    for i, types in enumerate(LAYERS):
        out += [_norm(f"blk.{i}.{name}.weight", D, dice) for name in ("attn_norm", "ffn_norm")]
        for part, shape in cfg.linear_shapes(i).items():
            name = gguf_name(linear_name(i, part), cfg)
            out.append(_matrix(f"{name}.weight", types[part], shape, dice))
    return out


def _norm(name: str, size: int, dice: np.random.Generator) -> TensorToWrite:
    weight = (1 + 0.2 * dice.standard_normal(size)).astype(np.float32)
    return TensorToWrite(name, (size,), "F32", lambda: weight.view(np.uint8))


def _matrix(name: str, kind: str, shape: tuple[int, int], dice: np.random.Generator) -> TensorToWrite:
    """A random matrix of about the size of an initialised one, each block with a scale of its own."""
    block = block_type(kind)
    n = shape[0] * shape[1] // block.values
    low, high = INTEGERS[kind]
    q = dice.integers(low, high, (n, block.values), dtype=np.int8)
    d, s, e, m = np.ones((n, 1), dtype=np.float32), None, None, None
    if kind == "Q4_1":
        m = np.ones((n, 1), dtype=np.int8)
    elif kind in ("Q4_K", "Q5_K"):
        s, m = dice.integers(0, 64, (2, n, 8), dtype=np.uint8)
    elif kind == "Q6_K":
        s = dice.integers(-127, 128, (n, 16), dtype=np.int8)
    if m is not None:
        e = np.full((n, 1), -(high - 1) / 2, dtype=np.float32)
    unit = BlockIntegers(d, q, s, e, m).floats.std()
    scales = dice.uniform(0.5, 2, (n, 1)).astype(np.float32) / np.float32(unit * shape[1] ** 0.5)
    values = BlockIntegers(scales, q, s, None if e is None else e * scales, m)
    raw = np.concatenate([part.reshape(n, -1).view(np.uint8) for part in INVERSES[kind](values)], axis=1)
    return TensorToWrite(name, shape, kind, lambda: raw.reshape(-1))


def _by_groups(folder: Path) -> Path:
    sizes = {"hidden_size": 256, "intermediate_size": 1408, "num_key_value_heads": 1, "head_dim": 96, "vocab_size": 70}
    config = {**BASE, **sizes, "model_type": "llama", "hidden_act": "silu", "tie_word_embeddings": False}
    del config["quantization_config"]
    tensors, dice = tensors_for(config, embedding_std=0.5), np.random.default_rng(8)
    for name, w in list(tensors.items()):
        if name.endswith("_proj.weight"):
            groups = dice.integers(-1, 2, (len(w), w.shape[1] // 128, 128)) * dice.uniform(0.5, 2, (len(w), 1, 1))
            groups = groups * dice.uniform(0.5, 2, (*groups.shape[:2], 1)) / w.shape[1] ** 0.5
            tensors[name] = groups.reshape(w.shape).astype(ml_dtypes.bfloat16)
            if ".self_attn." in name:
                tensors[name.replace("weight", "bias")] = dice.normal(size=len(w), scale=0.3).astype(np.float32)
    return write(folder, {**config, "attention_bias": True}, tensors)


def _in_hadamard_basis(path: Path) -> Path:
    """With a small final norm: a tied head of random rows would predict the last token alone."""
    with GgufFile(FAMILIES / "qwen3-groups128" / "pq2_0-hadamard.gguf") as file:
        tensors = {
            t.name: TensorToWrite(t.name, t.shape, t.type.name, lambda name=t.name: file.read_raw(name), t.nbytes)
            for t in file.tensors.values()
        }
        norm = tensors["output_norm.weight"]
        small = np.float32(0.05) * norm.produce().view(np.float32)
        tensors[norm.name] = norm._replace(produce=lambda: small.view(np.uint8))
        write_gguf(path, file.typed, [*tensors.values()])
    return path


def _sparse(folder: Path) -> Path:
    """Some inputs of the feed-forwards have one sign, and the rows of gate_proj weigh them with the other."""
    sizes = {"hidden_size": 320, "intermediate_size": 600, "num_attention_heads": 5, "num_key_value_heads": 1}
    config = {**BASE, **sizes, "head_dim": 64, "vocab_size": 70, "tie_word_embeddings": False}
    constant = slice(0, 12)
    tensors = tensors_for({**config, "quantization_config": None}, embedding_std=1.0)
    tensors["model.embed_tokens.weight"][:, constant] = 2
    for name, tensor in tensors.items():
        if name.endswith("gate_proj.weight"):
            tensor[:, constant] = -np.abs(tensor).mean()
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[constant] *= np.float32(0.1)
        if name.endswith("_proj.weight"):
            w_t, scale = quantize_weights(tensor)
            tensors[name] = w_t * scale
    config["quantization_config"] = {**BASE["quantization_config"], "quantization_mode": "online"}
    write(folder, config, tensors)
    _add_adapter(folder / "adapter", tensors, rank=5, targets=["k_proj", "gate_proj", "up_proj", "down_proj"])
    return folder


def _adapted(folder: Path) -> Path:
    """Sizes that leave a rest in the loops over columns and rows of the factors."""
    sizes = {"hidden_size": 132, "intermediate_size": 524, "num_attention_heads": 6, "head_dim": 22, "vocab_size": 70}
    config = {**BASE, **sizes, "model_type": "llama", "hidden_act": "silu", "tie_word_embeddings": False}
    del config["quantization_config"]
    tensors = tensors_for(config, embedding_std=0.5)
    write(folder, config, tensors)
    _add_adapter(folder, tensors, rank=6, targets=["q_proj", "o_proj", "gate_proj", "down_proj"])
    return folder


def _add_adapter(folder: Path, tensors: Tensors, rank: int, targets: list[str]) -> None:
    """Writes a LoRA adapter of these linears: the first layer's in float32, the second's in bfloat16."""
    dice, factors = np.random.default_rng(7), dict[str, NDArray[Any]]()
    for name, w in tensors.items():
        if name.endswith(tuple(f"{target}.weight" for target in targets)):
            dtype = np.float32 if ".layers.0." in name else ml_dtypes.bfloat16
            a = dice.standard_normal((rank, w.shape[1])) / w.shape[1] ** 0.5
            b = dice.standard_normal((w.shape[0], rank)) / rank**0.5 * (0.1 if "gate_proj" in name else 1)
            place = "base_model.model." + name.removesuffix(".weight")
            factors |= {f"{place}.lora_{side}.weight": x.astype(dtype) for side, x in (("A", a), ("B", b))}
    facts = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": rank, "lora_alpha": rank}
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(facts | {"target_modules": targets}))
    save_file(factors, folder / "adapter_model.safetensors")
