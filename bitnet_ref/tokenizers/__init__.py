"""Text to token ids and back: one class, whatever file the vocabulary comes in.

`load_tokenizer(folder)` reads a checkpoint folder as the hub has it; `load_tokenizer_files` takes the same files as
bytes. `tokenizers`, `sentencepiece` and `jinja2` are imported when a folder, or a chat, needs them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..errors import TokenizerError
from .base import Tokenizer
from .files import MAX_VOCABULARY_BYTES, TokenizerFiles
from .settings import TokenizerSettings, read_settings
from .streaming import StreamDecoder

__all__ = ["StreamDecoder", "Tokenizer", "TokenizerSettings", "load_tokenizer", "load_tokenizer_files", "read_settings"]


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """Load the tokenizer of a checkpoint folder.

    `tokenizer.json` is used when there is one, else `tokenizer.model`. Read beside it, when present:
    tokenizer_config.json, special_tokens_map.json, added_tokens.json, generation_config.json, config.json (token ids
    only), chat_template.jinja and additional_chat_templates/tool_use.jinja.

    Raises TokenizerError: neither file is there, a file is not what its format says, the files contradict each
    other, or the library that reads the format is not installed.
    """
    files = TokenizerFiles(folder)
    if not files.root.is_dir():
        raise TokenizerError("is not a folder; give the folder that holds the tokenizer's files", path=files.root)
    return _load(files)


def load_tokenizer_files(files: Mapping[str, bytes], *, path: str | os.PathLike[str] = "") -> Tokenizer:
    """`load_tokenizer` of files that are in no folder: name -> content. `path`: where they came from, for messages.

    Raises TokenizerError as `load_tokenizer` does.
    """
    return _load(TokenizerFiles(path, dict(files)))


def _load(files: TokenizerFiles) -> Tokenizer:
    if "tokenizer.json" in files:
        from .hf_tokenizer import HfTokenizer

        data = files.read("tokenizer.json", MAX_VOCABULARY_BYTES)
        return HfTokenizer(data, read_settings(files), path=files.path("tokenizer.json"))
    if "tokenizer.model" in files:
        from .sentencepiece_tokenizer import SentencePieceTokenizer

        data = files.read("tokenizer.model", MAX_VOCABULARY_BYTES)
        return SentencePieceTokenizer(data, read_settings(files), path=files.path("tokenizer.model"))
    message = "no tokenizer here: looked for tokenizer.json and tokenizer.model; copy one from the model's repository"
    raise TokenizerError(message, path=files.root)
