"""Models in the Hugging Face cache: found by name and used where they are, without a copy. Never uses the network."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ...errors import FormatError, RegistryError
from ...system.json_file import read_bounded
from .store import choose_files, is_reference, parse_reference


class CachedModel(NamedTuple):
    """A snapshot. revisions: the branches and tags that name it."""

    name: str
    commit: str
    revisions: tuple[str, ...]
    folder: Path

    def path(self) -> Path:
        """What to load: the folder, or the one file of a model in it. Raises RegistryError if it holds no model."""
        try:
            names = [each.name for each in self.folder.iterdir() if each.is_file()]  # not a link to nothing
            _, main = choose_files(names)
        except (OSError, RegistryError) as problem:
            message = f"the Hugging Face cache has {self.name}, which cannot be loaded by its name: {problem}"
            raise RegistryError(f"{message}; its files are in {self.folder}") from problem
        return self.folder if main is None else self.folder / main


def hub_cache() -> Path:
    """The folder, as huggingface_hub finds it."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if given := os.environ.get(name):
            return Path(given).expanduser()
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return Path(os.environ.get("HF_HOME") or caches / "huggingface").expanduser() / "hub"


def cached_models(root: Path | None = None) -> Iterator[CachedModel]:
    """Every snapshot of every model, whether it is complete or not."""
    for repository in _folders(hub_cache() if root is None else root):
        kind, _, name = repository.name.partition("--")
        if kind == "models" and is_reference(name := name.replace("--", "/")):
            named: dict[str, list[str]] = {}
            for file in sorted((repository / "refs").rglob("*")):
                if file.is_file() and not file.is_symlink():
                    try:
                        commit = read_bounded(file, FormatError, 100).decode(errors="replace").strip()
                    except FormatError:
                        continue
                    named.setdefault(commit, []).append(file.relative_to(repository / "refs").as_posix())
            for folder in _folders(repository / "snapshots"):
                yield CachedModel(name, folder.name, tuple(named.get(folder.name, ())), folder)


def find_cached(text: str) -> Path | None:
    """The path of "org/repo" (main, or the only snapshot) or of "org/repo@revision"; None if it is not there."""
    if not is_reference(text):
        return None
    wanted = parse_reference(text)
    snapshots = [each for each in cached_models() if each.name == wanted.name]
    if wanted.revision is None:
        chosen = [each for each in snapshots if "main" in each.revisions] or snapshots[: len(snapshots) == 1]
    else:
        by_commit = len(wanted.revision) >= 7
        chosen = [
            each
            for each in snapshots
            if wanted.revision in each.revisions or (by_commit and each.commit.startswith(wanted.revision))
        ]
    return chosen[0].path() if chosen else None


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(each for each in path.iterdir() if each.is_dir() and not each.is_symlink())
    except OSError:
        return []
