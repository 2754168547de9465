"""Rules that move logits before a token is chosen: penalties, biases, bans. A rule is a function.

    processor(token_ids (T,), logits (V,)) -> logits (V,)          token_ids: the prompt and what was generated of it

It holds nothing of the request's progress, so any order, batch or beam may call it. One that can name the ids that it
may move, `moves(token_ids)`, leaves the other logits as they are: then the head need not compute them (`Rules`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends import HeadCandidates
from ..errors import GenerationError
from .params import Processor, SamplingParams

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class RepetitionPenalty:
    """What was there already becomes less likely (CTRL, arXiv 1909.05858): l / penalty if l > 0, else l * penalty."""

    penalty: float

    def moves(self, token_ids: Ids) -> Ids:
        return np.unique(token_ids)

    def __call__(self, token_ids: Ids, logits: NDArray) -> NDArray:
        seen, out = np.unique(token_ids), logits.copy()
        out[seen] = np.where(out[seen] > 0, out[seen] / self.penalty, out[seen] * self.penalty)
        return out


@dataclass(frozen=True)
class CountPenalties:
    """l - presence - frequency * (times generated), for tokens after the prompt of `prompt_tokens` (OpenAI, vLLM)."""

    presence: float
    frequency: float
    prompt_tokens: int

    def moves(self, token_ids: Ids) -> Ids:
        return np.unique(token_ids[self.prompt_tokens :])

    def __call__(self, token_ids: Ids, logits: NDArray) -> NDArray:
        seen, counts = np.unique(token_ids[self.prompt_tokens :], return_counts=True)
        out = logits.copy()
        out[seen] -= (self.presence + self.frequency * counts).astype(out.dtype)
        return out


class LogitBias:
    """l + bias[id]."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self.ids = np.array(list(bias), dtype=np.int64)
        self.biases = np.array(list(bias.values()), dtype=np.float64)

    def moves(self, token_ids: Ids) -> Ids:
        return self.ids

    def __call__(self, token_ids: Ids, logits: NDArray) -> NDArray:
        out = logits.copy()
        out[self.ids] += self.biases.astype(out.dtype)
        return out


class MinTokens:
    """No end token before `min_tokens` new ones."""

    def __init__(self, min_tokens: int, end_tokens: Iterable[int], prompt_tokens: int) -> None:
        self.end_tokens = np.array(sorted(end_tokens), dtype=np.int64)
        self.length = prompt_tokens + min_tokens

    def moves(self, token_ids: Ids) -> Ids:
        return self.end_tokens if len(token_ids) < self.length else self.end_tokens[:0]

    def __call__(self, token_ids: Ids, logits: NDArray) -> NDArray:
        return without(logits, self.moves(token_ids))


def without(logits: NDArray, ids: Ids) -> NDArray:
    """A copy in which those ids are impossible."""
    out = logits.copy()
    out[ids] = -np.inf
    return out


# -- a request's rules -------------------------------------------------------------------------------------------------


class Rules:
    """The processors of one request, in order, applied to all logits or to the candidates of a screened head."""

    def __init__(self, processors: Sequence[Processor]) -> None:
        self.processors = tuple(processors)

    @classmethod
    def of(
        cls, params: SamplingParams, prompt_tokens: int, end_tokens: Iterable[int], more: Sequence[Processor]
    ) -> Rules:
        """What the parameters ask for, in transformers' order; `more`: rules that need the tokenizer."""
        rules: list[Processor] = []
        if params.logit_bias:
            rules.append(LogitBias(params.logit_bias))
        if params.repetition_penalty != 1:
            rules.append(RepetitionPenalty(params.repetition_penalty))
        if params.presence_penalty or params.frequency_penalty:
            rules.append(CountPenalties(params.presence_penalty, params.frequency_penalty, prompt_tokens))
        if params.min_tokens:
            rules.append(MinTokens(params.min_tokens, end_tokens, prompt_tokens))
        return cls([*rules, *more, *params.processors])

    def moved(self, token_ids: Ids) -> Ids | None:
        """The ids whose logits the rules may move; None when that may be any."""
        moved = []
        for processor in self.processors:
            moves = getattr(processor, "moves", None)
            if moves is None:
                return None
            moved.append(moves(token_ids))
        return np.unique(np.concatenate(moved)) if moved else np.empty(0, dtype=np.int64)

    def apply(self, token_ids: Ids, logits: NDArray) -> NDArray:
        """All rules on all logits.   (V,) -> (V,).  Raises GenerationError for a rule that returns something else."""
        for processor in self.processors:
            moved = np.asarray(processor(token_ids, logits))
            if moved.shape != logits.shape or not np.issubdtype(moved.dtype, np.floating):
                raise GenerationError(
                    f"processor {_name(processor)}: expected logits {logits.shape} of floats, "
                    f"got {moved.dtype.name} {moved.shape}"
                )
            if np.isnan(moved).any() or moved.max() in (np.inf, -np.inf):
                wrong = "NaN" if np.isnan(moved).any() else "+inf" if moved.max() == np.inf else "-inf for every token"
                raise GenerationError(f"processor {_name(processor)}: expected logits to choose from, got {wrong}")
            logits = moved
        return logits

    def apply_among(self, token_ids: Ids, found: HeadCandidates) -> HeadCandidates:
        """The same on candidates that hold the k + (ids moved) largest logits, and all moved ones: what comes out holds
        the k largest. The logits that are not here keep their bounds."""
        if not self.processors:
            return found
        if found.complete:
            return HeadCandidates(found.ids, self.apply(token_ids, found.logits), found.vocab_size)
        whole = np.full(found.vocab_size, -np.inf, dtype=found.logits.dtype)
        whole[found.ids] = found.logits
        return HeadCandidates(found.ids, self.apply(token_ids, whole)[found.ids], found.vocab_size, found.bounds)


def _name(processor: Any) -> str:
    return getattr(processor, "__name__", type(processor).__name__)
