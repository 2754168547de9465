"""One ternary linear (quantise, multiply, dequantise) on every backend and kernel set that can run here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ..backends import Backend, available_backends, choose_backend
from ..backends.cpu import kernel_manager
from ..backends.cpu.backend import CythonBackend, simd_variants
from ..errors import ShapeError
from ..reference.weights import LinearWeight, TernaryWeight
from .bandwidth import MemoryReader, last_level_cache_bytes
from .synthetic import random_ternary_weight
from .timing import Action, Timing, relative_speed, take_turns
from .validate import Check, Expected, check_linear

SHAPES_2B_4T = ((2560, 2560), (640, 2560), (6912, 2560), (2560, 6912))  # (N, K): q and o, k and v, gate and up, down
TOKENS = (1, 4, 16, 64, 512)
REPEATS = 7
BUDGET_S = 0.5  # of one kernel at one shape and token count: what is slower has fewer repetitions
CACHES_OF_WEIGHTS = 2  # copies of a weight fill the last-level cache this many times, so each is read from memory
READ = "read"

Progress = Callable[[int, int], object]
Layout = tuple[str, str | None]  # a backend's name, and which of its layouts of weights


@dataclass(frozen=True)
class KernelResult:
    """One linear on one kernel set. Without equality there is no timing, and no speed."""

    backend: str
    kernel_set: str | None  # of the cython backend
    layout: str | None  # of its weights, which names the method
    out_features: int
    in_features: int
    tokens: int
    weight_bytes: int  # as this backend holds them
    check: Check
    timing: Timing | None
    read: Timing | None  # of `read_bytes`, in turn with the kernel
    read_bytes: int

    @property
    def gb_per_s(self) -> float | None:
        """Bytes of the weight over the best time."""
        return self.timing.giga_per_s(self.weight_bytes) if self.timing else None

    @property
    def read_gb_per_s(self) -> float | None:
        """The best plain read that was taken in turn with it."""
        return self.read.giga_per_s(self.read_bytes) if self.read else None

    @property
    def g_multiply_adds_per_s(self) -> float | None:
        """Of the ternary product, over the best time."""
        products = self.tokens * self.out_features * self.in_features
        return self.timing.giga_per_s(products) if self.timing else None

    @property
    def of_read(self) -> float | None:
        """Speed at which the weight is gone through, over that of a plain read: best over best. 1 is the ceiling."""
        return relative_speed("best_s", self.weight_bytes, self.timing, self.read_bytes, self.read)

    @property
    def of_read_median(self) -> float | None:
        """The same, median over median."""
        return relative_speed("median_s", self.weight_bytes, self.timing, self.read_bytes, self.read)

    def to_dict(self) -> dict[str, Any]:
        derived = ("gb_per_s", "read_gb_per_s", "g_multiply_adds_per_s", "of_read", "of_read_median")
        return {**asdict(self), "equal": self.check.equal, **{name: getattr(self, name) for name in derived}}


@dataclass(frozen=True)
class KernelBench:
    """All results, and the read of memory that they were measured in turn with."""

    threads: int
    read_how: str
    read_gb_per_s: float | None  # the best of the whole run
    last_level_cache_bytes: int
    results: list[KernelResult]

    @property
    def equal(self) -> bool:
        """Whether every kernel gave what the reference gives."""
        return bool(self.results) and all(result.check.equal for result in self.results)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        facts = {name: getattr(self, name) for name in ("threads", "read_how", "read_gb_per_s")}
        facts |= {"last_level_cache_bytes": self.last_level_cache_bytes, "equal": self.equal}
        return {**facts, "results": [result.to_dict() for result in self.results]}


def candidates(
    name: str = "all", threads: int | None = None, simd: str | None = None, methods: bool = False
) -> list[Backend]:
    """The backends of that name that can run here ("all": every one), the cython one once for each kernel set.

    methods: also once for each method of the set, not only the one that it takes by itself.
    Raises BackendUnavailable for a named one, or a named kernel set, that cannot.
    """
    names = [name] if name != "all" else [each for each, reason in available_backends().items() if reason is None]
    if simd and "cython" not in names:
        choose_backend("cython")  # says why it cannot run here
    found: list[Backend] = []
    for each in names:
        chosen = choose_backend(each, threads=threads)
        if not isinstance(chosen, CythonBackend):
            found.append(chosen)
            continue
        sets = [simd] if simd else [variant for variant, lacks in simd_variants().items() if lacks is None]
        for each_set in sets:
            layouts = kernel_manager.candidates(each_set) if methods else [None]
            found += [CythonBackend("float32", threads, each_set, layout=layout) for layout in layouts]
    return found


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

    cache_bytes: the last-level cache, which a call must not find its weight in; by default what the system says.
    """
    if not backends or not shapes or not tokens or min(*tokens, *itertools.chain(*shapes)) < 1 or repeats < 1:
        got = f"{len(backends)} backends, shapes {list(shapes)}, tokens {list(tokens)}, {repeats} repeats"
        raise ShapeError("measure_kernels", expected="at least one backend, shape and token, all sizes >= 1", got=got)
    reader = reader or MemoryReader(backends[0].threads)
    cache_bytes = last_level_cache_bytes() if cache_bytes is None else cache_bytes
    rng = np.random.default_rng(0)
    results: list[KernelResult] = []
    for number, (n_out, n_in) in enumerate(shapes):
        weight = random_ternary_weight(rng, n_out, n_in)
        expected = Expected.of(rng.standard_normal((max(tokens), n_in), dtype=np.float32), weight)
        copies = -(-CACHES_OF_WEIGHTS * cache_bytes // weight.nbytes) or 1
        by_layout: dict[Layout, list[LinearWeight]] = {}  # kernel sets of one backend may read the same panels
        for be in backends:
            if _layout(be) not in by_layout:
                by_layout[_layout(be)] = [be.prepare(_copy(weight)) for _ in range(copies)]
        for part, count in enumerate(tokens):
            results += _measure(backends, by_layout, expected.first(count), reader, repeats, budget_s)
            if progress is not None:
                progress(number * len(tokens) + part + 1, len(shapes) * len(tokens))
    speeds = [result.read_gb_per_s for result in results if result.read_gb_per_s is not None]
    return KernelBench(reader.threads, reader.how, max(speeds, default=None), cache_bytes, results)


def _layout(be: Backend) -> Layout:
    return be.name, getattr(be, "layout", None)


def _measure(
    backends: Sequence[Backend],
    by_layout: dict[Layout, list[LinearWeight]],
    expected: Expected,
    reader: MemoryReader,
    repeats: int,
    budget_s: float,
) -> list[KernelResult]:
    """All backends at one shape and token count."""
    checks = [check_linear(be, by_layout[_layout(be)][0], expected) for be in backends]
    actions: dict[str, Action] = {READ: reader.read}
    for index, (be, check) in enumerate(zip(backends, checks, strict=True)):
        if check.equal:
            actions[str(index)] = _cycle(be, by_layout[_layout(be)], expected)
    timings = take_turns(actions, repeats, budget_s) if len(actions) > 1 else {}
    results = []
    for index, (be, check) in enumerate(zip(backends, checks, strict=True)):
        weight, timing = by_layout[_layout(be)][0], timings.get(str(index))
        read = timings[READ] if timing else None
        simd = getattr(be, "simd", None)
        n_out, n_in = weight.shape
        size = len(expected.x), weight.nbytes
        results.append(
            KernelResult(be.name, simd, _layout(be)[1], n_out, n_in, *size, check, timing, read, reader.nbytes)
        )
    return results


def _cycle(be: Backend, copies: list[LinearWeight], expected: Expected) -> Action:
    """A call that takes the next copy each time: by the time one comes round again the cache has lost it."""
    turn = itertools.cycle(copies)
    return lambda: be.linears(expected.x, (next(turn),))


def _copy(w: TernaryWeight) -> TernaryWeight:
    return replace(w, packed=w.packed.copy())
