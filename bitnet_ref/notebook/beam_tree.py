"""Beam search with its history: every continuation that it weighed, as a tree."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..backends.loaded import LoadedModel
from ..errors import GenerationError
from ..generation.params import SamplingParams
from ..generation.results import Generation, GenerationStats
from ..generation.search import BeamCandidate, beam_search
from ..generation.sequence import Request
from ..reference.cache import TokenIds
from .next_token import token_texts

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class BeamNode:
    """One more token on a beam. `score`: sum of the ln p of all its tokens; `worth`: the final score of one that ended,
    which the length penalty may have moved."""

    step: int  # 1: the first new token
    token_id: int
    text: str  # "▁the"
    score: float
    parent: int | None  # index of the node that it continues; None: the prompt
    fate: str  # "running": it went on; "ended"; "cut": others were better
    worth: float | None = None
    chosen: bool = False  # on the way to the best result


@dataclass(frozen=True)
class BeamTree:
    """`nodes`: parents before children, of a step the best first. `results`: what `generate` gives, best first."""

    prompt: str
    nodes: list[BeamNode]
    results: list[Generation]

    def plot(self, *, cut: int | None = 2) -> Figure:
        """The tree, left to right. cut: so many of the rejected continuations of each step (None: all). Needs
        matplotlib."""
        from .figures import beam_tree as draw

        shown: list[BeamNode] = []
        places: dict[int, int] = {}
        rejected: dict[int, int] = {}
        for index, node in enumerate(self.nodes):
            if node.fate == "cut":
                rejected[node.step] = rejected.get(node.step, 0) + 1
                if cut is not None and rejected[node.step] > cut:
                    continue
            places[index] = len(shown)
            shown.append(replace(node, parent=None if node.parent is None else places[node.parent]))
        return draw(self.prompt, shown)


def beam_tree(model: LoadedModel, prompt: str | TokenIds, **params: Any) -> BeamTree:
    """Beam search on one prompt, and all that it weighed. params: as for `generate`, with num_beams of 2 or more.

    Raises GenerationError.
    """
    sampling = SamplingParams.of(**params)
    if sampling.num_beams < 2:
        raise GenerationError(f"num_beams: a tree needs 2 or more, got {sampling.num_beams}")
    request = Request(model, prompt, sampling)
    steps: list[list[BeamCandidate]] = []
    stats = GenerationStats(model.backend.name)
    results = beam_search(model, [request], stats, lambda _, step: steps.append(step))[0]
    text = prompt if isinstance(prompt, str) else model.tokenizer.decode(request.prompt.tolist())
    return BeamTree(text, _nodes(model, steps, tuple(results[0].token_ids) if results else ()), results)


def _nodes(model: LoadedModel, steps: list[list[BeamCandidate]], best: tuple[int, ...]) -> list[BeamNode]:
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
    return nodes
