"""Commands in a memory cgroup that is too small: pytest -m slow -n0 -s tests/campaigns/test_memory_limits.py

The system kills processes of such a cgroup, whichever it likes: workers, helpers, or the command. Skipped where no
cgroup can be made.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from signal_runs import COMMAND

NO_DASK = "distributed is not installed: pip install 'bitnet-ref[dask]'"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("distributed") is None, reason=NO_DASK)]
MIB = 1 << 20
ROOTS = {"memory.max": Path("/sys/fs/cgroup"), "memory.limit_in_bytes": Path("/sys/fs/cgroup/memory")}
WHY = {503: "is memory short", 504: "is the machine busy"}
HUGE_GUIDE = {"allOf": [{"type": "integer", "multipleOf": factor} for factor in (9973, 9967)]}


@pytest.fixture
def limited():
    """(words, bytes) -> a process in a cgroup of so much memory."""
    folders, processes = [], []

    def start(words, limit):
        for name, root in ROOTS.items():
            folder = root / f"bitnet_ref-{os.getpid()}-{time.monotonic_ns()}"
            try:
                if not (root / "cgroup.procs").exists():  # a plain folder
                    continue
                folder.mkdir()
                (folder / name).write_text(str(limit))
            except OSError:
                continue
            folders.append(folder)
            inside = f'echo $$ > {folder}/cgroup.procs; exec "$@"'
            command = ["sh", "-c", inside, "sh", *COMMAND, *words]
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
            return processes[-1]
        pytest.skip("no cgroup with a limit on memory can be made here")

    yield start
    for process in processes:
        process.kill()
        process.communicate()
    for folder in folders:
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        with contextlib.suppress(OSError):  # it is still ending
            folder.rmdir()


def test_a_batch_goes_on_where_memory_ended_it(limited, tmp_path):
    source, results = tmp_path / "in.jsonl", Counter()
    body = {"prompt": "Once upon a time", "max_tokens": 8}
    lines = [{"custom_id": str(n), "url": "/v1/completions", "body": {**body, "seed": n}} for n in range(60)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    subprocess.run([*COMMAND, "batch", str(source), str(tmp_path / "right")], check=True, capture_output=True)
    limits = (160, 200, 240, 300, 400)
    for limit in limits:
        out = tmp_path / f"{limit}"
        process = limited(["batch", "--workers", "2", str(source), str(out)], limit * MIB)
        _, errors = process.communicate(timeout=600)
        results[process.returncode] += 1
        assert process.returncode in (0, 4, -signal.SIGKILL), errors
        print(f"{limit} MiB: exit code {process.returncode}")
        assert "Traceback" not in errors
        if process.returncode:
            subprocess.run([*COMMAND, "batch", str(source), str(out)], check=True, capture_output=True)
        assert out.read_bytes() == (tmp_path / "right").read_bytes()
    print(f"\nexit codes of {len(limits)} limits: {dict(results)}")
    assert results[0] > 0


def test_a_helper_that_is_killed_refuses_its_request_alone(limited):
    process = limited(["serve", "--port", "0", "storyteller"], 220 * MIB)
    url = re.search(r"http://\S+:\d+", process.stdout.readline()).group()

    def ask(**more):
        data = json.dumps({"prompt": "Once", "max_tokens": 8, "temperature": 0, **more}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, json.loads(answer.read())["choices"][0]["text"]
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())["error"]["message"]

    right = ask()
    for _ in range(10):
        status, message = ask(guided_json=HUGE_GUIDE)
        assert WHY[status] in message
        assert ask() == right
    assert ask(guided_regex="[0-9]{3}")[0] == 200
    process.terminate()
    assert process.wait(60) == 0
