"""tokenizers.gguf_vocab: metadata to files and back, the same ids and texts after it, and bad metadata."""

from __future__ import annotations

import copy
import gc
import json
import logging
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as LibraryTokenizer

import bitnet_ref.errors
from bitnet_ref.errors import TokenizerError
from bitnet_ref.formats.gguf.export import write_gguf
from bitnet_ref.formats.gguf.file import Typed
from bitnet_ref.formats.open import read_tokenizer, read_tokenizer_files
from bitnet_ref.tokenizers import Tokenizer, load_tokenizer, load_tokenizer_files
from bitnet_ref.tokenizers.gguf_bpe import _pre_of
from bitnet_ref.tokenizers.gguf_keys import GgufVocabulary
from bitnet_ref.tokenizers.gguf_sentencepiece import ADDED_SCORE, model_from_vocabulary
from bitnet_ref.tokenizers.gguf_vocab import gguf_from_tokenizer_files, pad_vocabulary, tokenizer_files_from_gguf
from bitnet_ref.tokenizers.sentencepiece_model import UNIGRAM, UNKNOWN, read_model, write_model
from bitnet_ref.tokenizers.settings import TOOL_TEMPLATE

STORYTELLER = Path(bitnet_ref.errors.__file__).parent / "assets" / "storyteller"
FILES = {path.name: path.read_bytes() for path in STORYTELLER.iterdir() if "token" in path.name}
BOS, EOS, EOT = "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"
G = "tokenizer.ggml."

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (  # as Llama 3's tokenizer.json has it
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
    "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
QWEN2 = (  # as Qwen2's has it
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
    "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
QWEN35 = (  # as Qwen3.5's has it: marks belong to their letters
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*"
    "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
PRES = {"gpt-2": (), "llama-bpe": (LLAMA3,), "smaug-bpe": (LLAMA3,), "qwen2": (QWEN2,), "qwen35": (QWEN35,)}
PRES["hunyuan-dense"] = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^"""
    "\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)


def byte_level(pre: str) -> dict[str, bytes]:
    """A small byte-level BPE, trained here, with that pre-tokenizer."""
    tokenizer = LibraryTokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not PRES[pre])
    split = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRES[pre]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, last]) if split else last
    tokenizer.decoder = decoders.ByteLevel()
    texts = ["It's 12345 o'clock, said the lion; I'LL go.\n\n\t x = y+1\r\n", "naïve café 日本語 😀  the the the"] * 3
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in (BOS, EOS, EOT)])
    tokenizer.add_tokens([AddedToken("plain added", special=False, normalized=False)])
    config = {"bos_token": BOS, "eos_token": EOS, "pad_token": EOT, "add_bos_token": True}
    return {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


@pytest.fixture(scope="module")
def pairs() -> dict[str, tuple[Tokenizer, Tokenizer]]:
    """name -> (the tokenizer, the same after a journey through GGUF metadata)."""
    kinds = {"storyteller": FILES} | {pre: byte_level(pre) for pre in PRES}
    return {
        name: (
            load_tokenizer_files(files),
            load_tokenizer_files(tokenizer_files_from_gguf(gguf_from_tokenizer_files(files))),
        )
        for name, files in kinds.items()
    }


def check_same(before: Tokenizer, after: Tokenizer, text: str) -> None:
    ids = before.encode(text)
    assert after.encode(text) == ids
    assert after.decode(ids, skip_special_tokens=False) == before.decode(ids, skip_special_tokens=False)


KINDS = ["storyteller", *PRES]
PARTS = [
    *("Once", " upon", "time", " ", "  ", "\n", "\r\n", "\t", "12345", "'s", "'LL", "é", "日本", "😀", "\0"),
    *("<s>", "</s>", "<unk>", BOS, EOS, EOT, "plain added", "<0x41>", "\u2581", "x=y+1;", "the lion", "İ", "\u0301"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_what_they_say_of_themselves(pairs: dict[str, tuple[Tokenizer, Tokenizer]], kind: str) -> None:
    before, after = pairs[kind]
    for name in ("vocab_size", "bos_id", "pad_id", "eos_ids", "chat_template"):
        assert getattr(after, name) == getattr(before, name)
    for token in range(before.vocab_size):
        assert after.id_to_token(token) == before.id_to_token(token)
        assert after.is_special(token) == before.is_special(token)
        assert after.token_bytes(token) == before.token_bytes(token)


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_ids_and_texts(pairs: dict[str, tuple[Tokenizer, Tokenizer]], kind: str) -> None:
    before, after = pairs[kind]
    dice = random.Random(7)
    for _ in range(600):
        check_same(before, after, "".join(dice.choices(PARTS, k=dice.randrange(12))))
    for _ in range(300):
        ids = [dice.randrange(before.vocab_size) for _ in range(dice.randrange(20))]
        assert after.decode(ids) == before.decode(ids)


@settings(deadline=None, max_examples=150)
@given(text=st.text())
def test_the_same_ids_of_any_text(pairs: dict[str, tuple[Tokenizer, Tokenizer]], text: str) -> None:
    for before, after in pairs.values():
        check_same(before, after, text)


def test_tokenizer_model_is_preferred() -> None:
    both = {**FILES, "tokenizer.json": byte_level("gpt-2")["tokenizer.json"]}
    assert repr(gguf_from_tokenizer_files(both)) == repr(gguf_from_tokenizer_files(FILES))


def test_storyteller_as_llama_cpp_writes_it() -> None:
    out = gguf_from_tokenizer_files(FILES)
    tokens = out[G + "tokens"]
    assert (out[G + "model"], out[G + "pre"], len(tokens)) == ("llama", "default", 4096)
    assert tokens[:4] == ["<unk>", "<s>", "</s>", "\n"]
    assert out[G + "token_type"][:5].tolist() == [2, 3, 3, 4, 6]
    assert (out[G + "token_type"].dtype, out[G + "scores"].dtype) == (np.int32, np.float32)
    assert out[G + "scores"][tokens.index("he")] == -1
    ids = {key: value for key, value in out.items() if key.endswith("_id")}
    assert ids == {G + "unknown_token_id": 0, G + "bos_token_id": 1, G + "eos_token_id": 2}
    assert (out[G + "add_bos_token"], out[G + "add_eos_token"], out[G + "add_space_prefix"]) == (True, False, True)
    before, after = (read_model(data, None) for data in (FILES["tokenizer.model"], model_of(out)))
    assert before == after


def model_of(metadata: dict[str, Any]) -> bytes:
    return tokenizer_files_from_gguf(metadata)["tokenizer.model"]


@pytest.mark.parametrize("pre", PRES)
def test_the_name_of_the_pre_tokenizer(pre: str) -> None:
    out = gguf_from_tokenizer_files(byte_level(pre))
    assert out[G + "pre"] == pre
    assert all(line.count(" ") == 1 for line in out[G + "merges"])
    assert (out[G + "bos_token_id"], out[G + "eos_token_id"]) == tuple(map(out[G + "tokens"].index, (BOS, EOS)))
    before = json.loads(byte_level(pre)["tokenizer.json"])
    after = json.loads(tokenizer_files_from_gguf(out)["tokenizer.json"])
    assert after["model"] == before["model"]
    assert after["added_tokens"] == before["added_tokens"]


def test_a_pre_tokenizer_that_leaves_its_expression_out() -> None:
    assert _pre_of({"type": "ByteLevel", "add_prefix_space": False}, False, None) == ("gpt-2", False)


@pytest.mark.parametrize("pre", ["default", "smollm", "llama3", "falcon3", "stablelm2", "tekken", "minicpm5"])
def test_other_names(pre: str) -> None:
    out = gguf_from_tokenizer_files(byte_level("gpt-2")) | {G + "pre": pre}
    tokenizer = load_tokenizer_files(tokenizer_files_from_gguf(out))
    text = "It's 1234567 o'clock -- the +1 lion.\n\n x"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    again = gguf_from_tokenizer_files(tokenizer_files_from_gguf(out))[G + "pre"]
    assert again == {"llama3": "llama-bpe", "falcon3": "llama-bpe", "stablelm2": "qwen2"}.get(pre, pre)


@pytest.mark.parametrize("padding", [4097, 2**32 - 1])
def test_padding_outside_of_the_vocabulary_is_ignored(padding: int, caplog: pytest.LogCaptureFixture) -> None:
    """As in llama.cpp, which warns."""
    out = gguf_from_tokenizer_files(FILES)
    files = tokenizer_files_from_gguf(out | {G + "padding_token_id": padding})
    assert f"padding_token_id: {padding} ignored" in caplog.text
    assert files == tokenizer_files_from_gguf({key: out[key] for key in out if key != G + "padding_token_id"})


def test_where_mistrals_and_minicpm5s_pre_tokenizers_cut() -> None:
    """A capital letter begins a piece in "tekken"; "minicpm5" cuts numbers off, in threes."""
    for pre, pieces in (
        ("tekken", ["He", "Said", " It", "'s", " ", "1", "2", "3", "4", "!\n/"]),
        ("minicpm5", ["HeSaid", " It", "'s", " ", "123", "4", "!\n", "/"]),
    ):
        out = gguf_from_tokenizer_files(byte_level("gpt-2")) | {G + "pre": pre}
        table = json.loads(tokenizer_files_from_gguf(out)["tokenizer.json"])
        library = LibraryTokenizer.from_str(json.dumps(table)).pre_tokenizer
        cut = [piece for piece, _ in library.pre_tokenize_str("HeSaid It's 1234!\n/")]
        assert [piece.replace("\u0120", " ").replace("\u010a", "\n") for piece in cut] == pieces


def test_defaults_of_llama_cpp() -> None:
    """BOS is added when the file does not say so, by "llama" vocabularies and by Llama 3's pre-tokenizer alone."""
    for files, expected in ((FILES, True), (byte_level("llama-bpe"), True), (byte_level("gpt-2"), False)):
        out = gguf_from_tokenizer_files(files)
        del out[G + "add_bos_token"], out[G + "add_eos_token"]
        tokenizer = load_tokenizer_files(tokenizer_files_from_gguf(out))
        assert tokenizer.encode("") == [tokenizer.bos_id] * expected


def test_several_stops_a_template_and_added_tokens() -> None:
    """Added tokens behind the model's pieces, with a hole: what llama.cpp pads is left out again."""
    config = json.loads(FILES["tokenizer_config.json"]) | {
        "pad_token": "<pad>",
        "added_tokens_decoder": {
            "4096": {"content": "<|end|>", "special": True},
            "4098": {"content": "two words", "special": False},
            "4099": {"content": "<pad>", "special": True},
        },
    }
    files = FILES | {
        "tokenizer_config.json": json.dumps(config).encode(),
        "generation_config.json": b'{"eos_token_id": [4096, 2]}',
        "chat_template.jinja": "{{ messages[0]['content'] }}é".encode(),
    }
    out = gguf_from_tokenizer_files(files)
    assert (out[G + "eos_token_id"], out[G + "eot_token_id"], out[G + "padding_token_id"]) == (4096, 2, 4099)
    assert out[G + "tokens"][4096:] == ["<|end|>", "[PAD1]", "two words", "<pad>"]
    assert out[G + "token_type"][4096:].tolist() == [3, 5, 4, 3]
    back = tokenizer_files_from_gguf(out)
    assert json.loads(back["generation_config.json"])["eos_token_id"] == [4096, 2]
    assert back["chat_template.jinja"] == files["chat_template.jinja"]
    before, after = load_tokenizer_files(files), load_tokenizer_files(back)
    assert (after.vocab_size, after.eos_ids, after.pad_id) == (4100, (4096, 2), 4099)
    for text in ("a two words<|end|> b<pad>", "two  words", "<|end|>"):
        check_same(before, after, text)
    assert after.apply_chat_template([{"role": "user", "content": "x"}]) == "xé"
    with pytest.raises(TokenizerError, match="4097 is not in the vocabulary"):
        after.id_to_token(4097)


def test_tokens_numbered_where_the_library_would_not() -> None:
    """Special tokens first, and a hole: they must be in the vocabulary, or the library gives them other ids."""
    out = gguf_from_tokenizer_files(byte_level("llama-bpe"))
    tokens, types = out[G + "tokens"], out[G + "token_type"].tolist()
    out[G + "tokens"] = ["<first>", "[PAD1]", "[PAD1]", *tokens]
    out[G + "token_type"] = [3, 5, 5, *types]
    for key in ("bos", "eos", "eot", "padding"):
        if f"{G}{key}_token_id" in out:
            out[f"{G}{key}_token_id"] += 3
    tokenizer = load_tokenizer_files(tokenizer_files_from_gguf(out))
    assert tokenizer.encode("<first>" + EOT, add_special_tokens=False) == [0, 3 + tokens.index(EOT)]
    assert tokenizer.vocab_size == 3 + len(tokens)


@pytest.mark.sample(3)
@pytest.mark.parametrize("pre", PRES)
def test_a_long_run_of_blanks_is_no_long_search(pre: str) -> None:
    tokenizer = load_tokenizer_files(byte_level(pre))
    for blank in (" ", "\n", " \n"):
        text = "a" + blank * 50_000 + "b"
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("kind", KINDS)
def test_padding_has_no_token(kind: str) -> None:
    """llama.cpp needs a token for each row of the embedding; none of them is one of the tokenizer's."""
    plain = gguf_from_tokenizer_files(FILES if kind == "storyteller" else byte_level(kind))
    size = len(plain[G + "tokens"])
    padded = pad_vocabulary(plain, size + 3)
    assert padded[G + "tokens"][size:] == [f"[PAD{n}]" for n in range(size, size + 3)]
    assert {len(padded[key]) for key in (G + "token_type", G + "scores") if key in padded} == {size + 3}
    for metadata in (padded, plain, pad_vocabulary(plain, size - 1)):
        after = gguf_from_tokenizer_files(tokenizer_files_from_gguf(metadata))
        assert after[G + "tokens"] == plain[G + "tokens"]


@pytest.mark.thorough
def test_llama_3s_vocabulary_without_a_pre_tokenizer(caplog: pytest.LogCaptureFixture) -> None:
    """As in the published GGUF of BitNet 2B-4T."""
    out = gguf_from_tokenizer_files(byte_level("llama-bpe"))
    del out[G + "pre"]
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.pre: expected one of llama-bpe, .*it is missing"):
        tokenizer_files_from_gguf(out)
    more = 128256 - len(out[G + "tokens"])
    out[G + "tokens"] = out[G + "tokens"] + [f"<|reserved_{n}|>" for n in range(more)]
    out[G + "token_type"] = np.append(out[G + "token_type"], np.full(more, 3, dtype=np.int32))
    with caplog.at_level(logging.WARNING):
        files = tokenizer_files_from_gguf(out)
    assert "taking llama-bpe" in caplog.text
    assert json.loads(files["tokenizer.json"])["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] == LLAMA3


def test_python_lists_serve_as_well_as_arrays() -> None:
    out = gguf_from_tokenizer_files(FILES)
    plain = out | {key: out[key].tolist() for key in (G + "scores", G + "token_type")}
    wide = out | {
        G + "scores": out[G + "scores"].astype(np.float64),
        G + "token_type": out[G + "token_type"].astype("u4"),
    }
    assert tokenizer_files_from_gguf(plain) == tokenizer_files_from_gguf(wide) == tokenizer_files_from_gguf(out)


LLAMA = gguf_from_tokenizer_files(FILES)
GPT = gguf_from_tokenizer_files(byte_level("gpt-2"))


def changed(values: Any, n: int, value: Any) -> list[Any]:
    out = list(values)
    out[n] = value
    return out


@pytest.mark.parametrize(
    ("base", "key", "value", "message"),
    [
        (LLAMA, "model", None, r"model: there is no tokenizer"),
        (LLAMA, "model", "t5", r"model: expected one of llama, gpt2, gemma4, got 't5'"),
        (LLAMA, "model", 3, "model: expected a string, got int"),
        (LLAMA, "tokens", None, "tokens: expected 1 to"),
        (LLAMA, "tokens", np.zeros(3), "tokens: expected an array of strings, got ndarray"),
        (LLAMA, "tokens", changed(LLAMA[G + "tokens"], 9, b"x"), r"tokens\[9\]: expected a string, got bytes"),
        (LLAMA, "tokens", changed(LLAMA[G + "tokens"], 9, ""), r"tokens\[9\]: a token is empty"),
        (LLAMA, "tokens", changed(LLAMA[G + "tokens"], 300, "<s>"), r"tokens\[300\]: '<s>' is token 1 already"),
        (LLAMA, "tokens", changed(LLAMA[G + "tokens"], 300, "\ud800"), r"tokens\[300\]: .*lone surrogate"),
        (LLAMA, "tokens", changed(LLAMA[G + "tokens"], 9, "<0x-1>"), r"tokens\[9\]: '<0x-1>' is no byte token"),
        (LLAMA, "tokens", changed(LLAMA[G + "tokens"], 300, "<0xZZ>"), r"tokens\[300\]: '<0xZZ>' is no byte token"),
        (LLAMA, "tokens", changed(LLAMA[G + "tokens"], 9, "<0xfz>"), "is no byte token"),
        (LLAMA, "tokens", changed(LLAMA[G + "tokens"], 9, "nine"), "'nine' is no byte token"),
        (LLAMA, "tokens", LLAMA[G + "tokens"][:-1], "token_type: expected 4095 values, one for each token, got 4096"),
        (LLAMA, "scores", None, "scores: is missing"),
        (LLAMA, "scores", LLAMA[G + "scores"][:-1], "scores: expected 4096 values, one for each token, got 4095"),
        (
            LLAMA,
            "scores",
            np.zeros(4096, dtype=np.uint8),
            "scores: expected an array of floating-point numbers, got uint8",
        ),
        (LLAMA, "scores", [0] * 4096, "scores: expected an array of floating-point numbers, got int values"),
        (LLAMA, "scores", np.zeros((64, 64), dtype=np.float32), r"got float32 of shape \(64, 64\)"),
        (LLAMA, "scores", changed(LLAMA[G + "scores"].tolist(), 7, float("nan")), r"scores\[7\]: nan is not finite"),
        (LLAMA, "scores", 5.0, "scores: expected an array of floating-point numbers, got 5.0"),
        (LLAMA, "token_type", None, "token_type: is missing"),
        (LLAMA, "token_type", LLAMA[G + "scores"], "token_type: expected an array of integers, got float32"),
        (LLAMA, "token_type", changed(LLAMA[G + "token_type"].tolist(), 5, 7), r"token_type\[5\]: 7 is no token type"),
        (
            LLAMA,
            "token_type",
            changed(LLAMA[G + "token_type"].tolist(), 5, 1),
            "expected 256 byte tokens or none, got 255",
        ),
        (
            LLAMA,
            "token_type",
            changed(LLAMA[G + "token_type"].tolist(), 5, 2),
            "expected 256 byte tokens or none, got 255",
        ),
        (LLAMA, "bos_token_id", 4096, "bos_token_id: token 4096 is not in the vocabulary of 4096"),
        (LLAMA, "eos_token_id", -1, "eos_token_id: token -1 is not in"),
        (LLAMA, "eot_token_id", 2**32 - 1, "eot_token_id: token 4294967295 is not in"),
        (LLAMA, "padding_token_id", "0", "padding_token_id: expected a token id, got '0'"),
        (LLAMA, "unknown_token_id", True, "unknown_token_id: expected a token id, got True"),
        (LLAMA, "add_bos_token", 1, "add_bos_token: expected true or false, got 1"),
        (LLAMA, "add_space_prefix", "no", "add_space_prefix: expected true or false"),
        (LLAMA, "precompiled_charsmap", [300], "precompiled_charsmap: expected bytes"),
        (GPT, "pre", "gpt-9", "pre: expected one of .*: got 'gpt-9'"),
        (GPT, "pre", None, "pre: expected one of .*: it is missing"),
        (GPT, "merges", None, "merges: is missing"),
        (
            GPT,
            "merges",
            changed(GPT[G + "merges"], 3, "t zzzz"),
            r"merges\[3\]: 't zzzz': 'zzzz' is not in the vocabulary",
        ),
        (GPT, "merges", changed(GPT[G + "merges"], 3, "! !"), r"merges\[3\]: '! !': '!!' is not in the vocabulary"),
        (GPT, "merges", changed(GPT[G + "merges"], 3, "the"), r"merges\[3\]: 'the': expected two tokens"),
        (GPT, "merges", changed(GPT[G + "merges"], 3, " the"), r"merges\[3\]: ' the': expected two tokens"),
        (GPT, "merges", changed(GPT[G + "merges"], 3, 5), r"merges\[3\]: expected a string, got int"),
    ],
)
def test_metadata_that_must_not_be_believed(base: dict[str, Any], key: str, value: Any, message: str) -> None:
    metadata = copy.copy(base)
    if value is None:
        metadata.pop(G + key)
    else:
        metadata[G + key] = value
    with pytest.raises(TokenizerError, match=message) as caught:
        tokenizer_files_from_gguf(metadata)
    assert caught.value.field is not None
    assert caught.value.field.startswith(G)


@pytest.mark.parametrize("value", [5, ["1 x"], [7], ["9" * 5000]])
def test_bad_words_that_are_no_ids(value: Any) -> None:
    with pytest.raises(TokenizerError, match=r"bitnet_ref.bad_words_ids: expected strings of token ids"):
        tokenizer_files_from_gguf({**LLAMA, "bitnet_ref.bad_words_ids": value})


def generation_of(**values: Any) -> dict[str, Any]:
    keys = {f"general.sampling.{key}": value for key, value in values.items()}
    return json.loads(tokenizer_files_from_gguf(LLAMA | keys)["generation_config.json"])


@pytest.mark.thorough
def test_the_sampling_goes_along() -> None:
    """A float32 is its shortest decimal; a whole number stays one; what is no finite number says nothing."""
    numbers = {"temp": np.float32(0.6), "top_k": np.uint32(40), "top_p": np.float32(0.95)}
    numbers |= {"min_p": 0.05, "penalty_repeat": np.float64(1.1)}
    expected = {"temperature": 0.6, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1}
    generation = generation_of(**numbers)
    assert {key: generation[key] for key in expected} == expected
    assert type(generation["top_k"]) is int
    assert generation_of(temp=2, top_k=3.0) == generation_of() | {"temperature": 2, "top_k": 3.0}
    wrong = (True, np.bool_(True), "0.5", None, [1], float("nan"), float("inf"), np.float32("-inf"))
    for value in wrong:
        assert generation_of(temp=value) == generation_of()
    files = FILES | {"generation_config.json": json.dumps({**expected, "typical_p": 0.5}).encode()}
    metadata = gguf_from_tokenizer_files(files)
    written = {key: value for key, value in metadata.items() if key.startswith("general.")}
    assert written == {
        "general.sampling.temp": 0.6,
        "general.sampling.top_k": 40,
        "general.sampling.top_p": 0.95,
        "general.sampling.min_p": 0.05,
        "general.sampling.penalty_repeat": 1.1,
    }
    assert {key: type(value) for key, value in written.items() if type(value) is not float} == {
        "general.sampling.top_k": int
    }
    assert load_tokenizer_files(tokenizer_files_from_gguf(metadata)).recommended_sampling == expected


def test_the_bad_words_go_along() -> None:
    files = FILES | {"generation_config.json": b'{"bad_words_ids": [[262], [300, 301]]}'}
    metadata = gguf_from_tokenizer_files(files)
    assert metadata["bitnet_ref.bad_words_ids"] == ["262", "300 301"]
    before, after = load_tokenizer_files(files), load_tokenizer_files(tokenizer_files_from_gguf(metadata))
    assert before.recommended_sampling == after.recommended_sampling
    assert before.recommended_sampling["bad_words"] == (before.decode([262]), before.decode([300, 301]))


@pytest.mark.parametrize(("add_bos", "add_eos"), [(False, False), (False, True), (True, False), (True, True)])
def test_what_is_around_a_text_goes_along(add_bos: bool, add_eos: bool) -> None:
    for files in (FILES, byte_level("gpt-2")):
        config = json.loads(files["tokenizer_config.json"]) | {"add_bos_token": add_bos, "add_eos_token": add_eos}
        before = load_tokenizer_files(files | {"tokenizer_config.json": json.dumps(config).encode()})
        metadata = gguf_from_tokenizer_files(files | {"tokenizer_config.json": json.dumps(config).encode()})
        assert (metadata[G + "add_bos_token"], metadata[G + "add_eos_token"]) == (add_bos, add_eos)
        after = load_tokenizer_files(tokenizer_files_from_gguf(metadata))
        assert after.encode("a") == before.encode("a")
        assert len(after.encode("")) == add_bos + add_eos


def test_what_is_left_out_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """In a warning each, with the first eight tokens."""
    assert not caplog.text
    gguf_from_tokenizer_files(FILES)
    assert not caplog.text
    flags = ("lstrip", "rstrip", "single_word")
    added = {str(4096 + n): {"content": f"<{n}>", flags[n % 3]: True} for n in range(9)}
    added["4105"] = {"content": "<plain>"}
    config = json.loads(FILES["tokenizer_config.json"]) | {"legacy": True, "added_tokens_decoder": added}
    gguf_from_tokenizer_files(FILES | {"tokenizer_config.json": json.dumps(config).encode()})
    legacy, greedy = (record.getMessage() for record in caplog.records)
    assert "`legacy: true`" in legacy
    assert f"{[f'<{n}>' for n in range(8)]} take in the spaces" in greedy


def test_what_llama_cpp_does_not_do_to_a_text_is_said(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("sentencepiece", minversion="0.2.2", reason="before, a normalizer did not give its model")
    model = read_model(FILES["tokenizer.model"], None)
    nfkc = sentencepiece.SentencePieceNormalizer(rule_name="nfkc").serialized_model_proto()
    charsmap = read_model(FILES["tokenizer.model"] + nfkc, None).charsmap  # of two joined messages the later counts
    normalizes, collapses = {"charsmap": charsmap}, {"remove_extra_whitespaces": True}
    both = ["precompiled_charsmap", "remove_extra_whitespaces"]
    for changes, keys in ((normalizes, both[:1]), (collapses, both[1:]), (normalizes | collapses, both)):
        caplog.clear()
        data = write_model(replace(model, **changes), {"unk": 0, "bos": 1, "eos": 2})
        out = gguf_from_tokenizer_files(FILES | {"tokenizer.model": data})
        warnings = [record.getMessage() for record in caplog.records]
        assert [key in words and "llama.cpp ignores" in words for key, words in zip(keys, warnings, strict=True)] == [
            True
        ] * len(keys)
        assert read_model(model_of(out), None) == replace(model, **changes)


@pytest.mark.parametrize("steps", [[], ["NFC"], ["NFC", "Lowercase"]])
def test_a_byte_level_vocabulary_with_a_normalizer(steps: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """Qwen's is NFC, and DeepSeek's a sequence of nothing."""
    files = byte_level("qwen2")
    plain = gguf_from_tokenizer_files(files)
    table = json.loads(files["tokenizer.json"])
    table["normalizer"] = {"type": "Sequence", "normalizers": [{"type": step} for step in steps]}
    files["tokenizer.json"] = json.dumps(table).encode()
    if len(steps) > 1:
        with pytest.raises(TokenizerError, match="without a normalizer"):
            gguf_from_tokenizer_files(files)
        return
    assert gguf_from_tokenizer_files(files)[G + "tokens"] == plain[G + "tokens"]
    assert ("normalized (NFC)" in caplog.text) == bool(steps)


def test_many_unknown_tokens() -> None:
    """phi-3's vocabulary in llama.cpp has 53 of type 2: `<unk>`, and others that act as control tokens."""
    types = LLAMA[G + "token_type"].copy()
    others = [n for n in range(300, 340) if types[n] == 1]
    assert len(others) > 30
    types[others] = 2
    tokenizer = load_tokenizer_files(tokenizer_files_from_gguf(LLAMA | {G + "token_type": types}))
    plain = load_tokenizer_files(tokenizer_files_from_gguf(LLAMA))
    assert tokenizer.vocab_size == plain.vocab_size
    assert tokenizer.token_to_id("<unk>") == 0
    for n in others:
        assert tokenizer.id_to_token(n) == plain.id_to_token(n)
        assert tokenizer.is_special(n)
        assert tokenizer.decode([n]) == ""
    last = tokenizer_files_from_gguf(LLAMA | {G + "token_type": types, G + "unknown_token_id": others[-1]})
    assert read_model(last["tokenizer.model"], "x").types[others[-1]] == UNKNOWN
    first = tokenizer_files_from_gguf(LLAMA | {G + "token_type": types, G + "unknown_token_id": 400})  # of no such type
    assert read_model(first["tokenizer.model"], "x").types[0] == UNKNOWN


def test_a_vocabulary_of_one_token() -> None:
    assert GgufVocabulary({G + "model": "gpt2", G + "tokens": ["a"]}).tokens == ["a"]


def test_what_is_cut_off_the_end_of_a_vocabulary() -> None:
    """Added tokens and their padding, both of the score -1000; an unused piece with a score of its own stays."""
    tokens, types = ["<unk>", "a", "b", "old", "<x>", "pad", "<y>"], [2, 1, 1, 5, 3, 5, 3]
    scores = [0.0, -1.0, -2.0, -3.0, *[ADDED_SCORE] * 3]
    metadata = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores}
    vocabulary = GgufVocabulary({G + key: value for key, value in metadata.items()})
    model, added = model_from_vocabulary(vocabulary, {"unk": 0})
    assert read_model(model, "x").pieces == tokens[:4]
    assert added == [4, 6]


def test_a_template_that_is_no_text() -> None:
    for value in (5, "\ud800"):
        with pytest.raises(TokenizerError, match=r"tokenizer\.chat_template"):
            tokenizer_files_from_gguf(LLAMA | {"tokenizer.chat_template": value})


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_value_under_any_key_is_read_or_refused(data: st.DataObject) -> None:
    metadata = dict(data.draw(st.sampled_from([LLAMA, GPT])))
    key = data.draw(st.sampled_from(sorted(metadata)))
    numbers = st.integers(-3, 2**40) | st.floats() | st.booleans()
    value = numbers | st.text(max_size=5) | st.lists(numbers | st.text(max_size=3), max_size=5)
    metadata[key] = data.draw(value)
    try:
        load_tokenizer_files(tokenizer_files_from_gguf(metadata)).encode("Once upon a time")
    except TokenizerError:
        return


def test_what_gguf_cannot_say(llama_json: dict[str, Any]) -> None:
    unigram = read_model(FILES["tokenizer.model"], None)
    unigram.model_type = UNIGRAM
    files = FILES | {"tokenizer.model": write_model(unigram, {"unk": 0, "bos": 1, "eos": 2})}
    with pytest.raises(TokenizerError, match="is a BPE model"):
        gguf_from_tokenizer_files(files)
    with pytest.raises(TokenizerError, match=r"give that tokenizer\.model"):
        gguf_from_tokenizer_files({"tokenizer.json": json.dumps(llama_json).encode()})
    table = json.loads(byte_level("qwen2")["tokenizer.json"])
    table["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\S+"
    with pytest.raises(TokenizerError, match="no name for this pre-tokenizer"):
        gguf_from_tokenizer_files({"tokenizer.json": json.dumps(table).encode()})
    stops = FILES | {"generation_config.json": b'{"eos_token_id": [5, 6, 7, 8]}'}
    with pytest.raises(TokenizerError, match="names 3 stop tokens, and this tokenizer has 5"):
        gguf_from_tokenizer_files(stops)


# -- files that lie in no folder ---------------------------------------------------------------------------------------


def test_files_in_no_folder_are_as_good_as_a_folder() -> None:
    ours, theirs = load_tokenizer_files(FILES), load_tokenizer(STORYTELLER)
    assert (ours.vocab_size, ours.bos_id, ours.eos_ids) == (theirs.vocab_size, theirs.bos_id, theirs.eos_ids)
    assert ours.encode("Once upon a time") == theirs.encode("Once upon a time")


def test_their_errors_say_where_they_came_from() -> None:
    with pytest.raises(TokenizerError, match=r"^m\.gguf: no tokenizer here"):
        load_tokenizer_files({}, path="m.gguf")
    with pytest.raises(TokenizerError, match=r"^m\.gguf.tokenizer_config\.json, bos_token: expected a string"):
        load_tokenizer_files(FILES | {"tokenizer_config.json": b'{"bos_token": 5}'}, path="m.gguf")
    with pytest.raises(TokenizerError, match="expected bytes, got str"):
        load_tokenizer_files(FILES | {"tokenizer_config.json": "{}"})
    with pytest.raises(TokenizerError, match="has more than"):
        load_tokenizer_files(FILES | {"chat_template.jinja": b" " * (5 << 20)})


@pytest.mark.parametrize("key", ["token_type", "scores", "model"])
def test_errors_name_the_gguf(key: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    values = {G + "model": Typed("string", "llama"), G + "tokens": Typed("[string]", ["a", "b"])}
    values |= {G + "token_type": Typed("[int32]", [1, 2]), G + "scores": Typed("[float32]", [0.0, 1.0])}
    write_gguf(path, values | {G + key: Typed("[uint32]", [1])}, [])
    with pytest.raises(TokenizerError) as caught:
        read_tokenizer_files(path)
    assert caught.value.path == str(path)
    assert caught.value.field == G + key
    with pytest.raises(TokenizerError):
        read_tokenizer(path)
    assert gc.isenabled()  # again


def test_gemma4_merges_texts():
    """Its tokens are texts with SentencePiece's space, not bytes of an alphabet; a byte without a token has <0x..>."""
    byte_tokens = [f"<0x{n:02X}>" for n in range(256)]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *byte_tokens, "\u2581", "a", "b", "\n", "\n\n", "ab", "\u2581ab"]
    types = [3, 3, 3, 2, *[6] * 256, *[1] * 7]
    metadata = {"model": "gemma4", "tokens": tokens, "token_type": np.array(types, dtype=np.int32)}
    metadata |= {"merges": ["a b", "\u2581 ab", "\n \n"], "bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3}
    tokenizer = load_tokenizer_files(tokenizer_files_from_gguf({G + key: value for key, value in metadata.items()}))
    text = "ab ab\n\na \u00e9"
    ids = tokenizer.encode(text)
    expected = ["<bos>", "ab", "\u2581ab", "\n\n", "a", "\u2581", "<0xC3>", "<0xA9>"]
    assert [tokens[n] for n in ids] == expected
    assert tokenizer.decode(ids[1:]) == text


def test_the_template_for_tools_goes_along() -> None:
    files = FILES | {"chat_template.jinja": b"plain", TOOL_TEMPLATE: b"with {{ tools }}"}
    metadata = gguf_from_tokenizer_files(files)
    assert metadata["tokenizer.chat_template.tool_use"] == "with {{ tools }}"
    tokenizer = load_tokenizer_files(tokenizer_files_from_gguf(metadata))
    message = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(message) == "plain"
    assert tokenizer.apply_chat_template(message, tools=[{"name": "f"}]).startswith("with [")
    assert (tokenizer.template_for(False), tokenizer.template_for(True)) == ("plain", "with {{ tools }}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.chat_template\.tool_use"):
        tokenizer_files_from_gguf(metadata | {"tokenizer.chat_template.tool_use": 5})
