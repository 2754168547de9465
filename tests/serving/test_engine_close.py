"""What an engine holds in memory, and what it leaves when it ends."""

import gc
import json
import os
import shutil
import signal
import threading
import weakref

import pytest
from cli_runs import BACKEND
from engine_checks import PROMPTS, gist, until
from helpers import BITNET, DATA, GOLDEN, model, run_python, write_checkpoint

import bitnet_ref
from bitnet_ref.errors import (
    BackendUnavailable,
    ConfigError,
    EngineClosed,
    OutOfMemory,
)
from bitnet_ref.serving import EngineConfig

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
    with pytest.raises(ConfigError, match="memory_limit leaves 0 for the cache"):
        story.engine(memory_limit=1000, cache_tokens=100)
    with pytest.raises(ConfigError, match="cache_bytes"):
        story.engine(cache_bytes=10)


def test_the_default_cache_is_for_131072_tokens_of_a_longer_context(tmp_path, monkeypatch):
    longest = write_checkpoint(tmp_path / "long", {**BITNET, "max_position_embeddings": 1 << 20})
    tiny = bitnet_ref.load(longest, backend="numpy")
    monkeypatch.setattr(tiny.backend, "memory", lambda: (None, None))
    with tiny.engine(max_batch=1, page_size=1 << 10) as engine:
        assert (engine.cache.pages, engine.cache.capacity) == (128, 131_072)
        page = engine.cache.nbytes // 128
    for size in ({"cache_tokens": 200 << 10}, {"cache_bytes": 200 * page}):
        with tiny.engine(max_batch=1, page_size=1 << 10, **size) as engine:
            assert (engine.cache.pages, engine.cache.capacity) == (200, 200 << 10)


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
    with tiny.engine(max_batch=64, memory_limit=1000 + 5 * page, cache_bytes=5 * page) as engine:
        assert (engine.cache.nbytes, engine.cache.slots) == (5 * page, 5)
        assert engine.cache.capacity == min(5 * 16, tiny.config.context_length)
    with pytest.raises(ConfigError, match=rf"5 pages of 16 tokens, {page:,} bytes each.* leaves {5 * page - 1:,} for"):
        tiny.engine(memory_limit=1000 + 5 * page - 1, cache_bytes=5 * page)
    monkeypatch.setattr(tiny.backend, "memory", lambda: (None, 4 * 5 * page))  # of several cards: within the limit
    with tiny.engine(max_batch=64, memory_limit=10**9) as engine:
        assert engine.cache.nbytes == 5 * page
    with pytest.raises(ConfigError, match="memory_limit"):
        tiny.engine(memory_limit=10**9, cache_bytes=21 * page)
    monkeypatch.setattr(tiny.backend, "memory", lambda: (None, None))
    with tiny.engine(max_batch=3) as engine:
        assert engine.cache.pages == 3 * -(-tiny.config.context_length // 16)
    monkeypatch.setattr(tiny.backend, "memory", lambda: (1000, 1000))
    with tiny.engine(max_batch=3) as engine:
        assert engine.cache.pages == 1


def test_states_of_sequences_are_part_of_the_cache(monkeypatch, tmp_path):
    """Of layers without keys (Qwen3.5). Where they are too large, fewer sequences run at a time."""
    hybrid = model(DATA / "families" / "qwen3_5-groups128-hybrid", "numpy")
    one = hybrid.new_cache(1, 16, page_size=16)
    page, state = one.bytes_per_token * 16, one.state_bytes
    assert 0 < state == one.nbytes - page
    assert state == sum(array.nbytes for array in one.states.arrays)
    assert (one.layers, one.rows_per_token, len(one.keys)) == (4, 1, 1)  # three layers have states in place of keys
    room = 6 * state + 7 * page
    monkeypatch.setattr(hybrid.backend, "memory", lambda: (1000, None))
    for settings in ({"cache_bytes": room}, {"memory_limit": 1000 + room}):
        with hybrid.engine(max_batch=64, **settings) as engine:
            assert engine.cache.slots == min(room // 2 // state, engine.cache.pages)
            assert engine.cache.state_bytes == engine.cache.slots * state
            assert room - page < engine.cache.nbytes <= room
    with hybrid.engine(max_batch=64, memory_limit=1000 + 3 * state + 5 * page, cache_tokens=5 * 16) as engine:
        assert (engine.cache.slots, engine.cache.pages) == (3, 5)
    with pytest.raises(
        ConfigError, match=f"1 pages of 16 tokens, .* and states of {state:,} bytes a sequence, and mem"
    ):
        hybrid.engine(memory_limit=1000 + state + page - 1)
    monkeypatch.setattr(hybrid.backend, "memory", lambda: (None, None))
    with hybrid.engine(max_batch=3) as engine:  # whole contexts
        whole = -(-hybrid.config.context_length // 16)
        assert (engine.cache.slots, engine.cache.pages) == (3, 3 * whole)
    short = bitnet_ref.load(with_context(hybrid.path, tmp_path / "short", 32), backend="numpy", threads=1)
    assert 2 * page < state  # so whole contexts for all take less than half of the room
    with short.engine(max_batch=64, cache_bytes=5 * (2 * page + state)) as engine:
        assert (engine.cache.slots, engine.cache.pages) == (5, 10)
    for held in (None, 0):
        monkeypatch.setattr(hybrid.backend, "memory", lambda held=held: (held, None))
        with hybrid.engine(memory_limit=state + page, cache_tokens=16) as engine:
            assert (engine.cache.slots, engine.cache.pages) == (1, 1)
    with pytest.raises(OutOfMemory, match="sequences of 1 tokens does not fit"):
        hybrid.new_cache(1 << 40, 1)


def with_context(folder, to, length):
    """A copy of a model whose context has so many tokens."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, "max_position_embeddings": length}))
    return to


def test_replicas_share_what_memory_there_is(monkeypatch):
    """Their caches are made one after another, and memory that nothing was written to does not count as held."""
    tiny = model(GOLDEN / "bitnet-packed-offline", BACKEND, threads=1)
    page = tiny.new_cache(1, 16, page_size=16).nbytes
    for limit, free in ((None, 4 * 13 * page), (1000 + 13 * page, None)):
        monkeypatch.setattr(tiny.backend, "memory", lambda free=free: (1000, free))
        with tiny.engine(replicas=3, memory_limit=limit) as engine:
            assert [each.cache.pages for each in engine.engines] == [4, 4, 4]
    monkeypatch.setattr(tiny.backend, "memory", lambda: (1000, None))
    with tiny.engine(replicas=2, cache_tokens=32) as engine:
        assert [each.cache.pages for each in engine.engines] == [2, 2]


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


def test_the_engines_thread_ends_with_the_program():
    with model("storyteller", "auto").engine() as engine:
        engine.generate("Alice", max_tokens=1)
        (thread,) = [each for each in threading.enumerate() if each is engine._worker._thread]
        assert (thread.name, thread.daemon) == ("bitnet_ref engine", True)


def test_a_dropped_engine_ends_its_thread():
    engine = model("storyteller", "auto").engine()
    engine.generate("Alice", max_tokens=2)
    thread, gone = engine._worker._thread, weakref.ref(engine)
    assert thread.is_alive()
    del engine
    gc.collect()
    assert gone() is None
    assert not thread.is_alive()


@pytest.mark.thorough
def test_a_program_that_never_closes_its_engine_ends():
    code = (
        "import json, bitnet_ref\n"
        "engine = bitnet_ref.load().engine()\n"
        "stream = engine.stream('Alice', max_tokens=200)\n"
        "next(stream)\n"
        "print(json.dumps(True))\n"
    )
    assert run_python(code)


@pytest.mark.thorough
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
        "    refused = 0\n"
        "    for use in (lambda: engine.submit('x'), lambda: next(stream), lambda: stream.result()):\n"
        "        try:\n"
        "            use()\n"
        "        except bitnet_ref.errors.EngineClosed as error:\n"
        "            refused += 'make an engine after the fork' in str(error)\n"
        "    os._exit(refused)\n"
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
