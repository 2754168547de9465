"""From a difference to its cause: the hypotheses about the first op that differs are tested, each by a run.

A test runs the reference with the mistake made and compares it with the candidate. The cause is *confirmed* when that
comparison agrees. It *explains a part* when the first difference moves to a later op, as with an engine that makes two
mistakes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends.loaded import LoadedModel
from ..compare import OTHER_SHAPE, Comparison, View, compare
from ..names import LOGITS
from .hypotheses import forward_hypotheses
from .hypotheses.prompts import TokenHypothesis, prompt_hypotheses, tokenizer_of
from .variants import Hypothesis, Setting


@dataclass(frozen=True)
class Diagnosis:
    """One cause that was tested.

    confirmed: the reference with this mistake agrees with the candidate.
    partly: it does not agree, but the first difference moves to a later op, `first_difference`.
    expected: it is a mistake that shows first at the op that differs first.
    logit_error_before, logit_error: relative L2 of the candidate's logits against the reference's own and the changed
    reference's; None where the candidate has no logits.
    """

    name: str
    cause: str
    remedy: str
    confirmed: bool
    partly: bool = False
    expected: bool = False
    first_difference: str | None = None
    logit_error_before: float | None = None
    logit_error: float | None = None

    def __str__(self) -> str:
        verdict = "confirmed" if self.confirmed else "explains a part" if self.partly else "not confirmed"
        details = []
        if self.logit_error_before is not None and self.logit_error is not None:
            errors = f"from {self.logit_error_before:.2g} to {self.logit_error:.2g}"
            details.append(f"with it the logits' relative error goes {errors}")
        if self.first_difference is not None:
            details.append(f"the first difference is then at {self.first_difference}")
        text = f"{verdict}: {self.cause}" + (f" ({'; '.join(details)})" if details else "")
        return f"{text}. {self.remedy}" if self.confirmed else text

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def diagnose(
    model: LoadedModel,
    tokens: Sequence[int],
    candidate: Mapping[str, NDArray],
    comparison: Comparison,
    *,
    thorough: bool = True,
    depth: int = 2,
) -> list[Diagnosis]:
    """The possible causes of a `comparison` that differs, of a candidate with the reference (`model`, on `tokens`).

    candidate: {op name: array} or a trace; logits alone are enough. If its token ids differ, the prompt is diagnosed.
        A teacher-forced run is judged up to the first op that differs.
    thorough: if no likely hypothesis is confirmed, test the unlikely ones too.   depth: how many mistakes at once.
    Sorted: confirmed, then what explains a part, then the expected ones. Causes that fit equally are all listed.
    Empty when the comparison agrees, and when the embedding or the logits have another shape: that is another model.
    """
    other_model = any(op.name in ("hook_embed", LOGITS) and op.note.startswith(OTHER_SHAPE) for op in comparison.ops)
    if comparison.agrees or other_model:
        return []
    if comparison.problem is not None:
        ids = getattr(candidate, "token_ids", None)
        return [] if ids is None else diagnose_prompt(model, tokens, ids, getattr(candidate, "prompt", None))
    forced = comparison.mode == "teacher-forced"
    view = View(candidate)
    search = _Search(Setting.of(model, tokens), view, _first_name(comparison), thorough, forced)
    diagnoses = tested = search.run()
    assumed: list[Diagnosis] = []  # mistakes that are made while the next one is looked for
    while len(assumed) < depth - 1 and not any(d.confirmed for d in tested):
        if not (parts := [d for d in tested if d.partly]):
            break
        assumed.append(parts[0])
        changed = search.hypotheses[parts[0].cause].change(search.setting)
        assert changed is not None
        search = _Search(changed, view, parts[0].first_difference, thorough, forced, search.error_before)
        tested = search.run()
        diagnoses = diagnoses + [_combine([*assumed, last]) for last in tested if last.confirmed]
    return _rank(diagnoses)


def _combine(mistakes: list[Diagnosis]) -> Diagnosis:
    """One diagnosis of several mistakes that agree with the candidate only together."""
    return Diagnosis(
        " + ".join(d.name for d in mistakes),
        "; and ".join(d.cause for d in mistakes),
        " ".join(d.remedy for d in mistakes),
        confirmed=True,
        logit_error_before=mistakes[0].logit_error_before,
        logit_error=mistakes[-1].logit_error,
    )


def diagnose_prompt(
    model: LoadedModel, tokens: Sequence[int], candidate_tokens: Sequence[int], prompt: str | None = None
) -> list[Diagnosis]:
    """Why a candidate has other token ids for the same prompt. Empty when the ids are equal."""
    right, wrong = [int(t) for t in tokens], [int(t) for t in candidate_tokens]
    if right == wrong:
        return []
    return judge_ids(prompt_hypotheses(right, wrong, tokenizer_of(model), prompt), wrong)


def judge_ids(hypotheses: Iterable[TokenHypothesis], candidate: list[int]) -> list[Diagnosis]:
    """Each mistake that applies, confirmed if it gives the candidate's ids."""
    results = ((h, h.wrong()) for h in hypotheses)
    return _rank([Diagnosis(h.name, h.cause, h.remedy, ids == candidate) for h, ids in results if ids is not None])


def _rank(diagnoses: list[Diagnosis]) -> list[Diagnosis]:
    return sorted(diagnoses, key=lambda d: (not d.confirmed, not d.partly, not d.expected))


def _first_name(comparison: Comparison) -> str | None:
    return None if comparison.first_divergence is None else comparison.first_divergence.name


@dataclass
class _Search:
    """Tests the hypotheses that apply to one setting."""

    setting: Setting
    candidate: View
    first: str | None  # the first op that differs
    thorough: bool
    forced: bool  # teacher-forced: ops after the first difference were computed from the reference's inputs
    error_before: float | None = None  # of the logits, without any change
    hypotheses: dict[str, Hypothesis] = field(default_factory=dict)  # those tested, by cause

    def run(self) -> list[Diagnosis]:
        self.reference = self.setting.run()
        self.order = {name: i for i, name in enumerate(self.reference)}
        if self.error_before is None:
            self.error_before = self._logit_error(self.reference)
        span, hypotheses = self._span(), forward_hypotheses(self.setting, self.candidate)
        likely = [h for h in hypotheses if any(fnmatchcase(name, glob) for name in span for glob in h.shows.split())]
        diagnoses = self._test_all(likely, expected=True)
        if self.thorough and not any(d.confirmed for d in diagnoses):
            diagnoses += self._test_all([h for h in hypotheses if h not in likely], expected=False)
        # of those that explain a part: the further one moves the first difference, the earlier in the list
        progress = sorted(diagnoses, key=lambda d: -self.order.get(d.first_difference or "", -1) if d.partly else 0)
        return _rank(progress)

    def _test_all(self, hypotheses: Iterable[Hypothesis], expected: bool) -> list[Diagnosis]:
        """Each changed setting is made just before its run and then dropped: it may hold a model's weights."""
        diagnoses = []
        for hypothesis in hypotheses:
            changed = hypothesis.change(self.setting)
            if changed is not None:
                diagnoses.append(self._test(hypothesis, changed, expected))
        return diagnoses

    def _test(self, hypothesis: Hypothesis, changed: Setting, expected: bool) -> Diagnosis:
        self.hypotheses[hypothesis.cause] = hypothesis
        comparison, error = self._compare_beginning(changed), None
        if comparison is None or (comparison.agrees and not self.forced):  # now the whole run
            tensors = changed.run(self.candidate.__contains__)
            comparison = compare(tensors, self.candidate, changed.config, changed.tokens)
            error = self._logit_error(tensors)
        first, end = _first_name(comparison), len(self.order)
        moved = first is not None and self.order.get(first, end) > self.order.get(self.first or "", end)
        return Diagnosis(
            hypothesis.name,
            hypothesis.cause,
            hypothesis.remedy,
            confirmed=bool(comparison.agrees),
            partly=not comparison.agrees and moved,
            expected=expected,
            first_difference=first,
            logit_error_before=self.error_before,
            logit_error=error,
        )

    def _compare_beginning(self, changed: Setting) -> Comparison | None:
        """The comparison up to the op that differs first without the change, which costs little.

        None where no op differs, or only the last.
        """
        if self.first not in self.order or self.order[self.first] + 1 == len(self.order):
            return None
        names = set(list(self.order)[: self.order[self.first] + 1])
        tensors = changed.run(lambda name: name in names and name in self.candidate, until=self.first)
        return compare(tensors, View(self.candidate, names), changed.config, changed.tokens)

    def _span(self) -> list[str]:
        """The ops that may hold the mistake: after the last one the candidate has right, up to the first wrong one."""
        names = list(self.order)
        if self.first not in self.order:
            return names
        stop = self.order[self.first]
        recorded = [i for i in range(stop) if names[i] in self.candidate]
        return names[(recorded[-1] + 1 if recorded else 0) : stop + 1]

    def _logit_error(self, tensors: Mapping[str, NDArray]) -> float | None:
        """Relative L2 of the candidate's logits; of the last token's where it has only those."""
        logits = self.candidate.get(LOGITS)
        if logits is None or LOGITS not in tensors or logits.size % tensors[LOGITS].shape[-1]:
            return None
        logits = np.asarray(logits, dtype=np.float64).reshape(-1, tensors[LOGITS].shape[-1])
        right = tensors[LOGITS][-len(logits) :].astype(np.float64)
        if right.shape != logits.shape or not np.isfinite(logits).all():
            return math.inf
        return float(np.linalg.norm(logits - right) / np.linalg.norm(right))
