"""Watching a model compute: recording every intermediate of a run."""

from .record import Recorder, first_non_finite, record

__all__ = ["Recorder", "first_non_finite", "record"]
