"""The few plots of a crossval report, as SVG text. Each returns one <svg> element that needs nothing else."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

import numpy as np

from ..reference.layers import Array
from .types import Tokens

COLOURS = {"ok": "#1a7f37", "flip": "#bf8700", "bad": "#cf222e"}
_FLOOR, _TOP = -10, 1  # decades of relative error that the axes show


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 11) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="#57606a" '
        f'font-family="sans-serif">{html.escape(text)}</text>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str = "#d0d7de", width: float = 1) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width:.1f}"/>'


def _svg(width: float, height: float, parts: Sequence[str], label: str) -> str:
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    label = f'role="img" aria-label="{html.escape(label)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {label}>{"".join(parts)}</svg>'


def _decade(error: float) -> float:
    """log10 of an error, clipped to the axis; 0 is at its bottom."""
    if not error > 0:
        return _FLOOR
    return min(max(math.log10(error), _FLOOR), _TOP) if math.isfinite(error) else _TOP


def by_depth(points: Sequence[tuple[int, float, str, str]], layer_starts: Tokens) -> str:
    """Relative error by place in the computation. points: (place, error, mark, name)."""
    width, height, left, bottom = 900, 260, 50, 30
    n = max(2, len(points))

    def at(place: int, error: float) -> tuple[float, float]:
        x = left + (width - left - 10) * place / (n - 1)
        return x, 10 + (height - bottom - 10) * (_TOP - _decade(error)) / (_TOP - _FLOOR)

    parts = []
    for decade in range(_FLOOR, _TOP + 1, 2):
        y = at(0, 10.0**decade)[1]
        label = "equal" if decade == _FLOOR else f"1e{decade}"
        parts += [_line(left, y, width - 10, y), _text(left - 5, y + 4, label, "end")]
    for layer, place in enumerate(layer_starts):
        x = at(place, 1)[0]
        parts.append(_line(x, 10, x, height - bottom, "#eaeef2"))
        if len(layer_starts) <= 32:
            parts.append(_text(x + 2, height - bottom + 14, str(layer)))
    for place, error, mark, name in points:
        x, y = at(place, error)
        title = f"<title>{html.escape(name)}: {error:.2g}</title>"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{COLOURS[mark]}">{title}</circle>')
    return _svg(width, height, parts, "divergence by depth")


def error_bars(kinds: Sequence[tuple[str, int, int, list[float]]]) -> str:
    """For each kind of op a bar from the smallest to the largest error, with a tick at the median."""
    width, row, left = 900, 20, 150
    height = row * len(kinds) + 30

    def at(error: float) -> float:
        return left + (width - left - 130) * (_decade(error) - _FLOOR) / (_TOP - _FLOOR)

    parts = []
    for decade in range(_FLOOR, _TOP + 1, 2):
        x = at(10.0**decade)
        parts += [_line(x, 5, x, height - 22), _text(x, height - 8, f"1e{decade}", "middle")]
    for i, (kind, count, unequal, errors) in enumerate(kinds):
        y = row * i + 15
        parts.append(_text(left - 8, y + 4, kind, "end"))
        parts.append(_text(width - 120, y + 4, "all equal" if not unequal else f"{unequal} of {count} unequal"))
        if errors:
            parts.append(_line(at(errors[0]), y, at(errors[-1]), y, "#0969da", 2))
            for error, half in ((errors[0], 3), (errors[len(errors) // 2], 6), (errors[-1], 3)):
                parts.append(_line(at(error), y - half, at(error), y + half, "#0969da", 2))
    return _svg(width, height, parts, "errors by kind of op")


def scatter(points: Array) -> str:
    """(n, 2) of reference and candidate, with the line on which they are equal."""
    size, edge = 320, 34
    finite = points[np.isfinite(points).all(axis=-1)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    span = (high - low) or 1.0

    def at(value: float) -> float:
        return edge + (size - 2 * edge) * (value - low) / span

    parts = [_line(at(low), size - at(low), at(high), size - at(high), "#8c959f")]
    parts += [_text(at(low), size - 8, f"{low:.3g}"), _text(at(high), size - 8, f"{high:.3g}", "end")]
    parts += [_text(4, size - at(low), f"{low:.3g}"), _text(4, size - at(high) + 4, f"{high:.3g}")]
    parts += [
        f'<circle cx="{at(float(x)):.1f}" cy="{size - at(float(y)):.1f}" r="1.3" fill="#0969da" fill-opacity="0.4"/>'
        for x, y in finite
    ]
    return _svg(size, size, parts, "logits of both sides")


def heat_maps(reference: Array, candidate: Array, corner: tuple[int, int]) -> str:
    """The same patch of both tensors, on one colour scale, and their difference on its own."""
    cell, gap, top = 6, 30, 34
    rows, columns = reference.shape
    with np.errstate(all="ignore"):
        maps = (("reference", reference), ("candidate", candidate), ("difference", candidate - reference))
    shared = max(_largest(reference), _largest(candidate))
    parts = []
    for i, (title, values) in enumerate(maps):
        left = i * (columns * cell + gap)
        largest = _largest(values) if title == "difference" else shared
        parts.append(_text(left, 12, f"{title}, up to {largest:.3g}"))
        parts.append(_text(left, 26, f"rows from {corner[0]}, columns from {corner[1]}", size=9))
        for r in range(rows):
            for c in range(columns):
                colour = _colour(float(values[r, c]), largest)
                x, y = left + c * cell, top + r * cell
                parts.append(f'<rect x="{x}" y="{y}" width="{cell}" height="{cell}" fill="{colour}"/>')
    width = 3 * columns * cell + 2 * gap
    return _svg(max(width, 480), top + rows * cell + 4, parts, "heat maps of both tensors")


def _largest(values: Array) -> float:
    finite = values[np.isfinite(values)]
    return float(np.abs(finite).max(initial=0.0))


def _colour(value: float, largest: float) -> str:
    """Red above 0, blue below, white at 0; grey where there is no number (masked, NaN)."""
    if not math.isfinite(value):
        return "#afb8c1"
    share = min(1.0, abs(value) / largest) if largest > 0 else 0.0
    faded = round(255 * (1 - share))
    return f"#ff{faded:02x}{faded:02x}" if value > 0 else f"#{faded:02x}{faded:02x}ff"
