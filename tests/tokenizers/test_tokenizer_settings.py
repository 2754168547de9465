"""Which file is read, what the small files may say, how a wrong one is named, and that imports stay lazy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bitnet_ref.errors
from bitnet_ref import load
from bitnet_ref.errors import TokenizerError, describe
from bitnet_ref.system.json_file import read_bounded
from bitnet_ref.tokenizers import TokenizerSettings, load_tokenizer, read_settings
from bitnet_ref.tokenizers.files import MAX_CONFIG_BYTES, check_type, errors_at, get_optional
from bitnet_ref.tokenizers.hf_tokenizer import HfTokenizer
from bitnet_ref.tokenizers.settings import TOOL_TEMPLATE, AddedToken

STORYTELLER = Path(bitnet_ref.errors.__file__).parent / "assets" / "storyteller"
Maker = Callable[..., Path]


def test_importing_the_package_imports_no_library() -> None:
    code = "import sys, bitnet_ref.tokenizers; print({'tokenizers', 'sentencepiece', 'jinja2'} & set(sys.modules))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr


def test_tokenizer_json_is_preferred(make_folder: Maker, byte_level_json: dict[str, Any]) -> None:
    model = (STORYTELLER / "tokenizer.model").read_bytes()
    folder = make_folder({"tokenizer.json": byte_level_json, "tokenizer.model": model})
    assert isinstance(load_tokenizer(str(folder)), HfTokenizer)


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json and tokenizer\.model; copy one from") as caught:
        load_tokenizer(tmp_path)
    assert caught.value.path == str(tmp_path)
    with pytest.raises(TokenizerError, match="is not a folder"):
        load_tokenizer(tmp_path / "nowhere")


def test_files_that_are_not_read(tmp_path: Path) -> None:
    big = tmp_path / "big.json"
    with open(big, "wb") as file:
        file.truncate(MAX_CONFIG_BYTES + 1)
    with pytest.raises(TokenizerError, match="at most that many"):
        read_bounded(big, TokenizerError, MAX_CONFIG_BYTES)
    with pytest.raises(TokenizerError, match="is not a regular file"):
        read_bounded(tmp_path, TokenizerError, 10)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "tokenizer.model")
        with pytest.raises(TokenizerError, match="is not a regular file"):
            load_tokenizer(tmp_path)


def test_everything_the_files_say(make_folder: Maker) -> None:
    settings = read_settings(
        make_folder(
            {
                "tokenizer_config.json": {
                    "bos_token": "<s>",
                    "add_bos_token": True,
                    "legacy": True,
                    "additional_special_tokens": ["<tool>", {"content": "<end>", "rstrip": True}],
                    "added_tokens_decoder": {"9": {"content": "<tool>", "special": False}},
                    "chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}],
                },
                "special_tokens_map.json": {
                    "bos_token": "<other>",
                    "eos_token": {"content": "</s>"},
                    "mask_token": {"content": "<mask>", "lstrip": True},
                },
                "added_tokens.json": {"<pad>": 10},
                "generation_config.json": {"eos_token_id": [3, 2], "pad_token_id": -1},
                "config.json": {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 10, "vocab_size": 5},
            }
        )
    )
    assert (settings.bos_token, settings.eos_token, settings.pad_token) == ("<s>", "</s>", None)
    assert (settings.add_bos, settings.add_eos, settings.legacy) == (True, None, True)
    assert (settings.bos_id, settings.pad_id, settings.eos_ids) == (1, 10, (3, 2))
    assert settings.chat_template == "d"
    tokens = {token.content: token for token in settings.added_tokens}
    assert tokens["<tool>"] == AddedToken("<tool>", 9)  # the table's own flag counts before a list
    assert tokens["<end>"] == AddedToken("<end>", special=True, rstrip=True)
    assert tokens["<pad>"] == AddedToken("<pad>", 10)
    assert tokens["<mask>"] == AddedToken("<mask>", special=True, lstrip=True)
    assert settings.mask_token == "<mask>"


def test_all_settings_of_a_folder(make_folder: Maker) -> None:
    """The order of added tokens is that in which the files name them: bos to pad, other special ones, then ids."""
    folder = make_folder(
        {
            "tokenizer_config.json": {
                "bos_token": None,
                "unk_token": {"content": "<unk>", "special": False, "normalized": True},
                "add_eos_token": False,
                "extra_special_tokens": {"image": "<image>", "end": {"content": "<end>", "single_word": True}},
                "added_tokens_decoder": {
                    "7": {"content": "<end>", "lstrip": True},
                    "8": {"content": "new", "rstrip": True, "normalized": True},
                },
                "chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}],
            },
            "special_tokens_map.json": {
                "bos_token": {"content": "<s>", "lstrip": True},
                "eos_token": "",
                "pad_token": "<pad>",
                "unk_token": "<other>",
                "additional_special_tokens": ["<more>", "<image>"],
                "extra_special_tokens": ["<extra>"],
            },
            "added_tokens.json": {"<pad>": 9, "plain": 10, "<end>": 7},
            "generation_config.json": {"bos_token_id": -1, "eos_token_id": [5, -1, 4], "bad_words_ids": [[3], [4, 5]]},
            "config.json": {"bos_token_id": [1, 2], "eos_token_id": [4, 6], "pad_token_id": [11, 12]},
        }
    )
    assert read_settings(folder) == TokenizerSettings(
        bos_token="<s>",
        unk_token="<unk>",
        pad_token="<pad>",
        add_eos=False,
        bos_id=1,
        pad_id=11,
        eos_ids=(5, 4, 6),
        flags_count=True,
        listed=frozenset({"<more>", "<extra>"}),
        added_tokens=(
            AddedToken("<s>", special=True, lstrip=True),
            AddedToken("<unk>", special=True, normalized=True),
            AddedToken("<pad>", 9, special=True),
            AddedToken("<more>", special=True),
            AddedToken("<image>", special=True),
            AddedToken("<extra>", special=True),
            AddedToken("<end>", 7, special=True, lstrip=True),
            AddedToken("plain", 10),
            AddedToken("new", 8, rstrip=True, normalized=True),
        ),
        chat_template="d",
        tool_template="t",
        template_names=("tool_use", "default"),
        bad_words=((3,), (4, 5)),
    )
    assert read_settings(folder).path == str(folder)


def test_a_folder_that_says_nothing(tmp_path: Path) -> None:
    assert read_settings(tmp_path) == TokenizerSettings()


@pytest.mark.parametrize("value", [2**400, "x" * 1000, [1], {"a": 2}, None, 1.5])
def test_how_a_wrong_value_is_shown(value: Any) -> None:
    with pytest.raises(TokenizerError) as caught:
        check_type(value, bool, "x")
    assert str(caught.value) == f"x: expected true or false, got {describe(value)}"


def test_types_of_a_file() -> None:
    """True is no integer; text has a UTF-8 form; what is absent is not checked."""
    for value, kind in ((True, bool), (1, int), ("a", str), ([], list), ({}, dict)):
        assert check_type(value, kind, "x") is value
        assert get_optional({"x": value}, "x", kind) is value
        with pytest.raises(TokenizerError, match=r"^x: expected .*, got "):
            get_optional({"x": 0.5}, "x", kind)
    with pytest.raises(TokenizerError, match=r"^x: expected an integer, got True$"):
        check_type(True, int, "x")
    with pytest.raises(TokenizerError, match=r"^x: character 1 is the lone surrogate U\+DFFF"):
        check_type("a\udfff", str, "x")
    assert get_optional({}, "x", int) is get_optional({"x": None}, "x", int) is None


def test_the_file_that_an_error_names() -> None:
    """The one being read, unless the error names one itself."""
    for inner, outer, expected in ((None, "a", "a"), ("b", "a", "b"), ("b", None, "b"), (None, None, None)):
        with pytest.raises(TokenizerError) as caught, errors_at(outer):
            raise TokenizerError("wrong", path=inner, offset=3, field="f")
        assert (caught.value.path, caught.value.offset, caught.value.field) == (expected, 3, "f")
        assert caught.value.message == "wrong"


@pytest.mark.parametrize(
    ("generation", "sampling"),
    [
        ({}, {}),
        ({"top_k": 3, "min_p": None, "top_p": "0.9", "typical_p": True}, {"top_k": 3}),
        ({"top_k": -1, "repetition_penalty": 1.1}, {"top_k": 0, "repetition_penalty": 1.1}),
        ({"temperature": 0.5, "top_k": 3, "max_length": 9}, {"temperature": 0.5, "top_k": 3}),
        ({"do_sample": True}, {"temperature": 1.0, "top_k": 50}),
        ({"do_sample": True, "temperature": 0.5, "top_p": 1}, {"temperature": 0.5, "top_k": 50, "top_p": 1}),
        ({"do_sample": False, "temperature": 0.5, "top_p": 0.9}, {"temperature": 0.0}),  # as transformers
        ({"do_sample": False, "repetition_penalty": 1.2}, {"temperature": 0.0, "repetition_penalty": 1.2}),
    ],
)
def test_recommended_sampling(make_folder: Maker, generation: dict[str, Any], sampling: dict[str, float]) -> None:
    assert read_settings(make_folder({"generation_config.json": generation})).sampling == sampling


def test_bad_words_may_be_of_several_tokens(make_folder: Maker) -> None:
    words = [[5, 6], [7]]
    assert read_settings(make_folder({"generation_config.json": {"bad_words_ids": words}})).bad_words == ((5, 6), (7,))


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ([5], r"bad_words_ids\[0\]"),
        ([[5], []], r"bad_words_ids\[1\]"),
        ([["5"]], "bad_words_ids"),
        (5, "bad_words_ids"),
    ],
)
def test_bad_words_that_are_no_lists_of_ids(make_folder: Maker, words: Any, field: str) -> None:
    with pytest.raises(TokenizerError, match=field) as error:
        read_settings(make_folder({"generation_config.json": {"bad_words_ids": words}}))
    assert "generation_config.json" in str(error.value)


@pytest.mark.parametrize(("stated", "taken"), [(None, True), (True, True), (False, False)])
def test_the_space_before_a_text(stated: bool | None, taken: bool, make_folder: Maker) -> None:
    assert read_settings(make_folder({"tokenizer_config.json": {"add_prefix_space": stated}})).add_prefix_space is taken


def test_the_jinja_file_comes_first(make_folder: Maker) -> None:
    folder = make_folder({"chat_template.jinja": "é{{ 1 }}", "tokenizer_config.json": {"chat_template": "other"}})
    assert read_settings(folder).chat_template == "é{{ 1 }}"


def test_the_template_for_tools_among_several(make_folder: Maker) -> None:
    plain, tools = ({"name": name, "template": name + " {{ tools }}"} for name in ("default", "tool_use"))
    folder = make_folder({"tokenizer_config.json": {"chat_template": [plain]}})
    settings = read_settings(folder)
    assert (settings.chat_template, settings.tool_template) == ("default {{ tools }}", None)
    make_folder({"tokenizer_config.json": {"chat_template": [plain, tools]}})
    settings = read_settings(folder)
    assert (settings.chat_template, settings.tool_template) == ("default {{ tools }}", "tool_use {{ tools }}")
    make_folder({"chat_template.jinja": "other"})  # in place of both
    settings = read_settings(folder)
    assert (settings.chat_template, settings.tool_template) == ("other", None)
    (folder / TOOL_TEMPLATE).parent.mkdir()
    make_folder({TOOL_TEMPLATE: "{{ unclosed", "tokenizer.model": (STORYTELLER / "tokenizer.model").read_bytes()})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.template_for(with_tools=True) == "{{ unclosed"
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages) == "other"
    with pytest.raises(TokenizerError, match="chat_template line 1: unexpected end") as caught:
        tokenizer.apply_chat_template(messages, tools=[{"type": "function"}])
    assert caught.value.path == str(folder)
    make_folder({TOOL_TEMPLATE: b"{{ \xff"})
    with pytest.raises(TokenizerError, match="not UTF-8 text") as caught:
        read_settings(folder)
    assert (caught.value.path, caught.value.offset) == (str(folder / TOOL_TEMPLATE), 3)


@pytest.mark.parametrize("names", [["rag"], ["tool_use", "rag"]])
def test_templates_without_a_default_one_matter_to_chats_alone(make_folder: Maker, names: list[str]) -> None:
    shutil.copytree(STORYTELLER, folder := make_folder({}), dirs_exist_ok=True)
    templates = [{"name": name, "template": name} for name in names]
    make_folder({"tokenizer_config.json": {"chat_template": templates}})
    model = load(folder, backend="numpy")
    assert model.generate("Once", max_tokens=1).token_ids
    messages, message = [{"role": "user", "content": "Hi"}], f"named 'default': {', '.join(sorted(names))}"
    for talk in (lambda: model.chat(), lambda: model.tokenizer.apply_chat_template(messages)):
        with pytest.raises(TokenizerError, match=message) as caught:
            talk()
        assert (caught.value.path, caught.value.field) == (str(folder), "chat_template")
    assert model.tokenizer.apply_chat_template(messages, chat_template="own") == "own"
    if "tool_use" in names:
        assert model.tokenizer.apply_chat_template(messages, tools=[{"type": "function"}]) == "tool_use"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", "[]", "expected a JSON object, got list"),
        ("tokenizer_config.json", "{", "not valid JSON"),
        ("tokenizer_config.json", b"\xff", "not UTF-8 text"),
        ("tokenizer_config.json", '{"a": NaN}', "NaN is not JSON"),
        (
            "tokenizer_config.json",
            '{"bos_token": "a", "bos_token": "b"}',
            "bos_token: the key 'bos_token' occurs twice",
        ),
        ("tokenizer_config.json", '{"a": ' + "[" * 100_000, "not usable JSON"),
        ("tokenizer_config.json", '{"a": ' + "9" * 5000 + "}", "not usable JSON"),
        ("tokenizer_config.json", {"bos_token": 5}, "bos_token: expected a string or an object"),
        ("tokenizer_config.json", {"bos_token": {"content": ""}}, r"bos_token\.content: a token cannot be empty"),
        ("tokenizer_config.json", {"eos_token": {"content": "a", "lstrip": 1}}, r"eos_token\.lstrip: expected true"),
        ("tokenizer_config.json", {"add_bos_token": "yes"}, "add_bos_token: expected true or false, got 'yes'"),
        ("tokenizer_config.json", {"add_prefix_space": 0}, "add_prefix_space: expected true or false, got 0"),
        ("tokenizer_config.json", {"chat_template": 5}, "chat_template: expected a string"),
        ("tokenizer_config.json", {"chat_template": "\ud800"}, "lone surrogate"),
        ("tokenizer_config.json", {"chat_template": [{"name": "default", "template": 5}]}, "expected a string"),
        ("tokenizer_config.json", {"chat_template": [{"template": "x"}]}, r"chat_template\[0\]\.name"),
        ("tokenizer_config.json", {"chat_template": ["x"]}, r"chat_template\[0\]: expected an object with 'name'"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {}}}, "expected a token id as the key"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"1" * 11: {"content": "a"}}},
            "expected a token id as the key",
        ),
        ("tokenizer_config.json", {"added_tokens_decoder": {"1": {"content": "a"}, "2": {"content": "a"}}}, "twice"),
        ("added_tokens.json", {"<a>": 1 << 40}, "<a>: token id 1099511627776 is not in"),
        ("added_tokens.json", {"<a>": "1"}, "expected a token id, got '1'"),
        ("generation_config.json", {"eos_token_id": [1, "2"]}, "eos_token_id: expected a token id, got '2'"),
        ("config.json", {"bos_token_id": 1.5}, "bos_token_id: expected a token id, got 1.5"),
        ("config.json", {"bos_token_id": True}, "bos_token_id: expected a token id, got True"),
        ("chat_template.jinja", b"\xff\xfe", "not UTF-8 text"),
    ],
)
def test_wrong_side_files_are_named(make_folder: Maker, name: str, content: Any, message: str) -> None:
    folder = make_folder({"tokenizer.model": (STORYTELLER / "tokenizer.model").read_bytes(), name: content})
    with pytest.raises(TokenizerError, match=message) as caught:
        load_tokenizer(folder)
    assert caught.value.path == str(folder / name)


def test_two_files_that_disagree(make_folder: Maker) -> None:
    config = {"added_tokens_decoder": {"9": {"content": "<a>"}}}
    with pytest.raises(TokenizerError, match=r"'<a>' is token 9 here and 8 in added_tokens\.json"):
        read_settings(make_folder({"tokenizer_config.json": config, "added_tokens.json": {"<a>": 8}}))
