"""Forks while other threads work. The threads are not in the child, and what they held there is held for ever.

`ForkLock` is a lock that a child gets unlocked. Python's own locks of modules stay locked: so a fork waits, for a few
seconds at most, until no other thread imports something.
"""

from __future__ import annotations

import importlib
import logging  # noqa: F401 (hooks run in reverse: its own, which takes a lock that imports need, is to run last)
import os
import threading
import time
from weakref import WeakSet

WAIT_S = 5.0
LOOK_S = 0.002


class ForkLock:
    """As threading.Lock. What it guards must be usable wherever the fork may interrupt its change."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _locks.add(self)

    def acquire(self, blocking: bool = True) -> bool:
        return self._lock.acquire(blocking)

    def release(self) -> None:
        if self._lock.locked():  # not in a child that was forked while its thread held the lock
            self._lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def other_thread_imports() -> bool:
    """Whether another thread is in the middle of an import, as far as this Python tells."""
    locks = getattr(importlib._bootstrap, "_module_locks", {})
    owners = [getattr(lock(), "owner", None) for lock in list(locks.values())]
    return any(owner not in (None, threading.get_ident()) for owner in owners)


def _wait_for_imports() -> None:
    deadline = time.monotonic() + WAIT_S
    while other_thread_imports() and time.monotonic() < deadline:
        time.sleep(LOOK_S)


def _renew_locks() -> None:
    for lock in list(_locks):
        lock._lock = threading.Lock()


_locks: WeakSet[ForkLock] = WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_wait_for_imports, after_in_child=_renew_locks)
