"""Text that must match a JSON schema, a regular expression, one of some strings, or a grammar.

llguidance follows the text byte by byte and says which tokens may come next; the rest become impossible. It is an
optional package: pip install 'bitnet-ref[constrained]'.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ..errors import GenerationError

if TYPE_CHECKING:
    from ..tokenizers import Tokenizer
    from ..tokenizers.vocabulary import Vocabulary


class Constraint:
    """A processor (see `processors`) that lets only such tokens through as keep the text within the grammar.

    It remembers where in the grammar the last ids that it was asked about stand, to go on from there; other ids are
    followed from the start, so the answer depends on the ids alone. Not for several threads at a time.
    """

    def __init__(self, guide: str, value: Any, vocabulary: Vocabulary, prompt_tokens: int) -> None:
        """guide, value: one of `params.GUIDES` and what was given for it."""
        self.guide, self.prompt_tokens = guide, prompt_tokens
        grammar_vocabulary = _llguidance_vocabulary(vocabulary)
        self.end_tokens = grammar_vocabulary.end_tokens
        self._matcher = grammar_vocabulary.matcher(guide, value)
        self._seen: list[int] = []

    def fresh(self) -> Constraint:
        """Another one for the same grammar, which is not compiled again. Of one that was not asked yet."""
        other = copy.copy(self)
        other._matcher, other._seen = self._matcher.deep_copy(), []
        return other

    def complete(self, token_ids: NDArray[np.int64]) -> bool:
        """Whether the text matches and nothing can be added to it."""
        return bool(self._at(token_ids).is_stopped())

    def __call__(self, token_ids: NDArray[np.int64], logits: NDArray) -> NDArray:
        matcher = self._at(token_ids)
        allowed = np.zeros(len(logits), dtype=np.bool_)
        if matcher.is_stopped():  # only an end token is left
            allowed[[token for token in self.end_tokens if token < len(logits)]] = True
        else:
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            bits = np.unpackbits(mask, bitorder="little")[: len(logits)].astype(np.bool_)
            allowed[: len(bits)] = bits
            self._check(matcher)
        if not allowed.any():
            raise GenerationError(f"{self.guide}: no token of the vocabulary can go on from here, nor end the text")
        return np.where(allowed, logits, np.asarray(-np.inf, dtype=logits.dtype))

    def _at(self, token_ids: NDArray[np.int64]) -> Any:
        """The matcher after these ids."""
        new = token_ids[self.prompt_tokens :].tolist()
        common = next((i for i, (a, b) in enumerate(zip(new, self._seen, strict=False)) if a != b), None)
        if common is None:
            common = min(len(new), len(self._seen))
        if common < len(self._seen):
            self._matcher.reset()
            common, self._seen = 0, []
        for token in new[common:]:
            if not self._matcher.is_stopped():  # after the end of the text there is nothing to follow
                self._matcher.consume_token(token)
                self._check(self._matcher)
            self._seen.append(token)
        return self._matcher

    def _check(self, matcher: Any) -> None:
        if matcher.is_error():
            raise GenerationError(f"{self.guide}: {_first_line(matcher.get_error())}")


class LLVocabulary:
    """A tokenizer's tokens as llguidance wants them. Holds no request's state: one serves them all."""

    def __init__(self, tokenizer: Tokenizer, tokens: Sequence[bytes], vocab_size: int) -> None:
        """tokens: their bytes, b"" for a special one. vocab_size: the model's, which may be larger."""
        library = _library()
        self.end_tokens = list(tokenizer.eos_ids)
        # llguidance marks special tokens with a byte that no text has; their names keep them apart in messages.
        specials = [token for token, data in enumerate(tokens) if not data]
        named = [data or b"\xff<%d>" % token for token, data in enumerate(tokens)]
        named += [b"\xff<%d>" % token for token in range(len(tokens), vocab_size)]
        specials += range(len(tokens), vocab_size)

        class Wrapped:
            eos_token_id = self.end_tokens[0] if self.end_tokens else (specials[0] if specials else 0)
            bos_token_id = tokenizer.bos_id
            special_token_ids = specials

            def __call__(self, text: str | bytes) -> list[int]:
                return spelled(tokenizer, tokens, text.decode(errors="replace") if isinstance(text, bytes) else text)

        Wrapped.tokens = named  # type: ignore[attr-defined]
        self._library = library
        self._tokenizer = library.LLTokenizer(
            library.TokenizerWrapper(Wrapped()), eos_token=self.end_tokens or None, slices=None
        )

    def matcher(self, guide: str, value: Any) -> Any:
        """At the start of the text. Raises GenerationError for a schema, expression or grammar that is none."""
        maker = self._library.LLMatcher
        try:
            if guide == "guided_json":
                schema = dict(value) if isinstance(value, Mapping) else {} if value is True else value
                grammar = maker.grammar_from_json_schema(schema if isinstance(schema, str) else json.dumps(schema))
            elif guide == "guided_choice":
                grammar = maker.grammar_from_lark("start: " + " | ".join(map(json.dumps, value)))
            else:
                from_text = maker.grammar_from_regex if guide == "guided_regex" else maker.grammar_from_lark
                grammar = from_text(value)
        except (ValueError, TypeError) as problem:
            raise GenerationError(f"{guide}: {_first_line(str(problem))}") from problem
        matcher = maker(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise GenerationError(f"{guide}: {_first_line(matcher.get_error())}")
        return matcher


_llguidance_vocabularies: WeakKeyDictionary[Vocabulary, LLVocabulary] = WeakKeyDictionary()


def _llguidance_vocabulary(vocabulary: Vocabulary) -> LLVocabulary:
    """The vocabulary for llguidance, built once per model."""
    if vocabulary not in _llguidance_vocabularies:
        built = LLVocabulary(vocabulary.tokenizer, vocabulary.tokens, vocabulary.vocab_size)
        _llguidance_vocabularies[vocabulary] = built
    return _llguidance_vocabularies[vocabulary]


def spelled(tokenizer: Tokenizer, tokens: Sequence[bytes], text: str) -> list[int]:
    """Token ids of a text in the middle of another, whose bytes are exactly its own: llguidance takes the tokens of
    text that must come from here. SentencePiece puts a space before a text, so a mark goes there first."""
    for before in ("", "\x02"):
        ids = tokenizer.encode(before + text, add_special_tokens=False)
        for start in range(min(len(ids), 3)):
            if b"".join(tokens[token] for token in ids[start:]) == text.encode():
                return ids[start:]
    ids, rest = [], text.encode()
    while fitting := [token for token, data in enumerate(tokens) if data and rest.startswith(data)]:
        ids.append(max(fitting, key=lambda token: len(tokens[token])))  # a tokenizer that changes texts: the longest
        rest = rest[len(tokens[ids[-1]]) :]
    return ids


def _library() -> Any:
    try:
        import llguidance
    except ImportError as problem:
        raise GenerationError(
            "guided_json, guided_regex, guided_choice and guided_grammar need llguidance: "
            "pip install 'bitnet-ref[constrained]'"
        ) from problem
    return llguidance


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "refused without a reason")
