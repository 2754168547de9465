"""Several engines behind one face, and beams beside other requests."""

import asyncio
import time

import pytest
from cli_runs import BACKEND
from engine_checks import PROMPTS, check, gist, until
from helpers import DATA, GOLDEN, chat_folder, model
from server_runs import RunningServer

import bitnet_ref
from bitnet_ref.backends import cuda
from bitnet_ref.errors import ConfigError, EngineClosed, GenerationError
from bitnet_ref.formats.open import ASSETS
from bitnet_ref.serving import EngineConfig, Replicas, start_engines

PARAMS = [{}, {"temperature": 0.9, "seed": 3, "n": 2}, {"num_beams": 3}, {"num_beams": 3, "n": 2, "logprobs": 2}]


@pytest.fixture(scope="module")
def story():
    return model(ASSETS / "storyteller", BACKEND, threads=1)


def gists(outs):
    return [gist(out) for out in (outs if isinstance(outs, list) else [outs])]


@pytest.mark.sample(2)
@pytest.mark.parametrize("replicas", [1, 3])
def test_requests_and_beams_give_what_each_gives_alone(story, replicas):
    with story.engine(max_batch=3, max_batch_tokens=10, page_size=4, replicas=replicas) as engine:
        streams = [engine.submit(prompt, max_tokens=12) for prompt in PROMPTS]
        for params in PARAMS:
            outs = engine.generate(PROMPTS[:2], max_tokens=7, **params)
            alone = story.generate(PROMPTS[:2], max_tokens=7, **params)
            assert [gists(out) for out in outs] == [gists(out) for out in alone], params
        for handle, prompt in zip(streams, PROMPTS, strict=True):
            assert gist(handle.result()) == gist(story.generate(prompt, max_tokens=12))
        rules = {"num_beams": 2, "repetition_penalty": 1.4, "bad_words": ["was"], "length_penalty": 0.5}
        (one,) = asyncio.run(engine.agenerate([PROMPTS[0]], max_tokens=9, **rules))
        assert gist(one) == gist(story.generate(PROMPTS[0], max_tokens=9, **rules))
        used = [each.metrics.snapshot()["engine_steps"] for each in engine.engines]
        assert len(used) == replicas
        assert all(used)
        ends = [story.end_s for story in engine.stories]
        assert ends == sorted(ends)
        assert len(ends) == len(PROMPTS) + 2 * len(PARAMS) + 1
    for each in engine.engines:
        check(each)
        assert each.model is story  # one set of weights


def test_beams_compute_the_prompt_once(story):
    prompt = "Once upon a time there was a little girl who lived in a wood"
    with story.engine(max_batch=4, page_size=1) as engine:
        engine.generate(prompt, num_beams=3, max_tokens=6)
        computed = sum(part.tokens for step in engine.timeline for part in step.parts)
    assert computed <= len(story.tokenizer.encode(prompt)) + 3 * 6 * 2


def test_beams_with_few_pages_and_beams_that_are_abandoned(story):
    with story.engine(max_batch=3, page_size=4, cache_tokens=80) as engine:
        others = [engine.submit(prompt, max_tokens=30) for prompt in PROMPTS]
        out = engine.generate("Alice", num_beams=3, max_tokens=12)
        assert gist(out) == gist(story.generate("Alice", num_beams=3, max_tokens=12))
        for handle, prompt in zip(others, PROMPTS, strict=True):
            assert gist(handle.result()) == gist(story.generate(prompt, max_tokens=30))

        async def leave():
            search = asyncio.create_task(engine.agenerate(["Alice", "She"], num_beams=3, max_tokens=70))
            while not engine.requests:
                await asyncio.sleep(0)
            search.cancel()
            await search

        with pytest.raises(asyncio.CancelledError):
            asyncio.run(leave())
        until(lambda: not engine.requests)
    check(engine)


@pytest.mark.sample(3)
@pytest.mark.parametrize("cache_tokens", [40, 100, 400])
def test_searches_that_take_pages_and_places_from_each_other(story, cache_tokens):
    """Beams wait for those beside them, in turns, without a place and as long as they may with their pages."""
    rules = [{"num_beams": 3, "n": 2}, {"num_beams": 2, "repetition_penalty": 1.3}, {"num_beams": 3, "logprobs": 1}]
    with story.engine(max_batch=3, max_batch_tokens=6, page_size=3, cache_tokens=cache_tokens) as engine:
        searches = [
            engine.submit(prompt, max_tokens=12, priority=number % 2, **each)
            for number, (prompt, each) in enumerate(zip(PROMPTS, rules, strict=False))
        ]
        other = engine.submit(PROMPTS[3], max_tokens=20)
        for search, prompt, each in zip(searches, PROMPTS, rules, strict=False):
            assert gists(search.result(30)) == gists(story.generate(prompt, max_tokens=12, **each))
        assert gist(other.result(30)) == gist(story.generate(PROMPTS[3], max_tokens=20))
        stops = engine._worker._scheduler.stops
    assert (stops > 0) == (cache_tokens == 40)
    check(engine)


@pytest.mark.thorough
def test_searches_on_a_model_whose_states_no_beam_can_share():
    hybrid, prompts = model(DATA / "families" / "qwen3_5-groups128-hybrid", BACKEND), [[5, 9, 7, 11, 3], [8, 2, 6]]
    options = {"num_beams": 3, "n": 2, "max_tokens": 8, "ignore_eos": True}
    with hybrid.engine(max_batch=3, page_size=2) as engine:
        other = engine.submit([4, 4, 4], max_tokens=10)
        outs = engine.generate(prompts, **options)
        assert gist(other.result()) == gist(hybrid.generate([4, 4, 4], max_tokens=10))
    assert [gists(out) for out in outs] == [gists(out) for out in hybrid.generate(prompts, **options)]
    check(engine)


def test_streams_of_one_text_encode_it_once(story, monkeypatch):
    seen, encode = [], story.tokenizer.encode
    monkeypatch.setattr(story.tokenizer, "encode", lambda text: seen.append(text) or encode(text))
    with story.engine(max_batch=4) as engine:
        texts = [handle.result() for handle in engine.streams("Alice", n=3, temperature=1.0, seed=1, max_tokens=4)]
    assert [gist(text) for text in texts] == [
        gist(text) for text in story.generate("Alice", n=3, temperature=1.0, seed=1, max_tokens=4)
    ]
    assert seen == ["Alice", "Alice"]


def test_beams_obey_the_engines_limits(story):
    with story.engine(max_batch=2, max_queue=4) as engine:
        for params, message in (
            ({"num_beams": 3}, "num_beams: expected at most 2"),
            ({"num_beams": 2, "temperature": 1.0}, "beam search compares"),
            ({"num_beams": 2, "max_tokens": 1000}, "context is 256"),
            ({"num_beams": 2, "timeout_s": 0}, "timeout_s: expected"),
            ({"num_beams": 2, "timeout_s": "1"}, "timeout_s: expected"),
        ):
            with pytest.raises(GenerationError, match=message):
                engine.generate("Alice", **params)
        with pytest.raises(GenerationError, match=r"num_beams: a stream is one .* use result\(\)"):
            next(engine.submit("Alice", num_beams=2))
        with pytest.raises(GenerationError, match=r"num_beams: a stream is one .* use submit"):
            engine.streams("Alice", num_beams=2)
        with pytest.raises(GenerationError, match="was not finished within"):
            engine.generate("Alice", num_beams=2, max_tokens=200, timeout_s=0.001)
        until(lambda: not engine.requests)
    check(engine)


def test_the_least_busy_engine_takes_the_next_request(story):
    def sleepy(ids, logits, generator):
        time.sleep(0.02)
        return 5

    with story.engine(replicas=2, max_batch=4) as engine:
        first, second = engine.engines
        slow = [engine.submit("Alice", strategy=sleepy, max_tokens=200) for _ in range(3)]
        assert [len(each.requests) for each in engine.engines] == [2, 1]
        assert [request.request_id for request in engine.requests] == [0, 1, 2]
        texts = engine.streams("Alice", n=2, temperature=1.0, max_tokens=200, strategy=sleepy)
        assert [len(each.requests) for each in engine.engines] == [2, 3]  # those of one prompt stay together
        for handle in (*slow, *texts):
            handle.close()
        until(lambda: not engine.requests)
        first.close()
        assert not engine.closed
        assert engine.generate("Alice", max_tokens=2).token_ids  # the other goes on
        assert "closed" not in repr(engine)
        second.close()
        assert engine.closed
        with pytest.raises(EngineClosed):
            engine.generate("Alice", max_tokens=2)


def test_replicas_by_their_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    tiny, config = GOLDEN / "bitnet-packed-offline", EngineConfig(replicas=2, backend=BACKEND, cache_tokens=64)
    with bitnet_ref.load_engine(tiny, config) as engine:
        assert isinstance(engine, Replicas)
        assert engine.model.backend.threads == 2
        assert engine.generate([5, 6], max_tokens=3).token_ids
    with bitnet_ref.load_engine(tiny, config, threads=1) as engine:
        assert engine.model.backend.threads == 1
    with pytest.raises(ConfigError, match="replicas"):
        EngineConfig(replicas=0)
    chat = bitnet_ref.load(chat_folder(tmp_path), backend=BACKEND, threads=1)
    with start_engines(chat, EngineConfig(replicas=2)) as engine:
        messages = [{"role": "user", "content": "Hi"}]
        whole = "".join(chunk.text for chunk in engine.chat(messages, max_tokens=5))
        other = engine.chat(messages, max_tokens=5, chat_template="{{ messages[0].content }}")
        assert whole
        assert other.result().prompt_token_ids != engine.chat(messages, max_tokens=5).result().prompt_token_ids


@pytest.mark.thorough
@pytest.mark.skipif(not cuda.emulation_wanted(), reason="needs two cards, which the emulation has")
def test_each_replica_has_cards_of_its_own():
    tiny = GOLDEN / "bitnet-packed-offline"
    config = {"replicas": 2, "backend": "cupy", "cache_tokens": 64}
    with bitnet_ref.load_engine(tiny, EngineConfig(devices=(0, 1), **config)) as engine:
        handles = [engine.submit([5, 6, 7 + number], max_tokens=4) for number in range(4)]
        assert [each.model.backend.summary for each in engine.engines] == ["cupy on card 0", "cupy on card 1"]
        for number, handle in enumerate(handles):
            assert handle.result().token_ids == model(tiny).generate([5, 6, 7 + number], max_tokens=4).token_ids
        assert all(each.metrics.snapshot()["engine_steps"] for each in engine.engines)
    with pytest.raises(ConfigError, match="replicas: expected at least 2 devices"):
        bitnet_ref.load_engine(tiny, EngineConfig(devices=(0,), **config))


def test_a_server_counts_its_replicas_apart():
    with RunningServer({"storyteller": ASSETS / "storyteller"}, settings={"replicas": 2}) as server:
        for _ in range(3):
            assert server.post("/v1/completions", {"prompt": "Alice", "max_tokens": 2, "n": 2})[0] == 200
        _, _, page = server.get("/metrics")
        for number in (0, 1):
            assert f'bitnet_ref:num_requests_running{{engine="{number}",model_name="storyteller"}} 0.0' in page
        place = server.shelf.places["storyteller"]
        assert place.nbytes > 2 * place.engine.cache.nbytes
    assert all(engine.closed for engine in place.engine.engines)
