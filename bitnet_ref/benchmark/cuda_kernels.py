"""The ternary kernels of a GPU by themselves: compared, then timed with weights that no cache holds.

A graph launches the kernel once on each of several copies of the weight, one after the other, three times as large
together as the second-level cache; its time between two events, over the launches, is a launch's. The ceiling is a
copy within the card's memory, taken in turn with the kernels, and its bytes are counted both ways.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.cuda import Device, DeviceArray, Graph
from ..backends.cuda.rows import linear_of_row, row_launch, takes_row
from ..backends.cuda.ternary import GEMM, GEMV, TernaryKernels, TiledWeight, choose_launch
from ..backends.cuda.workspace import Arena, Workspace
from ..errors import ShapeError
from ..reference import quantization
from ..reference.weights import TernaryWeight
from .synthetic import random_ternary_weight
from .timing import Timing

# (N, K) of the launches of a 2B-4T block: q, k and v as one; o; gate and up as one; down
SHAPES_2B_4T_FUSED = ((3840, 2560), (2560, 2560), (13824, 2560), (2560, 6912))
TOKENS = (1, 8, 16, 32, 64, 128, 2048)
REPEATS = 15
CACHES_OF_WEIGHTS = 3
LEAST_LAUNCHES = 20  # of one graph
ROW = "ternary_row"
LARGEST_COPY_BYTES = 1 << 30
TARGET_SHARES = {(13824, 2560): 0.60}  # of the copy, for one token
LEAST_SHARE = 0.35  # of every other shape

Progress = Callable[[int, int], object]


@dataclass(frozen=True)
class CudaKernelResult:
    """One kernel at one shape and token count. Without equality there is no timing, and no speed."""

    kernel: str
    chosen: bool  # whether it is the one that runs by itself
    overlapped: bool  # whether a launch may begin before the one before has ended
    grid: tuple[int, int, int]
    block: int
    out_features: int
    in_features: int
    tokens: int
    weight_bytes: int
    copies: int  # of the weight, read in turn
    unequal_accumulators: int
    unequal_floats: int
    timing: Timing | None  # of one launch, with what it needs before and after

    @property
    def equal(self) -> bool:
        return self.unequal_accumulators == self.unequal_floats == 0

    @property
    def gb_per_s(self) -> float | None:
        """Bytes of the weight over the median time."""
        return self.timing.giga_per_s_median(self.weight_bytes) if self.timing else None

    @property
    def tera_operations_per_s(self) -> float | None:
        """Two for each weight and token, over the median time."""
        operations = 2 * self.tokens * self.out_features * self.in_features
        return self.timing.giga_per_s_median(operations) / 1e3 if self.timing else None

    @property
    def target_share(self) -> float | None:
        """Of the copy's speed: what a kernel for one token is held to."""
        shape = self.out_features, self.in_features
        return TARGET_SHARES.get(shape, LEAST_SHARE) if self.tokens == 1 and self.chosen else None


@dataclass(frozen=True)
class CudaKernelBench:
    """All results, and the copy that they were measured in turn with."""

    device: str
    emulated: bool
    l2_bytes: int
    copy_bytes: int  # read and written
    copy: Timing
    results: list[CudaKernelResult]

    @property
    def equal(self) -> bool:
        return bool(self.results) and all(result.equal for result in self.results)

    @property
    def copy_gb_per_s(self) -> float:
        """Read and written, over the median time."""
        return self.copy.giga_per_s_median(self.copy_bytes)

    def share(self, result: CudaKernelResult) -> float | None:
        """The kernel's reading of weights over the copy's speed: medians."""
        return None if result.gb_per_s is None else result.gb_per_s / self.copy_gb_per_s

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        facts = {**asdict(self), "equal": self.equal, "copy_gb_per_s": self.copy_gb_per_s}
        derived = ("equal", "gb_per_s", "tera_operations_per_s", "target_share")
        facts["results"] = [
            {**asdict(r), **{name: getattr(r, name) for name in derived}, "share_of_copy": self.share(r)}
            for r in self.results
        ]
        return facts


class PlainCopy:
    """The ceiling: a copy within the card's memory. nbytes: what it reads and writes, both counted."""

    def __init__(self, device: Device, copy_bytes: int | None = None) -> None:
        """copy_bytes: to read, by default 1 GiB, or a quarter of the free memory if that is less."""
        if copy_bytes is None:
            copy_bytes = min(LARGEST_COPY_BYTES, device.memory().free // 4)
        self._device = device
        self._source, self._target = (device.zeros(copy_bytes // 16 * 4, np.float32) for _ in range(2))
        self.nbytes = 2 * self._source.nbytes
        with device.capture() as self._graph:
            device.copy(self._target, self._source)

    def seconds(self) -> float:
        """Of one copy, between two events."""
        return _seconds(self._device, self._graph)


def kernels_for(tokens: int) -> list[str]:
    """Those worth comparing: of kernels 1 and 2 the ones with room for the tokens but not four times as much, and 3."""
    few = [name for name, most in GEMV.items() if tokens <= most and (most <= 4 * tokens or most == 8)]
    return few if tokens <= min(GEMV.values()) else few + list(GEMM)


def measure_cuda_kernels(
    device: Device,
    shapes: Sequence[tuple[int, int]] = SHAPES_2B_4T_FUSED,
    tokens: Sequence[int] = TOKENS,
    *,
    repeats: int = REPEATS,
    cold_bytes: int | None = None,
    copy_bytes: int | None = None,
    progress: Progress | None = None,
) -> CudaKernelBench:
    """Every kernel that suits, on a random weight of each shape (N, K), for each number of tokens.

    cold_bytes: what the copies of a weight are together at least, by default three second-level caches; copy_bytes:
    what the plain copy reads. Both are for tests: less than the default measures the cache.
    """
    if not shapes or not tokens or min(*tokens, *itertools.chain(*shapes)) < 1 or repeats < 1:
        got = f"shapes {list(shapes)}, tokens {list(tokens)}, {repeats} repeats"
        raise ShapeError("measure_cuda_kernels", expected="at least one shape and token, all sizes >= 1", got=got)
    cold_bytes = CACHES_OF_WEIGHTS * device.l2_bytes if cold_bytes is None else cold_bytes
    dice = np.random.default_rng(0)
    variants = [TernaryKernels(device, overlap) for overlap in ((False, True) if device.can_overlap else (False,))]
    plain_copy = PlainCopy(device, copy_bytes)
    ws = Workspace(device)
    copy_samples: list[float] = []

    def timed(launch: Callable[[TiledWeight], object], copies: Sequence[TiledWeight]) -> Timing:
        """One launch, in a graph of some, on one copy after another."""
        launches, arena = -(-LEAST_LAUNCHES // len(copies)) * len(copies), Arena(ws.make)

        def all_of_them() -> None:
            with ws.arrays_of(arena, overlap=False):
                for index in range(launches):
                    launch(copies[index % len(copies)])

        all_of_them()
        with device.capture() as graph:
            all_of_them()
        samples = []
        graph.launch()
        for _ in range(repeats):
            copy_samples.append(plain_copy.seconds())
            samples.append(_seconds(device, graph) / launches)
        return Timing.of(samples)

    results: list[CudaKernelResult] = []
    steps = len(shapes) * len(tokens)
    for number, (n_out, n_in) in enumerate(shapes):
        weight = random_ternary_weight(dice, n_out, n_in)
        first = variants[0].prepare(weight)
        count = max(1, -(-cold_bytes // first.tiles.nbytes))
        copies = [first, *(_copy(device, first) for _ in range(count - 1))]
        device.synchronize()  # overlapped launches take weights as finished
        x_q = dice.integers(-128, 128, (max(tokens), n_in), dtype=np.int8)
        acc = quantization.ternary_matmul(x_q, weight.packed, n_in)
        x_scale = dice.uniform(1, 100, (max(tokens), 1)).astype(np.float32)
        y = quantization.dequantize(acc, weight.w_dequant_scale, x_scale)
        for part, m in enumerate(tokens):
            x, scale = device.array(x_q[:m]), device.array(x_scale[:m])
            out = device.empty((m, n_out), np.float32)
            sizes = n_out, n_in, m, first.tiles.nbytes, len(copies)
            usual = ROW if takes_row(x, first) else choose_launch(m, n_out, n_in, device.multiprocessors).kernel
            for kernels, name in itertools.product(variants, kernels_for(m)):
                launch = partial(kernels.linear, x, scale, y=out, kernel=name)
                wrong_acc = int((device.to_host(kernels.matmul(x, first, kernel=name)) != acc[:m]).sum())
                wrong_y = _unequal(device.to_host(launch(first)), y[:m])
                timing = timed(launch, copies) if wrong_acc == wrong_y == 0 else None
                how = choose_launch(m, n_out, n_in, device.multiprocessors, name)
                which = name, name == usual, kernels.overlap, how.grid, how.block
                results.append(CudaKernelResult(*which, *sizes, wrong_acc, wrong_y, timing))
            if takes_row(x, first):
                results += [_row_result(ws, variant.overlap, copies, weight, dice, timed) for variant in variants]
            if progress is not None:
                progress(number * len(tokens) + part + 1, steps)
    copy_samples = copy_samples or [plain_copy.seconds()]
    facts = device.name, device.emulated, device.l2_bytes, plain_copy.nbytes
    return CudaKernelBench(*facts, Timing.of(copy_samples), results)


def _row_result(
    ws: Workspace,
    overlap: bool,
    copies: Sequence[TiledWeight],
    weight: TernaryWeight,
    dice: np.random.Generator,
    timed: Callable[[Callable[[TiledWeight], object], Sequence[TiledWeight]], Timing],
) -> CudaKernelResult:
    """One token by the kernel that quantises its row itself, as decoding does."""
    first = copies[0]
    x = dice.standard_normal((1, first.in_features), dtype=np.float32)
    x_q, x_scale = quantization.quantize_activations(x)
    acc = quantization.ternary_matmul(x_q, weight.packed, first.in_features)
    y, on_device = quantization.dequantize(acc, weight.w_dequant_scale, x_scale), ws.upload(x)

    def launch(w: TiledWeight) -> DeviceArray:
        ws.device.overlaps = overlap
        return linear_of_row(ws, on_device, w)

    wrong = _unequal(ws.download(launch(first)), y)
    ws.device.overlaps = False
    how = row_launch(ws.device, first.in_features, first.out_features)
    sizes = first.out_features, first.in_features, 1, first.tiles.nbytes, len(copies)
    facts = ROW, True, overlap, (how.grid, 1, 1), how.block, *sizes, 0, wrong
    return CudaKernelResult(*facts, timed(launch, copies) if wrong == 0 else None)


def _unequal(found: NDArray[np.float32], expected: NDArray[np.float32]) -> int:
    return int((found.view(np.int32) != expected.view(np.int32)).sum())


def _copy(device: Device, w: TiledWeight) -> TiledWeight:
    """The same in other memory."""
    tiles: DeviceArray = device.empty(w.tiles.shape, w.tiles.dtype)
    device.copy(tiles, w.tiles)
    return TiledWeight(
        device, tiles, w.w_scales, w.bias_on_device, w.out_features, w.in_features, w.w_dequant_scale, w.bias
    )


def _seconds(device: Device, graph: Graph) -> float:
    graph.launch()  # the card is at work while the host asks for the rest: the time has no gap
    before = device.event()
    graph.launch()
    return device.event().seconds_since(before)
