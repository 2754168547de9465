"""`bitnet-ref bench gpu`: draws what `bitnet_ref.benchmark.gpu` measures, beside what is asked."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .bench_shared import new_table, report
from .shell import LoadingBar, common_options

if TYPE_CHECKING:
    from rich.console import Console

    from ..benchmark import GpuBench
    from ..benchmark.gpu_rows import Row

# The keys of `benchmark.gpu.PARTS`, which --help need not import
PARTS = ("kernels", "decode", "batches", "prefill", "7b", "dense", "precision", "cpu", "peers")


@click.command(short_help="All that is asked of a GPU, in one run: kernels, models, and their rivals.")
@click.option("--only", type=click.Choice(PARTS), multiple=True, help="A part. May be given again.  [default: all]")
@click.option("--layers", type=click.IntRange(min=1), help="Only so many layers of each model; no target is judged.")
@click.option("--new-tokens", type=click.IntRange(min=2), default=128, show_default=True, help="Decoded tokens.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Of which the best counts.")
@click.option("--device", type=click.IntRange(min=0), default=0, show_default=True, help="Number of the GPU.")
@click.option("--versus-python", metavar="PATH", help="The Python that has transformers.  [default: this one]")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the JSON here, after every "
              "measurement: what an interrupted run found stays.")  # fmt: skip
@common_options
def gpu(
    only: tuple[str, ...],
    layers: int | None,
    new_tokens: int,
    repeats: int,
    device: int,
    versus_python: str | None,
    out: Path | None,
) -> None:
    """Measure what is asked of an NVIDIA card: models of random weights, each first compared with the reference.

    What is a ratio (batches, precision, peers, cpu) also measures 2B-4T alone, which it is a ratio to. What cannot be
    measured says why, and the rest goes on. BITNET_REF_CUDA=emulated runs all of it on the host: with --layers 1
    and --new-tokens 2, and only to see that it runs.
    """
    from ..benchmark.gpu import Plan, measure_gpu

    def keep(found: GpuBench) -> None:
        if not sys.stderr.isatty():  # where no bar is drawn: whoever ends the run has seen what there was
            row = found.rows[-1]
            click.echo(f"{found.seconds:.0f} s  {row.ask.what}: {in_words(row)}", err=True)
        if out is not None:
            write(found.to_dict(), out)

    if out is not None and not out.parent.is_dir():  # said now, not after the first measurement
        raise click.UsageError(f"--out {out}: there is no folder {out.parent}")
    plan = Plan(layers=layers, new_tokens=new_tokens, repeats=repeats)
    python = versus_python or sys.executable
    with LoadingBar("measuring") as bar:
        found = measure_gpu(plan, only or PARTS, index=device, python=python, keep=keep, progress=bar)
    report(found, lambda console: draw_gpu(found, console))


def write(facts: dict[str, Any], path: Path) -> None:
    """The JSON in place of what the file held, whole or not at all."""
    from ..system.atomic import atomic_path

    try:
        with atomic_path(path) as temporary:
            temporary.write_text(json.dumps(facts, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise click.UsageError(f"--out {path}: {error.strerror or error}") from error


def draw_gpu(found: GpuBench, out: Console) -> None:
    """The card, a row for each thing that is asked, and what was compared."""
    out.print(f"{found.device}: a copy moves {found.copy_gb_per_s:,.1f} GB/s (read and written, median)")
    if found.emulated:
        out.print("Emulated on the host: the times say nothing about a GPU.", style="yellow")
    if found.plan.layers is not None:
        out.print(f"Models of at most {found.plan.layers} layers: no target is judged.", style="yellow")
    table = new_table("what", "asked", "found", "met")
    for column in table.columns:
        column.justify, column.no_wrap = "left", column.header != "found"
    for row in found.rows:
        table.add_row(row.ask.what, row.ask.words, in_words(row), verdict(found, row))
    out.print(table)
    for name, check in found.checks.items():
        if not check.equal:
            out.print(f"DIFFERS: {name}", style="bold red")
    if found.equal:
        out.print(f"{found.seconds:.0f} s. {len(found.checks)} comparisons with the NumPy reference: equal, or within "
                  "their tolerance. Repetitions gave the same tokens.")  # fmt: skip


def verdict(found: GpuBench, row: Row) -> str:
    if row.found is None:
        return "not measured"
    met = found.met(row)
    return "" if met is None else "yes" if met else "no"


def in_words(row: Row) -> str:
    """What was found, and what says more about it; or why nothing was."""
    if row.found is None:
        return row.why
    facts, digits = row.facts, sum(row.found < limit for limit in (10, 100))
    words = [f"{row.found:,.{digits}f} {row.ask.unit}"]
    if row.ask.unit == "x" and "tokens_per_s" in facts:
        words.append(f"{facts['tokens_per_s']:,.0f} tok/s")
    if "step_ms_median" in facts:
        words.append(f"{facts['step_ms_median']:.2f} ms a step")
    if "of_bound" in facts:
        words.append(f"{facts['of_bound']:.0%} of the bound")
    if "fewer_bytes" in facts:
        words.append(f"a step reads {facts['fewer_bytes']:.3f} x fewer bytes")
    if "held_gb" in facts:
        words.append(f"{facts['held_gb']:.2f} GB of the card held")
    if "peer" in facts:
        words.append(f"there {1e3 * facts['peer']['decode']['median_s']:.2f} ms, {facts['peer']['weights']}")
    if "cpu_tokens_per_s" in facts:
        words.append(f"CPU {facts['cpu_tokens_per_s']:.1f} tok/s on {facts['cpu_threads']} threads")
    if "gb_per_s" in facts:
        words.append(f"{facts['gb_per_s']:,.0f} GB/s, {facts['kernel'].removeprefix('ternary_')}")
    return ", ".join(words)
