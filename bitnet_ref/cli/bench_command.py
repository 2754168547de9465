"""`bitnet-ref bench`: the group of what measures, and its small commands: ceiling, tokenizer, cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..backends import NAMES
from .bench_kernels import cuda, gpu, kernels
from .bench_model import model
from .bench_serve import serve
from .bench_shared import draw_table, plot_option, report
from .generation_options import content_of
from .shell import LoadingBar, common_options

if TYPE_CHECKING:
    from rich.console import Console


@click.group(short_help="Measure speed and memory, beside what this machine can do.")
@common_options
def bench() -> None:
    """Measure speed and memory, beside what this machine can do.

    Everything is compared with the NumPy reference first: what differs gets no speed, and the exit code is 1. Times
    are the best of several, taken in turn with a plain read of memory, which is the ceiling.
    """


@click.command(short_help="What memory and the product instructions can do at most.")
@click.option("--threads", type=click.IntRange(min=1), help="Up to so many.  [default: all there are]")
@click.option("--repeats", type=click.IntRange(min=1), default=15, show_default=True)
@plot_option("Write a roofline: .png, .svg or .pdf.")
@common_options
def ceiling(threads: int | None, repeats: int, plot: Path | None) -> None:
    """Measure what bounds every kernel: a plain read of memory, and each instruction set's product on registers alone.

    On one thread and on more, all in turn, so that shares of these come from one run.
    """
    from ..backends.cpu.extension import why_unavailable
    from ..benchmark.ceiling import measure_ceiling, save_roofline

    result = measure_ceiling(threads, repeats=repeats)
    if plot is not None:
        save_roofline(result, plot)
    limits = [(f"memory, {r.how}", r.threads, r.timing, r.nbytes, "GB/s") for r in result.reads]
    limits += [
        (f"{p.kernel_set}: {p.instruction}", p.threads, p.timing, p.multiply_adds, "G MAC/s") for p in result.peaks
    ]

    def draw(out: Console) -> None:
        rows = [
            (name, str(n), f"{time.giga_per_s(each):.1f}", f"{time.giga_per_s(each, 'median_s'):.1f}", unit)
            for name, n, time, each, unit in limits
        ]
        draw_table(out, ("ceiling", "threads", "best", "median", ""), rows)
        for name, why in result.lacks.items():
            out.print(f"{name}: {why}", style="dim")
        if (no_extension := why_unavailable()) is not None:
            out.print(no_extension, style="yellow")

    report(result, draw)


@click.command(short_help="Encoding, decoding and streaming of the shipped tokenizer.")
@click.option("--texts", type=click.IntRange(min=1), default=256, show_default=True, help="How many texts.")
@click.option("--words", type=click.IntRange(min=1), default=60, show_default=True, help="Words in each.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Runs of each.")
@common_options
def tokenizer(texts: int, words: int, repeats: int) -> None:
    """Time the shipped tokenizer: tokens per second, one text at a time and batched."""
    from ..benchmark import measure_tokenizer

    result = measure_tokenizer(texts, words, repeats)

    def draw(out: Console) -> None:
        out.print(f"{result.texts} texts, {result.tokens} tokens; loaded in {result.load_s * 1e3:.0f} ms")
        for name, equal in result.checks.items():
            if not equal:
                out.print(f"DIFFERS: {name.replace('_', ' ')}", style="bold red")
        rows = [
            (name, f"{result.tokens_per_s(name):,.0f}", f"{result.tokens / timing.median_s:,.0f}")
            for name, timing in result.timings.items()
        ]
        if rows:
            draw_table(out, ("", "tokens/s best", "median"), rows)

    report(result, draw)


@click.command(short_help="What a float16 or int8 KV cache changes, and its bytes.")
@click.argument("model", default="storyteller")
@click.option("--text", help="A text, or @FILE.  [default: a short story]")
@click.option("--backend", type=click.Choice(("auto", *NAMES)), default="auto", show_default=True)
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: one a core]")
@common_options
def cache(model: str, text: str | None, backend: str, threads: int | None) -> None:
    """Measure each cache dtype on a text, against the float32 cache of the same MODEL (default: storyteller)."""
    from ..api import load
    from ..benchmark import measure_cache

    words = content_of(text)
    with LoadingBar("loading") as bar:
        subject = load(model, backend=backend, threads=threads, progress=bar)
    with LoadingBar("measuring"):
        result = measure_cache(subject, words)

    def draw(out: Console) -> None:
        out.print(f"{result.tokens} tokens, {result.backend}; next-token logits against those with the float32 cache")
        rows = [
            (
                *(error.dtype, f"{error.bytes_per_token:,}", f"{error.max_logit_error:.1e}"),
                *(f"{error.kl_mean:.1e}", f"{error.kl_max:.1e}", f"{error.greedy_agreement:.2%}"),
            )
            for error in result.errors
        ]
        columns = ("cache", "bytes/token", "max logit error", "mean KL", "max KL", "same greedy choice")
        draw_table(out, columns, rows)

    report(result, draw, model=model)


for command in (kernels, cuda, gpu, ceiling, model, serve, tokenizer, cache):
    bench.add_command(command)
