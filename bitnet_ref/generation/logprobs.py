"""Log probabilities of chosen tokens, computed when somebody asks for them.

ln p of a token needs the logits of the whole vocabulary, which a screened head does not compute. So what the head saw
is kept, D floats a token, and the first question computes the head for all tokens so far, together. By the model's
batch invariance the logits are those that a whole head would have given in the first place, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .sampling import log_probability

T = TypeVar("T")
TOKENS_AT_A_TIME = 32  # whose logits are held together: 16 MB for a vocabulary of 128,256


class Logprobs:
    """ln p of one row's tokens. `head` computes logits (N, V) from what the head sees (N, D)."""

    def __init__(self, head: Callable[[NDArray], NDArray]) -> None:
        self._head = head
        self._lock = Lock()  # one thread may generate while another reads
        self._waiting: list[tuple[int, NDArray, int]] = []  # (index, hidden (D,), token)
        self._known: dict[int, float] = {}
        self._count = 0

    def add(self, token: int, hidden: NDArray, logits: NDArray | None) -> Any:
        """Note a chosen token. -> its ln p where all of its logits are known, else the function that will find it"""
        if logits is not None:
            return log_probability(logits, token)
        with self._lock:
            index, self._count = self._count, self._count + 1
            self._waiting.append((index, hidden.copy(), token))
        return lambda: self[index]

    def __getitem__(self, index: int) -> float:
        with self._lock:
            while index not in self._known:
                block = self._waiting[:TOKENS_AT_A_TIME]
                logits = self._head(np.stack([hidden for _, hidden, _ in block]))
                for (at, _, token), row in zip(block, logits, strict=True):
                    self._known[at] = log_probability(row, token)
                del self._waiting[: len(block)]
            return self._known[index]


def lazy_field(name: str) -> Callable[[type[T]], type[T]]:
    """A decorator of dataclasses: this field may be given as a function of no arguments, which its first reading calls.

    So do comparing, printing, copying and pickling: to them the field is its value.
    """

    def decorate(cls: type[T]) -> type[T]:
        def state(self: object) -> dict[str, Any]:
            getattr(self, name)
            return self.__dict__

        setattr(cls, name, _Lazy(f"_{name}"))
        cls.__getstate__ = state  # type: ignore[method-assign]
        return cls

    return decorate


class _Lazy:
    """The descriptor behind `lazy_field`."""

    def __init__(self, place: str) -> None:
        self._place = place

    def __get__(self, instance: object, owner: type) -> Any:
        value = instance.__dict__[self._place]
        if callable(value):
            value = instance.__dict__[self._place] = value()
        return value

    def __set__(self, instance: object, value: Any) -> None:
        instance.__dict__[self._place] = value
