"""A process's lock on a file or folder. The system releases it when the process ends, even if it is killed.

Windows has no such lock, and nothing is locked there: two processes must not write the same file.
"""

from __future__ import annotations

try:
    from fcntl import LOCK_EX, LOCK_NB, flock
except ImportError:
    CAN_LOCK = False
else:
    CAN_LOCK = True


def lock_file(descriptor: int, *, block: bool = True) -> None:
    """Lock an open file or folder exclusively, until it is closed.

    Without `block`: raises BlockingIOError when another process, or another opening of the same file, holds the lock.
    """
    if CAN_LOCK:
        flock(descriptor, LOCK_EX if block else LOCK_EX | LOCK_NB)
