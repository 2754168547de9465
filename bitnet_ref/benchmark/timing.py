"""Results as JSON, and the time of an action: several repetitions, in turn with the actions it is compared with."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from statistics import median
from typing import Any, Literal

import numpy as np

REPETITION_S = 0.01  # a shorter action is called several times per repetition, which evens out the clock's noise
MAX_CALLS = 1000

Progress = Callable[[int, int], None]  # called with (steps done, steps in all)
Action = Callable[[], object]
Statistic = Literal["best_s", "median_s"]


def count_steps(progress: Progress | None, total: int) -> Callable[[], None]:
    """A function that reports one more step done each time it is called."""
    steps = itertools.count(1)

    def tick() -> None:
        if progress is not None:
            progress(next(steps), total)

    return tick


class Record:
    """Base of the result dataclasses. A property (a speed, a ratio, a verdict) is computed from the fields."""

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        properties = [name for name in dir(type(self)) if isinstance(getattr(type(self), name), property)]
        return {name: to_json(getattr(self, name)) for name in (*vars(self), *properties)}


def to_json(value: Any) -> Any:
    """The value as JSON has it: a `Record` as an object with its properties, any other dataclass by its fields."""
    if isinstance(value, Record):
        return value.to_dict()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {name: to_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(each) for each in value]
    return value.item() if isinstance(value, np.generic) else value


@dataclass(frozen=True)
class Timing(Record):
    """Seconds per call: the best repetition, which the machine disturbed least, and the median of all."""

    best_s: float
    median_s: float
    repetitions: int

    @classmethod
    def of(cls, samples_s: list[float]) -> Timing:
        """From the seconds of each repetition, at least one."""
        return cls(min(samples_s), median(samples_s), len(samples_s))

    def giga_per_s(self, amount: float, statistic: Statistic = "best_s") -> float:
        """Billions per second, when one call processes `amount`."""
        return amount / getattr(self, statistic) / 1e9


def ratio(
    amount: float, timing: Timing | None, of_amount: float, of: Timing | None, statistic: Statistic = "best_s"
) -> float | None:
    """An action's amount per second over another action's. None when either was not timed."""
    if timing is None or of is None:
        return None
    return timing.giga_per_s(amount, statistic) / of.giga_per_s(of_amount, statistic)


def seconds(action: Action, calls: int = 1) -> float:
    """Seconds per call, averaged over `calls` calls."""
    start = time.perf_counter()
    for _ in range(calls):
        action()
    return (time.perf_counter() - start) / calls


def take_turns(actions: dict[str, Action], repeats: int, budget_s: float = math.inf) -> dict[str, Timing]:
    """Time every action `repeats` times, one repetition of each in turn, so that all see the same machine.

    A first call warms up and decides how many calls make a repetition. An action that has used more than `budget_s`
    seconds gets no further repetitions; if its first call alone took as long, that call is the measurement.
    """
    samples: dict[str, list[float]] = {name: [] for name in actions}
    calls, used = {}, {}
    for name, action in actions.items():
        first = seconds(action)
        calls[name] = min(MAX_CALLS, max(1, math.ceil(REPETITION_S / max(first, 1e-9))))
        used[name] = first
        if first > budget_s:
            samples[name].append(first)
    for _ in range(repeats):
        for name, action in actions.items():
            if samples[name] and used[name] > budget_s:
                continue
            samples[name].append(seconds(action, calls[name]))
            used[name] += samples[name][-1] * calls[name]
    return {name: Timing.of(taken) for name, taken in samples.items()}
