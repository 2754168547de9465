"""The engine: what its users do with it, one behaviour at a time. test_engine_load.py has many at once."""

import asyncio
import threading
import time

import numpy as np
import pytest
from cli_runs import BACKEND
from engine_checks import PROMPTS, FreeGuesses, check, gist, until
from helpers import GOLDEN, chat_folder, model

from bitnet_ref.errors import NumericsError, RequestCancelled
from bitnet_ref.generation.drafts import LookupDrafts, StepTimes
from bitnet_ref.generation.processors import LogitsRule

# -- the same as alone -------------------------------------------------------------------------------------------------

PARAMS = [
    {},
    {"temperature": 0.9, "top_k": 50, "seed": 3, "logprobs": 2},
    {"temperature": 1.2, "seed": 5},  # needs all logits
    {"repetition_penalty": 1.3, "stop": ["the"], "echo": True},
]


def test_mixed_requests_give_what_each_gives_alone(story):
    mixed = [(prompt, params) for prompt in PROMPTS for params in PARAMS]
    with story.engine(max_batch=3, max_batch_tokens=10, page_size=4) as engine:
        handles = [engine.submit(prompt, max_tokens=9, **params) for prompt, params in mixed]
        for handle, (prompt, params) in zip(handles, mixed, strict=True):
            assert gist(handle.result()) == gist(story.generate(prompt, max_tokens=9, **params))
        assert engine.metrics.snapshot()["prefix_cache_hits"] > 0
    check(engine)


def test_every_backend_gives_in_the_engine_what_it_gives_alone(backend_name):
    tiny = model(GOLDEN / "bitnet-packed-offline", backend_name, threads=1)
    mixed = [([5, 6, 7, 8, number], {**params, "max_tokens": 5}) for number in (9, 10) for params in PARAMS[:3]]
    with tiny.engine(max_batch=3, max_batch_tokens=6, page_size=2, cache_tokens=24) as engine:
        handles = [engine.submit(prompt, **params) for prompt, params in mixed]
        for handle, (prompt, params) in zip(handles, mixed, strict=True):
            assert gist(handle.result()) == gist(tiny.generate(prompt, **params))
        outs = engine.generate([5, 6, 7], n=3, temperature=1.0, seed=1, max_tokens=5)
    expected = tiny.generate([5, 6, 7], n=3, temperature=1.0, seed=1, max_tokens=5)
    assert [gist(out) for out in outs] == [gist(out) for out in expected]
    check(engine)


def test_generate_is_models_generate(engine):
    alone = engine.model.generate(PROMPTS * 2, max_tokens=6)
    assert [gist(out) for out in engine.generate(PROMPTS * 2, max_tokens=6)] == [gist(out) for out in alone]
    assert gist(engine.generate("Alice", max_tokens=6)) == gist(engine.model.generate("Alice", max_tokens=6))


def test_several_texts_of_one_prompt_share_its_pages(story):
    params = {"n": 3, "temperature": 1.0, "seed": 1, "max_tokens": 8}
    prompt = "Once upon a time there was"
    with story.engine(max_batch=4, page_size=4) as engine:
        outs = engine.generate([prompt, "Alice"], **params)
        computed = sum(part.tokens for step in engine.timeline for part in step.parts)
    expected = story.generate([prompt, "Alice"], **params)
    assert [[gist(out) for out in group] for group in outs] == [[gist(out) for out in group] for group in expected]
    lengths = [len(group[0].prompt_token_ids) for group in expected]
    assert computed == sum(lengths) + 2 * 2 + 6 * 7  # each prompt once, and its last token for the two other texts
    check(engine)


def test_n_texts_on_fewer_pages_than_they_need(story):
    params = {"n": 4, "temperature": 1.0, "seed": 2, "max_tokens": 12}
    with story.engine(max_batch=4, page_size=4, cache_tokens=24, max_batch_tokens=8) as engine:
        outs = engine.generate("The king and the queen", **params)
        assert engine.metrics.snapshot()["num_preemptions"] == engine._worker._scheduler.stops > 0
    assert [gist(out) for out in outs] == [gist(out) for out in story.generate("The king and the queen", **params)]
    check(engine)


def test_a_stream_is_generate_in_pieces(engine):
    out = engine.model.generate("Alice", max_tokens=12)
    with engine.stream("Alice", max_tokens=12) as stream:
        chunks = list(stream)
        assert list(stream) == []
    assert [chunk.token_id for chunk in chunks] == out.token_ids
    assert "".join(chunk.text for chunk in chunks) == out.text
    assert [chunk.finish_reason for chunk in chunks] == [None] * 11 + ["length"]
    assert [chunk.logprob for chunk in chunks] == out.logprobs
    assert gist(stream.result()) == gist(out)
    assert (stream.stats.generated_tokens, stream.stats.decode_tokens) == (12, 11)
    assert stream.stats.prompt_tokens == len(out.prompt_token_ids)


@pytest.mark.parametrize(
    "params",
    [
        {"overflow": "sliding", "window": 9},
        {"overflow": "sinks", "window": 11, "sink_tokens": 3},
        {"overflow": "truncate", "window": 12, "max_tokens": 7, "n": 2, "temperature": 1.0, "seed": 5},
    ],
)
def test_texts_that_outgrow_their_window(engine, params):
    params = {"max_tokens": 30, "ignore_eos": True, **params}
    whole, expected = (each.generate("The old man of the sea", **params) for each in (engine, engine.model))
    outs, others = ([each] if not isinstance(each, list) else each for each in (whole, expected))
    assert [(*gist(out), out.overflows) for out in outs] == [(*gist(out), out.overflows) for out in others]
    assert outs[0].stats.dropped_tokens == others[0].stats.dropped_tokens > 0
    assert all(out.overflows for out in outs)  # where and what was dropped


def test_a_model_without_a_tokenizer():
    bare = model(GOLDEN / "bitnet-packed-offline")
    with bare.engine(page_size=2) as engine:
        for ids in ([1, 5, 9], np.array([1, 5, 9])):
            assert engine.generate(ids, max_tokens=4).token_ids == bare.generate([1, 5, 9], max_tokens=4).token_ids


# -- asyncio and threads -----------------------------------------------------------------------------------------------


def test_asyncio_streams_many_at_once(story):
    async def read(engine, prompt):
        return "".join([chunk.text async for chunk in engine.stream(prompt, max_tokens=8)])

    async def main():
        async with story.engine(max_batch=4) as engine:
            texts = await asyncio.gather(*[read(engine, prompt) for prompt in PROMPTS])
            outs = await engine.agenerate(PROMPTS, max_tokens=8)
            ones = await engine.submit("Alice", max_tokens=8).aresult(), await engine.agenerate("Alice", max_tokens=8)
        return texts, [out.text for out in outs], [out.text for out in ones], engine

    texts, outs, ones, engine = asyncio.run(main())
    expected = [out.text for out in story.generate(PROMPTS, max_tokens=8)]
    assert texts == outs == expected
    assert ones == [expected[1]] * 2
    check(engine)


async def chunks_of(stream):
    return [chunk.token_id async for chunk in stream]


async def result_of(stream):
    return (await stream.aresult()).token_ids


@pytest.mark.parametrize("read", [chunks_of, result_of])
def test_a_paused_stream_goes_on_when_asyncio_reads_it(story, read):
    with story.engine(max_unread=2) as engine:
        stream = engine.stream("Alice", max_tokens=12)
        until(lambda: stream._ticket.held)
        assert asyncio.run(asyncio.wait_for(read(stream), 20)) == story.generate("Alice", max_tokens=12).token_ids
    check(engine)


def test_a_cancelled_task_cancels_its_request(engine):
    async def main():
        stream = engine.stream("Alice", max_tokens=200)
        await anext(stream)

        async def rest():
            async for _ in stream:
                pass

        tasks = [asyncio.create_task(rest()), asyncio.create_task(engine.agenerate(PROMPTS, max_tokens=200))]
        await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(end) for end in asyncio.run(main())] == [asyncio.CancelledError] * 2
    until(lambda: engine._worker.pool.in_use == 0)
    assert engine.metrics.finished["abort"] == 5


def test_a_closed_event_loop_does_no_harm(engine):
    async def main():
        stream = engine.stream("Alice", max_tokens=200)
        await anext(stream)
        return stream

    left = asyncio.run(main())
    assert engine.generate("Alice", max_tokens=5).text
    assert len(list(left)) == 199  # and another thread may read the rest


def test_threads_share_one_engine(engine):
    expected = {prompt: engine.model.generate(prompt, max_tokens=10).text for prompt in PROMPTS}
    wrong, threads = [], []

    def read(prompt):
        text = "".join(chunk.text for chunk in engine.stream(prompt, max_tokens=10))
        if text != expected[prompt]:
            wrong.append(text)

    for _ in range(4):
        threads += [threading.Thread(target=read, args=(prompt,)) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_two_threads_read_one_stream(engine):
    """Each chunk goes to one of them, and both see the end, be it an error."""
    handle, cancelled = engine.submit("Alice", max_tokens=6), engine.submit("Alice", max_tokens=200)
    cancelled.cancel()
    errors = []

    def read(stream):
        try:
            list(stream)
        except RequestCancelled as error:
            errors.append(error)

    streams = [handle, handle, cancelled, cancelled]
    threads = [threading.Thread(target=read, args=(each,), daemon=True) for each in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert len(errors) == 2


def test_chats_beside_other_requests(tmp_path):
    talker = model(chat_folder(tmp_path), BACKEND, threads=1)
    session, history = talker.chat(max_tokens=6), []
    with talker.engine(max_batch=4, page_size=4) as engine:
        other = engine.submit("Alice", max_tokens=20)
        for text in ("Hello, who are you?", "And what do you want?"):
            history.append({"role": "user", "content": text})
            reply = engine.chat(history, max_tokens=6)
            content = "".join(chunk.text for chunk in reply)
            assert content == session.send(text).text
            history.append({"role": "assistant", "content": content})
        assert reply.stats.cached_tokens > 0  # of the turn before
        template = "{% for t in tools %}{{ t.name }} {% endfor %}{{ messages[0].content }}"
        short = engine.chat(history, tools=[{"name": "clock"}], chat_template=template, max_tokens=3).result()
        prompt = talker.tokenizer.encode("clock Hello, who are you?", add_special_tokens=False)
        assert short.prompt_token_ids == prompt
        assert gist(other.result()) == gist(talker.generate("Alice", max_tokens=20))


def test_a_reply_that_names_no_length_fits(tmp_path):
    """Into the cache, where that holds less than the context; and of a prompt that has to be cut some room is left."""
    talker, free = model(chat_folder(tmp_path), BACKEND, threads=1), {"ignore_eos": True}
    hello, long = ([{"role": "user", "content": text}] for text in ("Hello", "Hello there. " * 100))
    with talker.engine(max_batch=2, page_size=4, cache_tokens=40) as engine:
        reply = engine.chat(hello, **free).result()
        assert (len(reply.prompt_token_ids) + len(reply.token_ids), reply.finish_reason) == (40, "length")
    with talker.engine(max_batch=2) as engine:
        assert len(engine.chat(long, overflow="truncate", **free).result().token_ids) == talker.context_length // 4


def test_requests_and_steps_are_logged(story, caplog):
    caplog.set_level("DEBUG", "bitnet_ref.serving")
    with story.engine() as engine:
        engine.generate("Alice", max_tokens=2)
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in lines] == ["DEBUG", "INFO", "DEBUG"]
    assert lines[0][1].endswith("requests and tokens [(0, 2)]; 0 wait")
    assert "request 0 ended (length) after" in lines[1][1]
    assert "2 prompt tokens, 0 of them cached, 2 new" in lines[1][1]


# -- drafts ------------------------------------------------------------------------------------------------------------

COPY = "The cat sat on the mat. The dog sat on the log. The cat sat on the mat. The dog sat"


def test_drafts_save_steps_and_are_counted(story):
    params = {"max_tokens": 40, "frequency_penalty": -1.0}
    with story.engine(page_size=4) as engine:
        engine._worker._scheduler.times = FreeGuesses()
        out = engine.generate(COPY, speculate="lookup", **params)
        stats, now, shown = out.stats, engine.metrics.snapshot(), engine.stories[0]
        assert now["engine_steps"] == 40 - stats.accepted_tokens < 40
        assert [part.kind for step in engine.timeline for part in step.parts] == ["prefill", *["decode"] * 39][
            : now["engine_steps"]
        ]
        verified = sum(part.tokens for step in engine.timeline for part in step.parts) - len(out.prompt_token_ids)
        assert verified == now["engine_steps"] - 1 + stats.drafted_tokens
        counts = (stats.drafted_tokens, stats.accepted_tokens)
        assert (shown.drafted_tokens, shown.accepted_tokens) == counts
        assert tuple(now[f"spec_decode_num_{each}_tokens"] for each in ("draft", "accepted")) == counts
        assert (now["generation_tokens"], stats.decode_tokens) == (40, 39)
        again = engine.generate([COPY, out.prompt_token_ids + out.token_ids[:30]], max_tokens=3)
        assert again[1].stats.cached_tokens >= len(out.prompt_token_ids) + 24  # accepted tokens are in the index too
    assert gist(out) == gist(story.generate(COPY, **params))
    check(engine)


def test_drafts_learn_from_the_time_of_a_step(story, monkeypatch):
    learned = []
    monkeypatch.setattr(StepTimes, "learn", lambda self, rows, drafted, seconds: learned.append(seconds) or 0.0)
    begin = time.perf_counter()
    with story.engine() as engine:
        engine.generate("Once upon a time there was", max_tokens=20, speculate="lookup", ignore_eos=True)
    assert learned
    assert 0 < sum(learned) < time.perf_counter() - begin


def test_drafts_leave_a_reader_no_more_than_max_unread(story):
    params = {"max_tokens": 40, "frequency_penalty": -1.0}
    with story.engine(max_unread=3) as engine:
        stream = engine.stream(COPY, speculate="lookup", **params)
        until(lambda: stream._ticket.held)
        assert stream._ticket.outbox.chunks.qsize() == 3
        assert [chunk.token_id for chunk in stream] == story.generate(COPY, **params).token_ids
    check(engine)


def test_a_guess_that_fails_is_no_fault_of_the_request(story, monkeypatch):
    """Numbers that overflow, and rules that fail, on a text that never comes."""
    poison, seen = story.tokenizer.encode("Alice")[-1], []

    def checked(self, cache, layer, batch, k, v):
        seen.append(int((batch.tokens == poison).sum()))
        if seen[-1]:
            raise NumericsError("KVCache.append: float16 cannot hold 1e+06", tensor="k")
        return right(self, cache, layer, batch, k, v)

    class Picky(LogitsRule):
        def moves(self, ids):
            seen.append(-int((ids == poison).any()))
            assert seen[-1] == 0
            return ids[:1]

        def change(self, ids, logits):
            return logits

    monkeypatch.setattr(story, "backend", story.backend.op_by_op())
    owner = type(story.backend)
    right = owner.append
    monkeypatch.setattr(LookupDrafts, "guess", lambda self, ids, count: np.full(min(2, count), poison))
    expected = gist(story.generate(COPY, max_tokens=6))
    assert poison not in expected[0]
    for params, change in (({}, checked), ({"processors": [Picky()]}, right)):
        seen.clear()
        with story.engine() as engine, monkeypatch.context() as patch:
            patch.setattr(owner, "append", change)
            handles = [engine.submit(COPY, max_tokens=6, **each) for each in ({}, {"speculate": "lookup", **params})]
            assert [gist(handle.result()) for handle in handles] == [expected] * 2
            assert gist(story.generate(COPY, max_tokens=6, speculate="lookup", **params)) == expected
        check(engine)
        assert any(seen)
