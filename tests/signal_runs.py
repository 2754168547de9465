"""Commands that get a signal."""

import os
import signal
import subprocess
import sys
import time

COMMAND = [sys.executable, "-m", "bitnet_ref.cli"]


def send_after(words, number, delay_s, timeout_s=60):
    """Start the command, send it the signal.   -> (return code, stderr)"""
    process = subprocess.Popen(
        [*COMMAND, *words], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, process_group=0
    )
    time.sleep(delay_s)
    os.killpg(process.pid, number)  # as a terminal does
    try:
        _, said = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    return process.returncode, said.decode()


def fault_of(words, number, delay_s):
    code, said = send_after(words, number, delay_s)
    right = {signal.SIGINT: (130, -signal.SIGINT, 0), signal.SIGTERM: (-15, 0), signal.SIGHUP: (-1, 0)}[number]
    if code in right and "Traceback" not in said:
        return None
    if said.count("bitnet_ref/cli/") == said.count("bitnet_ref/cli/start.py") + said.count("from .start import"):
        return None  # Python itself was starting, up to our first line
    return f"{' '.join(words)}: {number!r} after {delay_s * 1000:.0f} ms: {code} {said[-1000:]}"
