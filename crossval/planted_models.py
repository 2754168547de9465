"""Small random models on which the planted bugs show, written as Hugging Face folders.

Some bugs need a special input: sums beyond int16 need aligned signs, a missing floor needs a token of tiny values, a
rounding rule needs exact ties.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as LibraryTokenizer

import bitnet_ref
from bitnet_ref.formats.packing import hf_from_ternary
from bitnet_ref.reference.quantization import quantize_weights

PACKED = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
DIVIDED = {"quant_method": "bitnet", "linear_class": "bitlinear"}
ONLINE = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
BASE: dict[str, Any] = {
    "model_type": "bitnet",
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "relu2",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "quantization_config": PACKED,
}
SILU = {"model_type": "llama", "hidden_act": "silu"}
Tensors = dict[str, NDArray]


def tensors_for(config: dict[str, Any], seed: int = 0, embedding_std: float = 0.03) -> Tensors:
    """Random tensors under Hugging Face's names. The embedding is small, so that the norms' eps matters."""
    rng = np.random.default_rng([20240227, seed])
    d_model, d_ffn = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or d_model // config["num_attention_heads"]
    query, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    quantization = config.get("quantization_config")
    tensors: Tensors = {}

    def normal(*shape: int, std: float) -> NDArray:
        return (rng.standard_normal(shape) * std).astype(np.float32)

    def linear(name: str, n_out: int, n_in: int) -> None:
        w = normal(n_out, n_in, std=n_in**-0.5 * rng.uniform(0.5, 2))
        if quantization is None:
            tensors[f"{name}.weight"] = w
            return
        w_t, scale = quantize_weights(w)
        if quantization == ONLINE:
            tensors[f"{name}.weight"] = w_t * scale  # master weights that were saved after quantisation
            return
        tensors[f"{name}.weight"] = hf_from_ternary(w_t)
        tensors[f"{name}.weight_scale"] = np.array([1 / scale if quantization == DIVIDED else scale], dtype=np.float32)

    def norm(name: str, size: int) -> None:
        tensors[f"{name}.weight"] = 1 + normal(size, std=0.2)

    tensors["model.embed_tokens.weight"] = normal(config["vocab_size"], d_model, std=embedding_std)
    for i in range(config["num_hidden_layers"]):
        block = f"model.layers.{i}."
        norm(block + "input_layernorm", d_model)
        norm(block + "post_attention_layernorm", d_model)
        if config["model_type"] == "bitnet":
            norm(block + "self_attn.attn_sub_norm", query)
            norm(block + "mlp.ffn_sub_norm", d_ffn)
        sizes = {"q_proj": (query, d_model), "k_proj": (kv, d_model), "v_proj": (kv, d_model)}
        for name, shape in (sizes | {"o_proj": (d_model, query)}).items():
            linear(f"{block}self_attn.{name}", *shape)
        for name, shape in {"gate_proj": (d_ffn, d_model), "up_proj": (d_ffn, d_model)}.items():
            linear(f"{block}mlp.{name}", *shape)
        linear(block + "mlp.down_proj", d_model, d_ffn)
    norm("model.norm", d_model)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = normal(config["vocab_size"], d_model, std=d_model**-0.5)
    return tensors


def write(folder: Path, config: dict[str, Any], tensors: Tensors | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors_for(config) if tensors is None else tensors, folder / "model.safetensors")
    return folder


# -- models for bugs that need a special input ------------------------------------------------------------------------


def aligned_sums(folder: Path) -> Path:
    """Activations of one sign against rows of +1: sums of 512 times about 100, beyond int16."""
    config = {**BASE, "hidden_size": 512, "intermediate_size": 512}
    tensors = tensors_for(config)
    rng = np.random.default_rng(1)
    tensors["model.embed_tokens.weight"] = rng.uniform(0.02, 0.03, (64, 512)).astype(np.float32)
    tensors["model.layers.0.input_layernorm.weight"] = np.ones(512, dtype=np.float32)
    w_t = rng.integers(-1, 2, (512, 512), dtype=np.int8)
    w_t[::3] = 1
    tensors["model.layers.0.self_attn.q_proj.weight"] = hf_from_ternary(w_t)
    return write(folder, config, tensors)


def faint_token(folder: Path) -> Path:
    """Token 5's embedding is almost nothing: its normalised values stay below the floor of the activation scale."""
    tensors = tensors_for(BASE)
    tensors["model.embed_tokens.weight"][5] *= np.float32(3e-7)
    return write(folder, BASE, tensors)


def exact_ties(folder: Path) -> Path:
    """Embeddings of +-1 normalise to exactly +-1, eps being below float32's last bit; norm weights (k + 1/2)/64 with a
    largest of 127/64 then put the scaled activations exactly on ties."""
    rng = np.random.default_rng(2)
    config = {**BASE, "rms_norm_eps": 1e-12}
    tensors = tensors_for(config)
    tensors["model.embed_tokens.weight"] = rng.choice([-1, 1], (64, 128)).astype(np.float32)
    weight = (rng.integers(0, 100, 128) + 0.5) / 64
    weight[0] = 127 / 64
    tensors["model.layers.0.input_layernorm.weight"] = weight.astype(np.float32)
    return write(folder, config, tensors)


def chat(folder: Path) -> Path:
    """A byte-level tokenizer with <|eot_id|>, which is the third token of the model's reply to CHAT."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = LibraryTokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    library.add_special_tokens([AddedToken(token) for token in specials])
    bos, eos, eot = (library.token_to_id(token) for token in specials)
    library.post_processor = processors.TemplateProcessing(
        single=f"{specials[0]} $A", special_tokens=[(specials[0], bos)]
    )
    config = {**BASE, "vocab_size": 260, "bos_token_id": bos, "eos_token_id": eos, "tie_word_embeddings": False}
    tensors = tensors_for(config, embedding_std=0.5)
    write(folder, config, tensors)
    library.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": specials[0], "eos_token": specials[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    model = bitnet_ref.load(folder, backend="numpy")
    reply = model.generate(model.tokenizer.apply_chat_template(CHAT), max_tokens=3, ignore_eos=True)
    assert isinstance(reply, bitnet_ref.generation.Generation)
    third, head = reply.token_ids[-1], tensors["lm_head.weight"]
    head[[third, eot]] = head[[eot, third]]
    return write(folder, config, tensors)


def query_scaled(folder: Path) -> Path:
    """The Gemma3 with scores divided by 4, not by the square root of its head_dim of 64."""
    shutil.copytree(FAMILIES / "embedding-gemma3", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"query_pre_attn_scalar": 16}))
    return folder


def groups_of_64(folder: Path) -> Path:
    """The Qwen3 with the scale of every second 64 inputs doubled, which float16 holds exactly."""
    shutil.copytree(FAMILIES / "qwen3-groups128", folder, ignore=shutil.ignore_patterns("*.gguf", "golden*"))
    tensors = load_file(folder / "model.safetensors")
    for array in tensors.values():
        if array.ndim == 2:
            array.reshape(len(array), -1, 64)[:, ::2] *= 2
    save_file(tensors, folder / "model.safetensors")
    return folder


FAMILIES = Path(__file__).parents[1] / "tests" / "data" / "families"  # tiny models of each, compared with transformers
CHAT = [{"role": "user", "content": "Hello"}]

MODELS: dict[str, Callable[[Path], Path]] = {
    "bitnet": lambda folder: write(folder, BASE),
    "silu": lambda folder: write(folder, {**BASE, **SILU}),
    "divided": lambda folder: write(folder, {**BASE, **SILU, "quantization_config": DIVIDED}),
    "saved after quantisation": lambda folder: write(folder, {**BASE, "quantization_config": ONLINE}),
    "masters": lambda folder: FAMILIES.parent / "golden" / "bitnet-bf16-online",
    "one kv head": lambda folder: write(folder, {**BASE, "num_key_value_heads": 1}),
    "wide": lambda folder: write(folder, {**BASE, "hidden_size": 256, "intermediate_size": 768}),
    "window": lambda folder: write(
        folder, {**BASE, "model_type": "mistral", "hidden_act": "silu", "sliding_window": 4}
    ),
    "aligned sums": aligned_sums,
    "faint token": faint_token,
    "exact ties": exact_ties,
    "chat": chat,
    "embedding-qwen3": lambda folder: FAMILIES / "embedding-qwen3",
    "qwen3": lambda folder: FAMILIES / "qwen3-groups128",
    "hadamard": lambda folder: FAMILIES / "qwen3-groups128" / "pq2_0-hadamard.gguf",
    "gemma3": lambda folder: FAMILIES / "embedding-gemma3",
    "gemma3 with a query scale": query_scaled,
    "groups of 64": groups_of_64,
    "qwen3_5": lambda folder: FAMILIES / "qwen3_5-groups128-hybrid",
    "storyteller": lambda folder: Path(bitnet_ref.formats.open.ASSETS / "storyteller"),
}
TOKENS = [1, 17, 5, 23, 9, 42, 3, 3, 60, 11, 30, 8]
