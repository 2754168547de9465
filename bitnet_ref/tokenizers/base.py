"""The public methods of every tokenizer: encode, decode, stop tokens, chat. Each kind overrides seven small methods.

Common to all kinds: checking text and ids, adding BOS and EOS, finding the tokens that end a reply, streaming.
Overridden: how plain text becomes ids, and what a token stands for.
"""

from __future__ import annotations

import hashlib
import operator
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, overload

from ..errors import ConfigWarning, TokenizerError, describe, printable
from ..system.json_file import json_hash
from ..system.lazy import lazy_property
from .files import check_unicode
from .settings import NAMED, TokenizerSettings
from .streaming import Detokenizer, StreamDecoder
from .templates.chat_template import BITNET_2B4T_TEMPLATE, compile_template, copy_messages

MAX_TOKEN_CHARACTERS = 1 << 14  # the longest published ones have about 500
MAX_DECODED_BYTES = 1 << 29
END_OF_TURN = "<|eot_id|>"  # of Llama 3 and BitNet 2B-4T: ends a turn in a chat, where eos_token does not


class Tokenizer(ABC):
    """Text to token ids and back.

    bos_id, pad_id: int or None. eos_ids: every token that ends a generation, in order of preference.
    vocab_size: one more than the largest id, added tokens included; a model's embedding may be larger (padding).
    """

    bos_id: int | None
    pad_id: int | None
    eos_ids: tuple[int, ...]
    vocab_size: int

    def __init__(self, settings: TokenizerSettings, path: str | os.PathLike[str] | None, vocabulary: bytes) -> None:
        """A kind calls this last, when its vocabulary is complete. vocabulary: the bytes of its file."""
        self._vocabulary_hash = hashlib.sha256(vocabulary).hexdigest()
        self.path = None if path is None else os.fspath(path)
        self._settings = settings
        self.bos_id = self._find_named("bos_token", settings.bos_token)
        if self.bos_id is None:
            own_bos, _ = self._own_ids()
            self.bos_id = self._find_number("bos_token_id", settings.bos_id) if own_bos is None else own_bos
        self.pad_id = None if settings.pad_token is None else self.token_to_id(settings.pad_token)
        if self.pad_id is None:
            self.pad_id = settings.pad_id  # models write any id here, and nothing reads the token
        self.eos_ids = self._find_eos_ids()
        self._prefix, self._suffix = self._find_affixes()

    # -- what a kind provides ------------------------------------------------------------------------------------------

    @abstractmethod
    def _encode_plain(self, text: str) -> list[int]:
        """Ids of checked text, with special-token strings parsed, without BOS and EOS."""

    def _encode_plain_batch(self, texts: list[str]) -> list[list[int]]:
        return [self._encode_plain(text) for text in texts]

    @abstractmethod
    def _token(self, token: int) -> str | None:
        """The token as the vocabulary writes it; None for an id that is not in the vocabulary."""

    @abstractmethod
    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it ("\\u2581the", "<s>"), or None."""

    @abstractmethod
    def _is_special(self, token: int) -> bool: ...

    @abstractmethod
    def _token_bytes(self, token: int) -> bytes:
        """The bytes of a token that is not special."""

    @abstractmethod
    def _detokenizer(self) -> Detokenizer:
        """A new detokenizer, whose outputs, joined, are the decoded text."""

    def _own_ids(self) -> tuple[int | None, int | None]:
        """BOS and EOS in the vocabulary file, if the format has them."""
        return None, None

    def _own_affixes(self) -> tuple[list[int], list[int]]:
        """The ids that the vocabulary file puts before and after a text."""
        return [], []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.

        Strings of special tokens in the text ("<s>") become those tokens, as in Hugging Face. With
        `add_special_tokens`, BOS (and EOS) are put around the ids where the tokenizer's files say so; a text that
        already begins with BOS does not get it twice. Raises TokenizerError if `text` is no str, or has no UTF-8 form.
        """
        ids = self._encode_plain(self._check_text(text, "text"))
        return self._add_affixes(ids) if add_special_tokens else ids

    def encode_batch(self, texts: Iterable[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`[encode(text) for text in texts]`, but faster. Raises TokenizerError as `encode`, with the text's index."""
        if isinstance(texts, (str, bytes)) or not isinstance(texts, Iterable):
            raise TokenizerError(f"encode_batch expects a list of str, got {type(texts).__name__}")
        batch = self._encode_plain_batch([self._check_text(text, f"texts[{n}]") for n, text in enumerate(texts)])
        return [self._add_affixes(ids) for ids in batch] if add_special_tokens else batch

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids` (any integers; a NumPy array too). Bytes that are no UTF-8 become U+FFFD.

        With `skip_special_tokens=False` special tokens show as their strings. Raises TokenizerError for an id that is
        no integer or not in the vocabulary, naming it and its index.
        """
        detokenizer, kept = self._detokenizer(), self._check_ids(ids)
        self._check_decoded(kept)
        if skip_special_tokens:
            kept = [token for token in kept if not self._is_special(token)]
        return "".join([detokenizer.push(token) for token in kept]) + detokenizer.flush()

    def stream_decoder(self, skip_special_tokens: bool = True, shown: Collection[int] = ()) -> StreamDecoder:
        """A decoder of generated tokens, one at a time; see `StreamDecoder`. shown: special tokens that have text."""

        def skips(token: int) -> bool:
            return skip_special_tokens and self._is_special(token) and token not in shown

        return StreamDecoder(self._detokenizer(), self._check_id, skips)

    @property
    def suffix(self) -> tuple[int, ...]:
        """The ids that `encode` puts after a text."""
        return tuple(self._suffix)

    def has_id(self, token_id: int) -> bool:
        """Whether the vocabulary, which may have holes, has this id."""
        return 0 <= token_id < self.vocab_size and self._token(token_id) is not None

    def id_to_token(self, token_id: int) -> str:
        """The token as the vocabulary writes it. Raises TokenizerError if there is none."""
        token = self._token(self._check_id(token_id, None))
        assert token is not None
        return token

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token stands for inside a text (a leading space included); b"" for a special token."""
        token = self._check_id(token_id, None)
        return b"" if self._is_special(token) else self._token_bytes(token)

    def is_special(self, token_id: int) -> bool:
        """Whether `decode` leaves the token out by default. Raises TokenizerError for an id not in the vocabulary."""
        return self._is_special(self._check_id(token_id, None))

    @lazy_property
    def special_ids(self) -> tuple[int, ...]:
        """The ids that `decode` leaves out by default."""
        return tuple(token for token in range(self.vocab_size) if self._is_special(token))

    @property
    def chat_template(self) -> str | None:
        """The Jinja source that `apply_chat_template` uses: the files' own, or 2B-4T's for its family, or None."""
        if self._settings.chat_template is not None or self._settings.template_names:
            return self._settings.chat_template
        return BITNET_2B4T_TEMPLATE if self.token_to_id(END_OF_TURN) is not None else None

    def template_for(self, with_tools: bool) -> str | None:
        """The template of a conversation: with tools the one named "tool_use", where the files have one."""
        named = self._settings.tool_template if with_tools else None
        return self.chat_template if named is None else named

    def check_default_template(self) -> None:
        """Raise TokenizerError where the files name chat templates, but none is the default one."""
        if self.chat_template is None and self._settings.template_names:
            names = ", ".join(sorted(self._settings.template_names))[:200]
            message = f"none of the templates is named 'default': {names}"
            raise TokenizerError(message, path=self._settings.path, field="chat_template")

    @lazy_property
    def digest(self) -> str:
        """The hash of what decides ids and texts: the vocabulary's file, added, special and end tokens, and what is put
        around a text. Chat templates and recommendations have no part in it."""
        settings = self._settings
        facts = {
            "vocabulary": self._vocabulary_hash,
            "ids": [self.bos_id, self.eos_ids, self._prefix, self._suffix],
            "legacy": settings.legacy,
            "added": [asdict(token) for token in settings.added_tokens],
            **({"flags_count": True} if settings.flags_count else {}),
        }
        return json_hash(facts)

    @property
    def recommended_sampling(self) -> dict[str, Any]:
        """The parameters of `SamplingParams` that generation_config.json recommends: temperature, top_k, ...

        Empty if it names none; {"temperature": 0.0} for greedy decoding. Their ranges are checked where they are used.
        Its bad_words_ids are the texts `bad_words`, so that other tokens of the same text do not pass; a special token,
        which has no text, has a `logit_bias`. Raises TokenizerError for an id that is not in the vocabulary.
        """
        banned = [ids for ids in self._settings.bad_words if not all(map(self.is_special, ids))]
        words = tuple(dict.fromkeys(self.decode(ids) for ids in banned))
        special = {ids[0]: -100.0 for ids in self._settings.bad_words if len(ids) == 1 and self.is_special(ids[0])}
        return (
            dict(self._settings.sampling)
            | ({"bad_words": words} if words else {})
            | ({"logit_bias": special} if special else {})
        )

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tokenize: Literal[False] = ...,
        *,
        tools: Sequence[Mapping[str, Any]] | None = ...,
        chat_template: str | None = ...,
        variables: Mapping[str, Any] | None = ...,
    ) -> str: ...

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tokenize: Literal[True],
        tools: Sequence[Mapping[str, Any]] | None = ...,
        chat_template: str | None = ...,
        variables: Mapping[str, Any] | None = ...,
    ) -> list[int]: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tokenize: bool = False,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str | list[int]:
        """A conversation in the form that the model was trained on, ready for its next reply.

        messages: dicts with `role` and `content`, both str. Returns text, or with `tokenize` its ids. The template
        writes BOS itself if the model needs one, so the ids get no other. (`encode(text)` would not add it twice.)
        tools: functions that the model may call, as in OpenAI's API. chat_template: Jinja source, instead of the
        model's own; by default, with tools, the one named "tool_use", if there is one. variables: others that the
        template reads, like `enable_thinking`.
        Raises TokenizerError: a bad message, a template that fails or does too much work, or no template at all.
        """
        messages = copy_messages(messages)
        own = self.template_for(with_tools=bool(tools)), self._settings.path
        source, path = own if chat_template is None else (chat_template, None)
        if source is None:
            self.check_default_template()
            raise TokenizerError(
                "this tokenizer has no chat template, which says how the model expects a conversation: "
                "write the prompt yourself and use encode(), or put a chat_template.jinja beside the tokenizer",
                path=self._settings.path,
            )
        names = {key: getattr(self._settings, key) for key in NAMED}
        # As in transformers, a template of the files sees no id of config.json, only names and the vocabulary's own.
        first = self.bos_id, next(iter(self.eos_ids), None)
        ids = first if self._settings.chat_template is None else self._own_ids()
        for key, number in zip(("bos_token", "eos_token"), ids, strict=True):
            names[key] = self._token(number) if names[key] is None and number is not None else names[key]
        specials = {key: token for key, token in names.items() if token is not None}
        text = compile_template(source, path).render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables, **specials
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def __repr__(self) -> str:
        return f"{type(self).__name__}(vocab_size={self.vocab_size}, bos_id={self.bos_id}, eos_ids={self.eos_ids})"

    def _check_text(self, text: object, name: str) -> str:
        if not isinstance(text, str):
            raise TokenizerError(f"{name}: expected str, got {type(text).__name__}")
        check_unicode(text)
        return text

    def _check_id(self, token_id: object, index: int | None) -> int:
        try:
            if isinstance(token_id, bool):
                raise TypeError
            token = operator.index(token_id)  # type: ignore[arg-type]
        except TypeError:
            place, got = _place(index), f"{token_id!r:.80} of type {type(token_id).__name__}"
            raise TokenizerError(f"token id{place}: expected an integer, got {got}") from None
        if not self.has_id(token):
            what = f"is not in the vocabulary (vocab_size {self.vocab_size})"
            raise TokenizerError(f"token id {token}{_place(index)} {what}")
        return token

    def _check_ids(self, ids: Iterable[int]) -> list[int]:
        if isinstance(ids, (str, bytes, Mapping)) or not isinstance(ids, Iterable):
            raise TokenizerError(f"ids: expected a list of integers, got {type(ids).__name__}")
        return [self._check_id(token, index) for index, token in enumerate(ids)]

    def _measure_tokens(self, tokens: Iterable[str], growth: int = 1) -> None:
        """Refuse tokens that are too long. growth: the maximum bytes that decoding makes of one."""
        lengths = list(map(len, tokens))
        self._longest, self._growth = max(lengths), 4 * growth
        if sum(lengths) * self._growth > MAX_DECODED_BYTES:
            raise TokenizerError(f"the tokens' texts may have more than {MAX_DECODED_BYTES} bytes", path=self.path)
        if self._longest > MAX_TOKEN_CHARACTERS:
            message = f"a token has {self._longest} characters, and at most {MAX_TOKEN_CHARACTERS} are accepted"
            raise TokenizerError(message, path=self.path)

    def _check_decoded(self, ids: list[int]) -> None:
        """Refuse ids whose text may be too long, which the libraries would make until memory ends."""
        if len(ids) * (self._longest + 1) * self._growth > MAX_DECODED_BYTES:
            size = self._growth * sum(1 + len(self._token(token) or "") for token in ids)
            if size > MAX_DECODED_BYTES:
                message = f"the text of these {len(ids)} tokens may have {size} bytes, more than {MAX_DECODED_BYTES}"
                raise TokenizerError(f"{message}: decode them in parts", path=self.path)

    def _find_named(self, key: str, token: str | None) -> int | None:
        """The id of a special token that the settings name. Raises TokenizerError if it is not in the vocabulary."""
        number = None if token is None else self.token_to_id(token)
        if token is not None and number is None:
            message = f"{token!r} is not in the vocabulary, so the model can never have seen it"
            raise TokenizerError(message, path=self._settings.path, field=key)
        return number

    def _find_number(self, key: str, number: int | None) -> int | None:
        """An id that config.json or generation_config.json gives; None, and a warning, if the vocabulary lacks it."""
        if number is None or (number < self.vocab_size and self._token(number) is not None):
            return number
        message = f"{describe(number)} ignored: it is not in the vocabulary of {self.vocab_size} tokens"
        error = TokenizerError(message, path=self._settings.path, field=key)
        warnings.warn(printable(str(error), keep=""), ConfigWarning, stacklevel=2)
        return None

    def _find_eos_ids(self) -> tuple[int, ...]:
        """Every stop token that any file names: without one of them a model may never stop."""
        settings = self._settings
        ids = [self._find_number("eos_token_id", number) for number in settings.eos_ids]
        named = self._find_named("eos_token", settings.eos_token)
        ids.append(self._own_ids()[1] if named is None else named)
        turn = self.token_to_id(END_OF_TURN)
        if turn is not None and self._is_special(turn):
            ids.append(turn)
        return tuple(dict.fromkeys(number for number in ids if number is not None))

    def _find_affixes(self) -> tuple[list[int], list[int]]:
        settings, (own_prefix, own_suffix) = self._settings, self._own_affixes()
        if settings.add_bos is None and settings.add_eos is None:
            return own_prefix, own_suffix
        # One explicit flag is enough for both flags to replace what the vocabulary file says. transformers 5 does so
        # for a tokenizer.model; beside a tokenizer.json it ignores the flags.
        add_bos = self.bos_id in own_prefix if settings.add_bos is None else settings.add_bos
        prefix = [self.bos_id] if add_bos and self.bos_id is not None else []
        named = self._find_named("eos_token", settings.eos_token)
        eos = named if named is not None else next(iter(self.eos_ids), None)
        return prefix, [eos] if settings.add_eos and eos is not None else []

    def _add_affixes(self, ids: list[int]) -> list[int]:
        prefix = self._prefix
        if ids and ids[0] == self.bos_id:
            prefix = [token for token in prefix if token != self.bos_id]
        return [*prefix, *ids, *self._suffix]


def _place(index: int | None) -> str:
    return "" if index is None else f" at index {index}"
