"""One run of an engine, and the reference run again over its ids: as it is, or driven wrongly in some way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends import Backend
from ...backends.loaded import LoadedModel
from ...backends.paged_cache import PagedKVCache
from ...reference.cache import TokenBatch
from ...system.lazy import lazy_property
from ..explain.hypotheses.calls import turned_at
from ..explain.variants import Setting
from ..names import LOGITS, op_order
from ..token_ids import end_ids
from ..types import Ids, Ints, Tokens

Rows = NDArray[np.floating]  # (n, V): the logits that choose each id


@dataclass(frozen=True)
class GivenRun:
    """Ids that an engine chose.

    prompt, tokens: ids before them, and they.   text: the prompt's, if known.   messages: a conversation, if it is one.
    finish: "stop" or "length", why the engine says it ended; None: unknown.   engine_dtype: what it computes in.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    finish: str | None = None
    max_tokens: int | None = None  # how many were asked for
    engine_dtype: str = "float32"

    @property
    def context(self) -> Ids:
        """The ids that the reference runs over: the last one is chosen by the one before it."""
        return [*self.prompt, *self.tokens[:-1]]


class Replay:
    """The reference's logits for one run of an engine, as they are and with a mistake made."""

    def __init__(self, model: LoadedModel, run: GivenRun) -> None:
        self.model, self.run = model, run
        self.end_ids = end_ids(model)

    @lazy_property
    def base(self) -> Rows:
        """Without a mistake.   -> (n, V)"""
        return self.every[len(self.run.prompt) - 1 :]

    @lazy_property
    def every(self) -> Rows:
        """After each token of the prompt too.   -> (prompt + n - 1, V)"""
        return np.asarray(self.model.logits(self.run.context))

    def after(self, prompt: Tokens) -> Rows | None:
        """With another prompt before the same ids; None where it does not fit."""
        ids = [*prompt, *self.run.tokens[:-1]]
        if not prompt or len(ids) > self.model.context_length:
            return None
        return np.asarray(self.model.logits(ids))[len(prompt) - 1 :]

    def with_first(self, position: int) -> Rows:
        """The first id chosen from the logits of another token of the prompt."""
        rows = self.base.copy()
        rows[0] = self.every[position]
        return rows

    def decoded(self, shift: int, prompt: Tokens | None = None) -> Rows | None:
        """New tokens written `shift` places from where they belong in the cache.   prompt: what the cache has of it"""
        run, known = self.run, list(self.run.prompt if prompt is None else prompt)
        start, new = len(run.prompt) + shift, run.tokens[:-1]
        capacity = start + len(run.tokens)
        if not new or start < 0 or capacity > self.model.context_length:
            return None
        cache = self.model.new_cache(slots=1, capacity=capacity, page_size=capacity)
        if not isinstance(cache, PagedKVCache):
            return None
        cache.fill_with_zeros()  # what is never written holds zeros
        if known:
            self.model.run(TokenBatch.of([(0, 0, known)]), cache)
        rows = self.model.run(TokenBatch.of([(0, start, new)]), cache).all()
        return np.concatenate([self.base[:1], rows])

    def turned(self, position: Callable[[int], int]) -> Rows | None:
        """RoPE of the new tokens at other positions, by the number of the new token; the cache is right."""
        new = [position(i) for i in range(len(self.run.tokens) - 1)]
        if not new or min(new) < 0:
            return None
        setting, first = Setting.of(self.model, self.run.context), len(self.run.prompt)
        edit = turned_at(lambda *_: np.array([*range(first), *new], dtype=np.int64))
        rotations = [name for name in op_order(setting.config) if name.endswith(("hook_rot_q", "hook_rot_k"))]
        backend = Backend("float32", self.model.backend.threads)
        run = setting.with_edits(dict.fromkeys(rotations, edit)).run(LOGITS, backend=backend)
        return run[LOGITS][first - 1 :]

    def changed(self, change: Callable[[Ints, Rows], Rows]) -> Rows:
        """Each row changed by a rule (ids before it, logits (V,)) -> logits."""
        ids = np.array([*self.run.prompt, *self.run.tokens], dtype=np.int64)
        first = len(self.run.prompt)
        return np.stack([change(ids[: first + i], row) for i, row in enumerate(self.base)])
