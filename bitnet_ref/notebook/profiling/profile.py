"""`Profile`, which `Model.profile` returns: it watches a model while it is entered, and tells where the time went."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...backends.cpu.weights import strip_uses
from ...backends.loaded import LoadedModel
from ...backends.observe import PATHS
from ...errors import GenerationError
from ...system.forks import ForkLock
from ..figures import Figure
from .report import TableRow, as_html, as_table, as_text, icicles, table_rows, write_trace
from .timed import StepTimer
from .tree import KINDS, OpTime, Phase, Step

KEPT_CALLS = 100_000  # of the first steps, for `save`: some 15 MB
_lock = ForkLock()  # guards which profiles watch which model


class Profile:
    """Where the time went of everything that a model computes inside a `with`.

        with model.profile() as profile:
            model.generate("Once upon a time")
        print(profile)

    path: "ops" computes each operation by itself, so that all are seen; `generate` without a profile is faster where
    its backend fuses operations. "blocks" computes the two blocks of each layer as the backend fuses them, and
    "replayed" times each step as `generate` computes it, in one piece.

    Every step that runs on this model is seen (each call of `LoadedModel.run`): those of streams, chat sessions, other
    threads and engines. Profiles of one path may be nested or overlap, and be entered again to go on adding. A step
    that was under way when the profile was entered or left is not counted. Steps of several threads overlap, so
    `forward_s` may exceed `wall_s`. On a device every operation is waited for. Watching costs some 2 to 3 us per
    operation, which counts as time between the operations.

    `phases` maps "prefill", "decode" and "mixed" to what the steps of each kind took; `ops` are the operations of all
    of them. `outcome` is what `model.profile(prompt)` generated.
    """

    def __init__(self, model: LoadedModel, path: str = "ops") -> None:
        """Raises GenerationError for an unknown path."""
        if path not in PATHS:
            raise GenerationError(f"expected {', '.join(PATHS)}, got {path!r}", field="path")
        self.model, self.path = model, path
        self.backend = model.backend.name
        self.outcome: Any = None
        self.profiler_s = 0.0  # that the profile itself took between the steps
        self.threads: list[int] = []  # those that ran steps, by threading.get_ident()
        self.phases: dict[str, Phase] = {}
        self.steps: list[Step] = []  # the first ones, with at most KEPT_CALLS calls
        self.calls = 0  # of operations, in all steps
        self._lock = threading.Lock()
        self._entered, self._started_s, self._wall_s = 0, 0.0, 0.0
        self._uses = {several: strip_uses(model.weights, several) for several in (False, True)}

    def __enter__(self) -> Profile:
        """Raises GenerationError while a profile of another path is entered on the same model."""
        with _lock:
            timer = self.model.watcher
            if not isinstance(timer, StepTimer):
                timer = self.model.watcher = StepTimer(self.path)
            elif timer.path != self.path:
                raise GenerationError(
                    f"this model is being profiled by path {timer.path!r}; leave that one first", field="path"
                )
            self._entered += 1
            if self._entered == 1:
                timer.sinks = (*timer.sinks, self.add)
                self._started_s = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        with _lock:
            self._entered -= 1
            if self._entered:
                return
            self._wall_s += time.perf_counter() - self._started_s
            timer = self.model.watcher
            if isinstance(timer, StepTimer):
                timer.sinks = tuple(sink for sink in timer.sinks if sink != self.add)
                if not timer.sinks:
                    self.model.watcher = None

    def add(self, step: Step, forward: OpTime) -> None:
        """Count a step and add the tree of its times. Called on the step's thread."""
        started_s = time.perf_counter()
        with self._lock:
            if not self._entered or step.start_s < self._started_s:
                return
            if step.thread not in self.threads:
                self.threads.append(step.thread)
            phase = self.phases.setdefault(step.kind, Phase(step.kind))
            phase.tokens += step.tokens
            phase.forward.add(forward)
            if self.calls + len(step.spans) <= KEPT_CALLS:
                self.steps.append(step)
            self.calls += len(step.spans)
            self.profiler_s += time.perf_counter() - started_s

    @property
    def wall_s(self) -> float:
        """Time inside the `with`, so far, without what the profile itself took between the steps."""
        running = time.perf_counter() - self._started_s if self._entered else 0.0
        return self._wall_s + running - self.profiler_s

    @property
    def forward_s(self) -> float:
        """Time of all steps, those of all threads together."""
        return sum(phase.forward.total_s for phase in self.phases.values())

    @property
    def outside_s(self) -> float:
        """Time outside all steps: choosing tokens, tokenizer, Python, waiting. 0 if steps of threads overlap more."""
        return max(0.0, self.wall_s - self.forward_s)

    @property
    def ops(self) -> list[OpTime]:
        """The operations of the model's text, of all phases and places, slowest first."""
        ops: dict[str, OpTime] = {}
        for phase in self.in_order():
            for name, op in phase.ops().items():
                ops.setdefault(name, OpTime(name)).add(op)
        return sorted(ops.values(), key=lambda op: -op.total_s)

    @property
    def skipped(self) -> dict[str, float]:
        """The share of each linear's rows or columns that met a zero and was not read: see `kernels/cpu/strips.h`.

        Since the profile was made, of steps with one token. {} where nothing is skipped.
        """
        return self._skipped(several=False)

    @property
    def not_multiplied(self) -> dict[str, float]:
        """The same of steps with several tokens, each of which is multiplied with what it needs itself."""
        return self._skipped(several=True)

    def _skipped(self, several: bool) -> dict[str, float]:
        uses, before = strip_uses(self.model.weights, several), self._uses[several]
        since = {name: use.since(before[name]) for name, use in uses.items() if name in before}
        return {name: use.skipped for name, use in since.items() if use.total}

    def in_order(self) -> list[Phase]:
        with self._lock:
            return [self.phases[kind] for kind in KINDS if kind in self.phases]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values; times in seconds."""
        names = ("backend", "path", "wall_s", "forward_s", "outside_s", "profiler_s", "calls")
        return {
            **{name: getattr(self, name) for name in names},
            "threads": len(self.threads),
            "skipped": self.skipped,
            "not_multiplied": self.not_multiplied,
            "phases": [phase.to_dict() for phase in self.in_order()],
            "ops": [op.to_dict() for op in self.ops],
        }

    @property
    def caption(self) -> str:
        """The heading of the tables: the backend, the path, the time."""
        words = f"{self.backend}, path {self.path!r}, {self.wall_s:.3f} s"
        fastest = self.model.backend.paths[-1]
        if fastest not in ("ops", self.path):
            words += f" (generate runs the path {fastest!r})"
        for skipped, verb in ((self.skipped, "read"), (self.not_multiplied, "multiplied")):
            for linear in ("up_proj", "down_proj"):
                if shares := [share for name, share in skipped.items() if name.endswith(linear)]:
                    words += f", {linear} {min(shares):.0%} to {max(shares):.0%} not {verb}"
        return words + (f", steps of {len(self.threads)} threads, which overlap" if len(self.threads) > 1 else "")

    def _rows(self) -> Iterator[TableRow]:
        return table_rows(self.in_order(), self.wall_s, self.outside_s)

    def table(self) -> Any:
        """A rich table of the phases, the parts of the model and their operations."""
        return as_table(self._rows())

    def __str__(self) -> str:
        return as_text(self.caption, self._rows())

    def __repr__(self) -> str:
        return f"<bitnet_ref.Profile of {self.wall_s:.3f} s, {self.forward_s:.3f} s of them in the model>"

    def _repr_html_(self) -> str:
        return as_html(self.caption, self._rows())

    def plot(self) -> Figure:
        """A figure of each phase like a flame graph from the top: what lies under a bar is part of it, and widths are
        times. Needs matplotlib (`pip install 'bitnet-ref[notebooks]'`)."""
        return icicles([(phase.title, phase.merged()) for phase in self.in_order()])

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the first KEPT_CALLS calls as a Chrome trace, which Perfetto and speedscope open."""
        calls = sum(len(step.spans) for step in self.steps)
        about = {"backend": self.backend, "path": self.path, "calls": self.calls, "calls_kept": calls}
        return write_trace(self.steps, about, Path(path))
