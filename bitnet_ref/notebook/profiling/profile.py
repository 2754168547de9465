"""`Profile`: what `Model.profile` gives. It watches the model while it is entered, and says where the time went."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .timed import Step, TimedBackend, timed
from .tree import PHASES, OpTime, Phase, Places

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ...api import Model

KEPT_CALLS = 100_000  # of the first steps, for `save`: some 15 MB
MOST_PENDING = 20_000  # calls that wait to be added up
_lock = threading.Lock()  # of who watches which model


class Profile:
    """Where the time of everything that a model computes inside a `with` went.

        with model.profile() as profile:
            model.generate("Once upon a time")
        print(profile)

    The model's backend is a timed copy meanwhile, so everything is seen that runs on this model: streams, chat
    sessions, other threads' calls, an engine's. Profiles may be nested or overlap, and entered again, which goes on
    adding. A step that was under way when the profile was entered or left is not counted. With several threads at work
    their steps overlap, and `forward_s` may exceed `wall_s`.

    On a device every operation is waited for, and steps are computed, not replayed from a record.

    Watching costs some 3 us an operation, which counts as time between the operations: measured, 0.3 ms of a decoding
    step of storyteller's 1.7 (74 operations), and as little of a large model's.

    `phases` maps "prefill", "decode", "mixed" and "other" (see `timed.read_attention`) to what was done of each; `ops`
    are the operations of all of them. `outcome` is what `model.profile(prompt)` generated.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.outcome: Any = None
        self.profiler_s = 0.0  # that the profile itself took between the steps
        self.threads: list[int] = []  # those that ran steps, by threading.get_ident()
        self.backend = model.backend.name
        self._places = Places(model.weights)
        self._lock = threading.Lock()
        self._phases: dict[str, Phase] = {}
        self._kept: list[Step] = []
        self._calls = 0
        self._pending: list[Step] = []  # not in the tree yet: that is done when somebody looks, not between the steps
        self._pending_calls = 0
        self._entered, self._started_s, self._wall_s = 0, 0.0, 0.0

    # -- watching ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Profile:
        with _lock:
            self._entered += 1
            if self._entered == 1:
                backend: Any = self.model.backend
                if not isinstance(backend, TimedBackend):
                    backend = self.model.backend = timed(backend)
                backend.watch.sinks = (*backend.watch.sinks, self)
                self._started_s = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        with _lock:
            self._entered -= 1
            if self._entered:
                return
            self._wall_s += time.perf_counter() - self._started_s
            backend: Any = self.model.backend
            backend.watch.sinks = tuple(sink for sink in backend.watch.sinks if sink is not self)
            if not backend.watch.sinks:
                self.model.backend = backend.watch.inner

    def take(self, step: Step) -> None:
        """A step is over (called by the timed backend, on the step's thread)."""
        started_s = time.perf_counter()
        with self._lock:
            if not self._entered or step.start_s < self._started_s:
                return
            if step.thread not in self.threads:
                self.threads.append(step.thread)
            self._pending.append(step)
            self._pending_calls += len(step.raw)
            if self._pending_calls > MOST_PENDING:
                self._add_up()
            self.profiler_s += time.perf_counter() - started_s

    def _add_up(self) -> None:
        """What is pending goes into the tree. The caller holds the lock."""
        for step in self._pending:
            phase = self._phases.setdefault(step.kind, Phase(step.kind))
            phase.tokens += step.tokens
            for span in self._places.spans(step):
                node = phase.forward
                for name in span.path[1:]:
                    node = node.child(name)
                node.calls += 1
                node.total_s += span.end_s - span.start_s
                node.nbytes += span.nbytes
            if self._calls + len(step.raw) <= KEPT_CALLS:
                self._kept.append(step)
            self._calls += len(step.raw)
        self._pending, self._pending_calls = [], 0

    # -- what it found -------------------------------------------------------------------------------------------------

    @property
    def phases(self) -> dict[str, Phase]:
        """By kind, what was done of each."""
        with self._lock:
            self._add_up()
            return self._phases

    @property
    def steps(self) -> list[Step]:
        """The first ones, while they have KEPT_CALLS calls at most."""
        with self._lock:
            self._add_up()
            return self._kept

    @property
    def calls(self) -> int:
        """Of operations, in all steps."""
        with self._lock:
            self._add_up()
            return self._calls

    @property
    def wall_s(self) -> float:
        """Time inside the `with`, so far, less what the profile itself took between the steps."""
        running = time.perf_counter() - self._started_s if self._entered else 0.0
        return self._wall_s + running - self.profiler_s

    @property
    def forward_s(self) -> float:
        """Time of all steps, those of all threads together."""
        return sum(phase.forward.total_s for phase in self.phases.values())

    @property
    def outside_s(self) -> float:
        """Time in no step: choosing tokens, tokenizer, Python, waiting. 0 where the steps of threads overlap more."""
        return max(0.0, self.wall_s - self.forward_s)

    @property
    def ops(self) -> list[OpTime]:
        """The operations that the model's text asks for, of all phases, slowest first."""
        found: dict[str, OpTime] = {}
        for phase in self.phases.values():
            for name, op in phase.ops().items():
                found.setdefault(name, OpTime(name)).add(op)
        return sorted(found.values(), key=lambda op: -op.total_s)

    def in_order(self) -> list[Phase]:
        """The phases that there were."""
        phases = self.phases
        return [phases[kind] for kind in PHASES if kind in phases]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values; times in seconds."""
        names = ("backend", "wall_s", "forward_s", "outside_s", "profiler_s", "calls")
        return {
            **{name: getattr(self, name) for name in names},
            "threads": len(self.threads),
            "phases": [phase.to_dict() for phase in self.in_order()],
            "ops": [op.to_dict() for op in self.ops],
        }

    def table(self, *, blocks: bool = False) -> Any:
        """A rich table of the phases, the parts of the model and their operations. blocks: each block for itself."""
        from .report import table

        return table(self, blocks)

    def __str__(self) -> str:
        from .report import as_text

        return as_text(self)

    def __repr__(self) -> str:
        return f"<bitnet_ref.Profile of {self.wall_s:.3f} s, {self.forward_s:.3f} s of them in the model>"

    def _repr_html_(self) -> str:
        from .report import as_html

        return as_html(self)

    def plot(self) -> Figure:
        """A flame-like figure of each phase: what lies under a bar is inside of it, and widths are times. Needs
        matplotlib (`pip install 'bitnet-ref[notebooks]'`)."""
        from ..figures import icicles

        return icicles([(title(phase), phase.merged()) for phase in self.in_order()])

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the first KEPT_CALLS calls as a Chrome trace, which Perfetto and speedscope open. The file is whole
        or not there."""
        from .export import write_trace

        return write_trace(self, Path(path))


def title(phase: Phase) -> str:
    """ "decode: 31 steps, 31 tokens, 1.52 ms a token" """
    steps = phase.forward.calls
    words = f"{phase.kind}: {steps} step{'s' if steps != 1 else ''}"
    if not phase.tokens:
        return words
    each = phase.forward.total_s / phase.tokens * 1e3
    return f"{words}, {phase.tokens} token{'s' if phase.tokens != 1 else ''}, {each:.3g} ms a token"
