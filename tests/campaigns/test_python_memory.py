"""One allocation of Python's fails while a request is computed: an error of ours or a MemoryError, and the next is right.

`_testcapi.set_nomemory` lets the n-th allocation of the interpreter fail. Each point is a forked process, because CPython
or NumPy itself may not survive; such points are counted apart. A point in the middle of a request may also be one whose
failure CPython ignores (a cache, a freelist): then the result must be right.
"""

import collections
import json
import os
import signal
import sys

import pytest
from engine_checks import check, until
from helpers import run_python

pytest.importorskip("_testcapi", reason="this Python has no _testcapi")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="forks a process with threads")]

SETTINGS = {"max_tokens": 2, "temperature": 0.0}
END, STRIDE = 12_000, 61  # a request makes some 4,000 allocations, an engine's some 9,000


def child(model, n, through_engine, expected):
    """What the n-th failing allocation does. Runs in a process of its own."""
    import _testcapi

    from bitnet_ref.errors import BitNetRefError

    engine = model.engine(max_batch=2, cache_tokens=128) if through_engine else None
    generate = engine.generate if engine else model.generate
    if engine:
        assert generate("Once", **SETTINGS).text == expected
    error = result = None
    _testcapi.set_nomemory(n, n + 1)
    try:
        result = generate("Once", **SETTINGS)
    except BaseException as problem:  # noqa: BLE001
        error = problem
    _testcapi.remove_mem_hooks()
    assert error is not None or result.text == expected, "a wrong text"
    outcome = "went on" if error is None else "ours" if isinstance(error, BitNetRefError | MemoryError) else "other"
    if engine:
        until(lambda: not engine.metrics.snapshot()["num_requests_running"])
    assert generate("Once", **SETTINGS).text == expected, "the next request is wrong"
    if engine:
        check(engine)
        engine.close()
    return outcome if outcome != "other" else f"{type(error).__name__}: {error}"


def campaign(through_engine):
    import bitnet_ref

    model = bitnet_ref.load("storyteller", backend="cython", threads=1)
    expected = [model.generate("Once", **SETTINGS).text for _ in range(2)][1]
    outcomes = collections.Counter()
    for n in range(0, END, STRIDE):
        read, write = os.pipe()
        if (pid := os.fork()) == 0:
            signal.alarm(60)
            try:
                text = child(model, n, through_engine, expected)
            except BaseException as error:  # noqa: BLE001
                text = f"broken: {type(error).__name__}: {error}"
            os.write(write, text.encode()[:1000])
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            text = pipe.read()
        status = os.waitpid(pid, 0)[1]
        outcomes[text or f"died of signal {status}"] += 1
        if not text or text.startswith("broken"):
            print(n, text, status, file=sys.stderr)
    return outcomes


CODE = "import json, sys; sys.path[:0] = sys.argv[2:]; import test_python_memory as t; print(json.dumps(t.campaign(sys.argv[1] == 'engine')))"


@pytest.mark.parametrize("path", ["model", "engine"])
def test_a_failing_allocation_fails_one_request(path):
    here = os.path.dirname(__file__)
    outcomes = run_python(CODE, path, here, os.path.dirname(here))
    print(f"{path}: {sum(outcomes.values())} points: {json.dumps(outcomes)}")
    assert outcomes["ours"] > 20
    assert not [text for text in outcomes if text.startswith("broken")]
