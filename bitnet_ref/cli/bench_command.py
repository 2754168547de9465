"""`bitnet-ref bench`: the group of what measures, and its commands kernels, serve and cache."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ..backends import NAMES
from ..errors import count_of
from .bench_model import model
from .bench_shared import (
    Subject,
    WholeNumbers,
    describe_conditions,
    differs,
    draw_by_shape,
    draw_table,
    in_time,
    load_options,
    machine_options,
    refuse_simd,
    report_bench,
    shape_option,
    split_load,
    subject_options,
)
from .generation_options import content_of
from .shell import LoadingBar, common_options, report, size_in_words

if TYPE_CHECKING:
    from rich.console import Console

    from ..benchmark.kernels import KernelBench, KernelResult
    from ..benchmark.serve import Quantiles, ServeBench


@click.group(short_help="Measure speed and memory, beside what this machine can do.")
@common_options
def bench() -> None:
    """Measure speed and memory, beside what this machine can do.

    Everything is compared with the NumPy reference first: what differs gets no speed, and the exit code is 1. Times
    are the best of several, taken in turn with a plain read of memory, which is the ceiling. On a machine that others
    use too, compare processor times: they scatter less than wall times.
    """


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

    Its weights come from memory, not from the cache: each call takes another copy. "of read" is their bytes per second
    over those of a plain read of memory.
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
        reader = f"{count_of(bench.threads, 'thread')} ({bench.read_how})"
        out.print(f"memory, read by {reader}: {bench.read_gb_per_s:.1f} GB/s at best")
    has_energy = any(result.joules_per_token is not None for result in bench.results)

    def sizes(results: list[KernelResult]) -> str:
        return " or ".join(size_in_words(size) for size in sorted({result.weight_bytes for result in results}))

    def cells(result: KernelResult) -> list[str]:
        name = " ".join(filter(None, (result.kernel_set or result.backend, result.layout)))
        timing, row = result.timing, [name, str(result.tokens)]
        if timing is None or timing.processor_s is None:
            return [*row, *differs(result.check.unequal_accumulators, result.check.unequal_floats)]
        row += [in_time(timing.best_s), in_time(timing.median_s), in_time(timing.processor_s)]
        if has_energy:
            row.append(f"{1e3 * (result.joules_per_token or 0):.2f}")
        return [*row, f"{result.g_multiply_adds_per_s:.1f}", f"{result.gb_per_s:.2f}", f"{result.of_read:.2f}"]

    energy = ("mJ/token",) if has_energy else ()
    columns = ("kernel", "tokens", "best", "median", "processor", *energy, "G MAC/s", "GB/s", "of read")
    draw_by_shape(bench.results, columns, sizes, cells, out)
    if bench.equal:
        out.print(f"\nAll {len(bench.results)} equal the NumPy reference: int32 accumulators and float32 results.")
    describe_conditions(bench.conditions, out)


@click.command(short_help="Throughput and waiting times of the engine, for each offered load.")
@subject_options
@load_options
@common_options
def serve(subject: Subject, rates: tuple[float, ...], **options: Any) -> None:
    """Offer requests to the engine at several rates (Poisson arrivals), and time what comes of it.

    MODEL (default: storyteller), or a synthetic one. Some requests are first compared with what they give alone.
    """
    from ..benchmark import measure_serve

    load, config = split_load(options)
    loaded = subject.load()
    with LoadingBar("measuring") as bar:
        bench = measure_serve(loaded, load, config, rates_per_s=rates, progress=bar)
    report_bench(bench, lambda out: draw_serve(bench, subject, out), model=subject.title)


def draw_serve(bench: ServeBench, subject: Subject, out: Console) -> None:
    threads = count_of(bench.threads, "thread")
    out.print(f"{subject.title}; {bench.backend}, {threads}; at most {bench.config.max_batch} sequences per step")
    if not bench.equal:
        out.print("DIFFERS: a request gave something else among others than alone", style="bold red")
        return
    out.print(f"{bench.checked} requests among others give what they give alone: tokens, text and log probabilities")
    out.print(f"capacity {bench.capacity_per_s:.2f} requests/s, all {bench.load.requests} at once")
    has_energy = any(point.joules_per_token is not None for point in bench.points)

    def in_ms(waits: Quantiles | None) -> str:
        return f"{1e3 * waits.p50_s:.1f} {1e3 * waits.p99_s:.1f}" if waits else ""

    rows = []
    for point in bench.points:
        row = [f"{point.offered_per_s:.2f}", f"{point.tokens_per_s:.1f}"]
        row.append(f"{1e3 * (point.processor_s_per_token or 0):.2f}")
        if has_energy:
            row.append(f"{point.joules_per_token or 0:.3f}")
        row += [f"{point.mean_batch:.1f}", in_ms(point.first_token), in_ms(point.between_tokens)]
        rows.append([*row, f"{point.refused / point.requests:.0%}"])
    energy = ("J/token",) if has_energy else ()
    columns = ("offered/s", "tok/s", "CPU ms/tok", *energy, "batch", "first token", "between", "refused")
    draw_table(out, columns, rows, left=0)
    out.print("first token, and between tokens: p50 and p99 of the waits in ms", style="dim")
    describe_conditions(bench.conditions, out)


@click.command(short_help="What a float16 or int8 KV cache changes, and its bytes.")
@click.argument("model", default="storyteller")
@click.option("--text", help="A text, or @FILE.  [default: a short story]")
@click.option("--backend", type=click.Choice(("auto", *NAMES)), default="auto", show_default=True)
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: one a core]")
@common_options
def cache(model: str, text: str | None, backend: str, threads: int | None) -> None:
    """Measure each cache dtype on a text, against the float32 cache of the same MODEL (default: storyteller)."""
    from ..api import load
    from ..crossval.precision import measure_cache

    words = content_of(text)
    with LoadingBar("loading") as bar:
        subject = load(model, backend=backend, threads=threads, progress=bar)
    with LoadingBar("measuring"):
        result = measure_cache(subject, words)

    def draw(out: Console) -> None:
        out.print(f"{result.tokens} tokens, {result.backend}; next-token logits against those with the float32 cache")
        cells = "{dtype}|{bytes_per_token:,}|{max_logit_error:.1e}|{kl_mean:.1e}|{kl_max:.1e}|{greedy_agreement:.2%}"
        rows = [cells.format(**vars(error)).split("|") for error in result.errors]
        columns = ("cache", "bytes/token", "max logit error", "mean KL", "max KL", "same greedy choice")
        draw_table(out, columns, rows)

    report({"model": model, **asdict(result)}, draw)


for command in (kernels, model, serve, cache):
    bench.add_command(command)
