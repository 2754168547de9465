"""Notebook 3c: looking into the running model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ....api import Model
from ....backends import Backend
from ....generation.sampling import log_probabilities
from ....reference.layers import Array
from ..answers import as_array, as_integers, as_number, as_parts, expect_array, expect_number
from ..declare import NoResult, Wrong, draws, exercise, run
from ..engines import run_engine, unequal


@exercise("3c.1")
def head_that_looks_back(answer: Any, model: Model, recorded: dict[str, Array]) -> str:
    blocks, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    patterns = np.stack([recorded[f"blocks.{i}.attn.hook_pattern"] for i in range(blocks)])  # (L, H, N, N)
    back, own = (np.diagonal(patterns, -distance, 2, 3) for distance in (1, 0))
    largest = patterns.argmax(-1)[..., 1:] == np.arange(patterns.shape[-1] - 1)

    def best(shares: Array) -> tuple[int, int]:
        layer, head = divmod(int(shares.argmax()), heads)
        return layer, head

    right = best(back.mean(-1))
    mistakes = {
        best(-back.mean(-1)): "That one does it the least.",
        best(largest.mean(-1)): "Its largest share is for the token before more often than any other's; the mean share "
        "is asked.",
        best(back.max(-1)): "That is the head with the largest single share; the mean over all tokens is asked.",
        best(back[..., -1]): "That is so for the last token alone; the mean over all tokens is asked.",
        best(patterns[..., 0].mean(-1)): "That one looks at the first token: p[i, 0], not p[i, i − 1].",
        best(own.mean(-1)): "That one looks at the token itself: p[i, i], not p[i, i − 1].",
        right[::-1]: "The layer comes first, then the head.",
    }
    given = tuple(as_integers(answer))
    if given == right:
        return f"It gives {back.mean(-1)[right]:.2f} of its attention to the token before."
    if given == (right[0] * heads + right[1],):
        raise Wrong(f"That is its number among all {blocks * heads} heads; divmod by H makes layer and head of it.")
    if len(given) != 2:
        raise Wrong("Two numbers are wanted, (layer, head).")
    if not (0 <= given[0] < blocks and 0 <= given[1] < heads):
        raise Wrong(f"Layers are 0 to {blocks - 1}, heads 0 to {heads - 1}.")
    share = back.mean(-1)[given]
    raise Wrong(mistakes.get(given, f"Its mean share for the token before is {share:.2f}; another one has more."))


@exercise("3c.2")
def size_of_the_cache(answer: Any, model: Model) -> str:
    c = model.config
    blocks, heads, shared, width = c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads, c.head_dim
    right = 2 * blocks * shared * width
    mistakes = {
        "A key and a value are kept, and for each of G heads: one of these is missing.": blocks * shared * width,
        "That is one block; each of them has a cache.": 2 * shared * width,
        "That is a key for each query head; two of them share one (G, not H).": 2 * blocks * heads * width,
        "Those are vectors; each has d numbers.": 2 * blocks * shared,
        "Those are the vectors of one block; each has d numbers, and every block has a cache.": 2 * shared,
        "Queries are not kept: no later token reads them.": 3 * blocks * shared * width,
        "A key and a value are kept, and for each of G heads: both factors are missing.": blocks * width,
        "Those are vectors of d numbers, and two query heads share a key (G, not H).": 2 * blocks * heads,
        "Those are its bytes in float32; numbers are asked.": 4 * right,
        "That is a full cache; one token is asked.": right * model.config.context_length,
    }
    expect_number(answer, right, mistakes=mistakes, hint="2 of them (key, value), in each of L blocks ...")
    return f"With a key/value head for each query head it would be {heads // shared} times as many."


@exercise("3c.3")
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


@exercise("3c.seen")
def what_a_reader_sees(answer: Any) -> str:
    draw = draws(33)
    words, (low, lower) = np.split(draw.permutation(40)[:6], [4])  # the likeliest tokens: few, again and again
    best = words[[0, 1, 0, 2, 1, 2, 0, 1, 2, 0, 1]]
    others = words[[0, 1, 0, 3, 1, 0, 1, 1, 0, 1, 3]]
    right = draw.normal(size=(len(best), 40))
    wrong = right + 0.1 * draw.normal(size=right.shape)
    right[:, low] = wrong[:, low] = -9
    wrong[:5, lower] = -10
    for logits, tokens in ((right, best), (wrong, others)):
        logits[np.arange(len(best)), tokens] = logits.max(-1) + 2
    wrong[0] += 100.0
    for theirs, what in (
        (right.copy(), "equal ones"),
        (right + 1, "logits that are all larger by 1"),
        (wrong, "other ones"),
    ):
        a, b = right.argmax(-1), theirs.argmax(-1)
        n, first = int((a != b).sum()), int((a != b).argmax())
        mistakes = {
            # Some may be the same number: the first is said.
            "That is where they differ for the first time, counted from 1. Count all such places.": first + 1,
            "That is where they differ for the first time. Count all the places where they do.": first,
            "That is of the unlikeliest tokens: argmax, not argmin.": (right.argmin(-1) != theirs.argmin(-1)).sum(),
            "A token may occur twice: compare place by place, not as sets.": (len({*a} - {*b}), len({*a} ^ {*b})),
            "The tokens to choose from lie along the last axis: argmax(axis=-1).": (
                right.argmax(0) != theirs.argmax(0)
            ).sum(),
            "The largest value may change where the token stays: argmax.": (right.max(-1) != theirs.max(-1)).sum(),
            "Those are the logits that differ. The text shows the largest of each row alone.": (right != theirs).sum(),
            "That is how often they agree.": len(right) - n,
            "That is a share; the number of tokens is asked.": n / len(right),
        }
        given = run(answer, right, theirs)
        if isinstance(given, (bool, np.bool_)) and given != n:
            raise Wrong("That says whether any differs; count how many do.")
        expect_number(given, n, mistakes=mistakes, hint=f"For {what} it is {n} of {len(right)}.")
    return "All else that the two compute is hidden from a reader."


@exercise("3c.tipped")
def share_that_tipped(
    answer: Any, model: Model, run32: Mapping[str, Array], run64: Mapping[str, Array], inputs: Mapping[str, str]
) -> str:
    """run32, run64, inputs: the notebook's own."""
    shares = []
    for block in range(model.config.num_hidden_layers):
        names = [f"blocks.{block}.{linear}.hook_x_int8" for linear in inputs.values()]
        differ = [run32[name] != run64[name] for name in names]
        together = np.concatenate([each.ravel() for each in differ])
        apart = [np.abs(run32[name].astype(int) - run64[name]).mean() for name in names]
        right = float(together.mean())
        mistakes = {
            "That is their number; the share of them is asked.": together.sum(),
            "That is in percent; a share is between 0 and 1.": 100 * right,
            "That is the share that stays equal.": 1 - right,
            "That is the share of tokens in which any has tipped.": np.mean([each.any(-1) for each in differ]),
            "That is the mean of four shares. The input of down is the widest: put all four together first.": np.mean(
                [each.mean() for each in differ]
            ),
            # Where all differ by one, this is the same number: the one above is said.
            "That is by how much they differ; count each that differs as one.": np.mean(apart),
            "That is the input of q, k and v alone; a block has three more.": differ[0].mean(),
            "That is the input of down alone; a block has three more.": differ[-1].mean(),
        }
        hint = f"In block {block} {int(together.sum()):,} of {together.size:,} differ."
        expect_number(run(answer, block), right, within=1e-6 * right + 1e-12, mistakes=mistakes, hint=hint)
        shares.append(right)
    return f"From {min(shares):.2%} of a block to {max(shares):.2%}."


@exercise("3c.first")
def first_unequal_tensor(answer: Any) -> str:
    draw = draws(36)
    names = ("embed", "norm", "q", "z", "out")
    right = {name: draw.normal(size=(3, 4)).astype(np.float32) for name in names}
    last_bit = np.nextafter(right["norm"], np.float32(9))
    wrong = {**right, "q": 3 * right["q"], "z": 9 * right["z"]}
    one = right["out"].copy()
    one[0, 1] += 1
    cases = (
        ({**right, "out": -right["out"]}, "out", "One tensor differs, the last."),
        ({**right, "out": one}, "out", "One tensor differs in a single element, and that is enough."),
        (wrong, "q", "Two differ, and the second by more."),
        ({**wrong, "norm": last_bit}, "norm", "One differs in its last bits alone, and that counts here."),
        (dict(reversed(wrong.items())), "q", "The order of the computation is that of `right`."),
        ({name: wrong[name] for name in names if name != "norm"}, "norm", "One tensor is missing: it is not equal."),
        (dict(right), "none", 'All are equal: behind the loop, "none" is to be returned.'),
    )
    for theirs, first, what in cases:
        try:
            given = run(answer, right, theirs)
        except NoResult:
            given = None
        if given is not None and not isinstance(given, str):
            raise Wrong("A name is wanted, as a text.")
        if given != first:
            raise Wrong(f"{what} Yours is {given!r}, not {first!r}.")
    return "Whatever comes behind it is a consequence."


@exercise("3c.4")
def own_bug(answer: Any, model: Model, tokens: list[int], recorded: dict[str, Array]) -> str:
    if not (isinstance(answer, type) and issubclass(answer, Backend)):
        raise Wrong("A class is wanted that inherits from Backend: class KeysNotTurned(Backend).")
    logits, theirs = run_engine(answer, model, tokens)
    others = unequal(theirs, recorded)
    if not others:
        raise Wrong("Every tensor is equal, to the last bit: nothing is planted yet.")
    first = others[0]
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


@exercise("3c.row")
def row_of_the_table(answer: Any) -> str:
    draw = draws(37)
    tokens = draw.integers(0, 30, 9).tolist()
    right = {name: draw.normal(size=(9, 30)) for name in ("q", "norm", "z", "lm_head.hook_out")}
    theirs = {name: right[name] + draw.normal(size=(9, 30)) for name in ("z", "lm_head.hook_out")} | {"q": right["q"]}
    wanted = "Four things are wanted, in this order: KL, visible, loss, first difference."
    given = as_parts(run(answer, right, theirs, tokens), 4, wanted)
    ours, other = (log_probabilities(each["lm_head.hook_out"]) for each in (right, theirs))
    far, loss = (np.exp(ours) * (ours - other)).sum(-1), [-z[np.arange(8), tokens[1:]].mean() for z in (ours, other)]
    if as_array(given[0]).shape == far.shape:
        raise Wrong("The KL is one for each token; the table has their mean.")
    mistakes = {
        "KL(p || q) is not KL(q || p): the right run comes first.": (np.exp(other) * (other - ours)).sum(-1).mean(),
        "The KL is the sum over the tokens; the table has their mean.": far.sum(),
        "The KL is that of the worst token; the table has the mean.": far.max(),
    }
    expect_number(given[0], far.mean(), within=1e-6, mistakes=mistakes, hint=f"The mean KL is {far.mean():.4f}.")
    seen = int((ours.argmax(-1) != other.argmax(-1)).sum())
    expect_number(given[1], seen, hint=f"visible(right, wrong), of the logits, is {seen}.")
    says = {"That is the loss of the right run; the bug's own is wanted.": loss[0]}
    expect_number(given[2], loss[1], within=1e-6, mistakes=says, hint=f"The loss is {loss[1]:.4f}.")
    if given[3] != "norm":
        order = " Are the two runs in the right order?" * (given[3] == "z")
        raise Wrong(f"The first difference is 'norm', which theirs has not; yours is {given[3]!r}.{order}")
    return "Your function makes the table."


@exercise("3c.5")
def ablation(
    answer: Any, model: Model, broken: Callable[..., Any], loss_of: Callable[..., Any], passage_ids: Any
) -> str:
    """broken, loss_of, passage_ids: the notebook's own."""
    losses = np.array([as_number(run(answer, block)) for block in range(model.config.num_hidden_layers)])
    layers = model.weights.layers

    def losses_of(kept: Sequence[tuple[Any, ...]]) -> Array:
        """The loss with each of these choices of blocks."""
        engines = [broken(weights=replace(model.weights, layers=each), num_hidden_layers=len(each)) for each in kept]
        return np.array([loss_of(engine.logits(passage_ids), passage_ids) for engine in engines])

    right = losses_of([layers[:i] + layers[i + 1 :] for i in range(len(layers))])
    is_wrong = not np.allclose(losses, right)
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
    if is_wrong:
        mistakes["that block alone is kept; it is to be left out"] = losses_of([(layer,) for layer in layers])
    expect_array(losses, right, mistakes=mistakes)
    least = int(right.argmin())
    return f"Block 0 hurts the most ({right[0]:.1f} nats), block {least} the least ({right[least]:.2f})."
