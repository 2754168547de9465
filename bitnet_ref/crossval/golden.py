"""Small golden files: tiny random models in every type and container, with the logits that they give.

`write_golden` makes them for authors of kernels and readers. They are drawn, not trained, from seeds, so each call
writes the same bytes. Norms, embeddings and scales are values that float16, bfloat16 and, of the dense model, Q8_0 hold
exactly, so that all files of a model are one model and share one set of logits.

The activations of a BitLinear are rounded to int8 per token, as it was trained. Engines that round them by blocks
instead, or round those of a model that was trained with floats, give other logits, which are told too.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..api import Model, load
from ..backends import Backend
from ..errors import BackendUnavailable
from ..families.block_rule import round_inputs
from ..families.groups import GroupTernaryLinear, group_linear
from ..formats.checkpoint import linear_shape, norms_of_layer
from ..formats.convert import TARGETS, convert, engine_of
from ..formats.hf.config import parse_hf_config
from ..formats.names import hf_module
from ..formats.open import ASSETS
from ..formats.packing import hf_from_ternary
from ..formats.safetensors import write_arrays
from ..reference.layers import Array, Floats
from ..reference.weights import linear_name
from ..system.atomic import atomic_folder
from .engines.llama_cpp import dense_model
from .explain.hypotheses.activations import BlockwiseBackend
from .names import linear_input
from .types import Ints

TILE_WIDTHS = {"gguf-tl1": 64, "gguf-tl2": 96}  # BK of the kernel_config.ini beside such a file
TOLERANCE = 3e-4  # of a logit: float32 sums in another order
_VOCABULARY, _TOKENS = 64, 8
_MARGIN = 1e-5  # from a rounding boundary: no float32 engine rounds an activation to its other neighbour
_Q8_K, _Q8_0 = 256, 32  # the blocks in which llama.cpp rounds activations

_LLAMA = {
    "vocab_size": _VOCABULARY,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BITLINEAR = {"quant_method": "bitnet", "quantization_mode": "offline"}


@dataclass(frozen=True)
class TinyModel:
    """A model to write. weights: "bitlinear", "groups", "sherry", "binary" or "dense"."""

    name: str
    about: str
    weights: str
    config: Mapping[str, Any]
    targets: tuple[str, ...]


def _config(model_type: str, hidden: int, ffn: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "head_dim": hidden // 4}
    return {**_LLAMA, "model_type": model_type, **sizes, **more}


# fmt: off
MODELS = (
    TinyModel("bitnet", "BitNet b1.58 as 2B-4T is: relu2, sub-norms, int8 activations, tied embeddings", "bitlinear",
        _config("bitnet", 256, 512, num_hidden_layers=1, num_key_value_heads=1, rope_theta=500000.0)
        | {"tie_word_embeddings": True, "quantization_config": {**_BITLINEAR, "linear_class": "autobitlinear"}},
        ("hf-packed", "gguf-i2_s", "gguf-tq1_0", "gguf-tq2_0", "gguf-iq2_bn", "gguf-tl1", "gguf-tl2", "onnx", "native",
         "native-base3")),
    TinyModel("llama-bitnet", "BitLinears in a LLaMA, as Falcon3-1.58bit has them: silu, no sub-norms, an untied head",
        "bitlinear", _config("llama", 64, 128, quantization_config={**_BITLINEAR, "linear_class": "bitlinear"}),
        ("hf-packed", "hf-bf16", "hf-online", "gguf-f16", "gguf-i2_s", "native")),
    TinyModel("groups", "ternary by groups of 128 inputs, as Ternary-Bonsai is: Qwen3, float activations", "groups",
        _config("qwen3", 128, 256, tie_word_embeddings=True),
        ("mlx-2bit", "gguf-q2_0", "gguf-pq2_0", "gguf-ptq1_0", "native")),
    TinyModel("sherry",
        "3:4 sparse by groups of 256 inputs, as Sherry is: one zero in each four weights 16 apart, float activations",
        "sherry", _config("qwen3", 256, 256, num_hidden_layers=1, num_key_value_heads=1, tie_word_embeddings=True),
        ("gguf-stq1_0", "gguf-tq1_0", "gguf-tq2_0", "native")),
    TinyModel("binary", "binary by groups of 128 inputs, as Bonsai-1bit is: no zeros, float activations", "binary",
        _config("qwen3", 128, 128, tie_word_embeddings=True), ("mlx-1bit", "gguf-q1_0", "native")),
    TinyModel("dense", "a dense LLaMA, whose values all of these types hold exactly", "dense",
        _config("llama", 64, 128),
        ("hf-unpacked", "gguf-f32", "gguf-f16", "gguf-bf16", "gguf-q8_0", "onnx", "native")),
)
# fmt: on


class GoldenFile(NamedTuple):
    """A file or folder of a model that was written."""

    model: str
    target: str
    path: str  # below the folder of all
    nbytes: int
    engine: str


# -- drawing a model ---------------------------------------------------------------------------------------------------


def draw_tensors(tiny: TinyModel, seed: int) -> dict[str, Array]:
    """The tensors of a model under the names of Hugging Face checkpoints."""
    rng, cfg = np.random.default_rng([1580, seed]), tiny.config
    config = parse_hf_config(dict(cfg), Path(tiny.name))
    tensors: dict[str, Array] = {}

    def put_norm(part: str, size: int) -> None:
        odd = 2 * rng.integers(-8, 8, size) + 1  # over 64: no ratio of two of them times an integer is n + 1/2
        tensors[f"{hf_module(part)}.weight"] = (1 + odd / 64).astype(np.float16)

    def put_matrix(part: str, weights: str) -> None:
        name, (rows, columns) = hf_module(part), linear_shape(config, part)
        w = _draw_signs(rng, rows, columns, weights)
        if weights == "bitlinear":
            tensors[f"{name}.weight"] = hf_from_ternary(w)
            scale = rng.integers(8, 16) / 128  # as its reciprocal, where that is stored, it is solved for
            tensors[f"{name}.weight_scale"] = np.array([scale], np.float32)
            if cfg["quantization_config"]["linear_class"] == "bitlinear":
                tensors[f"{name}.weight_scale"] = 1 / np.array([2.0 ** -rng.integers(3, 5)], np.float32)
            return
        group = {"sherry": 256, "dense": 32}.get(weights, 128)
        scales: Floats = rng.integers(8, 16, (rows, columns // group, 1)) / 128
        if weights == "dense":  # a power of two times an integer up to 127, which each 32 have: exact in Q8_0
            scales = 2.0 ** -rng.integers(9, 11, scales.shape)
        tensors[f"{name}.weight"] = (w.reshape(rows, -1, group) * scales).reshape(rows, columns).astype(np.float16)

    table = tiny.weights if tiny.weights in ("groups", "binary") else "dense"
    put_matrix("embedding", table)
    for layer in range(config.num_hidden_layers):
        for name, size in norms_of_layer(config, layer).items():
            put_norm(name, size)
        for short in config.linear_shapes(layer):
            put_matrix(linear_name(layer, short), tiny.weights)
    put_norm("final_norm", config.hidden_size)
    if not config.tie_word_embeddings:
        put_matrix("lm_head", "dense")
    return tensors


def _draw_signs(rng: np.random.Generator, rows: int, columns: int, weights: str) -> NDArray[np.int8]:
    """(rows, columns) of -1, 0, +1; of "dense" integers up to 127."""
    if weights == "dense":
        w = rng.integers(-126, 127, (rows, columns // 32, 32))
        w[:, :, 0] = 127
        return w.reshape(rows, columns).astype(np.int8)
    if weights == "binary":
        return rng.choice(np.array([-1, 1], np.int8), (rows, columns))
    if weights != "sherry":
        return rng.integers(-1, 2, (rows, columns), dtype=np.int8)
    fours = rng.choice(np.array([-1, 1], np.int8), (rows * columns // 64, 4, 16))
    np.put_along_axis(fours, rng.integers(0, 4, (len(fours), 1, 16)), 0, axis=1)
    return fours.reshape(rows, columns)


# -- what it gives -----------------------------------------------------------------------------------------------------


class BlockInputs(Backend):
    """The inputs of matrices that are ternary by groups are rounded to int8 by blocks, as llama.cpp does it."""

    def __init__(self, size: int) -> None:
        super().__init__("float32", threads=1)
        self.size = size

    def compute(self, name: str, function: Any, *args: Any) -> Floats:
        if function is group_linear:
            x, w = args
            return super().compute(name, function, self.round_inputs(x), w)
        return super().compute(name, function, *args)

    def round_inputs(self, x: Floats) -> Floats:
        """x (N, K) as Q8_0 (blocks of 32) or Q8_K (blocks of 256) holds it, in float32."""
        x_q, dx, _ = round_inputs(x, "Q8_0" if self.size == _Q8_0 else "Q8_K")
        blocks = x_q.reshape(len(x), -1, self.size).astype(np.float32)
        return (blocks * dx[:, :, None]).reshape(x.shape)


def block_rules(model: Model) -> dict[int, Backend]:
    """Size of a block -> the backend that rounds the inputs of ternary matrices so, for the sizes that rows divide."""
    linears = [w for _, w in model.weights.linears()]
    widths = {w.bit_linear.in_features for w in linears if w.bit_linear is not None}
    if widths:
        return {} if any(width % _Q8_K for width in widths) else {_Q8_K: BlockwiseBackend(_Q8_K)}
    if not any(isinstance(w, GroupTernaryLinear) for w in linears):
        return {}
    sizes = [_Q8_0, *[_Q8_K] * all(w.shape[1] % _Q8_K == 0 for w in linears)]
    return {size: BlockInputs(size) for size in sizes}


def expected_logits(path: Path, tokens: Ints) -> dict[str, Floats]:
    """The logits (T, V) of a model by each rule: "logits" is the model's own, in float32, and "logits64" in float64."""
    model = load(path, backend="numpy")
    out = {"logits": model.logits(tokens), "logits64": load(path, backend="numpy", dtype="float64").logits(tokens)}
    out |= {f"logits_int8_by_{size}": model.on(be).logits(tokens) for size, be in block_rules(model).items()}
    if any(w.bit_linear is not None for _, w in model.weights.linears()):
        out["logits_float"] = dense_model(model).logits(tokens)
    return out


def rounding_margin(model: Model, tokens: Ints) -> float:
    """How near the input of a ternary matrix comes to where it rounds to another integer, by any rule; 1/2 if there is
    none."""
    margins, ternary = [0.5], [name for name, w in model.weights.linears() if w.kind != "dense"]
    rules: dict[int, Backend | None] = dict(block_rules(model))
    if any(w.bit_linear is not None for _, w in model.weights.linears()):
        rules[0] = None  # per token, as the model is
    if isinstance(model.weights.embedding, GroupTernaryLinear):
        ternary.append("lm_head")
    for size, be in rules.items():
        _, cache = (model if be is None else model.on(be)).run_with_cache(tokens.tolist())
        for name in ternary:
            x = np.asarray(cache[linear_input(name, model.config)], np.float64).reshape(len(tokens), -1)
            blocks = np.abs(x.reshape(len(x), -1, size or x.shape[1]))
            scaled = blocks * (127 / blocks.max(axis=2, keepdims=True))
            margins.append(float(np.abs(scaled - np.floor(scaled) - 0.5).min()))
    return min(margins)


# -- writing -----------------------------------------------------------------------------------------------------------


def write_golden(out: Path) -> list[GoldenFile]:
    """Write all models into the new folder `out`, with their logits, and return what was written.

    out/README.md, out/files.json (what lies where); of each model out/MODEL/expected.safetensors and a file or folder
    for each format, beside TL1 and TL2 the .ini of their tile sizes. ONNX is left out without the package onnx. Raises
    StorageError if `out` exists.
    """
    files: list[GoldenFile] = []
    with atomic_folder(out) as folder, TemporaryDirectory() as sources:
        for tiny in MODELS:
            source = Path(sources) / tiny.name
            tokens = _draw_model(tiny, source)
            (folder / tiny.name).mkdir()
            expected = {"tokens": tokens.astype(np.int32), **expected_logits(source, tokens)}
            write_arrays(folder / tiny.name / "expected.safetensors", expected, {"about": tiny.about})
            for target in tiny.targets:
                path = folder / tiny.name / f"{target}{TARGETS[target].suffix or ''}"
                tiles = path.with_suffix(".ini") if target in TILE_WIDTHS else None
                if tiles is not None:
                    tiles.write_text(_tiles(TILE_WIDTHS[target]), encoding="ascii")
                try:
                    convert(source, path, target, tl_tiles=tiles)
                except BackendUnavailable:  # onnx is not installed
                    continue
                each = path.rglob("*") if path.is_dir() else [path]
                nbytes = sum(file.stat().st_size for file in each if file.is_file())
                engine = engine_of(load(source, backend="numpy").config, target)
                files.append(GoldenFile(tiny.name, target, f"{tiny.name}/{path.name}", nbytes, engine))
        about = {tiny.name: tiny.about for tiny in MODELS}
        facts = {"tolerance": TOLERANCE, "models": about, "files": [file._asdict() for file in files]}
        (folder / "files.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        shutil.copyfile(ASSETS / "golden.md", folder / "README.md")
    return files


def _draw_model(tiny: TinyModel, folder: Path) -> Ints:
    """Write the first drawn model none of whose activations lies near a rounding boundary, and return its tokens."""
    for seed in count():
        source = folder.with_name(f"{folder.name}-{seed}")
        source.mkdir()
        write_arrays(source / "model.safetensors", draw_tensors(tiny, seed), {"format": "pt"})
        (source / "config.json").write_text(json.dumps(dict(tiny.config)), encoding="utf-8")
        tokens = np.random.default_rng([1581, seed]).integers(3, _VOCABULARY, _TOKENS)
        if rounding_margin(load(source, backend="numpy"), tokens) >= _MARGIN:
            source.rename(folder)
            return tokens
    raise AssertionError("count() has no end")


def _tiles(width: int) -> str:
    """bitnet.cpp's kernel_config.ini, with tile sizes for the shapes of the model `bitnet`.   width: BK"""
    shapes = ((256, 256), (64, 256), (512, 256), (256, 512))
    text = "[Kernels_{}]\nm = {}\nk = {}\nbm = 64\nbk = {}\nbmm = 32\n"
    kernels = [text.format(number, m, k, width) for number, (m, k) in enumerate(shapes)]
    return "\n".join(kernels)
