"""Text that must match a JSON schema, a regular expression, one of several strings, or a grammar.

llguidance follows the text byte by byte and tells which tokens may come next; all others become impossible. It is an
optional package: pip install 'bitnet-ref[constrained]'.
"""

from __future__ import annotations

import copy
import json
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ..errors import GenerationError
from ..reference.layers import Floats
from ..tokenizers.base import Tokenizer
from ..tokenizers.vocabulary import Vocabulary
from .constraint_limits import check_choices, check_grammar, check_regex, check_size, read_schema, run_with_stack
from .guide_helper import STEP_S, split_by_longest, wrap_vocabulary
from .params import GUIDES

_NO_OPTION = "Enable 'coerce_one_of' option to approximate oneOf with anyOf"  # in a message of llguidance
MAX_MESSAGE = 400  # characters of a message of llguidance


class Constraint:
    """A processor (see `processors`) that allows only tokens with which the text can still match.

    It continues from the ids of the previous call; other ids are followed from the start, so the result depends on the
    ids alone. Not thread-safe.
    """

    def __init__(
        self, guide: str, value: Any, vocabulary: Vocabulary, prompt_tokens: int, after: Sequence[int] = ()
    ) -> None:
        """guide, value: one of `params.GUIDES` and its value. after: as `guide_after`."""
        if vocabulary not in _LL_VOCABULARIES:
            _LL_VOCABULARIES[vocabulary] = LLVocabulary(vocabulary)
        ll_vocabulary = _LL_VOCABULARIES[vocabulary]
        self.guide, self.prompt_tokens, self.end_tokens = guide, prompt_tokens, ll_vocabulary.end_tokens
        self._matcher = ll_vocabulary.matcher(guide, value)
        self._seen: list[int] = []
        self._after = list(after)
        self._searched = prompt_tokens  # no `after` begins before it

    def copy(self) -> Constraint:
        """A copy of an unused constraint; the grammar is not compiled again."""
        other = copy.copy(self)
        other._matcher, other._seen = self._matcher.deep_copy(), []  # `_searched` is that of an unused one
        return other

    def complete(self, token_ids: NDArray[np.int64]) -> bool:
        """Whether the text matches and nothing can be added to it."""
        if not self._has_begun(token_ids):
            return False
        return bool(self._advance(token_ids).is_stopped())

    def _has_begun(self, token_ids: NDArray[np.int64]) -> bool:
        """Whether the tokens of `after` are there; then `prompt_tokens` counts until their end."""
        size = len(self._after)
        if not size:
            return True
        while self._searched + size <= len(token_ids):
            if token_ids[self._searched : self._searched + size].tolist() == self._after:
                self.prompt_tokens, self._after = self._searched + size, []
                return True
            self._searched += 1
        return False

    def __call__(self, token_ids: NDArray[np.int64], logits: Floats) -> Floats:
        if not self._has_begun(token_ids):
            return logits
        matcher = self._advance(token_ids)
        allowed = np.zeros(len(logits), dtype=np.bool_)
        if matcher.is_stopped():  # only an end token is left
            allowed[[token for token in self.end_tokens if token < len(logits)]] = True
        else:
            started_s = time.thread_time()
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            if (step_s := time.thread_time() - started_s) > STEP_S:  # the other requests wait for it
                message = f"a step took {step_s:.1f} s, and at most {STEP_S:g} s are allowed; use a simpler one"
                raise GenerationError(message, field=self.guide)
            bits = np.unpackbits(mask, bitorder="little")[: len(logits)]
            allowed[: len(bits)] = bits != 0
            _check(matcher, self.guide)
        if not allowed.any():
            raise GenerationError("no token of the vocabulary can continue or end the text here", field=self.guide)
        return np.where(allowed, logits, np.asarray(-np.inf, dtype=logits.dtype))

    def _advance(self, token_ids: NDArray[np.int64]) -> Any:
        new = token_ids[self.prompt_tokens :].tolist()
        if new[: len(self._seen)] != self._seen:
            self._matcher.reset()
            self._seen = []
        for token in new[len(self._seen) :]:
            if not self._matcher.is_stopped():
                self._matcher.consume_token(token)
                _check(self._matcher, self.guide)
        self._seen = new
        return self._matcher


class LLVocabulary:
    """A tokenizer's tokens in llguidance's form, shared by all requests."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._maker = _import_llguidance().LLMatcher
        tokens, self.end_tokens, bos = describe_vocabulary(vocabulary)
        # Without a reference to `vocabulary`, a weak key
        split = partial(tokenize, vocabulary.tokenizer, tokens, split_by_longest(tokens))
        self._tokenizer = wrap_vocabulary(tokens, self.end_tokens, bos, split)
        self._last: tuple[str, Any] = "", None  # the grammar that was compiled last, for all texts of a request

    def matcher(self, guide: str, value: Any) -> Any:
        """A matcher at the start of the text. Raises GenerationError for an invalid schema, expression or grammar, and
        for one that is too large (see `constraint_limits`)."""
        grammar, (last, matcher) = write_grammar(guide, value), self._last
        if matcher is None or grammar != last:
            matcher = run_with_stack(lambda: self._maker(self._tokenizer, grammar, log_level=0))
            _check(matcher, guide)
            self._last = grammar, matcher
        return matcher.deep_copy()


def describe_vocabulary(vocabulary: Vocabulary) -> tuple[list[bytes], list[int], int | None]:
    """(the bytes of each of the model's tokens, b"" for a special one; those that end a text; that of its beginning)"""
    tokenizer = vocabulary.tokenizer
    padding = [b""] * (vocabulary.vocab_size - len(vocabulary.tokens))
    return [*vocabulary.tokens, *padding], list(tokenizer.eos_ids), tokenizer.bos_id


def write_grammar(guide: str, value: Any) -> str:
    """llguidance's form of a guide. Raises GenerationError for one that is too large (see `constraint_limits`)."""
    maker = _import_llguidance().LLMatcher
    try:
        if guide == "guided_json":
            return str(maker.grammar_from_json_schema(read_schema({} if value is True else value)))
        if guide == "guided_choice":
            check_choices(value)
            return str(maker.grammar_from_lark("start: " + " | ".join(map(json.dumps, value))))
        if guide == "guided_regex":
            check_regex(value)
            return str(maker.grammar_from_regex(value))
        if _GBNF.search(value):
            value = write_lark(value)
        check_grammar(value)
        return str(maker.grammar_from_lark(value))
    except (ValueError, TypeError, RecursionError) as problem:
        raise GenerationError(first_line(str(problem)), field=guide) from problem


_GBNF = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


def write_lark(text: str) -> str:
    """A grammar in llama.cpp's GBNF as a Lark grammar. Raises GenerationError."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    check_size("guided_grammar", text)
    try:
        return str(gbnf_to_lark(text))
    except Exception as problem:  # of several kinds, IndexError and RecursionError among them
        message = f"the grammar in GBNF cannot be read: {first_line(str(problem))[:200]}"
        raise GenerationError(message, field="guided_grammar") from problem


def _import_llguidance() -> Any:
    try:
        import llguidance
    except ImportError as problem:
        raise GenerationError(
            f"{', '.join(GUIDES[:-1])} and {GUIDES[-1]} need llguidance: pip install 'bitnet-ref[constrained]'",
            mentions=GUIDES,
        ) from problem
    return llguidance


_LL_VOCABULARIES: WeakKeyDictionary[Vocabulary, LLVocabulary] = WeakKeyDictionary()  # one per model


def tokenize(tokenizer: Tokenizer, tokens: Sequence[bytes], split: Callable[[str], list[int]], text: str) -> list[int]:
    """Token ids whose bytes are exactly those of a text in the middle of another one. SentencePiece adds a space at the
    start of a text, so a marker is tried there; the last resort is `split`."""
    for marker in ("", "\x02"):
        ids = tokenizer.encode(marker + text, add_special_tokens=False)
        for start in range(min(len(ids), 3)):
            if b"".join(tokens[token] for token in ids[start:]) == text.encode():
                return ids[start:]
    return split(text)


def _check(matcher: Any, guide: str) -> None:
    if matcher.is_error():
        raise GenerationError(first_line(matcher.get_error()), field=guide)


def first_line(text: str) -> str:
    """The first line of a message of llguidance, which may quote the whole grammar, and the reason that follows it.

    >>> first_line("regex parse error:\\n    (\\n    ^\\nerror: unclosed group")
    'regex parse error: unclosed group'
    """
    line, *rest = text.strip().splitlines() or ["llguidance gives no reason"]
    if line.endswith(":"):
        line += next((each.removeprefix("error:") for each in rest if each.startswith("error:")), "")
    line = line.replace(_NO_OPTION, "Write anyOf").replace("NoExtensionBias", "no text matches it")
    return line if len(line) <= MAX_MESSAGE else line[:MAX_MESSAGE] + "..."
