"""transformers, llama.cpp and onnxruntime against the reference: each records a run, op by op, which is then compared.

`cross_engine(name, model, tokens)` runs every variant of an engine: its types, and the file formats it is given.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...api import Model, load
from ...backends import Backend
from ...errors import BitNetRefError, ConfigError
from ...formats.open import find_model
from ..compare import compare
from ..explain.replay import judge_trace
from ..opponents import Crossing, default_tokens, prepared_model
from ..report import evidence
from ..trace import Trace, record_to_file
from .engine import LLAMA_CPP, ONNXRUNTIME, TRANSFORMERS, Engine

# (folder for temporary files) -> model to compare with, job for the recorder
Prepared = tuple[Model, Mapping[str, Any]]
Judge = Callable[[Crossing, Model, Trace, Path], None]
ENGINES = {"transformers": TRANSFORMERS, "llama_cpp": LLAMA_CPP, "onnxruntime": ONNXRUNTIME}


@dataclass(frozen=True)
class Attempt:
    """One variant of an engine on one model: how its file is made, and how what it recorded is judged.

    judge: puts what it finds into the Crossing.   unavailable: why there is no point in trying.
    """

    opponent: str
    prepare: Callable[[Path], Prepared]
    judge: Judge
    unavailable: str | None = None


def cross_engine(
    name: str,
    source: str | os.PathLike[str],
    tokens: Sequence[int] | None = None,
    *,
    python: str | None = None,
    only: Sequence[str] | None = None,
) -> list[Crossing]:
    """Every variant of the engine "transformers", "llama_cpp" or "onnxruntime" on the model and the tokens.

    python: the interpreter that has the engine; None: this one.   only: names of variants, as in the result.
    Raises what loading the model raises, and ConfigError for an unknown engine.
    """
    return cross_engine_on(name, [(source, tokens)], python=python, only=only)[0]


def cross_engine_on(
    name: str,
    subjects: Sequence[tuple[str | os.PathLike[str], Sequence[int] | None]],
    *,
    python: str | None = None,
    only: Sequence[str] | None = None,
) -> list[list[Crossing]]:
    """The same for several models, each with its tokens: the engine is started once."""
    from . import (
        llama_cpp as llama_cpp_opponent,
    )
    from . import (
        onnxruntime as onnxruntime_opponent,
    )
    from . import (
        transformers as transformers_opponent,
    )

    attempts_of = {
        "transformers": transformers_opponent.attempts,
        "llama_cpp": llama_cpp_opponent.attempts,
        "onnxruntime": onnxruntime_opponent.attempts,
    }
    if name not in attempts_of:
        raise ConfigError(f"no engine is called {name!r}; there are: {', '.join(attempts_of)}")
    missing = ENGINES[name].missing(python)
    attempts: list[tuple[Attempt, Sequence[int]]] = []
    counts = []
    for source, tokens in subjects:
        path = find_model(source)
        ids = default_tokens(load(path, backend="numpy")) if tokens is None else [int(token) for token in tokens]
        found = [attempt for attempt in attempts_of[name](path) if only is None or attempt.opponent in only]
        attempts += [(attempt, ids) for attempt in found]
        counts.append(len(found))
    crossings = iter(_run(ENGINES[name], python, attempts, missing))
    results = [list(islice(crossings, count)) for count in counts]
    for result in results:
        lost = set(only or ()) - {crossing.opponent for crossing in result}
        result += [Crossing(variant, unavailable="no variant has this name") for variant in sorted(lost)]
    return results


def _run(
    engine: Engine, python: str | None, attempts: Sequence[tuple[Attempt, Sequence[int]]], missing: str | None
) -> list[Crossing]:
    """Prepare each attempt's file, record them all in one process, judge each."""
    crossings = [Crossing(attempt.opponent, unavailable=missing or attempt.unavailable) for attempt, _ in attempts]
    with tempfile.TemporaryDirectory(prefix="bitnet-ref-crossval-") as temporary:
        ready: list[tuple[Crossing, Attempt, Model, dict[str, Any]]] = []
        for i, (crossing, (attempt, tokens)) in enumerate(zip(crossings, attempts, strict=True)):
            if crossing.unavailable is not None:
                continue
            folder = Path(temporary) / str(i)
            folder.mkdir()
            try:
                model, job = attempt.prepare(folder)
            except BitNetRefError as error:
                crossing.unavailable = f"this model cannot be given to it: {error}".replace(f"{folder}{os.sep}", "")
                continue
            job = {**job, "tokens": list(tokens), "out": str(folder / "candidate.safetensors")}
            ready.append((crossing, attempt, model, job))
        said = engine.record([job for *_, job in ready], python) if ready else []
        for (crossing, attempt, model, job), failed in zip(ready, said, strict=True):
            crossing.failed = failed
            if failed is None:
                with Trace(job["out"]) as trace:
                    attempt.judge(crossing, model, trace, Path(job["out"]).parent)
    return crossings


def judge_by_contract(crossing: Crossing, model: Model, trace: Trace, folder: Path) -> None:
    """As `cross_trace` does: op by op on the run's own inputs, where it has integers to show, and as a whole."""
    reference = prepared_model(model, Backend("float32", model.backend.threads))
    if trace.carries_inputs and trace.engine_dtype == "float32":
        crossing.comparisons.append(judge_trace(reference, trace))
    truth = folder / "reference.safetensors"
    record_to_file(reference, trace.token_ids, truth)
    with Trace(truth) as right:
        free = compare(right, trace, model.config)
        crossing.comparisons.append(free)
        crossing.evidence = evidence(right, trace, free)


def until(trace: Mapping[str, NDArray], tokens: int) -> dict[str, NDArray]:
    """The first tokens of a run: no token depends on a later one."""
    out = {}
    for name in trace:
        array = np.asarray(trace[name])
        by_head = name.endswith(("hook_pattern", "hook_attn_scores"))
        out[name] = array[:, :tokens, :tokens] if by_head else array[:tokens]
    return out
