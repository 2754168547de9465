"""Time of an action: several repetitions, in turn with the others it is compared with."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Literal

REPETITION_S = 0.01  # a shorter action is called this long for one repetition: the clock and its noise then matter less
MOST_CALLS = 1000

Action = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the best repetition, which the machine disturbed least, and the median of all."""

    best_s: float
    median_s: float
    repetitions: int

    @classmethod
    def of(cls, samples_s: list[float]) -> Timing:
        """From the seconds of each repetition, at least one."""
        return cls(min(samples_s), median(samples_s), len(samples_s))

    def giga_per_s(self, amount: float) -> float:
        """Billions a second, at best, of what one call does `amount` of."""
        return amount / self.best_s / 1e9

    def giga_per_s_median(self, amount: float) -> float:
        """The same over the median time."""
        return amount / self.median_s / 1e9


def seconds(action: Action, calls: int = 1) -> float:
    """Seconds of one call, taken over that many."""
    start = time.perf_counter()
    for _ in range(calls):
        action()
    return (time.perf_counter() - start) / calls


def relative_speed(
    which: Literal["best_s", "median_s"], amount: float, timing: Timing | None, of_amount: float, of: Timing | None
) -> float | None:
    """An action's amount a second over that of another one, by that time of both; None where one was not timed."""
    if timing is None or of is None:
        return None
    return amount / getattr(timing, which) / (of_amount / getattr(of, which))


def take_turns(actions: dict[str, Action], repeats: int, budget_s: float = math.inf) -> dict[str, Timing]:
    """Time every action `repeats` times, a repetition of each in turn, so that all see the same machine.

    A first call warms up and says how many calls make a repetition. An action that has used more than `budget_s`
    seconds is left at what it has; where the first call alone took as long, that call is the measurement.
    """
    samples: dict[str, list[float]] = {name: [] for name in actions}
    calls, used = {}, {}
    for name, action in actions.items():
        first = seconds(action)
        calls[name] = min(MOST_CALLS, max(1, math.ceil(REPETITION_S / max(first, 1e-9))))
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
