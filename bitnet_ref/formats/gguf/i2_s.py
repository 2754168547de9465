"""I2_S, bitnet.cpp's own tensor type: two bits per weight, code w_t + 1, and one float32 scale, to multiply by.

A matrix of n weights is n/4 bytes of codes and a tail of 32 bytes that begins with the scale. The order of the codes
depends on the build of bitnet.cpp that wrote the file, and no field says which it was:

    x86         blocks of 128 consecutive weights in 32 bytes: weight j at byte j % 32, shift 6 - 2 (j // 32)
    arm         blocks of  64 consecutive weights in 16 bytes: weight j at byte j % 16, shift 6 - 2 (j // 16)
    interleaved four rows: byte (row // 4) * K + column, shift 6 - 2 (row % 4)

The first two run over the matrix as one line, so a block may reach into the next row. `LayoutEvidence` looks for
structure that only the right layout shows.

Source: microsoft/BitNet, src/ggml-bitnet-mad.cpp, quantize_i2_s.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import FormatError, ShapeError
from ...reference.layers import Floats
from ...reference.quantization import CODES_PER_BYTE, pack_ternary
from ..packing import first_invalid_code, pack_words

LAYOUTS = ("x86", "arm", "interleaved")
TAIL_BYTES = 32
_BLOCK_BYTES = {"x86": 32, "arm": 16}  # of interleaved, those of a row of K bytes
_SHIFTS = np.array([6, 4, 2, 0], dtype=np.uint8)
_CHUNK_WORDS = 1 << 15  # at a time: what is made of them stays in the processor's cache


def fits_layout(shape: tuple[int, int], layout: str) -> bool:
    """Whether a matrix of that shape can be stored in that layout. FormatError for an unknown layout."""
    if layout not in LAYOUTS:
        raise FormatError(f"expected an I2_S layout of {', '.join(LAYOUTS)}, got {layout!r}")
    n, k = shape
    whole = n % 4 if layout == "interleaved" else n * k % (4 * _BLOCK_BYTES[layout])
    return n > 0 and k > 0 and whole == 0


def _check_shape(op: str, shape: tuple[int, int], layout: str) -> None:
    if not fits_layout(shape, layout):
        unit = "4 rows" if layout == "interleaved" else f"{4 * _BLOCK_BYTES[layout]} weights"
        expected = f"a multiple of {unit} for I2_S in the {layout} layout"
        raise ShapeError(op, expected=expected, got=f"shape {list(shape)}")


def pack_i2_s(w_t: NDArray[np.int8], w_dequant_scale: float, layout: str = "x86") -> NDArray[np.uint8]:
    """(w_t (N, K) int8 in {-1, 0, +1}, scale) -> the tensor's bytes (N*K/4 + 32,). No reader uses the last 28."""
    _check_shape("pack_i2_s", (w_t.shape[0], w_t.shape[1]), layout)
    if w_t.dtype != np.int8 or w_t.min() < -1 or w_t.max() > 1:
        raise ShapeError("pack_i2_s", expected="int8 of -1, 0, +1", got=f"{w_t.dtype} {w_t.min()}..{w_t.max()}")
    codes = (w_t + np.int8(1)).view(np.uint8)
    fields = codes.reshape(-1, 4, _BLOCK_BYTES.get(layout, int(codes.shape[1])))  # (blocks or row groups, 4, bytes)
    out = np.zeros(w_t.size // 4 + TAIL_BYTES, dtype=np.uint8)
    np.bitwise_or.reduce(fields << _SHIFTS[:, None], axis=1, out=out[:-TAIL_BYTES].reshape(fields[:, 0].shape))
    out[-TAIL_BYTES:][:4] = np.array([w_dequant_scale], dtype="<f4").view(np.uint8)
    return out


def unpack_i2_s(raw: NDArray[np.uint8], shape: tuple[int, int], layout: str = "x86") -> NDArray[np.int8]:
    """A tensor's bytes -> w_t (N, K) int8. Raises FormatError for the code 3, ShapeError for a wrong size."""
    n, k = shape
    codes = _checked_codes("unpack_i2_s", raw, shape, layout)
    fields = codes.reshape(-1, 1, _BLOCK_BYTES.get(layout, k))
    return ((fields >> _SHIFTS[:, None] & np.uint8(3)).view(np.int8) - np.int8(1)).reshape(n, k)


def pack_from_i2_s(raw: NDArray[np.uint8], shape: tuple[int, int], layout: str) -> NDArray[np.uint8]:
    """`pack_ternary(unpack_i2_s(raw, shape, layout))`, without a byte for each weight: a quarter of its time."""
    n, k = shape
    if k % CODES_PER_BYTE:
        return pack_ternary(unpack_i2_s(raw, shape, layout))
    codes = _checked_codes("pack_from_i2_s", raw, shape, layout)
    blocks = codes.reshape(-1, _BLOCK_BYTES.get(layout, k)).view("<u4")
    packed = np.empty((len(blocks), 4, blocks.shape[1]), dtype=np.uint8)
    step = max(1, _CHUNK_WORDS // blocks.shape[1])
    for start in range(0, len(blocks), step):
        some = slice(start, start + step)
        for field, shift in enumerate(_SHIFTS):
            packed[some, field] = pack_words(blocks[some], int(shift))
    return packed.reshape(n, k // CODES_PER_BYTE)


def _checked_codes(op: str, raw: NDArray[np.uint8], shape: tuple[int, int], layout: str) -> NDArray[np.uint8]:
    _check_shape(op, shape, layout)
    n, k = shape
    if raw.dtype != np.uint8 or raw.shape != (n * k // 4 + TAIL_BYTES,):
        expected = f"{n * k // 4 + TAIL_BYTES} bytes for {list(shape)}"
        raise ShapeError(op, expected=expected, got=f"{raw.dtype} of shape {raw.shape}")
    codes = raw[:-TAIL_BYTES]
    if (at := first_invalid_code(codes.reshape(-1, 1))) is not None:
        raise FormatError(f"holds the invalid ternary code 3 in byte {at[0]} (0x{codes[at[0]]:02x})")
    return codes


def i2_s_scale(raw: NDArray[np.uint8]) -> np.float32:
    """The scale in the tail. FormatError unless it is a finite number above zero."""
    scale = np.float32(raw[-TAIL_BYTES:][:4].view("<f4")[0])
    if not (np.isfinite(scale) and scale > 0):
        raise FormatError(f"expected a scale above zero in the tail, got {scale}")
    return scale


class StaleTail:
    """The bytes after the scale as bitnet.cpp's quantiser writes them, so that our files equal its files.

    It quantises all tensors into one buffer without clearing it, and sets only 4 of the 32 bytes of tail: the other 28
    are codes of an earlier, larger tensor, or zeros.
    """

    def __init__(self) -> None:
        self._buffer = np.zeros(0, dtype=np.uint8)

    def apply(self, packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The bytes of the next tensor, in the file's order, with the tail that bitnet.cpp would have written."""
        if packed.size > self._buffer.size:
            self._buffer = np.concatenate([self._buffer, np.zeros(packed.size - self._buffer.size, dtype=np.uint8)])
        written = packed.size - TAIL_BYTES + 4
        self._buffer[:written] = packed[:written]
        return self._buffer[: packed.size].copy()


# -- which layout ------------------------------------------------------------------------------------------------------

_DECIDED = 40.0  # the lead that the best layout's sum of squares needs; by chance it moves by about 5 to 10
_LINES_AT_A_TIME = 255  # their flags are added in a byte
_EIGHT_ONES = np.uint64(0x0101010101010101)
_BLOCK = 128  # x86 and arm differ by a permutation inside each block of 128 columns


class Judgement(NamedTuple):
    layout: str
    decided: bool  # False: the evidence was too weak, and x86 was assumed
    words: str  # a sentence: the layout and the reason


class LayoutEvidence:
    """Finds the layout from a trace of training: an input that a layer uses little has few non-zero weights.

    So the share of non-zeros in each column correlates with a vector that does not depend on the layout of the columns:
    the weights of the norm before the matrix, or, for down_proj, the non-zeros of the same neuron's row in gate_proj
    and up_proj. In a wrong layout the columns are mixed and the correlation is lost. `add` compares one matrix with one
    such vector under every layout; z^2 is about 1 by chance, and 10 to 300 in trained models.
    """

    def __init__(self) -> None:
        self.sums = dict.fromkeys(LAYOUTS, 0.0)
        self.comparisons = 0

    def densities(self, raw: NDArray[np.uint8], shape: tuple[int, int]) -> dict[str, tuple[Floats, Floats]]:
        """layout -> share of non-zeros (per column (K,), per row (N,)), for the layouts that the shape fits."""
        fitting = [layout for layout in LAYOUTS if fits_layout(shape, layout)]
        if len(fitting) == len(LAYOUTS) and shape[1] % _BLOCK == 0:
            return _densities_of_all(_checked_codes("densities", raw, shape, "interleaved").reshape(-1, shape[1]))
        out = {}
        for layout in fitting:
            nonzero = unpack_i2_s(raw, shape, layout) != 0
            out[layout] = nonzero.mean(axis=0, dtype=np.float32), nonzero.mean(axis=1, dtype=np.float32)
        return out

    def add(self, columns: dict[str, Floats], vectors: dict[str, Floats]) -> None:
        """One comparison: layout -> column shares (K,), and layout -> the vector (K,) they should correlate with."""
        self.comparisons += 1
        for layout in LAYOUTS:
            if layout not in columns or layout not in vectors:
                self.sums[layout] = -np.inf  # the matrix's shape rules this layout out
            else:
                self.sums[layout] += _squared_z(columns[layout], vectors[layout])

    def judge(self) -> Judgement:
        """The verdict so far."""
        if not self.comparisons:
            return Judgement("x86", False, "I2_S layout: x86 assumed, as there was nothing to compare")
        best, second = sorted(self.sums, key=lambda layout: -self.sums[layout])[:2]
        lead = self.sums[best] - self.sums[second]
        figures = ", ".join(f"{layout} {self.sums[layout] / self.comparisons:.1f}" for layout in LAYOUTS)
        figures = figures.replace("-inf", "does not fit")
        if not np.isfinite(self.sums[best]):
            return Judgement("x86", False, "I2_S layout: no layout fits every matrix's shape; x86 assumed")
        if np.isfinite(lead) and (lead < _DECIDED or self.sums[best] < 2 * self.sums[second]):
            words = f"I2_S layout: x86 assumed; the weights do not tell (agreement of columns, 1 is chance: {figures})"
            return Judgement("x86" if np.isfinite(self.sums["x86"]) else best, False, words)
        words = f"I2_S layout: {best}, by the weights' columns (agreement, 1 is chance: {figures})"
        return Judgement(best, True, words)


def _densities_of_all(codes: NDArray[np.uint8]) -> dict[str, tuple[Floats, Floats]]:
    """`LayoutEvidence.densities` of (N/4, K) bytes, K a multiple of 128, counted once for all layouts: a tenth of
    the time of unpacking each.

    Such a line of bytes is four rows: in `interleaved` a field each, in the others a quarter each. So the same counts,
    added by quarters or by fields, are those of every layout.
    """
    groups, k = codes.shape
    columns = np.zeros((4, k), dtype=np.int32)  # (field, byte)
    rows = np.empty((groups, 4, 4), dtype=np.int32)  # (line, field, quarter)
    for start in range(0, groups, _LINES_AT_A_TIME):
        some = slice(start, start + _LINES_AT_A_TIME)
        differs = codes[some] ^ np.uint8(0x55)  # from code 1
        nonzero = (differs | differs >> 1) & np.uint8(0x55)
        for field, shift in enumerate(_SHIFTS):
            flags = nonzero >> shift & np.uint8(1)
            columns[field] += flags.sum(axis=0, dtype=np.uint8)
            eights = flags.view("<u8") * _EIGHT_ONES >> np.uint64(56)  # the sum of eight bytes
            rows[some, field] = eights.reshape(len(flags), 4, -1).sum(axis=2)
    by_byte = columns.reshape(4, 4, -1).sum(axis=1)  # (field, byte of a row)
    counts = {"interleaved": (columns.sum(axis=0), rows.sum(axis=2))}
    for layout, width in _BLOCK_BYTES.items():
        counts[layout] = by_byte.reshape(4, -1, width).swapaxes(0, 1), rows.sum(axis=1)
    sizes = np.float32(4 * groups), np.float32(k)
    out = {}
    for layout in LAYOUTS:
        of_columns, of_rows = (each.reshape(-1) / size for each, size in zip(counts[layout], sizes, strict=True))
        out[layout] = of_columns.astype(np.float32), of_rows.astype(np.float32)
    return out


def _squared_z(a: Floats, b: Floats) -> float:
    """Squared z-score of the correlation between two vectors, after subtracting the mean of each block."""
    width = _BLOCK if a.size % _BLOCK == 0 else a.size
    x, y = (v.astype(np.float64).reshape(-1, width) for v in (a, b))
    x, y = x - x.mean(axis=1, keepdims=True), y - y.mean(axis=1, keepdims=True)
    power = (x * x).sum() * (y * y).sum()
    return float((x * y).sum() ** 2 / power * a.size) if power > 0 else 0.0
