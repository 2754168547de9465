"""A streamed decode is the decode: for any ids, any tokenizer kind, special tokens shown or not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders

from bitnet_ref.errors import TokenizerError
from bitnet_ref.tokenizers import Tokenizer
from bitnet_ref.tokenizers.hf_json import read_decoder
from bitnet_ref.tokenizers.hf_tokenizer import HfTokenizer
from bitnet_ref.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from bitnet_ref.tokenizers.streaming import (
    REPLACEMENT,
    ByteDetokenizer,
    ByteRunDetokenizer,
    PairDetokenizer,
    WholeDetokenizer,
)

# Numbers in [0, 1), made ids by each tokenizer: half of them low, where byte and special tokens live.
FRACTIONS = st.lists(st.tuples(st.booleans(), st.floats(0, 1, exclude_max=True)), max_size=16)


def ids_from(tokenizer: Tokenizer, fractions: list[tuple[bool, float]]) -> list[int]:
    low = min(265, tokenizer.vocab_size)
    return [int(x * (low if is_low else tokenizer.vocab_size)) for is_low, x in fractions]


def streamed(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> tuple[list[str], str]:
    decoder = tokenizer.stream_decoder(skip_special_tokens=skip)
    return [decoder.push(token) for token in ids], decoder.flush()


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["sentencepiece", "byte_level", "llama"])
@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(fractions=FRACTIONS, skip=st.booleans())
def test_pushes_and_flush_equal_decode(
    kinds: dict[str, Tokenizer], kind: str, fractions: list[tuple[bool, float]], skip: bool
) -> None:
    tokenizer = kinds[kind]
    ids = ids_from(tokenizer, fractions)
    parts, rest = streamed(tokenizer, ids, skip)
    assert "".join(parts) + rest == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.thorough
@settings(max_examples=200, deadline=None, derandomize=True)
@given(fractions=FRACTIONS)
def test_sentencepiece_decode_is_the_librarys(storyteller: SentencePieceTokenizer, fractions: Any) -> None:
    # The library shows <unk>, which Hugging Face leaves out as special: not compared.
    ids = [token for token in ids_from(storyteller, fractions) if token != 0]
    assert storyteller.decode(ids) == storyteller._processor.decode(ids)


@pytest.mark.thorough
@settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=st.text(max_size=30))
def test_text_comes_back_and_no_mark_is_shown_early(kinds: dict[str, Tokenizer], text: str) -> None:
    if "\u2581" in text or REPLACEMENT in text:
        return
    for name in ("sentencepiece", "byte_level"):
        tokenizer = kinds[name]
        if any(map(tokenizer.is_special, tokenizer.encode(text, add_special_tokens=False))):
            continue  # "<|end_of_text|>" is a token, which is not shown
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        parts, rest = streamed(tokenizer, ids)
        assert REPLACEMENT not in "".join(parts)
        assert rest == ""  # valid text leaves nothing behind


def test_a_character_split_over_byte_tokens_is_held(kinds: dict[str, Tokenizer]) -> None:
    for name in ("sentencepiece", "byte_level"):
        tokenizer = kinds[name]
        ids = [tokenizer.token_to_id(t) for t in byte_tokens(name, "😀".encode())]
        parts, rest = streamed(tokenizer, ids)
        assert (parts, rest) == (["", "", "", "😀"], ""), name
        parts, rest = streamed(tokenizer, ids[:3])
        assert parts == ["", "", ""]
        assert rest == tokenizer.decode(ids[:3]), name
        assert set(rest) == {REPLACEMENT}, name


def test_llama_holds_a_run_of_bytes_until_it_ends(kinds: dict[str, Tokenizer]) -> None:
    # Its decoder turns a whole run into marks for one bad byte, so no character in a run is certain before its end.
    tokenizer = kinds["llama"]
    good = [tokenizer.token_to_id(t) for t in byte_tokens("llama", "é".encode())]
    bad, letter = tokenizer.token_to_id("<0xFF>"), tokenizer.token_to_id("t")
    assert streamed(tokenizer, [*good, letter]) == (["", "", "ét"], "")
    assert streamed(tokenizer, [*good, bad, bad]) == (["", "", REPLACEMENT * 3, REPLACEMENT], "")
    assert streamed(tokenizer, good[:1]) == ([""], REPLACEMENT)


def byte_tokens(kind: str, data: bytes) -> list[str]:
    if kind != "byte_level":
        return [f"<0x{byte:02X}>" for byte in data]
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in data]


def test_only_the_first_leading_space_goes(storyteller: Tokenizer) -> None:
    a = storyteller.token_to_id("\u2581a")
    assert storyteller.decode([a, a]) == "a a"
    assert streamed(storyteller, [a, a]) == (["a", " a"], "")
    assert streamed(storyteller, [storyteller.bos_id, a]) == (["", "a"], "")
    newline = storyteller.token_to_id("\n")
    assert storyteller.decode([newline, a]) == "\n a"


DECODERS = {
    "none": None,
    "metaspace": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
    "wordpiece": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    "bpe_suffix": {"type": "BPEDecoder", "suffix": "</w>"},
    "ctc": {"type": "CTC", "pad_token": "<unk>", "word_delimiter_token": "|", "cleanup": True},
    "strip_end": {
        "type": "Sequence",
        "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": "t", "start": 1, "stop": 1}],
    },
    "byte_level_in_sequence": {
        "type": "Sequence",
        "decoders": [{"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}],
    },
}


def test_special_tokens_that_are_shown(kinds: dict[str, Tokenizer]) -> None:
    for tokenizer in kinds.values():
        bos, eos = tokenizer.bos_id, tokenizer.eos_ids[0]
        decoder = tokenizer.stream_decoder(shown=[eos])
        assert [decoder.push(token) for token in (bos, eos)] == ["", tokenizer.id_to_token(eos)]
        decoder = tokenizer.stream_decoder(skip_special_tokens=False)
        assert [decoder.push(token) for token in (bos, eos)] == [tokenizer.id_to_token(each) for each in (bos, eos)]


STRIP = {"type": "Strip", "content": " ", "start": 2, "stop": 0}
FALLBACK, JOINED = {"type": "ByteFallback"}, {"type": "Fuse"}
SPACES = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
LETTERS = {"type": "Replace", "pattern": {"Regex": "x"}, "content": "y"}


@pytest.mark.parametrize(
    ("decoder", "detokenizer"),
    [
        (None, PairDetokenizer),
        ({"type": "ByteLevel"}, ByteDetokenizer),
        ([SPACES, FALLBACK, JOINED, STRIP], ByteRunDetokenizer),
        ([SPACES, SPACES, JOINED], ByteRunDetokenizer),
        ([JOINED, STRIP], ByteRunDetokenizer),
        ([LETTERS, JOINED], WholeDetokenizer),
        ([JOINED, STRIP | {"stop": 1}], WholeDetokenizer),
        ([JOINED, SPACES], WholeDetokenizer),
        ([SPACES, STRIP], PairDetokenizer),
        ({"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"}, PairDetokenizer),
        ([{"type": "ByteLevel"}, JOINED], WholeDetokenizer),
        ({"type": "CTC"}, WholeDetokenizer),
    ],
)
def test_the_soonest_detokenizer_of_a_decoder(decoder: Any, detokenizer: type) -> None:
    """One that holds text back longer would be exact too, and later."""
    table = {"type": "Sequence", "decoders": decoder} if isinstance(decoder, list) else decoder
    assert type(read_decoder(table).detokenizer(str, lambda ids: "")) is detokenizer


@pytest.mark.parametrize(
    ("steps", "tokens", "text"),
    [
        ([SPACES, FALLBACK, JOINED], ["\u2581a", "<0xC3>", "<0xA9>", "<0x41>"], " aéA"),
        ([SPACES, JOINED], ["\u2581a", "<0x41>"], " a<0x41>"),
        ([SPACES, JOINED, STRIP], ["\u2581", "\u2581\u2581a", "\u2581b"], " a b"),
        ([JOINED, STRIP], [" a", "  b"], "a  b"),
        ([SPACES, FALLBACK, JOINED, STRIP], ["<0x20>", "<0x20>", "<0x20>", "a"], " a"),
        ([SPACES, SPACES | {"pattern": {"String": "a"}, "content": ""}, JOINED], ["\u2581aba"], " b"),
    ],
)
def test_a_llama_decoder_part_by_part(steps: list[Any], tokens: list[str], text: str) -> None:
    decoding = read_decoder({"type": "Sequence", "decoders": steps})
    machine = decoding.detokenizer(tokens.__getitem__, lambda ids: "")
    assert "".join(map(machine.push, range(len(tokens)))) + machine.flush() == text
    library = decoders.Sequence([decoder_of(step) for step in steps])
    assert library.decode(tokens) == text


def decoder_of(step: dict[str, Any]) -> Any:
    table = {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}, "decoder": step}
    return LibraryTokenizer.from_str(json.dumps({"version": "1.0", "added_tokens": [], **table})).decoder


@pytest.mark.parametrize("name", DECODERS)
def test_every_decoder_streams_exactly(llama_json: dict[str, Any], name: str) -> None:
    table = llama_json | {"decoder": DECODERS[name]}
    tokenizer = HfTokenizer(json.dumps(table).encode())
    last = tokenizer.token_to_id("t")  # what "strip_end" takes from the end of the text
    for start in range(0, tokenizer.vocab_size - 12, 7):
        ids = [*range(start, start + 12), start + 3, 0, last]
        parts, rest = streamed(tokenizer, ids)
        assert "".join(parts) + rest == tokenizer.decode(ids)


def test_token_bytes_join_to_the_text(kinds: dict[str, Tokenizer]) -> None:
    text = "Once upon a time, naïve 日本 😀"
    for name, tokenizer in kinds.items():
        data = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text)))
        space = b"" if name == "byte_level" else b" "  # SentencePiece writes a space before the text
        assert data == space + text.encode(), name
        assert tokenizer.token_bytes(tokenizer.bos_id) == b""
        assert tokenizer.is_special(tokenizer.bos_id)


def test_a_stream_checks_its_ids_and_ends_once(storyteller: Tokenizer) -> None:
    decoder = storyteller.stream_decoder()
    first = storyteller.token_to_id("<0xC3>")
    assert decoder.push(first) == ""
    with pytest.raises(TokenizerError, match=r"token id 4096 at index 1 .*vocab_size 4096"):
        decoder.push(4096)
    assert decoder.flush() == REPLACEMENT
    assert decoder.flush() == ""
    with pytest.raises(RuntimeError, match="flushed"):
        decoder.push(first)
