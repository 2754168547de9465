"""What this machine can do at most: bytes read a second, and multiply-adds a second by each instruction set.

A kernel's share of its ceiling means something only if both come from the same run: `measure_ceiling` takes everything
in turn, on one thread and on more. `Ceiling.roof` is then the roofline: at `intensity` multiply-adds for a byte read, a
kernel can do no more than min(peak, intensity * read).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..backends import Backend
from ..backends.cpu import backend as cython_backend
from ..errors import ShapeError
from ..notebook.figures.style import new_figure
from ..system.threads import resolve_threads
from .bandwidth import MemoryReader
from .timing import Action, Timing, take_turns

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PEAK_ROUNDS = 1 << 18  # of a dozen instructions: about 1 ms
REPEATS = 15  # of some 10 ms each: a busy machine must leave one alone
INSTRUCTIONS = {
    "avx2": "vpmaddubsw + vpaddw, 256 bits",
    "avxvnni": "vpdpbusd, 256 bits",
    "avx512": "vpdpbusd, 512 bits",
    "amx": "tdpbsud, tiles",
}


@dataclass(frozen=True)
class Peak:
    """The rate of one instruction set's product instruction with nothing to load or store."""

    kernel_set: str
    instruction: str
    threads: int
    multiply_adds: int  # of one call
    timing: Timing

    @property
    def g_multiply_adds_per_s(self) -> float:
        return self.timing.giga_per_s(self.multiply_adds)


@dataclass(frozen=True)
class Read:
    """Memory, read and nothing else done with it."""

    threads: int
    how: str
    nbytes: int  # of one call
    timing: Timing

    @property
    def gb_per_s(self) -> float:
        return self.timing.giga_per_s(self.nbytes)


@dataclass(frozen=True)
class Ceiling:
    """All of one run. `lacks`: the sets that were not measured, and why."""

    reads: list[Read]
    peaks: list[Peak]
    lacks: dict[str, str]

    def read_gb_per_s(self, threads: int) -> float:
        """Raises KeyError for a number of threads that was not measured."""
        return {read.threads: read.gb_per_s for read in self.reads}[threads]

    def peak(self, kernel_set: str, threads: int) -> float:
        """G multiply-adds a second. Raises KeyError for what was not measured."""
        return {(p.kernel_set, p.threads): p.g_multiply_adds_per_s for p in self.peaks}[kernel_set, threads]

    def roof(self, kernel_set: str, threads: int, intensity: float) -> float:
        """The most G multiply-adds a second at so many multiply-adds for each byte read from memory.

        One token against 2-bit weights does 4 for a byte, M tokens 4 M.
        """
        return min(self.peak(kernel_set, threads), intensity * self.read_gb_per_s(threads))

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        reads = [
            {"threads": r.threads, "how": r.how, "nbytes": r.nbytes, "gb_per_s": r.gb_per_s, **asdict(r.timing)}
            for r in self.reads
        ]
        peaks = [
            {
                "kernel_set": p.kernel_set,
                "instruction": p.instruction,
                "threads": p.threads,
                "g_multiply_adds_per_s": p.g_multiply_adds_per_s,
                **asdict(p.timing),
            }
            for p in self.peaks
        ]
        return {"reads": reads, "peaks": peaks, "lacks": self.lacks}


def measure_ceiling(
    threads: int | None = None, *, repeats: int = REPEATS, nbytes: int | None = None, rounds: int = PEAK_ROUNDS
) -> Ceiling:
    """Reads of memory and every kernel set's peak, on 1 thread and doubling up to `threads` (default: all), in turn.

    nbytes: of the buffer that is read; by default more than the caches hold. Raises ShapeError for sizes below 1.
    """
    if repeats < 1 or rounds < 1 or (nbytes is not None and nbytes < 1):
        got = f"repeats {repeats}, nbytes {nbytes}, rounds {rounds}"
        raise ShapeError("measure_ceiling", expected="sizes of at least 1", got=got)
    counts = _counts(resolve_threads(threads))
    readers = {count: MemoryReader(count, nbytes) for count in counts[-1:]}
    buffer = readers[counts[-1]].words
    for count in counts[:-1]:  # the same memory for all of them
        readers[count] = MemoryReader(count, 8)
        readers[count].words = buffer
    actions: dict[str, Action] = {f"read {count}": readers[count].read for count in counts}
    done: dict[tuple[str, int], int] = {}
    lacks: dict[str, str] = {}
    for number, (name, why) in enumerate(cython_backend.simd_variants().items()):
        if why is not None or name not in INSTRUCTIONS:
            lacks[name] = why or "has no measured peak: the compiler chooses its instructions"
            continue
        for count in counts:
            call = partial(cython_backend._cpu.peak_multiply_adds, number, rounds, count)
            done[name, count] = call()
            actions[f"{name} {count}"] = call
    timings = take_turns(actions, repeats)
    reads = [Read(n, readers[n].how, readers[n].nbytes, timings[f"read {n}"]) for n in counts]
    peaks = [
        Peak(name, INSTRUCTIONS[name], count, macs, timings[f"{name} {count}"]) for (name, count), macs in done.items()
    ]
    return Ceiling(reads, peaks, lacks)


def peak_of(backend: Backend) -> tuple[Action, int] | None:
    """The product instruction of the backend's own kernel set, on its threads: (what to time, multiply-adds of a call).

    None for a backend, or a set, whose instruction is not known.
    """
    name = getattr(backend, "simd", None)
    if name not in INSTRUCTIONS:
        return None
    number = list(cython_backend.simd_variants()).index(name)
    call = partial(cython_backend._cpu.peak_multiply_adds, number, PEAK_ROUNDS, backend.threads)
    return call, call()


def _counts(threads: int) -> list[int]:
    """1, 2, 4, ... and the number itself."""
    return sorted({threads, *(1 << power for power in range(threads.bit_length()) if 1 << power <= threads)})


def draw_roofline(axes: Axes, found: Ceiling, threads: int, points: Iterable[tuple[str, float, float]] = ()) -> None:
    """The roof of each kernel set on that many threads; points: (name, multiply-adds a byte, G a second)."""
    read = found.read_gb_per_s(threads)
    intensities = [2.0**power for power in range(-1, 13)]
    for peak in (p for p in found.peaks if p.threads == threads):
        heights = [found.roof(peak.kernel_set, threads, i) for i in intensities]
        axes.plot(intensities, heights, label=f"{peak.kernel_set}: {peak.g_multiply_adds_per_s:.0f} G/s")
    series: dict[str, list[tuple[float, float]]] = {}
    for name, intensity, speed in points:
        series.setdefault(name, []).append((intensity, speed))
    for name, values in series.items():
        axes.plot(*zip(*values, strict=True), "o:", markersize=5, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("multiply-adds for a byte read from memory")
    axes.set_ylabel("G multiply-adds a second")
    axes.set_title(f"{threads} thread{'s' if threads > 1 else ''}, memory {read:.1f} GB/s")
    axes.grid(True, which="major", alpha=0.3)
    if any(p.threads == threads for p in found.peaks):
        axes.legend(fontsize=8)


def save_roofline(found: Ceiling, path: Path) -> None:
    """A picture of the roofline at the most threads that were measured, in the format of the file's ending.

    Raises BackendUnavailable without matplotlib.
    """
    figure, axes = new_figure(size=(6.4, 4.4))
    draw_roofline(axes[0, 0], found, found.reads[-1].threads)
    figure.savefig(path)
