"""`bitnet-ref bench`: the group of what measures, and its commands ceiling, serve, tokenizer, cache and report."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..backends import NAMES
from .bench_kernels import cuda, gpu, kernels
from .bench_model import model, versus_options
from .bench_shared import Subject, WholeNumbers, draw_table, in_threads, plot_option, report_bench, subject_options
from .generation_options import content_of
from .shell import LoadingBar, common_options

if TYPE_CHECKING:
    from rich.console import Console

    from ..benchmark.ceiling import MemoryRead, Peak
    from ..benchmark.serve import ServeBench


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

    def draw(out: Console) -> None:
        limits: list[tuple[str, MemoryRead | Peak, int, str]]
        limits = [(f"memory, {r.how}", r, r.nbytes, "GB/s") for r in result.reads]
        limits += [(f"{p.kernel_set}: {p.instruction}", p, p.multiply_adds, "G MAC/s") for p in result.peaks]
        rows = []
        for name, limit, amount, unit in limits:
            speeds = [f"{limit.timing.giga_per_s(amount, statistic):.1f}" for statistic in ("best_s", "median_s")]
            rows.append((name, str(limit.threads), *speeds, unit))
        draw_table(out, ("ceiling", "threads", "best", "median", ""), rows)
        for name, why in result.lacks.items():
            out.print(f"{name}: {why}", style="dim")
        if (no_extension := why_unavailable()) is not None:
            out.print(no_extension, style="yellow")

    report_bench(result, draw)


def token_range(ctx: click.Context, param: click.Parameter, numbers: tuple[int, ...]) -> tuple[int, int]:
    """(16, 64) of "16-64", (32, 32) of "32" """
    if len(numbers) > 2 or numbers[0] > numbers[-1]:
        raise click.BadParameter(f"expected a number of tokens or a range like 16-64, got {numbers}", ctx, param)
    return numbers[0], numbers[-1]


range_option = partial(click.option, type=WholeNumbers("FROM-TO", "-"), callback=token_range, show_default=True)


@click.command(short_help="Throughput and waiting times of the engine, for each offered load.")
@subject_options
@click.option("--requests", type=click.IntRange(min=1), default=100, show_default=True, help="At each rate.")
@click.option("--rate", "rates", type=float, multiple=True, help="Requests per second. May be repeated.  "
              "[default: shares of the capacity]")  # fmt: skip
@range_option("--prompt", default="8-32", help="Prompt tokens, drawn evenly.")
@range_option("--new", default="16-64", help="New tokens, drawn evenly.")
@click.option("--together", type=click.IntRange(min=1), default=64, show_default=True, help="Prompts at once, against "
              "one after another.")  # fmt: skip
@click.option("--max-batch", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--max-batch-tokens", type=click.IntRange(min=2), default=512, show_default=True)
@click.option("--max-queue", type=click.IntRange(min=1), default=1024, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@plot_option("Write a picture: .png, .svg or .pdf.")
@common_options
def serve(subject: Subject, rates: tuple[float, ...], together: int, plot: Path | None, **options: Any) -> None:
    """Offer requests to the engine at several rates (Poisson arrivals), and time what comes of it.

    MODEL (default: storyteller), or a synthetic one. Some requests are first compared with what they give alone.
    """
    from ..benchmark.serve import Load, measure_serve, save_serve_plot
    from ..serving import EngineConfig

    load = Load(**{field.name: options.pop(field.name) for field in fields(Load)})
    config = EngineConfig(**options)
    loaded = subject.load()
    with LoadingBar("measuring") as bar:
        bench = measure_serve(loaded, load, config, rates_per_s=rates, prompts=together, progress=bar)
    if plot is not None and bench.points:
        save_serve_plot(bench, plot)
    name = f"{subject.name}, {subject.shortened} layers" if subject.shortened else subject.name
    report_bench(bench, lambda out: draw_serve(bench, name, out), model=name)


def draw_serve(bench: ServeBench, name: str, out: Console) -> None:
    threads = in_threads(bench.threads)
    out.print(f"{name}; {bench.backend}, {threads}; at most {bench.config.max_batch} sequences per step")
    if bench.together is None:
        out.print("DIFFERS: a request gave something else among others than alone", style="bold red")
        return
    out.print(f"{bench.checked} requests among others give what they give alone: tokens, text and log probabilities")
    both, rounds = bench.together, ", ".join(f"{ratio:.2f}" for ratio in bench.together.ratios)
    out.print(
        f"{both.prompts} prompts together {both.together_tokens_per_s:.1f} tok/s, one after another "
        f"{both.alone_tokens_per_s:.1f}: {both.ratio:.2f} x (rounds: {rounds})"
    )
    out.print(f"capacity {bench.capacity_per_s:.2f} requests/s, all {bench.load.requests} at once")
    out.print("waits in ms: p50 p95 p99", style="dim")
    rows = []
    for point in bench.points:
        speeds = (f"{point.offered_per_s:.2f}", f"{point.requests_per_s:.2f}", f"{point.tokens_per_s:.1f}")
        waits = [
            " ".join(f"{1e3 * wait:.1f}" for wait in vars(quantiles).values()) if quantiles else ""
            for quantiles in (point.first_token, point.between_tokens)
        ]
        rows.append((*speeds, f"{point.mean_batch:.1f}", *waits, f"{point.refused / point.requests:.0%}"))
    columns = ("offered/s", "done/s", "tok/s", "batch", "first token", "between tokens", "refused")
    draw_table(out, columns, rows)


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

    report_bench(result, draw)


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
        cells = "{dtype}|{bytes_per_token:,}|{max_logit_error:.1e}|{kl_mean:.1e}|{kl_max:.1e}|{greedy_agreement:.2%}"
        rows = [cells.format(**vars(error)).split("|") for error in result.errors]
        columns = ("cache", "bytes/token", "max logit error", "mean KL", "max KL", "same greedy choice")
        draw_table(out, columns, rows)

    report_bench(result, draw, model=model)


@click.command(short_help="All that docs/speed.md says, in one run, with a page of bars.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="The folder to write.")
@click.option("--only", metavar="WORDS", multiple=True, help="Models whose title has these words. May be repeated.")
@click.option("--layers", type=click.IntRange(min=1), help="Only so many layers of the synthetic models.")
@versus_options
@common_options
def report(
    out: Path, only: tuple[str, ...], layers: int | None, versus: tuple[str, ...], versus_python: str | None
) -> None:
    """Measure the shipped model and synthetic ones, each in a process of its own, in some ten minutes.

    OUT/report.html has the speeds as bars beside their bounds, OUT/report.json all figures. Both are written anew after
    each model. --versus measures other engines on the shapes of 2B-4T and TinyLlama.
    """
    from ..benchmark.report import SUBJECTS, describe_run, measure_report, write_page
    from ..system.atomic import atomic_path, explain_os_errors
    from ..system.json_file import write_json

    titles = [title for title in SUBJECTS if not only or any(words.lower() in title.lower() for words in only)]
    if not titles:
        raise click.UsageError(f"--only {', '.join(only)}: expected words of {'; '.join(SUBJECTS)}")
    with explain_os_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    page, figures = out / "report.html", out / "report.json"
    with LoadingBar("measuring") as bar:
        for result in measure_report(titles, layers=layers, versus=versus, python=versus_python, progress=bar):
            write_json(figures, result.to_dict())
            with atomic_path(page) as path:
                path.write_text(write_page(result), encoding="utf-8")

    def draw(console: Console) -> None:
        draw_table(console, ("", ""), [(run.title, describe_run(run)) for run in result.runs], left=2, header=False)
        console.print(f"{page}, {figures}")

    report_bench(result, draw)


for command in (kernels, cuda, gpu, ceiling, model, serve, tokenizer, cache, report):
    bench.add_command(command)
