"""The end of a server whose requests are not finished when the drain time is over."""

import gc
import json
import logging
import socket
import threading
import time

import pytest
from server_runs import RunningServer, until

from bitnet_ref.errors import EngineClosed
from bitnet_ref.formats.open import ASSETS
from bitnet_ref.serving.http import draining
from bitnet_ref.serving.http import server as server_module

STORY = {"storyteller": ASSETS / "storyteller"}
LONG = {"prompt": "Once upon a time", "max_tokens": 250, "ignore_eos": True}


@pytest.fixture
def log_lines(caplog):
    """Returns (path, status, error) of each request of the log, sorted; checks that the log has no traceback."""
    caplog.set_level(logging.INFO, "bitnet_ref.requests")

    def read():
        assert "Traceback" not in caplog.text
        facts = [record.facts for record in caplog.records if hasattr(record, "facts")]
        return sorted((line["path"], line["status"], line["error"]) for line in facts)

    return read


@pytest.fixture
def collect_garbage():
    """After the test, so that transport and socket to a client that does not read warn while the test ignores it."""
    yield
    gc.collect()


def read_all(connection):
    """-> head, body"""
    data = b""
    while part := connection.recv(1 << 16):
        data += part
    connection.close()
    return data.split(b"\r\n\r\n", 1)


def assert_503(connection, message):
    head, body = read_all(connection)
    assert head.startswith(b"HTTP/1.1 503 "), head
    assert b"\r\nretry-after: 5" in head
    error = json.loads(body)["error"]
    assert (error["type"], message in error["message"]) == ("server_error", True), error


def test_unfinished_texts_get_an_error(log_lines, monkeypatch):
    """One stream has begun; another one and a whole text wait."""
    monkeypatch.setattr(draining, "GRACE_S", 120)  # the machine may pause this process
    with RunningServer(STORY, settings={"max_batch": 2}, drain_s=1) as server:
        engine, is_held = server.engines["storyteller"], threading.Event()

        def hold(ids, logits, generator):
            """Makes steps slow, then holds one until the engine is closed."""
            time.sleep(0.05)
            while is_held.is_set() and not engine.closed:
                time.sleep(0.005)
            return 5

        holder = engine.submit("Alice", strategy=hold, max_tokens=250)
        begun = server.open_request("/v1/completions", {**LONG, "stream": True})
        assert begun.recv(12) == b"HTTP/1.1 200"
        is_held.set()
        waiting = [server.open_request("/v1/completions", {**LONG, "stream": stream}) for stream in (False, True)]
        until(lambda: engine.metrics.snapshot()["num_requests_waiting"] == 2)
        server.uvicorn.should_exit = True
        for connection in waiting:
            assert_503(connection, "the engine was closed before request")
        body = read_all(begun)[1]
        assert b'data: {"error":{"message":"the engine was closed before request' in body
        assert body.endswith(b"0\r\n\r\n")
        with pytest.raises(EngineClosed):
            holder.result()
    failed = ("/v1/completions", 503, "server_error")
    assert log_lines() == [("/v1/completions", 200, "failed_in_stream"), failed, failed]


@pytest.mark.filterwarnings("ignore:unclosed transport", "ignore:unclosed <socket")
@pytest.mark.usefixtures("collect_garbage")
def test_what_still_runs_after_the_grace_is_cut_off(log_lines, monkeypatch):
    """Vectors that take long, a body that is not sent whole, and a client that does not read."""
    monkeypatch.setattr(draining, "GRACE_S", 0)
    release, has_begun = threading.Event(), threading.Event()
    monkeypatch.setattr(server_module, "embed", lambda *_, **options: has_begun.set() or release.wait())
    try:
        with RunningServer(STORY, settings={"max_unread": 4}, drain_s=0) as server:
            vectors = server.open_request("/v1/embeddings", {"input": "x"})
            unsent = socket.create_connection(("127.0.0.1", server.port), 30)
            head = "POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n"
            unsent.sendall(head.encode() + b"{")
            texts = {**LONG, "logprobs": 20, "stream": True, "n": 8}
            unread = server.open_request("/v1/completions", texts, receive_buffer=2048)
            until(lambda: server.engines["storyteller"].metrics.snapshot()["num_requests_paused"] == 8)
            state = server.uvicorn.server_state
            until(lambda: any(each.flow.write_paused for each in state.connections))  # not its reader alone is behind
            until(lambda: has_begun.is_set() and len(state.tasks) == 3)
            server.uvicorn.should_exit = True
            for connection in (vectors, unsent):
                assert_503(connection, "the server ended before the request was finished")
        unread.close()
    finally:
        release.set()
    failed = [(path, 503, "server_error") for path in ("/tokenize", "/v1/embeddings")]
    assert log_lines() == [failed[0], ("/v1/completions", 200, "server_ended"), failed[1]]
