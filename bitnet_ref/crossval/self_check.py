"""The self-check of an installation: every backend on the shipped model, by every execution path, and its known
answers.

`paths.py` compares the paths with each other and with the reference. That cannot notice a mistake in code that the
reference shares with them (RoPE tables, sampling, tokenizer), so the shipped model comes with answers: logits and
greedy texts of Hugging Face transformers, and seeded texts for the rules on logits (`scripts/make_answers.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ..api import Model, load
from ..backends import available_backends, choose_backend
from ..errors import BackendError
from ..formats.open import ASSETS
from ..reference.cache import TokenBatch
from ..system.threads import thread_choice
from .paths import LOADS, QUICK_TOKENS, Checks, OnCheck, Outcome, PathCheck, check_paths, ignore_check, run_checks
from .tolerances import LOGITS_FLOOR
from .training_step import TRAINING_BACKENDS, check_training

MODEL = "storyteller"


@dataclass
class BackendCheck:
    """One backend on the shipped model."""

    backend: str
    accumulators: int = 0  # int32 sums compared with int64 arithmetic
    unequal: int = 0  # of them
    paths: list[PathCheck] = field(default_factory=list)  # the accumulators' row first
    error: str | None = None  # the backend failed outright

    @property
    def passed(self) -> bool:
        """Whether the backend ran and every check passed."""
        return self.error is None and bool(self.paths) and all(check.passed for check in self.paths)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


def self_check(*, full: bool = True, on_check: OnCheck = ignore_check) -> list[BackendCheck]:
    """Every available backend on the shipped model.

    full: False takes fewer tokens, and where a compiled backend is there, which runs every check, NumPy runs the ones
        of its own arithmetic only. Every execution path of every backend is still taken.
    """
    try:
        threads = thread_choice()[0]
    except BackendError:  # doctor reports it; the arithmetic can be checked all the same
        threads = 1
    names = [name for name, reason in available_backends().items() if reason is None]
    has_fast = any(name != "numpy" and not is_emulated(name) for name in names)
    checks = []
    for name in names:
        quick = is_emulated(name) or (name == "numpy" and has_fast and not full)
        checks.append(check_backend(name, threads, quick=quick, full=full, on_check=on_check))
    return checks


def check_backend(
    name: str, threads: int, *, quick: bool = False, full: bool = True, on_check: OnCheck = ignore_check
) -> BackendCheck:
    """One backend: exact accumulators, all execution paths, known answers.

    quick: as of `check_paths`.   full: False takes fewer tokens, and NumPy with one thread, since the threads of a BLAS
        wait for each other when the machine has other work: 60 times as long has been seen.
    """
    check = BackendCheck(name)

    def add(row: PathCheck) -> None:
        check.paths.append(row)
        on_check(name, row)

    try:
        reference = load(MODEL, backend="numpy", threads=1)
        own_threads = 1 if name == "numpy" and not full else threads
        model = load(MODEL, backend=name, threads=own_threads)
        answers = read_answers()
        check.accumulators, check.unequal = count_unequal(model, reference, answers["tokens"][:16])
        sound = check.accumulators > 0 and check.unequal == 0
        detail = f"{check.unequal:,} are WRONG" if check.unequal else "equal to int64 arithmetic"
        add(PathCheck("accumulators", sound, check.accumulators, detail))
        tokens = answers["greedy"][0]["prompt_ids"] + answers["greedy"][0]["token_ids"]
        tokens = tokens if full else tokens[:QUICK_TOKENS]
        rows = check_paths(partial(choose_backend, name, threads=own_threads), reference, tokens, quick=quick)
        for row in chain(rows, check_answers(model, quick=quick)):
            add(row)
    except Exception as error:  # an old extension beside new Python files, a broken driver: that is what doctor is for
        check.error = f"{type(error).__name__}: {error}"
        add(PathCheck(LOADS, False, 0, check.error))
    return check


def is_emulated(name: str) -> bool:
    """Whether the backend of that name is the CUDA emulation, which is slow."""
    from ..backends.cuda import emulation_wanted

    return name == "cupy" and emulation_wanted()


def is_shipped(model: Model) -> bool:
    """Whether the known answers are this model's."""
    return model.path == ASSETS / MODEL


def read_answers() -> dict[str, Any]:
    answers: dict[str, Any] = json.loads((ASSETS / MODEL / "answers.json").read_text(encoding="utf-8"))
    return answers


def count_unequal(model: Model, reference: Model, tokens: list[int]) -> tuple[int, int]:
    """(accumulators, how many of them are not the exact integer), by int64 arithmetic on the backend's own int8
    inputs."""
    _, seen = model.run_with_cache(tokens, ["*.hook_x_int8", "*.hook_acc_int32"])
    accumulators = unequal = 0
    for name, weight in reference.weights.linears():
        if weight.bit_linear is not None:
            acc = seen[f"{name}.hook_acc_int32"]
            exact = seen[f"{name}.hook_x_int8"].astype(np.int64) @ weight.bit_linear.ternary().T.astype(np.int64)
            accumulators, unequal = accumulators + acc.size, unequal + int((acc != exact).sum())
    return accumulators, unequal


def check_answers(model: Model, *, quick: bool = False) -> Iterator[PathCheck]:
    """The shipped model on any backend against its known answers, and a training step of its shape.

    quick: fewer, for a slow backend.
    """
    return run_checks(_checks(model, read_answers(), quick))


def _checks(model: Model, answers: dict[str, Any], quick: bool) -> Checks:
    yield "answers: logits", lambda: _logits(model, answers)
    greedy = answers["greedy"][: 1 if quick else None]
    yield "answers: greedy texts", lambda: _greedy(model, greedy, 6 if quick else None)
    if model.backend.name in TRAINING_BACKENDS and not quick:
        yield "training: a step", lambda: check_training(model.backend.name, model.config)
    if quick:
        return
    yield "answers: tokens and texts", lambda: _texts(model, answers["greedy"])
    yield "answers: sampled texts", lambda: _sampled(model, answers)
    if model.backend.prepared_layout() is not None:
        yield "answers: prepared weights", lambda: _prepared(model, answers)


def _logits(model: Model, answers: dict[str, Any]) -> Outcome:
    """The logits of transformers, and its largest one for every token."""
    tokens = answers["tokens"]
    logits = model.run(TokenBatch.of([(0, 0, tokens)]), model.new_cache(1, len(tokens))).all()
    expected = np.array(answers["logits"], dtype=np.float64)
    distance = float(np.abs(logits[:, answers["columns"]] - expected).max())
    if distance > LOGITS_FLOOR or logits.argmax(axis=1).tolist() != answers["largest"]:
        return expected.size, f"{distance:.1e} from the logits of {answers['oracle']}", ""
    return expected.size, None, f"within {distance:.1e} of transformers"


def _greedy(model: Model, cases: list[dict[str, Any]], max_tokens: int | None) -> Outcome:
    count = 0
    for case in cases:
        expected = case["token_ids"][:max_tokens]
        out: Any = model.generate(case["prompt"], max_tokens=len(expected), temperature=0.0, ignore_eos=True)
        count += len(expected)
        if list(out.token_ids) != expected or (max_tokens is None and out.text != case["text"]):
            return count, f"{case['prompt']!r} goes on as {out.text[:40]!r}, transformers as {case['text'][:40]!r}", ""
    return count, None, "equal to transformers"


def _texts(model: Model, cases: list[dict[str, Any]]) -> Outcome:
    """The tokenizer alone: prompts to ids, ids to text."""
    for case in cases:
        if model.tokenizer.encode(case["prompt"]) != case["prompt_ids"]:
            return 0, f"{case['prompt']!r} is encoded as {model.tokenizer.encode(case['prompt'])}", ""
        if case["text"] not in model.tokenizer.decode(case["prompt_ids"] + case["token_ids"]):
            return 0, f"the tokens of {case['text'][:40]!r} are decoded otherwise", ""
    return len(cases), None, "equal to SentencePiece"


def _sampled(model: Model, answers: dict[str, Any]) -> Outcome:
    """Seeded sampling with every rule on logits, stops, beams and a sliding window."""
    count = 0
    for case in answers["sampled"]:
        params = dict(case["params"])
        if "logit_bias" in params:
            params["logit_bias"] = {int(token): bias for token, bias in params["logit_bias"].items()}
        outs: Any = model.generate(answers["prompt"], **params)
        for out, expected in zip(outs if isinstance(outs, list) else [outs], case["outputs"], strict=True):
            count += len(out.token_ids)
            if {key: getattr(out, key) for key in expected} != expected:
                rules = ", ".join(f"{name}={value}" for name, value in case["params"].items())
                return count, f"{rules}: {out.text[:30]!r}, expected {expected['text'][:30]!r}", ""
    return count, None, "equal to the recorded ones"


def _prepared(model: Model, answers: dict[str, Any]) -> Outcome:
    """Weights that are kept on disk in the backend's layout, and read at the next start."""
    with TemporaryDirectory(prefix="bitnet-ref-doctor-") as folder:
        path = copytree(ASSETS / MODEL, Path(folder) / MODEL)
        for _ in range(2):  # the first load writes them
            mapped = load(path, backend=model.backend.name, threads=model.backend.threads, prepared=True)
        return _logits(mapped, answers)
