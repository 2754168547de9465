"""Notebook 3c: looking into the running model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ....api import Model
from ....backends import Backend
from ....reference.layers import Array
from ..answers import as_array, as_number, expect_array, expect_number
from ..declare import Wrong, draws, exercise, run


@exercise("3c.seen")
def what_a_reader_sees(answer: Any) -> str:
    draw = draws(33)
    right = draw.normal(size=(9, 40))
    close = right + 0.3 * draw.normal(size=right.shape)
    close[0] += 100.0
    for wrong, what in (
        (right.copy(), "equal ones"),
        (right + 1, "logits that are all larger by 1"),
        (close, "other ones"),
    ):
        best, others = right.argmax(-1), wrong.argmax(-1)
        n = int((best != others).sum())
        mistakes = {
            n / len(right): "That is a share; the number of tokens is asked.",
            len(right) - n: "That is how often they agree.",
            int(
                (right != wrong).sum()
            ): "Those are the logits that differ. The text shows the largest of each row alone.",
            int((right.max(-1) != wrong.max(-1)).sum()): "The largest value may change where the token stays: argmax.",
            int(
                (right.argmax(0) != wrong.argmax(0)).sum()
            ): "The tokens to choose from lie along the last axis: argmax(axis=-1).",
        }
        mistakes = {value: text for value, text in mistakes.items() if value != n}
        expect_number(run(answer, right, wrong), n, mistakes=mistakes, hint=f"For {what} it is {n} of {len(right)}.")
    return "All else that the two compute is hidden from a reader."


@exercise("3c.3")
def size_of_the_cache(answer: Any, model: Model) -> str:
    c = model.config
    blocks, heads, shared, width = c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads, c.head_dim
    right = 2 * blocks * shared * width
    mistakes = {
        blocks * shared * width: "A key and a value are kept, and for each of G heads: one of these is missing.",
        2 * shared * width: "That is one block; each of them has a cache.",
        2 * blocks * heads * width: "That is a key for each query head; two of them share one (G, not H).",
        2 * blocks * shared: "Those are vectors; each has d numbers.",
        2 * shared: "Those are the vectors of one block; each has d numbers, and every block has a cache.",
        3 * blocks * shared * width: "Queries are not kept: no later token reads them.",
        blocks * width: "A key and a value are kept, and for each of G heads: both factors are missing.",
        2 * blocks * heads: "Those are vectors of d numbers, and two query heads share a key (G, not H).",
        4 * right: "Those are its bytes in float32; numbers are asked.",
        right * model.config.context_length: "That is a full cache; one token is asked.",
    }
    expect_number(answer, right, mistakes=mistakes, hint="2 of them (key, value), in each of L blocks ...")
    return f"With a key/value head for each query head it would be {heads // shared} times as many."


@exercise("3c.1")
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


@exercise("3c.4")
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


@exercise("3c.5")
def own_bug(answer: Any, model: Model, tokens: list[int], recorded: dict[str, Array]) -> str:
    if not (isinstance(answer, type) and issubclass(answer, Backend)):
        raise Wrong("A class is wanted that inherits from Backend: class KeysNotTurned(Backend).")
    try:
        logits, theirs = model.on(answer("float32", threads=1)).run_with_cache(list(tokens))
    except Exception as error:
        raise Wrong(f"Your engine raised {type(error).__name__}: {error}") from None
    first = next((name for name in recorded if not np.array_equal(theirs[name], recorded[name])), None)
    if first is None:
        raise Wrong("Every tensor is equal, to the last bit: nothing is planted yet.")
    of_block = "blocks.0.attn.hook_"
    if first == f"{of_block}rot_q":
        forgotten = np.array_equal(theirs[first], recorded[f"{of_block}q"])
        raise Wrong(f"The queries are {'not turned' if forgotten else 'others'}: they are to be turned as they were.")
    if first != f"{of_block}rot_k":
        raise Wrong(f"The first tensor that differs is {first}: replace rope alone.")
    if not np.array_equal(theirs[first], recorded[f"{of_block}k"]):
        raise Wrong("The keys are others, and yet not those that went in: return k itself.")
    changed = (logits.argmax(axis=-1) != recorded["lm_head.hook_out"].argmax(axis=-1)).sum()
    return f"The first difference is in {first}; the likeliest next token changes at {changed} of {len(tokens)} tokens."


@exercise("3c.2")
def when_it_is_settled(answer: Any, lens_best: Array) -> str:
    """lens_best: (blocks + 1, tokens), the likeliest next token at each depth."""
    agrees = lens_best == lens_best[-1]
    stays = np.flip(np.logical_and.accumulate(np.flip(agrees, 0)), 0)
    right = stays.argmax(axis=0)
    mistakes = {
        "that is where it agrees for the first time; later it may change its mind again": agrees.argmax(axis=0),
        "the embedding is depth 0, so block 0 is depth 1": right - 1,
        "those are the depths at which it agrees, counted; they need not be the last ones": agrees.sum(axis=0),
        "count from the embedding, not from the end": len(lens_best) - 1 - right,
    }
    expect_array(answer, right, mistakes=mistakes)
    late = int((right == len(lens_best) - 1).sum())
    return f"{late} of {len(right)} predictions are settled by the last block only."
