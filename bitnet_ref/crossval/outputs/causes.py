"""Why an engine's greedy tokens are not the reference's: each mistake in driving is tested on all its ids.

A mistake *explains* the ids if, with it, each is the largest logit up to near ties. Its parameter is fitted on the
first half of each run and must hold on the second. It is *confirmed* if it is the only one that does, and the ids that
it explains are too unlikely to be chance; else it is *possible*, and all that explain as much are named.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...backends.loaded import LoadedModel
from ...errors import BitNetRefError
from ...generation.sampling import log_probabilities
from ..explain.diagnose import Diagnoses, Diagnosis, OutOfTime, Progress, Watch, sure_or_possible
from ..token_ids import Greedy, compare_ids, end_ids, name_of
from ..tolerances import near_tie
from ..types import Mask
from .driving import Driving, bos_drivings, drivings
from .given import GivenRun, Replay, Rows
from .randomness import looks_sampled

# Bits of evidence: how unlikely the wrong ids are in the reference. A change that has nothing to do with them gives the
# same ids by chance; some 150 are tried, so there must be more than log2(150) = 7 bits, and some to spare.
ENOUGH_BITS = 12.0
FEWEST_BITS = 5.0  # with less no cause is named: among so many changes one fits a token or two by chance
_MOST_BITS = 12.0  # of one id
_SAME = 1e-3  # logits that differ less, of two mistakes, are one mistake


@dataclass(frozen=True)
class Explanation:
    """A mistake that explains all ids.   rows: its logits, run by run"""

    driving: Driving
    cause: str
    rows: list[Rows]

    def equals(self, other: Explanation) -> bool:
        """Whether both give the same logits."""
        return all(
            mine.shape == theirs.shape and np.array_equal(np.isfinite(mine), np.isfinite(theirs))
            and np.abs(np.where(np.isfinite(mine), mine - theirs, 0)).max() < _SAME
            for mine, theirs in zip(self.rows, other.rows, strict=True)
        )  # fmt: skip


def judge_tokens(model: LoadedModel, run: GivenRun) -> Greedy:
    """One run against the reference; where it agrees, with the mistakes in BOS that its ids cannot show."""
    greedy = _compare(model, run)
    if not greedy.agrees:
        return greedy
    replay, hidden = Replay(model, within_context(model, run)), []
    for driving in bos_drivings(model):
        rows = tried(driving, replay)
        if rows is not None and not _misfits(rows, replay.run).any():
            hidden.append(driving.cause)
    return replace(greedy, hidden=tuple(hidden))


def _compare(model: LoadedModel, run: GivenRun) -> Greedy:
    return compare_ids(
        model, run.prompt, run.tokens, engine_dtype=run.engine_dtype, finish=run.finish, max_tokens=run.max_tokens
    )


def within_context(model: LoadedModel, run: GivenRun) -> GivenRun:
    """The run, cut after as many ids as the reference can compute."""
    room = max(1, model.context_length - len(run.prompt) + 1)
    inside = next((i for i, t in enumerate(run.tokens) if not 0 <= t < model.config.vocab_size), len(run.tokens))
    return replace(run, tokens=run.tokens[: min(room, inside)])


def explain_tokens(
    model: LoadedModel, runs: Sequence[GivenRun], *, progress: Progress | None = None, budget_s: float | None = None
) -> Diagnoses:
    """The causes for which these runs differ: confirmed, or possible. All runs must be explained by one mistake."""
    replays = [Replay(model, within_context(model, run)) for run in runs]
    replays = [replay for replay in replays if replay.run.tokens]
    diagnoses = Diagnoses(_stops(model, runs))
    if diagnoses or not replays:
        return diagnoses
    wrong = [_misfits(replay.base, replay.run) for replay in replays]
    if not any(each.any() for each in wrong):
        return diagnoses
    bits = sum(_bits(replay, bad) for replay, bad in zip(replays, wrong, strict=True))
    if bits < FEWEST_BITS:
        cause = "so few tokens differ that many mistakes fit them by chance"
        return Diagnoses([sure_or_possible("too_few", cause, "Give more tokens, and several prompts.", False)])
    explanations: list[Explanation] = []
    tests = list(drivings([replay.run for replay in replays], model))
    watch = Watch(progress, budget_s)
    watch.add(len(tests))
    try:
        for driving in tests:
            watch(driving.cause)
            explanation = _explain(driving, replays)
            if explanation is not None and not any(map(explanation.equals, explanations)):
                explanations.append(explanation)
    except OutOfTime:
        diagnoses.stopped, diagnoses.untested = "the time is up", len(tests) - watch.tested
    is_sure = bits >= ENOUGH_BITS and len(explanations) == 1
    for each in explanations:
        diagnoses.append(sure_or_possible(each.driving.name, each.cause, each.driving.remedy, is_sure))
    if not explanations and (sampled := looks_sampled([(replay.run, replay.base) for replay in replays])) is not None:
        diagnoses.append(sampled)
    if not any(each.confirmed for each in diagnoses) and not explanations:
        cause = "a mistake in the model rather than in how it is driven"
        remedy = "Record a trace (crossval/README.md): it names the first wrong op."
        diagnoses.append(sure_or_possible("record_a_trace", cause, remedy, False))
    return diagnoses


def _explain(driving: Driving, replays: Sequence[Replay]) -> Explanation | None:
    """The mistake, if it explains all ids of all runs; its parameter as the first halves fit it."""
    if not driving.values:
        rows = _with(driving, replays)
        return Explanation(driving, driving.cause, rows) if rows and _fits(rows, replays) else None
    held: list[tuple[float, list[Rows]]] = []
    for value in driving.values:
        rows = _with(driving, replays, value)
        if rows and _fits(rows, replays, first_half=True) and _fits(rows, replays):
            held.append((value, rows))
    if not held:
        return None
    runs = [replay.run for replay in replays]
    value, rows = min(held, key=lambda each: sum(float(_behind(*one).sum()) for one in zip(each[1], runs, strict=True)))
    cause = driving.cause.format(value)
    if len(held) > 1:
        others = sorted(value for value, _ in held)
        cause += f" ({others[0]} to {others[-1]} explain the tokens)"
    return Explanation(driving, cause, rows)


def _with(driving: Driving, replays: Sequence[Replay], *value: float) -> list[Rows]:
    """The logits of each run with the mistake; the right ones where it makes no difference, as a cut of a short prompt.

    Empty if it makes none in any.
    """
    rows = [tried(driving, replay, *value) for replay in replays]
    if all(each is None for each in rows):
        return []
    return [replay.base if each is None else each for each, replay in zip(rows, replays, strict=True)]


def _behind(rows: Rows, run: GivenRun) -> Rows:
    """How far each id is behind the best.   (n, V) -> (n,)"""
    return np.asarray(rows.max(axis=1) - rows[np.arange(len(rows)), list(run.tokens)])


def _fits(rows: Sequence[Rows], replays: Sequence[Replay], first_half: bool = False) -> bool:
    """Whether each id is the largest logit, up to near ties."""
    for each, replay in zip(rows, replays, strict=True):
        bad = _misfits(each, replay.run)
        if (bad[: (len(bad) + 1) // 2] if first_half else bad).any():
            return False
    return True


def tried(driving: Driving, replay: Replay, *value: object) -> Rows | None:
    """The logits with a mistake; None where the model cannot be run so."""
    try:
        with np.errstate(all="ignore"):
            return driving.rows(replay, *value)
    except (BitNetRefError, ArithmeticError, LookupError, ValueError):
        return None


def _misfits(rows: Rows, run: GivenRun) -> Mask:
    """Which ids are further behind the best than rounding can put them.   (n, V) -> (n,)"""
    return np.asarray(~(_behind(rows, run) <= near_tie(run.engine_dtype, rows)))


def _bits(replay: Replay, wrong: Mask) -> float:
    """How unlikely the wrong ids are in the reference: the sum of -log2 p."""
    chosen = ((replay.base[i], replay.run.tokens[i]) for i in np.flatnonzero(wrong))
    surprise = [-float(log_probabilities(row)[token]) / math.log(2) for row, token in chosen]
    return sum(min(each, _MOST_BITS) for each in surprise)


def _stops(model: LoadedModel, runs: Sequence[GivenRun]) -> list[Diagnosis]:
    """Causes in where a text ends, of runs whose ids are right up to there."""
    ends, by_name = end_ids(model), dict[str, Diagnosis]()
    for run in runs:
        greedy = _compare(model, run)
        if greedy.parted is None:
            continue
        inside = within_context(model, run)
        if greedy.candidate == "the end":
            cause = "the generation stops at a token that is no end token, or at a smaller limit"
            remedy = "Compare the stop tokens, stop strings and max_tokens."
            by_name["stops_early"] = Diagnosis("stops_early", cause, remedy, confirmed=True)
        elif greedy.reference == "the end" and not _misfits(Replay(model, inside).base, run).any():
            end = name_of(model, next(token for token in inside.tokens if token in ends))
            cause = f"the end token ({end}) does not end the generation"
            ends_of_turns = "2B-4T ends its turns with 128009, not with 128001."
            remedy = f"Stop on every id of eos_token_id and on <|eot_id|>: {ends_of_turns}"
            by_name["eot_not_a_stop"] = Diagnosis("eot_not_a_stop", cause, remedy, confirmed=True)
        else:
            return []
    return list(by_name.values())
