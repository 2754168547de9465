"""The files that are made of small GGUF vocabularies, and the metadata that is made of files, whole, as recorded.

When a change is meant, running this file records it.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from helpers import DATA

from bitnet_ref.tokenizers import load_tokenizer_files
from bitnet_ref.tokenizers.gguf_bpe import _PRE
from bitnet_ref.tokenizers.gguf_vocab import gguf_from_tokenizer_files, tokenizer_files_from_gguf
from bitnet_ref.tokenizers.sentencepiece_model import BYTE, CONTROL, NORMAL, UNKNOWN, SentencePieceModel, write_model

RECORDED = DATA / "tokenizers" / "gguf_files.json"
G = "tokenizer.ggml."
PIECES: dict[str, Any] = {
    G + "model": "llama",
    G + "tokens": ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "\u2581a", "ab", "<add>", "[PAD]", "two words"],
    G + "scores": [0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -4.0, -5.5, -1000.0, -1000.0, -1000.0],
    G + "token_type": [2, 3, 3, 1, 1, 1, 1, 1, 3, 5, 4],
    G + "bos_token_id": 1,
    G + "eos_token_id": 2,
    G + "unknown_token_id": 0,
}
MERGES: dict[str, Any] = {
    G + "model": "gpt2",
    G + "pre": "gpt-2",
    G + "tokens": ["a", "b", "\u0120", "ab", "\u0120a", "<s>", "</s>", "word"],
    G + "token_type": [1, 1, 1, 1, 1, 3, 3, 4],
    G + "merges": ["a b", "\u0120 a"],
    G + "bos_token_id": 5,
    G + "eos_token_id": 6,
}
CASES: dict[str, dict[str, Any]] = {
    "pieces": PIECES,
    "pieces, without a prefix": {
        **PIECES,
        G + "add_space_prefix": False,
        G + "remove_extra_whitespaces": True,
        G + "add_bos_token": False,
        G + "add_eos_token": True,
        G + "padding_token_id": 2,
    },
    "pieces, a charsmap": {**PIECES, G + "precompiled_charsmap": [0, 0, 0, 0, 97, 0]},
    "pieces, none added": {key: value[:8] if isinstance(value, list) else value for key, value in PIECES.items()},
    "pieces, padding alone at the end": {**PIECES, G + "token_type": [2, 3, 3, 1, 1, 1, 1, 1, 5, 5, 5]},
    "pieces, the unknown one by its key": {
        **PIECES,
        G + "token_type": [3, 3, 3, 1, 1, 1, 1, 1, 3, 5, 4],
    },
    "pieces, several unknown": {**PIECES, G + "token_type": [2, 3, 3, 1, 1, 2, 1, 2, 3, 5, 4]},
    "merges": MERGES,
    "merges, a token may begin with a space": {**MERGES, G + "add_space_prefix": True, G + "add_bos_token": True},
    "merges, both around": {**MERGES, G + "add_bos_token": True, G + "add_eos_token": True, G + "eot_token_id": 7},
    "merges, without types": {key: value for key, value in MERGES.items() if key != G + "token_type"},
    "merges, special ones first": {
        **MERGES,
        G + "tokens": ["<s>", "a", "b", "ab", "</s>"],
        G + "token_type": [3, 1, 1, 1, 3],
        G + "merges": ["a b"],
        G + "bos_token_id": 0,
        G + "eos_token_id": 4,
    },
    "texts": {
        **MERGES,
        G + "model": "gemma4",
        G + "tokens": ["a", "b", "\u2581", "ab", "\u2581a", "<bos>", "<eos>", "<0x41>"],
        G + "token_type": [1, 1, 1, 1, 1, 3, 3, 6],
        G + "merges": ["a b", "\u2581 a"],
    },
}


def files_of(metadata: dict[str, Any]) -> dict[str, Any]:
    files = tokenizer_files_from_gguf(metadata)
    return {name: json.loads(data) if name.endswith(".json") else data.hex() for name, data in sorted(files.items())}


def metadata_again(metadata: dict[str, Any]) -> dict[str, Any]:
    again = gguf_from_tokenizer_files(tokenizer_files_from_gguf(metadata))
    return {
        key: [str(value.dtype), *value.tolist()] if isinstance(value, np.ndarray) else value
        for key, value in again.items()
    }


def record(name: str) -> dict[str, Any]:
    metadata = CASES[name]
    if G + "precompiled_charsmap" in metadata:  # which the library refuses: it has no trie
        return {"files": files_of(metadata)}
    tokenizer = load_tokenizer_files(tokenizer_files_from_gguf(metadata))
    return {
        "files": files_of(metadata),
        "again": None if metadata[G + "model"] == "gemma4" else metadata_again(metadata),
        "ids": [tokenizer.encode(text) for text in ("", "a", "ab a", "a<s>b")],
    }


@pytest.mark.parametrize("name", CASES)
def test_the_files_of_a_vocabulary(name: str) -> None:
    assert record(name) == json.loads(RECORDED.read_text())[name]


def test_every_name_of_a_pre_tokenizer() -> None:
    """How many patterns, whether whole pieces are taken, and whether BOS is added where the file does not say it."""
    llama = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon_e", "falcon-h1")
    llama += ("pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken")
    qwen2 = ("qwen2", "deepseek-r1-qwen", "stablelm2", "kormo", "f2llmv2", "megrez", "hunyuan", "solar-open", "grok-2")
    gpt2 = ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "gigachat", "a.x-4.0", "mellum")
    digits = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2")
    assert {name: (len(patterns), ignores, bos) for name, (patterns, ignores, bos) in _PRE.items()} == {
        **dict.fromkeys(llama, (1, True, True)),
        **dict.fromkeys(("smaug-bpe", "dbrx", "glm4", "chatglm-bpe", *qwen2), (1, False, False)),
        **dict.fromkeys((*gpt2, "modern-bert", "exaone4", "qwen35"), (1, False, False)),
        **dict.fromkeys(digits, (2, False, False)),
        "minicpm5": (2, True, False),
        "falcon": (3, False, False),
        "deepseek-llm": (6, False, False),
        "deepseek-coder": (5, False, False),
        **dict.fromkeys(("hunyuan-dense", "deepseek-v3", "joyai-llm", "hy_v4"), (3, False, False)),
        "default": (4, False, False),
    }


def test_a_model_byte_by_byte() -> None:
    """As protobuf writes the fields of sentencepiece_model.proto."""
    model = SentencePieceModel(
        pieces=["<unk>", "<s>", "<0x41>", "a"],
        scores=[0.0, 0.0, 0.0, -1.5],
        types=[UNKNOWN, CONTROL, BYTE, NORMAL],
        model_type=2,
        add_dummy_prefix=False,
        charsmap=b"\x00\x00\x00\x00x\x00",
    )
    piece = (
        b"\x0a\x0e\x0a\x05<unk>\x15\x00\x00\x00\x00\x18\x02"
        b"\x0a\x0c\x0a\x03<s>\x15\x00\x00\x00\x00\x18\x03"
        b"\x0a\x0f\x0a\x06<0x41>\x15\x00\x00\x00\x00\x18\x06"
        b"\x0a\x0a\x0a\x01a\x15\x00\x00\xc0\xbf\x18\x01"
    )
    none = b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"
    trainer = b"\x18\x02\x20\x04\x98\x02\x01\xc0\x02\x00\xea\x02\x05<unk>\xc8\x02\x01\xf2\x02\x03<s>"
    trainer += b"\xd0\x02" + none + b"\xd8\x02" + none
    normalizer = b"\x0a\x06custom\x12\x06\x00\x00\x00\x00x\x00\x18\x00\x20\x01\x28\x01"
    written = write_model(model, {"unk": 0, "bos": 1})
    assert (
        written == piece + b"\x12" + bytes([len(trainer)]) + trainer + b"\x1a" + bytes([len(normalizer)]) + normalizer
    )


if __name__ == "__main__":
    lines = [f"{json.dumps(name)}: {json.dumps(record(name))}" for name in CASES]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
