"""The control groups of Linux that this process is in, of either version."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")  # where /proc and /sys are


def cgroup_folders(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """The folders of this process's group for a controller ("cpu", "memory") and of each group around it. Some may not
    be there.

    A service's limit (systemd's MemoryMax) is that of its own group. A container usually sees its own group at the top
    of the tree, whatever /proc/self/cgroup says, so the top is read too.
    """
    groups = {controller: "/", "": "/"}  # controllers -> the group's path; "" is version 2
    with suppress(OSError, UnicodeDecodeError):
        text = (root / "proc/self/cgroup").read_text()
        groups |= dict(re.findall("^[^:\n]*:([^:\n]*):(/.*)$", text, re.MULTILINE))
    for controllers, path in groups.items():
        if controllers and controller not in controllers.split(","):
            continue
        for name in (controllers, controller if controllers else "unified"):
            folder = root / "sys/fs/cgroup" / name
            group = folder / path.strip("/")
            yield from (each for each in (group, *group.parents) if each == folder or folder in each.parents)
