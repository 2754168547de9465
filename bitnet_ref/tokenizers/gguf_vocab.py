"""The tokenizer in a GGUF's metadata <-> the Hugging Face files that the loaders here read.

`tokenizer.ggml.model` "llama" is a SentencePiece BPE model, "gpt2" a byte-level BPE whose pre-tokenizer has a name.
Both become files, so that the same reader, with its checks, serves folders and GGUFs.

What GGUF cannot express, and our choice: whether text after a special token gets a space in front (llama.cpp: yes, in a
"llama" vocabulary; here: no, as in transformers with `legacy: false`); which spaces added tokens take in (none);
that Qwen's texts are normalized, NFC, first (not).
Source: llama.cpp, convert_hf_to_gguf.py, gguf-py/gguf/vocab.py and src/llama-vocab.cpp.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import TokenizerError, describe, errors_at
from . import load_tokenizer_files
from .base import Tokenizer
from .files import AnyPath
from .gguf_bpe import adds_bos, bpe_from_json, json_from_bpe
from .gguf_keys import PREFIX, GgufVocabulary
from .gguf_sentencepiece import ADDED_SCORE, model_from_vocabulary, vocabulary_from_model
from .sentencepiece_model import CONTROL, UNKNOWN, UNUSED
from .settings import TOOL_TEMPLATE, TokenizerSettings

log = logging.getLogger(__name__)

_IDS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # our name -> the key's
_STOPS = ("eos", "eot", "eom")  # llama.cpp ends a generation at each of them
_CONFIG, _GENERATION, _TEMPLATE = "tokenizer_config.json", "generation_config.json", "chat_template.jinja"
_TEMPLATE_KEY = "tokenizer.chat_template"
_SAMPLING = {  # llama.cpp's key, which its converter fills from generation_config.json -> that file's
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_BAD_WORDS = (
    "bitnet_ref.bad_words_ids"  # generation_config.json's: a string of ids for each text; no one else has a key
)


def tokenizer_files_from_gguf(metadata: Mapping[str, Any], path: AnyPath = None) -> dict[str, bytes]:
    """GGUF metadata -> {file name: bytes}, for `load_tokenizer_files`.

    metadata: str, bool, int, float, lists of them, or NumPy arrays. path: of its file, for errors to name.
    Returns tokenizer.model or tokenizer.json, tokenizer_config.json, generation_config.json (all stop tokens, and what
    general.sampling.* says), and chat_template.jinja when there is a template, and the same for the one that is named
    tool_use.

    Raises TokenizerError naming the key: missing, of the wrong type or length, a token twice, a byte token that is no
    byte, a merge outside the vocabulary, an id out of range, an unknown model or pre-tokenizer.
    """
    with errors_at(path):
        vocabulary = GgufVocabulary(metadata)
        ids = {name: vocabulary.token_id(f"{key}_token_id") for name, key in _IDS.items()}
        present = {name: n for name, n in ids.items() if n is not None}
        stops = [n for name in _STOPS if (n := vocabulary.token_id(f"{name}_token_id")) is not None]
        flag = vocabulary.flag("add_bos_token")
        add_bos = adds_bos(vocabulary) if flag is None else flag
        add_eos = bool(vocabulary.flag("add_eos_token"))
        config: dict[str, Any]
        if vocabulary.model == "llama":
            data, added = model_from_vocabulary(vocabulary, present)
            files = {"tokenizer.model": data}
            config = {"tokenizer_class": "LlamaTokenizer", "legacy": False}
            if added:
                config["added_tokens_decoder"] = {
                    str(n): {"content": vocabulary.tokens[n], "special": vocabulary.types[n] in (CONTROL, UNKNOWN)}
                    for n in added
                }
        else:
            around = ids["bos"] if add_bos else None, ids["eos"] if add_eos else None
            files = {"tokenizer.json": json_from_bpe(vocabulary, [*present.values(), *stops], *around)}
            config = {"tokenizer_class": "PreTrainedTokenizerFast"}
        config |= {"add_bos_token": add_bos, "add_eos_token": add_eos}
        config |= {f"{name}_token": vocabulary.tokens[n] for name, n in present.items()}
        files[_CONFIG] = _json(config)
        generation: dict[str, Any] = {f"{name}_token_id": present[name] for name in ("bos", "pad") if name in present}
        stops = list(dict.fromkeys(stops))
        if stops:
            generation["eos_token_id"] = stops if len(stops) > 1 else stops[0]
        generation |= _sampling_from_gguf(metadata) | _bad_words_from_gguf(metadata)
        files[_GENERATION] = _json(generation)
        for field, name in ((_TEMPLATE_KEY, _TEMPLATE), (f"{_TEMPLATE_KEY}.tool_use", TOOL_TEMPLATE)):
            template = metadata.get(field)
            if not isinstance(template, str | None):
                raise TokenizerError(f"expected a string, got {type(template).__name__}", field=field)
            if template is not None:
                try:
                    files[name] = template.encode("utf-8")
                except UnicodeEncodeError as error:
                    raise TokenizerError("has no UTF-8 form", field=field) from error
        return files


def gguf_from_tokenizer_files(files: Mapping[str, bytes]) -> dict[str, Any]:
    """{file name: bytes} -> GGUF metadata, in the order in which llama.cpp's converter writes it.

    Values: str; bool; int (write as uint32); lists of str; float32, int32 and uint8 arrays. tokenizer.model is
    preferred to tokenizer.json, as in llama.cpp.

    Raises TokenizerError: files that do not load, and what GGUF cannot express (a Unigram model, a normalizer
    beyond NFC, a pre-tokenizer without a name, more than three stop tokens).
    """
    files = dict(files)
    if "tokenizer.model" in files:
        files.pop("tokenizer.json", None)
    tokenizer = load_tokenizer_files(files)
    is_model = "tokenizer.model" in files
    out = vocabulary_from_model(tokenizer) if is_model else bpe_from_json(tokenizer, files["tokenizer.json"])
    out |= _special_tokens(tokenizer, tokenizer._settings)
    settings = tokenizer._settings
    if settings.legacy:
        log.warning("GGUF cannot hold `legacy: true` (a space before text after a special token); it is left out")
    greedy = [token.content for token in settings.added_tokens if token.lstrip or token.rstrip or token.single_word]
    if greedy:
        log.warning("GGUF cannot hold that %s take in the spaces around them; it is left out", greedy[:8])
    if settings.chat_template is not None:
        out[_TEMPLATE_KEY] = settings.chat_template
    if settings.tool_template is not None:
        out[f"{_TEMPLATE_KEY}.tool_use"] = settings.tool_template
    if settings.bad_words:
        out[_BAD_WORDS] = [" ".join(map(str, ids)) for ids in settings.bad_words]
    sampling = settings.sampling
    return out | {
        key: int(sampling[name]) if name == "top_k" else float(sampling[name])
        for key, name in _SAMPLING.items()
        if name in sampling
    }


def pad_vocabulary(metadata: dict[str, Any], size: int) -> dict[str, Any]:
    """The metadata with unused tokens up to so many, as llama.cpp's converter adds them."""
    tokens = metadata[PREFIX + "tokens"]
    out = {**metadata, PREFIX + "tokens": [*tokens, *(f"[PAD{n}]" for n in range(len(tokens), size))]}
    for key, value in (("token_type", UNUSED), ("scores", ADDED_SCORE)):
        if (array := metadata.get(PREFIX + key)) is not None:
            padding = np.full(max(0, size - len(tokens)), value, array.dtype)
            out[PREFIX + key] = np.concatenate([array, padding])
    return out


def _sampling_from_gguf(metadata: Mapping[str, Any]) -> dict[str, float]:
    """What generation_config.json says of sampling, as far as the file does. A float32 is read as its shortest decimal:
    0.95, not 0.949999988079071."""
    numbers: dict[str, float] = {}
    for key, name in _SAMPLING.items():
        value = metadata.get(key)
        if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.number):
            continue
        if math.isfinite(value):
            whole = isinstance(value, int | np.integer)
            numbers[name] = int(value) if whole else float(str(np.float32(value)))
    return numbers


def _bad_words_from_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    if (texts := metadata.get(_BAD_WORDS)) is None:
        return {}
    try:
        return {"bad_words_ids": [[int(token) for token in text.split()] for text in texts]}
    except (AttributeError, TypeError, ValueError) as error:
        raise TokenizerError(f"expected strings of token ids, got {describe(texts)}", field=_BAD_WORDS) from error


def _special_tokens(tokenizer: Tokenizer, settings: TokenizerSettings) -> dict[str, Any]:
    if len(tokenizer.eos_ids) > len(_STOPS):
        counts = f"GGUF names {len(_STOPS)} stop tokens, and this tokenizer has {len(tokenizer.eos_ids)}"
        message = f"{counts}: {list(tokenizer.eos_ids)[:20]}"
        raise TokenizerError(message, path=settings.path, field="eos_token_id")
    unk = None if settings.unk_token is None else tokenizer.token_to_id(settings.unk_token)
    out: dict[str, Any] = {}
    for key, number in (("bos", tokenizer.bos_id), *zip(_STOPS, tokenizer.eos_ids, strict=False)):
        if number is not None:
            out[f"{PREFIX}{key}_token_id"] = number
    for key, number in (("unknown", unk), ("padding", tokenizer.pad_id)):
        if number is not None and number < tokenizer.vocab_size:
            out.setdefault(f"{PREFIX}{key}_token_id", number)
    around = tokenizer.encode("")
    out[PREFIX + "add_bos_token"] = tokenizer.bos_id is not None and around[:1] == [tokenizer.bos_id]
    out[PREFIX + "add_eos_token"] = bool(tokenizer.eos_ids) and around[-1:] == [tokenizer.eos_ids[0]]
    if len(around) != out[PREFIX + "add_bos_token"] + out[PREFIX + "add_eos_token"]:
        message = f"GGUF can only put BOS and EOS around a text, and this tokenizer puts the tokens {around} there"
        raise TokenizerError(message, path=settings.path, field="post_processor")
    return out


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, indent=1).encode("utf-8")
