"""Matrices as other tools pack them in a Hugging Face folder: MLX (mlx-lm) and AWQ.

MLX, of a linear, the embedding or the head: `.weight` uint32 (N, K bits / 32), `.scales` and `.biases` (N, K / group).
The codes q of a row are one stream of bits, the lowest first, and w = scale q + bias, of which nothing is rounded here.
Codes 0, 1, 2 with bias = -scale are ternary, one bit with 2 bias = -scale is binary: these are packed as planes.
Only shapes tell the number of bits and the group of a matrix: mixed models have several. The experts of a layer are one
tensor of three dimensions. Maple's own packing has 2 bits and `.row_alpha` (N,): w = row_alpha (q - 1).
That is MLX's mode affine. Its modes mxfp4, mxfp8 and nvfp4 have no biases: codes and `.scales`, uint8, are small floats
(OCP Microscaling: e2m1 or e4m3, times e8m0 for 32 columns; NVIDIA's e2m1 times e4m3 for 16).

AWQ, of a linear: `.qweight` int32 (K, N / 8), `.qzeros` int32 (K / group, N / 8), `.scales` (K / group, N), in which
eight columns share a word in an order of their own, and w = (q - zero) scale.

Bonsai 2 as an MLX folder has its matrices in a Hadamard basis: config.json lists them, hadamard.json repeats that, and
`.signs` (K,) beside each matrix are the signs of its inputs.

Source: mlx-lm's utils.py and models/prism_hadamard_qwen35.py, AutoAWQ's gemm layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, describe, errors_at
from ...families.blocks import BlockWeight, join_signs, unpack_codes
from ...families.family import LinearPlace
from ...families.groups import cut_groups, from_blocks
from ...families.hadamard import FIXED, GROUPED, PREFIX, Rotation, read_signs
from ...reference.layers import Floats
from ...reference.weights import DenseWeight, LinearWeight
from ...system.json_file import is_present, read_json_object
from ..packing import first_invalid_code
from ..safetensors import TensorInfo

FLOATS = ("F16", "BF16", "F32")
CODES_PER_WORD = 16  # of 2 bits, in 32
BITS = (1, 2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
FLOAT_MODES = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}  # bits and group
HADAMARD_TYPE, HADAMARD_FILE = "prism_hadamard_qwen35", "hadamard.json"
_CHUNK_VALUES = 1 << 22
_FOUR_ZEROS, _FOUR_TWOS = np.uint8(0x55), np.uint8(0xAA)
_AWQ_SHIFTS = 4 * np.array([0, 4, 1, 5, 2, 6, 3, 7], dtype=np.uint32)
_MAX_JSON_BYTES = 64 << 20
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_E8M0 = np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.float32(np.nan))


# -- MLX ---------------------------------------------------------------------------------------------------------------


def describe_mlx(raw: Mapping[str, Any]) -> str | None:
    """What a config.json says of MLX's packing; None where it has none. Raises ConfigError for one that is not read."""
    stated = raw.get("quantization")
    if not isinstance(stated, dict) or not {"bits", "group_size"} & stated.keys():
        return None
    for name, entry in {"": stated, **stated}.items():
        mode = entry.get("mode", "affine") if isinstance(entry, dict) else "affine"
        field = f"quantization.{name}.mode" if name else "quantization.mode"
        if mode not in ("affine", *FLOAT_MODES):
            message = f"{describe(mode)} is a mode of MLX that is not read: expected affine, {', '.join(FLOAT_MODES)}"
            raise ConfigError(message, field=field[:200])
        for key in ("global_scale", "quantize_activations"):
            if isinstance(entry, dict) and entry.get(key):
                raise ConfigError("is an option of MLX that is not done", field=f"quantization.{key}")
    bits, group = describe(stated.get("bits")), describe(stated.get("group_size"))
    mode = stated.get("mode", "affine")
    return f"packed by MLX: {mode}, {bits} bits, groups of {group} where no other size is shown"


def drop_mlx_copy(raw: dict[str, Any]) -> dict[str, Any]:
    """The keys without mlx-lm's copy of `quantization` as quantization_config, which in a BitNet replaces its own."""
    stated = raw.get("quantization_config")
    if describe_mlx(raw) is None or not isinstance(stated, dict) or "quant_method" in stated:
        return raw
    own = {"quant_method": "bitnet", "linear_class": "autobitlinear"} if raw.get("model_type") == "bitnet" else None
    return {**raw, "quantization_config": own}


def read_affine(
    tensors: Any, module: str, place: LinearPlace, width: int, bias: NDArray[np.float32] | None
) -> LinearWeight:
    """A matrix of MLX, (N, width).   tensors: a `CheckpointTensors`. module: the tensors' names without ".weight"."""
    weight = f"{module}.weight"
    shape = tensors.info(f"{module}.scales").shape
    columns = shape[-1] if len(shape) > 1 else 0
    words = (0, *tensors.info(weight).shape)[-1] if weight in tensors else 0
    bits, group = words * 32 // width, width // max(1, columns)
    if bits not in BITS or group not in GROUPS or words * 32 != width * bits or columns * group != width:
        message = f"expected {BITS[0]} to {BITS[-1]} bits in groups of 32, 64 or 128 of {width} inputs"
        raise tensors.fail(f"{module}.scales", f"{message}, got {words} words and {columns} scales in a row")
    rows = slice(None) if place.rows is None else place.rows
    data = tensors.take_rows(weight, place, words, ("U32",))[rows].view(np.uint8)
    scales = tensors.take_rows(f"{module}.scales", place, columns, FLOATS)[rows]
    biases = tensors.take_rows(f"{module}.biases", place, columns, FLOATS)[rows]
    wide, offset = scales.astype(np.float32), biases.astype(np.float32)
    if bits == 2 and np.array_equal(offset, -wide) and first_invalid_code(data) is None:
        return _planes(data, scales, width, bias)
    if bits == 1 and np.array_equal(2 * offset, -wide):
        return _planes(_pairs_of_bits(data), np.abs(biases) * np.sign(scales), width, bias)
    with np.errstate(over="ignore"):  # a value that float16 cannot hold becomes infinite, and differs
        halves = [np.ascontiguousarray(each.astype(np.float16)) for each in (wide, offset)]
    if bits <= 4 and all(map(np.array_equal, (each.astype(np.float32) for each in halves), (wide, offset))):
        return BlockWeight(_as_q4_1(data, bits, group, *halves), bias, block_type="Q4_1")
    out = np.empty((len(data), width), dtype=np.float32)
    for part, q in _codes(data, bits, width):
        by_group = q.reshape(len(q), -1, group)
        out[part] = (wide[part, :, None] * by_group + offset[part, :, None]).reshape(len(q), width)
    return DenseWeight(out, bias)


def read_small_floats(
    tensors: Any, module: str, place: LinearPlace, width: int, bias: NDArray[np.float32] | None
) -> LinearWeight:
    """A matrix of small floats, (N, width), in bfloat16, exactly.   tensors, module: as of `read_affine`"""
    weight, scales = f"{module}.weight", f"{module}.scales"
    words, columns = ((0, *tensors.info(name).shape)[-1] if name in tensors else 0 for name in (weight, scales))
    mode = _float_mode(words, columns)
    bits, group = FLOAT_MODES.get(mode, (1, 1))
    if columns * group != width:
        message = f"expected {' or '.join(FLOAT_MODES)} of {width} inputs"
        raise tensors.fail(scales, f"{message}, got {words} words and {columns} scales in a row")
    rows = slice(None) if place.rows is None else place.rows
    data = tensors.take_rows(weight, place, words, ("U32",))[rows].view(np.uint8)
    units = tensors.take_rows(scales, place, columns, ("U8",))[rows]
    values = _E4M3[:, None] if bits == 8 else _E2M1[np.arange(256)[:, None] >> np.array([0, 4]) & 15]  # of a byte
    out = np.empty((len(data), width), dtype=np.uint16)
    step = max(1, _CHUNK_VALUES // width)
    for start in range(0, len(data), step):
        part = slice(start, start + step)
        by_group = values[data[part]].reshape(*units[part].shape, group)
        with np.errstate(over="ignore"):
            exact = (by_group * (_E4M3 if mode == "nvfp4" else _E8M0)[units[part], None]).reshape(-1, width)
        halves = exact.view(np.uint16)[:, ::2], exact.view(np.uint16)[:, 1::2]  # a bfloat16 is the upper half
        if halves[0].any() or not np.isfinite(exact).all():
            raise tensors.fail(scales, "gives numbers that are not finite, or that bfloat16 cannot hold")
        out[part] = halves[1]
    return DenseWeight(out.view(ml_dtypes.bfloat16), bias)


class AffineMatrix(NamedTuple):
    """A matrix as MLX packs it."""

    words: NDArray[np.uint32]  # (N, K bits / 32)
    scales: Floats  # (N, K / group)
    biases: Floats  # (N, K / group)
    group: int


def affine_from_groups(
    packed: NDArray[np.uint8], scales: Floats, group: int, width: int, bits: int
) -> AffineMatrix | None:
    """A ternary matrix in 2 bits, or a binary one in 1 bit, as `read_affine` reads it; None where it cannot be so.

    packed (N, K/4), scales (N, ceil(K/group)). The largest of MLX's groups that do not mix scales are taken.
    """
    sizes = ((size, cut_groups(scales, group, width, size)) for size in reversed(GROUPS))
    size, own = next(((size, own) for size, own in sizes if own is not None), (0, scales))
    if not size:
        return None
    if bits == 2:
        return AffineMatrix(packed.view(np.uint32), own, -own, size)
    if (packed.reshape(*own.shape, -1) & _FOUR_ZEROS)[own != 0].any():  # a zero has no code
        return None
    words = join_signs(unpack_codes(packed)).view(np.uint32)
    return AffineMatrix(words, own * own.dtype.type(2), -own, size)


def read_ternary_rows(
    tensors: Any, module: str, place: LinearPlace, width: int, bias: NDArray[np.float32] | None
) -> LinearWeight:
    """A ternary matrix as DeepGrove packs Maple for MLX, (N, width).   tensors, module: as of `read_affine`"""
    data = tensors.take_rows(f"{module}.weight", place, width // CODES_PER_WORD, ("U32",)).view(np.uint8)
    rows = (place.height,) if place.stacked == 1 else (place.stacked, place.height // place.stacked)
    alpha = tensors.take(f"{module}.row_alpha", rows, FLOATS).reshape(-1, 1)
    if width % CODES_PER_WORD or first_invalid_code(data) is not None:
        message = f"expected codes 0, 1 and 2 of {width} inputs, {CODES_PER_WORD} in a word"
        raise tensors.fail(f"{module}.weight", message)
    return _planes(data, alpha, width, bias)


def packed_width(words: tuple[int, ...], scales: TensorInfo, group_size: Any) -> int:
    """K of a matrix of MLX, by its words' shape and its scales; of several that fit, that of the stated group."""
    last, columns = (0, *words)[-1], (0, *scales.shape)[-1]
    if scales.dtype == "U8":
        mode = _float_mode(last, columns)
        return columns * FLOAT_MODES[mode][1] if mode else 0
    groups = [group_size, *GROUPS] if group_size in GROUPS else GROUPS
    widths = (columns * group for group in groups)
    return next((width for width in widths if width and last * 32 / width in BITS), 0)


def _float_mode(words: int, columns: int) -> str:
    """The mode of small floats in which a row has that many words and scales; "" for none."""
    return next((mode for mode, (bits, group) in FLOAT_MODES.items() if 0 < words * 32 == columns * group * bits), "")


def _planes(data: NDArray[np.uint8], scales: Floats, width: int, bias: NDArray[np.float32] | None) -> LinearWeight:
    """A ternary matrix of codes (N, K/4), each the weight + 1, and scales of either sign."""
    codes = data if (scales > 0).all() else np.empty_like(data)
    sizes = np.empty_like(scales)
    zeros = np.full(8, _FOUR_ZEROS).view("u8" if data.shape[1] // scales.shape[1] % 8 == 0 else "u1")[0]
    step = max(1, _CHUNK_VALUES // width)  # no copy of the whole matrix
    for start in range(0, len(data), step):
        part = slice(start, start + step)
        by_group, of_group = data[part].reshape(*scales[part].shape, -1), scales[part]
        if codes is not data:
            by_group = np.where((of_group < 0)[:, :, None], _FOUR_TWOS - by_group, by_group)
            by_group = np.where((of_group == 0)[:, :, None], _FOUR_ZEROS, by_group)
            codes[part] = by_group.reshape(len(by_group), -1)
        empty = (by_group.view(zeros.dtype) == zeros).all(axis=2)
        sizes[part] = np.where(empty, scales.dtype.type(0), np.abs(of_group))
    return from_blocks(codes, sizes, width, bias)


def _pairs_of_bits(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A bit for each weight -> a code for each, 0 or 2."""
    spread = np.zeros((*data.shape, 2), dtype=np.uint8)
    for bit in range(8):
        spread[:, :, bit // 4] |= (data >> np.uint8(bit) & np.uint8(1)) << np.uint8(2 * (bit % 4) + 1)
    return spread.reshape(len(data), -1)


def _codes(data: NDArray[np.uint8], bits: int, width: int) -> Iterator[tuple[slice, NDArray[np.uint8]]]:
    """Some rows at a time: (which, their codes (n, width)).   data (N, width bits / 8)"""
    step = max(1, _CHUNK_VALUES // width)
    for start in range(0, len(data), step):
        part = slice(start, start + step)
        stream = np.unpackbits(data[part], axis=1, bitorder="little").reshape(-1, width, bits)
        yield part, np.packbits(stream, axis=2, bitorder="little")[:, :, 0]


def _as_q4_1(data: NDArray[np.uint8], bits: int, group: int, d: Floats, m: Floats) -> NDArray[np.uint8]:
    """The same values in blocks of 32, d q + m with q of 4 bits: rows (N, bytes of a row)."""
    n, width = len(data), data.shape[1] * 8 // bits
    out = np.empty((n, width // 32, 20), dtype=np.uint8)
    for at, each in ((0, d), (2, m)):
        out[:, :, at : at + 2] = np.repeat(each, group // 32, axis=1)[:, :, None].view(np.uint8)
    for part, q in _codes(data, bits, width):
        halves = q.reshape(len(q), -1, 2, 16)
        out[part, :, 4:] = halves[:, :, 0] | halves[:, :, 1] << np.uint8(4)
    return out.reshape(n, -1)


# -- Bonsai 2 as an MLX folder -----------------------------------------------------------------------------------------


def hadamard_text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The keys of the wrapper that a Bonsai 2 folder of MLX stands for. Raises ConfigError for another version."""
    expected = {
        "gdn_activation_layout": ("grouped",),
        "hadamard_config": (HADAMARD_FILE,),
        "schema_version": (1, 2),
        "base_model_type": ("qwen3_5",),
    }
    for key, values in expected.items():
        if raw.get(key) not in values:
            raise ConfigError(f"expected {' or '.join(map(repr, values))}, got {describe(raw.get(key))}", field=key)
    read = {*expected, "modules", "tensor_namespace", "requires_runtime", "components"}
    return {**{key: value for key, value in raw.items() if key not in read}, "model_type": raw["base_model_type"]}


def read_hadamard_modules(folder: Path, raw: Mapping[str, Any], tensors: Any) -> dict[str, Rotation]:
    """The bases of a Bonsai 2 folder, by the tensors' names without ".weight". Raises ConfigError and FormatError.

    The bytes are those of any folder of MLX: read without the bases they give fluent nonsense, so config.json's list,
    hadamard.json and the signs must be there, whole, and say the same.
    """
    path = folder / "config.json"
    listed = raw.get("modules")
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise ConfigError("expected a list of objects, one for each packed matrix", path=path, field="modules")
    if not is_present(folder / HADAMARD_FILE):
        raise ConfigError(f"{HADAMARD_FILE} is missing beside it", path=path, field="hadamard_config")
    keys = _hadamard_keys(folder / HADAMARD_FILE)
    bases: dict[str, Rotation] = {}
    seen: set[str] = set()
    for each in listed:
        module, block = f"language_model.{each.get('path')}", each.get("block")
        if module in seen or f"{module}.scales" not in tensors:
            reason = "is listed twice" if module in seen else "is not packed in this folder"
            raise ConfigError(f"{module[:200]} {reason}", path=path, field="modules")
        seen.add(module)
        if block == 0:
            continue
        if block != keys["block_size"]:
            message = f"{module} has blocks of {describe(block)}, and {HADAMARD_FILE} says {keys['block_size']}"
            raise ConfigError(message, path=path, field="modules")
        bases[module] = _basis(tensors, f"{module}.signs", block, keys)
    packed = {name.removesuffix(".scales") for name in tensors.names if name.endswith(".scales")}
    if missing := sorted(packed - seen):
        raise ConfigError(f"lacks {missing[0]}, which is packed", path=path, field="modules")
    names = {*keys["weight_names"], *keys["inverse_weight_names"]}
    if names != {f"{module}.weight" for module in bases}:
        message = "names other matrices than config.json's modules with a block"
        raise ConfigError(message, path=folder / HADAMARD_FILE, field=f"{PREFIX}weight_names")
    return bases


def _hadamard_keys(path: Path) -> dict[str, Any]:
    raw = read_json_object(path, ConfigError, _MAX_JSON_BYTES, path.parent)
    keys = {key.removeprefix(PREFIX): value for key, value in raw.items()}
    for key, value in {**FIXED, "sign_mode": "explicit", GROUPED: True}.items():
        if keys.get(key) != value:
            message = f"expected {value!r}, got {describe(keys.get(key))}"
            raise ConfigError(message, path=path, field=f"{PREFIX}{key}")
    for key in ("weight_names", "inverse_weight_names"):
        if not isinstance(keys.get(key), list) or not all(isinstance(name, str) for name in keys[key]):
            raise ConfigError("expected a list of names", path=path, field=f"{PREFIX}{key}")
    with errors_at(path):
        return keys | {"signs": read_signs(keys)}


def _basis(tensors: Any, name: str, block: Any, keys: Mapping[str, Any]) -> Rotation:
    shape = tensors.info(name).shape if name in tensors else (0,)
    signs = tensors.take(name, shape if len(shape) == 1 else (0,), ("F32",))
    known = keys["signs"].get(len(signs))
    if known is None or not np.array_equal(signs, known):
        raise tensors.fail(name, f"differs from the signs for {len(signs)} inputs in {HADAMARD_FILE}")
    if not isinstance(block, int) or block < 2 or block & (block - 1) or len(signs) % block:
        raise tensors.fail(name, f"blocks of {describe(block)} are no power of two that divides {len(signs)} inputs")
    return Rotation(signs, block)


# -- AWQ ---------------------------------------------------------------------------------------------------------------


def check_awq(stated: Mapping[str, Any]) -> None:
    """ConfigError for a quantization_config of AWQ that is not read."""
    for key, expected in {"bits": 4, "version": "gemm", "format": "gemm", "zero_point": True}.items():
        value = stated.get(key)
        same = value.lower() == expected if isinstance(value, str) else value in (None, expected)
        if not same:  # AutoAWQ's own examples say "GEMM"
            message = f"AWQ with {describe(value)} is not read: expected {expected!r}"
            raise ConfigError(message, field=f"quantization_config.{key}")


def read_awq(
    tensors: Any, module: str, place: LinearPlace, width: int, bias: NDArray[np.float32] | None
) -> LinearWeight:
    """A matrix of AWQ, (N, width), as float32.   tensors, module: as of `read_affine`"""
    height, name = place.height, f"{module}.qweight"
    shape: tuple[int, ...] = tensors.info(f"{module}.scales").shape if f"{module}.scales" in tensors else ()
    groups = shape[0] if len(shape) == 2 else 0
    if height % 8 or not groups or width % groups:
        raise tensors.fail(name, f"expected {width} inputs in whole groups and outputs in eights, got scales {shape}")
    words = tensors.take(name, (width, height // 8), ("I32",))
    zeros = _nibbles(tensors.take(f"{module}.qzeros", (groups, height // 8), ("I32",)))
    scales = tensors.take(f"{module}.scales", (groups, height), FLOATS).astype(np.float32)
    out, group = np.empty((height, width), dtype=np.float32), width // groups
    for index in range(groups):
        columns = slice(index * group, (index + 1) * group)
        out[:, columns] = ((_nibbles(words[columns]) - zeros[index]) * scales[index]).T
    return DenseWeight(place.take(out), bias)


def _nibbles(words: NDArray[np.int32]) -> NDArray[np.float32]:
    """(n, N/8) -> (n, N)"""
    nibbles = words.view(np.uint32)[:, :, None] >> _AWQ_SHIFTS & np.uint32(15)
    return nibbles.reshape(len(words), -1).astype(np.float32)
