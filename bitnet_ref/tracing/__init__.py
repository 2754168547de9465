"""Watching a model compute: recording every intermediate of a run, and comparing two runs op by op."""

from .compare import Comparison, OpResult, compare
from .record import Recorder, checked_candidates, checked_forward, first_non_finite, record

__all__ = [
    "Comparison",
    "OpResult",
    "Recorder",
    "checked_candidates",
    "checked_forward",
    "compare",
    "first_non_finite",
    "record",
]
