"""Opponents against the reference: our backends with every kernel set, and recorded traces.

The reference is the NumPy backend on the weights of the given model. An opponent that cannot run here is listed with
the reason and never counts as agreement.
"""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__
from ..api import Model
from ..backends import Backend, available_backends, choose_backend
from ..errors import BackendError, NumericsError, TokenizerError
from ..system.atomic import atomic_path
from .compare import Comparison, compare
from .explain.diagnose import Diagnosis, diagnose, diagnose_prompt
from .explain.replay import judge_trace
from .paths import PathCheck, check_paths
from .report import Evidence, Section, evidence, html_report
from .self_check import check_answers, is_emulated, is_shipped
from .teacher import teacher_forced
from .token_ids import Greedy, token_parity
from .trace import Trace, record_to_file

PROMPT = "Once upon a time, the little rabbit ran down the hill and said to the other rabbits"
_TOKENS = 24  # for a model without a tokenizer


@dataclass
class Crossing:
    """The comparisons of one opponent with the reference."""

    opponent: str
    comparisons: list[Comparison] = field(default_factory=list)
    unavailable: str | None = None  # why it could not run here
    failed: str | None = None  # the error that ended its run
    evidence: Evidence | None = None  # for the plots of the report
    causes: list[Diagnosis] = field(default_factory=list)  # tested causes of a difference, the confirmed ones first
    # How the engine differs from the contract by design. In `comparisons` the reference then follows the same rule.
    rule: str | None = None
    contract: Comparison | None = None  # then: with the unchanged reference
    greedy: Greedy | None = None  # of an engine that prints tokens only
    paths: list[PathCheck] = field(default_factory=list)  # of one of our backends

    @property
    def agrees(self) -> bool | None:
        """None when it could not run: neither agreement nor difference."""
        if self.unavailable is not None:
            return None
        if self.greedy is not None and not self.greedy.agrees:
            return False
        compared = bool(self.comparisons) or self.greedy is not None
        agree = all(comparison.agrees for comparison in self.comparisons) and all(check.passed for check in self.paths)
        return self.failed is None and (compared or bool(self.paths)) and agree

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
        if wrong is not None and all(comparison.agrees for comparison in self.comparisons):
            return f"DIFFERS on the execution path {wrong.path!r}: {wrong.detail}"
        if not self.comparisons:
            return f"AGREES: {len(self.paths)} execution paths" if self.paths else "nothing was compared"
        shown = next((each for each in self.comparisons if not each.agrees), self.comparisons[-1])
        confirmed = " or ".join(cause.cause for cause in self.causes if cause.confirmed)
        verdict = f"{shown.verdict}; cause: {confirmed}" if confirmed else shown.verdict
        if self.rule is None:
            return verdict
        verdict += f". Compared by its own rule: {self.rule}"
        if self.contract is None or self.contract.logits is None:
            return verdict
        logits = self.contract.logits
        return (
            f"{verdict}; against the contract max KL {logits.kl_max:.1e}, top-1 agreement {logits.top1_agreement:.1%}"
        )

    def diagnosis(self) -> list[str]:
        """One sentence for each cause that is confirmed or explains a part, or one that says that none does."""
        sentences = [str(cause) for cause in self.causes if cause.confirmed or cause.partly]
        return sentences or [f"none of {len(self.causes)} known mistakes explains the difference"] * bool(self.causes)

    def to_dict(self, describe: Callable[[Comparison], dict[str, Any]] = Comparison.to_dict) -> dict[str, Any]:
        """As plain JSON values; `describe` gives those of a comparison."""
        return {
            "opponent": self.opponent,
            "agrees": self.agrees,
            "verdict": self.verdict,
            "unavailable": self.unavailable,
            "failed": self.failed,
            "causes": [cause.to_dict() for cause in self.causes if cause.confirmed or cause.partly],
            "comparisons": [describe(comparison) for comparison in self.comparisons],
            "paths": [check.to_dict() for check in self.paths],
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
    bad = next((each for each in crossing.comparisons if not each.agrees), None)
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


def default_tokens(model: Model, prompt: str | None = None) -> list[int]:
    """The prompt's tokens; for a model without a tokenizer, ids spread over its vocabulary."""
    try:
        tokens = model.tokenizer.encode(PROMPT if prompt is None else prompt)
    except TokenizerError:
        if prompt is not None:
            raise
        step = max(1, model.config.vocab_size // _TOKENS)
        tokens = [(7 + i * step) % model.config.vocab_size for i in range(_TOKENS)]
    return tokens[: model.config.context_length]


def cross_backends(model: Model, tokens: Sequence[int], only: Iterable[str] | None = None) -> list[Crossing]:
    """Every backend, and cython with every kernel set: teacher-forced, free-running, and by every execution path.

    only: names as in the result ("cython", "cython avx2", "cupy"); None takes all.
    """
    threads = model.backend.threads
    reference = model.on(Backend("float32", threads))
    wanted = None if only is None else set(only)
    crossings = []
    with record_reference(reference, tokens) as right:
        for name, make, reason in list_backends(threads):
            if wanted is None or name in wanted:
                crossing = Crossing(name, unavailable=reason)
                if reason is None:
                    _cross_backend(crossing, make, reference, right)
                crossings.append(crossing)
    unknown = (wanted or set()) - {crossing.opponent for crossing in crossings}
    return crossings + [Crossing(name, unavailable="no backend or kernel set has this name") for name in unknown]


def list_backends(threads: int) -> Iterator[tuple[str, Callable[..., Backend], str | None]]:
    """(name, its constructor, why it cannot run here) of every opponent among our backends."""
    for name, reason in available_backends().items():
        yield name, partial(choose_backend, name, threads=threads), reason
        if name == "cython":
            from ..backends.cpu.backend import CythonBackend
            from ..backends.cpu.extension import simd_variants

            for simd, lacks in simd_variants().items():
                yield f"{name} {simd}", partial(CythonBackend, threads=threads, simd=simd), reason or lacks


def _cross_backend(crossing: Crossing, make: Callable[..., Backend], reference: Model, right: Trace) -> None:
    name, tokens = crossing.opponent, right.token_ids
    path = right.path.with_name(f"{name}.safetensors")
    try:
        if name != "numpy":  # which is the reference itself
            candidate = reference.on(make())
            crossing.comparisons.append(teacher_forced(reference, candidate, tokens))
            record_to_file(candidate, tokens, path)
            with Trace(path) as trace:
                compare_free(crossing, reference, right, trace)
        crossing.paths = check_paths(make, reference, tokens, quick=is_emulated(name))
        if is_shipped(reference):
            crossing.paths += check_answers(reference.on(make()), quick=is_emulated(name))
    except (BackendError, NumericsError) as error:
        crossing.failed = f"{type(error).__name__}: {error}"
    finally:
        path.unlink(missing_ok=True)


def cross_trace(model: Model, path: str | os.PathLike[str], *, causes: bool = True) -> Crossing:
    """A trace file against the reference: op by op on its own inputs, and as a whole against the reference's run.

    causes: look for the cause of a difference, which runs the reference once for each mistake that is tested.

    Raises FormatError for a file that is no trace.
    """
    reference = model.on(Backend("float32", model.backend.threads))
    with Trace(path) as trace:
        crossing = Crossing(trace.engine)
        outside = [i for i in trace.token_ids if i >= model.config.vocab_size]
        if outside or len(trace.token_ids) > model.config.context_length:
            limit = f"token {outside[0]} is outside the vocabulary" if outside else "more tokens than the context holds"
            crossing.failed = f"{limit}: is this trace of another model?"
            return crossing
        if (difference := _token_difference(model, trace)) is not None:
            crossing.failed, crossing.causes = f"the tokens are not the same: {difference[0]}", difference[1]
            return crossing
        by_op = judge_trace(reference, trace)
        if by_op.ops:  # a trace of logits alone has no op that can be judged on its own
            crossing.comparisons.append(by_op)
        with record_reference(reference, trace.token_ids) as right:
            compare_free(crossing, reference, right, trace, causes=causes)
    return crossing


@contextmanager
def record_reference(reference: Model, tokens: Sequence[int]) -> Iterator[Trace]:
    """The reference's run, in a temporary file."""
    with tempfile.TemporaryDirectory(prefix="bitnet-ref-crossval-") as folder:
        path = Path(folder) / "reference.safetensors"
        record_to_file(reference, tokens, path)
        with Trace(path) as trace:
            yield trace


def compare_free(crossing: Crossing, reference: Model, right: Trace, trace: Trace, *, causes: bool = True) -> None:
    """Add the free-running comparison of a trace with the reference's, its evidence, and the causes of a difference."""
    free = compare(right, trace, reference.config)
    crossing.comparisons.append(free)
    crossing.evidence = evidence(right, trace, free)
    if causes:
        crossing.causes = diagnose(reference, trace.token_ids, trace, free)


def _token_difference(model: Model, trace: Trace) -> tuple[str, list[Diagnosis]] | None:
    """How a trace's tokens differ from this tokenizer's for its prompt, and why. None: they are the same, or unknown.

    The prompt may be a text or a user's message, which the engine put into the model's chat template.
    """
    if trace.prompt is None:
        return None
    try:
        mine = model.tokenizer.encode(trace.prompt)
    except TokenizerError:
        return None
    if (problem := token_parity(mine, trace.token_ids, model.config)) is None:
        return None
    if trace.token_ids == _as_message(model, trace.prompt):
        return None
    return problem, diagnose_prompt(model, mine, trace.token_ids, trace.prompt)


def _as_message(model: Model, text: str) -> list[int] | None:
    """The ids of a conversation that begins with this message; None if the model has no chat template."""
    try:
        return model.tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=True)
    except TokenizerError:
        return None


def write_html(path: str | os.PathLike[str], title: str, crossings: Sequence[Crossing], facts: dict[str, str]) -> None:
    """Write one HTML report of all crossings."""
    sections = [Section(c.opponent, c.verdict, c.agrees, c.comparisons, c.evidence, c.diagnosis()) for c in crossings]
    about = {"bitnet_ref": __version__, "NumPy": np.__version__, "machine": platform.platform(), **facts}
    with atomic_path(path) as temporary:
        temporary.write_text(html_report(title, sections, about), encoding="utf-8")
