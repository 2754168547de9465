"""Log probabilities that are computed when read: the same values, and a field like any other."""

import copy
import dataclasses
import json
import pickle

import numpy as np
import pytest
from helpers import GOLDEN, model, rng

import bitnet_ref
from bitnet_ref.backends.backend import HeadRows
from bitnet_ref.backends.cpu.extension import why_unavailable
from bitnet_ref.backends.run import TokenLogits
from bitnet_ref.errors import GenerationError
from bitnet_ref.generation.sampling import TOKENS_AT_A_TIME, Logprobs, log_probability

needs_kernels = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))


class Head:
    """A head that counts the tokens it computed."""

    def __init__(self):
        self.w, self.tokens = rng(1).standard_normal((50, 8)).astype(np.float32), []

    def __call__(self, x):
        self.tokens.append(len(x))
        return np.stack([self.w @ row for row in x])


def test_computed_together_when_first_read_and_once():
    head = Head()
    logprobs, hidden = Logprobs(), rng(2).standard_normal((TOKENS_AT_A_TIME + 3, 8)).astype(np.float32)
    few = HeadRows(np.array([1]), np.zeros(1, np.float32))
    tokens = [TokenLogits(few, 50, head, x) for x in hidden]
    later = [logprobs.add(i, logits, None)[0] for i, logits in enumerate(tokens[:-1])]
    assert head.tokens == []
    assert later[1]() == log_probability(head.w @ hidden[1], 1)
    assert head.tokens == [TOKENS_AT_A_TIME]
    later.append(logprobs.add(len(later), tokens[-1], None)[0])
    expected = [log_probability(head.w @ x, i) for i, x in enumerate(hidden)]
    assert [each() for each in later] == expected
    assert [each() for each in reversed(later)] == expected[::-1]
    assert head.tokens == [TOKENS_AT_A_TIME, 3]


def test_known_logits_are_used_at_once():
    head = Head()
    logits = rng(3).standard_normal(50).astype(np.float32)
    known = TokenLogits(HeadRows(np.arange(50), logits), 50, head, np.zeros(8, np.float32))
    assert Logprobs().add(7, known, logits)[0] == log_probability(logits, 7)
    assert head.tokens == []


@pytest.fixture(scope="module")
def pair():
    models = [bitnet_ref.load(backend="cython", threads=2, head=head) for head in ("exact", "screened")]
    return [m.generate("Alice", max_tokens=6) for m in models]


@needs_kernels
def test_a_lazy_generation_is_like_any_other(pair):
    eager, lazy = pair
    lazy = dataclasses.replace(lazy, stats=eager.stats)
    assert lazy == eager
    assert repr(lazy) == repr(eager)
    assert json.dumps(dataclasses.asdict(lazy)) == json.dumps(dataclasses.asdict(eager))
    with pytest.raises(dataclasses.FrozenInstanceError):
        lazy.logprobs = []


@needs_kernels
def test_copies_and_pickles_hold_the_values():
    def fresh():
        return bitnet_ref.load(backend="cython", head="screened").generate("Alice", max_tokens=3)

    expected = fresh().logprobs
    assert pickle.loads(pickle.dumps(fresh())).logprobs == expected
    assert copy.deepcopy(fresh()).logprobs == expected
    assert copy.copy(fresh()).logprobs == expected


@needs_kernels
def test_chunks_of_a_stream_know_theirs_at_any_time(pair):
    m = bitnet_ref.load(backend="cython", head="screened")
    during = [chunk.logprob for chunk in m.stream("Alice", max_tokens=6)]
    after = [chunk.logprob for chunk in list(m.stream("Alice", max_tokens=6))]
    assert during == after == pair[0].logprobs
    chunk = next(iter(m.stream("Alice", max_tokens=1)))
    assert pickle.loads(pickle.dumps(chunk)) == chunk
    assert "logprob=-" in repr(chunk)


PROMPT = list(range(5, 40))


def check_prompt_logprobs(model, out, prompt=PROMPT, top=2):
    logits = model.logits(prompt)
    assert out.prompt_logprobs[0] is None
    assert len(out.prompt_logprobs) == len(prompt)
    for row, token, scores in zip(logits, prompt[1:], out.prompt_logprobs[1:], strict=False):
        ids = [*np.argsort(-row, kind="stable")[:top].tolist(), token]
        assert scores == {each: log_probability(row, each) for each in ids}
        assert list(scores) == list(dict.fromkeys(ids))


def test_prompts_are_scored_in_every_backend_alone_and_beside_others(backend_name):
    tiny = model(GOLDEN / "bitnet-packed-offline", backend_name, threads=1)
    params = {"max_tokens": 4, "prompt_logprobs": 2}
    alone = tiny.generate([PROMPT, PROMPT[:1], PROMPT[3:9]], n=2, temperature=1.0, seed=1, **params)
    check_prompt_logprobs(tiny, alone[0][0])
    check_prompt_logprobs(tiny, alone[2][0], PROMPT[3:9])
    assert alone[1][0].prompt_logprobs == [None]
    assert alone[0][1].prompt_logprobs is None
    plain = tiny.generate(PROMPT, max_tokens=4)
    assert (plain.token_ids, plain.prompt_logprobs) == (tiny.generate(PROMPT, **params).token_ids, None)
    # 12 pages of 4 tokens: three requests with one prompt stop each other, and the last finds the pages of the others.
    with tiny.engine(max_batch=3, max_batch_tokens=7, page_size=4, cache_tokens=48) as engine:
        outs = engine.generate([PROMPT] * 4, **params)
        streams = engine.streams(PROMPT, n=2, temperature=1.0, seed=1, **params)
        assert [stream.result().token_ids for stream in streams] == [out.token_ids for out in alone[0]]
        assert streams[0].prompt_logprobs == outs[0].prompt_logprobs
    assert [out.token_ids for out in outs] == [plain.token_ids] * 4
    for out in outs:
        check_prompt_logprobs(tiny, out)


@needs_kernels
def test_prompts_are_scored_under_a_screened_head():
    story = bitnet_ref.load(backend="cython", threads=1, head="screened")
    out = story.generate("Once upon a time there was", max_tokens=2, prompt_logprobs=3)
    check_prompt_logprobs(story, out, out.prompt_token_ids, 3)


@pytest.mark.parametrize("params", [{"overflow": "sliding"}, {"overflow": "truncate"}, {"num_beams": 2}])
def test_prompts_cannot_be_scored_everywhere(params):
    with pytest.raises(GenerationError, match="prompt_logprobs"):
        bitnet_ref.load().generate("Alice", prompt_logprobs=1, **params)
    with pytest.raises(GenerationError, match="prompt_logprobs: a stream"):
        bitnet_ref.load().stream("Alice", prompt_logprobs=1)
