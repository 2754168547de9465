"""Beam search with its history: every continuation that it weighed, as a tree, and its figure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from ..backends.loaded import LoadedModel
from ..errors import GenerationError
from ..generation.generate import search_beams
from ..generation.params import SamplingParams
from ..generation.results import Generation, GenerationStats
from ..generation.search import BeamCandidate
from ..generation.sequence import Request
from ..reference.cache import TokenIds
from .figures import GOOD, MINUS, PALE, PLUS, Figure, new_figure, plain
from .next_token import token_texts

FATES = {"running": MINUS, "ended": PLUS, "cut": PALE}


@dataclass(frozen=True)
class BeamNode:
    """One more token on a beam. `score`: sum of the ln p of all its tokens; `worth`: the final score of one that ended,
    which the length penalty may have moved."""

    step: int  # 1: the first new token
    token_id: int
    text: str  # "▁the"
    score: float
    parent: int | None  # index of the node that it continues; None: the prompt
    fate: str  # "running", "ended", or "cut" (pruned)
    worth: float | None = None
    chosen: bool = False  # on the way to the best result


@dataclass(frozen=True)
class BeamTree:
    """`nodes`: parents before children, the best of each step first. `results`: what `generate` gives, best first."""

    prompt: str
    nodes: list[BeamNode]
    results: list[Generation]

    def __repr__(self) -> str:
        best = repr(self.results[0].text[:60]) if self.results else "nothing"
        return f"<bitnet_ref.BeamTree of {len(self.nodes)} nodes; best: {best}>"

    def plot(self, *, cut: int | None = 2) -> Figure:
        """The tree, left to right. cut: how many rejected continuations of each step are shown (None: all).

        Needs matplotlib."""
        shown: list[BeamNode] = []
        places: dict[int, int] = {}
        rejected: Counter[int] = Counter()
        for index, node in enumerate(self.nodes):
            rejected[node.step] += node.fate == "cut"
            if node.fate == "cut" and cut is not None and rejected[node.step] > cut:
                continue
            places[index] = len(shown)
            shown.append(replace(node, parent=None if node.parent is None else places[node.parent]))
        return draw_tree(self.prompt, shown)


def beam_tree(model: LoadedModel, prompt: str | TokenIds, **params: Any) -> BeamTree:
    """Beam search on one prompt, with its history. params: as for `generate`, with num_beams of 2 or more.

    Raises GenerationError.
    """
    sampling = SamplingParams.of(**params)
    if sampling.num_beams < 2:
        raise GenerationError(f"a tree needs 2 or more, got {sampling.num_beams}", field="num_beams")
    request = Request(model, prompt, sampling)
    steps: list[list[BeamCandidate]] = []
    stats = GenerationStats(model.backend.name)
    results = search_beams(model, [request], stats, steps.append)[0]
    best = tuple(results[0].token_ids) if results else ()
    nodes: list[BeamNode] = []
    running: list[int] = []  # the nodes of the beams that the next step continues
    for number, step in enumerate(steps, start=1):
        texts = token_texts(model, [candidate.beam.tokens[-1] for candidate in step])
        parents, running = running, []
        for (beam, fate, final_score), text in zip(step, texts, strict=True):
            if fate == "running":
                running.append(len(nodes))
            parent = parents[beam.parent] if parents else None
            chosen = fate != "cut" and beam.tokens == best[:number]
            nodes.append(BeamNode(number, beam.tokens[-1], text, beam.score, parent, fate, final_score, chosen))
    title = prompt if isinstance(prompt, str) else model.tokenizer.decode(request.prompt.tolist())
    return BeamTree(title, nodes, results)


def heights(nodes: Sequence[BeamNode]) -> list[float]:
    """A height for each node, so that no two edges cross: leaves one below the other, parents amid their children.

    Parents come before their children in `nodes`.
    """
    children: defaultdict[int | None, list[int]] = defaultdict(list)
    for index, node in enumerate(nodes):
        children[node.parent].append(index)
    ys, leaves, waiting = [0.0] * len(nodes), count(), children[None][::-1]
    while waiting:  # depth first, from the top
        index = waiting.pop()
        waiting += children[index][::-1]
        ys[index] = next(leaves) if not children[index] else 0.0
    for index in reversed(range(len(nodes))):
        if below := children[index]:
            ys[index] = (ys[below[0]] + ys[below[-1]]) / 2
    return ys


def draw_tree(prompt: str, nodes: Sequence[BeamNode]) -> Figure:
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
