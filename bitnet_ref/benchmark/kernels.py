"""One ternary linear (quantise, multiply, dequantise) on every backend and kernel set that can run here."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..backends import Backend, available_backends, choose_backend
from ..backends.cpu.backend import CythonBackend
from ..backends.cpu.extension import layouts_for, simd_variants
from ..errors import ShapeError
from ..formats.checkpoint import Progress, ticker
from ..reference.weights import LinearWeight
from .limits import MemoryReader, last_level_cache_bytes
from .synthetic import random_ternary_weight
from .timing import Action, Conditions, Record, Timing, Watch, ratio, take_turns
from .validate import Check, Expected, check_linear

SHAPES_2B_4T = ((2560, 2560), (640, 2560), (6912, 2560), (2560, 6912))  # (N, K): q and o, k and v, gate and up, down
TOKENS = (1, 4, 16, 64, 512)
REPEATS = 7
BUDGET_S = 0.5  # per kernel, shape and token count; a slower kernel gets fewer repetitions
CACHES_OF_WEIGHTS = 2  # copies of a weight fill the last-level cache this many times, so each is read from memory
READ = "read"


@dataclass(frozen=True)
class KernelResult(Record):
    """One linear on one kernel set. Without equality there is no timing, and no speed."""

    backend: str
    kernel_set: str | None  # of the cython backend
    layout: str | None  # of its weights, which names the method
    out_features: int
    in_features: int
    tokens: int
    weight_bytes: int  # in the backend's own layout
    check: Check
    timing: Timing | None
    read: Timing | None  # of `read_bytes`, in turn with the kernel
    read_bytes: int

    @property
    def equal(self) -> bool:
        return self.check.equal

    @property
    def gb_per_s(self) -> float | None:
        """Bytes of the weight over the best time."""
        return self.timing.giga_per_s(self.weight_bytes) if self.timing else None

    @property
    def read_gb_per_s(self) -> float | None:
        """The best plain read that was taken in turn with the kernel."""
        return self.read.giga_per_s(self.read_bytes) if self.read else None

    @property
    def g_multiply_adds_per_s(self) -> float | None:
        """Of the ternary product, over the best time."""
        products = self.tokens * self.out_features * self.in_features
        return self.timing.giga_per_s(products) if self.timing else None

    @property
    def joules_per_token(self) -> float | None:
        """Where the machine's counters can be read."""
        return self.timing.energy_j / self.tokens if self.timing and self.timing.energy_j is not None else None

    @property
    def of_read(self) -> float | None:
        """Bytes of the weight per second over those of a plain read: best over best. 1 is the ceiling."""
        return ratio(self.weight_bytes, self.timing, self.read_bytes, self.read)

    @property
    def of_read_median(self) -> float | None:
        """The same, median over median."""
        return ratio(self.weight_bytes, self.timing, self.read_bytes, self.read, "median_s")


@dataclass(frozen=True)
class KernelBench(Record):
    """All results, and the memory reads that they were measured in turn with."""

    threads: int
    read_how: str
    read_gb_per_s: float | None  # the best of the whole run
    last_level_cache_bytes: int
    results: list[KernelResult]
    conditions: Conditions

    @property
    def equal(self) -> bool:
        """Whether every kernel's results equal the reference's."""
        return bool(self.results) and all(result.equal for result in self.results)


def candidates(
    name: str = "all", threads: int | None = None, simd: str | None = None, methods: bool = False
) -> list[Backend]:
    """The backends of that name that can run here ("all": every one), the cython one once for each kernel set.

    methods: also once for each method of the set, not only its default.
    Raises BackendUnavailable if the backend or kernel set asked for cannot run here.
    """
    names = [name] if name != "all" else [each for each, reason in available_backends().items() if reason is None]
    if simd and "cython" not in names:
        choose_backend("cython")  # raises with the reason why it cannot run here
    backends: list[Backend] = []
    for each in names:
        backend = choose_backend(each, threads=threads)
        if not isinstance(backend, CythonBackend):
            backends.append(backend)
            continue
        for each_set in [simd] if simd else [variant for variant, lacks in simd_variants().items() if lacks is None]:
            layouts = layouts_for(each_set) if methods else [None]
            backends += [CythonBackend("float32", threads, each_set, layout=layout) for layout in layouts]
    return backends


def measure_kernels(
    backends: Sequence[Backend],
    shapes: Sequence[tuple[int, int]] = SHAPES_2B_4T,
    tokens: Sequence[int] = TOKENS,
    *,
    repeats: int = REPEATS,
    budget_s: float = BUDGET_S,
    cache_bytes: int | None = None,
    reader: MemoryReader | None = None,
    progress: Progress | None = None,
) -> KernelBench:
    """Every backend on a random weight of each shape (N, K), for each number of tokens: compared, then timed in turn.

    cache_bytes: size of the last-level cache, by default what the system reports. Each weight has so many copies that
    no call finds its weight in it.
    """
    if not backends or not shapes or not tokens or min(*tokens, *itertools.chain(*shapes)) < 1 or repeats < 1:
        got = f"{len(backends)} backends, shapes {list(shapes)}, tokens {list(tokens)}, {repeats} repeats"
        raise ShapeError("measure_kernels", expected="at least one backend, shape and token, all sizes >= 1", got=got)
    watch, reader = Watch(), reader or MemoryReader(backends[0].threads)
    cache_bytes = last_level_cache_bytes() if cache_bytes is None else cache_bytes
    rng = np.random.default_rng(0)
    results: list[KernelResult] = []
    tick = ticker(progress, len(shapes) * len(tokens))
    for n_out, n_in in shapes:
        weight = random_ternary_weight(rng, n_out, n_in)
        expected = Expected.of(rng.standard_normal((max(tokens), n_in), dtype=np.float32), weight)
        copies = -(-CACHES_OF_WEIGHTS * cache_bytes // weight.nbytes) or 1
        by_layout: dict[tuple[str, str | None], list[LinearWeight]] = {}  # several kernel sets may read the same layout
        subjects = []
        for be in backends:
            layout = be.name, getattr(be, "layout", None)
            if layout not in by_layout:
                fresh = (replace(weight, packed=weight.packed.copy()) for _ in range(copies))
                by_layout[layout] = [be.prepare(w) for w in fresh]
            subjects.append((be, by_layout[layout]))
        for count in tokens:
            results += compare_and_time(subjects, expected.first(count), reader, repeats, budget_s)
            tick()
    speeds = [result.read_gb_per_s for result in results if result.read_gb_per_s is not None]
    conditions = watch.conditions(computing=all(be.name != "cupy" for be in backends))
    return KernelBench(reader.threads, reader.how, max(speeds, default=None), cache_bytes, results, conditions)


def compare_and_time(
    subjects: list[tuple[Backend, list[LinearWeight]]],
    expected: Expected,
    reader: MemoryReader,
    repeats: int,
    budget_s: float,
) -> list[KernelResult]:
    """Each (backend, copies of the weight) at one shape and token count."""
    checks = [check_linear(be, copies[0], expected) for be, copies in subjects]

    def call(be: Backend, copies: list[LinearWeight]) -> Action:
        """Takes the next copy each time: when a copy's turn comes again, the cache has lost it."""
        x, turn = be.from_host(expected.x), itertools.cycle(copies)

        def multiply() -> None:
            be.linear(x, next(turn))
            be.synchronize()  # a device goes on computing after the call

        return multiply

    actions = {str(i): call(*subjects[i]) for i, check in enumerate(checks) if check.equal}
    timings = take_turns({READ: reader.read, **actions}, repeats, budget_s) if actions else {}
    results = []
    for index, ((be, copies), check) in enumerate(zip(subjects, checks, strict=True)):
        timing, variant = timings.get(str(index)), (be.name, getattr(be, "simd", None), getattr(be, "layout", None))
        sizes = *copies[0].shape, len(expected.x), copies[0].nbytes
        results.append(KernelResult(*variant, *sizes, check, timing, timing and timings[READ], reader.nbytes))
    return results
