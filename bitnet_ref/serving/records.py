"""What an engine tells of itself: its steps, and how far its requests are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class StepPart(NamedTuple):
    """One request's part of a step of an engine. kind: "prefill" or "decode"."""

    request_id: int
    slot: int
    kind: str
    tokens: int


@dataclass(frozen=True)
class StepRecord:
    """One step of an engine. `start_s`: by `time.perf_counter`."""

    number: int
    start_s: float
    seconds: float
    parts: tuple[StepPart, ...]
    waiting: int  # requests that had not started


@dataclass(frozen=True)
class RequestProgress:
    """The progress of a request in an engine."""

    request_id: int
    state: str  # "waiting", "running", "paused"
    prompt_tokens: int
    generated_tokens: int  # of all its n continuations
    age_s: float
    newest_text: str  # of its first continuation
