"""Signals at any moment of a command: no traceback, the exit code says it, and no process is left."""

import os
import signal
import subprocess
import sys
import time

import pytest
from signal_runs import COMMAND, fault_of

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals as POSIX has them")


@pytest.mark.sample(3)
@pytest.mark.parametrize("delay_s", [0.1, 0.2, 0.3])
def test_ctrl_c_while_a_command_starts(delay_s):
    assert fault_of(["generate", "Once", "--max-tokens", "100000"], signal.SIGINT, delay_s) is None


LINES_OF_THE_START = [
    "from .program import cli",
    "import click",
    "def cli",
    "def main",
    "main(args",
    "prepare_streams()",
    "threading.current_thread()",
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("word", LINES_OF_THE_START)
def test_ctrl_c_at_a_line_of_the_start(word):
    code = f"""
import signal, sys
def trace(frame, event, argument):
    path, line = frame.f_code.co_filename, frame.f_lineno
    if "bitnet_ref" + "/cli/" in path and "start.py" not in path:
        if event == "line" and {word!r} in open(path).read().splitlines()[line - 1]:
            sys.settrace(None)
            print("here", flush=True)
            signal.raise_signal(signal.SIGINT)
        return trace
sys.settrace(trace)
from bitnet_ref.cli import main
main(["--help"])
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.stdout.startswith("here")
    assert (ended.returncode, ended.stderr) in [(130, ""), (130, "Aborted!\n")]


def wait_for(path, seconds=30):
    deadline = time.monotonic() + seconds
    while not (path.is_file() and path.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return int(path.read_text())


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().split()[2] != "Z"


@pytest.mark.sample(6)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1])
def test_what_watch_has_started_ends_with_it(tmp_path, number):
    script = tmp_path / "engine.sh"
    script.write_text(f"sleep 300 &\necho $! > {tmp_path}/inner\necho $$ > {tmp_path}/outer\nwait\n")
    process = subprocess.Popen(
        [*COMMAND, "crossval", "watch", "--", "sh", str(script)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        children = [wait_for(tmp_path / name) for name in ("outer", "inner")]
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
        assert b"Traceback" not in errors
        assert process.returncode == (130 if number == signal.SIGINT else -number)
        deadline = time.monotonic() + 10
        while any(map(is_alive, children)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(map(is_alive, children))
    finally:
        process.kill()
        process.communicate()  # else its pipe and its end are noticed in a later test


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT])
def test_a_signal_that_comes_while_a_command_starts(number, tmp_path):
    code = (
        "import os, subprocess\n"
        "from bitnet_ref.cli.signals import ending_signals, run_to_end\n"
        "class Struck(subprocess.Popen):\n"
        "    def __init__(self, *command, **options):\n"
        "        super().__init__(*command, **options)\n"
        "        print(self.pid, flush=True)\n"
        f"        os.kill(os.getpid(), {int(number)})\n"
        "        for _ in range(100): pass\n"
        "subprocess.Popen = Struck\n"
        "with ending_signals():\n"
        "    run_to_end(['sleep', '300'])\n"
    )
    with open(tmp_path / "pid", "w") as out:
        done = subprocess.run([sys.executable, "-c", code], stdout=out, stderr=subprocess.DEVNULL, check=False)
    assert done.returncode == -number
    pid = wait_for(tmp_path / "pid")
    try:
        assert not is_alive(pid)
    finally:
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_a_signal_that_is_ignored_stays_so(tmp_path):
    """As nohup starts a program."""
    code = "import signal, runpy, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); sys.argv[0] = 'x';"
    code += "from bitnet_ref.cli.signals import ending_signals\n"
    code += "with ending_signals(): print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_destructor_is_not_lost(number):
    """Python ignores what is raised there."""
    code = (
        "import os, time\n"
        "from bitnet_ref.cli.signals import ending_signals\n"
        "class Deaf:\n"
        "    def __del__(self):\n"
        f"        os.kill(os.getpid(), {int(number)})\n"
        "        for _ in range(100): pass\n"
        "with ending_signals():\n"
        "    Deaf()\n"
        "    time.sleep(20)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=15, check=False)
    assert done.returncode == -number
    assert "Exception ignored" not in done.stderr
