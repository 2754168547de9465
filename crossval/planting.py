"""A second copy of the package in this process, under another name, with one mistake in its source.

The copy is imported from the same files. A module with an edit is compiled from the edited text; no file is written.
Every replaced text must occur exactly once, so that a change of the source cannot silently disable a bug.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType

import bitnet_ref

PACKAGE = Path(bitnet_ref.__file__).parent
COPY = "bitnet_ref_planted"


@dataclass(frozen=True)
class Edit:
    """In `file` (relative to the package) the text `old`, which occurs once, becomes `new`."""

    file: str
    old: str
    new: str

    def apply(self, text: str) -> str:
        count = text.count(self.old)
        if count != 1:
            raise LookupError(f"{self.file}: the text to replace occurs {count} times, not once: {self.old!r}")
        return text.replace(self.old, self.new)


@contextmanager
def planted(edits: Sequence[Edit]) -> Iterator[ModuleType]:
    """The package with the edits made, to be used like `bitnet_ref`, until the `with` ends."""
    finder = _Finder(edits)
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module(COPY)
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name == COPY or name.startswith(COPY + ".")]:
            del sys.modules[name]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the copy's modules in the package's folder and loads them with the edits made."""

    def __init__(self, edits: Sequence[Edit]) -> None:
        self.edits: dict[Path, list[Edit]] = {}
        for edit in edits:
            self.edits.setdefault(PACKAGE / edit.file, []).append(edit)
        for path, its_edits in self.edits.items():  # a wrong edit is an error now, not when its module is imported
            self._edit(path, its_edits)

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        root, *rest = name.split(".")
        if root != COPY:
            return None
        folder = PACKAGE.joinpath(*rest)
        file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        if not file.is_file():
            return None
        places = [str(folder)] if folder.is_dir() else None
        return importlib.util.spec_from_file_location(name, file, loader=self, submodule_search_locations=places)  # type: ignore[arg-type]

    def exec_module(self, module: ModuleType) -> None:
        assert module.__file__ is not None
        path = Path(module.__file__)
        edits = self.edits.get(path)
        code = compile(self._edit(path, edits), path, "exec") if edits else _compile(path)
        exec(code, module.__dict__)

    @staticmethod
    def _edit(path: Path, edits: Sequence[Edit]) -> str:
        text = path.read_text(encoding="utf-8")
        for edit in edits:
            text = edit.apply(text)
        return text


@cache
def _compile(path: Path) -> CodeType:
    return compile(path.read_text(encoding="utf-8"), path, "exec")
