"""The runs that an engine is judged by: short, long, token by token, in pieces, and two sequences at once.

Engines have a kernel for one token and others for many, a cache, a mask with an offset. One short call shows none.
`RUNS` is the one declaration of the names; `plan` makes their tokens and calls for a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backends.loaded import LoadedModel
from ..backends.observe import observe
from ..backends.record import NamesFilter, Recorder, check_matched
from ..backends.run import run
from ..errors import ConfigError, count_of
from ..reference.cache import KVCache, TokenBatch
from ..reference.config import ModelConfig
from ..reference.layers import Array
from .calls import sizes_in_words
from .names import INT8, LOGITS, SCALE, is_by_head
from .token_ids import long_tokens
from .trace import record_to_file, write_trace
from .types import StrPath, Tokens

RUNS = {
    "short": "a sentence in one call, with every tensor",
    "long": "520 tokens, or as many as the context holds, in one call",
    "decode": "the sentence token by token",
    "pieces": "the sentence in calls of 1, 3 and 8 tokens",
    "batch": "two sequences of unequal length at once",
}
DEFAULT_RUNS = tuple(RUNS)
# Of a run besides the short one: what shows where it is wrong, and where activations flip.
FEW_NAMES = (LOGITS, "*.hook_resid_post", f"*.{INT8}", f"*.{SCALE}")
_PIECES = (3, 8, 1)


@dataclass(frozen=True)
class RunPlan:
    """One run. calls: how many tokens each call computes; () for one.   sequences: lengths, where there are several."""

    name: str
    tokens: tuple[int, ...]
    calls: tuple[int, ...] = ()
    sequences: tuple[int, ...] = ()

    @property
    def in_words(self) -> str:
        """
        >>> RunPlan("decode", (1, 2, 3), (1, 1, 1)).in_words
        'calls of 1, 1, 1 tokens'
        >>> RunPlan("batch", (1, 2, 3), (), (2, 1)).in_words
        'sequences of 2 and 1 tokens in one call'
        """
        if self.sequences:
            return f"sequences of {' and '.join(map(str, self.sequences))} tokens in one call"
        return sizes_in_words(self.calls or (len(self.tokens),))

    @property
    def job(self) -> dict[str, Any]:
        """The keys of a recorder's job."""
        return {"tokens": list(self.tokens), "calls": list(self.calls), "sequences": list(self.sequences)}

    @property
    def parts(self) -> list[tuple[int, ...]]:
        """The tokens of each sequence."""
        ends = np.cumsum(self.sequences or (len(self.tokens),))
        return [self.tokens[end - n : end] for end, n in zip(ends, self.sequences or (len(self.tokens),), strict=True)]


def plan(config: ModelConfig, tokens: Tokens, names: Sequence[str] = DEFAULT_RUNS) -> list[RunPlan]:
    """The runs of these names, of a model with this config and a short text of these tokens."""
    ids, n = tuple(map(int, tokens)), len(tokens)
    plans = {"short": RunPlan("short", ids)}
    if (long := long_tokens(config)) is not None:
        plans["long"] = RunPlan("long", tuple(long))
    if n > 1:
        plans["decode"] = RunPlan("decode", ids, (1,) * n)
        plans["pieces"] = RunPlan("pieces", ids, pieces_of(n))
        other = ids[::-1][: max(1, n * 2 // 3)]
        plans["batch"] = RunPlan("batch", (*ids, *other), (), (n, len(other)))
    return [plans[name] for name in RUNS if name in plans and name in names]


def check_runs(config: ModelConfig, tokens: Tokens, names: Sequence[str]) -> None:
    """Raises ConfigError for a run that `plan` leaves out."""
    made = [each.name for each in plan(config, tokens, names)]
    if lacking := [name for name in names if name not in made]:
        what = f"{', '.join(lacking)} cannot be made of {count_of(len(tokens), 'token')}"
        why = "decode, pieces and batch take two tokens or more, long a longer context"
        raise ConfigError(f"{what} in a context of {config.context_length}: {why}", field="runs")


def pieces_of(n: int) -> tuple[int, ...]:
    """n tokens in calls of 3, 8, 1, 3, 8, 1 ... tokens.

    >>> pieces_of(13)
    (3, 8, 1, 1)
    """
    sizes: list[int] = []
    while (left := n - sum(sizes)) > 0:
        sizes.append(min(left, _PIECES[len(sizes) % len(_PIECES)]))
    return tuple(sizes)


def run_in_calls(model: LoadedModel, tokens: Tokens, calls: Tokens, names: NamesFilter = None) -> dict[str, Array]:
    """The tensors of one sequence that is computed in several calls with a cache, joined.   -> {name: array}"""
    ids, cache, start = model.check_tokens(tokens), model.new_cache(1, len(tokens)), 0
    parts: dict[str, list[Array]] = {}
    for size in calls:
        batch = TokenBatch.of([(0, start, ids[start : start + size])])
        for name, array in _record(model, batch, cache, names).items():
            parts.setdefault(name, []).append(array)
        start += size
    return {name: join_calls(name, arrays, start) for name, arrays in parts.items()}


def join_calls(name: str, arrays: Sequence[Array], n: int) -> Array:
    """What several calls give of one tensor; scores and patterns of a call over all n tokens."""
    if not is_by_head(name):
        return np.concatenate(arrays)
    masked = -np.inf if name.endswith("hook_attn_scores") else 0.0
    wide = [np.pad(a, ((0, 0), (0, 0), (0, n - a.shape[2])), constant_values=masked) for a in arrays]
    return np.concatenate(wide, axis=1)


def run_batch(model: LoadedModel, parts: Sequence[Tokens], names: NamesFilter = None) -> dict[str, Array]:
    """The tensors of several sequences that are computed in one call, laid end to end."""
    ids = [model.check_tokens(part) for part in parts]
    batch = TokenBatch.of([(slot, 0, own) for slot, own in enumerate(ids)])
    seen = _record(model, batch, model.new_cache(len(ids), max(map(len, ids))), names)
    return {name: _apart(name, array, list(map(len, ids))) for name, array in seen.items()}


def _record(model: LoadedModel, batch: TokenBatch, cache: KVCache, names: NamesFilter) -> dict[str, Array]:
    recorder = Recorder(model.backend, model.config, names)
    run(observe(model.backend, recorder), model.weights, model.config, batch, cache)
    check_matched(recorder.seen, names)
    return recorder.seen


def _apart(name: str, array: Array, lengths: Tokens) -> Array:
    """Scores and patterns, of each token over its own sequence, over all tokens; other tensors as they are."""
    if not is_by_head(name):
        return array
    n = sum(lengths)
    masked = -np.inf if name.endswith("hook_attn_scores") else 0.0
    wide, start = np.full((len(array), n, n), masked, dtype=array.dtype), 0
    for length in lengths:
        rows = slice(start, start + length)
        wide[:, rows, rows] = array[:, rows, :length]
        start += length
    return wide


def record_run(
    model: LoadedModel, run_plan: RunPlan, path: StrPath, names: NamesFilter = None, prompt: str | None = None
) -> None:
    """Compute a run as it says and write it as a trace."""
    if not run_plan.calls and not run_plan.sequences:
        record_to_file(model, run_plan.tokens, path, names, prompt)
        return
    if run_plan.sequences:
        tensors = run_batch(model, run_plan.parts, names)
    else:
        tensors = run_in_calls(model, run_plan.tokens, run_plan.calls, names)
    calls, sequences = run_plan.calls or None, run_plan.sequences or None
    engine = f"bitnet_ref {model.backend.name}"
    write_trace(path, tensors, run_plan.tokens, engine=engine, calls=calls, sequences=sequences)
