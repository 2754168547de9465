"""A GGUF vocabulary of the model "llama" <-> a SentencePiece model.

llama.cpp merges by score, as SentencePiece's BPE does; a GGUF does not name the algorithm, so it cannot hold a Unigram
model. Added tokens, which are not pieces of the model, are in the same list, with the score -1000.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import TokenizerError
from .base import Tokenizer
from .gguf_keys import PREFIX, GgufVocabulary
from .sentencepiece_model import (
    BPE,
    BYTE,
    CONTROL,
    MAX_PIECES,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    SentencePieceModel,
    read_model,
    write_model,
)
from .sentencepiece_tokenizer import SentencePieceTokenizer

log = logging.getLogger(__name__)
ADDED_SCORE = -1000.0  # of added tokens, and of the padding after them, in the files of llama.cpp's converter


def model_from_vocabulary(vocabulary: GgufVocabulary, specials: Mapping[str, int]) -> tuple[bytes, list[int]]:
    """(ModelProto, ids of the added tokens). The model does not contain added tokens at the end."""
    tokens, types = vocabulary.tokens, list(vocabulary.types)
    scores = vocabulary.required("scores", vocabulary.numbers("scores", float, len(tokens)))
    if len(tokens) > MAX_PIECES:
        raise TokenizerError(f"a llama vocabulary has at most {MAX_PIECES} tokens", field=PREFIX + "tokens")
    unknown = [n for n, kind in enumerate(types) if kind == UNKNOWN]
    if len(unknown) > 1:  # SentencePiece allows one; llama.cpp treats the others (padding, in phi-3) as control tokens
        real = specials["unk"] if specials.get("unk") in unknown else unknown[0]
        for n in unknown:
            types[n] = UNKNOWN if n == real else CONTROL
    added = [n for n, kind in enumerate(types) if kind in (CONTROL, USER_DEFINED) and scores[n] == ADDED_SCORE]
    size, is_added = len(tokens), set(added)
    while size and (size - 1 in is_added or (types[size - 1] == UNUSED and scores[size - 1] == ADDED_SCORE)):
        size -= 1
    size = size or len(tokens)
    if UNKNOWN not in types[:size]:
        if specials.get("unk", size) >= size:
            message = "a llama vocabulary has a token of type 2 (unknown), this one has none"
            raise TokenizerError(message, field=PREFIX + "token_type")
        types[specials["unk"]] = UNKNOWN
    n_bytes = sum(kind == BYTE for kind in types[:size])
    if n_bytes not in (0, 256):
        raise TokenizerError(f"expected 256 byte tokens or none, got {n_bytes}", field=PREFIX + "token_type")
    charsmap = vocabulary.numbers("precompiled_charsmap", int, None) or []
    if any(not 0 <= byte < 256 for byte in charsmap):
        raise TokenizerError("expected bytes", field=PREFIX + "precompiled_charsmap")
    prefix = vocabulary.flag("add_space_prefix")
    model = SentencePieceModel(
        pieces=tokens[:size],
        scores=scores[:size],
        types=types[:size],
        model_type=BPE,
        add_dummy_prefix=True if prefix is None else prefix,
        remove_extra_whitespaces=bool(vocabulary.flag("remove_extra_whitespaces")),
        charsmap=bytes(charsmap),
    )
    named = {name: n for name, n in specials.items() if name != "unk" and n < size and types[n] == CONTROL}
    return write_model(model, {**named, "unk": types.index(UNKNOWN)}), added


def vocabulary_from_model(tokenizer: Tokenizer) -> dict[str, Any]:
    """The metadata of a SentencePiece tokenizer: pieces, then added tokens, with [PADn] for ids without a token."""
    assert isinstance(tokenizer, SentencePieceTokenizer)
    model = read_model(tokenizer._model_bytes, tokenizer.path)
    if model.model_type != BPE or not model.escape_whitespaces:
        raise TokenizerError(
            "a GGUF's llama vocabulary is a BPE model whose spaces are written as \\u2581, and this is another kind",
            path=tokenizer.path,
            field="trainer_spec.model_type",
        )
    for is_ignored, change in (
        (model.charsmap, "normalises characters (precompiled_charsmap)"),
        (model.remove_extra_whitespaces, "removes repeated and outer spaces (remove_extra_whitespaces)"),
    ):
        if is_ignored:
            log.warning("the tokenizer %s; llama.cpp ignores this key and gives such texts other tokens", change)
    tokens, scores, types = list(model.pieces), list(model.scores), list(model.types)
    for token in tokenizer._settings.added_tokens:
        n = tokenizer.token_to_id(token.content)
        if n is not None and n < len(tokens) and types[n] not in (CONTROL, UNKNOWN, BYTE, USER_DEFINED):
            types[n], scores[n] = CONTROL if token.special else USER_DEFINED, ADDED_SCORE
    pads = 0
    for n in range(len(tokens), tokenizer.vocab_size):
        added = tokenizer._added.get(n)
        if added is None:
            pads += 1
        tokens.append(f"[PAD{pads}]" if added is None else added)
        scores.append(ADDED_SCORE)
        types.append(UNUSED if added is None else CONTROL if tokenizer._is_special(n) else USER_DEFINED)
    out: dict[str, Any] = {
        PREFIX + "model": "llama",
        PREFIX + "pre": "default",
        PREFIX + "tokens": tokens,
        PREFIX + "scores": np.array(scores, dtype=np.float32),
        PREFIX + "token_type": np.array(types, dtype=np.int32),
        PREFIX + "add_space_prefix": model.add_dummy_prefix,
        PREFIX + "remove_extra_whitespaces": model.remove_extra_whitespaces,
    }
    if model.charsmap:
        out[PREFIX + "precompiled_charsmap"] = np.frombuffer(model.charsmap, dtype=np.uint8)
    out[PREFIX + "unknown_token_id"] = types.index(UNKNOWN)
    return out
