"""One allocation of Python's fails in a request: an error of ours or a MemoryError, and the next request is right.

    PYTHONPATH=tests python tests/campaigns/test_python_memory.py engine        # every point; "engine 7": every 7th
    PYTHONPATH=tests python tests/campaigns/test_python_memory.py engine 1 275  # point 275, and where it is

A request makes some 2,000 allocations, in the thread of its caller and in the engine's; nomemory.c lets the n-th of one
of them fail. Each point is a forked process, because CPython or NumPy itself may not survive. A point may be one
whose failure CPython ignores (a cache, a freelist); then the result must be right.
"""

import collections
import ctypes
import faulthandler
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest
from engine_checks import check, until
from helpers import ASSETS, raw_safetensors, run_python

from bitnet_ref.backends.cpu.extension import why_unavailable

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks a process with threads")

PROMPT = "Once"
SETTINGS = {"max_tokens": 2, "temperature": 0.8, "seed": 1, "top_k": 40, "top_p": 0.9, "logprobs": 2, "stop": ["zz"]}
SETTINGS |= {"repetition_penalty": 1.1}
# `model.generate`; the thread that calls an engine, and the engine's own. The slow suite takes every `stride`-th point.
STRIDES = {"model": 3, "caller": 5, "engine": 11}
# How CPython, NumPy (ufuncs, reductions and assignments) and sentencepiece report some lacks of memory
NO_MEMORY = ("SystemError: ", "RuntimeError: can't allocate lock", "RuntimeError: Could not allocate list object")
NO_MEMORY += ("TypeError: Unable to convert function return value",)
BEYOND = 50  # so many points that are not reached, one after the other, lie after the request


def small_model(folder):
    """Storyteller's first layer: what all layers do, in a sixth of the points."""
    import bitnet_ref

    shutil.copytree(ASSETS / "storyteller", folder)
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    data = (folder / "model.safetensors").read_bytes()
    body, small, blocks = 8 + int.from_bytes(data[:8], "little"), {}, b""
    for name, entry in json.loads(data[8:body]).items():
        if name == "__metadata__" or (".layers." in name and ".layers.0." not in name):
            continue
        start, end = entry["data_offsets"]
        small[name] = {**entry, "data_offsets": [len(blocks), len(blocks) + end - start]}
        blocks += data[body + start : body + end]
    (folder / "model.safetensors").write_bytes(raw_safetensors(small, blocks))
    return bitnet_ref.load(folder, backend="cython", threads=1)


def gist(out):
    return out.text, out.token_ids, out.logprobs


def child(library, model, path, n, expected):
    """What the n-th failing allocation does, and whether there is one. Runs in a process of its own."""
    from bitnet_ref.errors import BitNetRefError, EngineClosed

    engine = None if path == "model" else model.engine(max_batch=2, cache_tokens=128)
    generate = engine.generate if engine else model.generate
    if engine:
        assert gist(generate("Lazy", **SETTINGS))
    error = result = None
    library.nomemory_arm(n, path == "engine")
    try:
        result = generate(PROMPT, **SETTINGS)
    except BaseException as problem:
        error = problem
    reached = library.nomemory_disarm() >= n
    assert error is not None or gist(result) == expected, "a wrong result"
    known = isinstance(error, BitNetRefError | MemoryError)
    outcome = "went on" if error is None else "ours" if known else f"{type(error).__name__}: {error}"
    if engine:
        until(lambda: engine.closed or not engine.metrics.snapshot()["num_requests_running"])
        if engine.closed:  # its own books could not be kept: it says so, and the model serves on
            outcome, generate = "engine closed", model.generate
    assert gist(generate(PROMPT, **SETTINGS)) == expected, "the next request is wrong"
    if outcome == "engine closed":
        with pytest.raises(EngineClosed, match="MemoryError"):
            engine.generate(PROMPT, **SETTINGS)
    elif engine:
        check(engine)
        engine.close()
    return outcome if reached else ""


def build(folder):
    """nomemory.c as a library, or None without a C compiler."""
    include, target = sysconfig.get_paths()["include"], folder / "nomemory.so"
    command = ["cc", "-shared", "-fPIC", "-O1", f"-I{include}", str(HERE / "nomemory.c"), "-o", str(target)]
    return target if subprocess.run(command, check=False).returncode == 0 else None


def run_point(number, use):
    """What `use` returns in a forked process, or what ended that process."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        signal.alarm(60)
        try:
            text = use(number)
        except BaseException as error:
            text = f"broken: {type(error).__name__}: {error}"
        os.write(write, f"{text}.".encode()[:1000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    status = os.waitpid(pid, 0)[1]
    return text.removesuffix(".") if text else f"died of signal {status & 127}"


def campaign(path, stride=1, only=None):
    """Let every `stride`-th allocation fail, or one and trace it. -> how often each outcome came"""
    outcomes, beyond = collections.Counter(), 0
    with tempfile.TemporaryDirectory() as folder:
        library = ctypes.PyDLL(str(build(Path(folder))))
        library.nomemory_disarm.restype, library.nomemory_arm.argtypes = ctypes.c_long, [ctypes.c_long, ctypes.c_int]
        if only is not None:
            ctypes.c_int.in_dll(library, "nomemory_trace").value = 1
        faulthandler.enable()
        faulthandler.register(signal.SIGALRM, chain=True)
        model = small_model(Path(folder) / "model")
        expected = [gist(model.generate(PROMPT, **SETTINGS)) for _ in range(2)][1]
        for n in itertools.count(1, stride) if only is None else [only]:
            outcome = run_point(n, lambda n: child(library, model, path, n, expected))
            beyond = 0 if outcome else beyond + 1
            outcomes[outcome] += 1
            if outcome not in ("", "ours", "went on"):
                print(n, outcome, file=sys.stderr, flush=True)
            if beyond == BEYOND:
                break
    del outcomes[""]
    return outcomes


CODE = """
import json, sys
sys.path[:0] = sys.argv[3:]
from test_python_memory import campaign
print(json.dumps(campaign(sys.argv[1], int(sys.argv[2]))))
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("path", STRIDES)
def test_a_failing_allocation_fails_one_request(path):
    outcomes = run_python(CODE, path, str(STRIDES[path]), HERE, HERE.parent)
    print(f"{path}: {sum(outcomes.values())} points: {json.dumps(outcomes)}")
    assert outcomes["ours"] > 90
    assert [text for text in outcomes if text not in ("ours", "went on") and not text.startswith(NO_MEMORY)] == []


REFERENCES = """
import json, sys
sys.path[:0] = sys.argv[1:]
import _testcapi
import numpy as np
from test_arguments import _cpu, good_calls

points, wrong = 0, []
for name, call in good_calls().items():
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


if __name__ == "__main__":
    print(json.dumps(campaign(sys.argv[1], *map(int, sys.argv[2:]))))
