"""The `tokenizer.ggml.*` keys of a GGUF, read with their types, lengths and ranges checked."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import TokenizerError
from .files import MAX_TOKEN_ID, check_unicode
from .sentencepiece_model import BYTE, BYTE_PIECE, NORMAL, UNUSED

log = logging.getLogger(__name__)

PREFIX = "tokenizer.ggml."
MODELS = ("llama", "gpt2", "gemma4")


class GgufVocabulary:
    """model (one of MODELS), tokens, types (one per token); further keys by method.

    A GGUF's token types are those of SentencePiece: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.model = self.text("model")
        if self.model is None:
            raise TokenizerError("there is no tokenizer in this GGUF", field=PREFIX + "model")
        if self.model not in MODELS:
            message = f"expected one of {', '.join(MODELS)}, got {self.model[:40]!r}"
            raise TokenizerError(message, field=PREFIX + "model")
        self.tokens = self.strings("tokens") or []
        if not 0 < len(self.tokens) <= MAX_TOKEN_ID:
            message = f"expected 1 to {MAX_TOKEN_ID} tokens, got {len(self.tokens)}"
            raise TokenizerError(message, field=PREFIX + "tokens")
        self.types = self._types()
        first: dict[str, int] = {}
        for n, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            field = f"{PREFIX}tokens[{n}]"
            if not token:
                raise TokenizerError("a token is empty", field=field)
            if first.setdefault(token, n) != n and not (kind == UNUSED and self.model == "gpt2"):
                raise TokenizerError(f"{token[:40]!r} is token {first[token]} already", field=field)
            has_byte_form = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
            if (kind == BYTE or (self.model == "llama" and has_byte_form)) and not BYTE_PIECE.fullmatch(token):
                raise TokenizerError(f"{token[:40]!r} is no byte token <0x00> to <0xFF>", field=field)

    def _get(self, key: str) -> Any:
        return self._metadata.get(PREFIX + key)

    def text(self, key: str) -> str | None:
        value = self._get(key)
        if value is not None and not isinstance(value, str):
            raise TokenizerError(f"expected a string, got {type(value).__name__}", field=PREFIX + key)
        return value

    def flag(self, key: str) -> bool | None:
        value = self._get(key)
        if value is not None and not isinstance(value, (bool, np.bool_)):
            raise TokenizerError(f"expected true or false, got {value!r:.40}", field=PREFIX + key)
        return None if value is None else bool(value)

    def token_id(self, key: str) -> int | None:
        """An id that must be in the vocabulary; None when the key is absent, or names padding that is not in it, which
        files of fine-tuned models do."""
        value = self._get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TokenizerError(f"expected a token id, got {value!r:.40}", field=PREFIX + key)
        if not 0 <= value < len(self.tokens):
            if key == "padding_token_id":  # which nothing reads
                log.warning("%s%s: %d ignored: not in the vocabulary of %d", PREFIX, key, value, len(self.tokens))
                return None
            raise TokenizerError(f"token {value} is not in the vocabulary of {len(self.tokens)}", field=PREFIX + key)
        return int(value)

    def strings(self, key: str) -> list[str] | None:
        value = self._get(key)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)):
            raise TokenizerError(f"expected an array of strings, got {type(value).__name__}", field=PREFIX + key)
        for n, item in enumerate(value):
            if not isinstance(item, str):
                raise TokenizerError(f"expected a string, got {type(item).__name__}", field=f"{PREFIX}{key}[{n}]")
            check_unicode(item, f"{PREFIX}{key}[{n}]")
        return list(value)

    def numbers(self, key: str, kind: type[int] | type[float], length: int | None) -> list[Any] | None:
        """An array of integers, or of floating-point numbers: an array of the other kind is an error."""
        value = self._get(key)
        if value is None:
            return None
        allowed = np.integer if kind is int else np.floating
        wrong = ""
        if isinstance(value, np.ndarray):
            if value.ndim != 1 or not np.issubdtype(value.dtype, allowed):
                wrong = f"{value.dtype} of shape {value.shape}"
            value = value.tolist()
        elif isinstance(value, (list, tuple)):
            others = (v for v in value if isinstance(v, bool) or not isinstance(v, (kind, allowed)))
            wrong = next((f"{type(each).__name__} values" for each in others), "")
        else:
            wrong = f"{value!r:.40}"
        if wrong:
            what = "integers" if kind is int else "floating-point numbers"
            raise TokenizerError(f"expected an array of {what}, got {wrong}", field=PREFIX + key)
        if length is not None and len(value) != length:
            raise TokenizerError(f"expected {length} values, one for each token, got {len(value)}", field=PREFIX + key)
        if kind is float:
            for n, item in enumerate(value):
                if not math.isfinite(item):
                    raise TokenizerError(f"{item} is not finite", field=f"{PREFIX}{key}[{n}]")
        return list(map(kind, value))

    def required(self, key: str, value: list[Any] | None) -> list[Any]:
        """`value`, the array of a key. Raises TokenizerError when the key is absent."""
        if value is None:
            raise TokenizerError(f"is missing, and a {self.model} vocabulary needs it", field=PREFIX + key)
        return value

    def _types(self) -> list[int]:
        types = self.numbers("token_type", int, len(self.tokens))
        if types is None and self.model != "llama":
            return [NORMAL] * len(self.tokens)
        types = self.required("token_type", types)
        for n, kind in enumerate(types):
            if not NORMAL <= kind <= BYTE:
                raise TokenizerError(f"{kind} is no token type 1..6", field=f"{PREFIX}token_type[{n}]")
        return types
