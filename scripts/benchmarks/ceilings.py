"""What this machine can do at most: bytes read per second, and multiply-adds per second of each instruction set.

    python scripts/benchmarks/ceilings.py --plot roof.svg

A kernel's share of its ceiling means something only if both come from the same run: `measure_ceiling` measures
everything in turn, on one thread and on more. `Ceiling.roof` is the roofline: at `intensity` multiply-adds per byte
read, a kernel reaches at most min(peak, intensity * read).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from commands import Script, plot_option, start

from bitnet_ref.backends.cpu import extension
from bitnet_ref.benchmark.limits import INSTRUCTIONS, PEAK_ROUNDS, MemoryReader
from bitnet_ref.benchmark.timing import Action, Record, Timing, take_turns
from bitnet_ref.cli.bench_shared import draw_table, report_bench
from bitnet_ref.cli.shell import common_options
from bitnet_ref.errors import ShapeError
from bitnet_ref.notebook.figures import SERIES, new_figure, save_figure
from bitnet_ref.system.threads import resolve_threads

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console

REPEATS = 15  # of some 10 ms each, so that on a busy machine at least one is undisturbed


@dataclass(frozen=True)
class Peak(Record):
    """The rate of one instruction set's product instruction, with nothing to load or store."""

    kernel_set: str
    instruction: str
    threads: int
    multiply_adds: int  # per call
    timing: Timing

    @property
    def g_multiply_adds_per_s(self) -> float:
        return self.timing.giga_per_s(self.multiply_adds)


@dataclass(frozen=True)
class MemoryRead(Record):
    """A plain read of memory."""

    threads: int
    how: str  # see `MemoryReader`
    nbytes: int  # per call
    timing: Timing

    @property
    def gb_per_s(self) -> float:
        return self.timing.giga_per_s(self.nbytes)


@dataclass(frozen=True)
class Ceiling(Record):
    """All limits from one run. `lacks`: the kernel sets that were not measured, and why."""

    reads: list[MemoryRead]
    peaks: list[Peak]
    lacks: dict[str, str]

    def read_gb_per_s(self, threads: int) -> float:
        """Raises KeyError for a number of threads that was not measured."""
        return {read.threads: read.gb_per_s for read in self.reads}[threads]

    def peak(self, kernel_set: str, threads: int) -> float:
        """G multiply-adds per second. Raises KeyError if it was not measured."""
        return {(p.kernel_set, p.threads): p.g_multiply_adds_per_s for p in self.peaks}[kernel_set, threads]

    def roof(self, kernel_set: str, threads: int, intensity: float) -> float:
        """The maximum of G multiply-adds per second, at `intensity` multiply-adds per byte read from memory.

        One token against 2-bit weights does 4 per byte, M tokens 4 M.
        """
        return min(self.peak(kernel_set, threads), intensity * self.read_gb_per_s(threads))

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values; each timing's values stand beside what was timed."""
        facts = super().to_dict()
        for row in (*facts["reads"], *facts["peaks"]):
            row.update(row.pop("timing"))
        return facts


def measure_ceiling(
    threads: int | None = None, *, repeats: int = REPEATS, nbytes: int | None = None, rounds: int = PEAK_ROUNDS
) -> Ceiling:
    """Memory reads and every kernel set's peak, in turn, on 1 thread and doubling up to `threads` (default: all).

    nbytes: of the buffer that is read; by default more than the caches hold. Raises ShapeError for sizes below 1.
    """
    if repeats < 1 or rounds < 1 or (nbytes is not None and nbytes < 1):
        got = f"repeats {repeats}, nbytes {nbytes}, rounds {rounds}"
        raise ShapeError("measure_ceiling", expected="sizes of at least 1", got=got)
    threads = resolve_threads(threads)
    counts = sorted({threads, *(1 << power for power in range(threads.bit_length()))})
    readers = {count: MemoryReader(count, nbytes if count == threads else 8) for count in counts}
    for reader in readers.values():  # all read the same memory
        reader.words = readers[threads].words
    actions: dict[str, Action] = {f"read {count}": reader.read for count, reader in readers.items()}
    multiply_adds: dict[tuple[str, int], int] = {}
    lacks: dict[str, str] = {}
    for number, (name, why) in enumerate(extension.simd_variants().items()):
        if why is not None or name not in INSTRUCTIONS:
            lacks[name] = why or "has no measured peak: the compiler chooses its instructions"
            continue
        for count in counts:
            call = partial(extension._cpu.peak_multiply_adds, number, rounds, count)
            multiply_adds[name, count] = call()
            actions[f"{name} {count}"] = call
    timings = take_turns(actions, repeats)
    reads = [MemoryRead(n, reader.how, reader.nbytes, timings[f"read {n}"]) for n, reader in readers.items()]
    peaks = [
        Peak(name, INSTRUCTIONS[name], count, per_call, timings[f"{name} {count}"])
        for (name, count), per_call in multiply_adds.items()
    ]
    return Ceiling(reads, peaks, lacks)


def draw_roofline(axes: Axes, ceiling: Ceiling, threads: int, points: Iterable[tuple[str, float, float]] = ()) -> None:
    """The roof of each kernel set on that many threads, and points in its colour, with a marker for each method.

    points: ("avx2 2-bit", multiply-adds per byte, G multiply-adds per second).
    """
    peaks = [peak for peak in ceiling.peaks if peak.threads == threads]
    colours = dict(zip([*INSTRUCTIONS, "scalar"], SERIES, strict=False))
    for peak in peaks:
        ridge = peak.g_multiply_adds_per_s / ceiling.read_gb_per_s(threads)
        intensities = [0.5, ridge, 4096.0]
        heights = [ceiling.roof(peak.kernel_set, threads, i) for i in intensities]
        label = f"{peak.kernel_set}: {peak.g_multiply_adds_per_s:.0f} G/s"
        axes.plot(intensities, heights, color=colours[peak.kernel_set], label=label)
    series: dict[str, list[tuple[float, float]]] = {}
    for name, intensity, speed in points:
        series.setdefault(name, []).append((intensity, speed))
    methods = dict.fromkeys(name.partition(" ")[2] for name in series)
    markers = dict(zip(methods, "os^Dv", strict=False))
    for name, values in series.items():
        kernel_set, _, method = name.partition(" ")
        style: Any = {"color": colours.get(kernel_set), "marker": markers.get(method, "o"), "label": name}
        axes.plot(*zip(*values, strict=True), ls=":", markersize=5, **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    title = f"{threads} thread{'s' if threads > 1 else ''}, memory {ceiling.read_gb_per_s(threads):.1f} GB/s"
    axes.set(title=title, xlabel="multiply-adds per byte read from memory", ylabel="G multiply-adds per second")
    axes.grid(True, which="major", alpha=0.3)
    if peaks:
        axes.legend(fontsize=8)


def save_roofline(ceiling: Ceiling, path: Path) -> None:
    """Write the roofline at the largest number of threads, in the format of the file's ending.

    Raises BackendUnavailable without matplotlib.
    """
    figure, axes = new_figure(size=(6.4, 4.4))
    draw_roofline(axes[0, 0], ceiling, ceiling.reads[-1].threads)
    save_figure(figure, path)


@click.command(cls=Script)
@click.option("--threads", type=click.IntRange(min=1), help="Up to so many.  [default: all there are]")
@click.option("--repeats", type=click.IntRange(min=1), default=REPEATS, show_default=True)
@plot_option("Write a roofline: .png, .svg or .pdf.")
@common_options
def main(threads: int | None, repeats: int, plot: Path | None) -> None:
    """Measure what bounds every kernel: a plain read of memory, and each instruction set's product on registers alone.

    On one thread and on more, all in turn, so that shares of these come from one run.
    """
    result = measure_ceiling(threads, repeats=repeats)
    if plot is not None:
        save_roofline(result, plot)
    report_bench(result, lambda out: draw_ceiling(result, out))


def draw_ceiling(result: Ceiling, out: Console) -> None:
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
    if (no_extension := extension.why_unavailable()) is not None:
        out.print(no_extension, style="yellow")


if __name__ == "__main__":
    start(main)
