"""Host side of `kernels/cuda/ternary.cu`: weights into tiles, which kernel runs on what grid, and the calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ShapeError
from ...reference.quantization import pack_ternary
from ...reference.weights import TernaryLinear, TernaryWeight
from .device import Device, DeviceArray
from .stacks import MAX_STACKED, Member, Stack, first_rows, starts_of
from .workspace import THREADS, Workspace

FILE = "ternary.cu"
TILE_ROWS, TILE_COLUMNS, TILE_WORDS = 16, 128, 128  # ternary.cu's
GEMM_ROWS, GEMM_TOKENS = 128, 64  # of a block of kernel 3
STAGES, SUMS_PITCH = 4, GEMM_ROWS + 4  # ternary.cu: of kernel 3
COLUMNS_TIMES_64 = 1 << 18  # from here on 64 times a sum may pass int32: the plain kernel
MAX_WARPS = 16  # of a block of kernels 1 and 2

# kernel -> the max tokens that it takes at once; chosen in this order
GEMV = {"ternary_gemv_dp4a": 1, "ternary_gemv_mma_8": 8, "ternary_gemv_mma_16": 16, "ternary_gemv_mma_32": 32}
# Warps that the 65,536 registers of a multiprocessor allow: each of its four schedulers has 16,384, and a warp takes 32
# times those of a thread, rounded up to eights. ptxas reports for sm_90: 46, 96, 102 and 102.
WARPS_PER_MULTIPROCESSOR = {
    "ternary_gemv_dp4a": 4 * (16_384 // (32 * 48)),  # 40
    "ternary_gemv_mma_8": 4 * (16_384 // (32 * 96)),  # 20
    "ternary_gemv_mma_16": 4 * (16_384 // (32 * 104)),  # 16
    "ternary_gemv_mma_32": 4 * (16_384 // (32 * 104)),
}
GEMM = "ternary_gemm"
PLAIN = "ternary_plain"
KERNELS = (PLAIN, *GEMV, GEMM)


@dataclass(frozen=True)
class Launch:
    """One launch. share: tiles along K of a block. parts: the number of blocks that add to each sum."""

    kernel: str
    grid: tuple[int, int, int]
    block: int
    shared_mem: int
    share: int
    parts: int


def choose_launch(tokens: int, rows: int, columns: int, multiprocessors: int, kernel: str | None = None) -> Launch:
    """The kernel for a shape, or the named one, and its grid. ShapeError where that kernel cannot take it.

    The limits between kernels follow from counted bytes and operations. On an H200 they are right for 8, 32 and 64
    tokens of 2B-4T's matrices.
    """
    tiles_n, tiles_k = -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS)
    if kernel is None:
        kernel = next((name for name, most in GEMV.items() if tokens <= most), GEMM)
        kernel = PLAIN if columns >= COLUMNS_TIMES_64 else kernel
    fits = kernel == PLAIN or (columns < COLUMNS_TIMES_64 and tokens <= GEMV.get(kernel, tokens))
    if kernel not in KERNELS or not fits:
        expected = f"one of {', '.join(KERNELS)}, and one that takes {tokens} tokens of {columns} columns"
        raise ShapeError("ternary_matmul", expected=expected, got=repr(kernel))
    if kernel == PLAIN:
        return Launch(kernel, (-(-tokens * rows // THREADS), 1, 1), THREADS, 0, tiles_k, 1)
    if kernel in GEMV:
        # All blocks run at once, with as many warps as the multiprocessors have room for: each loads its tiles at once.
        blocks_each = -(-tiles_n // multiprocessors)
        warps = min(MAX_WARPS, tiles_k, max(4, WARPS_PER_MULTIPROCESSOR[kernel] // blocks_each))
        warps = -(-tiles_k // -(-tiles_k // warps))  # all but the last have the same number of tiles
        shared = 0 if GEMV[kernel] == 1 else warps * TILE_ROWS * GEMV[kernel] * 4
        return Launch(kernel, (tiles_n, 1, 1), 32 * warps, shared, tiles_k, 1)
    grid = -(-rows // GEMM_ROWS), -(-tokens // GEMM_TOKENS)
    share, parts = divided(tiles_k, min(multiprocessors // (grid[0] * grid[1]), tiles_k // 4))
    stages = STAGES * (GEMM_ROWS * TILE_COLUMNS // 4 + GEMM_TOKENS * TILE_COLUMNS)
    shared = max(stages, GEMM_TOKENS * SUMS_PITCH * 4)  # the sums lie where the stages were
    return Launch(kernel, (*grid, parts), GEMM_ROWS, shared, share, parts)


def divided(tiles_k: int, parts: int) -> tuple[int, int]:
    """(tiles of a part, parts): at most so many parts, of the same size but for the last."""
    share = -(-tiles_k // max(1, parts))
    return share, -(-tiles_k // share)


def padded_columns(columns: int) -> int:
    """The stride of activations that kernels read in place: K rounded up to whole tiles. The padding is not used."""
    return -(-columns // TILE_COLUMNS) * TILE_COLUMNS


def unpack_tiles(tiles: NDArray[np.uint32], rows: int, columns: int) -> NDArray[np.int8]:
    """tiles (ceil(N/16), ceil(K/128), 128) uint32 -> w_t (N, K) int8; the layout is described in ternary.cu."""
    tiles_n, tiles_k, _ = tiles.shape
    # words by lane (g, t) and number (half, upper): bytes b, crumbs i
    by = tiles.astype("<u4").view(np.uint8).reshape(tiles_n, tiles_k, 8, 4, 2, 2, 4, 1)
    crumbs = by >> np.array([0, 2, 4, 6], dtype=np.uint8) & 3  # (R, C, g, t, half, upper, b, i)
    w_t: NDArray[np.int8] = np.array([0, 1, 0, -1], dtype=np.int8)[crumbs.transpose(0, 5, 2, 1, 4, 3, 7, 6)]
    return w_t.reshape(tiles_n * TILE_ROWS, tiles_k * TILE_COLUMNS)[:rows, :columns]


@dataclass(eq=False)
class TiledWeight(TernaryLinear):
    """A ternary matrix, or a stack of several of one input, on a device in tiles of 16 x 128.

    Its device arrays move when it becomes a member of a stack; nothing else of it changes.
    """

    device: Device
    tiles: DeviceArray  # (ceil(N/16), ceil(K/128), 128) uint32
    w_scales: DeviceArray  # (N,) float32: w_dequant_scale of each row
    bias_on_device: DeviceArray | None  # (N,) float32
    out_features: int
    in_features: int
    w_dequant_scale: np.float32  # of a stack: the first matrix's
    bias: NDArray[np.float32] | None = None  # the same, on the host
    name: str = ""
    parts: tuple[int, ...] = ()  # of a stack: the rows of each matrix
    member: Member | None = None  # its place in a stack

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @property
    def nbytes(self) -> int:
        return self.tiles.nbytes + self.w_scales.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def plain(self) -> TernaryWeight:
        packed = pack_ternary(unpack_tiles(self.device.to_host(self.tiles), *self.shape))
        return TernaryWeight(packed, self.in_features, self.w_dequant_scale, self.bias, self.name)


class TernaryKernels:
    """The ternary product on a device. The first call of a size allocates room and compiles: call once before a
    capture."""

    def __init__(self, ws: Workspace) -> None:
        self._ws, self.device = ws, ws.device

    def prepare(self, weight: TernaryWeight) -> TiledWeight:
        """A weight in tiles."""
        rows, columns = weight.shape
        tiles_n, tiles_k = -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS)
        tiles = self._ws.make((tiles_n, tiles_k, TILE_WORDS), np.uint32)
        self._ws.each(FILE, "ternary_pack", tiles.size, self._ws.upload(weight.packed), rows, columns, tiles)
        scale, bias = np.float32(weight.w_dequant_scale), weight.bias
        scales = self._ws.upload(np.full(rows, scale, dtype=np.float32))
        on_device = None if bias is None else self._ws.upload(bias.astype(np.float32, copy=False))
        return TiledWeight(self.device, tiles, scales, on_device, rows, columns, scale, bias, weight.name)

    def can_stack(self, weights: Sequence[Any]) -> bool:
        """Whether `stack` takes them: 2 or 3 ternary weights of one input, in no stack yet, of whole tiles."""
        first = weights[0]
        return (
            2 <= len(weights) <= MAX_STACKED
            and all(isinstance(w, TiledWeight) and w.device is self.device for w in weights)
            and all(w.member is None and not w.parts for w in weights)
            and all(w.in_features == first.in_features for w in weights)
            and all(w.out_features % TILE_ROWS == 0 for w in weights[:-1])
        )

    def stack(self, *weights: TiledWeight) -> Stack:
        """Move them into arrays of which each then holds its part; see stacks.py. Raises ShapeError.

        No step may have been recorded with them: it would read their old memory.
        """
        if not self.can_stack(weights):
            got = ", ".join(f"{w.shape}" for w in weights)
            expected = f"two or three weights of one input, all but the last of whole tiles of {TILE_ROWS} rows"
            raise ShapeError("stack", expected=expected, got=got)
        parts, columns = tuple(w.out_features for w in weights), weights[0].in_features
        rows, biases = sum(parts), None
        tiles = self._ws.make((-(-rows // TILE_ROWS), *weights[0].tiles.shape[1:]), np.uint32)
        scales = self._ws.make((rows,), np.float32)
        if any(w.bias is not None for w in weights):
            biases = self._ws.zeros((rows,), np.float32)
        whole = TiledWeight(self.device, tiles, scales, biases, rows, columns, weights[0].w_dequant_scale, parts=parts)
        stack, tile = Stack(whole, parts), 0
        for number, (w, row) in enumerate(zip(weights, starts_of(parts), strict=True)):
            here, there = slice(row, row + w.out_features), slice(tile, tile + len(w.tiles))
            self.device.copy(tiles[there], w.tiles)
            self.device.copy(scales[here], w.w_scales)
            if w.bias_on_device is not None and biases is not None:
                self.device.copy(biases[here], w.bias_on_device)
                w.bias_on_device = biases[here]
            w.tiles, w.w_scales, w.member = tiles[there], scales[here], Member(stack, number)
            tile = there.stop
        return stack

    def matmul(self, x_q: DeviceArray, w: TiledWeight, kernel: str | None = None) -> DeviceArray:
        """x_q (M, K) or (M, padded_columns(K)) int8 -> acc (M, N) int32, exact."""
        return self._run(x_q, None, w, None, np.int32, kernel)

    def linear(
        self,
        x_q: DeviceArray,
        x_quant_scale: DeviceArray,
        w: TiledWeight,
        y: DeviceArray | None = None,
        kernel: str | None = None,
        residual: DeviceArray | None = None,
    ) -> DeviceArray:
        """x_q as for `matmul`, x_quant_scale (M, 1) -> y (M, N) = acc * (w_scale / x_scale) + bias + residual (M, N).

        For a stack, which takes no residual, y is as long, and `stacks.split` tells the results apart.
        """
        if x_quant_scale.dtype != np.float32 or x_quant_scale.shape != (len(x_q), 1):
            got = f"{x_quant_scale.dtype} {x_quant_scale.shape}"
            raise ShapeError("ternary linear", expected=f"x_quant_scale float32 ({len(x_q)}, 1)", got=got)
        if residual is not None and (w.parts or residual.shape != (len(x_q), w.out_features)):
            expected = f"residual ({len(x_q)}, {w.out_features}), and no stack"
            raise ShapeError("ternary linear", expected=expected, got=f"residual {residual.shape}, parts {w.parts}")
        return self._run(x_q, x_quant_scale, w, y, np.float32, kernel, residual)

    def _run(
        self,
        x_q: DeviceArray,
        x_scale: DeviceArray | None,
        w: TiledWeight,
        out: DeviceArray | None,
        dtype: Any,
        kernel: str | None,
        residual: DeviceArray | None = None,
    ) -> DeviceArray:
        (rows, columns), tokens, stride = w.shape, len(x_q), padded_columns(w.in_features)
        if x_q.dtype != np.int8 or x_q.ndim != 2 or x_q.shape[1] not in (columns, stride):
            expected = f"x_q int8 (M, {columns}) or (M, {stride})"
            raise ShapeError("ternary_matmul", expected=expected, got=f"x_q {x_q.dtype} {x_q.shape}")
        if out is None:
            out = self._ws.empty((tokens, rows), dtype)
        if out.dtype != dtype or out.shape != (tokens, rows):
            expected = f"out {np.dtype(dtype).name} ({tokens}, {rows})"
            raise ShapeError("ternary_matmul", expected=expected, got=f"{out.dtype} {out.shape}")
        if tokens == 0:
            return out
        if x_q.shape[1] != stride:
            padded = self._ws.scratch((tokens, stride), np.int8)
            self._ws.each(FILE, "ternary_pad", padded.size, x_q, tokens, columns, padded)
            x_q = padded
        launch = choose_launch(tokens, rows, columns, self.device.multiprocessors, kernel)
        outputs: tuple[DeviceArray | None, ...] = (out, None, None) if x_scale is None else (None, None, out)
        if launch.parts > 1 and x_scale is None:
            self.device.fill(out, 0)
        elif launch.parts > 1:
            blocks = launch.grid[0] * launch.grid[1]
            outputs = self._ws.counters("ternary sums", tokens * rows), self._ws.counters("ternary done", blocks), out
        scales = w.w_scales, x_scale, w.bias_on_device, residual
        args = x_q, stride, w.tiles, tokens, rows, columns, *first_rows(w.parts, rows), launch.share, *scales, *outputs
        self._ws.launch(FILE, launch.kernel, launch.grid, launch.block, *args, shared=launch.shared_mem)
        return out
