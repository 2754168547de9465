"""The engine under load: its throughput and its users' waiting times, for each rate at which requests arrive.

Arrivals are a Poisson process with a fixed seed, so every rate sees the same requests. Times are the reader's: to the
first token from the moment a request was due, so that a slow sender does not shorten them, and between its tokens as
they are read. Before anything is timed, some of the requests must give what `Model.generate` gives.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ..api import Model
from ..errors import GenerationError, QueueFull
from ..formats.checkpoint import Progress, ticker
from ..generation import Generation
from ..serving import Engine, EngineConfig
from .timing import Conditions, Record, Stopwatch, Watch

SHARES = (0.25, 0.5, 0.75, 0.9, 1.1)  # of the capacity: the default rates
CHECKED = 4  # requests

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
    processor_s: float | None = None  # of all threads, the readers of the tokens included
    energy_j: float | None = None  # None: it cannot be read here

    @property
    def requests_per_s(self) -> float:
        return (self.requests - self.refused) / self.seconds

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def processor_s_per_token(self) -> float | None:
        return self.processor_s / self.tokens if self.processor_s is not None and self.tokens else None

    @property
    def joules_per_token(self) -> float | None:
        return self.energy_j / self.tokens if self.energy_j is not None and self.tokens else None


@dataclass(frozen=True)
class ServeBench(Record):
    """`equal`: whether the checked requests gave what they give alone. If not, nothing is measured."""

    backend: str
    threads: int
    equal: bool
    checked: int
    load: Load
    config: EngineConfig
    capacity_per_s: float | None = None  # requests per second when all of them are there from the beginning
    points: tuple[LoadPoint, ...] = ()
    conditions: Conditions | None = None

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
    progress: Progress | None = None,
) -> ServeBench:
    """Check, then measure: the capacity, then each rate (by default SHARES of the capacity).

    Raises GenerationError if the load does not fit the model's context.
    """
    load, config = load or Load(), config or EngineConfig()
    if load.prompt[1] + load.new[1] > model.config.context_length:
        asked = f"prompts of {load.prompt[1]} tokens and {load.new[1]} new ones"
        raise GenerationError(f"{asked} do not fit the model's context of {model.config.context_length}")
    if not all(0 < rate < math.inf for rate in rates_per_s):
        message = f"expected requests per second, finite numbers > 0, got {list(rates_per_s)}"
        raise GenerationError(message, field="rates")
    watch, requests = Watch(), load.draw(model.config.vocab_size)
    tick = ticker(progress, 2 + (len(rates_per_s) or len(SHARES)))
    equal = equals_alone(model, config, requests)
    bench = ServeBench(model.backend.name, model.backend.threads, equal, min(CHECKED, len(requests)), load, config)
    tick()
    if not equal:
        return bench
    unlimited = replace(config, max_queue=max(config.max_queue, len(requests)))
    at_once = asyncio.run(offer(model, unlimited, requests, np.zeros(len(requests)), float("inf")))
    tick()
    capacity, points = at_once.requests_per_s, []
    for rate in rates_per_s or [share * capacity for share in SHARES]:
        points.append(asyncio.run(offer(model, config, requests, load.arrivals(rate), rate)))
        tick()
    conditions = watch.conditions(computing=False)
    return replace(bench, capacity_per_s=capacity, points=tuple(points), conditions=conditions)


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
        stopwatch, start = Stopwatch(), perf_counter() + 0.05
        dues = (start + arrivals_s).tolist()
        await asyncio.gather(*[read(*request, due) for request, due in zip(requests, dues, strict=True)])
        taken_s = perf_counter() - start - float(arrivals_s[0])
        taken = stopwatch.lap()
        batches = [len(step.parts) for step in list(engine.timeline)] or [0]
    tokens, waits = len(first_s) + len(between_s), (Quantiles.of(first_s), Quantiles.of(between_s))
    sizes = max(batches), sum(batches) / len(batches)
    costs = taken.processor_s, taken.energy_j
    return LoadPoint(rate_per_s, len(requests), refused, taken_s, tokens, *waits, *sizes, *costs)
