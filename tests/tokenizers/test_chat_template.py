"""Chat templates: published ones rendered as transformers renders them, the built-in one, and bad conversations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitnet_ref.errors import TokenizerError
from bitnet_ref.tokenizers import Tokenizer, load_tokenizer
from bitnet_ref.tokenizers.templates.chat_template import BITNET_2B4T_TEMPLATE, ChatTemplate

# Templates in the manner of Llama 2, 3 and 3.1, ChatML, Mistral, Zephyr/TinyLlama, Falcon, Qwen 3 and BitNet 2B-4T,
# with what transformers rendered, or the error that it raised. A key of `expected` is
# template/conversation/add_generation_prompt.
GOLDEN = json.loads((Path(__file__).parents[1] / "data/tokenizers/chat_templates.json").read_text(encoding="utf-8"))
BOS, EOS, EOT = "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"
HELLO = [{"role": "user", "content": " Hello "}]


# Templates as published (llama.cpp, models/templates; Apache-2.0), with tools, calls, their results and thinking, and
# what transformers 5.23 renders in jinja2's ImmutableSandboxedEnvironment.
TOOLS = json.loads((Path(__file__).parents[1] / "data/tokenizers/qwen_tools.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("data", [GOLDEN, TOOLS], ids=["chats", "tools"])
def test_as_transformers_renders_it(data: dict[str, Any]) -> None:
    templates = {name: ChatTemplate(source) for name, source in data["templates"].items()}
    for key, expected in data["expected"].items():
        name, conversation, generate = key.split("/")
        given = data["conversations"][conversation]
        given = given if isinstance(given, dict) else {"messages": given}

        def render(name: str = name, given: dict[str, Any] = given, generate: str = generate) -> str:
            specials = {"bos_token": "<s>", "eos_token": "</s>"}
            return templates[name].render(**given, add_generation_prompt=generate == "1", **specials)

        if isinstance(expected, str):
            assert render() == expected, key
        else:
            with pytest.raises(TokenizerError) as caught:
                render()
            assert expected["error"] in str(caught.value), key
    assert len(data["expected"]) >= 6 * len(templates)


def test_the_built_in_template_is_2b4ts_own() -> None:
    own, built_in = ChatTemplate(GOLDEN["templates"]["2b4t"]), ChatTemplate(BITNET_2B4T_TEMPLATE)
    for messages in GOLDEN["conversations"].values():
        for generate in (True, False):
            text = built_in.render(messages, add_generation_prompt=generate, bos_token=BOS)
            assert text == own.render(messages, add_generation_prompt=generate, bos_token=BOS)


def test_the_2b4t_family_without_a_template(kinds: dict[str, Tokenizer]) -> None:
    tokenizer = kinds["byte_level"]
    messages = [{"role": "system", "content": "Be kind."}, *HELLO]
    text = f"{BOS}System: Be kind.{EOT}User: Hello{EOT}Assistant: "
    assert tokenizer.chat_template == BITNET_2B4T_TEMPLATE
    assert tokenizer.apply_chat_template(messages) == text
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == text.removesuffix("Assistant: ")
    ids = tokenizer.apply_chat_template(messages, tokenize=True)
    assert ids == tokenizer.encode(text)
    assert ids.count(tokenizer.bos_id) == 1
    assert ids.count(tokenizer.token_to_id(EOT)) == 2


def test_a_template_of_the_files_is_used(make_folder: Callable[..., Path], byte_level_json: dict[str, Any]) -> None:
    config = {
        "bos_token": BOS,
        "eos_token": EOS,
        "chat_template": "{{ messages[0].content }}{{ eos_token }}{{ pad_token }}",
    }
    tokenizer = load_tokenizer(make_folder({"tokenizer.json": byte_level_json, "tokenizer_config.json": config}))
    assert tokenizer.apply_chat_template(HELLO) == f" Hello {EOS}"
    assert tokenizer.bos_id not in tokenizer.apply_chat_template(HELLO, tokenize=True)  # the template writes none


def test_no_template(storyteller: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match=r"has no chat template.*write the prompt yourself and use encode\(\)"):
        storyteller.apply_chat_template(HELLO)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("hi", r"expected a list like .* got str"),
        ({"role": "user", "content": "x"}, "got dict"),
        (None, "got NoneType"),
        (["hi"], r"messages\[0\]: expected a dict with 'role' and 'content', got str"),
        ([*HELLO, {"role": "user"}], r"messages\[1\]: 'content' is missing"),
        ([*HELLO, {"content": "x"}], r"messages\[1\]: 'role' is missing"),
        ([{"role": 5, "content": "x"}], r"messages\[0\]\['role'\]: expected str, got int"),
        ([{"role": "user", "content": None}], r"messages\[0\]\['content'\]: expected str, got NoneType"),
        ([{"role": "user", "content": ["x"]}], r"\['content'\]: expected str, got list"),
        ([{"role": "user", "content": "x", "extra": object()}], r"messages\[0\]\['extra'\]: .* got object"),
        ([{"role": "user", "content": "x", 5: 1}], "expected str keys, got 5"),
    ],
)
def test_bad_conversations_are_named(kinds: dict[str, Tokenizer], messages: Any, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        kinds["byte_level"].apply_chat_template(messages)


def test_a_conversation_that_holds_itself() -> None:
    extra: list[Any] = []
    extra.append(extra)
    with pytest.raises(TokenizerError, match="nested more than 32 deep"):
        ChatTemplate("x").render([{"role": "user", "content": "x", "extra": extra}])


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: {"in": inner}], ids=["lists", "dicts"])
def test_the_deepest_values_of_a_message(wrap: Callable[[Any], Any]) -> None:
    value: Any = "x"
    for _ in range(31):  # the message itself is one
        value = wrap(value)
    message = {"role": "user", "content": "x", "extra": value}
    assert ChatTemplate("x").render([message]) == "x"
    with pytest.raises(TokenizerError, match="nested more than 32 deep"):
        ChatTemplate("x").render([message | {"extra": wrap(value)}])


def test_a_surrogate_is_found_when_the_text_becomes_ids(kinds: dict[str, Tokenizer]) -> None:
    with pytest.raises(TokenizerError, match="lone surrogate"):
        kinds["byte_level"].apply_chat_template([{"role": "user", "content": "\ud800"}], tokenize=True)


@pytest.mark.parametrize(
    ("source", "line", "message"),
    [
        ("a\n{% if %}", 2, "Expected an expression"),
        ("a\n\n{{ raise_exception('no system here') }}", 3, "no system here"),
        ("{% for m in messages %}\n{{ m.content.nope.deeper }}\n{% endfor %}", 2, "no attribute 'nope'"),
        ("a\n{{ nothing() }}", 2, "'nothing' is undefined"),
        ("\n\n{{ 1 / 0 }}", 3, "division by zero"),
        ("\n{{ 'a' | center(9) }}", 2, "the filter 'center' is not available"),
        ("\n{% include 'x' %}", 2, "Include is not available"),
    ],
)
def test_errors_say_the_line(source: str, line: int, message: str) -> None:
    with pytest.raises(TokenizerError, match=message) as caught:
        ChatTemplate(source, path="model").render(HELLO)
    assert caught.value.field == f"chat_template line {line}"
    assert caught.value.path == "model"


def test_what_transformers_provides() -> None:
    source = (
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}"
        "{% endfor %}{% generation %}|{{ messages | tojson }}{% endgeneration %}|{{ strftime_now('%Y')|length }}"
    )
    messages = [{"role": "user", "content": "<é> & 'x'"}]
    assert ChatTemplate(source).render(messages) == "02|" + json.dumps(messages, ensure_ascii=False) + "|4"
