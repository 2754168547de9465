"""`bitnet-ref bench serve`: the engine under load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .bench_shared import Subject, WholeNumbers, draw_table, in_threads, plot_option, report, subject_options
from .shell import AnyFunction, LoadingBar, common_options

if TYPE_CHECKING:
    from rich.console import Console

    from ..benchmark.serve import Quantiles, ServeBench


def token_range(ctx: click.Context, param: click.Parameter, numbers: tuple[int, ...]) -> tuple[int, int]:
    """(16, 64) of "16-64", (32, 32) of "32" """
    if len(numbers) > 2 or numbers[0] > numbers[-1]:
        raise click.BadParameter(f"expected a number of tokens or a range like 16-64, got {numbers}", ctx, param)
    return numbers[0], numbers[-1]


def range_option(name: str, default: str, help: str) -> Callable[[AnyFunction], AnyFunction]:
    kind = WholeNumbers("FROM-TO", "-")
    return click.option(name, type=kind, default=default, show_default=True, callback=token_range, help=help)


@click.command(short_help="Throughput and waiting times of the engine, for each offered load.")
@subject_options
@click.option("--requests", type=click.IntRange(min=1), default=100, show_default=True, help="At each rate.")
@click.option("--rate", "rates", type=float, multiple=True, help="Requests per second. May be repeated.  "
              "[default: shares of the capacity]")  # fmt: skip
@range_option("--prompt", "8-32", "Prompt tokens, drawn evenly.")
@range_option("--new", "16-64", "New tokens, drawn evenly.")
@click.option("--together", type=click.IntRange(min=1), default=64, show_default=True, help="Prompts at once, against "
              "one after another.")  # fmt: skip
@click.option("--max-batch", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--max-batch-tokens", type=click.IntRange(min=2), default=512, show_default=True)
@click.option("--max-queue", type=click.IntRange(min=1), default=1024, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@plot_option("Write a picture: .png, .svg or .pdf.")
@common_options
def serve(
    subject: Subject,
    requests: int,
    rates: tuple[float, ...],
    prompt: tuple[int, int],
    new: tuple[int, int],
    together: int,
    max_batch: int,
    max_batch_tokens: int,
    max_queue: int,
    seed: int,
    plot: Path | None,
) -> None:
    """Offer requests to the engine at several rates (Poisson arrivals), and time what comes of it.

    MODEL (default: storyteller), or a synthetic one. Some requests are first compared with what they give alone.
    """
    from ..benchmark.serve import Load, measure_serve, save_serve_plot
    from ..serving import EngineConfig

    config = EngineConfig(max_batch=max_batch, max_batch_tokens=max_batch_tokens, max_queue=max_queue)
    load = Load(requests, prompt, new, seed)
    loaded = subject.load()
    with LoadingBar("measuring") as bar:
        bench = measure_serve(loaded, load, config, rates_per_s=rates, prompts=together, progress=bar)
    if plot is not None and bench.points:
        save_serve_plot(bench, plot)
    name = f"{subject.name}, {subject.shortened} layers" if subject.shortened else subject.name
    report(bench, lambda out: draw_serve(bench, name, out), model=name)


def draw_serve(bench: ServeBench, name: str, out: Console) -> None:
    """Facts, then a row for each rate."""
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
    rows = [
        (
            *(f"{point.offered_per_s:.2f}", f"{point.requests_per_s:.2f}", f"{point.tokens_per_s:.1f}"),
            *(f"{point.mean_batch:.1f}", in_ms(point.first_token), in_ms(point.between_tokens)),
            f"{point.refused / point.requests:.0%}",
        )
        for point in bench.points
    ]
    columns = ("offered/s", "done/s", "tok/s", "batch", "first token", "between tokens", "refused")
    draw_table(out, columns, rows)


def in_ms(waits: Quantiles | None) -> str:
    return "" if waits is None else " ".join(f"{1e3 * wait:.1f}" for wait in vars(waits).values())
