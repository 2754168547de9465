"""The ternary kernels of a GPU by themselves: compared, then timed with weights that no cache holds.

    python scripts/benchmarks/cuda_kernels.py

A graph launches the kernel on several copies of the weight, one after another; together they are three times as large
as the L2 cache. The time between two events, divided by the number of launches, is a launch's. The ceiling is a copy
within the card's memory, taken in turn with the kernels; its bytes read and written both count.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import click
import numpy as np
from commands import Script, device_option, draw_device, start

from bitnet_ref.backends.cuda import open_device
from bitnet_ref.backends.cuda.device import Device, DeviceArray, DeviceGraph
from bitnet_ref.backends.cuda.rows import linear_of_row, row_launch, takes_row
from bitnet_ref.backends.cuda.ternary import GEMM, GEMV, TernaryKernels, TiledWeight, choose_launch
from bitnet_ref.backends.cuda.workspace import Arena, Workspace
from bitnet_ref.benchmark.synthetic import random_ternary_weight
from bitnet_ref.benchmark.timing import Record, Sample, Timing
from bitnet_ref.benchmark.validate import Check, count_unequal
from bitnet_ref.cli.bench_shared import WholeNumbers, differs, draw_by_shape, in_time, report_bench, shape_option
from bitnet_ref.cli.shell import LoadingBar, common_options, size_in_words
from bitnet_ref.errors import ShapeError
from bitnet_ref.formats.checkpoint import Progress, ticker
from bitnet_ref.reference import quantization

if TYPE_CHECKING:
    from rich.console import Console

# (N, K) of the launches of a 2B-4T block: q, k and v as one; o; gate and up as one; down
SHAPES_2B_4T_FUSED = ((3840, 2560), (2560, 2560), (13824, 2560), (2560, 6912))
TOKENS = (1, 8, 16, 32, 64, 128, 2048)
REPEATS = 15
CACHES_OF_WEIGHTS = 3
MIN_LAUNCHES = 20  # per graph
ROW = "ternary_row"
MAX_COPY_BYTES = 1 << 30
TARGET_SHARES = {(13824, 2560): 0.60}  # of the copy's speed, for one token
MIN_SHARE = 0.35  # for every other shape

Launch = Callable[[TiledWeight], DeviceArray]


@dataclass(frozen=True)
class CudaKernelResult(Record):
    """One kernel at one shape and token count. Without equality there is no timing, and no speed."""

    kernel: str
    chosen: bool  # whether it is the kernel that models use at this size
    grid: tuple[int, int, int]
    block: int
    out_features: int
    in_features: int
    tokens: int
    weight_bytes: int
    copies: int  # of the weight, read in turn
    unequal_accumulators: int
    unequal_floats: int
    timing: Timing | None  # per launch
    copy_gb_per_s: float = 0.0  # of the plain copy

    @property
    def equal(self) -> bool:
        return self.unequal_accumulators == self.unequal_floats == 0

    @property
    def gb_per_s(self) -> float | None:
        """Bytes of the weight over the median time."""
        return self.timing.giga_per_s(self.weight_bytes, "median_s") if self.timing else None

    @property
    def share_of_copy(self) -> float | None:
        """Bytes of the weight per second over those that the plain copy moves."""
        return self.gb_per_s / self.copy_gb_per_s if self.gb_per_s and self.copy_gb_per_s else None

    @property
    def tera_operations_per_s(self) -> float | None:
        """Two for each weight and token, over the median time."""
        operations = 2 * self.tokens * self.out_features * self.in_features
        return self.timing.giga_per_s(operations, "median_s") / 1e3 if self.timing else None

    @property
    def target_share(self) -> float | None:
        """The `share_of_copy` asked of the kernel that models use for one token."""
        if self.tokens > 1 or not self.chosen:
            return None
        return TARGET_SHARES.get((self.out_features, self.in_features), MIN_SHARE)


@dataclass(frozen=True)
class CudaKernelBench(Record):
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
    def check(self) -> Check:
        values = sum(result.tokens * result.out_features for result in self.results)
        accumulators = sum(result.unequal_accumulators for result in self.results)
        return Check(values, accumulators, values, sum(result.unequal_floats for result in self.results))

    @property
    def copy_gb_per_s(self) -> float:
        """Read and written, over the median time."""
        return self.copy.giga_per_s(self.copy_bytes, "median_s")


class PlainCopy:
    """The ceiling: a copy within the card's memory. nbytes: what it reads and writes together."""

    def __init__(self, device: Device, copy_bytes: int | None = None) -> None:
        """copy_bytes: to read, by default 1 GiB, or a quarter of the free memory if that is less."""
        if copy_bytes is None:
            copy_bytes = min(MAX_COPY_BYTES, device.memory().free // 4)
        self._device = device
        self._source, self._target = (device.zeros(copy_bytes // 16 * 4, np.float32) for _ in range(2))
        self.nbytes = 2 * self._source.nbytes
        with device.capture() as self._graph:
            device.copy(self._target, self._source)

    def seconds(self) -> float:
        """Of one copy, between two events."""
        return seconds_of(self._device, self._graph)


class LaunchTimer:
    """Times launches of a kernel, in turn with the plain copy."""

    def __init__(self, ws: Workspace, copy_bytes: int | None, repeats: int) -> None:
        self.ws, self.repeats = ws, repeats
        self.copy = PlainCopy(ws.device, copy_bytes)
        self.copy_samples_s = [self.copy.seconds()]

    def time(self, launch: Launch, copies: Sequence[TiledWeight]) -> Timing:
        """Per launch, in a graph of at least MIN_LAUNCHES, on one copy of the weight after another."""
        launches, arena = -(-MIN_LAUNCHES // len(copies)) * len(copies), Arena(self.ws.make)

        def launch_all() -> None:
            with self.ws.arrays_of(arena):
                for index in range(launches):
                    launch(copies[index % len(copies)])

        launch_all()
        with self.ws.device.capture() as graph:
            launch_all()
        graph.launch()
        samples = []
        for _ in range(self.repeats):
            self.copy_samples_s.append(self.copy.seconds())
            samples.append(Sample(seconds_of(self.ws.device, graph) / launches))
        return Timing.of(samples)


def kernels_for(tokens: int) -> list[str]:
    """Those worth comparing: the GEMV kernels with room for the tokens but not four times as much, and the GEMM."""
    few = [name for name, room in GEMV.items() if tokens <= room and (room <= 4 * tokens or room == 8)]
    return few if tokens <= min(GEMV.values()) else [*few, GEMM]


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
    """Every suitable kernel, on a random weight of each shape (N, K), for each number of tokens.

    cold_bytes: size of all copies of a weight together, by default three L2 caches; copy_bytes: of the plain copy.
    Both are for tests: with less than the default the cache is measured.
    """
    if not shapes or not tokens or min(*tokens, *itertools.chain(*shapes)) < 1 or repeats < 1:
        got = f"shapes {list(shapes)}, tokens {list(tokens)}, {repeats} repeats"
        raise ShapeError("measure_cuda_kernels", expected="at least one shape and token, all sizes >= 1", got=got)
    cold_bytes = CACHES_OF_WEIGHTS * device.l2_bytes if cold_bytes is None else cold_bytes
    rng = np.random.default_rng(0)
    ws = Workspace(device)
    kernels = TernaryKernels(ws)
    timer = LaunchTimer(ws, copy_bytes, repeats)
    results: list[CudaKernelResult] = []
    tick = ticker(progress, len(shapes) * len(tokens))
    for n_out, n_in in shapes:
        weight = random_ternary_weight(rng, n_out, n_in)
        first = kernels.prepare(weight)
        copies = [first, *(copy_of(device, first) for _ in range(-(-cold_bytes // first.tiles.nbytes) - 1))]
        device.synchronize()
        for m in tokens:
            x = rng.standard_normal((m, n_in), dtype=np.float32)
            x_q, x_scale = quantization.quantize_activations(x)
            acc = quantization.ternary_matmul(x_q, weight.packed, n_in)
            y = quantization.dequantize(acc, weight.w_dequant_scale, x_scale)
            inputs, out = (device.array(x_q), device.array(x_scale)), device.empty((m, n_out), np.float32)
            is_row = takes_row(inputs[0], first)
            default = ROW if is_row else choose_launch(m, n_out, n_in, device.multiprocessors).kernel

            trials: list[tuple[str, tuple[int, int, int], int, Launch, int]] = []
            for name in kernels_for(m):
                plan = choose_launch(m, n_out, n_in, device.multiprocessors, name)
                wrong = count_unequal(device.to_host(kernels.matmul(inputs[0], first, kernel=name)), acc)
                linear = partial(kernels.linear, *inputs, y=out, kernel=name)
                trials.append((name, plan.grid, plan.block, linear, wrong))
            if is_row:  # quantises its row itself, as decoding does; its accumulators stay in the kernel
                row = row_launch(device, n_in, n_out)
                trials.append((ROW, (row.grid, 1, 1), row.block, partial(linear_of_row, ws, ws.upload(x)), 0))
            for name, grid, block, launch, wrong in trials:
                wrong_y = count_unequal(device.to_host(launch(first)).view(np.int32), y.view(np.int32))
                timing = timer.time(launch, copies) if wrong == wrong_y == 0 else None
                sizes = n_out, n_in, m, first.tiles.nbytes, len(copies)
                results.append(CudaKernelResult(name, name == default, grid, block, *sizes, wrong, wrong_y, timing))
            tick()
    copy = Timing.of([Sample(taken_s) for taken_s in timer.copy_samples_s])
    bench = CudaKernelBench(device.name, device.emulated, device.l2_bytes, timer.copy.nbytes, copy, results)
    return replace(bench, results=[replace(result, copy_gb_per_s=bench.copy_gb_per_s) for result in results])


def copy_of(device: Device, w: TiledWeight) -> TiledWeight:
    tiles: DeviceArray = device.empty(w.tiles.shape, w.tiles.dtype)
    device.copy(tiles, w.tiles)
    return replace(w, tiles=tiles)


def seconds_of(device: Device, graph: DeviceGraph) -> float:
    """Of one launch of the graph, between two events."""
    graph.launch()  # the card is busy while the host asks for the rest, so that the measured time has no gap
    before = device.event()
    graph.launch()
    return device.event().seconds_since(before)


@click.command(cls=Script)
@shape_option
@click.option("--tokens", type=WholeNumbers("M,M,...", ","), default="1,8,16,32,64,128,2048", show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=15, show_default=True)
@device_option
@click.option("--cold-mb", type=click.IntRange(min=1), help="Weights to read in turn.  [default: 3 L2 caches]")
@common_options
def main(
    shapes: tuple[tuple[int, int], ...], tokens: tuple[int, ...], repeats: int, device: int, cold_mb: int | None
) -> None:
    """Time the ternary kernels of a GPU, each launch on weights that its caches do not hold.

    For one token, the target is a share of the speed of a plain copy: 60% at 13824x2560, 35% elsewhere.
    BITNET_REF_CUDA=emulated runs the same on the host: it shows that they are right, not how fast they are.
    """
    card = open_device(device)
    sizes = {} if cold_mb is None else {"cold_bytes": cold_mb << 20, "copy_bytes": cold_mb << 20}
    with LoadingBar("measuring") as bar:
        bench = measure_cuda_kernels(card, shapes or SHAPES_2B_4T_FUSED, tokens, repeats=repeats, progress=bar, **sizes)
    card.close()
    report_bench(bench, lambda out: draw_cuda(bench, out))


def draw_cuda(bench: CudaKernelBench, out: Console) -> None:
    """A row for each kernel; the one that models use is marked, and has a target."""

    def copies(results: list[CudaKernelResult]) -> str:
        return f"{size_in_words(results[0].weight_bytes)}, {results[0].copies} copies"

    def cells(result: CudaKernelResult) -> list[str]:
        name = ("* " if result.chosen else "  ") + result.kernel.removeprefix("ternary_")
        blocks = "x".join(str(size) for size in result.grid if size > 1) or "1"
        row = [name, str(result.tokens), f"{blocks} of {result.block}"]
        share, target = result.share_of_copy, result.target_share
        if result.timing is None or share is None:
            return [*row, *differs(result.unequal_accumulators, result.unequal_floats)]
        row += [in_time(result.timing.best_s), in_time(result.timing.median_s), f"{result.gb_per_s:,.1f}"]
        verdict = "" if target is None or bench.emulated else f"{target:.0%} {'met' if share >= target else 'missed'}"
        return [*row, f"{share:.1%}", verdict, f"{result.tera_operations_per_s:.2f}"]

    draw_device(bench.device, bench.copy_gb_per_s, bench.emulated, out)
    columns = ("kernel", "tokens", "blocks", "best", "median", "GB/s", "of copy", "target", "TOP/s")
    draw_by_shape(bench.results, columns, copies, cells, out)
    if bench.equal:
        out.print(f"\nAll {len(bench.results)} equal the NumPy reference: int32 accumulators and float32 results.")
    out.print("* used by models at this shape and number of tokens")


if __name__ == "__main__":
    start(main)
