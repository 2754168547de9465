"""Notebook 3c: looking into the running model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ....api import Model
from ..answers import as_array, as_number, expect_array, expect_number
from ..declare import Wrong, exercise, run


@exercise(
    "3c.1",
    "numbers_per_token",
    hints=("A key and a value, in each block, for each key/value head.", "2 · L · G · d"),
    solution="numbers_per_token = 2 * L * G * d",
)
def size_of_the_cache(answer: Any, model: Model) -> str:
    c = model.config
    blocks, heads, shared, width = c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads, c.head_dim
    right = 2 * blocks * shared * width
    mistakes = {
        blocks * shared * width: "A key and a value are kept, and for each of G heads: one of these is missing.",
        2 * shared * width: "That is one block; each of them has a cache.",
        2 * blocks * heads * width: "That is a key for each query head; two of them share one (G, not H).",
        2 * blocks * shared: "Those are vectors; each has d numbers.",
    }
    expect_number(answer, right, mistakes=mistakes, hint="2 of them (key, value), in each of L blocks ...")
    return f"With a key/value head for each query head it would be {heads // shared} times as many."


@exercise(
    "3c.2",
    "changed_rows",
    hints=(
        "Row i of the logits is the prediction made after reading tokens 0 to i.",
        "Which rows have read the last token?",
    ),
    solution="changed_rows = [N - 1]",
)
def future_is_hidden(answer: Any, tokens: list[int]) -> str:
    given = as_array(answer)
    given = np.flatnonzero(given) if given.dtype == bool and given.size == len(tokens) else given.ravel()
    last = len(tokens) - 1
    if any(not -len(tokens) <= as_number(each) <= last for each in given):
        raise Wrong(f"The rows are 0 to {last}.")
    rows = {int(as_number(each)) % len(tokens) for each in given}
    if rows == {last}:
        return "Every other token sees itself and those before it only."
    if not rows:
        raise Wrong("One row must change: the model reads the last token, too.")
    if rows == set(range(last)):
        raise Wrong("It is the other way round: those rows were computed before the last token was read.")
    if len(rows) == len(tokens):
        raise Wrong("Row 0 has read token 0 only: how could it change?")
    if last not in rows:
        raise Wrong(f"Row {max(rows)} has read tokens 0 to {max(rows)} only; the last token is {last}.")
    raise Wrong(f"Row {min(rows)} has not read token {last}.")


@exercise(
    "3c.3",
    "loss_without",
    minutes=15,
    hints=(
        "replace(w, layers=...) makes weights with fewer layers; the config must know it too.",
        "broken(weights=..., num_hidden_layers=L - 1).logits(passage_ids)",
    ),
    solution="""
def loss_without(block):
    others = tuple(layer for i, layer in enumerate(w.layers) if i != block)
    engine = broken(weights=replace(w, layers=others), num_hidden_layers=L - 1)
    return loss_of(engine.logits(passage_ids), passage_ids)
""",
)
def ablation(
    answer: Any, model: Model, broken: Callable[..., Any], loss_of: Callable[..., Any], passage_ids: Any
) -> str:
    """broken, loss_of, passage_ids: the notebook's own."""
    losses = np.array([as_number(run(answer, block)) for block in range(model.config.num_hidden_layers)])
    layers = model.weights.layers
    without = [replace(model.weights, layers=layers[:i] + layers[i + 1 :]) for i in range(len(layers))]
    right = np.array(
        [
            loss_of(broken(weights=each, num_hidden_layers=len(layers) - 1).logits(passage_ids), passage_ids)
            for each in without
        ]
    )
    mistakes = {
        "no block is left out: each loss is that of the whole model": np.full_like(
            right, loss_of(model.logits(passage_ids), passage_ids)
        ),
        "the block after it is left out": np.roll(right, -1),
        "the block before it is left out": np.roll(right, 1),
        "the blocks are counted from the end": right[::-1],
        "the loss is in bits, not in nats": right / np.log(2),
        "it is the mean of ln p: the sign is missing": -right,
    }
    expect_array(losses, right, mistakes=mistakes)
    least = int(right.argmin())
    return f"Block 0 hurts the most ({right[0]:.1f} nats), block {least} the least ({right[least]:.2f})."
