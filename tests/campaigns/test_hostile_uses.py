"""Damaged and forged files that are accepted are then used: prepared weights, traces, receipts, configs, models."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import bitnet_ref

CAMPAIGN = Path(__file__).parent / "hostile_uses.py"
NO_CYTHON = bitnet_ref.available_backends()["cython"]
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the limits of a forked child are Linux's"),
    pytest.mark.skipif(NO_CYTHON is not None, reason=str(NO_CYTHON)),
]
COUNTS = {"prepared": 1300, "trace": 500, "receipt": 250, "sizes": 2500, "accepted": 1000}


def run_campaign(kind, first, count, folder):
    command = [sys.executable, str(CAMPAIGN), kind, str(first), str(first + count), "--keep", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    last = json.loads(done.stdout.splitlines()[-1])
    print(last)
    assert (last["done"], last["finds"]) == (count, [])
    used = sum(number for outcome, number in last["outcomes"].items() if outcome.startswith("ok"))
    assert used > 0, "none is accepted"
    assert used < count or kind == "prepared", "none is refused"


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["sizes", "prepared", "trace"])
def test_a_few(kind, tmp_path):
    run_campaign(kind, 50, 8 if kind == "trace" else 20, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", COUNTS)
def test_nothing_escapes(kind, tmp_path):
    if kind == "accepted":
        pytest.importorskip("onnx", reason="needs the onnx package: pip install 'bitnet-ref[onnx]'")
    run_campaign(kind, 1_000_000, COUNTS[kind], tmp_path)
