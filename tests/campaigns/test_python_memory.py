"""One allocation of Python's fails in a request: an error of ours or a MemoryError, and the next request is right.

`_testcapi.set_nomemory` lets the n-th allocation of the interpreter fail. Each point is a forked process, because
CPython or NumPy itself may not survive; such points are counted apart. A point may also be one whose failure CPython
ignores (a cache, a freelist), or lie after the request's end: then the result must be right.
"""

import collections
import json
import os
import signal
import sys

import pytest
from engine_checks import check, until
from helpers import run_python

from bitnet_ref.backends.cpu.extension import why_unavailable

pytest.importorskip("_testcapi", reason="this Python has no _testcapi")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks a process with threads")

SETTINGS = {"max_tokens": 2, "temperature": 0.0}
POINTS = {"model": range(0, 4000, 23), "engine": range(0, 6000, 41)}  # a request makes some 3,500 allocations


def child(model, n, through_engine, expected):
    """What the n-th failing allocation does. Runs in a process of its own."""
    import _testcapi

    from bitnet_ref.errors import BitNetRefError, EngineClosed

    engine = model.engine(max_batch=2, cache_tokens=128) if through_engine else None
    generate = engine.generate if engine else model.generate
    if engine:
        assert generate("Once", **SETTINGS).text == expected
    error = result = None
    _testcapi.set_nomemory(n, n + 1)
    try:
        result = generate("Once", **SETTINGS)
    except BaseException as problem:
        error = problem
    _testcapi.remove_mem_hooks()
    assert error is not None or result.text == expected, "a wrong text"
    known = isinstance(error, BitNetRefError | MemoryError)
    outcome = "went on" if error is None else "ours" if known else f"{type(error).__name__}: {error}"
    if engine:
        until(lambda: engine.closed or not engine.metrics.snapshot()["num_requests_running"])
        if engine.closed:  # its own books could not be kept: it says so, and the model serves on
            outcome, generate = "engine closed", model.generate
    assert generate("Once", **SETTINGS).text == expected, "the next request is wrong"
    if outcome == "engine closed":
        with pytest.raises(EngineClosed, match="MemoryError"):
            engine.generate("Once", **SETTINGS)
    elif engine:
        check(engine)
        engine.close()
    return outcome


def campaign(path):
    import bitnet_ref

    model = bitnet_ref.load("storyteller", backend="cython", threads=1)
    expected = [model.generate("Once", **SETTINGS).text for _ in range(2)][1]
    outcomes = collections.Counter()
    for n in POINTS[path]:
        read, write = os.pipe()
        if (pid := os.fork()) == 0:
            signal.alarm(60)
            try:
                text = child(model, n, path == "engine", expected)
            except BaseException as error:
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


CODE = """
import json, sys
sys.path[:0] = sys.argv[2:]
from test_python_memory import campaign
print(json.dumps(campaign(sys.argv[1])))
"""


@pytest.mark.slow
@pytest.mark.parametrize("path", list(POINTS))
def test_a_failing_allocation_fails_one_request(path):
    """At most one in ten ends the process or an engine. Seen: 12 engines of 344, and one crash in Python's allocator,
    long after the failure, which PYTHONMALLOC=debug does not see."""
    here = os.path.dirname(__file__)
    outcomes = run_python(CODE, path, here, os.path.dirname(here))
    points = sum(outcomes.values())
    print(f"{path}: {points} points: {json.dumps(outcomes)}")
    assert outcomes["ours"] > 20
    assert not [text for text in outcomes if text.startswith("broken")]
    assert points - outcomes["ours"] - outcomes["went on"] <= points // 10


REFERENCES = """
import json, sys
sys.path[:0] = sys.argv[1:]
import _testcapi
import numpy as np
from test_arguments import _cpu, good_calls

points, wrong = 0, []
for name, call in good_calls().items():
    call = {**call, **({"tape": None} if "tape" in call else {})}
    objects = [value for value in call.values() if isinstance(value, np.ndarray)]
    objects += [item for value in call.values() if isinstance(value, list) for item in value]
    for n in range(80):
        before = [sys.getrefcount(each) for each in objects]
        error = None
        _testcapi.set_nomemory(n, n + 1)
        try:
            getattr(_cpu, name)(**call)
        except BaseException as problem:
            error = problem
        _testcapi.remove_mem_hooks()
        points, kind = points + (error is not None), type(error)
        del error
        if before != [sys.getrefcount(each) for each in objects] or kind not in (type(None), MemoryError):
            wrong.append([name, n, kind.__name__])
print(json.dumps([points, wrong]))
"""


@pytest.mark.skipif(why_unavailable() is not None, reason="the extension is not built")
def test_a_kernel_call_that_fails_leaks_no_reference():
    tests = os.path.dirname(os.path.dirname(__file__))
    points, wrong = run_python(REFERENCES, tests, os.path.join(tests, "kernels"))
    print(f"{points} calls of kernels failed")
    assert points > 100
    assert not wrong
