"""Text to token ids and back: one class, whatever file the vocabulary comes in.

`load_tokenizer(folder)` reads a checkpoint folder as the hub has it. Importing this package imports neither
`tokenizers`, `sentencepiece` nor `jinja2`: each is imported when a folder, or a chat, needs it.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import TokenizerError
from .base import Tokenizer
from .files import MAX_VOCABULARY_BYTES, read_file
from .settings import TokenizerSettings, read_settings
from .streaming import StreamDecoder

__all__ = ["StreamDecoder", "Tokenizer", "TokenizerSettings", "load_tokenizer", "read_settings"]


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """Load the tokenizer of a checkpoint folder.

    `tokenizer.json` is used when there is one, else `tokenizer.model`. Read beside it, when present:
    tokenizer_config.json, special_tokens_map.json, added_tokens.json, generation_config.json, config.json (token ids
    only) and chat_template.jinja.

    Raises TokenizerError: neither file is there, a file is not what its format says, the files contradict each
    other, or the library that reads the format is not installed.
    """
    root = Path(os.fspath(folder))
    json_path, model_path = root / "tokenizer.json", root / "tokenizer.model"
    if not root.is_dir():
        raise TokenizerError("is not a folder; give the folder that holds the tokenizer's files", path=root)
    if json_path.exists():
        from .hf_tokenizer import HfTokenizer

        return HfTokenizer(read_file(json_path, MAX_VOCABULARY_BYTES), read_settings(root), path=json_path)
    if model_path.exists():
        from .sentencepiece_tokenizer import SentencePieceTokenizer

        return SentencePieceTokenizer(read_file(model_path, MAX_VOCABULARY_BYTES), read_settings(root), path=model_path)
    raise TokenizerError("no tokenizer here: looked for tokenizer.json and tokenizer.model", path=root)
