"""What no field of a GGUF says and its contents show: the dialect, which matrices are ternary, the layout of I2_S."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, FormatError
from ...reference import quantization
from ...reference.config import ModelConfig, QuantizationConfig
from ..checkpoint import hf_module, linear_name, linear_shape, norms_of_layer
from .blocks import DEQUANTIZABLE, dequantize, ternary_from_blocks
from .config import BITNET_ARCHITECTURES
from .file import GgufFile, GgufTensor
from .i2_s import LAYOUTS, LayoutEvidence, same_for_all
from .names import GGUF_LINEARS, block_linears, gguf_name, our_name

TERNARY_TYPES = ("I2_S", "TQ1_0", "TQ2_0", "TL1", "TL2/MXFP4")
_SAMPLE_VALUES = 1 << 16  # of each matrix, to tell whether it is ternary
_LAYERS_FOR_LAYOUT = 8  # looked at, at most
# The vector before each linear, and so one that its columns go with
_NORM_BEFORE = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "attn_norm"),
    **dict.fromkeys(("gate_proj", "up_proj"), "ffn_norm"),
    "o_proj": "attn_sub_norm",
    "down_proj": "ffn_sub_norm",
}


def tensor_error(file: GgufFile, name: str, message: str) -> FormatError:
    """The error to raise about a tensor: it names the file, and the tensor's place there when it has one."""
    tensor = file.tensors.get(name)
    return FormatError(message, path=file.path, offset=tensor.offset if tensor else None, field=name)


def check_dialect(file: GgufFile, evidence: list[str]) -> None:
    """Say which dialect the clashing type ids 36 to 39 are in; refuse llama.cpp's MXFP4."""
    used = {tensor.type.name: tensor for tensor in file.tensors.values() if 36 <= tensor.type.id <= 39}
    if not used:
        return
    for name in ("I2_S", "TL1", "I8_S"):
        if name in used:
            reason = f"tensor type {used[name].type.id} is {name} there, and unused in llama.cpp"
            evidence.append(f"GGUF dialect: bitnet.cpp ({reason})")
            break
    else:
        tensor = used["TL2/MXFP4"]
        if f"{tensor.name}_scale" not in file.tensors:
            raise tensor_error(
                file,
                tensor.name,
                "has the type 39, which is MXFP4 for llama.cpp and TL2 for bitnet.cpp; without a tensor "
                f"{tensor.name}_scale it is MXFP4, which is not supported",
            )
        evidence.append(
            f"GGUF dialect: bitnet.cpp (tensor type 39 with a tensor {tensor.name}_scale is TL2, not MXFP4)"
        )


def find_ternary(file: GgufFile, evidence: list[str]) -> QuantizationConfig | None:
    """Which linears are ternary: by their type, or because a dense one holds only -s, 0 and +s.

    In BitNet's own architectures all are, so when none holds ternary values all hold master weights. A llama may be
    a BitNet, of which some modules may be left dense, or a dense model.
    """
    ternary = {tensor.name: _begins_ternary(file, tensor) for tensor in block_linears(file)}
    arch = file.metadata.get("general.architecture")
    bitnet = isinstance(arch, str) and arch in BITNET_ARCHITECTURES
    head = file.tensors.get("output.weight")
    skipped = [] if head is not None and head.type.name in TERNARY_TYPES else ["lm_head"]
    if not any(ternary.values()):
        if not bitnet:
            kinds = sorted({tensor.type.name for tensor in block_linears(file)} & {"TQ1_0", "TQ2_0"})
            if kinds:
                evidence.append(f"dense, although in {kinds[0]}: a matrix's blocks have different scales")
            return None
        evidence.append("matrices of many values: master weights, quantised by absmean")
        return QuantizationConfig("autobitlinear", "online", tuple(skipped))
    dense_kinds = sorted({file.tensors[n].type.name for n, yes in ternary.items() if yes} - set(TERNARY_TYPES))
    if dense_kinds:
        listed = " and ".join(dense_kinds)
        evidence.append(f"{listed} matrices that hold only -s, 0 and +s: ternary already, with s as their scale")
    others = [name for name, yes in ternary.items() if not yes]
    if others and bitnet:
        kind = file.tensors[others[0]].type.name
        raise tensor_error(
            file,
            others[0],
            f"is {kind} and not ternary (one scale s; only -s, 0 and +s), while {len(ternary) - len(others)} other "
            "linears are; a BitNet's all are. Convert it again from the ternary or the master weights",
        )
    if others:
        evidence.append(f"dense among ternary matrices: {', '.join(others)}")
        skipped += [hf_module(our_name(name)) for name in others]
    return QuantizationConfig("autobitlinear", "offline", tuple(skipped))


def _begins_ternary(file: GgufFile, tensor: GgufTensor) -> bool:
    """Whether a linear is ternary as far as its first values tell; all of them are checked when it is read."""
    kind = tensor.type.name
    if kind not in DEQUANTIZABLE:
        return kind in TERNARY_TYPES
    blocks = min(tensor.nbytes // tensor.type.block_bytes, _SAMPLE_VALUES // tensor.type.block_values)
    raw = file.read_raw(tensor.name, 0, blocks * tensor.type.block_bytes)
    shape = (1, blocks * tensor.type.block_values)
    if kind in ("TQ1_0", "TQ2_0"):
        try:
            return ternary_from_blocks(raw, kind, shape) is not None
        except FormatError:
            return True  # reading the matrix says what is wrong, and where
    values = dequantize(raw, kind, shape)
    return quantization.split_ternary(values) is not None or not (values != 0).any()


def find_i2_s_layout(
    file: GgufFile,
    config: ModelConfig,
    forced: str | None,
    norm: Callable[[str], NDArray[np.float32]],
    evidence: list[str],
) -> str:
    """The layout of the I2_S matrices: as the caller says, or by `LayoutEvidence`, layer after layer until it is clear.

    norm: reads a norm's weight by our name.
    """
    if not any(tensor.type.name == "I2_S" for tensor in block_linears(file)):
        return "x86"
    if forced is not None:
        if forced not in LAYOUTS:
            raise ConfigError(f"expected one of {', '.join(LAYOUTS)}, got {forced!r}", field="i2_s_layout")
        evidence.append(f"I2_S layout: {forced}, as it was asked for")
        return forced
    found = LayoutEvidence()
    layers, most = config.num_hidden_layers, _LAYERS_FOR_LAYOUT
    for index in sorted({round(i * (layers - 1) / max(1, most - 1)) for i in range(most)}):
        _compare_layouts(file, config, index, norm, found)
        if found.judge().decided:
            break
    verdict = found.judge()
    evidence.append(verdict.words)
    return verdict.layout


def _compare_layouts(
    file: GgufFile,
    config: ModelConfig,
    index: int,
    norm: Callable[[str], NDArray[np.float32]],
    found: LayoutEvidence,
) -> None:
    columns, rows = {}, {}
    for short in GGUF_LINEARS:
        name = linear_name(index, short)
        tensor = file.tensors.get(f"{gguf_name(name)}.weight")
        if tensor is None or tensor.type.name != "I2_S" or tensor.shape != linear_shape(config, name):
            continue  # reading the model says what is wrong with it
        try:
            both = found.densities(file.read_raw(tensor.name), linear_shape(config, name))
        except FormatError as error:
            raise tensor_error(file, tensor.name, error.message) from None
        columns[short] = {layout: pair[0] for layout, pair in both.items()}
        rows[short] = {layout: pair[1] for layout, pair in both.items()}
        before = f"blocks.{index}.{_NORM_BEFORE[short]}"
        if before in norms_of_layer(config, index) and f"{gguf_name(before)}.weight" in file.tensors:
            found.add(columns[short], same_for_all(norm(before)))
    for short in ("gate_proj", "up_proj"):  # neuron j is row j there and column j of down_proj
        if short in rows and "down_proj" in columns:
            found.add(columns["down_proj"], rows[short])
