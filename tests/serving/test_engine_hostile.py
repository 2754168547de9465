"""Requests that mean harm: what one of them sends or raises reaches no other request, and never the engine."""

import asyncio
import copy
import threading
import time
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from engine_checks import PROMPTS, check, check_fault, gist, until
from helpers import GOLDEN, model

import bitnet_ref
from bitnet_ref.errors import (
    BackendUnavailable,
    ContextOverflow,
    DeviceError,
    FormatError,
    GenerationError,
    NumericsError,
    OutOfMemory,
    QueueFull,
)
from bitnet_ref.serving import EngineConfig
from bitnet_ref.system.memory import memory_bytes
from bitnet_ref.system.options import Number

# -- parameters --------------------------------------------------------------------------------------------------------


class SmallInt(int):
    """A number that lies about itself."""

    def __le__(self, other):
        return True

    __ge__ = __lt__ = __gt__ = __le__


NO_NUMBERS = [
    True,
    np.bool_(False),
    "1",
    None,
    1j,
    [1],
    np.array(1),
    Decimal(1),
    Fraction(1, 2),
    np.timedelta64(1, "s"),
]
FAR_OFF = [10**400, -(10**400), 10**5000, float("nan"), float("inf"), np.longdouble("1e4000"), SmallInt(10**30)]


@pytest.mark.parametrize("value", [*NO_NUMBERS, *FAR_OFF], ids=lambda value: type(value).__name__)
def test_no_number_is_taken_that_is_none_or_out_of_range(value):
    for number in (Number(0, whole=True), Number(-1e9, 1e9)):
        assert not number.accepts(value)
        with pytest.raises(GenerationError, match=r"^seed: expected a .*number from .* to .*, got .{1,130}$"):
            number.read(value, "seed")


def test_scalars_of_numpy_are_numbers(engine):
    params = {"temperature": np.float32(0.5), "top_k": np.int64(5), "seed": np.uint8(3), "max_tokens": np.int16(6)}
    plain = {"temperature": 0.5, "top_k": 5, "seed": 3, "max_tokens": 6}
    assert gist(engine.generate("Alice", **params)) == gist(engine.model.generate("Alice", **plain))
    assert type(engine.config.params(params).temperature) is float


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"priority": 10**400}, "priority: expected a whole number from -2147483647 to 2147483647"),
        ({"timeout_s": 1e30}, r"timeout_s: expected a number above 0, at most 1e\+09"),
        ({"temperature": 1e-320}, r"temperature: expected 0 or a number from 1e-100 to 1e\+100"),
        ({"repetition_penalty": 1e-320}, r"repetition_penalty: expected a number from 1e-06 to 1e\+06"),
        ({"length_penalty": 1e308, "num_beams": 2}, "length_penalty: expected a number from -30 to 30"),
        ({"logit_bias": {1: 10**400}}, "logit_bias: expected {token id: number from -100 to 100}"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias: expected"),
        ({"logprobs": 10**9}, "logprobs: expected a whole number from 0 to 1024"),
        ({"stop": ["a" * 10**5]}, "stop: expected at most 65536 characters, all together, got 100000"),
        ({"overflow": np.array(["error", "x"])}, "overflow: expected one of"),
        ({"early_stopping": np.array([1, 2])}, "early_stopping: expected"),
        ({"n": 5}, "n: expected at most 4, as max_batch and max_queue say, got 5"),
        ({"n": 10**9}, "n: expected a whole number from 1 to 1024"),
    ],
)
def test_extremes_are_refused_with_the_range(engine, settings, message):
    with pytest.raises(GenerationError, match=message):
        engine.submit("Alice", **settings)


@pytest.mark.parametrize("logits", [1e300, -1e300, np.nan, np.inf, -np.inf])
def test_logits_that_cannot_be_divided_by_a_temperature_are_refused(story, logits):
    params = {"processors": [lambda ids, x: np.full(len(x), logits)], "temperature": 1e-100, "max_tokens": 2}
    with pytest.raises(GenerationError, match="expected logits to choose from"):
        story.generate("Alice", **params)
    for temperature in (1e-100, 1e100):
        assert len(story.generate("Alice", temperature=temperature, seed=1, max_tokens=2).token_ids) == 2


def test_rows_count_against_the_queue(story):
    wait = threading.Event()
    with story.engine(max_batch=4, max_queue=6) as engine:
        first = engine.submit("Alice", processors=[lambda ids, x: wait.wait() and x], max_tokens=1)
        until(lambda: engine.metrics.snapshot()["num_requests_running"] == 1)
        handles = [engine.submit("Alice", n=3, temperature=1.0, max_tokens=2) for _ in range(2)]
        with pytest.raises(QueueFull, match="2 requests, for 6 texts, wait and 1 run"):
            engine.submit("Alice")
        handles.pop().cancel()
        wait.set()
        assert first.result()
        assert len(handles[0].result()) == 3
        assert len(engine.submit("Alice", n=4, temperature=1.0, max_tokens=2).result()) == 4
    check(engine)


# -- what callbacks raise ----------------------------------------------------------------------------------------------


class Panic(BaseException):
    """As pyo3's PanicException; and its message cannot be shown."""

    def __str__(self):
        raise SystemExit("never mind")


RAISED = [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, StopIteration, Panic, RecursionError]


@pytest.mark.sample(2)
@pytest.mark.parametrize("raised", RAISED, ids=lambda raised: raised.__name__)
def test_whatever_a_callback_raises_ends_its_own_request(engine, raised):
    def bad(*_):
        raise raised("mine")

    class Moves:
        moves = __call__ = bad

    other = engine.submit("Alice", max_tokens=20)
    for params in ({"processors": [bad]}, {"processors": [Moves()]}, {"strategy": bad}, {"filter": bad}):
        with pytest.raises(GenerationError, match=f"by its own parameters: {raised.__name__}") as failure:
            engine.generate("Alice", max_tokens=8, **params)
        assert isinstance(failure.value.__cause__, raised)
    assert gist(other.result()) == gist(engine.model.generate("Alice", max_tokens=20))


@pytest.mark.sample(3)
@pytest.mark.parametrize("moved", [[10**6], [-1], [0.5], [2**63], ["x"], [True]])
def test_ids_that_a_processor_moves_reach_no_other_row(engine, moved):
    class Moves:
        def moves(self, ids):
            return moved

        def __call__(self, ids, logits):
            return logits

    other = engine.submit("Alice", max_tokens=20)
    with pytest.raises(GenerationError, match="by its own parameters"):
        engine.generate("Alice", max_tokens=8, processors=[Moves()])
    assert gist(other.result()) == gist(engine.model.generate("Alice", max_tokens=20))


@pytest.mark.parametrize(
    "wait",
    [
        lambda engine: engine.generate("Alice"),
        lambda engine: next(engine.stream("Alice")),
        lambda engine: asyncio.run(engine.agenerate("Alice")),
        lambda engine: engine.submit("Alice").result(),
    ],
)
def test_a_callback_that_waits_for_its_own_engine_is_told(engine, wait):
    other = engine.submit("Alice", max_tokens=8)
    with pytest.raises(GenerationError, match="in the engine's own thread: neither would go on"):
        engine.generate("Alice", max_tokens=3, processors=[lambda ids, x: wait(engine) and x])
    assert other.result().text == engine.model.generate("Alice", max_tokens=8).text
    twice = [lambda ids, x: engine.model.generate("Alice", max_tokens=1) and x]
    assert len(engine.generate("Alice", max_tokens=3, processors=twice).token_ids) == 3


def test_numbers_that_overflow_end_only_the_request_that_has_them(story, monkeypatch):
    """As a float16 cache does: the prompt of one request makes numbers that it cannot hold."""
    monkeypatch.setattr(story, "backend", story.backend.op_by_op())
    owner, poison = type(story.backend), story.tokenizer.encode("Alice")[-1]
    right = owner.append

    def checked(self, cache, layer, batch, k, v):
        if (batch.tokens == poison).any():
            raise NumericsError("KVCache.append: float16 cannot hold 1e+06", tensor="k")
        return right(self, cache, layer, batch, k, v)

    good = ["Once upon a time", "The king and the queen"]
    params = {"max_tokens": 12, "logit_bias": {poison: -100}}
    expected = [gist(story.generate(prompt, **params)) for prompt in good]
    with story.engine(page_size=4) as engine, monkeypatch.context() as patch:
        patch.setattr(owner, "append", checked)
        handles = [engine.submit(prompt, **params) for prompt in [*good[:1], "Alice", *good[1:]]]
        with pytest.raises(GenerationError, match="float16 cannot hold"):
            handles.pop(1).result()
        assert [gist(handle.result()) for handle in handles] == expected
    check(engine)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"cache_tokens": 64}, {}])
def test_memory_follows_the_cache_not_the_context(story, settings):
    endless = copy.copy(story)
    endless.config = replace(story.config, max_position_embeddings=400_000_000)
    endless.context_length = endless.config.context_length
    expected, before = gist(story.generate("Alice", max_tokens=4)), memory_bytes()
    with endless.engine(**settings) as engine:
        assert gist(engine.generate("Alice", max_tokens=4)) == expected
        assert engine.cache.page_table.nbytes < engine.cache.nbytes
        with pytest.raises(GenerationError, match=r"the engine's cache holds \d+ of a request.*raise cache_tokens"):
            engine.submit("Alice", max_tokens=140_000)
        assert memory_bytes() - before < 200 << 20


@pytest.mark.thorough
def test_a_lack_of_memory_at_any_line_ends_no_engine(caplog):
    tiny = model(GOLDEN / "bitnet-packed-offline", threads=1)
    lines, _ = check_fault(tiny, 10**9)
    failed = sum(check_fault(tiny, number)[1] for number in range(1, lines, lines // 20))
    assert failed > 5
    assert "the engine ran out of memory and starts over: MemoryError: line" in caplog.text


# -- slow readers ------------------------------------------------------------------------------------------------------


def computed(handle):
    return handle.stats.generated_tokens


@pytest.mark.thorough
@pytest.mark.parametrize("cache_tokens", [800, 240])
def test_a_reader_that_stops_pauses_its_stream_only(story, cache_tokens):
    """With 800 tokens of cache the streams keep their pages; with 240 others need them."""
    settings = {"max_batch": 2, "page_size": 4, "cache_tokens": cache_tokens, "max_unread": 8}
    expected = story.generate("Alice", max_tokens=150)
    with story.engine(**settings) as engine:
        streams = [engine.stream("Alice", max_tokens=150) for _ in range(5)]
        until(lambda: engine.metrics.snapshot()["num_requests_paused"] == 5)
        steps = engine.metrics.counters["engine_steps"]
        assert [computed(stream) for stream in streams] == [8] * 5
        assert {each.state for each in engine.requests} == {"paused"}
        assert gist(engine.submit("Alice", max_tokens=150).result()) == gist(expected)  # needs nearly all of 240
        assert engine.metrics.counters["engine_steps"] - steps > 140
        assert [computed(stream) for stream in streams] == [8] * 5
        assert [chunk.token_id for chunk in streams[0]] == expected.token_ids
        assert gist(streams[1].result()) == gist(expected)  # waiting for the result is no slow reading

        async def read():
            taken = [await anext(streams[2]) for _ in range(3)]
            assert computed(streams[2]) == 8  # not yet half
            return taken + [chunk async for chunk in streams[2]]

        assert [chunk.token_id for chunk in asyncio.run(read())] == expected.token_ids
        streams[3].cancel()
        until(lambda: engine.metrics.snapshot()["num_requests_paused"] == 1)  # which closing the engine finishes
    assert gist(streams[4].result()) == gist(expected)
    check(engine)


def test_a_paused_stream_runs_again(story):
    with story.engine(max_unread=2) as engine:
        stream = engine.stream("Alice", max_tokens=200, ignore_eos=True)
        until(lambda: [each.state for each in engine.requests] == ["paused"])
        paused_at = engine.requests[0].generated_tokens
        reader = (chunk for chunk in stream)
        until(lambda: next(reader) and engine.requests[0].generated_tokens > paused_at)
        until(lambda: engine.requests[0].state == "paused")  # it is not read now
        assert engine.requests[0].generated_tokens < 200


def test_a_paused_stream_is_late_in_time(story):
    with story.engine(max_unread=1) as engine:
        stream = engine.stream("Alice", max_tokens=100, timeout_s=0.1)
        until(lambda: stream.done, 5)
        with pytest.raises(GenerationError, match=r"within 0\.1 s; it had 1 new token$"):
            list(stream)
        assert engine.metrics.counters["engine_steps"] == 1


@pytest.mark.thorough
def test_cancelled_requests_leave_no_deadlines(story):
    with story.engine(max_batch=1, max_queue=10**5) as engine:
        first = engine.stream("Alice", max_tokens=2, timeout_s=500)
        for _ in range(3000):
            engine.submit("Alice", timeout_s=1000).cancel()
        until(lambda: engine.metrics.finished["abort"] == 3000)
        assert list(first)
        assert len(engine._worker._deadlines) < 2000


# -- devices that fail -------------------------------------------------------------------------------------------------


def failing(monkeypatch, backend, op="head_rows", times=1):
    """From `start.set()` on, that op of backends of this class fails as a lost device does, so many times."""
    owner, start, left = type(backend), threading.Event(), [times]
    right = getattr(owner, op)

    def faulty(self, *args, **kwargs):
        if start.is_set() and left[0] > 0:
            left[0] -= 1
            raise DeviceError("the device fell off the bus")
        return right(self, *args, **kwargs)

    monkeypatch.setattr(owner, op, faulty)
    return start


CASES = [("numpy", "head_rows"), ("cython", "head_rows"), ("cupy", "to_host"), ("cupy", "hidden")]


@pytest.mark.parametrize(("name", "op"), CASES)
def test_a_device_that_fails_is_opened_again_and_the_texts_stay_the_same(name, op, monkeypatch):
    if reason := bitnet_ref.available_backends()[name]:
        pytest.skip(reason)
    tiny = bitnet_ref.load(GOLDEN / "bitnet-packed-offline", backend=name, threads=1)
    prompts = [[5, 6, 7, 8, number] for number in range(9, 14)]
    params = {"max_tokens": 6, "temperature": 1.0, "seed": 3}
    expected = [gist(out) for out in tiny.generate(prompts, **params)]
    start = failing(monkeypatch, tiny.backend, op)
    with tiny.engine(max_batch=3, page_size=2, cache_tokens=60) as engine:
        first = engine.stream(prompts[0], **params)
        next(first)
        start.set()
        handles = [engine.submit(prompt, **params) for prompt in prompts[1:]]
        assert [gist(handle.result()) for handle in (first, *handles)] == expected
        assert engine.model is not tiny
        assert engine.metrics.counters["backend_restarts"] == 1
        assert engine.metrics.finished["error"] == 0
    check(engine)


def test_a_request_that_fills_the_cache_goes_on_too(monkeypatch):
    tiny = bitnet_ref.load(GOLDEN / "bitnet-packed-offline", backend="numpy", threads=1)
    prompt, params = [5, 6, 7, 8, 9], {"max_tokens": 7, "temperature": 1.0, "seed": 3}
    expected = gist(tiny.generate(prompt, **params))
    with tiny.engine(max_batch=1, page_size=2, cache_tokens=12) as engine:
        stream = engine.stream(prompt, **params)
        next(stream)
        failing(monkeypatch, tiny.backend).set()
        assert gist(stream.result()) == expected
        with pytest.raises(ContextOverflow, match=r"max_tokens is 8, but the engine's cache holds 12 of a request"):
            engine.submit([*prompt], max_tokens=8)
    check(engine)


def test_the_next_backend_takes_over_and_requests_with_tokens_fail(monkeypatch, caplog):
    name = "cython" if bitnet_ref.available_backends()["cython"] is None else "numpy"
    config = EngineConfig(backend=name, fallback=("cupy", "numpy"), max_batch=2)
    if name == "numpy":
        pytest.skip("needs two backends")
    monkeypatch.setitem(bitnet_ref.backends.__dict__, "_why_not", lambda name: "no card" if name == "cupy" else None)
    with bitnet_ref.load_engine("storyteller", config) as engine:
        expected = [gist(out) for out in model("storyteller", "numpy").generate(PROMPTS, max_tokens=5)]
        running = engine.stream("Alice", max_tokens=100)
        next(running)
        failing(monkeypatch, engine.model.backend, times=10**9).set()
        waiting = [engine.submit(prompt, max_tokens=5) for prompt in PROMPTS]
        with pytest.raises(GenerationError, match="backend numpy would go on with other rounding: DeviceError"):
            list(running)
        assert [gist(handle.result()) for handle in waiting] == expected
        assert (engine.model.backend.name, waiting[0].stats.backend) == ("numpy", "numpy")
    assert "backend cupy cannot be opened: " in caplog.text
    assert "the device failed (the device fell off the bus): backend numpy goes on" in caplog.text
    check(engine)


def test_a_device_whose_model_cannot_be_opened_again_fails_its_requests(story, monkeypatch, caplog):
    def renew(self, kind):
        raise FormatError("the files are gone")

    monkeypatch.setattr(type(story), "renew", renew)
    with story.engine() as engine:
        failing(monkeypatch, story.backend).set()
        with pytest.raises(GenerationError, match="the device fell off the bus"):
            engine.generate("Alice", max_tokens=5)
        assert engine.generate("Alice", max_tokens=5).text == story.generate("Alice", max_tokens=5).text
    assert f"backend {story.backend.name} cannot be opened: the files are gone" in caplog.text


def test_a_device_that_stays_away_fails_the_requests_of_each_step(story, monkeypatch):
    with story.engine(max_batch=2) as engine:
        start = failing(monkeypatch, story.backend, times=4)
        start.set()
        handles = [engine.submit(prompt, max_tokens=5) for prompt in PROMPTS]
        ends = []
        for handle in handles:
            with pytest.raises(GenerationError, match="the device fell off the bus") as failure:
                handle.result()
            ends.append(type(failure.value.__cause__))
        assert ends == [DeviceError] * 4
        start.clear()
        assert engine.generate("Alice", max_tokens=5).text == story.generate("Alice", max_tokens=5).text
    check(engine)


@pytest.mark.parametrize("error", [OutOfMemory("too large"), DeviceError("no answer"), BackendUnavailable("none")])
def test_load_engine_falls_back_for_every_reason(monkeypatch, caplog, error):
    load = bitnet_ref.api.load
    monkeypatch.setattr(
        bitnet_ref.api, "load", lambda *a, **k: load(*a, **k) if k["backend"] == "numpy" else raise_(error)
    )
    config = EngineConfig(backend="auto", fallback=("cython", "numpy"))
    with bitnet_ref.load_engine("storyteller", config) as engine:
        assert engine.model.backend.name == "numpy"
    assert str(error) in caplog.text


def raise_(error):
    raise error


@pytest.mark.thorough
def test_cancelling_thousands_is_fast(story):
    wait = threading.Event()
    with story.engine(max_batch=64, max_queue=10**6) as engine:
        first = engine.submit("Alice", processors=[lambda ids, x: wait.wait() and x], max_tokens=2)
        many = [engine.submit([1, 5], n=64, temperature=1.0, max_tokens=2) for _ in range(40)]
        many += [engine.submit([1, 5], max_tokens=2) for _ in range(2000)]
        for handle in reversed(many):
            handle.cancel()
        start = time.perf_counter()
        wait.set()
        assert first.result()
        until(lambda: engine.metrics.finished["abort"] == 2040)
        assert time.perf_counter() - start < 1
    check(engine)
