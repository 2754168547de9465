"""matplotlib, imported when a figure is drawn, and the colours that all figures and notebooks share."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

from ...errors import BackendUnavailable

# Dark grey for floats, green right, red wrong, orange and blue for the rest
FLOAT, GOOD, WRONG, PLUS, MINUS = "#4a4a4a", "#3a923a", "#c03d3e", "#dd8a2b", "#3b6fb6"
PALE = "#d0d0d0"
# Colours that most people can tell apart (after Okabe and Ito), for series such as requests and cache policies
SERIES = ("#3b6fb6", "#dd8a2b", "#3a923a", "#a05195", "#56b4e9", "#8c6d31", "#c03d3e", "#7f7f7f")


def new_figure(rows: int = 1, columns: int = 1, *, size: tuple[float, float], **more: Any) -> tuple[Any, Any]:
    """A matplotlib figure and its array of axes (rows, columns). pyplot does not keep it alive.

    Raises BackendUnavailable if matplotlib is not installed.
    """
    figure = _figure_class()(figsize=size, dpi=80, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **more)
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
        ax.title.set_fontsize(11)
    return figure, axes


@cache
def _figure_class() -> Any:
    """matplotlib's Figure, shown by a notebook even if pyplot, which would register that, was never imported."""
    try:
        from matplotlib.figure import Figure
    except ImportError as problem:
        raise BackendUnavailable("figures need matplotlib: pip install 'bitnet-ref[notebooks]'") from problem

    class ShownFigure(Figure):
        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png")
            return buffer.getvalue()

    return ShownFigure


def plain(text: str) -> str:
    """Text for a figure: a dollar sign starts no formula, and line ends are visible."""
    return text.replace("$", r"\$").replace("\n", "⏎")
