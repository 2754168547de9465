"""`run`: the only door to a pass. Logits, text, profiles, benchmarks, checks and comparisons all come through here.

`run_greedy` is the same for several passes in a row, where a backend can do without Python between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import BackendUnavailable, NumericsError, OutOfMemory
from ..reference.cache import KVCache, TokenBatch
from ..reference.config import ModelConfig
from ..reference.layers import Array, Floats, softcap
from ..reference.weights import ModelWeights
from .backend import Backend, GreedyRun, HeadNeed, HeadRows, Ids
from .observe import observe
from .record import FiniteCheck

Input = tuple[int, int, NDArray[np.int64]]  # slot, position of the first token, token ids

SMALL = 4096  # numbers


class TokenLogits:
    """One token's logits: those that were asked for, and on demand all of them.

    is_choice: the only one is that of the next token, which the backend has chosen.
    """

    __slots__ = ("_bounds", "computed", "head", "hidden", "ids", "is_choice", "values", "vocab_size")

    def __init__(
        self,
        rows: HeadRows,
        vocab_size: int,
        head: Callable[[Floats], Floats],
        hidden: Floats | None = None,
        computed: int | None = None,
        is_choice: bool = False,
    ) -> None:
        """head: the whole head, hidden states (n, D) -> logits (n, V).  hidden (D,): needed unless rows are all.
        computed: how many logits the head computed, if more than those of `rows`."""
        self.ids, self.values, self._bounds = rows  # (n,) ascending, (n,)
        self.vocab_size, self.head, self.hidden, self.is_choice = vocab_size, head, hidden, is_choice
        self.computed = len(self.ids) if computed is None else computed

    def __repr__(self) -> str:
        return f"<TokenLogits: {len(self.ids)} of {self.vocab_size}>"

    @property
    def complete(self) -> bool:
        """Whether `values` holds all logits, in the order of ids."""
        return len(self.ids) == self.vocab_size

    def all(self) -> Floats:
        """Every logit, computed now if it was not asked for.   -> (V,)"""
        if self.complete:
            return self.values
        assert self.hidden is not None
        row: Floats = self.head(self.hidden[None])[0]
        return row

    def rest(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Lower and upper bounds of the logits that are not in `values`.   -> (V - n,) both"""
        assert self._bounds is not None
        others = np.ones(self.vocab_size, dtype=np.bool_)
        others[self.ids] = False
        return self._bounds[0][others], self._bounds[1][others]


@dataclass(frozen=True, eq=False)
class Logits:
    """The logits of one pass, one `TokenLogits` for each wanted token."""

    tokens: list[TokenLogits]
    vocab_size: int

    def all(self) -> Floats:
        """Every logit of every wanted token.   -> (wanted, V)"""
        if not self.tokens:
            return np.empty((0, self.vocab_size), dtype=np.float32)
        whole = self.tokens[0].values.base  # the tokens of a pass that computed all logits are the rows of one matrix
        if whole is not None and whole.shape == (len(self.tokens), self.vocab_size):
            return whole
        return np.stack([token.all() for token in self.tokens])


def run(
    be: Backend,
    w: ModelWeights,
    cfg: ModelConfig,
    batch: TokenBatch,
    cache: KVCache,
    top: Sequence[tuple[int | None, Ids] | None] | None = None,
    path: str | None = None,
) -> Logits:
    """One pass over the batch; the cache gains its keys and values.

    top: for each wanted token (k, also): only its k largest logits (None: all) and those of the ids `also` matter. The
        backend may then compute fewer rows of the head. A None among them: nothing yet, because `TokenLogits` computes
        it on demand. None: all logits of all wanted tokens.
    path: one of `be.paths`. None takes the fastest that applies.

    Raises NumericsError that names the first tensor with NaN or Inf. ShapeError, OutOfMemory, DeviceError,
    BackendUnavailable for a path that the backend does not have.
    """
    check_path(be, path)
    with _one_pass(be, w, cfg, batch, cache):
        x = be.hidden(w, cfg, batch, cache, path)
        if top is None:
            hidden, rows = None, Backend.head_rows(be, x, w.lm_head, [HeadNeed()] * x.shape[0])
        else:
            rows = head_rows(be, x, w, top)
            hidden = be.to_host(x)
        if cfg.logit_softcap is not None:
            rows = [each._replace(values=softcap(each.values, cfg.logit_softcap)) for each in rows]
        _require_finite([row.values for row in rows])
        if hidden is not None:
            _require_finite([hidden])
    vocab_size, states = cfg.vocab_size, [None] * len(rows) if hidden is None else hidden
    head = whole_head(be, w, cfg)
    tokens = [TokenLogits(row, vocab_size, head, state) for row, state in zip(rows, states, strict=True)]
    return Logits(tokens, vocab_size)


def run_hidden(be: Backend, w: ModelWeights, cfg: ModelConfig, batch: TokenBatch, cache: KVCache) -> Floats:
    """One pass without the head: the final hidden states (wanted, D). Raises what `run` raises."""
    with _one_pass(be, w, cfg, batch, cache):
        x = be.to_host(be.hidden(w, cfg, batch, cache, None))
        _require_finite([x])
    return x


@contextmanager
def _one_pass(be: Backend, w: ModelWeights, cfg: ModelConfig, batch: TokenBatch, cache: KVCache) -> Iterator[None]:
    """Where a pass is computed. A NumericsError in it becomes the one that names the tensor, no memory OutOfMemory."""
    # NumPy's warnings about overflow would only repeat what the logits show, and the error then names the tensor.
    with np.errstate(all="ignore"), be.running():
        try:
            yield
        except NumericsError:
            raise first_non_finite(be, w, cfg, batch, cache) from None
        except MemoryError as error:
            reason = str(error) or "no memory"
            raise OutOfMemory(f"a pass of {len(batch)} tokens: {reason}; compute fewer tokens at a time") from error


def _require_finite(arrays: Sequence[Array]) -> None:
    """Raises NumericsError, which `_one_pass` replaces by one that names the tensor."""
    if not all_finite(arrays):
        raise NumericsError("NaN or Inf in a result")


def whole_head(be: Backend, w: ModelWeights, cfg: ModelConfig) -> Callable[[Floats], Floats]:
    """The head as a function of NumPy arrays, hidden states (n, D) -> logits (n, V)."""

    def head(x: Floats) -> Floats:
        with be.running():
            logits = be.to_host(be.lm_head(be.from_host(x), w.lm_head))
        return logits if cfg.logit_softcap is None else softcap(logits, cfg.logit_softcap)

    return head


def run_greedy(
    be: Backend, w: ModelWeights, cfg: ModelConfig, batch: TokenBatch, cache: KVCache, steps: GreedyRun
) -> Iterator[list[TokenLogits]]:
    """Several passes in a row; see `Backend.greedy_steps`.   -> the logit of each chosen token, pass by pass

    No pass at all where they must be taken one by one, by `run`: the backend has no other way, the last pass was the
    first of its kind, rounding could decide a draw, or memory runs out or the next one meets NaN or Inf, which `run`
    then raises.
    """
    with np.errstate(all="ignore"), be.running():
        try:
            computed = be.greedy_steps(w, cfg, batch, cache, steps)
        except (MemoryError, NumericsError):
            computed = None
    if computed is None:
        return iter(())
    head, size = whole_head(be, w, cfg), cfg.vocab_size

    def choices(ids: NDArray[np.int64], values: Floats, states: Floats) -> list[TokenLogits]:
        rows = [HeadRows(ids[i : i + 1], values[i : i + 1]) for i in range(len(ids))]
        return [TokenLogits(row, size, head, state, size, True) for row, state in zip(rows, states, strict=True)]

    return map(choices, *computed)


def head_rows(be: Backend, x: Floats, w: ModelWeights, top: Sequence[tuple[int | None, Ids] | None]) -> list[HeadRows]:
    """The logits that each row of x (wanted, D) needs: none where `top` has None."""
    asked = [row for row, need in enumerate(top) if need is not None]
    needs = [HeadNeed(*need) for need in top if need is not None]
    if len(asked) < len(top) and asked:
        x = be.take_rows(x, be.from_host(np.array(asked, dtype=np.int64)))
    rows = be.head_rows(x, w.lm_head, needs) if asked else []
    nothing = HeadRows(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32))
    computed = iter(rows)
    return [nothing if need is None else next(computed) for need in top]


def check_path(be: Backend, path: str | None) -> None:
    """Raises BackendUnavailable for a path that the backend does not have."""
    if path is not None and path not in be.paths:
        raise BackendUnavailable(f"backend {be.name!r} has no path {path!r}; there are: {', '.join(be.paths)}")


def all_finite(arrays: Sequence[Array]) -> bool:
    """Whether no array holds NaN or Inf. Arrays that are rows of one matrix are checked as that matrix, and other small
    ones together."""
    if len(arrays) == 1:
        return bool(np.isfinite(arrays[0]).all())
    whole = arrays[0].base if arrays else None
    are_rows = whole is not None and whole.dtype == arrays[0].dtype and whole.size == sum(a.size for a in arrays)
    if whole is not None and are_rows and all(array.base is whole for array in arrays):
        arrays = [whole]
    elif len(arrays) > 1 and max(array.size for array in arrays) <= SMALL:
        arrays = [np.concatenate([array.ravel() for array in arrays])]
    return all(bool(np.isfinite(array).all()) for array in arrays)


def first_non_finite(
    be: Backend, w: ModelWeights, cfg: ModelConfig, batch: TokenBatch, cache: KVCache
) -> NumericsError:
    """Run the batch again op by op and return the error that names the first tensor with NaN or Inf."""
    check = FiniteCheck(be, cfg)
    try:
        observed = observe(be, check)
        logits = observed.lm_head(observed.hidden(w, cfg, batch, cache), w.lm_head)
        check.keep("logits", logits)
    except NumericsError as error:
        if error.tensor is not None:
            return error
        return NumericsError(f"{check.current} is the first bad tensor: {error}", tensor=check.current)
    return NumericsError("the logits hold NaN or Inf, but a second run of these tokens does not: is the memory sound?")


def split_into_passes(inputs: Sequence[Input], tokens: int) -> Iterator[tuple[list[Input], list[int]]]:
    """Split inputs into passes of at most `tokens`, which bounds the memory of a long prompt.

    Each pass is a pair: its parts, and the indices of the parts that end an input.
    """
    parts: list[Input] = []
    ending: list[int] = []
    room = tokens
    for slot, start, ids in inputs:
        done = 0
        while done < len(ids):
            piece = ids[done : done + room]
            if done + len(piece) == len(ids):
                ending.append(len(parts))
            parts.append((slot, start + done, piece))
            done, room = done + len(piece), room - len(piece)
            if room == 0:
                yield parts, ending
                parts, ending, room = [], [], tokens
    if parts:
        yield parts, ending
