"""Tokenizers for the tests: the shipped one, and two small tokenizer.json kinds trained here, the same each time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as LibraryTokenizer

import bitnet_ref.errors
from bitnet_ref.tokenizers import Tokenizer, load_tokenizer

STORYTELLER = Path(bitnet_ref.errors.__file__).parent / "assets" / "storyteller"
TEXTS = [
    "Once upon a time there was a lion, who said: 'I'm not afraid!'",
    "naïve café — 日本語のテキスト 😀 and 👩‍👧 emoji",
    "the quick brown fox\n\njumps   over the lazy dog, the lazy dog",
] * 4


def byte_level() -> LibraryTokenizer:
    """As Llama 3 and BitNet 2B-4T: byte-level BPE, BOS by a post-processor, `<|eot_id|>`; two added tokens that do not
    follow the byte alphabet, one of them made of its characters."""
    tokenizer = LibraryTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=specials, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("plain added", special=False), AddedToken("Ġx", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A",
        pair="<|begin_of_text|> $A $B",
        special_tokens=[("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))],
    )
    return tokenizer


def llama_style() -> LibraryTokenizer:
    """As Llama 2's SentencePiece model is converted: byte fallback, Prepend, Replace/ByteFallback/Fuse/Strip."""
    normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    trained = LibraryTokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizer
    trained.train_from_iterator(
        [text for text in TEXTS if text.isascii()], trainers.BpeTrainer(vocab_size=150, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for token in sorted(model["vocab"], key=model["vocab"].__getitem__):
        vocabulary.setdefault(token, len(vocabulary))
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = LibraryTokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizer
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


@pytest.fixture(scope="session")
def storyteller() -> Tokenizer:
    return load_tokenizer(STORYTELLER)


@pytest.fixture(scope="session")
def byte_level_json() -> dict[str, Any]:
    return json.loads(byte_level().to_str())


@pytest.fixture(scope="session")
def llama_json() -> dict[str, Any]:
    return json.loads(llama_style().to_str())


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """`make_folder({"tokenizer.json": {...}, "chat_template.jinja": "..."})`: a folder with these files."""

    def make(files: dict[str, Any]) -> Path:
        for name, content in files.items():
            if isinstance(content, bytes):
                (tmp_path / name).write_bytes(content)
            else:
                text = content if isinstance(content, str) else json.dumps(content)
                (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path

    return make


@pytest.fixture(scope="session")
def kinds(
    storyteller: Tokenizer,
    byte_level_json: dict[str, Any],
    llama_json: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Tokenizer]:
    """One tokenizer of every kind."""
    found = {"sentencepiece": storyteller}
    for name, table in (("byte_level", byte_level_json), ("llama", llama_json)):
        folder = tmp_path_factory.mktemp(name)
        (folder / "tokenizer.json").write_text(json.dumps(table), encoding="utf-8")
        bos, eos = ("<s>", "</s>") if name == "llama" else ("<|begin_of_text|>", "<|end_of_text|>")
        (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": bos, "eos_token": eos}))
        found[name] = load_tokenizer(folder)
    return found
