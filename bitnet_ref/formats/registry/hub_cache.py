"""Models in the Hugging Face cache: found by name and used where they are, without a copy. Never uses the network."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ...errors import FormatError, RegistryError
from ...system.json_file import read_bounded
from .names import is_reference, model_in, parse_reference, split_choice

WEIGHTS = (".safetensors", ".gguf")


class CachedModel(NamedTuple):
    """A snapshot. revisions: the branches and tags that name it."""

    name: str
    commit: str
    revisions: tuple[str, ...]
    folder: Path

    def matches(self, revision: str) -> bool:
        """Whether `@revision` means this snapshot: a branch or tag of it, or the start of its commit."""
        return revision in self.revisions or (len(revision) >= 7 and self.commit.startswith(revision))

    def path(self, file: str | None = None) -> Path:
        """What to load: the folder, or the one file of a model in it, or that `file` of several (see `choose_files`).

        Raises RegistryError if it holds no model.
        """
        try:
            return model_in(self.folder, file)
        except (OSError, RegistryError) as problem:
            message = f"the Hugging Face cache has {self.name}, which cannot be loaded by its name: {problem}"
            raise RegistryError(f"{message}; its files are in {self.folder}") from problem


def hub_cache() -> Path:
    """The folder, as huggingface_hub finds it."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(given)).expanduser().absolute()


def repository_folder(name: str) -> Path:
    """Where the cache has the repository "org/repo", or would have it."""
    return hub_cache() / f"models--{name.replace('/', '--')}"


def cached_models() -> Iterator[CachedModel]:
    """Every snapshot of every model, whether it is complete or not."""
    for repository in _folders(hub_cache()):
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


def matching_models(text: str) -> list[CachedModel]:
    """The snapshots of "org/repo", or those that "org/repo@revision" means."""
    if not is_reference(text):
        return []
    name, revision = parse_reference(text)
    snapshots = [each for each in cached_models() if each.name == name]
    return snapshots if revision is None else [each for each in snapshots if each.matches(revision)]


def find_cached(text: str) -> Path | None:
    """The path of "org/repo" (main, or the only snapshot) or of "org/repo@revision"; None if it is not there. Both may
    end in ":Q2_0" or ":FILE", which says which file."""
    text, file = split_choice(text)
    chosen = matching_models(text)
    if "@" not in text:
        chosen = [each for each in chosen if "main" in each.revisions] or chosen[: len(chosen) == 1]
    return chosen[0].path(file) if chosen else None


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(each for each in path.iterdir() if each.is_dir() and not each.is_symlink())
    except OSError:
        return []
