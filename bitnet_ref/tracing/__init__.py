"""Watching a model compute: recording every intermediate of a run."""

from .record import Recorder, checked_candidates, checked_forward, first_non_finite, record

__all__ = ["Recorder", "checked_candidates", "checked_forward", "first_non_finite", "record"]
