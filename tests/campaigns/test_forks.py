"""A process is forked at any moment of another thread's first text: the child gives the same text, and never hangs."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys, threading, time, faulthandler
import bitnet_ref

PARAMS = {"temperature": 0.8, "seed": 1, "stop": ["zz"], "bad_words": ["fox"], "logprobs": 3, "max_tokens": 6}

def work(model=None):
    model = model or bitnet_ref.load("storyteller")
    out = model.generate("Once", **PARAMS)
    return out.text, out.logprobs

delay_s, shares = float(sys.argv[1]), sys.argv[2] == "shared"
model = bitnet_ref.load("storyteller") if shares else None
texts = []
thread = threading.Thread(target=lambda: texts.append(work(model)))
thread.start()
time.sleep(delay_s)
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    faulthandler.dump_traceback_later(30, exit=True)
    os.write(writer, repr(work(model)).encode())
    os._exit(0)
os.close(writer)
_, status = os.waitpid(child, 0)
thread.join()
with open(reader, "rb") as answer:
    assert status == 0 and answer.read().decode() == repr(texts[0]), (status, texts)
"""


def fork_after(delay_s, what):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(delay_s), what], capture_output=True, text=True, timeout=120, check=False
    )
    return None if done.returncode == 0 else f"{what} after {delay_s * 1000:.0f} ms: {done.stderr[-1500:]}"


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["own", "shared"])
def test_a_fork_during_the_first_text(what):
    assert fork_after(0.03, what) is None


@pytest.mark.slow
def test_forks_at_fifty_moments_of_the_first_text():
    faults = [fork_after(number * 0.008, what) for what in ("own", "shared") for number in range(25)]
    print(f"{len(faults)} forks")
    assert not [fault for fault in faults if fault is not None]
