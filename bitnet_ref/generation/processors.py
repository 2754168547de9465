"""Rules that change logits before a token is chosen: penalties, biases, bans. A rule is a function.

    processor(token_ids (T,), logits (V,)) -> logits (V,)          token_ids: the prompt and the generated tokens

It keeps no state of the request, so any order, batch or beam may call it. A rule with a method `moves(token_ids)` names
all ids whose logits it may change; then the head need not compute the other logits (see `Rules`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ..backends.run import TokenLogits
from ..errors import GenerationError
from ..reference.layers import Floats
from ..tokenizers.vocabulary import SortedTokens
from .params import Processor, SamplingParams
from .string_search import StringSearch

Ids = NDArray[np.int64]
FEW_WORDS = 64  # which are looked for one by one in the vocabulary
MOST_STATES = 256  # of banned words, whose tokens are kept
LARGEST_LOGIT = float(np.finfo(np.float32).max)


class LogitsRule:
    """Base of rules that change the logits of the ids of `moves`; by default they make them impossible."""

    def moves(self, token_ids: Ids) -> Ids:
        raise NotImplementedError

    def change(self, token_ids: Ids, logits: Floats) -> Floats | float:
        """The new logits of the ids of `moves`.   logits (n,): the present ones"""
        return -np.inf

    def __call__(self, token_ids: Ids, logits: Floats) -> Floats:
        moved = self.moves(token_ids)
        if not len(moved):
            return logits
        out = logits.copy()
        out[moved] = self.change(token_ids, logits[moved])
        return out


@dataclass(frozen=True)
class RepetitionPenalty(LogitsRule):
    """Makes earlier tokens less likely (CTRL, arXiv 1909.05858): l / penalty if l > 0, else l * penalty."""

    penalty: float

    def moves(self, token_ids: Ids) -> Ids:
        return np.unique(token_ids)

    def change(self, token_ids: Ids, logits: Floats) -> Floats:
        return np.where(logits > 0, logits / self.penalty, logits * self.penalty)


@dataclass(frozen=True)
class CountPenalties(LogitsRule):
    """l - presence - frequency * (times generated), for tokens after the prompt of `prompt_tokens` (OpenAI, vLLM)."""

    presence: float
    frequency: float
    prompt_tokens: int

    def moves(self, token_ids: Ids) -> Ids:
        return np.unique(token_ids[self.prompt_tokens :])

    def change(self, token_ids: Ids, logits: Floats) -> Floats:
        _, counts = np.unique(token_ids[self.prompt_tokens :], return_counts=True)
        return logits - (self.presence + self.frequency * counts).astype(logits.dtype)


class LogitBias(LogitsRule):
    """l + bias[id]."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self.ids, self.biases = np.array(list(bias), dtype=np.int64), np.array(list(bias.values()), dtype=np.float64)

    def moves(self, token_ids: Ids) -> Ids:
        return self.ids

    def change(self, token_ids: Ids, logits: Floats) -> Floats:
        return logits + self.biases.astype(logits.dtype)


class MinTokens(LogitsRule):
    """No end token before `min_tokens` new ones."""

    def __init__(self, min_tokens: int, end_tokens: Iterable[int], prompt_tokens: int) -> None:
        self.end_tokens = np.array(sorted(end_tokens), dtype=np.int64)
        self.length = prompt_tokens + min_tokens

    def moves(self, token_ids: Ids) -> Ids:
        return self.end_tokens if len(token_ids) < self.length else self.end_tokens[:0]


class BannedWords(LogitsRule):
    """No token that would complete one of `words` after the prompt, however the text is split into tokens.

    Words and tokens are compared as bytes. A word is completed by a token that contains it, or by one that begins with
    the rest of it when the text ends with its beginning. (transformers and vLLM compare token ids, so another
    tokenization of the same string passes them.)
    """

    def __init__(self, words: Sequence[str], vocabulary: SortedTokens, prompt_tokens: int) -> None:
        self.prompt_tokens, self._tokens, self._order = prompt_tokens, vocabulary.tokens, vocabulary.order
        encoded = [word.encode() for word in dict.fromkeys(words)]
        self._search = StringSearch(encoded)
        if len(encoded) <= FEW_WORDS:
            containing = {token for word in encoded for token in vocabulary.containing(word)}
        else:
            containing = {token for token, data in enumerate(vocabulary.tokens) if self._search.ends(0, data)[1]}
        self._longest = max(map(len, vocabulary.tokens), default=0)
        self._spans = self._complete_words(encoded, vocabulary)
        self._completing = {0: np.array(sorted(containing), dtype=np.int64)}  # by states that were met
        self._seen, self._states = np.empty(0, dtype=np.int64), [0]

    def _complete_words(self, words: Sequence[bytes], vocabulary: SortedTokens) -> dict[int, list[tuple[int, int]]]:
        """For each state that is the beginning of words: where in the vocabulary's order are the tokens that begin with
        the rest of one."""
        spans: dict[int, list[tuple[int, int]]] = {}
        for word in words:
            first = max(1, len(word) - self._longest)  # a token is no longer than that
            state = self._search.advance(0, word[:first])
            for length in range(first, len(word)):
                start, stop = vocabulary.span(word[length:])
                if start < stop:
                    spans.setdefault(state, []).append((start, stop))
                state = self._search.advance(state, word[length : length + 1])
        return spans

    @classmethod
    def of(cls, words: Sequence[str], vocabulary: SortedTokens, prompt_tokens: int) -> BannedWords:
        """The same; the vocabulary is searched once for requests in a row that ban the same words."""
        last, rule = _LAST_RULES.get(vocabulary, (None, None))
        if rule is None or last != words:
            rule = cls(words, vocabulary, prompt_tokens)
            _LAST_RULES[vocabulary] = words, rule
        rule = rule.copy()
        rule.prompt_tokens, rule._completing = prompt_tokens, {0: rule._completing[0]}
        return rule

    def copy(self) -> BannedWords:
        """A rule for another text: each remembers the text that it was asked about last."""
        other = copy.copy(self)
        other._seen, other._states = self._seen[:0], [0]
        return other

    def moves(self, token_ids: Ids) -> Ids:
        new = token_ids[self.prompt_tokens :]
        known = min(len(new), len(self._seen))
        different = np.flatnonzero(new[:known] != self._seen[:known])
        if len(different):
            known = int(different[0])
        del self._states[known + 1 :]
        for token in new[known:].tolist():
            data = self._tokens[token] if token < len(self._tokens) else b""
            self._states.append(self._search.advance(self._states[-1], data))
        self._seen = new.copy()
        return self._completing_tokens(self._states[-1])

    def _completing_tokens(self, state: int) -> Ids:
        """The tokens that complete a word after a text in this state: those for the longest beginning of a word with
        which the text ends, and for each shorter one."""
        chain = []
        while (known := self._completing.get(state)) is None:
            chain.append(state)
            state = self._search.shorter[state]
        if len(self._completing) > MOST_STATES:
            self._completing = {0: self._completing[0]}  # other copies keep theirs
        for each in reversed(chain):
            if each in self._spans:
                known = np.unique(np.concatenate([known, *(self._order[a:b] for a, b in self._spans[each])]))
            self._completing[each] = known
        return known


_LAST_RULES: WeakKeyDictionary[SortedTokens, tuple[Sequence[str], BannedWords]] = WeakKeyDictionary()


class Rules:
    """The processors of one request, in order, applied to all logits or to those that were computed."""

    def __init__(self, processors: Sequence[Processor]) -> None:
        self.processors = tuple(processors)

    @classmethod
    def of(
        cls, params: SamplingParams, prompt_tokens: int, end_tokens: Iterable[int], text_rules: Sequence[Processor]
    ) -> Rules:
        """The rules of the parameters, in transformers' order; `text_rules`: those that need the tokenizer."""
        rules: list[Processor] = []
        if params.logit_bias:
            rules.append(LogitBias(params.logit_bias))
        if params.repetition_penalty != 1:
            rules.append(RepetitionPenalty(params.repetition_penalty))
        if params.presence_penalty or params.frequency_penalty:
            rules.append(CountPenalties(params.presence_penalty, params.frequency_penalty, prompt_tokens))
        if params.min_tokens:
            rules.append(MinTokens(params.min_tokens, end_tokens, prompt_tokens))
        return cls([*rules, *text_rules, *params.processors])

    def moved(self, token_ids: Ids) -> Ids | tuple[()] | None:
        """The ids whose logits the rules may change; None when that may be any."""
        moved = []
        for processor in self.processors:
            if (moves := getattr(processor, "moves", None)) is None:
                return None
            ids = np.asarray(moves(token_ids))
            moved.append(ids if ids.size else np.empty(0, dtype=np.int64))  # [] has float64
        return np.unique(np.concatenate(moved)) if moved else ()

    def apply(self, token_ids: Ids, logits: Floats) -> Floats:
        """All rules on all logits.   (V,) -> (V,).  Raises GenerationError for a rule that returns something else."""
        for processor in self.processors:
            moved = np.asarray(processor(token_ids, logits))
            if moved is logits and isinstance(processor, LogitsRule):
                continue  # it changes none
            if moved.shape != logits.shape or not np.issubdtype(moved.dtype, np.floating):
                raise GenerationError(
                    f"processor {_name(processor)}: expected logits {logits.shape} of floats, "
                    f"got {moved.dtype.name} {moved.shape}"
                )
            largest = moved.max()  # NaN, if there is one
            if not -LARGEST_LOGIT <= largest <= LARGEST_LOGIT:
                wrong = "-inf for every token" if largest == -np.inf else f"{largest:+g}".replace("+nan", "NaN")
                raise GenerationError(f"processor {_name(processor)}: expected logits to choose from, got {wrong}")
            logits = moved
        return logits

    def apply_among(self, token_ids: Ids, logits: TokenLogits) -> Floats:
        """All rules on the k + (ids moved) largest logits and all moved ones.   -> `values` (n,), with the k largest"""
        if logits.complete or not self.processors:
            return self.apply(token_ids, logits.values)
        whole = np.full(logits.vocab_size, -np.inf, dtype=logits.values.dtype)
        whole[logits.ids] = logits.values
        return self.apply(token_ids, whole)[logits.ids]


def _name(processor: Any) -> str:
    return getattr(processor, "__name__", type(processor).__name__)
