"""Mutated checkpoints and tokenizers load and compute, or fail with one of our errors; see campaign.py."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parent / "campaign.py"
COUNTS = {"config": 110, "weights": 130, "index": 60, "tokenizer": 60, "gguf": 120, "native": 100, "onnx": 60}
OURS = {"FormatError", "ConfigError", "NumericsError", "TokenizerError", "GenerationError", "OutOfMemory"}


def run_campaign(kind, first, last, timeout_s):
    done = subprocess.run(
        [sys.executable, str(CAMPAIGN), kind, str(first), str(last)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    where = f"{kind}, seed {lines[-1]['seed'] if lines else first}: exit status {done.returncode}"
    assert done.returncode == 0, f"{where}\n{done.stderr[-3000:]}"
    outcomes = Counter(line["outcome"] for line in lines if "outcome" in line)
    assert outcomes.total() == last - first
    assert set(outcomes) <= OURS | {"ok"}
    return outcomes


@pytest.mark.parametrize("kind", COUNTS)
def test_mutants(kind):
    outcomes = run_campaign(kind, 0, COUNTS[kind], timeout_s=300)
    # that the mutations reach something: some files stay usable, most do not
    assert outcomes["ok"] > 0, outcomes
    assert outcomes.total() - outcomes["ok"] > outcomes.total() // 4, outcomes


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("kind", COUNTS)
def test_longer_campaign(kind, part):
    n = 5 * COUNTS[kind]
    run_campaign(kind, 1000 + part * n, 1000 + (part + 1) * n, timeout_s=3000)
