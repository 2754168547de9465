"""What tokenizers and chat templates do that load and are hostile; see hostile_texts.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parent / "hostile_texts.py"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limits of a forked child are Linux's")
@pytest.mark.parametrize(("kind", "seeds", "uses"), [("tokenizer", 400, 100), ("template", 40, 100)])
def test_nothing_escapes(kind: str, seeds: int, uses: int) -> None:
    command = [sys.executable, str(CAMPAIGN), kind, "0", str(seeds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    last = json.loads(done.stdout.splitlines()[-1])
    print(last)
    assert (last["done"], last["escapes"]) == (seeds, [])
    used = last["outcomes"]["used" if kind == "tokenizer" else "rendered"]
    assert used > uses, "the generator makes too little that is accepted"
