"""HUP, INT and TERM in the first second of commands, at 50 moments: no traceback, the right exit code, nothing left."""

import signal

import pytest
from signal_runs import fault_of

WORDS = {
    "generate": ["generate", "Once", "--max-tokens", "100000"],
    "doctor": ["doctor"],
    "inspect": ["inspect", "storyteller"],
    "serve": ["serve", "--port", "0"],
    "chat": ["chat"],
    "list": ["list"],
    "bench": ["bench", "storyteller"],
    "batch": ["batch", "{folder}/in.jsonl", "{folder}/out.jsonl"],
    "batch --workers": ["batch", "{folder}/in.jsonl", "{folder}/out.jsonl", "--workers", "1"],
    "perplexity": ["perplexity", "{folder}/text.txt"],
    "embed": ["embed", "{folder}/text.txt"],
    "crossval watch": ["crossval", "watch", "--", "sleep", "30"],
}
LINE = (
    '{"custom_id": "%d", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once", "max_tokens": 200}}\n'
)


@pytest.mark.slow
@pytest.mark.parametrize("name", WORDS)
def test_signals_in_the_first_second(name, tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(LINE % number for number in range(40)))
    (tmp_path / "text.txt").write_text("The fox went home. " * 400)
    words = [word.format(folder=tmp_path) for word in WORDS[name]]
    moments = [
        (number, place * 0.06) for place in range(17) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ]
    faults = [fault_of(words, number, delay_s) for number, delay_s in moments[:50]]
    print(f"{name}: {len(faults)} signals")
    assert not [fault for fault in faults if fault is not None]
