"""Names of models, and which files of a repository belong to a model. Nothing else is ever fetched."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...errors import RegistryError
from ..checkpoint import TOKENIZER_FILES
from ..hf.folder import INDEX_FILE, SINGLE_FILE
from ..native.model import SUFFIX as NATIVE_SUFFIX

_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9_-]|\.(?!\.)){0,95}(?<!\.)"  # no "..", no dot at either end
_NAME = re.compile(rf"{_WORD}(?:/{_WORD})?")
_REVISION = re.compile(rf"{_WORD}(?:/{_WORD}){{0,7}}")
_FILE = re.compile(_WORD)
_SHARD = re.compile(r"model-[0-9]{5}-of-[0-9]{5}\.safetensors")


@dataclass(frozen=True)
class Reference:
    """ "org/repo@revision": a model's name and version; a revision of None means the newest."""

    name: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"


def is_reference(text: str) -> bool:
    name, at, revision = text.partition("@")
    return bool(_NAME.fullmatch(name)) and (not at or bool(_REVISION.fullmatch(revision)))


def parse_reference(text: str) -> Reference:
    """ "name", "org/repo" or either with "@revision" -> Reference. RegistryError for anything else, including "..".

    >>> parse_reference("org/repo@v1.0")
    Reference(name='org/repo', revision='v1.0')
    """
    if not is_reference(text):
        expected = "expected NAME or ORG/NAME, perhaps with @REVISION (letters, digits, '.', '_', '-')"
        raise RegistryError(f"{expected}, got {text[:120]!r}")
    name, _, revision = text.partition("@")
    return Reference(name, revision or None)


def choose_files(names: Iterable[str], wanted: Sequence[str] = ()) -> tuple[list[str], str | None]:
    """(the files of one model among a folder's file names, the file to open or None for the folder).

    wanted: the weights file to take if there are several. Only files with known names and suffixes in the folder itself
    are taken: no code, no pickles, no subfolders.
    """
    plain = {name for name in names if _FILE.fullmatch(name)}
    single = sorted(name for name in plain if name.endswith((NATIVE_SUFFIX, ".gguf")))
    for name in wanted:
        if name not in single:
            listed = ", ".join(single[:20]) or "none"
            raise RegistryError(f"there is no model file {name[:120]!r}; there are: {listed}")
    if len(wanted) > 1:
        raise RegistryError(f"one file is one model; asked for {len(wanted)}: give each a --name of its own")
    if wanted:
        return [wanted[0]], wanted[0]
    hf = {SINGLE_FILE} & plain or {name for name in plain if _SHARD.fullmatch(name) or name == INDEX_FILE}
    if "config.json" in plain and hf & {SINGLE_FILE, INDEX_FILE}:
        return sorted(hf | {"config.json"} | plain & set(TOKENIZER_FILES)), None
    if len(single) == 1:
        return single, single[0]
    if single:
        raise RegistryError(f"it holds several models; choose one with --file: {', '.join(single[:20])}")
    raise RegistryError(
        f"it holds no model that bitnet_ref reads: neither config.json with {SINGLE_FILE} or {INDEX_FILE}, "
        f"nor a {NATIVE_SUFFIX} or .gguf file"
    )
