"""What this machine can do at most: bytes read per second, and multiply-adds per second of each instruction set.

A kernel's share of its ceiling means something only if both come from the same run: `measure_ceiling` measures
everything in turn, on one thread and on more. `Ceiling.roof` is the roofline: at `intensity` multiply-adds per byte
read, a kernel reaches at most min(peak, intensity * read).
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..backends import Backend
from ..backends.cpu import extension
from ..errors import ShapeError
from ..notebook.figures import SERIES, new_figure, save_figure
from ..system.threads import resolve_threads
from .timing import Action, Record, Timing, take_turns

if TYPE_CHECKING:
    from matplotlib.axes import Axes

UNKNOWN_CACHE_BYTES = 32 << 20  # assumed where the system does not report the cache size
CACHES_READ = 3  # a buffer of this many last-level caches is read from memory
MIN_READ_BYTES, MAX_READ_BYTES = 64 << 20, 512 << 20
PEAK_ROUNDS = 1 << 18  # of a dozen instructions: about 1 ms
REPEATS = 15  # of some 10 ms each, so that on a busy machine at least one is undisturbed
INSTRUCTIONS = {
    "avx2": "vpmaddubsw + vpaddw, 256 bits",
    "avxvnni": "vpdpbusd, 256 bits",
    "avx512": "vpdpbusd, 512 bits",
    "amx": "tdpbsud, tiles",
}


def last_level_cache_bytes() -> int:
    """The size of the largest cache of the first processor. A virtual machine may share it with others."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        if text[:-1].isdecimal() and text[-1] in "KM":
            sizes.append(int(text[:-1]) << (10 if text[-1] == "K" else 20))
    return max(sizes, default=UNKNOWN_CACHE_BYTES)


class MemoryReader:
    """A buffer larger than the caches, and `read`, which sums it on `threads` threads.

    `how` names what reads it: the compiled `sum_words` where the extension is built, else NumPy's sum.
    """

    def __init__(self, threads: int | None = None, nbytes: int | None = None) -> None:
        if nbytes is None:
            nbytes = min(MAX_READ_BYTES, max(MIN_READ_BYTES, CACHES_READ * last_level_cache_bytes()))
        self.threads = resolve_threads(threads)
        self.words = np.ones(max(1, nbytes // 8), dtype=np.uint64)  # written, so that each page has its own memory
        compiled = extension.why_unavailable() is None
        self.how = "sum_words" if compiled else "numpy.sum"
        self._pool = None if compiled else ThreadPoolExecutor(self.threads)

    @property
    def nbytes(self) -> int:
        return self.words.nbytes

    def read(self) -> int:
        """Read the buffer once.   -> the sum of its words, which is their number"""
        if self._pool is None:
            return int(extension._cpu.sum_words(self.words, self.threads))
        return sum(map(int, self._pool.map(np.sum, np.array_split(self.words, self.threads))))


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


def peak_of(backend: Backend) -> tuple[Action, int] | None:
    """The product instruction of the backend's kernel set, on its threads: (what to time, multiply-adds per call).

    None for a backend, or a kernel set, whose instruction is not known.
    """
    name = getattr(backend, "simd", None)
    if name not in INSTRUCTIONS:
        return None
    number = list(extension.simd_variants()).index(name)
    call = partial(extension._cpu.peak_multiply_adds, number, PEAK_ROUNDS, backend.threads)
    return call, call()


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
