"""A profile's tree as a flame graph from the top down: what lies under a bar is part of it, and widths are times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..figures.style import MINUS, new_figure, plain
from .tree import OpTime

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEVEL_COLOURS = ("#8c8c8c", MINUS, "#5b8fd0", "#dd8a2b", "#e8b06f", "#f0d0a8")


class Bar(NamedTuple):
    """One rectangle, in seconds from the left end of the root."""

    level: int
    start_s: float
    width_s: float
    name: str


def bars(node: OpTime, level: int = 0, start_s: float = 0.0) -> Iterator[Bar]:
    """The node and all below it; each child begins where the one before it ends."""
    yield Bar(level, start_s, node.total_s, node.name)
    for child in node.children.values():
        yield from bars(child, level + 1, start_s)
        start_s += child.total_s


def icicles(roots: Sequence[tuple[str, OpTime]]) -> Figure:
    """A figure with an icicle for each (title, root). The gaps are time in no child."""
    drawn = [list(bars(root)) for _, root in roots] or [[]]
    levels = [1 + max((bar.level for bar in each), default=0) for each in drawn]
    size = (11, 0.7 * len(drawn) + 0.32 * sum(levels))
    figure, axes = new_figure(len(drawn), size=size, gridspec_kw={"height_ratios": levels})
    for ax, each, (title, root) in zip(axes[:, 0], drawn, roots, strict=False):
        for bar in each:
            colour = LEVEL_COLOURS[min(bar.level, len(LEVEL_COLOURS) - 1)]
            ax.barh(bar.level, bar.width_s * 1e3, left=bar.start_s * 1e3, height=0.94, color=colour, ec="white", lw=0.6)
            room = int(bar.width_s / (root.total_s or 1) * 150)  # letters that fit
            if room >= 4:
                name = bar.name if len(bar.name) <= room else bar.name[: room - 1] + "…"
                ax.text((bar.start_s + bar.width_s / 2) * 1e3, bar.level, plain(name), ha="center", va="center", size=8)
        ax.set(title=plain(title), xlabel="ms", yticks=[], xlim=(0, (root.total_s or 1) * 1e3))
        ax.set_ylim(max(bar.level for bar in each) + 0.5, -0.5)
        ax.spines["left"].set_visible(False)
    return figure
