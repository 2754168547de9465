"""Notebooks 7a and 7b: choosing tokens, and an engine's steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ....api import Model
from ....generation.overflow import keep_after_overflow
from ....notebook.next_token import NextToken
from ....reference.cache import TokenBatch
from ....reference.layers import Array
from ..answers import as_array, as_number, expect_array, expect_number, mistake_of
from ..declare import Wrong, draws, exercise, run
from ..tables import judged_by_table


@exercise("7a.1")
def nucleus(answer: Any) -> str:
    z = draws(71).normal(size=12)
    p = np.exp(z) / np.exp(z).sum()
    cases = [(p, 0.8), (np.array([0.67, 0.24, 0.09]), 0.9), (np.array([0.1, 0.8, 0.1]), 0.5)]
    cases += [(np.array([0.125, 0.5, 0.375]), 0.5)]  # the first reaches the limit exactly
    cases += [(np.array([0.4995, 0.2005, 0.3]), 0.5), (np.array([0.3, 0.5, 0.2]), 0.95)]  # nearly; all are kept
    for p, limit in cases:
        order = np.argsort(-p)
        below = np.cumsum(p[order])
        rising, tokens = order[::-1], np.arange(len(p))
        kept = np.isin(tokens, order[below - p[order] < limit])
        short = np.isin(tokens, order[below <= limit])
        over = np.isin(tokens, order[below - p[order] <= limit])
        least = np.isin(tokens, rising[np.cumsum(p[rising]) - p[rising] < limit])
        right = np.where(kept, p, 0) / p[kept].sum()
        mistakes = {
            "a token is kept after the sum has reached the limit": np.where(over, p, 0) / p[over].sum(),
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
            raise Wrong(
                f"For p = {np.round(p, 3).tolist()}, limit {limit}, nothing is left: the likeliest is always kept."
            )
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
def likelihood_of_a_text(answer: Any) -> str:
    draw = draws(73)
    for length, start in ((9, 4), (30, 1)):
        logits, ids = 3 * draw.normal(size=(length, 20)).astype(np.float32), draw.integers(0, 20, length)
        z = logits.astype(np.float64)
        ln_p = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
        of_next, i = ln_p[np.arange(length - 1), ids[1:]], np.arange(length)
        right = float(of_next[start - 1 :].mean())
        mistakes = {
            "a logit is not yet ln p: ln of the sum of all e^z is taken away": z[i[:-1], ids[1:]][start - 1 :].mean(),
            "row t is about the token after ids[t], not about ids[t]": ln_p[i, ids][start:].mean(),
            "ids[start] is missing, of which row start - 1 speaks": of_next[start:].mean() if start < length - 1 else 0,
            "the beginning is in it: only ids[start:] are to be counted": of_next.mean(),
            "it is the sum; the mean is wanted": of_next[start - 1 :].sum(),
            "that is −ln p, a loss; ln p is below 0": -right,
            "that is p, the mean of which is another thing; take ln p": np.exp(of_next[start - 1 :]).mean(),
            "that is e^ln p; ln p is wanted": np.exp(right),
            "those are digits, log2; ln is wanted": right / np.log(2),
        }
        number = as_number(run(answer, logits, ids.tolist(), start))
        expect_array([number], [right], mistakes={cause: [wrong] for cause, wrong in mistakes.items()})
    return "Minus this mean is the loss of a language model, and e to that is its perplexity."


@exercise("7a.4")
def search(answer: Any) -> str:
    seed = int(draws(74).integers(1 << 30))

    def log_p(ids: Sequence[int]) -> Array:
        """ln p of six tokens, drawn from what came before: a model of its own."""
        z = np.random.default_rng([seed, *map(int, ids)]).normal(size=6)
        row: Array = z - np.log(np.exp(z).sum())
        return row

    for beams, steps in ((3, 5), (1, 3), (2, 4), (8, 3), (36, 2)):
        right = beams_by(by_sum, log_p, beams, steps)
        try:
            mine = [
                (as_number(total), [int(each) for each in ids])
                for total, ids in run(answer, log_p, [1, 2], beams, steps)
            ]
        except (TypeError, ValueError):
            raise Wrong("A list of (sum of ln p, ids) is wanted, the best first.") from None
        case = f"{beams} beam{'s' * (beams > 1)}, {steps} steps"
        if len(mine) != len(right):
            raise Wrong(f"{case}: {len(right)} texts are wanted; yours are {len(mine)}.")
        texts, best = [ids for _, ids in mine], [ids for _, ids in right]
        if sizes := [len(ids) for ids in texts if len(ids) != 2 + steps]:
            raise Wrong(f"{case}: each has {2 + steps} tokens, with the prompt's two; one of yours has {sizes[0]}.")
        if texts != best and sorted(texts) == sorted(best):
            raise Wrong(f"{case}: these are the right texts, in another order: the likeliest comes first.")
        if texts != best:
            likely = ""
            for cause, pick in BEAM_MISTAKES.items():
                if sorted(texts) == sorted(ids for _, ids in beams_by(pick, log_p, beams, steps)):
                    likely = likely or f" Likely mistake: {cause}."
            raise Wrong(f"{case}: the likeliest is {best[0]}, and your first {texts[0]}.{likely}")
        expect_array([total for total, _ in mine], [total for total, _ in right])
    return "With one beam it is greedy; with more it finds likelier texts, most of the time."


Beam = tuple[float, list[int]]


def by_sum(longer: Sequence[tuple[Beam, float, int]], beams: int) -> list[Beam]:
    """The best of all continuations. longer: (continuation, ln p of its last token, its beam)."""
    return [beam for beam, _, _ in sorted(longer, key=lambda each: -each[0][0])[:beams]]


def beams_by(pick: Callable[..., list[Beam]], log_p: Callable[..., Array], beams: int, steps: int) -> list[Beam]:
    """A beam search from the prompt [1, 2], with `pick` to choose among continuations."""
    kept: list[Beam] = [(0.0, [1, 2])]
    for _ in range(steps):
        longer = [
            ((total + float(p), [*ids, token]), float(p), number)
            for number, (total, ids) in enumerate(kept)
            for token, p in enumerate(log_p(ids))
        ]
        kept = pick(longer, beams)
    return sorted(kept, reverse=True)


def best_of(longer: Sequence[tuple[Beam, float, int]], beam: int, n: int) -> list[tuple[Beam, float, int]]:
    """The n likeliest continuations of one beam."""
    return sorted((each for each in longer if each[2] == beam), key=lambda each: -each[0][0])[:n]


BEAM_MISTAKES: dict[str, Callable[..., list[Beam]]] = {
    "continuations are compared by their last ln p, not by the sum": lambda longer, n: [
        beam for beam, _, _ in sorted(longer, key=lambda each: -each[1])[:n]
    ],
    "each beam keeps its own best; the continuations of all compete": lambda longer, n: by_sum(
        longer if longer[-1][2] == 0 else [max(each for each in longer if each[2] == beam) for beam in range(n)], n
    ),
    "one beam goes on; the others are to be continued, too": lambda longer, n: by_sum(longer, 1),
    "the least likely of each beam's best are kept: sort from the largest": lambda longer, n: by_sum(
        [each for beam in range(longer[-1][2] + 1) for each in best_of(longer, beam, n)], n * n
    )[::-1][:n],
    "the least likely are kept: sort from the largest": lambda longer, n: by_sum(longer, len(longer))[::-1][:n],
}


@exercise("7a.stop")
def hold_back(answer: Any) -> str:
    cases = [("to make a", ["a little mistake"]), ("to mend", ["a little mistake"]), ("ever, nev", ["never"])]
    cases += [("to make a little mist", ["a little mistake", "mist ahead"]), ("ana", ["nab", "anab"])]
    cases += [("aab", ["aabaac"]), ("it is a", ["a big cat", "the"]), ("", ["never"]), ("hm", [])]
    cases += [("a fine time", ["a little mistake"]), ("a small list", ["a little mistake"])]  # neither is held
    cases += [("to make A", ["a little mistake"]), ("a list ", ["list of"])]
    wrong: dict[str, Callable[[str, Sequence[str]], int]] = {
        "one stop string is looked at; each of them may begin": lambda text, stops: held(text, stops[:1]),
        "the shortest is taken; all that may still become a stop string is to be held": lambda text, stops: min(
            (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0
        ),
        "the place is wanted at which nothing can be taken back: count from the end": lambda text, stops: (
            len(text) - held(text, stops)
        ),
        "a whole stop string is held, wherever the text ends": lambda text, stops: max(map(len, stops), default=0),
        "as much as the longest stop string less one is held; most of it can be no beginning": lambda text, stops: min(
            len(text), max((len(stop) - 1 for stop in stops), default=0)
        ),
        "a beginning counts only at the very end of the text, not anywhere in it": lambda text, stops: max(
            (n for stop in stops for n in range(1, len(stop)) if stop[:n] in text), default=0
        ),
        "the end of the text must be the first characters of a stop string, not any piece of it": lambda text, stops: (
            max((n for stop in stops for n in range(1, min(len(text) + 1, len(stop))) if text[-n:] in stop), default=0)
        ),
        "one character is held at most; a longer end may be a beginning": lambda text, stops: min(1, held(text, stops)),
    }
    given = []
    for text, stops in cases:
        try:
            given.append(as_number(run(answer, text, list(stops))))
        except Wrong as error:
            if held(text, stops):
                raise
            raise Wrong(f"After {text!r}, with stop={stops}, 0 are held. {error}") from None
    for n, (text, stops) in zip(given, cases, strict=True):
        if n != held(text, stops):
            likely = mistake_of(given, cases, wrong)
            raise Wrong(
                f"After {text!r}, with stop={stops}: {held(text, stops)} are held, and yours are {n:g}.{likely}"
            )
    return "So a stream never has to take back what it has shown."


def held(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a stop string."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


@exercise("7a.5")
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
        small = [texts[i] for i in free if "e" in texts[i]]
        capital = "" if small else " A capital E counts, too."
        example = a_word(small or [texts[i] for i in free])
        raise Wrong(f"{len(free)} tokens with an e are allowed, as {example!r}.{capital}")
    lost = np.flatnonzero(banned & ~has_e)
    if len(lost):
        raise Wrong(f"{len(lost)} tokens without an e are forbidden, as {a_word([texts[i] for i in lost])!r}.")
    model: Any = after.model
    text = model.generate("A dog and a cat", max_tokens=40, processors=[answer]).text
    if "e" in text.lower():
        raise Wrong(f"As a rule of a whole text it lets an e pass: {text!r}.")
    return f"“A dog and a cat {text}”"


def a_word(texts: Sequence[str]) -> str:
    """The first text that is one word or a piece of it, if there is one; else the first."""
    return next((text for text in texts if re.fullmatch("▁?[a-zA-Z]+", text)), texts[0])


Machine = dict[int, dict[str, int]]


@exercise("7a.guide")
def tokens_of_a_grammar(answer: Any) -> str:
    date: Machine = {
        0: {"t": 1},
        1: {"h": 2},
        2: {"e": 3},
        3: {" ": 4},
        4: {"1": 5, "2": 5},
        5: {" ": 6, "2": 7},
        6: {},
        7: {},
    }
    cases: list[tuple[Machine, int, list[str]]] = [
        ({0: {"a": 1}, 1: {"b": 0, "c": 2}, 2: {}}, 0, ["a", "ab", "aba", "abb", "acb", "ac", "b", "c"]),
        (date, 0, ["t", "the", "the 2", "th ", "he", "2", "the 22", "the 222", "them", "teh"]),
        (date, 4, ["1", "12", "the", " ", "1 ", "13", "22", "t", "21", "121"]),
        (date, 6, ["1", " ", "t"]),
    ]
    given: list[bool] = []
    for machine, state, texts in cases:
        mine = as_array(run(answer, {at: dict(arcs) for at, arcs in machine.items()}, state, list(texts)))
        if mine.shape != (len(texts),):
            raise Wrong(
                f"One True or False is wanted for each of {len(texts)} texts; yours has the shape {mine.shape}."
            )
        given += [bool(each) for each in mine]
    asked = [(machine, state, text) for machine, state, texts in cases for text in texts]
    for yours, (machine, state, text) in zip(given, asked, strict=True):
        if yours != fits(machine, state, text):
            possible = "not possible" if yours else "possible"
            likely = mistake_of(given, asked, GUIDE_MISTAKES)
            raise Wrong(f"In state {state} of {machine}, {text!r} is {possible}; yours says {yours}.{likely}")
    return "Every other token gets the logit −∞."


def end_of(machine: Machine, state: int, text: str) -> int:
    """The state after a text. Raises KeyError where a character is not possible."""
    for character in text:
        state = machine[state][character]
    return state


def fits(machine: Machine, state: int, text: str) -> bool:
    """Whether each character of a text is possible."""
    try:
        return end_of(machine, state, text) in machine
    except KeyError:
        return False


GUIDE_MISTAKES: dict[str, Callable[[Machine, int, str], bool]] = {
    "only the first character is looked at": lambda machine, state, text: text[0] in machine[state],
    "each character moves to another state; all of yours are looked up in the first one": lambda machine, state, text: (
        all(character in machine[state] for character in text)
    ),
    "the order counts: a character must be possible after those before it": lambda machine, state, text: all(
        any(character in arcs for arcs in machine.values()) for character in text
    ),
    "a token need not bring the text to its end": lambda machine, state, text: (
        fits(machine, state, text) and not machine[end_of(machine, state, text)]
    ),
    "the walk begins in `state`, not in 0": lambda machine, state, text: fits(machine, 0, text),
    "the last character counts, too": lambda machine, state, text: fits(machine, state, text[:-1]),
    "True and False are exchanged": lambda machine, state, text: not fits(machine, state, text),
}


judged_by_table("7b.1")


@exercise("7b.2")
def scheduler(answer: Any, lengths: Sequence[int]) -> str:
    draw = draws(75)
    cases = [([5], 3), ([3, 3, 3, 3], 2), ([12, 1, 1, 1, 1, 2], 2), (list(lengths), 4)]  # the smallest first
    cases += [(draw.integers(1, 30, 12).tolist(), int(draw.integers(2, 6))) for _ in range(4)]
    answers = [as_number(run(answer, list(queue), places)) for queue, places in cases]
    check_steps(answers, cases)
    return f"The ten requests above take {steps_of_engine(lengths, 4)} steps, with four places."


def check_steps(answers: Sequence[float], cases: Sequence[tuple[list[int], int]]) -> None:
    """Raises Wrong, with the likely cause, unless each of the answers is the number of steps of its (queue, places)."""
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
def engine(answer: Any, model: Model) -> str:
    draw = draws(77)
    prompts = [
        model.tokenizer.encode(text) for text in ("Once upon a time", "Peter", "The bird ran", "A lion", "It was")
    ]
    cases = [([6, 2, 3, 1, 4], 2), (draw.permutation([1, 2, 4, 5, 7]).tolist(), 2), ([2, 6, 1, 3, 5], 3)]
    steps = []
    for lengths, places in cases:
        passes = Passes(model, prompts, lengths, places)
        passes.compare(run(answer, passes, [list(prompt) for prompt in prompts], list(lengths), places))
        steps.append(passes.steps)
    check_steps(steps, cases)
    return (
        f"{sum(cases[0][0])} tokens in {steps[0]} steps with two places, and each text is what the model writes alone."
    )


class Passes:
    """Runs the steps of a student's engine, and knows what each place holds. Raises Wrong for a wrong step."""

    def __init__(self, model: Model, prompts: list[list[int]], lengths: list[int], places: int) -> None:
        self.model, self.prompts, self.lengths, self.steps = model, prompts, lengths, 0
        self.cache = model.new_cache(places, max(map(len, prompts)) + max(lengths))
        self.written: list[list[int]] = [[] for _ in prompts]
        self.at: list[int | None] = [None] * places  # the request of each place
        self.begun: list[tuple[int, int]] = []  # (step, request); the order within a step is free

    def __call__(self, parts: Any) -> Array:
        """A step, as the notebook's `run`."""
        parts = self.as_parts(parts)
        for place, position, ids in parts:
            self.at[place] = self.request_of(place, position, ids)
        logits = self.model.run(TokenBatch.of(parts, range(len(parts))), self.cache).all()
        for (place, _, _), row in zip(parts, logits, strict=True):
            request = self.at[place]
            assert request is not None
            self.written[request].append(int(row.argmax()))
        self.steps += 1
        return np.asarray(logits)

    def as_parts(self, parts: Any) -> list[tuple[int, int, list[int]]]:
        """The parts of a step. Raises Wrong unless each has a place of its own."""
        try:
            given = [(int(place), int(position), [int(each) for each in ids]) for place, position, ids in parts]
        except (TypeError, ValueError):
            raise Wrong("A step is a list of (place, position, ids); ids is a list, also of a single token.") from None
        if not given:
            raise Wrong("There is a step without a request: stop when none waits and none runs.")
        places = [place for place, _, _ in given]
        if len(given) > len(self.at) or not set(places) <= set(range(len(self.at))):
            raise Wrong(
                f"{len(given)} requests at the places {places} in one step: there are {len(self.at)}, from 0 on."
            )
        if len(set(places)) < len(places):
            raise Wrong(f"Two requests have one place in the same step: the places are {places}.")
        return given

    def request_of(self, place: int, position: int, ids: list[int]) -> int:
        """The request of a part. Raises Wrong if it is not what follows at this place."""
        request = self.at[place]
        if position == 0 and ids in self.prompts:
            new = self.prompts.index(ids)
            if self.written[new]:
                raise Wrong(f"The prompt of request {new} is computed a second time: run its newest token alone.")
            if request is not None and len(self.written[request]) < self.lengths[request]:
                raise Wrong(f"Request {new} takes place {place} from request {request}, which is not done.")
            self.begun.append((self.steps, new))
            return new
        if request is None:
            raise Wrong(f"Place {place} is empty: a request begins there with its whole prompt, at position 0.")
        prompt, written = self.prompts[request], self.written[request]
        held = len(prompt) + len(written) - 1  # the newest token is not in the cache yet
        if position == 0 and ids[:held] == [*prompt, *written][:held]:
            raise Wrong(f"Place {place} holds {held} tokens, which are computed again: run the newest token alone.")
        if position != held or len(ids) != 1:
            was = f"{len(ids)} token{'s' * (len(ids) != 1)} at position {position}"
            raise Wrong(f"Place {place} holds {held} tokens, so one token at position {held} is next; yours: {was}.")
        if len(written) == self.lengths[request]:
            raise Wrong(
                f"Request {request} has its {len(written)} tokens and still takes part: it must leave its place."
            )
        if ids != written[-1:]:
            others = [each[-1:] for each in self.written]
            mixed = " That is another request's: row j of the logits belongs to part j of the step." * (ids in others)
            raise Wrong(
                f"The likeliest token of request {request} is {written[-1]}; yours goes on with {ids[0]}.{mixed}"
            )
        return request

    def compare(self, answer: Any) -> None:
        """Raises Wrong unless these are the tokens that each request was to write."""
        texts = [answer[i] for i in range(len(answer))] if isinstance(answer, dict) else answer
        try:
            given = [as_array(each).astype(int).tolist() for each in texts]
        except TypeError:
            raise Wrong("A list of the tokens of each request is wanted.") from None
        right = [each[:n] for each, n in zip(self.written, self.lengths, strict=True)]
        if len(given) != len(right):
            raise Wrong(f"{len(given)} lists of tokens for {len(right)} requests.")
        if given != right and sorted(given) == sorted(right):
            raise Wrong("The texts are right, but in the order in which they were done: list i belongs to request i.")
        for i, (mine, theirs) in enumerate(zip(given, right, strict=True)):
            if mine[: len(self.prompts[i])] == self.prompts[i]:
                raise Wrong(f"Request {i} begins with its prompt: only what it wrote is wanted.")
            if len(mine) != self.lengths[i]:
                raise Wrong(f"Request {i} is to write {self.lengths[i]} tokens; yours are {len(mine)}.")
            expect_array(mine, theirs)
        order = [request for _, request in sorted(self.begun)]
        if order != sorted(order):
            raise Wrong(f"They begin in the order {order}: each is to be taken from the front of the queue.")
        alone: Any = self.model.generate(self.prompts, max_tokens=max(self.lengths), ignore_eos=True)
        assert given == [list(out.token_ids[:n]) for out, n in zip(alone, self.lengths, strict=True)]


@exercise("7b.4")
def caches_that_fit(answer: Any) -> str:
    mistakes = {
        "That is in float32; float16 takes half.": 12,
        "26 texts take 4.09 GB: one too many.": 26,
        "That is with one byte for each number; float16 takes two.": 50,
        "That is tokens; a text has 2,048.": 52083,
        "Keys and values are kept in each of 30 layers.": 762,
    }
    if 25 < as_number(answer) < 26:
        raise Wrong("That is the quotient. A text fits as a whole, or not: round down.")
    expect_number(answer, 25, mistakes=mistakes, hint="4 · 10⁹ bytes, over 2,048 tokens of 76,800 bytes.")
    return "With pages, a text takes what it has written so far, so more can begin."


@exercise("7b.5")
def spans_after_overflow(answer: Any) -> str:
    draw = draws(79)
    cases = [(20, 48, 4), (48, 48, 4), (101, 100, 4), (49, 48, 0), (90, 48, 8)]
    cases += [(int(draw.integers(101, 300)), 2 * int(draw.integers(20, 50)), 2 * int(draw.integers(1, 4)))]
    for length, window, sinks in cases:
        case = f"A text of {length} tokens, a window of {window}, {sinks} sinks"
        try:
            spans = [(int(start), int(stop)) for start, stop in run(answer, length, window, sinks)]
        except (TypeError, ValueError):
            raise Wrong("A list of (start, stop) is wanted; the token `stop` is no longer in it.") from None
        mine = tokens_of(spans)
        right = tokens_of(keep_after_overflow(length, window, "sinks", sinks))
        if mine == right:
            continue
        half = (window - sinks) // 2
        mistakes = {
            "it fits, so all stay": length <= window,
            "half of the whole window is too much: the sinks have their places in it": (
                mine == tokens_of([(0, sinks), (length - window // 2, length)])
            ),
            "the window is full again at once; drop half of it": len(set(mine)) >= window - sinks > half,
            "the sinks are missing": mine == tokens_of([(length - half, length)]),
            "the oldest stay behind the sinks; the newest are to": mine == tokens_of([(0, sinks + half)]),
            "the sinks come first": sorted(mine) == right,
            "some tokens are in it twice": len(set(mine)) < len(mine),
            "`stop` is the first token that is no longer in it": mine[-1:] == [length - 2],
        }
        likely = next((f": {cause}" for cause, made in mistakes.items() if made), "")
        raise Wrong(f"{case}: {len(right)} tokens stay, and yours are {len(mine)}, {spans}{likely}.")
    return "The newest half, so that only one token in so many has to wait until what stays is computed anew."


def tokens_of(spans: Sequence[tuple[int, int]]) -> list[int]:
    return [token for start, stop in spans for token in range(start, stop)]
