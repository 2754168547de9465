"""Opponents against the reference: our backends with every kernel set, and recorded traces.

The reference is the NumPy backend on the weights of the given model. An opponent that cannot run here is listed with
the reason and never counts as agreement.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path

from ..api import Model
from ..backends import Backend, available_backends, choose_backend
from ..backends.record import NamesFilter
from ..errors import BackendError, FormatError, NumericsError, TokenizerError
from .calls import sizes_in_words
from .compare import View, compare
from .explain.describe import work_through
from .explain.diagnose import Diagnoses, Diagnosis, Progress, diagnose, diagnose_prompt
from .explain.hypotheses.prompts import ids_as_message
from .explain.near_halves import follow_flips
from .explain.replay import judge_trace
from .explain.variants import IMPOSSIBLE, Setting
from .misnamed import misnamed, under_right_names
from .paths import OnCheck, check_long, check_paths, ignore_check
from .report import Crossing, FurtherRun, comparison_row, evidence
from .runs import FEW_NAMES, RUNS
from .self_check import check_answers, is_emulated, is_shipped
from .teacher import teacher_forced
from .token_ids import beside, token_parity, used_ids
from .trace import Trace, TraceRun, record_to_file
from .types import StrPath, Tokens

PROMPT = "Once upon a time, the little rabbit ran down the hill and said to the other rabbits"
_TOKENS = 24  # for a model without a tokenizer


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


def reference_of(model: Model) -> Model:
    """The model on NumPy in float32, whatever backend it was loaded for."""
    return model.on(Backend("float32", model.backend.threads))


def cross_backends(
    model: Model,
    tokens: Tokens,
    only: Iterable[str] | None = None,
    *,
    long: Tokens | None = None,
    on_check: OnCheck = ignore_check,
) -> list[Crossing]:
    """Every backend, and cython with every kernel set: teacher-forced, free-running, and by every execution path.

    only: names as in the result ("cython", "cython avx2", "cupy"); None takes all.
    long: a longer run, as of `long_tokens`. Its logits at all tokens and each block's result are compared.
    on_check: called with each comparison and each check of a path when it is done.
    """
    reference = reference_of(model)
    wanted = None if only is None else set(only)
    crossings = []
    with ExitStack() as stack:
        right = stack.enter_context(record_reference(reference, tokens))
        right_long = None if long is None else stack.enter_context(record_reference(reference, long, FEW_NAMES))
        for name, make, reason in list_backends(model.backend.threads):
            if wanted is None or name in wanted:
                crossing = Crossing(name, unavailable=reason)
                if reason is None:
                    _cross_backend(crossing, make, reference, right, right_long, on_check)
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


def _cross_backend(
    crossing: Crossing,
    make: Callable[..., Backend],
    reference: Model,
    right: Trace,
    right_long: Trace | None,
    on_check: OnCheck = ignore_check,
) -> None:
    name, tokens = crossing.opponent, right.token_ids
    quick = is_emulated(name)
    path = right.path.with_name(f"{name}.safetensors")
    try:
        if name != "numpy":  # which is the reference itself
            candidate = reference.on(make())
            crossing.comparisons.append(teacher_forced(reference, candidate, tokens))
            on_check(name, crossing.checks[-1])
            record_to_file(candidate, tokens, path)
            with Trace(path) as trace:
                compare_free(crossing, reference, right, trace)
            on_check(name, crossing.checks[-1])
            if right_long is not None and not quick:  # hundreds of tokens take an emulated card minutes
                logits = record_to_file(candidate, right_long.token_ids, path, FEW_NAMES)
                with Trace(path) as trace:
                    long = follow_flips(reference, trace.token_ids, trace, compare(right_long, trace, reference.config))
                long.missing = []  # few tensors are recorded
                crossing.long.append(long)
                on_check(name, comparison_row(crossing.long[-1]))
                crossing.paths.append(check_long(candidate, right_long.token_ids, logits))
                on_check(name, crossing.paths[-1])
        rows = check_paths(make, reference, tokens, quick=quick)
        if is_shipped(reference):
            rows = chain(rows, check_answers(reference.on(make()), quick=quick))
        for row in rows:
            crossing.paths.append(row)
            on_check(name, row)
    except (BackendError, NumericsError) as error:
        crossing.failed = f"{type(error).__name__}: {error}"
        on_check(name, crossing.checks[-1])
    finally:
        path.unlink(missing_ok=True)


def cross_trace(model: Model, path: StrPath, *, causes: bool = True, strict: bool = False) -> Crossing:
    """A trace file against the reference: op by op on its own inputs, and as a whole against the reference's run.

    If its embedding's rows show that the engine ran on other tokens than it says, it is compared on those. Of several
    sequences each is compared by itself, and the first that differs is shown.
    causes: look for the cause of a difference, as `explain_trace` does.   strict: names that no run has, and tensors
    that are not recorded, are no agreement.
    Raises FormatError for a file that is no trace.
    """
    reference = reference_of(model)
    with Trace(path) as trace:
        crossings = [_cross_run(model, reference, run, strict) for run in trace.runs()]
    crossing = crossings[wrong := _first_wrong(crossings)]
    if len(crossings) > 1:
        crossing.sequence = wrong
        crossing.wrong_sequences = tuple(i for i, each in enumerate(crossings) if each.agrees is False)
        crossing.sequences = len(crossings)
    if causes:
        explain_trace(crossing, model, path)
    return crossing


def trace_files(given: Sequence[Path]) -> list[Path]:
    """The trace files of these paths, those of a folder in the order of `RUNS`. FormatError for an empty folder."""
    files: list[Path] = []
    order = {f"{name}.safetensors": i for i, name in enumerate(RUNS)}
    for path in given:
        inside = sorted(path.glob("*.safetensors"), key=lambda file: (order.get(file.name, len(order)), file.name))
        if path.is_dir() and not inside:
            raise FormatError("no trace is in this folder: no file ends in .safetensors", path=path)
        if path.suffix in (".gguf", ".onnx"):
            hint = f"; a GGUF is compared by bitnet-ref crossval llama-cpp {path}" * (path.suffix == ".gguf")
            raise FormatError(f"this is a model, not a trace{hint}", path=path)
        files += inside if path.is_dir() else [path]
    return files


def cross_traces(model: Model, paths: Sequence[Path], *, strict: bool = False) -> Crossing:
    """Several traces of one engine with one verdict: that of the first, and the others as further runs of it.

    If the first agrees and another does not, the crossing is of that one (`wrong_file`), whose causes are looked for.
    """
    crossings = [cross_trace(model, path, causes=False, strict=strict) for path in paths]
    if len(paths) == 1:
        return crossings[0]
    ids, words, longest = zip(*map(_facts_of, paths), strict=True)
    crossing = crossings[wrong := _first_wrong(crossings)]
    crossing.wrong_file, crossing.file_name = paths[wrong], paths[wrong].stem
    for i, (path, each) in enumerate(zip(paths, crossings, strict=True)):
        if i == wrong:
            continue
        run = FurtherRun(path.stem, len(ids[i]), words[i], each.comparisons, failed=each.failed)
        run.misnamed = each.misnamed
        if not crossing.agrees and each.agrees and ids[i] == ids[wrong]:
            run.same_as_short = False
        crossing.further.append(run)
    right = [longest[i] for i, each in enumerate(crossings) if each.agrees]
    bad = [longest[i] for i, each in enumerate(crossings) if each.agrees is False]
    if right and bad and max(right) < min(bad):
        crossing.by_length = f"right for calls of up to {max(right)} tokens, wrong for {min(bad)}"
    return crossing


def _first_wrong(crossings: Sequence[Crossing]) -> int:
    """The index of the first that differs; if none does, of the first that does not agree, or of the first."""
    verdicts = [crossing.agrees for crossing in crossings]
    return next((verdicts.index(verdict) for verdict in (False, None) if verdict in verdicts), 0)


def _facts_of(path: Path) -> tuple[list[int], str, int]:
    """(tokens, calls in words, the longest call) of a trace."""
    with Trace(path) as trace:
        sizes = [size for calls in trace.sequence_calls for size in calls]
        words = sizes_in_words(trace.calls or (len(trace.token_ids),))
        if len(trace.sequences) > 1:
            words = f"sequences of {' and '.join(map(str, trace.sequences))} tokens"
        return trace.token_ids, words, max(sizes, default=max(trace.sequences))


def _cross_run(model: Model, reference: Model, trace: TraceRun, strict: bool) -> Crossing:
    """One sequence of a trace."""
    crossing = Crossing(trace.engine, strict=strict)
    outside = [i for i in trace.token_ids if i >= model.config.vocab_size]
    if outside or len(trace.token_ids) > model.config.context_length:
        limit = f"token {outside[0]} is outside the vocabulary" if outside else "more tokens than the context holds"
        crossing.failed = f"{limit}: is this trace of another model?"
        return crossing
    run = _actual_run(crossing, reference, trace)
    if (difference := _token_difference(model, run)) is not None:
        crossing.failed = f"the tokens are not the same: {difference[0]}"
        crossing.causes = Diagnoses(difference[1])
        return crossing
    with record_reference(reference, run.token_ids) as right:
        compare_free(crossing, reference, right, run, causes=False)
        if names := misnamed(right, run, crossing.comparisons[-1]):
            crossing.misnamed, run = names, under_right_names(run, names)
            crossing.comparisons.clear()
            compare_free(crossing, reference, right, run, causes=False)
    by_op = judge_trace(reference, run)
    if by_op.ops:  # a trace of logits alone has no op that can be judged on its own
        crossing.comparisons.insert(0, by_op)
    return crossing


def explain_trace(
    crossing: Crossing, model: Model, path: StrPath, *, progress: Progress | None = None, budget_s: float | None = None
) -> None:
    """Look for the causes of the difference of a trace's `crossing`, which runs the reference once for each test.

    progress: called before each test.   budget_s: of processor time: then the search ends with what is known.
    """
    if crossing.failed is not None or not crossing.comparisons:
        return
    started = time.process_time()
    reference = reference_of(model)
    with Trace(path) as whole:
        trace = whole.runs()[crossing.sequence]
        run = under_right_names(_actual_run(crossing, reference, trace), crossing.misnamed)
        free = crossing.comparisons[-1]
        if not free.agrees and free.problem is None:
            with suppress(*IMPOSSIBLE):  # it only illustrates the verdict
                bad = next(each.first_divergence for each in crossing.comparisons if each.first_divergence is not None)
                crossing.worked = work_through(Setting.of(reference, run.token_ids, run), run, bad.name)
        left_s = None if budget_s is None else budget_s - (time.process_time() - started)
        causes = diagnose(reference, run.token_ids, run, free, progress=progress, budget_s=left_s)
        if crossing.other_tokens is not None:
            prompt = diagnose_prompt(model, trace.token_ids, run.token_ids, trace.prompt)
            causes[:0] = [cause for cause in prompt if cause.confirmed]
        crossing.causes = causes


def _actual_run(crossing: Crossing, reference: Model, trace: TraceRun) -> View:
    """The trace with the tokens that its engine ran on, if its embedding tells them; they are noted in `crossing`."""
    run, ids = View(trace), trace.token_ids
    used = used_ids(reference, trace["hook_embed"], ids) or [] if "hook_embed" in trace else []
    known = [token for token in used if token is not None]
    fits = len(used) == len(ids) and all(u in (None, i) for u, i in zip(used, ids, strict=True))
    if not known or fits:
        return run
    crossing.other_tokens = beside(ids, used)
    if len(known) == len(used) <= reference.config.context_length:
        run.token_ids = known
    return run


@contextmanager
def record_reference(reference: Model, tokens: Tokens, names: NamesFilter = None) -> Iterator[Trace]:
    """The reference's run, or its tensors of these names, in a temporary file."""
    with tempfile.TemporaryDirectory(prefix="bitnet-ref-crossval-") as folder:
        path = Path(folder) / "reference.safetensors"
        record_to_file(reference, tokens, path, names)
        with Trace(path) as trace:
            yield trace


def compare_free(
    crossing: Crossing, reference: Model, right: Trace, trace: TraceRun | View, *, causes: bool = True
) -> None:
    """Add the free-running comparison of a trace with the reference's, its evidence, and the causes of a difference."""
    free = follow_flips(reference, trace.token_ids, trace, compare(right, trace, reference.config))
    crossing.comparisons.append(free)
    crossing.evidence = evidence(right, trace, free)
    if causes:
        crossing.causes = diagnose(reference, trace.token_ids, trace, free)


def _token_difference(model: Model, trace: View) -> tuple[str, list[Diagnosis]] | None:
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
    if trace.token_ids == ids_as_message(model, trace.prompt):
        return None
    causes = diagnose_prompt(model, mine, trace.token_ids, trace.prompt)
    return f"{problem}; {beside(mine, trace.token_ids)}", causes
