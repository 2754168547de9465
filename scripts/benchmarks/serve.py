"""`bitnet-ref bench serve`, with a picture, and prompts together compared with one after another.

    python scripts/benchmarks/serve.py --plot load.png

The comparison is taken in turn in the same run, on the load's mean lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from commands import Script, plot_option, start

from bitnet_ref.benchmark.serve import Load, ServeBench, measure_serve
from bitnet_ref.benchmark.timing import Record, Stopwatch
from bitnet_ref.cli.bench_command import draw_serve
from bitnet_ref.cli.bench_shared import Subject, load_options, report_bench, split_load, subject_options
from bitnet_ref.cli.shell import LoadingBar, common_options
from bitnet_ref.notebook.figures import new_figure, save_figure
from bitnet_ref.serving import Engine, EngineConfig

if TYPE_CHECKING:
    from rich.console import Console

    from bitnet_ref.api import Model

ONE_BY_ONE = 8  # prompts that are timed alone
ROUNDS = 3


@dataclass(frozen=True)
class Together(Record):
    """Prompts through the engine at the same time, compared with one after another, in turn in the same run."""

    prompts: int
    new_tokens: int  # of each
    alone_tokens_per_s: float  # medians of the rounds
    together_tokens_per_s: float
    ratios: tuple[float, ...]  # of each round

    @property
    def ratio(self) -> float:
        return median(self.ratios)


def measure_together(model: Model, config: EngineConfig, prompts: int, load: Load) -> Together:
    """Prompts of the load's mean lengths. Only some are timed alone, since their speed is the same for all."""
    length, new = sum(load.prompt) // 2, sum(load.new) // 2
    rng = np.random.default_rng([load.seed, 2])
    texts = rng.integers(min(3, model.config.vocab_size - 1), model.config.vocab_size, (prompts, length)).tolist()
    few = texts[:ONE_BY_ONE]
    params: dict[str, Any] = {"max_tokens": new, "ignore_eos": True}
    batch, batch_tokens = max(config.max_batch, prompts), max(config.max_batch_tokens, 2 * prompts)
    room = replace(config, max_batch=batch, max_batch_tokens=batch_tokens, prefix_sharing=False)
    alone, together = [], []
    stopwatch = Stopwatch()
    with Engine(model, room) as engine:
        for _ in range(ROUNDS):
            taken = stopwatch.repeat(lambda: [model.generate(prompt, **params) for prompt in few])
            alone.append(len(few) * new / taken.wall_s)
            taken = stopwatch.repeat(lambda: engine.generate(texts, **params))
            together.append(prompts * new / taken.wall_s)
    ratios = tuple(many / one for many, one in zip(together, alone, strict=True))
    return Together(prompts, new, median(alone), median(together), ratios)


def save_serve_plot(bench: ServeBench, path: Path) -> None:
    """Plot tokens per second and waiting times over the offered load, in the format of the file's ending.

    Raises BackendUnavailable without matplotlib.
    """
    figure, ((throughput, *waiting),) = new_figure(1, 3, size=(11, 3.6))
    points = sorted(bench.points, key=lambda point: point.offered_per_s)
    offered = [point.offered_per_s for point in points]
    throughput.plot(offered, [point.tokens_per_s for point in points], "o-")
    throughput.set(title="throughput", ylabel="tokens/s", ylim=(0, None))
    panels = ("time to first token", "first_token"), ("time between tokens", "between_tokens")
    for axis, (title, field) in zip(waiting, panels, strict=True):
        for name in ("p50_s", "p95_s", "p99_s"):
            waits = [getattr(getattr(point, field), name, float("nan")) for point in points]  # NaN: all were refused
            axis.plot(offered, [1e3 * wait for wait in waits], "o-", label=name.removesuffix("_s"))
        axis.set(title=title, ylabel="ms", yscale="log")
        axis.legend()
    for axis in (throughput, *waiting):
        axis.set_xlabel("requests offered per second")
        if bench.capacity_per_s is not None:
            axis.axvline(bench.capacity_per_s, color="grey", linestyle=":")
    save_figure(figure, path)


@click.command(cls=Script)
@subject_options
@load_options
@click.option(
    "--together",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Prompts at once, against one after another.",
)
@plot_option("Write a picture: .png, .svg or .pdf.")
@common_options
def main(subject: Subject, rates: tuple[float, ...], together: int, plot: Path | None, **options: Any) -> None:
    """Offer requests to the engine at several rates (Poisson arrivals), and time what comes of it.

    MODEL (default: storyteller), or a synthetic one. Some requests are first compared with what they give alone.
    """
    load, config = split_load(options)
    loaded = subject.load()
    with LoadingBar("measuring") as bar:
        bench = measure_serve(loaded, load, config, rates_per_s=rates, progress=bar)
        both = measure_together(loaded, config, together, load) if bench.equal else None
    if plot is not None and bench.points:
        save_serve_plot(bench, plot)

    def draw(out: Console) -> None:
        draw_serve(bench, subject, out)
        if both is not None:
            draw_together(both, out)

    report_bench(bench, draw, model=subject.title, together=None if both is None else both.to_dict())


def draw_together(both: Together, out: Console) -> None:
    rounds = ", ".join(f"{ratio:.2f}" for ratio in both.ratios)
    out.print(
        f"{both.prompts} prompts together {both.together_tokens_per_s:.1f} tok/s, one after another "
        f"{both.alone_tokens_per_s:.1f}: {both.ratio:.2f} x (rounds: {rounds})"
    )


if __name__ == "__main__":
    start(main)
