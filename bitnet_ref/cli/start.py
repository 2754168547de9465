"""Ctrl-C while the modules of a command are imported. This one imports nothing that takes time."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what `signal` is made of, without its enumerations
import os

TYPE_CHECKING = False  # as type checkers read it; `typing` takes time
if TYPE_CHECKING:
    from types import FrameType

INTERRUPTED = 130  # the exit code


class QuietStart:
    """Within, Ctrl-C ends the program without a traceback."""

    def __enter__(self) -> None:
        is_usual = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
        try:
            self._before = _signal.signal(_signal.SIGINT, leave) if is_usual else None
        except ValueError:  # not the main thread
            self._before = None

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            _signal.signal(_signal.SIGINT, self._before)


def leave(number: int, frame: FrameType | None) -> None:
    """Ctrl-C within `QuietStart`."""
    if is_deaf(frame):
        os._exit(INTERRUPTED)
    raise SystemExit(INTERRUPTED)


def is_deaf(frame: FrameType | None) -> bool:
    """Whether Python ignores an exception that is raised here: in callbacks of importlib's weak references, and in
    destructors."""
    return frame is not None and frame.f_code.co_name in ("cb", "__del__")
