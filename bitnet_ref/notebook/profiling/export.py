"""A profile's calls as a Chrome trace: https://ui.perfetto.dev and https://www.speedscope.app open it.

Format: JSON, {"traceEvents": [...]}, one "X" (complete) event for each stretch of time, `ts` and `dur` in microseconds
(the Trace Event Format of the Chromium project).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...system.atomic import atomic_path
from .tree import Places

if TYPE_CHECKING:
    from .profile import Profile


def trace_events(profile: Profile) -> list[dict[str, Any]]:
    """The steps that were kept, from the beginning of the first one on, a thread in each row."""
    places = Places(profile.model.weights)
    zero = min((step.start_s for step in profile.steps), default=0.0)
    rows = {thread: number for number, thread in enumerate(profile.threads)}
    events = []
    for step in profile.steps:
        for span in sorted(places.spans(step), key=lambda span: (span.start_s, len(span.path))):
            facts: dict[str, Any] = {"bytes": span.nbytes} if span.nbytes else {}
            if len(span.path) == 1:
                facts = {"tokens": step.tokens}
            events.append(
                {
                    "name": span.path[-1] if len(span.path) > 1 else step.kind,
                    "cat": step.kind,
                    "ph": "X",
                    "ts": round((span.start_s - zero) * 1e6, 3),
                    "dur": round((span.end_s - span.start_s) * 1e6, 3),
                    "pid": 0,
                    "tid": rows[step.thread],
                    "args": facts,
                }
            )
    return events


def write_trace(profile: Profile, path: Path) -> Path:
    """All events into one file, which is there when it is whole."""
    events = trace_events(profile)
    kept = sum(len(step.raw) for step in profile.steps)
    about = {"backend": profile.backend, "calls": profile.calls, "calls_kept": kept}
    with atomic_path(path) as temporary:
        text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about})
        temporary.write_text(text, encoding="utf-8")
    return path
