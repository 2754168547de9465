"""The tensor types of GGUF files, and the blocks of these, to and from NumPy: F32, F16, BF16, those that are ternary or
binary by blocks (Q1_0, Q2_0, PQ2_0, PTQ1_0, STQ1_0, TQ1_0, TQ2_0), and ik_llama.cpp's, ternary by rows (IQ1_BN, IQ2_BN,
IQ2_BN_R4). `i2_s` and `tl` decode bitnet.cpp's own types.

Two dialects use the same ids. bitnet.cpp has I2_S 36, I8_S 37, TL1 38 and TL2 39; llama.cpp has dropped 36 to 38 (they
were repacked forms of IQ4_NL) and uses 39 for MXFP4. A type whose id does not determine the size has `block_bytes` 0:
such a tensor extends to the next one, or to the end of the file. Ids 40 and 42 have changed their meaning too: see
`MEANINGS`.

A row is cut into blocks; each block has a float16 scale d and small integers q, and its values are d * q. These are
the types in BitNet files; `families/blocks` has those of dense models, and some are decoded by the package `gguf`.

Source: ggml, ggml-quants.c; bit for bit what the `gguf` package computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from ...errors import FormatError, NumericsError, ShapeError
from ...families.blocks import (
    BLOCK_TYPES,
    MASK_2,
    POWERS_OF_3,
    SHIFTS_2,
    TQ1_0_TRITS,
    half_scales,
    join_bits,
    join_signs,
    join_trits,
    leading_trits,
    q1_0_codes,
    q2_0_codes,
    read_trits,
    to_q8_0,
    tq1_0_codes,
    tq2_0_codes,
    unpack_codes,
)
from ...families.groups import cut_groups
from ...reference.layers import Array, Floats
from ...reference.quantization import CODES_PER_BYTE, SCALE_FLOOR, unpack_ternary
from ..packing import first_invalid_code, pack_words


@dataclass(frozen=True)
class GgmlType:
    """`block_values` consecutive values of a row take `block_bytes`; a row begins with `row_bytes` more, and the tensor
    ends with `tail_bytes`."""

    id: int
    name: str
    block_values: int
    block_bytes: int
    tail_bytes: int = 0
    row_bytes: int = 0

    def has_whole_rows(self, shape: tuple[int, ...]) -> bool:
        """Whether the rows of a tensor of that shape are whole blocks."""
        return (shape[-1] if shape else 1) % self.block_values == 0

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor of that shape, whose rows are whole blocks."""
        n_blocks = math.prod(shape) // self.block_values
        return n_blocks * self.block_bytes + math.prod(shape[:-1]) * self.row_bytes + self.tail_bytes

    @property
    def kind(self) -> str:
        """The type as `convert --to gguf-...` calls it: "i2_s", "tl2", "f16"."""
        return "tl2" if self.name == "TL2/MXFP4" else self.name.lower()


_TABLE = (
    *((0, "F32", 1, 4), (1, "F16", 1, 2), (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22)),
    *((7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34), (9, "Q8_1", 32, 40), (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110)),
    *((12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210), (15, "Q8_K", 256, 292)),
    *((16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98), (19, "IQ1_S", 256, 50)),
    *((20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82), (23, "IQ4_XS", 256, 136)),
    *((24, "I8", 1, 1), (25, "I16", 1, 2), (26, "I32", 1, 4), (27, "I64", 1, 8), (28, "F64", 1, 8)),
    *((29, "IQ1_M", 256, 56), (30, "BF16", 1, 2), (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66)),
    *((36, "I2_S", 4, 1, 32), (37, "I8_S", 1, 0), (38, "TL1", 1, 0), (39, "TL2/MXFP4", 1, 0)),
    *((40, "NVFP4", 64, 36), (41, "Q1_0", 128, 18), (42, "Q2_0", 64, 18), (43, "STQ1_0", 256, 42)),
    *((134, "IQ1_BN", 64, 13, 0, 2), (135, "IQ2_BN", 64, 16, 0, 4), (335, "IQ2_BN_R4", 64, 16, 0, 4)),
    *((142, "PQ2_0", 128, 34), (143, "PTQ1_0", 128, 28)),
)
TYPES: dict[int, GgmlType] = {row[0]: GgmlType(*row) for row in _TABLE}
WIDE_Q2_0 = GgmlType(42, "Q2_0 of 128", 128, 34)
SMALL_Q1_0 = GgmlType(40, "Q1_0 of 32", 32, 6)
# What an id has meant, the present meaning first: only the spans of a file's tensors tell. 42 in older Bonsai files and
# in Tencent's of 1.25 bits; 40 in the files of Prism's llama.cpp before April 2026.
MEANINGS = {42: (TYPES[42], WIDE_Q2_0, TYPES[43]), 40: (TYPES[40], SMALL_Q1_0)}
MXFP4 = GgmlType(39, "MXFP4", 32, 17)  # what id 39 means for llama.cpp: a TL2 tensor has a scale tensor beside it
BY_NAME: dict[str, GgmlType] = {kind.name: kind for kind in (*TYPES.values(), WIDE_Q2_0, SMALL_Q1_0, MXFP4)}
BY_KIND: dict[str, GgmlType] = {kind.kind: kind for kind in TYPES.values()}
TERNARY_BLOCKS = ("TQ1_0", "TQ2_0")  # with a float16 scale in each block
TERNARY_ROWS = ("IQ1_BN", "IQ2_BN", "IQ2_BN_R4")  # with a scale in each row
_CODES_LAST = ("Q2_0", "Q2_0 of 128", "PQ2_0", "Q1_0", "Q1_0 of 32")  # behind the scale
GROUP_TYPES = (*_CODES_LAST, "PTQ1_0", "STQ1_0")  # a float16 scale for each block, inputs in float
TERNARY_TYPES = ("I2_S", *TERNARY_BLOCKS, *TERNARY_ROWS, "TL1", "TL2/MXFP4")

_CHUNK_BLOCKS = 1 << 12  # of 256 values, decoded at a time
_PTQ1_0_TRITS = ((0, 16, 5), (16, 24, 5), (24, 26, 4))  # as TQ1_0_TRITS
_FOUR_ZEROS = np.uint8(0x55)  # a byte of four codes 1
_STQ1_0_SLOTS = np.frombuffer(bytes.fromhex("A9892909A68626069A921A126A624A42"), dtype=np.uint8)  # four codes each
_NO_SLOT = np.uint8(255)
_STQ1_0_SLOT_OF = np.full(256, _NO_SLOT)  # four codes -> their slot, + 16 where the sign turns them
_STQ1_0_SLOT_OF[_STQ1_0_SLOTS] = np.arange(16)
_STQ1_0_SLOT_OF[0xAA - _STQ1_0_SLOTS] = np.arange(16, 32)


# -- reading -----------------------------------------------------------------------------------------------------------


def _stq1_0_codes(blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """32 bytes of two slots | 8 bytes of signs | d

    Four weights, 16 apart, share a slot of 4 bits: where their one zero is, and which of the others differ in sign from
    the first. The sign turns all of them.
    """
    slots = (blocks[:, :32, None] >> np.array([0, 4], dtype=np.uint8) & np.uint8(15)).reshape(-1, 64)
    four = _STQ1_0_SLOTS[slots]
    four = np.where(np.unpackbits(blocks[:, 32:40], axis=1, bitorder="little") == 1, np.uint8(0xAA) - four, four)
    lanes: NDArray[np.uint8] = four[:, :, None] >> SHIFTS_2 & MASK_2  # (n, 64, 4)
    return lanes.reshape(-1, 4, 16, 4).swapaxes(2, 3).reshape(-1, 256)


def _stq1_0_slots(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(n, 64): the slot of each four weights, + 16 where the sign turns them; _NO_SLOT where not one alone is zero."""
    lanes = codes.reshape(-1, 4, 4, 16).swapaxes(2, 3).reshape(len(codes), 64, 4)
    return _STQ1_0_SLOT_OF[np.bitwise_or.reduce(lanes << SHIFTS_2, axis=2)]


def _stq1_0_data(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    slots = _stq1_0_slots(codes)
    pairs = (slots & np.uint8(15)).reshape(-1, 32, 2)
    signs = np.packbits(slots >> np.uint8(4) & np.uint8(1), axis=1, bitorder="little")
    return np.concatenate([pairs[:, :, 0] | pairs[:, :, 1] << np.uint8(4), signs], axis=1)


# kind -> blocks (n, block_bytes) -> codes (n, block_values): the weight is code - 1, times the block's scale
_CODES: dict[str, Callable[[NDArray[np.uint8]], NDArray[np.uint8]]] = {
    "TQ1_0": tq1_0_codes,
    "TQ2_0": tq2_0_codes,
    "PTQ1_0": lambda blocks: read_trits(blocks, _PTQ1_0_TRITS),  # 16 bytes of 5 trits | 8 of 5 | 2 of 4 | d
    "STQ1_0": _stq1_0_codes,
    **dict.fromkeys(("Q2_0", "Q2_0 of 128", "PQ2_0"), q2_0_codes),
    **dict.fromkeys(("Q1_0", "Q1_0 of 32"), q1_0_codes),
}


def _pack_codes(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(n, K) -> (n, K/4)"""
    return pack_words(codes.view("<u4"), 0).astype(np.uint8)


def _pack_tq2_0(blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """`_pack_codes(tq2_0_codes(blocks))`, without a byte for each weight"""
    words = np.ascontiguousarray(blocks[:, :64]).view("<u4").reshape(-1, 2, 8)
    packed = np.empty((len(blocks), 2, 4, 8), dtype=np.uint8)
    for field, shift in enumerate(SHIFTS_2):
        packed[:, :, field] = pack_words(words, int(shift))
    return packed.reshape(-1, 64)


def _pack_tq1_0(blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """`_pack_codes(tq1_0_codes(blocks))` in half its time

    The weights at one trit of four neighbouring bytes are neighbours, so a word of four bytes gives a packed byte.
    """
    fractions = blocks[:, :52].copy()
    packed = np.empty((len(blocks), 64), dtype=np.uint8)
    for trit in range(5):
        words = pack_words(leading_trits(fractions).view("<u4"), 0)
        first = 0
        for start, end, trits in TQ1_0_TRITS:
            width = (end - start) // 4
            if trit < trits:
                packed[:, first + trit * width :][:, :width] = words[:, start // 4 : end // 4]
            first += trits * width
        fractions *= np.uint8(3)
    return packed


_PACKED: dict[str, Callable[[NDArray[np.uint8]], NDArray[np.uint8]]] = {
    **dict.fromkeys(("Q2_0", "Q2_0 of 128", "PQ2_0"), lambda blocks: blocks[:, 2:]),
    "TQ1_0": _pack_tq1_0,
    "TQ2_0": _pack_tq2_0,
}


def _packed(kind: str, blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """blocks (n, block_bytes) -> their codes, four in a byte as `quantization.pack_ternary` has them."""
    return _PACKED[kind](blocks) if kind in _PACKED else _pack_codes(_CODES[kind](blocks))


# The inverse, without the scale: codes (n, block_values) -> (n, block_bytes - 2)
_DATA: dict[str, Callable[[NDArray[np.uint8]], NDArray[np.uint8]]] = {
    "TQ1_0": partial(join_trits, spans=TQ1_0_TRITS),
    "TQ2_0": lambda codes: join_bits(codes, 2, 2, 4, 32),
    "PTQ1_0": partial(join_trits, spans=_PTQ1_0_TRITS),
    "STQ1_0": _stq1_0_data,
    "Q1_0": join_signs,
}


def _scales(kind: str, blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The bytes (n, 2) of the float16 scales of a type in `_CODES`."""
    return blocks[:, :2] if kind in _CODES_LAST else blocks[:, -2:]


def _values(kind: str, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    q = _CODES[kind](blocks).astype(np.int8) - np.int8(1)
    return half_scales(_scales(kind, blocks)) * q.astype(np.float32)


_DEQUANTIZE: dict[str, Callable[[NDArray[np.uint8]], NDArray[np.float32]]] = {
    "F32": lambda blocks: blocks.view(np.float32),
    "F16": lambda blocks: blocks.view(np.float16).astype(np.float32),
    "BF16": lambda blocks: blocks.view(ml_dtypes.bfloat16).astype(np.float32),
    **{kind: block.widen for kind, block in BLOCK_TYPES.items()},
    **{kind: partial(_values, kind) for kind in _CODES},
}
DEQUANTIZABLE = (*_DEQUANTIZE, *TERNARY_ROWS)
# Dense types that the package `gguf` decodes
BY_PACKAGE = (
    *("Q5_1", "Q2_K", "Q3_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
    *("IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4"),
)


def dequantize(raw: NDArray[np.uint8], kind: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """A tensor's bytes -> its float32 values.   raw (nbytes,) uint8 -> shape

    Raises what `read_values` raises, and ShapeError for a wrong number of bytes.
    """
    if kind in BY_NAME:
        _require_size("dequantize", raw, BY_NAME[kind], shape)
    return read_values(lambda start, count: raw[start : start + count], kind, shape)


def read_values(
    read: Callable[[int, int], NDArray[np.uint8]], kind: str, shape: tuple[int, ...], dtype: DTypeLike = np.float32
) -> Array:
    """A tensor's values in that dtype, decoded as float32 a few megabytes at a time.   -> shape

    read: (start, count) -> bytes of the tensor. kind: the type's name, one of `DEQUANTIZABLE` or `BY_PACKAGE`; else
    FormatError.
    """
    if kind not in (*DEQUANTIZABLE, *BY_PACKAGE):
        readable = ", ".join((*DEQUANTIZABLE, *BY_PACKAGE))
        raise FormatError(f"tensors of type {kind} are not read; supported are {readable}")
    out = np.empty(shape, dtype=dtype)
    if kind in TERNARY_ROWS:
        by_row = out.reshape(-1, shape[-1])
        for part, codes, d in _read_rows("dequantize", read, BY_NAME[kind], by_row.shape):
            by_row[part] = d[:, None] * (codes.astype(np.int8) - np.int8(1)).astype(np.float32)
        return out
    decode = _DEQUANTIZE[kind] if kind in _DEQUANTIZE else _by_package(kind)
    by_block = out.reshape(-1, BY_NAME[kind].block_values)
    with np.errstate(invalid="ignore", over="ignore"):  # a NaN or Inf scale gives NaN, which the reader reports
        for part, blocks in _read_blocks("dequantize", read, BY_NAME[kind], shape):
            by_block[part] = decode(blocks)
    return out


def _read_blocks(
    op: str, read: Callable[[int, int], NDArray[np.uint8]], kind: GgmlType, shape: tuple[int, ...]
) -> Iterator[tuple[slice, NDArray[np.uint8]]]:
    """A million values at a time: (which blocks, their bytes (n, block_bytes)).   read: as in `read_values`"""
    _require_whole_blocks(op, kind, shape)
    total, step = math.prod(shape) // kind.block_values, _CHUNK_BLOCKS * 256 // kind.block_values
    for start in range(0, total, step):
        part = slice(start, min(total, start + step))
        raw = read(start * kind.block_bytes, (part.stop - start) * kind.block_bytes)
        yield part, raw.reshape(-1, kind.block_bytes)


def read_scales(
    read: Callable[[int, int], NDArray[np.uint8]], kind: str, shape: tuple[int, int]
) -> Iterator[NDArray[np.float32]]:
    """All scales of a matrix in TERNARY_BLOCKS or TERNARY_ROWS, some at a time.   read: as in `read_values`"""
    if kind in TERNARY_ROWS:
        yield from (d for _, _, d in _read_rows("read_scales", read, BY_NAME[kind], shape))
        return
    for _, blocks in _read_blocks("read_scales", read, BY_NAME[kind], shape):
        yield half_scales(_scales(kind, blocks))[:, 0]


def _read_rows(
    op: str, read: Callable[[int, int], NDArray[np.uint8]], kind: GgmlType, shape: tuple[int, ...]
) -> Iterator[tuple[slice, NDArray[np.uint8], NDArray[np.float32]]]:
    """Some rows of a type in TERNARY_ROWS at a time: (which, codes (n, K), scales (n,)).   read: as in `read_values`"""
    _require_whole_blocks(op, kind, shape)
    n, k = shape
    height = 4 if kind.name == "IQ2_BN_R4" else 1  # rows that are stored together
    if n % height:
        raise ShapeError(op, expected=f"a multiple of 4 rows for {kind.name}", got=f"shape {list(shape)}")
    stride = height * (kind.row_bytes + k // kind.block_values * kind.block_bytes)
    step = max(1, _CHUNK_BLOCKS * 256 // (k * height))
    for first in range(0, n // height, step):
        count = min(step, n // height - first)
        rows = read(first * stride, count * stride).reshape(count, stride)
        heads, data = np.split(rows, [height * kind.row_bytes], axis=1)
        d = np.ascontiguousarray(heads).view(np.float16 if kind.row_bytes == 2 else np.float32)
        blocks = data.reshape(-1, height * kind.block_bytes)
        codes = _ROW_CODES[kind.name](blocks).reshape(count, k // 64, height, 64).swapaxes(1, 2).reshape(-1, k)
        yield slice(first * height, (first + count) * height), codes, d.reshape(-1).astype(np.float32)


def _iq1_bn_codes(blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """12 bytes of 5 trits, three for each 16 weights, and one of the last of each 16: the lowest digit first"""
    trits = ((blocks[:, :, None] * POWERS_OF_3[::-1]).astype(np.uint16) * 3 >> 8).astype(np.uint8)  # (n, 13, 5)
    return np.concatenate([trits[:, :12].reshape(-1, 4, 15), trits[:, 12, :4, None]], axis=2).reshape(-1, 64)


def _iq2_bn_codes(blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """16 bytes: bits 0-1 are the first 16 weights, bits 2-3 the next"""
    return (blocks[:, None, :] >> SHIFTS_2[:, None] & MASK_2).reshape(-1, 64)


def iq2_bn_rows(packed: NDArray[np.uint8], scales: NDArray[np.float32]) -> NDArray[np.uint8]:
    """packed (N, K/4), K a multiple of 64, and the scale of each row (N, 1) -> the bytes of a matrix in IQ2_BN."""
    out = np.empty((len(packed), 4 + packed.shape[1]), dtype=np.uint8)
    out[:, :4] = np.ascontiguousarray(scales, dtype=np.float32).view(np.uint8)
    step = max(1, _CHUNK_BLOCKS * 64 // packed.shape[1])
    for start in range(0, len(packed), step):
        codes = unpack_codes(packed[start : start + step])
        out[start : start + step, 4:] = join_bits(codes, 2, codes.shape[1] // 64, 4, 16)
    return out.reshape(-1)


def _iq2_bn_r4_codes(blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """64 bytes of 4 rows: byte 16 l + 4 r + i has of row r the weights 16 l + i, and 4, 8 and 12 further"""
    by_row = blocks.reshape(-1, 4, 4, 1, 4).swapaxes(1, 2)  # (n, r, l, 1, i)
    return (by_row >> SHIFTS_2[:, None] & MASK_2).reshape(-1, 64)


_ROW_CODES = {"IQ1_BN": _iq1_bn_codes, "IQ2_BN": _iq2_bn_codes, "IQ2_BN_R4": _iq2_bn_r4_codes}


def _by_package(kind: str) -> Callable[[NDArray[np.uint8]], NDArray[np.float32]]:
    """The decoder of the package `gguf`. Raises FormatError where it is not installed."""
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize as decode
    except ImportError as error:
        raise FormatError(f"{kind} is decoded by the package gguf, which is not here: pip install gguf") from error
    return partial(decode, qtype=GGMLQuantizationType[kind])


def ternary_from_blocks(
    raw: NDArray[np.uint8], kind: str, shape: tuple[int, int]
) -> tuple[NDArray[np.int8], np.float32] | None:
    """`pack_with_one_scale` of a matrix in TQ1_0 or TQ2_0, unpacked: (w_t (N, K) int8, w_dequant_scale), or None."""
    _require_size("ternary_from_blocks", raw, BY_NAME[kind], shape)
    matrix = pack_with_one_scale(lambda start, count: raw[start : start + count], kind, shape)
    return None if matrix is None else (unpack_ternary(matrix[0], shape[1]), matrix[1])


def pack_with_one_scale(
    read: Callable[[int, int], NDArray[np.uint8]], kind: str, shape: tuple[int, int]
) -> tuple[NDArray[np.uint8], np.float32] | None:
    """A matrix in TERNARY_BLOCKS or TERNARY_ROWS -> the exact (packed (N, K/4), w_dequant_scale), or None if it has no
    single scale.   read: as in `read_values`

    A b1.58 matrix has one scale: every block with a non-zero has the same d, and a block of zeros has d = 0 or that d.
    If the scales differ, the matrix was not ternary before it was quantised: it is dense, and no model was trained with
    int8 activations on such. Raises FormatError for a scale that is negative, NaN or Inf and for the code 3.
    """
    if kind in TERNARY_ROWS:
        packed, scales = groups_from_rows(read, kind, shape)
    else:
        n_blocks = math.prod(shape) // BY_NAME[kind].block_values
        packed = np.empty((n_blocks, BY_NAME[kind].block_values // CODES_PER_BYTE), dtype=np.uint8)
        scales = np.empty((n_blocks, 1), dtype=np.float32)
        for part, blocks in _read_blocks("pack_with_one_scale", read, BY_NAME[kind], shape):
            packed[part], scales[part] = _packed(kind, blocks), half_scales(_scales(kind, blocks))
            _check_part("block", part.start, packed[part], scales[part, 0])
        packed[scales[:, 0] == 0] = _FOUR_ZEROS
    scale = scales.max()
    if not ((scales == scale) | (scales == 0)).all():
        return None
    return packed.reshape(shape[0], -1), scale if scale > 0 else np.float32(SCALE_FLOOR)


def _check_part(unit: str, first: int, packed: NDArray[np.uint8], scales: NDArray[np.float32]) -> None:
    """Raise FormatError for a scale that is negative, NaN or Inf and for the code 3, naming the block or row."""
    bad = ~np.isfinite(scales) | (scales < 0)
    if bad.any():
        at = int(np.argmax(bad))
        raise FormatError(f"{unit} {first + at} has the scale {scales[at]}; expected a finite number, 0 or above")
    if (invalid := first_invalid_code(packed)) is not None:
        raise FormatError(f"{unit} {first + invalid[0]} holds the invalid ternary code 3")


def groups_from_blocks(
    read: Callable[[int, int], NDArray[np.uint8]], kind: str, shape: tuple[int, int]
) -> tuple[NDArray[np.uint8], NDArray[np.float16]] | None:
    """A matrix of GROUP_TYPES or TERNARY_BLOCKS -> packed (N, K/4), the scale of each block (N, K/block), 0 or above.

    read: as in `read_values`. None where the matrix is not ternary (a code 3 means +2), holds zeros alone, or has a
    scale of NaN or Inf.
    """
    block = BY_NAME[kind]
    total = shape[0] * shape[1] // block.block_values
    packed = np.empty((total, block.block_values // CODES_PER_BYTE), dtype=np.uint8)
    scales = np.empty(total, dtype=np.float16)
    for part, blocks in _read_blocks("groups_from_blocks", read, block, shape):
        data, d = _packed(kind, blocks), np.ascontiguousarray(_scales(kind, blocks)).view(np.float16)[:, 0]
        if first_invalid_code(data) is not None or not np.isfinite(d).all():
            return None
        data = np.where((d < 0)[:, None], np.uint8(0xAA) - data, data)  # -d (code - 1) = d ((2 - code) - 1)
        packed[part] = np.where((d == 0)[:, None], _FOUR_ZEROS, data)
        scales[part] = np.where((packed[part] == _FOUR_ZEROS).all(axis=1), np.float16(0), np.abs(d))
    return (packed.reshape(shape[0], -1), scales.reshape(shape[0], -1)) if scales.any() else None


def groups_from_rows(
    read: Callable[[int, int], NDArray[np.uint8]], kind: str, shape: tuple[int, int]
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """A matrix of a type in TERNARY_ROWS -> packed (N, K/4), the scale of each row (N, 1), 0 for a row of zeros.

    read: as in `read_values`. Raises FormatError for a scale that is negative, NaN or Inf and for the code 3.
    """
    packed = np.empty((shape[0], shape[1] // CODES_PER_BYTE), dtype=np.uint8)
    scales = np.empty((shape[0], 1), dtype=np.float32)
    for part, codes, d in _read_rows("groups_from_rows", read, BY_NAME[kind], shape):
        data = _pack_codes(codes)
        _check_part("row", part.start, data, d)
        packed[part] = np.where((d == 0)[:, None], _FOUR_ZEROS, data)
        scales[part, 0] = np.where((packed[part] == _FOUR_ZEROS).all(axis=1), np.float32(0), d)
    return packed, scales


def _require_size(op: str, raw: NDArray[np.uint8], kind: GgmlType, shape: tuple[int, ...]) -> None:
    _require_whole_blocks(op, kind, shape)
    expected = kind.nbytes(shape)
    if raw.dtype != np.uint8 or raw.size != expected:
        wanted = f"{expected} bytes for {kind.name} of shape {list(shape)}"
        raise ShapeError(op, expected=wanted, got=f"{raw.dtype} of shape {raw.shape}")


def _require_whole_blocks(op: str, kind: GgmlType, shape: tuple[int, ...]) -> None:
    if not kind.has_whole_rows(shape):
        expected = f"rows of a multiple of {kind.block_values} values, which {kind.name} stores in one block"
        raise ShapeError(op, expected=expected, got=f"shape {list(shape)}")


# -- writing -----------------------------------------------------------------------------------------------------------


def quantize(values: Floats, kind: str) -> NDArray[np.uint8]:
    """Finite float values (..., K) -> the bytes (nbytes,) of a tensor of type F32, F16, BF16 or Q8_0.

    Raises NumericsError for NaN, Inf and values too large for the type, ShapeError if K is no multiple of the type's
    block.
    """
    if kind not in ("F32", "F16", "BF16", "Q8_0"):
        raise FormatError(f"dense tensors are not written as {kind}; use F32, F16, BF16 or Q8_0")
    _require_whole_blocks("quantize", BY_NAME[kind], values.shape)
    with np.errstate(over="ignore"):
        if kind == "Q8_0":
            out = to_q8_0(values.astype(np.float32).reshape(-1, 32))
            finite = np.isfinite(half_scales(out[:, :2])).all()
        else:
            dtype = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}[kind]
            out = np.ascontiguousarray(values, dtype=dtype)
            finite = np.isfinite(out).all()
    if not finite:
        raise NumericsError(f"quantize: a value is NaN or Inf, or beyond what {kind} can hold; write it as F32")
    return out.reshape(-1).view(np.uint8)


def blocks_from_ternary(w_t: NDArray[np.int8], w_dequant_scale: float, kind: str) -> NDArray[np.uint8]:
    """(w_t (N, K) int8 in {-1, 0, +1}, scale) -> the bytes (nbytes,) of a matrix in TQ1_0 or TQ2_0.

    The codes are exact. The scale is rounded to float16 (see `scale_in_blocks`), by at most 1 part in 2048. A block of
    zeros has scale 0, as in ggml's own quantiser.
    Raises ShapeError if K is no multiple of 256, NumericsError for a scale that float16 cannot hold.
    """
    if kind not in TERNARY_BLOCKS:
        raise FormatError(f"ternary matrices have blocks in TQ1_0 and TQ2_0, not in {kind}")
    _require_whole_blocks("blocks_from_ternary", BY_NAME[kind], w_t.shape)
    d = np.float16(scale_in_blocks(w_dequant_scale))
    codes = (w_t.reshape(-1, 256) + np.int8(1)).view(np.uint8)
    if codes.size == 0 or codes.max() > 2:
        raise ShapeError("blocks_from_ternary", expected="a non-empty matrix of -1, 0, +1", got="other values")
    scales = np.where((codes == 1).all(axis=1), np.float16(0), d)
    return np.concatenate([_DATA[kind](codes), scales[:, None].view(np.uint8)], axis=1).reshape(-1)


def block_scales(scales: Floats, group: int, in_features: int, kind: str) -> NDArray[np.float16] | None:
    """The scale of each block of a type in GROUP_TYPES or TERNARY_BLOCKS, (N, K/block), of scales (N, ceil(K/group));
    None where a block would mix scales.

    Scales are rounded to float16. Raises NumericsError for a scale that is Inf or 0 there.
    """
    whole = cut_groups(scales, group, in_features, BY_NAME[kind].block_values)
    if whole is None:
        return None
    with np.errstate(over="ignore"):
        d: NDArray[np.float16] = whole.astype(np.float16)
    bad = ~np.isfinite(d) | ((d == 0) & (whole != 0))
    if bad.any():
        raise NumericsError(f"the scale {whole[bad][0]} is {d[bad][0]} in float16, which {kind} holds")
    return d


def codes_fit(packed: NDArray[np.uint8], scales: NDArray[np.float16], kind: str) -> bool:
    """Whether blocks of that type have a code for each of these weights: Q1_0 has none for zeros, and STQ1_0 only for
    one zero in each four weights. Arguments as of `blocks_from_groups`."""
    if kind not in ("Q1_0", "STQ1_0"):
        return True
    blocks = packed.reshape(-1, BY_NAME[kind].block_values // CODES_PER_BYTE)[scales.reshape(-1) != 0]
    if kind == "Q1_0":
        return not (blocks & _FOUR_ZEROS).any()
    chunks = (blocks[start : start + _CHUNK_BLOCKS] for start in range(0, len(blocks), _CHUNK_BLOCKS))
    return all((_stq1_0_slots(unpack_codes(chunk)) != _NO_SLOT).all() for chunk in chunks)


def blocks_from_groups(packed: NDArray[np.uint8], scales: NDArray[np.float16], kind: str) -> NDArray[np.uint8]:
    """(packed (N, K/4), `block_scales`) -> the bytes (nbytes,) of a matrix in TERNARY_BLOCKS, Q1_0, Q2_0, PQ2_0, PTQ1_0
    or STQ1_0. Blocks whose scale is 0 are zeros."""
    block = BY_NAME[kind]
    codes = packed.reshape(-1, block.block_values // CODES_PER_BYTE)
    out = np.empty((len(codes), block.block_bytes), dtype=np.uint8)
    data = out[:, 2:] if kind in _CODES_LAST else out[:, :-2]
    _scales(kind, out)[:] = scales.reshape(-1, 1).view(np.uint8)
    if kind not in _DATA:
        data[:] = codes
        return out.reshape(-1)
    for start in range(0, len(codes), _CHUNK_BLOCKS):
        part = slice(start, start + _CHUNK_BLOCKS)
        data[part] = _DATA[kind](unpack_codes(codes[part]))
    return out.reshape(-1)


def scale_in_blocks(w_dequant_scale: float) -> np.float32:
    """The scale as TQ1_0 and TQ2_0 store it: the nearest float16. NumericsError if that is 0 or Inf."""
    with np.errstate(over="ignore"):
        d = np.float16(w_dequant_scale)
    if not np.isfinite(d) or d <= 0:
        raise NumericsError(f"the scale {w_dequant_scale} is {d} in float16, which the blocks of TQ1_0 and TQ2_0 hold")
    return np.float32(d)
