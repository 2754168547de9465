"""Many strings in one pass, and rules that use it: what they find does not depend on how, nor the cost on how many."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bitnet_ref
from bitnet_ref.generation.processors import BannedWords
from bitnet_ref.generation.streaming import StopStrings
from bitnet_ref.generation.string_search import StringSearch

WORDS = st.lists(st.text(alphabet="ab\U0001f600", min_size=1, max_size=4), max_size=6)
TEXT = st.text(alphabet="abc\U0001f600", max_size=20)


@given(WORDS, TEXT, st.integers(0, 20))
def test_it_finds_what_a_search_for_each_finds(words, text, cut):
    search = StringSearch(words)
    first, hits = search.ends(0, text[:cut])
    state, more = search.ends(first, text[cut:])
    found = [*hits, *((len(text[:cut]) + end, length) for end, length in more)]
    expected = []
    for end in range(1, len(text) + 1):
        lengths = [len(word) for word in words if text[:end].endswith(word)]
        expected += [(end, max(lengths))] if lengths else []
    assert found == expected
    begins = [length for word in words for length in range(len(word) + 1) if text.endswith(word[:length])]
    assert search.depths[state] == max(begins, default=0)


class CountedSearch(StringSearch):
    steps = 0

    def _step(self, node, symbol):
        CountedSearch.steps += 1
        return super()._step(node, symbol)


def count_steps(monkeypatch, words):
    """Searches in 200 steps of a text with rules on these words, after the rules are made."""
    from bitnet_ref.generation import processors

    monkeypatch.setattr(processors, "StringSearch", CountedSearch)
    monkeypatch.setattr("bitnet_ref.tokenizers.vocabulary.SortedTokens.containing", lambda self, part: [])
    model = bitnet_ref.load("storyteller")
    rule, stream = BannedWords(words, model.vocabulary.sorted, 1).copy(), StopStrings(CountedSearch(words))
    ids = model.tokenizer.encode("Once upon a time there was a little fox, who lived in the wood. " * 20)
    CountedSearch.steps = 0
    text = ""
    for length in range(1, 200):
        rule.moves(as_ids(ids[:length]))
        text += stream.push(model.tokenizer.decode(ids[length : length + 1]))
    return CountedSearch.steps


def as_ids(ids):

    return np.array(ids, dtype=np.int64)


@pytest.mark.thorough
def test_a_steps_cost_does_not_grow_with_the_number_or_length_of_words(monkeypatch):
    few = count_steps(monkeypatch, ["zzz"])
    assert count_steps(monkeypatch, [f"{number:09d}" for number in range(6000)]) == few
    assert count_steps(monkeypatch, ["z" * 60_000]) == few
    assert few < 4000  # two searches, a step for each byte


def test_a_rule_can_be_asked_about_any_text_in_any_order():
    model = bitnet_ref.load("storyteller")
    words = [" fox", "lived in", "wood.", "xyz" * 2000]
    ids = model.tokenizer.encode("Once upon a time there was a little fox, who lived in the wood.")
    kept = BannedWords(words, model.vocabulary.sorted, 1)
    for length in (30, 5, 12, 12, 29, 1, 0, 18):
        for text in (ids[:length], [*ids[: length // 2], *ids[3:9]]):
            fresh = BannedWords(words, model.vocabulary.sorted, 1)
            assert kept.moves(as_ids(text)).tolist() == fresh.moves(as_ids(text)).tolist()
