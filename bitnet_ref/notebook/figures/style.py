"""matplotlib, imported when a figure is drawn, and the colours that all figures and notebooks share."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

from ...errors import BackendUnavailable

# Dark grey for floats, green right, red wrong, orange and blue for the rest
FLOAT, GOOD, WRONG, PLUS, MINUS = "#4a4a4a", "#3a923a", "#c03d3e", "#dd8a2b", "#3b6fb6"
PALE = "#d0d0d0"
# Told apart by most eyes (Okabe and Ito), for things that have no meaning of their own: requests, policies
SERIES = ("#3b6fb6", "#dd8a2b", "#3a923a", "#a05195", "#56b4e9", "#8c6d31", "#c03d3e", "#7f7f7f")


def new_figure(rows: int = 1, columns: int = 1, *, size: tuple[float, float], **more: Any) -> tuple[Any, Any]:
    """A matplotlib figure and its array of axes (rows, columns), which no pyplot keeps: it is gone when it is dropped.

    Raises BackendUnavailable where matplotlib is not installed.
    """
    figure = _figure_class()(figsize=size, dpi=80, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **more)
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
        ax.title.set_fontsize(11)
    return figure, axes


@cache
def _figure_class() -> Any:
    """matplotlib's Figure, which a notebook shows by itself: pyplot teaches it to, and may never have been used."""
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
    """Text for a figure: a dollar sign is no formula, and a line end is seen."""
    return text.replace("$", r"\$").replace("\n", "⏎")
