"""`bitnet-ref bench kernels`, `bench cuda`, `bench gpu`: the ternary product, and all that is asked of a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..backends import NAMES
from .bench_shared import WholeNumbers, draw_table, in_threads, in_time, machine_options, refuse_simd, report_bench
from .shell import LoadingBar, OutputFile, common_options, size_in_words

if TYPE_CHECKING:
    from rich.console import Console

    from ..benchmark.cuda_kernels import CudaKernelBench, CudaKernelResult
    from ..benchmark.gpu import GoalResult, GpuBench
    from ..benchmark.kernels import KernelBench, KernelResult

# The parts of `benchmark.gpu`, which --help need not import
PARTS = ("kernels", "decode", "batches", "prefill", "7b", "dense", "precision", "cpu", "peers")
# Facts of a row of `bench gpu`, by the name of the first one, in words
FACTS = {
    "tokens_per_s": "{tokens_per_s:,.0f} tok/s",
    "step_ms_median": "{step_ms_median:.2f} ms per step",
    "of_bound": "{of_bound:.0%} of the bound",
    "fewer_bytes": "a step reads {fewer_bytes:.3f} x fewer bytes",
    "held_gb": "{held_gb:.2f} GB of the card held",
    "peer": "there {peer[decode_tokens_per_s_median]:,.1f} tok/s, {peer[weights]}",
    "cpu_tokens_per_s": "CPU {cpu_tokens_per_s:.1f} tok/s on {cpu_threads} threads",
    "gb_per_s": "{gb_per_s:,.0f} GB/s, {kernel}",
}
EMULATED = "Emulated on the host: the times say nothing about a GPU."


shape_option = click.option(
    "--shape", "shapes", type=WholeNumbers("NxK", "x", 2), multiple=True, help="[default: those of 2B-4T]"
)
device_option = click.option(
    "--device", type=click.IntRange(min=0), default=0, show_default=True, help="Number of the GPU."
)


# -- on every backend --------------------------------------------------------------------------------------------------


@click.command(short_help="The ternary product, on every backend and kernel set.")
@shape_option
@click.option("--tokens", type=WholeNumbers("M,M,...", ","), default="1,4,16,64,512", show_default=True)
@click.option("--backend", type=click.Choice(("all", *NAMES)), default="all", show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=7, show_default=True)
@click.option("--methods", is_flag=True, help="Every method of each kernel set, not only its default.")
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

    Its weights come from memory, not from the cache: each call takes another copy.
    """
    from ..benchmark import candidates, measure_kernels
    from ..benchmark.kernels import SHAPES_2B_4T

    refuse_simd(simd, backend)
    backends = candidates(backend, threads, simd, methods)
    with LoadingBar("measuring") as bar:
        bench = measure_kernels(backends, shapes or SHAPES_2B_4T, tokens, repeats=repeats, progress=bar)
    report_bench(bench, lambda out: draw_kernels(bench, out))


def draw_kernels(bench: KernelBench, out: Console) -> None:
    if bench.read_gb_per_s is not None:
        reader = f"{in_threads(bench.threads)} ({bench.read_how})"
        out.print(f"memory, read by {reader}: {bench.read_gb_per_s:.1f} GB/s at best")

    def sizes(results: list[KernelResult]) -> str:
        return " or ".join(size_in_words(size) for size in sorted({result.weight_bytes for result in results}))

    def cells(result: KernelResult) -> list[str]:
        name = " ".join(filter(None, (result.backend, result.kernel_set, result.layout)))
        timing, row = result.timing, [name, str(result.tokens)]
        if timing is None:
            return [*row, *differs(result.check.unequal_accumulators, result.check.unequal_floats)]
        row += [in_time(timing.best_s), in_time(timing.median_s), f"{result.g_multiply_adds_per_s:.1f}"]
        row += [f"{result.gb_per_s:.2f}", f"{result.read_gb_per_s:.1f}"]
        return [*row, f"{result.of_read:.2f}", f"{result.of_read_median:.2f}"]

    columns = ("kernel", "tokens", "best", "median", "G MAC/s", "GB/s", "read GB/s", "ratio: best", "median")
    draw_by_shape(bench, columns, sizes, cells, out)


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@click.command(short_help="The ternary kernels of a GPU, against a copy within its memory.")
@shape_option
@click.option("--tokens", type=WholeNumbers("M,M,...", ","), default="1,8,16,32,64,128,2048", show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=15, show_default=True)
@device_option
@click.option("--cold-mb", type=click.IntRange(min=1), help="Weights to read in turn.  [default: 3 L2 caches]")
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

    draw_device(bench, out)
    columns = ("kernel", "tokens", "blocks", "best", "median", "GB/s", "of copy", "target", "TOP/s")
    draw_by_shape(bench, columns, copies, cells, out)
    out.print("* used by models at this shape and number of tokens")


@click.command(short_help="All that is asked of a GPU, in one run: kernels, models, and other engines.")
@click.option("--only", type=click.Choice(PARTS), multiple=True, help="A part. May be given again.  [default: all]")
@click.option("--layers", type=click.IntRange(min=1), help="Only so many layers of each model; no target is judged.")
@click.option("--new-tokens", type=click.IntRange(min=2), default=128, show_default=True, help="Decoded tokens.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="The best one counts.")
@device_option
@click.option("--versus-python", metavar="PATH", help="The Python that has transformers.  [default: this one]")
@click.option("--out", type=OutputFile(), help="Write the JSON here after every "
              "measurement, so that an interrupted run keeps its results.")  # fmt: skip
@common_options
def gpu(only: tuple[str, ...], device: int, versus_python: str | None, out: Path | None, **sizes: Any) -> None:
    """Measure what is asked of an NVIDIA card: models of random weights, each first compared with the reference.

    Parts that are ratios (batches, precision, peers, cpu) also measure 2B-4T alone. What cannot be measured says why,
    and the rest goes on. BITNET_REF_CUDA=emulated runs everything on the host: with --layers 1 and --new-tokens 2, only
    to see that it runs.
    """
    from ..benchmark.gpu import GpuPlan, measure_gpu
    from ..system.json_file import write_json

    def on_row(bench: GpuBench) -> None:
        if not sys.stderr.isatty():  # no progress bar is drawn there; an interrupted run has shown its results
            row = bench.rows[-1]
            click.echo(f"{bench.seconds:.0f} s  {row.goal.what}: {describe_row(row)}", err=True)
        if out is not None:
            write_json(out, bench.to_dict())

    plan, python = GpuPlan(**sizes), versus_python or sys.executable
    with LoadingBar("measuring") as bar:
        bench = measure_gpu(plan, only or PARTS, index=device, python=python, on_row=on_row, progress=bar)
    report_bench(bench, lambda console: draw_gpu(bench, console))


def draw_gpu(bench: GpuBench, out: Console) -> None:
    draw_device(bench, out)
    if bench.plan.layers is not None:
        out.print(f"Models of at most {bench.plan.layers} layers: no target is judged.", style="yellow")
    rows = [(row.goal.what, row.goal.words, describe_row(row), verdict_of(bench, row)) for row in bench.rows]
    draw_table(out, ("what", "target", "measured", "met"), rows, left=4)
    for name, check in bench.checks.items():
        if not check.equal:
            out.print(f"DIFFERS: {name}", style="bold red")
    if bench.equal:
        out.print(f"{bench.seconds:.0f} s. {len(bench.checks)} comparisons with the NumPy reference: equal, or within "
                  "their tolerance. Repetitions gave the same tokens.")  # fmt: skip


def verdict_of(bench: GpuBench, row: GoalResult) -> str:
    return "not measured" if row.value is None else {None: "", True: "yes", False: "no"}[bench.met(row)]


def describe_row(row: GoalResult) -> str:
    """The value with the facts that explain it, or why there is none."""
    if row.value is None:
        return row.why
    digits = sum(row.value < limit for limit in (10, 100))
    known = "tokens_per_s" if row.goal.unit == "tok/s" else ""  # the value itself
    words = [text.format(**row.facts) for name, text in FACTS.items() if name in row.facts and name != known]
    return ", ".join([f"{row.value:,.{digits}f} {row.goal.unit}", *words])


# -- shared ------------------------------------------------------------------------------------------------------------


def draw_device(bench: CudaKernelBench | GpuBench, out: Console) -> None:
    out.print(f"{bench.device}: a copy moves {bench.copy_gb_per_s:,.1f} GB/s (read and written, median)")
    if bench.emulated:
        out.print(EMULATED, style="yellow")


def draw_by_shape(
    bench: KernelBench | CudaKernelBench,
    columns: tuple[str, ...],
    describe: Callable[[list[Any]], str],
    cells: Callable[[Any], list[str]],
    out: Console,
) -> None:
    """A table for each shape, with its results in their order. describe: what its title says beside the shape."""
    for (n_out, n_in), group in groupby(bench.results, key=lambda result: (result.out_features, result.in_features)):
        of_shape = list(group)
        out.print(f"\n{n_out} x {n_in}, {describe(of_shape)}", style="bold")
        draw_table(out, columns, [cells(result) for result in of_shape])
    if bench.equal:
        out.print(f"\nAll {len(bench.results)} equal the NumPy reference: int32 accumulators and float32 results.")


def differs(accumulators: int, floats: int) -> list[str]:
    return ["DIFFERS", f"{accumulators} acc", f"{floats} floats"]
