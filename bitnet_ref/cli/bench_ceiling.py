"""`bitnet-ref bench ceiling`: draws what `bitnet_ref.benchmark.ceiling` measures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .bench_shared import new_table, plot_option
from .shell import common_options, print_json, show, wants_json

if TYPE_CHECKING:
    from rich.console import Console

    from ..benchmark import Ceiling


@click.command(short_help="What memory and the product instructions can do at most.")
@click.option("--threads", type=click.IntRange(min=1), help="Up to so many.  [default: all there are]")
@click.option("--repeats", type=click.IntRange(min=1), default=15, show_default=True)
@plot_option("Write a roofline: .png, .svg or .pdf.")
@common_options
def ceiling(threads: int | None, repeats: int, plot: Path | None) -> None:
    """Measure what bounds every kernel: a plain read of memory, and each instruction set's product on registers alone.

    On one thread and on more, all in turn, so that shares of these come from one run.
    """
    from ..backends.cpu.backend import why_unavailable
    from ..benchmark.ceiling import measure_ceiling, save_roofline

    found = measure_ceiling(threads, repeats=repeats)
    if plot is not None:
        save_roofline(found, plot)
    if wants_json():
        print_json(found.to_dict())
    else:
        show(lambda out: draw_ceiling(found, out, why_unavailable()))


def draw_ceiling(found: Ceiling, out: Console, no_extension: str | None) -> None:
    table = new_table("ceiling", "threads", "best", "median", "")
    for read in found.reads:
        median = read.timing.giga_per_s_median(read.nbytes)
        table.add_row(f"memory, {read.how}", str(read.threads), f"{read.gb_per_s:.1f}", f"{median:.1f}", "GB/s")
    for peak in found.peaks:
        median = peak.timing.giga_per_s_median(peak.multiply_adds)
        name, best = f"{peak.kernel_set}: {peak.instruction}", f"{peak.g_multiply_adds_per_s:.1f}"
        table.add_row(name, str(peak.threads), best, f"{median:.1f}", "G MAC/s")
    out.print(table)
    for name, why in found.lacks.items():
        out.print(f"{name}: {why}", style="dim")
    if no_extension is not None:
        out.print(no_extension, style="yellow")
