"""Names for folders and files of this machine: each name is a small file that holds a path.

They are in the folder `links` of BITNET_REF_HOME (by default bitnet_ref in the user's cache folder). "org/name" is the
file "org@name". A name is given by one rename and taken back by one removal, which needs no free space.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ...errors import FormatError
from ...system.atomic import explain_os_errors, write_file
from ...system.json_file import read_bounded
from .names import check_name, is_reference

MAX_PATH_BYTES = 1 << 16


def home() -> Path:
    """BITNET_REF_HOME, or bitnet_ref in the platform's folder for caches."""
    if given := os.environ.get("BITNET_REF_HOME"):
        return Path(given).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "bitnet_ref"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bitnet_ref"


def set_link(name: str, path: Path) -> None:
    """Let a name refer to a path from now on. RegistryError if it is no usable name, StorageError for the disk."""
    check_name(name)
    write_file(_file_of(name), os.fsencode(path))


def links() -> dict[str, Path]:
    """Every name, with the path that it refers to, which may be gone."""
    folder = home() / "links"
    names = [each.name.replace("@", "/") for each in folder.iterdir()] if folder.is_dir() else []
    return {name: path for name in sorted(names) if is_reference(name) and (path := linked_path(name)) is not None}


def linked_path(name: str) -> Path | None:
    """The path that a name refers to; None if it was given to none. Raises FormatError."""
    if "@" in name or not is_reference(name) or not _file_of(name).exists():
        return None
    return Path(os.fsdecode(read_bounded(_file_of(name), FormatError, MAX_PATH_BYTES)))


def find_linked(name: str) -> Path | None:
    """As `linked_path`. Raises FormatError if what the name refers to is gone."""
    path = linked_path(name)
    if path is not None and not path.exists():
        raise FormatError(f"is gone, and the name {name} refers to it; to forget that: bitnet-ref rm {name}", path=path)
    return path


def remove_link(name: str) -> None:
    """Take a name back, if it was given. What it refers to stays. Raises StorageError."""
    with explain_os_errors(_file_of(name)):
        _file_of(name).unlink(missing_ok=True)


def _file_of(name: str) -> Path:
    return home() / "links" / name.replace("/", "@")
