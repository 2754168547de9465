"""Beam search as a tree: every continuation that was weighed, which of them went on, and the one that won."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from .style import GOOD, MINUS, PALE, PLUS, new_figure, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FATES = {"running": MINUS, "ended": PLUS, "cut": PALE}


class Node(Protocol):
    """One token of one continuation. `parent`: index of the node it continues, None after the prompt."""

    @property
    def step(self) -> int: ...  # 1: the first new token
    @property
    def text(self) -> str: ...
    @property
    def score(self) -> float: ...
    @property
    def parent(self) -> int | None: ...
    @property
    def fate(self) -> str: ...  # of FATES
    @property
    def chosen(self) -> bool: ...


def heights(nodes: Sequence[Node]) -> list[float]:
    """A height for each node: leaves one below the other, parents in the middle of their children. Parents come first.

    No two edges cross.
    """
    children: dict[int | None, list[int]] = {}
    for index, node in enumerate(nodes):
        children.setdefault(node.parent, []).append(index)
    found = [0.0] * len(nodes)
    row = 0.0
    waiting = [(index, False) for index in reversed(children.get(None, []))]
    while waiting:
        index, done = waiting.pop()
        below = children.get(index, [])
        if done:
            found[index] = (found[below[0]] + found[below[-1]]) / 2
        elif below:
            waiting += [(index, True), *((child, False) for child in reversed(below))]
        else:
            found[index] = row
            row += 1
    return found


def beam_tree(prompt: str, nodes: Sequence[Node]) -> Figure:
    """The tree from left to right. Blue goes on, orange has ended, grey was cut; green is the best in the end."""
    ys = heights(nodes)
    steps = max((node.step for node in nodes), default=0)
    root = ys[next((i for i, node in enumerate(nodes) if node.chosen), 0)] if nodes else 0.0
    leaves = 1 + max(ys, default=0.0)
    figure, axes = new_figure(size=(1.6 + 1.6 * steps, 0.8 + 0.2 * leaves))
    ax = axes[0, 0]
    ax.text(0, root, plain(prompt[-18:]) + " ", ha="right", va="center", size=9)
    for node, y in zip(nodes, ys, strict=True):
        from_x, from_y = (0.0, root) if node.parent is None else (nodes[node.parent].step, ys[node.parent])
        colour = GOOD if node.chosen else FATES[node.fate]
        ax.plot([from_x + 0.02, node.step - 0.62], [from_y, y], color=colour, lw=1.8 if node.chosen else 0.8, zorder=1)
        words = f"{plain(node.text)}  {node.score:.1f}"
        weight = "bold" if node.chosen else "normal"
        text_colour = "#999999" if node.fate == "cut" else colour
        ax.text(node.step - 0.6, y, words, ha="left", va="center", size=8, color=text_colour, weight=weight)
    ax.set(xlim=(-0.9, steps + 0.7), xlabel="new tokens", xticks=range(1, steps + 1), yticks=[])
    ax.set_ylim(leaves - 0.5, -0.5)
    ax.spines["left"].set_visible(False)
    return figure
