"""The lock that a process holds on a file or folder it works on; it is let go when the process ends, however it does.

On Windows, which has no such lock, nothing is locked: what two processes do to one file is then the user's own care.
"""

from __future__ import annotations

try:
    from fcntl import LOCK_EX, LOCK_NB, flock
except ImportError:
    CAN_LOCK = False
else:
    CAN_LOCK = True


def lock_file(descriptor: int, *, block: bool = True) -> None:
    """Take the exclusive lock of what is open there, until it is closed.

    Without `block`: BlockingIOError when another process, or another opening of the same file, has it.
    """
    if CAN_LOCK:
        flock(descriptor, LOCK_EX if block else LOCK_EX | LOCK_NB)
