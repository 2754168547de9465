"""An engine of somebody else: run in an interpreter that has it, recorded as a trace, and judged here.

A recorder (see `recorders`) runs the engine and writes the trace. So an engine's packages need not be installed beside
this one, and an engine that crashes does not take this process with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ...api import Model
from ..compare import Comparison, View
from ..explain.diagnose import Diagnoses, diagnose
from ..explain.replay import judge_trace
from ..opponents import compare_free, record_reference, reference_of
from ..report import Crossing
from ..trace import TraceRun

_RECORDERS = Path(__file__).parent / "recorders"
TIMEOUT_S = 600.0
_TAIL = 300  # characters of an engine's error output that are shown

Prepared = tuple[Model, Mapping[str, Any]]  # the model to compare with, the job for the recorder
Judge = Callable[[Crossing, Model, TraceRun], None]
Explain = Callable[[Crossing, Model, TraceRun], Diagnoses]
_CAUSES_S = 60.0  # of processor time, for the cause of a difference


class Outcome(NamedTuple):
    """What became of a recorder's job: why it failed, or why the engine has nothing for this model.

    timed_out: it failed because its time was over.
    """

    failed: str | None = None
    unavailable: str | None = None
    timed_out: bool = False


@dataclass(frozen=True)
class ExternalEngine:
    """An engine: its name, the packages that its recorder imports, and what pip installs them."""

    name: str
    modules: tuple[str, ...]
    pip: str

    def missing(self, python: str | None = None) -> str | None:
        """Why the engine cannot run in that interpreter (None: this one), or None when it can."""
        absent = "[m for m in sys.argv[1:] if u.find_spec(m) is None]"
        code = f"import importlib.util as u, json, sys; print(json.dumps({absent}))"
        try:
            done = _run([python or sys.executable, "-c", code, *self.modules], 60)
        except (OSError, subprocess.TimeoutExpired) as problem:
            return f"{python or sys.executable} does not run as a Python interpreter: {problem}"
        if done.returncode != 0:
            return f"{python or sys.executable} does not run as a Python interpreter: {done.stderr.strip()[-_TAIL:]}"
        missing = json.loads(done.stdout.splitlines()[-1])
        if not missing:
            return None
        place = "" if python is None else f" in {python}"
        install = f"pip install {self.pip}, or name an interpreter that has it with --python"
        return f"{', '.join(missing)} not installed{place}: {install}"

    def record(
        self, jobs: Sequence[Mapping[str, Any]], python: str | None = None, timeout_s: float = TIMEOUT_S
    ) -> list[Outcome]:
        """Run the recorder on the jobs, for `timeout_s` seconds at most; each writes its trace to its "out".

        When the engine ends before its last job, its error output is the reason for the jobs that are left.
        """
        script, timed_out = _RECORDERS / f"record_{self.name}.py", False
        try:
            done = _run([python or sys.executable, str(script)], timeout_s, json.dumps([dict(job) for job in jobs]))
            printed, errors = done.stdout, " ".join(done.stderr.split())[-_TAIL:] or "without an error message"
            end = f"{self.name} ended with status {done.returncode}: {errors}"
        except subprocess.TimeoutExpired:
            printed, end, timed_out = "", f"{self.name} had not finished after {timeout_s:g} s", True
        outcomes = [Outcome(**json.loads(line)) for line in printed.splitlines() if line.startswith('{"failed":')]
        return [outcomes[i] if i < len(outcomes) else Outcome(end, None, timed_out) for i in range(len(jobs))]


def _run(command: list[str], timeout: float, text: str = "") -> subprocess.CompletedProcess[str]:
    # Another interpreter must not import this one's packages.
    other = command[0] != sys.executable
    env = {key: value for key, value in os.environ.items() if not (other and key in ("PYTHONPATH", "PYTHONHOME"))}
    return subprocess.run(
        command, input=text, capture_output=True, text=True, errors="replace", timeout=timeout, env=env, check=False
    )


@dataclass(frozen=True)
class Attempt:
    """One variant of an engine on one model.

    prepare: writes the engine's file into a folder.   judge: adds its comparisons of the trace to the Crossing.
    unavailable: why there is no point in trying.   explain: the causes of a difference that `judge` has found.
    """

    opponent: str
    prepare: Callable[[Path], Prepared]
    judge: Judge
    unavailable: str | None = None
    explain: Explain | None = None


def search_causes(reference: Model, run: View, comparison: Comparison) -> Diagnoses:
    """The causes of a run's difference that can be found in a minute."""
    if comparison.agrees or comparison.problem is not None:
        return Diagnoses()
    return diagnose(reference, run.token_ids, run, comparison, budget_s=_CAUSES_S)


def explain_by_contract(crossing: Crossing, model: Model, trace: TraceRun) -> Diagnoses:
    """The causes of the difference that `judge_by_contract` has found last."""
    return search_causes(reference_of(model), View(trace), crossing.comparisons[-1])


def judge_by_contract(crossing: Crossing, model: Model, trace: TraceRun) -> None:
    """As `cross_trace`: op by op on the run's own inputs, where it recorded integers, and free-running."""
    reference = reference_of(model)
    if trace.carries_inputs and trace.engine_dtype == "float32":
        crossing.comparisons.append(judge_trace(reference, trace))
    with record_reference(reference, trace.token_ids) as right:
        compare_free(crossing, reference, right, trace, causes=False)
