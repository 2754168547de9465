"""The store of earlier versions, in BITNET_REF_HOME: index.json, and the files of each model in models/<digest>.

`move_old_store` gives what came from the hub to the Hugging Face cache, and names to the folders of the other models.
Killed at any moment and repeated, it ends what it began: nothing is removed before all is in its place, and the index
goes last.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from ...errors import FormatError
from ...system.atomic import atomic_path, explain_os_errors, sync, write_file
from ...system.json_file import read_json_object
from ...system.sharing import folder_of
from .hub_cache import WEIGHTS, repository_folder
from .links import home, linked_path, set_link
from .names import is_reference

MAX_INDEX_BYTES = 16 << 20
MOVE = "bitnet-ref pull --move-old-store"
_DIGEST, _COMMIT, _FILE = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}"), re.compile(r"[A-Za-z0-9][\w.-]*")


def old_entries() -> list[dict[str, Any]]:
    """The models of an old store, the oldest first; none without one. Raises FormatError if its index is damaged."""
    index = home() / "index.json"
    if not index.exists():
        return []
    entries = read_json_object(index, FormatError, MAX_INDEX_BYTES).get("entries")
    if not isinstance(entries, list):
        raise FormatError("expected a list", path=index, field="entries")
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or not _is_entry(entry):
            raise FormatError("is no entry of a store", path=index, field=f"entries[{number}]")
    return entries


def _is_entry(entry: dict[str, Any]) -> bool:
    """Whether the fields that are used are there, and none of them leads out of the store or of the cache."""
    is_of_hub, files = entry.get("commit") is not None, entry.get("files")
    texts = ["name", "digest", *(("origin", "commit", "revision") if is_of_hub else ())]
    if not all(isinstance(entry.get(key), str) for key in texts) or not isinstance(files, dict):
        return False
    if is_of_hub and not (
        _COMMIT.fullmatch(entry["commit"]) and is_reference(f"{entry['origin']}@{entry['revision']}")
    ):
        return False
    are_plain = all(_FILE.fullmatch(file) for file in files) and entry.get("main") in [None, *files]
    is_name = is_reference(entry["name"]) and "@" not in entry["name"]
    return are_plain and is_name and bool(_DIGEST.fullmatch(entry["digest"]))


def move_old_store() -> list[tuple[str, Path]]:
    """Move every model of an old store.   -> what each is called from now on, and where it is

    A name that has been given to something else, or to a newer version, is followed by the start of the digest.
    """
    models = home() / "models"
    moved = []
    with explain_os_errors(home()):
        entries = old_entries()
        for entry in reversed(entries):  # the newest first
            name, folder = entry["name"], models / entry["digest"]
            is_of_hub, main = entry.get("commit") is not None, entry.get("main")
            if is_of_hub:
                folder = _move_to_cache(entry, folder)
            path = folder if main is None else folder / main
            if not path.exists():  # it was gone before
                continue
            if is_of_hub and (name, main) == (entry["origin"], None):
                name = f"{name}@{entry['commit'][:8]}"
            else:
                if linked_path(name) not in (None, path):
                    name = f"{name}-{entry['digest'][:8]}"
                set_link(name, path)
            moved.append((name, path))
        used = {folder_of(path) for _, path in moved}
        for folder in (home() / "incoming", *(models / entry["digest"] for entry in entries)):
            if folder.exists() and folder not in used:
                shutil.rmtree(folder)
        for file in ("lock", "index.json"):
            (home() / file).unlink(missing_ok=True)
    return moved


def _move_to_cache(entry: dict[str, Any], source: Path) -> Path:
    """Give the files of an entry to the cache, as real files in a snapshot.   -> the snapshot's folder"""
    repository = repository_folder(entry["origin"])
    folder: Path = repository / "snapshots" / entry["commit"]
    if not source.exists():  # it has moved already
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted(entry["files"], key=lambda name: name.endswith(WEIGHTS)):  # weights last, as in `pull`
        if not (folder / name).exists():
            try:
                os.link(source / name, folder / name)
            except OSError:  # on another disk, or on one without hard links
                with atomic_path(folder / name) as temporary:
                    shutil.copyfile(source / name, temporary)
    sync(folder)
    ref = repository / "refs" / entry["revision"]
    if not ref.exists():
        write_file(ref, entry["commit"].encode())
    return folder
