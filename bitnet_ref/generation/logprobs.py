"""Log probabilities of chosen tokens, computed when somebody asks for them.

ln p of a token needs the logits of the whole vocabulary, which a screened head does not compute; and where they are
there, it needs two passes over them in float64, which few callers look at. So what the head saw is kept, D floats a
token, and the first question computes the head for all tokens so far, together. By the model's batch invariance the
logits are those that a whole head would have given in the first place, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .sampling import likeliest_logprobs, log_probability

Entry = tuple[float, dict[int, float]]  # ln p of the chosen token; {id: ln p} of the likeliest, and of the chosen one

T = TypeVar("T")
TOKENS_AT_A_TIME = 32  # whose logits are held together: 16 MB for a vocabulary of 128,256


class Logprobs:
    """ln p of one row's tokens. `head` computes logits (N, V) from what the head sees (N, D).

    top: how many of the likeliest alternatives to note besides.
    """

    def __init__(self, head: Callable[[NDArray], NDArray], top: int = 0) -> None:
        self._head, self._top_k = head, top
        self._lock = Lock()  # one thread may generate while another reads
        self._waiting: list[tuple[int, NDArray, int]] = []  # (index, hidden (D,), token)
        self._known: dict[int, Entry] = {}
        self._count = 0

    def add(self, token: int, hidden: NDArray, logits: NDArray | None) -> tuple[Any, Any]:
        """Note a chosen token. -> its ln p and the likeliest's, or functions that will find them.

        logits: the model's own, all of them, where they are known and it is certain that somebody will ask.
        """
        if logits is not None:
            return self._entry(logits, token)
        with self._lock:
            index, self._count = self._count, self._count + 1
            self._waiting.append((index, hidden.copy(), token))
        return lambda: self[index][0], lambda: self[index][1]

    def __getitem__(self, index: int) -> Entry:
        with self._lock:
            while index not in self._known:
                block = self._waiting[:TOKENS_AT_A_TIME]
                logits = self._head(np.stack([hidden for _, hidden, _ in block]))
                for (at, _, token), row in zip(block, logits, strict=True):
                    self._known[at] = self._entry(row, token)
                del self._waiting[: len(block)]
            return self._known[index]

    def _entry(self, logits: NDArray, token: int) -> Entry:
        if not self._top_k:
            return (chosen := log_probability(logits, token)), {token: chosen}
        chosen = log_probability(logits, token)
        return chosen, dict(zip(*likeliest_logprobs(logits, self._top_k), strict=True)) | {token: chosen}


def lazy_fields(*names: str) -> Callable[[type[T]], type[T]]:
    """A decorator of dataclasses: these fields may be given as functions of no arguments. Reading one first calls it.

    So does comparing, printing, copying and pickling: to them a field is its value.
    """

    def decorate(cls: type[T]) -> type[T]:
        def state(self: object) -> dict[str, Any]:
            for name in names:
                getattr(self, name)
            return self.__dict__

        for name in names:
            setattr(cls, name, _Lazy(f"_{name}"))
        cls.__getstate__ = state  # type: ignore[method-assign]
        return cls

    return decorate


class _Lazy:
    """The descriptor behind `lazy_fields`."""

    def __init__(self, place: str) -> None:
        self._place = place

    def __get__(self, instance: object, owner: type) -> Any:
        value = instance.__dict__[self._place]
        if callable(value):
            value = instance.__dict__[self._place] = value()
        return value

    def __set__(self, instance: object, value: Any) -> None:
        instance.__dict__[self._place] = value
