"""The tree of a beam search holds what was weighed, and its best path is the result."""

import math

import pytest
from helpers import model

from bitnet_ref.errors import GenerationError
from bitnet_ref.generation.sampling import log_probability
from bitnet_ref.notebook import beam_tree
from bitnet_ref.notebook.beam_tree import heights

PROMPT = "Once upon a time, there was"


@pytest.fixture(scope="module")
def tree():
    return beam_tree(model("storyteller"), PROMPT, num_beams=3, max_tokens=6, n=2)


def way(tree, node):
    """The nodes from the prompt to this one."""
    nodes = [node]
    while nodes[0].parent is not None:
        nodes.insert(0, tree.nodes[nodes[0].parent])
    return nodes


def test_results_are_those_of_generate(tree):
    outs = model("storyteller").generate(PROMPT, num_beams=3, max_tokens=6, n=2)
    assert [(out.token_ids, out.score) for out in tree.results] == [(out.token_ids, out.score) for out in outs]


def test_the_best_path_is_the_best_result(tree):
    chosen = [node for node in tree.nodes if node.chosen]
    assert [node.token_id for node in chosen] == tree.results[0].token_ids
    assert way(tree, chosen[-1]) == chosen
    assert chosen[-1].fate == "ended"
    assert chosen[-1].worth == tree.results[0].score
    assert chosen[-1].score == pytest.approx(sum(tree.results[0].logprobs))


def test_scores_are_sums_of_the_models_log_probabilities(tree):
    story = model("storyteller")
    prompt = story.tokenizer.encode(PROMPT)
    for node in tree.nodes[:: max(1, len(tree.nodes) // 6)]:
        tokens = [each.token_id for each in way(tree, node)]
        logits = story.logits([*prompt, *tokens])
        expected = sum(log_probability(logits[len(prompt) - 1 + i], token) for i, token in enumerate(tokens))
        assert node.score == pytest.approx(expected, abs=1e-4)


def test_each_step_keeps_the_best(tree):
    for step in range(1, 7):
        here = [node for node in tree.nodes if node.step == step]
        assert sum(node.fate == "running" for node in here) == (3 if step < 6 else 0)
        kept = [node.score for node in here if node.fate != "cut"]
        assert min(kept) >= max((node.score for node in here if node.fate == "cut"), default=-math.inf)
        assert [node.score for node in here] == sorted((node.score for node in here), reverse=True)
        assert all((node.parent is None) == (step == 1) for node in here)
        assert all(node.parent is None or tree.nodes[node.parent].fate == "running" for node in here)


def test_one_beam_is_no_tree():
    with pytest.raises(GenerationError, match="2 or more, got 1"):
        beam_tree(model("storyteller"), PROMPT, max_tokens=3)


def test_heights_cross_nowhere(tree):
    ys = heights(tree.nodes)
    leaves = set(range(len(tree.nodes))) - {node.parent for node in tree.nodes}
    assert sorted(ys[i] for i in leaves) == list(range(len(leaves)))
    for step in range(1, 6):
        edges = sorted((ys[n.parent], ys[i]) for i, n in enumerate(tree.nodes) if n.step == step + 1)
        assert [end for _, end in edges] == sorted(end for _, end in edges)
    for index, node in enumerate(tree.nodes):
        below = [ys[i] for i, other in enumerate(tree.nodes) if other.parent == index]
        if below:
            assert min(below) <= ys[index] <= max(below), node


@pytest.mark.thorough
def test_the_figure_draws_every_node(tree):
    pytest.importorskip("matplotlib")
    assert len(tree.plot(cut=None).axes[0].lines) == len(tree.nodes)
    kept = sum(node.fate != "cut" for node in tree.nodes)
    assert len(tree.plot(cut=0).axes[0].lines) == kept
    assert kept < len(tree.plot(cut=1).axes[0].lines) <= kept + 6
    words = [text.get_text() for text in tree.plot().axes[0].texts]
    assert all(any(n.text in word for word in words) for n in tree.nodes if n.chosen)


def test_a_repr_fits_a_cell(tree):
    assert len(repr(tree)) < 200
