"""Bars of next-token probabilities, a panel for each stage between the model and the choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from numpy.typing import NDArray

from .style import FLOAT, MINUS, PALE, WRONG, new_figure, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def token_bars(texts: Sequence[str], stages: Sequence[tuple[str, NDArray]]) -> Figure:
    """texts: of n tokens, the most likely first. stages: (title, probabilities (n,)), the model's own first.

    Behind each stage's bars are those of the stage before it, in grey; a cross marks a token that a stage leaves out.
    """
    size = (1.2 + 2.1 * len(stages), 0.6 + 0.24 * len(texts))
    figure, axes = new_figure(1, len(stages), size=size, sharex=True, sharey=True)
    places = range(len(texts))
    before = None
    for ax, (title, now) in zip(axes[0], stages, strict=True):
        if before is not None:
            ax.barh(places, before, color=PALE, height=0.8)
        ax.barh(places, now, color=FLOAT if before is None else MINUS, height=0.5)
        for place in places:
            if before is not None and before[place] > 0 and now[place] == 0:
                ax.plot(0, place, "x", color=WRONG, ms=6, clip_on=False)
        ax.set(title=title, xlabel="p")
        before = now
    axes[0, 0].set_xlim(left=0)
    axes[0, 0].set_yticks(places, [plain(text) for text in texts], family="monospace")
    axes[0, 0].invert_yaxis()
    return figure
