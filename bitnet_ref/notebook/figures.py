"""Figures of plain data (matplotlib, `pip install 'bitnet-ref[notebooks]'`). Each function returns its figure.

matplotlib is imported when a figure is drawn. Nothing here computes, and nothing knows a model.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BackendUnavailable, printable
from ..reference.layers import Floats
from ..system.atomic import atomic_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Figure

    from ..serving.records import StepRecord
else:
    Figure = Any  # for annotations; matplotlib is not imported

# Grey for floats, green right, red wrong, orange and blue for the rest. Figures have no background: every colour, and
# the ink of axes and texts, can be seen on white and on black.
FLOAT, GOOD, WRONG, PLUS, MINUS = "#757575", "#3a923a", "#c94a4b", "#dd8a2b", "#4479c2"
PALE, INK, DARK = "#d0d0d0", "#787878", "#111111"  # DARK: texts on a light colour
# Colours that most people can tell apart (after Okabe and Ito), for series such as requests and cache policies
SERIES = ("#3b6fb6", "#dd8a2b", "#3a923a", "#a05195", "#56b4e9", "#8c6d31", "#c03d3e", "#7f7f7f")


def new_figure(rows: int = 1, columns: int = 1, *, size: tuple[float, float], **options: Any) -> tuple[Figure, Any]:
    """A matplotlib figure and its array of axes (rows, columns). pyplot does not keep it alive.

    Raises BackendUnavailable if matplotlib is not installed.
    """
    figure = figure_class()(figsize=size, dpi=80, layout="constrained", facecolor="none")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for ax in axes.flat:
        ax.set_facecolor("none")
        ax.tick_params(which="both", color=INK, labelcolor=INK)
        ax.spines[["top", "right"]].set_visible(False)
        ax.title.set_fontsize(11)
    return figure, axes


def describe_figure(figure: Figure) -> str:
    """A text in the place of the picture: what each panel shows, by its title, its axes and its legend.

    >>> from bitnet_ref.notebook.panels import lines, panels
    >>> describe_figure(panels(lines({"loss": ([0, 1], [3.0, 2.5])}, title="training", xlabel="step")))
    'training, a chart (step from 0 to 1; from 2.5 to 3)'
    """
    return "; ".join(filter(None, map(_describe_axes, figure.axes)))


def _describe_axes(ax: Any) -> str:
    kind = "a table of coloured cells" if ax.images else "a bar chart" if ax.patches else "a chart"
    if not ax.axison:
        texts = [text.get_text() for text in ax.texts if text.get_text()]
        return ", ".join(filter(None, [ax.get_title(), f"a diagram of {', '.join(texts[:20])}"])).replace("\n", " ")
    facts = []
    for label, axis, limits in (
        (ax.get_xlabel(), ax.xaxis, ax.dataLim.intervalx),
        (ax.get_ylabel(), ax.yaxis, ax.dataLim.intervaly),
    ):
        # on a logarithmic axis matplotlib writes $\mathdefault{10^{-3}}$
        texts = [tick.get_text().replace(r"$\mathdefault{", "") for tick in axis.get_ticklabels()]
        ticks = [text for text in texts if text]
        named = ticks and not any(text.lstrip("−-$")[:1].isdigit() for text in ticks[:2])
        extent = f"from {limits[0]:.3g} to {limits[1]:.3g}" if all(abs(each) < 1e300 for each in limits) else ""
        facts.append(f"{label} {', '.join(ticks[:12]) if named else extent}".strip())
    legend = ax.get_legend()
    series = f" of {', '.join(text.get_text() for text in legend.get_texts())}" if legend else ""
    words = f"{kind}{series} ({'; '.join(filter(None, facts))})"
    return f"{ax.get_title()}, {words}".removeprefix(", ").replace("\n", " ")


def gaps(figure: Figure) -> list[int]:
    """Where the picture of a figure may be cut between panels that stand side by side: pixels from its left edge. A
    panel without labels at its left is not parted from the one that has them. The figure has been drawn.

    >>> from bitnet_ref.notebook.panels import lines, panels
    >>> line = lines({"loss": ([0, 1], [3.0, 2.5])})
    >>> [len(as_png(panels(*[line] * count))[1]["gaps"]) for count in (1, 2, 3)]
    [0, 1, 2]
    """
    boxes: list[Any] = [ax.get_tightbbox() for ax in figure.axes]
    labelled = [ax.yaxis.get_tick_params()["labelleft"] for ax in figure.axes]
    (_, end, _), *spans = sorted((box.x0, box.x1, own) for box, own in zip(boxes, labelled, strict=True))
    cuts = []
    for left, right, own in spans:
        if left > end and own:
            cuts.append(round((end + left) / 2))
        end = max(end, right)
    return cuts


def as_png(figure: Figure) -> tuple[bytes, dict[str, Any]]:
    """The picture, and what a notebook keeps beside it: a text in its place, and its gaps."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue(), {"alt": describe_figure(figure), "gaps": gaps(figure)}


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the file's ending; the file is complete or not there at all."""
    with atomic_path(path) as temporary:
        figure.savefig(temporary)


@cache
def figure_class() -> Any:
    """matplotlib's Figure, shown by a notebook even if pyplot, which would register that, was never imported."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.spines import Spine
        from matplotlib.text import Text
    except ImportError as problem:
        raise BackendUnavailable("figures need matplotlib: pip install 'bitnet-ref[notebooks]'") from problem

    class ShownFigure(Figure):
        def savefig(self, *arguments: Any, **options: Any) -> None:
            artist: Any
            for artist in self.findobj(lambda each: isinstance(each, (Text, Spine))):
                if isinstance(artist, Spine):
                    artist.set_edgecolor(INK)
                elif artist.get_color() == "black":  # matplotlib's default
                    artist.set_color(INK)
            super().savefig(*arguments, **options)

        def _repr_png_(self) -> tuple[bytes, dict[str, Any]]:
            return as_png(self)

    return ShownFigure


def plain(text: str) -> str:
    """Text for a figure: a dollar sign starts no formula; line ends are visible, other control characters escaped."""
    return printable(text.replace("$", r"\$").replace("\n", "⏎"), keep="")


def token_bars(texts: Sequence[str], stages: Sequence[tuple[str, Floats]]) -> Figure:
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
        ax.set_yticks(places, [plain(text) for text in texts], family="monospace")
        ax.tick_params(labelleft=True)  # each panel can be read alone
        before = now
    axes[0, 0].set_xlim(left=0)
    axes[0, 0].invert_yaxis()
    return figure


def timeline(steps: Sequence[StepRecord], *, by_step: bool = False) -> Figure:
    """A row for each slot, a box for each step it took part in, a colour for each request, with its number where it
    begins; prompts are hatched. Below: tokens in the step, and waiting requests.

    by_step: all steps are equally wide, instead of by the clock.
    """
    slots = sorted({part.slot for step in steps for part in step.parts})
    rows = {slot: row for row, slot in enumerate(slots)}
    zero = steps[0].start_s if steps else 0.0
    places = [
        (i, 1.0) if by_step else ((step.start_s - zero) * 1e3, step.seconds * 1e3) for i, step in enumerate(steps)
    ]
    size = (6.2, 1.9 + 0.32 * len(slots))
    ratios = {"height_ratios": [max(1.0, 0.32 * len(slots)), 1.0]}
    figure, axes = new_figure(2, size=size, sharex=True, gridspec_kw=ratios)
    top, below = axes[:, 0]
    named: set[tuple[int, int]] = set()
    for step, (left, width) in zip(steps, places, strict=True):
        for part in step.parts:
            prefill, row = part.kind == "prefill", rows[part.slot]
            colour = SERIES[part.request_id % len(SERIES)]
            box = {"color": colour, "ec": "white", "lw": 0.4, "height": 0.86, "alpha": 0.55 if prefill else 1.0}
            top.barh(row, width, left=left, hatch="////" if prefill else None, **box)
            if (part.request_id, part.slot) not in named:
                named.add((part.request_id, part.slot))
                top.text(left, row - 0.02, f" {part.request_id}", ha="left", va="center", size=8, color=DARK)
    top.set(ylabel="slot", ylim=(len(slots) - 0.4, -0.6))
    top.set_yticks(range(len(slots)), [str(slot) for slot in slots])
    lefts, widths = [left for left, _ in places], [width for _, width in places]
    tokens = [sum(part.tokens for part in step.parts) for step in steps]
    below.bar(lefts, tokens, width=widths, align="edge", color=PALE, ec="white", lw=0.3, label="tokens in the step")
    below.step(lefts, [step.waiting for step in steps], where="post", color=SERIES[6], lw=1.2, label="requests waiting")
    below.set(xlabel="step" if by_step else "ms", ylabel="tokens, requests")
    below.legend(frameon=False, fontsize=8, loc="upper right")
    return figure
