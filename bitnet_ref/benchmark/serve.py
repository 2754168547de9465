"""The engine under load: how much it does, and how long its users wait, for each rate at which requests arrive.

Arrivals are a Poisson process with a fixed seed, so every rate sees the same requests. Times are the reader's: to the
first token from the moment a request was due, which a slow sender cannot flatter, and between its tokens as they are
read. Before anything is timed, some of the requests have to give what `Model.generate` gives.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from ..api import Model
from ..errors import GenerationError, QueueFull
from ..generation import Generation
from ..notebook.figures.style import new_figure
from ..serving import Engine, EngineConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Progress = Callable[[int, int], object]
SHARES = (0.25, 0.5, 0.75, 0.9, 1.1)  # of what it can do: the default rates
CHECKED = 4  # requests
ONE_BY_ONE = 8  # prompts that are timed alone
ROUNDS = 3


@dataclass(frozen=True)
class Load:
    """What the requests are: their prompts are random tokens, their lengths drawn evenly from these ranges."""

    requests: int = 100
    prompt: tuple[int, int] = (8, 32)
    new: tuple[int, int] = (16, 64)
    seed: int = 0

    def draw(self, vocab_size: int) -> list[tuple[list[int], int]]:
        """[(prompt, max_tokens)]"""
        rng = np.random.default_rng(self.seed)
        lengths = rng.integers(self.prompt[0], self.prompt[1] + 1, self.requests)
        news = rng.integers(self.new[0], self.new[1] + 1, self.requests)
        low = min(3, vocab_size - 1)  # the first ids are often special
        return [(rng.integers(low, vocab_size, n).tolist(), int(new)) for n, new in zip(lengths, news, strict=True)]

    def arrivals(self, rate_per_s: float) -> NDArray[np.float64]:
        """Seconds from the start."""
        return np.cumsum(np.random.default_rng([self.seed, 1]).exponential(1 / rate_per_s, self.requests))


@dataclass(frozen=True)
class Quantiles:
    """Of seconds."""

    p50_s: float
    p95_s: float
    p99_s: float

    @classmethod
    def of(cls, values_s: Sequence[float]) -> Quantiles | None:
        if not values_s:
            return None
        p50, p95, p99 = np.quantile(values_s, (0.5, 0.95, 0.99)).tolist()
        return cls(p50, p95, p99)


@dataclass(frozen=True)
class LoadPoint:
    """What came of one rate of arrivals."""

    offered_per_s: float  # requests
    requests: int
    refused: int
    seconds: float  # from the first arrival to the last token
    tokens: int
    first_token: Quantiles | None
    between_tokens: Quantiles | None
    largest_batch: int
    mean_batch: float  # sequences in a step

    @property
    def requests_per_s(self) -> float:
        return (self.requests - self.refused) / self.seconds

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Together:
    """Prompts through the engine at the same time, against one after another, in turn in the same run."""

    prompts: int
    new_tokens: int  # of each
    alone_tokens_per_s: float  # medians of the rounds
    together_tokens_per_s: float
    ratios: tuple[float, ...]  # of each round

    @property
    def ratio(self) -> float:
        return median(self.ratios)


@dataclass(frozen=True)
class ServeBench:
    """`equal`: whether the requests that were checked gave what they give alone; without that, nothing is measured."""

    backend: str
    threads: int
    equal: bool
    checked: int
    load: Load
    config: EngineConfig
    together: Together | None = None
    capacity_per_s: float | None = None  # requests a second, with all of them there from the beginning
    points: tuple[LoadPoint, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        facts = asdict(self)
        facts["config"] = {name: value for name, value in facts["config"].items() if name != "sampling"}
        for point, mine in zip(facts["points"], self.points, strict=True):
            point |= {"requests_per_s": mine.requests_per_s, "tokens_per_s": mine.tokens_per_s}
        if self.together is not None:
            facts["together"]["ratio"] = self.together.ratio
        return facts


def measure_serve(
    model: Model,
    load: Load | None = None,
    config: EngineConfig | None = None,
    *,
    rates_per_s: Sequence[float] = (),
    prompts: int = 64,
    progress: Progress | None = None,
) -> ServeBench:
    """Check, then measure: `prompts` together against alone, then each rate (by default shares of the capacity).

    Raises GenerationError where the load does not fit the model's context.
    """
    load, config = load or Load(), config or EngineConfig()
    if load.prompt[1] + load.new[1] > model.config.context_length:
        raise GenerationError(
            f"prompts of {load.prompt[1]} tokens and {load.new[1]} new ones do not fit the model's context of "
            f"{model.config.context_length}"
        )
    if not all(rate > 0 for rate in rates_per_s):
        raise GenerationError(f"rates: expected requests a second, numbers > 0, got {list(rates_per_s)}")
    requests = load.draw(model.config.vocab_size)
    steps, done = 3 + (len(rates_per_s) or len(SHARES)), 0

    def tick() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, steps)

    def measured(rate_per_s: float) -> LoadPoint:
        point = asyncio.run(_offer(model, config, requests, load.arrivals(rate_per_s), rate_per_s))
        tick()
        return point

    equal = _equal_alone(model, config, requests)
    found = ServeBench(model.backend.name, model.backend.threads, equal, min(CHECKED, len(requests)), load, config)
    tick()
    if not equal:
        return found
    together = measure_together(model, config, prompts, load)
    tick()
    at_once = replace(config, max_queue=max(config.max_queue, len(requests)))
    whole = asyncio.run(_offer(model, at_once, requests, np.zeros(len(requests)), float("inf")))
    tick()
    capacity = whole.requests_per_s
    points = tuple(measured(rate) for rate in rates_per_s or [share * capacity for share in SHARES])
    return replace(found, together=together, capacity_per_s=capacity, points=points)


def measure_together(model: Model, config: EngineConfig, prompts: int, load: Load) -> Together:
    """Prompts of the load's mean lengths. Some are timed alone: their speed is the same for all."""
    length, new = sum(load.prompt) // 2, sum(load.new) // 2
    rng = np.random.default_rng([load.seed, 2])
    texts = rng.integers(min(3, model.config.vocab_size - 1), model.config.vocab_size, (prompts, length))
    few = texts[: min(prompts, ONE_BY_ONE)].tolist()
    how = {"max_tokens": new, "ignore_eos": True}
    alone, together = [], []
    with Engine(model, replace(config, max_batch=max(config.max_batch, prompts), prefix_sharing=False,
                               max_batch_tokens=max(config.max_batch_tokens, 2 * prompts))) as engine:  # fmt: skip
        for _ in range(ROUNDS):
            alone.append(len(few) * new / _seconds(lambda: [model.generate(prompt, **how) for prompt in few]))
            together.append(prompts * new / _seconds(lambda: engine.generate(texts.tolist(), **how)))
    ratios = tuple(many / one for many, one in zip(together, alone, strict=True))
    return Together(prompts, new, median(alone), median(together), ratios)


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _equal_alone(model: Model, config: EngineConfig, requests: Sequence[tuple[list[int], int]]) -> bool:
    """Whether some requests give among the others what they give alone."""
    with Engine(model, config) as engine:
        handles = [
            engine.submit(prompt, max_tokens=new, ignore_eos=True, logprobs=0)
            for prompt, new in requests[: config.max_batch]
        ]
        for handle, (prompt, new) in zip(handles[:CHECKED], requests, strict=False):
            mine = handle.result()
            (alone,) = cast("list[Generation]", model.generate([prompt], max_tokens=new, ignore_eos=True, logprobs=0))
            if (mine.token_ids, mine.logprobs, mine.text) != (alone.token_ids, alone.logprobs, alone.text):
                return False
        for handle in handles:
            handle.close()
    return True


async def _offer(
    model: Model,
    config: EngineConfig,
    requests: Sequence[tuple[list[int], int]],
    arrivals_s: NDArray[np.float64],
    rate_per_s: float,
) -> LoadPoint:
    """Every request at its time, read as it comes."""
    firsts: list[float] = []
    betweens: list[float] = []
    tokens = refused = 0

    async def read(prompt: list[int], new: int, due: float) -> None:
        nonlocal tokens, refused
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        try:
            stream = engine.stream(prompt, max_tokens=new, ignore_eos=True)
        except QueueFull:
            refused += 1
            return
        last = due
        async for _ in stream:
            now = time.perf_counter()
            (firsts if last == due else betweens).append(now - last)
            last, tokens = now, tokens + 1

    async with Engine(model, config) as engine:
        start = time.perf_counter() + 0.05
        await asyncio.gather(
            *[read(*request, start + at) for request, at in zip(requests, arrivals_s.tolist(), strict=True)]
        )
        seconds = time.perf_counter() - start - float(arrivals_s[0])
        batches = [len(step.parts) for step in list(engine.timeline)] or [0]
    return LoadPoint(
        rate_per_s,
        len(requests),
        refused,
        seconds,
        tokens,
        Quantiles.of(firsts),
        Quantiles.of(betweens),
        max(batches),
        sum(batches) / len(batches),
    )


# -- the picture -------------------------------------------------------------------------------------------------------


def save_serve_plot(found: ServeBench, path: Path) -> None:
    """Throughput and waiting times against the offered load, in the format of the file's ending.

    Raises BackendUnavailable without matplotlib.
    """
    figure, axes = new_figure(1, 3, size=(11, 3.6))
    draw_serve(axes[0], found)
    figure.savefig(path)


def draw_serve(axes: Sequence[Axes], found: ServeBench) -> None:
    """Three pictures: tokens a second, time to first token, time between tokens; against requests offered a second."""
    points = sorted(found.points, key=lambda point: point.offered_per_s)
    offered = [point.offered_per_s for point in points]
    speed, first, between = axes
    speed.plot(offered, [point.tokens_per_s for point in points], "o-")
    speed.set(title="throughput", ylabel="tokens/s", ylim=(0, None))
    for axis, title, waits in (
        (first, "time to first token", [point.first_token for point in points]),
        (between, "time between tokens", [point.between_tokens for point in points]),
    ):
        for name in ("p50_s", "p95_s", "p99_s"):
            values = [float("nan") if wait is None else 1e3 * getattr(wait, name) for wait in waits]
            axis.plot(offered, values, "o-", label=name.removesuffix("_s"))
        axis.set(title=title, ylabel="ms", yscale="log")
        axis.legend()
    for axis in axes:
        axis.set_xlabel("requests offered a second")
        if found.capacity_per_s is not None:
            axis.axvline(found.capacity_per_s, color="grey", linestyle=":")
