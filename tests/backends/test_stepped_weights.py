"""Weights whose second layouts are made step by step, while the model writes."""

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest
from helpers import model

from bitnet_ref.backends.cpu.backend import CythonBackend
from bitnet_ref.backends.cpu.extension import why_unavailable
from bitnet_ref.backends.cpu.weights import ScreenedHead, strip_bytes
from bitnet_ref.backends.loaded import SteppedWeights
from bitnet_ref.errors import BackendError

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
PROMPT = [1, 3797, 537]


@pytest.fixture
def story():
    return model("storyteller", "numpy")


def stepped(story):
    """It, on a backend that makes a screen and strips in steps."""
    return story.on(CythonBackend(threads=2, head="screened", strips="always"), in_steps=True)


def test_a_text_begins_before_screen_and_strips_are_made_and_ends_with_them(story):
    subject, seen = stepped(story), []
    subject.watcher = lambda be, *_: nullcontext(be)  # so that each token is a pass by itself
    of_pass = subject._stepped.of_pass
    subject._stepped.of_pass = lambda: (seen.append(of_pass()), seen[-1])[1]
    out = subject.generate(PROMPT, max_tokens=20, temperature=0.0, ignore_eos=True)
    expected = story.generate(PROMPT, max_tokens=20, temperature=0.0, ignore_eos=True)
    assert out.token_ids == expected.token_ids
    assert type(seen[0].lm_head) is not ScreenedHead
    assert seen[0] is seen[1]  # its step screened some rows
    assert len({id(w) for w in seen}) == 3
    assert type(seen[-1].lm_head) is ScreenedHead
    assert strip_bytes(seen[0]) == 0 < strip_bytes(seen[-1])
    assert seen[-1] is subject.weights


def test_a_pass_without_the_head_makes_no_screen(story):
    subject = stepped(story)
    vectors = [subject.embed(PROMPT) for _ in range(4)]
    assert type(subject._stepped.current.lm_head) is not ScreenedHead
    assert all(np.array_equal(each, vectors[0]) for each in vectors)
    np.testing.assert_allclose(vectors[0], story.embed(PROMPT), atol=1e-5)


def test_who_asks_for_the_weights_gets_all_of_them(story):
    subject = stepped(story)
    assert subject.head == "screened"
    whole = subject.backend.prepare_model(stepped(story)._stepped.current, story.config)
    head, expected = subject.weights.lm_head, whole.lm_head
    np.testing.assert_array_equal(head.rows_q, expected.rows_q)
    np.testing.assert_array_equal(head.facts, expected.facts)
    assert subject.weights.embedding is head
    for mine, theirs in zip(subject.weights.layers, whole.layers, strict=True):
        np.testing.assert_array_equal(mine.down_proj.strips, theirs.down_proj.strips)
        np.testing.assert_array_equal(mine.up_proj.strips, theirs.up_proj.strips)


def test_several_threads_take_each_step_once(story):
    subject = stepped(story)
    expected = story.logits(PROMPT)
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda _: subject.logits(PROMPT), range(24)))
    for _ in range(24):  # a pass takes no step while another thread takes one
        subject.logits(PROMPT)
    assert all(np.array_equal(each, results[0]) for each in results)
    np.testing.assert_allclose(results[0], expected, atol=1e-4)
    assert subject._stepped.current is subject.weights


def test_a_model_without_memory_for_second_copies_goes_on_without(story, caplog):
    def steps():
        yield story.weights
        raise MemoryError

    weights = SteppedWeights(steps(), min_stepped_bytes=0)
    assert [weights.of_pass() for _ in range(3)] == [story.weights] * 3
    assert weights.finished() is story.weights
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_small_weights_are_made_at_once(story):
    assert SteppedWeights(iter([story.weights, "all"])).of_pass() == "all"


def test_a_closed_model_has_no_weights(story):
    subject = stepped(story)
    subject.logits(PROMPT)
    subject.close()
    with pytest.raises(BackendError, match="closed"):
        subject.logits(PROMPT)
    assert "closed" in repr(subject)
