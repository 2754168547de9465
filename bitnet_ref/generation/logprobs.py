"""Log probabilities of chosen tokens, computed when they are first read.

ln p of a token needs the logits of the whole vocabulary, which a screened head does not compute. So the head's input is
kept, D floats per token, and the first read computes the head for all tokens so far together. By the model's batch
invariance these logits equal, to the bit, those that an exact head would have computed in the step itself.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.run import TokenLogits
from .sampling import likeliest_logprobs, log_probability

Entry = tuple[float, dict[int, float]]  # ln p of the chosen token; {id: ln p} of the most likely and the chosen ones

TOKENS_AT_A_TIME = 32  # whose logits are held together: 16 MB for a vocabulary of 128,256


class Logprobs:
    """ln p of one row's tokens. top: also report this many of the most likely tokens."""

    def __init__(self, top: int = 0) -> None:
        self._top = top
        self._lock = Lock()  # one thread may generate while another reads
        self._head: Callable[[NDArray], NDArray]
        self._waiting: list[tuple[int, NDArray, int]] = []  # (index, the head's input (D,), token)
        self._known: dict[int, Entry] = {}
        self._count = 0

    def add(self, token: int, logits: TokenLogits, whole: NDArray | None) -> tuple[Any, Any]:
        """Add a chosen token. -> its ln p and `top_logprobs`, or functions that compute them when `whole` is None.

        whole (V,): all its logits, if they are known and the values will surely be read.
        """
        if whole is not None or logits.hidden is None:
            return self._entry(logits.all() if whole is None else whole, token)
        with self._lock:
            index, self._count, self._head = self._count, self._count + 1, logits.head
            self._waiting.append((index, logits.hidden.copy(), token))
        return lambda: self[index][0], lambda: self[index][1]

    def __getitem__(self, index: int) -> Entry:
        with self._lock:
            while index not in self._known:
                block = self._waiting[:TOKENS_AT_A_TIME]
                logits = self._head(np.stack([hidden for _, hidden, _ in block]))
                for (each, _, token), row in zip(block, logits, strict=True):
                    self._known[each] = self._entry(row, token)
                del self._waiting[: len(block)]
            return self._known[index]

    def _entry(self, logits: NDArray, token: int) -> Entry:
        chosen = log_probability(logits, token)
        top = likeliest_logprobs(logits, self._top) if self._top else {}
        return chosen, top | {token: chosen}
