"""`Reporter`: collects the facts and findings of one inspection."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import BackendError, BitNetRefError
from .facts import Finding, Inspection

if TYPE_CHECKING:
    from ..tokenizers import Tokenizer


class Reporter:
    """The result so far (`out`), and the methods that add findings to it."""

    config_source = "the configuration"  # its name in messages

    def __init__(self, path: Path) -> None:
        self.path, self.out = path, Inspection(path=str(path))

    def note(self, severity: str, part: str, message: str, field: str | None = None) -> None:
        self.out.findings.append(Finding(severity, part, message, field=field))

    def fail(self, part: str, error: BitNetRefError) -> None:
        """An error finding. A library that is missing is not the file's fault: such an error is raised."""
        if isinstance(error, BackendError):
            raise error
        message = getattr(error, "message", str(error))
        place = {key: getattr(error, key, None) for key in ("path", "offset", "field")}
        finding = Finding("error", part, message, type(error).__name__, **place)
        if finding not in self.out.findings:
            self.out.findings.append(finding)

    def tokenizer_files(self) -> dict[str, bytes]:
        """As `Checkpoint.tokenizer_files`, if possible whether or not the model could be opened."""
        return {}

    def load_tokenizer(self) -> Tokenizer | None:
        """The tokenizer that `load` would take; None: there is none. TokenizerError."""
        from ..tokenizers import load_tokenizer_files

        files = self.tokenizer_files()
        if "tokenizer.json" not in files and "tokenizer.model" not in files:
            return None
        return load_tokenizer_files(files, path=self.path)
