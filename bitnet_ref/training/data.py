"""Training data: one long row of token ids in a memory-mapped file, and the batch of each step.

A batch depends on the seed and the number of the step alone, so a run that was interrupted goes on with the same data.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, FormatError, TokenizerError
from ..formats.hashes import file_hash
from ..reference.layers import Array
from ..system.atomic import atomic_path, is_same_file, write_file
from ..system.json_file import decode_text, open_regular
from ..system.lazy import lazy_property
from ..tokenizers import Tokenizer, load_tokenizer, load_tokenizer_files

Progress = Callable[[int, int], None]
DOCUMENT_END = "\n\n\n"  # between two documents of a text file
XZ_FREE_BYTES = 32 << 20
XZ_BLOCK_BYTES = 1 << 20
XZ_MEMORY_BYTES = 1 << 27  # that decompressing may take: xz -9 needs 65 MiB
MOST_XZ_TIMES = 100
_BLOCK_CHARACTERS = 1 << 16  # encoded at a time, up to the end of a paragraph


class TokenFile:
    """Token ids in a .npy file, one row of uint16, uint32 or int32, mapped and never read as a whole."""

    def __init__(self, path: Path, vocab_size: int) -> None:
        """Raises FormatError for another file, and for one that has ids outside the vocabulary or fewer than two."""
        open_regular(path, FormatError).close()  # which a map of it cannot say: opening a pipe waits for ever
        try:
            self.ids: Array = np.load(path, mmap_mode="r", allow_pickle=False)
        except Exception as problem:  # numpy reads the header as Python, with SyntaxError, TokenError and others
            raise FormatError(f"expected token ids as numpy.save writes them: {problem}", path=path) from problem
        if self.ids.ndim != 1 or self.ids.dtype.kind not in "iu" or len(self.ids) < 2:
            got = f"{self.ids.dtype} of shape {self.ids.shape}"
            raise FormatError(f"expected one row of at least two integer ids, got {got}", path=path)
        for start in range(0, len(self.ids), 1 << 22):
            block = self.ids[start : start + (1 << 22)]
            if block.min() < 0 or block.max() >= vocab_size:
                at = start + int(np.flatnonzero((block < 0) | (block >= vocab_size))[0])
                raise FormatError(
                    f"id {self.ids[at]} is outside the vocabulary of {vocab_size}; is it of another tokenizer?",
                    path=path,
                    field=f"token {at}",
                )

    def __len__(self) -> int:
        return len(self.ids)

    @lazy_property
    def content_hash(self) -> str:
        """The SHA-256 of the ids as little-endian uint32."""
        return _hash_ids(self.ids)

    def windows(self, context: int) -> int:
        """How many sequences of `context` tokens there are, each with the token that follows it."""
        return max(1, (len(self.ids) - 1) // context)

    def window(self, index: int, context: int) -> NDArray[np.int64]:
        """(context + 1,) tokens; fewer when the file is shorter. It may cross documents, which BOS and EOS part."""
        return self.ids[index * context : (index + 1) * context + 1].astype(np.int64)

    def batch(self, step: int, size: int, context: int, seed: int) -> list[NDArray[np.int64]]:
        """The sequences of a step: windows in an order that is drawn anew for each pass over the file."""
        count, rows = self.windows(context), []
        for number in range(step * size, (step + 1) * size):
            epoch, at = divmod(number, count)
            rows.append(self.window(int(_order(count, seed, epoch)[at]), context))
        return rows


@lru_cache(maxsize=1)
def _order(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Of the windows in a pass over the file."""
    return np.random.default_rng([seed, epoch]).permutation(count)


def _hash_ids(ids: Array) -> str:
    digest = hashlib.sha256()
    for start in range(0, len(ids), 1 << 22):
        digest.update(ids[start : start + (1 << 22)].astype("<u4").data)
    return digest.hexdigest()


def open_tokens(
    files: Sequence[Path],
    tokenizer_files: Mapping[str, bytes],
    vocab_size: int,
    folder: Path,
    progress: Progress | None = None,
) -> TokenFile:
    """The tokens of a .npy file, or of text files (.txt, .txt.xz), which are encoded once into `folder`.

    tokenizer_files: name -> content, as `read_tokenizer_folder` gives them. A file of encoded tokens is named by the
    contents of the texts and of the tokenizer, and by its own: one that is damaged is made anew.
    Raises FormatError, ConfigError.
    """
    if len(files) == 1 and files[0].suffix == ".npy":
        return TokenFile(files[0], vocab_size)
    if any(file.suffix == ".npy" for file in files):
        raise ConfigError("expected text files, or one .npy file of token ids", field="data")
    if not tokenizer_files:
        raise ConfigError("text files need a tokenizer: its folder, or the folder that training starts from")
    key = hashlib.sha256()
    for name, content in sorted(tokenizer_files.items()):
        key.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
    for file in files:
        key.update(f"{file_hash(file)}\n".encode())
    stem = f"tokens-{key.hexdigest()[:16]}"
    for path in sorted(folder.glob(f"{stem}-*.npy")):
        with suppress(FormatError):
            kept = TokenFile(path, vocab_size)
            if path.stem == f"{stem}-{kept.content_hash[:16]}":
                return kept
    tokenizer = load_tokenizer_files(tokenizer_files)
    folder.mkdir(parents=True, exist_ok=True)
    blocks = [np.asarray(ids, dtype=np.uint32) for ids in encode_files(files, tokenizer, progress)]
    if not blocks:
        raise FormatError("there is no text", path=files[0])
    ids = np.concatenate(blocks)
    path = folder / f"{stem}-{_hash_ids(ids)[:16]}.npy"
    with atomic_path(path) as target, open(target, "wb") as file_out:
        np.save(file_out, ids)
    return TokenFile(path, vocab_size)


def encode_files(files: Sequence[Path], tokenizer: Tokenizer, progress: Progress | None = None) -> Iterator[list[int]]:
    """The ids of every document, with BOS before it and EOS after it where the tokenizer has them."""
    total, done = sum(file.stat().st_size for file in files), 0
    for file in files:
        for document in (text.strip("\n") for text in read_text(file).split(DOCUMENT_END) if text.strip()):
            if tokenizer.bos_id is not None:
                yield [tokenizer.bos_id]
            for block in _paragraph_blocks(document):
                yield tokenizer.encode(block, add_special_tokens=False)
            if tokenizer.eos_ids:
                yield [tokenizer.eos_ids[0]]
        done += file.stat().st_size
        if progress is not None:
            progress(done, total)


def read_text(file: Path) -> str:
    """A UTF-8 text file, as it is or compressed as .xz, without a byte-order mark; \\r\\n is a line end too. Raises
    FormatError, also for a small file of a huge text."""
    try:
        with open_regular(file, FormatError) as opened:
            data = opened.read()
        data = _decompress(data, file) if file.suffix == ".xz" else data
    except (OSError, lzma.LZMAError, EOFError) as problem:
        raise FormatError(f"cannot be read: {problem}", path=file) from problem
    return decode_text(data, FormatError, file).removeprefix("\ufeff").replace("\r\n", "\n")


def _decompress(data: bytes, file: Path) -> bytes:
    """The content of .xz streams. FormatError for more than MOST_XZ_TIMES their size: text becomes 3 to 20 times as
    large."""
    most, out = XZ_FREE_BYTES + MOST_XZ_TIMES * len(data), bytearray()
    while data:
        stream = lzma.LZMADecompressor(memlimit=XZ_MEMORY_BYTES)
        while not stream.eof:
            if stream.needs_input and not data:
                raise EOFError("the compressed data ends too early")
            out += stream.decompress(data if stream.needs_input else b"", max_length=XZ_BLOCK_BYTES)
            data = b""
            if len(out) > most:
                message = (
                    f"has more than {most} bytes of text in {file.stat().st_size} bytes of .xz; decompress it first"
                )
                raise FormatError(message, path=file)
        data = stream.unused_data.lstrip(b"\0")  # padding, then perhaps another stream
    return bytes(out)


def _paragraph_blocks(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = text.find("\n\n", start + _BLOCK_CHARACTERS)
        end = len(text) if end < 0 else end + 2
        yield text[start:end]
        start = end


TOKENIZER_OUTPUTS = ("tokenizer.model", "tokenizer_config.json", "generation_config.json")


def train_sentencepiece(files: Sequence[Path], folder: Path, vocab_size: int, progress: Progress | None = None) -> int:
    """A byte-pair tokenizer of the texts, in `folder`: BOS 1, EOS 2, a newline as a token of its own, bytes for all
    characters that are rare.   -> the size of its vocabulary

    Raises FormatError, TokenizerError for texts too short for that many tokens, and ConfigError for one that would be
    replaced by the tokenizer.
    """
    import sentencepiece

    for file in files:
        if any(is_same_file(file, folder / name) for name in TOKENIZER_OUTPUTS):
            raise ConfigError(f"{file} would be replaced by the tokenizer; name another folder", field="texts")
    paragraphs: list[str] = []
    for number, file in enumerate(files):
        paragraphs += filter(str.strip, read_text(file).split("\n"))
        if progress is not None:
            progress(number + 1, len(files))
    if not paragraphs:
        raise FormatError("there is no text", path=files[0])
    settings: dict[str, Any] = {"model_type": "bpe", "byte_fallback": True, "character_coverage": 0.9995}
    settings |= {
        "max_sentence_length": 1 << 30,  # bytes of a line; SentencePiece leaves out longer ones, from 4,193 by default
        "user_defined_symbols": ["\n"],
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "minloglevel": 2,
    }
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(paragraphs), model_writer=model, vocab_size=vocab_size, **settings
        )
    except (RuntimeError, OSError) as problem:
        raise TokenizerError(f"SentencePiece cannot make {vocab_size} tokens of these texts: {problem}") from problem
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    config |= {"add_eos_token": False, "legacy": False}
    facts = [json.dumps(each, indent=1).encode() for each in (config, {"bos_token_id": 1, "eos_token_id": 2})]
    for name, data in zip(TOKENIZER_OUTPUTS, [model.getvalue(), *facts], strict=True):
        write_file(folder / name, data)
    return load_tokenizer(folder).vocab_size
