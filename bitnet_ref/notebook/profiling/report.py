"""A profile as a table (in the shell, in text, in a notebook), as a figure and as a Chrome trace."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...system.atomic import atomic_path
from ..figures import DARK, MINUS, Figure, new_figure, plain
from .tree import OpTime, Phase, Span, Step

if TYPE_CHECKING:
    from rich.table import Table

LEVEL_COLOURS = ("#8c8c8c", MINUS, "#5b8fd0", "#dd8a2b", "#e8b06f", "#f0d0a8")
COLUMNS = ("", "calls", "ms", "share", "own ms", "mean us", "MB", "GB/s")


@dataclass(frozen=True)
class TableRow:
    """A line of the table. `level` 0 is a phase, or the time outside all phases."""

    level: int
    node: OpTime
    name: str
    share: float  # of the wall time

    def cells(self) -> tuple[str, ...]:
        """As text, in the order of COLUMNS. `own ms`: without the operations inside."""
        node = self.node
        own = f"{node.self_s * 1e3:.2f}" if node.children else ""
        mean = f"{node.mean_s * 1e6:.1f}" if node.calls else ""
        read = (f"{node.nbytes / 1e6:.1f}", f"{node.gb_per_s or 0:.1f}") if node.nbytes else ("", "")
        total = f"{node.total_s * 1e3:.2f}"
        return ("  " * self.level + self.name, str(node.calls or ""), total, f"{self.share:.1%}", own, mean, *read)


def table_rows(phases: Sequence[Phase], wall_s: float, outside_s: float) -> Iterator[TableRow]:
    """From the top down, all blocks in one line."""

    def row(level: int, node: OpTime, name: str) -> TableRow:
        return TableRow(level, node, name, node.total_s / (wall_s or 1.0))

    def below(node: OpTime, level: int) -> Iterator[TableRow]:
        for child in node.children.values():
            yield row(level, child, child.name)
            yield from below(child, level + 1)

    for phase in phases:
        top = phase.merged()
        yield row(0, top, phase.title)
        yield from below(top, 1)
    yield row(0, OpTime("outside", total_s=outside_s), "outside the model: choosing tokens, text, Python")


def as_table(rows: Iterator[TableRow]) -> Table:
    from rich.table import Table
    from rich.text import Text

    out = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", title=None)
    out.add_column(COLUMNS[0], overflow="fold")  # where there is little room, names are wrapped and no number is cut
    for column in COLUMNS[1:]:
        out.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        style = "bold" if row.level == 0 else "dim" if row.share < 0.01 else ""
        out.add_row(*(Text(cell) for cell in row.cells()), style=style)
    return out


def as_text(caption: str, rows: Iterator[TableRow]) -> str:
    """The table in plain text, as wide as it needs to be."""
    from rich.console import Console

    out = Console(width=160, color_system=None, force_jupyter=False, highlight=False, emoji=False, markup=False)
    with out.capture() as capture:
        out.print(as_table(rows))
    return "\n".join([caption, *(line.rstrip() for line in capture.get().splitlines())])


def as_html(caption: str, rows: Iterator[TableRow]) -> str:
    """The table with a bar behind each share."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in COLUMNS)
    body = ""
    for row in rows:
        name, *cells = (html.escape(cell.strip()) for cell in row.cells())
        width = f"{100 * min(1.0, row.share):.1f}%"
        style = f"text-align:left;padding-left:{0.5 + row.level}em;font-weight:{'normal' if row.level else 'bold'};"
        style += f"background:linear-gradient(90deg,#3b6fb633 {width},transparent {width})"
        body += f'<tr><td style="{style}">{name}</td>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
    return f"<table style='white-space:nowrap'><caption>{html.escape(caption)}</caption><tr>{head}</tr>{body}</table>"


def bars(node: OpTime, level: int = 0, start_s: float = 0.0) -> Iterator[tuple[int, float, OpTime]]:
    """(level, start_s, node) of the node and all below it; each child begins where the one before it ends."""
    yield level, start_s, node
    for child in node.children.values():
        yield from bars(child, level + 1, start_s)
        start_s += child.total_s


def icicles(roots: Sequence[tuple[str, OpTime]]) -> Figure:
    """A flame graph from the top down for each (title, root): bars below a bar are its parts; widths are times. Time
    in no child is a gap."""
    drawn = [list(bars(root)) for _, root in roots] or [[]]
    levels = [1 + max((level for level, _, _ in each), default=0) for each in drawn]
    size = (11, 0.7 * len(drawn) + 0.32 * sum(levels))
    figure, axes = new_figure(len(drawn), size=size, gridspec_kw={"height_ratios": levels})
    for ax, each, height, (title, root) in zip(axes[:, 0], drawn, levels, roots, strict=False):
        for level, start_s, node in each:
            colour, width_ms = LEVEL_COLOURS[min(level, len(LEVEL_COLOURS) - 1)], node.total_s * 1e3
            ax.barh(level, width_ms, left=start_s * 1e3, height=0.94, color=colour, ec="white", lw=0.6)
            room = int(node.total_s / (root.total_s or 1) * 150)  # letters that fit
            if room >= 4:
                name = node.name if len(node.name) <= room else node.name[: room - 1] + "…"
                style = {"ha": "center", "va": "center", "size": 8, "color": "white" if colour == MINUS else DARK}
                ax.text(start_s * 1e3 + width_ms / 2, level, plain(name), **style)
        ax.set(title=plain(title), xlabel="ms", yticks=[], xlim=(0, (root.total_s or 1) * 1e3))
        ax.set_ylim(height - 0.5, -0.5)
        ax.spines["left"].set_visible(False)
    return figure


def write_trace(steps: Sequence[Step], about: dict[str, Any], path: Path) -> Path:
    """The steps as a Chrome trace, one row per thread; the file is complete or not there at all.

    Format: JSON {"traceEvents": [...]}, a complete ("X") event for each call, `ts` and `dur` in microseconds (the Trace
    Event Format of the Chromium project). https://ui.perfetto.dev and https://www.speedscope.app open it.
    """
    zero = min((step.start_s for step in steps), default=0.0)
    threads: dict[int, int] = {}
    events: list[dict[str, Any]] = []
    for step in steps:
        row = threads.setdefault(step.thread, len(threads))
        whole = Span(step.kind, "", step.start_s, step.end_s, 0)
        for span in (whole, *step.spans):
            start_s, seconds = span.start_s - zero, span.end_s - span.start_s
            times = {"ts": round(start_s * 1e6, 3), "dur": round(seconds * 1e6, 3)}
            facts = {"tokens": step.tokens if span is whole else 0, "block": span.block, "bytes": span.nbytes}
            args = {key: value for key, value in facts.items() if value}
            events.append({"name": span.name, "cat": step.kind, "ph": "X", **times, "pid": 0, "tid": row, "args": args})
    with atomic_path(path) as temporary:
        text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about})
        temporary.write_text(text, encoding="utf-8")
    return path
