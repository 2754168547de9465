"""The line of the log that each request leaves, answered or refused, and its id."""

import json
import logging

import pytest
from server_runs import RunningServer, until

from bitnet_ref.formats.open import ASSETS
from bitnet_ref.serving.http import server as server_module
from bitnet_ref.serving.http.admission import ServerLimits
from bitnet_ref.serving.http.request_log import JsonLines

KEY = {"authorization": "Bearer k"}
PROMPT = {"model": "storyteller", "prompt": "Once upon a time", "max_tokens": 4}


@pytest.fixture(scope="module")
def server():
    options = {"api_keys": ("k",), "hosts": ("127.0.0.1",), "origins": ("https://a.example",)}
    with RunningServer(
        {"storyteller": ASSETS / "storyteller"}, ServerLimits(max_body_bytes=2000), **options
    ) as running:
        yield running


@pytest.fixture
def last_line(caplog):
    """The facts of the one request that was made."""
    caplog.set_level(logging.DEBUG, "bitnet_ref.requests")

    def read():
        until(lambda: any(hasattr(each, "facts") for each in caplog.records))
        (record,) = [each for each in caplog.records if hasattr(each, "facts")]
        caplog.clear()
        assert record.getMessage() == " ".join(record.getMessage().splitlines())
        written = json.loads(JsonLines().format(record))
        assert {name: written.pop(name) for name in ("level", "logger")} == {
            "level": record.levelname,
            "logger": "bitnet_ref.requests",
        }
        assert written.pop("time")
        assert written == record.facts
        return record.facts | {"level": record.levelname}

    return read


def test_a_request_has_one_line(server, last_line):
    for stream in (False, True):
        status, headers, _ = server.post("/v1/completions", {**PROMPT, "n": 2, "stream": stream}, **KEY)
        line = last_line()
        assert (status, headers["x-request-id"]) == (200, line.pop("id"))
        times = [line.pop(name) for name in ("queue_s", "first_token_s", "total_s")]
        assert times == sorted(times)
        assert line.pop("cached_tokens") in (0, 4)
        facts = {"method": "POST", "path": "/v1/completions", "status": 200, "client": "127.0.0.1", "level": "INFO"}
        assert line == facts | {"model": "storyteller", "prompt_tokens": 5, "completion_tokens": 8}


def test_anthropics_clients_look_for_another_header(server, last_line):
    headers = server.post("/v1/messages", {"messages": []}, **KEY)[1]
    assert last_line()["id"] == headers["request-id"] == headers["x-request-id"]


def test_beams_and_vectors(server, last_line):
    server.post("/v1/completions", {**PROMPT, "n": 3, "use_beam_search": True}, **KEY)
    line = last_line()
    assert (line["prompt_tokens"], line["completion_tokens"]) == (5, 12)
    for path, body in (
        ("/v1/embeddings", {"input": "Once upon a time"}),
        ("/api/embed", {"input": "Once upon a time"}),
        ("/score", {"text_1": "Alice", "text_2": "rabbit"}),
    ):
        server.post(path, {"model": "storyteller", **body}, **KEY)
        line = last_line()
        assert line["prompt_tokens"] >= 5
        assert "completion_tokens" not in line


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "model", "error"),
    [
        ("/v1/completions", PROMPT, {}, 401, None, "invalid_api_key"),
        ("/v1/completions", {**PROMPT, "model": "x\n=1"}, KEY, 404, "x\n=1", "model"),
        ("/v1/completions", {**PROMPT, "tempature": 1}, KEY, 400, "storyteller", "tempature"),
        ("/v1/completions", {"prompt": "x" * 3000}, KEY, 413, None, "invalid_request_error"),
        ("/v1/completions", {**PROMPT, "max_tokens": 5000}, KEY, 400, "storyteller", "context_length_exceeded"),
        ("/no/%0Asuch", {}, KEY, 404, None, "not_found_error"),
        ("/v1/completions", PROMPT, {"host": "evil.example"}, 400, None, "invalid_request_error"),
    ],
)
def test_refused_requests_have_a_line_too(server, last_line, path, body, headers, status, model, error):
    got, answered, _ = server.post(path, body, x_request_id="mine", **headers)
    line = last_line()
    assert (got, line["status"], line.get("model"), line["error"]) == (status, status, model, error)
    assert (answered["x-request-id"], line["id"], line["level"]) == ("mine", "mine", "INFO")


def test_a_fault_has_an_id_too(server, last_line, monkeypatch):
    monkeypatch.setattr(server_module, "embedding_response", lambda *_: 1 / 0)
    status, headers, _ = server.post("/v1/embeddings", {"input": "x"}, origin="https://a.example", **KEY)
    line = last_line()
    assert (status, line["status"], headers["x-request-id"], line["error"]) == (500, 500, line["id"], "server_error")


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "é"])
def test_an_id_that_cannot_be_written_is_replaced(server, last_line, given):
    _, headers, _ = server.get("/health", x_request_id=given.encode("latin-1"))
    line = last_line()
    assert headers["x-request-id"] == line["id"] != given
    assert line["level"] == "DEBUG"  # it is asked for all the time


def test_a_stream_whose_client_leaves(last_line):
    with RunningServer({"storyteller": ASSETS / "storyteller"}) as running:
        connection = running.open_request("/v1/completions", {**PROMPT, "max_tokens": 200, "stream": True})
        connection.recv(1000)
        connection.close()
        line = last_line()
    assert (line["status"], line["error"]) == (200, "client_gone")
    assert line["completion_tokens"] < 200


def test_other_records_as_json():
    try:
        raise ValueError("x\ny")
    except ValueError as error:
        record = logging.LogRecord("a", logging.ERROR, "", 0, "failed: %s", ("z\n",), (type(error), error, None))
    line = JsonLines().format(record)
    assert "\n" not in line
    assert json.loads(line)["message"] == "failed: z\n"
    assert json.loads(line)["exception"] == "ValueError: x\ny"
