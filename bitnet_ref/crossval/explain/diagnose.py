"""From a difference to its cause: the hypotheses about the first op that differs are tested, each by a run.

A test runs the reference with the mistake made and compares it with the candidate. The cause is *confirmed* when that
comparison agrees. It *explains a part* when the first difference moves to a later op, as with an engine that makes two
mistakes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from ...backends.loaded import LoadedModel
from ...backends.record import sibling
from ...families.family import Hypothesis
from ..compare import OTHER_SHAPE, Comparison, View, compare
from ..names import INT8, LOGITS, SCALE
from ..tolerances import EXPLAINED_SHARE, FLIPPED_SHARE, LOGITS_ROUNDING, ROUNDED_SHARE
from ..types import Tensors, Tokens
from .describe import Finding, differing_tensors, find
from .edits.kinds import Description
from .evidence import tensors_left
from .hypotheses import forward_hypotheses
from .hypotheses.prompts import prompt_hypotheses, tokenizer_of
from .recording import wrong_recording
from .variants import IMPOSSIBLE, Setting

_TIES = ("round_half_away", "round_half_up")  # mistakes that change values on a half alone


@dataclass(frozen=True)
class Diagnosis:
    """One cause that was tested.

    confirmed: the reference with this mistake agrees with the candidate, and the logits' error is a tenth or less.
    partly: it does not agree, but the first difference moves to a later op, `first_difference`.
    expected: it is a mistake that shows first at the op that differs first.
    logit_error_before, logit_error: relative L2 of the candidate's logits against the reference's own and the changed
    reference's; None where the candidate has no logits.
    example: one value: its inputs, the reference's steps, the engine's value. Lines; "" where there is none.
    record_next: the tensor that would tell this cause from others that fit equally.
    possible: of tokens alone: it explains them, but others do too, or too few tokens speak for it.
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
    example: str = ""
    record_next: str | None = None
    possible: bool = False

    def __str__(self) -> str:
        verdict = "confirmed" if self.confirmed else "explains a part" if self.partly else "not confirmed"
        verdict = "possible" if self.possible else verdict
        details = []
        if self.logit_error_before is not None and self.logit_error is not None:
            errors = f"from {self.logit_error_before:.2g} to {self.logit_error:.2g}"
            details.append(f"with it the logits' relative error goes {errors}")
        if self.first_difference is not None:
            details.append(f"the first difference is then at {self.first_difference}")
        if self.record_next is not None:
            details.append(f"{self.record_next} would tell it from the others: record it next")
        text = f"{verdict}: {self.cause}" + (f" ({'; '.join(details)})" if details else "")
        return f"{text}. {self.remedy}" if self.confirmed or self.possible else text

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


Change = Callable[[Setting], Setting | None]


class Diagnoses(list[Diagnosis]):
    """The causes that were tested, and whether all were.

    stopped: why the search ended early, "the time is up" or "interrupted"; "" if it did not.   untested: how many
    descriptions were left at that moment.   failed: the mistakes that this model cannot be run with.
    recording: that the trace is wrong, not the engine, which ends the search before it begins; "" if nothing says so.
    """

    recording = ""
    stopped = ""
    untested = 0
    failed: Mapping[str, str] = {}  # by cause: the error of the reference with it, which was therefore not tested
    changes: Mapping[str, Change] = {}  # by cause: the reference with it


Progress = Callable[[int, int, str], None]  # (how many were tested, of how many, what is tested now)


class OutOfTime(Exception):
    """The search's time is up."""


@dataclass
class Watch:
    """Counts the tests of a search, reports each before it starts, and ends the search in time."""

    progress: Progress | None = None
    budget_s: float | None = None  # of processor time, from now on
    tested: int = 0
    total: int = 0

    def __post_init__(self) -> None:
        self.deadline = math.inf if self.budget_s is None else time.process_time() + self.budget_s

    def add(self, count: int) -> None:
        """So many tests are to come."""
        self.total += count

    def check(self) -> None:
        """Raises OutOfTime when the time is up, once it is known how many tests there are."""
        if self.total and time.process_time() > self.deadline:
            raise OutOfTime

    def __call__(self, text: str) -> None:
        """Before a test. Raises OutOfTime when the time is up."""
        self.check()
        if self.progress is not None:
            self.progress(self.tested, self.total, text)
        self.tested += 1


def diagnose(
    model: LoadedModel,
    tokens: Tokens,
    candidate: Tensors,
    comparison: Comparison,
    *,
    thorough: bool = True,
    depth: int = 3,
    progress: Progress | None = None,
    budget_s: float | None = None,
) -> Diagnoses:
    """The possible causes of a `comparison` that differs, of a candidate with the reference (`model`, on `tokens`).

    candidate: {op name: array} or a trace; logits alone are enough. If its token ids differ, the prompt is diagnosed.
        A teacher-forced run is judged up to the first op that differs.
    thorough: if no likely hypothesis is confirmed, test the unlikely ones too.   depth: how many mistakes at once.
    progress: called before each test.   budget_s: of processor time. When it is over, and at Ctrl-C, the result is what
        is known by then, and says so (`Diagnoses.stopped`).
    A comparison that is undecided differs once a cause is confirmed.
    Sorted: confirmed, then what explains a part, then the expected ones. Causes that fit equally are all listed.
    Empty when the comparison agrees, and when the embedding or the logits have another shape: that is another model.
    """
    other_model = any(op.name in ("hook_embed", LOGITS) and op.note.startswith(OTHER_SHAPE) for op in comparison.ops)
    if comparison.agrees or other_model:
        return Diagnoses()
    if comparison.problem is not None:
        ids = getattr(candidate, "token_ids", None)
        return Diagnoses([] if ids is None else diagnose_prompt(model, tokens, ids, getattr(candidate, "prompt", None)))
    forced = comparison.mode == "teacher-forced"
    if not forced and (recording := wrong_recording(model, tokens, View(candidate), comparison)):
        diagnoses = Diagnoses()
        diagnoses.recording = recording
        return diagnoses
    watch, stopped = Watch(progress, budget_s), ""
    setting = replace(Setting.of(model, tokens, candidate), check=watch.check)
    search = _Search(setting, View(candidate), _first_name(comparison), thorough, forced, watch, [])
    try:
        _search_causes(search, depth)
    except OutOfTime:
        stopped = "the time is up"
    except KeyboardInterrupt:
        stopped = "interrupted"
    diagnoses = Diagnoses(_rank(search.diagnoses))
    if any(d.confirmed for d in diagnoses):
        comparison.undecided = ""
    diagnoses.changes = search.changes
    diagnoses.failed = search.failed
    diagnoses.stopped, diagnoses.untested = stopped, watch.total - watch.tested if stopped else 0
    return diagnoses


def _search_causes(search: _Search, depth: int) -> None:
    """Add every cause that is tested to the search's diagnoses: single mistakes, then up to `depth` at once."""
    tested, changes, assumed = search.diagnoses, search.changes, list[Diagnosis]()
    last = search.run()
    while len(assumed) < depth - 1 and not any(d.confirmed for d in last) and search.parts:
        assumed.append(part := search.parts[0])  # this mistake is made while the next one is looked for
        changed = changes[part.cause](search.setting)
        assert changed is not None
        first = part.first_difference
        if first is not None and not changed.run(first.__eq__, first)[first].any():
            break  # a tensor of zeros shows no further mistake
        further: list[Diagnosis] = []
        made = [search.edits[d.cause] for d in assumed if d.cause in search.edits]
        search = replace(search, setting=changed, first=first, diagnoses=further, parts=[], made=made)
        try:
            last = search.run()
        finally:
            for d in (d for d in further if d.confirmed):
                needed = assumed if d.name in _TIES and _is_up_to_flips(search, part) else [*assumed, d]
                both = _combine(needed)
                tested[:] = [each for each in tested if each.cause != both.cause]
                changes[both.cause] = partial(_change_all, [changes[one.cause] for one in needed])
                tested.append(both)


def _is_up_to_flips(search: _Search, part: Diagnosis) -> bool:
    """Whether a mistake explains the logits up to flips of values on a half, which a trace without int8 hides."""
    is_shown = any(name.endswith(INT8) for name in search.candidate)
    return not is_shown and part.logit_error is not None and search._explains_logits(part.logit_error, EXPLAINED_SHARE)


def _change_all(changes: Sequence[Change], setting: Setting) -> Setting | None:
    """The setting with several mistakes made."""
    changed: Setting | None = setting
    for change in changes:
        changed = None if changed is None else change(changed)
    return changed


def _combine(mistakes: list[Diagnosis]) -> Diagnosis:
    """One diagnosis of several mistakes that agree with the candidate only together."""
    errors = mistakes[0].logit_error_before, mistakes[-1].logit_error
    together = Diagnosis(*joined(mistakes), confirmed=True)
    return replace(together, logit_error_before=errors[0], logit_error=errors[1])


def joined(mistakes: Iterable[Any]) -> tuple[str, str, str]:
    """Name, cause and remedy of several mistakes that are made at once."""
    names, causes, remedies = zip(*((d.name, d.cause, d.remedy.rstrip(".") + ".") for d in mistakes), strict=True)
    return " + ".join(names), "; and ".join(causes), " ".join(remedies)


def diagnose_prompt(
    model: LoadedModel, tokens: Tokens, candidate_tokens: Tokens, prompt: str | None = None
) -> list[Diagnosis]:
    """Why a candidate has other token ids for the same prompt. Empty when the ids are equal."""
    right, wrong = [int(t) for t in tokens], [int(t) for t in candidate_tokens]
    if right == wrong:
        return []
    results = ((h, h.wrong()) for h in prompt_hypotheses(right, wrong, tokenizer_of(model), prompt))
    return _rank([Diagnosis(h.name, h.cause, h.remedy, ids == wrong) for h, ids in results if ids is not None])


def sure_or_possible(name: str, cause: str, remedy: str, is_sure: bool) -> Diagnosis:
    """A cause that explains everything that was given; others may too."""
    return Diagnosis(name, cause, remedy, confirmed=is_sure, possible=not is_sure)


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
    watch: Watch
    diagnoses: list[Diagnosis]  # the results go there, one by one
    error_before: float | None = None  # of the logits, without any change
    changes: dict[str, Change] = field(default_factory=dict)  # what was tested, by cause
    failed: dict[str, str] = field(default_factory=dict)  # by cause: why it could not be tested
    parts: list[Diagnosis] = field(default_factory=list)  # that move the first difference to a later op
    edits: dict[str, Description] = field(default_factory=dict)  # of the findings, by cause
    made: list[Description] = field(default_factory=list)  # what the setting already edits
    reached: int = -1  # how far the setting goes without a further mistake: the place of the first difference

    def run(self) -> list[Diagnosis]:
        self.reference = self.setting.run()
        self.order = {name: i for i, name in enumerate(self.reference)}
        if self.error_before is None:
            self.error_before = self._logit_error(self.reference)
        unchanged = compare(self.reference, self.candidate, self.setting.config, self.setting.tokens)
        self.reached = max(self._place(self.first), self._place(_first_name(unchanged)))
        span, hypotheses = self._span(), forward_hypotheses(self.setting, self.candidate)
        likely = [h for h in hypotheses if any(map(h.is_at, span))]
        self._test_all(likely, expected=True)
        if not self.forced and not self.is_confirmed:
            with self._noting("descriptions of the first wrong tensor"):
                self._describe(hypotheses)
        if self.thorough and not self.is_confirmed:
            self._test_all([h for h in hypotheses if h not in likely], expected=False)
        if not (self.forced or self.parts or self.is_confirmed):
            with self._noting("two edits of the first wrong tensor"):
                self._describe(hypotheses, self.made)
        with self._noting("which tensor tells the causes apart"):
            self._tell_apart()
        # of those that explain a part: the further one moves the first difference, the earlier in the list
        for parts in (self.diagnoses, self.parts):
            parts.sort(key=lambda d: -self._place(d.first_difference) if d.partly or d in self.parts else 0)
        furthest = [d for d in self.parts if d.first_difference == self.parts[0].first_difference]
        if 1 < len(furthest) < 8:  # a mistake may be in a part of the steps that it has a name for
            self.parts[: len(furthest)] = sorted(furthest, key=self._count_left)
        return _rank(self.diagnoses)

    @property
    def is_confirmed(self) -> bool:
        return any(d.confirmed for d in self.diagnoses)

    def _count_left(self, part: Diagnosis) -> float:
        """How many tensors are wrong with a mistake."""
        changed = self.changes[part.cause](self.setting)
        left = None if changed is None else tensors_left(changed, self.candidate)
        return math.inf if left is None else len(left)

    def _place(self, name: str | None, absent: int = -1) -> int:
        """Where in the computation a tensor stands."""
        return self.order.get(name or "", absent)

    def _test_all(self, hypotheses: Sequence[Hypothesis], expected: bool) -> None:
        """Each mistake in all its steps."""
        self.watch.add(len(hypotheses))
        for hypothesis in hypotheses:
            self.watch(hypothesis.cause)
            with self._noting(hypothesis.cause):
                if (changed := hypothesis.change(self.setting)) is not None:
                    self.diagnoses.append(self._test(hypothesis, changed, expected))

    @contextmanager
    def _noting(self, cause: str) -> Iterator[None]:
        """What raises, as on a model that the mistake was not written for, is noted and not tested."""
        try:
            yield
        except IMPOSSIBLE as error:
            self.failed[cause] = f"{type(error).__name__}: {error}"

    def _describe(self, known: Sequence[Hypothesis], made: Sequence[Description] | None = None) -> None:
        """What the first wrong tensor is: by every edit of its steps, those with a name first.

        made: by two edits, see `find`.
        """
        for finding in find(self.setting, self.candidate, self.watch, known, made):
            if finding.cause in self.changes:  # tested, and not confirmed
                if not (finding.shows_flips or finding.rounds):
                    continue
                self.diagnoses[:] = [d for d in self.diagnoses if d.cause != finding.cause]
            changed = self.setting.with_edits(finding.edits)
            self.changes[finding.cause] = partial(Setting.with_edits, edits=finding.edits)
            comparison, error = self._compare_whole(changed)
            first = None if comparison.agrees or not finding.left else finding.left[0]
            if finding.made is not None:
                self.edits[finding.cause] = finding.made
            diagnosis = self._judge(finding, first is None, first, error)
            if finding.rounds and first is None and not diagnosis.confirmed:
                # the values that seemed to be rounded the other way are those of another mistake
                finding.left = tensors_left(changed, self.candidate) or []
                finding.moved = bool(finding.left) and finding.tensor not in finding.left
                first = next(iter(finding.left), None)
                diagnosis = self._judge(finding, False, first, error)
            self.diagnoses.append(diagnosis)

    def _tell_apart(self) -> None:
        """Of several confirmed causes: which tensor to record next. Descriptions of one computation become one."""
        confirmed = [d for d in self.diagnoses if d.confirmed]
        for d in confirmed[1:]:
            one, other = (self.changes[each.cause](self.setting) for each in (confirmed[0], d))
            assert one is not None
            assert other is not None
            names = differing_tensors(one, other)
            if names or d.name not in ("described", confirmed[0].name):
                unrecorded = (name for name in names if not self._is_recorded(name))
                self.diagnoses[self.diagnoses.index(d)] = replace(d, record_next=next(unrecorded, None))
            else:
                self.diagnoses.remove(d)

    def _is_recorded(self, name: str) -> bool:
        """Whether the candidate has the tensor, under this name or as the same numbers under another."""
        recorded = [self.reference[each] for each in self.candidate if each in self.reference]
        return any(np.array_equal(self.reference[name].reshape(-1), x.reshape(-1)) for x in recorded)

    def _judge(
        self, made: Hypothesis | Finding, confirmed: bool, first: str | None, error: float | None, expected: bool = True
    ) -> Diagnosis:
        """A test's result. What makes the logits worse explains no part, but a second mistake may be behind it."""
        share, moved, example = EXPLAINED_SHARE, False, ""
        if isinstance(made, Finding):
            share = FLIPPED_SHARE if made.shows_flips else ROUNDED_SHARE if made.rounds else share
            moved, example = made.moved, made.example
        end, confirmed = len(self.order), confirmed and self._explains_logits(error, share)
        moved = not confirmed and (moved or (first is not None and self._place(first, end) > self.reached))
        worse = error is not None and self.error_before is not None and error > self.error_before
        test = Diagnosis(made.name, made.cause, made.remedy, confirmed, moved and not worse, expected, first)
        diagnosis = replace(test, logit_error_before=self.error_before, logit_error=error, example=example)
        if moved:
            self.parts.append(diagnosis)
        return diagnosis

    def _explains_logits(self, error: float | None, share: float) -> bool:
        """Whether the logits' error with a mistake is such a share of the one without, or is rounding."""
        if error is None or self.error_before is None or not math.isfinite(self.error_before):
            return True
        dtype = getattr(self.candidate, "engine_dtype", None) or "float32"
        return error <= max(self.error_before * share, LOGITS_ROUNDING[dtype])

    def _test(self, hypothesis: Hypothesis, changed: Setting, expected: bool) -> Diagnosis:
        self.changes[hypothesis.cause] = hypothesis.change
        comparison, error = self._compare_beginning(changed), None
        if comparison is None or (comparison.agrees and not self.forced):  # now the whole run
            comparison, error = self._compare_whole(changed)
        return self._judge(hypothesis, comparison.agrees, _first_name(comparison), error, expected)

    def _compare_whole(self, changed: Setting) -> tuple[Comparison, float | None]:
        """The comparison of the whole run, and the logits' error."""
        tensors = changed.run(self.candidate.__contains__)
        return compare(tensors, self.candidate, changed.config, changed.tokens), self._logit_error(tensors)

    def _compare_beginning(self, changed: Setting) -> Comparison | None:
        """The comparison up to the first op that differs without the change. It costs little.

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
        span = names[(recorded[-1] + 1 if recorded else 0) : stop + 1]
        if self.first.endswith(INT8):  # a trace has the scale after them
            span.append(sibling(self.first, SCALE))
        return span

    def _logit_error(self, tensors: Tensors) -> float | None:
        """Relative L2 of the candidate's logits; of the last token's where it has only those."""
        logits = self.candidate.get(LOGITS)
        if logits is None or LOGITS not in tensors or logits.size % tensors[LOGITS].shape[-1]:
            return None
        logits = np.asarray(logits, dtype=np.float64).reshape(-1, tensors[LOGITS].shape[-1])
        right = tensors[LOGITS][-len(logits) :].astype(np.float64)
        if right.shape != logits.shape or not np.isfinite(logits).all():
            return math.inf
        return float(np.linalg.norm(logits - right) / np.linalg.norm(right))
