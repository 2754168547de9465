"""Run a function in a forked child with limits on its address space and its processor time (Linux)."""

from __future__ import annotations

import os
import resource
import select
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

# Fork copies the calling thread alone. A child that asked a pool of threads for something would wait for ever.
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

WALL_S = 120  # for a child that waits for what never comes: no processor time passes


def run_in_child(job: Callable[[], str], spare_bytes: int, cpu_s: int) -> tuple[str, str]:
    """(outcome, detail): what `job` returns, or "died by SIGSEGV", "timeout", or the class of what it raised.

    The child may have `spare_bytes` of address space more than this process has now, and `cpu_s` of processor time.
    """
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _child(job, spare_bytes, cpu_s, write_end)
    os.close(write_end)
    try:
        text = _read_until(read_end, time.monotonic() + WALL_S)
    finally:
        os.close(read_end)
    if text is None:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if text is None:
        return "timeout", f"no end within {WALL_S} s"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        died = signal.Signals(number).name
        return ("timeout" if number == signal.SIGXCPU else f"died by {died}"), text
    if os.WEXITSTATUS(status) != 0 or not text:
        return f"exit status {os.WEXITSTATUS(status)}", text
    found, _, detail = text.partition("\n")
    return found, detail


def address_space() -> int:
    """Bytes of address space that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _child(job: Callable[[], str], spare_bytes: int, cpu_s: int, write_end: int) -> None:
    """Never returns."""
    text = ""
    try:
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (address_space() + spare_bytes, most))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
        try:
            text = job()
        except BaseException as raised:  # a panic of a library in Rust is no Exception
            resource.setrlimit(resource.RLIMIT_AS, (most, most))  # room to say what happened
            text = f"{type(raised).__name__}\n{traceback.format_exc()}"
        data = text.encode("utf-8", "backslashreplace")
        while data:
            data = data[os.write(write_end, data) :]
    finally:
        os._exit(0 if text else 70)


def _read_until(read_end: int, deadline: float) -> str | None:
    """Everything that comes until the other end is closed; None: it was not closed in time."""
    data = b""
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select([read_end], [], [], left)
        if ready:
            more = os.read(read_end, 1 << 16)
            if not more:
                return data.decode("utf-8", "replace")
            data += more
    return None
