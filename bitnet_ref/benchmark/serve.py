"""The engine under load: its throughput and its users' waiting times, for each rate at which requests arrive.

Arrivals are a Poisson process with a fixed seed, so every rate sees the same requests. Times are the reader's: to the
first token from the moment a request was due, so that a slow sender does not shorten them, and between its tokens as
they are read. Before anything is timed, some of the requests must give what `Model.generate` gives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ..api import Model
from ..errors import GenerationError, QueueFull
from ..generation import Generation
from ..notebook.figures import new_figure, save_figure
from ..serving import Engine, EngineConfig
from .timing import Progress, Record, count_steps, seconds

SHARES = (0.25, 0.5, 0.75, 0.9, 1.1)  # of the capacity: the default rates
CHECKED = 4  # requests
ONE_BY_ONE = 8  # prompts that are timed alone
ROUNDS = 3

Requests = Sequence[tuple[list[int], int]]  # (prompt, max_tokens)


@dataclass(frozen=True)
class Load:
    """The requests: prompts of random tokens, lengths drawn evenly from these ranges."""

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
    """Quantiles of times in seconds."""

    p50_s: float
    p95_s: float
    p99_s: float

    @classmethod
    def of(cls, values_s: Sequence[float]) -> Quantiles | None:
        return cls(*np.quantile(values_s, (0.5, 0.95, 0.99)).tolist()) if values_s else None


@dataclass(frozen=True)
class LoadPoint(Record):
    """The result of one rate of arrivals."""

    offered_per_s: float  # requests
    requests: int
    refused: int
    seconds: float  # from the first arrival to the last token
    tokens: int
    first_token: Quantiles | None
    between_tokens: Quantiles | None
    largest_batch: int
    mean_batch: float  # sequences per step

    @property
    def requests_per_s(self) -> float:
        return (self.requests - self.refused) / self.seconds

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


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


@dataclass(frozen=True)
class ServeBench(Record):
    """`equal`: whether the checked requests gave what they give alone. If not, nothing is measured."""

    backend: str
    threads: int
    equal: bool
    checked: int
    load: Load
    config: EngineConfig
    together: Together | None = None
    capacity_per_s: float | None = None  # requests per second when all of them are there from the beginning
    points: tuple[LoadPoint, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values, but for the engine's sampling defaults, which are not used here."""
        facts = super().to_dict()
        facts["config"].pop("sampling", None)
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
    """Check, then measure: `prompts` together and alone, then each rate (by default SHARES of the capacity).

    Raises GenerationError if the load does not fit the model's context.
    """
    load, config = load or Load(), config or EngineConfig()
    if load.prompt[1] + load.new[1] > model.config.context_length:
        asked = f"prompts of {load.prompt[1]} tokens and {load.new[1]} new ones"
        raise GenerationError(f"{asked} do not fit the model's context of {model.config.context_length}")
    if not all(rate > 0 for rate in rates_per_s):
        raise GenerationError(f"expected requests per second, numbers > 0, got {list(rates_per_s)}", field="rates")
    requests = load.draw(model.config.vocab_size)
    tick = count_steps(progress, 3 + (len(rates_per_s) or len(SHARES)))
    equal = equals_alone(model, config, requests)
    bench = ServeBench(model.backend.name, model.backend.threads, equal, min(CHECKED, len(requests)), load, config)
    tick()
    if not equal:
        return bench
    together = measure_together(model, config, prompts, load)
    tick()
    unlimited = replace(config, max_queue=max(config.max_queue, len(requests)))
    at_once = asyncio.run(offer(model, unlimited, requests, np.zeros(len(requests)), float("inf")))
    tick()
    capacity, points = at_once.requests_per_s, []
    for rate in rates_per_s or [share * capacity for share in SHARES]:
        points.append(asyncio.run(offer(model, config, requests, load.arrivals(rate), rate)))
        tick()
    return replace(bench, together=together, capacity_per_s=capacity, points=tuple(points))


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
    with Engine(model, room) as engine:
        for _ in range(ROUNDS):
            alone.append(len(few) * new / seconds(lambda: [model.generate(prompt, **params) for prompt in few]))
            together.append(prompts * new / seconds(lambda: engine.generate(texts, **params)))
    ratios = tuple(many / one for many, one in zip(together, alone, strict=True))
    return Together(prompts, new, median(alone), median(together), ratios)


def equals_alone(model: Model, config: EngineConfig, requests: Requests) -> bool:
    """Whether some requests give the same among others as alone."""
    params: dict[str, Any] = {"ignore_eos": True, "logprobs": 0}
    with Engine(model, config) as engine:
        handles = [engine.submit(prompt, max_tokens=new, **params) for prompt, new in requests[: config.max_batch]]
        for handle, (prompt, new) in zip(handles[:CHECKED], requests, strict=False):
            mine = handle.result()
            (alone,) = cast("list[Generation]", model.generate([prompt], max_tokens=new, **params))
            if (mine.token_ids, mine.logprobs, mine.text) != (alone.token_ids, alone.logprobs, alone.text):
                return False
        for handle in handles:
            handle.close()
    return True


async def offer(
    model: Model, config: EngineConfig, requests: Requests, arrivals_s: NDArray[np.float64], rate_per_s: float
) -> LoadPoint:
    """Send every request at its time and read its tokens as they come."""
    first_s: list[float] = []
    between_s: list[float] = []
    refused = 0

    async def read(prompt: list[int], new: int, due: float) -> None:
        nonlocal refused
        await asyncio.sleep(max(0.0, due - perf_counter()))
        try:
            stream = engine.stream(prompt, max_tokens=new, ignore_eos=True)
        except QueueFull:
            refused += 1
            return
        last = due
        async for _ in stream:
            now = perf_counter()
            (first_s if last == due else between_s).append(now - last)
            last = now

    async with Engine(model, config) as engine:
        start = perf_counter() + 0.05
        dues = (start + arrivals_s).tolist()
        await asyncio.gather(*[read(*request, due) for request, due in zip(requests, dues, strict=True)])
        taken_s = perf_counter() - start - float(arrivals_s[0])
        batches = [len(step.parts) for step in list(engine.timeline)] or [0]
    tokens, waits = len(first_s) + len(between_s), (Quantiles.of(first_s), Quantiles.of(between_s))
    sizes = max(batches), sum(batches) / len(batches)
    return LoadPoint(rate_per_s, len(requests), refused, taken_s, tokens, *waits, *sizes)


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
