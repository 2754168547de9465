"""The engine: what its users do with it, one behaviour at a time. test_engine_load.py has many at once."""

import asyncio
import gc
import os
import signal
import threading
import time
import weakref

import numpy as np
import pytest
from helpers import GOLDEN, model, run_python

import bitnet_ref
from bitnet_ref.errors import (
    BackendUnavailable,
    ConfigError,
    EngineClosed,
    GenerationError,
    OutOfMemory,
    QueueFull,
    RequestCancelled,
    RequestTimeout,
)
from bitnet_ref.generation import EngineConfig

PROMPTS = ["Once upon a time", "Alice", "The old man of the sea", "It was a dark and stormy night, and the wind"]


@pytest.fixture
def story():
    return model("storyteller", "auto")


@pytest.fixture
def engine(story):
    with story.engine(max_batch=4, max_batch_tokens=32, page_size=4) as engine:
        yield engine
        engine.close()
        check(engine)


def check(engine):
    """Nothing is left when nobody is there."""
    pool = engine._worker.pool
    pool.check([])
    assert pool.in_use == 0
    scheduler = engine._worker._scheduler
    assert (scheduler.running, scheduler.waiting, engine._worker._alive) == ([], [], {})
    now = engine.metrics.snapshot()
    assert (now["num_requests_running"], now["num_requests_waiting"]) == (0, 0)


def until(condition, timeout_s=20.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it does not come about"
        time.sleep(0.002)


def gist(out):
    return out.token_ids, out.text, out.logprobs, out.finish_reason, out.stop_reason, out.top_logprobs


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


def test_n_texts_on_fewer_slots_and_pages_than_they_need(story):
    params = {"n": 4, "temperature": 1.0, "seed": 2, "max_tokens": 12}
    with story.engine(max_batch=2, page_size=4, cache_tokens=24, max_batch_tokens=8) as engine:
        outs = engine.generate("The king and the queen", **params)
        assert engine._worker._scheduler.stops > 0
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
            one = await engine.submit("Alice", max_tokens=8).aresult()
        return texts, [out.text for out in outs], one.text, engine

    texts, outs, one, engine = asyncio.run(main())
    expected = [out.text for out in story.generate(PROMPTS, max_tokens=8)]
    assert texts == outs == expected
    assert one == expected[1]
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


def test_an_event_loop_that_is_gone_harms_nobody(engine):
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


# -- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "with", "del", "cancel"])
def test_a_stream_that_ends_early_frees_its_pages_within_a_step(engine, how):
    stream = engine.stream("Alice", max_tokens=200)
    next(stream)
    other = engine.stream("The old man", max_tokens=200)
    next(other)
    if how == "close":
        stream.close()
        assert list(stream) == []
    elif how == "with":
        with stream:
            pass
    elif how == "cancel":
        stream.cancel()
        with pytest.raises(RequestCancelled, match="request 0 was cancelled"):
            list(stream)
    number = 0
    if how == "del":
        del stream
    steps = len(engine.timeline)
    next(other)
    until(lambda: engine.metrics.finished["abort"] == 1)
    after = [step for step in list(engine.timeline)[steps + 2 :] if number in [part.request_id for part in step.parts]]
    assert after == []
    other.close()
    until(lambda: engine._worker.pool.in_use == 0)


def test_cancelled_in_the_moment_of_its_arrival(engine, monkeypatch):
    """After the thread has let requests in, and before it looks for those to cancel."""
    worker, handles = engine._worker, []
    take_in = worker._take_in

    def and_cancel():
        goes_on = take_in()
        if goes_on and len(handles) < 3:
            handles.append(engine.submit("Alice", max_tokens=200))
            handles[-1].cancel()
        return goes_on

    monkeypatch.setattr(worker, "_take_in", and_cancel)
    assert engine.generate("Alice", max_tokens=5).text
    for handle in handles:
        with pytest.raises(RequestCancelled, match="after 0 tokens"):
            handle.result()
    assert engine.metrics.counters["generation_tokens"] == 5


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_the_engine_itself_ends_all_requests(story, monkeypatch):
    engine = story.engine()
    stream = engine.stream("Alice", max_tokens=200)
    next(stream)
    monkeypatch.setattr(engine._worker._scheduler, "plan", lambda: 1 / 0)
    with pytest.raises(EngineClosed, match="by a fault of its own: ZeroDivisionError"):
        list(stream)
    engine._worker._thread.join()
    with pytest.raises(EngineClosed, match="by a fault of its own"):
        engine.submit("Alice")
    check(engine)


def test_the_result_of_a_cancelled_request_is_an_error(engine):
    handle = engine.submit("Alice", max_tokens=200)
    handle.cancel()
    with pytest.raises(RequestCancelled):
        handle.result()
    handle.cancel()


def test_a_timeout_ends_a_request_that_waits_and_one_that_runs(engine):
    slow = engine.submit(
        "Alice", max_tokens=200, timeout_s=0.05, processors=[lambda ids, logits: time.sleep(0.01) or logits]
    )
    with pytest.raises(RequestTimeout, match=r"request 0 was not finished within 0\.05 s; [1-9]\d* tokens"):
        slow.result()
    with pytest.raises(RequestTimeout, match="; 0 tokens"):
        engine.submit("Alice", timeout_s=1e-9).result()
    assert engine.metrics.finished["timeout"] == 2
    with pytest.raises(TimeoutError):
        engine.submit("Alice", max_tokens=200).result(timeout_s=1e-6)


def test_a_full_queue_refuses_and_recovers():
    with model("storyteller", "auto").engine(max_batch=1, max_queue=2) as engine:
        streams = [engine.stream("Alice", max_tokens=200)]
        next(streams[0])
        streams += [engine.stream("Alice", max_tokens=3) for _ in range(2)]
        with pytest.raises(QueueFull, match="2 requests wait and 1 run"):
            engine.submit("Alice")
        now = engine.metrics.snapshot()
        assert (now["num_requests_running"], now["num_requests_waiting"], now["requests_refused"]) == (1, 2, 1)
        streams[0].close()
        assert [len(list(stream)) for stream in streams[1:]] == [3, 3]
        assert len(engine.generate(PROMPTS * 3, max_tokens=2)) == 12  # more than the queue: they come by and by


def test_priority_goes_first(engine):
    order = []
    blocker = [engine.stream("Alice", max_tokens=30) for _ in range(4)]
    for stream in blocker:
        next(stream)
    handles = {name: engine.submit("Alice", max_tokens=1, priority=p) for name, p in (("low", -1), ("usual", 0))}
    handles["high"] = engine.submit("Alice", max_tokens=1, priority=1)
    for stream in blocker:
        list(stream)
    for handle in handles.values():
        handle.result()
    first = {
        name: next(s.number for s in engine.timeline if h.request_id in [p.request_id for p in s.parts])
        for name, h in handles.items()
    }
    order = sorted(first, key=first.get)
    assert order[0] == "high"
    assert first["usual"] <= first["low"]


def test_company_is_waited_for():
    with model("storyteller", "auto").engine(max_batch=4, max_wait_s=5.0) as engine:
        start = time.perf_counter()
        outs = [engine.submit(prompt, max_tokens=2) for prompt in PROMPTS]
        for out in outs:
            out.result()
        assert time.perf_counter() - start < 4.0  # the batch was full, so nobody waited any longer
        assert len(engine.timeline[0].parts) == 4


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op", ["embed", "rms_norm", "linears", "rope", "attention", "gated", "head_candidates", "append"]
)
def test_a_fault_in_an_op_fails_its_step_only(story, monkeypatch, op):
    import bitnet_ref.kv_cache

    owner = bitnet_ref.kv_cache.KVCache if op == "append" else type(story.backend)
    right, fail = getattr(owner, op), threading.Event()

    def faulty(self, *args, **kwargs):
        if fail.is_set():
            fail.clear()
            raise OutOfMemory("the device is gone")
        return right(self, *args, **kwargs)

    expected = [gist(out) for out in story.generate(PROMPTS, max_tokens=8)]
    monkeypatch.setattr(owner, op, faulty)
    with story.engine(max_batch=2, max_queue=8, page_size=4) as engine:
        running = [engine.stream(prompt, max_tokens=200) for prompt in PROMPTS[:2]]
        for stream in running:
            next(stream)
        waiting = [engine.submit(prompt, max_tokens=8) for prompt in PROMPTS]
        fail.set()
        for stream in running:
            with pytest.raises(
                GenerationError, match=r"failed with the 2 requests of its step.*the device is gone"
            ) as error:
                list(stream)
            assert isinstance(error.value.__cause__, OutOfMemory)
        assert [gist(handle.result()) for handle in waiting] == expected
        now = engine.metrics.snapshot()
        assert (now["engine_faults"], now["request_success"]["error"]) == (1, 2)
    check(engine)


def test_a_numerics_error_names_the_tensor(monkeypatch):
    story = model("storyteller", "numpy")
    right = type(story.backend).attention

    def poisoned(self, q, *args):
        z = right(self, q, *args)
        z[0] = np.nan
        return z

    with story.engine() as engine:
        with monkeypatch.context() as patch:
            patch.setattr(type(story.backend), "attention", poisoned)
            with pytest.raises(GenerationError, match=r"blocks\.0\.attn"):
                engine.generate("Alice", max_tokens=2)
        assert engine.generate("Alice", max_tokens=2).text == story.generate("Alice", max_tokens=2).text


def bad(*_):
    raise ZeroDivisionError("my own fault")


@pytest.mark.parametrize(
    "params", [{"processors": [bad]}, {"strategy": bad}, {"filter": bad}, {"strategy": lambda *_: -1}]
)
def test_a_fault_of_a_requests_own_fails_that_request_only(engine, params):
    good = [engine.submit(prompt, max_tokens=8) for prompt in PROMPTS[:2]]
    wrong = engine.submit("Alice", max_tokens=8, **params)
    with pytest.raises(GenerationError, match="by its own parameters"):
        wrong.result()
    expected = engine.model.generate(PROMPTS[:2], max_tokens=8)
    assert [gist(handle.result()) for handle in good] == [gist(out) for out in expected]


def test_one_of_n_rows_fails_its_request(engine):
    def sometimes(ids, logits):
        if len(ids) > 4 and ids[-1] % 2:
            bad()
        return logits

    with pytest.raises(GenerationError, match="my own fault"):
        engine.generate("Alice", n=4, temperature=1.5, seed=1, max_tokens=30, processors=[sometimes])
    assert engine.generate("Alice", max_tokens=3).text


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "said"),
    [
        ("Alice", {"num_beams": 2}, "use model.generate"),
        ("Alice", {"tempature": 1}, "temperature"),
        ("Alice", {"priority": 1.5}, "priority"),
        ("Alice", {"timeout_s": 0}, "timeout_s"),
        ("Alice", {"n": 2}, "a stream is one continuation"),
        ("Alice", {"max_tokens": 400}, "context"),
        (["a", "b"], {}, "expected one prompt"),
        ([4096], {}, "vocabulary"),
    ],
)
def test_what_cannot_be_is_refused_at_once(engine, prompt, params, said):
    with pytest.raises(GenerationError, match=said):
        engine.stream(prompt, **params)


def test_iterating_over_several_texts_is_refused(engine):
    with pytest.raises(GenerationError, match=r"use result\(\)"):
        next(engine.submit("Alice", n=2, temperature=1.0, max_tokens=2))


def test_a_request_larger_than_the_cache_is_refused():
    with (
        model("storyteller", "auto").engine(cache_tokens=32) as engine,
        pytest.raises(GenerationError, match="the engine's cache holds 32"),
    ):
        engine.submit("Alice", max_tokens=40)


def test_sampling_defaults_are_the_configs():
    story = model("storyteller", "auto")
    with story.engine(sampling={"max_tokens": 3, "stop": ["x"]}) as engine:
        assert len(engine.generate("Alice").token_ids) == 3
        assert len(engine.generate("Alice", max_new_tokens=2).token_ids) == 2


# -- memory ------------------------------------------------------------------------------------------------------------


def test_the_cache_takes_what_it_is_given():
    story = model("storyteller", "auto")
    page = 6 * 2 * 2 * 64 * 4 * 8  # layers, k and v, kv heads, head_dim, bytes, tokens
    with story.engine(page_size=8, cache_bytes=10 * page + 5) as engine:
        assert (engine.cache.pages, engine.cache.nbytes) == (10, 10 * page)
    with story.engine(page_size=8, cache_tokens=17) as engine:
        assert engine.cache.pages == 3
    with story.engine(page_size=8, max_batch=2) as engine:
        assert engine.cache.pages == 64  # two whole contexts of 256
    with pytest.raises(ConfigError, match="memory_limit"):
        story.engine(memory_limit=1000)
    with pytest.raises(ConfigError, match="memory_limit leaves"):
        story.engine(memory_limit=1000, cache_tokens=100)
    with pytest.raises(ConfigError, match="cache_bytes"):
        story.engine(cache_bytes=10)


def test_the_default_cache_takes_a_quarter_of_the_free_memory(backend_name, monkeypatch):
    tiny = model(GOLDEN / "bitnet-packed-offline", backend_name, threads=1)
    held, free = tiny.backend.memory()
    assert held is None or held >= 0
    assert free is None or free > 0
    page = tiny.new_cache(1, 16, page_size=16, pages=1).nbytes
    monkeypatch.setattr(tiny.backend, "memory", lambda: (1000, 4 * 5 * page))
    with tiny.engine(max_batch=64) as engine:
        assert engine.cache.nbytes == 5 * page
    with tiny.engine(max_batch=64, memory_limit=1000 + 3 * page) as engine:
        assert engine.cache.nbytes == 3 * page


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_narrow_caches_share_and_copy_pages_too(dtype):
    narrow = bitnet_ref.load("storyteller", cache_dtype=dtype)
    params = {"n": 3, "temperature": 1.0, "seed": 1, "max_tokens": 8}
    prompts = ["Once upon a time there was", "Once upon a time there was a king"]
    expected = [[gist(out) for out in group] for group in narrow.generate(prompts, **params)]
    for whole, settings in ((narrow, {}), (model("storyteller", "auto"), {"cache_dtype": dtype})):
        with whole.engine(max_batch=3, page_size=4, cache_tokens=100, **settings) as engine:
            assert engine.cache.keys.dtype == dtype
            assert [[gist(out) for out in group] for group in engine.generate(prompts, **params)] == expected


def test_settings_beside_a_config_are_refused():
    with pytest.raises(ConfigError, match="max_batch"):
        bitnet_ref.Engine(model("storyteller", "auto"), EngineConfig(), max_batch=3)


def test_load_engine_falls_back(monkeypatch, caplog):
    monkeypatch.setenv("BITNET_REF_SIMD", "no such kernels")
    with bitnet_ref.load_engine("storyteller", EngineConfig(backend="cython", fallback=("numpy",))) as engine:
        assert engine.model.backend.name == "numpy"
    assert "backend cython is not available" in caplog.text
    assert "using numpy" in caplog.text
    with pytest.raises(BackendUnavailable):
        bitnet_ref.load_engine("storyteller", EngineConfig(backend="cython"))


# -- the engine's own end ----------------------------------------------------------------------------------------------


def test_closing_ends_what_runs_or_finishes_it_first():
    story = model("storyteller", "auto")
    engine = story.engine()
    stream = engine.stream("Alice", max_tokens=200)
    next(stream)
    engine.close()
    with pytest.raises(EngineClosed, match="before request 0 was finished"):
        list(stream)
    with pytest.raises(EngineClosed):
        engine.submit("Alice")
    engine.close()
    engine = story.engine()
    handles = [engine.submit(prompt, max_tokens=5) for prompt in PROMPTS]
    engine.close(drain=True)
    assert [len(handle.result().token_ids) for handle in handles] == [5] * 4
    assert "closed" in repr(engine)


def test_an_error_in_the_with_block_does_not_wait():
    def use():
        with model("storyteller", "auto").engine() as engine:
            stream.append(engine.stream("Alice", max_tokens=200))
            raise KeyError("mine")

    stream = []
    with pytest.raises(KeyError):
        use()
    with pytest.raises(EngineClosed):
        list(stream[0])


def test_a_dropped_engine_ends_its_thread():
    engine = model("storyteller", "auto").engine()
    engine.generate("Alice", max_tokens=2)
    thread, gone = engine._worker._thread, weakref.ref(engine)
    assert thread.is_alive()
    del engine
    gc.collect()
    assert gone() is None
    assert not thread.is_alive()


def test_a_program_that_never_closes_its_engine_ends():
    code = (
        "import json, bitnet_ref\n"
        "engine = bitnet_ref.load().engine()\n"
        "stream = engine.stream('Alice', max_tokens=200)\n"
        "next(stream)\n"
        "print(json.dumps(True))\n"
    )
    assert run_python(code)


def test_a_forked_child_is_told():
    engine = model("storyteller", "auto").engine()
    stream = engine.stream("Alice", max_tokens=100)
    code = (
        "import json, os, bitnet_ref, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "engine = bitnet_ref.load(threads=1, backend='numpy').engine()\n"
        "stream = engine.stream('Alice', max_tokens=50)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    said = 0\n"
        "    for use in (lambda: engine.submit('x'), lambda: next(stream), lambda: stream.result()):\n"
        "        try:\n"
        "            use()\n"
        "        except bitnet_ref.errors.EngineClosed as error:\n"
        "            said += 'make an engine after the fork' in str(error)\n"
        "    os._exit(said)\n"
        "_, status = os.waitpid(child, 0)\n"
        "print(json.dumps([os.waitstatus_to_exitcode(status), len(list(stream))]))\n"
    )
    assert run_python(code) == [3, 50]
    engine.close()
    del stream


def test_an_interrupt_leaves_the_engine_and_the_model_usable():
    """Ctrl-C, in the shell or a notebook: SIGINT reaches the main thread while it waits for a chunk, or a result."""
    with model("storyteller", "auto").engine() as engine:
        for wait in (
            lambda: list(engine.stream("Alice", max_tokens=200)),
            lambda: engine.generate(PROMPTS, max_tokens=200),
            lambda: engine.submit("Alice", max_tokens=200).result(),
        ):
            before = engine.metrics.counters["engine_steps"]

            def interrupt(before=before):
                until(lambda: engine.metrics.counters["engine_steps"] > before + 2)
                os.kill(os.getpid(), signal.SIGINT)

            thread = threading.Thread(target=interrupt)
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                wait()
            thread.join()
            until(lambda: engine._worker.pool.in_use == 0)
        expected = engine.model.generate("Alice", max_tokens=4).text
        assert engine.generate("Alice", max_tokens=4).text == expected


def test_the_timeline_shows_who_shared_a_step(engine):
    handles = [engine.submit(prompt, max_tokens=4) for prompt in PROMPTS]
    for handle in handles:
        handle.result()
    engine.close()
    prompts = {handle.request_id: handle.stats.prompt_tokens - handle.stats.cached_tokens for handle in handles}
    for handle in handles:
        mine = [part for step in engine.timeline for part in step.parts if part.request_id == handle.request_id]
        assert sum(part.tokens for part in mine if part.kind == "prefill") == prompts[handle.request_id]
        assert [part.tokens for part in mine if part.kind == "decode"] == [1, 1, 1]
    assert all(
        a.start_s + a.seconds <= b.start_s for a, b in zip(engine.timeline, list(engine.timeline)[1:], strict=False)
    )
