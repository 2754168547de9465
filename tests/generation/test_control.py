"""What a text must not contain, and what it must match."""

import json
import re
import sys

import numpy as np
import pytest
from helpers import first_where, model, rng
from hypothesis import given, settings
from hypothesis import strategies as st

from bitnet_ref.errors import GenerationError, TokenizerError
from bitnet_ref.generation import constraints
from bitnet_ref.generation.processors import BannedWords
from bitnet_ref.generation.streaming import TextStream
from bitnet_ref.tokenizers.vocabulary import SortedTokens

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture
def story():
    return model("storyteller", "auto")


class Letters:
    """A tokenizer whose tokens are a few strings, as the text stream wants it."""

    def __init__(self, tokens):
        self.tokens = tokens

    def has_id(self, token):
        return token < len(self.tokens)

    def stream_decoder(self, shown):
        return self

    def push(self, token):
        return self.tokens[token]

    def flush(self):
        return ""


PIECES = st.lists(st.text("abc", min_size=1, max_size=3), min_size=4, max_size=12, unique=True)


def test_requests_that_ban_the_same_words_search_the_vocabulary_once(story, monkeypatch):
    searched, search = [], SortedTokens.containing
    monkeypatch.setattr(SortedTokens, "containing", lambda self, part: searched.append(part) or search(self, part))
    options = {"bad_words": ["unheard of", "of a"], "max_tokens": 12}
    texts = [story.generate(prompt, **options).text for prompt in ("Alice", "The old man and the king of")]
    assert searched == [b"unheard of", b"of a"]
    assert not any("of a" in text for text in texts)
    story.generate("Alice", bad_words=["of a"], max_tokens=1)
    assert searched[2:] == [b"of a"]


@given(PIECES, st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3), st.integers(0, 99))
def test_no_way_of_cutting_says_a_banned_word(pieces, words, seed):
    """Of all tokens exactly those are forbidden that would complete a word, whatever was said before."""
    rule, generator = BannedWords(words, SortedTokens([piece.encode() for piece in pieces]), 1), rng(seed)
    ids, text = [0], ""  # the first is the prompt, which does not count
    for _ in range(12):
        logits = generator.standard_normal(len(pieces))
        expected = [any(word in text + piece for word in words) for piece in pieces]
        got = np.isneginf(rule(np.array(ids), logits))
        assert got.tolist() == expected
        assert rule.moves(np.array(ids)).tolist() == np.flatnonzero(expected).tolist()
        if all(expected):
            return
        ids.append(int(np.argmax(np.where(got, -np.inf, logits))))
        text += pieces[ids[-1]]


@given(PIECES, st.lists(st.text("abc", min_size=2, max_size=4), min_size=1, max_size=3), st.lists(st.integers(0, 3)))
@settings(max_examples=100)
def test_filtered_text_ends_before_the_word_in_any_pieces(pieces, words, tokens):
    stream, whole = TextStream(Letters(pieces), (), banned=words), "".join(pieces[token] for token in tokens)
    shown = []
    for token in tokens:
        shown.append(stream.push(token))
        assert not any(word in "".join(shown) for word in words)
        if stream.filtered:
            break
    text = "".join(shown) + stream.flush()
    assert whole.startswith(text)
    if any(word in whole for word in words):
        assert stream.filtered
        assert whole.startswith(text + stream.banned.found)
    else:
        assert text == whole


def test_what_might_have_begun_a_stop_string_stays_before_a_filtered_one():
    stream = TextStream(Letters(["E", "bad"]), ["END"], banned=["bad"])
    assert [stream.push(0), stream.push(1), stream.flush()] == ["", "", "E"]
    assert stream.filtered


def test_bad_words_change_the_text(story):
    free = story.generate("Once upon a time", max_tokens=40)
    words = [free.text[5:9], "boy", "it"]
    assert any(word in free.text for word in words)
    out = story.generate("Once upon a time", max_tokens=40, bad_words=words)
    assert len(out.token_ids) == 40
    assert not any(word in out.text for word in words)
    for beam in story.generate("Once upon a time", max_tokens=12, bad_words=words, num_beams=3, n=3):
        assert not any(word in beam.text for word in words)
    sampled = story.generate(["Alice", "The king"], max_tokens=30, temperature=1.2, seed=1, bad_words=["e"])
    assert all("e" not in row.text and len(row.token_ids) == 30 for row in sampled)


def test_a_filter_ends_the_text_before_what_must_not_be_said(story):
    free = story.generate("Once upon a time", max_tokens=40)
    parts = [free.text[start : start + 7] for start in range(20, len(free.text) - 7)]
    word = first_where(parts, lambda part: free.text.index(part) >= 20, "letters that stand first behind 20 others")
    out = story.generate("Once upon a time", max_tokens=40, filter=word)
    assert (out.finish_reason, out.stop_reason) == ("filtered", word)
    assert out.text == free.text[: free.text.index(word)]
    shown = ""
    for chunk in story.stream("Once upon a time", max_tokens=40, filter=[word]):
        shown += chunk.text
        assert free.text.index(word) >= len(shown)  # not even its beginning
    assert shown == out.text
    earlier = story.generate("Once upon a time", max_tokens=40, filter=[word], stop=[free.text[10:14]])
    assert earlier.finish_reason == "stop"


def test_a_filter_may_be_a_function(story):
    free = story.generate("Once upon a time", max_tokens=40)
    seen = []

    def long(text):
        seen.append(text)
        return len(text.split()) > 6

    out = story.generate("Once upon a time", max_tokens=40, filter=long)
    assert (out.finish_reason, out.stop_reason) == ("filtered", None)
    assert free.text.startswith(out.text)
    assert len(out.text.split()) == 6
    assert all(free.text.startswith(text) for text in seen)
    with pytest.raises(ZeroDivisionError):
        story.generate("Alice", max_tokens=5, filter=lambda text: 1 / 0)
    assert story.generate("Once upon a time", max_tokens=40).text == free.text


# -- text that matches -------------------------------------------------------------------------------------------------


def test_guided_regex(story):
    pytest.importorskip("llguidance")
    pattern = r"[A-Z][a-z]{2,9} was [0-9]{1,2} years old\."
    for params in ({}, {"temperature": 1.5, "seed": 1}, {"num_beams": 3}, {"temperature": 1.0, "top_k": 4, "seed": 2}):
        out = story.generate("Once upon a time", guided_regex=pattern, **params)
        assert re.fullmatch(pattern, out.text), out.text
        assert out.finish_reason == "stop"
    text = "".join(chunk.text for chunk in story.stream("Once upon a time", guided_regex=pattern))
    assert text == story.generate("Once upon a time", guided_regex=pattern).text


def test_guided_json_and_choice_and_grammar(story):
    pytest.importorskip("llguidance")
    for seed in range(3):
        params = {"temperature": 1.0, "seed": seed, "max_tokens": 120, "bad_words": ["\n", "\t", "  ", "\r"]}
        for schema in (SCHEMA, json.dumps(SCHEMA)):
            out = story.generate("Once upon a time", guided_json=schema, **params)
            value = json.loads(out.text)
            assert set(value) == {"name", "age"}
            assert 0 <= value["age"] <= 99
    assert story.generate("Alice", guided_choice=["yes", "no", 'per"haps']).text in ("yes", "no", 'per"haps')
    ending = {"frequency_penalty": 2.0, "max_tokens": 200}  # with it any model comes to the "c"
    out = story.generate("Alice", guided_grammar='start: ("a" "b")+ "c"', **ending)
    assert re.fullmatch("(ab)+c", out.text)


def test_a_guided_batch_gives_what_each_row_gives_alone(story):
    pytest.importorskip("llguidance")
    params = {"guided_regex": "[a-z ]{5,20}!", "temperature": 1.0, "seed": 1, "n": 2}
    batch = story.generate(["Alice", "The king"], **params)
    assert [[row.text for row in rows] for rows in batch] == [
        [row.text for row in story.generate(prompt, **params)] for prompt in ("Alice", "The king")
    ]


def test_the_texts_of_a_request_share_a_compiled_guide(story, monkeypatch):
    pytest.importorskip("llguidance")
    compiled, run = [], constraints.run_with_stack
    monkeypatch.setattr(constraints, "run_with_stack", lambda function: compiled.append(1) or run(function))
    guide = {"guided_regex": "[a-z ]{4,6}[?!]", "max_tokens": 8}
    with story.engine() as engine:
        handles = engine.streams("Alice", n=3, temperature=1.0, seed=1, **guide)
        texts = [handle.result().text for handle in handles]
        assert engine.generate(["Alice", "The old man"], **guide)[0].text == story.generate("Alice", **guide).text
    assert len(compiled) == 1
    assert texts == [out.text for out in story.generate("Alice", n=3, temperature=1.0, seed=1, **guide)]


@pytest.mark.parametrize(
    "wrong",
    [{"guided_regex": "(["}, {"guided_json": "{"}, {"guided_json": {"type": "objekt"}}, {"guided_grammar": "x"}],
)
def test_what_is_no_grammar_is_refused_at_once(story, wrong):
    pytest.importorskip("llguidance")
    (name,) = wrong
    with pytest.raises(GenerationError, match=name):
        story.stream("Alice", **wrong)


@pytest.mark.parametrize("guide", [{"guided_regex": "[a&&b]"}, {"guided_json": {"$ref": "#"}}])
def test_a_guide_that_no_text_matches_is_refused(story, guide):
    pytest.importorskip("llguidance")
    with pytest.raises(GenerationError, match="no text matches it"):
        story.generate("Alice", **guide)


def test_without_llguidance_the_error_says_what_to_install(monkeypatch):
    import bitnet_ref

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(GenerationError, match=r"pip install 'bitnet-ref\[constrained\]'"):
        bitnet_ref.load("storyteller").generate("Alice", guided_regex="a+")


def test_a_model_without_a_tokenizer_refuses_rules_about_text():
    from helpers import GOLDEN

    for params in ({"bad_words": ["a"]}, {"filter": ["a"]}, {"guided_choice": ["a"]}, {"echo": True}):
        with pytest.raises(TokenizerError):
            model(GOLDEN / "llama-dense").generate([1, 2], **params)


@given(
    st.lists(st.text("ab\xff", max_size=4).map(lambda text: text.encode("latin-1")), min_size=1, max_size=20),
    st.sampled_from([b"a", b"ab", b"\xff", b"a\xff", b"\xff\xff", b"aba"]),
)
def test_tokens_are_found_by_their_bytes(tokens, part):
    found = SortedTokens(tokens)
    first, last = found.span(part)
    assert sorted(found.order[first:last]) == [i for i, data in enumerate(tokens) if data.startswith(part)]
    assert found.containing(part) == [i for i, data in enumerate(tokens) if part in data]
