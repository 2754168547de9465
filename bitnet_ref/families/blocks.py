"""Dense matrices in blocks, as GGUF files store them: a row is cut into blocks of small integers q with a scale d.

    Q8_0    d q                 32 values in 34 bytes           Q4_K    d s q - e m         256 in 144
    Q4_0    d (q - 8)           32 in 18                        Q5_K    d s q - e m         256 in 176
    Q4_1    d q + m             32 in 20                        Q6_K    d s (q - 32)        256 in 210
    Q5_0    d (q - 16)          32 in 22                        TQ1_0, TQ2_0  d (q - 1)     256 in 54 and 66
                                                                Q2_0, Q1_0    d (q - 1)     64 and 128 in 18

d, e and m are float16, s and m of the K types integers of 6 bits, s of Q6_K int8. Every product has at most 24 bits, so
it is exact in float32; a value is rounded once, where two terms are added. `kernels/cpu/dense_blocks.h` widens them
alike; `blocks_amx.h` multiplies by q before d. `block_rule` rounds activations too, as ggml does.

Source: ggml, ggml-quants.c; bit for bit what the `gguf` package computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..errors import ShapeError
from ..reference.layers import Array, Floats
from ..reference.weights import DenseWeight, LinearWeight, ModelWeights
from .family import WeightKind

SHIFTS_2 = np.array([0, 2, 4, 6], dtype=np.uint8)
SHIFTS_4 = np.array([0, 4], dtype=np.uint8)
MASK_2, MASK_4 = np.uint8(3), np.uint8(15)
POWERS_OF_3 = np.array([1, 3, 9, 27, 81], dtype=np.uint8)
TQ1_0_TRITS = ((0, 32, 5), (32, 48, 5), (48, 52, 4))  # (first byte, one past the last, trits of a byte)
_CHUNK_VALUES = 1 << 20  # widened at a time


def half_scales(d: NDArray[np.uint8]) -> NDArray[np.float32]:
    """(n, 2) bytes -> (n, 1)"""
    return np.ascontiguousarray(d).view(np.float16).astype(np.float32)


class BlockIntegers(NamedTuple):
    """What n blocks hold: value j is d s q[j] + e m, where s and m are those of its part of the block.

    Every product has at most 24 bits.
    """

    d: NDArray[np.float32]  # (n, 1)
    q: NDArray[np.integer]  # (n, values)
    s: NDArray[np.integer] | None = None  # (n, values / 16 or 32)
    e: NDArray[np.float32] | None = None  # (n, 1)
    m: NDArray[np.integer] | None = None  # (n, values / 32)

    @property
    def scaled(self) -> NDArray[np.integer]:
        """s q, (n, values)"""
        if self.s is None:
            return self.q
        parts = self.q.reshape(*self.s.shape, -1).astype(np.int16)
        return (parts * self.s[:, :, None]).reshape(self.q.shape)

    @property
    def floats(self) -> NDArray[np.float32]:
        """(n, values)"""
        values = self.d * self.scaled.astype(np.float32)
        if self.e is not None and self.m is not None:
            parts = values.reshape(*self.m.shape, -1)
            parts += (self.e * self.m.astype(np.float32))[:, :, None]
        return values


def _q8_0(blocks: NDArray[np.uint8]) -> BlockIntegers:
    """d | 32 int8"""
    return BlockIntegers(half_scales(blocks[:, :2]), blocks[:, 2:].view(np.int8))


def _nibbles(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(n, 16) -> (n, 32): value j in the low nibble of byte j, value j + 16 in the high one"""
    return (data[:, None] >> SHIFTS_4[:, None] & MASK_4).reshape(-1, 32)


def _fifth_bits(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(n, 4) -> (n, 32): bit j is worth 16 in value j"""
    return np.unpackbits(data, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: NDArray[np.uint8]) -> BlockIntegers:
    """d | 16 bytes of nibbles; 8 stands for zero"""
    return BlockIntegers(half_scales(blocks[:, :2]), _nibbles(blocks[:, 2:]).view(np.int8) - np.int8(8))


def _q4_1(blocks: NDArray[np.uint8]) -> BlockIntegers:
    """d | m | 16 bytes of nibbles"""
    ones = np.ones((len(blocks), 1), dtype=np.int8)
    return BlockIntegers(half_scales(blocks[:, :2]), _nibbles(blocks[:, 4:]), None, half_scales(blocks[:, 2:4]), ones)


def _q5_0(blocks: NDArray[np.uint8]) -> BlockIntegers:
    """d | 4 bytes of fifth bits | 16 bytes of nibbles; 16 stands for zero"""
    q = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return BlockIntegers(half_scales(blocks[:, :2]), q.view(np.int8) - np.int8(16))


def _q6_k(blocks: NDArray[np.uint8]) -> BlockIntegers:
    """128 bytes of low nibbles | 64 bytes of high pairs of bits | 16 int8 scales, one for 16 values | d"""
    n = len(blocks)
    low = blocks[:, :128].reshape(n, 2, 1, 64) >> SHIFTS_4[:, None] & MASK_4  # (n, halves, 2, 64)
    high = blocks[:, 128:192].reshape(n, 2, 1, 32) >> SHIFTS_2[:, None] & MASK_2  # (n, halves, 4, 32)
    q = (low.reshape(n, 256) | high.reshape(n, 256) << 4).view(np.int8) - np.int8(32)
    return BlockIntegers(half_scales(blocks[:, 208:]), q, blocks[:, 192:208].view(np.int8))


def _q4_k(blocks: NDArray[np.uint8]) -> BlockIntegers:
    """d | dmin | 12 bytes: 8 scales and 8 minima | 128 bytes of nibbles, of each 64 values the low ones first"""
    q = (blocks[:, 16:].reshape(-1, 4, 1, 32) >> SHIFTS_4[:, None] & MASK_4).reshape(-1, 8, 32)
    return _with_minima(blocks, q)


def _q5_k(blocks: NDArray[np.uint8]) -> BlockIntegers:
    """as Q4_K, with 32 bytes of fifth bits before the nibbles: bit i is that of the i-th 32 values"""
    low = (blocks[:, 48:].reshape(-1, 4, 1, 32) >> SHIFTS_4[:, None] & MASK_4).reshape(-1, 8, 32)
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)  # (n, 8, 32)
    return _with_minima(blocks, low | high << np.uint8(4))


def _with_minima(blocks: NDArray[np.uint8], q: NDArray[np.uint8]) -> BlockIntegers:
    """d s q - dmin m of q (n, 8, 32), where each scale s and minimum m has 6 bits and covers 32 values.

    The first four are the low 6 bits of bytes 0-3 and 4-7; the last four have their low nibbles in bytes 8-11 and their
    high 2 bits on top of bytes 0-7.
    """
    first, second, third = (blocks[:, start : start + 4] for start in (4, 8, 12))
    low6, high2 = np.uint8(63), np.uint8(6)
    scales = np.concatenate([first & low6, third & MASK_4 | first >> high2 << np.uint8(4)], axis=1)
    minima = np.concatenate([second & low6, third >> np.uint8(4) | second >> high2 << np.uint8(4)], axis=1)
    q = q.reshape(len(blocks), 256)
    return BlockIntegers(half_scales(blocks[:, :2]), q, scales, -half_scales(blocks[:, 2:4]), minima)


def tq2_0_codes(blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """64 bytes | d: two halves of 32 bytes; bits 0-1 are the first 32 values of the half's 128, bits 2-3 the next"""
    return (blocks[:, :64].reshape(-1, 2, 1, 32) >> SHIFTS_2[:, None] & MASK_2).reshape(-1, 256)


def tq1_0_codes(blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """32 bytes of 5 trits (160 values) | 16 bytes of 5 (80) | 4 bytes of 4 (16) | d

    A byte is the fraction 0.t0 t1 t2 t3 t4 in base 3, times 256, rounded up: multiplied by 3^n and wrapped to a byte,
    it is the fraction that begins with t_n, and times 3 its whole part is t_n itself.
    """
    return read_trits(blocks, TQ1_0_TRITS)


def read_trits(blocks: NDArray[np.uint8], spans: tuple[tuple[int, int, int], ...]) -> NDArray[np.uint8]:
    """The trits of (first byte, one past the last, trits of a byte): of each span the first of all bytes come first."""
    parts = []
    for start, end, trits in spans:
        fractions = blocks[:, None, start:end] * POWERS_OF_3[:trits, None]  # (n, trits, bytes): uint8, so it wraps
        parts.append(leading_trits(fractions).reshape(len(blocks), -1))
    return np.concatenate(parts, axis=1)


def leading_trits(fractions: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The first trit of each fraction of 256: 3 * fraction // 256"""
    trits: NDArray[np.uint8] = (fractions > 85).view(np.uint8) + (fractions > 170).view(np.uint8)
    return trits


def unpack_codes(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """2 bits per weight, the first in the lowest bits.   (n, K/4) -> (n, K)"""
    codes: NDArray[np.uint8] = packed[:, :, None] >> SHIFTS_2 & MASK_2
    return codes.reshape(len(packed), -1)


def q2_0_codes(blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """d, then `unpack_codes`. Code 3 means +2; no ternary file has it."""
    return unpack_codes(blocks[:, 2:])


def q1_0_codes(blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """d, then a bit per weight, the first in the lowest: -1 or +1"""
    return np.unpackbits(blocks[:, 2:], axis=1, bitorder="little") << np.uint8(1)


def _ternary(codes_of: Callable[[NDArray[np.uint8]], NDArray[np.uint8]], at: int) -> Callable[..., BlockIntegers]:
    """d (code - 1), d at byte `at`"""

    def integers(blocks: NDArray[np.uint8]) -> BlockIntegers:
        return BlockIntegers(half_scales(blocks[:, at : at + 2]), codes_of(blocks).view(np.int8) - np.int8(1))

    return integers


# -- the inverses: integers -> the parts of their blocks, in order -----------------------------------------------------

Parts = tuple[NDArray[np.uint8], ...]


def join_bits(codes: NDArray[np.uint8], bits: int, *shape: int) -> NDArray[np.uint8]:
    """codes as (n, rows, parts, columns), the shape without n -> (n, rows * columns): part i is in the bits from
    i * bits on of its byte."""
    parts = codes.reshape(len(codes), *shape) << (np.arange(shape[1], dtype=np.uint8) * np.uint8(bits))[:, None]
    joined: NDArray[np.uint8] = np.bitwise_or.reduce(parts, axis=2)
    return joined.reshape(len(codes), -1)


def join_trits(codes: NDArray[np.uint8], spans: tuple[tuple[int, int, int], ...]) -> NDArray[np.uint8]:
    """The inverse of `read_trits`: q/243 of 256, rounded up."""
    parts, first = [], 0
    for start, end, trits in spans:
        digits = codes[:, first : first + (end - start) * trits].reshape(len(codes), trits, -1)
        weights = np.array([81, 27, 9, 3, 1], dtype=np.uint16)[:trits, None]
        parts.append((digits * weights).sum(axis=1, dtype=np.uint16))
        first += (end - start) * trits
    return ((np.concatenate(parts, axis=1) * 256 + 242) // 243).astype(np.uint8)


def join_signs(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The inverse of `q1_0_codes`, without the scale."""
    return np.packbits(codes >> np.uint8(1), axis=1, bitorder="little")


def _halves(d: NDArray[np.float32]) -> NDArray[np.uint8]:
    return d.astype(np.float16).view(np.uint8)


def _codes(v: BlockIntegers, offset: int) -> NDArray[np.uint8]:
    return v.q.astype(np.uint8) + np.uint8(offset)  # modulo 256


def _q5_0_parts(v: BlockIntegers) -> Parts:
    q = _codes(v, 16)
    return _halves(v.d), np.packbits(q >> 4, axis=1, bitorder="little"), join_bits(q & MASK_4, 4, 1, 2, 16)


def _q4_1_parts(v: BlockIntegers) -> Parts:
    assert v.e is not None
    return _halves(v.d), _halves(v.e), join_bits(_codes(v, 0), 4, 1, 2, 16)


def _q6_k_parts(v: BlockIntegers) -> Parts:
    q = _codes(v, 32)
    assert v.s is not None
    low, high = join_bits(q & MASK_4, 4, 2, 2, 64), join_bits(q >> np.uint8(4), 2, 2, 4, 32)
    return low, high, v.s.view(np.uint8), _halves(v.d)


def _q4_k_parts(v: BlockIntegers, has_fifth_bits: bool = False) -> Parts:
    q = _codes(v, 0)
    assert v.e is not None
    assert v.s is not None
    assert v.m is not None
    s, m = v.s.view(np.uint8), v.m.view(np.uint8)
    first, second = (each[:, :4] | each[:, 4:] >> 4 << 6 for each in (s, m))
    third = s[:, 4:] & MASK_4 | (m[:, 4:] & MASK_4) << 4
    fifth = (join_bits(q >> np.uint8(4), 1, 1, 8, 32),) if has_fifth_bits else ()
    return _halves(v.d), _halves(-v.e), first, second, third, *fifth, join_bits(q & MASK_4, 4, 4, 2, 32)


class BlockType(NamedTuple):
    """How a block of `values` numbers lies in `nbytes` bytes. integers: blocks (n, nbytes) uint8 -> what they hold"""

    number: int | None  # in kernels/cpu/dense_blocks.h; None: NumPy multiplies by it
    values: int
    nbytes: int
    halves: tuple[int, ...]  # the places of its float16 numbers
    integers: Callable[[NDArray[np.uint8]], BlockIntegers]

    def widen(self, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
        """(n, nbytes) uint8 -> (n, values)"""
        return self.integers(blocks).floats


BLOCK_TYPES = {
    "Q8_0": BlockType(3, 32, 34, (0,), _q8_0),
    "Q4_0": BlockType(4, 32, 18, (0,), _q4_0),
    "Q5_0": BlockType(5, 32, 22, (0,), _q5_0),
    "Q4_1": BlockType(6, 32, 20, (0, 2), _q4_1),
    "Q4_K": BlockType(7, 256, 144, (0, 2), _q4_k),
    "Q5_K": BlockType(8, 256, 176, (0, 2), _q5_k),
    "Q6_K": BlockType(9, 256, 210, (208,), _q6_k),
}
# Those that stay in blocks by ggml's rule only: in floats they are packed in another way
RULED_TYPES = {
    "TQ1_0": BlockType(None, 256, 54, (52,), _ternary(tq1_0_codes, 52)),
    "TQ2_0": BlockType(None, 256, 66, (64,), _ternary(tq2_0_codes, 64)),
    "Q2_0": BlockType(None, 64, 18, (0,), _ternary(q2_0_codes, 0)),
    "Q1_0": BlockType(None, 128, 18, (0,), _ternary(q1_0_codes, 0)),
}

# Of the types that kernels/cpu/ruled_steps.h has: integers -> arrays (n, bytes), which side by side are the blocks
INVERSES: dict[str, Callable[[BlockIntegers], Parts]] = {
    "Q8_0": lambda v: (_halves(v.d), _codes(v, 0)),
    "Q4_0": lambda v: (_halves(v.d), join_bits(_codes(v, 8), 4, 1, 2, 16)),
    "Q5_0": _q5_0_parts,
    "Q4_1": _q4_1_parts,
    "Q4_K": _q4_k_parts,
    "Q5_K": partial(_q4_k_parts, has_fifth_bits=True),
    "Q6_K": _q6_k_parts,
    "TQ1_0": lambda v: (join_trits(_codes(v, 1), TQ1_0_TRITS), _halves(v.d)),  # as ggml: other bytes may mean the same
    "TQ2_0": lambda v: (join_bits(_codes(v, 1), 2, 2, 4, 32), _halves(v.d)),
    "Q2_0": lambda v: (_halves(v.d), join_bits(_codes(v, 1), 2, 16, 4, 1)),
    "Q1_0": lambda v: (_halves(v.d), join_signs(_codes(v, 1))),
}


def block_type(kind: str) -> BlockType:
    """The type of that name, of either table."""
    return BLOCK_TYPES.get(kind) or RULED_TYPES[kind]


def widen_blocks(stored: NDArray[np.uint8], kind: str) -> NDArray[np.float32]:
    """Rows of blocks (n, bytes of a row) -> their values, exactly as the file means them, (n, K)."""
    block = block_type(kind)
    blocks = stored.reshape(-1, block.nbytes)
    out, step = np.empty((len(blocks), block.values), dtype=np.float32), _CHUNK_VALUES // block.values
    with np.errstate(invalid="ignore", over="ignore"):  # a NaN or Inf scale gives NaN, which the reader reports
        for start in range(0, len(blocks), step):
            out[start : start + step] = block.widen(blocks[start : start + step])
    return out.reshape(len(stored), stored.shape[1] // block.nbytes * block.values)


def are_finite(stored: NDArray[np.uint8], kind: str) -> bool:
    """Whether no value of the blocks is NaN or Inf: none is beyond float32 unless a float16 number is."""
    blocks = stored.reshape(-1, block_type(kind).nbytes)
    return all(np.isfinite(half_scales(blocks[:, at : at + 2])).all() for at in block_type(kind).halves)


def to_q8_0(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Finite values (n, K), K a multiple of 32 -> rows of Q8_0 blocks (n, bytes of a row).

    d = max|v| / 127 of each block; q = v / d, rounded half away from zero. d is then rounded to float16, which is Inf
    for values above 8.3e6.
    """
    blocks = values.reshape(-1, 32)
    d = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scaled = blocks * np.where(d == 0, np.float32(0), np.float32(1) / d)
        whole = np.floor(np.abs(scaled))
        q = np.sign(scaled) * (whole + np.floor(2 * (np.abs(scaled) - whole)))  # as roundf
        parts = d.astype(np.float16).view(np.uint8), q.astype(np.int8).view(np.uint8)
    return np.concatenate(parts, axis=1).reshape(len(values), -1)


# -- the kind of weight ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class BlockWeight(DenseWeight):
    """A dense matrix whose rows are stored in blocks: `stored` is (N, bytes of a row) uint8."""

    block_type: str = "Q8_0"  # of BLOCK_TYPES, or of RULED_TYPES

    def __post_init__(self) -> None:
        nbytes = self.block.nbytes
        if self.stored.dtype != np.uint8 or self.stored.ndim != 2 or self.stored.shape[1] % nbytes:
            expected = f"uint8 (N, a multiple of {nbytes}) for {self.block_type}"
            raise ShapeError("BlockWeight", expected=expected, got=f"{self.stored.dtype} {self.stored.shape}")

    @property
    def block(self) -> BlockType:
        return block_type(self.block_type)

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)"""
        rows, nbytes = self.stored.shape
        return rows, nbytes // self.block.nbytes * self.block.values

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    @property
    def storage(self) -> str:
        return self.block_type

    @property
    def array(self) -> Floats:
        """The matrix as floats, made at each use.   -> (N, K)"""
        return widen_blocks(self.stored, self.block_type)

    def widen(self, stored: Array) -> Array:
        return widen_blocks(stored, self.block_type)

    def rows(self, index: Any, dtype: DTypeLike) -> Floats:
        return widen_blocks(self.stored[index], self.block_type).astype(dtype, copy=False)


def in_int8(w: LinearWeight) -> LinearWeight:
    """A dense matrix in Q8_0 blocks: int8 with a float16 scale for each 32 weights of a row, an error of at most 1/254
    of the largest of them. Other weights are returned as they are, and so are matrices that are in blocks already or
    that Q8_0 cannot hold (rows that are no multiple of 32, values above 8.3e6)."""
    if type(w) is not DenseWeight or w.shape[1] % 32:
        return w
    stored = np.empty((w.shape[0], w.shape[1] // 32 * 34), dtype=np.uint8)
    step = max(1, _CHUNK_VALUES // w.shape[1])
    for start in range(0, len(stored), step):
        stored[start : start + step] = to_q8_0(w.stored[start : start + step].astype(np.float32))
    return BlockWeight(stored, w.bias, w.wide, w.name) if are_finite(stored, "Q8_0") else w


def int8_weights(w: ModelWeights) -> ModelWeights:
    """The same model with its dense linears `in_int8`, and its head; the embedding only if it is the head."""
    table = None if w.tied else w.embedding
    return w.map_linears(lambda weight: weight if weight is table else in_int8(weight))


KIND = WeightKind("dense", "dense", (DenseWeight, BlockWeight))
