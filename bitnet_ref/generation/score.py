"""`score`: how likely a model finds given continuations. Perplexities and multiple-choice tasks need no more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.loaded import LoadedModel
from ..backends.run import Input, TokenLogits, all_finite, split_into_passes
from ..errors import GenerationError, NumericsError, describe
from ..reference.cache import KVCache, TokenBatch, TokenIds
from .sampling import TOKENS_AT_A_TIME, log_probability

MAX_CONTINUATIONS = 32  # of one prompt that are computed together
Group = tuple[NDArray[np.int64], list[NDArray[np.int64]]]  # a prompt, and continuations of it


@dataclass(frozen=True, eq=False)
class Score:
    """logprobs (n,): ln p of each token of a continuation. is_greedy: whether each is the likeliest one."""

    logprobs: NDArray[np.float64]
    is_greedy: bool

    @property
    def total(self) -> float:
        """ln p of the continuation."""
        return float(self.logprobs.sum())


def score(model: LoadedModel, prompt: str | TokenIds, continuations: Sequence[str | TokenIds]) -> list[Score]:
    """The score of each continuation after the prompt: texts, or token ids on both sides.

    Texts are encoded together, and cut after as many tokens as the prompt alone has, as lm-eval does; spaces at the end
    of the prompt belong to the continuation. Raises GenerationError, TokenizerError, and what `run` raises.
    """
    if not isinstance(continuations, list | tuple) or any(
        isinstance(each, str) != isinstance(prompt, str) for each in continuations
    ):
        raise GenerationError("score: expected a prompt and a list of continuations, all texts or all token ids")
    if not isinstance(prompt, str):
        return score_groups(model, [(prompt, continuations)])[0]
    stem = prompt.rstrip(" ")
    ids = model.tokenizer.encode(stem)
    texts = model.tokenizer.encode_batch([prompt + str(each) for each in continuations])
    rests = [text[len(ids) :] for text in texts]
    for continuation, rest in zip(continuations, rests, strict=True):
        if not rest:
            message = f"{describe(continuation)} adds no token to those of the prompt"
            raise GenerationError(f"score: {message}; end the prompt between two tokens, or give token ids")
    return score_groups(model, [(ids, rests)])[0]


def score_groups(model: LoadedModel, groups: Sequence[tuple[Any, Sequence[Any]]]) -> list[list[Score]]:
    """The scores of (prompt, continuations), all token ids. A prompt is computed once for all its continuations.

    Each score equals, to the bit, the one that is computed alone. Raises GenerationError and what `run` raises.
    """
    scores: list[list[Score]] = [[] for _ in groups]
    batch: list[tuple[int, Group]] = []
    room = limit = model.backend.prompt_tokens(model.config)
    for number, (prompt, continuations) in enumerate(groups):
        ids = model.check_tokens(prompt)
        others = [model.check_tokens(each, any_length=True) for each in continuations]
        longest = len(ids) + max(map(len, others), default=1) - 1
        if longest > model.context_length:
            message = f"{longest} tokens to read do not fit the model's context of {model.context_length}; shorten them"
            raise GenerationError(f"score: {message}")
        for first in range(0, len(others), MAX_CONTINUATIONS):
            part = others[first : first + MAX_CONTINUATIONS]
            size = len(ids) + sum(map(len, part))
            if batch and size > room:
                _score_batch(model, batch, scores)
                batch, room = [], limit
            batch.append((number, (ids, part)))
            room -= size
    if batch:
        _score_batch(model, batch, scores)
    return scores


def _score_batch(model: LoadedModel, batch: Sequence[tuple[int, Group]], scores: list[list[Score]]) -> None:
    prompts: list[Input] = []
    rests: list[Input] = []  # of continuations, without their last tokens
    owners: list[int] = []  # the slot of the prompt of each continuation
    for _, (ids, parts) in batch:
        leader = len(owners)
        prompts.append((leader, 0, ids))
        rests += [(leader + number, len(ids), part[:-1]) for number, part in enumerate(parts)]
        owners += [leader] * len(parts)
    cache = model.new_cache(len(owners), max(start + len(ids) for _, start, ids in rests))
    ends = dict(zip((leader for leader, _, _ in prompts), _run(model, cache, prompts, every=False), strict=True))
    for leader, _, ids in prompts:
        followers = [slot for slot, owner in enumerate(owners) if owner == leader != slot]
        if followers:
            cache.copy([leader] * len(followers), followers, len(ids))
    middles = _run(model, cache, rests, every=True)
    targets = np.concatenate([part for _, (_, parts) in batch for part in parts])
    rows: list[TokenLogits] = []
    for owner, (_, _, ids) in zip(owners, rests, strict=True):
        rows += [ends[owner], *(next(middles) for _ in ids)]
    logprobs, is_likeliest = _log_probabilities(rows, targets)
    first = 0
    for number, (_, parts) in batch:
        for part in parts:
            stop = first + len(part)
            scores[number].append(Score(logprobs[first:stop], bool(is_likeliest[first:stop].all())))
            first = stop


def _run(model: LoadedModel, cache: KVCache, inputs: Sequence[Input], every: bool) -> Iterator[TokenLogits]:
    """The final states of every token of the inputs, or of the last token of each, in order."""
    for parts, ending in split_into_passes(inputs, model.backend.prompt_tokens(model.config)):
        batch = TokenBatch.of(parts, logits_of_last=None if every else ending)
        wanted = len(batch) if batch.wanted is None else len(batch.wanted)
        yield from model.run(batch, cache, [None] * wanted).tokens


def _log_probabilities(
    rows: Sequence[TokenLogits], targets: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """ln p of each target after its row, and whether it is the likeliest token.   -> (n,) both"""
    logprobs, is_likeliest = np.empty(len(rows), dtype=np.float64), np.empty(len(rows), dtype=np.bool_)
    for first in range(0, len(rows), TOKENS_AT_A_TIME):
        some = rows[first : first + TOKENS_AT_A_TIME]
        logits = some[0].head(np.stack([row.hidden for row in some if row.hidden is not None]))
        if not all_finite([logits]):
            raise NumericsError("the logits hold NaN or Inf", tensor="logits")
        for index, (row, target) in enumerate(zip(logits, targets[first : first + len(some)], strict=True), first):
            logprobs[index], is_likeliest[index] = log_probability(row, int(target)), row.argmax() == target
    return logprobs, is_likeliest
