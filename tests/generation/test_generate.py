"""The generation loop: batch, cache, chunks and cancellation give what one row alone gives, token for token."""

import gc
import html
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

import numpy as np
import pytest
from helpers import GOLDEN, model

from bitnet_ref.backends import cuda
from bitnet_ref.errors import GenerationError, TokenizerError
from bitnet_ref.reference.weights import TernaryWeight

sequence_module = import_module("bitnet_ref.generation.sequence")
PROMPTS = ["Once upon a time", "Alice", "The old man of the sea", "It was a dark and stormy night, and the wind"]


@pytest.fixture
def story(backend_name):
    return model("storyteller", backend_name)


def test_greedy_decoding_equals_recomputing_every_prefix(story):
    out = story.generate("The rabbit ran", max_tokens=12)
    ids = list(out.prompt_token_ids)
    for token, logprob in zip(out.token_ids, out.logprobs, strict=True):
        logits = story.logits(ids)[-1].astype(np.float64)
        assert int(np.argmax(logits)) == token
        assert logprob == pytest.approx(logits[token] - np.log(np.exp(logits - logits.max()).sum()) - logits.max())
        ids.append(token)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.9, "top_k": 50, "seed": 3}, {"temperature": 1.2, "top_p": 0.8, "seed": 5}]
)
def test_a_batch_gives_what_each_row_gives_alone(story, params):
    batch = story.generate(PROMPTS, max_tokens=10, **params)
    for prompt, row in zip(PROMPTS, batch, strict=True):
        alone = story.generate(prompt, max_tokens=10, **params)
        assert (row.token_ids, row.text, row.logprobs) == (alone.token_ids, alone.text, alone.logprobs)


def test_prefill_in_chunks_changes_nothing(story, monkeypatch):
    whole = story.generate(PROMPTS, max_tokens=4)
    monkeypatch.setattr(type(story.backend), "prompt_tokens", lambda self, config: 3)
    chunked = story.generate(PROMPTS, max_tokens=4)
    assert [(row.token_ids, row.logprobs) for row in chunked] == [(row.token_ids, row.logprobs) for row in whole]


def test_stream_is_generate_in_pieces(story):
    out = story.generate("Alice", max_tokens=16)
    stream = story.stream("Alice", max_tokens=16)
    chunks = list(stream)
    assert [chunk.token_id for chunk in chunks] == out.token_ids
    assert "".join(chunk.text for chunk in chunks) == out.text
    assert [chunk.finish_reason for chunk in chunks] == [None] * 15 + ["length"]
    assert stream.stats.generated_tokens == 16
    assert stream.stats.prompt_tokens == len(out.prompt_token_ids)


def test_closing_a_stream_cancels_and_frees_the_cache(story, caches):
    stream = story.stream("Alice", max_tokens=50)
    next(stream)
    stream.close()
    assert list(stream) == []
    gc.collect()
    assert len(caches) == 1
    assert caches[0]() is None


def test_seeds_repeat_and_differ(story):
    def text(seed):
        return story.generate("The king", max_tokens=12, temperature=1.0, seed=seed).token_ids

    assert text(1) == text(1)
    assert len({tuple(text(seed)) for seed in range(4)}) > 1


def test_a_stop_string_ends_the_text_before_it(story):
    full = story.generate("Once upon a time", max_tokens=40)
    stop = full.text[20:26]
    out = story.generate("Once upon a time", max_tokens=40, stop=[stop, "never there"])
    assert out.text == full.text[: full.text.index(stop)]
    assert (out.finish_reason, out.stop_reason) == ("stop", stop)
    assert out.token_ids == full.token_ids[: len(out.token_ids)]
    assert "".join(c.text for c in story.stream("Once upon a time", max_tokens=40, stop=stop)) == out.text


def test_a_stop_token_ends_the_text_and_is_reported(story):
    full = story.generate("Once upon a time", max_tokens=12)
    token = full.token_ids[5]
    out = story.generate("Once upon a time", max_tokens=12, stop_token_ids=[token])
    assert out.token_ids == full.token_ids[: full.token_ids.index(token) + 1]
    assert (out.finish_reason, out.stop_reason) == ("stop", token)


def test_the_models_end_token_stops_unless_ignored(story, monkeypatch):
    full = story.generate("Once upon a time", max_tokens=12)
    end = full.token_ids[3]
    monkeypatch.setattr(sequence_module, "end_tokens", lambda model: frozenset([end]))
    assert (
        story.generate("Once upon a time", max_tokens=12).token_ids == full.token_ids[: full.token_ids.index(end) + 1]
    )
    assert story.generate("Once upon a time", max_tokens=12, ignore_eos=True).token_ids == full.token_ids


def test_token_ids_are_a_prompt_too(story):
    out = story.generate("Alice", max_tokens=5)
    for ids in (out.prompt_token_ids, tuple(out.prompt_token_ids), np.array(out.prompt_token_ids)):
        assert story.generate(ids, max_tokens=5).token_ids == out.token_ids
    pair = story.generate([out.prompt_token_ids, out.prompt_token_ids], max_tokens=5)
    assert [row.token_ids for row in pair] == [out.token_ids] * 2


def test_a_model_without_a_tokenizer_takes_ids_and_gives_ids():
    bare = model(GOLDEN / "bitnet-packed-offline")
    out = bare.generate([1, 5, 9], max_tokens=4)
    assert len(out.token_ids) == 4
    assert out.text == ""
    with pytest.raises(TokenizerError):
        bare.generate("text")
    with pytest.raises(TokenizerError):
        bare.generate([1, 5], stop="x")


@pytest.mark.parametrize("prompt", [[], [[]], None, 5, {"a": 1}, [4096], [-1], [1.5], [[1], []]])
def test_bad_prompts_are_refused(prompt):
    with pytest.raises((GenerationError, TokenizerError)):
        model("storyteller").generate(prompt)


def test_stream_takes_one_prompt():
    with pytest.raises(GenerationError, match="one prompt"):
        model("storyteller").stream(["a", "b"])


def test_context_overflow_says_how_many_tokens_fit():
    story = model("storyteller")
    with pytest.raises(GenerationError, match=r"lower max_tokens to 251"):
        story.generate([1, 2, 3, 4, 5], max_tokens=252)
    with pytest.raises(GenerationError, match="context"):
        story.generate([5] * 256)
    assert len(story.generate([5] * 250, ignore_eos=True).token_ids) == 6  # the default takes what is left


def test_bad_arguments_of_stream_raise_at_once():
    with pytest.raises(GenerationError, match="top_p"):
        model("storyteller").stream("Alice", top_p=2)


@pytest.mark.sample(2)
def test_several_python_threads_may_use_one_model(story):
    alone = [story.generate(prompt, max_tokens=12) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = list(pool.map(lambda prompt: story.generate(prompt, max_tokens=12), PROMPTS))
    assert [(row.token_ids, row.logprobs) for row in together] == [(row.token_ids, row.logprobs) for row in alone]


@pytest.mark.sample(3)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # Python 3.12 and later: that is the point
def test_a_forked_child_can_compute(be):
    """OpenMP's threads are gone in a forked child; waiting for them would hang it."""
    if be.name == "cupy" and not cuda.emulation_wanted():
        pytest.skip("CUDA does not survive a fork")
    weight = be.prepare(TernaryWeight.from_ternary(np.ones((2560, 2560), np.int8), 1.0))
    x = np.ones((8, 2560), np.float32)
    expected = be.linear(x, weight)  # starts the threads
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if np.array_equal(be.linear(x, weight), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_reprs_fit_a_cell():
    m = model("storyteller", "auto")
    out = m.generate("Once upon a time", max_tokens=200, logprobs=20, ignore_eos=True)
    assert repr(out).startswith("<Generation '")
    assert "200 tokens, finish_reason 'length'" in repr(out)
    assert len(repr(out)) < 150
    assert len(repr(m.generate(["Alice", "Peter"], max_tokens=30))) < 400
    assert len(out._repr_html_()) < 3000
    assert html.escape(out.text[:40]) in out._repr_html_()
    assert len(repr(out.stats)) < 150
    chunk = next(m.stream("Alice", logprobs=20))
    assert len(repr(chunk)) < 150
    assert f"token_id={chunk.token_id}, logprob=-" in repr(chunk)
