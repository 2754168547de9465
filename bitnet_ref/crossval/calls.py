"""In which calls an engine computed the tokens of a run, and of which sequences: metadata of a trace, in words.

A run has one or more sequences, laid end to end in every tensor. Each was computed by one or more calls of the engine:
a prompt in one call and then a token at a time, or in pieces. The reference needs one pass for each sequence, as the
same tokens have the same tensors either way. So a difference is placed by the calls: "from the second call on".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..reference.layers import Array
from .metrics import tensor_of
from .names import LOGITS, SYNONYMS, is_by_head
from .types import Ints, Tensors, Tokens

Calls = tuple[int, ...]  # how many tokens of one sequence each call computed; () where it is not known
_SHOWN_CALLS = 6


def read_calls(metadata: Mapping[str, str], n_tokens: int) -> tuple[Calls, tuple[Calls, ...]]:
    """The lengths of the sequences of a trace, and the calls of each.

    Raises ValueError, with the key and what is wrong with its value, unless the numbers add up to the tokens.
    """
    lengths: Calls = (n_tokens,)
    if "sequences" in metadata:
        lengths = _counts("sequences", _list_of("sequences", metadata), 1)
        if sum(lengths) != n_tokens:
            raise ValueError("sequences", f"the sequences have {sum(lengths)} tokens together, token_ids {n_tokens}")
    if "calls" not in metadata:
        return lengths, ((),) * len(lengths)
    calls = _list_of("calls", metadata)
    if len(lengths) == 1 and not any(isinstance(call, list) for call in calls):
        by_call: list[Calls] = [(size,) for size in _counts("calls", calls, 1)]
    else:
        if not all(isinstance(call, list) and len(call) == len(lengths) for call in calls):
            raise ValueError("calls", f"expected of each call a list of its tokens of each of {len(lengths)} sequences")
        by_call = [_counts("calls", call, 0) for call in calls]
    sizes = tuple(tuple(size for size in column if size) for column in zip(*by_call, strict=True))
    if tuple(map(sum, sizes)) != lengths:
        raise ValueError("calls", f"the calls have {[sum(own) for own in sizes]} tokens, the run {list(lengths)}")
    return lengths, sizes


def _list_of(key: str, metadata: Mapping[str, str]) -> list[Any]:
    try:
        given = json.loads(metadata[key])
    except (ValueError, RecursionError) as problem:
        raise ValueError(key, "expected a JSON list of numbers of tokens") from problem
    if not isinstance(given, list) or not given:
        raise ValueError(key, "expected a JSON list of numbers of tokens")
    return given


def _counts(key: str, given: Sequence[Any], least: int) -> Calls:
    if not all(type(size) is int and least <= size < 2**31 for size in given):
        raise ValueError(key, f"expected numbers of tokens, each {least} to 2^31 - 1")
    return tuple(given)


def calls_metadata(calls: Sequence[Any] | None, sequences: Tokens | None) -> dict[str, str]:
    """The two keys of a trace's metadata, as `read_calls` reads them."""
    given = {"calls": calls, "sequences": sequences}
    return {key: json.dumps(value) for key, value in given.items() if value is not None}


class SequenceRun(Mapping[str, Array]):
    """One sequence of a trace that has several: its rows of every tensor, as a trace of it alone would have them.

    others: the tokens of the other sequences.
    """

    def __init__(self, trace: Any, index: int) -> None:
        ends = np.cumsum(trace.sequences).tolist()
        self.trace, self.index = trace, index
        self.rows = slice(ends[index] - trace.sequences[index], ends[index])
        ids = [trace.token_ids[end - size : end] for end, size in zip(ends, trace.sequences, strict=True)]
        self.token_ids: list[int] = ids.pop(index)
        self.others = ids
        self.calls: Calls = trace.sequence_calls[index]
        self.engine, self.engine_dtype, self.own_engine = trace.engine, trace.engine_dtype, trace.own_engine
        self.carries_inputs = trace.carries_inputs
        self.prompt = None  # The trace's prompt is one text for all sequences.

    def __getitem__(self, name: str) -> Array:
        array: Array = np.asarray(self.trace[name])
        n, count = len(self.trace.token_ids), len(self.trace.sequences)
        if not array.ndim:
            return array
        if count < n == count * len(self.token_ids):  # (B, T, ...), (B, H, T, T)
            place = -1 if is_by_head(name) else 1
            if array.ndim > 1 and array.shape[0] == count and array.shape[place] == len(self.token_ids):
                own: Array = array[self.index]
                return own
        if is_by_head(name):
            return array[..., self.rows, self.rows] if array.ndim > 1 else array
        if SYNONYMS.get(name, name) == LOGITS and array.size == count * array.shape[-1] and count != n:
            return array.reshape(count, -1)[self.index : self.index + 1]  # of the last tokens only
        axis = next((i for i, size in enumerate(array.shape[:2]) if size == n), 0)
        of_token = max(1, array.shape[axis] // n)  # rows: a norm over heads may have one for each
        rows = slice(self.rows.start * of_token, self.rows.stop * of_token)
        return array[(slice(None),) * axis + (rows,)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.trace)

    def __len__(self) -> int:
        return len(self.trace)


def token_count(run: Tensors) -> int:
    """The length of a run: of the first axis of a tensor that has no head axis before it."""
    return next((tensor_of(run, name).shape[0] for name in run if not is_by_head(name)), 0)


def call_of_tokens(calls: Calls) -> Ints:
    """The number of the call that computed each token, from 0.

    >>> call_of_tokens((3, 1, 1)).tolist()
    [0, 0, 0, 1, 2]
    """
    return np.repeat(np.arange(len(calls)), calls)


def start_of_tokens(calls: Calls) -> Ints:
    """The first token of the call that computed each token.

    >>> start_of_tokens((3, 2, 1)).tolist()
    [0, 0, 0, 3, 3, 5]
    """
    return np.repeat(np.cumsum((0, *calls[:-1])), calls)


def sizes_in_words(calls: Calls) -> str:
    """
    >>> sizes_in_words((16, 1, 1, 1))
    'calls of 16, 1, 1, 1 tokens'
    """
    shown = ", ".join(map(str, calls[:_SHOWN_CALLS])) + " ..." * (len(calls) > _SHOWN_CALLS)
    return f"calls of {shown} tokens" if len(calls) > 1 else f"one call of {calls[0]} tokens"


def placed_by_calls(token: int, calls: Calls) -> str:
    """Where among the calls a run is first wrong, at this token. "" for a run of one call.

    >>> placed_by_calls(16, (16, 1, 1))
    'first wrong from the second call on: the call of 16 tokens before it is right'
    >>> placed_by_calls(8, (4, 4, 9))
    'right for calls of up to 4 tokens, first wrong in call 3, of 9'
    >>> placed_by_calls(2, (4, 4))
    'wrong from the first call on, of 4 tokens, at its token 2'
    """
    if len(calls) < 2:
        return ""
    number, starts = int(call_of_tokens(calls)[token]), start_of_tokens(calls)
    within = token - int(starts[token])
    inside = f", at its token {within}" if within else ""
    if number == 0:
        return f"wrong from the first call on, of {calls[0]} tokens{inside}"
    if calls[number] > (most := max(calls[:number])):
        return f"right for calls of up to {most} tokens, first wrong in call {number + 1}, of {calls[number]}{inside}"
    if number == 1:
        return f"first wrong from the second call on{inside}: the call of {calls[0]} tokens before it is right"
    return f"first wrong in call {number + 1}, of {calls[number]}{inside}: the {number} calls before it are right"
