"""Campaigns against the engine: pytest -m slow -n0 -s tests/campaigns/test_serving_campaigns.py

SECONDS=300 in the environment makes each of the first three as long; by default they take a minute.
"""

import asyncio
import gc
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Hashable
from decimal import Decimal
from fractions import Fraction

import engine_machine
import numpy as np
import pytest
from engine_checks import check, check_fault, gist
from engine_machine import PARAMS, TINY, EngineMachine, alone
from helpers import model
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from bitnet_ref.errors import GenerationError, RequestCancelled, RequestTimeout, TokenizerError
from bitnet_ref.system.memory import memory_bytes

pytestmark = pytest.mark.slow
SECONDS = float(os.environ.get("SECONDS", "60"))


def test_the_state_machine():
    start = time.perf_counter()
    engine_machine.COUNTS.clear()
    while time.perf_counter() - start < SECONDS:
        run = settings(
            max_examples=20, stateful_step_count=50, phases=[Phase.generate], derandomize=False, database=None
        )
        run_state_machine_as_test(EngineMachine, settings=run)
    print(f"\n{dict(engine_machine.COUNTS.most_common())} in {time.perf_counter() - start:.0f} s")


def test_a_lack_of_memory_at_every_line():
    tiny, start, done, failed = model(TINY, threads=1), time.perf_counter(), 0, 0
    lines, _ = check_fault(tiny, 10**9)
    for number in random.sample(range(1, lines), lines - 1):
        failed += check_fault(tiny, number)[1]
        done += 1
        if time.perf_counter() - start > SECONDS:
            break
    print(f"\n{done} of {lines} lines, {failed} requests failed, in {time.perf_counter() - start:.0f} s")


# -- parameters --------------------------------------------------------------------------------------------------------

NUMBERS = ["max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty"]
NUMBERS += ["presence_penalty", "frequency_penalty", "seed", "window", "sink_tokens", "n", "logprobs", "num_beams"]
NUMBERS += ["length_penalty", "priority", "timeout_s"]
OTHERS = ["logit_bias", "stop_token_ids", "stop", "overflow", "ignore_eos", "early_stopping", "guided_json", "filter"]
OTHERS += ["strategy", "processors", "prompt"]
DTYPES = [np.int8, np.uint8, np.int16, np.int32, np.int64, np.uint64, np.float16, np.float32, np.float64, np.longdouble]
DTYPES += [np.bool_, np.complex64, np.complex128]


class Sly(int):
    """An int whose comparisons say what is asked of them."""

    def __le__(self, other):
        return True

    __ge__ = __lt__ = __gt__ = __le__

    def __repr__(self):
        raise ValueError("no")


def any_number(dice):
    """One of Python's numbers, or of NumPy's: usual, extreme, or none at all."""
    size = dice.choice([1, 2, 5, 40, 300, 2**31 - 1, 2**31, 2**63, 2**64, 10**30, 10**400, 10**5000])
    whole = dice.choice([0, 1, -1, dice.randint(-size, size), size, -size])
    real = dice.choice([0.0, -0.0, 0.5, 1.0, 1.5, dice.uniform(-2, 2), dice.uniform(0, 1), float("nan"), float("inf")])
    real = dice.choice([real, real, dice.choice([-1, 1]) * 10.0 ** dice.randint(-323, 308), -float("inf"), 5e-324])
    with np.errstate(all="ignore"):
        kinds = [
            *(lambda: whole, lambda: real, lambda: whole, lambda: real),
            lambda: dice.choice(DTYPES)(real if abs(whole) > 100 else whole),
            lambda: np.array(real),
            lambda: Sly(whole),
            lambda: Decimal(str(real)),
            lambda: Fraction(whole, 3),
            lambda: complex(real, 1),
            lambda: dice.choice([None, True, False, "1", "", b"1", [], {}, object(), np.timedelta64(1, "s"), ...]),
        ]
        try:
            return dice.choice(kinds)()
        except (OverflowError, ValueError):  # NumPy cannot make one of it
            return whole


def any_value(dice, name):
    number = dice.choice([1, 2, 3, 0.5, 0.9, np.float32(1), np.int64(2)]) if dice.random() < 0.4 else any_number(dice)
    if name in NUMBERS or dice.random() < 0.3:
        return number
    values = {
        "logit_bias": lambda: {key if isinstance(key := any_number(dice), Hashable) else 7: number},
        "stop_token_ids": lambda: [number, 5],
        "prompt": lambda: [5, number],
    }
    return values.get(name, lambda: [number])()


def attempt(use, prompt, params):
    """What comes of a request: texts, or "late", or "refused" if its error is one that a user can act on."""
    try:
        outs = use(prompt, **params)
    except RequestTimeout:
        return "late"
    except (GenerationError, TokenizerError) as error:
        right = "own parameters" not in str(error) and len(str(error)) < 600
        return "refused" if right else str(error)
    except BaseException as error:
        raise AssertionError(f"{type(error).__name__} escaped for {prompt!r:.80}, {list(params)}") from error
    return [*map(gist, outs)] if isinstance(outs, list) else gist(outs)


def test_parameters_of_all_numbers_there_are():
    """Whatever is given, it is refused by its name, or the text is that of model.generate."""
    tiny, dice, counts, start = model(TINY, threads=1), random.Random(time.time_ns()), Counter(), time.perf_counter()
    with tiny.engine(max_batch=4, max_batch_tokens=64, page_size=4, cache_tokens=400, timeline_steps=10) as engine:
        right = gist(engine.generate([5, 6, 7], max_tokens=3))
        while time.perf_counter() - start < SECONDS:
            params = {"max_tokens": 3, "seed": 1, "overflow": dice.choice(["error", "error", "truncate", "sliding"])}
            for _ in range(dice.choice([1, 1, 2, 3])):
                name = dice.choice(NUMBERS + OTHERS)
                params[name] = any_value(dice, name)
            if isinstance(params.get("num_beams"), int) and 8 < params["num_beams"] < 2000:
                params["num_beams"] = 8  # more take seconds
            if isinstance(params["overflow"], str) and params["overflow"] == "sliding":
                params["max_tokens"] = 3  # else it may go on for days
            prompt = params.pop("prompt", [5, 6, 7])
            own = {name: params[name] for name in params if name not in ("priority", "timeout_s")}
            counts["requests"] += 1
            texts = [attempt(tiny.generate, prompt, own), attempt(engine.generate, prompt, own)]
            counts["late"] += attempt(engine.generate, prompt, params) == "late"
            is_random = own["seed"] is None
            if not (is_random or "num_beams" in own or (isinstance(texts[0], list) and len(texts[0]) > 4)):
                assert texts[0] == texts[1], (params, texts)
            counts["texts"] += not isinstance(texts[0], str)
            if counts["requests"] % 100 == 0:
                assert gist(engine.generate([5, 6, 7], max_tokens=3)) == right
        assert gist(engine.generate([5, 6, 7], max_tokens=3)) == right
    check(engine)
    print(f"\n{dict(counts)} in {time.perf_counter() - start:.0f} s")


# -- many threads ------------------------------------------------------------------------------------------------------

KINDS = ["result", "result", "stream", "slow", "async", "cancel", "abandon", "late", "bad", "worse", "refused"]
REQUESTS, THREADS = 15_000, 200


def test_fifteen_thousand_requests_over_two_hundred_threads():
    """0 wrong texts, 0 lost pages, and memory as flat as without them."""
    tiny, counts, wrong, numbers = model(TINY, "auto", threads=1), Counter(), [], iter(range(REQUESTS))
    lock, memory, start = threading.Lock(), [], time.perf_counter()
    beginnings = [(5, 5, 5, 5, number) for number in range(3, 8)] + [
        (6, 6, 6, 6, 6, number, 9) for number in range(3, 8)
    ]
    for prompt in beginnings:
        for which in range(len(PARAMS)):
            for max_tokens in (3, 9):
                alone(prompt, which, max_tokens, "auto")

    def raises(error):
        def bad(*_):
            raise error

        return bad

    def one(engine, number):
        dice = random.Random(number)
        kind, prompt, which = dice.choice(KINDS), dice.choice(beginnings), dice.randrange(len(PARAMS))
        max_tokens = dice.choice([3, 9])
        request, expected = (
            {"max_tokens": max_tokens, "ignore_eos": True, **PARAMS[which]},
            alone(prompt, which, max_tokens, "auto"),
        )
        if "n" in request and kind in ("stream", "slow", "async", "cancel", "abandon"):
            kind = "result"
        counts[kind] += 1
        outs = None
        try:
            if kind == "result":
                outs = engine.generate(list(prompt), priority=dice.randint(-1, 1), **request)
            elif kind == "async":
                outs = asyncio.run(engine.agenerate(list(prompt), **request))
            elif kind == "refused":
                engine.submit(list(prompt), **{**request, dice.choice(["priority", "n", "seed"]): 10**400})
            elif kind == "late":
                engine.generate(list(prompt), timeout_s=1e-9, **request)
            elif kind == "bad":
                engine.generate(list(prompt), **{**request, "processors": [raises(SystemExit())]})
            elif kind == "worse":
                engine.generate(list(prompt), **{**request, "strategy": lambda *_: engine.generate([5])})
            else:
                stream = engine.stream(list(prompt), **request)
                tokens = []
                for chunk in stream:
                    tokens.append(chunk.token_id)
                    if kind == "slow":
                        time.sleep(0.003)
                    if kind == "abandon" and len(tokens) == 2:
                        return
                    if kind == "cancel" and len(tokens) == 2:
                        stream.cancel()
                outs = stream.result()
                if tokens != outs.token_ids:
                    wrong.append((number, kind, tokens))
        except RequestCancelled:
            counts["cancelled"] += 1
            return
        except GenerationError:
            counts["errors"] += 1
            if kind not in ("refused", "late", "bad", "worse"):
                raise
            return
        if outs is not None and ([*map(gist, outs)] if isinstance(outs, list) else gist(outs)) != expected:
            wrong.append((number, kind, outs))
        elif kind in ("refused", "late", "bad", "worse"):
            wrong.append((number, kind, "went through"))

    def work(engine):
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            if number % (REQUESTS // 6) == REQUESTS // 6 - 1:
                gc.collect()
                memory.append(memory_bytes())
            try:
                one(engine, number)
            except BaseException as error:
                wrong.append((number, "escaped", error))

    with tiny.engine(
        max_batch=32, max_batch_tokens=256, page_size=4, cache_tokens=240, max_unread=2, timeline_steps=10
    ) as engine:
        threads = [threading.Thread(target=work, args=(engine,)) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    check(engine)
    print(f"\n{REQUESTS} requests on {THREADS} threads in {time.perf_counter() - start:.0f} s: {dict(counts)}")
    lost, rss = engine._worker.pool.in_use, [round(each / 2**20, 1) for each in memory]
    print(f"{len(wrong)} wrong, {lost} pages lost, RSS in MiB {rss}")
    now = engine.metrics.snapshot()
    print({name: now[name] for name in ("num_preemptions", "request_success", "engine_faults")})
    assert wrong == []
    assert memory[-1] - memory[1] < 4 << 20
