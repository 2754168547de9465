"""What a GGUF's fields do not say and its contents show: the dialect, which matrices are ternary, the I2_S layout,
and the order of q and k rows under the architecture llama."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ...reference.config import ModelConfig, QuantizationConfig
from ...reference.layers import Array
from ...reference.weights import linear_name
from ..checkpoint import linear_shape, norms_of_layer
from ..names import gguf_linears, gguf_name, hf_module, linear_of_gguf
from ..packing import split_ternary
from .blocks import (
    DEQUANTIZABLE,
    GROUP_TYPES,
    TERNARY_BLOCKS,
    TERNARY_ROWS,
    TERNARY_TYPES,
    dequantize,
    read_scales,
)
from .config import LINEAR_NORM, architectures
from .file import GgufFile, GgufTensor
from .i2_s import LAYOUTS, LayoutEvidence

_SAMPLE_VALUES = 1 << 16  # read from each dense matrix to decide whether it is ternary
# In a model's name: trained with inputs in float, and perhaps one scale in a matrix all the same
_FLOAT_INPUTS = ("trilm", "spectra", "bitcpm", "maple")
_MAX_LAYERS_FOR_LAYOUT = 8
# The norm whose output each linear reads, so its weights and the linear's columns go together
_NORM_BEFORE = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "attn_norm"),
    **dict.fromkeys(("gate_proj", "up_proj"), "ffn_norm"),
    "o_proj": "attn_sub_norm",
    "down_proj": "ffn_sub_norm",
}


def permute_rows(w: Array, heads: int) -> Array:
    """Rows of q or k from the `half` order (ours) to `interleaved`, which llama.cpp's llama architecture has.

    In each head of d rows, rows j and j + d/2, which RoPE turns together, become neighbours 2j and 2j + 1.
    """
    return w.reshape(heads, 2, -1, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def unpermute_rows(w: Array, heads: int) -> Array:
    """The inverse of `permute_rows`."""
    return w.reshape(heads, -1, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def permuted_heads(config: ModelConfig, architecture: str, name: str) -> int:
    """The number of heads whose rows are permuted in a linear: q and k under the architecture llama; elsewhere 0."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    return heads.get(name.rpartition(".")[2], 0) if architectures()[architecture][1].permuted else 0


def block_linears(file: GgufFile) -> Iterator[GgufTensor]:
    """The blocks' linears, found by their names, without trusting the metadata's number of blocks."""
    for name, tensor in file.tensors.items():
        if len(tensor.shape) == 2 and linear_of_gguf(name) is not None:
            yield tensor


def check_dialect(file: GgufFile, evidence: list[str]) -> None:
    """Record which dialect the ambiguous type ids 36 to 39 belong to."""
    used = {tensor.type.name: tensor for tensor in file.tensors.values() if 36 <= tensor.type.id <= 39}
    for name in ("I2_S", "TL1", "I8_S"):
        if name in used:
            reason = f"tensor type {used[name].type.id} is {name} there, and unused in llama.cpp"
            evidence.append(f"GGUF dialect: bitnet.cpp ({reason})")
            return
    if tl2 := used.get("TL2/MXFP4"):
        evidence.append(f"GGUF dialect: bitnet.cpp (tensor type 39 with a tensor {tl2.name}_scale is TL2, not MXFP4)")
    elif used:
        evidence.append("GGUF dialect: llama.cpp (tensor type 39 without a tensor of its scale is MXFP4, not TL2)")


def find_ternary(file: GgufFile, evidence: list[str], activations: str = "auto") -> QuantizationConfig | None:
    """Which linears are ternary: by their type, or because a dense one holds only -s, 0 and +s.

    In BitNet's own architectures all linears are ternary: if none holds ternary values, all are master weights. Under
    llama, a model may be dense, or a BitNet with some dense modules. Or it is ternary with its inputs in float, for
    which a file has no key: it is, if a matrix has several scales, which no BitLinear has.
    activations: see `LoadOptions`.
    """
    arch = file.metadata.get("general.architecture")
    if activations == "blocks":
        evidence.append("activations: rounded by blocks, as it was asked for (the rule of ggml, see docs/families.md)")
        return None
    if np.any(file.metadata.get(f"{arch}.expert_count")):  # it may be an array with a value for each layer
        evidence.append("activations stay floats: experts are no BitLinears")
        return None
    bitnet = isinstance(arch, str) and arch in architectures() and architectures()[arch][1].sub_norms
    bitnet = bitnet or LINEAR_NORM in file.tensors
    in_blocks = [tensor for tensor in block_linears(file) if tensor.type.name in (*TERNARY_BLOCKS, *TERNARY_ROWS)]
    if not bitnet and activations != "int8":
        several = next((tensor for tensor in in_blocks if not _has_one_scale(file, tensor)), None)
        if several is not None:
            words = f"{several.name} is {several.type.name} with several scales, which no BitLinear has"
            evidence.append(f"activations stay floats: {words}")
            return None
    float_inputs = _choose_float_inputs(file, bool(in_blocks) and not bitnet, activations, evidence)
    ternary = {tensor.name: _begins_ternary(file, tensor) for tensor in block_linears(file)}
    groups = {tensor.type.name for tensor in block_linears(file)} & {*GROUP_TYPES}
    if groups:
        evidence.append(f"{' and '.join(sorted(groups))}: a scale for each block, activations stay floats")
    if groups and not bitnet:
        return None
    head = file.tensors.get("output.weight")
    skipped = [] if head is not None and head.type.name in TERNARY_TYPES else ["lm_head"]
    if not any(ternary.values()):
        if not bitnet:
            return None
        evidence.append("matrices of many values: master weights, quantised by absmean")
        return QuantizationConfig("autobitlinear", "online", tuple(skipped))
    dense_types = sorted({file.tensors[n].type.name for n, yes in ternary.items() if yes} - set(TERNARY_TYPES))
    if dense_types:
        listed = " and ".join(dense_types)
        evidence.append(f"{listed} matrices that hold only -s, 0 and +s: ternary already, with s as their scale")
    dense = [name for name, yes in ternary.items() if not yes]
    if dense and bitnet:
        message = (
            f"is {file.tensors[dense[0]].type.name} and not ternary (one scale s; only -s, 0 and +s), while "
            f"{len(ternary) - len(dense)} other linears are; a BitNet's all are. Convert it again from the ternary or "
            "the master weights"
        )
        raise file.tensor_error(dense[0], message)
    if dense:
        evidence.append(f"dense among ternary matrices: {', '.join(dense)}")
        skipped += [hf_module(name) for tensor in dense if (name := linear_of_gguf(tensor)) is not None]
    return QuantizationConfig("autobitlinear", "offline", tuple(skipped), int8_activations=not float_inputs)


def _has_one_scale(file: GgufFile, tensor: GgufTensor) -> bool:
    """Whether all scales of a matrix of ternary blocks or rows are equal. Those of zeros may be 0."""
    seen: set[float] = set()
    height, width = tensor.shape
    with file.naming(tensor.name):
        for scales in read_scales(partial(file.read_raw, tensor.name), tensor.type.name, (height, width)):
            seen.update(np.unique(scales[scales != 0]).tolist()[:2])
            if len(seen) > 1:
                return False
    return True


def _choose_float_inputs(file: GgufFile, in_doubt: bool, activations: str, evidence: list[str]) -> bool:
    """Whether ternary matrices of one scale each get their inputs in float.

    in_doubt: whether a model of this file's architecture and types may be either.
    """
    if activations != "auto":
        evidence.append(f"activations: {activations}, as it was asked for")
        return activations == "float"
    names = [str(file.metadata.get(f"general.{key}", "")) for key in ("name", "basename", "source.url")]
    hint = next((hint for hint in _FLOAT_INPUTS if any(hint in name.lower() for name in names)), None)
    if in_doubt and hint is not None:
        evidence.append(f"activations stay floats: the file's name says {hint}")
    elif in_doubt:
        evidence.append(
            "activations: int8, as each matrix has a single scale; if the model was trained with floats, as TriLM and "
            'BitCPM were, load it with activations="float"'
        )
    return in_doubt and hint is not None


def _begins_ternary(file: GgufFile, tensor: GgufTensor) -> bool:
    """Whether the first values of a linear are ternary. The rest is checked when the matrix is read."""
    kind = tensor.type.name
    if kind in TERNARY_TYPES or kind not in DEQUANTIZABLE:
        return kind in TERNARY_TYPES
    blocks = min(tensor.nbytes // tensor.type.block_bytes, _SAMPLE_VALUES // tensor.type.block_values)
    raw = file.read_raw(tensor.name, 0, blocks * tensor.type.block_bytes)
    values = dequantize(raw, kind, (1, blocks * tensor.type.block_values))
    return split_ternary(values) is not None or not (values != 0).any()


def find_i2_s_layout(
    file: GgufFile,
    config: ModelConfig,
    forced: str | None,
    norm: Callable[[str], NDArray[np.float32]],
    evidence: list[str],
) -> str:
    """The layout of the I2_S matrices: `forced`, or by `LayoutEvidence`, which looks at layers until it is clear.

    norm: reads a norm's weight by our name.
    """
    if not any(tensor.type.name == "I2_S" for tensor in block_linears(file)):
        return "x86"
    if forced is not None:
        evidence.append(f"I2_S layout: {forced}, as it was asked for")
        return forced
    comparison = LayoutEvidence()
    step = (config.num_hidden_layers - 1) / (_MAX_LAYERS_FOR_LAYOUT - 1)
    for index in sorted({round(i * step) for i in range(_MAX_LAYERS_FOR_LAYOUT)}):
        _compare_layouts(file, config, index, norm, comparison)
        if comparison.judge().decided:
            break
    verdict = comparison.judge()
    evidence.append(verdict.words)
    return verdict.layout


def _compare_layouts(
    file: GgufFile,
    config: ModelConfig,
    index: int,
    norm: Callable[[str], NDArray[np.float32]],
    comparison: LayoutEvidence,
) -> None:
    columns, rows = {}, {}
    for short in gguf_linears():
        name = linear_name(index, short)
        tensor = file.tensors.get(f"{gguf_name(name)}.weight")
        if tensor is None or tensor.type.name != "I2_S" or tensor.shape != linear_shape(config, name):
            continue  # reading the model reports what is wrong with it
        with file.naming(tensor.name):
            densities = comparison.densities(file.read_raw(tensor.name), linear_shape(config, name))
        columns[short] = {layout: pair[0] for layout, pair in densities.items()}
        rows[short] = {layout: pair[1] for layout, pair in densities.items()}
        before = f"blocks.{index}.{_NORM_BEFORE[short]}"
        if before in norms_of_layer(config, index) and f"{gguf_name(before)}.weight" in file.tensors:
            comparison.add(columns[short], dict.fromkeys(LAYOUTS, norm(before)))
    for short in ("gate_proj", "up_proj"):  # neuron j is row j there and column j of down_proj
        if short in rows and "down_proj" in columns:
            comparison.add(columns["down_proj"], rows[short])
