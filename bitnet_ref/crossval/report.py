"""The comparisons of an opponent with the reference: their verdict, and all of them as one HTML file.

The file has no script, takes nothing from the network, and its plots are inline SVG. `evidence` selects the values that
they show: some logits of both sides, and a patch of the first tensor that differs with the right one.
"""

from __future__ import annotations

import html
import math
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import __version__
from ..errors import printable
from ..reference.layers import Array
from ..system.atomic import atomic_path
from . import svg
from .compare import DIFFERS, FLIP, Comparison, OpResult, View, all_agree
from .explain.diagnose import Diagnoses
from .metrics import tensor_of
from .misnamed import Meant, in_words
from .names import LOGITS
from .paths import LOADS, PathCheck
from .token_ids import Greedy
from .types import StrPath, Tensors

_LOGIT_POINTS = 1500
_PATCH = (32, 48)  # rows and columns of a heat map


@dataclass
class Evidence:
    """A few values for the plots."""

    logits: NDArray[np.float32] | None = None  # (points, 2): reference, candidate
    name: str | None = None  # of the tensor below
    reference: NDArray[np.float32] | None = None  # a patch around the largest error
    candidate: NDArray[np.float32] | None = None
    corner: tuple[int, int] = (0, 0)  # of the patch, in the tensor flattened to two axes


def comparison_row(comparison: Comparison) -> PathCheck:
    """The comparison as one row among those of execution paths."""
    detail = comparison.verdict.removeprefix(f"AGREES, {comparison.mode}: ")
    return PathCheck(comparison.mode, comparison.agrees, 0, detail)


@dataclass
class FurtherRun:
    """Another run of the same engine: in several calls, of several sequences.

    same_as_short: whether its tensors are those of the short run, of the same tokens; None where the tokens are others.
    """

    name: str  # of `runs.RUNS`
    tokens: int
    words: str  # its calls or sequences
    comparisons: list[Comparison] = field(default_factory=list)
    unavailable: str | None = None
    failed: str | None = None
    same_as_short: bool | None = None
    place: str = ""  # the sequences that are wrong
    misnamed: dict[str, Meant] = field(default_factory=dict)  # as of a crossing

    @property
    def agrees(self) -> bool | None:
        """None where it could not run, or cannot be told."""
        if self.unavailable is not None:
            return None
        return False if self.failed is not None or not self.comparisons else all_agree(self.comparisons)

    @property
    def verdict(self) -> str:
        """One line."""
        if self.unavailable is not None:
            return f"not available: {self.unavailable}"
        if self.failed is not None:
            return f"FAILED: {self.failed}"
        shown = next((each for each in self.comparisons if not each.agrees), self.comparisons[-1])
        return f"{self.place}{shown.verdict}"

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        facts = {"run": self.name, "tokens": self.tokens, "calls": self.words, "same_as_short": self.same_as_short}
        return {**facts, "agrees": self.agrees, "verdict": self.verdict}


@dataclass
class Crossing:
    """The comparisons of one opponent with the reference."""

    opponent: str
    comparisons: list[Comparison] = field(default_factory=list)
    unavailable: str | None = None  # why it could not run here
    failed: str | None = None  # the error that ended its run
    evidence: Evidence | None = None  # for the plots of the report
    long: list[Comparison] = field(default_factory=list)  # of a run of hundreds of tokens, with a few of its tensors
    further: list[FurtherRun] = field(default_factory=list)  # in several calls, of several sequences
    causes: Diagnoses = field(default_factory=Diagnoses)  # tested causes of a difference, the confirmed ones first
    # How the engine differs from the contract by design. In `comparisons` the reference then follows the same rule.
    rule: str | None = None
    contract: Comparison | None = None  # then: with the unchanged reference
    greedy: Greedy | None = None  # of an engine that prints tokens only
    paths: list[PathCheck] = field(default_factory=list)  # of one of our backends
    worked: str = ""  # of the first wrong op: the reference's line, and one value of it worked through
    other_tokens: str | None = None  # the ids that a trace should have run on, and those that its embedding shows
    misnamed: dict[str, Meant] = field(default_factory=dict)  # tensors of a trace that hold another one's numbers
    wrong_file: Path | None = None  # of several traces the first that differs, of which causes are looked for
    by_length: str = ""  # where only long calls are wrong
    file_name: str = ""  # of several traces: of which this is
    sequence: int = 0  # which sequence of a trace this is of, and how many it has; which of them differ
    sequences: int = 1
    wrong_sequences: tuple[int, ...] = ()
    strict: bool = False  # tensors that are missing or have unknown names are no agreement

    @property
    def every(self) -> list[Comparison]:
        """The comparisons of the short run and of the long one."""
        return [*self.comparisons, *self.long]

    @property
    def misnamed_in_words(self) -> list[str]:
        """The sentences of `gaps` about tensors that hold another one's numbers, in any of the runs."""
        of_further = [f"{run.name}: {sentence}" for run in self.further for sentence in in_words(run.misnamed)]
        return in_words(self.misnamed) + of_further

    @property
    def gaps(self) -> list[str]:
        """What is wrong with a trace's names, and what the comparison of the whole run left out: names that no run has,
        tensors that were not recorded."""
        of_runs = [gap for each in self.comparisons if each.mode == "free-running" for gap in each.gaps]
        return self.misnamed_in_words + of_runs

    @property
    def checks(self) -> list[PathCheck]:
        """A row for each comparison, each execution path, and the error that ended the run."""
        failure = [] if self.failed is None else [PathCheck(LOADS, False, 0, self.failed)]
        return [comparison_row(each) for each in self.every] + self.paths + failure

    @property
    def agrees(self) -> bool | None:
        """None when it could not run, or cannot be told from logits alone: neither agreement nor difference."""
        if self.unavailable is not None:
            return None
        if (self.greedy is not None and not self.greedy.agrees) or self.other_tokens or (self.strict and self.gaps):
            return False
        compared = bool(self.comparisons) or self.greedy is not None
        passed = all(check.passed for check in self.paths) and all(each.agrees is not False for each in self.further)
        if self.failed is not None or not passed or not (compared or self.paths):
            return False
        return all_agree(self.every)

    @property
    def runs(self) -> list[FurtherRun]:
        """Every run: the short one, the long one, and those in several calls or of several sequences."""
        runs = [FurtherRun("short", each.tokens, "one call", self.comparisons) for each in self.comparisons[-1:]]
        runs += [FurtherRun("long", each.tokens, "one call", self.long) for each in self.long[-1:]]
        return runs + self.further

    @property
    def _of_further(self) -> str:
        """What the further runs add to the verdict: which of prefill and decoding is wrong, or that all agree."""
        wrong = [each for each in self.further if each.agrees is False]
        parts = []
        short = all(each.agrees for each in self.comparisons)
        for each in wrong[:1]:
            others = [other.name for other in wrong[1:]]
            also = f"; so does {', '.join(others)}" if others else ""
            if each.same_as_short is False:
                which = "in one call it agrees" if short else "in one call it differs too, in another way"
                differs = each.verdict.removeprefix("DIFFERS, ")
                parts.append(f"{each.name} ({each.words}) DIFFERS, {which}: {differs}{also}")
            elif each.same_as_short:
                parts.append(f"{each.name} ({each.words}) has the same tensors as one call")
            else:
                parts.append(f"{each.name} ({each.words}): {each.verdict}{also}")
        if right := [each for each in self.further if each.agrees]:
            parts.append(f"{', '.join(each.name for each in right)}: AGREES")
        parts += [f"{each.name} not available: {each.unavailable}" for each in self.further if each.unavailable]
        return "; ".join(parts)

    @property
    def verdict(self) -> str:
        """One line; of the first comparison that differs, if one does."""
        if self.unavailable is not None:
            return f"not available: {self.unavailable}"
        if self.failed is not None:
            return f"FAILED: {self.failed}"
        if self.greedy is not None:
            return self.greedy.verdict
        wrong = next((check for check in self.paths if not check.passed), None)
        if wrong is not None and all(comparison.agrees for comparison in self.every):
            return f"DIFFERS on the execution path {wrong.path!r}: {wrong.detail}"
        if not self.comparisons:
            return f"AGREES: {len(self.paths)} execution paths" if self.paths else "nothing was compared"
        shown = next((each for each in self.every if not each.agrees), self.comparisons[-1])
        confirmed = " or ".join(cause.cause for cause in self.causes if cause.confirmed)
        verdict = f"{shown.verdict}; cause: {confirmed}" if confirmed else shown.verdict
        if self.sequences > 1:
            numbers = ", ".join(str(i + 1) for i in self.wrong_sequences)
            only = "only in sequence" if len(self.wrong_sequences) == 1 else "in sequences"
            place = f"{only} {numbers} of {self.sequences}: " if numbers else ""
            verdict = f"{place}{verdict}" if numbers else f"{verdict}; {self.sequences} sequences"
        if not shown.agrees and shown not in self.comparisons:
            verdict = f"with {shown.tokens} tokens: {verdict}"
        elif shown.agrees and self.long:
            verdict += f"; with {self.long[-1].tokens} tokens: {self.long[-1].verdict}"
        if self.file_name:
            verdict = f"{self.file_name}: {verdict}"
        if self.by_length:
            verdict = f"{self.by_length}: {verdict}"
        if further := self._of_further:
            first = shown.agrees and any(each.agrees is False for each in self.further)
            verdict = f"DIFFERS: {further}. The short run: {verdict}" if first else f"{verdict}; {further}"
        if self.other_tokens is not None:
            then = "" if "?" in self.other_tokens else f". On these: {verdict}"
            return f"DIFFERS: the engine ran on other tokens, as its hook_embed shows: {self.other_tokens}{then}"
        if shown.agrees and self.strict and self.gaps:
            verdict = f"INCOMPLETE: {'; '.join(self.gaps)}. The others: {verdict}"
        if self.rule is None:
            return verdict
        verdict += f". Compared by its own rule: {self.rule}"
        if self.contract is None or self.contract.logits is None:
            return verdict
        logits = self.contract.logits
        figures = f"max KL {logits.kl_max:.1e}, top-1 agreement {logits.top1_agreement:.1%}"
        return f"{verdict}; against the contract {figures}"

    def diagnosis(self) -> list[str]:
        """One sentence for each cause that is confirmed or explains a part, or one that says that none does.

        What is a part of a confirmed cause is not repeated.
        """
        told = "; ".join(cause.cause for cause in self.causes if cause.confirmed)
        parts = [cause for cause in self.causes if cause.partly and cause.cause not in told]
        sentences = [str(cause) for cause in self.causes if cause.confirmed or cause in parts or cause.possible]
        if self.causes and not sentences:
            sentences = [f"none of the {len(self.causes)} mistakes that were tested explains the difference"]
            first = next((each for each in self.comparisons if each.first_divergence is not None), None)
            if first is not None and first.record_next:
                total = len(first.missing_between)
                words = f"record next, of the {total} tensors before the first that differs: "
                sentences.append(words + ", ".join(first.record_next))
        if self.causes.recording:
            sentences.append(self.causes.recording)
        if stopped := self.causes.stopped:
            untested = self.causes.untested or "later ones"  # a kind is counted when its turn comes
            sentences.append(f"the search for causes ended early, {stopped}: {untested} are not tested")
        if failed := self.causes.failed:
            named = "; ".join(f"{cause} ({error})" for cause, error in failed.items())
            sentences.append(f"not tested, as the reference cannot be run so on this model: {named}")
        next_ones = [f"{cause.cause}: record {cause.record_next} next" for cause in self.causes if cause.record_next]
        return sentences + next_ones

    def examples(self) -> list[str]:
        """Values worked through: of the causes that were found, or of the first wrong op."""
        shown = [cause.example for cause in self.causes if cause.example and (cause.confirmed or cause.partly)]
        return list(dict.fromkeys(shown)) or [self.worked] * bool(self.worked)

    def _repr_html_(self) -> str:
        """For notebooks: its part of the page that `write_html` writes."""
        return _section("crossing", self)

    def to_dict(self, describe: Callable[[Comparison], dict[str, Any]] = Comparison.to_dict) -> dict[str, Any]:
        """As plain JSON values; `describe` gives those of a comparison."""
        return {
            "opponent": self.opponent,
            "agrees": self.agrees,
            "verdict": self.verdict,
            "unavailable": self.unavailable,
            "failed": self.failed,
            "gaps": self.gaps,
            "other_tokens": self.other_tokens,
            "diagnosis": self.diagnosis(),
            "examples": self.examples(),
            "untested": dict(self.causes.failed),
            "causes": [c.to_dict() for c in self.causes if c.confirmed or c.partly or c.possible],
            "comparisons": [describe(comparison) for comparison in self.comparisons],
            "long": [describe(comparison) for comparison in self.long],
            "runs": [each.to_dict() for each in self.runs],
            "paths": [asdict(check) for check in self.paths],
            "rule": self.rule,
            "contract": None if self.contract is None else describe(self.contract),
            "greedy": None if self.greedy is None else self.greedy.to_dict(),
        }


def summarize(crossing: Crossing) -> str:
    """A verdict in a word or two, with the largest KL of the softmax to the reference's, in nats.

    "equal": bit for bit.   "agrees": within float rounding.   A star: by a rule of its own, which the notes state.
    """
    if crossing.failed is not None:
        return "FAILED"
    further = [comparison for each in crossing.further for comparison in each.comparisons]
    bad = next((each for each in (*crossing.every, *further) if not each.agrees), None)
    if bad is not None and bad.undecided:
        return "cannot tell"
    if bad is not None:
        first = bad.first_divergence
        return f"**DIFFERS**: {bad.problem if first is None else first.name}"
    if not crossing.agrees:
        return "**DIFFERS**: " + next(check.path for check in crossing.paths if not check.passed)
    if not crossing.comparisons:
        return "agrees"
    free = crossing.comparisons[-1]
    if all(op.equal for op in free.ops):
        return "equal"
    kl = "" if free.logits is None else f", KL {max(free.logits.kl_max, 0.0):.0e}"
    flips = f", {free.n_flips} flips" if free.n_flips else ""
    if crossing.rule is None:
        return f"agrees{flips}{kl}"
    if crossing.contract is None or crossing.contract.logits is None:
        return f"inexact*{kl}"
    return f"explained*{kl}; without the rule {crossing.contract.logits.kl_max:.0e}"


def evidence(reference: Tensors, candidate: Tensors, comparison: Comparison) -> Evidence:
    """The values for the plots of a comparison of these two runs. Reads a few rows of at most two tensors."""
    out, candidate = Evidence(), View(candidate)
    op = next((op for op in comparison.ops if op.name == LOGITS), None)
    both = [tensor_of(run, LOGITS) for run in (reference, candidate)] if op is not None else []
    if both and both[0].shape == both[1].shape:
        last = [logits[-8:].astype(np.float32).reshape(-1) for logits in both]  # tokens with the longest context
        out.logits = np.stack(last, axis=-1)[:: max(1, last[0].size // _LOGIT_POINTS)]
    bad = comparison.first_divergence
    if bad is None or bad.worst is None or bad.name not in reference or bad.name not in candidate:
        return out
    shape = tensor_of(reference, bad.name).shape
    if bad.shape != shape or not bad.n_values:
        return out
    with np.errstate(all="ignore"):
        mine: Array = np.asarray(reference[bad.name], dtype=np.float32)
        theirs: Array = np.asarray(candidate[bad.name], dtype=np.float32).reshape(shape)
    if len(shape) == 3 and bad.kind.startswith("attention") and bad.kind != "attention values":
        mine, theirs, at = mine[bad.worst[0]], theirs[bad.worst[0]], bad.worst[1:]  # the head with the largest error
    else:
        mine, theirs = mine.reshape(shape[0], -1), theirs.reshape(shape[0], -1)
        at = (bad.worst[0], int(np.ravel_multi_index(bad.worst[1:], shape[1:])) if len(shape) > 1 else 0)
    top, left = (max(0, min(a - n // 2, size - n)) for a, n, size in zip(at, _PATCH, mine.shape, strict=True))
    patch = slice(top, top + _PATCH[0]), slice(left, left + _PATCH[1])
    out.name, out.corner, out.reference, out.candidate = bad.name, (top, left), mine[patch], theirs[patch]
    return out


def write_html(path: StrPath, title: str, crossings: Sequence[Crossing], facts: dict[str, str]) -> None:
    """Write all crossings as one page. facts: rows of the table under its title, besides versions and machine."""
    about = {"bitnet_ref": __version__, "NumPy": np.__version__, "machine": platform.platform(), **facts}
    rows = "".join(f"<tr><th>{_e(key)}</th><td>{_e(value)}</td></tr>" for key, value in about.items())
    overview = "".join(
        f'<tr><td><a href="#s{i}">{_e(c.opponent)}</a></td>'
        f'<td class="{_class(c.agrees)}">{_sentence(c.verdict)}</td></tr>'
        for i, c in enumerate(crossings)
    )
    body = "".join(_section(f"s{i}", crossing) for i, crossing in enumerate(crossings))
    page = html_page(title, _STYLE, f"<table>{rows}</table><h2>Verdicts</h2><table>{overview}</table>{body}")
    with atomic_path(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def html_page(title: str, style: str, body: str) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_e(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{style}</style></head><body><h1>{_e(title)}</h1>{body}</body></html>\n"
    )


_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#1b1f24;background:#fff}
table{border-collapse:collapse;margin:.6em 0}td,th{padding:.15em .8em .15em 0;text-align:left;vertical-align:top}
th{font-weight:600;color:#57606a}td.n{text-align:right;font-variant-numeric:tabular-nums}
.ok{color:#1a7f37}.bad{color:#cf222e;font-weight:600}.none,.flip{color:#9a6700}figure{margin:1em 0}
figcaption{color:#57606a}svg{max-width:100%;height:auto}h2{border-bottom:1px solid #d0d7de;margin-top:2em}
details{margin:.8em 0}.scroll{overflow-x:auto}
"""


_WHOLE = "style='white-space:nowrap'"  # also in notebooks, without the style sheet
_BY_DEPTH = (
    "Divergence by depth: relative L2 of each tensor, in the order of the computation. Vertical lines are layers. "
    "Equal tensors lie on the bottom line."
)
_BY_KIND = "By kind of op: smallest, median and largest relative L2 of the tensors that are not equal."


def _section(anchor: str, c: Crossing) -> str:
    parts = [f'<h2 id="{anchor}">{_e(c.opponent)}</h2><p class="{_class(c.agrees)}">{_sentence(c.verdict)}</p>']
    parts += [f"<p>{_sentence(gap)}</p>" for gap in c.gaps]
    if causes := c.diagnosis():
        parts.append(f"<h3>Diagnosis</h3><ul>{''.join(f'<li>{_sentence(cause)}</li>' for cause in causes)}</ul>")
    parts += [f"<pre>{_e(text)}</pre>" for text in c.examples()]
    for run in c.further:
        parts.append(f"<p><b>{_e(run.name)}</b> ({_e(run.words)}): {_sentence(run.verdict)}</p>")
    for comparison in c.every:
        parts.append(f"<h3>{_e(comparison.mode.capitalize())}, {comparison.tokens} tokens</h3>")
        parts.append(f"<p>{_sentence(comparison.verdict)}</p>")
        if not comparison.ops:
            continue
        ops = comparison.ops
        points = [(i, op.relative_l2, _mark(op), op.name) for i, op in enumerate(ops)]
        starts = [i for i, op in enumerate(ops) if op.layer is not None and (i == 0 or ops[i - 1].layer != op.layer)]
        parts.append(_figure(svg.by_depth(points, starts), _BY_DEPTH))
        parts.append(_figure(svg.error_bars(_by_kind(ops)), _BY_KIND))
        parts += [_flips(comparison), _table(ops)]
    shown = c.evidence or Evidence()
    if shown.logits is not None:
        caption = "Logits of the last tokens: reference on the x axis, candidate on the y axis."
        parts.append(_figure(svg.scatter(shown.logits), caption))
    if shown.reference is not None and shown.candidate is not None:
        caption = f"The first tensor that differs, {shown.name}: reference, candidate, and their difference."
        parts.append(_figure(svg.heat_maps(shown.reference, shown.candidate, shown.corner), caption))
    return "".join(parts)


def _by_kind(ops: Sequence[OpResult]) -> list[tuple[str, int, int, list[float]]]:
    """(kind, number of tensors, number that are unequal, their relative L2 sorted) of each kind of op"""
    kinds: dict[str, list[OpResult]] = {}
    for op in ops:
        kinds.setdefault(op.kind, []).append(op)
    out = []
    for kind, members in kinds.items():
        errors = sorted(op.relative_l2 for op in members if not op.equal and math.isfinite(op.relative_l2))
        out.append((kind, len(members), sum(not op.equal for op in members), errors))
    return out


def _flips(comparison: Comparison) -> str:
    if not comparison.n_flips:
        return ""
    shown = "".join(f"<li>{_sentence(str(flip))}</li>" for flip in comparison.flips[:20])
    return f"<details><summary>{comparison.n_flips} rounding flips, expected</summary><ol>{shown}</ol></details>"


def _table(ops: Sequence[OpResult]) -> str:
    columns = ("tensor", "kind", "status", "differ", "of", "max abs", "rel. L2", "cosine", "scale ratio", "note")
    head = "".join(f"<th>{name}</th>" for name in columns)
    rows = []
    for op in ops:
        figures = [f"{op.n_differ:,}", f"{op.n_values:,}", f"{op.max_abs:.3g}", f"{op.relative_l2:.2g}"]
        figures += [f"{op.cosine:.7f}", f"{op.scale_ratio:.7f}"]
        cells = "".join(f'<td class="n">{value}</td>' for value in figures)
        status = f'<td class="{_mark(op)}">{_e(op.status)}</td>'
        rows.append(f"<tr><td>{_e(op.name)}</td><td>{_e(op.kind)}</td>{status}{cells}<td>{_e(op.note)}</td></tr>")
    table = f'<div class="scroll"><table {_WHOLE}><tr>{head}</tr>{"".join(rows)}</table></div>'
    return f"<details><summary>All {len(ops)} tensors</summary>{table}</details>"


def _figure(picture: str, caption: str) -> str:
    return f"<figure>{picture}<figcaption>{_e(caption)}</figcaption></figure>"


def _mark(op: OpResult) -> str:
    return {DIFFERS: "bad", FLIP: "flip"}.get(op.status, "ok")


def _class(agrees: bool | None) -> str:
    return "none" if agrees is None else "ok" if agrees else "bad"


def _e(text: Any) -> str:
    return html.escape(printable(str(text)))


def _sentence(text: str) -> str:
    """Prose whose numbers (1.7e-05) and names are not broken at a hyphen or slash at the end of a line."""
    return re.sub(r"\S*\w[-/]\w\S*", rf"<span {_WHOLE}>\g<0></span>", _e(text))
