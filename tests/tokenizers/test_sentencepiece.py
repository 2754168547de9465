"""tokenizer.model: the shipped tokenizer against its outside oracle, special tokens in text, damaged files."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

import bitnet_ref.errors
from bitnet_ref.errors import TokenizerError
from bitnet_ref.tokenizers import Tokenizer, TokenizerSettings, load_tokenizer, load_tokenizer_files
from bitnet_ref.tokenizers.files import check_token_id
from bitnet_ref.tokenizers.gguf_sentencepiece import vocabulary_from_model
from bitnet_ref.tokenizers.sentencepiece_model import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    SentencePieceModel,
    read_model,
    write_model,
)
from bitnet_ref.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from bitnet_ref.tokenizers.settings import AddedToken

STORYTELLER = Path(bitnet_ref.errors.__file__).parent / "assets" / "storyteller"
MODEL = (STORYTELLER / "tokenizer.model").read_bytes()
CASES = json.loads((Path(__file__).parents[1] / "data/storyteller/expected.json").read_text(encoding="utf-8"))["cases"]


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.id_to_token(token) for token in tokenizer.encode(text, add_special_tokens=False)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["prompt"][:20])
def test_the_oracles_prompts_and_texts(storyteller: Tokenizer, case: dict) -> None:
    assert storyteller.encode(case["prompt"]) == case["prompt_ids"]
    assert storyteller.decode(case["token_ids"]) == case["text"]
    assert storyteller.decode(np.array(case["token_ids"])) == case["text"]


def test_what_it_says_of_itself(storyteller: Tokenizer) -> None:
    assert (storyteller.vocab_size, storyteller.bos_id, storyteller.eos_ids) == (4096, 1, (2,))
    assert storyteller.token_to_id("</s>") == 2
    assert storyteller.id_to_token(2) == "</s>"
    assert storyteller.token_to_id("no such token") is None
    assert storyteller.chat_template is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a</s>b", ["\u2581a", "</s>", "b"]),
        ("a</s> b", ["\u2581a", "</s>", "\u2581b"]),
        ("x<unk>y", ["\u2581", "x", "<unk>", "y"]),
        ("</s></s>", ["</s>", "</s>"]),
        ("a\0b", ["\u2581a", "<0x00>", "b"]),
        ("", []),
    ],
)
def test_special_tokens_in_text_as_transformers_has_them(
    storyteller: Tokenizer, text: str, expected: list[str]
) -> None:
    assert pieces(storyteller, text) == expected


@pytest.mark.parametrize("legacy", [False, True])
def test_no_space_is_put_before_a_text_where_the_settings_say_so(legacy: bool) -> None:
    """As in transformers, `legacy` or not, and in llama.cpp."""
    tokenizer = SentencePieceTokenizer(MODEL, TokenizerSettings(add_prefix_space=False, legacy=legacy))
    assert pieces(tokenizer, "a</s>b") == ["a", "</s>", "b"]
    for text in ("a", " a", "  a b"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert vocabulary_from_model(tokenizer)["tokenizer.ggml.add_space_prefix"] is False


def test_legacy_prefixes_every_segment() -> None:
    legacy = SentencePieceTokenizer(MODEL, TokenizerSettings(legacy=True))
    assert pieces(legacy, "a</s>b") == ["\u2581a", "</s>", "\u2581b"]


def test_bos_is_never_there_twice(storyteller: Tokenizer) -> None:
    assert storyteller.encode("<s>Once") == [1, *storyteller.encode("<s>Once", add_special_tokens=False)[1:]]
    assert storyteller.encode("<s>Once").count(1) == 1
    assert storyteller.encode("") == [1]
    assert storyteller.encode("a<s>").count(1) == 2  # the one in the text is the writer's own


def test_plain_text_is_the_librarys(storyteller: Tokenizer) -> None:
    library = sentencepiece.SentencePieceProcessor(model_proto=MODEL)
    for text in ("\nOnce", "  two spaces", "tab\there\r\n", "日本語 ﬁ ½", "\u2581mark", "x "):
        assert storyteller.encode(text, add_special_tokens=False) == library.encode(text)


def test_a_batch_is_its_texts(storyteller: Tokenizer) -> None:
    texts = ["Once", "", "a</s>b", "日本", "<s>x"]
    for add in (True, False):
        assert storyteller.encode_batch(texts, add) == [storyteller.encode(text, add) for text in texts]
    assert storyteller.encode_batch([]) == []


def test_special_tokens_can_be_shown(storyteller: Tokenizer) -> None:
    ids = storyteller.encode("a</s>b")
    assert storyteller.decode(ids) == "ab"
    assert storyteller.decode(ids, skip_special_tokens=False) == "<s> a</s>b"


def test_added_tokens() -> None:
    settings = TokenizerSettings(
        bos_token="<s>",
        add_bos=True,
        add_eos=True,
        eos_ids=(4097,),
        added_tokens=(
            AddedToken("<sep>", 4096),
            AddedToken("<pad>", 4097, special=True, lstrip=True, rstrip=True),
            AddedToken("word", 4100, single_word=True),
        ),
    )
    tokenizer = SentencePieceTokenizer(MODEL, settings)
    assert tokenizer.vocab_size == 4101
    assert pieces(tokenizer, "a<sep>b") == ["\u2581a", "<sep>", "b"]
    assert pieces(tokenizer, "a  <pad>  b") == ["\u2581a", "<pad>", "b"]
    assert "word" in pieces(tokenizer, "a word b")
    assert "word" not in pieces(tokenizer, "words")
    assert tokenizer.decode([4096, 4097]) == "<sep>"
    assert tokenizer.eos_ids == (4097, 2)
    assert tokenizer.encode("a") == [1, 262, 4097]
    with pytest.raises(TokenizerError, match="4098"):
        tokenizer.decode([4098])  # in a hole of the vocabulary


@pytest.mark.parametrize("token", [AddedToken("<s>", 5), AddedToken("<new>", 5), AddedToken("<new>", 1 << 40)])
def test_added_tokens_that_contradict_the_model(token: AddedToken) -> None:
    with pytest.raises(TokenizerError, match="added_tokens"):
        SentencePieceTokenizer(MODEL, TokenizerSettings(added_tokens=(token,)))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 4096], r"token id 4096 at index 1 is not in the vocabulary \(vocab_size 4096\)"),
        ([-1], "token id -1 at index 0"),
        ([1.0], "index 0: expected an integer, got 1.0 of type float"),
        ([True], "of type bool"),
        (["1"], "of type str"),
        ([None], "NoneType"),
        ([10**30], "not in the vocabulary"),
        ("12", "expected a list of integers, got str"),
        (5, "expected a list of integers, got int"),
        (np.zeros((2, 2), np.int64), "index 0"),
    ],
)
def test_bad_ids_are_named(storyteller: Tokenizer, ids: object, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        storyteller.decode(ids)


def test_bad_text_is_named(storyteller: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="text: expected str, got int"):
        storyteller.encode(5)
    with pytest.raises(TokenizerError, match=r"character 1 is the lone surrogate U\+D800"):
        storyteller.encode("a\ud800")
    with pytest.raises(TokenizerError, match=r"texts\[1\]: expected str, got bytes"):
        storyteller.encode_batch(["a", b"b"])
    with pytest.raises(TokenizerError, match="list of str, got str"):
        storyteller.encode_batch("abc")


def field(number: int, payload: bytes) -> bytes:
    return bytes([number << 3 | 2, len(payload)]) + payload


def piece(text: bytes, kind: int, score: bytes = b"\0\0\0\0") -> bytes:
    return field(1, field(1, text) + b"\x15" + score + b"\x18" + bytes([kind]))


def test_read_model_reads_the_file() -> None:
    model = read_model(MODEL, None)
    library = sentencepiece.SentencePieceProcessor(model_proto=MODEL)
    assert model.pieces == [library.id_to_piece(n) for n in range(4096)]
    assert [kind == BYTE for kind in model.types] == [library.is_byte(n) for n in range(4096)]
    assert (model.add_dummy_prefix, model.remove_extra_whitespaces) == (True, False)


def test_fields_of_a_piece_that_are_not_known_say_nothing() -> None:
    """Nor do those of another wire type: a number, and four bytes that would be a score."""
    others = field(4, b"b") + b"\x10\x07" + b"\x25\0\0\x80\x3f"
    model = read_model(field(1, field(1, b"a") + others), None)
    assert (model.pieces, model.scores) == (["a"], [0.0])


def test_a_field_of_eight_bytes_is_stepped_over() -> None:
    model = read_model(b"\x51" + b"\xff" * 8 + field(1, field(1, b"a")), None)  # field 10
    assert model.pieces == ["a"]


def test_the_digest_is_of_the_vocabulary() -> None:
    files = {"tokenizer.model": MODEL}, {"tokenizer.model": MODEL.replace(b"\xe2\x96\x81king", b"\xe2\x96\x81gnik")}
    one, other = (load_tokenizer_files(each) for each in files)
    assert one.encode("a cat") == other.encode("a cat")
    assert one.digest == load_tokenizer_files(files[0]).digest != other.digest


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no pieces"),
        (b"\x0a\xff\xff\xff\xff\x0f", "runs past its end"),
        (b"\x0a" + b"\xff" * 12, "more than 10 bytes"),
        (b"\x0b\x00", "bad field tag"),
        (b"\x08", "truncated inside an integer"),
        (b"\x08\x01", "a message is missing"),
        (MODEL[:-3], "byte "),
        (piece(b"<0xZZ>", BYTE), "a byte piece must be written"),
        (piece(b"<0x-1>", BYTE), "a byte piece must be written"),
        (piece(b"", NORMAL), "a piece is empty"),
        (piece(b"\xff", NORMAL), "not UTF-8"),
        (piece(b"a", 9), "9 is no piece type"),
        (piece(b"a", NORMAL, b"\0\0\xc0\x7f"), "score is not finite"),
        (piece(b"a", UNKNOWN) + piece(b"a", NORMAL), r"pieces\[1\]: 'a' stands twice"),
        (piece(b"a", NORMAL), "sentencepiece cannot read"),
        (MODEL + field(2, b"\xc0\x01\x01"), "treat_whitespace_as_suffix"),
        (MODEL + field(5, field(2, b"x")), "denormalizer"),
    ],
)
def test_damaged_models(make_folder: Callable[..., Path], data: bytes, message: str) -> None:
    folder = make_folder({"tokenizer.model": data})
    with pytest.raises(TokenizerError, match=message) as caught:
        load_tokenizer(folder)
    assert caught.value.path == str(folder / "tokenizer.model")


FUZZ = """
import random, sys
from bitnet_ref.errors import TokenizerError
from bitnet_ref.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
data = open(sys.argv[1], "rb").read()
seen = {"loaded": 0, "refused": 0}
for seed in range(80):
    chance, damaged = random.Random(seed), bytearray(data)
    for _ in range(chance.choice([1, 1, 3])):
        place = chance.choice([chance.randrange(len(damaged)), len(damaged) - 1 - chance.randrange(100)])
        damaged[place] = chance.randrange(256)
    try:
        tokenizer = SentencePieceTokenizer(bytes(damaged))
        tokenizer.decode(tokenizer.encode("Hello w\\u00f6rld </s> x"))
        seen["loaded"] += 1
    except TokenizerError:
        seen["refused"] += 1
print(seen["loaded"], seen["refused"])
"""


@pytest.mark.thorough
def test_no_damaged_model_ends_the_process() -> None:
    # In a process of its own: what is feared of a C++ library is a crash, which no `except` sees.
    command = [sys.executable, "-c", FUZZ, str(STORYTELLER / "tokenizer.model")]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    loaded, refused = map(int, done.stdout.split())
    assert loaded + refused == 80
    assert refused > 10


def test_normalizing_models_stream_too(tmp_path: Path) -> None:
    # remove_extra_whitespaces and a Unicode normalizer, which the shipped model does not have.
    chance = random.Random(0)
    words = ["".join(chance.choice("abcdeé") for _ in range(chance.randint(1, 5))) for _ in range(50)]
    corpus = [" ".join(chance.choice(words) for _ in range(8)) for _ in range(100)]
    prefix = tmp_path / "tokenizer"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_prefix=str(prefix),
        vocab_size=300,
        model_type="unigram",
        byte_fallback=True,
        minloglevel=2,
    )
    tokenizer = load_tokenizer(tmp_path)
    library = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
    space = tokenizer.token_to_id("\u2581")
    for _ in range(300):
        ids = [chance.choice([space, chance.randrange(3, 300)]) for _ in range(chance.randrange(8))]
        decoder = tokenizer.stream_decoder()
        assert "".join(map(decoder.push, ids)) + decoder.flush() == library.decode(ids)
    assert tokenizer.encode("  a  b ", add_special_tokens=False) == library.encode("  a  b ")


def test_ids_of_zero() -> None:
    """A model may have its EOS or BOS first; -1 is none."""
    for specials, bos, eos in (({"unk": 2, "eos": 0}, None, (0,)), ({"unk": 2, "bos": 0, "eos": 1}, 0, (1,))):
        model = SentencePieceModel(
            ["<a>", "<b>", "<unk>", "\u2581", "x"], [0.0] * 5, [CONTROL, CONTROL, UNKNOWN, NORMAL, NORMAL]
        )
        tokenizer = load_tokenizer_files({"tokenizer.model": write_model(model, specials)})
        assert (tokenizer.bos_id, tokenizer.eos_ids) == (bos, eos)


def test_the_largest_token_id() -> None:
    assert check_token_id((1 << 24) - 1, "x") == (1 << 24) - 1
    for value in (1 << 24, -1):
        with pytest.raises(TokenizerError, match=f"x: token id {value} is not in 0..16777215"):
            check_token_id(value, "x")


def test_an_integer_that_ends_with_its_message():
    piece = b"\x0a\x02\x18\x80"  # a piece of two bytes: its type, which goes on behind it
    with pytest.raises(TokenizerError, match="truncated inside an integer"):
        read_model(piece + b"\x01" * 8, "x")
