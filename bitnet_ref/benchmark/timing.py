"""Results as JSON, and what an action takes: wall time, processor time and energy, in turn with what it is compared to.

Wall time is what a user waits for. On a machine that others use too it scatters, and the ratio of two wall times with
it. Processor time is that of all threads of this process. It scatters much less there, so versions of a kernel are
compared by it. `Watch` says whether the machine was quiet.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from .energy import EnergyMeter

REPETITION_S = 0.01  # a shorter action is called several times per repetition, which evens out the clock's noise
MAX_CALLS = 1000
PROC_STAT = Path("/proc/stat")
DISTURBED = 0.1  # a share of the machine that others keep busy, or of the time that a process waits for a processor

Action = Callable[[], object]
Statistic = Literal["best_s", "median_s"]
T = TypeVar("T")


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


# -- one action --------------------------------------------------------------------------------------------------------


class Sample(NamedTuple):
    """What one call took."""

    wall_s: float
    processor_s: float | None = None  # of all threads of this process; None: not known
    energy_j: float | None = None  # None: it cannot be read here


@dataclass(frozen=True)
class Timing(Record):
    """Seconds per call: the best repetition, which the machine disturbed least, and the median of all.

    Processor time and energy are means: the system counts both in ticks of about a millisecond, which a mean evens out.
    """

    best_s: float
    median_s: float
    repetitions: int
    processor_s: float | None = None
    energy_j: float | None = None

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Timing:
        """From each repetition, at least one."""
        wall_s = [sample.wall_s for sample in samples]
        processor_s = mean_of_known([sample.processor_s for sample in samples])
        energy_j = mean_of_known([sample.energy_j for sample in samples])
        return cls(min(wall_s), median(wall_s), len(samples), processor_s, energy_j)

    def per_s(self, amount: float, statistic: Statistic = "best_s") -> float:
        """How much per second, when one call processes `amount`."""
        seconds: float = getattr(self, statistic)
        return amount / seconds

    def giga_per_s(self, amount: float, statistic: Statistic = "best_s") -> float:
        return self.per_s(amount, statistic) / 1e9


def mean_of_known(values: Sequence[float | None]) -> float | None:
    """None if one of them is not known."""
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


def ratio(
    amount: float, timing: Timing | None, of_amount: float, of: Timing | None, statistic: Statistic = "best_s"
) -> float | None:
    """An action's amount per second over another action's. None when either was not timed."""
    if timing is None or of is None:
        return None
    return timing.per_s(amount, statistic) / of.per_s(of_amount, statistic)


class Stopwatch:
    """Measures what runs between its start and `lap`."""

    def __init__(self, energy: EnergyMeter | None = None) -> None:
        """energy: by default the counters of this machine."""
        self.energy = EnergyMeter() if energy is None else energy
        self.start()

    def start(self) -> None:
        self._energy_uj = self.energy.read_uj()
        self._processor_s = time.process_time()
        self._wall_s = time.perf_counter()

    def lap(self, calls: int = 1) -> Sample:
        """Since the last start, for each of so many calls."""
        wall_s = time.perf_counter() - self._wall_s
        processor_s = time.process_time() - self._processor_s
        energy_j = self.energy.joules_since(self._energy_uj)
        return Sample(wall_s / calls, processor_s / calls, None if energy_j is None else energy_j / calls)

    def time(self, action: Callable[..., T], *args: Any) -> tuple[T, Sample]:
        """Call it with the arguments.   -> its result, what it took"""
        self.start()
        result = action(*args)
        return result, self.lap()

    def repeat(self, action: Action, calls: int = 1) -> Sample:
        """The mean of so many calls."""
        self.start()
        for _ in range(calls):
            action()
        return self.lap(calls)


def take_turns(actions: dict[str, Action], repeats: int, budget_s: float = math.inf) -> dict[str, Timing]:
    """Time every action `repeats` times, one repetition of each in turn, so that all see the same machine.

    A first call warms up and decides how many calls make a repetition. An action that has used more than `budget_s`
    seconds gets no further repetitions; if its first call alone took as long, that call is the measurement.
    """
    stopwatch = Stopwatch()
    samples: dict[str, list[Sample]] = {name: [] for name in actions}
    calls, used_s = {}, {}
    for name, action in actions.items():
        first = stopwatch.repeat(action)
        calls[name] = min(MAX_CALLS, max(1, math.ceil(REPETITION_S / max(first.wall_s, 1e-9))))
        used_s[name] = first.wall_s
        if first.wall_s > budget_s:
            samples[name].append(first)
    for _ in range(repeats):
        for name, action in actions.items():
            if samples[name] and used_s[name] > budget_s:
                continue
            sample = stopwatch.repeat(action, calls[name])
            samples[name].append(sample)
            used_s[name] += sample.wall_s * calls[name]
    return {name: Timing.of(taken) for name, taken in samples.items()}


# -- the machine -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Conditions(Record):
    """What the machine did besides, during a whole measurement."""

    wall_s: float
    processor_s: float  # of all threads of this process
    processors: int  # of the machine
    others: float  # processors that others kept busy, on average: programs, and guests of the same host
    waited: float | None  # share of the time that this process had no processor; None: it waits by itself
    why_no_energy: str  # "" where energy was measured

    @property
    def quiet(self) -> bool:
        """Whether wall times can be compared with those of another run."""
        return self.others < DISTURBED * self.processors and (self.waited or 0) < DISTURBED


class Watch:
    """Follows the machine from its start to `conditions`."""

    def __init__(self, stat: Path = PROC_STAT) -> None:
        self._stat = stat
        self._load = os.getloadavg()[0]
        self._busy_s = busy_seconds(stat)
        self._stopwatch = Stopwatch()

    def conditions(self, computing: bool = True) -> Conditions:
        """computing: whether the process has had something to compute all the time.

        Without /proc/stat, others are the load average at the start.
        """
        taken = self._stopwatch.lap()
        wall_s, processor_s = taken.wall_s, taken.processor_s or 0.0
        others = self._load
        if self._busy_s is not None and (busy_s := busy_seconds(self._stat)) is not None:
            others = max(0.0, (busy_s - self._busy_s - processor_s) / wall_s)
        waited = max(0.0, 1 - processor_s / wall_s) if computing else None
        why_no_energy = self._stopwatch.energy.why_not
        return Conditions(wall_s, processor_s, os.cpu_count() or 1, others, waited, why_no_energy)


def busy_seconds(stat: Path) -> float | None:
    """Seconds that all processors together have been busy, or were taken by the host. None without that file."""
    try:
        words = stat.read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, words[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
