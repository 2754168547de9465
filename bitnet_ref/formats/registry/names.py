"""The names of models, and which files of a folder or a repository are a model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ...errors import RegistryError
from ...system.sharing import split_names
from ..checkpoint import EMBEDDING_FILES, TOKENIZER_FILES
from ..hf.folder import INDEX_FILE, SINGLE_FILE
from ..native.model import SUFFIX as NATIVE_SUFFIX

MODEL_CARD = "README.md"  # names the licence
_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9_-]|\.(?!\.)){0,95}(?<!\.)"  # no "..", no dot at either end
_NAME = re.compile(rf"{_WORD}(?:/{_WORD})?")
_REVISION = re.compile(rf"{_WORD}(?:/{_WORD}){{0,7}}")
_FILE = re.compile(_WORD)
_SHARD = re.compile(r"model-[0-9]{5}-of-[0-9]{5}\.safetensors")


def is_reference(text: str) -> bool:
    name, at, revision = text.partition("@")
    return bool(_NAME.fullmatch(name)) and (not at or bool(_REVISION.fullmatch(revision)))


def parse_reference(text: str) -> tuple[str, str | None]:
    """ "name", "org/repo" or either with "@revision" -> (name, revision). RegistryError for anything else.

    >>> parse_reference("org/repo@v1.0")
    ('org/repo', 'v1.0')
    """
    if not is_reference(text):
        expected = "expected NAME or ORG/NAME, perhaps with @REVISION (letters, digits, '.', '_', '-')"
        raise RegistryError(f"{expected}, got {text[:120]!r}")
    name, _, revision = text.partition("@")
    return name, revision or None


def check_name(name: str) -> None:
    """Raise RegistryError unless a model can be given this name: "name" or "org/name"."""
    if parse_reference(name)[1] is not None:
        raise RegistryError(f"a --name has no @revision, got {name!r}")


def choose_files(names: Iterable[str], file: str | None = None) -> tuple[list[str], str | None]:
    """(the files of one model among a folder's file names, the file to open or None for the folder).

    file: the weights file to take if there are several, or the type in its name: "Q2_0". Of a model that is split over
    several files the first is opened. Only files with known names and suffixes are taken, of subfolders only those with
    known names: no code, no pickles. Raises RegistryError if there is no model, or more than one.
    """
    names = {*names}
    plain = {name for name in names if _FILE.fullmatch(name)}
    files = sorted(name for name in plain if name.endswith((NATIVE_SUFFIX, ".gguf")))
    single = [name for name in files if name == split_names(name)[0] or split_names(name)[0] not in plain]
    if file is not None:
        chosen = [file] if file in files else [name for name in single if _has_type(name, file)]
        if len(chosen) != 1:
            listed = ", ".join((chosen or single)[:20]) or "none"
            what = "are several model files" if chosen else "is no model file"
            raise RegistryError(f"there {what} {file[:120]!r}; there are: {listed}")
        return _parts(chosen[0], plain), chosen[0]
    hf = {SINGLE_FILE} & plain or {name for name in plain if _SHARD.fullmatch(name) or name == INDEX_FILE}
    if "config.json" in plain and hf & {SINGLE_FILE, INDEX_FILE}:
        return sorted(hf | {"config.json"} | names & {*TOKENIZER_FILES, *EMBEDDING_FILES, MODEL_CARD}), None
    if len(single) == 1:
        return _parts(single[0], plain), single[0]
    if single:
        raise RegistryError(
            f"it holds several models; say which, as NAME:TYPE or NAME:FILE, the type as in a file's name: "
            f"{', '.join(single[:20])}"
        )
    raise RegistryError(
        f"it holds no model that bitnet_ref reads: neither config.json with {SINGLE_FILE} or {INDEX_FILE}, "
        f"nor a {NATIVE_SUFFIX} or .gguf file"
    )


def _parts(name: str, plain: set[str]) -> list[str]:
    """The files of the model that begins with, or is, this one; those that are there."""
    return [part for part in split_names(name) if part in plain]


def _has_type(name: str, type_name: str) -> bool:
    """Whether a file's name has the type, as a word: "Ternary-Bonsai-8B-Q2_0.gguf" has Q2_0, in any case."""
    return re.search(rf"(?:^|[-.]){re.escape(type_name)}(?:[-.])", name, re.IGNORECASE) is not None


def split_choice(text: str) -> tuple[str, str | None]:
    """ "org/repo:Q2_0" -> (the name, which of its files, or None).

    >>> split_choice("org/repo@v1:Q2_0")
    ('org/repo@v1', 'Q2_0')
    """
    name, colon, which = text.rpartition(":")
    return (name, which) if colon and name and _FILE.fullmatch(which) else (text, None)


def model_in(folder: Path, file: str | None = None) -> Path:
    """What to load of a folder: the folder itself, or the one model file in it. Raises RegistryError."""
    names = [each.name for each in folder.iterdir() if each.is_file()]  # not a link to nothing
    _, main = choose_files(names, file)
    return folder if main is None else folder / main
