"""From a difference to its cause: hypotheses ranked by the pattern, then each tested by running it.

A test is a run of the reference with the mistake made, compared with the candidate like the reference itself. A cause
is *confirmed* when that comparison agrees; it *explains a part* when the first difference moves to a later op, as it
does where an engine has two mistakes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..compare import OTHER_SHAPE, Comparison, compare
from ..names import LOGITS, SYNONYMS
from ..patterns import Kind, kind_of, relative_error
from .hypotheses import Hypothesis, forward_hypotheses
from .hypotheses.prompts import TokenHypothesis, generation_hypotheses, greedy, prompt_hypotheses, tokenizer_of
from .variants import Setting

if TYPE_CHECKING:
    from ...api import Model

_ENDS = ("hook_embed", LOGITS)


@dataclass(frozen=True)
class Diagnosis:
    """One cause that was tested.

    confirmed: the reference with this mistake made agrees with the candidate.
    partly: it does not, but the first difference moves to a later op, `first_difference`.
    logit_error_before, logit_error: relative L2 of the candidate's logits against the reference's own and the changed
    reference's; None where the candidate has none.
    """

    name: str
    cause: str
    remedy: str
    confirmed: bool
    partly: bool = False
    expected: bool = False  # the op and the look of the difference had pointed to it before the test
    first_difference: str | None = None
    logit_error_before: float | None = None
    logit_error: float | None = None

    def __str__(self) -> str:
        verdict = "confirmed" if self.confirmed else "explains a part" if self.partly else "not confirmed"
        figures = []
        if self.logit_error_before is not None and self.logit_error is not None:
            figures.append(
                f"with it the logits' relative error goes from {self.logit_error_before:.2g} to {self.logit_error:.2g}"
            )
        if self.first_difference is not None:
            figures.append(f"the first difference is then at {self.first_difference}")
        detail = f" ({'; '.join(figures)})" if figures else ""
        return (
            f"{verdict}: {self.cause}{detail}. {self.remedy}" if self.confirmed else f"{verdict}: {self.cause}{detail}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def diagnose(
    model: Model,
    tokens: Sequence[int],
    candidate: Mapping[str, NDArray],
    comparison: Comparison,
    *,
    thorough: bool = True,
    depth: int = 2,
) -> list[Diagnosis]:
    """What may be wrong with a candidate whose `comparison` with the reference (`model`, on `tokens`) differs.

    candidate: {op name: array} or a trace, as compared; logits alone will do. Where other token ids are the difference,
    it is the prompt that is diagnosed; a teacher-forced run is judged up to the op that differs first.
    thorough: test the hypotheses that the pattern
    speaks against, too, when none of those that it speaks for is confirmed.   depth: how many mistakes at once.
    Sorted: confirmed first, then what explains a part, then the rest by likelihood. All that fit equally are listed.
    Empty when the comparison agrees, and when the embedding or the logits have another shape: that is another model.
    """
    other_model = any(op.name in _ENDS and op.note.startswith(OTHER_SHAPE) for op in comparison.ops)
    if comparison.agrees or other_model:
        return []
    if comparison.problem is not None:
        other = getattr(candidate, "token_ids", None)
        return [] if other is None else diagnose_prompt(model, tokens, other, getattr(candidate, "prompt", None))
    forced = comparison.mode == "teacher-forced"
    search = _Search(Setting.of(model, tokens), candidate, _first(comparison), thorough, forced)
    found = tested = search.run()
    before: list[Diagnosis] = []  # mistakes that are assumed while the next one is looked for
    while len(before) < depth - 1 and not any(d.confirmed for d in tested):
        if not (parts := [d for d in tested if d.partly]):
            break
        before.append(parts[0])
        changed = search.changes[parts[0].cause].change(search.setting)
        assert changed is not None
        search = _Search(changed, candidate, parts[0].first_difference, thorough, forced, search.before)
        tested = search.run()
        found = found + [_together([*before, last]) for last in tested if last.confirmed]
    return _ranked(found)


def _together(mistakes: list[Diagnosis]) -> Diagnosis:
    return Diagnosis(
        " + ".join(d.name for d in mistakes),
        "; and ".join(d.cause for d in mistakes),
        " ".join(d.remedy for d in mistakes),
        confirmed=True,
        logit_error_before=mistakes[0].logit_error_before,
        logit_error=mistakes[-1].logit_error,
    )


def diagnose_prompt(
    model: Model, tokens: Sequence[int], candidate_tokens: Sequence[int], prompt: str | None = None
) -> list[Diagnosis]:
    """Why a candidate has other token ids for the same prompt. Empty when the ids are equal."""
    right, other = [int(t) for t in tokens], [int(t) for t in candidate_tokens]
    if right == other:
        return []
    return _judged(prompt_hypotheses(right, other, tokenizer_of(model), prompt), other)


def diagnose_generation(
    model: Model, tokens: Sequence[int], candidate_generated: Sequence[int], generated: Sequence[int] | None = None
) -> list[Diagnosis]:
    """Why a candidate continues the same token ids otherwise, greedily. Empty when it does not.

    generated: the reference's own continuation with its end token; computed here when it is not given.
    """
    other = [int(t) for t in candidate_generated]
    right = greedy(model, tokens, max(1, len(other))) if generated is None else [int(t) for t in generated]
    return [] if right == other else _judged(generation_hypotheses(model, tokens, right, other), other)


def _judged(hypotheses: Iterable[TokenHypothesis], candidate: list[int]) -> list[Diagnosis]:
    found = []
    for hypothesis in hypotheses:
        wrong = hypothesis.wrong()
        if wrong is not None:
            found.append(Diagnosis(hypothesis.name, hypothesis.cause, hypothesis.remedy, confirmed=wrong == candidate))
    return _ranked(found)


def _ranked(found: list[Diagnosis]) -> list[Diagnosis]:
    return sorted(found, key=lambda d: (not d.confirmed, not d.partly, not d.expected))


def _first(comparison: Comparison) -> str | None:
    return None if comparison.first_divergence is None else comparison.first_divergence.name


class _Part(Mapping[str, NDArray]):
    """Some tensors of a candidate; all else that it tells (its dtype, its token ids) is the whole's."""

    def __init__(self, whole: Mapping[str, NDArray], names: set[str]) -> None:
        self._whole, self._names = whole, [name for name in whole if SYNONYMS.get(name, name) in names]

    def __getitem__(self, name: str) -> NDArray:
        return self._whole[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


@dataclass
class _Search:
    """Tests the hypotheses that apply to one setting."""

    setting: Setting
    candidate: Mapping[str, NDArray]
    first: str | None  # the first op that differs
    thorough: bool
    forced: bool  # teacher-forced: what follows the first op that differs was computed from the reference's inputs
    before: float | None = None  # error of the logits before any change
    changes: dict[str, Hypothesis] = field(default_factory=dict)  # those tested, by cause

    def run(self) -> list[Diagnosis]:
        self.reference = self.setting.run()
        self.order = {name: i for i, name in enumerate(self.reference)}
        self.known = {SYNONYMS.get(name, name) for name in self.candidate}
        if self.before is None:
            self.before = self._logit_error(self.reference)
        kind, span = self._kind(), self._span()
        likely: list[tuple[int, Hypothesis]] = []
        unlikely: list[tuple[int, Hypothesis]] = []
        for hypothesis in forward_hypotheses(self.setting, self.candidate):
            in_place = any(fnmatchcase(name, glob) for name in span for glob in hypothesis.shows)
            looks_so = kind in hypothesis.kinds and kind is not Kind.OTHER
            (likely if in_place else unlikely).append((2 * in_place + looks_so, hypothesis))
        found = self._tested(likely)
        if self.thorough and not any(d.confirmed for d in found):
            found += self._tested(unlikely)
        return _ranked_by_progress(found, self.order)

    def _tested(self, hypotheses: list[tuple[int, Hypothesis]]) -> list[Diagnosis]:
        """The best fitting first. A changed setting is made just before its run: it may hold a model's weights."""
        found = []
        for fits, hypothesis in sorted(hypotheses, key=lambda pair: -pair[0]):
            changed = hypothesis.change(self.setting)
            if changed is not None:
                found.append(self._test(hypothesis, changed, fits))
        return found

    def _test(self, hypothesis: Hypothesis, changed: Setting, fits: int) -> Diagnosis:
        self.changes[hypothesis.cause] = hypothesis
        again, error = self._up_to_the_first(changed), None
        if again is None or (again.agrees and not self.forced):  # right so far: now the whole of it
            seen = changed.run(lambda name: name in self.known)
            again, error = compare(seen, self.candidate, changed.config, changed.tokens), self._logit_error(seen)
        first, end = _first(again), len(self.order)
        moved = first is not None and self.order.get(first, end) > self.order.get(self.first or "", end)
        return Diagnosis(
            hypothesis.name,
            hypothesis.cause,
            hypothesis.remedy,
            confirmed=bool(again.agrees),
            partly=not again.agrees and moved,
            expected=fits > 0,
            first_difference=first,
            logit_error_before=self.before,
            logit_error=error,
        )

    def _up_to_the_first(self, changed: Setting) -> Comparison | None:
        """The comparison as far as the first op that differs without the change, which is cheap; None without such."""
        if self.first not in self.order or self.order[self.first] + 1 == len(self.order):
            return None
        names = set(list(self.order)[: self.order[self.first] + 1])
        seen = changed.run(lambda name: name in names and name in self.known, until=self.first)
        return compare(seen, _Part(self.candidate, names), changed.config, changed.tokens)

    def _kind(self) -> Kind:
        if self.first is None or self.first not in self.reference or self.first not in self.candidate:
            return Kind.OTHER
        return kind_of(self.reference[self.first], self.candidate[self.first])

    def _span(self) -> list[str]:
        """The ops where the mistake may sit: after the last one that the candidate has right, to the first wrong."""
        if self.first not in self.order:
            return list(self.order)
        names = list(self.order)
        stop = self.order[self.first]
        known = [i for i in range(stop) if names[i] in self.candidate]
        return names[(known[-1] + 1 if known else 0) : stop + 1]

    def _logit_error(self, seen: Mapping[str, NDArray]) -> float | None:
        """Relative L2 of the candidate's logits; where it has the last token's alone, of those."""
        theirs = next((self.candidate[name] for name in self.candidate if SYNONYMS.get(name, name) == LOGITS), None)
        if theirs is None or LOGITS not in seen or theirs.size % seen[LOGITS].shape[-1]:
            return None
        theirs = np.asarray(theirs).reshape(-1, seen[LOGITS].shape[-1])
        return relative_error(seen[LOGITS][-len(theirs) :], theirs)


def _ranked_by_progress(found: list[Diagnosis], order: Mapping[str, int]) -> list[Diagnosis]:
    """What explains a part: the further it moves the first difference, the earlier in the list."""
    return _ranked(sorted(found, key=lambda d: -order.get(d.first_difference or "", -1) if d.partly else 0))
