"""`bitnet-ref bench kernels` and `bench cuda`: draw what `bitnet_ref.benchmark` measures of the ternary product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..backends import NAMES
from .bench_shared import in_time, in_words, machine_options, new_table, refuse_simd, report
from .shell import LoadingBar, common_options, size_in_words

if TYPE_CHECKING:
    from rich.console import Console

    from ..benchmark import CudaKernelBench, KernelBench
    from ..benchmark.cuda_kernels import CudaKernelResult
    from ..benchmark.kernels import KernelResult

    Result = TypeVar("Result", KernelResult, CudaKernelResult)


MOST_TOKENS = 1 << 20


class WholeNumbers(click.ParamType):
    """Whole numbers with a separator: "6912x2560" -> (6912, 2560)."""

    def __init__(self, name: str, separator: str, count: int | None = None) -> None:
        self.name, self.separator, self.count = name, separator, count

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        words = value.lower().split(self.separator)
        good = all(word.isascii() and word.isdecimal() and 1 <= int(word[:9]) <= MOST_TOKENS for word in words)
        if not good or (self.count is not None and len(words) != self.count):
            self.fail(f"expected {self.name}, whole numbers from 1 to {MOST_TOKENS}, got {value!r}", param, ctx)
        return tuple(map(int, words))


# -- on every backend --------------------------------------------------------------------------------------------------


@click.command(short_help="The ternary product, on every backend and kernel set.")
@click.option("--shape", "shapes", type=WholeNumbers("NxK", "x", 2), multiple=True, help="[default: those of 2B-4T]")
@click.option("--tokens", type=WholeNumbers("M,M,...", ","), default="1,4,16,64,512", show_default=True)
@click.option("--backend", type=click.Choice(("all", *NAMES)), default="all", show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=7, show_default=True)
@click.option("--methods", is_flag=True, help="Every method of each kernel set, not only the one it takes.")
@machine_options
@common_options
def kernels(
    shapes: tuple[tuple[int, int], ...],
    tokens: tuple[int, ...],
    backend: str,
    repeats: int,
    methods: bool,
    threads: int | None,
    simd: str | None,
) -> None:
    """Time one ternary linear (quantise, multiply, dequantise) on every backend and kernel set that can run here.

    Its weights come from memory, not from the cache: a call takes another copy each time.
    """
    from ..benchmark import candidates, measure_kernels
    from ..benchmark.kernels import SHAPES_2B_4T

    refuse_simd(simd, backend)
    backends = candidates(backend, threads, simd, methods)
    with LoadingBar("measuring") as bar:
        found = measure_kernels(backends, shapes or SHAPES_2B_4T, tokens, repeats=repeats, progress=bar)
    report(found, lambda out: draw_kernels(found, out))


def draw_kernels(found: KernelBench, out: Console) -> None:
    """A table for each shape, the read of memory above all of them."""
    if found.read_gb_per_s is not None:
        out.print(
            f"memory, read by {in_words(found.threads)} ({found.read_how}): {found.read_gb_per_s:.1f} GB/s at best"
        )
    columns = ("kernel", "tokens", "best", "median", "G MAC/s", "GB/s", "read GB/s", "ratio: best", "median")
    draw_by_shape(found.results, columns, weights_in_words, kernel_cells, out)
    if found.equal:
        out.print(f"\nAll {len(found.results)} equal the NumPy reference: int32 accumulators and float32 results.")


def weights_in_words(results: list[KernelResult]) -> str:
    return " or ".join(size_in_words(size) for size in sorted({result.weight_bytes for result in results}))


def kernel_cells(result: KernelResult) -> list[str]:
    name = " ".join(filter(None, (result.backend, result.kernel_set, result.layout)))
    timing, row = result.timing, [name, str(result.tokens)]
    if timing is None:
        return [*row, *differs(result.check.unequal_accumulators, result.check.unequal_floats)]
    row += [in_time(timing.best_s), in_time(timing.median_s), f"{result.g_multiply_adds_per_s:.1f}"]
    row += [f"{result.gb_per_s:.2f}", f"{result.read_gb_per_s:.1f}"]
    return [*row, f"{result.of_read:.2f}", f"{result.of_read_median:.2f}"]


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@click.command(short_help="The ternary kernels of a GPU, against a copy within its memory.")
@click.option("--shape", "shapes", type=WholeNumbers("NxK", "x", 2), multiple=True, help="[default: those of 2B-4T]")
@click.option("--tokens", type=WholeNumbers("M,M,...", ","), default="1,8,16,32,64,128,2048", show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=15, show_default=True)
@click.option("--device", type=click.IntRange(min=0), default=0, show_default=True, help="Number of the GPU.")
@click.option(
    "--cold-mb", type=click.IntRange(min=1), help="Weights to read in turn.  [default: 3 second-level caches]"
)
@common_options
def cuda(
    shapes: tuple[tuple[int, int], ...], tokens: tuple[int, ...], repeats: int, device: int, cold_mb: int | None
) -> None:
    """Time the ternary kernels of a GPU, each launch on weights that its caches do not hold.

    For one token, the target is a share of the speed of a plain copy: 60% at 13824x2560, 35% elsewhere.
    BITNET_REF_CUDA=emulated runs the same on the host: it shows that they are right, not how fast they are.
    """
    from ..backends.cuda import open_device
    from ..benchmark.cuda_kernels import SHAPES_2B_4T_FUSED, measure_cuda_kernels

    gpu = open_device(device)
    sizes = {} if cold_mb is None else {"cold_bytes": cold_mb << 20, "copy_bytes": cold_mb << 20}
    with LoadingBar("measuring") as bar:
        found = measure_cuda_kernels(gpu, shapes or SHAPES_2B_4T_FUSED, tokens, repeats=repeats, progress=bar, **sizes)
    gpu.close()
    report(found, lambda out: draw_cuda(found, out))


def draw_cuda(found: CudaKernelBench, out: Console) -> None:
    """A row for each kernel; the one that runs by itself is marked, and held to its target."""
    out.print(f"{found.device}: a copy moves {found.copy_gb_per_s:,.1f} GB/s (read and written, median)")
    if found.emulated:
        out.print("Emulated on the host: the times say nothing about a GPU.", style="yellow")
    columns = ("kernel", "tokens", "blocks", "best", "median", "GB/s", "of copy", "target", "TOP/s")
    draw_by_shape(found.results, columns, copies_in_words, lambda result: cuda_cells(found, result), out)
    out.print("\n* runs by itself at this shape and number of tokens")
    if found.equal:
        out.print(f"All {len(found.results)} equal the NumPy reference: int32 accumulators and float32 results.")


def copies_in_words(results: list[CudaKernelResult]) -> str:
    return f"{size_in_words(results[0].weight_bytes)}, {results[0].copies} copies"


def cuda_cells(found: CudaKernelBench, result: CudaKernelResult) -> list[str]:
    name = ("* " if result.chosen else "  ") + result.kernel.removeprefix("ternary_")
    name += ", overlapped" if result.overlapped else ""
    blocks = "x".join(str(size) for size in result.grid if size > 1) or "1"
    row = [name, str(result.tokens), f"{blocks} of {result.block}"]
    share, target = found.share(result), result.target_share
    if result.timing is None or share is None:
        return [*row, *differs(result.unequal_accumulators, result.unequal_floats)]
    row += [in_time(result.timing.best_s), in_time(result.timing.median_s), f"{result.gb_per_s:,.1f}"]
    verdict = "" if target is None or found.emulated else f"{target:.0%} {'met' if share >= target else 'missed'}"
    return [*row, f"{share:.1%}", verdict, f"{result.tera_operations_per_s:.2f}"]


# -- both --------------------------------------------------------------------------------------------------------------


def draw_by_shape(
    results: Sequence[Result],
    columns: tuple[str, ...],
    about: Callable[[list[Result]], str],
    cells: Callable[[Result], list[str]],
    out: Console,
) -> None:
    """A table for each shape, of its results in their order; `about`: what its title says beside the shape."""
    from rich.text import Text

    for (n_out, n_in), group in groupby(results, key=lambda result: (result.out_features, result.in_features)):
        of_shape = list(group)
        table = new_table(*columns)
        for result in of_shape:
            table.add_row(*cells(result))
        out.print(Text(f"\n{n_out} x {n_in}, {about(of_shape)}", style="bold"))
        out.print(table)


def differs(accumulators: int, floats: int) -> list[str]:
    """Cells of a row without speeds."""
    return ["DIFFERS", f"{accumulators} acc", f"{floats} floats"]
