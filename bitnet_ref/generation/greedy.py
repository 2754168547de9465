"""Several steps in a row, where nothing in Python has a say between them.

A greedy token is the largest logit, and a sampled one follows from the logits, the limits and a number that is drawn
beforehand. Then the next step's input is known without Python, and a backend may compute some steps at once
(`Backend.greedy_steps`). Each row accepts its tokens afterwards, one by one as after single steps; what
was computed after the token that ends a row is dropped. Small models gain most: their steps take less time than what
Python does around them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ..backends.backend import Draws, GreedyRun
from ..backends.loaded import LoadedModel
from ..backends.run import TokenLogits
from ..reference.cache import KVCache, TokenBatch
from .sequence import Continuation, adapters_of

MOST_STEPS = 4  # a row's tokens come in groups of at most so many
MOST_S = 0.02  # and a group takes at most about this long, for readers of streams


def choose_steps(rows: Iterable[Continuation], step_s: float) -> int:
    """Number of steps to run without returning to Python, at least 1.   step_s: the time of the last step"""
    longest = 0
    for row in rows:
        if not row.decodes_plainly:
            return 1
        longest = max(longest, row.tokens_left)
    return max(1, min(MOST_STEPS, longest, int(MOST_S / max(step_s, 1e-6))))


def run_steps(
    model: LoadedModel, cache: KVCache, rows: Sequence[Continuation], steps: int, bell: np.ndarray
) -> Iterator[Sequence[TokenLogits]]:
    """Up to `steps` steps of rows that decode plainly.   -> step by step, the logit of each row's next token

    bell (1,) uint8: set to 1 by any thread, it ends the run after the present step. No step at all: take a single one.
    """
    batch = TokenBatch.of([(row.slot, row.computed, row.newest) for row in rows], range(len(rows)))
    left = np.array([row.tokens_left for row in rows], dtype=np.int64)
    ends = np.array(sorted(frozenset[int]().union(*(row.request.end_tokens for row in rows))), dtype=np.int64)
    draws = None
    if any(row.request.params.temperature > 0 for row in rows):
        rules = [row.request.draw_rule for row in rows]
        uniforms = np.array([row.next_uniforms(steps) for row in rows], dtype=np.float64)
        draws = Draws(np.array(rules, dtype=np.float64), np.ascontiguousarray(uniforms.T))
    return model.run_greedy(batch, cache, GreedyRun(steps, left, ends, bell, draws), adapters_of(rows))
