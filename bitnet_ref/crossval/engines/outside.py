"""transformers, llama.cpp and onnxruntime against the reference: each records a run op by op, which is compared."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...api import Model, load
from ...errors import BitNetRefError, ConfigError
from ...formats.open import find_model
from ...reference.config import ModelConfig
from ..compare import View, compare
from ..opponents import default_tokens
from ..report import Crossing, FurtherRun
from ..runs import FEW_NAMES, plan
from ..trace import Trace, TraceRun
from ..types import StrPath, Tokens
from . import llama_cpp, onnxruntime, transformers
from .engine import Attempt, ExternalEngine, Outcome

_MODULES = {"transformers": transformers, "llama_cpp": llama_cpp, "onnxruntime": onnxruntime}
ENGINES: dict[str, ExternalEngine] = {name: module.ENGINE for name, module in _MODULES.items()}


def cross_engine(
    name: str,
    source: StrPath,
    tokens: Tokens | None = None,
    *,
    python: str | None = None,
    only: Sequence[str] | None = None,
    long: Tokens | None = None,
    runs: Sequence[str] = (),
) -> list[Crossing]:
    """Every variant of the engine "transformers", "llama_cpp" or "onnxruntime" (dtypes, file formats) on one model.

    python: the interpreter that has the engine; None: this one.   only: names of variants, as in the result.
    long: a longer run, as of `long_tokens`, of which a few tensors are recorded.
    runs: further ones, in several calls or of several sequences, of `runs.RUNS`.
    Raises what loading the model raises, and ConfigError for an unknown engine.
    """
    if name not in ENGINES:
        raise ConfigError(f"no engine is called {name!r}; there are: {', '.join(ENGINES)}")
    path = find_model(source)
    ids = default_tokens(load(path, backend="numpy")) if tokens is None else [int(token) for token in tokens]
    attempts = [attempt for attempt in _MODULES[name].attempts(path) if only is None or attempt.opponent in only]
    crossings = _run_attempts(ENGINES[name], python, attempts, ids, long, runs)
    unknown = set(only or ()) - {crossing.opponent for crossing in crossings}
    return crossings + [Crossing(variant, unavailable="no variant has this name") for variant in sorted(unknown)]


def _run_attempts(
    engine: ExternalEngine,
    python: str | None,
    attempts: Sequence[Attempt],
    tokens: Tokens,
    long: Tokens | None,
    runs: Sequence[str],
) -> list[Crossing]:
    """Prepare each attempt's file, record them all in one process, judge each."""
    missing = engine.missing(python)
    crossings = [Crossing(attempt.opponent, unavailable=missing or attempt.unavailable) for attempt in attempts]
    with tempfile.TemporaryDirectory(prefix="bitnet-ref-crossval-") as temporary:
        ready: list[tuple[Crossing, Attempt, Model, dict[str, Any]]] = []
        further: dict[str, FurtherRun] = {}  # by the path of the trace
        for i, (crossing, attempt) in enumerate(zip(crossings, attempts, strict=True)):
            if crossing.unavailable is not None:
                continue
            folder = Path(temporary) / str(i)
            folder.mkdir()
            try:
                model, job = attempt.prepare(folder)
            except BitNetRefError as error:
                reason = f"this model cannot be written for the engine: {error}"
                crossing.unavailable = reason.replace(f"{folder}{os.sep}", "")
                continue
            job = {**job, "tokens": list(tokens), "out": str(folder / "candidate.safetensors")}
            few = {**job, "names": [*FEW_NAMES, *job.get("long_names", ())]}
            ready.append((crossing, attempt, model, job))
            if long is not None:
                out = str(folder / "long.safetensors")
                ready.append((crossing, attempt, model, {**few, "tokens": list(long), "out": out}))
            for each in plan(model.config, tokens, [name for name in runs if name not in ("short", "long")]):
                out = str(folder / f"{each.name}.safetensors")
                further[out] = FurtherRun(each.name, len(each.tokens), each.in_words)
                crossing.further.append(further[out])
                ready.append((crossing, attempt, model, {**few, **each.job, "out": out}))
        outcomes = engine.record([job for *_, job in ready], python) if ready else []
        for (crossing, attempt, model, job), outcome in zip(ready, outcomes, strict=True):
            if job["out"] in further:
                _judge_further(crossing, further[job["out"]], attempt, model, job["out"], outcome)
                continue
            is_long = "names" in job
            crossing.unavailable = crossing.unavailable or outcome.unavailable
            if outcome.failed is not None:
                of_run = f"with {len(job['tokens'])} tokens: " if is_long else ""
                crossing.failed = crossing.failed or f"{of_run}{outcome.failed}"
            if outcome != Outcome():
                continue
            judged = Crossing(crossing.opponent) if is_long else crossing
            with Trace(job["out"]) as trace:
                attempt.judge(judged, model, trace)
                _explain(crossing, judged, attempt, model, trace)
            if is_long:
                crossing.long = judged.comparisons
                for comparison in crossing.long:
                    comparison.missing = []  # few tensors are recorded
        for path, run in further.items():
            short = Path(path).with_name("candidate.safetensors")
            if run.comparisons and short.exists():
                run.same_as_short = _are_the_same(model.config, short, path)
    return crossings


def _explain(crossing: Crossing, judged: Crossing, attempt: Attempt, model: Model, trace: TraceRun) -> None:
    """Look for the causes of the first run that differs."""
    if attempt.explain is not None and judged.comparisons and not crossing.causes:
        crossing.causes = attempt.explain(judged, model, trace)


def _judge_further(
    crossing: Crossing, run: FurtherRun, attempt: Attempt, model: Model, path: str, outcome: Outcome
) -> None:
    """Compare each sequence of a further run."""
    run.unavailable, run.failed = outcome.unavailable, outcome.failed
    if outcome != Outcome():
        return
    with Trace(path) as trace:
        wrong = []
        for i, sequence in enumerate(trace.runs()):
            judged = Crossing(run.name)
            attempt.judge(judged, model, sequence)
            _explain(crossing, judged, attempt, model, sequence)
            if not all(comparison.agrees for comparison in judged.comparisons):
                wrong.append(i + 1)
            for comparison in judged.comparisons:
                comparison.missing = []  # few tensors are recorded
            run.comparisons += judged.comparisons
        if wrong and len(trace.sequences) > 1:
            run.place = f"in sequence {', '.join(map(str, wrong))} of {len(trace.sequences)}: "


def _are_the_same(config: ModelConfig, short: Path, other: str) -> bool | None:
    """Whether two runs of one engine have the same tensors, which needs no reference; None for other tokens."""
    with Trace(short) as one, Trace(other) as two:
        if one.token_ids != two.token_ids or len(two.sequences) > 1:
            return None
        shared = View(two, set(one))
        return compare(one, shared, config, one.token_ids, own_engine=False, engine_dtype=one.engine_dtype).agrees
