"""`crossval sample`: which rule of sampling an engine has wrong, from its probabilities or from the tokens it chose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ...errors import GenerationError, count_of
from ...generation.params import SamplingParams
from ..explain.diagnose import Diagnoses, sure_or_possible
from ..types import Tokens, Wide
from .sampling_rules import TOP_P_STRICT, WRONG_RULES, Probabilities, Row, WrongRule, applies, truth


@dataclass(frozen=True, eq=False)
class Draws:
    """What an engine had and what it did, for each of N rows.

    logits: (N, V), before any rule.   prompt, generated: the ids before each choice.
    probabilities: (N, V), after all rules; or None.   chosen: the ids that were drawn; or None.
    """

    logits: Wide
    params: SamplingParams
    prompt: list[list[int]]
    generated: list[list[int]]
    probabilities: Wide | None = None
    chosen: list[list[int]] | None = None


CLOSE = 1e-4  # of a probability: softmax in float32 over some hundred thousand logits
_NUDGE = 1e-6  # of top_p and min_p: a token at the threshold itself may fall on either side
_CLEAR = 9.0  # ln of how much better a wrong rule must explain the draws than the right one
_RIVAL = 4.0  # ln: rules that explain the draws nearly as well are named too
_DEVIATIONS = 4.0


@dataclass(frozen=True)
class SampleVerdict:
    """verdict: one line.   causes: the wrong rules that explain the choices; several if they cannot be told apart."""

    agrees: bool
    verdict: str
    causes: Diagnoses

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def judge_draws(draws: Draws) -> SampleVerdict:
    """Which rule is wrong, if one is."""
    prompts, generated = ([np.array(ids, dtype=np.int64) for ids in each] for each in (draws.prompt, draws.generated))
    rows = list(map(Row, draws.logits, prompts, generated))
    return _judge_exactly(draws, rows) if draws.probabilities is not None else _judge_choices(draws, rows)


def _each_rule(
    draws: Draws, rows: Sequence[Row], right: Sequence[Probabilities]
) -> list[tuple[WrongRule, list[Probabilities]]]:
    """What each wrong rule gives that makes a difference here."""
    fitting: list[tuple[WrongRule, list[Probabilities]]] = []
    for rule in WRONG_RULES:
        if not applies(rule, draws.params):
            continue
        try:
            given = [rule.run(row, draws.params) for row in rows]
        except GenerationError:  # a value that another parameter cannot have
            continue
        if not _is_close(given, right):
            fitting.append((rule, given))
    return fitting


def _is_close(a: Sequence[Probabilities], b: Sequence[Probabilities]) -> bool:
    return all(
        np.abs(x - y).max() <= CLOSE and np.array_equal(x > CLOSE**2, y > CLOSE**2) for x, y in zip(a, b, strict=True)
    )


def _nudged(row: Row, params: SamplingParams) -> list[SamplingParams]:
    """The parameters, and with thresholds that rounding cannot tell from them; but where sums are exact it can."""
    out = [params]
    if params.temperature == 0:
        return out
    is_exact = params.top_p < 1 and float(np.float32(params.top_p)) == params.top_p
    if is_exact and not _is_close([TOP_P_STRICT.run(row, params)], [truth(row, params)]):
        return out
    for name in ("top_p", "min_p", "typical_p"):
        value = getattr(params, name)
        if 0 < value < 1:
            out += [replace(params, **{name: min(1.0, value * (1 + sign * _NUDGE))}) for sign in (-1, 1)]
    return out


def _judge_exactly(draws: Draws, rows: Sequence[Row]) -> SampleVerdict:
    assert draws.probabilities is not None
    theirs = [np.asarray(each / each.sum()) for each in draws.probabilities]
    right = [truth(row, draws.params) for row in rows]
    if all(
        any(_is_close([their], [truth(row, params)]) for params in _nudged(row, draws.params))
        for row, their in zip(rows, theirs, strict=True)
    ):
        largest = max(float(np.abs(a - b).max()) for a, b in zip(theirs, right, strict=True))
        count = count_of(len(rows), "row")
        return SampleVerdict(True, f"AGREES: probabilities of {count}, largest difference {largest:.1g}", Diagnoses())
    fitting = [rule for rule, given in _each_rule(draws, rows, right) if _is_close(theirs, given)]
    return SampleVerdict(False, _first_difference(theirs, right), _diagnoses(fitting, confirmed=len(fitting) == 1))


def _first_difference(theirs: Sequence[Probabilities], right: Sequence[Probabilities]) -> str:
    row = next(i for i, (a, b) in enumerate(zip(theirs, right, strict=True)) if not _is_close([a], [b]))
    token = int(np.abs(theirs[row] - right[row]).argmax())
    kept = f"{int((theirs[row] > 0).sum())} tokens kept, {int((right[row] > 0).sum())} in the reference"
    mine, its = f"{right[row][token]:.4g}", f"{theirs[row][token]:.4g}"
    return f"DIFFERS at row {row}: token {token} has probability {its}, in the reference {mine}; {kept}"


def _diagnoses(rules: Sequence[WrongRule], confirmed: bool) -> Diagnoses:
    return Diagnoses(sure_or_possible(rule.name, rule.cause, rule.remedy, confirmed) for rule in rules)


def _judge_choices(draws: Draws, rows: Sequence[Row]) -> SampleVerdict:
    """By how likely the choices are, and by choices that cannot be."""
    assert draws.chosen is not None
    right = [truth(row, draws.params) for row in rows]
    count = sum(map(len, draws.chosen))
    likelihood = _likelihood(right, draws.chosen)
    rules = [(_likelihood(given, draws.chosen), rule, given) for rule, given in _each_rule(draws, rows, right)]
    best = max((each[0] for each in rules), default=-math.inf)
    impossible = next(((i, token) for i, ids in enumerate(draws.chosen) for token in ids if right[i][token] == 0), None)
    deviations = 0.0 if impossible else _deviations(right, draws.chosen)
    if impossible is None and best - likelihood < _CLEAR and abs(deviations) < _DEVIATIONS:
        spread = f"ln likelihood {likelihood:.1f}, {deviations:+.1f} standard deviations from what is expected"
        return SampleVerdict(True, f"AGREES: {count} choices, all possible; {spread}", Diagnoses())
    if impossible is not None:
        row, token = impossible
        verdict = f"DIFFERS at row {row}: token {token} was chosen, which the reference excludes"
    elif best - likelihood >= _CLEAR:
        verdict = f"DIFFERS: a wrong rule explains the {count} choices e^{best - likelihood:.0f} times better"
    else:
        verdict = f"DIFFERS: the {count} choices are {deviations:+.1f} standard deviations from as likely as expected"
    bar = max(best - _RIVAL, likelihood)
    near = [(rule, given) for value, rule, given in rules if value > bar]
    fitting = [rule for rule, given in near if abs(_deviations(given, draws.chosen)) < _DEVIATIONS]
    clear = len(fitting) == 1 and (impossible is None or count >= len(rules))
    return SampleVerdict(False, verdict, _diagnoses(fitting, confirmed=clear))


def _likelihood(p: Sequence[Probabilities], chosen: Sequence[Tokens]) -> float:
    with np.errstate(divide="ignore"):
        return float(sum(np.log(row[list(ids)]).sum() for row, ids in zip(p, chosen, strict=True)))


def _deviations(p: Sequence[Probabilities], chosen: Sequence[Tokens]) -> float:
    """How many standard deviations the ln likelihood is from its mean."""
    mean = variance = 0.0
    for row, ids in zip(p, chosen, strict=True):
        kept = row[row > 0]
        logs = np.log(kept)
        own = float((kept * logs).sum())
        mean += len(ids) * own
        variance += len(ids) * float((kept * logs * logs).sum() - own * own)
    return (_likelihood(p, chosen) - mean) / math.sqrt(variance) if variance > 1e-12 else 0.0
