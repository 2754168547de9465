"""tokenizer.json: the library's ids and texts, side files that add to it, and files that must not be believed."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as LibraryTokenizer

from bitnet_ref.errors import ConfigWarning, TokenizerError
from bitnet_ref.tokenizers import Tokenizer, TokenizerSettings, load_tokenizer
from bitnet_ref.tokenizers.hf_json import MAX_TOKEN_ID, check_tokenizer_json, post_processor_affixes
from bitnet_ref.tokenizers.hf_tokenizer import HfTokenizer
from bitnet_ref.tokenizers.settings import AddedToken

BOS, EOS, EOT = "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"
OFFSETS = {"trim_offsets": True, "add_prefix_space": True}
Table = dict[str, Any]
Maker = Callable[..., Path]


def load(table: Table, settings: TokenizerSettings | None = None) -> HfTokenizer:
    return HfTokenizer(json.dumps(table).encode(), settings)


@pytest.mark.parametrize("kind", ["byte_level_json", "llama_json"])
def test_ids_and_texts_are_the_librarys(request: pytest.FixtureRequest, kind: str) -> None:
    table = request.getfixturevalue(kind)
    library, ours = LibraryTokenizer.from_str(json.dumps(table)), load(table)
    texts = ["Once upon a time", "", "日本 😀", f"a{EOT}b</s> c", "plain added Ġx", " lead\n", "the\0end"]
    for text in texts:
        assert ours.encode(text) == library.encode(text).ids
        assert ours.encode(text, add_special_tokens=False) == library.encode(text, add_special_tokens=False).ids
        assert ours.decode(ours.encode(text)) == library.decode(library.encode(text).ids)
    assert ours.encode_batch(texts) == [ours.encode(text) for text in texts]
    assert ours.vocab_size == library.get_vocab_size()


def test_bos_is_never_there_twice(kinds: dict[str, Tokenizer]) -> None:
    tokenizer = kinds["byte_level"]
    assert tokenizer.encode("the") == [tokenizer.bos_id, *tokenizer.encode("the", add_special_tokens=False)]
    assert tokenizer.encode(BOS + "the") == tokenizer.encode("the")
    assert tokenizer.encode(BOS) == [tokenizer.bos_id]


def test_the_end_of_a_turn_is_a_stop_token(byte_level_json: Table) -> None:
    settings = TokenizerSettings(bos_token=BOS, eos_token=EOS)
    assert load(byte_level_json, settings).eos_ids == (1, 2)
    plain = copy.deepcopy(byte_level_json)
    plain["added_tokens"][2]["special"] = False
    assert plain["added_tokens"][2]["content"] == EOT
    assert load(plain, settings).eos_ids == (1,)


def test_explicit_flags_replace_the_post_processor(byte_level_json: Table) -> None:
    for add_bos, add_eos, expected in (
        (False, None, []),
        (True, True, [0, 1]),
        (None, True, [0, 1]),
        (None, None, [0]),
    ):
        settings = TokenizerSettings(bos_token=BOS, eos_token=EOS, add_bos=add_bos, add_eos=add_eos)
        assert load(byte_level_json, settings).encode("") == expected
    without = byte_level_json | {"post_processor": None}
    assert load(without, TokenizerSettings(bos_token=BOS)).encode("") == []
    assert load(without, TokenizerSettings(bos_token=BOS, add_bos=True)).encode("") == [0]


@pytest.mark.parametrize(("add_bos", "add_eos"), [(b, e) for b in (None, False, True) for e in (None, False, True)])
def test_each_flag_with_each_other(byte_level_json: Table, add_bos: bool | None, add_eos: bool | None) -> None:
    """A post-processor of both is replaced by flags. A stop token that no name has is the first of the ids."""
    both = {"type": "RobertaProcessing", "sep": [EOS, 1], "cls": [BOS, 0], **OFFSETS}
    own, without = (byte_level_json | {"post_processor": each} for each in (both, None))
    none = add_bos is None and add_eos is None
    for named in ({"bos_token": BOS, "eos_token": EOS}, {"bos_id": 0, "eos_ids": (1, 5)}):
        settings = TokenizerSettings(**named, add_bos=add_bos, add_eos=add_eos)
        assert load(own, settings).encode("") == [0] * (add_bos is not False) + [1] * bool(none or add_eos)
        assert load(without, settings).encode("") == [0] * bool(add_bos) + [1] * bool(add_eos)
    nothing = load(without, TokenizerSettings(add_bos=add_bos, add_eos=add_eos))
    assert nothing.bos_id is None
    assert nothing.encode("") == [2] * bool(add_eos)  # the end of a turn is the only stop token


def test_ids_of_names_and_of_numbers(byte_level_json: Table) -> None:
    """A name comes before a number. Every stop token counts once, numbers first."""
    named = TokenizerSettings(bos_token=BOS, eos_token=EOS, pad_token=EOT, bos_id=5, pad_id=6, eos_ids=(7, 1, 2))
    tokenizer = load(byte_level_json, named)
    assert (tokenizer.bos_id, tokenizer.pad_id, tokenizer.eos_ids) == (0, 2, (7, 1, 2))
    numbered = load(byte_level_json, TokenizerSettings(bos_id=5, pad_token="<no>", pad_id=6))
    assert (numbered.bos_id, numbered.pad_id, numbered.eos_ids) == (5, 6, (2,))
    assert tokenizer.special_ids == (0, 1, 2)
    assert [token for token in range(tokenizer.vocab_size) if tokenizer.is_special(token)] == [0, 1, 2]


def test_the_names_that_a_chat_template_sees(byte_level_json: Table) -> None:
    """Those of the files. An id of config.json is no name, and stands in only where no file has a template."""
    template = "{{ bos_token }}|{{ eos_token }}|{{ mask_token }}"
    numbers = TokenizerSettings(bos_id=0, eos_ids=(1,))
    for settings, text in (
        (dataclasses.replace(numbers, chat_template=template), "||"),
        (dataclasses.replace(numbers, chat_template=template, bos_token=BOS, mask_token=EOT), f"{BOS}||{EOT}"),
        (numbers, f"{BOS}User: a{EOT}"),
    ):
        tokenizer = load(byte_level_json, settings)
        assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], False) == text


def test_a_text_with_bos_keeps_what_else_is_before_it(byte_level_json: Table) -> None:
    two = {"type": "TemplateProcessing", "special_tokens": {EOT: {"id": EOT, "ids": [2], "tokens": [EOT]}}}
    two["special_tokens"][BOS] = {"id": BOS, "ids": [0], "tokens": [BOS]}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    two["single"] = [{"SpecialToken": {"id": token, "type_id": 0}} for token in (EOT, BOS)] + [text]
    two["pair"] = [text, {"Sequence": {"id": "B", "type_id": 0}}]
    tokenizer = load(byte_level_json | {"post_processor": two}, TokenizerSettings(bos_token=BOS))
    assert tokenizer.encode("") == [2, 0]
    assert tokenizer.encode(BOS) == [2, 0]
    assert tokenizer.encode(EOT) == [2, 0, 2]
    assert tokenizer.encode_batch(["", BOS, EOT]) == [[2, 0], [2, 0], [2, 0, 2]]


def test_what_the_digest_is_of(byte_level_json: Table) -> None:
    """All that decides ids and texts, and nothing else."""
    plain = TokenizerSettings(bos_token=BOS, eos_token=EOS)
    digest = load(byte_level_json, plain).digest
    same = {"chat_template": "x", "tool_template": "x", "sampling": {"top_k": 1}, "bad_words": ((5,),), "path": "x"}
    for field, value in {**same, "pad_id": 7, "unk_token": EOT}.items():
        assert load(byte_level_json, dataclasses.replace(plain, **{field: value})).digest == digest, field
    others = {"bos_token": EOT, "eos_ids": (9,), "add_bos": False, "add_eos": True, "legacy": True}
    others |= {"added_tokens": (AddedToken("<new>", 332),), "flags_count": True}
    digests = {load(byte_level_json, dataclasses.replace(plain, **{field: others[field]})).digest for field in others}
    assert len(digests | {digest}) == 8
    assert load(edit(byte_level_json, "model", "fuse_unk", to=True), plain).digest != digest


def test_bad_words_as_texts_and_as_special_tokens(byte_level_json: Table) -> None:
    """Each text once; a special token alone has no text; among others it is left out."""
    tokenizer = load(byte_level_json)
    the, a = tokenizer.encode("the", add_special_tokens=False), tokenizer.encode("a", add_special_tokens=False)
    words = (tuple(the), tuple(a), (1,), (2,), (1, 2), tuple(the), (1, *a))
    settings = TokenizerSettings(sampling={"top_k": 5}, bad_words=words)
    expected = {"top_k": 5, "bad_words": ("the", "a"), "logit_bias": {1: -100.0, 2: -100.0}}
    assert load(byte_level_json, settings).recommended_sampling == expected
    assert load(byte_level_json, TokenizerSettings(bad_words=((1,),))).recommended_sampling == {
        "logit_bias": {1: -100.0}
    }
    assert tokenizer.recommended_sampling == {}
    with pytest.raises(TokenizerError, match="token id 4000 is not in the vocabulary"):
        assert load(byte_level_json, TokenizerSettings(bad_words=((4000,),))).recommended_sampling


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        ({"type": "RobertaProcessing", "sep": [EOS, 1], "cls": [BOS, 0], **OFFSETS}, [0, 1]),
        ({"type": "BertProcessing", "sep": [EOS, 1], "cls": [BOS, 0]}, [0, 1]),
        ({"type": "ByteLevel", "use_regex": True, **OFFSETS}, []),
    ],
)
def test_other_post_processors(byte_level_json: Table, processor: Table, expected: list[int]) -> None:
    for wrapped in (processor, {"type": "Sequence", "processors": [processor]}):
        table = byte_level_json | {"post_processor": wrapped}
        assert load(table).encode("") == expected
        assert load(table).encode("the") == LibraryTokenizer.from_str(json.dumps(table)).encode("the").ids


def test_padding_truncation_and_dropout_are_off(byte_level_json: Table) -> None:
    table = copy.deepcopy(byte_level_json)
    table["padding"] = {
        "strategy": {"Fixed": 2_000_000_000},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": BOS,
    }
    table["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    table["model"]["dropout"] = 0.5
    text = "the quick brown fox jumps over the lazy dog"
    tokenizer = load(table)
    expected = load(byte_level_json).encode(text)
    assert [tokenizer.encode(text) for _ in range(10)] == [expected] * 10
    assert tokenizer.encode_batch([text, "the"]) == [expected, load(byte_level_json).encode("the")]


def test_side_files_add_tokens(make_folder: Maker, byte_level_json: Table) -> None:
    size = load(byte_level_json).vocab_size
    folder = make_folder(
        {
            "tokenizer.json": byte_level_json,
            "tokenizer_config.json": {
                "bos_token": {"content": BOS, "lstrip": False},
                "eos_token": EOS,
                "pad_token": "<pad>",
                "added_tokens_decoder": {str(size): {"content": "<pad>", "special": True}},
            },
            "added_tokens.json": {"<pad>": size, "<call>": size + 1},
            "generation_config.json": {"eos_token_id": [2, 1]},
            "config.json": {"eos_token_id": size + 1, "bos_token_id": 0},
        }
    )
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocab_size == size + 2
    assert tokenizer.pad_id == size
    assert tokenizer.is_special(size)
    assert tokenizer.encode("<pad><call>", add_special_tokens=False) == [size, size + 1]
    assert tokenizer.decode([size, size + 1]) == "<call>"
    assert tokenizer.eos_ids == (2, 1, size + 1)


@pytest.mark.parametrize(
    ("token", "flags_count", "lstrip", "special"),
    [
        (AddedToken("plain added", 330), True, False, False),
        (AddedToken("plain added", 330, special=True), True, False, True),
        (AddedToken("plain added", 330), False, True, False),  # of added_tokens.json
        (AddedToken("plain added", special=True), True, True, True),
    ],
)
def test_whose_flags_of_an_added_token_count(
    byte_level_json: Table, token: AddedToken, flags_count: bool, lstrip: bool, special: bool
) -> None:
    """Those of added_tokens_decoder, if there is one, as in transformers 5; else those of tokenizer.json."""
    number = next(n for n, each in enumerate(byte_level_json["added_tokens"]) if each["content"] == "plain added")
    assert byte_level_json["added_tokens"][number]["id"] == 330
    settings = TokenizerSettings(added_tokens=(token,), flags_count=flags_count)
    tokenizer = load(edit(byte_level_json, "added_tokens", number, "lstrip", to=True), settings)
    space = [] if lstrip else tokenizer.encode(" ", add_special_tokens=False)
    assert tokenizer.encode(" plain added", add_special_tokens=False) == [*space, 330]
    assert tokenizer.is_special(330) is special


PLAIN = {"330": {"content": "plain added", "special": False}}


@pytest.mark.parametrize(
    ("config", "special"),
    [
        ({"eos_token": "plain added", "added_tokens_decoder": PLAIN}, True),
        ({"extra_special_tokens": {"call": "plain added"}, "added_tokens_decoder": PLAIN}, True),
        ({"additional_special_tokens": ["plain added"]}, False),
        ({"extra_special_tokens": ["plain added"], "added_tokens_decoder": PLAIN}, False),
        ({"additional_special_tokens": ["plain added"], "extra_special_tokens": {"call": "plain added"}}, True),
        ({"additional_special_tokens": ["plain added"], "added_tokens_decoder": {"330": "plain added"}}, False),
    ],
)
def test_what_makes_an_added_token_special(
    byte_level_json: Table, config: Table, special: bool, tmp_path: Path
) -> None:
    """A name does, a list does not. As transformers 5.24 decodes."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_level_json))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).is_special(330) is special


def test_a_normalized_added_token_streams_as_it_decodes(llama_json: Table) -> None:
    table = copy.deepcopy(llama_json)
    size = len(table["model"]["vocab"])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
    table["added_tokens"].append({"id": size, "content": "foo bar", **flags})
    tokenizer = load(table)
    ids = tokenizer.encode("the foo bar", add_special_tokens=False)
    assert size in ids
    assert tokenizer.id_to_token(size) == "foo bar"
    decoder = tokenizer.stream_decoder()
    text = "".join(map(decoder.push, ids)) + decoder.flush()
    assert text == tokenizer.decode(ids)
    assert text in ("the foo bar", "thefoo bar")  # newer releases of the library give the space back


def edit(table: Table, *path: Any, to: Any) -> Table:
    """A copy with one place changed."""
    table = copy.deepcopy(table)
    place = table
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return table


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("model",), None, "model: expected an object"),
        (("model", "vocab"), 5, r"model\.vocab: expected an object or a list"),
        (("model", "vocab", "a"), -1, r"model\.vocab\['a'\]: token id -1 is not in"),
        (("model", "vocab", "a"), 1 << 31, "is not in 0"),
        (("model", "vocab", "a"), True, "expected a token id, got True"),
        (("model", "vocab", "a"), 10, "are both token 10"),
        (("model", "merges"), [["a", "nowhere"]], "tokenizers cannot load"),
        (("model", "merges"), "a b", "tokenizers cannot load"),
        (("model", "type"), "Nonsense", "tokenizers cannot load"),
        (("added_tokens", 0, "id"), 5, "<|begin_of_text|>"),
        (("added_tokens", 0, "content"), EOT, "stands twice"),
        (("added_tokens", 0, "content"), 7, r"added_tokens\[0\]\.content: expected a string"),
        (("added_tokens", 0, "content"), "\ud800", "lone surrogate"),
        (("added_tokens", 3, "id"), 4000, "is declared as token 4000 but is token"),
        (("post_processor", "special_tokens", BOS, "ids"), [9999], "token 9999 is not in the vocabulary"),
        (("post_processor", "single"), [], "exactly once"),
        (("decoder",), [], "decoder: expected an object"),
        (("decoder",), {"type": "Nonsense"}, "decoder.type: 'Nonsense' is no kind"),
    ],
)
def test_files_that_are_refused(byte_level_json: Table, path: tuple, value: Any, message: str) -> None:
    with pytest.raises(TokenizerError, match=message.replace("|", r"\|")):
        load(edit(byte_level_json, *path, to=value))


@pytest.mark.parametrize("token", ["<0xZZ>", "<0x-1>", "<0x+1>"])
def test_byte_tokens_that_are_no_bytes(llama_json: Table, token: str) -> None:
    with pytest.raises(TokenizerError, match="has the form of a byte token"):
        load(edit(llama_json, "model", "vocab", token, to=len(llama_json["model"]["vocab"])))


@pytest.mark.parametrize(
    "part",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},  # panics when it is loaded
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAA="}},  # when it meets a letter
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    ],
)
def test_a_panic_of_the_library_is_an_error(byte_level_json: Table, part: Table) -> None:
    with pytest.raises(TokenizerError, match="tokenizers cannot"):
        load(byte_level_json | part).encode("a")
    with pytest.raises(TokenizerError, match="tokenizers cannot"):
        load(byte_level_json | part).encode_batch(["a", "b"])


def test_a_charsmap_that_is_not_base64(byte_level_json: Table) -> None:
    for text in ("a", "\u00e9", "BAAA-AAAAAAA="):
        with pytest.raises(TokenizerError, match="is not base64"):
            load(byte_level_json | {"normalizer": {"type": "Precompiled", "precompiled_charsmap": text}})


def test_what_would_abort_the_process_is_refused(byte_level_json: Table) -> None:
    with pytest.raises(TokenizerError, match=r"model\.continuing_subword_prefix: is not supported for BPE"):
        load(edit(byte_level_json, "model", "continuing_subword_prefix", to="##"))
    assert load(edit(byte_level_json, "model", "continuing_subword_prefix", to="")).encode("the")


def test_unigram_and_wordpiece_models() -> None:
    unigram = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["\u2581a", -1.0], ["b", -2.0]]}
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    tokenizer = load({"model": unigram, "pre_tokenizer": metaspace, "decoder": metaspace, "added_tokens": []})
    assert tokenizer.encode("a ab") == [1, 1, 2]
    assert tokenizer.decode([1, 1, 2]) == "a ab"
    assert tokenizer.token_bytes(1) == b" a"
    vocabulary = {"[UNK]": 0, "run": 1, "##ning": 2}
    wordpiece = {"type": "WordPiece", "unk_token": "[UNK]", "vocab": vocabulary}
    wordpiece |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    decoder = {"type": "WordPiece", "prefix": "##", "cleanup": False}
    whitespace = {"type": "Whitespace"}
    tokenizer = load({"model": wordpiece, "pre_tokenizer": whitespace, "decoder": decoder, "added_tokens": []})
    assert tokenizer.encode("running run") == [1, 2, 1]
    assert tokenizer.decode([1, 2, 1]) == "running run"
    with pytest.raises(TokenizerError, match=r"model\.vocab\[1\]: expected \[token, score\]"):
        load({"model": unigram | {"vocab": [["a", 0.0], ["b"]]}, "added_tokens": []})


def test_settings_that_contradict_the_vocabulary(byte_level_json: Table) -> None:
    with pytest.raises(TokenizerError, match="bos_token: '<s>' is not in the vocabulary"):
        load(byte_level_json, TokenizerSettings(bos_token="<s>"))
    with pytest.raises(TokenizerError, match="eos_token: '</s>' is not in the vocabulary"):
        load(byte_level_json, TokenizerSettings(eos_token="</s>"))
    ids = TokenizerSettings(eos_ids=(5000, 2), bos_id=5000, add_bos=True)
    with pytest.warns(ConfigWarning, match="token_id: 5000 ignored: it is not in the vocabulary of 332") as warned:
        tokenizer = load(byte_level_json, ids)
    assert len(warned) == 2
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (None, (2,))
    assert tokenizer.encode("a") == load(byte_level_json).encode("a", add_special_tokens=False)


def test_the_ids_before_and_after_a_text() -> None:
    parts: list[dict[str, Any]] = [{"SpecialToken": {"id": name}} for name in "abc"]
    specials = {name: {"ids": ids} for name, ids in {"a": [1], "b": [2, 3], "c": [4]}.items()}
    single = [parts[0], {"Sequence": {"id": "A"}}, *parts[1:]]
    template = {"type": "TemplateProcessing", "single": single, "special_tokens": specials}
    assert post_processor_affixes(template) == ([1], [2, 3, 4])
    assert post_processor_affixes({"type": "Sequence", "processors": [template, template]}) == ([1, 1], [2, 3, 4] * 2)


def test_an_id_of_padding_need_be_no_token() -> None:
    table = {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}, "added_tokens": []}
    assert HfTokenizer(json.dumps(table).encode(), TokenizerSettings(pad_id=7)).pad_id == 7


def test_the_largest_id_and_a_file_without_a_name() -> None:
    table = {"model": {"type": "WordLevel", "vocab": {"a": MAX_TOKEN_ID - 1}}}
    check_tokenizer_json(table)
    table["model"]["vocab"]["b"] = MAX_TOKEN_ID
    with pytest.raises(TokenizerError, match="is not in"):
        check_tokenizer_json(table)
    for number in (1.0, True):
        with pytest.raises(TokenizerError, match=r"model\.vocab\['a'\]"):
            check_tokenizer_json({"model": {"type": "WordLevel", "vocab": {"a": number}}})
    with pytest.raises(TokenizerError, match=r"tokenizer\.json, byte 1: not valid JSON"):
        HfTokenizer(b"{", TokenizerSettings())
    assert hash(TokenizerSettings()) == hash(TokenizerSettings())
    assert TokenizerSettings(path="a") == TokenizerSettings(path="b")
