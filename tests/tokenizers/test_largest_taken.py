"""Every limit of tokenizers/: what is exactly that large is taken, and what has one more is not.

A limit that is too large to be tried is lowered for its test. Its value stands in LIMITS all the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from test_tokenizer_limits import BPE, load

import bitnet_ref
from bitnet_ref.errors import TokenizerError
from bitnet_ref.tokenizers import load_tokenizer_files
from bitnet_ref.tokenizers.files import TokenizerFiles, check_token_id
from bitnet_ref.tokenizers.gguf_keys import GgufVocabulary
from bitnet_ref.tokenizers.gguf_sentencepiece import model_from_vocabulary
from bitnet_ref.tokenizers.sentencepiece_model import (
    NORMAL,
    UNKNOWN,
    SentencePieceModel,
    read_model,
    write_model,
)
from bitnet_ref.tokenizers.templates.chat_template import ChatTemplate
from bitnet_ref.tokenizers.templates.limits import LimitError, measure

ROOM = Path(bitnet_ref.__file__).parent / "tokenizers"
HELLO = [{"role": "user", "content": "Hello"}]


def render(source: str, **message: Any) -> None:
    ChatTemplate(source).render([HELLO[0] | message])


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def pieces(count: int, charsmap: bytes = b"") -> None:
    texts, scores = [f"{n}" for n in range(count)], [-float(n) for n in range(count)]
    model = SentencePieceModel(texts, scores, [UNKNOWN, *[NORMAL] * (count - 1)], charsmap=charsmap)
    read_model(write_model(model, {"unk": 0}), "x")


def llama_vocabulary(count: int) -> None:
    keys = {
        "model": "llama",
        "tokens": [f"{n}" for n in range(count)],
        "scores": [0.0] * count,
        "token_type": [UNKNOWN, *[NORMAL] * (count - 1)],
    }
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    model_from_vocabulary(GgufVocabulary(metadata), {})


def affixes(count: int) -> None:
    steps = [{"SpecialToken": {"id": "a", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}]
    special = {"a": {"id": "a", "ids": [0] * count, "tokens": ["a"] * count}}
    load(post_processor={"type": "TemplateProcessing", "single": steps, "pair": pair, "special_tokens": special})


def vocabulary(count: int) -> None:
    content = json.dumps({"model": BPE, "added_tokens": []}).encode()
    load_tokenizer_files({"tokenizer.json": content + b" " * (count - len(content))})


def macros(depth: int) -> None:
    render("{% macro m(n) %}{% if n > 1 %}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(" + f"{depth}" + ") }}")


def scopes(count: int) -> None:
    """One assignment, and `count` blocks: the template is one, and the loop."""
    render("{% for i in [] %}{% endfor %}" + "{% if 0 %}{% endif %}" * (count - 2))


# "module NAME": (the value, what is tried instead or None, what takes a size, the words of the refusal)
Case = tuple[Any, int | None, Callable[[int], object], str]
LIMITS: dict[str, Case] = {
    "base MAX_TOKEN_CHARACTERS": (
        1 << 14,
        None,
        lambda n: load(BPE | {"vocab": {**BPE["vocab"], "x" * n: 4}}),
        "a token has 16385 characters",
    ),
    "base MAX_DECODED_BYTES": (
        1 << 29,
        4 * 105,
        lambda n: load(BPE | {"vocab": {**BPE["vocab"], "x" * (100 + n - 420): 4}}),
        "texts may have more than 420 bytes",
    ),
    ". MAX_VOCABULARY_BYTES": (64 << 20, 4000, vocabulary, "has more than 4000 bytes"),
    "files MAX_CONFIG_BYTES": (
        4 << 20,
        None,
        lambda n: TokenizerFiles("x", {"a": b"{}" + b" " * (n - 2)}).json_object("a"),
        "has more than 4194304 bytes",
    ),
    "files MAX_TOKEN_ID": (1 << 24, None, lambda n: check_token_id(n - 1, "x"), r"not in 0\.\.16777215"),
    "gguf_keys MAX_TOKEN_ID": (1 << 24, 5, llama_vocabulary, "expected 1 to 5 tokens, got 6"),
    "gguf_sentencepiece MAX_PIECES": (1_000_000, 5, llama_vocabulary, "at most 5 tokens"),
    "hf_json MAX_AFFIXES": (64, None, affixes, "more than 64 tokens around"),
    "sentencepiece_model MAX_PIECES": (1_000_000, 5, pieces, "more than 5 pieces"),
    "sentencepiece_model MAX_CHARSMAP_BYTES": (
        64,
        None,
        lambda n: pieces(2, (4).to_bytes(4, "little") + bytes(4) + b"x" * n + b"\0"),
        "makes 65 bytes of one character",
    ),
    "templates.chat_template _MAX_DEPTH": (32, None, lambda n: render("", tools=nested(n - 1)), "more than 32 deep"),
    "templates.filters _MAX_ATTRIBUTE": (
        256,
        None,
        lambda n: render("{{ [] | map(attribute='" + "x" * n + "') | list }}"),
        "more than 256 characters",
    ),
    "templates.filters _MAX_TITLE": (
        1 << 16,
        None,
        lambda n: render("{{ messages[0].content | title }}", content="a" * n),
        "at most 65536 characters",
    ),
    "templates.limits MAX_INTEGER": (1 << 63, None, lambda n: measure([n - 1], 99), "more than 63 bits"),
    "templates.limits MAX_NESTING": (40, None, lambda n: measure(nested(n), 9999), "more than 40 deep"),
    "templates.sandbox MAX_INTEGER": (1 << 63, None, lambda n: render(f"{{{{ {n - 1} }}}}"), "more than 63 bits"),
    "templates.sandbox MAX_MACRO_DEPTH": (32, None, macros, "more than 32 deep"),
    "templates.sandbox MAX_NODES": (
        20_000,
        200,
        lambda n: render("{{" + ",".join("1" * (n - 3)) + "}}"),  # and Template, Output, Tuple
        "of more than 200 parts",
    ),
    "templates.sandbox MAX_SCOPES": (1_000_000, 9, scopes, "very many assignments"),
    "templates.sandbox MAX_SOURCE": (1 << 18, None, lambda n: render("a" * n), "more than 262144 characters"),
}
# By their own tests in test_tokenizer_limits.py and test_template_limits.py, each with one more too
ELSEWHERE = {"MAX_GROWTH", "MAX_NESTED_CHARACTERS", "MAX_PATTERN", "MAX_SECONDS", "MAX_STEPS", "MAX_TREE_DEPTH"}
ELSEWHERE |= {"_MAX_AFFIX_BYTES", "_MAX_STEPS", "_MAX_WORD"}


def test_no_limit_is_left_out() -> None:
    text = "".join(path.read_text() for path in ROOM.rglob("*.py"))
    tried = {name.split()[1] for name in LIMITS} | ELSEWHERE
    assert tried == set(re.findall(r"^(_?MAX_[A-Z_]+) = ", text, re.MULTILINE))


@pytest.mark.parametrize("limit", LIMITS)
def test_the_largest_that_is_taken(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, constant = limit.split()
    value, lowered, attempt, words = LIMITS[limit]
    module = import_module(f"bitnet_ref.tokenizers.{name}".rstrip("."))
    assert getattr(module, constant) == value
    if lowered is not None:
        monkeypatch.setattr(module, constant, lowered)
    largest = value if lowered is None else lowered
    attempt(largest)
    with pytest.raises((TokenizerError, LimitError), match=words):
        attempt(largest + 1)
