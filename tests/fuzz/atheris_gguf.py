"""Coverage-guided fuzzing of the GGUF reader; see atheris_target.py."""

from __future__ import annotations

from collections.abc import Iterable

from atheris_target import MAX_BYTES, files_of, fuzz
from gguf_mutants import GGUF_FILE, change_numbers, write_gguf_base
from helpers import DATA


def seeds() -> Iterable[bytes]:
    """Good files of every kind; the headers of the larger ones of tests/data, whose data is cut off."""
    yield from files_of(lambda dice, folder: write_gguf_base(folder, dice), 60)
    for path in sorted((DATA / "gguf").glob("*.gguf")):
        yield path.read_bytes()[: MAX_BYTES // 4]


if __name__ == "__main__":
    fuzz(lambda data: GGUF_FILE, lambda folder: None, seeds(), change_numbers)
