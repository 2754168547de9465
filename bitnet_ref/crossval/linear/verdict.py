"""What a layer gave, line by line of a BitLinear: right, wrong, or another choice, each with one value."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ...reference.layers import Array
from .rules import SMALL

RIGHT_STATUS, WRONG, CHOICE, UNKNOWN, ABSENT = "right", "WRONG", "a choice", "not explained", "-"


@dataclass(frozen=True)
class LineVerdict:
    """What the layer does in one line, and one value. status: right, WRONG, a choice, not explained, or -."""

    line: str
    status: str
    text: str
    at: str = ""
    expected: float | None = None
    found: float | None = None

    @property
    def example(self) -> str:
        if self.expected is None or self.found is None:
            return self.at
        return f"{self.at}: expected {self.expected:.7g}, found {self.found:.7g}"


@dataclass(frozen=True)
class LinearVerdict:
    """All lines of a layer. `failed`: why nothing could be run."""

    target: str
    versions: str
    lines: tuple[LineVerdict, ...]
    failed: str | None = None

    @property
    def agrees(self) -> bool | None:
        if self.failed is not None:
            return None
        return not self.wrong

    @property
    def wrong(self) -> list[LineVerdict]:
        """The lines that are not a BitLinear's."""
        return [each for each in self.lines if each.status in (WRONG, UNKNOWN)]

    def line(self, name: str) -> LineVerdict:
        return next(each for each in self.lines if each.line == name)

    @property
    def sentence(self) -> str:
        name = f"{self.target} ({self.versions})" if self.versions else self.target
        if self.failed is not None:
            return f"{name} could not be judged: {self.failed}"
        wrong = self.wrong
        if not wrong:
            listed = "; ".join(f"{each.line}: {each.text}" for each in self.lines if each.status != ABSENT)
            return f"AGREES: {name}: {listed}"
        also = f"; and {', '.join(each.line for each in wrong[1:])}" if wrong[1:] else ""
        return f"DIFFERS: {name}: {wrong[0].line}: {wrong[0].text}{also}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "agrees": self.agrees, "sentence": self.sentence}


def place_of(gap: Array) -> tuple[int, ...]:
    """Where a gap is largest, a NaN before all others."""
    return tuple(map(int, np.unravel_index(int(np.argmax(np.nan_to_num(gap, nan=np.inf))), gap.shape)))


def compared(line: str, status: str, text: str, name: str, expected: Array, found: Array) -> LineVerdict:
    """A line's verdict with the value of two arrays of that name where they differ most."""
    at = place_of(np.abs(found - expected))
    return LineVerdict(line, status, text, f"{name}{list(at)}", float(expected[at]), float(found[at]))


def equal_outputs(line: str, way: str, before: Array, after: Array, random: bool) -> LineVerdict:
    limit = (0.1 if random else 1e-3) * np.abs(before).max()
    if np.abs(after - before).max() <= limit:
        return compared(line, RIGHT_STATUS, f"{way}: the same", "y", before, after)
    factor = float((before * after).sum() / max((before * before).sum(), SMALL))
    scaled = np.linalg.norm(after - factor * before) <= 1e-3 * max(float(np.linalg.norm(after)), SMALL)
    text = f"{way}: " + (f"all outputs are {factor:.4g} times those before" if scaled else "other outputs than before")
    return compared(line, WRONG, text, "y", before, after)
