"""Texts longer than the model's context: which tokens the model still sees.

    error      refuse what does not fit (the default)
    truncate   cut the oldest tokens of the prompt until the prompt and max_tokens fit; a BOS at its front stays
    sliding    when the window is full, drop the oldest tokens and go on
    sinks      the same, but keep the first `sink_tokens`: the attention sinks of StreamingLLM (Xiao et al. 2023)

The kept tokens are computed again as a prompt, with positions from 0: the paper's "sliding window with re-computation",
its best variant in quality. So each new token is exactly what `model.generate` gives for the tokens that the model has
seen; with StreamingLLM's old keys and renumbered positions no prompt gives the same result, so nothing could check it.
Half of the window (beyond the sinks) is dropped at once, so each new token costs about one more prompt token.

The rules on logits (penalties, banned words, guides) see the whole text, dropped or not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..backends.loaded import LoadedModel
from ..errors import GenerationError
from .params import SamplingParams

Spans = tuple[tuple[int, int], ...]  # (start, stop) of tokens, in order, with gaps between them


def first_and_last(length: int, first: int, last: int) -> Spans:
    """The spans of the first and the last tokens of `length`.

    >>> first_and_last(10, 2, 3), first_and_last(10, 0, 3), first_and_last(4, 2, 3)
    (((0, 2), (7, 10)), ((7, 10),), ((0, 4),))
    """
    if first + last >= length:
        return ((0, length),)
    return ((0, first), (length - last, length)) if first else ((length - last, length),)


def keep_after_overflow(length: int, window: int, policy: str, sinks: int) -> Spans:
    """The tokens that "sliding" or "sinks" keep of a text: all of them while they fit into the window, then the sinks
    and the newest half of the rest of the window.

    >>> keep_after_overflow(101, 100, "sinks", 4)
    ((0, 4), (53, 101))
    """
    if length <= window:
        return ((0, length),)
    first = sinks if policy == "sinks" else 0
    return first_and_last(length, first, (window - first) // 2)


def take(ids: NDArray[np.int64], spans: Spans) -> NDArray[np.int64]:
    """The tokens of the spans, joined."""
    return ids[slice(*spans[0])] if len(spans) == 1 else np.concatenate([ids[start:stop] for start, stop in spans])


@dataclass(frozen=True)
class ContextWindow:
    """How many tokens the model sees at a time, and what happens to more of them."""

    policy: str
    size: int
    sinks: int

    @classmethod
    def of(cls, model: LoadedModel, params: SamplingParams) -> ContextWindow:
        """Raises GenerationError for a window larger than the context, or too small for its sinks."""
        context = model.config.context_length
        size = context if params.window is None else params.window
        if size > context:
            raise GenerationError(f"the model's context is {context} tokens, got {size}", field="window")
        sinks = params.sink_tokens if params.overflow == "sinks" else 0
        if params.overflow in ("sliding", "sinks") and size < sinks + 2:
            message = f"{sinks} leave no room for others in a window of {size}; lower it"
            raise GenerationError(message, field="sink_tokens")
        return cls(params.overflow, size, sinks)

    @property
    def moves(self) -> bool:
        """Whether the text may exceed it."""
        return self.policy in ("sliding", "sinks")

    def keep(self, length: int) -> Spans:
        """The tokens that the model sees next of a text of `length`."""
        return keep_after_overflow(length, self.size, self.policy, self.sinks) if self.moves else ((0, length),)

    def cut(self, length: int, new: int, front: int) -> Spans:
        """The tokens of a prompt of `length` that "truncate" keeps so that `new` ones fit; the first `front` stay."""
        room = self.size - new
        if self.policy != "truncate" or length <= room:
            return ((0, length),)
        if room <= front:
            raise GenerationError(
                f"{new} of the {self.size} tokens of the context leave no room for a prompt; lower it",
                field="max_tokens",
            )
        return first_and_last(length, front, room - front)
