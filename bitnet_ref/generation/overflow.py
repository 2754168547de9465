"""What becomes of a text that outgrows the model's context: which of its tokens the model goes on to see.

    error      refuses what does not fit (the default)
    truncate   cuts the oldest tokens of the prompt, so that the prompt and max_tokens fit; a BOS at its front stays
    sliding    goes on: when the window is full, the oldest tokens are dropped
    sinks      the same, but the first `sink_tokens` stay: the attention sinks of StreamingLLM (Xiao et al. 2023)

What is dropped is dropped exactly. The tokens that stay are computed anew as a prompt, with positions from 0, so each
token is what the model says of the tokens that it is reported to have seen: `model.generate` on those gives the same.
StreamingLLM itself keeps the old keys and values, which hold what the dropped tokens had put into them, and renumbers
their positions; the model then computes something that no prompt gives, and nothing could prove it right. This is the
paper's "sliding window with re-computation", the best there in quality. It costs little: half of the window (beyond
the sinks) is dropped at once, so half a window of new tokens is generated before the next time, and a generated token
costs about one prompt token more.

The rules on logits (penalties, banned words, guides) look at the whole text, dropped or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import GenerationError

if TYPE_CHECKING:
    from ..api import Model
    from .params import SamplingParams

POLICIES = ("error", "truncate", "sliding", "sinks")
Spans = tuple[tuple[int, int], ...]  # (start, stop) of tokens, in order, none next to another


def first_and_last(length: int, first: int, last: int) -> Spans:
    """The first and the last tokens of so many.

    >>> first_and_last(10, 2, 3), first_and_last(10, 0, 3), first_and_last(4, 2, 3)
    (((0, 2), (7, 10)), ((7, 10),), ((0, 4),))
    """
    if first + last >= length:
        return ((0, length),)
    return ((0, first), (length - last, length)) if first else ((length - last, length),)


def keep_after_overflow(length: int, window: int, policy: str, sinks: int) -> Spans:
    """What stays of a text of so many tokens, under "sliding" or "sinks": all of it while it fits the window, else the
    sinks and the newest half of the rest of the window.

    >>> keep_after_overflow(101, 100, "sinks", 4)
    ((0, 4), (53, 101))
    """
    if length <= window:
        return ((0, length),)
    first = sinks if policy == "sinks" else 0
    return first_and_last(length, first, (window - first) // 2)


def take(ids: NDArray[np.int64], spans: Spans) -> NDArray[np.int64]:
    """The tokens of the spans, end to end."""
    return ids[slice(*spans[0])] if len(spans) == 1 else np.concatenate([ids[start:stop] for start, stop in spans])


@dataclass(frozen=True)
class ContextWindow:
    """How many tokens the model sees at a time, and what to do with more. One for a prompt and its parameters."""

    policy: str
    size: int
    sinks: int

    @classmethod
    def of(cls, model: Model, params: SamplingParams) -> ContextWindow:
        """Raises GenerationError for a window that the model has not, or that holds nothing but sinks."""
        context = model.config.context_length
        size = context if params.window is None else params.window
        if size > context:
            raise GenerationError(f"window: the model's context is {context} tokens, got {size}")
        sinks = params.sink_tokens if params.overflow == "sinks" else 0
        if params.overflow in ("sliding", "sinks") and size < sinks + 2:
            raise GenerationError(f"sink_tokens: {sinks} leave no room for others in a window of {size}; lower it")
        return cls(params.overflow, size, sinks)

    @property
    def moves(self) -> bool:
        """Whether the text may grow past it."""
        return self.policy in ("sliding", "sinks")

    def keep(self, length: int) -> Spans:
        """What the model sees of a text of so many tokens when it is to go on."""
        return keep_after_overflow(length, self.size, self.policy, self.sinks) if self.moves else ((0, length),)

    def cut(self, length: int, new: int, front: int) -> Spans:
        """What stays of a prompt of so many tokens when `new` ones must fit behind it; `front` of the first stay."""
        room = self.size - new
        if self.policy != "truncate" or length <= room:
            return ((0, length),)
        if room <= front:
            raise GenerationError(
                f"max_tokens: {new} of the {self.size} tokens of the context leave no room for a prompt; lower it"
            )
        return first_and_last(length, front, room - front)
