"""Guides that end a process, over HTTP: 400 for their request, and the server answers the others meanwhile."""

import os
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("llguidance")

from server_runs import RunningServer

import bitnet_ref
from bitnet_ref.generation import guide_prover

pytestmark = pytest.mark.skipif(os.name == "nt", reason="no limits on a process there")
TERMINALS = "start: A0\n" + "\n".join(f"A{n}: A{n + 1}" for n in range(5000)) + '\nA5000: "x"'
ASSETS = Path(bitnet_ref.__file__).parent / "assets"
CHAIN = "start: a0\n" + "\n".join(f"a{n}: a{n + 1}" for n in range(5000)) + '\na5000: "x"'
REFERENCES = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(5000)} | {"d5000": {"type": "string"}}
LINKED = {"$ref": "#/$defs/d0", "$defs": REFERENCES}
SLOW = {"allOf": [{"type": "integer", "multipleOf": factor} for factor in (9973, 9967)]}
MANY_PARTS = "start: A\nA: " + " ".join(['"x"?'] * 40_000)
MESSAGES = [{"role": "user", "content": "Hello"}]
ATTACKS = {
    "a chain of rules": ("/v1/completions", {"prompt": "a", "guided_grammar": CHAIN}),
    "a chain of terminals": ("/v1/completions", {"prompt": "a", "guided_grammar": TERMINALS}),
    "references": ("/v1/completions", {"prompt": "a", "guided_json": LINKED}),
    "a long expression": ("/v1/completions", {"prompt": "a", "guided_regex": "a" * (1 << 20)}),
    "many parts": ("/v1/completions", {"prompt": "a", "guided_grammar": MANY_PARTS}),
    "factors": ("/v1/completions", {"prompt": "a", "guided_json": SLOW}),
    "a response format": ("/v1/chat/completions", {
        "messages": MESSAGES,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": LINKED}},
    }),
}  # fmt: skip


@pytest.fixture(scope="module")
def server():
    with RunningServer({"storychat": ASSETS / "storychat"}) as running:
        yield running


@pytest.mark.thorough
def test_each_is_refused_and_the_others_do_not_wait(server, monkeypatch):
    monkeypatch.setattr(guide_prover, "_prover", guide_prover.Prover())
    faults, slowest_s, done = [], [0.0], threading.Event()

    def watch():
        while not done.is_set():
            started = time.monotonic()
            status, _, _ = server.get("/health")
            slowest_s[0] = max(slowest_s[0], time.monotonic() - started)
            if status != 200:
                faults.append(status)
            time.sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for name, (path, body) in ATTACKS.items():
            status, _, answer = server.post(path, {**body, "max_tokens": 4})
            assert status == 400, (name, status, answer)
            given = {"guided_grammar", "guided_json", "guided_regex", "response_format", "structured_outputs", "tools"}
            assert answer["error"]["param"] in given & body.keys(), (name, answer)
    finally:
        done.set()
        watcher.join()
        guide_prover._prover.stop()
    assert not faults
    assert slowest_s[0] < 5  # seconds on a busy machine; the guides take minutes


def test_half_of_a_pair_is_no_fault_of_the_server(server):
    bodies = [
        ("/v1/completions", {"prompt": "\ud800"}),
        ("/v1/completions", {"prompt": "a", "stop": ["\udfff"]}),
        ("/v1/completions", {"prompt": "a", "user": "\ud800"}),
        ("/v1/completions", {"prompt": "a", "model": "\ud800"}),
        ("/v1/completions", {"prompt": "a", "\ud800": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}),
        ("/v1/chat/completions", {"messages": MESSAGES, "chat_template_kwargs": {"\ud800": "x"}}),
        ("/v1/embeddings", {"input": ["a", "\ud800"]}),
        ("/tokenize", {"prompt": "\ud800"}),
    ]
    for path, body in bodies:
        status, _, answer = server.post(path, body)
        assert status == 400, (path, body, answer)
        assert "surrogate" in answer["error"]["message"]
