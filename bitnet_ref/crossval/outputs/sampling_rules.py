"""The rules of sampling as stages, and what engines get wrong in them: the right pipeline with one stage edited.

The truth is `generation.sampling.distribution` on logits that `generation.processors.Rules` changed; a test holds the
stages against it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from ...generation.params import SamplingParams
from ...generation.processors import CountPenalties, RepetitionPenalty, Rules
from ...generation.sampling import Distribution, count_min_p, distribution, likeliest, nucleus, softmax, typical
from ..types import Ints, Wide

Probabilities = Wide  # (V,)


@dataclass(frozen=True)
class Row:
    """One row of logits (V,), with the ids before it."""

    logits: Wide
    prompt: Ints
    generated: Ints

    @property
    def ids(self) -> Ints:
        return np.concatenate([self.prompt, self.generated])


Limit = Callable[[Ints, Probabilities, SamplingParams], Distribution]


@dataclass(frozen=True)
class Stages:
    """The pipeline. `order` has the names of the limits.   penalties: (row, params) -> logits"""

    penalties: Callable[[Row, SamplingParams], Wide]
    temper: Callable[[Wide, float], Wide]
    limits: dict[str, Limit]
    order: tuple[str, ...] = ("top_k", "top_p", "min_p", "typical_p")
    temper_last: bool = False  # the limits look at the probabilities before temperature

    def run(self, row: Row, params: SamplingParams) -> Probabilities:
        """The probabilities (V,) to draw from; 0 for tokens that the limits exclude."""
        logits = self.penalties(row, params)
        scaled = logits.astype(np.float64) if self.temper_last else self.temper(logits, params.temperature)
        ids = likeliest(scaled, scaled.size)
        p = softmax(scaled[ids])
        for name in self.order:
            ids, p = self.limits[name](ids, p, params)
        if self.temper_last:
            p = softmax(self.temper(logits[ids], params.temperature))
        out = np.zeros(len(logits), dtype=np.float64)
        out[ids] = p
        return out


def _penalties(row: Row, params: SamplingParams) -> Wide:
    rules = Rules.of(params, len(row.prompt), (), ())
    return np.asarray(rules.apply(row.ids, row.logits), dtype=np.float64)


def _first(ids: Ints, p: Probabilities, count: int) -> Distribution:
    count = max(1, count)
    return ids[:count], p[:count] / p[:count].sum()


def _top_k(ids: Ints, p: Probabilities, params: SamplingParams, more: int = 0) -> Distribution:
    return _first(ids, p, params.top_k + more) if 0 < params.top_k < len(ids) else (ids, p)


def _top_p(ids: Ints, p: Probabilities, params: SamplingParams, more: int = 0) -> Distribution:
    kept = nucleus(ids, p, params.top_p)
    return kept if not more or params.top_p == 1 else _first(ids, p, len(kept[0]) + more)


RIGHT = Stages(
    _penalties,
    lambda logits, temperature: logits.astype(np.float64) / temperature,
    {
        "top_k": _top_k,
        "top_p": _top_p,
        "min_p": lambda ids, p, s: _first(ids, p, count_min_p(np.log(p), s.min_p)) if s.min_p > 0 else (ids, p),
        "typical_p": lambda ids, p, params: typical(ids, p, params.typical_p),
    },
)


def truth(row: Row, params: SamplingParams) -> Probabilities:
    """The probabilities (V,) that the generation of this package draws from; of temperature 0 all of the largest."""
    logits = _penalties(row, params)
    out = np.zeros(len(logits), dtype=np.float64)
    if params.temperature == 0:
        out[int(logits.argmax())] = 1
    else:
        ids, p = distribution(logits, params)
        out[ids] = p
    return out


@dataclass(frozen=True)
class WrongRule:
    """uses: the parameters without which it makes no difference."""

    name: str
    cause: str
    remedy: str
    uses: tuple[str, ...]
    stages: Stages
    change: Callable[[SamplingParams], SamplingParams] = field(default=lambda params: params)

    def run(self, row: Row, params: SamplingParams) -> Probabilities:
        return self.stages.run(row, self.change(params))


def _limit(name: str, edit: Limit) -> Stages:
    return replace(RIGHT, limits={**RIGHT.limits, name: edit})


def _exclusive_p(ids: Ints, p: Probabilities, params: SamplingParams) -> Distribution:
    """Goes on until the sum is more than p, and not until it is p or more."""
    before = np.cumsum(p) - p
    return _first(ids, p, int(np.searchsorted(before, params.top_p, side="right"))) if params.top_p < 1 else (ids, p)


def _typical_more(ids: Ints, p: Probabilities, params: SamplingParams, more: int) -> Distribution:
    if params.typical_p == 1:
        return ids, p
    surprise = -np.log(np.maximum(p, np.finfo(np.float64).tiny))
    nearest = np.argsort(np.abs(surprise - (p * surprise).sum()), kind="stable")
    count = len(typical(ids, p, params.typical_p)[0]) + more
    keep = np.sort(nearest[: max(1, count)])
    return ids[keep], p[keep] / p[keep].sum()


def _part_penalised(row: Row, params: SamplingParams, part: str) -> Wide:
    """The repetition penalty on a part of the ids only."""
    rest = _penalties(row, replace(params, repetition_penalty=1.0))
    return np.asarray(RepetitionPenalty(params.repetition_penalty)(getattr(row, part), rest), dtype=np.float64)


def _divided(row: Row, params: SamplingParams) -> Wide:
    """All logits divided, so that negative ones become more likely."""
    out, ids = row.logits.astype(np.float64), np.unique(row.ids)
    out[ids] /= params.repetition_penalty
    return _counted(row, params, out)


def _each_time(row: Row, params: SamplingParams) -> Wide:
    """Once for each occurrence, and not once for each token."""
    out = row.logits.astype(np.float64)
    for token in row.ids:
        factor = params.repetition_penalty
        out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
    return _counted(row, params, out)


def _counted(row: Row, params: SamplingParams, logits: Wide) -> Wide:
    rule = CountPenalties(params.presence_penalty, params.frequency_penalty, len(row.prompt))
    return np.asarray(rule(row.ids, logits), dtype=np.float64)


def _counting_prompt(row: Row, params: SamplingParams, only: bool) -> Wide:
    logits = _penalties(row, replace(params, presence_penalty=0.0, frequency_penalty=0.0))
    rule = CountPenalties(params.presence_penalty, params.frequency_penalty, 0)
    return np.asarray(rule(row.prompt if only else row.ids, logits), dtype=np.float64)


def _with(**changes: Any) -> Callable[[SamplingParams], SamplingParams]:
    return lambda params: replace(params, **changes)


# fmt: off
WRONG_RULES: tuple[WrongRule, ...] = (
    WrongRule("temperature_after_limits", "temperature is applied after the limits, to the tokens that they kept",
        "Divide the logits by the temperature first.", ("temperature",), replace(RIGHT, temper_last=True)),
    WrongRule("temperature_ignored", "temperature changes nothing (probabilities divided by it and normalised again)",
        "Divide the logits, not the probabilities.", ("temperature",), RIGHT, _with(temperature=1.0)),
    WrongRule("temperature_after_softmax", "temperature divides probabilities, which go through softmax again",
        "Divide the logits, and take softmax once.", ("temperature",),
        replace(RIGHT, temper=lambda logits, t: np.asarray(softmax(logits.astype(np.float64)) / t))),
    WrongRule("temperature_multiplied", "logits are multiplied by the temperature", "Divide them.", ("temperature",),
        replace(RIGHT, temper=lambda logits, t: logits.astype(np.float64) * t)),
    WrongRule("top_k_one_short", "top_k keeps one token too few", "Keep k tokens.", ("top_k",),
        _limit("top_k", partial(_top_k, more=-1))),
    WrongRule("top_k_one_more", "top_k keeps one token too many", "Keep k tokens.", ("top_k",),
        _limit("top_k", partial(_top_k, more=1))),
    WrongRule("top_k_ignored", "top_k is not applied", "Apply it.", ("top_k",), RIGHT, _with(top_k=0)),
    WrongRule("top_p_one_short", "top_p drops the token with which the sum reaches p",
        "Keep it: the sum must reach p.", ("top_p",), _limit("top_p", partial(_top_p, more=-1))),
    WrongRule("top_p_one_more", "top_p keeps one token more than it needs to reach p",
        "End with the token that reaches p.", ("top_p",), _limit("top_p", partial(_top_p, more=1))),
    WrongRule("top_p_strict", "top_p goes on until the sum is more than p", "End where the sum is p or more.",
        ("top_p",), _limit("top_p", _exclusive_p)),
    WrongRule("top_p_ignored", "top_p is not applied", "Apply it.", ("top_p",), RIGHT, _with(top_p=1.0)),
    WrongRule("top_p_before_top_k", "top_p is applied before top_k", "Apply top_k first.", ("top_p", "top_k"),
        replace(RIGHT, order=("top_p", "top_k", "min_p", "typical_p"))),
    WrongRule("top_p_as_min_p", "top_p is taken as min_p", "Exchange the two arguments.", ("top_p",), RIGHT,
        lambda params: replace(params, min_p=params.top_p, top_p=1.0)),
    WrongRule("min_p_as_top_p", "min_p is taken as top_p", "Exchange the two arguments.", ("min_p",), RIGHT,
        lambda params: replace(params, top_p=params.min_p, min_p=0.0)),
    WrongRule("top_p_and_min_p_exchanged", "top_p and min_p are exchanged", "Exchange the two arguments.",
        ("top_p", "min_p"), RIGHT, lambda params: replace(params, top_p=params.min_p, min_p=params.top_p)),
    WrongRule("min_p_absolute", "min_p is relative to 1, and not to the most likely token",
        "Multiply min_p by the largest probability.", ("min_p",),
        _limit("min_p", lambda ids, p, s: _first(ids, p, int((p >= s.min_p).sum())) if s.min_p > 0 else (ids, p))),
    WrongRule("min_p_ignored", "min_p is not applied", "Apply it.", ("min_p",), RIGHT, _with(min_p=0.0)),
    WrongRule("typical_as_top_p", "typical_p is taken as top_p",
        "Order the tokens by how near their surprise is to its mean.", ("typical_p",),
        _limit("typical_p", lambda ids, p, params: nucleus(ids, p, params.typical_p))),
    WrongRule("typical_one_short", "typical_p keeps one token too few", "Keep the token that reaches the mass.",
        ("typical_p",), _limit("typical_p", partial(_typical_more, more=-1))),
    WrongRule("typical_one_more", "typical_p keeps one token too many", "End with the token that reaches the mass.",
        ("typical_p",), _limit("typical_p", partial(_typical_more, more=1))),
    WrongRule("typical_ignored", "typical_p is not applied", "Apply it.", ("typical_p",), RIGHT, _with(typical_p=1.0)),
    WrongRule("repetition_on_prompt", "the repetition penalty is on the prompt's tokens only",
        "Penalise the prompt and the generated tokens.", ("repetition_penalty",),
        replace(RIGHT, penalties=partial(_part_penalised, part="prompt"))),
    WrongRule("repetition_on_generated", "the repetition penalty is on the generated tokens only",
        "Penalise the prompt and the generated tokens.", ("repetition_penalty",),
        replace(RIGHT, penalties=partial(_part_penalised, part="generated"))),
    WrongRule("repetition_divides_all", "the repetition penalty divides negative logits too",
        "Multiply negative logits by it.", ("repetition_penalty",), replace(RIGHT, penalties=_divided)),
    WrongRule("repetition_each_time", "the repetition penalty is applied once for each occurrence",
        "Apply it once for each token.", ("repetition_penalty",), replace(RIGHT, penalties=_each_time)),
    WrongRule("repetition_ignored", "the repetition penalty is not applied", "Apply it.", ("repetition_penalty",),
        RIGHT, _with(repetition_penalty=1.0)),
    WrongRule("counts_of_prompt_too", "presence and frequency penalties count the prompt's tokens too",
        "Count generated tokens only.", ("presence_penalty", "frequency_penalty"),
        replace(RIGHT, penalties=partial(_counting_prompt, only=False))),
    WrongRule("counts_of_prompt", "presence and frequency penalties count the prompt's tokens only",
        "Count generated tokens.", ("presence_penalty", "frequency_penalty"),
        replace(RIGHT, penalties=partial(_counting_prompt, only=True))),
    WrongRule("presence_as_frequency", "the presence penalty is applied for each occurrence", "Apply it once.",
        ("presence_penalty",), RIGHT,
        lambda params: replace(params, frequency_penalty=params.presence_penalty, presence_penalty=0.0)),
    WrongRule("frequency_as_presence", "the frequency penalty is applied once, whatever the count",
        "Multiply it by the count.", ("frequency_penalty",), RIGHT,
        lambda params: replace(params, presence_penalty=params.frequency_penalty, frequency_penalty=0.0)),
    WrongRule("counts_ignored", "presence and frequency penalties are not applied", "Apply them.",
        ("presence_penalty", "frequency_penalty"), RIGHT, _with(presence_penalty=0.0, frequency_penalty=0.0)),
)
# fmt: on
_NEUTRAL = SamplingParams(temperature=1.0)
TOP_P_STRICT = next(rule for rule in WRONG_RULES if rule.name == "top_p_strict")


def applies(rule: WrongRule, params: SamplingParams) -> bool:
    used = [getattr(params, name) != getattr(_NEUTRAL, name) for name in rule.uses]
    return params.temperature > 0 and (any(used) if rule.name.startswith("counts") else all(used))
