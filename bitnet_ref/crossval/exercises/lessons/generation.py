"""Notebooks 7a and 7b: choosing tokens, and an engine's steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ....notebook.next_token import NextToken
from ..answers import as_array, as_number, expect_array, expect_number
from ..declare import Wrong, draws, exercise, run


@exercise("7a.1")
def nucleus(answer: Any) -> str:
    z = draws(71).normal(size=12)
    p = np.exp(z) / np.exp(z).sum()
    cases = [(p, 0.8), (np.array([0.67, 0.24, 0.09]), 0.9), (np.array([0.1, 0.8, 0.1]), 0.5)]
    for p, limit in cases:
        order = np.argsort(-p)
        below = np.cumsum(p[order])
        kept, short, least = (np.zeros(len(p), dtype=bool) for _ in range(3))
        kept[order[below - p[order] < limit]] = True
        short[order[below <= limit]] = True
        least[order[::-1][np.cumsum(p[order[::-1]]) - p[order[::-1]] < limit]] = True
        right = np.where(kept, p, 0) / p[kept].sum()
        mistakes = {
            "what is left must be divided by its sum": np.where(kept, p, 0),
            "they stand in the order of their size; each belongs at its token's place": right[order],
            "the least likely tokens are kept": np.where(least, p, 0) / p[least].sum(),
            "tokens are compared with a share of the largest: that is min_p": np.where(p >= limit * p.max(), p, 0)
            / p[p >= limit * p.max()].sum(),
            "only tokens of more than the limit each are kept; it is their sum that counts": np.where(p > limit, p, 0),
            "nothing is cut": p,
        }
        if short.any():
            mistakes["the token that reaches the limit is kept, too"] = np.where(short, p, 0) / p[short].sum()
        got = as_array(run(answer, p, limit))
        if got.size == len(p) and not np.nan_to_num(got).any():
            raise Wrong(f"For p = {p.tolist()} and the limit {limit} nothing is left: the likeliest is always kept.")
        expect_array(got, right, mistakes=mistakes)
    return "That is nucleus sampling."


@exercise("7a.2")
def half_of_the_probability(answer: Any, after: NextToken) -> str:
    t = as_number(answer)
    if not 0 < t <= 2:
        raise Wrong("A temperature between 0 and 2 is wanted. At 0 the likeliest token has all of the probability.")
    if t != round(t, 2):
        raise Wrong(f"Two decimals are wanted; {t:g} has more.")
    at, hotter = (float(after.stages(temperature=each)[-1].probabilities.max()) for each in (t, round(t + 0.01, 2)))
    if at <= 0.5:
        raise Wrong(f"At {t:g} its probability is {at:.3f}: not more than half. Colder.")
    if hotter > 0.5:
        raise Wrong(f"At {t:g} it is {at:.3f}, and a hundredth hotter still {hotter:.3f}. Hotter.")
    return f"{at:.3f} there, {hotter:.3f} a hundredth hotter."


@exercise("7a.3")
def lipogram(answer: Any, after: NextToken) -> str:
    ids = np.asarray(after.ids)
    texts = after.texts(np.arange(len(after.logits)))
    has_e = np.array(["e" in text.lower() for text in texts])
    special = np.array([text.startswith("<") for text in texts])
    changed = as_array(run(answer, ids, after.logits))
    if changed.shape != after.logits.shape:
        raise Wrong(f"The shape is {changed.shape}, not {after.logits.shape}: one logit for each token.")
    banned = np.isneginf(changed)
    if not banned.any():
        raise Wrong("Nothing is forbidden: a token that must not come has the logit −∞ (0 is a good logit).")
    if not np.array_equal(changed[~banned], after.logits[~banned]):
        raise Wrong("The logits of the allowed tokens must stay as they were.")
    free = np.flatnonzero(has_e & ~banned & ~special)
    if len(free):
        small = [i for i in free if "e" in texts[i]]
        capital = "" if small else " A capital E counts, too."
        raise Wrong(f"{len(free)} tokens with an e are allowed, as {texts[[*small, *free][0]]!r}.{capital}")
    lost = np.flatnonzero(banned & ~has_e)
    if len(lost):
        raise Wrong(f"{len(lost)} tokens without an e are forbidden, as {texts[lost[0]]!r}.")
    model: Any = after.model
    return f"“A dog and a cat {model.generate('A dog and a cat', max_tokens=40, processors=[answer]).text}”"


@exercise("7b.1")
def steps_of_an_engine(answer: Any, lengths: Sequence[int]) -> str:
    right = max(lengths)
    mistakes = {
        right + 1: "The prompt's step chooses the first new token: it is not one more.",
        sum(lengths): "That is one request after the other; an engine takes all of them in each step.",
        len(lengths): "That is the number of requests.",
        -(-sum(lengths) // len(lengths)): "That is the mean; the longest text decides.",
        -(-sum(lengths) // 4): "That is with four places, all of them always taken.",
        right - 1: "A text of n tokens takes n steps: the prompt's, and n − 1 more.",
    }
    expect_number(answer, right, mistakes=mistakes, hint="Which request is the last to finish?")
    return f"A text of {right} tokens takes {right} steps, and all others are done by then."


@exercise("7b.2")
def scheduler(answer: Any, lengths: Sequence[int]) -> str:
    draw = draws(75)
    cases = [(list(lengths), 4), ([5], 3), ([3, 3, 3, 3], 2), ([12, 1, 1, 1, 1, 2], 2)]
    cases += [(draw.integers(1, 30, 12).tolist(), int(draw.integers(2, 6))) for _ in range(4)]
    answers = [as_number(run(answer, list(queue), places)) for queue, places in cases]
    for steps, (queue, places) in zip(answers, cases, strict=True):
        right = steps_of_engine(queue, places)
        if steps != right:
            agree = {
                text: sum(given == wrong(*case) for given, case in zip(answers, cases, strict=True))
                for text, wrong in SCHEDULERS.items()
                if steps == wrong(queue, places)
            }
            # one number may have several causes; one that gives most of the others, too, is likely
            text = max(agree, key=lambda each: agree[each], default="")
            why = f": {text}" if text and agree[text] > len(cases) // 2 else ""
            raise Wrong(f"Lengths {queue}, {places} places: {right} steps, and yours are {steps:g}{why}.")
    return f"The ten requests above take {steps_of_engine(lengths, 4)} steps if no prompt has to be cut."


def steps_of_engine(
    lengths: Sequence[int], places: int, begun_in_a_step: int | None = None, to_the_end: bool = True
) -> int:
    """The steps of continuous batching, with no limit on prompts.

    begun_in_a_step: how many requests may begin in one step; by default, as many as there are free places.
    to_the_end: False stops when the queue is empty, as if no request were running. 0 steps without places."""
    waiting, steps = list(lengths) if places else [], 0
    running: list[int] = []
    while waiting or (running and to_the_end):
        free = places - len(running)
        begun = min(free, begun_in_a_step or free)
        running += waiting[:begun]
        waiting = waiting[begun:]
        running = [left - 1 for left in running if left > 1]
        steps += 1
    return steps


SCHEDULERS: dict[str, Callable[[list[int], int], int]] = {  # wrong ones: what such an engine does
    "one request after the other": lambda queue, n: sum(queue),
    "whole batches: a place that is free is to be filled in the next step": lambda queue, n: sum(
        max(queue[i : i + n]) for i in range(0, len(queue), n)
    ),
    "a place for every request": lambda queue, n: max(queue),
    "the number of requests": lambda queue, n: len(queue),
    "the shortest first; they are to be taken as they came": lambda queue, n: steps_of_engine(sorted(queue), n),
    "the longest first; they are to be taken as they came": lambda queue, n: steps_of_engine(sorted(queue)[::-1], n),
    "from the back of the queue; they are to be taken as they came": lambda queue, n: steps_of_engine(queue[::-1], n),
    "a step too many for each request": lambda queue, n: steps_of_engine([length + 1 for length in queue], n),
    "all places taken in every step": lambda queue, n: -(-sum(queue) // n),
    "one request begins in a step; all free places are to be filled": lambda queue, n: steps_of_engine(queue, n, 1),
    "one running request too many": lambda queue, n: steps_of_engine(queue, n + 1),
    "a place always stays empty": lambda queue, n: steps_of_engine(queue, n - 1),
    "a queue for each place; all places share one": lambda queue, n: max(sum(queue[i::n]) for i in range(n)),
    "the engine stops when the queue is empty; requests still run": lambda queue, n: steps_of_engine(
        queue, n, to_the_end=False
    ),
    "the last step is missing": lambda queue, n: steps_of_engine(queue, n) - 1,
    "a step in which nothing runs is counted": lambda queue, n: steps_of_engine(queue, n) + 1,
}


@exercise("7b.3")
def shared_steps(answer: Any, steps: Sequence[Any]) -> str:
    parts = [len(step.parts) for step in steps]
    right = sum(each > 1 for each in parts)
    mistakes = {
        len(parts): "That is all steps.",
        sum(parts): "That is all parts of all steps.",
        len(parts) - right: "That is how many had one request.",
        2 * right: "Count the steps, not their parts.",
    }
    expect_number(answer, right, mistakes=mistakes, hint=f"{len(parts)} steps have {sum(parts)} parts together.")
    return f"{len(parts)} steps instead of {sum(parts)}."


@exercise("7b.4")
def caches_that_fit(answer: Any) -> str:
    mistakes = {
        12: "That is in float32; float16 takes half.",
        26: "26 texts take 4.09 GB: one too many.",
        50: "That is with one byte for each number; float16 takes two.",
        52083: "That is tokens; a text has 2,048.",
        762: "Keys and values are kept in each of 30 layers.",
    }
    expect_number(answer, 25, mistakes=mistakes, hint="4 · 10⁹ bytes, over 2,048 tokens of 76,800 bytes.")
    return "With pages, a text takes what it has written so far, so more can begin."
