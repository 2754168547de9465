"""Figures described by data: `panels(bars(...), lines(...), cells(...))` is one figure of three panels, side by side.

Each function below returns a `Draw`, which draws on matplotlib's Axes; `axes` are options of `Axes.set` (title, xlim,
yscale, ...). A colour is a name of COLOURS, so that one thing has one colour in the whole course, or one of matplotlib.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .figures import DARK, FLOAT, GOOD, INK, MINUS, PALE, PLUS, SERIES, WRONG, Figure, new_figure, plain

COLOURS = {"minus": MINUS, "zero": "#e3e3e3", "plus": PLUS, "float": FLOAT, "good": GOOD, "wrong": WRONG, "pale": PALE}
Draw = Callable[[Any], None]
Colours = Mapping[str, str] | Sequence[str]


def panels(
    *draws: Draw,
    size: tuple[float, float] = (11, 3),
    rows: int = 1,
    widths: Sequence[float] | None = None,
    heights: Sequence[float] | None = None,
    **options: Any,
) -> Figure:
    """A figure with a panel for each Draw, in so many rows. size: inches. widths, heights: relative, of the columns
    and rows. options: sharex, sharey."""
    options |= {"width_ratios": widths, "height_ratios": heights}
    figure, axes = new_figure(rows, -(-len(draws) // rows), size=size, **options)
    for ax in axes.flat[len(draws) :]:
        ax.remove()
    for ax, draw in zip(axes.flat, draws, strict=False):
        draw(ax)
        ax.tick_params(labelleft=True)  # also where y is shared, so that each panel can be read alone
    return figure


def colour_of(colours: Colours, name: str, number: int) -> str:
    """The colour of the series of that name and number."""
    if isinstance(colours, Mapping):
        colour = colours.get(name, SERIES[number % len(SERIES)])
    else:
        colour = colours[number % len(colours)]
    return COLOURS.get(colour, colour)


def finish(ax: Any, axes: Mapping[str, Any], legend: str | bool) -> None:
    """Set the options of the axes, and a legend: at a place of matplotlib's, "beside" the panel, or none."""
    ax.set(**axes)
    if legend == "beside":
        ax.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    elif legend:
        ax.legend(frameon=False, fontsize=8, loc="best" if legend is True else legend)


def draw_levels(line: Callable[..., Any], levels: Mapping[str, float] | None) -> None:
    """Lines at values, by `line`, which is `axhline` or `axvline`."""
    for number, (label, level) in enumerate((levels or {}).items()):
        line(level, color=INK, lw=1, ls=("--", ":", "-.")[number % 3], label=label)


def bars(
    names: Sequence[str],
    series: Mapping[str, ArrayLike],
    *,
    colours: Colours = SERIES,
    stacked: bool = False,
    upright: bool = False,
    text: str | Sequence[str] = "",
    levels: Mapping[str, float] | None = None,
    legend: str | bool | None = None,
    **axes: Any,
) -> Draw:
    """Bars of each series (n,) for n names, horizontal unless `upright`. With one series, a list of n colours gives
    each bar its own. text: what stands at a bar's end: the format of its value, as "{:.1f}", or n texts. levels: dashed
    lines at values."""

    def draw(ax: Any) -> None:
        places = np.arange(len(names))
        start, thickness = np.zeros(len(names)), 0.8 if stacked else 0.8 / len(series)
        for number, (label, values) in enumerate(series.items()):
            one_each = len(series) == 1 and not isinstance(colours, Mapping) and len(colours) == len(names)
            colour = (
                [colour_of(colours, "", i) for i in range(len(names))]
                if one_each
                else colour_of(colours, label, number)
            )
            shift = 0 if stacked else (number - (len(series) - 1) / 2) * thickness
            options = {"color": colour, "label": label if len(series) > 1 else "_nolegend_"}
            if upright:
                drawn = ax.bar(places + shift, values, thickness, bottom=start, **options)
            else:
                drawn = ax.barh(places + shift, values, thickness, left=start, **options)
            if stacked:
                start = start + np.asarray(values)
            if text:
                ends = [text.format(value) for value in np.asarray(values)] if isinstance(text, str) else list(text)
                ax.bar_label(drawn, labels=ends, padding=3, fontsize=8)
        draw_levels(ax.axhline if upright else ax.axvline, levels)
        shown = [plain(str(name)) for name in names]
        turned = upright and sum(map(len, shown)) > 60
        (ax.set_xticks if upright else ax.set_yticks)(places, shown, rotation=90 if turned else 0, fontsize=8)
        if not upright:
            ax.invert_yaxis()
        finish(ax, axes, legend if legend is not None else len(series) + len(levels or ()) > 1)

    return draw


def lines(
    series: Mapping[str, tuple[ArrayLike, ArrayLike]],
    *,
    colours: Colours = SERIES,
    style: str | Mapping[str, str] = "-",
    bands: Mapping[str, tuple[ArrayLike, ArrayLike]] | None = None,
    marks: Mapping[str, ArrayLike] | None = None,
    levels: Mapping[str, float] | None = None,
    notes: Mapping[str, tuple[float, float]] | None = None,
    legend: str | bool = True,
    **axes: Any,
) -> Draw:
    """A line (or points, by matplotlib's style, as "o-", for all or each) through (x, y) of each series.
    bands: (low, high) of a series, shaded. marks: dotted vertical lines at x, red unless `colours` names them.
    levels: dashed horizontal lines at y. notes: texts at (x, y)."""

    def draw(ax: Any) -> None:
        for number, (label, (x, y)) in enumerate(series.items()):
            own = style if isinstance(style, str) else style.get(label, "-")
            colour = colour_of(colours, label, number)
            ax.plot(x, y, own, color=colour, label=label, ms=4, lw=1.5)
            if label in (bands or {}):
                ax.fill_between(x, *(bands or {})[label], color=colour, alpha=0.2, lw=0)
        for label, places in (marks or {}).items():
            colour = colour_of(colours, label, 0) if isinstance(colours, Mapping) and label in colours else WRONG
            for number, place in enumerate(np.atleast_1d(places)):
                ax.axvline(place, color=colour, lw=1.2, ls=":", label=None if number else label)
        draw_levels(ax.axhline, levels)
        for label, place in (notes or {}).items():
            ax.annotate(label, place, (4, 4), textcoords="offset points", fontsize=8)
        finish(ax, axes, legend and len(series) + len(marks or ()) + len(levels or ()) > 1 and legend)

    return draw


def histogram(
    series: Mapping[str, ArrayLike],
    bins: ArrayLike,
    *,
    colours: Colours = SERIES,
    **axes: Any,
) -> Draw:
    """How often the values of each series (of any shape) fall between two of the edges `bins`, one drawn over the
    other."""

    def draw(ax: Any) -> None:
        for number, (label, values) in enumerate(series.items()):
            ax.hist(np.ravel(values), np.asarray(bins), color=colour_of(colours, label, number), label=label)
        finish(ax, {"ylabel": "count", **axes}, len(series) > 1)

    return draw


def cells(
    values: ArrayLike,
    *,
    text: ArrayLike | None = None,
    palette: str | Sequence[str] = "Oranges",
    limits: tuple[float, float] | None = None,
    rows: Sequence[Any] | None = None,
    columns: Sequence[Any] | None = None,
    square: bool = False,
    **axes: Any,
) -> Draw:
    """A table of coloured cells (R, C), with a text (R, C) in each. palette: matplotlib's, or a colour for each of the
    integers from limits[0] on; "ternary" is that for -1, 0 and +1. rows, columns: the names of the ticks."""

    def draw(ax: Any) -> None:
        from matplotlib import colormaps
        from matplotlib.colors import ListedColormap
        from matplotlib.ticker import MaxNLocator

        table = np.asarray(values, dtype=np.float64)
        low, high = limits or (float(np.nanmin(table)), float(np.nanmax(table)))
        chosen: Any = ("minus", "zero", "plus") if palette == "ternary" else palette
        if palette == "ternary":
            low, high = -1, 1
        if isinstance(chosen, str):
            colours = colormaps[chosen]
        else:
            colours = ListedColormap([COLOURS.get(colour, colour) for colour in chosen])
            high = low + len(chosen) - 1
        options = {"cmap": colours, "vmin": low, "vmax": high, "interpolation": "nearest"}
        image = ax.imshow(table, aspect="equal" if square else "auto", **options)
        if table.size <= 2400:  # white lines between the cells
            ax.set_xticks(np.arange(table.shape[1] + 1) - 0.5, minor=True)
            ax.set_yticks(np.arange(table.shape[0] + 1) - 0.5, minor=True)
            ax.grid(which="minor", color="white", lw=0.6)
            ax.tick_params(which="minor", length=0)
        for (r, c), word in np.ndenumerate(np.asarray(text) if text is not None else np.empty((0, 0), dtype=object)):
            red, green, blue, _ = image.to_rgba(table[r, c])
            dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.55
            style = {"ha": "center", "va": "center", "fontsize": 8, "color": "white" if dark else DARK}
            ax.text(c, r, "\n".join(map(plain, str(word).split("\n"))), **style)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        if columns is not None:
            turned = sum(len(str(name)) for name in columns) > 50
            ax.set_xticks(range(len(columns)), [plain(str(name)) for name in columns], rotation=90 * turned, fontsize=8)
        if rows is not None:
            ax.set_yticks(range(len(rows)), [plain(str(name)) for name in rows], fontsize=8)
        ax.spines[:].set_visible(False)
        ax.set(**axes)

    return draw


def spans(
    rows: Mapping[str, Sequence[tuple[float, float, str, str]]],
    *,
    marks: Mapping[str, float] | None = None,
    **axes: Any,
) -> Draw:
    """A row of boxes (start, end, text, colour) for each name, over a common axis. marks: dashed vertical lines."""

    def draw(ax: Any) -> None:
        for row, boxes in enumerate(rows.values()):
            for start, end, text, colour in boxes:
                ax.barh(row, end - start, left=start, height=0.7, color=COLOURS.get(colour, colour), ec="white")
                pale = colour in ("zero", "pale")
                style = {"ha": "center", "va": "center", "fontsize": 8, "color": DARK if pale else "white"}
                ax.text((start + end) / 2, row, text, **style)
        for label, place in (marks or {}).items():
            ax.axvline(place, color=INK, lw=1.5, ls="--")
            style = {"ha": "center", "va": "bottom", "fontsize": 8}
            ax.text(place, -0.75, label, **style)
        ax.set_yticks(range(len(rows)), list(rows), fontsize=8)
        ax.set(ylim=(len(rows) - 0.5, -0.9 if marks else -0.5), **axes)

    return draw


def diagram(
    boxes: Mapping[str, tuple[float, float, str]], arrows: Sequence[tuple[str, str] | tuple[str, str, str]], **axes: Any
) -> Draw:
    """Boxes {text: (x, y, colour)} and arrows (from, to[, label]) between their texts. Sizes follow the texts."""

    def draw(ax: Any) -> None:
        ax.set_axis_off()
        drawn = {}
        for text, (x, y, colour) in boxes.items():
            pale = colour in ("zero", "pale", "white")
            frame = {"boxstyle": "round,pad=0.45", "fc": COLOURS.get(colour, colour), "ec": FLOAT if pale else "none"}
            style = {"ha": "center", "va": "center", "fontsize": 8.5, "color": DARK if pale else "white"}
            drawn[text] = ax.text(x, y, plain(text) if "\n" not in text else text, bbox=frame, zorder=3, **style)
        for start, end, *label in arrows:
            (x0, y0, _), (x1, y1, _) = boxes[start], boxes[end]
            line = {"arrowstyle": "-|>", "color": FLOAT, "shrinkA": 0, "shrinkB": 0}
            line |= {"patchA": drawn[start].get_bbox_patch(), "patchB": drawn[end].get_bbox_patch()}
            ax.annotate("", (x1, y1), (x0, y0), arrowprops=line, zorder=2)
            for word in label:
                paper: dict[str, Any] = {"fc": COLOURS["zero"], "ec": "none", "pad": 1}
                style = {"fontsize": 8, "ha": "center", "va": "center", "color": DARK}
                ax.text((x0 + x1) / 2, (y0 + y1) / 2, word, bbox=paper, zorder=4, **style)
        xs, ys = zip(*[(x, y) for x, y, _ in boxes.values()], strict=True)
        ax.set(xlim=(min(xs) - 0.6, max(xs) + 0.6), ylim=(min(ys) - 0.5, max(ys) + 0.5), **axes)

    return draw
