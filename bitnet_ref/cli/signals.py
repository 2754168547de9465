"""The signals that end a command: what it has started ends with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from .start import INTERRUPTED as INTERRUPTED
from .start import is_deaf, leave

GRACE_S = 3.0  # for a child that was asked to end
ENDING = ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGXCPU", "SIGUSR1", "SIGUSR2", "SIGALRM")
RECENT_S = 5.0
LATER_S = 0.02
_state = {"interrupted_s": -1e9}


class Ended(BaseException):
    """The process was told to end; blocks clean up on its way."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


@contextlib.contextmanager
def ending_signals() -> Iterator[None]:
    """Within, the signals of ENDING raise `Ended`, so that files and child processes are cleaned up; then the process
    ends by that signal. Those that are ignored, as by nohup, stay so."""

    def end(number: int, frame: FrameType | None) -> None:
        if not _send_later(number, frame):
            signal.signal(number, signal.SIG_DFL)  # a second one ends it at once
            raise Ended(number)

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not _send_later(number, frame):
            _state["interrupted_s"] = time.monotonic()
            raise KeyboardInterrupt

    if not _is_main_thread():
        yield
        return
    _state["interrupted_s"] = -1e9
    before: dict[int, Any] = {}
    for name in ENDING:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            before[number] = signal.signal(number, end)
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, leave):
        before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Ended as ended:
        signal.signal(ended.number, signal.SIG_DFL)
        os.kill(os.getpid(), ended.number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _send_later(number: int, frame: FrameType | None) -> bool:
    """Whether an exception would be ignored here; then the signal is sent again in a moment."""
    if not is_deaf(frame):
        return False
    timer = threading.Timer(LATER_S, os.kill, [os.getpid(), number])
    timer.daemon = True
    timer.start()
    return True


def was_interrupted() -> bool:
    """Whether Ctrl-C was pressed a moment ago: an exception after it is its consequence."""
    return time.monotonic() - _state["interrupted_s"] < RECENT_S


def run_to_end(command: Sequence[str]) -> int:
    """Run a command, without input, in a process group of its own.   -> its exit code

    Whatever ends the wait, a signal or Ctrl-C, ends the whole group. Raises OSError.
    """
    group: dict[str, Any] = {} if os.name == "nt" else {"process_group": 0}
    process = None
    try:
        with _signals_later():  # a signal before the assignment would leave a running process that nothing ends
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, **group)
        return process.wait()
    except BaseException:
        if process is not None:
            end_group(process)
        raise


@contextlib.contextmanager
def _signals_later() -> Iterator[None]:
    """Signals that a function of Python handles wait until the end of the block."""
    waiting: list[int] = []
    before: dict[int, Any] = {}
    if _is_main_thread():
        numbers = [getattr(signal, name) for name in ("SIGINT", *ENDING) if hasattr(signal, name)]
        before = {number: handler for number in numbers if callable(handler := signal.getsignal(number))}
    for number in before:
        signal.signal(number, lambda number, frame: waiting.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in waiting:
            signal.raise_signal(number)


def end_group(process: subprocess.Popen[Any]) -> None:
    """End a process and those that it has started: asked first, then killed."""
    for name in ("SIGTERM", "SIGKILL"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.name == "nt":
                process.kill()
            else:
                os.killpg(process.pid, getattr(signal, name))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
