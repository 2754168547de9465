"""A profile as a table: in the shell, in text, in a notebook."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .profile import Profile, title
from .tree import OpTime

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = ("", "calls", "ms", "share", "own ms", "mean us", "MB", "GB/s")


@dataclass(frozen=True)
class Row:
    """A line of the table. `level` 0 is a phase, or what is outside of all."""

    level: int
    name: str
    node: OpTime
    share: float  # of the wall time

    def cells(self) -> tuple[str, ...]:
        """As text, in the order of COLUMNS. `own ms`: what no operation inside took."""
        node = self.node
        inside = f"{node.self_s * 1e3:.2f}" if node.children else ""
        read = (f"{node.nbytes / 1e6:.1f}", f"{node.gb_per_s or 0:.1f}") if node.nbytes else ("", "")
        times = (f"{node.total_s * 1e3:.2f}", f"{self.share:.1%}", inside)
        return ("  " * self.level + self.name, str(node.calls or ""), *times, *_mean(node), *read)


def _mean(node: OpTime) -> tuple[str]:
    return (f"{node.mean_s * 1e6:.1f}" if node.calls else "",)


def rows(profile: Profile, blocks: bool = False) -> Iterator[Row]:
    """From the top down; blocks: each block for itself, else all blocks in one line."""
    wall_s = profile.wall_s or 1.0

    def below(node: OpTime, level: int) -> Iterator[Row]:
        for child in node.children.values():
            yield Row(level, child.name, child, child.total_s / wall_s)
            yield from below(child, level + 1)

    for phase in profile.in_order():
        top = phase.forward if blocks else phase.merged()
        yield Row(0, title(phase), top, top.total_s / wall_s)
        yield from below(top, 1)
    outside = OpTime("outside", total_s=profile.outside_s)
    yield Row(0, "outside the model: choosing tokens, text, Python", outside, outside.total_s / wall_s)


def caption(profile: Profile) -> str:
    words = f"{profile.backend}, {profile.wall_s:.3f} s"
    if len(profile.threads) > 1:
        words += f", steps of {len(profile.threads)} threads, which overlap"
    return words


def table(profile: Profile, blocks: bool = False) -> Table:
    """For a rich console."""
    from rich.table import Table
    from rich.text import Text

    out = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", title=None)
    for index, column in enumerate(COLUMNS):
        out.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows(profile, blocks):
        style = "bold" if row.level == 0 else "dim" if row.share < 0.01 else ""
        out.add_row(*(Text(cell) for cell in row.cells()), style=style)
    return out


def as_text(profile: Profile) -> str:
    """The table in plain text, as wide as it has to be."""
    from rich.console import Console

    plain: dict[str, Any] = {"highlight": False, "emoji": False, "markup": False}
    out = Console(width=160, color_system=None, force_jupyter=False, **plain)
    with out.capture() as capture:
        out.print(table(profile))
    lines = [line.rstrip() for line in capture.get().splitlines()]
    return "\n".join([caption(profile), *lines])


def as_html(profile: Profile) -> str:
    """The table with a bar behind each share."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in COLUMNS)
    body = "".join(_html_row(row) for row in rows(profile))
    return f"<table><caption>{html.escape(caption(profile))}</caption><tr>{head}</tr>{body}</table>"


def _html_row(row: Row) -> str:
    name, calls, total, share, *more = (html.escape(cell.strip()) for cell in row.cells())
    width = f"{100 * min(1.0, row.share):.1f}%"
    bar = f"background:linear-gradient(90deg,#3b6fb633 {width},transparent {width})"
    weight = "bold" if row.level == 0 else "normal"
    first = f'<td style="text-align:left;padding-left:{0.5 + row.level}em;font-weight:{weight};{bar}">{name}</td>'
    return f"<tr>{first}{''.join(f'<td>{cell}</td>' for cell in (calls, total, share, *more))}</tr>"
