"""Tokenizers that would abort the process, fill memory or work for ever: each is refused, and its step is named."""

from __future__ import annotations

import json
import math
import random
import re
import time
import unicodedata
from typing import Any

import pytest
from tokenizers import normalizers

from bitnet_ref.errors import TokenizerError
from bitnet_ref.tokenizers import TokenizerSettings, base, hf_limits, load_tokenizer_files
from bitnet_ref.tokenizers.files import read_prefixes
from bitnet_ref.tokenizers.gguf_bpe import _PRE
from bitnet_ref.tokenizers.hf_limits import TextLimits
from bitnet_ref.tokenizers.hf_tokenizer import HfTokenizer
from bitnet_ref.tokenizers.regex_cost import SearchLimit
from bitnet_ref.tokenizers.sentencepiece_model import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    SentencePieceModel,
    charsmap_growth,
    read_model,
    write_model,
)
from bitnet_ref.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from bitnet_ref.tokenizers.settings import AddedToken

Table = dict[str, Any]
BPE = {"type": "BPE", "vocab": {"a": 0, "b": 1, " ": 2, "aa": 3}, "merges": [["a", "a"]]}
WORDPIECE = {"type": "WordPiece", "unk_token": "a", "vocab": {"a": 0, "##a": 1}, "continuing_subword_prefix": "##"}
FUSE = {"type": "Fuse"}


def load(model: Table = BPE, **parts: Any) -> HfTokenizer:
    return HfTokenizer(json.dumps({"model": model, "added_tokens": [], **parts}).encode())


def replace(old: str, new: str, kind: str = "String") -> Table:
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


def prepend(text: str) -> Table:
    return {"type": "Prepend", "prepend": text}


def split(regex: str) -> Table:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def sequence(name: str, *steps: Table) -> Table:
    return {"type": "Sequence", name: list(steps)}


def unigram(*pieces: str) -> Table:
    return {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], *([piece, -1.0] for piece in pieces)]}


METASPACE = {"type": "Metaspace", "replacement": "x", "prepend_scheme": "always", "split": True}
REFUSED: dict[str, tuple[Table, str]] = {
    "a decoder that doubles": (
        {"decoder": sequence("decoders", *[replace("a", "aa")] * 40, FUSE)},
        r"decoder\.decoders\[6\]: Replace",
    ),
    "after Fuse": ({"decoder": sequence("decoders", FUSE, *[replace("a", "a" * 9)] * 2)}, r"decoders\[2\]: Replace"),
    "a decoder's empty pattern": ({"decoder": replace("", "x" * 99)}, "decoder: Replace"),
    "a decoder's regex that is nothing": ({"decoder": replace("^", "x" * 99, "Regex")}, "decoder: Replace"),
    "a decoder's slow regex": ({"decoder": replace("a*b", "", "Regex")}, "may take too long"),
    "suffixes that become spaces": (
        {"decoder": sequence("decoders", *[{"type": "BPEDecoder", "suffix": ""}] * 5)},
        r"decoders\[3\]: BPEDecoder",
    ),
    "a long prefix, then a long copy": (
        {"normalizer": sequence("normalizers", prepend("a" * 10**6), replace("a", "a" * 1000))},
        r"normalizers\[0\]: Prepend",
    ),
    "a nested sequence": (
        {
            "normalizer": sequence(
                "normalizers", replace("a", "a" * 200), sequence("normalizers", replace("a", "a" * 200))
            )
        },
        r"normalizer\.normalizers\[1\]\.normalizers\[0\]: Replace",
    ),
    "a decomposition between": (
        {"normalizer": sequence("normalizers", *[replace("a", "\ufdfa"), {"type": "NFKD"}] * 4)},
        r"normalizers\[5\]: NFKD",
    ),
    "a charsmap": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAGFh" + "YWFh" * 12000}},
        "normalizer: Precompiled",
    ),
    "many steps": ({"normalizer": sequence("normalizers", *[{"type": "Nmt"}] * 65)}, "more than 64 steps"),
    "many pre-tokenizers": ({"pre_tokenizer": sequence("pretokenizers", *[METASPACE] * 40)}, r"\[2\]: Metaspace"),
    "a step without a type": ({"normalizer": {"prepend": "x" * 10**6}}, "no kind of normalizer"),
    "a step inside without a type": (
        {"normalizer": sequence("normalizers", {"pattern": {"String": "a"}, "content": "b"})},
        r"normalizers\[0\]\.type: None is no kind",
    ),
    "an unknown decoder": ({"decoder": {"type": "Nonsense"}}, "'Nonsense' is no kind of decoder"),
    "a long suffix of words": ({"model": BPE | {"end_of_word_suffix": "x" * 10**6}}, "end_of_word_suffix: has more"),
    "a long prefix of pieces": ({"model": WORDPIECE | {"continuing_subword_prefix": "#" * 99}}, "subword_prefix: has"),
    "long words": ({"model": WORDPIECE | {"max_input_chars_per_word": 10**9}}, "expected at most 200"),
    "nested pieces": ({"model": unigram(*("a" * n for n in range(1, 2001)))}, "tokens begin as"),
    "a long token": ({"model": BPE | {"vocab": BPE["vocab"] | {"x" * 20_000: 4}}}, "a token has 20000 characters"),
    "ids around a text": (
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [
                    *[{"SpecialToken": {"id": "a", "type_id": 0}}] * 1000,
                    {"Sequence": {"id": "A", "type_id": 0}},
                ],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
                "special_tokens": {"a": {"id": "a", "ids": [0] * 1000, "tokens": ["a"] * 1000}},
            }
        },
        "more than 64 tokens around",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_load(name: str) -> None:
    parts, message = REFUSED[name]
    start = time.process_time()
    with pytest.raises(TokenizerError, match=message):
        load(**parts)
    assert time.process_time() - start < 5


@pytest.mark.thorough
def test_growth_of_the_text_at_hand() -> None:
    grows = load(normalizer=replace("a", "a" * 1000))
    assert grows.encode("a") == grows.encode("a " * 400 + "a")[:500]
    for text in ("a" * 100_000, "b" * 100_000 + "a" * 20_000):
        with pytest.raises(TokenizerError, match="normalizer: Replace would make more than"):
            grows.encode(text)
        with pytest.raises(TokenizerError, match="normalizer: Replace would make more than"):
            grows.encode_batch(["b", text])
    assert len(grows.encode("b" * 1_000_000)) == 1_000_000  # nothing in it grows
    later = load(normalizer=sequence("normalizers", {"type": "NFKD"}, replace("\u0644", "a" * 1000)))
    with pytest.raises(TokenizerError, match=r"normalizers\[1\]: Replace would"):
        later.encode("\ufdfa" * 10_000)
    start = load(normalizer=sequence("normalizers", prepend("a" * 30), replace("a", "a" * 1000)))
    with pytest.raises(TokenizerError, match="would make more than"):  # at each segment between added tokens
        start.encode("b" * 10_000)


UNICODE = [  # characters that some normalizer changes
    chr(code)
    for code in range(0x30000)
    if unicodedata.decomposition(chr(code)) or chr(code).lower() != chr(code) or code < 256 or 0xAC00 <= code < 0xAC80
]


@pytest.mark.parametrize("kind", ["NFC", "NFD", "NFKC", "NFKD", "Lowercase", "ByteLevel", "StripAccents", "Nmt"])
def test_growth_of_a_character(kind: str) -> None:
    """A factor is the maximum bytes that the library makes of one byte, rounded up."""
    normalizer = getattr(normalizers, kind)()
    growth = max(len(normalizer.normalize_str(each).encode()) / len(each.encode()) for each in UNICODE)
    assert TextLimits({"model": BPE, "normalizer": {"type": kind}}).growth["normalizer"] == math.ceil(growth)


@pytest.mark.parametrize(
    ("steps", "growth"),
    [
        ([], 1),
        ([prepend("ab")], 3),
        ([replace("a", "bcde")], 4),
        ([replace("ab", "xyz")], 2),
        ([replace("abc", "")], 1),
        ([replace("a|b", "\u00e9", "Regex")], 5),  # it may match nothing: before and after each byte, two bytes
        ([prepend("ab"), {"type": "NFD"}, replace("a", "bb")], 18),
        ([prepend("ab"), sequence("normalizers", {"type": "NFC"}, replace("ab", "xyz"))], 18),
    ],
)
def test_growth_of_steps(steps: list[Table], growth: int) -> None:
    assert TextLimits({"model": BPE, "normalizer": sequence("normalizers", *steps)}).growth["normalizer"] == growth


def growth_of(part: str, *steps: Table) -> int:
    return TextLimits({"model": BPE, part: sequence(hf_limits._INNER[part], *steps)}).growth[part]


def test_growth_of_every_kind_of_step() -> None:
    """In bytes for one byte. A kind without a figure here is computed from its fields, above."""
    kinds = {
        "normalizer": {
            **dict.fromkeys(("Nmt", "Strip", "StripAccents"), 1),
            **dict.fromkeys(("Lowercase", "ByteLevel"), 2),
            **dict.fromkeys(("NFC", "NFD"), 3),
            **dict.fromkeys(("NFKC", "NFKD"), 11),
            "BertNormalizer": 12,
        },
        "pre_tokenizer": {
            **dict.fromkeys(("BertPreTokenizer", "CharDelimiterSplit", "Digits", "FixedLength", "Punctuation"), 1),
            **dict.fromkeys(("Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"), 1),
            "ByteLevel": 4,
            "Metaspace": 8,
        },
        "decoder": {
            **dict.fromkeys(("ByteFallback", "Fuse", "Metaspace", "Strip"), 1),
            **dict.fromkeys(("ByteLevel", "BPEDecoder", "CTC"), 3),
            "WordPiece": 2,
        },
    }
    for part, growths in kinds.items():
        computed = {kind for kind, factor in hf_limits._FACTORS[part].items() if factor == 0}
        assert set(growths) | computed == set(hf_limits._FACTORS[part])
        assert {kind: growth_of(part, {"type": kind}) for kind in growths} == growths


@pytest.mark.parametrize(
    ("part", "good", "bad"),
    [
        ("normalizer", [prepend("a" * 32767)], [prepend("a" * 32768)]),
        ("normalizer", [{"type": "Nmt"}] * 64, [{"type": "Nmt"}] * 65),
        ("pre_tokenizer", [METASPACE] * 2, [METASPACE] * 3),
        ("decoder", [replace("a", "b" * 64)], [replace("a", "b" * 65)]),
        ("decoder", [replace("", "b" * 31)], [replace("", "b" * 32)]),
    ],
)
def test_the_last_growth_that_is_taken(part: str, good: list[Table], bad: list[Table]) -> None:
    growth_of(part, *good)
    with pytest.raises(TokenizerError):
        growth_of(part, *bad)


def test_the_longest_affixes_and_words() -> None:
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        TextLimits({"model": BPE | {key: "x" * 64}})
        with pytest.raises(TokenizerError, match=f"{key}: has more than 64 bytes"):
            TextLimits({"model": BPE | {key: "x" * 65}})
    TextLimits({"model": WORDPIECE | {"max_input_chars_per_word": 200}})
    with pytest.raises(TokenizerError, match="expected at most 200, got 201"):
        TextLimits({"model": WORDPIECE | {"max_input_chars_per_word": 201}})


def test_the_longest_text_that_may_grow() -> None:
    """2^23 bytes, and 16 for each byte of the text."""
    limits = TextLimits({"model": BPE, "normalizer": replace("a", "a" * 1000)})
    limits.check_text("a" * 8525)  # 8,525,000 of 8,525,008
    with pytest.raises(TokenizerError, match="would make more than 8525024 bytes of a text of 8526"):
        limits.check_text("a" * 8526)


NFKD, LOWER = {"type": "NFKD"}, {"type": "Lowercase"}


@pytest.mark.parametrize(
    ("steps", "letter", "longest", "at"),
    [
        ([replace("b", "cccc")], "b", 50, 0),  # 4 n bytes of n
        ([replace("b", "cccc")], "c", 5000, None),  # nothing in it grows
        ([NFKD], "b", 133, 0),  # it may make 11 of each, of which four times the limit is looked at
        ([prepend("x" * 5)], "b", 63, 0),  # five bytes at each second one, where the text may be cut
        ([prepend("x" * 5), LOWER], "b", 23, 1),  # which may make two of each of these
        ([LOWER, prepend("x" * 5)], "b", 63, 1),
        ([replace("b", "cc"), replace("c", "ddd")], "b", 25, 1),  # 6 n
        ([replace("b*", "x", "Regex")], "c", 199, 0),  # before and after each, and where the text may be cut
    ],
)
def test_the_longest_text_of_each_kind_of_step(
    steps: list[Table], letter: str, longest: int, at: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 100 bytes, and 2 for each byte of the text. at: the step that makes too much of one more letter."""
    monkeypatch.setattr(hf_limits, "_SPARE_BYTES", 100)
    monkeypatch.setattr(hf_limits, "_BYTES_PER_BYTE", 2)
    limits = TextLimits({"model": BPE, "normalizer": sequence("normalizers", *steps)})
    limits.check_text(letter * longest)
    if at is not None:
        size = longest + 1
        message = f"{steps[at]['type']} would make more than {100 + 2 * size} bytes of a text of {size}"
        for field, expected in ((None, f"normalizer.normalizers[{at}]"), ("here", "here")):
            with pytest.raises(TokenizerError) as caught:
                limits.check_text(letter * size, field)
            assert (caught.value.field, caught.value.message) == (expected, message)


def test_patterns_that_see_a_text_that_was_rewritten() -> None:
    """What they will find there is not known: the length alone decides. The last step rewrites nothing that is cut."""
    first = TextLimits({"model": BPE, "pre_tokenizer": sequence("pretokenizers", split("a+b"), {"type": "ByteLevel"})})
    first.check_text("c" * 20_000)
    later = TextLimits({"model": BPE, "pre_tokenizer": sequence("pretokenizers", {"type": "ByteLevel"}, split("a+b"))})
    later.check_text("c" * 10_100)
    for limits, text in ((later, "c" * 10_101), (first, "a" * 10_300)):
        with pytest.raises(TokenizerError, match=f"may take too long for this text of {len(text)} characters"):
            limits.check_text(text)


def test_growth_of_added_tokens() -> None:
    """The library normalizes them when they are added."""
    grow = {"normalizer": replace("a", "a" * 1000)}
    with pytest.raises(TokenizerError, match="added_tokens: Replace would make"):
        load(**grow, added_tokens=[{"id": 4, "content": "a" * 16_000}])
    table = json.dumps({"model": BPE, **grow}).encode()
    tokens = tuple(AddedToken(f"{n}" + "a" * 10_000, 4 + n) for n in range(2))
    with pytest.raises(TokenizerError, match="added_tokens: Replace would make"):
        HfTokenizer(table, TokenizerSettings(added_tokens=tokens))


@pytest.mark.thorough
def test_thousands_of_added_tokens_of_both_kinds() -> None:
    tokens = tuple(AddedToken(f"<{n}>", 4 + n, special=n % 2 == 0) for n in range(8000))
    start = time.process_time()
    tokenizer = HfTokenizer(json.dumps({"model": BPE}).encode(), TokenizerSettings(added_tokens=tokens))
    assert time.process_time() - start < 5
    assert tokenizer.encode("<7999>a<0>") == [8003, 0, 4]
    assert tokenizer.is_special(4)
    assert not tokenizer.is_special(8003)


def test_the_most_characters_of_tokens_that_begin_alike() -> None:
    tokens = ["a" * (1 << 13), "a" * ((1 << 13) - 1), "a"]
    assert list(read_prefixes(tokens, "vocab").values()) == ["", "a", tokens[1]]
    with pytest.raises(TokenizerError, match="3 tokens begin as"):
        read_prefixes([*tokens[:2], "aa"], "vocab")


@pytest.mark.thorough
def test_thousands_of_special_pieces() -> None:
    row = ["<unk>", "a", "b", "\u2581", *(f"a{n:05d}" for n in range(40_000)), "a00001b"]
    model = SentencePieceModel(row, [0.0] * len(row), [UNKNOWN, *[NORMAL] * 3, *[CONTROL] * 40_001])
    tokenizer = load_tokenizer_files({"tokenizer.model": write_model(model, {"unk": 0})})
    start = time.process_time()
    assert tokenizer.encode("aab" * 7000)[-3:] == [1, 1, 2]
    assert tokenizer.encode("a00001ba00001a") == [40_004, 5, 1]
    assert time.process_time() - start < 3
    row[4:] = ["a" * n for n in range(2, 303)]
    model = SentencePieceModel(row, [0.0] * len(row), [UNKNOWN, *[NORMAL] * 3, *[CONTROL] * 301])
    with pytest.raises(TokenizerError, match="tokens begin as"):
        load_tokenizer_files({"tokenizer.model": write_model(model, {"unk": 0})})


def test_special_pieces_match_as_an_alternation_does() -> None:
    """The leftmost, and there the longest."""
    dice = random.Random(0)
    for _ in range(200):
        words = {"".join(dice.choices("ab<", k=dice.randint(1, 5))) for _ in range(dice.randint(1, 12))}
        row = ["<unk>", "\u2581", *sorted(words)]
        model = SentencePieceModel(row, [0.0] * len(row), [UNKNOWN, NORMAL, *[CONTROL] * len(words)])
        tokenizer = load_tokenizer_files({"tokenizer.model": write_model(model, {"unk": 0})})
        assert isinstance(tokenizer, SentencePieceTokenizer)
        pattern = re.compile("|".join(map(re.escape, sorted({"<unk>", *words}, key=len, reverse=True))))
        text = "".join(dice.choices("ab<unk>", k=200))
        assert list(tokenizer._find_tokens(text)) == [(match[0], match.start()) for match in pattern.finditer(text)]


def test_what_decodes_to_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load(BPE | {"vocab": BPE["vocab"] | {"x" * 16_000: 4}}, decoder=replace("x", "y" * 60))
    assert tokenizer.decode([4]) == "y" * 960_000
    with pytest.raises(TokenizerError, match="decode them in parts"):
        tokenizer.decode([4] * 1000)
    decoder = tokenizer.stream_decoder()
    assert decoder.push(4) == "y" * 960_000
    letters = load(decoder=replace("a", "y" * 60))  # of a letter up to 4 * 60 bytes, and of what may stand beside it
    monkeypatch.setattr(base, "MAX_DECODED_BYTES", 240 * 2 * 10)
    assert letters.decode([0] * 10) == "y" * 600
    with pytest.raises(TokenizerError, match="of these 11 tokens may have 5280 bytes, more than 4800"):
        letters.decode([0] * 11)


def test_sentencepiece_charsmap_and_pieces() -> None:
    charsmap = (4).to_bytes(4, "little") + bytes(4) + b"ab\0" + b"x" * 100 + b"\0"
    assert charsmap_growth(charsmap) == 100
    model = SentencePieceModel(["<unk>", "a"], [0.0, -1.0], [UNKNOWN, NORMAL], charsmap=charsmap)
    with pytest.raises(TokenizerError, match="makes 100 bytes of one character"):
        read_model(write_model(model, {"unk": 0}), "x")


SAFE = [
    *(pattern for patterns, _, _ in _PRE.values() for pattern in patterns),
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",  # GPT-4o, gpt-oss, Llama 4
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",  # DeepSeek V3
    r" ?[^(\s|[.,!?…。，、।۔،])]+",  # BLOOM
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",  # numbers in groups from the right
    r"[A-Za-z]+(?:['-][A-Za-z]+)*|\d+(?:\.\d+)?|\S",
    r" {2,}",
]
DANGEROUS = [
    *(r"(a+)+$", r"(a|a)*b", r"(?:a?){40}a{40}", r"(a*)*b", r"(?:(?:a{64}){64}){64}b", r"(?=(a+)+b)", r"(?<x>a)\k<x>"),
    *(r"(?<x>a|b\g<x>)", r"\X+", r"(?x)a", r"(?~a)", r"a**", r"((a|b)+c)+d", r"(a", r"a)", r"[a", "x" * 5000, r"a\Kb"),
]


def test_regular_expressions_at_load() -> None:
    for pattern in DANGEROUS:
        with pytest.raises(TokenizerError, match=r"pre_tokenizer: this regular expression"):
            load(pre_tokenizer=split(pattern))
    for pattern in SAFE:
        text = "Hello wörld,  it's 12345 ÷ 日本語\n\n" * 3000
        SearchLimit(pattern, "x").check(text)


@pytest.mark.parametrize("pattern", ["a+b", "a*a*b", "(?=a*b)", "(?:aa)*b", "a{1000}b", "(?i:A+)b", "[^b]+b", ".+c"])
def test_regular_expressions_and_a_text(pattern: str) -> None:
    tokenizer = load(pre_tokenizer=split(pattern))
    plain = "a a bb " * 1000
    assert len(tokenizer.encode(plain)) > 1000
    with pytest.raises(TokenizerError, match="this regular expression may take too long"):
        tokenizer.encode("a" * 100_000)
    with pytest.raises(TokenizerError, match="this regular expression may take too long"):
        load(normalizer=replace(pattern, "", "Regex")).encode("a" * 100_000)


@pytest.mark.parametrize(
    ("pattern", "degree", "longest"),
    [
        ("a+b", 1, 10_100),  # L^2 <= 10^8 + 200 L
        ("a{65}b", 1, 10_100),
        ("(?=a*b)", 1, 10_100),
        ("a*a*b", 2, 464),  # L^3
        ("abcdefghi+j", 1, 7_121),  # 2 L^2: ten atoms in one way
        ("(?:ab?){2}c+d", 1, 5_025),  # 4 L^2: twice with b or without
        ("a{2,4}b+c", 1, 5_806),  # 3 L^2
        ("b*a+", 1, 10_100),  # an a must follow
    ],
)
def test_the_longest_text_that_any_search_ends_in(pattern: str, degree: int, longest: int) -> None:
    search = SearchLimit(pattern, "x")
    assert search.degree == degree
    assert search.is_cheap(longest)
    assert not search.is_cheap(longest + 1)
    for pattern in ("b*a*", "b+a?", "a{64}b", "a{2,4}b", "a+", "(?:a|b){1,3}c"):
        search = SearchLimit(pattern, "x")
        assert search.degree == 0
        assert search.is_cheap(1 << 40)


@pytest.mark.parametrize(
    ("pattern", "steps", "degree"),
    [
        ("a", 1, 0),
        ("abcdefgh", 2, 0),  # eight atoms in a row
        ("a|b|cd", 3, 0),
        ("(?:a|b|cd)", 3, 0),
        ("(?:a|b)(?:c|d)", 4, 0),
        ("^a$", 1, 0),
        ("a?", 2, 0),
        ("a{0,3}b", 4, 0),
        ("a{64}", 9, 0),
        ("a{64}b", 9, 0),
        ("a{65}b", 1, 1),
        ("a{2,}b", 1, 1),
        ("a{2,}", 1, 1),  # it may fail
        ("(?:abcdefgh){2,}i", 2, 1),
        ("a+", 1, 0),
        ("(?:a|b){2}", 4, 0),
        ("(?:a|bcdefghi)+", 4, 0),  # two ways, of up to eight atoms
        ("(?:a|bcdefghi)*", 4, 0),
        ("(?:ab?){3}", 8, 0),
        ("(?:a?){13}", 16384, 0),
        ("(?=a|b)c", 2, 0),
        ("(?:a*b|c)d", 2, 1),
        ("[a[bc]d]+e", 1, 1),
        ("(?i)a+b", 1, 1),
    ],
)
def test_the_steps_of_a_pattern(pattern: str, steps: int, degree: int) -> None:
    search = SearchLimit(pattern, "x")
    assert (search._steps, search.degree) == (steps, degree)


def test_the_largest_pattern_that_is_taken() -> None:
    SearchLimit("|".join(["a"] * 2048) + "b", "x")  # 4096 characters
    for pattern, message in (
        ("|".join(["a"] * 2048) + "bc", "has more than 4096 characters"),
        ("(?:a?){14}", "can be matched in too many ways"),
    ):
        with pytest.raises(TokenizerError, match=message):
            SearchLimit(pattern, "x")


def test_the_longest_runs_of_a_text() -> None:
    """Of 100 million steps, and 200 for each character: a text without long runs may be longer."""
    search = SearchLimit("a+b", "x")
    assert not search.is_cheap(20_000)
    search.check("a c" * 7_000)
    search.check("a" * 10_000 + "c" * 10_000)
    search.check("d" * 20_000)
    for text in ("a" * 10_300, "a" * 10_200 + "c" * 5000, "a" * 11_000 + "c" * 50_000):
        with pytest.raises(TokenizerError, match=f"for this text of {len(text)} characters"):
            search.check(text)


@pytest.mark.thorough
def test_the_cost_of_what_is_accepted() -> None:
    """The slowest of each kind stays within seconds."""
    for tokenizer, text in (
        (load(pre_tokenizer=split("a+b")), "a" * 9_900),
        (load(unigram(*("a" * n for n in range(1, 120)))), "a" * 50_000),
        (
            load(WORDPIECE | {"max_input_chars_per_word": 200}, pre_tokenizer={"type": "WhitespaceSplit"}),
            "a" * 199 + " ",
        ),
    ):
        start = time.process_time()
        tokenizer.encode(text)
        assert time.process_time() - start < 5
